"""IFBench: which of a task's instructions a response meets, strict and loose.

The rules are those of allenai/IFBench, written anew. They give the published results of every sample response
at hand, and agree with all 162 unit cases of these checkers at commit db69a6f (August 2026). Four instructions
have the rules of that commit: words:keywords_specific_position, words:words_position, format:quote_unquote
and format:title_case. The others have those of c94da02 (October 2025). What changed since is left out there:
sentences by NLTK, whole-word names and keywords, more pronouns, and spans by characters although the prompts
ask for words. With the sentences of db69a6f one published result would be another.

princeton-pli/RLMT, the source of the paper's numbers, has the older rules for all four. It has others for
repeat:repeat_change (characters, not words) and words:paragraph_last_first (a blank line fails).

1. A response of white space only meets nothing. Nor does one on which the original stops with an exception.
2. Loose: any of 8 variants passes. They are the response, and the response without its first line, its last,
   or both; each of them also without every *.
3. Our choice: `repeat:repeat_span` from word 0 starts at word 0; the original starts at a random word there.

Needs emoji, syllapy, and nltk with its data:

    python -m nltk.downloader punkt_tab stopwords averaged_perceptron_tagger_eng
"""

import functools
import inspect

import nltk

from benchmarks import ifbench_checkers as checkers

NLTK_DATA = ("tokenizers/punkt_tab/english", "corpora/stopwords", "taggers/averaged_perceptron_tagger_eng")

CHECKERS = {
    "count:conjunctions": checkers.conjunctions,
    "count:keywords_multiple": checkers.keywords_multiple,
    "count:numbers": checkers.numbers,
    "count:person_names": checkers.person_names,
    "count:pronouns": checkers.pronouns,
    "count:punctuation": checkers.punctuation,
    "count:unique_word_count": checkers.unique_word_count,
    "count:word_count_range": checkers.word_count_range,
    "count:words_japanese": checkers.words_japanese,
    "custom:character_reverse": checkers.character_reverse,
    "custom:csv_city": checkers.csv_city,
    "custom:csv_quotes": checkers.csv_quotes,
    "custom:csv_special_character": checkers.csv_special_character,
    "custom:date_format_list": checkers.date_format_list,
    "custom:european_capitals_sort": checkers.european_capitals_sort,
    "custom:mcq_count_length": checkers.mcq_count_length,
    "custom:multiples": checkers.multiples,
    "custom:reverse_newline": checkers.reverse_newline,
    "custom:sentence_alphabet": checkers.sentence_alphabet,
    "custom:word_reverse": checkers.word_reverse,
    "format:emoji": checkers.ends_with_emoji,
    "format:line_indent": checkers.line_indent,
    "format:list": checkers.list_of_items,
    "format:newline": checkers.newline,
    "format:no_bullets_bullets": checkers.no_bullets_bullets,
    "format:no_whitespace": checkers.no_whitespace,
    "format:options": checkers.one_of_options,
    "format:output_template": checkers.output_template,
    "format:parentheses": checkers.parentheses,
    "format:quote_unquote": checkers.quote_unquote,
    "format:quotes": checkers.quotes,
    "format:sub-bullets": checkers.sub_bullets,
    "format:thesis": checkers.thesis,
    "format:title_case": checkers.title_case,
    "ratio:overlap": checkers.overlap,
    "ratio:sentence_balance": checkers.sentence_balance,
    "ratio:sentence_type": checkers.sentence_type,
    "ratio:sentence_words": checkers.sentence_words,
    "ratio:stop_words": checkers.few_stop_words,
    "repeat:repeat_change": checkers.repeat_change,
    "repeat:repeat_simple": checkers.repeat_simple,
    "repeat:repeat_span": checkers.repeat_span,
    "sentence:alliteration_increment": checkers.alliteration_increment,
    "sentence:increment": checkers.increment,
    "sentence:keyword": checkers.keyword_in_sentence,
    "words:alphabet": checkers.alphabet,
    "words:consonants": checkers.consonants,
    "words:keywords_specific_position": checkers.keywords_specific_position,
    "words:last_first": checkers.last_first,
    "words:no_consecutive": checkers.no_consecutive,
    "words:odd_even_syllables": checkers.odd_even_syllables,
    "words:palindrome": checkers.palindrome,
    "words:paragraph_last_first": checkers.paragraph_last_first,
    "words:prime_lengths": checkers.prime_lengths,
    "words:repeats": checkers.repeats,
    "words:start_verb": checkers.start_verb,
    "words:vowel": checkers.vowel,
    "words:words_position": checkers.words_position,
}


@functools.cache
def require_nltk_data() -> None:
    """Raises FileNotFoundError, which names the download, if a part of NLTK's data is missing."""
    for resource in NLTK_DATA:
        try:
            nltk.data.find(resource)
        except LookupError:
            names = " ".join(path.split("/")[1] for path in NLTK_DATA)
            raise FileNotFoundError(
                f"NLTK data {resource} not found; run: python -m nltk.downloader {names}"
            ) from None


def loose_variants(response: str) -> list[str]:
    """Returns the texts of which one must pass, without repeats and blank ones; the response is the first."""
    lines = response.split("\n")
    variants = [response]
    for kept_lines in (lines[1:], lines[:-1], lines[1:-1]):
        variants.append("\n".join(kept_lines).strip())
    variants += [variant.replace("*", "") for variant in variants]
    return [variant for variant in dict.fromkeys(variants) if variant.strip()]


def bind(task: dict) -> list[functools.partial]:
    """Returns the task's checkers with their arguments, nulls left out.

    Raises ValueError for an unknown instruction id, or arguments that do not fit it.
    """
    where = f"task {task['key']!r}"
    names = task["instruction_id_list"]
    all_kwargs = task["kwargs"]
    if len(names) != len(all_kwargs):
        raise ValueError(f"{where}: {len(names)} instruction ids but {len(all_kwargs)} kwargs")
    bound = []
    for name, kwargs in zip(names, all_kwargs):
        if name not in CHECKERS:
            raise ValueError(f"{where}: unknown instruction id {name!r}; IFBench has {', '.join(CHECKERS)}")
        given = {key: value for key, value in kwargs.items() if value is not None}
        check_kwargs(f"{where}: {name}", CHECKERS[name], given)
        bound.append(functools.partial(CHECKERS[name], **given))
    return bound


def check_kwargs(where: str, checker, given: dict) -> None:
    """Raises ValueError unless `given` are the checker's arguments after the text, with their types."""
    _, *needed = inspect.signature(checker).parameters.values()
    needed_names = [parameter.name for parameter in needed]
    if set(needed_names) != set(given):
        raise ValueError(f"{where} needs kwargs {needed_names}, the task gives {sorted(given)}")
    for parameter in needed:
        value = given[parameter.name]
        accepted = str if parameter.annotation is str else int | float
        if not isinstance(value, accepted):
            raise ValueError(
                f"{where} needs {parameter.name} as {parameter.annotation.__name__}, not {value!r}"
            )


def check(task: dict, response: str) -> dict[str, list[bool]]:
    """Returns {"strict": [...], "loose": [...]}: whether the response meets each instruction, in their order.

    `task` is a row of the benchmark: key, prompt, instruction_id_list and kwargs (null-padded). Raises
    ValueError as `bind` does, and FileNotFoundError if NLTK's data is missing.
    """
    require_nltk_data()
    variants = loose_variants(response)
    strict = []
    loose = []
    for checker in bind(task):
        passed = [checker(variant) for variant in variants]
        strict.append(bool(passed) and passed[0])  # a blank response has no variants
        loose.append(any(passed))
    return {"strict": strict, "loose": loose}
