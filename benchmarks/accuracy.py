"""The accuracy of a benchmark whose answers are right or wrong, with one or several samples a task.

With several, pass@k is next to it, maj@k by a majority of the answers, and best@k by a reward model's choice.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable

from benchmarks.scoring import count_rows, mean, mean_interval, task_means


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the chance that k of n samples, c of them right, hold a right one (Chen et al. 2021, eq. 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(votes: list[Hashable | None], correct: list[bool], k: int) -> float:
    """Returns the share of groups of k samples in which the most frequent answer is right.

    Of answers that are equally frequent, the one that came first wins. A vote None, an unreadable answer, is
    not counted. The groups are disjoint, in the order of the samples, and a remainder is left out. So this is
    an unbiased estimate for any k, and the plain majority vote if k is the number of samples.
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
    """Returns the chance that the best of k of n samples, by reward, is right. Of equal rewards the first is
    best.

    It is exact over all choices of k samples, so unbiased for any k, as pass_at_k is.
    """
    n = len(rewards)
    best_first = sorted(range(n), key=rewards.__getitem__, reverse=True)
    n_choices_won = 0
    for rank, index in enumerate(best_first):
        if correct[index]:
            n_choices_won += math.comb(n - 1 - rank, k - 1)  # the other k - 1 are all worse
    return n_choices_won / math.comb(n, k)


def accuracy(results: list[dict], tasks: list[dict]) -> dict:
    """Returns accuracy (for each field `correct...` of the results), values at k, their intervals, and the
    counts.

    A task's samples are averaged first, so the interval is over tasks.
    """
    by_task = defaultdict(list)
    for result in results:
        if "correct" in result:
            by_task[result["task"]].append(result)
    checked = [result for samples in by_task.values() for result in samples]
    fields = {"correct"}.union(*checked)
    values = {}  # {metric: {task: value}}
    for field in sorted(name for name in fields if name.startswith("correct")):
        metric = field.replace("correct", "accuracy")
        values[metric] = task_means(
            [result[field] for result in checked], [result["task"] for result in checked]
        )

    numbers = {"task_means": {}}
    for metric, value_of_task in (values | values_at_k(by_task)).items():
        numbers[metric] = mean(value_of_task.values())
        if value_of_task:
            is_share = metric in values or None  # values at k are not, unless all of them are 0 or 1
            numbers[f"{metric}_interval"] = mean_interval(list(value_of_task.values()), is_share=is_share)
            numbers["task_means"][metric] = value_of_task
    return numbers | count_rows(results, tasks)


def values_at_k(by_task: dict[int, list[dict]]) -> dict[str, dict[int, float]]:
    """Returns each task's pass@k, maj@k and best@k, for k 10, 100 and the samples that all tasks have.

    Args:
        by_task: results of each task, by its position in the data. maj@k is for results with an `answer`,
            which are equal if the check takes them for one; best@k for results with a `reward`. One that has
            none never wins against one that has.
    """
    results = [result for samples in by_task.values() for result in samples]
    has_answers = any("answer" in result for result in results)
    has_rewards = any("reward" in result for result in results)
    fewest_samples = min(map(len, by_task.values()), default=0)
    values = defaultdict(dict)  # {metric: {task: value}}
    for k in sorted({10, 100, fewest_samples}):
        if not 1 < k <= fewest_samples:
            continue
        for task, samples in by_task.items():
            correct = [sample["correct"] for sample in samples]
            values[f"pass@{k}"][task] = pass_at_k(len(samples), sum(correct), k)
            if has_answers:
                answers = [sample["answer"] for sample in samples]
                values[f"maj@{k}"][task] = majority_at_k(answers, correct, k)
            if has_rewards:
                rewards = [sample.get("reward", -math.inf) for sample in samples]
                values[f"best@{k}"][task] = best_at_k(rewards, correct, k)
    return values
