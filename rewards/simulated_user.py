"""The simulated user of SAGE and RLVER (2507.03112): persona, scene, a hidden wish, and an emotion that every reply moves.

A dialogue is a dict {"id", "profile", "history", "emo_point", "emo_state", "ended"[, "error"]}. `history` holds {"role",
"content"}, of the user also "emotion-point", "change" (as given, not clipped), "planning", "thinking", and of the tested
model "text" (all that it wrote), "thinking", "status" (utils.split_thinking). `ended`: "" while it goes on, or goodbye,
satisfied, failed, turns, bad_format, simulator_failed, too_long (for the model's context).

The user is an Endpoint, asked twice a turn for all dialogues at once: the planner reads persona, scene, wish, history and
emotion, and gives the change of the emotion; the speaker reads the planner's words and the emotion's state, and speaks. Or it
is a function (dialogue, setting) -> (utterance, change), as in data/toy/users.py. The prompts are our own wording in the
language of the profile; only the labels of their sections are those of the published simulator.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from string import Template

import runs
from rows import read_rows
import utils
from endpoint import Endpoint

SAGE = {
    "start": 40,  # emotion
    "max_change": 10,  # a change is clipped to -10 .. 10; None: not at all
    "cap": 100,  # greatest emotion; there is no least one
    "high": 100,  # the dialogue ends at this emotion; None: once the user says goodbye, as the speaker is told to at 100
    "low": 10,  # and below this one
    "turns": 10,  # and with the last of so many replies of the tested model
    "answer_last": False,  # whether the user hears and answers that one
    "bad_format": "say",  # what follows the last </think>, or all of it, is said; "end": the dialogue ends and counts 0
    "kind": "vanilla",  # or challenging: hides the wish, and nothing but its fulfilment raises the emotion
    "temperature": 0.5,  # of planner and speaker; RLVER's
    "max_tokens": 2048,  # of a reply of theirs
    "seed": 0,  # another one gets other replies to the same words
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
STATES = {"S": 100, "A": 70, "B": 40, "C": 10}  # the least emotion of each; below them F
NO_SCORE = ("simulator_failed", "too_long")

# --- prompts

SYSTEM = {
    "zh": "你是一位情商很高的聊天伙伴：听懂对方的心情和没有说出口的需要，用让人感到被理解的方式回应。",
    "en": "You are a chat partner with high emotional intelligence: notice what the other person feels, and what they need "
    "but do not say, and answer so that they feel understood.",
}
ASK_THINKING = {
    "zh": "每次先在 <think> 和 </think> 之间想清楚对方的感受和需要，再写要说的话。对方看不到思考。",
    "en": "Each time, first think between <think> and </think> about what the other person feels and needs, then write what "
    "you say. They do not see the thinking.",
}
GOODBYE = {"zh": re.compile("再见|拜拜"), "en": re.compile(r"\b(good ?)?bye\b", re.IGNORECASE)}
NAMES = {"zh": {"user": "倾诉者", "assistant": "聊天对象"}, "en": {"user": "Person", "assistant": "Partner"}}
PLANNER = {
    "zh": """下面这位倾诉者正在和聊天对象说话。请替他体会：聊天对象最新的一句话，让他的情绪上升还是下降？
# 倾诉者
$player
# 他的处境
$scene
他藏在心里的诉求：$task
# 对话，从头到最新
$history
# 怎样判断
情绪是 0 到 100 的数，表示他有多愿意把话说下去、说得多舒心。现在是 $emotion。
看最新一句话为他的诉求做了什么，按他的性格和处境里写明的反应来感受，不按旁人的标准。
答非所问、不知所云、翻来覆去说同样的话，都会让他不快。
$rule
# 依次写五段，标签照抄
Content: 聊天对象最新一句话想表达什么
TargetCompletion: 它哪里满足了诉求，哪里没有
Activity: 他此刻的内心独白
Analyse: 他因此有什么感受，为什么
Change: 情绪的变化，一个带正负号的整数，除此之外什么也不写""",
    "en": """The person below is talking to a chat partner. Feel for them: does the partner's latest message raise or lower
their emotion?
# The person
$player
# Their situation
$scene
What they want in secret: $task
# The dialogue, up to the latest message
$history
# How to judge
The emotion is a number from 0 to 100: how glad they are to talk on, and how good it does them. It is $emotion now.
Ask what the latest message did for what they want; react as their character and situation have it, not as others would.
An answer beside the point, gibberish, or the same thing said over again displeases them.
$rule
# Write five sections in this order, with exactly these labels
Content: what the partner's latest message means to say
TargetCompletion: where it meets what they want, and where it does not
Activity: what goes through their mind now
Analyse: what they feel about it, and why
Change: the change of the emotion, an integer with its sign and nothing else""",
}
SPEAKER = {
    "zh": """你就是下面的倾诉者，正在和聊天对象说话。写出你要说的下一句。
# 你
$player
# 你的处境
$scene
你藏在心里的诉求：$task
# 之前的对话
$earlier
# 最近的两句
$latest
# 你对最新一句的反应
情绪档位：$state（S 最好，依次是 A、B、C，F 最差）
$planning
# 说话的要求
语气跟着档位走：越好越投入、友善，越差越冷淡、烦躁。档位是 S 或 F 时就告别，话里要有“再见”。
像平时聊天那样口语、简短，保持你的说话习惯；多说具体的事，把情绪放在语气里；最多问两个问题；不重复已经说过的。
$rule
# 依次写四段，标签照抄
Thinking: 你的态度、这句话的目的、语气和内容
Origin: 初稿
Change: 按上面的要求，初稿哪里要改
Response: 最后说出口的话，别的都不写""",
    "en": """You are the person below, talking to a chat partner. Write what you say next.
# You
$player
# Your situation
$scene
What you want in secret: $task
# The dialogue so far
$earlier
# The latest two messages
$latest
# Your reaction to the latest one
Mood: $state (S is best, then A, B and C; F is worst)
$planning
# How you speak
Your tone follows the mood: the better, the warmer and more open; the worse, the colder and more annoyed. At S or F you take
your leave, with the word "goodbye".
Colloquial and short, in your own manner; things that happened rather than feelings in the abstract; at most two questions;
nothing that you have said before.
$rule
# Write four sections in this order, with exactly these labels
Thinking: your attitude, the aim of what you say, its tone and content
Origin: a draft
Change: what the rules above change in it
Response: what you say in the end, and nothing else""",
}
RULES = {  # of planner and speaker
    ("vanilla", "zh"): (
        "他领得了好意：真诚的关心、说到点上的夸奖、在理的建议，没有正中诉求也能让情绪上升一点。",
        "不直接说出诉求，但可以讲处境里的细节，让对方慢慢明白。",
    ),
    ("vanilla", "en"): (
        "They take kindness for what it is: honest care, praise to the point or sensible advice raises the "
        "emotion a little even where it misses what they want.",
        "Never state what you want, but you may tell details of the situation that let the partner see it.",
    ),
    ("challenging", "zh"): (
        "他很难打动：只有明确正中诉求的话才能让情绪上升；安慰、夸奖、泛泛的建议至多不变，多半下降。",
        "始终不说出、不暗示诉求，对方猜错也不纠正。",
    ),
    ("challenging", "en"): (
        "They are hard to win: the emotion rises only where the message plainly meets what they want; "
        "comfort, praise and general advice leave it as it is at best, and mostly lower it.",
        "At no time state or hint at what you want, nor put the partner right.",
    ),
}

# --- a dialogue


def language(text: str) -> str:
    return "zh" if re.search("[\u4e00-\u9fff]", text) else "en"


def read_profiles(path: str) -> list[dict]:
    """Profile rows {id, player, scene, task, first_talk} of a jsonl file; exits with 2 for what is no such row."""
    texts = ("player", "scene", "task", "first_talk")
    rows = read_rows(path, *texts)
    for number, row in enumerate(rows, 1):
        if wrong := [key for key in texts if not isinstance(row[key], str)]:
            runs.fail(f"{path}:{number}: {wrong[0]!r} is not a text")
    if twice := [i for i, n in Counter(row["id"] for row in rows).items() if n > 1]:
        runs.fail(f"{path}: several profiles have the id {twice[0]!r}; give each its own")
    return rows


def state(emotion: float) -> str:
    return "Emotion-" + next((letter for letter, least in STATES.items() if emotion >= least), "F")


def start(profile: dict, setting: dict) -> dict:
    """A new dialogue; its first turn, the user's, stands in the profile."""
    emotion = setting["start"]
    history = [{"role": "user", "content": profile["first_talk"], "emotion-point": emotion}]
    return {
        "id": profile["id"],
        "profile": profile,
        "history": history,
        "emo_point": emotion,
        "emo_state": state(emotion),
        "ended": "",
    }


def replies(dialogue: dict) -> int:
    return sum(m["role"] == "assistant" for m in dialogue["history"])


def chat_messages(dialogue: dict, ask_thinking: bool = False, keep_thinking: bool = False) -> list[dict]:
    """What the tested model reads. A profile's own `system` takes the place of our system line; an empty one leaves it out."""
    tongue, key = language(dialogue["history"][0]["content"]), "text" if keep_thinking else "content"
    system = [dialogue["profile"].get("system", SYSTEM[tongue])] + [ASK_THINKING[tongue]] * ask_thinking
    turns = [{"role": "system", "content": "\n".join(filter(None, system))}] * any(system)
    return turns + [{"role": m["role"], "content": m.get(key, m["content"])} for m in dialogue["history"]]


def say(dialogue: dict, setting: dict, text: str, think_format: str, finished: bool = True) -> None:
    """Adds the tested model's turn, `text` as it was generated; the user hears it without the thinking."""
    parts = utils.split_thinking(text, think_format, finished)
    said = parts.response if utils.RESPONSE_AFTER[think_format] in text else text.strip()
    dialogue["history"].append(
        {
            "role": "assistant",
            "content": said,
            "text": text,
            "thinking": parts.thinking,
            "status": parts.status,
        }
    )
    if parts.status != "ok" and setting["bad_format"] == "end":
        dialogue["ended"] = "bad_format"


def reply(dialogues: list[dict], setting: dict, user: Endpoint | Callable) -> None:
    """The user's turn in every dialogue that goes on and whose last message is the tested model's."""
    live = [d for d in dialogues if not d["ended"] and d["history"][-1]["role"] == "assistant"]
    if not setting["answer_last"]:
        for dialogue in (d for d in live if replies(d) >= setting["turns"]):
            dialogue["ended"] = "turns"
    live = [d for d in live if not d["ended"]]
    if isinstance(user, Endpoint):
        return _ask(live, setting, user)
    for dialogue in live:
        utterance, change = user(dialogue, setting)
        hear(dialogue, setting, utterance, change)


def new_emotion(emotion: float, change: float, setting: dict) -> float:
    most = setting["max_change"]
    return min(setting["cap"], emotion + (change if most is None else max(-most, min(most, change))))


def ending(emotion: float, utterance: str, tongue: str, setting: dict) -> str:
    """What a turn of the user ends the dialogue with: satisfied, failed, goodbye; "" if it goes on."""
    if setting["high"] is not None and emotion >= setting["high"]:
        return "satisfied"
    return "failed" if emotion < setting["low"] else "goodbye" if GOODBYE[tongue].search(utterance) else ""


def hear(dialogue: dict, setting: dict, utterance: str, change: float, **notes) -> None:
    """Adds a turn of the user, moves the emotion, and ends the dialogue where that is due."""
    emotion, history = new_emotion(dialogue["emo_point"], change, setting), dialogue["history"]
    history.append(
        {"role": "user", "content": utterance, "emotion-point": emotion, "change": change, **notes}
    )
    dialogue["emo_point"], dialogue["emo_state"] = emotion, state(emotion)
    dialogue["ended"] = ending(emotion, utterance, language(history[0]["content"]), setting)
    if not dialogue["ended"] and replies(dialogue) >= setting["turns"]:
        dialogue["ended"] = "turns"


# --- planner and speaker


def _lines(messages: list[dict], tongue: str) -> str:
    return "\n".join(f"{NAMES[tongue][m['role']]}: {m['content']}" for m in messages) or "-"


def _request(template: str, dialogue: dict, setting: dict, **fields) -> dict:
    profile = {key: dialogue["profile"][key] for key in ("player", "scene", "task")}
    content = Template(template).substitute(profile | fields)
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": setting["temperature"],
        "max_tokens": setting["max_tokens"],
        "seed": setting["seed"],
    }


def planner_request(dialogue: dict, setting: dict) -> dict:
    tongue = language(dialogue["history"][0]["content"])
    return _request(
        PLANNER[tongue],
        dialogue,
        setting,
        rule=RULES[setting["kind"], tongue][0],
        emotion=dialogue["emo_point"],
        history=_lines(dialogue["history"], tongue),
    )


def speaker_request(dialogue: dict, setting: dict, plan: dict) -> dict:
    tongue, history = language(dialogue["history"][0]["content"]), dialogue["history"]
    mood = state(new_emotion(dialogue["emo_point"], plan["change"], setting))[-1]
    planning = "\n".join(plan[key] for key in ("TargetCompletion", "activity", "analyse"))
    return _request(
        SPEAKER[tongue],
        dialogue,
        setting,
        rule=RULES[setting["kind"], tongue][1],
        state=mood,
        planning=planning,
        earlier=_lines(history[:-2], tongue),
        latest=_lines(history[-2:], tongue),
    )


def _ask(dialogues: list[dict], setting: dict, user: Endpoint) -> None:
    """The user's turn by two calls. A planner or speaker that stays unreadable ends its dialogue, which then has no score."""
    plans = (
        user.ask([planner_request(d, setting) for d in dialogues], read_plan, name="planner")
        if dialogues
        else []
    )
    planned = [(d, plan.value) for d, plan in zip(dialogues, plans) if not plan.error]
    speeches = (
        user.ask([speaker_request(d, setting, p) for d, p in planned], read_speech, name="speaker")
        if planned
        else []
    )
    for dialogue, call in [*zip(dialogues, plans), *zip((d for d, _ in planned), speeches)]:
        if call.error:
            dialogue["ended"], dialogue["error"] = "simulator_failed", call.error
    for (dialogue, plan), speech in zip(planned, speeches):
        if not speech.error:
            change, (thinking, utterance) = plan.pop("change"), speech.value
            hear(dialogue, setting, utterance, change, planning=plan, thinking=thinking)


LABEL = re.compile(
    r"(Content|TargetCompletion|Activity|Analyse|Change|Thinking|Origin|Response)[\s*]*[:：][\s*]*"
)


def _last(text: str, label: str) -> str | None:
    """What stands between the last `label` and the label after it; None without one."""
    parts = LABEL.split(text)
    found = [body for name, body in zip(parts[1::2], parts[2::2]) if name == label]
    return found[-1].strip(" \n*#[]") if found else None


def read_plan(text: str) -> dict:
    """A planner's sections and `change`: the first signed integer after the last `Change:`, as in SAGE.

    ValueError, so that it is asked again, where there is none, where it is a fraction, a range or beyond the scale of 100, and
    where a number without sign comes after words: in SAGE "falls by 5" is a rise.
    """
    body = _last(text, "Change")
    # NFKC: fullwidth digits and signs; then the other characters that stand for a minus
    body = re.sub("[\u2010-\u2015\u2212]", "-", unicodedata.normalize("NFKC", body or ""))
    number = re.search(r"([+-]?)([0-9]+)( ?[-~./\u2044] ?[0-9])?", body)
    before = body[: number.start()] if number else ""
    if (
        not number
        or number[3]
        or before[-1:] in tuple("+-±")
        or not number[1]
        and re.search(r"[\w+±-]", before)
    ):
        raise ValueError(f"no integer with its sign after Change: {body[:40]!r}")
    if abs(change := int(number[1] + number[2])) > 100:
        raise ValueError(f"Change: {change} is beyond the scale of 100")
    labels = {
        "content": "Content",
        "TargetCompletion": "TargetCompletion",
        "activity": "Activity",
        "analyse": "Analyse",
    }
    return {key: _last(text, label) or "" for key, label in labels.items()} | {"change": change}


def read_speech(text: str) -> tuple[str, str]:
    """(thinking, utterance) of a speaker: the utterance is all that follows the last `Response:`. ValueError without one."""
    label = [m for m in LABEL.finditer(text) if m[1] == "Response"]
    said = text[label[-1].end() :].strip() if label else ""
    if len(said) > 1 and said[0] + said[-1] in ('""', "“”", "「」", "[]"):
        said = said[1:-1].strip()
    if not said:
        raise ValueError("nothing after Response:")
    return _last(text, "Thinking") or "", said


# --- the score


def final_emotion(dialogue: dict) -> float | None:
    """What a dialogue counts; None where it has no score. RLVER's reward is max(0, it / 100)."""
    return {"bad_format": 0, **dict.fromkeys(NO_SCORE)}.get(dialogue["ended"], dialogue["emo_point"])


def score(dialogues: list[dict]) -> dict:
    """The Sentient score, `mean_emotion`, with successes (100), failures (below 10) and the user's `mean_turns`, over the
    dialogues that have a score; the others are counted in `n_invalid`. ValueError when none has one."""
    scored = [d for d in dialogues if final_emotion(d) is not None]
    if not scored:
        raise ValueError(f"none of {len(dialogues)} dialogues has a score")
    finals = [final_emotion(d) for d in scored]
    return {
        "mean_emotion": sum(finals) / len(finals),
        "success": sum(e >= STATES["S"] for e in finals),
        "failure": sum(e < STATES["C"] for e in finals),
        "n": len(dialogues),
        "n_invalid": len(dialogues) - len(scored),
        "mean_turns": sum(m["role"] == "user" for d in scored for m in d["history"]) / len(scored),
        "ended": dict(Counter(d["ended"] for d in dialogues)),
    }
