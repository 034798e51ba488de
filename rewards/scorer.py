"""From completions to one reward each: the preference model, other rewards, and what a malformed completion gets.

Used by the training loops. Groups are neighbours: the G completions of a prompt are next to each other, and each
process has whole groups.
"""

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

import policy
import rewards
import utils
import watchdog
from rewards.gold import load_gold
from rewards.preference import load_reward_model


class Scorer:
    """Rewards the completions of a step.

    Args:
        args: of a training script: the fields of its block "reward", and `think_format`.
        run: the run folder, for the judge's replies.
    """

    def __init__(self, args, tokenizer, run: Path, accelerator: Accelerator):
        self.args = args
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.compose = rewards.load(args, run)
        self.reward_name = "total" if self.compose else "preference"
        self.gold = load_gold(args, str(accelerator.device), run)
        self.reward_model = load_reward_model(args, str(accelerator.device))
        self.needs_entropies = bool({"self_certainty", "negative_entropy"} & rewards.reward_names(args))

        # completions that ended while others are still sampled are scored in a second thread
        self._thread = ThreadPoolExecutor(1)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._waiting = []
        self._batches = []

    # --- the preference

    def start(self, completion) -> None:
        """Takes a completion that has just ended; a full batch of them is scored while others are sampled.

        Which completions are a batch follows from the order in which they end, so runs repeat to the bit.
        """
        if self.reward_model is None:
            return
        self._waiting.append(completion)
        if sum(len(completion.ids) for completion in self._waiting) >= self.reward_model.tokens_per_batch:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._batches.append(self._thread.submit(self._set_preferences, self._waiting))
            self._waiting = []

    def _set_preferences(self, completions: list) -> None:
        """Sets rewards["preference"]; it stays None for a completion that gets a floor and needs no score."""
        texts = [self._text_to_score(completion) for completion in completions]
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            set_preferences(self.reward_model, completions, texts)

    def _text_to_score(self, completion) -> str | None:
        if completion.status == "ok" or self.args.on_bad_format == "score":
            return completion.text
        if self.args.on_bad_format == "floor":
            return None
        if utils.THINK_FORMATS[self.args.think_format].opens_response in completion.text:
            return completion.text
        return "[NULL]"  # the paper's strict mode

    # --- all parts

    def score(self, completions: list, group_size: int, model: torch.nn.Module) -> dict[str, float]:
        """Sets rewards, contributions, correct and reward of this process's completions; all processes call it.

        `model`: the policy, whose entropies some rewards read.

        A malformed completion gets, by --on-bad-format floor, the lowest reward of its group minus a margin. One
        without a reward (a judge failed) keeps NaN, and nothing is learned from it. Returns indicators of
        collapse, see rewards.unsupervised.
        """
        self._flush()
        for batch in self._batches:
            batch.result()
        self._batches = []
        set_gold(self.gold, completions)

        if self.needs_entropies:
            policy.set_entropy_statistics(
                model,
                completions,
                self.args.micro_batch_tokens,
                self.tokenizer.pad_token_id,
                self.accelerator,
            )
        indicators = {}
        if self.compose is None:
            totals = [completion.rewards["preference"] for completion in completions]
        else:
            totals, indicators = self._compose(completions, group_size)

        floored = [
            completion.status != "ok" and self.args.on_bad_format == "floor" for completion in completions
        ]
        values = []
        for total, floor in zip(totals, floored, strict=True):
            values.append(math.nan if total is None or floor else total)
        all_values = torch.tensor(gather_object(values))
        all_floored = torch.tensor(gather_object(floored))
        all_rewards = floor_bad(all_values, all_floored, group_size, self.args.format_margin)

        first = self._first_place(completions)
        own_rewards = all_rewards[first : first + len(completions)].tolist()
        for completion, reward, floor in zip(completions, own_rewards, floored, strict=True):
            completion.reward = reward
            if floor and completion.correct is not None:
                completion.correct = 0.0
        return indicators

    def measure(self, completions: list) -> None:
        """Sets preference and gold of completions that are not trained on."""
        if self.reward_model:
            self._set_preferences(completions)
            self.reward_model.n_truncated = 0  # the next step counts anew
            self.reward_model.n_scored = 0
        else:
            for completion in completions:
                completion.rewards["preference"] = None
        set_gold(self.gold, completions)

    def _first_place(self, completions: list) -> int:
        """Returns the place of this process's first completion among those of all processes."""
        counts = gather_object([len(completions)])
        return sum(counts[: self.accelerator.process_index])

    def _compose(self, completions: list, group_size: int) -> tuple[list[float | None], dict[str, float]]:
        """Combines all rewards on the main process, which asks the judge; returns this process's totals."""
        rows = gather_object([completion.row() for completion in completions])
        scores = None
        if self.accelerator.is_main_process:
            scores = self.compose(rows, group_size)
        scores = broadcast_object_list([scores])[0]

        first = self._first_place(completions)
        for place, completion in enumerate(completions, start=first):
            completion.correct = scores.correct[place]
            completion.rewards |= {name: values[place] for name, values in scores.parts.items()}
            completion.contributions = {name: values[place] for name, values in scores.contributions.items()}
        return scores.totals[first : first + len(completions)], scores.indicators

    def metrics(self) -> dict[str, float]:
        """Returns the share of texts that were too long for the reward model since the last call, over all processes."""
        if self.reward_model is None:
            return {}
        counts = [self.reward_model.n_truncated, self.reward_model.n_scored]
        counts = torch.tensor(counts, device=self.accelerator.device)
        truncated, scored = self.accelerator.reduce(counts, "sum").tolist()
        self.reward_model.n_truncated = 0
        self.reward_model.n_scored = 0
        return {"reward/truncated": truncated / max(1, scored)}


def set_preferences(reward_model, completions: list, texts: list[str | None]) -> None:
    """Sets rewards["preference"] to the score of each text; a completion whose text is None gets None."""
    readable = []
    for completion, text in zip(completions, texts, strict=True):
        completion.rewards["preference"] = None
        if text is not None:
            readable.append((completion, text))
    messages = [completion.messages for completion, _ in readable]
    scores = reward_model.score(messages, [text for _, text in readable])
    watchdog.beat()
    for (completion, _), score in zip(readable, scores, strict=True):
        if not math.isfinite(score):
            raise RuntimeError(
                f"the reward model gave {score} for prompt {completion.messages} and completion {completion.text!r}"
            )
        completion.rewards["preference"] = score


def set_gold(measure, completions: list) -> None:
    """Sets rewards["gold"] by `measure`, see gold.load_gold; does nothing if that is None."""
    if measure is None:
        return
    messages = [completion.messages for completion in completions]
    values = measure(messages, [completion.response for completion in completions])
    for completion, value in zip(completions, values, strict=True):
        if not isinstance(value, float) or math.isinf(value):
            raise RuntimeError(
                f"--gold gave {value!r} for prompt {completion.messages} and completion {completion.text!r}; "
                "it must be a float, NaN for none"
            )
        completion.rewards["gold"] = None if math.isnan(value) else value


def floor_bad(rewards: torch.Tensor, is_bad: torch.Tensor, group_size: int, margin: float) -> torch.Tensor:
    """Returns rewards (P*G,) with bad ones set `margin` below the lowest known reward of their group.

    NaN means "not known". In a group without a known reward the floor is -margin.
    """
    groups = rewards.view(-1, group_size)
    is_bad = is_bad.view(-1, group_size)
    known = ~groups.isnan() & ~is_bad
    lowest = groups.masked_fill(~known, math.inf).amin(1, keepdim=True)
    lowest = torch.where(lowest.isinf(), 0.0, lowest)
    return torch.where(is_bad, lowest - margin, groups).view(-1)
