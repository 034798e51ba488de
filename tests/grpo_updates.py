"""Three GRPO updates on stored completions of unequal lengths, and whole weights;
tests/scripts/test_two_processes.py runs them."""

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

from rlmt import memory as plan
from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt.run import RunArgs
import train_grpo
from rewards import preference

BASE = "data/toy/base"
REWARD_MODEL = "data/toy/reward_model"


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


def bytes_held(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Counts this process's bytes of a model's weights, gradients and Adam's moments, without gathered
    layers."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = []
    for weight in model.parameters():
        tensors += [weight, weight.grad]
        if optimizer:
            tensors += optimizer.state[weight].values()
    held = 0
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor is not None:
            held += tensor.nbytes
    return held


def bfloat16_reference(accelerator) -> tuple[str, float]:
    """Returns the reference's dtype where forwards run in bfloat16, and its largest distance from an equal
    policy."""
    plugin = accelerator.state.fsdp_plugin
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    model = policy.Policy(policy.load_trained(BASE, RunArgs(gradient_checkpointing=False)), 0.9)
    model, _ = policy.prepare_trained(accelerator, model, 1e-3, 0.0)
    reference = policy.load_reference(BASE, 0.9, accelerator, "bfloat16")
    dtype = str(next(reference.parameters()).dtype)

    batch = policy.collate(stored_completions(4, 1)[0], 0, accelerator.device)
    inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    logprobs, _ = model(*inputs)
    distances = (policy.compute_reference_logprobs(model, reference, inputs) - logprobs).abs()
    return dtype, distances.max().item()


def bfloat16_adapter(accelerator, args) -> list:
    """Returns the dtype of an adapter's gradients where forwards run in bfloat16, and their norm.

    The first forward of all is that of the reference, which is the policy without its adapter.
    """
    model = policy.Policy(policy.load_trained(BASE, RunArgs(gradient_checkpointing=False, lora_r=4)), 0.9)
    model, _ = policy.prepare_trained(accelerator, model, 1e-3, 0.0)
    own = rollout.share_of(stored_completions(12, 1)[0], accelerator)
    train_grpo.accumulate_gradients(own, model, None, args, 0, accelerator)
    dtypes = {str(weight.grad.dtype) for weight in model.parameters() if weight.requires_grad}
    return [*dtypes, policy.clip_gradients(model, 1.0)]


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
    model = policy.Policy(policy.load_trained(BASE, RunArgs(gradient_checkpointing=False)), 0.9)
    loaded_to = gather_object([model.device.type])
    model, optimizer = policy.prepare_trained(accelerator, model, args.learning_rate, 0.0)
    reference = policy.load_reference(BASE, 0.9, accelerator)

    results = []
    held = {}
    for completions in stored_completions(12, 3):
        own = rollout.share_of(completions, accelerator)
        means = train_grpo.accumulate_gradients(own, model, reference, args, 0, accelerator)
        means["grad_norm"] = policy.clip_gradients(model, 1.0)
        optimizer.step()
        held["policy"] = bytes_held(model, optimizer)
        optimizer.zero_grad()
        results.append(means)

    # a forward without a backward leaves the last layers gathered
    own = rollout.share_of(stored_completions(4, 1)[0], accelerator)
    policy.set_entropy_statistics(model, own, 300, 0, accelerator)
    statistics = gather_object([completion.statistics for completion in own])
    weights = {name: weight.double().norm().item() for name, weight in policy.whole_weights(model)}

    torch.manual_seed(0)
    with_adapter = policy.load_trained(BASE, RunArgs(gradient_checkpointing=False, lora_r=4))
    for name, weight in with_adapter.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    with_adapter = policy.Policy(with_adapter, 0.9)
    with_adapter, optimizer = policy.prepare_trained(accelerator, with_adapter, 1e-3, 0.0)
    for name, weight in policy.whole_weights(with_adapter):
        weights[f"LoRA {name}"] = weight.double().norm().item()

    own = rollout.share_of(stored_completions(12, 1)[0], accelerator)
    results.append(train_grpo.accumulate_gradients(own, with_adapter, None, args, 0, accelerator))
    optimizer.step()

    held["policy with LoRA"] = bytes_held(with_adapter, optimizer)
    held["reference"] = bytes_held(reference)
    score_args = train_grpo.Args(reward_model=REWARD_MODEL)
    reward_model = preference.load_reward_model(score_args, accelerator.device).model
    held["reward model"] = bytes_held(reward_model)
    norm = torch.stack([weight.norm() for weight in reward_model.parameters()]).norm().item()
    planned = {
        "policy": plan.trained_gib(BASE, train_grpo.Args()),
        "policy with LoRA": plan.trained_gib(BASE, train_grpo.Args(lora_r=4)),
        "reference": plan.reference_gib(BASE),
        "reward model": plan.frozen_gib(REWARD_MODEL, AutoModelForSequenceClassification),
    }

    sums = "torch.float32"
    if accelerator.is_fsdp2:
        sums = str(accelerator.state.fsdp_plugin.mixed_precision_policy.reduce_dtype)
    found = {
        "steps": results,
        "statistics": statistics,
        "weights": weights,
        "gradients are summed in": sums,
        "loaded to": loaded_to,
        "reward model": gather_object([norm]),
        "bytes held": gather_object([held]),
        "bytes planned": {name: gib * plan.GIB for name, gib in planned.items()},
    }
    if accelerator.is_fsdp2:
        found["bfloat16 reference"] = bfloat16_reference(accelerator)
        found["bfloat16 adapter"] = bfloat16_adapter(accelerator, args)
    return found
