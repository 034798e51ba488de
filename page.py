"""Makes the page of a run: one HTML file with its curves and completions, for any browser, without a network.

    python page.py results/rlmt                  # writes results/rlmt/page.html
    python page.py results/rlmt results/rlhf     # two runs side by side, training runs or evaluations

The training scripts write it when they finish; the command works at any time, also while a run is under way.
Only the files of the run folder are read, not the model. A folder without completions, as of SFT, has curves only.

A visit is one prompt with all its completions at one step, or at one temperature of an evaluation. A page with
thousands of completions shows some of the visits and says so: see `choose`. The page itself is page.html, a
template beside this file; a model's text reaches it as JSON only, and its script writes text nodes only.

The `gold` of an evaluation is what `verdict_number` finds in verdicts.jsonl or rows.jsonl, and of a dialogue the
final emotion. A judge's choice between two answers is no number: an evaluation by --mode reward or on Arena-Hard has
no gold, and no number at all without --reward-model. A line that is not JSON raises ValueError with its file and
number; the fields of a row are not checked, as our own scripts have written them.
"""

import base64
import hashlib
import html
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

TEMPLATE = Path(__file__).with_name("page.html")
MAX_COMPLETIONS = 2000
MAX_CHARACTERS = 10_000_000  # that the policy wrote, on a page without --n 0: it opens within a second or two
MAX_POINTS = 500  # of a curve
EXTREMES = 10  # places at both ends of every order whose visits come onto the page before all others


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """Folder of a training run or of an evaluation."""
    other: tyro.conf.Positional[str] = ""
    """Folder of a second run, shown beside the first."""
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
# ends that are faults, and what such a dialogue counts with, as rewards/simulated_user.py has it
BAD_ENDS = {"simulator_failed": None, "too_long": None, "bad_format": 0}


def read_lines(path: Path, notes: list[str], wanted: set | None = None) -> Iterator[tuple[int, dict]]:
    """Yields line number and object of each line of a jsonl file, or of the `wanted` line numbers alone.

    A last line that is half written, as by a running job, is left out and named in `notes`.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if wanted is not None and number not in wanted:
                continue
            try:
                row = dict(json.loads(line))
            except (ValueError, TypeError) as e:
                if not line.endswith(b"\n"):
                    notes.append(f"{path.name}:{number} is cut off in the middle of the line and left out")
                    return
                raise ValueError(f"{path}:{number}: not a JSON object ({e})") from None
            yield number, row


def answer_key(row: dict) -> tuple:
    """Returns what an answer and its verdict have in common."""
    return row.get("id"), row.get("temperature")


def verdict_number(verdict: dict) -> float | str | None:
    """Returns the number of a verdict, higher is better; None without one, as of a pairwise judge's choice."""
    if "correct" in verdict:
        return int(verdict["correct"])
    if "strict" in verdict:  # IFEval and IFBench: whether each instruction is met
        return int(all(verdict["strict"]))
    return verdict.get("score", verdict.get("preference"))  # preference: AlpacaEval, from 1 to 2


def read_verdicts(run: Path, notes: list[str]) -> dict[tuple, dict]:
    """Returns reward and score of an evaluation's answers by `answer_key`; none for a training run."""
    verdicts = {}
    for file in ("verdicts.jsonl", "rows.jsonl"):
        if not (run / file).is_file():
            continue
        for _, verdict in read_lines(run / file, notes):
            if file == "rows.jsonl":  # eval_benchmarks.py; an `id` there may be the benchmark's
                verdict["id"] = f"{verdict.get('task')}-{verdict.get('sample')}"
            numbers = {"score": verdict_number(verdict), "reward": verdict.get("reward")}
            verdicts[answer_key(verdict)] = numbers
    return verdicts


def dialogue_row(dialogue: dict) -> dict:
    """Returns a dialogue of eval_sentient.py as a completion of the user's first words."""
    first, *turns = dialogue["history"]
    ended = dialogue["ended"]
    return {
        "id": dialogue["id"],
        "messages": [{"role": first["role"], "content": first["content"]}],
        "text": "\n\n".join(turn.get("text", turn["content"]) for turn in turns),
        "thinking": "",
        "response": "",
        "status": ended if ended in BAD_ENDS else "ok",
        "score": BAD_ENDS.get(ended, dialogue["emo_point"]),
        "dialogue": [first, *turns],
    }


def read_completions(
    run: Path, file: str, notes: list[str], wanted: set | None = None
) -> Iterator[tuple[int, dict]]:
    """Yields line number and row of each completion in a file of KINDS, with its reward and its gold."""
    path = run / file
    if not path.is_file():
        return
    verdicts = read_verdicts(run, notes if wanted is None else [])
    for number, row in read_lines(path, notes, wanted):
        if file.startswith("dialogues"):
            row = dialogue_row(row)
        verdict = verdicts.get(answer_key(row), row)  # without a verdict, the row's own score counts
        rewards = row.setdefault("rewards", {})
        row["reward"] = verdict.get("reward")
        row["gold"] = rewards.get("gold", verdict.get("score"))
        if isinstance(row["gold"], str):  # a judge that is a model writes "8"
            row["gold"] = float(pd.to_numeric(row["gold"], errors="coerce"))
        yield number, row


def read_rows(run: str | Path, file: str = "completions.jsonl") -> pd.DataFrame:
    """Reads a file of KINDS into a table with the columns of FIELDS, for an analysis of your own.

    One row a completion, NaN where the file has no number. A folder without `file`, which training runs have,
    is an evaluation: its generations.jsonl is read.
    """
    if not Path(run, file).is_file():
        file = "generations.jsonl"
    if not Path(run, file).is_file():
        remedy = "name the folder of an RL run or of an evaluation"
        raise ValueError(f"{run}: no completions.jsonl and no generations.jsonl; {remedy}")

    notes = []
    stored = [row for _, row in read_completions(Path(run), file, notes)]
    if not stored:
        raise ValueError(f"{Path(run, file)}: no rows")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    # dtype object, because strings of pyarrow refuse half of a surrogate pair
    rows = pd.DataFrame(stored, columns=list(FIELDS), dtype=object)
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


def read_curves(run: Path, notes: list[str]) -> dict[str, dict[float, float]]:
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
        for number, row in read_lines(path, notes):
            if not isinstance(row.get("step"), int):
                raise ValueError(f"{path}:{number}: 'step' must be a whole number")
            step = row["step"]
            for key, value in row.items():
                if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    curves.setdefault(prefix + key, {})[steps_before + step] = value
        if path in rounds:
            steps_before += step
    return curves


def thin(curve: dict[float, float]) -> tuple[list, int]:
    """Returns [step, value] points, and how many steps each is the mean of, so that there are MAX_POINTS at most."""
    points = sorted(curve.items())
    width = math.ceil(len(points) / MAX_POINTS)
    if width == 1:
        return points, 1
    means = pd.DataFrame(points).groupby(lambda i: i // width).mean()  # NaN is left out of a mean
    return means.values.tolist(), width


def join_curves(curves: list[dict], notes: list[list[str]]) -> list[dict]:
    """Returns the curves of one or two runs in the order that they are shown in, one line a run.

    Keys of MAIN_CURVES come first, then the others in the order of the log.
    """
    logged = {}  # a dict, as it keeps the order
    for of_run in curves:
        logged |= dict.fromkeys(of_run)
    keys = [key for key in MAIN_CURVES if key in logged]
    keys += [key for key in logged if key not in MAIN_CURVES]
    main = set(MAIN_CURVES)
    if "reward" in logged:
        main.discard("loss")  # in RL it does not measure progress

    joined = []
    widths = [1] * len(curves)
    for key in keys:
        lines = []
        for number, of_run in enumerate(curves):
            points, width = thin(of_run.get(key, {}))
            widths[number] = max(widths[number], width)
            lines.append(points)
        joined.append({"key": key, "about": MAIN_CURVES.get(key, ""), "main": key in main, "lines": lines})
    for number, width in enumerate(widths):
        if width > 1:
            notes[number].append(f"a point of a long curve is the mean of {width} logged steps")
    return joined


# --- 3. visits

VISIT = ["kind", "step", "temperature", "prompt"]
ORDERS = [  # what the page says, the number of a visit, whether the highest comes first
    ("highest reward", "highest", True),
    ("lowest reward", "lowest", False),
    ("highest gold", "gold_highest", True),
    ("lowest gold", "gold_lowest", False),
    ("rewards differ most", "spread", True),
    ("rose most since the first visit", "rise", True),
    ("fell most since the first visit", "fall", False),
    ("runs differ most", "difference", True),
]


def prompt_key(row: dict) -> str:
    """Returns a hash of id and messages: a key, and a fair order to draw prompts in, the same for every run."""
    text = json.dumps([row["id"], row["messages"]])
    return hashlib.sha1(text.encode()).hexdigest()


def list_completions(runs: list[Path], notes: list[list[str]]) -> pd.DataFrame:
    """Returns place and numbers of every completion, one a row. Texts stay on the disk: they may be gigabytes."""
    places = []
    for number, run in enumerate(runs):
        for file, kind in KINDS.items():
            for line, row in read_completions(run, file, notes[number]):
                place = {"run": number, "kind": kind, "file": file, "line": line, "prompt": prompt_key(row)}
                for field in ("step", "temperature", "reward", "gold", "status"):
                    place[field] = row.get(field)
                place["characters"] = len(row["text"])
                places.append(place)
    columns = ["run", "file", "line", *VISIT, "reward", "gold", "status", "characters"]
    table = pd.DataFrame(places, columns=columns)
    return table.astype(dict.fromkeys(["step", "temperature", "reward", "gold"], float))


def number_visits(completions: pd.DataFrame) -> pd.DataFrame:
    """Returns one row a run and visit, by step, with size and numbers; NaN where there is none."""
    visits = completions.groupby(["run", *VISIT], dropna=False, sort=False).agg(
        n=("line", "size"),
        characters=("characters", "sum"),
        reward=("reward", "mean"),
        highest=("reward", "max"),
        lowest=("reward", "min"),
        gold=("gold", "mean"),
        gold_highest=("gold", "max"),
        gold_lowest=("gold", "min"),
    )
    visits = visits.reset_index().sort_values("step", kind="stable")
    visits["spread"] = visits["highest"] - visits["lowest"]

    # held-out prompts may have a gold alone
    has_reward = visits.groupby(["run", "kind"])["reward"].transform(lambda reward: reward.notna().any())
    visits["followed"] = visits["reward"].where(has_reward, visits["gold"])
    first = visits.groupby(["run", "kind", "prompt"])["followed"].transform("first")
    change = visits["followed"] - first
    visits["rise"] = change.where(change > 0)
    visits["fall"] = change.where(change < 0)

    every_run_has_gold = (visits.groupby("run")["gold"].count() > 0).all()
    visits["compared"] = visits["gold"] if every_run_has_gold else visits["reward"]
    return visits


def list_visits(completions: pd.DataFrame) -> pd.DataFrame:
    """Returns one row a visit, by kind and step, with the numbers of ORDERS over both runs, NaN where there is none."""
    of_visit = number_visits(completions).groupby(VISIT, dropna=False, sort=False)
    visits = of_visit.agg(
        runs=("run", "nunique"),
        n=("n", "sum"),
        characters=("characters", "sum"),
        highest=("highest", "max"),
        lowest=("lowest", "min"),
        gold_highest=("gold_highest", "max"),
        gold_lowest=("gold_lowest", "min"),
        spread=("spread", "max"),
        rise=("rise", "max"),
        fall=("fall", "min"),
    )
    compared = of_visit["compared"]
    visits["difference"] = (compared.max() - compared.min()).where(compared.count() == 2)
    visits = visits.reset_index()
    place_of_kind = visits["kind"].map(list(KINDS.values()).index)
    return visits.iloc[place_of_kind.argsort(kind="stable")].reset_index(drop=True)


def best_places(visits: pd.DataFrame) -> pd.Series:
    """Returns how near each visit is to an end of any order, or of the steps.

    0 is the first or the last of one; EXTREMES stands for every place that is further in.
    """
    fields = ["step", *(field for _, field, _ in ORDERS)]
    from_lowest = visits[fields].rank(method="first")
    backwards = visits[fields][::-1]  # of equal numbers the last one is at the other end
    from_highest = backwards.rank(method="first", ascending=False)
    best = pd.concat([from_lowest, from_highest], axis=1).min(axis=1) - 1
    return best.clip(upper=EXTREMES).fillna(EXTREMES)


def choose(visits: pd.DataFrame, n: int) -> pd.DataFrame:
    """Returns the visits that are on the page, in their order: as many as n completions and MAX_CHARACTERS allow.

    First come those of the EXTREMES places at both ends of every order and of the steps, the outermost before all
    others; then prompts that both runs have; then the rest, drawn by `prompt_key`: a prompt comes with all its
    visits, and two runs get the same prompts.
    """
    if n == 0:
        return visits
    ranked = visits.assign(place=best_places(visits))
    ranked = ranked.sort_values(["place", "runs", "prompt"], ascending=[True, False, True], kind="stable")
    fits = (ranked["n"].cumsum() <= n) & (ranked["characters"].cumsum() <= MAX_CHARACTERS)
    fits.iloc[:1] = True  # however large it is
    return visits.loc[fits[fits].index.sort_values()]


def show_numbers(row: dict, kind: str) -> dict[str, float]:
    """Returns the numbers of a completion that the page shows, by name."""
    fields = ["reward", "gold", "n_tokens", "n_thinking_tokens"]
    if kind == "training":
        fields.append("advantage")
    numbers = {field: row.get(field) for field in fields}
    for name, value in row["rewards"].items():
        if value != row["reward"]:  # a single reward would be there twice
            numbers.setdefault(name, value)
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def show_completion(row: dict, kind: str) -> dict:
    """Returns what the page shows of a completion.

    With a bad status that is also the raw text, which may hold more than thinking and response. A conversation
    with a simulated user is shown turn by turn.
    """
    shown = {"status": row["status"], "numbers": show_numbers(row, kind)}
    if row.get("pair"):
        shown["pair"] = row["pair"]
    if row["status"] != "ok":
        shown["text"] = row["text"]
    if isinstance(row.get("dialogue"), list):
        shown["dialogue"] = row["dialogue"][1:]  # the first turn is the prompt
    else:
        shown["thinking"] = row["thinking"]
        shown["response"] = row["response"]
    return shown


def fill_visits(runs: list[Path], completions: pd.DataFrame, visits: pd.DataFrame) -> tuple[list, list]:
    """Reads the texts of the chosen visits. Returns the visits, and the prompts that they refer to by number."""
    filled = []
    for visit in visits.to_dict("records"):
        shown = {field: visit[field] for field in ("kind", "step", "temperature")}
        for _, field, _ in ORDERS:
            shown[field] = visit[field]
        shown["sides"] = [[] for _ in runs]
        filled.append(shown)

    numbered = visits[VISIT].assign(visit=range(len(visits)))
    places = completions.merge(numbered, on=VISIT)
    prompts = []
    number_of = {}  # prompt_key: place in `prompts`
    for (run, file), lines in places.groupby(["run", "file"]):
        visit_of = dict(zip(lines["line"], lines["visit"]))
        for line, row in read_completions(runs[run], file, [], set(visit_of)):
            key = prompt_key(row)
            if key not in number_of:
                number_of[key] = len(prompts)
                prompts.append({"id": row["id"], "messages": row["messages"]})
            visit = filled[visit_of[line]]
            visit["prompt"] = number_of[key]
            visit["sides"][run].append(show_completion(row, visit["kind"]))
    return filled, prompts


# --- 4. the page


def run_name(run: str | Path) -> str:
    return Path(run).resolve().name


def read_arguments(run: Path) -> dict:
    """Returns the arguments in config.json; {} for a folder without one."""
    path = run / "config.json"
    if not path.is_file():
        return {}
    return json.loads(path.read_text()).get("args", {})


def join_arguments(runs: list[Path]) -> list[dict]:
    """Returns name and value of every argument, one value a run as JSON; "" where a run does not have it."""
    arguments = [read_arguments(run) for run in runs]
    joined = []
    for name in dict.fromkeys(name for of_run in arguments for name in of_run):
        if name in ("out", "resume", "overwrite", "dry_run"):  # say nothing about what was trained
            continue
        values = [json.dumps(of_run[name]) if name in of_run else "" for of_run in arguments]
        joined.append({"name": name, "values": values})
    return joined


def describe(run: Path, completions: pd.DataFrame, notes: list[str]) -> dict:
    """Returns what the top of the page says about a run; `completions`: those of this run."""
    lines = []
    for kind, rows in completions.groupby("kind", sort=False):
        places = []
        if rows["step"].notna().any():
            places.append(f"{rows['step'].nunique()} steps")
        if rows["temperature"].notna().any():
            places.append(f"{rows['temperature'].nunique()} temperatures")
        counts = [f"{status} {count}" for status, count in rows["status"].value_counts().items()]
        where = f" at {' and '.join(places)}" if places else ""
        lines.append(
            f"{kind}: {len(rows)} completions of {rows['prompt'].nunique()} prompts{where}; {', '.join(counts)}"
        )
    if not (run / "summary.json").is_file():
        lines.append("not finished: no summary.json")
    command = ""
    if (run / "command.txt").is_file():
        command = (run / "command.txt").read_text().strip()
    return {"name": run_name(run), "command": command, "lines": lines + notes}


def gather(runs: list[Path], n: int) -> dict:
    """Returns everything that the page of one or two runs shows. Raises ValueError if a folder has nothing to show."""
    notes = [[] for _ in runs]
    curves = [read_curves(run, of_run) for run, of_run in zip(runs, notes)]
    completions = list_completions(runs, notes)
    for number, run in enumerate(runs):
        if not curves[number] and not (completions["run"] == number).any():
            files = ", ".join(["metrics.jsonl", *KINDS])
            raise ValueError(
                f"{run}: no rows in any of {files}; name the folder of a run or of an evaluation"
            )

    visits = list_visits(completions)
    chosen = choose(visits, n)
    sampled = ""
    if len(chosen) < len(visits):
        sampled = (
            f"{chosen['n'].sum()} of the {visits['n'].sum()} completions are on this page: those nearest to the "
            "ends of every order, then prompts drawn evenly, as far as they fit; python page.py --n 0 shows all"
        )
    joined_curves = join_curves(curves, notes)
    filled, prompts = fill_visits(runs, completions, chosen)
    about = []
    for number, run in enumerate(runs):
        about.append(describe(run, completions[completions["run"] == number], notes[number]))
        for note in notes[number]:
            print(f"note: {note}", file=sys.stderr)
    return {
        "runs": about,
        "arguments": join_arguments(runs),
        "curves": joined_curves,
        "sampled": sampled,
        "prompts": prompts,
        "visits": filled,
        "orders": [order for order in ORDERS if chosen[order[1]].notna().any()],
    }


# control characters, which a browser hides or which turn text around, and halves of surrogate pairs
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def spell_out(match: re.Match) -> str:
    return match[0].encode("unicode_escape").decode()


def make_visible(value):
    """Returns a JSON value with hidden characters spelled out in all strings, and null for numbers JSON has not."""
    if isinstance(value, str):
        return HIDDEN.sub(spell_out, value)
    if isinstance(value, dict):
        return {make_visible(key): make_visible(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [make_visible(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_script_json(data: dict) -> str:
    """Returns JSON that cannot end the <script> element around it: without any "<"."""
    text = json.dumps(make_visible(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def fill_template(values: dict[str, str]) -> str:
    """Fills each {{name}} of the template once, so that a {{name}} in a value stays as it is.

    The hash in the content security policy lets the template's own script run and nothing else.
    """
    template = TEMPLATE.read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    digest = hashlib.sha256(script.encode()).digest()
    values = values | {"script_hash": base64.b64encode(digest).decode()}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def write_page(runs: list[str | Path], out: str | Path, n: int = MAX_COMPLETIONS) -> None:
    """Writes the page of one run, or of two side by side, with n completions at most; 0 is all of them."""
    data = gather([Path(run) for run in runs], n)
    title = " | ".join(run_name(run) for run in runs)
    title = html.escape(make_visible(title))
    page = fill_template({"title": title, "data": to_script_json(data)})
    Path(out).write_text(page, "utf-8")


def main(args: Args) -> None:
    runs = [args.run]
    if args.other:
        runs.append(args.other)
    out = args.out or Path(args.run, "page.html")
    try:
        write_page(runs, out, args.n)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    print(out)


if __name__ == "__main__":
    main(tyro.cli(Args))
