"""eval_sentient.py: the published scores from stored dialogues, what a judge finds in them, and whole runs
with simulators that misbehave over real HTTP and with the toy base model."""

import csv
import json
import random
from pathlib import Path

import pytest

import eval_sentient
import page
import utils
from benchmarks import sentient
from data.toy import users as toy_users
from rewards import simulated_user as sim
from rlmt.data import read_log
from test_simulated_user import dialogue, shared, write

ROOT = Path(__file__).parents[2]
USERS = f"{ROOT}/data/toy/users.py"
FREE = sim.RLVER | {"start": 40}  # changes are not clipped


def talk(*turns: tuple[str, int]) -> dict:
    """A dialogue in which each reply changes the emotion by so much."""
    return dialogue(FREE, *[(reply, change, "Hm.") for reply, change in turns])


def rescore(path: str, tmp_path: Path, **flags) -> dict:
    out = tmp_path / "new" / "o.json"
    eval_sentient.main(eval_sentient.Args(from_dialogues=path, out=str(out), **flags))
    return json.loads(out.read_text())


# --- stored dialogues


def test_the_published_scores(tmp_path):
    """Our rules also make the start, each emotion and the end of these dialogues, which SAGE's own tool
    wrote."""
    for expected in csv.DictReader(open(shared("expected.csv"))):
        path = str(shared(f"{expected['simulator']}_simulator__{expected['model']}.jsonl.gz"))
        out = rescore(path, tmp_path)
        assert out["mean_emotion"] == float(expected["mean_final_emotion"])
        assert out["success"] == int(expected["n_final_ge_100"])
        assert out["failure"] == int(expected["n_final_lt_10"])
        assert (out["n"], out["n_invalid"]) == (int(expected["dialogues"]), 0)
        assert out["interval"][0] < out["mean_emotion"] < out["interval"][1]
        # nine answers: the user does not answer the tenth reply
        curve = out["emotion_curve"]
        assert (len(curve), curve[0], curve[-1]) == (10, 40, pytest.approx(out["mean_emotion"]))
        for stored in sentient.read(path):
            first, *later = sentient.turns_of_user(stored)
            emotion = first["emotion-point"]
            assert emotion == sim.SAGE["start"]
            for turn in later:
                holds_change = turn if "change" in turn else turn["planning"]
                emotion = sim.new_emotion(emotion, holds_change["change"], sim.SAGE)
                is_over = sim.ending(emotion, turn["content"], sim.language(first["content"]), sim.SAGE)
                assert turn["emotion-point"] == emotion and (turn is later[-1] or not is_over)
            assert stored["emo_point"] == emotion


def test_a_curve_ends_at_the_sentient_score():
    long = talk(("a", 10), ("b", -20), ("c", 5))  # 40 50 30 35
    short = talk(("a", 20))  # 40 60, and stays there
    broken = talk(("a", 10))  # 40 50, then a malformed reply: 0
    sim.add_split_turn(broken, FREE, "b", utils.split_thinking("b", "think"), False)
    lost = talk(("a", 10))
    sim.end_without_score(lost, "no reply")
    dialogues = [long, short, broken, lost]
    curve = sentient.emotion_curve(dialogues)
    assert curve == pytest.approx([40, 160 / 3, 90 / 3, 95 / 3])
    assert curve[-1] == sim.score(dialogues)["mean_emotion"]


# --- strategies and capabilities


def test_frequencies_and_contributions_by_hand():
    first = talk(("praise and advice", 10), ("praise", -4))
    second = talk(("nothing", 3), ("twice praised", 6))
    second["history"].append({"role": "assistant", "content": "praise that nobody answers"})
    codes = [[["A-1", "D-1"], ["A-2"]], [[], ["A-1", "A-3"], ["A-3"]], None]
    scores = sentient.score_strategies([first, second, talk(("x", 1))], codes)
    assert scores["Praise"] == {"n": 4, "frequency": 4 / 5, "n_changes": 3, "contribution": (10 - 4 + 6) / 3}
    assert scores["Advice Provision"] == {"n": 1, "frequency": 1 / 5, "n_changes": 1, "contribution": 10}
    assert scores["Deep Empathy"] == {"n": 0, "frequency": 0, "n_changes": 0, "contribution": None}


def test_what_a_judge_says_is_read_strictly():
    assert sentient.read_strategies('So: {"2": [], "1": ["A-1", "E-1"]}') == [["A-1", "E-1"], []]
    for text in (
        "",
        "[]",
        '{"1": "A-1"}',
        '{"1": ["A-9"]}',
        '{"2": ["A-1"]}',
        '{"1": [["A-1"]]}',
        '{"1": null}',
    ):
        with pytest.raises(ValueError):
            sentient.read_strategies(text)
    assert sentient.read_marks(json.dumps(MARKS | {"reasons": "r"})) == MARKS
    for bad in (0, 6, 2.5, "3", None, True):
        with pytest.raises(ValueError, match="Core Insight"):
            sentient.read_marks(json.dumps(MARKS | {"Core Insight": bad}))


MARKS = dict(zip(sentient.CAPABILITIES, (1, 2, 3, 4, 5), strict=True))


def judge(text: str, n: int) -> str:
    """The first reply to each prompt is unreadable. It never understands what Cid said, and miscounts Dan's
    replies."""
    if n == 0 or "I am Cid" in text:
        return "Well."
    if "MINE" in text:
        return json.dumps(MARKS | {"Core Insight": 5})
    if "Which of these strategies" not in text:
        return json.dumps(MARKS)
    n_replies = text.count("\nREPLY ") + ("I am Dan" in text)
    return json.dumps({str(i): ["B-2"] for i in range(1, n_replies + 1)})


# --- runs with a model and simulators behind an endpoint


def change(text: str) -> int:
    return random.Random(text).randint(-15, 15)


def heard(dialogue: dict) -> list[tuple]:
    return [(turn["role"], turn["content"], turn.get("emotion-point")) for turn in dialogue["history"]]


# --- runs with the toy base model


def toy_args(tmp_path: Path, **changes) -> eval_sentient.Args:
    fields = {
        "model": str(ROOT / "data" / "toy" / "base"),
        "profiles": write(tmp_path / "users.jsonl", toy_users.profiles(6, 0, "test")),
        "simulator": f"{USERS}:user",
        "held_out_simulator": f"{USERS}:held_out_user",
        "rollout": "hf",
        "chat_template": "plain",
        "temperature": 1.0,
        "max_tokens": 16,
        "batch_size": 2,
        "out": str(tmp_path / "run"),
        **toy_users.TOY,
    }
    return eval_sentient.Args(**fields | changes)


def test_toy_model_from_end_to_end_and_after_a_kill(tmp_path, monkeypatch):
    eval_sentient.main(toy_args(tmp_path))
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    setting = {**sim.SAGE, **toy_users.TOY}
    texts = set()
    for suffix, user in (("", toy_users.user), ("_held_out", toy_users.held_out_user)):
        dialogues = read_log(run / f"dialogues{suffix}.jsonl")
        numbers = summary[f"simulator{suffix}"]
        assert numbers["mean_emotion"] == sum(row["emo_point"] for row in dialogues) / 6
        assert page.read_rows(run, f"dialogues{suffix}.jsonl")["gold"].mean() == numbers["mean_emotion"]
        for row in dialogues:
            again = sim.start(row["profile"], setting)
            for turn in row["history"]:
                if turn["role"] == "assistant":
                    texts.add(turn["text"])
                    sim.add_model_turn(again, setting, turn["text"], "plain", turn["status"] != "truncated")
                    sim.user_turns([again], setting, user)
            assert heard(again) == heard(row) and again["ended"] == row["ended"]
    assert len(texts) > 6  # sampled, not repeated

    # a kill after any turn: the same dialogues
    names = ("dialogues.jsonl", "dialogues_held_out.jsonl")
    whole = [(run / name).read_text() for name in names]
    for n_written in (2, 6):
        (run / "summary.json").unlink()
        for name in names:
            (run / name).unlink()
        kept = []

        def write_then_die(path, rows, kept=kept, n_written=n_written):
            if len(kept) == n_written:
                raise KeyboardInterrupt
            kept.append(path)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

        with monkeypatch.context() as patch:
            patch.setattr(eval_sentient, "write_jsonl", write_then_die)
            with pytest.raises(KeyboardInterrupt):
                eval_sentient.main(toy_args(tmp_path, resume=True))
        eval_sentient.main(toy_args(tmp_path, resume=True))
        assert [(run / name).read_text() for name in names] == whole
