"""How IFBench's checkers take text apart: sentences, words, CSV."""

import csv
import functools
import io
import re
import string
import unicodedata
from collections import Counter
from itertools import pairwise

import nltk

EDGES = string.punctuation + " "  # taken off both ends of a word

# Sentences are those of Google's IFEval. In this order, dots that end no sentence become <prd>, ends of
# sentences get <stop>, and a quotation mark moves before the mark that it follows.
STARTER = r"(Mrs?|Ms|Dr|Prof|Capt|Cpt|Lt|(?:He|She|It|They|Their|Our|We|But|However|That|This)\s|Wherever)"
LETTER = "([A-Za-z])"


def _ellipsis(dots: re.Match) -> str:
    return "<prd>" * len(dots[0]) + "<stop>"


SENTENCE_RULES = (
    (re.compile(r"(Mr|St|Mrs|Ms|Dr)[.]"), r"\1<prd>"),
    (re.compile(r"[.](com|net|org|io|gov|edu|me)"), r"<prd>\1"),
    (re.compile(r"([0-9])[.]([0-9])"), r"\1<prd>\2"),
    (re.compile(r"[.]{2,}"), _ellipsis),
    (re.compile(r"Ph[.]D[.]"), "Ph<prd>D<prd>"),
    (re.compile(rf"\s{LETTER}[.] "), r" \1<prd> "),
    (re.compile(rf"([A-Z][.][A-Z][.](?:[A-Z][.])?) {STARTER}"), r"\1<stop> \2"),
    (re.compile(rf"{LETTER}[.]{LETTER}[.]{LETTER}[.]"), r"\1<prd>\2<prd>\3<prd>"),
    (re.compile(rf"{LETTER}[.]{LETTER}[.]"), r"\1<prd>\2<prd>"),
    (re.compile(rf" (Inc|Ltd|Jr|Sr|Co)[.] {STARTER}"), r" \1<stop> \2"),
    (re.compile(r" (Inc|Ltd|Jr|Sr|Co)[.]"), r" \1<prd>"),
    (re.compile(rf" {LETTER}[.]"), r" \1<prd>"),
    (re.compile(r"[.]”"), "”."),
    (re.compile(r'[.]"'), '".'),
    (re.compile(r'!"'), '"!'),
    (re.compile(r'[?]"'), '"?'),
    (re.compile(r"([.?!])"), r"\1<stop>"),
)


def split_sentences(text: str) -> list[str]:
    """Returns the sentences, stripped and without line breaks; what follows the last end mark is one too."""
    text = " " + text.replace("\n", " ") + "  "
    for pattern, replacement in SENTENCE_RULES:
        text = pattern.sub(replacement, text)
    text = text.replace("<prd>", ".")
    sentences = [sentence.strip() for sentence in text.split("<stop>")]
    if sentences[-1] == "":
        sentences.pop()
    return sentences


def count_end_marks(text: str) -> tuple[int, int, int]:
    """Counts the sentences that end with a full stop, a question mark, an exclamation mark."""
    ends = Counter(sentence[-1:] for sentence in split_sentences(text))
    return ends["."], ends["?"], ends["!"]


def bare(text: str) -> str:
    """Removes ASCII punctuation; the two sides of a mark inside a word become one word."""
    return text.translate(str.maketrans("", "", string.punctuation))


def bare_words(text: str) -> list[str]:
    """Returns the words between white space, without ASCII punctuation."""
    return bare(text).split()


def stripped(parts: list[str]) -> list[str]:
    """Returns the parts without white space around them, blank ones left out."""
    return [part.strip() for part in parts if part.strip()]


def to_ascii(text: str) -> str:
    """Removes accents, and characters that have no ASCII base."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def csv_rows(text: str, delimiter: str = ",") -> list[list[str]]:
    """Returns the rows of CSV text; none if it is not CSV."""
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return []


def has_csv_header(text: str, between: str, columns: list[str]) -> bool:
    """Returns whether the first line is `columns`, quoted or not, with the pattern `between` between them."""
    first_line = text.split("\n")[0].strip()
    pattern = between.join(f'(?:{column}|"{column}")' for column in columns)
    return re.fullmatch(pattern, first_line) is not None


def character_trigrams(text: str) -> set[str]:
    return {text[i : i + 3] for i in range(len(text) - 2)}


def is_increasing(numbers: list[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


@functools.cache
def stop_words() -> frozenset[str]:
    return frozenset(nltk.corpus.stopwords.words("english"))


@functools.cache
def tagger() -> nltk.PerceptronTagger:
    return nltk.PerceptronTagger()
