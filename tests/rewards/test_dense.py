"""Dense rewards by hand; where a step ends; PRIME's formula and its learning."""

import math

import pytest
import torch
from conftest import tiny_config
from updates import stored_completions
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

from rlmt import learner
from rlmt.model import start_accelerator
from rlmt import sampler as rollout

import rewards
import train_grpo
from rewards import dense

# --- advantages and steps


def test_token_advantages_by_hand():
    """Rewards to come: the k-th of a completion against the k-th of the others. test_rlver.py has a loop."""
    values = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    expected = torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, 0.0]])  # at last 2 has nobody to compare with
    for scale, spread in ((False, 1.0), (True, math.sqrt(2 / 3) + 1e-4)):
        found = dense.token_advantages(values, values > 0, 2, scale)
        torch.testing.assert_close(found, expected / spread)


def test_a_step_is_rewarded_on_the_token_that_ends_it(tokenizer):
    """The first step ends within the second token; the rewards are how much the probability rises."""
    text = "I have 12 dollars."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    steps = [(len(tokenizer.decode(ids[:1])) + 1, 0.75), (len(text), 0.5)]
    one = rollout.Completion("i", [], [1], ids, text)
    values, events = dense.ProcessReward(lambda messages, text: steps, 1.0, tokenizer).token_rewards([one])
    assert values[0].tolist() == [0.0, 0.75, *[0.0] * (len(ids) - 3), -0.25] and events.sum() == 2
    assert one.rewards == {"process": 0.5}


# --- PRIME; test_resume.py resumes a run with it, test_rlver.py adds token advantages to those of the outcome


def random_completions(n: int) -> list[rollout.Completion]:
    """Makes completions, every second of which is right."""
    [completions] = stored_completions(n, 1)
    for i, one in enumerate(completions):
        one.correct = float(i % 2)
    completions[0].correct = None
    return completions


def test_prime_is_the_log_ratio_and_learns_what_is_right(tokenizer, tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(tokenizer, initializer_range=0.02)).save_pretrained(tmp_path)
    args = train_grpo.Args(model=str(tmp_path), gradient_checkpointing=False, micro_batch_tokens=200)
    policy = learner.load_policy(args, args.model, None, start_accelerator(), 0.7, has_reference=True)
    part = rewards.Part("prime", 1.0, None, [], {"beta": 0.5, "learning_rate": 1e-2}, "")
    source = dense.ImplicitReward(args, part, None, policy)
    completions = random_completions(8)
    values, events = source.token_rewards(completions)
    assert values.abs().max() < 1e-5 and source.metrics["prime/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert events.sum(1).tolist() == [len(one.ids) for one in completions]

    phi = source.learner
    expected = []
    for one in completions:
        batch = phi.collate([one])
        expected.append(0.5 * (phi.logprobs(batch)[0] - policy.reference_logprobs(batch))[0].detach())
    values, _ = source.token_rewards(completions)
    torch.testing.assert_close(values, pad_sequence(expected, batch_first=True), atol=1e-5, rtol=1e-3)
    assert completions[1].rewards["prime"] == pytest.approx(expected[1].sum().item(), abs=1e-5)
    for _ in range(60):
        source.token_rewards(completions)
    assert source.metrics["prime/accuracy"] == 1.0 and source.metrics["prime/loss"] < 0.1
