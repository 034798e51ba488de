"""Serves every script: the think formats with their one parser, and safe loading of models and tokenizers.

To add a think format, add one entry to THINK_FORMATS: the parser, the templates, the stop string and every
script's `--think-format` read it from there. Styles of thinking that are only evaluated are in
rlmt/foreign.py.
"""

import importlib.util
import os
import sys
import time
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from safetensors import SafetensorError

# every model is loaded with these: no pickled weights, and no code that comes with a model
SAFE = {"use_safetensors": True, "trust_remote_code": False}

# device of models that are not trained, and the dtype that `--dtype auto` means
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"


# whether this process is the first or the only one of its machine
IS_FIRST = os.environ.get("LOCAL_RANK", "0") == "0"


def compute_dtype(choice: str) -> str:
    """Returns the dtype that `--dtype` means: "bfloat16" or "float32"; "auto" is `DTYPE`."""
    if choice == "auto":
        return DTYPE
    return choice


def wants_vllm(rollout: str) -> bool:
    """Tells whether `--rollout` means vLLM, as "auto" does on a GPU if vLLM is installed.

    Exits with 2 for "vllm" if it is not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if rollout == "vllm" and not installed:
        fail("--rollout vllm: vLLM is not installed; `make` installs it, or use --rollout hf")
    return rollout == "vllm" or (rollout == "auto" and installed and DEVICE == "cuda")


# --- 1. think formats


@dataclass(frozen=True)
class ThinkFormat:
    """Describes how a completion holds its thinking z and its response y."""

    layout: str
    """A completion as the model should write it, with {z} and {y}; the target of SFT and DPO."""
    thinking_tags: tuple[str, str] | None = None
    """The texts that open and close the thinking."""
    response_tags: tuple[str, str] | None = None
    """The texts that open and close the response. A completion ends at the closing tag: sampling stops
    there."""
    instruction: str = ""
    """Text before the prompt of a base model that was never trained on the format (Zero)."""

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.thinking_tags or ()) + (self.response_tags or ())

    @property
    def opens_response(self) -> str:
        """Returns the tag after which the response begins; "" if the whole completion is the response."""
        if self.response_tags:
            return self.response_tags[0]
        if self.thinking_tags:
            return self.thinking_tags[1]
        return ""

    @property
    def stop(self) -> str:
        """Returns the string at which sampling stops, apart from the end of turn; "" if there is none."""
        if self.response_tags:
            return self.response_tags[1]
        return ""


_SETTING = "A user asks a question, and an assistant answers it. "
THINK_FORMATS = {
    # warm-started models, thinking (RLMT)
    "think": ThinkFormat(layout="<think>\n{z}\n</think>\n\n{y}", thinking_tags=("<think>", "</think>")),
    # warm-started or instruct models, no thinking (RLHF)
    "plain": ThinkFormat(layout="{y}"),
    # base models that are asked for the format by an instruction (Zero)
    "zero_think": ThinkFormat(
        layout="<think> {z} </think> <response> {y} </response>",
        thinking_tags=("<think>", "</think>"),
        response_tags=("<response>", "</response>"),
        instruction=_SETTING
        + "The assistant first thinks about how to answer well, and only then answers. The thinking stands "
        "between <think> and </think>, and the answer between <response> and </response>, like this: <think> "
        "thinking </think> <response> answer </response>",
    ),
    "zero_plain": ThinkFormat(
        layout="<response> {y} </response>",
        response_tags=("<response>", "</response>"),
        instruction=_SETTING
        + "The answer stands between <response> and </response>, like this: <response> answer </response>",
    ),
}
# all tags: texts to train on are checked for them, and they are never stripped as control tokens
TAGS = tuple(sorted({tag for think_format in THINK_FORMATS.values() for tag in think_format.tags}))

# a system message for dialogues, by their language, that asks for the format `think`
ASK_THINKING = {
    "zh": "每次先在 <think> 和 </think> 之间想清楚对方的感受和需要，再写要说的话。对方看不到思考。",
    "en": "Each time, first think between <think> and </think> about what the other person feels and needs, then write what "
    "you say. They do not see the thinking.",
}


class ThinkParts(NamedTuple):
    thinking: str
    response: str
    status: str  # ok, no_open, no_close, nested, empty_response or truncated


def check_think_format(name: str) -> None:
    """Raises ValueError when `name` is not a key of THINK_FORMATS."""
    if name not in THINK_FORMATS:
        raise ValueError(f"think format {name!r} is unknown; use one of {', '.join(THINK_FORMATS)}")


def split_thinking(text: str, think_format: str = "think", finished: bool = True) -> ThinkParts:
    """Splits a completion into thinking and response, both stripped. This is the only parser of our formats.

    Args:
        text: the completion, decoded without its end-of-turn token. Any string is fine.
        think_format: a key of THINK_FORMATS.
        finished: False if the token limit cut the completion off.

    Returns:
        ThinkParts. `status` is the first of these that holds: `no_open` (something else, or nothing, is where
        an opening tag should be), `nested` (a tag of the format occurs twice), `truncated` (cut off before
        its end, even inside a tag), `no_close`, `empty_response`, else `ok`. A completion ends at the first
        closing tag of its response. `response` is what follows the last tag that opens a response, even if
        the status is not `ok`; but it is empty if the completion was cut off before its response, as a tag is
        then only named in the thinking. Reward models read `response_to_score` instead.
    """
    expected = THINK_FORMATS[think_format]

    if expected.stop:  # the text after it is ignored, as in the paper's evaluation code
        before, closing_tag, _ = text.partition(expected.stop)
        text = before + closing_tag
        finished = finished or bool(closing_tag)

    thinking, status, in_response = _walk_tags(text.strip(), expected, finished)
    response = _response_of(text, expected)
    if status == "truncated" and not in_response:
        response = ""
    if status != "no_open" and any(text.count(tag) > 1 for tag in expected.tags):
        status = "nested"
    elif status == "ok" and not finished:
        status = "truncated"
    elif status == "ok" and not response:
        status = "empty_response"
    return ThinkParts(thinking, response, status)


def _walk_tags(text: str, expected: ThinkFormat, finished: bool) -> tuple[str, str, bool]:
    """Follows the tags from left to right.

    Returns the thinking, `ok` or what is wrong with the tags, and whether the response's opening tag was
    reached.
    """
    thinking = ""
    for tags in (expected.thinking_tags, expected.response_tags):
        if tags is None:
            continue
        opening, closing = tags
        if not text.startswith(opening):
            cut_inside_tag = not finished and opening.startswith(text)
            return thinking, "truncated" if cut_inside_tag else "no_open", False
        inside, closing_tag, rest = text.removeprefix(opening).partition(closing)
        if tags is expected.thinking_tags:
            thinking = inside.strip()
        if not closing_tag:
            in_response = tags is expected.response_tags
            return thinking, "no_close" if finished else "truncated", in_response
        text = rest.strip()
    return thinking, "ok", True


def _response_of(text: str, expected: ThinkFormat) -> str:
    """Returns what follows the last tag that opens a response, without the tag that closes it."""
    if not expected.opens_response:
        return text.strip()
    if expected.opens_response not in text:
        return ""
    return text.rpartition(expected.opens_response)[2].removesuffix(expected.stop).strip()


def response_to_score(text: str, think_format: str) -> str:
    """Returns the response of a completion, well-formed or not, as a reward model reads it; stripped.

    It follows the first tag that opens a response, wherever that is. Without such a tag it is the whole text.
    In a Zero format it ends at the tag that closes a response. The paper's released training code does the
    same.
    """
    expected = THINK_FORMATS[think_format]
    response = text
    if expected.opens_response and expected.opens_response in text:
        response = text.partition(expected.opens_response)[2]
    if expected.stop:
        response = response.partition(expected.stop)[0]
    return response.strip()


def shows_response(text: str, think_format: str) -> bool:
    """Tells whether a completion has the tag after which its response begins; True for a format without
    one."""
    return THINK_FORMATS[think_format].opens_response in text


def join_thinking(thinking: str, response: str, think_format: str) -> str:
    """Writes the completion that a model of `think_format` should write; the inverse of `split_thinking`."""
    layout = THINK_FORMATS[think_format].layout
    return layout.format(z=thinking.strip(), y=response.strip())


# --- 2. errors


def fail(message: str) -> None:
    """Prints a one-line error and exits with code 2.

    What all processes of a machine find, its first one says: at its end the launcher ends the others.
    """
    if not IS_FIRST:
        time.sleep(60)  # as long as the first one may be behind; after that nobody else has found it
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(2)


def refuse_repeated(args_class: type) -> None:
    """Exits with 2 if a flag that takes several values is given twice: only the last would count."""
    words = [word.partition("=")[0].replace("_", "-") for word in sys.argv[1:]]
    for field in fields(args_class):
        flag = "--" + field.name.replace("_", "-")
        n_given = words.count(flag)
        if isinstance(field.default, tuple) and n_given > 1:
            fail(f"{flag} is given {n_given} times; the last would count, so write all values after one")


def or_fail(function, *args, **kwargs):
    """Calls the function; an error about the input becomes one line and exit code 2."""
    try:
        return function(*args, **kwargs)
    except (ValueError, OSError, SafetensorError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        fail(lines[0])


def or_warn(what: str, function, *args) -> None:
    """Calls function(*args); an error becomes one line on stderr that begins with `what`, as nothing depends
    on it."""
    try:
        function(*args)
    except Exception as error:
        print(f"WARNING: {what}: {in_one_line(error)}", file=sys.stderr, flush=True)


def in_one_line(error: BaseException) -> str:
    """Returns the type of an error and the first 300 characters of its message."""
    reason = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {reason}"
