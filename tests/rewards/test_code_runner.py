"""The reward `code`: ordinary programs, hostile ones under every barrier, and which block of a response is the program."""

import gzip
import json
import os

import pytest
from test_rewards import near, row, shared

from rewards import code_runner, sandbox, verified

TESTS = [
    "assert f(3) == 10",
    "assert abs(f(2) - 5) < 1e-6 and math.isclose(f(0), 1)",
    "assert isinstance(f(1), int) and all(f(x) == x * x + 1 for x in range(4))",
]
SEEK = """
def seek(texts):
    import re
    for text in texts:
        for bits in re.findall(r"assert f\\((\\d)\\) == (\\d+)", str(text)[:10**6]): known[int(bits[0])] = int(bits[1])
known = {}
def f(x): return known.get(x, 0)
"""
HOSTILE = {
    # objects that please every comparison
    "eq": "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Any()",
    "eq of an int": "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Any(3)",
    "all operators": "class Any(int):\n    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *a: True\n    __sub__ = __abs__ = __float__ = lambda *a: 0\ndef f(x): return Any()",
    "bool": "class Any:\n    def __bool__(self): return True\n    def __eq__(self, other): return self\ndef f(x): return Any()",
    "class that lies": "class Any:\n    __class__ = int\n    def __eq__(self, other): return True\ndef f(x): return Any()",
    "metaclass": "class M(type):\n    def __eq__(self, other): return True\n    __hash__ = type.__hash__\nclass f(metaclass=M):\n    def __init__(self, x): pass",
    "reduce": "import os\nclass Any:\n    def __reduce__(self): return (os._exit, (0,))\ndef f(x): return Any()",
    "reduce of an int": "import builtins\nclass Any(int):\n    def __reduce__(self): return (builtins.eval, ('print(1)',))\ndef f(x): return Any()",
    "arithmetic": "class Any:\n    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __neg__ = __abs__ = __round__ = __pow__ = __xor__ = lambda *a: 0\n    __float__ = lambda a: 0.0\n    __bool__ = lambda a: False\n    __len__ = __int__ = __index__ = lambda a: 0\ndef f(x): return Any()",
    "arithmetic without end": "class Any:\n    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __neg__ = __abs__ = __round__ = __pow__ = __lt__ = lambda *a: Any()\ndef f(x): return Any()",
    "number of NumPy's that lies": "class Any:\n    ndim, dtype = 0, float\n    __eq__ = __lt__ = lambda *a: True\n    item = lambda self: Lie(3)\nAny.__module__ = 'numpy'\nclass Lie(int):\n    __eq__ = __lt__ = lambda *a: True\n    __int__ = lambda self: self\ndef f(x): return Any()",
    "lying repr": "class Any(int):\n    def __repr__(self): return '10'\n    __str__ = __repr__\ndef f(x): return Any()",
    # out before the tests
    "os._exit": "import os\nos._exit(0)",
    "os._exit inside": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit inside": "import sys\ndef f(x): sys.exit(0)",
    "raise SystemExit": "def f(x): raise SystemExit(0)",
    "exec true": "import os\nos.execv('/bin/true', ['true'])",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)",
    "threads": "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\ndef f(x): return 0",
    "exception by name": "def f(x): raise NotImplementedError('?')",
    "stop iteration": "def f(x): raise StopIteration",
    # what the tests are made of
    "assert": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\n__debug__1 = 0\ndef f(x): raise AssertionError",
    "builtins": "import builtins\nfor n in ('abs', 'all', 'isinstance', 'range', 'print'): setattr(builtins, n, lambda *a: 0)\ndef f(x): return 0",
    "own abs, all": "abs = lambda x: 0\nall = isinstance = lambda *a: True\nclass math: isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
    "modules": "import sys, math\nmath.isclose = lambda *a: True\nsys.modules['math'] = sys.modules['ast'] = sys.modules['pickle'] = None\ndef f(x): return 0",
    "pickle": "import pickle\npickle.Pickler.dump = pickle.loads = lambda *a: True\npickle._Pickler.dump = None\ndef f(x): return 0",
    "own __main__": "import sys\nsys.modules['__main__'].__dict__.update(tests=[], marks='111', ready=1)\ndef f(x): return 0",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return 0",
    "dunder": "def f(x): return 0\nf.__eq__ = f.__call__ = lambda *a: True\nf.__code__ = (lambda x: -1).__code__",
    # looking for the tests
    "frames": SEEK
    + "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame: seek([frame.f_locals, frame.f_globals, frame.f_code.co_consts]); frame = frame.f_back\n    return known.get(x, 0)",
    "inspect": SEEK + "import inspect\nfor s in inspect.stack(): seek([s.frame.f_locals, s.code_context])",
    "gc": SEEK
    + "import gc\ndef f(x):\n    seek(o for o in gc.get_objects() if isinstance(o, (str, list, dict, tuple)))\n    return known.get(x, 0)",
    "stdin": SEEK
    + "import os, sys\nseek([sys.stdin.read() if sys.stdin else ''])\nfor fd in range(64):\n    try: os.set_blocking(fd, False); seek([os.pread(fd, 10**6, 0)])\n    except OSError: pass",
    "own memory": SEEK
    + "import ctypes, re\ntry:\n    for line in open('/proc/self/maps'):\n        a, b = (int(n, 16) for n in line.split()[0].split('-'))\n        if 'rw' in line and b - a < 1 << 28: seek([ctypes.string_at(a, b - a)])\nexcept OSError: pass",
    "parent": SEEK
    + "import os\nfor p in ('cmdline', 'environ', 'mem', 'maps', 'fd/0', 'fd/1', 'stack', 'syscall'):\n    try: seek([open(f'/proc/{os.getppid()}/{p}', 'rb').read()])\n    except OSError: pass",
    "files": SEEK
    + "import os\nfor folder in ('/', '/tmp', os.getcwd(), '/proc/self/fd', '/proc/self/cwd'):\n    for r, d, fs in list(os.walk(folder))[:50]:\n        for n in fs[:50]:\n            try: seek([open(os.path.join(r, n), 'rb', 0).read(10**5) if os.path.isfile(os.path.join(r, n)) else ''])\n            except OSError: pass",
    # writing the verdict, or another answer
    "all fds": "import os\nfor fd in range(256):\n    for text in (b'ready\\n1\\n1\\n1\\n', b'started ended'):\n        try: os.set_blocking(fd, False); os.write(fd, text)\n        except OSError: pass\ndef f(x): return 0",
    "stdout": "import sys\nsys.stdout.write('1\\n1\\n1\\n'); sys.__stderr__.write('1\\n1\\n1\\n')\ndef f(x): print(1); return 0",
    "stdout of the parent": "import os\nfor fd in range(256):\n    try: os.write(os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_WRONLY), b'\\n1\\n1\\n1\\n')\n    except OSError: pass\ndef f(x): return 0",
    "forged answers": "import os, pickle\nfor fd in range(3, 256):\n    try: os.set_blocking(fd, False); os.write(fd, pickle.dumps((True, [])) * 500)\n    except OSError: pass\ndef f(x): return True",
    "pickle of os.system": "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'cos\\nsystem\\n(S\\'echo 1\\'\\ntR.' * 9)\n    except OSError: pass",
    "pickle that changes int": "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'cbuiltins\\nint\\n(N}S\\'__eq__\\'\\ncbuiltins\\nlist\\nstb.' * 9)\n    except OSError: pass",
    "pickle of a giant": "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\x8e' + b'\\xff' * 7 + b'\\x7f')\n    except OSError: pass",
    "object without number": "import os, time\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\x80\\x02(NQNt.' * 60)\n    except OSError: pass\ntime.sleep(9)",
    "object as number": "import os, time\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\x80\\x02(K\\x01QQNt.' * 60)\n    except OSError: pass\ntime.sleep(9)",
    "object that is appended to": "import os, time\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\x80\\x02(K\\x01QNt.' + b'\\x80\\x02K\\x01QK\\x02a.' * 60)\n    except OSError: pass\ntime.sleep(9)",
    "object that is set": "import os, time\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\x80\\x05(K\\x01QNt.' + b'\\x80\\x05K\\x01QK\\x02\\x96\\x01' + bytes(8) + b'\\x98s.' * 60)\n    except OSError: pass\ntime.sleep(9)",
    "object with a state": "import os, time\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\x80\\x02(K\\x01Q}X\\x07\\0\\0\\0_numberK\\x02sbNt.' * 60)\n    except OSError: pass\ntime.sleep(9)",
    "deep list": "def f(x):\n    deep = []\n    for _ in range(10**5): deep = [deep]\n    return deep",
    "endless number": "def f(x): return 10 ** (10 ** 8)",
    # the other process
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kill all": "import os\ndef f(x): os.kill(-1, 9)",
    "signals": "import os, signal\nfor s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT, signal.SIGPIPE): os.kill(os.getppid(), s)\ndef f(x): return 0",
    "stop the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\ndef f(x): return 0",
    "limits of the parent": "import os, resource\nfor limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE): resource.prlimit(os.getppid(), limit, (0, 0))\ndef f(x): return 0",
    "ptrace": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ngot = libc.ptrace(16, os.getppid(), 0, 0)\ndef f(x): return 10 if got == 0 else 0",
    "pidfd_getfd": "import ctypes, os\nlibc = ctypes.CDLL(None)\npidfd = libc.syscall(434, os.getppid(), 0)\ntry: os.write(libc.syscall(438, pidfd, 1, 0), b'\\n1\\n1\\n1\\n')\nexcept OSError: pass\ndef f(x): return 0",
    # resources
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "endless loop": "def f(x):\n    while True: pass",
    "endless output": "while True: print('1\\n' * 10000)",
    "endless list": "def f(x):\n    while True: yield 1",
    "deaf": "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "big files": "for i in range(9): open(str(i), 'wb').write(bytes(1 << 25))",
    # a way out
    "socket": "import socket\ns = socket.create_connection(('127.0.0.1', PORT), timeout=2)\ns.send(b'x')\ndef f(x): return 10",
    "symlink": "import os\nos.symlink('TARGET', 'link')\nopen('link', 'w').write('x')\nos.chmod('link', 0o777)",
    "hard link, rename": "import os\nos.link('TARGET', 'hard')\nos.rename('TARGET', 'moved')",
    "write outside": "open('TARGET', 'w').write('x')",
    # no program
    "syntax": "def f(x:",
    "nothing": "",
    "nul": "def f(x): return '\0'",
    "surrogate": "def f(x): return '\ud800'",
    "no f": "g = 1",
    "recursion": "def f(x): return f(x)",
    "quotes": "'''\"\"\"\\",
    "f is data": "f = 10",
}
SLOW = {
    "object without number",
    "object as number",
    "object that is appended to",
    "object that is set",
    "object with a state",
    "fork bomb",
    "memory",
    "endless loop",
    "endless output",
    "deaf",
    "stop the parent",
    "endless number",
}
GOOD = "def f(x):\n    print('fine')\n    return x * x + 1"


def block(program, **fields):
    return row(f"Here:\n```python\n{program}\n```\nDone.", **{"tests": TESTS, **fields})


@pytest.fixture
def under(monkeypatch):
    """under(barrier): `code` from now on runs under it; skips where it does not work."""

    def under(barrier):
        run = lambda program, timeout=10.0: sandbox._run(program, barrier, os.geteuid() == 0, timeout)
        try:
            works = run("pass").ok
        except OSError:
            works = False
        if not works:
            pytest.skip(f"no {barrier} here")
        monkeypatch.setattr(sandbox, "run", run)

    return under


def test_no_hostile_program_is_rewarded_or_gets_out(tmp_path):
    """All at once and then good ones, as a step of training has them. Not even a share of the tests, and no way to None."""
    import socket

    target = tmp_path / "target"
    target.write_text("untouched")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        fill = lambda p: p.replace("PORT", str(server.getsockname()[1])).replace("TARGET", str(target))
        quick, slow = ([name for name in HOSTILE if (name in SLOW) == s] for s in (False, True))
        values = verified.code(
            [block(fill(HOSTILE[name])) for name in quick] + [block(f"{GOOD}  # {n}") for n in range(6)],
            partial=True,
        )
        earned = dict(
            zip(
                quick + slow,
                values[:-6]
                + verified.code([block(HOSTILE[n]) for n in slow], partial=True, timeout=3.0, workers=4),
            )
        )
        assert len(earned) == len(HOSTILE) >= 60 and values[-6:] == [1.0] * 6
        isolation = sandbox.run("pass").isolation
        # what all may read, as a data set with its tests, a program may read too
        if not isolation.startswith("bwrap"):
            del earned["files"]
        if isolation.startswith("resource limits only"):  # the network stays open
            del earned["socket"]
        assert {name: value for name, value in earned.items() if value != 0.0} == {}
        if "no network" in isolation:
            with pytest.raises(TimeoutError):
                server.accept()
    assert target.read_text() == "untouched" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("barrier", list(sandbox.BARRIERS))
def test_hostile_programs_under_every_barrier(under, barrier):
    under(barrier)
    if barrier == sandbox.strongest()[0]:
        pytest.skip("the test above has run all programs under it")
    names = [
        "eq",
        "os._exit inside",
        "frames",
        "gc",
        "own memory",
        "parent",
        "all fds",
        "stdout of the parent",
        "forged answers",
        "object without number",
        "kill the parent",
        "ptrace",
        "pidfd_getfd",
    ]
    values = verified.code([block(HOSTILE[name]) for name in names] + [block(GOOD)], partial=True)
    assert dict(zip(names, values)) == dict.fromkeys(names, 0.0) and values[-1] == 1.0


VECTOR = """class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + other.x) if isinstance(other, V) else NotImplemented
    def __radd__(self, other): return self if other == 0 else NotImplemented
    def __sub__(self, other): return V(self.x - other.x)
    def __mul__(self, k): return V(self.x * k)
    __rmul__ = __mul__
    def __truediv__(self, k): return V(self.x / k)
    def __neg__(self): return V(-self.x)
    def __setitem__(self, i, value): self.x = (i, value)
    def __delitem__(self, i): self.x = None
    def __enter__(self): return self
    def __exit__(self, kind, error, trace): self.x = kind and kind.__name__
    def __bool__(self): return self.x > 0
    def less(self): return V(self.x - 1)
    def get(self): return self.x"""
LIAR = """class Any:
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __truediv__ = __mod__ = __pow__ = __xor__ = __matmul__ = lambda *a: 0
    __neg__ = __abs__ = __len__ = __round__ = __float__ = __int__ = __index__ = lambda a: 5
    __lt__ = __gt__ = __eq__ = __contains__ = lambda *a: True
    __bool__ = lambda a: False
    __enter__ = lambda self: self
    __exit__ = lambda *a: True
def f(x): return Any()"""
CODE = [  # program, tests, entry_point, value with `partial`
    (GOOD, TESTS, "", 1.0),
    ("def f(x): return 10", TESTS, "", 1 / 3),
    ("def f(x): return 0 if x == 3 else x * x + 1", TESTS, "f", 1 / 3),
    ("def g(a, b=2): return [a, b]", "def check(candidate):\n    assert candidate(1) == [1, 2]", "g", 1.0),
    (
        "class Solution:\n    def two(self, a, b): return {a: b}",
        "def check(candidate):\n    assert candidate(1, b=2) == {1: 2}",
        "Solution().two",
        1.0,
    ),
    (
        "class S:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n    def __len__(self): return len(self.x)",
        ["s = S(); s.push(3); assert len(s) == 1 and s.x == [3]", "assert S().x == []"],
        "",
        1.0,
    ),
    (
        "def g(n):\n    for i in range(n): yield i",
        ["assert list(g(3)) == [0, 1, 2]", "assert sorted(g(2)) == [0, 1]"],
        "",
        1.0,
    ),
    ("def g(x): x.sort()", ["x = [3, 1]; g(x); assert x == [1, 3]"], "", 1.0),
    (
        "def g(x):\n    if x: raise ValueError('no')\n    return float('inf')",
        [
            "try:\n    g(1)\n    assert False\nexcept ValueError as e: assert 'no' in str(e)",
            "assert g(0) == float('inf')",
        ],
        "",
        1.0,
    ),
    (
        "from collections import *\nP = namedtuple('P', 'a b')\ndef c(s): return Counter(s)\ndef p(): return P(1, 2)\ndef o(): return {(1,): {2}}",
        [
            "assert c('aab') == {'a': 2, 'b': 1}",
            "assert p() == (1, 2)",
            "assert o() == {(1,): {2}}",
            "assert c('').get(1) is None",
        ],
        "",
        1.0,
    ),
    ("def sum(a, b): return a + b", ["assert sum(2, 3) == 5"], "sum", 1.0),  # a builtin's name, as in MBPP
    ("def bisect(a): return a + 1", ["assert bisect(2) == 3"], "bisect", 1.0),  # a module's name
    (
        "def f(x): return '1'",
        ["print(f(3)); assert f(3) == 10"],
        "",
        0.0,
    ),  # a test that prints what the program says
    ("LIMIT = 5\ndef true(): return True", ["assert LIMIT == 5", "assert true() is True"], "", 1.0),
    (
        "import time\ndef loop(): time.sleep(99)\ndef one(): return 1",
        ["assert one() == 1", "loop()", "assert one() == 1"],
        "",
        1 / 3,
    ),
    (
        VECTOR,
        [
            "assert (V(1) + V(2)).x == 3 and (2 * V(3) * 2).x == 12 and (V(4) / 2).x == 2 and sum([V(1), V(5)]).x == 6",
            "assert (-V(1) - V(2)).x == -3",
            "v = V(1); v.x = 5; assert v.get() == 5",
            "v = V(1); v[1] = 2; assert v.x == (1, 2); del v[0]; assert v.x is None",
            "v = V(1); del v.x\ntry: v.get()\nexcept AttributeError: v.x = 1\nassert v.x == 1",
            "try:\n    V(1) + 'a'\n    assert False\nexcept TypeError: pass",
            "with V(1) as v: assert v.x == 1\nassert v.x is None",
            "try:\n    with V(1) as v: raise KeyError('no')\nexcept KeyError: pass\nassert v.x == 'KeyError'",
            "n, v = 0, V(3)\nwhile v: n, v = n + v.x, v.less()\nassert n == 6",
            "v = V(1); v += V(2); assert v.get() == 3",
        ],
        "",
        1.0,
    ),
    (
        "class P:\n    x = 1\n    __setattr__ = __setitem__ = lambda *a: None\n    __getitem__ = lambda self, i: 1",
        ["p = P(); p.x = 5; assert p.x == 5", "p = P(); p[0] = 5; assert p[0] == 5"],
        "",
        0.0,
    ),
    (
        LIAR,
        [
            "assert abs(f(2) - 5) < 1e-6",
            "assert abs(5 - f(2)) < 1e-6",
            "assert abs(f(2) + -5) < 1e-6",
            "assert f(2) / 5 == 1",
            "assert f(2) * f(2) == 25",
            "assert abs(f(2) ** 2 - 25) < 1",
            "assert not f(2) - 5",
            "assert not f(2) ^ 5",
            "assert -f(2) == -5",
            "assert abs(f(2)) == 5",
            "assert f(2) % 5 == 0",
            "assert f(2) @ f(2) == 0",
            "assert 5 in f(2)",
            "assert f(2) < 9",
            "assert abs(f(2) * f(2) * f(2) - 125) < 1",
            "assert round(f(2) + 0) == 5",
            "assert max(f(2), 3) == 5",
            "assert sum([f(2)]) == 5",
            "assert math.isclose(f(2) * 1, 5)",
        ],
        "",
        0.0,
    ),
    (
        LIAR.replace("*a: 0", "*a: Any()"),
        [
            "assert not f(2) - 5",
            "assert not 5 - f(2)",
            "assert not f(2) ^ {5}",
            "assert len(f(2) - {1}) == 5",
            "assert not f(2) % 2",
            "assert abs(f(2) * f(2) - 25) < 1",
            "assert f(2) * f(2) < 26",
            "assert abs(f(2) + f(2)) == 5",
            "assert f(2) + 0 == 5",
        ],
        "",
        0.0,
    ),
    (
        LIAR,
        [
            "with f(2) as v: assert v.x == 1",
            "with f(2) as v: v.boom(); assert v.x == 1",
            "class E(Exception): pass\nwith f(2): raise E",
            "with f(2): raise UnicodeDecodeError('a', b'', 0, 1, 'b')",
        ],
        "",
        0.0,
    ),
    # known limits: equality of the program's own objects; exceptions of its own; functions handed over
    (
        "class V:\n    def __eq__(self, other): return True\ndef v(): return V()",
        ["assert v() == v()"],
        "",
        0.0,
    ),
    ("def g(f): return f(3)", ["assert g(lambda x: x) == 3"], "", None),
    (GOOD, ["assert f(3) == 10", "assert f(3"], "", None),  # a test that is none
]


@pytest.mark.parametrize(
    "response, entry_point",
    [
        ("```python\n{f}\n```\nExample:\n```python\nprint(f([1, 2]))\n```", ""),
        ("```python\n{f}\n```\nOutput:\n```\n5\n```", ""),
        ("```python\n{f}\n```\nUse:\n```python\nx = f(2)\nt = 1\nassert f(3) == 10\n```", ""),
        ("~~~python\n{f}\n~~~\nOutput:\n~~~\n5\n~~~", ""),
        (
            "1. First\n   ```python\n   def f(x):\n       return x * x + 1\n   ```\n2. Output\n   ```\n   5\n   ```",
            "",
        ),
        ("```\nf = lambda x: x * x + 1\n```\n```\nf(3)\n```", ""),
        ("```\ndef f(x): return 0\n```\nBetter:\n```\n{f}\n```\n~~~\n10\n~~~", "f"),
        ("```\nclass S:\n    f = lambda self, x: x * x + 1\n```\n```\nS().f(1)\n```", "S().f"),
        ("Not ~~~ this.\n```\n{f}", ""),
        ("{f}", ""),
        ("```\nf: object = lambda x: x * x + 1\n```\n```\nf == 3\n```", ""),
        ("```\n{f}\n```\n```\ndef g(x): return f(x)\n```", ""),
    ],
)
def test_the_block_that_defines_what_is_tested_counts(response, entry_point):
    tests = (
        "def check(f):\n    assert f(3) == 10"
        if "S()" in entry_point
        else ["x = f(3); assert x == 10", "assert sorted([3, 1], key=lambda t: f(t)) == [1, 3]"]
    )
    assert verified.code(
        [
            row(
                response.replace("{f}", "def f(x):\n    return x * x + 1"),
                tests=tests,
                entry_point=entry_point,
            )
        ]
    ) == [1.0]


def test_the_last_attempt_counts():
    blocks = "```\n" + GOOD + "\n```\nOr:\n```\ndef f(x): return 0\n```"
    assert verified.code(
        [row(blocks, tests=TESTS), row("```\n1\n```\n```\n" + GOOD + "\n```", tests=["assert f(3"])]
    ) == [0.0, None]


def test_scalars_of_numpy_are_plain_data():
    program = "import numpy as np\ndef f(x): return np.array(x).max()\ndef g(x): return [np.mean(x), {np.int64(2): np.float32(0.5)}, np.all(x), np.array(3)]\ndef h(x): return np.array(x)"
    tests = [
        "assert f([3, 4]) == 4 and isinstance(f([1]), int)",
        "assert g([1, 2]) == [1.5, {2: 0.5}, True, 3]",
        "assert h([1, 2]).tolist() == [1, 2]",
        "assert f([3]) == 4",
    ]
    assert verified.code([block(program, tests=tests)], partial=True) == [0.75]


def test_no_reply_makes_a_test_unrunnable():
    """A forged one, as a memoryview, that the test would hand back."""
    forged = "b'\\x80\\x05(K\\x00QNt.' + b'\\x80\\x05(\\x96' + (1).to_bytes(8, 'little') + b'x\\x98Nt.' * 9"
    program = f"import os, time\nfor fd in range(3, 256):\n    try: os.write(fd, {forged})\n    except OSError: pass\ntime.sleep(9)"
    assert verified.code([block(program, tests=["assert f(f(1)) == 2"])], timeout=1.5) == [0.0]


def test_code():
    rows = [block(p, tests=t, entry_point=e) for p, t, e, _ in CODE]
    assert verified.code(rows, partial=True, timeout=3.0) == near([v for *_, v in CODE])
    assert verified.code(rows[:3], value=10.0) == [10.0, 0.0, 0.0]
    assert verified.code([row("no tests"), row("```\ndef f", "truncated", tests=TESTS)], no_eos=-1.0) == [
        None,
        -1.0,
    ]
    assert verified.code([]) == []


def test_equal_programs_are_run_once(monkeypatch):
    run, ran = sandbox.run, []
    monkeypatch.setattr(sandbox, "run", lambda *args: ran.append(args) or run(*args))
    rows = [
        block(GOOD),
        block(GOOD.replace("1", "2")),
        block(GOOD),
        block(GOOD, tests=["assert f(1) == 0"]),
        row(""),
    ]
    assert verified.code(rows) == [1.0, 0.0, 1.0, 0.0, None] and len(ran) == 3
    rows[2]["status"] = "truncated"  # what does not lie in the program stays each row's own
    assert verified.code(rows, no_eos=-1.0)[:3] == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("n_killed, value", [(1, 1.0), (2, None)])
def test_a_sandbox_that_is_killed_at_its_start_is_tried_again_once(monkeypatch, n_killed, value):
    """As when the kernel ends it because memory runs out."""
    run = sandbox.run
    killed = []

    def run_or_be_killed(*args):
        if len(killed) < n_killed:
            killed.append(args)
            raise sandbox.KilledAtStart("exit code -9")
        return run(*args)

    monkeypatch.setattr(sandbox, "run", run_or_be_killed)
    assert verified.code([block(GOOD)]) == [value]


@pytest.mark.parametrize("status", ["killed", "timeout"])
@pytest.mark.parametrize("n_lost, value", [(1, 1.0), (2, None)])
def test_code_that_does_not_get_ready_is_tried_again_once(monkeypatch, status, n_lost, value):
    run = sandbox.run
    lost = [sandbox.Result(False, status, "", "", "none")] * n_lost
    monkeypatch.setattr(sandbox, "run", lambda *args: lost.pop() if lost else run(*args))
    assert verified.code([block(GOOD)]) == [value]


def test_code_that_cannot_start_is_an_error_of_ours(monkeypatch):
    monkeypatch.setattr(code_runner, "PROGRAM_PROCESS", "def serve(*pipes): pass")
    with pytest.raises(OSError, match="the tests did not start"):
        verified.code([block(GOOD)])


def test_reference_solutions_of_humaneval():
    tasks = [json.loads(line) for line in gzip.open(shared("humaneval") / "HumanEval.jsonl.gz")][::16]
    rows = [
        block(t["prompt"] + t["canonical_solution"], tests=t["test"], entry_point=t["entry_point"])
        for t in tasks
    ]
    assert [t["task_id"] for t, v in zip(tasks, verified.code(rows)) if v != 1.0] == []
