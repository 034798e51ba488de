"""Rewards by name, as in `--rewards math:1 overlong:0.5 --reward-args overlong.buffer=512`.

REWARDS says in which file a name's function is; only what a run names is imported. Such a function takes the
completions of this process as rows, those of one prompt next to each other, and returns a number or None for
each of them. None means that there is no value, because a judge failed; it is never a low score. A row is
{"id", "messages", "response", "status", "n_tokens", ...} and the fields of its prompt's row. It asks for more by
the names of its parameters: those of CONTEXT are filled in, and a parameter with a default is an option of
`--reward-args`. A function that asks for the judge runs on the main process, on the rows of all.

To use a reward of yours, write the function in any file:

    def brief(rows, per_token=0.01):
        return [-per_token * row["n_tokens"] for row in rows]

    python train_grpo.py --rewards preference:1 file.py:brief:1 --reward-args brief.per_token=0.02

To give it to everybody, write it into a file of rewards/ and add a line to REWARDS. If it verifies an answer,
add the field of the prompt's row that it reads to VERIFIERS.

The way of a reward: `read_parts` reads the flags, scorer.py computes the value of each part, `add_up` makes
one total of them, and `set_floors` puts some totals below the others of their group.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, isnan, nan
from pathlib import Path
from typing import get_type_hints

from rlmt.run import load_function
from utils import fail, or_fail

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


def can_collapse(args) -> bool:
    """Tells whether a reward with a weight is made of the policy's own answers, see unsupervised.Collapse."""
    return any(part.name in UNSUPERVISED and part.weight for part in read_parts(args))


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


def reward_names(args) -> list[str]:
    """Returns the names in `args.rewards`."""
    return [part.name for part in read_parts(args)]


def read_parts(args) -> list[Part]:
    """Reads `args.rewards` and `args.reward_args`; exits with 2 for what cannot be.

    For a script without --rewards it is the preference alone.
    """
    parts = {}
    for word in getattr(args, "rewards", ["preference:1"]):
        part = _read_part(word)
        if part.name in parts:
            fail(f"--rewards {word}: {part.name} is named twice; leave one out, or rename your function")
        parts[part.name] = part
    for word in getattr(args, "reward_args", ()):
        _set_option(word, parts)
    return list(parts.values())


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
        options[option] = TypeAdapter(kind).validate_strings(text)
    except ValidationError as error:
        fail(f"--reward-args {word}: {error.errors()[0]['msg']}")


# --- 2. checks, before a model is loaded


def reward_model_tokenizers(args) -> list:
    """Returns the tokenizers of the reward models of --rewards and --gold, which read each prompt.

    Exits with 2 if one of them cannot score the format of the run.
    """
    tokenizers = []
    if "preference" in reward_names(args):
        from rewards.preference import check_preference

        tokenizers.append(check_preference(args))
    if args.gold and not args.gold.startswith("judge:") and ".py:" not in args.gold:
        from rewards.preference import RewardModel

        tokenizers.append(or_fail(RewardModel.check, args.gold, "", "response", "plain"))
    return tokenizers


def check(args, prompts: list[dict], accelerator) -> None:
    """Checks the rewards and the gold of GRPO or PPO, and prints to how many prompts each reward applies.

    Exits with 2 if something is wrong.
    """
    parts = {part.name: part for part in read_parts(args)}
    for part in parts.values():
        _check_part(part, args, prompts, accelerator)
    needs_verdicts = "prime" in parts or getattr(args, "scale_rewards", "") == "pass_at_k"
    if needs_verdicts and not VERIFIERS.keys() & parts.keys():
        fail(
            "--rewards prime and --scale-rewards pass_at_k need to know what is right; add one of "
            f"{', '.join(VERIFIERS)} to --rewards"
        )
    if "prime" in parts and (getattr(args, "beta", 1.0) == 0 or getattr(args, "kl", "") == "none"):
        fail(
            "--rewards prime compares with the reference model; use --beta above 0 (GRPO) or another --kl (PPO)"
        )
    if args.gold:
        from rewards.gold import check_gold

        check_gold(args, args.prompts_per_step * getattr(args, "group_size", 1), accelerator)
    if "process" in parts:
        if not parts["process"].options["model"]:
            fail("--rewards process needs --reward-args process.model=file.py:function")
        load_function(parts["process"].options["model"])
    if "code" in parts:
        from rewards import sandbox

        sandbox.check(parts["code"].options["unsafe"])


def _check_part(part: Part, args, prompts: list[dict], accelerator) -> None:
    if "group_size" in part.asks and getattr(args, "group_size", 1) == 1:
        fail(f"--rewards {part.name} compares the completions of one prompt; PPO has one of each")
    if "judge" in part.asks and not args.judge:
        fail(f"--rewards {part.name} asks a judge; give --judge, and --judge-url")
    with_field = [prompt for prompt in prompts if part.applies(prompt)]
    if not with_field:
        fail(f"--rewards {part.name}: no row of {args.prompts} has the field {part.field!r}")
    read_field = getattr(part.function, "read_field", None)
    if read_field:  # raises ValueError for a row whose field it cannot read
        for prompt in with_field:
            or_fail(read_field, prompt)
    rule = "gate" if part.weight is None else f"weight {part.weight:g}"
    accelerator.print(
        f"reward {part.name}: {rule}, options {part.options}; applies to {len(with_field)} of {len(prompts)} prompts"
    )


def try_judges(args, prompts: list[dict], run: Path, accelerator) -> None:
    """Sends the judges of --rewards and --gold their first request; exits with 2 if no reply comes.

    Call it before a model is loaded, so that a wrong key or URL costs nothing. `run`: the folder of their
    replies, whose cost counts in the budget.
    """
    for part in read_parts(args):
        if "judge" in part.asks and accelerator.is_main_process:
            from rewards import judged

            prompt = next(filter(part.applies, prompts))
            ask = functools.partial(call, part, group_size=1, max_tokens=args.max_completion_tokens)
            judged.try_judge(judged.judge_endpoint(args, run), ask, prompt, "--judge", args.overwrite)
    from rewards.gold import try_judge

    try_judge(args, prompts[0], run)


# --- 3. from values to one total


def call(part: Part, rows: list[dict], judge, group_size: int, max_tokens: int) -> Values:
    """Calls a reward function on the rows to which it applies, with its options and what it asks for of
    CONTEXT; checks what it returns."""
    given = {"judge": judge, "group_size": group_size, "max_tokens": max_tokens}
    asked = {key: given[key] for key in part.asks}
    places = [place for place, row in enumerate(rows) if part.applies(row)]
    found = part.function([rows[place] for place in places], **asked, **part.options)
    try:
        is_right = len(found) == len(places) and all(value is None or isfinite(value) for value in found)
    except TypeError:  # no list, or no numbers
        is_right = False
    if not is_right:
        fail(
            f"reward {part.name} must return a list with a finite number or None for each of {len(places)} rows, "
            f"not {str(found)[:200]}"
        )
    values = [None] * len(rows)
    for place, value in zip(places, found, strict=True):
        if value is not None:
            values[place] = float(value)
    return values


def verdict(row: dict, values: dict[str, float | None]) -> float | None:
    """Returns what the verifiers say of a row: 1 right, 0 wrong, None where none of them has a value.

    A row is right if it has the whole value of the first verifier that has one. A penalty, or a part of the
    tests, is wrong. So is a row that gets a floor, which a judge has not seen.
    """
    for name, field in VERIFIERS.items():
        if name not in values or not has_field(row, field):
            continue
        if row["gets_floor"]:
            return 0.0
        if values[name] is not None:
            return float(values[name] >= 1)
    return None


def add_up(row: dict, values: dict[str, float | None], parts: list[Part]) -> tuple[float, bool]:
    """Returns the sum of weight * value over the parts that apply to a row, and whether it gets a floor
    instead.

    It gets one if it fails a gate, too: a value below 1. The sum is NaN where a part that applies has no
    value, or where no part with a weight applies.
    """
    gets_floor = row["gets_floor"]
    weighted = []
    for part in parts:
        value = values[part.name]
        if not part.applies(row):
            continue
        if value is None and part.weight == 0:  # of a label, which nothing rests on
            continue
        if value is None:
            weighted.append(nan)
        elif part.weight is None:
            gets_floor |= value < 1
        else:
            weighted.append(part.weight * value)
    total = nan
    if weighted:
        total = sum(weighted)
    return total, gets_floor


def set_floors(totals: list[tuple[float, bool]], group_size: int, margin: float) -> list[float]:
    """Returns the rewards: the sums of `add_up`, and as floor `margin` less than the lowest of the group's
    others.

    Without others the lowest is 0.
    """
    rewards = []
    for group in in_groups(totals, group_size):
        others = [total for total, gets_floor in group if not gets_floor and not isnan(total)]
        floor = min(others, default=0.0) - margin
        for total, gets_floor in group:
            if gets_floor:
                total = floor
            rewards.append(total)
    return rewards
