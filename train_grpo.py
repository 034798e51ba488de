"""GRPO scored by a preference reward model: RLMT with thinking, RLHF without (paper sections 2.2-2.4).

A step, for P prompts with G completions each:

    1. rollout     sample G completions of every prompt
    2. reward      r = weighted sum of --rewards, by default the reward model's; below the group for a malformed
                   completion (by default); NaN if a judge failed
    3. advantage   A = (r - mean(r)) / (std(r) + 1e-4), within the group
    4. update      minimise  mean over tokens of  -min(ratio * A, clip(ratio) * A) + beta * k3
    5. log         metrics and completions are logged and checked; at times held-out prompts are measured and a
                   checkpoint is saved

For each token, ratio = pi / pi_old. With one update a rollout pi_old is pi: the ratio is 1, its gradient is
that of log pi, and nothing is clipped. With more, pi_old is pi before the first of them: `Learner.set_old_logprobs`
notes its log-probabilities, by the trainer's forward and not by the sampler. k3, an estimate of the KL
divergence, is pi_ref / pi - log(pi_ref / pi) - 1.

Axes: P prompts, G completions a prompt, B completions of a micro-batch, T tokens of its longest completion. A
name that ends in _P_G has these axes; tensors over the completions of a micro-batch are (B, T).

    python train_grpo.py --preset toy --model results/my-demo/runs/sft-think-s0/model         # CPU, minutes
    python train_grpo.py --model results/sft-think/model --lora-r 64 --learning-rate 1e-5     # 1 GPU
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_grpo.py \\
        --preset paper --model results/<sft run>/model                                  # 8 GPUs, as the paper

Deviations from the paper and its released code (verl) in a default run; docs/deviations.md has all:
1. Equation 4 has A = r - mean(r), and a mean over completions of the means over their tokens. By default we
   also divide by the group's standard deviation, as the released configs do, and take one mean over all
   tokens of the update (`--loss-type dapo`), so long completions count more. Equation 4 is
   `--scale-rewards none --loss-type grpo`.
2. The released configs call their loss a mean over tokens. With their micro-batches of one completion it is
   the mean of equation 4 instead; `--preset paper-as-released` sets `--loss-type grpo`.
3. By default the reward model reads thinking and response; the paper's presets set `reward_on = "response"`.
4. A malformed completion gets a floor below its group. The released code scores it like any other
   (`--on-bad-format score`), or as the text [NULL] in its strict mode (`null`), which is not in the paper.

The released README reports 14-16 hours on 8 H100 for 234 steps; not measured here. Writes results/<run>/:
config.json, command.txt, env.txt, metrics.jsonl, completions.jsonl, dropped.jsonl, summary.json,
checkpoint-*/ and model/; with --gold-prompts also held_out.jsonl, held_out_completions.jsonl, best_by_gold/.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.checkpoint import load_optimizers, save_model
from rlmt.data import load_held_out, load_prompts
from rlmt.learner import Learner, deal, load_policy, n_tokens_of, truncated_importance
from rlmt.memory import Memory, check_memory
from rlmt.model import load_policy_tokenizer, start_accelerator
from rlmt.run import RLArgs, Run, constants, parse_args, rows_of_step
from rlmt.sampler import (
    Completion,
    check_split,
    gather_rewards,
    mini_batches,
    policy_sampler,
    reward_metrics,
    sample_completions,
    share_of,
)
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from rewards.gold import measure_held_out
from rewards.scorer import Scorer
from utils import THINK_FORMATS, fail


# PRESETS, at the end of this file, have other values for the runs of the paper and of other papers
@dataclass
class Args(RLArgs):
    # model and data
    model: str = "results/sft-think/model"
    """Hub name or folder: a warm-started model, an instruct model, or a base model with a Zero format."""
    prompts: str = "data/wildchat_if.jsonl"
    """Prompts: a file, a folder or a hub name with its split (NAME:SPLIT), in any form of data/README.md."""
    think_format: Literal[*THINK_FORMATS] = "think"
    """A key of utils.THINK_FORMATS. think: RLMT; plain: RLHF; zero_think and zero_plain: the same from a base
    model, which an instruction before the prompt asks for the format."""
    # rollout
    temperature: float = 0.7
    """Sampling temperature; log-probabilities are taken at the same one (paper, appendix A)."""
    top_p: float = 1.0
    """Below 1 the policy samples from a different distribution from the one it trains (three released configs: 0.95)."""
    max_prompt_tokens: int = 1024
    """Longer prompts are dropped, counted and listed (table 7; the released code cuts them)."""
    max_completion_tokens: int = 4096
    """Thinking and response together (table 7)."""
    importance_correction: Literal["none", "token_truncate"] = "none"
    """Weights each token by the ratio of trainer's to sampler's probability, at most IMPORTANCE_CAP (TIS).
    The paper has none."""
    # algorithm
    steps: int = 120
    """Rollouts (table 7: 120, one epoch)."""
    prompts_per_step: int = 64
    """P, over all GPUs (table 7)."""
    group_size: int = 8
    """G, completions a prompt (table 7)."""
    updates_per_rollout: int = 1
    """Parts of a rollout, with one optimizer step each (released configs: 1)."""
    beta: float = 1e-3
    """KL weight in the loss (table 7). 0: no reference model."""
    epsilon: tuple[float, float] = (0.2, 0.2)
    """The ratio is clipped below 1 - the first and above 1 + the second (released configs); 0.2 0.28 is
    DAPO's clip-higher; gspo's ratios are closer to 1 (its paper: 3e-4 4e-4). Unused with cispo, and with one
    update a rollout, where the ratio is 1."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"] = "dapo"
    """TRL's names. The first three clip the ratio and differ in the mean: dapo over all tokens of the update,
    grpo over completions, dr_grpo over completions of sums / max_completion_tokens. cispo has dapo's mean and
    another loss: the ratio, cut at CISPO_CAP, is a constant weight of log pi. gspo has grpo's mean and one
    ratio per completion."""
    scale_rewards: Literal["group", "batch", "none", "pass_at_k"] = "group"
    """The advantage is the reward minus its group's mean, then: group: divided by the standard deviation of
    the group; batch: by that of the step; none: as it is (Dr. GRPO). pass_at_k: other advantages, see
    `pass_at_k_advantages`; what the verifier among the rewards says is all that counts."""
    dynamic_sampling: int = 0
    """At most this many rounds per step that replace groups of about equal rewards by groups of new prompts
    (DAPO). 0: none."""
    entropy_coef: float = 0.0
    """Entropy bonus (released configs: 0.001, not in the paper)."""
    # optimisation
    learning_rate: float = 1e-6
    """Constant, no warm-up (table 7; 3e-7 for instruct models). LoRA wants about ten times as much."""
    weight_decay: float = 0.01
    """Table 7."""


# constants: edit inline; config.json holds them and --resume compares them
MAX_GRAD_NORM = 1.0  # gradients are clipped to this norm
# a group whose rewards differ by no more is flat, and teaches nothing; lower it if the weights in --rewards are small
ZERO_SPREAD = 0.05
IMPORTANCE_CAP = 3.0  # largest weight of --importance-correction
CISPO_CAP = 5.0  # cispo's highest ratio
PASS_AT_K = 4  # k of --scale-rewards pass_at_k

COLUMNS = {  # title on the screen: key in metrics.jsonl
    "reward": "reward",
    "gold": "reward/gold",
    "kl": "kl",
    "think": "think/mean_tokens",
    "response": "think/response_tokens",
    "format ok": "think/format_ok",
    "truncated": "think/truncated",
    "gap": "sampling/logprob_gap",
}

# --- the algorithm: pure functions


def group_advantages(rewards_P_G: torch.Tensor, scale: str = "group") -> torch.Tensor:
    """Returns the advantage (P, G) of each completion: its reward compared with its group's.

    NaN means "no reward": it counts in neither mean nor standard deviation, and its advantage is 0.

    Args:
        scale: none: r - mean of the group (equation 4 of 2509.20357).
            group: (r - mean) / (standard deviation of the group + 1e-4); the released code adds 1e-6.
            batch: (r - mean of the group) / (standard deviation of all rewards + 1e-4).
    """
    known = ~rewards_P_G.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards_P_G.double().nansum(1, keepdim=True) / count.clamp(min=1)
    # float32 would round the mean of equal rewards, and dividing by a spread near 0 would blow that up
    centred = torch.where(known, rewards_P_G.double() - mean, 0.0).float()
    if scale == "none":
        return centred
    if scale == "batch":
        known_rewards = rewards_P_G[known]
        spread = known_rewards.std() if len(known_rewards) > 1 else 0.0
        return centred / (spread + 1e-4)
    if scale == "group":
        variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        return centred / (variance.sqrt() + 1e-4)
    raise ValueError(f"--scale-rewards {scale} has no branch in group_advantages")


def pass_at_k_advantages(verdicts: list[float | None], rewards_P_G: torch.Tensor, k: int) -> torch.Tensor:
    """Returns advantages (P, G) that maximise pass@k, the chance that one of k samples is right (2508.10751).

    Of the n samples of a group c are right. The chance is rho = 1 - C(n-c, k) / C(n, k), its standard
    deviation sigma = sqrt(rho (1 - rho)). The advantage of a right sample is (1 - rho) / sigma. That of a
    wrong one is (1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / sigma. All are 0 where sigma is 0. A sample without
    a verdict (P*G,) or without a reward is not counted and gets 0.
    """
    verdicts = [math.nan if verdict is None else verdict for verdict in verdicts]
    verdicts_P_G = torch.tensor(verdicts, device=rewards_P_G.device).view_as(rewards_P_G)
    known = ~(verdicts_P_G.isnan() | rewards_P_G.isnan())
    wrong = known & (verdicts_P_G < 1)
    n = known.sum(1, keepdim=True)
    n_wrong = wrong.sum(1, keepdim=True)
    rho = 1 - chance_of_wrong(n_wrong, n, k)
    sigma = (rho * (1 - rho)).sqrt()
    others_all_wrong = chance_of_wrong(n_wrong - 1, n - 1, k - 1)
    advantages = (1 - rho - wrong * others_all_wrong) / sigma
    return torch.where(known & (sigma > 0), advantages, 0.0).float()


def chance_of_wrong(n_wrong: torch.Tensor, n: torch.Tensor, k: int) -> torch.Tensor:
    """Returns C(n_wrong, k) / C(n, k), the chance that k of n samples are all wrong; 0 for k above
    n_wrong."""
    chance = torch.ones_like(n, dtype=torch.float64)
    for i in range(k):
        chance *= (n_wrong - i).clamp(min=0) / (n - i).clamp(min=1).double()
    return chance


def is_flat(rewards_P_G: torch.Tensor) -> torch.Tensor:
    """Tells which groups (P,) teach nothing: no two known rewards differ by more than ZERO_SPREAD."""
    highest = rewards_P_G.nan_to_num(nan=-math.inf).amax(1)
    lowest = rewards_P_G.nan_to_num(nan=math.inf).amin(1)
    return highest - lowest <= ZERO_SPREAD


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    token_weights: torch.Tensor,
    importance_weights: torch.Tensor | float = 1.0,
    *,
    epsilon: tuple[float, float],
    beta: float,
    loss_type: str = "dapo",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns a micro-batch's share of the loss of an update, and sums over its tokens of what is logged. It is
    PPO's loss too.

    Args:
        logprobs, old_logprobs, reference_logprobs: (B, T), of the policy being trained, of the same before
            the first update of the rollout, of the reference; the last is None without a KL term.
        advantages: (B, T), in GRPO the same for all tokens of a completion unless rewards are dense.
        mask: (B, T), 1 on the tokens that the policy wrote.
        token_weights: (B, T), the share of each token in the mean, see `mean_weights`.
        importance_weights: (B, T), trainer's over sampler's probability, at most IMPORTANCE_CAP; or 1.
        epsilon, beta, loss_type: as in Args.
    """
    log_ratio = (logprobs - old_logprobs) * mask
    if loss_type == "gspo":  # one length-normalised ratio per completion (2507.18071)
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()

    # a new loss type may have a branch here, and has one in `mean_weights`; others clip the ratio
    if loss_type == "cispo":  # the ratio is a weight, which has an upper limit only
        lowest = 0.0
        highest = CISPO_CAP
        policy_loss = -ratio.clamp(max=highest).detach() * advantages * logprobs
    else:
        lowest = 1 - epsilon[0]
        highest = 1 + epsilon[1]
        policy_loss = -torch.min(ratio * advantages, ratio.clamp(lowest, highest) * advantages)
    token_loss = policy_loss * importance_weights

    too_low = (ratio < lowest) & (advantages < 0)
    too_high = (ratio > highest) & (advantages > 0)
    sums = {  # over tokens; `Learner.means` makes means over the tokens of an update
        "clip_ratio/low_mean": (too_low * mask).sum(),
        "clip_ratio/high_mean": (too_high * mask).sum(),
        "clip_ratio/region_mean": ((too_low | too_high) * mask).sum(),
    }
    if reference_logprobs is not None:
        # k3, an unbiased and non-negative estimate of KL(policy || reference):
        # http://joschu.net/blog/kl-approx.html
        reference_log_ratio = (reference_logprobs - logprobs) * mask
        kl = reference_log_ratio.exp() - reference_log_ratio - 1
        token_loss = token_loss + beta * kl
        sums["kl"] = (kl * mask).sum()
    return (token_loss * token_weights).sum(), {name: value.detach() for name, value in sums.items()}


def mean_weights(
    mask: torch.Tensor, loss_type: str, n_tokens: int, n_completions: int, max_tokens: int
) -> torch.Tensor:
    """Returns the weight (B, T) of each token in an update's loss, which makes the loss a mean.

    dapo and cispo: over tokens. grpo and gspo: over completions, of the means over their tokens (equation 4
    of 2509.20357). dr_grpo: over completions, of the sums over their tokens divided by `max_tokens`.
    `n_tokens` and `n_completions` count the whole update, over all processes and micro-batches.
    """
    if loss_type in ("grpo", "gspo"):
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / n_completions
    if loss_type == "dr_grpo":
        return mask / (n_completions * max_tokens)
    if loss_type in ("dapo", "cispo"):
        return mask / n_tokens
    raise ValueError(f"--loss-type {loss_type} has no branch in mean_weights")


# --- steps of the loop


def replace_flat_groups(
    completions: list[Completion],
    draw: Callable[[list[dict]], list[Completion]],
    chosen: list[dict],
    prompts: list[dict],
    group_size: int,
    most_rounds: int,
    seed: tuple[int, int],
) -> dict[str, float]:
    """Replaces, in place, flat groups by groups of prompts that the step has not seen (DAPO, 2503.14476,
    section 3.2).

    Repeats until no process has a flat group or too few unseen prompts are left, at most `most_rounds` times. Under FSDP2
    all processes must take part in each forward, so each samples as many groups as the neediest one, and
    throws the surplus away.

    Args:
        completions: those of this process, in groups.
        draw: samples and scores groups of this process's share of prompts.
        chosen: the prompts of the step, those of all processes.
        prompts: all prompts of the run.
        group_size: G.
        seed: what each round draws from, together with its number.
    """
    seen = {prompt["id"] for prompt in chosen}
    n_rounds = 0
    while n_rounds < most_rounds:
        own_rewards_P_G = torch.tensor([c.reward for c in completions]).view(-1, group_size)
        flat = is_flat(own_rewards_P_G).nonzero().flatten().tolist()
        flat_counts = gather_object([len(flat)])
        n_drawn = max(flat_counts) * len(flat_counts)
        unseen = [prompt for prompt in prompts if prompt["id"] not in seen]
        if n_drawn == 0 or n_drawn > len(unseen):
            break
        n_rounds += 1
        generator = np.random.default_rng((*seed, n_rounds))
        drawn = [unseen[index] for index in generator.choice(len(unseen), n_drawn, replace=False)]
        seen.update(prompt["id"] for prompt in drawn)
        sampled = draw(drawn)
        for n, group in enumerate(flat):
            new_group = sampled[n * group_size : (n + 1) * group_size]
            completions[group * group_size : (group + 1) * group_size] = new_group
    return {"dynamic_sampling/attempts": n_rounds}


def set_advantages(
    completions: list[Completion],
    advantages_P_G: torch.Tensor,
    dense_rewards: list,
    is_divided: bool,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Sets `advantages` of this process's completions: each token gets its completion's, plus dense ones.

    Args:
        advantages_P_G: those of all processes.
        dense_rewards: sources of them, see rewards/dense.py.
        is_divided: whether advantages are divided by a spread; those of dense rewards then are, too.

    Returns metrics of the dense rewards.
    """
    own_advantages = share_of(advantages_P_G.flatten().tolist(), accelerator)
    for completion, advantage in zip(completions, own_advantages, strict=True):
        completion.advantages = [advantage] * len(completion.ids)

    metrics = {}
    if dense_rewards:
        from rewards.dense import add_advantages
    for source in dense_rewards:
        add_advantages(source, completions, advantages_P_G.size(1), scale=is_divided)
        metrics |= source.metrics
    return metrics


def accumulate_gradients(
    completions: list[Completion],
    policy: Learner,
    *,
    epsilon: tuple[float, float],
    beta: float = 0.0,
    loss_type: str = "dapo",
    entropy_coef: float = 0.0,
    importance_cap: float | None = None,
    max_tokens: int = 0,
) -> dict[str, float]:
    """Computes the policy's gradient of one optimizer step, in micro-batches; returns means over tokens for the log.

    The loss, entropy bonus included, is a mean over the whole update, whichever process and micro-batch its
    completions are in; see `mean_weights`. PPO and RLVER use it too.

    Args:
        beta: weight of the KL term, for which completions have `reference_logprobs`.
        importance_cap: of --importance-correction token_truncate; None: all weights are 1.
        max_tokens: see `mean_weights`.
    """
    n_tokens = policy.count_tokens(completions)
    n_completions = len(completions) * policy.accelerator.num_processes
    sums = {}
    for micro_batch in policy.micro_batches(completions):
        batch = policy.collate(micro_batch)
        mask = batch["policy_mask"]
        token_weights = mean_weights(mask, loss_type, n_tokens, n_completions, max_tokens)
        logprobs, entropies = policy.logprobs(batch, entropy_gradient=bool(entropy_coef))
        # with one update a rollout none are stored, as pi_old is pi: the ratio is 1, its gradient that of log pi
        old_logprobs = batch.get("old_logprobs", logprobs.detach())
        # transformers gives none; there the sampler is the policy itself, and the gap is 0
        sampler_logprobs = batch.get("sampler_logprobs", old_logprobs)
        importance_weights = 1.0
        if importance_cap:
            importance_weights = truncated_importance(old_logprobs, sampler_logprobs, importance_cap)
        loss, batch_sums = grpo_loss(
            logprobs,
            old_logprobs,
            batch["reference_logprobs"] if beta else None,
            batch["advantages"],
            mask,
            token_weights,
            importance_weights,
            epsilon=epsilon,
            beta=beta,
            loss_type=loss_type,
        )
        loss = loss - entropy_coef * (entropies * token_weights).sum()
        policy.backward(loss)

        # all sums are divided by n_tokens below, but the loss is a mean already
        batch_sums["loss"] = loss.detach() * n_tokens
        batch_sums["entropy"] = (entropies.detach() * mask).sum()
        batch_sums["sampling/logprob_gap"] = ((old_logprobs - sampler_logprobs).abs() * mask).sum()
        log_ratio = (logprobs.detach() - old_logprobs) * mask
        batch_sums["approximate_kl"] = (log_ratio.exp() - log_ratio - 1).sum()
        for name, value in batch_sums.items():
            sums[name] = sums.get(name, 0.0) + value
    return policy.means(sums, n_tokens)


# --- before the loop


def check_arguments(args: Args, accelerator: Accelerator) -> None:
    """Exits with 2 for arguments that cannot work together."""
    if args.group_size < 2:
        fail("--group-size 1 gives every completion the advantage zero; use 2 or more")
    if args.scale_rewards == "pass_at_k" and args.group_size < PASS_AT_K:
        fail(
            f"--group-size {args.group_size}: --scale-rewards pass_at_k needs at least PASS_AT_K, {PASS_AT_K}"
        )
    mean_weights(torch.ones(1, 1), args.loss_type, 1, 1, 1)  # raises for a type without a branch there
    check_split(args.prompts_per_step, accelerator.num_processes, args.updates_per_rollout)


def main(args: Args) -> None:
    accelerator = start_accelerator(args.dtype)
    check_arguments(args, accelerator)

    # --- what can be checked before a model is loaded
    tokenizer = load_policy_tokenizer(args)
    scorer = Scorer(
        args, args.rewards, tokenizer, accelerator, args.group_size, args.on_bad_format, args.format_margin
    )
    prompts, dropped = load_prompts(
        args.prompts, tokenizer, args.max_prompt_tokens, args.prompts_per_step, readers=scorer.readers
    )
    held_out = load_held_out(args.gold_prompts, tokenizer, args.max_prompt_tokens, prompts, scorer.readers)
    accelerator.print(check_memory(Memory(args).rl(scorer.parts, has_reference=args.beta > 0)))
    run = Run(args, "grpo", args.model, constants(globals()))
    n_completions = args.prompts_per_step * args.group_size
    scorer.check(prompts, run.folder, n_completions, args.beta > 0, args.scale_rewards == "pass_at_k")
    if args.dry_run:
        return
    run.start(dropped)

    # --- models; a resumed run takes their weights from its last checkpoint
    policy = load_policy(
        args, args.model, run.checkpoint, accelerator, args.temperature, has_reference=args.beta > 0
    )
    learners = {"model": policy} | scorer.load_dense(policy, run.checkpoint)  # some dense rewards learn
    scorer.load(run.folder)
    load_optimizers(run.checkpoint, learners)
    sampler = policy_sampler(
        args, tokenizer, n_completions, args.max_prompt_tokens, args.max_completion_tokens, args.top_p
    )

    def draw(rows: list[dict]) -> list[Completion]:
        """Samples G completions of each prompt, next to each other, and scores them; each process its share."""
        repeated = [row for row in share_of(rows, accelerator) for _ in range(args.group_size)]
        completions = sample_completions(repeated, sampler, args.think_format)
        run.timer.end("rollout")
        scorer.set_rewards(completions, policy)  # `reward`, `rewards` and `correct` of each
        run.timer.end("reward")
        return completions

    measure = functools.partial(measure_held_out, held_out, sampler, scorer, policy, run.folder)
    checks = [sampler.check, scorer.check_step]

    # --- the loop
    with run.training(learners, tokenizer, args.steps, COLUMNS, sampler, checks, measure):
        for step in run.steps():
            seed = (args.seed, step - 1)
            epoch = step / (len(prompts) // args.prompts_per_step)
            metrics = {"epoch": epoch, "learning_rate": args.learning_rate}

            # 1. rollout, 2. reward
            sampler.sync(policy.model)  # gives it the policy's weights
            chosen = rows_of_step(prompts, step, args.prompts_per_step, args.seed)
            completions = draw(chosen)
            if args.dynamic_sampling:  # other prompts take the place of those whose groups are flat
                metrics |= replace_flat_groups(
                    completions, draw, chosen, prompts, args.group_size, args.dynamic_sampling, seed
                )
            sampler.sleep()  # its GPU memory is for the update
            rewards_P_G = gather_rewards(completions, accelerator).view(-1, args.group_size)
            flat_P = is_flat(rewards_P_G)
            metrics |= {"reward/flat_groups": flat_P.float().mean().item(), **scorer.pop_truncated()}
            metrics |= reward_metrics(rewards_P_G, scorer.reward_name)

            # 3. advantage: a completion compared with those of its group
            if args.scale_rewards == "pass_at_k":
                verdicts = gather_object([completion.correct for completion in completions])
                advantages_P_G = pass_at_k_advantages(verdicts, rewards_P_G, PASS_AT_K)
            else:
                advantages_P_G = group_advantages(rewards_P_G, args.scale_rewards)
            if args.dynamic_sampling:
                # DAPO drops groups that stay flat. Here their advantage is 0, but dense rewards still add
                # theirs, and their tokens count in the loss's mean
                advantages_P_G[flat_P] = 0.0
            # adds those of dense rewards; the model behind one of them, `prime`, learns here
            metrics |= set_advantages(
                completions, advantages_P_G, scorer.dense, args.scale_rewards != "none", accelerator
            )
            run.timer.end("advantage")

            # 4. update; from here on the processes have shares of about equally many tokens
            everyone = gather_object(completions)  # logged at the end of the step
            completions = deal(everyone, accelerator)
            if args.beta:
                policy.set_reference_logprobs(completions)
            if args.updates_per_rollout > 1:  # later updates compare the policy with what it was before
                policy.set_old_logprobs(completions)
            updates = []
            # the rounds of `replace_flat_groups` draw from (*seed, 1), (*seed, 2), ...; 0 is free
            for mini_batch in mini_batches(completions, args.updates_per_rollout, (*seed, 0)):
                means = accumulate_gradients(
                    mini_batch,
                    policy,
                    epsilon=args.epsilon,
                    beta=args.beta,
                    loss_type=args.loss_type,
                    entropy_coef=args.entropy_coef,
                    importance_cap=IMPORTANCE_CAP if args.importance_correction == "token_truncate" else None,
                    max_tokens=args.max_completion_tokens,
                )
                means["grad_norm"] = policy.clip_gradients(MAX_GRAD_NORM)
                run.check_finite(step, means, mini_batch)  # before it reaches the weights
                policy.step()
                updates.append(means)
            metrics |= {name: fmean(means[name] for means in updates) for name in updates[0]}
            run.timer.end("update")

            # 5. log, checks, held-out prompts, checkpoint
            metrics |= scorer.metrics(everyone)
            run.end_step(step, metrics, sum(map(n_tokens_of, everyone)), everyone)

    save_model(run.folder / "model", policy.model, tokenizer)
    summary = {"steps": run.last_step, "end_reason": run.end_reason, "prompts": len(prompts)}
    run.finish(summary | {"dropped": len(dropped)}, "eval_benchmarks.py ifeval --data google/IFEval --model")


# --- what --preset sets; experiments/*.sh add what a row of a table changes

PAPER = {
    "reward_on": "response",  # equation 3
    "on_bad_format": "score",  # released configs, strict mode off
    "vllm_memory": 0.4,  # beside policy, reference and reward model of 8B on 8 GPUs of 80 GB, 20 % stay free
}
VERIFIED = {
    "prompts": "data/verifiable.jsonl",
    "rewards": ("math:1",),
    "on_bad_format": "score",
    "temperature": 1.0,
}
# One card, our choice: LoRA on the SFT run of that name, and a reward model of 0.6B. GiB: docs/one-gpu.md
ONE_CARD = {
    "reward_model": "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
    "reward_on": "response",  # equation 3
    "lora_r": 64,
    "learning_rate": 1e-5,
    "vllm_memory": 0.4,
}
PRESETS: dict[str, dict] = {
    # The defaults of Args are table 7's. Rows of tables 1, 4 and 9 add --model, --think-format and what else
    # they change: experiments/table*.sh
    "paper": PAPER,
    # of instruct models: the released configs are strict; table 7, footnote
    "paper-instruct": {**PAPER, "on_bad_format": "null", "learning_rate": 3e-7},
    # of base models; the instruction of a Zero format needs room, as released
    "paper-zero": {**PAPER, "think_format": "zero_think", "max_prompt_tokens": 896},
    "24gb": {**ONE_CARD, "prompts_per_step": 32, "max_completion_tokens": 2048},
    "80gb": {**ONE_CARD, "micro_batch_tokens": 32768},
    # runs of other papers; what they leave open is as in VERIFIED and Args
    "rlvr/tulu3.1": {  # from its model card
        **VERIFIED,
        "model": "allenai/Llama-3.1-Tulu-3-8B-DPO",
        "think_format": "plain",
        "prompts_per_step": 48,
        "group_size": 16,
        "updates_per_rollout": 2,
        "beta": 0.01,
        "learning_rate": 5e-7,
        "max_prompt_tokens": 2048,
        "max_completion_tokens": 2048,
        "steps": 600,
    },
    # 2503.14476, whose model has 32B. Its rate rises over 20 steps, and its dynamic sampling compares right and
    # wrong alone; here the rate is constant, and whole rewards are compared
    "rlvr/dapo": {
        **VERIFIED,
        "rewards": ("math:2", "overlong:1"),  # 2 and 0 give the advantages of its 1 and -1
        "reward_args": ("overlong.buffer=4096",),
        "max_completion_tokens": 20480,
        "prompts_per_step": 512,
        "group_size": 16,
        "updates_per_rollout": 16,
        "beta": 0.0,
        "epsilon": (0.2, 0.28),
        "dynamic_sampling": 10,
    },
    "judge/olmo3": {  # 2512.13961, the chat part of its mixture; there IMPORTANCE_CAP is 2
        "rewards": ("judge_mark:1",),
        "judge": "Qwen/Qwen3-32B",
        "judge_url": "http://localhost:8000/v1",
        "reward_args": ("judge_mark.judge_max_tokens=8192",),  # ours: this judge thinks before its mark
        "on_bad_format": "score",
        "temperature": 1.0,
        "max_prompt_tokens": 2048,
        "max_completion_tokens": 32768,
        "beta": 0.0,
        "epsilon": (0.2, 0.272),
        "scale_rewards": "none",
        "importance_correction": "token_truncate",
        "dynamic_sampling": 3,
        "steps": 1400,
    },
    "rubric/rar": {  # 2507.17746, with a context of 1024 + 2560 tokens
        "prompts": "data/rubrics.jsonl",
        "model": "Qwen/Qwen2.5-7B",
        "think_format": "plain",
        "rewards": ("rubric:1",),
        "on_bad_format": "score",
        "judge": "gpt-4o-mini",
        "prompts_per_step": 96,
        "group_size": 16,
        "learning_rate": 5e-6,
        "temperature": 1.0,
        "max_completion_tokens": 2560,
    },
    # 2504.16084, where 64 completions vote and 32 of them are trained on, at a rate that falls along a cosine
    "unsupervised/ttrl": {
        **VERIFIED,
        "model": "Qwen/Qwen2.5-Math-7B",
        "think_format": "plain",
        "rewards": ("majority:1",),
        "group_size": 32,
        "learning_rate": 5e-7,
        "max_completion_tokens": 3072,
    },
    "small": {  # SmolLM2-135M, part bridge of experiments/study.sh; our choice
        "rollout": "vllm",
        "reward_on": "response",
        "max_prompt_tokens": 192,
        "max_completion_tokens": 160,
        "steps": 30,
        "prompts_per_step": 4,
        "learning_rate": 3e-4,  # at 1e-4 the run without thinking stayed within 0.002 nat of its start
        "lora_r": 16,
        "micro_batch_tokens": 1024,
        "gradient_checkpointing": False,
        "save_steps": 10,
    },
    "toy": {  # our choice
        "prompts": "data/toy/rl_prompts.jsonl",
        "reward_model": "data/toy/reward_model",
        "rollout": "hf",
        "gold": "data/toy/world.py:gold",
        "temperature": 1.0,
        "max_prompt_tokens": 128,
        "max_completion_tokens": 128,
        "steps": 40,
        "prompts_per_step": 16,
        "micro_batch_tokens": 4096,
        "beta": 0.04,
        "learning_rate": 3e-4,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
        "format_margin": 2.0,
    },
}
# The released values. There are configs of table 1's rows; the others take those of llama3.1-8b-rlmt.
#
# loss_type: the configs say "token-mean", but of micro-batches of one completion, which are then averaged.
#
# steps: the configs run two epochs of 7,544 prompts, 117 steps each (Llama Zero: four), and save every 45
# steps and at the end. Their README uses "the checkpoint around step 117 (specifically, step 135)", and table
# 7 has 120. Here a run ends with the saved step nearest to 135. As the learning rate is constant, its model is that
# checkpoint.
RELEASED = {"loss_type": "grpo", "entropy_coef": 1e-3, "steps": 135, "save_steps": 45}
for _name in ("paper", "paper-instruct", "paper-zero"):
    PRESETS[f"{_name}-as-released"] = PRESETS[_name] | RELEASED


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
