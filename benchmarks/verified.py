"""Benchmarks whose answers are checked by a rule: PopQA, MMLU-Redux, MATH-500, GSM8K, ZebraLogic, HumanEval.

Each has its prompt, `load_NAME(data)` for the tasks and `NAME_check(task, text)` for one answer. All take
several rows a task: `accuracy` is the mean over tasks of the mean over samples, as a fraction, with pass@k,
maj@k and best@k next to it. A check's `answer` is what it has read, in the spelling that it compares: equal
answers are one vote of maj@k. An answer without a readable result (None) is wrong, and counted as unparsed.

Where the paper's code and the official tool differ, the official value has the plain key, the paper's
`..._paper`:

1. PopQA: the paper also accepts a name in capitals.
2. MMLU-Redux and MATH-500 have no official tool: the rules are those of the paper's code (5376 of the 5700
   items of MMLU-Redux; equality of normalised strings). `accuracy_math_verify` is symbolic equality.
   One rule is more lenient here: ` x/2` is `x/2`. The paper's code compares an answer with one slash as it is
   written, unless both sides are integers. This cannot matter for MATH-500, as no reference has a slash.
   The last box that is closed and not empty counts; in the paper's code the last one.
3. HumanEval: a program has 10 s, its start included; in the official tool 3 s without it.
"""

import json
import re
from pathlib import Path

from benchmarks.scoring import get_field, load
from rlmt import code_runner
from rlmt.verdicts import last_boxed, normalise_math, top_level_braces
from utils import fail


def truth_text(truth: object, where: str) -> str:
    """Returns a truth as text; JSON may have a number. Exits with 2 if it is neither."""
    if isinstance(truth, str | int | float):
        return str(truth)
    fail(f"{where}: an answer must be a text or a number, not {truth!r:.60}")


# --- 1. PopQA

POPQA_PROMPT = "Answer in a short text of a few sentences, 100 words at most.\n\n{question}"


def load_popqa(data: Path) -> list[dict]:
    """Loads the questions with `answers`, the accepted names; the official file has `possible_answers` as
    JSON."""
    tasks = load(data, "*.*", "question")
    for number, task in enumerate(tasks, 1):
        where = f"{data}, row {number}"
        names = get_field(task, where, "answers", "possible_answers")
        try:
            if isinstance(names, str):
                names = json.loads(names)
            if isinstance(names, str):
                raise TypeError
            task["answers"] = [truth_text(name, where) for name in names]
        except (ValueError, TypeError):
            fail(f"{where}: the accepted names are no list, as JSON or as it is, but {names!r:.60}")
    return tasks


def popqa_check(task: dict, response: str) -> dict:
    """Looks for an accepted name in the response: as it is written, in lower case or capitalised."""
    correct = False
    in_capitals = False
    for name in task["answers"]:
        if name.strip():
            correct |= name in response or name.lower() in response or name.capitalize() in response
            in_capitals |= name.upper() in response
    return {"correct": correct, "correct_paper": correct or in_capitals}


# --- 2. MMLU-Redux

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
    after_first = response.partition(marker)[2]
    between = after_first.partition(marker)[0]
    letter = re.sub("[^A-Z]", "", between)[:1]
    answer = letter if letter in ("A", "B", "C", "D") else None
    return {"correct": letter == "ABCD"[task["truth"]], "answer": answer}


# --- 3. MATH-500

MATH500_PROMPT = "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}."


def load_math500(data: Path) -> list[dict]:
    tasks = load(data, "test.json*", "problem", "answer")
    for number, task in enumerate(tasks, 1):
        task["answer"] = truth_text(task["answer"], f"{data}, row {number}")
    return tasks


def math500_check(task: dict, response: str) -> dict:
    """Compares the boxed answer with the reference: as normalised strings, and as math-verify expressions."""
    import math_verify

    boxed = last_boxed(response)
    if boxed is None:
        return {"correct": False, "correct_math_verify": False, "answer": None}
    truth = task["answer"]
    answer = normalise_math(boxed)
    correct = answer == normalise_math(truth)
    equal = correct
    if not correct:
        expressions = [math_verify.parse(f"\\boxed{{{side}}}") for side in (truth, boxed)]
        equal = math_verify.verify(*expressions)
    return {"correct": correct, "correct_math_verify": equal, "answer": answer}


# --- 4. GSM8K

GSM8K_PROMPT = "{question}\n\nReason step by step. End with a line that holds only #### and the final number."


def load_gsm8k(data: Path) -> list[dict]:
    """Loads the questions; exits with 2 if an answer has no `####`, as a response without a number would
    equal it."""
    tasks = load(data, "test.jsonl*", "question", "answer")
    for number, task in enumerate(tasks, 1):
        if not final_number(str(task["answer"])):
            fail(f"{data}, row {number}: field answer has no #### with a number behind it")
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


# --- 5. ZebraLogic

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
        cells.update(zebralogic_truth(task["solution"]))
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


def zebralogic_truth(solution: dict) -> list[str]:
    """Lists the right cells, house by house, stripped and in lower case."""
    cells = []
    for row in solution["rows"]:
        cells += [cell.lower().strip() for cell in row[1:]]
    return cells


def last_json_object(text: str) -> dict | None:
    """Returns the last complete {...} at top level, without its line breaks; None if that is not JSON."""
    last = "".join(top_level_braces(text)[-1:])
    try:
        return json.loads(last.replace("\n", "").replace("\r", ""))
    except (ValueError, RecursionError):
        return None


def zebralogic_check(task: dict, response: str) -> dict:
    """Compares every cell of the grid, stripped and in lower case; of a list, the first element counts."""
    found = last_json_object(response) or {}
    grid = found.get("solution")
    if not isinstance(grid, dict):
        return {"correct": False, "answer": None}

    attributes = task["solution"]["header"][1:]
    truth = zebralogic_truth(task["solution"])
    cells = []  # None: cannot be read
    for number in range(1, len(task["solution"]["rows"]) + 1):
        house = grid.get(f"House {number}")
        if not isinstance(house, dict):
            house = {}
        for attribute in attributes:
            cell = house.get(attribute)
            if isinstance(cell, list) and cell:
                cell = cell[0]
            if isinstance(cell, str):
                cells.append(cell.lower().strip())
            else:
                cells.append(None)
    return {"correct": cells == truth, "answer": tuple(cells)}


# --- 6. HumanEval

HUMANEVAL_PROMPT = (
    "Complete this Python function. Answer with the whole of it in one code block.\n\n```python\n{prompt}```"
)


def load_humaneval(data: Path) -> list[dict]:
    return load(data, "HumanEval.jsonl*", "task_id", "prompt", "test", "entry_point")


def humaneval_check(task: dict, text: str) -> dict:
    """Runs the prompt with its completion (of prose, the code block), then the test, in a sandbox."""
    *blocks, completion = code_runner.find_program(text, {task["entry_point"]})
    test = f"{task['test']}\ncheck({task['entry_point']})"
    output = code_runner.run([*blocks, f"{task['prompt']}\n{completion}"], test)
    return {
        "correct": output.status == "ok",
        "program_status": output.status,  # `status` is that of the generation
        "stderr": output.stderr[-300:],
    }
