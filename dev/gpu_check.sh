#!/usr/bin/env bash
# Runs the tests that need a GPU, and keeps the numbers that they print in results/gpu/. The Python is .venv's if it is there;
# else python3, if its torch sees a card and it has the other packages that are needed; else .venv's, which `make setup` makes.
#
#   bash dev/gpu_check.sh --lf      # only what failed before; flags: those of pytest
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
if [ ! -x "$python" ]; then
  needed="import torch, transformers, accelerate, peft, tyro, pytest; assert torch.cuda.is_available()"
  if python3 -c "$needed" 2> /dev/null; then
    python=python3
  else
    make setup
  fi
fi
mkdir -p results/gpu
"$python" -m pytest -m gpu -q -rs tests/project/test_gpu.py "$@" | tee "results/gpu/$(date +%F-%H%M).txt"
