"""rlmt/data.py: rows in every form and place, broken files, prompts that are too long."""

import gzip
import json
import math

import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

from rlmt.chat import encode_prompt, load_tokenizer, prepare_tokenizer
from rlmt.data import load_held_out, load_prompts, read_pairs, read_prompts, read_rows, read_traces
from rewards.scorer import Scorer
from rlmt.run import ScoreArgs
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
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=4))  # as the authors write theirs
        return path
    if not path.suffix:
        DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(path)
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


NOT_MESSAGES = [
    [5],
    [{"role": "user", "content": None}],
    [*GOOD["messages"], {"role": "user"}],
    str(GOOD["messages"]),  # as a CSV file has them
]
BAD_LINES = [  # (line, what the error must name)
    ({"id": "x", "n": 1}, "the row has id, n; data/README.md has the forms"),
    ({"id": "x", "n": 1, "messages": None}, "'prompt' is missing; rename the field"),
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
    for line in ('["a", "b"]', {"conversations": [{"role": "human", "value": "q"}]}):
        assert "row 2 or the next cannot be read" in exits(
            read_rows, write(tmp_path / "rows.jsonl", [GOOD, line])
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
    {"messages": [*QUESTION, turn("assistant", THOUGHT.replace("\n\ny", "\ny"))]},
    {"messages": [*QUESTION, turn("assistant", ZERO)]},
    {"messages": [*QUESTION, APART]},
    {"messages": [*QUESTION, turn("assistant", "y")], "reasoning_content": "z"},
    {"messages": [*QUESTION, turn("assistant", "y")], "reasoning": "z", "reasoning_content": None},
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
    {"system_prompt": "s", "prompt": "q", "output": THOUGHT, "reasoning": "on"},  # Nemotron's
    {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": THOUGHT}]},
]


GOOD_ANSWER, BAD_ANSWER = turn("assistant", "good"), turn("assistant", "bad")
PROMPTS = [  # all are the question
    {"messages": QUESTION},
    {"prompt": QUESTION},
    {"messages": [*QUESTION, GOOD_ANSWER]},
    {"prompt": QUESTION, "completion": "y"},
]
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


ANSWERED = [*QUESTION, turn("assistant", THOUGHT)]
THOUGHT_PAIRS = [  # all are the same pair of y after z, and y after z
    {"prompt": "q", "chosen": ANSWERED, "rejected": [*QUESTION, turn("assistant", ZERO)]},  # the authors'
    {"messages": QUESTION, "chosen": "y", "rejected": "y", "chosen_thinking": "z", "rejected_thinking": "z"},
]
FORMS = [  # (reader, what every row must be read as, rows)
    (read_traces, {"messages": QUESTION, "thinking": "z", "response": "y"}, TRACES),
    (read_pairs, {"messages": QUESTION, "chosen": "good", "rejected": "bad"}, PAIRS),
    (read_pairs, THOUGHT_PAIRS[1], THOUGHT_PAIRS),
    (lambda path: (read_prompts(path), []), {"messages": QUESTION}, PROMPTS + PAIRS),
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet", "rows"])
def test_forms(tmp_path, name):
    for read, expected, rows in FORMS:
        for row in rows:
            (found,), dropped = read(write(tmp_path / name, [row | {"kept": "as it is"}]))
            stem = "rows.jsonl" if name.endswith("gz") else "rows"
            expected = expected | {"id": f"{stem}-0", "kept": "as it is"}
            assert {key: found[key] for key in expected} == expected, row
            assert dropped == []


def test_answers_that_fit_no_format_are_counted(tmp_path):
    answers = {
        "z </think> y": "no_open",
        "<think> z": "no_close",
        "<think> z <think> z </think> y": "nested",
        "<think> z </think>": "empty_response",
        "<think> z </think> y <response>": "no_open",
        ZERO + " P.S.": "text_after_response",
        "[THINK]z[/THINK]y": "foreign_thinking",
        "Sure. <seed:think>z</seed:think>y": "foreign_thinking",
        "analysisz assistantfinaly": "foreign_thinking",
        "<|channel>thought\nz<channel|>y": "foreign_thinking",
        " ": "empty_response",
    }
    lines = [
        {"id": text, "messages": [*QUESTION, turn("assistant", text)]} for text in [*answers, THOUGHT, "y"]
    ]
    for reason in ("length", "content_filter"):
        lines.append({"id": reason, "prompt": "q", "completion": THOUGHT, "finish_reason": reason})
        answers[reason] = f"finish_reason_{reason}"
    for row_mark, turn_mark, reason in (
        ({"label": False}, {}, "label_False"),
        ({}, {"weight": 0}, "weight_0"),
    ):
        lines.append({"id": reason, "messages": [*QUESTION, turn("assistant", "y") | turn_mark], **row_mark})
        answers[reason] = reason
    lines.append({"id": "question", "messages": QUESTION})
    answers["question"] = "not_ending_in_assistant"
    traces, dropped = read_traces(write(tmp_path / "t.jsonl", lines))
    assert {row["id"]: row["reason"] for row in dropped} == answers
    assert [(row["id"], row["thinking"], row["response"]) for row in traces] == [
        (THOUGHT, "z", "y"),
        ("y", "", "y"),
    ]
    # the sides of a pair are judged by the same function
    pairs = [{"prompt": "q", "chosen": text, "rejected": "n"} for text in ("[THINK]z[/THINK]y", "", "y")]
    pairs += [{"prompt": "q", "chosen": "y", "rejected": "n", "score_chosen": 1, "score_rejected": 2}]
    kept, dropped = read_pairs(write(tmp_path / "p.jsonl", pairs))
    assert len(kept) == 1
    assert [row["reason"] for row in dropped] == ["foreign_thinking", "empty_response", "reversed_scores"]


def test_what_nobody_reads_is_named(tmp_path, capsys):
    call = turn("assistant", "I ask.") | {"tool_calls": [{}]}
    row = {
        "prompt": QUESTION,
        "output": THOUGHT,
        "input": "5 dollars",
        "response": None,
        "tools": [],
    }
    write(tmp_path / "t.jsonl", [row, row | {"prompt": [*QUESTION, call, *QUESTION[1:]], "tools": [{}]}])
    read_traces(tmp_path / "t.jsonl")
    said = capsys.readouterr().out.partition("not part of any text: ")[2]
    assert said == "input (2 rows), messages.tool_calls (1 rows), tools (1 rows)\n"


def test_words_that_the_tokenizer_cannot_write(tokenizer):
    """For SFT and for a reward model."""
    row = {"id": "a", "messages": QUESTION, "thinking": "ham", "response": "Grüße", "chosen": "ham"}
    _, traces = build_rows([row], tokenizer, "think", 100)
    _, pairs = build_pairs([row | {"rejected": "ham \U0001f389"}], tokenizer, "response", 100)
    assert traces == pairs == [{"id": "a", "reason": "unknown_words"}]


def test_prompts_that_a_chat_template_refuses(tmp_path, tokenizer):
    path = tmp_path / "p.jsonl"
    write(path, [{"prompt": "ham"}, {"messages": [turn("user", "ham"), GOOD_ANSWER]}])
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
    bad_trace = {"id": "p-1", "messages": QUESTION, "thinking": "z", "response": "y"}
    bad_pair = {"id": "p-1", "messages": QUESTION, "chosen": "y", "rejected": "n"}
    _, dropped_traces = build_rows([bad_trace], reader, "think", 100)
    _, dropped_pairs = build_pairs([bad_pair], reader, "response", 100)
    assert dropped_traces == dropped_pairs == [expected]


# --- prompts of a training run


def test_a_csv_has_texts_alone(tmp_path, exits):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n"a, b\nü",007\nNA,\n')
    rows = read_prompts(str(path), "--prompts")
    assert [(row["messages"][-1]["content"], row["answer"]) for row in rows] == [
        ("a, b\nü", "007"),
        ("NA", ""),
    ]
    path.write_text("question,answer\na,b\n")
    assert "rows.csv:1: 'prompt' is missing; rename the field that has it; the row has question" in exits(
        read_prompts, str(path), "--prompts"
    )
    path.write_bytes("prompt\nü\n".encode("latin-1"))
    assert "rows.csv: row 0 or the next cannot be read (UnicodeDecodeError" in exits(
        read_prompts, str(path), "--prompts"
    )


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
    assert dropped[0]["tokens"] > 300

    def held_out(limit: int, prompts: list = (), path: str = str(path)) -> list[dict]:
        return load_held_out(path, tokenizer, limit, prompts)

    assert len(held_out(400)) == 2
    assert [row["id"] for row in held_out(100)] == ["short"]
    assert "1 are trained on, e.g. short" in exits(held_out, 400, kept)
    assert "0 prompts" in exits(held_out, 1)
    assert held_out(400, kept, "") == []
    assert "a step or a round needs 2" in exits(load_prompts, str(path), tokenizer, 100, 2)
    assert "--gold-prompts needs --gold" in exits(
        Scorer, ScoreArgs(gold_prompts="p.jsonl"), [], tokenizer, None, 1
    )
