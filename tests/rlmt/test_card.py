"""rlmt/card.py: what a card says of a run, and that it replaces nothing that somebody wrote."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from rlmt.card import front_matter, write_card
import train_dpo
import train_grpo


def make_run(folder: Path, script: str, args: dict) -> Path:
    """Returns a run's folder as training scripts leave it, without weights."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"script": script, "args": args, "processes": 2}))
    command = f"/home/me/.venv/bin/python train_{script}.py --prompts 'my prompts.jsonl'\n"
    (folder / "command.txt").write_text(command * 2)  # it was resumed
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    """GRPO from an SFT run from a model of the hub."""
    make_run(tmp_path / "sft", "sft", {"model": "Qwen/Qwen2.5-0.5B", "traces": "owner/traces"})
    args = vars(train_grpo.Args(model=str(tmp_path / "sft" / "model"), prompts="p.jsonl", lora_r=8))
    run = make_run(tmp_path / "rlmt", "grpo", args)
    (run / "model" / "think_format.json").write_text('{"think_format": "think"}')
    return run


def read_card(run: Path) -> ModelCard:
    write_card(run)
    return ModelCard.load(run / "model" / "README.md")


def test_a_card_names_base_data_algorithm_command_and_format(run):
    card = read_card(run)
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B" and card.data.tags == ["rlmt", "grpo"]
    assert card.data.pipeline_tag == "text-generation" and not card.data.datasets and not card.data.license
    for line in (
        f'| trained from | `"{run.parent}/sft/model from Qwen/Qwen2.5-0.5B"` |',
        '| prompts | `"p.jsonl"` |',
        '| reward_model | `"Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"` |',
        '| think_format | `"think"` |',
    ):
        assert f"\n{line}\n" in card.text, line
    assert card.text.count("python train_grpo.py --prompts 'my prompts.jsonl'\n") == 1
    assert "/home/me" not in card.text
    assert read_card(run.parent / "sft").data.datasets == ["owner/traces"]
    assert front_matter("reward", "org/base", f"{run}:train").datasets is None


def test_what_did_not_happen_is_not_in_a_card(tmp_path):
    """Defaults of --prompts and --reward-model do nothing beside --pairs, or another reward."""
    dpo = vars(train_dpo.Args(model="org/base", pairs="p.jsonl"))
    grpo = vars(train_grpo.Args(model="org/base", rewards=("math:1", "format:gate")))
    for script, args in (("dpo", dpo), ("grpo", grpo)):
        text = read_card(make_run(tmp_path / script, script, args)).text
        assert "Skywork" not in text and ("wildchat" in text) == (script == "grpo")


def test_a_card_that_somebody_changed_is_kept(run):
    """Of a run that is trained on, the card is renewed as long as it is ours."""
    card = run / "model" / "README.md"
    write_card(run)
    with open(run / "command.txt", "a") as file:
        file.write("python train_grpo.py --steps 7\n")
    assert "--steps 7" in read_card(run).text
    for text in (card.read_text().replace("# rlmt", "# My model"), ""):
        card.write_text(text)
        write_card(run)
        assert card.read_text() == text
