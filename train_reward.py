"""Bradley-Terry preference reward model: -log sigmoid(r(chosen) - r(rejected)), the mean over pairs.

    python train_reward.py --preset toy                                                 # CPU, minutes
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_reward.py \\
        --pairs data/skywork.jsonl                                                      # 8 GPUs

The paper uses a released reward model (Skywork-Reward-Llama-3.1-8B-v0.2). This script is for users who want
to train one, and for ablations over reward models. Pairs are rendered as rlmt/reward_model.py renders them
to score. At the end, held-out pairs give its accuracy and its calibration error (ECE). Pairs are sorted into
ten bins by the probability that the model gives to the order it prefers. In each bin its mean is compared
with the share of pairs for which that order is right. As annotators like long answers, two more numbers stand
beside: how often the longer answer is the better one, and the accuracy where both are about equally long. A
last step that would have fewer pairs than --batch-size is left out of each epoch.

Why this is a loop and not TRL's RewardTrainer: under FSDP2 the trainer adds up gradients in bfloat16, and two
processes on a CPU cannot resume, because its optimizer's state does not load. None of its arguments changes
that.

Hardware and hours: not measured. Writes results/<run>/: config.json, command.txt, env.txt, metrics.jsonl,
dropped.jsonl, summary.json, checkpoint-*/ and model/, an ordinary AutoModelForSequenceClassification folder.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import Dropped, flaw_of, load_tokenizer, prepare_tokenizer, render, without_control
from rlmt.checkpoint import load_optimizers, save_model
from rlmt.data import drop_if, read_pairs, text_of_turns
from rlmt.learner import Learner, cosine_rate, deal, unwrap
from rlmt.memory import Memory, check_memory
from rlmt.model import check_context, load_trained, start_accelerator
from rlmt.run import RunArgs, Run, constants, count_reasons, parse_args, plan_steps, rows_of_step
import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification

from utils import fail, join_thinking, or_fail
from rlmt.reward_model import RewardModel, check_template, scores_of, set_pad_token


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


def calibration(margins: list[float]) -> dict:
    """Returns accuracy, expected calibration error (1706.04599) and ten bins of margins r(chosen) - r(rejected).

    Each pair counts once. The side that the model favours, with probability sigmoid(|margin|) in [0.5, 1],
    was right if the margin is positive, and half right if it is zero.
    """
    import pandas as pd  # slow to import

    margin = pd.Series(margins)
    predicted = 1 / (1 + np.exp(-margin.abs()))
    pairs = pd.DataFrame({"predicted": predicted, "right": is_right(margin)})
    n_bins = 10
    bin_of_pair = ((predicted - 0.5) * 2 * n_bins).astype(int).clip(upper=n_bins - 1)
    bins = pairs.groupby(bin_of_pair).mean()
    bins["n"] = bin_of_pair.value_counts()
    gaps = (bins["predicted"] - bins["right"]).abs()
    return {
        "accuracy": pairs["right"].mean(),
        "ece": (gaps * bins["n"]).sum() / len(pairs),
        "n": len(pairs),
        "bins": bins.to_dict("records"),
    }


def compare_with_length(margins: list[float], pairs: list["Pair"]) -> dict:
    """Returns how a reward model compares with the rule that the longer answer is the better one.

    `length_baseline` is the rule's accuracy. `equal_length` compares the two on pairs whose answers are about
    equally long, where the rule should know little. It is None if fewer than two prompts have such pairs.
    """
    import pandas as pd  # slow to import

    rows = pd.DataFrame(pairs)
    rows["right"] = is_right(pd.Series(margins))
    rows["longer_is_right"] = is_right(rows["chosen_length"] - rows["rejected_length"])
    lengths = rows[["chosen_length", "rejected_length"]]
    equal = rows[lengths.max(axis=1) <= EQUAL_LENGTH * lengths.min(axis=1)]

    result = {"length_baseline": rows["longer_is_right"].mean(), "equal_length": None}
    n_prompts = equal["prompt"].nunique()
    if n_prompts > 1:
        accuracy = equal["right"].mean()
        # pairs of a prompt often share an answer: counted as independent, they would look like more evidence
        deviations = (equal["right"] - accuracy).groupby(equal["prompt"]).sum()
        variance = (deviations**2).sum() * n_prompts / (n_prompts - 1)
        result["equal_length"] = {
            "n": len(equal),
            "accuracy": accuracy,
            "standard_error": math.sqrt(variance) / len(equal),
            "length_baseline": equal["longer_is_right"].mean(),
        }
    return result


def is_right(margins):
    """Returns 1 for positive margins (a pandas Series), 0 for negative ones, and a half for ties."""
    return (np.sign(margins) + 1) / 2


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


def length_of(pair: Pair) -> int:
    """Returns the tokens of a pair's two sides, with the shorter one padded, as micro_batches counts them."""
    return 2 * pair.longest


def encode_side(row: dict, side: str, tokenizer, reward_on: str) -> list[int]:
    """Returns the token ids of a row's conversation with its chosen or rejected answer; raises Dropped for a flaw
    of the answer."""
    text = row[side]
    think_format = "plain"
    if reward_on == "think+response":
        thinking = row.get(f"{side}_thinking")
        if thinking is None:
            fail(
                f"row {row['id']} has neither '{side}_thinking' nor thinking in its {side!r}; "
                "use --reward-on response"
            )
        think_format = "think"
        text = join_thinking(thinking, text, think_format)
    messages = [*row["messages"], {"role": "assistant", "content": text}]
    ids = render(tokenizer, without_control(tokenizer, messages))
    flaw = flaw_of(tokenizer, text, think_format)
    drop_if(flaw != "", flaw)
    return ids


def build_pairs(
    preferences: list[dict], tokenizer, reward_on: str, max_length: int
) -> tuple[list[Pair], list[dict]]:
    """Returns the pairs as token ids, and the dropped ones {id, reason, tokens}."""
    kept = []
    dropped = []
    for row in preferences:
        try:
            chosen_ids = encode_side(row, "chosen", tokenizer, reward_on)
            rejected_ids = encode_side(row, "rejected", tokenizer, reward_on)
        except Dropped as reason:
            dropped.append({"id": row["id"], "reason": str(reason)})
            continue
        prompt = text_of_turns(row["messages"])
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
    prompts = sorted({text_of_turns(row["messages"]) for row in preferences})
    random.Random(seed).shuffle(prompts)
    held_out_prompts = set(prompts[: max(2, int(share * len(prompts)))])
    train = []
    held_out = []
    for row in preferences:
        if text_of_turns(row["messages"]) in held_out_prompts:
            held_out.append(row)
        else:
            train.append(row)
    return train, held_out


def load_reward_tokenizer(args: Args, accelerator):
    """Loads the tokenizer with the chat template that renders both sides of a pair."""
    tokenizer = load_tokenizer(args.model)
    think_format = {"response": "plain", "think+response": "think"}[args.reward_on]
    accelerator.print(or_fail(prepare_tokenizer, tokenizer, think_format, args.chat_template))
    or_fail(check_template, tokenizer, args.model, args.reward_on, think_format)
    del tokenizer.trained_as  # a reward model generates nothing, so its folder gets no think_format.json
    return tokenizer


def load_pairs(args: Args, tokenizer, accelerator) -> tuple[list[Pair], list[Pair], list[dict]]:
    """Reads pairs to train on, held-out pairs, and rows {id, reason, tokens} of the dropped ones."""
    train_rows, unread = read_pairs(args.pairs)
    if args.held_out_pairs:
        held_out_rows, unread_held_out = read_pairs(args.held_out_pairs, "--held-out-pairs")
        unread += unread_held_out
        trained = {text_of_turns(row["messages"]) for row in train_rows}
        for row in held_out_rows:
            if text_of_turns(row["messages"]) in trained:  # it would measure what was learned by heart
                fail(
                    f"--held-out-pairs: the prompt of row {row['id']} is in --pairs as well; "
                    "take it out of one of them"
                )
    else:
        train_rows, held_out_rows = split_by_prompt(train_rows, args.held_out, args.seed)
    train, dropped_train = build_pairs(train_rows, tokenizer, args.reward_on, args.max_length)
    held_out, dropped_held_out = build_pairs(held_out_rows, tokenizer, args.reward_on, args.max_length)
    dropped = unread + dropped_train + dropped_held_out
    said = (
        f"{args.pairs}: dropped {count_reasons(dropped) or 'none'}; {len(train)} pairs to train on, "
        f"{len(held_out)} held out"
    )
    accelerator.print(said)
    if len(train) < args.batch_size or not held_out:
        fail(f"{said}: too few; a step takes --batch-size {args.batch_size}, and one or more are held out")
    longest = max(pair.longest for pair in train + held_out)
    check_context(args.model, tokenizer, longest, f"--max-length {args.max_length}")
    return train, held_out, dropped


# --- model and step


def load_classifier(args: Args, checkpoint: Path | None, accelerator) -> Learner:
    """Loads the classifier, of a resumed run from its checkpoint, and makes its optimizer."""
    torch.manual_seed(args.seed)  # a new head, and LoRA's initial weights
    model = load_trained(args.model, args, checkpoint, AutoModelForSequenceClassification, "SEQ_CLS")
    model.config.reward_on = args.reward_on  # rlmt/reward_model.py compares it with its own
    return Learner(
        model, accelerator, args.micro_batch_tokens, args.learning_rate, args.weight_decay, optim=args.optim
    )


def accumulate_gradients(pairs: list[Pair], classifier: Learner, batch_size: int) -> dict[str, float]:
    """Computes the gradient of one optimizer step, in micro-batches; returns what is logged of its pairs.

    The loss is a mean over the step's `batch_size` pairs, whichever process and micro-batch they are in.
    """
    accelerator = classifier.accelerator
    scored = []
    for micro_batch in classifier.micro_batches(pairs, length_of):
        sides = [pair.chosen_ids for pair in micro_batch] + [pair.rejected_ids for pair in micro_batch]
        chosen, rejected = scores_of(classifier.model, sides, accelerator.device).chunk(2)
        loss = bradley_terry_loss(chosen, rejected)
        classifier.backward(loss.sum() / batch_size)
        scored.append(torch.stack([loss, chosen, rejected], dim=1).detach())

    loss, chosen, rejected = accelerator.gather(torch.cat(scored)).T.contiguous()
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
    for pair in tqdm(pairs, desc="held-out pairs"):
        chosen, rejected = model.score_ids([pair.chosen_ids, pair.rejected_ids])
        margins.append(chosen - rejected)
    return calibration(margins) | compare_with_length(margins, pairs)


def main(args: Args) -> None:
    accelerator = start_accelerator(args.dtype)

    # --- data, checked before anything is loaded
    tokenizer = load_reward_tokenizer(args, accelerator)
    pairs, held_out, dropped = load_pairs(args, tokenizer, accelerator)
    steps = plan_steps(len(pairs), args.batch_size, args.epochs)
    gib = Memory(args).trained(args.model, AutoModelForSequenceClassification)
    accelerator.print(check_memory({"model": gib}))
    run = Run(args, "reward", args.model, constants(globals()))
    if args.dry_run:
        return
    run.start(dropped)

    # --- model
    classifier = load_classifier(args, run.checkpoint, accelerator)
    learners = {"model": classifier}
    load_optimizers(run.checkpoint, learners)

    # --- train
    with run.training(learners, tokenizer, steps, COLUMNS):
        for step in run.steps():
            chosen = rows_of_step(pairs, step, args.batch_size, args.seed)
            own_pairs = deal(chosen, accelerator, length_of)
            rate = cosine_rate(args.learning_rate, step, steps, args.warmup_ratio)
            classifier.set_rate(rate)
            metrics = accumulate_gradients(own_pairs, classifier, args.batch_size)
            metrics["grad_norm"] = classifier.clip_gradients(MAX_GRAD_NORM)
            run.check_finite(step, metrics, own_pairs)
            classifier.step()

            metrics["learning_rate"] = rate
            metrics["epoch"] = step / (len(pairs) // args.batch_size)
            run.timer.end("update")
            run.end_step(step, metrics, n_tokens=sum(pair.n_tokens for pair in chosen))

    # --- save and measure
    set_pad_token(unwrap(classifier.model), tokenizer.pad_token_id)  # for those who pad with it
    save_model(run.folder / "model", classifier.model, tokenizer)
    del learners, classifier
    accelerator.free_memory()  # gradients and optimizer too: now a whole copy is loaded
    summary = {"n_pairs": len(pairs), "dropped": len(dropped)}
    if accelerator.is_main_process:
        device = str(accelerator.device)
        summary["held_out"] = measure_held_out(held_out, run.folder / "model", device, args.dtype)
        print("held-out accuracy:", summary["held_out"]["accuracy"])
    preset = args.preset or "paper"  # both scripts have presets of the same names
    needed = f"--preset {preset} --reward-on {args.reward_on} --model MODEL --prompts PROMPTS"
    run.finish(summary, f"train_grpo.py {needed} --reward-model")


# --- presets: one card, and small runs

ONE_CARD = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "learning_rate": 1e-5}  # our choice
PRESETS: dict[str, dict] = {
    "24gb": {**ONE_CARD, "optim": "adamw_8bit"},
    "80gb": {**ONE_CARD, "micro_batch_tokens": 32768},
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
