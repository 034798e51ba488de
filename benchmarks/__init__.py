"""The rules of the paper's suite, benchmark by benchmark: tasks, what model and judge are asked, the scores.

Each benchmark NAME has tasks_NAME(data) and score_NAME(rows, data, source); the scored rows, as stored or generated:

    alpacaeval2       index or instruction; preference (1 baseline, 2 model), or judge_text and model_is (A, B); output_2
    arenahard2        uid; verdict_game1_A_is_baseline, verdict_game2_A_is_model (label or judge text); model_metadata
    creativewriting3  title, iteration (1 to 3), judge_text
    ifeval, ifbench   key, response
    popqa, zebralogic id (popqa: or question), response
    mmlu_redux        id (position in the data, from 0) or question, response
    math500           unique_id or problem, response
    gsm8k             question, response (or `model: {solution}`, one or several)
    humaneval         task_id, completion (or response: prose with a code block)

All below ifbench take several rows a task: `accuracy` is the mean over tasks of the mean over samples, with pass@k beside it.
Judged benchmarks are in percent, the others fractions. Where paper and official tool differ, the official value has the plain
key and the paper's is `..._paper`:

1. alpacaeval2 (paper): binary preferences, length in words, neither instruction difficulty nor gamed baselines.
2. arenahard2: scores are exact; the official tool prints mean or median of 100 unseeded bootstrap fits, here `..._bootstrap`
   with a seed. Paper: strength and style ignored, a missing verdict is a tie.
3. creativewriting3: the official tool leaves an item without marks out, in the paper it counts 0. It asks again for
   answers under 500 characters and then leaves them out; here they are judged.
4. popqa: the paper also accepts a name in capitals.
5. mmlu_redux, math500 have no official tool: the rules of the paper's code (5376 of the 5700 items of MMLU-Redux; equality of
   normalised strings, symbolic equality beside it as `accuracy_math_verify`).
6. ifeval: for two prompts the official code counts a random letter instead of `#` and `!`; here it is the character asked for.
7. humaneval: 10 s a program with its start, the official tool 3 s without.

An answer without a readable result is wrong and counted (`n_unparsed`). What cannot be scored at all (no response, no verdict)
is `invalid`: counted, listed under `rows`, in no score.
"""

import functools
import gzip
import hashlib
import json
import logging
import math
import os
import re
import signal
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold

import runs
from benchmarks.shared import bootstrap, shorten
from rows import read_rows


KEYS = {  # what tells a task, in stored rows too; the first of them that a row has
    "alpacaeval2": ("index", "instruction"),
    "arenahard2": ("uid",),
    "creativewriting3": ("id",),
    "ifbench": ("key",),
    "ifeval": ("key",),
    "popqa": ("id", "question"),
    "mmlu_redux": ("id", "index", "question"),
    "math500": ("unique_id", "problem", "id"),
    "zebralogic": ("id",),
    "gsm8k": ("question", "id"),
    "humaneval": ("task_id",),
}
PROMPTS = {  # fields of the task; zebralogic also `template`, creativewriting3 is one task an iteration
    "alpacaeval2": "{instruction}",
    "arenahard2": "{prompt}",
    "creativewriting3": "{prompt}",
    "ifbench": "{prompt}",
    "ifeval": "{prompt}",
    "popqa": "Answer in a short text of a few sentences, 100 words at most.\n\n{question}",
    "mmlu_redux": "Choose the right option.\n\n{question}\n\nA. {choices[0]}\nB. {choices[1]}\nC. {choices[2]}\n"
    "D. {choices[3]}\n\nReason as long as you need. Then write `Answer:` and, in upper case, only the right option's letter.",
    "math500": "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}.",
    "zebralogic": """Solve a logic puzzle, as in this example.

There are 2 houses, numbered 1 to 2 from left to right. In each lives another person, with another name (Arnold, Eric) and \
another pet (cat, dog).
1. Eric lives somewhere left of the cat's owner.

{{"reasoning": "Somebody lives left of the cat, so it is in house 2, and Eric in house 1.", "solution": \
{{"House 1": {{"Name": "Eric", "Pet": "dog"}}, "House 2": {{"Name": "Arnold", "Pet": "cat"}}}}}}

{puzzle}

Answer with this JSON, every ___ filled in, and nothing after it:
{template}""",
    "gsm8k": "{question}\n\nReason step by step. End with a line that holds only #### and the final number.",
    "humaneval": "Complete this Python function. Answer with the whole of it in one code block.\n\n```python\n{prompt}```",
}


def prompt(name: str, task: dict) -> str:
    """What a model is asked; in our words where the benchmark's data do not have it."""
    if name == "zebralogic":
        houses = {
            f"House {i}": dict.fromkeys(task["solution"]["header"][1:], "___")
            for i in range(1, len(task["solution"]["rows"]) + 1)
        }
        task = task | {"template": json.dumps({"reasoning": "___", "solution": houses})}
    return PROMPTS[name].format(**task)


def load_tasks(name: str, data: Path) -> list[dict]:
    """The benchmark's tasks in the order of its data; `excluded` says why one does not count."""
    return globals()[f"tasks_{name}"](data)


def score(name: str, rows: list[dict], data: Path, source: str) -> dict:
    """The benchmark's numbers and, under `rows`, the result of every row. `source` stands before errors about a row."""
    return globals()[f"score_{name}"](rows, data, source)


def identity(name: str, task: dict, position: int) -> dict:
    """The fields by which a row tells that it belongs to this task, at this position of the data."""
    if name == "creativewriting3":
        return {key: task[key] for key in ("title", "iteration")}
    key = next(key for key in KEYS[name] if key in task or key in ("id", "index"))
    return {key: task.get(key, position)}


# --- 1. files and rows


def read(path: Path) -> list[dict]:
    """Rows as read_rows has them, without the ids that it makes up."""
    rows = read_rows(path)
    for number, row in enumerate(rows):
        if row["id"] == f"{path.stem}-{number}":
            del row["id"]
    return rows


def load(data: Path, pattern: str, *fields: str) -> list:
    """Rows (or lines, of .txt) of `data`, or of the one file in the folder `data` whose name matches; each with `fields`.

    Where there is no such path, `data` is a hub dataset, `owner/name` or `owner/name:configuration`, read from its split
    test, else its first.
    Exits with 2 if no file or several match, or a field is missing.
    """
    if not data.exists():
        return load_hub(str(data), *fields)
    files = [data] if data.is_file() else sorted(data.glob(pattern))
    if len(files) != 1:
        runs.fail(
            f"{data}: {len(files)} files match {pattern} ({', '.join(f.name for f in files)}); one is needed, see "
            "data/README.md"
        )
    path, kind = files[0], files[0].name.removesuffix(".gz").rpartition(".")[2]
    if kind in ("csv", "tsv"):
        rows = pd.read_csv(path, sep="," if kind == "csv" else "\t").to_dict("records")
    elif kind in ("json", "txt"):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as f:
            text = f.read()
        try:
            rows = (
                json.loads(text)
                if kind == "json"
                else [line.strip() for line in text.split("\n") if line.strip()]
            )
        except ValueError as e:
            runs.fail(f"{path}: not JSON ({e})")
        rows = list(rows.values()) if isinstance(rows, dict) else rows
    else:
        rows = read(path)
    for number, row in enumerate(rows, 1):
        for name in fields:
            field(row, f"{path}, row {number}", name, kind=object)
    return rows


def load_hub(name: str, *fields: str) -> list:
    import datasets

    path, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(path, *([configuration] if configuration else []))
        rows = splits["test" if "test" in splits else next(iter(splits))].to_list()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as e:
        runs.fail(
            f"--data {name}: no such file or folder, and no hub dataset that can be read ({str(e).splitlines()[0]})"
        )
    for number, row in enumerate(rows, 1):
        for field_name in fields:
            field(row, f"{name}, row {number}", field_name, kind=object)
    return rows


def beside(data: Path, pattern: str, *fields: str) -> list:
    """A file of a benchmark that consists of several."""
    return load(data if data.is_dir() else data.parent, pattern, *fields)


def field(row: dict, where: str, *names: str, kind: type | tuple = str):
    """The first of `names` that a row has, None if that is null; exits with 2 if it has none, or one of the wrong type."""
    name = next((n for n in names if n in row), None)
    if name is None:
        runs.fail(
            f"{where}: no field {' or '.join(names)} (found {', '.join(row)}); see the head of benchmarks.py"
        )
    if row[name] is not None and not isinstance(row[name], kind):
        runs.fail(f"{where}: field {name} has the wrong type: {json.dumps(row[name])[:50]}")
    return row[name]


def match(
    rows: list[dict], tasks: list[dict], keys: tuple[str, ...], source: str, samples: bool = False
) -> list[dict]:
    """A result {task, key, line} for every row: its task's position, found by the first of `keys` whose value is some task's.

    `id` and `index` are positions where tasks have none. Exits with 2 for a row that fits no task or several, and, without
    `samples`, for a second row of a task.
    """
    positions = {key: defaultdict(list) for key in keys}
    for i, task in enumerate(tasks):
        for key in keys:
            positions[key][str(task.get(key, i if key in ("id", "index") else None))].append(i)
    results, lines = [], {}
    for line, row in enumerate(rows, 1):
        line = row.get("_line", line)
        fits = next((positions[k][str(row[k])] for k in keys if k in row and str(row[k]) in positions[k]), [])
        if len(fits) > 1:  # by whatever else the row repeats of its task
            fits = [
                i for i in fits if all(row[k] == tasks[i][k] for k in row.keys() & tasks[i].keys() - {"id"})
            ]
        if len(fits) != 1:
            given = ", ".join(f"{k} {str(row[k])[:40]!r}" for k in keys if k in row)
            runs.fail(
                f"{source}:{line}: {given or 'the row'} fits {'several tasks' if fits else 'no task'} of the data; "
                f"a task is told by its {' or '.join(keys)}"
            )
        if lines.setdefault(fits[0], line) != line and not samples:
            runs.fail(f"{source}:{line}: the task of line {lines[fits[0]]} again; keep one of them")
        results.append({"task": fits[0], "key": tasks[fits[0]].get(keys[0], fits[0]), "line": line})
    return results


def count(results: list[dict], tasks: list[dict]) -> dict:
    """n rows of tasks that count, n_invalid of them without a score, n_missing tasks without a row; and the rows."""
    kept = [r for r in results if "excluded" not in r]
    missing = {i for i, task in enumerate(tasks) if "excluded" not in task} - {r["task"] for r in results}
    return {
        "n": len(kept),
        "n_invalid": sum("invalid" in r for r in kept),
        "n_missing": len(missing),
        "n_excluded": len(results) - len(kept),
        "n_unparsed": sum("answer" in r and r["answer"] is None for r in kept),
        "rows": results,
    }


def check_rows(
    rows: list[dict],
    tasks: list[dict],
    keys: tuple[str, ...],
    source: str,
    check: Callable[[dict, str], dict],
    samples: bool = True,
    text: tuple[str, ...] = ("response",),
    apply: Callable = map,
) -> list[dict]:
    """Results with what `check(task, text)` says, mapped by `apply`. A row without text is invalid, that of a task that does
    not count is `excluded`."""
    results, scored = match(rows, tasks, keys, source, samples), []
    for row, result in zip(rows, results):
        task, answer = tasks[result["task"]], field(row, f"{source}:{result['line']}", *text)
        if "excluded" in task:
            result["excluded"] = task["excluded"]
        elif answer is None:
            result["invalid"] = "no response"
        else:
            scored.append((result, task, answer))
    for (result, _, _), verdict in zip(scored, apply(check, [s[1] for s in scored], [s[2] for s in scored])):
        result |= verdict
    return results


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def accuracy(results: list[dict], tasks: list[dict]) -> dict:
    """Mean over tasks of the share of right samples, for `correct` and its variants; pass@k; by `group` of the rows."""
    by_task, by_group = defaultdict(list), defaultdict(list)
    for r in (r for r in results if "correct" in r):
        by_task[r["task"]].append(r)
        by_group[r.get("group")].append(r["correct"])
    variants = sorted({key for r in results for key in r if key.startswith("correct")}) or ["correct"]
    fewest = min(map(len, by_task.values()), default=0)
    numbers = {}
    for key in variants:
        means = [mean(r[key] for r in rs) for rs in by_task.values()]
        numbers[key.replace("correct", "accuracy")] = mean(means)
        if key == "correct" and means:
            numbers["interval"] = bootstrap(means)
    for k in sorted({k for k in (10, 100, fewest) if 1 < k <= fewest}):
        numbers[f"pass@{k}"] = mean(
            pass_at_k(len(rs), sum(r["correct"] for r in rs), k) for rs in by_task.values()
        )
    groups = {group: mean(right) for group, right in by_group.items() if group}
    return numbers | ({"by_group": groups} if groups else {}) | count(results, tasks)


def mean(values) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None


# --- 2. benchmarks with a rule: a check (task, response) -> verdict, and a score (rows, data, source) -> numbers


def popqa_check(task: dict, response: str) -> dict:
    """An accepted name occurs in the response, as it is written, in lower case or capitalised (the paper: or in capitals)."""
    names = task.get("answers") or task["possible_answers"]
    names = [n for n in (json.loads(names) if isinstance(names, str) else names) if n.strip()]
    said = any(form in response for n in names for form in (n, n.lower(), n.capitalize()))
    return {"correct": said, "correct_paper": said or any(n.upper() in response for n in names)}


def tasks_popqa(data: Path) -> list[dict]:
    return load(data, "*.*", "question")


def score_popqa(rows: list[dict], data: Path, source: str) -> dict:
    tasks = tasks_popqa(data)
    return accuracy(check_rows(rows, tasks, KEYS["popqa"], source, popqa_check), tasks)


def mmlu_redux_check(task: dict, response: str) -> dict:
    """The first upper-case letter between the first `Answer:` (else `answer:`) and the next one is the right option's."""
    parts = response.split("Answer:" if "Answer:" in response else "answer:")
    letter = re.sub("[^A-Z]", "", parts[1])[:1] if len(parts) > 1 else ""
    return {
        "correct": letter == "ABCD"[task["truth"]],
        "answer": letter if letter and letter in "ABCD" else None,
    }


def tasks_mmlu_redux(data: Path) -> list[dict]:
    tasks = load(data, "data.json*", "question", "choices", "answer", "error_type", "correct_answer")
    for task in tasks:
        corrected = task["error_type"] == "wrong_groundtruth" and str(task["correct_answer"]).isdigit()
        if corrected or task["error_type"] == "ok":
            task["truth"] = int(task["correct_answer"] if corrected else task["answer"])
        else:
            task["excluded"] = f"{task['error_type']}, correct answer {task['correct_answer']}"
    return tasks


def score_mmlu_redux(rows: list[dict], data: Path, source: str) -> dict:
    tasks = tasks_mmlu_redux(data)
    return accuracy(check_rows(rows, tasks, KEYS["mmlu_redux"], source, mmlu_redux_check), tasks)


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}, else of the last \fbox{...}; `\boxed ` with a space takes what follows up to a $."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    box = "\\boxed{" if "\\boxed{" in text else "\\fbox{"
    inside, depth = text.rpartition(box)[2] if box in text else "", 1
    for i, char in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return inside[:i]
    return None


def normalise_math(text: str) -> str:
    """The spelling of an answer that the paper's code compares, after Hendrycks et al. (MATH). ValueError for two units."""
    for old, new in [
        ("\n", ""),
        ("\\!", ""),
        ("\\\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        ("\\left", ""),
        ("\\right", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\$", ""),
    ]:
        text = text.replace(old, new)
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("more than one unit")
    text = text.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    if text.count("=") == 1 and text.index("=") <= 2:
        text = text.partition("=")[2]
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", "\\frac{1}{2}" if text == "0.5" else text)


def math500_check(task: dict, response: str) -> dict:
    """The boxed answer is spelled as the reference answer; or, by math-verify, is an equal expression."""
    import math_verify

    answer, truth = last_boxed(response), task["answer"]
    if answer is None:
        return {"correct": False, "correct_math_verify": False, "answer": None}
    try:
        correct = normalise_math(answer) == normalise_math(truth)
    except ValueError:
        correct = answer == truth
    equal = correct or math_verify.verify(
        *(math_verify.parse(f"\\boxed{{{side}}}") for side in (truth, answer))
    )
    return {"correct": correct, "correct_math_verify": equal, "answer": answer}


def tasks_math500(data: Path) -> list[dict]:
    return load(data, "test.json*", "problem", "answer")


def score_math500(rows: list[dict], data: Path, source: str) -> dict:
    tasks = tasks_math500(data)
    return accuracy(check_rows(rows, tasks, KEYS["math500"], source, math500_check), tasks)


def last_json_object(text: str) -> dict | None:
    """The last complete {...} at top level by plain counting of braces (also those in strings), without its line breaks."""
    depth, start, last = 0, 0, ""
    for i, char in enumerate(text):
        if char == "{":
            start, depth = (i if depth == 0 else start), depth + 1
        elif char == "}" and depth > 0:
            depth -= 1
            last = text[start : i + 1] if depth == 0 else last
    try:
        return json.loads(last.replace("\n", "").replace("\r", ""))
    except (ValueError, RecursionError):
        return None


def zebralogic_check(task: dict, response: str) -> dict:
    """Every cell of the grid is right, in lower case and stripped; of a list the first element counts."""
    header, truths = task["solution"]["header"][1:], task["solution"]["rows"]
    solution = (last_json_object(response) or {}).get("solution")
    solution, right = solution if isinstance(solution, dict) else None, 0
    for i, row in enumerate(truths, 1):
        house = (solution or {}).get(f"House {i}")
        for column, truth in zip(header, row[1:]):
            cell = house.get(column) if isinstance(house, dict) else None
            cell = cell[0] if isinstance(cell, list) and cell else cell
            right += isinstance(cell, str) and cell.lower().strip() == truth.lower().strip()
    cells, space = len(truths) * len(header), math.factorial(len(truths)) ** len(header)
    size = "small" if space < 1e3 else "medium" if space < 1e6 else "large" if space < 1e10 else "x-large"
    return {
        "correct": right == cells,
        "right_cells": right,
        "cells": cells,
        "group": size,
        "answer": solution,
    }


def tasks_zebralogic(data: Path) -> list[dict]:
    tasks = load(data, "*.*", "id", "solution")
    if all(cell == "___" for task in tasks for row in task["solution"]["rows"] for cell in row[1:]):
        runs.fail(
            f"{data}: the solutions are masked (___); the full file is on the hub after a request, see data/README.md"
        )
    return tasks


def score_zebralogic(rows: list[dict], data: Path, source: str) -> dict:
    tasks = tasks_zebralogic(data)
    results = check_rows(rows, tasks, KEYS["zebralogic"], source, zebralogic_check)
    cells = sum(r.get("cells", 0) for r in results)
    cell_accuracy = sum(r.get("right_cells", 0) for r in results) / cells if cells else None
    return {"cell_accuracy": cell_accuracy} | accuracy(results, tasks)


def final_number(text: str) -> str | None:
    """The number after the last `####`, else after the last `A:`, without commas."""
    found = re.findall(r"####\s*(-?[0-9.,]+)", text) or re.findall(r"A:\s*(-?[0-9.,]+)", text)
    return found[-1].replace(",", "") if found else None


def gsm8k_check(task: dict, response: str) -> dict:
    answer = final_number(response)
    return {"correct": answer == final_number(task["answer"]), "answer": answer}


def tasks_gsm8k(data: Path) -> list[dict]:
    return load(data, "test.jsonl*", "question", "answer")


def score_gsm8k(rows: list[dict], data: Path, source: str) -> dict:
    """A row may hold the solutions of several models, as the official example file does; they are the groups."""
    tasks, flat = tasks_gsm8k(data), []
    for line, row in enumerate(rows, 1):
        named = {
            name: value for name, value in row.items() if isinstance(value, dict) and "solution" in value
        }
        flat += [
            row | {"_line": line, "_model": name, "response": s["solution"]} for name, s in named.items()
        ] or [row]
    results = check_rows(flat, tasks, KEYS["gsm8k"], source, gsm8k_check)
    for row, result in zip(flat, results):
        result |= {"group": row["_model"]} if "_model" in row else {}
    numbers = accuracy(results, tasks)
    return {
        k: v for k, v in numbers.items() if not ("by_group" in numbers and k.startswith("pass@"))
    }  # not one model's


def completion(response: str, entry_point: str) -> str:
    """What comes after the prompt's code: the last code block that defines the function, else the last one, else all."""
    blocks = re.findall(r"```[^\n]*\n(.*?)(?:```|$)", response, re.S) or [response]
    return "\n" + next((b for b in reversed(blocks) if f"def {entry_point}(" in b), blocks[-1])


def humaneval_check(task: dict, text: str) -> dict:
    """The prompt, its completion and the test run to their end in a sandbox."""
    from rewards import sandbox

    result = sandbox.run(f"{task['prompt']}{text}\n{task['test']}\ncheck({task['entry_point']})")
    return {
        "correct": result.ok,
        "status": result.status,
        "error": result.stderr[-300:],
        "isolation": result.isolation,
    }


def tasks_humaneval(data: Path) -> list[dict]:
    return load(data, "HumanEval.jsonl*", "task_id", "prompt", "test", "entry_point")


def score_humaneval(rows: list[dict], data: Path, source: str) -> dict:
    tasks = tasks_humaneval(data)
    entry_points = {t["task_id"]: t["entry_point"] for t in tasks}
    for row in (r for r in rows if isinstance(r.get("response"), str) and "completion" not in r):
        row["completion"] = completion(row["response"], entry_points.get(row.get("task_id"), ""))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = check_rows(
            rows,
            tasks,
            KEYS["humaneval"],
            source,
            humaneval_check,
            text=("completion", "response"),
            apply=pool.map,
        )
    return {"isolation": sorted({r.pop("isolation") for r in results if "isolation" in r})} | accuracy(
        results, tasks
    )


@functools.cache
def ifeval_checkers():
    """lm-eval's copy of Google's checkers, made deterministic: (known instructions, function of a task and [response])."""
    import langdetect
    import lm_eval
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        runs.fail(
            "IFEval needs nltk's punkt_tab: run python -m nltk.downloader punkt_tab, or set NLTK_DATA to where it is"
        )
    package = types.ModuleType("lm_eval.tasks")  # lm-eval's own imports what all of its tasks need
    package.__path__ = [str(Path(lm_eval.__file__).parent / "tasks")]
    sys.modules.setdefault("lm_eval.tasks", package)
    from lm_eval.tasks.ifeval import instructions, instructions_registry, utils

    class LetterFrequency(instructions.LetterFrequencyChecker):
        def build_description(self, *, letter=None, **kwargs):
            super().build_description(letter=letter, **kwargs)
            self._letter = letter.lower()

    instructions_registry.INSTRUCTION_DICT["keywords:letter_frequency"] = LetterFrequency
    langdetect.DetectorFactory.seed = 0
    logging.getLogger(instructions.__name__).setLevel(
        logging.CRITICAL
    )  # it prints every text without a language
    return instructions_registry.INSTRUCTION_DICT, utils.process_results


def bounded(check: Callable[[dict, str], dict], task: dict, response: str, seconds: float = 10.0) -> dict:
    """check(task, response); no instruction is met by a response that takes longer to check, as thousands of [ do in a regular
    expression of quadratic time, or that nests too deeply for its JSON to be read. Only in the main thread."""

    def late(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return check(task, response)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (RecursionError, TimeoutError):
        return {rule: [False] * len(task["instruction_id_list"]) for rule in ("strict", "loose")}
    finally:
        signal.signal(signal.SIGALRM, before)


def ifeval_check(task: dict, response: str) -> dict:
    """{"strict": [bool], "loose": [bool]}, one an instruction."""
    known, process = ifeval_checkers()
    if unknown := set(task["instruction_id_list"]) - set(known):
        runs.fail(
            f"task {task['key']}: unknown instruction {', '.join(sorted(unknown))}; is this IFEval's data?"
        )

    def check(task: dict, response: str) -> dict:
        out = process(task, [response])
        return {"strict": out["inst_level_strict_acc"], "loose": out["inst_level_loose_acc"]}

    return bounded(check, task, response)


def tasks_ifeval(data: Path) -> list[dict]:
    return load(data, "data.json*", "key", "prompt", "instruction_id_list", "kwargs")


tasks_ifbench = tasks_ifeval


def score_ifeval(rows: list[dict], data: Path, source: str, check=ifeval_check) -> dict:
    """Shares of prompts with every instruction met and of instructions met; loose: in one of 8 variants of the response."""
    tasks = tasks_ifeval(data)
    results, numbers = check_rows(rows, tasks, KEYS["ifeval"], source, check, samples=False), {}
    for rule in ("strict", "loose"):
        met = [r[rule] for r in results if rule in r]
        numbers |= {f"prompt_{rule}": mean(map(all, met)), f"instruction_{rule}": mean(sum(met, []))}
        if rule == "strict" and met:
            numbers["interval"] = bootstrap([all(m) for m in met])
    return numbers | count(results, tasks)


def score_ifbench(rows: list[dict], data: Path, source: str) -> dict:
    from benchmarks import ifbench

    return score_ifeval(rows, data, source, functools.partial(runs.or_fail, bounded, ifbench.check))


# --- 3. benchmarks with a judge: what it is asked, how its reply is read (ValueError: cannot be), and the score


def alpacaeval2_judge_prompt(instruction: str, answer_a: str, answer_b: str) -> str:
    """The paper's variant: a ranking as JSON."""
    return (
        f"Two models, A and B, were given the same instruction. Rank their answers as the person who gave it would.\n\n"
        f"Instruction:\n{instruction}\n\nAnswer of A:\n{answer_a}\n\nAnswer of B:\n{answer_b}\n\nReply with nothing but "
        'JSON: {"output": [{"model": "A or B", "rank": 1}, {"model": "the other", "rank": 2}]}'
    )


def alpacaeval2_token_prompt(instruction: str, answer_m: str, answer_big_m: str) -> str:
    """The official variant: one token, of which the log-probabilities count."""
    return (
        f"Two models, m and M, were given the same instruction. Which answer would the person who gave it prefer?\n\n"
        f"Instruction:\n{instruction}\n\nAnswer of m:\n{answer_m}\n\nAnswer of M:\n{answer_big_m}\n\nReply with nothing "
        "but the better model's name, m or M."
    )


def model_side(instruction: str) -> str:
    """Which of the judge's two answers is the model's, A or B: at random, but the same for an instruction in every run."""
    return "AB"[hashlib.sha256(instruction.encode()).digest()[0] % 2]


def token_preference(choice: dict, model_is: str) -> float | None:
    """Preference, 1 (baseline) to 2 (model), from a reply's log-probabilities of m and M; None where it has neither."""
    try:
        tops = choice["logprobs"]["content"][0]["top_logprobs"]
        shown = {top["token"]: math.exp(top["logprob"]) for top in tops}
    except (LookupError, TypeError, OverflowError):  # a reply without log-probabilities
        return None
    m, big_m = shown.get("m", 0.0), shown.get("M", 0.0)
    return 1 + (m if model_is == "A" else big_m) / (m + big_m) if 0 < m + big_m < math.inf else None


def parse_alpacaeval2(text: str) -> str:
    """`A` or `B`: the first that the ranking puts first."""
    try:
        ranking = json.loads(text)["output"]
        return next(
            e["model"]
            for e in ranking
            if type(e["rank"]) is int and e["rank"] == 1 and e["model"] in ("A", "B")
        )
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError) as e:
        raise ValueError(f"no ranking of A and B in {text[:80]!r}") from e


def fit_length_control(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Coefficients (F,) of an L1 logistic regression of soft labels y (N,) on x (N, F), without intercept.

    C is the best of 10 by the weighted log loss in 5-fold cross-validation, as in alpaca_eval's length_controlled_v1.
    """
    x2, y2, weight2 = (
        np.vstack([x, x]),
        np.repeat([1, 0], len(y)),
        np.r_[weight, weight],
    )  # a soft label is two weighted rows
    share, soft = np.r_[y, 1 - y], np.r_[y, y]

    def fit(c: float, rows) -> LogisticRegression:
        model = LogisticRegression(C=c, l1_ratio=1, solver="liblinear", fit_intercept=False, random_state=123)
        return model.fit(x2[rows], y2[rows], sample_weight=(share * weight2)[rows])

    def loss(c: float, train, test) -> float:
        p = fit(c, train).predict_proba(x2[test])[:, 1].clip(1e-15, 1 - 1e-15)
        return -np.mean(weight2[test] * (soft[test] * np.log(p) + (1 - soft[test]) * np.log(1 - p)))

    folds = list(GroupKFold(5).split(x2, y2, np.tile(np.arange(len(y)), 2)))
    best = min(np.logspace(-4, 4, 10), key=lambda c: np.mean([loss(c, *fold) for fold in folds]))
    return fit(best, slice(None)).coef_[0]


def win_rate_at_equal_length(weights: np.ndarray, difficulty: np.ndarray) -> float:
    """The official win rate in percent from the fit's weights (length, difficulty, model) and the instructions' (N,)."""
    return 100 * float(expit(weights[1] * difficulty + weights[2]).mean())


def paper_length_control(wins: np.ndarray, delta_words: np.ndarray) -> float:
    """The paper's win rate in percent at equal length, from binary wins (N,) and words(model) - words(baseline) (N,)."""
    model = np.repeat([1, 0], len(wins))  # every row stands twice, once from either side
    x = np.c_[model, 1 - model, np.r_[delta_words, -delta_words]]
    fit = LogisticRegression(max_iter=1000).fit(x, np.r_[wins, 1 - wins])
    return 100 * float(expit(fit.intercept_[0] + fit.coef_[0, 0]))


def alpacaeval2_preference(row: dict, where: str) -> float:
    """A row's preference, 1 (baseline) to 2 (model). ValueError where there is none."""
    if field(row, where, "output_2") is None:
        raise ValueError("no output_2")
    if "judge_text" in row:
        if field(row, where, "model_is") not in ("A", "B"):
            runs.fail(f"{where}: field model_is must be A or B, not {row['model_is']}")
        return 1.0 + (parse_alpacaeval2(field(row, where, "judge_text") or "") == row["model_is"])
    preference = field(row, where, "preference", kind=(int, float))
    preference = 1.5 if preference == 0 else preference  # the official tool's mark of a draw
    if preference is None or not 1 <= preference <= 2:
        raise ValueError(f"preference {preference}")
    return float(preference)


def tasks_alpacaeval2(data: Path) -> list[dict]:
    return beside(data, "*baseline.json*", "instruction", "output")


def score_alpacaeval2(rows: list[dict], data: Path, source: str) -> dict:
    baseline = tasks_alpacaeval2(data)
    gamed = pd.DataFrame(
        beside(data, "*gamed*.csv*", "std_delta_len", "instruction_difficulty", "preference")
    )
    gamed = gamed.rename(columns={"instruction_index": "index"})
    results, chars, words = match(rows, baseline, KEYS["alpacaeval2"], source), [], []
    for row, result in zip(rows, results):
        try:
            result["preference"] = alpacaeval2_preference(row, f"{source}:{result['line']}")
        except ValueError as e:
            result["invalid"] = str(e)
        reference, answer = row.get("output_1") or baseline[result["task"]]["output"], row["output_2"] or ""
        chars.append((row.get("len_output_1_chars") or len(reference)) - len(answer))
        words.append(len(answer.split()) - len(reference.split()))
    y = np.array([r.get("preference", np.nan) for r in results]) - 1
    valid, chars, wins = ~np.isnan(y), np.array(chars, dtype=float), (y > 0.5).astype(int)
    if not valid.any():
        nothing = dict.fromkeys(("win_rate", "lc_win_rate", "win_rate_paper", "lc_win_rate_paper"))
        return nothing | count(results, baseline)
    hard = gamed.drop_duplicates("index").set_index("index")["instruction_difficulty"]
    hard = hard.loc[[r["task"] for r in results]].to_numpy()
    x = np.c_[np.tanh(chars / (chars.std(ddof=1) or 1)), hard, np.ones(len(y))]
    x_gamed = np.c_[np.tanh(gamed["std_delta_len"]), gamed["instruction_difficulty"], np.zeros(len(gamed))]
    weight = np.r_[
        np.full(len(gamed), 0.2 / 2), np.ones(valid.sum())
    ]  # regularisation 0.2, shared by two gamed baselines
    w = fit_length_control(np.r_[x_gamed, x[valid]], np.r_[gamed["preference"], y[valid]], weight)
    return {
        "win_rate": 100 * float(y[valid].mean()),
        "win_rate_interval": bootstrap(100 * y[valid]),
        "lc_win_rate": win_rate_at_equal_length(w, hard),
        "discrete_win_rate": 100 * float(np.where(y == 0.5, 0.5, wins)[valid].mean()),
        "win_rate_paper": 100 * float(wins.mean()),  # what cannot be read is a loss there
        "lc_win_rate_paper": paper_length_control(wins, np.array(words)),
        "glm_weights": dict(zip(("tanh_length", "instruction_difficulty", "model"), w.tolist())),
        "avg_length": mean(len(row["output_2"] or "") for row in rows),
        **count(results, baseline),
    }


def arenahard2_judge_messages(category: str, prompt: str, answer_a: str, answer_b: str) -> list[dict]:
    """One of a prompt's two games: in game 1 the baseline is A, in game 2 the model."""
    task = (
        "pieces of creative writing. Judge imagination, voice and how well each does what was asked"
        if category == "creative_writing"
        else "answers. First solve the task yourself, then find what is wrong or missing in each. Judge correctness first, "
        "then how useful, complete and to the point each is"
    )
    system = (
        f"You compare two assistants' {task}. Say why, then end with one verdict: [[A>>B]] A is much better, [[A>B]] A "
        "is better, [[A=B]] about the same, [[B>A]] B is better, [[B>>A]] B is much better."
    )
    user = f"The prompt:\n{prompt}\n\nAnswer of A:\n{answer_a}\n\nAnswer of B:\n{answer_b}"
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


VERDICTS = {
    "A>>B": (1, 3),
    "A>B": (1, 1),
    "A=B": (0.5, 1),
    "B>A": (0, 1),
    "B>>A": (0, 3),  # value for A, weight
    "B<<A": (1, 3),
    "B<A": (1, 1),
    "B=A": (0.5, 1),
    "A<B": (0, 1),
    "A<<B": (0, 3),
}


ARENAHARD2_GAMES = ("verdict_game1_A_is_baseline", "verdict_game2_A_is_model")


def parse_arenahard2(text: str) -> str:
    """A key of VERDICTS: the text itself, else what is in the last [[...]], else in the last [...]; in either case."""
    text = text.upper().strip()
    found = re.findall(r"\[\[([AB<>=]+)\]\]", text) or re.findall(r"\[([AB<>=]+)\]", text)
    label = text if text in VERDICTS else found[-1] if found else ""
    if label not in VERDICTS:
        raise ValueError(f"no verdict in {text[-80:]!r}")
    return label


def token_len(answer: str) -> int:
    """The length that style control reads: tokens of o200k (tiktoken downloads it once)."""
    import tiktoken

    return len(tiktoken.get_encoding("o200k_base").encode(answer, disallowed_special=()))


def markdown_counts(answer: str) -> dict:
    """The markdown that style control counts, outside of code blocks."""
    text = re.sub(r"```[^`]*```", "``````", answer)
    times = lambda pattern: len(re.findall(pattern, text, re.M))
    return {
        "header_count": {f"h{i}": times(rf"^#{{{i}}}\s") for i in range(1, 7)},
        "list_count": {"ordered": times(r"^\s*\d+\.\s"), "unordered": times(r"^\s*[-*+]\s")},
        "bold_count": {"**": times(r"\*\*[^*\n]+\*\*"), "__": times(r"__[^_\n]+__")},
    }


def style(answer: str) -> dict:
    """What style control counts; {} without tiktoken's table, which it downloads once."""
    try:
        return {"token_len": token_len(answer)} | markdown_counts(answer)
    except OSError:  # requests' errors are of this kind
        return {}


def style_features(model: dict, baseline: dict) -> list[float]:
    """Relative difference of the lengths, and of the densities of headers, list items and bold spans (4,).

    Both are as `style` has them.
    """
    total = lambda counts: sum(counts.values()) if isinstance(counts, dict) else counts
    m, b = (
        [total(c[k]) for k in ("token_len", "header_count", "list_count", "bold_count")]
        for c in (model, baseline)
    )
    densities = [(x / (m[0] + 1), y / (b[0] + 1)) for x, y in zip(m[1:], b[1:])]
    return [(m[0] - b[0]) / max(m[0] + b[0], 1)] + [(x - y) / (x + y + 1) for x, y in densities]


def bradley_terry(features: np.ndarray, outcomes: np.ndarray) -> float:
    """Win rate in percent at equal style: maximum likelihood of soft outcomes (N,) given standardised features (N, 4)."""
    x, y, weight = (
        np.vstack([features, features]),
        np.repeat([1, 0], len(outcomes)),
        np.r_[outcomes, 1 - outcomes],
    )
    fit = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(x, y, sample_weight=weight)
    return 100 * float(expit(fit.intercept_[0]))


def arenahard2_scores(results: list[dict]) -> dict:
    """Scores of the prompts of one category, from `game1`, `game2` (labels, None: unread) and `style` of their results."""
    battles, values = (
        [],
        [],
    )  # battles: (style, value for the model), a `>>` three times; prompts with both verdicts only
    for r in results:
        (value1, weight1), (value2, weight2) = (
            VERDICTS.get(r["game1"], (0.5, 0)),
            VERDICTS.get(r["game2"], (0.5, 0)),
        )
        values += [1 - value1, value2]
        if "invalid" not in r:
            battles += [(r["style"], value2)] * weight2 + [(r["style"], 1 - value1)] * weight1
    numbers = {"score": None, "score_style_controlled": None, "score_paper": 100 * mean(values)}
    if not battles:
        return numbers
    styles, outcomes = [style for style, _ in battles], np.array([value for _, value in battles])
    picks = np.random.default_rng(0).integers(0, len(battles), (100, len(battles)))
    interval = lambda scores: np.percentile(scores, [5, 95]).tolist()
    means = 100 * outcomes[picks].mean(axis=1)
    numbers |= {
        "score": 100 * mean(outcomes),
        "score_interval": interval(means),
        "score_bootstrap": mean(means),
    }
    if None not in styles:
        styles, spread = np.array(styles) - np.mean(styles, axis=0), np.std(styles, axis=0, ddof=1)
        styles /= np.where(spread > 1e-9, spread, 1)
        refits = [bradley_terry(styles[pick], outcomes[pick]) for pick in picks]
        numbers |= {
            "score_style_controlled": bradley_terry(styles, outcomes),
            "score_style_controlled_interval": interval(refits),
            "score_style_controlled_bootstrap": float(np.median(refits)),
        }
    return numbers


def tasks_arenahard2(data: Path) -> list[dict]:
    """Questions with their row of a file baseline_*, {uid, answer, metadata}, or None: the two categories have their own."""
    tasks, folder = (
        beside(data, "question.jsonl*", "uid", "category", "prompt"),
        data if data.is_dir() else data.parent,
    )
    baseline = {r["uid"]: r for f in folder.glob("baseline_*") for r in read_rows(f, "uid", "metadata")}
    for row in baseline.values():  # the official file has the answer in its messages
        row.setdefault("answer", (row.get("messages") or [{}])[-1].get("content", {}).get("answer"))
    return [task | {"baseline": baseline.get(task["uid"])} for task in tasks]


def score_arenahard2(rows: list[dict], data: Path, source: str) -> dict:
    """Hard prompts first; creative writing has another baseline, so a score of its own. Official `games` are read too."""
    tasks = tasks_arenahard2(data)
    baseline = {t["uid"]: t["baseline"]["metadata"] for t in tasks if t["baseline"]}
    if len({row.get("model") for row in rows}) > 1:
        runs.fail(f"{source}: rows of several models; score one at a time")
    results, games = match(rows, tasks, KEYS["arenahard2"], source), ARENAHARD2_GAMES
    for row, result in zip(rows, results):
        where, metadata = (
            f"{source}:{result['line']}",
            row.get("baseline_metadata") or baseline.get(row["uid"]),
        )
        styled = row.get("model_metadata") and metadata
        result["category"] = tasks[result["task"]]["category"]
        result["style"] = style_features(row["model_metadata"], metadata) if styled else None
        texts = (
            [field(row, where, g) for g in games]
            if "games" not in row
            else [(g or {}).get("score") for g in row["games"]]
        )
        for game, text in zip(("game1", "game2"), [*texts, None, None]):
            try:
                result[game] = parse_arenahard2(text or "")
            except ValueError as e:
                result |= {game: None, "invalid": f"{game}: {e}"}
    scores, categories = {}, sorted({r["category"] for r in results}, key=lambda c: (c != "hard_prompt", c))
    for category in categories:
        of_it = [r for r in results if r["category"] == category]
        scores[category] = arenahard2_scores(of_it) | {
            "n_without_style": sum(r["style"] is None for r in of_it)
        }
    asked = [task | ({} if task["category"] in scores else {"excluded": "category"}) for task in tasks]
    return {"category": categories[0]} | scores.pop(categories[0]) | scores | count(results, asked)


def tasks_creativewriting3(data: Path) -> list[dict]:
    """A task for every prompt and iteration (1 to 3), its seed in the place of <SEED>; titles as on the official pages."""
    prompts = beside(data, "*prompts*.json*", "category", "title", "writing_prompt", "seed_modifiers")
    tasks = [
        {
            "title": f"{t['category'].capitalize()}: {t['title']}",
            "iteration": i,
            "unfilled": t["writing_prompt"],
            "prompt": t["writing_prompt"].replace("<SEED>", t["seed_modifiers"][i - 1]),
        }
        for t in prompts
        for i in (1, 2, 3)
    ]
    return [{"id": f"{task['title']} ({task['iteration']})"} | task for task in tasks]


def creativewriting3_criteria(data: Path) -> tuple[list[str], list[str]]:
    """All criteria, and those of which less is better."""
    return beside(data, "c*riteria.txt"), beside(data, "negative_criteria.txt")


def creativewriting3_judge_prompt(prompt: str, answer: str, criteria: list[str], negative: list[str]) -> str:
    marks = "\n".join(f"{name}: mark" for name in criteria)
    return (
        f"You mark creative writing, and are hard to please.\n\nThe task:\n{prompt}\n\nThe piece:\n{answer}\n\nAnalyse "
        f"it under the heading [Analysis]. Then mark it under [Scores], from 0 to 20, a line for each of these:\n{marks}"
        f"\n\nLower is better in: {', '.join(negative)}."
    )


def parse_creativewriting3(text: str) -> dict[str, float]:
    """Marks by name: every `name: 7` or `name: Score 7`, then every `name: [7]`; the last of a name, none above 20."""
    number = r"(-?\d+(?:\.\d+)?)"
    found = re.findall(rf"(.*?):\s*(?:Score\s+)?{number}", text) + re.findall(rf"(.*?):\s*\[{number}\]", text)
    marks = {name.strip(): float(mark) for name, mark in found if float(mark) <= 20}
    if not marks:
        raise ValueError(f"no `name: number` in {text[-80:]!r}")
    return marks


def shown(values: list[float]) -> float:
    """The mean of marks (of 20) as the official result pages show it (of 100)."""
    return float(f"{5 * round(mean(values), 2):.1f}")


def score_creativewriting3(rows: list[dict], data: Path, source: str) -> dict:
    """overall: mean of the items; iterations: as shown on the official pages, all marks of an iteration in one pool."""
    criteria, negative = map(set, creativewriting3_criteria(data))
    for line, row in enumerate(rows, 1):
        title, iteration = (
            field(row, f"{source}:{line}", "title"),
            field(row, f"{source}:{line}", "iteration", kind=int),
        )
        row["id"] = f"{title} ({iteration})"
    tasks = tasks_creativewriting3(data)
    results, pools = match(rows, tasks, KEYS["creativewriting3"], source), defaultdict(list)
    for row, result in zip(rows, results):
        try:
            marks = parse_creativewriting3(field(row, f"{source}:{result['line']}", "judge_text") or "")
            values = [
                v
                for v in (20 - mark if name in negative else mark for name, mark in marks.items())
                if v <= 20
            ]
            if not values:
                raise ValueError("no mark from 0 to 20")
            unknown = sorted(marks.keys() - criteria)
            result |= {"score": 5 * mean(values), "shown": shown(values), "marks": marks, "unknown": unknown}
            pools[row["iteration"]] += values
        except ValueError as e:
            result["invalid"] = str(e)
    scores = [r["score"] for r in results if "score" in r]
    return {
        "overall": mean(scores),
        "overall_interval": bootstrap(scores) if scores else None,
        "iterations": [shown(pools[i]) for i in sorted(pools)],
        "overall_paper": mean(r.get("score", 0.0) for r in results),
        "n_unknown_names": sum(len(r.get("unknown", [])) for r in results),
        **count(results, tasks),
    }


# --- 4. what a judge is asked about a model's answers


def judge_requests(
    name: str, task: dict, answer: str, data: Path, paper: bool, max_tokens: int = 0
) -> dict[str, dict]:
    """The calls about one answer, by the field of the scored row that takes the reply.

    `paper`: words kept and variants of the paper's code, else the official tool's; `max_tokens` 0: as there.
    """
    cut = shorten if paper else lambda text, words: text
    if name == "alpacaeval2":
        answers = [cut(answer, 2000), cut(task["output"], 2000)][
            :: 1 if model_side(task["instruction"]) == "A" else -1
        ]
        if paper:
            prompt, limit = alpacaeval2_judge_prompt(cut(task["instruction"], 2000), *answers), 128
            return {
                "judge_text": judge_request(prompt, max_tokens or limit)
                | {"response_format": {"type": "json_object"}}
            }
        tokens = {"temperature": 1.0, "logprobs": True, "top_logprobs": 5}
        return {
            "preference": judge_request(alpacaeval2_token_prompt(task["instruction"], *answers), 1) | tokens
        }
    if name == "arenahard2":
        limit, pair = max_tokens or (3072 if paper else 16000), (task["baseline"]["answer"], answer)
        return {
            game: {
                "messages": arenahard2_judge_messages(task["category"], task["prompt"], *answers),
                "temperature": 0.0,
                "max_tokens": limit,
            }
            for game, answers in zip(ARENAHARD2_GAMES, (pair, pair[::-1]))
        }
    prompt = creativewriting3_judge_prompt(
        task["unfilled" if paper else "prompt"], cut(answer, 3200), *creativewriting3_criteria(data)
    )
    return {"judge_text": judge_request(prompt, max_tokens or (2048 if paper else 1000))}


def judge_request(prompt: str, max_tokens: int) -> dict:
    return {"messages": [{"role": "user", "content": prompt}], "temperature": 0.0, "max_tokens": max_tokens}
