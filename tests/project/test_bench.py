"""The bench runs both sides of a comparison for real, at the size `tiny`, and both sides train on the same
thing."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dev import bench
from rlmt.data import read_log, write_jsonl

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("old", ["", str(ROOT)])
def test_sft_against_trl_and_another_checkout(old, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bench.main(bench.Args(cases=("sft",), size="tiny", pairs=1, steps=1, old=old, out=tmp_path))
    (path,) = tmp_path.glob("sft-tiny-float32*__cpu.json")
    result = json.loads(path.read_text())["result"]
    side = "old" if old else "peer"
    assert result["same_tokens"]
    assert result["largest_difference"]["loss"] < 1e-5
    assert result["largest_difference"]["grad_norm"] < 1e-4
    ratio = result[f"{side} / ours"]["median"]
    ours = result["ours"]["tokens_per_second"]["median"]
    assert ratio == pytest.approx(ours / result[side]["tokens_per_second"]["median"])
    assert f"**{ratio:.2f}** (once)" in (tmp_path / "table.md").read_text()


def test_both_sides_get_the_first_of_several_cards(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    bench.main(bench.Args(cases=(), out=tmp_path))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncase $* in *--id=2) echo 2048;; *) echo 4096;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert bench.used_gib() == 2.0


def test_the_judge_s_client_is_timed(peers, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "CALLS", 8)
    monkeypatch.setattr(peers, "IN_FLIGHT", (8,))
    peers.our_judge(peers.Args(out=tmp_path))
    (line,) = read_log(tmp_path / "metrics.jsonl")
    assert 0 < line["8 in flight"] < 1 and line["num_tokens"] == 8


@pytest.fixture(scope="module")
def peers():
    from dev import peers

    return peers


@pytest.fixture(scope="module")
def work(peers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    peers.make(peers.Args(folder=folder, size="tiny"))
    return folder


def test_completions_end_as_often_as_asked(peers, work):
    model = AutoModelForCausalLM.from_pretrained(work / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work / "policy")
    prompt = [{"role": "user", "content": "w77 w301 w40"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    ids += tokenizer("w99 w500 w321").input_ids
    with torch.no_grad():
        last = model(torch.tensor([ids])).logits[0, -3:].softmax(-1)[:, peers.END_ID]
    wanted = math.log(2) / bench.SIZES["tiny"].median_tokens
    torch.testing.assert_close(last, torch.full_like(last, wanted), rtol=0.15, atol=0)


def test_real_model_and_prompts_take_the_place_of_random_ones(peers, work, tmp_path):
    """The policy is the model itself, the reward model has its body, and only short prompts are taken."""
    rows = []
    for i in range(80):
        content = "w300 w301 " * (500 if i % 5 == 0 else 3)
        rows.append({"id": str(i), "messages": [{"role": "user", "content": content}]})
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    folder = tmp_path / "folder"
    prompts = str(tmp_path / "prompts.jsonl")
    peers.make(peers.Args(folder=folder, size="small", model=work / "policy", prompts=prompts))
    chosen = [row["id"] for row in read_log(folder / "prompts.jsonl")]
    assert chosen == [str(i) for i in range(80) if i % 5]

    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "reward")
    body = policy.model.layers[0].mlp.up_proj.weight
    assert torch.equal(body, reward.model.layers[0].mlp.up_proj.weight)
    # a token costs 10 operations a weight of the policy and 2 of the reward model, without the tables of
    # embeddings
    n_policy = sum(weight.numel() for weight in policy.model.layers.parameters())
    n_policy += policy.model.norm.weight.numel()
    n_reward = n_policy + reward.score.weight.numel()
    n_policy += policy.lm_head.weight.numel()
    assert bench.operations_per_token(folder) == (8 * n_policy, 10 * n_policy + 2 * n_reward)


def test_size_small_needs_its_model(tmp_path, exits):
    small = bench.Args(size="small", cases=("grpo",), model=Path("nowhere"), out=tmp_path)
    assert "data.prepare smollm2" in exits(bench.main, small)


def test_the_committed_table_is_that_of_the_committed_results():
    folder = ROOT / "results" / "bench"
    assert bench.table(folder) == (folder / "table.md").read_text()
