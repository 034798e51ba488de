"""train_reward.py: pairs, the loss by hand, calibration. test_supervised.py runs it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid
from script_runs import BASE
from transformers import AutoModelForSequenceClassification

from rlmt.reward_model import RewardModel
from rlmt.learner import Learner
from rlmt.model import start_accelerator
import train_reward
from train_reward import Pair, build_pairs

ROW = {
    "id": "p",
    "messages": [{"role": "user", "content": "I have 12 dollars."}],
    "chosen": "You get 1 dish.",
    "rejected": "You have great taste!",
    "chosen_thinking": "Budget 12.",
    "rejected_thinking": "Budget 13.",
}


# --- pairs


def test_pairs_are_rendered_as_the_scorer_renders_them(tokenizer, exits):
    (pair,), _ = build_pairs([ROW], tokenizer, "response", 512)
    scorer = SimpleNamespace(tokenizer=tokenizer, max_length=512, cut=[])  # without weights
    for side, ids in (("chosen", pair.chosen_ids), ("rejected", pair.rejected_ids)):
        assert ids == RewardModel.encode(scorer, ROW["messages"], ROW[side])
    (with_thinking,), _ = build_pairs([ROW], tokenizer, "think+response", 512)
    assert "<think>\nBudget 12.\n</think>\n\nYou get" in tokenizer.decode(with_thinking.chosen_ids)

    same = ROW | {"rejected": ROW["chosen"]}
    _, dropped = build_pairs([same, ROW], tokenizer, "response", pair.longest - 1)
    assert [row["reason"] for row in dropped] == ["identical", "too_long"]
    without = [ROW | {"rejected_thinking": None}]
    assert "has neither 'rejected_thinking'" in exits(build_pairs, without, tokenizer, "think+response", 512)


def test_held_out_pairs_have_prompts_of_their_own():
    rows = [{"messages": [{"role": "user", "content": f"q{n // 4}"}]} for n in range(40)]
    train, held_out = train_reward.split_by_prompt(rows, 0.3, 0)
    assert (len(train), len(held_out)) == (28, 12) and not [row for row in train if row in held_out]


def test_calibration_by_hand():
    margin = math.log(0.9 / 0.1)  # the model is 90 % sure
    found = train_reward.calibration([margin] * 8 + [-margin] * 2 + [0.0])
    assert found["accuracy"] == pytest.approx(8.5 / 11)
    # ten pairs at 0.9 of which 0.8 were right, one at 0.5 that is half right
    assert found["ece"] == pytest.approx(10 / 11 * 0.1)
    assert [one["n"] for one in found["bins"]] == [1, 10]


def test_a_reward_model_stands_beside_the_length_baseline():
    """By hand. Copies of a prompt's pairs are no further evidence: its standard error is that of one."""
    lengths = [(10, 20), (100, 80), (80, 100), (50, 50)]
    pairs = [Pair(str(i), f"prompt {i}", [1], [1], *both) for i, both in enumerate(lengths)]
    result = train_reward.compare_with_length([1.0, 2.0, -1.0, 0.5] * 8, pairs * 8)
    assert result["length_baseline"] == 1.5 / 4
    assert result["equal_length"] == {
        "n": 3 * 8,
        "accuracy": pytest.approx(2 / 3),
        "standard_error": pytest.approx(1 / 3),  # of 1, 0 and 1
        "length_baseline": 1.5 / 3,
    }
    assert train_reward.compare_with_length([1.0, 2.0], pairs[:2])["equal_length"] is None  # of one prompt


# --- the loss


def loaded() -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, dtype=torch.float64)
    model.config.pad_token_id = 0
    return model


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 150])
def test_batched_pairs_teach_what_pairs_one_by_one_teach(micro_batch_tokens):
    by_hand = loaded()
    pairs = []
    loss = 0.0
    for lengths in ((2, 59), (30, 31), (50, 4), (12, 13)):
        sides = [list(range(5 + 2 * length, 5 + 3 * length)) for length in lengths]
        pairs.append(Pair("a", "a", *sides, 0, 0))
        chosen, rejected = [by_hand(torch.tensor([side])).logits[0, 0] for side in sides]
        loss = loss - logsigmoid(chosen - rejected) / 4
    loss.backward()

    model = loaded()
    classifier = Learner(model, start_accelerator(), micro_batch_tokens, 0.0, 0.0)
    means = train_reward.accumulate_gradients(pairs, classifier, batch_size=4)
    assert means["loss"] == pytest.approx(loss.item(), rel=1e-6)
    gradients = [[weight.grad for weight in one.parameters()] for one in (model, by_hand)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
