"""Reads the instructions of a judge from a file, and fills in what it is asked about.

A template is text with placeholders, `{$name}` or `{name}`. All other braces stay as they are. It becomes one
message of the user. With ChatML marks, as AlpacaEval's official templates have them, it becomes several
messages:

    <|im_start|>system
    You compare two answers.
    <|im_end|>
    <|im_start|>user
    {$instruction} ...
    <|im_end|>
"""

import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from utils import fail, or_fail

OUR_WORDING = "our own"
PLACEHOLDER = re.compile(r"\{(\$?)(\w+)\}")
TURN = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)<\|im_end\|>", re.DOTALL)


class Placeholders(NamedTuple):
    needed: tuple[str, ...]
    """A template without one of them does not show the judge what it decides on."""
    optional: tuple[str, ...] = ()


@functools.cache  # every request asks for it
def read_template(path: str, placeholders: Placeholders, where: str = "") -> str:
    """Reads a template; exits with 2 if it is missing, lacks a placeholder, or has one that cannot be filled.

    `where` ends the error message, such as " with --protocol paper".
    """
    text = or_fail(Path(path).read_text)
    found = PLACEHOLDER.findall(text)
    names = {name for _, name in found}
    with_dollar = {name for dollar, name in found if dollar}  # without one it may be LaTeX or code
    missing = set(placeholders.needed) - names
    unknown = with_dollar.difference(*placeholders)
    if missing or unknown:
        needed, optional = map(", ".join, placeholders)
        wrong = ", ".join(sorted(missing | unknown))
        fail(
            f"--template {path}: {wrong} missing or unknown{where}; it needs {needed}, and may have {optional}"
        )
    return text


def fill(template: str, fields: dict[str, str]) -> str:
    """Fills in the placeholders of the fields, in one pass: one within an answer stays as it is."""

    def value(match: re.Match) -> str:
        return fields.get(match[2], match[0])

    return PLACEHOLDER.sub(value, template)


def fill_messages(template: str, fields: dict[str, str]) -> list[dict]:
    """Returns the messages of a template: one of the user, or a message for each turn in ChatML marks."""
    turns = TURN.findall(template)  # before the answers are filled in, as they may hold such marks
    if not turns:
        return [{"role": "user", "content": fill(template, fields)}]
    messages = []
    for role, text in turns:
        messages.append({"role": role, "content": fill(text.strip(), fields)})
    return messages


def describe_wording(path: str) -> str:
    """Names whose words the judge read: `our own`, or the file or folder of --template with a hash of its
    text."""
    if not path:
        return OUR_WORDING
    files = [Path(path)]
    if Path(path).is_dir():
        files = sorted(Path(path).glob("*.txt"))
    text = "\0".join(file.read_text() for file in files)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{Path(path).name} {digest}"
