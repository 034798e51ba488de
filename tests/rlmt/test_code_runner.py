"""The reward `code`: which block of a response is the program, what tests are taken, and its values."""

import pytest
from conftest import shared
from test_rewards import row

from rewards import verified
from rlmt.code_runner import find_program, read_tests
from rlmt.data import read_rows

GOOD = "def f(x):\n    return x * x + 1"
TESTS = ["assert f(3) == 10", "assert f(2) == 5"]


@pytest.mark.parametrize(
    "response, program",
    [
        ("```python\n{f}\n```\nExample:\n```python\nprint(f([1, 2]))\n```", "{f}"),
        ("~~~python\n{f}\n~~~\nOutput:\n~~~\n5\n~~~", "{f}"),
        (
            "1. ```python\n   def f(x):\n       return 1\n   ```\n2. Output\n   ```\n   5\n   ```",
            "def f(x):\n    return 1",
        ),
        ("```\n{f}\n```\nor\n```\nf = lambda x: x\n```\n```\nf(3)\n```", "f = lambda x: x"),
        ("Not ~~~ this, nor ```that```.\n```\n{f}", "{f}"),
        ("{f}", "{f}"),
        # fences in a docstring: indented by more, of another kind, shorter
        (
            '```\ndef f(x):\n    """\n    ```\n    f(1)\n    ```\n    """\n```',
            'def f(x):\n    """\n    ```\n    f(1)\n    ```\n    """',
        ),
        ('```\n"""\n~~~\nf(1)\n~~~\n"""\n{f}\n```', '"""\n~~~\nf(1)\n~~~\n"""\n{f}'),
        ('````\n"""\n```\nf(1)\n```\n"""\n{f}\n````', '"""\n```\nf(1)\n```\n"""\n{f}'),
        ("```\n{f}  # ```\n```", "{f}  # ```"),
        # in a triple-quoted string, where CommonMark alone would end the block
        ('```\n"""\n```\nf(1)\n```\n"""\n{f}\n```\nDone.', '"""\n```\nf(1)\n```\n"""\n{f}'),
        ("1. ~~~\n   s = '''\n   ~~~\n   '''\n   f = 1\n   ~~~", "s = '''\n~~~\n'''\nf = 1"),
        ('"""\n  ```\n  f(1)\n  ```\n"""\n{f}', '"""\n  ```\n  f(1)\n  ```\n"""\n{f}'),
        ('No """ needed:\n```\n{f}\n```\nor\n~~~\n1\n~~~', "{f}"),
        # no fence: indented by four, within a docstring of a program without fences
        (
            'def f(x):\n    """\n    ```\n    f(1)\n    ```\n',
            'def f(x):\n    """\n    ```\n    f(1)\n    ```\n',
        ),
        ("<answer>\n```python title=f.py\n{f}\n`````  \n</answer>", "{f}"),
        ("> ```\n> f = 1\n\nA quotation is over.", "f = 1"),
    ],
)
def test_the_block_that_defines_what_is_tested_counts(response, program):
    found = find_program(response.replace("{f}", GOOD), {"f"})
    assert found[-1].removesuffix("\n") == program.replace("{f}", GOOD).removesuffix("\n")


CALLS = {"fn_name": "f", "inputs": [[3], [2]], "outputs": [10, 5]}
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
READER = "a, b = map(int, input().split())\nprint(a + b)"


def test_a_program_that_reads_stdin_is_found_before_its_output():
    assert find_program(f"```python\n{READER}\n```\nOutput:\n```\n3\n```", set())[-1] == f"{READER}\n"


def calls(*inputs_and_outputs):
    """calls([arguments], result, ...) of the function g."""
    return {
        "fn_name": "g",
        "inputs": list(inputs_and_outputs[::2]),
        "outputs": list(inputs_and_outputs[1::2]),
    }


CASES = [  # program, tests, entry_point, value with `partial`
    (GOOD, TESTS, "", 1.0),
    (f"import time\n{GOOD} + (x == 2 and time.sleep(99))", TESTS, "", 0.5),  # one test takes all the time
    (GOOD, ["try:\n    f('')\n    assert False\nexcept TypeError:\n    pass"], "", 1.0),
    (GOOD, ["assert f(1) == 2 == f(-1)", "assert f(1) != 3 and f(0)", "assert not f(1) - 2"], "", 1.0),
    (GOOD, ["for x in (3, 2, 3):\n    assert f(x) == 10"], "", 0.0),
    (
        "import collections\ndef g(a): return {1: collections.deque(a)}",
        ["assert g('a') == {1: ['a']}"],
        "",
        0.0,
    ),
    (
        "import numpy as np\ndef g(): return {np.int64(1): (np.bool_(1), 0.5)}",
        ["assert g() == {1: (True, 0.5)}"],
        "",
        1.0,
    ),
    ("def f(x): return 10", TESTS, "", 0.5),
    (f"{GOOD}\n\nif __name__ == '__main__':\n    print(f(int(input())))", TESTS, "f", 1.0),
    ("def g(a, b=2): return [a, b]", "def check(candidate):\n    assert candidate(1) == [1, 2]", "g", 1.0),
    ("class S:\n    def two(self, a): return {a}", "def check(c):\n    assert c(1) == {1}", "S().two", 1.0),
    ("def sum(a, b): return a + b", ["assert sum(2, 3) == 5"], "sum", 1.0),  # a builtin's name, as in MBPP
    ("def g(f): return f(3)", ["assert g(lambda x: x) == 3"], "", 1.0),
    ("from collections import Counter as c", ["assert c('aab') == {'a': 2, 'b': 1}"], "c", 1.0),
    ("from fractions import Fraction\ndef h(): return Fraction(1, 2)", ["assert h() == 0.5"], "", 1.0),
    ("import time\ndef loop(): time.sleep(99)", ["assert loop() is None"], "", 0.0),
    (
        f"import threading, time\n{GOOD}\nthreading.Thread(target=time.sleep, args=[99]).start()",
        TESTS,
        "",
        1.0,
    ),
    # calls
    (GOOD, CALLS, "", 1.0),
    (f"import time\n{GOOD} + (x == 2 and time.sleep(99))", CALLS, "", 0.5),
    ("class Solution:\n    def f(self, x): return 10", CALLS, "", 0.5),
    ("def g(*a): return {1: (a, None)}", calls([[2], "x"], {"1": [[[2], "x"], None]}), "", 1.0),
    ("seen = []\ndef g(a):\n    seen.append(a)\n    return seen", calls([1], [1]), "", 1.0),
    (
        "import numpy as np\ndef g(): return [np.int64(1), np.bool_(1), 0.5]",
        calls([], [1, True, 0.5]),
        "",
        1.0,
    ),
    ("from fractions import Fraction\ndef g(): return Fraction(1, 2)", calls([], 0.5), "", 1.0),
    ("def g(): return {1}", calls([], [1]), "", 0.0),
    ("def g(): print(end='no end of a line')", calls([], None), "", 1.0),
    ("def g(): print(end='[null]'); raise SystemExit", calls([], None), "", 0.0),
    # stdin and stdout
    (READER, SUMS, "", 1.0),
    ("import os, sys\na, b = os.read(0, 9).split()\nprint(f' {int(a) + 2} \\n')\nsys.exit()", SUMS, "", 0.5),
    (
        "def main():\n    print(sum(map(int, open(0).read().split())))\nif __name__ == '__main__': main()",
        SUMS,
        "",
        1.0,
    ),
    (
        "import threading\ndef main():\n    print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
        SUMS,
        "",
        1.0,
    ),
    (f"{READER}\nraise SystemExit(1)", SUMS, "", 0.0),
]


def test_values(needs_sandbox):
    rows = []
    for program, tests, entry_point, _ in CASES:
        rows.append(row(f"```python\n{program}\n```", tests=tests, entry_point=entry_point))
    values = [value for *_, value in CASES]
    assert verified.code(rows, partial=True, timeout=1.0) == values
    parts = [row for row, value in zip(rows, values) if value == 0.5]
    assert verified.code([rows[0], *parts], timeout=1.0) == [1.0] + [0.0] * len(parts)


def test_what_earlier_blocks_define_and_the_usual_imports_are_there(needs_sandbox):
    blocks = "```\nfrom math import prod\ndef two(): return 2\ninput()\n```\n```sh\npip install x\n```\n```\n{}\n```"
    method = "class Solution:\n    def f(self, x: List[int]) -> int: return prod(x) + two()"
    earlier = f"```\n{method}\n```\n```\ndef f(x): return 0.1 + 0.2\n```"
    rows = [
        row(blocks.format("def f(x): return prod([two(), x])"), tests=["assert f(3) == 6"]),
        row(blocks.format(method), tests={"fn_name": "f", "inputs": [[[2, 3]]], "outputs": [8]}),
        row(
            blocks.format("print(two() / float(input()))"),
            tests={"inputs": ["3"], "outputs": ["0.6666666666666667"]},
        ),
        row(earlier, tests={"fn_name": "f", "inputs": [[1]], "outputs": [0.3]}),
    ]
    assert verified.code(rows) == [1.0] * len(rows)


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "2\n", "output": "4\n"}],
        {"inputs": ["2\n"], "outputs": []},
        {"inputs": [2], "outputs": [4]},
        {"inputs": [2], "outputs": [4], "fn_name": "f"},
        ["assert f(3"],
        '["assert f(1) == 2"]',
        "# assert f(1) == 2",
        ["assert f(3)", "import math"],
        ["assert (f(3) == 6, 'wrong')"],
        ["assert 'text'"],
        ["assert True == True"],
        ["assert f(3) == 6 or 7"],
        {"inputs": ["\ud800"], "outputs": ["1"]},
        "def check(candidate):\n    assert candidate(1) == 2",
    ],
)
def test_tests_that_cannot_tell_programs_apart_are_refused(tests):
    with pytest.raises(ValueError):
        read_tests(row(tests=tests))


def test_reference_solutions_of_humaneval(needs_sandbox):
    rows = []
    for task in read_rows(shared("humaneval/HumanEval.jsonl.gz"))[::8]:
        program = f"```\n{task['prompt']}{task['canonical_solution']}\n```"
        rows.append(row(program, tests=task["test"], entry_point=task["entry_point"]))
    assert verified.code(rows) == [1.0] * len(rows)
