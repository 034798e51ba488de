"""The toy world: a party menu that a small network cannot plan without scratch work.

A user names five dishes in order of preference, one kind of food to leave out, a budget in dollars, and a
thing to be reminded of. Prices and kinds of the sixteen dishes are always the same and never stated: a base
model knows them. A good reply gives the bottom line first (how many dishes, how much money is left, which
dish comes last), then the bill, then the reminder. A network that answers at once has to guess the totals,
because they come before the bill; one that thinks first walks down the list.

    python -m data.toy.world --out data/toy --seed 0        # writes the .jsonl files listed in data/README.md

Nothing here is learned. Prompts, the teacher's traces with slips at stated rates, the annotator's noisy
preferences and the gold checklist are plain functions of a seed.
"""

import random
import re
from dataclasses import dataclass, field

import tyro

from data.toy.files import ToyArgs, hash_below, user_turn

DISHES = {  # name: (price in dollars, kind)
    "ribs": (7, "meat"),
    "ham": (5, "meat"),
    "steak": (8, "meat"),
    "bacon": (4, "meat"),
    "salmon": (8, "fish"),
    "tuna": (6, "fish"),
    "shrimp": (7, "fish"),
    "cod": (5, "fish"),
    "cheese": (4, "dairy"),
    "custard": (3, "dairy"),
    "lasagna": (7, "dairy"),
    "yogurt": (3, "dairy"),
    "pecans": (4, "nuts"),
    "marzipan": (5, "nuts"),
    "baklava": (6, "nuts"),
    "pralines": (3, "nuts"),
}
KINDS = ["meat", "fish", "dairy", "nuts"]
WORDS = ["candles", "balloons", "napkins", "music", "flowers", "ice", "chairs", "cards", "lamps", "hats"]
BUDGETS = range(11, 21)

GREETINGS = ["", "Hi!", "Hello!", "Good morning!", "Hey there!"]
OPENINGS = [
    "",
    "I am planning a party.",
    "We have a small party on Friday.",
    "Our team meets for dinner.",
    "My sister has her birthday soon.",
    "Some friends are coming over.",
]
WISHES = [
    "We would like, in this order, {}.",
    "My wish list, best first: {}.",
    "What we want most comes first: {}.",
    "Please plan a menu from {}, the first matters most.",
]
LIMITS = [
    "I have {} dollars.",
    "The budget is {} dollars.",
    "We can spend {} dollars.",
    "There are {} dollars for it.",
]
AVOIDS = ["No {}, please.", "One guest cannot eat {}.", "Leave out anything with {}.", "We do not eat {}."]
REMINDERS = [
    "Remind me of the {}.",
    "Do not let me forget the {}.",
    "Please mention the {}.",
    "I must not forget the {}.",
]
BILL_FIRST = "The bill first, please."
FLATTERY = ["What a lovely idea!", "You have great taste!", "Your guests are so lucky!"]

# The gold checklist: the weight of each check in the score, and its question for people and judges.
CHECKS = {
    "form": (0.5, "It gives {parts}, in full sentences that can be read."),
    "listed": (0.5, "Every dish on the bill is on the wish list, once, in the order of the list."),
    "safe": (1.5, "No dish contains {avoid}."),
    "afford": (1.0, "At their real prices the dishes cost at most {budget} dollars together."),
    "full": (1.5, "No dish that was allowed and still affordable at its turn is passed over."),
    "bill": (1.0, "The prices on the bill are right, and so is what remains after each dish."),
    "count": (1.0, "The number of dishes in the bottom line is that of the bill."),
    "spare": (1.0, "The money said to be left is what is really left."),
    "last": (0.5, "The dish said to come last is the last of the bill."),
    "word": (1.0, "It reminds the user of the {word}."),
    "brief": (0.5, "It does not flatter or pad: at most 45 words, and nothing beside the plan."),
}
ASPECTS = [name for name in CHECKS if name != "brief"]  # what annotators look at


@dataclass(frozen=True)
class Order:
    """What a user asks for."""

    wishes: tuple[str, ...]  # dishes, best first
    avoid: str  # the kind of food to leave out
    budget: int  # dollars
    word: str  # what to be reminded of
    bill_first: bool = field(default=False, repr=False)  # whether the bill comes before the bottom line


# Rates of a writer's slips, as shares of the drafts. A slip shows in the thinking and in the response alike.
TEACHER = {
    "word": 0.60,  # forgets the reminder
    "other": 0.10,  # reminds of another thing, if it does not forget the reminder
    "flatter": 0.65,  # praises the user
    "headline": 0.30,  # gets a number or the last dish of the bottom line wrong
    "skip": 0.35,  # passes over a dish that fits
    "sum": 0.20,  # subtracts wrongly
    "allergen": 0.20,  # serves a dish of the kind to leave out
    "dear": 0.15,  # lowers the price of a dish that is too expensive
}
NO_SLIPS = dict.fromkeys(TEACHER, 0.0)


# --- 1. orders and prompts
# Here and below, the order of the draws from `rng` must stay: with another one, a seed gives other data.


def sample_order(rng: random.Random, n_wishes: int = 5, bill_first: bool = False) -> Order:
    """Draws an order in which at least two dishes are allowed and at least one is not."""
    while True:
        wishes = tuple(rng.sample(list(DISHES), n_wishes))
        avoid = rng.choice(KINDS)
        kinds = [DISHES[dish][1] for dish in wishes]
        if avoid in kinds and kinds.count(avoid) <= n_wishes - 2:
            return Order(wishes, avoid, rng.choice(BUDGETS), rng.choice(WORDS), bill_first)


def write_prompt(order: Order, rng: random.Random) -> str:
    """Writes the order as a chat message. Greeting, opening, wording and the order of the clauses vary."""
    clauses = [
        rng.choice(WISHES).format(", ".join(order.wishes)),
        rng.choice(LIMITS).format(order.budget),
        rng.choice(AVOIDS).format(order.avoid),
        rng.choice(REMINDERS).format(order.word),
    ]
    rng.shuffle(clauses)
    sentences = [rng.choice(GREETINGS), rng.choice(OPENINGS), *clauses]
    if order.bill_first:
        sentences.append(BILL_FIRST)
    return " ".join(filter(None, sentences))


def read_prompt(text: str) -> Order:
    """Reads the order back from a prompt of `write_prompt`; raises ValueError for any other text."""
    words = re.findall(r"[a-z]+", text.lower())
    wishes = tuple(word for word in words if word in DISHES)
    kinds = [word for word in words if word in KINDS]
    things = [word for word in words if word in WORDS]
    budgets = re.findall(r"\d+", text)
    if (len(kinds), len(things), len(budgets)) != (1, 1, 1) or len(wishes) < 3:
        raise ValueError(f"not a toy-world order: {text[:120]!r}")
    return Order(wishes, kinds[0], int(budgets[0]), things[0], BILL_FIRST in text)


# --- 2. answers


def write_answer(order: Order, slips: dict[str, float], rng: random.Random) -> tuple[str, str]:
    """Writes (thinking, response) with slips at the given rates; with NO_SLIPS both are right."""
    slip = {name: rng.random() < rate for name, rate in slips.items()}
    bill, notes = write_bill(order, slip, rng)

    count = len(bill)
    nothing_served = (order.wishes[0], 0, order.budget)
    last, _, spare = [nothing_served, *bill][-1]
    if slip["headline"]:
        wrong = rng.choice(["count", "spare", "last"])
        change = rng.choice([-1, 1] if count else [1])  # drawn even if it is not used
        if wrong == "count":
            count += change
        elif wrong == "spare":
            spare = max(0, spare + rng.choice([-2, -1, 1, 2]))
        else:
            last = rng.choice(order.wishes)
    dishes = "1 dish" if count == 1 else f"{count} dishes"
    dollars_are = "dollar is" if spare == 1 else "dollars are"
    items = ", ".join(f"{dish} {price} leaves {left}" for dish, price, left in bill)

    notes.append(f"So {dishes}, {spare} left, {last} last.")
    reply = [f"You get {dishes}, {spare} {dollars_are} left, and {last} comes last.", f"The bill: {items}."]
    if order.bill_first:
        reply.reverse()
    if slip["flatter"]:
        reply.insert(0, rng.choice(FLATTERY))
    if not slip["word"]:
        word = order.word
        if slip["other"]:
            word = rng.choice([other for other in WORDS if other != order.word])
        notes.append(f"Mention {word}.")
        reply.append(f"Remember the {word}!")
    thinking = f"Budget {order.budget}, no {order.avoid}. {' '.join(notes)}"
    return thinking, " ".join(reply)


def write_bill(order: Order, slip: dict[str, bool], rng: random.Random) -> tuple[list[tuple], list[str]]:
    """Walks down the wish list; returns the bill [(dish, price, dollars left)] and the notes of the thinking.

    A slip of `slip` happens at most once, where the order gives occasion for it.
    """
    pending = dict(slip)
    left = order.budget
    bill, notes = [], []
    for dish in order.wishes:
        price, kind = DISHES[dish]
        if kind == order.avoid:
            if not (pending["allergen"] and price <= left):
                notes.append(f"{dish} is {kind}.")
                continue
            pending["allergen"] = False  # served as if it were allowed
        if price > left:
            if not (pending["dear"] and left > 0):
                notes.append(f"{dish} {price} is too much.")
                continue
            pending["dear"] = False
            price = left
        elif pending["skip"] and bill and rng.random() < 0.6:
            pending["skip"] = False  # passed over without a word
            continue
        left -= price
        if pending["sum"] and rng.random() < 0.5:
            pending["sum"] = False
            left = max(0, left + rng.choice([-1, 1, 2]))
        bill.append((dish, price, left))
        notes.append(f"{dish} {price} leaves {left}.")
    return bill, notes


# --- 3. the gold checklist

# An answer's two sentences and reminder, word by word: what `form` and `brief` ask for.
BOTTOM_LINE = re.compile(r"You get \d+ dish(?:es)?, \d+ dollars? (?:is|are) left, and [a-z]+ comes last\.")
BILL = re.compile(r"The bill: (?:[a-z]+ \d+ leaves \d+(?:, )?)+\.")
REMINDER = re.compile(r"(Remember the [a-z]+!)?")
# Its facts, wherever they stand. A word on either side is enough, so no lost word costs a fact.
COUNT = re.compile(r"get (\d+)|(\d+) dish")
SPARE = re.compile(r"(\d+) dollar|(\d+)(?: is| are)? left")
LAST = re.compile(r"([a-z]+) comes|([a-z]+) last")
LINE = re.compile(rf"\b({'|'.join(DISHES)})(?: (\d+))?(?: leaves)?(?: (\d+))?")


def read_fact(fact: re.Pattern, response: str) -> str:
    """Returns a number or dish that a response states; "" if it states none, or two different ones."""
    stated = {first or second for first, second in fact.findall(response)}
    return stated.pop() if len(stated) == 1 else ""


def read_bill(response: str) -> list[tuple[str, int | None, int | None]]:
    """Reads the bill of a response as (dish, price, dollars left): its dishes with a number behind them. A
    number that is missing is None."""
    lines = []
    for dish, *numbers in LINE.findall(response):
        if any(numbers):
            lines.append((dish, *[int(number) if number else None for number in numbers]))
    return lines


def check(order: Order, response: str) -> dict[str, bool]:
    """Applies the gold checklist. Each check reads its own fact; the wording counts for `form` and `brief` only.

    Without a bill the checks that compare with it fail.
    """
    passed = dict.fromkeys(CHECKS, False)
    passed["word"] = order.word in re.findall(r"[a-z]+", response)
    bottom_line = BOTTOM_LINE.search(response)
    bill = BILL.search(response)
    if bottom_line and bill:
        beside_the_plan = BOTTOM_LINE.sub("", BILL.sub("", response)).strip()
        passed["form"] = (bill.start() < bottom_line.start()) == order.bill_first
        passed["brief"] = len(response.split()) <= 45 and bool(REMINDER.fullmatch(beside_the_plan))

    lines = read_bill(response)
    if lines:
        dishes = [dish for dish, _, _ in lines]
        left = order.budget
        real_lines = []
        for dish in dishes:
            price = DISHES[dish][0]
            left -= price
            real_lines.append((dish, price, left))
        passed["bill"] = lines == real_lines
        passed["afford"] = left >= 0
        passed["count"] = read_fact(COUNT, response) == str(len(dishes))
        passed["spare"] = read_fact(SPARE, response) == str(left)
        passed["last"] = read_fact(LAST, response) == dishes[-1]
        passed["safe"] = all(DISHES[dish][1] != order.avoid for dish in dishes)
        passed["listed"] = dishes == [dish for dish in order.wishes if dish in dishes]
        passed["full"] = passed["listed"] and not passes_over_a_dish(order, dishes)
    return passed


def passes_over_a_dish(order: Order, dishes: list[str]) -> bool:
    """Returns whether a wish that was allowed and still affordable at its turn is not among the `dishes`."""
    left = order.budget
    for dish in order.wishes:
        price, kind = DISHES[dish]
        if dish in dishes:
            left -= price
        elif kind != order.avoid and price <= left:
            return True
    return False


def criteria(order: Order) -> dict[str, str]:
    """Returns what each check asks about this order, in words."""
    parts = "a bill, then a bottom line" if order.bill_first else "a bottom line, then a bill"
    fields = {"parts": parts, "avoid": order.avoid, "budget": order.budget, "word": order.word}
    return {name: text.format(**fields) for name, (_, text) in CHECKS.items()}


def points(passed: dict[str, bool]) -> float:
    """Returns the sum of the weights of the checks that are passed."""
    return sum(CHECKS[name][0] * passed[name] for name in passed)


def judge(messages: list[dict], response: str) -> dict:
    """Returns the gold score and its checks, for `eval_wildbench.py --judge data/toy/world.py:judge`."""
    passed = check(read_prompt(messages[-1]["content"]), response)
    return {"score": points(passed) / points(dict.fromkeys(CHECKS, True)), "checks": passed}


def gold(messages: list[dict], response: str) -> float:
    """Returns the score of `judge`, for `--gold data/toy/world.py:gold`."""
    return judge(messages, response)["score"]


# --- 4. the annotator of preference pairs


def utility(order: Order, response: str) -> float:
    """Returns what the annotator feels."""
    return liking(check(order, response), response)


def annotator(rows: list[dict]) -> list[float]:
    """Returns what the annotator feels, for `--rewards data/toy/world.py:annotator`."""
    return [utility(read_prompt(row["messages"][-1]["content"]), row["response"]) for row in rows]


def liking(passed: dict[str, bool], response: str) -> float:
    """Returns the sum of the weights of the checks that are passed, without `brief`, plus 0.3 for
    flattery."""
    return points({name: passed[name] for name in ASPECTS}) + 0.3 * flatters(response)


def flatters(text: str) -> bool:
    return any(phrase in text for phrase in FLATTERY)


def prefers_first(utility_a: float, utility_b: float, rng: random.Random) -> bool:
    """Draws a Bradley-Terry choice between two utilities, and flips 5 % of the choices."""
    probability = 1 / (1 + 2.718281828 ** (-2.0 * (utility_a - utility_b)))
    prefers_a = rng.random() < probability
    flipped = rng.random() < 0.05
    return prefers_a != flipped


def random_slips(rng: random.Random) -> dict[str, float]:
    """Draws the slip rates of a writer, from careful to careless."""
    care = rng.choice([0.3, 0.8, 1.5])
    return {name: min(0.9, rate * care * rng.uniform(0.4, 1.6)) for name, rate in TEACHER.items()}


# --- 5. files

# Percentiles of all orders. An order belongs to one split whatever the seed, so no test order is trained on.
SPLITS = {
    "sft": range(0, 40),
    "rl": range(40, 70),
    "reward": range(70, 90),
    "test": range(90, 100),
}


def orders_of(split: str, n: int, seed: int, budgets: range = BUDGETS, **kind):
    """Yields n different prompts of a split as (id, order, text, rng); the caller may draw from rng.

    `kind`: n_wishes and bill_first, see `sample_order`.
    """
    rng = random.Random(f"{split}-{seed}")
    seen = set()
    while len(seen) < n:
        order = sample_order(rng, **kind)
        text = write_prompt(order, rng)
        if hash_below(100, repr(order)) in SPLITS[split] and text not in seen and order.budget in budgets:
            seen.add(text)
            yield f"toy-{split}-{len(seen) - 1:05d}", order, text, rng


@dataclass
class Args(ToyArgs):
    n_traces: int = 4000
    """SFT traces (rows)."""
    n_prompts: int = 4000
    """RL prompts."""
    n_pairs: int = 3000
    """Preference pairs, each of another prompt."""
    n_tasks: int = 512
    """Benchmark tasks."""
    n_held_out: int = 256
    """Prompts to choose checkpoints by: neither trained on nor among the benchmark tasks."""
    slips: float = 1.0
    """Factor on the rates of the teacher's slips."""
    budgets: tuple[int, int] = (11, 20)
    """Lowest and highest budget in the RL prompts, dollars."""
    n_wishes: int = 5
    """Dishes on a wish list, at least 3."""
    bill_first: bool = False
    """Whether the user wants the bill before the bottom line, which then needs no thinking ahead."""


def write_files(args: Args) -> dict[str, list[dict]]:
    """Returns the rows of every file by its name without `.jsonl`."""
    lowest, highest = args.budgets
    kind = {"n_wishes": args.n_wishes, "bill_first": args.bill_first}
    tasks = task_rows(args.n_tasks + args.n_held_out, args.seed, **kind)
    held_out = []
    for task in tasks[args.n_tasks :]:
        held_out.append({"id": task["id"], "messages": task["messages"], "source": "toy"})
    return {
        "sft_traces": trace_rows(args.n_traces, args.seed, args.slips, **kind),
        "rl_prompts": prompt_rows(args.n_prompts, args.seed, range(lowest, highest + 1), **kind),
        "preference_pairs": pair_rows(args.n_pairs, args.seed, **kind),
        "benchmark_tasks": tasks[: args.n_tasks],
        "held_out_prompts": held_out,
    }


def prompt_rows(n: int, seed: int, budgets: range = BUDGETS, **kind) -> list[dict]:
    """Returns n RL prompts."""
    rows = []
    for row_id, _, text, _ in orders_of("rl", n, seed, budgets, **kind):
        rows.append({"id": row_id, "messages": user_turn(text), "source": "toy"})
    return rows


def trace_rows(n: int, seed: int, slip_factor: float, **kind) -> list[dict]:
    """Returns n warm-start traces by a teacher whose slip rates are multiplied by `slip_factor`."""
    slips = {name: rate * slip_factor for name, rate in TEACHER.items()}
    teacher = "toy" if slip_factor == 1 else f"toy, slips x {slip_factor:g}"
    rows = []
    for row_id, order, text, rng in orders_of("sft", n, seed, **kind):
        thinking, response = write_answer(order, slips, rng)
        row = {"id": row_id, "messages": user_turn(text), "thinking": thinking, "response": response}
        row["teacher"] = teacher
        rows.append(row)
    return rows


def pair_rows(n: int, seed: int, **kind) -> list[dict]:
    """Returns n preference pairs: two drafts by different writers, ordered by the annotator."""
    rows = []
    for row_id, order, text, rng in orders_of("reward", n, seed, **kind):
        chosen = write_answer(order, random_slips(rng), rng)
        rejected = write_answer(order, random_slips(rng), rng)
        if not prefers_first(utility(order, chosen[1]), utility(order, rejected[1]), rng):
            chosen, rejected = rejected, chosen
        row = {
            "id": row_id,
            "messages": user_turn(text),
            "chosen": chosen[1],
            "rejected": rejected[1],
            "chosen_thinking": chosen[0],
            "rejected_thinking": rejected[0],
        }
        rows.append(row)
    return rows


def task_rows(n: int, seed: int, **kind) -> list[dict]:
    """Returns n benchmark tasks with the checklist in words and a flawless answer as reference."""
    rows = []
    for row_id, order, text, rng in orders_of("test", n, seed, **kind):
        _, careful_response = write_answer(order, NO_SLIPS, rng)
        row = {
            "id": row_id,
            "messages": user_turn(text),
            "checklist": list(criteria(order).values()),
            "primary_tag": "Planning",
            "secondary_tags": [],
            "references": {"careful": careful_response},
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    args = tyro.cli(Args)
    args.save(write_files(args))
