"""Tests page.py: what a page shows, what it refuses to read, and that no text of a model runs or breaks it."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import page
from test_card import make_run
from rlmt import run as rlmt_run

ROOT = Path(__file__).parents[2]


def completion(prompt, step, reward, gold=None, thinking="z", response="y", **more) -> dict:
    row = {
        "step": step,
        "id": prompt,
        "messages": [{"role": "user", "content": f"ask {prompt}"}],
        "text": f"<think>\n{thinking}\n</think>\n\n{response}",
        "thinking": thinking,
        "response": response,
        "status": "ok",
        "rewards": {"preference": reward, "gold": gold},
        "reward": reward,
        "advantage": 0.5,
        "n_tokens": 9,
        "n_thinking_tokens": 4,
    }
    return {**row, **more}


def generation(task, score=None, temperature=0.7, **more) -> dict:
    row = completion(task, 0, None, **more)
    keep = ("id", "messages", "text", "thinking", "response", "status", "n_tokens", "n_thinking_tokens")
    found = {k: row[k] for k in keep} | {"temperature": temperature}
    if score is not None:
        found["score"] = score
    return found


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def data_of(file: Path) -> dict:
    """Returns the JSON in a page."""
    text = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', file.read_text("utf-8"), re.S
    )[1]
    return json.loads(text)


def shown(folder: Path, *runs: Path, n: int = 0) -> dict:
    page.write_page(list(runs), folder / "shown.html", n)
    return data_of(folder / "shown.html")


def ordered_by(data: dict, field: str, descending: bool = True) -> list[tuple]:
    """Returns (id, step, number) of the visits that have the number, as the page orders them."""
    found = []
    for visit in data["visits"]:
        if visit[field] is not None:
            found.append((data["prompts"][visit["prompt"]]["id"], visit["step"], visit[field]))
    return sorted(found, key=lambda visit: visit[2], reverse=descending)


def responses(visit: dict) -> list[list[str]]:
    return [[completion["response"] for completion in side] for side in visit["sides"]]


# --- what the page shows


def test_visits_have_the_numbers_that_they_are_ordered_by(tmp_path):
    rows = [
        completion("a", 1, 3.0),
        completion("a", 1, 1.0, 0.1),
        completion("b", 1, 2.0, 0.9),
        completion("b", 2, -1.0, 0.2),
        completion("d", 2, None),
    ]
    data = shown(tmp_path, write(tmp_path / "run", "completions.jsonl", rows))
    assert ordered_by(data, "highest") == [("a", 1, 3.0), ("b", 1, 2.0), ("b", 2, -1.0)]
    assert ordered_by(data, "lowest", False) == [("b", 2, -1.0), ("a", 1, 1.0), ("b", 1, 2.0)]
    assert ordered_by(data, "gold_highest") == [("b", 1, 0.9), ("b", 2, 0.2), ("a", 1, 0.1)]
    assert ordered_by(data, "spread")[0] == ("a", 1, 2.0)
    known = {title for title, _, _ in data["orders"]}
    assert "highest gold" in known and "runs differ most" not in known

    same = [completion(p, 1, 0.0) for p in "xy"]
    data = shown(tmp_path, write(tmp_path / "same", "completions.jsonl", same))
    assert ordered_by(data, "gold_highest") == []
    assert "highest gold" not in {title for title, _, _ in data["orders"]}


def test_held_out_prompts_are_followed_through_training(tmp_path):
    run = write(tmp_path / "run", "completions.jsonl", [completion("a", 1, 1.0)])
    (run / "held_out_completions.jsonl").touch()  # as in a run that was resumed from its beginning
    assert len(shown(tmp_path, run)["visits"]) == 1
    rows = []
    for step in (7, 14):
        for prompt in ("held", "out"):
            row = completion(prompt, step, None, 0.01 * step, response=f"{prompt} at {step}")
            del row["reward"]  # held-out completions have none
            rows.append(row)
    write(run, "held_out_completions.jsonl", rows)
    data = shown(tmp_path, run)
    assert [visit["kind"] for visit in data["visits"]] == ["training"] + 4 * ["held out"]
    held = [visit for visit in data["visits"] if data["prompts"][visit["prompt"]]["id"] == "held"]
    assert [responses(visit) for visit in held] == [[["held at 7"]], [["held at 14"]]]
    assert "advantage" not in held[0]["sides"][0][0]["numbers"]
    rose = ordered_by(data, "rise")
    assert [visit[:2] for visit in rose] == [("held", 14), ("out", 14)]
    assert rose[0][2] == pytest.approx(0.07)


def test_changes_since_the_first_visit(tmp_path):
    rows = [
        completion("a", 1, 0.0),
        completion("a", 1, 1.0),
        completion("d", 1, 0.5),
        completion("b", 1, 1.0),
        completion("e", 1, None),
        completion("f", 1, 2.0),
        completion("c", 2, 5.0),
        completion("a", 2, 99.0),
        completion("e", 2, 8.5),
        completion("b", 3, 0.5),
        completion("a", 3, 2.0),
        completion("d", 3, 2.0),
        completion("e", 3, 9.0),
        completion("f", 3, 2.0),
    ]
    data = shown(tmp_path, write(tmp_path / "run", "completions.jsonl", rows))
    # c has one visit, f no change, e no reward at step 1
    assert ordered_by(data, "rise") == [("a", 2, 98.5), ("a", 3, 1.5), ("d", 3, 1.5), ("e", 3, 0.5)]
    assert ordered_by(data, "fall", False) == [("b", 3, -0.5)]
    assert [visit["step"] for visit in data["visits"]] == sorted(row["step"] for row in data["visits"])


def test_two_runs_are_matched_by_prompt_step_and_temperature(tmp_path):
    a = [
        generation("x", 0.5),
        generation("y", 0.5),
        generation("z", 0.5),
        generation("x", 0.5, temperature=0.0),
    ]
    b = [
        generation("y", 0.0, response="worse"),
        generation("x", 0.6, response="better"),
        generation("z", messages=[{"role": "user", "content": "another"}]),
    ]
    run_a = write(tmp_path / "a", "generations.jsonl", a)
    run_b = write(tmp_path / "b", "generations.jsonl", b)
    data = shown(tmp_path, run_a, run_b)
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    differ = ordered_by(data, "difference")
    assert [visit[0] for visit in differ] == ["y", "x"]
    assert [visit[2] for visit in differ] == pytest.approx([0.5, 0.1])
    both = [visit for visit in data["visits"] if all(visit["sides"])]
    assert [responses(visit) for visit in both] == [[["y"], ["better"]], [["y"], ["worse"]]]
    assert len(data["visits"]) == 5  # z has other messages in b, x at temperature 0 is in a alone

    run_c = write(tmp_path / "c", "completions.jsonl", [completion("x", 1, 0.0), completion("x", 2, 1.0)])
    run_d = write(tmp_path / "d", "completions.jsonl", [completion("x", 2, 3.0), completion("x", 2, 4.0)])
    data = shown(tmp_path, run_c, run_d)
    assert [[len(side) for side in visit["sides"]] for visit in data["visits"]] == [[1, 0], [1, 2]]
    assert ordered_by(data, "difference") == [("x", 2, 2.5)]
    write(run_c, "completions.jsonl", [completion("x", 2, 1.0, 0.5)])  # only one run has a gold
    assert ordered_by(shown(tmp_path, run_c, run_d), "difference") == [("x", 2, 2.5)]


def test_what_is_shown_of_a_completion(tmp_path):
    several = {"preference": 0.5, "length": -1.0, "gold": 0.9}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r", "thinking": "t"}]
    rows = [
        completion("a", 1, 1.0, 0.4),
        completion("b", 1, -0.5, rewards=several),
        completion("c", 1, -2.0, status="no_close", text="<think> more", pair="rejected"),
        completion("d", 1, None, dialogue=turns),
        completion("e", 1, float("nan")),
    ]
    data = shown(tmp_path, write(tmp_path / "run", "completions.jsonl", rows))
    plain, combined, bad, dialogue, unknown = [visit["sides"][0][0] for visit in data["visits"]]
    lengths = {"n_tokens": 9, "n_thinking_tokens": 4}
    assert plain == {
        "status": "ok",
        "numbers": {"reward": 1.0, "gold": 0.4, "advantage": 0.5, **lengths},
        "thinking": "z",
        "response": "y",
    }
    parts = {"preference": 0.5, "length": -1.0}
    assert combined["numbers"] == {"reward": -0.5, "gold": 0.9, "advantage": 0.5, **lengths, **parts}
    assert (bad["text"], bad["pair"]) == ("<think> more", "rejected")
    assert dialogue["dialogue"] == turns[1:] and "reward" not in dialogue["numbers"]
    assert unknown["numbers"] == {"advantage": 0.5, **lengths}


def test_the_top_of_the_page_says_what_was_run(tmp_path):
    rows = [completion("a", 1, 1.0), completion("a", 2, 1.0, status="nested")]
    a = write(tmp_path / "a", "completions.jsonl", rows)
    (a / "command.txt").write_text("python train_grpo.py --seed 3\n")
    (a / "config.json").write_text(json.dumps({"args": {"seed": 3, "model": "m", "out": "a"}}))
    b = write(tmp_path / "b", "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    (b / "config.json").write_text(json.dumps({"args": {"seed": 4, "epochs": 2, "out": "b"}}))
    (b / "summary.json").write_text("{}")
    data = shown(tmp_path, a, b)
    assert data["runs"] == [
        {
            "name": "a",
            "command": "python train_grpo.py --seed 3",
            "lines": [
                "training: 2 completions of 1 prompts at 2 steps; ok 1, nested 1",
                "not finished: no summary.json",
            ],
        },
        {"name": "b", "command": "", "lines": []},
    ]
    assert data["arguments"] == [
        {"name": "seed", "values": ["3", "4"]},
        {"name": "model", "values": ['"m"', ""]},
        {"name": "epochs", "values": ["", "2"]},
    ]


def test_curves(tmp_path):
    metrics = [
        {
            "step": 1,
            "loss": 2.0,
            "kl": float("nan"),
            "reward/gold": 0.25,
            "reward": 1,
            "skipped": {},
            "note": "x",
        },
        {"step": 2, "loss": 1.0, "kl": 0.5, "reward/gold": 0.5, "reward": 2},
    ]
    run = write(tmp_path / "run", "metrics.jsonl", metrics)
    write(run, "held_out.jsonl", [{"step": 2, "gold": 0.5}])
    for number in (1, 2, 10):  # the rounds of DPO
        write(run / f"round-{number}", "metrics.jsonl", [{"step": 1, "x": number}, {"step": 3, "x": -number}])
    other = write(tmp_path / "other", "metrics.jsonl", [{"step": 5, "reward": 7.0}])
    curves = {curve["key"]: curve for curve in shown(tmp_path, run, other)["curves"]}
    assert list(curves) == ["reward", "reward/gold", "held out: gold", "kl", "loss", "in rounds: x"]
    assert [key for key, curve in curves.items() if curve["main"]] == list(curves)[:4]
    assert curves["reward"]["lines"] == [[[1, 1], [2, 2]], [[5, 7.0]]]
    assert curves["kl"]["lines"] == [[[1, None], [2, 0.5]], []]
    in_rounds = [[1, 1], [3, -1], [4, 2], [6, -2], [7, 10], [9, -10]]
    assert curves["in rounds: x"]["lines"] == [in_rounds, []]

    only_loss = write(tmp_path / "sft", "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    assert shown(tmp_path, only_loss)["curves"][0]["main"]
    write(only_loss, "metrics.jsonl", [{"loss": 2.0}])
    with pytest.raises(ValueError, match="metrics.jsonl:1: 'step' must be a whole number"):
        shown(tmp_path, only_loss)


def test_a_long_curve_is_thinned_and_the_page_says_so(tmp_path):
    steps = page.MAX_POINTS * 3 - 1
    run = write(
        tmp_path / "run", "metrics.jsonl", [{"step": s, "loss": 2.0 * s} for s in range(1, steps + 1)]
    )
    data = shown(tmp_path, run)
    points = data["curves"][0]["lines"][0]
    assert len(points) == page.MAX_POINTS and points[:2] == [[2, 4], [5, 10]]
    assert "a point of a long curve is the mean of 3 logged steps" in data["runs"][0]["lines"]


def test_a_page_of_many_completions_shows_some_and_says_so(tmp_path):
    def rows(shift):
        found = []
        for step in range(1, 101):
            for prompt in range(step * 3, step * 3 + 3):
                reward = ((prompt * 37) % 301) / 301 + shift
                found += [
                    completion(f"p{prompt}", step, reward + 0.01 * k, response=f"{k}") for k in range(4)
                ]
        return found

    run = write(tmp_path / "run", "completions.jsonl", rows(0.0))
    data = shown(tmp_path, run, n=400)
    assert sum(len(visit["sides"][0]) for visit in data["visits"]) == 400
    assert data["sampled"].startswith("400 of the 1200 completions are on this page")
    whole = shown(tmp_path, run)
    assert len(whole["visits"]) == 300 and whole["sampled"] == ""
    for _, field, descending in whole["orders"]:  # at both ends, all that the whole run has
        for direction in (descending, not descending):
            assert ordered_by(data, field, direction)[:5] == ordered_by(whole, field, direction)[:5]
    steps = [visit["step"] for visit in data["visits"]]
    assert steps == sorted(steps) and {1, 100} < set(steps) and len(set(steps)) > 45

    other = write(tmp_path / "other", "completions.jsonl", rows(1.0))
    data = shown(tmp_path, run, other, n=800)
    assert len(data["visits"]) == 100 and all(
        responses(visit) == 2 * [list("0123")] for visit in data["visits"]
    )
    assert len(shown(tmp_path, run, n=1)["visits"]) == 1  # a visit is never cut


def test_the_outermost_of_every_order_come_first(tmp_path):
    """So whoever orders a small page by lowest reward sees the lowest of the run."""
    rewards = [(place * 17) % 40 for place in range(40)]  # 0 to 39, each once
    rows = [completion(f"p{place}", 1, float(reward)) for place, reward in enumerate(rewards)]
    run = write(tmp_path / "run", "completions.jsonl", rows)

    def on_the_page(n, *other):
        return {row["id"] for row in shown(tmp_path, run, *other, n=n)["prompts"]}

    # place 0, then place 1, from either end of steps and rewards; all spreads are 0, an order like that of the steps
    lowest, highest = rewards.index(0), rewards.index(39)
    outermost = {"p0", "p39", f"p{lowest}", f"p{highest}"}
    assert lowest == 0 and on_the_page(3) == outermost and len(outermost) == 3
    second = {"p1", "p38", f"p{rewards.index(1)}", f"p{rewards.index(38)}"}
    assert on_the_page(7) == outermost | second and len(outermost | second) == 7

    # prompts of both runs come after them
    other = write(
        tmp_path / "other", "completions.jsonl", [completion(f"p{place}", 1, 20.0) for place in (9, 11)]
    )
    assert outermost <= on_the_page(12, other)


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0.09999999999999999, 0.1, [0.09, 0.1, 0.11]),  # means of equal values: one bit apart
        (0.8999999999999999, 0.9, [0.85, 0.9, 0.95]),
        (3e-7, 3.0000000000000004e-7, [2.8e-7, 3e-7, 3.2e-7]),
        (-0.9, -0.8999999999999999, [-0.95, -0.9, -0.85]),
        (0.5, 0.5, [0.45, 0.5, 0.55]),
        (1.0, 1.001, [1, 1.0005, 1.001]),
        (0, 4, [0, 1, 2, 3, 4]),
    ],
)
def test_a_curve_that_is_flat_but_for_rounding_has_ticks(low, high, ticks):
    template = page.TEMPLATE.read_text("utf-8")
    functions = [
        re.search(rf"^function {name}\(.*?^}}", template, re.M | re.S)[0] for name in ("range", "niceTicks")
    ]
    script = "\n".join([*functions, f"console.log(JSON.stringify(niceTicks(...range([{low!r}, {high!r}]))))"])
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=20)
    assert json.loads(done.stdout) == ticks, done.stderr


def test_a_page_holds_a_limited_number_of_characters(tmp_path):
    long = "x" * (page.MAX_CHARACTERS // 20)
    rows = [completion(f"p{i}", 1, float(i), thinking=long) for i in range(20)]
    data = shown(tmp_path, write(tmp_path / "run", "completions.jsonl", rows), n=2000)
    assert len(data["visits"]) == 19 and data["sampled"].startswith("19 of the 20")


def test_scores_of_an_evaluation_come_from_its_verdicts(tmp_path):
    write(
        tmp_path,
        "generations.jsonl",
        [generation("x"), generation("x", temperature=0.0), generation("y"), generation("z")],
    )
    write(
        tmp_path,
        "verdicts.jsonl",
        [
            {"id": "x", "temperature": 0.7, "score": "8"},
            {"id": "y", "temperature": 0.7, "score": None},
            {"id": "x", "temperature": 0.0, "score": 0.25, "reward": -1.5},
            {"id": "z", "temperature": 0.7, "choice": "A++", "model_is": "A"},
        ],
    )
    rows = page.read_rows(tmp_path)
    np.testing.assert_equal(rows["gold"].tolist(), [8.0, 0.25, np.nan, np.nan])
    np.testing.assert_equal(rows["reward"].tolist(), [np.nan, -1.5, np.nan, np.nan])


def test_scores_of_a_benchmark_come_from_its_rows(tmp_path):
    write(
        tmp_path,
        "generations.jsonl",
        [generation(f"{task}-{sample}") for task in "0123" for sample in (0, 1)],
    )
    answer = {"temperature": 0.7, "sample": 0}
    rows = [
        answer | {"id": "1-0", "task": 0, "correct": True},  # `id` is the benchmark's
        answer | {"id": "1-0", "task": 0, "sample": 1, "correct": False, "reward": -1.5},
        answer | {"task": 1, "strict": [True, False]},
        answer | {"task": 2, "preference": 1.75},
        answer | {"task": 3, "game1": "A>B", "reward": 0.5},
    ]
    write(tmp_path, "rows.jsonl", rows)
    table = page.read_rows(tmp_path).set_index("id")
    assert table["gold"].dropna().to_dict() == {"0-0": 1, "0-1": 0, "1-0": 0, "2-0": 1.75}
    assert table["reward"].dropna().to_dict() == {"0-1": -1.5, "3-0": 0.5}


def test_dialogues_with_a_simulated_user(tmp_path):
    history = [
        {"role": "user", "content": "hello", "emotion-point": 40},
        {"role": "assistant", "content": "hi", "text": "<think>t</think>hi", "thinking": "t", "status": "ok"},
        {"role": "user", "content": "bye", "emotion-point": 55, "change": 15},
    ]
    dialogue = {"id": "u", "history": history, "emo_point": 55, "ended": "goodbye"}
    faults = [dialogue | {"ended": ended} for ended in ("bad_format", "too_long")]
    write(tmp_path, "dialogues.jsonl", [dialogue, *faults])
    write(tmp_path, "dialogues_held_out.jsonl", [dialogue | {"emo_point": 30}])
    first, held_out = shown(tmp_path, tmp_path)["visits"]
    assert (first["kind"], held_out["kind"]) == ("dialogue", "held-out dialogue")
    good, bad_format, too_long = first["sides"][0]
    assert good == {"status": "ok", "numbers": {"gold": 55}, "dialogue": history[1:]}
    assert bad_format["numbers"] == {"gold": 0} and bad_format["text"] == "<think>t</think>hi\n\nbye"
    assert (too_long["status"], too_long["numbers"]) == ("too_long", {})
    assert held_out["prompt"] == first["prompt"] and held_out["gold_highest"] == 30


# --- files that cannot be read


def test_a_last_line_that_was_cut_off_is_left_out_and_named(tmp_path, capsys):
    run = write(tmp_path, "completions.jsonl", [completion("a", 1, 1.0), completion("ü", 1, 2.0)])
    whole = (run / "completions.jsonl").read_bytes()
    (run / "completions.jsonl").write_bytes(
        whole + '{"step": 1, "id": "ü'.encode()[:-1]
    )  # in the middle of a character
    rows = page.read_rows(run)
    assert rows["id"].tolist() == ["a", "ü"] and "completions.jsonl:3 is cut off" in capsys.readouterr().err
    data = shown(tmp_path, run)
    assert len(data["visits"]) == 2 and "completions.jsonl:3 is cut off" in data["runs"][0]["lines"][-1]
    capsys.readouterr()
    (run / "completions.jsonl").write_bytes(whole[:-1])  # whole, but for its newline
    assert page.read_rows(run)["id"].tolist() == ["a", "ü"] and not capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "no completions.jsonl and no generations.jsonl|no rows in any of metrics.jsonl"),
        ("", "no rows"),
        ('{"step": 1', "no rows"),
        ('{"step": 1\n{}\n', r"completions.jsonl:1: not a JSON object"),
        ("[1]\n", r"completions.jsonl:1: not a JSON object"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "completions.jsonl").write_text(text)
    for function in (page.read_rows, lambda run: page.write_page([run], tmp_path / "page.html")):
        with pytest.raises(ValueError, match=message):
            function(tmp_path)
    assert not (tmp_path / "page.html").exists()


# --- hostile texts

EVIL = {  # what a model wrote: what a reader sees (None: the same)
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>": None,
    "</div></details></body></html> &amp; &lt; \"double\" 'single' <!-- <style>*{display:none}</style>": None,
    "emoji 😀👩‍👩‍👧🇫🇷, עברית and العربية, 漢字, e\u0301, \u200fmark": None,
    "  indented\n\n\ttab and trailing space \n": None,
    "&#60;b&#62; &nbsp; ]]> <?php ?> <![CDATA[x]]>": None,
    "nul \x00, escape \x1b[31m, carriage return\r\n, turned \u202e around": r"nul \x00, escape \x1b[31m, carriage return\r"
    + "\n, turned \\u202e around",
    "half a pair \ud83d and \udfff": r"half a pair \ud83d and \udfff",
    "x" * 100_000: None,
}
SEEN = [written if seen is None else seen for written, seen in EVIL.items()]


# what a script in a text would do if it ran
RUNS_A_SCRIPT = (
    "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
)


class ParsedPage(HTMLParser):
    """Collects tags, and the text of every element with the class "text", as an HTML parser sees them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags = Counter()
        self.texts = []
        self.depth = 0  # of elements that are open within a "text"
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        if self.depth:
            self.depth += 1
        elif dict(attrs).get("class") == "text":
            self.depth = 1
            self.texts.append("")

    def handle_endtag(self, tag):
        self.depth = max(0, self.depth - 1)

    def handle_data(self, data):
        if self.depth:
            self.texts[-1] += data


def evil_run(folder: Path) -> Path:
    """Writes a run whose thinking, responses, prompts, roles, ids and name are all hostile."""
    rows = []
    for text in EVIL:
        messages = [
            {"role": "<u>system</u>", "content": RUNS_A_SCRIPT},
            {"role": "user", "content": "{{data}}"},
        ]
        more = {"thinking": text, "response": text, "messages": messages}
        rows.append(completion(f"<i>{RUNS_A_SCRIPT}</i>", 1, float(len(rows)), **more))
    rows[1] |= {"status": "no_close", "text": "<think>" + rows[1]["text"]}
    rows.append(completion("dialogue", 2, 0.0, dialogue=[{}, {"role": "<b>", "content": RUNS_A_SCRIPT}]))
    run = write(folder / "<run>&{{data}}", "completions.jsonl", rows)
    write(run, "metrics.jsonl", [{"step": 1, RUNS_A_SCRIPT: 1.0, "reward": 2.0}])
    (run / "config.json").write_text(json.dumps({"args": {RUNS_A_SCRIPT: RUNS_A_SCRIPT}}))
    (run / "command.txt").write_text(RUNS_A_SCRIPT)
    return run


def test_every_hostile_text_reaches_the_page_as_it_was_written(tmp_path):
    data = shown(tmp_path, evil_run(tmp_path))
    completions = data["visits"][0]["sides"][0]
    assert [completion["thinking"] for completion in completions] == SEEN
    assert [completion["response"] for completion in completions] == SEEN
    assert completions[1]["text"] == f"<think><think>\n{SEEN[1]}\n</think>\n\n{SEEN[1]}"
    assert [message["content"] for message in data["prompts"][0]["messages"]] == [RUNS_A_SCRIPT, "{{data}}"]


def test_no_hostile_text_is_html(tmp_path):
    page.write_page([evil_run(tmp_path)], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    template = page.TEMPLATE.read_text("utf-8")
    assert ParsedPage(text).tags == ParsedPage(template).tags  # scripts, elements: none is added
    stored = re.search(r'<script type="application/json" id="data">(.*)</script>\n<script>\n', text, re.S)[1]
    assert "<" not in stored
    assert "<title>&lt;run&gt;&amp;{{data}}</title>" in text


def test_only_the_script_of_the_template_may_run_and_nothing_is_loaded(tmp_path):
    page.write_page([evil_run(tmp_path)], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", page.TEMPLATE.read_text("utf-8"), re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', text)[1]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
    ):
        assert way not in script
    assert not re.findall(
        r"\b(?:src|href)=|@import|url\(|fetch\(|https?://(?!www.w3.org/2000/svg)", template_of(text)
    )


def template_of(text: str) -> str:
    """Returns a page without the data in it."""
    return re.sub(
        r'(<script type="application/json" id="data">).*(</script>\n<script>\n)', r"\1\2", text, flags=re.S
    )


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_shows_hostile_texts_and_runs_none(tmp_path):
    page.write_page([evil_run(tmp_path)], tmp_path / "page.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *options, "--dump-dom", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    seen = ParsedPage(template_of(dom))
    for text in SEEN:
        assert seen.texts.count(text) == 2  # thinking and response
    assert seen.texts.count(RUNS_A_SCRIPT) == 2  # the prompt, the command
    assert "<title>&lt;run&gt;&amp;{{data}}</title>" in dom  # a script that ran would have changed it
    assert seen.tags["img"] == seen.tags["iframe"] == 0 and seen.tags["script"] == 2
    assert seen.tags["polyline"] == 2 and seen.tags["h2"] == 2


# --- how it is called


def test_the_command_writes_the_same_page(tmp_path):
    run = evil_run(tmp_path)
    page.write_page([run], tmp_path / "page.html")
    command = [sys.executable, "page.py", str(run)]
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{run / 'page.html'}\n"), done.stderr
    assert (run / "page.html").read_bytes() == (tmp_path / "page.html").read_bytes()

    page.main(page.Args(str(run), str(run), n=3))
    assert len(data_of(run / "page.html")["runs"]) == 2


def test_the_command_refuses_a_folder_without_rows_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        page.main(page.Args(str(tmp_path)))
    lines = capsys.readouterr().err.splitlines()
    assert (
        e.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"error: {tmp_path}: no rows in any of")
    )
    assert list(tmp_path.iterdir()) == []


def test_a_training_script_ends_with_a_page_and_never_fails_by_it(tmp_path, capsys):
    args = {"model": "org/base", "traces": "owner/traces"}
    run = make_run(tmp_path / "run", "sft", args, {})
    write(run, "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    rlmt_run.finish_run(run, {"steps": 1})
    data = data_of(run / "page.html")
    assert data["curves"][0]["key"] == "loss" and data["runs"][0]["lines"] == []  # it is finished

    run = make_run(tmp_path / "damaged", "sft", args, {"loss": 2.0})
    (run / "completions.jsonl").write_text("{}\n")
    rlmt_run.finish_run(run, {"steps": 2})
    assert json.loads((run / "summary.json").read_text()) == {"steps": 2}
    warning = capsys.readouterr().err
    assert warning.startswith(f"WARNING: no page of {run}: KeyError: 'id'")
    assert not (run / "page.html").exists()
