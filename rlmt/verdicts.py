"""Reads what a judge or a model has decided: the one JSON object of a verdict, the last boxed answer."""

import contextlib
import json
import re

from rlmt import lm_eval_tasks
from rlmt.foreign import FOREIGN_STYLES, split_foreign

# --- 1. verdicts


def verdict_of(text: str) -> str:
    """Returns what a judge says after its thinking, in whatever style it thinks: the only text that holds its
    verdict.

    Raises ValueError if a line opens thinking that is not closed: what is there then is a draft.
    """
    with contextlib.suppress(ValueError):
        if isinstance(json.loads(text), dict):  # nothing else is there, and a tag in it is quoted
            return text
    for style in FOREIGN_STYLES.values():
        parts = split_foreign(text, style, finished=True)
        if parts.status == "no_close":
            raise ValueError("the judge's thinking is not closed")
        text = parts.response
    return text


def refuse_repeats(items: list[tuple]) -> dict:
    """Makes a JSON object; raises ValueError if a key stands twice: json would keep the last."""
    found = dict(items)
    if len(found) < len(items):
        raise ValueError("a key stands twice")
    return found


def read_object(text: str) -> dict:
    """Returns the JSON object in a reply, perhaps among prose; raises ValueError unless it is one."""
    from_first_to_last_brace = text[text.find("{") : text.rfind("}") + 1]
    for candidate in (text, from_first_to_last_brace):
        try:
            found = json.loads(candidate, object_pairs_hook=refuse_repeats, strict=False)
        except json.JSONDecodeError:
            continue
        except RecursionError:
            break
        if isinstance(found, dict):
            return found
        break
    raise ValueError("no JSON object, or more than one")


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
    r"""Returns the content of the last \boxed{...}; None if nothing is boxed, or the last box is not closed.

    After `\boxed ` with a space it is everything up to the next $, as in the paper's code.
    """
    if "\\boxed " in text:
        after_box = text.rpartition("\\boxed ")[2]
        return after_box.partition("$")[0]

    _, box, after_box = text.rpartition("\\boxed")
    if not box or not after_box.startswith("{"):
        return None
    groups = top_level_braces(after_box)
    return groups[0][1:-1] if groups else None


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
