"""train_ppo.py: its functions by hand and against a naive loop, the critic, the script; test_wiring.py has a
step of its loop, and test_grpo.py its clipped loss."""

import math
import sys

import pytest
import torch
from launch import DDP, finished
from script_runs import check_same_bits, killed_after, metrics_of, write_prompts
from transformers import AutoTokenizer
from updates import stored_conversations

from rlmt.checkpoint import save_weights
from rlmt.model import start_accelerator
import train_ppo

BASE = "data/toy/base"
REWARD_MODEL = "data/toy/reward_model"


@pytest.fixture(scope="module")
def accelerator():
    return start_accelerator()


# --- pure functions


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_is_the_double_sum_over_the_policys_tokens(gamma, lam):
    """Padding and a user's turns, at the start, in the middle and at the end, are skipped."""
    torch.manual_seed(0)
    rewards = torch.randn(4, 9, dtype=torch.float64)
    values = torch.randn(4, 9, dtype=torch.float64)
    masks = [[1] * 9, [1, 1, 0, 0, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1, 0, 1, 0]]
    mask = torch.tensor([*masks, [0] * 9])  # the last one has no reward
    expected = torch.zeros_like(values)
    for row in range(4):
        places = mask[row].nonzero().flatten().tolist()
        v = [*values[row, places].tolist(), 0.0]
        for t, place in enumerate(places):
            for k in range(t, len(places)):
                delta = rewards[row, places[k]].item() + gamma * v[k + 1] - v[k]
                expected[row, place] += (gamma * lam) ** (k - t) * delta
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


# --- the critic


def test_the_critic_starts_as_asked():
    """From the policy with a new head at zero, or from the reward model with its head."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    args = train_ppo.Args(model=BASE, reward_model=REWARD_MODEL)
    critic = train_ppo.load_critic(train_ppo.find_critic(args, tokenizer), args)
    assert not critic.score.weight.any() and not critic.score.bias.any() and critic.dropout.p == 0
    args.critic = "reward_model"
    assert train_ppo.load_critic(train_ppo.find_critic(args, tokenizer), args).score.weight.any()
    tokenizer.add_tokens(["one more"])
    with pytest.raises(SystemExit):
        train_ppo.find_critic(args, tokenizer)


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_the_adapter_of_a_critic_comes_back_from_a_checkpoint(accelerator, tmp_path, load_in_4bit):
    """The whole head learns with it, and both are saved."""
    args = train_ppo.Args(lora_r=4, load_in_4bit=load_in_4bit, gradient_checkpointing=False)
    critic = train_ppo.load_critic(BASE, args)
    trained = {name: weight for name, weight in critic.named_parameters() if weight.requires_grad}
    assert {"lora" in name or "score.modules_to_save" in name for name in trained} == {True}
    for weight in trained.values():
        weight.data += torch.randn_like(weight)
    save_weights(tmp_path / "critic", critic, accelerator, merge=False)
    again = dict(train_ppo.load_critic(BASE, args, tmp_path / "critic").named_parameters())
    assert any("score" in name for name in trained)
    for name, weight in trained.items():
        assert torch.equal(again[name], weight) and again[name].requires_grad, name


# --- one update


def test_a_completion_without_a_reward_teaches_neither_policy_nor_critic(accelerator):
    completions = stored_conversations()[0]
    args = train_ppo.Args(gradient_checkpointing=False, micro_batch_tokens=300)
    critic = train_ppo.load_critic(REWARD_MODEL, args)
    train_ppo.set_values(critic, completions, 300, 0, accelerator)
    rewards_B_T = train_ppo.token_rewards(completions, [])
    train_ppo.set_advantages(completions, rewards_B_T, 1.0, 1.0, accelerator)
    advantages = []
    for one in completions:
        counts = [is_own and not math.isnan(one.reward) for is_own in one.loss_mask]
        for counts_here, advantage, target in zip(counts, one.advantages, one.returns, strict=True):
            if counts_here:
                advantages.append(advantage)
                assert target == pytest.approx(one.reward, abs=1e-5)
            else:
                assert advantage == target == 0.0
    assert torch.tensor(advantages).mean().item() == pytest.approx(0, abs=1e-5)
    assert torch.tensor(advantages).var().item() == pytest.approx(1, abs=1e-4)

    for one in completions:
        if math.isnan(one.reward):  # whatever the critic says of it
            one.returns = [1e6] * len(one.ids)
    means = train_ppo.accumulate_critic_gradients(completions, critic, args, 0, accelerator)
    assert 0 < means["value/loss"] < 10


# --- the script


def test_two_processes_resume_with_the_same_bits(tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    words = [sys.executable, *DDP, "train_ppo.py", "--preset", "toy", "--model", BASE]
    words += ["--think-format", "plain", "--prompts", str(prompts), "--prompts-per-step", "8", "--steps", "2"]
    words += ["--max-completion-tokens", "24", "--save-steps", "1", "--updates-per-rollout", "2", "--out"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finished([*words, str(whole)])
    killed_after(1, whole, broken)
    assert f"resumes from {broken}/checkpoint-1" in finished([*words, str(broken), "--resume"])
    check_same_bits(whole, broken)
    for metrics in metrics_of(whole):  # those of the second step depend on the critic and its optimizer
        assert all(map(math.isfinite, metrics.values())) and metrics["value/loss"] > 0
