"""utils.py, rlmt/chat.py: the think-format parser, a format that a user adds, chat templates, ids of
prompts."""

import random
import re
import shutil

import pytest

from rlmt import chat as templates, checkpoint, sampler as rollout
import utils
from rlmt.chat import encode_completion, encode_prompt, prepare_tokenizer
from utils import join_thinking, split_thinking

STATUSES = {"ok", "no_open", "no_close", "nested", "empty_response", "truncated"}
FORMATS = list(utils.THINK_FORMATS)

# --- 1. the think format

THINK = [  # (text, finished, status, thinking, response)
    ("<think>z</think>y", True, "ok", "z", "y"),
    (" \n<think> z </think> y \t\n", True, "ok", "z", "y"),
    ("<think></think>y", True, "ok", "", "y"),  # no thought is a thought of length 0; SFT drops such rows
    ("<think>z</think> \n\t\u2003", True, "empty_response", "z", ""),
    ("Sure! <think>z</think>y", True, "no_open", "", "y"),
    ("z</think>y", True, "no_open", "", "y"),
    ("</think>z<think>y", True, "no_open", "", "z<think>y"),  # swapped
    ("<think>z", True, "no_close", "z", ""),
    ("<thin", True, "no_open", "", ""),
    # almost tags
    ("<THINK>z</THINK>y", True, "no_open", "", ""),
    ('<think lang="en">z</think>y', True, "no_open", "", "y"),
    ("<think>z</think >y", True, "no_close", "z</think >y", ""),
    ("<<think>>z<</think>>y", True, "no_open", "", ">y"),
    # twice
    ("<think>a<think>b</think>y", True, "nested", "a<think>b", "y"),
    ("<think>a</think>b</think>y", True, "nested", "a", "y"),
    ("<think>z</think>Write `<think>` first.", True, "nested", "z", "Write `<think>` first."),
    # tags of other formats, control tokens and odd characters are text
    ("<think>\u200b</think>\u200b", True, "ok", "\u200b", "\u200b"),  # zero-width space is a character
    ("<think>\0</think>\0y\0", True, "ok", "\0", "\0y\0"),
    # cut off
    ("<think>z</think>y", False, "truncated", "z", "y"),
    ("\n<th", False, "truncated", "", ""),
    ("z</think>y", False, "no_open", "", "y"),
]
PLAIN = [
    ("y", True, "ok", "", "y"),
    ("<think>z</think>y", True, "ok", "", "<think>z</think>y"),
    ("", True, "empty_response", "", ""),
    ("y", False, "truncated", "", "y"),
    ("", False, "truncated", "", ""),
]
ZERO_PLAIN = [
    ("<response>y", True, "no_close", "", "y"),
    (" <response> y </response> ", True, "ok", "", "y"),
    ("<response>y</response>\nUser: <response>x</response>", True, "ok", "", "y"),
    ("<response><think>z</think>y</response>", True, "ok", "", "<think>z</think>y"),
    ("<response> \n</response>", False, "empty_response", "", ""),
    ("<response>y</respon", False, "truncated", "", "y</respon"),
    ("", True, "no_open", "", ""),
    ("Sure: <response>y</response>", True, "no_open", "", "y"),
    ("<think>z</think><response>y</response>", True, "no_open", "", "y"),
    ("<response>a<response>b</response>", True, "nested", "", "b"),
]
ZERO_THINK = [
    (" <think> z </think>\n<response> y </response>\n", True, "ok", "z", "y"),
    ("<think>z</think><response>y</response> more </think>", True, "ok", "z", "y"),
    ("<think>z</think><response>y</response>", False, "ok", "z", "y"),
    ("<think>z</think><response></response>", True, "empty_response", "z", ""),
    ("<think>z</think> so <response>y</response>", True, "no_open", "z", "y"),
    ("<response>y</response><think>z</think>", True, "no_open", "", "y"),  # swapped
    ("", True, "no_open", "", ""),
    ("<think>z<response>y</response>", True, "no_close", "z<response>y</response>", "y"),
    ("<think>a<response></think><response>y</response>", True, "nested", "a<response>", "y"),
    ("<think>z</think><response>a<response>b</response>", True, "nested", "z", "b"),
    ("<think>z</think><respo", False, "truncated", "z", ""),
    ("<think>z</think><response>y</respo", False, "truncated", "z", "y</respo"),
    ("<think>put it in <response> tags", False, "truncated", "put it in <response> tags", ""),  # thinking
    ("", False, "truncated", "", ""),
]
CASES = {"think": THINK, "plain": PLAIN, "zero_plain": ZERO_PLAIN, "zero_think": ZERO_THINK}


@pytest.mark.parametrize("think_format", CASES)
def test_split_thinking(think_format):
    met = set()
    for text, finished, status, thinking, response in CASES[think_format]:
        found = split_thinking(text, think_format, finished)
        assert found == (thinking, response, status), (text, finished)
        met.add(status)
    assert met == STATUSES or (think_format == "plain" and met == {"ok", "empty_response", "truncated"})


# --- 2. random texts against a grammar and the released code

PIECES = [
    *[*utils.TAGS] * 3,
    *[tag.upper() for tag in utils.TAGS],
    *[tag[:-1] for tag in utils.TAGS],
    *["", "why so", "```", "<|im_end|>", *" \nz<>/\0\u200b\U0001f914\x1f\u2028"],
]


def is_well_formed(text: str, think_format: str, finished: bool) -> bool:
    """Tells by a regular expression whether a completion is well formed: no tag of the format inside its
    parts."""
    if "zero" in think_format and "</response>" in text:
        text = text[: text.index("</response>") + len("</response>")]
        finished = True
    tags = "|".join(utils.THINK_FORMATS[think_format].tags)
    words = rf"(?:(?!{tags}).)*" if tags else ".*"
    answer = rf"\s*(?=\S){words}"
    tagged_answer = rf"<response>(?!\s*</response>){words}</response>"
    grammar = {
        "think": rf"\s*<think>{words}</think>{answer}",
        "plain": answer,
        "zero_plain": rf"\s*{tagged_answer}",
        "zero_think": rf"\s*<think>{words}</think>\s*{tagged_answer}",
    }
    return finished and re.fullmatch(grammar[think_format], text, re.DOTALL) is not None


def released_reading(text: str, opening: str, closing: str) -> str:
    """Follows the rule of the released training code step by step, for one pair of delimiters."""
    behind_opening = text.find(opening)
    if behind_opening >= 0:
        text = text[behind_opening + len(opening) :].lstrip()
    before_closing = text.find(closing) if closing else -1
    if before_closing >= 0:
        text = text[:before_closing].rstrip()
    return text


DELIMITERS = {"think": ("</think>", ""), "plain": ("", "")}
DELIMITERS |= dict.fromkeys(["zero_think", "zero_plain"], ("<response>", "</response>"))


def test_random_texts_have_the_status_of_the_grammar_and_the_score_of_the_released_reading():
    rng = random.Random(0)
    seen = set()
    for case in range(5000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(10)))
        if case % 5 == 0:  # a good one, cut or with a piece put into it
            good = join_thinking("z", "y", rng.choice(FORMATS))
            place = rng.randrange(len(good) + 1)
            text = good[:place] + rng.choice(["", rng.choice(PIECES) + good[place:]])
        for think_format in FORMATS:
            scored = utils.response_to_score(text, think_format)
            assert scored == released_reading(text, *DELIMITERS[think_format]).strip(), text
            for finished in (True, False):
                parts = split_thinking(text, think_format, finished)
                well_formed = is_well_formed(text, think_format, finished)
                assert (parts.status == "ok") == well_formed, (text, think_format, finished, parts)
                assert not well_formed or scored == parts.response, text
                seen.add(parts.status)
    assert seen == STATUSES


# --- 3. a format that a user adds: one entry in THINK_FORMATS


@pytest.fixture
def plan_format(monkeypatch) -> str:
    """Adds the format "plan" to THINK_FORMATS, as a user would add one entry in utils.py."""
    entry = utils.ThinkFormat(
        layout="[PLAN] {z} [/PLAN]\n[REPLY] {y} [/REPLY]",
        thinking_tags=("[PLAN]", "[/PLAN]"),
        response_tags=("[REPLY]", "[/REPLY]"),
        instruction="Plan between [PLAN] and [/PLAN], then reply between [REPLY] and [/REPLY].",
    )
    monkeypatch.setitem(utils.THINK_FORMATS, "plan", entry)
    monkeypatch.setattr(utils, "TAGS", (*utils.TAGS, *entry.tags))  # computed when utils is imported
    return "plan"


def test_an_added_format_is_templated_stopped_and_saved(load, plan_format, tokenizer_folders, tmp_path):
    tokenizer = load("qwen25_base")
    prepare_tokenizer(tokenizer, plan_format)
    prompt = tokenizer.decode(encode_prompt(tokenizer, [USER]))
    instruction = utils.THINK_FORMATS[plan_format].instruction
    assert prompt == f"{instruction}\n\nUser: {USER['content']}\n\nAssistant:"

    # sampling ends behind the closing tag of the response, and that is not a truncation
    stop = utils.THINK_FORMATS[plan_format].stop
    written = join_thinking("first", "then", plan_format)
    sampled = tokenizer(written + " User: and so on")["input_ids"]
    ids, finished = rollout.until_end(sampled, tokenizer, tokenizer.stop_ids, stop)
    sample = rollout.Sample(ids, None, finished)
    row = {"id": "r", "messages": [USER], "prompt_ids": [1]}
    completion = rollout.read_completion(tokenizer, plan_format, row, sample)
    assert (completion.thinking, completion.response, completion.status) == ("first", "then", "ok")

    # a checkpoint tells its format, and a script refuses another one
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folders["qwen25_base"], folder)
    checkpoint.save_tokenizer(folder, tokenizer)
    assert templates.read_trained_as(str(folder)) == {"think_format": plan_format}


# --- 4. chat templates

THOUGHT = "<think>\nFirst: 2+2 .\n\n  Then\u00a04 \U0001f914\n</think>\n\nIt 's 4 ."
USER = {"role": "user", "content": "What is 2+2 ?"}
TURNS = [
    USER,
    {"role": "assistant", "content": THOUGHT},
    {"role": "user", "content": "And <b>3+3</b>?"},
    {"role": "assistant", "content": THOUGHT.replace("4", "6")},
    {"role": "user", "content": "Thanks!"},
]
CHATS = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "three turns": TURNS,
}

# family: the template that `auto` chooses, its end of turn, the pad token (None: any)
CHOSEN = {
    "llama_instruct": ("its own", "<|eot_id|>", "<|finetune_right_pad_id|>"),
    "llama_dated": ("llama3", "<|eot_id|>", "<|finetune_right_pad_id|>"),
    "llama_base": ("llama3", "<|eot_id|>", "<|finetune_right_pad_id|>"),
    "llama_old": ("llama3", "<|eot_id|>", "<|reserved_special_token_2|>"),
    "qwen25_instruct": ("its own", "<|im_end|>", "<|endoftext|>"),
    "qwen25_base": ("its own", "<|im_end|>", "<|endoftext|>"),
    "qwen3": ("chatml", "<|im_end|>", "<|endoftext|>"),
    "smollm": ("its own", "<|im_end|>", "<|endoftext|>"),
    "plain": ("plain", "</s>", None),
    "gpt2": ("plain", "<|endoftext|>", None),
}


@pytest.mark.parametrize("family", CHOSEN)
@pytest.mark.parametrize("think_format", ["think", "plain"])
def test_prepare_tokenizer_chooses(load, family, think_format):
    tokenizer = load(family)
    own_template = tokenizer.chat_template
    template, end, pad = CHOSEN[family]
    prepare_tokenizer(tokenizer, think_format)
    expected = own_template if template == "its own" else templates.CHAT_TEMPLATES[template]
    assert tokenizer.chat_template == expected
    assert tokenizer.eos_token == end
    assert pad in (None, tokenizer.pad_token) and not tokenizer.pad_token.isspace()


def test_a_template_that_asks_for_answers_otherwise_than_it_shows_them(load):
    tokenizer = load("qwen25_instruct")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n' }}", "assistant\nSure: ' }}")
    assert "template: chatml;" in prepare_tokenizer(tokenizer, "think")


def test_a_pad_token_that_is_a_word_stays_in_texts(load):
    tokenizer = load("llama_base")
    tokenizer.pad_token = "Hello"
    prepare_tokenizer(tokenizer, "think")
    turns = [{"role": "user", "content": "Hello <|eot_id|>"}]
    assert templates.without_control(tokenizer, turns)[0]["content"] == "Hello "


@pytest.mark.parametrize("think_format", ["think", "zero_think"])
def test_a_warm_start_keeps_the_template_that_it_was_trained_with(load, tmp_path, think_format):
    file = tmp_path / "mine.jinja"
    file.write_text("Mine, with a <think>. " + templates.CHAT_TEMPLATES["chatml"])
    tokenizer = load("qwen25_base")
    tokenizer.own_ends = [7]  # of its generation config
    prepare_tokenizer(tokenizer, think_format, str(file))
    checkpoint.save_tokenizer(tmp_path, tokenizer)
    trained = templates.load_tokenizer(str(tmp_path))
    prepare_tokenizer(trained, think_format)
    assert trained.chat_template == file.read_text()
    assert trained.stop_ids == tokenizer.stop_ids and {7, trained.eos_token_id} <= {*trained.stop_ids}


@pytest.mark.parametrize("family", [*CHOSEN, "r1"])
def test_a_prompt_holds_every_turn_verbatim(load, family):
    for think_format in FORMATS:
        own_instruction = utils.THINK_FORMATS[think_format].instruction
        if family == "r1" and not own_instruction:
            continue  # refused: its template has the opening tag
        tokenizer = load(family)
        prepare_tokenizer(tokenizer, think_format)
        for chat in CHATS.values():
            ids = encode_prompt(tokenizer, chat)
            text = tokenizer.decode(ids)
            assert all(text.count(message["content"]) == 1 for message in chat)
            for entry in utils.THINK_FORMATS.values():
                if entry.instruction:
                    assert text.count(entry.instruction) == (entry.instruction == own_instruction)
            bos = tokenizer.bos_token_id
            # the BOS of smollm opens every turn of its template, that of gpt2 ends every turn
            if bos not in (None, tokenizer.eos_token_id) and tokenizer.bos_token != "<|im_start|>":
                assert ids[0] == bos and ids.count(bos) == 1


@pytest.mark.parametrize("family", CHOSEN)
def test_prompt_and_completion_are_the_rendered_conversation(load, family):
    """SFT trains on the ids that a later turn of the conversation shows, up to the end of the turn."""
    tokenizer = load(family)
    prepare_tokenizer(tokenizer, "think")
    for chat in CHATS.values():
        ids = encode_prompt(tokenizer, chat) + encode_completion(tokenizer, THOUGHT)
        later = [*chat, {"role": "assistant", "content": THOUGHT}, {"role": "user", "content": "Go on."}]
        assert encode_prompt(tokenizer, later)[: len(ids)] == ids
