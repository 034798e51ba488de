"""SAGE: the published scores from stored dialogues, rules by hand, malformed planners, the toy users, and whole runs with a real
HTTP simulator and with the toy base model."""

import csv
import gzip
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import eval_sentient as sentient
from rewards import simulated_user as sim
import utils
from data.toy import users as toy_users
from data.toy import world as toy
from test_endpoint import Fault, exits, serve  # noqa: F401  (fixtures)

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "sage"
BASE = str(ROOT / "data" / "toy" / "base")
TOY = {**sim.RLVER, **toy_users.TOY}
USERS = f"{ROOT}/data/toy/users.py"
PROFILE = {
    "id": "anna",
    "player": "Anna, 30, dry humour.",
    "scene": "Her cat has run away.",
    "task": "to be told it is not her fault",
    "first_talk": "The window was open again.",
}
CHINESE = {
    "id": "lin",
    "player": "林，三十岁。",
    "scene": "猫跑丢了。",
    "task": "希望有人说不是她的错",
    "first_talk": "窗户又没关。",
}


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"the stored dialogues are not at {SHARED}")
    return SHARED / name


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dialogue(setting: dict, *turns: tuple[str, int, str], profile: dict = PROFILE) -> dict:
    """A dialogue in which the model says turns[i][0], and the user changes by turns[i][1] and says turns[i][2]."""
    out = sim.start(profile, setting)
    for text, change, utterance in turns:
        assert not out["ended"]
        sim.say(out, setting, text, "plain")
        sim.reply([out], setting, lambda d, s, turn=(utterance, change): turn)
    return out


# --- stored dialogues


@pytest.mark.parametrize("packed", [True, False])
def test_the_published_scores(tmp_path, packed):
    for expected in csv.DictReader(open(shared("expected.csv"))):
        path = shared(f"{expected['simulator']}_simulator__{expected['model']}.jsonl.gz")
        if not packed:
            (tmp_path / "plain.jsonl").write_bytes(gzip.open(path).read())
            path = tmp_path / "plain.jsonl"
        sentient.main(sentient.Args(from_dialogues=str(path), out=str(tmp_path / "out.json")))
        out = json.loads((tmp_path / "out.json").read_text())
        assert out["mean_emotion"] == float(expected["mean_final_emotion"])
        assert (out["success"], out["failure"]) == (
            int(expected["n_final_ge_100"]),
            int(expected["n_final_lt_10"]),
        )
        assert (out["n"], out["n_invalid"], out["warnings"]) == (int(expected["dialogues"]), 0, [])
        assert out["interval"][0] < out["mean_emotion"] < out["interval"][1]


def stored(**changes) -> dict:
    turns = [("hm", 40, None), ("so so", 45, 5), ("better", 55, 14), ("oh", 52, -3)]
    history = [
        {"role": "user", "content": c, "emotion-point": e} | ({"change": x} if x is not None else {})
        for c, e, x in turns
    ]
    history[1:] = [m for user in history[1:] for m in ({"role": "assistant", "content": "I see."}, user)]
    return {"id": "d1", "emo_point": 52, "emo_state": "Emotion-B", "history": history} | changes


def test_what_is_wrong_in_a_record_is_named(tmp_path, capsys):
    good, rows = stored(), [stored(id=f"bad{i}") for i in range(5)]
    good["history"][6]["planning"] = {"change": good["history"][6].pop("change")}  # the other place for it
    rows[0]["history"][0]["emotion-point"] = 30  # the next update is wrong, too
    rows[1]["history"][4]["emotion-point"] = 59  # not clipped
    rows[2]["emo_point"] = 90
    rows[3]["history"][2]["content"] = "再见"
    rows[3]["history"][0]["content"] = "喂"
    del rows[4]["history"][2]["change"]
    sentient.main(
        sentient.Args(from_dialogues=write(tmp_path / "d.jsonl", [good, *rows]), out=str(tmp_path / "o.json"))
    )
    assert json.loads((tmp_path / "o.json").read_text())["warnings"] == [
        "dialogue bad0: starts at 30, not at 40",
        "dialogue bad0: turn 2: 30 and a change of 5 make 45",
        "dialogue bad1: turn 3: 45 and a change of 14 make 59",
        "dialogue bad1: turn 4: 59 and a change of -3 make 52",
        "dialogue bad2: ends at 52, but emo_point is 90",
        "dialogue bad3: goes on after turn 2 (goodbye)",
        "dialogue bad4: turn 2 has no change",
    ]
    assert capsys.readouterr().err.count("WARNING") == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"emo_point": "52"}, ":2: emo_point is '52'"),
        ({"emo_point": True}, "emo_point is True"),
        ({"emo_point": None}, "no field 'emo_point'"),
        ({"emo_point": float("nan")}, "emo_point is nan"),
        ({"history": []}, ":2: every turn of the user"),
        ({"history": "hi"}, "'history' must be"),
        ({"history": [{"role": "assistant", "content": "hi"}]}, "every turn of the user"),
        ({"history": None}, "no field 'history'"),
        ({"history": [{"role": "user", "content": "hi"}]}, "'emotion-point', a number"),
        ({"history": [{"content": "hi"}]}, "'history' must be"),
        ({"ended": ["failed"]}, "'ended' is not a text"),
        ({"history": [{"role": "user", "content": 3, "emotion-point": 40}]}, "'content', a text"),
    ],
)
def test_rows_that_are_no_dialogues_are_refused(tmp_path, exits, changes, words):  # noqa: F811
    path = write(tmp_path / "d.jsonl", [stored(), stored(**changes)])
    assert words in exits(sentient.main, sentient.Args(from_dialogues=path, out=str(tmp_path / "o.json")))
    assert not (tmp_path / "o.json").exists()


# --- rules by hand


@pytest.mark.parametrize(
    ("setting", "emotion", "change", "after"),
    [
        (sim.SAGE, 40, 10, 50),
        (sim.SAGE, 40, 11, 50),
        (sim.SAGE, 40, -50, 30),
        (sim.SAGE, 95, 10, 100),
        (sim.SAGE, 11, -10, 1),
        (sim.SAGE, 3, -10, -7),
        (sim.RLVER, 30, 50, 80),
        (sim.RLVER, 30, -50, -20),
        (sim.RLVER, 80, 50, 100),
        ({**sim.SAGE, "max_change": 3, "cap": 42}, 40, 9, 42),
    ],
)
def test_update_rule(setting, emotion, change, after):
    assert sim.new_emotion(emotion, change, setting) == after


def test_states():
    borders = {100: "S", 99: "A", 70: "A", 69: "B", 40: "B", 39: "C", 10: "C", 9: "F", -5: "F"}
    assert {e: sim.state(e) for e in borders} == {e: f"Emotion-{letter}" for e, letter in borders.items()}


def test_a_dialogue_ends_as_the_protocol_has_it():
    up, down = [("x", 10, "hm")] * 6, [("x", -10, "hm")] * 4
    assert (
        (d := dialogue(sim.SAGE, *up))["ended"] == "satisfied"
        and d["emo_point"] == 100
        and d["emo_state"] == "Emotion-S"
    )
    assert [m["emotion-point"] for m in d["history"] if m["role"] == "user"] == [40, 50, 60, 70, 80, 90, 100]
    assert (d := dialogue(sim.SAGE, *down))["ended"] == "failed" and d["emo_point"] == 0
    assert dialogue(sim.SAGE, *down[:3])["ended"] == ""  # 10 is not below 10
    d = dialogue(sim.SAGE, *[("x", 0, "hm")] * 10)  # the tenth reply is not heard
    assert d["ended"] == "turns" and d["history"][-1]["role"] == "assistant" and len(d["history"]) == 20
    d = dialogue(sim.RLVER, *[("x", 0, "hm")] * 8)  # the eighth is
    assert (
        d["ended"] == "turns"
        and d["history"][-1]["role"] == "user"
        and len(d["history"]) == 17
        and d["emo_point"] == 30
    )
    assert dialogue(sim.RLVER, ("x", 70, "hm"))["ended"] == ""  # 100: the user is told to say goodbye
    assert (
        dialogue(sim.RLVER, ("x", -29, "hm"))["ended"] == ""
        and dialogue(sim.RLVER, ("x", -30, "hm"))["ended"] == "failed"
    )


@pytest.mark.parametrize(
    ("profile", "utterance", "ended"),
    [
        (CHINESE, "好吧，再见。", "goodbye"),
        (CHINESE, "拜拜！", "goodbye"),
        (CHINESE, "再说吧", ""),
        (CHINESE, "goodbye", ""),
        (PROFILE, "Well, goodbye then.", "goodbye"),
        (PROFILE, "Bye!", "goodbye"),
        (PROFILE, "good bye", "goodbye"),
        (PROFILE, "That is kilobytes", ""),
        (PROFILE, "bygones", ""),
        ({**PROFILE, "first_talk": "goodbye, they said"}, "hm", ""),
    ],
)
def test_goodbye_in_the_language_of_the_profile(profile, utterance, ended):
    assert dialogue(sim.SAGE, ("x", 5, utterance), profile=profile)["ended"] == ended


def test_one_call_moves_only_those_whose_turn_it_is():
    heard, waiting, over = (sim.start(PROFILE, sim.SAGE) for _ in range(3))
    for d in (heard, over):
        sim.say(d, sim.SAGE, "x", "plain")
    over["ended"] = "goodbye"
    sim.reply([heard, waiting, over], sim.SAGE, lambda d, s: ("hm", 1))
    assert [len(d["history"]) for d in (heard, waiting, over)] == [3, 1, 2] and heard["emo_point"] == 41


@pytest.mark.parametrize(
    ("text", "think_format", "finished", "said", "status"),
    [
        ("<think>a</think>\n\nhi ", "think", True, "hi", "ok"),
        ("hi", "think", True, "hi", "no_open"),
        ("a</think>b</think> hi", "think", True, "hi", "no_open"),
        ("<think>a", "think", True, "<think>a", "no_close"),
        ("<think>a</think>", "think", True, "", "empty_response"),
        ("<think>a</think>hi", "think", False, "hi", "truncated"),
        ("<think><think>a</think>hi", "think", True, "hi", "nested"),
        ("", "think", True, "", "no_open"),
        ("hi", "plain", True, "hi", "ok"),
        ("hi", "plain", False, "hi", "truncated"),
        ("<think>a</think><response>hi</response>", "zero_think", True, "hi", "ok"),
        ("hi", "zero_plain", True, "hi", "no_open"),
    ],
)
def test_what_the_user_hears_and_what_bad_format_does(text, think_format, finished, said, status):
    for setting in (sim.SAGE, sim.RLVER):
        d = sim.start(PROFILE, setting)
        sim.say(d, setting, text, think_format, finished)
        assert (d["history"][-1]["content"], d["history"][-1]["status"], d["history"][-1]["text"]) == (
            said,
            status,
            text,
        )
        ends = setting is sim.RLVER and status != "ok"
        assert d["ended"] == ("bad_format" if ends else "") and sim.final_emotion(d) == (
            0 if ends else setting["start"]
        )


def test_what_the_model_reads():
    d = sim.start(PROFILE, sim.SAGE)
    sim.say(d, sim.SAGE, "<think>poor cat</think> Oh no.", "think")
    user, said = (
        {"role": "user", "content": PROFILE["first_talk"]},
        {"role": "assistant", "content": "Oh no."},
    )
    assert sim.chat_messages(d) == [{"role": "system", "content": sim.SYSTEM["en"]}, user, said]
    assert sim.chat_messages(d, keep_thinking=True)[1:] == [
        user,
        said | {"content": "<think>poor cat</think> Oh no."},
    ]
    asked = sim.chat_messages(d, ask_thinking=True)[0]["content"]
    assert asked == sim.SYSTEM["en"] + "\n" + sim.ASK_THINKING["en"] and "<think>" not in sim.SYSTEM["en"]
    assert sim.chat_messages(sim.start(CHINESE, sim.SAGE))[0]["content"] == sim.SYSTEM["zh"]
    d["profile"] = PROFILE | {"system": ""}
    assert sim.chat_messages(d) == [user, said]
    d["profile"] = PROFILE | {"system": "Be kind."}
    assert sim.chat_messages(d)[0] == {"role": "system", "content": "Be kind."}


def test_score_counts_what_has_none_apart():
    ends = [
        (100, "satisfied"),
        (8, "failed"),
        (55, "turns"),
        (70, "bad_format"),
        (90, "simulator_failed"),
        (90, "too_long"),
    ]
    dialogues = [{"emo_point": e, "ended": end, "history": [{"role": "user"}] * 3} for e, end in ends]
    out = sim.score(dialogues)
    assert out["mean_emotion"] == (100 + 8 + 55 + 0) / 4 and (out["success"], out["failure"]) == (1, 2)
    assert (out["n"], out["n_invalid"], out["mean_turns"]) == (6, 2, 3) and out["ended"]["too_long"] == 1
    with pytest.raises(ValueError, match="none of 2"):
        sim.score(dialogues[4:])


# --- planner and speaker

HEAD = "Content:\ncares\nTargetCompletion:\npartly\nActivity:\nhm\nAnalyse:\nwarm\n"
PLANS = {  # what stands at the end of a planner's reply: the change, None: refused and asked again
    "Change:\n+5": 5,
    "Change: +5": 5,
    "Change：-3": -3,
    "Change:-3": -3,
    "Change: 0": 0,
    "Change: 7": 7,
    "Change: [+5]": 5,
    "**Change:** +5": 5,
    "**Change**: -2": -2,
    "### Change:\n-2": -2,
    "Change: +5\n": 5,
    "Change:\n\n  -10  ": -10,
    "Change: +05": 5,
    "Change: +5 points": 5,
    "Change: +5。因为他被理解": 5,
    "Change: emotion +5": 5,
    "Change: 情绪变化为-4": -4,
    "Change: (−6)": -6,
    "Change: –6": -6,
    "Change: ＋５": 5,
    "Change: －１０": -10,
    "Change: ８": 8,
    "Change: +50": 50,
    "Change: -100": -100,
    "Change: +5 Change: -3": -3,
    "Change: +5\nChange: -3": -3,
    "Change: +5\n\n(40 -> 45)": 5,
    "Change: $+5$": 5,
    "Change: `-5`": -5,
    "5. Change: -1": -1,
    "Change: - +5": 5,
    "change: +9\nChange: -1": -1,
    "Change: +5, -3": 5,
    "": None,
    "Change:": None,
    "Change: none": None,
    "Change: 无变化": None,
    "Change: five": None,
    "Change: +": None,
    "Change: 五": None,
    "Change: rises by 5": None,
    "Change: 下降5": None,
    "Change: falls by 5": None,
    "Change: decrease (5)": None,
    "Change: +2.5": None,
    "Change: 5-10": None,
    "Change: -5 ~ 3": None,
    "Change: +1/2": None,
    "Change: +101": None,
    "Change: -5000": None,
    "Change: 99999999999999999999": None,
    "Change: ±5": None,
    "Change: +-5": None,
    "Change: - 5": None,
    "change: +5": None,
    "Change +5": None,
    '"Change": "+5"': None,
    "变化：+5": None,
    "Delta: +5": None,
    "Change:\nAnalyse: 5 reasons": None,
    "Change: +5\nChange: unsure": None,
    "Change: " + "9" * 5000: None,
    "Change: ٥": None,
    "I cannot do that.": None,
    "Change: NaN": None,
}


@pytest.mark.parametrize("tail", PLANS)
def test_planner_replies(tail):
    if PLANS[tail] is None:
        with pytest.raises(ValueError):
            sim.read_plan(HEAD + tail)
    else:
        plan = sim.read_plan(HEAD + tail)
        assert plan["change"] == PLANS[tail] and type(plan["change"]) is int
        assert (plan["content"], plan["TargetCompletion"], plan["activity"]) == ("cares", "partly", "hm")


def test_a_planner_without_the_other_sections_is_read_as_in_sage():
    assert len(PLANS) >= 60
    assert sim.read_plan("Change: -4") == {
        "content": "",
        "TargetCompletion": "",
        "activity": "",
        "analyse": "",
        "change": -4,
    }
    assert sim.read_plan("Content：好\nAnalyse：暖\nChange：＋４")["analyse"] == "暖"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Thinking: x\nOrigin: a\nChange: b\nResponse: Oh well.", "Oh well."),
        ("Response:\nOh.\nWell.", "Oh.\nWell."),
        ("**Response:** Oh.", "Oh."),
        ("Response：嗯。", "嗯。"),
        ("Response: a\nResponse: b", "b"),
        ('Response: "Oh."', "Oh."),
        ("Response: “嗯”", "嗯"),
        ("Response: [Oh.]", "Oh."),
        ('Response: "Oh," she said. "Well."', 'Oh," she said. "Well.'),
        ("Response: I said: no", "I said: no"),
        ("Response:", None),
        ("", None),
        ("Response: \n ", None),
        ('Response: ""', None),
        ("Oh well.", None),
        ("response: oh", None),
    ],
)
def test_speaker_replies(text, said):
    if said is None:
        with pytest.raises(ValueError):
            sim.read_speech(text)
    else:
        assert sim.read_speech(text)[1] == said


@pytest.mark.parametrize(
    "profile", [PROFILE, CHINESE, PROFILE | {"scene": "It cost $task, {x} and $$ more."}]
)
def test_what_planner_and_speaker_read(profile):
    d = dialogue(sim.SAGE, ("first reply", -6, "first answer"), profile=profile)
    sim.say(d, sim.SAGE, "second reply", "plain")
    for kind in ("vanilla", "challenging"):
        setting = {**sim.SAGE, "kind": kind, "temperature": 0.3, "max_tokens": 99, "seed": 5}
        planner = sim.planner_request(d, setting)
        plan = sim.read_plan("TargetCompletion: TTT\nActivity: AAA\nAnalyse: NNN\nChange: +90")
        speaker = sim.speaker_request(d, setting, plan)
        assert {k: planner[k] for k in ("temperature", "max_tokens", "seed")} == {
            "temperature": 0.3,
            "max_tokens": 99,
            "seed": 5,
        }
        asked, spoken = planner["messages"][0]["content"], speaker["messages"][0]["content"]
        for text in (asked, spoken):
            assert all(profile[k] in text for k in ("player", "scene", "task", "first_talk"))
            assert [text.index(w) for w in ("first reply", "first answer", "second reply")] == sorted(
                text.index(w) for w in ("first reply", "first answer", "second reply")
            )
        tongue = "zh" if profile is CHINESE else "en"
        assert sim.RULES[kind, tongue][0] in asked and sim.RULES[kind, tongue][1] in spoken
        assert "34" in asked and "34" not in spoken  # the number is the planner's, the letter the speaker's
        assert ("：B（" if tongue == "zh" else ": B (") in spoken  # 34 and a clipped change of 90: 44
        assert "TTT" in spoken and "AAA" in spoken and "NNN" in spoken
        latest = spoken.index("# 最近" if tongue == "zh" else "# The latest two")
        assert spoken.index("first reply") < latest < spoken.index("first answer")
        assert all(
            f"\n{label}:" in asked
            for label in ("Content", "TargetCompletion", "Activity", "Analyse", "Change")
        )
        assert all(f"\n{label}:" in spoken for label in ("Thinking", "Origin", "Change", "Response"))


# --- the toy users


def converse(
    profile: dict, replies: list[str], kind: str = "vanilla", user=toy_users.user, seed: int = 0
) -> list[int]:
    """The emotions of a dialogue in which the model says `replies`."""
    setting = {**TOY, "kind": kind, "seed": seed}
    d = sim.start(profile, setting)
    for text in replies:
        sim.say(d, setting, text, "plain")
        sim.reply([d], setting, user)
    return [m["emotion-point"] for m in d["history"] if m["role"] == "user"]


PROFILES = toy_users.profiles(200, 0, "train") + toy_users.profiles(100, 0, "test")
ALL = [
    (user, kind) for user in (toy_users.user, toy_users.held_out_user) for kind in ("vanilla", "challenging")
]


@pytest.mark.parametrize(("user", "kind"), ALL)
def test_emotions_of_toy_users_by_hand(user, kind):
    likes = user is toy_users.user and kind == "vanilla"
    for profile in PROFILES:
        best = [toy_users.answer(want, random.Random(0))[1] for want in profile["wants"]]
        talk = lambda *texts, p=profile: converse(p, list(texts), kind, user)
        assert talk(*best) == [40, 60, 80, 100]
        assert talk("Hello!", "Good morning!", "Hi!") == [40, 28, 16, 4]
        assert talk(*toy.FLATTERY) == ([40, 45, 50, 55] if likes else [40, 28, 16, 4])
        assert talk(*[toy.FLATTERY[0]] * 3) == ([40, 45, 33, 21] if likes else [40, 28, 16, 4])  # said again
        assert talk(best[0], best[0], best[2]) == [40, 60, 48, 68]
        assert talk(f"{best[0]} {toy.FLATTERY[1]}", best[1].upper(), best[2]) == [
            40,
            60,
            80,
            100,
        ]  # praise adds nothing to it


def test_what_meets_a_want():
    fish, word = {"dish": "shrimp"}, {"word": "hats"}  # below 7 dollars: tuna, cod
    meets = ["cod costs 5 dollars.", "tuna!", "Tuna, then cod.", "COD", "tuna 6 fits, no fish is best."]
    misses = [
        "",
        "shrimp",
        "salmon",
        "ham",
        "cod and ham",
        "cod, and remember the hats!",
        "fish",
        "codes",
        "tunacod",
        "I am a fan.",
    ]
    assert [toy_users.meets(fish, text) for text in meets + misses] == [True] * len(meets) + [False] * len(
        misses
    )
    meets = ["Remember the hats!", "hats, HATS", "Do not forget the hats."]
    misses = ["", "Remember the ice!", "hats and ice", "hats and ham", "chats", "Remember it!"]
    assert [toy_users.meets(word, text) for text in meets + misses] == [True] * len(meets) + [False] * len(
        misses
    )


def test_toy_profiles():
    tasks = {
        split: {p["task"] for seed in (0, 1) for p in toy_users.profiles(500, seed, split)}
        for split in ("train", "test")
    }
    assert not tasks["train"] & tasks["test"]
    assert (
        toy_users.profiles(50, 3, "test")
        == toy_users.profiles(50, 3, "test")
        != toy_users.profiles(50, 4, "test")
    )
    for profile in PROFILES:
        kinds = [toy.DISHES[w["dish"]][1] for w in profile["wants"] if "dish" in w]
        assert len(kinds) == len(set(kinds)) == 2 and sum("word" in w for w in profile["wants"]) == 1
        assert "dish" in profile["wants"][0] and all(
            toy_users.cheaper(w["dish"]) for w in profile["wants"] if "dish" in w
        )
    assert {list(p["wants"][1])[0] for p in PROFILES} == {"dish", "word"}


def test_toy_words_are_in_the_vocabulary_and_few(load_base):
    known = lambda text: load_base.unk_token_id not in load_base(text, add_special_tokens=False)["input_ids"]
    words = set()
    for user, kind in ALL:
        for profile in PROFILES:
            d = sim.start(profile, {**TOY, "kind": kind})
            best = [toy_users.answer(want, random.Random(profile["id"])) for want in profile["wants"]]
            for turn in range(3):
                thinking, text = best[turn]
                text = random.Random(f"{profile['id']} {turn}").choice([text, text, "Hello!", *toy.FLATTERY])
                assert known(utils.join_thinking(thinking, text, "think")) and known(text)
                sim.say(d, TOY, text, "plain")
                sim.reply([d], {**TOY, "kind": kind}, user)
            for m in d["history"][::2]:
                assert known(m["content"]) and len(m["content"].split()) <= 20, m["content"]
                words.add(m["content"])
            clear = [toy.DISHES[w["dish"]][1] if "dish" in w else w["word"] for w in profile["wants"]]
            hinted = [word in m["content"] for word, m in zip(clear, d["history"][::2])]
            assert hinted == ([True] * 3 if kind == "vanilla" else [True, False, False])
    heard = " ".join(words)  # nothing of the wording was left out here
    for line in (line for parts in toy_users.WORDING.values() for lines in parts.values() for line in lines):
        assert re.search(re.sub(r"\\{\w+\\}", "[a-z0-9]+", re.escape(line)), heard), line


@pytest.fixture(scope="module")
def load_base():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BASE)


def test_toy_users_depend_on_id_seed_and_history_alone():
    say = lambda profile, seed, *texts: [
        m["content"]
        for m in dialogue({**TOY, "seed": seed}, *[(t, 0, "x") for t in texts], profile=profile)["history"]
    ]
    assert say(PROFILES[0], 0, "a") == say(PROFILES[0], 0, "a")

    def told(profile, seed, *texts):
        d, setting = sim.start(profile, {**TOY, "seed": seed}), {**TOY, "seed": seed}
        for text in texts:
            sim.say(d, setting, text, "plain")
            sim.reply([d], setting, toy_users.user)
        return [m["content"] for m in d["history"][::2]]

    for profile in PROFILES[:20]:
        assert told(profile, 0, "a", "b") == told(profile, 0, "a", "b")
    assert sum(told(p, 0, "a", "b") != told(p, 1, "a", "b") for p in PROFILES[:20]) > 10


def test_toy_traces_meet_the_want_as_often_as_said():
    rows = toy_users.traces(400, 0)
    wants = {p["id"]: p["wants"] for p in toy_users.profiles(400, 0, "train")}
    met = [toy_users.meets(wants[r["id"][:-2]][int(r["id"][-1])], r["response"]) for r in rows]
    assert len(rows) == 1200 and abs(sum(met) / 1200 - 0.4) < 0.06
    assert all(
        r["messages"][-1]["role"] == "user"
        and r["thinking"]
        and len(r["messages"]) == 2 * int(r["id"][-1]) + 1
        for r in rows
    )


# --- whole runs


def behave(text: str, n: int):
    """A tested model, a planner and a speaker in one; every first call of a request fails or is unreadable. Nobody can read
    what the planner says of Bob, nor what the speaker of Eve says."""
    fault = random.Random(text).choice(
        [Fault("429"), Fault("500"), Fault("truncated JSON"), Fault("reset"), "Let me see."]
    )
    if "TargetCompletion:" in text:
        return (
            fault if n == 0 else "Change: who knows" if "Bob" in text else f"{HEAD}Change:\n{change(text):+d}"
        )
    if "Origin:" in text:
        return (
            fault
            if n == 0
            else "Response:"
            if "Eve" in text
            else f"Thinking: hm\nOrigin: o\nChange: c\nResponse: Answer {text.count('Person')}."
        )
    return f"<think>z</think> Reply to: {text}"


def change(text: str) -> int:
    return random.Random(text).randint(-15, 15)


def people(tmp_path: Path) -> str:
    names = ["Ann", "Bob", "Cid", "Dan", "Eve"]
    return write(
        tmp_path / "p.jsonl",
        [PROFILE | {"id": name, "player": name, "first_talk": f"I am {name}."} for name in names],
    )


def http_args(server, tmp_path: Path, **changes) -> sentient.Args:
    return sentient.Args(
        **{
            "model": "m",
            "model_url": server.url,
            "profiles": people(tmp_path),
            "simulator": "s",
            "simulator_url": server.url,
            "held_out_simulator": "h",
            "held_out_simulator_url": server.url,
            "think_format": "think",
            "turns": 4,
            "max_tokens": 20,
            "out": str(tmp_path / "run"),
            "price": (1.0, 2.0),
            "budget": 5.0,
            **changes,
        }
    )


def check_run(run: Path) -> None:
    """By hand what must come of a run with `behave`."""
    summary = json.loads((run / "summary.json").read_text())
    for role, suffix in (("simulator", ""), ("simulator_held_out", "_held_out")):
        dialogues = {d["id"]: d for d in read(run / f"dialogues{suffix}.jsonl")}
        assert {i for i, d in dialogues.items() if d["ended"] == "simulator_failed"} == {"Bob", "Eve"}
        assert "Change" in dialogues["Bob"]["error"] and "Response" in dialogues["Eve"]["error"]
        assert (
            len(dialogues["Bob"]["history"]) == len(dialogues["Eve"]["history"]) == 2
            and dialogues["Bob"]["emo_point"] == 40
        )
        finals = []
        for name in ("Ann", "Cid", "Dan"):
            d = sim.start({k: dialogues[name]["profile"][k] for k in PROFILE}, sim.SAGE)
            for turn in range(1, 5):
                sim.say(d, sim.SAGE, f"<think>z</think> Reply to: {d['history'][-1]['content']}", "think")
                if turn < 4:  # the last reply is not heard
                    moved = change(sim.planner_request(d, sim.SAGE)["messages"][0]["content"])
                    sim.hear(
                        d,
                        sim.SAGE,
                        f"Answer {sim.speaker_request(d, sim.SAGE, sim.read_plan(f'{HEAD}Change: {moved}'))['messages'][0]['content'].count('Person')}.",
                        moved,
                    )
            assert [
                (m["role"], m["content"], m.get("emotion-point")) for m in dialogues[name]["history"]
            ] == [(m["role"], m["content"], m.get("emotion-point")) for m in d["history"]]
            assert (
                dialogues[name]["ended"] == "turns"
                and dialogues[name]["history"][2]["planning"]["analyse"] == "warm"
            )
            finals.append(d["emo_point"])
        numbers = summary[role]
        assert (
            numbers["mean_emotion"] is None and numbers["without_headline"] == sum(finals) / 3
        )  # 2 of 5 have no score
        assert (numbers["n"], numbers["n_invalid"], numbers["format_ok"]) == (5, 2, 1.0)
    index = list(csv.DictReader(open(run.parent / "runs.csv")))
    assert [(r["metric"], r["judge"]) for r in index] == [
        (m, j) for j in "sh" for m in ("mean_emotion", "success", "failure", "mean_turns", "format_ok")
    ]
    assert (
        index[0]["value"] == ""
        and index[0]["n_invalid"] == "2"
        and index[0]["fingerprint"] != index[5]["fingerprint"]
    )


def test_run_with_simulators_that_misbehave(serve, tmp_path, capsys, monkeypatch):  # noqa: F811
    server = serve(behave)
    sentient.main(http_args(server, tmp_path))
    out = capsys.readouterr()
    check_run(tmp_path / "run")
    assert "dialogue Bob has no score" in out.err and "dialogue Eve has no score" in out.err
    assert "at most 30 calls" in out.out and "$" in out.out  # 5 users x 3 answers x 2 calls, before the start
    sentient.main(http_args(server, tmp_path, resume=True))
    assert "is complete" in capsys.readouterr().out
    # the stored dialogues give the same numbers
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["simulator_held_out"]
    sentient.main(
        sentient.Args(
            from_dialogues=str(tmp_path / "run" / "dialogues_held_out.jsonl"), out=str(tmp_path / "o.json")
        )
    )
    again = json.loads((tmp_path / "o.json").read_text())
    assert again["mean_emotion"] == summary["without_headline"] and again["warnings"] == []
    assert {k: again[k] for k in ("success", "failure", "n", "n_invalid", "interval")} == {
        k: summary[k] for k in ("success", "failure", "n", "n_invalid", "interval")
    }


def test_kill_and_resume_repeats_no_answered_call(serve, tmp_path):  # noqa: F811
    def slowly(text, n):
        time.sleep(0.05)
        return behave(text, n)

    server = serve(slowly)
    args = http_args(server, tmp_path, concurrency=4)
    flags = [
        "--model",
        "m",
        "--model-url",
        server.url,
        "--profiles",
        args.profiles,
        "--simulator",
        "s",
        "--simulator-url",
        server.url,
        "--held-out-simulator",
        "h",
        "--held-out-simulator-url",
        server.url,
        "--think-format",
        "think",
        "--turns",
        "4",
        "--max-tokens",
        "20",
        "--out",
        args.out,
        "--price",
        "1.0",
        "2.0",
        "--budget",
        "5.0",
        "--concurrency",
        "4",
    ]
    process = subprocess.Popen(
        [sys.executable, "eval_sentient.py", *flags],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while len(server.answered) < 25:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    while server.now:
        time.sleep(0.02)
    before = len(server.answered)
    with open(tmp_path / "run" / "turns.jsonl", "ab") as f:  # a kill tears a line only now and then
        f.write(b'{"dialogues": [{"id": "Ann"')
    sentient.main(http_args(server, tmp_path, concurrency=4, resume=True))
    check_run(tmp_path / "run")
    stores = [
        row
        for name in ("model", "simulator", "simulator_held_out")
        for row in read(tmp_path / "run" / f"{name}.jsonl")
    ]
    assert len({row["key"] for row in stores}) == len(stores)
    assert (
        before >= 25 and len(stores) <= len(server.answered) <= len(stores) + 4
    )  # at most those under way at the kill, twice


def test_resume_asks_a_simulator_again_that_failed(serve, tmp_path, exits):  # noqa: F811
    refuses = {"now": True}
    server = serve(
        lambda text, n: (
            (400, {"error": {"message": "overloaded"}})
            if refuses["now"] and "Origin:" in text
            else behave(text, n)
        )
    )
    assert "none of 5 dialogues has a score" in exits(sentient.main, http_args(server, tmp_path))
    refuses["now"] = False
    sentient.main(http_args(server, tmp_path, resume=True))
    check_run(tmp_path / "run")


def toy_args(tmp_path: Path, **changes) -> sentient.Args:
    users = write(tmp_path / "users.jsonl", toy_users.profiles(6, 0, "test"))
    return sentient.Args(
        **{
            "model": BASE,
            "profiles": users,
            "simulator": f"{USERS}:user",
            "held_out_simulator": f"{USERS}:held_out_user",
            "rollout": "hf",
            "chat_template": "plain",
            "temperature": 1.0,
            "max_tokens": 16,
            "batch_size": 2,
            "out": str(tmp_path / "run"),
            **toy_users.TOY,
            **changes,
        }
    )


def test_toy_model_from_end_to_end_and_from_any_line(tmp_path):
    sentient.main(toy_args(tmp_path))
    run, summary = tmp_path / "run", json.loads((tmp_path / "run" / "summary.json").read_text())
    whole = {
        name: (run / name).read_text()
        for name in ("dialogues.jsonl", "dialogues_held_out.jsonl", "turns.jsonl")
    }
    for suffix, role in (("", "simulator"), ("_held_out", "simulator_held_out")):
        dialogues = read(run / f"dialogues{suffix}.jsonl")
        assert (
            summary[role]["mean_emotion"] == sum(d["emo_point"] for d in dialogues) / 6
            and summary[role]["n_invalid"] == 0
        )
        for d in dialogues:
            said = [m for m in d["history"] if m["role"] == "assistant"]
            user = toy_users.user if role == "simulator" else toy_users.held_out_user
            setting = {**sim.SAGE, **toy_users.TOY}
            again = sim.start(d["profile"], setting)
            for m in said:
                sim.say(again, setting, m["text"], "plain", m["status"] != "truncated")
                sim.reply([again], setting, user)
            assert [m["content"] for m in again["history"]] == [m["content"] for m in d["history"]]
            assert (again["emo_point"], again["ended"]) == (d["emo_point"], d["ended"]) and all(
                m["n_tokens"] for m in said
            )
    assert len({m["text"] for d in dialogues for m in d["history"] if "text" in m}) > 6
    # a kill after any line: the same dialogues, and nothing is generated that stands there
    lines = whole["turns.jsonl"].splitlines(keepends=True)
    assert len(lines) == 3 * (3 + 1)
    for kept in (2, 11):
        (run / "turns.jsonl").write_text("".join(lines[:kept]) + lines[kept][:30])
        (run / "summary.json").unlink()
        sentient.main(toy_args(tmp_path, resume=True))
        assert {name: (run / name).read_text() for name in whole} == whole


def test_a_zero_model_ends_at_its_closing_tag(tmp_path):
    args = toy_args(tmp_path, think_format="zero_think", chat_template="auto", max_tokens=120)
    generate = sentient.load_model(args, tmp_path)
    dialogues = [sim.start(p, sim.SAGE) for p in toy_users.profiles(8, 0, "test")]
    outs = generate([sim.chat_messages(d) for d in dialogues], list(range(8)))
    closed = [text for text, finished, _ in outs if finished and "</response>" in text]
    assert len(closed) >= 3 and all(text.endswith("</response>") for text in closed)
    for d, (text, finished, _) in zip(dialogues, outs):
        sim.say(d, sim.SAGE, text, "zero_think", finished)
        if d["history"][-1]["status"] == "ok":
            assert d["history"][-1]["content"] and "<" not in d["history"][-1]["content"]


def test_bad_format_and_a_full_context_in_a_run(tmp_path):
    sentient.main(
        toy_args(tmp_path, protocol="rlver", think_format="think", max_tokens=2, held_out_simulator="")
    )
    numbers = json.loads((tmp_path / "run" / "summary.json").read_text())["simulator"]
    assert numbers["ended"] == {"bad_format": 6} and (
        numbers["mean_emotion"],
        numbers["failure"],
        numbers["format_ok"],
    ) == (0, 6, 0)
    model = sentient.load_model(toy_args(tmp_path, max_tokens=480, think_format="plain"), tmp_path)
    profiles = toy_users.profiles(2, 0, "test")
    profiles[0]["first_talk"] += " No." * 40
    dialogues = sentient.talk(
        toy_args(tmp_path, max_tokens=480, turns=1, think_format="plain"),
        profiles,
        toy_users.user,
        model,
        tmp_path / "t.jsonl",
    )
    assert [d["ended"] for d in dialogues] == ["too_long", "turns"] and "context" in dialogues[0]["error"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, "--model is missing"),
        ({"profiles": ""}, "--profiles is missing"),
        ({"simulator": ""}, "--simulator is missing"),
        ({"profiles": "none.jsonl"}, "no such file"),
        ({"simulator": "data/none.py:user"}, "not file.py:function"),
        ({"simulator": f"{USERS}:nobody"}, "no function 'nobody'"),
        ({"held_out_simulator": f"{USERS}:user"}, "is the first simulator"),
        ({"turns": 0}, "--turns"),
        ({"simulator": "gpt-4o"}, "OPENAI_API_KEY"),
        ({"simulator": "m", "simulator_url": "localhost"}, "http://"),
        ({"simulator": "m", "simulator_url": "http://x", "budget": 1.0}, "needs a price"),
        ({"ask_thinking": True}, "--think-format think"),
        ({"max_tokens": 500}, "512 tokens"),
        ({"model": "none"}, "no model folder"),
        ({"from_dialogues": "x.jsonl", "out": ""}, "--out"),
        ({"from_dialogues": "none.jsonl"}, "no such file"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_made(tmp_path, exits, monkeypatch, changes, words):  # noqa: F811
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert words in exits(sentient.main, toy_args(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"scene": None}, ":2: no field 'scene'"),
        ({"task": 3}, ":2: 'task' is not a text"),
        ({"id": "anna"}, "several profiles have the id 'anna'"),
    ],
)
def test_profiles_that_cannot_be_used_are_refused(tmp_path, exits, row, words):  # noqa: F811
    path = write(tmp_path / "p.jsonl", [PROFILE, PROFILE | {"id": "other"} | row])
    assert words in exits(sim.read_profiles, path)


def test_the_published_profiles_can_be_used():
    rows = sim.read_profiles(str(shared("simulator_profile_withfirsttalk.jsonl.gz")))
    requests = [sim.planner_request(sim.start(p, sim.SAGE), sim.SAGE) for p in rows]
    assert len(rows) == 100 and all("Change: 情绪" in r["messages"][0]["content"] for r in requests)


def test_setting_of_the_flags():
    setting = lambda **flags: sentient.Args(**flags).setting()
    assert setting() == sim.SAGE and setting(protocol="rlver") == sim.RLVER
    assert (
        sim.SAGE["start"],
        sim.SAGE["max_change"],
        sim.SAGE["cap"],
        sim.SAGE["high"],
        sim.SAGE["low"],
        sim.SAGE["turns"],
    ) == (40, 10, 100, 100, 10, 10)
    assert (
        sim.RLVER["start"],
        sim.RLVER["max_change"],
        sim.RLVER["cap"],
        sim.RLVER["high"],
        sim.RLVER["turns"],
    ) == (30, None, 100, None, 8)
    out = setting(start=0, max_change=0, high=0, low=5, turns=3, user="challenging", seed=4)
    assert (
        out["start"],
        out["max_change"],
        out["high"],
        out["low"],
        out["turns"],
        out["kind"],
        out["seed"],
    ) == (0, None, None, 5, 3, "challenging", 4)
