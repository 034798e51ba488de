"""What every run shares. Importing it sets environment variables that other libraries read when they are
imported."""

import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# the engine runs in this process, where weights are synced
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# else a server compiles it at its start, which needs a CUDA toolkit of the runtime's version
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, read on a CPU only
if "LOCAL_RANK" not in os.environ and Path(sys.argv[0]).name.startswith("train_"):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one process uses one GPU
# on a CPU it asks for an optional kernel at every start
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
