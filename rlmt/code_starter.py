"""Runs a program and its test inside the sandbox, then prints a secret word and what the test has reported.

sandbox.py starts a fresh interpreter with the text of this file. Nothing of this repository can be imported
here.
"""

import ast
import json
import os
import resource
from collections.abc import Mapping, Set

KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def plain(value):
    """Returns the plain data that equals a value, such as a dict for a Counter; other objects as they are."""
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind, plain_kind in ((list, list), (tuple, tuple), (Set, set)):
        if isinstance(value, kind):
            return plain_kind(map(plain, value))
    if hasattr(value, "as_integer_ratio") and not isinstance(value, int):  # a Fraction, a Decimal
        return float(value)
    if hasattr(value, "item"):  # a number of NumPy's
        return value.item()
    return value


def define(block: str, namespace: dict) -> None:
    """Runs the imports, functions and classes of a block, if it is Python."""
    try:
        module = ast.parse(block)
        module.body = [statement for statement in module.body if isinstance(statement, KEPT)]
        exec(compile(module, "block.py", "exec"), namespace)
    except Exception:
        pass  # the program may do without it


def run(blocks: list[str], namespace: dict) -> set[str]:
    """Runs a program after what the blocks before it define; returns the names of its own."""
    for block in blocks[:-1]:
        define(block, namespace)
    program = compile(blocks[-1], "program.py", "exec")
    exec(program, namespace)
    return set(program.co_names)


def run_test(blocks: list[str], test: str) -> bytes:
    """Returns a line of JSON for each report: its number, and its values as Python writes them.

    Raises what the program or the test raises.
    """
    lines = []

    def report(number: int, *values: object) -> None:
        lines.append(json.dumps([number, *map(ascii, map(plain, values))]) + "\n")

    def call(name: str, arguments: list) -> object:
        """Returns the result of a function, or of a method of the class Solution, as JSON has it."""
        function = namespace.get(name)
        if "Solution" in names:
            function = getattr(namespace["Solution"](), name)
        return json.loads(json.dumps(function(*arguments), default=plain))

    # Without a __name__ it sees that of builtins, as in HumanEval's exec: a block under `== "__main__"` does
    # not run.
    namespace = {}
    names = run(blocks, namespace)
    namespace |= {"__report__": report, "__call__": call}
    exec(test, namespace)
    return "".join(lines).encode()


# Unbuffered, so that what follows the two lines stays in the pipe for the program.
read_line = open(0, "rb", buffering=0, closefd=False).readline
request = json.loads(read_line())
user = request["user"]
if user:
    os.chmod(".", 0o777)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
for name, value in request["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
report = request["report"]
os.write(report, b"started ")
if request["reads_stdin"]:
    os.write(report, read_line())
    os.dup2(report, 1)  # what it prints is its report
    run(request["blocks"], {"__name__": "__main__"})
else:
    # The word is read before the program runs and then lies on the interpreter's stack alone: no variable,
    # frame or open file of this process holds it.
    os.write(report, read_line() + run_test(request["blocks"], request["test"]))
    os._exit(0)
