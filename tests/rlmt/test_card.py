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
    command = f"/home/me/.venv/bin/python /home/me/train_{script}.py --prompts 'my prompts.jsonl'\n"
    (folder / "command.txt").write_text(command * 2)  # it was resumed
    return folder


def read_card(run: Path) -> ModelCard:
    write_card(run)
    return ModelCard.load(run / "model" / "README.md")


@pytest.fixture
def run(tmp_path) -> Path:
    """GRPO from an SFT run from a model of the hub."""
    make_run(tmp_path / "sft", "sft", {"model": "Qwen/Qwen2.5-0.5B", "traces": "owner/traces:train"})
    args = vars(train_grpo.Args(model=str(tmp_path / "sft" / "model"), prompts="/home/me/p.jsonl"))
    return make_run(tmp_path / "rlmt", "grpo", args)


def test_a_card_names_base_script_data_and_format_and_no_folder_of_ours(run):
    (run / "model" / "think_format.json").write_text('{"think_format": "plain"}')
    card = read_card(run)
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B" and not card.data.license
    for word in ("`train_grpo.py`", "from Qwen/Qwen2.5-0.5B on p.jsonl", '{"think_format": "plain"}'):
        assert word in card.text
    assert "/home" not in card.content and str(run.parent) not in card.content
    (run / "model" / "README.md").write_text("mine")
    write_card(run)
    assert (run / "model" / "README.md").read_text() == "mine"


def test_what_did_not_happen_is_not_in_a_card(tmp_path):
    """The default of --prompts does nothing beside --pairs."""
    args = vars(train_dpo.Args(model="org/base", pairs="p.jsonl"))
    text = read_card(make_run(tmp_path, "dpo", args)).text
    assert "on p.jsonl" in text and "wildchat" not in text


def test_models_that_were_trained_from_each_other_have_a_card(tmp_path):
    for name, other in ("AB", "BA"):
        make_run(tmp_path / name, "sft", {"model": f"{tmp_path}/{other}/model", "traces": "t.jsonl"})
    assert read_card(tmp_path / "A").data.base_model == "model"
