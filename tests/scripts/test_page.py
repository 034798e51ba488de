"""Tests page.py: what a page shows, what it refuses to read, and that no text of a model runs or breaks
it."""

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import page

EMPTY = {"thinking": "z", "response": "y", "status": "ok", "n_tokens": 9, "n_thinking_tokens": 4}


def answer(prompt: str, **more) -> dict:
    messages = [{"role": "user", "content": f"ask {prompt}"}]
    return EMPTY | {"id": prompt, "messages": messages, "text": "<think>\nz\n</think>\n\ny"} | more


def completion(prompt: str, step: int, reward: float | None, gold: float | None = None, **more) -> dict:
    row = {"step": step, "rewards": {"preference": reward, "gold": gold}, "reward": reward, "advantage": 0.5}
    return answer(prompt, **row | more)


def generation(task: str, temperature: float = 0.7, **more) -> dict:
    return answer(task, temperature=temperature, **more)


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def data_of(file: Path) -> dict:
    """Returns the JSON in a page."""
    start = '<script type="application/json" id="data">'
    return json.loads(file.read_text("utf-8").partition(start)[2].partition("</script>")[0])


def shown(folder: Path, *runs: Path, n: int = 0) -> dict:
    page.write_page(list(runs), folder / "shown.html", n)
    return data_of(folder / "shown.html")


def ids(data: dict, field: str | None = None) -> list[tuple]:
    """Returns (id, step, number) of the visits that have the number."""
    found = []
    for visit in data["visits"]:
        if visit[field] is not None:
            found.append((data["prompts"][visit["prompt"]]["id"], visit["step"], visit[field]))
    return found


# --- what the page shows


def test_visits_have_the_numbers_that_they_are_ordered_by(tmp_path):
    rows = [completion("b", 2, -1.0, 0.2), completion("a", 1, 3.0), completion("a", 1, 1.0)]
    run = write(tmp_path / "run", "completions.jsonl", [*rows, completion("d", 2, None)])
    held_out = completion("held", 7, None, 0.9)
    del held_out["reward"]  # held-out completions have none
    write(run, "held_out_completions.jsonl", [held_out])
    data = shown(tmp_path, run)
    assert ids(data, "highest") == [("a", 1, 3.0), ("b", 2, -1.0)]  # by step
    assert ids(data, "lowest") == [("a", 1, 1.0), ("b", 2, -1.0)]
    orders = [["highest reward", "highest", True], ["lowest reward", "lowest", False]]
    assert data["orders"] == orders
    assert [visit["kind"] for visit in data["visits"]] == ["training"] * 3 + ["held out"]
    assert data["visits"][3]["sides"][0][0]["numbers"] == {"gold": 0.9, "n_tokens": 9, "n_thinking_tokens": 4}

    gold = write(tmp_path / "gold", "generations.jsonl", [generation("x", score=0.5)])
    data = shown(tmp_path, gold)
    assert data["orders"][0][0] == "highest gold" and ids(data, "highest") == [("x", None, 0.5)]
    # a second sample of the task, with an id of its own
    write(
        gold, "generations.jsonl", [generation("x", score=0.5), generation("x", score=0.75) | {"id": "x-1"}]
    )
    assert ids(shown(tmp_path, gold), "highest") == [("x-1", None, 0.75)]


def test_what_is_shown_of_a_completion(tmp_path):
    several = {"preference": 0.5, "length": -1.0, "gold": 0.9}
    parts = {"preference": 0.5, "length": -1.0}
    rows = [
        completion("a", 1, 1.0, 0.4),
        completion("b", 1, -0.5, rewards=several),
        completion("c", 1, -2.0, status="no_close", text="<think> more", pair="rejected"),
        completion("e", 1, float("nan")),
    ]
    data = shown(tmp_path, write(tmp_path / "run", "completions.jsonl", rows))
    plain, combined, bad, unknown = [visit["sides"][0][0] for visit in data["visits"]]
    lengths = {"advantage": 0.5, "n_tokens": 9, "n_thinking_tokens": 4}
    assert plain == {
        "status": "ok",
        "numbers": {"reward": 1.0, "gold": 0.4, **lengths},
        "thinking": "z",
        "response": "y",
    }
    assert combined["numbers"] == {"reward": -0.5, "gold": 0.9, **lengths, **parts}
    assert (bad["text"], bad["pair"]) == ("<think> more", "rejected")
    assert unknown["numbers"] == lengths


def test_curves(tmp_path):
    nan = float("nan")
    first = {"step": 1, "loss": 2.0, "kl": nan, "reward/gold": 0.25, "reward": 1, "skipped": {}, "note": "x"}
    run = write(tmp_path / "run", "metrics.jsonl", [first, {"step": 2, "kl": 0.5, "reward": 2}])
    write(run, "held_out.jsonl", [{"step": 2, "gold": 0.5}])
    for number in (1, 2, 10):  # the rounds of DPO
        write(run / f"round-{number}", "metrics.jsonl", [{"step": 1, "x": number}, {"step": 3, "x": -number}])
    other = write(tmp_path / "other", "metrics.jsonl", [{"step": 5, "reward": 7.0}])
    curves = {curve["key"]: curve for curve in shown(tmp_path, run, other)["curves"]}
    assert list(curves) == ["reward", "reward/gold", "held out: gold", "kl", "loss", "in rounds: x"]
    assert [key for key, curve in curves.items() if curve["main"]] == list(curves)[:4]
    assert curves["reward"]["lines"] == [[[1, 1], [2, 2]], [[5, 7.0]]]
    assert curves["kl"]["lines"] == [[[2, 0.5]], []]
    in_rounds = [[1, 1], [3, -1], [4, 2], [6, -2], [7, 10], [9, -10]]
    assert curves["in rounds: x"]["lines"] == [in_rounds, []]


def test_two_evaluations_are_compared_prompt_by_prompt(tmp_path):
    samples = [generation(f"a-{n}", score=score) for n, score in enumerate((0.0, 1.0))]
    for sample in samples:
        sample["messages"] = [{"role": "user", "content": "ask a"}]
    one = write(
        tmp_path / "one",
        "generations.jsonl",
        [*samples, generation("b", score=0.5), generation("c", score=1.0)],
    )
    others = [generation("a", score=0.25), generation("b", score=0.5), generation("d", score=1.0)]
    other = write(tmp_path / "other", "generations.jsonl", others)
    gold, length = shown(tmp_path, one, other)["comparison"]
    assert gold == {"name": "gold, temperature 0.7", "means": [0.5, 0.375], "wins": 0.75, "n": 2}
    assert length["wins"] == 0.5
    assert shown(tmp_path, one)["comparison"] == []


# --- hostile texts

# what a script in a text would do if it ran
SCRIPT = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
EVIL = {  # what a model wrote: what a reader sees
    text: text
    for text in (
        SCRIPT,
        "</div></details></body></html> &amp; &lt; \"double\" 'single' <!-- <style>*{display:none}</style>",
        "emoji 😀👩‍👩‍👧🇫🇷, עברית and العربية, 漢字, e\u0301, \u200fmark",
        "  indented\n\n\ttab and trailing space \n",
        "&#60;b&#62; &nbsp; ]]> <?php ?> <![CDATA[x]]> {{data}}",
    )
} | {
    "nul \x00, carriage return\r\n, turned \u202e": "nul \\x00, carriage return\\r\n, turned \\u202e",
    "half a pair \ud83d and \udfff": r"half a pair \ud83d and \udfff",
}


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


@pytest.fixture
def evil(tmp_path) -> Path:
    """The page of a run whose thinking, responses, prompts, roles, ids and name are all hostile."""
    messages = [{"role": "<u>system</u>", "content": SCRIPT}, {"role": "user", "content": "{{data}}"}]
    rows = []
    for text in EVIL:
        rows.append(completion(SCRIPT, 1, float(len(rows)), thinking=text, response=text, messages=messages))
    run = write(tmp_path / "<run>&{{data}}", "completions.jsonl", rows)
    write(run, "metrics.jsonl", [{"step": 1, SCRIPT: 1.0, "reward": 2.0}])
    (run / "config.json").write_text(json.dumps({"args": {SCRIPT: SCRIPT}}))
    (run / "command.txt").write_text(SCRIPT)
    page.main(page.Args((str(run),)))
    return run / "page.html"


def test_every_hostile_text_reaches_the_page_and_none_is_html(evil):
    for field in ("thinking", "response"):
        shown_texts = [completion[field] for completion in data_of(evil)["visits"][0]["sides"][0]]
        assert shown_texts == list(EVIL.values())
    text = evil.read_text("utf-8")
    template = page.TEMPLATE.read_text("utf-8")
    assert ParsedPage(text).tags == ParsedPage(template).tags  # scripts, elements: none is added
    assert "<title>&lt;run&gt;&amp;{{data}}</title>" in text

    # only the script of the template may run, and nothing is loaded
    script = re.search(r"<script>(.*?)</script>", template, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\(|Function\(|srcdoc|fetch\("
    assert not re.findall(rf"{ways}|\b(?:src|href)=|@import|url\(|https?://(?!www.w3.org/2000/svg)", template)
