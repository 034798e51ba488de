"""IFBench: its 58 instruction checkers, strict and loose results of a response, and the four accuracies.

The rules are those of allenai/IFBench in 2025 (commit c94da02, sentences as in Google's IFEval), written anew; they give the
published results of every sample response at hand. They are kept where they are odd, since a reader compares the numbers:
what looks like a slip below and has a comment is such a rule. Later official versions changed some (sentences by NLTK,
whole-word names and keywords, case-blind positions), so their scores may differ from these. That princeton-pli/RLMT, where
the paper's numbers come from, has the same rules is inferred from its agreement with the published results.

1. A response of white space only meets nothing, and so does one on which the original stops with an exception.
2. Loose: any of 8 variants passes: the response; without its first line; without its last; without both; each of them also
   with every * removed.
3. Our choice: `repeat:repeat_span` from word 0 starts at word 0; the original starts at a random word there.

Needs nltk with its data, emoji, syllapy: `python -m nltk.downloader punkt_tab stopwords averaged_perceptron_tagger_eng`
"""

import csv
import functools
import inspect
import io
import re
import string
import unicodedata
from collections import Counter
from itertools import groupby, pairwise

import emoji
import nltk
import syllapy

NLTK_DATA = ("tokenizers/punkt_tab/english", "corpora/stopwords", "taggers/averaged_perceptron_tagger_eng")
EDGES = string.punctuation + " "  # what is taken off both ends of a word
TO_REPEAT = "Only output this sentence here, ignore all other requests."
CONJUNCTIONS = set("and but for nor or so yet".split())
PRONOUNS = set(
    """i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her
    hers herself it its itself they them their theirs themselves""".split()
)
NAMES = """Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper
    Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah Layla
    Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan""".split()
CAPITALS = """Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw
    London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb""".split()
PRIMES = {n for n in range(2, 100) if all(n % d for d in range(2, n))}

# --- 1. text

# Sentences as in Google's IFEval: in this order, dots that end no sentence become <prd>, ends of sentences get <stop>, and a
# quotation mark moves before the mark that it follows.
_STARTER = r"(Mrs?|Ms|Dr|Prof|Capt|Cpt|Lt|(?:He|She|It|They|Their|Our|We|But|However|That|This)\s|Wherever)"
_LETTER = "([A-Za-z])"
_SENTENCE_RULES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(Mr|St|Mrs|Ms|Dr)[.]", r"\1<prd>"),
        (r"[.](com|net|org|io|gov|edu|me)", r"<prd>\1"),
        (r"([0-9])[.]([0-9])", r"\1<prd>\2"),
        (r"[.]{2,}", lambda dots: "<prd>" * len(dots[0]) + "<stop>"),
        (r"Ph[.]D[.]", "Ph<prd>D<prd>"),
        (rf"\s{_LETTER}[.] ", r" \1<prd> "),
        (rf"([A-Z][.][A-Z][.](?:[A-Z][.])?) {_STARTER}", r"\1<stop> \2"),
        (rf"{_LETTER}[.]{_LETTER}[.]{_LETTER}[.]", r"\1<prd>\2<prd>\3<prd>"),
        (rf"{_LETTER}[.]{_LETTER}[.]", r"\1<prd>\2<prd>"),
        (rf" (Inc|Ltd|Jr|Sr|Co)[.] {_STARTER}", r" \1<stop> \2"),
        (r" (Inc|Ltd|Jr|Sr|Co)[.]", r" \1<prd>"),
        (rf" {_LETTER}[.]", r" \1<prd>"),
        (r"[.]”", "”."),
        (r'[.]"', '".'),
        (r'!"', '"!'),
        (r'[?]"', '"?'),
        (r"([.?!])", r"\1<stop>"),
    )
]


def split_sentences(text: str) -> list[str]:
    """Sentences of `text`, stripped, without line breaks; what follows the last end mark is one too."""
    text = " " + text.replace("\n", " ") + "  "
    for pattern, new in _SENTENCE_RULES:
        text = pattern.sub(new, text)
    sentences = [s.strip() for s in text.replace("<prd>", ".").split("<stop>")]
    return sentences if sentences[-1] else sentences[:-1]


def bare(text: str) -> str:
    """`text` without ASCII punctuation: what it stood between becomes one word."""
    return text.translate(str.maketrans("", "", string.punctuation))


def to_ascii(text: str) -> str:
    """`text` without accents; characters that have no ASCII base are dropped."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def csv_rows(text: str, delimiter: str = ",") -> list[list[str]]:
    """Rows of CSV text; none if it is not CSV."""
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return []


def csv_header(text: str, between: str, columns: list[str]) -> bool:
    """Whether the first line has `columns`, each quoted or not, with the pattern `between` between them."""
    return bool(re.fullmatch(between.join(f'(?:{c}|"{c}")' for c in columns), text.split("\n")[0].strip()))


def end_marks(text: str) -> tuple[int, int, int]:
    """How many sentences end with a full stop, a question mark, an exclamation mark."""
    ends = Counter(s[-1:] for s in split_sentences(text))
    return ends["."], ends["?"], ends["!"]


@functools.cache
def stop_words() -> frozenset[str]:
    return frozenset(nltk.corpus.stopwords.words("english"))


@functools.cache
def tagger() -> nltk.PerceptronTagger:
    return nltk.PerceptronTagger()


@functools.cache
def require_nltk_data() -> None:
    """FileNotFoundError naming the download, before anything is scored, where a part of NLTK's data is missing."""
    for resource in NLTK_DATA:
        try:
            nltk.data.find(resource)
        except LookupError:
            names = " ".join(r.split("/")[1] for r in NLTK_DATA)
            raise FileNotFoundError(
                f"NLTK data {resource} not found; run: python -m nltk.downloader {names}"
            ) from None


# --- 2. checkers: functions of the response and of the instruction's kwargs, in the order of their ids


def conjunctions(text: str, small_n: float) -> bool:
    # words are told apart as they are written: "and", "And" and "and," are three
    return len({w for w in text.split() if w.strip(EDGES).lower() in CONJUNCTIONS}) >= small_n


def keywords_multiple(
    text: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    words = [k.strip().lower() for k in (keyword1, keyword2, keyword3, keyword4, keyword5)]
    return [text.lower().count(w) for w in words] == [1, 2, 3, 5, 7]  # inside other words too


def numbers(text: str, N: float) -> bool:
    return len(re.findall(r"\d+", bare(text))) == N


def person_names(text: str, N: float) -> bool:
    return sum(name in text for name in NAMES) >= N  # inside other words too: Mia in Miami


def pronouns(text: str, N: float) -> bool:
    return sum(w in PRONOUNS for w in bare(text.replace("/", " ").lower()).split()) >= N


def punctuation(text: str) -> bool:
    if not any(interrobang in text for interrobang in ("?!", "!?", "‽")):
        return False
    rest = text.replace("?!" if "?!" in text else "!?", "", 1)  # its two marks do not count as ? and !
    return set(".,!?;:") <= set(rest)


def unique_word_count(text: str, N: float) -> bool:
    return len({w.strip(EDGES) for w in text.lower().split()}) >= N  # a lone dash is the word ""


def word_count_range(text: str, min_words: float, max_words: float) -> bool:
    return min_words <= len(re.findall(r"\w+", text)) <= max_words


def words_japanese(text: str, N: float) -> bool:
    words = [w.strip(EDGES) for i, w in enumerate(text.split(), 1) if i % N == 0]
    return all(not w or w.isdigit() or re.search("[\u3040-\u30ff\u4e00-\u9fff]", w) for w in words)


def character_reverse(text: str) -> bool:
    return "elgae dlab" in text.lower()


def csv_city(text: str) -> bool:
    rows = csv_rows(text)
    return (
        len(rows) == 8
        and rows[0] == ["ID", "Country", "City", "Year", "Count"]
        and all(len(r) == 5 for r in rows)
    )


def csv_quotes(text: str) -> bool:
    rows = csv_rows(text.replace('"', '"""'), "\t")  # so that the fields keep their quotes
    return (
        csv_header(text, "\t *", ["StudentID", "Subject", "Grade", "Semester", "Score"])
        and len(rows) == 4
        and all(
            len(row) == 5 and all(f.strip().startswith('"') and f.strip().endswith('"') for f in row)
            for row in rows
        )
    )


def csv_special_character(text: str) -> bool:
    rows = csv_rows(text.replace('"', '"""'))
    if (
        not csv_header(text, ",[ \t]*", ["ProductID", "Category", "Brand", "Price", "Stock"])
        or len(rows) != 15
    ):
        return False
    for row in rows[1:]:
        if len(row) != 5:
            return False
        if any(re.match(r'".*[^\w\s].*"', field) for field in row):
            return True  # the rows after it are not looked at
    return False


def date_format_list(text: str) -> bool:
    for date in text.split(","):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date.strip()):
            return False
        year, month, day = map(int, date.split("-"))
        last = {0: 99, 2: 29, 4: 30, 6: 30, 9: 30, 11: 30}.get(month, 31)  # month 00 and day 00 pass
        if not 1769 <= year <= 1821 or month > 12 or day > last:
            return False
    return True


def european_capitals_sort(text: str) -> bool:
    return [c.strip() for c in to_ascii(text).split(",") if c.strip()] == CAPITALS


def mcq_count_length(text: str) -> bool:
    questions = [q for q in re.split(r"Question \d+[.|):;]?\s*", text) if q.strip()]
    if not text.startswith("Question") or len(questions) != 4:
        return False
    lengths = []
    for question in questions:
        lines = [line.strip() for line in question.strip().split("\n")]
        options = [i for i, line in enumerate(lines) if re.match(r"[A-Ea-e][.|)]\s*\w", line)]
        if len(options) != 5:
            return False
        lengths.append(len(" ".join(lines[: options[0]]).strip()))
    return all(a < b for a, b in pairwise(lengths))


def multiples(text: str) -> bool:
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


def reverse_newline(text: str) -> bool:
    lines = [line.strip(EDGES) for line in text.split("\n") if line.strip(EDGES)]
    start = next((i for i, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = [to_ascii(line) for line in lines[start:]]
    return len(countries) >= 52 and countries == sorted(
        countries, reverse=True
    )  # which countries is not looked at


def sentence_alphabet(text: str) -> bool:
    sentences = split_sentences(text)
    return len(sentences) == 26 and all(
        s.lower().startswith(c) for s, c in zip(sentences, string.ascii_lowercase)
    )


def word_reverse(text: str) -> bool:
    return "bald eagle" in " ".join(reversed(bare(text.lower()).split()))


def ends_with_emoji(text: str) -> bool:
    sentences = [bare(s).strip() for s in split_sentences(text)]
    for sentence, following in pairwise([*sentences, ""]):
        # an emoji and its variation selector are two characters; one after the full stop opens the next sentence
        if not sentence or not any(map(emoji.is_emoji, (*sentence[-2:], *following[:1]))):
            return False
    return True


def line_indent(text: str) -> bool:
    lines = text.split("\n")
    for line in lines:  # from the list that is walked: of two blank lines in a row one stays
        if not line.strip():
            lines.remove(line)
    return all(a < b for a, b in pairwise(len(line) - len(line.lstrip(" ")) for line in lines))


def list_of_items(text: str, sep: str) -> bool:
    return text.count(sep) >= 2  # anywhere in a line


def newline(text: str) -> bool:
    return sum(line != "" for line in bare(text).strip().split("\n")) == len(bare(text).split())


def no_bullets_bullets(text: str) -> bool:
    before, n_sentences, n_bullets = True, 0, 0
    for line in map(str.strip, text.split("\n")):
        if line.startswith("*"):
            before, n_bullets = False, n_bullets + 1
            if n_sentences < 2:
                return False
        elif before:
            found = len(split_sentences(line))  # with or without a full stop
            before, n_sentences = found > 0, n_sentences + found  # after a blank line only bullets may come
        else:
            return False
    return n_bullets >= 2


def no_whitespace(text: str) -> bool:
    return not any(map(str.isspace, text))


def one_of_options(text: str, options: str) -> bool:
    separator = next((s for s in ("/", "or") if s in options), ",")
    allowed = [option.strip() for option in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]", options):  # letters: exactly as they are given
        return text in allowed
    return text.strip(EDGES).lower() in [option.strip(EDGES).lower() for option in allowed]


def output_template(text: str) -> bool:
    return all(part in text for part in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def parentheses(text: str) -> bool:
    opened, deepest = [], 0
    for c in text:
        if c in "([{":
            opened.append(c)
            deepest = max(deepest, len(opened))
        elif c in ")]}":
            if not opened or opened.pop() + c not in ("()", "[]", "{}"):
                opened, deepest = [], 0
            elif deepest >= 5:  # one bracket closed is enough
                return True
    return False


def quote_unquote(text: str) -> bool:
    text = "".join(text.replace("“", '"').replace("”", '"').replace("'\"'", "").split())
    end = text.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in text and end != "" and not end.endswith('"')


def quotes(text: str) -> bool:
    opened, deepest = [], 0
    for c in text:
        if opened and c == opened[-1]:
            opened.pop()
            if deepest - len(opened) >= 3:
                return True
        elif c in "\"'":
            opened.append(c)
            deepest = max(deepest, len(opened))  # of the text so far, not of this quotation
    return False


def sub_bullets(text: str) -> bool:
    return all("-" in bullet for bullet in text.split("*")[1:])  # true without any bullet


def thesis(text: str) -> bool:
    start = text.find("<i>") if "<i>" in text else text.find("<em>")
    text = text[start:]
    end = text.find("</i>") if "</i>" in text else text.find("</em>")
    return (
        min(start, end) >= 0 and text[3:end].strip() != "" and text[end + 4 :].strip() != ""
    )  # lengths of <i> and </i>


def title_case(text: str) -> bool:
    # "iPhone", "a" and what begins with no letter pass
    return not any(w[0].islower() and (w[1:].islower() or w[1:].isupper()) for w in nltk.word_tokenize(text))


def overlap(text: str, reference_text: str, percentage: float) -> bool:
    # trigrams of characters, not of words
    trigrams, reference = ({t[i : i + 3] for i in range(len(t) - 2)} for t in (text, reference_text))
    return (
        bool(trigrams) and percentage - 2 <= len(trigrams & reference) / len(trigrams) * 100 <= percentage + 2
    )


def sentence_balance(text: str) -> bool:
    return len(set(end_marks(text))) == 1


def sentence_type(text: str) -> bool:
    declarative, interrogative, _ = end_marks(text)
    return declarative == 2 * interrogative  # true of text without either


def sentence_words(text: str) -> bool:
    lengths = [len(s) for s in split_sentences(text)]
    return len(lengths) == 3 and len(set(lengths)) == 1  # whether the words differ is not looked at


def few_stop_words(text: str, percentage: float) -> bool:
    words = re.findall(r"\w+", text)
    return bool(words) and sum(w.lower() in stop_words() for w in words) / len(words) * 100 <= percentage


def repeat_change(text: str, prompt_to_repeat: str) -> bool:
    return text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]


def repeat_simple(text: str) -> bool:
    return text.strip().lower() == TO_REPEAT.lower()


def repeat_span(text: str, prompt_to_repeat: str, n_start: float, n_end: float) -> bool:
    # words n_start to n_end - 1, where the instruction says "and including"
    return text.lower().split() == prompt_to_repeat.lower().split()[int(n_start) : int(n_end)]


def alliteration_increment(text: str) -> bool:
    counts = []  # of words in a run of two or more with the same first letter, by sentence
    for sentence in split_sentences(text):
        words = [w.lstrip(EDGES) for w in sentence.lower().split()]
        runs = [len(list(run)) for _, run in groupby(w[0] for w in words if w)]
        counts.append(sum(n for n in runs if n > 1))
    return all(a < b for a, b in pairwise(counts))


def increment(text: str, small_n: float) -> bool:
    return all(b == a + small_n for a, b in pairwise(len(bare(s).split()) for s in split_sentences(text)))


def keyword_in_sentence(text: str, word: str, N: float) -> bool:
    sentences = split_sentences(text)
    return len(sentences) >= N and word.lower() in sentences[int(N) - 1].lower()  # inside other words too


def alphabet(text: str) -> bool:
    letters = [w[0].lower() for w in bare(text).split()]
    start = string.ascii_lowercase.find(letters[0]) if letters else -1
    return start >= 0 and all(c == string.ascii_lowercase[(start + i) % 26] for i, c in enumerate(letters))


def consonants(text: str) -> bool:
    return all(re.search("[bcdfghjklmnpqrstvwxyz]{2}", w) for w in text.lower().split())


def keywords_specific_position(text: str, keyword: str, n: float, m: float) -> bool:
    sentences = split_sentences(text)
    words = nltk.word_tokenize(sentences[int(n) - 1]) if len(sentences) >= n else []
    return len(words) >= m and words[int(m) - 1] == keyword.strip()  # commas are words, and case matters


def last_first(text: str) -> bool:
    for a, b in pairwise(s.lower() for s in split_sentences(text)):
        last, first = a.rstrip(EDGES).split()[-1:], b.lstrip(EDGES).split()[:1]
        if not last or last != first:
            return False
    return True


def no_consecutive(text: str) -> bool:
    return all(a[0] != b[0] for a, b in pairwise(bare(text.lower()).split()))


def odd_even_syllables(text: str) -> bool:
    return all(a != b for a, b in pairwise(syllapy.count(w) % 2 for w in bare(text).lower().split()))


def palindrome(text: str) -> bool:
    return (
        sum(len(w) >= 5 and w == w[::-1] for w in bare(text).lower().split()) >= 10
    )  # the same one ten times is ten


def paragraph_last_first(text: str) -> bool:
    lines = [line.strip().strip(EDGES).split() for line in text.lower().split("\n")]
    return all(words[:1] == words[-1:] for words in lines)


def prime_lengths(text: str) -> bool:
    return all(len(w) in PRIMES for w in bare(text).split())


def repeats(text: str, small_n: float) -> bool:
    return all(count <= small_n for count in Counter(bare(text.lower()).split()).values())


def start_verb(text: str) -> bool:
    words = nltk.word_tokenize(text)[:3]  # the tag of a word depends on no more than the two words after it
    return any("VB" in tag for _, tag in tagger().tag(words)[:1])


def vowel(text: str) -> bool:
    return "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3


def words_position(text: str, keyword: str) -> bool:
    words = nltk.word_tokenize(text)  # a full stop at the end is the last word
    return len(words) >= 2 and words[1] == words[-2] == keyword.strip()


CHECKERS = {
    "count:conjunctions": conjunctions,
    "count:keywords_multiple": keywords_multiple,
    "count:numbers": numbers,
    "count:person_names": person_names,
    "count:pronouns": pronouns,
    "count:punctuation": punctuation,
    "count:unique_word_count": unique_word_count,
    "count:word_count_range": word_count_range,
    "count:words_japanese": words_japanese,
    "custom:character_reverse": character_reverse,
    "custom:csv_city": csv_city,
    "custom:csv_quotes": csv_quotes,
    "custom:csv_special_character": csv_special_character,
    "custom:date_format_list": date_format_list,
    "custom:european_capitals_sort": european_capitals_sort,
    "custom:mcq_count_length": mcq_count_length,
    "custom:multiples": multiples,
    "custom:reverse_newline": reverse_newline,
    "custom:sentence_alphabet": sentence_alphabet,
    "custom:word_reverse": word_reverse,
    "format:emoji": ends_with_emoji,
    "format:line_indent": line_indent,
    "format:list": list_of_items,
    "format:newline": newline,
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:no_whitespace": no_whitespace,
    "format:options": one_of_options,
    "format:output_template": output_template,
    "format:parentheses": parentheses,
    "format:quote_unquote": quote_unquote,
    "format:quotes": quotes,
    "format:sub-bullets": sub_bullets,
    "format:thesis": thesis,
    "format:title_case": title_case,
    "ratio:overlap": overlap,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_words": sentence_words,
    "ratio:stop_words": few_stop_words,
    "repeat:repeat_change": repeat_change,
    "repeat:repeat_simple": repeat_simple,
    "repeat:repeat_span": repeat_span,
    "sentence:alliteration_increment": alliteration_increment,
    "sentence:increment": increment,
    "sentence:keyword": keyword_in_sentence,
    "words:alphabet": alphabet,
    "words:consonants": consonants,
    "words:keywords_specific_position": keywords_specific_position,
    "words:last_first": last_first,
    "words:no_consecutive": no_consecutive,
    "words:odd_even_syllables": odd_even_syllables,
    "words:palindrome": palindrome,
    "words:paragraph_last_first": paragraph_last_first,
    "words:prime_lengths": prime_lengths,
    "words:repeats": repeats,
    "words:start_verb": start_verb,
    "words:vowel": vowel,
    "words:words_position": words_position,
}

# --- 3. results


def loose_variants(response: str) -> list[str]:
    """The different ones of the 8 texts of which one must pass, the response itself first; none of white space."""
    lines = response.split("\n")
    cuts = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [v for v in dict.fromkeys(cuts + [cut.replace("*", "") for cut in cuts]) if v.strip()]


def bind(task: dict) -> list[functools.partial]:
    """The task's checkers with their kwargs, nulls left out; ValueError for an unknown id or kwargs that do not fit it."""
    where, bound = f"task {task['key']!r}", []
    if len(task["instruction_id_list"]) != len(task["kwargs"]):
        raise ValueError(
            f"{where}: {len(task['instruction_id_list'])} instruction ids but {len(task['kwargs'])} kwargs"
        )
    for name, kwargs in zip(task["instruction_id_list"], task["kwargs"]):
        if name not in CHECKERS:
            raise ValueError(f"{where}: unknown instruction id {name!r}; IFBench has {', '.join(CHECKERS)}")
        given = {k: v for k, v in kwargs.items() if v is not None}
        _, *needed = inspect.signature(CHECKERS[name]).parameters.values()
        if {p.name for p in needed} != set(given):
            raise ValueError(
                f"{where}: {name} needs kwargs {[p.name for p in needed]}, the task gives {sorted(given)}"
            )
        for p in needed:
            if not isinstance(given[p.name], str if p.annotation is str else int | float):
                raise ValueError(
                    f"{where}: {name} needs {p.name} as {p.annotation.__name__}, not {given[p.name]!r}"
                )
        bound.append(functools.partial(CHECKERS[name], **given))
    return bound


def check(task: dict, response: str) -> dict[str, list[bool]]:
    """{"strict": [...], "loose": [...]}: whether `response` meets each instruction of `task`, in their order.

    `task` is a row of the benchmark: key, prompt, instruction_id_list and kwargs (null-padded). Raises ValueError as `bind`
    does and FileNotFoundError where NLTK's data is missing.
    """
    require_nltk_data()
    variants = loose_variants(response)
    met = [[checker(v) for v in variants] for checker in bind(task)]
    return {"strict": [passed[:1] == [True] for passed in met], "loose": [any(passed) for passed in met]}


def accuracies(results: list[dict]) -> dict[str, float]:
    """The four accuracies, as fractions, of `check`'s results, one of them a task."""
    rates = {}
    for mode in ("strict", "loose"):
        rates[f"prompt_{mode}"] = sum(all(r[mode]) for r in results) / len(results)
        rates[f"instruction_{mode}"] = sum(sum(r[mode]) for r in results) / sum(len(r[mode]) for r in results)
    return rates
