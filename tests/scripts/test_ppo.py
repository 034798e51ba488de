"""train_ppo.py: its functions by hand and against a naive loop, and the critic; test_wiring.py has a step of
its loop, test_grpo.py its clipped loss, and test_resume.py runs it."""

import math

import pytest
import torch
from script_runs import REWARD_MODEL
from updates import stored_completions

from rlmt.model import start_accelerator
import train_ppo

# --- pure functions


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_is_the_double_sum_over_the_policys_tokens(gamma, lam):
    """Padding and a user's turns, at the start, in the middle and at the end, are skipped."""
    torch.manual_seed(0)
    mask = torch.tensor([[1] * 9, [1, 1, 0, 0, 1, 1, 1, 0, 0], [0, 1] * 4 + [0], [0] * 9])
    rewards, values = torch.randn(2, 4, 9)
    expected = torch.zeros(4, 9)
    for row in range(4):
        places = mask[row].nonzero().flatten()
        deltas = rewards[row, places] - values[row, places]
        deltas[:-1] += gamma * values[row, places[1:]]
        for t, place in enumerate(places):
            expected[row, place] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
    advantages, returns = train_ppo.gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values * mask)


def test_value_loss_by_hand():
    """The rollout said 1, the return is 2, the clip is 0.5: values are held within 0.5 to 1.5."""
    values = torch.tensor([1.2, 3.0, 1.8], requires_grad=True)
    loss, is_clipped = train_ppo.value_loss(values, torch.ones(3), torch.full((3,), 2.0), 0.5)
    # 1.2 is not held; 3.0 is worse than held at 1.5; 1.8 is better, so that held at 1.5 counts, without a
    # gradient
    torch.testing.assert_close(loss, torch.tensor([0.32, 0.5, 0.125]))
    assert is_clipped.tolist() == [False, False, True]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.8, 1.0, 0.0]))


# --- one update


def test_a_completion_without_a_reward_teaches_the_critic_nothing():
    """Whatever is said of it. test_rlver.py has its advantages."""
    [completions] = stored_completions(3, 1)
    args = train_ppo.Args(gradient_checkpointing=False)
    critic = train_ppo.load_critic(REWARD_MODEL, args, None, start_accelerator())
    train_ppo.set_values(completions, critic)
    for one, target in zip(completions, (1e6, 0.5, 0.5)):
        one.reward = math.nan if target > 1 else target
        one.returns = [target] * len(one.ids)
    means = train_ppo.accumulate_critic_gradients(completions, critic)
    assert 0 < means["value/loss"] < 10
