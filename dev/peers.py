"""Runs what a user would run instead of these scripts: TRL's trainers on the same work, for `dev.bench`.

    python -m dev.peers grpo --folder FOLDER --out FOLDER/peer --size cpu --steps 3 --seed 0

Each function trains as TRL's documentation shows, with TRL's defaults where the work does not fix a value, and writes
`out`/metrics.jsonl with the keys of our scripts' logs, so that the bench reads both sides in the same way.
"""

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import append_jsonl, read_rows
from rlmt.model import whole_weights
from rlmt.run import Timer, rows_of_step, seed_step
import torch
import tyro
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.generation import vllm_generation

from utils import DEVICE, SAFE, compute_dtype
from dev.bench_work import SIZES
from rewards.preference import RewardModel


@dataclass
class Args:
    case: tyro.conf.Positional[Literal["grpo", "sft", "dpo", "reward", "reward-ours"]]
    """Which trainer. reward-ours: our reward model alone, as it has no script of its own."""
    folder: Path
    """Folder of models and rows, written by dev.bench_work."""
    out: Path
    """Folder for metrics.jsonl."""
    size: Literal[tuple(SIZES)]
    """A key of dev.bench_work.SIZES."""
    steps: int
    """Optimizer steps of grpo, epochs of sft and dpo, passes over the texts of reward."""
    seed: int = 0
    """Random seed."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """That of forwards, of vLLM and of the reward model, as in our scripts."""
    lean: bool = False
    """Run grpo without TRL's importance correction: it costs a forward pass, and our default does not have it."""


class Log(TrainerCallback):
    """Writes metrics.jsonl, and seeds every step as our loops do, so that both sides sample the same completions."""

    def __init__(self, args: Args, trainer):
        self.args = args
        self.trainer = trainer
        self.started = 0.0
        self.laps = Timer()  # of the step

    def watch(self, owner, name: str, phase: str, before: str) -> None:
        """Counts the time in the method `owner.name` for `phase` of a step, and the time before it for `before`.

        TRL logs no such times.
        """
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args, **kwargs):
            self.laps.end(before)
            result = method(*args, **kwargs)
            self.laps.end(phase)
            return result

        setattr(owner, name, timed)

    def on_train_begin(self, trainer_args, state, control, **_):
        self.started = time.monotonic()
        self.laps = Timer()

    def on_step_begin(self, trainer_args, state, control, **_):
        seed_step(self.args.seed, state.global_step, self.trainer.accelerator)

    def on_log(self, trainer_args, state, control, logs, **_):
        if "loss" in logs:  # the last log of a training has none
            self.laps.end("other")
            line = {"step": state.global_step, "seconds": time.monotonic() - self.started, **logs}
            append_jsonl(self.args.out / "metrics.jsonl", [line | self.laps.metrics])
            self.laps = Timer()


def load_policy(args: Args) -> dict:
    """Returns the arguments that give a TRL trainer its model: float32 weights, or an adapter on frozen ones."""
    rank = SIZES[args.size]["lora_r"]
    lora = None
    dtype = torch.float32
    if rank:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        dtype = getattr(torch, compute_dtype(args.dtype))
    return {
        "model": AutoModelForCausalLM.from_pretrained(args.folder / "policy", dtype=dtype, **SAFE),
        "processing_class": AutoTokenizer.from_pretrained(args.folder / "policy", trust_remote_code=False),
        "peft_config": lora,
    }


def shared_options(args: Args) -> dict:
    """Returns the options that have the same name in all of TRL's configurations."""
    on_gpu = torch.cuda.is_available()
    return {
        # by default TRL's trainers recompute activations, as ours do
        "gradient_checkpointing": SIZES[args.size]["gradient_checkpointing"],
        "output_dir": str(args.out),
        "bf16": compute_dtype(args.dtype) == "bfloat16",
        "use_cpu": not on_gpu,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": args.seed,
    }


def grpo(args: Args) -> None:
    """Trains with trl.GRPOTrainer and the same vLLM, the reward model given to TRL as a model."""
    size = SIZES[args.size]
    n_completions = size["prompts"] * size["group_size"]
    prompts = read_rows(args.folder / "prompts.jsonl", "messages")
    in_order = []
    for step in range(args.steps):
        for row in rows_of_step(prompts, step, size["prompts"], args.seed):
            in_order.append({"prompt": row["messages"]})

    policy_and_tokenizer = load_policy(args)
    config = GRPOConfig(
        **shared_options(args),
        max_steps=args.steps,
        shuffle_dataset=False,
        num_generations=size["group_size"],
        per_device_train_batch_size=size["peer_micro_batch"],
        gradient_accumulation_steps=n_completions // size["peer_micro_batch"],
        max_completion_length=size["max_tokens"],
        temperature=1.0,
        beta=1e-3,
        use_bias_correction_kl=False,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=size["vllm_memory"],
        vllm_max_model_length=size["max_prompt_tokens"] + size["max_tokens"],
        vllm_importance_sampling_correction=not args.lean,
        generation_kwargs={"stop_token_ids": [policy_and_tokenizer["processing_class"].eos_token_id]},
    )
    # TRL has no argument for vLLM's dtype, which would be another one than the trainer's on a CPU
    dtype = compute_dtype(args.dtype)
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=dtype)
    trainer = GRPOTrainer(
        **policy_and_tokenizer,
        reward_funcs=AutoModelForSequenceClassification.from_pretrained(
            args.folder / "reward", dtype=dtype, **SAFE
        ),
        reward_processing_classes=AutoTokenizer.from_pretrained(
            args.folder / "reward", trust_remote_code=False
        ),
        args=config,
        train_dataset=Dataset.from_list(in_order),
    )
    if not torch.cuda.is_available():
        trainer.vllm_generation.sync_weights = lambda: sync_on_cpu(trainer)
    log = Log(args, trainer)
    log.watch(trainer, "training_step", "update", before="other")
    # within the training step; before the rewards it computes log-probabilities
    log.watch(trainer.vllm_generation, "sync_weights", "rollout", before="update")
    log.watch(trainer.vllm_generation, "generate", "rollout", before="update")
    log.watch(trainer, "_calculate_rewards", "reward", before="update")
    log.watch(torch.optim.AdamW, "step", "update", before="update")
    trainer.add_callback(log)
    trainer.train()


def sync_on_cpu(trainer: GRPOTrainer) -> None:
    """Gives vLLM the policy's weights as our sampler does on a CPU, where TRL's own way raises an error."""
    llm = trainer.vllm_generation.llm
    weights = ((name, weight.clone()) for name, weight in whole_weights(trainer.model))
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()


def sft(args: Args) -> None:
    """Trains with trl.SFTTrainer on padded batches; an epoch is one optimizer step."""
    traces = []
    for row in read_rows(args.folder / "traces.jsonl", "messages"):
        answer = {"role": "assistant", "content": row["response"]}
        traces.append({"prompt": row["messages"], "completion": [answer]})
    config = SFTConfig(
        **shared_options(args),
        num_train_epochs=args.steps,
        per_device_train_batch_size=8,  # TRL's default
        gradient_accumulation_steps=len(traces) // 8,
        max_length=None,
        completion_only_loss=True,
        learning_rate=4e-6,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # a share
        weight_decay=1e-4,
        adam_beta2=0.95,
    )
    trainer = SFTTrainer(**load_policy(args), args=config, train_dataset=Dataset.from_list(traces))
    trainer.add_callback(Log(args, trainer))
    trainer.train()


def dpo(args: Args) -> None:
    """Trains with trl.DPOTrainer, which runs the reference at every step; an epoch is one optimizer step."""
    size = SIZES[args.size]
    pairs = []
    for row in read_rows(args.folder / "pairs.jsonl", "messages"):
        chosen = [{"role": "assistant", "content": row["chosen"]}]
        rejected = [{"role": "assistant", "content": row["rejected"]}]
        pairs.append({"prompt": row["messages"], "chosen": chosen, "rejected": rejected})
    config = DPOConfig(
        **shared_options(args),
        num_train_epochs=args.steps,
        per_device_train_batch_size=size["peer_micro_batch"],
        gradient_accumulation_steps=len(pairs) // size["peer_micro_batch"],
        max_length=None,
        beta=0.1,
        learning_rate=3e-7,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,  # a share
        weight_decay=1e-4,
        adam_beta2=0.95,
    )
    trainer = DPOTrainer(**load_policy(args), args=config, train_dataset=Dataset.from_list(pairs))
    trainer.add_callback(Log(args, trainer))
    trainer.train()


@torch.no_grad()
def reward(args: Args) -> None:
    """Scores texts as GRPOTrainer does: all of a step in one forward, padded to the longest."""
    model = AutoModelForSequenceClassification.from_pretrained(
        args.folder / "reward", dtype=compute_dtype(args.dtype), device_map=DEVICE, **SAFE
    )
    tokenizer = AutoTokenizer.from_pretrained(args.folder / "reward", trust_remote_code=False)

    def score(texts: list[dict]) -> list[float]:
        conversations = []
        for row in texts:
            answer = {"role": "assistant", "content": row["text"]}
            conversations.append(tokenizer.apply_chat_template(row["messages"] + [answer], tokenize=False))
        batch = tokenizer(conversations, return_tensors="pt", padding=True, add_special_tokens=False)
        return model(**batch.to(DEVICE)).logits[:, 0].tolist()

    time_scores(args, score)


def reward_ours(args: Args) -> None:
    """Scores the same texts by the reward model of our training scripts."""
    model = RewardModel(str(args.folder / "reward"), device=DEVICE, dtype=args.dtype)

    def score(texts: list[dict]) -> list[float]:
        return model.score([row["messages"] for row in texts], [row["text"] for row in texts])

    time_scores(args, score)


def time_scores(args: Args, score) -> None:
    """Calls score(texts) once for each step, and logs its time and the first 16 scores."""
    texts = read_rows(args.folder / "texts.jsonl", "messages", "text")
    n_tokens = sum(len(row["text"].split()) for row in texts)  # a word is a token
    score(texts[:4])  # warm-up
    started = time.monotonic()
    for step in range(1, args.steps + 1):
        scores = score(texts)
        line = {"step": step, "seconds": time.monotonic() - started, "num_tokens": step * n_tokens}
        for i, value in enumerate(scores[:16]):
            line[f"score_{i}"] = value
        append_jsonl(args.out / "metrics.jsonl", [line])


CASES = {"grpo": grpo, "sft": sft, "dpo": dpo, "reward": reward, "reward-ours": reward_ours}


def main(args: Args) -> None:
    args.out.mkdir(parents=True)
    CASES[args.case](args)


if __name__ == "__main__":
    main(tyro.cli(Args))
