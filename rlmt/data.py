"""Reads prompts, traces and pairs in the forms that users have, and the prompts of a training run.

data/README.md has the forms. Input that cannot be used ends the program with exit code 2 and one line that
names file, row and field. A row whose texts cannot be trained on is dropped for a reason, and listed.
"""

import gzip
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from accelerate import PartialState

from rlmt.chat import Dropped, encode_prompt, flaw_of_text, render, without_control
from rlmt.foreign import FOREIGN_MARK
from utils import TAGS, THINK_FORMATS, fail, in_one_line, split_thinking

FILE_TYPES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv")

ROLES = {"system", "user", "assistant", "tool"}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# fields with the answer of a trace; and with its thinking, where that is apart: in a row or an assistant's
# turn
ANSWER_FIELDS = ("response", "completion", "output")
THINKING_FIELDS = ("thinking", "thought", "reasoning_content", "reasoning")
SWITCHES = ("on", "off")  # Nemotron's `reasoning` says whether thinking was asked for
# what servers write when an answer came to its end: OpenAI's and vLLM's, Gemini's, Anthropic's, TGI's, Together's
FINISHED = ("stop", "STOP", "end_turn", "stop_sequence", "eos_token", "eos")
# in which a row or turn that is not to be learned has false or 0: KTO's, OpenAI's, axolotl's
MARKS = ("label", "weight", "train")
TURN_KEYS = {"role", "content", *THINKING_FIELDS, *MARKS}


class BadInput(ValueError):
    """A row or an argument cannot be used; the message says which field, and what to do."""


class Row(dict):
    """A row that notes in `used` which of its fields were read."""

    def __init__(self, row: dict):
        super().__init__(row)
        self.used = {"id"}

    def __getitem__(self, name: str):
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str):
        self.used.add(name)
        return super().get(name)


def drop_if(is_flawed: bool, reason: str) -> None:
    """Raises Dropped for a flawed row."""
    if is_flawed:
        raise Dropped(reason)


def fail_at(name: Path | str, number: int, row: dict, error: Exception) -> None:
    """Exits with 2 and one line that names a row and its fields."""
    fail(f"{name}:{number}: {error}; the row has {', '.join(row)}; data/README.md has the forms")


# --- 1. where rows come from


def read_source(
    name: str, flag: str, revision: str | None = None, split: str = "train"
) -> Iterator[tuple[int, dict]]:
    """Yields (number from 1, row) of a file, a folder or a data set on the hub; exits with 2 if it cannot be
    read.

    Args:
        name: a path, `folder:split`, or a name on the hub, `owner/name`, `owner/name:split` or
            `owner/name:configuration:split`.
        flag: the one that an error names.
        revision: commit, tag or branch on the hub; None is the newest.
        split: the one to read if `name` has none. "" (evaluations): `name` never has one, and `test` is read,
            or the first split if there is no `test`.
    """
    place = name
    parts = []
    # a path may have a colon in it, so what exists is taken as it is
    if not Path(name).exists():
        place, *parts = name.split(":")
    if parts and split:
        split = parts.pop()
    path = Path(place)
    if path.is_file() and path.suffix not in (".parquet", ".csv"):
        rows = _read_file(path)
    elif place.endswith(FILE_TYPES) and not path.exists():
        fail(f"{flag} {name}: no such file; see data/README.md (data/toy: python -m data.toy.world)")
    else:
        from rlmt.tables import read_set  # slow to import, and JSON does not need it

        rows = enumerate(read_set(place, parts, split, revision), 1)

    number = 0
    try:
        for number, row in rows:
            yield number, _in_messages(row)
    except Exception as error:
        # damaged tables, turns of another form, the hub and the network have many kinds
        reason = in_one_line(error.__cause__ or error)
        fail(f"{flag} {name}: row {number} or the next cannot be read ({reason}); see data/README.md")


def _read_file(path: Path) -> Iterator[tuple[int, object]]:
    """Yields the rows with their numbers: the line in a file of JSON lines, else the place in the list."""
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        if path.suffix == ".json":
            yield from enumerate(json.load(file), 1)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    fail(f"{path}:{number}: not JSON ({error})")
                yield number, row


def _in_messages(row: dict) -> dict:
    """Returns a row in ShareGPT's form, `conversations` of turns {from, value}, as one with `messages`."""
    if row.get("conversations"):
        row["messages"] = []
        for turn in row.pop("conversations"):
            role = turn.pop("from")
            turn |= {"role": SHAREGPT_ROLES.get(role, role), "content": turn.pop("value")}
            row["messages"].append(turn)
    return row


# --- 2. what a row holds


def turns_of(row: dict, name: str, role: str = "user") -> list[dict]:
    """Returns a field's conversation, without empty keys; a text is one turn of `role`. BadInput if it is
    neither, and for a text in `messages`: that is a list which a CSV file made a text.

    A system prompt that has a field of its own comes before a user's first turn.
    """
    turns = row.get(name)
    if turns is None:
        raise BadInput(f"{name!r} is missing; rename the field that has it")
    if isinstance(turns, str) and name != "messages":
        turns = [{"role": role, "content": turns}]
    system = row.get("system") or row.get("system_prompt")
    try:
        if system and turns and turns[0]["role"] == "user":
            turns = [{"role": "system", "content": system}, *turns]
        "".join(turn["role"] + turn["content"] for turn in turns)  # an error unless all are texts
    except (TypeError, KeyError):
        raise BadInput(
            f"{name!r} must be a list of {{'role', 'content'}} (or a text, but in messages), not {reprlib.repr(turns)}"
        ) from None
    # a table has every key in every turn
    return [{key: value for key, value in turn.items() if value is not None} for turn in turns]


def first_field(row: dict, names: tuple[str, ...]) -> str:
    """Returns the first of `names` that has a value in a row; "" if none has."""
    return next((name for name in names if row.get(name) is not None), "")


def prompt_of(row: dict) -> list[dict]:
    """Returns the conversation in `messages` or `prompt`, whichever role it ends with.

    A pair without either has it in `chosen`, before the answer. UltraFeedback also has the last turn as a
    text in `prompt`, so `chosen` comes before that.
    """
    if row.get("messages") is not None:
        return turns_of(row, "messages")
    chosen = row.get("chosen")
    if isinstance(chosen, list) and len(chosen) > 1 and not isinstance(row.get("prompt"), list):
        return turns_of(row, "chosen")[:-1]
    return turns_of(row, "prompt")


def without_answer(messages: list[dict]) -> list[dict]:
    """Returns a conversation without the assistant's turn that it may end with."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[:-1]
    return messages


def check_prompt(row: dict) -> None:
    """Raises ValueError unless a row is Unicode, and `messages` are in known roles and end with a user's
    text."""
    json.dumps(row, ensure_ascii=False).encode()  # no tokenizer takes half a surrogate pair
    messages = row["messages"]
    roles = [message["role"] for message in messages]
    # a template would write another role into the text, or drop the turn
    if not ROLES.issuperset(roles) or roles[-1:] != ["user"] or not messages[-1]["content"].strip():
        raise BadInput(
            f"a prompt must end with a user's text, not empty, and have no roles but {sorted(ROLES)}, not {roles}"
        )


def answer_of(row: dict, name: str) -> tuple[list[dict], dict]:
    """Returns the turns before the answer that a field ends with, maybe none, and the answer, an assistant's
    turn.

    Raises Dropped without an answer, for a call of a tool, and where the row or the turn says that it is not to
    be learned.
    """
    turns = turns_of(row, name, "assistant")
    drop_if(without_answer(turns) == turns, "not_ending_in_assistant")
    answer = turns.pop()
    drop_if(answer.get("tool_calls"), "tool_calls")
    for field in MARKS:
        for value in (row.get(field), answer.get(field)):
            drop_if(str(value).lower() in ("false", "0", "0.0"), f"{field}_{value}")
    return turns, answer


def split_answer(answer: dict) -> tuple[str, str]:
    """Returns thinking and response of an assistant's turn; raises Dropped if its tags fit no think format, or
    if the response is empty or has marks of thinking."""
    thinking, response = _split_tags(answer)
    drop_if(not response.strip(), "empty_response")
    drop_if(any(tag in response for tag in TAGS), "tag_inside_text")
    drop_if(FOREIGN_MARK.search(response), "foreign_thinking")
    return thinking, response


def _split_tags(answer: dict) -> tuple[str, str]:
    """Splits an answer whose thinking is in a field of its own, or in tags before the response; without either
    it is ""."""
    text = answer["content"]
    for name in THINKING_FIELDS:
        if answer.get(name):
            if not isinstance(answer[name], str):
                raise BadInput(f"{name!r} must be a text, not {reprlib.repr(answer[name])}")
            return answer[name], text

    n_tags = {}
    for name, known in THINK_FORMATS.items():
        if any(tag in text for tag in known.thinking_tags or ()):
            n_tags[name] = sum(tag in text for tag in known.tags)
    if not n_tags:
        return "", text
    think_format = max(n_tags, key=n_tags.get)  # another would leave tags in the text
    flaw = flaw_of_text(text, think_format)
    drop_if(flaw != "", flaw)
    return split_thinking(text, think_format)[:2]


# --- 3. prompts, traces and pairs


def to_prompt(row: dict) -> dict:
    """Returns a prompt row, without the answer that its `messages` may end with."""
    return row | {"messages": without_answer(prompt_of(row))}


def to_trace(row: dict) -> dict:
    """Returns a trace row with `messages`, `thinking` ("" if there is none) and `response`.

    Raises Dropped for an answer that did not come to its end (`finish_reason`), or whose tags fit no think
    format.
    """
    finish_reason = row.get("finish_reason") or "stop"  # most sources do not say
    drop_if(finish_reason not in FINISHED, f"finish_reason_{finish_reason}")
    name = first_field(row, ANSWER_FIELDS) or "messages"
    messages, answer = answer_of(row, name)
    if name != "messages":  # an answer at the end of the prompt is the source's, not the teacher's
        messages = without_answer(prompt_of(row)) + messages
    for field in THINKING_FIELDS:
        if row.get(field) and row[field] not in SWITCHES:
            answer[field] = row[field]
    thinking, response = split_answer(answer)
    return row | {"messages": messages, "thinking": thinking, "response": response}


def text_of_turns(turns: list[dict]) -> str:
    """Returns role and content of each turn, without dates and the like, as one JSON text: equal conversations
    have equal ones."""
    return json.dumps([(turn["role"], turn["content"]) for turn in turns])


def to_pair(row: dict) -> dict:
    """Returns a preference row with `messages`, `chosen` and `rejected`, and their thinking if they have it.

    Raises Dropped if the two sides are not answers to one prompt, if their scores are equal or say the opposite,
    or for a side without a good answer.
    """
    sides = {"chosen": answer_of(row, "chosen"), "rejected": answer_of(row, "rejected")}
    scores = [row.get(f"score_{side}") for side in sides]
    if None not in scores and "" not in scores:
        try:
            chosen, rejected = map(float, scores)  # in a .csv they are texts
        except (TypeError, ValueError) as error:
            raise BadInput(f"score_chosen, score_rejected: {error}") from error
        drop_if(chosen == rejected, "tied_scores")
        drop_if(chosen < rejected, "reversed_scores")
    pair = to_prompt(row)
    for side, (turns, answer) in sides.items():
        # a side is an answer alone, or a whole conversation with the same prompt
        drop_if(turns and text_of_turns(turns) != text_of_turns(pair["messages"]), "different_prompts")
        answer["thinking"] = row.get(f"{side}_thinking") or answer.get("thinking")
        thinking, pair[side] = split_answer(answer)
        if thinking:
            pair[f"{side}_thinking"] = thinking
    return pair


# --- 4. readers


def read_prompts(name: Path | str, flag: str = "--prompts") -> list[dict]:
    """Reads prompt rows, with all their fields, in any form and from any place that data/README.md names."""
    prompts, _ = _read(name, flag, to_prompt)  # none is dropped
    return prompts


def read_traces(name: Path | str, flag: str = "--traces") -> tuple[list[dict], list[dict]]:
    """Reads trace rows likewise; returns them, and the dropped ones {id, reason}."""
    return _read(name, flag, to_trace)


def read_pairs(name: Path | str, flag: str = "--pairs") -> tuple[list[dict], list[dict]]:
    """Reads preference rows likewise; returns them, and the dropped ones {id, reason}."""
    return _read(name, flag, to_pair)


def read_rows(name: Path | str, *fields: str, make_ids: bool = True) -> list[dict]:
    """Reads rows as they are, each of which must have `fields`; `messages` may also be called `prompt`."""

    def with_fields(row: dict) -> dict:
        if "messages" in fields:
            row["messages"] = prompt_of(row)
        for field in fields:
            if row.get(field) is None:
                raise BadInput(f"no field {field!r}")
        return dict(row)

    rows, _ = _read(name, "file", with_fields, make_ids, has_prompt="messages" in fields)
    return rows


def _read(
    name: Path | str,
    flag: str,
    convert: Callable[[dict], dict],
    make_ids: bool = True,
    has_prompt: bool = True,
) -> tuple[list[dict], list[dict]]:
    """Reads and converts rows; returns them and the dropped ones. A row of another form exits with 2.

    With `make_ids` a row without `id` gets `<file name>-<row from 0>`.
    """
    found = []
    dropped = []
    unused = Counter()
    for number, row in read_source(str(name), flag):
        row = Row(row)
        if make_ids and row.get("id") is None:
            row["id"] = f"{Path(name).stem}-{number - 1}"
        try:
            converted = convert(row)
            if has_prompt:
                check_prompt(converted)
        except Dropped as reason:
            dropped.append({"id": row["id"], "reason": str(reason)})
        except ValueError as error:
            fail_at(name, number, row, error)
        else:
            found.append(converted)
            unused.update(field for field in row.keys() - row.used if row[field] not in (None, "", [], {}))
    if not found and not dropped:
        fail(f"{flag} {name}: no rows")
    if flag.startswith("--"):  # not of an evaluation, which reads other fields
        for row in found:
            turn_keys = set().union(*row["messages"]) - TURN_KEYS
            unused.update(f"messages.{key}" for key in turn_keys)
        if unused:
            fields = ", ".join(f"{field} ({n} rows)" for field, n in sorted(unused.items()))
            PartialState().print(f"{flag} {name}: not part of any text: {fields}")
    return found, dropped


def check_ids(path: Path | str, rows: list[dict], what: str = "rows") -> None:
    """Exits with 2 if two rows share an id, because answers, verdicts and rewards are looked up by it."""
    seen = set()
    for row in rows:
        row_id = str(row["id"])  # some keys are texts, in which 1 and "1" are the same
        if row_id in seen:
            fail(f"{path}: two {what} have the same id {row_id!r}; make it unique: results are stored by it")
        seen.add(row_id)


# --- 5. prompts of a training run


def load_prompts(
    path: str,
    tokenizer,
    max_prompt_tokens: int,
    n_needed: int = 1,
    flag: str = "--prompts",
    readers: list = (),
) -> tuple[list[dict], list[dict]]:
    """Reads the prompts to train on, and drops those that are too long or that a chat template refuses: the
    policy's, or one of `readers`, the tokenizers of reward models.

    Returns the prompts, their rows with `messages` without control tokens and with `prompt_ids`, and the
    dropped ones {id, reason}. Prints how many were dropped or changed. Exits with 2 if fewer than `n_needed`
    are left.
    """
    rows = read_prompts(path, flag)
    check_ids(path, rows)
    kept = []
    dropped = []
    n_cleaned = 0
    for row in rows:
        # what is logged is what the policy reads
        messages = without_control(tokenizer, row["messages"])
        try:
            ids = encode_prompt(tokenizer, messages)
            for reader in readers:  # with some answer, as a reward model reads it
                render(reader, [*messages, {"role": "assistant", "content": "Y"}], tokenize=False)
        except Dropped as reason:
            dropped.append({"id": row["id"], "reason": str(reason)})
            continue
        if len(ids) > max_prompt_tokens:
            dropped.append({"id": row["id"], "reason": "too_long", "tokens": len(ids)})
            continue
        n_cleaned += messages != row["messages"]
        kept.append({**row, "messages": messages, "prompt_ids": ids})

    summary = (
        f"{path}: {len(kept)} prompts ({n_cleaned} had control tokens, now removed), {len(dropped)} dropped"
    )
    if dropped:
        summary += f", the first: {dropped[0]}"
    if len(kept) < n_needed:
        fail(f"{flag} {summary}: a step or a round needs {n_needed}; add prompts, or make it smaller")
    PartialState().print(summary)  # on the main process
    return kept, dropped


def load_held_out(
    path: str, tokenizer, max_prompt_tokens: int, prompts: list[dict], readers: list = ()
) -> list[dict]:
    """Reads the prompts of --gold-prompts ([] for an empty path), on which checkpoints are compared.

    Drops what `load_prompts` drops. Exits with 2 if one is also among the training `prompts`, as
    `load_prompts` returns them.
    """
    if not path:
        return []
    held_out, _ = load_prompts(path, tokenizer, max_prompt_tokens, 1, "--gold-prompts", readers)
    # by their texts, as ids differ from file to file
    trained_texts = {text_of_turns(row["messages"]) for row in prompts}
    trained = [row["id"] for row in held_out if text_of_turns(row["messages"]) in trained_texts]
    if trained:
        fail(f"--gold-prompts {path}: {len(trained)} are trained on, e.g. {trained[0]}; take them out")
    return held_out


# --- 6. logs


def write_file(path: Path, text: str) -> None:
    """Writes the whole text or, on a full disk, raises OSError and leaves the file as it was."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def to_jsonl(rows: list[dict], **options) -> str:
    """Returns the text of a jsonl file; `options` are those of json.dumps."""
    return "".join(json.dumps(row, **options) + "\n" for row in rows)


def append_jsonl(path: Path, rows: list[dict]) -> None:
    """Appends rows to a jsonl file."""
    with open(path, "a") as file:
        file.write(to_jsonl(rows))


def read_log(path: Path) -> list[dict]:
    """Reads a log that one process appends to, [] if there is none; removes a last line that a kill cut
    off."""
    if not path.exists():
        return []
    *lines, torn = path.read_text().split("\n")
    if torn:
        write_file(path, "".join(line + "\n" for line in lines))
    return [json.loads(line) for line in lines]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """Writes rows to a file, all or none; main process only."""
    if PartialState().is_main_process:
        write_file(path, to_jsonl(rows))
