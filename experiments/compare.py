"""Makes the tables and the picture of experiments/demo.sh or experiments/small.sh from their run folders.

    python -m experiments.compare results/demo

A row is a run with a finished evaluation runs/eval-RUN, and with runs/ifeval-RUN and runs/ifeval-greedy-RUN if
they are finished; runs whose names end in -s0, -s1, ... are seeds of one row. Writes table.csv, table.md,
differences.md, curves.csv and curves.png. notebooks/07_small_model.ipynb shows what the small models wrote.
"""

import json
import re
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro

from experiments import tables
from page import read_lines, read_rows
from utils import fail

# kinds of evaluation, by the prefix of their run folders: what the score is called
KINDS = {"eval": "gold", "ifeval": "IFEval", "ifeval-greedy": "IFEval, greedy"}
# rewards, by their keys in metrics.jsonl: their names in held_out.jsonl
CURVES = {"reward/gold": "gold", "reward/preference": "proxy"}
COLOURS = {"grpo": "tab:blue", "ppo": "tab:orange", "dpo": "tab:green", "rlvr": "tab:red"}
ABOUT = (
    "Gold: what nothing is trained on; proxy: the reward that RL is trained on, of answers in good format. Response "
    "tokens: all but the thinking's, so the tags count among them. Cut off: the share of answers that reach the limit. "
    "An answer without a value, as one that is cut off has no reward, counts in no mean, so rows may compare different tasks."
)
DIFFERENCES = (
    "A difference is taken task by task, where both rows have a value. At equal length: where a straight line through the "
    "tasks' differences, of gold over response tokens, crosses 0 tokens."
)


@dataclass
class Args:
    results: tyro.conf.Positional[Path]
    """Folder whose runs/ has the run folders, and into which the files are written."""


# --- 1. what was measured of each task


def read_measures(evaluation: Path, score: str) -> pd.DataFrame:
    """Returns what was measured of each answer, a line per task; NaN where there is no value."""
    rows = read_rows(evaluation).set_index("id")
    measures = {score: rows["gold"]}
    if score == "gold":
        measures |= {
            "proxy": rows["reward"],
            "format ok": rows["status"] == "ok",
            "think tokens": rows["n_thinking_tokens"],
            "response tokens": rows["n_tokens"] - rows["n_thinking_tokens"],
        }
    else:
        measures[f"{score}, cut off"] = rows["status"] == "truncated"
    return pd.DataFrame(measures).astype(float)


def read_runs(runs: Path) -> dict[str, list[pd.DataFrame]]:
    """Reads the finished evaluations: {row: a table of tasks and measures for each seed}."""
    seeds_of_row = {}
    for path in sorted(runs.glob("eval-*/summary.json")):
        name = path.parent.name.removeprefix("eval-")
        parts = []
        for kind, score in KINDS.items():
            evaluation = runs / f"{kind}-{name}"
            if (evaluation / "summary.json").exists():
                parts.append(read_measures(evaluation, score))
        row = re.sub(r"-s\d+$", "", name)
        seeds_of_row.setdefault(row, []).append(pd.concat(parts, axis=1))
    return seeds_of_row


# --- 2. rows and their differences


def summarize(row: str, seeds: list[pd.DataFrame]) -> list[dict]:
    """Returns the cells of a row: for each measure its mean and the intervals over tasks and over seeds."""
    cells = []
    for measure in seeds[0]:
        values = [seed[measure].dropna() for seed in seeds]
        if all(map(len, values)):
            cells.append({"row": row, "benchmark": measure} | tables.average(values))
    return cells


def compare_at_equal_length(gold: pd.Series, length: pd.Series) -> tuple[float, float]:
    """Returns how much gold differs where two rows' responses have equally many tokens, and its standard error.

    That is where a straight line through the tasks' differences, gold over length, crosses a length of 0. NaN
    for fewer than four tasks, or if all lengths are alike.
    """
    if len(gold) < 4 or length.nunique() < 2:
        return np.nan, np.nan
    coefficients, covariance = np.polyfit(length, gold, deg=1, cov=True)
    return coefficients[1], covariance[1, 1] ** 0.5


def differences(seeds_of_row: dict[str, list[pd.DataFrame]]) -> list[dict]:
    """Returns the cells of each row's differences from its twin without thinking, and from its warm start."""
    cells = []
    for row, seeds in seeds_of_row.items():
        for other in (row.replace("think", "plain"), re.sub("^[a-z]+", "sft", row)):
            if other == row or other not in seeds_of_row:
                continue
            # all seeds may have started from the same run
            pairs = zip(seeds, cycle(seeds_of_row[other]))
            of_seeds = [one - another for one, another in pairs]
            name = f"{row} − {other}"
            cells += summarize(name, of_seeds)
            tasks = pd.concat(of_seeds).dropna(subset="gold").groupby(level=0).mean()
            value, error = compare_at_equal_length(tasks["gold"], tasks["response tokens"])
            cell = {
                "row": name,
                "benchmark": "gold, at equal length",
                "n": len(tasks),
                "seeds": len(of_seeds),
            }
            cells.append(cell | {"ours": value, "low": value - 1.96 * error, "high": value + 1.96 * error})
    return cells


def write_table(cells: list[dict], path: Path, *notes: str) -> str:
    """Writes a table as Markdown, with notes under it; returns the text."""
    numbers = pd.DataFrame(cells, columns=tables.NUMBERS)
    is_length = numbers["benchmark"].str.endswith("tokens")
    shares = tables.write_cells(numbers[~is_length], digits=3, alone=".3f")
    lengths = tables.write_cells(numbers[is_length], digits=1, alone=".1f")
    table = tables.markdown_table(shares.join(lengths).reset_index())
    text = "\n\n".join([table, *notes, tables.VARIANCE, tables.counts(numbers)])
    path.write_text(text + "\n")
    return text


# --- 3. curves


def read_curves(runs: Path) -> pd.DataFrame:
    """Reads gold and proxy of every RL run, by the completions that were sampled before.

    They are those of the held-out prompts where the runs have some, else of a step's own completions.
    """
    file = "metrics.jsonl"
    n_before = 1  # the line of a step is about what was sampled before it
    if list(runs.glob("*/held_out.jsonl")):
        file = "held_out.jsonl"
        n_before = 0
    curves = [pd.DataFrame()]
    for path in sorted(runs.glob(f"*/{file}")):
        used = json.loads((path.parent / "config.json").read_text())["args"]
        curve = pd.DataFrame(read_lines(path)).rename(columns=CURVES)
        if "gold" in curve:  # SFT has none
            prompts = used.get("prompts_per_step") or used["prompts_per_round"]  # DPO's steps are rounds
            per_step = prompts * (used.get("group_size") or used.get("samples_per_prompt", 1))
            completions = per_step * (curve["step"] - n_before)
            curves.append(curve[["proxy", "gold"]].assign(run=path.parent.name, completions=completions))
    return pd.concat(curves, ignore_index=True)


def plot(curves: pd.DataFrame, path: Path) -> None:
    """Plots gold and proxy over completions, a line per run: a colour is an algorithm, a solid line thinks.

    Where gold falls while the proxy rises, the reward is over-optimised.
    """
    size = (8.3, 3.6)  # inches; at 100 dots per inch as wide as a page of text
    figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained")
    for axis, measure in zip(axes, ("gold", "proxy")):
        for name, part in curves.groupby("run"):
            line = "solid"
            if "plain" in name:
                line = "dashed"
            if "whole" in name:  # the reward model reads the thinking too
                line = "dotted"
            colour = COLOURS[name.split("-")[0]]
            axis.plot(part["completions"], part[measure], c=colour, ls=line, marker=".", label=name)
        axis.set(xlabel="completions sampled before", ylabel=measure)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)


# --- 4. the command


def describe_reward_models(runs: Path) -> str:
    """Says how often each reward model orders held-out pairs rightly, and what length alone would do."""
    texts = []
    for path in sorted(runs.glob("reward*/summary.json")):
        right = json.loads(path.read_text())["held_out"]
        texts.append(f"{path.parent.name}: {right['accuracy']:.3f} of {right['n']} held-out pairs right,")
        texts.append(f"the longer answer in {right['length_baseline']:.3f}.")
        equal = right["equal_length"]
        if equal:
            texts.append(f"Of {equal['n']} of about equal length {equal['accuracy']:.3f} ±")
            texts.append(f"{equal['standard_error']:.3f}, the longer one in {equal['length_baseline']:.3f}.")
    return " ".join(texts)


def main(args: Args) -> None:
    results = args.results
    runs = results / "runs"
    seeds_of_row = read_runs(runs)
    if not seeds_of_row:  # git has the tables without the runs: do not write over them
        fail(f"no evaluation in {runs}: experiments/demo.sh and small.sh make some")
    rows = []
    for row, seeds in seeds_of_row.items():
        rows += summarize(row, seeds)
    cells = differences(seeds_of_row)
    numbers = pd.DataFrame(rows + cells, columns=tables.NUMBERS).dropna(axis=1, how="all")
    numbers.round(4).to_csv(results / "table.csv", index=False)
    print(write_table(rows, results / "table.md", ABOUT, describe_reward_models(runs)))
    if cells:
        write_table(cells, results / "differences.md", DIFFERENCES)
    curves = read_curves(runs)
    if len(curves):
        curves.round(5).to_csv(results / "curves.csv", index=False)
        plot(curves, results / "curves.png")


if __name__ == "__main__":
    main(tyro.cli(Args))
