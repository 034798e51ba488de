"""Renders what experiments/small.sh measured: table.csv, table.md, curves.csv and overoptimisation.png.

python -m experiments.small_tables --results results/small
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import tyro


@dataclass
class Args:
    results: Path = Path("results/small")
    """Folder whose runs/ has the run folders, and into which the files are written."""


@dataclass
class Row:
    """A row of the table: its runs, one a seed, and the run that they started from."""

    name: str
    runs: tuple[str, ...]
    start: str = ""


ROWS = (
    Row("SmolLM2-135M-Instruct", ("instruct",)),
    Row("SFT, thinking", ("sft-think",)),
    Row("SFT, no thinking", ("sft-plain",)),
    Row("RLMT: GRPO, thinking", ("grpo-think-s0", "grpo-think-s1"), "sft-think"),
    Row("RLHF: GRPO, no thinking", ("grpo-plain-s0", "grpo-plain-s1"), "sft-plain"),
    Row("RLMT: DPO, thinking", ("dpo-think",), "sft-think"),
    Row("RLHF: DPO, no thinking", ("dpo-plain",), "sft-plain"),
    Row("RLVR: GRPO, no thinking, verified instructions", ("rlvr-plain",), "sft-plain"),
)


# --- 1. table


def task_means(evaluation: Path) -> pd.Series:
    """Reads what an evaluation measured of each task."""
    tasks = pd.read_csv(evaluation / "task_means.csv", dtype={"task": str})
    return tasks.set_index("task")["mean"]


def mean_and_error(name: str, by_task: pd.Series) -> dict[str, float]:
    """Returns the mean over tasks and its standard error."""
    return {name: by_task.mean(), f"{name}_se": by_task.sem()}


def describe(runs: Path, name: str) -> dict[str, float]:
    """Reads what eval_wildbench.py says of the answers of run `name`."""
    summary = json.loads((runs / f"eval-{name}" / "summary.json").read_text())
    (numbers,) = summary["temperatures"].values()
    return {
        "n": numbers["n"],
        "proxy": numbers["proxy_reward"],
        "format_ok": numbers["status"].get("ok", 0) / numbers["n"],
        "thinking_tokens": numbers["thinking_tokens"],
        "response_tokens": numbers["response_tokens"],
    }


def collect(runs: Path) -> pd.DataFrame:
    """Returns one line a row of the table, of the runs that are evaluated.

    Several seeds: each task is averaged over them first, so errors are over tasks. `gain` is gold minus that of
    the run before RL, task by task; tasks that one of them did not answer in good format are left out of it.
    """
    lines = []
    for row in ROWS:
        evaluated = [name for name in row.runs if (runs / f"ifeval-{name}" / "summary.json").exists()]
        if not evaluated:
            continue
        gold = pd.DataFrame({name: task_means(runs / f"eval-{name}") for name in evaluated}).mean(axis=1)
        ifeval = pd.DataFrame({name: task_means(runs / f"ifeval-{name}") for name in evaluated}).mean(axis=1)
        line = {"row": row.name, "seeds": len(evaluated)}
        line |= mean_and_error("gold", gold)
        if row.start:
            line |= mean_and_error("gain", gold - task_means(runs / f"eval-{row.start}"))
        line |= mean_and_error("ifeval", ifeval)
        lines.append(line | pd.DataFrame([describe(runs, name) for name in evaluated]).mean().to_dict())
    return pd.DataFrame(lines)


def markdown(results: pd.DataFrame) -> str:
    """Writes the table for people."""
    columns = ["", "seeds", "gold", "gain", "proxy", "format ok", "think tokens", "response tokens", "IFEval"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for result in results.itertuples():
        gain = ""
        if not math.isnan(result.gain):
            gain = f"{result.gain:+.2f} ± {result.gain_se:.2f}"
        cells = [
            result.row,
            str(result.seeds),
            f"{result.gold:.2f} ± {result.gold_se:.2f}",
            gain,
            f"{result.proxy:.2f}",
            f"{result.format_ok:.2f}",
            f"{result.thinking_tokens:.0f}",
            f"{result.response_tokens:.0f}",
            f"{result.ifeval:.3f} ± {result.ifeval_se:.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe_reward_model(name: str, held_out: dict) -> str:
    """Says how often a reward model agrees with the published preferences, and what length alone would do."""
    equal = held_out["equal_length"]
    return (
        f"{name}: {held_out['accuracy']:.3f} of {held_out['n']} held-out pairs ordered as published, where the longer "
        f"answer is the better one in {held_out['length_baseline']:.3f}; of the {equal['n']} pairs of about equal "
        f"length {equal['accuracy']:.3f} ± {equal['standard_error']:.3f} ({equal['length_baseline']:.3f} by length)."
    )


def verdict_on_gold(held_out: dict) -> str:
    """Says whether the gold reward model knows more than length: right above chance by two standard errors."""
    equal = held_out["equal_length"]
    if equal["accuracy"] - 2 * equal["standard_error"] > 0.5:
        return "Gold counts: on pairs of about equal length it is right more often than not by two standard errors."
    return "Gold does not count: on pairs of about equal length it may be guessing. IFEval and lengths are the evidence."


def explanation(runs: Path) -> str:
    """Says what the columns mean, and what the reward models are worth."""
    held_out = {}
    for name in ("proxy", "gold"):
        held_out[name] = json.loads((runs / f"reward-{name}" / "summary.json").read_text())["held_out"]
    return " ".join(
        (
            "Gold: the mean reward of a second reward model, trained on other instructions, over answers in good",
            "format; gain: minus that of the SFT run it started from, on the same prompts. Proxy: the reward that was",
            "trained on. IFEval: prompt strict. ± is one standard error over tasks; it does not cover other seeds.",
            describe_reward_model("Proxy", held_out["proxy"]),
            describe_reward_model("Gold", held_out["gold"]),
            verdict_on_gold(held_out["gold"]),
        )
    )


# --- 2. curves


def read_curves(runs: Path) -> pd.DataFrame:
    """Reads what every RL run measured on the held-out prompts along training."""
    curves = []
    for path in sorted(runs.glob("*/held_out.jsonl")):
        curve = pd.read_json(path, lines=True)
        curve.insert(0, "run", path.parent.name)
        curves.append(curve)
    return pd.concat(curves, ignore_index=True)


def plot_curves(curves: pd.DataFrame, path: Path) -> None:
    """Plots gold against proxy: where gold falls while the proxy rises, the reward is over-optimised."""
    figure, (over, lengths) = plt.subplots(1, 2, figsize=(11, 4.2))
    for name, part in curves.groupby("run"):
        over.errorbar(part["proxy"], part["gold"], part["gold_se"], marker=".", label=name, linewidth=1)
        lengths.plot(part["step"], part["response_tokens"], marker=".", label=name)
    over.set(xlabel="proxy reward", ylabel="gold reward", title="held-out prompts along training")
    lengths.set(xlabel="step", ylabel="response tokens", title="length")
    lengths.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(args: Args) -> None:
    runs = args.results / "runs"
    results = collect(runs)
    results.round(4).to_csv(args.results / "table.csv", index=False)
    text = f"{markdown(results)}\n\n{explanation(runs)}\n"
    (args.results / "table.md").write_text(text)

    curves = read_curves(runs)
    curves.round(5).to_csv(args.results / "curves.csv", index=False)
    plot_curves(curves, args.results / "overoptimisation.png")
    print(f"\n{text}")


if __name__ == "__main__":
    main(tyro.cli(Args))
