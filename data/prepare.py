"""Turn real data into this repository's row schemas (data/README.md), one JSON object a line.

    python -m data.prepare wildchat-if --out data/wildchat_if.jsonl
    python -m data.prepare tulu3-random --exclude data/wildchat_if.jsonl --out data/tulu3_random.jsonl

`--input` is a hub dataset name or a local .parquet, .jsonl, .jsonl.gz or .json file. Texts are never altered: a row is
kept whole or dropped for a named reason. The reasons, their counts and the first ids of each go to the console and to
`<out>.report.json`, where n_in == n_out + sum(dropped). Malformed input (broken JSON, a missing field, a wrong type)
stops the script with one line and exit code 2 before anything is written. All kept rows are held in memory.
"""

import gzip
import hashlib
import json
import os
import random
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow.parquet
import tyro

ROOT = Path(__file__).resolve().parents[1]  # the repository, where utils.py lives
FILE_TYPES = (".parquet", ".jsonl", ".jsonl.gz", ".json")


@dataclass
class Args:
    kind: tyro.conf.Positional[
        Literal[
            "wildchat-if", "ultrafeedback", "tulu3-random", "verifiable", "skywork", "traces", "wildbench"
        ]
    ]
    """what the input is; decides whether prompt, preference, trace or benchmark task rows come out"""
    out: Path
    """the .jsonl file to write; its report goes beside it as <out>.report.json"""
    input: str | None = None
    """hub dataset name or local file; None = the kind's own hub dataset (traces have none)"""
    split: str | None = None
    """hub datasets only: which split; None = `train`, for ultrafeedback `train_prefs`"""
    revision: str | None = None
    """hub datasets only: commit, tag or branch; None = the newest, so give a commit where runs must be repeatable"""
    pairs: bool = False
    """ultrafeedback only: preference rows instead of prompt rows"""
    n: int | None = None
    """keep a random sample of this many rows, in their old order; None = all, for tulu3-random 7560 (paper table 7)"""
    seed: int = 0
    """seed of that sample"""
    exclude: tuple[Path, ...] = ()
    """files of prompt, trace or pair rows: a row with an id or with the first user turn of one of theirs is dropped"""
    teacher: str | None = None
    """traces only: name for the rows that carry no `teacher`; None = such a row is an error"""
    think_format: Literal["think", "zero_think"] = "think"
    """traces only: tags in `output` or `completion`, as in utils.THINK_FORMATS (zero_think: response tagged as well)"""
    overwrite: bool = False
    """replace an existing output and its report"""


class BadInput(ValueError):
    """The input or the arguments cannot be used; the message says where, which field, and what to do."""


# --- reading


def read_file(path: Path) -> Iterator[tuple[str, object]]:
    """Yield ("FILE, line N" or "FILE, row N", row), counted from 1; raises BadInput where the file cannot be read."""
    number, unit = 0, "row"
    try:
        if path.suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
            rows = (row for batch in batches for row in batch.to_pylist())
        else:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            rows = data.decode("utf-8-sig")
            if path.suffix == ".json":
                rows = json.loads(rows)
                if not isinstance(rows, list):
                    raise BadInput(f"{path} holds no list of rows; name it .jsonl if each line is one row")
            else:  # a blank line is not a row
                unit, rows = "line", (json.loads(x.strip()) if x.strip() else ... for x in rows.split("\n"))
        for number, row in enumerate(rows, 1):
            if row is not ...:
                yield f"{path}, {unit} {number}", row
    except json.JSONDecodeError as error:
        place = f"line {number + error.lineno}, column {error.colno}"
        raise BadInput(f"{path}, {place}: not JSON ({error.msg}); repair the line") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, pyarrow.ArrowException) as error:
        raise BadInput(f"{path}: cannot be read as {path.suffix} ({error}); fetch the file again") from None


def read_hub(name: str, split: str, revision: str | None) -> Iterator[tuple[str, object]]:
    """Yield ("NAME, row N", row) of one split of a hub dataset, downloaded to the usual cache."""
    import datasets  # slow to import, and a local file does not need it

    name, _, config = name.partition(":")
    try:
        dataset = datasets.load_dataset(name, *([config] if config else []), split=split, revision=revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = f"split {split} cannot be loaded ({' '.join(str(error).split())})"
        raise BadInput(f"{name}: {reason}; check --input, --split, --revision and the network") from None
    for number, row in enumerate(dataset, 1):
        yield f"{name}, row {number}", row


def each(
    rows: Iterable[tuple[str, object]], function: Callable[[dict], object]
) -> Iterator[tuple[str, object]]:
    """Yield (id of the source or None, function(row)); a BadInput gets the file and the line in front."""
    for where, row in rows:
        try:
            if not isinstance(row, dict):
                raise BadInput(f"is a {type(row).__name__}; every row has to be an object with named fields")
            yield own_id(row), function(row)
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None


# --- fields


def field(row: dict, *names: str, kind: type | tuple[type, ...] = str) -> object:
    """The first of `names` in the row that is not null; raises BadInput if all are missing or the type is wrong."""
    for name in names:
        if row.get(name) is not None:
            if not isinstance(row[name], kind):
                wanted = {str: "text", list: "a list of messages"}.get(kind, "a number")
                raise BadInput(f"field {name} is a {type(row[name]).__name__}, not {wanted}; convert it")
            return row[name]
    has = ", ".join(map(str, row)) or "nothing"
    raise BadInput(
        f"field {' or '.join(names)} is missing or null (the row has {has}); add it, or choose another kind"
    )


def messages_in(row: dict, name: str) -> list[dict[str, str]]:
    """The conversation in field `name`, reduced to role and content."""
    messages = field(row, name, kind=list)
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise BadInput(
                    f"field {name}[{i}].{key} is missing or not text; a message is {{role, content}}"
                )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def prompt_in(row: dict) -> list[dict[str, str]]:
    """The prompt: the list in `prompt`; where that is text (Tulu 3 pairs, UltraFeedback) the turns of `chosen` before
    its last, or without a `chosen` the text as one user turn; without `prompt` the list in `messages`."""
    if row.get("prompt") is None:
        return messages_in(row, "messages")
    if isinstance(row["prompt"], list):
        return messages_in(row, "prompt")
    text = field(row, "prompt")
    return messages_in(row, "chosen")[:-1] if row.get("chosen") else [{"role": "user", "content": text}]


def own_id(row: dict) -> str | None:
    """The source's own id, if any; verl files count within a split, so theirs becomes source-split-index."""
    extra = row.get("extra_info")
    if isinstance(extra, dict) and extra.get("index") is not None:
        return f"{row.get('data_source', 'row')}-{extra.get('split', 'all')}-{extra['index']}"
    return next(
        (str(row[name]) for name in ("session_id", "id", "prompt_id") if row.get(name) not in (None, "")),
        None,
    )


def opening(messages: list[dict[str, str]]) -> str | None:
    """The first user turn with its white space collapsed: what two disjoint files must not share."""
    return next(
        (" ".join(message["content"].split()) for message in messages if message["role"] == "user"), None
    )


def prompt_fault(messages: list[dict[str, str]]) -> str | None:
    """Why these messages cannot be a prompt, or None. After an optional system turn, user and assistant alternate."""
    roles = [message["role"] for message in messages]
    turns = messages[1:] if roles[:1] == ["system"] else messages
    if not set(roles) <= {"system", "user", "assistant"}:
        return "unsupported_role"
    if not any(turn["content"].strip() for turn in turns):
        return "empty_prompt"
    if roles[-1] != "user":
        return "not_ending_in_user"
    if any(turn["role"] != ("user", "assistant")[i % 2] for i, turn in enumerate(turns)):
        return "turns_not_alternating"
    return None if all(turn["content"].strip() for turn in turns) else "empty_turn"


# --- one function per kind: a source row -> our row without its id, or the reason for dropping it


def prompt_row(row: dict, args: Args) -> dict | str:
    """WildChat-IF and UltraFeedback prompts; `source` is the row's own (source, data_source), else the input's name."""
    messages = prompt_in(row)
    source = row.get("source") or row.get("data_source") or Path(args.input).name
    return prompt_fault(messages) or {"messages": messages, "source": str(source)}


def tulu_row(row: dict, args: Args) -> dict | str:
    """Tulu 3 SFT conversations: the prompt is every turn before the last assistant turn."""
    messages = messages_in(row, "messages")
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    return "no_assistant_turn" if last is None else prompt_row({**row, "prompt": messages[:last]}, args)


def verifiable_row(row: dict, args: Args) -> dict | str:
    """Prompts with what a reward of rewards.py needs: `answer` (also from `ground_truth` or `solution`; GSM8K's and MATH's,
    out of which the reward reads the final answer), `tests`, `instruction_id_list`, `reference` or `rubric`, as they are."""
    text = next((name for name in ("question", "problem") if row.get(name) is not None), None)
    messages = [{"role": "user", "content": field(row, text)}] if text else prompt_in(row)
    known = {
        name: row[name]
        for name in ("tests", "entry_point", "instruction_id_list", "kwargs", "reference", "rubric")
        if row.get(name) is not None
    }
    answer = next(
        (row[name] for name in ("answer", "ground_truth", "solution") if row.get(name) is not None), None
    )
    if (
        isinstance(answer, str) and "func_name" in answer
    ):  # Tulu 3's own constraints name functions of its training code
        return "constraint_of_another_verifier"
    if answer is not None:
        known["answer"] = str(field({"answer": answer}, "answer", kind=(str, int, float)))
    if not known.keys() & {"answer", "tests", "instruction_id_list", "reference", "rubric"}:
        raise BadInput(
            "nothing to verify by: answer, ground_truth, solution, tests, instruction_id_list, reference or "
            f"rubric is missing (the row has {', '.join(map(str, row))}); add one"
        )
    source = row.get("source") or row.get("dataset") or Path(args.input).name
    return prompt_fault(messages) or {"messages": messages, "source": str(source), **known}


def pair_row(row: dict, args: Args) -> dict | str:
    """Preference pairs: `chosen` and `rejected` are conversations that differ in their last turn, an assistant's.
    Where both carry a score, a tie or a reversed order is no preference and goes."""
    chosen, rejected = messages_in(row, "chosen"), messages_in(row, "rejected")
    if any(not side or side[-1]["role"] != "assistant" for side in (chosen, rejected)):
        return "not_ending_in_assistant"
    if chosen[:-1] != rejected[:-1]:
        return "different_prompts"
    texts = {"chosen": chosen[-1]["content"], "rejected": rejected[-1]["content"]}
    if not all(text.strip() for text in texts.values()):
        return "empty_response"
    if texts["chosen"].strip() == texts["rejected"].strip():
        return "identical_pair"
    if row.get("score_chosen") is not None and row.get("score_rejected") is not None:
        margin = field(row, "score_chosen", kind=(int, float)) - field(
            row, "score_rejected", kind=(int, float)
        )
        if margin <= 0:
            return "tied_scores" if margin == 0 else "reversed_scores"
    return prompt_fault(chosen[:-1]) or {"messages": chosen[:-1], **texts}


def trace_row(row: dict, args: Args) -> dict | str:
    """Traces: `thinking` and `response`, or both with their tags in `output` or `completion`. There a status of
    utils.split_thinking other than "ok" is the reason, and a `finish_reason` of "length" means the text was cut."""
    messages = prompt_in(row)
    teacher = args.teacher if row.get("teacher") is None and args.teacher else field(row, "teacher")
    from utils import TAGS, split_thinking  # here, as utils loads torch, which the other kinds can do without

    if row.get("thinking") is not None:
        thinking, response = field(row, "thinking"), field(row, "response")
    else:
        text = field(row, "output", "completion", "thinking")
        thinking, response, status = split_thinking(
            text, args.think_format, row.get("finish_reason") != "length"
        )
        if status != "ok":
            return status
        if args.think_format == "zero_think" and not text.rstrip().endswith("</response>"):
            return "text_after_response"  # the parser would cut it off
    if not (thinking or "").strip() or not response.strip():
        return "empty_response" if not response.strip() else "empty_thinking"
    if any(tag in thinking or tag in response for tag in TAGS):
        return "tag_inside_text"
    texts = {"thinking": thinking, "response": response, "teacher": teacher}
    return prompt_fault(messages) or {"messages": messages, **texts}


def task_row(row: dict, args: Args) -> dict | str:
    """WildBench tasks: the conversation, its checklist, tags, and the answers of reference models."""
    name = "conversation_input" if row.get("conversation_input") is not None else "messages"
    messages, checklist = messages_in(row, name), field(row, "checklist", kind=list)
    references = {
        model: text for model, text in field(row, "references", kind=dict).items() if text is not None
    }
    if not all(isinstance(text, str) for text in (*checklist, *references.values())):
        raise BadInput("checklist and references have to hold texts")
    tags = {"primary_tag": field(row, "primary_tag"), "secondary_tags": list(row.get("secondary_tags") or [])}
    return prompt_fault(messages) or {
        "messages": messages,
        "checklist": checklist,
        **tags,
        "references": references,
    }


KINDS = {  # kind: (row function, what its rows are, hub dataset, split)
    "wildchat-if": (prompt_row, "prompt", "allenai/tulu-3-wildchat-if-on-policy-8b", "train"),
    "ultrafeedback": (prompt_row, "prompt", "HuggingFaceH4/ultrafeedback_binarized", "train_prefs"),
    "tulu3-random": (tulu_row, "prompt", "allenai/tulu-3-sft-mixture", "train"),
    "verifiable": (verifiable_row, "prompt", "openai/gsm8k:main", "train"),
    "skywork": (pair_row, "pair", "Skywork/Skywork-Reward-Preference-80K-v0.2", "train"),
    "traces": (trace_row, "trace", None, None),
    "wildbench": (task_row, "task", "allenai/WildBench:v2", "test"),
}


def resolve(args: Args) -> Args:
    """Fill in what None stands for; raises BadInput where arguments contradict each other or the disk."""
    _, _, hub, split = KINDS[args.kind]
    name = args.input or hub or ""
    local = Path(name).exists() or name.endswith(FILE_TYPES) or "/" not in name
    files = [Path(name)] * local + list(args.exclude)
    for wrong, message in (
        (not name, "--input is missing: traces have no hub dataset of their own; give a file"),
        (args.pairs and args.kind != "ultrafeedback", "--pairs is for ultrafeedback; leave it out"),
        (args.teacher and args.kind != "traces", "--teacher is for traces; leave it out"),
        (
            local and (args.split or args.revision),
            "--split and --revision are for hub datasets; leave them out",
        ),
        (args.n is not None and args.n < 1, f"--n {args.n}: keep at least 1 row"),
        (args.out.suffix != ".jsonl", f"--out {args.out}: the name has to end in .jsonl"),
        (
            args.out.resolve() in [file.resolve() for file in files],
            f"--out {args.out} is an input; choose another",
        ),
        *((not file.is_file(), f"{file} is not a file; correct the path") for file in files),
        *(
            (not file.name.endswith(FILE_TYPES), f"{file}: use one of {', '.join(FILE_TYPES)}")
            for file in files
        ),
        *(
            (path.exists() and not args.overwrite, f"{path} exists; choose another --out or add --overwrite")
            for path in (args.out, Path(f"{args.out}.report.json"))
        ),
    ):
        if wrong:
            raise BadInput(message)
    n = 7560 if args.n is None and args.kind == "tulu3-random" else args.n
    return replace(args, input=name, n=n, split=None if local else args.split or split)


def convert(args: Args) -> tuple[list[dict], dict]:
    """Read what `args` (resolved) names; returns the rows to write and their report, still without the hash."""
    function, noun = (pair_row, "pair") if args.pairs else KINDS[args.kind][:2]
    taken = set()  # ids and first user turns of the excluded files
    for path in args.exclude:
        for row_id, messages in each(read_file(path), prompt_in):
            taken |= {("id", row_id), ("text", opening(messages))}

    rows, dropped, digests, ids, n_in, n_renamed = [], {}, set(), set(), 0, 0  # dropped: {reason: [ids]}
    source = read_hub(args.input, args.split, args.revision) if args.split else read_file(Path(args.input))
    for row_id, row in each(source, lambda row: function(row, args)):
        n_in += 1
        faults = {row: True} if isinstance(row, str) else {}
        if not faults:
            text = json.dumps(
                {key: row[key] for key in row if key not in ("source", "teacher")}, ensure_ascii=False
            )
            digest = hashlib.sha1(text.encode(errors="surrogatepass")).hexdigest()[:16]
            row_id = row_id or digest
            faults = {
                "broken_unicode": re.search(
                    "[\ud800-\udfff]", text
                ),  # half a surrogate pair: not writable as UTF-8
                "excluded_id": ("id", row_id) in taken,
                "excluded_prompt": ("text", opening(row["messages"])) in taken,
                f"duplicate_{noun}": digest in digests,
            }
        reason = next((name for name, true in faults.items() if true), None)
        if reason:
            dropped.setdefault(reason, []).append(row_id or f"row {n_in}")
            continue
        if row_id in ids:  # a different row has this id: this one's gets longer
            row_id, n_renamed = f"{row_id}-{digest}", n_renamed + 1
        ids.add(row_id)
        digests.add(digest)
        rows.append({"id": row_id, **row})

    if len(rows) < (args.n or 1):
        counts = {reason: len(dropped[reason]) for reason in dropped}
        found = f"{args.input}: {n_in} rows in, {len(rows)} usable, {args.n or 1} wanted (dropped: {counts})"
        raise BadInput(f"{found}; give a smaller --n or another input")
    if args.n:
        keep = set(random.Random(args.seed).sample(range(len(rows)), args.n))
        dropped["not_sampled"] = [row["id"] for i, row in enumerate(rows) if i not in keep]
        rows = [row for i, row in enumerate(rows) if i in keep]
    counts = {reason: len(dropped[reason]) for reason in dropped}
    examples = {reason: dropped[reason][:5] for reason in dropped}
    report = {"kind": args.kind, "input": args.input, "n_in": n_in, "n_out": len(rows), "dropped": counts}
    return rows, {**report, "examples": examples, "renamed_ids": n_renamed, "args": vars(args)}


def main(args: Args) -> None:
    """Convert, then write rows and report to temporary files and rename both; exits with 2 on BadInput."""
    try:
        args = resolve(args)
        rows, report = convert(args)
    except BadInput as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        sys.exit(2)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    report["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report_text = json.dumps(report, indent=1, default=str) + "\n"
    for name, content in ((args.out, text), (f"{args.out}.report.json", report_text)):
        Path(f"{name}.part").write_text(content, encoding="utf-8", newline="\n")
        os.replace(f"{name}.part", name)
    print(f"{args.input}: {report['n_in']} rows in, {report['n_out']} out -> {args.out}")
    for reason, count in report["dropped"].items():
        print(f"  dropped {count:7d}  {reason}  (first: {', '.join(report['examples'][reason][:2])})")


if __name__ == "__main__":
    main(tyro.cli(Args))
