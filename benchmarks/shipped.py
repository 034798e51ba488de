"""Prompts a model as it ships: with its own chat template and ends of turn, whatever the template does to
thinking.

Only evaluations do so. A policy that is trained needs a template that keeps thinking: see
prepare_tokenizer.
"""

import re

from transformers import PreTrainedTokenizerBase as Tokenizer

from rlmt.foreign import FOREIGN_STYLES, style_of
from rlmt.chat import choose_template, ends_of_template, render
from utils import THINK_FORMATS


def use_as_shipped(tokenizer: Tokenizer, think_format: str, chat_template: str, template_args: dict) -> str:
    """Gives a tokenizer what an evaluation needs of it, and returns one line that says what was chosen.

    Sets `think_format`; `opening`, the tag that the template writes before the assistant's words;
    `template_args`; and `stop_ids`, the ends of turn that generation config, tokenizer and template name.

    Args:
        think_format: a key of THINK_FORMATS or FOREIGN_STYLES, or `auto`: what the template shows.
        chat_template: a key of CHAT_TEMPLATES, a path, or `auto`: the tokenizer's own. A base model gets one
            of ours if it has none, or if its own does not ask for the Zero format that is wanted.
        template_args: what the template is given besides messages, such as {"enable_thinking": False}.

    Raises ValueError if the template has no such argument, or if nothing names an end of turn.
    """
    name, text = find_template(tokenizer, think_format, chat_template)
    for key in template_args:
        if not re.search(rf"\b{re.escape(key)}\b", text):
            raise ValueError(f"the chat template ({name}) has no argument {key!r}; see --chat-template-args")
    tokenizer.chat_template = text
    tokenizer.template_args = template_args

    tokenizer.think_format = think_format
    if think_format == "auto":
        tokenizer.think_format = shown_format(text)
    tokenizer.opening = find_opening(tokenizer)

    tokenizer.stop_ids = find_ends(tokenizer)
    ends = tokenizer.convert_ids_to_tokens(tokenizer.stop_ids)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = ends[0]  # padding is masked, so any token will do

    line = f"chat template: {name}; ends of turn {', '.join(map(str, ends))}; thinking read as {tokenizer.think_format!r}"
    if "strftime_now" in text:
        line += "; the template prints today's date, so prompts change from day to day"
    return line


def find_template(tokenizer: Tokenizer, think_format: str, chat_template: str) -> tuple[str, str]:
    """Returns the name and the text of the chat template. See `use_as_shipped`."""
    our_format = "plain"  # for `auto` and foreign styles too, which `choose_template` does not know
    if think_format in THINK_FORMATS:
        our_format = think_format
    if chat_template != "auto" or not tokenizer.chat_template:
        return choose_template(tokenizer, our_format, chat_template)

    own = tokenizer.get_chat_template()
    instruction = THINK_FORMATS[our_format].instruction
    asks_for_format = all(tag in own for tag in THINK_FORMATS[our_format].tags)
    if instruction and not asks_for_format:
        return choose_template(tokenizer, our_format, "auto")
    return "its own", own


def shown_format(template: str) -> str:
    """Returns how a model thinks, as its chat template shows it: a key of THINK_FORMATS or FOREIGN_STYLES.

    It is "plain" for a template that shows nothing; such a model may think all the same.
    """
    for name, known in THINK_FORMATS.items():
        asks_for_format = all(tag in template for tag in known.tags)
        if known.instruction and asks_for_format:  # a Zero model
            return name
    for name, style in FOREIGN_STYLES.items():
        if style.opens_thinking in template or style.closes_thinking.strip() in template:
            return name
    return "plain"


def find_opening(tokenizer: Tokenizer) -> str:
    """Returns the thinking tag with which the chat template begins the assistant's turn; "" if there is none.

    A template that switches thinking off closes it at once: "<think>\\n\\n</think>\\n\\n".
    """
    style = style_of(tokenizer.think_format)
    if not style:
        return ""
    question = [{"role": "user", "content": "@@"}]
    prompt = render(tokenizer, question, tokenize=False, add_generation_prompt=True)
    after_question = prompt.rpartition("@@")[2]
    # always a match, of an empty text if the template writes neither tag
    opening = re.escape(style.opens_thinking)
    return re.search(rf"({opening}\s*)?({style.opens_answer}\s*)?\Z", after_question)[0]


def find_ends(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids that end a turn; ValueError if there is none."""
    ends = {tokenizer.eos_token_id, *getattr(tokenizer, "own_ends", [])}
    ends |= set(ends_of_template(tokenizer)[:1])  # those after it lead to the next turn
    ends -= {None}
    if not ends:
        raise ValueError("neither generation config nor tokenizer nor chat template names an end of turn")
    return sorted(ends)
