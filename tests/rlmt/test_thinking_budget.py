"""Tests where rlmt/sampler.py closes thinking at its budget; test_sampler.py has samplers that do so."""

import pytest

from rlmt.sampler import ThinkingBudget


# a tag is several tokens, one token, or bytes
@pytest.mark.parametrize("family", ["llama_base", "qwen3", "gpt2"])
def test_closes_open_thinking_only(load, family):
    tokenizer = load(family)
    whole = "\n</think>\n\n"

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def closing_after(text: str, opening: str = "") -> str:
        """Returns what closes a completion that has used its budget with `text`, whatever it says next."""
        budget = ThinkingBudget(len(encode(text)), "<think>", "</think>", encode(whole), opening)
        closing = budget.closing_after(encode(text) + encode(" more </think>"), tokenizer)
        return tokenizer.decode(closing)

    assert closing_after("<think>\nWhat") == whole
    assert closing_after("What", opening="<think>\n") == whole
    assert closing_after("<think>\nWhat\n") == whole[1:]  # it has begun to close it
    assert closing_after("<think>\nWhat\n</think>\n\nAll.") == ""
    assert closing_after("What", opening="<think>\n\n</think>\n\n") == ""  # the template has switched it off
    assert closing_after("What") == ""  # it does not think
