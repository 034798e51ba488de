"""Runs Python programs that nobody has read, for HumanEval and the reward `code`; code_runner.py says what
has passed.

A program runs in bubblewrap: no network, no other process, a folder of its own, and of all other files only
Python's and /usr, to read. With `unsafe` it runs without. Either way time, memory, processes and files
have limits, the environment is empty, and its whole process group is killed in the end.
"""

import contextlib
import functools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from utils import or_fail

STARTER = Path(__file__).with_name("code_starter.py").read_text()
KILL_FIRST = 'echo 1000 > /proc/self/oom_score_adj; exec "$@"'  # this process, when memory runs out
FREE_USERS = range(61184, 65520)  # ids that systemd gives to passing services: nobody's
MEMORY_MB = 1024  # address space of each process
FILE_MB = 16  # each file, stdout and stderr among them; all files together have 16 times as much
REPORT_BYTES = 1 << 20  # who reports or prints more gets a broken pipe
PROCESSES = 32
unsafe = False  # set by `check_can_run`


class Output(NamedTuple):
    status: str
    """ok: the program and its test came to their end, or a program that reads stdin exited with 0; error:
    exception, early exit or a signal, as from a limit; timeout; not started: the sandbox was killed or had no
    time before the program began, as without free memory."""
    reports: str
    """A line for each __report__ of the test, once that has ended; or what a program with stdin prints."""
    stderr: str


def check_can_run(unsafe_code: bool) -> None:
    """Exits with 2 unless programs can run here. Call it before `run`."""
    global unsafe
    unsafe = unsafe_code
    if not unsafe:
        or_fail(_needs_own_user)


@functools.cache
def _needs_own_user() -> bool:
    """Returns whether programs get a user id of their own, as no limit on processes counts root's.

    Raises OSError if bubblewrap is missing or may not work here.
    """
    problem = "it is not installed"
    if shutil.which("bwrap"):
        # where root may not make other namespaces, as in some containers, it may still make one for users
        for own_user in (True, False):
            if own_user and os.geteuid() != 0:
                continue
            try:
                _start([""], "", 10.0, own_user)
                return own_user
            except OSError as error:
                problem = str(error)
    raise OSError(
        f"programs run in bubblewrap, but {problem}; apt install bubblewrap (a container must allow it to "
        "make namespaces), or let programs read your files and use the network by --unsafe-code or, in "
        "training, --reward-args code.unsafe=true"
    )


@functools.cache
def _bwrap(own_user: bool) -> list[str]:
    """Returns the words before the interpreter."""
    command = [shutil.which("bwrap"), "--die-with-parent"]
    if own_user:
        command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-all", "--cap-drop", "ALL"]
    for path in ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sys.prefix):
        for parent in list(Path(path).parents)[-2::-1]:
            command += ["--dir", str(parent)]  # --ro-bind would make it for root alone
        command += ["--ro-bind-try", path, path]
    for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    options = subprocess.run(["bwrap", "--help"], capture_output=True, text=True).stdout
    if not own_user and "--disable-userns" in options:  # from 0.8 on; there a program could mount more memory
        command += ["--unshare-user", "--disable-userns"]
    if "--size" in options:  # from 0.7 on
        command += ["--size", str(16 * FILE_MB << 20)]
    return [*command, "--tmpfs", "/scratch", "--remount-ro", "/", "--chdir", "/scratch"]


def _limits(timeout: float, own_user: bool) -> dict[str, int]:
    """Returns names and values of the resource limits."""
    n_others = 0
    if not own_user:  # before Linux 5.14 the limit on processes counts all of the caller's
        n_others = len(list(Path("/proc").glob("[0-9]*/task/*")))
    return {
        "RLIMIT_CPU": math.ceil(timeout) + 1,
        "RLIMIT_AS": MEMORY_MB << 20,
        "RLIMIT_FSIZE": FILE_MB << 20,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": n_others + PROCESSES,
    }


def _read(pipe: int, report: bytearray) -> None:
    """Appends what comes through a pipe to the report, until there is enough of it, and closes the pipe."""
    while len(report) < REPORT_BYTES and (part := os.read(pipe, REPORT_BYTES)):
        report += part
    os.close(pipe)


def _start(blocks: list[str], test: str, timeout: float, own_user: bool, stdin: str | None = None) -> Output:
    """Runs code_starter.py; raises OSError if the sandbox ends by itself before the program begins."""
    user = 0
    if own_user:
        user = secrets.choice(FREE_USERS)
    word = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as error_file,
    ):
        home = folder
        command = ["/bin/sh", "-c", KILL_FIRST, "sh"]
        if not unsafe:
            home = "/scratch"
            command += _bwrap(own_user)
        report = bytearray()
        read_end, write_end = os.pipe()  # what has gone through it, a program cannot take back
        request = {"blocks": blocks, "test": test, "reads_stdin": stdin is not None}
        request |= {"limits": _limits(timeout, own_user), "user": user, "report": write_end}
        process = subprocess.Popen(
            [*command, sys.executable, "-I", "-X", "utf8", "-c", STARTER],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=error_file,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        reader = threading.Thread(target=_read, args=(read_end, report), daemon=True)
        reader.start()
        try:
            process.communicate(f"{json.dumps(request)}\n{word}\n{stdin or ''}".encode(), timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # what it has started too; bubblewrap's processes end with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(1.0)  # a process that has left the group, as it can with `unsafe`, may keep the pipe open
        if unsafe:  # thousands of nested folders are too deep for shutil.rmtree
            subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)
        error_file.seek(0)
        error = error_file.read().decode(errors="replace")

    started, finished, reported = report.decode(errors="replace").partition(word)
    if stdin is not None:
        finished = code == 0  # the word came before the program
    # None where its time was over; bubblewrap returns 128 + signal
    was_killed = code is None or code < 0 or code > 128
    if finished:
        status = "ok"
    elif not started and was_killed:
        status = "not started"
    elif not started:
        raise OSError(error.strip()[-200:])
    elif code is None:
        status = "timeout"
    else:
        status = "error"
    return Output(status, reported, error)


def run(blocks: list[str], test: str, timeout: float = 10.0, stdin: str | None = None) -> Output:
    """Runs a program, then its test, in a fresh interpreter. Several threads may call it at once.

    Raises OSError if the sandbox does not work here; `check_can_run` says so before.

    Args:
        blocks: Python source, of which the last is the program; of those before it only imports, functions
            and classes count. Any string is fine.
        test: Python source, which may call __report__(number, value).
        timeout: wall time of all of it, in seconds. CPU time is limited to about as much.
        stdin: what the program reads; then its __name__ is __main__, and no test runs.
    """
    own_user = not unsafe and _needs_own_user()
    for _ in range(2):
        output = _start(blocks, test, timeout, own_user, stdin)
        if output.status != "not started":
            break
    return output
