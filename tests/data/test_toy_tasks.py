"""data/toy/tasks.py: sums and programs by hand, the teacher's slips, splits, words; gold and rewards agree."""

import json
import random

from transformers import AutoTokenizer

from data.toy import tasks
from data.toy.world import user_turn
from rewards import verified

SUM = user_turn("Hi! The budget is 20 dollars for steak, cod. The question is how much is left.")
SUM_ANSWERS = {"You have 7 left.": 1, "steak 8, so 7": 1, "7 or 8": 0, "": 0}  # response: right

STEPS = [("+", 3), ("*", 2)]
PROGRAM = user_turn("Hello! Take x, then add 3, then double it.")
TESTS = ["assert f(0) == 6", "assert f(1) == 8", "assert f(7) == 20", "assert f(-4) == -2"]
ANSWERS = {  # response: right
    "def f(x): return (x + 3) * 2": 1,
    "def f(x): return x * 2 + 6": 1,
    "def f(x): return 2 * (3 + x)": 1,
    "def f(x):\n    return (x + 3) * 2": 1,
    "def f(x): return x + 3 * 2": 0,
    "def f(x): return (x + 3) * 3": 0,
    "def f(x): return x": 0,
    "def f(x): return": 0,
    "def f(x): pass": 0,
    "def f(x) return (x + 3) * 2": 0,
    "def f(x): return ((x + 3) * 2": 0,
    "def g(x): return (x + 3) * 2": 0,
    "def f(x): return y": 0,
    "def f(x): return f(x)": 0,
    "x + 3 then (x + 3) * 2": 0,
    "": 0,
    "(" * 5000: 0,
    "def f(x): return " + "(" * 5000: 0,
}


def files():
    return tasks.write_files(tasks.Args(n_traces=300, n_prompts=200, n_tasks=200))


def test_teachers_by_hand():
    rng = random.Random(0)
    assert tasks.read_sum(SUM[0]["content"]) == (20, ["steak", "cod"])
    notes = "Budget 20. steak 8 leaves 12. cod 5 leaves 7."
    assert tasks.solve_sum((20, ["steak", "cod"]), 0.0, rng) == (notes, "You have 7 left.")
    assert tasks.solve_program(STEPS, 0.0, rng) == ("x + 3 then (x + 3) * 2", "def f(x): return (x + 3) * 2")
    assert tasks.solve_program(STEPS, 1.0, rng) == ("x + 3 then x + 3 * 2", "def f(x): return x + 3 * 2")
    program = [("*", 2), ("-", 1), ("*", 3)]
    assert tasks.solve_program(program, 0.0, rng)[1] == "def f(x): return (x * 2 - 1) * 3"
    # no brackets are needed
    program = [("*", 2), ("*", 3), ("-", 1)]
    assert tasks.solve_program(program, 0.0, rng)[1] == "def f(x): return x * 2 * 3 - 1"


def test_gold_of_sums():
    assert {response: tasks.gold(SUM, response) for response in SUM_ANSWERS} == SUM_ANSWERS
    for row in files()["sums_prompts"] + files()["sums_tasks"]:
        assert tasks.gold(row["messages"], row["answer"]) == 1


def test_gold_of_programs_and_the_sandbox_agree(needs_sandbox):
    """One reads the prompt and works the sum out, the other runs the program on the row's tests."""

    def by_tests(*responses: str) -> list[float]:
        row = {"id": "0", "status": "ok", "tests": TESTS, "entry_point": "f"}
        return verified.code([row | {"response": response} for response in responses])

    ran = by_tests(*ANSWERS)
    for (response, right), value in zip(ANSWERS.items(), ran, strict=True):
        assert tasks.gold(PROGRAM, response) == value == right, response
    # gold is stricter: answers by heart and by bits pass the four tests, but gold reads + - * only
    stricter = ["def f(x): return {0: 6, 1: 8, 7: 20, -4: -2}[x]", "def f(x): return x + 3 << 1"]
    assert by_tests(*stricter) == [1.0, 1.0]
    assert [tasks.gold(PROGRAM, response) for response in stricter] == [0, 0]

    taught = []
    for row in files()["code_prompts"][:4]:
        program = tasks.read_program(row["messages"][0]["content"])
        for slips in (0.0, 1.0):
            _, response = tasks.solve_program(program, slips, random.Random(1))
            taught.append(row | {"response": response, "status": "ok"})
    golds = [tasks.gold(row["messages"], row["response"]) for row in taught]
    assert verified.code(taught) == golds and 0 in golds and golds[::2] == [1.0] * 4


def test_splits_are_apart_and_the_tests_are_right():
    rows = files()
    assert json.dumps(rows) == json.dumps(files())
    for task, read in (("sums", str), ("code", tasks.read_program)):
        asked = set()
        for split in tasks.SPLITS:
            of_split = {repr(read(row["messages"][0]["content"])) for row in rows[f"{task}_{split}"]}
            assert not asked & of_split
            asked |= of_split

    for row in rows["code_prompts"] + rows["code_tasks"]:
        # every program is linear, so f(0) and f(1) say all
        f_0, f_1 = [int(test.rpartition("== ")[2]) for test in row["tests"][:2]]
        assert row["tests"] == [f"assert f({n}) == {f_0 + n * (f_1 - f_0)}" for n in (0, 1, 7, -4)]


def test_every_word_of_the_sums_is_in_the_toy_vocabulary():
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base")
    rows = files()
    for row in rows["sums_traces"] + rows["sums_tasks"]:
        text = "\n".join([row["messages"][0]["content"], row.get("thinking", ""), row.get("response", "")])
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"], text
