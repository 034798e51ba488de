"""rewards/: names and options, how rewards combine, and hand-worked values of the unsupervised and shaped
ones."""

import math
import subprocess
import sys

import pytest

import rewards
from rewards import gold, scorer, unsupervised
from rlmt.data import read_log, to_jsonl


def row(response="", status="ok", n_tokens=10, **fields):
    return {
        "id": "r",
        "messages": [{"role": "user", "content": "Q?"}],
        "text": response,
        "response": response,
        "status": status,
        "n_tokens": n_tokens,
    } | fields


def near(values):
    return pytest.approx(values, abs=1e-12)


# --- 1. unsupervised, and the form of a completion


def test_majority():
    groups = [
        ["\\boxed{1,000}", "so 1000.", "7", "none"],
        ["3", "4", "4", "3"],  # a tie: 3 stands first
        ["a", "b", "c", "d"],
        ["\\boxed{1/2}", "\\boxed{0.5}", "\\boxed{\\frac12}", "2"],
        ["\\boxed{20\\%}", "about 20%", "3", "3"],
        ["\\boxed{\\text{(C)}}", "The answer is **C**.", "So $x = 2\\sqrt{3}$.", "B"],
        ["5 or 3½", "\\boxed{3 1/2}", "5", "\\[ x = \\frac{1}{2} \\]"],
    ]
    values = unsupervised.majority([row(text) for group in groups for text in group], 4)
    assert values[:8] == [1, 1, 0, 0, 1, 0, 0, 1]
    assert values[8:] == [*[None] * 4, 1, 1, 1, 0, *[1, 1, 0, 0] * 3]


# --- 2. names, weights and options


def parts_of(*words: str, options: tuple = ()) -> list:
    return list(rewards.read_parts(words, options).values())


OWN = """
from __future__ import annotations

def brief(rows, per_token=-1.0, limit: int | None = None):
    return [per_token * min(row["n_tokens"], limit or 99) for row in rows]

def reads_the_prompt(rows, group_size, max_tokens):
    return [row["answer"] * group_size + max_tokens for row in rows]
"""


def test_a_run_ends_when_its_answers_or_words_are_all_alike(tmp_path):
    healthy = {"collapse/agreement": 0.5, "entropy": 0.5}
    for sign in ({"collapse/agreement": 1.0}, {"entropy": 0.001}):
        lines = [{"step": step} | healthy | sign for step in range(1, 9)]  # before a resume
        (tmp_path / "metrics.jsonl").write_text(to_jsonl(lines))
        collapse = unsupervised.Collapse(tmp_path, group_size=2)
        assert not collapse.check(8, lines[-1], []) and not collapse.check(9, healthy | sign, [])
        reason = collapse.check(10, healthy | sign, [])
        assert reason.startswith("collapsed") and not collapse.check(11, healthy, [])


def test_words_are_names_weights_and_gates(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    found = parts_of("math:2", "format:gate", f"{own}:brief")
    shown = [(part.name, part.weight, part.field) for part in found]
    assert shown == [("math", 2.0, "answer"), ("format", None, ""), ("brief", 1.0, "")]
    options = ("brief.limit=3", "brief.per_token=-0.5", "code.partial=true")
    brief, code = parts_of(f"{own}:brief", "code:1", options=options)
    assert brief.options == {"per_token": -0.5, "limit": 3} and code.options["partial"] is True
    assert scorer.call(brief, [row(n_tokens=n) for n in (1, 9)], None, 2, 100) == [-0.5, -1.5]
    [part] = parts_of(f"{own}:reads_the_prompt:1")
    assert scorer.call(part, [row(answer=3)], None, 2, 100) == [106.0]
    [part] = parts_of("math:1")
    assert scorer.call(part, [row("3"), row("3", answer=3)], None, 2, 100) == [None, 1.0]
    every = [f"{name}:1" for name in rewards.REWARDS]
    assert len(parts_of(*every)) == len(rewards.REWARDS)  # every name is there


LIGHT = """
import sys
import train_grpo
heavy = "rewards.judged rewards.unsupervised rewards.dense rewards.verified rlmt.reward_model rlmt.sandbox".split()
print([name for name in (*heavy, "benchmarks", "openai", "math_verify") if name in sys.modules])
"""


def test_what_no_run_names_is_not_imported():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


# --- 3. several become one


def combine(values: dict, words: list, rows=None, group_size=0, margin=1.0, floors=()) -> list:
    """The rewards; None where there is none."""
    rows = rows or [row() for _ in next(iter(values.values()))]
    parts = rewards.read_parts(words)
    totals = []
    for i, one in enumerate(rows):
        of_row = {name: column[i] for name, column in values.items()}
        totals.append(scorer.add_up(one | {"gets_floor": i in floors}, of_row, parts))
    found = scorer.set_floors(totals, group_size or len(rows), margin)
    return [None if math.isnan(value) else value for value in found]


def test_a_weighted_sum_is_known_where_all_its_parts_are():
    values = {"preference": [1.0, 2.0, None], "repetition": [0.5, None, 1.0]}
    assert combine(values, ["preference:1", "repetition:2"]) == [2.0, None, None]
    assert combine(values, ["preference:1", "repetition:0"]) == [1.0, 2.0, None]  # a label
    rows = [row(answer="1"), row(answer="1"), row(), row(answer="")]
    values = {"math": [1.0, None, None, None], "preference": [0.5, 0.5, 0.5, None]}
    assert combine(values, ["math:1", "preference:1"], rows, 2) == [1.5, None, 0.5, None]
    assert combine({"math": [1.0, 0.0, None, None]}, ["math:1"], rows, 2) == [1.0, 0.0, None, None]
    assert combine({"format": [1.0, 1.0]}, ["format:gate"]) == [None, None]  # nothing to maximise


def test_a_gate_puts_those_that_fail_below_their_group():
    words = ["preference:1", "format:gate"]
    values = {"preference": [-5.0, -7.0, None, 3.0, 9.0, None], "format": [1.0, 1.0, 0.0, 0.5, 0.0, 0.0]}
    # nobody passes in the second group: all the same
    assert combine(values, words, group_size=3) == near([-5, -7, -8, -1, -1, -1])
    assert combine(values, words, group_size=3, margin=2.5)[2] == -9.5
    assert combine({"preference": [1.0, 2.0], "format": [None, 1.0]}, words) == [None, 2.0]
    rows = [row(answer="1"), row(answer="1"), row(), row()]
    values = {"preference": [1.0] * 4, "math": [0.0, 1.0, None, None]}
    assert combine(values, ["preference:1", "math:gate"], rows, 2) == [0.0, 1.0, 1.0, 1.0]


def test_a_floor_is_below_all_others_of_its_group():
    values = {"preference": [1.0, None, 3.0, -2.0, None, None, 7.0, None]}
    totals = combine(values, ["preference:1"], group_size=4, margin=0.5, floors=(1, 4, 5, 6))
    assert totals == [1.0, -2.5, 3.0, -2.0, -0.5, -0.5, -0.5, None]  # of the second group nothing is known
    # what fails a gate gets the same one, and neither is the lowest of the others
    values = {"preference": [1.0, -9.0, -5.0], "format": [1.0, 0.0, 0.0]}
    assert combine(values, ["preference:1", "format:gate"], floors=(1,)) == [1.0, 0.0, 0.0]


def test_the_verdict_is_not_the_reward():
    right = row(answer="1", gets_floor=False)
    assert scorer.correctness(right, {"math": 1.0, "factual": None}) == 1.0
    assert scorer.correctness(right, {"math": 0.4, "factual": 1.0}) == 0.0
    assert scorer.correctness(right | {"gets_floor": True}, {"math": None, "factual": None}) == 0.0
    assert scorer.correctness(row(reference="a", gets_floor=False), {"math": None, "factual": 1.0}) == 1.0
    assert scorer.correctness(row(gets_floor=False), {"math": None, "factual": None}) is None


# --- 4. gold on held-out prompts


def held_out_rows(golds: list, proxy: float) -> list[dict]:
    rows = []
    for number, value in enumerate(golds):
        rewards = {"gold": value, "preference": proxy}
        rows.append({"id": number, "status": "ok", "n_tokens": 5, "n_thinking_tokens": 2, "rewards": rewards})
    return rows


def test_held_out_gold(tmp_path):
    """Means over what is there. A policy that learns to come to an end: its cut-off completions had the
    higher gold."""
    start = held_out_rows([1.0, 1.0, 0.2, 0.4], 1.0)
    start[0]["status"] = start[1]["status"] = "truncated"
    assert gold.log_held_out(tmp_path, 0, start)
    better = []
    for step, golds in enumerate(([0.3, 0.3, None, 2.4], [0.9] * 4, [0.8] * 4, [None] * 4, [0.91] * 4), 1):
        better.append(gold.log_held_out(tmp_path, step, held_out_rows(golds, 1.5)))
    # of the first checkpoint too little is known; the next may be below the start, which is no checkpoint
    assert better == [False, True, False, False, True]
    lines = read_log(tmp_path / "held_out.jsonl")
    assert lines[0]["gold"] == pytest.approx(0.65) and lines[0]["gold_ok"] == pytest.approx(0.3)
    assert lines[0]["gold_ok_se"] == pytest.approx(0.1) and lines[0]["format_ok"] == 0.5
    assert [line["n_gold"] for line in lines] == [4, 3, 4, 4, 0, 4] and lines[4]["gold"] is None
    assert lines[1]["gold"] == pytest.approx(1.0) and lines[1]["gold_se"] == pytest.approx(0.7)
    assert (lines[1]["proxy"], lines[1]["response_tokens"], lines[1]["think_tokens"]) == (1.5, 3, 2)
