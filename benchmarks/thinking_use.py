"""Measures whether a model uses its thinking: how much likelier its response is after it than after another's.

A model whose response follows from the prompt alone loses nothing when the thinking is swapped (0 nats).
"""

import torch
from transformers import AutoModelForCausalLM

from rlmt.chat import encode_prompt
from rlmt.model import Policy, collate_ids, load_weights, micro_batches
from rlmt.sampler import Completion
from utils import DEVICE, THINK_FORMATS, compute_dtype, fail
from benchmarks import shared
from benchmarks.scoring import mean, task_means

TOKENS_AT_ONCE = 8192


def check(args) -> None:
    """Exits with 2 if the model does not run here, or marks its thinking in a way of others."""
    if shared.is_chat(args) or shared.think_format(args) not in THINK_FORMATS:
        fail(f"--thinking-use: {args.model} must be a folder whose think format is one of {[*THINK_FORMATS]}")


def measure(args, rows: list[dict], tasks: list[str]) -> dict:
    """Returns how many nats per response token are lost when a thinking is swapped, means over tasks.

    `thinking_use`: for that of the next other task; `thinking_use_same_task`: for that of another completion of
    the same task. None where nothing can be swapped. Only completions in good format with thinking count.

    Args:
        rows: generations, those of a task next to each other.
        tasks: the id of the task of each.
    """
    tag = THINK_FORMATS[shared.think_format(args)].opens_response
    thought = [(task, row) for task, row in zip(tasks, rows) if row["status"] == "ok" and row["thinking"]]
    swaps = []  # (what is measured, task, row, row whose thinking it gets)
    for place, (task, row) in enumerate(thought):
        following = range(place - len(thought) + 1, place)  # from the next one on, round the end of the list
        other_task = next((thought[other][1] for other in following if thought[other][0] != task), None)
        same_task = next((thought[other][1] for other in following if thought[other][0] == task), None)
        swaps.append(("own", task, row, row))
        if other_task:
            swaps.append(("thinking_use", task, row, other_task))
        if same_task:
            swaps.append(("thinking_use_same_task", task, row, same_task))

    # all at once, since the model is loaded for it
    nats = response_nats(args, tag, [(row, other) for _, _, row, other in swaps])
    own = {}
    lost = {"thinking_use": [], "thinking_use_same_task": []}
    tasks_of = {name: [] for name in lost}
    for (name, task, row, _), value in zip(swaps, nats):
        if name == "own":
            own[row["id"]] = value
        else:
            lost[name].append(own[row["id"]] - value)
            tasks_of[name].append(task)
    numbers = {"task_means": {}}
    for name in lost:
        numbers["task_means"][name] = task_means(lost[name], tasks_of[name])
        numbers[name] = mean(numbers["task_means"][name].values())
    return numbers


@torch.no_grad()
def response_nats(args, tag: str, pairs: list[tuple[dict, dict]]) -> list[float]:
    """Returns the mean log-probability per token of each first row's response after the second's thinking."""
    if not pairs:
        return []
    tokenizer = shared.load_model_tokenizer(args)
    completions = []
    for row, other in pairs:
        response = row["text"].partition(tag)[2]
        thinking = "".join(other["text"].partition(tag)[:2])
        start, ids = tokenizer([thinking, response], add_special_tokens=False)["input_ids"]
        prompt_ids = encode_prompt(tokenizer, row["messages"]) + start
        completions.append(Completion(row["id"], row["messages"], prompt_ids, ids))

    model, _ = load_weights(AutoModelForCausalLM, args.model, dtype=compute_dtype(args.dtype))
    policy = Policy(model, temperature=1.0).eval().to(DEVICE)
    for members in micro_batches(completions, TOKENS_AT_ONCE):
        prompts = [member.prompt_ids for member in members]
        batch = collate_ids(prompts, [member.ids for member in members], tokenizer.pad_token_id, DEVICE)
        (logprobs,) = policy(**batch, extra="none")
        for member, row in zip(members, logprobs.tolist()):
            member.reference_logprobs = row[: len(member.ids)]
    return [mean(completion.reference_logprobs) for completion in completions]
