"""Draws constraints of IFEval's families (arXiv 2311.07911): arguments for their checkers, and our own
wording.

`data.make_instructions` puts them behind prompts. Numbers fit answers of up to about 200 tokens.
"""

import random
import re
from string import Formatter

from rlmt.instructions import ifeval_checkers

# none contains another, as checkers also count inside of words, and no other family asks for one
WORDS = (
    "again almost already always become before begin better bring carry certain change children choice clear common"
    " country course decide during early enough every example family father feeling follow friend future garden great"
    " happen heart history house idea important inside journey knowledge large later laugh learn letter light listen"
    " little market matter means moment money morning mountain music nature never night office order outside perhaps"
    " picture place planet possible power present problem quick quiet reach reason remember river school second secret"
    " several simple small strange street strong student summer surprise taste teacher think together tomorrow travel"
    " under usual value village voice water weather window winter wonder young"
).split()
LANGUAGES = {"de": "German", "es": "Spanish", "fr": "French", "it": "Italian", "pt": "Portuguese"}
RELATIONS = ("at least", "less than")
SMALL_NUMBERS = range(3, 6)
ARGUMENTS = {  # argument of a checker: what it is drawn from; keywords and forbidden words are those of the row
    "frequency": SMALL_NUMBERS,
    "relation": RELATIONS,
    "letter": "bfgjkpqvwxyz",  # rare ones, which one can use a few times as well as hardly ever
    "let_frequency": SMALL_NUMBERS,
    "let_relation": RELATIONS,
    "language": list(LANGUAGES),
    "num_sentences": range(3, 8),
    "num_words": range(40, 101, 5),
    "num_paragraphs": range(2, 5),
    "nth_paragraph": (1, 2),
    "first_word": ("first", "today", "many", "people", "there", "here", "some", "once", "this", "finally"),
    "num_placeholders": SMALL_NUMBERS,
    "postscript_marker": ("P.S.", "P.P.S"),
    "num_bullets": SMALL_NUMBERS,
    "num_highlights": SMALL_NUMBERS,
    "section_spliter": ("Section", "SECTION", "Part", "PART"),
    "num_sections": range(2, 5),
    "end_phrase": ("I hope this helps you.", "Have a nice day!", "The rest is up to you."),
    "capital_frequency": SMALL_NUMBERS,
    "capital_relation": RELATIONS,
}
FAMILIES = {  # two wordings each, which name all arguments of the family's checker in braces
    "keywords:existence": ("Use {keywords} in your answer.", "Work {keywords} into what you write."),
    "keywords:frequency": (
        'Your answer should contain "{keyword}" {relation} {frequency} times.',
        'I want to read "{keyword}" {relation} {frequency} times.',
    ),
    "keywords:forbidden_words": (
        "Write your answer without {forbidden_words}.",
        "Stay away from {forbidden_words}.",
    ),
    "keywords:letter_frequency": (
        'The letter "{letter}" has to occur {let_relation} {let_frequency} times in your answer.',
        'Use the letter "{letter}" {let_relation} {let_frequency} times, capital or not.',
    ),
    "language:response_language": (
        "Write the whole answer in {language}.",
        "Answer in {language} and in no other language.",
    ),
    "length_constraints:number_sentences": (
        "Use {relation} {num_sentences} sentences.",
        "Say it in {relation} {num_sentences} sentences.",
    ),
    "length_constraints:number_words": (
        "Use {relation} {num_words} words.",
        "Your answer should be {relation} {num_words} words long.",
    ),
    "length_constraints:number_paragraphs": (
        "Write exactly {num_paragraphs} paragraphs, with a line of three asterisks (***) between one and the next.",
        "Split your answer into exactly {num_paragraphs} paragraphs by putting *** between them.",
    ),
    "length_constraints:nth_paragraph_first_word": (
        "Write exactly {num_paragraphs} paragraphs with an empty line between them. "
        'The first word of paragraph {nth_paragraph} has to be "{first_word}".',
        "Your answer consists of exactly {num_paragraphs} paragraphs, separated by a blank line, "
        'and number {nth_paragraph} opens with the word "{first_word}".',
    ),
    "detectable_content:number_placeholders": (
        "Leave at least {num_placeholders} placeholders in square brackets, for instance [name].",
        "Your answer should have at least {num_placeholders} placeholders like [place].",
    ),
    "detectable_content:postscript": (
        "Add a postscript that begins with {postscript_marker} when you are done.",
        "After your answer, write a postscript. Start it with {postscript_marker}",
    ),
    "detectable_format:number_bullet_lists": (
        "Include exactly {num_bullets} bullet points, each on its own line after an asterisk: * like this.",
        "Among other lines, write exactly {num_bullets} markdown bullet points: * one, * two and so forth.",
    ),
    "detectable_format:constrained_response": (
        'Reply with one of these: "My answer is yes.", "My answer is no.", "My answer is maybe."',
        'Choose one of the replies "My answer is yes.", "My answer is no." and "My answer is maybe."',
    ),
    "detectable_format:number_highlighted_sections": (
        "Highlight at least {num_highlights} passages with asterisks, *like this*.",
        "Put at least {num_highlights} parts of your answer in markdown's *emphasis*.",
    ),
    "detectable_format:multiple_sections": (
        "Divide your answer into at least {num_sections} sections that begin with {section_spliter} 1, "
        "{section_spliter} 2 and so on.",
        "Structure your answer as at least {num_sections} numbered sections. The first begins with "
        "{section_spliter} 1, the next with {section_spliter} 2.",
    ),
    "detectable_format:json_format": (
        "Give your whole answer as valid JSON.",
        "Write nothing but JSON; a markdown code fence around it is fine.",
    ),
    "detectable_format:title": (
        "Give your answer a title in double angle brackets, for instance <<my title>>.",
        "There has to be a title between << and >>.",
    ),
    "combination:two_responses": (
        "Give me two different answers with six asterisks between them: ******",
        "I want to choose, so write two answers that differ. Put ****** between the two and nowhere else.",
    ),
    "combination:repeat_prompt": (
        "Before you answer, repeat the request above word for word. Your reply begins with its first word, and what "
        "follows the request here is not to be repeated.",
        "Open your reply with an exact copy of my request, that is, of everything above this sentence. Answer it then.",
    ),
    "startend:end_checker": (
        'The last words of your answer have to be "{end_phrase}"',
        'Finish by saying "{end_phrase}" exactly like that, as the very end.',
    ),
    "change_case:capital_word_frequency": (
        "Write {capital_relation} {capital_frequency} words in all capital letters (single capitals such as I count).",
        "Your answer should have {capital_relation} {capital_frequency} words in FULL CAPITALS, a lone capital letter "
        "counting as a word.",
    ),
    "change_case:english_capital": (
        "Answer in English, with every letter a capital.",
        "Use capital letters only, and English.",
    ),
    "change_case:english_lowercase": (
        "Answer in English, all in lowercase.",
        "Use no capital letter anywhere, and answer in English.",
    ),
    "punctuation:no_comma": ("Do not use a single comma.", "Write without commas."),
    "startend:quotation": (
        'Put your whole answer between double quotation marks (").',
        "Enclose everything that you write in double quotes.",
    ),
}
REPEAT = "combination:repeat_prompt"
# Families that exclude each other, or read as if they did, and that IFEval's table lacks; by the last part of
# the name.
MORE_CONFLICTS = {
    "english_lowercase": "multiple_sections postscript end_checker",
    "english_capital": "multiple_sections nth_paragraph_first_word end_checker",
    "capital_word_frequency": "multiple_sections postscript",
    "letter_frequency": "existence frequency end_checker nth_paragraph_first_word response_language",
    "response_language": "nth_paragraph_first_word title postscript number_placeholders",
    "end_checker": "postscript quotation",
    "nth_paragraph_first_word": "multiple_sections title number_bullet_lists postscript quotation",
    "number_paragraphs": "multiple_sections number_highlighted_sections number_bullet_lists",
    "number_sentences": "number_bullet_lists multiple_sections nth_paragraph_first_word",
    "repeat_prompt": "no_comma",  # the request may have a comma
}


def conflicts() -> dict[str, set[str]]:
    """Returns, for each family, those that it cannot be drawn with; exits with 2 if nltk's data is
    missing."""
    ifeval_checkers()  # makes IFEval's modules importable without those of lm-eval's other tasks
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_CONFLICTS, conflict_make

    table = {name: set(INSTRUCTION_CONFLICTS[name]) for name in FAMILIES}
    for name in FAMILIES:
        others = MORE_CONFLICTS.get(name.partition(":")[2], "").split()
        table[name] |= {other for other in FAMILIES if other.partition(":")[2] in others}
    return conflict_make(table)


def draw_families(prompt: str, excludes: dict[str, set[str]], rng: random.Random) -> list[str]:
    """Returns one to three families that go together, and with the prompt."""
    wanted = rng.choices((1, 2, 3), weights=(305, 179, 57))[0]  # so many of IFEval's prompts have 1, 2 and 3
    asks_yes_or_no = re.fullmatch(r"(is|are|was|were|do|does|did|should|has|have)\b.*\?", prompt, re.I)
    drawn: list[str] = []
    for name in rng.sample(list(FAMILIES), len(FAMILIES)):
        if name == "detectable_format:constrained_response" and not asks_yes_or_no:
            continue
        if len(drawn) < wanted and not excludes[name] & set(drawn):
            drawn.append(name)
    # it speaks of "the request above", so no other constraint may come before it
    return sorted(drawn, key=lambda name: name != REPEAT)


def draw(name: str, prompt: str, words: list[str], rng: random.Random) -> tuple[dict, str]:
    """Returns the arguments of a family's checker, and what they ask for; takes keywords from the end of
    `words`."""
    wording = rng.choice(FAMILIES[name])
    kwargs = {}
    if name == REPEAT:
        kwargs["prompt_to_repeat"] = prompt
    for _, argument, _, _ in Formatter().parse(wording):
        if argument in ARGUMENTS:
            kwargs[argument] = rng.choice(ARGUMENTS[argument])
        elif argument == "keyword":
            kwargs[argument] = words.pop()
        elif argument:
            kwargs[argument] = [words.pop() for _ in range(rng.randint(1, 3))]
    said = kwargs | {"language": LANGUAGES.get(kwargs.get("language"))}
    for argument, value in kwargs.items():
        if isinstance(value, list):
            said[argument] = " and ".join(f'"{word}"' for word in value)
    return kwargs, wording.format(**said)
