"""How a run goes on or ends when something breaks: the lock on its folder, checkpoints that are whole or refused, a heartbeat
that all ranks share, SIGTERM. README.md, "When something breaks", says what a user sees; tests/test_faults.py breaks things.

Standard library only: endpoint.py must not wait for torch.
"""

import contextlib
import faulthandler
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

STALLED, STOPPED = 124, 143  # exit codes: no progress, as of timeout(1); SIGTERM, as of a shell
# This process's run, from runs.start_run: its folder, a hash of its arguments, minutes without progress that end it,
# checkpoints kept (0: all). Then when it last said that it is alive, whether ten times as long may pass, when SIGTERM came,
# and the last step before the end.
RUN = SimpleNamespace(
    folder=None, key="", minutes=1.0, keep=0, beat=-1e9, patient=False, sigterm=None, stopped=False
)
LOCKS = []  # open files; the kernel lets go of a lock when the process ends, however it ends


def write(path: Path, text: str) -> None:
    """The whole text or, on a full disk, OSError and what stood there before."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def lock(folder: Path) -> None:
    """Takes the folder for this process; ValueError names the process that has it."""
    LOCKS.clear()
    file = open(folder / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        message = f"{folder} is in use by {file.read().strip()}; wait for its end, or name another folder with --out"
        raise ValueError(message) from None
    except OSError as e:  # a file system without locks
        print(
            f"WARNING: {folder} cannot be locked ({e}); two runs in it would not notice each other",
            file=sys.stderr,
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    LOCKS.append(file)


# --- checkpoints: `complete` is written last and lists every file


def _contents(folder: Path) -> dict[str, list]:
    """[bytes, SHA-256] of every file by its path in the folder."""

    def digest(path: Path) -> list:
        found = hashlib.sha256()
        with open(path, "rb") as f:
            while part := f.read(2**26):  # a minute for an 8B optimizer's 64 GB
                beat()
                found.update(part)
        return [path.stat().st_size, found.hexdigest()]

    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "complete"]
    with ThreadPoolExecutor(8) as pool:
        return {str(p.relative_to(folder)): content for p, content in zip(paths, pool.map(digest, paths))}


def seal(checkpoint: Path) -> None:
    """Marks a checkpoint as whole, and only then deletes older ones: all but RUN.keep, and what was not written to its end."""
    write(checkpoint / "complete", json.dumps({"run": RUN.key, "files": _contents(checkpoint)}, indent=1))
    older = numbered(checkpoint.parent)
    older = older[: older.index(checkpoint)]
    whole = [c for c in older if (c / "complete").exists()]
    for old in set(older) - set(whole[-RUN.keep + 1 :] if RUN.keep > 1 else []) if RUN.keep else ():
        shutil.rmtree(old)


def flaw(checkpoint: Path) -> str:
    """What makes a checkpoint unusable for this run; "" if nothing does."""
    if not (checkpoint / "complete").exists():
        return "was not written to its end"
    try:
        content = json.loads((checkpoint / "complete").read_text())
        run, files = (
            content["run"],
            {name: (size, digest) for name, (size, digest) in content["files"].items()},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        files = {}
    if not files:
        return "has a file `complete` that lists no files"
    if run != RUN.key:
        return "belongs to another run"
    try:
        found = _contents(checkpoint)
    except OSError as e:
        return f"cannot be read ({e})"
    for name, (size, digest) in files.items():
        if name not in found:
            return f"lacks {name}"
        if found[name][0] != size:
            return f"has {found[name][0]} bytes of {name} instead of {size}"
        if found[name][1] != digest:
            return f"has a {name} that is not what was written (SHA-256)"
    return ""


def numbered(folder: Path) -> list[Path]:
    """Its checkpoint-<number> folders, oldest first."""
    own = [c for c in folder.glob("checkpoint-*") if c.is_dir() and c.name[11:].isdecimal()]
    return sorted(own, key=lambda c: int(c.name[11:]))


# --- the heartbeat: no rank does anything for minutes


def beat() -> None:
    """Progress: a forward, a step of the sampler, a judge's reply. Touches the lock, which all ranks watch, once a second."""
    if RUN.folder and time.monotonic() - RUN.beat > 1:
        RUN.beat = time.monotonic()
        with contextlib.suppress(OSError):
            (RUN.folder / "lock").touch()  # also when somebody has deleted it


@contextlib.contextmanager
def patient():
    """Within it ten times as long may pass without a beat: a checkpoint is written."""
    before, RUN.patient = RUN.patient, True
    try:
        yield
    finally:
        RUN.beat = -1e9
        beat()
        RUN.patient = before


@contextlib.contextmanager
def watched():
    """Within it the process ends with code STALLED when no rank has made progress for RUN.minutes, whatever it hangs in; ten
    times that before the first beat, as models are loaded, and within `patient`. What its threads did stands in
    stacks-rank<k>.txt, as it does when SIGTERM comes (from a launcher that lost another rank)."""
    if not (RUN.folder and RUN.minutes):  # an evaluation, or no run at all
        yield
        return
    ended, path = threading.Event(), RUN.folder / f"stacks-rank{os.environ.get('RANK', 0)}.txt"
    with open(path, "a") as file:
        faulthandler.register(signal.SIGTERM, file=file, chain=True)
        watcher = threading.Thread(target=_watch, args=(file, ended), daemon=True)
        watcher.start()
        try:
            yield
        except BaseException:
            traceback.print_exc(file=file)
            raise
        finally:
            ended.set()
            watcher.join()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGTERM)
    if not path.stat().st_size:
        path.unlink()


def _watch(file, ended: threading.Event) -> None:
    def touched(before: int = 0) -> int:  # compared with itself only, so no clock matters
        with contextlib.suppress(OSError):
            return (RUN.folder / "lock").stat().st_mtime_ns
        return before

    first = seen = touched()
    since, armed = time.monotonic(), None
    while True:
        if (now := touched(seen)) != seen:
            seen, since = now, time.monotonic()
        limit = 60 * RUN.minutes * (10 if seen == first or RUN.patient else 1)  # seconds
        if armed != (since, limit):
            # this thread needs the GIL, which what hangs may hold; the one behind dump_traceback_later does not
            faulthandler.dump_traceback_later(limit + 10, exit=True, file=file)
            armed = since, limit
        if time.monotonic() - since > limit:
            _end(file, limit)
        if ended.wait(min(1.0, RUN.minutes * 15)):
            return


def _end(file, seconds: float) -> None:
    why = f"no rank has made progress for {seconds:.0f} seconds (--stall-minutes {RUN.minutes:g})"
    print(why, file=file, flush=True)
    faulthandler.dump_traceback(file=file)
    faulthandler.dump_traceback()
    print(
        f"error: {why}; {RUN.folder}/stacks-rank*.txt say what each was doing; --resume continues from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    if (
        "TORCHELASTIC_RUN_ID" in os.environ
    ):  # a rank that someone stopped must wake up to write its own stacks
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
                os.kill(int(pid), signal.SIGCONT)
    for child in multiprocessing.active_children():  # vLLM's engine, which else would keep the GPU's memory
        child.kill()
    os._exit(STALLED)


# --- SIGTERM: the scheduler wants the machine back


@contextlib.contextmanager
def stoppable():
    """Within it SIGTERM is a request, which RunLogger grants at the end of the step; outside it ends the process at once."""
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_sigterm(number, frame) -> None:
    now = time.monotonic()
    if RUN.sigterm is None:
        RUN.sigterm = now
        os.write(
            2,
            b"SIGTERM: the run stops with a checkpoint at the end of this step; a second SIGTERM ends it at once\n",
        )
    elif (
        now - RUN.sigterm > 5
    ):  # sooner it is the same one: from the scheduler to all processes, and from the launcher
        os._exit(STOPPED)
