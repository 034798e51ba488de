"""Finds the program in a response, reads the tests of a row, and runs them: for `code` and for HumanEval.

A row's field `tests` has one of three forms:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       the program reads stdin
    {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}    a function, or a method of the class Solution
    ["assert f(1, 2) == 3"], or one text, with `entry_point` if it defines check(candidate)

What is expected does not enter the program's process. `assert f(3) == 6` becomes `__report__(0, f(3))` there,
and its value is compared with the 6 here: no program can read the 6, and none of its objects takes part in
the comparison. Reports count only if a random word is printed after the last one.

This hides literals after ==, and which of `assert f(x)` and `assert not f(x)` is meant; of HumanEval's 164
tasks 152 state nothing else. Any other condition is worked out in the program's process, as in the official
tools. There a hostile program can read it, and can return an object that equals, or is close to, whatever is
expected.
"""

import ast
import contextlib
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from markdown_it import MarkdownIt

from rlmt import sandbox

# Of CommonMark what decides which lines are fences. HTML is not: a tag on the line before would hide a fence.
MARKDOWN = MarkdownIt("zero").enable(["fence", "code", "list", "blockquote"])
TRIPLE_QUOTED = re.compile(r"(\"{3}|'{3}).*?\1", re.DOTALL)
FENCE_START = re.compile(r"^[ \t]*(?=```|~~~)", re.MULTILINE)
NO_FENCE = "\ue000"  # marks a line that only looks like a fence
# programs run in threads, and Python 3.11.2 mixes up how deep the threads' parsers are (SystemError)
PARSER = threading.Lock()


def code_blocks(response: str) -> list[str]:
    """Returns the fenced blocks of a response as CommonMark has them, or the whole of it.

    A block that is not closed goes to the end. A fence in a triple-quoted string is text of the program; but
    where a quotation mark is left over, as in a program that was cut off, nobody knows what is in a string.
    """
    marked = response
    if not re.search("\"{3}|'{3}", TRIPLE_QUOTED.sub("", response)):
        marked = TRIPLE_QUOTED.sub(_mark_fences, response)
    blocks = []
    for token in MARKDOWN.parse(marked):
        if token.type == "fence" and token.content.strip():
            blocks.append(token.content.replace(NO_FENCE, ""))
    return blocks or [response]


def _mark_fences(string: re.Match) -> str:
    return FENCE_START.sub(rf"\g<0>{NO_FENCE}", string[0])


def find_program(response: str, names: set[str]) -> str:
    """Returns the last code block that defines one of the names at top level, or without names the last that
    reads stdin; else the last block.

    An example or an output may follow the program.
    """
    blocks = code_blocks(response)
    is_program = re.compile(r"\binput\(|\bstdin\b|\bopen\(0")
    if names:
        name = rf"(?:{'|'.join(map(re.escape, names))})"
        is_program = re.compile(rf"(?m)^(?:(?:async +)?def|class) +{name}\b|^{name} *(?::[^\n]*)?=(?!=)")
    for block in reversed(blocks):
        if is_program.search(block):
            return block
    return blocks[-1]


class Example(NamedTuple):
    """A test of a program that reads stdin."""

    stdin: str
    stdout: str


def read_tests(row: dict) -> list[str] | list[Example]:
    """Returns the tests of a row: Python source with asserts, or examples of what is read and printed.

    Raises ValueError for tests that cannot be run, and for those that whatever runs would pass.
    """
    tests = row["tests"]
    try:
        if isinstance(tests, dict):
            return _read_pairs(**tests)
        if isinstance(tests, str):
            if row.get("entry_point"):
                tests += f"\ncheck({row['entry_point']})"
            tests = [tests]
        for test in tests:
            _check_calls(test)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"row {row['id']}: field tests: {error} (docs/rewards.md has its three forms)"
        ) from error
    return tests


def _read_pairs(inputs: list, outputs: list, fn_name: str | None = None) -> list[str] | list[Example]:
    """Reads inputs and outputs, named as in APPS; each call becomes an assert, so what it returns must be as
    it is: APPS has some in a list."""
    tests = []
    for given, expected in zip(inputs, outputs, strict=True):
        if not fn_name:
            tests.append(Example(given, expected))
            "".join(tests[-1])  # raises TypeError unless both are text
        elif isinstance(given, list):
            tests.append(f"assert __call__({fn_name!r}, {given!r}) == {expected!r}")
        else:
            raise TypeError(f"with fn_name an input is a list of arguments, not {given!r:.60}")
    if not tests:
        raise ValueError("there are none")
    return tests


def _check_calls(test: str) -> None:
    """Raises ValueError for a test without an assert, or with a function that it does not call."""
    with PARSER:
        statements = list(ast.walk(ast.parse(test)))
    if not any(isinstance(statement, (ast.Assert, ast.Raise)) for statement in statements):
        raise ValueError(f"{test[:60]!r} has no assert")
    for name in re.findall(r"^def (\w+)", test, re.MULTILINE):
        if test.count(name) == 1:
            raise ValueError(
                f"nothing calls {name}; for one text (no list) that defines check give the field entry_point"
            )


def tested_names(row: dict, tests: list[str] | list[Example]) -> set[str]:
    """Finds what a program must define: its entry point, else what the tests call; nothing if it reads
    stdin."""
    if isinstance(row["tests"], dict):
        fn_name = row["tests"].get("fn_name")
        return {"Solution", fn_name} if fn_name else set()
    entry_point = re.findall(r"^\w+", row.get("entry_point") or "")
    return set(entry_point or re.findall(r"\w+(?=\()", "\n".join(tests)))


class Reports(ast.NodeTransformer):
    """Turns asserts into reports; `expected` holds what each must be for the assert to be true."""

    def __init__(self):
        self.expected = []

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        condition = node.test
        if isinstance(condition, ast.Constant):  # `assert False` stands where a test must not come
            return node
        if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            return self.report(f"bool({ast.unparse(condition.operand)})", False)
        if isinstance(condition, ast.Compare) and isinstance(condition.ops[0], ast.Eq):
            with contextlib.suppress(ValueError, TypeError):  # not one literal
                [literal] = condition.comparators
                return self.report(ast.unparse(condition.left), ast.literal_eval(literal))
        return self.report(f"bool({ast.unparse(condition)})", True)

    def report(self, expression: str, expected: object) -> ast.AST:
        """Returns the statement that reports what an expression is."""
        number = len(self.expected)
        self.expected.append(expected)
        return ast.parse(f"__report__({number}, {expression})").body[0]

    def are_true(self, lines: str) -> bool:
        """Returns whether each report was made, and holds what is expected each time."""
        values = defaultdict(list)
        for line in lines.splitlines():
            number, _, value = line.partition(" ")
            values[number].append(value)
        for number, expected in enumerate(self.expected):
            reported = values[str(number)]
            if not reported or not all(_is_literal(value, expected) for value in reported):
                return False
        return True


def run(program: str, test: str | Example, timeout: float = 10.0) -> sandbox.Output:
    """Runs a program and a test, as sandbox.run does. The status is ok only if it has passed.

    Each assert must be reached, and be true each time. What is compared with a literal must be plain data or
    like it, as a Counter is like a dict. Of what is printed the words are compared.
    """
    if isinstance(test, Example):
        output = sandbox.run(program, "", timeout, test.stdin)
        has_passed = output.reports.split() == test.stdout.split()
    else:
        reports = Reports()
        with PARSER:
            reporting_test = ast.unparse(reports.visit(ast.parse(test)))
        output = sandbox.run(program, reporting_test, timeout)
        with PARSER:
            has_passed = reports.are_true(output.reports)
    if output.status == "ok" and not has_passed:
        output = output._replace(status="error")
    return output


def _is_literal(text: str, expected: object) -> bool:
    try:
        return ast.literal_eval(text) == expected
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def map_in_parallel(run_one: Callable, *arguments) -> Iterable:
    """Does as map, with a program per CPU that this process may use: with more, wall time would be short."""
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of an accelerated launch on this machine
    n_programs = max(1, len(os.sched_getaffinity(0)) // n_processes)
    with ThreadPoolExecutor(n_programs) as pool:
        return pool.map(run_one, *arguments)
