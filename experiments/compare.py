"""Makes the tables and pictures of experiments/demo.sh or experiments/small.sh from their run folders.

    python -m experiments.compare demo
    python -m experiments.compare small --seeds 0 1

Stages of small.sh may be missing: what is not measured is an empty cell of table.csv and a dash in table.md.
notebooks/07_small_model.ipynb shows what its models wrote.
"""

import json
import math
from dataclasses import dataclass
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
    """Folder whose runs/ has the run folders, and into which the files are written; empty: results/ and the experiment."""
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
IN_SUMMARY = "standard_error all_checks proxy_reward thinking_tokens response_tokens n n_invalid".split()
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
# the README shows table.md, which is narrow
ONLY_IN_DIFFERENCES = ("gold_at_equal_length", "ifeval_cut_off", "ifeval_greedy_cut_off")
MISSING = "–"


# --- 1. both


def read_curves(runs: Path, file: str, columns: list[str], n_before: int) -> pd.DataFrame:
    """Reads `columns`, "step" among them, of a file of every RL run, by the completions that were sampled before.

    `n_before` is how many of its steps a line comes before: 1 if its numbers are of the step's own completions.
    """
    curves = []
    for path in sorted(runs.glob(f"*/{file}")):
        used = json.loads((path.parent / "config.json").read_text())["args"]
        prompts = used.get("prompts_per_step") or used.get("prompts_per_round", 0)  # DPO's steps are rounds
        per_step = prompts * (used.get("group_size") or used.get("samples_per_prompt", 1))
        rows = list(read_lines(path))  # a run may be writing its last line now
        curve = pd.DataFrame(rows).reindex(columns=columns).apply(pd.to_numeric)  # a null is NaN
        curve.insert(0, "run", path.parent.name)
        curve.insert(1, "completions", per_step * (curve["step"] - n_before))
        curves.append(curve)
    if not curves:
        return pd.DataFrame()
    return pd.concat(curves, ignore_index=True)


def plot(curves: pd.DataFrame, panels: list[tuple[str, str]], path: Path) -> None:
    """Plots pairs of columns, (horizontal, vertical), a line per run; with error bars where NAME_se is a column.

    Where gold falls while the proxy rises, the reward is over-optimised.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels) + 1, 3.6), squeeze=False)
    for axis, (x, y) in zip(axes[0], panels):
        for name, part in curves.groupby("run"):
            axis.errorbar(part[x], part[y], part.get(f"{y}_se"), marker=".", linewidth=1, label=name)
        axis.set(xlabel=LABELS[x], ylabel=LABELS[y])
    axes[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=90)


# --- 2. the demo


def demo_rows(runs: Path) -> pd.DataFrame:
    """Reads what the evaluations measured: one line per row."""
    lines = []
    for row, name in DEMO.items():
        training = json.loads((runs / name / "config.json").read_text())
        summary = json.loads((runs / f"eval-{name}" / "summary.json").read_text())
        for temperature, numbers in summary["temperatures"].items():
            line = {
                "row": row,
                "seed": training["args"]["seed"],
                "temperature": float(temperature),
                "gold": numbers["score"],
                "low": numbers["interval"][0],
                "high": numbers["interval"][1],
                "format_ok": numbers["status"].get("ok", 0) / numbers["n"],
            }
            lines.append(line | {column: numbers[column] for column in IN_SUMMARY})
    return pd.DataFrame(lines)


def demo_markdown(results: pd.DataFrame) -> str:
    """Writes the table for people."""
    lines = []
    for result in results.itertuples():
        cells = [
            result.row,
            str(result.n),
            f"{result.gold:.3f} ± {result.standard_error:.3f}",
            f"{result.all_checks:.2f}",
            f"{result.proxy_reward:.2f}",
            f"{result.format_ok:.3f}",
            f"{result.thinking_tokens:.1f}",
            f"{result.response_tokens:.1f}",
        ]
        lines.append(cells)
    columns = ["", "tasks", "gold", "all checks", "proxy", "format ok", "think tokens", "response tokens"]
    return markdown_table(columns, lines)


def smooth(column: pd.Series) -> pd.Series:
    """Averages over the last five steps; DPO's few rounds are left as they are."""
    window = 5 if len(column) > 5 else 1
    return column.rolling(window, min_periods=1).mean()


def make_demo(results: Path) -> list[str]:
    """Writes the files of the demo but table.md, whose paragraphs it returns."""
    runs = results / "runs"
    rows = demo_rows(runs)
    rows.round(4).to_csv(results / "table.csv", index=False)

    curves = read_curves(runs, "metrics.jsonl", ["step", "reward", *DEMO_CURVES], n_before=1)
    curves = curves.dropna(subset="reward")  # SFT has none
    curves = curves[["run", "completions", *DEMO_CURVES]]
    curves.round(5).to_csv(results / "curves.csv", index=False)
    curves[DEMO_CURVES] = curves.groupby("run")[DEMO_CURVES].transform(smooth)
    plot(curves, [("completions", name) for name in DEMO_CURVES], results / "curves.png")
    plot(curves, [("reward/preference", "reward/gold")], results / "overoptimisation.png")

    reward_model = json.loads((runs / "reward" / "summary.json").read_text())["held_out"]
    explanation = (
        "One run a row, one answer a task at temperature 1. Gold: the checklist's weighted share on held-out tasks; "
        "± is one standard error over the tasks, which does not cover how runs of other seeds differ. All checks: "
        "the share of answers that pass the whole list. Proxy: the shipped reward model on the response. "
        "Response tokens: all but the thinking's, so the tags count among them. "
        f"The reward model trained in the demo orders {reward_model['accuracy']:.3f} of {reward_model['n']} held-out "
        f"pairs as the annotator did (ECE {reward_model['ece']:.3f})."
    )
    return [demo_markdown(rows), explanation]


# --- 3. the small model: what was measured of each task


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


def read_run(runs: Path, name: str) -> pd.DataFrame:
    """Returns what the finished evaluations measured of a run: one line per task, NaN for what was not measured."""
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
        before_by_seed = by_seed[before]
        if len(before_by_seed) == 1:  # all seeds started from the same run
            before_by_seed = before_by_seed * len(by_seed[after])
        by_seed_difference = [one - other for one, other in zip(by_seed[after], before_by_seed, strict=True)]
        difference = by_task[after] - by_task[before]
        line = summarize(f"{after} − {before}", difference, by_seed_difference)
        differences.append(line | compare_at_equal_length(difference["gold"], difference["tokens_with_gold"]))
    return pd.DataFrame(rows), pd.DataFrame(differences)


# --- 4. the small model: tables


def small_markdown(results: pd.DataFrame, is_difference: bool) -> str:
    """Writes means with their standard errors; a difference has a sign, and is bold beyond two standard errors."""
    shown = [name for name in COLUMNS if is_difference or name not in ONLY_IN_DIFFERENCES]
    sign = "+" if is_difference else ""
    lines = []
    for _, line in results.iterrows():
        cells = [line["row"], str(line["seeds"]), str(line["gold_n"])]
        for name in shown:
            digits = COLUMNS[name][1]
            mean = line[name]
            error = line[f"{name}_se"]
            text = MISSING
            if not math.isnan(mean):
                text = f"{mean:{sign}.{digits}f} ± {error:.{digits}f}".replace("nan", MISSING)
            if is_difference and abs(mean) > 2 * error:
                text = f"**{text}**"
            if name == "gold" and line["seeds"] > 1 and line["gold_by_seed"]:
                text += f" ({line['gold_by_seed']})"
            cells.append(text)
        lines.append(cells)
    return markdown_table(["", "seeds", "n", *[COLUMNS[name][0] for name in shown]], lines)


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
    text = f"{small_markdown(differences, is_difference=True)}\n\n{explanation}\n"
    (results / "differences.md").write_text(text)

    columns = (
        "step n n_gold gold gold_se gold_ok gold_ok_se proxy format_ok think_tokens response_tokens".split()
    )
    curves = read_curves(runs, "held_out.jsonl", columns, n_before=0)
    if len(curves):
        curves.round(5).to_csv(results / "curves.csv", index=False)
        panels = [("proxy", "gold_ok"), ("completions", "response_tokens")]
        plot(curves, panels, results / "overoptimisation.png")

    paragraphs = [
        small_markdown(rows, is_difference=False),
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
            held_out = json.loads(path.read_text())["held_out"]
            paragraphs.append(describe_reward_model(name.capitalize(), held_out))
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
