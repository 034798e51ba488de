"""Finds the program in a response and reads the tests of a row, for the reward `code` and for HumanEval."""

import ast
import re

# CommonMark's: on a line of its own, maybe as the first thing in an item of a list
FENCE = re.compile(r"((?:\s*(?:[-*+]|\d+[.)])(?=\s))?\s*)(`{3,}|~{3,})(.*)")


def code_blocks(response: str) -> list[str]:
    """Returns the fenced blocks of a response, or the whole of it. A block that is not closed goes to the end."""
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
