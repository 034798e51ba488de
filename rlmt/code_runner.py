"""Finds the program in a response, reads the tests of a row, and runs them: for `code` and for HumanEval.

A row's field `tests` has one of three forms:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       the program reads stdin
    {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}    a function, or a method of the class Solution
    ["assert f(1, 2) == 3"], or one text, with `entry_point` if it defines check(candidate)

What is expected does not enter the program's process. `assert abs(f(3) - 6) < 0.1` becomes
`__report__(0, f(3))` there, and the rest is worked out here, on plain data: no program can read the 6, and
none of its objects takes part in a comparison. Reports count only if a random word is printed after the last
one. Numbers are equal to nine digits, so that 0.1 + 0.2 is 0.3.

What has a name in the test (`x = 6`) or is an argument of another function, such as all(...), enters the
program's process, as in the official tools. There a hostile program can read it.
"""

import ast
import json
import math
import operator
import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest.mock import ANY

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


def find_program(response: str, names: set[str]) -> list[str]:
    """Returns the code blocks up to the program, as sandbox.run takes them.

    The program is the last block that defines one of the names at top level, or without names the last that
    reads stdin; else the last block. An example or an output may follow it.
    """
    blocks = code_blocks(response)
    is_program = re.compile(r"\binput\(|\bstdin\b|\bopen\(0")
    if names:
        name = rf"(?:{'|'.join(map(re.escape, names))})"
        is_program = re.compile(rf"(?m)^(?:(?:async +)?def|class) +{name}\b|^{name} *(?::[^\n]*)?=(?!=)")
    for end in range(len(blocks), 0, -1):
        if is_program.search(blocks[end - 1]):
            return blocks[:end]
    return blocks


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
            "".join(tests[-1]).encode()  # raises an error unless both are text
        elif isinstance(given, list):
            tests.append(f"assert __call__({fn_name!r}, {given!r}) == {expected!r}")
        else:
            raise TypeError(f"with fn_name an input is a list of arguments, not {given!r:.60}")
    if not tests:
        raise ValueError("there are none")
    return tests


def _check_calls(test: str) -> None:
    """Raises ValueError for a test that cannot fail, or with a function that it does not call."""
    reports = Reports()
    with PARSER:
        statements = list(ast.walk(reports.visit(ast.parse(test))))
    can_fail = False
    for statement in statements:
        can_fail |= isinstance(statement, ast.Raise)
        can_fail |= isinstance(statement, ast.Assert) and not statement.test.value  # assert False
    for condition in reports.conditions:
        if condition.can_fail():
            can_fail = True
        elif condition.reported:
            raise ValueError(f"an assert of {ast.unparse(condition.reported[0])[:60]} cannot fail")
    if not can_fail:
        raise ValueError(f"{test[:60]!r} has no assert that can fail")
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


OPERATIONS = {  # on plain data
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    ast.Sub: operator.sub,
    "abs": abs,
    "math.isclose": math.isclose,
}
COLLECTORS = {ast.And: all, ast.Or: any, ast.List: list, ast.Tuple: tuple}  # of any number of parts


class Condition:
    """What an assert demands of the values of those parts of it that only a program can work out."""

    def __init__(self, node: ast.expr):
        self.reported = []
        self._value = self._split(node)

    def _split(self, node: ast.expr) -> Callable[[list], object]:
        """Returns the value of an expression as a function of the reported values; adds to `reported`."""
        try:
            literal = ast.literal_eval(_shorten(ast.unparse(node)))
            return lambda values: literal
        except (SyntaxError, TypeError, ValueError):
            key = None
        match node:
            case ast.BinOp(left, kind, right) | ast.Compare(left, [kind], [right]):
                key, parts = type(kind), [left, right]
            case ast.BoolOp(kind, parts):
                key = type(kind)
            case ast.UnaryOp(kind, part):
                key, parts = type(kind), [part]
            case ast.List(parts) | ast.Tuple(parts):
                key = type(node)
            case ast.Call(name, parts, []) if not all(isinstance(part, ast.Constant) for part in parts):
                key = ast.unparse(name)
        if key in OPERATIONS or key in COLLECTORS:
            operands = list(map(self._split, parts))
            if key in COLLECTORS:
                return lambda values: COLLECTORS[key](operand(values) for operand in operands)
            return lambda values: OPERATIONS[key](*[operand(values) for operand in operands])
        index = len(self.reported)
        self.reported.append(node)
        return lambda values: values[index]

    def holds(self, values: list) -> bool:
        try:
            return bool(self._value(values))
        except Exception:  # values of another kind
            return False

    def can_fail(self) -> bool:
        """Returns whether it depends on the values. The first ones equal nothing, and then each equals all."""
        n = len(self.reported)
        samples = [[object() for _ in range(n)]]
        samples += [[value] * n for value in (ANY, None, True, False)]
        return not all(map(self.holds, samples))


class Reports(ast.NodeTransformer):
    """Turns asserts into reports; `conditions` holds what each demands."""

    def __init__(self):
        self.conditions = []

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant):  # `assert False` stands where a test must not come
            return node
        condition = Condition(node.test)
        arguments = [str(len(self.conditions)), *map(ast.unparse, condition.reported)]
        self.conditions.append(condition)
        return ast.parse(f"__report__({', '.join(arguments)})").body[0]

    def are_true(self, lines: str) -> bool:
        """Returns whether each report was made, and meets its condition each time."""
        reached = set()
        try:
            for line in lines.strip().splitlines():
                number, *texts = json.loads(line)
                if not self.conditions[number].holds(list(map(_read_value, texts))):
                    return False
                reached.add(number)
        except Exception:  # a program can write anything
            return False
        return len(reached) == len(self.conditions)


def _read_value(text: str) -> object:
    try:
        return ast.literal_eval(_shorten(text))
    except Exception:  # what is no plain data, such as infinity, equals its like, and has no order
        return {"text": text}


def _shorten(text: str) -> str:
    """Rounds decimal numbers to twelve digits, as 0.1 + 0.2 is 0.3."""
    return re.sub(r"\d+\.\d+(?:e[-+]\d+)?", lambda number: f"{float(number[0]):.12g}", text)


def run(blocks: list[str], test: str | Example, timeout: float = 10.0) -> sandbox.Output:
    """Runs a program and a test, as sandbox.run does. The status is ok only if it has passed.

    Each assert must be reached, and be true each time. What is compared must be plain data or like it, as a
    Counter is like a dict. Of what is printed the words are compared.
    """
    if isinstance(test, Example):
        output = sandbox.run(blocks, "", timeout, test.stdin)
        has_passed = _shorten(output.reports).split() == _shorten(test.stdout).split()
    else:
        reports = Reports()
        with PARSER:
            reporting_test = ast.unparse(reports.visit(ast.parse(test)))
        output = sandbox.run(blocks, reporting_test, timeout)
        with PARSER:
            has_passed = reports.are_true(output.reports)
    if output.status == "ok" and not has_passed:
        output = output._replace(status="error")
    return output


def map_in_parallel(run_one: Callable, *arguments) -> Iterable:
    """Does as map, with a program per CPU that this process may use: with more, wall time would be short."""
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of an accelerated launch on this machine
    n_programs = max(1, len(os.sched_getaffinity(0)) // n_processes)
    with ThreadPoolExecutor(n_programs) as pool:
        return pool.map(run_one, *arguments)
