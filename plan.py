"""Computes the memory that a run needs, from the configs of its models, before anything is loaded.

All numbers are GiB a process, which is a GPU. Activations are not counted: --micro-batch-tokens bounds them.
"""

import os

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import policy
import rewards
import runs
import utils

GIB = 2**30
FULL_TRAINING = 16  # bytes a parameter: float32 weight, gradient, and Adam's two moments


def n_shards() -> int:
    """Returns among how many processes trained weights are split: all under FSDP, else 1."""
    if policy.is_sharded_launch():
        return PartialState().num_processes
    return 1


def frozen_bytes() -> int:
    """Returns bytes a parameter of a model that is not trained: bfloat16 on a GPU."""
    return 2 if utils.DTYPE == "bfloat16" else 4


def n_parameters(path: str, auto_class, lora_r: int = 0) -> tuple[int, int]:
    """Counts the parameters of a model and of its LoRA adapter, without loading weights."""
    with torch.device("meta"):
        model = auto_class.from_config(utils.load_config(path), trust_remote_code=False)
    n_adapter = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in ("lm_head", "score"):
            n_adapter += lora_r * (module.in_features + module.out_features)
    return model.num_parameters(), n_adapter


def trained_gib(path: str, lora_r: int) -> float:
    """Returns weights, gradients and optimizer state. With LoRA: those of the adapter, and the frozen weights."""
    n_weights, n_adapter = n_parameters(path, AutoModelForCausalLM, lora_r)
    n_bytes = FULL_TRAINING * n_weights
    if lora_r:
        n_bytes = frozen_bytes() * n_weights + FULL_TRAINING * n_adapter
    return n_bytes / n_shards() / GIB


def frozen_gib(path: str, auto_class) -> float:
    """Returns the weights of a model that is not trained, of which each process has a copy."""
    return n_parameters(path, auto_class)[0] * frozen_bytes() / GIB


def reference_gib(path: str) -> float:
    """Returns the reference's float32 weights, sharded as the policy's."""
    return n_parameters(path, AutoModelForCausalLM)[0] * 4 / n_shards() / GIB


def vllm_gib(path: str, share: float) -> float:
    """Returns what vLLM reserves: a share of the GPU; on a CPU its weights and VLLM_CPU_KVCACHE_SPACE."""
    if torch.cuda.is_available():
        return share * torch.cuda.get_device_properties(0).total_memory / GIB
    return frozen_gib(path, AutoModelForCausalLM) + float(os.environ["VLLM_CPU_KVCACHE_SPACE"])


def is_model(gold: str) -> bool:
    """Tells whether --gold names a reward model, rather than nothing, a function or a judge."""
    return bool(gold) and ".py:" not in gold and not gold.startswith("judge:")


def dpo_gib(args, use_vllm: bool) -> dict[str, float]:
    """Returns {part: GiB} of a round of DPO, which has one part in memory at a time."""
    parts = {}
    if use_vllm:
        parts["sampling: vLLM"] = vllm_gib(args.model, args.vllm_memory)
    parts["scoring"] = frozen_gib(args.reward_model, AutoModelForSequenceClassification)
    if is_model(args.gold):
        parts["scoring"] += frozen_gib(args.gold, AutoModelForSequenceClassification)
    parts["training: policy"] = trained_gib(args.model, args.lora_r)
    return parts


def rl_gib(args, use_vllm: bool, has_reference: bool) -> dict[str, float]:
    """Returns {part: GiB} of a GRPO run, or of a PPO run without its critic."""
    parts = {"policy": trained_gib(args.model, args.lora_r)}
    if has_reference and not args.lora_r:  # with LoRA the reference is the policy without its adapter
        parts["reference"] = reference_gib(args.model)
    if "preference" in rewards.reward_names(args):
        parts["reward model"] = frozen_gib(args.reward_model, AutoModelForSequenceClassification)
    if use_vllm:
        parts["vLLM"] = vllm_gib(args.model, args.vllm_memory)
    if is_model(args.gold):
        parts["gold"] = frozen_gib(args.gold, AutoModelForSequenceClassification)
    options = rewards.reward_options(args)
    if "process" in options and ".py:" not in options["process"]["model"]:
        parts["process model"] = frozen_gib(options["process"]["model"], AutoModelForTokenClassification)
    if "prime" in options:
        parts["prime"] = trained_gib(args.model, args.lora_r)
    return parts


def check_memory(parts: dict[str, float], at_once: bool = True) -> str:
    """Returns a line for the screen; exits with 2 if the parts do not fit on a GPU, all `at_once` or one at a time."""
    listed = ", ".join(f"{name} {gib:.3g}" for name, gib in parts.items())
    if not torch.cuda.is_available():
        return f"GiB a process, without activations: {listed}"
    needed = sum(parts.values()) if at_once else max(parts.values())
    there = torch.cuda.get_device_properties(0).total_memory / GIB
    offloads = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    if needed > there and not offloads:
        runs.fail(
            f"{needed:.0f} GiB are needed of a GPU's {there:.0f}, without activations ({listed}): use more GPUs, "
            "--lora-r, a smaller --vllm-memory or a smaller --reward-model"
        )
    return f"GiB a GPU, without activations: {listed}"
