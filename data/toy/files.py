"""What the toy tasks share: stable splits, and files that only an equal one replaces."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path


def hash_below(n: int, text: str) -> int:
    """Hashes a text to 0 .. n - 1, the same on every machine."""
    return int(hashlib.sha1(text.encode()).hexdigest(), 16) % n


def user_turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass
class ToyArgs:
    """The arguments that every toy task has."""

    out: Path = Path("data/toy")
    """Folder for the files; an existing file is replaced only by an equal one."""
    seed: int = 0
    """Random seed of the rows."""

    def save(self, files: dict[str, list[dict]]) -> None:
        """Writes rows as {out}/{name}.jsonl; exits if such a file has other rows."""
        self.out.mkdir(parents=True, exist_ok=True)
        for name, rows in files.items():
            path = self.out / f"{name}.jsonl"
            text = "".join(json.dumps(row) + "\n" for row in rows)
            if not path.exists():
                part = path.with_name(f"{path.name}.{os.getpid()}")
                part.write_text(text)
                part.rename(path)  # whole, because another run may read it
            elif path.read_text() != text:
                sys.exit(
                    f"{path} exists and differs from what seed {self.seed} gives; "
                    "remove it or choose another --out"
                )
            print(f"{path}: {len(rows)} rows")
