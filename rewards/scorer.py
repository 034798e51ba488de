"""Gives each completion its reward: the values of all parts, then one total, with floors.

    scorer = Scorer(args, args.rewards, tokenizer, accelerator, args.group_size)    # reads the flags
    scorer.check(prompts, run.folder, n_completions)                                # asks judges, loads nothing
    learners |= scorer.load_dense(policy, run.checkpoint)                           # what learns behind rewards
    scorer.load(run.folder)
    scorer.set_rewards(completions, policy)

A group is the G completions of a prompt in GRPO, next to each other, and all completions of a step in PPO.
"""

import functools
from math import isfinite, isnan, nan
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from rewards import DENSE, UNSUPERVISED, VERIFIERS, Part, Values, has_field, in_groups, read_parts
from rewards.gold import Gold
from rlmt.learner import Learner
from rlmt.sampler import completion_metrics, share_of, warn_of_no_lesson
from rlmt.scorers import Who, connect, load_function
from utils import THINK_FORMATS, fail, or_fail


class Scorer:
    """Reads `--rewards` and `--gold`, checks and loads what they name, and scores the completions of a step."""

    def __init__(
        self,
        args,
        rewards: list[str],
        tokenizer,
        accelerator: Accelerator,
        group_size: int,
        on_bad_format: str = "floor",
        format_margin: float = 1.0,
    ):
        """Exits with 2 for rewards that cannot be, or that cannot score the format of the run.

        Args:
            args: the training script's ScoreArgs; RLArgs if one of the rewards asks a judge.
            group_size: completions of a prompt.
        """
        self.args = args
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.group_size = group_size
        self.on_bad_format = on_bad_format
        self.format_margin = format_margin
        self.parts = read_parts(rewards, args.reward_args)
        self.reward_name = "total"
        of_outcome = self.parts.keys() - set(DENSE)
        if of_outcome == {"preference"} and self.parts["preference"].weight == 1:
            self.reward_name = "preference"
        if args.gold_prompts and not args.gold:
            fail("--gold-prompts needs --gold: what the completions are measured by")
        self.gold = Gold(args, accelerator)
        self.readers = []
        """Tokenizers of reward models, which read each prompt."""
        if "preference" in self.parts:
            from rlmt.reward_model import check_preference

            template = self.parts["preference"].options["chat_template"]
            self.readers.append(
                check_preference(args.reward_model, template, args.reward_on, args.think_format)
            )
        if self.gold.tokenizer:
            self.readers.append(self.gold.tokenizer)
        self.reward_model = None
        self.judge = None
        self.dense = []
        """Sources of dense rewards."""
        self.collapse = None

    # --- before the loop

    def check(
        self,
        prompts: list[dict],
        run: Path,
        n_completions: int,
        has_reference: bool = True,
        needs_verdicts: bool = False,
    ) -> None:
        """Checks the rewards and the gold, and prints to how many prompts each reward applies.

        Sends judges their first request, so that a wrong key or URL is found before models load. Exits with 2 if something
        is wrong.

        Args:
            run: the folder of the judges' replies, whose cost counts in the budget.
            n_completions: of a step or round, over all processes.
            has_reference, needs_verdicts: what the algorithm has and needs.
        """
        for part in self.parts.values():
            self._check_part(part, prompts)
        if (needs_verdicts or "prime" in self.parts) and not VERIFIERS.keys() & self.parts.keys():
            fail(
                "--rewards prime and --scale-rewards pass_at_k need to know what is right; add one of "
                f"{', '.join(VERIFIERS)} to --rewards"
            )
        if "prime" in self.parts and not has_reference:
            fail(
                "--rewards prime compares with the reference model; use --beta above 0 (GRPO) or another --kl (PPO)"
            )
        if "process" in self.parts:
            if not self.parts["process"].options["model"]:
                fail("--rewards process needs --reward-args process.model=file.py:function")
            load_function(self.parts["process"].options["model"])
        if "code" in self.parts:
            from rlmt import sandbox

            sandbox.check_can_run(self.parts["code"].options["unsafe"])
        for part in self.parts.values():
            if "judge" in part.asks and self.accelerator.is_main_process:
                from rewards.judged import try_judge

                prompt = next(filter(part.applies, prompts))
                ask = functools.partial(self._call, part)
                try_judge(self._judge(run), ask, prompt, "--judge")
        self.gold.try_judge(prompts[0], run, n_completions)

    def _check_part(self, part: Part, prompts: list[dict]) -> None:
        if "group_size" in part.asks and self.group_size == 1:
            fail(f"--rewards {part.name} compares the completions of one prompt; PPO has one of each")
        if "judge" in part.asks and not self.args.judge:
            fail(f"--rewards {part.name} asks a judge; give --judge, and --judge-url")
        with_field = [prompt for prompt in prompts if part.applies(prompt)]
        if not with_field:
            fail(f"--rewards {part.name}: no row of {self.args.prompts} has the field {part.field!r}")
        read_field = getattr(part.function, "read_field", None)
        if read_field:  # raises ValueError for a row whose field it cannot read
            for prompt in with_field:
                or_fail(read_field, prompt)
        rule = "gate" if part.weight is None else f"weight {part.weight:g}"
        self.accelerator.print(
            f"reward {part.name}: {rule}, options {part.options}; applies to {len(with_field)} of {len(prompts)} "
            "prompts"
        )

    def _judge(self, run: Path):
        """Returns the client of --judge."""
        who = Who("endpoint", self.args.judge, self.args.judge_url)
        return connect(who, run / "judge.jsonl", self.args, fresh=self.args.overwrite)

    def load_dense(self, policy: Learner, checkpoint: Path | None) -> dict[str, Learner]:
        """Loads dense rewards; returns what learns of them, by its name in a checkpoint."""
        if not set(DENSE) & self.parts.keys():
            return {}
        from rewards.dense import load_dense

        self.dense = load_dense(self.parts, self.args, checkpoint, policy, self.tokenizer)
        return {source.name: source.learner for source in self.dense if source.learner}

    def load(self, run: Path) -> None:
        """Loads the reward models, and connects with the judges. `run`: the folder of their replies."""
        device = str(self.accelerator.device)
        self.gold.load(device, run)
        if "preference" in self.parts:
            from rlmt.reward_model import RewardModel

            self.reward_model = RewardModel(
                self.args.reward_model,
                self.args.reward_on,
                self.args.think_format,
                self.parts["preference"].options["chat_template"],
                device,
                self.args.dtype,
            )
        if self.accelerator.is_main_process and any("judge" in part.asks for part in self.parts.values()):
            self.judge = self._judge(run)
        if any(part.name in UNSUPERVISED and part.weight for part in self.parts.values()):
            from rewards.unsupervised import Collapse

            self.collapse = Collapse(run, self.group_size)

    def close(self) -> None:
        """Frees the reward models."""
        self.reward_model = self.gold.model = None

    # --- the rewards of a step

    def set_rewards(self, completions: list, policy: Learner) -> None:
        """Sets rewards (gold too), correct and reward of this process's completions; all processes call it.

        A completion whose judge of --rewards failed, or to which no reward with a weight applies, gets NaN,
        and its advantage is 0. A judge of --gold is asked about every completion.

        Args:
            completions: whole groups. All processes have equally many.
            policy: some rewards read its entropies.
        """
        if "self_certainty" in self.parts or "negative_entropy" in self.parts:
            from rewards.unsupervised import set_entropy_statistics

            set_entropy_statistics(policy, completions)
        rows = []
        for completion in completions:
            completion.gets_floor = completion.status != "ok" and self.on_bad_format == "floor"
            rows.append(completion.prompt | completion.row())
        columns = {}
        for part in self.parts.values():
            if part.name not in DENSE:
                columns[part.name] = self._values(part, completions, rows)
        golds = self.gold.of(completions)
        totals = []
        for i, completion in enumerate(completions):
            values = {name: column[i] for name, column in columns.items()}
            totals.append(add_up(rows[i], values, self.parts))
            completion.gets_floor = rows[i]["gets_floor"] = totals[-1][1]  # now that of a gate, too
            completion.rewards |= values | golds[i]
            completion.correct = correctness(rows[i], values)

        # a floor depends on the whole group, which in PPO is spread over all processes
        totals = gather_object(totals)
        group_size = self.group_size if self.group_size > 1 else len(totals)
        rewards = set_floors(totals, group_size, self.format_margin)
        for completion, reward in zip(completions, share_of(rewards, self.accelerator), strict=True):
            completion.reward = np.float32(reward).item()  # as the trainer computes with it

    def _values(self, part: Part, completions: list, rows: list[dict]) -> Values:
        """Returns the values of a part for this process's rows; the main process asks a judge about those of
        all."""
        if part.name == "preference":
            return self._preferences(completions)
        if "judge" not in part.asks:
            return self._call(part, rows)
        every = gather_object(rows)
        values = None
        if self.accelerator.is_main_process:
            values = self._call(part, every, self.judge)
        return share_of(broadcast_object_list([values])[0], self.accelerator)

    def _call(self, part: Part, rows: list[dict], judge=None) -> Values:
        return call(part, rows, judge, self.group_size, self.args.max_completion_tokens)

    def _preferences(self, completions: list) -> Values:
        """Returns the reward model's score of each completion; None for one that gets a floor."""
        texts = [self._text_to_score(completion) for completion in completions]
        indices = [index for index, text in enumerate(texts) if text is not None]
        messages = [completions[index].messages for index in indices]
        scores = self.reward_model.score(messages, [texts[index] for index in indices])
        values = [None] * len(completions)
        for index, score in zip(indices, scores, strict=True):
            if not isfinite(score):
                raise RuntimeError(f"the reward model gave {score} for {messages} and {texts[index]!r}")
            values[index] = score
        return values

    def _text_to_score(self, completion) -> str | None:
        """Returns the text that the reward model scores for a completion; None if it gets a floor instead."""
        if completion.status == "ok" or self.on_bad_format == "score":
            return completion.text
        if self.on_bad_format == "floor":
            return None
        # "null", the strict mode of the released code, wants the tag that opens the response; a Zero format
        # also needs the one that closes it, behind that
        expected = THINK_FORMATS[self.args.think_format]
        start = completion.text.find(expected.opens_response)
        if start < 0 or expected.stop not in completion.text[start:]:
            return "[NULL]"
        return completion.text

    def measure(self, completions: list) -> None:
        """Sets preference and gold of completions that nothing is trained on; all processes call it."""
        preferences = [None] * len(completions)
        if self.reward_model:
            preferences = self._preferences(completions)
        golds = self.gold.of(completions)
        for completion, preference, gold in zip(completions, preferences, golds, strict=True):
            completion.rewards = {"preference": preference} | gold

    # --- what is logged

    def metrics(self, completions: list) -> dict[str, float]:
        """Returns what is logged of a step's completions, those of all processes."""
        metrics = completion_metrics(completions)
        if self.collapse:
            metrics |= self.collapse.indicators(completions)
        return metrics

    def check_step(self, step: int, metrics: dict[str, float], completions: list) -> str:
        """Warns at the beginning if nothing can be learned; returns why the run should end after this step, or ""."""
        warn_of_no_lesson(step, metrics, completions)
        if self.collapse:
            return self.collapse.check(step, metrics, completions)
        return ""

    def pop_truncated(self) -> dict[str, float]:
        """Returns the share of all processes' texts that each reward model cut since the last call."""
        shares = {}
        for name, model in (("reward/truncated", self.reward_model), ("gold/truncated", self.gold.model)):
            if model:  # not of a gold that is a function or a judge
                cut = gather_object(model.cut)
                shares[name] = sum(cut) / max(1, len(cut))
                model.cut = []
        return shares


# --- from values to one total


def call(part: Part, rows: list[dict], judge, group_size: int, max_tokens: int) -> Values:
    """Calls a reward function on the rows to which it applies, with its options and what it asks for of
    CONTEXT; checks what it returns."""
    given = {"judge": judge, "group_size": group_size, "max_tokens": max_tokens}
    asked = {key: given[key] for key in part.asks}
    indices = [index for index, row in enumerate(rows) if part.applies(row)]
    found = part.function([rows[index] for index in indices], **asked, **part.options)
    try:
        is_right = len(found) == len(indices) and all(value is None or isfinite(value) for value in found)
    except TypeError:  # no list, or no numbers
        is_right = False
    if not is_right:
        fail(
            f"reward {part.name} must return a list with a finite number or None for each of {len(indices)} rows, "
            f"not {str(found)[:200]}"
        )
    values = [None] * len(rows)
    for index, value in zip(indices, found, strict=True):
        if value is not None:
            values[index] = float(value)
    return values


def correctness(row: dict, values: dict[str, float | None]) -> float | None:
    """Returns what the verifiers say of a row: 1 right, 0 wrong, None where none of them has a value.

    A row is right if it has the whole value of the first verifier that has one. A penalty, or a part of the
    tests, is wrong. So is a row that gets a floor; no judge has seen it.
    """
    for name, field in VERIFIERS.items():
        if name not in values or not has_field(row, field):
            continue
        if row["gets_floor"]:
            return 0.0
        if values[name] is not None:
            return float(values[name] >= 1)
    return None


def add_up(row: dict, values: dict[str, float | None], parts: dict[str, Part]) -> tuple[float, bool]:
    """Returns the sum of weight * value over the parts that apply to a row, and whether it gets a floor
    instead.

    It gets one if it fails a gate, too: a value below 1. The sum is NaN where a part that applies has no
    value, or where no part with a weight applies.
    """
    gets_floor = row["gets_floor"]
    weighted = []
    for name, value in values.items():
        part = parts[name]
        if not part.applies(row):
            continue
        if value is None and part.weight == 0:  # it is only logged
            continue
        if value is None:
            weighted.append(nan)
        elif part.weight is None:
            gets_floor |= value < 1
        else:
            weighted.append(part.weight * value)
    total = nan
    if weighted:
        total = sum(weighted)
    return total, gets_floor


def set_floors(totals: list[tuple[float, bool]], group_size: int, margin: float) -> list[float]:
    """Returns the rewards: the sums of `add_up`, and as floor `margin` less than the lowest of the group's
    others.

    Without others the lowest is 0.
    """
    rewards = []
    for group in in_groups(totals, group_size):
        others = [total for total, gets_floor in group if not gets_floor and not isnan(total)]
        floor = min(others, default=0.0) - margin
        for total, gets_floor in group:
            if gets_floor:
                total = floor
            rewards.append(total)
    return rewards
