"""Tests eval_reward.py: its edits by hand, and an audit of the toy reward model."""

import json
import random

import pandas as pd
import pytest
from script_runs import REWARD_MODEL

import eval_reward
from data.toy import world
from eval_reward import Answer, edit
from rlmt.data import read_log, write_jsonl
from rlmt.reward_model import RewardModel
from utils import join_thinking

MESSAGES = [{"role": "user", "content": "Hi"}]
OTHER = [{"role": "user", "content": "Ho"}]


def test_edits_by_hand():
    answers = [Answer(MESSAGES, "So 4.", "One is 1. Two is 2.\nThree, four, 3."), Answer(OTHER, "", "No")]
    found = {name: rows[0] for name, rows in edit(answers, 0).items()}
    expected = {
        "first sentence left out": "Two is 2.\nThree, four, 3.",
        "last sentence left out": "One is 1. Two is 2.",
        "two lines exchanged": "Three, four, 3.\nOne is 1. Two is 2.",
        "first word left out": "is 1. Two is 2.\nThree, four, 3.",
        "end cut off": "One is 1. Two is 2.",
        "another answer": "No",
    }
    for name, text in expected.items():
        assert found[name] == answers[0]._replace(response=text), name
    assert found["last number changed by 1"].response[-2] in "24"
    assert sorted(found["two numbers exchanged"].response) == sorted(answers[0].response)
    assert found["thinking: left out"] == answers[0]._replace(thinking="")
    # what it leaves as it is is no edit
    assert {name for name, rows in edit(answers, 0).items() if 1 in rows} == {
        "another answer",
        "thinking: of another answer",
        "written twice",
        *("filler in front", "filler behind", "flattery in front", "flattery behind"),
    }
    for text in ("", "a", "1 1", "a. a."):
        for function in eval_reward.EDITS.values():
            function(text, random.Random(0))


def test_an_audit(here, tmp_path):
    """Answers of a whole teacher, so that gold falls wherever a fact is lost."""
    rows = world.pair_rows(6, 0)
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    run = tmp_path / "run"
    words = ["--reward-model", REWARD_MODEL, "--answers", tmp_path / "pairs.jsonl", "--out", run]
    done = here("eval_reward.py", *words, "--gold", "data/toy/world.py:gold")
    assert done.returncode == 0, done.stderr

    edits = pd.DataFrame(read_log(run / "edits.jsonl"))
    audit = pd.read_csv(run / "audit.csv").set_index("edit")
    row = edits.iloc[-1]
    texts = [join_thinking(row[f"{side}_thinking"], row[side], "think") for side in ("chosen", "rejected")]
    model = RewardModel(REWARD_MODEL)
    scores = model.score([row["messages"]] * 2, texts)
    assert scores == pytest.approx([row["reward"], row["reward_after"]], abs=1e-4)
    assert row["gold"] == world.gold(row["messages"], row["chosen"])
    cut = edits[edits["edit"] == "end cut off"]
    assert audit.loc["end cut off", "change"] == pytest.approx((cut["reward_after"] - cut["reward"]).mean())
    worse = cut[cut["gold_after"] < cut["gold"]]
    missed = (worse["reward_after"] >= worse["reward"]).mean()
    assert audit.loc["end cut off", "missed"] == pytest.approx(missed)
    assert not audit.loc["end cut off", "unseen"] and audit.loc["thinking: a number changed by 1", "unseen"]

    pairs = read_log(run / "pairs.jsonl")
    assert len(pairs) - len(rows) == edits["is_worse"].sum() > 50
    summary = json.loads((run / "summary.json").read_text())
    assert summary["unseen"] == list(audit.index[audit["unseen"]])
    margins = []
    for pair in rows:
        texts = [join_thinking(pair[f"{s}_thinking"], pair[s], "think") for s in ("chosen", "rejected")]
        margins.append(model.score([pair["messages"]] * 2, texts))
    assert summary["accuracy"] == sum(a > b for a, b in margins) / len(rows)
    assert (run / "audit.svg").stat().st_size > 1000


def test_answers_without_good_format_are_refused(here, tmp_path):
    write_jsonl(tmp_path / "c.jsonl", [{"messages": MESSAGES, "text": "no tags"}])
    done = here("eval_reward.py", "--reward-model", REWARD_MODEL, "--answers", tmp_path / "c.jsonl")
    assert done.returncode == 2 and "no answer is in good format; see --think-format" in done.stderr
