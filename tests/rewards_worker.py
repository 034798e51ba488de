"""Scores stored completions and gives them dense rewards; returns what came out, of all processes.

tests/test_scorer.py calls it in one process, and starts it on two with DDP: they must agree.
"""

import json
import re
import sys
from pathlib import Path

import runs  # isort: skip
from accelerate import Accelerator
from accelerate.utils import gather_object

import checkpoint
import policy
import rollout
import train_grpo
import utils
from data.toy import world
from rewards import dense
from rewards.scorer import Scorer

GROUP_SIZE = 3
SHARES = {1: [slice(0, 12)], 2: [slice(0, 9), slice(9, 12)]}  # completions of each process: three groups and one


def short(rows: list[dict]) -> list[float | None]:
    """A reward of a user's: None where the response has no word."""
    values = []
    for row in rows:
        n_words = len(row["response"].split())
        values.append(-0.01 * n_words if n_words else None)
    return values


def share_of_short_words(messages: list[dict], text: str) -> list[tuple[int, float]]:
    """Judges steps: every third word ends one, whose probability is the share of short words so far."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    words = text.split()
    found = []
    for n in range(2, len(words), 3):
        n_short = sum(len(word) < 5 for word in words[: n + 1])
        found.append((ends[n], n_short / (n + 1)))
    return found


def stored_completions(tokenizer) -> list[rollout.Completion]:
    """Makes three completions of each of four toy prompts: a good one, a shorter one, and one that is cut off."""
    completions = []
    for prompt_id, order, question, rng in world.orders_of("rl", 4, 0):
        messages = [{"role": "user", "content": question}]
        prompt = {"id": prompt_id, "prompt": messages}
        prompt["prompt_ids"] = utils.encode_prompt(tokenizer, messages)
        thinking, response = world.write_answer(order, world.random_slips(rng), rng)
        good = utils.join_thinking(thinking, response, "think")
        shorter = utils.join_thinking(thinking, response.partition(".")[0], "think")
        for text, finished in [(good, True), (shorter, True), (good[: len(good) // 3], False)]:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if finished:
                ids.append(tokenizer.eos_token_id)
            sample = rollout.Sample(ids, None, finished)
            completion = rollout.read_completion(tokenizer, "think", prompt, sample)
            completion.advantages = [0.0] * len(ids)
            completions.append(completion)
    return completions


def score_and_densify(prompts: Path, accelerator: Accelerator) -> dict:
    args = train_grpo.Args(
        model="data/toy/base",
        prompts=str(prompts),
        reward_model="data/toy/reward_model",
        rewards=("preference:0.5", f"{__file__}:short:1", "process:0.5", "prime:1"),
        reward_args=(
            f"process.model={__file__}:share_of_short_words",
            "prime.beta=0.5",
            "prime.learning_rate=0.001",
        ),
        gold="data/toy/world.py:gold",
        micro_batch_tokens=300,
        gradient_checkpointing=False,
    )
    tokenizer = utils.load_policy_tokenizer(args)
    reference = policy.load_reference(args.model, args.temperature, accelerator)
    scorer = Scorer(args, tokenizer, prompts.parent, accelerator)
    dense_rewards = dense.load(args, None, reference, tokenizer, accelerator)

    completions = stored_completions(tokenizer)
    completions = completions[SHARES[accelerator.num_processes][accelerator.process_index]]
    for completion in completions:
        scorer.start(completion)
    scorer.score(completions, GROUP_SIZE, None)
    losses = []
    for _ in range(2):
        for source in dense_rewards:
            for completion in completions:
                completion.correct = float("3" in completion.response)
            dense.add_advantages(source, completions, GROUP_SIZE, scale=True)
        losses.append(dense_rewards[1].metrics)
    rows = gather_object([completion.row() for completion in completions])
    weights = policy.whole_weights(dense_rewards[1].learner.model)
    norms = {name: weight.double().norm().item() for name, weight in weights}
    return {"rows": rows, "losses": losses, "prime": norms}


if __name__ == "__main__":
    accelerator = policy.start_accelerator()
    found = score_and_densify(Path(sys.argv[1]), accelerator)
    accelerator.print(json.dumps(found))
    checkpoint.leave()
