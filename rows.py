"""Reads input rows, whose schemas are in data/README.md, and the prompts of a training run.

A file that cannot be used ends the program with exit code 2 and one line that names file, line and field.
"""

import gzip
import json
import zlib
from collections import Counter
from pathlib import Path

import runs  # first: it turns telemetry off before accelerate is imported  # isort: skip
import pandas as pd
import pyarrow
from accelerate import PartialState

import templates

TEXT_FIELDS = ("thinking", "response", "chosen", "rejected", "chosen_thinking", "rejected_thinking")
# checked even if the caller does not ask for them
OPTIONAL_TEXT_FIELDS = ("chosen_thinking", "rejected_thinking")
ROLES = ("system", "user", "assistant", "tool")
DAMAGED_FILE = (OSError, EOFError, zlib.error, pyarrow.ArrowException, UnicodeError)

# --- 1. rows of a file


def read_rows(path: Path | str, *fields: str) -> list[dict]:
    """Reads the rows of a .jsonl, .jsonl.gz or .parquet file, each of which must have `fields`.

    A `prompt` column that holds messages is renamed to `messages`. A row without `id` gets `<file name>-<row from 0>`.
    """
    path = Path(path)
    if not path.is_file():
        remedy = "data/README.md says how to make it"
        if path.parts[:2] == ("data", "toy"):
            remedy = "python -m data.toy.world writes it"
        runs.fail(f"{path}: no such file; {remedy}")
    try:
        if path.suffix == ".parquet":
            numbered_rows = _read_parquet(path)
        else:
            numbered_rows = _read_json_lines(path, check_unicode="messages" in fields)
    except DAMAGED_FILE as error:
        runs.fail(f"{path}: cannot be read ({error or type(error).__name__})")
    if not numbered_rows:
        runs.fail(f"{path}: no rows")

    for number, row in numbered_rows.items():
        place = f"{path}:{number}"
        if not isinstance(row, dict):
            runs.fail(f"{place}: not a JSON object but {_shorten(row)}")
        if "messages" not in row and isinstance(row.get("prompt"), list):
            row["messages"] = row.pop("prompt")
        if row.get("id") is None:
            row["id"] = f"{path.stem}-{number - 1}"
        _check_fields(place, row, fields)
        if "messages" in fields:
            _check_messages(place, row["messages"])
    return list(numbered_rows.values())


def check_ids(path: Path | str, rows: list[dict], what: str = "rows") -> None:
    """Exits with 2 if two rows share an id, because answers, verdicts and rewards are looked up by it."""
    counts = Counter(str(row["id"]) for row in rows)  # some keys are texts, in which 1 and "1" are the same
    repeated = [row_id for row_id, count in counts.items() if count > 1]
    if repeated:
        runs.fail(
            f"{path}: two {what} have the same id {repeated[0]!r}; make it unique: results are stored by it"
        )


def _read_parquet(path: Path) -> dict[int, object]:
    """Returns the rows by their number, from 1."""
    # by way of JSON, for plain lists and dicts instead of NumPy arrays
    records = json.loads(pd.read_parquet(path).to_json(orient="records"))
    return dict(enumerate(records, 1))


def _read_json_lines(path: Path, check_unicode: bool) -> dict[int, object]:
    """Returns the rows by their line, from 1; empty lines are left out.

    With `check_unicode`, a line with half a surrogate pair exits with 2: no tokenizer takes it.
    """
    rows = {}
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows[number] = json.loads(line)
                if check_unicode and rb"\ud" in line.lower():
                    json.dumps(rows[number], ensure_ascii=False).encode()
            # broken JSON, bytes that are not UTF-8, too deep a nesting
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)
                runs.fail(f"{path}:{number}: not JSON ({reason})")
    return rows


def _check_fields(place: str, row: dict, fields: tuple[str, ...]) -> None:
    """Exits with 2 if the id is not usable, a field is missing, or a text is not a string."""
    if not isinstance(row["id"], str | int | float):
        runs.fail(f"{place}: 'id' must be a text or a number, not {_shorten(row['id'])}")
    for name in fields:
        if row.get(name) is None:
            found = ", ".join(key for key in row if row[key] is not None)
            runs.fail(f"{place}: no field {name!r} (found {found}); data/README.md has the schemas")
    for name in TEXT_FIELDS:
        asked_for = name in fields or name in OPTIONAL_TEXT_FIELDS
        if asked_for and not isinstance(row.get(name), str | None):
            runs.fail(f"{place}: {name!r} must be a text, not {_shorten(row[name])}")


def _check_messages(place: str, messages: object) -> None:
    """Exits with 2 unless this is a conversation in known roles whose last turn is a user's and not empty."""
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        runs.fail(f"{place}: 'messages' must be a list of {{'role', 'content'}} with strings")
    for message in messages:
        if message["role"] not in ROLES:  # a template would write it into the text, or drop the turn
            runs.fail(f"{place}: the role {message['role']!r} in 'messages' is not one of {', '.join(ROLES)}")
    last = messages[-1]
    if last["role"] != "user":
        runs.fail(f"{place}: 'messages' must end with the user's turn, not with one of {last['role']!r}")
    if not last["content"].strip():
        runs.fail(f"{place}: the last turn of 'messages' is empty")


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _shorten(value: object) -> str:
    """Returns the beginning of a value as JSON, for an error message."""
    return json.dumps(value)[:50]


# --- 2. prompts of a training run


def load_prompts(path: str, tokenizer, max_prompt_tokens: int) -> tuple[list[dict], list[dict]]:
    """Reads the prompts to train on and drops those that are too long; prints how many.

    Returns the prompts {id, prompt, prompt_ids} without control tokens, and the dropped ones {id, reason, tokens}.
    """
    rows = read_rows(path, "messages")
    check_ids(path, rows)
    kept = []
    dropped = []
    cleaned_ids = []
    for row in rows:
        messages = templates.without_control(tokenizer, row["messages"])
        if messages != row["messages"]:
            cleaned_ids.append(str(row["id"]))
        ids = runs.or_fail(templates.encode_prompt, tokenizer, messages)
        if len(ids) > max_prompt_tokens:
            dropped.append({"id": row["id"], "reason": "too_long", "tokens": len(ids)})
        else:
            kept.append({"id": row["id"], "prompt": messages, "prompt_ids": ids})

    state = PartialState()  # its print is that of the main process
    if cleaned_ids:
        state.print(
            f"control tokens were removed from {len(cleaned_ids)} prompts: {', '.join(cleaned_ids[:5])}"
        )
    summary = f"{len(kept)} prompts; {len(dropped)} longer than {max_prompt_tokens} tokens dropped"
    if dropped:
        first_ids = [str(row["id"]) for row in dropped[:5]]
        summary += f": {', '.join(first_ids)} ..."
    state.print(summary)
    return kept, dropped


def load_rl_prompts(args, tokenizer) -> tuple[list[dict], list[dict], list[dict]]:
    """Reads the prompts of GRPO or PPO: those to train on, those that are too long, and the held-out ones.

    Exits with 2 if there are not enough for a step.
    """
    prompts, dropped = load_prompts(args.prompts, tokenizer, args.max_prompt_tokens)
    if len(prompts) < args.prompts_per_step:
        runs.fail(
            f"{args.prompts}: {len(prompts)} prompts are fewer than --prompts-per-step {args.prompts_per_step}"
        )
    return prompts, dropped, load_held_out(args, tokenizer, prompts)


def load_held_out(args, tokenizer, prompts: list[dict]) -> list[dict]:
    """Reads the prompts of `args.gold_prompts` ([] if empty), on which checkpoints are compared.

    Exits with 2 if one is too long or also among the training `prompts`, as `load_prompts` returns them.
    """
    if not args.gold_prompts:
        return []
    if not args.gold:
        runs.fail("--gold-prompts needs --gold: what the completions are measured by")
    held_out, too_long = load_prompts(args.gold_prompts, tokenizer, args.max_prompt_tokens)
    trained_texts = {json.dumps(row["prompt"]) for row in prompts}
    refused = [row["id"] for row in held_out if json.dumps(row["prompt"]) in trained_texts]
    refused += [row["id"] for row in too_long]
    if refused:
        runs.fail(
            f"--gold-prompts {args.gold_prompts}: {len(refused)} are trained on or too long, "
            f"e.g. {refused[0]}; take them out"
        )
    return held_out
