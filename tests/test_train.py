"""The pure functions of the scripts: SFT rows and masks, preference pairs, calibration, prompts, evaluation summaries."""

import json
import math

import pytest
from transformers import AutoTokenizer

import train_dpo
import train_grpo
import train_ppo
import train_reward
import train_sft_warmstart
import utils


@pytest.fixture
def tokenizer():
    tok = AutoTokenizer.from_pretrained("data/toy/base")
    utils.prepare_tokenizer(tok, "think")
    return tok


def trace(thinking="Budget 12.", response="You get 1 dish.", **more) -> dict:
    return {
        "id": "a",
        "messages": [{"role": "user", "content": "I have 12 dollars."}],
        "thinking": thinking,
        "response": response,
        **more,
    }


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
    rows = [
        trace(),
        trace(response=""),
        trace(thinking="a </think> b"),
        trace(response="see <think>"),
        trace(thinking=" "),
        trace(response="You get 1 dish. " * 200),
    ]
    for think_format in ("think", "plain"):  # both twins train on the same rows
        kept, dropped = train_sft_warmstart.build_rows(rows, tokenizer, think_format, 200)
        assert (
            len(kept) == 1
            and [d["reason"] for d in dropped][-1] == "too_long"
            and dropped[-1]["tokens"] > 200
        )
        assert {d["reason"] for d in dropped[:-1]} <= {
            "empty_response",
            "nested",
            "tag_inside_text",
            "empty_thinking",
        }


# --- train_reward


def test_pairs_are_rendered_as_the_scorer_renders_them(tokenizer):
    row = {
        "id": "p",
        "messages": trace()["messages"],
        "chosen": "You get 1 dish.",
        "rejected": "You have great taste!",
        "chosen_thinking": "Budget 12.",
        "rejected_thinking": "Budget 13.",
    }
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


def test_every_preset_builds():
    for script in (train_grpo, train_ppo, train_dpo, train_sft_warmstart, train_reward):
        for name, values in script.PRESETS.items():
            script.Args(**values, preset=name)


# --- what a script says before it starts


def test_traces_most_of_which_are_malformed_are_no_training_set(here, tmp_path):
    """Tags left in the thinking, the commonest mistake with traces of one's own."""
    rows = [trace(id=n, thinking="<think> Budget 12. </think>" if n else "Budget 12.") for n in range(4)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = here("train_sft_warmstart.py", "--preset", "toy", "--traces", tmp_path / "t.jsonl", "--dry-run")
    assert done.returncode == 2 and "only 1 of 4 traces can be trained on ({'nested': 3})" in done.stderr


def test_prompts_of_one_id_are_refused(here, tmp_path):
    rows = [{"id": 1, "messages": [{"role": "user", "content": text}]} for text in "ab"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = here(
        "train_grpo.py",
        "--preset",
        "toy",
        "--model",
        "data/toy/base",
        "--prompts",
        tmp_path / "p.jsonl",
        "--dry-run",
    )
    assert done.returncode == 2 and "two rows have the same id" in done.stderr


def test_what_a_preset_sets_is_printed_and_lora_s_rate_is_doubted(here):
    """Also where the preset has a rate of its own; not where it is the preset that sets LoRA, or the rate is given."""
    args = ["train_grpo.py", "--preset", "toy", "--model", "nowhere"]
    said = [
        here(*args, *more).stdout for more in ((), ("--lora-r", 4), ("--lora-r", 4, "--learning-rate", 1e-2))
    ]
    assert all("--preset toy sets prompts data/toy/rl_prompts.jsonl, " in text for text in said)
    assert ["LoRA wants about ten times as much" in text for text in said] == [False, True, False]


@pytest.mark.parametrize(
    "url", ["user:hunter2@localhost:8000/v1", "http://user:hunter2@h/v1", "http://h/v1?key=hunter2"]
)
def test_a_key_in_a_url_is_refused_before_it_is_written(here, tmp_path, url):
    for flag, value in (("--judge-url", url), ("--gold", f"judge:m@{url}")):
        done = here(
            "train_grpo.py",
            "--preset",
            "toy",
            "--model",
            "data/toy/base",
            flag,
            value,
            "--out",
            tmp_path / "run",
        )
        assert done.returncode == 2 and "no user, password or key belongs into a URL" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_judge_at_a_url_is_none(here, tmp_path):
    done = here(
        "train_grpo.py",
        "--preset",
        "toy",
        "--model",
        "nowhere",
        "--gold",
        "judge:gpt-4o@http://localhost:8000/v1",
    )
    assert "nowhere is no model folder" in done.stderr
