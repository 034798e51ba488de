"""Runs Python programs that nobody has read: for HumanEval, and for rewards that execute code.

    result = sandbox.run("print(6 * 7)", timeout=10.0)  # .ok .status .stdout .stderr .isolation

Every program gets an empty folder, an environment without the caller's variables, and limits on time, memory,
processes, output and files. It gets no new privileges, a filter of system calls and, where the caller is
root, a user id that nobody else has. When memory runs out, the kernel ends it first.

What holds beyond that depends on the machine. The first of BARRIERS that works here is taken, and `isolation`
names it. Only bwrap limits all files together (to 16 times `file_mb`), and only under bwrap can a program
read nothing but Python's folders.

A program is `ok` when it ran past its last line and exited with 0. One that leaves by os._exit(0) before the
checks at its end is not. The proof is a random word that the starting code keeps while the program runs; only
a program that searches the interpreter's frames can forge it.
"""

import functools
import inspect
import math
import os
import platform
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from accelerate import PartialState

from utils import or_fail

BARRIERS = {  # strongest first; Debian's packages are bubblewrap and util-linux
    "bwrap": "bwrap: no network, no other process, files read-only and only those of Python and /usr",
    "unshare": "unshare: no network, no other process; files as the user id allows",
    "none": "resource limits only; network, processes and files as the user id allows",
}
FIRST_USER = 61184  # systemd's range for passing services: nobody logs in by these ids or owns a file
N_USERS = 4336


class SystemCalls(NamedTuple):
    """Numbers of system calls on one kind of machine, from the kernel's tables."""

    architecture: int  # as the audit code of the kernel
    socket: int
    clone: int
    denied: tuple[int, ...]


# What neither a namespace nor a limit bounds: add_key, request_key and keyctl (the caller's keys), unshare
# and setns (a root of its own), bpf, userfaultfd, perf_event_open and io_uring_setup (often the kernel's weak
# spots), memfd_create, shmget, msgget and semget (memory that belongs to nobody). In this order.
SYSCALLS = {
    "x86_64": SystemCalls(0xC000003E, 41, 56, (248, 249, 250, 272, 308, 321, 323, 298, 425, 319, 29, 68, 64)),
    "aarch64": SystemCalls(
        0xC00000B7, 198, 220, (217, 218, 219, 97, 268, 280, 282, 241, 425, 279, 194, 186, 190)
    ),
}
CLONE3 = 435  # the same number on every machine
CLONE_NEWUSER = 0x10000000
X32_BIT = 1 << 30  # system calls of the x32 interface, which would go around the filter
SOCKET_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink

# Instructions of the kernel's packet filter, and the verdicts that end it.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50001, 0x50026
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in what the filter sees of a system call


class KilledAtStart(OSError):
    """A signal ended the sandbox before the program began, as when memory runs out."""


class Result(NamedTuple):
    ok: bool
    status: str  # ok; error: exception or early exit; timeout; killed: by a signal, as from a limit
    stdout: str
    stderr: str
    isolation: str


def _filter() -> bytes:
    """Builds a seccomp program, 8 bytes an instruction. Empty on machines that SYSCALLS does not know.

    It denies the system calls of SYSCALLS, new user namespaces, and sockets other than SOCKET_FAMILIES (a
    virtual machine's vsock leads to its host).
    """
    calls = SYSCALLS.get(platform.machine())
    if calls is None:
        return b""

    # Each instruction: code, constant, how many instructions to skip if true, and if false.
    deny = (RETURN, EPERM, 0, 0)
    program = [(LOAD, ARCHITECTURE, 0, 0), (EQUAL, calls.architecture, 1, 0), deny]
    program += [(LOAD, NUMBER, 0, 0), (AT_LEAST, X32_BIT, 0, 1), deny]
    for number in calls.denied:
        program += [(EQUAL, number, 0, 1), deny]
    # clone3 hides its flags in memory, which a filter cannot read; without it libc uses clone
    program += [(EQUAL, CLONE3, 0, 1), (RETURN, ENOSYS, 0, 0)]
    program += [
        (EQUAL, calls.clone, 0, 3),
        (LOAD, FIRST_ARGUMENT, 0, 0),
        (ANY_BIT, CLONE_NEWUSER, 0, 1),
        deny,
    ]
    program += [(LOAD, NUMBER, 0, 0), (EQUAL, calls.socket, 0, 6), (LOAD, FIRST_ARGUMENT, 0, 0)]
    for place, family in enumerate(SOCKET_FAMILIES):
        program.append((EQUAL, family, len(SOCKET_FAMILIES) - place, 0))
    program += [deny, (RETURN, ALLOW, 0, 0)]

    return b"".join(struct.pack("HBBI", code, if_true, if_false, k) for code, k, if_true, if_false in program)


def _inside(limits: dict[str, int], user: int, report: int, rules: bytes) -> None:
    """Gives up all rights, runs the program on stdin, then writes stdin's first line to the pipe `report`.

    This is the first code in the sandbox. Its source is handed to a fresh interpreter, so it can use nothing
    of this module.
    """
    import ctypes
    import os
    import resource
    import struct
    import sys
    import types

    word, source = sys.stdin.read().split("\n", 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    # Another user id may find the way to Python's files closed, as /root is: it goes through folders that are
    # open already.
    if user and os.path.exists("/proc/self/fd"):
        search_paths = [sys.path]
        search_paths += [module.__path__ for module in sys.modules.values() if hasattr(module, "__path__")]
        for prefix in {sys.prefix, sys.base_prefix}:
            door = f"/proc/self/fd/{os.open(prefix, os.O_PATH)}"
            for paths in search_paths:
                for i, path in enumerate(paths):
                    if path.startswith(prefix):
                        paths[i] = door + path.removeprefix(prefix)

    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: setuid programs do not help
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if rules:
        code = ctypes.create_string_buffer(rules)
        program = struct.pack("HP", len(rules) // 8, ctypes.addressof(code))
        libc.prctl(22, 2, program, 0, 0)  # PR_SET_SECCOMP

    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    os.write(report, b"started ")
    exec(compile(source, "program.py", "exec"), main.__dict__)
    sys.stdout.flush()
    os.write(report, word.encode())


@functools.cache
def _has_sized_tmpfs() -> bool:
    """Whether this bwrap, from 0.7 on, can limit the size of a folder in memory."""
    done = subprocess.run(["bwrap", "--help"], capture_output=True, text=True)
    return "--size" in done.stdout


def _command(barrier: str, own_user: bool, folder: str, file_mb: int) -> list[str]:
    """Returns the words before the interpreter.

    A program takes its own user id only outside of a user namespace.
    """
    if barrier == "none":
        return []
    if barrier == "unshare":
        command = ["unshare"] if own_user else ["unshare", "--user"]
        return [*command, "--net", "--pid", "--ipc", "--fork", "--kill-child"]

    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent"]
    if own_user:
        command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-all", "--cap-drop", "ALL"]
    for path in ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sys.prefix):
        parents = list(Path(path).parents)[-2::-1]  # from below the root downwards
        for parent in parents:
            command += ["--dir", str(parent)]  # made by --ro-bind, it would be closed to other user ids
        command += ["--ro-bind-try", path, path]
    for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    if _has_sized_tmpfs():
        command += ["--perms", "0777", "--size", str(16 * file_mb << 20), "--tmpfs"]
    else:
        command += ["--bind", folder]
    return [*command, "/scratch", "--remount-ro", "/", "--chdir", "/scratch"]


def _new_folder(own_user: bool) -> tuple[str, int]:
    """Makes an empty folder and picks a user id (0: the caller's).

    The folder reserves the id among all processes.
    """
    if not own_user:
        return tempfile.mkdtemp(prefix="sandbox-"), 0

    parent = Path(tempfile.gettempdir()) / "sandboxes"
    parent.mkdir(exist_ok=True)  # in a folder that all may write to, a program could take all names
    owner = parent.stat().st_uid
    if owner:
        raise OSError(f"{parent} belongs to user id {owner}, not to root; remove it")
    parent.chmod(0o711)

    first = secrets.randbelow(N_USERS)
    for i in range(N_USERS):
        user = FIRST_USER + (first + i) % N_USERS
        folder = parent / str(user)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        os.chown(folder, user, user)
        return str(folder), user
    raise OSError(f"no free user id for a sandbox: {parent} is full; remove old folders")


def _kill(process: subprocess.Popen, user: int) -> None:
    """Ends whatever is left: the child of `unshare`, the process group, and everything under the user id."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:  # it ended by itself
        children = []
    for child in children:
        try:
            os.kill(int(child), signal.SIGKILL)
        except ProcessLookupError:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if user:
        kill_all = ["/bin/sh", "-c", "kill -9 -1"]
        subprocess.run(kill_all, user=user, group=user, extra_groups=[], stderr=subprocess.DEVNULL)
    process.wait()


def _limits(own_user: bool, timeout: float, memory_mb: int, processes: int, file_mb: int) -> dict[str, int]:
    """Names and values of the resource limits.

    That on processes counts all of a user's, so the caller's are added.
    """
    others = 0 if own_user else len(list(Path("/proc").glob("[0-9]*/task/*")))
    return {
        "RLIMIT_CPU": math.ceil(timeout) + 1,
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_FSIZE": file_mb << 20,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": others + processes,
    }


def _environment(barrier: str, folder: str) -> dict[str, str]:
    home = "/scratch" if barrier == "bwrap" else folder
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        "OMP_NUM_THREADS": "1",
    }


def _run(
    program: str,
    barrier: str,
    own_user: bool,
    timeout: float = 10.0,
    memory_mb: int = 1024,
    processes: int = 32,
    file_mb: int = 16,
) -> Result:
    """Runs a program behind a barrier. OSError if the sandbox itself cannot start."""
    folder, user = _new_folder(own_user)
    limits = _limits(own_user, timeout, memory_mb, processes, file_mb)
    word = secrets.token_hex(16)
    read_end, report = os.pipe()
    first_to_be_killed = '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"'
    start = f"{inspect.getsource(_inside)}\n_inside({limits}, {user}, {report}, {_filter()})"
    command = ["/bin/sh", "-c", first_to_be_killed, "sh", *_command(barrier, own_user, folder, file_mb)]
    command += [sys.executable, "-I", "-X", "utf8", "-c", start]

    process = None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=_environment(barrier, folder),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=(report,),
                start_new_session=True,
            )
            process.communicate(f"{word}\n{program}".encode("utf-8", "surrogatepass"), timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process:
                _kill(process, user)
            # not by shutil.rmtree, whose recursion ends at 1,000 folders
            subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)
            os.close(report)
        with open(read_end, "rb", buffering=0) as pipe:
            os.set_blocking(read_end, False)  # a process that is left could keep the other end open
            said = pipe.read(1 << 16) or b""
        out.seek(0)
        err.seek(0)
        stdout = out.read().decode(errors="replace")
        stderr = err.read().decode(errors="replace")

    if code is not None and not said.startswith(b"started"):
        problem = f"the sandbox ({barrier}) did not start, exit code {code}: {stderr.strip()[-500:]}"
        if _status(code, finished=False) == "killed":
            raise KilledAtStart(problem)
        raise OSError(problem)
    status = _status(code, finished=word.encode() in said)
    if status == "error" and code == 0:
        stderr += "sandbox: exited before its last line\n"
    return Result(status == "ok", status, stdout, stderr, describe(barrier, own_user))


def describe(barrier: str, own_user: bool) -> str:
    """Says what bounds a program: the barrier, and whose user id it has."""
    user_id = "user id of the caller"
    if own_user:
        user_id = "user id of its own"
    return f"{BARRIERS[barrier]}; {user_id}"


def _status(code: int | None, finished: bool) -> str:
    """Result.status of an exit code (None: the time was up).

    `finished`: the program came to its last line.
    """
    if code is None:
        return "timeout"
    if code < 0 or code > 128:  # bwrap returns 128 + signal
        return "killed"
    if code == 0 and finished:
        return "ok"
    return "error"


@functools.cache
def strongest() -> tuple[str, bool]:
    """Finds this machine's barrier, and whether a program gets its own user id, by running one.

    Raises OSError if root could run programs only without one.
    """
    root = os.geteuid() == 0
    for barrier, own_user in [("bwrap", root), ("bwrap", False), ("unshare", root), ("none", root)]:
        try:
            if _run("import decimal\nopen('file', 'w').close()", barrier, own_user).ok:
                return barrier, own_user
        except OSError:  # not installed, or not allowed here
            continue
    raise OSError("no sandbox can be made here, and root runs no program without one; apt install bubblewrap")


def run(
    program: str, timeout: float = 10.0, memory_mb: int = 1024, processes: int = 32, file_mb: int = 16
) -> Result:
    """Runs a program to its end or its limits. Several threads may call it at once.

    Args:
        program: Python source; any string is fine. Its stdin is empty, and it is `__main__`.
        timeout: wall time in seconds. CPU time is limited to about as much.
        memory_mb: address space of each process.
        processes: processes and threads at one time. Root's own user id knows no such limit.
        file_mb: size of each file that it writes; stdout and stderr are files.
    """
    barrier, own_user = strongest()
    return _run(program, barrier, own_user, timeout, memory_mb, processes, file_mb)


def announce_barrier() -> None:
    """Prints what bounds the programs of a policy on this machine; exits with 2 if root could run none safely."""
    barrier, own_user = or_fail(strongest)
    PartialState().print(f"programs run behind {describe(barrier, own_user)}")
    if barrier == "none":
        PartialState().print(
            "WARNING: programs that the policy writes can use this machine's network and read every file that "
            f"{'all users' if own_user else 'you'} may read. Install bubblewrap (apt install bubblewrap); in a "
            "container it also needs the right to make namespaces"
        )
