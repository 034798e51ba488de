"""Scores the tested model's answers by a reward model (--reward-model), and finds the best of several
answers."""

import gc
import json
import math
import sys

import torch

from utils import join_thinking, or_fail
from benchmarks import shared
from benchmarks.foreign import FOREIGN_STYLES
from rlmt.run import digests_of
from rewards.preference import RewardModel


def check(args) -> None:
    """Exits with 2 if --reward-model cannot score the model's answers; does nothing without one."""
    if args.reward_model:
        or_fail(RewardModel.check, args.reward_model, "", args.reward_on, scored_format(args))


def fingerprint(args) -> str:
    """Hashes what two comparable rewards share: the reward model and what it reads."""
    state = [args.reward_model, args.reward_on, digests_of(args.reward_model)]
    return shared.short_hash(json.dumps(state))


def scored_format(args) -> str:
    """Returns the think format in which the reward model reads the answers: `think` for those of a foreign
    style."""
    think_format = shared.think_format(args)
    if think_format in FOREIGN_STYLES:
        return "think"
    return think_format


def scored_text(args, row: dict) -> str:
    """Returns the completion of a generation row in the format that `scored_format` names."""
    if shared.think_format(args) not in FOREIGN_STYLES:
        return row["text"]
    if not row["thinking"]:
        return row["response"]
    return join_thinking(row["thinking"], row["response"], "think")


def add_rewards(args, rows: list[dict]) -> None:
    """Adds the reward model's `reward` to the generation rows in good format."""
    good = [row for row in rows if row["status"] == "ok"]
    model = RewardModel(args.reward_model, args.reward_on, scored_format(args), dtype=args.dtype)
    rewards = model.score([row["messages"] for row in good], [scored_text(args, row) for row in good])
    for row, reward in zip(good, rewards):
        row["reward"] = reward
    if any(model.cut):
        print(
            f"WARNING: {args.reward_model} read {sum(model.cut)} of {len(good)} conversations without their end, as they "
            "are longer than its context; --max-tokens keeps answers short",
            file=sys.stderr,
        )
    del model
    gc.collect()
    torch.cuda.empty_cache()  # a local judge may need the memory


def best_answers(rows: list[dict]) -> list[dict]:
    """Returns each task's row with the highest reward, the first of equals. A row without one loses to the
    others."""
    best = {}  # by the task's position in the data
    for row in rows:
        position = row["task"]["position"]
        best.setdefault(position, row)
        if row.get("reward", -math.inf) > best[position].get("reward", -math.inf):
            best[position] = row
    return list(best.values())
