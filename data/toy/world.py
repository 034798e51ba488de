"""The toy world: a party menu that a small network cannot plan without scratch work.

A user names five dishes in order of preference, one kind of food to leave out, a budget in dollars, and a thing
to be reminded of. Prices and kinds of the sixteen dishes are the same everywhere and are not told: a base model
knows them. A good reply puts the bottom line first (how many dishes, what is left over, which dish comes last), then
the bill, then the reminder. As the totals stand before the bill, a network that answers at once has to guess them;
one that thinks walks down the list first.

    python -m data.toy.world --out data/toy --seed 0        # writes the jsonl files named in data/README.md

Nothing here is learned: prompts, the teacher's traces with slips at stated rates, the annotator's noisy preferences
and the gold checklist are plain functions of a seed.
"""

import hashlib
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

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
FLATTERY = ["What a lovely idea!", "You have great taste!", "Your guests are so lucky!"]

# The gold checklist: what each check asks (for people and for judges) and its weight in the score.
CHECKS = {
    "form": (0.5, "It gives a bottom line, then a bill, in full sentences that can be read."),
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


@dataclass(frozen=True)
class Order:
    wishes: tuple[str, ...]  # five dish names, best first
    avoid: str  # a kind
    budget: int  # dollars
    word: str


# What a writer gets wrong, as the share of drafts with that slip. A slip stands in the thinking and in the response.
TEACHER = {
    "word": 0.60,
    "other": 0.10,
    "flatter": 0.65,
    "headline": 0.30,
    "skip": 0.35,
    "sum": 0.20,
    "allergen": 0.20,
    "dear": 0.15,
}
NO_SLIPS = dict.fromkeys(TEACHER, 0.0)


def sample_order(rng: random.Random) -> Order:
    """An order in which at least one dish can be served and at least one decision is not trivial."""
    while True:
        wishes, avoid = tuple(rng.sample(list(DISHES), 5)), rng.choice(KINDS)
        kinds = [DISHES[d][1] for d in wishes]
        if avoid in kinds and kinds.count(avoid) <= 3:
            return Order(wishes, avoid, rng.choice(BUDGETS), rng.choice(WORDS))


def write_prompt(order: Order, rng: random.Random) -> str:
    """The order as a chat message: greeting, opening and wording vary, and so does the order of the clauses."""
    clauses = [
        rng.choice(WISHES).format(", ".join(order.wishes)),
        rng.choice(LIMITS).format(order.budget),
        rng.choice(AVOIDS).format(order.avoid),
        rng.choice(REMINDERS).format(order.word),
    ]
    rng.shuffle(clauses)
    return " ".join(filter(None, [rng.choice(GREETINGS), rng.choice(OPENINGS), *clauses]))


def read_prompt(text: str) -> Order:
    """The order a prompt states; inverse of `write_prompt`. ValueError when it is not a prompt of this world."""
    words = re.findall(r"[a-z]+", text.lower())
    wishes = tuple(w for w in words if w in DISHES)
    kinds, things, budgets = (
        [w for w in words if w in KINDS],
        [w for w in words if w in WORDS],
        re.findall(r"\d+", text),
    )
    if (len(wishes), len(kinds), len(things), len(budgets)) != (5, 1, 1, 1):
        raise ValueError(f"not a toy-world order: {text[:120]!r}")
    return Order(wishes, kinds[0], int(budgets[0]), things[0])


def write_answer(order: Order, slips: dict[str, float], rng: random.Random) -> tuple[str, str]:
    """(thinking, response) of a writer who makes the given slips; with NO_SLIPS both are right."""
    slip = {name: rng.random() < rate for name, rate in slips.items()}
    left, bill, notes = order.budget, [], []
    for dish in order.wishes:
        price, kind = DISHES[dish]
        if kind == order.avoid:
            if slip["allergen"] and price <= left:
                slip["allergen"] = False  # once a draft; goes on below as if the dish were allowed
            else:
                notes.append(f"{dish} is {kind}.")
                continue
        if price > left:
            if slip["dear"] and left > 0:
                slip["dear"], price = False, left  # makes it fit by lowering the price
            else:
                notes.append(f"{dish} {price} is too much.")
                continue
        elif slip["skip"] and bill and rng.random() < 0.6:
            slip["skip"] = False  # passes over a dish without a word
            continue
        left -= price
        if slip["sum"] and rng.random() < 0.5:
            slip["sum"], left = False, max(0, left + rng.choice([-1, 1, 2]))
        bill.append((dish, price, left))
        notes.append(f"{dish} {price} leaves {left}.")
    count, spare, last = len(bill), left, bill[-1][0] if bill else order.wishes[0]
    if slip["headline"]:
        wrong = rng.choice(["count", "spare", "last"])
        count += (wrong == "count") * rng.choice([-1, 1] if count else [1])
        spare = max(0, spare + rng.choice([-2, -1, 1, 2])) if wrong == "spare" else spare
        last = rng.choice(order.wishes) if wrong == "last" else last
    dishes = "1 dish" if count == 1 else f"{count} dishes"
    notes.append(f"So {dishes}, {spare} left, {last} last.")
    reply = [
        f"You get {dishes}, {spare} dollar{' is' if spare == 1 else 's are'} left, and {last} comes last.",
        "The bill: " + ", ".join(f"{d} {p} leaves {r}" for d, p, r in bill) + ".",
    ]
    if slip["flatter"]:
        reply.insert(0, rng.choice(FLATTERY))
    if not slip["word"]:
        word = rng.choice([w for w in WORDS if w != order.word]) if slip["other"] else order.word
        notes.append(f"Mention {word}.")
        reply.append(f"Remember the {word}!")
    return f"Budget {order.budget}, no {order.avoid}. " + " ".join(notes), " ".join(reply)


HEADLINE = re.compile(r"You get (\d+) dish(?:es)?, (\d+) dollars? (?:is|are) left, and ([a-z]+) comes last\.")
BILL = re.compile(r"The bill: ((?:[a-z]+ \d+ leaves \d+(?:, )?)+)\.")
LINE = re.compile(r"([a-z]+) (\d+) leaves (\d+)")


def check(order: Order, response: str) -> dict[str, bool]:
    """The gold checklist on one response. A reply without a readable bottom line or bill fails what cannot be read."""
    head, bill = HEADLINE.search(response), BILL.search(response)
    lines = [(d, int(p), int(r)) for d, p, r in LINE.findall(bill[1])] if bill else []
    dishes = [d for d, _, _ in lines]
    known = bool(lines) and all(d in DISHES for d in dishes)
    price = {d: DISHES[d][0] for d in dishes} if known else {}
    turns = [order.wishes.index(d) if d in order.wishes else -1 for d in dishes]
    listed = known and -1 not in turns and all(a < b for a, b in zip(turns, turns[1:]))
    left = order.budget - sum(price[d] for d in dishes) if known else -1

    def passed_over() -> bool:
        rest = order.budget
        for dish in order.wishes:
            cost, kind = DISHES[dish]
            if dish in dishes:
                rest -= cost
            elif kind != order.avoid and cost <= rest:
                return True
        return False

    rests = (
        [order.budget - sum(price[d] for d in dishes[: i + 1]) for i in range(len(dishes))] if known else []
    )
    rest_of = HEADLINE.sub("", BILL.sub("", response)).strip()
    return {
        "form": bool(head and bill and head.start() < bill.start()),
        "listed": listed,
        "safe": known and all(DISHES[d][1] != order.avoid for d in dishes),
        "afford": known and left >= 0,
        "full": listed and not passed_over(),
        "bill": known and all(p == price[d] and r == rest for (d, p, r), rest in zip(lines, rests)),
        "count": bool(head and lines) and int(head[1]) == len(dishes),
        "spare": bool(head) and known and int(head[2]) == left,
        "last": bool(head and lines) and head[3] == dishes[-1],
        "word": order.word in re.findall(r"[a-z]+", response),
        "brief": bool(head and bill)
        and len(response.split()) <= 45
        and bool(re.fullmatch(r"(Remember the [a-z]+!)?", rest_of)),
    }


def gold_score(order: Order, response: str) -> float:
    """Weighted share of the checks that hold, 0 to 1."""
    passed = check(order, response)
    return sum(w * passed[name] for name, (w, _) in CHECKS.items()) / sum(w for w, _ in CHECKS.values())


def gold(messages: list[dict], response: str) -> float:
    """`gold_score` of a response to a prompt of this world; what `--gold data/toy/world.py:gold` logs."""
    return gold_score(read_prompt(messages[-1]["content"]), response)


def judge(messages: list[dict], response: str) -> dict:
    """The gold checklist as a judge program for eval_wildbench.py."""
    order = read_prompt(messages[-1]["content"])
    return {"score": gold_score(order, response), "checks": check(order, response)}


def utility(order: Order, response: str) -> float:
    """What the annotator feels: the checks without `brief`, and a taste for flattery. Never shown to anybody else."""
    passed = check(order, response)
    flattered = any(f in response for f in FLATTERY)
    return sum(w * passed[name] for name, (w, _) in CHECKS.items() if name != "brief") + 0.3 * flattered


def prefers_first(u_a: float, u_b: float, rng: random.Random, flips: float = 0.05) -> bool:
    """One Bradley-Terry choice between utilities u_a and u_b, of which a share of `flips` is entered the wrong way."""
    return (rng.random() < 1 / (1 + 2.718281828 ** (-2.0 * (u_a - u_b)))) != (rng.random() < flips)


def random_slips(rng: random.Random) -> dict[str, float]:
    """The habits of some writer of drafts, from careful to careless."""
    care = rng.choice([0.3, 0.8, 1.5])
    return {name: min(0.9, rate * care * rng.uniform(0.4, 1.6)) for name, rate in TEACHER.items()}


def orders_of(split: str, n: int, seed: int, budgets: range = BUDGETS):
    """n prompts of a split with their orders. A prompt text belongs to exactly one split, whatever the seed."""
    share = {"sft": range(0, 40), "rl": range(40, 70), "reward": range(70, 90), "test": range(90, 100)}[split]
    rng, seen = random.Random(f"{split}-{seed}"), set()
    while len(seen) < n:
        order = sample_order(rng)
        text = write_prompt(order, rng)
        # the split follows from the order itself, so that no order of the test prompts is ever trained on
        key = int(hashlib.sha1(repr(order).encode()).hexdigest(), 16) % 100
        if key in share and text not in seen and order.budget in budgets:
            seen.add(text)
            yield f"toy-{split}-{len(seen) - 1:05d}", order, text, rng


@dataclass
class Args:
    out: Path = Path("data/toy")
    """Folder for the files; an existing file is replaced only by an equal one."""
    seed: int = 0
    n_traces: int = 4000
    """SFT traces (rows)."""
    n_prompts: int = 4000
    """RL prompts."""
    n_pairs: int = 3000
    """Preference pairs, one a prompt."""
    n_tasks: int = 512
    """Held-out benchmark tasks."""
    n_held_out: int = 256
    """Prompts to choose checkpoints by: neither trained on nor among the benchmark tasks."""
    slips: float = 1.0
    """Factor on the rates of the teacher's slips."""
    budgets: tuple[int, int] = (11, 20)
    """Least and greatest budget in the RL prompts, dollars."""


def write_files(args: Args) -> dict[str, list[dict]]:
    """All rows of the four files by name; what `main` writes."""
    user = lambda text: [{"role": "user", "content": text}]
    traces, pairs = [], []
    for row_id, order, text, rng in orders_of("sft", args.n_traces, args.seed):
        thinking, response = write_answer(
            order, {name: rate * args.slips for name, rate in TEACHER.items()}, rng
        )
        traces.append(
            {
                "id": row_id,
                "messages": user(text),
                "thinking": thinking,
                "response": response,
                "teacher": "toy" if args.slips == 1 else f"toy, slips x {args.slips:g}",
            }
        )
    for row_id, order, text, rng in orders_of("reward", args.n_pairs, args.seed):
        a, b = (write_answer(order, random_slips(rng), rng) for _ in range(2))
        if not prefers_first(utility(order, a[1]), utility(order, b[1]), rng):
            a, b = b, a
        pairs.append(
            {
                "id": row_id,
                "messages": user(text),
                "chosen": a[1],
                "rejected": b[1],
                "chosen_thinking": a[0],
                "rejected_thinking": b[0],
            }
        )
    low, high = args.budgets
    prompts = [
        {"id": i, "messages": user(t), "source": "toy"}
        for i, _, t, _ in orders_of("rl", args.n_prompts, args.seed, range(low, high + 1))
    ]
    tasks = [
        {
            "id": i,
            "messages": user(t),
            "checklist": [q.format(avoid=o.avoid, budget=o.budget, word=o.word) for _, q in CHECKS.values()],
            "primary_tag": "Planning",
            "secondary_tags": [],
            "references": {"careful": write_answer(o, NO_SLIPS, rng)[1]},
        }
        for i, o, t, rng in orders_of("test", args.n_tasks + args.n_held_out, args.seed)
    ]
    held_out = [{"id": t["id"], "messages": t["messages"], "source": "toy"} for t in tasks[args.n_tasks :]]
    return {
        "sft_traces": traces,
        "rl_prompts": prompts,
        "preference_pairs": pairs,
        "benchmark_tasks": tasks[: args.n_tasks],
        "held_out_prompts": held_out,
    }


@dataclass
class SplitArgs:
    """Arguments of a task whose rows `split_rows` draws."""

    out: Path = Path("data/toy")
    """Folder for the files; an existing file is replaced only by an equal one."""
    seed: int = 0
    n_traces: int = 2000
    n_prompts: int = 2000
    n_tasks: int = 512


def split_rows(task: str, args: SplitArgs, shares: dict[str, range], draw) -> dict[str, list[dict]]:
    """Rows of <task>_traces, <task>_prompts and <task>_tasks, args.n_<split> each. `draw(rng)`: a prompt's text, what decides
    its split (so that it belongs to one, whatever the seed), and a function of the split that gives the row's other fields."""
    files: dict[str, list[dict]] = {}
    for split, n in (("traces", args.n_traces), ("prompts", args.n_prompts), ("tasks", args.n_tasks)):
        rng, seen, rows = random.Random(f"{split}-{args.seed}"), set(), []
        while len(rows) < n:
            text, key, rest = draw(rng)
            if text in seen or int(hashlib.sha1(key.encode()).hexdigest(), 16) % 100 not in shares[split]:
                continue
            seen.add(text)
            row = {"id": f"{task}-{split}-{len(rows):05d}", "messages": [{"role": "user", "content": text}]}
            rows.append(row | rest(split))
        files[f"{task}_{split}"] = rows
    return files


def save(files: dict[str, list[dict]], out: Path, seed: int) -> None:
    """Writes rows as {out}/{name}.jsonl; an existing file is replaced only by an equal one."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path, text = out / f"{name}.jsonl", "".join(json.dumps(r) + "\n" for r in rows)
        if path.exists() and path.read_text() != text:
            sys.exit(
                f"{path} exists and differs from what seed {seed} gives; remove it or choose another --out"
            )
        path.write_text(text)
        print(f"{path}: {len(rows)} rows")


def main(args: Args) -> None:
    save(write_files(args), args.out, args.seed)


if __name__ == "__main__":
    main(tyro.cli(Args))
