"""IFEval and IFBench: does a response meet each instruction of its task?

IFEval's checkers are lm-eval's copy of Google's, made deterministic: for two prompts the original counts a
random letter in place of `#` and `!`; here it is the character that was asked for. IFBench's are in
benchmarks/ifbench.py.

One row a task. Scores are fractions: of prompts with every instruction met, and of instructions; strict, or loose (one of
8 variants of the response meets it).
"""

import functools
import logging
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path

from utils import fail, or_fail
from benchmarks.scoring import bootstrap, check_rows, count_rows, load, mean, task_means

KEYS = ("key", "prompt")  # the official files have the prompt only
RULES = ("strict", "loose")


def load_tasks(data: Path) -> list[dict]:
    return load(data, "data.json*", "key", "prompt", "instruction_id_list", "kwargs")


@functools.cache
def ifeval_checkers() -> tuple[dict, Callable]:
    """Returns IFEval's instructions by name, and the function that checks a task and a list of one response.

    Exits with 2 if nltk's data is missing.
    """
    import langdetect
    import lm_eval
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        fail(
            "IFEval needs nltk's punkt_tab: run python -m nltk.downloader punkt_tab, or set NLTK_DATA to where it is"
        )

    # The real lm_eval.tasks imports what all of its tasks need; with this in its place only IFEval is loaded.
    package = types.ModuleType("lm_eval.tasks")
    package.__path__ = [str(Path(lm_eval.__file__).parent / "tasks")]
    sys.modules.setdefault("lm_eval.tasks", package)
    from lm_eval.tasks.ifeval import instructions, instructions_registry, utils

    class LetterFrequency(instructions.LetterFrequencyChecker):
        def build_description(self, *, letter=None, **kwargs):
            super().build_description(letter=letter, **kwargs)  # draws another letter if this is not one
            self._letter = letter.lower()

    instructions_registry.INSTRUCTION_DICT["keywords:letter_frequency"] = LetterFrequency
    langdetect.DetectorFactory.seed = 0
    logging.getLogger(instructions.__name__).setLevel(logging.CRITICAL)  # it prints texts without a language
    return instructions_registry.INSTRUCTION_DICT, utils.process_results


def bounded(check: Callable[[dict, str], dict], task: dict, response: str, seconds: float = 10.0) -> dict:
    """Returns check(task, response); if it takes too long, or nests too deeply, no instruction is met.

    Thousands of [, for example, cost a regular expression quadratic time. The time is the clock's, so a busy
    machine may stop what another one finishes: `timed_out` marks such a result. Works in the main thread only.
    """

    def stop(signal_number, frame):
        raise TimeoutError

    handler_before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return check(task, response)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (RecursionError, TimeoutError) as error:
        nothing_met = [False] * len(task["instruction_id_list"])
        result = {rule: list(nothing_met) for rule in RULES}
        if isinstance(error, TimeoutError):
            result["timed_out"] = True
        return result
    finally:
        signal.signal(signal.SIGALRM, handler_before)


def check_ifeval(tasks: list[dict], data: Path | None = None) -> None:
    """Exits with 2 if nltk's data is missing or a task has an unknown instruction. `data` is not needed."""
    known, _ = ifeval_checkers()
    for task in tasks:
        names = task["instruction_id_list"]
        unknown = set(names) - set(known)
        if unknown:
            fail(
                f"task {task['key']}: unknown instruction {', '.join(sorted(unknown))}; is this IFEval's data?"
            )
        all_kwargs = task.get("kwargs")
        if not isinstance(all_kwargs, list) or len(all_kwargs) != len(names):
            fail(
                f"task {task['key']}: field kwargs must be a list with a dict for each of {len(names)} instructions"
            )
        for name, kwargs in zip(names, all_kwargs):
            problem = unusable_arguments(known[name], name, kwargs)
            if problem:
                fail(f"task {task['key']}: field kwargs of {name} is {kwargs}: {problem}")


def unusable_arguments(checker: type, name: str, kwargs: dict) -> str:
    """Returns why an instruction cannot be checked with its arguments; "" if it can.

    The official code draws a random one in place of what is missing, 0 or of a wrong type.
    """
    instruction = checker(name)
    try:
        given = {key: value for key, value in kwargs.items() if value}  # as lm-eval hands them over
        instruction.build_description(**given)
        instruction.check_following("One text.\n\nAnother one.")
        used = instruction.get_instruction_args() or {}
    except Exception as error:
        return f"{type(error).__name__} {error}"
    for key, value in used.items():
        if isinstance(value, list | tuple):
            same = isinstance(given.get(key), list | tuple)
        else:
            same = str(given.get(key)).lower().strip() == str(value).lower().strip()
        if not same:
            return f"{key} would be {value!r}"
    return ""


def check_ifbench(tasks: list[dict], data: Path | None = None) -> None:
    """Does the same for IFBench, and checks the arguments of the instructions."""
    from benchmarks import ifbench

    or_fail(ifbench.require_nltk_data)
    for task in tasks:
        or_fail(ifbench.bind, task)


def ifeval_check(task: dict, response: str) -> dict[str, list[bool]]:
    """Returns {"strict": [...], "loose": [...]}, one bool an instruction; exits with 2 for an unknown one."""
    check_ifeval([task])
    _, process_results = ifeval_checkers()

    def check(task: dict, response: str) -> dict:
        numbers = process_results(task, [response])
        return {"strict": numbers["inst_level_strict_acc"], "loose": numbers["inst_level_loose_acc"]}

    return bounded(check, task, response)


def ifbench_check(task: dict, response: str) -> dict[str, list[bool]]:
    """Returns the same for IFBench; exits with 2 for an unknown instruction, or if nltk's data is missing."""
    from benchmarks import ifbench

    return or_fail(bounded, ifbench.check, task, response)


def score_ifeval(rows: list[dict], data: Path, source: str) -> dict:
    return score(rows, data, source, ifeval_check)


def score_ifbench(rows: list[dict], data: Path, source: str) -> dict:
    return score(rows, data, source, ifbench_check)


def score(rows: list[dict], data: Path, source: str, check: Callable[[dict, str], dict]) -> dict:
    """Returns the shares of prompts and of instructions that are met, strict and loose, and the counts.

    `n_timed_out`: responses whose check was stopped, so that none of their instructions is met.
    """
    tasks = load_tasks(data)
    results = check_rows(rows, tasks, KEYS, source, check, several_samples=False)
    numbers = {"n_timed_out": sum("timed_out" in result for result in results)}
    for rule in RULES:
        checked = [result for result in results if rule in result]
        met_by_prompt = [result[rule] for result in checked]
        all_met = [all(met) for met in met_by_prompt]
        instructions_met = [one for met in met_by_prompt for one in met]
        numbers[f"prompt_{rule}"] = mean(all_met)
        numbers[f"instruction_{rule}"] = mean(instructions_met)
        numbers["n_instructions"] = len(instructions_met)
        if rule == "strict" and all_met:
            numbers["interval"] = bootstrap(all_met)
            tasks_met = task_means(all_met, [result["task"] for result in checked])
            numbers["task_means"] = {"prompt_strict": tasks_met}
    return numbers | count_rows(results, tasks)
