"""Warm start: supervised fine-tuning on prompt, thinking and response (paper section 2.3, tables 5 and A).

The loss is the mean of -log p(token) over the assistant's tokens of a step, ends of turn included. Prompts
are never trained on. `--think-format plain` leaves the thinking out, for the start of the RLHF twin; it also
trains on ordinary rows of prompt and answer.

    python train_sft_warmstart.py --preset toy                                                # CPU, minutes
    python train_sft_warmstart.py --lora-r 64 --learning-rate 4e-5                            # 1 GPU
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_sft_warmstart.py \\
        --model meta-llama/Llama-3.1-8B                                               # 8 GPUs, as the paper

Deviations from the paper's released code: docs/deviations.md. A default run leaves out a last step of an
epoch that would have fewer rows than --batch-size.

Why this is a loop and not TRL's SFTTrainer: on a CPU, the trainer computes logits of prompts too, so it is
half as fast (results/bench/), and two processes cannot resume. Under FSDP2 it adds up gradients in bfloat16.
None of its arguments changes that.

Hours as the paper's README reports them: about 2.5 on 8 H100; not measured here. Writes results/<run>/:
config.json, command.txt, env.txt, metrics.jsonl, dropped.jsonl, summary.json, checkpoint-*/ and model/, an
ordinary Hugging Face folder (LoRA is merged; the adapter alone is in adapter/).
"""

from dataclasses import dataclass
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import (
    Dropped,
    encode_completion,
    encode_prompt,
    flaw_of,
    load_tokenizer,
    prepare_tokenizer,
)
from rlmt.checkpoint import load_optimizers, save_model
from rlmt.data import read_log, read_traces
from rlmt.learner import Learner, collate_ids, cosine_rate, deal, load_policy, n_tokens_of
from rlmt.memory import Memory, check_memory
from rlmt.model import check_context, is_sharded_launch, start_accelerator
from rlmt.run import RunArgs, Run, constants, count_reasons, parse_args, plan_steps, rows_of_step

from utils import THINK_FORMATS, fail, join_thinking, or_fail


# PRESETS, at the end of this file, have other values for the runs of the paper and for one card
@dataclass
class Args(RunArgs):
    # model and data
    model: str = "meta-llama/Llama-3.1-8B"
    """Hub name or folder of the model to start from."""
    traces: str = "data/traces.jsonl"
    """Traces: a file, a folder or a hub name with its split (NAME:SPLIT), in any form of data/README.md."""
    think_format: Literal[*THINK_FORMATS] = "think"
    """A key of utils.THINK_FORMATS: how thinking and response are written. plain: the response alone, of the
    same rows; or of ordinary rows, without any thinking."""
    max_length: int = 20000
    """Tokens of prompt and completion; longer rows are dropped and listed (released script: 20000). Thinking
    counts in the plain format too."""
    # optimisation
    epochs: float = 2.0
    """Passes over the traces (paper table 5)."""
    batch_size: int = 16
    """Rows an optimizer step, over all GPUs (paper table 5)."""
    learning_rate: float = 4e-6
    """Peak (paper table 5). LoRA wants about ten times as much."""
    warmup_ratio: float = 0.1
    """Share of the steps in which the rate rises (paper table 5); then cosine decay to zero."""
    weight_decay: float = 1e-4
    """Paper table 5."""
    # run
    save_steps: int = 100
    """Optimizer steps between checkpoints."""


# constants: edit inline; config.json holds them and --resume compares them
MAX_GRAD_NORM = 1.0  # gradients are clipped to this norm
ADAM_BETA_1 = 0.9  # paper table 5
ADAM_BETA_2 = 0.95

# on the screen: key in metrics.jsonl
COLUMNS = {"loss": "loss", "lr": "learning_rate", "acc": "mean_token_accuracy"}


# --- rows


@dataclass
class TokenRow:
    """A row to train on: a trace as token ids."""

    id: str
    prompt_ids: list[int]
    ids: list[int]
    """The completion with its end of turn: the tokens in the loss."""

    @property
    def n_tokens(self) -> int:
        return len(self.ids)


def build_rows(
    traces: list[dict], tokenizer, think_format: str, max_length: int
) -> tuple[list[TokenRow], list[dict]]:
    """Returns the traces as token ids, and the dropped ones {id, reason, tokens}.

    A trace is dropped if it has a flaw or is longer than `max_length` tokens. Its thinking counts, also where
    the format leaves it out, so that both twins see the same rows. If no trace has thinking, there is no
    twin: the plain format then trains on all of them.
    """
    some_think = any(trace["thinking"].strip() for trace in traces)
    needs_thinking = some_think or THINK_FORMATS[think_format].thinking_tags is not None
    kept = []
    dropped = []
    for trace in traces:
        try:
            prompt_ids = encode_prompt(tokenizer, trace["messages"])
        except Dropped as reason:
            dropped.append({"id": trace["id"], "reason": str(reason)})
            continue
        flaw = ""
        ids = {}
        for name in ("think", think_format):
            text = join_thinking(trace["thinking"], trace["response"], name)
            flaw = flaw or flaw_of(tokenizer, text, name)
            ids[name] = encode_completion(tokenizer, text)
        if needs_thinking and not trace["thinking"].strip():
            flaw = flaw or "empty_thinking"
        if not needs_thinking:  # its tags would count
            del ids["think"]
        n_tokens = len(prompt_ids) + max(map(len, ids.values()))
        if flaw:
            dropped.append({"id": trace["id"], "reason": flaw})
        elif n_tokens > max_length:
            dropped.append({"id": trace["id"], "reason": "too_long", "tokens": n_tokens})
        else:
            kept.append(TokenRow(trace["id"], prompt_ids, ids[think_format]))
    return kept, dropped


def load_rows(args: Args, tokenizer, accelerator) -> tuple[list[TokenRow], list[dict]]:
    """Reads the traces and prints how many are dropped; exits with 2 if too many are."""
    traces, dropped = read_traces(args.traces)
    n_traces = len(traces) + len(dropped)
    kept, dropped_later = build_rows(traces, tokenizer, args.think_format, args.max_length)
    dropped += dropped_later
    reasons = count_reasons(dropped)
    n_tokens = [n_tokens_of(row) for row in kept]
    said = f"{n_traces} traces, {len(kept)} kept, dropped: {reasons or 'none'}"
    accelerator.print(f"{said}; {sum(n_tokens)} tokens")
    if len(kept) < max(args.batch_size, n_traces / 2):
        fail(
            f"{args.traces}: {said}. A step takes --batch-size {args.batch_size}, and half of the traces must be "
            "good and not longer than --max-length; data/README.md explains the reasons, and the forms of a trace"
        )
    check_context(args.model, tokenizer, max(n_tokens), f"--max-length {args.max_length}")
    return kept, dropped


# --- a step


def accumulate_gradients(token_rows: list[TokenRow], policy: Learner, batch_size: int) -> dict[str, float]:
    """Computes the gradient of one optimizer step, in micro-batches; returns means over tokens for the log.

    The loss is a mean over all completion tokens of the step, whichever process and micro-batch they are in.
    `ends_turn` is the share of the step's `batch_size` rows whose end of turn is the likeliest token there.
    """
    n_tokens = policy.count_tokens(token_rows)
    sums = {"loss": 0.0, "entropy": 0.0, "mean_token_accuracy": 0.0, "ends_turn": 0.0}
    for micro_batch in policy.micro_batches(token_rows):
        prompt_ids = [row.prompt_ids for row in micro_batch]
        completion_ids = [row.ids for row in micro_batch]
        batch = collate_ids(prompt_ids, completion_ids, policy.accelerator.device)
        # (B, T), 0 where there is no completion token
        logprobs, entropies, likeliest = policy.logprobs(batch, extra="likeliest")
        policy.backward(-logprobs.sum() / n_tokens)

        sums["loss"] -= logprobs.detach().sum()
        sums["entropy"] += entropies.sum()
        sums["mean_token_accuracy"] += likeliest.sum()
        # what the model would have written in place of the end of turn
        last_tokens = batch["completion_mask"].sum(1, keepdim=True) - 1
        sums["ends_turn"] += likeliest.gather(1, last_tokens).sum()
    metrics = policy.means(sums, n_tokens)
    metrics["ends_turn"] *= n_tokens / batch_size  # the share of rows, not of tokens
    return metrics


# --- the run


def main(args: Args) -> None:
    accelerator = start_accelerator(args.dtype)
    if THINK_FORMATS[args.think_format].instruction:
        fail(f"--think-format {args.think_format} is asked for by an instruction; it has no warm start")

    # --- data, checked before anything is loaded
    tokenizer = load_tokenizer(args.model)
    accelerator.print(or_fail(prepare_tokenizer, tokenizer, args.think_format, args.chat_template))
    token_rows, dropped = load_rows(args, tokenizer, accelerator)
    steps = plan_steps(len(token_rows), args.batch_size, args.epochs)
    accelerator.print(check_memory({"model": Memory(args).trained(args.model)}))
    run = Run(args, "sft", args.model, constants(globals()))
    if args.dry_run:
        prompt = tokenizer.decode(token_rows[0].prompt_ids)
        completion = tokenizer.decode(token_rows[0].ids)
        accelerator.print(f"the first row, trained on from [[[ to ]]]:\n{prompt}[[[{completion}]]]")
        return
    run.start(dropped)

    # --- model
    if args.lora_r and is_sharded_launch():
        accelerator.print(
            f"LoRA under FSDP2 does not train the embedding of {tokenizer.eos_token!r}; if the metric ends_turn "
            "stays low, the model never ends a turn: train all weights, or on one GPU"
        )
    policy = load_policy(
        args,
        args.model,
        run.checkpoint,
        accelerator,
        betas=(ADAM_BETA_1, ADAM_BETA_2),
        # a base model has never written the end of a turn: its row of the LM head may be empty
        token_ids=[tokenizer.eos_token_id],
    )
    learners = {"model": policy}
    load_optimizers(run.checkpoint, learners)

    # --- train
    with run.training(learners, tokenizer, steps, COLUMNS):
        for step in run.steps():
            chosen = rows_of_step(token_rows, step, args.batch_size, args.seed)
            own_rows = deal(chosen, accelerator)
            rate = cosine_rate(args.learning_rate, step, steps, args.warmup_ratio)
            policy.set_rate(rate)
            metrics = accumulate_gradients(own_rows, policy, args.batch_size)
            metrics["grad_norm"] = policy.clip_gradients(MAX_GRAD_NORM)
            run.check_finite(step, metrics, own_rows)
            policy.step()

            metrics["learning_rate"] = rate
            metrics["epoch"] = step / (len(token_rows) // args.batch_size)
            run.timer.end("update")
            run.end_step(step, metrics, n_tokens=sum(map(n_tokens_of, chosen)))

    # --- save
    save_model(run.folder / "model", policy.model, tokenizer)
    losses = [row["loss"] for row in read_log(run.folder / "metrics.jsonl")]
    summary = {
        "steps": steps,
        "n_rows": len(token_rows),
        "dropped": count_reasons(dropped),
        "tokens": sum(map(n_tokens_of, token_rows)),
        # only the main process, which writes it, is sure to see all losses
        "loss": sum(losses) / max(1, len(losses)),
    }
    preset = args.preset or "paper"  # both scripts have presets of the same names
    training_by_rl = f"train_grpo.py --preset {preset} --think-format {args.think_format} --model"
    run.finish(summary, training_by_rl)


# --- presets: rows of tables 1 and 4, one card, and small runs

PRESETS: dict[str, dict] = {
    # The defaults of Args are table 5's, for Llama-3.1-8B. The released script has 1 row on each of 8 GPUs
    # for Qwen, where table 5 prints 16 for all models: experiments/table1.sh.
    # One card, our choice. GiB: docs/one-gpu.md. Where all weights fit with room for activations, all are
    # trained.
    "24gb": {"lora_r": 64, "learning_rate": 1e-4},
    "80gb": {"learning_rate": 1e-5, "micro_batch_tokens": 32768},
    "small": {  # SmolLM2-135M, part bridge of experiments/study.sh; our choice
        "model": "data/smollm2",
        "traces": "data/small/traces.jsonl",
        "max_length": 512,
        "batch_size": 8,
        "learning_rate": 5e-4,
        "lora_r": 16,
        "micro_batch_tokens": 1024,
        "gradient_checkpointing": False,
        "save_steps": 20,
    },
    "toy": {  # our choice: what a 0.9M model needs
        "model": "data/toy/base",
        "traces": "data/toy/sft_traces.jsonl",
        "max_length": 512,
        "micro_batch_tokens": 2048,
        "learning_rate": 2e-3,
        "gradient_checkpointing": False,
    },
}
if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
