"""Writes how often each check of the toy world's gold is passed along training, on the held-out prompts of runs.

    python -m experiments.checks results/study/*-think-s? results/study/*-plain-s? --out results/study/audit_checks.csv

One row per run and measured step: the share of completions that pass each check; one that is not `ok` passes none.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from data.toy.world import check, read_prompt
from rlmt.data import read_log


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs; one without held_out_completions.jsonl has no rows."""
    out: Path
    """The csv file."""


def main(args: Args) -> None:
    found = []
    for run in args.runs:
        for row in read_log(run / "held_out_completions.jsonl"):
            response = row["response"] if row["status"] == "ok" else ""
            passed = check(read_prompt(row["messages"][-1]["content"]), response)
            found.append({"run": run.name, "step": row["step"], "gold": row["rewards"]["gold"], **passed})
    table = pd.DataFrame(found).groupby(["run", "step"]).mean().round(4)
    table.to_csv(args.out)
    print(table.to_string())


if __name__ == "__main__":
    main(tyro.cli(Args))
