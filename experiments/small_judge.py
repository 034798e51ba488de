"""Judges the answers of experiments/small.sh by the gold reward model, on which nothing is trained.

GOLD=results/small/runs/reward-gold/model DTYPE=auto python eval_wildbench.py \\
        --judge experiments/small_judge.py:judge ...
"""

import os
from functools import cache

from utils import fail, or_fail
from rlmt.reward_model import RewardModel

# checked when this file is loaded, as the first answer is judged only after all of them are generated
GOLD = os.environ.get("GOLD", "")
if not GOLD:
    fail("experiments/small_judge.py reads the gold reward model's folder from the environment: GOLD=FOLDER")
or_fail(RewardModel.check, GOLD, "", "response", "plain")


@cache
def gold_model() -> RewardModel:
    """Loads the gold reward model once, when the first answer is judged."""
    return RewardModel(GOLD, "response", "plain", dtype=os.environ.get("DTYPE", "auto"))


def judge(messages: list[dict], response: str) -> dict:
    """Returns the gold reward of a response; ValueError if there is none, so that it counts as no verdict."""
    if not response:
        raise ValueError("no response in good format")
    return {"score": gold_model().score([messages], [response])[0], "checks": {}}
