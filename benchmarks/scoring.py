"""Reads the tasks of a benchmark, matches stored rows to them, and averages what the rows earned.

A *task* is one item of a benchmark's data. A *row* is one stored or generated answer (or verdict). A *result*
is what a row earned: `task` (the position of its task in the data, from 0), `key` (the task's value of the
first key, else that position), `line` (of the row's file), and the fields that the benchmark's check adds.
"""

import fcntl
import gzip
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from rlmt.data import read_rows, read_source
from utils import fail

NAMES = {  # of the fields of stored rows, verdicts and dialogues, by their type
    str | None: "response completion output_2 judge_text title model_is reference primary_tag ended",
    str: "role content model_output",
    str | int: "id session_id",
    int: "iteration h1 h2 h3 h4 h5 h6 ordered unordered ** __",
    int | float: "emotion-point emo_point token_len",
    int | float | None: "preference reward output_len reference_len",
    dict: "header_count list_count bold_count",
    dict | None: "model_metadata",
    list: "games history",
    list | None: "secondary_tags",
}
ROW_TYPES = {name: kind for kind, names in NAMES.items() for name in names.split()}
SEPARATORS = {"csv": ",", "tsv": "\t"}
CUT_MARK = "... (truncated)"  # ends a text that `shorten` has cut
POSITION_KEYS = ("id", "index")  # where tasks lack them, these are their positions in the data, from 0


# --- 1. files


def load(data: Path, pattern: str, *fields: str) -> list:
    """Loads a benchmark's tasks (the lines of a .txt file), and checks that each has `fields`.

    `data` is a file, a folder in which one file matches `pattern`, or else `owner/name[:configuration]` on
    the hub. Exits with 2 if no file matches, if several do, or if a field is missing.
    """
    if data.exists():
        data = find_file(data, pattern)
        tasks = read_file(data)
    else:
        tasks = [task for _, task in read_source(str(data), "--data", split="")]

    for number, task in enumerate(tasks, 1):
        for name in fields:
            get_field(task, f"{data}, row {number}", name)
    return tasks


def load_sibling(data: Path, pattern: str, *fields: str) -> list:
    """Loads one of a benchmark's files from the folder `data`, or from the folder of the file `data`."""
    folder = data if data.is_dir() else data.parent
    return load(folder, pattern, *fields)


def find_file(data: Path, pattern: str) -> Path:
    """Returns the file `data`, or the only match in the folder `data`; exits with 2 if there is not one."""
    if data.is_file():
        return data
    files = sorted(data.glob(pattern))
    if len(files) != 1:
        names = ", ".join(file.name for file in files)
        fail(
            f"{data}: {len(files)} files match {pattern} ({names}); exactly one is needed, see data/README.md"
        )
    return files[0]


def read_file(path: Path) -> list:
    """Reads .csv, .tsv, .json (each also .gz), .txt, .jsonl or .parquet. A JSON object's values are rows."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind not in ("txt", "json", *SEPARATORS):
        return read_rows(path, make_ids=False)

    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        if kind in SEPARATORS:
            return pd.read_csv(path, sep=SEPARATORS[kind]).to_dict("records")
        if kind == "txt":
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            return [line.strip() for line in lines if line.strip()]
        with open_file(path, "rb") as file:  # bytes, as json finds out how they are encoded
            content = json.load(file)
    except (ValueError, EOFError) as error:
        fail(f"{path}: not {kind} in UTF-8, or not all of it ({error})")
    if isinstance(content, dict):
        content = list(content.values())
    return content


# --- 2. rows and their tasks


def get_field(row: dict, where: str, *names: str):
    """Returns the first of `names` that a row has, which may be null; exits with 2 if it has none of them."""
    for name in names:
        if name in row:
            return row[name]
    fail(
        f"{where}: no field {' or '.join(names)} (found {', '.join(row)}); "
        "benchmarks/table.py lists the fields of each benchmark"
    )


def check_types(row: dict, where: str, *needed: str) -> None:
    """Exits with 2 if a stored row is not an object, lacks a needed field, or has one of another type than
    ROW_TYPES says."""
    if not isinstance(row, dict):
        fail(f"{where}: {str(row)[:60]!r} is not an object")
    for name in needed:
        get_field(row, where, name)
    for name in row.keys() & ROW_TYPES.keys():
        value = row[name]
        kind = ROW_TYPES[name]
        if not isinstance(value, kind) or isinstance(value, bool) or value != value:
            fail(f"{where}: field {name} is {str(value)[:60]!r}, not {getattr(kind, '__name__', kind)}")


def match_rows(
    rows: list[dict], tasks: list[dict], keys: tuple[str, ...], source: str, several_samples: bool = False
) -> list[dict]:
    """Returns a result {task, key, line} for every row, found by all of its keys that some task has.

    Exits with 2 if they fit no task or several, for a second row of a task unless `several_samples`, and for
    a field that is not of its type.
    """
    positions = index_tasks(tasks, keys)
    results = []
    seen = set()
    for line, row in enumerate(rows, 1):
        check_types(row, f"{source}:{line}")
        given = [(key, str(row[key])) for key in keys if key in row]
        fitting = [set(positions[pair]) for pair in given if pair in positions]
        found = set.intersection(*fitting) if fitting else set()
        if len(found) != 1:
            fail(
                f"{source}:{line}: fits {len(found)} tasks of the data, not one; "
                f"a task is found by its {' or '.join(keys)}, and those that a row has must not differ"
            )
        [position] = found
        if position in seen and not several_samples:
            fail(f"{source}:{line}: a second row of the same task; keep one of them")
        seen.add(position)
        result = {"task": position, "key": tasks[position].get(keys[0], position), "line": line}
        error = row.get("error") or row.get("judge_error")
        if error:
            result["invalid"] = error
        results.append(result)
    return results


def index_tasks(tasks: list[dict], keys: tuple[str, ...]) -> dict[tuple[str, str], list[int]]:
    """Maps each key and value, as text, to the positions of the tasks that have it."""
    positions = defaultdict(list)
    for position, task in enumerate(tasks):
        for key in keys:
            if key in task or key in POSITION_KEYS:
                positions[key, str(task.get(key, position))].append(position)
    return positions


def row_key(task: dict, position: int, keys: tuple[str, ...]) -> dict:
    """Returns the field by which `match_rows` finds this task, at this position of the data."""
    key = next(key for key in keys if key in task or key in POSITION_KEYS)
    return {key: task.get(key, position)}


def check_rows(
    rows: list[dict],
    tasks: list[dict],
    keys: tuple[str, ...],
    source: str,
    check_answer: Callable[[dict, str], dict],
    several_samples: bool = True,
    apply: Callable = map,
) -> list[dict]:
    """Returns the rows' results, with what `check_answer(task, text)` says of each.

    A row without text is `invalid`; a row whose task does not count is `excluded`. A row's `reward` is kept.
    `apply` is map, or a pool's map.
    """
    results = match_rows(rows, tasks, keys, source, several_samples)
    answered = []
    texts = []
    for row, result in zip(rows, results):
        task = tasks[result["task"]]
        text = get_field(row, f"{source}:{result['line']}", "response", "completion")
        if row.get("reward") is not None:
            result["reward"] = row["reward"]
        if "excluded" in task:
            result["excluded"] = task["excluded"]
        elif text is None or "invalid" in result:
            result.setdefault("invalid", "no response")
        else:
            answered.append(result)
            texts.append(text)

    answered_tasks = [tasks[result["task"]] for result in answered]
    for result, verdict in zip(answered, apply(check_answer, answered_tasks, texts)):
        result |= verdict
    return results


def count_rows(results: list[dict], tasks: list[dict]) -> dict:
    """Returns the counts that every benchmark reports, and the results under `rows`.

    n: rows of tasks that count, invalid ones included; n_invalid: those without a score, so a mean's
    denominator is n - n_invalid; n_unparsed: those without a readable answer, which are wrong. n_missing:
    tasks that count and have no row; n_excluded: rows of tasks that do not count.
    """
    counted = [result for result in results if "excluded" not in result]
    answered = {result["task"] for result in results}
    n_missing = 0
    for position, task in enumerate(tasks):
        n_missing += "excluded" not in task and position not in answered
    return {
        "n": len(counted),
        "n_invalid": sum("invalid" in result for result in counted),
        "n_missing": n_missing,
        "n_excluded": len(results) - len(counted),
        "n_unparsed": sum(result.get("answer", "") is None for result in counted),
        "rows": results,
    }


def mean(values: Iterable) -> float | None:
    """Returns the mean, or None if there are no values."""
    values = list(values)
    if not values:
        return None
    return float(np.mean(values))


def shorten(text: str, words: int) -> str:
    """Returns the first `words` space-separated words (0: all), and marks where something was cut."""
    parts = text.split(" ")
    if words == 0 or len(parts) <= words:
        return text
    return " ".join(parts[:words]) + CUT_MARK


def task_means(values: Iterable[float], tasks: Iterable) -> dict:
    """Averages the values of each task: its samples, orders or iterations.

    A benchmark's numbers hold them by metric, under `task_means`. Tables average them over training seeds
    before they compute an interval over tasks.
    """
    values_of_task = defaultdict(list)
    for value, task in zip(values, tasks, strict=True):
        values_of_task[task].append(value)
    return {task: mean(values) for task, values in values_of_task.items()}


def for_summary(numbers: dict) -> dict:
    """Returns the numbers without the results of rows and the means of tasks, which have files of their
    own."""
    return {name: value for name, value in numbers.items() if name not in ("rows", "task_means")}


def hard_labels(x: np.ndarray, y: np.ndarray, weights: float | np.ndarray = 1) -> tuple:
    """Returns features, labels and weights for `fit` of scikit-learn, which takes hard labels only.

    A soft label y (N,) from 0 to 1 becomes a 1 with weight y and a 0 with weight 1 - y.
    """
    labels = np.repeat([1, 0], len(y))
    return np.vstack([x, x]), labels, np.r_[weights * y, weights * (1 - y)]


def mean_interval(
    values, seed: int = 0, tasks: Iterable | None = None, is_share: bool | None = None
) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of `values`: Wilson's of a share, else by resampling tasks.

    It covers which tasks there are, and how answers and verdicts are sampled; not another training run.
    Resampling would give a share of 0 or 1 an interval of width 0.

    Args:
        tasks: the task of each value. The values of a task are drawn together, since they are not
            independent: a hard task is hard for every sample, order or iteration. None: each value has a task
            of its own.
        is_share: whether the values are means of zeros and ones. None: they are if all of them are 0 or 1.
    """
    values = np.asarray(values, dtype=float)
    if tasks is None:
        tasks = range(len(values))
    task_of_value, names = pd.factorize(pd.Series(tasks))
    if is_share is None:
        is_share = set(values) <= {0.0, 1.0}
    if is_share:
        return wilson(values.mean(), len(names))
    sums = np.bincount(task_of_value, weights=values)
    counts = np.bincount(task_of_value)

    n_draws = 2000
    picks = np.random.default_rng(seed).integers(0, len(names), (n_draws, len(names)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share of n tasks.

    With several answers per task it is too wide rather than too narrow, because n counts tasks.
    """
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


# --- 3. runs.csv, from which tables are made

INDEX_COLUMNS = (
    "run",
    "time",
    "model",
    "benchmark",
    "metric",
    "value",
    "low",
    "high",
    "n",
    "n_invalid",
    "temperature",
    "judge",
    "fingerprint",
)
TASK_COLUMNS = ("benchmark", "metric", "temperature", "task", "mean")


def index_row(benchmark: str, numbers: dict, metric: str, fingerprint: str, interval: str = "") -> dict:
    """Returns the line of runs.csv for one metric of `numbers`, without model, temperature and judge.

    `interval` is the key of its interval, METRIC_interval if it is empty.
    """
    low, high = numbers.get(interval or f"{metric}_interval") or (None, None)
    return {
        "benchmark": benchmark,
        "metric": metric,
        "value": numbers.get(metric),
        "low": low,
        "high": high,
        "task_means": numbers.get("task_means", {}).get(metric),
        "n": numbers["n"],
        "n_invalid": numbers["n_invalid"],
        "fingerprint": fingerprint,
    }


def withhold(numbers: dict, metrics: list[str], max_invalid: float) -> None:
    """Moves the metrics to `withheld` if a larger share of the rows than --max-invalid is invalid.

    Those of the paper's rule too: they have a value for an invalid row, which is not the judge's verdict.
    """
    if numbers["n_invalid"] > max_invalid * numbers["n"]:
        print(
            f"WARNING: {numbers['n_invalid']} of {numbers['n']} rows are invalid, so {', '.join(metrics)} are withheld; "
            "a larger --max-invalid, for a run with --resume, shows them",
            file=sys.stderr,
        )
        intervals = [name for name in numbers if "interval" in name and numbers[name]]
        numbers["withheld"] = {name: numbers.get(name) for name in [*metrics, *intervals]}
        numbers |= dict.fromkeys([*metrics, *intervals])
        of_tasks = numbers.get("task_means", {})
        numbers["task_means"] = {metric: means for metric, means in of_tasks.items() if metric not in metrics}


def add_to_index(run: Path, rows: list[dict]) -> None:
    """Prints an evaluation's values, one a row, and appends them to runs.csv in the folder that holds the
    run; tables read it.

    Call it before summary.json, which marks the end, is written. Of a run that was evaluated again the later
    lines count. A value that is withheld (None) has no interval either.
    The values of a row's tasks ({task: mean} under `task_means`) go to task_means.csv in the run.
    """
    if not rows:  # as of traits, which are no columns of a table
        return
    path = run.parent / "runs.csv"
    shared = {"run": run.name, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    lines = pd.DataFrame([shared | row for row in rows], columns=INDEX_COLUMNS)
    lines[["low", "high"]] = lines[["low", "high"]].where(lines["value"].notna(), axis=0)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two evaluations may end at once, and one of them writes the header
        lines.to_csv(file, header=file.seek(0, 2) == 0, index=False)
    print(lines.loc[:, "metric":"temperature"].to_string(index=False, na_rep="-", float_format="%.4g"))

    of_tasks = []
    for row in rows:
        for task, value in (row.get("task_means") or {}).items():
            of_tasks.append(row | {"task": task, "mean": value})
    pd.DataFrame(of_tasks, columns=TASK_COLUMNS).to_csv(run / "task_means.csv", index=False)
