"""Completions: sampling them by vLLM or transformers, from the trainer's weights, and reading what was written.

    sampler = Sampler(args.model, tokenizer, Sampling(temperature=0.7, max_tokens=4096), use_vllm=True)
    sampler.sync(policy)                                  # the sampler has the policy's weights now
    for place, sample in sampler.sample(prompts):         # as they end, in any order
        ...
    sampler.sleep()                                       # GPU memory for the update
    sampler.close()                                       # GPU memory for another model

It serves the training loops (an engine in this process, weights synced in place, or a server, see vllm_server.py),
the rounds of DPO and the evaluations (an engine in a process of its own, a seed for each request).
"""

import contextlib
import gc
import logging
import math
import multiprocessing
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from statistics import fmean

import runs  # first: it sets environment variables that the libraries below read  # isort: skip
import numpy as np
import torch
from accelerate import Accelerator, PartialState
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

import policy
import utils
import vllm_server
import watchdog

# nats a token that sampler and trainer may differ by: rounding of bfloat16 is about 0.01, of float32 about 1e-6
MAX_LOGPROB_GAP = {"bfloat16": 0.05, "float32": 1e-3}


# --- 1. one completion


@dataclass
class Sample:
    """What a sampler returns for one prompt."""

    ids: list[int]
    """Token ids, with the end of turn if there is one."""
    logprobs: list[float] | None
    """The sampler's log-probability of each token, nats; None from transformers."""
    finished: bool
    """False if the token limit cut the completion off."""


@dataclass
class Completion:
    """One completion, from the rollout to the log."""

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
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Each part's value, None where there is none."""
    contributions: dict[str, float | None] = field(default_factory=dict)
    """What each part adds to the reward, where several are combined."""
    reward: float = math.nan
    """NaN: there is none, and nothing is learned from this completion."""
    correct: float | None = None
    """The verdict of a verifier: 1 right, 0 wrong, None unknown."""
    advantages: list[float] = field(default_factory=list)
    """One for each token."""
    loss_mask: list[int] | None = None
    """1 on the policy's tokens, 0 on a user's turns; None: all are the policy's."""
    sampler_logprobs: list[float] | None = None
    old_logprobs: list[float] | None = None
    reference_logprobs: list[float] | None = None
    values: list[float] | None = None
    """PPO: the critic's value of the text before each token, as it is at the rollout."""
    returns: list[float] | None = None
    """PPO: what those values should have been."""
    statistics: dict[str, float] = field(default_factory=dict)
    """mean_entropy and mean_kl_uniform, for rewards that read them."""

    @property
    def n_trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        if self.loss_mask is None:
            return len(self.ids)
        return sum(self.loss_mask)

    @property
    def mean_advantage(self) -> float:
        """Mean over the tokens that the loss counts; 0 before there are advantages."""
        counted = self.advantages
        if self.loss_mask is not None:
            counted = [a for a, is_policy in zip(self.advantages, self.loss_mask) if is_policy]
        return sum(counted) / max(1, len(counted))

    def row(self) -> dict:
        """Returns the completion as rewards read it and logs keep it."""
        return {
            "id": self.id,
            "messages": self.messages,
            "text": self.text,
            "thinking": self.thinking,
            "response": self.response,
            "status": self.status,
            "cut_off": self.cut_off,
            "rewards": self.rewards,
            **({"contributions": self.contributions} if self.contributions else {}),
            "reward": None if math.isnan(self.reward) else self.reward,
            "missing": math.isnan(self.reward),
            "advantage": self.mean_advantage,
            "n_tokens": self.n_trained_tokens,
            "n_thinking_tokens": self.n_thinking_tokens,
            **self.statistics,
        }


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that end a turn; a judge's tokenizer is as its folder has it."""
    return getattr(tokenizer, "stop_ids", [tokenizer.eos_token_id])


def text_of(tokenizer: Tokenizer, sample: Sample) -> str:
    """Decodes a sample without its end of turn."""
    ids = sample.ids
    if ids and ids[-1] in ends_of(tokenizer):
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def read_completion(tokenizer: Tokenizer, think_format: str, prompt: dict, sample: Sample) -> Completion:
    """Decodes a sample and splits it into thinking and response. `prompt`: {id, prompt: messages, prompt_ids}."""
    text = text_of(tokenizer, sample)
    parts = utils.split_thinking(text, think_format, sample.finished)
    return Completion(
        id=prompt["id"],
        messages=prompt["prompt"],
        prompt_ids=prompt["prompt_ids"],
        ids=sample.ids,
        text=text,
        thinking=parts.thinking,
        response=parts.response,
        status=parts.status,
        cut_off=not sample.finished,
        n_thinking_tokens=len(tokenizer(parts.thinking, add_special_tokens=False)["input_ids"]),
        sampler_logprobs=sample.logprobs,
    )


# --- 2. the sampler


@dataclass
class Sampling:
    """How completions are sampled. Nothing is taken from the model's own generation config."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    top_p: float = 1.0
    stop: str = ""
    """A string that ends a completion, which keeps it; the tokenizer's ends of turn always do."""


def use_vllm(rollout: str) -> bool:
    """Says what `--rollout auto` means here: vLLM where a GPU and vLLM are there. Exits with 2 for what cannot be."""
    import importlib.util

    installed = importlib.util.find_spec("vllm") is not None
    if rollout == "vllm" and not installed:
        runs.fail("--rollout vllm: vLLM is not installed; `make` installs it, or use --rollout hf")
    return rollout == "vllm" or (rollout == "auto" and installed and torch.cuda.is_available())


class Sampler:
    """Samples completions of a model by vLLM, or by transformers' generate.

    Args:
        model: folder or hub name; None: weights come by `sync`.
        max_length: tokens of the longest prompt and completion together, for vLLM's KV cache.
        vllm_memory: share of the GPU that vLLM reserves.
        batch_size: completions that transformers' generate samples at once.
        in_process: weights come by `sync`: vLLM runs in this process, or transformers samples from the policy itself.
            False: vLLM runs in a process of its own, whose memory `close` gives back.
        server: samples, if there is one; with use_vllm False and in_process True.
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
        sleeps: bool = False,
        batch_size: int = 128,
        server: vllm_server.Server | None = None,
    ):
        self.server = server
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.ends = ends_of(tokenizer)
        self.llm = None
        self.policy = None
        self.batch_size = batch_size
        self.sleeps = sleeps and use_vllm and utils.DEVICE == "cuda"  # only there vLLM can sleep
        self.asleep = False
        self.breaches = 0
        self.n_asked = 0
        if use_vllm:
            self.llm = self._start_vllm(model, max_length, vllm_memory, in_process)
            self.sleep()
        elif model and not in_process:
            self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=utils.DTYPE, **utils.SAFE)
            self.policy.to(utils.DEVICE).eval()

    def _start_vllm(self, model: str, max_length: int | None, memory: float, in_process: bool):
        from vllm import LLM  # seconds to import

        gc.collect()
        torch.cuda.empty_cache()  # what torch holds on to is missing in vLLM's pool
        on_gpu = utils.DEVICE == "cuda"
        options = {
            "model": model,
            "dtype": utils.DTYPE,
            "load_format": "safetensors",
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
            "enforce_eager": not on_gpu,
            "max_model_len": max_length,
            "gpu_memory_utilization": memory,
            "enable_sleep_mode": self.sleeps,
        }
        if not on_gpu:
            # a seeded request whose prompt is split among batches fails on a CPU
            options["enable_chunked_prefill"] = False
            # vLLM warns of the tied LM head at every sync; _pack_tied_head takes care of it
            logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        if not in_process:
            with _process_of_its_own():
                return LLM(**options)
        if PartialState().num_processes > 1:
            options["distributed_executor_backend"] = "external_launcher"
            options["seed"] = PartialState().process_index
        return LLM(**options)

    # --- weights

    def sync(self, trained: torch.nn.Module) -> None:
        """Gives the sampler the weights of the policy being trained; all processes must call it."""
        if self.server:
            self.server.update(trained)
            return
        if self.llm is None:
            self.policy = getattr(trained, "module", trained)  # without DDP
            return
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        weights = ((name, weight.clone()) for name, weight in policy.whole_weights(trained))
        if utils.DEVICE == "cuda":
            self.llm.apply_model(lambda model: model.load_weights(weights))  # untested: needs a GPU
        else:  # linear layers pack their weights after loading, which load_weights alone does not do
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.llm.apply_model(_pack_tied_head)
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()

    def check(self, gap: float, step: int) -> None:
        """Stops the run when sampler and trainer disagree twice in a row: vLLM samples from other weights.

        `gap`: mean difference of their log-probabilities, nats a token, over the tokens of a step.
        """
        # top-p sampling raises every sampled token's log-probability by up to -log(p)
        limit = MAX_LOGPROB_GAP[utils.DTYPE] - math.log(self.sampling.top_p)
        if gap <= limit:
            self.breaches = 0
            return
        self.breaches += 1
        message = f"step {step}: sampler and trainer disagree by {gap:.4f} nat a token (limit {limit:.4f})"
        if self.breaches == 2:
            raise RuntimeError(
                f"{message}, twice in a row: vLLM samples from other weights than those being trained"
            )
        PartialState().print(f"WARNING: {message}; a second time in a row ends the run")

    def sleep(self) -> None:
        """Gives vLLM's memory back until the next `sync`; untested, as it needs a GPU."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)  # weights are dropped: the next ones come by sync
            self.asleep = True

    def close(self) -> None:
        """Frees the model. vLLM's process ends, and with it its GPU memory."""
        if self.server:
            self.server.close()
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            for child in multiprocessing.active_children():
                child.join(timeout=60)
        self.llm = None
        self.policy = None
        gc.collect()
        torch.cuda.empty_cache()

    # --- samples

    def sample(
        self, prompts: list[list[int]], seeds: list[int] | None = None, done: Set[int] = frozenset()
    ) -> Iterator[tuple[int, Sample]]:
        """Yields (place in `prompts`, sample) as completions end; prompts are token ids.

        `seeds`: one for each prompt, so that leaving out those in `done` changes no other; None: torch's generator.
        """
        if self.server:
            yield from self._sample_server(prompts, seeds, done)
        elif self.llm:
            yield from self._sample_vllm(prompts, seeds, done)
        else:
            yield from self._sample_transformers(prompts, seeds, done)

    def _vllm_parameters(self) -> dict:
        return {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_tokens,
            "stop_token_ids": self.ends,
            "ignore_eos": True,  # only the ends above count
            "stop": [self.sampling.stop] if self.sampling.stop else [],
            "include_stop_str_in_output": True,
            "logprobs": 0,  # of the sampled token alone
        }

    def _sample_server(self, prompts, seeds, done) -> Iterator[tuple[int, Sample]]:
        if not seeds:  # from NumPy's generator, which is seeded at every step
            seeds = np.random.randint(2**31, size=len(prompts)).tolist()
        places = [place for place in range(len(prompts)) if place not in done]
        requests = []
        for place in places:
            requests.append({"prompt": prompts[place], "seed": seeds[place], **self._vllm_parameters()})
        for number, ids, logprobs, finished in self.server.complete(requests):
            yield places[number], Sample(ids, logprobs, finished)

    def _sample_vllm(self, prompts, seeds, done) -> Iterator[tuple[int, Sample]]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        first = self.n_asked
        self.n_asked += len(prompts)
        for place, prompt in enumerate(prompts):
            if place in done:
                continue
            parameters = SamplingParams(
                **self._vllm_parameters(),
                detokenize=bool(self.sampling.stop),
                seed=seeds[place] if seeds else None,
            )
            engine.add_request(str(first + place), {"prompt_token_ids": prompt}, parameters)
        while engine.has_unfinished_requests():
            watchdog.beat()
            for request in engine.step():
                if not request.finished:
                    continue
                output = request.outputs[0]
                ids = list(output.token_ids)
                logprobs = [
                    position[token].logprob for token, position in zip(ids, output.logprobs, strict=True)
                ]
                yield int(request.request_id) - first, Sample(ids, logprobs, output.finish_reason == "stop")

    def _sample_transformers(self, prompts, seeds, done) -> Iterator[tuple[int, Sample]]:
        """Samples batches of prompts of about equal length."""
        options = {"max_new_tokens": self.sampling.max_tokens, "do_sample": False}
        if self.sampling.temperature:
            options |= {
                "do_sample": True,
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "top_k": 0,
            }
        options |= {"eos_token_id": self.ends, "pad_token_id": self.ends[0]}
        config = GenerationConfig(**options)

        was_training = self.policy.training
        self.policy.eval()  # else gradient checkpointing turns the KV cache off
        longest_first = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
        for start in range(0, len(prompts), self.batch_size):
            places = longest_first[start : start + self.batch_size]
            if done.issuperset(places):
                continue
            if seeds:
                torch.manual_seed(seeds[places[0]])
            rows = {"input_ids": [prompts[place] for place in places]}
            batch = self.tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(self.policy.device)
            width = batch["input_ids"].size(1)
            with torch.no_grad():
                sequences = self._generate(
                    **batch,
                    generation_config=config,
                    stopping_criteria=[self._after_each_token(width)],
                )
            for place, sequence in zip(places, sequences[:, width:].tolist(), strict=True):
                if place in done:  # sampled again, so that the others of its batch are as they were
                    continue
                ids = self._until_end(sequence)
                yield place, Sample(ids, None, self._has_ended(ids))
        self.policy.train(was_training)

    def _generate(self, **options) -> torch.Tensor:
        if isinstance(self.policy, policy.Policy):
            # sharded, no process may stop before all have ended, as each forward gathers weights from all of them
            return self.policy(generate=options | {"synced_gpus": policy.is_sharded_launch()})
        return self.policy.generate(**options)

    def _has_ended(self, ids: list[int]) -> bool:
        if not ids:
            return False
        if ids[-1] in self.ends:
            return True
        return bool(self.sampling.stop) and self.sampling.stop in self.tokenizer.decode(ids)

    def _until_end(self, ids: list[int]) -> list[int]:
        """Cuts a sequence behind its end of turn or stop string; what follows is padding."""
        return ids[: bisect_left(range(len(ids)), True, key=lambda n: self._has_ended_within(ids[:n]))]

    def _has_ended_within(self, ids: list[int]) -> bool:
        if any(token in self.ends for token in ids):
            return True
        return bool(self.sampling.stop) and self.sampling.stop in self.tokenizer.decode(ids)

    def _after_each_token(self, width: int):
        """Returns what generate calls after each token: it reports progress, and ends rows at the stop string."""

        def criterion(ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
            watchdog.beat()
            if not self.sampling.stop:
                return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
            ended = [self._has_ended(row) for row in ids[:, width:][:, -16:].tolist()]
            return ids.new_tensor(ended).bool()

        return criterion


def policy_sampler(
    args, tokenizer: Tokenizer, use_vllm: bool, top_p: float = 1.0, server: vllm_server.Server | None = None
) -> Sampler:
    """Loads what samples for train_grpo.py or train_ppo.py; the policy's weights come to it by `sync`."""
    stop = utils.THINK_FORMATS[args.think_format].stop
    return Sampler(
        args.model,
        tokenizer,
        Sampling(args.temperature, args.max_completion_tokens, top_p, stop),
        use_vllm,
        max_length=args.max_prompt_tokens + args.max_completion_tokens,
        vllm_memory=args.vllm_memory,
        in_process=True,
        sleeps=args.vllm_sleep,
        server=server,
    )


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Renews the packed copy of a tied LM head, which vLLM's reload leaves stale on a CPU."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


@contextlib.contextmanager
def _process_of_its_own():
    """Within it vLLM starts its engine in another process, on this process's GPU, outside of the launched group."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("TORCHELASTIC", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if torch.cuda.is_available():
        all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
        visible = before.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[PartialState().local_process_index]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- 3. prompts of a step, and what is logged of its completions


def prompts_of_step(prompts: list[dict], step: int, per_step: int, seed: int) -> list[dict]:
    """Returns the prompts of a step, a function of (seed, step) alone: a resumed run sees what an unbroken one sees.

    An epoch goes through the prompts once, in its own order; a remainder smaller than a step is left out.
    """
    steps_per_epoch = len(prompts) // per_step
    epoch, position = divmod(step, steps_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(prompts))
    chosen = order[position * per_step : (position + 1) * per_step]
    return [prompts[place] for place in chosen]


def share_of(rows: list, accelerator: Accelerator) -> list:
    """Returns this process's share of rows, which all processes have equally many of: one whole block."""
    size = len(rows) // accelerator.num_processes
    first = accelerator.process_index * size
    return rows[first : first + size]


def sample_completions(
    prompts: list[dict], sampler: Sampler, think_format: str, when_ended: Callable[[Completion], None]
) -> list[Completion]:
    """Samples a completion of each prompt {id, prompt, prompt_ids}; `when_ended` gets every one as it ends."""
    completions = [None] * len(prompts)
    for place, sample in sampler.sample([prompt["prompt_ids"] for prompt in prompts]):
        completions[place] = read_completion(sampler.tokenizer, think_format, prompts[place], sample)
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
    """Returns what metrics.jsonl says of the completions of a step, of all processes: lengths, format, rewards.

    Lengths are of what the policy wrote.
    """
    n = len(completions)
    lengths = [completion.n_trained_tokens for completion in completions]
    ended = [completion.n_trained_tokens for completion in completions if not completion.cut_off] or [0]
    metrics = {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(completion.cut_off for completion in completions),
        "completions/mean_terminated_length": fmean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
        "think/format_ok": fmean(completion.status == "ok" for completion in completions),
        "think/truncated": fmean(completion.cut_off for completion in completions),
        "think/mean_tokens": fmean(completion.n_thinking_tokens for completion in completions),
        "think/response_tokens": fmean(c.n_trained_tokens - c.n_thinking_tokens for c in completions),
        "reward/missing": sum(math.isnan(completion.reward) for completion in completions) / n,
    }
    for name in completions[0].rewards:
        values = []
        for completion in completions:
            value = completion.rewards[name]
            # a malformed completion has a floor instead of a preference
            counts = name != "preference" or completion.status == "ok"
            if value is not None and counts:
                values.append(value)
        if values:
            metrics[f"reward/{name}"] = fmean(values)
    for name in completions[0].contributions:
        metrics[f"contribution/{name}"] = fmean(
            completion.contributions[name] or 0.0 for completion in completions
        )
    return metrics


def reward_metrics(rewards_P_G: torch.Tensor, name: str) -> dict[str, float]:
    """Returns mean and spread of the rewards of a step; NaN (no reward) counts in neither.

    `name`: "preference" if that is the reward, "total" if several are combined; TRL logs them under it too.
    """
    known = rewards_P_G[~rewards_P_G.isnan()]
    if not len(known):
        raise RuntimeError(
            "no completion got a reward, so nothing can be learned: the judge or the user simulator failed every "
            "time, or the prompts lack the fields that the rewards read"
        )
    spread = rewards_P_G.nan_to_num(nan=-math.inf).amax(1) - rewards_P_G.nan_to_num(nan=math.inf).amin(1)
    mean = known.mean().item()
    std = known.std().item()
    return {
        "reward": mean,
        "reward_std": std,
        f"rewards/{name}/mean": mean,
        f"rewards/{name}/std": std,
        "frac_reward_zero_std": (spread <= 0).float().mean().item(),
    }


class FormatGuard:
    """Ends a run whose first three steps can teach nothing: completions are cut off, or none has the format."""

    def __init__(self, args, limit: str = "max_completion_tokens"):
        """`args`: think_format and allow_truncation of a training script, and its `limit` of tokens."""
        self.args = args
        self.limit = limit
        self.steps_cut_off = 0
        self.steps_malformed = 0

    def check(self, completions: list[Completion], step: int) -> None:
        """Looks at all completions of step number `step` (from 1)."""
        if step > 3 or self.args.allow_truncation:
            return
        self.steps_cut_off += fmean(completion.cut_off for completion in completions) > 0.5
        self.steps_malformed += all(completion.status != "ok" for completion in completions)
        if self.steps_cut_off == 3:
            raise RuntimeError(
                "more than half of the completions of the first three steps were cut off at "
                f"{getattr(self.args, self.limit)} tokens; raise --{self.limit.replace('_', '-')}, or pass "
                "--allow-truncation if that is meant"
            )
        if self.steps_malformed == 3:
            status, count = Counter(completion.status for completion in completions).most_common(1)[0]
            layout = utils.THINK_FORMATS[self.args.think_format].layout
            raise RuntimeError(
                f"no completion of the first three steps had the format {layout!r} ({count} of the last "
                f"{len(completions)}: {status}): is --model warm-started, and in this format? --allow-truncation goes on"
            )


# --- 4. completions of a saved model: evaluations, local judges, DPO


def generate(
    model: str,
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    sampling: Sampling,
    use_vllm: bool = False,
    seed: int = 0,
    batch_size: int = 64,
    vllm_memory: float = 0.85,
    done: Set[int] = frozenset(),
) -> Iterator[tuple[int, Sample]]:
    """Loads a model, yields (place, sample) for each prompt (token ids) as they end, and frees the model.

    Leaving out the prompts in `done` changes no other completion.
    """
    longest = max(map(len, prompts)) + sampling.max_tokens
    sampler = Sampler(
        model,
        tokenizer,
        sampling,
        use_vllm,
        max_length=longest,
        vllm_memory=vllm_memory,
        batch_size=batch_size,
    )
    seeds = [seed * 1_000_003 + place for place in range(len(prompts))]
    try:
        with tqdm(total=len(prompts), desc="generate", unit="completion") as bar:
            for place, sample in sampler.sample(prompts, seeds, done):
                bar.update()
                yield place, sample
    finally:
        sampler.close()
