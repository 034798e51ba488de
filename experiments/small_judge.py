"""The judge of experiments/small.sh: the gold reward model, on which nothing is trained.

GOLD=results/small/runs/reward-gold/model python eval_wildbench.py --judge experiments/small_judge.py:judge ...
"""

import os
from functools import cache

import runs
from rewards.preference import RewardModel

# checked when this file is loaded: the first answer is judged only after all of them are generated
if "GOLD" not in os.environ:
    runs.fail(
        "experiments/small_judge.py reads the folder of the gold reward model from the environment: GOLD=FOLDER"
    )
GOLD = os.environ["GOLD"]
runs.or_fail(RewardModel.check, GOLD)


@cache
def gold_model() -> RewardModel:
    return RewardModel(GOLD, reward_on="response", think_format="plain")


def judge(messages: list[dict], response: str) -> dict:
    """Returns the gold reward of a response; ValueError if there is none, so that it counts as no verdict."""
    if not response:
        raise ValueError("no response in good format")
    return {"score": gold_model().score([messages], [response])[0], "checks": {}}
