#!/usr/bin/env bash
# Tries this project on one GPU: dev/gpu_check.py in a Python that sees the card. That is .venv's if it is there; else python3,
# if its torch sees a card and it has the other packages that are needed; else .venv's, which `make setup` makes.
#
#   bash dev/gpu_check.sh --minutes 9      # flags: python -m dev.gpu_check --help
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
if [ ! -x "$python" ]; then
  needed="import torch, transformers, accelerate, peft, tyro; assert torch.cuda.is_available()"
  if python3 -c "$needed" 2> /dev/null; then
    python=python3
  else
    make setup
  fi
fi
exec "$python" -m dev.gpu_check --resume "$@"
