"""The whole pipeline for real on the toy world, on two CPU cores (`make demo`), and the table and curves it gives.

Runs the repository's own scripts, two at a time, as a user would from the shell: SFT with and without thinking from the
shipped base model, a reward model, GRPO, PPO and DPO with thinking (RLMT) and without (RLHF), the reward on think+response
against response, and the evaluation by the gold checklist that neither policy nor reward model ever sees. An interrupted
demo goes on where it was. Writes results/demo/: table.md, table.csv, curves.csv, curves.png, overoptimisation.png, and
runs/ with the run folders and logs.
"""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import tyro

import runs

HERE = Path(__file__).parent


@dataclass
class Args:
    out: Path = Path("results/demo")
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the GRPO runs; all start from one SFT checkpoint. PPO and DPO take the first."""
    steps: int = 14
    """GRPO and PPO steps, 128 completions each. DPO has two rounds of 1,024."""
    n_tasks: int = 256
    """Held-out tasks of each evaluation."""
    lanes: int = 2
    """Commands at a time, one core each."""


def jobs(args: Args) -> dict[str, tuple[list[str], list[str]]]:
    """name -> (names it waits for, command). Of the commands that can start, the first does: the longest ones stand first."""
    folder, toy = args.out / "runs", "data/toy"
    plan: dict[str, tuple[list[str], list[str]]] = {}

    def add(name: str, after: list[str], script: str, *flags) -> None:
        plan[name] = (after, ["python", script, *map(str, flags), "--out", str(folder / name), "--resume"])

    def train(name: str, start: str, seed: int, script: str, *flags) -> None:
        steps = [] if script == "train_dpo.py" else ["--steps", args.steps]
        kind = [] if start == "sft-think" else ["--no-think"]
        add(
            name,
            [start],
            script,
            "--preset",
            "toy",
            "--model",
            folder / start / "model",
            "--seed",
            seed,
            *steps,
            *kind,
            *flags,
        )

    add("sft-think", [], "train_sft_warmstart.py", "--preset", "toy")
    add("sft-plain", [], "train_sft_warmstart.py", "--preset", "toy", "--no-think")
    first = args.seeds[0]
    train("grpo-think-whole", "sft-think", first, "train_grpo.py", "--reward-on", "think+response")
    for kind in ("think", "plain"):
        train(f"ppo-{kind}", f"sft-{kind}", first, "train_ppo.py", "--reward-on", "response")
        for seed in args.seeds:
            train(f"grpo-{kind}-s{seed}", f"sft-{kind}", seed, "train_grpo.py", "--reward-on", "response")
        train(f"dpo-{kind}", f"sft-{kind}", first, "train_dpo.py", "--reward-on", "response")
    trained = list(plan)
    add("reward", [], "train_reward.py", "--preset", "toy")
    for name in trained:
        add(
            f"eval-{name}",
            [name],
            "eval_wildbench.py",
            "--model",
            folder / name / "model",
            "--limit",
            args.n_tasks,
            "--max-tokens",
            128,
            "--temperatures",
            1.0,
            0.0,
            "--reward-model",
            f"{toy}/reward_model",
            "--reward-on",
            "response",
        )
    return plan


ROWS = {  # row of the table -> run names, those that end with -s without the seed
    "SFT, thinking": "sft-think",
    "SFT, no thinking": "sft-plain",
    "RLMT: GRPO, thinking": "grpo-think-s",
    "RLMT: PPO, thinking": "ppo-think",
    "RLMT: DPO, thinking": "dpo-think",
    "RLMT: GRPO, thinking, reward on think+response": "grpo-think-whole",
    "RLHF: GRPO, no thinking": "grpo-plain-s",
    "RLHF: PPO, no thinking": "ppo-plain",
    "RLHF: DPO, no thinking": "dpo-plain",
}


def collect(args: Args) -> pd.DataFrame:
    """One line a run and temperature: what its evaluation measured."""
    lines = []
    for row, prefix in ROWS.items():
        for seed in args.seeds if prefix.endswith("-s") else ("",):
            path = args.out / "runs" / f"eval-{prefix}{seed}" / "summary.json"
            if path.exists():
                for temperature, s in json.loads(path.read_text())["temperatures"].items():
                    same = [
                        "standard_error",
                        "all_checks",
                        "proxy_reward",
                        "thinking_tokens",
                        "response_tokens",
                        "n",
                        "n_invalid",
                    ]
                    lines.append(
                        {
                            "row": row,
                            "seed": seed,
                            "temperature": float(temperature),
                            "gold": s["score"],
                            "low": s["interval"][0],
                            "high": s["interval"][1],
                            "format_ok": s["status"].get("ok", 0) / s["n"],
                            **{k: s[k] for k in same},
                        }
                    )
    return pd.DataFrame(lines)


def table(results: pd.DataFrame) -> str:
    """Markdown; several seeds of a row are averaged, their standard errors combined, their spread shown."""
    head = [
        "",
        "seeds",
        "gold, T=1",
        "gold, greedy",
        "all checks, greedy",
        "proxy, T=1",
        "format ok",
        "think tokens",
        "response tokens",
    ]
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in ROWS:
        part = results[results.row == row]
        if part.empty:
            continue
        hot, cold = part[part.temperature == 1], part[part.temperature == 0]
        cells = [row, str(len(hot))]
        for x in (hot, cold):
            spread = f" ({x.gold.min():.3f} to {x.gold.max():.3f})" if len(x) > 1 else ""
            cells.append(f"{x.gold.mean():.3f} ± {(x.standard_error**2).sum() ** 0.5 / len(x):.3f}{spread}")
        cells += [
            f"{cold.all_checks.mean():.2f}",
            f"{hot.proxy_reward.mean():.2f}",
            f"{hot.format_ok.mean():.3f}",
            f"{hot.thinking_tokens.mean():.1f}",
            f"{hot.response_tokens.mean():.1f}",
        ]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def plots(args: Args) -> None:
    """curves.csv and the two pictures, from the metrics of the RL runs."""
    keys = {
        "reward/preference": "reward (proxy)",
        "reward/gold": "gold score",
        "think/mean_tokens": "thinking tokens",
        "think/response_tokens": "response tokens",
        "kl": "KL to the SFT model",
    }
    lines = []
    for path in sorted((args.out / "runs").glob("*/metrics.jsonl")):
        used = json.loads((path.parent / "config.json").read_text())["args"]
        a_step = used.get("prompts_per_step", used.get("prompts_per_round", 0))
        a_step *= used.get("group_size", used.get("samples_per_prompt", 1))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines += [
            {
                "run": path.parent.name,
                "completions": a_step * (r["step"] - 1),
                **{k: r.get(k, math.nan) for k in keys},
            }
            for r in rows
            if "reward" in r
        ]
    curves = pd.DataFrame(lines)
    smooth = lambda column: column.rolling(
        5 if len(column) > 5 else 1, min_periods=1
    ).mean()  # DPO has a point a round
    curves.round(5).to_csv(args.out / "curves.csv", index=False)
    figure, axes = plt.subplots(1, len(keys), figsize=(4 * len(keys), 3.4))
    for axis, (key, title) in zip(axes, keys.items()):
        for name, part in curves.groupby("run"):
            axis.plot(part.completions, smooth(part[key]), label=name, marker="." if len(part) < 5 else "")
        axis.set(title=title, xlabel="completions sampled before")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(args.out / "curves.png", dpi=90)
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
    figure.savefig(args.out / "overoptimisation.png", dpi=90)


def main(args: Args) -> None:
    began = time.time()
    if subprocess.run([sys.executable, "-m", "data.toy.world"], cwd=HERE).returncode:
        sys.exit(1)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    runs.run_plan(jobs(args), args.out / "runs", args.lanes)
    results = collect(args)
    results.round(4).to_csv(args.out / "table.csv", index=False)
    reward = json.loads((args.out / "runs" / "reward" / "summary.json").read_text())["held_out"]
    text = (
        f"{table(results)}\n\nGold: the checklist's weighted share on {args.n_tasks} held-out tasks, ± one standard error "
        f"over tasks; in brackets the seeds' range. Proxy: the shipped reward model on the response. The reward model "
        f"trained in the demo orders {reward['accuracy']:.3f} of {reward['n']} held-out pairs as the annotator did "
        f"(ECE {reward['ece']:.3f}).\n"
    )
    (args.out / "table.md").write_text(text)
    plots(args)
    print(f"\n{text}\n{(time.time() - began) / 60:.1f} minutes; table, csv and pictures are in {args.out}/")


if __name__ == "__main__":
    main(tyro.cli(Args))
