"""Traits of planning: win rates by hand, malformed replies, and whole runs with an HTTP judge that counts
words in plans."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import traits
from rlmt.data import write_jsonl

WORDS = ("budget", "theme", "step")  # the traits of the plans here; all plans have as many steps


def plan(**counts: int) -> str:
    """A plan that has every word so many times, among headings and text in braces."""
    return "# Plan 1\nFirst {this}.\n" + "".join(f"- {word} {{n}}\n" * n for word, n in counts.items())


def row(i: int, thinking: str, **more) -> dict:
    messages = [{"role": "user", "content": f"Plan dinner number {i} {{for 2}}."}]
    common = {"id": f"t{i}", "messages": messages, "thinking": thinking, "status": "ok", "temperature": 0.7}
    return common | more


def write(folder: Path, ours: list[dict], theirs: list[dict]) -> dict[str, str]:
    """Writes the rows of two checkpoints, and returns the arguments that name their files."""
    rl, sft = folder / "rl-secret.jsonl", folder / "sft-secret.jsonl"
    write_jsonl(rl, ours)
    write_jsonl(sft, theirs)
    return {"generations": str(rl), "baseline": str(sft)}


# --- win rates by hand


def score(orders: list[tuple], max_invalid: float = 1.0) -> dict:
    """The score of what the judge said with --generations' plan first, and second; None: nothing that can be
    read."""
    rows = []
    for pair in orders:
        for choice in pair:
            rows.append({"choices": [choice] if choice else None, "invalid": "prose"})
    return traits.score_verdicts(rows, [{"name": "a", "description": "A"}], max_invalid, 0)


@pytest.mark.parametrize(
    "orders, rate, counts, flips, n",
    [
        ([("same", "same")], 0.5, (0, 2, 0), 0.0, 1),
        ([("1", "1")], 0.5, (1, 0, 1), 1.0, 1),
        # (2 + 2 + 0.5 + 0) / 8
        ([("1", "2"), ("1", "2"), ("same", "1"), ("2", "1")], 0.5625, (4, 1, 3), 0.25, 4),
        # one order counts for nothing
        ([("1", "2"), ("1", None), (None, "1"), (None, None)], 1.0, (2, 0, 0), 0.0, 1),
    ],
)
def test_win_rate_by_hand(orders, rate, counts, flips, n):
    out = score(orders)
    found = out["traits"]["a"]
    assert (found["win_rate"], found["flip_rate"], out["n"]) == (rate, flips, n)
    assert (found["wins"], found["ties"], found["losses"]) == counts
    assert out["n_left_out"] == len(orders) - n and out["n_replies"] == 2 * len(orders)
    if n < len(orders):  # half of the replies cannot be read
        assert out["n_invalid"] == 4
        found = score(orders, max_invalid=0.4)["traits"]["a"]
        assert found["win_rate"] is None and found["withheld"] == rate


# --- what can be read, and what cannot

MALFORMED = ["", "1", "null", "[]", "{}", "T1: 1, T2: 2", '{"T1": "1"}', '{"t1": "1", "t2": "2"}', "}{"]
MALFORMED += ['{"T1": "1", "T1": "2", "T2": "1"}', '{"T1": "1", "T2": "2", "x": "y"}', "{" * 5000]
MALFORMED += ['[{"T1": "1", "T2": "2"}]', '{"T1": "1", "T2": "2"} or {"T1": "2", "T2": "2"}']
for value in ('""', "null", "true", "1.0", "3", '"1 "', '"Same"', '"plan 2"', '["1"]', '"１"', "NaN"):
    MALFORMED.append(f'{{"T1": "1", "T2": {value}}}')


@pytest.mark.parametrize("text", MALFORMED)
def test_no_malformed_reply_is_a_verdict_or_a_trait(text):
    with pytest.raises(ValueError):
        traits.read_verdicts(text, 2)
    with pytest.raises(ValueError):
        traits.read_traits(text, 10)


def test_lists_of_traits_that_are_none(tmp_path, exits):
    none = tmp_path / "traits.json"
    none.write_text('{"traits": []}')
    assert traits.read_traits(none.read_text(), 3) == []  # a judge may say that two writers plan alike
    assert "has no traits" in exits(traits.load_traits, str(none))
    good = {"name": "n", "description": "d"}
    empty = good | {"description": " "}
    numbered = [{"name": name, "description": "d"} for name in "abcd"]
    assert traits.read_traits(json.dumps({"traits": numbered[:3]}), 3) == numbered[:3]
    for listed in (None, good, [1], [{"name": "n"}], [empty], [good, good | {"name": "n "}], numbered):
        with pytest.raises(ValueError):
            traits.read_traits(json.dumps({"traits": listed}), 3)


# --- pairs of plans


def test_the_latest_plan_of_a_prompt_is_used(tmp_path):
    ours = [
        row(1, "old", step=1),
        row(1, "latest", step=2),
        row(1, "second of the step", step=2),
        row(1, "greedy", step=3, temperature=0.0),
        row(2, "cut off", status="truncated"),
        row(3, " "),
        row(4, "alone"),
    ]
    theirs = [row(i, "theirs") for i in (1, 2, 3)]
    [pair] = traits.match_plans(**write(tmp_path, ours, theirs), temperature=0.7, seed=0)
    assert (pair["id"], pair["model"], pair["baseline"]) == ("t1", "latest", "theirs")


# --- whole runs


def counting_judge(text: str, n: int) -> str:
    """Reads what it is sent, counts words in the plans, and replies to all three kinds of request. The first
    reply to each is unreadable."""
    listed = [{"name": f"More {word}", "description": f"uses the word '{word}'"} for word in WORDS]
    if n == 0:
        return "Well."
    if "Several readers" in text:
        return json.dumps({"traits": [trait for trait in listed if trait["description"] in text]})
    pairs = re.findall(r"<plan 1>\n(.*?)\n</plan 1>\s*<plan 2>\n(.*?)\n</plan 2>", text, re.S)
    first, second = ["".join(plans) for plans in zip(*pairs)]
    if "# Traits" not in text:
        differs = [first.count(word) != second.count(word) for word in WORDS]
        return json.dumps({"traits": [trait for trait, found in zip(listed, differs) if found]})
    verdicts = {"comparison": "I {counted}."}
    for i, word in enumerate(re.findall(r"^T\d+\. .*'(\w+)'$", text, re.M), 1):
        more = second.count(word) - first.count(word)
        verdicts[f"T{i}"] = "same" if more == 0 else "12"[more > 0]
    return "```json\n" + json.dumps(verdicts) + "\n```"


def run(server, out: Path, files: dict, **more) -> dict:
    traits.main(traits.Args(**files, judge="j", judge_url=server.url, out=str(out), **more))
    return json.loads((out / "summary.json").read_text())


def test_a_known_difference_gives_the_known_win_rates(serve, tmp_path):
    """Of 40 prompts the RL checkpoint has budget more often in 30, as often in 6; theme in 10, and in none."""
    rl = []
    for i in range(40):
        rl.append(row(i, plan(budget=(i < 30) + (i < 36), theme=3 * (i < 10), step=2)))
    sft = [row(i, plan(budget=1, theme=1, step=2)) for i in range(40)]
    files = write(tmp_path, rl, sft)
    server = serve(counting_judge)
    out = run(server, tmp_path / "run", files, extract_pairs=12)
    sent = [request["messages"][-1]["content"] for request, _ in server.requests]
    assert not any("secret" in text for text in sent)  # names are hidden
    assert len(set(sent)) == 3 + 1 + 2 * 28  # batches of five pairs, a merge, both orders of the others

    found = json.loads((tmp_path / "run" / "traits.json").read_text())
    compared = [i for i in range(40) if f"t{i}" not in found["prompts"]]
    budget = [(i < 30) + (i < 36) for i in compared]
    n_theme = sum(i < 10 for i in compared)
    rates = {name: numbers["win_rate"] for name, numbers in out["traits"].items()}
    assert rates == pytest.approx({"More budget": sum(budget) / 56, "More theme": n_theme / 28})
    numbers = out["traits"]["More budget"]
    assert (numbers["wins"], numbers["ties"]) == (2 * budget.count(2), 2 * budget.count(1))
    assert (out["n"], out["n_left_out"], out["n_invalid"]) == (28, 0, 0)
