"""train_sft_warmstart.py: its rows, its loss by hand, what it refuses. test_supervised.py runs it."""

import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy
from script_runs import BASE
from transformers import AutoModelForCausalLM

from rlmt.chat import encode_prompt, load_tokenizer, prepare_tokenizer
from rlmt.data import read_log, write_jsonl
from rlmt.learner import Learner, Policy, n_tokens_of
from rlmt.model import start_accelerator
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
    reasons = ["empty_response", "nested", "empty_thinking", *["control_token"] * 2]
    assert [row["reason"] for row in dropped] == [*reasons, "too_long", "too_long"]
    assert dropped[-1]["tokens"] > 200


def test_rows_without_any_thinking_train_in_the_plain_format(tokenizer):
    """Their own text is measured: its length is the limit."""
    [row], _ = build_rows([trace(thinking="")], tokenizer, "plain", 512)
    assert build_rows([trace(thinking="")], tokenizer, "plain", n_tokens_of(row)) == ([row], [])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 9}, "A step takes --batch-size 9"),
        ({"think_format": "zero_think"}, "has no warm start"),
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
    theirs = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    losses, is_likeliest = [], []
    for row in rows:
        n = len(row.ids)
        logits = theirs(torch.tensor([row.prompt_ids + row.ids])).logits[0, -n - 1 : -1]
        labels = torch.tensor(row.ids)
        losses.append(cross_entropy(logits, labels, reduction="none"))
        is_likeliest.append((logits.argmax(-1) == labels).double())
    loss = torch.cat(losses).mean()
    loss.backward()

    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    policy = Learner(Policy(model, 1.0), start_accelerator(), micro_batch_tokens, 0.0, 0.0)
    means = train_sft_warmstart.accumulate_gradients(rows, policy, len(rows))
    assert means["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert means["mean_token_accuracy"] == pytest.approx(torch.cat(is_likeliest).mean().item())
    assert means["ends_turn"] == torch.stack([of_row[-1] for of_row in is_likeliest]).mean().item()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_lora_learns_an_end_of_turn_that_the_base_model_never_wrote(tmp_path):
    """The token's row is zero, as in base models. Without training it the share stays 0."""
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    tokenizer = load_tokenizer(BASE)
    prepare_tokenizer(tokenizer, "think")
    model = AutoModelForCausalLM.from_pretrained(BASE)
    model.lm_head.weight.data[tokenizer.eos_token_id] = 0.0
    model.save_pretrained(base)
    write_jsonl(tmp_path / "t.jsonl", [trace()] * 16)
    args = Args(model=str(base), traces=str(tmp_path / "t.jsonl"), out=str(tmp_path / "run"), lora_r=8)
    args.epochs, args.learning_rate = 30, 1e-2
    train_sft_warmstart.main(args)
    first, *_, last = read_log(tmp_path / "run" / "metrics.jsonl")
    assert first["ends_turn"] == 0.0 and last["ends_turn"] > 0.99
