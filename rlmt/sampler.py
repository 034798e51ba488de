"""Samples completions, splits them into thinking and response, and computes the metrics of a step.

    sampling = Sampling(temperature=0.7, max_tokens=4096)
    sampler = Sampler(args.model, tokenizer, sampling, use_vllm=True, in_process=True)
    sampler.sync(policy)                                  # the sampler has the policy's weights now
    for place, sample in sampler.sample(prompts):         # in the order in which they end
        ...
    sampler.sleep()                                       # GPU memory for the update
    sampler.close()                                       # GPU memory for another model

An engine of vLLM (rlmt/vllm.py) or transformers' own generate does the sampling.
Training loops hand over the policy's weights before every rollout. DPO rounds, evaluations and local judges call
`generate`, which loads a saved model and seeds every prompt.
"""

import gc
import importlib.util
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from tqdm import tqdm
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlmt.model import Policy, is_sharded_launch, load_weights
from utils import DEVICE, THINK_FORMATS, compute_dtype, fail, split_thinking

# Nats a token by which sampler and trainer may differ. Rounding alone makes up to 0.04 in bfloat16 and 1e-5 in
# float32 (docs/gpu.md); other weights make tenths or more.
MAX_LOGPROB_GAP = {"bfloat16": 0.1, "float32": 1e-3}


# --- 1. one completion


@dataclass
class Sample:
    """Holds what a sampler returns for one prompt."""

    ids: list[int]
    """Token ids, with the end of turn if there is one."""
    logprobs: list[float] | None
    """The sampler's log-probability of each token, nats; None from transformers."""
    finished: bool
    """False if the token limit cut the completion off."""


@dataclass
class Completion:
    """Holds one completion, from the rollout to the log."""

    id: str
    messages: list[dict]
    prompt_ids: list[int]
    ids: list[int]
    text: str
    thinking: str
    response: str
    status: str
    """See utils.split_thinking."""
    cut_off: bool
    n_thinking_tokens: int
    prompt: dict = field(default_factory=dict)
    """The prompt's row, with whatever fields verifiers read."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each part's value, None where there is none."""
    contributions: dict[str, float | None] = field(default_factory=dict)
    """What each part adds to the reward, if several are combined."""
    reward: float = math.nan
    """NaN: there is none, and the advantage is 0."""
    correct: float | None = None
    """The verdict of a verifier: 1 right, 0 wrong, None unknown."""
    advantages: list[float] = field(default_factory=list)
    """One for each token."""
    loss_mask: list[int] | None = None
    """1 on the policy's tokens, 0 on a user's turns; None: all are the policy's."""
    sampler_logprobs: list[float] | None = None
    """The sampler's log-probability of each token, nats."""
    old_logprobs: list[float] | None = None
    """That of the policy before the first update of the rollout; None where there is only one."""
    reference_logprobs: list[float] | None = None
    """That of the reference."""
    values: list[float] | None = None
    """PPO: the critic's value of the text before each token, at the rollout."""
    returns: list[float] | None = None
    """PPO: the targets of those values."""
    statistics: dict[str, float] = field(default_factory=dict)
    """mean_entropy and mean_kl_uniform, for rewards that read them."""

    @property
    def n_trained_tokens(self) -> int:
        """Returns how many tokens the loss counts."""
        return len(self.ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def mean_advantage(self) -> float:
        """Returns the mean over the tokens that the loss counts; 0 before there are advantages."""
        mask = self.loss_mask or [1] * len(self.ids)
        return sum(itertools.compress(self.advantages, mask)) / max(1, self.n_trained_tokens)

    def row(self) -> dict:
        """Returns the completion as rewards read it and logs keep it."""
        missing = math.isnan(self.reward)
        row = {
            "id": self.id,
            "messages": self.messages,
            "text": self.text,
            "thinking": self.thinking,
            "response": self.response,
            "status": self.status,
            "cut_off": self.cut_off,
            "rewards": self.rewards,
            "reward": None if missing else self.reward,  # JSON has no NaN
            "missing": missing,
            "advantage": self.mean_advantage,
            "n_tokens": self.n_trained_tokens,
            "n_thinking_tokens": self.n_thinking_tokens,
        }
        if self.contributions:
            row["contributions"] = self.contributions
        return row | self.statistics


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that end a turn: the `stop_ids` of rlmt/chat.py and benchmarks/shipped.py, or EOS alone."""
    return getattr(tokenizer, "stop_ids", [tokenizer.eos_token_id])


def text_of(tokenizer: Tokenizer, sample: Sample) -> str:
    """Decodes a sample without its end of turn."""
    ids = sample.ids
    if ids and ids[-1] in ends_of(tokenizer):
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def read_completion(tokenizer: Tokenizer, think_format: str, prompt: dict, sample: Sample) -> Completion:
    """Decodes a sample and splits it into thinking and response.

    `prompt`: a row of data.load_prompts.
    """
    text = text_of(tokenizer, sample)
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
    """Says where in a completion thinking must be closed, how to tell whether it is open, and what closes it."""

    close_at: int
    """Tokens of the completion after which thinking is closed: the budget, and the tag that opens the thinking."""
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

        They are [] if its thinking is closed by then, or if it has none. If the model has begun to close it, they
        are the rest of the closing tokens.
        """
        written = ids[: self.close_at]
        turn = self.from_template + tokenizer.decode(written, skip_special_tokens=False)
        has_thought = turn.lstrip().startswith(self.opening_tag)
        if not has_thought or re.search(self.closed_pattern, turn):
            return []
        for n_begun in range(len(self.closing) - 1, 0, -1):
            if written[-n_begun:] == self.closing[:n_begun]:
                return self.closing[n_begun:]
        return self.closing

    def force_closing(self, written: torch.Tensor, scores: torch.Tensor, tokenizer) -> torch.Tensor:
        """Leaves one choice to every row that must close its thinking now; a logits processor of transformers.

        Args:
            written: token ids (B, T) of the completions so far.
            scores: (B, V), of the next token; changed in place and returned.
        """
        n_since_closing = written.size(1) - self.close_at
        if not 0 <= n_since_closing < len(self.closing):
            return scores
        for row, ids in enumerate(written.tolist()):
            closing = self.closing_after(ids, tokenizer)
            if n_since_closing < len(closing):
                scores[row] = -math.inf
                scores[row, closing[n_since_closing]] = 0.0
        return scores

    def was_used_up(self, ids: list[int], tokenizer) -> bool:
        """Tells whether a completion's thinking was closed because its budget was used up."""
        if len(ids) <= self.close_at:
            return False
        closing = self.closing_after(ids, tokenizer)
        return closing != [] and ids[self.close_at : self.close_at + len(closing)] == closing


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


def wants_vllm(rollout: str) -> bool:
    """Tells whether `--rollout` means vLLM, as "auto" does on a GPU if vLLM is installed.

    Exits with 2 for "vllm" if it is not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if rollout == "vllm" and not installed:
        fail("--rollout vllm: vLLM is not installed; `make` installs it, or use --rollout hf")
    return rollout == "vllm" or (rollout == "auto" and installed and torch.cuda.is_available())


class Sampler:
    """Samples completions of a model by vLLM or by transformers' generate.

    Args:
        model: folder or hub name; None, as in tests: weights come by `sync` alone.
        use_vllm: whether an engine of vLLM samples.
        max_length: tokens of the longest prompt and completion together, for vLLM's KV cache.
        vllm_memory: share of the GPU that vLLM reserves.
        in_process: True in training loops, whose policy comes by `sync`: vLLM runs in this process, and
            transformers loads no model. False: vLLM's engines have processes of their own, until `close`.
        gpus: those of each engine with a process of its own, see rlmt.vllm.gpu_groups; None: one GPU.
        sleeps: whether `sleep` frees vLLM's memory.
        batch_size: completions that transformers' generate samples at once.
        dtype: that of computation, see utils.compute_dtype.
    """

    def __init__(
        self,
        model: str | None,
        tokenizer: Tokenizer,
        sampling: Sampling,
        use_vllm: bool,
        max_length: int | None = None,
        vllm_memory: float = 0.85,
        in_process: bool = False,
        gpus: list[list[str]] | None = None,
        sleeps: bool = False,
        batch_size: int = 128,
        dtype: str = "auto",
    ):
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.ends = ends_of(tokenizer)
        self.batch_size = batch_size
        self.dtype = compute_dtype(dtype)
        self.breaches_in_a_row = 0  # see `check`
        self.backend = None  # vLLM, in this process or in processes of its own
        self.policy = None  # what transformers samples from, if there is no backend
        self.in_process = in_process
        if use_vllm:
            from rlmt.vllm import Engine, Engines, gpu_groups
        if use_vllm and in_process:
            self.backend = Engine(model, max_length, vllm_memory, sleeps, dtype=self.dtype)
        elif use_vllm:
            gpus = gpus or gpu_groups()
            self.backend = Engines(model, max_length, vllm_memory, gpus, self.dtype)
        elif model and not in_process:
            self.policy, _ = load_weights(transformers.AutoModelForCausalLM, model, dtype=self.dtype)
            self.policy.to(DEVICE).eval()

    def sample(
        self, prompts: list[list[int]], seeds: list[int] | None = None, done: Set[int] = frozenset()
    ) -> Iterator[tuple[int, Sample]]:
        """Yields (place in `prompts`, sample) as completions end; prompts are token ids.

        `done`: places to leave out. `seeds`: one for each prompt, so that `done` changes no other sample. None:
        samples follow from torch's generator.
        """
        if self.backend is None:
            yield from self._sample_by_transformers(prompts, seeds, done)
            return

        parameters = {  # of vLLM's SamplingParams
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_tokens,
            "stop_token_ids": self.ends,
            "ignore_eos": True,  # stop_token_ids has every end
            "stop": [self.sampling.stop] if self.sampling.stop else [],
            "include_stop_str_in_output": True,
            "logprobs": 0,  # the sampled token's only
        }
        requests = {}
        for place, prompt in enumerate(prompts):
            if place not in done:
                requests[place] = {"prompt": prompt, **parameters}
                if seeds:
                    requests[place]["seed"] = seeds[place]
                if self.sampling.budget:
                    requests[place]["budget"] = self.sampling.budget
        for place, ids, logprobs, finished in self.backend.complete(requests):
            yield place, Sample(ids, logprobs, finished)

    def _sample_by_transformers(
        self, prompts: list[list[int]], seeds: list[int] | None, done: Set[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Samples in batches of about equally long prompts.

        A batch with a prompt that is not done is sampled whole: its prompts share one seed.
        """
        was_training = self.policy.training
        self.policy.eval()  # else gradient checkpointing turns the KV cache off
        longest_first = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
        for start in range(0, len(prompts), self.batch_size):
            places = longest_first[start : start + self.batch_size]
            if done.issuperset(places):
                continue
            if seeds:
                torch.manual_seed(seeds[places[0]])
            sequences = self._generate([prompts[place] for place in places])
            for place, sequence in zip(places, sequences, strict=True):
                if place not in done:
                    ids, finished = self.until_end(sequence)
                    yield place, Sample(ids, None, finished)
        self.policy.train(was_training)

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Returns the token ids that generate appends to each prompt, with padding behind the end of turn."""
        rows = {"input_ids": prompts}
        batch = self.tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(self.policy.device)
        width = batch["input_ids"].size(1)

        def ends_by_stop_string(ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
            last_tokens = ids[:, width:][:, -self._most_stop_tokens() :].tolist()
            return torch.tensor([self._has_ended(row) for row in last_tokens], device=ids.device)

        def close_thinking(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return self.sampling.budget.force_closing(ids[:, width:], scores, self.tokenizer)

        config = transformers.GenerationConfig(
            max_new_tokens=self.sampling.max_tokens,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.ends[0],
        )
        if self.sampling.temperature:
            config.update(
                do_sample=True, temperature=self.sampling.temperature, top_p=self.sampling.top_p, top_k=0
            )
        options = {**batch, "generation_config": config}
        if self.sampling.stop:  # generate itself knows the ends of turn
            options["stopping_criteria"] = [ends_by_stop_string]
        if self.sampling.budget:
            options["logits_processor"] = [close_thinking]
        if isinstance(self.policy, Policy):
            # no process of a sharded launch may stop before the last: each forward gathers weights from all
            options["synced_gpus"] = is_sharded_launch()
        sequences = self.policy.generate(**options)
        return sequences[:, width:].tolist()

    def until_end(self, ids: list[int]) -> tuple[list[int], bool]:
        """Returns ids up to their first end, which they keep, and whether there is one; the rest is padding."""
        for n in range(1, len(ids) + 1):
            if self._has_ended(ids[:n]):
                return ids[:n], True
        return ids, False

    def _has_ended(self, ids: list[int]) -> bool:
        """Tells whether the last token ends the turn, or the last tokens hold the stop string."""
        if ids[-1] in self.ends:
            return True
        stop = self.sampling.stop
        return bool(stop) and stop in self.tokenizer.decode(ids[-self._most_stop_tokens() :])

    def _most_stop_tokens(self) -> int:
        """Returns how many tokens the stop string can take at most: each has a byte or more."""
        return len(self.sampling.stop.encode())

    def sync(self, trained: torch.nn.Module) -> None:
        """Gives the sampler the weights of the policy being trained; all processes must call it."""
        if self.backend:
            self.backend.update(trained)
        else:
            self.policy = getattr(trained, "module", trained)  # DDP has the policy in .module

    def check(self, step: int, metrics: dict[str, float], completions: list) -> None:
        """Stops the run when sampler and trainer disagree twice in a row: vLLM must sample from the policy's weights.

        They disagree by the mean difference of their log-probabilities, nats per token, over the tokens of a step.
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
        """Frees the engine's GPU memory until the next `sync`, if `sleeps`."""
        if self.backend and self.in_process:
            self.backend.sleep()

    def close(self) -> None:
        """Frees the model. vLLM's own processes end, and with them their GPU memory."""
        if self.backend:
            self.backend.close()
        self.backend = None
        self.policy = None
        gc.collect()
        torch.cuda.empty_cache()


def policy_sampler(
    args,
    tokenizer: Tokenizer,
    use_vllm: bool,
    max_tokens: int,
    max_length: int,
    sleeps: bool = False,
) -> Sampler:
    """Returns the sampler of PPO or RLVER, whose top_p is 1 and which `sync` gives the policy; see Sampling and Sampler."""
    stop = THINK_FORMATS[args.think_format].stop
    return Sampler(
        args.model,
        tokenizer,
        Sampling(args.temperature, max_tokens, stop=stop),
        use_vllm,
        max_length,
        args.vllm_memory,
        in_process=True,
        sleeps=sleeps,
        dtype=args.dtype,
    )


# --- 3. completions of a saved model: evaluations, local judges, DPO


def generate(
    model: str,
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    sampling: Sampling,
    use_vllm: bool = False,
    seed: int = 0,
    batch_size: int = 64,
    vllm_memory: float = 0.85,
    gpus: list[list[str]] | None = None,
    done: Set[int] = frozenset(),
    dtype: str = "auto",
) -> Iterator[tuple[int, Sample]]:
    """Loads a model, yields (place, sample) as completions of `prompts` (token ids) end, and frees the model.

    Each place has its seed: neither leaving out the places in `done` nor another number of engines changes a
    completion. See Sampler for the other arguments.
    """
    longest = max(map(len, prompts)) + sampling.max_tokens
    if gpus:
        gpus = gpus[: len(prompts) - len(done)]  # every engine has a prompt
    sampler = Sampler(
        model,
        tokenizer,
        sampling,
        use_vllm,
        max_length=longest,
        vllm_memory=vllm_memory,
        gpus=gpus,
        batch_size=batch_size,
        dtype=dtype,
    )
    # of 64 bits, as torch and vLLM take no more; DPO makes longer ones of a date as --seed
    first_seed = seed % 2**32 * 1_000_003
    seeds = [first_seed + place for place in range(len(prompts))]
    try:
        with tqdm(total=len(prompts) - len(done), desc="generate", unit="completion") as bar:
            for place, sample in sampler.sample(prompts, seeds, done):
                bar.update()
                yield place, sample
    finally:
        sampler.close()


# --- 4. the completions of a step and their metrics


def share_of(rows: list, accelerator: Accelerator) -> list:
    """Returns this process's share of rows: one block, as long as every other process's."""
    size = len(rows) // accelerator.num_processes
    first = accelerator.process_index * size
    return rows[first : first + size]


def sample_completions(
    prompts: list[dict],
    sampler: Sampler,
    think_format: str,
    when_ended: Callable[[Completion], None] | None = None,
) -> list[Completion]:
    """Samples a completion of each prompt, a row of data.load_prompts; calls `when_ended` with each as it ends."""
    completions = [None] * len(prompts)
    for place, sample in sampler.sample([prompt["prompt_ids"] for prompt in prompts]):
        completions[place] = read_completion(sampler.tokenizer, think_format, prompts[place], sample)
        if when_ended:
            when_ended(completions[place])
    return completions


def gather_rewards(completions: list[Completion], accelerator: Accelerator) -> torch.Tensor:
    """Returns the rewards of all processes' completions (P*G,), in the order of their prompts."""
    own_rewards = torch.tensor([completion.reward for completion in completions], device=accelerator.device)
    return accelerator.gather(own_rewards)


def mini_batches(
    completions: list[Completion], n_parts: int, seed: tuple[int, ...]
) -> list[list[Completion]]:
    """Splits this process's completions into the optimizer steps of one pass; at random if there are several."""
    if n_parts == 1:
        return [completions]
    order = np.random.default_rng(seed).permutation(len(completions))
    parts = np.array_split(order, n_parts)
    return [[completions[place] for place in part] for part in parts]


def completion_metrics(completions: list[Completion]) -> dict[str, float]:
    """Returns metrics of a step's completions, gathered from all processes: lengths, format, rewards.

    Lengths count the policy's tokens.
    """
    lengths = [c.n_trained_tokens for c in completions]
    ended = [c.n_trained_tokens for c in completions if not c.cut_off] or [0]
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
        "think/response_tokens": fmean(c.n_trained_tokens - c.n_thinking_tokens for c in completions),
        "reward/missing": fmean(math.isnan(c.reward) for c in completions),
    }
    well_formed = [c for c in completions if c.status == "ok"]
    for name in completions[0].rewards:
        # the proxy is of well-formed text alone; --on-bad-format says what a malformed completion is scored as
        counted = well_formed if name == "preference" else completions
        metrics |= _mean_of_known(f"reward/{name}", [c.rewards[name] for c in counted])
    for name in completions[0].contributions:
        metrics |= _mean_of_known(f"contribution/{name}", [c.contributions[name] for c in completions])
    return metrics


def _mean_of_known(name: str, values: list[float | None]) -> dict[str, float]:
    """Returns {name: mean of the values that are not None}; {} if all are."""
    known = [value for value in values if value is not None]
    return {name: fmean(known)} if known else {}


def check_any_reward(rewards_P_G: torch.Tensor) -> None:
    """Ends a run if no completion of a step has a reward."""
    if rewards_P_G.isnan().all():
        raise RuntimeError(
            "no completion got a reward, so nothing can be learned: the judge or the user simulator failed every "
            "time, or the prompts lack the fields that the rewards read"
        )


def reward_metrics(rewards_P_G: torch.Tensor, name: str) -> dict[str, float]:
    """Returns mean and standard deviation of a step's rewards, without NaN (no reward).

    Both are there a second time under TRL's keys, which have `name`: "preference" if that is the only reward,
    "total" if several are combined.
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


class FormatGuard:
    """Ends a run if most completions of its first three steps are cut off, or if none has the format."""

    def __init__(self, args, limit: str = "max_completion_tokens"):
        """Takes a training script's `args`, and the name of the one that limits a completion."""
        self.args = args
        self.max_tokens = getattr(args, limit)
        self.flag = "--" + limit.replace("_", "-")
        self.steps_cut_off = 0
        self.steps_malformed = 0

    def check(self, step: int, metrics: dict[str, float], completions: list[Completion]) -> None:
        """Looks at all completions of a step (from 1)."""
        if step > 3 or self.args.allow_truncation:
            return
        self.steps_cut_off += fmean(c.cut_off for c in completions) > 0.5
        self.steps_malformed += all(c.status != "ok" for c in completions)
        if self.steps_cut_off == 3:
            raise RuntimeError(
                "more than half of the completions of the first three steps were cut off at "
                f"{self.max_tokens} tokens; raise {self.flag}, or pass --allow-truncation if that is meant"
            )
        if self.steps_malformed == 3:
            statuses = dict(Counter(c.status for c in completions))
            layout = THINK_FORMATS[self.args.think_format].layout
            raise RuntimeError(
                f"no completion of the first three steps had the format {layout!r} (status in the last: {statuses}): "
                "is --model warm-started, and in this format? --allow-truncation goes on"
            )
