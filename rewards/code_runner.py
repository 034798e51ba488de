"""Runs the tests of a data set against a program that a policy wrote; verified.py makes a reward of it.

The work is done in the sandbox by two processes, whose source is sent there as text: code_tests.py, which
holds the tests and the verdicts, and code_program.py, which holds the program.
"""

from pathlib import Path

from rewards import sandbox

TESTS_PROCESS = Path(__file__).with_name("code_tests.py").read_text()
PROGRAM_PROCESS = Path(__file__).with_name("code_program.py").read_text()


def count_passed(program: str, tests: list[str], entry_point: str, timeout: float) -> int | None:
    """Counts the tests that a program passes. They run in order, for `timeout` seconds of wall time.

    Returns None if a test cannot be run in this way: it is not Python, or it hands over what cannot be
    pickled. None too if the processes twice do not get ready: they are killed, as when this machine's memory
    runs out, or the time is up, as on a machine with too much to do. OSError if they do not start for another
    reason. `entry_point` names what is tested, even if that is the name of a builtin or a module; "" if
    unknown.
    """
    call = f"main({PROGRAM_PROCESS!r}, {program!r}, {tests!r}, {entry_point!r})"
    result = _run(call, timeout) or _run(call, timeout)
    if result is None:
        return None
    verdicts = result.stdout.split()[1:]  # after "ready"
    if "?" in verdicts:
        return None
    return verdicts.count("1")


def _run(call: str, timeout: float) -> sandbox.Result | None:
    """Runs the processes; None if they were killed or the time was up before they were ready.

    The program is sent to them when they are ready, so it cannot bring that about.
    """
    try:
        result = sandbox.run(f"{TESTS_PROCESS}\n{call}", timeout)
    except sandbox.KilledAtStart:
        return None
    ready = result.stdout.split()[:1] == ["ready"]
    if not ready and result.status in ("killed", "timeout"):
        return None
    if not ready:
        raise OSError(f"the tests did not start: {result.stderr.strip()[-300:]}")
    return result
