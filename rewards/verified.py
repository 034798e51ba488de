"""Rewards that a program verifies: math (a known answer), code (tests), instructions (checkers).

Known limits. `math_answer` believes math-verify where it is wrong (tests/rewards/test_verified.py lists where). A fraction,
a root or a power counts as worked out, so 782/2 and the root of 152881 are right for 391.
code_runner.py says what a hostile program can read of the tests of `code`. Run a data set's reference solutions through
`code` first, and leave out the tasks that do not get 1.
"""

import contextlib
import functools
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from utils import or_fail
from benchmarks.verified import last_boxed, normalise_math
from rewards import code_runner
from rewards.shared import Values, has_field, verified_values

# --- 1. math: reading an answer

NUMBER = re.compile(
    r"(?:(?<![\w)])-)?"  # a minus, but not that of 16-3
    r"\$?(?<![\d^])(?<!\^\{)"  # dollars; not an exponent
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"  # 1,000, but 1,2 are two numbers
    r"(?:"
    r"(?:e| ?[x*×] ?10\^)\{?[-+]?\d+\}?"  # 1.5e3, 3 x 10^5
    r"|\^\{?-?\d+\}?"
    r")?"
    r"(?: ?/ ?\d+| \d+/\d+|%)?"  # the second is that of a mixed number
)
SCIENTIFIC = re.compile(r"(.*?)(?:e| ?[x*×] ?10\^)\{?\+?(-?\d+)\}?")
MIXED = re.compile(r"(-?\d+) (\d+)/(\d+)")
# Each part excludes what begins the next, so that no text takes a time that grows with the square of its length.
FORMULA = re.compile(r"\$([^$\n\\^]*[\\^][^$\n]*)\$|\\\(((?:(?!\\\().)*?)\\\)")
LONGEST_ANSWER = 1000  # characters; comparing takes longer than in proportion to them
MORE_THAN_A_NUMBER = re.compile(r"\\[dt]?frac|\\sqrt|\\pi|\\text\{ *(?:or|and)\b|\^|\\cdot|\\times")


def final_answer(text: str) -> str | None:
    r"""Returns what is in the last \boxed{}, else the last number without its commas, else None.

    The number may be a fraction, a mixed number or one times a power of ten. The last two are written in LaTeX,
    as math-verify reads 2 1/2 as 21/2. If the last number is part of a LaTeX formula that is more than a
    number, such as \frac{1}{2}, the answer is what follows the formula's last equals sign. More than
    LONGEST_ANSWER characters are no answer.
    """
    answer = _last_answer(text)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return None
    return answer


def _last_answer(text: str) -> str | None:
    """Returns what `final_answer` does, whatever its length."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip().removesuffix(".")

    text = text.replace("\u2212", "-").replace("\u2013", "-")  # typographic minus, en dash
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    for formula in FORMULA.finditer(text):
        if formula.start() <= last.start() and last.end() <= formula.end():
            content = formula[1] or formula[2]
            result = content.rpartition("=")[2].strip()
            if MORE_THAN_A_NUMBER.search(result):
                return result
            break
    return _in_latex(re.sub("[$,]", "", last[0]))


def _in_latex(number: str) -> str:
    r"""Writes 2 1/2 as 2\frac{1}{2}, 1.5e3 as 1.5\times 10^{3}, and 3 / 4 as 3/4."""
    mixed = MIXED.fullmatch(number)
    if mixed:
        return f"{mixed[1]}\\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    scientific = SCIENTIFIC.fullmatch(number)
    if scientific:
        return f"{scientific[1]}\\times 10^{{{scientific[2]}}}"
    return number.replace(" ", "")


# --- 2. math: comparing two answers


def _compare_pairs(seconds: float) -> None:
    """Prints math-verify's verdict, 0 or 1, on every pair (truth, answer) of stdin.

    It runs in a process whose source is this function. The kernel ends that process when a pair takes more
    than `seconds` of CPU time, as Python's signal handlers do not run inside of 9**9**9.
    """
    import contextlib
    import json
    import logging
    import resource
    import signal
    import sys

    import math_verify

    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        sides = [math_verify.parse(f"\\boxed{{{side}}}", parsing_timeout=None) for side in json.loads(line)]
        equal = math_verify.verify(*sides, timeout_seconds=None)
        with contextlib.suppress(TypeError, AttributeError, IndexError):  # not numbers
            truth, answer = (complex(side[0].doit()) for side in sides)
            larger = max(abs(truth), abs(answer))
            if 0 < larger < 1e-3:  # math-verify rounds to six places
                equal &= abs(truth - answer) <= 0.01 * larger
        print(int(equal), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


@functools.cache
def _comparer(seconds: float) -> subprocess.Popen:
    """Starts the process of `_compare_pairs`; it serves until a pair takes too long."""
    source = f"{inspect.getsource(_compare_pairs)}\n_compare_pairs({seconds})"
    command = [sys.executable, "-P", "-c", source]
    # In a session of its own, as launchers send SIGTERM to the whole process group of a trainer, which still
    # has a step to finish. This process ends with its stdin.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    if _verdict(process, "1", "1") != "1":
        raise OSError(
            "the process that compares answers did not start; its error is above (is math-verify installed?)"
        )
    return process


def _verdict(process: subprocess.Popen, truth: str, answer: str) -> str:
    """Asks the comparing process: "1", "0", or "" if it ended."""
    try:
        process.stdin.write(json.dumps([truth, answer]) + "\n")
        process.stdin.flush()
    except BrokenPipeError:  # it has ended since the pair before
        return ""
    return process.stdout.readline().strip()


def _compare(truth: str, answer: str, seconds: float) -> bool:
    """Whether math-verify finds both equal. A pair that takes too long is not.

    If another signal than that of the time limit has ended the process, a new one is asked once more.
    """
    for _ in range(2):
        process = _comparer(seconds)
        verdict = _verdict(process, truth, answer)
        if verdict:
            return verdict == "1"

        exit_code = process.wait()
        _close(process)
        _comparer.cache_clear()  # the next pair gets a new process
        ended_by_another = exit_code in (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT, -signal.SIGHUP)
        if not ended_by_another:
            return False
    return False


def _close(process: subprocess.Popen) -> None:
    """Closes the pipes of a process that has ended."""
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):  # what was written and never read
        process.stdin.close()


# An answer that still has to be worked out repeats the question, unless the truth is written in this way too.
UNSOLVED = ("\\sum", "\\prod", "\\int", "\\lim", "\\gcd", "\\det", "\\ne", "\u2260")
# The same where the truth is one number. A sign, a fraction, a root, a power and one power of ten are no such work.
WORK = re.compile(
    r"\\(?:max|min|[dt]?binom|lfloor|lceil|log|ln|lg|exp|sin|cos|tan|cot|operatorname|[bp]?mod|div)(?![a-zA-Z])"
    r"|\\[dt]?frac\{(?:d|\\mathrm\{d\})"  # a derivative
    r"|[\d)}]\s*!"
    r"|[\d.)\]}!%|]\s*(?:[-+*\u2212÷×·⋅]|\\cdot|\\times)\s*[-+]?\s*[\d.(\[{\\|]"  # a sign has nothing before it
)
POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|[*×·⋅])\s*10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)")
WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}")
SPACING = re.compile(r"\\(?:left|right|q?quad)(?![a-zA-Z])|\\[,;: ]|~")
WRITING = re.compile(
    r"\^\{?\\circ\}?|\\[!%$]|\\[dt]?frac|[\s{}$%]"
)  # what does not change which number it is
UNIT = re.compile(r"\\text\{ (?!(?:or|and|not)\b)[A-Za-z./ ]*\}(?:\^\{?\d\}?)?\s*")
POWERS_OF_TEN = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def _is_unsolved(truth: str, answer: str) -> bool:
    """Whether what follows the answer's last = still has to be worked out."""
    without_limits = re.sub(r"_\{[^{}]*\}", "", answer)  # the = of a sum's limits is not an equation
    result = without_limits.rpartition("=")[2]
    if any(word in result and word not in truth for word in UNSOLVED):
        return True
    if not _is_one_number(truth):
        return False
    result = SPACING.sub(" ", WORDS.sub(" ", result))
    result = POWER_OF_TEN.sub("", result, count=1)
    return WORK.search(result) is not None


def _is_one_number(truth: str) -> bool:
    r"""Whether a truth is a number such as 1,000, -\frac{1}{2}, 5\text{ cm} or 3\times 10^8."""
    number = truth.rpartition("=")[2]
    for left_out in (WORDS, SPACING, POWER_OF_TEN, WRITING):
        number = left_out.sub("", number)
    return re.fullmatch(r"[-+]?(?=\.?\d)(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d*)?(?:/\d+)?", number) is not None


def _with_powers(side: str) -> str:
    r"""Writes 5\text{ million} as 5 \cdot 10^{6}."""
    for word, power in POWERS_OF_TEN.items():
        side = re.sub(rf"\\text\{{\s*{word}\s*\}}", rf" \\cdot 10^{{{power}}}", side)
    return side


def _as_word(side: str) -> str:
    r"""Writes \text{ even } as even."""

    def content(match: re.Match) -> str:
        return match[1].strip()

    return re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", content, side).strip()


def spell(answer: str) -> str:
    """Returns an answer in MATH's spelling, without percent signs; raises ValueError for one with two units.

    MATH's rule drops only a sign behind a backslash.
    """
    return normalise_math(re.sub(r"\\?%", "", answer))


def _same_spelling(truth: str, answer: str) -> bool:
    """Whether both are the same in MATH's spelling, which drops a unit and everything after it."""
    unit_at = answer.find("\\text{ ")
    if unit_at >= 0 and not UNIT.fullmatch(answer, unit_at):
        return False  # more than a unit follows
    try:
        return spell(truth) == spell(answer)
    except ValueError:  # more than one unit
        return False


def _equal(truth: str, answer: str | None, seconds: float) -> bool:
    """Whether both are spelled alike or math-verify finds them equal.

    A comparison that takes too long counts as wrong. If it had no value, a policy could escape the penalty
    by answers that are slow to compare. An answer that would fit several truths is not equal either: the question
    once more (see `_is_unsolved`), an anagram of the truth's words, a unit and more text behind it.
    """
    if not answer or _is_unsolved(truth, answer):
        return False
    truth = _with_powers(truth)
    answer = _with_powers(answer)

    truth_word = _as_word(truth)
    answer_word = _as_word(answer)
    both_words = all(re.fullmatch("[A-Za-z]{2,}", word) for word in (truth_word, answer_word))
    marked_as_text = truth_word != truth or answer_word != answer
    if both_words and (marked_as_text or len(truth_word) > 3):  # else a product of variables, such as xy
        return truth_word.casefold() == answer_word.casefold()

    if truth == answer or _same_spelling(truth, answer):
        return True
    return _compare(truth, answer, seconds)


def _truth(row: dict) -> str | None:
    r"""Reads the known answer of a row.

    It is the whole field `answer`, what follows its last ####, or what is in its last \boxed{}.
    """
    if not has_field(row, "answer"):
        return None
    truth = str(row["answer"]).rpartition("####")[2].strip()
    boxed = last_boxed(truth)
    return truth if boxed is None else boxed


def math_answer(
    rows: list[dict], value: float = 1.0, no_eos: float | None = None, seconds: float = 3.0
) -> Values:
    r"""Returns `value` where the final answer of the response equals `answer`, else 0.

    This is the reward of RLVR (Tülu 3, 2411.15124, section 6). Rows need `answer`: the final answer, or a
    solution that ends with `#### answer` or \boxed{answer}. A process must make one call at a time.

    Args:
        value, no_eos: see shared.verified_values.
        seconds: CPU time of one comparison.
    """
    shares = []
    for row in rows:
        truth = _truth(row)
        if truth is None:
            shares.append(None)
        else:
            shares.append(float(_equal(truth, final_answer(row["response"]), seconds)))
    return verified_values(rows, shares, value, no_eos)


# --- 3. code


def _share_passed(row: dict, timeout: float, partial: bool) -> float | None:
    """Returns the share of its tests that a row passes; None if it has none, or the sandbox did not start."""
    if not has_field(row, "tests"):
        return None
    tests = code_runner.read_tests(row)
    names = code_runner.tested_names(tests, row.get("entry_point") or "")
    program = code_runner.find_program(row["response"], names)
    result = code_runner.run(program, tests, timeout)
    if result.status == "not started":
        return None
    passed = result.passed
    if (
        partial and result.status != "ok"
    ):  # one test may have ended all: each by itself, in its share of the time
        passed = []
        for test in tests:
            passed += code_runner.run(program, [test], timeout / len(tests)).passed
    return sum(passed) / len(tests)


def code(
    rows: list[dict],
    partial: bool = False,
    value: float = 1.0,
    no_eos: float | None = None,
    timeout: float = 10.0,
    workers: int = os.cpu_count() or 1,
) -> Values:
    """Returns `value` where the program in the response passes all `tests`, else 0.

    Rows need `tests`. A list of test strings, each with what it needs, is run in order. One string is a
    program; it defines `check(candidate)` if the row has an `entry_point` (a name, or an expression such as
    `Solution().solve`).

    The value is None where the sandbox was killed before the program began. Raises ValueError as
    code_runner.read_tests does; the check at the start of a run has said so before.

    Args:
        partial: return `value` times the share of the tests that pass.
        value, no_eos: see shared.verified_values.
        timeout: wall time of all tests of a row, in seconds; twice that with `partial`.
        workers: programs that run at the same time.
    """
    # A policy that has settled writes the same program again and again: equal responses to equal tests are
    # run once.
    keys = [json.dumps([row["response"], row.get("tests"), row.get("entry_point")]) for row in rows]
    different = dict(zip(keys, rows))
    with ThreadPoolExecutor(workers) as pool:
        run_one = functools.partial(_share_passed, timeout=timeout, partial=partial)
        shares = dict(zip(different, pool.map(run_one, different.values())))

    row_shares = [shares[key] for key in keys]
    if not partial:
        row_shares = [share if share is None else float(share == 1) for share in row_shares]
    return verified_values(rows, row_shares, value, no_eos)


code.read_field = code_runner.read_tests  # rewards.check tries it on every prompt


# --- 4. instructions


def instructions(
    rows: list[dict],
    rule: Literal["strict", "loose"] = "strict",
    partial: bool = False,
    value: float = 1.0,
    no_eos: float | None = None,
) -> Values:
    """Returns `value` where the response meets every instruction, else 0.

    Rows need `instruction_id_list` and `kwargs`. The checkers are those of the evaluation: IFBench's where
    they know all ids, else IFEval's. A response that cannot be checked within ten seconds meets no
    instruction. Unlike in the evaluation, one without a letter meets no instruction about its language. Exits
    with 2 for an unknown id.

    Args:
        rule: as in IFEval; loose forgives a first line, a last line and asterisks.
        partial: return `value` times the share of the instructions that are met.
        value, no_eos: see shared.verified_values.
    """
    from benchmarks import ifbench, ifeval  # their checkers take seconds to import

    shares = []
    for row in rows:
        names = row.get("instruction_id_list")
        if not names:
            shares.append(None)
            continue
        task = {"key": row["id"], "prompt": row["messages"][-1]["content"]} | row
        if ifbench.CHECKERS.keys() >= set(names):
            check = functools.partial(ifeval.bounded, ifbench.check)
        else:
            check = ifeval.ifeval_check
        met = or_fail(check, task, row["response"])[rule]
        met = [found and not _says_nothing(name, row) for name, found in zip(names, met, strict=True)]
        shares.append(sum(met) / len(met) if partial else float(all(met)))
    return verified_values(rows, shares, value, no_eos)


def _check_instructions(prompt: dict) -> None:
    """Exits with 2 if NLTK's data is missing, or a prompt has an instruction that no checker knows."""
    from benchmarks import ifbench, ifeval

    task = {"key": prompt["id"]} | prompt
    if ifbench.CHECKERS.keys() >= set(prompt["instruction_id_list"]):
        ifeval.check_ifbench([task])
    else:
        ifeval.check_ifeval([task])


instructions.read_field = _check_instructions  # rewards.check tries it on every prompt


def _says_nothing(name: str, row: dict) -> bool:
    """Whether an instruction is about the language of a response that has no letter, such as "1".

    IFEval's checker counts a text whose language cannot be told as right, which would reward saying nothing.
    """
    has_letter = any(character.isalpha() for character in row["response"])
    return name.startswith("language:") and not has_letter
