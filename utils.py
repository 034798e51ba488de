"""What must be the same in training, rewards and evaluation: the think format, chat templates, token ids of a prompt.

To add a think format, add one entry to THINK_FORMATS: the parser, the templates, the stop string and every script's
`--think-format` read it from there. How models think that were trained elsewhere, and are only evaluated, is an entry
of FOREIGN_STYLES.
"""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from runs import fail, or_fail

# every model is loaded with these: no pickled weights, and no code that comes with a model
SAFE = {"use_safetensors": True, "trust_remote_code": False}

# where models live that are not trained, and their dtype
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"


# --- 1. think formats


@dataclass(frozen=True)
class ThinkFormat:
    """Describes how a completion holds its thinking z and its response y."""

    layout: str
    """A completion as the model should write it, with {z} and {y}; the target of SFT and DPO."""
    thinking_tags: tuple[str, str] | None = None
    """What opens and closes the thinking."""
    response_tags: tuple[str, str] | None = None
    """What opens and closes the response. A completion ends at the closing tag: sampling stops there."""
    instruction: str = ""
    """Text before the prompt of a base model that was never trained on the format (Zero)."""

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.thinking_tags or ()) + (self.response_tags or ())

    @property
    def opens_response(self) -> str:
        """Returns the tag behind which the response begins; "" if the whole completion is the response."""
        if self.response_tags:
            return self.response_tags[0]
        if self.thinking_tags:
            return self.thinking_tags[1]
        return ""

    @property
    def stop(self) -> str:
        """Returns the string at which sampling stops, besides the end of turn; "" if there is none."""
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


@dataclass(frozen=True)
class ForeignStyle:
    """Describes how a model that was trained elsewhere tells its thinking from its answer.

    It is read leniently: such a model may answer without thinking, and its chat template may open the thinking.
    """

    opens_thinking: str
    """What begins a completion that thinks."""
    opens_answer: str
    """A regular expression; the answer is what follows its last match."""
    marks: str
    """A regular expression for everything in the thinking that is not its words."""
    closes_answer: str = ""
    """What may stand between the answer and the end of turn."""


FOREIGN_STYLES = {
    # Qwen3, DeepSeek-R1 and most others: <think> thinking </think> answer
    "tags": ForeignStyle(opens_thinking="<think>", opens_answer="</think>", marks="</?think>"),
    # gpt-oss: <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>answer
    "channels": ForeignStyle(
        opens_thinking="<|channel|>",
        opens_answer=r"<\|channel\|>final.*?<\|message\|>",
        marks=r"<\|channel\|>.*?(<\|message\|>|\Z)|<\|end\|>|<\|start\|>[^<]*",
        closes_answer="<|end|>",
    ),
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
    """Splits a completion into thinking and response, both stripped. This is the only parser in the repository.

    Args:
        text: the completion, decoded without its end-of-turn token. Any string is fine.
        think_format: a key of THINK_FORMATS or FOREIGN_STYLES.
        finished: False if the token limit cut the completion off.

    Returns:
        ThinkParts. `status` is the first of these that holds: `no_open` (something else, or nothing, is where an
        opening tag should be), `nested` (a tag of the format occurs twice), `truncated` (cut off before its end,
        even inside a tag), `no_close`, `empty_response`, else `ok`. A completion ends at the first closing tag of
        its response. Without `ok`, `response` is what follows the last tag that opens a response, maybe nothing.
        Reward models read `response_to_score` instead. A foreign
        style is never `no_open` or `nested`.
    """
    if think_format in FOREIGN_STYLES:
        return _split_foreign(text.strip(), FOREIGN_STYLES[think_format], finished)
    check_think_format(think_format)
    expected = THINK_FORMATS[think_format]

    if expected.stop:  # whatever follows is ignored, as in the paper's evaluation code
        before, closing_tag, _ = text.partition(expected.stop)
        text = before + closing_tag
        finished = finished or bool(closing_tag)

    thinking, status = _walk_tags(text.strip(), expected, finished)
    response = _response_of(text, expected)
    if status != "no_open" and any(text.count(tag) > 1 for tag in expected.tags):
        status = "nested"
    elif status == "ok" and not finished:
        status = "truncated"
    elif status == "ok" and not response:
        status = "empty_response"
    return ThinkParts(thinking, response, status)


def _walk_tags(text: str, expected: ThinkFormat, finished: bool) -> tuple[str, str]:
    """Follows the tags from left to right; returns the thinking, and `ok` or what is wrong with the tags."""
    thinking = ""
    for tags in (expected.thinking_tags, expected.response_tags):
        if tags is None:
            continue
        opening, closing = tags
        if not text.startswith(opening):
            cut_inside_tag = not finished and opening.startswith(text)
            return thinking, "truncated" if cut_inside_tag else "no_open"
        inside, closing_tag, rest = text.removeprefix(opening).partition(closing)
        if tags is expected.thinking_tags:
            thinking = inside.strip()
        if not closing_tag:
            return thinking, "no_close" if finished else "truncated"
        text = rest.strip()
    return thinking, "ok"


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
    """Returns the response as a reward model reads it, of any completion, well-formed or not; stripped.

    That is what follows the first tag that opens a response, wherever it is, or the whole text if none does.
    In a Zero format it ends at the tag that closes a response. The paper's released training code does the same.
    """
    expected = THINK_FORMATS[think_format]
    response = text
    if expected.opens_response and expected.opens_response in text:
        response = text.partition(expected.opens_response)[2]
    if expected.stop:
        response = response.partition(expected.stop)[0]
    return response.strip()


def _split_foreign(text: str, style: ForeignStyle, finished: bool) -> ThinkParts:
    """Splits a completion of a model that was trained elsewhere; thinking that is never closed has no response."""
    answers = list(re.finditer(style.opens_answer, text))
    never_closed = not answers and text.startswith(style.opens_thinking)
    if answers:
        thinking = text[: answers[-1].start()]
        response = text[answers[-1].end() :]
    elif never_closed:
        thinking = text
        response = ""
    else:  # it answered without thinking
        thinking = ""
        response = text

    thinking = re.sub(style.marks, "\n", thinking).strip()
    if style.closes_answer:
        response = response.partition(style.closes_answer)[0]
    response = response.strip()

    status = "ok"
    if not finished:
        status = "truncated"
    elif never_closed:
        status = "no_close"
    elif not response:
        status = "empty_response"
    return ThinkParts(thinking, response, status)


def shows_response(text: str, think_format: str) -> bool:
    """Tells whether a completion has the mark behind which its response begins."""
    if think_format in FOREIGN_STYLES:
        return re.search(FOREIGN_STYLES[think_format].opens_answer, text) is not None
    return THINK_FORMATS[think_format].opens_response in text


def stop_string(think_format: str) -> str:
    """Returns the string at which sampling stops, besides the end of turn; foreign styles have none."""
    if think_format in FOREIGN_STYLES:
        return ""
    return THINK_FORMATS[think_format].stop


def join_thinking(thinking: str, response: str, think_format: str) -> str:
    """Writes the completion that a model of `think_format` should write; the inverse of `split_thinking`."""
    layout = THINK_FORMATS[think_format].layout
    return layout.format(z=thinking.strip(), y=response.strip())


def read_trained_as(model: str) -> dict:
    """Returns what a saved checkpoint's think_format.json says; {} without that file.

    `think_format` is always there. train_rlver.py adds `keep_thinking` and `ask_thinking`.
    """
    path = Path(model) / "think_format.json"
    if not path.exists():
        return {}
    return json.loads(path.read_text())


# --- 2. chat templates

_TURNS = (
    "{% for m in messages %}{{ 'Assistant: ' if m.role == 'assistant' else m.role.capitalize() + ': ' }}"
    "{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_BOS = "{{ bos_token if bos_token else '' }}"
CHAT_TEMPLATES = {  # none of them drops, moves or adds a word of thinking, and none prints today's date
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "plain": _BOS + _TURNS,
}
FAMILY_MARKS = {"llama3": "<|start_header_id|>", "chatml": "<|im_start|>"}  # a token that tells the family

THOUGHT = "<think>\nZ\n</think>\n\nY"  # a completion that a template must leave as it is


def load_config(path: str):
    """Loads the config of a model folder or hub name; exits with 2 if there is none or it needs code of its own."""
    return or_fail(lambda: AutoConfig.from_pretrained(path, trust_remote_code=False))


def context_length(config) -> int:
    """Returns how many tokens a model reads at most; 10**9 if its config names no maximum."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9


def load_tokenizer(path: str) -> Tokenizer:
    """Loads the tokenizer of a model folder or hub name; exits with 2 if there is none or the weights are pickled.

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


def check_weights(path: str) -> None:
    """Exits with 2 if a model's folder lacks weights. A hub name is not looked up: it was, for its config."""
    folder = Path(path)
    if not folder.is_dir():
        return
    parts = {"*.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        parts = set(json.loads(index.read_text())["weight_map"].values())
    for part in sorted(parts):
        if not any(folder.glob(part)):
            fail(
                f"{path}: its weights are missing ({part}); copy or download the folder again, or name another"
            )


def render(tokenizer: Tokenizer, messages: list[dict], **options) -> str | list[int]:
    """Applies the chat template, with the `template_args` that an evaluation may set (benchmarks/shipped.py)."""
    template_args = getattr(tokenizer, "template_args", {})
    return tokenizer.apply_chat_template(messages, return_dict=False, **options, **template_args)


def render_answers(tokenizer: Tokenizer, *answers: str) -> str:
    """Renders a conversation in which a user keeps asking "Q" and the assistant gives `answers`."""
    messages = []
    for answer in answers:
        messages.append({"role": "user", "content": "Q"})
        messages.append({"role": "assistant", "content": answer})
    return render(tokenizer, messages, tokenize=False)


def closing_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that the chat template writes after the assistant's words."""
    closing_text = render_answers(tokenizer, "@@").rpartition("@@")[2]
    return tokenizer(closing_text, add_special_tokens=False)["input_ids"]


def ends_of_template(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the special tokens that the chat template writes after the assistant's words."""
    special = control_tokens(tokenizer)
    return [token for token in closing_ids(tokenizer) if token in special]


def _keeps_thinking(tokenizer: Tokenizer) -> bool:
    """Tells whether a template leaves thinking where it is, adds none, and does not change from day to day."""
    question = [{"role": "user", "content": "Q"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    keeps_all = render_answers(tokenizer, THOUGHT, THOUGHT).count(THOUGHT) == 2
    adds_none = "think>" not in prompt + render_answers(tokenizer, "Y")
    return keeps_all and adds_none and "strftime_now" not in tokenizer.get_chat_template()


def choose_template(tokenizer: Tokenizer, think_format: str, chat_template: str) -> tuple[str, str]:
    """Returns the name and the text of the chat template; ValueError if none fits. See `prepare_tokenizer`."""
    if chat_template in CHAT_TEMPLATES:
        return chat_template, CHAT_TEMPLATES[chat_template]
    if chat_template != "auto":
        return chat_template, Path(chat_template).read_text()

    instruction = THINK_FORMATS[think_format].instruction
    if instruction:
        return think_format, _BOS + instruction + "\n\n" + _TURNS
    if tokenizer.chat_template and _keeps_thinking(tokenizer):
        return "its own", tokenizer.chat_template

    vocabulary = tokenizer.get_vocab()
    for family, mark in FAMILY_MARKS.items():
        if mark in vocabulary:
            return family, CHAT_TEMPLATES[family]
    if tokenizer.chat_template:
        raise ValueError(
            "this tokenizer's chat template drops, adds or prefills thinking, or prints the date; pass one that "
            f"does not: --chat-template FILE, or one of {', '.join(CHAT_TEMPLATES)}"
        )
    return "plain", CHAT_TEMPLATES["plain"]


def _choose_pad_token(tokenizer: Tokenizer, end: int) -> str:
    """Returns a token other than the end of turn: a spare one, else the last special one, else the last one."""
    vocabulary = tokenizer.get_vocab()
    for token in ("<|finetune_right_pad_id|>", "<|endoftext|>", "<|fim_pad|>", "<pad>", "<unk>", "<|pad|>"):
        if vocabulary.get(token, end) != end:
            return token
    special = control_tokens(tokenizer).keys() - {end}
    others = set(vocabulary.values()) - {end}
    if not others:
        raise ValueError("this tokenizer has a single token")
    return tokenizer.convert_ids_to_tokens(max(special or others))


def unwritable_tag(tokenizer: Tokenizer, think_format: str) -> str:
    """Returns a tag of the format that the tokenizer would write as an unknown token; "" if there is none."""
    for tag in THINK_FORMATS[think_format].tags:
        if tokenizer.unk_token_id in tokenizer(tag, add_special_tokens=False)["input_ids"]:
            return tag
    return ""


def check_writable(tokenizer: Tokenizer, think_format: str) -> None:
    """Raises ValueError if the tokenizer cannot write a tag of the format."""
    tag = unwritable_tag(tokenizer, think_format)
    if tag:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} cannot write {tag!r}, a tag of the think format "
            f"{think_format!r}; choose another tag or another model"
        )


def prepare_tokenizer(tokenizer: Tokenizer, think_format: str, chat_template: str = "auto") -> str:
    """Gives a policy's tokenizer its chat template, end of turn, pad token, `stop_ids` and `trained_as`; adds no token.

    `eos_token` becomes what the template writes after the assistant's words. `stop_ids` holds that end and the
    ones the tokenizer had, which base models write. The pad token is never the end of turn: its loss would be lost.
    `trained_as` is what a checkpoint's think_format.json will say.

    Args:
        chat_template: a key of CHAT_TEMPLATES, a path, or `auto`: a Zero format's template; else the tokenizer's
            own if it keeps thinking verbatim; else ours for its family.

    Returns one line that says what was chosen. Raises ValueError if no template fits, or a tag cannot be written.
    """
    check_think_format(think_format)
    check_writable(tokenizer, think_format)
    name, text = choose_template(tokenizer, think_format, chat_template)
    tokenizer.chat_template = text

    ends = ends_of_template(tokenizer)
    leaves_end_to_model = not closing_ids(tokenizer)  # as the authors' templates for Zero do
    if leaves_end_to_model and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if not ends:
        raise ValueError(
            "the chat template ends the assistant's turn without a special token; pass --chat-template FILE"
        )

    end = ends[0]
    own_ends = getattr(tokenizer, "own_ends", [])
    tokenizer.stop_ids = sorted({end, tokenizer.eos_token_id, *own_ends} - {None})
    tokenizer.trained_as = {"think_format": think_format}
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.pad_token_id in (None, end):
        tokenizer.pad_token = _choose_pad_token(tokenizer, end)
    return f"chat template: {name}; end of turn {tokenizer.eos_token!r}; pad {tokenizer.pad_token!r}"


# --- 3. token ids of prompts and completions


def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns special tokens by id, even those no attribute names (<|eot_id|> in Llama 3.1), without think tags."""
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in TAGS
    }


def without_control(tokenizer: Tokenizer, messages: list[dict]) -> list[dict]:
    """Strips control tokens from the texts of messages, as they would open or close a turn."""
    control = control_tokens(tokenizer).values()
    if not control:
        return messages
    pattern = re.compile("|".join(map(re.escape, control)))
    cleaned = []
    for message in messages:
        text = message["content"]
        while pattern.search(text):  # removing one can create another
            text = pattern.sub("", text)
        cleaned.append({**message, "content": text})
    return cleaned


def encode_prompt(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """Encodes a conversation up to where the assistant writes: the same ids in SFT, rollouts and evaluation."""
    messages = without_control(tokenizer, messages)
    ids = render(tokenizer, messages, add_generation_prompt=True)
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        raise ValueError(
            f"the rendered prompt begins with two BOS tokens; fix the chat template: {ids[:8]}..."
        )
    return ids


def encode_completion(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a completion with its end of turn: exactly the tokens that SFT trains on."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def flaw_of(tokenizer: Tokenizer, text: str, think_format: str) -> str:
    """Returns why a completion cannot be trained on; "" if it can.

    The flaw is a status of `split_thinking`, `tag_inside_text` (of another format, or too often), `control_token` or
    `text_after_response`.
    """
    status = split_thinking(text, think_format).status
    if status != "ok":
        return status
    expected = THINK_FORMATS[think_format]
    if any(text.count(tag) > expected.tags.count(tag) for tag in TAGS):
        return "tag_inside_text"
    if not text.rstrip().endswith(expected.stop):
        return "text_after_response"
    if without_control(tokenizer, [{"content": text}]) != [{"content": text}]:
        return "control_token"
    return ""
