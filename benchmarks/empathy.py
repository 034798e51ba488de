"""How a model supports the user of a dialogue: emotion curves, strategies and capabilities (RLVER, 2507.03112).

Emotion curve: the mean emotion after each answer of the user. A dialogue that has ended keeps its final one.

Strategies (section 3.6, table 4): a judge reads a dialogue and names the strategies of every reply. The
frequency of a group is the share of the replies that show one of its strategies. Its contribution is the mean
change of the emotion after these replies. A reply that the user did not answer has no change, so a contribution is
a mean over `n_changes` of the group's `n` replies.

Capabilities (section 3.3, appendix C): the judge marks a dialogue from 1 to 5 on each of five scales.

The lists, the scales and the formulas are the paper's. Differences from it:
1. The judge's instructions, and the words of each scale, are our own. The paper prints its scales, and a
   prompt for a longer list of strategies (appendix E.2), but not the prompts of these two judgements.
2. One call judges all replies of a dialogue; the paper's judge seems to read them one at a time.
3. The paper draws frequencies from 0 to 10 without naming a unit. Ours are shares, from 0 to 1.

A judge is a language model, or file.py:function (dialogue) -> a list of codes for each reply, such as
data/toy/users.py:strategies. A program gives no marks.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rlmt.data import append_jsonl
from rlmt.run import load_function
from utils import fail, or_fail
from benchmarks import shared
from benchmarks.scoring import bootstrap, mean, read_object
from rewards import simulated_user

# --- 1. emotion curves


def emotion_curve(dialogues: list[dict]) -> list[float]:
    """Returns the mean emotion at the start and after each answer, over the dialogues that have a score.

    A dialogue that has ended keeps its final emotion, so the last value is the Sentient score.
    """
    curves = []
    for dialogue in dialogues:
        final = simulated_user.final_emotion(dialogue)
        if final is None:
            continue
        emotions = [turn["emotion-point"] for turn in dialogue["history"] if turn["role"] == "user"]
        if final != emotions[-1]:  # a malformed reply, to which the user has no answer
            emotions.append(final)
        curves.append(emotions)

    longest = max(map(len, curves))
    for curve in curves:
        curve += [curve[-1]] * (longest - len(curve))
    return [mean(at_turn) for at_turn in zip(*curves, strict=True)]


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

{dialogue}

Which of these strategies does each reply show?
{strategies}

Judge every reply by itself, in the light of what was said before it. A reply may show several strategies, or none. Name a
strategy only if you could point to the words that show it; a polite phrase that would fit any problem shows none.
Reply with one JSON object and nothing else. It has a key for each reply, with the list of its codes:
{{{keys}}}"""


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


def strategy_prompt(dialogue: dict) -> str:
    strategies = [f"{code}: {words}" for code, words in STRATEGIES.items()]
    n_replies = simulated_user.count_replies(dialogue)
    keys = [f'"{number}": ["..."]' for number in range(1, n_replies + 1)]
    return STRATEGY_PROMPT.format(
        dialogue=show(dialogue), strategies="\n".join(strategies), keys=", ".join(keys)
    )


def read_strategies(text: str, n_replies: int | None = None) -> list[list[str]]:
    """Reads the codes of the replies 1, 2, ...; ValueError if they are not those of `n_replies` replies."""
    found = read_object(text)
    codes = [found.get(str(number)) for number in range(1, len(found) + 1)]
    return check_codes(codes, n_replies or len(codes))


def check_codes(codes_of_replies: list, n_replies: int) -> list[list[str]]:
    """Returns the codes of each reply; ValueError unless there are `n_replies` lists of keys of STRATEGIES."""
    if len(codes_of_replies) != n_replies:
        raise ValueError(f"codes of {len(codes_of_replies)} replies, not of {n_replies}")
    for codes in codes_of_replies:
        known = list(STRATEGIES)  # a list, as a judge may write what cannot be looked up in a dict
        if not isinstance(codes, list) or not all(code in known for code in codes):
            raise ValueError(f"{str(codes)[:80]} is not a list of the codes {', '.join(STRATEGIES)}")
    return codes_of_replies


def emotion_changes(dialogue: dict) -> list[float | None]:
    """Returns the change of the emotion after each reply; None where the user did not answer."""
    changes = []
    before = None
    for turn in dialogue["history"]:
        if turn["role"] == "assistant":
            changes.append(None)
            continue
        if changes:
            changes[-1] = turn["emotion-point"] - before
        before = turn["emotion-point"]
    return changes


def score_strategies(dialogues: list[dict], codes: list[list[list[str]] | None]) -> dict:
    """Returns {group: {"n", "frequency", "n_changes", "contribution"}}.

    Args:
        dialogues: stored dialogues.
        codes: for each dialogue the codes of its replies, or None if the judge failed.
    """
    n_replies = 0
    counts = dict.fromkeys(GROUPS.values(), 0)
    changes = {group: [] for group in GROUPS.values()}
    for dialogue, codes_of_replies in zip(dialogues, codes, strict=True):
        if codes_of_replies is None:
            continue
        n_replies += len(codes_of_replies)
        for change, codes_of_reply in zip(emotion_changes(dialogue), codes_of_replies, strict=True):
            for letter in {code[0] for code in codes_of_reply}:
                counts[GROUPS[letter]] += 1
                if change is not None:
                    changes[GROUPS[letter]].append(change)

    scores = {}
    for group, count in counts.items():
        scores[group] = {
            "n": count,
            "frequency": count / n_replies,
            "n_changes": len(changes[group]),
            "contribution": mean(changes[group]),  # None without changes
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

{dialogue}

Mark the supporter on each of these five scales, over the whole conversation:

{scales}

A mark needs what its line says, and what the lines of the lower marks say. Decide each scale by itself. Length earns nothing.
Reply with one JSON object and nothing else, in which every mark is a whole number from 1 to 5:
{{"reasons": "a few sentences", {keys}}}"""


def capability_prompt(dialogue: dict) -> str:
    scales = []
    for name, (question, *marks) in CAPABILITIES.items():
        lines = [f"{mark}: {words}" for mark, words in enumerate(marks, 1)]
        scales.append("\n".join([f"# {name}", question, *lines]))
    keys = ", ".join(f'"{name}": 0' for name in CAPABILITIES)
    return CAPABILITY_PROMPT.format(dialogue=show(dialogue), scales="\n\n".join(scales), keys=keys)


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
        scores[name] = {"mean": mean(known), "interval": bootstrap(known, seed)}
    return scores


# --- 4. judging


def judged_dialogues(dialogues: list[dict]) -> list[dict]:
    """Returns the dialogues that a judge can read: those that have a score and a reply."""
    readable = []
    for dialogue in dialogues:
        has_score = simulated_user.final_emotion(dialogue) is not None
        if has_score and simulated_user.count_replies(dialogue):
            readable.append(dialogue)
    return readable


def requests(args, dialogues: list[dict], prompt: Callable[[dict], str]) -> list[dict]:
    """Returns what --judge is asked about each dialogue."""
    asked = []
    for dialogue in dialogues:
        message = {"role": "user", "content": prompt(dialogue)}
        asked.append(shared.judge_request(args, [message]))
    return asked


def judge(args, dialogues: list[dict], run: Path, suffix: str = "") -> dict:
    """Asks --judge about the dialogues, and returns the scores `judge`, `strategies` and `capabilities`.

    judged<suffix>.jsonl in the folder `run` gets what the judge said of each dialogue. Each score counts its
    failures as n_invalid; it has no numbers if these are more than --max-invalid.
    """
    dialogues = judged_dialogues(dialogues)
    if not dialogues:
        fail("--judge: no dialogue has a score and a reply")
    rows = [{"id": dialogue["id"]} for dialogue in dialogues]

    codes = find_strategies(args, dialogues, run)
    strategies = count_failures(codes)
    if is_reliable(args, strategies):
        strategies |= score_strategies(dialogues, codes)
    scores = {"judge": args.judge, "judge_fingerprint": fingerprint(args), "strategies": strategies}
    for row, codes_of_replies in zip(rows, codes, strict=True):
        row["strategies"] = codes_of_replies

    if ".py:" not in args.judge:
        asked = requests(args, dialogues, capability_prompt)
        marks = [reply.value for reply in shared.ask_judge(args, asked, read_marks, run)]
        capabilities = count_failures(marks)
        if is_reliable(args, capabilities):
            capabilities |= score_capabilities(marks, args.seed)
        scores["capabilities"] = capabilities
        for row, marks_of_dialogue in zip(rows, marks, strict=True):
            row["capabilities"] = marks_of_dialogue

    path = run / f"judged{suffix}.jsonl"
    path.unlink(missing_ok=True)
    append_jsonl(path, rows)
    return scores


def find_strategies(args, dialogues: list[dict], run: Path) -> list[list[list[str]] | None]:
    """Returns for each dialogue the codes of its replies, by --judge; None where it failed."""
    counts = [simulated_user.count_replies(dialogue) for dialogue in dialogues]
    if ".py:" in args.judge:
        program = load_function(args.judge)
        codes = []
        for dialogue, n_replies in zip(dialogues, counts, strict=True):
            codes.append(or_fail(check_codes, program(dialogue), n_replies))
        return codes

    asked = requests(args, dialogues, strategy_prompt)
    codes = [reply.value for reply in shared.ask_judge(args, asked, read_strategies, run)]
    # What reads the replies to all requests cannot know how many replies each dialogue has. Where the judge
    # has miscounted them, it is asked again.
    miscounted = defaultdict(list)  # places in `dialogues`, by the number of replies
    for place, n_replies in enumerate(counts):
        if codes[place] is not None and len(codes[place]) != n_replies:
            miscounted[n_replies].append(place)
    for n_replies, places in miscounted.items():
        parse = partial(read_strategies, n_replies=n_replies)
        replies = shared.ask_judge(args, [asked[place] for place in places], parse, run)
        for place, reply in zip(places, replies, strict=True):
            codes[place] = reply.value
    return codes


def fingerprint(args) -> str:
    """Hashes what two comparable judgements share: judge, endpoint and wording."""
    wording = [STRATEGY_PROMPT, STRATEGIES, CAPABILITY_PROMPT, CAPABILITIES]
    place = shared.resolve_judge_url(args.judge, args.judge_url)
    return shared.short_hash(json.dumps([args.judge, place, *wording, *shared.digests_of(args.judge)]))


def count_failures(judgements: list) -> dict:
    """Returns n and n_invalid, the number of judgements that are None."""
    return {"n": len(judgements), "n_invalid": judgements.count(None)}


def is_reliable(args, counts: dict) -> bool:
    """Tells whether at most --max-invalid of the judgements failed, and not all of them; warns if not."""
    n_invalid = counts["n_invalid"]
    if n_invalid < counts["n"] and n_invalid <= args.max_invalid * counts["n"]:
        return True
    print(f"WARNING: the judge failed on {n_invalid} of {counts['n']} dialogues, so there are no numbers")
    return False
