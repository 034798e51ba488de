"""From completions to one reward each: the reward model, other rewards, and what a malformed completion gets.

The training loops use it. The completions of a group are neighbours. A group is the G completions of a prompt
in GRPO, all completions of a step in PPO.
"""

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
        self.compose = rewards.load(args, run)  # None if the reward is the preference alone
        self.reward_name = "total" if self.compose else "preference"
        self.gold = load_gold(args, str(accelerator.device), run)
        self.reward_model = load_reward_model(args, str(accelerator.device))
        names = rewards.reward_names(args)
        self.needs_entropies = "self_certainty" in names or "negative_entropy" in names

        # completions that ended while others are still sampled are scored in a second thread
        self._thread = ThreadPoolExecutor(1)
        self._stream = None
        if torch.cuda.is_available():
            self._stream = torch.cuda.Stream()
        self._waiting = []  # completions of a batch that is not full yet
        self._scoring = []  # one future for each batch that the thread has

    # --- the preference

    def start(self, completion) -> None:
        """Takes a completion that has just ended; a full batch of them is scored while others are sampled.

        Which completions are a batch follows from the order in which they end, so runs repeat to the bit.
        """
        if self.reward_model is None:
            return
        self._waiting.append(completion)
        n_tokens = sum(len(waiting.ids) for waiting in self._waiting)
        if n_tokens >= self.reward_model.tokens_per_batch:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._scoring.append(self._thread.submit(self._set_preferences, self._waiting))
            self._waiting = []

    def _set_preferences(self, completions: list) -> None:
        """Sets rewards["preference"]; it stays None for a completion that gets a floor and needs no score."""
        texts = [text_to_score(completion, self.args) for completion in completions]
        with torch.cuda.stream(self._stream):  # does nothing without a GPU, where the stream is None
            set_preferences(self.reward_model, completions, texts)

    # --- all parts

    def score(self, completions: list, group_size: int, model: torch.nn.Module) -> dict[str, float]:
        """Sets rewards, contributions, correct and reward of this process's completions; all processes call it.

        With --on-bad-format floor, a malformed completion gets the lowest reward of its group minus a margin.
        One without a reward (a judge failed) keeps NaN, and nothing is learned from it.

        Args:
            completions: those that `start` took, whole groups of them.
            model: the policy, whose entropies some rewards read.

        Returns the indicators of collapse, see unsupervised.collapse_indicators.
        """
        self._flush()
        for batch in self._scoring:
            batch.result()
        self._scoring = []
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
        self._set_rewards(completions, totals, group_size)
        return indicators

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
            for name, values in scores.parts.items():
                completion.rewards[name] = values[place]
            for name, values in scores.contributions.items():
                completion.contributions[name] = values[place]
        return scores.totals[first : first + len(completions)], scores.indicators

    def _set_rewards(self, completions: list, totals: list[float | None], group_size: int) -> None:
        """Sets `reward`: the total, a floor for a malformed completion, NaN where there is none."""
        own_rewards = []
        own_floored = []
        for completion, total in zip(completions, totals, strict=True):
            gets_floor = completion.status != "ok" and self.args.on_bad_format == "floor"
            has_total = total is not None and not gets_floor
            own_rewards.append(total if has_total else math.nan)
            own_floored.append(gets_floor)
            if gets_floor:  # it takes the place of what the parts add
                completion.contributions = dict.fromkeys(completion.contributions)
            if gets_floor and completion.correct is not None:
                completion.correct = 0.0

        # a floor depends on the whole group, and PPO's group is spread over all processes
        all_rewards = torch.tensor(gather_object(own_rewards))
        all_floored = torch.tensor(gather_object(own_floored))
        all_rewards = floor_bad(all_rewards, all_floored, group_size, self.args.format_margin).tolist()
        first = self._first_place(completions)
        for place, completion in enumerate(completions, start=first):
            completion.reward = all_rewards[place]

    def _first_place(self, completions: list) -> int:
        """Returns the place of this process's first completion among those of all processes."""
        counts = gather_object([len(completions)])
        return sum(counts[: self.accelerator.process_index])

    def measure(self, completions: list) -> None:
        """Sets preference and gold of completions that are not trained on."""
        if self.reward_model is None:
            for completion in completions:
                completion.rewards["preference"] = None
        else:
            self._set_preferences(completions)
            self._reset_counts()  # the metrics are of training steps only
        set_gold(self.gold, completions)

    def metrics(self) -> dict[str, float]:
        """Returns the share of texts of all processes that the reward model cut since the last call."""
        if self.reward_model is None:
            return {}
        counts = [self.reward_model.n_truncated, self.reward_model.n_scored]
        counts = torch.tensor(counts, device=self.accelerator.device)
        truncated, scored = self.accelerator.reduce(counts, "sum").tolist()
        self._reset_counts()
        return {"reward/truncated": truncated / max(1, scored)}

    def _reset_counts(self) -> None:
        self.reward_model.n_truncated = 0
        self.reward_model.n_scored = 0


def text_to_score(completion, args) -> str | None:
    """Returns the text that the reward model scores for a completion; None if that gets a floor instead."""
    if completion.status == "ok" or args.on_bad_format == "score":
        return completion.text
    if args.on_bad_format == "floor":
        return None
    # strict mode of the released code wants the opening tag and, in a Zero format, the closing one behind it
    expected = utils.THINK_FORMATS[args.think_format]
    start = completion.text.find(expected.opens_response)
    if start < 0 or expected.stop not in completion.text[start:]:
        return "[NULL]"
    return completion.text


def set_preferences(reward_model, completions: list, texts: list[str | None]) -> None:
    """Sets rewards["preference"] to the score of each text; a completion whose text is None gets None."""
    scored = []
    for completion, text in zip(completions, texts, strict=True):
        completion.rewards["preference"] = None
        if text is not None:
            scored.append(completion)
    messages = [completion.messages for completion in scored]
    scores = reward_model.score(messages, [text for text in texts if text is not None])
    watchdog.beat()
    for completion, score in zip(scored, scores, strict=True):
        if not math.isfinite(score):
            raise RuntimeError(
                f"the reward model gave {score} for prompt {completion.messages} "
                f"and completion {completion.text!r}"
            )
        completion.rewards["preference"] = score


def set_gold(measure, completions: list) -> None:
    """Sets rewards["gold"] by `measure`, see gold.load_gold; does nothing if that is None."""
    if measure is None:
        return
    messages = [completion.messages for completion in completions]
    responses = [completion.response for completion in completions]
    for completion, value in zip(completions, measure(messages, responses), strict=True):
        if not isinstance(value, float) or math.isinf(value):
            raise RuntimeError(
                f"--gold gave {value!r} for prompt {completion.messages} and completion {completion.text!r}; "
                "it must be a finite float, or NaN for no value"
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
