"""Gives each completion its reward: the values of all parts, then one total, with floors.

A group is the G completions of a prompt in GRPO, next to each other, and all completions of a step in PPO.
"""

import math
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from rewards import DENSE, Part, Values, add_up, call, read_parts, set_floors, verdict
from rlmt.sampler import share_of
from utils import THINK_FORMATS


class Scorer:
    """Rewards the completions of a step; `args` are the training script's, and `run` keeps the judge's
    replies."""

    def __init__(self, args, tokenizer, run: Path, accelerator: Accelerator):
        self.args = args
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.parts = [part for part in read_parts(args) if part.name not in DENSE]
        names = [part.name for part in self.parts]
        self.reward_name = "total"
        if names == ["preference"] and self.parts[0].weight == 1:
            self.reward_name = "preference"
        self.needs_entropies = "self_certainty" in names or "negative_entropy" in names
        device = str(accelerator.device)
        self.reward_model = None
        self.gold = None
        if args.gold:
            from rewards.gold import load_gold

            self.gold = load_gold(args, device, run)
        self.judge = None
        if "preference" in names:
            from rewards.preference import load_reward_model

            self.reward_model = load_reward_model(args, device)
        if any("judge" in part.asks for part in self.parts) and accelerator.is_main_process:
            from rewards.judged import judge_endpoint

            self.judge = judge_endpoint(args, run)

    def set_rewards(self, completions: list, group_size: int, model: torch.nn.Module) -> None:
        """Sets rewards (gold too), correct and reward of this process's completions; all processes call it.

        A judge of --gold is asked about each. One without a reward (a judge failed) gets NaN, and its
        advantage is 0.

        Args:
            completions: whole groups. All processes have equally many.
            model: the policy, whose entropies some rewards read.
        """
        if self.needs_entropies:
            from rewards.unsupervised import set_entropy_statistics

            set_entropy_statistics(
                model,
                completions,
                self.args.micro_batch_tokens,
                self.tokenizer.pad_token_id,
                self.accelerator,
            )
        rows = []
        for completion in completions:
            completion.gets_floor = gets_floor(completion.status, self.args)
            rows.append(completion.prompt | completion.row())
        columns = {part.name: self._values(part, completions, rows, group_size) for part in self.parts}
        golds = gold_of(self.gold, completions)
        totals = []
        for i, completion in enumerate(completions):
            values = {name: column[i] for name, column in columns.items()}
            totals.append(add_up(rows[i], values, self.parts))
            completion.gets_floor = rows[i]["gets_floor"] = totals[-1][1]  # now that of a gate, too
            completion.rewards |= values | golds[i]
            completion.correct = verdict(rows[i], values)

        # a floor depends on the whole group, and PPO's group is spread over all processes
        rewards = set_floors(gather_object(totals), group_size, self.args.format_margin)
        for completion, reward in zip(completions, share_of(rewards, self.accelerator), strict=True):
            completion.reward = np.float32(reward).item()  # as the trainer computes with it

    def _values(self, part: Part, completions: list, rows: list[dict], group_size: int) -> Values:
        """Returns the values of a part for this process's rows; the main process asks a judge about those of
        all."""
        if part.name == "preference":
            return self._preferences(completions)
        given = (self.judge, group_size, self.args.max_completion_tokens)
        if "judge" not in part.asks:
            return call(part, rows, *given)
        every = gather_object(rows)
        values = None
        if self.accelerator.is_main_process:
            values = call(part, every, *given)
        return share_of(broadcast_object_list([values])[0], self.accelerator)

    def _preferences(self, completions: list) -> Values:
        texts = [text_to_score(completion, self.args) for completion in completions]
        return preferences_of(self.reward_model, completions, texts)

    def measure(self, completions: list) -> None:
        """Sets preference and gold of completions that nothing is trained on; all processes call it."""
        preferences = [None] * len(completions)
        if self.reward_model is not None:
            preferences = self._preferences(completions)
        golds = gold_of(self.gold, completions)
        for completion, preference, gold in zip(completions, preferences, golds, strict=True):
            completion.rewards = {"preference": preference} | gold
        self.pop_truncated()  # the next count is of training steps only

    def pop_truncated(self) -> dict[str, float]:
        """Returns the share of all processes' texts that each reward model cut since the last call."""
        shares = {}
        for name, model in (("reward/truncated", self.reward_model), ("gold/truncated", self.gold)):
            if hasattr(model, "cut"):  # not of a gold that is a function or a judge
                cut = gather_object(model.cut)
                shares[name] = sum(cut) / max(1, len(cut))
                model.cut = []
        return shares


def gets_floor(status: str, args) -> bool:
    """Tells whether a completion of this status gets a floor in place of its reward."""
    return status != "ok" and args.on_bad_format == "floor"


def text_to_score(completion, args) -> str | None:
    """Returns the text that the reward model scores for a completion; None if it gets a floor instead."""
    if gets_floor(completion.status, args):
        return None
    if completion.status == "ok" or args.on_bad_format == "score":
        return completion.text
    # "null", the strict mode of the released code, wants the tag that opens the response; a Zero format
    # also needs the one that closes it, behind that
    expected = THINK_FORMATS[args.think_format]
    start = completion.text.find(expected.opens_response)
    if start < 0 or expected.stop not in completion.text[start:]:
        return "[NULL]"
    return completion.text


def preferences_of(reward_model, completions: list, texts: list[str | None]) -> Values:
    """Returns the score of each completion's text; None where the text is None."""
    places = [place for place, text in enumerate(texts) if text is not None]
    messages = [completions[place].messages for place in places]
    scores = reward_model.score(messages, [texts[place] for place in places])
    values = [None] * len(completions)
    for place, score in zip(places, scores, strict=True):
        if not math.isfinite(score):
            raise RuntimeError(f"the reward model gave {score} for {messages} and {texts[place]!r}")
        values[place] = score
    return values


def gold_of(measure, completions: list) -> list[dict[str, float | None]]:
    """Returns {"gold": value} of each completion by `measure`, see gold.load_gold; {} if that is None.

    As in an evaluation, a completion that is not `ok` has the empty answer.
    """
    if measure is None:
        return [{}] * len(completions)
    messages = [completion.messages for completion in completions]
    responses = [completion.response if completion.status == "ok" else "" for completion in completions]
    golds = []
    for value in measure(messages, responses):
        golds.append({"gold": None if value is None else float(value)})
    return golds
