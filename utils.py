"""Serves every script: the think formats with their one parser, and safe loading of models and tokenizers.

To add a think format, add one entry to THINK_FORMATS: the parser, the templates, the stop string and every script's
`--think-format` read it from there. Styles of thinking that are only evaluated are in benchmarks/foreign.py.
"""

import contextlib
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import cached_file

from runs import fail, or_fail

# every model is loaded with these: no pickled weights, and no code that comes with a model
SAFE = {"use_safetensors": True, "trust_remote_code": False}

# device of models that are not trained, and the dtype that `--dtype auto` means
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"


def compute_dtype(choice: str) -> str:
    """Returns the dtype that `--dtype` means: "bfloat16" or "float32"; "auto" is `DTYPE`."""
    if choice == "auto":
        return DTYPE
    return choice


def warn_of_slow_dtype(choice: str) -> None:
    """Prints a warning if `--dtype` means bfloat16 on a CPU that has no instructions for it."""
    if DEVICE == "cuda" or compute_dtype(choice) == "float32":
        return
    abilities = torch.cpu.get_capabilities()
    if not any(abilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):
        PartialState().print("WARNING: --dtype bfloat16 is slow here: this CPU has no bfloat16 instructions")


# --- 1. think formats


@dataclass(frozen=True)
class ThinkFormat:
    """Describes how a completion holds its thinking z and its response y."""

    layout: str
    """A completion as the model should write it, with {z} and {y}; the target of SFT and DPO."""
    thinking_tags: tuple[str, str] | None = None
    """The texts that open and close the thinking."""
    response_tags: tuple[str, str] | None = None
    """The texts that open and close the response. A completion ends at the closing tag: sampling stops there."""
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
        ThinkParts. `status` is the first of these that holds: `no_open` (something else, or nothing, is where an
        opening tag should be), `nested` (a tag of the format occurs twice), `truncated` (cut off before its end,
        even inside a tag), `no_close`, `empty_response`, else `ok`. A completion ends at the first closing tag of
        its response. `response` is what follows the last tag that opens a response, even if the status is not `ok`;
        but it is empty if the completion was cut off before its response, as a tag is then only named in the
        thinking. Reward models read `response_to_score` instead.
    """
    check_think_format(think_format)
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

    Returns the thinking, `ok` or what is wrong with the tags, and whether the response's opening tag was reached.
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
    response = text.rpartition(expected.opens_response)[2]
    if expected.stop:
        response = response.partition(expected.stop)[0]
    return response.strip()


def response_to_score(text: str, think_format: str) -> str:
    """Returns the response of a completion, well-formed or not, as a reward model reads it; stripped.

    It follows the first tag that opens a response, wherever that is. Without such a tag it is the whole text.
    In a Zero format it ends at the tag that closes a response. The paper's released training code does the same.
    """
    expected = THINK_FORMATS[think_format]
    response = text
    if expected.opens_response and expected.opens_response in text:
        response = text.partition(expected.opens_response)[2]
    if expected.stop:
        response = response.partition(expected.stop)[0]
    return response.strip()


def shows_response(text: str, think_format: str) -> bool:
    """Tells whether a completion has the tag after which its response begins; True for a format without one."""
    return THINK_FORMATS[think_format].opens_response in text


def join_thinking(thinking: str, response: str, think_format: str) -> str:
    """Writes the completion that a model of `think_format` should write; the inverse of `split_thinking`."""
    layout = THINK_FORMATS[think_format].layout
    return layout.format(z=thinking.strip(), y=response.strip())


# --- 2. checkpoints, models, tokenizers


def read_trained_as(model: str) -> dict:
    """Returns how a model (a folder or hub name) was trained, as its files say; {} if they say nothing.

    The file is our think_format.json, or the longcot_config.json of the paper's authors. `think_format` is always
    there. train_rlver.py adds `keep_thinking` and `ask_thinking`.
    """
    ours = _find_file(model, "think_format.json")
    if ours:
        return json.loads(ours.read_text())
    longcot = _find_file(model, "longcot_config.json")
    if not longcot:
        return {}
    return {"think_format": _format_of_longcot(model, or_fail(json.loads, longcot.read_text()))}


def _format_of_longcot(model: str, config: dict) -> str:
    """Returns the think format that the marks of longcot_config.json belong to; exits with 2 without one."""
    if not config.get("longcot", True):
        return "plain"
    opens_thinking = (config.get("start_think_marker") or "").strip()
    opens_response = (config.get("longcot_delimiter") or "").strip()
    # The authors' SFT script writes the marks of Zero without thinking into every warm start with thinking,
    # whose chat template, unlike that of Zero, does not ask for a response in tags.
    if not opens_thinking and opens_response == "<response>" and not _template_has(model, "<response>"):
        return "think"
    for name, known in THINK_FORMATS.items():
        first_tag = known.thinking_tags[0] if known.thinking_tags else ""
        if known.tags and (first_tag, known.opens_response) == (opens_thinking, opens_response):
            return name
    fail(
        f"{model}: its longcot_config.json has the marks {opens_thinking!r} and {opens_response!r} of no "
        "think format; add one to THINK_FORMATS in utils.py, or delete the file from a copy of the model"
    )


def _template_has(model: str, tag: str) -> bool:
    """Tells whether a tag is in a checkpoint's chat template."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = _find_file(model, name)
        if path and tag in path.read_text():
            return True
    return False


def _find_file(model: str, name: str) -> Path | None:
    """Returns a file of a model folder or hub name; None if there is none."""
    if not Path(model).is_dir():
        return _find_on_hub(model, name)
    path = Path(model) / name
    return path if path.exists() else None


@functools.cache  # an evaluation asks once an answer
def _find_on_hub(model: str, name: str) -> Path | None:
    try:
        return Path(cached_file(model, name))
    except OSError:  # it is not there, or nothing can be reached: loading the model says which
        return None


def load_config(path: str):
    """Loads the config of a model folder or hub name; exits with 2 if it is missing or needs code of its own."""
    return or_fail(lambda: AutoConfig.from_pretrained(path, trust_remote_code=False))


def context_length(config) -> int:
    """Returns how many tokens a model reads at most; 10**9 if its config names no maximum."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9


def load_tokenizer(path: str) -> Tokenizer:
    """Loads the tokenizer of a model folder or hub name; exits with 2 if it is missing or the weights are pickled.

    Every script loads a tokenizer before it loads weights, so pickled ones are refused here.
    `tokenizer.own_ends` holds the end-of-turn ids of the folder's generation config: a model may have several.
    """
    pickled = sorted(Path(path).glob("*model*.bin"))
    if pickled and not any(Path(path).glob("*.safetensors")):
        fail(
            f"{pickled[0]} is a pickle, which could run any program; only safetensors are loaded. "
            "Convert it if you trust it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        fail(
            f"{path} is neither a model folder with a tokenizer nor a hub name that can be reached ({reason})"
        )

    tokenizer.own_ends = []
    with contextlib.suppress(OSError):
        ends = GenerationConfig.from_pretrained(path).eos_token_id
        if isinstance(ends, int):
            ends = [ends]
        tokenizer.own_ends = ends or []
    return tokenizer
