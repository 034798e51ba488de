"""rlmt/run.py: arguments, the run's folder, its log. tests/scripts/test_resume.py has its end."""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import filelock
import pytest

from rlmt import run as rlmt_run
from rlmt.checkpoint import latest
from rlmt.data import read_log
from rlmt.run import STOP_SIGNALS, STOPPED, RLArgs, Run, check_values, parse_args, rows_of_step


@dataclasses.dataclass
class Args(RLArgs):
    model: str = "org/base"
    steps: int = 10
    learning_rate: float = 1e-6


PRESETS = {"small": {"steps": 3, "learning_rate": 1.0, "dry_run": True}}


# --- arguments


def test_default_then_preset_then_flag(monkeypatch, exits):
    def parse(line: str) -> Args:
        monkeypatch.setattr(sys, "argv", ["script.py", *line.split()])
        return parse_args(Args, PRESETS)

    assert parse("") == Args()
    small = Args(preset="small", **PRESETS["small"])
    assert parse("--preset small") == parse("--preset=small") == small
    found = parse("--preset small --steps 10 --no-dry-run")  # a flag with the default's value is still a flag
    assert found.steps == 10 and not found.dry_run
    for line, said in (
        ("--preset smal", "unknown preset 'smal'"),
        ("--rewards math:1 --rewards=code:1", "--rewards is given 2 times"),
        ("--load-in-4bit", "add --lora-r 64"),
        (f"--seed {10**30}", "give a number at least 0 and at most 4294967295"),
    ):
        assert said in exits(parse, line)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # as the launcher sets it
    monkeypatch.setattr(rlmt_run, "get_available_trackers", list)
    assert "pip install wandb" in exits(parse, "--report-to wandb") and parse("")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert "ACCELERATE_USE_DEEPSPEED=true, of the launcher" in exits(parse, "")


# --- the folder


def start(args, script: str = "grpo", constants: dict | None = None) -> Path:
    run = Run(args, script, args.model, constants)
    run.start()
    return run.folder


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "a b"])
    return tmp_path


def test_a_folder_says_what_was_run_and_the_same_arguments_find_it(in_folder):
    run = start(Args())
    assert run.parent.name == "results" and run.name.startswith("grpo__base__s0__")
    config = json.loads((run / "config.json").read_text())
    assert config["processes"] == 1 and config["args"]["model"] == "org/base"
    assert (run / "command.txt").read_text() == f"{sys.executable} train.py --model 'a b'\n"
    assert "\ntorch==" in (run / "env.txt").read_text()
    assert len({run, start(Args(seed=1)), start(Args(preset="a/b")), start(Args(), "sft")}) == 4
    assert start(Args(overwrite=True)) == start(Args(steps=11, resume=True)) == run
    assert start(Args(model=f"{start(Args(out='ablation/a'))}/model")).parent.name == "ablation"


def test_nothing_is_overwritten_unasked(in_folder, exits):
    run = start(Args(out="results/a"))
    mine = in_folder / "mine" / "thesis.txt"
    mine.parent.mkdir()
    mine.touch()
    assert "results/a exists; --resume continues it" in exits(start, Args(out="results/a"))
    assert "mine has no config.json" in exits(start, Args(out="mine", resume=True))
    for folder in ("mine", "results"):  # never a run of ours, and the parent of one
        assert "is not a run's folder" in exits(start, Args(out=folder, overwrite=True))
    assert mine.exists() and (run / "config.json").exists()
    assert "leave one out" in exits(check_values, Args(resume=True, overwrite=True))
    (run / "checkpoint-1").symlink_to(in_folder / "mine")
    start(Args(out="results/a", overwrite=True))
    assert not (run / "checkpoint-1").exists() and mine.exists()
    for out in ("mine/thesis.txt/run", "/proc/run"):
        assert f"{out} cannot be read or written to" in exits(
            Run, Args(out=out, dry_run=True), "grpo", "model"
        )


def test_overwrite_never_deletes_what_a_run_reads(in_folder, exits):
    start(Args(out="a"))
    Path("b").mkdir()
    for link, target in (("b/of.py", "../a/own.py"), ("a/b", "../b")):
        Path(link).symlink_to(target)
    for name in ("a/own.py", "a/model/tokenizer.json", "b/rows.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    for word in ("a/own.py:f:1", "a/model", "a/model:train", "b/of.py:f", "a/b/rows.jsonl", "x.y=a/own.py"):
        error = exits(start, Args(out="a", overwrite=True, rewards=("math:1", word)))
        assert "--overwrite would delete" in error and "this run reads (--rewards)" in error
    assert Path("a/config.json").exists()


def test_a_folder_in_use_is_refused(in_folder, exits):
    Path("run").mkdir()
    with filelock.FileLock("run/lock"):
        assert "is in use by another process" in exits(start, Args(out="run"))
    assert start(Args(out="run"))


def test_a_resume_goes_on_with_equal_arguments_only(in_folder, exits):
    first = Args(out="run", judge="m", judge_url="http://node1:8000/v1", budget=1.0, price=(1.0, 1.0))
    run = start(first, constants={"LIMIT": 1})
    # as after a GPU that was too small, at another host, with a spent budget
    moved = dataclasses.replace(first, resume=True, judge_url="", budget=2.0, micro_batch_tokens=4)
    assert start(moved, constants={"LIMIT": 1}) == run
    error = exits(start, dataclasses.replace(moved, judge="other"), constants={"LIMIT": 2})
    assert error.endswith("was started with other arguments: judge (m -> other), LIMIT (1 -> 2)")

    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace('"seed": 0', '"older": 0'))  # than the argument
    assert "seed (0 -> 1)" in exits(start, dataclasses.replace(moved, seed=1), constants={"LIMIT": 1})
    assert start(moved, constants={"LIMIT": 1}) == run


def test_a_resume_finds_what_its_arguments_name_unchanged(in_folder, exits, monkeypatch, capsys):
    monkeypatch.setattr(rlmt_run, "HF_HUB_CACHE", str(in_folder))
    Path("model").mkdir()
    Path("models--org--rm/refs").mkdir(parents=True)
    Path("datasets--org--rows/refs").mkdir(parents=True)
    Path("data=2/train").mkdir(parents=True)
    files = {
        "model/config.json": "--model",
        "model/model.safetensors": "--model",
        "model/chat_template.jinja": "--model",
        "models--org--rm/refs/main": "--reward-model",
        "datasets--org--rows/refs/main": "--gold",
        "data=2/train/0.arrow": "--gold-prompts",
        "own.py": "--rewards",
        "rm.jinja": "--reward-args",
    }
    for file in files:
        Path(file).write_text("old")
    words = {"rewards": ("own.py:f:1", "math:2"), "reward_args": ("preference.chat_template=rm.jinja",)}
    words |= {"reward_model": "org/rm", "gold": "org/rows:train"}
    first = Args(out="run", model="model", gold_prompts="data=2", **words)
    Path("script.py").touch()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    run = start(first)
    # the file that --config names is written anew by each start
    resumed = dataclasses.replace(first, resume=True, config="run/config.json")
    Path("model/README.md").touch()
    assert start(resumed) == run
    for file, flag in files.items():
        Path(file).write_text("new")
        assert f"what {flag} names is not what it was" in exits(start, resumed)
        Path(file).write_text("old")
    assert "WARNING" not in capsys.readouterr().out
    Path("script.py").write_text("edited")
    assert start(resumed) == run
    assert "WARNING: edited since the start of run: script.py\n" in capsys.readouterr().out


def test_a_finished_run_ends_at_once_unless_it_is_to_be_longer(in_folder):
    run = start(Args())
    (run / "summary.json").touch()
    with pytest.raises(SystemExit, match="0"):
        start(Args(resume=True, steps=9))
    assert start(Args(resume=True, steps=11)) == run and not (run / "summary.json").exists()
    assert start(Args(resume=True, steps=11)) == run  # it was interrupted


# --- steps


@pytest.mark.parametrize("leaves_out_rest, sizes", [(True, [3, 3, 3]), (False, [3, 3, 3, 2])])
def test_every_row_once_per_epoch_as_a_function_of_seed_and_step(leaves_out_rest, sizes):
    def rows_of_steps(*seed: int) -> list[list[int]]:
        """Returns the rows of two epochs."""
        steps = range(1, 2 * len(sizes) + 1)
        return [rows_of_step(range(11), step, 3, *seed, leaves_out_rest=leaves_out_rest) for step in steps]

    shown = rows_of_steps(7)
    first, second = shown[: len(sizes)], shown[len(sizes) :]
    for epoch in (first, second):
        assert [len(rows) for rows in epoch] == sizes and len(set(sum(epoch, []))) == sum(sizes)
    assert first != second and shown == rows_of_steps(7)
    assert rows_of_steps(8) != shown != rows_of_steps(7, 1)


def test_the_log_has_every_step_once_and_so_has_tensorboard(in_folder):
    """A run that was killed after step 3 goes on from its checkpoint at step 2: its later step 3 counts."""
    args = Args(report_to="tensorboard", out="run", save_steps=100)
    run = Run(args, "grpo", args.model)
    run.start()
    for run.first_step, last, factor in ((0, 3, 0.1), (2, 4, 10.0)):
        rlmt_run.cut_log(run.folder / "metrics.jsonl", run.first_step)
        with run.training({}, None, 99, {"gold": "reward/gold"}):
            for step, _ in zip(range(run.first_step + 1, last + 1), run.steps()):
                run.end_step(step, {"reward/gold": step * factor, "why": "text", "lost": float("nan")}, 100)
    lines = read_log(run.folder / "metrics.jsonl")
    found = [(line["step"], line["reward/gold"], line["num_tokens"]) for line in lines]
    assert found == [(1, 0.1, 100), (2, 0.2, 200), (3, 30.0, 300), (4, 40.0, 400)]
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(run.folder / "tensorboard")).Reload().Scalars("reward/gold")
    assert [event.value for event in found] == pytest.approx([0.1, 0.2, 30.0, 40.0])


def fails(*_, **__):
    raise ConnectionError("no answer")


@pytest.mark.parametrize("name", ["start", "log", "finish"])
def test_a_tracker_that_fails_costs_no_step(name, in_folder, monkeypatch, capsys):
    monkeypatch.setattr(rlmt_run.LOGGER_TYPE_TO_CLASS["tensorboard"], name, fails)
    args = Args(report_to="tensorboard", out="run", save_steps=100)
    run = Run(args, "grpo", args.model)
    run.start()
    with run.training({}, None, 99, {}):
        run.end_step(1, {}, 1)
    assert len(read_log(run.folder / "metrics.jsonl")) == 1
    assert "ConnectionError: no answer" in capsys.readouterr().err


def test_a_signal_saves_and_a_run_that_ended_does_not_go_on(in_folder, tokenizer):
    def check(step, metrics, completions):
        return "collapsed" if metrics["loss"] == len(STOP_SIGNALS) else ""

    def train(steps, number=None):
        run = Run(Args(out="run", resume=True, save_steps=100), "grpo", "org/base")
        run.start()
        with run.training({}, tokenizer, steps, {}, checks=[check]):
            for step in run.steps():
                os.kill(os.getpid(), number)
                run.end_step(step, {"loss": step}, 1)
        return run.end_reason

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for step, number in enumerate(STOP_SIGNALS, 1):
        with pytest.raises(SystemExit, match=str(STOPPED)):
            train(99, number)
        assert latest(Path("run")).name == f"checkpoint-{step}"
    assert train(99) == "collapsed"  # it was killed before it could end for that
    signal.signal(signal.SIGHUP, before)
