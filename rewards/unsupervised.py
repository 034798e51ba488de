"""Rewards from a policy's agreement with itself or its confidence, and `Collapse`, which ends a run that
exploits them."""

import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import torch

from rlmt.data import read_log
from rlmt.learner import Learner
from rlmt.verdicts import normalise_math
from rewards import Values, in_groups
from rewards.verified import final_answer

# --- 1. agreement and confidence


def _comparable_answer(response: str) -> str | None:
    """Returns the final answer of a response in MATH's spelling; None without one."""
    answer = final_answer(response)
    if answer is None:
        return None
    return normalise_math(re.sub(r"\\?%", "", answer)) or None


def _count_votes(answers: list[str | None]) -> Counter:
    """Counts the answers of a group, in the order in which they first appear.

    Rows without an answer have no vote.
    """
    votes = Counter(answers)
    del votes[None]
    return votes


def majority(rows: list[dict], group_size: int) -> Values:
    """Returns 1 where the answer is the one that most of the group give, else 0 (TTRL, 2504.16084).

    A tie goes to the answer that appears first in the group. A row without an answer gets 0, and so does one
    that gets a floor, which has no vote. A group in which nobody votes has no values.
    """
    values = []
    for group in in_groups(rows, group_size):
        answers = []
        for row in group:
            answers.append(None if row.get("gets_floor") else _comparable_answer(row["response"]))
        votes = _count_votes(answers)
        if votes:
            winner, _ = votes.most_common(1)[0]  # the first of equals
            values += [float(answer == winner) for answer in answers]
        else:
            values += [None] * group_size
    return values


def self_certainty(rows: list[dict]) -> Values:
    """Returns the mean over tokens of KL(uniform || policy), in nats (INTUITOR, 2505.19590, equation 2).

    The trainer logs it as `mean_kl_uniform`: -1/(|o| |V|) sum_t sum_j log(|V| p_tj) under the current policy.
    A frozen model in the policy's place gets exploited.
    """
    return [row["mean_kl_uniform"] for row in rows]


def negative_entropy(rows: list[dict]) -> Values:
    """Returns minus the trainer's `mean_entropy` (RENT, 2505.22660): mean_t sum_j p_tj log p_tj in nats,
    -log|V| to 0."""
    return [-row["mean_entropy"] for row in rows]


# --- 2. collapse

# a run ends when the last so many steps are all beyond a limit, and nothing is left to tell apart
COLLAPSE_STEPS = 10
HIGHEST_AGREEMENT = 0.99
LOWEST_ENTROPY = 0.02  # nats per token


class Collapse:
    """Follows how far the policy has collapsed, over the steps of a run, and ends the run.

    Logs collapse/agreement: the share of a group that gives its most frequent answer, mean over groups. It is
    left out in PPO, which has one completion of each prompt.
    """

    def __init__(self, run: Path, group_size: int):
        self.group_size = group_size
        # of the steps before a resume; the last one may be asked about again
        self.history = {line["step"]: line for line in read_log(run / "metrics.jsonl")}

    def indicators(self, completions: list) -> dict[str, float]:
        """Returns the metrics of a step."""
        if self.group_size == 1:
            return {}
        answers = [_comparable_answer(completion.response) for completion in completions]
        votes = [_count_votes(group) for group in in_groups(answers, self.group_size)]
        most = [max(vote.values(), default=0) / self.group_size for vote in votes]
        return {"collapse/agreement": fmean(most)}

    def check(self, step: int, metrics: dict, completions: list) -> str:
        """Returns why the run should end after this step, or ""."""
        self.history[step] = metrics
        last = [*self.history.values()][-COLLAPSE_STEPS:]
        if len(last) < COLLAPSE_STEPS:
            return ""
        if all(line.get("collapse/agreement", 0) >= HIGHEST_AGREEMENT for line in last):
            return f"collapsed: agreement of {HIGHEST_AGREEMENT} or more in {COLLAPSE_STEPS} steps"
        if all(line["entropy"] <= LOWEST_ENTROPY for line in last):
            return f"collapsed: entropy of {LOWEST_ENTROPY} nats or less in {COLLAPSE_STEPS} steps"
        return ""


# --- 3. what the rewards of confidence read


@torch.no_grad()
def set_entropy_statistics(policy: Learner, completions: list) -> None:
    """Stores mean entropy and mean KL(uniform || policy) over the tokens of each completion, in nats.

    The rewards self_certainty and negative_entropy read them.
    """
    for micro_batch in policy.micro_batches(completions):
        _, entropies, kl_uniform = policy.logprobs(policy.collate(micro_batch), extra="kl_uniform")
        for completion, entropy, kl in zip(micro_batch, entropies, kl_uniform, strict=True):
            n_tokens = len(completion.ids)
            completion.statistics = {
                "mean_entropy": entropy.sum().item() / n_tokens,
                "mean_kl_uniform": kl.sum().item() / n_tokens,
            }
