"""Runs a script of this repository, and prints the GiB of the card each time its optimizer steps.

python tests/print_memory.py SCRIPT ARGUMENTS
"""

import runpy
import sys

import rlmt  # noqa: F401  first: it sets environment variables that torch reads
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def print_memory(*_) -> None:
    # "used" is asked of the driver: torch counts the memory of an engine also while it sleeps and has given
    # it back
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_allocated()
    print(f"held {held / 2**30:.3f} GiB, used {(total - free) / 2**30:.3f} GiB", flush=True)


register_optimizer_step_pre_hook(print_memory)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
