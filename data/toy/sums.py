"""Toy arithmetic for RLVR: a budget and a list of dishes; how many dollars are left? The words are those of toy_world.py.

    python -m data.toy.sums                        # writes data/toy/sums_{traces,prompts,tasks}.jsonl

A network that answers at once has to add up in its head; one that thinks subtracts dish by dish. The teacher of the traces
gets a share of its sums wrong, in the thinking and so in the response. Prompts and tasks have the field `answer`, which the
reward `math` reads; `judge` is the gold measure of eval_wildbench.py.
"""

import random
import re
from dataclasses import dataclass

import tyro

from data.toy.world import BUDGETS, DISHES, GREETINGS, SplitArgs, save, split_rows

QUESTIONS = [
    "The question is how much is left",
    "Please answer how much is left",
    "What is left of the budget",
]
SPLITS = {"traces": range(0, 40), "prompts": range(40, 80), "tasks": range(80, 100)}


@dataclass
class Args(SplitArgs):
    slips: float = 0.15
    """Share of the teacher's subtractions that are wrong."""


def write_prompt(rng: random.Random) -> tuple[str, int, list[str]]:
    """The user's text, the budget, and two or three dishes that it pays for."""
    dishes = rng.sample(list(DISHES), rng.randint(2, 3))
    cost = sum(DISHES[d][0] for d in dishes)
    budget = rng.randint(max(BUDGETS.start, cost), max(BUDGETS.stop - 1, cost))
    text = f"{rng.choice(GREETINGS)} The budget is {budget} dollars for {', '.join(dishes)}. {rng.choice(QUESTIONS)}.".strip()
    return text, budget, dishes


def solve(budget: int, dishes: list[str], slips: float, rng: random.Random) -> tuple[str, str]:
    """(thinking, response) of a teacher that gets a share of its subtractions wrong."""
    left, notes = budget, []
    for dish in dishes:
        left = max(0, left - DISHES[dish][0])
        if rng.random() < slips:
            left = max(0, left + rng.choice([-2, -1, 1, 2]))
        notes.append(f"{dish} {DISHES[dish][0]} leaves {left}.")
    return f"Budget {budget}. {' '.join(notes)}", f"You have {left} left."


def judge(messages: list[dict], response: str) -> dict:
    """Right or wrong: the last number of the response against what is left."""
    text = messages[-1]["content"]
    left = int(re.search(r"\d+", text)[0]) - sum(
        DISHES[w][0] for w in re.findall(r"[a-z]+", text) if w in DISHES
    )
    numbers = re.findall(r"\d+", response)
    right = bool(numbers) and int(numbers[-1]) == left
    return {"score": float(right), "checks": {"right": right}}


def steps(messages: list[dict], text: str) -> list[tuple[int, float]]:
    """(end in `text`, 1.0 if this and every step before it is right, else 0.0) of each subtraction and of the response: what
    `process.model=data/toy/sums.py:steps` rewards."""
    prompt, found, fine = messages[-1]["content"], [], True
    asked = {w for w in re.findall(r"[a-z]+", prompt) if w in DISHES}
    left = int(re.search(r"\d+", prompt)[0])
    for step in re.finditer(r"([a-z]+) (\d+) leaves (\d+)\.", text.partition("</think>")[0]):
        price = DISHES.get(step[1], (None,))[0]
        left, right = (
            int(step[3]),
            step[1] in asked and int(step[2]) == price and int(step[3]) == left - price,
        )
        fine = fine and right
        asked.discard(step[1])
        found.append((step.end(), float(fine)))
    response = text.rpartition("</think>")[2]
    return (
        [*found, (len(text), float(fine and judge(messages, response)["score"]))]
        if response.strip()
        else found
    )


def gold(messages: list[dict], response: str) -> float:
    """The same as a number, for --gold."""
    return judge(messages, response)["score"]


def write_files(args: Args) -> dict[str, list[dict]]:
    """Rows of the three files by name; a prompt text belongs to one split, whatever the seed."""

    def draw(rng: random.Random):
        text, budget, dishes = write_prompt(rng)

        def rest(split: str) -> dict:
            if split == "traces":
                thinking, response = solve(budget, dishes, args.slips, rng)
                return {"thinking": thinking, "response": response, "teacher": "toy sums"}
            return {"source": "toy sums", "answer": str(budget - sum(DISHES[d][0] for d in dishes))}

        return text, text, rest

    return split_rows("sums", args, SPLITS, draw)


if __name__ == "__main__":
    args = tyro.cli(Args)
    save(write_files(args), args.out, args.seed)
