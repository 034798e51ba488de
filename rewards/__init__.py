"""Rewards by name, as in `--rewards math:1 overlong:soft --reward-args overlong.buffer=512`.

REWARDS says which function a name stands for. Such a function takes the completions of a step (rows) and
returns a number or None for each of them; shared.py says what a row is. It asks for more by the names of its
parameters: those of CONTEXT are filled in, and a parameter with a default is an option of `--reward-args`.

To use a reward of yours, write the function in any file:

    def brief(rows, per_token=0.01):
        return [-per_token * row["n_tokens"] for row in rows]

    python train_grpo.py --rewards preference:1 file.py:brief:1 --reward-args brief.per_token=0.02

To give it to everybody, write it into one of the files below and add a line to REWARDS. If it verifies an
answer, add the field of the prompt's row that it reads to VERIFIERS (shared.py).

    preference.py    a reward model, which the trainer loads
    verified.py      math, code, instructions: a program knows what is right
    references.py    bleu: words in common with reference answers
    judged.py        judge_mark, judge_yes, pairwise, rubric, factual: a language model judges
    unsupervised.py  majority, self_certainty, negative_entropy, format, length, repetition
    shaping.py       cosine, overlong, and pass@k for the training loop
    dense.py         process, prime: rewards on steps or tokens, which the trainer adds itself
    gold.py          a measure that nothing is trained on

    command_line.py  reads --rewards and --reward-args
    checks.py        what is checked before a model is loaded
    combining.py     how several rewards become one
    scorer.py        from completions to rewards, in the training loop
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from utils import or_fail
from rewards import judged, references, shaping, unsupervised, verified
from rewards.checks import check, judge_endpoint, judged_rewards, read_prompt_rows, try_judges
from rewards.combining import combine
from rewards.command_line import asked_for, functions_of, is_preference_alone, parse_spec
from rewards.command_line import reward_names, reward_options
from rewards.shared import VERIFIERS, Values, fields_of, has_field

__all__ = [
    "check",
    "combine",
    "load",
    "parse_spec",
    "reward_names",
    "reward_options",
    "try_judges",
    "VERIFIERS",
]

REWARDS = {
    "math": verified.math_answer,
    "code": verified.code,
    "instructions": verified.instructions,
    "bleu": references.bleu,
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
CONTEXT = {  # what a reward function may ask for
    "group_size": "completions of a prompt, which are neighbours in rows",
    "max_tokens": "the limit of a completion",
    "judge": "an Endpoint, with --judge",
    "correct": "what the verifiers say of each row: 1 right, 0 wrong, None unknown",
}

# Rewards that are models, not functions, with their options; preference.py and dense.py load them.
MODELS = {
    "preference": {"chat_template": "", "max_length": 0},
    "process": {"model": "", "separator": "\n"},  # the default of trl's PRMConfig
    "prime": {"beta": 0.05, "learning_rate": 1e-6},
}
DENSE = ("process", "prime")
KNOWN = (*MODELS, *REWARDS)
UNSUPERVISED = {"majority", "self_certainty", "negative_entropy"}  # with them a policy can collapse
RESERVED = ("gold", "missing", "truncated", "flat_groups", "pass_at_k")  # logged under names like a reward's


@dataclass
class Scores:
    """The rewards of the completions of a step. Every list has one entry a row."""

    totals: Values  # the reward to train on; None: there is none, and the row's advantage is 0
    parts: dict[str, Values]  # the value of every reward, by its name
    contributions: dict[str, Values]  # what every reward adds to the total
    correct: Values  # the verifiers' verdict: 1 right, 0 wrong, None unknown


def gets_floor(status: str, args) -> bool:
    """Tells whether a completion of this status gets a floor in place of its reward; scorer.py puts it there."""
    return status != "ok" and args.on_bad_format == "floor"


def load(args, run: Path) -> Callable[[list[dict], int], Scores] | None:
    """Builds the reward of a run from `args`, which `check` has checked.

    Returns a function of the rows of whole groups and the group size; None where the reward is the preference
    alone. A judge's replies are stored in the folder `run`.
    """
    spec = or_fail(parse_spec, args.rewards)
    if is_preference_alone(args, spec):
        return None
    spec = [(name, rule) for name, rule in spec if name not in DENSE]
    functions = functions_of(args)
    options = or_fail(reward_options, args)
    prompts = {prompt["id"]: prompt for prompt in read_prompt_rows(args)}
    context = {"max_tokens": args.max_completion_tokens}
    if judged_rewards(args):
        context["judge"] = judge_endpoint(args, run)

    def reward_function(rows: list[dict], group_size: int) -> Scores:
        rows = [prompts[row["id"]] | row for row in rows]
        for row in rows:
            row["gets_floor"] = gets_floor(row["status"], args)
        given = context | {"group_size": group_size}
        parts = {}
        need_verdicts = []  # rewards that read what the verifiers say, so they are called after them
        for name, _ in spec:
            if name == "preference":
                parts[name] = [row["rewards"]["preference"] for row in rows]
            elif "correct" in asked_for(functions[name]):
                need_verdicts.append(name)
            else:
                parts[name] = _call(name, functions[name], rows, given, options[name])

        given["correct"] = verdicts(parts, options, rows)
        for name in need_verdicts:
            parts[name] = _call(name, functions[name], rows, given, options[name])

        totals, contributions = combine(
            parts, spec, rows, group_size, args.normalise, args.format_margin, fields_of(options)
        )
        return Scores(totals, parts, contributions, given["correct"])

    return reward_function


def _call(name: str, function: Callable, rows: list[dict], given: dict, options: dict) -> Values:
    """Calls a reward function with its options and what it asks for of CONTEXT; checks what it returns."""
    asked = {key: given[key] for key in asked_for(function)}
    found = function(rows, **asked, **options)
    expected = f"reward {name} must return a list with a number or None for each of {len(rows)} rows"
    if not isinstance(found, list):
        raise ValueError(f"{expected}, not {type(found).__name__} {str(found)[:80]}")
    if len(found) != len(rows):
        raise ValueError(f"{expected}, not {len(found)}")
    values = []
    for row, value in zip(rows, found, strict=True):
        if value is not None and not isinstance(value, numbers.Real):
            raise ValueError(
                f"{expected}, not {type(value).__name__} {str(value)[:80]!r} for row {row['id']}"
            )
        values.append(value if value is None else float(value))
    return values


def verdicts(parts: dict[str, Values], options: dict[str, dict], rows: list[dict]) -> Values:
    """Returns what the verifiers say of each row: 1 right, 0 wrong, None where none of them has a value.

    A row is right if it has the whole value of the first verifier that has one. A penalty, or a part of the
    tests, is wrong. So is a row that gets a floor, which a judge has not seen.
    """
    correct = []
    for i, row in enumerate(rows):
        verdict = None
        for name, field in VERIFIERS.items():
            if name not in parts or not has_field(row, field):
                continue
            if row.get("gets_floor"):
                verdict = 0.0
                break
            if parts[name][i] is None:
                continue
            whole_value = options[name].get("value", 1.0)
            verdict = float(parts[name][i] >= whole_value)
            break
        correct.append(verdict)
    return correct
