"""Builds tables from runs.csv, and the paper's tables with our numbers next to the paper's.

reproduce.py and experiments/compare.py call it. A line of runs.csv is one measured value; `run` is
ROW-sSEED--EVALUATION.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from scipy import stats

from utils import fail
from benchmarks.scoring import INDEX_COLUMNS, mean_interval, wilson

PAPER = Path(__file__).parents[1] / "data" / "paper" / "rlmt_tables.csv"

BENCHMARKS = {  # the paper's column: (evaluation of evaluate.sh, its metric)
    "WB": ("wildbench", "wb_reward"),
    "AE2": ("alpacaeval2", "lc_win_rate_paper"),
    "AH2": ("arenahard2", "score_paper"),
    "CWv3": ("creativewriting3", "overall_paper"),
    "PopQA": ("popqa", "accuracy_paper"),
    "IFBench": ("ifbench", "prompt_strict"),
    "MMLU_Redux": ("mmlu_redux", "accuracy"),
    "IFEval": ("ifeval", "prompt_strict"),
    "WB_G": ("wildbench-g", "wb_reward"),
    "WB_RM": ("wildbench-rm", "mean_reward"),
    "MATH500": ("math500", "accuracy"),
    "ZebraLogic": ("zebralogic", "accuracy"),
}
PERCENT = ("PopQA", "IFBench", "MMLU_Redux", "IFEval", "MATH500", "ZebraLogic")  # ours are shares
AVERAGES = {  # the paper's column: the columns whose mean it is
    "Avg_Chat": ("WB", "AE2", "AH2"),
    "Avg": ("WB", "AE2", "AH2", "CWv3", "PopQA", "IFBench", "MMLU_Redux"),
    "Avg4": ("WB", "AE2", "AH2", "CWv3"),
}
AS_RELEASED = "-as-released"  # ends the name of a row that evaluates the checkpoint of the paper's authors

NUMBERS = (  # columns of a table as csv
    "table row section benchmark ours low high n n_invalid seeds paper difference "
    "status sampling judge wording"
).split()
CELL = [*NUMBERS, "task", "fingerprint"]
SCALED = ["ours", "low", "high"]
# metrics that are shares of the answers or dialogues; with a 0 or 1 for each task, others are recognised
SHARES = ("format_ok", "success", "failure", "prompt_strict", "accuracy")
# what a line of runs.csv, or of a run's task_means.csv, is about
MEASURE = ["benchmark", "metric", "temperature"]
# names, of runs and tasks too, that are texts even if they look like a number or NA
AS_TEXT = dict.fromkeys(["run", "model", "benchmark", "task"], str)

VARIANCE = (
    "± is half a 95 % interval: over the seeds (Student's t) where a row has several, which covers training and sampling on "
    "these tasks; else over the tasks, which does not cover how another training run differs. A share has Wilson's interval "
    "over the tasks. Brackets hold the two ends of an interval that is not even."
)
PRINTED = (
    "Numbers in brackets are the paper's; ours, where there is one, is before them. The paper's judge is gpt-4o for WB and "
    "AE2, and gpt-4.1 for AH2, CWv3 and WB_G."
)
AVERAGED = (
    "Averages are those of the paper, of rows whose columns are all measured with the same number of seeds."
)


# --- 1. what was measured


def read_index(folder: Path) -> pd.DataFrame:
    """Reads a folder's runs.csv, with the columns `row`, `seed` and `evaluation` split off the run's name, its
    `folder`, and `sampling`.

    Runs with other names have no row. Of a run that was evaluated again the last lines count.
    """
    index = pd.DataFrame(columns=list(INDEX_COLUMNS))
    if (folder / "runs.csv").exists():
        index = pd.read_csv(folder / "runs.csv", dtype={"fingerprint": str}, converters=AS_TEXT)
    parts = index["run"].str.extract(r"^(?P<row>.+)-s(?P<seed>\d+)--(?P<evaluation>.+)$")
    index = pd.concat([index, parts], axis=1)
    index["folder"] = [folder / run for run in index["run"]]
    limits = [limits_of(run) for run in index["folder"]]
    index["sampling"] = (
        "temperature " + index["temperature"].map("{:g}".format) + ", " + pd.Series(limits, index.index)
    )
    return index[index["time"] == index.groupby("run")["time"].transform("last")]


def limits_of(run: Path) -> str:
    """Returns how a run's answers were limited, as its config.json says."""
    path = run / "config.json"
    args = json.loads(path.read_text())["args"] if path.exists() else {}
    if "top_p" not in args:  # as of an audit by eval_reward.py
        return "limits unknown"
    limits = f"top-p {args['top_p']:g}, {args['max_tokens']} tokens at most"
    if args.get("max_thinking_tokens"):
        limits += f", {args['max_thinking_tokens']} of thinking"
    return limits


def summarize_seeds(lines: pd.DataFrame) -> dict:
    """Computes the mean of one cell and its 95 % intervals, from its lines of the index, one a seed.

    Exits with 2 if the lines are no seeds of one measurement, as their values have no common mean.
    """
    if lines.empty:
        return {"seeds": 0, "status": "not yet run"}
    values = lines.dropna(subset="value")  # a seed with too many invalid verdicts has no value
    if values.empty:
        return {"seeds": 0, "status": "no headline"}
    names = ", ".join(values["run"])
    if values["fingerprint"].nunique() > 1:
        fail(f"{names} were not judged alike (fingerprint in runs.csv), so they have no mean")
    if values["seed"].duplicated().any():
        fail(
            f"{names}: several values of a seed, as of two evaluations of one model; delete all but one from runs.csv"
        )

    # n is that of each seed, as tasks are part of the fingerprint
    cell = values.iloc[0].to_dict() | mean_over_seeds(values)
    cell |= {
        "n_invalid": values["n_invalid"].fillna(0).max(),
        "task": cell["benchmark"],
        "status": "measured",
    }
    cell["sampling"] = " and ".join(values["sampling"].unique())
    words = filter(None, map(wording_of, values["folder"]))
    cell["wording"] = " and ".join(dict.fromkeys(words)) or None
    cell["judge"] = " and ".join(values["judge"].dropna().unique()) or None
    return cell


def read_task_means(values: pd.DataFrame) -> list[pd.Series]:
    """Reads the value of each task, one Series a seed; [] if a seed has no task_means.csv with the metric."""
    seeds = []
    for folder, line in values.groupby("folder", sort=False):
        path = folder / "task_means.csv"
        means = pd.DataFrame(columns=[*MEASURE, "task", "mean"])
        if path.exists():
            means = pd.read_csv(path, converters=AS_TEXT).merge(line[MEASURE])
        if means.empty:
            return []
        seeds.append(means.set_index("task")["mean"])
    return seeds


def mean_over_seeds(values: pd.DataFrame) -> dict:
    """Computes the mean of the lines of one measure, one a seed, and its 95 % interval, see `VARIANCE`."""
    low, high = values[["low", "high"]].iloc[0]  # as the evaluation computed them
    tasks = read_task_means(values)
    if tasks and is_share(values, tasks):
        low, high = mean_interval(of_tasks(tasks), is_share=True)
    elif len(values) > 1:
        low, high = interval_over_seeds(values["value"])
    elif tasks and pd.isna(low):
        low, high = mean_interval(tasks[0], is_share=False)
    return {"ours": values["value"].mean(), "seeds": len(values), "low": low, "high": high}


def is_share(values: pd.DataFrame, tasks: list[pd.Series]) -> bool:
    """Returns whether each answer counts as 0 or 1 in the metric of these lines."""
    [metric] = values["metric"].unique()
    if metric.endswith("tokens"):  # without thinking all of them have 0
        return False
    return metric.startswith(SHARES) or set(pd.concat(tasks).unique()) <= {0.0, 1.0}


def of_tasks(seeds: list[pd.Series]) -> pd.Series:
    """Averages each task over the seeds: a task that is hard for one is hard for the others."""
    return pd.concat(seeds).groupby(level=0, sort=False).mean()


def difference(first: pd.DataFrame, second: pd.DataFrame) -> dict:
    """Computes the mean difference of two rows in one column, and its interval, from their lines of the index.

    Seeds are paired by number. If only one row has several seeds, the interval is over tasks: seeds
    would not cover how the other row varies.
    """
    for lines in (first, second):
        summarize_seeds(lines)  # exits with 2 if these are no seeds of one measurement
    is_paired = len(first) > 1 and len(second) > 1
    first, second = (lines.dropna(subset="value") for lines in (first, second))
    if set(first["fingerprint"]) != set(second["fingerprint"]):
        names = " and ".join([first["run"].iloc[0], second["run"].iloc[0]])
        fail(f"{names} were not judged alike (fingerprint in runs.csv), so they have no difference")
    if is_paired:
        first = first[first["seed"].isin(second["seed"])].sort_values("seed")
        second = second[second["seed"].isin(first["seed"])].sort_values("seed")
    ones = read_task_means(first)
    others = read_task_means(second)
    tasks = pd.Series(dtype=float)
    if ones and others:
        if not is_paired:  # each row's mean over its seeds
            ones, others = [of_tasks(ones)], [of_tasks(others)]
        seeds = [(one - other).dropna() for one, other in zip(ones, others, strict=True)]
        values = pd.Series([of_seed.mean() for of_seed in seeds])
        tasks = of_tasks(seeds)
    elif is_paired:
        values = pd.Series(first["value"].to_numpy() - second["value"].to_numpy())
    else:
        values = pd.Series(first["value"].mean() - second["value"].mean())

    low, high = interval_over_seeds(values)
    if len(tasks) and is_share(first, ones):
        low, high = interval_of_shares(of_tasks(ones), of_tasks(others))
    elif len(tasks) and len(values) == 1:
        low, high = mean_interval(tasks, is_share=False)
    return {"ours": values.mean(), "seeds": len(values), "n": len(tasks) or None, "low": low, "high": high}


def interval_over_seeds(values: pd.Series) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of the seeds' values by Student's t; NaN for one seed."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return values.mean() - half, values.mean() + half


def interval_of_shares(one: pd.Series, other: pd.Series) -> tuple[float, float]:
    """Returns Newcombe's 95 % interval of a difference of two shares, from the Wilson interval of each."""
    (low_1, high_1), (low_2, high_2) = (wilson(share.mean(), len(share)) for share in (one, other))
    mean_1, mean_2 = one.mean(), other.mean()
    low = mean_1 - mean_2 - math.hypot(mean_1 - low_1, high_2 - mean_2)
    high = mean_1 - mean_2 + math.hypot(high_1 - mean_1, mean_2 - low_2)
    return low, high


# --- 2. tables


def printed_numbers() -> pd.DataFrame:
    """Reads every number that the paper prints.

    `row` is the row's name in experiments/table*.sh, "" for models of others that cannot be had.
    """
    numbers = pd.read_csv(PAPER, dtype={"table": str}, keep_default_na=False)
    return numbers.rename(columns={"value": "paper"})


def list_cells(table: str, rows: list[str]) -> list[dict]:
    """Lists the cells of a table: rows as released, what the paper prints, rows of the user's own.

    A row as released has the paper's numbers of the row that it repeats; the user's own have the columns that
    the paper prints in this table.
    """
    printed = printed_numbers()
    printed = printed[printed["table"] == table]
    columns = printed["benchmark"].unique()
    as_released = []
    own = []
    for row in rows:
        cells = printed[printed["row"] == row.removesuffix(AS_RELEASED)]
        if cells.empty:
            own.append(pd.DataFrame({"row": row, "section": "own", "benchmark": columns}))
        elif row.endswith(AS_RELEASED):
            as_released.append(cells.assign(row=row, section="as released"))
    return pd.concat([*as_released, printed, *own]).to_dict("records")


def build_table(table: str, rows: list[str], index: pd.DataFrame) -> pd.DataFrame:
    """Builds a table of the paper with our number, its intervals and the printed one: one line per row and
    column."""
    lines = []
    measured = dict(iter(index.groupby(["row", "evaluation", "metric"])))
    for cell in list_cells(table, rows):
        key = (cell["row"], *BENCHMARKS.get(cell["benchmark"], ("", "")))  # an average is computed below
        line = summarize_seeds(measured.get(key, index[:0])) | cell | {"table": table}
        if not cell["row"]:
            line["row"] = f"{cell['model_name'] or cell['backbone']} ({cell['training']})"
            line["status"] = "model of others"
        lines.append(line)
    numbers = pd.DataFrame(lines, columns=CELL)
    numbers.loc[numbers["benchmark"].isin(PERCENT), SCALED] *= 100

    for cell in numbers[numbers["benchmark"].isin(AVERAGES)].itertuples():
        of_row = numbers[numbers["row"] == cell.row]
        parts = of_row[of_row["benchmark"].isin(AVERAGES[cell.benchmark])]
        seeds = parts["seeds"].min()
        if seeds and seeds == parts["seeds"].max():
            average = [parts["ours"].mean(), seeds, "measured"]
            numbers.loc[cell.Index, ["ours", "seeds", "status"]] = average
    numbers["difference"] = numbers["ours"] - numbers["paper"]
    return numbers


def wording_of(run: Path) -> str | None:
    """Returns whose words the judge or the model of a run read, as its summary says; None if the data have all
    of them."""
    path = run / "summary.json"
    if not path.exists():
        return "unknown"
    return json.loads(path.read_text()).get("wording")


# --- 3. tables for people


def markdown_table(table: pd.DataFrame) -> str:
    """Lays out a table of texts, without its index."""
    head, *body = ["| " + " | ".join(cells) + " |" for cells in [table.columns, *table.values]]
    return "\n".join([head, "|" + "---|" * len(table.columns), *body])


def write_cell(cell) -> str:
    """Writes `ours ± half the interval (the paper's)`, each where there is one, with `cell.digits`.

    An interval that is not even, like a share's, is written as its two ends.
    """
    text = ""
    digits = cell.digits
    middle = (cell.low + cell.high) / 2
    if not pd.isna(cell.low) and abs(middle - cell.ours) > 0.1 * (cell.high - cell.low):
        text = f"{cell.ours:.{digits}f} [{cell.low:.{digits}f}, {cell.high:.{digits}f}]"
    elif not pd.isna(cell.low):
        text = f"{cell.ours:.{digits}f} ± {(cell.high - cell.low) / 2:.{digits}f}"
    elif not pd.isna(cell.ours):
        text = f"{cell.ours:.{digits}f}"
    if not pd.isna(cell.paper):
        text += f" ({cell.paper:g})"
    return text.strip()


def write_cells(numbers: pd.DataFrame, digits: int | pd.Series) -> pd.DataFrame:
    """Writes the cells of a table, by row and column; `digits` after the point, of all or of each cell."""
    texts = [write_cell(cell) for cell in numbers.assign(digits=digits).itertuples()]
    cells = pd.Series(texts, [numbers["row"], numbers["benchmark"]]).unstack(fill_value="")
    return cells.loc[numbers["row"].unique(), numbers["benchmark"].unique()]


def paper_markdown(numbers: pd.DataFrame) -> str:
    """Writes a table of the paper as Markdown, with what is measured of each row."""
    texts = write_cells(numbers, digits=1)
    states = numbers.groupby("row")["status"].agg(["first", "nunique"])
    texts["status"] = states["first"].where(states["nunique"] == 1, "partly measured")
    return markdown_table(texts.reset_index())


def describe(numbers: pd.DataFrame, key: str, title: str) -> list[str]:
    """Writes each value of `key` with its columns, and with its rows where those of a column differ."""
    columns_of = {}
    for column, rows in rows_by(numbers, key):
        value = rows.index[0]
        if len(rows) > 1:
            value = "; ".join(rows.index + " (" + rows + ")")
        columns_of.setdefault(value, {})[column] = None
    return [f"{title} of {'; '.join(columns)}: {value}." for value, columns in columns_of.items()]


def rows_by(table: pd.DataFrame, key: str) -> Iterator[tuple[str, pd.Series]]:
    """Yields each column, and the names of its rows, as one text, with each value of `key`."""
    for (column, _), cells in table.dropna(subset=key).groupby(["benchmark", "task"], sort=False):
        yield column, cells.groupby(key, sort=False)["row"].unique().map(", ".join)


def notes_of(numbers: pd.DataFrame) -> list[str]:
    """Writes what is said below a table; warns of columns whose rows were not judged alike."""
    notes = [VARIANCE]
    if numbers["paper"].notna().any():
        notes.insert(0, PRINTED)
    if numbers["benchmark"].isin(AVERAGES).any():
        notes.append(AVERAGED)
    notes += describe(numbers, "sampling", "Sampling")
    notes += describe(numbers, "judge", "Judge or simulated user")
    notes += describe(numbers, "wording", "Words (of the judge, else of the prompt)")
    columns_of = {}
    for column, rows in rows_by(numbers, "fingerprint"):
        if len(rows) > 1:
            columns_of.setdefault(" against ".join(rows), []).append(column)
    for sides, columns in columns_of.items():
        names = "; ".join(columns)
        note = f"{names}: not to be compared, as judge, instructions or tasks differ: {sides}"
        print(f"WARNING: {note}", file=sys.stderr)
        notes.append(note)
    return notes


def write_page(path: Path, *parts: str) -> str:
    """Writes a table and what is said below it as Markdown; returns the text."""
    text = "\n\n".join(parts)
    path.write_text(text + "\n")
    return text
