"""Instructions about words of real prompts, whose answer begins with what must be worked out.

    python -m data.tally --texts data/small/prompts.jsonl --out data/small/tally

A user asks how many words have a letter, which word comes first in the alphabet, or how to share things evenly.
The thinking of tally_traces.jsonl works the answer out, step by step. That of tally_after.jsonl is a plan of the
finished answer, made by a rule (data/plans.py), as for a warm start without a teacher: of such short answers it
says the question's first words and the form. `judge` is the gold measure of eval_wildbench.py.
"""

import random
import re
from dataclasses import dataclass

import tyro

from data.plans import plan_of
from data.toy.files import SplitArgs, save, split_rows
from rlmt.data import read_rows
from utils import fail

LETTERS = "aeilnorst"
# percentiles of the hash
SPLITS = {"traces": range(0, 60), "prompts": range(60, 80), "tasks": range(80, 100)}


@dataclass
class Args(SplitArgs):
    texts: str = "data/small/prompts.jsonl"
    """Prompt rows whose words are asked about."""


def write_question(texts: list[list[str]], rng: random.Random) -> str:
    """Writes a question about five to eight words of one of the texts, which are lists of words."""
    words = rng.sample(rng.choice(texts), rng.randint(5, 8))
    listed = ", ".join(words)
    kind = rng.choice(["count", "first", "share"])
    if kind == "count":
        return f'How many of these words have the letter "{rng.choice(LETTERS)}", and which? {listed}'
    if kind == "first":
        return f"Which of these words comes first in the alphabet, and which last? {listed}"
    people = rng.randint(3, 6)
    things = rng.randint(people + 1, 60)
    return f'Share {things} cards with "{words[0]}" among {people} people as evenly as possible. Who gets how many?'


def solve(question: str) -> tuple[str, str]:
    """Returns the thinking that works out the answer, and the answer."""
    words = question.partition("? ")[2].split(", ")
    if question.startswith("How many"):
        letter = re.search('"(.)"', question)[1]
        found = []
        steps = []
        for word in words:
            if letter in word:
                found.append(word)
                steps.append(f"{word}: yes, {len(found)}.")
            else:
                steps.append(f"{word}: no.")
        return " ".join(steps), f"{len(found)} of them: {', '.join(found) or 'none'}."
    if question.startswith("Which"):
        steps = [f"{words[0]}."]
        first = last = words[0]
        for word in words[1:]:
            first = min(first, word)
            last = max(last, word)
            steps.append(f"{word}: first {first}, last {last}.")
        return " ".join(steps), f"{first} comes first, and {last} last."
    things, people = map(int, re.findall(r"\d+", question))
    each, rest = divmod(things, people)
    thinking = f"{people} x {each} = {people * each}. {things} - {people * each} = {rest}."
    if rest == 0:
        return thinking, f"{each} cards for each."
    return thinking, f"{each + 1} cards for {rest} of them, {each} for the other {people - rest}."


def judge(messages: list[dict], response: str) -> dict:
    """Returns 1 for the right answer, for `eval_wildbench.py --judge data/tally.py:judge`."""
    question = messages[-1]["content"]
    right = response.strip() == solve(question)[1]
    return {"score": float(right), "checks": {"right": right}}


def write_files(args: Args) -> dict[str, list[dict]]:
    """Returns the rows of every file by its name without `.jsonl`."""
    texts = []
    for row in read_rows(args.texts, "messages"):
        words = sorted(set(re.findall(r"\b[a-z]{3,9}\b", row["messages"][-1]["content"])))
        if len(words) >= 8:
            texts.append(words)
    if not texts:
        fail(f"--texts {args.texts}: no prompt has eight different words of three to nine small letters")

    def draw(rng: random.Random):
        question = write_question(texts, rng)
        thinking, response = solve(question)

        def fields(split: str) -> dict:
            if split == "traces":
                return {"thinking": thinking, "response": response, "teacher": "rule"}
            return {}

        numbers = " ".join(re.findall(r"\d+", question))
        # how things are shared depends on the numbers alone: the splits have none in common
        return question, numbers or question, fields

    files = split_rows("tally", args, SPLITS, draw)
    files["tally_after"] = []
    for row in files["tally_traces"]:
        plan = plan_of(row["messages"][-1]["content"], row["response"])
        files["tally_after"].append(row | {"thinking": plan})
    return files


if __name__ == "__main__":
    args = tyro.cli(Args)
    save(write_files(args), args.out, args.seed)
