"""Rewards by name, as in `--rewards math:1 overlong:0.5 --reward-args overlong.buffer=512`.

REWARDS says in which file a name's function is; only what a run names is imported. Such a function takes the
completions of this process as rows, those of one prompt next to each other, and returns a number or None for
each of them. None means that there is no value, because a judge failed or the row gets a floor; it is never a low score. A row is
{"id", "messages", "response", "status", "n_tokens", ...} and the fields of its prompt's row. It asks for more by
the names of its parameters: those of CONTEXT are filled in, and a parameter with a default is an option of
`--reward-args`. A function that asks for the judge runs on the main process, on the rows of all.

To use a reward of yours, write the function in any file:

    def brief(rows, per_token=0.01):
        return [-per_token * row["n_tokens"] for row in rows]

    python train_grpo.py --rewards preference:1 file.py:brief:1 --reward-args brief.per_token=0.02

To give it to everybody, write it into a file of rewards/ and add a line to REWARDS. If it verifies an answer,
add the field of the prompt's row that it reads to VERIFIERS.

This file reads the flags; scorer.py has all that happens to a reward in a step.
"""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import get_type_hints

from rlmt.scorers import load_function
from utils import fail

REWARDS = {  # name: file.function
    "preference": "",  # a reward model, which scorer.py loads
    "process": "",  # on steps: a model in dense.py, which the trainer adds itself
    "prime": "",  # on tokens: a model in dense.py, which learns
    "math": "verified.math_answer",
    "code": "verified.code",
    "instructions": "verified.instructions",
    "factual": "judged.factual",
    "judge_mark": "judged.judge_mark",
    "rubric": "judged.rubric",
    "majority": "unsupervised.majority",
    "self_certainty": "unsupervised.self_certainty",
    "negative_entropy": "unsupervised.negative_entropy",
    "format": "shaping.good_format",
    "length": "shaping.length",
    "repetition": "shaping.repetition",
    "overlong": "shaping.overlong",
}
# The fields of the prompt's row that a reward reads, without which it does not apply; the first one that has
# a value says whether a row is right.
VERIFIERS = {
    "math": "answer",
    "code": "tests",
    "instructions": "instruction_id_list",
    "factual": "reference",
    "rubric": "rubric",
}
CONTEXT = {  # what a reward function may ask for
    "group_size": "completions of a prompt, which are neighbours in rows",
    "max_tokens": "the limit of a completion",
    "judge": "an Endpoint, with --judge",
}
MODEL_OPTIONS = {  # of the rewards that are models
    "preference": {"chat_template": ""},
    "process": {"model": ""},
    "prime": {"beta": 0.05, "learning_rate": 1e-6},
}
Values = list[float | None]
DENSE = ("process", "prime")
UNSUPERVISED = {"majority", "self_certainty", "negative_entropy"}  # with them a policy can collapse


# --- 1. --rewards and --reward-args


def has_field(row: dict, field: str) -> bool:
    """Tells whether a row has a field. None and what is empty are no value: a parquet table has all columns
    in each row."""
    return row.get(field) not in (None, "", [], {})


def in_groups(items: list, group_size: int) -> list[list]:
    """Splits the items of a step into groups of `group_size` neighbours."""
    return [items[start : start + group_size] for start in range(0, len(items), group_size)]


@dataclass
class Part:
    """One reward of a run."""

    name: str
    weight: float | None
    """What its value is multiplied with; None: it is a gate."""
    function: Callable | None
    """None for a reward that is a model."""
    asks: list[str]
    """Those keys of CONTEXT that the function has as parameters."""
    options: dict
    field: str
    """The field of the prompt's row without which it does not apply; "": it always applies."""

    def applies(self, row: dict) -> bool:
        """Tells whether a row has what the reward reads."""
        return not self.field or has_field(row, self.field)


def read_parts(rewards: Sequence[str], reward_args: Sequence[str] = ()) -> dict[str, Part]:
    """Reads the words of --rewards and --reward-args into parts by their names; exits with 2 for what cannot be."""
    parts = {}
    for word in rewards:
        part = _read_part(word)
        if part.name in parts:
            fail(f"--rewards {word}: {part.name} is named twice; leave one out, or rename your function")
        parts[part.name] = part
    for word in reward_args:
        _set_option(word, parts)
    return parts


def _read_part(word: str) -> Part:
    """Reads NAME:WEIGHT, NAME:gate, or the same of path/to/file.py:function, whose weight may be left out."""
    path, is_own, rest = word.rpartition(".py:")
    name, _, weight = rest.partition(":")
    if bool(is_own) == (name in REWARDS):
        fail(
            f"--rewards {word}: there are {', '.join(REWARDS)}, and functions of your own with other names as "
            "path/to/file.py:function:WEIGHT"
        )
    function = None
    if is_own:
        function = load_function(f"{path}.py:{name}")
        weight = weight or "1"
    elif REWARDS[name]:
        function = pkgutil.resolve_name(f"rewards.{REWARDS[name]}")

    number = None
    if weight != "gate":
        try:
            number = float(weight)
        except ValueError:
            number = nan
        if not isfinite(number):
            fail(f"--rewards {word}: write {name}:WEIGHT (a number) or {name}:gate")
    elif name in ("process", "prime"):
        fail(f"--rewards {word}: the rewards of tokens and steps have no one value for a gate; give a weight")
    asks = []
    options = dict(MODEL_OPTIONS.get(name, {}))
    if function:
        parameters = [*inspect.signature(function).parameters.values()]
        if not parameters:
            fail(f"--rewards {word}: {name} takes no parameter; the first one is the rows")
        for parameter in parameters[1:]:
            if parameter.name in CONTEXT:
                asks.append(parameter.name)
            elif parameter.default is parameter.empty:
                fail(
                    f"--rewards {word}: leave out the parameter {parameter.name!r} or give it a default, which makes it an "
                    f"option of --reward-args; only {', '.join(CONTEXT)} need none"
                )
            else:
                options[parameter.name] = parameter.default
    return Part(name, number, function, asks, options, VERIFIERS.get(name, ""))


def _set_option(word: str, parts: dict[str, Part]) -> None:
    """Sets the option of a word NAME.OPTION=VALUE, by its annotation or else by the type of its default."""
    from pydantic import TypeAdapter, ValidationError  # slow to import, and most runs set no option

    place, _, text = word.partition("=")
    name, _, option = place.partition(".")
    if name not in parts or option not in parts[name].options:
        known = [f"{part.name}.{option}" for part in parts.values() for option in part.options]
        fail(f"--reward-args {word}: write NAME.OPTION=VALUE with one of {', '.join(known) or 'no options'}")
    function = parts[name].function
    options = parts[name].options
    kind = type(options[option])
    if function:  # none of a reward that is a model
        kind = get_type_hints(function).get(option, kind)
    try:
        options[option] = TypeAdapter(kind, config={"allow_inf_nan": False}).validate_strings(text)
    except ValidationError as error:
        fail(f"--reward-args {word}: {error.errors()[0]['msg']}")
