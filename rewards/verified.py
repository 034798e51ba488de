"""Rewards that a program verifies: math (a known answer), code (tests), instructions (checkers).

Known limits. `math_answer` believes math-verify where it is wrong (tests/rewards/test_verified.py lists
where). code_runner.py says what a hostile program can read of the tests of `code`. For IFEval a response without a
letter is in any language. Run a data set's reference
solutions through `code` first, and leave out the tasks that do not get 1.
"""

import functools
import inspect
import json
import re
import subprocess
import sys
import unicodedata
from typing import Literal

from rewards import Values
from rlmt import code_runner, sandbox
from rlmt.verdicts import last_boxed

# --- 1. math: reading an answer

LONGEST_ANSWER = 1000  # characters; comparing takes longer than in proportion to them
# What math-verify does not read, as LaTeX that it does; in this order.
SPELLINGS = (
    (r"([⁻⁰¹²³⁴-⁹]+)", r"^{\1}"),
    (r"([¼-¾⅐-⅞])", r" \1"),
    (r"[×·⋅]", r"\\cdot "),
    (r"∛", "[3]√"),
    (r"(\[3\])?√ *(?:\(([^()]*)\)|(\d+|\w))", r"\\sqrt\1{\2\3}"),
    (r"π", r"\\pi "),
    (r"[°¢-¥₠-⃀]", ""),  # degrees, and all currencies but the dollar
    (r"(?<=\d)[\u00a0\u2009\u202f'’](?=\d{3}(?!\d))", ""),  # thousands
)
LATEX_SPELLINGS = (
    (r"[\u2012-\u2014\u2212]", "-"),
    (r"\u2044", "/"),  # of ½
    (r"(?<=\d)(?:\\[,!;: ]|\{,\})(?=\d{3}(?!\d))", ""),  # 10\,000
    (r"(?<![\d/.])(\d+)(?: |\\[ ,;:])+(\d+) ?/ ?(\d+)", r"\1\\frac{\2}{\3}"),  # 3 1/2
    (r"(?<=\d) ?/ ?(?=\d)", "/"),
    (r"(?<=\d)(?:e| ?[x*] ?10\^)\{?\+?(-?\d+)\}?", r"\\times 10^{\1}"),
    (r"(?<=\d) *(?:\\text\{ *)?hundred\b *\}?", r"\\cdot 10^{2}"),
    (r"(?<=\d) *(?:\\text\{ *)?thousand\b *\}?", r"\\cdot 10^{3}"),
    (r"(?<=\d) *(?:\\text\{ *)?million\b *\}?", r"\\cdot 10^{6}"),
    (r"(?<=\d) *(?:\\text\{ *)?billion\b *\}?", r"\\cdot 10^{9}"),
    (r"\\(?:boxed|fbox)(?![a-z]) *", r"\\boxed"),
    (r"\\boxed(-?\d[\d.]*|[A-Z]\b)", r"\\boxed{\1}"),
    (r"\\begin\{(?:align|equation|gather|multline|split)\w*\*?\}", r"\\["),
    (r"\\end\{(?:align|equation|gather|multline|split)\w*\*?\}", r"\\]"),
)

# Each part excludes what begins the next, so that no text takes a time that grows with the square of its
# length.
LATEX_VALUE = r"\\[dt]?frac\{[^{}]*\}\{[^{}]*\}|\\sqrt(?:\[\d\])?\{[^{}]*\}|\\pi(?![a-z])"
NUMBER = (
    r"(?:(?<![\w)}])-|(?<=[:=] )- |(?<=is )- )?"  # a minus, but not that of 16-3
    r"\$?(?<![\d^])(?<!\^\{)"  # dollars; not an exponent
    # 1,000 or 1 000, but 1,2 are two
    rf"(?:(?:\d{{1,3}}(?:(?:,\d{{3}})+|(?: \d{{3}})+)(?!\d)|\d+)(?:\.\d+)?|\.\d+|{LATEX_VALUE})"
    rf"(?:(?: ?\\(?:times|cdot) *10)?\^\{{?-?\d+\}}?|/\d+|\\?%|{LATEX_VALUE})*"
)
FORMULA = (
    r"\$\$[^$]+\$\$|\$(?:[^$\n\\^_=(]*[\\^_=]|\()[^$\n]*\$"  # $5 and $6 are prices
    r"|\\[(\[](?:(?!\\[(\[]).)*?\\[)\]]"
)
# behind a number: m^2, km/h, but not the x^2 of 5 x^2
UNIT = r"(?:[A-Za-z]{2,}|[mgl])(?:\^[23]|(?:\^[23])?/[A-Za-z]+(?:\^[23])?)"
CHOICE = r"(?:[A-J]|(?i:yes|no|true|false))(?![\w'’])"
BEFORE_CHOICE = r"(?:[ *_$(:]|is\b|\\[(\[]|\\(?:text|math)\w*\{)*(?i:(?:option|choice) [*(]{0,3})?"
ANSWER = re.compile(
    # (A) on a line of its own, or in "the answer is (A)", but not in "the answer is (A) or (B)". Behind that A comes
    # punctuation, the end of the line or a reason: the answers "F = 12" and "A good 5" are numbers. Where a choice is
    # found, no number is looked for in the rest of its line.
    rf"^(?:{BEFORE_CHOICE}(?P<alone>{CHOICE})[ *_$)}}.]*$"
    rf"|[^\n]*(?i:answer|option|choice)(?=[*:]| is\b){BEFORE_CHOICE}(?P<choice>{CHOICE})"
    r"(?![ *_),/$}]*(?:(?:or|and)\W+)?[A-J]\b)[ *_$}]*(?:[).,;:]|$| \(|(?:because|since|as)\b)[^\n]*)"
    rf"|(?P<formula>{FORMULA})|(?P<number>{NUMBER})",
    re.DOTALL | re.MULTILINE,
)
# to the end of its sentence
MARKED = re.compile(r"(?:####|(?i:answer)(?: is\b|\W*:))\W*[^\n]*?(?=\n|\.(?:\s|$)|$)")
CHOICE_ALONE = re.compile(rf"{BEFORE_CHOICE}({CHOICE})[ *_).:}}$]*")
CHOICE_WITH_TEXT = re.compile(rf"{BEFORE_CHOICE}([A-J])(?:\)|[.:](?= ))[^()]*")


def _as_latex(text: str) -> str:
    """Writes ½, 3 1/2, √3, 45°, 1.5e3 and the like in LaTeX."""
    for pattern, latex in SPELLINGS:
        text = re.sub(pattern, latex, text)
    text = unicodedata.normalize("NFKC", text)
    for pattern, latex in LATEX_SPELLINGS:
        text = re.sub(pattern, latex, text)
    return text


def _spell(answer: str) -> str:
    """Returns an answer without its full stop, its words and a number's commas; of a choice its letter or word."""
    choice = CHOICE_ALONE.fullmatch(answer) or CHOICE_WITH_TEXT.fullmatch(answer)
    if choice:
        word = choice[1]
        if len(word) > 1:
            word = word.lower()
        return rf"\text{{{word}}}"
    answer = re.sub(r"(?<=\d) (?:[A-Za-z]{3,}\b ?)+$", "", answer)  # 18 dollars
    answer = re.sub(rf"(?<=\d) {UNIT}$", "", answer)
    answer = answer.strip().removesuffix(".").replace(r"\$", "$")
    if re.fullmatch(NUMBER, answer):
        answer = re.sub("[$, ]", "", answer)
    return re.sub(r"^(\d\w*)_\{?(\d+)\}?$", r"(\1,\2)", answer)  # a base, which math-verify leaves out


def final_answer(text: str) -> str | None:
    r"""Returns what is boxed, else the last formula's result, number or choice, else None; in LaTeX.

    Without a box it is that of the sentence after the last "####" or "answer is", if there is one.
    A number may be a fraction, a mixed number or one times a power of ten, and has no commas. A choice is a
    letter from A to J, yes, no, true or false, on a line of its own or after "the answer is". More than
    LONGEST_ANSWER characters are no answer.
    """
    text = _as_latex(text)
    answer = last_boxed(text)
    for part in (*MARKED.findall(text)[-1:], text):
        if answer is None:
            for match in ANSWER.finditer(part):
                found = match["alone"] or match["choice"] or match["number"] or _result(match["formula"])
                answer = found or answer
    if answer is None or len(answer) > LONGEST_ANSWER:
        return None
    return _spell(answer)


def _result(formula: str) -> str | None:
    """Returns the last side of an equation that is more than a name, or another formula if it has a number."""
    sides = re.split(r"=|\\[\[\]()]|\$|\\q?quad|\\text\{[^{}]*: *\}", formula)
    for side in reversed(sides):
        side = side.strip(" \n&").rstrip(" \n&.,;\\")
        if re.search(r"\d|\\pi", side) or ("=" in formula and not re.fullmatch(r"\\?\w*", side)):
            return side
    return None


# --- 2. math: comparing two answers


def _compare_pairs(seconds: float) -> None:
    """Prints whether the two answers of each line of stdin, [truth, answer], are equal: 0 or 1.

    It runs in a process whose source is this function. The kernel ends that process when a pair takes more
    than `seconds` of CPU time, as Python's signal handlers do not run inside of 9**9**9.
    """
    import json
    import logging
    import re
    import resource
    import signal
    import sys

    import math_verify
    from sympy import Basic, Derivative, Limit
    from sympy.concrete.expr_with_limits import ExprWithLimits
    from sympy.functions.combinatorial.factorials import CombinatorialFunction

    undone = (Derivative, Limit, ExprWithLimits, CombinatorialFunction)

    def operations(node) -> int:
        """Counts what is left to do. 3/4, 50 %, -2 and 3 * 10^5 are numbers, and a function is much work."""
        left = sum(map(operations, node.args))
        if node.is_Pow and node.exp.is_Integer:  # the product that it stands for, unless it is a power of ten
            return (node.base != 10) * (abs(node.exp) * (operations(node.base) + 1) - 1)
        if node.is_Add or node.is_Mul:
            for part in node.args:
                is_scale = node.is_Mul and ((1 / part).doit().is_Integer or (part.is_Pow and part.base == 10))
                left += not is_scale
            return max(left - 1, 0) * (1 + 9 * bool(node.is_rational))  # no root hides 4 + 16
        return left + node.is_Pow + 9 * node.is_Function

    def n_numbers(text: object) -> int:
        return len(re.findall(r"\d{1,3}(?:,\d{3})+|\d+\.?\d*", str(text)))

    def is_equal(sides: list[str]) -> bool:
        parsed = [math_verify.parse(f"\\boxed{{{side}}}", parsing_timeout=None) for side in sides]
        if not math_verify.verify(*parsed, timeout_seconds=None):
            return False
        truth, answer = (getattr(side[0], "rhs", side[0]) for side in parsed)
        if not isinstance(truth, Basic) or not isinstance(answer, Basic):
            return True
        if answer.atoms(*undone) and not truth.atoms(*undone):
            return False
        if "\\ne" in sides[1] and "\\ne" not in sides[0]:  # math-verify leaves it out
            return False
        if truth.free_symbols or answer.free_symbols:
            return True
        worked_out = truth.doit()
        allowed = max(operations(truth), operations(worked_out))
        if worked_out.is_number and worked_out.is_irrational:
            allowed = max(allowed, 1)  # 0.5 pi is pi/2
        if operations(answer) > allowed:
            return False
        if worked_out.is_Integer and n_numbers(parsed[1][1].rpartition("=")[2]) > n_numbers(answer):
            return False  # the parser has worked it out, such as 782/2
        if not truth.is_number or not answer.is_number:
            return True
        truth, answer = worked_out.evalf(), answer.doit().evalf()  # not all exact numbers can be compared
        larger = max(abs(truth), abs(answer))
        # math-verify rounds to six places
        return bool(larger > 1e-3 or abs(truth - answer) <= larger / 100)

    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            print(int(is_equal(json.loads(line))), flush=True)
        except Exception:  # sympy's, of what is no number, such as 1/0 - 1/0
            print(0, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compare(pairs: list[list[str]], seconds: float) -> list[bool]:
    """Returns for each pair (truth, answer) whether both are equal. A pair that takes too long is not."""
    source = f"{inspect.getsource(_compare_pairs)}\n_compare_pairs({seconds})"
    command = [sys.executable, "-P", "-c", source]
    verdicts = []
    while len(verdicts) < len(pairs):
        lines = [json.dumps(pair) + "\n" for pair in pairs[len(verdicts) :]]
        # In a session of its own, as launchers send SIGTERM to the whole process group of a trainer, which
        # still has a step to finish.
        process = subprocess.run(
            command, input="".join(lines), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        if process.returncode > 0:
            raise OSError("math-verify could not compare answers; its error is above")
        verdicts += [line == "1" for line in process.stdout.splitlines()]
        if process.returncode < 0:  # a signal, as when the time is over
            verdicts.append(False)
    return verdicts


def _truth(row: dict) -> str:
    r"""Reads the known answer of a row: its field `answer`, what follows its last ####, or is in its last
    \boxed{}. Raises ValueError if there is none."""
    if not isinstance(row["answer"], str | int | float):
        raise ValueError(f"row {row['id']}: field answer: give a text or a number, not {row['answer']!r:.60}")
    truth = _as_latex(str(row["answer"])).rpartition("####")[2]
    boxed = last_boxed(truth)
    if boxed is not None:
        truth = boxed
    truth = _spell(truth.strip())
    if re.fullmatch(r"|.*\\boxed.*|[A-Za-z]+(?: [A-Za-z]+)+", truth):
        raise ValueError(
            f"row {row['id']}: field answer: {row['answer']!r:.60} holds no answer; write words as \\text{{...}}"
        )
    return truth


def math_answer(rows: list[dict], seconds: float = 3.0) -> Values:
    r"""Returns 1 where the final answer of the response equals `answer`, else 0.

    This is the reward of RLVR (Tülu 3, 2411.15124, section 6). Rows need `answer`: the final answer, or a
    solution that ends with `#### answer` or \boxed{answer}.

    A comparison that takes too long counts as wrong. If it had no value, a policy could escape the penalty by
    answers that are slow to compare.

    `seconds` is the CPU time of one comparison.
    """
    answers = [(_truth(row), final_answer(row["response"])) for row in rows]
    unclear = []
    for truth, answer in dict.fromkeys(answers):
        if answer and truth != answer:
            unclear.append((truth, answer))
    equal = dict(zip(unclear, _compare(unclear, seconds)))

    return [float(truth == answer or equal.get((truth, answer), False)) for truth, answer in answers]


math_answer.read_field = _truth  # `Scorer.check` tries it on every prompt


# --- 3. code

# Sites for programmers make these for a program, and so do other trainers.
USUAL_IMPORTS = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
"""


def _share_passed(row: dict, timeout: float, partial: bool) -> float | None:
    """Returns the share of its tests that a row passes, or whether it passes all, as `code` does."""
    tests = code_runner.read_tests(row)
    names = code_runner.tested_names(row, tests)
    blocks = code_runner.find_program(row["response"], names)
    if isinstance(row["tests"], dict):
        blocks.insert(0, USUAL_IMPORTS)
    if not partial and isinstance(tests[0], str):
        tests = ["\n".join(tests)]  # in one process
    n_passed = 0
    for test in tests:
        status = code_runner.run(blocks, test, timeout).status
        if status == "not started":
            return None
        n_passed += status == "ok"
        if status == "timeout" or (status != "ok" and not partial):
            break
    if partial:
        return n_passed / len(tests)
    return float(n_passed == len(tests))


def code(rows: list[dict], partial: bool = False, timeout: float = 10.0, unsafe: bool = False) -> Values:
    """Returns 1 where the program in the response passes all `tests`, else 0.

    Rows need `tests`, whose forms are at the top of code_runner.py. `entry_point` is a name, or an expression
    such as `Solution().solve`. The value is None where the sandbox was killed before the program began.

    Args:
        partial: return the share of the tests that pass.
        timeout: wall time of all asserts of a row in seconds; with `partial`, and where the program reads
            stdin, of each test. Those that follow the first timeout count as failed.
        unsafe: run programs without bubblewrap: they can read your files and use the network.
    """
    sandbox.check_can_run(unsafe)
    run_one = functools.partial(_share_passed, timeout=timeout, partial=partial)
    return list(code_runner.map_in_parallel(run_one, rows))


code.read_field = code_runner.read_tests  # `Scorer.check` tries it on every prompt


# --- 4. instructions


def instructions(
    rows: list[dict],
    rule: Literal["strict", "loose"] = "strict",
    partial: bool = False,
) -> Values:
    """Returns 1 where the response meets every instruction, else 0.

    Rows need `instruction_id_list` and `kwargs`. The checkers are those of the evaluation, IFEval's and
    IFBench's. A response that cannot be checked within ten seconds meets no instruction. Exits with 2 for an
    unknown id.

    Args:
        rule: as in IFEval; loose forgives a first line, a last line and asterisks.
        partial: return the share of the instructions that are met.
    """
    from rlmt.instructions import met_instructions

    values = []
    for row in rows:
        task = {"key": row["id"], "prompt": row["messages"][-1]["content"]} | row
        met = met_instructions(task, row["response"])[rule]
        values.append(sum(met) / len(met) if partial else float(all(met)))
    return values


def _check_instructions(prompt: dict) -> None:
    """Raises an error if NLTK's data is missing, or a prompt's instructions cannot be checked."""
    from rlmt.instructions import make_checkers

    make_checkers({"key": prompt["id"]} | prompt)


instructions.read_field = _check_instructions  # `Scorer.check` tries it on every prompt
