"""Samples completions, splits them into thinking and response, and computes the metrics of a step.

    sampler = policy_sampler(args, tokenizer, n_completions=512, max_prompt_tokens=1024, max_tokens=4096)
    sampler.sync(policy.model)                            # the sampler has the policy's weights now
    for index, sample in sampler.sample(prompts):         # in the order in which they end
        ...
    sampler.sleep()                                       # GPU memory for the update
    sampler.close()                                       # GPU memory for another model

Training loops hand over the policy's weights before every rollout; vLLM's engine in this process samples, or
transformers' generate. DPO rounds and evaluations call `generate`, which seeds every prompt of a saved model;
a server of vLLM samples, or transformers' generate in this process.
"""

import dataclasses
import gc
import itertools
import math
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlmt.chat import Sample
from rlmt.learner import Policy, deal
from rlmt.model import evaluating, is_sharded_launch
from utils import THINK_FORMATS, compute_dtype, fail, split_thinking, wants_vllm

# Nats a token by which sampler and trainer may differ. Rounding alone accounts for up to 0.04 in bfloat16 and 1e-5
# in float32; other weights make tenths or more.
MAX_LOGPROB_GAP = {"bfloat16": 0.1, "float32": 1e-3}
SECOND_SEED = 2**60  # what is added to the seed of a completion that a thinking budget has cut in two


# --- 1. one completion


@dataclass
class Completion:
    """Holds one completion, from the rollout to the log."""

    id: str
    messages: list[dict]
    prompt_ids: list[int]
    ids: list[int]
    text: str = ""
    thinking: str = ""
    response: str = ""
    status: str = ""
    """See utils.split_thinking."""
    cut_off: bool = False
    n_thinking_tokens: int = 0
    prompt: dict = field(default_factory=dict)
    """The prompt's row, with whatever fields verifiers read."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each part's value, None where there is none."""
    gets_floor: bool = False
    """Whether its reward is a floor, for its format or because it fails a gate."""
    reward: float = math.nan
    """NaN: there is none, and the advantage is 0."""
    correct: float | None = None
    """The verdict of a verifier: 1 right, 0 wrong, None unknown."""
    advantages: list[float] = field(default_factory=list)
    """One for each token."""
    policy_mask: list[int] | None = None
    """1 on the policy's tokens, 0 on a user's turns; None: all are the policy's."""
    loss_mask: list[int] | None = None
    """1 on tokens on which the advantage counts; None: all of the policy's. A KL counts on all in any case."""
    sampler_logprobs: list[float] | None = None
    """The sampler's log-probability of each token, nats."""
    old_logprobs: list[float] | None = None
    """The policy's log-probabilities before the rollout's first update; None if there is one update."""
    reference_logprobs: list[float] | None = None
    """That of the reference."""
    values: list[float] | None = None
    """PPO: the critic's value of the text before each token, at the rollout."""
    returns: list[float] | None = None
    """PPO: the targets of those values."""
    index: int = 0
    """Where it was among the completions of all processes, before `deal_completions`."""
    statistics: dict[str, float] = field(default_factory=dict)
    """mean_entropy and mean_kl_uniform, for rewards that read them."""

    @property
    def n_tokens(self) -> int:
        """Returns how many tokens the policy wrote."""
        return sum(self.policy_mask or [1] * len(self.ids))

    def row(self) -> dict:
        """Returns the completion as rewards read it and logs keep it."""
        missing = math.isnan(self.reward)
        # over the policy's tokens; still empty when rewards read the row
        counted = itertools.compress(self.advantages, self.policy_mask or [1] * len(self.ids))
        return {
            "id": self.id,
            "messages": self.messages,
            "text": self.text,
            "thinking": self.thinking,
            "response": self.response,
            "status": self.status,
            "cut_off": self.cut_off,
            "rewards": self.rewards,
            "gets_floor": self.gets_floor,
            "reward": None if missing else self.reward,  # JSON has no NaN
            "missing": missing,
            "advantage": sum(counted) / max(1, self.n_tokens),
            "n_tokens": self.n_tokens,
            "n_thinking_tokens": self.n_thinking_tokens,
            **self.statistics,
        }


def text_of(tokenizer: Tokenizer, sample: Sample) -> str:
    """Decodes a sample without its end of turn, one of `tokenizer.stop_ids` (of prepare_tokenizer, or of
    benchmarks/shipped.py)."""
    ids = sample.ids
    if ids and ids[-1] in tokenizer.stop_ids:
        ids = ids[:-1]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def read_completion(tokenizer: Tokenizer, think_format: str, prompt: dict, sample: Sample) -> Completion:
    """Decodes a sample and splits it into thinking and response.

    `prompt`: a row of data.load_prompts.
    """
    text = text_of(tokenizer, sample)
    # all that follows reads these parts; only --on-bad-format null looks for tags once more
    parts = split_thinking(text, think_format, sample.finished)
    return Completion(
        id=prompt["id"],
        messages=prompt["messages"],
        prompt_ids=prompt["prompt_ids"],
        ids=sample.ids,
        text=text,
        thinking=parts.thinking,
        response=parts.response,
        status=parts.status,
        cut_off=not sample.finished,
        n_thinking_tokens=len(tokenizer(parts.thinking, add_special_tokens=False)["input_ids"]),
        sampler_logprobs=sample.logprobs,
        prompt=prompt,
    )


@dataclass(frozen=True)
class ThinkingBudget:
    """Says where in a completion thinking must be closed, how to tell whether it is open, and what closes
    it."""

    close_at: int
    """Tokens of the completion after which thinking is closed: the budget, and the tag that opens the
    thinking."""
    opening_tag: str
    """A turn with thinking begins with this text."""
    closed_pattern: str
    """A regular expression that matches somewhere in a turn if its thinking is closed."""
    closing: list[int]
    """Token ids that close the thinking and open the answer."""
    from_template: str = ""
    """The beginning of the turn, if the chat template has already written it."""

    def closing_after(self, ids: list[int], tokenizer) -> list[int]:
        """Returns the token ids that must follow the first `close_at` ids of a completion.

        They are [] if its thinking is closed by then, or if it has none. If the model has begun to close it,
        they are the rest of the closing tokens.
        """
        written = ids[: self.close_at]
        # some templates end a prompt with the opening tag
        turn = self.from_template + tokenizer.decode(written)
        has_thought = turn.lstrip().startswith(self.opening_tag)
        if not has_thought or re.search(self.closed_pattern, turn):
            return []
        for n_begun in range(len(self.closing) - 1, 0, -1):
            if written[-n_begun:] == self.closing[:n_begun]:
                return self.closing[n_begun:]
        return self.closing


# --- 2. the sampler


@dataclass
class Sampling:
    """Says how completions are sampled. Nothing is taken from the model's own generation config."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    top_p: float = 1.0
    stop: str = ""
    """A completion ends behind this string too, not only at the tokenizer's ends of turn."""
    budget: ThinkingBudget | None = None
    """Closes thinking that is too long; None: it may take all tokens."""


class Transformers:
    """Samples by transformers' generate from a model in this process."""

    def __init__(self, tokenizer: Tokenizer, model: torch.nn.Module | None = None, batch_size: int = 128):
        """`model`: None for a policy, which `update` brings."""
        self.tokenizer = tokenizer
        self.model = model
        self.batch_size = batch_size

    @torch.no_grad()
    def complete(
        self, prompts: dict[int, list[int]], seeds: dict[int, int], sampling: Sampling, ends: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Samples one batch, by the seed of its first prompt; yields what Engine.complete does, without
        log-probabilities."""
        if seeds:
            torch.manual_seed(next(iter(seeds.values())))
        rows = {"input_ids": list(prompts.values())}
        # on the left, so that each prompt's next token comes right behind it
        batch = self.tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(self.model.device)
        width = batch["input_ids"].size(1)

        def ends_by_stop_string(ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
            found = [has_ended(row, self.tokenizer, ends, sampling.stop) for row in ids[:, width:].tolist()]
            return torch.tensor(found, device=ids.device)

        # a config of our own: the folder's may ask for other sampling
        config = transformers.GenerationConfig(
            max_new_tokens=sampling.max_tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
        )
        if sampling.temperature:
            config.update(do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=0)
        options = {**batch, "generation_config": config}
        if sampling.stop:  # generate itself knows the ends of turn
            options["stopping_criteria"] = [ends_by_stop_string]
        if isinstance(self.model, Policy):
            # no process of a sharded launch may stop before the last: each forward gathers weights from all
            options["synced_gpus"] = is_sharded_launch()
        with evaluating(self.model):  # else gradient checkpointing turns the KV cache off
            sequences = self.model.generate(**options)
        for index, sequence in zip(prompts, sequences[:, width:].tolist(), strict=True):
            ids, finished = until_end(sequence, self.tokenizer, ends, sampling.stop)
            yield index, Sample(ids, None, finished)

    def update(self, trained: torch.nn.Module) -> None:
        """Samples from the policy from now on."""
        self.model = getattr(trained, "module", trained)  # DDP has the policy in .module

    def sleep(self) -> None:
        """Does nothing: the policy's memory is the trainer's."""

    def close(self) -> None:
        """Frees the model."""
        self.model = None


def until_end(ids: list[int], tokenizer: Tokenizer, ends: list[int], stop: str) -> tuple[list[int], bool]:
    """Returns ids up to their first end, which they keep, and whether there is one; the rest is padding."""
    for n in range(1, len(ids) + 1):
        if has_ended(ids[:n], tokenizer, ends, stop):
            return ids[:n], True
    return ids, False


def has_ended(ids: list[int], tokenizer: Tokenizer, ends: list[int], stop: str) -> bool:
    """Tells whether the last token ends the turn, or the last tokens hold the stop string."""
    if ids[-1] in ends:
        return True
    most_tokens = len(stop.encode())  # that it can take: each has a byte or more
    return bool(stop) and stop in tokenizer.decode(ids[-most_tokens:])


class Sampler:
    """Samples completions of prompts.

    Args:
        backend: Transformers; or vLLM's Engine or Server.
        dtype: that of computation, see utils.compute_dtype.
    """

    def __init__(self, backend, tokenizer: Tokenizer, sampling: Sampling, dtype: str = "auto"):
        self.backend = backend
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.ends = tokenizer.stop_ids
        self.dtype = compute_dtype(dtype)
        self.breaches_in_a_row = 0  # see `check`

    def sample(
        self, prompts: list[list[int]], seeds: list[int] | None = None, done: Set[int] = frozenset()
    ) -> Iterator[tuple[int, Sample]]:
        """Yields (index in `prompts`, sample) as completions end; prompts are token ids.

        `done`: indices to leave out. `seeds`: one for each prompt, so that `done` changes no other sample.
        None: samples follow from torch's generator.
        """
        for indices in self._batches(prompts, done):
            batch_seeds = {}
            if seeds:
                batch_seeds = {index: seeds[index] for index in indices}
            for index, sample in self._complete({index: prompts[index] for index in indices}, batch_seeds):
                if index not in done:
                    yield index, sample

    def _batches(self, prompts: list[list[int]], done: Set[int]) -> list[list[int]]:
        """Returns the indices of each batch: vLLM's is one, transformers' are of about equally long prompts.

        A batch of transformers is sampled whole if not all of it is done, as its prompts share one seed.
        """
        size = self.backend.batch_size
        if not size:
            return [[index for index in range(len(prompts)) if index not in done]]
        # a batch is as wide as its longest prompt
        longest_first = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        batches = [longest_first[start : start + size] for start in range(0, len(prompts), size)]
        return [indices for indices in batches if not done.issuperset(indices)]

    def _complete(self, prompts: dict[int, list[int]], seeds: dict[int, int]) -> Iterator[tuple[int, Sample]]:
        """Samples one batch; with a thinking budget in two requests: up to the budget, then the rest."""
        sampling = self.sampling
        budget = sampling.budget
        if budget:
            sampling = dataclasses.replace(sampling, max_tokens=budget.close_at)
        begun = {}  # what the first request wrote
        closing = {}  # what closes its thinking
        for index, sample in self.backend.complete(prompts, seeds, sampling, self.ends):
            if sample.finished or not budget:
                yield index, sample
            else:
                closing[index] = budget.closing_after(sample.ids, self.tokenizer)
                begun[index] = sample.ids + closing[index]
        if not begun:
            return

        longer_prompts = {index: prompts[index] + begun[index] for index in prompts if index in begun}
        # with the first seed the first tokens' random numbers would come again
        next_seeds = {index: seed + SECOND_SEED for index, seed in seeds.items() if index in begun}
        sampling = dataclasses.replace(sampling, max_tokens=self.sampling.max_tokens - budget.close_at)
        for index, sample in self.backend.complete(longer_prompts, next_seeds, sampling, self.ends):
            # half of the stop string may be in each request
            whole = begun[index] + sample.ids
            whole, finished = until_end(whole, self.tokenizer, self.ends, sampling.stop)
            # where the thinking was closed, the closing tokens count too
            finished = finished and len(whole) <= self.sampling.max_tokens
            yield index, Sample(whole[: self.sampling.max_tokens], None, finished, bool(closing[index]))

    def sync(self, trained: torch.nn.Module) -> None:
        """Gives the sampler the weights of the policy being trained; all processes must call it."""
        self.backend.update(trained)

    def check(self, step: int, metrics: dict[str, float], completions: list) -> None:
        """Warns when sampler and trainer disagree, and ends the run when they do twice in a row: vLLM must sample
        from the policy's weights.

        They disagree by the mean difference of their log-probabilities, nats per token, over the tokens of a
        step.
        """
        gap = metrics["sampling/logprob_gap"]
        # top-p sampling raises every sampled token's log-probability by up to -log(p)
        limit = MAX_LOGPROB_GAP[self.dtype] - math.log(self.sampling.top_p)
        if gap <= limit:
            self.breaches_in_a_row = 0
            return
        self.breaches_in_a_row += 1
        message = f"step {step}: sampler and trainer disagree by {gap:.4f} nats per token (limit {limit:.4f})"
        if self.breaches_in_a_row == 2:
            raise RuntimeError(
                f"{message}, twice in a row: vLLM samples from other weights than those being trained"
            )
        PartialState().print(f"WARNING: {message}; a second time in a row ends the run")

    def sleep(self) -> None:
        """Frees the engine's GPU memory until the next `sync`."""
        self.backend.sleep()

    def close(self) -> None:
        """Frees the model."""
        self.backend.close()
        gc.collect()
        torch.cuda.empty_cache()


def policy_sampler(
    args,
    tokenizer: Tokenizer,
    n_completions: int,
    max_prompt_tokens: int,
    max_tokens: int,
    top_p: float = 1.0,
) -> Sampler:
    """Returns the sampler of a training loop, whose `sync` brings the policy; see Sampling and
    rlmt.vllm.Engine.

    Args:
        args: those of GRPO, PPO or RLVER.
        n_completions: of a step, over all processes.
        max_prompt_tokens, max_tokens: of a prompt, and of a completion of it.
    """
    stop = THINK_FORMATS[args.think_format].stop
    sampling = Sampling(args.temperature, max_tokens, top_p, stop)
    n_processes = PartialState().num_processes
    if wants_vllm(args.rollout):
        from rlmt.vllm import Engine

        # as many at once as a process samples; vLLM takes no more than it has tokens in a batch
        n_sequences = min(n_completions // n_processes, 1024)
        name = "vLLM"
        backend = Engine(
            args.model, max_prompt_tokens + max_tokens, args.vllm_memory, n_sequences, args.dtype
        )
    else:
        name = "transformers"
        backend = Transformers(tokenizer)
    PartialState().print(f"rollouts by {name}, on {n_processes} processes")
    return Sampler(backend, tokenizer, sampling, args.dtype)


# --- 3. the completions of a step and their metrics


def share_of(rows: list, accelerator: Accelerator) -> list:
    """Returns this process's share of rows: one block, as long as every other process's."""
    size = len(rows) // accelerator.num_processes
    first = accelerator.process_index * size
    return rows[first : first + size]


def sample_completions(prompts: list[dict], sampler: Sampler, think_format: str) -> list[Completion]:
    """Samples a completion of each prompt, a row of data.load_prompts."""
    samples = dict(sampler.sample([prompt["prompt_ids"] for prompt in prompts]))
    completions = []
    for index, prompt in enumerate(prompts):
        completions.append(read_completion(sampler.tokenizer, think_format, prompt, samples[index]))
    return completions


def gather_rewards(completions: list[Completion], accelerator: Accelerator) -> torch.Tensor:
    """Returns the rewards of all processes' completions (P*G,), in the order of their prompts.

    Raises RuntimeError if none of them has a reward.
    """
    own_rewards = torch.tensor([completion.reward for completion in completions], device=accelerator.device)
    rewards = accelerator.gather(own_rewards)
    if rewards.isnan().all():
        raise RuntimeError(
            "no completion got a reward, so nothing can be learned: the judge or the user simulator failed every "
            "time, the prompts lack the fields that the rewards read, or, in train_rlver.py, all conversations outgrew "
            "--max-tokens less --max-turn-tokens"
        )
    return rewards


def deal_completions(completions: list[Completion], accelerator: Accelerator) -> list[Completion]:
    """Returns this process's share of all processes' completions; the shares have about equally many tokens."""
    # lists of ids and numbers, far smaller than what an update computes
    everyone = gather_object(completions)
    for index, completion in enumerate(everyone):
        completion.index = index
    return deal(everyone, accelerator)


def gather_in_order(dealt: list[Completion]) -> list[Completion]:
    """Returns all processes' completions in the order in which they were before `deal_completions`."""
    return sorted(gather_object(dealt), key=attrgetter("index"))


def check_split(prompts_per_step: int, n_processes: int, updates_per_rollout: int = 1) -> None:
    """Exits with 2 unless the prompts of a step can be split evenly, into processes and optimizer steps."""
    parts = n_processes * updates_per_rollout
    if prompts_per_step % parts:
        fail(
            f"--prompts-per-step {prompts_per_step} cannot be split into {n_processes} "
            f"processes x {updates_per_rollout} optimizer steps; use a multiple of {parts}"
        )


def mini_batches(
    completions: list[Completion], n_parts: int, seed: tuple[int, ...]
) -> list[list[Completion]]:
    """Splits this process's completions into the optimizer steps of one pass; at random if there are
    several."""
    if n_parts == 1:
        return [completions]
    order = np.random.default_rng(seed).permutation(len(completions))
    parts = np.array_split(order, n_parts)  # whole groups are not kept together: advantages are there already
    return [[completions[index] for index in part] for part in parts]


def completion_metrics(completions: list[Completion]) -> dict[str, float]:
    """Returns metrics of a step's completions, gathered from all processes: lengths, format, rewards.

    Lengths count the policy's tokens.
    """
    lengths = [c.n_tokens for c in completions]
    ended = [c.n_tokens for c in completions if not c.cut_off] or [0]  # 0 where all were cut off
    cut_off = fmean(c.cut_off for c in completions)
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": cut_off,
        "completions/mean_terminated_length": fmean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
        "think/format_ok": fmean(c.status == "ok" for c in completions),
        "think/truncated": cut_off,
        "think/mean_tokens": fmean(c.n_thinking_tokens for c in completions),
        "think/response_tokens": fmean(c.n_tokens - c.n_thinking_tokens for c in completions),
        "reward/missing": fmean(math.isnan(c.reward) for c in completions),
    }
    well_formed = [c for c in completions if c.status == "ok"]
    for name in completions[0].rewards:
        # the mean of well-formed completions alone, as others may have been scored as another text
        # (--on-bad-format)
        counted = well_formed if name == "preference" else completions
        known = [c.rewards[name] for c in counted if c.rewards[name] is not None]
        if known:
            metrics[f"reward/{name}"] = fmean(known)
    return metrics


def reward_metrics(rewards_P_G: torch.Tensor, name: str) -> dict[str, float]:
    """Returns mean and standard deviation of a step's rewards, without NaN (no reward).

    Both are there a second time under TRL's keys, which have `name`: "preference" where
    the total is the reward model's own score, else "total".
    """
    known = rewards_P_G[~rewards_P_G.isnan()]
    mean = known.mean().item()
    std = 0.0
    if len(known) > 1:
        std = known.std().item()
    n_different = [len(group[~group.isnan()].unique()) for group in rewards_P_G.cpu()]
    return {
        "reward": mean,
        "reward_std": std,
        f"rewards/{name}/mean": mean,
        f"rewards/{name}/std": std,
        "frac_reward_zero_std": fmean(n < 2 for n in n_different),
    }


def warn_of_no_lesson(step: int, metrics: dict[str, float], completions: list) -> None:
    """Warns at the first step, and once more, if no completion has the think format, or all have one reward."""
    if step not in (1, 3):
        return
    if metrics["reward_std"] == 0:
        PartialState().print(
            f"WARNING: all completions of this step have the reward {metrics['reward']:g}, so nothing can be learned from them; "
            "completions.jsonl in the run's folder has what each reward gave"
        )
    if metrics["think/format_ok"] == 0:
        PartialState().print(
            "WARNING: no completion has the think format, so nothing can be learned: start from a warm-started --model in its "
            "--think-format, take zero_think, which asks for the format, or plain; or give completions more tokens"
        )
