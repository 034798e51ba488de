"""Sentient: stored dialogues, their scores, and what a judge finds in the replies.

A dialogue is {"id", "emo_point", "history"}; rewards/simulated_user.py names the fields.

Emotion curve: the mean emotion after each answer of the user. A dialogue that has ended keeps its final one.

Strategies (RLVER, 2507.03112, section 3.6, table 4): a judge reads a dialogue and names the strategies of
every reply. The frequency of a group is the share of the replies that show one of its strategies. Its
contribution is the mean change of the emotion after these replies. A reply that the user did not answer has
no change, so a contribution is a mean over `n_changes` of the group's `n` replies.

Capabilities (section 3.3, appendix C): the judge marks a dialogue from 1 to 5 on each of five scales.

The lists, the scales and the formulas are the paper's. Differences from it: 1. The judge's instructions, and
the words of each scale, are our own. The paper prints its scales, a prompt for a longer
   list of strategies (appendix E.2) and the prompt for the capabilities (appendix E.3), which `--template
   FILE` takes from a file, with {$dialogue} in it and perhaps {$scales} and {$keys}. It must ask for the JSON
   that ours asks for.
2. One call judges all replies of a dialogue; the paper's judge seems to read them one at a time. A reply that
   does not name the strategies of each of them is invalid.
3. The paper draws frequencies from 0 to 10 without naming a unit. Ours are shares, from 0 to 1.

A judge is a language model, or file.py:function (dialogue) -> a list of codes for each reply, such as
data/toy/users.py:strategies. A program gives no marks.
"""

import json
from pathlib import Path

from benchmarks import shared
from benchmarks.judge_template import Placeholders, describe_wording, fill_messages, read_template
from benchmarks.scoring import bootstrap, mean, read_object, task_means
from rewards import simulated_user
from rlmt.data import read_rows, write_jsonl
from rlmt.run import load_function
from utils import fail, or_fail

# --- 1. stored dialogues


def turns_of_user(dialogue: dict) -> list[dict]:
    return [turn for turn in dialogue["history"] if turn["role"] == "user"]


def read(path: str) -> list[dict]:
    """Reads stored dialogues; exits with 2 on a row that is not one."""
    dialogues = read_rows(path, "emo_point", "history")
    for number, dialogue in enumerate(dialogues, 1):
        dialogue.setdefault("ended", "")
        emotions = [turn.get("emotion-point") for turn in turns_of_user(dialogue)]
        if None in emotions or not emotions:
            fail(f"{path}:{number}: every turn of the user needs an 'emotion-point'")
    return dialogues


def score(dialogues: list[dict], seed: int) -> dict:
    """Returns the Sentient score and its counts, with the 95 % interval, `format_ok` and `emotion_curve`."""
    ids = []
    finals = []
    is_ok = []  # of the model's replies; dialogues of the official tool have no status
    for dialogue in dialogues:
        final = simulated_user.final_emotion(dialogue)
        if final is not None:
            ids.append(dialogue["id"])
            finals.append(final)
        is_ok += [turn["status"] == "ok" for turn in dialogue["history"] if "status" in turn]

    scores = simulated_user.score(dialogues)
    scores["interval"] = bootstrap(finals, seed)
    scores["task_means"] = {"mean_emotion": task_means(finals, ids)}
    scores["format_ok"] = mean(is_ok)
    scores["emotion_curve"] = emotion_curve(dialogues)
    return scores


def emotion_curve(dialogues: list[dict]) -> list[float]:
    """Returns the mean emotion at the start and after each answer, over the dialogues that have a score.

    A dialogue that has ended keeps its final emotion, so the last value is the Sentient score.
    """
    curves = []
    for dialogue in dialogues:
        final = simulated_user.final_emotion(dialogue)
        if final is None:
            continue
        emotions = [turn["emotion-point"] for turn in turns_of_user(dialogue)]
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


def strategy_request(args, dialogue: dict) -> dict:
    n_replies = simulated_user.count_replies(dialogue)
    fields = {
        "dialogue": show(dialogue),
        "strategies": "\n".join(f"{code}: {words}" for code, words in STRATEGIES.items()),
        "keys": ", ".join(f'"{number}": ["..."]' for number in range(1, n_replies + 1)),
    }
    return shared.judge_request(args, fill_messages(STRATEGY_PROMPT, fields))


def read_strategies(text: str) -> list[list[str]]:
    """Reads the codes of the replies 1, 2, ...; ValueError if they are not lists of keys of STRATEGIES."""
    found = read_object(text)
    return check_codes([found.get(str(number)) for number in range(1, len(found) + 1)])


def check_codes(codes_of_replies: list) -> list[list[str]]:
    """Returns the codes of each reply; ValueError unless they are lists of keys of STRATEGIES."""
    known = list(STRATEGIES)  # a list, as a judge may write what cannot be looked up in a dict
    for codes in codes_of_replies:
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
    changes = {letter: [] for letter in GROUPS}  # after each reply that shows one of the group's strategies
    for dialogue, codes_of_replies in zip(dialogues, codes, strict=True):
        if codes_of_replies is None:
            continue
        n_replies += len(codes_of_replies)
        for change, codes_of_reply in zip(emotion_changes(dialogue), codes_of_replies, strict=True):
            for letter in {code[0] for code in codes_of_reply}:
                changes[letter].append(change)

    scores = {}
    for letter, group in GROUPS.items():
        known = [change for change in changes[letter] if change is not None]
        scores[group] = {
            "n": len(changes[letter]),
            "frequency": len(changes[letter]) / n_replies,
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
        scores[name] = {"mean": mean(known), "interval": bootstrap(known, seed)}
    return scores


# --- 4. judging


def check_judge(args) -> None:
    """Exits with 2 if --judge cannot be asked, or if --template cannot be filled in."""
    shared.check_judge(args)
    capability_template(args)


def capability_template(args) -> str:
    if args.template:
        return read_template(args.template, PLACEHOLDERS)
    return CAPABILITY_PROMPT


def judge(args, dialogues: list[dict], run: Path, suffix: str = "") -> dict:
    """Asks --judge about the dialogues, and returns the scores `judge`, `strategies` and `capabilities`.

    judged<suffix>.jsonl in the folder `run` gets what the judge said of each dialogue. Each score counts its
    failures as n_invalid; it has no numbers if these are more than --max-invalid.
    """
    readable = []
    for dialogue in dialogues:
        has_score = simulated_user.final_emotion(dialogue) is not None
        if has_score and simulated_user.count_replies(dialogue):
            readable.append(dialogue)
    if not readable:
        fail("--judge: no dialogue has a score and a reply")
    scores = {"judge": args.judge, "judge_fingerprint": fingerprint(args)}
    is_program = ".py:" in args.judge

    if is_program:
        program = load_function(args.judge)
        codes = [or_fail(check_codes, program(dialogue)) for dialogue in readable]
    else:
        requests = [strategy_request(args, dialogue) for dialogue in readable]
        codes = [reply.value for reply in shared.ask_judge(args, requests, read_strategies, run)]
    for place, dialogue in enumerate(readable):
        if codes[place] is not None and len(codes[place]) != simulated_user.count_replies(dialogue):
            codes[place] = None
    scores["strategies"] = counts = count_failures(codes)
    if is_reliable(args, counts):
        counts |= score_strategies(readable, codes)
    rows = []
    for dialogue, codes_of_replies in zip(readable, codes, strict=True):
        rows.append({"id": dialogue["id"], "strategies": codes_of_replies})

    if not is_program:
        scores["wording"] = describe_wording(args.template)
        requests = []
        for dialogue in readable:
            messages = fill_messages(capability_template(args), capability_fields(dialogue))
            requests.append(shared.judge_request(args, messages))
        marks = [reply.value for reply in shared.ask_judge(args, requests, read_marks, run)]
        scores["capabilities"] = counts = count_failures(marks)
        if is_reliable(args, counts):
            counts |= score_capabilities(marks, args.seed)
        for row, marks_of_dialogue in zip(rows, marks, strict=True):
            row["capabilities"] = marks_of_dialogue

    write_jsonl(run / f"judged{suffix}.jsonl", rows)
    return scores


def fingerprint(args) -> str:
    """Hashes what two comparable judgements share: judge, endpoint and wording."""
    wording = [STRATEGY_PROMPT, STRATEGIES, capability_template(args), CAPABILITIES]
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
