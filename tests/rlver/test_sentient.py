"""eval_sentient.py: the published scores from stored dialogues, what a judge finds in them, and a whole run
with the toy base model, with a program and an endpoint as simulators."""

import json
from pathlib import Path

import pytest
from conftest import PUBLISHED, ROOT, table

import eval_sentient
from rlmt.data import read_log, read_rows, write_jsonl
from rlver import sentient, toy_users
from rlver import simulated_user as sim
from test_simulated_user import dialogue

FREE = sim.RLVER | {"start": 40}  # changes are not clipped


def talk(*turns: tuple[str, int], name: str = "anna") -> dict:
    return dialogue(FREE, *turns) | {"id": name, "ended": "turns"}


def rescore(path: Path, out: Path, **flags) -> dict:
    eval_sentient.main(eval_sentient.Args(from_dialogues=str(path), out=str(out), overwrite=True, **flags))
    return json.loads(out.read_text())


# --- stored dialogues


def test_the_published_scores(tmp_path):
    """Our rules also make the start, each emotion and the end of these dialogues, which SAGE's own tool
    wrote."""
    for expected in table(PUBLISHED / "sage/expected.csv"):
        path = PUBLISHED / f"sage/{expected['simulator']}_simulator__{expected['model']}.jsonl.gz"
        out = rescore(path, tmp_path / "o.json")
        assert out["mean_emotion"] == float(expected["mean_final_emotion"])
        assert out["success"] == int(expected["n_final_ge_100"])
        assert out["failure"] == int(expected["n_final_lt_10"])
        assert (out["n"], out["n_invalid"]) == (int(expected["dialogues"]), 0)
        assert out["interval"][0] < out["mean_emotion"] < out["interval"][1]
        # nine answers: the user does not answer the tenth reply
        curve = out["emotion_curve"]
        assert (len(curve), curve[0], curve[-1]) == (10, 40, pytest.approx(out["mean_emotion"]))
        for stored in read_rows(path):
            first, *later = [turn for turn in stored["history"] if turn["role"] == "user"]
            emotion = first["emotion-point"]
            assert emotion == sim.SAGE["start"]
            for turn in later:
                emotion = sim.new_emotion(emotion, turn["change"], sim.SAGE)
                is_over = sim.ending(emotion, turn["content"], sim.SAGE)
                assert turn["emotion-point"] == emotion and (turn is later[-1] or not is_over)
            assert stored["emo_point"] == emotion


@pytest.mark.parametrize(
    "turn", [7, {"role": "user", "content": "hi"}, {"role": "assistant", "content": ["ho"]}]
)
def test_a_dialogue_that_cannot_be_scored_is_named(tmp_path, exits, turn):
    path = tmp_path / "dialogues.jsonl"
    write_jsonl(path, [{"id": 1, "emo_point": 50, "history": [turn]}])
    assert f"{path}:1: a turn: " in exits(rescore, path, tmp_path / "o.json")


def test_a_score_by_hand():
    long = talk(("a", 10), ("b", -20), ("c", 5))  # 40 50 30 35
    short = talk(("a", 60))  # 40 100, and stays there
    broken = talk(("a", 10))  # 40 50, then a malformed reply: 0
    sim.add_model_turn(broken, FREE, "b", "think")
    lost = talk(("a", 10))
    sim.end_without_score(lost, "no reply")
    out = sentient.score([long, short, broken, lost], seed=0, max_invalid=0.25)
    assert out["emotion_curve"] == pytest.approx([40, 200 / 3, 130 / 3, 135 / 3])
    assert out["mean_emotion"] == 135 / 3 and (out["success"], out["failure"]) == (1, 1)
    assert (out["n"], out["n_invalid"], out["mean_turns"]) == (4, 1, (4 + 2 + 2) / 3)
    assert out["format_ok"] == 6 / 7 and out["ended"] == {"turns": 2, "bad_format": 1, "simulator_failed": 1}
    goes_on = long | {"ended": ""}
    assert sentient.score([long, short, broken, goes_on], 0, 0.25)["n_invalid"] == 1
    assert sentient.score([long, short, broken, lost], 0, 0.2)["mean_emotion"] is None


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


MARKS = dict(zip(sentient.CAPABILITIES, (1, 2, 3, 4, 5), strict=True))
NO_STRATEGIES = (
    "",
    "[]",
    '{"1": "A-1"}',
    '{"1": ["A-9"]}',
    '{"2": ["A-1"]}',
    '{"1": [["A-1"]]}',
    '{"1": null}',
)


def test_what_a_judge_says_is_read_strictly():
    assert sentient.read_strategies('{"2": [], "1": ["A-1", "E-1"]}') == [["A-1", "E-1"], []]
    for text in NO_STRATEGIES:
        with pytest.raises(ValueError):
            sentient.read_strategies(text)
    assert sentient.read_marks(json.dumps(MARKS | {"reasons": "r"})) == MARKS
    for bad in (0, 6, 2.5, "3", None, True):
        with pytest.raises(ValueError, match="Core Insight"):
            sentient.read_marks(json.dumps(MARKS | {"Core Insight": bad}))


def test_a_judge_of_stored_dialogues(serve, tmp_path):
    """The first reply to each request is unreadable; no reply about Cid is, and Dan's replies are miscounted."""

    def behave(text: str, n: int) -> str:
        if n == 0 or "I am Cid" in text:
            return "Well."
        if "Which of these strategies" not in text:
            return json.dumps(MARKS | {"Core Insight": 5 if text.startswith("MINE") else 1})
        n_replies = text.count("\nREPLY ") + ("I am Dan" in text)
        return json.dumps({str(i): ["B-2"] for i in range(1, n_replies + 1)})

    dialogues = [talk((f"I am {name}", 10), ("Go on", 4), name=name) for name in ("Ann", "Bob", "Cid", "Dan")]
    path = tmp_path / "dialogues.jsonl"
    write_jsonl(path, dialogues)
    template = tmp_path / "mine.txt"
    template.write_text("MINE {$dialogue} {$keys}")
    flags = {"judge": "j", "judge_url": serve(behave).url, "template": str(template), "max_invalid": 0.5}
    out = rescore(path, tmp_path / "new" / "o.json", **flags)
    numbers = {"n": 4, "frequency": 1, "n_changes": 4, "contribution": 7}
    assert out["strategies"]["Deep Empathy"] == numbers and out["strategies"]["n_invalid"] == 2
    assert out["capabilities"]["Core Insight"]["mean"] == 5 and out["capabilities"]["n_invalid"] == 1
    judged = read_log(tmp_path / "new" / "judged_o.jsonl")
    assert [row["strategies"] for row in judged] == [[["B-2"]] * 2] * 2 + [None] * 2
    flags["max_invalid"] = 0.3
    out = rescore(path, tmp_path / "new" / "o.json", **flags)
    assert out["strategies"] == {"n": 4, "n_invalid": 2} and "Core Insight" in out["capabilities"]


# --- a whole run


def test_a_run_with_two_simulators_and_its_resume(serve, tmp_path, exits):
    server = serve(lambda text, n: "Response: Go on." if "Origin:" in text else "Change: +3")
    run = tmp_path / "run"
    write_jsonl(tmp_path / "users.jsonl", toy_users.profiles(6, 0, "test"))
    args = eval_sentient.Args(
        model=f"{ROOT}/data/toy/base",
        profiles=str(tmp_path / "users.jsonl"),
        simulator=f"{ROOT}/rlver/toy_users.py:user",
        held_out_simulator="m",
        held_out_simulator_url=server.url,
        rollout="hf",
        think_format="plain",  # the base model writes tags by chance
        temperature=1.0,
        max_tokens=16,
        batch_size=2,
        out=str(run),
        **toy_users.TOY,
    )
    eval_sentient.main(args)
    setting = sim.SAGE | toy_users.TOY
    statuses = set()
    for row in read_log(run / "dialogues.jsonl"):
        again = sim.start(row["profile"], setting)
        for turn in row["history"]:
            if turn["role"] == "assistant":
                statuses.add(turn["status"])
                sim.add_model_turn(again, setting, turn["text"], "plain", turn["status"] == "ok")
                again["history"][-1]["n_tokens"] = turn["n_tokens"]
                sim.user_turns([again], setting, toy_users.user)
        assert again == row
    assert statuses == {"ok", "truncated"}
    # the endpoint's user answers two of three replies
    summary = json.loads((run / "summary.json").read_text())
    assert summary["simulator_held_out"]["emotion_curve"] == [40, 43, 46]

    # a kill after the first batch's first reply: the same dialogues, and nothing is asked again
    (run / "summary.json").unlink()
    whole = {}
    for name in ("dialogues.jsonl", "dialogues_held_out.jsonl"):
        whole[name] = read_log(run / name)
        rows = read_log(run / name)
        for number, row in enumerate(rows):
            row["history"] = row["history"][: 1 + (number < 2)]
            row |= {"emo_point": 40, "emo_state": "Emotion-B", "ended": "", "kept": True}
        write_jsonl(run / name, rows)
    n_asked = len(server.requests)
    args.resume = True
    eval_sentient.main(args)
    assert len(server.requests) == n_asked
    for name, rows in whole.items():
        assert read_log(run / name) == [row | {"kept": True} for row in rows]

    (run / "summary.json").unlink()
    write_jsonl(tmp_path / "users.jsonl", toy_users.profiles(6, 1, "test"))
    assert "what --profiles names is not what it was" in exits(eval_sentient.main, args)
