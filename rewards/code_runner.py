"""Runs Python programs that nobody has read: for HumanEval, and for rewards that execute code.

    result = sandbox.run("print(6 * 7)", timeout=10.0)  # .ok .status .stdout .stderr .seconds .isolation

Every program gets an empty folder, an environment without the caller's variables, limits on time, memory, processes, output
and files, no new privileges, a filter of system calls and, where the caller is root, a user id of its own. When memory runs
out, it is what the kernel ends first. What holds beyond that depends on the machine: the first of BARRIERS that works here is
taken, and `isolation` says which. Only bwrap bounds all files together (16 times `file_mb`), and only there can a program not
read what lies beside Python's own folders.

A program is `ok` when it ran past its last line and exited with 0; one that leaves by os._exit(0) before the checks at its
end is not. The proof is a random word that the starting code keeps while the program runs: only a program that goes
looking for it in the interpreter's frames can forge it.
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
import time
from pathlib import Path
from typing import NamedTuple

BARRIERS = {
    "bwrap": "bwrap: no network, no other process, files read-only and only those of Python and /usr",  # Debian: bubblewrap
    "unshare": "unshare: no network, no other process; files as the user id allows",  # util-linux
    "none": "resource limits only; network, processes and files as the user id allows",
}
FIRST_USER, N_USERS = (
    61184,
    4336,
)  # systemd's range for passing services: nobody logs in by these or owns a file

# What no namespace or limit bounds, by machine: audit architecture, numbers of socket, clone, and of add_key, request_key and
# keyctl (the caller's keys), unshare, setns (a root of its own), bpf, userfaultfd, perf_event_open, io_uring_setup (the
# kernel's weak spots), memfd_create, shmget, msgget, semget (memory that is nobody's). Source: the kernel's syscall tables.
SYSCALLS = {
    "x86_64": (0xC000003E, 41, 56, (248, 249, 250, 272, 308, 321, 323, 298, 425, 319, 29, 68, 64)),
    "aarch64": (0xC00000B7, 198, 220, (217, 218, 219, 97, 268, 280, 282, 241, 425, 279, 194, 186, 190)),
}


class Result(NamedTuple):
    ok: bool
    status: str  # ok; error: an exception, or an exit before the last line; timeout; killed: by a signal, as from a limit
    stdout: str
    stderr: str
    seconds: float  # wall time with the start of the interpreter
    isolation: str


def _filter() -> bytes:
    """A seccomp program, 8 bytes an instruction, that denies SYSCALLS, sockets but of Unix, IPv4, IPv6 and netlink (a virtual
    machine's vsock leads to its host), and new user namespaces; nothing on other machines."""
    if platform.machine() not in SYSCALLS:
        return b""
    (architecture, socket, clone, others), load, equal, end = SYSCALLS[platform.machine()], 0x20, 0x15, 0x06
    allow, eperm, enosys = 0x7FFF0000, 0x50001, 0x50026
    program = [
        (load, 4),
        (equal, architecture, 1),
        (end, eperm),
        (load, 0),
        (0x35, 1 << 30, 0, 1),
        (end, eperm),
    ]  # x32
    for number in others:
        program += [(equal, number, 0, 1), (end, eperm)]
    program += [(equal, 435, 0, 1), (end, enosys)]  # clone3 hides its flags; libc then takes clone
    program += [
        (equal, clone, 0, 3),
        (load, 16),
        (0x45, 0x10000000, 0, 1),
        (end, eperm),
        (load, 0),
    ]  # CLONE_NEWUSER
    program += [
        (equal, socket, 0, 6),
        (load, 16),
        *[(equal, family, 4 - i) for i, family in enumerate((1, 2, 10, 16))],
        (end, eperm),
        (end, allow),
    ]
    fields = ((code, (*jumps, 0, 0)[:2], k) for code, k, *jumps in program)
    return b"".join(struct.pack("HBBI", code, *jumps, k) for code, jumps, k in fields)


def _inside(limits: dict[str, int], user: int, report: int, rules: bytes) -> None:
    """The first code in the sandbox: gives up its rights, runs the program on stdin, then says its first line to `report`."""
    import ctypes
    import os
    import resource
    import struct
    import sys
    import types

    word, source = sys.stdin.read().split("\n", 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # another user id may find the way to Python's files closed, as /root is: it goes through open folders
    for prefix in {sys.prefix, sys.base_prefix} if user and os.path.exists("/proc/self/fd") else ():
        door = f"/proc/self/fd/{os.open(prefix, os.O_PATH)}"
        for paths in [sys.path, *(m.__path__ for m in sys.modules.values() if hasattr(m, "__path__"))]:
            paths[:] = [
                door + path.removeprefix(prefix) if path.startswith(prefix) else path for path in paths
            ]
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc, code = ctypes.CDLL(None), ctypes.create_string_buffer(rules)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: setuid programs do not help
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if rules:
        libc.prctl(22, 2, struct.pack("HP", len(rules) // 8, ctypes.addressof(code)), 0, 0)  # PR_SET_SECCOMP
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    os.write(report, b"started ")
    exec(compile(source, "program.py", "exec"), main.__dict__)
    sys.stdout.flush()
    os.write(report, word.encode())


@functools.cache
def _sized() -> bool:
    """Whether this bwrap, from 0.7 on, can bound a folder in memory."""
    return "--size" in subprocess.run(["bwrap", "--help"], capture_output=True, text=True).stdout


def _command(barrier: str, own_user: bool, folder: str, file_mb: int) -> list[str]:
    """What stands before the interpreter. Only outside of a user namespace can a program take a user id of its own."""
    if barrier == "unshare":
        return [
            "unshare",
            *([] if own_user else ["--user"]),
            "--net",
            "--pid",
            "--ipc",
            "--fork",
            "--kill-child",
        ]
    if barrier == "none":
        return []
    as_root = (
        "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --cap-add CAP_SETUID --cap-add CAP_SETGID"
    )
    own = as_root.split() if own_user else ["--unshare-all", "--cap-drop", "ALL"]
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", *own]
    for path in ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sys.prefix):
        for parent in list(Path(path).parents)[-2::-1]:
            command += ["--dir", str(parent)]  # made by --ro-bind, it would be closed to other user ids
        command += ["--ro-bind-try", path, path]
    for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    size = (
        ["--perms", "0777", "--size", str(16 * file_mb << 20), "--tmpfs"] if _sized() else ["--bind", folder]
    )
    return [*command, *size, "/scratch", "--remount-ro", "/", "--chdir", "/scratch"]


def _new_folder(own_user: bool) -> tuple[str, int]:
    """An empty folder and its user id (0: the caller's). The folder reserves the id among all threads and processes."""
    if not own_user:
        return tempfile.mkdtemp(prefix="sandbox-"), 0
    first, parent = secrets.randbelow(N_USERS), Path(tempfile.gettempdir()) / "sandboxes"
    parent.mkdir(exist_ok=True)  # in a folder that all may write to, a program could take all names
    if parent.stat().st_uid:
        raise OSError(f"{parent} belongs to user id {parent.stat().st_uid}, not to root; remove it")
    parent.chmod(0o711)
    for user in (FIRST_USER + (first + i) % N_USERS for i in range(N_USERS)):
        try:
            folder = parent / str(user)
            folder.mkdir(mode=0o700)
            os.chown(folder, user, user)
            return str(folder), user
        except FileExistsError:
            continue
    raise OSError(f"no free user id for a sandbox: {parent} is full; remove old folders")


def _kill(process: subprocess.Popen, user: int) -> None:
    """Ends whatever is left: the child under `unshare` by its id, its group, and all that runs under the user id."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:  # ended by itself
        children = []
    for kill, number in [(os.kill, int(child)) for child in children] + [(os.killpg, process.pid)]:
        try:
            kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if user:
        subprocess.run(
            ["/bin/sh", "-c", "kill -9 -1"], user=user, group=user, extra_groups=[], stderr=subprocess.DEVNULL
        )
    process.wait()


def _run(
    program: str,
    barrier: str,
    own_user: bool,
    timeout: float = 10.0,
    memory_mb: int = 1024,
    processes: int = 32,
    file_mb: int = 16,
) -> Result:
    folder, user = _new_folder(own_user)
    others = (
        0 if own_user else len(list(Path("/proc").glob("[0-9]*/task/*")))
    )  # the limit counts all of a user's
    limits = {
        "RLIMIT_CPU": math.ceil(timeout) + 1,
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_FSIZE": file_mb << 20,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": others + processes,
    }
    home, (read_end, report), word = (
        "/scratch" if barrier == "bwrap" else folder,
        os.pipe(),
        secrets.token_hex(16),
    )
    start = f"{inspect.getsource(_inside)}\n_inside({limits}, {user}, {report}, {_filter()})"
    first_killed = [
        "/bin/sh",
        "-c",
        '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"',
        "sh",
    ]
    command = [
        *first_killed,
        *_command(barrier, own_user, folder, file_mb),
        sys.executable,
        "-I",
        "-X",
        "utf8",
        "-c",
        start,
    ]
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        "OMP_NUM_THREADS": "1",
    }
    process, begin = None, time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
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
            subprocess.run(
                ["rm", "-rf", folder], stderr=subprocess.DEVNULL
            )  # rmtree's recursion ends at 1,000 folders
            os.close(report)
        seconds = time.monotonic() - begin
        with open(read_end, "rb", buffering=0) as pipe:
            os.set_blocking(read_end, False)  # a process that is left could keep the other end open
            said = pipe.read(1 << 16) or b""
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    if code is not None and not said.startswith(b"started"):
        raise OSError(f"the sandbox ({barrier}) did not start, exit code {code}: {stderr.strip()[-500:]}")
    if code is None:
        status = "timeout"
    elif code < 0 or code > 128:  # bwrap says 128 + signal
        status = "killed"
    else:
        status = "ok" if code == 0 and word.encode() in said else "error"
        stderr += "sandbox: exited before its last line\n" if code == 0 and status == "error" else ""
    isolation = f"{BARRIERS[barrier]}; user id {'of its own' if own_user else 'of the caller'}"
    return Result(status == "ok", status, stdout, stderr, seconds, isolation)


@functools.cache
def _strongest() -> tuple[str, bool]:
    """The barrier, and whether with a user id of its own, that a program gets on this machine: found by running one."""
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
    """Runs a program to its end or its limits; may be called from several threads.

    Args:
        program: Python source; any string is fine. Its stdin is empty, and it is `__main__`.
        timeout: wall time in seconds; of CPU time it gets about as much.
        memory_mb: address space of each process.
        processes: processes and threads at one time; no such limit holds for root's own user id.
        file_mb: size of each file it writes; stdout and stderr are files.
    """
    return _run(program, *_strongest(), timeout, memory_mb, processes, file_mb)
