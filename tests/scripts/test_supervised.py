"""The scripts that train on rows, SFT and the reward model: what a run writes; killed and resumed; on two
processes. test_dpo.py has the third."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from launch import DDP, FSDP2, finished
from script_runs import BASE, ROOT, check_same_bits, killed_after, metrics_of, run_here, weights_of
from transformers import AutoTokenizer, GenerationConfig

from data.toy import world
from rewards.preference import RewardModel
from rlmt.data import read_log, write_jsonl


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, list[str]]:
    """Ten steps each, five an epoch; four rows of each epoch of SFT are left out. One epoch for `bits`: an
    adapter on weights in 4 bits, moments in 8."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "traces.jsonl", world.trace_rows(34, 0, 1.0))
    write_jsonl(folder / "pairs.jsonl", world.pair_rows(60, 0))
    sft = f"train_sft_warmstart.py --traces {folder}/traces.jsonl --batch-size 6 --micro-batch-tokens 500"
    reward = f"train_reward.py --pairs {folder}/pairs.jsonl --batch-size 8 --micro-batch-tokens 800"
    bits = f"{reward} --lora-r 64 --load-in-4bit --optim adamw_8bit --dtype bfloat16"
    scripts = {"sft": sft, "reward": f"{reward} --epochs 2", "bits": bits}
    common = ["--preset", "toy", "--model", BASE, "--save-steps", "1"]
    return {name: [*script.split(), *common] for name, script in scripts.items()}


@pytest.fixture(scope="module")
def wholes(scripts, tmp_path_factory) -> dict[str, Path]:
    """Runs that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    for name, command in scripts.items():
        run_here([sys.executable, *command, "--out", str(folder / name)])
    return {name: folder / name for name in scripts}


def test_what_sft_writes(wholes):
    run = wholes["sft"]
    metrics = metrics_of(run)
    committed = read_log(ROOT / "results/toy/toy-sft-think-s0/metrics.jsonl")[0]
    # ends_turn is newer than that run
    assert metrics[0].keys() | {"seconds", "step_time"} == committed.keys() | {"ends_turn"}
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["n_rows"], summary["dropped"]) == (10, 34, {})
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ends = GenerationConfig.from_pretrained(run / "model").eos_token_id
    assert ends == [AutoTokenizer.from_pretrained(BASE).eos_token_id, tokenizer.eos_token_id]


def test_what_the_reward_model_writes(wholes):
    run = wholes["reward"]
    committed = read_log(ROOT / "results/toy/reward-weak-rm/metrics.jsonl")[0]
    assert metrics_of(run)[0].keys() | {"seconds", "step_time"} == committed.keys()
    summary = json.loads((run / "summary.json").read_text())
    held_out = summary["held_out"]
    assert summary["n_pairs"] + held_out["n"] + summary["dropped"] == 60
    assert 0 < held_out["length_baseline"] < 1 and held_out["equal_length"]["n"] > 0
    assert not (run / "model" / "think_format.json").exists()
    model = RewardModel(str(run / "model"), reward_on="response")
    assert math.isfinite(model.score([[{"role": "user", "content": "Hi"}]], ["You get 1 dish."])[0])


@pytest.mark.parametrize("name", ["sft", "reward", "bits"])
def test_a_killed_run_ends_with_the_same_bits(name, scripts, wholes, tmp_path):
    broken = tmp_path / "broken"
    step = len(metrics_of(wholes[name])) * 4 // 5  # in the second epoch, if there are two
    killed_after(step, wholes[name], broken)
    run_here([sys.executable, *scripts[name], "--out", str(broken), "--resume"])
    check_same_bits(wholes[name], broken)


def test_a_head_is_trained_whole_and_lies_with_the_adapter(wholes):
    adapter = weights_of(wholes["bits"] / "adapter")
    [head] = [name for name in adapter if name.endswith("score.weight")]
    merged = weights_of(wholes["bits"] / "model")
    assert torch.equal(adapter[head], merged["score.weight"])
    assert merged.keys() == weights_of(wholes["reward"] / "model").keys()


@pytest.mark.parametrize("name, launcher", [("sft", DDP), ("reward", FSDP2)])
def test_two_processes_learn_what_one_learns(name, launcher, scripts, wholes, tmp_path):
    out = tmp_path / "two"
    finished([sys.executable, *launcher, *scripts[name], "--out", str(out)])
    for expected, found in zip(metrics_of(wholes[name]), metrics_of(out), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    expected = weights_of(wholes[name] / "model")
    found = weights_of(out / "model")
    assert expected.keys() == found.keys()
    for key, weight in found.items():
        torch.testing.assert_close(weight, expected[key], rtol=0, atol=1e-4)


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(scripts, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(FloatingPointError, match="step "):
        run_here([sys.executable, *scripts["sft"], "--learning-rate", "1e30", "--out", str(run)])
    for checkpoint in run.glob("checkpoint-*"):
        assert all(weight.isfinite().all() for weight in weights_of(checkpoint).values())
    rows = read_log(run / "not_finite-rank0.jsonl")
    assert len(rows) == 6 and rows[0]["ids"]
