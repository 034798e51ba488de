"""Makes the page of a run: one HTML file with its curves and completions, for any browser, without a network.

    python page.py results/rlmt                  # writes results/rlmt/page.html
    python page.py results/rlmt results/rlhf     # two runs side by side, training runs or evaluations

The training scripts write it when they finish; the command works at any time, also while a run is under way.
Only the files of the run folder are read, not the model. A folder without completions, as of SFT, has curves
only.

A visit is one prompt with all its completions at one step, or at one temperature of an evaluation. A page of
more completions than --n shows some of the prompts and says so: see `choose`. The page itself is page.html, a
template beside this file; a model's text reaches it as JSON only, and its script writes text nodes only.

The `gold` of an evaluation is what `verdict_number` finds in verdicts.jsonl or rows.jsonl, and of a dialogue
the final emotion. A judge's choice between two answers is no number: an evaluation by --mode reward or on
Arena-Hard has no gold, and no number at all without --reward-model. The fields of a row are not checked, as
our own scripts have written them.
"""

import base64
import hashlib
import html
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import pandas as pd
import tyro

from utils import or_fail

TEMPLATE = Path(__file__).with_name("page.html")
MAX_COMPLETIONS = 2000
EXTREMES = 20  # visits at either end of the rewards, which are on a page of any size that has room
MAX_CHARACTERS = 10_000_000  # that the policy wrote, on a page without --n 0: it opens within a second or two


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str] | tuple[str, str]]
    """Folder of a training run or of an evaluation, and of a second one to show beside it."""
    out: str = ""
    """File of the page; empty: page.html in the folder of the first run."""
    n: int = MAX_COMPLETIONS
    """Completions on the page at most, in whole visits; 0: all of them."""


# --- 1. rows

NUMBERS = ["step", "temperature", "sample", "reward", "gold", "advantage", "n_tokens", "n_thinking_tokens"]
TEXTS = ["text", "thinking", "response", "status"]
FIELDS = ["id", "messages", "rewards", *TEXTS, *NUMBERS]  # of a row
KINDS = {  # files of completions, and how the page calls what they hold
    "completions.jsonl": "training",
    "held_out_completions.jsonl": "held out",
    "generations.jsonl": "evaluation",
    "dialogues.jsonl": "dialogue",
    "dialogues_held_out.jsonl": "held-out dialogue",
}
# ends that are faults, and what such a dialogue counts with, as rlver/simulated_user.py has it
BAD_ENDS = {"simulator_failed": None, "too_long": None, "bad_format": 0}


def read_lines(path: Path) -> Iterator[dict]:
    """Yields the object of each line of a jsonl file.

    A last line that is half written, as by a running job, is left out, and a note says so on stderr.
    """
    with open(path) as file:
        for line in file:
            if not line.endswith("\n"):
                print(f"note: the last line of {path} is cut off and left out", file=sys.stderr)
                return
            yield json.loads(line)


def verdict_number(verdict: dict) -> float | str | None:
    """Returns the number of a verdict, higher is better; None without one, as of a pairwise judge's
    choice."""
    if "correct" in verdict:
        return int(verdict["correct"])
    if "strict" in verdict:  # IFEval and IFBench: whether each instruction is met
        return int(all(verdict["strict"]))
    return verdict.get("score", verdict.get("preference"))  # preference: AlpacaEval, from 1 to 2


def read_verdicts(run: Path) -> dict[tuple, dict]:
    """Returns reward and score of an evaluation's answers by (id, temperature); none for a training run."""
    verdicts = {}
    for file in ("verdicts.jsonl", "rows.jsonl"):
        if not (run / file).is_file():
            continue
        for verdict in read_lines(run / file):
            if file == "rows.jsonl":  # eval_benchmarks.py; an `id` there may be the benchmark's
                verdict["id"] = f"{verdict.get('task')}-{verdict.get('sample')}"
            verdict["score"] = verdict_number(verdict)
            verdicts[verdict["id"], verdict.get("temperature")] = verdict
    return verdicts


def dialogue_row(dialogue: dict) -> dict:
    """Returns a dialogue of eval_sentient.py as a completion of the user's first words."""
    first, *turns = dialogue["history"]
    ended = dialogue["ended"]
    return {
        "id": dialogue["id"],
        "messages": [{"role": first["role"], "content": first["content"]}],
        "text": "\n\n".join(turn.get("text", turn["content"]) for turn in turns),
        "status": ended if ended in BAD_ENDS else "ok",
        "score": BAD_ENDS.get(ended, dialogue["emo_point"]),
        "dialogue": [first, *turns],
    }


def read_completions(run: Path, file: str) -> Iterator[dict]:
    """Yields the completions in a file of KINDS, if it is there, with reward and gold."""
    path = run / file
    if not path.is_file():
        return
    verdicts = read_verdicts(run)
    for row in read_lines(path):
        if file.startswith("dialogues"):
            row = dialogue_row(row)
        # without a verdict, the row's own score counts
        verdict = verdicts.get((row["id"], row.get("temperature")), row)
        rewards = row.setdefault("rewards", {})
        row["reward"] = verdict.get("reward")
        row["gold"] = rewards.get("gold", verdict.get("score"))
        if isinstance(row["gold"], str):  # a judge that is a model writes "8"
            row["gold"] = float(pd.to_numeric(row["gold"], errors="coerce"))
        yield row


def read_rows(run: str | Path, file: str = "completions.jsonl") -> pd.DataFrame:
    """Reads a file of KINDS into a table with the columns of FIELDS, for an analysis of your own.

    One row a completion, NaN where the file has no number. A folder without `file`, which training runs have,
    is an evaluation: its generations.jsonl is read.
    """
    if not Path(run, file).is_file():
        file = "generations.jsonl"
    stored = list(read_completions(Path(run), file))
    if not stored:
        raise ValueError(f"{run}: no completions; name the folder of an RL run or of an evaluation")
    # dtype object, because strings of pyarrow refuse half of a surrogate pair
    rows = pd.DataFrame(stored, columns=FIELDS, dtype=object)
    return rows.astype(dict.fromkeys(NUMBERS, float))


# --- 2. curves

MAIN_CURVES = {  # shown first, in this order; docs/metrics.md explains every key
    "reward": "what is trained on",
    "reward/gold": "what nothing is trained on",
    "held out: gold": "on prompts that are not trained on",
    "kl": "to the reference, nats a token",
    "think/mean_tokens": "tokens of thinking",
    "think/response_tokens": "tokens of response",
    "think/format_ok": "share with status ok",
    "sampling/logprob_gap": "sampler against trainer, nats a token",
    "dialogue/success": "share with the highest emotion",
    "accuracy": "of the reward model in training",
    "mean_token_accuracy": "of the next token",
    "loss": "of the update",
}


def read_curves(run: Path) -> dict[str, dict[float, float]]:
    """Returns {key: {step: value}} of every number in metrics.jsonl, held_out.jsonl and the rounds of DPO.

    The steps of all rounds are counted on.
    """
    sources = [("", run / "metrics.jsonl"), ("held out: ", run / "held_out.jsonl")]
    rounds = sorted(run.glob("round-*/metrics.jsonl"), key=lambda path: int(path.parent.name[6:]))
    sources += [("in rounds: ", path) for path in rounds]

    curves = {}
    steps_before = 0
    for prefix, path in sources:
        if not path.is_file():
            continue
        step = 0
        for row in read_lines(path):
            step = row.pop("step")
            for key, value in row.items():
                if type(value) in (int, float) and math.isfinite(value):  # a bool is none
                    curves.setdefault(prefix + key, {})[steps_before + step] = value
        if path in rounds:
            steps_before += step
    return curves


def join_curves(curves: list[dict]) -> list[dict]:
    """Returns the curves of one or two runs in the order that they are shown in, one line a run.

    Keys of MAIN_CURVES come first, then the others in the order of the log.
    """
    logged = dict.fromkeys(key for of_run in curves for key in of_run)  # a dict, as it keeps the order
    main = [key for key in MAIN_CURVES if key in logged]
    if "reward" in main and "loss" in main:
        main.remove("loss")  # in RL it does not measure progress
    joined = []
    for key in dict.fromkeys(main) | logged:
        lines = [sorted(of_run.get(key, {}).items()) for of_run in curves]
        joined.append({"key": key, "about": MAIN_CURVES.get(key, ""), "main": key in main, "lines": lines})
    return joined


# --- 3. visits


def prompt_key(row: dict) -> str:
    """Returns a hash of the messages: a key, as each sample of a task has an id of its own, and a fair order to
    draw prompts in, the same for every run."""
    return hashlib.sha1(json.dumps(row["messages"]).encode()).hexdigest()[:16]


def show_numbers(row: dict, kind: str) -> dict[str, float]:
    """Returns the numbers of a completion that the page shows, by name."""
    fields = ["reward", "gold", "n_tokens", "n_thinking_tokens"]
    if kind == "training":
        fields.append("advantage")
    parts = {name: value for name, value in row["rewards"].items() if name != "gold"}
    if list(parts.values()) == [row["reward"]]:  # it would be there twice
        parts = {}
    numbers = parts | {field: row.get(field) for field in fields}
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def show_completion(row: dict, kind: str) -> dict:
    """Returns what the page shows of a completion.

    With a bad status that is also the raw text, which may hold more than thinking and response. A
    conversation with a simulated user is shown turn by turn.
    """
    shown = {"status": row["status"], "numbers": show_numbers(row, kind)}
    if row.get("pair"):
        shown["pair"] = row["pair"]
    if row["status"] != "ok":
        shown["text"] = row["text"]
    if "dialogue" in row:
        shown["dialogue"] = row["dialogue"][1:]  # the first turn is the prompt
    else:
        shown["thinking"] = row["thinking"]
        shown["response"] = row["response"]
    return shown


def read_visits(runs: list[Path]) -> list[dict]:
    """Returns the visits of all runs in the order of the page, each with its completions, one list a run."""
    visits = {}
    for number, run in enumerate(runs):
        for file, kind in KINDS.items():
            for row in read_completions(run, file):
                place = {"kind": kind, "prompt": prompt_key(row)}
                for field in ("step", "temperature"):
                    place[field] = row.get(field)
                visit = visits.setdefault(tuple(place.values()), place | {"sides": [[] for _ in runs]})
                visit["row"] = {"id": row["id"], "messages": row["messages"]}
                visit["characters"] = visit.get("characters", 0) + len(row["text"])
                visit["sides"][number].append(show_completion(row, kind))
    kinds = list(KINDS.values())
    return sorted(visits.values(), key=lambda visit: (kinds.index(visit["kind"]), visit["step"] or 0))


def completions_of(visit: dict) -> list[dict]:
    """Returns the completions of all runs."""
    return sum(visit["sides"], [])


def count(visits: list[dict]) -> int:
    """Counts the completions."""
    return sum(len(completions_of(visit)) for visit in visits)


def order_visits(visits: list[dict]) -> list[tuple]:
    """Gives each visit its highest and lowest reward; of a page without rewards, gold. Returns what the page
    offers."""
    for measure in ("reward", "gold"):
        for visit in visits:
            numbers = [
                shown["numbers"][measure] for shown in completions_of(visit) if measure in shown["numbers"]
            ]
            visit["highest"] = max(numbers, default=None)
            visit["lowest"] = min(numbers, default=None)
        if any(visit["highest"] is not None for visit in visits):
            return [(f"highest {measure}", "highest", True), (f"lowest {measure}", "lowest", False)]
    return []


def choose(visits: list[dict], n: int) -> list[dict]:
    """Returns the visits that are on the page: as many as n completions and MAX_CHARACTERS allow.

    The EXTREMES highest and lowest come first; then the rest, drawn by `prompt_key`: a prompt comes with all
    its visits, and two runs get the same prompts.
    """
    if n == 0:
        return visits
    measured = [visit for visit in visits if visit["highest"] is not None]
    wanted = sorted(measured, key=itemgetter("highest"))[-EXTREMES:]
    wanted += sorted(measured, key=itemgetter("lowest"))[:EXTREMES]
    wanted += sorted(visits, key=itemgetter("prompt"))

    chosen = set()
    characters = 0
    for visit in wanted:
        if id(visit) in chosen:
            continue
        n -= count([visit])
        characters += visit["characters"]
        if chosen and (n < 0 or characters > MAX_CHARACTERS):  # the first comes however large it is
            break
        chosen.add(id(visit))
    return [visit for visit in visits if id(visit) in chosen]


# --- 4. two evaluations

COMPARED = ["gold", "reward", "n_tokens"]


def compare_evaluations(visits: list[dict]) -> list[dict]:
    """Returns the means of two evaluations over the prompts that both answered, a line per measure; of anything
    else nothing.

    Wins: the share of prompts in which the first run's mean over samples is higher, ties half.
    """
    numbers = []
    for visit in visits:
        if visit["step"] is not None:  # of training
            continue
        place = visit["kind"]
        if visit["temperature"] is not None:
            place = f"temperature {visit['temperature']:g}"
        for run, side in enumerate(visit["sides"]):
            for measure in COMPARED:
                for shown in side:
                    numbers.append(
                        [place, measure, visit["prompt"], run, shown["numbers"].get(measure, math.nan)]
                    )
    columns = ["place", "measure", "prompt", "run", "value"]
    table = pd.DataFrame(numbers, columns=columns)
    means = table.groupby(columns[:-1], sort=False)["value"].mean().unstack("run").dropna()
    lines = []
    if len(means.columns) == 2:
        for (place, measure), of_runs in means.groupby(["place", "measure"], sort=False):
            first, second = of_runs[0], of_runs[1]
            wins = ((first > second).mean() + (first >= second).mean()) / 2
            line = {"name": f"{measure}, {place}", "means": list(of_runs.mean())}
            lines.append(line | {"wins": wins, "n": len(of_runs)})
    return lines


# --- 5. the page


def run_name(run: str | Path) -> str:
    return Path(run).resolve().name


def join_arguments(runs: list[Path]) -> list[dict]:
    """Returns name and value of every argument in config.json, one value a run as JSON; "" where a run has
    none."""
    arguments = {}
    for number, run in enumerate(runs):
        config = run / "config.json"
        if config.is_file():
            for name, value in json.loads(config.read_text())["args"].items():
                arguments.setdefault(name, [""] * len(runs))[number] = json.dumps(value)
    arguments.pop("out", None)  # says nothing about what was trained
    return [{"name": name, "values": values} for name, values in arguments.items()]


def describe(run: Path, number: int, visits: list[dict]) -> dict:
    """Returns what the top of the page says about a run; `number`: which of the page's runs it is."""
    lines = []
    for kind in KINDS.values():
        asked = [visit for visit in visits if visit["kind"] == kind and visit["sides"][number]]
        statuses = Counter(shown["status"] for visit in asked for shown in visit["sides"][number])
        if asked:
            n_prompts = len({visit["prompt"] for visit in asked})
            listed = ", ".join(f"{status} {n}" for status, n in statuses.most_common())
            lines.append(f"{kind}: {statuses.total()} completions of {n_prompts} prompts; {listed}")
    summary = {}
    if (run / "summary.json").is_file():
        summary = json.loads((run / "summary.json").read_text())
    else:
        lines.append("not finished: no summary.json")
    if "fingerprint" in summary:  # of an evaluation
        lines.append(f"fingerprint {summary['fingerprint']}: gold compares with that of an equal one alone")
    command = ""
    if (run / "command.txt").is_file():
        command = (run / "command.txt").read_text().strip()
    return {"name": run_name(run), "command": command, "lines": lines}


def gather(runs: list[Path], n: int) -> dict:
    """Returns everything that the page of one or two runs shows. Raises ValueError if a folder has nothing to
    show."""
    curves = [read_curves(run) for run in runs]
    visits = read_visits(runs)
    about = []
    for number, run in enumerate(runs):
        about.append(describe(run, number, visits))
        if not curves[number] and not any(visit["sides"][number] for visit in visits):
            raise ValueError(
                f"{run}: no metrics and no completions; name the folder of a run or of an evaluation"
            )
    comparison = compare_evaluations(visits)
    orders = order_visits(visits)
    chosen = choose(visits, n)
    prompts = {}
    for visit in visits:
        prompts[visit["prompt"]] = visit.pop("row")
    sampled = ""
    if len(chosen) < len(visits):
        sampled = (
            f"{count(chosen)} of the {count(visits)} completions are on this page: highest, lowest, and of prompts drawn "
            "evenly; python page.py --n 0 shows all"
        )
    return {
        "runs": about,
        "arguments": join_arguments(runs),
        "comparison": comparison,
        "curves": join_curves(curves),
        "sampled": sampled,
        "prompts": {visit["prompt"]: prompts[visit["prompt"]] for visit in chosen},
        "orders": orders,
        "visits": chosen,
    }


# control characters, which a browser hides or which turn text around, and halves of surrogate pairs
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def spell_out(match: re.Match) -> str:
    return match[0].encode("unicode_escape").decode()


def make_visible(value):
    """Returns a JSON value with hidden characters spelled out in all strings."""
    if isinstance(value, str):
        return HIDDEN.sub(spell_out, value)
    if isinstance(value, dict):
        return {make_visible(key): make_visible(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [make_visible(part) for part in value]
    return value


def to_script_json(data: dict) -> str:
    """Returns JSON that cannot end the <script> element around it: without any "<"."""
    text = json.dumps(make_visible(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def write_page(runs: Sequence[str | Path], out: str | Path, n: int = MAX_COMPLETIONS) -> None:
    """Writes the page of one run, or of two side by side, with n completions at most; 0 is all of them.

    The hash in the content security policy lets the template's own script run and nothing else.
    """
    data = gather([Path(run) for run in runs], n)
    title = " | ".join(run_name(run) for run in runs)
    template = TEMPLATE.read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    digest = hashlib.sha256(script.encode()).digest()
    head, tail = template.split("{{data}}")
    head = head.replace("{{script_hash}}", base64.b64encode(digest).decode())
    head = head.replace("{{title}}", html.escape(make_visible(title)))  # last: a name may have braces
    Path(out).write_text(head + to_script_json(data) + tail, "utf-8")
    print(f"page: {out}")


def main(args: Args) -> None:
    or_fail(write_page, args.runs, args.out or Path(args.runs[0], "page.html"), args.n)


if __name__ == "__main__":
    main(tyro.cli(Args))
