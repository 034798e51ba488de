"""Bradley-Terry preference reward model: -log sigmoid(r(chosen) - r(rejected)), the mean over pairs.

    python train_reward.py --preset toy                                                 # CPU, minutes
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_reward.py \\
        --pairs data/skywork.jsonl                                                      # 8 GPUs

The paper uses a released reward model (Skywork-Reward-Llama-3.1-8B-v0.2). This script is for users who want
to train one, and for ablations over reward models. Pairs are rendered as rewards/preference.py renders them
to score. At the end, held-out pairs give its accuracy and its calibration error (ECE). Pairs are sorted into
ten bins by the probability that the model gives to the order it prefers. In each bin its mean is compared
with the share of pairs for which that order is right. As annotators like long answers, two more numbers stand
beside: how often the longer answer is the better one, and the accuracy where both are about equally long. A last
step that would have fewer pairs than --batch-size is left out of each epoch.

Why this is a loop and not TRL's RewardTrainer: under FSDP2 the trainer adds up gradients in bfloat16, and two
processes on a CPU cannot resume, because its optimizer's state does not load. None of its arguments changes that.

Hardware and hours: not measured. Writes results/<run>/: config.json, command.txt, env.txt, metrics.jsonl,
dropped.jsonl, summary.json, checkpoint-*/ and model/, an ordinary AutoModelForSequenceClassification folder.
"""

import json
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import context_length, load_config, load_tokenizer, prepare_tokenizer, without_control
from rlmt.checkpoint import load_optimizers, save_model
from rlmt.data import read_pairs, write_jsonl
from rlmt.memory import check_memory, frozen_gib, trained_gib
from rlmt.model import (
    Learner,
    check_finite,
    clip_gradients,
    cosine_rate,
    gradient_exchange,
    load_classifier,
    micro_batches,
    prepare_trained,
    start_accelerator,
)
from rlmt.run import (
    RunArgs,
    check_run,
    constants,
    finish_run,
    parse_args,
    resume,
    rows_of_step,
    start_run,
    training,
)
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification

from utils import fail, join_thinking, or_fail
from rewards.preference import RewardModel


# PRESETS, at the end of this file, have other values for one card and small runs
@dataclass
class Args(RunArgs):
    # model and data
    model: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Hub name or folder to start from; a head of one output is kept, any other replaced by a fresh one."""
    pairs: str = "data/skywork.jsonl"
    """Pairs: a file, a folder or a hub name with its split (NAME:SPLIT), in any form of data/README.md."""
    reward_on: Literal["response", "think+response"] = "response"
    """What it learns to read; think+response needs the two thinking fields."""
    max_length: int = 4096
    """Tokens of prompt and completion; pairs with a longer side are dropped, counted and listed."""
    held_out: float = 0.05
    """Share of the prompts whose pairs are kept for evaluation, at least 2 prompts."""
    held_out_pairs: str = ""
    """Pairs for evaluation, of prompts that --pairs does not have; then all of --pairs is trained on."""
    # optimisation
    epochs: float = 1.0
    """Passes over the pairs."""
    batch_size: int = 64
    """Pairs an optimizer step, over all GPUs."""
    learning_rate: float = 2e-6
    """Peak, our choice for 8B models; then cosine decay to zero. LoRA wants about ten times as much."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the rate rises."""
    weight_decay: float = 0.0
    """AdamW's."""
    # run
    save_steps: int = 100
    """Optimizer steps between checkpoints."""


# constants: edit inline; config.json holds them and --resume compares them
MAX_GRAD_NORM = 1.0  # gradients are clipped to this norm
EQUAL_LENGTH = 1.25  # answers are about equally long if the longer has at most this many times the characters

COLUMNS = {"loss": "loss", "accuracy": "accuracy", "margin": "margin"}  # on the screen: key in metrics.jsonl


# --- pure functions


def bradley_terry_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Returns -log P(chosen is better) (B,), where P = sigmoid(r(chosen) - r(rejected)).

    Bradley and Terry's model, equations 1 and 2 of 2305.18290.
    """
    return -F.logsigmoid(chosen - rejected)


def calibration(margins: list[float], n_bins: int = 10) -> dict:
    """Returns accuracy, expected calibration error (1706.04599) and bins of margins r(chosen) - r(rejected).

    Each pair counts once. The side that the model favours, with probability sigmoid(|margin|) in [0.5, 1],
    was right if the margin is positive, and half right if it is zero.
    """
    margin = torch.tensor(margins, dtype=torch.float64)
    predicted = torch.sigmoid(margin.abs())
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    bin_of_pair = ((predicted - 0.5) * 2 * n_bins).long().clamp(max=n_bins - 1)
    bins = []
    ece = 0.0
    for number in bin_of_pair.unique().tolist():
        inside = bin_of_pair == number
        mean_predicted = predicted[inside].mean().item()
        mean_right = right[inside].mean().item()
        n = inside.sum().item()
        bins.append({"predicted": mean_predicted, "right": mean_right, "n": n})
        ece += n / len(margins) * abs(mean_predicted - mean_right)
    return {"accuracy": right.mean().item(), "ece": ece, "n": len(margins), "bins": bins}


def compare_with_length(margins: list[float], pairs: list["Pair"]) -> dict:
    """Returns how a reward model compares with the rule that the longer answer is the better one.

    `length_baseline` is the rule's accuracy. `equal_length` compares the two on pairs whose answers are about
    equally long, where the rule should know little. It is None if fewer than two prompts have such pairs.
    """
    all_longer = []
    equal_longer = []
    equal_right = []
    equal_prompts = []
    for pair, margin in zip(pairs, margins, strict=True):
        longer_is_better = is_right(pair.chosen_length - pair.rejected_length)
        all_longer.append(longer_is_better)
        shorter, longer = sorted([pair.chosen_length, pair.rejected_length])
        if longer <= EQUAL_LENGTH * shorter:
            equal_longer.append(longer_is_better)
            equal_right.append(is_right(margin))
            equal_prompts.append(pair.prompt)

    result = {"length_baseline": fmean(all_longer), "equal_length": None}
    if len(set(equal_prompts)) > 1:
        result["equal_length"] = {
            "n": len(equal_right),
            "accuracy": fmean(equal_right),
            "standard_error": clustered_error(equal_right, equal_prompts),
            "length_baseline": fmean(equal_longer),
        }
    return result


def is_right(margin: float) -> float:
    """Returns 1 for a positive margin, 0 for a negative one, and a half for a tie."""
    if margin == 0:
        return 0.5
    return float(margin > 0)


def clustered_error(values: list[float], prompts: list[str]) -> float:
    """Returns the standard error of the mean of `values`, where those of one prompt may depend on each other.

    The pairs of a prompt often share an answer. Counted as independent, they would look like more evidence.
    """
    mean = fmean(values)
    deviations = defaultdict(float)
    for value, prompt in zip(values, prompts, strict=True):
        deviations[prompt] += value - mean
    n_prompts = len(deviations)
    squares = sum(deviation**2 for deviation in deviations.values())
    return math.sqrt(squares * n_prompts / (n_prompts - 1)) / len(values)


# --- pairs


@dataclass
class Pair:
    """A conversation with its better and its worse answer."""

    id: str
    prompt: str
    """The conversation as JSON; several pairs may have the same."""
    chosen_ids: list[int]
    rejected_ids: list[int]
    chosen_length: int
    """Characters of the answer, without its thinking."""
    rejected_length: int

    @property
    def longest(self) -> int:
        return max(len(self.chosen_ids), len(self.rejected_ids))

    @property
    def n_tokens(self) -> int:
        return len(self.chosen_ids) + len(self.rejected_ids)


def n_padded(pair: Pair) -> int:
    """Returns a pair's tokens in a forward: two rows, the shorter one padded."""
    return 2 * pair.longest


def lengths_of(pair: Pair) -> tuple[int, int]:
    """Returns a pair's tokens for micro_batches: prompt and answer are one text, which is padded once."""
    return n_padded(pair), 0


def encode_side(row: dict, side: str, tokenizer, reward_on: str) -> list[int]:
    """Returns the token ids of a row's conversation with its chosen or rejected answer."""
    text = row[side]
    if reward_on == "think+response":
        text = join_thinking(row[f"{side}_thinking"], text, "think")
    messages = [*row["messages"], {"role": "assistant", "content": text}]
    return tokenizer.apply_chat_template(without_control(tokenizer, messages), return_dict=False)


def build_pairs(
    preferences: list[dict], tokenizer, reward_on: str, max_length: int
) -> tuple[list[Pair], list[dict]]:
    """Returns the pairs as token ids, and the dropped ones {id, reason, tokens}."""
    kept = []
    dropped = []
    for row in preferences:
        chosen_ids = encode_side(row, "chosen", tokenizer, reward_on)
        rejected_ids = encode_side(row, "rejected", tokenizer, reward_on)
        prompt = json.dumps(row["messages"])
        pair = Pair(row["id"], prompt, chosen_ids, rejected_ids, len(row["chosen"]), len(row["rejected"]))
        if chosen_ids == rejected_ids:
            dropped.append({"id": row["id"], "reason": "identical"})
        elif pair.longest > max_length:
            dropped.append({"id": row["id"], "reason": "too_long", "tokens": pair.longest})
        else:
            kept.append(pair)
    return kept, dropped


def split_by_prompt(preferences: list[dict], share: float, seed: int) -> tuple[list[dict], list[dict]]:
    """Returns rows to train on and held-out rows; all rows of a prompt go to the same side."""
    prompts = sorted({json.dumps(row["messages"]) for row in preferences})
    random.Random(seed).shuffle(prompts)
    held_out_prompts = set(prompts[: max(2, int(share * len(prompts)))])
    train = []
    held_out = []
    for row in preferences:
        if json.dumps(row["messages"]) in held_out_prompts:
            held_out.append(row)
        else:
            train.append(row)
    return train, held_out


def load_reward_tokenizer(args: Args, accelerator):
    """Loads the tokenizer with the chat template that renders both sides of a pair."""
    tokenizer = load_tokenizer(args.model)
    think_format = "plain"
    if args.reward_on == "think+response":
        think_format = "think"
    accelerator.print(or_fail(prepare_tokenizer, tokenizer, think_format, args.chat_template))
    del tokenizer.trained_as  # a reward model generates nothing, so its folder gets no think_format.json
    return tokenizer


def check_thinking(path: str, preferences: list[dict]) -> None:
    """Exits with 2 unless both sides of all pairs have thinking."""
    for row in preferences:
        for side in ("chosen", "rejected"):
            if row.get(f"{side}_thinking") is None:
                fail(
                    f"{path}: the row {row['id']} has neither '{side}_thinking' nor thinking in its "
                    f"{side!r}; use --reward-on response"
                )


def check_disjoint(args: Args, train: list[dict], held_out: list[dict]) -> None:
    """Exits with 2 if a prompt is in both files: its held-out pairs would measure what was learned by heart."""
    trained = {json.dumps(row["messages"]) for row in train}
    for row in held_out:
        if json.dumps(row["messages"]) in trained:
            fail(
                f"--held-out-pairs {args.held_out_pairs}: the prompt of row {row['id']} is in "
                f"--pairs {args.pairs} as well; take it out of one of them"
            )


def load_pairs(args: Args, tokenizer, accelerator) -> tuple[list[Pair], list[Pair], list[dict]]:
    """Reads pairs to train on, held-out pairs, and rows {id, reason, tokens} of the dropped ones."""
    train_rows, unread = read_pairs(args.pairs)
    held_out_source = args.held_out_pairs or args.pairs
    if args.held_out_pairs:
        held_out_rows, unread_held_out = read_pairs(args.held_out_pairs, "--held-out-pairs")
        check_disjoint(args, train_rows, held_out_rows)
        unread += unread_held_out
    else:
        train_rows, held_out_rows = split_by_prompt(train_rows, args.held_out, args.seed)
    if args.reward_on == "think+response":
        check_thinking(args.pairs, train_rows)
        check_thinking(held_out_source, held_out_rows)
    train, dropped_train = build_pairs(train_rows, tokenizer, args.reward_on, args.max_length)
    held_out, dropped_held_out = build_pairs(held_out_rows, tokenizer, args.reward_on, args.max_length)
    dropped = unread + dropped_train + dropped_held_out
    reasons = dict(Counter(row["reason"] for row in dropped))
    accelerator.print(
        f"{len(train_rows) + len(held_out_rows) + len(unread)} pairs, dropped: {reasons or 'none'}; "
        f"{len(train)} to train on, {len(held_out)} held out"
    )
    if not held_out:
        fail(f"{held_out_source}: no pair is left to hold out; raise --max-length or hold out more")
    if len(train) < args.batch_size:
        fail(f"{args.pairs}: {len(train)} usable pairs are fewer than --batch-size {args.batch_size}")
    longest = max(pair.longest for pair in train + held_out)
    context = context_length(load_config(args.model))
    if longest > context:
        fail(
            f"{args.pairs}: {longest} tokens are more than the {context} of {args.model}'s context; "
            f"--max-length {context} leaves longer pairs out"
        )
    return train, held_out, dropped


# --- model and step


def load_model(args: Args, folder: Path | None, tokenizer) -> torch.nn.Module:
    """Loads the classifier with one output; a resumed run loads the checkpoint in `folder`."""
    torch.manual_seed(args.seed)  # a new head, and LoRA's initial weights
    model = load_classifier(AutoModelForSequenceClassification, "SEQ_CLS", args.model, args, folder)
    model.config.reward_on = args.reward_on  # rewards/preference.py compares it with its own
    # the score is read at the last token that is not this one
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    return model


def load_learner(args: Args, folder: Path | None, tokenizer, accelerator) -> Learner:
    """Loads the classifier and its optimizer; a resumed run takes both from the checkpoint in `folder`."""
    model = load_model(args, folder, tokenizer)
    learner = prepare_trained(accelerator, model, args.learning_rate, args.weight_decay, optim=args.optim)
    load_optimizers(folder, {"model": learner})
    return learner


def score_pairs(pairs: list[Pair], model, pad_token_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rewards (B,) of the chosen and of the rejected sides, in one forward."""
    sides = [torch.tensor(pair.chosen_ids) for pair in pairs]
    sides += [torch.tensor(pair.rejected_ids) for pair in pairs]
    ids = pad_sequence(sides, batch_first=True, padding_value=pad_token_id)
    mask = pad_sequence([torch.ones_like(side) for side in sides], batch_first=True)
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    chosen, rejected = logits[:, 0].to(torch.promote_types(logits.dtype, torch.float32)).chunk(2)
    return chosen, rejected


def accumulate_gradients(pairs: list[Pair], model, args: Args, pad_token_id: int, accelerator) -> dict:
    """Computes the gradient of one optimizer step, in micro-batches; returns what is logged of its pairs."""
    batches = micro_batches(pairs, args.micro_batch_tokens, accelerator, lengths_of)
    losses = []
    all_chosen = []
    all_rejected = []
    for i, members in enumerate(batches):
        with gradient_exchange(model, accelerator, is_last=i == len(batches) - 1):
            chosen, rejected = score_pairs(members, model, pad_token_id, accelerator.device)
            loss = bradley_terry_loss(chosen, rejected)
            # DDP and FSDP2 average gradients over processes; we want their sum
            accelerator.backward(loss.sum() / args.batch_size * accelerator.num_processes)
        losses.append(loss.detach())
        all_chosen.append(chosen.detach())
        all_rejected.append(rejected.detach())

    loss = accelerator.gather(torch.cat(losses))
    chosen = accelerator.gather(torch.cat(all_chosen))
    rejected = accelerator.gather(torch.cat(all_rejected))
    rewards = torch.cat([chosen, rejected])
    return {
        "loss": loss.mean().item(),
        "min_reward": rewards.min().item(),
        "mean_reward": rewards.mean().item(),
        "max_reward": rewards.max().item(),
        "accuracy": (chosen > rejected).float().mean().item(),
        "margin": (chosen - rejected).mean().item(),
    }


# --- the run


def measure_held_out(pairs: list[Pair], folder: Path, device: str, dtype: str) -> dict:
    """Scores held-out pairs with the saved model, as any other script loads it.

    Returns its calibration, and how it compares with length.
    """
    # it is given token ids, so its template renders nothing here, and may drop thinking
    model = RewardModel(str(folder), reward_on="response", device=device, dtype=dtype)
    margins = []
    n_at_once = 64  # the bar moves this often
    for start in tqdm(range(0, len(pairs), n_at_once), desc=f"held-out pairs by {n_at_once}"):
        some = pairs[start : start + n_at_once]
        chosen = model.score_ids([pair.chosen_ids for pair in some])
        rejected = model.score_ids([pair.rejected_ids for pair in some])
        margins += [better - worse for better, worse in zip(chosen, rejected, strict=True)]
    return calibration(margins) | compare_with_length(margins, pairs)


def check_arguments(args: Args, accelerator) -> None:
    """Exits with 2 for arguments that cannot work together."""
    if args.batch_size % accelerator.num_processes:
        fail(
            f"--batch-size {args.batch_size} cannot be shared by {accelerator.num_processes} processes; "
            "use a multiple"
        )


def set_rate(optimizer, learning_rate: float) -> None:
    """Sets the learning rate. A function, as its variable `group` would keep the weights after training."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def main(args: Args) -> None:
    accelerator = start_accelerator(args.dtype)
    check_arguments(args, accelerator)

    # --- data, checked before anything is loaded
    tokenizer = load_reward_tokenizer(args, accelerator)
    pairs, held_out, dropped = load_pairs(args, tokenizer, accelerator)
    steps = max(1, round(args.epochs * (len(pairs) // args.batch_size)))
    accelerator.print(f"{steps} steps of {args.batch_size} pairs, on {accelerator.num_processes} processes")
    memory = trained_gib(args.model, args, AutoModelForSequenceClassification)
    measured = frozen_gib(args.model, AutoModelForSequenceClassification, args.dtype)
    parts = {"training": memory, "held-out pairs": measured}
    accelerator.print(check_memory(parts, args, at_once=False))
    start = check_run(args, "reward", args.model, constants(globals()))
    if args.dry_run:
        return
    run = resume(start_run(start), args, accelerator)
    write_jsonl(run.folder / "dropped.jsonl", dropped)

    # --- model
    learner = load_learner(args, run.checkpoint, tokenizer, accelerator)
    model, optimizer = learner

    # --- train
    with training(run, {"model": learner}, tokenizer, steps, COLUMNS) as train:
        for step in train.steps():
            members = rows_of_step(pairs, step, args.batch_size, args.seed)
            # sorted, so that the processes get pairs of about equal length
            members.sort(key=n_padded, reverse=True)
            own_members = members[accelerator.process_index :: accelerator.num_processes]

            learning_rate = cosine_rate(args.learning_rate, step - 1, steps, args.warmup_ratio)
            set_rate(optimizer, learning_rate)
            metrics = accumulate_gradients(own_members, model, args, tokenizer.pad_token_id, accelerator)
            metrics["grad_norm"] = clip_gradients(model, MAX_GRAD_NORM)
            check_finite(metrics, own_members, step, run.folder)
            optimizer.step()
            optimizer.zero_grad()

            metrics["learning_rate"] = learning_rate
            metrics["epoch"] = step * args.batch_size / len(pairs)
            train.timer.end("update")
            train.end(step, metrics, n_tokens=sum(pair.n_tokens for pair in members))

    # --- save and measure
    save_model(run.folder / "model", model, tokenizer, accelerator)
    del learner, model, optimizer, train
    accelerator.free_memory()  # gradients and optimizer too: now a whole copy is loaded
    summary = {"n_pairs": len(pairs), "dropped": len(dropped)}
    if accelerator.is_main_process:
        device = str(accelerator.device)
        summary["held_out"] = measure_held_out(held_out, run.folder / "model", device, args.dtype)
    finish_run(run.folder, summary)


# --- presets: one card, and small runs

ONE_CARD = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "learning_rate": 1e-5}  # our choice
PRESETS: dict[str, dict] = {
    "24gb": {**ONE_CARD, "optim": "adamw_8bit"},
    "80gb": {**ONE_CARD, "micro_batch_tokens": 32768},
    "small": {  # experiments/small.sh, a model of 135M parameters; our choice
        "model": "data/smollm2",
        "max_length": 384,
        "batch_size": 16,
        "learning_rate": 3e-4,
        "lora_r": 16,
        "micro_batch_tokens": 1024,
        "gradient_checkpointing": False,
        "save_steps": 10,
        "keep_checkpoints": 1,
    },
    "toy": {  # our choice
        "model": "data/toy/base",
        "pairs": "data/toy/preference_pairs.jsonl",
        "max_length": 256,
        "batch_size": 32,
        "micro_batch_tokens": 2048,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "held_out": 0.2,
    },
}


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
