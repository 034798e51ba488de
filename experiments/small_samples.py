"""Writes what several models answered to small_prompts.jsonl into samples.md, and uncut into samples.jsonl.

python -m experiments.small_samples --results results/small

eval_wildbench.py has sampled one answer of each model to each prompt (experiments/small.sh, stage samples).
Nothing is picked: the page has all models and all prompts, in the order of their ids.
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlmt.data import read_log, write_jsonl
from utils import fail

SAMPLING = ("temperatures", "top_p", "seed", "max_tokens")  # flags of eval_wildbench.py that all models share


@dataclass
class Args:
    results: Path = Path("results/small")
    """Folder whose runs/ has the folders samples-NAME, and into which the files are written."""
    names: tuple[str, ...] = ("instruct", "sft-think", "sft-plain", "grpo-think-s0", "grpo-plain-s0")
    """The models, by the NAME of their folders, in the order of the page."""
    characters: int = 400
    """Characters that the page keeps of each text."""


def read_samples(folder: Path, names: tuple[str, ...]) -> tuple[list[dict], dict]:
    """Reads the answers of all models, prompt by prompt, and how they were sampled.

    Exits with 2 if a model has not answered yet, or if models were sampled in different ways.
    """
    by_model = {}
    samplings = {}
    for name in names:
        run = folder / f"samples-{name}"
        if not (run / "summary.json").exists():
            fail(f"{run} is not finished; STAGES=samples bash experiments/small.sh writes it")
        rows = read_log(run / "generations.jsonl")  # in the order in which they were finished
        by_model[name] = sorted(rows, key=lambda row: row["id"])
        used = json.loads((run / "config.json").read_text())["args"]
        samplings[name] = {flag: used[flag] for flag in SAMPLING}

    sampling = samplings[names[0]]
    prompts = [row["id"] for row in by_model[names[0]]]
    for name in names:
        if samplings[name] != sampling or [row["id"] for row in by_model[name]] != prompts:
            fail(f"samples-{name} has other prompts or other sampling than samples-{names[0]}")

    samples = []
    for number in range(len(prompts)):
        for name in names:
            samples.append({"model": name, **by_model[name][number]})
    return samples, sampling


def quote(text: str, characters: int) -> str:
    """Cuts a text and indents it, so that Markdown shows it as it is."""
    if len(text) > characters:
        text = f"{text[:characters]} [...]"
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, 100) or [""]
    return textwrap.indent("\n".join(lines), "    ", lambda line: True)


def texts_to_show(sample: dict) -> list[tuple[str, str]]:
    """Returns (what it is, text) for thinking and response, or for the unsplit text of an answer in bad format."""
    if sample["status"] != "ok":
        return [(f", {sample['status']}", sample["text"])]
    if sample["thinking"]:
        return [(", thinking", sample["thinking"]), (", response", sample["response"])]
    return [("", sample["response"])]


def markdown(samples: list[dict], sampling: dict, args: Args) -> str:
    """Writes the page for people."""
    settings = ", ".join(f"{flag} {value}" for flag, value in sampling.items())
    parts = [
        f"One answer of each of these models to each prompt of experiments/small_prompts.jsonl: {', '.join(args.names)}. "
        f"Sampling: {settings}. Nothing is picked. Each text is cut after {args.characters} characters; "
        "samples.jsonl has all of it."
    ]
    prompt = ""
    for sample in samples:
        if sample["id"] != prompt:
            prompt = sample["id"]
            parts.append(f"### {prompt}\n\n{sample['messages'][-1]['content']}")
        for what, text in texts_to_show(sample):
            parts.append(f"**{sample['model']}**{what}\n\n{quote(text, args.characters)}")
    return "\n\n".join(parts) + "\n"


def main(args: Args) -> None:
    samples, sampling = read_samples(args.results / "runs", args.names)
    write_jsonl(args.results / "samples.jsonl", samples)
    (args.results / "samples.md").write_text(markdown(samples, sampling, args))
    print(f"{len(samples)} answers are in {args.results / 'samples.md'}, uncut in samples.jsonl")


if __name__ == "__main__":
    main(tyro.cli(Args))
