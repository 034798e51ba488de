"""IFEval and IFBench: the published results, tasks and data that do not fit.

Run from the repository root: `pytest tests/benchmarks/test_ifbench.py`.
"""

import math
import shutil

import nltk
import pytest
from conftest import shared, table
from launch import output_of
from test_benchmarks import score, write

from benchmarks import ifeval
from rewards.verified import instructions
from utils import or_fail
from rlmt.data import read_rows

pytestmark = pytest.mark.usefixtures("nltk_data")

PADDING = dict.fromkeys(
    ["N", "keyword", "m", "n", "percentage", "sep", "small_n", "word", "relation", "num_words"]
)


def task(**instructions: dict) -> dict:
    """A task with these instructions, kwargs null-padded as in the benchmark's file."""
    return {
        "key": "7",
        "prompt": "Do it.",
        "instruction_id_list": list(instructions),
        "kwargs": [{**PADDING, **kwargs} for kwargs in instructions.values()],
    }


# --- the published results


FIELDS = ("key", "strict", "loose")


def test_ifbench_published(tmp_path):
    folder = shared("ifbench")
    file = folder / "sample_responses_scored.jsonl.gz"
    out = score("ifbench", file, folder, tmp_path)
    for ours, theirs in zip(out["rows"], read_rows(file), strict=True):
        assert [ours[name] for name in FIELDS] == [theirs[name] for name in FIELDS]
    for name, value in table(folder / "expected.csv")[0].items():
        assert name == "prompts" or math.isclose(out[name], float(value), abs_tol=1e-12)
    assert (out["n"], out["n_missing"]) == (147, 147)


def test_ifeval_published(tmp_path):
    folder = shared("ifeval")
    file = folder / "gpt4_responses_scored.jsonl.gz"
    out = score("ifeval", file, folder, tmp_path)
    assert (out["n"], out["n_missing"]) == (271, 270)
    # the two with a random letter: as the letter asked for gives
    for ours, theirs in zip(out["rows"], read_rows(file), strict=True):
        assert [ours[name] for name in FIELDS] == [theirs[name] for name in FIELDS]
    expected = next(r for r in table(folder / "expected.csv") if r["prompts"] == "271")
    for name in ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose"):
        assert math.isclose(out[name], float(expected[name]), abs_tol=1e-12)


def test_ifeval_counts_the_character_that_was_asked_for():
    kwargs = {"letter": "#", "let_frequency": 3, "let_relation": "at least"}
    asked = task(**{"keywords:letter_frequency": kwargs})
    for _ in range(5):  # and not a random letter
        assert ifeval.check(asked, "#a #b #c") == {"strict": [True], "loose": [True]}
        assert ifeval.check(asked, "#a #b " + "abcdefghijklmnopqrstuvwxyz" * 9)["loose"] == [False]


@pytest.mark.parametrize(
    "text, n_words", [("I \u2764\ufe0f you", 2), ("a \U0001f468\u200d\U0001f467 b", 2), ("cafe\u0301", 1)]
)
def test_ifeval_counts_no_joiner_or_mark_as_a_word(text, n_words):
    for limit in (n_words, n_words + 1):
        both = {
            "length_constraints:number_words": {"num_words": limit, "relation": "at least"},
            "count:word_count_range": {"min_words": limit, "max_words": 9},
        }
        task = {"key": 1, "instruction_id_list": list(both), "kwargs": list(both.values())}
        assert ifeval.check(task, text)["strict"] == [limit == n_words] * 2


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("language:response_language", {"language": "zh"}),
        ("length_constraints:number_sentences", {"num_sentences": -1, "relation": "at least"}),
        ("length_constraints:number_words", {"num_words": "5", "relation": "at least"}),
        ("keywords:existence", {"keywords": None}),
        ("keywords:existence", {"keywords": "tea"}),  # whose letters were looked for
        ("keywords:forbidden_words", {"forbidden_words": ["("]}),
        ("sentence:keyword", {"N": 8}),  # IFBench draws words in another module
        ("sentence:keyword", {"N": 8, "word": ["tea"]}),
        ("words:keywords_specific_position", {"keyword": "tea", "n": 2, "m": "1"}),
        ("repeat:repeat_span", {"prompt_to_repeat": "a b c", "n_end": 2}),
    ],
)
def test_an_argument_is_used_as_it_is_or_refused(name, kwargs, exits, capsys):
    """In evaluation and reward alike; an official checker would draw some of them at random."""
    row = {"id": 1, "instruction_id_list": [name], "kwargs": [kwargs]}
    for check in (
        lambda: ifeval.check_tasks([row | {"key": 1}]),
        lambda: or_fail(instructions.read_field, row),
    ):
        with pytest.raises(SystemExit):
            check()
        assert str(kwargs) in capsys.readouterr().err
    at_least_0 = {"num_sentences": 0, "relation": "at least"}
    row |= {"instruction_id_list": ["length_constraints:number_sentences"], "kwargs": [at_least_0]}
    assert ifeval.check(row | {"key": 1}, "a")["strict"] == [True]


def test_nltk_data_without_english(tmp_path):
    """A folder that has other languages is one line at the start, not a response that meets nothing."""
    for part in ("tokenizers/punkt_tab", "taggers/averaged_perceptron_tagger_eng", "corpora/stopwords"):
        shutil.copytree(nltk.data.find(part), tmp_path / part)
    (tmp_path / "corpora/stopwords/english").unlink()
    (tmp_path / "corpora/stopwords/german").touch()
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, nltk; nltk.data.path = sys.argv[1:]; from benchmarks import ifeval\n"
        "try: ifeval.require_nltk_data()\n"
        "except FileNotFoundError as error: print(error)\n"
    )
    said = output_of([program, tmp_path], tmp_path / "output")
    assert "NLTK's English data is missing; run: python -m nltk.downloader" in said


def test_ifeval_rows(tmp_path, exits):
    asked = task(**{"punctuation:no_comma": {}, "change_case:english_lowercase": {}})
    data = write(tmp_path / "data.json", [asked, asked | {"key": 8}, asked | {"key": 9}])
    rows = [{"key": 7, "response": "no comma is here, alas"}, {"key": 8, "response": None}]
    out = score("ifeval", rows, data, tmp_path)
    assert (out["prompt_strict"], out["instruction_strict"]) == (0, 0.5)
    assert (out["n"], out["n_invalid"], out["n_missing"]) == (2, 1, 1)
    assert out["n_instructions"] == 2
    assert "a second row of the same task" in exits(score, "ifeval", [rows[0]] * 2, data, tmp_path)
    assert "rows.jsonl:1: no field response" in exits(score, "ifeval", [{"key": 7}], data, tmp_path)
    other = write(tmp_path / "other.json", [task(**{"count:words": {}})])
    assert "unknown instruction count:words" in exits(score, "ifeval", rows[:1], other, tmp_path)


def test_a_check_that_was_stopped_is_marked_and_counted(tmp_path, monkeypatch):
    """A regular expression of quadratic time; what it says of the response is not known."""
    monkeypatch.setattr(ifeval.check, "__defaults__", (0.2,))
    asked = task(**{"detectable_content:number_placeholders": {"num_placeholders": 1}})
    data = write(tmp_path / "data.json", [asked | {"key": 1}, asked | {"key": 2}])
    rows = [{"key": 1, "response": "[" * 200_000}, {"key": 2, "response": "[a]"}]
    out = score("ifeval", rows, data, tmp_path)
    assert (out["prompt_strict"], out["n_timed_out"], out["n_invalid"]) == (0.5, 1, 0)
    assert [row.get("timed_out") for row in out["rows"]] == [True, None]


def test_loose_variants_and_several_instructions():
    cities = ["ID,Country,City,Year,Count"] + [f"{i},Peru,Lima,2001,{i}" for i in range(7)]
    body = "\n".join(cities)
    both = task(**{"custom:csv_city": {}, "count:numbers": {"N": 14.0}})
    assert ifeval.check(both, body) == {"strict": [True, True], "loose": [True, True]}
    # the loose variant without the first line is stripped
    for text in (f"```csv\n{body}\n```", f"**{body}**", f"Here:\n\n{body}"):
        assert ifeval.check(both, text) == {"strict": [False, True], "loose": [True, True]}
    assert ifeval.check(both, f"Here:\nit is\n{body}")["loose"] == [False, True]


def test_a_blank_response_and_one_that_stops_the_checker_meet_nothing():
    overlap = task(**{"ratio:overlap": {"reference_text": "a b c", "percentage": 50}})
    for response in ("", "\t\u00a0\n", "one"):  # no trigram: the package divides by 0
        assert ifeval.check(overlap, response) == {"strict": [False], "loose": [False]}


def test_a_span_from_word_0_is_not_drawn():
    span = task(**{"repeat:repeat_span": {"prompt_to_repeat": "a b c d", "n_start": 0, "n_end": 2}})
    for _ in range(5):
        assert ifeval.check(span, "a b")["strict"] == [True]


def test_nothing_but_stars_is_blank_without_them():
    assert ifeval.check(task(**{"format:no_whitespace": {}, "format:sub-bullets": {}}), "***") == {
        "strict": [True, False],
        "loose": [True, False],
    }


# --- what does not fit


@pytest.mark.parametrize(
    "broken",
    [
        task(**{"count:numbers": {}}),
        task(**{"count:numbers": {"N": 2.0, "m": 1}}),
        {**task(**{"format:emoji": {}}), "kwargs": []},
    ],
)
def test_tasks_that_do_not_fit(broken):
    with pytest.raises(ValueError, match="task 7: "):
        ifeval.make_checkers(broken)
