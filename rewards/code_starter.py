"""Runs a program and its tests inside the sandbox, then prints a secret word and a verdict for each test.

sandbox.py starts a fresh interpreter with the text of this file. Nothing of this repository can be imported here.
"""

import ast
import builtins
import json
import os
import resource
import sys
import traceback


def trusted(value):
    """Returns the value; raises TypeError if the program's own `__eq__` would decide a comparison with it."""
    parts = ()
    if isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    for part in parts:
        trusted(part)
    compare = type(value).__eq__
    is_of_c = type(compare) is type(object.__eq__)
    # a module's namespace has a __name__, the program's has none
    if not is_of_c and "__name__" not in getattr(compare, "__globals__", ()):
        raise TypeError(f"{type(value)} compares by code of the program")
    return value


class TrustComparisons(ast.NodeTransformer):
    """Passes both sides of each comparison through `trusted`."""

    def visit_Compare(self, node):
        self.generic_visit(node)
        sides = []
        for side in (node.left, *node.comparators):
            sides.append(ast.Call(ast.Name("trusted", ast.Load()), [side], []))
        node.left, *node.comparators = sides
        return ast.fix_missing_locations(node)


def run(program: str, tests: list[str], entry_point: str) -> bytes:
    """Returns 1 (passed) or 0 for each test. Raises what the program raises."""
    names = set()
    compiled_tests = []
    for test in tests:
        tree = ast.parse(test)
        names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        compiled_tests.append(compile(TrustComparisons().visit(tree), "tests", "exec"))

    # Whatever the program replaces, its tests see the originals: of builtins, and of the library that they name.
    execute = exec
    originals = dict(vars(builtins))
    fixed = {"trusted": trusted, "__builtins__": originals}
    contents = []
    for name in names & sys.stdlib_module_names - {entry_point}:
        fixed[name] = __import__(name)
        contents.append((vars(fixed[name]), tuple(vars(fixed[name]).items())))

    # Without a __name__ it sees that of builtins, as in HumanEval's exec: a block under `== "__main__"` does not run.
    namespace = {}
    execute(compile(program, "program.py", "exec"), namespace)

    for module, entries in contents:
        module.update(entries)
    tested = {}
    for name, value in namespace.items():
        if name == entry_point or name not in originals:
            tested[name] = value
    tested |= fixed
    verdicts = b""
    for test in compiled_tests:
        try:
            execute(test, tested)
            verdicts += b"1"
        except BaseException:
            traceback.print_exc(limit=-1)
            verdicts += b"0"
    sys.stderr.flush()
    return verdicts


request = json.loads(sys.stdin.buffer.readline())
user = request["user"]
if user:
    os.chmod(".", 0o777)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
for name, value in request["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
os.write(request["report"], b"started ")
# The word is read before the program runs and then lies on the interpreter's stack alone: no variable, frame or open
# file of this process holds it.
os.write(request["report"], sys.stdin.buffer.read() + run(**request["task"]))
os._exit(0)
