"""Makes a table, paired differences and curves of runs of your own, from their folders.

    python -m experiments.compare results/demo                       # all runs and evaluations in a folder
    python -m experiments.compare results/mine --compare rlmt rlhf

A row is a model: the name of its run folder, of which ROW-s0, ROW-s1, ... are seeds. Its numbers are those of
every evaluation of that model, whatever the evaluation is named.
Writes all numbers to table.csv, and as Markdown the tables table and differences; of RL runs curves.csv and
curves.png.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from experiments import tables
from notebooks.style import completions_per_step, model_name, panels, split_seed, thinks
from page import read_lines
from rlmt.run import inputs_of
from utils import fail, refuse_repeated

# pattern in a row's name: what stands in its place in the name of the row that it is compared with, if there is
# one (dots are of experiments/study.sh)
TWINS = {
    "think|dots": "plain",
    "rlmt": "rlhf",
    r"\b(grpo|ppo|dpo|rlvr)\b": "sft",
    "-response$": "",  # the reward on the response only, of experiments/demo.sh
}
NAMES = {  # of metrics in runs.csv
    "score of a program": "gold",  # as nothing is trained on it
    "proxy_reward": "proxy",
    "format_ok": "format ok",
    "thinking_tokens": "think tokens",
    "response_tokens": "response tokens",
    "thinking_use": "thinking use",
    "thinking_use_same_task": "thinking use, same task",
    "thinking_use_empty": "thinking use, empty",
}
# rewards, by their keys in metrics.jsonl: their names in held_out.jsonl
CURVES = {"reward/gold": "gold", "reward/preference": "proxy"}
ABOUT = (
    "Gold: a program's score, which is no row's reward; proxy: the reward that RL is trained on, of answers in good "
    "format. Response tokens: all but the thinking's, so the tags count among them. An answer without a value, as one that "
    "is cut off has no reward, counts in no mean, so rows may compare different tasks."
)
DIFFERENCES = (
    "A difference is taken task by task, where both rows have a value, "
    "and seed by seed where both have several."
)


@dataclass
class Args:
    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that hold run folders, or whose subfolder runs/ does."""
    compare: tuple[tuple[str, str], ...] = ()
    """Pairs of rows whose differences are wanted; empty: those of TWINS, such as RL and its SFT."""
    out: Path | None = None
    """Folder for the files; empty: the first of the folders."""


# --- 1. rows


def run_folders(folders: tuple[Path, ...]) -> list[Path]:
    """Lists the run folders that the command names."""
    runs = []
    for folder in folders:
        configs = [*folder.glob("*/config.json"), *folder.glob("runs/*/config.json")]
        if not configs:  # git has tables without their runs: do not write over them
            fail(f"{folder}: no run folder in it")
        runs += [path.parent for path in sorted(configs)]
    by_name = {}
    for run in runs:
        other = by_name.setdefault(split_seed(run.name), run)
        if other != run:
            fail(f"{other} and {run} are the same seed of a row; rename one, or compare one folder at a time")
    return list(by_name.values())


def read_evaluations(folders: tuple[Path, ...], rows: list[str] | None = None) -> pd.DataFrame:
    """Reads the lines of runs.csv of what the command names, with the `row`, `seed` and `column` of each.

    A model whose thinking was cut at N tokens is a row of its own. An evaluation of weights that its model no
    longer has is left out, and named on stderr. `rows`: the only rows to read, in this order; None: all.
    """
    parts = []
    for folder in folders:
        parts += [tables.read_index(folder), tables.read_index(folder / "runs")]
    lines = pd.concat(parts, ignore_index=True)
    outdated = [folder for folder in lines["folder"].unique() if has_other_model_now(folder)]
    for folder in outdated:
        print(f"{folder}: left out, as its model was trained anew since; evaluate it again", file=sys.stderr)
    lines = lines[~lines["folder"].isin(outdated)]
    models = [split_seed(model_name(model)) for model in lines["model"]]
    of_model = pd.DataFrame(models, columns=["row", "seed"], index=lines.index)
    # those of reproduce.py have the row in their own name
    lines[["row", "seed"]] = lines[["row", "seed"]].fillna(of_model)
    lines["row"] += lines["sampling"].str.extract(r"(, \d+ of thinking)")[0].fillna("")
    if rows is not None:
        lines = pd.concat([lines[lines["row"] == row] for row in rows])

    is_program = lines["judge"].astype(str).str.contains(".py:", regex=False)
    metrics = lines["metric"].mask(is_program & (lines["metric"] == "score"), "score of a program")
    names = metrics.map(NAMES).fillna(lines["benchmark"] + " " + metrics)
    # one rule for all that NAMES has; any other column has a benchmark in its name
    alike = lines.groupby(names.mask(metrics.isin(NAMES), "answers"))
    several = alike[["benchmark", "temperature"]].transform("nunique") > 1
    names = names.mask(several["benchmark"], lines["benchmark"] + " " + names)
    names += (", T=" + lines["temperature"].map("{:g}".format)).where(several["temperature"], "")
    several_judges = lines.groupby(names)["judge"].transform("nunique") > 1
    # a length has no judge
    lines["column"] = names + (", by " + lines["judge"]).where(several_judges).fillna("")
    return lines


def has_other_model_now(evaluation: Path) -> bool:
    """Returns whether the folder of an evaluation's model holds other weights than the evaluated ones."""
    path = evaluation / "config.json"
    if not path.exists():
        return False
    config = json.loads(path.read_text())
    model = config["args"].get("model") or ""
    before = config.get("reads", {}).get("model")  # older evaluations have none
    return bool(before) and Path(model).is_dir() and not before.items() <= inputs_of(model).items()


def cells_of(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns a cell for each row and column of the evaluations."""
    cells = []
    for (row, column), part in lines.groupby(["row", "column"], sort=False):
        cells.append(tables.summarize_seeds(part) | {"row": row, "benchmark": column})
    return pd.DataFrame(cells, columns=tables.CELL)


# --- 2. differences


def twins_of(rows: list[str]) -> list[tuple[str, str]]:
    """Lists the pairs of rows whose names say that they differ in one thing, see TWINS."""
    pairs = []
    for row in rows:
        twins = {re.sub(pattern, other, row) for pattern, other in TWINS.items()} - {row}
        pairs += [(row, twin) for twin in sorted(twins) if twin in rows]
    return pairs


def differences(lines: pd.DataFrame, pairs: list[tuple[str, str]], are_asked: bool) -> pd.DataFrame:
    """Returns the cells of the differences between two rows, in every column that both have.

    Rows that were judged differently have none: if the user asked for the pair this exits with 2, else the
    column is named on stderr.
    """
    cells = []
    for first, second in pairs:
        name = f"{first} − {second}"
        for column in lines["column"].unique():
            of_column = lines[lines["column"] == column]
            one, other = (of_column[of_column["row"] == row] for row in (first, second))
            if one["value"].isna().all() or other["value"].isna().all():  # none, or withheld
                continue
            if not are_asked and set(one["fingerprint"]) != set(other["fingerprint"]):
                print(f"{name}, {column}: no difference, as they were judged differently", file=sys.stderr)
                continue
            cell = tables.difference(one, other)
            if cell["seeds"] == 0:
                print(f"{name}, {column}: no difference, as they have no seed in common", file=sys.stderr)
                continue
            cells.append(cell | {"row": name, "benchmark": column})
    return pd.DataFrame(cells, columns=tables.CELL)


# --- 3. files


def write_rows(numbers: pd.DataFrame) -> str:
    """Returns Markdown: a table for each set of rows that have the same columns, lengths last."""
    is_length = numbers["benchmark"].str.contains("tokens")
    digits = is_length.map({True: 1, False: 3})
    numbers = pd.concat([numbers[~is_length], numbers[is_length]])
    columns_of_row = numbers.groupby("row")["benchmark"].agg(tuple)
    parts = []
    for _, part in numbers.groupby(numbers["row"].map(columns_of_row), sort=False):
        parts.append(tables.markdown_table(tables.write_cells(part, digits).reset_index()))
    return "\n\n".join(parts)


# --- 4. curves


def read_curves(runs: list[Path], lines: pd.DataFrame) -> pd.DataFrame:
    """Reads gold and proxy of every RL run over the completions that it had sampled before.

    They are of the held-out prompts if the run has some, else of a step's own completions. Their last point is then the
    evaluation of the trained model, of the `lines` of the index: those of the last step are sampled before its update.
    """
    curves = [pd.DataFrame()]
    for run in runs:
        file = "held_out.jsonl"
        steps_before = 0
        if not (run / file).exists():
            file = "metrics.jsonl"
            steps_before = 1  # the line of a step is about what was sampled before it
        if not (run / file).exists():
            continue
        curve = pd.DataFrame(read_lines(run / file)).rename(columns=CURVES)
        if "gold" in curve:  # SFT has none
            curve["completions"] = completions_per_step(run) * (curve["step"] - steps_before)
            if steps_before:
                last = {"completions": completions_per_step(run) * curve["step"].max()}
                curve = pd.concat([curve, pd.DataFrame([last | read_end(run, lines)])])
            curve = curve.reindex(columns=["proxy", "gold", "completions"]).astype(float)  # some lack a proxy
            curve = curve.dropna(subset="completions").dropna(subset=["gold", "proxy"], how="all")
            curves.append(curve.assign(run=run.name, thinks=thinks(run)))
    return pd.concat(curves, ignore_index=True)


def read_end(run: Path, lines: pd.DataFrame) -> dict[str, float]:
    """Returns gold and proxy of a run's trained model in the evaluation at temperature 1, if there is one."""
    row, seed = split_seed(run.name)
    of_run = lines[(lines["row"] == row) & (lines["seed"] == seed)]
    values = {}
    for name in CURVES.values():
        of_measure = of_run[of_run["column"].str.fullmatch(rf"{name}(, T=1)?")]
        if len(of_measure):
            values[name] = of_measure["value"].iloc[0]
    return values


# --- 5. the command


def main(args: Args) -> None:
    if not args.folders:
        fail("name a folder of runs, such as results")
    runs = run_folders(args.folders)
    out = args.out or args.folders[0]
    lines = read_evaluations(args.folders)
    table = cells_of(lines)
    curves = read_curves(runs, lines)
    if table.empty and curves.empty:
        fail(f"{args.folders[0]}: nothing is evaluated there, and no RL run logged gold")
    out.mkdir(parents=True, exist_ok=True)
    evaluated = list(lines["row"].unique())
    for row in sum(args.compare, ()):
        if row not in evaluated:
            fail(f"--compare: no row {row!r} is evaluated; there are {', '.join(evaluated) or 'none'}")
    pairs = differences(lines, args.compare or twins_of(evaluated), are_asked=bool(args.compare))
    numbers = pd.concat([table, pairs])[tables.NUMBERS].dropna(axis=1, how="all")
    numbers.round(4).to_csv(out / "table.csv", index=False)
    if len(table):
        print(tables.write_page(out / "table.md", write_rows(table), ABOUT, *tables.notes_of(table)))
    if len(pairs):
        print(tables.write_page(out / "differences.md", write_rows(pairs), DIFFERENCES, tables.VARIANCE))
    if len(curves):
        curves.round(5).to_csv(out / "curves.csv", index=False)
        # where gold falls while the proxy rises, the reward is over-optimised
        panels(curves, "completions", CURVES.values()).savefig(out / "curves.png")


if __name__ == "__main__":
    refuse_repeated(Args)
    main(tyro.cli(Args))
