"""Computes the memory that a run needs, from the configs of its models, before anything is loaded.

All numbers are GiB a process, which is a GPU. They are bytes of tensors that stay: tests/scripts/test_grpo.py compares them with
those of a run. Activations, gathered layers and CUDA's own memory are not counted. Nor is, on a GPU without FSDP2 and LoRA,
the bfloat16 copy of a trained model's weights that autocast keeps during each forward, 2 bytes a parameter. What the parts
leave free is for all these; --micro-batch-tokens bounds the activations.
"""

import os
from typing import NamedTuple

import torch
from accelerate import PartialState
import transformers

from rlmt.chat import load_config
from rlmt.model import is_sharded_launch, reference_dtype, without_weights
from utils import compute_dtype, fail

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}  # a parameter
# Two moments of Adam, bytes a parameter; with 8 bits each block of 256 has its largest value in float32.
MOMENTS = {"adamw": 8, "adamw_8bit": 2 * (1 + 4 / 256)}
# 4 bits; each block of 64 has its largest value in 8 bits, and 256 of those have theirs in float32
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)

REMEDIES = {  # a part that does not learn: what makes it smaller
    "reference": "--lora-r, which needs no reference",
    "reward model": "a smaller --reward-model, such as Skywork/Skywork-Reward-V2-Qwen3-0.6B with 1.1 GiB",
    "scoring": "a smaller --reward-model or --gold",
    "gold": "a smaller --gold",
    "process model": "a smaller --reward-args process.model",
    "vLLM": "a smaller --vllm-memory",
    "sampling: vLLM": "a smaller --vllm-memory",
}


# --- one model


def n_shards() -> int:
    """Returns how many processes share the weights of a trained model: all under FSDP, else 1."""
    if is_sharded_launch():
        return PartialState().num_processes
    return 1


class Sizes(NamedTuple):
    """Holds numbers of parameters of a model."""

    whole: int
    linear: int
    """Linear layers except the head: --load-in-4bit makes them smaller."""
    embeddings: int
    """Embeddings, whose moments are never in 8 bit."""
    adapter: int
    """LoRA's, which are no part of `whole`."""


def count_parameters(path: str, auto_class, lora_r: int = 0) -> Sizes:
    """Counts the parameters of a model and of its LoRA adapter, without loading weights."""
    model = without_weights(auto_class, load_config(path))
    n_linear = 0
    n_embeddings = 0
    n_adapter = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            n_embeddings += module.weight.numel()
        if isinstance(module, torch.nn.Linear) and name not in ("lm_head", "score"):
            n_linear += module.weight.numel()
            n_adapter += lora_r * (module.in_features + module.out_features)
    return Sizes(model.num_parameters(), n_linear, n_embeddings, n_adapter)


def trained_gib(path: str, args, auto_class=None) -> float:
    """Returns weights, gradients and optimizer state, as `lora_r`, `load_in_4bit` and `optim` of `args` make them.

    With LoRA: those of the adapter, and the frozen weights. `auto_class`: None is a causal language model.
    """
    sizes = count_parameters(path, auto_class or transformers.AutoModelForCausalLM, args.lora_r)
    learning = 4 + 4 + MOMENTS[args.optim]  # bytes a parameter: float32 weight, gradient, moments
    if args.lora_r:
        frozen = BYTES[compute_dtype(args.dtype)]
        n_bytes = frozen * sizes.whole + learning * sizes.adapter
        if args.load_in_4bit:
            n_bytes -= (frozen - FOUR_BIT) * sizes.linear
    else:
        n_bytes = learning * sizes.whole + (MOMENTS["adamw"] - MOMENTS[args.optim]) * sizes.embeddings
    return n_bytes / n_shards() / GIB


def critic_gib(path: str, args) -> float:
    """Returns `trained_gib` of PPO's critic, which has one output in place of an LM head."""
    return trained_gib(path, args, transformers.AutoModelForTokenClassification)


def frozen_gib(path: str, auto_class, dtype: str = "auto") -> float:
    """Returns the weights of a model that is not trained, of which each process has a copy."""
    return count_parameters(path, auto_class).whole * BYTES[compute_dtype(dtype)] / GIB


def reference_gib(path: str, dtype: str = "auto") -> float:
    """Returns the weights of the reference, sharded as the policy's."""
    n_weights = count_parameters(path, transformers.AutoModelForCausalLM).whole
    return n_weights * BYTES[reference_dtype(dtype)] / n_shards() / GIB


def vllm_gib(path: str, share: float, dtype: str = "auto") -> float:
    """Returns what vLLM reserves: a share of the GPU; on a CPU its weights and VLLM_CPU_KVCACHE_SPACE."""
    if torch.cuda.is_available():
        return share * torch.cuda.get_device_properties(0).total_memory / GIB
    return frozen_gib(path, transformers.AutoModelForCausalLM, dtype) + float(
        os.environ["VLLM_CPU_KVCACHE_SPACE"]
    )


# --- the models of a run


def is_model(gold: str) -> bool:
    """Tells whether --gold names a reward model, rather than nothing, a function or a judge."""
    return bool(gold) and ".py:" not in gold and not gold.startswith("judge:")


def dpo_gib(args, use_vllm: bool) -> dict[str, float]:
    """Returns {part: GiB} of a round of DPO, which has one part in memory at a time."""
    parts = {}
    if use_vllm:
        parts["sampling: vLLM"] = vllm_gib(args.model, args.vllm_memory, args.dtype)
    parts["scoring"] = frozen_gib(
        args.reward_model, transformers.AutoModelForSequenceClassification, args.dtype
    )
    if is_model(args.gold):
        parts["scoring"] += frozen_gib(args.gold, transformers.AutoModelForSequenceClassification, args.dtype)
    parts["training: policy"] = trained_gib(args.model, args)
    return parts


def rl_gib(args, reward_options: dict[str, dict], use_vllm: bool, has_reference: bool) -> dict[str, float]:
    """Returns {part: GiB} of a GRPO run, or of a PPO run without its critic.

    `reward_options`: {name: {option: value}} of the rewards in --rewards.
    """
    parts = policies_gib(args, use_vllm, has_reference)
    if "preference" in reward_options:
        parts["reward model"] = frozen_gib(
            args.reward_model, transformers.AutoModelForSequenceClassification, args.dtype
        )
    if is_model(args.gold):
        parts["gold"] = frozen_gib(args.gold, transformers.AutoModelForSequenceClassification, args.dtype)
    process_model = reward_options.get("process", {}).get("model", "")
    if process_model and ".py:" not in process_model:
        parts["process model"] = frozen_gib(
            process_model, transformers.AutoModelForTokenClassification, args.dtype
        )
    if "prime" in reward_options:
        parts["prime"] = trained_gib(args.model, args)
    return parts


def policies_gib(args, use_vllm: bool, has_reference: bool) -> dict[str, float]:
    """Returns {part: GiB} of the policy, its reference and what samples from it."""
    parts = {"policy": trained_gib(args.model, args)}
    if has_reference and not args.lora_r:  # with LoRA the reference is the policy without its adapter
        parts["reference"] = reference_gib(args.model, args.dtype)
    if use_vllm:
        parts["vLLM"] = vllm_gib(args.model, args.vllm_memory, args.dtype)
    return parts


def remedies(part: str, args) -> list[str]:
    """Lists what makes a part of the memory smaller, the most helpful first, without what `args` has already."""
    if part in REMEDIES:
        return [REMEDIES[part]]
    found = []  # it learns
    if not args.lora_r:
        found.append("--lora-r 64")
    elif not args.load_in_4bit and not is_sharded_launch():
        found.append("--load-in-4bit")
    if args.optim == "adamw" and not is_sharded_launch():
        found.append("--optim adamw_8bit")
    return [*found, "more GPUs with accelerate/8gpu_fsdp2.yaml", "a smaller --model"]


def check_memory(parts: dict[str, float], args, at_once: bool = True) -> str:
    """Returns a line for the screen; exits with 2 if the parts do not fit on a GPU, all `at_once` or one at a time.

    The message says what would help, the largest part first.
    """
    listed = ", ".join(f"{name} {gib:.3g}" for name, gib in parts.items())
    if not torch.cuda.is_available():
        return f"GiB a process, without activations: {listed}"
    needed = sum(parts.values()) if at_once else max(parts.values())
    there = torch.cuda.get_device_properties(0).total_memory / GIB
    offloads = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    if needed > there and not offloads:
        helpful = []
        for name in sorted(parts, key=parts.get, reverse=True):
            if at_once or parts[name] > there:
                helpful += remedies(name, args)
        fail(
            f"{needed:.0f} GiB are needed of a GPU's {there:.0f}, without activations ({listed}). "
            f"What helps most comes first: {'; '.join(dict.fromkeys(helpful))}"
        )
    return f"GiB a GPU, without activations: {listed}; {there - needed:.3g} of {there:.3g} are left for those"
