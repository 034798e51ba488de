"""Tests page.py: which completions it chooses, what it refuses to read, and that no text of a model breaks the page."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import page

ROOT = Path(__file__).parents[1]


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


def ids(table) -> list:
    return table["id"].tolist()


# --- which completions are chosen


def test_best_and_worst_take_one_per_prompt_and_the_first_of_equal_ones(tmp_path):
    rows = [
        completion("a", 1, 3.0),
        completion("a", 1, 3.0, 0.1),
        completion("b", 1, 3.0, 0.9),
        completion("b", 2, -1.0, 0.2),
        completion("c", 2, -1.0),
        completion("d", 2, None),
    ]
    run = write(tmp_path / "run", "completions.jsonl", rows)
    best, worst = page.best_and_worst(run, 2)
    assert (ids(best), best["reward"].tolist()) == (["a", "b"], [3.0, 3.0])
    assert (ids(worst), worst["reward"].tolist()) == (["b", "c"], [-1.0, -1.0])
    best, worst = page.best_and_worst(run, 1, by="gold")
    assert best["gold"].tolist() == [0.9] and worst["gold"].tolist() == [0.1]
    same = write(tmp_path / "same", "completions.jsonl", [completion(p, 1, 0.0) for p in "xyz"])
    best, worst = page.best_and_worst(same, 2)
    assert ids(best) == ["x", "y"] and ids(worst) == ["z"]
    with pytest.raises(ValueError, match="no completion has a gold"):
        page.best_and_worst(same, 1, by="gold")


def test_one_prompt_is_the_one_with_most_visits_in_order_of_steps(tmp_path):
    rows = [
        completion("a", 5, 1.0),
        completion(7, 4, 1.0),
        completion(7, 2, 2.0),
        completion(7, 2, 3.0),
        completion("a", 5, 9.0),
    ]
    run = write(tmp_path, "completions.jsonl", rows)
    assert page.one_prompt(run)[["id", "step", "reward"]].values.tolist() == [
        [7, 2, 2],
        [7, 2, 3],
        [7, 4, 1],
    ]
    assert page.one_prompt(run, "a")["reward"].tolist() == [1.0, 9.0]
    with pytest.raises(ValueError, match="no prompt 'b' among the 2 of the run"):
        page.one_prompt(run, "b")


def test_held_out_prompts_are_followed_through_training(tmp_path):
    run = write(tmp_path / "run", "completions.jsonl", [completion("a", 1, 1.0)])
    (run / page.HELD_OUT).touch()  # as in a run that was resumed from its beginning
    assert ids(page.one_prompt(run)) == ["a"]
    rows = []
    for step in (7, 14):
        for prompt in ("held", "out"):
            row = completion(prompt, step, None, 0.01 * step, response=f"{prompt} at {step}")
            del row["reward"], row["advantage"]  # held-out completions have none
            rows.append(row)
    write(run, page.HELD_OUT, rows)
    assert page.one_prompt(run)[["id", "step", "gold"]].values.tolist() == [
        ["held", 7, 0.07],
        ["held", 14, 0.14],
    ]
    assert page.one_prompt(run, "out")["response"].tolist() == ["out at 7", "out at 14"]
    assert page.one_prompt(run, "a")["step"].tolist() == [1]
    page.write(run, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "One prompt through training" in text and "held at 7" in text
    assert "<b>step 14</b> mean gold 0.14" in text


def test_biggest_jumps_from_first_visit_to_last(tmp_path):
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
    run = write(tmp_path, "completions.jsonl", rows)
    rose, fell = page.biggest_jumps(run, 3)
    # a and d are equal, so the one seen first leads; c has one visit, f no change
    assert rose.index.tolist() == ["a", "d", "e"]
    assert rose.loc["e", "first_step"] == 2  # no reward at step 1
    assert page.biggest_jumps(run, 1)[0].index.tolist() == ["a"]
    assert rose.loc["a"].to_dict() == {
        "change": 1.5,
        "first_step": 1,
        "last_step": 3,
        "first": 0.5,
        "last": 2.0,
    }
    assert fell.index.tolist() == ["b"] and fell["change"].tolist() == [-0.5]
    one_step = write(tmp_path / "one", "completions.jsonl", rows[:6])
    assert [len(part) for part in page.biggest_jumps(one_step)] == [0, 0]


def test_answers_match_by_id_temperature_and_sample(tmp_path):
    a = write(
        tmp_path / "a",
        "generations.jsonl",
        [
            generation("x", 0.5),
            generation("y", 0.5),
            generation("z", 0.5),
            generation("x", 0.5, temperature=0.0),
        ],
    )
    b = write(
        tmp_path / "b",
        "generations.jsonl",
        [
            generation("y", 0.0, response="worse"),
            generation("x", 0.6, response="better"),
            generation("q", 1.0),
        ],
    )
    ours, theirs = page.matched_answers(a, b)
    assert ids(ours) == ids(theirs) == ["y", "x"] and theirs["response"].tolist() == ["worse", "better"]
    assert ours.attrs["matched"] == 2 and ids(page.matched_answers(a, b, 1)[0]) == ["y"]
    other = write(
        tmp_path / "c",
        "generations.jsonl",
        [generation("x", messages=[{"role": "user", "content": "another"}])],
    )
    with pytest.raises(ValueError, match="id 'x' has other messages"):
        page.matched_answers(a, other)
    with pytest.raises(ValueError, match="no id, temperature and sample is in both"):
        page.matched_answers(a, write(tmp_path / "d", "generations.jsonl", [generation("nowhere")]))
    trained = write(tmp_path / "e", "completions.jsonl", [completion("x", 1, 0.0)])
    for other in (trained, write(tmp_path / "f", "generations.jsonl", [generation("x"), generation("x")])):
        with pytest.raises(
            ValueError, match="only evaluations with one answer for each id, temperature and sample"
        ):
            page.matched_answers(a, other)


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


# --- files that cannot be read


def test_a_last_line_that_was_cut_off_is_left_out_and_named(tmp_path, capsys):
    run = write(tmp_path, "completions.jsonl", [completion("a", 1, 1.0), completion("ü", 1, 2.0)])
    whole = (run / "completions.jsonl").read_bytes()
    (run / "completions.jsonl").write_bytes(
        whole + '{"step": 1, "id": "ü'.encode()[:-1]
    )  # in the middle of a character
    rows = page.read_rows(run)
    assert ids(rows) == ["a", "ü"] and "completions.jsonl:3 is cut off" in capsys.readouterr().err
    page.write(run, tmp_path / "page.html")
    assert "completions.jsonl:3 is cut off" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    (run / "completions.jsonl").write_bytes(whole[:-1])  # whole, but for its newline
    assert ids(page.read_rows(run)) == ["a", "ü"] and not capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "no completions.jsonl and no generations.jsonl"),
        ("", "no rows"),
        ('{"step": 1', "no rows"),
        ('{"step": 1\n{}\n', r"completions.jsonl:1: not a JSON object"),
        ("[1]\n", r"completions.jsonl:1: not a JSON object"),
        ({"step": None}, r"completions.jsonl:2: 'step' cannot be null"),
        ({"thinking": None}, r":2: 'thinking' cannot be null"),
        ({"reward": "high"}, r":2: 'reward' cannot be \"high\""),
        ({"rewards": [1]}, r":2: 'rewards' cannot be \[1\]"),
        ({"rewards": {"gold": "8"}}, r":2: 'gold' cannot be \"8\""),
        ({"rewards": {"other": []}}, r":2: 'rewards.other' cannot be \[\]"),
        ({"id": [1]}, r":2: 'id' cannot be \[1\]"),
        ({"messages": [{"role": "user", "content": None}]}, r":2: 'messages' must be a list"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, text, message):
    if isinstance(text, dict):
        write(tmp_path, "completions.jsonl", [completion("a", 1, 1.0), completion("b", 1, 1.0) | text])
    elif text is not None:
        (tmp_path / "completions.jsonl").write_text(text)
    for function in (page.best_and_worst, lambda run: page.write(run, tmp_path / "page.html")):
        with pytest.raises(ValueError, match=message):
            function(tmp_path)
    assert not (tmp_path / "page.html").exists()


# --- the page

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


class ParsedPage(HTMLParser):
    """Collects tags, their attributes, and (kind of part, text) of every text. Tags must be closed in order."""

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], Counter(), [], []
        self.kind, self.in_text = "", False
        self.feed(path.read_text("utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags[tag] += 1
        self.attributes.append((tag, attrs))
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if (attrs.get("class") or "").startswith("part "):
            self.kind = attrs["class"].removeprefix("part ")
        self.in_text = attrs.get("class") == "text"
        self.texts += [(self.kind, "")] * self.in_text

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.in_text = False

    def handle_data(self, data):
        if self.in_text:
            self.texts[-1] = (self.kind, self.texts[-1][1] + data)


def evil_run(folder: Path) -> Path:
    """Writes a run whose thinking, responses, prompts and ids are all hostile."""
    rows = []
    for i, text in enumerate(EVIL):
        messages = [{"role": "<u>system</u>", "content": text}, {"role": "user", "content": "q"}]
        rows.append(
            completion(f"<i>{i}</i>", i + 1, float(i), thinking=text, response=text, messages=messages)
        )
    rows[1] |= {"status": "no_close", "text": "<think>" + rows[1]["text"]}
    return write(folder / "<run>&", "completions.jsonl", rows)


def test_every_hostile_text_comes_out_as_it_was_written(tmp_path):
    page.write(evil_run(tmp_path), tmp_path / "page.html", n=len(EVIL))
    parsed = ParsedPage(tmp_path / "page.html")
    for kind in ("thinking", "response"):
        assert Counter(text for part, text in parsed.texts if part == kind) == Counter(SEEN)
    assert Counter(text for part, text in parsed.texts if part == "prompt") == Counter(
        SEEN + ["q"] * len(EVIL)
    )
    assert [text for part, text in parsed.texts if part == "raw"] == [
        f"<think><think>\n{SEEN[1]}\n</think>\n\n{SEEN[1]}"
    ]
    known = "html head meta style title body h1 h2 p br ul li a details summary b span div"
    assert parsed.tags.keys() == set(known.split())
    assert parsed.tags["style"] == 2 and parsed.tags["details"] == len(EVIL)
    names = {name for _, attrs in parsed.attributes for name in attrs}
    known = "lang charset name content http-equiv id href class dir"  # not src, style, on...
    assert names == set(known.split())
    targets = {attrs["id"] for tag, attrs in parsed.attributes if tag == "h2"}
    assert {attrs["href"] for tag, attrs in parsed.attributes if tag == "a"} == {f"#{i}" for i in targets}


def test_the_page_of_a_training_run_has_all_its_sections(tmp_path):
    rows = [
        completion(p, s, s * sign, gold=0.1 * s, response=f"answer {p} at {s}")
        for s in (1, 2, 3)
        for p, sign in (("up", 1.0), ("down", -1.0))
    ]
    page.write(write(tmp_path, "completions.jsonl", rows), tmp_path / "page.html", n=2)
    text = (tmp_path / "page.html").read_text()
    sections = re.findall(r"<h2[^>]*>([^<]*)</h2>", text)
    assert sections == [
        "Highest reward",
        "Lowest reward",
        "Highest gold",
        "Lowest gold",
        "One prompt through training",
        "Prompts whose reward rose most",
        "Prompts whose reward fell most",
    ]
    assert (
        "<b>up</b> 1 at step 1 to 3 at step 3" in text and "<b>down</b> -1 at step 1 to -3 at step 3" in text
    )
    assert "6 completions of 2 prompts; 2 prompts were visited at several steps" in text
    assert (
        "ok · step 3 · reward 3 · gold 0.3 · advantage 0.5 · n_tokens 9 · n_thinking_tokens 4 · preference 3"
        in text
    )
    history = text.split("</h2>")[5]
    places = [history.index(f"answer up at {step}") for step in (1, 2, 3)]
    assert places == sorted(places)


def test_the_page_of_an_evaluation_alone_and_compared_with_another(tmp_path):
    a = write(
        tmp_path / "sft",
        "generations.jsonl",
        [generation("x", response="before"), generation("y", response="alone")],
    )
    page.write(a, tmp_path / "page.html")
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", (tmp_path / "page.html").read_text()) == [
        "The first 10 in the file"
    ]
    b = write(tmp_path / "<rl>", "generations.jsonl", [generation("x", 0.5, response="after")])
    page.write(a, tmp_path / "page.html", b)
    parsed = ParsedPage(tmp_path / "page.html")
    assert [text for part, text in parsed.texts if part == "response"] == [
        "before",
        "after",
    ] and "rl" not in parsed.tags
    assert "1 answers match in id" in (tmp_path / "page.html").read_text()


def test_the_size_of_the_page_is_linear_in_what_was_written(tmp_path):
    sizes = []
    for thousands in (10, 20, 30):
        run = write(
            tmp_path / "run",
            "completions.jsonl",
            [completion("a", 1, 1.0, 0.5, response="<" * 1000 * thousands)],
        )
        page.write(run, tmp_path / "page.html")
        sizes.append((tmp_path / "page.html").stat().st_size)
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 2 * 4 * 10_000  # "&lt;", by reward and by gold


def test_the_command_writes_the_same_page(tmp_path):
    run = evil_run(tmp_path)
    page.write(run, tmp_path / "page.html")
    command = [sys.executable, "page.py", str(run)]
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{run / 'page.html'}\n"), done.stderr
    assert (run / "page.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_the_command_refuses_a_folder_without_completions_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        page.main(page.Args(str(tmp_path)))
    lines = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"error: {tmp_path}: no completions")
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_was_read_is_taken_as_it_is(tmp_path):
    rows = page.read_rows(
        write(tmp_path, "completions.jsonl", [completion("a", 1, 1.0), completion("b", 1, 2.0)])
    )
    assert ids(page.best_and_worst(rows[rows["id"] == "a"])[0]) == ["a"]
