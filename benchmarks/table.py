"""Lists the benchmarks of the paper's suite, by the name that eval_benchmarks.py takes.

Each family has a file in this folder with its prompts, checks and scores, and with what differs between the
paper and the official tool. Scored rows, stored or generated, have these fields:

    alpacaeval2       index or instruction; output_2; preference (1 baseline, 2 model), or judge_text and
                      model_is (A or B)
    arenahard2        uid; verdict_game1_A_is_baseline and verdict_game2_A_is_model (label or judge text);
                      model_metadata
    creativewriting3  title, iteration (1 to 3), judge_text
    ifeval, ifbench   key or prompt, response
    popqa             id or question, response
    mmlu_redux        id (position in the data, from 0) or question, response
    math500           unique_id, problem or id, response
    zebralogic        id, response
    gsm8k             question, response
    humaneval         task_id, completion (or response: prose with a code block)

From popqa on a task may have several rows, and a row a `reward`, by which best@k chooses.

Scores of benchmarks with a judge are in percent, the others are fractions. An answer without a readable
result is wrong and counted (`n_unparsed`). What cannot be scored at all (its response is null, or there is no
verdict) is `invalid`: counted, listed under `rows`, and in no score.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks import alpacaeval2, arenahard2, creativewriting3, ifeval, verified
from benchmarks.accuracy import accuracy
from benchmarks.scoring import check_rows, load  # noqa: F401  load is for a benchmark of one's own
from rlmt import code_runner


@dataclass(frozen=True)
class Benchmark:
    keys: tuple[str, ...]
    """Fields that tell to which task a row belongs; the first one that a task has counts."""
    prompt: str
    """Template of the tested model's prompt, filled with the task's fields; our words if the data have
    none."""
    load_tasks: Callable[[Path], list[dict]]
    """(data) -> tasks in the order of the data; `excluded` says why one does not count."""
    score: Callable[[list[dict], Path, str], dict]
    """(rows, data, name of the rows' file for messages) -> numbers, and each row's result under `rows`."""
    metrics: tuple[str, ...]
    """Keys of the numbers that go into results/runs.csv; the first is the headline."""
    check_tasks: Callable[[list[dict]], None] | None = None
    """(tasks to ask) -> None; exits with 2 if one cannot be scored."""
    several_samples: bool = False
    """Whether a task takes several answers."""
    judge: ModuleType | None = None
    """Module of a benchmark with a judge, which also has JUDGE_OPTIONS and PLACEHOLDERS (by protocol),
    `judge_template`, `judge_fields`, `parse_reply` and `judged_fields`; benchmarks/alpacaeval2.py is an
    example."""

    @property
    def has_words(self) -> bool:
        """Returns whether a judge, or else the model, reads words that are not the tasks' own."""
        return self.judge is not None or self.several_samples


def judged(module: ModuleType, *metrics: str) -> Benchmark:
    """Returns a benchmark with a judge from its module."""
    return Benchmark(
        keys=module.KEYS,
        prompt=module.PROMPT,
        load_tasks=module.load_tasks,
        score=module.score,
        metrics=metrics,
        judge=module,
    )


def checked(
    keys: tuple[str, ...],
    prompt: str,
    load_tasks: Callable,
    check_answer: Callable[[dict, str], dict],
    *more_metrics: str,
    apply: Callable = map,
) -> Benchmark:
    """Returns a benchmark whose answers a rule checks: `check_answer(task, text)`; `apply` as `check_rows`."""

    def score(rows: list[dict], data: Path, source: str) -> dict:
        tasks = load_tasks(data)
        return accuracy(check_rows(rows, tasks, keys, source, check_answer, apply=apply), tasks)

    metrics = ("accuracy", *more_metrics)
    return Benchmark(keys, prompt, load_tasks, score, metrics, several_samples=True)


INSTRUCTIONS = Benchmark(
    keys=ifeval.KEYS,
    prompt="{prompt}",
    load_tasks=ifeval.load_tasks,
    score=ifeval.score,
    metrics=("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose"),
    check_tasks=ifeval.check_tasks,
)
BENCHMARKS = {
    "alpacaeval2": judged(alpacaeval2, "lc_win_rate", "win_rate", "lc_win_rate_paper", "win_rate_paper"),
    "arenahard2": judged(arenahard2, "score_style_controlled", "score", "score_paper"),
    "creativewriting3": judged(creativewriting3, "overall", "overall_paper"),
    "ifbench": INSTRUCTIONS,
    "ifeval": INSTRUCTIONS,
    "popqa": checked(
        ("id", "question"),
        verified.POPQA_PROMPT,
        verified.load_popqa,
        verified.popqa_check,
        "accuracy_paper",
    ),
    "mmlu_redux": checked(
        ("id", "index", "question"),
        verified.MMLU_REDUX_PROMPT,
        verified.load_mmlu_redux,
        verified.mmlu_redux_check,
    ),
    "math500": checked(
        ("unique_id", "problem", "id"),
        verified.MATH500_PROMPT,
        verified.load_math500,
        verified.math500_check,
        "accuracy_math_verify",
    ),
    "zebralogic": checked(
        ("id",), verified.ZEBRALOGIC_PROMPT, verified.load_zebralogic, verified.zebralogic_check
    ),
    "gsm8k": checked(("question", "id"), verified.GSM8K_PROMPT, verified.load_gsm8k, verified.gsm8k_check),
    "humaneval": checked(
        ("task_id",),
        verified.HUMANEVAL_PROMPT,
        verified.load_humaneval,
        verified.humaneval_check,
        apply=code_runner.map_in_parallel,
    ),
}
