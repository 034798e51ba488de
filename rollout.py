"""The hooks that every RL script hangs into TRL's GRPOTrainer: rollouts that are checked, rewards that cannot be wrong in
silence, forwards without padding waste, and a log of every completion. Tested against trl 1.16 (tests/test_rollout.py
names each hook and fails readably when TRL moves it)."""

import atexit
import contextlib
import functools
import gc
import json
import logging
import math
import os
import random
import socket
from bisect import bisect_left
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

os.environ.setdefault(
    "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
)  # the engine in this process: its weights are synced in place

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import trl.generation.vllm_generation as vllm_generation
import trl.trainer.grpo_trainer as grpo_trainer
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional as F
from trl import GRPOTrainer

from rewards import dense
import faults
import runs
import training
import utils
from rewards import shaping
from rewards.gold import log_held_out
from rewards.unsupervised import collapsed

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def floor_bad(rewards: torch.Tensor, group_size: int, margin: float) -> torch.Tensor:
    """Rewards (P*G,) with every NaN (a completion in bad format) set `margin` below the lowest finite one of its group.

    Groups are `group_size` neighbours. In a group without any finite reward (inf: not known yet) it is -margin.
    """
    grouped = rewards.view(-1, group_size)
    lowest = torch.where(grouped.isnan(), math.inf, grouped).min(dim=1, keepdim=True).values
    floor = torch.where(lowest.isinf(), 0.0, lowest) - margin
    return torch.where(grouped.isnan(), floor, grouped).view(-1)


def fill_missing(rewards: torch.Tensor, missing: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rewards (P*G,) with those that are `missing` (P*G, bool) set to the mean of the others in their group, floors included:
    their advantage is zero. 0 where no other is there."""
    others = torch.where(missing, math.nan, rewards).view(-1, group_size)
    return torch.where(missing, others.nanmean(1).nan_to_num(0.0).repeat_interleave(group_size), rewards)


def end_at(ids: list[int], closing: str, tokenizer) -> list[int]:
    """The shortest beginning of a completion (token ids) whose text holds `closing`; all of it where none does."""
    if closing not in tokenizer.decode(ids):
        return ids
    return ids[: bisect_left(range(len(ids)), True, key=lambda n: closing in tokenizer.decode(ids[:n]))]


def even_chunks(lengths: list[int], n: int) -> list[int]:
    """Sizes of `n` chunks of consecutive rows, such that the largest has as few tokens, padding included, as can be. `lengths`
    of the rows: longest first, tokens, at least n of them."""

    def cut(most: int) -> list[int]:
        sizes = []
        while (start := sum(sizes)) < len(lengths):
            sizes.append(min(max(1, most // lengths[start]), len(lengths) - start))
        return sizes

    sizes = cut(bisect_left(range(lengths[0] * len(lengths)), True, key=lambda most: len(cut(most)) <= n))
    while len(sizes) < n:  # every process must make as many forwards as the others
        i = max(range(len(sizes)), key=lambda i: sizes[i])
        sizes[i : i + 1] = [sizes[i] - sizes[i] // 2, sizes[i] // 2]
    return sizes


def trimmed(
    attention_mask: torch.Tensor, batch_size: int | None
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, int, int]]]:
    """Rows of a mask (B, T) in order of length (B,), longest first, and in that order chunks of about equally many tokens,
    `batch_size` rows each on average: (rows, first column, last column + 1), without the columns that are padding in all of
    the chunk's rows."""
    lengths = attention_mask.sum(1)
    order, chunks = lengths.argsort(descending=True, stable=True), []
    n = math.ceil(len(order) / (batch_size or len(order)))
    for rows in order.split(even_chunks(lengths[order].tolist(), n)):
        columns = attention_mask[rows].any(0).nonzero()
        chunks.append((rows, columns[0].item(), columns[-1].item() + 1))
    return order, chunks


def split_rollout(batch: dict, n: int, updates: int, by_tokens: bool, gather=lambda rows: rows) -> list[dict]:
    """Takes the place of TRL's split of a rollout into `n` micro-batches, `n / updates` of them for each optimizer step.

    The rows of a step are sorted, longest first, so that a micro-batch holds rows of about equal length; `by_tokens`: also
    about equally many tokens, few long rows or many short ones. That leaves the loss as it is where it is a sum over tokens
    divided by their number in the rollout; a mean over rows needs equally many rows. `gather`: (1, N) of this process to
    (R, N) of all R: a micro-batch has as many rows in each of them, as TRL's collectives ask for.
    """
    lengths, out = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1), []
    for rows in torch.arange(len(lengths), device=lengths.device).chunk(updates):
        rows, parts = rows[lengths[rows].argsort(descending=True, stable=True)], n // updates
        longest = gather(lengths[rows][None]).amax(0).tolist()
        sizes = even_chunks(longest, parts) if by_tokens else [len(rows) // parts] * parts
        out += [
            {k: v[part] if torch.is_tensor(v) and v.ndim else v for k, v in batch.items()}
            for part in rows.split(sizes)
        ]
    return out


class RolloutTrainer(GRPOTrainer):
    """GRPOTrainer with a preference reward on think+response or on the response, and the other rewards of rewards.py.

    `reward_model`: a RewardModel, or None where no preference is asked for. `compose`: from `rewards.load`; None: the
    preference alone. `dense_rewards`: from `dense.load`. `entropies`: rows get mean_entropy and mean_kl_uniform. `attempts`:
    how often a group whose rewards differ by no more than `zero_spread` is replaced by one of another prompt. `think_format`,
    `on_bad_format` and `format_margin`: see train_grpo.Args.
    `ahead`: vLLM samples a rollout while the one before it is trained on. `run`: the run folder. `gold`: from
    `rewards.gold.load_gold`; `held_out`: prompt rows {id, prompt} that it measures at every checkpoint. `max_logprob_gap`: nats;
    the mean difference between the logprobs of sampler and trainer on freshly sampled tokens that stops the run.
    """

    def __init__(
        self,
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

    # --- prompts: their order in an epoch follows from its number, so that a resumed run sees those of the unbroken one

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(self.args.seed + 1_000_003 * epoch)
        return sampler

    # --- rollouts: the sampler must have the trainer's weights

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._sampled:  # by _resample, with their rewards
            return self._sampled[:2]
        if self._ready:  # by _take, from weights that were the trainer's
            return self._ready
        self._first = self.vllm_generation.llm.request_counter.counter if self._colocated else 0
        with (
            contextlib.nullcontext() if self._colocated or not self.use_vllm else faults.patient()
        ):  # a server gives no beat
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.use_vllm:  # it stops at </response> by itself, see train_grpo.py
            self._check_sampler(prompt_ids, completion_ids, logprobs)
        elif self.think_format.startswith("zero"):
            completion_ids = [end_at(ids, "</response>", self.processing_class) for ids in completion_ids]
        return completion_ids, logprobs

    @torch.no_grad()
    def _check_sampler(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]], logprobs: list[list[float]]
    ):
        """Stops the run when the sampler's logprobs of the first four completions are not the trainer's."""
        rows = [(p, c, s) for p, c, s in zip(prompt_ids, completion_ids, logprobs) if c]
        rows = (rows * 4)[:4]  # as many forwards in every process, as sharded weights are gathered in each
        n_prompt, n_completion = max(len(p) for p, _, _ in rows), max(len(c) for _, c, _ in rows)
        pad = self.processing_class.pad_token_id
        ids = [[pad] * (n_prompt - len(p)) + p + c + [pad] * (n_completion - len(c)) for p, c, _ in rows]
        mask = [
            [0] * (n_prompt - len(p)) + [1] * len(p + c) + [0] * (n_completion - len(c)) for p, c, _ in rows
        ]
        device = self.accelerator.device
        ours, _, _ = self._get_per_token_logps_and_entropies(
            self.model, torch.tensor(ids, device=device), torch.tensor(mask, device=device), n_completion, 1
        )
        gaps = [
            abs(ours[i, t].item() - s[t])
            for i, (_, c, s) in enumerate(rows)
            for t in range(len(c))
            if s[t] is not None
        ]
        gap = (
            self.accelerator.gather(torch.tensor([sum(gaps) / max(1, len(gaps))], device=device)).max().item()
        )
        self._metrics["train"]["sampling/logprob_gap"].append(gap)
        if not gap <= self.max_logprob_gap:
            raise RuntimeError(
                f"step {self.state.global_step}: sampler and trainer disagree by {gap:.4f} nat a token (limit "
                f"{self.max_logprob_gap}): vLLM samples from other weights than those being trained. The rollouts of this "
                "step would be off-policy; nothing was updated with them. --max-logprob-gap sets the limit."
            )

    # --- asynchronous rollouts: vLLM samples the next one, from the weights as they are, while this one is trained on

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of one optimizer step; with `ahead` those up to the end of the next rollout are fetched too."""
        if self.ahead:
            rollout = self.args.steps_per_generation * self.num_iterations
            self._coming += islice(epoch_iterator, num_batches + rollout - len(self._coming))
            epoch_iterator, self._coming = iter(self._coming[:num_batches]), self._coming[num_batches:]
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _take(self, inputs: list[dict]) -> tuple[list, list]:
        """Completions of `inputs` and their logprobs; then sampling of the next rollout begins."""
        if self._pending is None:
            self._begin(inputs)
        taken, self._pending = self._pending.result(), None
        rollout, accumulation = (
            self.args.steps_per_generation * self.num_iterations,
            self.args.gradient_accumulation_steps,
        )
        later = self._coming[rollout - accumulation :]
        if later and self.state.global_step + rollout // accumulation < self.state.max_steps:
            self._begin(later[0])
        return taken

    def _begin(self, inputs: list[dict]) -> None:
        """Checks the sampler on eight tokens and starts the rollout of `inputs` in the second thread."""
        prompts, most = (
            self._tokenize_prompts([x["prompt"] for x in inputs])[0],
            self.vllm_generation.max_completion_length,
        )
        self.vllm_generation.max_completion_length = 8
        self._generate_single_turn(
            prompts[:4], None, {}, 1
        )  # with the trainer's weights? Later they are no longer these
        self.vllm_generation.max_completion_length = most
        self._pending = self._pool.submit(
            self._sample, prompts
        )  # in the stream in which vLLM was warmed up: it keeps to that

    def _sample(self, prompts: list[list[int]]) -> tuple[list, list]:
        _, ids, logprobs, _ = self.vllm_generation.generate(prompts, None, 1)
        return ids, [[chosen[0] for chosen in row] for row in logprobs]

    @staticmethod
    def _seed(seed: int) -> None:
        """Of what sampling draws from: torch's generator, and NumPy's, which vLLM on a GPU takes the requests' seeds from."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)

    def _shuffle(self, batch: dict) -> dict:
        """A rollout's rows in random order: TRL's shuffle, less the generator that vLLM draws from, perhaps at this moment."""
        rng = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.state.global_step)
        order = torch.randperm(len(batch["completion_ids"]), generator=rng)
        return {k: v[order] if torch.is_tensor(v) and v.ndim else v for k, v in batch.items()}

    # --- rewards

    def _tokenize_prompts(self, prompts):
        self._asked = prompts if self.reward_model and self._colocated and not self.ahead else []
        return super()._tokenize_prompts(prompts)

    def _observe(self, engine) -> None:
        """Every step of vLLM's engine is a beat. The completions that it finished go to the reward model, which scores them
        while the engine goes on; the order in which they end says which are one batch, so that a run repeats to the bit."""
        step = engine.step

        def score(messages, completions):
            with torch.cuda.stream(self._stream):
                return self._preferences(
                    messages, dict(zip(completions, self._read(list(completions.values()))))
                )

        def observed():
            faults.beat()
            outputs = step()
            if self._asked:
                for out in outputs:
                    self._waiting[int(out.request_id) - self._first] = list(out.outputs[0].token_ids)
                if sum(map(len, self._waiting.values())) >= self.reward_model.tokens_per_batch:
                    self._early.append(self._pool.submit(score, self._asked, self._waiting))
                    self._waiting = {}
            return outputs

        engine.step = observed
        if finalizer := getattr(engine.engine_core, "_finalizer", None):
            finalizer.detach()  # at exit it would destroy process groups that this run has left by then; what else it does:
            atexit.register(gc.unfreeze)

    def _read(self, completion_ids: list[list[int]]) -> list[tuple[str, utils.ThinkParts, bool]]:
        """Of each completion the text without its end of turn, its parts, and whether it had that end."""
        ends = set(self.eos_token_ids)
        finished = [ids[-1] in ends for ids in completion_ids]
        bodies = [ids[:-1] if done else ids for ids, done in zip(completion_ids, finished)]
        texts = self.processing_class.batch_decode(
            bodies, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return [
            (t, utils.split_thinking(t, self.think_format, done), done) for t, done in zip(texts, finished)
        ]

    def _preferences(self, messages: list[list[dict]], read: dict[int, tuple]) -> dict[int, float]:
        """The preference of what was `read`, by its place among the `messages`, without those in bad format that get a floor:
        they are not worth a forward of the reward model."""
        null = self.on_bad_format == "null"
        texts = {
            i: "[NULL]" if null and utils.RESPONSE_AFTER[self.think_format] not in text else text
            for i, (text, parts, _) in read.items()
            if parts.status == "ok" or self.on_bad_format != "floor"
        }
        scores = self.reward_model.score([messages[i] for i in texts], list(texts.values()))
        faults.beat()
        return dict(zip(texts, scores))

    def _score(self, inputs: list[dict], completion_ids: list[list[int]]) -> list[dict]:
        """Rows of the log for this process's completions; the preference of one in bad format is None if it gets a floor."""
        tokenizer, messages = self.processing_class, [x["prompt"] for x in inputs]
        read = self._read(completion_ids)
        texts, parts, finished = zip(*read)
        preferences = {i: score for early in self._early for i, score in early.result().items()}
        self._waiting, self._early = {}, []
        if self.reward_model:
            preferences |= self._preferences(
                messages, {i: r for i, r in enumerate(read) if i not in preferences}
            )
        gold = self.gold(messages, [p.response for p in parts]) if self.gold else [None] * len(texts)
        for i, (m, t, g) in enumerate(zip(messages, texts, gold)):
            if not math.isfinite(preferences.get(i, 0.0)):
                raise RuntimeError(
                    f"the reward model gave {preferences[i]} for prompt {m} and completion {t!r}"
                )
            if self.gold and (not isinstance(g, float) or math.isinf(g)):
                raise RuntimeError(
                    f"--gold gave {g!r} for prompt {m} and completion {t!r}; it must be a float, NaN for none"
                )
        faults.beat()
        count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
        statistics = self._entropies(messages, completion_ids) if self.entropies else [{}] * len(texts)
        step = self.state.global_step + self.args.logging_steps  # the line of metrics.jsonl
        return [
            {
                "step": step,
                "id": x["id"],
                "messages": x["prompt"],
                "text": t,
                "thinking": p.thinking,
                "response": p.response,
                "status": p.status,
                "cut_off": not done and "</response>" not in t,
                "rewards": {
                    "preference": preferences.get(i),
                    "gold": None if g is None or math.isnan(g) else g,
                },
                "n_tokens": len(ids),
                "n_thinking_tokens": count(p.thinking),
                **own,
            }
            for i, (x, t, p, done, g, ids, own) in enumerate(
                zip(inputs, texts, parts, finished, gold, completion_ids, statistics)
            )
        ]

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
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
