"""Renders what experiments/small.sh measured: table.csv, table.md, differences.md, curves.csv and overoptimisation.png.

python -m experiments.small_tables --results results/small

Some stages may be missing. What is not measured is an empty cell of table.csv and a dash in table.md, which
also lists the missing evaluations.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import read_log
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro

from page import read_lines
from utils import fail
from experiments.demo_tables import completions_per_step, markdown_table


@dataclass
class Args:
    results: Path = Path("results/small")
    """Folder whose runs/ has the run folders, and into which the files are written."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the runs whose names end in -sSEED."""


ROWS = {  # row of the table: its run, or one for each {seed}
    "the instruct model": "instruct",
    "SFT, thinking": "sft-think",
    "SFT, no thinking": "sft-plain",
    "RLMT: GRPO, thinking": "grpo-think-s{seed}",
    "RLHF: GRPO, no thinking": "grpo-plain-s{seed}",
    "RLMT: DPO, thinking": "dpo-think",
    "RLHF: DPO, no thinking": "dpo-plain",
    "RLVR: GRPO, no thinking": "rlvr-plain",
}
DIFFERENCES = (  # pairs of rows: the second is subtracted from the first
    ("RLMT: GRPO, thinking", "SFT, thinking"),
    ("RLHF: GRPO, no thinking", "SFT, no thinking"),
    ("RLMT: DPO, thinking", "SFT, thinking"),
    ("RLHF: DPO, no thinking", "SFT, no thinking"),
    ("RLVR: GRPO, no thinking", "SFT, no thinking"),
    ("SFT, thinking", "SFT, no thinking"),
    ("RLMT: GRPO, thinking", "RLHF: GRPO, no thinking"),
    ("RLMT: DPO, thinking", "RLHF: DPO, no thinking"),
)
# whose IFEval is also measured with greedy answers: RLVR, its start, and the model that an outsider has too
GREEDY = ("instruct", "sft-plain", "rlvr-plain")
COLUMNS = {  # measure of a task: its title in the tables for people, and how many digits it gets there
    "gold": ("gold", 2),
    "gold_at_equal_length": ("gold, at equal length", 2),  # of a difference between two rows, not of a task
    "proxy": ("proxy", 2),
    "format_ok": ("format ok", 2),
    "thinking_tokens": ("think tokens", 0),
    "response_tokens": ("response tokens", 0),
    "ifeval": ("IFEval", 3),
    "ifeval_cut_off": ("IFEval, cut off", 2),
    "ifeval_greedy": ("IFEval, greedy", 3),
    "ifeval_greedy_cut_off": ("IFEval, greedy, cut off", 2),
}
# the README shows table.md, which is narrow
ONLY_IN_DIFFERENCES = ("gold_at_equal_length", "ifeval_cut_off", "ifeval_greedy_cut_off")
MISSING = "–"


# --- 1. what was measured


def is_finished(run: Path) -> bool:
    return (run / "summary.json").exists()


def read_answers(evaluation: Path) -> pd.DataFrame:
    """Reads what eval_wildbench.py measured of each answer; gold and proxy are NaN outside of the good format."""
    by_task = {}
    for row in read_log(evaluation / "verdicts.jsonl"):
        response_tokens = row["n_tokens"] - row["n_thinking_tokens"]
        by_task[row["id"]] = {
            "gold": row["score"],
            "proxy": row.get("reward"),
            "format_ok": row["status"] == "ok",
            "thinking_tokens": row["n_thinking_tokens"],
            "response_tokens": response_tokens,
            # averaged over the same answers as gold, also where only some seeds have a gold
            "tokens_with_gold": math.nan if row["score"] is None else response_tokens,
        }
    return pd.DataFrame.from_dict(by_task, orient="index", dtype=float)


def read_ifeval(evaluation: Path, name: str) -> pd.DataFrame:
    """Reads whether the answer to each of IFEval's prompts meets all of its instructions, as column `name`.

    `name`_cut_off says whether the token limit cut it off; its instructions are checked as far as it goes.
    """
    tasks = pd.read_csv(evaluation / "task_means.csv", dtype={"task": str})
    met = tasks[tasks["metric"] == "prompt_strict"].set_index("task")["mean"]
    cut_off = {}
    for row in read_log(evaluation / "rows.jsonl"):
        cut_off[str(row["key"])] = float(row["status"] == "truncated")
    table = pd.DataFrame({name: met, f"{name}_cut_off": pd.Series(cut_off)})
    return table.set_index("ifeval-" + table.index)


def read_run(run_folders: Path, name: str) -> pd.DataFrame:
    """Returns what the finished evaluations measured of a run: one line a task, NaN for what was not measured."""
    parts = [pd.DataFrame(columns=[*COLUMNS, "tokens_with_gold"], dtype=float)]
    if is_finished(run_folders / f"eval-{name}"):
        parts.append(read_answers(run_folders / f"eval-{name}"))
    for prefix in ("ifeval", "ifeval-greedy"):
        if is_finished(run_folders / f"{prefix}-{name}"):
            parts.append(read_ifeval(run_folders / f"{prefix}-{name}", prefix.replace("-", "_")))
    # a task of IFEval is in two parts if it also has a greedy answer
    return pd.concat(parts).groupby(level=0).first()


def run_names(row: str, seeds: tuple[int, ...]) -> list[str]:
    """Returns the names of a row's runs; a row without seeds has one."""
    return list(dict.fromkeys(ROWS[row].format(seed=seed) for seed in seeds))


def list_missing(run_folders: Path, seeds: tuple[int, ...]) -> list[str]:
    """Returns the names of the runs that the table needs and that are not finished."""
    needed = ["reward-proxy", "reward-gold"]
    for row in ROWS:
        for name in run_names(row, seeds):
            needed += [f"eval-{name}", f"ifeval-{name}"]
    needed += [f"ifeval-greedy-{name}" for name in GREEDY]
    return [name for name in needed if not is_finished(run_folders / name)]


# --- 2. table


def average(measured: list[pd.DataFrame]) -> pd.DataFrame:
    """Averages each task over the seeds that have a value."""
    return pd.concat(measured).groupby(level=0).mean()


def summarize(row: str, by_task: pd.DataFrame, by_seed: list[pd.DataFrame]) -> dict:
    """Returns a line of the table: for each measure its mean over tasks, the standard error, and the number of tasks.

    `by_task` has the tasks averaged over the seeds, `by_seed` those of each seed.
    """
    line = {"row": row, "seeds": sum(measured.notna().any(axis=None) for measured in by_seed)}
    for name in COLUMNS:
        values = by_task[name]
        line |= {name: values.mean(), f"{name}_se": values.sem(), f"{name}_n": values.count()}
    line["gold_by_seed"] = ""
    if line["gold_n"]:
        golds = ", ".join(f"{measured['gold'].mean():.2f}" for measured in by_seed)
        line["gold_by_seed"] = golds.replace("nan", MISSING)
    return line


def compare_at_equal_length(gold: pd.Series, length: pd.Series) -> dict:
    """Returns how much gold differs where two rows' responses have equally many tokens, and its standard error.

    That is where a straight line through the tasks' differences, gold over length, crosses a length of 0. With fewer
    than four golds, or all lengths alike, there is no value.
    """
    gold = gold.dropna()
    length = length[gold.index]
    if len(gold) < 4 or length.nunique() < 2:
        return {}
    coefficients, covariance = np.polyfit(length, gold, deg=1, cov=True)
    return {
        "gold_at_equal_length": coefficients[1],
        "gold_at_equal_length_se": math.sqrt(covariance[1, 1]),
        "gold_at_equal_length_n": len(gold),
    }


def collect(run_folders: Path, seeds: tuple[int, ...]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the rows of the table, and their differences, which are taken task by task.

    A task that only one of two rows has a value for is left out of their difference.
    """
    by_seed = {}
    for row in ROWS:
        by_seed[row] = [read_run(run_folders, name) for name in run_names(row, seeds)]
    by_task = {row: average(by_seed[row]) for row in ROWS}

    rows = [summarize(row, by_task[row], by_seed[row]) for row in ROWS]
    differences = []
    for after, before in DIFFERENCES:
        before_by_seed = by_seed[before]
        if len(before_by_seed) == 1:  # all seeds started from the same run
            before_by_seed = before_by_seed * len(by_seed[after])
        by_seed_difference = [one - other for one, other in zip(by_seed[after], before_by_seed, strict=True)]
        name = f"{after} − {before}"
        difference = by_task[after] - by_task[before]
        line = summarize(name, difference, by_seed_difference)
        at_equal_length = compare_at_equal_length(difference["gold"], difference["tokens_with_gold"])
        differences.append(line | at_equal_length)
    return pd.DataFrame(rows), pd.DataFrame(differences)


def cell(line: pd.Series, name: str, digits: int, is_difference: bool) -> str:
    """Writes a mean with its standard error; a difference has a sign, and is bold beyond two standard errors."""
    mean = line[name]
    error = line[f"{name}_se"]
    if math.isnan(mean):
        return MISSING
    sign = "+" if is_difference else ""
    text = f"{mean:{sign}.{digits}f} ± {error:.{digits}f}".replace("nan", MISSING)  # one task has no error
    if is_difference and abs(mean) > 2 * error:
        text = f"**{text}**"
    return text


def markdown(results: pd.DataFrame, is_difference: bool) -> str:
    """Writes the table of the rows, or that of their differences, for people."""
    shown = [name for name in COLUMNS if is_difference or name not in ONLY_IN_DIFFERENCES]
    titles = ["", "seeds", "n", *[COLUMNS[name][0] for name in shown]]
    cells_by_line = []
    for _, line in results.iterrows():
        cells = [line["row"], str(line["seeds"]), str(line["gold_n"])]
        for name in shown:
            _, digits = COLUMNS[name]
            text = cell(line, name, digits, is_difference)
            if name == "gold" and line["seeds"] > 1 and line["gold_by_seed"]:
                text += f" ({line['gold_by_seed']})"
            cells.append(text)
        cells_by_line.append(cells)
    return markdown_table(titles, cells_by_line)


def describe_reward_model(name: str, held_out: dict) -> str:
    """Says how often a reward model agrees with the published preferences, and what length alone would do."""
    text = (
        f"{name}: {held_out['accuracy']:.3f} of {held_out['n']} held-out pairs ordered as published, where the longer "
        f"answer is the better one in {held_out['length_baseline']:.3f}"
    )
    equal = held_out["equal_length"]
    if equal is None:
        return text + "; hardly any pair is of about equal length."
    return (
        f"{text}; of the {equal['n']} pairs of about equal length {equal['accuracy']:.3f} ± "
        f"{equal['standard_error']:.3f} ({equal['length_baseline']:.3f} by length)."
    )


def verdict_on_gold(held_out: dict) -> str:
    """Says whether gold is right above chance, by two standard errors, on pairs whose length says little."""
    equal = held_out["equal_length"]
    if equal and equal["accuracy"] - 2 * equal["standard_error"] > 0.5:
        return (
            "Gold counts: on pairs of about equal length it is right more often than not by two standard errors. "
            "On others it mostly follows length, so read it beside the response tokens."
        )
    return "Gold does not count: on pairs of about equal length it may be guessing. IFEval and lengths are the evidence."


def explain_reward_models(run_folders: Path) -> str:
    """Says what the finished reward models are worth."""
    sentences = []
    for name in ("proxy", "gold"):
        path = run_folders / f"reward-{name}" / "summary.json"
        if path.exists():
            held_out = json.loads(path.read_text())["held_out"]
            sentences.append(describe_reward_model(name.capitalize(), held_out))
            if name == "gold":
                sentences.append(verdict_on_gold(held_out))
    return " ".join(sentences)


def explanation(rows: pd.DataFrame) -> str:
    """Says what the columns mean."""
    return (
        "One answer of at most 256 tokens, thinking included, to each held-out prompt at temperature 0.7. Gold: the "
        "reward by a second reward model, trained on other instructions, of answers in good format; n: the tasks that "
        "have one. An answer that is cut off has none, so rows compare different tasks. Proxy: the reward that RLMT "
        "and RLHF are trained on, of the same answers. Format ok: the share of answers in good format. "
        "Response tokens: all but the thinking's, so the tags count among them; of all answers, also those without a gold. "
        "IFEval: the "
        f"share of {rows['ifeval_n'].max()} prompts whose instructions are all met (strict), at temperature 0.7 with "
        "top-p 0.95 and greedy, in answers of at most 256 tokens: longer ones are cut off and checked as far as they "
        "go, so the numbers are not those of leaderboards, which allow more. Each task is averaged first over the "
        "seeds that have a value; the gold of each seed is in brackets. ± is one standard error over the tasks, which "
        "does not cover how other seeds differ."
    )


DIFFERENCES_EXPLAINED = (
    "Differences are taken task by task, where both rows have a value, and averaged; n: the tasks that have two golds. "
    "At equal length: where a straight line through the tasks' differences, of gold over response tokens, crosses 0 "
    "tokens. ± is one standard error over the tasks, which does not cover how other seeds differ. Beyond two of them a "
    "difference is bold. Cut off: the share of IFEval's answers that reach 256 tokens."
)


# --- 3. curves


def read_curves(run_folders: Path) -> pd.DataFrame:
    """Reads what every RL run measured on the held-out prompts, by the completions that it had trained on."""
    curves = [pd.DataFrame(columns=["run", "completions"])]
    for path in sorted(run_folders.glob("*/held_out.jsonl")):
        notes: list[str] = []
        rows = [row for _, row in read_lines(path, notes)]  # a run may be writing its last line now
        for note in notes:
            print(f"{path.parent.name}: {note}")
        curve = pd.DataFrame(rows).apply(pd.to_numeric)  # a null is NaN
        curve.insert(0, "run", path.parent.name)
        curve.insert(1, "completions", curve["step"] * completions_per_step(path.parent))
        curves.append(curve)
    return pd.concat(curves, ignore_index=True)


def plot_curves(curves: pd.DataFrame, path: Path) -> None:
    """Plots gold against proxy, both of completions in good format.

    Where gold falls while the proxy rises, the reward is over-optimised.
    """
    figure, (rewards, lengths) = plt.subplots(1, 2, figsize=(11, 4.2))
    for name, part in curves.groupby("run"):
        rewards.errorbar(
            part["proxy"], part["gold_ok"], part["gold_ok_se"], marker=".", label=name, linewidth=1
        )
        lengths.plot(part["completions"], part["response_tokens"], marker=".", label=name)
    rewards.set(xlabel="proxy reward", ylabel="gold reward", title="held-out prompts along training")
    lengths.set(xlabel="completions sampled before", ylabel="response tokens", title="length")
    lengths.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(args: Args) -> None:
    run_folders = args.results / "runs"
    if not run_folders.exists():  # git has the tables without the runs: do not write over them
        fail(f"no folder {run_folders}: the other stages of experiments/small.sh make it")
    rows, differences = collect(run_folders, args.seeds)
    pd.concat([rows, differences]).round(4).to_csv(args.results / "table.csv", index=False)
    paragraphs = [
        markdown(rows, is_difference=False),
        explanation(rows),
        explain_reward_models(run_folders),
    ]
    missing = list_missing(run_folders, args.seeds)
    if missing:
        paragraphs.append(f"Not finished: {', '.join(missing)}.")
    text = "\n\n".join(filter(None, paragraphs)) + "\n"
    (args.results / "table.md").write_text(text)
    differences_text = f"{markdown(differences, is_difference=True)}\n\n{DIFFERENCES_EXPLAINED}\n"
    (args.results / "differences.md").write_text(differences_text)

    curves = read_curves(run_folders)
    if not curves.empty:
        curves.round(5).to_csv(args.results / "curves.csv", index=False)
        plot_curves(curves, args.results / "overoptimisation.png")
    print(f"\n{text}\n{differences_text}")


if __name__ == "__main__":
    main(tyro.cli(Args))
