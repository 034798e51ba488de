"""Behaviour of thinking: which traits of planning does one checkpoint show more than another? (RLMT paper, section 4.2.)

    python eval_traits.py --generations results/rlmt/generations.jsonl --baseline results/sft/generations.jsonl --dry-run
    python eval_traits.py --generations results/rlmt/generations.jsonl --baseline results/sft/generations.jsonl \\
        --judge gpt-4.1-mini --price 0.4 1.6 --budget 5
    python eval_traits.py --generations results/ppo/generations.jsonl --baseline results/sft/generations.jsonl \\
        --traits results/traits__rlmt__s0__1a2b3c/traits.json

Input: two files of generations (eval_*.py) or completions (RL scripts), matched by id. A plan is the thinking of a completion
of status `ok`; where an id has several, the first of the latest step is taken. Rows not used are counted, and listed in
dropped.jsonl.

The protocol is ours: we do not have the paper's prompts, so its figure 4 can be set beside the win rates, not subtracted.
1. Extract. Batches of a few pairs of plans go to the judge, which names traits in which the two writers differ. It is not told
   who they are; in a batch writer 1 is one checkpoint, which one is drawn. One more call merges all lists into one.
2. Compare, on other prompts than those of step 1: traits picked because they differ there would differ there by selection too.
   A call has one pair and all traits, so that no pair colours the verdict on another and an unreadable reply costs one pair.
   For each trait the judge says which plan shows it more, "1", "2" or "same"; each pair is asked in both orders.
3. Win rate of a trait = (wins + ties / 2) / verdicts, both orders of every prompt: 0.5 means that both checkpoints show it
   alike. The interval (95 %, bootstrap over prompts) is for each trait by itself. `flip_rate`: the share of prompts whose two
   orders disagree. A reply that cannot be read is asked for again, then it is `invalid`: its prompt is left out in both
   orders, so that the judge's liking for a position stays balanced. Above --max-invalid there are no win rates.

`--traits` compares the traits of another run, or of a file of your own {"traits": [{"name", "description"}]}; prompts that the
other run extracted them from are left out here too. Win rates of equal `fingerprint` rest on the same traits, prompts, judge.
Writes results/<run>/: config.json, command.txt, env.txt, dropped.jsonl, traits.json (with what each batch gave),
verdicts.jsonl, judge.jsonl (raw replies), summary.json; and a line a trait in results/runs.csv.
"""

import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import runs  # isort: skip
import numpy as np

from benchmarks import shared as evaluation
from endpoint import Endpoint
from rows import read_rows


@dataclass
class Args:
    # data
    generations: str = "results/grpo/generations.jsonl"
    """Rows {id, messages, thinking, status[, temperature, step]} of the checkpoint whose win rates are reported."""
    baseline: str = "results/sft/generations.jsonl"
    """Rows of the checkpoint that it is compared with."""
    temperature: float | None = None
    """Use the rows of this temperature; needed where the files hold several."""
    # traits
    traits: str = ""
    """traits.json of another run, or a file of your own; empty: extract them here."""
    max_traits: int = 10
    """Traits in the list, and in the reply for a batch, at most (K)."""
    extract_pairs: int = 40
    """Pairs of plans that the traits are extracted from, drawn with --seed."""
    batch_pairs: int = 5
    """Pairs in a call of the extraction."""
    compare_pairs: int = 0
    """Pairs to compare, drawn with --seed from those not used in the extraction; 0: all. Each takes two calls."""
    # judge
    judge: str = "gpt-4.1-mini"
    """A model's name at --judge-url; local:FOLDER, or a hub name after local:, to run it here."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: OPENAI_BASE_URL, else the official one. The key: OPENAI_API_KEY."""
    judge_max_tokens: int = 2048
    """New tokens of a reply; a judge that thinks needs more."""
    concurrency: int = 32
    """Judge calls at a time."""
    budget: float = 0.0
    """US dollars that the judge may cost; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the judge."""
    max_invalid: float = 0.01
    """Share of unreadable replies in the comparison above which no win rate is given."""
    # run
    seed: int = 0
    """Of the pairs drawn, of who is writer 1, and of the bootstrap."""
    out: str = ""
    """Run folder; empty: results/traits__<folder of --generations>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Keep every reply of the judge that a run folder already has."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, print calls and cost (at most, unreadable replies aside) and stop: the judge is not asked."""


# --- 1. pairs of plans


def read_generations(path: str) -> list[dict]:
    """Rows of a file of generations or completions with their `line`, the fields that are used of the right types."""
    rows = read_rows(path, "messages", "status")
    for line, row in enumerate(rows, 1):
        row |= {"line": line, "thinking": row.get("thinking") or "", "step": row.get("step", 0)}
        for field, kind in (
            ("id", str | int),
            ("thinking", str),
            ("step", int),
            ("temperature", float | int | None),
        ):
            if not isinstance(row.get(field), kind):
                bad = json.dumps(row[field])[:50]
                runs.fail(f"{path}:{line}: {field!r} cannot be {bad}; results/README.md has the schemas")
    return rows


def choose_plans(rows: list[dict], temperature: float | None) -> tuple[dict, list[dict]]:
    """Of each id the row with a plan to use, and the rows not used {line, id, reason}."""
    plans, dropped = {}, []
    for row in sorted(rows, key=lambda r: -r["step"]):  # stable
        reason = (
            "another temperature"
            if temperature is not None and row.get("temperature") != temperature
            else f"status {row['status']}"
            if row["status"] != "ok"
            else "no thinking"
            if not row["thinking"].strip()
            else "another row of its id"
            if row["id"] in plans
            else ""
        )
        if reason:
            dropped.append({"line": row["line"], "id": row["id"], "reason": reason})
        else:
            plans[row["id"]] = row
    return plans, dropped


def match_plans(args: Args) -> tuple[list[dict], list[dict]]:
    """Pairs {id, messages, model, baseline} (the last two: plans), and the rows not used {file, line, id, reason}.

    The order of the pairs is drawn by --seed and id, so that other checkpoints are compared on the same prompts.
    """
    paths = (args.generations, args.baseline)
    files = [read_generations(path) for path in paths]
    found = {r["temperature"] for rows in files for r in rows if r.get("temperature") is not None}
    if args.temperature is None and len(found) > 1:
        runs.fail(
            f"{' and '.join(paths)} have rows of several temperatures; choose one with --temperature: {sorted(found)}"
        )
    (ours, dropped), (theirs, more) = [choose_plans(rows, args.temperature) for rows in files]
    for own, others, unused in ((ours, theirs, dropped), (theirs, ours, more)):
        unused += [
            {"line": own[i]["line"], "id": i, "reason": "no plan in the other file"}
            for i in own
            if i not in others
        ]
    pairs = []
    for i in sorted(ours.keys() & theirs.keys(), key=lambda i: random.Random(f"{args.seed} {i}").random()):
        row, other = ours[i], theirs[i]
        if row["messages"] != other["messages"]:
            runs.fail(
                f"id {i!r} stands for other 'messages' in {paths[0]}:{row['line']} than in {paths[1]}:{other['line']}; "
                "the files must be of the same prompts"
            )
        pairs.append(
            {"id": i, "messages": row["messages"], "model": row["thinking"], "baseline": other["thinking"]}
        )
    return pairs, [{"file": path, **d} for path, unused in zip(paths, (dropped, more)) for d in unused]


# --- 2. what the judge is asked

EXTRACT = """Two writers, 1 and 2, answered the same users, and each made a plan before every answer. Below are conversations,
each with the plan of writer 1 and the plan of writer 2. Writer 1 is the same person throughout, and so is writer 2.

{pairs}

How do the two writers differ in the way they plan? Name at most {most} traits that one of them shows more than the other, in
more than one of these plans. A trait says how a plan is made: what comes first, how ideas are found, ordered, weighed, grouped
or checked. It does not say what the answer is about, how good it is or how long. Word it so that a reader of any two plans
could tell which one shows it more, and mention no writer.
Reply with one JSON object and nothing else, with an empty list if they plan alike:
{{"traits": [{{"name": "two to six words", "description": "one sentence"}}]}}"""

MERGE = """Several readers compared plans that two writers had made, and each listed traits in which the writers differ:

{lists}

Make one list of at most {most} traits of these. Traits that mean the same become one; if too many are left, keep those that
most readers found. No two traits may overlap or be each other's opposite, and none may mention a writer.
Reply with one JSON object and nothing else:
{{"traits": [{{"name": "two to six words", "description": "one sentence"}}]}}"""

COMPARE = """Two writers each made a plan before answering the same user. Say for each trait below which plan shows it more.

# Conversation
{conversation}

{plans}

# Traits
{traits}

Decide trait by trait. To show a trait is neither good nor bad, and a longer plan does not show more of it for its length
alone. Say "1" if plan 1 shows the trait more, "2" if plan 2 does, "same" if both show it alike or neither does.
Reply with one JSON object and nothing else, in which every trait has its key:
{{"comparison": "a few sentences", {keys}}}"""

LIMITS = {"name": 80, "description": 400}  # characters


def request(args: Args, text: str) -> dict:
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": args.judge_max_tokens,
        "response_format": {"type": "json_object"},
    }


def conversation(pair: dict) -> str:
    return "\n\n".join(f"{m['role'].upper()}: {m['content']}" for m in pair["messages"])


def two_plans(pair: dict, model_is: int) -> str:
    """Both plans, between tags as plans are full of headings; `model_is` (1 or 2) is the place of --generations' plan."""
    plans = [pair["model"], pair["baseline"]] if model_is == 1 else [pair["baseline"], pair["model"]]
    return "\n\n".join(f"<plan {n}>\n{plan.strip()}\n</plan {n}>" for n, plan in enumerate(plans, 1))


def batches(args: Args, pairs: list[dict]) -> list[tuple[int, list[dict]]]:
    """(which writer --generations is, the pairs) of each call of the extraction."""
    rng = random.Random(args.seed)
    return [
        (rng.choice((1, 2)), pairs[i : i + args.batch_pairs]) for i in range(0, len(pairs), args.batch_pairs)
    ]


def extract_requests(args: Args, pairs: list[dict]) -> list[dict]:
    show = lambda n, pair, model_is: (
        f"# Conversation {n}\n{conversation(pair)}\n\n{two_plans(pair, model_is)}"
    )
    texts = [
        "\n\n".join(show(n, p, model_is) for n, p in enumerate(batch, 1))
        for model_is, batch in batches(args, pairs)
    ]
    return [request(args, EXTRACT.format(pairs=text, most=args.max_traits)) for text in texts]


def merge_request(args: Args, found: list[list[dict]]) -> dict:
    """`found`: the traits of each batch."""
    lists = [
        "\n".join([f"# Reader {n}", *(f"- {t['name']}: {t['description']}" for t in traits)])
        for n, traits in enumerate(found, 1)
    ]
    return request(args, MERGE.format(lists="\n\n".join(lists), most=args.max_traits))


def compare_requests(args: Args, pairs: list[dict], traits: list[dict]) -> list[dict]:
    """Two requests a pair: --generations' plan first, then second."""
    listed = "\n".join(f"T{n}. {t['name']}: {t['description']}" for n, t in enumerate(traits, 1))
    keys = ", ".join(f'"T{n}": "..."' for n in range(1, len(traits) + 1))
    return [
        request(
            args,
            COMPARE.format(
                conversation=conversation(p), plans=two_plans(p, model_is), traits=listed, keys=keys
            ),
        )
        for p in pairs
        for model_is in (1, 2)
    ]


# --- 3. what it says


def read_object(text: str) -> dict:
    """The one JSON object in a reply, prose around it aside; ValueError for anything else, or a key that stands twice."""

    def once(items: list[tuple]) -> dict:
        if len(dict(items)) < len(items):
            raise ValueError("a key stands twice")
        return dict(items)

    for candidate in (text, text[text.find("{") : text.rfind("}") + 1]):
        try:
            found = json.loads(candidate, object_pairs_hook=once, strict=False)
        except json.JSONDecodeError:
            continue
        except RecursionError:
            break
        if isinstance(found, dict):
            return found
        break
    raise ValueError("no JSON object, or more than one")


def read_traits(text: str, most: int) -> list[dict]:
    """Traits {name, description} of a reply or a file; ValueError for half a trait, a name twice, or too many."""
    listed = read_object(text).get("traits")
    if not isinstance(listed, list) or len(listed) > most:
        raise ValueError(f"'traits' is no list of at most {most}")
    traits = []
    for t in listed:
        if not isinstance(t, dict) or not all(isinstance(t.get(k), str) for k in LIMITS):
            raise ValueError("a trait needs a 'name' and a 'description', both strings")
        traits.append({k: " ".join(t[k].split()) for k in LIMITS})
        if not all(0 < len(traits[-1][k]) <= limit for k, limit in LIMITS.items()):
            raise ValueError(
                f"the name or description of a trait is empty or has more characters than {LIMITS}"
            )
    if len({t["name"].casefold() for t in traits}) < len(traits):
        raise ValueError("two traits have one name")
    return traits


def read_verdicts(text: str, n_traits: int) -> list[str]:
    """Which plan shows it more, "1", "2" or "same", for each trait; ValueError unless the reply says so for every one."""
    found = read_object(text)
    found.pop("comparison", None)
    keys = [f"T{n}" for n in range(1, n_traits + 1)]
    if found.keys() != set(keys):
        raise ValueError(f"verdicts for {', '.join(found)[:80] or 'no trait'}, not for T1 to T{n_traits}")
    choices = [str(found[k]) if type(found[k]) is int else found[k] for k in keys]
    if bad := [c for c in choices if c not in ("1", "2", "same")]:
        raise ValueError(f"a verdict is {str(bad[0])[:40]!r}")
    return choices


# --- 4. from verdicts to win rates


def choice_value(choice: str, model_is: int) -> float:
    """1, 0.5 or 0: the plan of --generations shows the trait more, alike, less."""
    return 0.5 if choice == "same" else float(choice == str(model_is))


def score_verdicts(rows: list[dict], traits: list[dict], max_invalid: float, seed: int) -> dict:
    """Win rates, and counts of prompts and replies.

    Args:
        rows: one a reply, {id, model_is (1 or 2), choices: {trait: "1", "2" or "same"} or None if invalid, invalid}.

    Raises ValueError when no prompt has readable replies in both orders.
    """
    read: dict[str, dict[int, dict]] = {}
    for row in rows:
        if row["choices"] is not None:
            read.setdefault(row["id"], {})[row["model_is"]] = row["choices"]
    both = [orders for orders in read.values() if len(orders) == 2]
    invalid = [r["invalid"] for r in rows if r["choices"] is None]
    if not both:
        raise ValueError(
            f"no prompt has a readable reply in both orders; {len(invalid)} of {len(rows)} replies are invalid, "
            f"the first: {invalid[0]}"
        )
    out = {
        "n": len(both),
        "n_left_out": len({r["id"] for r in rows}) - len(both),
        "n_replies": len(rows),
        "n_invalid": len(invalid),
        "traits": {},
    }
    for trait in traits:
        name = trait["name"]
        values = np.array(
            [[choice_value(choices[name], m) for m, choices in sorted(orders.items())] for orders in both]
        )
        numbers = {
            "win_rate": float(values.mean()),
            "interval": evaluation.bootstrap(values.mean(axis=1), seed),
            "wins": int((values == 1).sum()),
            "ties": int((values == 0.5).sum()),
            "losses": int((values == 0).sum()),
            "flip_rate": float((values[:, 0] != values[:, 1]).mean()),
        }
        if len(invalid) > max_invalid * len(rows):
            numbers["without_headline"], numbers["win_rate"] = numbers["win_rate"], None
        out["traits"][name] = {"description": trait["description"], **numbers}
    return out


def table(summary: dict) -> str:
    """A line a trait, the highest win rate first."""
    lines = [f"{'trait':40}  win rate [95 % interval]    wins   ties  losses  flips"]
    rank = lambda item: -item[1].get("without_headline", item[1]["win_rate"])
    for name, t in sorted(summary["traits"].items(), key=rank):
        rate = (
            "none    "
            if t["win_rate"] is None
            else "{:.3f} [{:.3f}, {:.3f}]".format(t["win_rate"], *t["interval"])
        )
        lines.append(
            f"{name:40}  {rate:24}  {t['wins']:6} {t['ties']:6}  {t['losses']:6}  {t['flip_rate']:.3f}"
        )
    lines.append(
        f"{summary['n']} prompts in both orders, {summary['n_left_out']} left out; {summary['n_invalid']} of "
        f"{summary['n_replies']} replies invalid"
    )
    return "\n".join(lines)


# --- 5. runs


def extract(args: Args, pairs: list[dict], run: Path) -> dict:
    """What goes into traits.json: {traits, prompts (ids that were looked at), batches}."""
    read = lambda text: read_traits(text, args.max_traits)
    replies = evaluation.ask_judge(args, extract_requests(args, pairs), read, run)
    rows = [
        {
            "prompts": [p["id"] for p in batch],
            "model_is": model_is,
            "traits": reply.value,
            "invalid": reply.error,
        }
        for (model_is, batch), reply in zip(batches(args, pairs), replies, strict=True)
    ]
    found, n_invalid = [r["traits"] for r in rows if r["traits"]], sum(bool(r["invalid"]) for r in rows)
    print(f"{len(found)} of {len(rows)} batches have traits; {n_invalid} replies are invalid", flush=True)
    if not found:
        runs.fail(f"no traits to merge; {run / 'judge.jsonl'} has what the judge said")
    merged = evaluation.ask_judge(args, [merge_request(args, found)], read, run)[0]
    if not merged.value:
        runs.fail(
            f"the reply that merges the traits is invalid: {merged.error or 'no traits'}; {run / 'judge.jsonl'} has it. "
            "--traits takes a list of your own"
        )
    return {"traits": merged.value, "prompts": [p["id"] for p in pairs], "batches": rows}


def load_traits(path: str) -> dict:
    """What a --traits file holds, at least {traits, prompts}; exits with 2 when it has no list of traits."""
    try:
        text = Path(path).read_text()
        stored = {"prompts": [], **read_object(text), "traits": read_traits(text, 100)}
        if not stored["traits"] or not isinstance(stored["prompts"], list):
            raise ValueError("'traits' is empty, or 'prompts' no list of ids")
    except (ValueError, OSError) as e:
        runs.fail(
            f'--traits {path}: {e}; it must hold {{"traits": [{{"name": "...", "description": "..."}}, ...]}}'
        )
    return stored


def fingerprint(args: Args, traits: list[dict], pairs: list[dict]) -> dict:
    """What must be equal for two results to be comparable, and a hash of it."""
    sha = lambda value: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
    place = evaluation.judge_place(args.judge, args.judge_url)
    out = {
        "judge": args.judge,
        "judge_url": place,
        "judge_max_tokens": args.judge_max_tokens,
        "template": sha(COMPARE),
        "traits": sha(traits),
        "prompts": sha([p["messages"] for p in pairs]),
        "baseline": sha([p["baseline"] for p in pairs]),
    }
    return {**out, "hash": sha(out)}


def print_estimate(args: Args, extracted: list[dict], compared: list[dict], traits: list[dict]) -> None:
    """Calls, tokens and cost of every step. For traits that are not known yet the longest possible ones stand in."""
    full = [{k: "x" * limit for k, limit in LIMITS.items()}] * args.max_traits
    first = extract_requests(args, extracted)
    steps = {
        "extract": first,
        "merge": [merge_request(args, [full] * len(first))] if first else [],
        "compare": compare_requests(args, compared, traits or full),
    }
    judge = Endpoint(args.judge, Path(args.out or "results", "judge.jsonl"), args.judge_url, price=args.price)
    for name, requests in steps.items():
        print(f"{name}: {json.dumps(judge.estimate(requests))}")


def main(args: Args) -> None:
    # --- data, checked before anything is asked
    for field, least in (("max_traits", 1), ("extract_pairs", 1), ("batch_pairs", 1), ("compare_pairs", 0)):
        if getattr(args, field) < least:
            runs.fail(f"--{field.replace('_', '-')} {getattr(args, field)}: use {least} or more")
    given = load_traits(args.traits) if args.traits else {"traits": [], "prompts": []}
    pairs, dropped = match_plans(args)
    print(
        f"{len(pairs)} pairs of plans; rows not used:",
        json.dumps(Counter(f"{d['file']}: {d['reason']}" for d in dropped)),
    )
    n = 0 if args.traits else args.extract_pairs
    extracted, rest = pairs[:n], [p for p in pairs[n:] if p["id"] not in given["prompts"]]
    compared = rest[: args.compare_pairs or None]
    if not compared:
        runs.fail(
            f"of {len(pairs)} pairs none is left to compare: {len(pairs) - len(rest)} are for the extraction of traits; "
            "use a smaller --extract-pairs, or files with more plans"
        )
    print(
        f"traits from {args.traits or f'{len(extracted)} pairs'}; {len(compared)} of {len(rest)} other pairs to compare"
    )
    if args.dry_run:
        return print_estimate(args, extracted, compared, given["traits"])
    run = runs.start_run(args, "traits", str(Path(args.generations).parent))
    path = run / "summary.json"
    if path.exists():
        return print(table(json.loads(path.read_text())))
    runs.write_dropped(run, dropped)

    # --- traits, verdicts, win rates
    if not args.traits:
        given = extract(args, extracted, run)
    traits = given["traits"]
    (run / "traits.json").write_text(json.dumps(given, indent=1) + "\n")
    names = [t["name"] for t in traits]
    read = lambda text: dict(zip(names, read_verdicts(text, len(names))))
    replies = evaluation.ask_judge(args, compare_requests(args, compared, traits), read, run)
    asked = [{"id": p["id"], "model_is": model_is} for p in compared for model_is in (1, 2)]
    rows = [{**row, "choices": r.value, "invalid": r.error} for row, r in zip(asked, replies, strict=True)]
    (run / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = runs.or_fail(score_verdicts, rows, traits, args.max_invalid, args.seed)
    summary = {
        "model": args.generations,
        "baseline": args.baseline,
        **numbers,
        "fingerprint": fingerprint(args, traits, compared),
    }
    runs.write_summary(run, summary)
    common = {
        "model": args.generations,
        "benchmark": f"traits against {args.baseline}",
        "temperature": args.temperature,
        "n": numbers["n"],
        "n_invalid": numbers["n_invalid"],
        "judge": args.judge,
        "fingerprint": summary["fingerprint"]["hash"],
    }
    runs.add_to_index(
        run,
        [
            {**common, "metric": name, "value": t["win_rate"], **dict(zip(("low", "high"), t["interval"]))}
            for name, t in numbers["traits"].items()
        ],
    )
    print(table(summary))


if __name__ == "__main__":
    main(runs.parse_args(Args, {}))
