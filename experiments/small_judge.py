"""The judge of experiments/small.sh: the gold reward model, on which nothing is trained.

GOLD=results/small/runs/reward-gold/model python eval_wildbench.py --judge experiments/small_judge.py:judge ...
"""

import os
from functools import cache

from rewards.preference import RewardModel


@cache
def gold_model() -> RewardModel:
    """Loads the reward model whose folder the environment variable GOLD names."""
    return RewardModel(os.environ["GOLD"], reward_on="response", think_format="plain")


def judge(messages: list[dict], response: str) -> dict:
    """Returns the gold reward of a response; ValueError if there is none, so that it counts as no verdict."""
    if not response:
        raise ValueError("no response in good format")
    return {"score": gold_model().score([messages], [response])[0], "checks": {}}
