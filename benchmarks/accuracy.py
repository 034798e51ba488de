"""The accuracy of a benchmark whose answers are right or wrong, with one or several samples a task.

With several, pass@k is next to it, maj@k by a majority of the answers, and best@k by a reward model's choice.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from itertools import chain

from benchmarks.scoring import bootstrap, count_rows, mean

# (task, result) -> what equal answers of a task have in common; None for an unreadable answer
Vote = Callable[[dict, dict], Hashable | None]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the chance that k of n samples, c of them right, hold a right one (Chen et al. 2021, eq. 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(votes: list[Hashable | None], correct: list[bool], k: int) -> float:
    """Returns the share of groups of k samples in which the most frequent answer is right.

    Of answers that are equally frequent, the one that came first wins. A vote None, an unreadable answer, is not
    counted. The groups are disjoint, in the order of the samples, and a remainder is left out. So this is an unbiased
    estimate for any k, and the plain majority vote if k is the number of samples.
    """
    n_groups = len(votes) // k
    n_right = 0
    for start in range(0, n_groups * k, k):
        group = votes[start : start + k]
        counts = Counter(group)
        del counts[None]  # no error if there is none
        if counts:
            winner, _ = counts.most_common(1)[0]  # the first of equals
            n_right += correct[start + group.index(winner)]
    return n_right / n_groups


def best_at_k(rewards: list[float], correct: list[bool], k: int) -> float:
    """Returns the chance that the best of k of n samples, by reward, is right. Of equal rewards the first is best.

    It is exact over all choices of k samples, so unbiased for any k, as pass_at_k is.
    """
    n = len(rewards)
    best_first = sorted(range(n), key=rewards.__getitem__, reverse=True)
    n_choices_won = 0
    for rank, place in enumerate(best_first):
        if correct[place]:
            n_choices_won += math.comb(n - 1 - rank, k - 1)  # the other k - 1 are all worse
    return n_choices_won / math.comb(n, k)


def accuracy(results: list[dict], tasks: list[dict], vote: Vote | None = None) -> dict:
    """Returns accuracy and its interval (for each field `correct...` of the results), values at k, and the counts.

    A task's samples are averaged first, so the interval is over tasks. That of `accuracy` is called `interval`.
    `vote`: see `values_at_k`.
    """
    by_task = defaultdict(list)
    fields = {"correct"}
    for result in results:
        if "correct" in result:
            by_task[result["task"]].append(result)
            fields.update(name for name in result if name.startswith("correct"))

    numbers = {"task_means": {}}
    for field in sorted(fields):
        means = {}
        for task, samples in by_task.items():
            means[task] = mean(sample[field] for sample in samples)
        metric = field.replace("correct", "accuracy")
        numbers[metric] = mean(means.values())
        if means:
            _add_interval(numbers, metric, means)

    for metric, values in values_at_k(by_task, tasks, vote).items():
        numbers[metric] = mean(values.values())
        if not metric.startswith("pass"):  # results/runs.csv has the others only
            _add_interval(numbers, metric, values)
    return numbers | count_rows(results, tasks)


def _add_interval(numbers: dict, metric: str, values: dict[int, float]) -> None:
    """Adds a metric's interval over tasks and its value of each task to the numbers."""
    interval = f"{metric}_interval"
    if metric == "accuracy":
        interval = "interval"
    numbers[interval] = bootstrap(list(values.values()))
    numbers["task_means"][metric] = values


def values_at_k(
    by_task: dict[int, list[dict]], tasks: list[dict], vote: Vote | None
) -> dict[str, dict[int, float]]:
    """Returns each task's pass@k, maj@k and best@k, for k 10, 100 and the samples that all tasks have.

    Args:
        by_task: results of each task, by its position in `tasks`.
        vote: without it there is no maj@k.

    best@k is for results with a `reward`; one that has none never wins against one that has.
    """
    has_rewards = any("reward" in result for result in chain(*by_task.values()))
    fewest_samples = min(map(len, by_task.values()), default=0)
    values = defaultdict(dict)  # {name: {task: value}}
    for k in sorted({10, 100, fewest_samples}):
        if not 1 < k <= fewest_samples:
            continue
        for position, samples in by_task.items():
            correct = [sample["correct"] for sample in samples]
            values[f"pass@{k}"][position] = pass_at_k(len(samples), sum(correct), k)
            if vote:
                votes = [vote(tasks[position], sample) for sample in samples]
                values[f"maj@{k}"][position] = majority_at_k(votes, correct, k)
            if has_rewards:
                rewards = [sample.get("reward", -math.inf) for sample in samples]
                values[f"best@{k}"][position] = best_at_k(rewards, correct, k)
    return values


def vote_as_read(task: dict, result: dict) -> Hashable | None:
    """Returns the answer as the check has read it; answers that the check tells apart have different ones."""
    return result["answer"]
