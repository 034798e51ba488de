"""Computes the seconds of a GRPO step of Llama-3.1-8B on eight GPUs of 80 GB, part by part, from rates of one GPU.

    python -m dev.step_time                    # a further column for each results/gpu/<card>.json of `make gpu-check`
    python -m dev.step_time --compute 450e12   # with a rate of your own

Nothing here was measured on eight GPUs. docs/gpu.md says where each number comes from.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

PARAMETERS = 8_030_261_248
POLICY = 7_504_924_672  # weights that a token is multiplied with: all but the table of embeddings
REWARD_MODEL = 6_979_592_192  # the same with one output in place of the LM head
CACHE = 2 * 32 * 8 * 128 * 2  # bytes of keys and values a token: 32 layers, 8 heads of 128 numbers, bfloat16
COMPLETIONS = 64  # of a GPU, 512 in all
TOKENS = COMPLETIONS * (200 + 1500)  # of a GPU: prompts have 200 on average, completions 1,500
LONGEST = 4096  # tokens: with this limit (table 7) one of the completions nearly always reaches it


@dataclass
class Args:
    """Holds what one GPU does in a second. The defaults are assumptions."""

    compute: float = 0.4 * 700e12 * 8 / 6
    """Operations, recomputed activations included: without those the update has 40 % of a matrix product's rate."""
    memory: float = 0.8 * 3.35e12
    """Bytes that vLLM reads from the GPU's memory."""
    link: float = 300e9
    """Bytes received from the other GPUs."""
    disk: float = 2e9
    """Bytes written to a disk, by all processes together."""


DATA_SHEET = Args(compute=989e12, memory=3.35e12, link=450e9)  # of an H100 SXM


def bytes_read(n_tokens: float) -> float:
    """Returns the bytes that sampling 64 completions reads; `n_tokens` counts their tokens and their prompts'.

    Each token of the longest reads all weights; each token of any reads the keys and values before it.
    """
    return LONGEST * 2 * POLICY + n_tokens * n_tokens / COMPLETIONS / 2 * CACHE


def measured(numbers: dict[str, float]) -> Args:
    """Returns the rates that `step-8b-lora` of dev/gpu_check.py has measured; link and disk stay assumed."""
    # a weight and token: reference 2, forward 2, again 2, backward 2, as frozen weights have no gradient
    rates = Args(compute=8 * POLICY * numbers["tokens"] / numbers["time/update"])
    if "logprob gap" in numbers:  # vLLM sampled
        rates.memory = bytes_read(numbers["tokens"]) / numbers["time/rollout"]
    return rates


def seconds_by_part(rates: Args) -> dict[str, float]:
    """Returns {part: seconds} of a step."""
    return {
        "weight sync": 4 * PARAMETERS * 7 / 8 / rates.link,
        "rollout": bytes_read(TOKENS) / rates.memory,
        "reward": 2 * REWARD_MODEL * TOKENS / rates.compute,
        "reference": 2 * POLICY * TOKENS / rates.compute,
        "update": 8 * POLICY * TOKENS / rates.compute,
        "checkpoint": 12 * PARAMETERS / rates.disk / 20,  # every 20 steps
    }


def main(args: Args) -> None:
    columns = {"data sheet": seconds_by_part(DATA_SHEET), "assumed": seconds_by_part(args)}
    for path in sorted(Path("results/gpu").glob("*.json")):
        step = json.loads(path.read_text())["steps"].get("step-8b-lora", {})
        if step.get("result") == "PASS":
            columns[f"rates of {path.stem}"] = seconds_by_part(measured(step["numbers"]))
    for seconds in columns.values():
        seconds["sum"] = sum(seconds.values())
    print("| part |", " | ".join(columns), "|")
    print("|---" * (1 + len(columns)) + "|")
    for part in columns["assumed"]:
        print(f"| {part} |", " | ".join(f"{seconds[part]:.1f}" for seconds in columns.values()), "|")


if __name__ == "__main__":
    main(tyro.cli(Args))
