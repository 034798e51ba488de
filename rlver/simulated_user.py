"""The simulated user of SAGE and RLVER (arXiv 2507.03112): a person with a hidden wish and an emotion.

Every reply of the tested model changes the emotion. SAGE's score is the final one; so is RLVER's reward.

A dialogue is a dict {"id", "profile", "history", "emo_point", "emo_state", "ended"}.
It also has "error" if the simulator failed.

history    list of turns {"role", "content"}, the first by the user.
           Turns of the user also have "emotion-point" (the emotion after it) and, but for the first, "change"
           (not clipped). If an endpoint wrote them, they have "planning" and "thinking" too.
           Turns of the tested model also have "text" (all that it wrote), "thinking" and "status"
           (see utils.split_thinking).
emo_point  the emotion now; emo_state: its letter, see STATES.
ended      "" while the dialogue goes on, else why it ended; see ENDS.

The user is an Endpoint, or a function (dialogue, setting) -> (utterance, change) as in rlver/toy_users.py.
An Endpoint is asked twice a turn. The planner reads the person, the situation, the wish and the dialogue, and
says how the emotion changes. The speaker reads the planner's notes and the new state, and writes the message.
"""

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template

from accelerate.utils import gather_object

from rlmt.data import check_ids, read_rows
from rlmt.foreign import answer_shows_response, split_answer
from rlmt.endpoint import TWO_LINES, Endpoint, dollars, try_endpoint
from rlmt.scorers import Who, connect, load_function
from rlmt.verdicts import verdict_of
from rlver.prompts import NAMES, PLANNER, RULES, SPEAKER, SYSTEM
from utils import ASK_THINKING, fail

User = Endpoint | Callable[[dict, dict], tuple[str, float]]

# --- 1. settings

SAGE = {
    # emotion
    "start": 40,  # emotion before the model's first reply
    "max_change": 10,  # a change is clipped to -10 .. 10; None: not clipped
    "cap": 100,  # the emotion never rises above this; it may fall below 0
    # end of a dialogue
    "high": 100,  # ends at this emotion; None: only at the goodbye that the speaker is told to say at 100
    "low": 10,  # ends below this emotion
    "turns": 10,  # ends with this many replies of the model
    "answer_last": False,  # whether the user still answers the last of them
    # what a malformed reply does
    # "say": the user hears what follows the last </think>, or the whole text if there is none
    # "end": the dialogue ends, and its final emotion counts as 0
    "bad_format": "say",
    # user
    "kind": "vanilla",  # or "challenging": hides the wish, and only its fulfilment raises the emotion
    "temperature": 0.5,  # of planner and speaker; RLVER uses 0.5
    "max_tokens": 2048,  # per reply of planner or speaker
    "seed": 0,  # another seed gets other replies to the same words
}
RLVER = {
    **SAGE,
    "start": 30,
    "max_change": None,
    "high": None,
    "low": 1,
    "turns": 8,
    "answer_last": True,
    "bad_format": "end",
}
PROTOCOLS = {"sage": SAGE, "rlver": RLVER}

STATES = {"S": 100, "A": 70, "B": 40, "C": 10}  # the lowest emotion of each state; below all of them it is F
# why a dialogue ended; too_long: for the model's context, or its endpoint refused it, as `error` says
NO_SCORE = ("simulator_failed", "too_long")  # such an end says nothing about the model
ENDS = ("goodbye", "satisfied", "failed", "turns", "bad_format", *NO_SCORE)


# --- 2. what the tested model reads


def language_of(dialogue: dict) -> str:
    """Returns "zh" if the user's first message has Chinese characters, else "en": all prompts are in it."""
    if re.search("[\u4e00-\u9fff]", dialogue["history"][0]["content"]):
        return "zh"
    return "en"


def chat_messages(dialogue: dict, ask_thinking: bool = False, keep_thinking: bool = False) -> list[dict]:
    """Returns the dialogue as chat messages for the tested model.

    Args:
        ask_thinking: the system line asks for a <think> block.
        keep_thinking: the model reads the thinking of its earlier turns; otherwise only what it said.

    A profile's field `system` replaces our system line; an empty one leaves it out.
    """
    lang = language_of(dialogue)
    system = dialogue["profile"].get("system")
    if system is None:
        system = SYSTEM[lang]
    if ask_thinking:
        system = f"{system}\n{ASK_THINKING[lang]}".lstrip("\n")

    messages = []
    if system:
        messages.append({"role": "system", "content": system})
    for turn in dialogue["history"]:
        content = turn["content"]
        if keep_thinking and turn["role"] == "assistant":
            content = turn["text"]
        messages.append({"role": turn["role"], "content": content})
    return messages


# --- 3. a dialogue, turn by turn


def read_profiles(path: str) -> list[dict]:
    """Reads profiles {id, player, scene, task, first_talk} from a jsonl file; exits with 2 on a bad row."""
    profiles = read_rows(path, "player", "scene", "task", "first_talk")
    check_ids(path, profiles, "profiles")
    return profiles


def start(profile: dict, setting: dict) -> dict:
    """Starts a dialogue with the user's first message, which the profile holds."""
    emotion = setting["start"]
    first_turn = {"role": "user", "content": profile["first_talk"], "emotion-point": emotion}
    return {
        "id": profile["id"],
        "profile": profile,
        "history": [first_turn],
        "emo_point": emotion,
        "emo_state": emotion_state(emotion),
        "ended": "",
    }


def start_with_answer(profile: dict, setting: dict) -> dict:
    """Starts a dialogue in which the model has answered two lines; what endpoints are tried with."""
    dialogue = start(profile, setting)
    add_model_turn(dialogue, setting, TWO_LINES, "plain")
    return dialogue


def count_replies(dialogue: dict) -> int:
    """Returns how often the tested model has spoken."""
    return sum(turn["role"] == "assistant" for turn in dialogue["history"])


def add_model_turn(
    dialogue: dict,
    setting: dict,
    text: str,
    think_format: str,
    finished: bool = True,
) -> None:
    """Adds a turn of the tested model. The user hears it without the thinking.

    Args:
        text: the reply as it was generated, decoded without its end-of-turn token.
        think_format: a key of THINK_FORMATS or FOREIGN_STYLES.
        finished: False if the token limit cut the reply off.
    """
    parts = split_answer(text, think_format, finished)
    heard = parts.response
    if not answer_shows_response(text, think_format):  # nothing tells thinking from response
        heard = text.strip()
    turn = {
        "role": "assistant",
        "content": heard,
        "text": text,
        "thinking": parts.thinking,
        "status": parts.status,
    }
    dialogue["history"].append(turn)
    if parts.status != "ok" and setting["bad_format"] == "end":
        dialogue["ended"] = "bad_format"


def converse(dialogues: list[dict], setting: dict, user: User, in_step: bool = False) -> Iterator[list[int]]:
    """Continues dialogues to their ends, in rounds. A round yields the indices of those that have not ended: the
    loop's body adds a turn of the tested model to each of them, or ends it. Then the user answers.

    Dialogues of an earlier start go on where they were.

    Args:
        in_step: there are rounds until the dialogues of all processes have ended.
    """
    while True:
        user_turns(dialogues, setting, user)
        live = [index for index, dialogue in enumerate(dialogues) if not dialogue["ended"]]
        goes_on = [bool(live)]
        if in_step:
            goes_on = gather_object(goes_on)
        if not any(goes_on):
            return
        yield live


def user_turns(dialogues: list[dict], setting: dict, user: User) -> None:
    """Adds the user's turn to every dialogue that goes on and in which the tested model spoke last."""
    waiting = []
    for dialogue in dialogues:
        if dialogue["ended"] or dialogue["history"][-1]["role"] != "assistant":
            continue
        if not setting["answer_last"] and count_replies(dialogue) >= setting["turns"]:
            dialogue["ended"] = "turns"
        else:
            waiting.append(dialogue)

    if isinstance(user, Endpoint):
        ask_endpoint(waiting, setting, user)
        return
    for dialogue in waiting:
        utterance, change = user(dialogue, setting)
        if not math.isfinite(change):
            raise ValueError(f"the simulated user must return a finite change of the emotion, not {change}")
        add_user_turn(dialogue, setting, utterance, change)


def add_user_turn(dialogue: dict, setting: dict, utterance: str, change: float, **notes) -> None:
    """Adds a turn of the user, changes the emotion, and ends the dialogue if a rule says so.

    `notes` are further fields of the turn, such as the planner's reasons.
    """
    emotion = new_emotion(dialogue["emo_point"], change, setting)
    turn = {"role": "user", "content": utterance, "emotion-point": emotion, "change": change, **notes}
    dialogue["history"].append(turn)
    dialogue["emo_point"] = emotion
    dialogue["emo_state"] = emotion_state(emotion)
    dialogue["ended"] = ending(emotion, utterance, setting)
    if not dialogue["ended"] and count_replies(dialogue) >= setting["turns"]:
        dialogue["ended"] = "turns"


# --- 4. the emotion

# "Goodbye, Tom!", but not "I never got to say goodbye to Dad", nor 再见到 ("see again"). SAGE, and RLVER's
# released code, take the word anywhere in a message.
GOODBYE = re.compile(
    r"(再见|拜拜|\b(good ?)?bye\b)([了啦吧喽哦]| then| now| for now)*( and\b|\s*[^\w\s]|\s*$)", re.IGNORECASE
)


def emotion_state(emotion: float) -> str:
    """Returns the state of an emotion, from Emotion-S (best) to Emotion-F (worst)."""
    for letter, lowest in STATES.items():
        if emotion >= lowest:
            return f"Emotion-{letter}"
    return "Emotion-F"


def new_emotion(emotion: float, change: float, setting: dict) -> float:
    """Returns the emotion after a change, which is clipped first if the setting says so."""
    limit = setting["max_change"]
    if limit is not None:
        change = max(-limit, min(limit, change))
    return min(setting["cap"], emotion + change)


def ending(emotion: float, utterance: str, setting: dict) -> str:
    """Returns why a turn of the user ends the dialogue (satisfied, failed, goodbye), or "" if it goes on."""
    if setting["high"] is not None and emotion >= setting["high"]:
        return "satisfied"
    if emotion < setting["low"]:
        return "failed"
    if GOODBYE.search(utterance):
        return "goodbye"
    return ""


def final_emotion(dialogue: dict) -> float | None:
    """Returns the emotion that a dialogue counts with, or None if it has no score.

    RLVER's reward is max(0, final emotion / 100).
    """
    ended = dialogue.get("ended")  # the official tool does not store it
    if ended in (*NO_SCORE, ""):  # "" goes on
        return None
    if ended == "bad_format":
        return 0
    return dialogue["emo_point"]


# --- 5. a user who is a language model: planner and speaker


def transcript(dialogue: dict, turns: list[dict]) -> str:
    """Writes turns as lines "Person: ..." and "Partner: ..." for a prompt; "-" if there are none.

    The further lines of a turn are indented. So no turn can forge the words of the other side, or a heading.
    """
    names = NAMES[language_of(dialogue)]
    lines = []
    for turn in turns:
        first, *others = turn["content"].splitlines() or [""]
        lines.append(f"{names[turn['role']]}: {first}")
        lines += [f"    {line}" for line in others]
    return "\n".join(lines) or "-"


def make_request(templates: dict[str, str], n_rule: int, dialogue: dict, setting: dict, **fields) -> dict:
    """Fills a prompt with the profile, the rule `n_rule` (from 0) and `fields`; returns the body of an
    endpoint's request."""
    lang = language_of(dialogue)
    profile = dialogue["profile"]
    prompt = Template(templates[lang]).substitute(
        player=profile["player"],
        scene=profile["scene"],
        task=profile["task"],
        rule=RULES[setting["kind"], lang][n_rule],
        **fields,
    )
    return {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": setting["temperature"],
        "max_tokens": setting["max_tokens"],
        "seed": setting["seed"],
    }


def planner_request(dialogue: dict, setting: dict) -> dict:
    """Returns the request for the change of the emotion; `read_plan` reads the reply."""
    history = transcript(dialogue, dialogue["history"])
    return make_request(PLANNER, 0, dialogue, setting, emotion=dialogue["emo_point"], history=history)


def speaker_request(dialogue: dict, setting: dict, plan: dict) -> dict:
    """Returns the request for the user's next message; `read_speech` reads the reply."""
    history = dialogue["history"]
    emotion = new_emotion(dialogue["emo_point"], plan["change"], setting)
    return make_request(
        SPEAKER,
        1,
        dialogue,
        setting,
        state=emotion_state(emotion).removeprefix("Emotion-"),
        planning="\n".join([plan["TargetCompletion"], plan["activity"], plan["analyse"]]),
        earlier=transcript(dialogue, history[:-2]),
        latest=transcript(dialogue, history[-2:]),
    )


def load_user(flag: str, who: Who, store: Path, args, n_shares: int = 1) -> User:
    """Returns what plays the user; exits with 2 if it is neither a function nor a model at an endpoint.

    Args:
        flag: the one that names it.
        store: the file that keeps the replies of an endpoint.
        args: of the script; its budget is for `n_shares` processes.
    """
    if who.kind == "function":
        return load_function(who.name)
    if who.kind != "endpoint":
        fail(f"{flag} {who.name!r}: name a model at {flag}-url, or file.py:function")
    return connect(who, store, args, n_shares, concurrency=args.concurrency, fresh=args.overwrite)


def try_user(flag: str, user: User, request: dict, n_replies: int) -> None:
    """Prints what an endpoint will be asked at most, and asks it first; exits with 2 if no plan comes.

    The calls are those of a run in which every reply can be read.

    Args:
        flag: the one that names the user.
        request: the planner's, about the dialogue of `start_with_answer`.
        n_replies: that the tested model may give in all dialogues; each is answered by two calls.
    """
    if not isinstance(user, Endpoint):
        return
    n_calls = 2 * n_replies
    n_tokens = n_calls * request["max_tokens"]
    cost = dollars((0, n_tokens), user.price)
    print(f"{flag}: at most {n_calls} calls, which write at most {n_tokens} tokens, ${cost:.2f}")
    try_endpoint(user, request, flag, read_plan)


def ask_endpoint(dialogues: list[dict], setting: dict, user: Endpoint) -> None:
    """Adds the user's turn to every dialogue, by one call of the planner and one of the speaker each.

    A dialogue whose planner or speaker stays unreadable ends as simulator_failed and has no score.
    """
    if not dialogues:
        return
    requests = [planner_request(dialogue, setting) for dialogue in dialogues]
    planned = []
    for dialogue, plan in zip(dialogues, user.ask(requests, read_plan, name="planner"), strict=True):
        if plan.error:
            end_without_score(dialogue, plan.error)
        else:
            planned.append((dialogue, plan.value))

    requests = [speaker_request(dialogue, setting, plan) for dialogue, plan in planned]
    speeches = user.ask(requests, read_speech, name="speaker")
    for (dialogue, plan), speech in zip(planned, speeches, strict=True):
        if speech.error:
            end_without_score(dialogue, speech.error)
            continue
        thinking, utterance = speech.value
        add_user_turn(dialogue, setting, utterance, plan["change"], planning=plan, thinking=thinking)


def end_without_score(dialogue: dict, error: str) -> None:
    dialogue["ended"] = "simulator_failed"
    dialogue["error"] = error


# what opens a section of a planner's or a speaker's reply
LABEL = re.compile(
    r"(Content|TargetCompletion|Activity|Analyse|Change|Thinking|Origin|Response)[\s*]*[:：][\s*]*"
)


def read_sections(text: str) -> dict[str, str]:
    """Returns the text after each label, up to the next one: the last if a label is repeated, "" without
    it."""
    _, *parts = LABEL.split(text)  # label, body, label, body, ...
    sections = defaultdict(str)
    for label, body in zip(parts[0::2], parts[1::2], strict=True):
        sections[label] = body.strip(" \n*#[]")
    return sections


def read_plan(text: str) -> dict:
    """Reads a planner's reply: {"content", "TargetCompletion", "activity", "analyse", "change"}.

    `change` is the first number after the last `Change:`, as in SAGE. If `read_change` raises ValueError, the
    endpoint asks the planner again.
    """
    sections = read_sections(verdict_of(text))
    return {
        "content": sections["Content"],
        "TargetCompletion": sections["TargetCompletion"],
        "activity": sections["Activity"],
        "analyse": sections["Analyse"],
        "change": read_change(sections["Change"]),
    }


# what makes a number the first of two: 5-10, 5 to 10, 1/2, 40 -> 45
RANGE = r" *(?:[-~./\u2044→⇒➔到至]|[-=]+>|to\b) *[-+]?[0-9]"


def read_change(section: str) -> int:
    """Reads the number that a planner wrote after `Change:`.

    Raises ValueError if there is none, for a fraction or a range, for a step from one emotion to another, and
    for a number beyond the scale of 100. A number without its sign is refused too if words, other numbers or
    an arrow stand next to it, because "falls by 5", "5 points down" and "40 -> 45" would count as rises.
    """
    section = unicodedata.normalize("NFKC", section)  # full-width digits and signs
    section = re.sub("[\u2010-\u2015\u2212]", "-", section)  # dashes that are used as a minus
    number = re.search(rf"([-+±]*)([0-9]+)({RANGE})?", section)
    problem = f"no integer with its sign after Change: {section[:40]!r}"
    if number is None:
        raise ValueError(problem)

    sign, digits, fraction_or_range = number.groups()
    stands_alone = re.fullmatch(r"[^\w+±-]*[0-9]+[^\w→⇒➔>]*", section)
    if fraction_or_range or not (sign or stands_alone):
        raise ValueError(problem)

    change = int(sign + digits)  # ValueError for two signs, and for ±
    if abs(change) > 100:
        raise ValueError(f"Change: {change} is beyond the scale of 100")
    return change


def read_speech(text: str) -> tuple[str, str]:
    """Reads a speaker's reply: (thinking, utterance). The utterance is all that follows the last `Response:`.

    Raises ValueError if nothing follows it.
    """
    text = verdict_of(text)
    _, *replies = re.split(r"Response[\s*]*[:：][\s*]*", text)
    utterance = "".join(replies[-1:]).strip()
    in_quotes = re.fullmatch(r'"(.*)"|“(.*)”|「(.*)」|\[(.*)\]', utterance, re.DOTALL)
    if in_quotes:
        utterance = in_quotes[in_quotes.lastindex].strip()
    if not utterance:
        raise ValueError("nothing after Response:")
    return read_sections(text)["Thinking"], utterance
