"""The sandbox, its starter and the reports of tests, attacked; and what limits are left with
--unsafe-code."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlmt import sandbox
from rlmt.code_runner import Example, read_tests, run

ASSERTS = [
    "assert f(3) == 10",
    "def check(candidate):\n    assert candidate(0) == 1\n    assert not candidate(-1) == 3\ncheck(f)",
    "assert [f(x) for x in range(3)] == [1, 2, 5], 'one more than its square'",
]
CALLS = {"fn_name": "f", "inputs": [[3], [0], [-1]], "outputs": [10, 1, 2]}
GOOD = "def f(x):\n    return x * x + 1"
SEEK_WORD = """
import gc, os, re, sys
def look(value):
    found.update(re.findall(rb"[0-9a-f]{32}", bytes(str(value), "utf8")))
found = set()
frame = sys._getframe()
while frame:
    for value in [*gc.get_referents(frame), *frame.f_locals.values(), *frame.f_globals.values()]: look(value)
    frame = frame.f_back
for fd in range(256):
    try: os.set_blocking(fd, False); look(os.read(fd, 10**6))
    except OSError: pass
for word in found:
    for fd in range(256):
        try: os.write(fd, word + b"0 10\\n1 True\\n")
        except OSError: pass
os._exit(0)
"""
# returns an integer that stands in a test of its callers' frames, or in any object that gc knows
SEEK_EXPECTED = """
import gc, os, re, sys
def f(x):
    texts = []
    frame = sys._getframe()
    while frame:
        texts += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    found = re.findall(r"== *(-?\\d+|\\[[^]]*\\])", str(texts + gc.get_objects()))
    return eval(found[0]) if found else None
"""
JUMP = """
import sys
def f(x):
    def leave(frame, event, argument):
        if event == "line": frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)
        return leave
    sys.settrace(leave)
    sys._getframe(1).f_trace = leave
    return 0
"""
HOSTILE = {
    "word": SEEK_WORD,
    "word's variable": "import sys\nprint(word, request, sys.modules['__main__'].__dict__)",
    "expected": SEEK_EXPECTED,
    "jump": JUMP,
    "os._exit": "import os\nos._exit(0)",
    "os._exit inside": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "raise SystemExit(0)",
    "exec": "import os\nos.execv('/bin/true', ['true'])",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "eq": "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()",
    "eq of an int": "class Any(int):\n    __eq__ = lambda *a: True\ndef f(x): return [Any(3)]",
    "repr": "class Any:\n    __repr__ = lambda self: 'x == x'\ndef f(x): return Any()",
    "deep": "class Any:\n    __repr__ = lambda self: '-(' * 10**5\ndef f(x): return Any()",
    "builtins": "import builtins\nfor n in ('bool', 'map', 'repr', 'exec'): setattr(builtins, n, lambda *a: 10)\ndef f(x): return 0",
    "starter": "import sys\nmain = sys.modules['__main__']\nmain.run = main.plain = lambda *a, **k: 10\ndef f(x): return 0",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "fork": "import os\nos.fork()\nos._exit(0)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "disk": "for i in range(99): open(str(i), 'wb').write(bytes(15 << 20))",
    "output": "while True: print('x' * 10**6)",
    "report": "def f(x): return 'x' * 10**7",
    "deaf": "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "symlink": "import os\nos.symlink('TARGET', 'link')\nopen('link', 'w').write('x')",
    "read": "def f(x): return open('TARGET').read()",
    "syntax": "def f(x:",
    "surrogate": "def f(x): return '\ud800'",
    "nothing": "",
    "truncate": "import os, __main__\nos.ftruncate(__main__.report, 0)\nos._exit(1)",
    "close": "import os, __main__\nos.close(__main__.report)\nos.kill(os.getpid(), 9)",
}
EXHAUSTING = ("fork bomb", "memory", "disk", "deaf")  # before any test


def passed(program: str, tests, timeout: float = 10.0) -> list[bool]:
    """Runs the program with each test in turn."""
    found = []
    for test in read_tests({"id": 1, "tests": tests}):
        found.append(run([program], test, timeout).status == "ok")
    return found


def test_no_hostile_program_passes_or_harms(needs_sandbox, tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("untouched")
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "MEMORY_MB", 256)
    calls = read_tests({"id": 1, "tests": CALLS})
    calls = "\n".join(calls)
    asserts = "\n".join(ASSERTS)
    for test in (asserts, calls, Example("3\n", "10\n")):
        earned = {}
        for name, program in HOSTILE.items():
            is_alike = "def f" not in program if test is calls else name in EXHAUSTING
            if is_alike and test is not asserts:
                continue
            output = run([program.replace("TARGET", str(target))], test, timeout=1.0)
            if output.status in ("ok", "not started"):
                earned[name] = output
        assert earned == {}
        good = f"{GOOD}\nif __name__ == '__main__':\n    print(int(input()) ** 2 + 1)"
        assert run([good], test).status == "ok"
    assert target.read_text() == "untouched"
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_no_literal_can_be_read(needs_sandbox):
    """The limit that code_runner.py names, and a control of the attack above."""
    assert passed(HOSTILE["expected"], ["assert f(3) == 10 == 10"]) == [True]
    assert passed(HOSTILE["eq"], ["assert all(f(x) == 10 for x in [3])"]) == [True]


def test_no_object_of_the_program_takes_part_in_a_comparison(needs_sandbox):
    forms = ["10 == f(3)", "f(3) == 10 and f(0) == 1", "[f(3)] == [10]", "(f(3) == 10) is True", "f(3) > 9"]
    forms += ["abs(f(3) - 10.0) < 1e-6", "math.isclose(10, f(3))", "f(3) in (9, 10)", "not f(3) != 10"]
    forms += ["f(3) == x or f(0) is None"]
    tests = [f"import math\nx = 10\nassert {form}" for form in forms]
    assert passed(GOOD, ["\n".join(tests)]) == [True]
    program = "class Any(float):\n    __eq__ = __gt__ = lambda *a: True\n    __repr__ = lambda self: '10 .'\ndef f(x): return Any(5)"
    assert passed(program, tests) == [False] * len(tests)


def test_what_is_out_of_reach(needs_sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = (
            "import os, socket\n"
            "def connect():\n"
            f"    try: socket.create_connection(('127.0.0.1', {port}), 1)\n"
            "    except OSError: return False\n"
            "    return True\n"
            f"paths = ['/etc/passwd', '/proc', '/home', {str(tmp_path)!r}, {sandbox.__file__!r}]\n"
            "seen = [path for path in paths if os.path.exists(path)]\n"
        )
        tests = ["assert not connect()", "assert seen == []", "assert 'OPENAI_API_KEY' not in os.environ"]
        tests += ["assert os.getuid() != 0", "open('a', 'w').close(); assert os.listdir('.') == ['a']"]
        assert passed(program, tests) == [True] * 5


def test_nothing_outlives_a_caller_that_is_killed(needs_sandbox):
    mark = f"{time.monotonic_ns()}"
    program = f'import subprocess; subprocess.run(["/bin/sleep", "{mark}"])'
    code = (
        f"from rlmt import sandbox; sandbox.check_can_run(False); sandbox.run([{program!r}], '', timeout=60)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=Path(sandbox.__file__).parents[1])
    deadline = time.monotonic() + 60
    while not running(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running(mark)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(mark)


def running(mark: str) -> bool:
    """Whether a sleep of `mark` seconds is running."""
    lists = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return f"/bin/sleep {mark}" in lists.splitlines()


def test_unsafe_code_still_has_limits(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setattr(sandbox, "unsafe", True)
    assert passed(GOOD, CALLS) == [True] * 3
    for name in ("os._exit", "memory", "eq", "output"):
        assert not any(passed(HOSTILE[name], ASSERTS[:1], timeout=2.0)), name
    assert sandbox.run(["while True: pass"], "", timeout=0.5).status == "timeout"
    program = "import os\nfolder = os.getcwd()"
    assert passed(program, ["assert folder == os.environ['HOME'] and len(os.environ) < 9"]) == [True]
    mark = f"{time.monotonic_ns()}"
    sandbox.run([f"import subprocess\nsubprocess.Popen(['/bin/sleep', '{mark}'])"], "")
    assert not running(mark)


@pytest.mark.parametrize("installed", [True, False])
def test_a_machine_without_bubblewrap_is_said_in_one_line(tmp_path, exits, no_sandbox, installed):
    if installed:  # but it may make no namespace
        (tmp_path / "bwrap").write_text(
            "#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n"
        )
        os.chmod(tmp_path / "bwrap", 0o755)
    with pytest.raises(SystemExit):
        sandbox.check_can_run(False)
    sandbox.check_can_run(True)
