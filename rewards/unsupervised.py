"""Rewards that need neither a verifier nor a judge, and the indicators that show when a policy exploits them.

From agreement or confidence: majority, self_certainty, negative_entropy. From the form of a completion:
good_format, length, repetition. `collapse_indicators` describes a step, and `collapsed` is the rule that ends
a run by them.
"""

import json
import re
import statistics
from collections import Counter
from pathlib import Path

from benchmarks.verified import normalise_math
from rewards.shared import Values, in_groups
from rewards.verified import final_answer


def _comparable_answer(row: dict) -> str | None:
    """Returns the final answer of a response in MATH's spelling, without thousands separators.

    None: there is no answer.
    """
    answer = final_answer(row["response"])
    try:
        spelled = normalise_math(answer or "")
    except ValueError:  # more than one unit
        return answer
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", spelled) or None


def _count_votes(answers: list[str | None]) -> Counter:
    """Counts the answers of a group, in the order in which they first appear.

    Rows without an answer have no vote.
    """
    return Counter(answer for answer in answers if answer is not None)


def majority(rows: list[dict], group_size: int) -> Values:
    """Returns 1 where the answer is the one that most of the group give, else 0 (TTRL, 2504.16084).

    A tie goes to the answer that appears first in the group. A row without an answer gets 0. A group in which
    nobody answers has no values.
    """
    values = []
    answers = [_comparable_answer(row) for row in rows]
    for group in in_groups(answers, group_size):
        votes = _count_votes(group)
        if votes:
            winner = max(votes, key=votes.get)
            values += [float(answer == winner) for answer in group]
        else:
            values += [None] * len(group)
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
        entropy = row.get("mean_entropy")
        values.append(None if entropy is None else -entropy)
    return values


def good_format(rows: list[dict]) -> Values:
    """Returns 1 where the completion follows its think format (status ok), else 0 (R1, 2501.12948)."""
    return [float(row["status"] == "ok") for row in rows]


def length(rows: list[dict], group_size: int) -> Values:
    """Prefers the short completions of a group (Kimi k1.5, 2501.12599, where it applies to right answers).

    The value is 0.5 - (n - shortest) / (longest - shortest) for n tokens: 0.5 to -0.5, and 0 where all have
    the same length.
    """
    values = []
    for group in in_groups([row["n_tokens"] for row in rows], group_size):
        shortest = min(group)
        spread = max(group) - shortest
        for n_tokens in group:
            values.append(0.5 - (n_tokens - shortest) / spread if spread else 0.0)
    return values


def repetition(rows: list[dict], n: int = 3) -> Values:
    """Returns minus the share of a response's n-grams of words that are repeats: 0 to -1 (2502.03373; TRL).

    A response of fewer than n + 1 words gets 0.
    """
    values = []
    for row in rows:
        words = row["response"].lower().split()
        ngrams = list(zip(*(words[start:] for start in range(n))))
        values.append(len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0)
    return values


def collapse_indicators(rows: list[dict], group_size: int) -> dict[str, float | None]:
    """Describes how far the policy has collapsed in a step.

    Returns:
        agreement: share of a group that gives its most frequent answer, mean over groups
        distinct_answers: number of different answers in a group, mean over groups
        distinct_responses: share of a group's responses that differ from each other, mean over groups
        no_answer: share of the rows without an answer
        entropy: mean over rows, nats a token; None where the trainer does not measure it
    """
    answers = [_comparable_answer(row) for row in rows]
    responses = [row["response"] for row in rows]
    entropies = [row["mean_entropy"] for row in rows if row.get("mean_entropy") is not None]
    votes = [_count_votes(group) for group in in_groups(answers, group_size)]
    agreements = [max(counts.values(), default=0) / group_size for counts in votes]
    distinct = [len(set(group)) / group_size for group in in_groups(responses, group_size)]
    return {
        "agreement": statistics.fmean(agreements),
        "distinct_answers": statistics.fmean(len(counts) for counts in votes),
        "distinct_responses": statistics.fmean(distinct),
        "no_answer": answers.count(None) / len(rows),
        "entropy": statistics.fmean(entropies) if entropies else None,
    }


def collapsed(history: list[dict], steps: int = 10, agreement: float = 0.99, entropy: float = 0.02) -> str:
    """Returns why the run should end, or "": the reward can no longer tell completions apart.

    Args:
        history: {"agreement", "entropy"} of every step so far, from `collapse_indicators`.
        steps: how many of the last steps must all be beyond a limit.
        agreement: ends the run from here up.
        entropy: nats a token; ends the run from here down.
    """
    last = history[-steps:]
    if len(last) < steps:
        return ""
    if all(step["agreement"] >= agreement for step in last):
        return f"collapsed: agreement of {agreement:g} or more in {steps} steps"
    if all(step["entropy"] is not None and step["entropy"] <= entropy for step in last):
        return f"collapsed: entropy of {entropy:g} nat or less in {steps} steps"
    return ""


def read_history(run: Path) -> list[dict]:
    """Reads what `collapsed` looks at from the log of a run that goes on."""
    path = run / "metrics.jsonl"
    history = []
    for line in path.read_text().splitlines() if path.exists() else ():
        metrics = json.loads(line)
        history.append({name: metrics.get(f"collapse/{name}") for name in ("agreement", "entropy")})
    return history
