"""Prints the help, explains words that are no flags, and reads a run's config back.

rlmt/run.py imports it only for these. docs/flags.md, which says what a flag of TRL or verl is called here, is
read as it stands.
"""

import difflib
import inspect
import json
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import tyro

from rlmt.run import HOW_STARTED
from utils import IS_FIRST, fail

NAMES = Path(__file__).parents[1] / "docs" / "flags.md"
# a comment that heads a group of fields, or a field with its docstring
FIELD = re.compile(r'^    (?:# ([^\n]+)|(\w+): .*?\n    """(.*?)""")', re.DOTALL | re.MULTILINE)


def help_or_fail(default, presets: dict[str, dict]) -> None:
    """Prints the help if it is asked for and exits with 0; else exits with 2 and says what cannot be parsed.

    `default`: an instance of the script's Args.
    """
    args_class = type(default)
    if not {"-h", "--help"}.isdisjoint(sys.argv):
        if IS_FIRST:
            print_help(default, presets)
        sys.exit(0)
    if not IS_FIRST:
        time.sleep(5)  # as in `fail`
    # tyro itself explains an impossible or a missing value, in a box
    _, unknown = tyro.cli(args_class, default=default, return_unknown_args=True)
    fail("; ".join(explain(unknown, args_class)))


# --- the help


def print_help(default, presets: dict[str, dict]) -> None:
    """Prints the flags in groups, the script's own first, each with its choices or type and its default."""
    args_class = type(default)
    width = shutil.get_terminal_size().columns
    hints = get_type_hints(args_class)
    groups = {}
    for cls in args_class.__mro__[:-1]:
        group = "options"
        for title, name, text in FIELD.findall(inspect.getsource(cls)):
            group = title or group
            if name in hints:
                head = head_of(name, hints.pop(name), getattr(default, name))
                lines = textwrap.fill(" ".join(text.split()), width - 6)
                groups.setdefault(group, []).append(f"  {head}\n{textwrap.indent(lines, ' ' * 6)}")

    print(inspect.getmodule(args_class).__doc__.partition("\n\n")[0])
    for group, flags in groups.items():
        print(f"\n{group}", *flags, sep="\n")
    if presets:
        print("\npresets: values that --preset NAME sets; a flag overrides them")
    for name, values in presets.items():
        print(textwrap.fill(f"{name}: {values}", width, initial_indent="  ", subsequent_indent=" " * 6))


def head_of(name: str, hint, value) -> str:
    """Returns a flag with what it takes and its default."""
    takes = re.sub(r"typing\.|Literal|tuple|['\[\]]", "", inspect.formatannotation(hint))
    head = f"{flag_of(name)} <{takes}>"
    if value is tyro.MISSING:  # it has no flag, but a place
        return head.removeprefix("--")
    if hint is bool:
        head = f"{flag_of(name)}, {flag_of('no_' + name)}"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    if value == "":
        return head
    return f"{head} (default: {value})"


def flag_of(name: str) -> str:
    """Returns the flag of a field: --from of `from_`."""
    return "--" + name.strip("_").replace("_", "-")


# --- words that are no flags of ours


def explain(unknown: list[str], args_class: type) -> list[str]:
    """Says of each unknown flag what it is called here, or of a value without a flag what to write."""
    hints = {flag_of(name): hint for name, hint in get_type_hints(args_class).items()}
    said = [our_name(word, list(hints)) for word in unknown if word.startswith(("-", "+")) or "=" in word]
    if said:
        return said
    value = unknown[0]
    flag = sys.argv[sys.argv.index(value) - 1].replace("_", "-")
    if hints.get(flag) is bool:
        return [f"{flag} takes no value; write {flag} or --no-{flag[2:]}, not {value}"]
    return [f"{value} belongs to no flag; --help lists all"]


def our_name(word: str, flags: list[str]) -> str:
    """Says what an unknown flag, of TRL, of verl or mistyped, is called in a script that has `flags`."""
    word = word.partition("=")[0]
    name = word.lstrip("-+").replace("-", "_")
    found = []
    for line in NAMES.read_text().splitlines():
        if f"`{name}`" in line:
            _, ours, _, _, note, _ = line.split("|")
            own = [flag for flag in re.findall(r"--[\w-]+", ours) if flag in flags]
            if own or "--" not in ours:
                found.append(f"{', '.join(own) or ours.strip()} here ({note.strip()})".removesuffix(" ()"))
    if found:
        return f"{word} is {' or '.join(found)}"
    close = difflib.get_close_matches(flag_of(name), flags, 1, 0.8)
    if close:
        return f"{word} is no flag; do you mean {close[0]}?"
    return f"{word} is no flag of this script; --help lists all"


# --- a run's arguments, once more


def read_config(path: str, args_class: type) -> dict:
    """Returns the arguments in a run's config.json, without those of HOW_STARTED; exits with 2 if they are
    not this script's."""
    try:
        stored = json.loads(Path(path).read_text())["args"]
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"--config {path} is not the config.json of a run")
    hints = get_type_hints(args_class)
    values = {}
    for name, value in stored.items():
        if name not in args_class.__dataclass_fields__:
            fail(f"--config {path}: {name} is no flag of this script; take a run of the same script")
        if isinstance(value, list):  # of JSON, which has no tuples
            value = tuple(value)
        choices = get_args(hints[name])
        if get_origin(hints[name]) is Literal and value not in choices:
            fail(f"--config {path}: {name} is {value!r}; use one of {', '.join(choices)}")
        if name not in HOW_STARTED:
            values[name] = value
    return values
