"""What must be the same everywhere: think format, chat rendering. (Run folders: runs.py.)"""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer


SAFE = {
    "use_safetensors": True,
    "trust_remote_code": False,
}  # of every model that is loaded: no pickle and no code of its own
DEVICE, DTYPE = (
    ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
)  # of one that is not trained

# --- 1. the think format

THINK_FORMATS = {
    "think": "<think> z </think> y",  # warm-started, thinking
    "plain": "y",  # warm-started or instruct, no thinking (RLHF)
    "zero_think": "<think> z </think> <response> y </response>",  # a base model asked by ZERO_INSTRUCTION
    "zero_plain": "<response> y </response>",
}
TAGS = ("<think>", "</think>", "<response>", "</response>")
RESPONSE_AFTER = {"think": "</think>", "plain": "", "zero_think": "<response>", "zero_plain": "<response>"}


class ThinkParts(NamedTuple):
    thinking: str
    response: str
    status: str  # ok, no_open, no_close, nested, empty_response or truncated


def split_thinking(text: str, think_format: str = "think", finished: bool = True) -> ThinkParts:
    """Splits a completion into thinking z and response y, both stripped; the one parser of this repository.

    Args:
        text: the completion, decoded without its end-of-turn token. Any string is fine.
        think_format: a key of THINK_FORMATS.
        finished: False if the token limit cut the completion off.

    Returns:
        ThinkParts. `status` is the first of these that holds: `no_open` (something else, or nothing, stands where an opening
        tag should), `nested` (a tag of the format occurs twice), `truncated` (cut off before its end, be it inside a tag),
        `no_close`, `empty_response`, else `ok`. A Zero completion ends at its first </response>. Without `ok`, `response` is
        what follows the last </think> (Zero: <response>), maybe nothing: whether that is scored is the caller's decision.
    """
    if think_format not in THINK_FORMATS:
        raise ValueError(f"think_format {think_format!r} is unknown; use one of {', '.join(THINK_FORMATS)}")
    tags = [tag for tag in TAGS if tag in THINK_FORMATS[think_format]]
    body, before = text, RESPONSE_AFTER[think_format]
    if think_format.startswith("zero"):  # whatever follows is ignored (evaluation code of the paper)
        body, closed, _ = text.partition("</response>")
        text, finished = body + closed, finished or bool(closed)
    response = (body.rpartition(before)[2] if before in body else "").strip() if before else body.strip()
    rest, thinking, status = text.strip(), "", "ok"
    for opening, closing in zip(tags[::2], tags[1::2]):
        if not rest.startswith(opening):
            status = "truncated" if not finished and opening.startswith(rest) else "no_open"
            break
        inside, closed, rest = rest[len(opening) :].partition(closing)
        if opening == "<think>":
            thinking, rest = inside.strip(), rest.strip()
        if not closed:
            status = "no_close" if finished else "truncated"
            break
    if status != "no_open" and any(text.count(tag) > 1 for tag in tags):
        status = "nested"
    elif status == "ok" and not (finished and response):
        status = "empty_response" if finished else "truncated"
    return ThinkParts(thinking, response, status)


def join_thinking(thinking: str, response: str, think_format: str) -> str:
    """The completion a model of `think_format` should write; inverse of `split_thinking`."""
    z, y = thinking.strip(), response.strip()
    return {
        "think": f"<think>\n{z}\n</think>\n\n{y}",
        "plain": y,
        "zero_plain": f"<response> {y} </response>",
        "zero_think": f"<think> {z} </think> <response> {y} </response>",
    }[think_format]


# --- 2. chat rendering

_ASKED = "A user asks a question, and an assistant answers it. "
ZERO_INSTRUCTION = {
    "zero_think": _ASKED
    + "The assistant first thinks about how to answer well, and only then answers. The thinking stands "
    "between <think> and </think>, and the answer between <response> and </response>, like this: <think> thinking </think> "
    "<response> answer </response>",
    "zero_plain": _ASKED
    + "The answer stands between <response> and </response>, like this: <response> answer </response>",
}
_THOUGHT = "<think>\nZ\n</think>\n\nY"  # what a template must leave as it is
_TURNS = (
    "{% for m in messages %}{{ 'Assistant: ' if m.role == 'assistant' else m.role.capitalize() + ': ' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
CHAT_TEMPLATES = {  # none of them drops, moves or adds a word of thinking, and none prints today's date
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "plain": "{{ bos_token if bos_token else '' }}" + _TURNS,
    **{
        k: "{{ bos_token if bos_token else '' }}" + text + "\n\n" + _TURNS
        for k, text in ZERO_INSTRUCTION.items()
    },
}


def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Special tokens by id, also those that no attribute of the tokenizer names (as <|eot_id|> in Llama 3.1's)."""
    return {
        i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special and t.content not in TAGS
    }


def without_control(tokenizer: Tokenizer, messages: list[dict]) -> list[dict]:
    """The messages without control tokens in their texts, which would open or close a turn; none is left by another either."""
    texts, marks = (
        [m["content"] for m in messages],
        "|".join(map(re.escape, control_tokens(tokenizer).values())) or "$^",
    )
    while any(re.search(marks, text) for text in texts):
        texts = [re.sub(marks, "", text) for text in texts]
    return [{**m, "content": text} for m, text in zip(messages, texts)]


def _render(tokenizer: Tokenizer, *answers: str) -> str:
    """A conversation in the tokenizer's template, in which a user keeps asking Q and the assistant gives `answers`."""
    turns = [[{"role": "user", "content": "Q"}, {"role": "assistant", "content": a}] for a in answers]
    return tokenizer.apply_chat_template(sum(turns, []), tokenize=False)


def _keeps_thinking(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's own template leaves thinking where it is, adds none, and does not change from day to day."""
    start = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q"}], tokenize=False, add_generation_prompt=True
    )
    keeps = _render(tokenizer, _THOUGHT, _THOUGHT).count(_THOUGHT) == 2 and "think>" not in start + _render(
        tokenizer, "Y"
    )
    return keeps and "strftime_now" not in tokenizer.get_chat_template()


def prepare_tokenizer(tokenizer: Tokenizer, think_format: str, chat_template: str = "auto") -> str:
    """Gives a policy's tokenizer its chat template, end of turn (`eos_token`), a pad token distinct from it, and `stop_ids`:
    that end and the one it had, which base models write. Adds no token.

    `chat_template`: a key of CHAT_TEMPLATES, a path, or `auto`: the Zero template for Zero formats; else the tokenizer's own
    if it keeps thinking verbatim; else ours for its family, ValueError if there is none. Returns one line about what was done.
    """
    vocab, control = tokenizer.get_vocab(), control_tokens(tokenizer)
    name = (
        chat_template if chat_template != "auto" else think_format if think_format.startswith("zero") else ""
    )
    if not name and tokenizer.chat_template and _keeps_thinking(tokenizer):
        name = "its own"
    elif not name:
        marks = {"llama3": "<|start_header_id|>", "chatml": "<|im_start|>"}
        name = next((family for family, mark in marks.items() if mark in vocab), "plain")
        if name == "plain" and tokenizer.chat_template:
            raise ValueError(
                "this tokenizer's chat template drops, adds or prefills thinking, or prints the date; pass one "
                f"that does not: --chat-template FILE, or one of {', '.join(CHAT_TEMPLATES)}"
            )
    if name != "its own":
        tokenizer.chat_template = CHAT_TEMPLATES.get(name) or Path(name).read_text()
    after = tokenizer(_render(tokenizer, "@@").rpartition("@@")[2], add_special_tokens=False)["input_ids"]
    end = next(
        (i for i in after if i in control), None
    )  # what the template writes after the assistant's words
    if end is None:
        raise ValueError(
            "the chat template ends the assistant's turn by no special token; pass --chat-template FILE"
        )
    tokenizer.stop_ids = sorted({end, tokenizer.eos_token_id, *getattr(tokenizer, "own_ends", ())} - {None})
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.pad_token_id in (
        None,
        end,
    ):  # a spare token, else the last special one, else the last: padding is masked
        spare = ["<|finetune_right_pad_id|>", "<|endoftext|>", "<|fim_pad|>", "<pad>", "<unk>", "<|pad|>"]
        spare += sorted(vocab, key=lambda t: (vocab[t] in control, vocab[t]), reverse=True)
        tokenizer.pad_token = next(t for t in spare if vocab.get(t, end) != end)
    return f"chat template: {name}; end of turn {tokenizer.eos_token!r}; pad {tokenizer.pad_token!r}"


def encode_prompt(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """Token ids of the conversation up to where the assistant writes: the same in SFT, rollouts and training."""
    ids = tokenizer.apply_chat_template(
        without_control(tokenizer, messages), add_generation_prompt=True, return_dict=False
    )
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        raise ValueError(
            f"the rendered prompt begins with two BOS tokens; fix the chat template: {ids[:8]}..."
        )
    return ids


def encode_completion(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a completion with its end of turn: exactly the tokens that SFT trains on."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def __getattr__(name: str):
    """Keeps `utils.RewardModel` until its callers import it from rewards.preference, which imports this module."""
    if name == "RewardModel":
        from rewards.preference import RewardModel

        return RewardModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
