"""Reads the thinking of models that were trained elsewhere: those that are evaluated, and judges.

To add a style, add one entry to FOREIGN_STYLES: `split_foreign` and the evaluation scripts' `--think-format`
read it from there. benchmarks/tested_model.py chooses between these styles and our own formats.
"""

import re
from dataclasses import dataclass

from utils import THINK_FORMATS, ThinkParts, join_thinking, shows_response, split_thinking

# What marks thinking in any style that we know: <think>, [THINK], <seed:think>, <thought>, ◁think▷,
# <|START_THINKING|>, <|channel|>analysis, and analysis...assistantfinal where a server has dropped gpt-oss's
# tokens.
_WORD = r"[\w:.-]{0,30}(?:think|thought|reasoning|scratchpad)[\w:.-]{0,30}"
CLOSES_THINKING = (
    rf"(?:(?i:(?:[<◁]|&lt;)[|｜]?/ *{_WORD}[|｜]?(?:[>▷]|&gt;)|<[|｜]end_{_WORD}[|｜]>)|\[/THINK(?:ING)?\])"
)
# a tag opens thinking at the start of a line or sentence, as prose may name it; a token does so anywhere
_TAG = rf"(?:[<◁]|&lt;) *{_WORD} *(?:[>▷]|&gt;)"
_TOKEN = rf"<[|｜](?!end_|/){_WORD}[|｜]>|<\|?channel\|?>|<unused94>"
_BARE = r"\A\s*(?:assistant)?(?:analysis|commentary)(?=[A-Z])"
OPENS_THINKING = re.compile(
    rf"(?:^|[.!?:…]\s)[ \t]*(?:(?i:{_TAG})|\[THINK(?:ING)?\])|(?i:{_TOKEN})|{_BARE}", re.MULTILINE
)

# how thinking is marked by any model: a mark in brackets that opens a line, or closes anywhere
FOREIGN_MARK = re.compile(
    r"(^[ \t]*[<\[\u25c1]|[<\[\u25c1]/)[\w:|]*(think|thought|reason|reflect|analy|scratch|monolog|cot|channel)[\w:|]*[>\]\u25b7](?!\()"
    r"|^analysis.*assistantfinal|^Here is my thought process",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class ForeignStyle:
    """Describes how a model that was trained elsewhere tells its thinking from its answer.

    It is read leniently: such a model may answer without thinking, and its chat template may open the
    thinking.
    """

    opens_thinking: str
    """The text, not a regular expression, with which a completion that thinks begins."""
    opens_answer: str
    """A regular expression; the answer is what follows its last match."""
    markup: str
    """A regular expression for everything in the thinking that is not its words."""
    closes_thinking: str
    """What a model writes between its thinking and its answer."""
    closes_answer: str = ""
    """A text that may stand between the answer and the end of turn."""


FOREIGN_STYLES = {
    # Qwen3, DeepSeek-R1 and most others: <think> thinking </think> answer; any tag that says so
    "tags": ForeignStyle(
        opens_thinking="<think>",
        opens_answer=CLOSES_THINKING,
        markup=rf"{CLOSES_THINKING}|(?i:{_TAG}|<[|｜]{_WORD}[|｜]>)|\[THINK(?:ING)?\]",
        closes_thinking="\n</think>\n\n",
    ),
    # gpt-oss:
    # <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>answer
    "channels": ForeignStyle(
        opens_thinking="<|channel|>",
        opens_answer=r"(?:<\|channel\|>final.{0,99}?<\|message\|>|assistantfinal)",
        markup=rf"<\|channel\|>.*?(<\|message\|>|\Z)|<\|end\|>|<\|start\|>[^<]*|{_BARE}",
        closes_thinking="<|end|><|start|>assistant<|channel|>final<|message|>",
        closes_answer="<|end|>",
    ),
    # Gemma 4: <|channel>thought thinking <channel|> answer
    "gemma": ForeignStyle(
        opens_thinking="<|channel>thought",
        opens_answer=r"(?:<channel\|>|<unused95>)",
        markup=r"<\|channel>thought|<channel\|>",
        closes_thinking="<channel|>",
    ),
}


def style_of(name: str) -> ForeignStyle | None:
    """Returns how a key of THINK_FORMATS or FOREIGN_STYLES marks thinking; None for a format without it."""
    if name in FOREIGN_STYLES:
        return FOREIGN_STYLES[name]
    tags = THINK_FORMATS[name].thinking_tags
    if not tags:
        return None
    between = join_thinking("@@", "@@", name).split("@@")[1]
    closes = between.rstrip(" ")  # the answer's first token begins with its space
    return ForeignStyle(tags[0], opens_answer=re.escape(tags[1]), markup="", closes_thinking=closes)


def style_in(text: str) -> str:
    """Returns the style in which a text shows thinking, a key of FOREIGN_STYLES; "" if it shows none."""
    for name, style in FOREIGN_STYLES.items():
        if text.lstrip().startswith(style.opens_thinking) or re.search(style.opens_answer, text):
            return name
    if re.search(_BARE, text):
        return "channels"
    if OPENS_THINKING.search(text):
        return "tags"
    return ""


def split_foreign(text: str, style: ForeignStyle, finished: bool) -> ThinkParts:
    """Splits a completion into thinking and response, both stripped; utils.split_thinking does so for our
    formats.

    Thinking that is opened, in whatever style, and not closed in this one has no response. The status is
    never `no_open` or `nested`.
    """
    thinking = ""
    response = text  # if it answered without thinking
    answers = list(re.finditer(style.opens_answer, text))
    if answers:
        thinking = text[: answers[-1].start()]
        response = text[answers[-1].end() :]
    never_closed = OPENS_THINKING.search(response)
    if never_closed:
        thinking += response
        response = ""

    thinking = re.sub(style.markup, "\n", thinking).strip()
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


def split_answer(text: str, format_name: str, finished: bool = True) -> ThinkParts:
    """Splits a completion into thinking and response, both stripped; `format_name` is a key of THINK_FORMATS or
    FOREIGN_STYLES."""
    if format_name in FOREIGN_STYLES:
        return split_foreign(text, FOREIGN_STYLES[format_name], finished)
    return split_thinking(text, format_name, finished)


def answer_shows_response(text: str, format_name: str) -> bool:
    """Returns whether a completion has the tag after which its response begins."""
    if format_name in FOREIGN_STYLES:
        return re.search(FOREIGN_STYLES[format_name].opens_answer, text) is not None
    return shows_response(text, format_name)
