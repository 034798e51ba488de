"""Reads the VALUE of `--reward-args NAME.OPTION=VALUE` by the type that the option has."""

from math import isfinite
from types import NoneType
from typing import Literal, get_args, get_origin


def parse_value(text: str, default, annotation):
    """Reads the value of an option by the type of its default, or of its annotation where that is None.

    ValueError names what it must be.
    """
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text
    kind = type(default)
    if default is None:  # as in float | None
        kind = next((part for part in get_args(annotation) if part is not NoneType), str)
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("true or false")
        return text.lower() == "true"
    if kind is int:
        if not text.removeprefix("-").isdecimal():
            raise ValueError("a whole number")
        return int(text)
    if kind is float:
        return _finite(text, "a finite number")
    if kind is tuple:
        wanted = f"{len(default)} finite numbers with commas between them"
        numbers = tuple(_finite(part, wanted) for part in text.split(","))
        if len(numbers) != len(default):
            raise ValueError(wanted)
        return numbers
    raise ValueError(f"an option that --reward-args can set: its default is a {kind.__name__}")


def _finite(text: str, wanted: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not isfinite(number):
        raise ValueError(wanted)
    return number
