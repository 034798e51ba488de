"""Renders the paper's tables and the toy tables from runs.csv: our numbers next to the paper's.

reproduce.py calls `render`. A line of runs.csv is one measured value; `run` is ROW-sSEED--EVALUATION.
"""

import functools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from scipy import stats

from utils import fail
from benchmarks.scoring import INDEX_COLUMNS, bootstrap
from benchmarks.judge_template import OUR_WORDING

PAPER = Path(__file__).parents[1] / "data" / "paper" / "rlmt_tables.csv"

BENCHMARKS = {  # the paper's column: (evaluation of evaluate.sh, its metric, factor to the paper's scale)
    "WB": ("wildbench", "wb_reward", 1),
    "AE2": ("alpacaeval2", "lc_win_rate_paper", 1),
    "AH2": ("arenahard2", "score_paper", 1),
    "CWv3": ("creativewriting3", "overall_paper", 1),
    "PopQA": ("popqa", "accuracy_paper", 100),
    "IFBench": ("ifbench", "prompt_strict", 100),
    "MMLU_Redux": ("mmlu_redux", "accuracy", 100),
    "IFEval": ("ifeval", "prompt_strict", 100),
    "WB_G": ("wildbench-g", "wb_reward", 1),
    "MATH500": ("math500", "accuracy", 100),
    "ZebraLogic": ("zebralogic", "accuracy", 100),
}
AVERAGES = {  # the paper's column: the columns whose mean it is
    "Avg_Chat": ("WB", "AE2", "AH2"),
    "Avg": ("WB", "AE2", "AH2", "CWv3", "PopQA", "IFBench", "MMLU_Redux"),
    "Avg4": ("WB", "AE2", "AH2", "CWv3"),
}
JUDGED = ("WB", "AE2", "AH2", "CWv3", "WB_G")
AS_RELEASED = "-as-released"  # ends the name of a row that evaluates the checkpoint of the paper's authors

TOY_COLUMNS = {  # column: (metric, temperature, tasks; all if empty)
    "gold, T=1": ("score", 1.0, ()),
    "gold, greedy": ("score", 0.0, ()),
    "proxy, T=1": ("proxy_reward", 1.0, ()),
    "format ok": ("format_ok", 1.0, ()),
    "think tokens": ("thinking_tokens", 1.0, ()),
    "response tokens": ("response_tokens", 1.0, ()),
}
REWARDS_COLUMNS = {
    "right, T=1": ("score", 1.0, ("sums_tasks", "code_tasks")),
    "right, greedy": ("score", 0.0, ("sums_tasks", "code_tasks")),
    "gold, T=1": ("score", 1.0, ("benchmark_tasks",)),
    "gold, greedy": ("score", 0.0, ("benchmark_tasks",)),
    "emotion": ("mean_emotion", 1.0, ("sentient",)),
    "emotion, held-out user": ("mean_emotion", 1.0, ("sentient_held_out",)),
    "success": ("success", 1.0, ("sentient",)),
    "failure": ("failure", 1.0, ("sentient",)),
    "format ok": ("format_ok", 1.0, ()),
}
COLUMNS = {"toy": TOY_COLUMNS, "rewards": REWARDS_COLUMNS}
OWN_COLUMNS = REWARDS_COLUMNS | TOY_COLUMNS  # of toy rows in a table of the user's own
NO_LINES = pd.DataFrame()  # of a cell that has not run

VARIANCE = (
    "± is half a 95 % interval over the tasks. It covers which tasks there are and how answers are sampled, not how another "
    "training run differs. With several seeds each task is averaged over them first; a metric that is no mean over tasks then "
    "has no interval over tasks. ± over n seeds is half a 95 % interval over the seeds (Student's t), which covers training "
    "and sampling on these tasks."
)
PRINTED = "Numbers in brackets are the paper's; ours, where there is one, is before them."
AVERAGED = (
    "Averages are those of the paper, of rows whose columns are all measured with the same number of seeds."
)


# --- 1. what was measured


def read_index(folder: Path) -> pd.DataFrame:
    """Reads a folder's runs.csv, with the columns `row`, `seed` and `evaluation` split off the run's name, and its `folder`.

    Runs with other names are left out. Of two lines for the same value the later one counts.
    """
    path = folder / "runs.csv"
    if path.exists():
        index = pd.read_csv(path)
    else:
        index = pd.DataFrame(columns=list(INDEX_COLUMNS))
    parts = index["run"].astype(str).str.extract(r"^(?P<row>.+)-s(?P<seed>\d+)--(?P<evaluation>.+)$")
    index = pd.concat([index, parts], axis=1).dropna(subset="row")
    index["folder"] = [folder / run for run in index["run"]]
    return index.drop_duplicates(["run", "benchmark", "metric", "temperature"], keep="last")


def wording_of(run: Path) -> str:
    """Returns whose words the judge of a run read, as its summary says; "" without a judge or a summary."""
    path = run / "summary.json"
    if not path.exists():
        return ""
    return json.loads(path.read_text()).get("wording", "")


def summarize_seeds(values: pd.DataFrame, factor: float) -> dict:
    """Computes the mean of one cell and its 95 % intervals, from its lines of the index, one a seed.

    `low` and `high` are over tasks. `seed_low` and `seed_high` are over seeds, by Student's t; None for one
    seed. Exits with 2 if the seeds were not judged alike, as their values have no common mean.
    """
    if len(values):  # most cells have no line, and pandas takes its time for those too
        values = values.dropna(subset="value")  # a seed with too many invalid verdicts has no value
    seeds = len(values)
    if seeds == 0:
        names = ("ours", "low", "high", "seed_low", "seed_high", "n", "n_invalid", "task", "fingerprint")
        empty = dict.fromkeys(names)
        return empty | {"seeds": 0}
    if values["fingerprint"].nunique() > 1:
        names = ", ".join(values["run"])
        fail(f"{names} were not judged alike (fingerprint in runs.csv), so they have no mean")

    mean = values["value"].mean()
    low = values["low"].iloc[0]
    high = values["high"].iloc[0]
    seed_low = None
    seed_high = None
    if seeds > 1:
        low, high = interval_over_tasks(values)
        half = stats.t.ppf(0.975, seeds - 1) * values["value"].sem()
        seed_low = factor * (mean - half)
        seed_high = factor * (mean + half)
    return {
        "ours": factor * mean,
        "low": factor * low,
        "high": factor * high,
        "seed_low": seed_low,
        "seed_high": seed_high,
        "n": values["n"].iloc[0],  # that of each seed, as tasks are part of the fingerprint
        "n_invalid": values["n_invalid"].sum(),
        "task": values["benchmark"].iloc[0],
        "fingerprint": values["fingerprint"].iloc[0],
        "seeds": seeds,
    }


def interval_over_tasks(values: pd.DataFrame) -> tuple[float, float]:
    """Returns the 95 % interval of several seeds, by resampling tasks; each task is averaged over the seeds first.

    A task that is hard for one seed is hard for the others, so seeds are not further tasks. NaN if a seed has no
    task_means.csv with the metric.
    """
    means_of_seeds = []
    for line in values.itertuples():
        path = line.folder / "task_means.csv"
        if not path.exists():
            return math.nan, math.nan
        means = pd.read_csv(path, dtype={"task": str})
        same = (means["benchmark"] == line.benchmark) & (means["metric"] == line.metric)
        if not pd.isna(line.temperature):
            same &= means["temperature"] == line.temperature
        if not same.any():
            return math.nan, math.nan
        means_of_seeds.append(means[same])
    task_means = pd.concat(means_of_seeds).groupby("task", sort=False)["mean"].mean()
    return bootstrap(task_means)


def counts(table: pd.DataFrame) -> str:
    """Writes of how many values each number is a mean, which rows have fewer or more, and how many were invalid."""
    parts = []
    for column, cells in table.dropna(subset="n").groupby("benchmark", sort=False):
        usual = cells["n"].mode()[0]
        part = f"{column} {usual:g}"
        for n, others in cells[cells["n"] != usual].groupby("n"):
            part += f", but {n:g} in {' '.join(others['row'])}"
        for cell in cells[cells["n_invalid"] > 0].itertuples():
            part += f", {cell.n_invalid:g} invalid in {cell.row}"
        parts.append(part)
    return f"n of each seed: {'; '.join(parts)}."


def judged_unlike(table: pd.DataFrame) -> list[str]:
    """Writes a sentence for each column of a table whose rows were not judged alike."""
    sentences = []
    for (column, _), cells in table.dropna(subset="fingerprint").groupby(["benchmark", "task"], sort=False):
        groups = cells.groupby("fingerprint", sort=False)["row"].unique().map(", ".join)
        if len(groups) > 1:
            sides = " against ".join(groups)
            sentences.append(f"{column}: not to be compared, as judge, instructions or tasks differ: {sides}")
    return sentences


# --- 2. the paper's tables


@functools.cache
def printed_numbers() -> pd.DataFrame:
    """Reads every number that the paper prints.

    `row` is the row's name in experiments/table*.sh, "" for models of others that cannot be had.
    """
    return pd.read_csv(PAPER, dtype={"table": str}, keep_default_na=False)


def printed_cells(table: str, row: str) -> pd.DataFrame:
    """Returns what a table prints of a row; of a row as released, what it prints of the row that it repeats."""
    printed = printed_numbers()
    return printed[(printed["table"] == table) & (printed["row"] == row.removesuffix(AS_RELEASED))]


class OwnCell(NamedTuple):
    """A cell of a row that the paper does not have."""

    table: str
    benchmark: str
    value: float = math.nan


def paper_table(table: str, rows: list[str], index: pd.DataFrame) -> pd.DataFrame:
    """Builds a table with our number, its intervals and the printed one: one line a row and column.

    `rows` names the rows of experiments/: those as released stand above what the paper prints, those of the user's own
    below it, with every column of the table and without a printed number.
    """
    lines_of = dict(list(index.groupby(["row", "evaluation", "metric"])))
    lines = []
    for row in rows:
        if row.endswith(AS_RELEASED):
            for cell in printed_cells(table, row).itertuples():
                lines.append(cell_line(cell, row, "as released", lines_of))
    printed = printed_numbers()
    for cell in printed[printed["table"] == table].itertuples():
        lines.append(cell_line(cell, cell.row, cell.section, lines_of))
    columns = list(printed.loc[printed["table"] == table, "benchmark"].unique()) or list(BENCHMARKS)
    for row in rows:
        if printed_cells(table, row).empty:
            for column in columns:
                cell = OwnCell(table, column)
                lines.append(cell_line(cell, row, "own", lines_of))
    add_averages(lines)
    return pd.DataFrame(lines)


def cell_line(cell, row: str, section: str, lines_of: dict[tuple[str, str, str], pd.DataFrame]) -> dict:
    """Returns the line of a printed number; `ours` of an average is left to `add_averages`.

    `lines_of` has the index's lines by row, evaluation and metric.
    """
    evaluation, metric, factor = BENCHMARKS.get(cell.benchmark, ("", "", 1))
    same = lines_of.get((row, evaluation, metric), NO_LINES)
    wording = ""
    if len(same):
        require_one_line_a_seed(same)
        measured = same.dropna(subset="value")
        if len(measured) and cell.benchmark in JUDGED:
            wording = wording_of(measured["folder"].iloc[0]) or "unknown"
    numbers = summarize_seeds(same, factor)

    paper = float(cell.value)
    difference = None
    if numbers["seeds"]:
        status = "measured"
        difference = numbers["ours"] - paper
    elif len(same):
        status = "no headline"
    elif not row:
        status = "model of others"
    else:
        status = "not yet run"

    name = row or f"{cell.model_name or cell.backbone} ({cell.training})"
    line = {"table": cell.table, "row": name, "section": section, "benchmark": cell.benchmark}
    return line | numbers | {"paper": paper, "difference": difference, "status": status, "wording": wording}


def require_one_line_a_seed(lines: pd.DataFrame) -> None:
    """Exits with 2 if a seed has several values of one cell, such as one for each of two temperatures."""
    repeated = lines[lines["seed"].duplicated(keep=False)]
    if len(repeated):
        first = repeated.iloc[0]
        temperatures = ", ".join(map(str, repeated.loc[repeated["run"] == first["run"], "temperature"]))
        fail(
            f"{first['run']} has several values of {first['metric']} (temperatures {temperatures}); a table of the "
            "paper takes one a seed, so delete the others from runs.csv"
        )


def add_averages(lines: list[dict]) -> None:
    """Fills in our averages: the mean of a row's columns, if all are measured with the same number of seeds."""
    cells = {(line["section"], line["row"], line["benchmark"]): line for line in lines}
    for line in lines:
        if line["benchmark"] not in AVERAGES:
            continue
        parts = [cells[line["section"], line["row"], column] for column in AVERAGES[line["benchmark"]]]
        seeds = {part["seeds"] for part in parts}
        if len(seeds) > 1 or 0 in seeds:
            continue
        line["ours"] = sum(part["ours"] for part in parts) / len(parts)
        line["difference"] = line["ours"] - line["paper"]
        line["seeds"] = seeds.pop()
        line["status"] = "measured"


def wordings(table: pd.DataFrame) -> list[str]:
    """Writes for each judged column whose words its judges read, and which averages mix our words with others'."""
    sentences = []
    measured = table[table["wording"] != ""]
    for column, cells in measured.groupby("benchmark", sort=False):
        sides = []
        for wording, part in cells.groupby("wording", sort=False):
            sides.append(f"{wording} ({', '.join(part['row'].unique())})")
        sentences.append(f"Judge's instructions of {column}: {'; '.join(sides)}.")

    for line in table[table["benchmark"].isin(AVERAGES) & (table["seeds"] > 0)].itertuples():
        parts = measured[(measured["row"] == line.row) & measured["benchmark"].isin(AVERAGES[line.benchmark])]
        is_ours = parts["wording"] == OUR_WORDING
        if is_ours.any() and not is_ours.all():
            mixed = ", ".join(f"{part.benchmark} {part.wording}" for part in parts.itertuples())
            sentences.append(f"{line.benchmark} of {line.row} is over unlike instructions: {mixed}.")
    return sentences


def intervals(cell, digits: int) -> str:
    """Writes ` ± half the interval` over tasks, then over seeds; each only if the cell has it."""
    text = ""
    if not pd.isna(cell.low):
        text += f" ± {(cell.high - cell.low) / 2:.{digits}f}"
    if not pd.isna(cell.seed_low):
        text += f", ± {(cell.seed_high - cell.seed_low) / 2:.{digits}f} over {cell.seeds} seeds"
    return text


def paper_cell(cell) -> str:
    """Writes `ours ± intervals (paper's)`, each where there is one."""
    text = ""
    if not pd.isna(cell.ours):
        text = f"{cell.ours:.1f}{intervals(cell, digits=1)} "
    if not pd.isna(cell.paper):
        text += f"({cell.paper:g})"
    return text.strip()


def paper_markdown(table: pd.DataFrame) -> str:
    columns = list(table["benchmark"].unique())
    lines = ["| row | " + " | ".join(columns) + " | status |", "|" + "---|" * (len(columns) + 2)]
    for (_, row), part in table.groupby(["section", "row"], sort=False):
        cells = {cell.benchmark: paper_cell(cell) for cell in part.itertuples()}
        states = part["status"].unique()
        status = states[0] if len(states) == 1 else "partly measured"
        lines.append(f"| {row} | " + " | ".join(cells.get(c, "") for c in columns) + f" | {status} |")
    return "\n".join(lines)


# --- 3. the toy tables


def toy_table(table: str, rows: list[str], index: pd.DataFrame) -> pd.DataFrame:
    """Builds a table of toy rows: one line a row and column."""
    lines_of = dict(list(index.groupby("row")))
    lines = []
    for row in rows:
        of_row = lines_of.get(row, index[:0])
        for column, (metric, temperature, tasks) in COLUMNS.get(table, OWN_COLUMNS).items():
            same = (of_row["metric"] == metric) & (of_row["temperature"] == temperature)
            if tasks:
                same &= of_row["benchmark"].isin(tasks)
            values = of_row[same].drop_duplicates("seed")  # format_ok has a line for each of two users
            numbers = summarize_seeds(values, 1)
            if numbers["seeds"]:
                status = "toy"
            else:
                status = "no headline" if len(values) else "not yet run"
            line = {"table": table, "row": row, "benchmark": column}
            lines.append(line | numbers | {"status": status})
    return pd.DataFrame(lines)


def toy_cell(cell) -> str:
    if pd.isna(cell.ours):
        return ""
    if pd.isna(cell.low):
        return f"{cell.ours:.3g}{intervals(cell, digits=3)}"
    return f"{cell.ours:.3f}{intervals(cell, digits=3)}"


def toy_markdown(table: pd.DataFrame) -> str:
    """Writes a Markdown table for each kind of rows that have run: those with values in the same columns."""
    measured = table[table["status"] != "not yet run"]
    rows_by_columns = {}
    for row, part in measured.groupby("row", sort=False):
        columns = tuple(part["benchmark"])
        rows_by_columns.setdefault(columns, []).append(row)
    texts = [toy_rows(table, rows, columns) for columns, rows in rows_by_columns.items()]
    return "\n\n".join(texts) or "No row has run yet."


def toy_rows(table: pd.DataFrame, rows: list[str], columns: tuple[str, ...]) -> str:
    lines = ["| row | seeds | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for row in rows:
        part = table[table["row"] == row]
        cells = {cell.benchmark: toy_cell(cell) for cell in part.itertuples()}
        seeds = part["seeds"].max()
        lines.append(f"| {row} | {seeds} | " + " | ".join(cells[column] for column in columns) + " |")
    return "\n".join(lines)


# --- 4. all of them


def render(results: Path, rows: dict[str, dict]) -> dict[str, str]:
    """Writes every table into results/tables/ as csv and Markdown; returns the Markdown by table.

    `rows` has the blocks of each table's rows, by row, as reproduce.py reads them. Below a table it says what the
    intervals cover, and which columns hold rows that were not judged alike; these are warned of as well.
    """
    folder = results / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    indices = {}
    texts = {}
    for table, blocks in rows.items():
        first = next(iter(blocks.values()))
        if first.folder not in indices:
            indices[first.folder] = read_index(results / first.folder)
        index = indices[first.folder]
        is_toy = first.evaluations == ["gold"]
        if is_toy:
            name = table
            numbers = toy_table(table, list(blocks), index)
            rounded = numbers.round(4)
            markdown = toy_markdown(numbers)
        else:
            name = f"table{table}"
            numbers = paper_table(table, list(blocks), index)
            rounded = numbers
            markdown = paper_markdown(numbers)

        rounded.drop(columns=["task", "fingerprint"]).to_csv(folder / f"{name}.csv", index=False)
        notes = [VARIANCE]
        if not is_toy:
            notes.insert(0, PRINTED)
        if numbers["benchmark"].isin(AVERAGES).any():
            notes.append(AVERAGED)
        if not is_toy:
            notes += wordings(numbers)
        if numbers["n"].notna().any():
            notes.append(counts(numbers))
        for sentence in judged_unlike(numbers):
            print(f"WARNING: {name}, {sentence}", file=sys.stderr)
            notes.append(sentence)
        texts[name] = "\n\n".join([markdown, *notes])
        (folder / f"{name}.md").write_text(texts[name] + "\n")
    return texts
