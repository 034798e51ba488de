"""rlmt/card.py: what a card says of a run, and that it replaces nothing that somebody wrote."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from rlmt.card import write_card
import train_dpo
import train_grpo


def make_run(folder: Path, script: str, args: dict) -> Path:
    """Returns a run's folder as training scripts leave it, without weights."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"script": script, "args": args, "processes": 2}))
    command = f"/home/me/.venv/bin/python train_{script}.py --prompts 'my prompts.jsonl'\n"
    (folder / "command.txt").write_text(command * 2)  # it was resumed
    return folder


def read_card(run: Path) -> ModelCard:
    write_card(run)
    return ModelCard.load(run / "model" / "README.md")


@pytest.fixture
def run(tmp_path) -> Path:
    """GRPO from an SFT run from a model of the hub."""
    make_run(tmp_path / "sft", "sft", {"model": "Qwen/Qwen2.5-0.5B", "traces": "owner/traces:train"})
    args = vars(train_grpo.Args(model=str(tmp_path / "sft" / "model"), prompts="p.jsonl"))
    return make_run(tmp_path / "rlmt", "grpo", args)


def test_a_card_names_base_data_algorithm_and_command(run):
    card = read_card(run)
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B" and card.data.tags == ["rlmt", "grpo"]
    assert not card.data.license
    assert f"Trained from {run.parent}/sft/model from Qwen/Qwen2.5-0.5B, on p.jsonl." in card.text
    assert card.text.count("python train_grpo.py --prompts 'my prompts.jsonl'\n") == 1
    assert "/home/me" not in card.text


def test_what_did_not_happen_is_not_in_a_card(tmp_path):
    """The default of --prompts does nothing beside --pairs."""
    args = vars(train_dpo.Args(model="org/base", pairs="p.jsonl"))
    text = read_card(make_run(tmp_path, "dpo", args)).text
    assert "on p.jsonl" in text and "wildchat" not in text


def test_a_card_that_somebody_changed_is_kept(run):
    """Of a run that is trained on, the card is renewed as long as it is ours."""
    write_card(run)
    (run / "command.txt").write_text("python train_grpo.py --steps 7\n")
    assert "--steps 7" in read_card(run).text
    card = run / "model" / "README.md"
    card.write_text("mine")
    write_card(run)
    assert card.read_text() == "mine"
