"""Makes the tables and pictures of experiments/demo.sh or experiments/small.sh from their run folders.

    python -m experiments.compare demo
    python -m experiments.compare small --seeds 0 1

Stages of small.sh may be missing: what is not measured is an empty cell of table.csv and a dash in table.md.
notebooks/07_small_model.ipynb shows what its models wrote.
"""

import json
import math
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import read_log
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro

from experiments.tables import markdown_table
from page import read_lines
from utils import fail


@dataclass
class Args:
    experiment: tyro.conf.Positional[Literal["demo", "small"]]
    """Which of the two."""
    results: Path | None = None
    """Folder whose runs/ has the run folders, and into which the files are written; empty: results/ and the
    experiment."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the runs of small.sh whose names end in -sSEED."""


DEMO = {  # row of the table: its run
    "SFT, thinking": "sft-think",
    "SFT, no thinking": "sft-plain",
    "RLMT: GRPO, thinking": "grpo-think",
    "RLMT: PPO, thinking": "ppo-think",
    "RLMT: DPO, thinking": "dpo-think",
    "RLMT: GRPO, thinking, reward on think+response": "grpo-think-whole",
    "RLHF: GRPO, no thinking": "grpo-plain",
    "RLHF: PPO, no thinking": "ppo-plain",
    "RLHF: DPO, no thinking": "dpo-plain",
}
DEMO_COLUMNS = {  # measure of an evaluation: its title in table.md, and how many digits it gets there
    "gold": ("gold", 3),
    "all_checks": ("all checks", 2),
    "proxy_reward": ("proxy", 2),
    "format_ok": ("format ok", 3),
    "thinking_tokens": ("think tokens", 1),
    "response_tokens": ("response tokens", 1),
}
DEMO_CURVES = ["reward/preference", "reward/gold", "think/mean_tokens", "think/response_tokens", "kl"]
LABELS = {  # column of the curves: its name in the pictures
    "completions": "completions sampled before",
    "reward/preference": "reward (proxy)",
    "reward/gold": "gold score",
    "think/mean_tokens": "thinking tokens",
    "think/response_tokens": "response tokens",
    "kl": "KL to the SFT model",
    "proxy": "proxy reward",
    "gold_ok": "gold reward",
    "response_tokens": "response tokens",
}

SMALL = {  # row of the table: its run, or one for each {seed}
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
MISSING = "–"
COLOURS = {"grpo": "tab:blue", "ppo": "tab:orange", "dpo": "tab:green", "rlvr": "tab:red"}


# --- 1. both


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def read_curves(runs: Path, file: str, n_before: int) -> pd.DataFrame:
    """Reads a file of every RL run: one line per step, by the completions that were sampled before.

    `n_before` is how many of its steps a line comes before: 1 if its numbers are of the step's own
    completions.
    """
    curves = [pd.DataFrame()]
    for path in sorted(runs.glob(f"*/{file}")):
        used = read_json(path.parent / "config.json")["args"]
        prompts = used.get("prompts_per_step") or used.get("prompts_per_round", 0)  # DPO's steps are rounds
        per_step = prompts * (used.get("group_size") or used.get("samples_per_prompt", 1))
        curve = pd.DataFrame(read_lines(path))  # a run may be writing its last line now
        curve.insert(0, "run", path.parent.name)
        curve.insert(1, "completions", per_step * (curve["step"] - n_before))
        curves.append(curve)
    return pd.concat(curves, ignore_index=True)


def plot(curves: pd.DataFrame, panels: list[tuple[str, str]], path: Path) -> None:
    """Plots pairs of columns, (horizontal, vertical), a line per run; with error bars where NAME_se is a
    column.

    A colour is an algorithm, a solid line thinks. Where gold falls while the proxy rises, the reward is
    over-optimised.
    """
    size = (8.3, 3.6)  # inches; at 100 dots per inch as wide as a page of text
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axis, (x, y) in zip(axes.flat, panels):
        for name, part in curves.groupby("run"):
            line = "solid"
            if "plain" in name:
                line = "dashed"
            if "whole" in name:  # the reward model reads the thinking too
                line = "dotted"
            colour = COLOURS[name.split("-")[0]]
            errors = part.get(f"{y}_se")
            axis.errorbar(part[x], part[y], errors, color=colour, linestyle=line, marker=".", label=name)
        axis.set(xlabel=LABELS[x], ylabel=LABELS[y])
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)


def write_mean(line: dict, name: str, digits: int, sign: str) -> str:
    """Writes a measure with its standard error, if it has one; with a sign, bold beyond two of them."""
    mean = line[name]
    if math.isnan(mean):
        return MISSING
    text = f"{mean:{sign}.{digits}f}"
    if f"{name}_se" in line:
        error = line[f"{name}_se"]
        text += f" ± {error:.{digits}f}".replace("nan", MISSING)
        if sign and abs(mean) > 2 * error:
            text = f"**{text}**"
    if name == "gold" and line.get("seeds", 1) > 1:
        text += f" ({line['gold_by_seed']})"
    return text


def write_table(rows: pd.DataFrame, counts: dict[str, str], columns: dict, sign: str = "") -> str:
    """Writes a Markdown table: the row's name, `counts` (column: title), and means (column: title and
    digits)."""
    table = rows[["row", *counts]].astype(str).rename(columns={"row": ""} | counts)
    for name, (title, digits) in columns.items():
        table[title] = [write_mean(line, name, digits, sign) for line in rows.to_dict("records")]
    return markdown_table(table)


# --- 2. the demo


def demo_rows(runs: Path) -> pd.DataFrame:
    """Reads what the evaluations measured at their one temperature: one line per row."""
    lines = []
    for row, name in DEMO.items():
        summary = read_json(runs / f"eval-{name}" / "summary.json")
        [numbers] = summary["temperatures"].values()
        lines.append(numbers | {"row": row})
    rows = pd.DataFrame(lines).rename(columns={"score": "gold", "standard_error": "gold_se"})
    return rows[["row", "n", "gold_se", *DEMO_COLUMNS]]


def make_demo(results: Path) -> list[str]:
    """Writes the files of the demo but table.md, whose paragraphs it returns."""
    runs = results / "runs"
    rows = demo_rows(runs)
    rows.round(4).to_csv(results / "table.csv", index=False)

    curves = read_curves(runs, "metrics.jsonl", n_before=1)
    curves = curves.dropna(subset="reward")  # SFT has none
    curves = curves[["run", "completions", *DEMO_CURVES]]
    curves.round(5).to_csv(results / "curves.csv", index=False)
    plot(
        curves, [("completions", "reward/gold"), ("completions", "reward/preference")], results / "curves.png"
    )

    reward_model = read_json(runs / "reward" / "summary.json")["held_out"]
    explanation = (
        "One run a row, one answer a task at temperature 1. Gold: the checklist's weighted share on held-out tasks; "
        "± is one standard error over the tasks, which does not cover how runs of other seeds differ. All checks: "
        "the share of answers that pass the whole list. Proxy: the shipped reward model on the response. "
        "Response tokens: all but the thinking's, so the tags count among them. "
        f"The reward model trained in the demo orders {reward_model['accuracy']:.3f} of {reward_model['n']} held-out "
        f"pairs as the annotator did (ECE {reward_model['ece']:.3f})."
    )
    return [write_table(rows, {"n": "tasks"}, DEMO_COLUMNS), explanation]


# --- 3. the small model: what was measured of each task


def read_answers(evaluation: Path) -> pd.DataFrame:
    """Reads what eval_wildbench.py measured of each answer; gold and proxy are NaN outside of the good
    format."""
    rows = pd.DataFrame(read_log(evaluation / "verdicts.jsonl")).set_index("id")
    response_tokens = rows["n_tokens"] - rows["n_thinking_tokens"]
    measures = {
        "gold": rows["score"],
        "proxy": rows.get("reward"),
        "format_ok": rows["status"] == "ok",
        "thinking_tokens": rows["n_thinking_tokens"],
        "response_tokens": response_tokens,
        # averaged over the same answers as gold, also where only some seeds have a gold
        "tokens_with_gold": response_tokens.where(rows["score"].notna()),
    }
    return pd.DataFrame(measures).astype(float)


def read_ifeval(evaluation: Path, name: str) -> pd.DataFrame:
    """Reads whether the answer to each of IFEval's prompts meets all of its instructions, as column `name`.

    `name`_cut_off says whether the token limit cut it off; its instructions are checked as far as it goes.
    """
    tasks = pd.read_csv(evaluation / "task_means.csv", dtype={"task": str})
    met = tasks[tasks["metric"] == "prompt_strict"].set_index("task")["mean"]
    rows = pd.DataFrame(read_log(evaluation / "rows.jsonl"))
    is_cut_off = (rows["status"] == "truncated").set_axis(rows["key"].astype(str))
    table = pd.DataFrame({name: met, f"{name}_cut_off": is_cut_off.astype(float)})
    return table.add_prefix("ifeval-", axis=0)


def read_run(runs: Path, name: str) -> pd.DataFrame:
    """Returns what the finished evaluations measured of a run: one line per task, NaN for what was not
    measured."""
    parts = [pd.DataFrame(columns=[*COLUMNS, "tokens_with_gold"], dtype=float)]
    for kind in ("eval", "ifeval", "ifeval-greedy"):
        evaluation = runs / f"{kind}-{name}"
        if not (evaluation / "summary.json").exists():
            continue
        if kind == "eval":
            parts.append(read_answers(evaluation))
        else:
            parts.append(read_ifeval(evaluation, kind.replace("-", "_")))
    # a task of IFEval is in two parts if it also has a greedy answer
    return pd.concat(parts).groupby(level=0).first()


def summarize(row: str, by_task: pd.DataFrame, by_seed: list[pd.DataFrame]) -> dict:
    """Returns a line of the table: for each measure its mean over tasks, the standard error, and the number
    of tasks.

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
    """Returns how much gold differs where two rows' responses have equally many tokens, and its standard
    error.

    That is where a straight line through the tasks' differences, gold over length, crosses a length of 0.
    With fewer than four golds, or all lengths alike, there is no value.
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


def small_rows(runs: Path, seeds: tuple[int, ...]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the rows of the table, and their differences, which are taken task by task.

    A task that only one of two rows has a value for is left out of their difference.
    """
    by_seed = {}
    by_task = {}
    rows = []
    for row, pattern in SMALL.items():
        names = dict.fromkeys(pattern.format(seed=seed) for seed in seeds)  # one without {seed}
        by_seed[row] = [read_run(runs, name) for name in names]
        by_task[row] = pd.concat(by_seed[row]).groupby(level=0).mean()  # over the seeds that have a value
        rows.append(summarize(row, by_task[row], by_seed[row]))

    differences = []
    for after, before in DIFFERENCES:
        # all seeds may have started from the same run
        by_seed_difference = [one - other for one, other in zip(by_seed[after], cycle(by_seed[before]))]
        difference = by_task[after] - by_task[before]
        line = summarize(f"{after} − {before}", difference, by_seed_difference)
        differences.append(line | compare_at_equal_length(difference["gold"], difference["tokens_with_gold"]))
    return pd.DataFrame(rows), pd.DataFrame(differences)


# --- 4. the small model: tables


def describe_reward_model(name: str, held_out: dict) -> str:
    """Says how often a reward model agrees with the published preferences, and what length alone would do."""
    text = (
        f"{name}: {held_out['accuracy']:.3f} of {held_out['n']} held-out pairs ordered as published, where the longer "
        f"answer is the better one in {held_out['length_baseline']:.3f}"
    )
    equal = held_out["equal_length"]
    if equal is None:
        return f"{text}; it does not count, as hardly any pair is of about equal length."
    verdict = "counts: that is more often than not by two standard errors"
    if equal["accuracy"] - 2 * equal["standard_error"] <= 0.5:
        verdict = "does not count: it may be guessing"
    return (
        f"{text}; of the {equal['n']} pairs of about equal length {equal['accuracy']:.3f} ± "
        f"{equal['standard_error']:.3f} ({equal['length_baseline']:.3f} by length), so it {verdict}."
    )


def make_small(results: Path, seeds: tuple[int, ...]) -> list[str]:
    """Writes the files of the small model but table.md, whose paragraphs it returns."""
    runs = results / "runs"
    rows, differences = small_rows(runs, seeds)
    pd.concat([rows, differences]).round(4).to_csv(results / "table.csv", index=False)
    explanation = (
        "Differences are taken task by task, where both rows have a value, and averaged; n: the tasks that have two golds. "
        "At equal length: where a straight line through the tasks' differences, of gold over response tokens, crosses 0 "
        "tokens. ± is one standard error over the tasks, which does not cover how other seeds differ. Beyond two of them a "
        "difference is bold. Cut off: the share of IFEval's answers that reach 256 tokens."
    )
    counts = {"seeds": "seeds", "gold_n": "n"}
    text = write_table(differences, counts, COLUMNS, sign="+")
    (results / "differences.md").write_text(f"{text}\n\n{explanation}\n")

    curves = read_curves(runs, "held_out.jsonl", n_before=0)
    if len(curves):
        curves.round(5).to_csv(results / "curves.csv", index=False)
        panels = [("proxy", "gold_ok"), ("completions", "response_tokens")]
        plot(curves, panels, results / "overoptimisation.png")

    narrow = COLUMNS.copy()  # the README shows this table
    for name in ("gold_at_equal_length", "ifeval_cut_off", "ifeval_greedy_cut_off"):
        del narrow[name]
    paragraphs = [
        write_table(rows, counts, narrow),
        "One answer of at most 256 tokens, thinking included, to each held-out prompt at temperature 0.7. Gold: the "
        "reward by a second reward model, trained on other instructions, of answers in good format; n: the tasks that "
        "have one. An answer that is cut off has none, so rows compare different tasks. Proxy: the reward that RLMT "
        "and RLHF are trained on, of the same answers. Format ok: the share of answers in good format. "
        "Response tokens: all but the thinking's, so the tags count among them; of all answers, also those without a gold. "
        f"IFEval: the share of {rows['ifeval_n'].max()} prompts whose instructions are all met (strict), at temperature 0.7 "
        "with top-p 0.95 and greedy, in answers of at most 256 tokens: longer ones are cut off and checked as far as they "
        "go, so the numbers are not those of leaderboards, which allow more. Each task is averaged first over the "
        "seeds that have a value; the gold of each seed is in brackets. ± is one standard error over the tasks, which "
        "does not cover how other seeds differ.",
    ]
    for name in ("proxy", "gold"):
        path = runs / f"reward-{name}" / "summary.json"
        if path.exists():
            paragraphs.append(describe_reward_model(name.capitalize(), read_json(path)["held_out"]))
    return paragraphs


def main(args: Args) -> None:
    results = args.results or Path("results") / args.experiment
    if not (results / "runs").exists():  # git has the tables without the runs: do not write over them
        fail(f"no folder {results / 'runs'}: experiments/{args.experiment}.sh makes it")
    if args.experiment == "demo":
        paragraphs = make_demo(results)
    else:
        paragraphs = make_small(results, args.seeds)
    text = "\n\n".join(paragraphs) + "\n"
    (results / "table.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main(tyro.cli(Args))
