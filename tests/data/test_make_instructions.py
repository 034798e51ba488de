"""data/make_instructions.py: every constraint can be met, and its text says what its checker checks."""

import gzip
import json
import random
import re

import pytest
from test_prepare import chat

from data import constraints, make_instructions
from rewards import verified
from rlmt.data import read_log, write_jsonl

PROMPTS = (
    "Is the old lighthouse near the harbour haunted?",
    "Tell a story about a dragon who wants to become a baker in a mountain village",
    "Which planets have rings, and where do rings come from?",
    "Plan a birthday party for my grandmother.",
)
ENGLISH = (
    "The lion and the heron are in the old house and there is no one else in the hall with them. The weather in the north is "
    "cold and wet but those who live there are warm. They say that it will rain in the morning but I think that the sun is "
    "going to shine on all of us in the end."
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
    write_jsonl(prompts, [{"id": f"p{i}", "messages": chat(text)} for i, text in enumerate(PROMPTS)])
    out = tmp_path / "instructions.jsonl"
    make_instructions.main(make_instructions.Args(prompts=str(prompts), out=out, n=n, **options))
    return read_log(out)


def answer_to(name: str, kwargs: dict) -> str:
    """Returns an answer that meets a constraint."""
    n = next((value for value in kwargs.values() if isinstance(value, int)), 0)
    n -= "less than" in kwargs.values()
    word = kwargs.get("first_word", "lion")
    answers = {
        "existence": " ".join(kwargs.get("keywords", [])),
        "frequency": f"{kwargs.get('keyword')} " * n,
        "letter_frequency": kwargs.get("letter", "") * n,
        "response_language": IN_LANGUAGE[kwargs.get("language", "de")],
        "number_sentences": "The lion is here. " * n,
        "number_words": "lion " * n,
        "number_paragraphs": "lion\n***\n" * (n - 1) + "lion",
        "nth_paragraph_first_word": "\n\n".join([f"{word} lion"] * n),
        "number_placeholders": "[name] " * n,
        "postscript": f"lion\n{kwargs.get('postscript_marker')} lion",
        "number_bullet_lists": "lion" + "\n* lion" * n,
        "constrained_response": "My answer is maybe.",
        "number_highlighted_sections": "*lion* " * n,
        "multiple_sections": "".join(f"\n{kwargs.get('section_spliter')} {i}\nlion" for i in range(1, n + 1)),
        "json_format": '{"lion": 1}',
        "title": "<<lion>>\nlion",
        "two_responses": "lion******heron",
        "repeat_prompt": f"{PROMPTS[1]}\nlion",
        "end_checker": f"lion {kwargs.get('end_phrase')}",
        "capital_word_frequency": "LION " * n,
        "english_capital": ENGLISH.upper(),
        "english_lowercase": ENGLISH.lower(),
        "quotation": '"lion"',
    }
    return answers.get(name.partition(":")[2], ENGLISH)


@pytest.mark.parametrize("name", constraints.FAMILIES)
def test_a_constraint_can_be_met_and_says_what_is_checked(name, nltk_data):
    rng = random.Random(1)
    said = set()
    for _ in range(40):
        kwargs, text = constraints.draw(name, PROMPTS[1], list(constraints.WORDS), rng)
        said.add(text)
        assert "{" not in text and len(text) < 170
        for argument, value in kwargs.items():
            stated = value if isinstance(value, list) else [constraints.LANGUAGES.get(value, value)]
            assert argument == "prompt_to_repeat" or all(f"{part}" in text for part in stated)
        row = {"id": "a", "messages": chat(text), "instruction_id_list": [name], "kwargs": [kwargs]}
        row |= {"status": "ok", "response": answer_to(name, kwargs)}
        assert verified.instructions([row]) == [1.0], (text, kwargs)
    assert len(said) > 1


def test_families_that_exclude_each_other_are_not_drawn_together(nltk_data, tmp_path):
    excludes = constraints.conflicts()
    assert "change_case:english_capital" in excludes["change_case:english_lowercase"]  # IFEval's table
    assert "punctuation:no_comma" in excludes["combination:repeat_prompt"]  # ours
    rows = written(tmp_path, n=300)
    for row in rows:
        names = row["instruction_id_list"]
        for i, name in enumerate(names):
            assert not excludes[name] & set(names[:i] + names[i + 1 :])
        text = row["messages"][0]["content"]
        prompt = PROMPTS[int(row["id"][1])]
        assert text.startswith(prompt) and text[len(prompt)] == "\n" and len(text) <= 600
        if constraints.REPEAT in names:
            assert row["kwargs"][0] == {"prompt_to_repeat": prompt} and text[len(prompt) :].startswith("\n\n")
    (tmp_path / "instructions.jsonl").unlink()
    assert written(tmp_path, n=300) == rows


def test_prompts_of_the_benchmark_are_left_out(nltk_data, tmp_path, capsys):
    data = tmp_path / "data.json.gz"
    same = f"Please answer. {PROMPTS[1].upper()}!"
    data.write_bytes(gzip.compress(json.dumps([{"key": 1, "prompt": same}]).encode()))
    rows = written(tmp_path, n=20, exclude=(data,))
    assert {row["id"].partition("-")[0] for row in rows} == {"p0", "p2", "p3"}
    assert re.search(r"1 +excluded_prompt", capsys.readouterr().out)
