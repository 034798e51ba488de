"""data/make_instructions.py: every row can be answered, and its text says what its checkers check."""

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import langdetect
import pytest

from data import constraints, make_instructions
from rewards import verified

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
PROMPTS = (
    "Is the old lighthouse near the harbour haunted?",
    "Tell a story about a dragon who wants to become a baker in a mountain village",
    "Which planets have rings, and where do rings come from?",
    "Plan a birthday party for my grandmother.",
)
SENTENCE = "The lion is here."  # it has no letter of which there may be few
ENGLISH = (
    " All the children listen to the lion and then to the heron in the hall.",
    " The lion and the heron are in the old house and there is no one else in the hall with them.",
    " This is what we know. The weather in the north is cold and wet but those who live there are warm.",
    " They say that it will rain in the morning but I think that the sun is going to shine on all of us in the end.",
)
IN_LANGUAGE = {
    "de": "Der Hund schläft heute den ganzen Tag vor dem Haus und träumt von einem großen Knochen.",
    "es": "El perro duerme hoy todo el día delante de la casa y sueña con un hueso muy grande.",
    "fr": "Le chien dort toute la journée devant la maison et il rêve d'un très grand os.",
    "it": "Il cane dorme tutto il giorno davanti alla casa e sogna un osso molto grande.",
    "pt": "O cachorro dorme o dia inteiro na frente da casa e não sonha com um osso muito grande.",
}


def written(tmp_path, n: int, **options) -> list[dict]:
    """Runs the script on PROMPTS, and returns its rows."""
    prompts = tmp_path / "prompts.jsonl"
    lines = []
    for i, text in enumerate(PROMPTS):
        lines.append(
            json.dumps({"id": f"p{i}", "messages": [{"role": "user", "content": text}], "source": "s"})
        )
    prompts.write_text("\n".join(lines))
    out = tmp_path / "instructions.jsonl"
    make_instructions.main(make_instructions.Args(prompts=str(prompts), out=out, n=n, **options))
    return [json.loads(line) for line in out.read_text().splitlines()]


def short_name(name: str) -> str:
    return name.partition(":")[2]


def body_of(asked: dict[str, dict]) -> str:
    """Returns an answer's text, as far as its words go: sentences, keywords, letters, marks in the text."""
    words = []
    words += asked.get("existence", {}).get("keywords", [])
    if asked.get("frequency", {}).get("relation") == "at least":
        words += [asked["frequency"]["keyword"]] * asked["frequency"]["frequency"]
    if asked.get("letter_frequency", {}).get("let_relation") == "at least":
        words.append(asked["letter_frequency"]["letter"] * asked["letter_frequency"]["let_frequency"])
    if asked.get("number_words", {}).get("relation") == "at least":
        filler = ENGLISH[0]
        if "response_language" in asked:
            filler = IN_LANGUAGE[asked["response_language"]["language"]]
        if "english_capital" in asked:  # langdetect needs many different words to recognize capitals
            filler = "".join(ENGLISH)
        words += filler.lower().replace(".", "").split() * 9
    if asked.get("capital_word_frequency", {}).get("capital_relation") == "at least":
        words += ["LION"] * asked["capital_word_frequency"]["capital_frequency"]
    words += ["[name]"] * asked.get("number_placeholders", {}).get("num_placeholders", 0)
    words += ["*lion*"] * asked.get("number_highlighted_sections", {}).get("num_highlights", 0)

    n_sentences = 1
    if asked.get("number_sentences", {}).get("relation") == "at least":
        n_sentences = asked["number_sentences"]["num_sentences"]
    text = " ".join([SENTENCE] * n_sentences)
    if words:
        text = f"{text[:-1]} {' '.join(words)}."
    return text


def with_english(text: str, in_case: Callable[[str], str]) -> str:
    """Returns a text in upper or lower case, with the first sentence by which langdetect sees that it is English."""
    for sentence in (*ENGLISH, "".join(ENGLISH)):
        answer = in_case(text + sentence)
        if langdetect.detect(answer) == "en":
            return answer
    raise AssertionError(text)


def satisfying_answer(row: dict) -> str:
    """Returns an answer that meets every constraint of a row, built from what its arguments ask for."""
    names = [short_name(name) for name in row["instruction_id_list"]]
    asked = dict(zip(names, row["kwargs"], strict=True))
    text = body_of(asked)
    if "constrained_response" in asked:
        return "My answer is maybe."
    if "response_language" in asked:
        text = " ".join(
            [IN_LANGUAGE[asked["response_language"]["language"]], text.removeprefix(SENTENCE)]
        ).strip()
        text = text.replace(SENTENCE, IN_LANGUAGE[asked["response_language"]["language"]])
    if "json_format" in asked:
        return json.dumps({"answer": text})
    if "number_paragraphs" in asked:
        text = "\n***\n".join([text] + [SENTENCE] * (asked["number_paragraphs"]["num_paragraphs"] - 1))
    if "nth_paragraph_first_word" in asked:
        arguments = asked["nth_paragraph_first_word"]
        paragraphs = [SENTENCE] * arguments["num_paragraphs"]
        paragraphs[-1] = text
        nth = arguments["nth_paragraph"] - 1
        paragraphs[nth] = f"{arguments['first_word']} {paragraphs[nth]}"
        text = "\n\n".join(paragraphs)
    if "multiple_sections" in asked:
        marker = asked["multiple_sections"]["section_spliter"]
        n = asked["multiple_sections"]["num_sections"]
        text += "".join(f"\n{marker} {i + 1}\nlion" for i in range(n))
    if "number_bullet_lists" in asked:
        text += "\n* lion" * asked["number_bullet_lists"]["num_bullets"]
    if "title" in asked:
        text = f"<<lion>>\n{text}"
    if "two_responses" in asked:
        text = f"{text}\n******\n{text} {text}"
    if "repeat_prompt" in asked:
        text = f"{asked['repeat_prompt']['prompt_to_repeat']}\n{text}"
    if "postscript" in asked:
        text += f"\n{asked['postscript']['postscript_marker']} lion"
    if "end_checker" in asked:
        text += f" {asked['end_checker']['end_phrase']}"
    if "english_capital" in asked:
        text = with_english(text, str.upper)
    if "english_lowercase" in asked:
        text = with_english(text, str.lower)
    if "quotation" in asked:
        text = f'"{text}"'
    return text


def test_every_row_can_be_answered(nltk_data, tmp_path):
    rows = written(tmp_path, n=800)
    families = {name for row in rows for name in row["instruction_id_list"]}
    assert families == constraints.FAMILIES.keys()
    assert {len(row["instruction_id_list"]) for row in rows} == {1, 2, 3}
    assert len({row["id"] for row in rows}) == 800
    for row in rows:
        row |= {"response": satisfying_answer(row), "status": "ok"}
    for row, value in zip(rows, verified.instructions(rows), strict=True):
        assert value == 1.0, (row["messages"], row["kwargs"], row["response"])


NUMBER = r"(\d+|" + "|".join(constraints.NUMBER_WORDS) + r")\b"
AMOUNTS = {  # pattern: the relation of IFEval, and what to add to the number
    rf"at least {NUMBER}": ("at least", 0),
    rf"{NUMBER} or more": ("at least", 0),
    rf"no fewer than {NUMBER}": ("at least", 0),
    rf"(?<!no )fewer than {NUMBER}": ("less than", 0),
    rf"less than {NUMBER}": ("less than", 0),
    rf"at most {NUMBER}": ("less than", 1),
    rf"no more than {NUMBER}": ("less than", 1),
    rf"exactly {NUMBER}": ("exactly", 0),
}


def amounts_in(text: str) -> list[tuple[str, int]]:
    """Returns each (relation, number) that a text states."""
    found = []
    for pattern, (relation, more) in AMOUNTS.items():
        for number in re.findall(pattern, text):
            if number in constraints.NUMBER_WORDS:
                number = constraints.NUMBER_WORDS.index(number)
            found.append((relation, int(number) + more))
    return found


@pytest.mark.parametrize("name", constraints.FAMILIES)
def test_wordings_state_what_is_checked(name):
    """The text has the relation and the number, each keyword, and each text among the checker's arguments."""
    rng = random.Random(1)
    family = constraints.FAMILIES[name]
    said_texts = set()
    for _ in range(100):
        draw = constraints.Draw(rng, PROMPTS[1], constraints.words_for(PROMPTS[1], rng))
        kwargs = family.draw(draw)
        said = constraints.say(name, kwargs, rng)
        said_texts.add(said)
        assert len(said) < 170 and "{" not in said and "  " not in said

        relation = family.relation
        numbers = []
        for argument, value in kwargs.items():
            if argument.endswith("relation"):
                relation = value
            elif isinstance(value, int):
                numbers.append(value)
            elif isinstance(value, list):
                assert re.findall('"(.*?)"', said) == value
            elif argument == "language":
                assert constraints.LANGUAGES[value] in said
            elif argument != "prompt_to_repeat":
                assert value in said
        if relation:
            assert amounts_in(said) == [(relation, numbers[0])], said
        elif numbers:  # the first word of the nth paragraph
            assert f"exactly {numbers[0]} paragraphs" in said
            assert re.search(rf"(paragraph|number) {numbers[1]}\b", said)
    assert len(said_texts) >= len(family.wordings) > 1


def test_words_of_a_row_do_not_contain_each_other():
    for word in constraints.COMMON_WORDS:
        assert [other for other in constraints.COMMON_WORDS if word in other] == [word]
    rng = random.Random(0)
    for _ in range(50):
        words = constraints.words_for(PROMPTS[1], rng)
        assert len(words) >= 7  # three keywords, three forbidden words, and one to count
        assert {"dragon", "village"} <= set(words)


def test_families_that_exclude_each_other_are_not_drawn_together(nltk_data, tmp_path):
    excludes = constraints.conflicts()
    assert "change_case:english_capital" in excludes["change_case:english_lowercase"]  # IFEval's table
    assert "punctuation:no_comma" in excludes["combination:repeat_prompt"]  # ours
    for row in written(tmp_path, n=300):
        names = row["instruction_id_list"]
        for i, name in enumerate(names):
            assert not excludes[name] & set(names[:i] + names[i + 1 :])


def test_prompt_is_kept_and_the_seed_decides(nltk_data, tmp_path):
    rows = written(tmp_path, n=40, seed=3)
    for row in rows:
        text = row["messages"][0]["content"]
        prompt = PROMPTS[int(row["id"][1])]
        assert text.startswith(prompt) and text[len(prompt)].isspace()
        assert len(text) <= 600
        if "combination:repeat_prompt" in row["instruction_id_list"]:
            assert row["kwargs"][0] == {"prompt_to_repeat": prompt} and text[len(prompt) :].startswith("\n\n")
    for seed in (3, 4):
        (tmp_path / "instructions.jsonl").unlink()
        assert (written(tmp_path, n=40, seed=seed) == rows) == (seed == 3)


@pytest.mark.parametrize(
    "reason, text",
    [
        ("constraint_of_its_own", "Write a poem about the sea in 50 words"),
        ("constraint_of_its_own", "Tell me of the sea, and answer in JSON please"),
        ("constraint_of_its_own", "Give me five names for a small boat"),
        ("long_answer", "Write an essay about the history of boats"),
        ("code_or_formula", "Write a python class for boats and ships"),
        ("other_language", "What do the French say about small boats?"),
        ("other_language", "Pourquoi les bateaux sont-ils si chers dans ce pays ?"),
        ("other_script", "What does 船 mean on a boat?"),
        ("text_to_edit", "Fix the grammar: me have boat and ship"),
        ("several_lines", "What is a boat?\nWhat is a ship?"),
        ("too_long", "What is a boat? " * 30),
        ("too_short", "What is that?"),
        (None, "What is the difference between a boat and a ship?"),
    ],
)
def test_prompts_that_are_left_out(reason, text):
    assert make_instructions.reason_to_drop([{"role": "user", "content": text}], longest=400) == reason
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    assert make_instructions.reason_to_drop([*turns, *turns[:1]], longest=400) == "several_turns"


def test_prompts_of_the_benchmark_are_left_out(nltk_data, tmp_path, capsys):
    data = tmp_path / "data.json.gz"
    same = f"Please answer. {PROMPTS[1].upper()}!"
    data.write_bytes(gzip.compress(json.dumps([{"key": 1, "prompt": same}]).encode()))
    rows = written(tmp_path, n=20, exclude=(data,))
    assert {row["id"].partition("-")[0] for row in rows} == {"p0", "p2", "p3"}
    assert re.search(r"1 +excluded_prompt", capsys.readouterr().out)


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "instructions.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        written(tmp_path, n=1)
    assert ended.value.code == 2
    assert "exists; name another file with --out" in capsys.readouterr().err
