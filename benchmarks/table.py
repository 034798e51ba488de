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
    math500           unique_id or problem, response
    zebralogic        id, response
    gsm8k             question, response
    humaneval         task_id, completion (or response: prose with a code block)

From popqa on a task may have several rows, and a row a `reward`, by which best@k chooses.

Scores of benchmarks with a judge are in percent, the others are fractions. An answer without a readable
result is wrong and counted (`n_unparsed`). What cannot be scored at all (no response, no verdict) is
`invalid`: counted, listed under `rows`, and in no score.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import alpacaeval2, arenahard2, creativewriting3, ifeval, verified
from benchmarks.judge_template import Placeholders


@dataclass(frozen=True)
class Benchmark:
    keys: tuple[str, ...]
    """Fields that tell to which task a row belongs; the first one that a task has counts."""
    prompt: str
    """Template of the tested model's prompt, filled with the task's fields; our words if the data have none."""
    load_tasks: Callable[[Path], list[dict]]
    """(data) -> tasks in the order of the data; `excluded` says why one does not count."""
    score: Callable[[list[dict], Path, str], dict]
    """(rows, data, name of the rows' file for messages) -> numbers, and each row's result under `rows`."""
    metrics: tuple[str, ...]
    """Keys of the numbers that go into results/runs.csv; the first is the headline."""
    check: Callable[[list[dict], Path], None] | None = None
    """(tasks to ask, data) -> None; exits with 2 if something is missing that `score` needs."""
    several_samples: bool = False
    """Whether a task takes several answers."""
    # with a judge
    judge_options: dict[str, dict] | None = None
    """{protocol: fields of a request besides its messages}"""
    judge_template: Callable[[dict, str], str] | None = None
    """(task, protocol) -> our own instructions of the judge."""
    judge_fields: Callable[[dict, str, Path, str], dict[str, dict]] | None = None
    """(task, answer, data, protocol) -> what the judge is shown, by the field of the scored row that takes the reply."""
    placeholders: dict[str, Placeholders] | None = None
    """{protocol: what a template of the judge holds}"""
    parse_reply: Callable | None = None
    """Raises ValueError for a judge's reply that cannot be read."""
    judged_fields: Callable[[dict, str, dict, str], dict] | None = None
    """(task, answer, {field: Reply}, protocol) -> fields of the scored row."""


def judged(module, *metrics: str) -> Benchmark:
    """Returns a benchmark with a judge from its module, where everything has the name that it has here."""
    return Benchmark(
        keys=module.KEYS,
        prompt=module.PROMPT,
        load_tasks=module.load_tasks,
        score=module.score,
        metrics=metrics,
        check=getattr(module, "check", None),
        judge_options=module.JUDGE_OPTIONS,
        judge_template=module.judge_template,
        judge_fields=module.judge_fields,
        placeholders=module.PLACEHOLDERS,
        parse_reply=module.parse_reply,
        judged_fields=module.judged_fields,
    )


BENCHMARKS = {
    "alpacaeval2": judged(alpacaeval2, "lc_win_rate", "win_rate", "lc_win_rate_paper", "win_rate_paper"),
    "arenahard2": judged(arenahard2, "score_style_controlled", "score", "score_paper"),
    "creativewriting3": judged(creativewriting3, "overall", "overall_paper"),
    "ifbench": Benchmark(
        keys=ifeval.KEYS,
        prompt="{prompt}",
        load_tasks=ifeval.load_tasks,
        score=ifeval.score,
        check=ifeval.check_tasks,
        metrics=("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose"),
    ),
    "ifeval": Benchmark(
        keys=ifeval.KEYS,
        prompt="{prompt}",
        load_tasks=ifeval.load_tasks,
        score=ifeval.score,
        check=ifeval.check_tasks,
        metrics=("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose"),
    ),
    "popqa": Benchmark(
        keys=verified.POPQA_KEYS,
        prompt=verified.POPQA_PROMPT,
        load_tasks=verified.load_popqa,
        score=verified.score_popqa,
        metrics=("accuracy", "accuracy_paper"),
        several_samples=True,
    ),
    "mmlu_redux": Benchmark(
        keys=verified.MMLU_REDUX_KEYS,
        prompt=verified.MMLU_REDUX_PROMPT,
        load_tasks=verified.load_mmlu_redux,
        score=verified.score_mmlu_redux,
        metrics=("accuracy",),
        several_samples=True,
    ),
    "math500": Benchmark(
        keys=verified.MATH500_KEYS,
        prompt=verified.MATH500_PROMPT,
        load_tasks=verified.load_math500,
        score=verified.score_math500,
        metrics=("accuracy", "accuracy_math_verify"),
        several_samples=True,
    ),
    "zebralogic": Benchmark(
        keys=verified.ZEBRALOGIC_KEYS,
        prompt=verified.ZEBRALOGIC_PROMPT,
        load_tasks=verified.load_zebralogic,
        score=verified.score_zebralogic,
        metrics=("accuracy",),
        several_samples=True,
    ),
    "gsm8k": Benchmark(
        keys=verified.GSM8K_KEYS,
        prompt=verified.GSM8K_PROMPT,
        load_tasks=verified.load_gsm8k,
        score=verified.score_gsm8k,
        metrics=("accuracy",),
        several_samples=True,
    ),
    "humaneval": Benchmark(
        keys=verified.HUMANEVAL_KEYS,
        prompt=verified.HUMANEVAL_PROMPT,
        load_tasks=verified.load_humaneval,
        score=verified.score_humaneval,
        metrics=("accuracy",),
        several_samples=True,
    ),
}
