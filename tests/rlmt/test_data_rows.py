"""rlmt/data.py: rows in every form and place, broken files, prompts that are too long."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from rlmt import data as sources
from rlmt import chat as templates
import utils
from rlmt.data import check_ids, load_held_out, load_prompts, read_pairs, read_prompts, read_rows, read_traces

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ROOT.parent / "shared" / "data" / "wildchat_if" / "wildchat-if_val.parquet"

ROWS = [
    {"id": f"r{i}", "messages": [{"role": "user", "content": f"Frage {i} \u05d0\u2028 \U0001f914"}], "n": i}
    for i in range(3)
]
GOOD = ROWS[0]


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def write(path, rows):
    """Writes rows in the format that the file's name says; a string or bytes are a line as they are."""
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
        return path
    lines = []
    for row in rows:
        if not isinstance(row, str | bytes):
            row = json.dumps(row, ensure_ascii=False)
        lines.append(row.encode() if isinstance(row, str) else row)
    data = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# --- files


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_read_rows(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    assert read_rows(path, "messages", "n") == ROWS
    assert read_rows(str(path)) == ROWS
    without_id = [{"prompt": row["messages"], "data": {"i": row["n"]}} for row in ROWS]
    read = read_rows(write(tmp_path / f"prompt_{name}", without_id), "messages")
    assert [row["messages"] for row in read] == [row["messages"] for row in ROWS]
    assert [row["data"] for row in read] == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert not any("id" in row for row in read_rows(tmp_path / f"prompt_{name}", make_ids=False))
    assert read_rows(path, make_ids=False) == ROWS
    assert len({row["id"] for row in read}) == 3 and all(row["id"].startswith("prompt_rows") for row in read)


NOT_MESSAGES = [
    5,
    [5],
    ["What?"],
    [{"role": "user"}],
    [{"content": "What?"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": ["What?"]}],
    [{"role": 1, "content": "What?"}],
    [*GOOD["messages"], {"role": "user"}],
]
BAD_LINES = [  # (line, what the error must name)
    ({"id": "x", "n": 1}, "the row has id, n; data/README.md has the forms"),
    ({"id": "x", "n": 1, "messages": None}, "'prompt' must be a text or a list"),
    ({"id": "x", "n": 1, "messages": []}, "must end with a user's text"),
    ({"id": "x", "messages": GOOD["messages"], "n": None}, "'n'"),
    *[
        ({"id": "x", "n": 1, "messages": messages}, "'messages' must be a text or")
        for messages in NOT_MESSAGES
    ],
    ('{"id": "x", "messages": [', "not JSON"),
    ("id,messages", "not JSON"),
    (b'{"id": "\xff"}', "not JSON"),
]


def test_a_bad_line_is_named(tmp_path, exits):
    for line, named in BAD_LINES:
        path = write(tmp_path / "rows.jsonl", [GOOD, line, GOOD])
        error = exits(read_rows, path, "messages", "n")
        assert error.startswith(f"error: {path}:2: ") and named in error, line
    path = write(tmp_path / "rows.jsonl.gz", [GOOD, "{", GOOD])
    assert exits(read_rows, path).startswith(f"error: {path}:2: not JSON")
    path = write(tmp_path / "rows.parquet", [GOOD, {"id": "x", "messages": GOOD["messages"]}])
    assert exits(read_rows, path, "messages", "n").startswith(f"error: {path}:2: no field 'n'")


def test_a_file_that_is_missing_empty_or_damaged_is_named(tmp_path, exits):
    assert f"{tmp_path}/no.jsonl: no such file" in exits(read_rows, tmp_path / "no.jsonl")
    assert "no rows" in exits(read_rows, write(tmp_path / "empty.jsonl", []))
    for name, content in (
        ("a.jsonl.gz", gzip.compress(b'{"messages": 1}' * 99, mtime=0)[:-20]),
        ("b.jsonl.gz", b"{}"),
        ("c.parquet", b""),
        ("d.parquet", b"PAR1 and no more PAR1"),
    ):
        (tmp_path / name).write_bytes(content)
        assert f"{name}: cannot be read" in exits(read_rows, tmp_path / name, "messages")


def test_rows_of_a_conversation(tmp_path, exits):
    """Empty lines are skipped; an unknown role or an empty question is an error with its line."""
    path = tmp_path / "p.jsonl"

    def write_conversations(*conversations):
        lines = [json.dumps({"messages": messages}) for messages in conversations]
        path.write_text("\n" + "\n \n".join(lines) + "\n\n")

    write_conversations([turn("user", "a")], [turn("system", "s"), turn("user", "b")])
    assert [row["id"] for row in read_rows(path, "messages")] == ["p-1", "p-3"]
    write_conversations([turn("user", "a")], [turn("human", "b")])
    assert "p.jsonl:4: a prompt must" in exits(read_rows, path, "messages")
    for messages in ([turn("user", " \n")], [turn("user", "a"), turn("assistant", "b")]):
        write_conversations(messages)
        assert "p.jsonl:2: a prompt must end with a user's text" in exits(read_rows, path, "messages")


# --- forms of prompts, traces and pairs

QUESTION = [turn("system", "s"), turn("user", "q")]
THOUGHT = "<think>\nz\n</think>\n\ny"
ZERO = "<think> z </think> <response> y </response>"
APART = {"role": "assistant", "content": "y", "thinking": "z"}
TRACES = [  # all are the trace of z and y to the question
    {"messages": QUESTION, "thinking": "z", "response": "y"},
    {"messages": [*QUESTION, turn("assistant", "the source's")], "thought": "z", "response": "y"},
    {"messages": [*QUESTION, turn("assistant", THOUGHT)], "text": "as the authors' SFT reads it"},
    {"messages": [*QUESTION, turn("assistant", THOUGHT.replace("\n\ny", "\ny"))]},
    {"messages": [*QUESTION, turn("assistant", ZERO)]},
    {"messages": [*QUESTION, APART]},
    {"messages": [*QUESTION, turn("assistant", "y")], "reasoning_content": "z"},
    {"messages": [*QUESTION, turn("assistant", "y")], "reasoning": "z", "reasoning_content": None},
    {"messages": [*QUESTION, {**turn("assistant", "y"), "reasoning": "z"}]},
    {"messages": [*QUESTION, {**turn("assistant", THOUGHT), "reasoning_content": ""}]},
    {"messages": QUESTION, "response": THOUGHT, "thinking": "", "finish_reason": "stop"},
    {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": THOUGHT},
        ]
    },
    {"prompt": QUESTION, "completion": [turn("assistant", THOUGHT)]},
    {"prompt": QUESTION, "completion": THOUGHT},
    {"prompt": QUESTION, "output": ZERO},
    {"prompt": QUESTION, "response": THOUGHT},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_forms_of_a_trace(tmp_path, name):
    path = tmp_path / name
    for trace in TRACES:
        if name == "rows.json":
            path.write_text(json.dumps([trace], indent=4))  # as the authors write theirs
        else:
            write(path, [trace])
        (read,), dropped = read_traces(path)
        found = {key: read[key] for key in ("id", "messages", "thinking", "response")}
        assert found == {"id": "rows-0", "messages": QUESTION, "thinking": "z", "response": "y"}, trace
        assert dropped == []
    write(tmp_path / "text.jsonl", [{"prompt": "q", "completion": THOUGHT, "teacher": "T"}])
    ((read,), _) = read_traces(tmp_path / "text.jsonl")
    assert (read["messages"], read["thinking"], read["teacher"]) == ([turn("user", "q")], "z", "T")


def test_a_trace_without_thinking(tmp_path):
    """Ordinary SFT rows are traces with empty thinking, whatever their answer is called."""
    question = {"prompt": "q"}
    whole = {"messages": [turn("user", "q"), turn("assistant", "y")]}
    lines = [question | {"response": "y"}, question | {"completion": "y"}, question | {"output": "y"}, whole]
    traces, dropped = read_traces(write(tmp_path / "t.jsonl", lines))
    for i in range(4):
        assert traces[i]["messages"] == [turn("user", "q")]
        assert (traces[i]["thinking"], traces[i]["response"]) == ("", "y")
    assert (len(traces), dropped) == (4, [])


def test_answers_that_fit_no_format_are_counted(tmp_path):
    answers = {
        "z </think> y": "no_open",
        "<think> z": "no_close",
        "<think> z <think> z </think> y": "nested",
        "<think> z </think>": "empty_response",
        "<think> z </think> y <response>": "no_open",
        ZERO + " P.S.": "text_after_response",
    }
    lines = [
        {"id": text, "messages": [*QUESTION, turn("assistant", text)]} for text in [*answers, THOUGHT, "y"]
    ]
    for reason in ("length", "content_filter"):
        lines.append({"id": reason, "prompt": "q", "completion": THOUGHT, "finish_reason": reason})
        answers[reason] = f"finish_reason_{reason}"
    lines.append({"id": "question", "messages": QUESTION})
    answers["question"] = "not_ending_in_assistant"
    traces, dropped = read_traces(write(tmp_path / "t.jsonl", lines))
    assert {row["id"]: row["reason"] for row in dropped} == answers
    assert [(row["id"], row["thinking"], row["response"]) for row in traces] == [
        (THOUGHT, "z", "y"),
        ("y", "", "y"),
    ]


def test_a_think_format_of_ones_own_is_split_too(tmp_path, monkeypatch):
    plan = utils.ThinkFormat(layout="<plan> {z} </plan> {y}", thinking_tags=("<plan>", "</plan>"))
    monkeypatch.setitem(utils.THINK_FORMATS, "plan", plan)
    path = write(tmp_path / "t.jsonl", [{"prompt": "q", "completion": "<plan> z </plan> y"}])
    ((trace,), _) = read_traces(path)
    assert (trace["thinking"], trace["response"]) == ("z", "y")


GOOD_ANSWER, BAD_ANSWER = turn("assistant", "good"), turn("assistant", "bad")
PAIRS = [  # all are the same pair
    {"messages": QUESTION, "chosen": "good", "rejected": "bad"},
    {"prompt": QUESTION, "chosen": "good", "rejected": "bad"},
    {"prompt": QUESTION, "chosen": [GOOD_ANSWER], "rejected": [BAD_ANSWER]},
    {"chosen": [*QUESTION, GOOD_ANSWER], "rejected": [*QUESTION, BAD_ANSWER]},
    {"prompt": "q", "chosen": [*QUESTION, GOOD_ANSWER], "rejected": [*QUESTION, BAD_ANSWER]},
    {  # UltraFeedback
        "prompt": "q",
        "messages": [*QUESTION, GOOD_ANSWER],
        "chosen": [*QUESTION, GOOD_ANSWER],
        "rejected": [*QUESTION, BAD_ANSWER],
    },
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_forms_of_a_pair(tmp_path, name):
    for pair in PAIRS:
        (read,), dropped = read_pairs(write(tmp_path / name, [pair]))
        assert (read["messages"], read["chosen"], read["rejected"]) == (QUESTION, "good", "bad"), pair
        assert dropped == []
        (prompt,) = read_prompts(tmp_path / name)  # the same rows as prompts
        assert prompt["messages"] == QUESTION

    # thinking in tags, as the authors build their pairs, or in fields of its own
    tagged = {"prompt": "q", "chosen": THOUGHT, "rejected": [turn("user", "q"), turn("assistant", ZERO)]}
    tagged["chosen"] = [turn("user", "q"), turn("assistant", THOUGHT)]
    apart = {"prompt": "q", "chosen": "y", "rejected": "y", "chosen_thinking": "z", "rejected_thinking": "z"}
    for pair in (tagged, apart):
        (read,), _ = read_pairs(write(tmp_path / name, [pair]))
        expected = {"chosen": "y", "rejected": "y", "chosen_thinking": "z", "rejected_thinking": "z"}
        assert read | expected | {"messages": [turn("user", "q")]} == read


def test_pairs_that_are_none_are_counted(tmp_path):
    other = [turn("user", "other"), BAD_ANSWER]
    lines = [
        {"id": "prompts", "chosen": [*QUESTION, GOOD_ANSWER], "rejected": other},
        {"id": "prompt", "prompt": [turn("user", "p")], "chosen": other, "rejected": other},
        {"id": "role", "chosen": QUESTION, "rejected": [*QUESTION, BAD_ANSWER]},
        {"id": "tags", "prompt": "q", "chosen": "<think> z", "rejected": "y"},
        {"id": "pair", "prompt": "q", "chosen": "y ", "rejected": "<response> y"},
    ]
    pairs, dropped = read_pairs(write(tmp_path / "p.jsonl", lines))
    reasons = {"prompts": "different_prompts", "prompt": "different_prompts"}
    reasons |= {"role": "not_ending_in_assistant", "tags": "no_close"}
    assert {row["id"]: row["reason"] for row in dropped} == reasons
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [("y ", "<response> y")]  # as they are


def test_forms_of_a_prompt(tmp_path):
    path = tmp_path / "p.jsonl"
    for row in ({"messages": QUESTION}, {"prompt": QUESTION}, {"messages": [*QUESTION, GOOD_ANSWER]}):
        (prompt,) = read_prompts(write(path, [row | {"answer": "4"}]))
        assert (prompt["messages"], prompt["answer"]) == (QUESTION, "4")
    (prompt,) = read_prompts(write(path, [{"prompt": "q", "completion": "y"}]))
    assert prompt["messages"] == [turn("user", "q")]

    tokenizer = AutoTokenizer.from_pretrained("data/toy/base", trust_remote_code=False)
    templates.prepare_tokenizer(tokenizer, "think")
    write(path, [{"prompt": "ham"}, {"messages": [turn("user", "ham"), GOOD_ANSWER]}])
    kept, _ = load_prompts(str(path), tokenizer, 100)
    assert kept[0]["prompt_ids"] == kept[1]["prompt_ids"]

    tokenizer.chat_template = "{{ raise_exception('no system turn') if messages[0].role == 'system' }}ham"
    write(path, [{"prompt": "ham"}, {"messages": QUESTION}])
    kept, dropped = load_prompts(str(path), tokenizer, 100)
    expected = {"id": "p-1", "reason": "refused by the chat template: no system turn"}
    assert len(kept) == 1 and dropped == [expected]


BAD_FORMS = [  # (reader, row, what the error must say of it)
    (read_prompts, {"text": "q"}, "'prompt' must be a text or a list of {'role', 'content'}, not None"),
    (read_prompts, {"prompt": 5}, "'prompt' must be"),
    (read_prompts, {"messages": [GOOD_ANSWER]}, "a prompt must end with a user's text"),
    (read_prompts, {"messages": [turn("human", "q")]}, "'human'"),
    (read_traces, {"prompt": "q", "thinking": "z"}, "'messages' must be"),
    (read_traces, {"prompt": "q", "response": 5}, "'response' must be"),
    (read_pairs, {"prompt": "q", "chosen": "y"}, "'rejected' must be"),
    (read_pairs, {"chosen": "y", "rejected": "z"}, "'prompt' must be"),
]


def test_a_row_of_another_form_is_named_with_its_fields(tmp_path, exits):
    good = {"prompt": "q", "completion": THOUGHT, "chosen": "y", "rejected": "z"}
    for reader, row, error in BAD_FORMS:
        path = write(tmp_path / "p.jsonl", [good, json.dumps(row)])
        found = exits(reader, path)
        assert found.startswith(f"error: {path}:2: ") and error in found, found
        assert f"the row has {', '.join(row)}" in found


# --- places


def test_folders_as_datasets_saves_them(tmp_path, exits, monkeypatch):
    """A data set, one with splits, and one as it is downloaded from the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    trace = {"messages": [*QUESTION, turn("assistant", THOUGHT)]}
    train = Dataset.from_list([trace, trace])
    splits = DatasetDict({"train": train, "test": Dataset.from_list([trace])})
    single = str(tmp_path / "single")
    whole = str(tmp_path / "whole")
    train.save_to_disk(single)
    splits.save_to_disk(whole)

    downloaded = str(tmp_path / "downloaded")
    (tmp_path / "downloaded" / "data").mkdir(parents=True)
    splits["train"].to_parquet(f"{downloaded}/data/train-00000-of-00001.parquet")
    splits["test"].select([0]).to_parquet(f"{downloaded}/data/test-00000-of-00002-6ef3991c06080e14.parquet")

    for name in (single, whole, f"{whole}:train", downloaded, f"{downloaded}:train"):
        traces, _ = read_traces(name)
        assert [row["thinking"] for row in traces] == ["z", "z"]
        assert len({row["id"] for row in traces}) == 2
        assert [len(prompt["messages"]) for prompt in read_prompts(name)] == [2, 2]
    assert len(read_traces(f"{whole}:test")[0]) == 1

    for name in (single, whole, downloaded):
        assert "no split 'val'; write " in exits(read_traces, f"{name}:val")
    (tmp_path / "single" / "data-00000-of-00001.arrow").unlink()
    assert f"{single}: cannot be read" in exits(read_traces, single)


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing:train", "nobody/nothing:main:train"])
def test_a_name_that_is_not_here_is_asked_of_the_hub(name, capsys):
    """There is none here; the error is one line that names flag and remedy."""
    with pytest.raises(SystemExit) as stop:
        read_traces(name)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: --traces {name}: cannot be read, here or from the hub")


def test_an_evaluation_reads_the_split_test_or_the_first_one(tmp_path, monkeypatch):
    """A folder stands in for a data set of the hub: the same call of the same library reads it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folders = (tmp_path / "both", tmp_path / "one")
    for folder in folders:
        folder.mkdir()
        write(folder / "train.jsonl", [{"question": "a"}])
    write(tmp_path / "both" / "test.jsonl", [{"question": "b"}])
    found = [list(sources.read_source(str(folder), "--data", split="")) for folder in folders]
    assert found == [[(1, {"question": "b"})], [(1, {"question": "a"})]]


def test_a_file_that_is_missing_is_not_asked_of_the_hub(exits):
    for name in ("nobody/nothing.jsonl", "nobody/nothing.parquet"):
        assert f"--gold-prompts {name}: no such file" in exits(read_prompts, name, "--gold-prompts")
    assert "python -m data.toy.world" in exits(read_traces, "data/toy/nothing.jsonl")


@pytest.mark.skipif(not RELEASED.exists(), reason="the released prompts are not beside the repository")
def test_released_prompts_are_read_as_they_are():
    prompts = read_prompts(RELEASED)
    assert len(prompts) == 250 and prompts[0]["id"] == "wildchat-if_val-0"
    assert {turn["role"] for row in prompts for turn in row["messages"]} == {"user"}


# --- prompts of a training run


def test_prompts_that_are_too_long_are_listed_not_cut(tmp_path, exits, capsys):
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base", trust_remote_code=False)
    templates.prepare_tokenizer(tokenizer, "think")
    rows = [
        {"id": "short", "messages": [turn("user", "ham<|im_end|>")]},
        {"id": "long", "messages": [turn("user", "ham " * 300)]},
    ]
    path = write(tmp_path / "p.jsonl", rows)
    kept, dropped = load_prompts(str(path), tokenizer, 100)
    ids = templates.encode_prompt(tokenizer, [turn("user", "ham")])  # without the control token
    assert kept == [{"id": "short", "messages": [turn("user", "ham")], "prompt_ids": ids}]
    assert [(row["id"], row["reason"]) for row in dropped] == [("long", "too_long")]
    assert dropped[0]["tokens"] > 300
    assert "1 prompts (1 had control tokens, now removed), 1 dropped" in capsys.readouterr().out

    held_out = SimpleNamespace(gold="", gold_prompts=str(path), max_prompt_tokens=400)
    assert "--gold-prompts needs --gold" in exits(load_held_out, held_out, tokenizer, [])
    held_out.gold = "gold.py:gold"
    assert len(load_held_out(held_out, tokenizer, [])) == 2
    assert "1 are trained on, e.g. short" in exits(load_held_out, held_out, tokenizer, kept)
    held_out.max_prompt_tokens = 100
    assert [row["id"] for row in load_held_out(held_out, tokenizer, [])] == ["short"]
    held_out.max_prompt_tokens = 1
    assert "0 prompts" in exits(load_held_out, held_out, tokenizer, [])
    held_out.gold_prompts = ""
    assert load_held_out(held_out, tokenizer, kept) == []


def test_ids_are_different(exits):
    check_ids("p.jsonl", ROWS)
    check_ids("p.jsonl", [])
    assert "p.jsonl: two tasks have the same id 'r1'" in exits(
        check_ids, "p.jsonl", [*ROWS, ROWS[1]], "tasks"
    )
    assert "two rows have the same id '1'" in exits(check_ids, "p.jsonl", [{"id": 1}, {"id": "1"}])
