"""Samples completions by vLLM or transformers from the trainer's weights, and reads what was written.

    sampler = Sampler(args.model, tokenizer, Sampling(temperature=0.7, max_tokens=4096), use_vllm=True)
    sampler.sync(policy)                                  # the sampler has the policy's weights now
    for place, sample in sampler.sample(prompts):         # as they end, in any order
        ...
    sampler.sleep()                                       # GPU memory for the update
    sampler.close()                                       # GPU memory for another model

Training loops have an engine in this process, which takes over the policy's weights, or a server
(vllm_server.py). DPO rounds, evaluations and local judges have an engine in a process of its own, and a seed
for each request.
"""

import contextlib
import gc
import importlib.util
import itertools
import logging
import math
import multiprocessing.connection
import os
import threading
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

# nats a token by which sampler and trainer may differ; rounding makes about 0.01 in bfloat16, 1e-6 in float32
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
            counted = itertools.compress(self.advantages, self.loss_mask)
        return sum(counted) / max(1, self.n_trained_tokens)

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


def text_of(tokenizer: Tokenizer, sample: Sample) -> str:
    """Decodes a sample without its end of turn."""
    ids = sample.ids
    if ids and ids[-1] in ends_of(tokenizer):
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def read_completion(tokenizer: Tokenizer, think_format: str, prompt: dict, sample: Sample) -> Completion:
    """Decodes a sample and splits it into thinking and response.

    `prompt`: {id, prompt: messages, prompt_ids}.
    """
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


# --- 2. where completions end


@dataclass
class Sampling:
    """How completions are sampled. Nothing is taken from the model's own generation config."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    top_p: float = 1.0
    stop: str = ""
    """A string that ends a completion, which keeps it; the tokenizer's ends of turn always do."""


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that end a turn; an unprepared tokenizer, as a judge's, has its EOS token."""
    return getattr(tokenizer, "stop_ids", [tokenizer.eos_token_id])


def has_ended(ids: list[int], tokenizer: Tokenizer, ends: list[int], stop: str) -> bool:
    """Tells whether the last token ends the turn, or the last tokens hold `stop`, if it is not empty."""
    if ids[-1] in ends:
        return True
    if not stop:
        return False
    return stop in tokenizer.decode(ids[-most_tokens(stop) :])


def most_tokens(stop: str) -> int:
    """Returns how many tokens a stop string can take: each has at least one byte."""
    return len(stop.encode())


def until_end(ids: list[int], tokenizer: Tokenizer, ends: list[int], stop: str) -> tuple[list[int], bool]:
    """Returns ids up to and with their first end, and whether there is one; the rest is padding."""
    for n in range(1, len(ids) + 1):
        if has_ended(ids[:n], tokenizer, ends, stop):
            return ids[:n], True
    return ids, False


# --- 3. sampling by vLLM, by a vLLM server, by transformers


def use_vllm(rollout: str) -> bool:
    """Tells whether `--rollout` means vLLM, as "auto" does on a GPU if vLLM is installed.

    Exits with 2 for "vllm" if it is not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if rollout == "vllm" and not installed:
        runs.fail("--rollout vllm: vLLM is not installed; `make` installs it, or use --rollout hf")
    return rollout == "vllm" or (rollout == "auto" and installed and torch.cuda.is_available())


def start_vllm(model: str, max_length: int | None, memory: float, in_process: bool, sleeps: bool):
    """Starts an engine of vLLM, a `vllm.LLM`; see Sampler for the arguments."""
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
        "enable_sleep_mode": sleeps,
    }
    if not on_gpu:
        # a seeded request whose prompt is split among batches fails on a CPU
        options["enable_chunked_prefill"] = False
        # vLLM warns of the tied LM head at every sync; _pack_tied_head takes care of it
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    if not in_process:
        with _process_of_its_own():
            llm = LLM(**options)
        threading.Thread(target=_wake_when_dead, args=(llm.llm_engine.engine_core,), daemon=True).start()
        return llm
    if PartialState().num_processes > 1:
        options["distributed_executor_backend"] = "external_launcher"
        options["seed"] = PartialState().process_index
    return LLM(**options)


@contextlib.contextmanager
def _process_of_its_own():
    """Makes vLLM start its engine in another process, on this process's GPU, outside the launched group."""
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


def _wake_when_dead(engine_core) -> None:
    """Waits until vLLM's process ends, then lets `step` raise; vLLM 0.31 would wait for output for ever."""
    from vllm.v1.engine.exceptions import EngineDeadError

    multiprocessing.connection.wait(engine_core.resources.engine_manager.sentinels())
    engine_core.outputs_queue.put(EngineDeadError())


def load_into_vllm(llm, trained: torch.nn.Module) -> None:
    """Copies the policy's weights into an engine in this process; all processes must call it."""
    weights = ((name, weight.clone()) for name, weight in policy.whole_weights(trained))
    if utils.DEVICE == "cuda":
        llm.apply_model(lambda model: model.load_weights(weights))  # untested: needs a GPU
    else:  # linear layers pack their weights after loading, which load_weights alone does not do
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        llm.apply_model(_pack_tied_head)


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Renews the packed copy of a tied LM head, which vLLM's reload leaves stale on a CPU."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


def vllm_parameters(sampling: Sampling, ends: list[int]) -> dict:
    """Returns the parameters of a request, both for vLLM's SamplingParams and for /v1/completions."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": ends,
        "ignore_eos": True,  # only `ends` count
        "stop": [sampling.stop] if sampling.stop else [],
        "include_stop_str_in_output": True,
        "logprobs": 0,  # of the sampled token alone
    }


def sample_by_vllm(llm, requests: dict[int, dict]) -> Iterator[tuple[int, list[int], list[float], bool]]:
    """Yields (place, token ids, log-probabilities, finished) as completions end.

    `requests`: place -> prompt (token ids) and parameters. RuntimeError if vLLM's process has died.
    """
    from vllm import SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    engine = llm.llm_engine
    try:
        for place, request in requests.items():
            parameters = dict(request)
            prompt = {"prompt_token_ids": parameters.pop("prompt")}
            detokenize = bool(parameters["stop"])
            engine.add_request(str(place), prompt, SamplingParams(**parameters, detokenize=detokenize))
        while engine.has_unfinished_requests():
            watchdog.beat()
            for request in engine.step():
                if not request.finished:
                    continue
                output = request.outputs[0]
                ids = list(output.token_ids)
                logprobs = []
                for token, likeliest in zip(ids, output.logprobs, strict=True):
                    logprobs.append(likeliest[token].logprob)
                yield int(request.request_id), ids, logprobs, output.finish_reason == "stop"
    except EngineDeadError as error:
        raise RuntimeError(
            "vLLM's engine process died; if it printed no error, it was killed, most likely as memory ran out"
        ) from error


def sample_by_transformers(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    sampling: Sampling,
    ends: list[int],
    batch_size: int,
    prompts: list[list[int]],
    seeds: list[int] | None,
    done: Set[int],
) -> Iterator[tuple[int, Sample]]:
    """Samples by generate of a transformers model or Policy, in batches of about equally long prompts.

    See Sampler.sample. A batch is sampled as a whole if one of its prompts is not done, so its samples stay
    the same.
    """
    was_training = model.training
    model.eval()  # else gradient checkpointing turns the KV cache off
    longest_first = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    for start in range(0, len(prompts), batch_size):
        places = longest_first[start : start + batch_size]
        if done.issuperset(places):
            continue
        if seeds:
            torch.manual_seed(seeds[places[0]])
        rows = {"input_ids": [prompts[place] for place in places]}
        batch = tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(model.device)
        sequences = generate_batch(model, batch, tokenizer, sampling, ends)
        for place, sequence in zip(places, sequences, strict=True):
            if place not in done:
                ids, finished = until_end(sequence, tokenizer, ends, sampling.stop)
                yield place, Sample(ids, None, finished)
    model.train(was_training)


@torch.no_grad()
def generate_batch(
    model: torch.nn.Module, batch: dict, tokenizer: Tokenizer, sampling: Sampling, ends: list[int]
) -> list[list[int]]:
    """Returns the token ids that generate appends to a batch of prompts, padded behind their ends."""
    width = batch["input_ids"].size(1)

    def after_each_token(ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        """Reports progress, and says which rows end by the stop string."""
        watchdog.beat()
        if not sampling.stop:  # generate itself knows the ends of turn
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        last = ids[:, width:][:, -most_tokens(sampling.stop) :].tolist()
        ended = [has_ended(row, tokenizer, ends, sampling.stop) for row in last]
        return torch.tensor(ended, device=ids.device)

    config = GenerationConfig(
        max_new_tokens=sampling.max_tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
    )
    if sampling.temperature:
        config.update(do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=0)
    options = {**batch, "generation_config": config, "stopping_criteria": [after_each_token]}
    if isinstance(model, policy.Policy):
        # sharded, no process may stop before all have ended, as each forward gathers weights from all of them
        options["synced_gpus"] = policy.is_sharded_launch()
        sequences = model(generate=options)
    else:
        sequences = model.generate(**options)
    return sequences[:, width:].tolist()


# --- 4. the sampler


class Sampler:
    """Samples completions of a model by vLLM, by a vLLM server, or by transformers' generate.

    Args:
        model: folder or hub name; None: weights come by `sync`.
        max_length: tokens of the longest prompt and completion together, for vLLM's KV cache.
        vllm_memory: share of the GPU that vLLM reserves.
        in_process: vLLM runs in this process, or transformers samples from the policy itself; weights come by
            `sync`. False: vLLM runs in a process of its own, and `close` gives its memory back.
        sleeps: whether `sleep` frees vLLM's memory.
        batch_size: completions that transformers' generate samples at once.
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
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.ends = ends_of(tokenizer)
        self.batch_size = batch_size
        self.in_process = in_process
        self.sleeps = sleeps and use_vllm and utils.DEVICE == "cuda"  # only there vLLM can sleep
        self.asleep = False
        self.breaches = 0
        self.server = server
        self.llm = None
        self.policy = None
        if use_vllm:
            self.llm = start_vllm(model, max_length, vllm_memory, in_process, self.sleeps)
            self.sleep()
        elif model and not in_process:
            self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=utils.DTYPE, **utils.SAFE)
            self.policy.to(utils.DEVICE).eval()

    def sample(
        self, prompts: list[list[int]], seeds: list[int] | None = None, done: Set[int] = frozenset()
    ) -> Iterator[tuple[int, Sample]]:
        """Yields (place in `prompts`, sample) as completions end; prompts are token ids.

        `seeds`: one for each prompt, so that leaving out the places in `done` changes no other sample. None:
        samples follow from torch's generator, by a server from NumPy's.
        """
        if self.llm is None and self.server is None:
            how = (self.policy, self.tokenizer, self.sampling, self.ends, self.batch_size)
            yield from sample_by_transformers(*how, prompts, seeds, done)
            return

        if self.server and not seeds:
            seeds = np.random.randint(2**31, size=len(prompts)).tolist()
        parameters = vllm_parameters(self.sampling, self.ends)
        requests = {}
        for place, prompt in enumerate(prompts):
            if place not in done:
                requests[place] = {"prompt": prompt, **parameters}
                if seeds:
                    requests[place]["seed"] = seeds[place]

        if self.server:
            samples = self.server.complete(requests)
        else:
            samples = sample_by_vllm(self.llm, requests)
        for place, ids, logprobs, finished in samples:
            yield place, Sample(ids, logprobs, finished)

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
        load_into_vllm(self.llm, trained)
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
            engine_core = self.llm.llm_engine.engine_core
            engine_core.shutdown()
            if not self.in_process:  # vLLM may kill its process, and does not wait for the end
                for process in engine_core.resources.engine_manager.processes:
                    process.join(timeout=60)
        self.llm = None
        self.policy = None
        gc.collect()
        torch.cuda.empty_cache()


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


# --- 5. prompts of a step, and what is logged of its completions


def prompts_of_step(prompts: list[dict], step: int, per_step: int, seed: int) -> list[dict]:
    """Returns the prompts of a step.

    They follow from (seed, step) alone, so a resumed run sees what an unbroken one sees. An epoch goes
    through the prompts once, in its own order; a remainder smaller than a step is left out.
    """
    steps_per_epoch = len(prompts) // per_step
    epoch, position = divmod(step, steps_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(prompts))
    chosen = order[position * per_step : (position + 1) * per_step]
    return [prompts[place] for place in chosen]


def share_of(rows: list, accelerator: Accelerator) -> list:
    """Returns this process's share of rows: one block, as long as every other process's."""
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
    """Returns metrics of a step's completions, those of all processes: lengths, format, rewards.

    Lengths count what the policy wrote.
    """
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
        "reward/missing": fmean(math.isnan(completion.reward) for completion in completions),
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
        contributions = [completion.contributions[name] or 0.0 for completion in completions]
        metrics[f"contribution/{name}"] = fmean(contributions)
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
    """Ends a run whose first three steps teach nothing: completions are cut off, or none has the format."""

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


# --- 6. completions of a saved model: evaluations, local judges, DPO


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
