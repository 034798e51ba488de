"""Chat templates and token ids of prompts and completions: the same in training, rewards and evaluation."""

import contextlib
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jinja2
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import cached_file

from utils import TAGS, THINK_FORMATS, check_think_format, fail, or_fail, split_thinking

# --- 1. chat templates

# for models without special tokens for turns: "User: ...", "Assistant:...", as the prompt ends with its colon
_TURNS = (
    "{% for m in messages %}{{ m.role.capitalize() + ':' }}{{ ' ' if m.role != 'assistant' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}\n\n{% endfor %}"
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
# a token that only this family has
FAMILY_MARKS = {"llama3": "<|start_header_id|>", "chatml": "<|im_start|>"}

# unused tokens of known families, tried in this order
PAD_TOKENS = (
    "<|finetune_right_pad_id|>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<pad>",
    "<unk>",
    "<|pad|>",
    "<|padding|>",
)
THOUGHT = "<think>\nZ\n</think>\n\nY"  # a completion that a template must leave as it is


class Dropped(ValueError):
    """One row is not kept; the message is the reason that is counted."""


def render(tokenizer: Tokenizer, messages: list[dict], **options) -> str | list[int]:
    """Applies the chat template, with the `template_args` that an evaluation may set
    (benchmarks/shipped.py). Dropped if the template refuses the messages, such as a system turn."""
    template_args = getattr(tokenizer, "template_args", {})
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **options, **template_args)
    except jinja2.TemplateError as error:
        raise Dropped(f"refused by the chat template: {error}") from None


def render_answers(tokenizer: Tokenizer, *answers: str) -> str:
    """Renders a conversation in which a user keeps asking "Q" and the assistant gives `answers`."""
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]
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
    """Tells whether a template leaves thinking where it is, adds none, begins each answer as it asks for one, and
    does not change from day to day."""
    prompt = render(tokenizer, [{"role": "user", "content": "Q"}], tokenize=False, add_generation_prompt=True)
    # twice: some templates drop the thinking of all turns but the last
    conversation = render_answers(tokenizer, THOUGHT, THOUGHT)
    keeps_all = conversation.count(THOUGHT) == 2 and conversation.startswith(prompt)
    adds_none = "think>" not in prompt + render_answers(tokenizer, "Y")
    prints_date = "strftime_now" in tokenizer.get_chat_template()
    return keeps_all and adds_none and not prints_date


def zero_template(instruction: str) -> str:
    """Returns the template of a base model that is asked for a format: the instruction, then plain turns."""
    return _BOS + "{{ " + json.dumps(instruction.rstrip(), ensure_ascii=False) + " }}\n\n" + _TURNS


def choose_template(tokenizer: Tokenizer, think_format: str, chat_template: str) -> tuple[str, str]:
    """Returns the name and the text of the chat template; ValueError if none fits. See
    `prepare_tokenizer`."""
    if chat_template in CHAT_TEMPLATES:
        return chat_template, CHAT_TEMPLATES[chat_template]
    if chat_template != "auto":
        text = Path(chat_template).read_text()
        if "{{" not in text:  # no Jinja, but an instruction
            text = zero_template(text)
        return chat_template, text
    trained_as = read_trained_as(tokenizer.name_or_path).get("think_format")
    if tokenizer.chat_template and trained_as == think_format:  # this warm start was asked by no other
        return "its own", tokenizer.chat_template
    instruction = THINK_FORMATS[think_format].instruction
    if instruction:
        return think_format, zero_template(instruction)
    if tokenizer.chat_template and _keeps_thinking(tokenizer):
        return "its own", tokenizer.chat_template

    # its own template will not do, but the family's turns are known
    for family, mark in FAMILY_MARKS.items():
        if mark in tokenizer.get_vocab():
            return family, CHAT_TEMPLATES[family]
    if tokenizer.chat_template:
        raise ValueError(
            "this tokenizer's chat template drops, adds or prefills thinking, or prints the date; pass one that "
            f"does not: --chat-template FILE, or one of {', '.join(CHAT_TEMPLATES)}"
        )
    return "plain", CHAT_TEMPLATES["plain"]


def _choose_pad_token(tokenizer: Tokenizer, end: int) -> str:
    """Returns a token other than the end of turn: a known unused one, else that of the highest id.

    It is special in the saved tokenizer, and so vanishes from texts: spaces must not be it.
    """
    vocabulary = tokenizer.get_vocab()
    for token in PAD_TOKENS:
        if vocabulary.get(token, end) != end:
            return token
    others = [token for token, token_id in vocabulary.items() if token_id != end and not token.isspace()]
    return max(others, key=vocabulary.get)


def prepare_tokenizer(tokenizer: Tokenizer, think_format: str, chat_template: str = "auto") -> str:
    """Gives a policy's tokenizer its chat template, end of turn, pad token, `stop_ids` and `trained_as`; adds
    no token.

    `eos_token` becomes the token that the template writes after the assistant's words. `stop_ids` holds it
    and the ends that the tokenizer had, which base models write. The pad token is never the end of turn, as
    transformers reads a reward at the last token that is not the pad token. `trained_as` will be the content
    of a checkpoint's think_format.json.

    Args:
        chat_template: a key of CHAT_TEMPLATES, a path, or `auto`: the one that the model was trained to this
            format with; else a Zero format's template; else the tokenizer's own if it keeps thinking verbatim;
            else ours for its family. A file of plain text takes the place of a Zero format's instruction.

    Returns one line that says what was chosen. Raises ValueError if no template fits.
    """
    check_think_format(think_format)
    for tag in THINK_FORMATS[think_format].tags:
        written = tokenizer.decode(tokenizer(tag, add_special_tokens=False)["input_ids"])
        if tag not in written:
            raise ValueError(
                f"this tokenizer turns the tag {tag} into {written!r}; take another --think-format"
            )
    name, text = choose_template(tokenizer, think_format, chat_template)
    tokenizer.chat_template = text

    end = tokenizer.eos_token_id
    if closing_ids(tokenizer):  # the authors' Zero templates write nothing after an answer: its own end stays
        end = next(iter(ends_of_template(tokenizer)), None)
    if end is None:
        raise ValueError(
            f"the chat template {name} ends no turn by a special token; pass --chat-template FILE"
        )

    own_ends = getattr(tokenizer, "own_ends", [])
    tokenizer.stop_ids = sorted({end, tokenizer.eos_token_id, *own_ends} - {None})
    tokenizer.trained_as = {"think_format": think_format}
    # so that every library stops where SFT taught the model to stop
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.pad_token_id in (None, end):
        tokenizer.pad_token = _choose_pad_token(tokenizer, end)
    return f"chat template: {name}; end of turn {tokenizer.eos_token!r}; pad {tokenizer.pad_token!r}"


# --- 2. token ids of prompts and completions


@dataclass
class Sample:
    """Holds what a sampler returns for one prompt."""

    ids: list[int]
    """Token ids, with the end of turn if there is one."""
    logprobs: list[float] | None
    """The sampler's log-probability of each token, nats; None from transformers."""
    finished: bool
    """False if the token limit cut the completion off."""
    budget_used_up: bool = False
    """Whether a ThinkingBudget closed the thinking."""


def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns special tokens by id, without think tags; even <|eot_id|> of Llama 3.1, which no attribute
    names."""
    texts = {*TAGS}
    if tokenizer.pad_token and set("<[{|").isdisjoint(tokenizer.pad_token):
        texts.add(tokenizer.pad_token)  # an ordinary word, which texts must keep
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in texts
    }


def without_control(tokenizer: Tokenizer, messages: list[dict]) -> list[dict]:
    """Strips control tokens from the texts of messages, as they would open or close a turn."""
    control = control_tokens(tokenizer).values()
    cleaned = []
    for message in messages:
        text = message["content"]
        while any(token in text for token in control):  # removing one can create another
            for token in control:
                text = text.replace(token, "")
        cleaned.append({**message, "content": text})
    return cleaned


def encode_prompt(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """Encodes a conversation up to where the assistant writes: the same ids in SFT, rollouts and
    evaluation."""
    return render(tokenizer, without_control(tokenizer, messages), add_generation_prompt=True)


def encode_completion(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a completion with its end of turn: exactly the tokens that SFT trains on."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def flaw_of_text(text: str, think_format: str) -> str:
    """Returns why a completion is not exactly one of its think format; "" if it is.

    The flaw is a status of utils.split_thinking, `tag_inside_text` (of another format, or too often) or
    `text_after_response`.
    """
    status = split_thinking(text, think_format).status
    if status != "ok":
        return status
    expected = THINK_FORMATS[think_format]
    if any(text.count(tag) > expected.tags.count(tag) for tag in TAGS):
        return "tag_inside_text"
    if not text.rstrip().endswith(expected.stop):
        return "text_after_response"  # the parser cuts it off
    return ""


def flaw_of(tokenizer: Tokenizer, text: str, think_format: str) -> str:
    """Returns why a completion cannot be trained on; "" if it can.

    As `flaw_of_text`, `control_token`, or `unknown_words`: the tokenizer cannot write it.
    """
    if any(token in text for token in control_tokens(tokenizer).values()):
        return "control_token"
    flaw = flaw_of_text(text, think_format)
    unknown = tokenizer.unk_token_id
    if not flaw and unknown is not None and unknown in tokenizer(text, add_special_tokens=False)["input_ids"]:
        flaw = "unknown_words"
    return flaw


# --- 3. what a model's folder says of it


def read_trained_as(model: str) -> dict:
    """Returns how a model (a folder or hub name) was trained, as its files say; {} if they say nothing.

    The file is our think_format.json, or the longcot_config.json of the paper's authors. If there is
    anything, `think_format` is. train_rlver.py adds `keep_thinking` and `ask_thinking`.
    """
    ours = _read_file(model, "think_format.json")
    if ours:
        return json.loads(ours)
    longcot = _read_file(model, "longcot_config.json")
    if not longcot:
        return {}
    return {"think_format": _format_of_longcot(model, json.loads(longcot))}


def _format_of_longcot(model: str, config: dict) -> str:
    """Returns the think format that the marks of longcot_config.json belong to; exits with 2 without one."""
    if not config.get("longcot", True):
        return "plain"
    # what opens the thinking, and what opens the response
    marks = [(config.get(key) or "").strip() for key in ("start_think_marker", "longcot_delimiter")]
    # The authors' SFT script writes the marks of Zero without thinking into every warm start with thinking,
    # whose chat template, unlike that of Zero, does not ask for a response in tags.
    template = _read_file(model, "chat_template.jinja") + _read_file(model, "tokenizer_config.json")
    if marks == ["", "<response>"] and "<response>" not in template:
        return "think"
    for name, known in THINK_FORMATS.items():
        if known.tags and marks == [(known.thinking_tags or ("",))[0], known.opens_response]:
            return name
    fail(
        f"{model}: its longcot_config.json has the marks {marks} of no think format; add one to THINK_FORMATS "
        "in utils.py, or delete the file from a copy of the model"
    )


@functools.cache  # an evaluation asks once per answer
def _read_file(model: str, name: str) -> str:
    """Returns the text of a file of a model folder or hub name; "" if there is none."""
    try:
        return Path(cached_file(model, name)).read_text()
    except OSError:  # missing, or the hub cannot be reached; loading the model says which
        return ""


def check_folder(path: str) -> None:
    """Exits with 2 for the folder of a run, and if a model's folder is missing beside others that are there: the
    hub would be asked for long."""
    if Path(path, "model").is_dir():
        fail(f"{path} is a run; its model is {path}/model")
    if "/" in str(path) and Path(path).parent.is_dir() and not Path(path).is_dir():
        fail(
            f"{path}: no such folder; a run makes it (git has no weights), and data/README.md says how data/smollm2 and "
            "data/toy/base are made"
        )


def load_config(path: str):
    """Loads the config of a model folder or hub name; exits with 2 if it is missing or needs code of its
    own."""
    check_folder(path)
    return or_fail(transformers.AutoConfig.from_pretrained, path, trust_remote_code=False)


def context_length(config) -> int:
    """Returns how many tokens a model reads at most; 10**9 if its config names no maximum."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9


def load_tokenizer(path: str) -> Tokenizer:
    """Loads the tokenizer of a model folder or hub name; exits with 2 if it is missing.

    `tokenizer.own_ends` holds the end-of-turn ids of the folder's generation config: a model may have
    several.
    """
    check_folder(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json has many kinds
        fail(
            f"{path} is neither a model folder with a tokenizer, which a run writes at its end, nor a hub name that can be "
            f"reached ({error})"
        )
    tokenizer.own_ends = []
    with contextlib.suppress(OSError):
        ends = transformers.GenerationConfig.from_pretrained(path).eos_token_id
        if isinstance(ends, int):
            ends = [ends]
        tokenizer.own_ends = ends or []
    return tokenizer
