"""Runs of a training script in the test's process, and what they leave behind."""

import contextlib
import gc
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

from launch import ROOT
from rlmt import checkpoint, run
from data.toy import world
from rlmt.data import read_log, write_jsonl
from rlmt.run import LOGS

BASE = "data/toy/base"
REWARD_MODEL = "data/toy/reward_model"


def write_prompts(path: Path, n: int, **more) -> Path:
    """Writes the first `n` prompts of the toy world with `more` fields, and returns the path."""
    rows = []
    for number, _, text, _ in world.orders_of("rl", n, 0):
        rows.append({"id": number, "messages": [{"role": "user", "content": text}], **more})
    write_jsonl(path, rows)
    return path


@contextlib.contextmanager
def new_accelerator():
    """Lets a script start an accelerator of its own dtype; the tests around it have theirs again behind
    it."""
    with contextlib.ExitStack() as stack:
        for state in (AcceleratorState, PartialState, GradientState):
            stack.enter_context(mock.patch.dict(state._shared_state, clear=True))
        yield


@contextlib.contextmanager
def in_this_process():
    """Lets this process, which has the libraries already, run a script more than once.

    Runs keep all checkpoints, so that a test may go on from any of them.
    """
    with contextlib.chdir(ROOT), new_accelerator(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "KEEP_CHECKPOINTS", 0)
        yield
    run._LOCKS.clear()


def run_here(command: list[str]) -> None:
    """Runs a command [python, script.py, flags ...] in this process: a start of its own takes ten seconds of
    CPU time."""
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
    """Frees the vLLM engines of this process, and removes the variables of a distributed launch that they
    set."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.unfreeze()
    gc.collect()
    cleanup_dist_env_and_memory()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def wait_for_lines(log: Path, n: int, is_alive: Callable[[], bool]) -> None:
    """Waits until a run's log has so many lines."""
    while not log.exists() or log.read_text().count("\n") < n:
        assert is_alive(), "the run ended before it could be killed"
        time.sleep(0.01)


def killed_after(step: int, whole: Path, killed: Path) -> None:
    """Copies a finished run that kept all its checkpoints, as if it had been killed after that of `step`."""
    shutil.copytree(whole, killed)
    for folder in killed.glob("checkpoint-*"):
        if int(folder.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(folder)
    for name in ("model", "adapter"):
        shutil.rmtree(killed / name, ignore_errors=True)
    (killed / "summary.json").unlink()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a model's folder by their names."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def check_same_bits(whole: Path, broken: Path) -> None:
    """Compares a run that was killed and resumed with one that was not: logs, and weights of all kinds."""
    assert metrics_of(broken) == metrics_of(whole)
    for log in LOGS[1:]:
        assert read_log(broken / log) == read_log(whole / log)
    for path in whole.rglob("*.safetensors"):
        assert (broken / path.relative_to(whole)).read_bytes() == path.read_bytes(), path


def metrics_of(run: Path) -> list[dict]:
    """Reads the log without times and memory, in which two equal runs differ."""
    measured = ("seconds", "step_time", "time/", "memory/")
    rows = []
    for row in read_log(run / "metrics.jsonl"):
        rows.append({name: value for name, value in row.items() if not name.startswith(measured)})
    return rows
