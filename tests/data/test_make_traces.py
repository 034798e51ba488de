"""data/make_traces.py against a real HTTP server on loopback: good, broken, refusing, cut-off and failing
teachers, a kill in the middle, and its output read by data/prepare.py and train_sft_warmstart.py."""

import functools
import json
from pathlib import Path

import pytest
from chat_server import Fault
from test_prepare import chat

from rlmt import scorers
from rlmt.data import read_log, write_jsonl
from data import make_traces
from data.make_traces import Args, refuses

PLAN = "The user asks for something small; I name the thing, check that it is right, and then say it in one plain sentence."
ENGLISH, RUSSIAN = "Here is the answer that was asked for.", "Вот ответ, о котором просили."


def tagged(thinking: str = PLAN, response: str = ENGLISH) -> str:
    return f"<think>\n{thinking}\n</think>\n<response>\n{response}\n</response>\n"


def body(content, finish_reason: str = "stop", **message) -> tuple:
    """(status, body, headers) of a chat completion, which the server sends as it is."""
    message = {"role": "assistant", "content": content, **message}
    return 200, {"choices": [{"index": 0, "finish_reason": finish_reason, "message": message}]}


@pytest.fixture
def world(tmp_path, monkeypatch, serve):
    """world(prompts, behave): the server and run(**arguments) -> trace rows and report, after checking what
    always holds."""
    # short waits between tries
    short = functools.partial(scorers.connect, retries=2, backoff=0.005)
    monkeypatch.setattr(make_traces, "connect", short)

    def world(prompts: list[list[dict]], behave):
        lines = [{"id": f"p{i}", "messages": messages} for i, messages in enumerate(prompts)]
        write_jsonl(tmp_path / "prompts.jsonl", lines)
        server = serve(behave)
        out = tmp_path / "traces.jsonl"

        def run(n: int, **more):
            common = {"teacher": "T", "teacher_url": server.url, "out": out}
            make_traces.main(Args(prompts=tmp_path / "prompts.jsonl", n=n, **common, **more))
            got, report = read_log(out), json.loads(Path(f"{out}.report.json").read_text())
            n_dropped = sum(report["dropped"].values())
            assert report["n_in"] == len(lines) == report["n_out"] + n_dropped + report["not_asked"]
            assert report["n_out"] == len(got) <= n
            numbers = [int(row["id"][1:]) for row in got]
            assert numbers == sorted(numbers)
            for row, number in zip(got, numbers, strict=True):
                assert list(row) == ["id", "messages", "thinking", "response", "teacher"]
                assert row["messages"] == prompts[number] and row["teacher"] == "T"
            return got, report

        return server, run

    return world


# --- the rules by hand


@pytest.mark.parametrize(
    "text, expected",
    [
        ("I'm sorry, but I can't help with that.", True),
        ("  I’m sorry, but I’m not able to.", True),
        ("I CANNOT ASSIST with it", True),
        ("I am unable to do so", True),
        ("Sorry, I cannot.", True),
        ("As an AI language model, I cannot say", True),
        ("I'm sorry, but it seems that feldspar is a mineral.", False),
        ("I'm sorry to hear that.", False),
        ("I can't help but smile.", False),
        ("As an AI researcher, I can't sleep.", False),
        ("Cannot be done: see I can't help with", False),
        ("", False),
    ],
)
def test_refusals(text, expected):
    assert refuses(text) is expected


# --- whole runs

CASES = {  # the replies, of which the last stays; why it is dropped ("": a good trace); and the calls it takes
    "good": ([tagged()], "", 2),  # the first one is asked in the check too
    "unreadable twice": ([PLAN, PLAN, tagged()], "", 3),
    "429, unreadable, half a body": ([Fault("429"), "<think>", Fault("short body"), tagged()], "", 4),
    "Ответь, пожалуйста": ([tagged(response=RUSSIAN)], "", 1),
    "a good one with \u2028 and an emoji": ([tagged(response=ENGLISH + "\u2028\U0001f600")], "", 1),
    "no tags": (["Just the answer."], "no_open", 4),
    "thinking unclosed": ([f"<think>{PLAN}<response>{ENGLISH}</response>"], "no_close", 4),
    "two answers": ([tagged() + tagged()], "tag_inside_text", 4),
    "a postscript": ([tagged() + "P.S."], "text_after_response", 4),
    "no thought": ([tagged("")], "empty_thinking", 4),
    "no answer": ([tagged(response="")], "empty_response", 4),
    "cut off": ([body("<think>" + PLAN, "length")], "truncated", 4),
    "cut off at once, in a repeat": (["no tags", body("<think>" + PLAN, "length")], "truncated", 4),
    "cut off behind the end": ([body(tagged(), "length")], "truncated", 4),
    "refused without tags": (["I'm sorry, but I can't help with that."], "refusal", 1),
    "refused in tags": ([tagged(response="I cannot assist with this.")], "refusal", 1),
    "refused in a field": ([body(None, refusal="no")], "refusal", 4),
    "filtered": ([body("", "content_filter")], "refusal", 4),
    "other tags": ([tagged(response=f"<thinking>hm</thinking> {ENGLISH}")], "tag_inside_text", 1),
    "hardly a thought": ([tagged("An easy one.")], "short_thinking", 1),
    "half a surrogate pair": ([tagged(response=ENGLISH + "\ud83d")], "broken_unicode", 1),
    "too long a context": ([(400, {"error": {"message": "context"}})], "rejected", 1),
    "always 503": ([Fault("503")], "no_reply", 3),
}


def test_every_kind_of_reply(world):
    prompts = [chat(name) for name in [*CASES, "good"]]

    def behave(text: str, n: int):
        replies = CASES[text][0]
        return replies[min(n, len(replies) - 1)]

    server, run = world(prompts, behave)
    got, report = run(n=9)  # more than the file gives
    reasons = {"": []}
    for i, (_, reason, _) in enumerate(CASES.values()):
        reasons.setdefault(reason, []).append(f"p{i}")
    assert [row["id"] for row in got] == reasons.pop("")
    reasons["duplicate_prompt"] = [f"p{len(CASES)}"]
    assert report["examples"] == {reason: ids[:5] for reason, ids in reasons.items()}
    assert report["dropped"] == {reason: len(ids) for reason, ids in reasons.items()}
    assert dict(server.calls) == {name: n_calls for name, (_, _, n_calls) in CASES.items()}
    assert {row["thinking"] for row in got} == {PLAN}
    assert {row["response"] for row in got} == {ENGLISH, RUSSIAN, ENGLISH + "\u2028\U0001f600"}
    assert report["calls_of_this_start"] == sum(server.calls.values())
    assert report["n_asked"] == len(CASES) and report["args"]["n"] == 9
    # a second start asks again only for what has no stored reply, and writes the same
    before = dict(server.calls)
    assert run(n=9, resume=True)[0] == got
    assert {t: c - before[t] for t, c in server.calls.items() if c > before[t]} == {
        "always 503": 3,
        "too long a context": 1,
    }


def test_reasoning_in_a_field_of_its_own(world):
    fields = {
        "a": {"reasoning_content": PLAN},
        "b": {"reasoning": f" {PLAN}\n", "reasoning_content": None},
        "c": {},
        "d": {"reasoning": ""},
        "e": {"reasoning_content": PLAN + "</think>"},
        "f": {"reasoning_content": "hm"},
    }
    replies = {name: body(ENGLISH, **field) for name, field in fields.items()}
    replies["g"] = body("<response>y</response>", reasoning_content=PLAN)
    replies["cut"] = body(None, "length", reasoning_content=PLAN)
    prompts = [chat(name) for name in replies]
    server, run = world(prompts, lambda text, n: replies[text])
    got, report = run(n=8, reasoning_field=True)
    assert [(t["id"], t["thinking"], t["response"]) for t in got] == [
        ("p0", PLAN, ENGLISH),
        ("p1", PLAN, ENGLISH),
    ]
    assert report["examples"] == {
        "empty_thinking": ["p2", "p3"],
        "tag_inside_text": ["p4", "p6"],
        "short_thinking": ["p5"],
        "truncated": ["p7"],
    }
    # the teacher gets the prompt alone, without an instruction
    assert all(request["messages"] in prompts for request, _ in server.requests)
