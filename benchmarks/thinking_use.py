"""Measures whether a model uses its thinking: how much likelier its response is after it than after another.

A model whose response follows from the prompt alone loses nothing when the thinking is swapped (0 nats).
"""

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rlmt.learner import Policy, collate_ids, micro_batches
from rlmt.model import load_weights
from rlmt.sampler import Completion
from utils import DEVICE, THINK_FORMATS, compute_dtype, fail, join_thinking
from benchmarks.scoring import mean, task_means
from benchmarks.tested_model import TestedModel, encode

METRICS = ("thinking_use", "thinking_use_same_task", "thinking_use_empty")
TOKENS_AT_ONCE = 8192


def check(model: TestedModel) -> None:
    """Exits with 2 if the model does not run here, or marks its thinking in a way of others."""
    if model.is_chat or model.think_format not in THINK_FORMATS:
        fail(f"--thinking-use: {model.name} must be a folder whose think format is one of {[*THINK_FORMATS]}")


def measure(model: TestedModel, rows: list[dict], tasks: list[str]) -> dict:
    """Returns how many nats per response token are lost when a thinking is swapped, means over tasks.

    `thinking_use`: for that of the next other task; `thinking_use_same_task`: for that of another completion of
    the same task; `thinking_use_empty`: for none. None where nothing can be swapped. Only completions in good
    format with thinking count. Greedy ones, too, are read at temperature 1.

    Args:
        rows: generations, those of a task next to each other.
        tasks: the id of the task of each.
    """
    think_format = model.think_format
    empty = join_thinking("", "", think_format)
    thought = []
    for task, row in zip(tasks, rows):
        if row["status"] == "ok" and row["thinking"]:
            thought.append((task, row))
    swaps = []  # (metric, task, row, the text whose thinking it gets)
    for index, (task, row) in enumerate(thought):
        following = thought[index + 1 :] + thought[:index]
        other_task = next((other["text"] for name, other in following if name != task), None)
        same_task = next((other["text"] for name, other in following if name == task), None)
        for metric, text in zip(("own", *METRICS), (row["text"], other_task, same_task, empty)):
            if text is not None:
                swaps.append((metric, task, row, text))

    # all at once, since the model is loaded for it
    nats = response_nats(model, THINK_FORMATS[think_format].opens_response, [swap[2:] for swap in swaps])
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
def response_nats(tested: TestedModel, tag: str, pairs: list[tuple[dict, str]]) -> list[float]:
    """Returns the mean log-probability per token of each row's response after the thinking of the text."""
    if not pairs:
        return []
    tokenizer = tested.tokenizer
    completions = []
    for row, text in pairs:
        response = row["text"].partition(tag)[2]
        thinking = "".join(text.partition(tag)[:2]).removeprefix(tokenizer.opening)  # the prompt ends with it
        start, ids = tokenizer([thinking, response], add_special_tokens=False)["input_ids"]
        prompt_ids = encode(tokenizer, row["messages"]) + start
        completions.append(Completion(row["id"], row["messages"], prompt_ids, ids))

    model, _ = load_weights(AutoModelForCausalLM, tested.name, dtype=compute_dtype(tested.args.dtype))
    policy = Policy(model, temperature=1.0).eval().to(DEVICE)
    for members in tqdm(micro_batches(completions, TOKENS_AT_ONCE), desc="thinking use"):
        prompts = [member.prompt_ids for member in members]
        batch = collate_ids(prompts, [member.ids for member in members], DEVICE)
        (logprobs,) = policy(**batch, extra="none")
        for member, row in zip(members, logprobs.tolist()):
            member.reference_logprobs = row[: len(member.ids)]
    return [mean(completion.reference_logprobs) for completion in completions]
