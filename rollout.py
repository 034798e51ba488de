"""Completions: sampling them by vLLM or transformers, from the trainer's weights, and reading what was written.

    sampler = Sampler(args.model, tokenizer, Sampling(temperature=0.7, max_tokens=4096), use_vllm=True)
    sampler.sync(policy)                                  # the sampler has the policy's weights now
    for place, sample in sampler.sample(prompts):         # as they end, in any order
        ...
    sampler.sleep()                                       # GPU memory for the update
    sampler.close()                                       # GPU memory for another model

It serves the training loops (in this process, weights synced in place), the rounds of DPO and the evaluations (an
engine in a process of its own, seeds a request).
"""

import contextlib
import gc
import math
import multiprocessing
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Set
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
<<<<<<< HEAD
import watchdog
=======
from rewards import shaping
from rewards.gold import log_held_out
from rewards.unsupervised import collapsed
>>>>>>> wt-rewards

HF_BATCH = 128  # completions that transformers' generate samples at once
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
    statistics: dict[str, float] = field(default_factory=dict)
    """mean_entropy and mean_kl_uniform, for rewards that read them."""

    @property
    def n_trained_tokens(self) -> int:
        """Tokens that the loss counts."""
        if self.loss_mask is None:
            return len(self.ids)
        return sum(self.loss_mask)

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
            "advantage": sum(self.advantages) / max(1, len(self.advantages)),
            "n_tokens": len(self.ids),
            "n_thinking_tokens": self.n_thinking_tokens,
            **self.statistics,
        }


def read_completion(tokenizer: Tokenizer, think_format: str, prompt: dict, sample: Sample) -> Completion:
    """Decodes a sample and splits it into thinking and response. `prompt`: {id, prompt: messages, prompt_ids}."""
    body = sample.ids
    if body and body[-1] in tokenizer.stop_ids:
        body = body[:-1]
    text = tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
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

<<<<<<< HEAD
    installed = importlib.util.find_spec("vllm") is not None
    if rollout == "vllm" and not installed:
        runs.fail("--rollout vllm: vLLM is not installed; `make` installs it, or use --rollout hf")
    return rollout == "vllm" or (rollout == "auto" and installed and torch.cuda.is_available())


class Sampler:
    """Samples completions of a model by vLLM, or by transformers' generate.

    Args:
        model: folder or hub name; None: transformers samples from the policy that `sync` gives.
        max_length: tokens of the longest prompt and completion together, for vLLM's KV cache.
        vllm_memory: share of the GPU that vLLM reserves.
        in_process: vLLM runs in this process, so that `sync` can set its weights; `close` needs the other way.
=======
    `reward_model`: a RewardModel, or None where no preference is asked for. `compose`: from `rewards.load`; None: the
    preference alone. `dense_rewards`: from `dense.load`. `entropies`: rows get mean_entropy and mean_kl_uniform. `attempts`:
    how often a group whose rewards differ by no more than `zero_spread` is replaced by one of another prompt. `think_format`,
    `on_bad_format` and `format_margin`: see train_grpo.Args.
    `ahead`: vLLM samples a rollout while the one before it is trained on. `run`: the run folder. `gold`: from
    `rewards.gold.load_gold`; `held_out`: prompt rows {id, prompt} that it measures at every checkpoint. `max_logprob_gap`: nats;
    the mean difference between the logprobs of sampler and trainer on freshly sampled tokens that stops the run.
>>>>>>> wt-rewards
    """

    def __init__(
        self,
<<<<<<< HEAD
        model: str | None,
        tokenizer: Tokenizer,
        sampling: Sampling,
        use_vllm: bool,
        max_length: int | None = None,
        vllm_memory: float = 0.85,
        in_process: bool = False,
        sleeps: bool = False,
    ):
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.ends = getattr(
            tokenizer, "stop_ids", [tokenizer.eos_token_id]
        )  # a judge's tokenizer is as its folder has it
        self.llm = None
        self.policy = None
        self.sleeps = sleeps
        self.asleep = False
        self.breaches = 0
        self.n_asked = 0
        if use_vllm:
            self.llm = self._start_vllm(model, max_length, vllm_memory, in_process)
            self.sleep()
        elif model:
            self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=utils.DTYPE, **utils.SAFE)
            self.policy.to(utils.DEVICE).eval()
            self.policy.get_input_embeddings().register_forward_pre_hook(_beat)
=======
        *args,
        reward_model,
        think_format,
        on_bad_format,
        format_margin,
        run,
        gold=None,
        held_out=(),
        max_logprob_gap=0.05,
        allow_truncation=False,
        compose=None,
        pass_at_k=0,
        dense_rewards=(),
        entropies=False,
        attempts=0,
        zero_spread=0.05,
        ahead=False,
        **kwargs,
    ):
        self.reward_model, self.think_format, self.on_bad_format = reward_model, think_format, on_bad_format
        self.format_margin, self.run, self.gold, self.max_logprob_gap = (
            format_margin,
            run,
            gold,
            max_logprob_gap,
        )
        if kwargs["args"].use_vllm:
            patch_vllm()
        super().__init__(*args, reward_funcs=[total], **kwargs)
        on_gpu = torch.cuda.is_available()
        self._pool = ThreadPoolExecutor(
            1,
            initializer=torch.cuda.set_device if on_gpu else None,
            initargs=(self.accelerator.device,) if on_gpu else (),
        )
        self._stream = torch.cuda.Stream() if on_gpu else None
        # scoring beside vLLM: the prompts of this rollout ([]: not now), vLLM's number of the first request, what ended and
        # waits to be a batch, the batches that are being scored
        self._asked, self._first, self._waiting, self._early = [], 0, {}, []
        # asynchronous rollouts: micro-batches fetched but not trained on, the Future of the next rollout, that of this one
        self.ahead, self._coming, self._pending, self._ready = ahead, [], None, None
        self._colocated = self.use_vllm and self.vllm_mode == "colocate"
        if self._colocated:
            self._observe(self.vllm_generation.llm.llm_engine)
            self._seed(
                self.args.seed * 1_000_003 + self.accelerator.process_index
            )  # the engine has set its own
        updates, bnpo = (
            self.args.steps_per_generation // self.args.gradient_accumulation_steps,
            self.loss_type == "bnpo",
        )
        split = functools.partial(
            split_rollout,
            updates=updates,
            by_tokens=self.loss_type in ("dapo", "cispo"),
            gather=self.accelerator.gather,
        )
        grpo_trainer.split_tensor_dict = (
            _trl_split if bnpo else split
        )  # bnpo is a mean within each micro-batch
        grpo_trainer.shuffle_sequence_dict = self._shuffle if bnpo or updates > 1 else lambda batch: batch
        training.skip_prompt_logits()
        self._rows = []  # of this rollout
        self._steps_cut_off = self._steps_malformed = 0  # of the first steps, how many were (-1: over)
        self.allow_truncation, self.held_out = allow_truncation, held_out
        self.pass_at_k = pass_at_k
        self.compose, self.entropies, self.attempts, self.zero_spread = (
            compose,
            entropies,
            attempts,
            zero_spread,
        )
        self._sampled, self._indicators = (
            None,
            {},
        )  # _resample's rollout with its rewards; `collapse` of the last one
        self.dense_rewards, self._dense, self.stopped = (
            dense_rewards,
            [],
            "",
        )  # the second: their values in this rollout
        self._history = None  # `collapse` by step, from the log of the run
        self.beside = {}  # name: (model, optimizer) of what learns beside the policy, a part of every checkpoint
        for name, _, source in dense_rewards:
            if hasattr(source, "optimizer"):
                base = source.model.get_base_model() if is_peft_model(source.model) else source.model
                grpo_trainer.add_fused_lm_head(base, temperature=self.temperature)
                source.model, optimizer = self.accelerator.prepare(source.model, source.optimizer)
                source.optimizer = optimizer.optimizer  # accelerate's steps only where the policy's does
                self.beside[name] = (source.model, source.optimizer)
>>>>>>> wt-rewards

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
        if not on_gpu:  # a seeded request whose prompt is split among batches fails on a CPU
            options["enable_chunked_prefill"] = False
        if not in_process:
            with _process_of_its_own():
                return LLM(**options)
        if PartialState().num_processes > 1:
            options["distributed_executor_backend"] = "external_launcher"
            options["seed"] = PartialState().process_index
        return LLM(**options)

    # --- weights

<<<<<<< HEAD
    def sync(self, trained: torch.nn.Module) -> None:
        """Gives the sampler the weights of the policy being trained; all processes must call it."""
        if self.llm is None:
            self.policy = policy.unwrap(trained)
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
=======
    @torch.no_grad()
    def _entropies(self, messages: list[list[dict]], completion_ids: list[list[int]]) -> list[dict]:
        """For each completion the means over its tokens of the policy's entropy and of KL(uniform || policy), nats, at the
        temperature of the rollout."""
        out, device = [], self.accelerator.device
        for m, ids in zip(messages, completion_ids):
            whole, sums = (
                torch.tensor([utils.encode_prompt(self.processing_class, m) + ids], device=device),
                0.0,
            )
            logits = self.model(
                whole, attention_mask=torch.ones_like(whole), logits_to_keep=len(ids) + 1
            ).logits[0, :-1]
            for part in logits.split(512):  # 0.3 GB each in float32 for a vocabulary of 152,000
                logps = (part.float() / self.temperature).log_softmax(-1)
                sums += torch.stack([-(logps.exp() * logps).sum(), -logps.mean(-1).sum()])
            entropy, cross = (sums / len(ids)).tolist()
            out.append({"mean_entropy": entropy, "mean_kl_uniform": cross - math.log(logits.size(-1))})
        return out

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Rewards (P*G, 1) over all processes; keeps this process's rows for the log."""
        self._rows, rewards = (
            self._sampled[2:] if self._sampled else self._total(self._score(inputs, completion_ids_list))
        )
        if self.num_generations > 1:
            self._metrics["train"]["reward/flat_groups"].append(self._flat(rewards).float().mean().item())
        return rewards.unsqueeze(1)

    def _flat(self, rewards: torch.Tensor) -> torch.Tensor:
        """Of which groups (P,), bool, the rewards (P*G,) are about equal."""
        groups = rewards.view(-1, self.num_generations)
        return groups.amax(1) - groups.amin(1) <= self.zero_spread

    def _total(self, rows: list[dict]) -> tuple[list[dict], torch.Tensor]:
        """This process's rows with `reward`, and the rewards (P*G,) of all processes. A completion in bad format gets a floor;
        one without a reward (a judge failed) the mean of its group, so that nothing is learned from it."""
        first, world = self.accelerator.process_index * len(rows), self.accelerator.num_processes
        group_size = (
            self.num_generations if self.num_generations > 1 else len(rows) * world
        )  # one a prompt: the whole step
        local = [row["rewards"]["preference"] for row in rows]
        if self.compose:
            everyone = gather_object(rows)
            composed = [self.compose(everyone, group_size) if self.accelerator.is_main_process else None]
            scores = broadcast_object_list(composed)[0]
            totals, contributions, self._indicators = scores.totals, scores.contributions, scores.indicators
            if self.pass_at_k:
                advantages = shaping.pass_at_k(scores.correct, group_size, self.pass_at_k)
                pairs = zip(advantages, totals)
                contributions["pass_at_k"] = [None if None in pair else pair[0] - pair[1] for pair in pairs]
                totals = advantages
            local = totals[first : first + len(rows)]
            own = lambda columns, i: {name: values[first + i] for name, values in columns.items()}
            rows = [
                {**row, "rewards": row["rewards"] | own(scores.parts, i), "contributions": own(contributions, i)}
                for i, row in enumerate(rows)
            ]
        floored = [row["status"] != "ok" and self.on_bad_format == "floor" for row in rows]
        missing = [value is None and not floor for value, floor in zip(local, floored)]
        values = [
            math.nan if floor else math.inf if value is None else value
            for value, floor in zip(local, floored)
        ]
        gather = lambda items: self.accelerator.gather(torch.tensor(items, device=self.accelerator.device))
        rewards = fill_missing(
            floor_bad(gather(values), group_size, self.format_margin), gather(missing), group_size
        )
        own = rewards[first : first + len(rows)].tolist()
        return [
            {**row, "reward": reward, "missing": lacks} for row, reward, lacks in zip(rows, own, missing)
        ], rewards

    def _resample(self, inputs: list[dict]) -> list[dict]:
        """Samples and rewards `inputs`. Groups whose rewards are about equal are replaced by groups of other prompts,
        `attempts` times (DAPO's dynamic sampling, 2503.14476, section 3.2). Leaves all in `_sampled`; returns the inputs as
        they are."""
        group, first = self.num_generations, self.accelerator.process_index * len(inputs)
        inputs, logprobs = list(inputs), [None] * len(inputs)
        ids, rows, todo = list(logprobs), list(logprobs), list(range(len(inputs)))
        for attempt in range(self.attempts + 1):
            most = max(
                1, *gather_object([len(todo)])
            )  # every process samples and scores as many as the others
            asked = list(islice(cycle(todo or [0]), most))
            prompts = self._tokenize_prompts([inputs[i]["prompt"] for i in asked])[0]
            new_ids, new_logprobs = self._generate_single_turn(prompts, None, {}, 1)
            own = (
                asked if self.entropies else asked[: max(1, len(todo))]
            )  # the rest is thrown away; entropies are forwards
            new_rows = self._score([inputs[i] for i in own], new_ids[: len(own)])
            for n, i in enumerate(todo):
                ids[i], rows[i], logprobs[i] = new_ids[n], new_rows[n], new_logprobs and new_logprobs[n]
            totals, rewards = self._total(rows)
            flat = self._flat(rewards).nonzero().flatten().tolist()
            if not flat or attempt == self.attempts:
                break
            rng = random.Random(f"{self.args.seed} {self.state.global_step} {attempt}")
            fresh = dict(zip(flat, rng.sample(range(len(self.train_dataset)), len(flat))))
            todo = [i for i in range(len(inputs)) if (first + i) // group in fresh]
            for i in todo:
                inputs[i] = self.train_dataset[fresh[(first + i) // group]]
        self._metrics["train"]["dynamic_sampling/attempts"].append(attempt)
        self._sampled = (ids, logprobs if logprobs[0] else None, totals, rewards)
        return inputs

    def _generate_and_score_completions(self, inputs):
        if self._history is None:  # now, as a resumed run's log has been cut back to its checkpoint
            path = self.run / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            self._history = [
                {name: line.get(f"collapse/{name}") for name in ("agreement", "entropy")} for line in lines
            ]
        inputs = self._resample(inputs) if self.attempts else inputs
        self._ready = self._take(inputs) if self.ahead else None
        output = super()._generate_and_score_completions(inputs)
        self._sampled, self._ready, self._asked = None, None, []
        self._dense = self.token_rewards(output)
        for row, advantage in zip(self._rows, self.estimate_advantages(output).tolist(), strict=True):
            row["advantage"] = advantage
        rows = gather_object(self._rows)
        if self.accelerator.is_main_process:
            runs.append_jsonl(self.run / "completions.jsonl", rows)
        metrics, mean = self._metrics["train"], lambda values: sum(values) / max(1, len(values))
        if all(r["missing"] for r in rows):
            raise RuntimeError(
                f"step {self.state.global_step + 1}: no completion got a reward, so nothing can be learned: the judge or the "
                "user simulator failed every time, or the prompts lack the fields that the rewards read"
            )
        good = [r for r in rows if r["status"] == "ok"]
        metrics["think/format_ok"].append(len(good) / len(rows))
        metrics["think/truncated"].append(mean([r["cut_off"] for r in rows]))
        so_far = lambda n, this_one: n + 1 if this_one and n >= 0 else -1
        self._steps_cut_off = so_far(self._steps_cut_off, metrics["think/truncated"][-1] > 0.5)
        self._steps_malformed = so_far(self._steps_malformed, not good)
        if self._steps_cut_off == 3 and not self.allow_truncation:
            raise RuntimeError(
                f"more than half of the completions of the first three steps were cut off at {self.max_completion_length} "
                "tokens; raise --max-completion-tokens, or pass --allow-truncation if that is meant"
            )
        if self._steps_malformed == 3 and not self.allow_truncation:
            status, n = Counter(row["status"] for row in rows).most_common(1)[0]
            raise RuntimeError(
                f"no completion of the first three steps had the format {utils.THINK_FORMATS[self.think_format]!r} ({n} "
                f"of the last {len(rows)}: {status}): is --model warm-started, and in this format? --allow-truncation goes on"
            )
        metrics["think/mean_tokens"].append(mean([r["n_thinking_tokens"] for r in rows]))
        metrics["think/response_tokens"].append(mean([r["n_tokens"] - r["n_thinking_tokens"] for r in rows]))
        for name in rows[0][
            "rewards"
        ]:  # the preference of completions in good format, everything else of all
            values = [r["rewards"][name] for r in (good if name == "preference" else rows)]
            if known := [v for v in values if v is not None]:
                metrics[f"reward/{name}"].append(mean(known))
        for name in rows[0].get("contributions", ()):
            metrics[f"contribution/{name}"].append(mean([r["contributions"][name] or 0.0 for r in rows]))
        if self.compose:
            metrics["reward/missing"].append(mean([r["missing"] for r in rows]))
            for name, value in self._indicators.items():
                metrics[f"collapse/{name}"].append(value)
        if self.reward_model:
            self._count_truncated(metrics)
        return output

    def _count_truncated(self, metrics: dict) -> None:
        counts = torch.tensor(
            [self.reward_model.n_truncated, self.reward_model.n_scored], device=self.accelerator.device
        )
        cut, scored = self.accelerator.reduce(counts, "sum").tolist()
        metrics["reward/truncated"].append(cut / max(1, scored))
        self.reward_model.n_truncated = self.reward_model.n_scored = 0  # the next step counts anew

    def rewarded(self) -> torch.Tensor:
        """Which of this process's completions have a reward (B, 1), bool: from the others nothing is learned."""
        return torch.tensor([[not row["missing"]] for row in self._rows], device=self.accelerator.device)

    def token_rewards(self, output: dict) -> list[tuple[float, bool, torch.Tensor, torch.Tensor]]:
        """[(weight, whether a group scales them, dense rewards (B, T), where they stand (B, T, bool))] of each part; logs a
        row's sums."""
        parts = [
            (name, weight, source.scaled, *source(self, self._rows, output))
            for name, weight, source in self.dense_rewards
        ]
        for name, _, _, values, _ in parts:
            for row, total in zip(self._rows, values.sum(1).tolist()):
                row["rewards"][name] = total
        return [part[1:] for part in parts]

    def estimate_advantages(self, output: dict) -> torch.Tensor:
        """What is logged as a completion's advantage (B,), of several tokens their mean. GRPO's of the outcome are in `output`
        already; those of dense rewards come on top, token by token. ppo.py puts its own there."""
        mask, first = output["completion_mask"], self.accelerator.process_index * len(self._rows)
        for weight, scaled, values, events in self._dense:
            width = self.accelerator.gather(
                torch.tensor([mask.size(1)], device=self.accelerator.device)
            ).max()
            part = values, events & self.rewarded()
            values, events = (self.accelerator.gather(F.pad(x, (0, width - x.size(1)))) for x in part)
            scaled = scaled and self.scale_rewards != "none"
            advantages = dense.token_advantages(values, events, self.num_generations, scaled)
            advantages = weight * advantages[first : first + len(self._rows), : mask.size(1)]
            output["advantages"] = (output["advantages"].view(len(mask), -1) + advantages) * mask
        return output["advantages"].sum(1) / mask.sum(1) if self._dense else output["advantages"]

    def log(self, logs: dict, *args, **kwargs) -> None:
        """Once a rollout; ends the run after it when unsupervised.collapsed says so."""
        super().log(logs, *args, **kwargs)
        if "train_runtime" in logs:  # the closing line
            return
        self._history.append({"entropy": None} | self._indicators)
        if self._indicators and not self.stopped and (reason := collapsed(self._history)):
            self.stopped, self.control.should_training_stop = reason, True
            self.accelerator.print(f"{reason}; the run ends here")

    # --- checkpoints, and held-out prompts: is the proxy still a proxy?

    def _save_checkpoint(self, model, trial):
        ahead = (
            self._pending.result() if self._pending else None
        )  # first: what is saved must not change under way
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if ahead:
            (folder / f"ahead-rank{self.accelerator.process_index}.json").write_text(json.dumps(ahead))
        for name in self.beside:  # as safetensors: dcp's own format holds pickles, which loading would run
            writer = dcp.HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
            dcp.save(
                self._state_beside(name)[2],
                storage_writer=writer,
                no_dist=not torch.distributed.is_initialized(),
            )
        if self.held_out:
            self._measure_held_out()

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        ahead = Path(checkpoint or "") / f"ahead-rank{self.accelerator.process_index}.json"
        if ahead.exists():
            self._pending = Future()
            self._pending.set_result(json.loads(ahead.read_text()))
        for name in self.beside if checkpoint else ():
            model, optimizer, tensors = self._state_beside(name)
            reader = dcp.HuggingFaceStorageReader(str(Path(checkpoint) / name))
            dcp.load(
                tensors, storage_reader=reader, no_dist=not torch.distributed.is_initialized()
            )  # in place
            set_state_dict(
                *self.beside[name], model_state_dict=model, optim_state_dict=optimizer, options=FLAT
            )

    def _state_beside(self, name: str) -> tuple[dict, dict, dict]:
        """The state of a model and of its optimizer, flat; and what a checkpoint holds: their tensors, tied ones once."""
        model, optimizer = get_state_dict(*self.beside[name], options=FLAT)
        tensors = {key: value for key, value in optimizer.items() if torch.is_tensor(value)}
        local = lambda key: model[key].to_local() if hasattr(model[key], "to_local") else model[key]
        weights = {local(key).data_ptr() or key: key for key in model}  # an empty shard lies nowhere
        return (
            model,
            optimizer,
            {"model": {key: model[key] for key in weights.values()}, "optimizer": tensors},
        )

    @torch.no_grad()
    def _measure_held_out(self):
        """One completion for each held-out prompt, as in training, into held_out_completions.jsonl, the means into
        held_out.jsonl; the best model by gold is kept in best_by_gold/. Leaves the state of the random generators as it was,
        so that nothing else of the run depends on it."""
        rank, world, chunk = (
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.args.generation_batch_size,
        )
        n = math.ceil(
            len(self.held_out) / world
        )  # for each process; the last of them asks some again, which are not counted
        mine = [self.held_out[(rank * n + i) % len(self.held_out)] for i in range(n)]
        prompt_ids, completion_ids = (
            [utils.encode_prompt(self.processing_class, p["prompt"]) for p in mine],
            [],
        )
        metrics = self._metrics["train"]
        gaps = list(metrics.get("sampling/logprob_gap", ()))
        self.model.eval()
        with torch.random.fork_rng():
            before = np.random.get_state()
            self._seed((self.args.seed * 1_000_003 + self.state.global_step) * world + rank)
            for start in range(0, n, chunk // world):
                completion_ids += self._generate_single_turn(
                    prompt_ids[start : start + chunk // world], None, {}, 1
                )[0]
            np.random.set_state(before)
        self.model.train()
        metrics.pop("sampling/logprob_gap", None)  # the next step logs its own
        metrics |= {"sampling/logprob_gap": gaps} if gaps else {}
        rows = gather_object(self._score(mine, completion_ids))[: len(self.held_out)]
        if self.reward_model:
            self.reward_model.n_truncated = self.reward_model.n_scored = (
                0  # these are no part of the next step
            )
        better = [
            self.accelerator.is_main_process and log_held_out(self.run, self.state.global_step, rows)
        ]
        if broadcast_object_list(better)[0]:
            training.save_model(self, self.run / "best_by_gold", self.think_format)

    # --- forwards: rows of about equal length, no column that is padding in all of them

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        forward, results = super()._get_per_token_logps_and_entropies, []
        order, chunks = trimmed(attention_mask, batch_size)
        for rows, start, end in chunks:
            faults.beat()
            cut = input_ids.size(1) - end  # completion columns that are padding in every row of this chunk
            out = forward(
                model,
                input_ids[rows, start:end],
                attention_mask[rows, start:end],
                logits_to_keep - cut,
                **kwargs,
            )
            results.append([None if x is None else x if x.ndim == 0 else F.pad(x, (0, cut)) for x in out])
        logps, entropies, aux = zip(*results)
        back = order.argsort()
        return (
            torch.cat(logps)[back],
            None if entropies[0] is None else torch.cat(entropies)[back],
            None if aux[0] is None else torch.stack(aux).mean(),
        )


def total(**_):
    """TRL asks for a reward function and names a column after it; RolloutTrainer._calculate_rewards does the scoring."""
    raise AssertionError("TRL called the reward function although _calculate_rewards is overridden")


training.shard_reference(grpo_trainer)
_trl_split = grpo_trainer.split_tensor_dict
_LLM = getattr(vllm_generation, "LLM", None)  # None: vLLM is not installed
_trl_params = vllm_generation.VLLMGeneration._iter_named_params


def merged_params(self):
    """In place of VLLMGeneration._iter_named_params: (name, weight) with LoRA merged into a copy of each weight, which FSDP2
    gathers. TRL merges into the weights themselves and subtracts it again, and in bfloat16 others are left: 42 % of them after
    120 steps."""
    for module in self.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves the last layers gathered, which TRL cannot read
    if (
        not is_peft_model(self.model)
        or self._dist.is_zero3
        or (self._dist.is_fsdp and self._dist.fsdp_version == 1)
    ):
        return (yield from _trl_params(self))
    whole = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x
    for name, weight in self.model.named_parameters():
        if self.model.prefix not in name:
            weight = whole(weight)
            if name.endswith(".base_layer.weight"):
                layer = self.model.get_submodule(name.removesuffix(".base_layer.weight"))
                delta = (
                    whole(layer.lora_B["default"].weight).float()
                    @ whole(layer.lora_A["default"].weight).float()
                )
                delta = layer.scaling["default"] * (delta.T if layer.fan_in_fan_out else delta)
                weight = (weight.float() + delta).to(weight.dtype)
            yield (
                self._fix_param_name_to_vllm(
                    name.removeprefix("base_model.model.").replace(".base_layer", "")
                ),
                weight.data,
            )


def patch_vllm() -> None:
    """Gives TRL's vLLM weights whose base LoRA leaves alone; a colocated one an explicit dtype, no sampling defaults from the
    model's folder, and a CPU backend.

    On the CPU linear layers pack their weights after loading, so TRL's per-parameter `load_weights` fails there;
    `reload_weights` works, except for a tied LM head, whose packed copy must be renewed. Measured in tests/test_rollout.py.
    """
    if (
        "MASTER_PORT" not in os.environ
    ):  # TRL tries 29500 first, which two runs that start at once on one machine both get
        with socket.socket() as free:
            free.bind(("", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    on_gpu = torch.cuda.is_available()
    vllm_generation.VLLMGeneration._iter_named_params = merged_params
    vllm_generation.LLM = functools.partial(
        _LLM, dtype=utils.DTYPE, enforce_eager=not on_gpu, generation_config="vllm"
    )
    if on_gpu:
        return

    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(
        logging.ERROR
    )  # it names the tied head every time

    def sync_weights(self):
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(
            weights_iterator=((n, p.detach().clone()) for n, p in self._iter_named_params())
        )
        model = runner.model
        head = getattr(model, "lm_head", None)
        if head is not None and getattr(model.config, "tie_word_embeddings", False):
            head.quant_method.process_weights_after_loading(head)
>>>>>>> wt-rewards
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
        if self.llm is None:
            yield from self._sample_transformers(prompts, seeds, done)
        else:
            yield from self._sample_vllm(prompts, seeds, done)

    def _sample_vllm(self, prompts, seeds, done) -> Iterator[tuple[int, Sample]]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        first = self.n_asked
        self.n_asked += len(prompts)
        for place, prompt in enumerate(prompts):
            if place in done:
                continue
            parameters = SamplingParams(
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                max_tokens=self.sampling.max_tokens,
                stop_token_ids=self.ends,
                ignore_eos=True,  # only the ends above count
                stop=self.sampling.stop or None,
                include_stop_str_in_output=True,
                detokenize=bool(self.sampling.stop),
                logprobs=0,  # of the sampled token alone
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
        for start in range(0, len(prompts), HF_BATCH):
            places = longest_first[start : start + HF_BATCH]
            if done.issuperset(places):
                continue
            if seeds:
                torch.manual_seed(seeds[places[0]])
            rows = {"input_ids": [prompts[place] for place in places]}
            batch = self.tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(self.policy.device)
            width = batch["input_ids"].size(1)
            with torch.no_grad():
                sequences = self.policy.generate(
                    **batch,
                    generation_config=config,
                    stopping_criteria=[self._stops_after(width)] if self.sampling.stop else None,
                    synced_gpus=policy.is_sharded_launch(),
                )
            for place, sequence in zip(places, sequences[:, width:].tolist(), strict=True):
                ids = self._until_end(sequence)
                yield place, Sample(ids, None, self._has_ended(ids))
        self.policy.train(was_training)

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

    def _stops_after(self, width: int):
        """Returns a stopping criterion: a row ends when its last tokens hold the stop string."""

        def criterion(ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
            ended = [self._has_ended(row) for row in ids[:, width:][:, -16:].tolist()]
            return ids.new_tensor(ended).bool()

        return criterion


def _beat(*_) -> None:
    watchdog.beat()


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


def completion_metrics(completions: list[Completion]) -> dict[str, float]:
    """Returns what metrics.jsonl says of the completions of a step, of all processes: lengths, format, rewards."""
    n = len(completions)
    lengths = [len(completion.ids) for completion in completions]
    ended = [len(completion.ids) for completion in completions if not completion.cut_off] or [0]
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
        "think/response_tokens": fmean(len(c.ids) - c.n_thinking_tokens for c in completions),
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


def reward_metrics(rewards_P_G: torch.Tensor) -> dict[str, float]:
    """Returns mean and spread of the rewards of a step; NaN (no reward) counts in neither."""
    known = rewards_P_G[~rewards_P_G.isnan()]
    if not len(known):
        raise RuntimeError(
            "no completion got a reward, so nothing can be learned: the judge or the user simulator failed every "
            "time, or the prompts lack the fields that the rewards read"
        )
    spread = rewards_P_G.nan_to_num(nan=-math.inf).amax(1) - rewards_P_G.nan_to_num(nan=math.inf).amin(1)
    return {
        "reward": known.mean().item(),
        "reward_std": known.std().item(),
        "frac_reward_zero_std": (spread <= 0).float().mean().item(),
    }


class FormatGuard:
    """Ends a run whose first three steps can teach nothing: completions are cut off, or none has the format."""

    def __init__(self, args):
        """`args`: think_format, max_completion_tokens, allow_truncation of a training script."""
        self.args = args
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
                f"{self.args.max_completion_tokens} tokens; raise --max-completion-tokens, or pass --allow-truncation "
                "if that is meant"
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
    vllm_memory: float = 0.85,
    done: Set[int] = frozenset(),
) -> Iterator[tuple[int, Sample]]:
    """Loads a model, yields (place, sample) for each prompt (token ids) as they end, and frees the model.

    Leaving out the prompts in `done` changes no other completion.
    """
    longest = max(map(len, prompts)) + sampling.max_tokens
    sampler = Sampler(model, tokenizer, sampling, use_vllm, max_length=longest, vllm_memory=vllm_memory)
    seeds = [seed * 1_000_003 + place for place in range(len(prompts))]
    try:
        with tqdm(total=len(prompts), desc="generate", unit="completion") as bar:
            for place, sample in sampler.sample(prompts, seeds, done):
                bar.update()
                yield place, sample
    finally:
        sampler.close()
