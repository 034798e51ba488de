"""dev/gpu_check.py on a machine without a GPU: it says so, tries its steps there, and repeats none that passed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dev import gpu_check

ROOT = Path(__file__).resolve().parent.parent


def start(*words) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dev.gpu_check", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_without_a_gpu_it_says_so():
    done = start("--steps", "sft")
    assert done.returncode == 2
    assert "no GPU" in done.stderr and "--cpu" in done.stderr


def test_a_step_passes_once_and_is_not_repeated(tmp_path):
    done = start("--cpu", "--steps", "reward", "memory", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS reward" in done.stdout and "SKIP memory" in done.stdout
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert written["steps"]["reward"]["numbers"]["last loss"] > 0
    assert "| reward | PASS |" in (tmp_path / "table.md").read_text()

    done = start("--cpu", "--steps", "reward", "--out", tmp_path, "--resume")
    assert done.stdout == "PASS reward (before)\n"


@pytest.fixture
def check(tmp_path) -> gpu_check.Check:
    check = gpu_check.Check(gpu_check.Args(out=str(tmp_path)))
    check.begin()
    return check


def test_a_command_that_fails_gives_its_last_line(check):
    with pytest.raises(gpu_check.Failed, match=r"the remedy \(exit code 3, wrong.log\)"):
        check.run("wrong", ["-c", "print('the remedy'); raise SystemExit(3)"])


def test_a_command_ends_with_the_time_of_its_step(check):
    check.step_ends = 0
    with pytest.raises(gpu_check.Failed, match="took longer than 480 s"):
        check.run("slow", ["-c", "import time; time.sleep(60)"])


def test_every_step_is_in_both_tables():
    page = (ROOT / "docs/gpu.md").read_text()
    for name in gpu_check.STEPS:
        assert name in gpu_check.__doc__, name
        assert f"`{name}`" in page, name
