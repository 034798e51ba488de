"""Updates of GRPO and PPO on stored completions of unequal lengths; tests/scripts/test_two_processes.py runs
them on one process and on two."""

import math

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlmt import model as policies
from rlmt.model import Learner, Policy, clip_gradients, deal
from rlmt.sampler import Completion
from script_runs import BASE, REWARD_MODEL
import train_grpo
import train_ppo

FLAGS = {"entropy_coef": 0.01, "micro_batch_tokens": 300, "gradient_checkpointing": False}


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


def load_policy(args, accelerator) -> Learner:
    torch.manual_seed(0)
    model = Policy(policies.load_trained(BASE, args), 0.9)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # else it would be zero
            weight.data.normal_(std=0.1)
    return policies.prepare_trained(accelerator, model, 1e-3, 0.0)


def norms_of(model: torch.nn.Module) -> dict[str, float]:
    """Returns the norm of each whole weight; an adapter is merged."""
    return {name: weight.double().norm().item() for name, weight in policies.whole_weights(model)}


def ppo_updates(accelerator) -> dict:
    """Makes two updates on each of two rollouts; returns metrics and norms of weights."""
    args = train_ppo.Args(kl="reward", kl_coef=0.1, **FLAGS)
    model, optimizer = load_policy(args, accelerator)
    critic = train_ppo.load_critic(REWARD_MODEL, args)
    critic, critic_optimizer = policies.prepare_trained(accelerator, critic, 1e-3, 0.0)
    reference = policies.load_reference(BASE, 0.9, accelerator)
    batching = (args.micro_batch_tokens, 0, accelerator)
    steps = []
    for completions in stored_conversations():
        own = deal(completions, accelerator)
        train_ppo.set_values(critic, own, *batching)
        policies.set_old_logprobs(model, own, *batching)
        policies.set_reference_logprobs(model, reference, own, *batching)
        rewards_B_T = train_ppo.token_rewards(own, []) - args.kl_coef * train_ppo.kl_of_tokens(own)
        means = train_ppo.set_advantages(own, rewards_B_T, 0.99, 0.95, accelerator)
        for _ in range(2):
            means |= train_ppo.accumulate_policy_gradients(own, model, args, 0, accelerator)
            means |= train_ppo.accumulate_critic_gradients(own, critic, args, 0, accelerator)
            means["grad_norm"] = clip_gradients(model, 1.0)
            means["value/grad_norm"] = clip_gradients(critic, 1.0)
            for each in (optimizer, critic_optimizer):
                each.step()
                each.zero_grad()
        steps.append(means)
    return {"steps": steps, "weights": norms_of(model) | norms_of(critic)}


def grpo_updates(accelerator) -> dict:
    """Makes three updates, and one of an adapter; returns metrics and norms of weights."""
    args = train_grpo.Args(beta=0.1, **FLAGS)
    model, optimizer = load_policy(args, accelerator)
    reference = policies.load_reference(BASE, 0.9, accelerator)
    steps = []
    for completions in stored_completions(12, 3):
        own = deal(completions, accelerator)
        means = train_grpo.accumulate_gradients(own, model, reference, args, 0, accelerator)
        means["grad_norm"] = clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(means)

    # a forward without a backward leaves the last layers gathered
    policies.set_old_logprobs(model, own, 300, 0, accelerator)
    args.lora_r = 4
    adapted, _ = load_policy(args, accelerator)
    steps.append(train_grpo.accumulate_gradients(own, adapted, None, args, 0, accelerator))
    return {"steps": steps, "weights": norms_of(model), "adapted weights": norms_of(adapted)}


def bfloat16_updates(accelerator) -> dict:
    """Under FSDP2 with forwards in bfloat16: how far reference and equal policy differ, and an adapter's
    gradients.

    The first forward of all is that of the reference, which is the policy without its adapter.
    """
    plugin = accelerator.state.fsdp_plugin
    summed_in = str(plugin.mixed_precision_policy.reduce_dtype)
    plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    args = train_grpo.Args(beta=0.1, lora_r=4, **FLAGS)
    own = deal(stored_completions(12, 1)[0], accelerator)
    adapted, _ = load_policy(args, accelerator)
    train_grpo.accumulate_gradients(own, adapted, None, args, 0, accelerator)
    [dtype] = {str(weight.grad.dtype) for weight in adapted.parameters() if weight.requires_grad}

    model, _ = load_policy(train_grpo.Args(**FLAGS), accelerator)
    reference = policies.load_reference(BASE, 0.9, accelerator, "bfloat16")
    batch = policies.collate(own, 0, accelerator.device)
    inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    distances = policies.compute_reference_logprobs(model, reference, inputs) - model(*inputs)[0]
    return {
        "gradients": [summed_in, dtype],
        "norm": clip_gradients(adapted, 1.0),
        "reference": [str(next(reference.parameters()).dtype), distances.abs().max().item()],
    }


def updates(accelerator) -> dict:
    found = {"ppo": ppo_updates(accelerator), "grpo": grpo_updates(accelerator)}
    if accelerator.is_fsdp2:
        found["bfloat16"] = bfloat16_updates(accelerator)
    return found
