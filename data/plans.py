"""Writes a short plan of an answer by a rule, which is thinking for a warm start without a teacher.

    python -m data.prepare plans --input data/alpaca/responses.jsonl --out data/traces_plans.jsonl

A plan says what is asked, which form and length the answer has, and what each of its points is about:

    Asked: Can you give any tips on how to cook a juicy, medium-rare steak?
    Form: a numbered list of 12 points, about 200 words.
    Points: Choose thick cut steak; Allow steak come room; Season sides salt pepper

A small model can learn each line: the first is a copy of the prompt's words, the second is one of few forms,
and the third has words that the answer will use. Points are content words without the sentence around them,
so a plan is no copy of the answer.
"""

import re
from collections.abc import Iterable

MAX_ASKED_WORDS = 16
MAX_POINTS = 6
MAX_POINT_WORDS = 4
MAX_POINTS_CHARACTERS = 160  # of all points together
LENGTHS = (10, 20, 30, 40, 50, 75, 100, 125, 150, 200, 250)  # words; an answer's number is rounded to one

CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NUMBERED = re.compile(r"^\s*\**\d+[.)]\s+(.+)", re.MULTILINE)
BULLET = re.compile(r"^\s*[-*•+]\s+(.+)", re.MULTILINE)
SENTENCE_END = re.compile(r"(?<=[.!?])[\"”)]?\s+(?=[\"“(A-Z0-9])|\n+")
CLAUSE_END = re.compile(r"[:;.!?](?!\w)|\(|\s[-–—]\s")
WORD = re.compile(r"\w+(?:['’.,/-]\w+)*[%$€]?")
# Negations are not among them: without its "not" a point would say the opposite of the answer.
FUNCTION_WORDS = frozenset(
    """a about above after again all also am an and any are as at be because been before being both but by can
    could did do does doing down during each few for from further had has have having he her here hers him
    his how i if in into is it its itself just may me might more most must my of off on once only
    or other our out over own same she should so some such than that the their theirs them then there these
    they this those through to too under until up upon us very was we were what when where which while who
    whom why will with would you your yours it's i'm that's there's here's let's you're we're they're i've
    you've sure certainly okay yes
    """.split()
)


# --- 1. the parts of a plan


def without_blank(parts: Iterable[str]) -> list[str]:
    """Returns the parts that have text, without white space around them."""
    return [part.strip() for part in parts if part.strip()]


def asked(question: str) -> str:
    """Returns the first sentence with a question mark, else the first one, cut off after MAX_ASKED_WORDS."""
    sentences = without_blank(SENTENCE_END.split(question))
    questions = [sentence for sentence in sentences if sentence.endswith("?")]
    words = (questions or sentences)[0].split()
    cut = " ".join(words[:MAX_ASKED_WORDS])
    if len(words) > MAX_ASKED_WORDS:
        cut += " ..."
    return cut


def form_and_parts(answer: str) -> tuple[str, list[str]]:
    """Returns the answer's form in words, and its parts: items of its list, paragraphs, lines or
    sentences."""
    prose = CODE.sub("\n", answer)
    items = NUMBERED.findall(prose)
    if len(items) > 1:
        return f"a numbered list of {len(items)} points", items
    items = BULLET.findall(prose)
    if len(items) > 1:
        return f"a list of {len(items)} points", items
    paragraphs = without_blank(re.split(r"\n\s*\n", prose))
    if len(paragraphs) > 1:
        return f"{len(paragraphs)} paragraphs", paragraphs
    lines = without_blank(prose.splitlines())
    if len(lines) > 1:  # a table or verses
        return f"{len(lines)} lines", lines
    sentences = without_blank(SENTENCE_END.split(prose))
    if len(sentences) > 1:
        return f"one paragraph of {len(sentences)} sentences", sentences
    return "one sentence", []


def point_of(part: str) -> str:
    """Returns the first content words of a part's first clause that has any; "" if no clause has."""
    for clause in CLAUSE_END.split(part):
        words = [word for word in WORD.findall(clause) if word.lower() not in FUNCTION_WORDS]
        if words:
            return " ".join(words[:MAX_POINT_WORDS])
    return ""


def points_of(parts: list[str]) -> list[str]:
    """Returns the points of the first parts, without repeats; none if there are fewer than two points."""
    points = [point_of(part) for part in parts]
    points = without_blank(dict.fromkeys(points))
    if len(points) < 2:
        return []
    kept = points[:MAX_POINTS]
    while len("; ".join(kept)) > MAX_POINTS_CHARACTERS:
        kept.pop()
    return kept


def rounded(n_words: int) -> int:
    """Rounds a number of words to the nearest of LENGTHS."""
    return min(LENGTHS, key=lambda length: abs(length - n_words))


# --- 2. the plan


def plan_of(question: str, answer: str) -> str:
    """Returns the plan of an answer: two lines, or three if the answer has several points."""
    form, parts = form_and_parts(answer)
    if "```" in answer:
        form += " with code"
    lines = [f"Asked: {asked(question)}", f"Form: {form}, about {rounded(len(answer.split()))} words."]
    points = "; ".join(points_of(parts))
    if points:
        lines.append(f"Points: {points}.")
    return "\n".join(lines)
