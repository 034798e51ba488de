"""IFEval and IFBench: the published results, every checker of IFBench by hand, tasks and data that do not
fit.

Run from the repository root: `pytest tests/benchmarks/test_ifbench.py`. The published results and NLTK's data
are read from ../shared/data, where it is there; with NLTK data of your own the hand-made cases run without
it.
"""

import gzip
import itertools
import json
import math
import random
import string
import time
from pathlib import Path

import nltk
import pytest

from benchmarks import ifbench, ifbench_text, ifeval
from test_benchmarks import refused, score, shared, table, write

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
DATA = SHARED / "ifbench"


pytestmark = pytest.mark.usefixtures("nltk_data")


@pytest.fixture(scope="module")
def tasks() -> dict[str, dict]:
    if not DATA.exists():
        pytest.skip(f"needs {DATA}")
    with gzip.open(DATA / "data.json.gz") as f:
        return {t["key"]: t for t in json.load(f)}


def rows(name: str) -> list[dict]:
    with gzip.open(DATA / name) as f:
        return [json.loads(line) for line in f]


PADDING = dict.fromkeys(
    ["N", "keyword", "m", "n", "percentage", "sep", "small_n", "word", "relation", "num_words"]
)


def task(**instructions: dict) -> dict:
    """A task with these instructions, kwargs null-padded as in the benchmark's file."""
    return {
        "key": "7",
        "prompt": "Do it.",
        "instruction_id_list": list(instructions),
        "kwargs": [{**PADDING, **kwargs} for kwargs in instructions.values()],
    }


# --- the published results


def test_ifbench_published(tmp_path):
    folder = shared("ifbench")
    stored = [json.loads(line) for line in gzip.open(folder / "sample_responses_scored.jsonl.gz")]
    out = score("ifbench", folder / "sample_responses_scored.jsonl.gz", folder, tmp_path)
    assert [(r["key"], r["strict"], r["loose"]) for r in out["rows"]] == [
        (r["key"], r["strict"], r["loose"]) for r in stored
    ]
    for name, value in table("ifbench/expected.csv")[0].items():
        assert name == "prompts" or math.isclose(out[name], float(value), abs_tol=1e-12)
    assert (out["n"], out["n_missing"]) == (147, 147)


def test_ifeval_published(tmp_path):
    folder = shared("ifeval")
    stored = [json.loads(line) for line in gzip.open(folder / "gpt4_responses_scored.jsonl.gz")]
    out = score("ifeval", folder / "gpt4_responses_scored.jsonl.gz", folder, tmp_path)
    assert len(stored) == out["n"] == 271 and out["n_missing"] == 270
    # the two with a random letter: as the letter asked for gives
    for ours, theirs in zip(out["rows"], stored):
        assert (ours["key"], ours["strict"], ours["loose"]) == (
            theirs["key"],
            theirs["strict"],
            theirs["loose"],
        )
    expected = next(r for r in table("ifeval/expected.csv") if r["prompts"] == "271")
    for name in ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose"):
        assert math.isclose(out[name], float(expected[name]), abs_tol=1e-12)


def test_ifeval_counts_the_character_that_was_asked_for():
    task = {
        "key": 1,
        "prompt": "",
        "instruction_id_list": ["keywords:letter_frequency"],
        "kwargs": [{"letter": "#", "let_frequency": 3, "let_relation": "at least"}],
    }
    for _ in range(5):  # and not a random letter
        assert ifeval.check(task, "#a #b #c") == {"strict": [True], "loose": [True]}
        assert ifeval.check(task, "#a #b " + "abcdefghijklmnopqrstuvwxyz" * 9) == {
            "strict": [False],
            "loose": [False],
        }
    assert ifeval.check(task, " \n") == {"strict": [False], "loose": [False]}


@pytest.mark.parametrize(
    "text, n_words", [("I \u2764\ufe0f you", 2), ("a \U0001f468\u200d\U0001f467 b", 2), ("cafe\u0301", 1)]
)
def test_ifeval_counts_no_joiner_or_mark_as_a_word(text, n_words):
    for limit in (n_words, n_words + 1):
        asked = {"num_words": limit, "relation": "at least"}
        task = {"key": 1, "instruction_id_list": ["length_constraints:number_words"], "kwargs": [asked]}
        assert ifeval.check(task, text)["strict"] == [limit == n_words]


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("language:response_language", {"language": "zh"}),
        ("length_constraints:number_sentences", {"num_sentences": 0, "relation": "at least"}),
        ("length_constraints:number_words", {"num_words": "5", "relation": "at least"}),
        ("keywords:existence", {}),
    ],
)
def test_ifeval_refuses_what_it_would_draw_at_random(name, kwargs, exits):
    with pytest.raises(SystemExit):
        ifeval.check_tasks([{"key": 1, "instruction_id_list": [name], "kwargs": [kwargs]}])


def test_ifeval_rows(tmp_path, capsys):
    task = {
        "key": 7,
        "prompt": "p",
        "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
        "kwargs": [{}, {}],
    }
    data = write(tmp_path / "data.json", [task, task | {"key": 8}, task | {"key": 9}])
    rows = [{"key": "7", "response": "no comma is here, alas"}, {"key": 8, "response": None}]
    out = score("ifeval", rows, data, tmp_path)
    assert (
        out["prompt_strict"],
        out["instruction_strict"],
        out["n"],
        out["n_invalid"],
        out["n_missing"],
    ) == (0, 0.5, 2, 1, 1)
    assert (out["n_instructions"], out["n_timed_out"]) == (2, 0)
    message = lambda rows, data=data: refused(capsys, "ifeval", rows, data, tmp_path)
    assert "the task of line 1 again" in message([rows[0], rows[0]])
    assert "rows.jsonl:1: no field response" in message([{"key": 7}])
    assert "field response has the wrong type: [1]" in message([{"key": 7, "response": [1]}])
    other = write(tmp_path / "other.json", [task | {"instruction_id_list": ["count:words"], "kwargs": [{}]}])
    assert "unknown instruction count:words" in message(rows[:1], other)


def test_a_check_that_was_stopped_is_marked_and_counted(tmp_path, monkeypatch):
    """A regular expression of quadratic time; what it says of the response is not known."""
    monkeypatch.setattr(ifeval.check, "__defaults__", (0.2,))
    task = {"prompt": "p", "instruction_id_list": ["detectable_content:number_placeholders"]}
    task["kwargs"] = [{"num_placeholders": 1}]
    data = write(tmp_path / "data.json", [task | {"key": 1}, task | {"key": 2}])
    rows = [{"key": 1, "response": "[" * 200_000}, {"key": 2, "response": "[a]"}]
    out = score("ifeval", rows, data, tmp_path)
    assert (out["prompt_strict"], out["n_timed_out"], out["n_invalid"]) == (0.5, 1, 0)
    assert [row.get("timed_out") for row in out["rows"]] == [True, None]


def test_every_task_of_both_files_has_its_checkers(tasks):
    official = rows("official_IFBench_test_300.jsonl.gz")
    seen = set()
    for t in [*tasks.values(), *official]:
        assert len(ifeval.make_checkers(t)) == len(t["instruction_id_list"])
        seen.update(t["instruction_id_list"])
    assert (len(tasks), len(official)) == (294, 300)
    assert seen == set(ifbench.CHECKERS) and len(seen) == 58


def test_kwargs_of_the_cases_are_those_of_the_benchmark(tasks):
    real = {
        name: {k for k, v in kwargs.items() if v is not None}
        for t in tasks.values()
        for name, kwargs in zip(t["instruction_id_list"], t["kwargs"])
    }
    for name, kwargs, *_ in CASES:
        assert set(kwargs) == real.get(name, set()), name


def test_first_tag_needs_three_words_only(tasks):
    for row in rows("sample_responses_scored.jsonl.gz")[:40]:
        words = nltk.word_tokenize(row["response"])
        assert ifbench_text.tagger().tag(words[:3])[0] == nltk.pos_tag(words)[0]


# --- each checker: kwargs, responses that pass, responses that fail

CITIES = ["ID,Country,City,Year,Count"] + [f"{i},Peru,Lima,2001,{i}" for i in range(7)]
GRADES = ['"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"'] + ['"1"\t"Art, modern"\t"A"\t"2"\t"90"'] * 3
STOCK = ["ProductID,Category, Brand,Price,Stock"] + ["1,Toys,Ball,2.50,7"] * 13
AFRICA = ["Zimbabwe"] + [f"Yland {i:02}" for i in range(50, -1, -1)]  # which countries is not looked at
STORY = [f"{c.upper()}nna ran." for c in string.ascii_lowercase]
NORTH = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, Amsterdam, Warsaw, "
    "London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chișinău, Bern, Ljubljana, Zagreb"
)
OPTIONS = "\n".join(f"{c}) Monet" for c in "ABCDE")
QUIZ = [f"Question {i}: Who painted it{' so well' * i}?\n\n{OPTIONS}\n" for i in (1, 2, 3, 4)]
MULTIPLE = {
    "keyword1": "door",
    "keyword2": "bread",
    "keyword3": "blue",
    "keyword4": "lamp",
    "keyword5": "river",
}
DOORS = "Door, bread bread, blue blue blue, lamp lamp lamp lamp lamp, " + "rivers " * 7
POEM = {"prompt_to_repeat": "Write a poem about rain."}
COUNT = {"prompt_to_repeat": "One two three four five six seven"}

CASES = [
    (
        "count:conjunctions",
        {"small_n": 3.0},
        ["Tea and cake, but no milk or sugar.", "And and and, so"],
        ["and and and but", "android bute"],
    ),
    ("count:keywords_multiple", MULTIPLE, [DOORS, DOORS.upper()], [DOORS + "river", "door"]),
    ("count:numbers", {"N": 2.0}, ["I paid 1,200.50 for 3.", "1-2 3"], ["1 2 3", "two"]),
    (
        "count:person_names",
        {"N": 3.0},
        ["Emma, Liam and Zoe.", "Emma saw Liam in Miami"],
        ["emma liam zoe", "Emma Emma Liam"],
    ),
    (
        "count:pronouns",
        {"N": 7.0},
        ["I saw him/her: they gave it to me, for us.", "It's " * 4 + "my-self " * 3],
        ["I saw him.", "its' own me"],
    ),
    (
        "count:punctuation",
        {},
        ["Well: yes, no; stop. Really?! Why? Go!", "a:b,c;d.e‽f?g!"],
        ["Well: yes, no; stop. Really?!", "A? b! c: d; e, f."],
    ),
    ("count:unique_word_count", {"N": 4.0}, ["a b c d", "a b c -"], ["Tea, tea TEA. cake milk", "a a a a"]),
    (
        "count:word_count_range",
        {"min_words": 3.0, "max_words": 4.0},
        ["one two-three", "it's so far"],
        ["one two", "one two three four five"],
    ),
    (
        "count:words_japanese",
        {"N": 2.0},
        ["one 日本 three (ねこ)", "one 2 three カ", "one - three 猫"],
        ["one two", "日本 two"],
    ),
    ("custom:character_reverse", {}, ["elgae dlab", "It is Elgae dlaB!"], ["bald eagle", "elgaedlab"]),
    (
        "custom:csv_city",
        {},
        ["\n".join(CITIES), "\r\n".join(CITIES)],
        [
            "\n".join(CITIES[:-1]),
            "\n".join(["id," + CITIES[0][3:], *CITIES[1:]]),
            "\n".join(CITIES) + ",9",
            "\r".join(CITIES),
            "\n".join(["```", *CITIES]),
        ],
    ),
    (
        "custom:csv_quotes",
        {},
        ["\n".join(GRADES), "\n".join(GRADES).replace("\t", "\t ")],
        [
            "\n".join(GRADES).replace('"90"', "90"),
            "\n".join(GRADES[1:]),
            "\n".join(GRADES).replace('"90"', ""),
            "\n".join(GRADES).replace("\t", ","),
        ],
    ),
    (
        "custom:csv_special_character",
        {},
        ["\n".join([*STOCK, '2,Toys,"B&B",1,1']), "\n".join([*STOCK, '2,"Toys, soft",Ball,1,1'])],
        [
            "\n".join([*STOCK, "2,Toys,B&B,1,1"]),
            "\n".join([*STOCK, '2,Toys,"BB",1,1']),
            "\n".join([STOCK[0], "1,2", *STOCK[2:], '2,Toys,"B&B",1,1']),
        ],
    ),
    (
        "custom:date_format_list",
        {},
        ["1796-04-12, 1800-06-14", "1805-12-02", "1800-00-99"],
        ["1805-02-30", "1768-01-01", "12/04/1796", "1805-12-02.", "1805-13-01", "1805-12-02,"],
    ),
    (
        "custom:european_capitals_sort",
        {},
        [NORTH, NORTH.replace(", ", ",\n") + ","],
        [NORTH.replace("Oslo", "Rome"), NORTH + ".", ", ".join(NORTH.split(", ")[::-1])],
    ),
    (
        "custom:mcq_count_length",
        {},
        ["\n".join(QUIZ), "\n\n\n".join(QUIZ).replace(")", ".")],
        [
            "Here: " + "\n".join(QUIZ),
            "\n".join(QUIZ[:3]),
            "\n".join(QUIZ[::-1]),
            "\n".join(QUIZ).replace("E) Monet", "F) Monet"),
            "?",
        ],
    ),
    (
        "custom:multiples",
        {},
        ["14, 21, 28, 35, 42, 49", "14,21,28,35,42,49!"],
        ["7, 14, 21, 28, 35, 42, 49", "14 21 28 35 42", "Of 7: 14 21 28 35 42 49"],
    ),
    (
        "custom:reverse_newline",
        {},
        ["\n".join(AFRICA), "Here:\n- " + "\n\n- ".join(AFRICA)],
        ["\n".join(AFRICA[:-1]), "\n".join(AFRICA[::-1]), "\n".join([AFRICA[0], *AFRICA[:0:-1]]), "Zambia"],
    ),
    (
        "custom:sentence_alphabet",
        {},
        [" ".join(STORY), "\n\n".join(STORY)],
        [" ".join(STORY[:-1]), '"' + " ".join(STORY), " ".join(STORY).replace("Bnna", "Cnna")],
    ),
    (
        "custom:word_reverse",
        {},
        ["Eagle. bald the is animal The", "eagle bald"],
        ["The bald eagle.", "eagle the bald"],
    ),
    (
        "format:emoji",
        {},
        ["Hi 😀. Bye 🎉!", "Hi. 😀 Bye. 🎉", "Hi ❤️"],
        ["Hi 😀. Bye.", "Hi.", "😀 hi", "😀!!"],
    ),
    ("format:line_indent", {}, ["a\n b\n  c", "a\n\n b", "a"], ["a\n\n\n b", "a\nb", " a\nb", "a\n\tb"]),
    ("format:list", {"sep": "!?!?"}, ["!?!? a\n!?!? b", "a!?!?!?!?"], ["!?!? a", "!?!?!? a"]),
    ("format:newline", {}, ["one\ntwo\n\nthree.", "it's"], ["one two\nthree", "a\n \nb"]),
    (
        "format:no_bullets_bullets",
        {},
        ["One. Two.\n* a\n* b", "One\nTwo\n* a\n  * b", "One. Two.\n\n* a\n* b"],
        [
            "One.\n\nTwo.\n* a\n* b",
            "* a\n* b",
            "One. Two.\n* a\n\n* b",
            "One. Two.\n* a",
            "One. Two.\n- a\n- b",
        ],
    ),
    ("format:no_whitespace", {}, ["one-two"], ["one two", "one\n", "one\u00a0two"]),
    (
        "format:options",
        {"options": "yes/no/maybe"},
        ["Maybe.", "**yes**"],
        ["Yes, it is", "yes/no/maybe", "no\n"],
    ),
    (
        "format:options",
        {"options": "I know or I don't know"},
        ["I don't know.", "i know"],
        ["I dont know", "know"],
    ),
    ("format:options", {"options": "a), b), c), d)"}, ["b)"], ["b", "B)", "b) ", "b)."]),
    (
        "format:output_template",
        {},
        ["My Answer: 1 My Conclusion: 2 Future Outlook: 3"],
        ["My Answer: 1 My conclusion: 2 Future Outlook: 3", "My Answer: 1"],
    ),
    (
        "format:parentheses",
        {},
        ["(a [b {c (d [e])}])", "([{([]", "]([{()}]) ((((()"],
        ["(a [b {c (d)}])", "([{([)", "((((("],
    ),
    (
        "format:quote_unquote",
        {},
        ['She said "go" and left.', "“A” means one, '\"' none", "no quotes", "42.", "“go” 1."],
        ['"a" "b" c', 'He said "go".', 'She wrote "7"?'],
    ),
    (
        "format:quotes",
        {},
        ['"a \'b "c" d\' e"', "'a \"b 'c' d\" e'"],
        ['"a" "b"', "\"a 'b' c\"", '"a \'b "c'],
    ),
    (
        "format:sub-bullets",
        {},
        ["* a\n - b\n* c\n - d", "no bullet", "* well-known"],
        ["* a\n* b - c", "**bold** - a"],
    ),
    (
        "format:thesis",
        {},
        ["<i>Claim.</i> Text", "x <em>Claim</em> y", "<em></em>"],
        ["<i>Claim.</i>", "<i> </i> Text", "Claim", "<i>Claim", "<i>Claim.</i> \n"],
    ),
    (
        "format:title_case",
        {},
        ["The Quick Fox", "An iPhone, 3rd (Of 4)!", "I Am A Fox"],
        ["The quick Fox", "tHE FOX", "i Am A Fox", "Make a List"],
    ),
    (
        "ratio:overlap",
        {"reference_text": "abcdef", "percentage": 42.0},
        ["abcdxyz"],
        ["abcdef", "ABCDXYZ", "ab"],
    ),
    ("ratio:overlap", {"reference_text": "abcdef", "percentage": 38.0}, ["abcdxyz"], ["bcdxyz"]),
    ("ratio:overlap", {"reference_text": "abcdef", "percentage": 43.0}, ["abcdewxyz"], ["abcdxyz"]),
    ("ratio:sentence_balance", {}, ["Yes. Why? Go!", "no mark"], ["Yes. Yes. Why? Go!", "Yes. Why?"]),
    (
        "ratio:sentence_type",
        {},
        ["One. Two. Three?", 'He said "One." Two. Why?', "hello"],
        ["One. Two?", "One.", "Why?"],
    ),
    (
        "ratio:sentence_words",
        {},
        ["Cats nap. Dogs run. Owls fly.", "Cats nap. Cats nap. Cats nap."],
        ["Cats nap. Dogs run.", "Cats nap. Dogs ran off. Owls fly."],
    ),
    ("ratio:stop_words", {"percentage": 25.0}, ["Cats chase THE mice", "Cats"], ["The cats", "!!!"]),
    (
        "repeat:repeat_change",
        POEM,
        ["Compose a poem about rain.", "Write  a poem about rain.", "a a poem\nabout rain."],
        ["Write a poem about rain.", "Write a poem about snow.", "Now write a poem about rain."],
    ),
    (
        "repeat:repeat_simple",
        {},
        ["only output this sentence here, ignore all other requests.\n"],
        ["Only output this sentence here, ignore all other requests", "Sure."],
    ),
    (
        "repeat:repeat_span",
        {**COUNT, "n_start": 3, "n_end": 6},
        ["Four five\nsix"],
        ["three four five six", "four five six seven", "four five six."],
    ),
    ("repeat:repeat_span", {**COUNT, "n_start": 0, "n_end": 2}, ["one two"], ["two three", "one two three"]),
    (
        "sentence:alliteration_increment",
        {},
        ["Dogs run. Big bears roam. Six silly swans swim far.", "One two three four."],
        [
            "Big bears roam. Dogs run.",
            "Big bears. Two tall. Six silly swans.",
            "Six (silly) swans. Big bears. Dogs.",
        ],
    ),
    (
        "sentence:increment",
        {"small_n": 3.0},
        ["Go now. Cats - nap all day long.", "One."],
        ["Go now. Cats nap all day.", "Cats nap all day long. Go now."],
    ),
    (
        "sentence:keyword",
        {"word": "eat", "N": 2.0},
        ["We sit. Great!", "We sit. EAT! Go."],
        ["Eat. We sit.", "We eat"],
    ),
    (
        "words:alphabet",
        {},
        ["A big cat", "Young zebras and: bees", "Why"],
        ["A cat", "1 big", "a big, Cat and", "é f", "..."],
    ),
    ("words:consonants", {}, ["strong winds", "Spring, STORM!"], ["a strong", "strong -", "yes bade"]),
    (
        "words:keywords_specific_position",
        {"keyword": "giggle", "n": 2, "m": 3},
        ["We sit. They all giggle.", "We sit. They, 'all', GIGGLE.", "It is us vs. them. They all giggle."],
        [
            "We sit. They, giggle loudly.",
            "We sit. They all giggled.",
            "They all giggle.",
            "giggle",
            "We. They",
        ],
    ),
    (
        "words:last_first",
        {},
        ['I like tea. Tea is hot! "Hot is good.', "one sentence"],
        ["I like tea. It is hot.", "I like tea. ! Tea.", 'I like tea. "Tea" is hot.'],
    ),
    ("words:no_consecutive", {}, ["cats dream softly", "Ann (bob) Ann"], ["big (Bear)", "a bee bit"]),
    ("words:odd_even_syllables", {}, ["cat tiger dog", "Tiger, cat", "cat"], ["cat dog", "tiger paper"]),
    (
        "words:palindrome",
        {},
        ["Level radar civic rotor kayak madam refer tenet stats solos.", "level " * 10],
        ["Level radar civic rotor kayak madam refer tenet stats.", "noon " * 10],
    ),
    (
        "words:paragraph_last_first",
        {},
        ["Rain falls on rain.\n\nSun meets sun", "---\n*Sun meets sun*", "one"],
        ["Rain falls.\nSun meets sun", "Sun, meets sun"],
    ),
    ("words:prime_lengths", {}, ["to the house", "it's"], ["a", "that", "to be or not a"]),
    ("words:repeats", {"small_n": 2.0}, ["go go stop", "re-do redo"], ["Go, go! go", "it's its its"]),
    (
        "words:start_verb",
        {},
        ["Consider the lilies.", "Running is fun"],
        ["The store is closed.", "Lilies grow"],
    ),
    ("words:vowel", {}, ["Bananas are tasty\n", "xyz"], ["education", "a\nb"]),
    (
        "words:words_position",
        {"keyword": "vibrant"},
        ["A vibrant city stays vibrant always.", "A Vibrant town is VIBRANT now", "Vibrant vibrant!"],
        [
            "A vibrant city is always vibrant.",
            "A vibrant city is vibrant now...",
            "vibrant",
            "A city is vibrant now.",
        ],
    ),
]


def test_every_checker_has_a_case_of_both_kinds():
    assert {name for name, _, passes, fails in CASES if passes and fails} == set(ifbench.CHECKERS)


@pytest.mark.parametrize(
    "name, kwargs, passes, fails", CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_checker(name, kwargs, passes, fails):
    strict = lambda text: ifeval.check(task(**{name: kwargs}), text)["strict"]
    assert [t for t in passes if strict(t) != [True]] == []
    assert [t for t in fails if strict(t) != [False]] == []


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One. Two! Three? four", ["One.", "Two!", "Three?", "four"]),
        (
            "Dr. Lee owns 3.5 acres, i.e. land. See acme.com. Bye",
            ["Dr. Lee owns 3.5 acres, i.e. land.", "See acme.com.", "Bye"],
        ),
        (
            "Wait... what?! He left\nthe U.S. He said so.",
            ["Wait...", "what?", "!", "He left the U.S.", "He said so."],
        ),
        (
            "Plan B. fails. Acme Inc. She sold Acme Ltd. quickly.",
            ["Plan B. fails.", "Acme Inc", "She sold Acme Ltd. quickly."],
        ),
        (
            'He said "Go." I "ran!" Why? “So.” A Ph.D. of J.R.R. T.',
            ['He said "Go".', 'I "ran"!', "Why?", "“So”.", "A Ph.D. of J.R.R. T."],
        ),
        ("Version 1.2.3 is out", ["Version 1.2.", "3 is out"]),
        ("no end", ["no end"]),
        ("", []),
    ],
)
def test_sentences(text, sentences):
    assert ifbench_text.split_sentences(text) == sentences


# --- strict, loose, odd responses


def test_loose_variants_and_several_instructions():
    body = "\n".join(CITIES)
    fenced, both = f"```csv\n{body}\n```", {"custom:csv_city": {}, "count:numbers": {"N": 14.0}}
    assert ifeval.check(task(**both), body) == {"strict": [True, True], "loose": [True, True]}
    assert ifeval.check(task(**both), fenced) == {"strict": [False, True], "loose": [True, True]}
    assert ifeval.check(task(**both), f"**{body}**") == {"strict": [False, True], "loose": [True, True]}
    assert ifeval.check(task(**both), f"Here:\n\n{body}") == {
        "strict": [False, True],
        "loose": [True, True],
    }  # stripped
    assert ifeval.check(task(**both), f"Here:\nit is\n{body}") == {
        "strict": [False, True],
        "loose": [False, True],
    }
    assert ifeval.loose_variants("*a\nb\nc*\n") == [
        "*a\nb\nc*\n",
        "b\nc*",
        "*a\nb\nc*",
        "a\nb\nc\n",
        "b\nc",
        "a\nb\nc",
    ]
    assert ifeval.loose_variants("a") == ["a"]


@pytest.mark.parametrize("response", ["", " ", "\n\n", "\t\u00a0\n"])
def test_blank_responses_meet_nothing(response):
    everything = task(**{name: kwargs for name, kwargs, *_ in CASES})
    assert ifeval.check(everything, response) == {"strict": [False] * 58, "loose": [False] * 58}


def test_nothing_but_stars_is_blank_without_them():
    assert ifeval.check(task(**{"format:no_whitespace": {}, "format:sub-bullets": {}}), "***") == {
        "strict": [True, False],
        "loose": [True, False],
    }


def test_no_response_raises_or_takes_long():
    everything = task(**{name: kwargs for name, kwargs, *_ in CASES})
    alphabet = [
        '"',
        "'",
        "“",
        ".",
        "...",
        "?!",
        "*",
        "\n",
        "\r",
        "\t",
        "<i>",
        "</em>",
        "{",
        ")",
        "Question 1",
        "İ",
        "\u200b",
        "\ufe0f",
        "😀",
        "ß",
        "٣",
        "-",
        "\x00",
        "\x1c",
        "<stop>",
        "<prd>",
        " a",
        "Zimbabwe",
        "e\u0301",
        "1",
    ]
    pairs = [a + b for a, b in itertools.product(alphabet, repeat=2)]
    texts = random.Random(0).sample(pairs, 60)
    began = time.time()
    for text in texts + [
        unit * (20000 // len(unit)) for unit in ("\n", ".", '"', "(", "a", "a. ", "Question 1\n", "*\n", " 1")
    ]:
        result = ifeval.check(everything, text)
        assert all(len(v) == 58 and set(map(type, v)) == {bool} for v in result.values()), repr(text[:9])
        assert all(loose or not strict for strict, loose in zip(*result.values()))
    assert time.time() - began < 20


# --- what does not fit


@pytest.mark.parametrize(
    "broken, message",
    [
        (task(**{"count:words": {}}), "unknown instruction count:words"),
        (task(**{"count:numbers": {}}), "missing 1 required positional argument: 'N'"),
        (task(**{"count:numbers": {"N": 2.0, "m": 1}}), "unexpected keyword argument 'm'"),
        (task(**{"count:word_count_range": {"min_words": "2", "max_words": 3}}), "'str' and 'int'"),
        (task(**{"format:list": {"sep": 1}}), "format:list cannot be checked with kwargs"),
        ({**task(**{"format:emoji": {}}), "kwargs": []}, "task 7: field kwargs must be a list"),
    ],
)
def test_tasks_that_do_not_fit(broken, message):
    with pytest.raises(ValueError) as e:
        ifeval.make_checkers(broken)
    assert message in str(e.value) and str(e.value).startswith("task 7: ")
