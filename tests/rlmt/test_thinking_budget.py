"""Tests rlmt/sampler.py by itself, and through an evaluation with a tiny model that has learned to think.

test_rollout.py compares vLLM and transformers with an argmax; test_foreign.py has the models of other
families.
"""

import json
import sys

import pytest
import torch
from conftest import ROOT, learn_by_heart, tiny_config
from transformers import LlamaForCausalLM

import eval_benchmarks
from rlmt import run as runs
from rlmt import chat as templates
import utils
from rlmt.sampler import ThinkingBudget
from rlmt import chat
from rlmt import data as rlmt_data

# --- 1. the rule


def of(tokenizer, n_tokens: int, opening: str = "") -> ThinkingBudget:
    """Returns a budget of our format `think`, whose tags `n_tokens` count too."""
    closing = tokenizer("\n</think>\n\n", add_special_tokens=False)["input_ids"]
    return ThinkingBudget(n_tokens, "<think>", "</think>", closing, opening)


# a tag is several tokens, one token, or bytes
@pytest.mark.parametrize("family", ["llama_base", "qwen3", "gpt2"])
def test_closes_open_thinking_only(load, family):
    tokenizer = load(family)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def closing_after(text: str, opening: str = "") -> str:
        """Returns what closes a completion that has used its budget with `text`, whatever it says next."""
        budget = of(tokenizer, len(encode(text)), opening)
        closing = budget.closing_after(encode(text) + encode(" more </think>"), tokenizer)
        return tokenizer.decode(closing)

    whole = "\n</think>\n\n"
    assert closing_after("<think>\nWhat") == whole
    assert closing_after("What", opening="<think>\n") == whole
    assert closing_after("<think>\nWhat\n") == whole[1:]  # it has begun to close it
    assert closing_after("<think>\nWhat\n</think>\n\nAll.") == ""
    assert closing_after("What", opening="<think>\n\n</think>\n\n") == ""  # the template has switched it off
    assert closing_after("What") == ""  # it does not think


# --- 2. by the command

THOUGHT = "<think>\nA user asks a question, and the assistant\n</think>\n\nSo it is\n#### 4"
ASKED = "How much is 2+2?"


@pytest.fixture(scope="module")
def thinker(tokenizer_folders, tmp_path_factory) -> str:
    """Saves a model that has learned THOUGHT by heart, and to answer however short its thinking is."""
    folder = tmp_path_factory.mktemp("thinker")
    tokenizer = chat.load_tokenizer(str(tokenizer_folders["llama_base"]))
    templates.prepare_tokenizer(tokenizer, "think")
    messages = eval_benchmarks.messages_of(eval_benchmarks.Args(name="gsm8k"), {"question": ASKED})
    prompt = templates.encode_prompt(tokenizer, messages)

    parts = utils.split_thinking(THOUGHT)
    words = parts.thinking.split(" ")
    rows = []
    for n_words in range(1, len(words) + 1):
        text = utils.join_thinking(" ".join(words[:n_words]), parts.response, "think")
        completion = templates.encode_completion(tokenizer, text)
        n_unlearned = len(prompt)
        if n_words < len(words):  # only the answer: where it stops thinking is not learned
            thinking = text.partition("</think>")[0]
            n_unlearned += len(tokenizer(thinking, add_special_tokens=False)["input_ids"]) + 1
        rows.append((prompt + completion, n_unlearned))

    torch.manual_seed(0)
    # vLLM on a CPU wants heads of 32
    model = LlamaForCausalLM(tiny_config(tokenizer, hidden_size=64, initializer_range=0.1))
    assert learn_by_heart(model, rows, tokenizer.pad_token_id, rate=5e-3, goal=0.005) < 0.05
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "think_format.json").write_text(json.dumps(tokenizer.trained_as))
    return str(folder)


@pytest.fixture
def evaluate(thinker, monkeypatch, tmp_path):
    """evaluate(*flags): rows and summary of gsm8k, with a single task, by eval_benchmarks.py in this
    process."""
    monkeypatch.chdir(ROOT)
    data = tmp_path / "test.jsonl"
    data.write_text(json.dumps({"question": ASKED, "answer": "#### 4"}) + "\n")

    def start(*flags, out: str = "run") -> tuple[list[dict], dict]:
        words = ["gsm8k", "--model", thinker, "--data", data, "--out", tmp_path / out, "--max-tokens", 90]
        monkeypatch.setattr(sys, "argv", ["eval_benchmarks.py", *map(str, [*words, *flags])])
        eval_benchmarks.main(runs.parse_args(eval_benchmarks.Args, {}))
        rows = rlmt_data.read_log(tmp_path / out / "generations.jsonl")
        return rows, json.loads((tmp_path / out / "summary.json").read_text())

    return start
