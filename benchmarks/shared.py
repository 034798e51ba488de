"""Serves all evaluation scripts: what flags they need, the numbers of their answers, what they write."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from benchmarks.scoring import add_to_index, mean, task_means
from rlmt.data import read_log
from rlmt.endpoint import is_answer, name_in
from rlmt.run import Run
from utils import fail

# --- 1. flags


def require(**flags: tuple[str, str]) -> None:
    """Exits with 2 if a flag is missing: by its name, its value, and what it takes."""
    missing = [f"--{name} is missing: {what}" for name, (value, what) in flags.items() if not value]
    if missing:
        fail("; ".join(missing))


def check_stored(args, *read: str) -> None:
    """Exits with 2 if an argument was given that stored rows do not need (they need those named in `read`),
    or if --out, the file for their scores, may not be written; call it before they are scored."""
    given = vars(args)
    for field in fields(args):
        is_read = field.name in ("out", "overwrite", "dry_run", "max_invalid", "config", *read)
        if not is_read and given[field.name] != field.default:
            fail(f"--{field.name.replace('_', '-')} does nothing to stored rows; leave it out")
    if args.out and Path(args.out).exists() and not args.overwrite:
        fail(f"--out {args.out} exists; --overwrite replaces it")


# --- 2. answers


def judged_part(row: dict) -> str | None:
    """Returns the part of a generation row that is judged; None if an endpoint gave no answer.

    ok and truncated: the response, which is empty if the thinking was not closed. It counts even if the token
    limit cut it off, as in the official tools. no_open, no_close, nested, empty_response: the empty answer.
    """
    if row["status"] == "refused":
        return None
    if row["status"] in ("ok", "truncated"):
        return row["response"]
    return ""


def measures_of(row: dict) -> dict[str, float | None]:
    """Returns what is measured of a generation row apart from its score; None where there is no value."""
    response_tokens = None
    if row["n_thinking_tokens"] is not None:  # None behind an endpoint
        response_tokens = row["n_tokens"] - row["n_thinking_tokens"]
    return {
        "format_ok": row["status"] == "ok",
        "thinking_tokens": row["n_thinking_tokens"],
        "response_tokens": response_tokens,
        "budget_used_up": row.get("budget_used_up"),
        "proxy_reward": row.get("reward"),
    }


def describe(rows: list[dict], task_ids: Iterable[str]) -> dict:
    """Returns status counts and means of generation rows, None if no row has the value, and under
    `task_means` those of each task."""
    values = defaultdict(list)
    tasks = defaultdict(list)
    for row, task_id in zip(rows, task_ids):
        for name, value in measures_of(row).items():
            if value is not None:
                values[name].append(value)
                tasks[name].append(task_id)
    numbers = {"status": dict(sorted(Counter(row["status"] for row in rows).items())), "task_means": {}}
    for name in ("format_ok", "thinking_tokens", "response_tokens", "budget_used_up", "proxy_reward"):
        numbers[name] = mean(values[name])
        numbers["task_means"][name] = task_means(values[name], tasks[name])
    return numbers


# --- 3. what is written


def write_scores(out: str, scores: dict) -> None:
    """Writes the scores of stored rows to --out, a JSON file in a folder that need not exist."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(scores, indent=1) + "\n")


def save_results(run: Run, summary: dict, index: list[dict]) -> None:
    """Adds the lines to runs.csv, then writes summary.json, which marks the run as complete, and says what to
    look at.

    The summary's `replied` has what the models behind endpoints call themselves, by the file of their
    replies.
    """
    add_to_index(run.folder, index)
    summary["replied"] = {}
    for store in ("model", "judge", "simulator", "simulator_held_out"):
        bodies = [row["reply"] for row in read_log(run.folder / f"{store}.jsonl")]
        names = {name_in(body) for body in bodies if is_answer(body)} - {""}
        if names:
            summary["replied"][store] = sorted(names)
    run.write_summary(summary)
    print(f"all numbers: {run.folder}/summary.json")
    if index:  # traits have no completions of their own
        print(f"next: python page.py {run.folder}")


def short_hash(text: str) -> str:
    """Returns 12 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
