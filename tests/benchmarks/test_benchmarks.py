"""benchmarks/ and eval_benchmarks.py: agreement with the published scores (read from ../shared/data if it is there),
and what becomes of malformed replies, rows and files. IFEval and IFBench are in test_ifbench.py.

Run from the repository root: `pytest tests/benchmarks/test_benchmarks.py`.
"""

import csv
import gzip
import itertools
import json
import math
import random
import sys
from pathlib import Path

import nltk
import numpy as np
import pytest

import eval_benchmarks
import eval_wildbench
import page
from rlmt import run as runs
from benchmarks import accuracy, alpacaeval2, arenahard2, creativewriting3, ifbench, ifeval, scoring, verified
from benchmarks.judge_template import fill
from rlmt.data import read_rows
from benchmarks.table import BENCHMARKS
from rewards.preference import RewardModel
from rlmt import data as rlmt_data

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"needs {SHARED / name}")
    return SHARED / name


def table(name: str) -> list[dict]:
    with open(shared(name)) as f:
        return list(csv.DictReader(f))


def score(
    benchmark: str, rows: list[dict] | Path, data: Path, tmp_path: Path, max_invalid: float = 1.0
) -> dict:
    """What the command writes for rows (or a file) and a data path, also if many of them are invalid."""
    if not isinstance(rows, Path):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = tmp_path / "rows.jsonl"
    out = tmp_path / "out" / "scores.json"
    args = eval_benchmarks.Args(benchmark, str(data), from_=str(rows), out=str(out), max_invalid=max_invalid)
    eval_benchmarks.main(args)
    return json.loads((tmp_path / "out" / "scores.json").read_text())


def refused(capsys, benchmark: str, rows: list[dict] | Path, data: Path, tmp_path: Path) -> str:
    """The line that a bad input ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        score(benchmark, rows, data, tmp_path)
    message = capsys.readouterr().err.strip()
    assert e.value.code == 2 and message.startswith("error: ") and "\n" not in message
    return message


def write(path: Path, content) -> Path:
    """Content as .json, or as .jsonl rows."""
    path.write_text(
        json.dumps(content) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in content)
    )
    return path


# --- AlpacaEval 2


@pytest.fixture(autouse=True)
def few_refits(monkeypatch):
    """Almost all the time of a score goes into its interval, which one test alone looks at."""
    monkeypatch.setattr(alpacaeval2, "REFITS", 10)


@pytest.mark.parametrize("model", ["FuseChat-Llama-3.1-8B-Instruct", "claude-2.1"])
def test_alpacaeval2_published(model, tmp_path):
    folder = shared("alpacaeval2")
    out = score("alpacaeval2", folder / f"annotations__{model}.jsonl.gz", folder, tmp_path)
    expected = {
        k: float(v)
        for k, v in next(r for r in table("alpacaeval2/expected.csv") if r["model"] == model).items()
        if k != "model"
    }
    assert abs(out["lc_win_rate"] - expected["published_length_controlled_win_rate"]) < 0.15
    assert abs(out["lc_win_rate"] - expected["recomputed_lc_official_fit"]) < 1e-3
    assert math.isclose(out["win_rate"], expected["published_win_rate"], abs_tol=1e-9)
    assert math.isclose(out["discrete_win_rate"], expected["published_discrete_win_rate"], abs_tol=1e-9)
    assert math.isclose(out["win_rate_paper"], expected["rlmt_variant_win_rate"], abs_tol=1e-6)
    assert math.isclose(out["lc_win_rate_paper"], expected["rlmt_variant_lc_win_rate"], abs_tol=1e-5)
    assert math.isclose(out["avg_length"], expected["recomputed_avg_length_chars"], abs_tol=1e-3)
    assert (out["n"], out["n_invalid"], out["n_missing"], len(out["rows"])) == (805, 0, 0, 805)


def test_alpacaeval2_published_weights_give_the_published_win_rates():
    difficulty = np.array(
        [float(r["instruction_difficulty"]) for r in table("alpacaeval2/instruction_difficulty.csv")]
    )
    rows = table("alpacaeval2/glm_weights.csv")
    gaps = []
    for row in rows:
        weights = [float(row[f"w_{name}"]) for name in ("tanh_length", "instruction_difficulty", "model")]
        gaps.append(
            alpacaeval2.win_rate_at_equal_length(weights, difficulty)
            - float(row["published_length_controlled_win_rate"])
        )
    exact = [abs(gap) < 1e-6 for gap in gaps]
    assert len(rows) == 97 and exact == [row["equal_1e-6"] == "yes" for row in rows] and sum(exact) == 90


def test_alpacaeval2_fit_recovers_known_weights():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 3))
    y = 1 / (1 + np.exp(-x @ [1.0, -0.5, 0.25]))  # soft labels: no noise
    assert np.allclose(alpacaeval2.fit_length_control(x, y, np.ones(4000)), [1.0, -0.5, 0.25], atol=0.02)
    y[2000:], weight = 0.5, np.r_[np.ones(2000), np.zeros(2000)]  # rows of weight 0 say nothing
    assert np.allclose(alpacaeval2.fit_length_control(x, y, weight), [1.0, -0.5, 0.25], atol=0.02)


def test_alpacaeval2_paper_variant_by_hand(monkeypatch):
    monkeypatch.setattr(alpacaeval2, "REFITS", 200)
    wins, delta = np.array([1, 1, 1, 0] * 50), np.zeros(200)
    assert abs(alpacaeval2.paper_length_control(wins, delta) - 75) < 0.6  # C = 1 pulls a little to 50
    # 1.96 times sqrt(0.75 * 0.25 / 200) is 6 %
    assert alpacaeval2.paper_interval(wins, delta) == pytest.approx([69, 81], abs=1.5)
    wins = np.array([1, 0] * 50)  # it wins exactly when it is longer: at equal length nothing is left
    assert abs(alpacaeval2.paper_length_control(wins, np.where(wins, 30.0, -30.0)) - 50) < 1e-3


def test_alpacaeval2_reads_official_and_partial_rows(tmp_path, capsys):
    folder = shared("alpacaeval2")
    baseline = json.load(gzip.open(folder / "gpt4_1106_preview_baseline.json.gz"))
    stored = [json.loads(line) for line in gzip.open(folder / "annotations__claude-2.1.jsonl.gz")]
    reference = score("alpacaeval2", stored, folder, tmp_path)
    # the official annotations.json has texts instead of index and length; another order, a plain data file
    rows = [
        {
            "output_2": r["output_2"],
            "instruction": b["instruction"],
            "output_1": b["output"],
            "annotator": "x",
            "preference": r["preference"],
        }
        for r, b in zip(stored, baseline)
    ]
    again = score("alpacaeval2", rows, folder / "gpt4_1106_preview_baseline.json.gz", tmp_path)
    for key in ("win_rate", "lc_win_rate", "lc_win_rate_paper"):
        assert math.isclose(again[key], reference[key], rel_tol=1e-12)
    random.Random(0).shuffle(rows)
    again = score("alpacaeval2", rows, folder, tmp_path)
    assert abs(again["lc_win_rate"] - reference["lc_win_rate"]) < 0.15  # other folds
    # rows without a preference are left out of both official rates; in the paper they are losses
    broken = [r | {"preference": bad} for r, bad in zip(stored, [None, float("nan"), 7, -1, 0.5])] + stored[
        5:
    ]
    broken[5] = broken[5] | {"output_2": None}
    broken[6] = broken[6] | {"preference": 0}  # the official mark of a draw
    out = score("alpacaeval2", broken, folder, tmp_path)
    assert (out["n"], out["n_invalid"]) == (805, 6) and [
        r["line"] for r in out["rows"] if "invalid" in r
    ] == [1, 2, 3, 4, 5, 6]
    assert math.isclose(out["win_rate"], 100 * np.mean([0.5] + [r["preference"] - 1 for r in stored[7:]]))
    assert math.isclose(out["win_rate_paper"], 100 * sum(r["preference"] > 1.5 for r in stored[7:]) / 805)
    printed = capsys.readouterr().err
    assert "line 1: preference None" in printed and "line 6: no output_2" in printed
    # judge texts of the paper's variant
    replies = [
        '{"output": [{"model": "A", "rank": 1}, {"model": "B", "rank": 2}]}',
        '{"output": [{"model": "A", "rank": 2}, {"model": "B", "rank": 1}]}',
        "A is better",
        None,
    ]
    rows = [
        {"index": i, "output_2": "x", "model_is": "A", "judge_text": reply} for i, reply in enumerate(replies)
    ]
    out = score("alpacaeval2", rows, folder, tmp_path)
    assert [r.get("preference") for r in out["rows"]] == [2, 1, None, None]
    assert (out["win_rate"], out["win_rate_paper"], out["n_invalid"], out["n_missing"]) == (50, 25, 2, 801)


def test_alpacaeval2_refusals(tmp_path, capsys):
    folder = shared("alpacaeval2")
    row = {"index": 3, "preference": 1.5, "output_2": "x"}
    message = lambda rows, data=folder: refused(capsys, "alpacaeval2", rows, data, tmp_path)
    assert "model_is must be A or B" in message(
        [{"index": 3, "output_2": "x", "judge_text": "", "model_is": "a"}]
    )
    assert "rows.jsonl:2: the task of line 1 again" in message([row, row])
    assert "rows.jsonl:1: index '805' fits no task" in message([row | {"index": 805}])
    assert "index or instruction" in message([{"preference": 1, "output_2": "x"}])
    assert "rows.jsonl:1: no field output_2 (found index, preference)" in message(
        [{"index": 3, "preference": 1.5}]
    )
    assert 'field preference has the wrong type: "2"' in message([row | {"preference": "2"}])
    assert "0 files match *baseline.json*" in message([row], tmp_path)


RANKINGS = [  # reply, who wins; None: unreadable
    ('{"output": [{"model": "B", "rank": 2}, {"model": "A", "rank": 1}]}', "A"),
    (
        '{"output": [{"rank": 1, "model": "B"}, {"rank": 1, "model": "A"}]}',
        "B",
    ),  # the paper's rule: the first
    (' {"output": [{"model": "B", "rank": 1}]}\n', "B"),
    ('{"output": [{"model": "C", "rank": 1}, {"model": "A", "rank": 1}]}', "A"),
    ("", None),
    ("A", None),
    ("null", None),
    ("[]", None),
    ("{}", None),
    ('{"output": null}', None),
    ('{"output": "A"}', None),
    ('{"output": []}', None),
    ('{"output": [1, 2]}', None),
    ('{"output": [{"model": "A"}]}', None),
    ('{"output": [{"model": "A", "rank": "1"}]}', "A"),  # as int() has it
    ('{"output": [{"model": "A", "rank": true}]}', "A"),
    ('{"output": [{"model": "A", "rank": "first"}]}', None),
    ('{"output": [{"model": "A", "rank": Infinity}]}', None),
    ('{"output": [{"model": "a", "rank": 1}]}', None),
    ('{"output": [{"model": ["A"], "rank": 1}]}', None),
    ('{"output": [{"model": "A", "rank": 2}, {"model": "B", "rank": 2}]}', None),
    ('{"output": {"model": "A", "rank": 1}}', None),
    ('{"output": [{"model": "A", "rank": 1}', None),
    ('```json\n{"output": [{"model": "A", "rank": 1}]}\n```', "A"),
    ("[" * 100000, None),
    ('{"output": [{"model": {"A": 1}, "rank": 1}]}', None),
    ('{"output": [{"model": "A", "rank": 1.0}]}', "A"),
]


@pytest.mark.parametrize("text, winner", RANKINGS, ids=range(len(RANKINGS)))
def test_parse_alpacaeval2(text, winner):
    if winner is None:
        with pytest.raises(ValueError):
            alpacaeval2.parse_ranking(text)
    else:
        assert alpacaeval2.parse_ranking(text) == winner


# --- Arena-Hard v2


def test_arenahard2_expected(tmp_path):
    folder = shared("arena_hard_v2")
    out = score("arenahard2", folder / "synthetic_verdicts__llama3.1-8b-instruct.jsonl.gz", folder, tmp_path)
    expected = json.loads((folder / "synthetic_expected__llama3.1-8b-instruct.json").read_text())
    close = lambda a, b, tol=1e-5: math.isclose(a, b, abs_tol=tol)
    assert (
        close(out["score"], expected["plain_weighted_mean_percent"])
        and abs(out["score_bootstrap"] - out["score"]) < 0.3
    )
    assert close(out["score_paper"], expected["rlmt_variant_win_rate_percent"])
    low, high = out["score_style_controlled_interval"]
    assert low < out["score_style_controlled_bootstrap"] < high and low < out["score_style_controlled"] < high
    assert out["score_interval"][0] < out["score"] < out["score_interval"][1]
    assert (out["n"], out["n_invalid"], out["n_without_style"]) == (
        500,
        500 - expected["rows_with_both_verdicts"],
        0,
    )
    assert out["n_missing"] == 0  # creative writing is another benchmark
    battles = [
        r["style"]
        for r in out["rows"]
        if "invalid" not in r
        for g in ("game1", "game2")
        for _ in range(arenahard2.VERDICTS[r[g]][1])
    ]
    assert len(battles) == expected["battles_after_weighting"]
    assert np.allclose(np.mean(battles, axis=0), expected["feature_means"], atol=1e-6)
    assert np.allclose(np.std(battles, axis=0, ddof=1), expected["feature_stds_ddof1"], atol=1e-6)
    # the official tool, run on one model, first takes away the model's own mean; we do not
    outcomes = []
    for r in out["rows"]:
        if "invalid" not in r:
            value_of_baseline, weight1 = arenahard2.VERDICTS[r["game1"]]
            value_of_model, weight2 = arenahard2.VERDICTS[r["game2"]]
            outcomes += [1 - value_of_baseline] * weight1 + [value_of_model] * weight2
    features = arenahard2.scale_features(np.array(battles))
    outcomes = np.array(outcomes)
    centred = features - features.mean(axis=0)
    assert close(
        arenahard2.bradley_terry(centred, outcomes), expected["style_control_length_markdown_percent"]
    )
    assert close(arenahard2.bradley_terry(features, outcomes), out["score_style_controlled"], 1e-3)


def test_arenahard2_by_hand():
    tasks = itertools.count()
    result = lambda g1, g2, **more: {"task": next(tasks), "game1": g1, "game2": g2, "style": None} | more
    out = arenahard2.category_scores([result("A>>B", "A>B"), result("B>A", "A=B")])
    # the model: 0 0 0 (lost as B, much), 1 (won as A); 1 (won as B), 0.5
    assert math.isclose(out["score"], 100 * 2.5 / 6) and out["score_paper"] == 100 * (0 + 1 + 1 + 0.5) / 4
    # over prompts, of which one has 50 and one 75: both are the first, or each is one, or both are the second
    assert out["score_paper_interval"] == (50, 75)
    assert out["score_style_controlled"] is None
    out = arenahard2.category_scores([result("B>>A", None, invalid="game2: no verdict")])
    assert (out["score"], out["score_paper"]) == (
        None,
        75,
    )  # dropped; a missing verdict is a tie in the paper
    assert arenahard2.bradley_terry(np.zeros((4, 4)), np.array([1, 1, 1, 0.0])) == pytest.approx(75)
    assert arenahard2.bradley_terry(np.zeros((2, 4)), np.array([0.5, 0.5])) == pytest.approx(50)
    # wins only where it is longer, and is as often longer as shorter: at equal style half of the battles
    assert arenahard2.bradley_terry(
        np.repeat([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]], 50, 0), np.repeat([0.9, 0.1], 50)
    ) == pytest.approx(50)
    same = [
        result("B>>A", "A>>B", style=[0.1, 0, 0, 0]) for _ in range(5)
    ]  # no spread of style, no lost battle
    assert arenahard2.category_scores(same)["score_style_controlled"] > 99
    # where it writes as the baseline does, it wins 1 of 2; where it is longer, it wins much and loses: 6 of 8
    alike = [result("B>A", "B>A", style=[0, 0, 0, 0])]
    longer = [result("B>>A", "A>>B", style=[0.5, 0, 0, 0]), result("A>B", "B>A", style=[0.5, 0, 0, 0])]
    out = arenahard2.category_scores(alike + longer)
    assert out["score"] == pytest.approx(70)
    assert out["score_style_controlled"] == pytest.approx(50, abs=0.01)  # not 71, as at its own mean style
    # a style that never differs from itself says nothing about another style: the plain score
    constant = [result("B>>A", "A>B", style=[0.5, 0, 0, 0]), result("A>B", "B>A", style=[0.5, 0, 0, 0])]
    out = arenahard2.category_scores(constant)
    assert out["score_style_controlled"] == pytest.approx(out["score"])
    m, b = (
        {"token_len": 30, "header_count": {"h1": 1, "h2": 2}, "list_count": {}, "bold_count": 0},
        {"token_len": 10, "header_count": {"h1": 0}, "list_count": {"ordered": 11}, "bold_count": {"**": 0}},
    )
    assert np.allclose(arenahard2.style_features(m, b), [0.5, (3 / 31) / (3 / 31 + 1), -1 / 2, 0])
    assert arenahard2.style_features(m | {"token_len": 0}, b | {"token_len": 0})[0] == 0


def test_arenahard2_rows(tmp_path, capsys):
    folder = shared("arena_hard_v2")
    stored = [
        json.loads(line) for line in gzip.open(folder / "synthetic_verdicts__llama3.1-8b-instruct.jsonl.gz")
    ]
    reference = score("arenahard2", stored, folder, tmp_path)
    # judge texts instead of labels, the baseline's counts from the data, official games, another order
    texts = [
        {
            "uid": r["uid"],
            "model_metadata": r["model_metadata"],
            "model": "m",
            "verdict_game2_A_is_model": f"I see [[B>A]] no: [[{r['verdict_game2_A_is_model']}]]"
            if r["verdict_game2_A_is_model"]
            else None,
            "verdict_game1_A_is_baseline": r["verdict_game1_A_is_baseline"],
        }
        for r in stored
    ]
    games = [
        {
            "games": [
                g and {"score": g} for g in (r["verdict_game1_A_is_baseline"], r["verdict_game2_A_is_model"])
            ],
            "model_metadata": r["model_metadata"],
            "uid": r["uid"],
        }
        for r in stored
    ]
    for rows in (texts, games):
        out = score("arenahard2", rows, folder / "question.jsonl.gz", tmp_path)
        assert math.isclose(out["score"], reference["score"]) and out["n_invalid"] == 9
        assert math.isclose(out["score_style_controlled"], reference["score_style_controlled"], abs_tol=1e-6)
    # without counts there is no style-controlled score, and creative writing is a score of its own
    creative = next(q for q in scoring.load(folder, "question.jsonl*") if q["category"] == "creative_writing")
    rows = [{k: v for k, v in r.items() if "metadata" not in k} for r in stored[:20]]
    rows.append(
        {"uid": creative["uid"], "verdict_game1_A_is_baseline": "B>A", "verdict_game2_A_is_model": "A>B"}
    )
    out = score("arenahard2", rows, folder, tmp_path)
    assert out["category"] == "hard_prompt" and out["score"] < 50 and out["creative_writing"]["score"] == 100
    assert out["score_style_controlled"] is None and out["n_without_style"] == 20
    # each category has its own counts
    assert out["n"] == 20 and (out["creative_writing"]["n"], out["creative_writing"]["n_invalid"]) == (1, 0)
    assert (out["n_missing"], out["creative_writing"]["n_missing"], len(out["rows"])) == (480, 249, 21)
    said = capsys.readouterr().err
    assert "no style-controlled score of hard_prompt, as 20 of 20 rows have no model_metadata" in said
    only = score("arenahard2", rows[-1:], folder, tmp_path)
    assert (only["category"], only["score"]) == ("creative_writing", 100)
    message = lambda rows: refused(capsys, "arenahard2", rows, folder, tmp_path)
    assert "rows of several models" in message([rows[0] | {"model": "a"}, rows[1] | {"model": "b"}])
    assert "no field verdict_game2_A_is_model" in message(
        [{"uid": rows[0]["uid"], "verdict_game1_A_is_baseline": "A>B"}]
    )
    assert "uid 'x' fits no task" in message([rows[0] | {"uid": "x"}])


def test_each_category_of_arenahard2_has_its_own_baseline(tmp_path, exits):
    """The official files hold answers to all prompts: only those of the category's baseline count."""
    questions = [
        {"uid": "h", "category": "hard_prompt", "prompt": "Prove."},
        {"uid": "c", "category": "creative_writing", "prompt": "Write."},
    ]
    write(tmp_path / "question.jsonl", questions)
    rows_of_o3 = [{"uid": uid, "answer": f"o3 on {uid}", "metadata": {}} for uid in "hc"]
    write(tmp_path / "baseline_o3-mini-2025-01-31.jsonl", rows_of_o3)
    hard, creative = arenahard2.load_tasks(tmp_path)
    assert hard["baseline"]["answer"] == "o3 on h" and creative["baseline"] is None  # so it is not asked

    rows_of_gemini = [{"uid": uid, "answer": f"gemini on {uid}", "metadata": {}} for uid in "hc"]
    gemini = write(tmp_path / "baseline_gemini-2.0-flash-001.jsonl", rows_of_gemini)
    tasks = arenahard2.load_tasks(tmp_path)
    assert [task["baseline"]["answer"] for task in tasks] == ["o3 on h", "gemini on c"]

    copy = write(tmp_path / "baseline_gemini-2.0-flash-001-new.jsonl", rows_of_gemini)
    assert arenahard2.load_tasks(tmp_path) == tasks  # the same answers twice
    write(copy, [rows_of_gemini[1] | {"answer": "another"}])
    said = exits(arenahard2.load_tasks, tmp_path)
    assert "another answer to prompt c" in said and "keep one file of gemini-2.0-flash-001" in said
    copy.unlink()
    gemini.rename(tmp_path / "baseline_gemini.jsonl")
    assert "begin its name with baseline_o3-mini-2025-01-31 or" in exits(arenahard2.load_tasks, tmp_path)


VERDICT_TEXTS = [  # text, label; None: unreadable
    ("A>B", "A>B"),
    (" b>>a ", "B>>A"),
    ("[[A>>B]]", "A>>B"),
    ("First [[A>B]], on reflection [[B>A]].", "B>A"),
    ("[a=b]", "A=B"),
    ("[[A=B]] and later [B>>A]", "A=B"),  # double brackets first
    ("My verdict is: [[A<<B]]", "A<<B"),
    ("[[B=A]]", "B=A"),
    ("**[[A>B]]**\n", "A>B"),
    ("[[[A>B]]]", "A>B"),
    ("", None),
    ("A", None),
    ("A is better", None),
    ("[[A]]", None),
    ("[[A > B]]", None),
    ("[[A>>>B]]", None),
    ("[[C>B]]", None),
    ("A>B wins", None),
    ("[[A>B]] [[AB]]", None),
    ("[[]]", None),
    ("[[A>B", None),
    ("A>B]]", None),
    ("[[Tie]]", None),
    ("(A>B)", None),
]


@pytest.mark.parametrize("text, label", VERDICT_TEXTS, ids=range(len(VERDICT_TEXTS)))
def test_parse_arenahard2(text, label):
    if label is None:
        with pytest.raises(ValueError):
            arenahard2.parse_verdict(text)
    else:
        assert arenahard2.parse_verdict(text) == label


def test_arenahard2_markdown_counts_are_those_of_the_published_answers():
    rows = read_rows(
        shared("arena_hard_v2/baseline_o3-mini-2025-01-31.jsonl.gz"), "uid", "answer", "metadata"
    )
    assert len(rows) == 500
    assert all(
        arenahard2.markdown_counts(r["answer"])
        == {k: v for k, v in r["metadata"].items() if k != "token_len"}
        for r in rows
    )


def test_arenahard2_token_len_is_that_of_the_published_answers():
    rows = read_rows(shared("arena_hard_v2/baseline_o3-mini-2025-01-31.jsonl.gz"))
    try:
        arenahard2.token_len("x")
    except OSError as e:  # tiktoken downloads its tables once
        pytest.skip(f"no o200k_base here: {type(e).__name__}")
    assert all(arenahard2.token_len(r["answer"]) == r["metadata"]["token_len"] for r in rows)


# --- CreativeWriting v3


@pytest.mark.parametrize("model", ["meta-llama__llama-3.1-8b-instruct", "claude-3-5-sonnet-20241022"])
def test_creativewriting3_published(model, tmp_path):
    folder = shared("creativewritingv3")
    file = folder / f"judge_texts__{model}.jsonl.gz"
    out = score("creativewriting3", file, folder, tmp_path)
    stored = [json.loads(line) for line in gzip.open(file)]
    assert [r["shown"] for r in out["rows"]] == [r["published_item_score"] for r in stored] and len(
        stored
    ) == 96
    expected = next(r for r in table("creativewritingv3/expected.csv") if r["model"] == model)
    assert out["iterations"] == [float(expected[f"published_avg_iteration_{i}"]) for i in (1, 2, 3)]
    assert math.isclose(out["overall"], float(expected["recomputed_overall_0_100"]), abs_tol=1e-9)
    assert round(out["overall"], 2) == float(expected["official_overall_0_100_rounded"])
    assert (out["n"], out["n_invalid"], out["n_missing"]) == (96, 0, 0)


MARKS = [  # judge text, marks; None: unreadable
    ("Coherent: 12\nElegant Prose: 7.5", {"Coherent": 12, "Elegant Prose": 7.5}),
    ("Coherent: Score 12", {"Coherent": 12}),
    ("Coherent: [12]", {"Coherent": 12}),
    ("Coherent:12", {"Coherent": 12}),
    ("Coherent: 3\nCoherent: 5", {"Coherent": 5}),
    ("Coherent: 3\nCoherent: [5]\nCoherent: 4", {"Coherent": 5}),  # brackets later
    ("Coherent: 20\nMeandering: 21\nOverwrought: 200", {"Coherent": 20}),
    ("Coherent: -3", {"Coherent": -3}),
    ("  Coherent : 4", {"Coherent": 4}),
    ("Coherent: 4/20", {"Coherent": 4}),
    ("Coherent:\n 4", {"Coherent": 4}),
    (
        "**Coherent**: 4",
        {"**Coherent**": 4},
    ),  # a name of its own, as in the official tool; `unknown` lists it
    ("", None),
    ("Coherent: twelve", None),
    ("Coherent 12", None),
    ("12", None),
    ("Coherent: 21", None),
    ("Coherent: **12**", None),
    ("[Scores]\nCoherent - 12", None),
    ("{}", None),
]


@pytest.mark.parametrize("text, marks", MARKS, ids=range(len(MARKS)))
def test_parse_creativewriting3(text, marks):
    if marks is None:
        with pytest.raises(ValueError):
            creativewriting3.parse_marks(text)
    else:
        assert creativewriting3.parse_marks(text) == marks


def test_creativewriting3_by_hand(tmp_path, capsys):
    folder = tmp_path / "cw"
    folder.mkdir()
    write(
        folder / "prompts_v3.json",
        {
            "1": {
                "title": "T",
                "category": "noir",
                "writing_prompt": "Write. <SEED> Now.",
                "seed_modifiers": ["One.", "Two.", "Three."],
            }
        },
    )
    (folder / "criteria.txt").write_text("Coherent\nOverwrought")
    (folder / "negative_criteria.txt").write_text("Overwrought\n")
    rows = [
        {
            "title": "Noir: T",
            "iteration": 1,
            "judge_text": "Coherent: 10\nOverwrought: 5",
        },  # (10 + 15) / 2 * 5
        {
            "title": "Noir: T",
            "iteration": 2,
            "judge_text": "Coherent: 10\nOverwrought: -5\nMood: 1",
        },  # 25 is left out
        {"title": "Noir: T", "iteration": 3, "judge_text": None},
    ]
    out = score("creativewriting3", rows, folder, tmp_path)
    assert [r.get("score") for r in out["rows"]] == [62.5, 27.5, None] and out["rows"][1]["unknown"] == [
        "Mood"
    ]
    assert (out["overall"], out["overall_paper"], out["iterations"]) == (45, 30, [62.5, 27.5])
    # over prompts, of which there is one: its iterations are no further tasks
    assert (out["overall_interval"], out["overall_paper_interval"]) == ([45, 45], [30, 30])
    assert (out["n"], out["n_invalid"], out["n_unknown_names"], out["n_missing"]) == (3, 1, 1, 0)
    assert (
        "invalid"
        in score("creativewriting3", [rows[0] | {"judge_text": "Overwrought: -5"}], folder, tmp_path)["rows"][
            0
        ]
    )
    assert creativewriting3.load_tasks(folder)[1]["prompt"] == "Write. Two. Now."
    message = lambda rows: refused(capsys, "creativewriting3", rows, folder, tmp_path)
    assert "the task of line 1 again" in message([rows[0], rows[0]])
    assert "fits no task" in message([rows[0] | {"iteration": 4}]) and "fits no task" in message(
        [rows[0] | {"title": "U"}]
    )
    assert "field iteration has the wrong type" in message([rows[0] | {"iteration": "1"}])
    assert "no field judge_text" in message([{"title": "Noir: T", "iteration": 1}])


CRITERIA = ["Coherent", "Meandering"]


@pytest.fixture
def creative(tmp_path) -> Path:
    """A folder of data with one prompt, and with one criterion of each direction."""
    prompt = {"title": "T", "category": "noir", "writing_prompt": "Write.", "seed_modifiers": ["", "", ""]}
    write(tmp_path / "prompts_v3.json", {"1": prompt})
    (tmp_path / "criteria.txt").write_text("\n".join(CRITERIA))
    (tmp_path / "negative_criteria.txt").write_text("Meandering")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "Coherent: 10\nMeandering: 4",
        "**Coherent**: 10\n**Meandering**: 4",
        "**Coherent:** 10\n**Meandering:** [4]",
        "- Coherent: 10\n- Meandering: 4",
        "* __Coherent__: 10\n  * __Meandering__: 4",
    ],
)
def test_names_in_bold_and_behind_bullets_are_those_of_the_criteria(text, creative):
    """Meandering is turned around: (10 + 20 - 4) / 2 of 20."""
    row = {"title": "Noir: T", "iteration": 1, "judge_text": text}
    out = score("creativewriting3", [row], creative, creative)
    assert (out["overall"], out["overall_paper"], out["n_unknown_names"]) == (65, 65, 0)
    assert creativewriting3.read_marks(text, CRITERIA) == {"Coherent": 10, "Meandering": 4}


def test_a_reply_that_ends_before_its_marks_is_invalid(creative):
    """Its analysis holds numbers, of which the paper's code makes a score."""
    text = "[Analysis]\nStrengths: 3 vivid images. The plot then"
    row = {"title": "Noir: T", "iteration": 1, "judge_text": text}
    good = {"title": "Noir: T", "iteration": 2, "judge_text": "Coherent: 10"}
    out = score("creativewriting3", [row, good], creative, creative)
    assert (out["n_invalid"], out["overall"], out["iterations"]) == (1, 50, [50])
    assert out["overall_paper"] == (15 + 50) / 2
    assert out["rows"][0]["invalid"] == "no mark of a known criterion"
    with pytest.raises(ValueError):  # so the official protocol asks again
        creativewriting3.read_marks(text, CRITERIA)


@pytest.mark.parametrize("between", [" ", "\n", " \n\n"])
def test_the_paper_s_judge_reads_3200_words_of_a_piece_and_no_mark_behind(between, creative):
    """Words are what white space separates: 3,600 words in paragraphs of 30 are 3,481 between single spaces."""
    paragraph = " ".join(["w"] * 30)
    piece = between.join([paragraph] * 120)
    task = creativewriting3.load_tasks(creative)[0]
    template = "{$writing_prompt}|{$test_model_response}"

    def judged(protocol: str) -> str:
        requests = creativewriting3.judge_requests(task, piece, creative, protocol, 0, template)
        return requests["judge_text"]["messages"][0]["content"].partition("|")[2]

    assert judged("official") == piece
    shown = judged("paper")
    assert len(shown.split()) == 3200 and piece.startswith(shown) and shown.endswith("w")


# --- short answers


def test_popqa(tmp_path, capsys):
    tasks = [
        {"id": f"t{i}", "question": q, "answers": names}
        for i, (q, names) in enumerate(
            [
                ("Q0", ["Ralph Rainger", "Ralph Reichenthal"]),
                ("Q1", ["politician"]),
                ("Q2", ["USA"]),
                ("Q3", ["jazz"]),
                ("Q3", ["rock"]),
                ("Q5", ["", "x-ray"]),
            ]
        )
    ]
    data = write(tmp_path / "popqa.jsonl", tasks)
    rows = [  # key, response, official, paper
        ({"id": "t0"}, "It was Ralph Reichenthal.", True, True),
        ({"id": "t0"}, "ralph rainger", True, True),
        ({"id": "t0"}, "RALPH RAINGER", False, True),
        ({"id": "t0"}, "Ralph rainger", True, True),
        ({"id": "t0"}, "Rainger", False, False),
        ({"question": "Q1", "id": "my-id"}, "a Politician", True, True),  # no task has this id
        ({"question": "Q1"}, "POLITICIANS", False, True),
        ({"id": "t2"}, "usa", True, True),
        ({"id": "t2"}, "usage", True, True),  # a substring is enough, as in the official tool
        ({"id": "t3", "question": "Q3"}, "", False, False),
        ({"id": "t5"}, "anything", False, False),
    ]
    out = score(
        "popqa",
        [key | {"response": response} for key, response, *_ in rows],
        tmp_path / "popqa.jsonl",
        tmp_path,
    )
    assert [(r["correct"], r["correct_paper"]) for r in out["rows"]] == [tuple(r[2:]) for r in rows]
    # tasks: t0 3/5, t1 1/2, t2 1, t3 0, t5 0
    assert math.isclose(out["accuracy"], (0.6 + 0.5 + 1) / 5) and math.isclose(
        out["accuracy_paper"], (0.8 + 1 + 1) / 5
    )
    assert out["n"] == 11 and out["n_missing"] == 1 and "pass@2" not in out
    # over the five tasks' means 0.8, 1, 1, 0, 0: all five draws are 0 in 1 %, 0 or one 0.8 in 3.6 %; the same for ones
    assert out["accuracy_paper_interval"] == pytest.approx([0.8 / 5, 4.8 / 5])
    assert "question 'Q3' fits several tasks" in refused(
        capsys, "popqa", [{"question": "Q3", "response": ""}], data, tmp_path
    )
    tsv = tmp_path / "popqa.tsv"  # the official file
    tsv.write_text('id\tquestion\tpossible_answers\n42\tWho?\t"[""Ann"", ""Bob""]"\n')
    assert score("popqa", [{"id": 42, "response": "bob"}], tsv, tmp_path)["accuracy"] == 1
    names = [json.loads(line) for line in gzip.open(shared("popqa") / "popqa_subset_1000.jsonl.gz")]
    out = score(
        "popqa",
        [{"id": t["id"], "response": f"That is {t['answers'][-1].lower()}."} for t in names],
        shared("popqa"),
        tmp_path,
    )
    assert (out["accuracy"], out["n"], out["n_missing"]) == (1, 1000, 0)


def test_tasks_that_could_not_be_asked_or_scored_are_refused_when_they_are_loaded(tmp_path, exits):
    good = {"question": "Q", "answers": ["A"]}
    for bad, message in (
        ({"question": "Q"}, "no names in field answers or possible_answers (found question)"),
        ({"question": "Q", "possible_answers": "['A']"}, "field possible_answers is not JSON"),
        ({"question": "Q", "answers": [7]}, "field answers is not a list of texts: [7]"),
    ):
        data = write(tmp_path / "popqa.jsonl", [good, bad])
        assert f"{data}, row 2: {message}" in exits(verified.load_popqa, data)
    data = write(tmp_path / "grid.json", [{"id": "x", "solution": {"header": [], "rows": []}}])
    assert f"{data}, row 1: no field puzzle" in exits(verified.load_zebralogic, data)


LETTERS = [  # response, letter
    ("Answer: B", "B"),
    ("Answer:B.", "B"),
    ("answer: C", "C"),
    ("Answer: (D)", "D"),
    ("Answer: **A**", "A"),
    ("Answer: b", None),
    ("Answer: b or C", "C"),
    ("Answer: The answer is B", None),  # T
    ("Answer: A\nAnswer: B", "A"),  # the first
    ("answer: A\nAnswer: B", "B"),
    ("B", None),
    ("", None),
    ("Answer:", None),
    ("Answer: E", None),
    ("ANSWER: A", None),
    ("The Answer: is Because B", "B"),
    ("Answer: 1", None),
    ("Answer : A", None),
]


@pytest.mark.parametrize("response, letter", LETTERS, ids=range(len(LETTERS)))
def test_mmlu_redux_letter(response, letter):
    verdicts = [verified.mmlu_redux_check({"truth": i}, response) for i in range(4)]
    assert [v["correct"] for v in verdicts] == [option == letter for option in "ABCD"] and verdicts[0][
        "answer"
    ] == letter


def test_mmlu_redux_items(tmp_path, capsys):
    folder = shared("mmlu_redux")
    tasks = json.load(gzip.open(folder / "data.json.gz"))
    right = lambda t: (
        int(t["correct_answer"])
        if t["error_type"] == "wrong_groundtruth" and str(t["correct_answer"]).isdigit()
        else t["answer"]
    )
    rows = [{"id": i, "response": f"Answer: {'ABCD'[right(t)]}"} for i, t in enumerate(tasks)]
    out = score("mmlu_redux", rows, folder, tmp_path)
    assert (out["n"], out["n_excluded"], out["n_missing"], out["accuracy"]) == (5376, 324, 0, 1)
    assert (
        sum("excluded" in r and "wrong_groundtruth" in r["excluded"] for r in out["rows"]) == 60
    )  # a letter, or none
    corrected = next(
        i
        for i, t in enumerate(tasks)
        if t["error_type"] == "wrong_groundtruth"
        and t["correct_answer"] != str(t["answer"])
        and str(t["correct_answer"]).isdigit()
    )
    wrong = {"index": corrected, "response": f"Answer: {'ABCD'[tasks[corrected]['answer']]}"}
    assert score("mmlu_redux", [wrong], folder / "data.json.gz", tmp_path)["accuracy"] == 0
    # by question where it is the only one; else by what the row repeats of its task
    question = "Which of the following statements is false?"
    assert "fits several tasks" in refused(
        capsys, "mmlu_redux", [{"question": question, "response": ""}], folder, tmp_path
    )
    same = next(t for t in tasks if t["question"] == question)
    row = {
        "question": question,
        "choices": same["choices"],
        "category": same["category"],
        "response": f"Answer: {'ABCD'[same['answer']]}",
    }
    out = score("mmlu_redux", [row, rows[1] | {"response": None}], folder, tmp_path)
    assert (out["rows"][0]["correct"], out["accuracy"], out["n"], out["n_invalid"], out["n_unparsed"]) == (
        True,
        1,
        2,
        1,
        0,
    )


# --- mathematics


def test_math500_reference_solutions(tmp_path):
    folder = shared("math_500")
    tasks = json.load(gzip.open(folder / "test.json.gz"))
    rows = [{"unique_id": t["unique_id"], "response": t["solution"]} for t in tasks]
    out = score("math500", rows, folder, tmp_path)
    assert (out["accuracy"], out["accuracy_math_verify"], out["n"], out["n_unparsed"]) == (1, 1, 500, 0)
    rotated = [
        {"problem": t["problem"], "response": u["solution"]} for t, u in zip(tasks, tasks[1:] + tasks[:1])
    ]
    assert score("math500", rotated[:100], folder, tmp_path)["accuracy"] < 0.1


BOXES = [  # text, content of the last box
    (r"\boxed{5}", "5"),
    (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\fbox{3}", None),
    (r"\boxed{4} \fbox{3}", "4"),
    (r"\boxed{3} and \boxed", None),
    (r"\boxed 7$ or so", "7"),
    (r"$\boxed \frac12$", r"\frac12"),
    (r"\boxed{{a}{b}}", "{a}{b}"),
    (r"\boxed{}", ""),
    ("5", None),
    (r"\boxed5", None),
    (r"\boxed{5", None),
    ("", None),
    (r"\boxed{1}} \boxed{2", None),
]


@pytest.mark.parametrize("text, content", BOXES, ids=range(len(BOXES)))
def test_last_boxed(text, content):
    assert verified.last_boxed(text) == content


SPELLINGS = [  # answer, reference, equal as normalised, equal by math-verify
    (r"\frac12", r"\frac{1}{2}", True, True),
    (r"\dfrac{1}{2}", r"\tfrac{1}{2}", True, True),
    ("1/2", r"\frac{1}{2}", True, True),
    ("0.5", r"\frac{1}{2}", True, True),
    (".5", r"\frac12", True, True),
    ("x=5", "5", True, True),
    ("x = 5", "5", True, True),
    (r"\sqrt2", r"\sqrt{2}", True, True),
    (r"90^\circ", "90", True, True),
    (r"50\%", "50", True, True),
    ("50%", "50", False, None),
    ("x / 2", "x/2", True, True),  # the paper's code says no
    (r"\$18", "18", True, True),
    (r"10\text{ cm}", "10", True, True),
    (r"\left(1,2\right)", "(1, 2)", True, True),
    (r"1\!000", "1000", True, True),
    (r"\frac1{10}", r"\frac{1}{10}", True, True),
    (r"\frac{3}4", r"\frac{3}4", True, True),
    ("-1/2", r"\frac{-1}{2}", True, True),
    ("", "5", False, False),
    ("6", "5", False, False),
    ("5", "50", False, False),
    (r"\frac{2}{4}", r"\frac{1}{2}", False, True),
    ("0.50", r"\frac{1}{2}", False, True),
    ("abc=5", "5", False, None),
    ("1/2/3", r"\frac{1}{2}", False, None),
    ("5.0", "5", False, True),
    (r"1\text{ cm}\text{ and}", "1", False, None),
    (r"\text{A}", "A", False, None),
]


@pytest.mark.parametrize("answer, reference, equal, as_expression", SPELLINGS, ids=range(len(SPELLINGS)))
def test_math500_equality(answer, reference, equal, as_expression):
    out = verified.math500_check({"answer": reference}, f"So it is \\boxed{{{answer}}}.")
    assert out["correct"] is equal and (as_expression is None or out["correct_math_verify"] is as_expression)


@pytest.mark.parametrize(
    "model", ["6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"]
)
def test_gsm8k_published_flags(model, tmp_path):
    folder = shared("gsm8k")
    stored = [json.loads(line) for line in gzip.open(folder / "example_model_solutions.jsonl.gz")]
    rows = [{"question": row["question"], "response": row[model]["solution"]} for row in stored]
    out = score("gsm8k", rows, folder, tmp_path)
    assert (out["n"], out["n_missing"]) == (660, 1319 - 660)
    assert [r["correct"] for r in out["rows"]] == [row[model]["is_correct"] for row in stored]
    assert out["accuracy"] == pytest.approx(np.mean([row[model]["is_correct"] for row in stored]))


@pytest.mark.parametrize(
    "text, number",
    [
        ("#### 18", "18"),
        ("####18", "18"),
        ("#### 1,234", "1234"),
        ("#### -3.5 dollars", "-3.5"),
        ("#### 1\n#### 2", "2"),
        ("A: 7", "7"),
        ("#### 5\nA: 6", "5"),
        ("18", None),
        ("#### $18", None),
        ("#### eighteen", None),
        ("", None),
        ("### 5", None),
        ("#### 18.", "18."),
    ],
)
def test_final_number(text, number):
    assert verified.final_number(text) == number


# --- ZebraLogic


GRID = {
    "id": "lgp-2x2",
    "size": "2*2",
    "puzzle": "P",
    "solution": {"header": ["House", "Name", "Pet"], "rows": [["1", "Eric", "Dog"], ["2", "Arnold", "cat"]]},
}
RIGHT = {"House 1": {"Name": "Eric", "Pet": "dog"}, "House 2": {"Name": " arnold ", "Pet": ["cat", "dog"]}}
REPLIES = [  # response, right cells of 4; None: unreadable
    (json.dumps({"reasoning": "r", "solution": RIGHT}), 4),
    ("So:\n```json\n" + json.dumps({"solution": RIGHT}, indent=2) + "\n```", 4),
    (json.dumps({"solution": {}}) + json.dumps({"solution": RIGHT}), 4),
    (json.dumps({"solution": RIGHT}) + json.dumps({"solution": {}}), 0),
    (json.dumps({"solution": RIGHT | {"House 1": {"Name": "Eric"}}}), 3),
    (json.dumps({"solution": RIGHT | {"House 2": "Arnold, cat"}}), 2),
    (json.dumps({"solution": RIGHT | {"House 1": {"Name": None, "Pet": 7}}}), 2),
    (json.dumps({"solution": RIGHT | {"House 1": {"Name": [], "Pet": [["dog"]]}}}), 2),
    (json.dumps({"solution": {"house 1": RIGHT["House 1"], "House 2": RIGHT["House 2"]}}), 2),
    (json.dumps({"solution": {}}), 0),
    (json.dumps({"answer": RIGHT}), None),
    (json.dumps({"solution": [RIGHT]}), None),
    (json.dumps({"solution": None}), None),
    (json.dumps({"solution": RIGHT})[:-2], None),
    ("", None),
    ("}{", None),
    ("{}", None),
    ("{not json}", None),
    ("[1]", None),
    (json.dumps({"solution": RIGHT}) + " {", 4),
    (json.dumps({"reasoning": "a { brace", "solution": RIGHT}), None),
    ("{" * 10000, None),
]


@pytest.mark.parametrize("response, right", REPLIES, ids=range(len(REPLIES)))
def test_zebralogic_check(response, right):
    out = verified.zebralogic_check(GRID, response)
    assert (
        out["right_cells"] == (right or 0)
        and out["correct"] is (right == 4)
        and (out["answer"] is None) == (right is None)
    )


def test_zebralogic_scores(tmp_path, capsys):
    big = {
        "header": ["House", *"abcdef"],
        "rows": [[str(h), *"uvwxyz"] for h in range(1, 7)],
    }  # (6!)^6 > 1e10
    data = write(tmp_path / "grid.json", [GRID, GRID | {"id": "x", "solution": big}])
    rows = [
        {"id": "lgp-2x2", "response": REPLIES[0][0]},
        {"id": "lgp-2x2", "response": ""},
        {"id": "x", "response": "{}"},
    ]
    out = score("zebralogic", rows, data, tmp_path)
    assert (out["accuracy"], out["by_group"]) == (0.25, {"small": 0.5, "x-large": 0}) and out[
        "n_unparsed"
    ] == 2
    assert math.isclose(out["cell_accuracy"], 4 / (4 + 4 + 36))
    masked = GRID | {"solution": {"header": ["House", "Name"], "rows": [["___", "___"], ["___", "___"]]}}
    write(tmp_path / "masked.json", [masked])
    assert "masked" in refused(capsys, "zebralogic", rows[:1], tmp_path / "masked.json", tmp_path)
    assert "files match" in refused(
        capsys, "zebralogic", rows[:1], tmp_path, tmp_path
    )  # several files in the folder
    filled = GRID | {"template": verified.zebralogic_template(GRID["solution"])}
    text = verified.ZEBRALOGIC_PROMPT.format(**filled)
    assert (
        verified.zebralogic_check(GRID, text)["right_cells"] == 0
        and '"House 2": {"Name": "___", "Pet": "___"}' in text
    )


# --- HumanEval


def test_humaneval(tmp_path, needs_sandbox):
    folder = shared("humaneval")
    tasks = [json.loads(line) for line in gzip.open(folder / "HumanEval.jsonl.gz")][:6]
    prose = "Sure!\n```python\n{}{}```\nIt runs in O(n)."
    rows = []
    for t in tasks:
        rows += [
            {"task_id": t["task_id"], "completion": t["canonical_solution"]},
            {"task_id": t["task_id"], "completion": "    return None\n"},
            {"task_id": t["task_id"], "response": prose.format(t["prompt"], t["canonical_solution"])},
            {"task_id": t["task_id"], "completion": "    import os; os._exit(0)\n"},
        ]
    out = score("humaneval", rows, folder, tmp_path)
    assert [r["correct"] for r in out["rows"]] == [True, False, True, False] * 6
    assert (out["accuracy"], out["n"], out["n_missing"]) == (0.5, 24, 158)
    assert out["pass@4"] == 1
    assert [r["program_status"] for r in out["rows"][:4]] == ["ok", "error", "ok", "error"]
    assert "status" not in out["rows"][0]  # rows.jsonl has the generation's under this name
    one = score(
        "humaneval", rows[::4] + [rows[1] | {"completion": None}], folder / "HumanEval.jsonl.gz", tmp_path
    )
    assert (one["accuracy"], one["n"], one["n_invalid"]) == (1, 7, 1)


def test_pass_at_k():
    assert (
        accuracy.pass_at_k(1, 1, 1) == 1
        and accuracy.pass_at_k(4, 0, 3) == 0
        and accuracy.pass_at_k(4, 2, 1) == 0.5
    )
    assert (
        accuracy.pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
        and accuracy.pass_at_k(4, 2, 3) == 1
        and accuracy.pass_at_k(200, 1, 100) == pytest.approx(0.5)
    )
    row = lambda task, correct: {"task": task, "correct": correct}
    rows = [row(0, True)] * 3 + [row(0, False)] * 9 + [row(1, False)] * 10
    out = accuracy.accuracy(rows, [{}, {}, {}])
    assert (out["accuracy"], out["n_missing"]) == (pytest.approx(0.125), 1)
    assert out["pass@10"] == pytest.approx(0.5 * accuracy.pass_at_k(12, 3, 10)) and "pass@100" not in out
    assert accuracy.accuracy([{"task": 0, "invalid": "no response"}], [{}]) | {"rows": 0} == {
        "accuracy": None,
        "task_means": {},
        "n": 1,
        "n_invalid": 1,
        "n_missing": 0,
        "n_excluded": 0,
        "n_unparsed": 0,
        "rows": 0,
    }


def test_majority_at_k():
    majority = accuracy.majority_at_k
    assert majority(["a", "b", "b"], [True, False, False], 3) == 0
    assert majority(["a", "b", "b", "a"], [True, False, False, True], 4) == 1  # a tie: the first
    assert majority([None, None, "b"], [False, False, True], 3) == 1  # what cannot be read does not vote
    assert majority([None, None], [False, False], 2) == 0
    # two groups of two, and a remainder
    assert majority(["a", "b", "b", "b", "b"], [True, False, False, False, False], 2) == 0.5
    assert majority(["a", "b", "b"], [True, False, False], 1) == pytest.approx(1 / 3)  # the accuracy


def test_best_at_k():
    rewards = [0.3, -1.0, 0.9, 0.3, -math.inf]
    correct = [True, False, False, False, True]
    for k in range(1, 6):
        chosen = []
        for places in itertools.combinations(range(5), k):
            chosen.append(correct[max(places, key=lambda place: rewards[place])])  # the first of equals
        assert accuracy.best_at_k(rewards, correct, k) == pytest.approx(sum(chosen) / len(chosen))


def test_values_at_k_of_a_benchmark(tmp_path):
    """Equal answers are those that the check takes for one; intervals are over tasks."""
    answers = [("1/2", -2.0), ("\\frac{1}{2}", -1.0), ("0.5", 3.0), ("2", 9.0), ("2", None)]
    tasks = [{"unique_id": str(i), "problem": "?", "answer": "\\frac12"} for i in range(2)]
    data = write(tmp_path / "test.jsonl", tasks)
    rows = []
    for answer, reward in answers:
        rows.append({"unique_id": "0", "response": f"\\boxed{{{answer}}}", "reward": reward})
        rows.append({"unique_id": "1", "response": "Nothing.", "reward": reward})
    out = score("math500", rows, data, tmp_path)
    assert (out["accuracy"], out["pass@5"], out["maj@5"], out["best@5"]) == (0.3, 0.5, 0.5, 0.0)
    assert out["maj@5_interval"] == [0, 1] and out["best@5_interval"] == [0, 0]
    for row in rows:
        del row["reward"]
    assert "best@5" not in score("math500", rows, data, tmp_path)

    grids = [{"House 1": {"A": " X ", "B": ["y"]}}, {"House 1": {"A": "x", "B": "Y", "C": "z"}}, {}]
    task = {"id": "p", "puzzle": "P", "solution": {"header": ["House", "A", "B"], "rows": [["1", "x", "y"]]}}
    data = write(tmp_path / "zebra.jsonl", [task])
    rows = [{"id": "p", "response": json.dumps({"solution": grid})} for grid in [{}, *grids, {}]]
    assert score("zebralogic", rows[1:4], data, tmp_path)["maj@3"] == 1
    assert score("zebralogic", rows, data, tmp_path)["maj@5"] == 0


# --- prompts and the command


def test_prompts():
    assert BENCHMARKS["ifeval"].prompt.format(prompt="{a} 50%") == "{a} 50%"  # braces of a task stay

    marks = {"mark_lines": "Coherent: mark\nOverwrought: mark"}
    judge = fill(creativewriting3.TEMPLATE, marks)
    assert "Coherent: mark\nOverwrought: mark" in judge
    with pytest.raises(ValueError):  # an echo of what was asked is no verdict
        creativewriting3.parse_marks(judge)
    with pytest.raises(ValueError):
        alpacaeval2.parse_ranking(alpacaeval2.TEMPLATES["paper"].rpartition("JSON: ")[2])


def test_bad_files(tmp_path, capsys):
    data = write(tmp_path / "test.jsonl", [{"question": "Q", "answer": "#### 1"}])
    message = lambda rows, data=data: refused(capsys, "gsm8k", rows, data, tmp_path)
    row = [{"question": "Q", "response": "x"}]
    assert "--from" in message(tmp_path / "none.jsonl") and "no such file" in message(row, tmp_path / "none")
    (tmp_path / "torn.jsonl").write_text('{"question": "Q", "response": "x"}\n{"quest')
    assert "torn.jsonl:2: not JSON" in message(tmp_path / "torn.jsonl")
    (tmp_path / "test.json").write_text("[1, 2")
    assert "test.json: not JSON" in refused(capsys, "math500", row, tmp_path / "test.json", tmp_path)
    write(tmp_path / "test.json", [{"problem": "P", "answer": "1"}, {"problem": "Q"}])
    assert "test.json, row 2: no field answer (found problem)" in refused(
        capsys, "math500", row, tmp_path / "test.json", tmp_path
    )
    (tmp_path / "test.json").unlink()
    write(tmp_path / "test.jsonl.old", [])
    assert "2 files match test.jsonl* (test.jsonl, test.jsonl.old)" in message(row, tmp_path)
    assert "rows.jsonl:2: question 'R' fits no task" in message(row + [{"question": "R", "response": "x"}])


# --- generation and judges, by the command


@pytest.fixture
def run(monkeypatch, capsys):
    """The command, in this process: its exit code and what it said on stderr."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "")

    def run(*words, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["eval_benchmarks.py", *map(str, words)])
        try:
            eval_benchmarks.main(runs.parse_args(eval_benchmarks.Args, {}))
            ended = 0
        except SystemExit as e:
            ended = e.code
        said = capsys.readouterr().err
        assert ended == code, said
        return said

    return run


MODEL = ("--model", "data/toy/base", "--max-tokens", 16)


def test_generate_and_score(run, tmp_path):
    """The toy base model: what it writes is generated, kept, scored as --from scores it, and indexed."""
    write(
        tmp_path / "test.jsonl",
        [{"question": f"How much is {i}?", "answer": f"so\n#### {i}"} for i in range(5)],
    )
    run("gsm8k", *MODEL, "--data", tmp_path, "--samples", 2, "--limit", 3, "--out", tmp_path / "run")
    rows = rlmt_data.read_log(tmp_path / "run" / "rows.jsonl")
    assert [r["question"] for r in rows] == [f"How much is {i}?" for i in (0, 0, 1, 1, 2, 2)]
    assert rows[0]["text"] != rows[1]["text"]  # two samples, not one twice
    assert page.read_rows(tmp_path / "run")["gold"].tolist() == [r["correct"] for r in rows]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    again = score("gsm8k", tmp_path / "run" / "rows.jsonl", tmp_path / "test.jsonl", tmp_path)
    assert (summary["n"], summary["n_missing"], summary["accuracy"]) == (6, 2, again["accuracy"]) and again[
        "n"
    ] == 6
    index = list(csv.DictReader(open(tmp_path / "runs.csv")))
    assert [(r["benchmark"], r["metric"], r["n"], r["run"]) for r in index] == [
        ("gsm8k", "accuracy", "6", "run"),
        ("gsm8k", "maj@2", "6", "run"),
    ]
    assert "exists; --resume" in run("gsm8k", *MODEL, "--data", tmp_path, "--out", tmp_path / "run", code=2)


def test_answers_to_other_prompts_are_not_kept(run, tmp_path):
    """Positions are the ids of the tasks, so a data set whose order changes has the same ids for other prompts."""
    data = tmp_path / "data"
    data.mkdir()
    questions = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(3)]
    write(data / "test.jsonl", questions)
    summary = tmp_path / "run" / "summary.json"
    command = ("gsm8k", *MODEL, "--data", data, "--out", tmp_path / "run")
    run(*command)
    summary.unlink()  # as if it had been killed before the end
    run(*command, "--resume")
    summary.unlink()

    write(data / "test.jsonl", [questions[0], questions[2], questions[1]])
    said = run(*command, "--resume", code=2)
    assert "test.jsonl has changed" in said and "--overwrite starts anew" in said

    # a change on the hub is not seen there: the answers that are kept belong to the order above
    write(data / "test.jsonl", questions)
    generations = tmp_path / "run" / "generations.jsonl"
    rows = rlmt_data.read_log(generations)
    rows[1]["messages"], rows[2]["messages"] = rows[2]["messages"], rows[1]["messages"]
    write(generations, rows)
    said = run(*command, "--resume", code=2)
    assert "generations.jsonl has an answer to task 1-0 that was given to another prompt" in said
    assert "--overwrite starts anew" in said and not summary.exists()


def longer(text: str, first: str, second: str) -> bool:
    """Tells whether the answer behind `first` is longer than the one behind `second`."""
    a, _, b = text.partition(first)[2].partition(second)
    return len(a.strip()) > len(b.partition("Reply with")[0].strip())


def prefer_the_longer(text: str, n: int):
    """A judge that prefers the longer answer, in the form that it is asked for."""
    if "Answer of m:" in text:
        better = "m" if longer(text, "Answer of m:", "Answer of M:") else "M"
        tops = [{"token": t, "logprob": math.log(0.75 if t == better else 0.25)} for t in "mM"]
        choice = {"message": {"content": better}, "logprobs": {"content": [{"top_logprobs": tops}]}}
        return 200, {"choices": [choice]}
    if "[Scores]" in text:
        return "[Scores]\nCoherent: 12\nOverwrought: 5"
    winner, loser = "AB" if longer(text, "Answer of A:", "Answer of B:") else "BA"
    if "Reply with nothing but JSON" in text:
        return json.dumps({"output": [{"model": winner, "rank": 1}, {"model": loser, "rank": 2}]})
    return f"So [[{winner}>{loser}]]"


@pytest.fixture
def judge_server(serve):  # noqa: F811
    return serve(prefer_the_longer)


@pytest.fixture
def judge(judge_server) -> tuple[str, ...]:
    return "--judge", "longer", "--judge-url", judge_server.url


def rows_of(folder: Path) -> list[dict]:
    return rlmt_data.read_log(folder / "rows.jsonl")


def test_alpacaeval2_judged_by_both_protocols(run, tmp_path, judge, judge_server):
    """Half of the baseline answers are longer than anything 16 tokens can be: there the model loses."""
    baseline = [
        {"instruction": f"Say {i}.", "output": "word " * (200 if i % 2 else 0) + "."} for i in range(10)
    ]
    write(tmp_path / "baseline.json", baseline)
    gamed = [
        {
            "instruction_index": i,
            "std_delta_len": (-1) ** i,
            "instruction_difficulty": i / 10 - 1,
            "preference": 0.3,
        }
        for i in range(10)
    ]
    with open(tmp_path / "gamed.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, gamed[0])
        writer.writeheader()
        writer.writerows(gamed)
    for protocol, won in (("official", 1.75), ("paper", 2.0)):
        run(
            "alpacaeval2",
            *MODEL,
            *judge,
            "--data",
            tmp_path,
            "--protocol",
            protocol,
            "--out",
            tmp_path / protocol,
        )
        for i, row in enumerate(rows_of(tmp_path / protocol)):
            expected = won if len(row["output_2"]) > len(baseline[i]["output"]) else 3 - won
            assert row["preference"] == pytest.approx(expected) and row["index"] == i
    calls = [request for request, _ in judge_server.requests]
    assert len(calls) == 20 and {request["max_tokens"] for request in calls} == {1, 128}
    summary = json.loads((tmp_path / "official" / "summary.json").read_text())
    assert summary["n"] == 10 and summary["n_invalid"] == 0 and summary["win_rate"] < 75
    judge_server.behave = lambda text, n: "I cannot say."  # no headline, and a line in the index
    run(
        "alpacaeval2",
        *MODEL,
        *judge,
        "--data",
        tmp_path,
        "--protocol",
        "paper",
        "--seed",
        1,
        "--out",
        tmp_path / "prose",
    )
    assert json.loads((tmp_path / "prose" / "summary.json").read_text())["n_invalid"] == 10
    lines = [r for r in csv.DictReader(open(tmp_path / "runs.csv")) if r["run"] == "prose"]
    assert {r["metric"] for r in lines} == set(BENCHMARKS["alpacaeval2"].metrics) and not any(
        r["value"] for r in lines
    )


def test_arenahard2_both_games_and_invalid_verdicts(run, tmp_path, judge, judge_server):
    write(
        tmp_path / "question.jsonl",
        [{"uid": f"u{i}", "category": "hard_prompt", "prompt": f"Do {i}."} for i in range(10)]
        + [{"uid": "c", "category": "creative_writing", "prompt": "No baseline, so not asked."}],
    )
    counts = {"token_len": 3, "header_count": {}, "list_count": {}, "bold_count": {}}
    write(
        tmp_path / "baseline_o3-mini-2025-01-31.jsonl",
        [{"uid": f"u{i}", "answer": "word " * 200 if i < 6 else ".", "metadata": counts} for i in range(10)],
    )
    said = run("arenahard2", *MODEL, *judge, "--data", tmp_path, "--out", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = rows_of(tmp_path / "run")
    wins = [len(r["response"]) > (999 if i < 6 else 1) for i, r in enumerate(rows)]
    assert [
        ("A>B" in r["verdict_game2_A_is_model"], "B>A" in r["verdict_game1_A_is_baseline"])
        for r in rows
        if r["response"]
    ] == [(w, w) for w, r in zip(wins, rows) if r["response"]]
    assert len(judge_server.requests) == 20 and summary["n"] == 10 and summary["n_invalid"] == 0
    assert "tiktoken" in said or summary["score_style_controlled"] is not None
    judge_server.behave = lambda text, n: "I cannot say."
    run("arenahard2", *MODEL, *judge, "--data", tmp_path, "--seed", 1, "--out", tmp_path / "prose")
    summary = json.loads((tmp_path / "prose" / "summary.json").read_text())
    assert (
        summary["n_invalid"] == 10
        and summary["score_style_controlled"] is None
        and len(judge_server.requests) == 20 + 80
    )


def test_creativewriting3_seeds_and_items(run, tmp_path, judge, judge_server):
    prompts = {
        "1": {
            "category": "essay",
            "title": "One",
            "writing_prompt": "On <SEED>.",
            "seed_modifiers": ["a", "b", "c"],
        }
    }
    write(tmp_path / "prompts.json", prompts)
    (tmp_path / "criteria.txt").write_text("Coherent\nOverwrought\n")
    (tmp_path / "negative_criteria.txt").write_text("Overwrought\n")
    run("creativewriting3", *MODEL, *judge, "--data", tmp_path, "--out", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["overall"] == 5 * (12 + 15) / 2
    asked = [request["messages"][0]["content"] for request, _ in judge_server.requests]
    assert sorted(text.partition("The task:\n")[2][:5] for text in asked) == [
        "On a.",
        "On b.",
        "On c.",
    ]
    assert [(r["title"], r["iteration"]) for r in rows_of(tmp_path / "run")] == [
        ("Essay: One", i) for i in (1, 2, 3)
    ]


def test_too_many_invalid_rows_leave_no_metric_for_a_table():
    """Those of the paper's rule neither, and in each category of Arena-Hard for itself."""
    args = eval_benchmarks.Args("arenahard2")
    metrics = dict.fromkeys(("score", "score_style_controlled", "score_paper"), 50.0)
    numbers = metrics | {"n": 500, "n_invalid": 5}
    numbers["creative_writing"] = metrics | {"n": 100, "n_invalid": 30}
    eval_benchmarks.withhold_metrics(args, numbers)
    assert numbers["score_paper"] == 50 and "withheld" not in numbers  # 1 % is not more than 1 %
    creative = numbers["creative_writing"]
    assert creative["withheld"] == metrics
    assert [creative[metric] for metric in metrics] == [None, None, None]

    args = eval_benchmarks.Args("alpacaeval2")
    numbers = dict.fromkeys(BENCHMARKS["alpacaeval2"].metrics, 40.0) | {"n": 805, "n_invalid": 242}
    eval_benchmarks.withhold_metrics(args, numbers)
    lines = eval_benchmarks.index_rows(args, numbers, "f")
    assert len(lines) == 4 and all(line["value"] is None for line in lines)
    numbers = {"accuracy": 0.5, "maj@4": 0.6, "pass@4": 0.7, "n": 4, "n_invalid": 1}
    eval_benchmarks.withhold_metrics(eval_benchmarks.Args("gsm8k"), numbers)
    assert (numbers["accuracy"], numbers["maj@4"]) == (None, None)


def test_stored_rows_have_no_metric_either_if_too_many_are_invalid(tmp_path):
    data = write(tmp_path / "test.jsonl", [{"question": q, "answer": "#### 1"} for q in "ab"])
    rows = [{"question": "a", "response": "#### 1"}, {"question": "b", "response": None}]
    out = score("gsm8k", rows, data, tmp_path, max_invalid=0.01)
    assert (out["n"], out["n_invalid"], out["accuracy"]) == (2, 1, None)
    assert out["withheld"]["accuracy"] == 1
    assert score("gsm8k", rows, data, tmp_path, max_invalid=0.5)["accuracy"] == 1


def test_a_line_of_runs_csv_counts_what_its_value_is_of():
    """Instructions for instruction_*."""
    args = eval_benchmarks.Args("ifeval")
    numbers = {"prompt_strict": 0.0, "interval": (0.0, 0.0), "n": 3, "n_invalid": 1, "n_instructions": 4}
    numbers |= {"instruction_strict": 0.5, "prompt_loose": 1.0, "instruction_loose": 1.0}
    lines = {line["metric"]: line for line in eval_benchmarks.index_rows(args, numbers, "f")}
    assert [lines[metric]["n"] for metric in ("prompt_strict", "instruction_strict")] == [3, 4]
    assert (lines["prompt_strict"]["low"], lines["prompt_strict"]["high"]) == (0, 0)


def test_a_withheld_value_has_no_interval_in_runs_csv(tmp_path):
    (tmp_path / "run").mkdir()
    withheld = {"metric": "x", "value": None, "low": -20, "high": 40}
    scoring.add_to_index(tmp_path / "run", [withheld, withheld | {"metric": "y", "value": 10}])
    lines = list(csv.DictReader(open(tmp_path / "runs.csv")))
    assert [(line["value"], line["low"], line["high"]) for line in lines] == [
        ("", "", ""),
        ("10.0", "-20.0", "40.0"),
    ]


def test_the_paper_s_protocol_takes_the_first_reply(monkeypatch, tmp_path):
    """Of each benchmark with a judge; the official protocol asks again."""
    asked = []

    def ask(args, requests, parse, run, attempts):
        asked.append((parse, attempts))
        return []

    for name in ("criteria.txt", "negative_criteria.txt"):
        (tmp_path / name).write_text("Coherent\n")
    monkeypatch.setattr(eval_benchmarks.shared, "ask_judge", ask)
    for name in ("alpacaeval2", "arenahard2", "creativewriting3"):
        for protocol in ("paper", "official"):
            args = eval_benchmarks.Args(name, str(tmp_path), protocol=protocol)
            eval_benchmarks.judge(args, [], tmp_path)
    assert [attempts for _, attempts in asked] == [1, 4] * 3
    for parse, _ in asked[2:]:
        with pytest.raises(ValueError):
            parse("I cannot say.")


def test_a_fingerprint_is_of_the_truth_and_of_the_judges_files(tmp_path):
    """Tasks with one prompt and another right answer, and a retrained judge, are another benchmark."""
    task = {"question": "How much?", "answer": "#### 1", "position": 0}
    args = eval_benchmarks.Args("gsm8k", seed=0)
    first = eval_benchmarks.make_fingerprint(args, [task])
    args.seed = 1
    assert eval_benchmarks.make_fingerprint(args, [task]) == first
    assert eval_benchmarks.make_fingerprint(args, [task | {"answer": "#### 2"}]) != first
    weights = tmp_path / "model.safetensors"
    args.judge = f"local:{tmp_path}"
    hashes = set()
    for content in ("one", "two"):
        weights.write_text(content)
        args.name = "arenahard2"
        arena = {"prompt": "Do.", "category": "hard_prompt", "baseline": {"answer": "."}}
        hashes.add(eval_benchmarks.make_fingerprint(args, [arena]))
    assert len(hashes) == 2


def test_stored_rows_of_ifeval_are_found_by_their_prompts():
    tasks = [{"key": key, "prompt": f"Do {key}."} for key in (1, 2)]
    rows = [{"prompt": "Do 2.", "response": "x"}, {"key": 1, "response": "x"}]
    assert [result["key"] for result in scoring.match_rows(rows, tasks, ifeval.KEYS, "rows")] == [2, 1]


REWARD_MODEL = ("--reward-model", "data/toy/reward_model", "--reward-on", "response")


def test_best_of_n_by_a_reward_model(run, tmp_path, judge, judge_server):
    """Several answers are scored each; of a judged task only the one with the highest reward goes to the judge."""
    data = write(
        tmp_path / "test.jsonl", [{"question": f"How much is {i}?", "answer": "#### 1"} for i in range(3)]
    )
    several = ("--samples", 4, "--max-tokens", 96, "--think-format", "plain", *REWARD_MODEL)
    run("gsm8k", *MODEL, *several, "--data", data, "--out", tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(rows) == 12 and all(("reward" in row) == (row["status"] == "ok") for row in rows)
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(set(rewards)) > 2 and summary["proxy_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert summary["best@4"] == 0 and summary["best@4_interval"] == [0, 0]
    assert summary["tokens_per_task"] == sum(row["n_tokens"] for row in rows) / 3
    index = list(csv.DictReader(open(tmp_path / "runs.csv")))
    assert [row["metric"] for row in index] == ["accuracy", "maj@4", "best@4"]

    prompts = [{"uid": uid, "category": "hard_prompt", "prompt": f"Do {uid}."} for uid in "abcd"]
    write(tmp_path / "question.jsonl", prompts)
    write(
        tmp_path / "baseline_o3-mini-2025-01-31.jsonl",
        [{"uid": uid, "answer": ".", "metadata": {}} for uid in "abcd"],
    )
    arena = ("arenahard2", *MODEL, *judge, "--data", tmp_path, *several)
    run(*arena, "--out", tmp_path / "judged")
    judged = rows_of(tmp_path / "judged")
    generations = rlmt_data.read_log(tmp_path / "judged" / "generations.jsonl")
    assert (len(judged), len(generations), len(judge_server.requests)) == (4, 16, 8)
    messages = {row["id"]: row["messages"] for row in generations}
    scores = RewardModel("data/toy/reward_model", "response", "plain")
    for position, row in enumerate(judged):
        group = [other for other in generations if other["id"].startswith(f"{position}-")]
        group.sort(key=lambda other: other["id"])
        found = scores.score([messages[other["id"]] for other in group], [other["text"] for other in group])
        found = [
            reward if other["status"] == "ok" else -math.inf
            for reward, other in zip(found, group, strict=True)
        ]
        assert row["text"] == group[found.index(max(found))]["text"]
    assert len({row["text"] for row in generations}) == 16


@pytest.mark.parametrize(
    "words, message",
    [
        (["gsm8k"], "--data is missing"),
        (["gsm8k", "--data", "."], "--model is missing"),
        (["gsm8k", "--data", "no/such", "--model", "m"], "neither a file or folder here, nor can any split"),
        (["arenahard2", "--data", ".", "--model", "m"], "needs --judge"),
        (["gsm8k", "--data", ".", "--model", "m", "--judge", "j"], "has no judge"),
        (["alpacaeval2", "--data", ".", "--model", "m", "--judge", "local:x"], "log-probabilities"),
        (["ifeval", "--data", ".", "--model", "m", "--samples", "2"], "one answer a task"),
        (["gsm8k", "--data", ".", "--model", "m", "--samples", "0"], "use 1 or more"),
    ],
)
def test_what_cannot_run_is_said_first(words, message, run):
    assert message in run(*words, code=2)


def test_wildbench_g_is_wildbench_with_its_references(monkeypatch):
    words = "--data t.jsonl --temperature 0.5 --orders random"
    for given, top_p in (("", 0.95), (" --top-p 0.8", 0.8)):
        command = eval_benchmarks.wildbench_command((words + given).split())
        monkeypatch.setattr(sys, "argv", command[1:])
        args = runs.parse_args(eval_wildbench.Args, {})
        assert (args.mode, tuple(args.references), args.orders) == ("reward", ("gemini-flash",), "random")
        assert (str(args.tasks), tuple(args.temperatures), args.top_p) == ("t.jsonl", (0.5,), top_p)
    for words in ("--data=t.jsonl --protocol paper", "--data t.jsonl --protocol=paper"):
        command = eval_benchmarks.wildbench_command(words.split())
        monkeypatch.setattr(sys, "argv", command[1:])
        args = runs.parse_args(eval_wildbench.Args, {})
        assert (str(args.tasks), args.protocol, args.orders) == ("t.jsonl", "paper", "random")


# --- everything is checked before it costs


def refuses(run, message: str, *words, out: Path) -> None:
    """Checks that a run and its dry run are refused with the message, and that neither makes a folder."""
    for mode in ((), ("--dry-run",)):
        assert message in run(*words, "--out", out, *mode, code=2)
        assert not out.exists()


IFEVAL_TASK = {"key": 1, "prompt": "Say it.", "kwargs": [{}]}


@pytest.mark.parametrize("name, known", [("ifeval", "punctuation:no_comma"), ("ifbench", "words:palindrome")])
def test_missing_nltk_data_is_said_before_anything_is_generated(name, known, run, tmp_path, monkeypatch):
    data = write(tmp_path / "data.jsonl", [IFEVAL_TASK | {"instruction_id_list": [known]}])
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    ifeval.ifeval_checkers.cache_clear()
    ifbench.require_nltk_data.cache_clear()
    refuses(run, "python -m nltk.downloader punkt_tab", name, *MODEL, "--data", data, out=tmp_path / "run")


@pytest.mark.parametrize(
    "words, message",
    [
        (("--judge", "local:data/toy/bsae"), "data/toy/bsae is neither a model folder"),
        (("--judge", "gpt-4.1"), "set OPENAI_API_KEY"),
        (("--judge", "gpt-4.1", "--model", "data/toy/bsae"), "data/toy/bsae is neither a model folder"),
        (("--judge", "j", "--judge-url", "http://h/v1", "--key-env", "h"), "--key-env, word 1"),
    ],
)
def test_a_judge_or_model_that_is_not_there_is_said_before_anything_is_generated(
    words, message, run, tmp_path, monkeypatch
):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    write(tmp_path / "question.jsonl", [{"uid": "u", "category": "hard_prompt", "prompt": "Do."}])
    write(tmp_path / "baseline_o3-mini-2025-01-31.jsonl", [{"uid": "u", "answer": ".", "metadata": {}}])
    refuses(run, message, "arenahard2", *MODEL, *words, "--data", tmp_path, out=tmp_path / "run")


def test_a_local_judge_has_room_for_the_reply_that_the_protocol_asks_for(run, tmp_path, local_judge_folder):
    """Its context has 512 tokens, and no --judge-max-tokens is given."""
    write(tmp_path / "question.jsonl", [{"uid": "u", "category": "hard_prompt", "prompt": "Do."}])
    write(tmp_path / "baseline_o3-mini-2025-01-31.jsonl", [{"uid": "u", "answer": ".", "metadata": {}}])
    arena = ("arenahard2", *MODEL, "--judge", f"local:{local_judge_folder}", "--data", tmp_path)
    for protocol, tokens in (("official", 16000), ("paper", 3072)):
        message = f"--judge-max-tokens {tokens} leaves no room for a prompt in the 512 tokens"
        refuses(run, message, *arena, "--protocol", protocol, out=tmp_path / "run")
    run(*arena, "--judge-max-tokens", 8, "--dry-run", "--out", tmp_path / "run")


def test_a_machine_without_a_sandbox_is_said_before_anything_is_generated(run, tmp_path, no_sandbox):
    task = {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "test": "",
        "canonical_solution": "",
    }
    data = write(tmp_path / "data.jsonl", [task])
    refuses(run, "apt install bubblewrap", "humaneval", *MODEL, "--data", data, out=tmp_path / "run")


def test_a_missing_baseline_is_said_before_anything_is_generated(run, tmp_path, judge, judge_server):
    """Of Arena-Hard's baseline, one answer; of AlpacaEval's gamed baselines, the file, and one instruction."""
    prompts = [{"uid": uid, "category": "hard_prompt", "prompt": "Do."} for uid in "ab"]
    write(tmp_path / "question.jsonl", prompts)
    write(tmp_path / "baseline_o3-mini-2025-01-31.jsonl", [{"uid": "a", "answer": ".", "metadata": {}}])
    arena = ("arenahard2", *MODEL, *judge, "--data", tmp_path)
    refuses(run, "has the answer to prompt b", *arena, out=tmp_path / "run")

    (tmp_path / "alpaca").mkdir()
    data = write(tmp_path / "alpaca" / "baseline.json", [{"instruction": i, "output": "."} for i in "ab"])
    alpaca = ("alpacaeval2", *MODEL, *judge, "--data", data.parent)
    refuses(run, "*gamed*.csv*", *alpaca, out=tmp_path / "run")
    (data.parent / "gamed.csv").write_text(
        "instruction_index,std_delta_len,instruction_difficulty,preference\n0,0.1,0.1,1\n"
    )
    refuses(run, "lack instruction 1", *alpaca, out=tmp_path / "run")
    assert not judge_server.requests and not judge_server.checks


def test_a_dry_run_asks_the_judge_for_one_token(run, tmp_path, judge, judge_server):
    prompts = [{"uid": "a", "category": "hard_prompt", "prompt": "Do."}]
    write(tmp_path / "question.jsonl", prompts)
    write(tmp_path / "baseline_o3-mini-2025-01-31.jsonl", [{"uid": "a", "answer": ".", "metadata": {}}])
    run("arenahard2", *MODEL, *judge, "--data", tmp_path, "--dry-run", "--out", tmp_path / "run")
    assert not judge_server.requests
    assert [request["max_tokens"] for request, _ in judge_server.checks] == [1]
    assert not (tmp_path / "run").exists()
