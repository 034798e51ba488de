"""Runs a script of this repository with FSDP2 on CPU processes, where accelerate would silently fall back to
DDP.

tests/launch.py starts it: accelerate launch ... fsdp_on_cpu.py SCRIPT ARGUMENTS
"""

import runpy
import sys

from accelerate import PartialState
from accelerate.state import DistributedType

start = PartialState.__init__


def as_gpus(self, *args, **kwargs):
    start(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = as_gpus
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
