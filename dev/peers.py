"""Runs one side of `dev.bench` in a process of its own: TRL's trainers on the same work, and what makes that
work.

    python -m dev.peers make --folder FOLDER --size cpu                 # models and rows
    python -m dev.peers grpo --folder FOLDER --out FOLDER/peer --size cpu

Each trainer runs as TRL's documentation shows, with TRL's defaults where the work does not fix a value, and
writes `out`/metrics.jsonl with the keys of our scripts' logs, so that the bench reads both sides in the same
way.

All sizes but `small` have models with random weights. Their policy ends at random, so that the lengths of its
completions have a long tail, as those of real ones have. The vocabulary consists of words: a text has as many
tokens for the reward model as for the policy.
"""

import asyncio
import functools
import math
import socket
import time
from dataclasses import dataclass
from multiprocessing import Process
from pathlib import Path

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.endpoint import Endpoint
from rlmt.data import append_jsonl, load_prompts, read_rows, write_jsonl
from rlmt.learner import whole_weights
from rlmt.run import rows_of_step, seed_step
import torch
import tyro
from aiohttp import web
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
import trl  # each trainer is loaded when it is named first; GRPOTrainer's module loads vLLM

from dev.bench import DPO_EPOCHS, SIZES, VLLM_MEMORY, Size, Work
from rewards.preference import RewardModel
from utils import DEVICE, DTYPE, SAFE, compute_dtype

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
END_ID = 1
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
MODELS = {"policy": LlamaForCausalLM, "reward": LlamaForSequenceClassification}


@dataclass
class Args(Work):
    case: tyro.conf.Positional[str] = ""
    """A key of CASES. lean: grpo without TRL's importance correction, which costs a forward and is not our
    default."""
    folder: Path = Path()
    """Folder of models and rows; `make` writes it."""
    out: Path = Path()
    """Folder for metrics.jsonl."""


# --- 1. models and rows


def make(args: Args) -> None:
    """Writes policy/, reward/ and rows.jsonl of a size."""
    torch.manual_seed(args.seed)
    size = SIZES[args.size]
    args.folder.mkdir(exist_ok=True)
    if not size.policy:
        copy_model(args.folder, args.model)
        copy_prompts(args, size)
        return
    for name, shape in (("policy", size.policy), ("reward", size.reward)):
        config = LlamaConfig(
            **shape,
            max_position_embeddings=8704,
            num_labels=1,
            pad_token_id=0,
            eos_token_id=END_ID,
            bos_token_id=None,
        )
        with torch.device(DEVICE):
            model = MODELS[name](config)
        if name == "policy":
            end_at_random(model, size.median_tokens)
        model.to(getattr(torch, DTYPE)).save_pretrained(args.folder / name)
        make_tokenizer(shape["vocab_size"]).save_pretrained(args.folder / name)
    make_rows(args.folder, size)


def make_tokenizer(n_words: int) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token a word."""
    words = SPECIAL_TOKENS + [f"w{i}" for i in range(len(SPECIAL_TOKENS), n_words)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[-1]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=words[0], eos_token=words[END_ID], chat_template=CHAT_TEMPLATE
    )


@torch.no_grad()
def end_at_random(model: LlamaForCausalLM, median: int) -> None:
    """Makes the end of turn about equally likely after every token, so that half of all completions reach
    `median`."""
    # The embedding alone writes the first number of the residual stream. It is large, so that the final norm
    # does not depend on the rest, and the LM head reads it for the end of turn.
    model.model.embed_tokens.weight[:, 0] = 6.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    any_words = torch.tensor([[100, 101, 102, 103]], device=model.device)
    hidden = model.model(any_words).last_hidden_state[0, -1]
    logit = model.lm_head(hidden).logsumexp(-1) + math.log(math.log(2) / median)
    model.lm_head.weight[END_ID] = 0
    model.lm_head.weight[END_ID, 0] = logit / hidden[0]


def make_rows(folder: Path, size: Size) -> None:
    """Writes rows.jsonl, each row with the fields of a prompt, a trace, a pair, and a text to score."""

    def say(n_words: int) -> str:
        ids = torch.randint(len(SPECIAL_TOKENS), size.policy["vocab_size"], (n_words,))
        return " ".join(f"w{i}" for i in ids.tolist())

    def answer(longest: int) -> str:
        length = size.median_tokens * torch.randn(1).exp()  # lognormal, sigma 1
        return say(int(length.clamp(2, longest)))

    rows = []
    for i in range(size.rows):
        rows.append({"id": str(i), "messages": [{"role": "user", "content": say(24 + i % 17)}]})
    for row in rows:
        row |= {"thinking": "", "text": answer(2 * size.max_tokens)}
        for field in ("response", "chosen", "rejected"):
            row[field] = answer(size.max_tokens - 2)
    write_jsonl(folder / "rows.jsonl", rows)


def copy_model(folder: Path, model: Path) -> None:
    """Puts a real model in place as policy/, and saves its body with a random head as reward/."""
    (folder / "policy").symlink_to(model.resolve())
    reward_model = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32, **SAFE
    )
    reward_model.save_pretrained(folder / "reward")
    load_tokenizer(folder / "policy").save_pretrained(folder / "reward")


def copy_prompts(args: Args, size: Size) -> None:
    """Writes the first prompts that are short enough to rows.jsonl."""
    tokenizer = load_tokenizer(args.folder / "policy")
    prompts, _ = load_prompts(args.prompts, tokenizer, size.max_prompt_tokens)
    rows = [{"id": row["id"], "messages": row["messages"]} for row in prompts]
    write_jsonl(args.folder / "rows.jsonl", rows[: size.rows])


def load_tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def load_reward_model(args: Args, **options):
    dtype = compute_dtype(args.dtype)
    return AutoModelForSequenceClassification.from_pretrained(
        args.folder / "reward", dtype=dtype, **options, **SAFE
    )


# --- 2. the trainers


class Log(TrainerCallback):
    """Writes metrics.jsonl, and seeds every step as our loops do, so that both sides sample the same
    completions."""

    def __init__(self, args: Args, trainer):
        self.args = args
        self.trainer = trainer

    def on_train_begin(self, trainer_args, state, control, **_):
        self.started = time.monotonic()

    def on_step_begin(self, trainer_args, state, control, **_):
        seed_step(self.args.seed, state.global_step)

    def on_log(self, trainer_args, state, control, logs, **_):
        if "loss" in logs:  # the last log of a training has none
            line = {"step": state.global_step, "seconds": time.monotonic() - self.started, **logs}
            append_jsonl(self.args.out / "metrics.jsonl", [line])


def shared_options(args: Args, rows: int, batch: int) -> dict:
    """Returns the options that have the same name in all of TRL's configurations, for `rows` rows a step."""
    return {
        # by default TRL's trainers recompute activations, as ours do
        "gradient_checkpointing": SIZES[args.size].gradient_checkpointing,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": rows // batch,
        "output_dir": str(args.out),
        "bf16": compute_dtype(args.dtype) == "bfloat16",
        "use_cpu": DEVICE == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": args.seed,
    }


def start(args: Args, trainer_class, config, rows: list[dict], **reward_model):
    """Returns a trainer of the policy, whose weights have float32."""
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(args.folder / "policy", dtype=torch.float32, **SAFE),
        processing_class=load_tokenizer(args.folder / "policy"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        **reward_model,
    )
    trainer.add_callback(Log(args, trainer))
    return trainer


def grpo(args: Args) -> None:
    """Trains with trl.GRPOTrainer and the same vLLM, the reward model given to TRL as a model."""
    from trl.generation import vllm_generation  # here, as it loads vLLM

    size = SIZES[args.size]
    prompts = read_rows(args.folder / "rows.jsonl", "messages")
    in_order = []
    for step in range(1, args.steps + 2):
        for row in rows_of_step(prompts, step, size.prompts, args.seed):
            in_order.append({"prompt": row["messages"]})
    config = trl.GRPOConfig(
        **shared_options(args, size.prompts * size.group_size, size.peer_micro_batch),
        max_steps=args.steps + 1,
        shuffle_dataset=False,
        num_generations=size.group_size,
        max_completion_length=size.max_tokens,
        beta=1e-3,
        use_bias_correction_kl=False,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        use_vllm=True,
        vllm_gpu_memory_utilization=VLLM_MEMORY,
        vllm_max_model_length=size.max_prompt_tokens + size.max_tokens,
        vllm_importance_sampling_correction=args.case != "lean",
        generation_kwargs={"stop_token_ids": [load_tokenizer(args.folder / "policy").eos_token_id]},
    )
    # TRL has no argument for vLLM's dtype, which would be another one than the trainer's on a CPU
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=compute_dtype(args.dtype))
    trainer = start(
        args,
        trl.GRPOTrainer,
        config,
        in_order,
        reward_funcs=load_reward_model(args),
        reward_processing_classes=load_tokenizer(args.folder / "reward"),
    )
    if DEVICE == "cpu":
        trainer.vllm_generation.sync_weights = lambda: sync_on_cpu(trainer)
    trainer.train()


def sync_on_cpu(trainer: "trl.GRPOTrainer") -> None:
    """Gives vLLM the policy's weights as our sampler does on a CPU, where TRL's own way raises an error."""
    llm = trainer.vllm_generation.llm
    weights = ((name, weight.clone()) for name, weight in whole_weights(trainer.model))
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()


def said(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def tune(args: Args) -> None:
    """Trains with trl.SFTTrainer, or with trl.DPOTrainer, which runs the reference at every step.

    Batches are padded; an epoch is one optimizer step.
    """
    if args.case == "sft":
        trainer_class = trl.SFTTrainer
        config_class = trl.SFTConfig
        fields = {"completion": "response"}  # of TRL's rows, and of ours
        batch = 8  # TRL's default
        options = {"num_train_epochs": args.steps + 1, "learning_rate": 4e-6, "warmup_steps": 0.1}  # a share
    else:
        trainer_class = trl.DPOTrainer
        config_class = trl.DPOConfig
        fields = {"chosen": "chosen", "rejected": "rejected"}
        batch = SIZES[args.size].peer_micro_batch
        options = {"num_train_epochs": DPO_EPOCHS, "learning_rate": 3e-7, "warmup_steps": 0.05}
    rows = []
    for row in read_rows(args.folder / "rows.jsonl", "messages"):
        answers = {name: said(row[field]) for name, field in fields.items()}
        rows.append({"prompt": row["messages"], **answers})
    config = config_class(
        **shared_options(args, len(rows), batch),
        max_length=None,
        lr_scheduler_type="cosine",
        weight_decay=1e-4,
        adam_beta2=0.95,
        **options,
    )
    start(args, trainer_class, config, rows).train()


@torch.no_grad()
def reward(args: Args) -> None:
    """Scores the same texts in each step, as our training scripts do, or as GRPOTrainer does: all in one
    forward, padded to the longest. Logs two of the scores."""
    rows = read_rows(args.folder / "rows.jsonl", "text")
    messages = [row["messages"] for row in rows]
    texts = [row["text"] for row in rows]
    n_tokens = sum(len(text.split()) for text in texts)  # a word is a token
    if args.case == "our_reward":
        score = RewardModel(str(args.folder / "reward"), device=DEVICE, dtype=args.dtype).score
    else:
        model = load_reward_model(args, device_map=DEVICE)
        tokenizer = load_tokenizer(args.folder / "reward")

        def score(messages: list[list[dict]], texts: list[str]) -> list[float]:
            conversations = []
            for prompt, text in zip(messages, texts):
                conversations.append(tokenizer.apply_chat_template(prompt + said(text), tokenize=False))
            batch = tokenizer(conversations, return_tensors="pt", padding=True, add_special_tokens=False)
            return model(**batch.to(DEVICE)).logits[:, 0].tolist()

    started = time.monotonic()
    for step in range(1, args.steps + 2):
        scores = score(messages, texts)
        line = {"step": step, "seconds": time.monotonic() - started, "num_tokens": step * n_tokens}
        line |= {"score_0": scores[0], "score_15": scores[15]}
        append_jsonl(args.out / "metrics.jsonl", [line])


# --- 3. the judge's client: with c calls in flight it can make at most c / LATENCY calls a second

LATENCY = 1.0  # seconds that the server takes for a call
CALLS = 1024
IN_FLIGHT = (32, 64, 128)


async def answer_call(request: web.Request) -> web.Response:
    """Answers a chat request with "7", LATENCY seconds later."""
    await request.read()
    await asyncio.sleep(LATENCY)
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "7"}}
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})


def serve(listening: socket.socket) -> None:
    """Serves on a socket, without end."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer_call)
    web.run_app(app, sock=listening, print=None)


def our_judge(args: Args) -> None:
    """Asks a server, and logs the calls per second as a share of the limit."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    Process(target=serve, args=(listening,), daemon=True).start()
    requests = []
    for i in range(CALLS):
        message = {"role": "user", "content": f"{i} " + "word " * 200}
        requests.append({"messages": [message], "max_tokens": 8})
    line = {"step": 1, "seconds": 0.0, "num_tokens": CALLS * len(IN_FLIGHT)}
    for n in IN_FLIGHT:
        client = Endpoint("m", args.out / f"{n}.jsonl", f"http://127.0.0.1:{port}/v1", concurrency=n)
        client.ask(requests[:1], int)  # before one is answered, few are asked at a time
        started = time.monotonic()
        replies = client.ask(requests, int)
        seconds = time.monotonic() - started
        assert [reply.value for reply in replies] == [7] * CALLS
        line["seconds"] += seconds
        line[f"{n} in flight"] = CALLS / seconds * LATENCY / n
    append_jsonl(args.out / "metrics.jsonl", [line])


CASES = {
    "make": make,
    "grpo": grpo,
    "lean": grpo,
    "sft": tune,
    "dpo": tune,
    "reward": reward,
    "our_reward": reward,
    "our_judge": our_judge,
}


if __name__ == "__main__":
    args = tyro.cli(Args)
    args.out.mkdir(parents=True, exist_ok=True)
    CASES[args.case](args)
