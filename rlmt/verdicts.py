"""Reads what a judge or a model has decided: the one JSON object of a verdict, the last boxed answer."""

import json
import re

from rlmt import lm_eval_tasks
from rlmt.foreign import FOREIGN_STYLES, OPENS_THINKING

# --- 1. verdicts

CODE_BLOCK = re.compile(r"\A\s*```\w*\n(.*)```\s*\Z", re.DOTALL)


def verdict_of(text: str) -> str:
    """Returns what a judge says after its thinking, in whatever style it thinks: the only text that holds its
    verdict.

    Raises ValueError if thinking is opened and not closed: what is there then is a draft.
    """
    if object_in(text) is not None:  # nothing else is there, and a tag in it is quoted
        return text
    for style in FOREIGN_STYLES.values():
        text = re.split(style.opens_answer, text)[-1].strip().removesuffix(style.closes_answer)
    if OPENS_THINKING.search(text):
        raise ValueError("the judge's thinking is not closed, or of an unknown style")
    return text


def refuse_repeats(items: list[tuple]) -> dict:
    """Makes a JSON object; raises ValueError if a key stands twice: json would keep the last."""
    found = dict(items)
    if len(found) < len(items):
        raise ValueError("a key stands twice")
    return found


def object_in(text: str) -> dict | None:
    """Returns the JSON object that a text is, perhaps as a code block; None if it is anything else."""
    try:
        found = json.loads(CODE_BLOCK.sub(r"\1", text), object_pairs_hook=refuse_repeats, strict=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        return found
    return None


def read_object(text: str) -> dict:
    """Returns the JSON object that a reply is, apart from thinking before it.

    Raises ValueError if the reply has anything else: an object among prose may be one that the judge quotes.
    """
    found = object_in(verdict_of(text))
    if found is None:
        raise ValueError("the reply is not one JSON object and nothing else")
    return found


# --- 2. boxed answers

SLASH = "\0"  # takes the place of a / in an answer


def top_level_braces(text: str) -> list[str]:
    """Lists every complete {...} that is in no other. Braces are counted even inside strings, as in the
    paper's code."""
    found = []
    depth = 0
    for match in re.finditer("[{}]", text):
        if match[0] == "{":
            depth += 1
            if depth == 1:
                start = match.start()
        elif depth > 0:
            depth -= 1
            if depth == 0:
                found.append(text[start : match.end()])
    return found


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...} that is closed and not empty, else None.

    After `\boxed ` with a space it is everything up to the next $ of its line, as in the paper's code.
    """
    boxes = [(0, 0)]
    opened = []
    for match in re.finditer(r"\\boxed (?P<upto>[^$\n]*)\$|(?P<box>\\boxed *)?\{|\}", text):
        if match["upto"]:
            boxes.append(match.span("upto"))
        elif match[0] != "}":
            opened.append(match)
        elif opened:
            start = opened.pop()
            if start["box"] and text[start.end() : match.start()].strip():
                boxes.append((start.end(), match.start()))
    start, end = max(boxes)
    return text[start:end] or None


def normalise_math(text: str) -> str:
    """Returns an answer in the spelling that the paper's code compares, that of Hendrycks et al. (MATH).

    What they cannot read, such as one with two units, stays as it is.
    """
    lm_eval_tasks.prepare()
    from lm_eval.tasks.hendrycks_math.utils import strip_string

    try:
        # they raise an error for a fraction a/b that is not of integers
        spelled = strip_string(text.replace("/", SLASH)).replace(SLASH, "/")
    except (AssertionError, IndexError):
        return text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", spelled)
