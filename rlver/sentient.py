"""Sentient: stored dialogues, their scores, and what a judge finds in the replies.

A dialogue is {"id", "emo_point", "history"}; rlver/simulated_user.py names the fields.

Emotion curve: the mean emotion after each answer of the user. A dialogue that has ended keeps its final one.

Strategies (RLVER, 2507.03112, section 3.6, table 4): a judge reads a dialogue and names the strategies of
every reply. The frequency of a group is the share of the replies that show one of its strategies. Its
contribution is the mean change of the emotion after these replies. A reply that the user did not answer has
no change, so a contribution is a mean over `n_changes` of the group's `n` replies.

Capabilities (section 3.3, appendix C): the judge marks a dialogue from 1 to 5 on each of five scales.

The lists, the scales and the formulas are the paper's. Differences from it:
1. The judge's instructions, and the words of each scale, are our own. The paper prints its scales, a prompt
   for a longer list of strategies (appendix E.2) and the prompt for the capabilities (appendix E.3), which
   `--template FILE` takes from a file, with {$dialogue} in it and perhaps {$scales} and {$keys}. It must ask
   for the JSON that ours asks for.
2. One call judges all replies of a dialogue; the paper's judge seems to read them one at a time. A reply that
   does not name the strategies of each of them is invalid.
3. The paper draws frequencies from 0 to 10 without naming a unit. Ours are shares, from 0 to 1.

A judge is a language model, or file.py:function (dialogue) -> a list of codes for each reply, such as
rlver/toy_users.py:strategies. A program gives no marks.
"""

from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.judge import Judge
from benchmarks.judge_template import Placeholders, describe_wording, fill_messages, read_template
from benchmarks.scoring import check_types, get_field, mean, mean_interval, task_means, withhold
from rlmt.data import read_rows, write_jsonl
from rlmt.scorers import load_function
from rlmt.verdicts import read_object
from rlver import simulated_user
from utils import fail

# --- 1. stored dialogues


def read_dialogues(path: str) -> list[dict]:
    """Reads stored dialogues, jsonl or jsonl.gz; exits with 2 at one that cannot be scored."""
    dialogues = read_rows(path)
    for line, dialogue in enumerate(dialogues, 1):
        where = f"{path}:{line}"
        check_types(dialogue, where, "emo_point", "history")
        for turn in dialogue["history"]:
            check_types(turn, f"{where}: a turn", "role", "content")
            if turn["role"] == "user":
                get_field(turn, f"{where}: a turn", "emotion-point")
    return dialogues


def emotions_of(dialogue: dict) -> list[float]:
    """Returns the emotions at the start and after each answer."""
    return [turn["emotion-point"] for turn in dialogue["history"] if turn["role"] == "user"]


def score(dialogues: list[dict], seed: int, max_invalid: float) -> dict:
    """Returns the Sentient score, and counts of how the dialogues ended; exits with 2 if none has a score.

    mean_emotion   the Sentient score: the mean of the final emotions, of dialogues that have a score; None if
                   a larger share than `max_invalid` has none
    interval       of 95 %, by `seed`
    success        how many of these end at 100
    failure        how many of these end below 10
    n, n_invalid   all dialogues, and those without a score
    mean_turns     turns of the user in a dialogue
    ended          how many dialogues ended for which reason
    format_ok      share of well-formed replies; None for dialogues of the official tool
    emotion_curve  the mean emotion at the start and after each answer. A dialogue that has ended keeps its
                   final emotion, so the last value is the Sentient score.
    """
    ids = []
    finals = []
    curves = []
    n_turns = []
    is_ok = []
    for dialogue in dialogues:
        is_ok += [turn["status"] == "ok" for turn in dialogue["history"] if "status" in turn]
        final = simulated_user.final_emotion(dialogue)
        if final is None:
            continue
        ids.append(dialogue["id"])
        finals.append(final)
        curve = emotions_of(dialogue)
        n_turns.append(len(curve))
        if final != curve[-1]:  # a malformed reply, to which the user has no answer
            curve.append(final)
        curves.append(curve)
    if not finals:
        fail(f"none of {len(dialogues)} dialogues has a score")

    scores = {
        "mean_emotion": mean(finals),
        "interval": mean_interval(finals, seed),
        "task_means": {"mean_emotion": task_means(finals, ids)},
        "success": sum(emotion >= simulated_user.STATES["S"] for emotion in finals),
        "failure": sum(emotion < simulated_user.STATES["C"] for emotion in finals),
        "n": len(dialogues),
        "n_invalid": len(dialogues) - len(finals),
        "mean_turns": mean(n_turns),
        "ended": dict(Counter(dialogue.get("ended", "") for dialogue in dialogues)),
        "format_ok": mean(is_ok),
        "emotion_curve": pd.DataFrame(zip_longest(*curves)).ffill().mean(axis=1).tolist(),
    }
    withhold(scores, ["mean_emotion", "success", "failure", "emotion_curve"], max_invalid)
    return scores


# --- 2. strategies

GROUPS = {
    "A": "Praise",
    "B": "Deep Empathy",
    "C": "Emotional Venting",
    "D": "Advice Provision",
    "E": "Problem Analysis",
}
STRATEGIES = {
    "A-1": "praises what the user is like",
    "A-2": "praises a good thought of the user",
    "A-3": "praises what the user did",
    "B-1": "shows that it feels with the user by saying the user's problem again in its own words",
    "B-2": "feels with something that the user means or needs but did not say",
    "B-3": "takes the user's side by saying that it would think, feel or act in the same way",
    "B-4": "tells a similar story of its own, or of somebody it knows",
    "C-1": "says that it wants to hear more and will listen",
    "C-2": "helps the user let the anger or sadness out, instead of calming it",
    "D-1": "advises what to do in the user's particular situation",
    "E-1": "analyses the user's problem: its causes, or why somebody acts in this way",
}

STRATEGY_PROMPT = """Below, a user talks to a supporter. The supporter's replies are numbered.

{$dialogue}

Which of these strategies does each reply show?
{$strategies}

Judge every reply by itself, in the light of what was said before it. A reply may show several strategies, or none. Name a
strategy only if you could point to the words that show it; a polite phrase that would fit any problem shows none.
Reply with one JSON object and nothing else. It has a key for each reply, with the list of its codes:
{{$keys}}"""


def show(dialogue: dict) -> str:
    """Writes a dialogue as the user heard it, with numbered replies."""
    lines = []
    n_replies = 0
    for turn in dialogue["history"]:
        speaker = "USER"
        if turn["role"] == "assistant":
            n_replies += 1
            speaker = f"REPLY {n_replies}"
        lines.append(f"{speaker}: {turn['content']}")
    return "\n\n".join(lines)


def strategy_fields(dialogue: dict) -> dict[str, str]:
    n_replies = simulated_user.count_replies(dialogue)
    return {
        "dialogue": show(dialogue),
        "strategies": "\n".join(f"{code}: {words}" for code, words in STRATEGIES.items()),
        "keys": ", ".join(f'"{number}": ["..."]' for number in range(1, n_replies + 1)),
    }


def read_strategies(text: str) -> list[list[str]]:
    """Reads the codes of the replies 1, 2, ...; ValueError if they are not lists of keys of STRATEGIES."""
    found = read_object(text)
    codes_of_replies = [found.get(str(number)) for number in range(1, len(found) + 1)]
    known = list(STRATEGIES)  # a list, as a judge may write what cannot be looked up in a dict
    for codes in codes_of_replies:
        if not isinstance(codes, list) or not all(code in known for code in codes):
            raise ValueError(f"{str(codes)[:80]} is not a list of the codes {', '.join(STRATEGIES)}")
    return codes_of_replies


def score_strategies(dialogues: list[dict], codes: list[list[list[str]] | None]) -> dict:
    """Returns {group: {"n", "frequency", "n_changes", "contribution"}}.

    Args:
        dialogues: stored dialogues.
        codes: for each dialogue the codes of its replies, or None if the judge failed.
    """
    n_replies = 0
    changes = {letter: [] for letter in GROUPS}  # after each reply that shows one of the group's strategies
    for dialogue, codes_of_replies in zip(dialogues, codes, strict=True):
        if codes_of_replies is None:
            continue
        n_replies += len(codes_of_replies)
        changes_after = np.diff(emotions_of(dialogue))  # the user may not have answered the last reply
        for codes_of_reply, change in zip_longest(codes_of_replies, changes_after):
            for letter in {code[0] for code in codes_of_reply}:
                changes[letter].append(change)

    scores = {}
    for letter, group in GROUPS.items():
        known = [change for change in changes[letter] if change is not None]
        scores[group] = {
            "n": len(changes[letter]),
            "frequency": len(changes[letter]) / max(n_replies, 1),
            "n_changes": len(known),
            "contribution": mean(known),  # None without changes
        }
    return scores


# --- 3. capabilities

CAPABILITIES = {
    "Empathic Depth": (
        "How deeply it understands and affirms what the user feels.",
        "stock sympathy that would fit anybody",
        "names or repeats the feeling that the user stated",
        "ties the feeling to what happened to this user, and why it is natural",
        "finds and puts into exact words a deeper or mixed feeling that the user did not state",
        "also sees which of the user's values the feeling touches, and honours the whole person",
    ),
    "Core Insight": (
        "How well it puts together what the user tells in pieces, down to the need behind it.",
        "takes each complaint by itself",
        "sees the topic, and no more",
        "grasps the central conflict or event",
        "connects several events and points out a pattern that repeats",
        "connects pattern, belief and unmet need, and offers that as a guess to think about together",
    ),
    "Solution Crafting": (
        "Whether what it suggests can be done, suits this user and gives strength.",
        "no suggestion, or an empty slogan",
        "general advice without a step",
        "one concrete step, not fitted to the situation",
        "the kind of support to act that fits the user's state: a plan with choices, a small first step, a fitting story",
        "also minds what holds the user back and builds confidence step by step, or leaves advice out where none is wanted",
    ),
    "Dialogue Guidance": (
        "How it leads the conversation from feelings towards what could help, at the user's pace.",
        "only reacts",
        "keeps the talk going by simple questions, without a direction",
        "knows that there are phases, but changes abruptly or too early",
        "after enough empathy it notices the moment, asks before it moves on, and makes it a common cause",
        "moves freely between feeling, insight and action, sums up, and knows when just to stay with the user",
    ),
    "Style Adaptability": (
        "How it fits role and language to the moment and to this user.",
        "one fixed manner throughout",
        "changes its role stiffly, or only when told to",
        "adjusts its tone to that of the conversation",
        "changes roles smoothly as the user's energy changes: a listener, an ally, somebody to explore with",
        "has grown into a role of its own with this user, such as a close friend or a blunt but warm mentor",
    ),
}

CAPABILITY_PROMPT = """Below, a user talks to a supporter. The supporter's replies are numbered.

{$dialogue}

Mark the supporter on each of these five scales, over the whole conversation:

{$scales}

A mark needs what its line says, and what the lines of the lower marks say. Decide each scale by itself. Length earns nothing.
Reply with one JSON object and nothing else, in which every mark is a whole number from 1 to 5:
{"reasons": "a few sentences", {$keys}}"""


PLACEHOLDERS = Placeholders(("dialogue",), ("scales", "keys"))


def capability_fields(dialogue: dict) -> dict[str, str]:
    scales = []
    for name, (question, *marks) in CAPABILITIES.items():
        lines = [f"{mark}: {words}" for mark, words in enumerate(marks, 1)]
        scales.append("\n".join([f"# {name}", question, *lines]))
    return {
        "dialogue": show(dialogue),
        "scales": "\n\n".join(scales),
        "keys": ", ".join(f'"{name}": 0' for name in CAPABILITIES),
    }


def read_marks(text: str) -> dict[str, int]:
    """Reads the five marks; ValueError if one is missing or not a whole number from 1 to 5."""
    found = read_object(text)
    marks = {}
    for name in CAPABILITIES:
        mark = found.get(name)
        if type(mark) is not int or not 1 <= mark <= 5:
            raise ValueError(f"{name} is {str(mark)[:40]!r}, not a whole number from 1 to 5")
        marks[name] = mark
    return marks


def score_capabilities(marks: list[dict[str, int] | None], seed: int) -> dict:
    """Returns {capability: {"mean", "interval"}} over the dialogues whose marks are known."""
    scores = {}
    for name in CAPABILITIES:
        known = [marks_of_dialogue[name] for marks_of_dialogue in marks if marks_of_dialogue]
        scores[name] = {"mean": mean(known), "interval": mean_interval(known, seed)}
    return scores


# --- 4. judging


class DialogueJudge(Judge):
    """Names the strategies of the replies, and marks the dialogues: --judge, a model or a function, or
    nobody."""

    def __init__(self, args):
        """`args`: any JudgeFlags with ModelFlags. Exits with 2 if --judge cannot be asked, or --template not
        be filled in."""
        super().__init__(args, args.dtype)
        self.check()
        self.wording = describe_wording(args.template)
        self.capability_prompt = CAPABILITY_PROMPT
        if args.template:
            self.capability_prompt = read_template(args.template, PLACEHOLDERS)

    def strategy_request(self, dialogue: dict) -> dict:
        """Returns the request for the strategies of the replies; `read_strategies` reads what comes back."""
        return self.request(fill_messages(STRATEGY_PROMPT, strategy_fields(dialogue)))

    def capability_request(self, dialogue: dict) -> dict:
        """Returns the request for the five marks; `read_marks` reads what comes back."""
        return self.request(fill_messages(self.capability_prompt, capability_fields(dialogue)))

    def judge(self, dialogues: list[dict], run: Path, suffix: str = "") -> dict:
        """Returns the scores `judge`, `strategies` and `capabilities`; {} if nobody judges.

        judged<suffix>.jsonl in the folder `run` gets what the judge said of each dialogue. Each score counts
        its failures as n_invalid; it has no numbers if these are more than --max-invalid.
        """
        if not self.name:
            return {}
        judged = [dialogue for dialogue in dialogues if simulated_user.final_emotion(dialogue) is not None]
        rows = pd.DataFrame({"id": [dialogue["id"] for dialogue in judged]})
        scores = {"judge": self.name}
        is_function = self.who.kind == "function"
        if is_function:
            codes = list(map(load_function(self.name), judged))
        else:
            replies = self.ask(list(map(self.strategy_request, judged)), read_strategies, run)
            codes = [reply.value for reply in replies]
        for index, dialogue in enumerate(judged):
            if codes[index] is not None and len(codes[index]) != simulated_user.count_replies(dialogue):
                codes[index] = None
        rows["strategies"] = codes
        scores["strategies"] = self.if_reliable(codes, score_strategies, judged, codes)

        if not is_function:
            replies = self.ask(list(map(self.capability_request, judged)), read_marks, run)
            marks = [reply.value for reply in replies]
            rows["capabilities"] = marks
            scores["wording"] = self.wording
            scores["capabilities"] = self.if_reliable(marks, score_capabilities, marks, self.seed)

        write_jsonl(run / f"judged{suffix}.jsonl", rows.to_dict("records"))
        return scores

    def if_reliable(self, judgements: list, score: Callable[..., dict], *inputs) -> dict:
        """Returns n and n_invalid, the number of judgements that are None; and what `score` returns of its
        inputs, unless n_invalid is more than --max-invalid."""
        counts = {"n": len(judgements), "n_invalid": judgements.count(None)}
        if counts["n_invalid"] <= self.max_invalid * counts["n"]:
            counts |= score(*inputs)
        return counts
