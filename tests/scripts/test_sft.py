"""train_sft_warmstart.py: its rows, its loss by hand, what it refuses. test_supervised.py runs it."""

import pytest
import torch
from script_runs import BASE
from transformers import AutoModelForCausalLM

from rlmt import model as policy
from rlmt.chat import encode_prompt
from rlmt.data import write_jsonl
import train_sft_warmstart
from train_sft_warmstart import Args, TokenRow, build_rows
import utils


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
    traces = [trace(thinking="")]
    [row], _ = build_rows(traces, tokenizer, "plain", 512)
    n_tokens = policy.n_tokens_of(row)
    assert [len(build_rows(traces, tokenizer, "plain", n)[0]) for n in (n_tokens, n_tokens - 1)] == [1, 0]
    assert build_rows(traces, tokenizer, "think", 512)[1][0]["reason"] == "empty_thinking"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 9}, "8 traces, 8 kept, dropped: none. A step takes --batch-size 9"),
        ({"think_format": "zero_think"}, "it has no warm start"),
    ],
)
def test_bad_input_is_one_clear_error(changes, message, tmp_path, exits):
    write_jsonl(tmp_path / "t.jsonl", [trace(id=i) for i in range(8)])
    args = Args(model=BASE, traces=str(tmp_path / "t.jsonl"), **changes)
    assert message in exits(train_sft_warmstart.main, args)


# --- the loss


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 100])
def test_the_loss_is_a_mean_over_completion_tokens(micro_batch_tokens):
    """Against transformers, one row at a time."""
    rows = []
    for n_prompt, n in ((3, 30), (39, 1), (12, 20), (1, 7), (25, 25)):
        ids = list(range(5 + n_prompt, 5 + 2 * n_prompt + n))
        rows.append(TokenRow("a", ids[:n_prompt], ids[n_prompt:]))
    n_tokens = sum(len(row.ids) for row in rows)
    theirs = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    loss = n_likeliest = 0.0
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.ids])
        labels = torch.tensor([[-100] * len(row.prompt_ids) + row.ids])
        output = theirs(ids, labels=labels)
        loss = loss + output.loss * len(row.ids) / n_tokens
        n_likeliest += (output.logits[0, :-1].argmax(-1) == labels[0, 1:]).sum().item()
    loss.backward()

    args = Args(micro_batch_tokens=micro_batch_tokens)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    means = train_sft_warmstart.accumulate_gradients(
        rows, policy.Policy(model, 1.0), args, 0, policy.start_accelerator()
    )
    assert means["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert means["mean_token_accuracy"] == pytest.approx(n_likeliest / n_tokens)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
