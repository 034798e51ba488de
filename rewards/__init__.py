"""Rewards by name, as in `--rewards math:1 overlong:0.5 --reward-args overlong.buffer=512`.

REWARDS says in which file a name's function is; only what a run names is imported. Such a function takes the completions
of this process as rows, those of one prompt next to each other, and returns a number or None for each of them; shared.py
says what a row is. It asks for more by the names of its parameters: those of CONTEXT are filled in, and a parameter with a
default is an option of `--reward-args`.

To use a reward of yours, write the function in any file:

    def brief(rows, per_token=0.01):
        return [-per_token * row["n_tokens"] for row in rows]

    python train_grpo.py --rewards preference:1 file.py:brief:1 --reward-args brief.per_token=0.02

To give it to everybody, write it into a file of rewards/ and add a line to REWARDS. If it verifies an answer, add the field
of the prompt's row that it reads to VERIFIERS (shared.py).

The way of a reward: `read_parts` reads the flags, scorer.py computes the value of each part, and `combine` makes one total
of them, with gates and floors.
"""

import ast
import importlib
import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

from rewards.shared import VERIFIERS, Values, fields_of, has_field, in_groups
from rlmt.run import load_function
from utils import fail, or_fail

REWARDS = {  # name: file.function
    "preference": "",  # a reward model, which scorer.py loads
    "process": "",  # on steps, and
    "prime": "",  # on tokens: models of dense.py, which the trainer adds itself
    "math": "verified.math_answer",
    "code": "verified.code",
    "instructions": "verified.instructions",
    "bleu": "references.bleu",
    "factual": "judged.factual",
    "judge_mark": "judged.judge_mark",
    "pairwise": "judged.pairwise",
    "rubric": "judged.rubric",
    "majority": "unsupervised.majority",
    "self_certainty": "unsupervised.self_certainty",
    "negative_entropy": "unsupervised.negative_entropy",
    "format": "unsupervised.good_format",
    "length": "unsupervised.length",
    "repetition": "unsupervised.repetition",
    "overlong": "shaping.overlong",
}
CONTEXT = {  # what a reward function may ask for
    "group_size": "completions of a prompt, which are neighbours in rows",
    "max_tokens": "the limit of a completion",
    "judge": "an Endpoint, with --judge",
}
MODEL_OPTIONS = {  # of the rewards that are models
    "preference": {"chat_template": "", "max_length": 0},
    "process": {"model": "", "separator": "\n"},  # the default of trl's PRMConfig
    "prime": {"beta": 0.05, "learning_rate": 1e-6},
}
DENSE = ("process", "prime")
UNSUPERVISED = {"majority", "self_certainty", "negative_entropy"}  # with them a policy can collapse
RESERVED = ("gold", "missing", "truncated", "flat_groups")  # logged under names like a reward's


# --- 1. --rewards and --reward-args


@dataclass
class Part:
    """One reward of a run."""

    name: str
    weight: float
    """What its value is multiplied with; 0 for a gate."""
    is_gate: bool
    function: Callable | None
    """None for a reward that is a model."""
    options: dict
    field: str = ""
    """The field of the prompt's row without which it does not apply; "": it always applies."""

    @property
    def asks(self) -> list[str]:
        """Returns the keys of CONTEXT that its function has as parameters."""
        if self.function is None:
            return []
        return [name for name in inspect.signature(self.function).parameters if name in CONTEXT]


def split_word(word: str) -> tuple[str, str, str]:
    """Splits a word of --rewards into (path/to/file.py:function or "", name, weight)."""
    path, is_own, rest = word.rpartition(".py:")
    name, _, weight = rest.partition(":")
    if not is_own:
        return "", name, weight
    return f"{path}.py:{name}", name, weight or "1"


def reward_names(args) -> list[str]:
    """Returns the names in `args.rewards`. It is the preference alone where a script has no choice."""
    return [split_word(word)[1] for word in getattr(args, "rewards", ["preference"])]


def read_parts(args) -> list[Part]:
    """Reads `args.rewards` and `args.reward_args`; exits with 2 for what cannot be."""
    return or_fail(_read_parts, getattr(args, "rewards", ["preference:1"]), getattr(args, "reward_args", ()))


def _read_parts(words: list[str], option_words: list[str]) -> list[Part]:
    parts = {}
    for word in words:
        source, name, weight = split_word(word)
        if source and (name in REWARDS or name in RESERVED):
            raise ValueError(f"--rewards {word}: {name} is a name of ours; give the function another one")
        if not source and name not in REWARDS:
            raise ValueError(
                f"--rewards {word}: there is no reward {name!r}; there are {', '.join(REWARDS)}, "
                "and functions of your own as path/to/file.py:function:WEIGHT"
            )
        if name in parts:
            raise ValueError(f"--rewards {word}: {name} is named twice; leave one out")
        is_gate = weight == "gate" and name not in DENSE
        number = 0.0 if is_gate else _finite(weight)
        if number is None:
            raise ValueError(f"--rewards {word}: write {name}:WEIGHT (a finite number) or {name}:gate")
        function = _function(source, name)
        parts[name] = Part(name, number, is_gate, function, _default_options(name, function))

    if not any(part.weight for part in parts.values() if part.name not in DENSE):
        raise ValueError("--rewards: no outcome has a weight, so there is nothing to maximise; e.g. math:1.0")
    for word in option_words:
        _set_option(word, parts)
    fields = fields_of({name: part.options for name, part in parts.items()})
    for part in parts.values():
        part.field = fields.get(part.name, "")
    return list(parts.values())


def _function(source: str, name: str) -> Callable | None:
    if source:
        function = load_function(source)
        _check_signature(name, function)
        return function
    if not REWARDS[name]:
        return None
    file, _, function_name = REWARDS[name].partition(".")
    return getattr(importlib.import_module(f"rewards.{file}"), function_name)


def _check_signature(name: str, function: Callable) -> None:
    """Raises ValueError if a user's reward cannot be called with rows and what it asks for of CONTEXT."""
    if not callable(function):
        raise ValueError(
            f"--rewards: {name} is of type {type(function).__name__}; it must be a function of rows"
        )
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise ValueError(f"--rewards: {name} must take rows as its first parameter")
    for parameter in parameters[1:]:
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in CONTEXT:
            raise ValueError(
                f"--rewards: {name} has a parameter {parameter.name!r} without a default. Give it one, which makes it "
                f"an option of --reward-args; only {', '.join(CONTEXT)} need none"
            )


def _option_parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a reward function that --reward-args can set."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in CONTEXT and parameter.default is not parameter.empty:
            found[parameter.name] = parameter
    return found


def _default_options(name: str, function: Callable | None) -> dict:
    if function is None:
        return dict(MODEL_OPTIONS[name])
    return {option: parameter.default for option, parameter in _option_parameters(function).items()}


def _set_option(word: str, parts: dict[str, Part]) -> None:
    """Sets the option of a word NAME.OPTION=VALUE. ValueError if there is no such reward, option or value."""
    place, equals, text = word.partition("=")
    name, dot, option = place.partition(".")
    if not equals or not dot:
        raise ValueError(f"--reward-args {word}: write NAME.OPTION=VALUE, such as math.value=10")
    if name not in parts:
        raise ValueError(f"--reward-args {word}: {name} is not in --rewards, which has {', '.join(parts)}")
    part = parts[name]
    if option not in part.options:
        known = ", ".join(part.options) or "none"
        raise ValueError(f"--reward-args {word}: {name} has no option {option!r}; its options: {known}")
    annotation = None
    if part.function:
        annotation = _option_parameters(part.function)[option].annotation
    try:
        part.options[option] = parse_value(text, part.options[option], annotation)
    except ValueError as error:
        raise ValueError(f"--reward-args {word}: {error}") from None


def parse_value(text: str, default, annotation):
    """Reads the value of an option by the type of its default, or by its annotation if the default is None."""
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    kind = type(default)
    if default is None:
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]  # as in float | None
        if not kinds:
            raise ValueError(
                "its default is None, so annotate it with a type, as in `limit: int | None = None`"
            )
        kind = kinds[0]
    if kind is str:
        return text
    if kind is float:
        value = _finite(text)
    else:
        if text.lower() in ("true", "false"):
            text = text.title()
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = None
    if type(value) is not kind:
        raise ValueError(f"{text!r} cannot be read as {kind.__name__}; its default is {default!r}")
    return value


def _finite(text: str) -> float | None:
    """Reads a number; None if the text is not one, or not a finite one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


# --- 2. checks, before a model is loaded


def check(args, prompts: list[dict], accelerator) -> None:
    """Checks the rewards of GRPO or PPO, and prints to how many prompts each applies; exits with 2 if something is wrong."""
    parts = read_parts(args)
    names = [part.name for part in parts]
    group_size = getattr(args, "group_size", 1)  # PPO samples one completion per prompt
    for part in parts:
        if "group_size" in part.asks and group_size == 1 and not part.field:
            fail(f"--rewards {part.name} compares the completions of one prompt; PPO has one of each")
        if "judge" in part.asks and not args.judge:
            fail(f"--rewards {part.name} asks a judge; give --judge, and --judge-url")
        _check_prompts(part, prompts, args.prompts)
        _announce(part, prompts, accelerator)
    has_verifier = any(name in VERIFIERS for name in names)
    if getattr(args, "pass_at_k", 0):
        if not args.pass_at_k <= group_size:
            fail(f"--pass-at-k {args.pass_at_k} must be at most --group-size {group_size}")
        if not has_verifier:
            fail(f"--pass-at-k needs to know what is right; add one of {', '.join(VERIFIERS)} to --rewards")
    if "prime" in names and not has_verifier:
        fail(f"--rewards prime learns from what is right; add one of {', '.join(VERIFIERS)}")
    if "prime" in names and (getattr(args, "beta", 1.0) == 0 or getattr(args, "kl", "") == "none"):
        fail(
            "--rewards prime compares with the reference model, which --beta 0 leaves out, and --kl none of PPO; "
            "give a small weight"
        )
    if any(part.name == "format" and part.weight for part in parts) and args.on_bad_format == "floor":
        fail(
            "--rewards format does nothing with --on-bad-format floor, which puts a floor in place of all rewards of a "
            "malformed completion; add --on-bad-format score"
        )
    if "preference" in names:
        from rewards.preference import check_preference

        check_preference(args)
    if "process" in names:
        from rewards.dense import check_process_model

        check_process_model(next(part for part in parts if part.name == "process").options["model"])
    if "code" in names:
        from rewards import sandbox

        sandbox.check(args.unsafe_code)


def _check_prompts(part: Part, prompts: list[dict], source: str) -> None:
    """Exits with 2 if no prompt has the field that a reward reads, or one has something there that it cannot read."""
    with_field = prompts
    if part.field:
        with_field = [prompt for prompt in prompts if has_field(prompt, part.field)]
        if not with_field:
            fail(f"--rewards {part.name}: no row of {source} has the field {part.field!r}")
    read_field = getattr(part.function, "read_field", None)
    if read_field:  # a function that raises ValueError for a row whose field it cannot read
        for prompt in with_field:
            or_fail(read_field, prompt)


def _announce(part: Part, prompts: list[dict], accelerator) -> None:
    n_prompts = len(prompts)
    if part.field:
        n_prompts = sum(has_field(prompt, part.field) for prompt in prompts)
    rule = "gate" if part.is_gate else f"weight {part.weight:g}"
    options = "".join(f", {option}={value!r}" for option, value in part.options.items())
    asks = ", asks the judge" if "judge" in part.asks else ""
    accelerator.print(
        f"reward {part.name}: {rule}{options}; applies to {n_prompts} of {len(prompts)} prompts{asks}"
    )


def try_judges(args, run: Path, accelerator) -> None:
    """Asks the judges of --rewards and --gold for one token each; exits with 2 if no reply comes.

    Call it before a model is loaded. `run`: the folder of their replies, whose cost counts in the budget.
    """
    parts = read_parts(args)
    if any("judge" in part.asks for part in parts) and accelerator.is_main_process:
        from rewards.judged import judge_endpoint
        from rlmt.endpoint import try_endpoint

        try_endpoint(judge_endpoint(args, parts, run), "--judge", args.dry_run)
    if args.gold.startswith("judge:"):
        from rewards.gold import try_judge

        try_judge(args, run)


# --- 3. from values to one total


def call(part: Part, rows: list[dict], given: dict) -> Values:
    """Calls a reward function with its options and what it asks for of CONTEXT; checks what it returns."""
    asked = {key: given[key] for key in part.asks}
    found = part.function(rows, **asked, **part.options)
    expected = (
        f"reward {part.name} must return a list with a finite number or None for each of {len(rows)} rows"
    )
    if not isinstance(found, list) or len(found) != len(rows):
        raise ValueError(f"{expected}, not {type(found).__name__} {str(found)[:80]}")
    values = []
    for row, value in zip(rows, found, strict=True):
        if value is not None:
            if not isinstance(value, numbers.Real) or not isfinite(value):
                raise ValueError(f"{expected}, not {str(value)[:80]!r} for row {row['id']}")
            value = float(value)
        values.append(value)
    return values


def verdict(row: dict, values: dict[str, float | None], parts: list[Part]) -> float | None:
    """Returns what the verifiers say of a row: 1 right, 0 wrong, None where none of them has a value.

    A row is right if it has the whole value of the first verifier that has one. A penalty, or a part of the tests, is wrong.
    So is a row that gets a floor, which a judge has not seen.
    """
    by_name = {part.name: part for part in parts}
    for name, field in VERIFIERS.items():
        if name not in by_name or not has_field(row, field):
            continue
        if row["gets_floor"]:
            return 0.0
        if values[name] is not None:
            return float(values[name] >= by_name[name].options.get("value", 1.0))
    return None


@dataclass
class Scored:
    """What `combine` needs of a completion."""

    values: dict[str, float | None]
    """By the name of a part; None where there is no value."""
    applies: dict[str, bool]
    """Whether the prompt has the field that a part reads."""
    gets_floor: bool
    """Malformed, with --on-bad-format floor: it counts in no lowest total of the others."""


def combine(
    scored: list[Scored], parts: list[Part], group_size: int, margin: float
) -> tuple[Values, list[dict[str, float | None]]]:
    """Returns the total of each completion, and what each part contributes to it. Contributions add up to the total.

    A part with a weight adds weight * value. Where a part does not apply it adds 0 and stops nothing. There is no total
    where a part that applies has no value, or where no part with a weight applies. A completion that fails a gate (its
    value is below 1) gets the lowest total of its group's others that pass all gates, minus `margin`, whatever else it has
    or lacks; one that gets a floor likewise, below those of all others. Without others the lowest is 0.
    """
    totals = []
    contributions = []
    for one in scored:
        added = {}
        for part in parts:
            value = one.values[part.name]
            if not one.applies[part.name]:
                added[part.name] = 0.0
            elif value is None or one.gets_floor:
                added[part.name] = None
            elif part.is_gate:  # it acts on whole groups, see _close_gates
                added[part.name] = 0.0
            else:
                added[part.name] = part.weight * value
        weighted = [part for part in parts if not part.is_gate and one.applies[part.name]]
        is_known = bool(weighted) and None not in added.values()
        totals.append(sum(added.values()) if is_known else None)
        contributions.append(added)

    for group in in_groups(list(range(len(scored))), group_size):
        # gates first: a floor lies below them too
        _close_gates(group, scored, parts, totals, contributions, margin)
        known = [totals[i] for i in group if totals[i] is not None and not scored[i].gets_floor]
        for i in group:
            if scored[i].gets_floor:
                totals[i] = min(known, default=0.0) - margin
                contributions[i] = dict.fromkeys(contributions[i])
    return totals, contributions


def _close_gates(
    group: list[int], scored: list, parts: list[Part], totals: Values, contributions: list, margin: float
) -> None:
    """Puts the completions that fail a gate below the others of their group, in place.

    The first gate that one fails contributes the difference.
    """
    failed = {}
    for i in group:
        for part in parts:
            value = scored[i].values[part.name]
            is_closed = part.is_gate and scored[i].applies[part.name] and not scored[i].gets_floor
            if is_closed and value is not None and value < 1:
                failed.setdefault(i, part.name)
    passing = [totals[i] for i in group if totals[i] is not None and i not in failed]
    floor = min(passing, default=0.0) - margin
    for i, gate in failed.items():
        added = {name: value or 0.0 for name, value in contributions[i].items()}
        added[gate] += floor - sum(added.values())
        contributions[i] = added
        totals[i] = sum(added.values())
