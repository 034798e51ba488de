"""rewards/references.py: BLEU by hand and against a loop."""

import math
import random
from collections import Counter

import pytest

import rewards
from rlmt.model import start_accelerator
import train_grpo
from rewards.references import METRIC, bleu, score
from test_rewards import row

MAT = "the cat is on the mat"


@pytest.mark.parametrize(
    ("response", "references", "expected"),
    [
        # common / all: 5/6, 3/5, 1/4, 0/3; each + 1
        ("the cat sat on the mat", [MAT], (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25),
        # the second reference adds "sat" and "cat sat"
        ("the cat sat on the mat", [MAT, "A cat sat."], (7 / 7 * 5 / 6 * 2 / 5 * 1 / 4) ** 0.25),
        # 2 words, where the shortest reference has 6: e ** (1 - 6 / 2)
        ("the cat", [MAT], math.exp(-2)),
        ("the cat", [MAT, "the cat is"], math.exp(-0.5)),
        # "the" counts as often as one reference has it: 2/4, then 0/3, 0/2, 0/1
        ("the the the the", [MAT], (3 / 5 * 1 / 4 * 1 / 3 * 1 / 2) ** 0.25 * math.exp(1 - 6 / 4)),
        (MAT, [MAT], 1),
        ("", [MAT], 0),
        (" \n", [MAT], 0),
        # a full stop is a word, a decimal point is not: 5 words
        ("It costs 1.5 dollars.", ["It costs 1.5 dollars."], 1),
    ],
)
def test_by_hand(response, references, expected):
    assert score(response, references) == pytest.approx(expected, abs=1e-12)


def naive(response: list[str], references: list[list[str]]) -> float:
    product = 1.0
    for n in range(1, 5):
        found = Counter(tuple(response[i : i + n]) for i in range(len(response) - n + 1))
        known = Counter()
        for reference in references:
            known |= Counter(tuple(reference[i : i + n]) for i in range(len(reference) - n + 1))
        product *= (sum((found & known).values()) + 1) / (sum(found.values()) + 1)
    shortest = min(map(len, references))
    brevity = 1.0 if len(response) > shortest else math.exp(1 - shortest / len(response))
    return brevity * product**0.25


def test_against_a_loop():
    rng = random.Random(0)
    for _ in range(200):
        texts = [[rng.choice("abcd") for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(2, 4))]
        response, *references = texts
        joined = [" ".join(reference) for reference in references]
        assert score(" ".join(response), joined) == pytest.approx(naive(response, references), abs=1e-12)


def test_words_of_13a():
    assert METRIC.tokenizer('He said "no", 1.5 times (e.g.) - twice.').split() == [
        *["He", "said", '"', "no", '"', ",", "1.5", "times", "(", "e", ".", "g", ".", ")", "-", "twice", "."]
    ]


def test_rows_have_references_or_no_value():
    rows = [row(MAT, references=[MAT]), row(MAT, references={"gpt": MAT, "human": "no"}), row(MAT)]
    rows += [row(MAT, references=[]), row("", references=[MAT])]
    assert bleu(rows) == [1, 1, None, None, 0]
    assert "bleu" in rewards.REWARDS and "bleu" not in rewards.VERIFIERS


def test_a_run_says_to_how_many_prompts_it_applies(capsys):
    asked = {"messages": [{"role": "user", "content": "Where is the cat?"}]}
    prompts = [asked | {"id": "a", "references": [MAT]}, asked | {"id": "b"}]
    args = train_grpo.Args(prompts="p.jsonl", rewards=("bleu:1",), group_size=2)
    rewards.check(args, prompts, start_accelerator())
    assert "reward bleu: weight 1; applies to 1 of 2 prompts" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        rewards.check(args, prompts[1:], start_accelerator())
    assert "no row of p.jsonl has the field 'references'" in capsys.readouterr().err
