"""data/prepare.py on tiny files, and on broken ones."""

import json
from pathlib import Path

import pandas
import pytest

from rewards import verified
from data import prepare
from data.prepare import Args
from rlmt.data import read_log, to_jsonl


def chat(*texts: str, system: str | None = None) -> list[dict]:
    """Messages that alternate user, assistant, user, ... after an optional system turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def write(path: Path, rows: list) -> Path:
    """Write rows in the format that the name of the file says."""
    if path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    else:
        path.write_text(to_jsonl(rows))
    return path


def run(kind: str, source: Path, **more) -> tuple[list[dict], dict]:
    """main(Args) on a file; returns the rows and the report from disk after checking what holds for every
    report."""
    out = source.parent / "out.jsonl"
    prepare.main(Args(kind=kind, out=out, input=str(source), **more))
    rows = read_log(out)
    report = json.loads(Path(f"{out}.report.json").read_text())
    assert report["n_in"] == report["n_out"] + sum(report["dropped"].values())
    assert report["n_out"] == len(rows) == len({row["id"] for row in rows})
    assert {reason: min(5, n) for reason, n in report["dropped"].items()} == {
        reason: len(ids) for reason, ids in report["examples"].items()
    }
    return rows, report


# --- every kind


CHECKED = {"checklist": ["Is it right?"], "primary_tag": "Planning"}
ROWS = {  # kind: a source row, and ours
    "wildchat-if": (
        {"data_source": "w", "prompt": chat("Wörld\u2028"), "extra_info": {"index": 7, "split": "train"}},
        {"id": "w-train-7", "messages": chat("Wörld\u2028"), "source": "w"},
    ),
    "wildbench": (
        {"session_id": "s", "conversation_input": chat("q"), "references": {"m": "a", "n": None}} | CHECKED,
        {"id": "s", "messages": chat("q")} | CHECKED | {"secondary_tags": [], "references": {"m": "a"}},
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_of_a_kind(tmp_path, kind):
    row, expected = ROWS[kind]
    got, report = run(kind, write(tmp_path / "in.parquet", [row]))
    assert got == [expected] and list(got[0]) == list(expected)
    assert (report["args"]["kind"], report["n_in"], report["dropped"]) == (kind, 1, {})


def test_prompt_faults_are_counted(tmp_path):
    prompts = [
        chat("good", system=""),
        [*chat("q"), {"role": "system", "content": "late"}],
        [],
        chat(""),
        chat("q", "", "q2"),
        chat("q", "a", " "),
        [{"role": "tool", "content": "x"}],
        chat("a") + chat("b"),
        chat("a", "b") + chat("c", system="late"),
        chat("half \ud800"),
        chat(system="alone"),
        chat("answered", "a"),
    ]
    rows = [{"id": str(i), "messages": messages} for i, messages in enumerate(prompts)]
    got, report = run("wildchat-if", write(tmp_path / "in.jsonl", rows))
    assert [row["id"] for row in got] == ["0", "11"] and got[0]["messages"] == chat("good", system="")
    assert got[1]["messages"] == chat("answered")  # the policy writes its own answer
    assert report["examples"] == {
        "not_ending_in_user": ["1"],
        "empty_prompt": ["2", "3", "10"],
        "empty_turn": ["4", "5"],
        "unsupported_role": ["6"],
        "turns_not_alternating": ["7", "8"],
        "broken_unicode": ["9"],
    }


def ultrafeedback_row(i: int, good: str = "a", bad: str = "b", **more) -> dict:
    """A row in the columns of the published file."""
    row = {"prompt": f"q{i}", "prompt_id": f"p{i}", "messages": chat(f"q{i}", good)}
    row |= {"chosen": chat(f"q{i}", good), "rejected": chat(f"q{i}", bad)}
    return row | {"score_chosen": "10.0", "score_rejected": "6.5"} | more  # as from a .csv


def test_ultrafeedback_pairs(tmp_path):
    rows = [
        ultrafeedback_row(0),
        ultrafeedback_row(1, bad=" a"),
        ultrafeedback_row(2, score_chosen="6.5"),
        ultrafeedback_row(3, score_chosen="4.0"),
        ultrafeedback_row(4, good=""),
        ultrafeedback_row(0),
        ultrafeedback_row(0, bad="c"),
        ultrafeedback_row(7, rejected=chat("q8", "b")),
    ]
    got, report = run("ultrafeedback-pairs", write(tmp_path / "uf.parquet", rows))
    assert got[0] == {"id": "p0", "messages": chat("q0"), "chosen": "a", "rejected": "b"}
    assert got[1]["rejected"] == "c" and got[1]["id"].startswith("p0-")
    assert report["dropped"] == {
        "identical_pair": 1,
        "tied_scores": 1,
        "reversed_scores": 1,
        "empty_response": 1,
        "duplicate_pair": 1,
        "different_prompts": 1,
    }


def test_prompts_for_the_teacher_are_one_english_question(tmp_path):
    english = (
        "Could you explain to me how the tides of the sea come about, and why there are two of them a day?"
    )
    french = "Pourriez-vous m'expliquer comment naissent les marées, et pourquoi il y en a deux par jour ?"
    conversations = {
        "several turns": chat(english, "a", "And the moon?", "b"),
        "a system turn": chat(english, "a", system="Be brief."),
        "left over": chat(english, "a", "Thank you!"),
        "unanswered": chat(english),
        "french": chat(french, "a"),
        "no letters": chat("12 + 30 = ?", "42"),
    }
    rows = [{"id": name, "messages": messages} for name, messages in conversations.items()]
    rows += [{"id": f"e{i}", "messages": chat(f"{english} ({i})", "a"), "source": "flan"} for i in range(4)]
    source = write(tmp_path / "tulu.jsonl", rows)
    got, report = run("tulu3-teacher", source, n=4)  # so all are looked at
    assert {row["id"] for row in got} == {"e0", "e1", "e2", "e3"}
    number = got[0]["id"][1:]
    assert got[0] == {"id": f"e{number}", "messages": chat(f"{english} ({number})"), "source": "flan"}
    assert {reason: set(ids) for reason, ids in report["examples"].items()} == {
        "several_turns": {"several turns", "a system turn", "left over"},
        "no_assistant_turn": {"unanswered"},
        "not_english": {"french", "no letters"},
        "not_sampled": set(),
    }
    assert run("tulu3-teacher", source, n=4, overwrite=True)[0] == got
    # prompts of RL keep those of several turns and of other languages
    assert len(run("tulu3-random", source, n=9, overwrite=True)[0]) == 9


WORDS = {"num_words": 2, "relation": "at least", "keyword": None}


def test_verifiable_prompts(tmp_path, nltk_data):
    gsm8k = {"question": "How many?", "answer": "2 + 3 = 5\n#### 5"}
    tulu = {"messages": chat("What is 2 + 2?"), "ground_truth": "4", "dataset": "MATH"}
    other = {
        "messages": chat("Say it loud."),
        "ground_truth": json.dumps({"func_name": "validate_uppercase"}),
        "dataset": "ifeval",
    }
    code = {"prompt": "Write f.", "tests": ["assert f(1) == 2"], "entry_point": "f"}
    table = {
        "prompt": "1?",
        "answer": "",
        "tests": [],
        "ground_truth": ["1"],
    }  # it has every column in every row
    proof = {"problem": "Why?", "solution": "As there are 3 of them."}
    several = {"problem": "Roots?", "ground_truth": ["3", "4"]}
    rows = [gsm8k, tulu, other, code, table, proof, several]
    for name in ("length_constraints:number_words", "copy:copy"):  # IFEval's, and one of Ai2's own
        ground_truth = repr([{"instruction_id": ["punctuation:no_comma", name], "kwargs": [None, WORDS]}])
        rows.append({"messages": chat("Briefly."), "ground_truth": ground_truth, "dataset": "ifeval"})
    rows, report = run("verifiable", write(tmp_path / "in.jsonl", rows))
    assert [row.get("answer") for row in rows] == ["2 + 3 = 5\n#### 5", "4", None, "1", None]
    assert rows[0]["messages"] == chat("How many?") and rows[1]["source"] == "MATH"
    assert rows[2]["tests"] == code["tests"] and rows[2]["entry_point"] == "f"
    assert report["dropped"] == {
        "constraint_of_another_verifier": 2,
        "solution_without_final_answer": 1,
        "several_answers": 1,
    }
    answered = [row | {"response": "It is 5.", "status": "ok"} for row in rows[:2]]
    assert verified.math_answer(answered) == [1.0, 0.0]
    constrained = [
        rows[4] | {"response": text, "status": "ok"} for text in ("one two three", "one, two", "one")
    ]
    assert verified.instructions(constrained) == [1.0, 0.0, 0.0]


def test_traces(tmp_path):
    own = {"id": "o", "messages": chat("q"), "thinking": "z", "response": "y", "teacher": "T"}
    tagged = [
        "<think> z </think> y",
        "<think> z y",
        "<think></think> y",
    ]
    rows = [
        own,
        {**own, "id": "again"},
        {**own, "id": "in", "response": "a </think> b"},
        {**own, "id": "no z", "thinking": " "},
        {**own, "id": "no y", "response": ""},
    ]
    rows += [{"id": f"s{i}", "prompt": chat("q", "a", "r"), "output": text} for i, text in enumerate(tagged)]
    rows += [{"id": "cut", "messages": chat("q"), "completion": tagged[0], "finish_reason": "length"}]
    got, report = run("traces", write(tmp_path / "in.jsonl", rows), teacher="G")
    assert got[0] == own
    assert got[1] == {
        "id": "s0",
        "messages": chat("q", "a", "r"),
        "thinking": "z",
        "response": "y",
        "teacher": "G",
    }
    assert report["examples"] == {
        "duplicate_trace": ["again"],
        "tag_inside_text": ["in"],
        "empty_thinking": ["no z", "s2"],
        "empty_response": ["no y"],
        "no_close": ["s1"],
        "finish_reason_length": ["cut"],
    }


# --- bad input


@pytest.mark.parametrize(
    "kind, line",
    [
        ("verifiable", '{"prompt": "Hi"}'),
        ("verifiable", '{"question": "Which?", "options": ["a", "b"], "answer": "B"}'),
        ("verifiable", """{"prompt": "Hi", "ground_truth": "[{'instruction_id': []}]"}"""),
        ("tulu3-random", '{"prompt": "q"}'),
        ("skywork", '{"chosen": "good", "rejected": "bad"}'),
        ("traces", '{"messages": [{"role": "user", "content": "q"}], "thinking": "z", "response": "y"}'),
    ],
)
def test_malformed_rows_name_the_line(tmp_path, exits, kind, line):
    source = tmp_path / "in.jsonl"
    good = {"messages": chat("q", "a"), "chosen": chat("q", "a"), "rejected": chat("q", "b"), "answer": "4"}
    source.write_text(json.dumps(good) + "\n" + line + "\n")
    out = tmp_path / "out.jsonl"
    assert f"{source}:2: " in exits(prepare.main, Args(kind=kind, out=out, input=str(source)))
    assert not out.exists()
