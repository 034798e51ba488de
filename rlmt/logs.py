"""Reads the files of a run folder, also while the run is under way: its lines, completions and verdicts."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

# ends that are faults, and what such a dialogue counts with, as rlver/simulated_user.py has it
BAD_ENDS = {"simulator_failed": None, "too_long": None, "bad_format": 0}


def read_lines(path: Path) -> Iterator[dict]:
    """Yields the object of each line of a jsonl file.

    A last line that is half written, as by a running job, is left out, and a note says so on stderr.
    """
    with open(path) as file:
        for line in file:
            if not line.endswith("\n"):
                print(f"note: the last line of {path} is cut off and left out", file=sys.stderr)
                return
            yield json.loads(line)


def verdict_number(verdict: dict) -> float | str | None:
    """Returns the number of a verdict, higher is better; None without one, as of a pairwise judge's
    choice."""
    if "correct" in verdict:
        return int(verdict["correct"])
    if "strict" in verdict:  # IFEval and IFBench: whether each instruction is met
        return int(all(verdict["strict"]))
    return verdict.get("score", verdict.get("preference"))  # preference: AlpacaEval, from 1 to 2


def read_verdicts(run: Path) -> dict[tuple, dict]:
    """Returns reward and score of an evaluation's answers by (id, temperature); none for a training run."""
    verdicts = {}
    for file in ("verdicts.jsonl", "rows.jsonl"):
        if not (run / file).is_file():
            continue
        for verdict in read_lines(run / file):
            if file == "rows.jsonl":  # eval_benchmarks.py; an `id` there may be the benchmark's
                verdict["id"] = f"{verdict.get('task')}-{verdict.get('sample')}"
            verdict["score"] = verdict_number(verdict)
            verdicts[verdict["id"], verdict.get("temperature")] = verdict
    return verdicts


def dialogue_row(dialogue: dict) -> dict:
    """Returns a dialogue of eval_sentient.py as a completion of the user's first words."""
    first, *turns = dialogue["history"]
    ended = dialogue["ended"]
    return {
        "id": dialogue["id"],
        "messages": [{"role": first["role"], "content": first["content"]}],
        "text": "\n\n".join(turn.get("text", turn["content"]) for turn in turns),
        "status": ended if ended in BAD_ENDS else "ok",
        "score": BAD_ENDS.get(ended, dialogue["emo_point"]),
        "dialogue": [first, *turns],
    }


def read_completions(run: Path, file: str) -> Iterator[dict]:
    """Yields the completions or dialogues in a file of a run, if it is there, with reward and gold."""
    path = run / file
    if not path.is_file():
        return
    verdicts = read_verdicts(run)
    for row in read_lines(path):
        if file.startswith("dialogues"):
            row = dialogue_row(row)
        # without a verdict, the row's own score counts
        verdict = verdicts.get((row["id"], row.get("temperature")), row)
        rewards = row.setdefault("rewards", {})
        row["reward"] = verdict.get("reward")
        row["gold"] = rewards.get("gold", verdict.get("score"))
        if isinstance(row["gold"], str):  # a judge that is a model writes "8"
            row["gold"] = float(pd.to_numeric(row["gold"], errors="coerce"))
        yield row
