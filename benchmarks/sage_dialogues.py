"""Reads and scores dialogues that SAGE's official tool or eval_sentient.py stored; keeps a run's progress.

A dialogue is {"id", "emo_point", "history"}; rewards/simulated_user.py names the fields.
"""

import math
from pathlib import Path

from benchmarks import empathy
from benchmarks.scoring import bootstrap, task_means
from rewards import simulated_user
from rlmt.data import append_jsonl, read_log, read_rows
from utils import fail


# --- 1. stored dialogues


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_turn(value) -> bool:
    return isinstance(value, dict) and "role" in value and isinstance(value.get("content"), str)


def turns_of_user(dialogue: dict) -> list[dict]:
    return [turn for turn in dialogue["history"] if turn["role"] == "user"]


def read(path: str) -> list[dict]:
    """Reads stored dialogues; exits with 2 on a row that is not one."""
    dialogues = read_rows(path, "emo_point", "history")
    for number, dialogue in enumerate(dialogues, 1):
        where = f"{path}:{number}: "
        if not is_number(dialogue["emo_point"]):
            fail(f"{where}emo_point is {dialogue['emo_point']!r}, not a number")
        history = dialogue["history"]
        if not isinstance(history, list) or not all(map(is_turn, history)):
            fail(f"{where}'history' must be a list of {{'role', 'content', a text}}")
        emotions = [turn.get("emotion-point") for turn in turns_of_user(dialogue)]
        if not emotions or not all(map(is_number, emotions)):
            fail(f"{where}every turn of the user needs 'emotion-point', a number, and there must be one")
        dialogue.setdefault("ended", "")
        if not isinstance(dialogue["ended"], str):
            fail(f"{where}'ended' is not a text")
    return dialogues


def score(dialogues: list[dict], seed: int) -> dict:
    """Returns the Sentient score and its counts, with the 95 % interval, `format_ok` and `emotion_curve`."""
    ids = []
    finals = []
    statuses = []  # of the model's replies
    for dialogue in dialogues:
        final = simulated_user.final_emotion(dialogue)
        if final is not None:
            ids.append(dialogue["id"])
            finals.append(final)
        for turn in dialogue["history"]:
            if "status" in turn:
                statuses.append(turn["status"])

    scores = simulated_user.score(dialogues)
    scores["interval"] = bootstrap(finals, seed)
    scores["task_means"] = {"mean_emotion": task_means(finals, ids)}
    scores["format_ok"] = None  # dialogues of the official tool have no status
    if statuses:
        scores["format_ok"] = statuses.count("ok") / len(statuses)
    scores["emotion_curve"] = empathy.emotion_curve(dialogues)
    return scores


# --- 2. the progress of a run


def progress(dialogue: dict) -> tuple[int, str]:
    """Returns what changes with every turn, and when the dialogue ends."""
    return len(dialogue["history"]), dialogue["ended"]


def restore(dialogues: list[dict], path: Path) -> None:
    """Brings dialogues to where an earlier start left them; `path` may not exist."""
    by_id = {dialogue["id"]: dialogue for dialogue in dialogues}
    for step in read_log(path):
        for row in step["dialogues"]:
            dialogue = by_id[row["id"]]
            new_turns = row.pop("history")
            dialogue.update(row)
            dialogue["history"] += new_turns


def save_progress(dialogues: list[dict], saved: dict[str, tuple[int, str]], path: Path) -> None:
    """Appends one line with what is new in the dialogues since `saved`, and updates `saved`.

    A failure of the simulator is not saved, so that --resume asks it again.
    """
    rows = []
    for dialogue in dialogues:
        n_saved_turns, _ = saved[dialogue["id"]]
        if progress(dialogue) == saved[dialogue["id"]] or dialogue["ended"] == "simulator_failed":
            continue
        row = {key: value for key, value in dialogue.items() if key != "profile"}
        row["history"] = dialogue["history"][n_saved_turns:]
        rows.append(row)
        saved[dialogue["id"]] = progress(dialogue)
    if rows:
        append_jsonl(path, [{"dialogues": rows}])
