"""Reads prompts, traces and pairs in the forms that users have, and the prompts of a training run.

data/README.md has the forms. Input that cannot be used ends the program with exit code 2 and one line that
names file, line and field. A row whose texts cannot be trained on is dropped for a reason, and listed.
"""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet
from accelerate import PartialState

from rlmt.chat import encode_prompt, without_control
from utils import TAGS, THINK_FORMATS, fail, or_fail, split_thinking

ROLES = ("system", "user", "assistant", "tool")
# fields with the answer of a trace; and with its thinking, where that is apart: in a row or an assistant's turn
ANSWER_FIELDS = ("response", "completion", "output")
THINKING_FIELDS = ("thinking", "thought", "reasoning_content", "reasoning")

EXPECTED_PROMPT = "'messages' or 'prompt' (messages or a text)"
EXPECTED_TRACE = (
    "a prompt ('messages' or 'prompt') and 'response' or 'completion', or 'messages' that end with an "
    "assistant's turn; with the thinking in 'thinking' (or 'thought') or in tags"
)
EXPECTED_PAIR = (
    "a prompt ('messages' or 'prompt'), 'chosen' and 'rejected', all texts or messages; or 'chosen' and "
    "'rejected' alone, as whole conversations"
)


class BadInput(ValueError):
    """A row or an argument cannot be used; the message says which field, and what to do."""


class Dropped(Exception):
    """One row is not kept; the message is the reason that is counted."""


# --- 1. what a row holds


def check_object(row: object) -> None:
    """Raises BadInput unless a row is an object with named fields."""
    if not isinstance(row, dict):
        raise BadInput(f"not a JSON object but {_shorten(row)}")


def messages_of(row: dict, name: str) -> list[dict]:
    """Returns a field's conversation, without empty keys; BadInput unless its turns have role and content."""
    messages = row[name]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise BadInput(f"{name!r} must be a list of {{'role', 'content'}} with strings")
    # a table has every key in every turn
    return [{key: value for key, value in turn.items() if value is not None} for turn in messages]


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def prompt_of(row: dict) -> list[dict]:
    """Returns the conversation in `messages` or `prompt`, whichever role it ends with.

    A pair without either has it in `chosen`, before the answer. UltraFeedback also has the last turn as a text
    in `prompt`, so `chosen` comes before that. Elsewhere a text in `prompt` is one user turn.
    """
    if row.get("messages") is not None:
        return messages_of(row, "messages")
    if isinstance(row.get("prompt"), list):
        return messages_of(row, "prompt")
    if isinstance(row.get("chosen"), list) and len(row["chosen"]) > 1:
        return messages_of(row, "chosen")[:-1]
    if row.get("prompt") is None:
        raise BadInput(f"no field 'messages' or 'prompt' (found {_fields_of(row)})")
    return [{"role": "user", "content": _text_of(row, "prompt")}]


def without_answer(messages: list[dict]) -> list[dict]:
    """Returns a conversation without the assistant's turn that it may end with."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[:-1]
    return messages


def check_messages(messages: list[dict]) -> None:
    """Raises BadInput unless a conversation is in known roles and ends with a user's turn that has text."""
    remedy = "data/prepare.py leaves such rows out"
    for message in messages:
        if message["role"] not in ROLES:  # a template would write it into the text, or drop the turn
            raise BadInput(
                f"the role {message['role']!r} in 'messages' is not one of {', '.join(ROLES)}; {remedy}"
            )
    if not messages:
        raise BadInput(f"there is no prompt before the answer; {remedy}")
    last = messages[-1]
    if last["role"] != "user":
        raise BadInput(
            f"'messages' must end with the user's turn, not with one of {last['role']!r}; {remedy}"
        )
    if not last["content"].strip():
        raise BadInput(f"the last turn of 'messages' is empty; {remedy}")


def _text_of(row: dict, name: str) -> str:
    if not isinstance(row[name], str):
        raise BadInput(f"{name!r} must be a text, not {_shorten(row[name])}")
    return row[name]


def _fields_of(row: dict) -> str:
    return ", ".join(key for key in row if row[key] is not None) or "nothing"


def _shorten(value: object, n: int = 50) -> str:
    """Returns the beginning of a value as JSON, for an error message."""
    return json.dumps(value)[:n]


def _describe(row: object) -> str:
    """Returns the fields of a row with the beginnings of their values."""
    if not isinstance(row, dict):
        return _shorten(row)
    return "{" + ", ".join(f"{key!r}: {_shorten(value, 80)}" for key, value in row.items()) + "}"


# --- 2. thinking and response of an answer


def first_field(row: dict, names: tuple[str, ...]) -> str:
    """Returns the first of `names` that has a value in a row or a turn; "" if none has."""
    for name in names:
        if row.get(name) is not None:
            return name
    return ""


def think_format_of(text: str) -> str:
    """Returns the think format by which to take a text apart; "" if it has no tag of any thinking.

    That is the format with the most tags of which all are in the text. If each format lacks one, it is the format
    with the fewest tags, whose parser then says what is wrong.
    """
    with_thinking = [name for name, known in THINK_FORMATS.items() if known.thinking_tags]
    # a format with fewer tags would take the other tags for words
    with_thinking.sort(key=lambda name: len(THINK_FORMATS[name].tags), reverse=True)
    for name in with_thinking:
        if all(tag in text for tag in THINK_FORMATS[name].tags):
            return name
    for name in with_thinking:
        if any(tag in text for tag in THINK_FORMATS[name].thinking_tags):
            return with_thinking[-1]
    return ""


def split_answer(answer: dict) -> tuple[str, str]:
    """Returns thinking and response of an assistant's turn; raises Dropped if its tags fit no think format.

    The thinking is in a field of its own, or in tags before the response. Without either it is "".
    """
    name = first_field(answer, THINKING_FIELDS)
    if name:
        return _text_of(answer, name), answer["content"]

    text = answer["content"]
    think_format = think_format_of(text)
    if not think_format:
        return "", text
    thinking, response, status = split_thinking(text, think_format)
    if status == "ok" and not text.rstrip().endswith(THINK_FORMATS[think_format].stop):
        status = "text_after_response"  # the parser would cut it off
    if status == "ok" and any(tag in thinking or tag in response for tag in TAGS):
        status = "tag_inside_text"
    if status != "ok":
        raise Dropped(status)
    return thinking, response


def answer_of(row: dict, name: str) -> tuple[list[dict], dict]:
    """Returns the turns before an answer, maybe none, and the answer, an assistant's turn.

    The field holds a text, or messages that end with the answer. Raises Dropped if another role ends them.
    """
    if isinstance(row[name], str):
        return [], {"role": "assistant", "content": row[name]}
    if not isinstance(row[name], list):
        raise BadInput(f"{name!r} must be a text or messages, not {_shorten(row[name])}")
    *turns, answer = messages_of(row, name)
    if answer["role"] != "assistant":
        raise Dropped("not_ending_in_assistant")
    return turns, answer


# --- 3. prompts, traces and pairs


def to_prompt(row: dict) -> dict:
    """Returns a prompt row. An answer at the end of `messages` is left out; then `had_answer` is True."""
    messages = prompt_of(row)
    prompt = without_answer(messages)
    converted = {**_others(row, "prompt"), "messages": prompt}
    if len(prompt) < len(messages):
        converted["had_answer"] = True
    return converted


def to_trace(row: dict) -> dict:
    """Returns a trace row with `messages`, `thinking` ("" if there is none) and `response`.

    Raises Dropped for an answer that was cut off (`finish_reason`), or whose tags fit no think format.
    """
    if row.get("finish_reason") == "length":
        raise Dropped("truncated")
    answer_field = first_field(row, ANSWER_FIELDS)
    if answer_field:
        more, answer = answer_of(row, answer_field)
        messages = without_answer(prompt_of(row)) + more  # an answer there is the source's, not the teacher's
    else:
        messages = []
        answer = {}
        if row.get("messages"):
            *messages, answer = messages_of(row, "messages")
        if answer.get("role") != "assistant":
            raise BadInput(f"no field 'response', and no answer ends 'messages' (found {_fields_of(row)})")

    thinking_field = first_field(row, THINKING_FIELDS)
    if thinking_field:
        answer["thinking"] = _text_of(row, thinking_field)
    thinking, response = split_answer(answer)
    others = _others(row, "prompt", *ANSWER_FIELDS, *THINKING_FIELDS)
    return {**others, "messages": messages, "thinking": thinking, "response": response}


def to_pair(row: dict) -> dict:
    """Returns a preference row with `messages`, `chosen` and `rejected`, and their thinking if they have it.

    Raises Dropped if the two sides are not answers to one prompt, or if the tags of one fit no think format.
    """
    for side in ("chosen", "rejected"):
        if row.get(side) is None:
            raise BadInput(f"no field {side!r} (found {_fields_of(row)})")
    prompt, chosen = answer_of(row, "chosen")
    prompt_of_rejected, rejected = answer_of(row, "rejected")
    if prompt != prompt_of_rejected:
        raise Dropped("different_prompts")
    given = without_answer(prompt_of(row))
    if prompt and prompt != given:
        raise Dropped("different_prompts")

    pair = {**_others(row, "prompt"), "messages": given}
    for side, answer in (("chosen", chosen), ("rejected", rejected)):
        if row.get(f"{side}_thinking") is not None:
            answer["thinking"] = _text_of(row, f"{side}_thinking")
        thinking, pair[side] = split_answer(answer)
        if thinking:
            pair[f"{side}_thinking"] = thinking
    return pair


def _others(row: dict, *names: str) -> dict:
    """Returns the fields of a row without those named."""
    return {key: value for key, value in row.items() if key not in names}


# --- 4. readers


def read_prompts(name: Path | str, flag: str = "--prompts") -> list[dict]:
    """Reads prompt rows, with all their fields, in any form and from any place that data/README.md names."""
    prompts, _ = _read(name, flag, to_prompt, EXPECTED_PROMPT)  # none is dropped
    return prompts


def read_traces(name: Path | str, flag: str = "--traces") -> tuple[list[dict], list[dict]]:
    """Reads trace rows likewise; returns them, and the dropped ones {id, reason}."""
    return _read(name, flag, to_trace, EXPECTED_TRACE)


def read_pairs(name: Path | str, flag: str = "--pairs") -> tuple[list[dict], list[dict]]:
    """Reads preference rows likewise; returns them, and the dropped ones {id, reason}."""
    return _read(name, flag, to_pair, EXPECTED_PAIR)


def _read(
    name: Path | str, flag: str, convert: Callable[[dict], dict], expected: str
) -> tuple[list[dict], list[dict]]:
    """Reads and converts rows; returns them and the dropped ones. A row of another form exits with 2."""
    found = []
    dropped = []
    for number, row in read_source(str(name), flag):
        try:
            check_object(row)
            row_id = _id_of(row, name, number)
            _check_unicode(row)
            converted = convert(row) | {"id": row_id}
            check_messages(converted["messages"])
        except BadInput as error:
            fail(f"{name}:{number}: {error}; expected: {expected}; the row: {_describe(row)}")
        except Dropped as reason:
            dropped.append({"id": row_id, "reason": str(reason)})
        else:
            found.append(converted)
    if not found and not dropped:
        fail(f"{flag} {name}: no rows")
    return found, dropped


def read_rows(path: Path | str, *fields: str, make_ids: bool = True) -> list[dict]:
    """Reads the rows of a local file as they are, each of which must have `fields`.

    A `prompt` column that holds messages is renamed to `messages`. With `make_ids` a row without `id` gets
    `<file name>-<row from 0>`.
    """
    if not is_local(str(path)):
        fail(f"{path}: {no_such_file(str(path))}")
    found = []
    for number, row in read_local(str(path)):
        try:
            check_object(row)
            if "messages" not in row and isinstance(row.get("prompt"), list):
                row["messages"] = row.pop("prompt")
            if make_ids or row.get("id") is not None:
                row["id"] = _id_of(row, path, number)
            for name in fields:
                if row.get(name) is None:
                    raise BadInput(
                        f"no field {name!r} (found {_fields_of(row)}); data/README.md has the forms"
                    )
            if "messages" in fields:
                _check_unicode(row)
                check_messages(messages_of(row, "messages"))
        except BadInput as error:
            fail(f"{path}:{number}: {error}")
        found.append(row)
    if not found:
        fail(f"{path}: no rows")
    return found


def check_ids(path: Path | str, rows: list[dict], what: str = "rows") -> None:
    """Exits with 2 if two rows share an id, because answers, verdicts and rewards are looked up by it."""
    counts = Counter(str(row["id"]) for row in rows)  # some keys are texts, in which 1 and "1" are the same
    repeated = [row_id for row_id, count in counts.items() if count > 1]
    if repeated:
        fail(f"{path}: two {what} have the same id {repeated[0]!r}; make it unique: results are stored by it")


def _id_of(row: dict, name: Path | str, number: int) -> str | int | float:
    """Returns the id of a row, or one made of the file's name; BadInput for an id that cannot be used."""
    if row.get("id") is None:
        return f"{Path(name).stem}-{number - 1}"
    if not isinstance(row["id"], str | int | float):
        raise BadInput(f"'id' must be a text or a number, not {_shorten(row['id'])}")
    return row["id"]


def _check_unicode(row: dict) -> None:
    """Raises BadInput for half a surrogate pair: no tokenizer takes it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"not JSON that UTF-8 can hold ({error.reason}); repair the text") from None


# --- 5. prompts of a training run


def load_prompts(
    path: str, tokenizer, max_prompt_tokens: int, flag: str = "--prompts"
) -> tuple[list[dict], list[dict]]:
    """Reads the prompts to train on and drops those that are too long; prints how many.

    Returns the prompts, their rows with `messages` without control tokens and with `prompt_ids`, and the dropped ones
    {id, reason, tokens}.
    """
    rows = read_prompts(path, flag)
    check_ids(path, rows)
    kept = []
    dropped = []
    cleaned_ids = []
    for row in rows:
        messages = without_control(tokenizer, row["messages"])
        if messages != row["messages"]:
            cleaned_ids.append(str(row["id"]))
        ids = or_fail(encode_prompt, tokenizer, messages)
        if len(ids) > max_prompt_tokens:
            dropped.append({"id": row["id"], "reason": "too_long", "tokens": len(ids)})
        else:
            kept.append({**row, "messages": messages, "prompt_ids": ids})

    state = PartialState()  # its print is that of the main process
    n_answers = sum("had_answer" in row for row in rows)
    if n_answers:
        state.print(f"{n_answers} prompts end with an answer, which is left out: the policy writes its own")
    if cleaned_ids:
        state.print(
            f"control tokens were removed from {len(cleaned_ids)} prompts: {', '.join(cleaned_ids[:5])}"
        )
    summary = f"{path}: {len(kept)} prompts; {len(dropped)} longer than {max_prompt_tokens} tokens dropped"
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
        fail(
            f"{args.prompts}: {len(prompts)} prompts are fewer than --prompts-per-step {args.prompts_per_step}"
        )
    return prompts, dropped, load_held_out(args, tokenizer, prompts)


def load_held_out(args, tokenizer, prompts: list[dict]) -> list[dict]:
    """Reads the prompts of `args.gold_prompts` ([] if empty), on which checkpoints are compared.

    Drops those that are too long, as `load_prompts` does. Exits with 2 if none is left, or if one is also among
    the training `prompts`, as `load_prompts` returns them.
    """
    if not args.gold_prompts:
        return []
    if not args.gold:
        fail("--gold-prompts needs --gold: what the completions are measured by")
    held_out, _ = load_prompts(args.gold_prompts, tokenizer, args.max_prompt_tokens, "--gold-prompts")
    if not held_out:
        fail(f"--gold-prompts {args.gold_prompts}: all are longer than --max-prompt-tokens")
    trained_texts = {json.dumps(row["messages"]) for row in prompts}
    trained = [row["id"] for row in held_out if json.dumps(row["messages"]) in trained_texts]
    if trained:
        fail(
            f"--gold-prompts {args.gold_prompts}: {len(trained)} are trained on, e.g. {trained[0]}; take them out"
        )
    return held_out


# === where rows come from

FILE_TYPES = (".parquet", ".jsonl", ".jsonl.gz", ".json")
DAMAGED_FILE = (OSError, EOFError, zlib.error, pyarrow.ArrowException, UnicodeError)
# owner/name, owner/name:split or owner/name:configuration:split
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")

# --- 1. any source


def read_source(name: str, flag: str, revision: str | None = None) -> Iterator[tuple[int, object]]:
    """Yields (number from 1, row) of a file, a folder or a data set on the hub; exits with 2 without one.

    Args:
        name: a path, or the name of a data set. `name:split` is a split of a folder or a data set; without it,
            `train` is read. A data set in several configurations is `owner/name:configuration:split`.
        flag: the one that an error names.
        revision: commit, tag or branch of a data set on the hub; None is the newest.
    """
    if is_local(name):
        yield from read_local(name)
    elif is_hub_name(name):
        hub_name, *parts = name.split(":")
        split = parts.pop() if parts else "train"
        configuration = parts[0] if parts else None
        yield from read_hub(hub_name, configuration, split, revision, flag)
    else:
        fail(f"{flag} {name}: {no_such_file(name)}")


def no_such_file(name: str) -> str:
    """Returns the error for a path where nothing is, with the remedy."""
    if Path(name).parts[:2] == ("data", "toy"):
        return "no such file; python -m data.toy.world writes it"
    return "no such file; data/README.md says how to make it"


def is_local(name: str) -> bool:
    """Tells whether a name is a file or a folder here, or `folder:split`."""
    folder, colon, _ = name.rpartition(":")
    return Path(name).exists() or bool(colon) and Path(folder).is_dir()


def is_hub_name(name: str) -> bool:
    """Tells whether a name that is not local can be a data set on the hub."""
    return HUB_NAME.fullmatch(name) is not None and not name.endswith(FILE_TYPES)


def read_local(name: str) -> Iterator[tuple[int, object]]:
    """Yields (number from 1, row) of a file, of a folder's split `train`, or of `folder:split`."""
    path = Path(name)
    split = ""
    if not path.exists():
        folder, _, split = name.rpartition(":")
        path = Path(folder)
    try:
        if path.is_dir():
            yield from enumerate(_read_folder(path, split), 1)
        else:
            yield from _read_file(path)
    except DAMAGED_FILE as error:
        fail(f"{path}: cannot be read ({str(error) or type(error).__name__})")


# --- 2. files


def _read_file(path: Path) -> Iterator[tuple[int, object]]:
    """Yields the rows with their numbers: the line in a file of JSON lines, else the place in the list."""
    if path.suffix == ".parquet":
        yield from enumerate(_read_parquet(path), 1)
        return
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        is_list = path.suffix == ".json" and file.read(100).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        if is_list:
            yield from enumerate(_parse(file.read(), str(path)), 1)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parse(line, f"{path}:{number}")


def _parse(text: bytes, place: str) -> object:
    """Parses JSON; broken JSON, bytes that are not UTF-8 or too deep a nesting exit with 2."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(f"{place}: not JSON ({error})")


def _read_parquet(path: Path) -> Iterator[dict]:
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            yield _plain(row)


def _plain(row: dict) -> dict:
    """Turns dates and the like into texts, because rows are written to logs as JSON."""
    return json.loads(json.dumps(row, default=str))


# --- 3. folders


def _read_folder(folder: Path, split: str) -> Iterator[object]:
    """Yields the rows of a folder that `datasets` saved, or of one that was downloaded from the hub."""
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        yield from _read_saved(folder, split)
        return
    for file in _files_of_split(folder, split or "train"):
        for _, row in _read_file(file):
            yield row


def _read_saved(folder: Path, split: str) -> Iterator[dict]:
    """Yields the rows that `save_to_disk` wrote, of a data set with splits or without."""
    import datasets  # slow to import, and a file does not need it

    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        fail(f"{folder}: not a whole data set ({error}); save or copy it again")
    if isinstance(dataset, datasets.Dataset) and split:
        fail(f"{folder} has no splits; leave out ':{split}'")
    if isinstance(dataset, datasets.DatasetDict):
        split = split or "train"
        if split not in dataset:
            fail(f"{folder} has no split {split!r}; write {folder}:SPLIT, with one of {', '.join(dataset)}")
        dataset = dataset[split]
    for row in dataset:
        yield _plain(row)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Returns the files of a split, as the hub names them; exits with 2 unless all are there."""
    # train.jsonl, or train-00000-of-00002.parquet and the like
    named = re.compile(rf"{re.escape(split)}(-\d+-of-(\d+).*)?({'|'.join(map(re.escape, FILE_TYPES))})")
    files = []
    n_parts = 1
    for path in sorted(folder.rglob("*")):
        match = named.fullmatch(path.name)
        if match:
            files.append(path)
            n_parts = int(match[2] or 1)
    if not files:
        found = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        fail(
            f"{folder}: no file of the split {split!r}, such as {split}.jsonl or "
            f"{split}-00000-of-00001.parquet (found {', '.join(found[:5]) or 'nothing'}); "
            f"name a file, or another split by {folder}:SPLIT"
        )
    if len({file.parent for file in files}) > 1:
        folders = sorted({str(file.parent) for file in files})
        fail(f"{folder}: the split {split!r} is in several folders; name one of {', '.join(folders)}")
    if len(files) != n_parts:
        fail(f"{folder}: {len(files)} files of the split {split!r}, not {n_parts}; download them all")
    return files


# --- 4. the hub


def read_hub(
    name: str, configuration: str | None, split: str | None, revision: str | None, flag: str
) -> Iterator[tuple[int, dict]]:
    """Yields (number from 1, row) of a split of a data set, which is downloaded to the usual cache.

    Without a split it reads `test`, or the first one if there is no `test`, as an evaluation does.
    """
    import datasets  # slow to import, and a local file does not need it

    try:
        dataset = datasets.load_dataset(name, configuration, split=split, revision=revision)
    except Exception as error:  # the hub, its client and the network have many kinds
        reason = " ".join(str(error).split())
        missing = f"the split {split!r}" if split else "any split"
        is_path = Path(name).parent.is_dir() and Path(name).parent != Path()  # such as data/mmlu_redux
        if is_path and not Path(name).exists():
            fail(f"{flag} {name}: no such file or folder; data/README.md says where each data set is from")
        fail(
            f"{flag} {name}: neither a file or folder here, nor can {missing} be loaded from the hub ({reason}); "
            f"check the name, or where there is a network run hf download {name} --repo-type dataset "
            "--local-dir DIR, and give DIR or a file in it"
        )
    if split is None:  # then the library returns all of them
        first = next(iter(dataset))
        dataset = dataset.get("test", dataset[first])
    for number, row in enumerate(dataset, 1):
        yield number, _plain(row)


# --- logs


def write_file(path: Path, text: str) -> None:
    """Writes the whole text or, on a full disk, raises OSError and leaves the file as it was."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def append_jsonl(path: Path, rows: list[dict]) -> None:
    """Appends rows to a jsonl file."""
    with open(path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_log(path: Path) -> list[dict]:
    """Reads a log that one process appends to, [] if there is none; removes a last line that a kill cut off."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    if lines[-1]:
        write_file(path, "".join(line + "\n" for line in lines[:-1]))
    return [json.loads(line) for line in lines[:-1]]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Writes rows to a file, all or none; main process only."""
    if PartialState().is_main_process:
        write_file(path, "".join(json.dumps(row) + "\n" for row in rows))
