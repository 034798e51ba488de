"""eval_sentient.py: the published scores from stored dialogues, and whole runs with simulators that misbehave over
real HTTP and with the toy base model."""

import csv
import json
import random
import time
from pathlib import Path

import pytest

import eval_sentient as sentient
import page
from benchmarks import sage_dialogues
from data.toy import users as toy_users
from rlmt.endpoint import CHECK_ATTEMPT
from launch import started
from rewards import simulated_user as sim
from chat_server import Fault
from test_simulated_user import HEAD, PROFILE, shared, write
from rlmt import data as rlmt_data

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "data" / "toy" / "base")
USERS = f"{ROOT}/data/toy/users.py"


# --- stored dialogues


def check_rules(dialogue: dict) -> None:
    """Checks that our rules make the start, each emotion and the end of a dialogue that SAGE's own tool wrote."""
    first, *later = sage_dialogues.turns_of_user(dialogue)
    language = sim.language(first["content"])
    emotion = first["emotion-point"]
    assert emotion == sim.SAGE["start"]
    for turn in later:
        holds_change = turn if "change" in turn else turn["planning"]
        emotion = sim.new_emotion(emotion, holds_change["change"], sim.SAGE)
        assert turn["emotion-point"] == emotion
        if turn is not later[-1]:
            assert not sim.ending(emotion, turn["content"], language, sim.SAGE)
    assert dialogue["emo_point"] == emotion


def test_the_published_scores(tmp_path):
    for expected in csv.DictReader(open(shared("expected.csv"))):
        path = shared(f"{expected['simulator']}_simulator__{expected['model']}.jsonl.gz")
        sentient.main(sentient.Args(from_dialogues=str(path), out=str(tmp_path / "out.json")))
        out = json.loads((tmp_path / "out.json").read_text())
        assert out["mean_emotion"] == float(expected["mean_final_emotion"])
        assert out["success"] == int(expected["n_final_ge_100"])
        assert out["failure"] == int(expected["n_final_lt_10"])
        assert (out["n"], out["n_invalid"]) == (int(expected["dialogues"]), 0)
        assert out["interval"][0] < out["mean_emotion"] < out["interval"][1]
        for dialogue in sage_dialogues.read(str(path)):
            check_rules(dialogue)


def stored(**changes) -> dict:
    """A dialogue as SAGE stores it: 40, +5, +14 (clipped to 10), -3."""
    history = [{"role": "user", "content": "hm", "emotion-point": 40}]
    for content, emotion, change in (("so so", 45, 5), ("better", 55, 14), ("oh", 52, -3)):
        history.append({"role": "assistant", "content": "I see."})
        history.append({"role": "user", "content": content, "emotion-point": emotion, "change": change})
    return {"id": "d1", "emo_point": 52, "emo_state": "Emotion-B", "history": history} | changes


def test_stored_dialogues_have_no_headline_either_if_too_many_have_no_score(tmp_path):
    path = write(tmp_path / "d.jsonl", [stored(), stored(id="d2", ended="too_long")])
    for max_invalid, headline in ((0.01, None), (0.5, 52)):
        args = sentient.Args(from_dialogues=path, out=str(tmp_path / "o.json"), max_invalid=max_invalid)
        sentient.main(args)
        out = json.loads((tmp_path / "o.json").read_text())
        assert (out["n"], out["n_invalid"], out["mean_emotion"]) == (2, 1, headline)


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
        ({"history": [*stored()["history"], {"role": "assistant"}]}, "'content', a text"),
    ],
)
def test_rows_that_are_no_dialogues_are_refused(tmp_path, exits, changes, words):  # noqa: F811
    path = write(tmp_path / "d.jsonl", [stored(), stored(**changes)])
    assert words in exits(sentient.main, sentient.Args(from_dialogues=path, out=str(tmp_path / "o.json")))
    assert not (tmp_path / "o.json").exists()


# --- runs with a model and simulators behind an endpoint


def behave(text: str, n: int):
    """Answers as the tested model, a planner and a speaker; `n` calls had this text before.

    Each first call of a planner or speaker fails or is unreadable. Nobody can read what the planner says of Bob, nor
    what the speaker of Eve says.
    """
    faults = [Fault("429"), Fault("500"), Fault("truncated JSON"), Fault("reset"), "Let me see."]
    fault = random.Random(text).choice(faults)
    if "TargetCompletion:" in text:  # the planner
        if n == 0:
            return fault
        if "Bob" in text:
            return "Change: who knows"
        return f"{HEAD}Change:\n{change(text):+d}"
    if "Origin:" in text:  # the speaker
        if n == 0:
            return fault
        if "Eve" in text:
            return "Response:"
        return f"Thinking: hm\nOrigin: o\nChange: c\nResponse: Answer {text.count('Person')}."
    return f"<think>z</think> Reply to: {text}"


def change(text: str) -> int:
    return random.Random(text).randint(-15, 15)


def endpoint_args(server, tmp_path: Path, **changes) -> sentient.Args:
    names = ["Ann", "Bob", "Cid", "Dan", "Eve"]
    people = [PROFILE | {"id": name, "player": name, "first_talk": f"I am {name}."} for name in names]
    fields = {
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
        "out": str(tmp_path / "run"),
        "price": (1.0, 2.0),
        "budget": 5.0,
        **changes,
    }
    return sentient.Args(**fields)


def expected_dialogue(profile: dict) -> dict:
    """Works out by hand the dialogue that `behave` leads to."""
    d = sim.start(profile, sim.SAGE)
    for turn in range(1, 5):
        said = f"<think>z</think> Reply to: {d['history'][-1]['content']}"
        sim.add_model_turn(d, sim.SAGE, said, "think")
        if turn == 4:  # the user does not answer the last reply
            break
        moved = change(sim.planner_request(d, sim.SAGE)["messages"][0]["content"])
        plan = sim.read_plan(f"{HEAD}Change: {moved}")
        asked = sim.speaker_request(d, sim.SAGE, plan)["messages"][0]["content"]
        sim.add_user_turn(d, sim.SAGE, f"Answer {asked.count('Person')}.", moved)
    return d


def heard(dialogue: dict) -> list[tuple]:
    return [(m["role"], m["content"], m.get("emotion-point")) for m in dialogue["history"]]


def check_run(run: Path) -> None:
    """Checks what a run with `behave` must lead to."""
    summary = json.loads((run / "summary.json").read_text())
    for role, suffix in (("simulator", ""), ("simulator_held_out", "_held_out")):
        dialogues = {d["id"]: d for d in rlmt_data.read_log(run / f"dialogues{suffix}.jsonl")}
        for name, label in (("Bob", "Change"), ("Eve", "Response")):
            failed = dialogues.pop(name)
            assert failed["ended"] == "simulator_failed" and label in failed["error"]
            assert len(failed["history"]) == 2 and failed["emo_point"] == 40
        assert set(dialogues) == {"Ann", "Cid", "Dan"}
        finals = []
        for d in dialogues.values():
            expected = expected_dialogue(d["profile"])
            assert heard(d) == heard(expected) and d["ended"] == "turns"
            assert d["history"][2]["planning"]["analyse"] == "warm"
            finals.append(expected["emo_point"])
        numbers = summary[role]
        assert numbers["mean_emotion"] is None  # 2 of 5 have no score
        assert numbers["withheld"] == sum(finals) / 3
        assert (numbers["n"], numbers["n_invalid"], numbers["format_ok"]) == (5, 2, 1.0)

    index = list(csv.DictReader(open(run.parent / "runs.csv")))
    metrics = ["mean_emotion", "success", "failure", "mean_turns", "format_ok"]
    assert [row["metric"] for row in index] == metrics * 2
    assert [row["judge"] for row in index] == ["s"] * 5 + ["h"] * 5
    assert index[0]["value"] == "" and index[0]["n_invalid"] == "2"
    assert index[0]["fingerprint"] != index[5]["fingerprint"]


def test_simulators_that_misbehave_or_fail(serve, tmp_path, capsys, exits):  # noqa: F811
    overloaded = True

    def answer(text, n):
        if overloaded and "Origin:" in text:
            return 400, {"error": {"message": "overloaded"}}
        return behave(text, n)

    server = serve(answer)
    sentient.main(endpoint_args(server, tmp_path, dry_run=True))
    out = capsys.readouterr().out
    assert "at most 30 calls" in out and "$" in out  # 5 users x 3 answers x 2 calls
    assert not server.answered and not (tmp_path / "run").exists()
    assert [request["model"] for request, _ in server.checks] == ["s", "h"]  # one token each

    # a failed simulator is asked again by --resume
    assert "none of 5 dialogues has a score" in exits(sentient.main, endpoint_args(server, tmp_path))
    overloaded = False
    sentient.main(endpoint_args(server, tmp_path, resume=True))
    check_run(tmp_path / "run")
    err = capsys.readouterr().err
    assert "dialogue Bob has no score" in err and "dialogue Eve has no score" in err
    with pytest.raises(SystemExit) as ended:
        sentient.main(endpoint_args(server, tmp_path, resume=True))
    assert ended.value.code == 0
    assert "is complete; --overwrite starts it anew\n" in capsys.readouterr().out

    # the stored dialogues give the same numbers
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["simulator_held_out"]
    path = str(tmp_path / "run" / "dialogues_held_out.jsonl")
    sentient.main(sentient.Args(from_dialogues=path, out=str(tmp_path / "o.json")))
    again = json.loads((tmp_path / "o.json").read_text())
    assert again["mean_emotion"] is summary["mean_emotion"] is None  # two of five without a score
    assert again["withheld"] == summary["withheld"]
    for key in ("success", "failure", "n", "n_invalid", "interval"):
        assert again[key] == summary[key]


def test_kill_and_resume_repeats_no_answered_call(serve, tmp_path):  # noqa: F811
    def slowly(text, n):
        time.sleep(0.02)
        return behave(text, n + 1)  # without the faults, whose repeats take seconds

    server = serve(slowly)
    args = endpoint_args(server, tmp_path, concurrency=4)
    flags = f"""--model m --model-url {server.url} --profiles {args.profiles} --simulator s
        --simulator-url {server.url} --held-out-simulator h --held-out-simulator-url {server.url}
        --think-format think --turns 4 --max-tokens 20 --out {args.out} --price 1.0 2.0 --budget 5.0 --concurrency 4"""
    process = started(["eval_sentient.py", *flags.split()], tmp_path / "output")
    while len(server.answered) < 25:
        assert process.is_alive(), (tmp_path / "output").read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    while server.now:
        time.sleep(0.01)
    before = len(server.answered)

    with open(tmp_path / "run" / "turns.jsonl", "ab") as f:  # a kill tears a line only now and then
        f.write(b'{"dialogues": [{"id": "Ann"')
    sentient.main(endpoint_args(server, tmp_path, concurrency=4, resume=True))
    check_run(tmp_path / "run")
    kept = []
    for name in ("model", "simulator", "simulator_held_out"):
        rows = rlmt_data.read_log(tmp_path / "run" / f"{name}.jsonl")
        kept += [row["key"] for row in rows if row["attempt"] != CHECK_ATTEMPT]
    assert len(set(kept)) == len(kept)
    # only the calls that were under way at the kill may be made twice
    assert before >= 25 and len(kept) <= len(server.answered) <= len(kept) + 4


# --- runs with the toy base model


def toy_args(tmp_path: Path, **changes) -> sentient.Args:
    fields = {
        "model": BASE,
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
        **changes,
    }
    return sentient.Args(**fields)


def test_toy_model_from_end_to_end_and_from_any_line(tmp_path):
    sentient.main(toy_args(tmp_path))
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    setting = {**sim.SAGE, **toy_users.TOY}
    texts = set()
    for suffix, user in (("", toy_users.user), ("_held_out", toy_users.held_out_user)):
        dialogues = rlmt_data.read_log(run / f"dialogues{suffix}.jsonl")
        numbers = summary[f"simulator{suffix}"]
        assert numbers["mean_emotion"] == sum(d["emo_point"] for d in dialogues) / 6
        assert numbers["n_invalid"] == 0
        golds = page.read_rows(run, f"dialogues{suffix}.jsonl")["gold"]
        assert golds.mean() == pytest.approx(numbers["mean_emotion"])
        for d in dialogues:
            again = sim.start(d["profile"], setting)
            for turn in d["history"]:
                if turn["role"] == "assistant":
                    assert turn["n_tokens"]
                    texts.add(turn["text"])
                    sim.add_model_turn(again, setting, turn["text"], "plain", turn["status"] != "truncated")
                    sim.user_turns([again], setting, user)
            assert heard(again) == heard(d)
            assert (again["emo_point"], again["ended"]) == (d["emo_point"], d["ended"])
    assert len(texts) > 6  # sampled, not repeated

    # a kill after any line: the same dialogues, and nothing is generated that is there already
    names = ("dialogues.jsonl", "dialogues_held_out.jsonl", "turns.jsonl")
    whole = {name: (run / name).read_text() for name in names}
    lines = whole["turns.jsonl"].splitlines(keepends=True)
    assert len(lines) == 3 * (3 + 1)
    for kept in (2, 11):
        (run / "turns.jsonl").write_text("".join(lines[:kept]) + lines[kept][:30])
        (run / "summary.json").unlink()
        sentient.main(toy_args(tmp_path, resume=True))
        assert {name: (run / name).read_text() for name in names} == whole


JUDGE_WITHOUT_ENGINES = """import multiprocessing

def judge(dialogue):
    assert multiprocessing.active_children() == []
    return [[] for turn in dialogue["history"] if turn["role"] == "assistant"]
"""


def test_two_engines_talk_as_transformers_does(tmp_path, capfd, forked_engines):
    """And when a judge is asked, they have ended: a local one needs their memory."""
    sentient.main(toy_args(tmp_path, temperature=0.0))
    (tmp_path / "judge.py").write_text(JUDGE_WITHOUT_ENGINES)
    changed = {
        "temperature": 0.0,
        "rollout": "vllm",
        "data_parallel": 2,
        "out": str(tmp_path / "vllm"),
        "judge": f"{tmp_path}/judge.py:judge",
    }
    sentient.main(toy_args(tmp_path, **changed))
    assert "vLLM: 2 engines: " in capfd.readouterr().out
    for name in ("dialogues.jsonl", "dialogues_held_out.jsonl"):
        dialogues = (tmp_path / "vllm" / name).read_text()
        assert dialogues == (tmp_path / "run" / name).read_text()
        assert dialogues.count("\n") == 6
    assert (tmp_path / "vllm" / "judged_held_out.jsonl").read_text().count("\n") == 6


def test_a_zero_model_ends_at_its_closing_tag(tmp_path):
    args = toy_args(tmp_path, think_format="zero_think", chat_template="auto", max_tokens=120)
    dialogues = [sim.start(profile, sim.SAGE) for profile in toy_users.profiles(8, 0, "test")]
    with sentient.load_model(args, tmp_path) as generate:
        replies = generate([sim.chat_messages(d) for d in dialogues], list(range(8)))
    n_closed = 0
    for d, (text, finished, _) in zip(dialogues, replies, strict=True):
        if finished and "</response>" in text:
            n_closed += 1
            assert text.endswith("</response>")
        sim.add_model_turn(d, sim.SAGE, text, "zero_think", finished)
        turn = d["history"][-1]
        if turn["status"] == "ok":
            assert turn["content"] and "<" not in turn["content"]
    assert n_closed >= 3


def test_bad_format_and_a_full_context_in_a_run(tmp_path):
    changes = {"protocol": "rlver", "think_format": "think", "max_tokens": 2, "held_out_simulator": ""}
    sentient.main(toy_args(tmp_path, **changes))
    numbers = json.loads((tmp_path / "run" / "summary.json").read_text())["simulator"]
    assert numbers["ended"] == {"bad_format": 6}
    assert (numbers["mean_emotion"], numbers["failure"], numbers["format_ok"]) == (0, 6, 0)

    args = toy_args(tmp_path, max_tokens=480, turns=1, think_format="plain")
    profiles = toy_users.profiles(2, 0, "test")
    profiles[0]["first_talk"] += " No." * 40
    with sentient.load_model(args, tmp_path) as generate:
        dialogues = sentient.talk(args, profiles, toy_users.user, generate, tmp_path / "t.jsonl")
    assert [d["ended"] for d in dialogues] == ["too_long", "turns"] and "context" in dialogues[0]["error"]


def test_half_of_a_surrogate_pair_in_a_reply_is_written(tmp_path):
    (tmp_path / "user.py").write_text('def user(dialogue, setting): return "bye \\ud83d", 1')
    args = sentient.Args(
        model="m", simulator=f"{tmp_path}/user.py:user", think_format="plain", model_url="http://x"
    )
    profiles = [PROFILE | {"id": "a"}]
    generate = lambda *_: [("hello", True, 1)]
    dialogues = sentient.hold_dialogues(args, "simulator", profiles, generate, tmp_path)
    assert dialogues[0]["emo_point"] == 41
    assert rlmt_data.read_log(tmp_path / "dialogues.jsonl")[0]["history"][-1]["content"] == "bye \ud83d"


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
        ({"model": "none"}, "neither a model folder"),
        ({"from_dialogues": "x.jsonl", "out": ""}, "--out"),
        ({"from_dialogues": "none.jsonl"}, "no such file"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_made(tmp_path, exits, monkeypatch, changes, words):  # noqa: F811
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert words in exits(sentient.main, toy_args(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dry_run", [True, False])
def test_simulators_are_asked_for_one_token_before_the_model(serve, tmp_path, exits, dry_run):  # noqa: F811
    server = serve(behave)
    foreign = serve(behave, check=lambda text, n: (401, {"error": {"message": "no"}}))
    args = endpoint_args(server, tmp_path, held_out_simulator_url=foreign.url, dry_run=dry_run)
    assert f"--held-out-simulator h: {foreign.url}: HTTP 401" in exits(sentient.main, args)
    assert len(server.checks) == 1 and not server.requests and not foreign.requests
    assert not Path(args.out).exists()


def test_setting_of_the_flags():
    assert sentient.Args().setting() == sim.SAGE
    assert sentient.Args(protocol="rlver").setting() == sim.RLVER
    args = sentient.Args(start=0, low=5, turns=3, user="challenging", seed=4)
    changed = {"start": 0, "low": 5, "turns": 3, "kind": "challenging", "seed": 4}
    assert args.setting() == sim.SAGE | changed


def test_a_model_gets_the_context_that_it_was_trained_in(tmp_path, capsys):
    """Training with RLVER keeps earlier thinking in the context, SFT does not; a flag adds what no file says."""
    (tmp_path / "think_format.json").write_text('{"think_format": "think", "keep_thinking": true}')
    args = sentient.with_trained_context(sentient.Args(model=str(tmp_path)))
    assert (args.keep_thinking, args.ask_thinking) == (True, False)
    assert "was trained with keep_thinking" in capsys.readouterr().out

    (tmp_path / "think_format.json").write_text('{"think_format": "think"}')
    for asked in (False, True):
        given = sentient.Args(model=str(tmp_path), ask_thinking=asked)
        assert sentient.with_trained_context(given) == given
    behind_url = sentient.Args(model="name", model_url="http://localhost:1/v1")
    assert sentient.with_trained_context(behind_url) == behind_url


def test_a_conversation_that_the_model_refuses_is_too_long(serve, tmp_path, exits):  # noqa: F811
    def refuse(text, n):
        if "Bob" in text and "Origin:" not in text and "TargetCompletion:" not in text:
            return 400, {"error": {"message": "context too long"}}
        return behave(text, n + 1)

    server = serve(refuse)
    sentient.main(endpoint_args(server, tmp_path, held_out_simulator="", turns=1, seed=3))
    dialogues = {d["id"]: d for d in rlmt_data.read_log(tmp_path / "run" / "dialogues.jsonl")}
    assert dialogues["Bob"]["ended"] == "too_long" and "HTTP 400" in dialogues["Bob"]["error"]
    assert dialogues["Ann"]["ended"] == "turns"
    seeds = {request["seed"] for request, _ in server.requests if request["model"] == "m"}
    assert seeds == {(3 * 1_000_003 + number) * 1009 for number in range(5)}

    nobody = serve(lambda text, n: (400, {"error": {"message": "unknown parameter"}}))
    args = endpoint_args(server, tmp_path, model_url=nobody.url, out=str(tmp_path / "none"))
    assert "refuses every request" in exits(sentient.main, args)


def test_an_outage_of_a_simulator_ends_the_run_before_its_summary(tmp_path, exits):  # noqa: F811
    args = toy_args(tmp_path)
    dialogues = [sim.start(PROFILE | {"id": name}, sim.SAGE) | {"ended": "turns"} for name in "abc"]
    sim.end_without_score(dialogues[0], "unreadable in 4 attempts: no change")
    assert sentient.score_dialogues(args, "simulator", [], dialogues)["n_invalid"] == 1
    sim.end_without_score(dialogues[1], "no reply in 9 calls; the last: HTTP 503")
    said = exits(sentient.score_dialogues, args, "simulator", [], dialogues)
    assert "1 of 3 got no reply" in said and "--resume" in said


def test_a_fingerprint_has_the_program_of_the_user(tmp_path):
    program = tmp_path / "user.py"
    program.write_text("def user(dialogue, setting): return 'hm', 1")
    args = toy_args(tmp_path, simulator=f"{program}:user")
    before = sentient.fingerprint(args, "simulator", [])
    program.write_text("def user(dialogue, setting): return 'hm', 2")
    assert sentient.fingerprint(args, "simulator", []) != before
