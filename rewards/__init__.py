"""Rewards by name, as in `--rewards math:1 format:gate --reward-args math.no_eos=-1`.

A reward is a function of rows that returns one value a row (shared.py says what rows and values are):

    preference.py    a reward model, which the trainer loads
    verified.py      math, code, instructions: a program knows what is right
    judged.py        judge_mark, judge_yes, pairwise, rubric, factual: a language model judges
    unsupervised.py  majority, self_certainty, negative_entropy, format, length, repetition
    shaping.py       cosine, overlong, and pass@k for the training loop
    dense.py         process, prime: rewards on steps or tokens, which the trainer adds by itself
    combining.py     how several rewards become one
    gold.py          what is measured and never trained on

To use a reward of yours, write a function in any file and name it path/to/file.py:function:WEIGHT:

    def brief(rows, per_token=0.01):
        return [-per_token * row["n_tokens"] for row in rows]

    python train_grpo.py --rewards preference:1 file.py:brief:1 --reward-args brief.per_token=0.02

Besides rows it may ask for the parameters of CONTEXT. A parameter with a default is an option, which
--reward-args sets. To give a reward to everybody, write the function into one of the files above and add a
line to REWARDS; if it reads a field of the prompt's row, add that to FIELDS.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from accelerate import PartialState

import runs
from endpoint import Endpoint
from rewards import gold, judged, preference, shaping, unsupervised, verified
from rewards.combining import combine
from rewards.options import parse_value
from rewards.shared import FIELDS, Values
from rows import check_ids, read_rows

REWARDS = {
    "math": verified.math_answer,
    "code": verified.code,
    "instructions": verified.instructions,
    "factual": judged.factual,
    "judge_mark": judged.judge_mark,
    "judge_yes": judged.judge_yes,
    "pairwise": judged.pairwise,
    "rubric": judged.rubric,
    "majority": unsupervised.majority,
    "self_certainty": unsupervised.self_certainty,
    "negative_entropy": unsupervised.negative_entropy,
    "format": unsupervised.good_format,
    "length": unsupervised.length,
    "repetition": unsupervised.repetition,
    "cosine": shaping.cosine,
    "overlong": shaping.overlong,
}
# options of the reward model and of the rewards of dense.py, with their defaults
PREFERENCE = {"chat_template": "", "max_length": 0}
DENSE = {"process": {"model": ""}, "prime": {"beta": 0.05, "learning_rate": 1e-6}}
KNOWN = ("preference", *DENSE, *REWARDS)
UNSUPERVISED = {"majority", "self_certainty", "negative_entropy"}  # a policy can exploit these
RESERVED = ("gold", "missing", "truncated", "flat_groups", "pass_at_k")  # logged under names like a reward's
CONTEXT = {
    "group_size": "completions of a prompt, which are neighbours in rows",
    "max_tokens": "the limit of a completion",
    "judge": "an Endpoint, with --judge",
    "correct": "what the verifiers say of each row: 1 right, 0 wrong, None unknown",
}


@dataclass
class Scores:
    """The rewards of the completions of a step. Every list has one entry a row."""

    totals: Values  # the reward to train on; None: there is none, and nothing must be learned from the row
    parts: dict[str, Values]  # the value of every reward, by its name
    contributions: dict[str, Values]  # what every reward adds to the total
    correct: Values  # the verifiers' verdict: 1 right, 0 wrong, None unknown
    indicators: dict[str, float]  # unsupervised.collapse_indicators, with an unsupervised reward; else empty


# --- 1. what the command line says


def _parse_word(word: str) -> tuple[str, str, str]:
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
        source, name, rule = _parse_word(word)
        if source and name in (*KNOWN, *RESERVED):
            raise ValueError(f"--rewards {word}: {name} is a name of ours; give the function another one")
        if not source and name not in KNOWN:
            raise ValueError(
                f"--rewards {word}: there is no reward {name!r}; there are {', '.join(KNOWN)}, "
                "and functions of your own as path/to/file.py:function:WEIGHT"
            )
        if name in spec:
            raise ValueError(f"--rewards {word}: {name} is named twice")
        spec[name] = _parse_rule(word, name, rule, may_be_soft=bool(source) or name == "overlong")
    outcomes = [rule for name, rule in spec.items() if name not in DENSE]
    if not any(isinstance(rule, float) and rule for rule in outcomes):
        raise ValueError("--rewards: no outcome has a weight, so there is nothing to maximise; e.g. math:1.0")
    return list(spec.items())


def _parse_rule(word: str, name: str, rule: str, may_be_soft: bool) -> float | str:
    if rule in ("gate", "veto") or (rule == "soft" and may_be_soft):
        if name in DENSE:
            raise ValueError(f"--rewards {word}: {name} has rewards on tokens and takes a weight only")
        return rule
    try:
        weight = float(rule)
    except ValueError:
        weight = float("nan")
    if not isfinite(weight):
        raise ValueError(
            f"--rewards {word}: write {name}:WEIGHT (a finite number), {name}:gate or {name}:veto "
            "(overlong also overlong:soft)"
        )
    return weight


def reward_names(args) -> set[str]:
    """Returns the names in `args.rewards`. It is the preference alone where a script has no choice."""
    return {_parse_word(word)[1] for word in getattr(args, "rewards", ["preference"])}


def _functions(args) -> dict[str, Callable]:
    """Returns the function of every reward in `args.rewards` that is one, by name.

    Exits with 2 if a file has none.
    """
    functions = {}
    for word in getattr(args, "rewards", ()):
        source, name, _ = _parse_word(word)
        if source:
            functions[name] = _load_once(source)
        elif name in REWARDS:
            functions[name] = REWARDS[name]
    return functions


@functools.cache
def _load_once(source: str) -> Callable:
    """Loads a user's function: its file may load a model of its own."""
    return runs.load_function(source)


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Returns the named parameters of a reward function after `rows`."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in parameters if parameter.kind in named}


def reward_options(args) -> dict[str, dict]:
    """Returns {reward: {option: value}} for every reward in `args.rewards`.

    The defaults hold where `args.reward_args`, words of the form NAME.OPTION=VALUE, says nothing else.
    ValueError says what is wrong.
    """
    functions = _functions(args)
    options = {}
    types = {}
    for name in reward_names(args):
        options[name] = dict(DENSE.get(name, {}))
        if name not in functions:
            continue
        for key, parameter in _parameters(functions[name]).items():
            if key not in CONTEXT and parameter.default is not parameter.empty:
                options[name][key] = parameter.default
                types[name, key] = parameter.annotation
    if "preference" in options:
        options["preference"] = dict(PREFERENCE)

    for word in getattr(args, "reward_args", ()):  # DPO and RLVER have a reward model only
        place, equals, text = word.partition("=")
        name, dot, option = place.partition(".")
        if not equals or not dot:
            raise ValueError(f"--reward-args {word}: write NAME.OPTION=VALUE, such as math.no_eos=-1")
        if name not in options:
            there = "it is not in --rewards" if name in KNOWN else "there is no such reward"
            raise ValueError(f"--reward-args {word}: {name}: {there}; --rewards has {', '.join(options)}")
        if option not in options[name]:
            known = ", ".join(options[name]) or "none"
            raise ValueError(f"--reward-args {word}: {name} has no option {option!r}; its options: {known}")
        try:
            options[name][option] = parse_value(text, options[name][option], types.get((name, option)))
        except ValueError as e:
            raise ValueError(f"--reward-args {word}: {text!r} is not {e}") from None
    return options


# --- 2. checks before anything is loaded


def check(args) -> None:
    """Checks the rewards of `args` (of train_grpo.py or train_ppo.py) before any model is loaded.

    Prints how many prompts each reward applies to. Exits with 2 if something is wrong.
    """
    spec = runs.or_fail(parse_spec, args.rewards)
    functions = _functions(args)
    for name, function in functions.items():
        if name not in REWARDS:
            _check_signature(name, function)
    options = runs.or_fail(reward_options, args)
    for name, values in options.items():
        if name in FIELDS and values.get("value", 1.0) <= 0:
            runs.fail(
                f"--reward-args {name}.value must be above 0; "
                f"to punish what is right, give {name} a weight below 0"
            )

    wanted = {name: _parameters(function).keys() for name, function in functions.items()}
    judged_names = [name for name in wanted if "judge" in wanted[name]]
    _check_judge_flags(args, bool(judged_names))
    preference.check(args)
    gold.check(args)
    verifiers = FIELDS.keys() & functions.keys()
    group_size = getattr(args, "group_size", 1)  # PPO samples one completion a prompt
    for name in wanted:
        if group_size == 1 and "group_size" in wanted[name]:
            runs.fail(f"--rewards {name} compares the completions of one prompt; PPO has one of each")
        if name in judged_names and not args.judge:
            runs.fail(f"--rewards {name} asks a judge; give --judge, and --judge-url")
        if "correct" in wanted[name] and not verifiers:
            runs.fail(f"--rewards {name} needs to know what is right; add one of {', '.join(FIELDS)}")
    k = getattr(args, "pass_at_k", 0)
    if k and not 1 <= k <= group_size:
        runs.fail(f"--pass-at-k {k} must be from 1 to --group-size {group_size}")
    if k and not verifiers:
        runs.fail(f"--pass-at-k needs to know what is right; add one of {', '.join(FIELDS)} to --rewards")
    if not _is_preference_alone(args, spec):
        _check_prompts(args, functions, judged_names)


def _check_signature(name: str, function: Callable) -> None:
    """Exits with 2 if a user's reward cannot be called with rows and what it asks for of CONTEXT."""
    try:
        asked = {key: None for key in _parameters(function) if key in CONTEXT}
        inspect.signature(function).bind([], **asked)
    except (TypeError, ValueError) as e:
        runs.fail(f"--rewards: {name} must take rows and, if it wants, {', '.join(CONTEXT)} ({e})")


def _check_judge_flags(args, asks_judge: bool) -> None:
    """Exits with 2 for a flag of the judge that would do nothing."""
    of_judge = "" if asks_judge else "without a reward that asks one"
    of_cost = "" if asks_judge or args.gold.startswith("judge:") else "without a judge"
    runs.refuse_unused(
        {"--judge": of_judge, "--judge-url": of_judge, "--budget": of_cost, "--price": of_cost}
    )


def _check_prompts(args, functions: dict[str, Callable], judged_names: list[str]) -> None:
    """Prints how many prompts each reward applies to; exits with 2 if that is none."""
    rows = _read_prompts(args)
    for name in functions:
        field = FIELDS.get(name)
        n_rows = len(rows)
        if field:
            n_rows = sum(row.get(field) is not None for row in rows)
        if not n_rows:
            runs.fail(f"--rewards {name}: no row of {args.prompts} has the field {field!r}")
        calls = ""
        if name in judged_names:
            calls = ", two calls an opponent" if name == "pairwise" else ", one call a completion"
        PartialState().print(f"reward {name}: applies to {n_rows} of {len(rows)} prompts{calls}")


def _is_preference_alone(args, spec: list[tuple[str, float | str]]) -> bool:
    """Whether the reward is what the reward model says, neither weighted nor normalised.

    Dense rewards come on top.
    """
    outcomes = [part for part in spec if part[0] not in DENSE]
    return outcomes == [("preference", 1.0)] and args.normalise == "none"


def _read_prompts(args) -> list[dict]:
    prompts = read_rows(args.prompts, "messages")
    check_ids(args.prompts, prompts)
    return prompts


# --- 3. the reward of a run


def load(args, run: Path) -> Callable[[list[dict], int], Scores] | None:
    """Builds the reward of `args`, which `check` has checked.

    Returns a function of the rows of whole groups and the group size. None where the reward is the preference
    alone. A judge's replies are stored in the folder `run`.
    """
    spec = runs.or_fail(parse_spec, args.rewards)
    if _is_preference_alone(args, spec):
        return None
    spec = [part for part in spec if part[0] not in DENSE]
    functions = _functions(args)
    options = runs.or_fail(reward_options, args)
    asks_what_is_right = {name for name in functions if "correct" in _parameters(functions[name])}
    verifiers_first = sorted(spec, key=lambda part: part[0] in asks_what_is_right)
    prompts = {row["id"]: row for row in _read_prompts(args)}
    context = {"max_tokens": args.max_completion_tokens}
    if args.judge:
        store = run / "judge.jsonl"
        context["judge"] = Endpoint(args.judge, store, args.judge_url, budget=args.budget, price=args.price)

    def compose(rows: list[dict], group_size: int) -> Scores:
        rows = [prompts[row["id"]] | row for row in rows]
        given = context | {"group_size": group_size}
        parts = {}
        for name, _ in verifiers_first:
            if name == "preference":
                parts[name] = [row["rewards"]["preference"] for row in rows]
                continue
            if name in asks_what_is_right:
                given["correct"] = verdicts(parts, options, rows)
            parts[name] = _evaluate(name, functions[name], rows, given, options[name])

        totals, contributions = combine(parts, spec, rows, group_size, args.normalise, args.format_margin)
        correct = verdicts(parts, options, rows)
        indicators = {}
        if UNSUPERVISED & parts.keys():
            indicators = unsupervised.collapse_indicators(rows, group_size)
        known = {name: value for name, value in indicators.items() if value is not None}
        return Scores(totals, parts, contributions, correct, known)

    return compose


def _evaluate(name: str, function: Callable, rows: list[dict], given: dict, options: dict) -> Values:
    """Calls a reward function with what it asks for, and checks what it returns."""
    asked = {key: given[key] for key in _parameters(function) if key in given}
    values = function(rows, **asked, **options)
    is_list = isinstance(values, list) and all(isinstance(value, int | float | None) for value in values)
    if is_list and len(values) == len(rows):
        return values
    found = len(values) if is_list else f"{type(values).__name__} {str(values)[:80]}"
    raise ValueError(
        f"reward {name} must return a list with a number or None for each of {len(rows)} rows, not {found}"
    )


def verdicts(parts: dict[str, Values], options: dict[str, dict], rows: list[dict]) -> Values:
    """Returns what the verifiers say of each row: 1 right, 0 wrong, None where none of them has a value.

    A row is right if it has the whole value of the first verifier that has one. A penalty, or a part of the
    tests, is wrong.
    """
    correct = []
    for i, row in enumerate(rows):
        verdict = None
        for name, field in FIELDS.items():
            value = parts[name][i] if name in parts else None
            if value is not None and row.get(field) is not None:
                verdict = float(value >= options[name].get("value", 1.0))
                break
        correct.append(verdict)
    return correct
