"""Computes the seconds of a GRPO step of Llama-3.1-8B on eight GPUs of 80 GB, part by part, from rates of one GPU.

    python -m dev.step_time                    # also a column for each results/gpu/<card>.json of `make gpu-check`
    python -m dev.step_time --compute 450e12   # with a rate of your own

Nothing here was measured on eight GPUs. docs/gpu.md has the table, and says what the formulas leave out.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

PARAMETERS = 8_030_261_248
# weights that a token is multiplied with: all but the table of embeddings
POLICY_WEIGHTS = 7_504_924_672
REWARD_WEIGHTS = 6_979_592_192  # with one output in place of the LM head
CACHE_BYTES = 2 * 32 * 8 * 128 * 2  # keys and values of a token: 32 layers, 8 heads of 128 numbers, bfloat16

# on each GPU
COMPLETIONS = 64  # 512 on all
TOKENS = COMPLETIONS * (200 + 1500)  # prompts have 200 on average, completions 1,500
# tokens of the longest completion: the limit of table 7, which one of them nearly always reaches
LONGEST = 4096
# mean of the squared lengths / square of the mean length, of prompt and completion together: 1.37 where completions are
# lognormal with sigma 0.75, 1.20 with 0.5 and 1.51 with 1, cut at 4,096 tokens (20,000 draws)
UNEVENNESS = 1.37


@dataclass
class Args:
    """Holds what one GPU does in a second. The defaults are assumptions."""

    compute: float = 0.4 * 700e12 * 8 / 6
    """Operations. The update reaches 40 % of a matrix product's 700e12 with 6 a weight; it does 8, as it recomputes."""
    memory: float = 0.8 * 3.35e12
    """Bytes that vLLM reads from the GPU's memory."""
    link: float = 300e9
    """Bytes received from the other GPUs."""
    disk: float = 2e9
    """Bytes written to a disk, by all processes together."""


DATA_SHEET = Args(compute=989e12, memory=3.35e12, link=450e9)  # of an H100 SXM


def bytes_read(n_tokens: float, longest: float) -> float:
    """Returns the bytes that sampling reads, for `n_tokens` in the prompts and completions together.

    Each of the `longest` completion's tokens reads all weights. Every token reads the keys and values before it,
    of which a long completion has more.
    """
    n_before = UNEVENNESS * n_tokens / COMPLETIONS / 2  # on average
    return longest * 2 * POLICY_WEIGHTS + n_tokens * n_before * CACHE_BYTES


def rates_of_card(numbers: dict[str, float]) -> tuple[Args, set[str]]:
    """Returns rates from the numbers of `step-8b-lora` of dev/gpu_check.py, and the parts whose rate stays assumed."""
    # a weight and token: reference 2, forward 2, again 2, backward 2, as frozen weights have no gradient
    rates = Args(compute=8 * POLICY_WEIGHTS * numbers["tokens"] / numbers["time/update"])
    assumed = {"weight sync", "checkpoint"}  # one card shows neither
    if "logprob gap" in numbers:  # vLLM sampled
        n_bytes = bytes_read(numbers["tokens"], numbers["longest completion"])
        rates.memory = n_bytes / numbers["time/rollout"]
    else:
        assumed.add("rollout")
    return rates, assumed


def seconds_by_part(rates: Args) -> dict[str, float]:
    """Returns {part: seconds} of a step."""
    return {
        "weight sync": 4 * PARAMETERS * 7 / 8 / rates.link,  # float32; each GPU has an eighth
        "rollout": bytes_read(TOKENS, LONGEST) / rates.memory,
        "reward": 2 * REWARD_WEIGHTS * TOKENS / rates.compute,
        "reference": 2 * POLICY_WEIGHTS * TOKENS / rates.compute,
        "update": 8 * POLICY_WEIGHTS * TOKENS / rates.compute,  # forward 2, again 2, backward 4
        "checkpoint": 12 * PARAMETERS / rates.disk / 20,  # weights and two moments, every 20 steps
    }


def column(rates: Args, assumed: set[str]) -> dict[str, str]:
    """Returns {part: seconds}, their sum last; * marks the parts in `assumed`."""
    seconds = seconds_by_part(rates)
    cells = {part: f"{value:.1f}{'*' if part in assumed else ''}" for part, value in seconds.items()}
    return cells | {"sum": f"{sum(seconds.values()):.1f}"}


def main(args: Args) -> None:
    columns = {"data sheet": column(DATA_SHEET, set()), "assumed": column(args, set())}
    for path in sorted(Path("results/gpu").glob("*.json")):
        step = json.loads(path.read_text())["steps"].get("step-8b-lora", {})
        if step.get("result") == "PASS":
            columns[f"rates of {path.stem} (*: assumed)"] = column(*rates_of_card(step["numbers"]))
    print("| part |", " | ".join(columns), "|")
    print("|---" * (1 + len(columns)) + "|")
    for part in columns["assumed"]:
        print(f"| {part} |", " | ".join(cells[part] for cells in columns.values()), "|")


if __name__ == "__main__":
    main(tyro.cli(Args))
