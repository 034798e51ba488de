"""Traits of planning: win rates by hand, malformed replies, and whole runs with an HTTP judge that counts
words in plans."""

import csv
import json
import re
from pathlib import Path

import pytest

from benchmarks import traits

WORDS = ("budget", "theme", "step")  # the traits of the plans here; all plans have as many steps

# --- plans and a judge


def plan(**counts: int) -> str:
    """A plan that has every word so many times, among headings and text in braces."""
    lines = [f"- {word} {{n}}" for word, n in counts.items() for _ in range(n)]
    return "# Plan 1\nFirst of all {this}.\n" + "\n".join(lines) + "\n"


def row(i: int, thinking: str, **more) -> dict:
    messages = [{"role": "user", "content": f"Plan dinner number {i} {{for 2}}."}]
    common = {"id": f"t{i}", "messages": messages, "thinking": thinking, "status": "ok", "temperature": 0.7}
    return common | more


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """40 prompts. budget: the RL checkpoint has more in 30, as many in 6, fewer in 4; theme: 10, 0, 30."""
    rl = []
    for i in range(40):
        budget = (i < 30) + (i < 36)
        rl.append(row(i, plan(budget=budget, theme=3 * (i < 10), step=2)))
    sft = [row(i, plan(budget=1, theme=1, step=2)) for i in range(40)]
    return {
        "generations": write(tmp_path / "rl-secret" / "generations.jsonl", rl),
        "baseline": write(tmp_path / "sft-secret" / "generations.jsonl", sft),
    }


def trait(word: str) -> dict:
    return {"name": f"More {word}", "description": f"uses the word '{word}'"}


def traits_file(path: Path, words=WORDS) -> str:
    path.write_text(json.dumps({"traits": [trait(word) for word in words]}))
    return str(path)


def plans_of(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"<plan 1>\n(.*?)\n</plan 1>\s*<plan 2>\n(.*?)\n</plan 2>", text, re.S)
    assert found
    return found


def counting_judge(text: str, n: int = 0) -> str:
    """Reads what it is sent, counts words in the two plans, and replies to all three kinds of request."""
    if "Several readers" in text:
        words = [word for word in WORDS if f"'{word}'" in text]
        return json.dumps({"traits": [trait(word) for word in words]})
    pairs = plans_of(text)
    if "# Traits" not in text:
        first, second = ["".join(plans) for plans in zip(*pairs)]
        words = [word for word in WORDS if first.count(word) != second.count(word)]
        return json.dumps({"traits": [trait(word) for word in words]})
    verdicts = {"comparison": "I {counted}."}
    for i, word in enumerate(re.findall(r"^T\d+\. .*'(\w+)'$", text, re.M), 1):
        first, second = [plan.count(word) for plan in pairs[0]]
        verdicts[f"T{i}"] = "same" if first == second else "12"[second > first]
    return "```json\n" + json.dumps(verdicts) + "\n```"


def run(server, out: Path, files: dict, **more) -> dict:
    traits.main(traits.Args(**files, judge="j", judge_url=server.url, out=str(out), **more))
    return json.loads((out / "summary.json").read_text())


def sent(server) -> list[str]:
    return [request["messages"][-1]["content"] for request, _ in server.requests]


# --- arithmetic by hand

TRAITS = [{"name": "a", "description": "A"}]


def score(orders: list[tuple], max_invalid: float = 1.0) -> dict:
    """The score of what the judge said with --generations' plan first, and second; None: nothing that can be
    read."""
    rows = []
    for i, pair in enumerate(orders):
        for model_is, choice in enumerate(pair, 1):
            choices = [choice] if choice else None
            rows.append({"id": i, "model_is": model_is, "choices": choices, "invalid": "prose"})
    return traits.score_verdicts(rows, TRAITS, max_invalid, 0)


@pytest.mark.parametrize(
    "orders, rate, counts, flips, n",
    [
        ([("1", "2")], 1.0, (2, 0, 0), 0.0, 1),
        ([("same", "same")], 0.5, (0, 2, 0), 0.0, 1),
        ([("1", "1")], 0.5, (1, 0, 1), 1.0, 1),
        (
            [("1", "2"), ("1", "2"), ("same", "1"), ("2", "1")],
            0.5625,
            (4, 1, 3),
            0.25,
            4,
        ),  # (2 + 2 + 0.5 + 0) / 8
        (
            [("1", "2"), ("1", None), (None, "1"), (None, None)],
            1.0,
            (2, 0, 0),
            0.0,
            1,
        ),  # one order counts for nothing
    ],
)
def test_win_rate_by_hand(orders, rate, counts, flips, n):
    out = score(orders)
    found = out["traits"]["a"]
    assert (found["win_rate"], found["flip_rate"], out["n"]) == (rate, flips, n)
    assert (found["wins"], found["ties"], found["losses"]) == counts
    assert out["n_left_out"] == len(orders) - n and out["n_replies"] == 2 * len(orders)
    assert out["n_invalid"] == sum(pair.count(None) for pair in orders)


# --- what can be read, and what cannot


MALFORMED = ["", "1", "same", "null", "[]", "{}", "T1: 1, T2: 2", '{"T1": "1"}', '{"t1": "1", "t2": "2"}']
MALFORMED += [
    '{"T1": "1", "T1": "2", "T2": "1"}',
    '{"T1": "1", "T2": "2", "note": "x"}',
    '{"T1": "1", "T2": "2"',
]
MALFORMED += [
    '[{"T1": "1", "T2": "2"}]',
    '{"T1": "1", "T2": "2"} or {"T1": "2", "T2": "2"}',
    "{" * 5000,
    "}{",
]
for value in ('""', "null", "true", "1.0", "3", '"1 "', '"Same"', '"plan 2"', '["1"]', '"１"', "NaN"):
    MALFORMED.append(f'{{"T1": "1", "T2": {value}}}')


@pytest.mark.parametrize("text", MALFORMED)
def test_no_malformed_reply_is_a_verdict_or_a_trait(text):
    with pytest.raises(ValueError):
        traits.read_verdicts(text, 2)
    with pytest.raises(ValueError):
        traits.read_traits(text, 10)


def test_lists_of_traits():
    text = 'Traits:\n{"traits": [{"name": " Budget first \\n", "description": "d", "example": "x"}]}'
    assert traits.read_traits(text, 1) == [{"name": "Budget first", "description": "d"}]
    assert traits.read_traits('{"traits": []}', 1) == []
    good = {"name": "n", "description": "d"}
    for listed in (
        None,
        good,
        [1],
        [{"name": "n"}],
        [good | {"name": " "}],
        [good, good | {"name": "n "}],
        [good] * 4,
    ):
        with pytest.raises(ValueError):
            traits.read_traits(json.dumps({"traits": listed}), 3)


# --- pairs


# --- whole runs


def test_a_known_difference_gives_the_known_win_rates(serve, files, tmp_path):
    server = serve(counting_judge)
    chosen = traits_file(tmp_path / "t.json")
    out = run(server, tmp_path / "run", files, traits=chosen)
    rates = {name: found["win_rate"] for name, found in out["traits"].items()}
    assert rates == {"More budget": 0.825, "More theme": 0.25, "More step": 0.5}
    budget = out["traits"]["More budget"]
    assert (budget["wins"], budget["ties"], budget["losses"], budget["flip_rate"]) == (60, 12, 8, 0)
    assert budget["interval"][0] < 0.825 < budget["interval"][1]
    assert (out["n"], out["n_left_out"], out["n_replies"], out["n_invalid"], len(sent(server))) == (
        40,
        0,
        80,
        0,
        80,
    )
    assert not any("secret" in text or "sft" in text.lower() for text in sent(server))  # names are hidden
    index = list(csv.DictReader(open(tmp_path / "runs.csv")))
    assert {line["metric"]: float(line["value"]) for line in index} == rates

    swapped = dict(zip(files, reversed(files.values())))
    again = run(serve(counting_judge), tmp_path / "swapped", swapped, traits=chosen)["traits"]
    assert {name: 1 - found["win_rate"] for name, found in again.items()} == pytest.approx(rates)
    # a judge that likes the first place finds nothing
    likes_first = serve(lambda text, n: '{"T1": "1", "T2": "2", "T3": "same"}')
    found = run(likes_first, tmp_path / "first", files, traits=chosen)["traits"].values()
    assert [(numbers["win_rate"], numbers["flip_rate"]) for numbers in found] == [
        (0.5, 1),
        (0.5, 1),
        (0.5, 0),
    ]
