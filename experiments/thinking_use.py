"""Measures whether a model uses its thinking: how much likelier its response is after it than after another.

    python -m experiments.thinking_use results/study/*--gold

Reads finished evaluations by eval_wildbench.py of models that a run of ours has trained. For each folder NAME--gold it
writes NAME--use (summary.json, task_means.csv), and lines in runs.csv beside it. A model whose response follows from
the prompt alone loses nothing when the thinking is swapped (0 nats).
"""

import json
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
import tyro
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rlmt.chat import encode_prompt, load_tokenizer, read_trained_as
from rlmt.data import read_log, write_file
from rlmt.learner import Policy, collate_ids, micro_batches
from rlmt.model import load_weights
from rlmt.sampler import Completion
from utils import DEVICE, THINK_FORMATS, compute_dtype, fail, join_thinking, or_fail
from benchmarks.scoring import add_to_index, mean, task_means
from benchmarks.shipped import use_as_shipped

METRICS = ("thinking_use", "thinking_use_same_task", "thinking_use_empty")
TOKENS_AT_ONCE = 8192


@dataclass
class Args:
    evaluations: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of finished evaluations by a program."""


def measure(model: str, dtype: str, rows: list[dict], tasks: list[str]) -> dict:
    """Returns how many nats per response token are lost when a thinking is swapped, means over tasks.

    `thinking_use`: for the thinking of the next other task; `thinking_use_same_task`: of another completion of
    the same task; `thinking_use_empty`: for none. None where nothing can be swapped. Only completions in good
    format with thinking count. Greedy ones, too, are read at temperature 1. Exits with 2 if the model's folder
    does not say its think format.

    Args:
        rows: generations, those of a task next to each other.
        tasks: the id of the task of each.
    """
    think_format = read_trained_as(model).get("think_format")
    if think_format not in THINK_FORMATS:
        fail(f"{model} must be a folder whose think format is one of {[*THINK_FORMATS]}")
    empty = join_thinking("", "", think_format)
    thought = []
    for task, row in zip(tasks, rows):
        if row["status"] == "ok" and row["thinking"]:
            thought.append((task, row))
    swaps = []  # (metric, task, row, the text whose thinking it gets)
    for number, (task, row) in enumerate(thought):
        following = thought[number + 1 :] + thought[:number]
        other_task = next((other["text"] for name, other in following if name != task), None)
        same_task = next((other["text"] for name, other in following if name == task), None)
        for metric, text in zip(("own", *METRICS), (row["text"], other_task, same_task, empty)):
            if text is not None:
                swaps.append((metric, task, row, text))

    # all at once, since the model is loaded for it
    nats = response_nats(model, dtype, think_format, [swap[2:] for swap in swaps])
    own = {}
    lost = {metric: [] for metric in METRICS}
    tasks_of = {metric: [] for metric in METRICS}
    for (metric, task, row, _), value in zip(swaps, nats):
        if metric == "own":
            own[row["id"]] = value
        else:
            lost[metric].append(own[row["id"]] - value)
            tasks_of[metric].append(task)
    numbers = {"task_means": {}}
    for metric in METRICS:
        numbers["task_means"][metric] = task_means(lost[metric], tasks_of[metric])
        numbers[metric] = mean(numbers["task_means"][metric].values())
    return numbers


@torch.no_grad()
def response_nats(model: str, dtype: str, think_format: str, pairs: list[tuple[dict, str]]) -> list[float]:
    """Returns the mean log-probability per token of each row's response after the thinking of the text."""
    if not pairs:
        return []
    tokenizer = load_tokenizer(model)
    or_fail(use_as_shipped, tokenizer, think_format, "auto", {})
    tag = THINK_FORMATS[think_format].opens_response
    completions = []
    for row, text in pairs:
        response = row["text"].partition(tag)[2]
        thinking = "".join(text.partition(tag)[:2]).removeprefix(tokenizer.opening)  # the prompt ends with it
        start, ids = tokenizer([thinking, response], add_special_tokens=False)["input_ids"]
        prompt_ids = encode_prompt(tokenizer, row["messages"]) + start
        completions.append(Completion(row["id"], row["messages"], prompt_ids, ids))

    weights, _ = load_weights(AutoModelForCausalLM, model, dtype=compute_dtype(dtype))
    policy = Policy(weights, temperature=1.0).eval().to(DEVICE)
    for batch in tqdm(micro_batches(completions, TOKENS_AT_ONCE), desc="thinking use"):
        prompts = [completion.prompt_ids for completion in batch]
        inputs = collate_ids(prompts, [completion.ids for completion in batch], DEVICE)
        (logprobs,) = policy(**inputs, extra="none")
        for completion, row in zip(batch, logprobs.tolist()):
            completion.reference_logprobs = row[: len(completion.ids)]
    return [mean(completion.reference_logprobs) for completion in completions]


def main(args: Args) -> None:
    for run in args.evaluations:
        out = run.with_name(f"{run.name.removesuffix('--gold')}--use")
        if not (run / "summary.json").exists():
            fail(f"{run}: no finished evaluation; run eval_wildbench.py with --resume first")
        if (out / "summary.json").exists():
            continue
        config = json.loads((run / "config.json").read_text())
        evaluation = config["args"]
        fingerprint = json.loads((run / "summary.json").read_text())["fingerprint"]
        results = {}
        lines = []
        rows = read_log(run / "generations.jsonl")
        for temperature, answers in groupby(rows, itemgetter("temperature")):
            answers = list(answers)
            tasks = [row["id"] for row in answers]
            if evaluation["samples"] > 1 and temperature > 0:
                tasks = [name.rpartition("-")[0] for name in tasks]  # task 3 has the answers 3-0, 3-1, ...
            numbers = measure(evaluation["model"], evaluation["dtype"], answers, tasks)
            means = numbers.pop("task_means")
            results[temperature] = numbers
            line = {"model": evaluation["model"], "benchmark": Path(evaluation["tasks"]).stem}
            line |= {"temperature": temperature, "n": len(answers), "fingerprint": fingerprint}
            for metric, value in numbers.items():
                lines.append(line | {"metric": metric, "value": value, "task_means": means[metric]})
        out.mkdir(exist_ok=True)
        write_file(out / "config.json", json.dumps(config))  # as it tells how the answers were sampled
        add_to_index(out, lines)
        write_file(out / "summary.json", json.dumps({"model": evaluation["model"], "temperatures": results}))


if __name__ == "__main__":
    main(tyro.cli(Args))
