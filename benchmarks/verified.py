"""Benchmarks whose answers are checked by a rule: PopQA, MMLU-Redux, MATH-500, GSM8K, ZebraLogic, HumanEval.

Each has its prompt, `load_NAME(data)` for the tasks, `NAME_check(task, text)` for one answer, and
`score_NAME(rows, data, source)`. All take several rows a task: `accuracy` is the mean over tasks of the mean
over samples, as a fraction, with pass@k, maj@k and best@k next to it. An answer without a readable result is
wrong, and counted as unparsed.

Where the paper's code and the official tool differ, the official value has the plain key, the paper's
`..._paper`:

1. PopQA: the paper also accepts a name in capitals.
2. MMLU-Redux and MATH-500 have no official tool: the rules are those of the paper's code (5376 of the 5700
   items of MMLU-Redux; equality of normalised strings). `accuracy_math_verify` is symbolic equality.
   One rule is more lenient here: ` x/2` is `x/2`. The paper's code compares an answer with one slash as it is
   written, unless both sides are integers. This cannot matter for MATH-500, as no reference has a slash.
3. HumanEval: a program has 10 s, its start included; in the official tool 3 s without it.
"""

import json
import math
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from utils import fail
from benchmarks.accuracy import accuracy, vote_as_read
from benchmarks.scoring import check_rows, load, mean

# --- 1. PopQA

POPQA_KEYS = ("id", "question")
POPQA_PROMPT = "Answer in a short text of a few sentences, 100 words at most.\n\n{question}"


def load_popqa(data: Path) -> list[dict]:
    """Loads the questions; exits with 2 if one has no list of accepted names."""
    tasks = load(data, "*.*", "question")
    for number, task in enumerate(tasks, 1):
        try:
            accepted_names(task)
        except ValueError as error:
            fail(f"{data}, row {number}: {error}")
    return tasks


def accepted_names(task: dict) -> list[str]:
    """Returns the names that answer a question; raises ValueError if the task has no list of them."""
    for field in ("answers", "possible_answers"):
        names = task.get(field)
        if not names:
            continue
        if isinstance(names, str):  # the official file has a JSON list in a column of text
            try:
                names = json.loads(names)
            except ValueError as error:
                raise ValueError(f"field {field} is not JSON ({error})") from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"field {field} is not a list of texts: {str(names)[:50]}")
        return names
    raise ValueError(f"no names in field answers or possible_answers (found {', '.join(task)})")


def popqa_check(task: dict, response: str) -> dict:
    """Looks for an accepted name in the response: as it is written, in lower case or capitalised."""
    correct = False
    in_capitals = False
    for name in accepted_names(task):
        if not name.strip():
            continue
        correct |= name in response or name.lower() in response or name.capitalize() in response
        in_capitals |= name.upper() in response
    return {"correct": correct, "correct_paper": correct or in_capitals}


def score_popqa(rows: list[dict], data: Path, source: str) -> dict:
    tasks = load_popqa(data)
    return accuracy(check_rows(rows, tasks, POPQA_KEYS, source, popqa_check), tasks)


# --- 2. MMLU-Redux

MMLU_REDUX_KEYS = ("id", "index", "question")
MMLU_REDUX_PROMPT = (
    "Choose the right option.\n\n{question}\n\nA. {choices[0]}\nB. {choices[1]}\nC. {choices[2]}\n"
    "D. {choices[3]}\n\nReason as long as you need. Then write `Answer:` and, in upper case, only the right option's letter."
)


def load_mmlu_redux(data: Path) -> list[dict]:
    """Loads the items with `truth`, the position of the right option; the rest are `excluded`."""
    tasks = load(data, "data.json*", "question", "choices", "answer", "error_type", "correct_answer")
    for task in tasks:
        if task["error_type"] == "ok":
            task["truth"] = int(task["answer"])
        elif task["error_type"] == "wrong_groundtruth" and str(task["correct_answer"]).isdigit():
            task["truth"] = int(task["correct_answer"])
        else:
            task["excluded"] = f"{task['error_type']}, correct answer {task['correct_answer']}"
    return tasks


def mmlu_redux_check(task: dict, response: str) -> dict:
    """Reads the first upper-case letter between the first `Answer:` (else `answer:`) and the next one."""
    marker = "Answer:" if "Answer:" in response else "answer:"
    parts = response.split(marker)
    capitals = re.sub("[^A-Z]", "", parts[1]) if len(parts) > 1 else ""
    letter = capitals[:1]
    answer = letter if letter in ("A", "B", "C", "D") else None
    return {"correct": letter == "ABCD"[task["truth"]], "answer": answer}


def score_mmlu_redux(rows: list[dict], data: Path, source: str) -> dict:
    tasks = load_mmlu_redux(data)
    results = check_rows(rows, tasks, MMLU_REDUX_KEYS, source, mmlu_redux_check)
    return accuracy(results, tasks, vote_as_read)


# --- 3. MATH-500

MATH500_KEYS = ("unique_id", "problem", "id")
MATH500_PROMPT = "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}."

# Spellings that the MATH comparison takes for one, replaced in this order.
MATH_SPELLINGS = (
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
)


def load_math500(data: Path) -> list[dict]:
    tasks = load(data, "test.json*", "problem", "answer")
    for task in tasks:
        task["answer"] = str(task["answer"])
    return tasks


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}; None if nothing is boxed, or the last box is not closed.

    After `\boxed ` with a space it is everything up to the next $, as in the paper's code.
    """
    if "\\boxed " in text:
        after_box = text.rpartition("\\boxed ")[2]
        return after_box.partition("$")[0]

    _, box, after_box = text.rpartition("\\boxed")
    if not box or not after_box.startswith("{"):
        return None
    depth = 0
    for position, character in enumerate(after_box):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return after_box[1:position]
    return None


def normalise_math(text: str) -> str:
    """Returns an answer in the spelling that the paper's code compares, after Hendrycks et al. (MATH).

    Raises ValueError for an answer with two units.
    """
    for old, new in MATH_SPELLINGS:
        text = text.replace(old, new)

    text, *units = text.split("\\text{ ")  # a unit is cut off
    if len(units) > 1:
        raise ValueError("more than one unit")
    text = text.replace("\\%", "")

    # numbers begin with a digit; `x=` goes
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    if text.count("=") == 1 and text.index("=") <= 2:
        text = text.partition("=")[2]

    # braces around the arguments of \sqrt and \frac
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text)
    text = text.replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)

    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def math500_check(task: dict, response: str) -> dict:
    """Compares the boxed answer with the reference: as normalised strings, and as math-verify expressions."""
    import math_verify

    answer = last_boxed(response)
    truth = task["answer"]
    if answer is None:
        return {"correct": False, "correct_math_verify": False, "answer": None}
    try:
        correct = normalise_math(answer) == normalise_math(truth)
    except ValueError:
        correct = answer == truth
    equal = correct
    if not correct:
        expressions = [math_verify.parse(f"\\boxed{{{side}}}") for side in (truth, answer)]
        equal = math_verify.verify(*expressions)
    return {"correct": correct, "correct_math_verify": equal, "answer": answer}


def score_math500(rows: list[dict], data: Path, source: str) -> dict:
    tasks = load_math500(data)
    results = check_rows(rows, tasks, MATH500_KEYS, source, math500_check)
    return accuracy(results, tasks, math500_vote)


def math500_vote(task: dict, result: dict) -> str | None:
    """Returns the normalised answer, as `correct` compares it; None without one."""
    answer = result["answer"]
    if answer is None:
        return None
    try:
        return normalise_math(answer)
    except ValueError:
        return answer


# --- 4. GSM8K

GSM8K_KEYS = ("question", "id")
GSM8K_PROMPT = "{question}\n\nReason step by step. End with a line that holds only #### and the final number."


def load_gsm8k(data: Path) -> list[dict]:
    """Loads the questions; exits with 2 if an answer has no `####`, as a response without a number would equal it."""
    tasks = load(data, "test.jsonl*", "question", "answer")
    for number, task in enumerate(tasks, 1):
        if final_number(str(task["answer"])) is None:
            fail(
                f"{data}, row {number}: field answer has no #### with a number behind it: {str(task['answer'])[-50:]!r}"
            )
    return tasks


def final_number(text: str) -> str | None:
    """Returns the number after the last `####`, else after the last `A:`, without commas; else None."""
    found = re.findall(r"####\s*(-?[0-9.,]+)", text) or re.findall(r"A:\s*(-?[0-9.,]+)", text)
    if not found:
        return None
    return found[-1].replace(",", "")


def gsm8k_check(task: dict, response: str) -> dict:
    answer = final_number(response)
    return {"correct": answer == final_number(task["answer"]), "answer": answer}


def score_gsm8k(rows: list[dict], data: Path, source: str) -> dict:
    tasks = load_gsm8k(data)
    results = check_rows(rows, tasks, GSM8K_KEYS, source, gsm8k_check)
    return accuracy(results, tasks, vote_as_read)


# --- 5. ZebraLogic

ZEBRALOGIC_KEYS = ("id",)
ZEBRALOGIC_PROMPT = """Solve a logic puzzle, as in this example.

There are 2 houses, numbered 1 to 2 from left to right. In each lives another person, with another name (Arnold, Eric) and \
another pet (cat, dog).
1. Eric lives somewhere left of the cat's owner.

{{"reasoning": "Somebody lives left of the cat, so it is in house 2, and Eric in house 1.", "solution": \
{{"House 1": {{"Name": "Eric", "Pet": "dog"}}, "House 2": {{"Name": "Arnold", "Pet": "cat"}}}}}}

{puzzle}

Answer with this JSON, every ___ filled in, and nothing after it:
{template}"""
HIDDEN = "___"  # stands for a cell to be filled in


def load_zebralogic(data: Path) -> list[dict]:
    """Loads the puzzles, with `template` for the prompt; exits with 2 if all solutions are masked."""
    tasks = load(data, "*.*", "id", "puzzle", "solution")
    cells = set()
    for task in tasks:
        task["template"] = zebralogic_template(task["solution"])
        for row in task["solution"]["rows"]:
            cells.update(row[1:])
    if cells <= {HIDDEN}:
        fail(
            f"{data}: the solutions are masked ({HIDDEN}); the hub gives the full file on request, see data/README.md"
        )
    return tasks


def zebralogic_template(solution: dict) -> str:
    """Returns the JSON that a model fills in, for a solution {header, rows} with a row for each house."""
    attributes = solution["header"][1:]
    houses = {}
    for number in range(1, len(solution["rows"]) + 1):
        houses[f"House {number}"] = dict.fromkeys(attributes, HIDDEN)
    return json.dumps({"reasoning": HIDDEN, "solution": houses})


def last_json_object(text: str) -> dict | None:
    """Returns the last complete {...} at top level, without its line breaks; None if that is not JSON.

    Braces are counted even inside strings, as in the paper's code.
    """
    depth = 0
    start = 0
    last = ""
    for position, character in enumerate(text):
        if character == "{":
            if depth == 0:
                start = position
            depth += 1
        elif character == "}" and depth > 0:
            depth -= 1
            if depth == 0:
                last = text[start : position + 1]
    try:
        return json.loads(last.replace("\n", "").replace("\r", ""))
    except (ValueError, RecursionError):
        return None


def zebralogic_check(task: dict, response: str) -> dict:
    """Compares every cell of the grid, stripped and in lower case; of a list, the first element counts."""
    attributes = task["solution"]["header"][1:]
    true_rows = task["solution"]["rows"]
    solution = (last_json_object(response) or {}).get("solution")
    if not isinstance(solution, dict):
        solution = None

    true_cells = []
    for true_row in true_rows:
        true_cells += [truth.lower().strip() for truth in true_row[1:]]
    n_cells = len(true_cells)
    n_right = 0
    for cell, truth in zip(zebralogic_cells(task, solution or {}), true_cells, strict=True):
        n_right += cell == truth
    return {
        "correct": n_right == n_cells,
        "right_cells": n_right,
        "cells": n_cells,
        "group": zebralogic_size(len(true_rows), len(attributes)),
        "answer": solution,
    }


def zebralogic_cells(task: dict, solution: dict) -> list[str | None]:
    """Returns the cells of a grid, house by house, stripped and in lower case; None for one that cannot be read."""
    cells = []
    for number in range(1, len(task["solution"]["rows"]) + 1):
        house = solution.get(f"House {number}")
        if not isinstance(house, dict):
            house = {}
        for attribute in task["solution"]["header"][1:]:
            cell = house.get(attribute)
            if isinstance(cell, list) and cell:
                cell = cell[0]
            if isinstance(cell, str):
                cells.append(cell.lower().strip())
            else:
                cells.append(None)
    return cells


def zebralogic_vote(task: dict, result: dict) -> tuple | None:
    """Returns the cells of the grid; None without one."""
    if result["answer"] is None:
        return None
    return tuple(zebralogic_cells(task, result["answer"]))


def zebralogic_size(n_houses: int, n_attributes: int) -> str:
    """Returns the name of a puzzle's size, by the number of possible grids."""
    n_grids = math.factorial(n_houses) ** n_attributes
    for name, limit in (("small", 1e3), ("medium", 1e6), ("large", 1e10)):
        if n_grids < limit:
            return name
    return "x-large"


def score_zebralogic(rows: list[dict], data: Path, source: str) -> dict:
    """Scores whole grids (`accuracy`), single cells (`cell_accuracy`), and grids by size (`by_group`)."""
    tasks = load_zebralogic(data)
    results = check_rows(rows, tasks, ZEBRALOGIC_KEYS, source, zebralogic_check)
    n_right = 0
    n_cells = 0
    by_size = defaultdict(list)
    for result in results:
        if "correct" in result:
            n_right += result["right_cells"]
            n_cells += result["cells"]
            by_size[result["group"]].append(result["correct"])
    return {
        "cell_accuracy": n_right / n_cells if n_cells else None,
        "by_group": {size: mean(correct) for size, correct in by_size.items()},
        **accuracy(results, tasks, zebralogic_vote),
    }


# --- 6. HumanEval

HUMANEVAL_KEYS = ("task_id",)
HUMANEVAL_PROMPT = (
    "Complete this Python function. Answer with the whole of it in one code block.\n\n```python\n{prompt}```"
)


def load_humaneval(data: Path) -> list[dict]:
    return load(data, "HumanEval.jsonl*", "task_id", "prompt", "test", "entry_point")


def humaneval_check(task: dict, text: str) -> dict:
    """Runs the prompt with its completion, then the test, in a sandbox."""
    from rewards import code_runner  # here, as rewards imports this package

    test = f"{task['test']}\ncheck({task['entry_point']})"
    result = code_runner.run(task["prompt"] + text, [test])
    correct = result.passed == [True]
    status = result.status
    if status == "ok" and not correct:
        status = "error"
    return {
        "correct": correct,
        "program_status": status,  # `status` is that of the generation
        "error": result.stderr[-300:],
    }


def score_humaneval(rows: list[dict], data: Path, source: str) -> dict:
    """Scores rows with a `completion`, or a `response` whose code block is taken; runs a program a CPU."""
    from rewards.code_runner import find_program

    tasks = load_humaneval(data)
    entry_points = {task["task_id"]: task["entry_point"] for task in tasks}
    for row in rows:
        if "completion" not in row and isinstance(row.get("response"), str):
            names = {entry_points.get(row.get("task_id"), "")}
            row["completion"] = "\n" + find_program(row["response"], names)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = check_rows(
            rows,
            tasks,
            HUMANEVAL_KEYS,
            source,
            humaneval_check,
            text_fields=("completion", "response"),
            apply=pool.map,
        )
    return accuracy(results, tasks)
