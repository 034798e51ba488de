"""Updates of GRPO, PPO and DPO on stored completions of unequal lengths; tests/scripts/test_two_processes.py
runs them on one process and on two."""

import math

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlmt.learner import Learner, Policy, deal, load_reference, whole_weights
from rlmt.model import load_trained
from rlmt.run import RunArgs
from rlmt.sampler import Completion
from script_runs import BASE, REWARD_MODEL
import train_dpo
import train_grpo
import train_ppo


def stored_completions(n: int, n_rollouts: int) -> list[list[Completion]]:
    """Makes completions of random tokens, lengths and advantages; the same in every process."""
    generator = np.random.default_rng(0)
    rollouts = []
    for _ in range(n_rollouts):
        completions = []
        for i in range(n):
            n_prompt, n_completion = generator.integers(3, 30), generator.integers(1, 60)
            ids = generator.integers(5, 200, n_prompt + n_completion).tolist()
            completion = Completion(str(i), [], ids[:n_prompt], ids[n_prompt:], "", "", "", "ok", False, 0)
            completion.advantages = [float(generator.normal())] * n_completion
            completions.append(completion)
        rollouts.append(completions)
    return rollouts


def stored_conversations() -> list[list[Completion]]:
    """Makes completions with a user's turn in the middle and a reward; every fifth has none."""
    rollouts = stored_completions(12, 2)
    for completions in rollouts:
        for i, completion in enumerate(completions):
            n = len(completion.ids)
            completion.policy_mask = [0 if n // 3 < t < n // 2 else 1 for t in range(n)]
            completion.reward = math.nan if i % 5 == 4 else math.sin(i)
    return rollouts


def load(accelerator, lora_r: int = 0, has_reference: bool = True) -> Learner:
    torch.manual_seed(0)
    model = Policy(load_trained(BASE, RunArgs(gradient_checkpointing=False, lora_r=lora_r)), 0.9)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # else it would be zero
            weight.data.normal_(std=0.1)
    policy = Learner(model, accelerator, 300, 1e-3, 0.0)
    if has_reference and not lora_r:
        policy.reference = load_reference(BASE, 0.9, accelerator)
    return policy


def norms_of(learner: Learner) -> dict[str, float]:
    """Returns the norm of each whole weight; an adapter is merged."""
    return {name: weight.double().norm().item() for name, weight in whole_weights(learner.model)}


def ppo_updates(accelerator) -> dict:
    """Makes two updates on each of two rollouts; returns metrics and norms of weights."""
    policy = load(accelerator)
    args = train_ppo.Args(micro_batch_tokens=300, gradient_checkpointing=False)
    args.critic_learning_rate, args.weight_decay = 1e-3, 0.0
    critic = train_ppo.load_critic(REWARD_MODEL, args, None, accelerator)
    steps = []
    for completions in stored_conversations():
        own = deal(completions, accelerator)
        train_ppo.set_values(own, critic)
        policy.set_old_logprobs(own)
        policy.set_reference_logprobs(own)
        rewards_B_T = train_ppo.token_rewards(own, []) - 0.1 * train_ppo.kl_of_tokens(own)
        means = train_ppo.set_advantages(own, rewards_B_T, 0.99, 0.95, accelerator)
        for _ in range(2):
            means |= train_grpo.accumulate_gradients(own, policy, epsilon=(0.2, 0.2), entropy_coef=0.01)
            means |= train_ppo.accumulate_critic_gradients(own, critic)
            means["grad_norm"] = policy.clip_gradients(1.0)
            means["value/grad_norm"] = critic.clip_gradients(1.0)
            policy.step()
            critic.step()
        steps.append(means)
    return {"steps": steps, "weights": norms_of(policy) | norms_of(critic)}


def grpo_gradients(completions: list, policy: Learner) -> dict[str, float]:
    policy.set_reference_logprobs(completions)
    return train_grpo.accumulate_gradients(
        completions, policy, epsilon=(0.2, 0.2), beta=0.1, entropy_coef=0.01, loss_type="grpo"
    )


def grpo_updates(accelerator) -> dict:
    """Makes three updates; returns metrics and norms of weights."""
    policy = load(accelerator)
    steps = []
    for completions in stored_completions(12, 3):
        own = deal(completions, accelerator)
        means = grpo_gradients(own, policy)
        means["grad_norm"] = policy.clip_gradients(1.0)
        policy.step()
        steps.append(means)

    # a forward without a backward leaves the last layers gathered
    policy.set_old_logprobs(own)
    return {"steps": steps, "weights": norms_of(policy)}


def dpo_updates(accelerator) -> dict:
    """Makes an update of an adapter on pairs of an odd number; its reference is the model without it."""
    policy = load(accelerator, lora_r=4)
    pairs = []
    for one in stored_completions(11, 1)[0]:
        pairs.append(train_dpo.Pair(one.id, one.prompt_ids, one.ids, one.ids[::-2]))
    pairs.sort(key=train_dpo.length_of, reverse=True)
    train_dpo.set_reference_logps(pairs, policy)
    means = train_dpo.accumulate_gradients(train_dpo.deal_all(pairs, accelerator), 11, policy, beta=0.3)
    means["grad_norm"] = policy.clip_gradients(1.0)
    policy.step()
    return {"steps": [means], "weights": norms_of(policy)}


def bfloat16_updates(accelerator) -> dict:
    """Under FSDP2 with forwards in bfloat16: how far reference and equal policy differ, and an adapter's
    gradients.

    The first forward of all is that of the reference, which is the policy without its adapter.
    """
    plugin = accelerator.state.fsdp_plugin
    summed_in = str(plugin.mixed_precision_policy.reduce_dtype)
    plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    own = deal(stored_completions(12, 1)[0], accelerator)
    adapted = load(accelerator, lora_r=4)
    grpo_gradients(own, adapted)
    [dtype] = {str(weight.grad.dtype) for weight in adapted.model.parameters() if weight.requires_grad}

    policy = load(accelerator, has_reference=False)
    policy.reference = load_reference(BASE, 0.9, accelerator, "bfloat16")
    batch = policy.collate(own)
    distances = policy.reference_logprobs(batch) - policy.logprobs(batch)[0]
    return {
        "gradients": [summed_in, dtype],
        "reference": [str(next(policy.reference.parameters()).dtype), distances.abs().max().item()],
    }


def updates(accelerator) -> dict:
    found = {
        "ppo": ppo_updates(accelerator),
        "grpo": grpo_updates(accelerator),
        "dpo": dpo_updates(accelerator),
    }
    if accelerator.is_fsdp2:
        found["bfloat16"] = bfloat16_updates(accelerator)
    return found
