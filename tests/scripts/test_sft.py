"""train_sft_warmstart.py: its rows, its loss by hand, what it refuses, and the script on the toy, killed and
resumed."""

import json
import math
import sys
from pathlib import Path

import pytest
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from launch import DDP, finished
from script_runs import in_this_process, killed_after, metrics_of, weights_of
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    get_cosine_schedule_with_warmup,
)

from rlmt import model as policy
from rlmt import chat as templates
import train_sft_warmstart
import utils
from data.toy import world
from train_sft_warmstart import Args, TokenRow, build_rows
from rlmt import chat

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "data/toy/base")
TOY = {**train_sft_warmstart.PRESETS["toy"], "model": BASE}


@pytest.fixture
def tokenizer():
    tokenizer = chat.load_tokenizer(BASE)
    templates.prepare_tokenizer(tokenizer, "think")
    return tokenizer


def trace(thinking="Budget 12.", response="You get 1 dish.", **more) -> dict:
    messages = [{"role": "user", "content": "I have 12 dollars."}]
    return {"id": "a", "messages": messages, "thinking": thinking, "response": response, **more}


# --- rows


@pytest.mark.parametrize("think_format", ["think", "plain"])
def test_the_completion_and_its_end_are_trained_on(tokenizer, think_format):
    row = trace()
    (kept,), dropped = build_rows([row], tokenizer, think_format, 512)
    expected = utils.join_thinking(row["thinking"], row["response"], think_format) + tokenizer.eos_token
    assert dropped == []
    assert tokenizer.decode(kept.ids) == expected
    assert kept.ids[-1] == tokenizer.eos_token_id
    assert kept.prompt_ids == templates.encode_prompt(tokenizer, row["messages"])


def test_malformed_and_overlong_rows_are_dropped_with_a_reason(tokenizer):
    traces = [
        trace(),
        trace(response=""),
        trace(thinking="a </think> b"),
        trace(response="see <think>"),
        trace(thinking=" "),
        trace(response="<|im_end|> a"),
        trace(thinking="<|im_end|> a"),
        trace(response="You get 1 dish. " * 200),
    ]
    reasons = ["empty_response", "nested", "nested", "empty_thinking", *["control_token"] * 2, "too_long"]
    for think_format in ("think", "plain"):  # both twins train on the same rows
        kept, dropped = build_rows(traces, tokenizer, think_format, 200)
        assert len(kept) == 1
        assert [row["reason"] for row in dropped] == reasons
        assert dropped[-1]["tokens"] > 200


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- the loss


@pytest.fixture(scope="module")
def accelerator():
    return policy.start_accelerator()


def random_rows(n: int) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(0)
    token_rows = []
    for i in range(n):
        n_prompt, n_completion = torch.randint(1, 40, (2,), generator=generator).tolist()
        ids = torch.randint(5, 200, (n_prompt + n_completion,), generator=generator).tolist()
        token_rows.append(TokenRow(str(i), ids[:n_prompt], ids[n_prompt:]))
    return token_rows


def loaded() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.fixture(scope="module")
def by_hand() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Loss, entropy, accuracy and gradient of 7 rows, one row and one token at a time."""
    model = loaded()
    token_rows = random_rows(7)
    n_tokens = sum(len(one.ids) for one in token_rows)
    loss = entropy = n_likeliest = 0.0
    for one in token_rows:
        logits = model(torch.tensor([one.prompt_ids + one.ids])).logits[0]
        for place, token in enumerate(one.ids):
            logprobs = logits[len(one.prompt_ids) + place - 1].log_softmax(-1)
            loss = loss - logprobs[token] / n_tokens
            entropy += -(logprobs.exp() * logprobs).sum().item() / n_tokens
            n_likeliest += logprobs.argmax().item() == token
    loss.backward()
    means = {"loss": loss.item(), "entropy": entropy, "mean_token_accuracy": n_likeliest / n_tokens}
    return means, gradients(model)


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 100])
def test_the_loss_is_a_mean_over_completion_tokens(by_hand, accelerator, micro_batch_tokens):
    args = Args(micro_batch_tokens=micro_batch_tokens)
    model = loaded()
    means = train_sft_warmstart.accumulate_gradients(
        random_rows(7), policy.Policy(model, 1.0), args, 0, accelerator
    )
    assert means == pytest.approx(by_hand[0], rel=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, by_hand[1][name], rtol=1e-9, atol=1e-12)


def test_the_learning_rate_is_transformers():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, math.ceil(0.1 * 37), 37)
    for step in range(37):
        expected = scheduler.get_last_lr()[0]
        assert policy.set_cosine_rate(optimizer, 3.0, step + 1, 37, 0.1) == pytest.approx(expected, abs=1e-12)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, abs=1e-12)
        optimizer.step()
        scheduler.step()


# --- the script


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("traces") / "traces.jsonl", world.trace_rows(34, 0, 1.0))


# ten steps, five an epoch; four rows of each epoch are left out
TINY = {"batch_size": 6, "micro_batch_tokens": 500, "save_steps": 1}


def train(traces: str, out: Path, **changes) -> Path:
    """Runs the script with the flags TINY and `changes`; returns its folder."""
    values = {**TOY, "model": "data/toy/base", "traces": traces, **TINY, **changes}
    with in_this_process():
        train_sft_warmstart.main(Args(**values, preset="toy", out=str(out)))
    return out


def start(traces: str, out: Path, *launcher: str) -> list[str]:
    """Returns the command line that does what `train` does, behind `launcher`."""
    command = [sys.executable, *launcher, "train_sft_warmstart.py", "--preset", "toy", "--traces", traces]
    for name, value in TINY.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    return [*command, "--out", str(out)]


@pytest.fixture(scope="module")
def whole(traces, tmp_path_factory) -> Path:
    """A run that nothing disturbs."""
    return train(traces, tmp_path_factory.mktemp("whole") / "run")


def test_what_a_run_writes(whole):
    run = whole
    names = {path.name for path in run.iterdir()}
    files = {
        "config.json",
        "command.txt",
        "env.txt",
        "metrics.jsonl",
        "dropped.jsonl",
        "summary.json",
        "model",
    }
    assert names >= files | {"checkpoint-8", "checkpoint-9", "checkpoint-10"}

    metrics = metrics_of(run)
    committed = (ROOT / "results/toy/toy-sft-think-s0/metrics.jsonl").read_text().splitlines()[0]
    assert metrics[0].keys() | {"seconds", "step_time"} == json.loads(committed).keys()
    assert [row["step"] for row in metrics] == list(range(1, 11))
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert metrics[0]["learning_rate"] == 0.0
    assert metrics[1]["learning_rate"] == TOY["learning_rate"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["n_rows"], summary["dropped"]) == (10, 34, {})
    assert summary["loss"] == pytest.approx(sum(row["loss"] for row in metrics) / 10)

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    AutoModelForCausalLM.from_pretrained(run / "model")
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token != tokenizer.eos_token
    end_of_base = AutoTokenizer.from_pretrained(BASE).eos_token_id
    ends = GenerationConfig.from_pretrained(run / "model").eos_token_id
    assert ends == [end_of_base, tokenizer.eos_token_id]
    assert json.loads((run / "model" / "think_format.json").read_text()) == {"think_format": "think"}


def test_a_killed_run_ends_with_the_same_bits(whole, traces, tmp_path, capsys):
    broken = tmp_path / "broken"
    killed_after(8, whole, broken)  # in the second epoch
    train(traces, broken, resume=True)
    assert "resumes from" in capsys.readouterr().out

    expected = weights_of(whole / "model")
    found = weights_of(broken / "model")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert metrics_of(broken) == metrics_of(whole)


def test_two_processes_learn_what_one_learns(whole, traces, tmp_path):
    out = tmp_path / "DDP"
    finished(start(traces, out, *DDP))
    for expected, found in zip(metrics_of(whole), metrics_of(out), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    expected = weights_of(whole / "model")
    for name, weight in weights_of(out / "model").items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_lora_is_merged_into_the_weights_that_it_was_trained_with(traces, tmp_path, load_in_4bit):
    adapter = {"lora_r": 4, "learning_rate": 2e-2, "load_in_4bit": load_in_4bit}
    out = train(traces, tmp_path / "run", batch_size=8, **adapter)
    metrics = metrics_of(out)
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    merged = weights_of(out / "model")
    start = load_file(Path(BASE) / "model.safetensors")
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    frozen = start[f"{name}.weight"]
    if load_in_4bit:
        frozen = dequantize_4bit(*quantize_4bit(frozen, compress_statistics=True, quant_type="nf4"))
        assert 0.01 < (frozen - start[f"{name}.weight"]).norm() / frozen.norm() < 0.2
    a = adapter[f"base_model.model.{name}.lora_A.weight"]
    b = adapter[f"base_model.model.{name}.lora_B.weight"]
    torch.testing.assert_close(merged[f"{name}.weight"], frozen + 2 * b @ a, rtol=0, atol=1e-5)
    assert merged.keys() == start.keys()
    assert "quantization_config" not in json.loads((out / "model" / "config.json").read_text())


def test_a_killed_run_in_4_and_8_bits_ends_with_the_same_bits(traces, tmp_path):
    """Weights in 4, moments in 8; the adapter is wide enough that its moments are."""
    bits = {"lora_r": 64, "learning_rate": 2e-3, "load_in_4bit": True, "optim": "adamw_8bit"}
    bits |= {"gradient_checkpointing": True, "epochs": 1.0}
    whole = train(traces, tmp_path / "whole", **bits)
    states = torch.load(whole / "checkpoint-3" / "model-optimizer-rank0.pt", weights_only=True)
    states = [state["__bnb_optimizer_quant_state__"] for state in states["state"].values()]
    assert sum(state["state1"].dtype == torch.uint8 for state in states) > len(states) / 2

    broken = tmp_path / "broken"
    killed_after(3, whole, broken)
    train(traces, broken, resume=True, **bits)
    expected = weights_of(whole / "model")
    found = weights_of(broken / "model")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert metrics_of(broken) == metrics_of(whole)
    assert metrics_of(whole)[-1]["loss"] < 0.7 * metrics_of(whole)[0]["loss"]
