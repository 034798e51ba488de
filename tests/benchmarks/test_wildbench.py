"""WildBench: published scores from stored verdicts, rewards by hand, replies that hold no verdict, and whole
runs with a real HTTP judge."""

import json
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import PUBLISHED, table

import eval_wildbench
from benchmarks import scoring, wildbench
from benchmarks.judge_template import fill_messages
from data.toy import world as toy_world
from page import read_rows
from rlmt.reward_model import RewardModel
from rlmt.data import read_log, write_jsonl


def score_stored(tmp_path: Path, rows: list[dict] | Path, **flags) -> dict:
    """What the command writes for stored rows, or for a file of them."""
    if not isinstance(rows, Path):
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        rows = tmp_path / "rows.json"
    out = tmp_path / "new" / "o.json"
    args = eval_wildbench.Args(from_judgments=str(rows), out=str(out), overwrite=True, **flags)
    eval_wildbench.main(args)
    return json.loads(out.read_text())


# --- published values


def test_wb_score_and_length_are_the_published_ones(tmp_path):
    for expected in table(PUBLISHED / "wildbench/expected.csv"):
        path = PUBLISHED / f"wildbench/{expected['model']}.score_v2.jsonl.gz"
        out = score_stored(tmp_path, path, mode="score")
        assert out["wb_score"] == pytest.approx(float(expected["published_WB_score"]), abs=1e-6)
        assert out["length"] == pytest.approx(float(expected["published_Length"]), abs=1e-6)
        assert (out["n"], out["n_empty"]) == (int(expected["rows"]), int(expected["empty_outputs"]))
        assert out["interval"][0] < out["wb_score"] < out["interval"][1]


def test_wb_reward_of_all_published_verdict_counts():
    """With the model on either side; the board keeps rows in its total that it puts under none of the five
    verdicts."""
    choices = {
        "win_much": ("A++", "B++"),
        "win": ("A+", "B+"),
        "tie": ("A=B", "A=B"),
        "lose": ("B+", "A+"),
        "lose_much": ("B++", "A++"),
    }
    published = table(PUBLISHED / "wildbench/pairwise_counts.csv")
    assert len(published) == 312
    for expected in published:
        names = [name for name in choices for _ in range(int(expected[name]))]
        rows = []
        for i in range(int(expected["total"])):
            is_judged = i < len(names)
            name = names[i] if is_judged else "win_much"
            row = {"id": i % 8, "choice": choices[name][i % 2], "model_is": "AB"[i % 2]}
            rows.append(row | {"output_len": 1, "reference_len": 1, "skipped": "" if is_judged else "cut"})
        out = wildbench.score_verdicts(rows, "reward")
        assert out["wb_reward"] == pytest.approx(100 * float(expected["published_reward"]), abs=1e-6)
        assert [out[name] for name in choices] == [int(expected[name]) for name in choices]
        assert out["n_skipped"] == len(rows) - len(names)


def append_values(run: Path, barrier) -> None:
    run.mkdir()
    barrier.wait()
    row = scoring.index_row("b", {"m": 1.0, "n": 3, "n_invalid": 0}, "m", "f")
    scoring.add_to_index(run, [row])


def test_evaluations_that_end_together_write_one_header(tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(4)
    writers = [fork.Process(target=append_values, args=(tmp_path / name, barrier)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(row["run"] for row in table(tmp_path / "runs.csv")) == list("abcd")


# --- rules by hand


def test_unreadable_verdicts_are_counted_and_only_the_paper_s_rule_scores_them(tmp_path, exits):
    common = {"model_is": "A", "output_len": 5, "reference_len": 5}
    choices = ["A++", "A+", " A+", ["A+"]]
    pairs = [{"id": i, "choice": choice} | common for i, choice in enumerate(choices)]
    out = wildbench.score_verdicts(pairs, "reward")
    assert (out["wb_reward"], out["n"], out["n_invalid"], out["n_tasks"]) == (75, 4, 2, 2)
    out = wildbench.score_verdicts(pairs, "reward", "paper")
    assert (out["wb_reward"], out["n_invalid"]) == (-12.5, 2)

    marks = []
    for i, mark in enumerate(["8", 6, "11", "x", None, True]):
        marks.append({"session_id": f"t{i}", "score": mark, "model_output": "x"})
    told = exits(score_stored, tmp_path, marks, mode="score", reward_model="r")
    assert "--reward-model does nothing" in told
    out = score_stored(tmp_path, marks, mode="score")  # more than 1 % are invalid
    assert (out["wb_score"], out["interval"], out["n_invalid"]) == (None, None, 4)
    assert out["withheld"]["wb_score"] == 40 and len(out["withheld"]["interval"]) == 2
    assert score_stored(tmp_path, marks, mode="score", max_invalid=1)["wb_score"] == 40
    paper = score_stored(tmp_path, marks, mode="score", protocol="paper", max_invalid=1)
    assert paper["wb_score"] == pytest.approx(20 * (18 / 6 - 5))


def test_the_board_skips_empty_and_cut_answers_but_divides_by_all():
    common = {"model_is": "A", "output_len": 5, "reference_len": 5, "primary_tag": "Math"}
    rows = [
        {"id": 1, "choice": "A+"} | common,
        {"id": 2, "choice": "B++"} | common,
        {"id": 3, "choice": None, "skipped": "empty"} | common | {"output_len": 0},
        {"id": 4, "choice": "B++"} | common | {"output_len": 0},  # stored by somebody who asked about it
        {"id": 5, "choice": "A++", "skipped": "cut"} | common,
    ]
    out = wildbench.score_verdicts(rows, "reward")
    assert out["wb_reward"] == pytest.approx(100 * (0.5 - 1) / 5)
    assert (out["n"], out["n_invalid"], out["n_skipped"], out["n_empty"]) == (5, 0, 3, 2)
    assert out["groups"] == {"Math & Data Analysis": pytest.approx(-25)}  # of the two that were compared
    none = {"id": 6, "choice": None, "skipped": "empty"} | common | {"output_len": None}
    for protocol in ("official", "paper"):  # the endpoint gave no answer, so there is none to score
        out = wildbench.score_verdicts(rows, "reward", protocol)
        without = wildbench.score_verdicts([*rows, none], "reward", protocol)
        assert (without["wb_reward"], without["n_empty"]) == (out["wb_reward"], 2)
        assert without["n_invalid"] == out["n_invalid"] + 1
    out = wildbench.score_verdicts(rows, "reward", "paper")  # judges all of them
    assert out["wb_reward"] == pytest.approx(100 * (0.5 - 1 - 1 - 1 + 1) / 5) and out["n_skipped"] == 0
    # a mark of an empty answer counts in the score, but not in the groups
    marks = [row | {"score": mark} for row, mark in zip((rows[0], rows[3]), "91")]
    out = wildbench.score_verdicts(marks, "score")
    assert out["wb_score"] == 0 and out["groups"] == {"Math & Data Analysis": pytest.approx(80)}


def test_a_task_counts_once_in_each_group_of_its_tags():
    """As in the official tool since 58bbf16; its published macro scores follow from the groups'."""
    common = {"output_len": 1, "primary_tag": "Math"}
    rows = [
        {"id": 1, "score": "9", "secondary_tags": ["Data Analysis", "Planning", "Reasoning"]} | common,
        {"id": 2, "score": "5", "secondary_tags": None} | common,
    ]
    out = wildbench.score_verdicts(rows, "score")
    assert out["groups"] == {"Planning & Reasoning": 80, "Math & Data Analysis": 40} and out["macro"] is None
    for row in table(PUBLISHED / "wildbench/published_task_scores.csv"):
        groups = {group: float(row[group]) for group in wildbench.GROUPS}
        assert wildbench.macro_average(groups) == pytest.approx(float(row["WB_score_task_macro"]))


def test_an_interval_draws_the_values_of_a_task_together():
    """Ten tasks, half of them with a mark of 2: Binomial(10, 1/2) has 95 % from 2 to 8, however often a task was
    asked."""
    tasks = list(range(10))
    marks = [2 * (task % 2) for task in tasks]
    assert scoring.mean_interval(marks) == scoring.mean_interval(marks * 4, tasks=tasks * 4) == (0.4, 1.6)
    low, high = scoring.mean_interval(marks * 4)  # as if 40 tasks had been asked
    assert low > 0.6 and high < 1.4
    assert scoring.mean_interval([2, 0, 0, 0], tasks=["a", "b", "b", "b"]) == (0, 2)


def test_a_share_has_wilsons_interval():
    """By its formula; n counts tasks, not answers. Ten right answers of ten do not show that all will be right."""
    assert scoring.mean_interval([1] * 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    half = pytest.approx((0.2366, 0.7634), abs=1e-4)
    right = [0, 1] * 5
    assert scoring.mean_interval(right) == scoring.mean_interval(right * 4, tasks=list(range(10)) * 4) == half
    assert scoring.mean_interval([0.5] * 10, is_share=True) == half


# --- what the judge is shown, and what it says

TASK = {
    "id": "t",
    "messages": [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "w " * 1500 + "{$history}"},
    ],
    "checklist": ["x?", "y?"],
    "references": {"gpt-4": "ref"},
}


def judge_prompt(template: str, protocol: str, mode: str, **candidates: str) -> str:
    fields, _ = wildbench.judge_fields(mode, protocol, TASK, **candidates)
    return fill_messages(template, fields)[0]["content"]


def test_judge_prompt_has_every_part_once_and_cuts_as_the_protocol_says():
    long = " ".join(map(str, range(3000)))
    template = "{$history}|{$user_query}|{$candidate_A}|{$checklist}"
    text = judge_prompt(template, "official", "reward", candidate_A=long)
    history, query, a, checklist = text.split("|")
    assert history == "USER: a b\n\nASSISTANT: c" and checklist == "- x?\n- y?"
    assert a.endswith(" 999... (truncated)") and query.endswith("... (truncated)")
    text = judge_prompt("{$user_query}|{$candidate_A}", "paper", "reward", candidate_A=long)
    assert text.startswith(TASK["messages"][-1]["content"]) and text.endswith(" 1999... (truncated)")
    assert judge_prompt("{$model_output}", "official", "score", model_output=long) == long
    own = judge_prompt(
        wildbench.TEMPLATES["reward"], "official", "reward", candidate_A="AAA", candidate_B="BBB"
    )
    assert "{$" not in own.replace("{$history}", "") and "AAA" in own and "BBB" in own and "- x?" in own


# --- whole runs


def by_length(text: str, n: int) -> str:
    """A judge that prefers the longer answer, or gives a mark by the length."""
    if "# Answer A" in text:
        a, _, b = text.partition("# Answer A")[2].partition("# Answer B")
        difference = len(a.strip()) - len(b.partition("# Points")[0].strip())
        return json.dumps({"choice": ("B+", "A=B", "A+")[1 + np.sign(difference)]})
    answer = text.partition("# The answer")[2].partition("# Points")[0]
    return json.dumps({"score": str(1 + len(answer.strip()) % 10)})


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "tasks.jsonl"
    sizes = toy_world.Args(n_traces=1, n_prompts=1, n_pairs=1, n_tasks=24)
    write_jsonl(path, toy_world.write_files(sizes)["benchmark_tasks"])
    return path


@pytest.fixture
def evaluate(here, tasks):
    """evaluate(*args): the end of the script on the tasks."""
    common = ("--model", "data/toy/base", "--max-tokens", 24, "--temperatures", 1.0, "--tasks", tasks)
    return lambda *args: here("eval_wildbench.py", *common, *args)


def numbers(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())["temperatures"]["1.0"]


def test_without_a_judge_a_reward_model_scores(evaluate, tmp_path):
    words = ["--reward-model", "data/toy/reward_model", "--reward-on", "response"]
    words += ["--think-format", "zero_think", "--limit", 8, "--max-tokens", 160, "--out", tmp_path / "run"]
    assert evaluate(*words).returncode == 0
    rows = [row for row in read_log(tmp_path / "run" / "generations.jsonl") if row["status"] == "ok"]
    model = RewardModel("data/toy/reward_model", "response", "zero_think")
    expected = model.score([row["messages"] for row in rows], [row["text"] for row in rows])
    assert read_rows(tmp_path / "run")["reward"].dropna().tolist() == pytest.approx(expected, abs=1e-4)
    lines = pd.read_csv(tmp_path / "runs.csv").set_index("metric")
    assert lines.loc["mean_reward", "value"] == pytest.approx(np.mean(expected), abs=1e-4)
    assert lines.loc["mean_reward", "n"] == len(rows) > 0
    assert lines.loc["mean_reward", "low"] < np.mean(expected) < lines.loc["mean_reward", "high"]


def test_reward_by_an_http_judge_and_no_call_twice(serve, evaluate, tmp_path):
    server = serve(by_length)
    words = ["--reward-model", "data/toy/reward_model", "--reward-on", "response"]
    words += ["--think-format", "zero_think", "--mode", "reward", "--judge", "longer"]
    words += ["--judge-url", server.url, "--references", "careful", "--limit", 8]
    words += ["--max-tokens", 160, "--out", tmp_path / "run"]
    assert evaluate(*words).returncode == 0
    verdicts = read_log(tmp_path / "run" / "verdicts.jsonl")
    assert len(verdicts) == 16 and {verdict["model_is"] for verdict in verdicts} == {"A", "B"}
    expected = []
    for verdict in verdicts:
        assert bool(verdict["skipped"]) == (0 in (verdict["output_len"], verdict["reference_len"]))
        sign = np.sign(verdict["output_len"] - verdict["reference_len"])
        expected.append(0 if verdict["skipped"] else 0.5 * sign)
    out = numbers(tmp_path / "run")
    assert out["wb_reward"] == pytest.approx(100 * np.mean(expected)) and out["n_invalid"] == 0
    # each answer is judged in both orders
    rewards = [verdict["reward"] for verdict in verdicts if verdict["reward"] is not None]
    assert 0 < len(rewards) < 16 and out["proxy_reward"] == pytest.approx(np.mean(rewards))

    (tmp_path / "run" / "summary.json").unlink()  # as if it had been killed before the end
    elsewhere = serve(by_length)
    words[words.index(server.url)] = elsewhere.url  # the judge runs on another machine by now
    done = evaluate(*words, "--resume")
    assert not elsewhere.requests and numbers(tmp_path / "run") == out
    assert re.search(r"\n +wb_reward .*\n.*next: python page.py \S+/run\n$", done.stdout, re.DOTALL)
    index = table(tmp_path / "runs.csv")
    assert (index[0]["n"], index[0]["judge"], index[1]["n"]) == ("16", "longer", "8")  # verdicts; completions


def test_answers_first_and_then_a_local_judge(evaluate, tmp_path, local_judge_folder):
    """The toy base model says nothing that a judge would say, so every verdict is invalid after its
    attempts."""
    words = ["--limit", 3, "--out", tmp_path / "x", "--mode", "score", "--think-format", "plain"]
    words += ["--judge", f"local:{local_judge_folder}", "--judge-max-tokens", 8]
    evaluate(*words, "--generate-only")
    answers = (tmp_path / "x" / "generations.jsonl").read_text()
    assert len(answers.splitlines()) == 3 and not (tmp_path / "x" / "judge.jsonl").exists()
    done = evaluate(*words, "--resume")
    assert done.returncode == 2 and "none of 3 verdicts can be read" in done.stderr, done.stderr[-3000:]
    assert (tmp_path / "x" / "generations.jsonl").read_text() == answers
    assert len((tmp_path / "x" / "judge.jsonl").read_text().splitlines()) == 12
    assert not (tmp_path / "x" / "summary.json").exists()


# --- a program as the judge


def test_several_answers_are_averaged_by_task():
    scores = [1.0, 0.0, 0.5, None]
    rows = [{"score": score, "checks": {"fine": score == 1}, "invalid": ""} for score in scores]
    numbers = wildbench.score_program(rows, ["a", "a", "b", "b"])
    assert numbers["task_means"]["score"] == {"a": 0.5, "b": 0.5} and numbers["score"] == 0.5
    assert (numbers["n"], numbers["n_tasks"], numbers["n_invalid"]) == (4, 2, 1)
