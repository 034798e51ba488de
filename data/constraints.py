"""Draws constraints of IFEval's families (arXiv 2311.07911): arguments for their checkers, and our own wording.

`data.make_instructions` puts them behind prompts. Numbers fit answers of up to about 200 tokens.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import ifeval

# --- 1. what a constraint draws: the arguments of its checker

COMMON_WORDS = (
    "again almost already always become before begin better bring carry certain change children choice clear common"
    " country course decide during early enough every example family father feeling follow friend future garden great"
    " happen heart history house idea important inside journey knowledge large later laugh learn letter light listen"
    " little market matter means moment money morning mountain music nature never night office order outside perhaps"
    " picture place planet possible power present problem quick quiet reach reason remember river school second secret"
    " several simple small strange street strong student summer surprise taste teacher think together tomorrow travel"
    " under usual value village voice water weather window winter wonder young"
).split()
NOT_A_TOPIC = set(
    "about above after against asking because being below between could describe doing explain following from generate"
    " give having himself itself might please provide really should since someone something tell than that their them"
    " then there these they this those through until using very want what when where which while whose will with would"
    " write yourself".split()
)
END_PHRASES = (
    "I hope this helps you.",
    "That is all for now.",
    "Thank you for reading this.",
    "And that is how it goes.",
    "What do you think about it?",
    "Tell me if you need more.",
    "Have a nice day!",
    "The rest is up to you.",
)
FIRST_WORDS = ("first", "today", "many", "people", "there", "here", "some", "once", "this", "finally")
LANGUAGES = {"de": "German", "es": "Spanish", "fr": "French", "it": "Italian", "pt": "Portuguese"}
FREQUENT_LETTERS = "aehilnorst"
RARE_LETTERS = "bfgjkpqvwxyz"
YES_OR_NO = re.compile(r"(is|are|was|were|do|does|did|should|has|have)\b.*\?", re.IGNORECASE)


@dataclass
class Draw:
    """Holds what the arguments of one row's constraints are drawn from."""

    rng: random.Random
    prompt: str
    words: list[str]
    """Words for constraints, in random order. None contains another, as checkers also count inside of words."""

    def word(self) -> str:
        """Draws a word that no other constraint of the row has."""
        return self.words.pop()

    def relation(self) -> str:
        return self.rng.choice(("at least", "less than"))

    def number(self, relation: str, most: int) -> int:
        """Draws a number up to `most`: from 2, as "at least 1" asks for little, or 3, as "less than 2" is harsh."""
        fewest = {"at least": 2, "less than": 3}[relation]
        return self.rng.randint(fewest, most)


def words_for(prompt: str, rng: random.Random) -> list[str]:
    """Returns words of the prompt and common words in random order, none of which contains another."""
    topics = [word for word in re.findall(r"\b[a-z]{5,12}\b", prompt) if word not in NOT_A_TOPIC]
    candidates = sorted(set(topics)) + rng.sample(COMMON_WORDS, 10)
    rng.shuffle(candidates)
    of_other_families = " ".join(END_PHRASES + FIRST_WORDS).lower()  # one may demand what another forbids

    words: list[str] = []
    for candidate in candidates:
        overlaps = [word for word in words if candidate in word or word in candidate]
        if not overlaps and candidate not in of_other_families:
            words.append(candidate)
    return words


def draw_nothing(draw: Draw) -> dict:
    return {}


def draw_keywords(draw: Draw) -> dict:
    n = draw.rng.randint(1, 3)
    return {"keywords": [draw.word() for _ in range(n)]}


def draw_keyword_frequency(draw: Draw) -> dict:
    relation = draw.relation()
    return {"keyword": draw.word(), "frequency": draw.number(relation, 4), "relation": relation}


def draw_forbidden_words(draw: Draw) -> dict:
    n = draw.rng.randint(1, 3)
    return {"forbidden_words": [draw.word() for _ in range(n)]}


def draw_letter_frequency(draw: Draw) -> dict:
    """Draws a frequent letter to use often, or a rare one to use a few times or hardly ever."""
    if draw.rng.random() < 0.5:
        letter = draw.rng.choice(FREQUENT_LETTERS)
        return {"letter": letter, "let_frequency": draw.rng.randint(5, 30), "let_relation": "at least"}
    letter = draw.rng.choice(RARE_LETTERS)
    return {"letter": letter, "let_frequency": draw.rng.randint(3, 6), "let_relation": draw.relation()}


def draw_language(draw: Draw) -> dict:
    return {"language": draw.rng.choice(list(LANGUAGES))}


def draw_sentences(draw: Draw) -> dict:
    relation = draw.relation()
    return {"num_sentences": draw.number(relation, 7), "relation": relation}


def draw_words(draw: Draw) -> dict:
    relation = draw.relation()
    fewest, most = {"at least": (20, 100), "less than": (40, 120)}[relation]
    return {"num_words": draw.rng.randrange(fewest, most + 1, 5), "relation": relation}


def draw_paragraphs(draw: Draw) -> dict:
    return {"num_paragraphs": draw.rng.randint(2, 4)}


def draw_first_word(draw: Draw) -> dict:
    n = draw.rng.randint(2, 3)
    nth = draw.rng.randint(1, n)
    return {"num_paragraphs": n, "nth_paragraph": nth, "first_word": draw.rng.choice(FIRST_WORDS)}


def draw_placeholders(draw: Draw) -> dict:
    return {"num_placeholders": draw.rng.randint(2, 5)}


def draw_postscript(draw: Draw) -> dict:
    return {"postscript_marker": draw.rng.choice(("P.S.", "P.P.S"))}


def draw_bullets(draw: Draw) -> dict:
    return {"num_bullets": draw.rng.randint(2, 6)}


def draw_highlights(draw: Draw) -> dict:
    return {"num_highlights": draw.rng.randint(2, 4)}


def draw_sections(draw: Draw) -> dict:
    marker = draw.rng.choice(("Section", "SECTION", "Part", "PART"))
    return {"section_spliter": marker, "num_sections": draw.rng.randint(2, 4)}


def draw_repeated_prompt(draw: Draw) -> dict:
    return {"prompt_to_repeat": draw.prompt}


def draw_end_phrase(draw: Draw) -> dict:
    return {"end_phrase": draw.rng.choice(END_PHRASES)}


def draw_capital_words(draw: Draw) -> dict:
    relation = draw.relation()
    return {"capital_frequency": draw.number(relation, 6), "capital_relation": relation}


# --- 2. families of constraints: what each draws, and its wordings


@dataclass(frozen=True)
class Family:
    draw: Callable[[Draw], dict]
    """Draws the arguments of the family's checker."""
    wordings: tuple[str, ...]
    """Templates of those arguments. {amount} is their number and relation, such as "3 or more"; {words} are their
    words in quotes."""
    relation: str = ""
    """The relation, if the checker has no argument for it. Without any relation there is no {amount}."""


FAMILIES = {
    "keywords:existence": Family(
        draw_keywords,
        (
            "Your answer has to contain {words}.",
            "Make use of {words} somewhere in your answer.",
            "Work {words} into what you write.",
        ),
    ),
    "keywords:frequency": Family(
        draw_keyword_frequency,
        (
            'Your answer should contain "{keyword}" {amount} times.',
            'Let "{keyword}" occur {amount} times in your answer.',
            'I want to read "{keyword}" {amount} times.',
        ),
    ),
    "keywords:forbidden_words": Family(
        draw_forbidden_words,
        (
            "Write your answer without {words}.",
            "Do not use {words}.",
            "Stay away from {words} in your answer.",
        ),
    ),
    "keywords:letter_frequency": Family(
        draw_letter_frequency,
        (
            'The letter "{letter}" has to occur {amount} times in your answer.',
            'Use the letter "{letter}" {amount} times, capital or not.',
            'Count the letter "{letter}" as you write: your answer should have it {amount} times.',
        ),
    ),
    "language:response_language": Family(
        draw_language,
        (
            "Write the whole answer in {language_name}.",
            "Answer in {language_name} and in no other language.",
            "I only read {language_name}, so answer in it throughout.",
        ),
    ),
    "length_constraints:number_sentences": Family(
        draw_sentences,
        (
            "Use {amount} sentences.",
            "Your answer should have {amount} sentences.",
            "Say it in {amount} sentences.",
        ),
    ),
    "length_constraints:number_words": Family(
        draw_words,
        (
            "Use {amount} words.",
            "Your answer should be {amount} words long.",
            "Keep to {amount} words.",
        ),
    ),
    "length_constraints:number_paragraphs": Family(
        draw_paragraphs,
        (
            "Write {amount} paragraphs, with a line of three asterisks (***) between one and the next.",
            "Split your answer into {amount} paragraphs by putting *** between them.",
            "I want {amount} paragraphs. Separate them with ***, the divider of markdown.",
        ),
        relation="exactly",
    ),
    "length_constraints:nth_paragraph_first_word": Family(
        draw_first_word,
        (
            "Write exactly {num_paragraphs} paragraphs with an empty line between them. "
            'The first word of paragraph {nth_paragraph} has to be "{first_word}".',
            "Your answer consists of exactly {num_paragraphs} paragraphs, separated by a blank line, "
            'and number {nth_paragraph} opens with the word "{first_word}".',
        ),
    ),
    "detectable_content:number_placeholders": Family(
        draw_placeholders,
        (
            "Leave {amount} placeholders in square brackets, for instance [name].",
            "Put {amount} blanks to fill in into your answer, each written in square brackets such as [date].",
            "Your answer should have {amount} placeholders like [place].",
        ),
        relation="at least",
    ),
    "detectable_content:postscript": Family(
        draw_postscript,
        (
            "Add a postscript that begins with {postscript_marker} when you are done.",
            "Close with a postscript that is marked {postscript_marker}",
            "After your answer, write a postscript. Start it with {postscript_marker}",
        ),
    ),
    "detectable_format:number_bullet_lists": Family(
        draw_bullets,
        (
            "Include {amount} bullet points, each on its own line after an asterisk: * like this.",
            "Give {amount} bullet points in markdown (lines that begin with * and a space).",
            "Among other lines, write {amount} markdown bullet points: * one, * two and so forth.",
        ),
        relation="exactly",
    ),
    "detectable_format:constrained_response": Family(
        draw_nothing,
        (
            'Reply with one of these: "My answer is yes.", "My answer is no.", "My answer is maybe."',
            'Choose one of the replies "My answer is yes.", "My answer is no." and "My answer is maybe."',
        ),
    ),
    "detectable_format:number_highlighted_sections": Family(
        draw_highlights,
        (
            "Highlight {amount} passages with asterisks, *like this*.",
            "Put {amount} parts of your answer in markdown's *emphasis*.",
            "Emphasize {amount} phrases by writing them as *phrase*.",
        ),
        relation="at least",
    ),
    "detectable_format:multiple_sections": Family(
        draw_sections,
        (
            "Divide your answer into {amount} sections that begin with {section_spliter} 1, {section_spliter} 2 and so on.",
            "Structure your answer as {amount} numbered sections. The first begins with {section_spliter} 1, the next with "
            "{section_spliter} 2.",
        ),
        relation="at least",
    ),
    "detectable_format:json_format": Family(
        draw_nothing,
        (
            "Give your whole answer as valid JSON.",
            "Write nothing but JSON; a markdown code fence around it is fine.",
            "Your output has to parse as JSON, all of it.",
        ),
    ),
    "detectable_format:title": Family(
        draw_nothing,
        (
            "Give your answer a title in double angle brackets, for instance <<my title>>.",
            "Add a title, written as <<title>>.",
            "There has to be a title between << and >>.",
        ),
    ),
    "combination:two_responses": Family(
        draw_nothing,
        (
            "Give me two different answers with six asterisks between them: ******",
            "I want to choose, so write two answers that differ. Put ****** between the two and nowhere else.",
        ),
    ),
    "combination:repeat_prompt": Family(
        draw_repeated_prompt,
        (
            "Before you answer, repeat the request above word for word. Your reply begins with its first word, and what "
            "follows the request here is not to be repeated.",
            "Open your reply with an exact copy of my request, that is, of everything above this sentence. Answer it then.",
        ),
    ),
    "startend:end_checker": Family(
        draw_end_phrase,
        (
            'The last words of your answer have to be "{end_phrase}"',
            'Close with the words "{end_phrase}" and write nothing behind them.',
            'Finish by saying "{end_phrase}" exactly like that, as the very end.',
        ),
    ),
    "change_case:capital_word_frequency": Family(
        draw_capital_words,
        (
            "Write {amount} words in all capital letters (single capitals such as I count).",
            "Your answer should have {amount} words in FULL CAPITALS, a lone capital letter counting as a word.",
        ),
    ),
    "change_case:english_capital": Family(
        draw_nothing,
        (
            "Answer in English, with every letter a capital.",
            "Use capital letters only, and English.",
            "Write the whole answer in English and in capitals.",
        ),
    ),
    "change_case:english_lowercase": Family(
        draw_nothing,
        (
            "Answer in English, all in lowercase.",
            "Write in English and in small letters only, without a single capital.",
            "Use no capital letter anywhere, and answer in English.",
        ),
    ),
    "punctuation:no_comma": Family(
        draw_nothing,
        (
            "Do not use a single comma.",
            "Write without commas.",
            "Commas are not allowed in your answer.",
        ),
    ),
    "startend:quotation": Family(
        draw_nothing,
        (
            'Put your whole answer between double quotation marks (").',
            "Begin and end your answer with a double quotation mark.",
            "Enclose everything that you write in double quotes.",
        ),
    ),
}

REPEAT = "combination:repeat_prompt"
AT_LEAST = ("at least {}", "{} or more", "no fewer than {}")
LESS_THAN = ("fewer than {}", "less than {}")
AT_MOST = ("at most {}", "no more than {}")
NUMBER_WORDS = "zero one two three four five six seven eight nine ten".split()
P_NUMBER_WORD = 0.3


def say_amount(number: int, relation: str, rng: random.Random) -> str:
    """Returns a number and its relation in words: "3 or more", "at most two" for less than 3."""
    if relation == "at least":
        pattern = rng.choice(AT_LEAST)
    elif relation == "less than":
        pattern = rng.choice(LESS_THAN + AT_MOST)
        if pattern in AT_MOST:
            number -= 1
    else:
        pattern = "exactly {}"
    if number < len(NUMBER_WORDS) and rng.random() < P_NUMBER_WORD:
        return pattern.format(NUMBER_WORDS[number])
    return pattern.format(number)


def say_words(words: list[str]) -> str:
    """Returns 'the word "a"' or 'the words "a", "b" and "c"'."""
    quoted = [f'"{word}"' for word in words]
    if len(quoted) == 1:
        return f"the word {quoted[0]}"
    return f"the words {', '.join(quoted[:-1])} and {quoted[-1]}"


def say(name: str, kwargs: dict, rng: random.Random) -> str:
    """Returns one wording of a constraint."""
    family = FAMILIES[name]
    values = dict(kwargs)
    relation = family.relation
    for argument, value in kwargs.items():
        if argument.endswith("relation"):
            relation = value
        if isinstance(value, list):
            values["words"] = say_words(value)
        if argument == "language":
            values["language_name"] = LANGUAGES[value]
    if relation:  # such a family has one number
        number = next(value for value in kwargs.values() if isinstance(value, int))
        values["amount"] = say_amount(number, relation, rng)
    return rng.choice(family.wordings).format(**values)


# --- 3. families that go together

# Families that exclude each other, or read as if they did, and that IFEval's table lacks; by the last part of the name.
MORE_CONFLICTS = {
    "english_lowercase": {"multiple_sections", "postscript", "end_checker"},
    "english_capital": {"multiple_sections", "nth_paragraph_first_word", "end_checker"},
    "capital_word_frequency": {"multiple_sections", "postscript"},
    "letter_frequency": {
        "existence",
        "frequency",
        "end_checker",
        "nth_paragraph_first_word",
        "response_language",
    },
    "response_language": {"nth_paragraph_first_word", "title", "postscript", "number_placeholders"},
    "end_checker": {"postscript", "quotation"},
    "nth_paragraph_first_word": {
        "multiple_sections",
        "title",
        "number_bullet_lists",
        "postscript",
        "quotation",
    },
    "number_paragraphs": {"multiple_sections", "number_highlighted_sections", "number_bullet_lists"},
    "number_sentences": {"number_bullet_lists", "multiple_sections", "nth_paragraph_first_word"},
    "repeat_prompt": {"no_comma"},  # the request may have a comma
}


def conflicts() -> dict[str, set[str]]:
    """Returns, for each family, those that it cannot be drawn with; exits with 2 if nltk's data is missing."""
    ifeval.ifeval_checkers()  # makes IFEval's modules importable without those of lm-eval's other tasks
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_CONFLICTS, conflict_make

    by_last_part = {name.partition(":")[2]: name for name in FAMILIES}
    table = {name: set(INSTRUCTION_CONFLICTS[name]) for name in FAMILIES}
    for name, others in MORE_CONFLICTS.items():
        table[by_last_part[name]] |= {by_last_part[other] for other in others}
    return conflict_make(table)


def draw_families(prompt: str, excludes: dict[str, set[str]], rng: random.Random) -> list[str]:
    """Returns one to three families that go together, and with the prompt."""
    wanted = rng.choices((1, 2, 3), weights=(305, 179, 57))[0]  # so many of IFEval's prompts have 1, 2 and 3
    names = list(FAMILIES)
    rng.shuffle(names)
    if not YES_OR_NO.fullmatch(prompt):
        names.remove("detectable_format:constrained_response")

    drawn: list[str] = []
    for name in names:
        if not excludes[name] & set(drawn):
            drawn.append(name)
        if len(drawn) == wanted:
            break
    if REPEAT in drawn:  # it speaks of "the request above", so no other constraint may come before it
        drawn.remove(REPEAT)
        drawn.insert(0, REPEAT)
    return drawn
