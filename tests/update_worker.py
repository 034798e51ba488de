"""Three GRPO updates on stored completions of unequal lengths, and whole weights; prints what came out as JSON.

tests/test_grpo.py calls it in one process, and starts it on two with DDP and with FSDP2: they must agree.
"""

import json

import numpy as np
import torch
from accelerate.utils import gather_object

import checkpoint
import policy
import rollout
import train_grpo


def stored_completions(n: int, n_rollouts: int) -> list[list[rollout.Completion]]:
    """Makes completions of random tokens, lengths and advantages; the same in every process."""
    generator = np.random.default_rng(0)
    rollouts = []
    for _ in range(n_rollouts):
        completions = []
        for i in range(n):
            n_prompt, n_completion = generator.integers(3, 30), generator.integers(1, 60)
            ids = generator.integers(5, 200, n_prompt + n_completion).tolist()
            completion = rollout.Completion(
                id=str(i),
                messages=[],
                prompt_ids=ids[:n_prompt],
                ids=ids[n_prompt:],
                text="",
                thinking="",
                response="",
                status="ok",
                cut_off=False,
                n_thinking_tokens=0,
            )
            completion.advantages = [float(generator.normal())] * n_completion
            completions.append(completion)
        rollouts.append(completions)
    return rollouts


def main() -> dict:
    accelerator = policy.start_accelerator()
    args = train_grpo.Args(
        learning_rate=1e-3,
        beta=0.1,
        entropy_coef=0.01,
        micro_batch_tokens=300,
        lora_r=0,
        gradient_checkpointing=False,
    )
    model = policy.Policy(policy.load_policy("data/toy/base", 0, False), 0.9)
    model, optimizer = policy.prepare_trained(accelerator, model, args.learning_rate, 0.0)
    reference = policy.load_reference("data/toy/base", 0.9, accelerator)

    results = []
    for completions in stored_completions(12, 3):
        own = rollout.share_of(completions, accelerator)
        means = train_grpo.accumulate_gradients(own, model, reference, args, 0, accelerator)
        means["grad_norm"] = policy.clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append(means)

    # a forward without a backward leaves the last layers gathered
    own = rollout.share_of(stored_completions(4, 1)[0], accelerator)
    policy.set_entropy_statistics(model, own, 300, 0, accelerator)
    statistics = gather_object([completion.statistics for completion in own])
    weights = {name: weight.double().norm().item() for name, weight in policy.whole_weights(model)}

    torch.manual_seed(0)
    with_adapter = policy.load_policy("data/toy/base", 4, False)
    for name, weight in with_adapter.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    with_adapter = policy.Policy(with_adapter, 0.9)
    with_adapter, _ = policy.prepare_trained(accelerator, with_adapter, 1e-3, 0.0)
    for name, weight in policy.whole_weights(with_adapter):
        weights[f"LoRA {name}"] = weight.double().norm().item()

    sums = "torch.float32"
    if accelerator.is_fsdp2:
        sums = str(accelerator.state.fsdp_plugin.mixed_precision_policy.reduce_dtype)
    return {"steps": results, "statistics": statistics, "weights": weights, "gradients are summed in": sums}


if __name__ == "__main__":
    found = main()
    policy.PartialState().print(json.dumps(found))
    checkpoint.leave()
