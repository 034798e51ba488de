"""benchmarks/empathy.py: curves, strategies and capabilities by hand, and judged over real HTTP and by the toy's rules."""

import json
from pathlib import Path

import pytest

import eval_sentient as sentient
from benchmarks import empathy
from data.toy import users as toy_users
import utils
from rewards import simulated_user as sim
from test_simulated_user import dialogue, shared, write

FREE = sim.RLVER | {"start": 40}  # changes are not clipped


def talk(*turns: tuple[str, int]) -> dict:
    """A dialogue in which each reply changes the emotion by so much."""
    return dialogue(FREE, *[(reply, change, "Hm.") for reply, change in turns])


# --- emotion curves


def test_a_curve_ends_at_the_sentient_score():
    long = talk(("a", 10), ("b", -20), ("c", 5))  # 40 50 30 35
    short = talk(("a", 20))  # 40 60, and stays there
    broken = talk(("a", 10))  # 40 50, then a malformed reply: 0
    sim.add_split_turn(broken, FREE, "b", utils.split_thinking("b", "think"), False)
    lost = talk(("a", 10))
    sim.end_without_score(lost, "no reply")
    dialogues = [long, short, broken, lost]

    curve = empathy.emotion_curve(dialogues)
    assert curve == pytest.approx([40, 160 / 3, 90 / 3, 95 / 3])
    assert curve[-1] == sim.score(dialogues)["mean_emotion"]


def test_curves_of_the_published_dialogues():
    path = shared("gpt4o_simulator__openai-o1.jsonl.gz")
    dialogues = sentient.sage_dialogues.read(str(path))
    curve = empathy.emotion_curve(dialogues)
    assert curve[0] == 40 and curve[-1] == pytest.approx(sim.score(dialogues)["mean_emotion"])
    assert len(curve) == 10  # nine answers: the user does not answer the tenth reply


# --- strategies


def test_frequencies_and_contributions_by_hand():
    first = talk(("praise and advice", 10), ("praise", -4))
    second = talk(("nothing", 3), ("twice praised", 6))
    second["history"].append({"role": "assistant", "content": "praise that nobody answers"})
    failed = talk(("x", 1))
    codes = [[["A-1", "D-1"], ["A-2"]], [[], ["A-1", "A-3"], ["A-3"]], None]

    scores = empathy.score_strategies([first, second, failed], codes)
    assert scores["Praise"] == {"n": 4, "frequency": 4 / 5, "n_changes": 3, "contribution": (10 - 4 + 6) / 3}
    assert scores["Advice Provision"] == {"n": 1, "frequency": 1 / 5, "n_changes": 1, "contribution": 10}
    assert scores["Deep Empathy"] == {"n": 0, "frequency": 0, "n_changes": 0, "contribution": None}
    assert list(scores) == list(empathy.GROUPS.values())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"1": "A-1"}', '{"1": ["A-9"]}', '{"2": ["A-1"]}', '{"1": [["A-1"]]}', '{"1": null}']
)
def test_unreadable_strategies(text):
    with pytest.raises(ValueError):
        empathy.read_strategies(text)


def test_readable_strategies():
    assert empathy.read_strategies('So: {"2": [], "1": ["A-1", "E-1"]}') == [["A-1", "E-1"], []]


def test_every_strategy_has_a_group_and_the_judge_sees_all():
    assert {code[0] for code in empathy.STRATEGIES} == set(empathy.GROUPS)
    prompt = empathy.strategy_prompt(talk(("One.", 1), ("Two.", 1)))
    assert all(f"{code}: " in prompt for code in empathy.STRATEGIES)
    assert "REPLY 2: Two." in prompt and prompt.endswith('{"1": ["..."], "2": ["..."]}')


# --- capabilities

MARKS = dict(zip(empathy.CAPABILITIES, (1, 2, 3, 4, 5), strict=True))


def test_marks():
    assert empathy.read_marks(json.dumps(MARKS | {"reasons": "r"})) == MARKS
    for bad in (0, 6, 2.5, "3", None, True):
        with pytest.raises(ValueError, match="Core Insight"):
            empathy.read_marks(json.dumps(MARKS | {"Core Insight": bad}))
    scores = empathy.score_capabilities([MARKS, None, MARKS | {"Core Insight": 4}], 0)
    assert scores["Core Insight"]["mean"] == 3 and scores["Style Adaptability"]["mean"] == 5
    assert all(len(marks) == 6 for marks in empathy.CAPABILITIES.values())  # a question and five marks


# --- runs


def behave(text: str, n: int) -> str:
    """Answers as a judge; the first reply to each prompt is unreadable. It never understands what Cid said.

    It names strategies of a reply too many twice to Bob, and always to Dan.
    """
    if n == 0 or "I am Cid" in text:
        return "Well."
    if "Which of these strategies" in text:
        n_replies = text.count("\nREPLY ")
        if "I am Dan" in text or ("I am Bob" in text and n < 3):
            n_replies += 1
        return json.dumps({str(i): ["B-2"] for i in range(1, n_replies + 1)})
    return json.dumps(MARKS)


def test_stored_dialogues_are_judged(serve, tmp_path):  # noqa: F811
    dialogues = []
    for name in ("Ann", "Bob", "Cid", "Dan"):
        d = talk(("One.", 10), ("Two.", -4)) | {"id": name}
        d["history"][0]["content"] = f"I am {name}."
        dialogues.append(d)
    path = write(tmp_path / "d.jsonl", dialogues)
    server = serve(behave)
    fields = {
        "from_dialogues": path,
        "judge": "j",
        "judge_url": server.url,
        "max_invalid": 0.5,
    }
    sentient.main(sentient.Args(**fields, out=str(tmp_path / "o.json")))

    out = json.loads((tmp_path / "o.json").read_text())
    assert out["emotion_curve"] == [40, 50, 46] and out["judge"] == "j"
    assert (out["strategies"]["n"], out["strategies"]["n_invalid"]) == (4, 2)
    assert out["strategies"]["Deep Empathy"] == {"n": 4, "frequency": 1, "n_changes": 4, "contribution": 3}
    assert out["capabilities"]["Solution Crafting"] == {"mean": 3, "interval": [3, 3]}
    judged = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert judged[0] == {"id": "Ann", "strategies": [["B-2"], ["B-2"]], "capabilities": MARKS}
    assert judged[1] == judged[0] | {"id": "Bob"}
    assert judged[2] == {"id": "Cid", "strategies": None, "capabilities": None}
    assert judged[3] == {"id": "Dan", "strategies": None, "capabilities": MARKS}

    # above --max-invalid there are no numbers; and no call is made twice
    n_calls = len(server.answered)
    sentient.main(sentient.Args(**fields | {"max_invalid": 0.1}, out=str(tmp_path / "o.json")))
    out = json.loads((tmp_path / "o.json").read_text())
    assert out["strategies"] == {"n": 4, "n_invalid": 2} and out["capabilities"] == {"n": 4, "n_invalid": 1}
    assert len(server.answered) == n_calls

    # a dry run asks for one token, and writes nothing
    sentient.main(sentient.Args(**fields, out=str(tmp_path / "new" / "o.json"), dry_run=True))
    assert (len(server.checks), len(server.answered)) == (1, n_calls)
    assert not (tmp_path / "new").exists()


def test_the_toy_judge_knows_praise_a_reminder_and_a_dish(tmp_path):
    replies = ["You have great taste! cod costs 5 dollars.", "Do not forget the hats!", "Hello."]
    profile = toy_users.profiles(1, 0, "test")[0]
    setting = FREE | toy_users.TOY
    d = sim.start(profile, setting)
    for reply in replies:
        sim.add_model_turn(d, setting, reply, "plain")
        sim.user_turns([d], setting, toy_users.user)
    assert toy_users.strategies(d) == [["A-1", "D-1"], ["B-1"], []]

    path = write(tmp_path / "d.jsonl", [d])
    judge = f"{Path(toy_users.__file__)}:strategies"
    args = sentient.Args(from_dialogues=path, judge=judge, out=str(tmp_path / "o.json"))
    sentient.main(args)
    out = json.loads((tmp_path / "o.json").read_text())
    assert "capabilities" not in out and out["strategies"]["Praise"]["n"] == 1


def test_a_judge_that_cannot_be_asked_is_refused_first(tmp_path, exits):  # noqa: F811
    args = sentient.Args(from_dialogues="nowhere.jsonl", judge="nowhere.py:f", out=str(tmp_path / "o.json"))
    assert "nowhere.py" in exits(sentient.main, args)
