"""Bradley-Terry preference reward model: -log sigmoid(r(chosen) - r(rejected)) on pairs (TRL's RewardTrainer).

    python train_reward.py --preset toy
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_reward.py --model meta-llama/Llama-3.1-8B-Instruct \\
        --pairs data/skywork.jsonl

The paper uses a released one (Skywork-Reward-Llama-3.1-8B-v0.2); this script is for users who want their own, and for the
ablations over reward models. Pairs are rendered as `utils.RewardModel` renders them when it scores. Reported on held-out
pairs: accuracy, and calibration (mean predicted probability against the share of pairs that went that way, in ten bins,
and their weighted gap, ECE). Writes results/<run>/: config.json, command.txt, env.txt, metrics.jsonl, dropped.jsonl,
summary.json, checkpoint-*/ and model/, an ordinary AutoModelForSequenceClassification folder.
"""

import json
import random
from dataclasses import dataclass
from typing import Literal

import runs  # first: it turns telemetry off before trl is imported
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from rows import read_rows
import training
import utils


@dataclass
class Args:
    # model and data
    model: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Hub name or folder to start from; a head of one output is kept, any other replaced by a fresh one."""
    pairs: str = "data/skywork.jsonl"
    """Preference rows {id, messages, chosen, rejected[, chosen_thinking, rejected_thinking]}; see data/README.md."""
    reward_on: Literal["response", "think+response"] = "response"
    """What it learns to read; think+response needs the two thinking fields."""
    chat_template: str = "auto"
    """auto: the tokenizer's own if it keeps thinking verbatim, else ours for its family; or llama3, chatml, plain, a path."""
    max_length: int = 4096
    """Tokens; longer pairs are dropped, counted and listed."""
    held_out: float = 0.05
    """Share of the prompts whose pairs are kept for evaluation, at least 2 prompts."""
    # optimisation
    epochs: float = 1
    """Passes over the pairs."""
    batch_size: int = 64
    """Pairs an optimizer step, over all GPUs."""
    micro_batch_size: int = 2
    """Pairs a forward, per GPU."""
    learning_rate: float = 2e-6
    """Our choice for 8B models; cosine decay, 5 % warm-up."""
    weight_decay: float = 0.0
    """Of AdamW."""
    gradient_checkpointing: bool = True
    """Activations are computed again in the backward pass: less memory, about a third more time."""
    # run
    preset: str = ""
    """A name from PRESETS at the top of this script; flags override it."""
    save_steps: int = 100
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints kept; 0 keeps all."""
    stall_minutes: float = 1.0
    """Without progress on any rank (a forward, a sampled token, a judge's reply) the run ends; tenfold to load or save."""
    seed: int = 0
    """Of the order of the data, of sampling and of new weights."""
    out: str = ""
    """Run folder; empty: results/<script>__<preset or model>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Continue from the run's last complete checkpoint."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, print what would run, and stop before a model is loaded."""


PRESETS: dict[str, dict] = {
    "toy": {
        "model": "data/toy/base",
        "pairs": "data/toy/preference_pairs.jsonl",
        "max_length": 256,
        "batch_size": 32,
        "micro_batch_size": 32,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "held_out": 0.2,
    },  # our choice
}


def build_pairs(
    rows: list[dict], tokenizer, reward_on: str, max_length: int
) -> tuple[list[dict], list[dict]]:
    """Tokenised pairs {chosen_ids, rejected_ids} and the dropped ones {id, reason, tokens}."""
    kept, dropped = [], []
    for row in rows:
        texts = [row["chosen"], row["rejected"]]
        if reward_on == "think+response":
            texts = [
                utils.join_thinking(row[f"{side}_thinking"], row[side], "think")
                for side in ("chosen", "rejected")
            ]
        turns = (
            utils.without_control(tokenizer, [*row["messages"], {"role": "assistant", "content": t}])
            for t in texts
        )
        chosen, rejected = (tokenizer.apply_chat_template(t, return_dict=False) for t in turns)
        if chosen == rejected:
            dropped.append({"id": row["id"], "reason": "identical"})
        elif max(len(chosen), len(rejected)) > max_length:
            dropped.append({"id": row["id"], "reason": "too_long", "tokens": max(len(chosen), len(rejected))})
        else:
            kept.append({"chosen_ids": chosen, "rejected_ids": rejected})
    return kept, dropped


def calibration(margins: list[float], n_bins: int = 10) -> dict:
    """Accuracy, expected calibration error and the bins of held-out margins r(chosen) - r(rejected), shape (N,).

    Each pair counts once: the side the model favours, with probability sigmoid(|margin|) in [0.5, 1], was right if the
    margin is positive. A margin of zero counts as half right.
    """
    m = torch.tensor(margins, dtype=torch.float64)
    p, right = torch.sigmoid(m.abs()), (m > 0).double() + 0.5 * (m == 0).double()
    index = ((p - 0.5) * 2 * n_bins).long().clamp(max=n_bins - 1)
    bins = [
        {
            "predicted": p[index == b].mean().item(),
            "right": right[index == b].mean().item(),
            "n": int((index == b).sum()),
        }
        for b in range(n_bins)
        if (index == b).any()
    ]
    ece = sum(b["n"] * abs(b["predicted"] - b["right"]) for b in bins) / len(margins)
    return {"accuracy": right.mean().item(), "ece": ece, "n": len(margins), "bins": bins}


def main(args: Args) -> None:
    state = training.processes()
    world = state.num_processes
    accumulation, rest = divmod(args.batch_size, args.micro_batch_size * world)
    if rest:
        runs.fail(
            f"--batch-size {args.batch_size} is not a multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{world} processes"
        )

    # --- 1. data
    fields = ["chosen_thinking", "rejected_thinking"] if args.reward_on == "think+response" else []
    rows = read_rows(args.pairs, "messages", "chosen", "rejected", *fields)
    tokenizer = runs.load_tokenizer(args.model)
    state.print(
        runs.or_fail(utils.prepare_tokenizer, tokenizer, "think" if fields else "plain", args.chat_template)
    )
    prompts = sorted({json.dumps(row["messages"]) for row in rows})
    random.Random(args.seed).shuffle(prompts)
    unseen = set(prompts[: max(2, int(args.held_out * len(prompts)))])  # several pairs may share a prompt
    sides = [
        [row for row in rows if (json.dumps(row["messages"]) in unseen) == side] for side in (True, False)
    ]
    (held, dropped), (train, others) = (
        build_pairs(side, tokenizer, args.reward_on, args.max_length) for side in sides
    )
    dropped += others
    state.print(
        f"{len(rows)} pairs; {len(dropped)} dropped; {len(train)} to train on, {len(held)} held out; "
        f"{args.batch_size} a step = {args.micro_batch_size} x {accumulation} x {world} processes"
    )
    if not held:
        runs.fail(f"{args.pairs}: no pair is left to hold out; raise --held-out or --max-length")
    if len(train) < args.batch_size:
        runs.fail(f"{args.pairs}: {len(train)} usable pairs are fewer than --batch-size {args.batch_size}")
    if args.dry_run:
        return
    run = runs.start_run(args, "reward", args.model)
    runs.write_dropped(run, dropped)

    # --- 2. model
    torch.manual_seed(args.seed)
    model, _ = training.load_weights(
        AutoModelForSequenceClassification, args.model, new_head=True, num_labels=1, dtype=torch.float32
    )
    model.config.reward_on = args.reward_on  # for who scores with it

    # --- 3. train
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            **training.common_config(args, run),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.micro_batch_size,
            per_device_eval_batch_size=args.micro_batch_size,
            gradient_accumulation_steps=accumulation,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.05,
            weight_decay=args.weight_decay,
            max_length=None,
        ),
        train_dataset=Dataset.from_list(train),
        processing_class=tokenizer,
        callbacks=[
            training.RunLogger(run, {"loss": "loss", "accuracy": "accuracy", "margin": "margin"}, None)
        ],
    )
    lengths = [max(len(p["chosen_ids"]), len(p["rejected_ids"])) for p in train]
    trainer._get_train_sampler = lambda dataset: training.SortedSteps(lengths, args.batch_size, args.seed)
    training.train(trainer, run, args.resume)

    # --- 4. save, and score the held-out pairs from the saved folder as any other script will
    training.save_model(trainer, run / "model", None)
    summary = {"n_pairs": len(train), "dropped": len(dropped)}
    if state.is_main_process:
        scorer = utils.RewardModel(str(run / "model"), device=str(state.device))
        scores = scorer.score_ids([p[side] for p in held for side in ("chosen_ids", "rejected_ids")])
        margins = [c - r for c, r in zip(scores[::2], scores[1::2])]
        summary["held_out"] = calibration(margins)
    training.finish(run, summary)


if __name__ == "__main__":
    main(runs.parse_args(Args, PRESETS))
