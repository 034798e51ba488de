"""Compares dev/step_time.py with values worked by hand, and with docs/gpu.md."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from rlmt import memory as plan
from dev import bench_work, step_time


def test_the_constants_are_those_of_the_model(tmp_path):
    config = LlamaConfig(**bench_work.SHAPE_8B, num_labels=1, pad_token_id=0, eos_token_id=1)
    config.save_pretrained(tmp_path)
    assert plan.count_parameters(str(tmp_path), AutoModelForCausalLM).whole == step_time.PARAMETERS
    assert bench_work.n_multiplied(AutoModelForCausalLM, tmp_path) == step_time.POLICY_WEIGHTS
    assert bench_work.n_multiplied(AutoModelForSequenceClassification, tmp_path) == step_time.REWARD_WEIGHTS
    n_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert step_time.CACHE_BYTES == 2 * n_numbers == 131_072


def test_seconds_by_hand():
    # the sync is 8.03e9 x 4 x 7/8 / 1e11; a rollout reads 61.5e12 of weights and 1.37 x 12.1e12 of cache;
    # reference and update are 7.50e9 x 108,800 / 1e14, times 2 and 8
    rates = step_time.Args(compute=1e14, memory=1e12, link=1e11, disk=1e9)
    seconds = step_time.seconds_by_part(rates)
    assert seconds["weight sync"] == pytest.approx(0.2811, abs=1e-4)
    assert seconds["rollout"] == pytest.approx(61.480 + 1.37 * 12.121, abs=2e-3)
    assert seconds["reward"] == pytest.approx(15.188, abs=1e-3)
    assert seconds["reference"] == pytest.approx(16.331, abs=1e-3)
    assert seconds["update"] == pytest.approx(65.323, abs=1e-3)
    assert seconds["checkpoint"] == pytest.approx(4.818, abs=1e-3)


def test_rates_of_a_card_by_hand():
    # 8 x 7.50e9 x 64,000 operations in 16 s; 61.5e12 + 1.37 x 4.2e12 bytes in 40 s
    numbers = {"tokens": 64_000.0, "time/update": 16.0, "time/rollout": 40.0, "longest completion": 4096}
    without_vllm, assumed = step_time.rates_of_card(numbers)
    assert assumed == {"weight sync", "rollout", "checkpoint"}
    assert without_vllm.compute == pytest.approx(240.16e12, rel=1e-4)
    assert without_vllm.memory == step_time.Args().memory
    with_vllm, assumed = step_time.rates_of_card(numbers | {"logprob gap": 0.01})
    assert assumed == {"weight sync", "checkpoint"}
    assert with_vllm.memory == pytest.approx((61.480e12 + 1.37 * 4.194e12) / 40, rel=1e-4)
    # a step whose longest completion has half as many tokens read half as often all weights
    shorter, _ = step_time.rates_of_card(numbers | {"logprob gap": 0.01, "longest completion": 2048})
    assert shorter.memory == pytest.approx((30.740e12 + 1.37 * 4.194e12) / 40, rel=1e-4)


def test_the_page_has_what_is_printed(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    monkeypatch.chdir(tmp_path)  # without the results of a card
    step_time.main(step_time.Args())
    assert capsys.readouterr().out in page


def test_what_a_card_did_not_measure_is_marked(tmp_path, monkeypatch, capsys):
    numbers = {"tokens": 64_000.0, "time/update": 16.0, "time/rollout": 40.0}
    (tmp_path / "results/gpu").mkdir(parents=True)
    card = {"steps": {"step-8b-lora": {"result": "PASS", "numbers": numbers}}}
    (tmp_path / "results/gpu/card.json").write_text(json.dumps(card))
    monkeypatch.chdir(tmp_path)
    step_time.main(step_time.Args())
    lines = {line.split(" | ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["| part"].endswith("| rates of card (*: assumed) |")
    assert lines["| rollout"].endswith("* |") and not lines["| update"].endswith("* |")
