"""Tests rewards/scorer.py with the toy's reward model and functions of our own."""

import math

import pytest
import torch

from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import chat as templates
from rlmt.data import write_jsonl
import train_grpo
from rewards.scorer import Scorer

GOOD = "<think>\nBudget 12.\n</think>\n\nYou get 1 dish: {}."
OWN_REWARDS = """
def length(messages, response):
    return len(response)


def known_half(rows):
    return [None if i % 2 else float(i) for i, row in enumerate(rows)]
"""
PROMPT = {"id": "p", "messages": [{"role": "user", "content": "I have 12 dollars."}]}


@pytest.fixture(scope="module")
def accelerator():
    return policy.start_accelerator()


@pytest.fixture
def scorer(accelerator, tokenizer, tmp_path):
    """scorer(**args): a Scorer with these arguments of train_grpo.py; functions of OWN_REWARDS are in
    own.py."""
    (tmp_path / "own.py").write_text(OWN_REWARDS)
    write_jsonl(tmp_path / "prompts.jsonl", [PROMPT])

    def make(**args) -> Scorer:
        args |= {"preset": "toy", "reward_model": "data/toy/reward_model", "think_format": "think"}
        args = train_grpo.Args(prompts=str(tmp_path / "prompts.jsonl"), **args)
        made = Scorer(args, args.rewards, tokenizer, accelerator, 4, args.on_bad_format, args.format_margin)
        made.load(tmp_path)
        return made

    return make


@pytest.fixture
def completions(tokenizer) -> list[rollout.Completion]:
    """Two groups of four; the second and the sixth are malformed, in two ways."""
    dishes = ("steak", "ham", "cod", "tuna", "custard", "lasagna", "bacon", "ribs")
    texts = [GOOD.format(dish) for dish in dishes]
    texts[1] = "You get 1 dish."
    texts[5] = texts[5] + "</think>"
    found = []
    for text in texts:
        sample = rollout.Sample(templates.encode_completion(tokenizer, text), None, True)
        found.append(rollout.read_completion(tokenizer, "think", PROMPT | {"prompt_ids": [5]}, sample))
    assert [c.text for c in found] == texts
    return found


def scores(scorer: Scorer, texts: list[str]) -> list[float]:
    return scorer.reward_model.score([PROMPT["messages"]] * len(texts), texts)


def test_what_a_malformed_completion_gets(scorer, completions, tmp_path):
    texts = [completion.text for completion in completions]
    expected = scores(scorer(), texts)
    golds = [0 if place in (1, 5) else len(completions[place].response) for place in range(8)]
    for on_bad_format in ("score", "null", "floor"):
        gold = f"{tmp_path}/own.py:length"
        made = scorer(on_bad_format=on_bad_format, format_margin=2.0, gold=gold)
        made.set_rewards(completions, None)
        assert [completion.rewards["gold"] for completion in completions] == golds  # as in an evaluation
        for place in (0, 2, 3, 4, 6, 7):
            assert completions[place].reward == pytest.approx(expected[place], abs=1e-5)
            assert completions[place].rewards["preference"] == completions[place].reward
        bad = [completions[1].reward, completions[5].reward]
        if on_bad_format == "score":
            assert bad == pytest.approx([expected[1], expected[5]], abs=1e-5)
        elif on_bad_format == "null":  # the strict mode asks for what opens the response, no more
            null = scores(made, ["[NULL]"])
            assert bad == pytest.approx([null[0], expected[5]], abs=1e-5)
        else:
            groups = ((0, 2, 3), (4, 6, 7))
            floors = [min(completions[place].reward for place in group) - 2.0 for group in groups]
            assert bad == pytest.approx(floors) and completions[1].rewards["preference"] is None
            assert len(made.reward_model.cut) == 6


def test_a_completion_without_a_reward_teaches_nothing(scorer, completions, tmp_path):
    """Every second one has no value: it counts in no mean, and is not the floor's lowest."""
    name = f"{tmp_path}/own.py:known_half"
    made = scorer(rewards=(f"{name}:2", "format:0"), on_bad_format="floor")
    made.set_rewards(completions, None)
    rewards = [completion.reward for completion in completions]
    assert [math.isnan(reward) for reward in rewards] == [False, False, False, True] * 2
    assert rewards[:3] == [0.0, -1.0, 4.0] and rewards[4:7] == [8.0, 7.0, 12.0]
    advantages = train_grpo.group_advantages(torch.tensor(rewards).view(2, 4))
    assert not train_grpo.group_advantages(torch.full((2, 8), -13.37)).any()
    assert advantages[:, 3].tolist() == [0.0, 0.0] and advantages[0].sum().abs() < 1e-5
    assert [completion.row()["missing"] for completion in completions] == [False, False, False, True] * 2
