"""What the toy tasks share: stable splits, rows of three splits, and files that only an equal one
replaces."""

import hashlib
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path


def hash_below(n: int, text: str) -> int:
    """Hashes a text to 0 .. n - 1, the same on every machine."""
    return int(hashlib.sha1(text.encode()).hexdigest(), 16) % n


def user_turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass
class SplitArgs:
    """Arguments of a task whose rows `split_rows` draws."""

    out: Path = Path("data/toy")
    """Folder for the files; an existing file is replaced only by an equal one."""
    seed: int = 0
    """Random seed of the rows."""
    n_traces: int = 2000
    """SFT traces (rows)."""
    n_prompts: int = 2000
    """RL prompts."""
    n_tasks: int = 512
    """Benchmark tasks."""


def split_rows(task: str, args: SplitArgs, shares: dict[str, range], draw) -> dict[str, list[dict]]:
    """Returns the rows of <task>_traces, <task>_prompts and <task>_tasks, args.n_<split> of each.

    `shares`: {split: its percentiles}. `draw(rng)` returns the prompt's text, a key whose hash decides the
    split, and a function of the split that gives the other fields of the row.
    """
    files = {}
    for split, n in (("traces", args.n_traces), ("prompts", args.n_prompts), ("tasks", args.n_tasks)):
        rng = random.Random(f"{split}-{args.seed}")
        seen = set()
        rows = []
        while len(rows) < n:
            text, key, other_fields = draw(rng)
            if text in seen or hash_below(100, key) not in shares[split]:
                continue
            seen.add(text)
            row = {"id": f"{task}-{split}-{len(rows):05d}", "messages": user_turn(text)}
            rows.append(row | other_fields(split))
        files[f"{task}_{split}"] = rows
    return files


def save(files: dict[str, list[dict]], out: Path, seed: int) -> None:
    """Writes rows as {out}/{name}.jsonl; an existing file is replaced only by an equal one."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = out / f"{name}.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not path.exists():
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_text(text)
            part.rename(path)  # whole, as another run may read it
        elif path.read_text() != text:
            sys.exit(
                f"{path} exists and differs from what seed {seed} gives; remove it or choose another --out"
            )
        print(f"{path}: {len(rows)} rows")
