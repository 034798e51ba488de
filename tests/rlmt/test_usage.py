"""rlmt/usage.py: the help, what is said of an unknown flag, and arguments that are read back."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlmt.run import HOW_STARTED
from rlmt.usage import NAMES, flag_of

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for pattern in ("train_*.py", "eval_*.py") for path in ROOT.glob(pattern))


def fields_of(script: str) -> list[str]:
    return [flag_of(field.name) for field in dataclasses.fields(importlib.import_module(script).Args)]


def test_what_the_table_of_names_calls_ours_is_a_flag():
    known = {flag for script in SCRIPTS for flag in fields_of(script)}
    rows = [line.split("|") for line in NAMES.read_text().splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {6}
    ours = {flag for _, cell, *_ in rows for flag in re.findall(r"--[\w-]+", cell)}
    assert ours - known == set() and len(ours) > 40


@pytest.mark.parametrize(
    "script, words, said",
    [
        ("train_grpo", "--num-generations 4 --kl_coef=0.1", "--num-generations is --group-size here; --kl_coef is --beta here ("),
        ("train_grpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n is --group-size here"),
        ("train_grpo", "--per-device-train-batch-size 2", "is --micro-batch-tokens here (tokens; TRL counts rows;"),
        ("train_dpo", "--num_train_epochs 1", "is --epochs here"),
        ("train_grpo", "--max-grad-norm 1", "is a constant here (MAX_GRAD_NORM"),
        ("train_grpo", "--gradient_checkpointing False", "write --gradient-checkpointing or --no-gradient-checkpointing"),
        ("train_grpo", "--learning-rat 1", "do you mean --learning-rate?"),
        ("train_grpo", "--learning_rate one", "Error parsing --learning-rate: could not convert string to float: 'one'"),
        ("eval_benchmarks", "ifeval --dtype half", "invalid choice 'half' for argument '--dtype'"),
    ],
)  # fmt: skip
def test_one_line_says_what_to_write(parse, exits, script, words, said):
    assert said in exits(parse, script, words.split())


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_has_every_flag_once_and_every_preset(parse, capsys, script):
    with pytest.raises(SystemExit, match="0"):
        parse(script, ["--help"])
    shown = capsys.readouterr().out
    found = re.findall(r"^  (--[\w-]+|name <)", shown, re.MULTILINE)
    assert sorted(found) == sorted("name <" if flag == "--name" else flag for flag in fields_of(script))
    for preset in getattr(importlib.import_module(script), "PRESETS", {}):
        assert f"\n  {preset}: " in shown
    assert re.search(r"--dtype <auto, bfloat16, float32> \(default: auto\)", shown)


def test_a_config_gives_its_run_back_and_flags_override_it(parse, exits, tmp_path):
    line = "--preset toy --rewards math:1 format:gate --epsilon 0.1 0.3 --out a --dry-run"
    first = parse("train_grpo", line.split())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"script": "grpo", "args": dataclasses.asdict(first)}))
    again = parse("train_grpo", ["--config", str(path), "--steps", "3"])
    as_started = dict.fromkeys(HOW_STARTED) | {"steps": None}
    assert vars(first) | as_started == vars(again) | as_started
    assert again.steps == 3 and again.out == "" and not again.dry_run
    path.write_text(json.dumps({"script": "grpo", "args": dataclasses.asdict(first) | {"loss_type": "mine"}}))
    assert "loss_type is 'mine'; use one of dapo," in exits(parse, "train_grpo", ["--config", str(path)])
    assert "is no flag of this script" in exits(parse, "train_sft_warmstart", ["--config", str(path)])


def test_two_processes_say_once_what_both_find(tmp_path):
    path = tmp_path / "both.py"
    path.write_text("from utils import fail\nfail('both find it')\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(launch, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and done.stderr.count("error: both find it") == 1
