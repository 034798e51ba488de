"""Rewards that need neither a verifier nor a judge, and the indicators that show when a policy exploits them.

From agreement or confidence: majority, self_certainty, negative_entropy. From the form of a completion:
good_format, length, repetition. `collapse_indicators` describes a step, and `collapsed` is the rule that ends
a run by them.
"""

import re
import statistics
from collections import Counter
from pathlib import Path

from rlmt.data import read_log
from rewards.shared import Values, in_groups
from rewards.verified import final_answer, spell

# --- 1. agreement and confidence


def _comparable_answer(row: dict) -> str | None:
    """Returns the final answer of a response in MATH's spelling, without thousands separators; None without one."""
    answer = final_answer(row["response"])
    if answer is None:
        return None
    try:
        spelled = spell(answer)
    except ValueError:  # more than one unit
        return answer
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", spelled) or None


def _count_votes(answers: list[str | None]) -> Counter:
    """Counts the answers of a group, in the order in which they first appear.

    Rows without an answer have no vote.
    """
    votes = Counter(answers)
    del votes[None]
    return votes


def majority(rows: list[dict], group_size: int) -> Values:
    """Returns 1 where the answer is the one that most of the group give, else 0 (TTRL, 2504.16084).

    A tie goes to the answer that appears first in the group. A row without an answer gets 0, and so does one that
    gets a floor, which has no vote. A group in which nobody votes has no values.
    """
    values = []
    for group in in_groups(rows, group_size):
        answers = []
        for row in group:
            answers.append(None if row.get("gets_floor") else _comparable_answer(row))
        votes = _count_votes(answers)
        if not votes:
            values += [None] * group_size
            continue
        winner, _ = votes.most_common(1)[0]  # the first of equals
        for answer in answers:
            values.append(float(answer == winner))
    return values


def self_certainty(rows: list[dict]) -> Values:
    """Returns the mean over tokens of KL(uniform || policy), in nats (INTUITOR, 2505.19590, equation 2).

    The trainer logs it as `mean_kl_uniform`: -1/(|o| |V|) sum_t sum_j log(|V| p_tj) under the current policy.
    A frozen model in the policy's place gets exploited.
    """
    return [row.get("mean_kl_uniform") for row in rows]


def negative_entropy(rows: list[dict]) -> Values:
    """Returns minus the trainer's `mean_entropy` (RENT, 2505.22660).

    That is mean_t sum_j p_tj log p_tj in nats, -log|V| to 0.
    """
    values = []
    for row in rows:
        value = row.get("mean_entropy")
        if value is not None:
            value = -value
        values.append(value)
    return values


# --- 2. the form of a completion


def good_format(rows: list[dict]) -> Values:
    """Returns 1 where the completion follows its think format (status ok), else 0 (R1, 2501.12948)."""
    return [float(row["status"] == "ok") for row in rows]


def length(rows: list[dict], group_size: int) -> Values:
    """Prefers the short completions of a group (Kimi k1.5, 2501.12599, where it applies to right answers).

    The value is 0.5 - (n - shortest) / (longest - shortest) for n tokens: 0.5 to -0.5, and 0 where all have
    the same length. Rows that get a floor are left out and have no value.
    """
    values = []
    for group in in_groups(rows, group_size):
        lengths = [row["n_tokens"] for row in group if not row.get("gets_floor")]
        shortest = min(lengths, default=0)
        spread = max(lengths, default=0) - shortest
        for row in group:
            if row.get("gets_floor"):
                value = None
            elif spread > 0:
                value = 0.5 - (row["n_tokens"] - shortest) / spread
            else:
                value = 0.0
            values.append(value)
    return values


def repetition(rows: list[dict], n: int = 3) -> Values:
    """Returns minus the share of a response's n-grams of words that are repeats: 0 to -1.

    It is TRL's. That of 2502.03373 is a penalty on the tokens of each repeat. A response of fewer than n + 1 words
    gets 0.
    """
    values = []
    for row in rows:
        words = row["response"].lower().split()
        n_ngrams = len(words) - n + 1
        if n_ngrams <= 0:
            values.append(0.0)
            continue
        different = {tuple(words[start : start + n]) for start in range(n_ngrams)}
        values.append(len(different) / n_ngrams - 1.0)
    return values


# --- 3. collapse


def collapse_indicators(rows: list[dict], group_size: int) -> dict[str, float]:
    """Describes how far the policy has collapsed in a step.

    Returns:
        agreement: share of a group that gives its most frequent answer, mean over groups; left out if a group
            has several prompts, as in PPO, because answers to different questions need not agree
        distinct_answers: number of different answers in a group, mean over groups; left out likewise
        distinct_responses: number of different responses in a group, as a share of the group; mean over groups
        no_answer: share of the rows without an answer
        entropy: mean over rows, nats a token; left out where the trainer does not measure it
    """
    agreement = []
    distinct_answers = []
    distinct_responses = []
    n_without_answer = 0
    for group in in_groups(rows, group_size):
        answers = list(map(_comparable_answer, group))
        votes = _count_votes(answers)
        responses = {row["response"] for row in group}
        agreement.append(max(votes.values(), default=0) / group_size)
        distinct_answers.append(len(votes))
        distinct_responses.append(len(responses) / group_size)
        n_without_answer += answers.count(None)

    indicators = {}
    if all(len({row["id"] for row in group}) == 1 for group in in_groups(rows, group_size)):
        indicators["agreement"] = statistics.fmean(agreement)
        indicators["distinct_answers"] = statistics.fmean(distinct_answers)
    indicators["distinct_responses"] = statistics.fmean(distinct_responses)
    indicators["no_answer"] = n_without_answer / len(rows)
    entropies = [row["mean_entropy"] for row in rows if row.get("mean_entropy") is not None]
    if entropies:
        indicators["entropy"] = statistics.fmean(entropies)
    return indicators


def collapsed(history: list[dict], steps: int = 10, agreement: float = 0.99, entropy: float = 0.02) -> str:
    """Returns why the run should end, or "". It should when the reward can no longer tell completions apart.

    Args:
        history: {"agreement", "entropy"} of every step so far, from `collapse_indicators`; what was not
            measured is missing or None.
        steps: how many of the last steps must all be beyond a limit.
        agreement: ends the run from here up.
        entropy: ends the run from here down; nats a token.
    """
    last = history[-steps:]
    if len(last) < steps:
        return ""
    agreements = [step.get("agreement") for step in last]
    if None not in agreements and min(agreements) >= agreement:
        return f"collapsed: agreement of {agreement:g} or more in {steps} steps"
    entropies = [step.get("entropy") for step in last]
    if None not in entropies and max(entropies) <= entropy:
        return f"collapsed: entropy of {entropy:g} nat or less in {steps} steps"
    return ""


def read_history(run: Path) -> list[dict]:
    """Reads from the log of a resumed run what `collapsed` looks at."""
    log = read_log(run / "metrics.jsonl")
    return [
        {"agreement": row.get("collapse/agreement"), "entropy": row.get("collapse/entropy")} for row in log
    ]


class Collapse:
    """Follows the indicators of a run, with those of its steps before a resume, and ends it when it has collapsed."""

    def __init__(self, run: Path, group_size: int):
        self.group_size = group_size
        self.history = read_history(run)

    def indicators(self, completions: list) -> dict[str, float]:
        """Returns the indicators of a step as metrics."""
        rows = [completion.row() for completion in completions]
        self.history.append(collapse_indicators(rows, self.group_size))
        return {f"collapse/{name}": value for name, value in self.history[-1].items()}

    def check(self, step: int, metrics: dict, completions: list) -> str:
        """Returns why the run should end after this step, or ""."""
        return collapsed(self.history)
