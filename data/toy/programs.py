"""Toy programs for RLVR: "Take x, then add 3, then double it." -> def f(x): return (x + 3) * 2

    python -m data.toy.programs                    # writes data/toy/code_{traces,prompts,tasks}.jsonl
    python -m data.toy.programs --base-out results/toy/code-base  # data/toy/base with the words of these rows

The teacher of the traces builds the expression one step at a time. In a share of the places where parentheses
matter it forgets them, in the thinking and so in the response. Prompts and tasks have the fields `tests` and
`entry_point`, which the reward `code` runs in the sandbox. `judge` is the gold measure of eval_wildbench.py.
It reads the response with `ast` and works out + - * itself, so it shares nothing with that reward.
"""

import ast
import operator
import random
import re
from dataclasses import dataclass
from pathlib import Path

import tyro

from data.toy.files import SplitArgs, save, split_rows
from data.toy.world import GREETINGS

# kind of step: how a user says it. The kind is the sign and, if it is fixed, the number.
WORDING = {
    "+": ["add {}", "put {} on top"],
    "-": ["take {} away", "take {} from it"],
    "*2": ["double it"],
    "*3": ["triple it"],
}
KIND_OF = {form: kind for kind, forms in WORDING.items() for form in forms}
STARTS = ["Take x", "Please take x", "I have x"]
# percentiles of the hash
SPLITS = {"traces": range(0, 40), "prompts": range(40, 80), "tasks": range(80, 100)}
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

Steps = list[tuple[str, int]]  # (one of + - *, a number)


@dataclass
class Args(SplitArgs):
    slips: float = 0.6
    """Share of the parentheses that matter which the teacher forgets."""
    base_out: Path | None = None
    """Folder for data/toy/base with the words of these rows; with it, no rows are written."""


# --- 1. prompts and the teacher's answers


def write_prompt(rng: random.Random) -> tuple[str, Steps]:
    """Returns the user's text and its two or three steps, of different kinds."""
    kinds = rng.sample(list(WORDING), rng.randint(2, 3))
    steps = []
    for kind in kinds:
        number = int(kind[1:] or rng.randint(1, 20))
        steps.append((kind[0], number))
    spoken = []
    for kind, (_, number) in zip(kinds, steps, strict=True):
        spoken.append(rng.choice(WORDING[kind]).format(number))
    greeting = rng.choice(GREETINGS)
    start = rng.choice(STARTS)
    text = f"{greeting} {', then '.join([start, *spoken])}."
    return text.strip(), steps


def read_prompt(text: str) -> Steps:
    """Returns the steps that a prompt states; the inverse of `write_prompt`.

    Raises ValueError for a text that is not a prompt of this world.
    """
    clauses = text.removesuffix(".").split(", then ")[1:]
    steps = []
    for clause in clauses or [text]:  # a text without steps is not a prompt either
        kind = KIND_OF.get(re.sub(r"\d+", "{}", clause))
        if kind is None:
            raise ValueError(f"not a toy program: {text[:120]!r}")
        number = kind[1:] or re.search(r"\d+", clause)[0]
        steps.append((kind[0], int(number)))
    return steps


def apply(steps: Steps, x: int) -> int:
    """Returns what the steps make of x."""
    for sign, number in steps:
        x = SIGNS[sign](x, number)
    return x


def solve(steps: Steps, slips: float, rng: random.Random) -> tuple[str, str]:
    """Writes (thinking, response) as a teacher who forgets a share `slips` of the parentheses that matter."""
    code = "x"
    code_is_sum = False
    notes = []
    for sign, number in steps:
        needs_parentheses = sign == "*" and code_is_sum
        if needs_parentheses and rng.random() >= slips:
            code = f"({code})"
        code = f"{code} {sign} {number}"
        code_is_sum = sign != "*"
        notes.append(code)
    return " then ".join(notes), f"def f(x): return {code}"


# --- 2. what is right


def evaluate(node: ast.expr, x: int) -> int:
    """Computes an expression of x, integers, + - * and parentheses; raises ValueError for anything else."""
    match node:
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](evaluate(left, x), evaluate(right, x))
        case ast.Name("x"):
            return x
        case ast.Constant(int(value)):
            return value
    raise ValueError("beyond + - *")


def judge(messages: list[dict], response: str) -> dict:
    """Says whether the response's function does the steps of the prompt, for x from -9 to 9."""
    steps = read_prompt(messages[-1]["content"])
    function = re.match(r"\s*def f\(x\)\s*:\s*return\b\s*((?s:.*))", response)
    right = False
    if function:
        try:
            expression = ast.parse(function[1], mode="eval").body
            right = all(evaluate(expression, x) == apply(steps, x) for x in range(-9, 10))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # no expression of + - *
    return {"score": float(right), "checks": {"right": right}}


def gold(messages: list[dict], response: str) -> float:
    """Returns the judge's score, for --gold data/toy/programs.py:gold."""
    return judge(messages, response)["score"]


# --- 3. files


def write_files(args: Args) -> dict[str, list[dict]]:
    """Returns the rows of the three files by name. A program belongs to one split, whatever the seed."""

    def draw(rng):
        text, steps = write_prompt(rng)

        def other_fields(split: str) -> dict:
            if split == "traces":
                thinking, response = solve(steps, args.slips, rng)
                return {"thinking": thinking, "response": response, "teacher": "toy code"}
            tests = [f"assert f({x}) == {apply(steps, x)}" for x in (0, 1, 7, -4)]
            return {"source": "toy code", "tests": tests, "entry_point": "f"}

        return text, repr(steps), other_fields

    return split_rows("code", args, SPLITS, draw)


# --- 4. the words of the base model


def sample_texts() -> list[str]:
    """Returns prompts, thinking and responses in which every word of these rows occurs."""
    texts = []
    for row in write_files(Args(slips=0.0))["code_traces"]:
        texts += [row["messages"][0]["content"], row["thinking"], row["response"]]
    return texts


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.base_out:
        from data.toy.models import extend_base  # here: it loads torch

        extend_base(Path("data/toy/base"), args.base_out, sample_texts())
    else:
        save(write_files(args), args.out, args.seed)
