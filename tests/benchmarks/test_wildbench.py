"""WildBench: published scores from stored verdicts, hand-worked rewards, malformed judge replies, and whole runs with a real
HTTP judge and with a local one."""

import csv
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from rlmt import endpoint
import eval_wildbench
import page
from rlmt import sampler as rollout
from rlmt import chat as templates
from benchmarks.judge_template import fill_messages
from benchmarks import local_judge, scoring, shared, wildbench
from conftest import learn_by_heart, tiny_config
from rlmt import data as rlmt_data

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "wildbench"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def stored(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"the stored verdicts are not at {SHARED}")
    return SHARED / name


@pytest.fixture
def run(here):
    """run(*args): runs the script in this process; `ok=False` accepts that it fails."""

    def start(*args, ok: bool = True) -> subprocess.CompletedProcess:
        done = here("eval_wildbench.py", *args)
        assert not ok or done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done

    return start


# --- published values


def test_wb_score_and_length_are_the_published_ones(tmp_path):
    for expected in csv.DictReader(open(stored("expected.csv"))):
        path = stored(f"{expected['model']}.score_v2.jsonl.gz")
        written = tmp_path / "new" / "out.json"
        eval_wildbench.main(eval_wildbench.Args(from_judgments=str(path), mode="score", out=str(written)))
        out = json.loads(written.read_text())
        assert out["wb_score"] == pytest.approx(float(expected["published_WB_score"]), abs=1e-6)
        assert out["length"] == pytest.approx(float(expected["published_Length"]), abs=1e-6)
        assert (out["n"], out["n_invalid"], out["n_empty"]) == (
            int(expected["rows"]),
            0,
            int(expected["empty_outputs"]),
        )
        assert out["interval"][0] < out["wb_score"] < out["interval"][1]


def test_wb_reward_of_all_published_verdict_counts():
    """The counts are those after the margin, so they are scored as they are, with the model on either side. The board keeps
    rows in its total that it puts under none of the five verdicts (answers that are empty, or that it cut)."""
    seen = 0
    for row in csv.DictReader(open(stored("pairwise_counts.csv"))):
        counts = {name: int(row[name]) for name in ("win_much", "win", "tie", "lose", "lose_much")}
        rest = int(row["total"]) - sum(counts.values())
        pairs = {
            "win_much": ("A++", "B++"),
            "win": ("A+", "B+"),
            "tie": ("A=B", "A=B"),
            "lose": ("B+", "A+"),
            "lose_much": ("B++", "A++"),
        }
        choices = [name for name, n in counts.items() for _ in range(n)] + ["win_much"] * rest
        n_judged = int(row["total"]) - rest
        rows = [
            {
                "id": i % 8,  # the mean is over verdicts; few tasks make the interval cheap
                "choice": pairs[name][i % 2],
                "model_is": "AB"[i % 2],
                "output_len": 1,
                "reference_len": 1,
                "skipped": "cut" if i >= n_judged else "",
            }
            for i, name in enumerate(choices)
        ]
        out = wildbench.score_verdicts(rows, "reward")
        assert out["wb_reward"] == pytest.approx(100 * float(row["published_reward"]), abs=1e-6)
        assert {name: out[name] for name in counts} == counts
        assert out["n"] == int(row["total"]) and out["n_skipped"] == rest
        seen += 1
    assert seen == 312


def test_macro_average_of_all_published_task_scores():
    rows = list(csv.DictReader(open(stored("published_task_scores.csv"))))
    for row in rows:
        macro = wildbench.macro_average({name: float(row[name]) for name in wildbench.GROUPS})
        assert macro == pytest.approx(float(row["WB_score_task_macro"]), abs=1e-6)
    assert len(rows) == 31


# --- rules by hand


@pytest.mark.parametrize(
    "choice, model_is, lengths, margin, value",
    [
        ("A++", "A", (9, 1), 0, 1.0),
        ("A++", "B", (9, 1), 0, -1.0),
        ("B+", "B", (9, 9), -1, 0.5),
        ("A=B", "B", (1, 9), 500, 0.0),
        ("A+", "A", (601, 100), 500, 0.0),  # a slight win, 501 characters longer
        ("A+", "A", (600, 100), 500, 0.5),  # exactly 500 is not more
        ("A+", "B", (100, 601), 500, 0.0),  # a slight loss to a longer reference
        ("A+", "B", (601, 100), 500, -0.5),  # the loser is the longer one
        ("A++", "A", (9000, 1), 500, 1.0),  # much better stays
        ("a+", "A", (1, 1), -1, None),
        (" A+", "A", (1, 1), -1, None),
        ("A", "A", (1, 1), -1, None),
        (None, "A", (1, 1), -1, None),
        ("A+", "C", (1, 1), -1, None),
        (["A+"], "A", (1, 1), -1, None),
    ],
)
def test_reward_of_one_verdict(choice, model_is, lengths, margin, value):
    assert wildbench.pair_value(choice, model_is, *lengths, margin) == value


def test_unreadable_verdicts_are_counted_and_only_the_paper_s_rule_scores_them():
    rows = [
        {"id": i, "choice": c, "model_is": "A", "output_len": 5, "reference_len": 5}
        for i, c in enumerate(["A++", "A+", "?", None])
    ]
    out = wildbench.score_verdicts(rows, "reward")
    assert (
        out["wb_reward"] == 75
        and (out["n"], out["n_invalid"], out["n_tasks"]) == (4, 2, 2)
        and "note" not in out
    )
    out = wildbench.score_verdicts(rows, "reward", "paper")
    assert out["wb_reward"] == -12.5 and out["n_invalid"] == 2 and "worst" in out["note"]
    marks = [{"id": i, "score": s, "output_len": 3} for i, s in enumerate(["8", 6, "11", "x", None, True])]
    out = wildbench.score_verdicts(marks, "score")
    assert out["wb_score"] == 40 and out["n_invalid"] == 4
    assert wildbench.score_verdicts(marks, "score", "paper")["wb_score"] == pytest.approx(20 * (18 / 6 - 5))
    with pytest.raises(ValueError, match="none of 1"):
        wildbench.score_verdicts(marks[3:4], "score")


def test_both_orders_flip_rate_references_and_groups():
    """Task 1 wins in both orders; task 2 wins as A and loses as B; two references are averaged."""
    row = lambda i, choice, side, ref, tag: {
        "id": i,
        "choice": choice,
        "model_is": side,
        "output_len": 2,
        "reference_len": 2,
        "reference": ref,
        "primary_tag": tag,
        "secondary_tags": ["Reasoning"],
    }
    rows = [
        row(1, "A+", "A", "x", "Planning"),
        row(1, "B+", "B", "x", "Planning"),
        row(2, "A++", "A", "x", "Math"),
        row(2, "A+", "B", "x", "Math"),
        row(1, "A=B", "A", "y", "Planning"),
        row(2, "B++", "A", "y", "Math"),
    ]
    out = wildbench.score_verdicts(rows, "reward")
    assert (
        out["flip_rate"] == 0.5 and out["references"] == {"x": 37.5, "y": -50.0} and out["wb_reward"] == -6.25
    )
    one, two = (0.5 + 0.5 + 0) / 3, (1 - 0.5 - 1) / 3
    assert out["groups"]["Planning & Reasoning"] == pytest.approx(
        100 * (one + one + two) / 3
    )  # a task counts for each tag
    assert out["groups"]["Math & Data Analysis"] == pytest.approx(100 * two) and out["macro"] is None


def test_the_board_skips_empty_and_cut_answers_but_divides_by_all():
    """The model wins once and loses once much; it is empty twice, and cut once, where the judge preferred it."""
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
    assert (out["win_much"], out["win"], out["tie"], out["lose"], out["lose_much"]) == (0, 1, 0, 0, 1)
    assert out["groups"] == {"Math & Data Analysis": pytest.approx(-25)}  # of the two that were compared
    assert out["task_means"]["wb_reward"] == {1: 50, 2: -100, 3: 0, 4: 0, 5: 0}
    out = wildbench.score_verdicts(rows, "reward", "paper")  # judges all of them
    assert out["wb_reward"] == pytest.approx(100 * (0.5 - 1 - 1 - 1 + 1) / 5) and out["n_skipped"] == 0

    # a mark of an empty answer counts in the score, but not in the groups
    marks = [
        {"id": 1, "score": "9", "output_len": 5, "primary_tag": "Math"},
        {"id": 2, "score": "1", "output_len": 0, "primary_tag": "Math"},
    ]
    out = wildbench.score_verdicts(marks, "score")
    assert out["wb_score"] == 0 and out["groups"] == {"Math & Data Analysis": pytest.approx(80)}
    assert wildbench.score_verdicts(marks, "score", "paper")["groups"]["Math & Data Analysis"] == 0


@pytest.mark.parametrize(
    "mode, protocol, answer, skipped",
    [
        ("reward", "official", "w " * 999 + "w", ""),
        ("reward", "official", "w " * 1000 + "w", "cut"),
        ("reward", "official", "", "empty"),
        ("reward", "paper", "", ""),
        ("reward", "paper", "w " * 3000, ""),
        ("score", "official", "w " * 3000, ""),
        ("score", "official", "", "empty"),
    ],
)
def test_only_pairs_that_the_board_skips_are_not_judged(mode, protocol, answer, skipped):
    args = eval_wildbench.Args(mode=mode, protocol=protocol)
    verdicts = wildbench.list_verdicts(args, [TASK], {"t": answer})
    assert [verdict["skipped"] for verdict in verdicts] == [skipped] * len(verdicts)
    asked = [wildbench.needs_judge(verdict, mode) for verdict in verdicts]
    assert asked == [mode == "score" or not skipped] * len(verdicts)


def test_stored_rows_of_the_official_tool(tmp_path, capsys):
    """Pairs with the texts of two models by name, and marks whose text is a list."""
    empty = wildbench.OFFICIAL_EMPTY

    def pair(session_id: str, choice: str, sides: tuple[str, str], text: str) -> dict:
        outputs = {"ours": text, "org/gpt-4-turbo": "1234"}
        named = {"model_A": sides[0], "model_B": sides[1], "model_outputs": outputs}
        return {
            "session_id": session_id,
            "parsed_result": {"choice": choice},
            "winner": "?",
            "extent": 1,
        } | named

    rows = [
        pair("a", "A+", ("ours", "org/gpt-4-turbo"), "123456"),
        pair("b", "A++", ("org/gpt-4-turbo", "ours"), "12"),
        pair("c", "A++", ("org/gpt-4-turbo", "ours"), empty),
        pair("d", "A++", ("ours", "org/gpt-4-turbo"), "1" + scoring.CUT_MARK),
    ]
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(rows))
    args = eval_wildbench.Args(from_judgments=str(file), mode="reward", out=str(tmp_path / "out.json"))
    args.references = ("gpt-4",)
    eval_wildbench.main(args)
    out = json.loads((tmp_path / "out.json").read_text())
    assert (out["wb_reward"], out["win"], out["lose_much"]) == (100 * (0.5 - 1) / 4, 1, 1)
    assert (out["n"], out["n_skipped"], out["n_empty"], out["n_invalid"]) == (4, 2, 1, 0)
    args.references = ("claude",)
    with pytest.raises(SystemExit):
        eval_wildbench.main(args)
    assert "--references claude must name one of the two models" in capsys.readouterr().err

    marks = [
        {"session_id": "a", "parsed_result": {"score": "9"}, "model_output": ["text"]},
        {"session_id": "b", "score": "1", "model_output": ""},
    ]
    file.write_text(json.dumps(marks))
    args = eval_wildbench.Args(from_judgments=str(file), mode="score", out=str(tmp_path / "out.json"))
    eval_wildbench.main(args)
    out = json.loads((tmp_path / "out.json").read_text())
    assert (out["wb_score"], out["length"], out["n_empty"]) == (0, 4, 1)


def stored_args(tmp_path: Path, rows: list[dict], **flags) -> eval_wildbench.Args:
    """The arguments that score stored rows into o.json."""
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    return eval_wildbench.Args(from_judgments=str(file), out=str(tmp_path / "o.json"), **flags)


def test_verdicts_of_two_models_are_not_one_score(tmp_path, exits):
    marks = [{"session_id": f"t{i}", "score": "9", "model_output": "x"} for i in range(4)]
    said = exits(
        eval_wildbench.main, stored_args(tmp_path, [*marks, marks[2] | {"score": "2"}], mode="score")
    )
    assert "rows.json:5: session_id 't2' has a verdict in row 3 already" in said
    named = [marks[0] | {"model": "a"}, marks[1] | {"model": "b"}]
    said = exits(eval_wildbench.main, stored_args(tmp_path, named, mode="score"))
    assert "rows of several models (a, b)" in said

    pair = {"session_id": "t", "choice": "A+", "output_len": 1, "reference_len": 1}
    both = [pair | {"model_is": side, "reference": name} for side in "AB" for name in ("gpt-4", "haiku")]
    eval_wildbench.main(stored_args(tmp_path, both, mode="reward"))  # both orders, and two references
    assert json.loads((tmp_path / "o.json").read_text())["n"] == 4
    said = exits(eval_wildbench.main, stored_args(tmp_path, [*both, both[1]], mode="reward"))
    assert "rows.json:5: session_id 't' has a verdict in row 2 already" in said

    official = []
    for model in ("ours", "theirs"):
        outputs = {model: "12", "org/gpt-4": "1234"}
        official.append({"session_id": model, "parsed_result": {"choice": "A+"}, "model_outputs": outputs})
    said = exits(eval_wildbench.main, stored_args(tmp_path, official, mode="reward", references=("gpt-4",)))
    assert "rows of several models (ours, theirs)" in said


def test_stored_verdicts_have_no_headline_either_if_too_many_are_invalid(tmp_path):
    rows = [{"session_id": f"t{i}", "score": "9" if i < 5 else "?", "model_output": "x"} for i in range(10)]
    eval_wildbench.main(stored_args(tmp_path, rows, mode="score"))
    out = json.loads((tmp_path / "o.json").read_text())
    assert (out["n"], out["n_invalid"], out["wb_score"], out["withheld"]) == (10, 5, None, 80)
    eval_wildbench.main(stored_args(tmp_path, rows, mode="score", max_invalid=0.5))
    assert json.loads((tmp_path / "o.json").read_text())["wb_score"] == 80


def test_a_score_of_pairs_that_were_not_judged_says_so(tmp_path, capsys):
    """Each is worth 0, so a model that never gives an answer would pass for one as good as the reference."""
    common = {"model_is": "A", "reference_len": 5, "choice": None, "output_len": 0}
    rows = [common | {"session_id": f"t{i}"} for i in range(99)]
    judged = common | {"session_id": "judged", "choice": "A++", "output_len": 5}
    eval_wildbench.main(stored_args(tmp_path, [*rows, judged], mode="reward"))
    assert "WARNING: 99 of 100 pairs were not judged" in capsys.readouterr().err
    numbers = json.loads((tmp_path / "o.json").read_text())
    assert numbers["wb_reward"] == 1
    line = eval_wildbench.headline(numbers)
    assert line.startswith("wb_reward 1 (95 %") and line.endswith("n 100  invalid 0  skipped 99")

    few = [judged | {"session_id": f"j{i}"} for i in range(99)]
    eval_wildbench.main(stored_args(tmp_path, [*few, rows[0]], mode="reward"))
    assert "WARNING" not in capsys.readouterr().err  # 1 % is not more than 1 %


def test_bootstrap_draws_the_values_of_a_task_together():
    """Ten tasks, half of them always right: as many right as of ten coins, whether a task was asked once or by four seeds.

    Binomial(10, 1/2) has 1.1 % at 1 or below and 5.5 % at 2 or below, so 95 % go from 2 to 8 of ten."""
    tasks = list(range(10))
    right = [task % 2 for task in tasks]
    assert scoring.bootstrap(right) == (0.2, 0.8)
    assert scoring.bootstrap(right * 4, tasks=tasks * 4) == (0.2, 0.8)
    low, high = scoring.bootstrap(right * 4)  # as if 40 tasks had been asked
    assert low > 0.3 and high < 0.7

    # several seeds: each task is averaged over them first
    two_seeds = np.random.default_rng(0).random((2, 10))
    together = scoring.bootstrap([*two_seeds[0], *two_seeds[1]], tasks=tasks * 2)
    assert together == pytest.approx(scoring.bootstrap(two_seeds.mean(axis=0)))
    assert scoring.bootstrap([1, 0, 0, 0], tasks=["a", "b", "b", "b"]) == (0, 1)


def test_program_summary_counts_invalid_and_never_scores_it():
    rows = []
    for task, score in {"t1": 1.0, "t2": 0.5, "t3": None, "t4": 0.0}.items():
        checks = {} if score is None else {"a": score > 0.5, "b": True}
        rows.append({"id": task, "score": score, "checks": checks, "invalid": ""})
    out = wildbench.score_program(rows)
    assert out["score"] == 0.5 and out["n"] == 4 and out["n_invalid"] == 1
    assert out["task_means"] == {"score": {"t1": 1.0, "t2": 0.5, "t4": 0.0}}
    assert out["all_checks"] == pytest.approx(1 / 3) and out["checks"] == {
        "a": pytest.approx(1 / 3),
        "b": 1.0,
    }


def test_whatever_a_judge_program_does_is_one_invalid_row():
    """It raises any exception, has other checks than before, or checks that are a list."""
    results = {
        "good": {"score": 1, "checks": {"a": np.True_}},  # JSON has no np.True_
        "other checks": {"score": 1, "checks": {"b": True}},
        "list": {"score": 1, "checks": ["a"]},
        "bad": {"score": 0, "checks": {"a": False}},
    }

    def judge(messages: list[dict], response: str) -> dict:
        assert response, "no response"
        return results[response]

    rows = [{"id": text, "messages": [], "response": text, "status": "ok"} for text in ("", *results)]
    verdicts = wildbench.judge_by_program(judge, rows)
    assert [verdict["score"] for verdict in verdicts] == [None, 1, None, None, 0]
    assert verdicts[0]["invalid"].startswith("AssertionError: no response")
    assert verdicts[2]["invalid"] == "ValueError: its checks are ['b'], those of the first row ['a']"
    out = wildbench.score_program(json.loads(json.dumps(verdicts)))
    assert (out["score"], out["n_invalid"], out["checks"]) == (0.5, 3, {"a": 0.5})


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
    fields = wildbench.judge_fields(TASK, protocol, mode, **candidates)
    return fill_messages(template, fields)[0]["content"]


def test_judge_prompt_has_every_part_once_and_cuts_as_the_protocol_says():
    long = " ".join(map(str, range(3000)))
    text = judge_prompt(
        "{$history}|{$user_query}|{$candidate_A}|{$candidate_B}|{$checklist}",
        "official",
        "reward",
        candidate_A=long,
        candidate_B="{$candidate_A} {x}",
    )
    history, query, a, b, checklist = text.split("|")
    assert history == "USER: a b\n\nASSISTANT: c" and b == "{$candidate_A} {x}" and checklist == "- x?\n- y?"
    assert a == " ".join(map(str, range(1000))) + "... (truncated)" and query.endswith("... (truncated)")
    text = judge_prompt("{$user_query}|{$candidate_A}", "paper", "reward", candidate_A=long)
    assert text.startswith(TASK["messages"][-1]["content"]) and text.endswith(" 1999... (truncated)")
    assert judge_prompt("{$model_output}", "official", "score", model_output=long) == long
    for mode, fields in (
        ("reward", {"candidate_A": "AAA", "candidate_B": "BBB"}),
        ("score", {"model_output": "AAA"}),
    ):
        text = judge_prompt(wildbench.TEMPLATES[mode], "official", mode, **fields)
        assert (
            "{$" not in text.replace("{$history}", "")
            and all(v in text for v in fields.values())
            and "- x?" in text
        )


@pytest.mark.parametrize(
    "text, value",
    [
        ('{"choice": "A+"}', "A+"),
        ('```json\n{"reason": "a {b}", "choice": "B++"}\n```', "B++"),
        ('I say: {"choice": "A=B"} ok', "A=B"),
        ('{"reason": "he said \\"no\\"", "choice": "A++",}', "A++"),
        ('{"reason": "unclosed, "choice": "B+"', "B+"),
        ('{"reason": "line\nbreak", "choice": "A+"}', "A+"),
    ],
)
def test_readable_choices(text, value):
    assert wildbench.read_verdict(text, "reward") == value


def malformed(n: int) -> list[str]:
    """Judge replies of which none holds exactly one valid choice: cut, mixed up, wrong types, prose, other alphabets."""
    rng, out = random.Random(0), []
    bad = [
        "",
        "A",
        "a+",
        "A+ ",
        "A+++",
        "A>B",
        "tie",
        "7",
        "null",
        "A+/B+",
        "Ａ＋",
        "A=B=A",
        "better",
        "++A",
        "[A+]",
    ]
    for _ in range(n):
        value, junk = rng.choice(bad), "x" * rng.randint(0, 300)
        out.append(
            rng.choice(
                [
                    "",
                    value,
                    f"The choice is {value}.",
                    json.dumps({"choice": value}),
                    json.dumps({"Choice": "A+"}),
                    junk + value,
                    json.dumps({"choice": ["A+"]}),
                    json.dumps({"choice": {"a": "A+"}}),
                    json.dumps({"choice": rng.choice([0.5, None, True])}),
                    json.dumps([value, "A+"]),
                    '{"choice": "A+", "choice": "B+"}',
                    json.dumps({"verdict": "A++", "reason": value}),
                    '{"choice": ',
                    '{"choice": "A',
                    '{"reason": "' + junk,
                    "{" * rng.randint(1, 50) + "}" * rng.randint(0, 50),
                    '{"a": "choice: A+"',
                    f'"choice": "A+" or "choice": "B+" {value}',
                    "\x00" + value,
                    f"<choice>A+</choice>{value}",
                    json.dumps({"choice": "A+"}).replace('"', "'"),
                    json.dumps({"reason": junk, "choice": value}),
                ]
            )
        )
    return out


def test_no_malformed_reply_becomes_a_score():
    texts = malformed(900)
    assert len(set(texts)) > 200
    for text in texts:
        with pytest.raises(ValueError):
            wildbench.read_verdict(text, "reward")
        if "7" not in text:  # a mark
            with pytest.raises(ValueError):
                wildbench.read_verdict(text.replace("choice", "score"), "score")


# --- whole runs


def by_length(text: str, n: int) -> str:
    """A judge that prefers the longer answer, or gives a mark by the length."""
    if "# Answer A" in text:
        a, _, b = text.partition("# Answer A")[2].partition("# Answer B")
        b = b.partition("# Points")[0]
        difference = len(a.strip()) - len(b.strip())
        choice = "A=B"
        if difference:
            choice = "A+" if difference > 0 else "B+"
        return json.dumps({"choice": choice})
    answer = text.partition("# The answer")[2].partition("# Points")[0]
    return json.dumps({"score": str(1 + len(answer.strip()) % 10)})


@pytest.fixture
def server(serve):  # noqa: F811
    return serve(by_length)


@pytest.fixture
def judge_url(server) -> str:
    return server.url


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    sizes = ("--n-traces", "1", "--n-prompts", "1", "--n-pairs", "1", "--n-tasks", "24")
    command = [sys.executable, "-m", "data.toy.world", "--out", folder, *sizes]
    subprocess.run(command, cwd=ROOT, env=ENV, check=True, capture_output=True)
    return folder / "benchmark_tasks.jsonl"


MODEL = ("--model", "data/toy/base", "--max-tokens", 24, "--temperatures", 1.0)
TOY_JUDGE = ("--judge", "data/toy/world.py:judge")
PROGRAM = ("--mode", "program", *TOY_JUDGE)


def numbers(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())["temperatures"]["1.0"]


def test_reward_by_an_http_judge_and_no_call_twice(tasks, server, judge_url, run, tmp_path):
    args = [
        *MODEL,
        "--tasks",
        tasks,
        "--mode",
        "reward",
        "--judge",
        "longer",
        "--judge-url",
        judge_url,
        "--references",
        "careful",
    ]
    run(*args, "--out", tmp_path / "run")
    verdicts = rlmt_data.read_log(tmp_path / "run" / "verdicts.jsonl")
    assert (
        len(verdicts) == 48 and {v["model_is"] for v in verdicts} == {"A", "B"} and len(server.requests) <= 48
    )
    out = numbers(tmp_path / "run")
    expected = [0 if v["skipped"] else 0.5 * np.sign(v["output_len"] - v["reference_len"]) for v in verdicts]
    assert [bool(v["skipped"]) for v in verdicts] == [
        0 in (v["output_len"], v["reference_len"]) for v in verdicts
    ]
    assert (
        out["wb_reward"] == pytest.approx(100 * np.mean(expected))
        and out["n_invalid"] == 0
        and out["flip_rate"] == 0
    )
    before = len(server.requests)
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been killed before the end
    run(*args, "--out", tmp_path / "run", "--resume")
    assert len(server.requests) == before and numbers(tmp_path / "run")["wb_reward"] == out["wb_reward"]
    assert len(server.checks) == 2 and {request["max_tokens"] for request, _ in server.checks} == {1}
    run(*args, "--out", tmp_path / "run", "--resume")
    assert len(server.checks) == 2  # a complete run asks nothing
    index = (tmp_path / "runs.csv").read_text().splitlines()
    assert len(index) == 1 + 2 * 4 and "fingerprint" in index[0]  # four lines of each of the two ends
    judged, described = list(csv.DictReader(index))[:2]
    assert (judged["n"], judged["n_invalid"], described["n"]) == ("48", "0.0", "24")  # verdicts; completions


def test_the_rewards_of_a_reward_model_are_kept_with_every_verdict(tasks, judge_url, run, tmp_path):
    model = (
        "--model",
        "data/toy/base",
        "--think-format",
        "zero_think",
        "--max-tokens",
        160,
        "--temperatures",
        1.0,
    )
    proxy = (
        "--reward-model",
        "data/toy/reward_model",
        "--reward-on",
        "response",
        "--tasks",
        tasks,
        "--limit",
        8,
    )
    judges = {
        "program": TOY_JUDGE,
        "score": ("--judge", "m", "--judge-url", judge_url),
        "reward": ("--judge", "m", "--judge-url", judge_url, "--references", "careful"),
    }
    rewards = {}
    for mode, judge in judges.items():
        out = tmp_path / mode
        run(*model, *proxy, "--mode", mode, *judge, "--out", out)
        verdicts = rlmt_data.read_log(out / "verdicts.jsonl")
        rewards[mode] = sorted(
            (verdict["id"], verdict["reward"]) for verdict in verdicts if "reward" in verdict
        )

        answers = page.read_rows(out)
        in_good_format = answers["status"] == "ok"
        assert 0 < in_good_format.sum() < 8 and (answers["reward"].notna() == in_good_format).all()
        assert answers["reward"].mean() == pytest.approx(numbers(out)["proxy_reward"])
    assert rewards["score"] == rewards["program"]  # the same answers, by the same seed
    assert rewards["reward"] == sorted(2 * rewards["program"])  # each answer in both orders


def test_invalid_verdicts_refuse_the_headline(tasks, server, judge_url, run, tmp_path):
    server.behave = lambda text, n: "I cannot say."
    args = [
        *MODEL,
        "--tasks",
        tasks,
        "--limit",
        8,
        "--mode",
        "score",
        "--judge",
        "m",
        "--judge-url",
        judge_url,
    ]
    done = run(*args, "--out", tmp_path / "none", ok=False)
    assert done.returncode == 2 and "none of 8 verdicts can be read" in done.stderr
    # each was asked four times; the fifth is prose too, the next is not
    server.behave = lambda text, n: by_length(text, n) if n > 4 else "I cannot say."
    run(*args, "--out", tmp_path / "half")
    assert numbers(tmp_path / "half")["n_invalid"] == 0 and len(server.requests) > 32
    stored = rlmt_data.read_log(tmp_path / "half" / "verdicts.jsonl")
    next(row for row in stored if row["score"] is not None)["score"] = "?"
    for row in stored:
        row |= {"session_id": row["id"], "model_output": "x" * row["output_len"]}
    (tmp_path / "v.jsonl").write_text("".join(json.dumps(r) + "\n" for r in stored))
    run("--from-judgments", tmp_path / "v.jsonl", "--mode", "score", "--out", tmp_path / "o.json")
    assert (
        json.loads((tmp_path / "o.json").read_text())["n_invalid"]
        == 1 + numbers(tmp_path / "half")["n_invalid"]
    )


def test_what_was_judged_otherwise_is_not_compared(tasks, run, tmp_path):
    program = "def judge(messages, response):\n    return {'score': 1.0, 'checks': {'a': True}}\n"
    (tmp_path / "other.py").write_text(program)
    for name, judge in (
        ("a", "data/toy/world.py:judge"),
        ("b", "data/toy/world.py:judge"),
        ("c", f"{tmp_path / 'other.py'}:judge"),
    ):
        run(*MODEL, "--tasks", tasks, "--judge", judge, "--limit", 4, "--out", tmp_path / name)
    assert "WARNING" not in run("--compare", tmp_path / "a", tmp_path / "b").stdout
    budget = ("--think-format", "think", "--max-thinking-tokens", 4)
    run(*MODEL, *budget, "--tasks", tasks, "--judge", TOY_JUDGE[1], "--limit", 4, "--out", tmp_path / "d")
    done = run("--compare", tmp_path / "a", tmp_path / "d")
    assert done.stdout.count("max-tokens 24  max-thinking-tokens 4") == 1 and "WARNING" in done.stderr
    done = run("--compare", tmp_path / "a", tmp_path / "c", ok=False)
    assert done.returncode == 2 and not done.stdout and "judge" in done.stderr.partition("Different:")[2]


def test_a_reply_of_brackets_is_invalid_and_ends_nothing(tmp_path):
    """json gives up on them with a RecursionError; the replies are those of an earlier start."""
    judge, request = (
        str(ROOT / "data/toy/reward_model"),
        {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 9},
    )
    key = hashlib.sha256(json.dumps([judge, request], sort_keys=True).encode()).hexdigest()
    stored = [{"key": key, "attempt": n, "text": "[" * 3000} for n in range(4)]
    (tmp_path / "judge.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stored))
    reply = local_judge.ask(
        judge, [request], lambda text: wildbench.read_verdict(text, "reward"), tmp_path / "judge.jsonl", "hf"
    )[0]
    assert reply.value is None and reply.error == "0 values for 'choice'"


def test_two_tasks_of_one_id_are_refused(tasks, run, tmp_path):
    (tmp_path / "twice.jsonl").write_text(tasks.read_text() * 2)
    done = run(*MODEL, *TOY_JUDGE, "--tasks", tmp_path / "twice.jsonl", "--dry-run", ok=False)
    assert done.returncode == 2 and "two tasks have the same id" in done.stderr


def test_a_local_judge_needs_no_key(tasks, run, tmp_path, local_judge_folder):
    """The toy base model says nothing that a judge would say, so every verdict is invalid after its attempts."""
    words = [*MODEL, "--tasks", tasks, "--limit", 3, "--out", tmp_path / "x"]
    words += ["--mode", "score", "--judge", f"local:{local_judge_folder}", "--judge-max-tokens", 8]
    done = run(*words, ok=False)
    assert done.returncode == 2 and "none of 3 verdicts can be read" in done.stderr, done.stderr[-3000:]
    path = tmp_path / "x" / "judge.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    replies = [json.loads(line) for line in lines]
    assert len(replies) == 12 and {r["attempt"] for r in replies} == {0, 1, 2, 3}

    path.write_text("".join(lines[:4]))  # killed in the second attempt, which is sampled
    run(*words, "--resume", ok=False)
    assert path.read_text() == "".join(lines)


def test_a_dead_engine_ends_the_run_and_one_engine_finishes_it(tasks, run, tmp_path, forked_engines):
    """Two engines share the tasks until one is killed. The greedy answers are those of transformers in the end."""
    rows = rlmt_data.read_log(tasks)
    many = [{**row, "id": f"{row['id']}-{copy}"} for copy in range(6) for row in rows]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in many))
    common = ["--model", "data/toy/base", "--temperatures", 0.0]
    common += ["--judge", "data/toy/world.py:judge", "--max-tokens", 200]
    by_vllm = [*common, "--tasks", tmp_path / "tasks.jsonl", "--rollout", "vllm", "--out", tmp_path / "vllm"]

    generations = tmp_path / "vllm" / "generations.jsonl"
    engines = []
    killed = []
    ended = threading.Event()

    def kill_an_engine() -> None:
        while not generations.exists():
            if ended.wait(0.02):
                return
        engines.extend(multiprocessing.active_children())
        killed.append(time.monotonic())
        engines[0].kill()

    killer = threading.Thread(target=kill_an_engine)
    killer.start()
    try:
        with pytest.raises(RuntimeError, match="vLLM's engine process died"):
            run(*by_vllm, "--data-parallel", 2)
    finally:
        ended.set()
        killer.join()
    assert time.monotonic() - killed[0] < 15 and len(engines) == 2
    assert multiprocessing.active_children() == []  # the other one has ended too

    kept = generations.read_text()
    assert 0 < kept.count("\n") < len(many)
    run(*by_vllm, "--data-parallel", 1, "--resume")
    assert generations.read_text().startswith(kept)
    assert multiprocessing.active_children() == []  # the engine has ended
    # each task once, as all its copies have the same answer
    run(*common, "--tasks", tasks, "--rollout", "hf", "--out", tmp_path / "hf")
    said = {row["id"]: row["text"] for row in rlmt_data.read_log(tmp_path / "hf" / "generations.jsonl")}
    expected = {row["id"]: said[row["id"].rpartition("-")[0]] for row in many}
    found = rlmt_data.read_log(generations)
    assert len(found) == len(many) and {row["id"]: row["text"] for row in found} == expected


@pytest.fixture
def judge_by_heart(tasks, tokenizer_folders, run, tmp_path) -> tuple[Path, dict[str, str]]:
    """Trains a judge until it knows its replies to the first four answers by heart; one of them holds no mark.

    Returns its folder, which holds its template too, and the replies by the tasks' ids.
    """
    folder = tmp_path / "judge"
    folder.mkdir()
    template = "Mark this: {$user_query} {$model_output}"
    (folder / "template.txt").write_text(template)
    tokenizer = local_judge.load_judge_tokenizer(str(tokenizer_folders["smollm"]))
    answering = ["--model", "data/toy/base", "--max-tokens", 24, "--temperatures", 0.0, "--rollout", "hf"]
    run(*answering, *TOY_JUDGE, "--tasks", tasks, "--limit", 4, "--out", tmp_path / "answers")
    rows = rlmt_data.read_log(tmp_path / "answers" / "generations.jsonl")
    rows.sort(key=lambda row: row["id"])
    replies = {}
    encoded = []
    for mark, row in enumerate(rows, 1):
        reply = "it is good" if mark == 4 else json.dumps({"score": str(mark)})
        query = row["messages"][-1]["content"]
        text = template.replace("{$user_query}", query).replace("{$model_output}", shared.answer(row))
        message = {"role": "user", "content": text}
        prompt_ids = templates.encode_prompt(tokenizer, [message])
        completion_ids = templates.encode_completion(tokenizer, reply)
        encoded.append((prompt_ids + completion_ids, len(prompt_ids)))
        replies[row["id"]] = reply

    torch.manual_seed(0)
    # vLLM's attention on a CPU wants heads of 32
    model = LlamaForCausalLM(tiny_config(tokenizer, hidden_size=64, initializer_range=0.05))
    assert learn_by_heart(model, encoded, tokenizer.pad_token_id, rate=3e-3, goal=0.003) < 0.003
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, replies


def test_a_local_judge_on_two_engines_judges_as_transformers_does(
    tasks, judge_by_heart, run, tmp_path, forked_engines
):
    """Two engines answer, then two of the judge mark what they said; once: each attempt would start its engines anew."""
    judge, replies = judge_by_heart
    common = ["--model", "data/toy/base", "--max-tokens", 24, "--temperatures", 0.0]
    common += ["--tasks", tasks, "--limit", 4, "--mode", "score", "--judge", f"local:{judge}"]
    common += ["--template", judge / "template.txt", "--judge-max-tokens", 20, "--max-invalid", 1]
    common += ["--protocol", "paper"]
    done = run(*common, "--rollout", "vllm", "--data-parallel", 2, "--out", tmp_path / "vllm")
    assert done.stdout.count("vLLM: 2 engines: ") == 2
    assert multiprocessing.active_children() == []  # all engines have ended
    run(*common, "--rollout", "hf", "--out", tmp_path / "hf")

    stored = {}
    for name in ("generations", "verdicts", "judge"):
        for by in ("vllm", "hf"):
            lines = (tmp_path / by / f"{name}.jsonl").read_text().splitlines()
            stored[name, by] = sorted(lines)  # completions end in any order
        assert stored[name, "vllm"] == stored[name, "hf"], name
    assert sorted(json.loads(line)["text"] for line in stored["judge", "vllm"]) == sorted(replies.values())
    for verdict in map(json.loads, stored["verdicts", "vllm"]):
        reply = replies[verdict["id"]]
        if reply == "it is good":
            assert verdict["score"] is None and verdict["invalid"]
        else:
            assert json.loads(reply) == {"score": verdict["score"]}

    summaries = [json.loads((tmp_path / by / "summary.json").read_text()) for by in ("vllm", "hf")]
    found, expected = [summary["temperatures"]["0.0"] for summary in summaries]
    assert found == expected
    # marks 1, 2, 3, and 1 for the reply without one: their mean is 7 / 4
    assert (found["wb_score"], found["n"], found["n_invalid"]) == (pytest.approx(-65), 4, 1)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--from-judgments", "nowhere.jsonl", "--mode", "score", "--out", "x.json"], "no such file"),
        (["--from-judgments", "README.md"], "needs --mode score or reward"),
        (["--mode", "reward", "--judge", "data/toy/world.py:judge", *MODEL], "is a program"),
        (
            ["--mode", "reward", "--judge", "m", "--judge-url", "http://localhost:1/v1", *MODEL],
            "has no reference 'gpt-4'",
        ),
        (["--compare", "nowhere"], "does not exist"),
        ([], "--model is missing: "),
        (
            ["--mode", "program", *TOY_JUDGE, "--rollout", "hf", "--data-parallel", 2, *MODEL],
            "only vLLM has several",
        ),
        (
            ["--mode", "program", *TOY_JUDGE, "--rollout", "vllm", "--tensor-parallel", 3, *MODEL],
            "the 4 attention heads",
        ),
        (
            [
                "--judge",
                "local:data/toy/reward_model",
                "--judge-tensor-parallel",
                2,
                "--mode",
                "score",
                *MODEL,
            ],
            "only vLLM",
        ),
    ],
)
def test_bad_input(args, message, tasks, run):
    done = run(*args, *(["--tasks", tasks] if "--mode" in args else []), ok=False)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_template_with_a_placeholder_of_another_mode_is_refused(tasks, run, tmp_path, judge_url):
    (tmp_path / "template.txt").write_text("{$history} {$user_query} {$model_output}")
    args = (*MODEL, "--tasks", tasks, "--references", "careful", "--dry-run")
    args += ("--judge", "m", "--judge-url", judge_url)
    template = ("--template", tmp_path / "template.txt")
    run(*args, "--mode", "score", *template)
    done = run(*args, "--mode", "reward", *template, ok=False)
    assert done.returncode == 2 and "cannot fill {$model_output}" in done.stderr


# --- everything is checked before it costs

LOCAL = ("--limit", 4, "--mode", "score", *MODEL)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--judge", "local:data/toy/reward_modle"), "data/toy/reward_modle is neither a model folder"),
        (("--judge", "local:"), "--judge local: names no model"),
        (("--judge", "local:data"), "data is neither a model folder"),
        (("--judge", "gpt-4o"), "set OPENAI_API_KEY"),
        (
            ("--judge", "m", "--judge-url", "http://127.0.0.1:1/v1"),
            "--judge m: http://127.0.0.1:1/v1 gives no",
        ),
        (
            ("--judge", "m", "--judge-url", "http://127.0.0.1:1/v1", "--key-env", "h=NOT_SET"),
            "--key-env, word 1",
        ),
        (("--judge", "m", "--judge-url", "http://127.0.0.1:1/v1", "--template", "none.txt"), "none.txt"),
        (
            ("--judge", "m", "--judge-url", "http://127.0.0.1:1/v1", "--model", "data/toy"),
            "data/toy is neither",
        ),
        (("--judge", "local:data/toy/base"), "--judge local:data/toy/base has no chat template"),
        (("--judge", "local:data/toy/reward_model"), "its config names LlamaForSequenceClassification"),
        ((*PROGRAM, "--model", "data/toy/reward_model"), "its config names LlamaForSequenceClassification"),
        ((*PROGRAM, "--reward-model", "data/toy/base"), "its config names LlamaForCausalLM"),
        (("--judge", "m", "--mode", "program"), "use --mode reward or --mode score"),
    ],
)
def test_what_would_fail_after_generating_is_refused_before(
    words, message, tasks, run, tmp_path, monkeypatch
):
    """By a run and by its dry run; nothing is generated."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "NOT_SET"):
        monkeypatch.delenv(name, raising=False)
    began = time.monotonic()
    for mode in ((), ("--dry-run",)):
        out = tmp_path / f"run{len(mode)}"
        done = run(*LOCAL, "--tasks", tasks, *words, "--out", out, *mode, ok=False)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert not out.exists()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "part", ["model.safetensors", "half of the weights", "config.json", "tokenizer.json"]
)
def test_a_folder_that_lacks_a_part_is_refused_as_judge_as_model_and_as_reward_model(
    part, tasks, run, tmp_path, local_judge_folder
):
    judge, base, reward_model = tmp_path / "broken", tmp_path / "base", tmp_path / "reward_model"
    shutil.copytree(local_judge_folder, judge)
    shutil.copytree(ROOT / "data" / "toy" / "base", base)
    shutil.copytree(ROOT / "data" / "toy" / "reward_model", reward_model)
    for folder in (judge, base, reward_model):
        for path in folder.glob(f"{part.partition('.')[0]}*"):
            path.unlink()
        if part == "half of the weights":
            os.truncate(folder / "model.safetensors", 50_000)
    whole = ("--tasks", tasks, *LOCAL, "--judge", f"local:{local_judge_folder}", "--dry-run")
    whole += ("--judge-max-tokens", 8)
    run(*whole)
    for words, folder in (
        (("--judge", f"local:{judge}"), judge),
        (("--model", base), base),
        (("--reward-model", reward_model), reward_model),
    ):
        done = run(*whole, *words, ok=False)
        assert done.returncode == 2 and str(folder) in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_a_dry_run_asks_the_judge_for_one_token(tasks, server, judge_url, run, tmp_path):
    judge = ("--judge", "m", "--judge-url", judge_url)
    done = run(*LOCAL, "--tasks", tasks, *judge, "--dry-run", "--out", tmp_path / "run")
    assert len(server.checks) == 1 and server.checks[0][0]["max_tokens"] == 1 and server.requests == []
    assert "--judge m answers" in done.stdout and not (tmp_path / "run").exists()
    assert "judge, estimated (one temperature, each asked once, " in done.stdout


def test_a_dry_run_is_refused_the_folder_that_a_run_would_be_refused(tasks, server, judge_url, run, tmp_path):
    """An existing folder, and --resume with other arguments; the judge is not asked."""
    words = (*LOCAL, "--tasks", tasks, "--judge", "m", "--judge-url", judge_url, "--out", tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"args": {"seed": 7}, "processes": 1}')
    for mode, message in (((), "exists; --resume continues it"), (("--resume",), "other arguments: ")):
        for dry_run in ((), ("--dry-run",)):
            done = run(*words, *mode, *dry_run, ok=False)
            assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not server.checks and len(list((tmp_path / "run").iterdir())) == 1


def test_a_judge_that_fails_takes_nothing_from_the_folder_that_is_to_be_overwritten(tasks, run, tmp_path):
    words = (*LOCAL, "--tasks", tasks, "--out", tmp_path / "run")
    run(*words, *PROGRAM)
    before = sorted((tmp_path / "run").iterdir())
    done = run(*words, "--judge", "m", "--judge-url", "http://127.0.0.1:1/v1", "--overwrite", ok=False)
    assert done.returncode == 2 and "gives no reply" in done.stderr
    assert (tmp_path / "run" / "summary.json").exists() and sorted((tmp_path / "run").iterdir()) == before


def test_a_fingerprint_is_of_the_judging_and_not_of_the_seed(monkeypatch):
    """Two seeds of one row have a mean; another reference, another endpoint or another template has not."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    task = TASK | {"references": {"gpt-4": "r"}}
    of = lambda tasks=(task,), template="T", **flags: eval_wildbench.fingerprint(
        eval_wildbench.Args(**{"mode": "reward", "judge": "j", "orders": "random", **flags}), template, tasks
    )["hash"]
    assert of(seed=0) == of(seed=1) == of(judge_url="https://api.openai.com/v1/")
    others = {
        of(),
        of([task | {"references": {"gpt-4": "s"}}]),
        of(template="U"),
        of(orders="both"),
        of(judge_url="http://localhost:8000/v1"),
    }
    assert len(others) == 5
    score = {"mode": "score", "orders": "both"}  # marks have no reference, order or length of another answer
    assert of(**score) == of(**score | {"orders": "random", "length_margin": 9, "references": ("x",)})
    assert of(**score) != of(**score, judge_max_tokens=9) and of() != of(length_margin=9)
    program, local = {"mode": "program", "judge": "data/toy/world.py:judge"}, {"judge": "local:x"}
    before = of(**program), of(**local), of()
    assert of([task | {"primary_tag": "Math"}], **program) == before[0]  # the judge is not shown it
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:9000/v1")  # of another endpoint's user
    assert (of(**program), of(**local)) == before[:2] and of() != before[2]


def test_a_fingerprint_is_of_the_judges_files(tmp_path):
    """An edited program and a retrained judge have their old name."""
    program = tmp_path / "judge.py"
    weights = tmp_path / "judge" / "model.safetensors"
    weights.parent.mkdir()
    hashes = set()
    for content in ("one", "two"):
        program.write_text(content)
        weights.write_text(content)
        for judge in (f"{program}:judge", f"local:{weights.parent}"):
            hashes.add(eval_wildbench.fingerprint(eval_wildbench.Args(judge=judge), "", [TASK])["hash"])
    assert len(hashes) == 4


def test_the_paper_s_protocol_takes_the_first_reply(serve, tmp_path):  # noqa: F811
    """The judge first replies with prose, and if it is asked again with a choice."""
    judge = serve(lambda text, n: '{"choice": "A++"}' if n else "I cannot say.")
    found = {}
    for protocol in ("official", "paper"):
        args = eval_wildbench.Args(mode="reward", judge="j", judge_url=judge.url, protocol=protocol)
        task = TASK | {"messages": TASK["messages"][:1]}
        verdicts = wildbench.list_verdicts(args, [task], {"t": "answer"})
        eval_wildbench.judge_by_model(args, verdicts, [task], f"{protocol} {{$user_query}}", tmp_path)
        found[protocol] = [(verdict["choice"], verdict["invalid"]) for verdict in verdicts]
    assert found["official"] == [("A++", "")] * 2
    assert found["paper"] == [(None, "unreadable in 1 attempts: 0 values for 'choice'")] * 2


def test_an_outage_ends_the_run_and_a_refusal_does_not(tmp_path, capsys):
    client = endpoint.Endpoint("j", tmp_path / "judge.jsonl", "http://127.0.0.1:9/v1", retries=0)
    request = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 1}
    outage = client.ask([request])[0]  # nobody listens at that port
    refused = outage._replace(error="HTTP 400: the prompt is too long")
    unreadable = outage._replace(error="unreadable in 4 attempts: no verdict")
    shared.check_answered([refused.error, unreadable.error, ""], "judge")
    with pytest.raises(SystemExit):
        shared.check_answered([reply.error for reply in (refused, outage, unreadable, outage)], "judge")
    said = capsys.readouterr().err
    assert "2 of 4 got no reply" in said and "--resume asks again for these" in said


def test_a_think_format_that_is_not_the_models_is_refused(tmp_path, capsys):
    (tmp_path / "think_format.json").write_text('{"think_format": "think"}')
    args = eval_wildbench.Args(model=str(tmp_path), think_format="plain")
    with pytest.raises(SystemExit):
        shared.think_format(args)
    assert "was trained to the format 'think', not 'plain'" in capsys.readouterr().err
    assert shared.think_format(eval_wildbench.Args(model=str(tmp_path), think_format="think")) == "think"


def test_a_local_judge_ends_at_every_end_of_turn(tokenizer_folders, tmp_path):
    """Its EOS, those of its generation config, and the one of its chat template."""
    shutil.copytree(tokenizer_folders["smollm"], tmp_path / "judge")
    (tmp_path / "judge" / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    tokenizer = local_judge.load_judge_tokenizer(str(tmp_path / "judge"))
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert set(rollout.ends_of(tokenizer)) == {tokenizer.eos_token_id, end_of_turn, 3, 4}


@pytest.mark.parametrize(
    "think_format, opening, text, value",
    [
        ("plain", "", '{"score": "7"}', "7"),
        ("tags", "", '<think>{"score": "2"} no, better</think>{"score": "7"}', "7"),
        ("tags", "<think>\n", '{"score": "2"} no, better</think>{"score": "7"}', "7"),
        ("tags", "<think>\n\n</think>\n\n", '{"score": "7"}', "7"),
        ("tags", "", '{"score": "7"}', "7"),
        ("tags", "", '<think>{"score": "2"} no, better', None),  # cut off
        ("tags", "<think>\n", '{"score": "2"} no, better', None),
        ("channels", "", '<|channel|>analysis<|message|>{"score": "2"}', None),
    ],
)
def test_the_thinking_of_a_local_judge_is_no_verdict(think_format, opening, text, value):
    tokenizer = SimpleNamespace(think_format=think_format, opening=opening)
    reply = local_judge.read_reply(tokenizer, text, lambda words: wildbench.read_verdict(words, "score"))
    assert reply.value == value and "better" not in reply.text
    assert ("not closed" in reply.error) == (value is None)


def test_a_request_that_is_too_long_for_a_local_judge_is_one_invalid_row(local_judge_folder, exits):
    judge = str(local_judge_folder)  # its context has 512 tokens
    assert local_judge.ask(judge, [], str, Path("none.jsonl"), "hf") == []
    refused = local_judge.refuse_long(judge, {"long": [0] * 505, "short": [0] * 504}, 8)
    assert list(refused) == ["long"] and "--judge-max-tokens 8 are more than the 512" in refused["long"].error
    assert "use another judge" in exits(local_judge.refuse_long, judge, {"long": [0] * 505}, 8)
    assert "--judge-max-tokens 512 leaves no room" in exits(local_judge.check, judge, 512)


def test_a_prompt_that_does_not_fit_the_context_is_refused(exits):
    folder = str(ROOT / "data" / "toy" / "base")  # its context has 512 tokens
    args = eval_wildbench.Args(model=folder, rollout="hf", max_tokens=512)
    assert "more than the 512 tokens" in exits(shared.check_model, args)
    args.max_tokens = 500
    shared.check_model(args)
    messages = [{"role": "user", "content": "yes " * 50}]
    assert "--max-tokens 500" in exits(shared.check_prompts, args, [messages])
