"""eval_sentient.py: the published scores from stored dialogues, what a judge finds in them, and whole runs
with simulators that misbehave over real HTTP and with the toy base model."""

import csv
import json
import random
import time
from pathlib import Path

import pytest

import eval_sentient
import page
import utils
from benchmarks import sentient
from chat_server import Fault
from data.toy import users as toy_users
from launch import started
from rewards import simulated_user as sim
from rlmt.data import read_log
from test_simulated_user import HEAD, PROFILE, dialogue, shared, write

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


def test_stored_dialogues_have_no_headline_if_too_many_have_no_score(tmp_path):
    path = write(tmp_path / "d.jsonl", [talk(("a", 12)), talk(("a", 1)) | {"id": "d2", "ended": "too_long"}])
    for max_invalid, headline in ((0.01, None), (0.5, 52)):
        out = rescore(path, tmp_path, max_invalid=max_invalid)
        assert (out["n"], out["n_invalid"], out["mean_emotion"]) == (2, 1, headline)


def test_rows_that_are_no_dialogues_are_refused(tmp_path, exits):
    no_emotion = talk(("a", 1)) | {"history": [{"role": "user", "content": "hi"}]}
    path = write(tmp_path / "d.jsonl", [talk(("a", 1)), no_emotion])
    assert "d.jsonl:2: " in exits(rescore, path, tmp_path)


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


def test_stored_dialogues_are_judged(serve, tmp_path, exits):
    dialogues = []
    for name in ("Ann", "Bob", "Cid", "Dan"):
        dialogues.append(talk(("One.", 10), ("Two.", -4)) | {"id": name})
        dialogues[-1]["history"][0]["content"] = f"I am {name}."
    path = write(tmp_path / "d.jsonl", dialogues)
    server = serve(judge)
    flags = {"judge": "j", "judge_url": server.url, "max_invalid": 0.5}
    out = rescore(path, tmp_path, **flags)
    assert out["emotion_curve"] == [40, 50, 46] and out["wording"] == "our own"
    assert (out["strategies"]["n"], out["strategies"]["n_invalid"]) == (4, 2)
    assert out["strategies"]["Deep Empathy"] == {"n": 4, "frequency": 1, "n_changes": 4, "contribution": 3}
    assert out["capabilities"]["Solution Crafting"] == {"mean": 3, "interval": [3, 3]}
    judged = {row["id"]: row for row in read_log(tmp_path / "new" / "judged.jsonl")}
    good = {"strategies": [["B-2"], ["B-2"]], "capabilities": MARKS}
    assert judged["Ann"] == good | {"id": "Ann"} and judged["Bob"] == good | {"id": "Bob"}
    assert judged["Cid"] == {"id": "Cid", "strategies": None, "capabilities": None}
    assert judged["Dan"] == {"id": "Dan", "strategies": None, "capabilities": MARKS}

    # above --max-invalid there are no numbers; and no call is made twice
    n_calls = len(server.answered)
    strict = rescore(path, tmp_path, **flags | {"max_invalid": 0.1})
    assert strict["strategies"] == {"n": 4, "n_invalid": 2} and strict["capabilities"] == {
        "n": 4,
        "n_invalid": 1,
    }
    assert len(server.answered) == n_calls

    # other words for the capabilities: those of a file, and another fingerprint
    template = tmp_path / "mine.txt"
    template.write_text("MINE\n{$dialogue}")
    theirs = rescore(path, tmp_path, **flags, template=str(template))
    assert theirs["capabilities"]["Core Insight"]["mean"] == 5 and theirs["wording"].startswith("mine.txt ")
    assert theirs["judge_fingerprint"] != out["judge_fingerprint"]
    assert any("MINE\nUSER: I am Ann.\n\nREPLY 1: One." in str(request) for request in sent(server))
    template = tmp_path / "other.txt"
    template.write_text("MINE")
    assert "no {$dialogue}" in exits(rescore, path, tmp_path, **flags, template=str(template))


def sent(server) -> list[str]:
    return [request["messages"][-1]["content"] for request, _ in server.requests]


def test_the_toy_judge_knows_praise_a_reminder_and_a_dish(tmp_path):
    setting = FREE | toy_users.TOY
    stored = sim.start(toy_users.profiles(1, 0, "test")[0], setting)
    for reply in ("You have great taste! cod costs 5 dollars.", "Do not forget the hats!", "Hello."):
        sim.add_model_turn(stored, setting, reply, "plain")
        sim.user_turns([stored], setting, toy_users.user)
    assert toy_users.strategies(stored) == [["A-1", "D-1"], ["B-1"], []]
    out = rescore(write(tmp_path / "d.jsonl", [stored]), tmp_path, judge=f"{USERS}:strategies")
    assert "capabilities" not in out and out["strategies"]["Praise"]["n"] == 1


# --- runs with a model and simulators behind an endpoint


def behave(text: str, n: int):
    """Answers as the tested model, a planner and a speaker; `n` calls had this text before.

    Each first call of a planner or speaker fails or is unreadable. Nobody can read what the planner says of
    Bob, nor what the speaker of Eve says.
    """
    faults = [Fault("429"), Fault("500"), Fault("truncated JSON"), Fault("reset"), "Let me see."]
    fault = random.Random(text).choice(faults)
    is_planner = "TargetCompletion:" in text
    if not is_planner and "Origin:" not in text:
        return f"<think>z</think> Reply to: {text}"
    if n == 0:
        return fault
    if is_planner:
        return "Change: who knows" if "Bob" in text else f"{HEAD}Change:\n{change(text):+d}"
    if "Eve" in text:
        return "Response:"
    return f"Thinking: hm\nOrigin: o\nChange: c\nResponse: Answer {text.count('Person')}."


def change(text: str) -> int:
    return random.Random(text).randint(-15, 15)


def flags_of(server, tmp_path: Path) -> dict:
    names = ["Ann", "Bob", "Cid", "Dan", "Eve"]
    people = [PROFILE | {"id": name, "player": name, "first_talk": f"I am {name}."} for name in names]
    return {
        "model": "m",
        "model_url": server.url,
        "profiles": write(tmp_path / "p.jsonl", people),
        "simulator": "s",
        "simulator_url": server.url,
        "held_out_simulator": "h",
        "held_out_simulator_url": server.url,
        "think_format": "think",
        "turns": 4,
        "max_tokens": 20,
        "concurrency": 4,
        "out": str(tmp_path / "run"),
    }


def expected_dialogue(profile: dict) -> dict:
    """Works out by hand the dialogue that `behave` leads to."""
    expected = sim.start(profile, sim.SAGE)
    for turn in range(1, 5):
        said = f"<think>z</think> Reply to: {expected['history'][-1]['content']}"
        sim.add_model_turn(expected, sim.SAGE, said, "think")
        if turn == 4:  # the user does not answer the last reply
            break
        moved = change(sim.planner_request(expected, sim.SAGE)["messages"][0]["content"])
        plan = sim.read_plan(f"{HEAD}Change: {moved}")
        asked = sim.speaker_request(expected, sim.SAGE, plan)["messages"][0]["content"]
        sim.add_user_turn(expected, sim.SAGE, f"Answer {asked.count('Person')}.", moved)
    return expected


def heard(dialogue: dict) -> list[tuple]:
    return [(turn["role"], turn["content"], turn.get("emotion-point")) for turn in dialogue["history"]]


def check_run(run: Path) -> None:
    """Checks what a run with `behave` must lead to."""
    summary = json.loads((run / "summary.json").read_text())
    for suffix in ("", "_held_out"):
        dialogues = {row["id"]: row for row in read_log(run / f"dialogues{suffix}.jsonl")}
        for name, label in (("Bob", "Change"), ("Eve", "Response")):
            failed = dialogues.pop(name)
            assert failed["ended"] == "simulator_failed" and label in failed["error"]
        finals = []
        for row in dialogues.values():
            expected = expected_dialogue(row["profile"])
            assert heard(row) == heard(expected) and row["ended"] == "turns"
            finals.append(expected["emo_point"])
        numbers = summary[f"simulator{suffix}"]
        # 2 of 5 have no score
        assert numbers["mean_emotion"] is None and numbers["withheld"] == {"mean_emotion": sum(finals) / 3}
        assert (numbers["n"], numbers["n_invalid"], numbers["format_ok"]) == (5, 2, 1.0)
    index = list(csv.DictReader(open(run.parent / "runs.csv")))
    metrics = ["mean_emotion", "success", "failure", "mean_turns", "format_ok"]
    assert [(row["metric"], row["judge"]) for row in index] == [(m, j) for j in "sh" for m in metrics]
    assert index[0]["value"] == "" and index[0]["fingerprint"] != index[5]["fingerprint"]


def test_simulators_that_misbehave_or_fail(serve, tmp_path, exits):
    is_down = True

    def answer(text, n):
        if is_down and "Origin:" in text:
            return 400, {"error": {"message": "overloaded"}}
        return behave(text, n)

    server = serve(answer)
    flags = flags_of(server, tmp_path)
    # a failed simulator is asked again by --resume
    assert "none of 5 dialogues has a score" in exits(eval_sentient.main, eval_sentient.Args(**flags))
    is_down = False
    eval_sentient.main(eval_sentient.Args(**flags, resume=True))
    check_run(tmp_path / "run")
    # the stored dialogues give the same numbers
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["simulator_held_out"]
    again = rescore(str(tmp_path / "run" / "dialogues_held_out.jsonl"), tmp_path)
    for key in ("mean_emotion", "withheld", "success", "failure", "n", "n_invalid", "interval"):
        assert again[key] == summary[key]


def test_kill_and_resume_repeats_no_answered_call(serve, tmp_path):
    def slowly(text, n):
        time.sleep(0.02)
        return behave(text, n + 1)  # without the faults, whose repeats take seconds

    server = serve(slowly)
    flags = flags_of(server, tmp_path)
    words = []
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", value]
    process = started(["eval_sentient.py", *words], tmp_path / "output")
    while len(server.answered) < 25:
        assert process.is_alive(), (tmp_path / "output").read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    while server.now:
        time.sleep(0.01)
    eval_sentient.main(eval_sentient.Args(**flags, resume=True))
    check_run(tmp_path / "run")
    kept = []
    for name in ("model", "simulator", "simulator_held_out"):
        kept += [row["key"] for row in read_log(tmp_path / "run" / f"{name}.jsonl")]
    assert len(set(kept)) == len(kept)
    # only the calls that were under way at the kill may be made twice
    assert len(kept) <= len(server.answered) <= len(kept) + 4


def test_a_conversation_that_the_model_refuses_is_too_long(serve, tmp_path, exits):
    def refuse(text, n):
        if "Bob" in text and "Origin:" not in text and "TargetCompletion:" not in text:
            return 400, {"error": {"message": "context too long"}}
        return behave(text, n + 1)

    flags = flags_of(serve(refuse), tmp_path) | {"held_out_simulator": "", "turns": 1}
    eval_sentient.main(eval_sentient.Args(**flags))
    dialogues = {row["id"]: row for row in read_log(tmp_path / "run" / "dialogues.jsonl")}
    assert dialogues["Bob"]["ended"] == "too_long" and "HTTP 400" in dialogues["Bob"]["error"]
    assert dialogues["Ann"]["ended"] == "turns"


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


def test_bad_format_and_a_full_context_in_a_run(tmp_path):
    changes = {"protocol": "rlver", "think_format": "think", "max_tokens": 2, "held_out_simulator": ""}
    eval_sentient.main(toy_args(tmp_path, **changes))
    numbers = json.loads((tmp_path / "run" / "summary.json").read_text())["simulator"]
    assert numbers["ended"] == {"bad_format": 6}
    assert (numbers["mean_emotion"], numbers["failure"], numbers["format_ok"]) == (0, 6, 0)

    args = toy_args(tmp_path, max_tokens=480, turns=1, think_format="plain")
    profiles = toy_users.profiles(2, 0, "test")
    profiles[0]["first_talk"] += " No." * 40
    with eval_sentient.load_model(args, tmp_path) as generate:
        dialogues = eval_sentient.talk(args, profiles, toy_users.user, generate, tmp_path / "t.jsonl")
    assert [row["ended"] for row in dialogues] == ["too_long", "turns"] and "context" in dialogues[0]["error"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": ""}, "--model is missing"),
        ({"simulator": ""}, "--simulator is missing"),
        ({"profiles": "none.jsonl"}, "no such file"),
        ({"simulator": f"{USERS}:nobody"}, "no function 'nobody'"),
        ({"simulator": "gpt-4o"}, "OPENAI_API_KEY"),
        ({"ask_thinking": True}, "--think-format think"),
        ({"max_tokens": 500}, "512 tokens"),
        ({"judge": "nowhere.py:f"}, "nowhere.py"),
        ({"from_dialogues": "x.jsonl", "out": ""}, "--out"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_made(tmp_path, exits, monkeypatch, changes, words):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert words in exits(eval_sentient.main, toy_args(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_a_model_gets_the_context_that_it_was_trained_in(tmp_path):
    """Training with RLVER keeps earlier thinking in the context, SFT does not; a flag adds what no file
    says."""
    file = tmp_path / "think_format.json"
    file.write_text('{"think_format": "think", "keep_thinking": true}')
    args = eval_sentient.with_trained_context(eval_sentient.Args(model=str(tmp_path)))
    assert (args.keep_thinking, args.ask_thinking) == (True, False)
    file.write_text('{"think_format": "think"}')
    given = eval_sentient.Args(model=str(tmp_path), ask_thinking=True)
    assert eval_sentient.with_trained_context(given) == given


def test_an_outage_of_a_simulator_ends_the_run_before_its_summary(tmp_path, exits):
    args = toy_args(tmp_path)
    dialogues = [sim.start(PROFILE | {"id": name}, sim.SAGE) | {"ended": "turns"} for name in "abc"]
    sim.end_without_score(dialogues[0], "unreadable in 4 attempts: no change")
    assert eval_sentient.score_dialogues(args, "simulator", [], dialogues)["n_invalid"] == 1
    sim.end_without_score(dialogues[1], "no reply in 9 calls; the last: HTTP 503")
    said = exits(eval_sentient.score_dialogues, args, "simulator", [], dialogues)
    assert "1 of 3 got no reply" in said and "--resume" in said


def test_a_fingerprint_has_the_program_of_the_user(tmp_path):
    program = tmp_path / "user.py"
    args = toy_args(tmp_path, simulator=f"{program}:user")
    hashes = set()
    for change_of_emotion in (1, 2):
        program.write_text(f"def user(dialogue, setting): return 'hm', {change_of_emotion}")
        hashes.add(eval_sentient.fingerprint(args, "simulator", []))
    assert len(hashes) == 2
