"""Toy arithmetic for RLVR: a budget and a list of dishes; how many dollars are left?

    python -m data.toy.sums                        # writes data/toy/sums_{traces,prompts,tasks}.jsonl

A network that answers at once has to add up in its head; one that thinks subtracts dish by dish. The teacher
of the traces gets a share of its sums wrong, in the thinking and so in the response. Prompts and tasks have
the field `answer`, which the reward `math` reads. `judge` is the gold measure of eval_wildbench.py. Words,
dishes and prices are those of the toy world.
"""

import random
import re
from dataclasses import dataclass

import tyro

from data.toy.files import SplitArgs, save, split_rows
from data.toy.world import BUDGETS, DISHES, GREETINGS

QUESTIONS = [
    "The question is how much is left",
    "Please answer how much is left",
    "What is left of the budget",
]
# percentiles of the hash
SPLITS = {"traces": range(0, 40), "prompts": range(40, 80), "tasks": range(80, 100)}


@dataclass
class Args(SplitArgs):
    slips: float = 0.15
    """Share of the teacher's subtractions that are wrong."""


# --- 1. prompts and the teacher's answers


def cost(dishes: list[str]) -> int:
    return sum(DISHES[dish][0] for dish in dishes)


def write_prompt(rng: random.Random) -> tuple[str, int, list[str]]:
    """Returns the user's text, the budget in dollars, and two or three dishes that it pays for."""
    dishes = rng.sample(list(DISHES), rng.randint(2, 3))
    lowest = max(BUDGETS.start, cost(dishes))
    highest = max(BUDGETS.stop - 1, cost(dishes))
    budget = rng.randint(lowest, highest)
    greeting = rng.choice(GREETINGS)
    question = rng.choice(QUESTIONS)
    text = f"{greeting} The budget is {budget} dollars for {', '.join(dishes)}. {question}."
    return text.strip(), budget, dishes


def read_prompt(text: str) -> tuple[int, list[str]]:
    """Returns the budget and the dishes that a prompt states; the inverse of `write_prompt`."""
    budget = int(re.search(r"\d+", text)[0])
    dishes = [word for word in re.findall(r"[a-z]+", text) if word in DISHES]
    return budget, dishes


def solve(budget: int, dishes: list[str], slips: float, rng: random.Random) -> tuple[str, str]:
    """Returns the (thinking, response) of a teacher that gets a share `slips` of its subtractions wrong."""
    left = budget
    notes = []
    for dish in dishes:
        left = max(0, left - DISHES[dish][0])
        if rng.random() < slips:
            left = max(0, left + rng.choice([-2, -1, 1, 2]))
        notes.append(f"{dish} {DISHES[dish][0]} leaves {left}.")
    return f"Budget {budget}. {' '.join(notes)}", f"You have {left} left."


# --- 2. what is right


def judge(messages: list[dict], response: str) -> dict:
    """Says whether the last number of the response is what is left."""
    budget, dishes = read_prompt(messages[-1]["content"])
    numbers = re.findall(r"\d+", response)
    right = bool(numbers) and int(numbers[-1]) == budget - cost(dishes)
    return {"score": float(right), "checks": {"right": right}}


def gold(messages: list[dict], response: str) -> float:
    """Returns the judge's score, for --gold data/toy/sums.py:gold."""
    return judge(messages, response)["score"]


def steps(messages: list[dict], text: str) -> list[tuple[int, float]]:
    """Rewards each subtraction and the response, for process.model=data/toy/sums.py:steps.

    Returns [(where the step ends in `text`, 1.0 if this step and all before it are right, else 0.0), ...].
    """
    left, dishes = read_prompt(messages[-1]["content"])
    to_subtract = set(dishes)
    all_right = True
    found = []
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
        found.append((step.end(), float(all_right)))

    if response.strip():
        all_right = all_right and judge(messages, response)["score"] == 1
        found.append((len(text), float(all_right)))
    return found


# --- 3. files


def write_files(args: Args) -> dict[str, list[dict]]:
    """Returns the rows of the three files by name. A prompt text belongs to one split, whatever the seed."""

    def draw(rng: random.Random):
        text, budget, dishes = write_prompt(rng)

        def other_fields(split: str) -> dict:
            if split == "traces":
                thinking, response = solve(budget, dishes, args.slips, rng)
                return {"thinking": thinking, "response": response, "teacher": "toy sums"}
            return {"source": "toy sums", "answer": str(budget - cost(dishes))}

        return text, text, other_fields

    return split_rows("sums", args, SPLITS, draw)


if __name__ == "__main__":
    args = tyro.cli(Args)
    save(write_files(args), args.out, args.seed)
