"""rlmt/data.py: rows in every form and place, broken files, prompts that are too long."""

import gzip
import json
import math
from types import SimpleNamespace

import pandas as pd
import pytest

from rlmt.chat import encode_prompt, load_tokenizer, prepare_tokenizer
from rlmt.data import load_held_out, load_prompts, read_pairs, read_prompts, read_rows, read_traces
from train_reward import build_pairs
from train_sft_warmstart import build_rows

GOOD = {"id": "r", "messages": [{"role": "user", "content": "Frage \u05d0\u2028 \U0001f914"}], "n": 0}


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def write(path, rows):
    """Writes rows in the format that the file's name says; a string or bytes are a line as they are."""
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
        return path
    data = b""
    for row in rows:
        if not isinstance(row, str | bytes):
            row = json.dumps(row, ensure_ascii=False)
        if isinstance(row, str):
            row = row.encode()
        data += row + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# --- files


NOT_MESSAGES = [
    [5],
    [{"role": "user", "content": None}],
    [*GOOD["messages"], {"role": "user"}],
    str(GOOD["messages"]),  # as a CSV file has them
]
BAD_LINES = [  # (line, what the error must name)
    ({"id": "x", "n": 1}, "the row has id, n; data/README.md has the forms"),
    ({"id": "x", "n": 1, "messages": []}, "must end with a user's text"),
    ({"id": "x", "messages": GOOD["messages"], "n": None}, "'n'"),
    *[
        ({"id": "x", "n": 1, "messages": messages}, "'messages' must be a list of")
        for messages in NOT_MESSAGES
    ],
    ({"id": "x", "n": 1, "prompt": "q", "system": math.nan}, "'prompt' must be a list of"),
    ('{"id": "x", "messages": [', "not JSON"),
    (b'{"id": "\xff"}', "not JSON"),
]


def test_a_bad_line_is_named(tmp_path, exits):
    for line, named in BAD_LINES:
        path = write(tmp_path / "rows.jsonl", [GOOD, line, GOOD])
        error = exits(read_rows, path, "messages", "n")
        assert error.startswith(f"error: {path}:2: ") and named in error, line
    assert "row 2 or the next cannot be read" in exits(
        read_rows, write(tmp_path / "rows.jsonl", [GOOD, '["a", "b"]'])
    )
    path = write(tmp_path / "rows.jsonl.gz", [GOOD, "{", GOOD])
    assert exits(read_rows, path).startswith(f"error: {path}:2: not JSON")
    path = write(tmp_path / "rows.parquet", [GOOD, {"id": "x", "messages": GOOD["messages"]}])
    assert exits(read_rows, path, "messages", "n").startswith(f"error: {path}:2: no field 'n'")


# --- forms of prompts, traces and pairs

QUESTION = [turn("system", "s"), turn("user", "q")]
THOUGHT = "<think>\nz\n</think>\n\ny"
ZERO = "<think> z </think> <response> y </response>"
APART = {"role": "assistant", "content": "y", "thinking": "z"}
TRACES = [  # all are the trace of z and y to the question
    {"messages": QUESTION, "thinking": "z", "response": "y"},
    {"messages": [*QUESTION, turn("assistant", "the source's")], "thought": "z", "response": "y"},
    {"messages": [*QUESTION, turn("assistant", THOUGHT)], "text": "as the authors' SFT reads it"},
    {"messages": [*QUESTION, turn("assistant", ZERO)]},
    {"messages": [*QUESTION, APART]},
    {"messages": [*QUESTION, turn("assistant", "y")], "reasoning": "z", "reasoning_content": None},
    {"messages": [*QUESTION, {**turn("assistant", THOUGHT), "reasoning_content": ""}]},
    {"messages": QUESTION, "response": THOUGHT, "thinking": "", "finish_reason": "stop"},
    {"prompt": QUESTION, "completion": [turn("assistant", THOUGHT)]},
    {"prompt": QUESTION, "completion": THOUGHT, "teacher": "T"},
    {"system_prompt": "s", "prompt": "q", "output": THOUGHT, "reasoning": "on"},  # Nemotron's
    {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": THOUGHT}]},
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
        expected = {"id": "rows-0", "messages": QUESTION, "thinking": "z", "response": "y"}
        assert read | expected == read and read.get("teacher") == trace.get("teacher"), trace
        assert dropped == []


def test_answers_that_fit_no_format_are_counted(tmp_path):
    answers = {
        "z </think> y": "no_open",
        "<think> z <think> z </think> y": "nested",
        ZERO + " P.S.": "text_after_response",
    }
    lines = []
    for text in [*answers, THOUGHT, "y"]:
        lines.append({"id": text, "messages": [*QUESTION, turn("assistant", text)]})
    for reason in ("length", "content_filter"):
        lines.append({"id": reason, "prompt": "q", "completion": THOUGHT, "finish_reason": reason})
        answers[reason] = f"finish_reason_{reason}"
    lines.append({"id": "question", "messages": QUESTION})
    answers["question"] = "not_ending_in_assistant"
    traces, dropped = read_traces(write(tmp_path / "t.jsonl", lines))
    assert {row["id"]: row["reason"] for row in dropped} == answers
    assert [(row["thinking"], row["response"]) for row in traces] == [("z", "y"), ("", "y")]


GOOD_ANSWER, BAD_ANSWER = turn("assistant", "good"), turn("assistant", "bad")
PAIRS = [  # all are the same pair
    {"messages": QUESTION, "chosen": "good", "rejected": "bad"},
    {"prompt": QUESTION, "chosen": "good", "rejected": "bad"},
    {"prompt": QUESTION, "chosen": [GOOD_ANSWER], "rejected": [BAD_ANSWER]},
    {"chosen": [*QUESTION, GOOD_ANSWER], "rejected": [*QUESTION, BAD_ANSWER]},
    {"prompt": "q", "chosen": [*QUESTION, GOOD_ANSWER], "rejected": [*QUESTION, BAD_ANSWER]},
]
PAIRS.append(PAIRS[-1] | {"messages": [*QUESTION, GOOD_ANSWER]})  # UltraFeedback


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_forms_of_a_pair(tmp_path, name):
    for pair in PAIRS:
        (read,), dropped = read_pairs(write(tmp_path / name, [pair]))
        assert (read["messages"], read["chosen"], read["rejected"]) == (QUESTION, "good", "bad"), pair
        assert dropped == []
        (prompt,) = read_prompts(tmp_path / name)  # the same rows as prompts
        assert prompt["messages"] == QUESTION

    # thinking in tags, as the authors build their pairs, or in fields of its own
    asked = turn("user", "q")
    tagged = {"prompt": "q", "chosen": [asked, turn("assistant", THOUGHT)]}
    tagged["rejected"] = [asked, turn("assistant", ZERO)]
    expected = {"chosen": "y", "rejected": "y", "chosen_thinking": "z", "rejected_thinking": "z"}
    for pair in (tagged, expected | {"prompt": "q"}):
        (read,), _ = read_pairs(write(tmp_path / name, [pair]))
        assert read | expected | {"messages": [asked]} == read


def test_forms_of_a_prompt(tmp_path, tokenizer):
    path = tmp_path / "p.jsonl"
    for row in ({"messages": QUESTION}, {"prompt": QUESTION}, {"messages": [*QUESTION, GOOD_ANSWER]}):
        (prompt,) = read_prompts(write(path, [row | {"answer": "4"}]))
        assert (prompt["messages"], prompt["answer"]) == (QUESTION, "4")
    write(path, [{"prompt": "ham", "completion": "y"}, {"messages": [turn("user", "ham"), GOOD_ANSWER]}])
    kept, _ = load_prompts(str(path), tokenizer, 100)
    assert kept[0]["prompt_ids"] == kept[1]["prompt_ids"]

    tokenizer.chat_template = "{{ raise_exception('no system turn') if messages[0].role == 'system' }}ham"
    write(path, [{"prompt": "ham"}, {"messages": QUESTION}])
    kept, dropped = load_prompts(str(path), tokenizer, 100)
    expected = {"id": "p-1", "reason": "refused by the chat template: no system turn"}
    assert len(kept) == 1 and dropped == [expected]

    reader = load_tokenizer("data/toy/reward_model")
    reader.chat_template = tokenizer.chat_template
    prepare_tokenizer(tokenizer, "think", "chatml")
    assert load_prompts(str(path), tokenizer, 100, readers=[reader])[1] == dropped
    row = {
        "id": "p-1",
        "messages": QUESTION,
        "thinking": "z",
        "response": "y",
        "chosen": "y",
        "rejected": "n",
    }
    _, dropped_traces = build_rows([row], reader, "think", 100)
    _, dropped_pairs = build_pairs([row], reader, "response", 100)
    assert dropped_traces == dropped_pairs == [expected]


# --- prompts of a training run


def test_a_csv_has_texts_alone(tmp_path, exits):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n"a, b\nü",007\nNA,\n')
    rows = read_prompts(path)
    assert [(row["messages"][-1]["content"], row["answer"]) for row in rows] == [
        ("a, b\nü", "007"),
        ("NA", ""),
    ]
    path.write_text("question,answer\na,b\n")
    assert "rows.csv:1: 'prompt' is missing; rename the field that has it" in exits(read_prompts, path)
    path.write_bytes("prompt\nü\n".encode("latin-1"))
    assert "rows.csv: row 0 or the next cannot be read (UnicodeDecodeError" in exits(read_prompts, path)


def test_prompts_that_are_too_long_are_listed_not_cut(tmp_path, tokenizer, exits):
    rows = [
        {"id": "short", "messages": [turn("user", "ham<|im_end|>")]},
        {"id": "long", "messages": [turn("user", "ham " * 300)]},
    ]
    path = write(tmp_path / "p.jsonl", rows)
    kept, dropped = load_prompts(str(path), tokenizer, 100)
    ids = encode_prompt(tokenizer, [turn("user", "ham")])  # without the control token
    assert kept == [{"id": "short", "messages": [turn("user", "ham")], "prompt_ids": ids}]
    assert [(row["id"], row["reason"]) for row in dropped] == [("long", "too_long")]

    held_out = SimpleNamespace(gold="", gold_prompts=str(path), max_prompt_tokens=1)
    assert "--gold-prompts needs --gold" in exits(load_held_out, held_out, tokenizer, [])
    held_out.gold = "gold.py:gold"
    assert "0 prompts" in exits(load_held_out, held_out, tokenizer, [])
    held_out.max_prompt_tokens = 100
    assert [row["id"] for row in load_held_out(held_out, tokenizer, [])] == ["short"]
    assert "1 are trained on, e.g. short" in exits(load_held_out, held_out, tokenizer, kept)
    held_out.gold_prompts = ""
    assert load_held_out(held_out, tokenizer, kept) == []
