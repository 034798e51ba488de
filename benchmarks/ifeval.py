"""IFEval and IFBench: the shares of prompts and of instructions that are met; rlmt/instructions.py has the
checkers.

One row per task. Scores are fractions: of prompts with every instruction met, and of instructions; strict, or
loose (one of 8 variants of the response meets it).
"""

import itertools
from pathlib import Path

from benchmarks.scoring import check_rows, count_rows, load, mean, mean_interval, task_means
from rlmt.instructions import RULES, make_checkers, met_instructions
from utils import or_fail

KEYS = ("key", "prompt")  # the official files have the prompt only


def load_tasks(data: Path) -> list[dict]:
    return load(data, "data.json*", "key", "prompt", "instruction_id_list", "kwargs")


def check_tasks(tasks: list[dict]) -> None:
    """Exits with 2 if nltk's data is missing or a task cannot be checked."""
    for task in tasks:
        or_fail(make_checkers, task)


def score(rows: list[dict], data: Path, source: str) -> dict:
    """Returns the shares of prompts and of instructions that are met, strict and loose, and the counts.

    `n_timed_out`: responses whose check was stopped, so that none of their instructions is met.
    """
    tasks = load_tasks(data)
    results = check_rows(rows, tasks, KEYS, source, met_instructions, several_samples=False)
    numbers = {"n_timed_out": sum("timed_out" in result for result in results)}
    for rule in RULES:
        checked = [result for result in results if rule in result]
        met_by_prompt = [result[rule] for result in checked]
        all_met = [all(met) for met in met_by_prompt]
        instructions_met = list(itertools.chain(*met_by_prompt))
        numbers[f"prompt_{rule}"] = mean(all_met)
        numbers[f"instruction_{rule}"] = mean(instructions_met)
        numbers["n_instructions"] = len(instructions_met)
        if rule == "strict" and all_met:
            numbers["prompt_strict_interval"] = mean_interval(all_met)
            tasks_met = task_means(all_met, [result["task"] for result in checked])
            numbers["task_means"] = {"prompt_strict": tasks_met}
    return numbers | count_rows(results, tasks)
