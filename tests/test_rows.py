"""rows.py: files of rows in every format, broken files, conversations, and prompts that are too long."""

import gzip
import json
from types import SimpleNamespace

import pandas as pd
import pytest
from transformers import AutoTokenizer

import templates
from rows import check_ids, load_held_out, load_prompts, read_rows

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


@pytest.fixture
def exits(capsys):
    """exits(function, *args): the one line on stderr of a call that ends with exit code 2."""

    def exits(function, *args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            function(*args)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1
        return error

    return exits


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
    assert not any("prompt" in row for row in read)
    assert len({row["id"] for row in read}) == 3 and all(row["id"].startswith("prompt_rows") for row in read)


NOT_MESSAGES = [
    [],
    {},
    "What?",
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
    ({"id": "x", "n": 1}, "'messages'"),
    ({"id": "x", "n": 1, "messages": None}, "'messages'"),
    ({"id": "x", "n": 1, "prompt": "What?"}, "'messages'"),
    ({"id": "x", "messages": GOOD["messages"]}, "no field 'n' (found id, messages)"),
    ({"id": "x", "messages": GOOD["messages"], "n": None}, "'n'"),
    *[({"id": "x", "n": 1, "messages": messages}, "'messages' must be a list") for messages in NOT_MESSAGES],
    ({**GOOD, "id": [1]}, "'id' must be a text or a number, not [1]"),
    ({**GOOD, "chosen_thinking": 5}, "'chosen_thinking' must be a text, not 5"),
    ('{"id": "x", "messages": [', "not JSON"),
    ('{"n": 1, "messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
    ("id,messages", "not JSON"),
    (b'{"id": "\xff"}', "not JSON"),
    ("[1, 2]", "not a JSON object"),
    ("7", "not a JSON object"),
    ("null", "not a JSON object"),
    ('"messages"', "not a JSON object"),
]


def test_a_bad_line_is_named(tmp_path, exits):
    for line, named in BAD_LINES:
        path = write(tmp_path / "rows.jsonl", [GOOD, line, GOOD])
        error = exits(read_rows, path, "messages", "n")
        assert error.startswith(f"error: {path}:2: ") and named in error, line
    path = write(tmp_path / "rows.jsonl.gz", [GOOD, "{", GOOD])
    assert exits(read_rows, path).startswith(f"error: {path}:2: not JSON")
    path = write(tmp_path / "rows.parquet", [GOOD, {"id": "x", "messages": GOOD["messages"]}])
    assert exits(read_rows, path, "messages", "n").startswith(
        f"error: {path}:2: no field 'n' (found id, messages)"
    )


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
    assert "p.jsonl:4: the role 'human'" in exits(read_rows, path, "messages")
    write_conversations([turn("user", " \n")])
    assert "p.jsonl:2: the last turn of 'messages' is empty" in exits(read_rows, path, "messages")
    write_conversations([turn("user", "a"), turn("assistant", "b")])
    assert "p.jsonl:2: 'messages' must end with the user's turn" in exits(read_rows, path, "messages")


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
    assert kept == [{"id": "short", "prompt": [turn("user", "ham")], "prompt_ids": ids}]
    assert [(row["id"], row["reason"]) for row in dropped] == [("long", "too_long")]
    assert dropped[0]["tokens"] > 300
    printed = capsys.readouterr().out
    assert (
        "from 1 prompts: short" in printed and "1 prompts; 1 longer than 100 tokens dropped: long" in printed
    )

    held_out = SimpleNamespace(gold="", gold_prompts=str(path), max_prompt_tokens=400)
    assert "--gold-prompts needs --gold" in exits(load_held_out, held_out, tokenizer, [])
    held_out.gold = "gold.py:gold"
    assert len(load_held_out(held_out, tokenizer, [])) == 2
    assert "1 are trained on or too long, e.g. short" in exits(load_held_out, held_out, tokenizer, kept)
    held_out.max_prompt_tokens = 100
    assert "1 are trained on or too long, e.g. long" in exits(load_held_out, held_out, tokenizer, [])
    held_out.gold_prompts = ""
    assert load_held_out(held_out, tokenizer, kept) == []


def test_ids_are_different(exits):
    check_ids("p.jsonl", ROWS)
    check_ids("p.jsonl", [])
    assert "p.jsonl: two tasks have the same id 'r1'" in exits(
        check_ids, "p.jsonl", [*ROWS, ROWS[1]], "tasks"
    )
    assert "two rows have the same id '1'" in exits(check_ids, "p.jsonl", [{"id": 1}, {"id": "1"}])
