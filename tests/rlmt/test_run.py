"""rlmt/run.py: arguments, the run's folder, its log, and how a run ends: by SIGTERM, a hang, an error."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from launch import DDP, started, started_ranks
from rlmt import run as rlmt_run
from rlmt.checkpoint import numbered, step_of
from rlmt.run import (
    RLArgs,
    check_run,
    parse_args,
    start_run,
    write_summary,
)
from script_runs import run_here, write_prompts

ROOT = Path(__file__).parents[2]
TINY = (
    "train_grpo.py --preset toy --model data/toy/base --prompts-per-step 4 --group-size 4 "
    "--max-completion-tokens 16 --on-bad-format score"
).split()


@dataclasses.dataclass
class Args(RLArgs):
    model: str = "org/base"
    steps: int = 10
    learning_rate: float = 1e-6
    temperature: float = 1.0
    top_p: float = 1.0
    names: tuple[str, ...] = ()


PRESETS = {"small": {"steps": 3, "learning_rate": 1.0, "dry_run": True}, "empty": {}}


# --- arguments


@pytest.fixture
def parse(monkeypatch):
    def parse(*words):
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        return parse_args(Args, PRESETS)

    return parse


def test_default_then_preset_then_flag(parse, exits):
    assert parse() == Args()
    small = Args(preset="small", steps=3, learning_rate=1.0, dry_run=True)
    assert parse("--preset", "small") == small
    assert json.dumps(vars(parse("--preset=small"))) == json.dumps(vars(small))
    for words in (["--preset", "small", "--steps", "7"], ["--steps=7", "--preset=small"]):
        assert parse(*words).steps == 7
    # a flag with the default's value is still a flag
    assert parse("--preset", "small", "--steps", "10", "--no-dry-run").dry_run is False
    assert "unknown preset 'smal'" in exits(parse, "--preset", "smal")
    assert "--names is given 2 times" in exits(parse, "--names", "a", "--names=b")


# --- the folder


def start(args, script: str = "grpo", constants: dict | None = None) -> Path:
    return start_run(check_run(args, script, args.model, constants))


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "a b"])
    return tmp_path


def test_a_folder_says_what_was_run_and_the_same_arguments_find_it(in_folder):
    run = start(Args())
    assert run.parent.name == "results" and run.name.startswith("grpo__base__s0__")
    config = json.loads((run / "config.json").read_text())
    assert config["processes"] == 1 and config["args"] == json.loads(json.dumps(dataclasses.asdict(Args())))
    assert (run / "command.txt").read_text() == f"{sys.executable} train.py --model 'a b'\n"
    assert "\ntorch==" in (run / "env.txt").read_text()
    others = [
        start(Args(seed=1)),
        start(Args(learning_rate=2e-6)),
        start(Args(preset="a/b")),
        start(Args(), "sft"),
    ]
    assert len({run, *others}) == 5
    same = [
        start(Args(overwrite=True)),
        start(Args(steps=11, overwrite=True)),
        start(Args(resume=True, steps=11)),
    ]
    assert same == [run] * 3


def test_nothing_is_overwritten_unasked(in_folder, exits):
    run = start(Args(out="results/a"))
    (run / "metrics.jsonl").write_text("precious\n")
    (in_folder / "mine").mkdir()
    (in_folder / "mine" / "thesis.txt").write_text("precious\n")
    error = exits(start, Args(out="results/a"))
    assert all(word in error for word in ("results/a exists", "--resume", "--overwrite", "--out"))
    assert "mine exists" in exits(start, Args(out="mine", resume=True))
    for folder in ("mine", "results"):  # never a run of ours, and the parent of one
        assert "is not a run's folder" in exits(start, Args(out=folder, overwrite=True))
    assert (in_folder / "mine" / "thesis.txt").exists() and (
        run / "metrics.jsonl"
    ).read_text() == "precious\n"
    (run / "checkpoint-1").mkdir()
    start(Args(out="results/a", overwrite=True))
    assert sorted(path.name for path in run.iterdir()) == ["command.txt", "config.json", "env.txt", "lock"]


def test_a_resume_goes_on_with_equal_arguments_only(in_folder, exits, capsys):
    first = Args(out="run", judge="m", judge_url="http://node1:8000/v1", budget=1.0, price=(1.0, 1.0))
    run = start(first, constants={"LIMIT": 1})
    (run / "metrics.jsonl").write_text("old\n")
    # what does not change the learning: as after a GPU that was too small, at another host, with a spent
    # budget
    moved = dataclasses.replace(
        first, resume=True, judge_url="http://node2:8000/v1", budget=2.0, micro_batch_tokens=4
    )
    assert start(moved, constants={"LIMIT": 1}) == run and (run / "metrics.jsonl").read_text() == "old\n"
    error = exits(start, dataclasses.replace(moved, judge="other", seed=3), constants={"LIMIT": 1})
    assert "judge (m -> other)" in error and "seed (0 -> 3)" in error and "budget" not in error
    assert "LIMIT (1 -> 2)" in exits(start, moved, constants={"LIMIT": 2})


def test_a_finished_run_ends_at_once_unless_it_is_to_be_longer(in_folder, capsys):
    run = start(Args())
    (run / "model").mkdir()
    write_summary(run, {"steps": 10})
    for steps in (10, 9):
        with pytest.raises(SystemExit) as end:
            start(Args(resume=True, steps=steps))
        assert end.value.code == 0 and f"{run} is complete" in capsys.readouterr().out
    assert start(Args(resume=True, steps=11)) == run and not (run / "summary.json").exists()
    assert start(Args(resume=True, steps=11)) == run  # it was interrupted


# --- steps


def test_every_row_once_per_epoch_as_a_function_of_seed_and_step():
    rows = list(range(11))
    steps = [rlmt_run.rows_of_step(rows, step, 3, 7) for step in range(1, 7)]
    for epoch in (steps[:3], steps[3:]):
        shown = [row for step in epoch for row in step]
        assert len(shown) == len(set(shown)) == 9  # two do not fill a step
    assert steps[:3] != steps[3:] and steps[0] != rlmt_run.rows_of_step(rows, 1, 3, 8)


# --- the end of runs


def rows_of(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def steps_saved(run: Path) -> list[int]:
    return [step_of(folder) for folder in numbered(run) if (folder / "complete").exists()]


def wait_for_step(run: Path, step: int, is_alive) -> None:
    while not any(row["step"] >= step for row in rows_of(run)):
        assert is_alive()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 12)


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(prompts, tmp_path, capsys):
    run = tmp_path / "run"
    words = [*TINY, "--prompts", prompts, "--learning-rate", "1e30", "--save-steps", "1", "--out", run]
    with pytest.raises(FloatingPointError, match="step "):
        run_here([sys.executable, *map(str, words)])
    steps = steps_saved(run)
    for step in steps:
        weights = load_file(run / f"checkpoint-{step}" / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())
    assert len((run / "not_finite-rank0.jsonl").read_text().splitlines()) == 16


def test_sigterm_stops_with_a_checkpoint(prompts, tmp_path):
    run = tmp_path / "run"
    output = tmp_path / "output"
    words = [*TINY, "--prompts", prompts, "--save-steps", "1000", "--steps", "1000", "--out", run]
    process = started(words, output)
    wait_for_step(run, 1, process.is_alive)
    for _ in range(2):  # a scheduler and a launcher both pass the same one on
        os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    [step] = steps_saved(run)
    assert process.exitcode == 143
    assert (
        f"stopped by SIGTERM after step {step}; --resume continues from checkpoint-{step}"
        in output.read_text()
    )
    assert not (run / "summary.json").exists()
    assert [row["step"] for row in rows_of(run)] == list(range(1, step + 1))


# a file of rewards is also read by processes that are forked
IMPATIENT = "from rlmt import run\nrun.STALL_MINUTES = 0.1\n"


def test_a_run_that_hangs_ends_with_its_stacks_also_if_it_holds_the_gil(prompts, tmp_path):
    run = tmp_path / "run"
    own = tmp_path / "own.py"
    own.write_text(IMPATIENT + "import ctypes\ndef hang(rows):\n    ctypes.PyDLL(None).sleep(600)\n")
    words = [*TINY, "--prompts", prompts, "--rewards", f"{own}:hang:1", "--out", run]
    process = started(words, tmp_path / "output")
    process.join(120)
    assert process.exitcode == 1
    assert "own.py" in (tmp_path / "output").read_text()


def test_two_processes_stop_together_and_end_when_one_dies_or_hangs(prompts, tmp_path):
    run = tmp_path / "run"
    own = tmp_path / "own.py"
    own.write_text("def count(rows):\n    return list(range(len(rows)))\n")
    words = [*DDP, *TINY, "--prompts", prompts, "--steps", "1000", "--save-steps", "2", "--out", run]
    words += ["--rewards", f"{own}:count:1"]

    def start(*more: str) -> subprocess.Popen:
        command = [sys.executable, *map(str, words), *more]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    launcher = start()
    wait_for_step(run, 3, lambda: launcher.poll() is None)
    launcher.send_signal(signal.SIGTERM)  # by a scheduler
    said, _ = launcher.communicate(timeout=120)
    step = steps_saved(run)[-1]
    assert launcher.returncode != 0 and f"stopped by SIGTERM after step {step};" in said, said[-3000:]
    assert [row["step"] for row in rows_of(run)] == list(range(1, step + 1))

    launcher = start("--resume")
    wait_for_step(run, step + 2, lambda: launcher.poll() is None)
    children = psutil.Process(launcher.pid).children(recursive=True)
    next(child for child in children if child.environ().get("RANK") == "1").kill()
    said, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1 and f"resumes from {run}/checkpoint-{step}" in said, said[-3000:]
    assert [row["step"] for row in rows_of(run)] == list(range(1, len(rows_of(run)) + 1))

    step = steps_saved(run)[-1]
    own.write_text(IMPATIENT + own.read_text())
    ranks = started_ranks([*words, "--resume", "--save-steps", "1000"], tmp_path / "output")
    wait_for_step(run, step + 4, lambda: all(rank.is_alive() for rank in ranks))
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].join(120)
    ranks[1].kill()
    assert ranks[0].exitcode == 1
    assert "most recent call first" in (tmp_path / "output").read_text()
