"""Renders what experiments/demo.sh measured: table.csv, table.md, curves.csv and two pictures.

python -m experiments.demo_tables --results results/demo
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
    results: Path = Path("results/demo")
    """Folder whose runs/ has the run folders, and into which the files are written."""


ROWS = {  # row of the table: its run
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
MEASURED = (  # columns that have the same name in an evaluation's summary
    "standard_error",
    "all_checks",
    "proxy_reward",
    "thinking_tokens",
    "response_tokens",
    "n",
    "n_invalid",
)
CURVES = {  # metric of a training run: title of its plot
    "reward/preference": "reward (proxy)",
    "reward/gold": "gold score",
    "think/mean_tokens": "thinking tokens",
    "think/response_tokens": "response tokens",
    "kl": "KL to the SFT model",
}


# --- 1. table


def collect(runs: Path) -> pd.DataFrame:
    """Reads what the evaluations measured: one line a row."""
    lines = []
    for row, name in ROWS.items():
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
            line |= {column: numbers[column] for column in MEASURED}
            lines.append(line)
    return pd.DataFrame(lines)


def markdown_table(columns: list[str], lines: list[list[str]]) -> str:
    """Lays out a table; `lines` are its cells."""
    head, *body = ["| " + " | ".join(cells) + " |" for cells in [columns, *lines]]
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def markdown(results: pd.DataFrame) -> str:
    """Writes the table for people."""
    columns = ["", "tasks", "gold", "all checks", "proxy", "format ok", "think tokens", "response tokens"]
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
    return markdown_table(columns, lines)


def explanation(reward_model: dict) -> str:
    """Says what the columns mean; `reward_model` has its accuracy on held-out pairs."""
    return (
        "One run a row, one answer a task at temperature 1. Gold: the checklist's weighted share on held-out tasks; "
        "± is one standard error over the tasks, which does not cover how runs of other seeds differ. All checks: "
        "the share of answers that pass the whole list. Proxy: the shipped reward model on the response. "
        "Response tokens: all but the thinking's, so the tags count among them. "
        f"The reward model trained in the demo orders {reward_model['accuracy']:.3f} of {reward_model['n']} held-out "
        f"pairs as the annotator did (ECE {reward_model['ece']:.3f})."
    )


# --- 2. curves


def completions_per_step(run: Path) -> int:
    """Returns how many completions an RL run samples a step, or a round of DPO; 0 for other training."""
    used = json.loads((run / "config.json").read_text())["args"]
    prompts = used.get("prompts_per_step") or used.get("prompts_per_round", 0)
    return prompts * (used.get("group_size") or used.get("samples_per_prompt", 1))


def read_curves(runs: Path) -> pd.DataFrame:
    """Reads the metrics of every training run with a reward, by the completions sampled before."""
    lines = []
    for path in sorted(runs.glob("*/metrics.jsonl")):
        completions = completions_per_step(path.parent)
        for text in path.read_text().splitlines():
            metrics = json.loads(text)
            if "reward" in metrics:
                line = {"run": path.parent.name, "completions": completions * (metrics["step"] - 1)}
                lines.append(line | {key: metrics.get(key, math.nan) for key in CURVES})
    return pd.DataFrame(lines)


def smooth(column: pd.Series) -> pd.Series:
    """Averages over the last five steps; DPO's few rounds are left as they are."""
    window = 5 if len(column) > 5 else 1
    return column.rolling(window, min_periods=1).mean()


def plot_curves(curves: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(1, len(CURVES), figsize=(4 * len(CURVES), 3.4))
    for axis, (key, title) in zip(axes, CURVES.items()):
        for name, part in curves.groupby("run"):
            marker = "." if len(part) < 5 else ""
            axis.plot(part["completions"], smooth(part[key]), label=name, marker=marker)
        axis.set(title=title, xlabel="completions sampled before")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def plot_overoptimisation(curves: pd.DataFrame, path: Path) -> None:
    """Plots gold against proxy: where gold falls while the proxy rises, the reward is over-optimised."""
    figure, axis = plt.subplots(figsize=(5.5, 4.2))
    for name, part in curves.groupby("run"):
        axis.plot(smooth(part["reward/preference"]), smooth(part["reward/gold"]), marker=".", label=name)
    axis.set(
        xlabel="reward of the reward model (proxy)",
        ylabel="gold score",
        title="gold against proxy along training",
    )
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(args: Args) -> None:
    runs = args.results / "runs"
    results = collect(runs)
    results.round(4).to_csv(args.results / "table.csv", index=False)
    reward_model = json.loads((runs / "reward" / "summary.json").read_text())["held_out"]
    text = f"{markdown(results)}\n\n{explanation(reward_model)}\n"
    (args.results / "table.md").write_text(text)

    curves = read_curves(runs)
    curves.round(5).to_csv(args.results / "curves.csv", index=False)
    plot_curves(curves, args.results / "curves.png")
    plot_overoptimisation(curves, args.results / "overoptimisation.png")
    print(f"\n{text}")


if __name__ == "__main__":
    main(tyro.cli(Args))
