"""train_sft_warmstart.py: its rows, its loss by hand, what it refuses. test_supervised.py runs it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmt import model as policy
from rlmt.chat import encode_prompt, load_tokenizer, prepare_tokenizer
from rlmt.data import write_jsonl
import train_sft_warmstart
from train_sft_warmstart import Args, TokenRow, build_rows
import utils

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "data/toy/base")
TOY = {**train_sft_warmstart.PRESETS["toy"], "model": "data/toy/base"}


@pytest.fixture
def tokenizer():
    tokenizer = load_tokenizer(BASE)
    prepare_tokenizer(tokenizer, "think")
    return tokenizer


def trace(thinking="Budget 12.", response="You get 1 dish.", id="a") -> dict:
    messages = [{"role": "user", "content": "I have 12 dollars."}]
    return {"id": id, "messages": messages, "thinking": thinking, "response": response}


# --- rows


@pytest.mark.parametrize("think_format", ["think", "plain"])
def test_both_twins_train_on_the_same_rows(tokenizer, think_format):
    """The completion and its end are trained on; thinking that is left out counts in a row's length."""
    traces = [
        trace(),
        trace(response=""),
        trace(thinking="a </think> b"),
        trace(response="see <think>"),
        trace(thinking=" "),
        trace(response="<|im_end|> a"),
        trace(thinking="<|im_end|> a"),
        trace(response="You get 1 dish. " * 200),
        trace(thinking="Budget 12. " * 100),
    ]
    (kept,), dropped = build_rows(traces, tokenizer, think_format, 200)
    text = utils.join_thinking(traces[0]["thinking"], traces[0]["response"], think_format)
    assert tokenizer.decode(kept.ids) == text + tokenizer.eos_token
    assert kept.prompt_ids == encode_prompt(tokenizer, traces[0]["messages"])
    reasons = ["empty_response", "nested", "nested", "empty_thinking", *["control_token"] * 2]
    assert [row["reason"] for row in dropped] == [*reasons, "too_long", "too_long"]
    assert dropped[-1]["tokens"] > 200


def test_rows_without_any_thinking_train_in_the_plain_format(tokenizer):
    """Their own text is measured: its length is the limit, one less is too little."""
    traces = [trace(thinking=""), trace(thinking="")]
    kept, _ = build_rows(traces, tokenizer, "plain", 512)
    n_tokens = policy.n_tokens_of(kept[0])
    assert len(kept) == len(build_rows(traces, tokenizer, "plain", n_tokens)[0]) == 2
    assert build_rows(traces, tokenizer, "plain", n_tokens - 1)[0] == []
    assert build_rows(traces, tokenizer, "think", 512)[1][0]["reason"] == "empty_thinking"


@pytest.mark.parametrize(
    "n, changes, message",
    [
        (8, {}, "8 traces, 8 kept, dropped: none. A step takes --batch-size 16"),
        (40, {"max_length": 20}, "40 traces, 0 kept, dropped: {'too_long': 40}"),
        (40, {"think_format": "zero_think"}, "it has no warm start"),
    ],
)
def test_bad_input_is_one_clear_error(n, changes, message, tmp_path, exits):
    write_jsonl(tmp_path / "t.jsonl", [trace(id=i) for i in range(n)])
    args = Args(**{**TOY, "traces": str(tmp_path / "t.jsonl"), **changes})
    assert message in exits(train_sft_warmstart.main, args)


# --- the loss


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 100])
def test_the_loss_is_a_mean_over_completion_tokens(micro_batch_tokens):
    """By hand: one row and one token at a time."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for n_prompt, n in ((3, 30), (39, 1), (12, 20), (1, 7), (25, 25)):
        ids = torch.randint(5, 200, (n_prompt + n,), generator=generator).tolist()
        rows.append(TokenRow("a", ids[:n_prompt], ids[n_prompt:]))
    n_tokens = sum(len(row.ids) for row in rows)
    by_hand = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    loss = entropy = n_likeliest = 0.0
    for row in rows:
        logits = by_hand(torch.tensor([row.prompt_ids + row.ids])).logits[0]
        for place, token in enumerate(row.ids, start=len(row.prompt_ids)):
            logprobs = logits[place - 1].log_softmax(-1)
            loss = loss - logprobs[token] / n_tokens
            entropy += -(logprobs.exp() * logprobs).sum().item() / n_tokens
            n_likeliest += logprobs.argmax().item() == token
    loss.backward()

    args = Args(micro_batch_tokens=micro_batch_tokens)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    means = train_sft_warmstart.accumulate_gradients(
        rows, policy.Policy(model, 1.0), args, 0, policy.start_accelerator()
    )
    accuracy = n_likeliest / n_tokens
    expected = {"loss": loss.item(), "entropy": entropy, "mean_token_accuracy": accuracy}
    assert means == pytest.approx(expected, rel=1e-6)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
