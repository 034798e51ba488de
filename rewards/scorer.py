"""Gives each completion its reward: by the reward model, by other rewards, or by a floor if it is malformed.

A group is the G completions of a prompt in GRPO, next to each other, and all completions of a step in PPO.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

import rewards
from rlmt.model import set_entropy_statistics
from rlmt.sampler import share_of
from rlmt.watchdog import beat
from utils import THINK_FORMATS
from rewards.gold import load_gold
from rewards.preference import RewardModel, load_reward_model


class Scorer:
    """Rewards the completions of a step; `args` are the training script's, and `run` keeps the judge's replies."""

    def __init__(self, args, tokenizer, run: Path, accelerator: Accelerator):
        self.args = args
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.reward_function = rewards.load(args, run)  # None if the reward is the preference alone
        self.reward_name = "total" if self.reward_function else "preference"
        self.gold = load_gold(args, str(accelerator.device), run)
        self.reward_model = load_reward_model(args, str(accelerator.device))
        names = rewards.reward_names(args)
        self.needs_entropies = "self_certainty" in names or "negative_entropy" in names

        self._thread = None
        self._stream = None
        if torch.cuda.is_available():  # a second thread scores completions while others are still sampled
            device = torch.cuda.current_device()  # a new thread would take GPU 0, and memory of it
            self._thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))
            self._stream = torch.cuda.Stream()
        # Not on a CPU: the second thread would bring its OpenMP threads, and where OpenMP has more threads than there
        # are cores it stops to wait actively, which makes every operation of the first thread slower.
        self._waiting = []  # completions of a batch that is not full yet
        self._scoring = []  # a future for each batch that the thread has been given

    # --- the preference

    def enqueue(self, completion) -> None:
        """Takes a completion that has just ended, and has each full batch of them scored; `set_rewards` waits.

        Batches follow from the order in which completions end, so runs repeat to the bit.
        """
        if self.reward_model is None:
            return
        self._waiting.append(completion)
        n_tokens = sum(len(waiting.ids) for waiting in self._waiting)
        if n_tokens >= self.reward_model.tokens_per_batch:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            if self._thread is None:
                self._score_by_model(self._waiting)
            else:
                self._scoring.append(self._thread.submit(self._score_by_model, self._waiting))
            self._waiting = []

    def _score_by_model(self, completions: list) -> None:
        """Sets rewards["preference"]; None for a completion that gets a floor and needs no score."""
        texts = [text_to_score(completion, self.args) for completion in completions]
        with torch.cuda.stream(self._stream):  # does nothing without a GPU, where the stream is None
            set_preferences(self.reward_model, completions, texts)

    # --- all parts

    def set_rewards(self, completions: list, group_size: int, model: torch.nn.Module) -> None:
        """Sets rewards (gold too), contributions, correct and reward of this process's completions.

        All processes call it. Every completion was handed to `enqueue` before. A judge of --gold is asked about each.
        With --on-bad-format floor, a malformed completion gets the lowest reward of its group minus a margin.
        One without a reward (a judge failed) keeps NaN, and its advantage is 0.

        Args:
            completions: whole groups. All processes have equally many.
            model: the policy, whose entropies some rewards read.
        """
        self._flush()
        for batch in self._scoring:
            batch.result()  # waits, and raises what the thread raised
        self._scoring = []
        set_gold(self.gold, completions)

        if self.needs_entropies:
            set_entropy_statistics(
                model,
                completions,
                self.args.micro_batch_tokens,
                self.tokenizer.pad_token_id,
                self.accelerator,
            )
        if self.reward_function is None:
            totals = [completion.rewards["preference"] for completion in completions]
        else:
            totals = self._combine_parts(completions, group_size)
        self._set_rewards(completions, totals, group_size)

    def _combine_parts(self, completions: list, group_size: int) -> list[float | None]:
        """Returns the totals of this process's completions; the main process, which asks the judge, combines them."""
        rows = gather_object([completion.row() for completion in completions])
        scores = None
        if self.accelerator.is_main_process:
            scores = self.reward_function(rows, group_size)
        scores = broadcast_object_list([scores])[0]

        own_places = share_of(list(range(len(rows))), self.accelerator)
        for place, completion in zip(own_places, completions, strict=True):
            completion.correct = scores.correct[place]
            for name, values in scores.parts.items():
                completion.rewards[name] = values[place]
            for name, values in scores.contributions.items():
                completion.contributions[name] = values[place]
        return [scores.totals[place] for place in own_places]

    def _set_rewards(self, completions: list, totals: list[float | None], group_size: int) -> None:
        """Sets `reward`: the total, NaN if there is none, or a floor for a malformed completion."""
        own_totals = []
        own_floored = []
        for completion, total in zip(completions, totals, strict=True):
            gets_floor = rewards.gets_floor(completion.status, self.args)
            own_totals.append(math.nan if total is None else total)
            own_floored.append(gets_floor)
            if gets_floor:  # the floor takes the place of what the parts add
                completion.contributions = dict.fromkeys(completion.contributions)

        # a floor depends on the whole group, and PPO's group is spread over all processes
        all_totals = torch.tensor(gather_object(own_totals))
        all_floored = torch.tensor(gather_object(own_floored))
        all_rewards = set_floors(all_totals, all_floored, group_size, self.args.format_margin).tolist()
        own_rewards = share_of(all_rewards, self.accelerator)
        for completion, reward in zip(completions, own_rewards, strict=True):
            completion.reward = reward

    def measure(self, completions: list) -> float | None:
        """Sets preference and gold of completions that nothing is trained on; all processes call it.

        Returns the share of the texts that a reward model as gold cut; None with another gold.
        """
        if self.reward_model is None:
            for completion in completions:
                completion.rewards["preference"] = None
        else:
            self._score_by_model(completions)
        set_gold(self.gold, completions)
        return self.metrics().get("gold/truncated")  # which also begins a new count, of training steps only

    def metrics(self) -> dict[str, float]:
        """Returns the share of all processes' texts that each reward model cut since the last call."""
        shares = {}
        if self.reward_model is not None:
            shares["reward/truncated"] = self._share_truncated(self.reward_model)
        if isinstance(self.gold, RewardModel):
            shares["gold/truncated"] = self._share_truncated(self.gold)
        return shares

    def _share_truncated(self, model: RewardModel) -> float:
        """Returns the share of all processes' texts that a model cut, and begins a new count."""
        counts = torch.tensor([model.n_truncated, model.n_scored], device=self.accelerator.device)
        truncated, scored = self.accelerator.reduce(counts, "sum").tolist()
        model.n_truncated = 0
        model.n_scored = 0
        return truncated / max(1, scored)


def text_to_score(completion, args) -> str | None:
    """Returns the text that the reward model scores for a completion; None if it gets a floor instead."""
    if rewards.gets_floor(completion.status, args):
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


def set_preferences(reward_model, completions: list, texts: list[str | None]) -> None:
    """Sets rewards["preference"] to the score of each text; a completion whose text is None gets None."""
    scored = []
    for completion, text in zip(completions, texts, strict=True):
        completion.rewards["preference"] = None
        if text is not None:
            scored.append(completion)
    messages = [completion.messages for completion in scored]
    scores = reward_model.score(messages, [text for text in texts if text is not None])
    beat()
    for completion, score in zip(scored, scores, strict=True):
        if not math.isfinite(score):
            raise RuntimeError(
                f"the reward model gave {score} for prompt {completion.messages} "
                f"and completion {completion.text!r}"
            )
        completion.rewards["preference"] = score


def set_gold(measure, completions: list) -> None:
    """Sets rewards["gold"] by `measure`, see gold.load_gold; does nothing if it is None."""
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


def set_floors(
    totals: torch.Tensor, gets_floor: torch.Tensor, group_size: int, margin: float
) -> torch.Tensor:
    """Returns totals (P*G,), where a completion that gets a floor has the lowest known other one of its group - margin.

    NaN means "not known". In a group without another known one the floor is -margin.
    """
    groups = totals.view(-1, group_size)
    gets_floor = gets_floor.view(-1, group_size)
    known = ~groups.isnan() & ~gets_floor
    lowest = groups.masked_fill(~known, math.inf).amin(1, keepdim=True)
    lowest = torch.where(lowest.isinf(), 0.0, lowest)  # nothing is known in the group
    return torch.where(gets_floor, lowest - margin, groups).view(-1)
