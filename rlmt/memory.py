"""Computes the memory that a run needs, from the configs of its models, before anything is loaded.

All numbers are GiB per process, which is a GPU. They are bytes of tensors that stay:
tests/rlmt/test_checkpoint.py compares them with those of a run. Activations, gathered layers and CUDA's own
memory are not counted. Nor is, on a GPU without FSDP2 and LoRA, the bfloat16 copy of a trained model's
weights that autocast keeps during each forward, 2 bytes per parameter. What the parts leave free is for all
these; --micro-batch-tokens bounds the activations.
"""

import os

import torch
import transformers  # its models are named where they are used: they take seconds to import
from accelerate import PartialState

from rlmt.chat import load_config
from rlmt.model import is_sharded_launch, reference_dtype, without_weights
from rlmt.scorers import read_who
from utils import compute_dtype, fail, wants_vllm

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}  # per parameter
# Two moments of Adam, bytes per parameter; with 8 bits each block of 256 has its largest value in float32.
MOMENTS = {"adamw": 8, "adamw_8bit": 2 * (1 + 4 / 256)}
# 4 bits; each block of 64 has its largest value in 8 bits, and 256 of those have theirs in float32
FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)


# --- one model


def n_shards() -> int:
    """Returns how many processes share the weights of a trained model: all under FSDP, else 1."""
    if is_sharded_launch():
        return PartialState().num_processes
    return 1


def trained_gib(path: str, args, auto_class=None) -> float:
    """Returns weights, gradients and optimizer state, as `lora_r`, `load_in_4bit` and `optim` of `args` make
    them.

    With LoRA: those of the adapter, and the frozen weights. `auto_class`: None is a causal language model.
    """
    model = without_weights(auto_class or transformers.AutoModelForCausalLM, load_config(path))
    n_weights = model.num_parameters()
    learning = 4 + 4 + MOMENTS[args.optim]  # bytes per parameter: float32 weight, gradient, moments
    frozen = BYTES[compute_dtype(args.dtype)]
    n_bytes = (frozen if args.lora_r else learning) * n_weights
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and not args.lora_r:  # its moments are never in 8 bit
            n_bytes += (MOMENTS["adamw"] - MOMENTS[args.optim]) * module.weight.numel()
        if isinstance(module, torch.nn.Linear) and name not in ("lm_head", "score"):
            n_bytes += learning * args.lora_r * (module.in_features + module.out_features)
            if args.load_in_4bit:
                n_bytes -= (frozen - FOUR_BIT) * module.weight.numel()
    return n_bytes / n_shards() / GIB


def critic_gib(path: str, args) -> float:
    """Returns `trained_gib` of PPO's critic, which has one output in place of an LM head."""
    return trained_gib(path, args, transformers.AutoModelForTokenClassification)


def frozen_gib(path: str, auto_class, dtype: str = "auto") -> float:
    """Returns the weights of a model that is not trained, of which each process has a copy."""
    model = without_weights(auto_class, load_config(path))
    return model.num_parameters() * BYTES[compute_dtype(dtype)] / GIB


def reference_gib(path: str, dtype: str = "auto") -> float:
    """Returns the weights of the reference, sharded as the policy's."""
    return frozen_gib(path, transformers.AutoModelForCausalLM, reference_dtype(dtype)) / n_shards()


def vllm_gib(args) -> float:
    """Returns what vLLM reserves: a share of the GPU; on a CPU its weights and VLLM_CPU_KVCACHE_SPACE."""
    if torch.cuda.is_available():
        return args.vllm_memory * card_gib()
    weights = frozen_gib(args.model, transformers.AutoModelForCausalLM, args.dtype)
    return weights + float(os.environ["VLLM_CPU_KVCACHE_SPACE"])


def card_gib() -> float:
    return torch.cuda.get_device_properties(0).total_memory / GIB


# --- the models of a run


def scorers_gib(args, **models: str) -> dict[str, float]:
    """Returns {part: GiB} of those of `models` that are models, rather than nothing, a function or a
    judge."""
    parts = {}
    for part, model in models.items():
        if read_who(model, otherwise="folder").kind == "folder":
            parts[part.replace("_", " ")] = frozen_gib(
                model, transformers.AutoModelForSequenceClassification, args.dtype
            )
    return parts


def dpo_gib(args) -> dict[str, float]:
    """Returns {part: GiB} of a round of DPO, which has one part in memory at a time."""
    scorers = scorers_gib(args, reward_model=args.reward_model, gold=args.gold)
    parts = {"scoring": sum(scorers.values()), "training: policy": trained_gib(args.model, args)}
    if wants_vllm(args.rollout):
        parts["sampling: vLLM"] = vllm_gib(args)
    return parts


def rl_gib(args, rewards: list[str], has_reference: bool) -> dict[str, float]:
    """Returns {part: GiB} of a GRPO run, or of a PPO run without its critic. `rewards`: the names in
    --rewards."""
    parts = policies_gib(args, has_reference)
    if "preference" in rewards:
        parts |= scorers_gib(args, reward_model=args.reward_model)
    if "prime" in rewards:
        parts["prime"] = trained_gib(args.model, args)
    return parts | scorers_gib(args, gold=args.gold)


def policies_gib(args, has_reference: bool) -> dict[str, float]:
    """Returns {part: GiB} of the policy, its reference and what samples from it."""
    parts = {"policy": trained_gib(args.model, args)}
    if has_reference and not args.lora_r:  # with LoRA the reference is the policy without its adapter
        parts["reference"] = reference_gib(args.model, args.dtype)
    if wants_vllm(args.rollout):
        parts["vLLM"] = vllm_gib(args)
    return parts


def check_memory(parts: dict[str, float], at_once: bool = True) -> str:
    """Returns a line for the screen; exits with 2 if the parts do not fit on a GPU, all `at_once` or one at a
    time."""
    listed = ", ".join(f"{name} {gib:.3g}" for name, gib in parts.items())
    if not torch.cuda.is_available():
        return f"GiB a process, without activations: {listed}"
    needed = sum(parts.values()) if at_once else max(parts.values())
    there = card_gib()
    if needed > there and os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() != "true":
        fail(
            f"{needed:.0f} GiB are needed of a GPU's {there:.0f}, without activations ({listed}). What helps, where --help has it: --lora-r 64, "
            "then --load-in-4bit; --optim adamw_8bit; a smaller --vllm-memory, --reward-model or --model; more GPUs with "
            "accelerate/8gpu_fsdp2.yaml, which takes neither of the bits"
        )
    return f"GiB a GPU, without activations: {listed}; {there - needed:.3g} of {there:.3g} are left for those"
