"""Behaviour of thinking: which traits of planning does one checkpoint show more than another? (Section 4.2.)

    python eval_benchmarks.py traits --generations results/rlmt/generations.jsonl \\
        --baseline results/sft/generations.jsonl --judge gpt-4.1-mini --price 0.4 1.6 --budget 5
    python eval_benchmarks.py traits --generations results/ppo/generations.jsonl \\
        --baseline results/sft/generations.jsonl --traits results/traits__rlmt__s0__1a2b3c/traits.json

Input: two files of generations (eval_*.py) or completions (RL scripts), matched by id. A plan is the
thinking of a completion with the status `ok`. If an id has several, the first of the latest step is taken.
Rows that are not used are counted by reason.

The protocol and the wording of its prompts are our own; the paper's appendix C prints theirs. So set its
figure 4 beside these win rates, but do not subtract one from the other. `--template FOLDER` takes other
wordings verbatim: extract.txt with {$pairs}, merge.txt with {$lists}, compare.txt with {$conversation},
{$plans} and {$traits}. They must ask for the JSON that ours ask for.

1. Extract. The judge gets batches of a few pairs of plans and names traits in which the two writers differ.
   It is not told who they are; who is writer 1 is drawn for each batch. One more call merges all lists into
   one.
2. Compare, on other prompts than those of step 1. There the traits would differ by selection, as they were
   picked because they differ. A call has one pair and all traits, so no pair influences the verdict on
   another, and an unreadable reply costs one pair. For each trait the judge says which plan shows it more:
   "1", "2" or "same". Each pair is asked in both orders.
3. Win rate of a trait = (wins + ties / 2) / verdicts, over both orders of every prompt. At 0.5 both
   checkpoints show it alike. The interval (95 %, bootstrap over prompts) is for each trait by itself.
   `flip_rate` is the share of prompts whose two orders disagree. If a reply cannot be read, the judge is
   asked again. If that does not help, the prompt is left out in both orders, so that the judge's liking for a
   position stays balanced. Above --max-invalid there are no win rates. If the judge's endpoint gave no reply
   to some requests, as in an outage, the run ends without win rates, and --resume asks these again.

`--traits` compares the traits of another run, or of a file of your own {"traits": [{"name",
"description"}]}. The prompts from which the other run extracted them are left out here too. Win rates with
the same `fingerprint` have the same traits, prompts, baseline plans and judge.

The data and the judge are checked first: one behind an endpoint is asked its first request, also by
--dry-run.

Writes results/<run>/: config.json, command.txt, env.txt, traits.json (with what each batch
gave), verdicts.jsonl, judge.jsonl (raw replies), summary.json; and a line for each trait in
results/runs.csv.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import shared
from benchmarks.flags import JudgeFlags
from benchmarks.judge_template import Placeholders, describe_wording, fill_messages, read_template
from benchmarks.scoring import bootstrap, index_row, read_object
from rlmt.data import read_rows, write_jsonl
from rlmt.run import check_run, start_run
from utils import fail, or_fail


@dataclass
class Args(JudgeFlags):
    generations: str = "results/grpo/generations.jsonl"
    """Rows {id, messages, thinking, status[, temperature, step]} of the tested checkpoint."""
    baseline: str = "results/sft/generations.jsonl"
    """Rows of the checkpoint that it is compared with."""
    temperature: float | None = None
    """Use only the rows of this temperature; needed if the files hold several."""
    traits: str = ""
    """traits.json of another run, or a file of your own; empty: extract them here."""
    max_traits: int = 10
    """The most traits in the list, and in the reply for a batch."""
    extract_pairs: int = 40
    """Pairs of plans that the traits are extracted from, drawn with --seed."""
    batch_pairs: int = 5
    """Pairs per call of the extraction."""
    compare_pairs: int = 0
    """Pairs to compare, drawn with --seed from those the extraction leaves; 0: all. Each is two calls."""
    judge: str = "gpt-4.1-mini"
    """A model's name at --judge-url; local:FOLDER or local:HUB-NAME to run it here."""
    template: str = ""
    """Folder with the judge's instructions: extract.txt, merge.txt, compare.txt; our own for those it
    lacks."""
    judge_max_tokens: int = 2048
    """New tokens of a reply; a judge that thinks needs more."""


# --- 1. pairs of plans


def match_plans(args: Args) -> tuple[list[dict], Counter]:
    """Returns pairs {id, messages, model (a plan), baseline (a plan)}, and how many rows are not used, by
    reason.

    The order of the pairs follows from --seed and the ids alone: other checkpoints meet on the same prompts.
    """
    not_used = Counter()
    model_plans = read_plans(args, args.generations, not_used)
    baseline_plans = read_plans(args, args.baseline, not_used)
    alone = model_plans.keys() ^ baseline_plans.keys()
    not_used["no plan in the other file"] += len(alone)

    def draw(prompt_id) -> float:
        return random.Random(f"{args.seed} {prompt_id}").random()

    pairs = []
    for prompt_id in sorted(model_plans.keys() & baseline_plans.keys(), key=draw):
        ours = model_plans[prompt_id]
        theirs = baseline_plans[prompt_id]
        if ours["messages"] != theirs["messages"]:
            fail(f"id {prompt_id!r} has other 'messages' in {args.generations} than in {args.baseline}")
        pair = {"id": prompt_id, "messages": ours["messages"]}
        pairs.append(pair | {"model": ours["thinking"], "baseline": theirs["thinking"]})
    return pairs, not_used


def read_plans(args: Args, path: str, not_used: Counter) -> dict:
    """Returns {id: the row whose plan is used} of a file; counts the other rows in `not_used`."""
    rows = read_rows(path, "messages", "status")
    temperatures = {row.get("temperature") for row in rows} - {None}
    if args.temperature is None and len(temperatures) > 1:
        fail(f"{path} has several temperatures; choose one with --temperature: {sorted(temperatures)}")

    rows.sort(key=lambda row: -row.get("step", 0))  # keeps the order of the file within a step
    plans = {}
    for row in rows:
        if args.temperature is not None and row.get("temperature") != args.temperature:
            not_used["another temperature"] += 1
        elif row["status"] != "ok":
            not_used[f"status {row['status']}"] += 1
        elif not (row.get("thinking") or "").strip():
            not_used["no thinking"] += 1
        elif row["id"] in plans:
            not_used["another row of its id"] += 1
        else:
            plans[row["id"]] = row
    return plans


def split_pairs(args: Args, pairs: list[dict], used_prompts: list) -> tuple[list[dict], list[dict]]:
    """Returns the pairs to extract traits from, and those to compare; exits with 2 if none is left for that.

    `used_prompts` are the ids that the traits of a --traits file were extracted from.
    """
    n_extracted = 0 if args.traits else args.extract_pairs
    extracted = pairs[:n_extracted]
    rest = [pair for pair in pairs[n_extracted:] if pair["id"] not in used_prompts]
    if not rest:
        fail(f"none of {len(pairs)} pairs is left to compare; use a smaller --extract-pairs, or more plans")
    return extracted, rest[: args.compare_pairs or None]


# --- 2. what the judge is asked

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


A_TRAIT = {"name": "x" * 80, "description": "x" * 400}  # in estimates, in place of one that is not known yet


def step_template(args: Args, step: str) -> str:
    """Returns the words of a step (a key of TEMPLATES); exits with 2 if those of --template cannot be filled
    in."""
    file = Path(args.template) / f"{step}.txt"
    if args.template and file.exists():
        return read_template(str(file), PLACEHOLDERS[step])
    return TEMPLATES[step]


def step_request(args: Args, step: str, **fields: str) -> dict:
    return shared.judge_request(args, fill_messages(step_template(args, step), fields))


def show_conversation(pair: dict) -> str:
    return "\n\n".join(f"{message['role'].upper()}: {message['content']}" for message in pair["messages"])


def show_plans(pair: dict, model_is: int) -> str:
    """Shows both plans between tags, as plans are full of headings; --generations' plan is `model_is`."""
    plans = [pair["model"].strip(), pair["baseline"].strip()]
    if model_is == 2:
        plans.reverse()
    return f"<plan 1>\n{plans[0]}\n</plan 1>\n\n<plan 2>\n{plans[1]}\n</plan 2>"


def batches(args: Args, pairs: list[dict]) -> list[tuple[int, list[dict]]]:
    """Returns for each call of the extraction which writer --generations is (1 or 2), and the pairs."""
    rng = random.Random(args.seed)
    drawn = []
    for start in range(0, len(pairs), args.batch_pairs):
        model_is = rng.choice((1, 2))
        drawn.append((model_is, pairs[start : start + args.batch_pairs]))
    return drawn


def extract_requests(args: Args, pairs: list[dict]) -> list[dict]:
    requests = []
    for model_is, batch in batches(args, pairs):
        parts = []
        for number, pair in enumerate(batch, 1):
            plans = show_plans(pair, model_is)
            parts.append(f"# Conversation {number}\n{show_conversation(pair)}\n\n{plans}")
        requests.append(step_request(args, "extract", pairs="\n\n".join(parts), most=str(args.max_traits)))
    return requests


def merge_request(args: Args, trait_lists: list[list[dict]]) -> dict:
    parts = []
    for number, traits in enumerate(trait_lists, 1):
        lines = [f"- {trait['name']}: {trait['description']}" for trait in traits]
        parts.append("\n".join([f"# Reader {number}", *lines]))
    return step_request(args, "merge", lists="\n\n".join(parts), most=str(args.max_traits))


def compare_requests(args: Args, pairs: list[dict], traits: list[dict]) -> list[dict]:
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
            requests.append(step_request(args, "compare", **fields))
    return requests


def print_estimate(args: Args, extracted: list[dict], compared: list[dict], traits: list[dict]) -> None:
    """Prints calls, tokens and cost of the extraction (but for one call that merges) and of the
    comparison."""
    shared.print_estimate(args, extract_requests(args, extracted), "extract")
    traits = traits or [A_TRAIT] * args.max_traits
    shared.print_estimate(args, compare_requests(args, compared, traits), "compare")


# --- 3. what it replies


def read_traits(text: str, most: int) -> list[dict]:
    """Returns the traits {name, description} of a reply or a file.

    Raises ValueError if there are more than `most`, if one is incomplete, or if two share a name.
    """
    listed = read_object(text).get("traits")
    if not isinstance(listed, list) or len(listed) > most:
        raise ValueError(f"'traits' is not a list of at most {most}")
    traits = {}
    for item in listed:
        try:
            name = " ".join(item["name"].split())
            description = " ".join(item["description"].split())
        except (TypeError, KeyError, AttributeError):
            raise ValueError("a trait needs a 'name' and a 'description', both strings") from None
        if not name or not description or name.casefold() in traits:
            raise ValueError(f"the trait {name!r} is empty or stands there twice")
        traits[name.casefold()] = {"name": name, "description": description}
    return list(traits.values())


def load_traits(path: str) -> dict:
    """Reads a --traits file, at least {traits, prompts}; exits with 2 if it has no valid list of traits."""
    try:
        text = Path(path).read_text()
        return {"prompts": [], **read_object(text), "traits": read_traits(text, most=100)}
    except (ValueError, OSError) as error:
        fail(f"--traits {path}: {error}")


def read_verdicts(text: str, n_traits: int) -> list[str]:
    """Returns which plan shows each trait more, "1", "2" or "same"; raises ValueError if one is missing."""
    found = read_object(text)
    found.pop("comparison", None)
    keys = [f"T{number}" for number in range(1, n_traits + 1)]
    if found.keys() != set(keys):
        raise ValueError(f"not one verdict for each of T1 to T{n_traits}")
    choices = [found[key] for key in keys]
    for place, choice in enumerate(choices):
        if type(choice) is int:  # a bool is another type
            choices[place] = str(choice)
        if choices[place] not in ("1", "2", "same"):
            raise ValueError(f"a verdict is {str(choice)[:40]!r}")
    return choices


def extract(args: Args, pairs: list[dict], run: Path) -> dict:
    """Asks the judge for traits; returns {traits, prompts (the ids it saw), batches} for traits.json."""
    parse = partial(read_traits, most=args.max_traits)
    replies = shared.ask_judge(args, extract_requests(args, pairs), parse, run)
    rows = []
    for (model_is, batch), reply in zip(batches(args, pairs), replies, strict=True):
        prompts = [pair["id"] for pair in batch]
        rows.append({"prompts": prompts, "model_is": model_is, "traits": reply.value, "invalid": reply.error})

    trait_lists = [row["traits"] for row in rows if row["traits"]]
    print(f"{len(trait_lists)} of {len(rows)} batches have traits", flush=True)
    if not trait_lists:
        fail(f"no traits to merge; see {run / 'judge.jsonl'}")
    merged = shared.ask_judge(args, [merge_request(args, trait_lists)], parse, run)[0]
    if not merged.value:
        fail(f"no merged traits: {merged.error}; see {run / 'judge.jsonl'}, or give a list by --traits")
    return {"traits": merged.value, "prompts": [pair["id"] for pair in pairs], "batches": rows}


def compare(args: Args, pairs: list[dict], traits: list[dict], run: Path) -> list[dict]:
    """Asks the judge to compare all pairs in both orders; returns the rows that `score_verdicts` reads."""
    names = [trait["name"] for trait in traits]

    def parse(text: str) -> dict[str, str]:
        return dict(zip(names, read_verdicts(text, len(names))))

    replies = shared.ask_judge(args, compare_requests(args, pairs, traits), parse, run)
    asked = [(pair["id"], model_is) for pair in pairs for model_is in (1, 2)]
    rows = []
    for (prompt_id, model_is), reply in zip(asked, replies, strict=True):
        rows.append({"id": prompt_id, "model_is": model_is, "choices": reply.value, "invalid": reply.error})
    return rows


# --- 4. from verdicts to win rates


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
    choices_by_prompt = {}  # and by order
    errors = []
    for row in rows:
        choices_by_order = choices_by_prompt.setdefault(row["id"], {})
        if row["choices"] is None:
            errors.append(row["invalid"])
        else:
            choices_by_order[row["model_is"]] = row["choices"]
    complete = [orders for orders in choices_by_prompt.values() if len(orders) == 2]
    if not complete:
        raise ValueError(f"no prompt has a readable reply in both orders; the first error: {errors[0]}")

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


# --- 5. the run


def fingerprint(args: Args, traits: list[dict], pairs: list[dict]) -> str:
    """Hashes what must be equal for two results to be comparable: judge, wording, traits, prompts,
    baseline."""
    contents = [
        args.judge,
        shared.resolve_judge_url(args.judge, args.judge_url),
        args.judge_max_tokens,
        step_template(args, "compare"),
        traits,
        [(pair["messages"], pair["baseline"]) for pair in pairs],
        shared.digests_of(args.judge),
    ]
    return shared.short_hash(json.dumps(contents))


def main(args: Args) -> None:
    # --- data, checked before anything is asked
    found = {"traits": [], "prompts": []}
    if args.traits:
        found = load_traits(args.traits)
    pairs, not_used = match_plans(args)
    print(f"{len(pairs)} pairs of plans; rows not used: {json.dumps(not_used)}")
    extracted, compared = split_pairs(args, pairs, found["prompts"])
    shared.check_judge(args)
    if args.template and not Path(args.template).is_dir():
        fail(f"--template {args.template}: no folder with extract.txt, merge.txt or compare.txt")
    for step in TEMPLATES:
        step_template(args, step)
    print_estimate(args, extracted, compared, found["traits"])
    start = check_run(args, "traits", str(Path(args.generations).parent))
    first_requests = extract_requests(args, extracted) or compare_requests(args, compared, found["traits"])
    shared.try_judge(args, start.run, first_requests)
    if args.dry_run:
        return
    run = start_run(start)

    # --- traits, verdicts, win rates
    if not args.traits:
        found = extract(args, extracted, run)
    traits = found["traits"]
    (run / "traits.json").write_text(json.dumps(found, indent=1) + "\n")
    verdicts = compare(args, compared, traits, run)
    write_jsonl(run / "verdicts.jsonl", verdicts)
    numbers = or_fail(score_verdicts, verdicts, traits, args.max_invalid, args.seed)
    judging = fingerprint(args, traits, compared)
    index = []
    for name, of_trait in numbers["traits"].items():
        row = index_row(args, f"traits against {args.baseline}", numbers, name, judging)
        low, high = of_trait["interval"]
        row |= {"model": args.generations, "value": of_trait["win_rate"], "low": low, "high": high}
        index.append(row)
    summary = {
        "model": args.generations,
        "baseline": args.baseline,
        "not_used": not_used,
        **numbers,
        "wording": describe_wording(args.template),
        "fingerprint": judging,
    }
    shared.save_results(run, summary, index)
