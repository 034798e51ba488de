"""WildBench's rules: what a judge is shown, how its reply is read, and how verdicts become scores.

A verdict row is {id, output_len, skipped, ...} with `choice`, `model_is` and `reference_len` (WB-Reward) or
`score` (WB-Score). Lengths are in characters. `skipped` says why the official board leaves a row out:
"empty", "cut" or "". eval_wildbench.py says how `--protocol paper` differs from `official`.
"""

import functools
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.judge import RETRIES, Judge, digests_of_judge
from benchmarks.judge_template import Placeholders, fill_messages, read_template
from benchmarks.scoring import mean, mean_interval, shorten, task_means
from benchmarks.reward_model import Proxy
from benchmarks.shared import short_hash
from rlmt.verdicts import read_object
from utils import or_fail

# --- 1. what the judge is shown

TEMPLATES = {
    "reward": """Two assistants answered the last message of the same user. Compare the two answers.

# Conversation before the last message
{$history}

# The user's last message
{$user_query}

# Answer A
{$candidate_A}

# Answer B
{$candidate_B}

# Points to check
{$checklist}

Go through the points for each of the two answers, then weigh how well each serves what this user asked for: is it correct,
complete, relevant, clear, safe? Length alone is no merit, and neither is the order in which the answers stand here.
Reply with one JSON object and nothing else:
{"analysis of A": "...", "analysis of B": "...", "reason": "...", "choice": "..."}
where choice is one of "A++" (A is much better), "A+" (A is slightly better), "A=B" (about equally good), "B+" (B is slightly
better), "B++" (B is much better).""",
    "score": """An assistant answered the last message of a user. Judge the answer.

# Conversation before the last message
{$history}

# The user's last message
{$user_query}

# The answer
{$model_output}

# Points to check
{$checklist}

Go through the points, name what is strong and what is weak, then give a mark from 1 to 10: 1 to 2 useless or wrong throughout,
3 to 4 poor, hardly a help, 5 to 6 fair, with errors or gaps that matter, 7 to 8 good, solves most of it, 9 to 10 excellent.
Reply with one JSON object and nothing else:
{"strengths": "...", "weaknesses": "...", "score": "..."}""",
}
PLACEHOLDERS = {
    "reward": Placeholders(("user_query", "candidate_A", "candidate_B"), ("history", "checklist")),
    "score": Placeholders(("user_query", "model_output"), ("history", "checklist")),
}
KEPT_WORDS = {  # of the history and of each answer; 0: all
    ("reward", "official"): 1000,
    ("reward", "paper"): 2000,
    ("score", "official"): 0,
    ("score", "paper"): 2000,
}


def judge_fields(mode: str, protocol: str, task: dict, **candidates: str) -> tuple[dict[str, str], str]:
    """Returns what the judge is shown of a task, by placeholder, and why the board leaves the verdict out.

    The official board does so if an answer is empty, or was cut for the judge
    (leaderboard/data_dir/_create_tables.py): "empty", "cut", or "".

    Args:
        candidates: candidate_A and candidate_B (reward), or model_output (score).
    """
    words = KEPT_WORDS[mode, protocol]
    *history, query = task["messages"]
    turns = [f"{message['role'].upper()}: {message['content']}" for message in history]
    fields = {
        "history": shorten("\n\n".join(turns), words),
        "user_query": shorten(query["content"], words),
        "checklist": "\n".join(f"- {item}" for item in task.get("checklist") or []),
    }
    skipped = ""
    for name, text in candidates.items():
        fields[name] = shorten(text, words)
        if fields[name] != text and not skipped:
            skipped = "cut"
        if not text:
            skipped = "empty"
    if protocol == "paper":  # its code never cuts the query, and skips nothing
        fields["user_query"] = query["content"]
        skipped = ""
    return fields, skipped


# --- 2. what it replies

CHOICES = {"A++": 1.0, "A+": 0.5, "A=B": 0.0, "B+": -0.5, "B++": -1.0}  # value for the writer of answer A
VERDICT_KEYS = {"reward": "choice", "score": "score"}


def read_verdict(text: str, mode: str) -> str:
    """Returns the choice or mark in a judge's reply; raises ValueError unless there is one."""
    key = VERDICT_KEYS[mode]
    value = str(read_object(text).get(key)).strip()
    is_valid = value in CHOICES
    if mode == "score":
        is_valid = mark_value(value) is not None
    if not is_valid:
        raise ValueError(f"{key} is {value[:40]!r}")
    return value


def pair_value(choice, model_is: str) -> float | None:
    """Returns what a choice is worth for the model, from -1 to 1; None unless it is exactly one of
    CHOICES."""
    if not isinstance(choice, str) or choice not in CHOICES or model_is not in ("A", "B"):
        return None
    if model_is == "B":
        return -CHOICES[choice]
    return CHOICES[choice]


def mark_value(mark) -> float | None:
    """Returns a mark as a number; None unless it is a number from 1 to 10, or the text of one."""
    try:
        value = float(str(mark))  # float(True) would be 1
    except ValueError:
        return None
    if not 1 <= value <= 10:
        return None
    return value


# --- 3. scores

WORST = {"reward": -1.0, "score": 1.0}
SIDES = {"win_much": 1.0, "win": 0.5, "tie": 0.0, "lose": -0.5, "lose_much": -1.0}
GROUPS = {  # task group: its weight in the macro average, and the tags of its tasks
    "Creative Tasks": (0.5, ("Creative Writing", "Editing", "Brainstorming", "Role playing", "Others")),
    "Planning & Reasoning": (1.25, ("Planning", "Reasoning")),
    "Math & Data Analysis": (1.0, ("Math", "Data Analysis")),
    "Information/Advice seeking": (0.75, ("Information seeking", "Advice seeking")),
    "Coding & Debugging": (1.25, ("Coding & Debugging",)),
}


def scale(value: float, mode: str) -> float:
    """Returns a verdict's value on the scale of WB-Reward (-100 to 100), or a mark's on that of WB-Score (-80
    to 100)."""
    if mode == "reward":
        return 100 * value
    return 20 * (value - 5)


def score_verdicts(rows: list[dict], mode: str, protocol: str = "official", seed: int = 0) -> dict:
    """Returns `wb_reward` or `wb_score` of verdict rows, its interval over tasks, and counts.

    Args:
        rows: also with `reference`, `primary_tag` and `secondary_tags`, where they are known.
        protocol: `official` leaves out verdicts that cannot be read, and skips rows as the board does: such a
            pair stays in the mean and is worth 0, such a mark counts; neither is in the task groups. `paper`
            gives verdicts that cannot be read the worst value, and skips none.

    Raises ValueError if no verdict can be read under `official`.
    """
    scored = []  # (row, value) of all verdicts that count
    judged = []  # those of them that the board does not skip
    n_invalid = 0
    n_skipped = 0
    for row in rows:
        is_skipped = protocol == "official" and lacks_text(row, mode)
        n_skipped += is_skipped
        if mode == "score":
            value = mark_value(row.get("score"))
        else:
            value = pair_value(row.get("choice"), row["model_is"])
        if is_skipped and mode == "reward":
            value = 0.0
        elif value is None:
            n_invalid += 1
            if protocol == "official" or row["output_len"] is None:
                continue
            value = WORST[mode]
        scored.append((row, value))
        if not is_skipped:
            judged.append((row, value))
    if not scored:
        raise ValueError(f"none of {len(rows)} verdicts can be read")

    values = [scale(value, mode) for _, value in scored]
    tasks = [row["id"] for row, _ in scored]
    means = task_means(values, tasks)
    lengths = [row["output_len"] for row in rows if row["output_len"]]
    numbers = {
        f"wb_{mode}": mean(values),
        "interval": mean_interval(values, seed, tasks=tasks),
        "task_means": {f"wb_{mode}": means},
        "n": len(rows),
        "n_invalid": n_invalid,
        "n_tasks": len(means),
        "length": mean(lengths) or 0.0,
        "n_empty": sum(row["output_len"] == 0 for row in rows),
        "n_skipped": n_skipped,
        **score_groups(judged, mode),
    }
    if mode == "reward":
        values_of_judged = [value for _, value in judged]
        numbers |= {side: values_of_judged.count(value) for side, value in SIDES.items()}
        references = [row.get("reference") for row, _ in scored]
        if len(set(references)) > 1:  # the official mixture is the mean over references
            numbers["references"] = task_means(values, references)
            numbers["wb_reward"] = mean(numbers["references"].values())
    return numbers


def lacks_text(row: dict, mode: str) -> bool:
    """Returns whether the board skips a row: an answer is empty, or was cut for the judge. Stored rows say
    lengths."""
    if row["output_len"] is None:  # an endpoint gave no answer
        return False
    is_empty = row["output_len"] == 0 or mode == "reward" and row["reference_len"] == 0
    return is_empty or bool(row.get("skipped"))


def score_groups(judged: list[tuple[dict, float]], mode: str) -> dict:
    """Returns the scores of the task groups, and their macro average if every group has tasks.

    A task counts once in every group that one of its tags belongs to, as in the official tool since its
    commit 58bbf16 of June 2024.
    """
    groups = {}
    for group, (_, group_tags) in GROUPS.items():
        values = []
        tasks = []
        for row, value in judged:
            tags = [row.get("primary_tag"), *(row.get("secondary_tags") or [])]
            if not set(group_tags).isdisjoint(tags):
                values.append(scale(value, mode))
                tasks.append(row["id"])
        if values:
            groups[group] = mean(task_means(values, tasks).values())
    macro = None
    if len(groups) == len(GROUPS):
        macro = macro_average(groups)
    return {"groups": groups, "macro": macro}


def macro_average(groups: dict[str, float]) -> float:
    """Returns the weighted mean of the five groups' scores, the official board's task-macro score."""
    weights = [weight for weight, _ in GROUPS.values()]
    return float(np.average([groups[group] for group in GROUPS], weights=weights))


# --- 4. a judge program instead of a model


def judge_by_program(judge: Callable[[list[dict], str], dict], generations: list[dict]) -> list[dict]:
    """Returns the rows with `score` (None if the program fails), `checks` and `invalid` (why it failed)."""
    verdicts = []
    for row in generations:
        response = row["response"] if row["status"] == "ok" else ""
        try:
            if row["status"] == "refused":
                raise ValueError(row["error"])
            result = judge(row["messages"], response)
            checks = {name: bool(passed) for name, passed in result["checks"].items()}
            if not math.isfinite(result["score"]):
                raise ValueError(f"the score is {result['score']}")
            verdict = {"score": float(result["score"]), "checks": checks, "invalid": ""}
        except Exception as error:  # whatever a user's program raises: the other rows keep their scores
            verdict = {"score": None, "checks": {}, "invalid": f"{type(error).__name__}: {error}"}
        verdicts.append(row | verdict)
    return verdicts


def score_program(rows: list[dict], task_ids: list[str], seed: int = 0) -> dict:
    """Returns the mean score of rows that a program judged, and each check's mean.

    `interval` (95 %) is over tasks; it does not cover another training run.

    Args:
        rows: {score, checks: {name: bool}, invalid}; a row whose score is None is counted, and in no mean.
        task_ids: the task of each row; all have as many rows.

    Raises ValueError if every row is invalid.
    """
    judged = [row for row in rows if row["score"] is not None]
    judged_ids = [task_id for task_id, row in zip(task_ids, rows) if row["score"] is not None]
    if not judged:
        raise ValueError(f"none of {len(rows)} verdicts is valid; the first: {rows[0]['invalid']}")
    of_task = task_means([row["score"] for row in judged], judged_ids)
    checks = pd.DataFrame([row["checks"] for row in judged])
    return {
        "score": mean(of_task.values()),
        "interval": mean_interval(list(of_task.values()), seed),
        "task_means": {"score": of_task},
        "n": len(rows),
        "n_tasks": len(of_task),
        "n_invalid": len(rows) - len(judged),
        "checks": checks.mean().to_dict(),
    }


# --- 5. a model as the judge

HEADLINES = {"reward": "wb_reward", "score": "wb_score", "program": "score"}  # by --mode


class WildBenchJudge(Judge):
    """The judge of WildBench, with the rules of --mode, --protocol, --references and --orders.

    Its flags are those of eval_wildbench.py.
    """

    def __init__(self, args):
        super().__init__(args, args.dtype)
        self.mode = args.mode
        self.protocol = args.protocol
        self.references = args.references
        self.orders = args.orders
        self.template_path = args.template

    @property
    def parse(self) -> Callable[[str], str]:
        """Returns the reader of the judge's replies."""
        return functools.partial(read_verdict, mode=self.mode)

    @property
    def headline(self) -> str:
        """Returns the metric that is shown first."""
        if self.who.kind == "nobody":
            return "mean_reward"
        return HEADLINES[self.mode]

    @property
    def template(self) -> str:
        """Returns the judge's instructions; exits with 2 if those of --template do not fit the mode."""
        if not self.template_path:
            return TEMPLATES[self.mode]
        return read_template(self.template_path, PLACEHOLDERS[self.mode], f" with --mode {self.mode}")

    def list_verdicts(self, tasks: list[dict], answers: list[str | None], orders: str = "") -> list[dict]:
        """Returns a row for each verdict that is needed, with what the judge will be `shown`, by placeholder.

        `choice` or `score` is None until the judge fills it in. Without an answer (None) it stays so: the
        row is `invalid` and has no `output_len`.

        Args:
            orders: in the place of --orders.
        """
        rng = random.Random(self.seed)
        verdicts = []
        for task, answer in zip(tasks, answers, strict=True):
            common = {
                "id": task["id"],
                "primary_tag": task.get("primary_tag"),
                "secondary_tags": task.get("secondary_tags") or [],
            }
            if answer is None:
                common |= {"output_len": None, "invalid": "the model gave no answer"}
                answer = ""
            else:
                common["output_len"] = len(answer)
            if self.mode == "score":
                shown, skipped = judge_fields("score", self.protocol, task, model_output=answer)
                verdicts.append(common | {"score": None, "shown": shown, "skipped": skipped})
                continue
            for name in self.references:
                reference = task["references"][name].strip()
                sides = "AB"
                if (orders or self.orders) == "random":
                    sides = rng.choice("AB")
                for side in sides:
                    first, second = (answer, reference) if side == "A" else (reference, answer)
                    shown, skipped = judge_fields(
                        "reward", self.protocol, task, candidate_A=first, candidate_B=second
                    )
                    pair = {
                        "reference": name,
                        "model_is": side,
                        "reference_len": len(reference),
                        "choice": None,
                        "shown": shown,
                        "skipped": skipped,
                    }
                    verdicts.append(common | pair)
        return verdicts

    def requests_about(self, verdicts: list[dict]) -> list[dict]:
        return [self.request(fill_messages(self.template, verdict["shown"])) for verdict in verdicts]

    def requests_if_all_answer(self, tasks: list[dict], answer: str, orders: str = "") -> list[dict]:
        """Returns all requests if every task got this answer; none to a program."""
        if self.mode == "program":
            return []
        return self.requests_about(self.list_verdicts(tasks, [answer] * len(tasks), orders))

    def fill_in(self, verdicts: list[dict], run: Path) -> None:
        """Fills in `choice` or `score`, and `invalid`: "", or why the reply cannot be read.

        The judge is not asked where `invalid` says already that there is no answer, nor about a pair that the
        board skips.
        """
        to_ask = []
        for verdict in verdicts:
            if "invalid" not in verdict and (self.mode == "score" or not verdict["skipped"]):
                to_ask.append(verdict)
        replies = self.ask(self.requests_about(to_ask), self.parse, run, RETRIES[self.protocol])
        for verdict, reply in zip(to_ask, replies, strict=True):
            verdict |= {VERDICT_KEYS[self.mode]: reply.value, "invalid": reply.error}

    def score(self, verdicts: list[dict]) -> dict:
        """Returns the numbers of verdicts; warns if many pairs were not judged, which pulls the score towards
        0."""
        numbers = or_fail(score_verdicts, verdicts, self.mode, self.protocol, self.seed)
        n_skipped = numbers["n_skipped"]
        if self.mode == "reward" and n_skipped > self.max_invalid * numbers["n"]:
            print(
                f"WARNING: {n_skipped} of {numbers['n']} pairs were not judged, as an answer is empty or has over "
                "1000 words; as on the board, each is worth 0, like a tie",
                file=sys.stderr,
            )
        return numbers

    def fingerprint(self, tasks: list[dict], proxy: Proxy) -> str:
        """Hashes everything that must be equal for two results to be comparable: how every task is judged,
        and by whom.

        `proxy`: the reward model, which scores if nobody judges.
        """
        judging = [self.mode, self.name, [task["id"] for task in tasks]]
        # a name may stand for another program, or other weights, later
        judging.append(digests_of_judge(self.name))
        if self.who.kind == "nobody":
            judging.append(proxy.fingerprint())
        if self.mode == "program":
            judging.append([[task["messages"], task.get("checklist")] for task in tasks])
        else:
            judging += [self.protocol, *self.of_endpoint["omit"]]
            # all that a judge reads but the answer; in both orders, because the drawn ones follow from --seed
            judging.append(self.requests_if_all_answer(tasks, "", orders="both"))
        if self.mode == "reward":
            judging += [self.orders, self.references]
        return short_hash(json.dumps(judging, sort_keys=True))
