"""Gives each completion its reward: the values of all parts, then one total, with floors.

A group is the G completions of a prompt in GRPO, next to each other, and all completions of a step in PPO.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from rewards import DENSE, VERIFIERS, Scored, call, combine, read_parts, verdict
from rewards.shared import Values, has_field
from rlmt.model import set_entropy_statistics
from rlmt.sampler import share_of
from utils import THINK_FORMATS


def gets_floor(status: str, args) -> bool:
    """Tells whether a completion of this status gets a floor in place of its reward."""
    return status != "ok" and args.on_bad_format == "floor"


class Scorer:
    """Rewards the completions of a step; `args` are the training script's, and `run` keeps the judge's replies."""

    def __init__(self, args, tokenizer, run: Path, accelerator: Accelerator):
        self.args = args
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.parts = [part for part in read_parts(args) if part.name not in DENSE]
        names = [part.name for part in self.parts]
        self.is_preference_alone = names == ["preference"] and self.parts[0].weight == 1
        self.reward_name = "preference" if self.is_preference_alone else "total"
        self.needs_entropies = "self_certainty" in names or "negative_entropy" in names
        device = str(accelerator.device)
        self.reward_model = None
        if "preference" in names:
            from rewards.preference import load_reward_model

            self.reward_model = load_reward_model(args, device)
        self.gold = None
        if args.gold:
            from rewards.gold import load_gold

            self.gold = load_gold(args, device, run)
        self.judge = None
        if any("judge" in part.asks for part in self.parts) and accelerator.is_main_process:
            from rewards.judged import judge_endpoint

            self.judge = judge_endpoint(args, self.parts, run)

        self._thread = None
        self._stream = None
        if torch.cuda.is_available():  # a second thread scores completions while others are still sampled
            device_index = torch.cuda.current_device()  # a new thread would take GPU 0, and memory of it
            self._thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device_index,))
            self._stream = torch.cuda.Stream()
        # Not on a CPU: the second thread would bring its OpenMP threads, and where OpenMP has more threads than there
        # are cores it stops to wait actively, which makes every operation of the first thread slower.
        self._waiting = []  # completions of a batch that is not full yet
        self._scoring = []  # a future for each batch that the thread has been given

    # --- the preference, while others are sampled

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
        if self._waiting and self._thread:
            self._scoring.append(self._thread.submit(self._set_preferences, self._waiting))
        elif self._waiting:
            self._set_preferences(self._waiting)
        self._waiting = []

    def _set_preferences(self, completions: list) -> None:
        texts = [text_to_score(completion, self.args) for completion in completions]
        with torch.cuda.stream(self._stream):  # does nothing without a GPU, where the stream is None
            scores = preferences_of(self.reward_model, completions, texts)
        for completion, score in zip(completions, scores, strict=True):
            completion.rewards["preference"] = score

    # --- all parts

    def set_rewards(self, completions: list, group_size: int, model: torch.nn.Module) -> None:
        """Sets rewards (gold too), contributions, correct and reward of this process's completions.

        All processes call it. Every completion was handed to `enqueue` before. A judge of --gold is asked about each.
        One without a reward (a judge failed) gets NaN, and its advantage is 0.

        Args:
            completions: whole groups. All processes have equally many.
            model: the policy, whose entropies some rewards read.
        """
        self._flush()
        for batch in self._scoring:
            batch.result()  # waits, and raises what the thread raised
        self._scoring = []
        if self.needs_entropies:
            set_entropy_statistics(
                model,
                completions,
                self.args.micro_batch_tokens,
                self.tokenizer.pad_token_id,
                self.accelerator,
            )
        rows = []
        for completion in completions:
            row = {
                **completion.prompt,
                **completion.row(),
                "gets_floor": gets_floor(completion.status, self.args),
            }
            rows.append(row)
        values = {part.name: self._values(part, rows, group_size) for part in self.parts}
        scored = []
        for i, row in enumerate(rows):
            of_row = {name: column[i] for name, column in values.items()}
            applies = {part.name: not part.field or has_field(row, part.field) for part in self.parts}
            scored.append(Scored(of_row, applies, row["gets_floor"]))

        # a floor depends on the whole group, and PPO's group is spread over all processes
        totals, contributions = combine(
            gather_object(scored), self.parts, group_size, self.args.format_margin
        )
        # in float32, as the trainer computes with them; NaN where there is none
        rounded = torch.tensor([math.nan if total is None else total for total in totals]).tolist()
        own_totals = share_of(rounded, self.accelerator)
        own_contributions = share_of(contributions, self.accelerator)
        golds = gold_of(self.gold, completions)
        has_verifier = any(part.name in VERIFIERS for part in self.parts)
        for i, completion in enumerate(completions):
            completion.rewards |= golds[i] | scored[i].values
            completion.reward = own_totals[i]
            if has_verifier:
                completion.correct = verdict(rows[i], scored[i].values, self.parts)
            if not self.is_preference_alone:
                completion.contributions = own_contributions[i]

    def _values(self, part, rows: list[dict], group_size: int) -> Values:
        """Returns the values of a part for this process's rows; the main process asks a judge about those of all."""
        given = {"group_size": group_size, "max_tokens": self.args.max_completion_tokens, "judge": self.judge}
        if part.name == "preference":
            return [row["rewards"]["preference"] for row in rows]
        if "judge" not in part.asks:
            return call(part, rows, given)
        every = gather_object(rows)
        values = None
        if self.accelerator.is_main_process:
            values = call(part, every, given)
        return share_of(broadcast_object_list([values])[0], self.accelerator)

    def measure(self, completions: list) -> float | None:
        """Sets preference and gold of completions that nothing is trained on; all processes call it.

        Returns the share of the texts that a reward model as gold cut; None with another gold.
        """
        for completion in completions:
            completion.rewards["preference"] = None
        if self.reward_model is not None:
            self._set_preferences(completions)
        for completion, gold in zip(completions, gold_of(self.gold, completions), strict=True):
            completion.rewards |= gold
        return self.pop_truncated().get("gold/truncated")  # the next count is of training steps only

    def pop_truncated(self) -> dict[str, float]:
        """Returns the share of all processes' texts that each reward model cut since the last call."""
        shares = {}
        for name, model in (("reward/truncated", self.reward_model), ("gold/truncated", self.gold)):
            if not hasattr(model, "n_truncated"):  # none, or a gold that is a function or a judge
                continue
            counts = torch.tensor([model.n_truncated, model.n_scored], device=self.accelerator.device)
            truncated, n_scored = self.accelerator.reduce(counts, "sum").tolist()
            shares[name] = truncated / max(1, n_scored)
            model.n_truncated = 0
            model.n_scored = 0
        return shares


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
            raise RuntimeError(
                f"the reward model gave {score} for prompt {completions[place].messages} "
                f"and completion {completions[place].text!r}"
            )
        values[place] = score
    return values


def gold_of(measure, completions: list) -> list[dict[str, float | None]]:
    """Returns {"gold": value} of each completion by `measure`, see gold.load_gold; {} if that is None."""
    if measure is None:
        return [{}] * len(completions)
    messages = [completion.messages for completion in completions]
    responses = [completion.response for completion in completions]
    golds = []
    for completion, value in zip(completions, measure(messages, responses), strict=True):
        if not isinstance(value, float) or math.isinf(value):
            raise RuntimeError(
                f"--gold gave {value!r} for prompt {completion.messages} and completion {completion.text!r}; "
                "it must be a finite float, or NaN for no value"
            )
        golds.append({"gold": None if math.isnan(value) else value})
    return golds
