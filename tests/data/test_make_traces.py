"""data/make_traces.py against a real HTTP server on loopback: good, broken, refusing, cut-off and failing
teachers, a kill in the middle, and its output read by data/prepare.py and train_sft_warmstart.py."""

import functools
import json
import time
from pathlib import Path

import pytest
import tyro
from launch import started
from chat_server import ChatServer, Fault

from rlmt import endpoint
from rlmt.data import read_rows
from rlmt import chat as templates
import utils
from data import make_traces, prepare
from data.make_traces import INSTRUCTION, MIN_THINKING, Args, refuses, split_reply
from rlmt import data as rlmt_data
from rlmt import chat as rlmt_chat

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data"
PLAN = "The user asks for something small; I name the thing, check that it is right, and then say it in one plain sentence."
ENGLISH, RUSSIAN = "Here is the answer that was asked for.", "Вот ответ, о котором просили."


def tagged(thinking: str = PLAN, response: str = ENGLISH) -> str:
    return f"<think>\n{thinking}\n</think>\n<response>\n{response}\n</response>\n"


def body(content, finish_reason: str = "stop", **message) -> tuple:
    """(status, body, headers) of a chat completion, which the server sends as it is."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content, **message},
    }
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}, ()


def chat(*texts: str, system: str = "") -> list[dict]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + turns


@pytest.fixture
def world(tmp_path, monkeypatch):
    """world(prompts, behave): the server and run(**arguments) -> trace rows and report, after checking what
    always holds."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(
        make_traces, "Endpoint", functools.partial(endpoint.Endpoint, retries=2, backoff=0.005)
    )  # small waits
    servers = []

    def world(prompts: list, behave):
        lines = [
            {"id": f"p{i}", "messages": chat(p) if isinstance(p, str) else p, "source": "s"}
            for i, p in enumerate(prompts)
        ]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        servers.append(ChatServer(behave))
        out = tmp_path / "traces.jsonl"

        def run(**more):
            args = {
                "prompts": tmp_path / "prompts.jsonl",
                "out": out,
                "teacher": "T",
                "teacher_url": servers[-1].url,
                **more,
            }
            make_traces.main(Args(**args))
            if args.get("dry_run"):
                return None
            got, report = rlmt_data.read_log(out), json.loads(Path(f"{out}.report.json").read_text())
            assert (
                report["n_in"]
                == len(lines)
                == report["n_out"] + sum(report["dropped"].values()) + report["not_asked"]
            )
            assert report["n_out"] == len(got) <= args["n"]
            assert {r: ids[:5] for r, ids in report["examples"].items()} == report["examples"]
            order = [row["id"] for row in lines]
            assert [order.index(row["id"]) for row in got] == sorted(order.index(row["id"]) for row in got)
            messages = {row["id"]: row["messages"] for row in lines}
            assert all(list(t) == ["id", "messages", "thinking", "response", "teacher"] for t in got)
            assert all(t["messages"] == messages[t["id"]] and t["teacher"] == "T" for t in got)
            return got, report

        return servers[-1], run

    yield world
    for server in servers:
        server.shutdown()
        server.server_close()


# --- the rules by hand


@pytest.mark.parametrize(
    "text, reason",
    [
        ("<think>z</think><response>y</response>", ""),
        (" <think> z\n</think> \n <response> y </response> \n", ""),
        ("", "no_open"),
        ("y", "no_open"),
        ("Sure! <think>z</think><response>y</response>", "no_open"),
        ("<THINK>z</THINK><response>y</response>", "no_open"),
        ("```<think>z</think><response>y</response>```", "no_open"),
        ("<think>z</think> and so <response>y</response>", "no_open"),
        ("<think>z</think> y", "no_open"),
        ("<response>y</response><think>z</think>", "no_open"),
        ("<think>z <response>y</response>", "no_close"),
        ("<think>z</think><response>y", "no_close"),
        ("<think>z</think>", "no_open"),
        ("<think>a<think>b</think><response>y</response>", "nested"),
        ("<think>a</think><think>b</think><response>y</response>", "no_open"),
        ("<think>z</think><response>a</response> b </response>", "tag_inside_text"),
        ("<think>z</think><response>y</response> I hope it helps.", "text_after_response"),
        ("<think> </think><response>y</response>", "empty_thinking"),
        ("<think>z</think><response>\n</response>", "empty_response"),
    ],
)
def test_a_tagged_reply_is_one_block_of_each(text, reason):
    if not reason:
        assert split_reply(text) == ("z", "y")
    else:
        with pytest.raises(ValueError, match=f"^{reason}$"):
            split_reply(text)


def test_a_reply_with_reasoning_of_its_own():
    assert split_reply(" y\n", "\nz ") == ("z", "y")
    for text, reasoning, reason in (
        ("y", " ", "empty_thinking"),
        (" ", "z", "empty_response"),
        ("", "", "empty_thinking"),
    ):
        with pytest.raises(ValueError, match=f"^{reason}$"):
            split_reply(text, reasoning)


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


def test_the_instruction_asks_for_what_is_checked():
    assert all(INSTRUCTION.count(tag) == 1 for tag in utils.TAGS)
    thinking, response = split_reply(
        INSTRUCTION[INSTRUCTION.index("<think>") : INSTRUCTION.index("</response>") + 11]
    )
    assert len(thinking) > MIN_THINKING and response and not refuses(INSTRUCTION)


# --- whole runs

CASES = {  # what the prompt gets at call n, why it is dropped ("": a good trace), and the calls it takes
    "good": (lambda n: tagged(), "", 1),
    "unreadable twice": (lambda n: tagged() if n == 2 else PLAN, "", 3),
    "500, then good": (lambda n: Fault("500") if n == 0 else tagged(), "", 2),
    "dropped connection twice": (lambda n: Fault("reset") if n < 2 else tagged(), "", 3),
    "429, unreadable, half a body": (
        lambda n: [Fault("429"), "<think>", Fault("short body"), tagged()][n],
        "",
        4,
    ),
    "Ответь, пожалуйста": (lambda n: tagged(response=RUSSIAN), "", 1),
    "a good one with \u2028 and an emoji": (lambda n: tagged(response=ENGLISH + "\u2028\U0001f600"), "", 1),
    "no tags": (lambda n: "Just the answer.", "no_open", 4),
    "thinking unclosed": (lambda n: f"<think>{PLAN}<response>{ENGLISH}</response>", "no_close", 4),
    "two answers": (lambda n: tagged() + tagged(), "tag_inside_text", 4),
    "a postscript": (lambda n: tagged() + "P.S.", "text_after_response", 4),
    "no thought": (lambda n: tagged(""), "empty_thinking", 4),
    "no answer": (lambda n: tagged(response=""), "empty_response", 4),
    "cut off": (lambda n: body("<think>" + PLAN, "length"), "truncated", 4),
    "cut off at once, in a repeat": (
        lambda n: body("<think>" + PLAN, "length") if n else "no tags",
        "truncated",
        4,
    ),
    "cut off behind the end": (lambda n: body(tagged(), "length"), "truncated", 4),
    "refused without tags": (lambda n: "I'm sorry, but I can't help with that.", "refusal", 1),
    "refused in tags": (lambda n: tagged(response="I cannot assist with this."), "refusal", 1),
    "refused in a field": (lambda n: body(None, refusal="no"), "refusal", 4),
    "filtered": (lambda n: body("", "content_filter"), "refusal", 4),
    "other tags": (lambda n: tagged(response=f"<thinking>hm</thinking> {ENGLISH}"), "tag_inside_text", 1),
    "hardly a thought": (lambda n: tagged("An easy one."), "short_thinking", 1),
    "half a surrogate pair": (lambda n: tagged(response=ENGLISH + "\ud83d"), "broken_unicode", 1),
    "too long a context": (lambda n: (400, {"error": {"message": "context"}}), "rejected", 1),
    "always 503": (lambda n: Fault("503"), "no_reply", 3),
}


def test_every_kind_of_reply(world):
    server, run = world([*CASES, "good"], lambda text, n: CASES[text][0](n))
    got, report = run(n=9)  # more than the file gives
    names, reasons = list(CASES), {}
    for i, name in enumerate(names):
        if CASES[name][1]:
            reasons.setdefault(CASES[name][1], []).append(f"p{i}")
    reasons["duplicate_prompt"] = [f"p{len(names)}"]
    assert report["examples"] == {reason: ids[:5] for reason, ids in reasons.items()}
    assert report["dropped"] == {reason: len(ids) for reason, ids in reasons.items()}
    assert [int(t["id"][1:]) for t in got] == [i for i, name in enumerate(names) if not CASES[name][1]]
    assert dict(server.calls) == {name: case[2] for name, case in CASES.items()}
    assert {(t["thinking"], t["response"]) for t in got} == {
        (PLAN, ENGLISH),
        (PLAN, RUSSIAN),
        (PLAN, ENGLISH + "\u2028\U0001f600"),
    }
    assert (
        report["calls_of_this_start"] == sum(server.calls.values())
        and report["n_asked"] == len(CASES)
        and report["args"]["n"] == 9
    )
    # a second start asks again only for what has no stored reply, and writes the same
    before = dict(server.calls)
    assert run(n=9, resume=True)[0] == got
    assert {t: c - before[t] for t, c in server.calls.items() if c > before[t]} == {
        "always 503": 3,
        "too long a context": 1,
    }


def test_what_the_teacher_is_asked(world):
    server, run = world([chat("a", "b", "c", system="Rhyme."), "q"], lambda text, n: tagged())
    run(n=2, temperature=0.5, max_tokens=77, concurrency=1)
    first, second = (request for request, _ in server.requests)
    assert first["messages"][0] == {
        "role": "system",
        "content": f"{INSTRUCTION}\n\nWhat the response must keep to:\n\nRhyme.",
    }
    assert first["messages"][1:] == chat("a", "b", "c") and second["messages"] == chat(
        "q", system=INSTRUCTION
    )
    assert {k: v for k, v in second.items() if k != "messages"} == {
        "model": "T",
        "temperature": 0.5,
        "max_tokens": 77,
    }


def test_the_instruction_can_be_given_as_a_file(world, exits, tmp_path, monkeypatch):
    """Verbatim: before the prompt, or around its last turn, as the paper's authors have it."""
    server, run = world([chat("a", "b", "c {x}", system="Rhyme.")], lambda text, n: tagged())
    file = tmp_path / "teacher.txt"
    form = "<think>...</think> <response>...</response>"
    file.write_text(f"Form {{y}}: {form}\n")
    report = run(n=1, instruction=file)[1]
    asked = server.requests[-1][0]["messages"]
    assert asked[0]["content"] == f"Form {{y}}: {form}\n\n\nWhat the response must keep to:\n\nRhyme."
    assert asked[1:] == chat("a", "b", "c {x}") and report["instruction"] == file.read_text()

    around = tmp_path / "around.txt"
    around.write_text(f"{{prompt}}\n\nFORMAT: {form}")
    run(n=1, instruction=around, resume=True)
    asked = server.requests[-1][0]["messages"]
    assert asked == chat("a", "b", f"c {{x}}\n\nFORMAT: {form}", system="Rhyme.")

    make_traces.read_instruction.cache_clear()  # a format of one's own is not what a reply is read by
    planned = utils.ThinkFormat(layout="<plan>{z}</plan>{y}", thinking_tags=("<plan>", "</plan>"))
    monkeypatch.setitem(utils.THINK_FORMATS, "planned", planned)
    monkeypatch.setattr(utils, "TAGS", (*utils.TAGS, *planned.tags))
    assert make_traces.read_instruction(around) == around.read_text()

    file.write_text("Think, then answer.")
    other = {"n": 1, "resume": True}
    make_traces.read_instruction.cache_clear()
    assert "does not ask for </response>, </think>, <response>" in exits(run, instruction=file, **other)
    assert "nowhere" in exits(run, instruction=tmp_path / "nowhere", **other)
    assert "leave --instruction out" in exits(run, instruction=around, reasoning_field=True, **other)


def test_stops_at_the_shortest_part_of_the_file(world):
    """Every third prompt gives nothing: 40 good traces are in the first 60 prompts, and nobody asks the
    61st."""
    server, run = world(
        [f"q{i}" for i in range(100)], lambda text, n: tagged("hm" if int(text[1:]) % 3 == 0 else PLAN)
    )
    got, report = run(n=40, concurrency=2)
    assert len(got) == 40 and (report["n_asked"], report["not_asked"], report["dropped"]) == (
        60,
        40,
        {"short_thinking": 20},
    )
    assert set(server.calls) == {f"q{i}" for i in range(60)} and set(server.calls.values()) == {1}
    got, report = run(n=60, resume=True)  # more of the same: only what is new is asked
    assert len(got) == 60 and report["n_asked"] == 90 and set(server.calls.values()) == {1}


def test_too_few_prompts_are_said_aloud(world, capsys):
    _, run = world([f"q{i}" for i in range(20)], lambda text, n: tagged("hm" if text == "q3" else PLAN))
    got, _ = run(n=20)
    assert (
        len(got) == 19
        and "WARNING: the prompts are used up, 1 traces short of --n 20" in capsys.readouterr().err
    )


def test_reasoning_in_a_field_of_its_own(world):
    fields = {
        "a": {"reasoning_content": PLAN},
        "b": {"reasoning": f" {PLAN}\n", "reasoning_content": None},
        "c": {},
        "d": {"reasoning": ""},
        "e": {"reasoning_content": PLAN + "</think>"},
        "f": {"reasoning_content": "hm"},
        "g": {"reasoning_content": PLAN},
    }
    server, run = world(
        [*fields, "cut"],
        lambda text, n: (
            body(None, "length", reasoning_content=PLAN)
            if text == "cut"
            else body("<response>y</response>" if text == "g" else ENGLISH, **fields[text])
        ),
    )
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
    assert all(
        request["messages"] in [chat(t) for t in (*fields, "cut")] for request, _ in server.requests
    )  # no instruction


def test_a_teacher_that_cannot_do_it_is_given_up_early(world, exits):
    server, run = world([f"q{i}" for i in range(200)], lambda text, n: "I just answer.")
    message = exits(run, n=150)
    assert (
        "none of the first 32 prompts" in message
        and "{'no_open': 32}" in message
        and "unreadable: no_open" in message
    )
    assert len(server.calls) == 32


def test_an_endpoint_that_is_down_is_no_reason_to_drop(world, exits):
    up = [False]
    server, run = world(
        [f"q{i}" for i in range(40)],
        lambda text, n: tagged() if up[0] or int(text[1:]) < 37 else Fault("500"),
    )
    message = exits(run, n=40)
    assert "3 prompts got no reply" in message and "HTTP 500" in message and "--resume" in message
    before, up[0] = dict(server.calls), True
    assert len(run(n=40, resume=True)[0]) == 40
    assert {t for t, calls in server.calls.items() if calls > before[t]} == {"q37", "q38", "q39"}


def test_budget_dry_run_and_resume(world, exits, capsys, tmp_path):
    server, run = world([f"q{i}" for i in range(12)], lambda text, n: tagged())
    run(n=10, dry_run=True, max_tokens=1000, price=(0, 1000))
    said = capsys.readouterr().out.splitlines()
    assert "--teacher T answers" in said[1] and len(server.requests) == 1
    estimate = json.loads("{" + said[0].partition("{")[2])
    assert (estimate["calls"], estimate["output_tokens_at_most"], estimate["dollars_at_most"]) == (
        10,
        10_000,
        10,
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl"]
    server.calls.clear()
    endpoint.EARLY_LINES.clear()  # as in another process
    paid = {
        "n": 10,
        "max_tokens": 1000,
        "price": (0, 1000),
        "concurrency": 1,
    }  # 1 dollar at worst, 0.005 in fact
    assert "budget of $1.02;" in exits(run, **paid, budget=1.02) and sum(server.calls.values()) == 5
    for dry_run in (False, True):
        assert "traces.jsonl.replies.jsonl exists; --resume" in exits(run, **paid, dry_run=dry_run)
    got, report = run(**paid, resume=True)
    assert len(got) == 10 and (report["calls_of_this_start"], report["replies"], report["cost"]) == (
        5,
        10,
        pytest.approx(0.05),
    )
    assert "--resume" in exits(run, **paid) and sum(server.calls.values()) == 10


def test_a_teacher_that_does_not_answer_ends_the_run_and_leaves_no_file(world, exits, tmp_path):
    server, run = world(["q"], lambda text, n: tagged())
    server.behave = lambda text, n: (401, {"error": {"message": "no"}})
    for mode in ({}, {"dry_run": True}):
        assert "--key-env" in exits(run, n=1, **mode)
        assert "no reply in 3 calls" in exits(run, n=1, teacher_url="http://127.0.0.1:1/v1", **mode)
    assert "set OPENAI_API_KEY" in exits(run, n=1, teacher_url="")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl"]


def test_bad_input(world, exits, tmp_path):
    server, run = world(["q", "r"], lambda text, n: tagged())
    prompts = tmp_path / "prompts.jsonl"
    before = prompts.read_bytes()
    assert "2 different prompts cannot give --n 6003" in exits(functools.partial(run, n=6003))
    assert "prompts.jsonl exists" in exits(run, n=1, out=prompts)
    assert "needs a price" in exits(run, n=1, budget=3.0) and "http" in exits(
        run, n=1, teacher_url="localhost"
    )
    assert "no such file" in exits(run, n=1, prompts=tmp_path / "gone.jsonl")
    for line, part in (
        (
            '{"id": "p0", "messages": [{"role": "user", "content": "x"}]}',
            ": two prompts have the same id 'p0'",
        ),
        ('{"id": "x", "text": "q"}', ":3: 'prompt' must be"),
        ('{"id":', ":3: not JSON"),
    ):
        prompts.write_bytes(before + line.encode() + b"\n")
        assert f"{prompts}{part}" in exits(run, n=1)
    assert not server.calls and sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl"]


def test_kill_at_a_third_and_resume(tmp_path, monkeypatch, capsys):
    """After kill -9 and a torn line, --resume makes no answered call twice and writes the rows of an unbroken
    run."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def behave(text: str, n: int):
        time.sleep(0.01)
        number = int(text.split()[-1])
        if number % 40 == 7 and n == 0:
            return Fault("500")
        if number % 10 == 3 and n == 0:
            return PLAN  # without tags: unreadable
        return tagged(response=f"{text}: yes")

    server = ChatServer(behave)
    out = tmp_path / "traces.jsonl"
    store = Path(f"{out}.replies.jsonl")
    names = [f"prompt {i}" for i in range(150)]
    lines = [json.dumps({"id": name, "messages": chat(name)}) + "\n" for name in names]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(lines))
    flags = f"--prompts {prompts} --out {out} --teacher T --teacher-url {server.url} --n 150 --concurrency 4 --resume"
    first = started(["data/make_traces.py", *flags.split()], tmp_path / "output")
    while len(server.answered) < 50:
        assert first.is_alive()
        time.sleep(0.005)
    first.kill()
    first.join()
    while server.now:
        time.sleep(0.01)
    stored = [
        json.loads(line) for line in store.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")
    ]
    assert not out.exists() and 40 < len(stored) < 100 and len(server.answered) <= len(stored) + 4
    with open(store, "ab") as f:
        f.write(b'{"key": "torn' if store.read_bytes().endswith(b"\n") else b"")

    answered = len(server.answered)
    calls = dict(server.calls)
    args = tyro.cli(Args, args=flags.split())
    make_traces.main(args)
    server.shutdown()
    server.server_close()
    got = rlmt_data.read_log(out)
    report = json.loads(Path(f"{out}.report.json").read_text())
    assert [trace["id"] for trace in got] == names
    assert [trace["response"] for trace in got] == [f"{name}: yes" for name in names]
    assert len(server.answered) - answered == report["replies"] - len(stored) > 50
    done = set()  # prompts that had a readable reply before the kill
    for line in stored:
        if line["reply"]["choices"][0]["message"]["content"] != PLAN:
            done.add(line["request"]["messages"][-1]["content"])
    assert len(done) > 30 and all(server.calls[name] == calls[name] for name in done)
    assert "150 prompts asked, 150 traces" in capsys.readouterr().out


def test_prepare_and_the_warm_start_read_the_rows(world, tmp_path):
    import train_sft_warmstart as sft

    prompts = [
        chat(f"Question {i}?", "Well?", f"Part {i}", system="Be kind.") if i % 2 else f"Question {i}?"
        for i in range(8)
    ]
    _, run = world(prompts, lambda text, n: tagged(response=f"{ENGLISH} {text}\u2028"))
    got, _ = run(n=8)
    prepare.main(
        prepare.Args(kind="traces", input=str(tmp_path / "traces.jsonl"), out=tmp_path / "again.jsonl")
    )
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "traces.jsonl").read_bytes() and len(
        got
    ) == 8
    tokenizer = rlmt_chat.load_tokenizer(str(ROOT / "data" / "toy" / "base"))
    templates.prepare_tokenizer(tokenizer, "think")
    read = read_rows(tmp_path / "traces.jsonl", "messages", "thinking", "response")
    kept, dropped = sft.build_rows(read, tokenizer, "think", 20_000)
    assert read == got and len(kept) == 8 and not dropped
