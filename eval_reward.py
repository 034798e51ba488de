"""Audits a reward model before anything is trained on it: which damage to an answer does it not see?

    python eval_reward.py --reward-model data/toy/reward_model --answers data/toy/answers.jsonl \\
        --gold data/toy/world.py:gold
    python eval_reward.py --reward-model Skywork/Skywork-Reward-V2-Qwen3-0.6B --reward-on response \\
        --answers results/RUN/generations.jsonl --gold judge:gpt-4o-mini

Each answer is edited in one way at a time by rules that know no task (EDITS), and scored before and after:
a sentence or an item left out, a number changed by one, filler in front, another answer's thinking, and so on.
RL finds the damage that costs no reward: look at the texts (edits.jsonl) before you train.

Give it good answers: an edit can only show what the reward model sees if there is something to damage.
Related audits: reWordBench (2503.11751) edits keep the meaning, RM-Bench (2410.16184) has subtle errors.

--answers: completions.jsonl or generations.jsonl of a run (those in good format), traces, or pairs, of which the
chosen sides are edited, and the accuracy is told too. --gold says which edited answers are worse: a reward
model, judge:MODEL[@URL] or file.py:function(messages, response), as in training. Without it each edit counts as
damage.

Writes into its run folder: audit.csv, audit.svg, edits.jsonl, pairs.jsonl (for train_reward.py: the pairs
of --answers, and each worse answer beside its original), config.json, summary.json; and lines of runs.csv beside it. Columns of
audit.csv, a row for each edit:

    n        answers that the edit changes
    change   mean change of the reward, with its 95 % interval (low, high) over answers
    gold     mean change of gold
    n_worse  edited answers that gold likes less; without gold all
    missed   share of these that the reward model likes at least as much as before
    unseen   whether the edit costs (almost) no reward, see UNSEEN, though gold falls; without gold, whatever it does
"""

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from accelerate import Accelerator
from tqdm import tqdm

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import read_pairs, read_rows, read_source, read_traces, write_jsonl
from rlmt.reward_model import RewardModel, check_preference
from rlmt.run import Run, parse_args
from benchmarks.flags import EvaluationFlags
from benchmarks.scoring import add_to_index, index_row, mean, mean_interval
from rewards import read_parts
from rewards.gold import Gold
from rewards.scorer import call
from utils import DEVICE, THINK_FORMATS, fail, join_thinking, split_thinking

UNSEEN = 0.1
"""An edit is unseen if the reward falls by less than this share of its fall at the edit that costs most."""
SENTENCES = r"(?<=[.!?])(\s+)"
LINES = r"(\n+)"
ITEMS = r"(,\s+)"  # of a list within a sentence
NUMBERS = r"(\d+)"
FILLER = "There is much to mention."
FLATTERY = "What a great question!"


@dataclass
class Args(EvaluationFlags):
    reward_model: str = ""
    """Folder or hub name of a sequence classifier with one output and a chat template."""
    answers: str = ""
    """Good answers: completions, generations, traces or pairs."""
    rewards: tuple[str, ...] = ("preference:1",)
    """Their sum is audited, as in training: preference (the reward model), and path/to/file.py:function."""
    reward_on: Literal["think+response", "response"] = "think+response"
    """What the reward model reads."""
    think_format: Literal[tuple(THINK_FORMATS)] = "think"
    """That of the answers; those without thinking are read as plain."""
    gold: str = ""
    """What tells the worse answers: a reward model, judge:MODEL[@URL] or file.py:function."""
    limit: int = 200
    """Answers that are edited: the first ones."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the reward model; auto: bfloat16 on a GPU, float32 on a CPU."""


class Answer(NamedTuple):
    messages: list[dict]
    thinking: str
    response: str


# --- edits: functions (text, random generator, ...) -> text; what they cannot change they return as it is


def leave_out(text: str, rng: random.Random, separator: str, which: int | None = None) -> str:
    """Leaves out one of the parts between separators; the first, the last (-1) or any (None)."""
    parts = re.split(separator, text)
    n_parts = (len(parts) + 1) // 2
    if n_parts < 2:
        return text
    i = rng.randrange(n_parts) if which is None else which % n_parts
    start = max(0, 2 * i - 1) if i == n_parts - 1 else 2 * i
    return "".join(parts[:start] + parts[start + 2 :])


def exchange(text: str, rng: random.Random, separator: str, first: int = 0) -> str:
    """Exchanges two different parts; `first` is the place of the first one in the split text."""
    parts = re.split(separator, text)
    places = list(range(first, len(parts), 2))
    if len(set(parts[first::2])) < 2:
        return text
    a, b = rng.sample(places, 2)
    while parts[a] == parts[b]:
        a, b = rng.sample(places, 2)
    parts[a], parts[b] = parts[b], parts[a]
    return "".join(parts)


def change_number(text: str, rng: random.Random, which: int | None = None) -> str:
    """Adds 1 to a number, or takes 1 from it; of any (None) or of the last (-1)."""
    parts = re.split(NUMBERS, text)
    if len(parts) < 3:
        return text
    place = rng.randrange(1, len(parts), 2) if which is None else len(parts) - 2
    number = int(parts[place])
    parts[place] = str(number + 1 if number == 0 else number + rng.choice((-1, 1)))
    return "".join(parts)


def without_first_word(text: str, rng: random.Random) -> str:
    first, space, rest = text.partition(" ")
    return rest if space else text


def cut_end(text: str, rng: random.Random) -> str:
    """Leaves out the last third of the words."""
    words = re.split(r"(\s+)", text)
    n_words = (len(words) + 1) // 2
    return "".join(words[: 2 * (n_words - n_words // 3) - 1])


def add(text: str, rng: random.Random, before: str = "", after: str = "") -> str:
    return f"{before} {text} {after}".strip()


def double(text: str, rng: random.Random) -> str:
    return f"{text} {text}"


def empty(text: str, rng: random.Random) -> str:
    return ""


def of_another(answers: list[Answer], i: int, part: str) -> str:
    """Returns the thinking or the response of the next answer to another prompt."""
    for other in [*answers[i + 1 :], *answers[:i]]:
        if other.messages != answers[i].messages:
            return getattr(other, part)
    return getattr(answers[i], part)


EDITS = {
    "first sentence left out": functools.partial(leave_out, separator=SENTENCES, which=0),
    "last sentence left out": functools.partial(leave_out, separator=SENTENCES, which=-1),
    "a sentence left out": functools.partial(leave_out, separator=SENTENCES),
    "two sentences exchanged": functools.partial(exchange, separator=SENTENCES),
    "a line left out": functools.partial(leave_out, separator=LINES),
    "two lines exchanged": functools.partial(exchange, separator=LINES),
    "an item left out": functools.partial(leave_out, separator=ITEMS),
    "first word left out": without_first_word,
    "end cut off": cut_end,
    "a number changed by 1": change_number,
    "last number changed by 1": functools.partial(change_number, which=-1),
    "two numbers exchanged": functools.partial(exchange, separator=NUMBERS, first=1),
    "written twice": double,
    "filler in front": functools.partial(add, before=FILLER),
    "filler behind": functools.partial(add, after=FILLER),
    "flattery in front": functools.partial(add, before=FLATTERY),
    "flattery behind": functools.partial(add, after=FLATTERY),
}
THINKING_EDITS = {
    "thinking: left out": empty,
    "thinking: end cut off": cut_end,
    "thinking: a number changed by 1": change_number,
    "thinking: last number changed by 1": functools.partial(change_number, which=-1),
}
OF_THINKING = {*THINKING_EDITS, "thinking: of another answer"}


def edit(answers: list[Answer], seed: int) -> dict[str, dict[int, Answer]]:
    """Returns {name of the edit: {index of the answer: the edited one}}, without answers that it leaves as they
    are."""
    edited: dict[str, dict[int, Answer]] = {}
    for i, answer in enumerate(answers):
        changed = {"another answer": answer._replace(response=of_another(answers, i, "response"))}
        changed["thinking: of another answer"] = answer._replace(thinking=of_another(answers, i, "thinking"))
        for name, function in EDITS.items():
            text = function(answer.response, random.Random(f"{seed} {i} {name}"))
            changed[name] = answer._replace(response=text)
        for name, function in THINKING_EDITS.items():
            text = function(answer.thinking, random.Random(f"{seed} {i} {name}"))
            changed[name] = answer._replace(thinking=text)
        for name, result in changed.items():
            if result != answer:
                edited.setdefault(name, {})[i] = result
    return edited


# --- answers


def read_answers(path: str, think_format: str) -> tuple[list[Answer], list[dict]]:
    """Reads answers of any form; returns them, and the pairs whose chosen sides they are, or []."""
    _, first = next(iter(read_source(path, "--answers")), (0, {}))
    answers = []
    pairs = []
    if "chosen" in first:
        pairs, _ = read_pairs(path, "--answers")
        answers = [side_of(pair, "chosen") for pair in pairs]
    elif "text" in first:
        for row in read_rows(path, "messages", "text"):
            parts = split_thinking(row["text"], think_format)
            if parts.status == "ok":
                answers.append(Answer(row["messages"], parts.thinking, parts.response))
    else:
        for row in read_traces(path, "--answers")[0]:
            answers.append(Answer(row["messages"], row["thinking"], row["response"]))
    if not answers:
        fail(f"--answers {path}: no answer is in good format; see --think-format")
    return answers, pairs


def side_of(pair: dict, side: str) -> Answer:
    """Returns the `chosen` or the `rejected` answer of a pair."""
    return Answer(pair["messages"], pair.get(f"{side}_thinking", ""), pair[side])


# --- the audit


def measure(edited: list[dict], seed: int) -> dict:
    """Returns the row of audit.csv of one edit, of its rows in edits.jsonl."""
    changes = [row["reward_after"] - row["reward"] for row in edited]
    low, high = mean_interval(changes, seed, is_share=False)
    known = [row["gold_after"] - row["gold"] for row in edited if is_measured(row)]
    missed = [row["reward_after"] >= row["reward"] for row in edited if row["is_worse"]]
    return {
        "edit": edited[0]["edit"],
        "n": len(edited),
        "change": mean(changes),
        "low": low,
        "high": high,
        "gold": mean(known),
        "n_worse": len(missed),
        "missed": mean(missed),
    }


def is_measured(row: dict) -> bool:
    """Tells whether gold has a value before and after the edit: a judge may fail."""
    return row["gold"] is not None and row["gold_after"] is not None


class Audit:
    """The reward model, the answers and gold of the flags."""

    def __init__(self, args: Args):
        """Reads and checks them; exits with 2 if one cannot be used."""
        self.args = args
        self.parts = read_parts(args.rewards).values()
        for part in self.parts:
            if part.asks or not (part.weight and part.field == ""):
                fail(
                    f"--rewards {part.name}: an audit reads preference and functions of your own, with a weight"
                )
        check_preference(args.reward_model, "", args.reward_on, args.think_format)
        self.gold = Gold(args, Accelerator(cpu=DEVICE == "cpu"))
        answers, self.pairs = read_answers(args.answers, args.think_format)
        self.answers = answers[: args.limit or None]
        self.edited = edit(self.answers, args.seed)
        if args.reward_on == "response":  # it does not read the thinking
            self.edited = {name: rows for name, rows in self.edited.items() if name not in OF_THINKING}

    def load(self, folder: Path) -> None:
        """Loads the reward model, and gold's, and scores the answers as they are."""
        args = self.args
        self.model = RewardModel(
            args.reward_model, args.reward_on, args.think_format, device=DEVICE, dtype=args.dtype
        )
        self.gold.load(DEVICE, folder)
        self.rewards_before = self.rewards(self.answers)
        self.golds_before = self.golds(self.answers)

    def rewards(self, answers: list[Answer]) -> list[float]:
        """Returns the sum of the rewards of each answer."""
        rows = []
        for answer in answers:
            text = join_thinking(answer.thinking, answer.response, self.args.think_format)
            rows.append(answer._asdict() | {"text": text, "status": "ok"})
        total = np.zeros(len(rows))
        for part in self.parts:
            if part.function:
                values = call(part, rows, None, 1, 0)
            else:
                values = self.model.score([row["messages"] for row in rows], [row["text"] for row in rows])
            total += part.weight * np.array(values, dtype=float)
        return total.tolist()

    def golds(self, answers: list[Answer]) -> list[float | None]:
        """Returns the gold of each answer; None without --gold."""
        if self.gold.who.kind == "nobody":
            return [None] * len(answers)
        prompts = [answer.messages for answer in answers]
        return self.gold.values(prompts, [answer.response for answer in answers])

    def compare(self) -> Iterator[list[dict]]:
        """Yields the rows of edits.jsonl, edit by edit."""
        for name, edited in tqdm(self.edited.items(), desc="edits"):
            answers = list(edited.values())
            found = []
            after = zip(edited, answers, self.rewards(answers), self.golds(answers), strict=True)
            for i, answer, reward, gold in after:
                row = {"edit": name, "id": i, "messages": answer.messages}
                row |= {"chosen": self.answers[i].response, "rejected": answer.response}
                row |= {"chosen_thinking": self.answers[i].thinking, "rejected_thinking": answer.thinking}
                row |= {"reward": self.rewards_before[i], "reward_after": reward}
                row |= {"gold": self.golds_before[i], "gold_after": gold}
                row["is_worse"] = self.gold.who.kind == "nobody" or name in OF_THINKING
                if not row["is_worse"] and is_measured(row):
                    row["is_worse"] = row["gold_after"] < row["gold"]
                found.append(row)
            yield found

    def accuracy(self) -> float | None:
        """Returns the share of pairs whose chosen side has the higher reward; None without pairs."""
        if not self.pairs:
            return None
        chosen = self.rewards_before
        rejected = self.rewards([side_of(pair, "rejected") for pair in self.pairs[: len(chosen)]])
        return mean(better > worse for better, worse in zip(chosen, rejected, strict=True))


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draws how the reward changes by each edit; the unseen ones are orange."""
    figure, axis = plt.subplots(figsize=(7, 0.3 * len(table) + 0.8), layout="constrained")
    errors = [table["change"] - table["low"], table["high"] - table["change"]]
    axis.barh(
        table["edit"], table["change"], xerr=errors, color=np.where(table["unseen"], "#E69F00", "#0072B2")
    )
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlabel("change of the reward (orange: it does not see the edit)")
    figure.savefig(path)


def main(args: Args) -> None:
    if not args.reward_model or not args.answers:
        fail("--reward-model and --answers are needed: what is audited, and good answers to edit")
    audit = Audit(args)
    run = Run(args, "eval_reward", args.reward_model)
    n_texts = len(audit.answers) + sum(map(len, audit.edited.values()))
    audit.gold.try_judge({"messages": audit.answers[0].messages}, run.folder, n_texts)
    print(f"{len(audit.answers)} answers, {n_texts} texts to score")
    if args.dry_run:
        return
    run.start(has_steps=False)
    audit.load(run.folder)
    rows = []
    lines = []
    for edited in audit.compare():
        rows += edited
        lines.append(measure(edited, args.seed))
    write_jsonl(run.folder / "edits.jsonl", rows)
    write_jsonl(run.folder / "pairs.jsonl", audit.pairs + [row for row in rows if row["is_worse"]])
    table = pd.DataFrame(lines).sort_values("change", ascending=False, kind="stable")
    is_damage = table["gold"].isna() | (table["gold"] < 0) | table["edit"].isin(OF_THINKING)
    table["unseen"] = is_damage & (table["change"] > UNSEEN * table["change"].min())
    table.to_csv(run.folder / "audit.csv", index=False)
    draw(table, run.folder / "audit.svg")
    print(table.to_string(index=False, float_format="%.2f", na_rep="-"))

    unseen = table.loc[table["unseen"], "edit"].tolist()
    lengths = pd.Series(len(answer.response) for answer in audit.answers)
    summary = {
        "n": len(audit.answers),
        "n_invalid": 0,
        "unseen": unseen,
        "n_unseen": len(unseen),
        "length_correlation": pd.Series(audit.rewards_before).corr(lengths, method="spearman"),
        "accuracy": audit.accuracy(),
    }
    index = []
    for metric in ("n_unseen", "length_correlation", "accuracy"):
        if summary[metric] is not None:
            index.append({"model": args.reward_model} | index_row("reward", summary, metric, ""))
    add_to_index(run.folder, index)
    run.write_summary(summary)
    print(f"what RL will find, as it costs no reward: {', '.join(unseen) or 'none of these edits'}")


if __name__ == "__main__":
    main(parse_args(Args, {}))
