"""Models that were trained elsewhere are evaluated as they ship: their chat template, ends of turn and way of
thinking.

The chat templates are the families' own texts, as the installed TRL keeps them byte by byte. Tokenizers and
models are tiny ones, built here, with the tokens that those templates write.
"""

from pathlib import Path

import pytest
from conftest import CHATML, LLAMA, build_tokenizer
from transformers import AutoTokenizer

import eval_benchmarks
from rlmt import chat as templates
from benchmarks.shared import judged_part
from rlmt.foreign import FOREIGN_STYLES, split_answer
import trl
from benchmarks.shipped import use_as_shipped
from benchmarks.tested_model import TestedModel

SHIPPED = Path(trl.__file__).parent / "chat_templates"
R1 = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
GPT_OSS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"]
GEMMA = ["<pad>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"]
TOKENS = {  # special tokens, other tokens, attributes: as the values of conftest.FAMILIES
    "qwen": (CHATML, ["<think>", "</think>"], {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "r1": (R1, ["<think>", "</think>"], {"bos_token": R1[0], "eos_token": R1[1], "pad_token": R1[1]}),
    "gpt_oss": (GPT_OSS, [], {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}),
    "llama": (LLAMA, [], {"bos_token": LLAMA[0], "eos_token": "<|eot_id|>"}),
    "gemma": (GEMMA, [], {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>"}),
}
# tokens, arguments of the template, how thinking is read, what the template opens
CASES = {
    "qwen3": ("qwen", {}, "tags", ""),
    "qwen3 without thinking": ("qwen", {"enable_thinking": False}, "tags", "<think>\n\n</think>\n\n"),
    "qwen3_instruct_2507": ("qwen", {}, "plain", ""),
    "qwen3_5_think": ("qwen", {}, "tags", "<think>\n"),
    "qwen3_5_nothink": ("qwen", {}, "tags", "<think>\n\n</think>\n\n"),
    "qwen2_5": ("qwen", {}, "plain", ""),
    "nemotron_3_nano": ("qwen", {}, "tags", "<think>\n"),
    "glm4moe": ("qwen", {}, "tags", ""),
    "deepseek_r1_distill": ("r1", {}, "tags", "<think>\n"),
    "gptoss": ("gpt_oss", {"reasoning_effort": "high"}, "channels", ""),
    "llama3": ("llama", {}, "plain", ""),
    "gemma4": ("gemma", {"enable_thinking": True}, "gemma", ""),
}
USER = {"role": "user", "content": "What is 2+2 ?"}
CHATS = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "three turns": [
        USER,
        {"role": "assistant", "content": "It 's 4 ."},
        {"role": "user", "content": "Thanks!"},
    ],
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    """Folders of tokenizers with shipped chat templates, by the name of the case."""
    made = {}
    for case, (tokens, _, _, _) in CASES.items():
        template = (SHIPPED / f"{case.split()[0]}.jinja").read_text()
        folder = tmp_path_factory.mktemp("foreign")
        build_tokenizer((*TOKENS[tokens], template), folder)
        made[case] = str(folder)
    return made


# --- 1. prompts


@pytest.mark.parametrize("case", CASES)
def test_a_foreign_model_gets_the_prompt_that_it_ships_with(folders, case):
    _, template_args, think_format, opening = CASES[case]
    tokenizer = templates.load_tokenizer(folders[case])
    use_as_shipped(tokenizer, "auto", "auto", template_args)
    assert (tokenizer.think_format, tokenizer.opening) == (think_format, opening)

    shipped = AutoTokenizer.from_pretrained(folders[case])
    for chat in CHATS.values():
        expected = shipped.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, **template_args
        )
        assert templates.encode_prompt(tokenizer, chat) == expected
    prompt = tokenizer.decode(templates.encode_prompt(tokenizer, [USER]))
    assert prompt.endswith(opening)


# --- 2. completions

FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
# text, whether it is finished, status, thinking, response
COMPLETIONS = {
    "tags": [
        ("<think>\nz\n</think>\n\ny", True, "ok", "z", "y"),
        ("z\n</think>\n\ny", True, "ok", "z", "y"),  # nobody wrote the opening tag
        ("<think>\n\n</think>\n\ny", True, "ok", "", "y"),
        ("y", True, "ok", "", "y"),  # it may answer without thinking
        ("y with a <think> in it", True, "ok", "", "y with a <think> in it"),
        ("<think> a </think> b </think> y", True, "ok", "a \n b", "y"),  # as the families' templates cut it
        ("<think> z </think> y", False, "truncated", "z", "y"),
        ("<think> z", False, "truncated", "z", ""),
        ("y", False, "truncated", "", "y"),
        ("<think> z", True, "no_close", "z", ""),
        ("Sure.\n<think> z", True, "no_close", "Sure. \nz", ""),
        ("<think> z </think>", True, "empty_response", "z", ""),
        ("", True, "empty_response", "", ""),
    ],
    "channels": [
        (f"{ANALYSIS}z<|end|>{FINAL}y", True, "ok", "z", "y"),
        (f"{ANALYSIS}z<|end|>{FINAL}y<|end|>", True, "ok", "z", "y"),
        ("<|channel|>final<|message|>y", True, "ok", "", "y"),
        (
            f"{ANALYSIS}z<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{{}}",
            True,
            "ok",
            "z",
            "{}",
        ),
        (
            f"{ANALYSIS}z<|end|><|start|>assistant<|channel|>commentary<|message|>c<|end|>{FINAL}y",
            True,
            "ok",
            "z\n\n\nc",
            "y",
        ),
        (f"{ANALYSIS}z<|end|>{FINAL}y", False, "truncated", "z", "y"),
        (f"{ANALYSIS}z", False, "truncated", "z", ""),
        (f"{ANALYSIS}z<|end|><|start|>assistant<|channel|>fin", False, "truncated", "z", ""),
        (
            f"{ANALYSIS}z<|end|><|start|>assistant to=x<|channel|>commentary json<|message|>{{}}",
            True,
            "no_close",
            "z {}",
            "",
        ),
        (f"{ANALYSIS}z<|end|>{FINAL}", True, "empty_response", "z", ""),
    ],
    "gemma": [
        ("<|channel>thought\nz<channel|>y", True, "ok", "z", "y"),
        ("<|channel>thought\n<channel|>y", True, "ok", "", "y"),
        ("y", True, "ok", "", "y"),
        ("<|channel>thought\nz", False, "truncated", "z", ""),
        ("<|channel>thought\nz", True, "no_close", "z", ""),
        ("<|channel>thought\nz<channel|>", True, "empty_response", "z", ""),
    ],
}


def model_in(folder: str, **flags) -> TestedModel:
    return TestedModel(eval_benchmarks.Args(name="ifeval", model=folder, **flags))


@pytest.mark.parametrize("style", COMPLETIONS)
def test_thinking_of_a_foreign_style_is_split_off(style):
    assert set(COMPLETIONS) == set(FOREIGN_STYLES)
    for text, finished, status, thinking, response in COMPLETIONS[style]:
        parts = split_answer(text, style, finished)
        found = (parts.status, parts.response, parts.thinking.split(), parts.thinking[:1])
        assert found == (status, response, thinking.split(), thinking[:1]), text
        judged = judged_part({"status": parts.status, "response": parts.response})
        assert judged == response and "<|" not in judged


def test_what_a_template_opens_belongs_to_the_turn(folders):
    model = model_in(folders["deepseek_r1_distill"])
    assert model.whole_turn("z </think> y", True) == "<think>\nz </think> y"
    assert model.whole_turn("<think>\nz </think> y", True) == "<think>\nz </think> y"
    assert model_in(folders["qwen3"]).whole_turn("<think> z", False) == "<think> z"


def test_thinking_that_no_template_announces_ends_the_run(folders, exits):
    model = model_in(folders["qwen2_5"])
    model.check_plain("y, with <think> in it, in the final analysis")
    texts = {
        "tags": [
            "z </think> y",
            "<think> cut",
            "Sure. <thought> cut",
            "[THINK]z[/THINK]y",
            "<seed:think>z</seed:think>y",
        ],
        "channels": [
            f"{ANALYSIS}z{FINAL}y",
            f"{ANALYSIS}cut",
            "analysisWe cut",
            "analysisI z.assistantfinaly",
        ],
        "gemma": ["<|channel>z<channel|>y", "<|channel>thought\ncut"],
    }
    for style, shown in texts.items():
        for text in shown:
            assert f"--think-format {style}" in exits(model.check_plain, text)
            assert split_answer(text, style).response == ("" if "cut" in text else "y")
    model_in(folders["qwen2_5"], think_format="plain").check_plain("z </think> y")
    model_in(folders["qwen3"]).check_plain("z </think> y")
