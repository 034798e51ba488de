"""Tests rewards/scorer.py with the toy's reward model and functions of our own."""

import dataclasses
import json
import math

import pytest
import torch

from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import chat as templates
import train_grpo
import utils
from rewards.preference import RewardModel
from rewards.scorer import Scorer, text_to_score
from rlmt import chat

GOOD = "<think>\nBudget 12.\n</think>\n\nYou get 1 dish: {}."
OWN_REWARDS = """
def known_half(rows):
    return [None if i % 2 else float(i) for i, row in enumerate(rows)]

def unknown(messages, response):
    return float("nan")
"""


@pytest.fixture(scope="module")
def accelerator():
    return policy.start_accelerator()


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = chat.load_tokenizer("data/toy/base")
    templates.prepare_tokenizer(tokenizer, "think")
    return tokenizer


@pytest.fixture
def scorer(accelerator, tokenizer, tmp_path):
    """scorer(**args): a Scorer with these arguments of train_grpo.py; functions of OWN_REWARDS are in
    own.py."""
    (tmp_path / "own.py").write_text(OWN_REWARDS)
    row = {"id": "p", "messages": [{"role": "user", "content": "I have 12 dollars."}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")

    def make(**args) -> Scorer:
        defaults = {"preset": "toy", "reward_model": "data/toy/reward_model", "think_format": "think"}
        defaults["prompts"] = str(tmp_path / "prompts.jsonl")
        args = train_grpo.Args(**{**defaults, **args})
        return Scorer(args, tokenizer, tmp_path, accelerator)

    return make


@pytest.fixture
def completions(tokenizer) -> list[rollout.Completion]:
    """Two groups of four; the second and the sixth are malformed, in two ways."""
    prompt = {
        "id": "p",
        "messages": [{"role": "user", "content": "I have 12 dollars."}],
        "prompt_ids": [5, 6, 7],
    }
    texts = [
        GOOD.format(fruit) for fruit in ("steak", "ham", "cod", "tuna", "custard", "lasagna", "bacon", "ribs")
    ]
    texts[1] = "You get 1 dish."
    texts[5] = texts[5] + "</think>"
    found = []
    for text in texts:
        sample = rollout.Sample(templates.encode_completion(tokenizer, text), None, True)
        found.append(rollout.read_completion(tokenizer, "think", prompt, sample))
    assert [c.text for c in found] == texts
    assert [c.status == "ok" for c in found] == [True, False, True, True, True, False, True, True]
    return found


def scores(scorer: Scorer, completions: list, texts: list[str]) -> list[float]:
    return scorer.reward_model.score([completion.messages for completion in completions], texts)


def test_what_a_malformed_completion_gets(scorer, completions):
    texts = [completion.text for completion in completions]
    expected = scores(scorer(), completions, texts)
    for on_bad_format in ("score", "null", "floor"):
        made = scorer(on_bad_format=on_bad_format, format_margin=2.0)
        made.set_rewards(completions, 4, None)
        for place in (0, 2, 3, 4, 6, 7):
            assert completions[place].reward == pytest.approx(expected[place], abs=1e-5)
            assert completions[place].rewards["preference"] == completions[place].reward
        bad = [completions[1].reward, completions[5].reward]
        if on_bad_format == "score":
            assert bad == pytest.approx([expected[1], expected[5]], abs=1e-5)
        elif on_bad_format == "null":  # the strict mode asks for what opens the response, no more
            null = scores(made, completions[:1], ["[NULL]"])
            assert bad == pytest.approx([null[0], expected[5]], abs=1e-5)
        else:
            groups = ((0, 2, 3), (4, 6, 7))
            floors = [min(completions[place].reward for place in group) - 2.0 for group in groups]
            assert bad == pytest.approx(floors) and completions[1].rewards["preference"] is None
            assert len(made.reward_model.cut) == 6


@pytest.mark.parametrize(
    "think_format, text, scored",
    [
        ("think", "a", "[NULL]"),
        ("think", "<think>a", "[NULL]"),
        ("think", "<think>a</think>", "<think>a</think>"),
        ("think", "a</think>b</think>c", "a</think>b</think>c"),
        ("zero_think", "<think>a</think>b", "[NULL]"),
        ("zero_think", "<think>a</think><response>b", "[NULL]"),  # opened, but not closed
        ("zero_think", "</response><response>b", "[NULL]"),
        ("zero_think", "<response>b</response>", "<response>b</response>"),
        ("zero_plain", "a<response>b</response>", "a<response>b</response>"),
        ("plain", "", ""),
    ],
)
def test_strict_mode_wants_the_tags_of_the_response(completions, think_format, text, scored):
    status = utils.split_thinking(text, think_format, finished=False).status
    assert status != "ok"
    completion = dataclasses.replace(completions[0], text=text, status=status)
    args = train_grpo.Args(think_format=think_format, on_bad_format="null")
    assert text_to_score(completion, args) == scored


MALFORMED = {  # completion: what the reward model reads of it with --reward-on response
    "think": {
        "<think>\nBudget 12.": "<think>\nBudget 12.",
        "<think>\nBudget 12.\n</think>": "",
        "<think>\nBudget 12.\n</think>\n\nHello</think>\n\nYou get 1 dish.": "Hello</think>\n\nYou get 1 dish.",
    },
    "zero_think": {
        "<think> Budget 12. </think> You get 1 dish.": "<think> Budget 12. </think> You get 1 dish.",
        "Hello <response> You get 1 dish. </response> Budget 12.": "You get 1 dish.",
    },
}


@pytest.mark.parametrize("think_format", MALFORMED)
def test_of_a_malformed_completion_too_the_response_alone_is_scored(scorer, completions, think_format):
    """As released: --reward-on response and --on-bad-format score, from the arguments to the reward."""
    malformed = MALFORMED[think_format]
    found = []
    for text in malformed:
        status = utils.split_thinking(text, think_format).status
        assert status != "ok", text
        found.append(dataclasses.replace(completions[0], text=text, status=status, rewards={}))
    made = scorer(reward_on="response", on_bad_format="score", think_format=think_format)
    made.set_rewards(found, len(found), None)

    reads_everything = RewardModel("data/toy/reward_model", reward_on="think+response")
    messages = [completion.messages for completion in found]
    expected = reads_everything.score(messages, list(malformed.values()))
    assert [completion.reward for completion in found] == pytest.approx(expected, abs=1e-5)
    whole = reads_everything.score(messages, list(malformed))
    for (text, response), score, other in zip(malformed.items(), expected, whole, strict=True):
        assert text == response or abs(score - other) > 1e-3, text  # else the case could not fail


def test_a_completion_without_a_reward_teaches_nothing(scorer, completions, tmp_path):
    """Every second one has no value: it counts in no mean, and is not the floor's lowest."""
    name = f"{tmp_path}/own.py:known_half"
    made = scorer(rewards=(f"{name}:2", "format:0"), on_bad_format="floor")
    made.set_rewards(completions, 4, None)
    rewards = [completion.reward for completion in completions]
    assert [math.isnan(reward) for reward in rewards] == [False, False, False, True] * 2
    assert rewards[:3] == [0.0, -1.0, 4.0] and rewards[4:7] == [8.0, 7.0, 12.0]
    advantages = train_grpo.group_advantages(torch.tensor(rewards).view(2, 4))
    assert advantages[:, 3].tolist() == [0.0, 0.0] and advantages[0].sum().abs() < 1e-5
    assert [completion.row()["missing"] for completion in completions] == [False, False, False, True] * 2
