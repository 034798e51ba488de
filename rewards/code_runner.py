"""Finds the program in a response, reads the tests of a row, and says which have passed: for `code` and for
HumanEval.

    result = run("def f(x): return 2 * x", ["assert f(3) == 6"])  # .passed .status .stderr

What an assert expects does not enter the program's process. `assert f(3) == 6` becomes `__report__(0, f(3))`
there, and its value is compared with the 6 here: no program can read the 6, and none of its objects takes
part in the comparison. Reports count only if a random word is printed after the last one.

This hides literals after ==, and which of `assert f(x)` and `assert not f(x)` is meant; of HumanEval's 164
tasks 152 state nothing else. Any other condition is worked out in the program's process, as in the official
tools. There a hostile program can read it, and can return an object that equals, or is close to, whatever is
expected.
"""

import ast
import contextlib
import re
from collections import defaultdict
from typing import NamedTuple

from rewards import sandbox

# CommonMark's: on a line of its own, maybe as the first thing in an item of a list
FENCE = re.compile(r"((?:\s*(?:[-*+]|\d+[.)])(?=\s))?\s*)(`{3,}|~{3,})(.*)")


def code_blocks(response: str) -> list[str]:
    """Returns the fenced blocks of a response, or the whole of it. A block that is not closed goes to the
    end."""
    blocks = []
    is_open = False
    for line in response.split("\n"):
        fence = FENCE.fullmatch(line)
        if not is_open:
            if fence and not (fence[2][0] == "`" and "`" in fence[3]):
                is_open = True
                indent = len(fence[1])
                opening = fence[2]
                blocks.append([])
            continue
        # a fence in a docstring is indented by more, or of another kind or length
        closes = (
            fence and fence[2].startswith(opening) and not fence[3].strip() and len(fence[1]) <= indent + 3
        )
        if closes:
            is_open = False
        else:
            blocks[-1].append(re.sub(rf"^\s{{0,{indent}}}", "", line))
    return ["\n".join(block) for block in blocks] or [response]


def find_program(response: str, names: set[str]) -> str:
    """Returns the last code block that defines one of the names at top level, else the last block.

    An example or an output may follow the program.
    """
    blocks = code_blocks(response)
    name = rf"(?:{'|'.join(map(re.escape, names))})"
    definition = re.compile(rf"(?m)^(?:(?:async +)?def|class) +{name}\b|^{name} *(?::[^\n]*)?=(?!=)")
    for block in reversed(blocks):
        if names and definition.search(block):
            return block
    return blocks[-1]


def read_tests(row: dict) -> list[str]:
    """Returns the tests of a row as Python source: its list, or its text and a call of the `check` in it.

    Raises ValueError for tests that cannot be run, and for those that whatever runs would pass.
    """
    tests = row["tests"]
    where = f"row {row['id']}: field tests"
    if isinstance(tests, str):
        call = ""
        if row.get("entry_point"):
            call = f"\ncheck({row['entry_point']})"
        tests = [tests + call]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError(
            f"{where} must be Python text or a list of such texts, not {str(tests)[:60]!r}; input and output as in "
            '{"input": ..., "output": ...} are not run, write asserts about a function'
        )
    try:
        trees = [ast.parse(test) for test in tests]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{where} is not Python: {error}") from error
    if not _can_fail(trees):
        raise ValueError(
            f"{where} has no assert that would run; a text that defines check needs the field entry_point"
        )
    return tests


def _can_fail(trees: list[ast.Module]) -> bool:
    """Tells whether there is an assertion outside of functions that nobody calls."""
    called = set()
    statements = []
    for tree in trees:
        statements += tree.body
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name not in called:
            continue
        for node in ast.walk(statement):
            name = getattr(node, "attr", getattr(node, "id", ""))  # as in numpy.testing.assert_allclose
            if isinstance(node, ast.Assert | ast.Raise) or name.startswith("assert"):
                return True
    return False


def tested_names(tests: list[str], entry_point: str) -> set[str]:
    """Finds what a program must define: its entry point, else what the tests use and do not define."""
    if re.match(r"\w", entry_point):
        return set(re.findall(r"^\w+", entry_point))
    used = set()
    defined = set()
    for test in tests:
        for node in ast.walk(ast.parse(test)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
    return used - defined


class Result(NamedTuple):
    passed: list[bool]
    """One for each test; all False unless the last one came to its end."""
    status: str
    """As in sandbox.Output."""
    stderr: str


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


def run(program: str, tests: list[str], timeout: float = 10.0) -> Result:
    """Runs a program and its tests, as sandbox.run does.

    A test has passed if it comes to its end, and each of its asserts was reached and was true each time. What
    is compared with a literal must be plain data or like it, as a Counter is like a dict.
    """
    reports = Reports()
    sources = []
    numbers = []  # of each test's reports
    for test in tests:
        first = len(reports.expected)
        tree = reports.visit(ast.parse(test))
        tree.body.append(reports.report("True", True))  # it comes to its end
        sources.append(ast.unparse(tree))
        numbers.append(range(first, len(reports.expected)))

    output = sandbox.run(program, sources, timeout)
    reported = defaultdict(list)
    for line in output.reports.splitlines():
        number, _, value = line.partition(" ")
        reported[number].append(value)
    holds = []
    for number, expected in enumerate(reports.expected):
        values = reported[str(number)]
        holds.append(values != [] and all(_is_literal(value, expected) for value in values))
    passed = []
    for test_numbers in numbers:
        passed.append(all(holds[number] for number in test_numbers))
    return Result(passed, output.status, output.stderr)


def _is_literal(text: str, expected: object) -> bool:
    try:
        return ast.literal_eval(text) == expected
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
