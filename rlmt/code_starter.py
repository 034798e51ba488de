"""Runs a program and its test inside the sandbox, then prints a secret word and what the test has reported.

sandbox.py starts a fresh interpreter with the text of this file. Nothing of this repository can be imported
here.
"""

import json
import os
import resource
from collections.abc import Set
from decimal import Decimal
from fractions import Fraction
from types import CodeType


def plain(value):
    """Returns the plain data that equals a value, such as a dict for a Counter; other objects as they are."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind, plain_kind in ((list, list), (tuple, tuple), (Set, set)):
        if isinstance(value, kind):
            return plain_kind(map(plain, value))
    if isinstance(value, Fraction | Decimal):
        return float(value)
    if hasattr(value, "item"):  # a number of NumPy's
        return value.item()
    return value


def run(program: CodeType, test: str) -> bytes:
    """Returns a line of number and value for each report. Raises what the program or the test raises."""
    lines = []

    def report(number: int, value: object) -> None:
        lines.append(f"{number} {plain(value)!a}\n")

    def call(name: str, arguments: list) -> object:
        """Returns the result of a function, or of a method of the class Solution, as JSON has it."""
        function = namespace.get(name)
        if "Solution" in namespace:
            function = getattr(namespace["Solution"](), name)
        return json.loads(json.dumps(function(*arguments), default=plain))

    # Without a __name__ it sees that of builtins, as in HumanEval's exec: a block under `== "__main__"` does
    # not run.
    namespace = {}
    exec(program, namespace)
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
program = compile(request["program"], "program.py", "exec")
if request["reads_stdin"]:
    os.write(report, read_line())
    os.dup2(report, 1)  # what it prints is its report
    exec(program, {"__name__": "__main__"})
else:
    # The word is read before the program runs and then lies on the interpreter's stack alone: no variable,
    # frame or open file of this process holds it.
    os.write(report, read_line() + run(program, request["test"]))
    os._exit(0)
