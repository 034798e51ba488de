"""On-policy DPO in rounds, scored by a preference reward model: RLMT and RLHF (paper, table 6).

A round, for P prompts with N completions each:

    1. rollout     sample N completions of every prompt from the model that the round starts from
    2. reward      what the reward model gives; a malformed completion gets none
    3. pairs       the best completion of each prompt against the worst
    4. reference   log-probabilities of all pairs under the same model, computed once
    5. update      minimise  -log sigmoid(beta * (margin of the policy - margin of the reference))

`run_round` has these steps in order, and the mathematics is in `build_pairs` and `dpo_loss`. A round starts
from the model that the last one trained. One round from the warm-started model is the paper's DPO; several
make it online.

    python train_dpo.py --preset toy --model results/my-demo/runs/sft-think-s0/model         # CPU, minutes
    python train_dpo.py --model results/sft-think/model --lora-r 64 --learning-rate 3e-6      # 1 GPU
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_dpo.py \\
        --preset paper --model results/<sft run>/model                                   # 8 GPUs, as the paper
    python train_dpo.py ... --pairs data/skywork.jsonl                                        # offline

Deviations from the paper's released code: docs/deviations.md. A default run never pairs malformed, truncated
or empty completions, and a prompt needs `min_valid` = 2 well-formed ones, whose best and worst must differ;
the released code asks for 4 that it can parse.

Hours as the paper's README reports them: about 1 on 8 H100 for the training alone; not measured here.

Writes results/<run>/: config.json, command.txt, env.txt, dropped.jsonl, completions.jsonl (of all rounds;
`pair` says which were paired, `step` is the round), metrics.jsonl (a line a round), summary.json and model/
(of the last round); and for each round round-<n>/ with samples and scores of each process, pairs.jsonl (token
ids), metrics.jsonl (a line a step), checkpoints and model/. With --gold-prompts also held_out.jsonl,
held_out_completions.jsonl and best_by_gold/. With LoRA each model/ has its adapter/ beside it, for the model that
the round began with, and best_by_gold/ has best_by_gold_adapter/.

Axis: B pairs of a micro-batch.
"""

import dataclasses
import json
import math
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Literal, NamedTuple

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import Dropped, encode_completion, encode_prompt, flaw_of, without_control
from rlmt.checkpoint import copy_model, load_optimizers, numbered, save_model
from rlmt.data import append_jsonl, load_held_out, load_prompts, read_log, read_pairs, write_jsonl
from rlmt.learner import Learner, collate_ids, cosine_rate, deal, load_policy
from rlmt.memory import Memory, check_memory
from rlmt.model import load_policy_tokenizer, start_accelerator
from rlmt.run import Run, ScoreArgs, Timer, constants, count_reasons, cut_log, parse_args, rows_of_step
from rlmt.sampler import Completion, Sample, Sampling, completion_metrics, read_completion
from rlmt.saved import generate
import torch
from accelerate.utils import gather_object
from torch.nn import functional as F

from rewards.gold import log_held_out
from rewards.scorer import Scorer
from utils import THINK_FORMATS, fail, join_thinking


# PRESETS, at the end of this file, have other values for the runs of the paper
@dataclass
class Args(ScoreArgs):
    POSITIVE: ClassVar = ("beta",)  # the loss is constant at 0; see check_values in rlmt/run.py

    # model and data
    model: str = "results/sft-think/model"
    """Hub name or folder: a warm-started model, an instruct model, or a base model with a Zero format."""
    prompts: str = "data/wildchat_if.jsonl"
    """Prompts: a file, a folder or a hub name with its split (NAME:SPLIT), in any form of data/README.md."""
    pairs: str = ""
    """Pairs for offline DPO: a file, a folder or a hub name with its split, in any form of data/README.md."""
    think_format: Literal[*THINK_FORMATS] = "think"
    """A key of utils.THINK_FORMATS. think: RLMT; plain: RLHF, the same without thinking; zero_think and
    zero_plain: no warm start, an instruction before the prompt of a base model asks for the format."""
    # rollout
    rounds: int = 1
    """Each starts from the model of the one before; with --pairs all train on the same pairs. The paper has 1.
    With LoRA in bfloat16 that model is rounded: where the adapter changed a weight by less than a 512th of
    itself, the change is lost; --dtype float32 keeps it. --load-in-4bit rounds most of it away."""
    prompts_per_round: int = 0
    """A round takes the next prompts of a random order, which begins again at its end; 0: all prompts."""
    samples_per_prompt: int = 8
    """N, completions of each prompt (table 6)."""
    temperature: float = 0.7
    """Temperature of sampling (paper, appendix A). The loss has log-probabilities at temperature 1."""
    max_prompt_tokens: int = 1024
    """Longer prompts are dropped, counted and listed."""
    max_completion_tokens: int = 4096
    """Thinking and response together."""
    rollout_batch_size: int = 64
    """Completions a batch with transformers' generate, per GPU."""
    vllm_memory: float = 0.85
    """Share of each GPU that vLLM reserves; nothing else is there while it samples."""
    # reward
    min_valid: int = 2
    """A prompt with fewer completions in good format gives no pair (released code: 4)."""
    # algorithm
    beta: float = 0.1
    """How strongly the policy is held to the reference (table 6)."""
    # optimisation
    epochs: float = 2.0
    """Passes over the pairs of each round (table 6)."""
    batch_size: int = 128
    """Pairs an optimizer step, over all GPUs (table 6)."""
    learning_rate: float = 3e-7
    """Table 6; cosine decay in each round. LoRA wants about ten times as much."""
    warmup_ratio: float = 0.05
    """Share of a round's steps in which the learning rate rises from 0 (table 6)."""
    weight_decay: float = 1e-4
    """Table 6."""
    # run
    save_steps: int = 100
    """Optimizer steps between checkpoints."""


# constants: edit inline; config.json holds them and --resume compares them
MAX_GRAD_NORM = 1.0  # gradients are clipped to this norm
ADAM_BETA1 = 0.9
ADAM_BETA2 = 0.95  # table 6

COLUMNS = {  # title on the screen: key in metrics.jsonl
    "loss": "loss",
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "chosen logp": "logps/chosen",
    "rejected logp": "logps/rejected",
}


# --- the algorithm: pure functions


def build_pairs(completions: list[dict], min_valid: int, reward_on: str) -> tuple[list[dict], Counter]:
    """Pairs the best with the worst completion of each prompt and round: argmax and argmin of `reward`.

    These are the pairs of the paper's DPO (2509.20357, table 6). Only completions with status `ok` count; of
    equal rewards the first is taken.

    Args:
        completions: rows of completions.jsonl.
        min_valid: a prompt with fewer completions in good format gives no pair.
        reward_on: what the reward model read, as in Args.

    Returns:
        Pairs {id, chosen, rejected}, which hold rows; and how many prompts gave none, by reason: no_valid,
        too_few_valid, tie.
    """
    groups: dict[tuple, list[dict]] = {}  # by (round, prompt)
    for row in completions:
        groups.setdefault((row["step"], row["id"]), []).append(row)

    read_by_model = {"response": "response", "think+response": "ids"}[reward_on]
    pairs = []
    skipped = Counter()
    for (_, prompt_id), group in groups.items():
        valid = [row for row in group if row["status"] == "ok"]
        if not valid:
            skipped["no_valid"] += 1
            continue
        if len(valid) < min_valid:
            skipped["too_few_valid"] += 1
            continue
        best = max(valid, key=itemgetter("reward"))
        worst = min(valid, key=itemgetter("reward"))
        # of the same text: its rewards may still differ by rounding
        if best["reward"] == worst["reward"] or best[read_by_model] == worst[read_by_model]:
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

    Equations 5 and 7 of 2305.18290, without the term of equation 5 that is the same for both completions:

        r(y) = beta * (log pi(y) - log pi_reference(y))
        loss = -log sigmoid(r(chosen) - r(rejected))

    Args:
        policy_chosen_logps, ...: (B,), log-probabilities of whole completions, nats.
        beta: typically 0.1 to 0.5.
    """
    chosen_rewards = beta * (policy_chosen_logps - reference_chosen_logps)
    rejected_rewards = beta * (policy_rejected_logps - reference_rejected_logps)
    losses = -F.logsigmoid(chosen_rewards - rejected_rewards)
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


# --- data: prompts, or pairs


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
    def longest(self) -> int:
        """Tokens of the longer completion."""
        return max(len(self.chosen_ids), len(self.rejected_ids))

    @property
    def n_tokens(self) -> int:
        """Tokens of both prompts and completions, without padding."""
        return 2 * len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)


def length_of(pair: Pair) -> int:
    """Returns the tokens of a pair's two texts, with the shorter one padded, as micro_batches counts them."""
    return 2 * (len(pair.prompt_ids) + pair.longest)


def load_pairs(args: Args, tokenizer) -> tuple[list[Pair], list[dict], list[dict]]:
    """Reads the pairs of `args.pairs`; returns also the rows that gave none, {id, reason}, and those read.

    The reasons: malformed, a completion has a flaw (flaw_of); tie, both completions are equal; too_long,
    the prompt or a completion is; and those of to_pair.
    """
    think_format = THINK_FORMATS[args.think_format]
    preferences, dropped = read_pairs(args.pairs)
    pairs = []
    for row in preferences:
        texts = []
        for side in ("chosen", "rejected"):
            text = row[side]
            thinking = row.get(f"{side}_thinking")
            lacks_tags = bool(thinking)
            if not think_format.thinking_tags:
                lacks_tags = think_format.opens_response not in text
            if lacks_tags:
                text = join_thinking(thinking or "", text, args.think_format)
            texts.append(text)
        if any(flaw_of(tokenizer, text, args.think_format) for text in texts):
            dropped.append({"id": row["id"], "reason": "malformed"})
            continue

        try:
            prompt_ids = encode_prompt(tokenizer, row["messages"])
        except Dropped as reason:
            dropped.append({"id": row["id"], "reason": str(reason)})
            continue
        chosen_ids, rejected_ids = [encode_completion(tokenizer, text) for text in texts]
        pair = Pair(row["id"], prompt_ids, chosen_ids, rejected_ids)
        if chosen_ids == rejected_ids:
            dropped.append({"id": row["id"], "reason": "tie"})
        elif len(prompt_ids) > args.max_prompt_tokens or pair.longest > args.max_completion_tokens:
            dropped.append({"id": row["id"], "reason": "too_long"})
        else:
            pairs.append(pair)
    return pairs, dropped, preferences


class Data(NamedTuple):
    """The data of a run: `prompts` or `pairs`; and held-out prompts."""

    prompts: list[dict]
    """To sample completions for: rows of data.load_prompts."""
    pairs: list[Pair]
    """Of --pairs."""
    dropped: list[dict]
    """Prompts that are too long, rows of --pairs without a pair."""
    held_out: list[dict]
    """Of --gold-prompts, as `prompts`."""


def load_data(args: Args, tokenizer, readers: list, accelerator) -> Data:
    """Reads prompts or pairs, and held-out prompts; exits with 2 if they cannot be used.

    `readers`: tokenizers of reward models, which read each prompt.
    """
    prompts = []
    pairs = []
    if args.pairs:
        pairs, dropped, preferences = load_pairs(args, tokenizer)
        said = f"{args.pairs}: {len(pairs)} pairs; skipped: {count_reasons(dropped)}"
        accelerator.print(said)
        if not pairs:
            fail(f"{said}; answers without thinking need --think-format plain, and a model of that format")
        trained_on = [{"messages": without_control(tokenizer, row["messages"])} for row in preferences]
    else:
        n_needed = max(args.prompts_per_round, 1)
        prompts, dropped = load_prompts(
            args.prompts, tokenizer, args.max_prompt_tokens, n_needed, readers=readers
        )
        trained_on = prompts
    held_out = load_held_out(args.gold_prompts, tokenizer, args.max_prompt_tokens, trained_on, readers)
    return Data(prompts, pairs, dropped, held_out)


def prompts_of_round(prompts: list[dict], number: int, n_prompts: int, seed: int) -> list[dict]:
    """Returns the prompts of round `number` (from 1): the next of a random order, which begins again at its
    end. `n_prompts` 0: all of them."""
    order = random.Random(seed).sample(prompts, len(prompts))
    n_prompts = n_prompts or len(order)
    first = (number - 1) * n_prompts
    return [order[index % len(order)] for index in range(first, first + n_prompts)]


# --- 1. rollout, 2. reward: each process does a share


def sample(
    model: str, prompts: list[dict], number: int, folder: Path, tokenizer, args: Args, accelerator
) -> list[Completion]:
    """Samples a completion of a saved model for each prompt of round `number`; returns all of them, on every process.

    Each process samples its share into samples-<process>.jsonl, as they end, without those that are there
    already.
    """
    rank = accelerator.process_index
    own = range(rank, len(prompts), accelerator.num_processes)
    path = folder / f"samples-{rank}.jsonl"
    on_disk = {row["index"] for row in read_log(path)}
    sampling = Sampling(
        args.temperature, args.max_completion_tokens, stop=THINK_FORMATS[args.think_format].stop
    )
    if not on_disk.issuperset(own):
        samples = generate(
            model,
            [prompts[index]["prompt_ids"] for index in own],
            tokenizer,
            sampling,
            seed=(args.seed * 1000 + number) * 1000 + rank,
            done={i for i, index in enumerate(own) if index in on_disk},
            log=folder / f"vllm-{rank}.log",
            rollout=args.rollout,
            dtype=args.dtype,
            batch_size=args.rollout_batch_size,
            memory=args.vllm_memory,
        )
        with open(path, "a", buffering=1) as file:  # a line is on disk when it is written
            for i, one in samples:
                row = {"index": own[i], "ids": one.ids, "finished": one.finished}
                file.write(json.dumps(row) + "\n")
    accelerator.wait_for_everyone()

    completions = []
    sampled = {}
    for path in sorted(folder.glob("samples-*.jsonl")):  # of all processes
        sampled |= {row["index"]: row for row in read_log(path)}
    for index, prompt in enumerate(prompts):
        one = Sample(sampled[index]["ids"], None, sampled[index]["finished"])
        completions.append(read_completion(tokenizer, args.think_format, prompt, one))
    return completions


def score(completions: list[Completion], scorer: Scorer, run: Path) -> dict[str, float]:
    """Sets the rewards of all completions, on every process; a malformed one gets gold, but no preference.

    Returns metrics. `run`: a judge's replies of all rounds share a budget.
    """
    accelerator = scorer.accelerator
    scorer.load(run)
    own = completions[accelerator.process_index :: accelerator.num_processes]
    scorer.measure(own)
    metrics = scorer.pop_truncated()
    scorer.close()
    accelerator.free_memory()
    for rank, rewards in enumerate(gather_object([[completion.rewards for completion in own]])):
        share = completions[rank :: accelerator.num_processes]
        for completion, found in zip(share, rewards, strict=True):
            completion.rewards = found
            if found["preference"] is not None:
                completion.reward = found["preference"]
    return metrics


# --- 3. pairs


def pair_up(
    completions: list[dict], number: int, run: Path, min_valid: int, reward_on: str, accelerator
) -> tuple[list[Pair], dict]:
    """Returns the pairs of a round's completions, and their metrics; logs the completions."""
    best_and_worst, skipped = build_pairs(completions, min_valid, reward_on)
    if accelerator.is_main_process:
        for pair in best_and_worst:
            pair["chosen"]["pair"] = "chosen"
            pair["rejected"]["pair"] = "rejected"
        log = run / "completions.jsonl"
        cut_log(log, number - 1)
        append_jsonl(log, completions)
    if not best_and_worst:
        fail(f"round {number}: no prompt gave a pair ({dict(skipped)}); the completions are in {run}")

    pairs = []
    for pair in best_and_worst:
        chosen = pair["chosen"]
        pairs.append(Pair(pair["id"], chosen["prompt_ids"], chosen["ids"], pair["rejected"]["ids"]))
    metrics = {
        "reward": fmean(row["reward"] for row in completions if row["status"] == "ok"),
        "pairs": len(pairs),
        "skipped": dict(skipped),
        "chosen_tokens": fmean(pair["chosen"]["n_tokens"] for pair in best_and_worst),
        "rejected_tokens": fmean(pair["rejected"]["n_tokens"] for pair in best_and_worst),
    }
    return pairs, metrics


# --- 4. reference, 5. update


def deal_all(pairs: list[Pair], accelerator) -> list[Pair]:
    """Returns this process's share of the pairs.

    Copies of weight 0 fill up the last shares, because every process must make equally many forwards.
    """
    filled = sorted(pairs, key=length_of, reverse=True)
    # the shortest, as it costs the least
    while len(filled) % accelerator.num_processes:
        filled.append(dataclasses.replace(filled[-1], weight=0.0))
    return deal(filled, accelerator, length_of)


def pair_logps(policy: Learner, pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities (B,) of the chosen and of the rejected completions, nats.

    Each is the sum over the completion's tokens.
    """
    batch = collate_ids(
        [pair.prompt_ids for pair in pairs] * 2,
        [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs],
        policy.accelerator.device,
    )
    (logprobs,) = policy.logprobs(batch, extra="none")  # the chosen, then the rejected; 0 on padding
    chosen_logps, rejected_logps = logprobs.sum(1).chunk(2)
    return chosen_logps, rejected_logps


@torch.no_grad()
def set_reference_logps(pairs: list[Pair], policy: Learner) -> None:
    """Sets the reference's log-probabilities of all pairs, on every process.

    The reference is the policy before its first update, so it needs no memory of its own. `pairs` must be
    sorted, longest first: `deal_all` and `micro_batches` sort so too, and what they return can be assigned by
    index.
    """
    own_logps = []
    for micro_batch in policy.micro_batches(deal_all(pairs, policy.accelerator), length_of):
        chosen_logps, rejected_logps = pair_logps(policy, micro_batch)
        own_logps += zip(chosen_logps.tolist(), rejected_logps.tolist(), strict=True)

    for process, logps in enumerate(gather_object([own_logps])):
        # as `deal_all` shares them, without the copies
        share = pairs[process :: policy.accelerator.num_processes]
        # a process may have had a copy at the end of its share
        for pair, (chosen_logp, rejected_logp) in zip(share, logps, strict=False):
            pair.reference_chosen_logp = chosen_logp
            pair.reference_rejected_logp = rejected_logp


def accumulate_gradients(pairs: list[Pair], n_pairs: int, policy: Learner, beta: float) -> dict[str, float]:
    """Computes the gradient of one optimizer step, in micro-batches; returns means over pairs for the log.

    The loss is a mean over the `n_pairs` pairs of the step, whichever process and micro-batch they are in.
    """
    device = policy.accelerator.device
    sums = {}
    for micro_batch in policy.micro_batches(pairs, length_of):
        weights = torch.tensor([pair.weight for pair in micro_batch], device=device)
        reference_chosen = torch.tensor([pair.reference_chosen_logp for pair in micro_batch], device=device)
        reference_rejected = torch.tensor(
            [pair.reference_rejected_logp for pair in micro_batch], device=device
        )
        chosen_logps, rejected_logps = pair_logps(policy, micro_batch)
        losses, chosen_rewards, rejected_rewards = dpo_loss(
            chosen_logps, rejected_logps, reference_chosen, reference_rejected, beta
        )
        policy.backward((losses * weights).sum() / n_pairs)

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
    return policy.means(sums, n_pairs)


# --- rounds


def model_of_round(number: int, run: Path, first_model: str) -> str:
    """Returns the model that round `number` (from 1) ends with; 0: the one that round 1 starts from."""
    if number == 0:
        return first_model
    return str(run / f"round-{number}" / "model")


def measure_held_out(
    prompts: list[dict], number: int, run: Path, tokenizer, scorer: Scorer, args: Args
) -> None:
    """Samples, scores and logs a completion for each held-out prompt; keeps the best model by gold.

    `number` 0 measures the model that round 1 starts from.
    """
    folder = run / f"round-{number}" / "held-out"
    folder.mkdir(parents=True, exist_ok=True)
    model = model_of_round(number, run, args.model)
    completions = sample(model, prompts, number, folder, tokenizer, args, scorer.accelerator)
    score(completions, scorer, run)
    if scorer.accelerator.is_main_process:
        for log in ("held_out.jsonl", "held_out_completions.jsonl"):
            cut_log(run / log, number - 1)  # an earlier start may have logged this round
        is_best = log_held_out(run, number, [completion.row() for completion in completions])
        if is_best and number > 0:
            copy_model(Path(model), run / "best_by_gold")


def run_round(
    number: int, data: Data, run: Run, tokenizer, scorer: Scorer | None, args: Args, accelerator
) -> dict:
    """Runs a round, or what an interruption left of it; returns its line of metrics.jsonl."""
    timer = Timer()
    start_model = model_of_round(number - 1, run.folder, args.model)
    part = run.round(number)
    folder = part.folder

    metrics = {"step": number}
    if args.pairs:
        pairs = data.pairs
        metrics |= {"pairs": len(pairs), "skipped": count_reasons(data.dropped)}
    else:
        # 1. rollout
        prompts = []
        for prompt in prompts_of_round(data.prompts, number, args.prompts_per_round, args.seed):
            prompts += [prompt] * args.samples_per_prompt
        sampled = sample(start_model, prompts, number, folder, tokenizer, args, accelerator)
        timer.end("rollout")

        # 2. reward
        metrics |= score(sampled, scorer, run.folder)
        completions = []
        for one in sampled:
            ids = {"prompt_ids": one.prompt_ids, "ids": one.ids}
            completions.append({"step": number, **one.row(), **ids, "pair": None})
        metrics |= completion_metrics(sampled)
        timer.end("reward")

        # 3. pairs
        pairs, pair_metrics = pair_up(
            completions, number, run.folder, args.min_valid, args.reward_on, accelerator
        )
        metrics |= pair_metrics
    # the last step has the remainder; a round has too few pairs to leave some out
    steps_per_epoch = math.ceil(len(pairs) / args.batch_size)
    n_steps = metrics["steps"] = math.ceil(args.epochs * steps_per_epoch)
    accelerator.print(f"round {number}/{args.rounds}: {json.dumps(metrics)}", flush=True)
    timer.end("pairs")

    betas = (ADAM_BETA1, ADAM_BETA2)
    policy = load_policy(args, start_model, part.checkpoint, accelerator, betas=betas)
    learners = {"model": policy}
    load_optimizers(part.checkpoint, learners)

    # 4. reference: the policy before its first update
    if part.checkpoint:  # its weights are no reference any more; the file has its log-probabilities
        pairs = [Pair(**row) for row in read_log(folder / "pairs.jsonl")]
    else:
        pairs = sorted(pairs, key=length_of, reverse=True)
        set_reference_logps(pairs, policy)
        write_jsonl(folder / "pairs.jsonl", [dataclasses.asdict(pair) for pair in pairs])
    timer.end("reference")

    # 5. update
    with part.training(learners, tokenizer, n_steps, COLUMNS):
        for step in part.steps():
            chosen = rows_of_step(pairs, step, args.batch_size, args.seed, number, leaves_out_rest=False)
            own_pairs = deal_all(chosen, accelerator)
            rate = cosine_rate(args.learning_rate, step, n_steps, args.warmup_ratio)
            policy.set_rate(rate)
            means = accumulate_gradients(own_pairs, len(chosen), policy, args.beta)
            means["grad_norm"] = policy.clip_gradients(MAX_GRAD_NORM)
            part.check_finite(step, means, own_pairs)
            policy.step()

            means |= {"epoch": step / steps_per_epoch, "learning_rate": rate}
            part.timer.end("update")
            part.end_step(step, means, n_tokens=sum(pair.n_tokens for pair in chosen))
    timer.end("update")

    save_model(folder / "model", policy.model, tokenizer)
    del policy, learners
    accelerator.free_memory()  # the next to need a GPU is the sampler

    if data.held_out:
        measure_held_out(data.held_out, number, run.folder, tokenizer, scorer, args)
    timer.end("other")
    metrics |= timer.metrics
    if accelerator.is_main_process:
        steps = read_log(folder / "metrics.jsonl")
        metrics["loss"] = fmean(row["loss"] for row in steps)
        if "memory/update" in metrics:  # each step has a timer of its own, which forgets torch's peak
            metrics["memory/update"] = max(row["memory/update"] for row in steps)
    part.write_summary(metrics)
    if accelerator.is_main_process:
        for finished in numbered(folder):
            shutil.rmtree(finished)
    return metrics


# --- the whole run


def main(args: Args) -> None:
    accelerator = start_accelerator(args.dtype)

    # --- data, checked before anything is loaded
    tokenizer = load_policy_tokenizer(args)
    scorer = None
    readers = []
    if not args.pairs or args.gold_prompts:
        scorer = Scorer(args, ["preference:1"], tokenizer, accelerator, args.samples_per_prompt)
        readers = scorer.readers
    data = load_data(args, tokenizer, readers, accelerator)
    if scorer:
        accelerator.print(check_memory(Memory(args).dpo(), at_once=False))
    else:
        accelerator.print(check_memory({"model": Memory(args).trained(args.model)}))
    run = Run(args, "dpo", args.model, constants(globals()))
    if scorer:
        n_prompts = min(args.prompts_per_round or len(data.prompts), len(data.prompts))  # none with --pairs
        scorer.check(data.prompts or data.held_out, run.folder, n_prompts * args.samples_per_prompt)
    if run.goes_on and (run.folder / f"round-{args.rounds + 1}").exists():
        fail(f"--rounds {args.rounds}: {run.folder} has begun a later round; name at least as many")
    if args.dry_run:
        return
    run.start(data.dropped, has_steps=False)

    # --- rounds, each from the result of the one before
    if data.held_out and not (run.folder / "round-1").exists():  # where held_out.jsonl's curves begin
        measure_held_out(data.held_out, 0, run.folder, tokenizer, scorer, args)
    all_metrics = []
    for number in range(1, args.rounds + 1):
        round_summary = run.folder / f"round-{number}" / "summary.json"
        if round_summary.exists():  # an earlier start of this run finished the round
            metrics = json.loads(round_summary.read_text())
        else:
            run.check_inputs("reward_model", "reward_args", "gold")  # which each round reads anew
            metrics = run_round(number, data, run, tokenizer, scorer, args, accelerator)
        all_metrics.append(metrics)
        write_jsonl(run.folder / "metrics.jsonl", all_metrics)

    if accelerator.is_main_process:
        copy_model(Path(model_of_round(args.rounds, run.folder, args.model)), run.folder / "model")
    summary = {"rounds": all_metrics, "prompts": len(data.prompts), "dropped": len(data.dropped)}
    run.finish(summary, "eval_benchmarks.py ifeval --data google/IFEval --model")


# --- presets: rows of table 3, and small runs

PRESETS: dict[str, dict] = {
    # the defaults of Args are table 6's; rows of table 3 add --model and --think-format:
    # experiments/table3.sh
    "paper": {"reward_on": "response"},  # equation 3
    "paper-as-released": {"reward_on": "response", "min_valid": 4},  # the one deviation that has a flag
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
        "epochs": 1.0,
        "batch_size": 16,
        "micro_batch_tokens": 4096,
        "learning_rate": 2e-4,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
    },
}


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
