"""The notebooks as they are committed, and run again on hand-made runs; the reader of traces; its HTML page."""

import base64
import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest

import page as trace_reader
import training
from rewards.gold import log_held_out

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


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
    return (
        {k: row[k] for k in keep} | {"temperature": temperature} | ({} if score is None else {"score": score})
    )


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def ids(table) -> list:
    return table["id"].tolist()


# --- the notebooks in the repository


def outputs(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_valid_executed_in_order_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "run it again from the top"
    )
    assert not [o.evalue for o in outputs(notebook) if o.output_type == "error"]
    assert not [o.text for o in outputs(notebook) if o.get("name") == "stderr"]
    assert path.stat().st_size < 400_000
    images = [
        len(base64.b64decode(o.data["image/png"]))
        for o in outputs(notebook)
        if "image/png" in o.get("data", {})
    ]
    assert max(images, default=0) < 60_000


ABSOLUTE = re.compile(r"(?<![\w.<:/~])/[A-Za-z][\w.-]*/[\w.-]+|[A-Z]:\\\\")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_names_no_absolute_path(path):
    notebook = nbformat.read(path, as_version=4)
    for output in outputs(notebook):
        output.get("data", {}).pop("image/png", None)
    assert not ABSOLUTE.findall(json.dumps(notebook.cells, ensure_ascii=False))


def test_what_counts_as_an_absolute_path():
    assert ABSOLUTE.search('open("/home/me/x.jsonl")') and ABSOLUTE.search("/work/main/results")
    assert not ABSOLUTE.search("../results/toy, reward/gold, </b></div>, https://arxiv.org/abs/2509.20357")


def test_the_readme_of_the_notebooks_lists_them():
    listed = set(re.findall(r"`(\d\d_\w+\.ipynb)`", (ROOT / "notebooks" / "README.md").read_text()))
    assert {p.name for p in NOTEBOOKS} <= listed and len(NOTEBOOKS) >= 4


# --- the notebooks on other runs


def rl_run(folder: Path, reward_model: str, gold: bool, steps: int, model="sft", think=True) -> None:
    write(
        folder,
        "metrics.jsonl",
        [
            {
                "step": s,
                "reward": float(s),
                "reward/preference": float(s),
                "kl": 0.01 * s,
                "think/format_ok": 1.0,
                "think/mean_tokens": 5.0 + s,
                "think/response_tokens": 7.0,
                **({"reward/gold": 0.1 * s} if gold else {}),
            }
            for s in range(1, steps + 1)
        ],
    )
    args = {
        "model": f"results/{model}/model",
        "reward_model": reward_model,
        "reward_on": "response",
        "think": think,
        "prompts_per_step": 2,
        "group_size": 1,
    }
    (folder / "config.json").write_text(json.dumps({"args": args}))
    write(
        folder,
        "completions.jsonl",
        [
            completion(p, s, s * (1.0 if p == "a" else -0.5), 0.1 * s if gold else None)
            for s in range(1, steps + 1)
            for p in "ab"
        ],
    )


def make_runs(folder: Path) -> None:
    """Everything a notebook can show: two RL runs on two reward models, held-out gold, evaluations, traits."""
    write(folder / "sft", "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    (folder / "sft" / "config.json").write_text(json.dumps({"args": {"model": "base", "think": True}}))
    for name, accuracy in (("rm-weak", 0.6), ("rm-strong", 0.8)):
        held_out = {
            "accuracy": accuracy,
            "ece": 0.1,
            "n": 50,
            "bins": [{"predicted": 0.7, "right": accuracy, "n": 50}],
        }
        write(folder / name, "metrics.jsonl", [{"step": 1, "loss": 0.6}])
        (folder / name / "config.json").write_text(json.dumps({"args": {"model": "base"}}))
        (folder / name / "summary.json").write_text(json.dumps({"held_out": held_out}))
        rl_run(folder / f"rl-{name}", f"results/{name}/model", gold=True, steps=6)
    write(
        folder / "rl-rm-weak",
        "held_out.jsonl",
        [{"step": s, "gold": 0.5, "gold_se": 0.1, "proxy": 1.0 * s} for s in (2, 4)],
    )
    for model in ("sft", "rl-rm-strong"):
        write(
            folder / f"eval-{model}",
            "generations.jsonl",
            [generation("t", response=f"written by {model}", score=0.5)],
        )
        (folder / f"eval-{model}" / "config.json").write_text(
            json.dumps({"args": {"model": f"results/{model}/model"}})
        )
    trait = {
        "description": "d",
        "win_rate": 0.75,
        "interval": [0.6, 0.9],
        "wins": 3,
        "ties": 0,
        "losses": 1,
        "flip_rate": 0.0,
    }
    traits = {"costs $5 & $6": trait, "lists steps": {**trait, "win_rate": 0.4, "interval": [0.4, 0.6]}}
    summary = {
        "model": "results/rl/g.jsonl",
        "baseline": "results/sft/g.jsonl",
        "n": 2,
        "n_invalid": 0,
        "n_replies": 4,
    }
    write(folder / "traits", "traits.json", [{}])
    (folder / "traits" / "summary.json").write_text(json.dumps(summary | {"traits": traits}))


def make_bare_run(folder: Path) -> None:
    """The least: one RL run of one step without gold."""
    rl_run(folder / "rl", "some/reward-model", gold=False, steps=1)


def run_notebook(name: str, folder: Path, monkeypatch, capsys) -> tuple[dict, str]:
    """Names that its code cells leave, run with RUNS = folder, and what they printed."""
    path = next(p for p in NOTEBOOKS if p.name.startswith(name))
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert sum(c.count("\nRUNS = Path(") for c in cells) == 1
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend("..")
    plt.close("all")
    plt.rcdefaults()
    plt.switch_backend("Agg")
    names: dict = {}
    for cell in cells:
        cell = re.sub(r'\nRUNS = Path\("[^"]*"\)', f"\nRUNS = Path({str(folder)!r})", cell)
        exec(compile(re.sub(r'\nNAMES = "[^"]*"', '\nNAMES = "*"', cell), path.name, "exec"), names)
    plt.gcf().canvas.draw()
    return names, capsys.readouterr().out


@pytest.fixture(params=[make_runs, make_bare_run])
def some_runs(request, tmp_path) -> Path:
    request.param(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize("name", ["02", "03", "04", "05"])
def test_a_notebook_runs_on_full_and_on_bare_folders(name, some_runs, monkeypatch, capsys):
    names, printed = run_notebook(name, some_runs, monkeypatch, capsys)
    full = (some_runs / "traits").is_dir()
    if name == "02":
        assert names["curves"]["run"].unique().tolist() == (
            ["rl-rm-strong", "rl-rm-weak"] if full else ["rl"]
        )
        assert names["curves"]["completions"].max() == (2 * 5 if full else 0)
        assert ("held_out.jsonl" in printed) != full
    if name == "03":
        assert len(names["fell"]) == len(names["rose"]) == (1 if full else 0)
        assert ("written by rl-rm-strong" in names["html"]) == full
    if name == "04":
        assert ("nothing to show" in printed) != full
        assert not full or plt.gcf().axes[0].get_xlim() == (0, 1)
    if name == "05":
        assert names["last"]["accuracy"].dropna().tolist() == ([0.8, 0.6] if full else [])


@pytest.mark.parametrize("name", ["02", "03", "05"])
def test_a_notebook_says_when_there_is_no_run(name, tmp_path, monkeypatch, capsys):
    with pytest.raises(AssertionError, match=f"no (RL )?run (with thinking )?in {tmp_path}"):
        run_notebook(name, tmp_path, monkeypatch, capsys)


# --- the reader: which rows


def test_best_and_worst_one_a_prompt_the_first_of_equal_ones(tmp_path):
    rows = [
        completion("a", 1, 3.0),
        completion("a", 1, 3.0, 0.1),
        completion("b", 1, 3.0, 0.9),
        completion("b", 2, -1.0, 0.2),
        completion("c", 2, -1.0),
        completion("d", 2, None),
    ]
    run = write(tmp_path / "run", "completions.jsonl", rows)
    best, worst = trace_reader.best_and_worst(run, 2)
    assert (ids(best), best["reward"].tolist()) == (["a", "b"], [3.0, 3.0])
    assert (ids(worst), worst["reward"].tolist()) == (["b", "c"], [-1.0, -1.0])
    best, worst = trace_reader.best_and_worst(run, 1, by="gold")
    assert best["gold"].tolist() == [0.9] and worst["gold"].tolist() == [0.1]
    same = write(tmp_path / "same", "completions.jsonl", [completion(p, 1, 0.0) for p in "xyz"])
    best, worst = trace_reader.best_and_worst(same, 2)
    assert ids(best) == ["x", "y"] and ids(worst) == ["z"]
    with pytest.raises(ValueError, match="no completion has a gold"):
        trace_reader.best_and_worst(same, 1, by="gold")


def test_same_prompt_is_the_one_with_most_visits_in_order_of_steps(tmp_path):
    rows = [
        completion("a", 5, 1.0),
        completion(7, 4, 1.0),
        completion(7, 2, 2.0),
        completion(7, 2, 3.0),
        completion("a", 5, 9.0),
    ]
    run = write(tmp_path, "completions.jsonl", rows)
    assert trace_reader.same_prompt(run)[["id", "step", "reward"]].values.tolist() == [
        [7, 2, 2],
        [7, 2, 3],
        [7, 4, 1],
    ]
    assert trace_reader.same_prompt(run, "a")["reward"].tolist() == [1.0, 9.0]
    with pytest.raises(ValueError, match="no prompt 'b' among the 2 of the run"):
        trace_reader.same_prompt(run, "b")


def test_held_out_prompts_are_followed_through_training(tmp_path):
    """As gold.log_held_out writes them: the step of the checkpoint, no reward."""
    run = write(tmp_path / "run", "completions.jsonl", [completion("a", 1, 1.0)])
    (run / trace_reader.HELD_OUT).touch()  # of a run that was resumed from its beginning
    assert trace_reader.same_prompt(run)["id"].tolist() == ["a"]
    for step in (7, 14):
        rows = [completion(p, step + 1, 0.5, 0.01 * step, response=f"{p} at {step}") for p in ("held", "out")]
        log_held_out(
            run, step, [{k: v for k, v in row.items() if k not in ("reward", "advantage")} for row in rows]
        )
    assert trace_reader.same_prompt(run)[["id", "step", "gold"]].values.tolist() == [
        ["held", 7, 0.07],
        ["held", 14, 0.14],
    ]
    assert trace_reader.same_prompt(run, "out")["response"].tolist() == ["out at 7", "out at 14"]
    assert trace_reader.same_prompt(run, "a")["step"].tolist() == [1]
    trace_reader.page(run, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert (
        "One prompt through training" in text
        and "<b>step 14</b> mean gold 0.14" in text
        and "held at 7" in text
    )
    training.cut_log(run / trace_reader.HELD_OUT, 7)
    assert trace_reader.same_prompt(run)["step"].tolist() == [7]


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
    rose, fell = trace_reader.biggest_jumps(run, 3)
    assert rose.index.tolist() == [
        "a",
        "d",
        "e",
    ]  # a and d are equal: the one seen first; c has one visit, f no change
    assert rose.loc["e", "first_step"] == 2  # no reward at step 1
    assert trace_reader.biggest_jumps(run, 1)[0].index.tolist() == ["a"]
    assert rose.loc["a"].to_dict() == {
        "change": 1.5,
        "first_step": 1,
        "last_step": 3,
        "first": 0.5,
        "last": 2.0,
    }
    assert fell.index.tolist() == ["b"] and fell["change"].tolist() == [-0.5]
    one_step = write(tmp_path / "one", "completions.jsonl", rows[:6])
    assert [len(part) for part in trace_reader.biggest_jumps(one_step)] == [0, 0]


def test_side_by_side_matches_id_temperature_and_sample(tmp_path):
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
    ours, theirs = trace_reader.side_by_side(a, b)
    assert ids(ours) == ids(theirs) == ["y", "x"] and theirs["response"].tolist() == ["worse", "better"]
    assert ours.attrs["matched"] == 2 and ids(trace_reader.side_by_side(a, b, 1)[0]) == ["y"]
    other = write(
        tmp_path / "c",
        "generations.jsonl",
        [generation("x", messages=[{"role": "user", "content": "another"}])],
    )
    with pytest.raises(ValueError, match="id 'x' stands for other messages"):
        trace_reader.side_by_side(a, other)
    with pytest.raises(ValueError, match="nothing in both"):
        trace_reader.side_by_side(a, write(tmp_path / "d", "generations.jsonl", [generation("nowhere")]))
    training = write(tmp_path / "e", "completions.jsonl", [completion("x", 1, 0.0)])
    for other in (training, write(tmp_path / "f", "generations.jsonl", [generation("x"), generation("x")])):
        with pytest.raises(ValueError, match="one answer for each id, temperature and sample"):
            trace_reader.side_by_side(a, other)


def test_marks_of_an_evaluation_come_from_its_verdicts(tmp_path):
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
    rows = trace_reader.read(tmp_path)
    np.testing.assert_equal(rows["gold"].tolist(), [8.0, 0.25, np.nan, np.nan])
    np.testing.assert_equal(rows["reward"].tolist(), [np.nan, -1.5, np.nan, np.nan])


# --- the reader: bad folders


def test_a_last_line_that_was_cut_off_is_left_out_and_named(tmp_path, capsys):
    run = write(tmp_path, "completions.jsonl", [completion("a", 1, 1.0), completion("ü", 1, 2.0)])
    whole = (run / "completions.jsonl").read_bytes()
    (run / "completions.jsonl").write_bytes(
        whole + '{"step": 1, "id": "ü'.encode()[:-1]
    )  # in the middle of a character
    rows = trace_reader.read(run)
    assert ids(rows) == ["a", "ü"] and "completions.jsonl:3 is cut off" in capsys.readouterr().err
    trace_reader.page(run, tmp_path / "page.html")
    assert "completions.jsonl:3 is cut off" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    (run / "completions.jsonl").write_bytes(whole[:-1])  # whole, but for its newline
    assert ids(trace_reader.read(run)) == ["a", "ü"] and not capsys.readouterr().err


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
    for function in (trace_reader.best_and_worst, lambda run: trace_reader.page(run, tmp_path / "page.html")):
        with pytest.raises(ValueError, match=message):
            function(tmp_path)
    assert not (tmp_path / "page.html").exists()


# --- the page

EVIL = {  # what a model wrote: what a reader sees
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


class Page(HTMLParser):
    """Tags, their attributes, and (kind of part, text) of every text; tags must be closed in order."""

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
    """One completion a prompt and step; thinking, response, prompt and id all hostile."""
    rows = []
    for i, text in enumerate(EVIL):
        messages = [{"role": "<u>system</u>", "content": text}, {"role": "user", "content": "q"}]
        rows.append(
            completion(f"<i>{i}</i>", i + 1, float(i), thinking=text, response=text, messages=messages)
        )
    rows[1] |= {"status": "no_close", "text": "<think>" + rows[1]["text"]}
    return write(folder / "<run>&", "completions.jsonl", rows)


def test_every_hostile_text_comes_out_as_it_was_written(tmp_path):
    trace_reader.page(evil_run(tmp_path), tmp_path / "page.html", n=len(EVIL))
    page = Page(tmp_path / "page.html")
    for kind in ("thinking", "response"):
        assert Counter(text for part, text in page.texts if part == kind) == Counter(SEEN)
    assert Counter(text for part, text in page.texts if part == "prompt") == Counter(SEEN + ["q"] * len(EVIL))
    assert [text for part, text in page.texts if part == "raw"] == [
        f"<think><think>\n{SEEN[1]}\n</think>\n\n{SEEN[1]}"
    ]
    assert page.tags.keys() == {
        "html",
        "head",
        "meta",
        "style",
        "title",
        "body",
        "h1",
        "h2",
        "p",
        "br",
        "ul",
        "li",
        "a",
        "details",
        "summary",
        "b",
        "span",
        "div",
    }
    assert page.tags["style"] == 2 and page.tags["details"] == len(EVIL)
    names = {name for _, attrs in page.attributes for name in attrs}
    assert names == {
        "lang",
        "charset",
        "name",
        "content",
        "http-equiv",
        "id",
        "href",
        "class",
        "dir",
    }  # no src, style, on*
    targets = {attrs["id"] for tag, attrs in page.attributes if tag == "h2"}
    assert {attrs["href"] for tag, attrs in page.attributes if tag == "a"} == {f"#{i}" for i in targets}


def test_the_page_of_a_training_run_has_all_its_sections(tmp_path):
    rows = [
        completion(p, s, s * sign, gold=0.1 * s, response=f"answer {p} at {s}")
        for s in (1, 2, 3)
        for p, sign in (("up", 1.0), ("down", -1.0))
    ]
    trace_reader.page(write(tmp_path, "completions.jsonl", rows), tmp_path / "page.html", n=2)
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
    history = text[
        text.index("<h2", text.index("Lowest gold</h2>")) : text.index("Prompts whose reward rose most</h2>")
    ]
    assert [history.index(f"answer up at {s}") for s in (1, 2, 3)] == sorted(
        history.index(f"answer up at {s}") for s in (1, 2, 3)
    )


def test_the_page_of_an_evaluation_alone_and_beside_another(tmp_path):
    a = write(
        tmp_path / "sft",
        "generations.jsonl",
        [generation("x", response="before"), generation("y", response="alone")],
    )
    trace_reader.page(a, tmp_path / "page.html")
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", (tmp_path / "page.html").read_text()) == [
        "The first 10 in the file"
    ]
    b = write(tmp_path / "<rl>", "generations.jsonl", [generation("x", 0.5, response="after")])
    trace_reader.page(a, tmp_path / "page.html", b)
    page = Page(tmp_path / "page.html")
    assert [text for part, text in page.texts if part == "response"] == [
        "before",
        "after",
    ] and "rl" not in page.tags
    assert "1 pairs have one id" in (tmp_path / "page.html").read_text()


def test_the_size_of_the_page_is_linear_in_what_was_written(tmp_path):
    sizes = []
    for thousands in (100, 200, 300):
        run = write(
            tmp_path / "run",
            "completions.jsonl",
            [completion("a", 1, 1.0, 0.5, response="<" * 1000 * thousands)],
        )
        trace_reader.page(run, tmp_path / "page.html")
        sizes.append((tmp_path / "page.html").stat().st_size)
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 2 * 4 * 100_000  # "&lt;", by reward and by gold


def test_the_page_is_the_same_every_time(tmp_path):
    run = evil_run(tmp_path)
    trace_reader.page(run, tmp_path / "a.html")
    code = f"import trace_reader; trace_reader.page({str(run)!r}, {str(tmp_path / 'b.html')!r})"
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "7"}, check=True
    )
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_table_that_was_read_is_taken_as_it_is(tmp_path):
    rows = trace_reader.read(
        write(tmp_path, "completions.jsonl", [completion("a", 1, 1.0), completion("b", 1, 2.0)])
    )
    assert isinstance(rows, pd.DataFrame) and ids(
        trace_reader.best_and_worst(rows[rows["id"] == "a"])[0]
    ) == ["a"]
