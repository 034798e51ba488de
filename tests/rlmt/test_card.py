"""rlmt/card.py: what a card says of a run, and that it replaces nothing that somebody wrote."""

import json
from pathlib import Path

import pytest
import yaml

from rlmt import card as model_card
import train_dpo
import train_grpo
from rlmt import data as rlmt_data


def make_run(folder: Path, script: str, args: dict, metrics: dict, summary: dict | None = None) -> Path:
    """Returns a run's folder as training scripts leave it, without weights."""
    (folder / "model").mkdir(parents=True)
    digests = {"p.jsonl": "0123456789abcdef" * 4}
    config = {"script": script, "args": args, "constants": {}, "processes": 2, "files": digests}
    (folder / "config.json").write_text(json.dumps(config))
    command = f"/home/me/.venv/bin/python train_{script}.py --prompts 'my prompts.jsonl'\n"
    (folder / "command.txt").write_text(command * 2)  # it was resumed
    rlmt_data.append_jsonl(folder / "metrics.jsonl", [{"step": 1, "reward": 0.0}, {"step": 2, **metrics}])
    (folder / "summary.json").write_text(json.dumps(summary or {}))
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    """GRPO from an SFT run from a model of the hub."""
    sft = {"model": "Qwen/Qwen2.5-0.5B", "traces": "owner/traces"}
    make_run(tmp_path / "sft", "sft", sft, {"loss": 1.5})
    args = vars(train_grpo.Args(model=str(tmp_path / "sft" / "model"), prompts="p.jsonl", lora_r=8))
    run = make_run(tmp_path / "rlmt", "grpo", args, {"reward": 0.51239, "kl": None, "think/format_ok": 1})
    (run / "held_out.jsonl").write_text('{"step": 2, "gold": 0.75, "proxy": null}\n')
    (run / "model" / "think_format.json").write_text('{"think_format": "think"}')
    return run


def test_a_card_names_base_data_algorithm_command_metrics_and_format(run):
    model_card.write_card(run)
    card = (run / "model" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == "Qwen/Qwen2.5-0.5B" and head["tags"] == ["rlmt", "grpo"]
    assert head["pipeline_tag"] == "text-generation" and "datasets" not in head and "license" not in head
    for line in (
        f"| trained from | `{run.parent}/sft/model` from `Qwen/Qwen2.5-0.5B` |",
        "| algorithm | GRPO, `train_grpo.py` |",
        "| prompts | `p.jsonl` |",
        "| reward model | `Skywork/Skywork-Reward-Llama-3.1-8B-v0.2`, reads think+response |",
        "| rewards | `preference:1` |",
        "| lora_r | `8` |",
        r"| think format | `'<think>\n{z}\n</think>\n\n{y}'`, z thinking, y response |",
        "| step | 2 |",
        "| reward | 0.5124 |",
        "| think/format_ok | 1 |",
        "| held out: gold | 0.75 |",
    ):
        assert f"\n{line}\n" in card, line
    assert card.count("python train_grpo.py --prompts 'my prompts.jsonl'\n") == 1 and "/home/me" not in card
    assert "Processes: 2" in card and "| kl |" not in card and "No licence is stated here" in card

    model_card.write_card(run.parent / "sft")
    card = (run.parent / "sft" / "model" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["datasets"] == ["owner/traces"]
    for name in ("owner/traces:train", "owner/traces:default:train"):
        assert "datasets:\n- owner/traces\n" in model_card.front_matter("sft", "org/base", name)
    for name in ("data/traces.jsonl.gz", f"{run.parent}/rlmt:train"):
        assert "datasets" not in model_card.front_matter("sft", "org/base", name)


def test_what_did_not_happen_is_not_in_a_card(tmp_path):
    """Defaults of --prompts and --reward-model do nothing beside --pairs, or another reward."""
    args = vars(train_dpo.Args(model="org/base", pairs="p.jsonl"))
    card = model_card.build(make_run(tmp_path / "dpo", "dpo", args, {"loss": 0.5}))
    assert "| pairs | `p.jsonl`" in card and "wildchat_if" not in card and "Skywork" not in card
    args = vars(train_grpo.Args(model="org/base", rewards=("math:1", "format:gate")))
    card = model_card.build(make_run(tmp_path / "grpo", "grpo", args, {"reward": 0.5}))
    assert "| rewards | `math:1 format:gate` |" in card and "Skywork" not in card


def test_a_reward_model_s_card_has_its_held_out_accuracy(tmp_path):
    summary = {"held_out": {"accuracy": 0.64321, "ece": 0.04, "n": 500, "bins": []}}
    args = {"model": "org/base", "pairs": "p.jsonl", "reward_on": "response"}
    card = model_card.build(make_run(tmp_path / "rm", "reward", args, {"loss": 0.5}, summary))
    assert "| held out: accuracy | 0.6432 |" in card and "AutoModelForSequenceClassification" in card
    assert yaml.safe_load(card.split("---")[1])["pipeline_tag"] == "text-classification"


def test_a_card_that_somebody_changed_is_kept(run):
    """Of a run that is trained on, the card is renewed as long as it is ours."""
    card = run / "model" / "README.md"
    model_card.write_card(run)
    first = card.read_text()
    rlmt_data.append_jsonl(run / "metrics.jsonl", [{"step": 3, "reward": 0.9}])
    model_card.write_card(run)
    assert "| reward | 0.9 |" in card.read_text() and card.read_text() != first
    for text in (card.read_text().replace("# rlmt", "# My model"), "mine\n", ""):
        card.write_text(text)
        model_card.write_card(run)
        assert card.read_text() == text
