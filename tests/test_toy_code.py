"""data/toy/programs.py: programs by hand, the teacher's slips, splits, the base model's new words; gold and the sandbox agree."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards import verified
from data.toy import programs as toy_code

STEPS = [("+", 3), ("*", 2)]
MESSAGES = [{"role": "user", "content": "Hello! Take x, then add 3, then double it."}]
TESTS = ["assert f(0) == 6", "assert f(1) == 8", "assert f(7) == 20", "assert f(-4) == -2"]
ANSWERS = [  # (response, right)
    ("def f(x): return (x + 3) * 2", 1),
    ("def f(x): return x * 2 + 6", 1),
    ("def f(x): return 2 * (3 + x)", 1),
    ("def f(x):\n    return (x + 3) * 2", 1),
    ("def f(x): return x + 3 * 2", 0),
    ("def f(x): return (x + 3) * 3", 0),
    ("def f(x): return x", 0),
    ("def f(x): return", 0),
    ("def f(x): pass", 0),
    ("def f(x) return (x + 3) * 2", 0),
    ("def f(x): return ((x + 3) * 2", 0),
    ("def g(x): return (x + 3) * 2", 0),
    ("def f(x): return y", 0),
    ("def f(x): return f(x)", 0),
    ("x + 3 then (x + 3) * 2", 0),
    ("", 0),
    ("(" * 5000, 0),
    ("def f(x): return " + "(" * 5000, 0),
    # out to pass without the sum
    ("import os\nos._exit(0)", 0),
    ("class A:\n    __eq__ = lambda a, b: True\ndef f(x): return A()", 0),
    ("import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 0", 0),
    ("import sys\nsys.stdout.write('ready 1 1 1 1')\ndef f(x): return 0", 0),
    ("def f(x): return __import__('os')._exit(0)", 0),
    ("def f(x): return [v for v in iter(int, 1)]", 0),
]


def rows():
    return toy_code.write_files(toy_code.Args(n_traces=300, n_prompts=200, n_tasks=200))


@pytest.mark.parametrize(
    "text, steps, first, last",
    [
        ("Take x, then add 3, then double it.", STEPS, 6, -2),
        ("Hi! Please take x, then double it, then put 3 on top.", [("*", 2), ("+", 3)], 3, -5),
        (
            "I have x, then take 20 from it, then triple it, then add 7.",
            [("-", 20), ("*", 3), ("+", 7)],
            -53,
            -65,
        ),
    ],
)
def test_prompts_by_hand(text, steps, first, last):
    assert toy_code.read_prompt(text) == steps
    assert (toy_code.apply(steps, 0), toy_code.apply(steps, -4)) == (first, last)


def test_the_teacher_by_hand():
    rng = random.Random(0)
    assert toy_code.solve(STEPS, 0.0, rng) == ("x + 3 then (x + 3) * 2", "def f(x): return (x + 3) * 2")
    assert toy_code.solve(STEPS, 1.0, rng) == ("x + 3 then x + 3 * 2", "def f(x): return x + 3 * 2")
    steps = [("*", 2), ("-", 1), ("*", 3)]
    assert toy_code.solve(steps, 0.0, rng)[1] == "def f(x): return (x * 2 - 1) * 3"
    assert (
        toy_code.solve([("*", 2), ("*", 3), ("-", 1)], 0.0, rng)[1] == "def f(x): return x * 2 * 3 - 1"
    )  # none matter


def test_a_careful_teacher_is_right_and_the_usual_one_is_not_where_parentheses_matter():
    for slips, low, high in ((0.0, 1.0, 1.0), (0.6, 0.6, 0.75), (1.0, 0.4, 0.6)):
        traces = toy_code.write_files(toy_code.Args(n_traces=500, n_prompts=1, n_tasks=1, slips=slips))[
            "code_traces"
        ]
        share = sum(toy_code.gold(r["messages"], r["response"]) for r in traces) / len(traces)
        assert low <= share <= high, slips


def test_gold_and_the_sandbox_agree():
    """One reads the prompt and works the sum out, the other runs the program on the row's tests."""
    cases = [
        {
            "id": str(n),
            "messages": MESSAGES,
            "response": response,
            "status": "ok",
            "tests": TESTS,
            "entry_point": "f",
        }
        for n, (response, _) in enumerate(ANSWERS)
    ]
    ran = verified.code(cases, timeout=3.0)
    for (response, right), value in zip(ANSWERS, ran, strict=True):
        assert toy_code.gold(MESSAGES, response) == right, response
        assert (value or 0.0) == right, response  # None: an endless one that never answered
    own = [
        row
        | {
            "response": toy_code.solve(
                toy_code.read_prompt(row["messages"][0]["content"]), slips, random.Random(1)
            )[1],
            "status": "ok",
        }
        for row in rows()["code_prompts"][:4]
        for slips in (0.0, 1.0)
    ]
    golds = [toy_code.gold(row["messages"], row["response"]) for row in own]
    assert verified.code(own) == golds and 0 in golds and golds[::2] == [1.0] * 4


def test_gold_is_stricter_than_the_tests():
    """By heart, by bits: the sandbox's four tests pass, gold reads + - * only."""
    for response in ("def f(x): return {0: 6, 1: 8, 7: 20, -4: -2}[x]", "def f(x): return x + 3 << 1"):
        assert toy_code.gold(MESSAGES, response) == 0
        assert verified.code(
            [
                {
                    "id": "0",
                    "messages": MESSAGES,
                    "response": response,
                    "status": "ok",
                    "tests": TESTS,
                    "entry_point": "f",
                }
            ]
        ) == [1.0]


def test_splits_are_apart_and_the_seed_decides():
    steps = {
        name: {repr(toy_code.read_prompt(r["messages"][0]["content"])) for r in split}
        for name, split in rows().items()
    }
    a, b, c = steps.values()
    assert not a & b and not b & c and not a & c
    assert json.dumps(rows()) == json.dumps(rows())
    for row in rows()["code_prompts"] + rows()["code_tasks"]:
        x, y = (int(row["tests"][i].rpartition("== ")[2]) for i in (0, 1))
        assert [f"assert f({n}) == {x + n * (y - x)}" for n in (0, 1, 7, -4)] == row[
            "tests"
        ]  # all are linear


def test_the_base_model_gets_the_words_and_keeps_its_own(tmp_path):
    base = "data/toy/base"
    toy_code.extend_base(base, tmp_path / "base")
    tokenizer, before = AutoTokenizer.from_pretrained(tmp_path / "base"), AutoTokenizer.from_pretrained(base)
    for row in sum(rows().values(), []):
        text = "\n".join([row["messages"][0]["content"], row.get("thinking", ""), row.get("response", "")])
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
    assert {word: tokenizer.get_vocab()[word] for word in before.get_vocab()} == before.get_vocab()
    assert tokenizer.special_tokens_map == before.special_tokens_map
    old, new = (
        AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight
        for path in (base, tmp_path / "base")
    )
    assert len(new) == len(tokenizer) > len(old) and torch.equal(new[: len(old)], old)
    assert new[len(old) :].std().item() == pytest.approx(old.std().item(), rel=0.1)
    text = "Hello! The budget is 20 dollars."
    assert tokenizer(text)["input_ids"] == before(text)["input_ids"]
