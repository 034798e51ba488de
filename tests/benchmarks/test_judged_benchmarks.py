"""AlpacaEval, Arena-Hard and Creative Writing: agreement with published scores, how verdicts are read, and
whole runs of eval_benchmarks.py with a real HTTP judge."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import PUBLISHED, table
from conftest import shared as stored
from test_benchmarks import COMMAND, score, write

import eval_wildbench
from benchmarks import alpacaeval2, arenahard2, creativewriting3
from benchmarks.judge import Judge, text_of_verdict
from benchmarks.table import BENCHMARKS
from benchmarks.wildbench import read_verdict
from rlmt.data import read_log, read_rows
from rlmt.endpoint import TWO_LINES


# --- the one reader of verdicts

DRAFT = '{"score": "2"} no, better'


@pytest.mark.parametrize(
    "text, finish_reason, mark",
    [
        ('{"score": "7"}', "stop", "7"),
        ('```json\n{"score": " 7 "}\n```', "stop", "7"),
        ('The answer says {"score": "7"}', "stop", None),
        ('```json\n{"score": "7"}\n```\nis what it says', "stop", None),
        (f'[THINK]{DRAFT}[/THINK]{{"score": "7"}}', "stop", "7"),
        (f'<seed:think>{DRAFT}</seed:think>{{"score": "7"}}', "stop", "7"),
        (f'analysis{DRAFT}assistantfinal{{"score": "7"}}', "stop", "7"),
        ('[THINK]{"score": "7"}[/THINK]', "stop", None),
        (f'<think>{DRAFT}</think>{{"score": "7"}}', "stop", "7"),
        (f'{DRAFT}</think>{{"score": "7"}}', "stop", "7"),  # the template opened the thinking
        (f'<think>{DRAFT}</think><think>{DRAFT}</think>{{"score": "7"}}', "stop", "7"),
        (f'<|channel|>analysis<|message|>{DRAFT}<|channel|>final<|message|>{{"score": "7"}}', "stop", "7"),
        (f"<think>{DRAFT}", "stop", None),
        (DRAFT, "length", None),  # the template opened the thinking
        (f"<|channel|>analysis<|message|>{DRAFT}", "stop", None),
        (f"Let me see.\n<think>\n{DRAFT}", "stop", None),
        (f"{DRAFT}</think>", "stop", None),
        (f'<think>a</think>{DRAFT} {{"score": "7"}}', "stop", None),
        ('{"score":"1', "length", None),  # cut from 10
        ('{"score":"1', "stop", None),
        ('{"score": "7"}', "length", None),
        ('{"score": "7"}', "content_filter", None),
    ],
)
def test_a_verdict_is_what_follows_the_thinking_of_a_whole_reply(serve, tmp_path, text, finish_reason, mark):
    body = {"message": {"content": text}, "finish_reason": finish_reason}
    server = serve(lambda text, n: (200, {"choices": [body]}))
    judge = Judge(eval_wildbench.Args(judge="j", judge_url=server.url))
    request = judge.request([{"role": "user", "content": "Q"}])
    [reply] = judge.ask([request], lambda text: read_verdict(text, "score"), tmp_path)
    assert reply.value == mark and bool(reply.error) == (mark is None)
    assert text_of_verdict(reply) == ("" if mark is None else text)
    assert len(server.requests) == (1 if mark else 4)


NO_VERDICTS = [  # a reader, and replies that it refuses
    (
        alpacaeval2.parse_reply,
        [
            '{"output": null}',
            '{"output": "A"}',
            '{"output": [{"model": "a", "rank": 1}]}',
            '{"output": [{"model": ["A"], "rank": 1}]}',
            '{"output": [{"model": {"A": 1}, "rank": 1}]}',
            '{"output": [{"model": "A", "rank": 2}]}',
            '{"output": [{"model": "A", "rank": "first"}]}',
            '{"output": [{"model": "A", "rank": Infinity}]}',
            '{"output": [{"model": "A", "rank": 1}',
        ],
    ),
    (
        arenahard2.parse_reply,
        [
            "[[A]]",
            "[[A > B]]",
            "[[A>>>B]]",
            "[[C>B]]",
            "A>B wins",
            "(A>B)",
            "[[A>B]] [[AB]]",
            "[[]]",
            "[[A>B",
            "A>B]]",
        ],
    ),
    (creativewriting3.parse_reply, ["Coherent: twelve", "Coherent 12", "Coherent: 21"]),
    (
        partial(read_verdict, mode="reward"),
        [
            '{"choice": "a+"}',
            '{"choice": ["A+"]}',
            '{"choice": "A+", "choice": "B+"}',
            '{"Choice": "A+"}',
            '{"choice": "Ａ＋"}',
        ],
    ),
]


@pytest.mark.parametrize("read, texts", NO_VERDICTS)
def test_what_is_no_verdict_is_refused(read, texts):
    for text in ("", "A", "null", "{}", "[" * 9999, *texts):
        with pytest.raises(ValueError):
            read(text)


# --- AlpacaEval 2


@pytest.fixture(autouse=True)
def few_refits(monkeypatch):
    """Almost all the time of a score goes into its interval, which one test alone looks at."""
    monkeypatch.setattr(alpacaeval2, "REFITS", 10)


@pytest.mark.parametrize("model", ["FuseChat-Llama-3.1-8B-Instruct", "claude-2.1"])
def test_alpacaeval2_published(model, tmp_path):
    folder = PUBLISHED / "alpacaeval2"
    out = score("alpacaeval2", folder / f"annotations__{model}.jsonl.gz", folder, tmp_path)
    row = next(row for row in table(folder / "expected.csv") if row["model"] == model)
    assert abs(out["lc_win_rate"] - float(row["published_length_controlled_win_rate"])) < 0.15
    for key, column, tolerance in (
        ("lc_win_rate", "recomputed_lc_official_fit", 1e-4),
        ("win_rate", "published_win_rate", 1e-9),
        ("discrete_win_rate", "published_discrete_win_rate", 1e-9),
        ("win_rate_paper", "rlmt_variant_win_rate", 1e-6),
        ("lc_win_rate_paper", "rlmt_variant_lc_win_rate", 1e-5),
        ("avg_length", "recomputed_avg_length_chars", 1e-3),
    ):
        assert out[key] == pytest.approx(float(row[column]), abs=tolerance, rel=0), key
    assert (out["n"], out["n_invalid"], out["n_missing"], len(out["rows"])) == (805, 0, 0, 805)


@pytest.mark.parametrize(
    "text, winner",
    [
        ('{"output": [{"model": "B", "rank": 2}, {"model": "A", "rank": 1}]}', "A"),
        # the paper's rule: the first
        ('{"output": [{"rank": 1, "model": "B"}, {"rank": 1, "model": "A"}]}', "B"),
        ('{"output": [{"model": "C", "rank": 1}, {"model": "A", "rank": 1}]}', "A"),
        ('```json\n{"output": [{"model": "A", "rank": "1"}]}\n```', "A"),  # as int() has it
    ],
)
def test_parse_alpacaeval2(text, winner):
    assert alpacaeval2.parse_reply(text) == winner


# --- Arena-Hard v2


def test_arenahard2_expected(tmp_path):
    folder = PUBLISHED / "arena_hard_v2"
    out = score("arenahard2", folder / "synthetic_verdicts__llama3.1-8b-instruct.jsonl.gz", folder, tmp_path)
    expected = json.loads((folder / "synthetic_expected__llama3.1-8b-instruct.json").read_text())
    assert out["score"] == pytest.approx(expected["plain_weighted_mean_percent"], abs=1e-5)
    assert out["score_paper"] == pytest.approx(expected["rlmt_variant_win_rate_percent"], abs=1e-5)
    low, high = out["score_style_controlled_interval_90"]
    assert low < out["score_style_controlled"] < high
    assert (out["n"], out["n_invalid"]) == (500, 500 - expected["rows_with_both_verdicts"])
    styles = []
    outcomes = []
    for row in out["rows"]:
        if "invalid" in row:
            continue
        value_of_baseline, weight1 = arenahard2.VERDICTS[row["game1"]]
        value_of_model, weight2 = arenahard2.VERDICTS[row["game2"]]
        outcomes += [1 - value_of_baseline] * weight1 + [value_of_model] * weight2
        styles += [row["style"]] * (weight1 + weight2)
    assert len(styles) == expected["battles_after_weighting"]
    assert np.allclose(np.mean(styles, axis=0), expected["feature_means"], atol=1e-6)
    features = arenahard2.scale_features(np.array(styles))
    assert np.allclose(features * expected["feature_stds_ddof1"], styles)
    # the official tool, run on one model, first takes away the model's own mean; we do not
    centred = arenahard2.bradley_terry(features - features.mean(axis=0), np.array(outcomes))
    assert centred == pytest.approx(expected["style_control_length_markdown_percent"], abs=1e-5)


@pytest.mark.parametrize(
    "text, label",
    [
        (" b>>a ", "B>>A"),
        ("First [[A>B]], on reflection [[B>A]].", "B>A"),
        ("[a=b]", "A=B"),
        ("[[A=B]] and later [B>>A]", "A=B"),  # double brackets first
        ("My verdict is: [[A<<B]]", "A<<B"),
        ("**[[A>B]]**\n", "A>B"),
    ],
)
def test_parse_arenahard2(text, label):
    assert arenahard2.parse_reply(text) == label


def test_arenahard2_style_is_that_of_the_published_answers():
    rows = read_rows(
        stored("arena_hard_v2/baseline_o3-mini-2025-01-31.jsonl.gz"), "uid", "answer", "metadata"
    )
    has_tokens = arenahard2.style("")  # tiktoken downloads its table once
    for row in rows:
        expected = dict(row["metadata"])
        if has_tokens:
            assert arenahard2.style(row["answer"]) == expected
        del expected["token_len"]
        assert arenahard2.markdown_counts(row["answer"]) == expected
    assert len(rows) == 500


# --- CreativeWriting v3


@pytest.mark.parametrize("model", ["meta-llama__llama-3.1-8b-instruct", "claude-3-5-sonnet-20241022"])
def test_creativewriting3_published(model, tmp_path):
    folder = PUBLISHED / "creativewritingv3"
    file = folder / f"judge_texts__{model}.jsonl.gz"
    out = score("creativewriting3", file, folder, tmp_path)
    published = [row["published_item_score"] for row in read_rows(file, make_ids=False)]
    # each has one item whose judge writes "Tell-Don't Show", which is no criterion and not turned round there
    assert sum(row["shown"] != value for row, value in zip(out["rows"], published, strict=True)) == 1
    expected = next(row for row in table(folder / "expected.csv") if row["model"] == model)
    iterations = [float(expected[f"published_avg_iteration_{i}"]) for i in (1, 2, 3)]
    assert out["iterations"] == pytest.approx(iterations, abs=0.11)
    assert out["overall"] == pytest.approx(float(expected["recomputed_overall_0_100"]), abs=0.04)
    assert (out["n"], out["n_invalid"], out["n_incomplete"], out["n_missing"]) == (96, 0, 0, 0)


@pytest.mark.parametrize(
    "text, marks",
    [
        ("Coherent: 12\nElegant Prose: 7.5", {"Coherent": 12, "Elegant Prose": 7.5}),
        ("Coherent: Score 12", {"Coherent": 12}),
        ("Coherent: 3\nCoherent: [5]\nCoherent: 4", {"Coherent": 5}),  # brackets later
        ("Coherent: 20\nMeandering: 21\nOverwrought: 200", {"Coherent": 20}),
        ("Coherent: -3", {"Coherent": -3}),
        ("Coherent: 4/20", {"Coherent": 4}),
        ("Coherent:\n 4", {"Coherent": 4}),
    ],
)
def test_parse_creativewriting3(text, marks):
    assert creativewriting3.parse_reply(text) == marks


@pytest.fixture
def creative(tmp_path) -> Path:
    """A folder of data with one prompt."""
    prompt = {
        "title": "T",
        "category": "noir",
        "writing_prompt": "On <SEED>.",
        "seed_modifiers": ["a", "b", "c"],
    }
    folder = tmp_path / "creative"
    folder.mkdir()
    write(folder / "prompts_v3.json", {"1": prompt})
    (folder / "criteria.txt").write_text("Coherent\nMood\nMeandering")
    (folder / "negative_criteria.txt").write_text("Meandering")
    return folder


def test_a_reply_that_ends_before_its_last_mark_is_invalid(creative):
    """Its analysis and first marks are numbers, of which the paper's code makes a score."""
    texts = ["[Analysis]\nStrengths: 3 images", "Coherent: 10\nMood: 12", "Coherent: 10\nMeandering: -5"]
    rows = [{"title": "Noir: T", "iteration": i, "judge_text": text} for i, text in enumerate(texts, 1)]
    out = score("creativewriting3", rows, creative, creative)
    assert (out["n"], out["n_invalid"], out["n_incomplete"]) == (3, 2, 2)
    assert (out["overall"], out["iterations"]) == (50, [50])
    # a mark of -5 would be worth 25 of 20, and is dropped
    assert out["overall_paper"] == pytest.approx((15 + 55 + 50) / 3)
    assert out["rows"][1]["invalid"] == "incomplete: marks of 2 of 3 criteria"
    some = "Coherent: 3\nMeandering: 4"
    (creative / "criteria.txt").write_text("Coherent\nMood\nStyle\nPace\nMeandering")
    with pytest.raises(ValueError, match="incomplete: marks of 2 of 5"):  # the last is there
        creativewriting3.parse_reply(some, creative)
    # over prompts, of which there is one: its iterations are no further tasks
    assert out["overall_interval"] == [50, 50]


# --- whole runs


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
        return 200, {"choices": [choice | {"finish_reason": "length"}]}
    winner, loser = "AB" if longer(text, "Answer of A:", "Answer of B:") else "BA"
    return json.dumps({"output": [{"model": winner, "rank": 1}, {"model": loser, "rank": 2}]})


def test_alpacaeval2_judged_by_both_protocols(here, tmp_path, serve):
    """Half of the baseline answers are longer than anything 16 tokens can be: there the model loses."""
    server = serve(prefer_the_longer)
    baseline = [{"instruction": f"Say {i}.", "output": "word " * (i % 2 * 200) + "."} for i in range(10)]
    write(tmp_path / "baseline.json", baseline)
    lines = [f"{i},{(-1) ** i},{i / 10 - 1},0.3\n" for i in range(10)]
    header = "instruction_index,std_delta_len,instruction_difficulty,preference\n"
    (tmp_path / "gamed.csv").write_text(header + "".join(lines))
    command = (*COMMAND, tmp_path, "alpacaeval2", "--judge", "longer", "--judge-url", server.url)
    for protocol, won in (("official", 1.75), ("paper", 2.0)):
        done = here(*command, "--protocol", protocol, "--out", tmp_path / protocol)
        assert done.returncode == 0, done.stderr
        for i, row in enumerate(read_log(tmp_path / protocol / "rows.jsonl")):
            expected = won if len(row["output_2"]) > len(baseline[i]["output"]) else 3 - won
            assert row["preference"] == pytest.approx(expected) and row["index"] == i
    summary = json.loads((tmp_path / "official" / "summary.json").read_text())
    assert summary["n"] == 10 and summary["n_invalid"] == 0 and summary["win_rate"] < 75
    assert summary["replied"] == {}  # that server does not say
    one = read_log(tmp_path / "official" / "rows.jsonl")[:1]  # as of --limit 1
    assert math.isfinite(alpacaeval2.score(one, tmp_path, "rows")["lc_win_rate"])
    # a judge that is read in the check, and later not: no headline
    server.behave = lambda text, n: prefer_the_longer(text, n) if TWO_LINES in text else "I cannot say."
    here(*command, "--protocol", "paper", "--seed", 1, "--out", tmp_path / "prose")
    summary = json.loads((tmp_path / "prose" / "summary.json").read_text())
    assert (summary["n_invalid"], summary["replied"]["judge"]) == (10, ["m"])
    assert all(summary[metric] is None for metric in BENCHMARKS["alpacaeval2"].metrics)
    # a judge that thinks first, or gives no log-probabilities, is found by the check
    tops = [{"token": "<think>", "logprob": -0.1}, {"token": "m", "logprob": -4.0}]
    for logprobs in ({"content": [{"top_logprobs": tops}]}, None):
        choice = {"message": {"content": "m"}, "logprobs": logprobs}
        server.behave = lambda text, n, choice=choice: (200, {"choices": [choice]})
        done = here(*command, "--out", tmp_path / "none")
        assert done.returncode == 2 and "--protocol paper" in done.stderr and not (tmp_path / "none").exists()
