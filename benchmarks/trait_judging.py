"""Judging traits of planning: what the judge is asked, how its replies are read, win rates from verdicts.

The plan of --generations is that of writer `model_is`, 1 or 2. `args` are the flags of benchmarks/traits.py,
which describes the protocol.
"""

import random
from pathlib import Path

import numpy as np

from benchmarks import shared
from benchmarks.judge_template import Placeholders, fill_messages, read_template
from benchmarks.scoring import bootstrap, read_object

# --- 1. what the judge is asked

TEMPLATES = {
    "extract": """Two writers, 1 and 2, answered the same users, and each made a plan before every answer. Below are conversations,
each with the plan of writer 1 and the plan of writer 2. Writer 1 is the same person throughout, and so is writer 2.

{pairs}

How do the two writers differ in the way they plan? Name at most {most} traits that one of them shows more than the other, in
more than one of these plans. A trait says how a plan is made: what comes first, how ideas are found, ordered, weighed, grouped
or checked. It does not say what the answer is about, how good it is or how long. Word it so that a reader of any two plans
could tell which one shows it more, and mention no writer.
Reply with one JSON object and nothing else, with an empty list if they plan alike:
{"traits": [{"name": "two to six words", "description": "one sentence"}]}""",
    "merge": """Several readers compared plans that two writers had made, and each listed traits in which the writers differ:

{lists}

Make one list of at most {most} traits of these. Traits that mean the same become one; if too many are left, keep those that
most readers found. No two traits may overlap or be each other's opposite, and none may mention a writer.
Reply with one JSON object and nothing else:
{"traits": [{"name": "two to six words", "description": "one sentence"}]}""",
    "compare": """Two writers each made a plan before answering the same user. Say for each trait below which plan shows it more.

# Conversation
{conversation}

{plans}

# Traits
{traits}

Decide trait by trait. To show a trait is neither good nor bad, and a longer plan does not show more of it for its length
alone. Say "1" if plan 1 shows the trait more, "2" if plan 2 does, "same" if both show it alike or neither does.
Reply with one JSON object and nothing else, in which every trait has its key:
{"comparison": "a few sentences", {keys}}""",
}
PLACEHOLDERS = {
    "extract": Placeholders(("pairs",), ("most",)),
    "merge": Placeholders(("lists",), ("most",)),
    "compare": Placeholders(("conversation", "plans", "traits"), ("keys",)),
}


def template_file(args, step: str) -> Path | None:
    """Returns the file of --template that has the words of a step (a key of TEMPLATES); None if ours are used."""
    path = Path(args.template) / f"{step}.txt"
    if args.template and path.exists():
        return path
    return None


def step_template(args, step: str) -> str:
    """Returns the words of a step; exits with 2 if those of --template cannot be filled in."""
    file = template_file(args, step)
    if file is None:
        return TEMPLATES[step]
    return read_template(str(file), PLACEHOLDERS[step])


def show_conversation(pair: dict) -> str:
    return "\n\n".join(f"{message['role'].upper()}: {message['content']}" for message in pair["messages"])


def show_plans(pair: dict, model_is: int) -> str:
    """Shows both plans between tags, as plans are full of headings; --generations' plan is `model_is`."""
    plans = [pair["model"].strip(), pair["baseline"].strip()]
    if model_is == 2:
        plans.reverse()
    return f"<plan 1>\n{plans[0]}\n</plan 1>\n\n<plan 2>\n{plans[1]}\n</plan 2>"


def batches(args, pairs: list[dict]) -> list[tuple[int, list[dict]]]:
    """Returns for each call of the extraction which writer --generations is (1 or 2), and the pairs."""
    rng = random.Random(args.seed)
    drawn = []
    for start in range(0, len(pairs), args.batch_pairs):
        model_is = rng.choice((1, 2))
        drawn.append((model_is, pairs[start : start + args.batch_pairs]))
    return drawn


def extract_requests(args, pairs: list[dict]) -> list[dict]:
    requests = []
    for model_is, batch in batches(args, pairs):
        parts = []
        for number, pair in enumerate(batch, 1):
            plans = show_plans(pair, model_is)
            parts.append(f"# Conversation {number}\n{show_conversation(pair)}\n\n{plans}")
        fields = {"pairs": "\n\n".join(parts), "most": str(args.max_traits)}
        messages = fill_messages(step_template(args, "extract"), fields)
        requests.append(shared.judge_request(args, messages))
    return requests


def merge_request(args, trait_lists: list[list[dict]]) -> dict:
    parts = []
    for number, traits in enumerate(trait_lists, 1):
        lines = [f"- {trait['name']}: {trait['description']}" for trait in traits]
        parts.append("\n".join([f"# Reader {number}", *lines]))
    fields = {"lists": "\n\n".join(parts), "most": str(args.max_traits)}
    messages = fill_messages(step_template(args, "merge"), fields)
    return shared.judge_request(args, messages)


def compare_requests(args, pairs: list[dict], traits: list[dict]) -> list[dict]:
    """Returns two requests for each pair: --generations' plan first, then second."""
    lines = []
    keys = []
    for number, trait in enumerate(traits, 1):
        lines.append(f"T{number}. {trait['name']}: {trait['description']}")
        keys.append(f'"T{number}": "..."')

    requests = []
    for pair in pairs:
        for model_is in (1, 2):
            fields = {
                "conversation": show_conversation(pair),
                "plans": show_plans(pair, model_is),
                "traits": "\n".join(lines),
                "keys": ", ".join(keys),
            }
            messages = fill_messages(step_template(args, "compare"), fields)
            requests.append(shared.judge_request(args, messages))
    return requests


# --- 2. what it replies


TRAIT_LIMITS = {"name": 80, "description": 400}  # characters


def read_traits(text: str, most: int) -> list[dict]:
    """Returns the traits {name, description} of a reply or a file.

    Raises ValueError if there are more than `most`, if one is incomplete or too long, or if two share a name.
    """
    listed = read_object(text).get("traits")
    if not isinstance(listed, list) or len(listed) > most:
        raise ValueError(f"'traits' is not a list of at most {most}")
    traits = []
    for item in listed:
        trait = {}
        for field, limit in TRAIT_LIMITS.items():
            value = item.get(field) if isinstance(item, dict) else None
            if not isinstance(value, str):
                raise ValueError("a trait needs a 'name' and a 'description', both strings")
            trait[field] = " ".join(value.split())
            if not 0 < len(trait[field]) <= limit:
                raise ValueError(f"the {field} of a trait is empty or has more than {limit} characters")
        traits.append(trait)
    names = {trait["name"].casefold() for trait in traits}
    if len(names) < len(traits):
        raise ValueError("two traits have the same name")
    return traits


def read_verdicts(text: str, n_traits: int) -> list[str]:
    """Returns which plan shows each trait more, "1", "2" or "same"; raises ValueError if one is missing."""
    found = read_object(text)
    found.pop("comparison", None)
    keys = [f"T{number}" for number in range(1, n_traits + 1)]
    if found.keys() != set(keys):
        named = ", ".join(found)[:80] or "no trait"
        raise ValueError(f"verdicts for {named}, not for T1 to T{n_traits}")
    choices = []
    for key in keys:
        choice = found[key]
        if type(choice) is int:  # a bool is another type
            choice = str(choice)
        if choice not in ("1", "2", "same"):
            raise ValueError(f"a verdict is {str(choice)[:40]!r}")
        choices.append(choice)
    return choices


# --- 3. from verdicts to win rates


def choice_value(choice: str, model_is: int) -> float:
    """Returns 1, 0.5 or 0: the plan of --generations shows the trait more, alike or less."""
    if choice == "same":
        return 0.5
    return float(choice == str(model_is))


def score_verdicts(rows: list[dict], traits: list[dict], max_invalid: float, seed: int) -> dict:
    """Returns the win rate of each trait, and counts of prompts and replies.

    Args:
        rows: one for each reply, {id, model_is, choices ({trait: "1", "2" or "same"}, or None), invalid}.

    Raises ValueError if no prompt has readable replies in both orders.
    """
    choices_by_prompt: dict[str, dict[int, dict]] = {}
    errors = []
    for row in rows:
        choices_by_order = choices_by_prompt.setdefault(row["id"], {})
        if row["choices"] is None:
            errors.append(row["invalid"])
        else:
            choices_by_order[row["model_is"]] = row["choices"]
    complete = [orders for orders in choices_by_prompt.values() if len(orders) == 2]
    if not complete:
        raise ValueError(
            "no prompt has a readable reply in both orders; "
            f"{len(errors)} of {len(rows)} replies are invalid, the first: {errors[0]}"
        )

    numbers_by_trait = {}
    for trait in traits:
        name = trait["name"]
        values = []  # one row for each prompt: --generations' plan first, then second
        for orders in complete:
            values.append([choice_value(orders[1][name], 1), choice_value(orders[2][name], 2)])
        numbers = score_trait(np.array(values), seed)
        if len(errors) > max_invalid * len(rows):
            numbers["withheld"] = numbers["win_rate"]
            numbers["win_rate"] = None
        numbers_by_trait[name] = {"description": trait["description"], **numbers}
    return {
        "n": len(complete),
        "n_left_out": len(choices_by_prompt) - len(complete),
        "n_replies": len(rows),
        "n_invalid": len(errors),
        "traits": numbers_by_trait,
    }


def score_trait(values: np.ndarray, seed: int) -> dict:
    """Returns the numbers of one trait from values (prompts, 2 orders) of 0, 0.5 or 1."""
    return {
        "win_rate": float(values.mean()),
        "interval": bootstrap(values.mean(axis=1), seed),
        "wins": int((values == 1).sum()),
        "ties": int((values == 0.5).sum()),
        "losses": int((values == 0).sum()),
        "flip_rate": float((values[:, 0] != values[:, 1]).mean()),
    }
