"""Toy tasks for rewards that verify: sums, and programs. One command writes both.

    python -m data.toy.tasks         # writes data/toy/{sums,code}_{traces,prompts,tasks}.jsonl
    python -m data.toy.tasks --base-out results/toy/code-base  # data/toy/base with the words of the programs

Sums: "The budget is 20 dollars for steak, cod. ..." -> You have 7 left. A network that answers at once has to
add up in its head; one that thinks subtracts dish by dish. The teacher of the traces gets a share of its sums
wrong, in the thinking and so in the response. Prompts and tasks have the field `answer`, which the reward
`math` reads. Words, dishes and prices are those of the toy world.

Programs: "Take x, then add 3, then double it." -> def f(x): return (x + 3) * 2. The teacher builds the
expression one step at a time. In a share of the places where parentheses matter it forgets them, in the
thinking and so in the response. Prompts and tasks have the fields `tests` and `entry_point`, which the reward
`code` runs in the sandbox.

`judge` is the gold measure of eval_wildbench.py for both. It reads a program with `ast` and works out + - *
itself, so it shares nothing with the reward `code`.
"""

import ast
import operator
import random
import re
from dataclasses import dataclass
from pathlib import Path

import tyro

from data.toy.files import ToyArgs, hash_below, user_turn
from data.toy.world import BUDGETS, DISHES, GREETINGS

QUESTIONS = [
    "The question is how much is left",
    "Please answer how much is left",
    "What is left of the budget",
]
# kind of step: how a user says it. The kind is the sign and, if it is fixed, the number.
WORDING = {
    "+": ["add {}", "put {} on top"],
    "-": ["take {} away", "take {} from it"],
    "*2": ["double it"],
    "*3": ["triple it"],
}
KIND_OF = {form: kind for kind, forms in WORDING.items() for form in forms}
STARTS = ["Take x", "Please take x", "I have x"]
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
# percentiles of the hash
SPLITS = {"traces": range(0, 40), "prompts": range(40, 80), "tasks": range(80, 100)}

# shares of the teacher's subtractions that are wrong, and of the parentheses that matter which it forgets
SLIPS = {"sums": 0.15, "code": 0.6}

Sum = tuple[int, list[str]]  # a budget in dollars, and dishes that it pays for
Program = list[tuple[str, int]]  # steps: one of + - *, a number


@dataclass
class Args(ToyArgs):
    n_traces: int = 2000
    """SFT traces (rows) of each task."""
    n_prompts: int = 2000
    """RL prompts of each task."""
    n_tasks: int = 512
    """Benchmark tasks of each task."""
    base_out: Path | None = None
    """Folder for data/toy/base with the words of the programs; with it, no rows are written."""


# --- 1. sums


def cost(dishes: list[str]) -> int:
    return sum(DISHES[dish][0] for dish in dishes)


def write_sum(rng: random.Random) -> tuple[str, str, Sum]:
    """Returns a user's text, what decides its split, and the sum, of two or three dishes."""
    dishes = rng.sample(list(DISHES), rng.randint(2, 3))
    lowest = max(BUDGETS.start, cost(dishes))
    highest = max(BUDGETS.stop - 1, cost(dishes))
    budget = rng.randint(lowest, highest)
    greeting = rng.choice(GREETINGS)
    question = rng.choice(QUESTIONS)
    text = f"{greeting} The budget is {budget} dollars for {', '.join(dishes)}. {question}.".strip()
    return text, text, (budget, dishes)


def read_sum(text: str) -> Sum:
    """Returns the budget and the dishes that a prompt states; the inverse of `write_sum`."""
    budget = int(re.search(r"\d+", text)[0])
    dishes = [word for word in re.findall(r"[a-z]+", text) if word in DISHES]
    return budget, dishes


def solve_sum(asked: Sum, slips: float, rng: random.Random) -> tuple[str, str]:
    """Returns the (thinking, response) of a teacher that gets a share `slips` of its subtractions wrong."""
    left, dishes = asked
    notes = [f"Budget {left}."]
    for dish in dishes:
        left = max(0, left - DISHES[dish][0])
        if rng.random() < slips:
            left = max(0, left + rng.choice([-2, -1, 1, 2]))
        notes.append(f"{dish} {DISHES[dish][0]} leaves {left}.")
    return " ".join(notes), f"You have {left} left."


def sum_fields(asked: Sum) -> dict:
    """Returns what the reward `math` reads."""
    budget, dishes = asked
    return {"answer": str(budget - cost(dishes))}


def is_sum_right(text: str, response: str) -> bool:
    """Returns whether the last number of the response is what is left."""
    budget, dishes = read_sum(text)
    numbers = re.findall(r"\d+", response)
    return bool(numbers) and int(numbers[-1]) == budget - cost(dishes)


def steps(messages: list[dict], text: str) -> list[tuple[int, float]]:
    """Rewards each subtraction and the response of a sum, for process.model=data/toy/tasks.py:steps.

    Returns [(where the step ends in `text`, 1.0 if this step and all before it are right, else 0.0), ...].
    """
    prompt = messages[-1]["content"]
    left, dishes = read_sum(prompt)
    to_subtract = set(dishes)
    all_right = True
    ends = []
    thinking = text.partition("</think>")[0]  # every format closes it so; without the tag both are the text
    response = text.rpartition("</think>")[2]
    for step in re.finditer(r"([a-z]+) (\d+) leaves (\d+)\.", thinking):
        dish = step[1]
        price = int(step[2])
        new_left = int(step[3])
        right = dish in to_subtract and price == DISHES[dish][0] and new_left == left - price
        all_right = all_right and right
        left = new_left  # the next step is judged from here
        to_subtract.discard(dish)
        ends.append((step.end(), float(all_right)))

    if response.strip():
        ends.append((len(text), float(all_right and is_sum_right(prompt, response))))
    return ends


# --- 2. programs


def write_program(rng: random.Random) -> tuple[str, str, Program]:
    """Returns a user's text, what decides its split, and the program, of two or three different steps."""
    kinds = rng.sample(list(WORDING), rng.randint(2, 3))
    program = []
    for kind in kinds:
        number = int(kind[1:] or rng.randint(1, 20))
        program.append((kind[0], number))
    spoken = []
    for kind, (_, number) in zip(kinds, program, strict=True):
        spoken.append(rng.choice(WORDING[kind]).format(number))
    greeting = rng.choice(GREETINGS)
    start = rng.choice(STARTS)
    text = f"{greeting} {', then '.join([start, *spoken])}."
    return text.strip(), repr(program), program


def read_program(text: str) -> Program:
    """Returns the steps that a prompt states; the inverse of `write_program`.

    Raises ValueError for a text that is not a prompt of this world.
    """
    clauses = text.removesuffix(".").split(", then ")[1:]
    program = []
    for clause in clauses or [text]:  # a text without steps is not a prompt either
        kind = KIND_OF.get(re.sub(r"\d+", "{}", clause))
        if kind is None:
            raise ValueError(f"not a toy task: {text[:120]!r}")
        number = kind[1:] or re.search(r"\d+", clause)[0]
        program.append((kind[0], int(number)))
    return program


def apply(program: Program, x: int) -> int:
    """Returns what the steps make of x."""
    for sign, number in program:
        x = SIGNS[sign](x, number)
    return x


def solve_program(program: Program, slips: float, rng: random.Random) -> tuple[str, str]:
    """Writes (thinking, response) as a teacher who forgets a share `slips` of the parentheses that matter."""
    code = "x"
    code_is_sum = False
    notes = []
    for sign, number in program:
        needs_parentheses = sign == "*" and code_is_sum
        if needs_parentheses and rng.random() >= slips:
            code = f"({code})"
        code = f"{code} {sign} {number}"
        code_is_sum = sign != "*"
        notes.append(code)
    return " then ".join(notes), f"def f(x): return {code}"


def program_fields(program: Program) -> dict:
    """Returns what the reward `code` reads."""
    tests = [f"assert f({x}) == {apply(program, x)}" for x in (0, 1, 7, -4)]
    return {"tests": tests, "entry_point": "f"}


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


def is_program_right(text: str, response: str) -> bool:
    """Returns whether the response's function does the steps of the prompt, for x from -9 to 9."""
    program = read_program(text)
    function = re.match(r"\s*def f\(x\)\s*:\s*return\b\s*((?s:.*))", response)
    if not function:
        return False
    try:
        expression = ast.parse(function[1], mode="eval").body
        return all(evaluate(expression, x) == apply(program, x) for x in range(-9, 10))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # no expression of + - *


# --- 3. what is right


def judge(messages: list[dict], response: str) -> dict:
    """Returns the gold score of a sum or a program, for eval_wildbench.py --judge data/toy/tasks.py:judge."""
    text = messages[-1]["content"]
    is_right = is_sum_right if "The budget is" in text else is_program_right
    right = is_right(text, response)
    return {"score": float(right), "checks": {"right": right}}


def gold(messages: list[dict], response: str) -> float:
    """Returns the judge's score, for --gold data/toy/tasks.py:gold."""
    return judge(messages, response)["score"]


# --- 4. files

TASKS = {"sums": (write_sum, solve_sum, sum_fields), "code": (write_program, solve_program, program_fields)}


def rows_of(task: str, split: str, n: int, seed: int, slips: float) -> list[dict]:
    """Returns n rows of a split. A sum's text, or a program, belongs to one split, whatever the seed."""
    write, solve, fields = TASKS[task]
    rng = random.Random(f"{split}-{seed}")
    rows = {}  # by their texts, which all differ
    while len(rows) < n:
        text, key, asked = write(rng)
        if text in rows or hash_below(100, key) not in SPLITS[split]:
            continue
        row = {"id": f"{task}-{split}-{len(rows):05d}", "messages": user_turn(text)}
        if split == "traces":
            thinking, response = solve(asked, slips, rng)
            row |= {"thinking": thinking, "response": response, "teacher": f"toy {task}"}
        else:
            row |= {"source": f"toy {task}"} | fields(asked)
        rows[text] = row
    return list(rows.values())


def write_files(args: Args) -> dict[str, list[dict]]:
    """Returns the rows of the six files by name."""
    sizes = {"traces": args.n_traces, "prompts": args.n_prompts, "tasks": args.n_tasks}
    files = {}
    for task in TASKS:
        for split, n in sizes.items():
            files[f"{task}_{split}"] = rows_of(task, split, n, args.seed, SLIPS[task])
    return files


def sample_texts() -> list[str]:
    """Returns prompts, thinking and responses in which every word of the programs occurs."""
    texts = []
    for row in rows_of("code", "traces", 2000, 0, 0.0):
        texts += [row["messages"][0]["content"], row["thinking"], row["response"]]
    return texts


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.base_out:
        from data.toy.models import extend_base  # here: it loads torch

        extend_base(Path("data/toy/base"), args.base_out, sample_texts())
    else:
        args.save(write_files(args))
