"""Prints how training changes what the models of experiments/small.sh write: tables of docs/small.md.

    python -m experiments.small_reading --results results/small

All but RLVR's table are about the completions of held-out prompts that are in good format. A run that is not
there is left out, and what cannot be computed is a dash.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from rlmt.data import read_log
from utils import fail
from experiments.demo_tables import markdown_table
from experiments.small_tables import MISSING, compare_at_equal_length


@dataclass
class Args:
    results: Path = Path("results/small")
    """Folder whose runs/ has the run folders."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the runs of GRPO, whose names end in -sSEED."""


RUNS = {"thinking": "grpo-think-s{seed}", "no thinking": "grpo-plain-s{seed}"}
STEPS = (0, 10, 20, 30)
CHANGES = ((0, 30), (10, 30))  # steps that are compared
READINGS = (  # title of a line, its run, a measure, and what is made of it over a step's completions
    ("completions in good format", "thinking", "id", "count"),
    ('thinking has a line "Points:"', "thinking", "has_points", "mean"),
    ('words of the line "Asked:" that stand in the prompt', "thinking", "asked_in_prompt", "mean"),
    ("plans that share no word with the prompt", "thinking", "leaves_prompt", "sum"),
    ("plans that take all words from it", "thinking", "keeps_to_prompt", "sum"),
    ("responses that take all words from it", "thinking", "repeats_prompt", "sum"),
    ("words of the prompt that stand in the response, thinking", "thinking", "prompt_used", "mean"),
    ("words of the prompt that stand in the response, no thinking", "no thinking", "prompt_used", "mean"),
    ('plans with "about N words"', "thinking", "announced_words", "count"),
)
DIGITS = {"count": 0, "sum": 0, "mean": 2}
RLVR = {  # metric of a step: its title, and how many digits it gets
    "reward/instructions": ("all instructions followed", 2),
    "frac_reward_zero_std": ("groups without any difference", 2),
    "think/response_tokens": ("response tokens", 0),
    "think/truncated": ("cut off", 2),
    "kl": ("KL, nats a token", 2),
}
STEPS_A_LINE = 6  # of RLVR's table


# --- 1. completions


def find_words(text: str) -> set[str]:
    """Returns the words of at least four Latin letters, each once; shorter ones stand in any two texts."""
    return set(re.findall("[a-z]{4,}", text.lower()))


def share(words: set[str], others: set[str]) -> float:
    """Returns the share of words that are among the others, NaN if there are no words."""
    if not words:
        return math.nan
    return len(words & others) / len(words)


def measure(row: dict) -> dict:
    """Measures a completion, whose thinking may be a plan as data/plans.py writes it."""
    prompt = find_words(row["messages"][-1]["content"])
    response = find_words(row["response"])
    asked = find_words(" ".join(re.findall("^Asked:(.*)", row["thinking"], re.MULTILINE)))
    points = re.findall("^Points:", row["thinking"], re.MULTILINE)
    announced = re.search(r"about (\d+) words", row["thinking"])
    announced_words = math.nan
    if announced:
        announced_words = float(announced[1])
    return {
        "step": row["step"],
        "id": row["id"],
        "words": len(row["response"].split()),
        "announced_words": announced_words,
        "proxy": row["rewards"]["preference"],
        "gold": row["rewards"]["gold"],
        "has_points": len(points) > 0,
        "asked_in_prompt": share(asked, prompt),
        "leaves_prompt": share(asked, prompt) == 0,
        "keeps_to_prompt": share(asked, prompt) == 1,
        "repeats_prompt": share(response, prompt) == 1,
        "prompt_used": share(prompt, response),
    }


def read_completions(run_folders: Path, seeds: tuple[int, ...]) -> pd.DataFrame:
    """Measures the held-out completions in good format: one line each, with its run, seed and step."""
    lines = []
    for run, name in RUNS.items():
        for seed in seeds:
            for row in read_log(run_folders / name.format(seed=seed) / "held_out_completions.jsonl"):
                if row["status"] == "ok" and row["step"] in STEPS:
                    lines.append({"run": run, "seed": seed} | measure(row))
    if not lines:
        fail(f"{run_folders} has no run of GRPO; STAGES=grpo bash experiments/small.sh makes them")
    return pd.DataFrame(lines)


# --- 2. tables


def number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("nan", MISSING)


def change(mean: float, error: float, digits: int) -> str:
    """Writes a mean change with its sign and its standard error."""
    if math.isnan(mean):
        return MISSING
    return f"{mean:+.{digits}f} ± {number(error, digits)}"  # a single prompt has no error


def compare(before: pd.DataFrame, after: pd.DataFrame) -> list[str]:
    """Returns the cells of a change between two steps, prompt by prompt, where both are in good format."""
    measures = ["words", "proxy", "gold"]
    changes = after.set_index("id")[measures] - before.set_index("id")[measures]
    changes = changes.dropna()  # a prompt of only one of the steps
    words = changes["words"]
    cells = [str(len(changes)), change(words.mean(), words.sem(), 0)]
    for reward in ("proxy", "gold"):
        values = changes[reward]
        line = compare_at_equal_length(values, words)  # as if proxy were a gold
        at_equal_words = line.get("gold_at_equal_length", math.nan)
        error = line.get("gold_at_equal_length_se", math.nan)
        cells += [change(values.mean(), values.sem(), 2), change(at_equal_words, error, 2)]
    return cells


def tabulate_changes(completions: pd.DataFrame) -> str:
    """Lays out how words and rewards change on the same prompts."""
    lines = []
    for run in RUNS:
        for before, after in CHANGES:
            for seed, part in completions[completions["run"] == run].groupby("seed"):
                cells = compare(part[part["step"] == before], part[part["step"] == after])
                lines.append([run, str(seed), f"{before} to {after}", *cells])
    rewards = ["proxy", "proxy, at equal words", "gold", "gold, at equal words"]
    return markdown_table(["run", "seed", "steps", "prompts", "words", *rewards], lines)


def tabulate_readings(completions: pd.DataFrame) -> str:
    """Lays out READINGS step by step, and whether responses have the length that their plan announces."""
    lines = []
    for title, run, name, statistic in READINGS:
        for seed, part in completions[completions["run"] == run].groupby("seed"):
            by_step = part.groupby("step")[name].agg(statistic).reindex(STEPS)
            lines.append([title, str(seed), *[number(value, DIGITS[statistic]) for value in by_step]])
    for seed, part in completions[completions["run"] == "thinking"].groupby("seed"):
        by_step = part.groupby("step")["words"].corr(part["announced_words"]).reindex(STEPS)
        title = "correlation of N with the words of the response"
        lines.append([title, str(seed), *[number(value, 2) for value in by_step]])
    return markdown_table(["", "seed", *[f"step {step}" for step in STEPS]], lines)


def tabulate_rlvr(run: Path) -> str:
    """Lays out means of STEPS_A_LINE steps each."""
    steps = pd.DataFrame(read_log(run / "metrics.jsonl"), columns=["step", *RLVR])
    lines = []
    for _, part in steps.groupby((steps["step"] - 1) // STEPS_A_LINE):
        cells = [f"{part['step'].min()} to {part['step'].max()}"]
        for metric, (_, digits) in RLVR.items():
            cells.append(number(part[metric].mean(), digits))
        lines.append(cells)
    return markdown_table(["steps", *[title for title, _ in RLVR.values()]], lines)


def main(args: Args) -> None:
    run_folders = args.results / "runs"
    completions = read_completions(run_folders, args.seeds)
    print(f"On the same prompts:\n\n{tabulate_changes(completions)}\n")
    print(f"RLVR:\n\n{tabulate_rlvr(run_folders / 'rlvr-plain')}\n")
    print(f"What it wrote:\n\n{tabulate_readings(completions)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
