"""Behaviour of thinking: which traits of planning does one checkpoint show more than another? (Section 4.2.)

    python eval_benchmarks.py traits --generations results/rlmt/generations.jsonl \\
        --baseline results/sft/generations.jsonl --judge gpt-4.1-mini --price 0.4 1.6 --budget 5
    python eval_benchmarks.py traits --generations results/ppo/generations.jsonl \\
        --baseline results/sft/generations.jsonl --traits results/traits__rlmt__s0__1a2b3c/traits.json

Input: two files of generations (eval_*.py) or completions (RL scripts), matched by id. A plan is the
thinking of a completion with the status `ok`. If an id has several, the first of the latest step is taken.
Rows that are not used are counted, and listed in dropped.jsonl.

The protocol and the wording of its prompts are our own; the paper's appendix C prints theirs. So set its
figure 4 beside these win rates, but do not subtract one from the other. `--template FOLDER` takes other wordings
verbatim: extract.txt with {$pairs}, merge.txt with {$lists}, compare.txt with {$conversation}, {$plans} and
{$traits}. They must ask for the JSON that ours ask for: benchmarks/trait_judging.py.

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
   asked again. If that does not help, the prompt is left out in both orders, so that the judge's liking for
   a position stays balanced. Above --max-invalid there are no win rates. If the judge's endpoint gave no reply to
   some requests, as in an outage, the run ends without win rates, and --resume asks these again.

`--traits` compares the traits of another run, or of a file of your own {"traits": [{"name",
"description"}]}. The prompts from which the other run extracted them are left out here too. Win rates with
the same `fingerprint` have the same traits, prompts, baseline plans and judge.

The data and the judge are checked first: one behind an endpoint is asked for one token, also by --dry-run.

Writes results/<run>/: config.json, command.txt, env.txt, dropped.jsonl, traits.json (with what each batch
gave), verdicts.jsonl, judge.jsonl (raw replies), summary.json; and a line for each trait in
results/runs.csv.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import shared, trait_judging
from benchmarks.judge_template import OUR_WORDING, describe_wording
from benchmarks.scoring import add_to_index
from rlmt.data import read_rows, write_jsonl
from rlmt.run import check_run, start_run, write_summary
from utils import fail, or_fail


@dataclass
class Args:
    # data
    generations: str = "results/grpo/generations.jsonl"
    """Rows {id, messages, thinking, status[, temperature, step]} of the tested checkpoint."""
    baseline: str = "results/sft/generations.jsonl"
    """Rows of the checkpoint that it is compared with."""
    temperature: float | None = None
    """Use only the rows of this temperature; needed if the files hold several."""
    # traits
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
    # judge
    judge: str = "gpt-4.1-mini"
    """A model's name at --judge-url; local:FOLDER or local:HUB-NAME to run it here."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: OPENAI_BASE_URL, else the official one."""
    key_env: tuple[str, ...] = ()
    """HOST=NAME words: the environment variable NAME holds the key for the endpoint at that host, or HOST:PORT.
    Without a word for its host, only the OpenAI API and OPENAI_BASE_URL get OPENAI_API_KEY, others no key."""
    template: str = ""
    """Folder with the judge's instructions: extract.txt, merge.txt, compare.txt; our own for those it lacks."""
    judge_max_tokens: int = 2048
    """New tokens of a reply; a judge that thinks needs more."""
    data_parallel: int = 0
    """Engines of a judge `local:...` at most, which share the requests; 0: as many as the GPUs allow."""
    judge_tensor_parallel: int = 1
    """GPUs of one engine of such a judge."""
    concurrency: int = 32
    """Judge calls at a time."""
    budget: float = 0.0
    """US dollars that the judge may cost; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars per million tokens that the judge reads and writes."""
    max_invalid: float = 0.01
    """Share of unreadable replies in the comparison above which there is no win rate."""
    # run
    seed: int = 0
    """Random seed for drawing pairs and writer 1, and for the bootstrap."""
    out: str = ""
    """Run folder; empty: results/traits__<folder of --generations>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Keep every reply of the judge that a run folder already has."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments, data and judge (by one call of one token), print the number of calls and an
    estimate of their cost, and stop."""


# --- 1. pairs of plans


def read_generations(path: str) -> list[dict]:
    """Reads generations or completions, and adds `file` and `line`."""
    rows = read_rows(path, "messages", "status")
    for line, row in enumerate(rows, 1):
        row["file"] = path
        row["line"] = line
        row["thinking"] = row.get("thinking") or ""
        row["step"] = row.get("step", 0)
    return rows


def match_plans(args: Args) -> tuple[list[dict], list[dict]]:
    """Returns pairs {id, messages, model (a plan), baseline (a plan)}, and unused rows {file, line, ...}.

    The order of the pairs follows from --seed and the ids alone: other checkpoints meet on the same prompts.
    """
    model_rows = read_generations(args.generations)
    baseline_rows = read_generations(args.baseline)
    check_temperatures(args, model_rows + baseline_rows)
    model_plans, model_dropped = choose_plans(model_rows, args.temperature)
    baseline_plans, baseline_dropped = choose_plans(baseline_rows, args.temperature)
    model_dropped += drop_unmatched(model_plans, baseline_plans)
    baseline_dropped += drop_unmatched(baseline_plans, model_plans)

    def draw(prompt_id) -> float:
        return random.Random(f"{args.seed} {prompt_id}").random()

    pairs = []
    for prompt_id in sorted(model_plans.keys() & baseline_plans.keys(), key=draw):
        ours = model_plans[prompt_id]
        theirs = baseline_plans[prompt_id]
        if ours["messages"] != theirs["messages"]:
            fail(
                f"id {prompt_id!r} has other 'messages' in {ours['file']}:{ours['line']} than in "
                f"{theirs['file']}:{theirs['line']}; the files must be of the same prompts"
            )
        pairs.append(
            {
                "id": prompt_id,
                "messages": ours["messages"],
                "model": ours["thinking"],
                "baseline": theirs["thinking"],
            }
        )
    return pairs, model_dropped + baseline_dropped


def check_temperatures(args: Args, rows: list[dict]) -> None:
    found = {row["temperature"] for row in rows if row.get("temperature") is not None}
    if args.temperature is None and len(found) > 1:
        fail(
            f"{args.generations} and {args.baseline} have rows of several temperatures; "
            f"choose one with --temperature: {sorted(found)}"
        )


def choose_plans(rows: list[dict], temperature: float | None) -> tuple[dict, list[dict]]:
    """Returns {id: the row whose plan is used}, and the rows that are not used with the reason."""
    plans = {}
    dropped = []
    latest_first = sorted(rows, key=lambda row: -row["step"])  # keeps the order of the file within a step
    for row in latest_first:
        if temperature is not None and row.get("temperature") != temperature:
            reason = "another temperature"
        elif row["status"] != "ok":
            reason = f"status {row['status']}"
        elif not row["thinking"].strip():
            reason = "no thinking"
        elif row["id"] in plans:
            reason = "another row of its id"
        else:
            plans[row["id"]] = row
            continue
        dropped.append(drop(row, reason))
    return plans, dropped


def drop_unmatched(plans: dict, other_plans: dict) -> list[dict]:
    unmatched = [row for prompt_id, row in plans.items() if prompt_id not in other_plans]
    return [drop(row, "no plan in the other file") for row in unmatched]


def drop(row: dict, reason: str) -> dict:
    return {"file": row["file"], "line": row["line"], "id": row["id"], "reason": reason}


# --- 2. the run


def load_traits(path: str) -> dict:
    """Reads a --traits file, at least {traits, prompts}; exits with 2 if it has no valid list of traits."""
    try:
        text = Path(path).read_text()
        stored = {
            "prompts": [],
            **trait_judging.read_object(text),
            "traits": trait_judging.read_traits(text, most=100),
        }
        if not stored["traits"] or not isinstance(stored["prompts"], list):
            raise ValueError("'traits' is empty, or 'prompts' is not a list of ids")
    except (ValueError, OSError) as e:
        wanted = '{"traits": [{"name": "...", "description": "..."}, ...]}'
        fail(f"--traits {path}: {e}; it must hold {wanted}")
    return stored


def split_pairs(args: Args, pairs: list[dict], used_prompts: list) -> tuple[list[dict], list[dict]]:
    """Returns the pairs to extract traits from, and those to compare; exits with 2 if none is left for that.

    `used_prompts` are the ids that the traits of a --traits file were extracted from.
    """
    n_extracted = 0 if args.traits else args.extract_pairs
    extracted = pairs[:n_extracted]
    rest = [pair for pair in pairs[n_extracted:] if pair["id"] not in used_prompts]
    if not rest:
        fail(
            f"none of {len(pairs)} pairs is left to compare, as {len(extracted)} are for the extraction of "
            "traits; use a smaller --extract-pairs, or files with more plans"
        )
    compared = rest[: args.compare_pairs or None]
    source = args.traits or f"{len(extracted)} pairs"
    print(f"traits from {source}; {len(compared)} of {len(rest)} other pairs to compare")
    return extracted, compared


def check_templates(args: Args) -> None:
    """Prints whose words each step has; exits with 2 if --template has none, or one that cannot be filled in."""
    if not args.template:
        return
    files = [trait_judging.template_file(args, step) for step in trait_judging.TEMPLATES]
    if not any(files):
        fail(f"--template {args.template}: no folder with extract.txt, merge.txt or compare.txt")
    for step, file in zip(trait_judging.TEMPLATES, files):
        trait_judging.step_template(args, step)
        print(f"instructions to {step}: {file or OUR_WORDING}")


def print_estimate(args: Args, extracted: list[dict], compared: list[dict], traits: list[dict]) -> None:
    """Prints calls, tokens and cost of every step; the longest possible traits stand in for unknown ones."""
    longest_trait = {field: "x" * limit for field, limit in trait_judging.TRAIT_LIMITS.items()}
    longest_list = [longest_trait] * args.max_traits
    steps = {
        "extract": trait_judging.extract_requests(args, extracted),
        "merge": [],
        "compare": trait_judging.compare_requests(args, compared, traits or longest_list),
    }
    if steps["extract"]:
        steps["merge"] = [trait_judging.merge_request(args, [longest_list] * len(steps["extract"]))]
    for name, requests in steps.items():
        shared.print_estimate(args, requests, name)


def extract(args: Args, pairs: list[dict], run: Path) -> dict:
    """Asks the judge for traits; returns {traits, prompts (the ids it saw), batches} for traits.json."""
    parse = partial(trait_judging.read_traits, most=args.max_traits)
    replies = shared.ask_judge(args, trait_judging.extract_requests(args, pairs), parse, run)
    rows = []
    for (model_is, batch), reply in zip(trait_judging.batches(args, pairs), replies, strict=True):
        prompts = [pair["id"] for pair in batch]
        rows.append({"prompts": prompts, "model_is": model_is, "traits": reply.value, "invalid": reply.error})

    trait_lists = [row["traits"] for row in rows if row["traits"]]
    n_invalid = sum(row["invalid"] != "" for row in rows)
    print(
        f"{len(trait_lists)} of {len(rows)} batches have traits; {n_invalid} replies are invalid", flush=True
    )
    if not trait_lists:
        fail(f"no traits to merge; {run / 'judge.jsonl'} has what the judge said")
    merged = shared.ask_judge(args, [trait_judging.merge_request(args, trait_lists)], parse, run)[0]
    if not merged.value:
        fail(
            f"the reply that merges the traits is invalid: {merged.error or 'no traits'}; "
            f"{run / 'judge.jsonl'} has it. --traits takes a list of your own"
        )
    return {"traits": merged.value, "prompts": [pair["id"] for pair in pairs], "batches": rows}


def compare(args: Args, pairs: list[dict], traits: list[dict], run: Path) -> list[dict]:
    """Asks the judge to compare all pairs in both orders; returns the rows that `score_verdicts` reads."""
    names = [trait["name"] for trait in traits]

    def parse(text: str) -> dict[str, str]:
        return dict(zip(names, trait_judging.read_verdicts(text, len(names))))

    replies = shared.ask_judge(args, trait_judging.compare_requests(args, pairs, traits), parse, run)
    asked = [(pair["id"], model_is) for pair in pairs for model_is in (1, 2)]
    rows = []
    for (prompt_id, model_is), reply in zip(asked, replies, strict=True):
        rows.append({"id": prompt_id, "model_is": model_is, "choices": reply.value, "invalid": reply.error})
    return rows


def fingerprint(args: Args, traits: list[dict], pairs: list[dict]) -> dict:
    """Returns everything that must be equal for two results to be comparable, and a hash of it."""

    def digest(value) -> str:
        return shared.short_hash(json.dumps(value, sort_keys=True))

    judging = {
        "judge": args.judge,
        "judge_url": shared.resolve_judge_url(args.judge, args.judge_url),
        "judge_max_tokens": args.judge_max_tokens,
        "template": digest(trait_judging.step_template(args, "compare")),
        "traits": digest(traits),
        "prompts": digest([pair["messages"] for pair in pairs]),
        "baseline": digest([pair["baseline"] for pair in pairs]),
    }
    files = shared.digests_of(args.judge)
    if files:  # of a local judge
        judging["judge_files"] = files
    return {**judging, "hash": digest(judging)}


def table(summary: dict) -> str:
    """Returns a table with a line for each trait, the highest win rate first."""

    def rate(item: tuple[str, dict]) -> float:
        numbers = item[1]
        return numbers.get("withheld", numbers["win_rate"])

    lines = [f"{'trait':40}  win rate [95 % over prompts]    wins   ties  losses  flips"]
    for name, numbers in sorted(summary["traits"].items(), key=rate, reverse=True):
        shown = "none"
        if numbers["win_rate"] is not None:
            low, high = numbers["interval"]
            shown = f"{numbers['win_rate']:.3f} [{low:.3f}, {high:.3f}]"
        counts = f"{numbers['wins']:6} {numbers['ties']:6}  {numbers['losses']:6}"
        lines.append(f"{name:40}  {shown:28}  {counts}  {numbers['flip_rate']:.3f}")
    lines.append(
        f"{summary['n']} prompts in both orders, {summary['n_left_out']} left out; "
        f"{summary['n_invalid']} of {summary['n_replies']} replies invalid"
    )
    return "\n".join(lines)


def index_rows(args: Args, summary: dict) -> list[dict]:
    """Returns a line for each trait, for results/runs.csv."""
    rows = []
    for name, numbers in summary["traits"].items():
        low, high = numbers["interval"]
        rows.append(
            {
                "model": args.generations,
                "benchmark": f"traits against {args.baseline}",
                "temperature": args.temperature,
                "n": summary["n"],
                "n_invalid": summary["n_invalid"],
                "judge": args.judge,
                "fingerprint": summary["fingerprint"]["hash"],
                "metric": name,
                "value": numbers["win_rate"],
                "low": low,
                "high": high,
            }
        )
    return rows


def main(args: Args) -> None:
    # --- data, checked before anything is asked
    for field, least in (("max_traits", 1), ("extract_pairs", 1), ("batch_pairs", 1), ("compare_pairs", 0)):
        value = getattr(args, field)
        if value < least:
            fail(f"--{field.replace('_', '-')} {value}: use {least} or more")
    found = {"traits": [], "prompts": []}
    if args.traits:
        found = load_traits(args.traits)
    pairs, dropped = match_plans(args)
    reasons = Counter(f"{row['file']}: {row['reason']}" for row in dropped)
    print(f"{len(pairs)} pairs of plans; rows not used: {json.dumps(reasons)}")
    extracted, compared = split_pairs(args, pairs, found["prompts"])
    if not args.judge or ".py:" in args.judge:
        fail(f"--judge {args.judge!r}: name a model, or local:FOLDER")
    shared.check_judge(args)
    check_templates(args)
    start = check_run(args, "traits", str(Path(args.generations).parent))
    if args.dry_run:
        print_estimate(args, extracted, compared, found["traits"])
    shared.try_judge(args, start.run)
    if args.dry_run:
        return
    run = start_run(start)
    write_jsonl(run / "dropped.jsonl", dropped)

    # --- traits, verdicts, win rates
    if not args.traits:
        found = extract(args, extracted, run)
    traits = found["traits"]
    (run / "traits.json").write_text(json.dumps(found, indent=1) + "\n")
    verdicts = compare(args, compared, traits, run)
    write_jsonl(run / "verdicts.jsonl", verdicts)
    numbers = or_fail(trait_judging.score_verdicts, verdicts, traits, args.max_invalid, args.seed)
    summary = {
        "model": args.generations,
        "baseline": args.baseline,
        **numbers,
        "wording": describe_wording(args.template),
        "fingerprint": fingerprint(args, traits, compared),
    }
    add_to_index(run, index_rows(args, summary))  # first, as a run with a summary is complete
    write_summary(run, summary)
    print(table(summary))
