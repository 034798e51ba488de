"""data/toy/programs.py: programs by hand, the teacher's slips, splits, the base model's new words; gold and
the sandbox agree."""

import json
import random


from rewards import verified
from data.toy import programs

STEPS = [("+", 3), ("*", 2)]
MESSAGES = [{"role": "user", "content": "Hello! Take x, then add 3, then double it."}]
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


def rows():
    return programs.write_files(programs.Args(n_traces=300, n_prompts=200, n_tasks=200))


def test_the_teacher_by_hand():
    rng = random.Random(0)
    assert programs.solve(STEPS, 0.0, rng) == ("x + 3 then (x + 3) * 2", "def f(x): return (x + 3) * 2")
    assert programs.solve(STEPS, 1.0, rng) == ("x + 3 then x + 3 * 2", "def f(x): return x + 3 * 2")
    steps = [("*", 2), ("-", 1), ("*", 3)]
    assert programs.solve(steps, 0.0, rng)[1] == "def f(x): return (x * 2 - 1) * 3"
    # no brackets are needed
    assert programs.solve([("*", 2), ("*", 3), ("-", 1)], 0.0, rng)[1] == "def f(x): return x * 2 * 3 - 1"


def test_gold_and_the_sandbox_agree(needs_sandbox):
    """One reads the prompt and works the sum out, the other runs the program on the row's tests."""

    def by_tests(*responses: str) -> list[float]:
        row = {"id": "0", "status": "ok", "tests": TESTS, "entry_point": "f"}
        return verified.code([row | {"response": response} for response in responses])

    ran = by_tests(*ANSWERS)
    for (response, right), value in zip(ANSWERS.items(), ran, strict=True):
        assert programs.gold(MESSAGES, response) == value == right, response
    # gold is stricter: answers by heart and by bits pass the four tests, but gold reads + - * only
    stricter = ["def f(x): return {0: 6, 1: 8, 7: 20, -4: -2}[x]", "def f(x): return x + 3 << 1"]
    assert by_tests(*stricter) == [1.0, 1.0]
    assert [programs.gold(MESSAGES, response) for response in stricter] == [0, 0]

    taught = []
    for row in rows()["code_prompts"][:4]:
        steps = programs.read_prompt(row["messages"][0]["content"])
        for slips in (0.0, 1.0):
            _, response = programs.solve(steps, slips, random.Random(1))
            taught.append(row | {"response": response, "status": "ok"})
    golds = [programs.gold(row["messages"], row["response"]) for row in taught]
    assert verified.code(taught) == golds and 0 in golds and golds[::2] == [1.0] * 4


def test_splits_are_apart_and_the_tests_are_right():
    steps = []
    for split in rows().values():
        steps.append({repr(programs.read_prompt(row["messages"][0]["content"])) for row in split})
    traces, prompts, tasks = steps
    assert not traces & prompts and not prompts & tasks and not traces & tasks
    assert json.dumps(rows()) == json.dumps(rows())

    for row in rows()["code_prompts"] + rows()["code_tasks"]:
        # every program is linear, so f(0) and f(1) say all
        f_0, f_1 = [int(test.rpartition("== ")[2]) for test in row["tests"][:2]]
        assert row["tests"] == [f"assert f({n}) == {f_0 + n * (f_1 - f_0)}" for n in (0, 1, 7, -4)]
