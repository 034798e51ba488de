"""Makes prompts whose answers a program verifies: WildChat-IF prompts with constraints that we draw.

    python -m data.make_instructions --prompts data/wildchat_if.jsonl --n 4000 --seed 0 \\
        --out data/instructions.jsonl --exclude google/IFEval

Each row is a prompt, unchanged, with one to three constraints behind it. They are of IFEval's 25 families
(arXiv 2311.07911), in our own words, with numbers that fit answers of up to about 200 tokens. `--rewards
instructions` checks them. Constraints that exclude each other are not drawn together (IFEval's table, and
ours).

Prompts that could contradict a constraint are left out: those with constraints of their own, about code, to
translate or edit a text, of several lines, or in another language. Single words decide that, so some slip
through.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks import scoring
from data import constraints
from data.prepare import is_english
from rlmt.data import read_prompts, write_jsonl
from utils import fail, refuse_repeated


@dataclass
class Args:
    prompts: str
    """Prompt rows, such as those of `data.prepare wildchat-if`."""
    out: Path
    """The .jsonl file to write: {id, messages, source, instruction_id_list, kwargs}."""
    n: int = 4000
    """Rows to write; prompts are used again, with other constraints, if there are fewer."""
    seed: int = 0
    """Seed of the order of the prompts, the constraints and their wordings."""
    max_characters: int = 600
    """The longest text of a row; the prompt itself may take two thirds. Four characters are about a token."""
    exclude: tuple[Path, ...] = ()
    """IFEval's or IFBench's data: a prompt that shares 13 words in a row with one of theirs is left out."""


# --- 1. the prompts that can carry a constraint

UNFIT = {  # reason: pattern; the first that is found in a prompt is counted
    "constraint_of_its_own": (
        r"\b(words?|sentences?|paragraphs?|characters? (?:long|limit|max\w*)|letters?|lines?|pages?|bullets?|points?"
        r"|list of|tables?|columns?|format\w*|markdown|json|xml|csv|html|latex"
        r"|titles?|headings?|headlines?|sections?|subject line|hashtags?|keywords?|emojis?"
        r"|(?:upper|lower)-?case|capital\w*|caps|commas?|punctuat\w*|quotes?|quotations?|brackets?|placeholders?"
        r"|(?:start|begin|end|finish)(?:s|ing)? (?:with|by)|exactly|only|at least|at most|(?:no|not) more than"
        r"|(?:less|fewer) than|without|avoid|never|must|don'?t|do not|max(?:imum)?|min(?:imum)?"
        r"|long(?:er)?|detail\w*|lengthy|extensive\w*|comprehensive\w*|in[- ]depth"
        r"|haikus?|limericks?|acrostic\w*|sonnets?|rhym\w+|seo|yes or no|true or false|multiple[- ]choice"
        r"|respond (?:with|in|as)|answer (?:with|in|as)|reply (?:with|in|as)|act as|pretend|you are)\b"
        r"|\b(?:give|list|name|write|suggest|provide|generate|create)\b.{0,12}"
        r"\b(?:[2-9]|two|three|four|five|six|seven|eight|nine|ten)\b"
    ),
    "long_answer": (
        r"\b(essays?|articles?|chapters?|novels?|scripts?|screenplays?|thesis|dissertation|literature review"
        r"|blog|full|complete|top \d+|\d\d+)\b"
    ),
    "code_or_formula": (
        r"[{}<>=\\_|^~`\[\]]|\w\(\)|\.\w+\(|\b(code|coding|program\w*|python|java\w*|c\+\+|c#|php|sql|css|excel|vba"
        r"|regex|api|functions?|linux|bash|powershell|algorithm|prompts?|equations?|solve|calculate|integral|https?)\b"
    ),
    "other_language": (
        r"\b(translat\w*|language|english|chinese|mandarin|cantonese|japanese|korean|french|german|spanish|italian"
        r"|portuguese|russian|arabic|hindi|urdu|turkish|persian|farsi|latin|greek|dutch|polish|vietnamese|thai)\b"
    ),
    "text_to_edit": (
        r"\b(re-?write|rewording|re-?word|rephrase|paraphras\w*|proof-?read\w*|grammar|correct|edit|improve|fix|polish"
        r"|summari[sz]e\w*|following|below|above|this (?:text|email|message)|make (?:it|this)|change|continue)\b"
    ),
}
# Anything but ASCII and the typographic quotes, dashes and ellipsis.
OTHER_SCRIPT = re.compile("[^\x20-\x7e\u2018\u2019\u201c\u201d\u2013\u2014\u2026]")
N_GRAM = 13  # words, as in GPT-3's search for test sets in its training data (2005.14165, appendix C)


def reason_to_drop(messages: list[dict], longest: int) -> str | None:
    """Returns why a prompt cannot carry a constraint of ours, or None if it can."""
    if len(messages) != 1:
        return "several_turns"
    text = messages[0]["content"].strip()
    if len(text) > longest:
        return "too_long"
    if "\n" in text:
        return "several_lines"
    if OTHER_SCRIPT.search(text):
        return "other_script"
    if len(re.findall("[A-Za-z]+", text)) < 4:
        return "too_short"
    for reason, pattern in UNFIT.items():
        if re.search(pattern, text, re.IGNORECASE):
            return reason
    if not is_english(text):
        return "other_language"
    return None


def n_grams(text: str) -> set[tuple[str, ...]]:
    """Returns the runs of N_GRAM words in a text, in lower case and without punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + N_GRAM]) for start in range(len(words) - N_GRAM + 1)}


def read_usable(args: Args) -> list[dict]:
    """Returns the prompts that can carry a constraint; prints why others cannot, exits with 2 if none can."""
    excluded = set()  # all runs of N_GRAM words in the prompts of these benchmarks
    for path in args.exclude:
        for task in scoring.load(path, "data.json*", "prompt"):
            excluded |= n_grams(task["prompt"])
    usable = []
    dropped: Counter[str] = Counter()
    for prompt in read_prompts(args.prompts):
        reason = reason_to_drop(prompt["messages"], 2 * args.max_characters // 3)
        if reason is None and n_grams(prompt["messages"][0]["content"]) & excluded:
            reason = "excluded_prompt"
        if reason:
            dropped[reason] += 1
        else:
            usable.append(prompt)
    for reason, count in dropped.most_common():
        print(f"  left out {count:6d}  {reason}")
    if not usable:
        fail(f"--prompts {args.prompts}: none of its prompts can carry a constraint; give others")
    return usable


# --- 2. rows


def make_row(prompt: dict, number: int, longest: int, excludes: dict, rng: random.Random) -> dict:
    """Returns a row: the prompt, and as many of its drawn constraints as `longest` characters have room for.

    `number` is how many rows the prompt has already.
    """
    request = prompt["messages"][0]["content"].strip()
    words = rng.sample(constraints.WORDS, 12)
    text = request
    separator = rng.choice(("\n", "\n\n"))
    row = {
        "id": f"{prompt['id']}-{number}",
        "messages": [{"role": "user"}],
        "source": prompt.get("source", ""),
    }
    row |= {"instruction_id_list": [], "kwargs": []}
    for name in constraints.draw_families(request, excludes, rng):
        if name == constraints.REPEAT:  # the request that is to be repeated must be a paragraph
            separator = "\n\n"
        kwargs, constraint = constraints.draw(name, request, words, rng)
        if len(text + separator + constraint) > longest:
            break
        text += separator + constraint
        separator = " "
        row["instruction_id_list"].append(name)
        row["kwargs"].append(kwargs)
    row["messages"][0]["content"] = text
    return row


def main(args: Args) -> None:
    if args.out.exists():
        fail(f"{args.out} exists; name another file with --out")
    if args.max_characters < 500:  # a prompt leaves a third, and a constraint takes up to 160
        fail(f"--max-characters {args.max_characters}: use 500 or more, or some constraints do not fit")
    excludes = constraints.conflicts()  # before the prompts are read: it also seeds langdetect, which draws
    usable = read_usable(args)
    rng = random.Random(args.seed)
    rng.shuffle(usable)
    rows = []
    for i in range(args.n):
        number, place = divmod(i, len(usable))  # each prompt in turn, with new constraints each time
        rows.append(make_row(usable[place], number, args.max_characters, excludes, rng))
    print(f"{len(usable)} prompts carry {args.n} rows")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out, rows)
    families = Counter(name for row in rows for name in row["instruction_id_list"])
    for name, count in families.most_common():
        print(f"  {count:6d}  {name}")


if __name__ == "__main__":
    refuse_repeated(Args)
    main(tyro.cli(Args))
