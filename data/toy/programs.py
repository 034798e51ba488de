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
STARTS = ["Take x", "Please take x", "I have x"]
SPLITS = {
    "traces": range(0, 40),
    "prompts": range(40, 80),
    "tasks": range(80, 100),
}  # percentiles of the hash
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

Steps = list[tuple[str, int]]  # (one of + - *, a number)


@dataclass
class Args(SplitArgs):
    slips: float = 0.6
    """Share of the parentheses that matter which the teacher forgets."""
    model: Path = Path("data/toy/base")
    """Base model whose vocabulary --base-out extends."""
    base_out: Path | None = None
    """Folder for that model; with it, no rows are written."""


# --- 1. prompts and the teacher's answers


def write_prompt(rng: random.Random) -> tuple[str, Steps]:
    """Returns the user's text and its two or three steps, of different kinds."""
    kinds = rng.sample(list(WORDING), rng.randint(2, 3))
    steps = []
    for kind in kinds:
        sign = kind[0]
        number = int(kind[1:] or rng.randint(1, 20))
        steps.append((sign, number))
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
    kind_of = {}
    for kind, forms in WORDING.items():
        for form in forms:
            kind_of[form.format("N")] = kind

    steps = []
    for clause in text.removesuffix(".").split(", then ")[1:]:
        kind = kind_of.get(re.sub(r"\d+", "N", clause))
        if kind is None:
            raise ValueError(f"not a toy program: {text[:120]!r}")
        sign = kind[0]
        number = kind[1:] or re.search(r"\d+", clause)[0]
        steps.append((sign, int(number)))
    if not steps:
        raise ValueError(f"not a toy program: {text[:120]!r}")
    return steps


def apply(steps: Steps, x: int) -> int:
    """Returns what the steps make of x."""
    for sign, number in steps:
        if sign == "*":
            x *= number
        elif sign == "+":
            x += number
        else:
            x -= number
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
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left, x), evaluate(node.right, x))
    if isinstance(node, ast.Name) and node.id == "x":
        return x
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(f"{ast.unparse(node)[:80]} is beyond + - *")


def returned_expression(response: str) -> ast.expr:
    """Returns the expression of a `def f(x): return EXPRESSION`; raises ValueError for any other response."""
    try:
        tree = ast.parse(response.strip())
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not Python: {error}") from None
    problem = "not def f(x): return ..."
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise ValueError(problem)
    first = tree.body[0].body[0]
    if not isinstance(first, ast.Return) or first.value is None:
        raise ValueError(problem)

    # with 0 in place of its expression, the response must be this function to the letter: no other argument,
    # decorator, annotation or statement
    expression = first.value
    first.value = ast.Constant(0)
    if ast.dump(tree) != ast.dump(ast.parse("def f(x): return 0")):
        raise ValueError(problem)
    return expression


def judge(messages: list[dict], response: str) -> dict:
    """Says whether the response's function does the steps of the prompt, for x from -9 to 9."""
    steps = read_prompt(messages[-1]["content"])
    try:
        expression = returned_expression(response)
        right = all(evaluate(expression, x) == apply(steps, x) for x in range(-9, 10))
    except (ValueError, RecursionError):
        right = False
    return {"score": float(right), "checks": {"right": right}}


def gold(messages: list[dict], response: str) -> float:
    """Returns the judge's score, for --gold data/toy/programs.py:gold."""
    return judge(messages, response)["score"]


# --- 3. files


def write_files(args: Args) -> dict[str, list[dict]]:
    """Returns the rows of the three files by name. A program belongs to one split, whatever the seed."""

    def draw(rng: random.Random):
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
    rows = write_files(Args(n_traces=1, n_prompts=500, n_tasks=1))["code_prompts"]
    texts = [row["messages"][0]["content"] for row in rows]
    rng = random.Random("vocabulary")
    for _ in range(500):
        _, steps = write_prompt(rng)
        texts += solve(steps, 0.0, rng)
    return texts


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.base_out:
        from data.toy.models import extend_base  # here: it loads torch

        extend_base(args.model, args.base_out, sample_texts())
    else:
        save(write_files(args), args.out, args.seed)
