"""rewards/verified.py: tricky equalities, programs that know the answer, instructions as in the
evaluation."""

import gzip
import json
import signal
import time

import pytest
from conftest import shared
from test_rewards import row

from rewards import verified
from rlmt.instructions import met_instructions

# --- 1. math


def pairs(text):
    return [tuple(line.strip().split(" | ")) for line in text.strip().split("\n")]


# Truth and answer; whether they are equal was worked out by hand.
EQUAL = pairs(r"""
    1/2 | 0.5
    \frac{1}{2} | \dfrac{1}{2}
    \frac12 | 1/2
    \frac{1}{2} | \frac{2}{4}
    \frac{3}{4} | 0.75
    -\frac{1}{2} | \frac{-1}{2}
    -\frac{1}{2} | \frac{1}{-2}
    -\frac{1}{2} | -0.5
    1\frac{1}{2} | \frac{3}{2}
    1\frac{1}{2} | 1.5
    2\frac{2}{3} | \frac{8}{3}
    50\% | 50
    50\% | 0.5
    50\% | \frac{1}{2}
    12.5\% | 0.125
    5 | 5\%
    1000 | 1,000
    1000000 | 1,000,000
    1{,}000 | 1000
    12,345 | 12345
    10000 | 10 000
    \$5.00 | 5
    \$5 | 5.00
    \$1,250 | 1250
    18 | \$18
    5 | 5\text{ cm}
    5\text{ cm} | 5
    5 \text{ cm} | 5\mathrm{cm}
    90^\circ | 90
    90^{\circ} | 90\text{ degrees}
    x=5 | 5
    5 | x=5
    (1,2) | (1, 2)
    (1,2) | 1,2
    [0,1) | [0, 1)
    (-\infty, 3] | (-\infty,3]
    (-\infty,1)\cup(2,\infty) | (2,\infty)\cup(-\infty,1)
    \{1,2,3\} | \{3,2,1\}
    \{1,2,3\} | 1,2,3
    1,2 | 2,1
    1, -2 | -2, 1
    3 | \{3\}
    \sqrt{8} | 2\sqrt{2}
    \sqrt8 | 2\sqrt2
    \frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2}
    \frac{\sqrt3}{3} | \frac{1}{\sqrt{3}}
    \sqrt{4} | 2
    \sqrt[3]{27} | 3
    2^{10} | 1024
    2^10 | 1024
    10^{-3} | 0.001
    1.5\times 10^3 | 1500
    1.5 \cdot 10^{3} | 1500
    2\pi | 2 \pi
    \frac{\pi}{2} | 0.5\pi
    e^2 | e^{2}
    \ln(e) | 1
    \log_2 8 | 3
    \sin(\pi/6) | \frac12
    \sin^2 x + \cos^2 x | 1
    x^2+2x+1 | (x+1)^2
    x(x+1) | x^2+x
    a+b | b+a
    2xy | 2yx
    \frac{x^2-1}{x-1} | x+1
    y=2x+1 | 2x+1
    y=2x+1 | 2x - y + 1 = 0
    x^2+y^2=4 | y^2+x^2-4=0
    7 | 7.0
    7 | 7.0000
    7 | 007
    7 | +7
    -7 | - 7
    0 | -0
    0 | 0.0
    7 | 7.
    0.1 | .1
    1/3 | 2/6
    5! | 120
    \binom{5}{2} | 10
    \dbinom{5}{2} | 10
    |{-3}| | 3
    3+4i | 4i+3
    \infty | \infty
    \begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix}
    \begin{pmatrix}1&0\\0&1\end{pmatrix} | \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
    \text{Evelyn} | Evelyn
    \text{(C)} | C
    C | \text{C}
    2:3 | \frac{2}{3}
    x \in [1,3] | [1,3]
    \pm 2 | 2,-2
    1 \pm \sqrt{2} | 1+\sqrt2, 1-\sqrt2
    3\frac{1}{4}\text{ hours} | 3.25
    \frac{5}{9} | \left(\frac{5}{9}\right)
    25 | \boxed{25}
    25 | $25$
    5 | 2 + 3 = 5
    600\% | 600\% = 6
    30 | \theta = 30
    2,3 | x=2, x=3
    5000000 | 5\text{ million}
    5\text{ million} | 5000000
    0.0001 | 1.0\times 10^{-4}
    1.6\times 10^{-19} | 1.60\times10^{-19}
    \text{Even} | even
    xy | yx
    6 | \gcd(12,18) = 6
    14 | \int_0^1 28x\,dx=14
    3.33 | \frac{10}{3} = 3.33
    6 | 5\text{ cm} = 6
    -\frac{1}{2} | \frac{1}{-2}
    391 | 17\cdot 23 = 391
    3 | \left(3\right)
    -5 | x = -5
    -5 | \left( -5 \right)
    300000 | 3\times 10^{5}
    300000 | 3 \cdot 10^5
    0.001 | 10^{-3}
    5\text{ N m} | 5\text{ N}\cdot\text{m}
    10000 | 10{,}000
    x^2-1 | (x-1)\cdot(x+1)
    2+3i | 1+1+3i
    10\,000 | 10000
    1.5e3 | 1500
    3\times 10^5 | 3\cdot 10^{2}\cdot 10^{3}
    \frac12 | ½
    3.5 | 3½
    3.5 | 3 1/2
    \sqrt{3} | √3
    45 | 45°
    5 | €5
    x^2 | x²
    10^{-3} | 10⁻³
    6\pi | 6π
    17\cdot 23 | 391
    7/2 | 3\ 1/2
    1234567 | 1'234'567
    18 | 18 dollars
    2\cdot 3\cdot 5 | 2 \cdot 3 \cdot 5
    e^{x} | \exp(x)
    \sin 2x | 2\sin x\cos x
    \frac{d}{2} | d/2
    2\pi | 2 \cdot \pi
    A | A. Paris
    A | \textbf{(A)}\ 5
    \textbf{(A)}\ 5 | A
    5 | 5 km/h
    10 cm^2 | 10
    300 | 3 hundred
    18 | ₹18
    \sqrt[3]{2} | ∛2
    \sqrt{2+x} | √(2+x)
    2\sqrt{5} | \sqrt{20}
    2\sqrt{5} | \frac{10}{\sqrt{5}}
    (2+\sqrt{3})^2 | 7+4\sqrt{3}
    1.5\pi | \frac{3\pi}{2}
    \log_2 3 | \frac{\ln 3}{\ln 2}
    0.75 | \frac{6}{8}
    9\pi-18 | 9(\pi-2)
    (I) | \textbf{I}
    Yes | \text{yes.}
    false | \text{FALSE}
""")
DIFFERENT = pairs(r"""
    \frac{1}{3} | 0.333
    \frac{22}{7} | \pi
    3.14 | \pi
    -\frac{1}{2} | \frac{1}{2}
    1\frac{1}{2} | \frac{1}{2}
    50\% | 5
    50\% | 0.05
    1,000 | 1
    12,345 | 12.345
    x=5 | x=6
    (1,2) | (2,1)
    (1,2) | [1,2]
    [0,1) | (0,1]
    [0,1) | [0,1]
    (0,1) | [0,1]
    (-\infty, 3] | (-\infty,3)
    x \le 3 | x < 3
    (-\infty,1)\cup(2,\infty) | (-\infty,1]\cup(2,\infty)
    \{1,2,3\} | \{1,2\}
    \{1,2\} | \{1,2,3\}
    3 | 3,4
    3 | 1,2,3
    3 | \{1,2,3,4,5\}
    \sqrt{2} | 1.414
    \sqrt{4} | -2
    3\times10^8 | 3\times10^7
    \pi | 3.14159
    4\pi | 4
    x^2+2x+1 | (x-1)^2
    a-b | b-a
    \frac{a}{b} | \frac{b}{a}
    y=2x+1 | y=2x-1
    7 | -7
    7 | - 7
    7 | 77
    123456789 | 123456788
    3+4i | 3-4i
    \infty | -\infty
    \begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
    \text{Evelyn} | \text{Angela}
    A | B
    \text{yes} | \text{no}
    \text{even} | \text{odd}
    10_2 | 2
    12:30 | 12:45
    \pm 2 | 2
    3 | 3 or 4
    5 | 5\text{ } = 600\%
    5 | 5 \text{ or } 6
    5 | 5 \text{ is wrong; } 6
    5 | \neq 5
    5 | 5\text{ million}
    5050 | \sum_{k=1}^{100} k
    945 | \prod_{k=0}^{4}(2k+1)
    21 | \gcd(1071,462)
    \frac{1}{3} | \int_0^1 x^2 dx
    2 | \lim_{x\to 0}\frac{\sin 2x}{x}
    -1 | \det\begin{pmatrix}1&2\\3&5\end{pmatrix}
    10^{-20} | 10^{-21}
    1.6\times 10^{-19} | 6.6\times10^{-34}
    \text{no} | on
    6 | 5\text{ } = 5
    \text{listen} | silent
    6 | 2\cdot 3
    391 | 17 \cdot 23
    391 | 17 \cdot (23)
    391 | 17\cdot\text{ }{23}
    391 | 17^1 23
    391 | \frac{17}{1/23}
    x = 6 | x = 2 \cdot 3
    5 | 5 x^2
    A | B. Paris
    391 | 17\,\cdot\,23
    391 | 17 \times 23
    391 | 17*23
    391 | 17×23
    391 | 17·23
    391 | 391 = 17\cdot 23
    391 | \frac{34 \cdot 23}{2}
    579 | 123+456
    579 | 123 + 456
    579 | \$123 + \$456
    579 | 123\text{ cats} + 456\text{ dogs}
    1{,}000 | 400+600
    -7 | 5 - 12
    18 | (16-3-4)*2
    18 | 2(16-3-4)
    \$18 | 9 \cdot 2
    72 | 48+48/2
    3/4 | \frac{1}{2}+\frac{1}{4}
    \frac{3}{4} | 1-\frac14
    5\text{ cm} | 2+3
    x=5 | x=2+3
    5 | \sqrt{3^2+4^2}
    3628800 | 10!
    5 | \max(5,3)
    3 | \min(5,3)
    6 | \lfloor 6.5 \rfloor
    7 | \lceil 6.5 \rceil
    10 | \binom{5}{2}
    3 | \frac{d}{dx} 3x
    12 | \operatorname{lcm}(4,6)
    6 | 12 \div 2
    3 | \log_2 8
    0.5 | \sin(\pi/6)
    40 | 17--23
    x = 5 | y = 5
    25 | 2 5
    1 2 | 12
    \ln 6 | \ln 2+\ln 3
    \frac{\pi}{4} | \arctan\frac12+\arctan\frac13
    391 | \frac{782}{2}
    391 | 17\cdot\frac{23}{1}
    32 | 2^{5}
    12 | \sqrt{144}
    2\sqrt{5} | \sqrt{4+16}
    2\sqrt{5} | \sqrt{2^2+4^2}
    7+4\sqrt{3} | (2+\sqrt{3})^2
    \frac{\sqrt{3}}{2} | \sin(\frac{\pi}{3})
    \ln 2 | \int_1^2 \frac{1}{x} dx
    24 | \lim_{x\to 24}x
    6 | {4 \choose 2}
    (5,4) | (2+3,4)
    x^2 | \int_0^x 2t\,dt
    101_2 | 101
    101_2 | 101_3
    11 | 1 1
    31/2 | 3 1/2
    105 | 10⁵
    \frac{1}{1000!} | \frac{1}{1001!}
""")
# Known limits of math-verify and of MATH spelling: equal by hand, and 0 here; different by hand, and 1 here.
NOT_SEEN_EQUAL = pairs(r"""
    (-\infty, 3] | x \le 3
    [2,5] | 2 \le x \le 5
    i^2 | -1
    \text{no solution} | \emptyset
    \frac{1}{7} | 0.\overline{142857}
    \frac13 | 0.\overline{3}
    100^{\circ} | 100^{\circ}C
    \tan 45^\circ | 1
    0.5\% | 0.5
""")
TAKEN_FOR_EQUAL = pairs(r"""
    \frac{1}{3} | 0.3333333333
    5\text{ cm} | 5\text{ m}
    \sqrt{2} | 1.41421356237
    0.30000000001 | 0.3
    even | neve
""")


def test_tricky_equalities():
    wanted = dict.fromkeys(EQUAL + TAKEN_FOR_EQUAL, 1.0) | dict.fromkeys(DIFFERENT + NOT_SEEN_EQUAL, 0.0)
    rows = [row(f"The answer is \\boxed{{{answer}}}.", answer=truth) for truth, answer in wanted]
    found = dict(zip(wanted, verified.math_answer(rows), strict=True))
    assert found == wanted, "where it is better than it was, move a pair to EQUAL or DIFFERENT"


@pytest.mark.parametrize(
    "text, answer",
    [
        ("first \\boxed{1}, but that is wrong: \\boxed{2}", "2"),
        ("\\boxed{x = \\boxed{1}}", "1"),
        ("\\boxed{1}, or rather \\fbox {A}", "\\text{A}"),
        ("so \\boxed 3$ it is", "3"),
        ("\\boxed{7}. (I used `\\boxed{}` for it.)", "7"),
        ("\\boxed{7}. It is in \\boxed form, as step 3 asked.", "7"),
        ("So \\boxed{7}. Check 3: \\boxed{\\frac{1", "7"),
        ("\\boxed{}", None),
        ("The final answer is 18. I checked it 3 times.", "18"),
        ("#### 18\nThat took 5 steps.", "18"),
        ("That is 10 000.", "10000"),
        ("\\boxed{3", "3"),
        ("It costs $1,234.50.", "1234.50"),
        ("it is -5", "-5"),
        ("(-5)", "-5"),
        ("about 20%", "20%"),
        ("none", None),
        ("\\boxed{7.}", "7"),
        ("The probability is $\\frac{1}{2}$.", "\\frac{1}{2}"),
        ("for all x^12", None),
        ("$3 + 4 = 7 \\quad \\checkmark$", "7"),
        ("$x \\ge 5$", "x \\ge 5"),
        ("with \\(y = x^{2}\\) we get 4", "4"),
        ("3\u20135", "5"),
        ("in all 1,234,567 of them", "1234567"),
        ("a grid of 3 x 4", "4"),
    ],
)
def test_final_answer(text, answer):
    assert verified.final_answer(text) == answer


# Response, its answer, and what it is not: a part of it, or its neighbour.
UNBOXED = pairs(r"""
    The solutions are x = 1,2. | 2 | 12
    It took 2 1/2 hours. | 2.5 | 10.5
    It fell by -2 1/2. | -2.5 | -1.5
    That is 3 / 4 | 0.75 | 4
    About 3 x 10^5. | 300000 | 100000
    1.5e3 | 1500 | 3
    It is 3½. | 7/2 | 3
    It is 2√3. | \sqrt{12} | 3
    So r = 2π. | 2\pi | 2
    The answer is - 7. | -7 | 7
    It costs 5 million € | 5000000 | 5
    So \[ \frac{3}{4} = x \] | 0.75 | 4
    So $$ p = \frac{3}{4}. $$ | 3/4 | 4
    \begin{align*} x &= \frac{6}{8} \\ &= \frac{3}{4} \end{align*} | 0.75 | 4
    \[\begin{aligned} a &= 6 \\ &= p - q. \end{aligned}\] | p-q | 6
    It is $x = 6 - 5i$, as 2 of us found. In all: \((3, 4)\) | (3,4) | 4
    The answer is $52_8$. | 52_8 | 8
    **Answer:** (J) | J | I
    The answer is \textbf{(E)} 42. | \text{(E)} | 42
    The answer is: option (B), not 3. | B | 3
    (C) | C | A
    The answer is no more than 5. | 5 | no
    The answer is No. | \text{no} | yes
    The final answer is **True**, as 2 is even. | true | 2
""")


def test_an_answer_without_a_box_is_right_for_itself_alone():
    rows = []
    for text, right, wrong in UNBOXED:
        rows += [row(text, answer=right), row(text, answer=wrong)]
    values = verified.math_answer(rows)
    wanted = [1.0, 0.0] * len(UNBOXED)
    assert [one for one, value, want in zip(rows, values, wanted) if value != want] == []
    assert verified.final_answer("The answer is (A) or (B).") is None
    assert verified.final_answer("The answer is **B** because 3 > 2") == r"\text{B}"
    assert verified.final_answer("The answer is F = 12") == "12"


def test_math_values():
    rows = [row("", answer="7")]
    rows += [row("7", answer=truth) for truth in ("so 3 + 4\n#### 7", "it is \\boxed{7}", 7)]
    # sympy raises errors
    rows += [row(f"\\boxed{{0^{{{'9' * 400}\\,!}}}}", answer="0"), row("\\boxed{\ud800}", answer="1")]
    assert verified.math_answer(rows) == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("answer", ["####", "\\boxed{}", {"a": 1}, ["5", "6"], "see solution", "\\boxed{7"])
def test_a_truth_without_an_answer_is_refused(answer):
    with pytest.raises(ValueError, match="field answer"):
        verified.math_answer.read_field(row(answer=answer))


SLOW = [  # for a pattern that tries every pair of places
    "\\(" * 8000 + " 5",
    "$" + "^" * 20_000 + " 5",
    "\\boxed{" + "\\text{ " * 3000 + "}" * 3001,
    "\\boxed{" + "x" * 20_000 + "}",
    "5," * 10_000 + "5",
]


@pytest.mark.parametrize("text", SLOW)
def test_no_answer_takes_long_to_read(text):
    start = time.monotonic()
    verified.final_answer(text)
    assert time.monotonic() - start < 1


def test_math500_solutions():
    tasks = json.load(gzip.open(shared("math_500") / "test.json.gz"))
    rows = [row(task["solution"], answer=task["answer"]) for task in tasks]
    shifted = [one | {"answer": other["answer"]} for one, other in zip(rows, rows[1:])]
    values = verified.math_answer(rows + shifted)
    assert values[:500] == [1] * 500
    taken = [one["answer"] for one, value in zip(shifted, values[500:]) if value]
    assert taken == ["x=5", "7", "3"]  # which are the answers of both


# --- 2. instructions


def asked(*names: str) -> dict:
    """The fields of a row whose instructions need no arguments."""
    return {"instruction_id_list": list(names), "kwargs": [{}] * len(names)}


def test_instructions(nltk_data):
    both = asked("punctuation:no_comma", "change_case:english_lowercase")
    rows = [
        row("no comma is here, alas", **both),
        row("no comma is in this text at all", **both),
        row("Sure:\nno comma is in this text at all", **both),
        row("14, 21, 28, 35, 42, 49", **asked("custom:multiples")),
    ]
    assert verified.instructions(rows) == [0, 1, 0, 1]
    assert verified.instructions(rows, partial=True) == [0.5, 1, 0.5, 1]
    # loose: without its first line
    assert verified.instructions(rows, rule="loose") == [0, 1, 1, 1]


def test_what_cannot_be_checked_is_not_met(nltk_data, monkeypatch):
    """A recursion in json, a regular expression of quadratic time."""
    deep = row("[" * 3000, **asked("detectable_format:json_format"))
    placeholders = asked("detectable_content:number_placeholders") | {"kwargs": [{"num_placeholders": 2}]}
    wide = row("[" * 200_000, **placeholders)
    fine = row("[a] [b]", **placeholders)
    monkeypatch.setattr(met_instructions, "__defaults__", (0.5,))
    before = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    assert verified.instructions([deep, wide, fine], partial=True) == [0.0, 0.0, 1.0]
    assert time.monotonic() - start < 30
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
