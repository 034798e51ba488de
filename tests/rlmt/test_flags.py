"""rlmt/run.py: the help, what is said of an unknown flag, and arguments that are read back."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlmt.run import HOW_STARTED, NAMES

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for pattern in ("train_*.py", "eval_*.py") for path in ROOT.glob(pattern))


def test_what_the_table_of_names_calls_ours_is_a_flag():
    known = set()
    for script in SCRIPTS:
        for field in dataclasses.fields(importlib.import_module(script).Args):
            known.add("--" + field.name.replace("_", "-"))
    rows = [line.split("|") for line in NAMES.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 40 and {len(row) for row in rows} == {6}
    ours = {flag for _, cell, *_ in rows for flag in re.findall(r"--[\w-]+", cell)}
    assert ours - known == set() and len(ours) > 40


@pytest.mark.parametrize(
    "script, words, said",
    [
        ("train_grpo", "--num-generations 4 --kl_coef=0.1", "--num-generations is --group-size here; --kl_coef is --beta here ("),
        ("train_grpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n is --group-size here"),
        ("train_grpo", "--per-device-train-batch-size 2", "is --micro-batch-tokens here (tokens; TRL counts rows;"),
        ("train_sft_warmstart", "--gradient-accumulation-steps 2", "is --batch-size here (ours counts over all GPUs"),
        ("train_grpo", "--num_train_epochs 1", "is --steps here (ours counts rollouts"),
        ("train_dpo", "--num_train_epochs 1", "is --epochs here"),
        ("train_grpo", "--max-grad-norm 1", "is a constant here (MAX_GRAD_NORM"),
        ("train_grpo", "--gradient_checkpointing False", "Unrecognized options: False"),
        ("train_grpo", "--learning-rat 1", "Perhaps you meant:"),
        ("train_grpo", "--learning_rate one", "Error parsing --learning-rate: could not convert string to float: 'one'"),
        ("train_grpo", "--epsilon nan 0.2", "--epsilon nan: give a number at least 0"),
        ("train_grpo", "--learning-rate inf", "--learning-rate inf: give a number at least 0"),
        ("train_ppo", "--lam 1.5", "--lam 1.5: give a number at least 0 and at most 1"),
        ("train_dpo", "--beta 0", "--beta 0.0: give a number above 0"),
        ("train_grpo", "--lora-r 8 16", "Unrecognized options: 16"),
        ("eval_benchmarks", "ifeval --dtype half", "invalid choice 'half' for argument '--dtype'"),
    ],
)  # fmt: skip
def test_an_unknown_flag_is_explained(parse, exits, script, words, said):
    assert said in exits(parse, script, words.split())


def test_the_help_has_flags_and_presets(parse, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse("train_grpo", ["--help"])
    shown = capsys.readouterr().out
    for words in ("--group-size INT", "G, completions a prompt", "(default: 8)", "presets: paper, "):
        assert words in shown


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
    assert "is not a flag of this script" in exits(parse, "train_sft_warmstart", ["--config", str(path)])
    assert "is not the config.json of a run" in exits(parse, "train_grpo", ["--config", f"{ROOT}/README.md"])


def test_two_processes_say_once_what_both_find(tmp_path):
    path = tmp_path / "both.py"
    path.write_text("from utils import fail\nfail('both find it')\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(launch, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and done.stderr.count("error: both find it") == 1
