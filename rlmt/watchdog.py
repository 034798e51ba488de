"""Locks a run's folder, ends a run in which nothing moves, stops it cleanly on SIGTERM, and writes files whole.

Uses the standard library only, so that a program that merely asks a judge need not wait for torch.
"""

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

STALLED = 124  # exit code when no rank makes progress; timeout(1) has the same
STOPPED = 143  # exit code after SIGTERM; a shell has the same
PATIENCE_FACTOR = 10  # times --stall-minutes that may pass while models are loaded or a checkpoint is written
# bytes a second: half of the 0.2 GB/s that a cluster's disk may leave to one run when many write. An 8B checkpoint,
# 96 GB, may take 16 minutes; PATIENCE_FACTOR allows 10 by default
SLOWEST_DISK = 1e8
SAME_SIGTERM = 5  # seconds in which a second SIGTERM is the first one, passed on by scheduler and launcher


@dataclass
class Run:
    """Holds what this process knows of its run."""

    folder: Path | None = None
    minutes: float = 0.0
    """Minutes without progress that end the run; 0: never."""
    last_beat: float = -1e9
    patience: float = 0.0
    """Seconds without progress that `allow_seconds` allows at least; 0 outside of it."""
    sigterm_at: float | None = None


RUN = Run()
_LOCK_FILES = []  # kept open; the kernel releases a lock when the process ends, however it ends


def lock_folder(folder: Path) -> None:
    """Locks the folder for this process; raises ValueError that names the process which has it."""
    _LOCK_FILES.clear()  # flock would refuse a second lock to this process as well
    file = open(folder / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        message = f"{folder} is in use by {holder}; wait for its end, or name another folder with --out"
        raise ValueError(message) from None
    except OSError as error:  # a file system without locks
        message = f"WARNING: {folder} cannot be locked ({error}); two runs in it would not notice each other"
        print(message, file=sys.stderr)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _LOCK_FILES.append(file)


# --- the heartbeat: every rank touches the run's lock file when it makes progress, and looks when it was touched


def set_run(folder: Path, minutes: float) -> None:
    """Sets the run of this process; see Run for `minutes`."""
    (folder / "lock").touch()
    RUN.folder = folder
    RUN.minutes = minutes


def beat() -> None:
    """Reports progress, such as a forward, a step of the sampler or a judge's reply; does so once a second at most."""
    if RUN.folder and time.monotonic() - RUN.last_beat > 1:
        RUN.last_beat = time.monotonic()
        with contextlib.suppress(OSError):
            (RUN.folder / "lock").touch()  # also if somebody has deleted it


@contextlib.contextmanager
def allow_seconds(n_bytes: int = 0):
    """Allows more time without a beat, for work that cannot report, such as writing a checkpoint.

    It is PATIENCE_FACTOR times --stall-minutes, or what `n_bytes` take at SLOWEST_DISK if that is longer.
    """
    before = RUN.patience
    RUN.patience = max(before, 60 * RUN.minutes * PATIENCE_FACTOR, n_bytes / SLOWEST_DISK)
    try:
        yield
    finally:
        RUN.last_beat = -1e9  # so that this beat touches the file
        beat()
        RUN.patience = before


@contextlib.contextmanager
def watched():
    """Ends the process with code STALLED when no rank makes progress for RUN.minutes, whatever it hangs in.

    Within `allow_seconds` more time may pass, and until the first beat PATIENCE_FACTOR times as much: a model may be
    loaded then. The stacks of all threads go to stacks-rank<k>.txt, as they do on SIGTERM (from a launcher that
    lost another rank) and on an exception.
    """
    if not RUN.folder or not RUN.minutes:  # an evaluation
        yield
        return
    path = RUN.folder / f"stacks-rank{os.environ.get('RANK', 0)}.txt"
    ended = threading.Event()
    with open(path, "a") as file:
        faulthandler.register(signal.SIGTERM, file=file, chain=True)
        watcher = threading.Thread(target=_end_when_stalled, args=(file, ended), daemon=True)
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


def _last_touch(before: int) -> int:
    """Returns when the lock file was last touched, or `before` if it cannot be read."""
    with contextlib.suppress(OSError):
        return (RUN.folder / "lock").stat().st_mtime_ns
    return before


def _end_when_stalled(file, ended: threading.Event) -> None:
    """Looks at the lock file until `ended`; ends the process if nobody touches it for too long.

    Its time is only compared with its earlier times, so the clocks of the ranks may differ.
    """
    first = seen = _last_touch(0)
    since = time.monotonic()
    while True:
        patience = RUN.patience  # before the file is read, as `allow_seconds` beats before it ends
        now = _last_touch(seen)
        if now != seen:
            seen = now
            since = time.monotonic()
        limit = 60 * RUN.minutes  # seconds
        if seen == first:
            limit *= PATIENCE_FACTOR
        limit = max(limit, patience)
        seconds_left = since + limit - time.monotonic()
        # this thread needs the GIL, which the code that hangs may hold; that of dump_traceback_later does not
        faulthandler.dump_traceback_later(max(0, seconds_left) + 10, exit=True, file=file)
        if seconds_left < 0:
            _end_stalled(file, limit)
        if ended.wait(min(1.0, RUN.minutes * 15)):  # at least four times in --stall-minutes
            return


def _end_stalled(file, seconds: float) -> None:
    """Writes the stacks of all threads to the file and to stderr, and ends the process with code STALLED."""
    reason = f"no rank has made progress for {seconds:.0f} seconds (--stall-minutes {RUN.minutes:g})"
    print(reason, file=file, flush=True)
    faulthandler.dump_traceback(file=file)
    faulthandler.dump_traceback()
    message = (
        f"error: {reason}; {RUN.folder}/stacks-rank*.txt say what each rank was doing; "
        "--resume continues from the last checkpoint"
    )
    print(message, file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # a rank that somebody stopped must wake up to write its own stacks
        with contextlib.suppress(OSError):
            launcher = os.getppid()
            for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
                os.kill(int(pid), signal.SIGCONT)
    for child in multiprocessing.active_children():  # a vLLM worker would keep the GPU's memory
        child.kill()
    os._exit(STALLED)


# --- SIGTERM: the scheduler wants the machine back


@contextlib.contextmanager
def stoppable():
    """Sets `RUN.sigterm_at` on SIGTERM instead of ending; the training loop stops at the end of its step."""
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_sigterm(number, frame) -> None:
    now = time.monotonic()
    if RUN.sigterm_at is None:
        RUN.sigterm_at = now
        message = b"SIGTERM: the run stops with a checkpoint at the end of this step; a second one ends it at once\n"
        os.write(2, message)
        return
    if now - RUN.sigterm_at > SAME_SIGTERM:
        os._exit(STOPPED)
