"""Behaviour of thinking: which traits of planning does one checkpoint show more than another? (Section 4.2.)

    python eval_benchmarks.py traits --generations results/rlmt/generations.jsonl \\
        --baseline results/sft/generations.jsonl --judge gpt-4.1-mini --price 0.4 1.6 --budget 5
    python eval_benchmarks.py traits --generations results/ppo/generations.jsonl \\
        --baseline results/sft/generations.jsonl --traits results/traits__rlmt__s0__1a2b3c/traits.json

Input: two files of generations (eval_*.py) or completions (RL scripts), matched by id. A plan is the
thinking of a completion with the status `ok`. If an id has several, the first of the latest step is taken.

The protocol and the wording of its prompts are our own; the paper's appendix C prints theirs. So set its
figure 4 beside these win rates, but do not subtract one from the other. `--template FOLDER` takes other
wordings verbatim: extract.txt with {$pairs}, merge.txt with {$lists}, compare.txt with {$conversation},
{$plans} and {$traits}; with --traits the last alone. They must ask for the JSON that ours ask for.

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
   to more requests than that, the run ends without win rates, and --resume asks these again.

`--traits` compares the traits of another run, or of a file of your own {"traits": [{"name",
"description"}]}. The prompts from which the other run extracted them are left out here too. Win rates with
the same `fingerprint` have the same traits, prompts, baseline plans and judge.

The data and the judge are checked first: one behind an endpoint is asked its first request, also by
--dry-run.

Writes results/<run>/: config.json, command.txt, env.txt, traits.json, verdicts.jsonl (`choices` in the order
of the traits), judge.jsonl (raw replies), summary.json.
"""

import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import shared
from benchmarks.flags import JudgeFlags
from benchmarks.judge import Judge, digests_of_judge
from benchmarks.judge_template import Placeholders, describe_wording, fill_messages, read_template
from benchmarks.scoring import mean_interval
from rlmt.data import read_rows, write_jsonl
from rlmt.run import Run
from rlmt.verdicts import read_object
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
    judge_max_tokens: int = 2048
    """New tokens of a reply; a judge that thinks needs more."""


# --- 1. pairs of plans


def match_plans(generations: str, baseline: str, temperature: float | None, seed: int) -> list[dict]:
    """Returns pairs {id, messages, model (a plan), baseline (a plan)} of two files.

    Their order follows only from seed and ids: other checkpoints meet on the same prompts.
    """
    model_plans = read_plans(generations, temperature)
    baseline_plans = read_plans(baseline, temperature)

    def draw(prompt_id) -> float:
        return random.Random(f"{seed} {prompt_id}").random()

    pairs = []
    for prompt_id in sorted(model_plans.keys() & baseline_plans.keys(), key=draw):
        ours = model_plans[prompt_id]
        theirs = baseline_plans[prompt_id]
        if ours["messages"] != theirs["messages"]:
            fail(f"id {prompt_id!r} has other 'messages' in {generations} than in {baseline}")
        pair = {"id": prompt_id, "messages": ours["messages"]}
        pairs.append(pair | {"model": ours["thinking"], "baseline": theirs["thinking"]})
    return pairs


def read_plans(path: str, temperature: float | None) -> dict:
    """Returns {id: the row whose plan is used} of a file, and prints how many of its rows these are.

    `temperature`: of the rows that may be used; None: of all.
    """
    rows = read_rows(path, "messages", "status")
    temperatures = {row.get("temperature") for row in rows} - {None}
    if temperature is None and len(temperatures) > 1:
        fail(f"{path} has several temperatures; choose one with --temperature: {sorted(temperatures)}")

    rows.sort(key=lambda row: -row.get("step", 0))  # keeps the order of the file within a step
    plans = {}
    for row in rows:
        is_chosen = temperature in (None, row.get("temperature"))
        if is_chosen and row["status"] == "ok" and (row.get("thinking") or "").strip():
            plans.setdefault(row["id"], row)
    print(f"{path}: {len(plans)} plans are used, of {len(rows)} rows")
    return plans


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


def show_conversation(pair: dict) -> str:
    return "\n\n".join(f"{message['role'].upper()}: {message['content']}" for message in pair["messages"])


def show_plans(pair: dict, model_is: int) -> str:
    """Shows both plans between tags, as plans are full of headings; --generations' plan is `model_is`."""
    plans = [pair["model"].strip(), pair["baseline"].strip()]
    if model_is == 2:
        plans.reverse()
    return f"<plan 1>\n{plans[0]}\n</plan 1>\n\n<plan 2>\n{plans[1]}\n</plan 2>"


# --- 3. what it replies


def read_traits(text: str, most: int) -> list[dict]:
    """Returns the traits {name, description} of a reply or a file.

    Raises ValueError if there are more than `most`, if one is incomplete, or if two share a name.
    """
    descriptions = {}
    try:
        listed = read_object(text)["traits"]
        for trait in listed:
            descriptions[trait["name"].strip()] = trait["description"].strip()
    except (TypeError, KeyError, AttributeError):
        raise ValueError("no list of 'traits', each with a 'name' and a 'description'") from None
    if len(listed) > most or len(descriptions) < len(listed):
        raise ValueError(f"more than {most} traits, or two of one name")
    if "" in descriptions or "" in descriptions.values():
        raise ValueError("a trait is empty")
    return [{"name": name, "description": words} for name, words in descriptions.items()]


def load_traits(path: str) -> dict:
    """Reads a --traits file, at least {traits, prompts}; exits with 2 if it has no valid list of traits."""
    try:
        text = Path(path).read_text()
        traits = read_traits(text, most=100)
        if not traits:
            raise ValueError("it has no traits")
        return {"prompts": [], **read_object(text), "traits": traits}
    except (ValueError, OSError) as error:
        fail(f"--traits {path}: {error}")


def read_verdicts(text: str, n_traits: int) -> list[str]:
    """Returns which plan shows each trait more, "1", "2" or "same"; raises ValueError if one is missing."""
    found = read_object(text)
    found.pop("comparison", None)
    keys = [f"T{number}" for number in range(1, n_traits + 1)]
    if found.keys() != set(keys):
        raise ValueError(f"not one verdict for each of T1 to T{n_traits}")
    choices = [str(found[key]) for key in keys]  # 1 counts as "1"
    if not {"1", "2", "same"}.issuperset(choices):
        raise ValueError(f"the verdicts are {str(choices)[:80]}")
    return choices


# --- 4. the judge


class TraitJudge(Judge):
    """A judge that names traits, and compares plans by them; its flags are those above."""

    def __init__(self, args: Args):
        super().__init__(args)
        self.templates = args.template
        self.max_traits = args.max_traits
        self.batch_pairs = args.batch_pairs

    def template(self, step: str) -> str:
        """Returns the words of a step (a key of TEMPLATES); exits with 2 if those of --template cannot be
        filled in."""
        if self.templates:
            return read_template(f"{self.templates}/{step}.txt", PLACEHOLDERS[step])
        return TEMPLATES[step]

    def request_of(self, step: str, **fields: str) -> dict:
        fields["most"] = str(self.max_traits)
        return self.request(fill_messages(self.template(step), fields))

    def extract_requests(self, pairs: list[dict]) -> list[dict]:
        rng = random.Random(self.seed)
        size = self.batch_pairs
        requests = []
        for start in range(0, len(pairs), size):
            model_is = rng.choice((1, 2))
            parts = []
            for number, pair in enumerate(pairs[start : start + size], 1):
                plans = show_plans(pair, model_is)
                parts.append(f"# Conversation {number}\n{show_conversation(pair)}\n\n{plans}")
            requests.append(self.request_of("extract", pairs="\n\n".join(parts)))
        return requests

    def merge_request(self, trait_lists: list[list[dict]]) -> dict:
        parts = []
        for number, traits in enumerate(trait_lists, 1):
            lines = [f"- {trait['name']}: {trait['description']}" for trait in traits]
            parts.append("\n".join([f"# Reader {number}", *lines]))
        return self.request_of("merge", lists="\n\n".join(parts))

    def compare_requests(self, pairs: list[dict], traits: list[dict]) -> list[dict]:
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
                requests.append(self.request_of("compare", **fields))
        return requests

    def extract(self, requests: list[dict], run: Path) -> list[dict]:
        """Asks for traits in batches, and for one list of all these."""
        parse = partial(read_traits, most=self.max_traits)
        replies = self.ask(requests, parse, run)
        trait_lists = [reply.value for reply in replies if reply.value]
        print(f"{len(trait_lists)} of {len(replies)} batches have traits", flush=True)
        if not trait_lists:
            fail(f"no traits to merge; see {run / 'judge.jsonl'}")
        [merged] = self.ask([self.merge_request(trait_lists)], parse, run)
        if not merged.value:
            fail(f"no merged traits: {merged.error}; see {run / 'judge.jsonl'}, or give a list by --traits")
        return merged.value

    def compare(self, pairs: list[dict], traits: list[dict], run: Path) -> list[dict]:
        """Asks to compare all pairs in both orders; returns the rows that `score_verdicts` reads."""
        parse = partial(read_verdicts, n_traits=len(traits))
        replies = self.ask(self.compare_requests(pairs, traits), parse, run)
        rows = []
        for index, reply in enumerate(replies):
            order = {"id": pairs[index // 2]["id"], "model_is": 1 + index % 2}
            rows.append(order | {"choices": reply.value, "invalid": reply.error})
        return rows

    def fingerprint(self, traits: list[dict], pairs: list[dict]) -> str:
        """Hashes what must be equal for two results to be comparable: judge, wording, traits, prompts,
        baseline."""
        contents = [
            self.name,
            self.max_tokens,
            self.template("compare"),
            traits,
            [(pair["messages"], pair["baseline"]) for pair in pairs],
            digests_of_judge(self.name),
            *self.of_endpoint["omit"],
        ]
        return shared.short_hash(json.dumps(contents))


# --- 5. from verdicts to win rates


# what a verdict is worth to the plan of --generations when that is plan 1; when it is plan 2, 1 - this
WORTH = {"1": 1.0, "same": 0.5, "2": 0.0}


def score_verdicts(rows: list[dict], traits: list[dict], max_invalid: float, seed: int) -> dict:
    """Returns the win rate of each trait, and counts of prompts and replies.

    Args:
        rows: two for each prompt, {choices (for each trait "1", "2" or "same"; or None), invalid}:
            --generations' plan first, then second.

    Raises ValueError if no prompt has readable replies in both orders.
    """
    errors = [row["invalid"] for row in rows if row["choices"] is None]
    choices = []
    for first, second in zip(rows[0::2], rows[1::2], strict=True):
        if first["choices"] and second["choices"]:
            choices.append([first["choices"], second["choices"]])
    if not choices:
        raise ValueError(f"no prompt has a readable reply in both orders; the first error: {errors[0]}")

    values = np.vectorize(WORTH.get)(choices)  # (prompts, 2 orders, traits)
    values[:, 1] = 1 - values[:, 1]
    numbers_by_trait = {}
    for index, trait in enumerate(traits):
        of_trait = values[:, :, index]
        numbers = {
            "description": trait["description"],
            "win_rate": float(of_trait.mean()),
            "interval": mean_interval(of_trait.mean(axis=1), seed),
            "wins": int((of_trait == 1).sum()),
            "ties": int((of_trait == 0.5).sum()),
            "losses": int((of_trait == 0).sum()),
            "flip_rate": float((of_trait[:, 0] != of_trait[:, 1]).mean()),
        }
        if len(errors) > max_invalid * len(rows):
            numbers["withheld"] = numbers["win_rate"]
            numbers["win_rate"] = None
        numbers_by_trait[trait["name"]] = numbers
    return {
        "n": len(choices),
        "n_left_out": len(rows) // 2 - len(choices),
        "n_replies": len(rows),
        "n_invalid": len(errors),
        "traits": numbers_by_trait,
    }


# --- 6. the run


def main(args: Args) -> None:
    # --- data, checked before anything is asked
    pairs = match_plans(args.generations, args.baseline, args.temperature, args.seed)
    judge = TraitJudge(args)
    judge.check_is_model("traits")
    judge.check()
    if args.traits:
        found = load_traits(args.traits)
        requests = []
        parse = partial(read_verdicts, n_traits=len(found["traits"]))
    else:
        extracted = pairs[: args.extract_pairs]
        not_known_yet = {"name": "x" * 80, "description": "x" * 400}  # for the estimate
        found = {"traits": [not_known_yet] * args.max_traits, "prompts": [pair["id"] for pair in extracted]}
        requests = judge.extract_requests(extracted)
        parse = partial(read_traits, most=args.max_traits)
    compared = [pair for pair in pairs if pair["id"] not in found["prompts"]][: args.compare_pairs or None]
    if not compared:
        fail(f"none of {len(pairs)} pairs is left to compare; use a smaller --extract-pairs, or more plans")
    comparing = judge.compare_requests(compared, found["traits"])
    run = Run(args, "traits", str(Path(args.generations).parent))
    judge.print_estimate(run.folder, requests, "extract")  # and one call more, which merges
    judge.print_estimate(run.folder, comparing, "compare")
    judge.try_first(run.folder, requests or comparing, parse)
    if args.dry_run:
        return
    run.start(has_steps=False)

    # --- traits, verdicts, win rates
    if not args.traits:
        found["traits"] = judge.extract(requests, run.folder)
    traits = found["traits"]
    (run.folder / "traits.json").write_text(json.dumps(found, indent=1) + "\n")
    verdicts = judge.compare(compared, traits, run.folder)
    write_jsonl(run.folder / "verdicts.jsonl", verdicts)
    numbers = or_fail(score_verdicts, verdicts, traits, args.max_invalid, args.seed)
    judging = judge.fingerprint(traits, compared)
    print(pd.DataFrame(numbers["traits"]).T.drop(columns="description").to_string())
    summary = {
        "model": args.generations,
        "baseline": args.baseline,
        **numbers,
        "wording": describe_wording(args.template),
        "fingerprint": judging,
    }
    shared.save_results(run, summary, [])
