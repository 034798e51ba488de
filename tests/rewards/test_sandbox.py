"""rewards/sandbox.py, attacked under every barrier that works on this machine; the others are skipped by name."""

import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rewards import sandbox


@pytest.fixture(params=list(sandbox.BARRIERS))
def run(request):
    def run(program, **limits):
        return sandbox._run(program, request.param, os.geteuid() == 0, **limits)

    try:
        works = run("pass").ok
    except OSError as e:
        works, reason = False, e
    if not works:
        pytest.skip(f"no {request.param} here: {reason}")
    run.barrier = request.param
    return run


def alive(mark: str) -> list[str]:
    """Processes, other than this one, whose command line or working folder holds `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes().decode(errors="replace") + os.readlink(entry / "cwd")
        except OSError:
            continue
        if mark in text and int(entry.name) != os.getpid():
            found.append(text)
    return found


def gone(mark: str) -> bool:
    """Whether no such process is left; one that was killed may take a moment to end on a busy machine."""
    end = time.monotonic() + 2
    while alive(mark) and time.monotonic() < end:
        time.sleep(0.05)
    return alive(mark) == []


# --- ordinary programs


def test_what_a_program_gives_back(run):
    r = run(
        "import sys\nprint('héllo')\nprint('oops', file=sys.stderr)\nprint(sys.stdin.read() == '', __name__)"
    )
    assert (r.ok, r.status, r.stdout, r.stderr) == (True, "ok", "héllo\nTrue __main__\n", "oops\n")
    assert run.barrier in ("none", r.isolation.split(":")[0])


FAILURES = [  # program, part of stderr
    ("raise ValueError('here')", "ValueError: here"),
    ("def f():\n    return 1 / 0\nf()", 'File "program.py", line 2, in f'),
    ("assert 1 == 2", "AssertionError"),
    ("def f(:", "SyntaxError"),
    ("x = 1\0", "null"),
    ("x = '\ud800'", "surrogate"),
    ("import no_such_module", "ModuleNotFoundError"),
    ("import sys\nsys.exit(3)", ""),
    ("raise BaseException", "BaseException"),
    # out before the checks at the end
    ("import sys\nsys.exit(0)\nassert False", "exited before its last line"),
    ("exit()\nassert False", "exited before its last line"),
    ("raise SystemExit\nassert False", "exited before its last line"),
    ("import os\nos._exit(0)\nassert False", "exited before its last line"),
    (
        "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\nwhile True: pass",
        "exited before",
    ),
    ("import os\nos.execv('/bin/true', ['true'])", "exited before its last line"),
    # what it finds in its open files does not tell it the last word
    (
        "import os\nfor fd in range(256):\n    try: os.write(fd, b'started ' + os.pread(fd, 99, 0))\n    except OSError: pass\n"
        "    try: os.write(fd, b'ended')\n    except OSError: pass\nos._exit(0)",
        "",
    ),
    (
        "import os\nfor fd in range(3, 256):\n    try: os.set_blocking(fd, False); os.write(fd, bytes(1 << 20))\n    except OSError: pass",
        "",
    ),
]


def test_what_it_does_to_its_output_is_no_failure_of_ours(run):
    assert run("import os\nprint('a' * 99, flush=True)\nos.ftruncate(1, 0)").ok
    assert run("import os, sys\nos.close(2)\nprint(1)").ok


@pytest.mark.parametrize("program, message", FAILURES, ids=range(len(FAILURES)))
def test_failures_and_early_exits_are_errors(run, program, message):
    r = run(program)
    assert (r.ok, r.status) == (False, "error") and message in r.stderr


def test_an_empty_program_and_one_with_its_own_main_are_ok(run):
    assert run("").ok and run("if __name__ == '__main__':\n    print(1)").stdout == "1\n"
    assert run(
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\nimport pickle\npickle.dumps(A())"
    ).ok


# --- limits


def test_time(run):
    for program in ("while True: pass", "import signal\nsignal.pause()"):
        began = time.monotonic()
        r = run(program, timeout=0.6)
        assert (r.ok, r.status) == (False, "timeout") and 0.6 <= time.monotonic() - began < 3
    r = run(
        "import signal, time\nfor s in set(signal.Signals) - {9, 19}:\n    signal.signal(s, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\ntime.sleep(60)",
        timeout=0.6,
    )
    assert r.status == "timeout" and r.stdout == "deaf\n"  # what it wrote before stays


def test_cpu_time_of_many_threads_is_bounded(run):
    r = run(
        "import hashlib, threading\n"
        "work = lambda: [hashlib.sha256(bytes(1 << 20)) for _ in range(10**6)]\n"
        "[threading.Thread(target=work).start() for _ in range(4)]",
        timeout=1.0,
    )
    assert r.status in ("timeout", "killed")


def test_memory(run):
    assert "MemoryError" in run("x = bytearray(900 << 20)", memory_mb=512).stderr
    assert not run("x = []\nwhile True: x.append(bytearray(8 << 20))", memory_mb=256).ok
    assert run("x = bytearray(200 << 20)", memory_mb=512).ok


def test_processes(run):
    """A fork bomb that is bounded by itself, should the limit fail: 300 processes that sleep."""
    program = (
        "import os, time\nn = 0\ntry:\n    while n < 300:\n        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "        n += 1\nexcept OSError: print('refused', n)"
    )
    r = run(program, processes=20)
    assert (
        r.ok
        and r.stdout.startswith("refused")
        and int(r.stdout.split()[1]) < (20 if os.geteuid() == 0 else 300)
    )
    began = time.monotonic()
    r = run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout=1.0, processes=20)
    assert r.status in ("timeout", "killed", "error") and time.monotonic() - began < 5


def test_output_and_files(run):
    r = run("while True: print('x' * 1000)", file_mb=1)
    assert not r.ok and 900_000 < len(r.stdout) <= 1 << 20 and "File too large" in r.stderr
    r = run("import sys\nwhile True: sys.stderr.write('x' * 1000)", file_mb=1)
    assert not r.ok and len(r.stderr) <= 1 << 20
    r = run("with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 16))", file_mb=1)
    assert r.status == "error" and "File too large" in r.stderr
    r = run("files = [open(f'{i}', 'w') for i in range(1000)]")
    assert "Too many open files" in r.stderr


# --- rights


def test_its_own_folder_is_writable_and_gone_afterwards(run):
    r = run(
        "import os, tempfile\nopen('a', 'w').write('b')\nopen(os.environ['HOME'] + '/c', 'w').close()\n"
        "tempfile.NamedTemporaryFile()\nos.mkdir('d', 0)\nprint(sorted(os.listdir()), os.getcwd())"
    )
    assert r.ok and r.stdout.startswith("['a', 'c', 'd']")
    assert not Path(r.stdout.split()[-1]).exists()
    assert run("import os\nprint(os.listdir())").stdout == "[]\n"  # nothing of another run


def test_no_file_outside_of_its_folder(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    targets = [
        str(secret),
        str(tmp_path / "new"),
        "/usr/x",
        "/etc/x",
        "/x",
        str(Path(sandbox.__file__)),
        sys.prefix + "/x",
    ]
    if run.barrier == "bwrap":  # elsewhere what all may write to stays writable
        targets += ["/tmp/x", "/dev/shm/x", "/var/tmp/x"]
    elif os.geteuid() != 0:
        pytest.skip("without bwrap, what the user may write stays writable")
    r = run(
        f"import os\nfor t in {targets}:\n    try: open(t, 'a').write('x'); print('wrote', t)\n    except OSError: pass\n"
        f"    try: os.remove(t); print('removed', t)\n    except OSError: pass"
    )
    assert r.ok and r.stdout == "" and secret.read_text() == "s3cret"
    if run.barrier == "bwrap":
        r = run(
            f"import os\nprint(os.path.exists({str(secret)!r}), os.listdir('/'), os.path.exists('/etc/passwd'))"
        )
        assert r.stdout.startswith("False") and "False" in r.stdout[5:] and "home" not in r.stdout


def test_no_network(run):
    if run.barrier == "none":
        pytest.skip("resource limits only: the network stays open, and `isolation` says so")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port, heard = server.getsockname()[1], []
        threading.Thread(target=lambda: heard.append(_accept(server))).start()
        r = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=3).send(b'x')")
        assert r.status == "error" and "Error" in r.stderr
        time.sleep(0.6)
        assert heard == [None]
        with socket.create_connection(("127.0.0.1", port)):  # the server is there
            assert _accept(server)


def _accept(server):
    try:
        return server.accept()
    except TimeoutError:
        return None


def test_the_parent_lives(run):
    if run.barrier == "none" and os.geteuid() != 0:
        pytest.skip("same user id, same processes")
    r = run(
        f"import os, signal\nfor pid in (os.getppid(), {os.getpid()}, 1, -1):\n    try: os.kill(pid, signal.SIGKILL)\n"
        "    except (OSError, OverflowError): pass\nprint('done')"
    )
    assert r.status in ("ok", "error", "killed")  # it may have killed itself; we are here


def test_the_environment_is_not_the_callers(run, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    program = "import os, subprocess\nprint(dict(os.environ))\n"
    program += f"for p in ('self', {os.getpid()}):\n    try: print(open(f'/proc/{{p}}/environ').read())\n    except OSError: pass"
    assert run(program).ok and "sk-secret" not in run(program).stdout


def test_no_way_back_to_root(run):
    if os.geteuid() != 0:
        pytest.skip("the caller is not root")
    r = run(
        "import os\nprint(os.getuid() >= 61184, os.getgroups())\nfor f in (os.setuid, os.seteuid, os.setgid):\n"
        "    try: f(0); print('root')\n    except OSError: pass"
    )
    assert r.ok and r.stdout == "True []\n"
    assert "NoNewPrivs:\t1" in run("print(open('/proc/self/status').read())").stdout or run.barrier == "bwrap"


def test_limits_cannot_be_raised(run):
    r = run(
        "import resource as r\nfor n in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NPROC):\n"
        "    try: r.setrlimit(n, (r.RLIM_INFINITY,) * 2); print('raised', n)\n    except ValueError: pass"
    )
    assert r.ok and r.stdout == ""


def test_nothing_outlives_it(run):
    if run.barrier == "none" and os.geteuid() != 0:
        pytest.skip("same user id: only its process group is ended")
    for last in ("", "while True: pass", "os._exit(0)"):  # the parent ends by itself, is ended, leaves early
        mark = f"marker{time.monotonic_ns()}"
        r = run(
            "import os, subprocess, time\n"
            f"subprocess.Popen(['/bin/sh', '-c', 'sleep 60; : {mark}'], start_new_session=True)\n"
            "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\n"
            f"time.sleep(0.2)\nprint(os.getcwd(), flush=True)\n{last}",
            timeout=2.0,
        )
        folder = r.stdout.split()[0]
        assert gone(mark) and (folder == "/scratch" or gone(folder))


def test_it_dies_with_a_caller_that_is_killed(tmp_path):
    """A trainer that is killed must leave no endless loop behind; only bwrap promises that."""
    if not sandbox.strongest()[0] == "bwrap":
        pytest.skip("no bwrap here")
    mark = f"marker{time.monotonic_ns()}"
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sandbox\nsandbox.run('import subprocess\\n"
            f'subprocess.run(["/bin/sh", "-c", "sleep 60; : {mark}"])\', timeout=60)',
        ],
        cwd=Path(sandbox.__file__).parent,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 20
    while len(alive(f": {mark}")) < 2 and time.monotonic() < deadline:  # the caller and the child
        time.sleep(0.1)
    assert len(alive(f": {mark}")) > 1
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    while alive(f": {mark}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(f": {mark}") == []


# --- further attacks: each prints nothing where it fails

SYSTEM_CALLS = {  # programs, given by number under x86-64; `call` says what a system call gave
    "own user namespace": "if libc.unshare(0x10000000) == 0: print('root of its own')",
    "own network namespace": "if libc.unshare(0x50000000) == 0: print('new network')",
    "user namespace by clone": "if call(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0: print('cloned')",
    "user namespace by clone3": "if call(435, ctypes.create_string_buffer((0x10000000).to_bytes(8, 'little') + bytes(24) + (17).to_bytes(8, 'little') + bytes(48)), 88) >= 0: print('cloned by clone3')",
    "keyctl": "key = call(249, b'user', b'sandbox-test', None, 0)\nif key > 0 or call(250, 0, -3, 0) > 0: print('keys of the caller')",
    "add_key": "if call(248, b'user', b'x', b'y', 1, -3) > 0: print('a key that stays')",
    "io_uring": "if call(425, 8, ctypes.create_string_buffer(120)) >= 0: print('io_uring')",
    "userfaultfd": "if call(323, 1) >= 0: print('userfaultfd')",
    "bpf": "call(321, 0, ctypes.create_string_buffer(120), 120)\nif ctypes.get_errno() != 1: print('bpf')",
    "memfd": "if call(319, b'x', 0) >= 0: print('memory without a limit')",
    "shmget": "if call(29, 0, 1 << 30, 0o1600) >= 0: print('shared memory without a limit')",
    "vsock": "try: socket.socket(40, 1); print('a way to the host')\nexcept OSError: pass",
}


@pytest.fixture
def caller_key():
    """A key in this process's session keyring, as Kerberos and ecryptfs keep theirs."""
    libc = ctypes.CDLL(None)
    key = libc.syscall(248, b"user", b"sandbox-test", b"s3cret", 6, -3)
    yield key
    libc.syscall(250, 3, key)  # KEYCTL_REVOKE


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls by number")
def test_system_calls_that_no_barrier_bounds(run, caller_key):
    head = "import ctypes, socket\nlibc = ctypes.CDLL(None, use_errno=True)\ncall = libc.syscall"
    r = run("\n".join([head, *SYSTEM_CALLS.values()]))
    assert (r.status, r.stdout) == ("ok", ""), r.stderr
    r = run(
        "import socket, subprocess, threading\nfor f in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6): socket.socket(f)\n"
        "socket.socketpair()\nsubprocess.run(['/bin/true'], check=True)\n"
        "t = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()"
    )
    assert (r.ok, r.stdout) == (True, "1\n"), r.stderr  # what ordinary programs use stays


def test_a_program_cannot_stop_the_next_one(run):
    """By a folder too deep to be removed by recursion, one with names that rm could misread, by taking the folders of the
    next programs, by processes that live on."""
    names = "import os\nfor name in ('-rf', '--', '*', '\\n', 'a' * 255): os.mkdir(name)\n"
    assert run(names + "for i in range(1500):\n    os.mkdir('d'); os.chdir('d')", timeout=60.0).ok
    taken = f"import os\nfor i in range({sandbox.FIRST_USER}, {sandbox.FIRST_USER + sandbox.N_USERS}):\n"
    r = run(
        taken + "    for path in (f'../{i}', f'../sandbox-{i}', f'/tmp/sandboxes/{i}'):\n"
        "        try: os.mkdir(path); print(path)\n        except OSError: pass",
        timeout=60.0,
    )
    assert r.ok and (r.stdout == "" or os.geteuid() != 0) and run("pass").ok


def test_a_folder_for_sandboxes_that_is_not_ours(run, monkeypatch, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("the caller is not root")
    (tmp_path / "sandboxes").mkdir()
    os.chown(tmp_path / "sandboxes", 1234, 1234)
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="belongs to user id 1234"):
        run("pass")


def test_all_files_together_are_bounded(run):
    if run.barrier != "bwrap" or not sandbox._has_sized_tmpfs():
        pytest.skip("only bwrap bounds more than each file")
    r = run("for i in range(40): open(str(i), 'wb').write(bytes(1 << 20))", file_mb=1)
    assert r.status == "error" and "No space left" in r.stderr
    assert run("for i in range(15): open(str(i), 'wb').write(bytes(1 << 20))", file_mb=1).ok


def test_the_kernel_ends_it_before_its_caller(run):
    mark, scores = f"marker{time.monotonic_ns()}", []
    thread = threading.Thread(
        target=run, args=(f"import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 0.7; : {mark}'])",)
    )
    thread.start()
    while thread.is_alive() and not scores:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f": {mark}" in (entry / "cmdline").read_text():
                    scores.append((entry / "oom_score_adj").read_text().strip())
            except OSError:
                continue
    thread.join()
    assert set(scores) == {"1000"}


# --- in use


def test_threads_do_not_disturb_each_other(run):
    def one(i):
        if i % 4 == 3:
            return run("while True: pass", timeout=0.5).status
        return run(f"import time\ntime.sleep(0.2)\nprint({i})").stdout

    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(one, range(8)))
    assert outs == [f"{i}\n" if i % 4 < 3 else "timeout" for i in range(8)]


def test_run_takes_the_strongest_barrier_that_works():
    for barrier in sandbox.BARRIERS:
        try:
            if sandbox._run("pass", barrier, os.geteuid() == 0).ok:
                break
        except OSError:
            continue
    assert sandbox.run("pass").isolation.startswith(sandbox.BARRIERS[barrier])


def test_a_barrier_that_cannot_start_is_an_error_of_ours_not_of_the_program(monkeypatch):
    monkeypatch.setattr(sandbox, "_command", lambda *_: ["/bin/sh", "-c", "echo broken >&2; exit 1"])
    with pytest.raises(OSError, match="did not start, exit code 1: broken"):
        sandbox._run("pass", "none", os.geteuid() == 0)


def test_a_barrier_that_is_killed_at_its_start_says_so(monkeypatch):
    monkeypatch.setattr(sandbox, "_command", lambda *_: ["/bin/sh", "-c", "kill -9 $$"])
    with pytest.raises(sandbox.KilledAtStart, match="exit code -9"):
        sandbox._run("pass", "none", os.geteuid() == 0)
