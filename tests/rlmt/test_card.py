"""rlmt/card.py: what a card says of a run, and that it replaces nothing that somebody wrote."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from rlmt.card import front_matter, write_card
from rlmt.data import append_jsonl
import train_grpo


def make_run(folder: Path, script: str, args: dict, metrics: dict, summary: dict | None = None) -> Path:
    """Returns a run's folder as training scripts leave it, without weights."""
    (folder / "model").mkdir(parents=True)
    config = {"script": script, "args": args, "constants": {}, "processes": 2}
    (folder / "config.json").write_text(json.dumps(config))
    command = f"/home/me/.venv/bin/python train_{script}.py --prompts 'my prompts.jsonl'\n"
    (folder / "command.txt").write_text(command * 2)  # it was resumed
    append_jsonl(folder / "metrics.jsonl", [{"step": 1, "reward": 0.0}, {"step": 2, **metrics}])
    (folder / "summary.json").write_text(json.dumps(summary or {}))
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    """GRPO from an SFT run from a model of the hub."""
    make_run(tmp_path / "sft", "sft", {"model": "Qwen/Qwen2.5-0.5B", "traces": "owner/traces"}, {"loss": 1.5})
    args = vars(train_grpo.Args(model=str(tmp_path / "sft" / "model"), prompts="p.jsonl", lora_r=8))
    run = make_run(tmp_path / "rlmt", "grpo", args, {"reward": 0.5, "kl": None})
    (run / "held_out.jsonl").write_text('{"step": 2, "gold": 0.75, "proxy": null}\n')
    (run / "model" / "think_format.json").write_text('{"think_format": "think"}')
    return run


def read_card(run: Path) -> ModelCard:
    write_card(run)
    return ModelCard.load(run / "model" / "README.md")


def test_a_card_names_base_data_algorithm_command_metrics_and_format(run):
    card = read_card(run)
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B" and card.data.tags == ["rlmt", "grpo"]
    assert card.data.pipeline_tag == "text-generation" and not card.data.datasets and not card.data.license
    for line in (
        f'| trained from | `"{run.parent}/sft/model from Qwen/Qwen2.5-0.5B"` |',
        '| prompts | `"p.jsonl"` |',
        '| reward_model | `"Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"` |',
        "| lora_r | `8` |",
        '| think_format | `"think"` |',
    ):
        assert f"\n{line}\n" in card.text, line
    assert card.text.count("python train_grpo.py --prompts 'my prompts.jsonl'\n") == 1
    assert "/home/me" not in card.text
    assert read_card(run.parent / "sft").data.datasets == ["owner/traces"]
    assert front_matter("sft", "org/base", "owner/traces:default:train").datasets == ["owner/traces"]
    assert front_matter("sft", "org/base", f"{run}:train").datasets is None
