"""The pure functions of the scripts: SFT rows and masks, preference pairs, calibration, prompts, evaluation summaries."""

import math

import pytest
from transformers import AutoTokenizer

import train_dpo
import train_grpo
import train_ppo
import train_reward
import train_sft_warmstart
import training
import utils


@pytest.fixture
def tokenizer():
    tok = AutoTokenizer.from_pretrained("data/toy/base")
    utils.prepare_tokenizer(tok, "think")
    return tok


def trace(thinking="Budget 12.", response="You get 1 dish.", **more) -> dict:
    return {"id": "a", "messages": [{"role": "user", "content": "I have 12 dollars."}], "thinking": thinking,
            "response": response, **more}  # fmt: skip


# --- train_sft_warmstart


@pytest.mark.parametrize("think_format", ["think", "plain"])
def test_supervised_span_is_the_completion_and_its_end_to_the_byte(tokenizer, think_format):
    row = trace()
    (kept,), dropped = train_sft_warmstart.build_rows([row], tokenizer, think_format, 512)
    labels = kept["labels"]
    first = next(i for i, x in enumerate(labels) if x != -100)
    assert dropped == [] and -100 not in labels[first:] and labels[first:] == kept["input_ids"][first:]
    expected = utils.join_thinking(row["thinking"], row["response"], think_format) + tokenizer.eos_token
    assert tokenizer.decode(labels[first:]) == expected and labels[-1] == tokenizer.eos_token_id
    assert kept["input_ids"][:first] == utils.encode_prompt(tokenizer, row["messages"])


def test_pad_equal_to_eos_cannot_unsupervise_the_end(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    (kept,), _ = train_sft_warmstart.build_rows([trace()], tokenizer, "think", 512)
    assert kept["labels"][-1] == tokenizer.eos_token_id


def test_malformed_and_overlong_rows_are_dropped_with_a_reason(tokenizer):
    rows = [trace(), trace(response=""), trace(thinking="a </think> b"), trace(response="see <think>"), trace(thinking=" "),
            trace(response="You get 1 dish. " * 200)]  # fmt: skip
    for think_format in ("think", "plain"):  # both twins train on the same rows
        kept, dropped = train_sft_warmstart.build_rows(rows, tokenizer, think_format, 200)
        assert len(kept) == 1 and [d["reason"] for d in dropped][-1] == "too_long" and dropped[-1]["tokens"] > 200
        assert {d["reason"] for d in dropped[:-1]} <= {"empty_response", "nested", "tag_inside_text", "empty_thinking"}


# --- train_reward


def test_pairs_are_rendered_as_the_scorer_renders_them(tokenizer):
    row = {"id": "p", "messages": trace()["messages"], "chosen": "You get 1 dish.", "rejected": "You have great taste!",
           "chosen_thinking": "Budget 12.", "rejected_thinking": "Budget 13."}  # fmt: skip
    (pair,), _ = train_reward.build_pairs([row], tokenizer, "response", 512)
    scorer = utils.RewardModel.__new__(utils.RewardModel)  # encode() needs no weights
    scorer.tokenizer, scorer.max_length, scorer.n_scored, scorer.n_truncated = tokenizer, 512, 0, 0
    assert pair["chosen_ids"] == scorer.encode(row["messages"], row["chosen"])
    (both,), _ = train_reward.build_pairs([row], tokenizer, "think+response", 512)
    assert tokenizer.decode(both["chosen_ids"]).count("<think>\nBudget 12.\n</think>") == 1
    same = {**row, "rejected": row["chosen"]}
    assert train_reward.build_pairs([same, row], tokenizer, "response", 10)[1] == [
        {"id": "p", "reason": "identical"},
        {"id": "p", "reason": "too_long", "tokens": max(len(pair["chosen_ids"]), len(pair["rejected_ids"]))},
    ]


def test_calibration_by_hand():
    logit = lambda p: math.log(p / (1 - p))
    out = train_reward.calibration([logit(0.9)] * 8 + [-logit(0.9)] * 2 + [0.0])
    assert out["accuracy"] == pytest.approx(8.5 / 11) and out["n"] == 11
    # ten pairs at 0.9 of which 0.8 were right, one at 0.5 that is half right
    assert out["ece"] == pytest.approx(10 / 11 * 0.1)
    assert sum(b["n"] for b in out["bins"]) == 11


# --- train_grpo


def test_long_prompts_are_listed_not_cut(tokenizer, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "s", "messages": [{"role": "user", "content": "ham"}]}\n'
                    '{"id": "l", "messages": [{"role": "user", "content": "' + "ham " * 300 + '"}]}\n')  # fmt: skip
    kept, dropped = training.load_prompts(str(path), tokenizer, 100)
    assert [k["id"] for k in kept] == ["s"] and [(d["id"], d["reason"]) for d in dropped] == [("l", "too_long")]
    assert dropped[0]["tokens"] > 300


def test_every_preset_builds():
    for script in (train_grpo, train_ppo, train_dpo, train_sft_warmstart, train_reward):
        for name, values in script.PRESETS.items():
            script.Args(**values, preset=name)
