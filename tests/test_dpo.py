"""Pairs from scored completions and from files, the DPO loss against hand-worked numbers, and work that survives a kill."""

import json
import math
import zlib
from collections import Counter

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import train_dpo
import utils
from train_dpo import build_pairs, read_pairs, share


def row(
    name: str, reward: float | None, status: str = "ok", step: int = 1, ids: list[int] | None = None
) -> dict:
    return {
        "step": step,
        "id": name,
        "reward": reward,
        "status": status,
        "ids": ids or [zlib.crc32(repr((name, reward)).encode())],
    }


# --- pairs


def test_best_against_worst():
    rows = [row("a", 1.0), row("b", 5.0), row("a", 3.0), row("a", -2.0), row("b", 4.0)]
    pairs, skipped = build_pairs(rows, 2)
    assert pairs == [
        {"id": "a", "chosen": rows[2], "rejected": rows[3]},
        {"id": "b", "chosen": rows[1], "rejected": rows[4]},
    ]
    assert not skipped


def test_what_is_never_paired():
    rows = [row("tie", 1.0), row("tie", 1.0), row("tie", 1.0)]
    rows += [row("one", 1.0), row("one", None, "truncated")]
    rows += [
        row("none", None, status)
        for status in ("no_open", "no_close", "nested", "empty_response", "truncated")
    ]
    rows += [row("good", 1.0), row("good", 9.0, "truncated"), row("good", -9.0, "nested"), row("good", 2.0)]
    pairs, skipped = build_pairs(rows, 2)
    assert [(p["id"], p["chosen"]["reward"], p["rejected"]["reward"]) for p in pairs] == [("good", 2.0, 1.0)]
    assert skipped == {"tie": 1, "too_few_valid": 1, "no_valid": 1}
    assert build_pairs(rows, 3) == ([], Counter(tie=1, too_few_valid=2, no_valid=1))


def test_duplicates_and_rounds():
    """Equal completions have equal rewards, so they tie; the same prompt in two rounds makes two groups."""
    pairs, skipped = build_pairs(
        [row("a", 1.0), row("a", 1.0), row("a", 2.0, step=2), row("a", 3.0, step=2)], 2
    )
    assert [(p["chosen"]["reward"], p["rejected"]["reward"]) for p in pairs] == [(3.0, 2.0)] and skipped == {
        "tie": 1
    }
    assert build_pairs([row("a", 1.0, ids=[5, 6]), row("a", 1.0000002, ids=[5, 6])], 2) == (
        [],
        Counter(tie=1),
    )
    assert build_pairs([], 2) == ([], Counter())


@pytest.fixture
def tokenizer():
    tok = AutoTokenizer.from_pretrained("data/toy/base")
    utils.prepare_tokenizer(tok, "think")
    return tok


def test_a_preference_file_becomes_the_tokens_of_sft(tokenizer, tmp_path):
    user = [{"role": "user", "content": "ham, please"}]
    full = {
        "id": "x",
        "messages": user,
        "chosen": "ham 5",
        "rejected": "cheese",
        "chosen_thinking": "ham",
        "rejected_thinking": "no",
    }
    rows = [
        full,
        {**full, "rejected_thinking": ""},
        {**full, "rejected": "ham 5", "rejected_thinking": "ham"},
        {**full, "chosen": "ham " * 200},
        {**full, "chosen_thinking": None, "chosen": "<think> ham </think> cheese"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    args = train_dpo.Args(pairs=str(tmp_path / "p.jsonl"), max_completion_tokens=100)
    pairs, skipped = read_pairs(args, tokenizer, "think")
    assert skipped == {"malformed": 1, "tie": 1, "too_long": 1} and len(pairs) == 2
    assert pairs[0]["prompt_ids"] == utils.encode_prompt(tokenizer, user)
    assert pairs[0]["chosen_ids"] == utils.encode_completion(tokenizer, "<think>\nham\n</think>\n\nham 5")
    assert tokenizer.decode(pairs[1]["chosen_ids"]) == "<think> ham </think> cheese<|im_end|>"
    pairs, skipped = read_pairs(args, tokenizer, "plain")
    assert tokenizer.decode(pairs[0]["chosen_ids"]) == "ham 5<|im_end|>"
    assert skipped == {"tie": 1, "too_long": 1, "malformed": 1}


# --- the loss


def dpo_loss(chosen: float, rejected: float, ref_chosen: float, ref_rejected: float, beta: float) -> float:
    """-log sigmoid(beta ((log p(c) - log ref(c)) - (log p(r) - log ref(r)))), Rafailov et al. 2023, equation 7."""
    return math.log1p(math.exp(-beta * ((chosen - ref_chosen) - (rejected - ref_rejected))))


def log_prob(model, prompt: list[int], completion: list[int]) -> float:
    """Sum over the completion's tokens, one forward a token."""
    total = 0.0
    for n, token in enumerate(completion):
        with torch.no_grad():
            total += (
                model(torch.tensor([prompt + completion[:n]])).logits[0, -1].log_softmax(-1)[token].item()
            )
    return total


def test_dpo_loss_on_sampled_tokens(tokenizer, tmp_path):
    """Two pairs of unequal lengths, one with tokens that do not survive decoding; log 2 at first, then as by hand."""
    assert dpo_loss(-1.0, -3.0, -2.0, -2.5, 0.1) == pytest.approx(math.log(1 + math.exp(-0.15)))
    line = tokenizer.convert_tokens_to_ids("\n")
    assert tokenizer(tokenizer.decode([line, line]), add_special_tokens=False)["input_ids"] != [line, line]
    end = tokenizer.eos_token_id
    pairs = [
        {"prompt_ids": [7, 8, 9], "chosen_ids": [line, line, end], "rejected_ids": [11, 12, 13, 14, end]},
        {"prompt_ids": [7, 8, 9, 10, 11, 12], "chosen_ids": [20, end], "rejected_ids": [21, end]},
    ]
    Dataset.from_list(pairs).save_to_disk(tmp_path / "pairs")
    trainer = train_dpo.TokenDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("data/toy/base"),
        args=DPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            beta=0.1,
            precompute_ref_log_probs=True,
            max_length=None,
            bf16=False,
            use_cpu=True,
            report_to=[],
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.load_from_disk(tmp_path / "pairs"),
        processing_class=tokenizer,
    )
    assert [
        {k: r[k] for k in pairs[0]} for r in trainer.train_dataset
    ] == pairs  # not decoded, rendered or cut
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(math.log(2), abs=1e-6)
    reference, policy = (AutoModelForCausalLM.from_pretrained("data/toy/base") for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for a, b in zip(trainer.model.parameters(), policy.parameters()):
            a += 0.1 * torch.randn_like(a)
            b.copy_(a)
    losses = []
    for p in pairs:
        sides = [
            log_prob(m, p["prompt_ids"], p[s])
            for m in (policy, reference)
            for s in ("chosen_ids", "rejected_ids")
        ]
        losses.append(dpo_loss(*sides, 0.1))
    assert abs(losses[0] - math.log(2)) > 1e-3
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(sum(losses) / 2, abs=1e-4)


def test_trl_still_takes_ready_datasets():
    import inspect

    found = list(inspect.signature(DPOTrainer._prepare_dataset).parameters)
    assert found[:2] == ["self", "dataset"], (
        "TRL moved DPOTrainer._prepare_dataset; adapt train_dpo.py, or pin trl==1.16.0"
    )


# --- work that is kept


def test_work_that_was_done_is_kept(tmp_path):
    PartialState(cpu=True)
    asked = []

    def work(keys, done):
        for key in (k for k in keys if k not in done):
            asked.append(key)
            if key == "c" and asked.count("c") == 1:
                raise KeyboardInterrupt
            yield key, {"twice": key * 2}

    with pytest.raises(KeyboardInterrupt):
        share(tmp_path, "doubles", list("abcd"), work)
    with open(tmp_path / "doubles-0.jsonl", "a") as f:
        f.write('{"key": "d", "twi')  # as a kill in the middle of a line leaves it
    (tmp_path / "doubles-1.jsonl").write_text(
        '{"key": "e", "twice": "ee"}\n'
    )  # what a second process had done
    rows = share(tmp_path, "doubles", list("abcde"), work)
    assert asked == ["a", "b", "c", "c", "d"] and {k: r["twice"] for k, r in rows.items()} == {
        k: k * 2 for k in "abcde"
    }
    assert share(tmp_path, "doubles", list("abcde"), work) == rows and len(asked) == 5
