"""Reads --rewards and --reward-args: names, rules, functions and their options."""

import ast
import inspect
from collections.abc import Callable
from math import isfinite
from types import NoneType
from typing import Literal, get_args, get_origin

import rewards
from rlmt.run import load_function

# --- 1. --rewards


def split_word(word: str) -> tuple[str, str, str]:
    """Splits a word of --rewards into (path/to/file.py:function or "", name, rule).

    The rule of a user's reward may be left out.
    """
    path, is_own, rest = word.rpartition(".py:")
    name, _, rule = rest.partition(":")
    if not is_own:
        return "", name, rule
    return f"{path}.py:{name}", name, rule or "1"


def parse_spec(words: list[str]) -> list[tuple[str, float | str]]:
    """Reads the words of --rewards into pairs of a name and a weight, or gate, veto, soft (see `combine`).

    ["math:1.0", "format:gate", "own.py:brief:2"] becomes [("math", 1.0), ("format", "gate"), ("brief", 2.0)].
    ValueError says what is wrong.
    """
    spec = {}
    for word in words:
        source, name, rule = split_word(word)
        is_ours = name in rewards.KNOWN
        if source and (is_ours or name in rewards.RESERVED):
            raise ValueError(f"--rewards {word}: {name} is a name of ours; give the function another one")
        if not source and not is_ours:
            raise ValueError(
                f"--rewards {word}: there is no reward {name!r}; there are {', '.join(rewards.KNOWN)}, "
                "and functions of your own as path/to/file.py:function:WEIGHT"
            )
        if name in spec:
            raise ValueError(f"--rewards {word}: {name} is named twice; leave one out")
        may_be_soft = bool(source) or name == "overlong"
        spec[name] = _parse_rule(word, name, rule, may_be_soft)

    outcome_rules = [rule for name, rule in spec.items() if name not in rewards.DENSE]
    if not any(isinstance(rule, float) and rule != 0 for rule in outcome_rules):
        raise ValueError("--rewards: no outcome has a weight, so there is nothing to maximise; e.g. math:1.0")
    return list(spec.items())


def _parse_rule(word: str, name: str, rule: str, may_be_soft: bool) -> float | str:
    if rule in ("gate", "veto") or (rule == "soft" and may_be_soft):
        if name in rewards.DENSE:
            raise ValueError(f"--rewards {word}: {name} has rewards on tokens and takes a weight only")
        return rule
    weight = _finite(rule)
    if weight is None:
        soft = f", {name}:soft" if may_be_soft else ""
        raise ValueError(
            f"--rewards {word}: write {name}:WEIGHT (a finite number){soft}, {name}:gate or {name}:veto"
        )
    return weight


def reward_names(args) -> list[str]:
    """Returns the names in `args.rewards`. It is the preference alone where a script has no choice."""
    return [split_word(word)[1] for word in getattr(args, "rewards", ["preference"])]


def is_preference_alone(args, spec: list[tuple[str, float | str]]) -> bool:
    """Tells whether the reward is the reward model's score as it is, neither weighted nor normalised.

    Dense rewards come on top.
    """
    outcomes = [(name, rule) for name, rule in spec if name not in rewards.DENSE]
    return outcomes == [("preference", 1.0)] and args.normalise == "none"


# --- 2. the functions


def functions_of(args) -> dict[str, Callable]:
    """Returns {name: function} for the rewards in `args.rewards` that are functions, not models.

    Exits with 2 if a user's file lacks the function.
    """
    functions = {}
    for word in getattr(args, "rewards", ()):
        source, name, _ = split_word(word)
        if source:
            functions[name] = load_function(source)
        elif name in rewards.REWARDS:
            functions[name] = rewards.REWARDS[name]
    return functions


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Returns the named parameters of a reward function after `rows`."""
    after_rows = list(inspect.signature(function).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in after_rows if parameter.kind in named}


def asked_for(function: Callable) -> list[str]:
    """Returns the keys of rewards.CONTEXT that a reward function has as parameters."""
    return [name for name in parameters(function) if name in rewards.CONTEXT]


# --- 3. --reward-args


def reward_options(args) -> dict[str, dict]:
    """Returns {reward: {option: value}} for every reward in `args.rewards`.

    An option has its default, unless `args.reward_args`, words of the form NAME.OPTION=VALUE, sets it.
    ValueError says what is wrong.
    """
    functions = functions_of(args)
    options = {}
    annotations = {}
    for name in reward_names(args):
        options[name] = dict(rewards.MODELS.get(name, {}))
        if name not in functions:
            continue
        for key, parameter in parameters(functions[name]).items():
            if key not in rewards.CONTEXT and parameter.default is not parameter.empty:
                options[name][key] = parameter.default
                annotations[name, key] = parameter.annotation

    for word in getattr(args, "reward_args", ()):
        name, option, text = _split_option(word, options)
        annotation = annotations.get((name, option))
        try:
            options[name][option] = parse_value(text, options[name][option], annotation)
        except ValueError as e:
            raise ValueError(f"--reward-args {word}: {e}") from None
    return options


def _split_option(word: str, options: dict[str, dict]) -> tuple[str, str, str]:
    """Splits NAME.OPTION=VALUE. ValueError if there is no such reward or option."""
    place, equals, text = word.partition("=")
    name, dot, option = place.partition(".")
    if not equals or not dot:
        raise ValueError(f"--reward-args {word}: write NAME.OPTION=VALUE, such as math.value=10")
    if name not in options:
        reason = "it is not in --rewards" if name in rewards.KNOWN else "there is no such reward"
        raise ValueError(f"--reward-args {word}: {name}: {reason}; --rewards has {', '.join(options)}")
    if option not in options[name]:
        known = ", ".join(options[name]) or "none"
        raise ValueError(f"--reward-args {word}: {name} has no option {option!r}; its options: {known}")
    return name, option, text


def parse_value(text: str, default, annotation):
    """Reads the value of an option by the type of its default, or by its annotation if the default is None.

    ValueError says what it must be.
    """
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

    if text.lower() in ("true", "false"):
        text = text.title()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if kind is float:
        value = _finite(text)
    fits = type(value) is kind
    if fits and kind is tuple:
        numbers = [part for part in value if type(part) in (int, float) and isfinite(part)]
        fits = len(numbers) == len(value) == len(default)
    if not fits:
        raise ValueError(f"{text!r} cannot be read as {kind.__name__}; its default is {default!r}")
    return value


def _finite(text: str) -> float | None:
    """Reads a number; None if the text is not one, or not a finite one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
