"""Three GRPO updates on stored completions of unequal lengths; prints what came out as JSON.

tests/test_grpo.py starts it on one process, on two with DDP, and on two with FSDP2: they must agree.
"""

import json

import numpy as np
import runs  # isort: skip
import torch

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


def main() -> None:
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference = policy.load_reference("data/toy/base", 0.9, accelerator)

    results = []
    for completions in stored_completions(12, 3):
        own = rollout.share_of(completions, accelerator)
        means = train_grpo.accumulate_gradients(own, model, reference, args, 0, accelerator)
        means["grad_norm"] = policy.clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append(means)
    weights = {name: weight.double().norm().item() for name, weight in policy.whole_weights(model)}
    accelerator.print(json.dumps({"steps": results, "weights": weights}))
    checkpoint.leave()


if __name__ == "__main__":
    main()
