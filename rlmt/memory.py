"""Computes the memory that a run needs, from the configs of its models, before anything is loaded.

All numbers are GiB per process, which is a GPU. They are bytes of tensors that stay:
tests/rlmt/test_checkpoint.py compares them with those of a run. Activations, gathered layers and CUDA's own
memory are not counted. Nor is, on a GPU without FSDP2 and LoRA, the bfloat16 copy of a trained model's
weights that autocast keeps during each forward, 2 bytes per parameter. What the parts leave free is for all
these; --micro-batch-tokens bounds the activations.
"""

import os
from collections.abc import Collection

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


def frozen_gib(path: str, auto_class, dtype: str = "auto") -> float:
    """Returns the weights of a model that is not trained, of which each process has a copy."""
    model = without_weights(auto_class, load_config(path))
    return model.num_parameters() * BYTES[compute_dtype(dtype)] / GIB


def card_gib() -> float:
    return torch.cuda.get_device_properties(0).total_memory / GIB


# --- the models of a run


class Memory:
    """Computes what the models of a run take, as its flags `args` make them."""

    def __init__(self, args):
        self.args = args

    def trained(self, path: str, auto_class=None) -> float:
        """Returns weights, gradients and optimizer state; with LoRA those of the adapter, and the frozen weights.

        `auto_class`: None is a causal language model.
        """
        args = self.args
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

    def critic(self, path: str) -> float:
        """Returns `trained` of PPO's critic, which has one output in place of an LM head."""
        return self.trained(path, transformers.AutoModelForTokenClassification)

    def policies(self, has_reference: bool) -> dict[str, float]:
        """Returns {part: GiB} of the policy, its reference and what samples from it."""
        parts = {"policy": self.trained(self.args.model)}
        if has_reference and not self.args.lora_r:  # with LoRA it is the policy without its adapter
            dtype = reference_dtype(self.args.dtype)
            reference = frozen_gib(self.args.model, transformers.AutoModelForCausalLM, dtype)
            parts["reference"] = reference / n_shards()
        return parts | self.sampler("vLLM")

    def sampler(self, part: str) -> dict[str, float]:
        """Returns what vLLM reserves: a share of the GPU; on a CPU its weights and VLLM_CPU_KVCACHE_SPACE."""
        if not wants_vllm(self.args.rollout):
            return {}
        if torch.cuda.is_available():
            return {part: self.args.vllm_memory * card_gib()}
        weights = frozen_gib(self.args.model, transformers.AutoModelForCausalLM, self.args.dtype)
        return {part: weights + float(os.environ["VLLM_CPU_KVCACHE_SPACE"])}

    def scorers(self, **words: str) -> dict[str, float]:
        """Returns {part: GiB} of those of the parts that are reward models."""
        parts = {}
        for part, word in words.items():
            if read_who(word, otherwise="folder").kind == "folder":
                auto_class = transformers.AutoModelForSequenceClassification
                parts[part.replace("_", " ")] = frozen_gib(word, auto_class, self.args.dtype)
        return parts

    def rl(self, rewards: Collection[str], has_reference: bool) -> dict[str, float]:
        """Returns {part: GiB} of a GRPO run, or of a PPO run without its critic. `rewards`: their names."""
        parts = self.policies(has_reference)
        if "preference" in rewards:
            parts |= self.scorers(reward_model=self.args.reward_model)
        if "prime" in rewards:
            parts["prime"] = self.trained(self.args.model)
        return parts | self.scorers(gold=self.args.gold)

    def dpo(self) -> dict[str, float]:
        """Returns {part: GiB} of a round of DPO, which has one part in memory at a time."""
        scorers = self.scorers(reward_model=self.args.reward_model, gold=self.args.gold)
        parts = {"scoring": sum(scorers.values()), "training: policy": self.trained(self.args.model)}
        return parts | self.sampler("sampling: vLLM")


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
