"""Runs of a training script in the test's process, and what they leave behind."""

import contextlib
import gc
import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import watchdog

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def in_this_process():
    """Lets this process, which has the libraries already, run a script more than once."""
    with contextlib.chdir(ROOT), pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "RUN", watchdog.Run())
        yield
    watchdog._LOCK_FILES.clear()


def run_here(command: list[str]) -> None:
    """Runs a command [python, script.py, flags ...] in this process: a start of its own takes ten seconds of CPU time."""
    with in_this_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command[1:])
        runpy.run_path(command[1], run_name="__main__")


def run_vllm_here(command: list[str]) -> None:
    """Runs a command whose samples come from vLLM in this process, and frees vLLM."""
    try:
        run_here(command)
    finally:
        forget_vllm()


def forget_vllm() -> None:
    """Frees the vLLM engines of this process, and removes the variables of a distributed launch that they set."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.unfreeze()
    gc.collect()
    cleanup_dist_env_and_memory()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    AcceleratorState._reset_state(reset_partial_state=True)


def killed_after(step: int, whole: Path, killed: Path) -> None:
    """Copies a finished run that kept all its checkpoints, as if it had been killed after that of `step`."""
    shutil.copytree(whole, killed)
    for folder in killed.glob("checkpoint-*"):
        if int(folder.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(folder)
    shutil.rmtree(killed / "model")
    (killed / "summary.json").unlink()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a model's folder by their names."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def metrics_of(run: Path) -> list[dict]:
    """Reads the log without its clocks."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row.keys() - {"seconds", "step_time"}} for row in rows]
