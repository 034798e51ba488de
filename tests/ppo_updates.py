"""Two PPO updates on stored conversations; tests/scripts/test_two_processes.py runs them."""

import math

from grpo_updates import stored_completions

from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt.run import RunArgs
import train_ppo


def stored_conversations() -> list[list[rollout.Completion]]:
    """Makes completions with a user's turn in the middle and a reward; every fifth has none."""
    rollouts = stored_completions(12, 2)
    for completions in rollouts:
        for i, completion in enumerate(completions):
            n = len(completion.ids)
            completion.loss_mask = [0 if n // 3 < t < n // 2 else 1 for t in range(n)]
            completion.reward = math.nan if i % 5 == 4 else math.sin(i)
    return rollouts


def main() -> dict:
    accelerator = policy.start_accelerator()
    args = train_ppo.Args(kl="reward", kl_coef=0.1, entropy_coef=0.01, micro_batch_tokens=300)
    model = policy.Policy(policy.load_trained("data/toy/base", RunArgs(gradient_checkpointing=False)), 0.9)
    model, optimizer = policy.prepare_trained(accelerator, model, 1e-3, 0.0)
    critic = train_ppo.load_critic("data/toy/reward_model", train_ppo.Args(gradient_checkpointing=False))
    critic, critic_optimizer = policy.prepare_trained(accelerator, critic, 1e-3, 0.0)
    reference = policy.load_reference("data/toy/base", 0.9, accelerator)

    batching = (args.micro_batch_tokens, 0, accelerator)
    results = []
    for completions in stored_conversations():
        own = rollout.share_of(completions, accelerator)
        train_ppo.set_values(critic, own, *batching)
        policy.set_old_logprobs(model, own, *batching)
        policy.set_reference_logprobs(model, reference, own, *batching)
        earned = train_ppo.token_rewards(own, []) - args.kl_coef * train_ppo.kl_of_tokens(own)
        means = train_ppo.set_advantages(own, earned, 0.99, 0.95, accelerator)
        for _ in range(2):
            means |= train_ppo.accumulate_policy_gradients(own, model, args, 0, accelerator)
            means |= train_ppo.accumulate_critic_gradients(own, critic, args, 0, accelerator)
            means["grad_norm"] = policy.clip_gradients(model, 1.0)
            means["value/grad_norm"] = policy.clip_gradients(critic, 1.0)
            for each in (optimizer, critic_optimizer):
                each.step()
                each.zero_grad()
        results.append(means)

    weights = {}
    for name, learner in {"policy": model, "critic": critic}.items():
        for key, weight in policy.whole_weights(learner):
            weights[f"{name}.{key}"] = weight.double().norm().item()
    return {"steps": results, "weights": weights}
