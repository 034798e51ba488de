"""Scores the tested model's answers by a reward model (--reward-model), and finds the best of several
answers."""

import gc
import json
import math
import sys

import torch

from benchmarks.shared import short_hash
from benchmarks.tested_model import TestedModel
from rlmt.foreign import FOREIGN_STYLES
from rlmt.reward_model import RewardModel
from rlmt.run import inputs_of
from utils import join_thinking, or_fail


class Proxy:
    """The reward model of --reward-model, if there is one, which scores the answers of a tested model.

    `args`: any AnswerFlags.
    """

    def __init__(self, args, tested: TestedModel):
        self.tested = tested
        self.path = args.reward_model
        self.reward_on = args.reward_on
        self.dtype = args.dtype

    @property
    def think_format(self) -> str:
        """Returns the think format in which the reward model reads the answers: `think` for those of a
        foreign style."""
        if self.tested.think_format in FOREIGN_STYLES:
            return "think"
        return self.tested.think_format

    def check(self) -> None:
        """Exits with 2 if the reward model cannot score the model's answers; does nothing without one."""
        if self.path:
            or_fail(RewardModel.check, self.path, "", self.reward_on, self.think_format)

    def fingerprint(self) -> str:
        """Hashes what two comparable rewards share: the reward model and what it reads."""
        return short_hash(json.dumps([self.path, self.reward_on, [*inputs_of(self.path).values()]]))

    def add_rewards(self, rows: list[dict]) -> None:
        """Adds the reward model's `reward` to the generation rows in good format."""
        good = [row for row in rows if row["status"] == "ok"]
        model = RewardModel(self.path, self.reward_on, self.think_format, dtype=self.dtype)
        rewards = model.score([row["messages"] for row in good], list(map(self._text_to_score, good)))
        for row, reward in zip(good, rewards):
            row["reward"] = reward
        if any(model.cut):
            print(
                f"WARNING: {self.path} read {sum(model.cut)} of {len(good)} conversations without their "
                "end, as they "
                "are longer than its context; --max-tokens keeps answers short",
                file=sys.stderr,
            )
        del model
        gc.collect()
        torch.cuda.empty_cache()  # a local judge may need the memory

    def _text_to_score(self, row: dict) -> str:
        """Returns the completion of a generation row in the format that the reward model reads."""
        if self.tested.think_format not in FOREIGN_STYLES:
            return row["text"]
        if not row["thinking"]:
            return row["response"]
        return join_thinking(row["thinking"], row["response"], "think")


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
