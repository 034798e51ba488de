"""Tests page.py: what a page shows, what it refuses to read, and that no text of a model runs or breaks
it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import page
from test_card import make_run
from rlmt.run import finish_run

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


def test_two_runs_are_matched_by_prompt_step_and_temperature(tmp_path):
    a = [generation("x"), generation("y"), generation("z"), generation("x", temperature=0.0)]
    other_prompt = [{"role": "user", "content": "another"}]
    b = [generation("y", response="worse"), generation("x"), generation("z", messages=other_prompt)]
    run_a = write(tmp_path / "a", "generations.jsonl", a)
    run_b = write(tmp_path / "b", "generations.jsonl", b)
    data = shown(tmp_path, run_a, run_b)
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    sizes = Counter(tuple(map(len, visit["sides"])) for visit in data["visits"])
    assert sizes == {(1, 1): 2, (1, 0): 2, (0, 1): 1}
    (y,) = [visit for visit in data["visits"] if data["prompts"][visit["prompt"]]["id"] == "y"]
    assert [side[0]["response"] for side in y["sides"]] == ["y", "worse"]


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


def test_the_top_of_the_page_says_what_was_run(tmp_path):
    rows = [completion("a", 1, 1.0), completion("a", 2, 1.0, status="nested")]
    a = write(tmp_path / "a", "completions.jsonl", rows)
    (a / "command.txt").write_text("python train_grpo.py --seed 3\n")
    (a / "config.json").write_text(json.dumps({"args": {"seed": 3, "out": "a"}}))
    b = write(tmp_path / "b", "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    (b / "config.json").write_text(json.dumps({"args": {"seed": 4, "epochs": 2, "out": "b"}}))
    (b / "summary.json").write_text("{}")
    data = shown(tmp_path, a, b)
    lines = ["training: 2 completions of 1 prompts; ok 1, nested 1"]
    lines.append("not finished: no summary.json")
    assert data["runs"] == [
        {"name": "a", "command": "python train_grpo.py --seed 3", "lines": lines},
        {"name": "b", "command": "", "lines": []},
    ]
    arguments = [{"name": "seed", "values": ["3", "4"]}, {"name": "epochs", "values": ["", "2"]}]
    assert data["arguments"] == arguments


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
    assert curves["kl"]["lines"] == [[[1, None], [2, 0.5]], []]
    in_rounds = [[1, 1], [3, -1], [4, 2], [6, -2], [7, 10], [9, -10]]
    assert curves["in rounds: x"]["lines"] == [in_rounds, []]


def test_a_page_of_many_completions_shows_some_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "EXTREMES", 0)
    rows = []
    for prompt in range(60):
        rows += [completion(f"p{prompt}", step, prompt, response=f"{k}") for step in (1, 2) for k in range(2)]
    run = write(tmp_path / "run", "completions.jsonl", rows)
    assert len(shown(tmp_path, run)["visits"]) == 120
    data = shown(tmp_path, run, n=40)
    assert data["sampled"].startswith("40 of the 240 completions are on this page")
    steps = [visit["step"] for visit in data["visits"]]
    assert steps == [1] * 10 + [2] * 10 and len(data["prompts"]) == 10  # a prompt comes with all its visits
    assert len(shown(tmp_path, run, n=1)["visits"]) == 1  # a visit is never cut
    with monkeypatch.context() as context:
        context.setattr(page, "EXTREMES", 2)
        data = shown(tmp_path, run, n=8)
        assert {visit["highest"] for visit in data["visits"]} == {0, 59}  # both visits of either prompt

    other = write(tmp_path / "other", "completions.jsonl", rows[:20])
    data = shown(tmp_path, run, other, n=40)
    assert all(all(visit["sides"]) for visit in data["visits"])  # those of both runs come first
    monkeypatch.setattr(page, "MAX_CHARACTERS", 10 * len(rows[0]["text"]))
    assert len(shown(tmp_path, run, n=40)["visits"]) == 5


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0.09999999999999999, 0.1, [0.09, 0.1, 0.11]),  # means of equal values: one bit apart
        (1.0, 1.001, [1, 1.0005, 1.001]),
    ],
)
def test_a_curve_that_is_flat_but_for_rounding_has_ticks(low, high, ticks):
    template = page.TEMPLATE.read_text("utf-8")
    script = ""
    for name in ("range", "niceTicks"):
        script += re.search(rf"^function {name}\(.*?^}}", template, re.M | re.S)[0]
    script += f"console.log(JSON.stringify(niceTicks(...range([{low!r}, {high!r}]))))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=20)
    assert json.loads(done.stdout) == ticks, done.stderr


def test_scores_of_an_evaluation_come_from_its_verdicts(tmp_path):
    tasks = [generation("x"), generation("x", temperature=0.0), generation("y"), generation("0-1")]
    write(tmp_path, "generations.jsonl", tasks)
    verdicts = [
        {"id": "x", "temperature": 0.7, "score": "8"},
        {"id": "y", "temperature": 0.7, "choice": "A++", "model_is": "A"},
        {"id": "x", "temperature": 0.0, "score": 0.25, "reward": -1.5},
    ]
    write(tmp_path, "verdicts.jsonl", verdicts)
    # of eval_benchmarks.py; `id` is the benchmark's
    write(tmp_path, "rows.jsonl", [{"temperature": 0.7, "id": "1", "task": 0, "sample": 1, "correct": True}])
    rows = page.read_rows(tmp_path)
    np.testing.assert_equal(rows["gold"].tolist(), [8.0, 0.25, np.nan, 1.0])
    np.testing.assert_equal(rows["reward"].tolist(), [np.nan, -1.5, np.nan, np.nan])
    for verdict, number in (({"strict": [True, False]}, 0), ({"preference": 1.75}, 1.75)):
        assert page.verdict_number(verdict) == number


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
    good, bad_format, too_long = first["sides"][0]
    assert good == {"status": "ok", "numbers": {"gold": 55}, "dialogue": history[1:]}
    assert bad_format["numbers"] == {"gold": 0} and bad_format["text"] == "<think>t</think>hi\n\nbye"
    assert (too_long["status"], too_long["numbers"]) == ("too_long", {})
    assert held_out["prompt"] == first["prompt"] and held_out["highest"] == 30


# --- files that cannot be read


def test_a_last_line_that_was_cut_off_is_left_out_and_named(tmp_path, capsys):
    run = write(tmp_path, "completions.jsonl", [completion("a", 1, 1.0)])
    with open(run / "completions.jsonl", "ab") as file:
        file.write('{"id": "ü'.encode()[:-1])  # in the middle of a character
    assert len(page.read_rows(run)) == 1 and "completions.jsonl:2 is cut off" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"step": 1\n{}\n', "[1]\n"])
def test_what_cannot_be_read_is_named(tmp_path, text, exits):
    (tmp_path / "completions.jsonl").write_text(text)
    said = exits(page.main, page.Args((str(tmp_path),)))
    assert "no metrics and no completions" in said or "completions.jsonl:1: not a JSON object" in said
    assert not (tmp_path / "page.html").exists()


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


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_shows_hostile_texts_and_runs_none(evil, tmp_path):
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *options, "--dump-dom", evil.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    seen = ParsedPage(re.sub(r'(id="data">).*?(</script>)', r"\1\2", dom, flags=re.S))
    assert all(seen.texts.count(text) >= 2 for text in EVIL.values())  # thinking and response
    assert "<title>&lt;run&gt;&amp;{{data}}</title>" in dom  # a script that ran would have changed it
    assert seen.tags["img"] == 0 and seen.tags["polyline"] == 2


def test_a_training_script_ends_with_a_page_and_never_fails_by_it(tmp_path, capsys):
    run = make_run(tmp_path / "run", "sft", {"model": "org/base", "traces": "owner/traces"}, {"loss": 2.0})
    finish_run(run, {"steps": 1})
    assert data_of(run / "page.html")["runs"][0]["lines"] == []  # it is finished
    (run / "page.html").unlink()
    (run / "completions.jsonl").write_text("{}\n")
    finish_run(run, {"steps": 2})
    assert json.loads((run / "summary.json").read_text()) == {"steps": 2}
    assert f"WARNING: no page of {run}: KeyError: 'id'" in capsys.readouterr().err
