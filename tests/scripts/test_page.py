"""Tests page.py: what a page shows, what it refuses to read, and that no text of a model runs or breaks
it."""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
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


class ParsedPage(HTMLParser):
    """Collects tags with the names of their attributes, and the text of every element with `data-of`, as
    (data-of, text), as an HTML parser sees them."""

    def __init__(self, file: Path):
        super().__init__()
        self.tags = Counter()
        self.texts = []
        self.inside = False
        self.feed(file.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag, *dict(attrs)] += 1
        self.inside = "data-of" in dict(attrs)
        if self.inside:
            self.texts.append((dict(attrs)["data-of"], ""))

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            label, text = self.texts[-1]
            self.texts[-1] = (label, text + data)


def shown(folder: Path, *runs: Path) -> ParsedPage:
    page.write_page(runs, folder / "shown.html")
    return ParsedPage(folder / "shown.html")


def headings(folder: Path) -> list[str]:
    return re.findall("<h2.*?>(.*?)</h2>", (folder / "shown.html").read_text())


# --- what the page shows


def test_first_middle_and_last_step_that_two_runs_share(tmp_path, monkeypatch):
    def write_run(name: str, steps: range, prompts: str) -> Path:
        rows = []
        for step in steps:
            rows += [completion(prompt, step, 1.0, response=f"{name} {step}") for prompt in prompts]
        return write(tmp_path / name, "completions.jsonl", rows)

    long = write_run("long", range(1, 10), "ab")
    held_out = completion("held", 7, None, 0.9)
    del held_out["reward"]  # held-out completions have none
    write(long, "held_out_completions.jsonl", [held_out])
    short = write_run("short", range(1, 7), "bc")
    sections = ["training, step 1", "training, step 4", "training, step 6", "held out, step 7"]

    with monkeypatch.context() as patch:
        patch.setattr(page, "MAX_CHARACTERS", 1)
        page_of_two = shown(tmp_path, long, short)
    counts = [heading.split(": ") for heading in headings(tmp_path)]
    assert counts == [[label, f"1 of {3 if 'training' in label else 1} prompts"] for label in sections]
    # of each step the prompt that both runs answered, and their answers next to each other
    assert page_of_two.texts[:5] == [
        ("user", "ask b"),
        ("thinking", "z"),
        ("response", "long 1"),
        ("thinking", "z"),
        ("response", "short 1"),
    ]

    alone = shown(tmp_path, long)
    assert "training, step 9: 2 of 2 prompts" in headings(tmp_path)
    answers = [text for label, text in alone.texts if label == "response"]
    assert answers == ["long 1"] * 2 + ["long 5"] * 2 + ["long 9"] * 2 + ["y"]


def test_what_is_shown_of_a_completion(tmp_path):
    several = {"preference": 0.5, "length": -1.0, "gold": 0.9}
    bad = {"status": "no_close", "text": "<think> more", "pair": "rejected"}
    rows = [completion("a", 1, 1.0, 0.4), completion("a", 1, float("nan"), rewards=several)]
    run = write(tmp_path / "run", "completions.jsonl", [*rows, completion("a", 1, -2.0, **bad)])
    texts = shown(tmp_path, run).texts
    reply = [("thinking", "z"), ("response", "y")]
    assert texts == [("user", "ask a"), *reply * 3, ("as written", "<think> more")]
    lines = re.findall("<p>(.*?)</p>", (tmp_path / "shown.html").read_text())
    assert [re.sub("</?b.*?>", "", line) for line in lines] == [
        "run 3 completions · ok 2 · no_close 1; means · reward -0.5 · gold 0.65 · n_tokens 9.0"
        " · n_thinking_tokens 4.0",
        "ok  · reward 1.0 · gold 0.4 · n_tokens 9 · n_thinking_tokens 4 · advantage 0.5",
        "ok  · gold 0.9 · n_tokens 9 · n_thinking_tokens 4 · advantage 0.5 · preference 0.5 · length -1.0",
        "no_close rejected · reward -2.0 · n_tokens 9 · n_thinking_tokens 4 · advantage 0.5",
    ]


def test_curves(tmp_path):
    nan = float("nan")
    first = {"step": 1, "loss": 2.0, "kl": nan, "reward/gold": 0.25, "reward": 1, "skipped": {}, "note": "x"}
    run = write(tmp_path / "run", "metrics.jsonl", [first, {"step": 2, "kl": 0.5, "reward": 2}])
    write(run, "held_out.jsonl", [{"step": 2, "gold": 0.5}])
    for number in (1, 2, 10):  # the rounds of DPO
        write(run / f"round-{number}", "metrics.jsonl", [{"step": 1, "x": number}, {"step": 3, "x": -number}])
    curves = page.read_curves(run)
    assert list(curves) == ["loss", "reward/gold", "reward", "kl", "held out: gold", "in rounds: x"]
    assert curves["reward"] == {1: 1, 2: 2} and curves["kl"] == {2: 0.5}
    assert curves["in rounds: x"] == {1: 1, 3: -1, 4: 2, 6: -2, 7: 10, 9: -10}

    rows = [{"step": step, "reward": step % 7, "think/mean_tokens": step} for step in range(1, 20_001)]
    long = write(tmp_path / "long", "metrics.jsonl", rows)
    shown(tmp_path, run, long)
    text = (tmp_path / "shown.html").read_text()
    panels = [key for key in page.PANELS if f">{key}<" in text]
    assert panels == ["reward", "reward/gold", "held out: gold", "kl", "think/mean_tokens"]
    assert len(text) < 100_000  # a long run has a small picture


def test_a_folder_with_nothing_to_show_is_refused(tmp_path):
    evaluation = write(tmp_path / "evaluation", "generations.jsonl", [generation("x", score=0.5)])
    assert not shown(tmp_path, evaluation).tags["svg",]
    assert headings(tmp_path) == ["evaluation, temperature 0.7: 1 of 1 prompts"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no metrics and no completions"):
        shown(tmp_path, evaluation, tmp_path / "empty")


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
        "&#60;b&#62; &nbsp; ]]> <?php ?> <![CDATA[x]]> $title",
    )
} | {
    "nul \x00, carriage return\r\n, turned \u202e": "nul \\x00, carriage return\\r\n, turned \\u202e",
    "half a pair \ud83d and \udfff": r"half a pair \ud83d and \udfff",
}


def write_run(folder: Path, texts: Iterable[str], word: str) -> Path:
    """Writes a run whose texts, roles, ids, names, statuses, reward and command are `texts` or `word`."""
    messages = [{"role": word, "content": word}, {"role": "user", "content": "$texts"}]
    rows = []
    for text in texts:
        more = {"thinking": text, "response": text, "text": text, "status": word, "pair": word}
        rows.append(completion(word, 1, 1.0, messages=messages, rewards={word: 0.5}, **more))
    write(folder, "completions.jsonl", rows)
    write(folder, "metrics.jsonl", [{"step": 1, word: 1.0, "reward": 2.0}])
    (folder / "command.txt").write_text(word)
    page.main(page.Args((str(folder),)))
    return folder / "page.html"


def test_every_hostile_text_reaches_the_page_and_none_is_html(tmp_path):
    file = write_run(tmp_path / "<run>&$texts", EVIL, SCRIPT)
    evil = ParsedPage(file)
    assert evil.texts[:2] == [(SCRIPT, SCRIPT), ("user", "$texts")]
    for label in ("thinking", "response", "as written"):
        assert [text for of, text in evil.texts if of == label] == list(EVIL.values())
    other = write_run(tmp_path / "run", ["plain"] * len(EVIL), "word")
    assert evil.tags == ParsedPage(other).tags  # no element and no attribute is added

    # only the script of the template may run, and nothing is loaded
    text = file.read_text("utf-8")
    assert "<title>&lt;run&gt;&amp;$texts</title>" in text
    script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
    assert script in page.TEMPLATE.read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\(|Function\(|srcdoc|fetch\("
    assert not re.findall(ways, script)
    loads = r"\b(?:src|href)=(?!\"#)|@import|url\((?!#)|https?://(?!www.w3.org/)"
    assert not re.findall(loads, other.read_text("utf-8"))
