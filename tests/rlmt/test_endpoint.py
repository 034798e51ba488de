"""Tests rlmt/endpoint.py against a real HTTP server on loopback that fails on purpose.

Run as a script, this file is the client that test_kill_at_a_third_and_repeat kills.
"""

import fcntl
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmt import endpoint as api_keys
from rlmt import endpoint
from rlmt.endpoint import Endpoint, try_endpoint
from chat_server import FAULTS, TIMEOUT, Fault, ask_for


@pytest.fixture
def client(tmp_path):
    """client(server, ...) makes an Endpoint with a store in tmp_path and short waits."""
    return lambda server, **kwargs: Endpoint(
        **{
            "model": "m",
            "store": tmp_path / "store.jsonl",
            "base_url": server.url,
            "timeout": TIMEOUT,
            "backoff": 0.005,
            **kwargs,
        }
    )


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def asked(row: dict) -> str:
    return row["request"]["messages"][0]["content"]


def verdict(text: str) -> int:
    """Accepts {"score": 1..10} and nothing else."""

    def without_repeats(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("repeated key")
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=without_repeats)
    if (
        not isinstance(value, dict)
        or set(value) != {"score"}
        or type(value["score"]) is not int
        or not 1 <= value["score"] <= 10
    ):
        raise ValueError(f"no verdict: {text[:40]!r}")
    return value["score"]


# --- 30 % of the calls fail


def misbehave(text: str, n: int):
    """Spoils 30 % of the calls, the same ones every time. Every 50th task never succeeds."""
    task, dice = int(text.split()[-1]), random.Random(f"{text} {n}")
    if task % 50 == 0:
        return ["I would rather not say.", Fault("500"), (400, {"error": {"message": "context too long"}})][
            task // 50 % 3
        ]
    if dice.random() < 0.3:
        unreadable = [
            "Score: 7 of 10",
            "",
            '{"score": "7"}',
            '{"score": 7',
            '{"score": null}',
            '[{"score": 7}]',
        ]
        return Fault(dice.choice(FAULTS)) if dice.random() < 0.6 else dice.choice(unreadable)
    return json.dumps({"score": int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10 + 1})


def expected(text: str, retries: int, parse_retries: int) -> tuple[int | None, int, int]:
    """Works out by hand the value of a task, the calls that it takes, and the answers among them."""
    calls = 0
    for attempt in range(parse_retries + 1):
        for _ in range(retries + 1):
            content, calls = misbehave(text, calls), calls + 1
            if isinstance(content, tuple):
                return None, calls, attempt
            if not isinstance(content, Fault):
                break
        else:
            return None, calls, attempt
        try:
            return verdict(content), calls, attempt + 1
        except ValueError:
            continue
    return None, calls, parse_retries + 1


TASKS = [f"task {i}" for i in range(1024)]


def test_1024_tasks_are_answered_or_invalid(serve, client, tmp_path):
    server = serve(misbehave)
    judge = client(server, retries=4)
    replies = judge.ask(ask_for(*TASKS), verdict)
    truth = {t: expected(t, retries=4, parse_retries=3) for t in TASKS}
    assert [r.value for r in replies] == [truth[t][0] for t in TASKS]
    assert [bool(r.error) for r in replies] == [truth[t][0] is None for t in TASKS]
    assert 20 <= sum(bool(r.error) for r in replies) <= 60
    assert {
        e: sum(e in r.error for r in replies) > 3
        for e in ("unreadable in 4", "no reply in 5 calls", "context too long")
    } == {"unreadable in 4": True, "no reply in 5 calls": True, "context too long": True}
    # no call after a readable answer; every answer is stored once
    assert dict(server.calls) == {t: truth[t][1] for t in TASKS} and judge.calls == sum(server.calls.values())
    stored = rows(tmp_path / "store.jsonl")
    assert len(stored) == len({r["key"] for r in stored}) == sum(truth[t][2] for t in TASKS)
    sent = Counter((asked(r), r["reply"]["choices"][0]["message"]["content"]) for r in stored)
    assert sent == Counter(server.answered)
    kinds = Counter(
        misbehave(t, n) for t in TASKS for n in range(server.calls[t]) if isinstance(misbehave(t, n), Fault)
    )
    assert set(kinds) == set(FAULTS) and server.most <= 32


def misbehave_quickly(text: str, n: int):
    """`misbehave` with dropped connections in place of slow calls."""
    content = misbehave(text, n)
    return Fault("reset") if content == "slow" else content


def values_of_tasks(store: str, url: str) -> list[int | None]:
    """Asks for all tasks; what the test below kills and repeats."""
    judge = Endpoint("m", store, url, timeout=TIMEOUT, backoff=0.005, retries=4)
    return [reply.value for reply in judge.ask(ask_for(*TASKS), verdict)]


def test_kill_at_a_third_and_repeat(serve, tmp_path, capsys):
    """After kill -9 and a torn line, a second client makes the missing calls. A third one makes none."""
    server, store = serve(misbehave_quickly), tmp_path / "store.jsonl"
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    command = [sys.executable, __file__, str(store), server.url]
    first = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while len(server.answered) < 341:
        assert first.poll() is None
        time.sleep(0.005)
    first.kill()
    first.wait()
    while server.now:  # calls under way at the kill
        time.sleep(0.01)
    before, calls, answered = rows(store), Counter(server.calls), len(server.answered)
    whole = store.read_bytes()[: store.read_bytes().rfind(b"\n") + 1]
    assert len(before) <= answered <= len(before) + 32 and answered < 600
    if store.read_bytes() == whole:  # the kill tore no line, so tear one here
        store.write_bytes(whole + whole[:100])

    with pytest.MonkeyPatch.context() as patch:
        # the server may still answer calls of the first, after its death
        patch.setenv("OPENAI_BASE_URL", server.url)
        patch.setenv("OPENAI_API_KEY", "second")
        second = values_of_tasks(str(store), server.url)
    assert "torn" in capsys.readouterr().err
    after = rows(store)
    assert store.read_bytes().startswith(whole)
    assert len(after) == len({row["key"] for row in after})
    assert server.answers_to["Bearer second"] == len(after) - len(before)
    readable, attempts = {}, Counter()
    for row in after:
        text, content = asked(row), row["reply"]["choices"][0]["message"]["content"]
        assert row["attempt"] == attempts[text]  # in order
        assert text not in readable  # none after a readable answer
        attempts[text] += 1
        with suppress(ValueError):
            readable[text] = verdict(content)
    assert second == [readable.get(t) for t in TASKS] and len(readable) > 990
    attempts_before = Counter(map(asked, before))
    finished = [t for t in attempts_before if attempts_before[t] == attempts[t] and t in readable]
    assert len(finished) > 200
    assert all(server.calls[t] == calls[t] for t in finished)

    calls = Counter(server.calls)
    assert values_of_tasks(str(store), server.url) == second and rows(store) == after
    assert all(server.calls[t] == calls[t] for t in readable)


# --- malformed replies


MALFORMED = [  # six texts that no reader takes, and four contents that are no text
    "Score: 7 of 10",
    "",
    "\ud83d",
    "[" * 100_000,  # RecursionError
    f'{{"score": {"9" * 5000}}}',  # more digits than int reads
    None,
    7,
    True,
    [{"type": "text", "text": '{"score": 7}'}],
    {"score": 7},
]


def test_no_malformed_reply_becomes_a_value(serve, client):
    server = serve(lambda text, n: MALFORMED[int(text)])
    judge = client(server, retries=1)
    places = map(str, range(len(MALFORMED)))
    replies = judge.ask(ask_for(*places, temperature=0), verdict, parse_retries=1)
    assert all(r.value is None and r.error for r in replies)
    assert set(server.calls.values()) == {2}  # an unreadable text is a reply, any other content a broken body
    for content, reply in zip(MALFORMED, replies, strict=True):
        assert reply.text == (content if isinstance(content, str) else "")
        assert (
            "unreadable in 2 attempts" if isinstance(content, str | None) else "no reply in 2 calls"
        ) in reply.error


def test_an_unreadable_reply_is_not_asked_for_in_the_same_words(serve, client):
    """A server that samples by temperature and seed alone would give the same reply."""
    server = serve(lambda text, n: '{"score": 8}' if n == 2 else "prose")
    [request] = ask_for("x", temperature=0, seed=7)
    assert client(server).ask([request], verdict)[0].value == 8
    sent = [(body["temperature"], body["seed"]) for body, _ in server.requests]
    assert sent == [(0, 7), (0.3, 8), (0.3, 9)]
    assert client(server).ask([request], verdict)[0].value == 8 and server.calls["x"] == 3  # from the store


def test_parse_retries_go_on_where_they_ended(serve, client):
    server = serve(lambda text, n: '{"score": 8}' if n == 3 else "prose")
    reply = client(server).ask(ask_for("x"), verdict, parse_retries=1)[0]
    assert (reply.value, reply.text, server.calls["x"]) == (
        None,
        "prose",
        2,
    ) and "unreadable in 2 attempts" in reply.error
    reply = client(server).ask(ask_for("x"), verdict, parse_retries=5)[0]  # a new start
    assert (reply.value, reply.text, reply.error, server.calls["x"]) == (8, '{"score": 8}', "", 4)
    assert (
        client(server).ask(ask_for("x"))[0].value == "prose" and server.calls["x"] == 4
    )  # another reader, no call


def test_a_reply_is_in_the_file_before_it_is_read(serve, client, tmp_path):
    server, seen = serve(lambda text, n: f"reply to {text}"), []
    parse = lambda text: seen.append(text in (tmp_path / "store.jsonl").read_text())
    client(server, concurrency=4).ask(ask_for(*map(str, range(20))), parse)
    assert seen == [True] * 20


def test_a_bug_in_parse_is_not_a_malformed_reply(serve, client):
    server = serve(lambda text, n: "{}")
    with pytest.raises(KeyError):
        client(server).ask(ask_for("x"), lambda text: json.loads(text)["score"])
    assert client(server).ask(ask_for("x"), json.loads)[0].value == {} and server.calls["x"] == 1


def test_what_a_reply_holds(serve, client):
    """Cut-off, refused and empty replies come as they are, with finish_reason and logprobs; usage may be missing."""
    cut = {
        "index": 0,
        "finish_reason": "length",
        "message": {"role": "assistant", "content": "half a"},
        "logprobs": {
            "content": [{"token": "m", "logprob": -0.1, "top_logprobs": [{"token": "M", "logprob": -2.5}]}]
        },
    }
    refusal = {
        "index": 0,
        "finish_reason": "content_filter",
        "message": {"role": "assistant", "content": None, "refusal": "no"},
    }
    bodies = {
        "cut": {"choices": [cut], "usage": {"prompt_tokens": 7, "completion_tokens": 5}},
        "refused": {"choices": [refusal], "usage": {"prompt_tokens": "7"}},
        "bare": {"choices": [{"message": {}}]},
    }
    server = serve(lambda text, n: (200, bodies[text]))
    for judge in (client(server, concurrency=1), client(server)):  # the second reads the store
        replies = judge.ask(ask_for(*bodies, logprobs=True, top_logprobs=5))
        assert replies == [
            ("half a", "half a", "", (7, 5), cut),
            ("", "", "", (0, 0), refusal),
            ("", "", "", (0, 0), {"message": {}}),
        ]
    assert sum(server.calls.values()) == 3
    assert server.requests[0][0] == {**ask_for("cut")[0], "model": "m", "logprobs": True, "top_logprobs": 5}
    assert server.requests[0][1] is None


# --- what is asked


def test_equal_requests_are_asked_once_unless_their_seeds_differ(serve, client):
    server = serve(lambda text, n: f"{text}{n}")
    requests = ask_for("a", "b", "a") + ask_for("a", seed=1) + ask_for("a", seed=2) + ask_for("a", seed=1)
    replies = client(server, concurrency=1).ask(requests)
    assert [r.value for r in replies] == ["a0", "b0", "a0", "a1", "a2", "a1"] and sum(
        server.calls.values()
    ) == 4
    key = lambda **kwargs: client(server, **kwargs)._key(
        requests[0]
    )  # another model or endpoint is another question
    assert (
        len(
            {
                key(),
                key(model="other"),
                key(base_url="http://localhost:1/v1"),
                client(server)._key(requests[0], 1),
            }
        )
        == 4
    )
    assert key(base_url=server.url + "/") == key()


def test_concurrency(serve, client):
    server = serve(lambda text, n: time.sleep(0.1) or text)
    texts = [str(i) for i in range(24)]
    assert [r.value for r in client(server, concurrency=6).ask(ask_for(*texts))] == texts
    assert 2 <= server.most <= 6
    assert client(server).ask([]) == []


def test_refused_arguments(serve, client, exits):
    server = serve(lambda text, n: text)
    for wrong in ({"n": 2}, {"stream": True}):
        with pytest.raises(ValueError, match="request 2: stream and n > 1"):
            client(server).ask(ask_for("a") + ask_for("b", **wrong))
    assert "request 1 has none" in exits(client(server, budget=1, price=(1, 1)).ask, [{"messages": []}])
    assert "needs a price" in exits(client, server, budget=1)
    assert "concurrency 0" in exits(client, server, concurrency=0)
    assert "http:// or https://" in exits(client, server, base_url="localhost:8000/v1")
    assert not server.calls


def test_a_request_that_cannot_be_sent_is_invalid(serve, client):
    replies = client(serve(lambda text, n: text)).ask(ask_for("a", "half \ud83d", "b"))
    assert [r.value for r in replies] == ["a", None, "b"] and "cannot be sent" in replies[1].error


# --- failures


def test_failed_calls_are_bounded_and_not_stored(serve, client, tmp_path):
    down = [True]
    server = serve(lambda text, n: Fault("503") if down else text)
    reply = client(server, retries=2).ask(ask_for("x"))[0]
    assert (
        reply[:2] == (None, "")
        and reply.error == 'no reply in 3 calls; the last: HTTP 503: {"detail": "overloaded"}'
    )
    assert server.calls["x"] == 3 and rows(tmp_path / "store.jsonl") == []
    down.clear()
    assert client(server).ask(ask_for("x"))[0].value == "x"


def test_a_proxy_of_the_environment_is_used_but_not_for_exceptions(serve, client, monkeypatch):
    server, proxy = serve(lambda text, n: "direct"), serve(lambda text, n: "by proxy")
    monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert client(server, base_url="http://judge.invalid/v1").ask(ask_for("x"))[0].value == "by proxy"
    assert client(server).ask(ask_for("x"))[0].value == "direct"


def test_retry_after_is_honoured(serve, client):
    busy = (429, {"error": {"message": "wait"}}, [("Retry-After", "0.5")])
    server = serve(lambda text, n: busy if n == 0 else text)
    assert client(server).ask(ask_for("x"))[0].value == "x"
    assert 0.49 < server.times[1] - server.times[0] < 4


def test_retry_after_header():
    values = {"2": 2, "0.5": 0.5, "-3": 0, "soon": 0, "nan": 0, "Wed, 21 Oct 2065 07:28:00 GMT": 0}
    for value, seconds in values.items():
        assert endpoint.retry_after({"retry-after": value}) == seconds
    assert endpoint.retry_after({}) == 0


@pytest.mark.parametrize(
    "status, code, headers, line",
    [
        (401, "invalid_api_key", [], "HTTP 401"),
        (402, None, [], "HTTP 402"),
        (403, None, [], "HTTP 403"),
        (404, "model_not_found", [], "HTTP 404"),
        (429, "insufficient_quota", [], "HTTP 429"),
        (429, None, [("Retry-After", "7200")], "asks to wait 7200 seconds"),
    ],
)
def test_what_every_call_would_meet_ends_the_run(serve, client, exits, status, code, headers, line):
    error = status, {"error": {"message": "that\nis it", "code": code}}, headers
    server = serve(lambda text, n: text if text in "ab" else error)
    told = exits(client(server, concurrency=4).ask, ask_for(*(f"wrong {i}" for i in range(100))))
    assert line in told and "0 of 100 requests are done" in told and len(server.calls) <= 4
    assert client(server).ask(ask_for("a"))[0].value == "a"
    if status == 403:  # once something was answered it is about the one request
        replies = client(server).ask(ask_for("wrong", "b"))
        assert replies[0].error.startswith("HTTP 403") and replies[1].value == "b"


def test_calls_under_way_at_the_end_are_stored(serve, client, exits, tmp_path):
    slow = lambda text, n: time.sleep(0.4) or text
    server = serve(
        lambda text, n: (401, {"error": {"message": "revoked"}}) if text == "last" else slow(text, n)
    )
    assert "revoked" in exits(client(server, concurrency=4).ask, ask_for("a", "b", "c", "last", "never"))
    assert len(rows(tmp_path / "store.jsonl")) == 3 and server.calls["never"] == 0


def test_the_key_is_in_no_store_and_no_error(serve, client, exits, tmp_path, monkeypatch, capsys):
    key = "sk-test-0123456789abcdef"
    answers = {
        "echo": f"your key is {key}",
        "bad": (400, {"error": {"message": key}}),
        "body": (200, b" " * 190 + f"{key} no JSON".encode()),
    }
    server = serve(lambda text, n: answers[text])
    monkeypatch.setenv("OPENAI_API_KEY", f" {key}\n")  # as an editor leaves it
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    judge = client(server, retries=0)
    first, second = judge.ask(ask_for(*answers)), client(server, retries=0).ask(ask_for(*answers))
    assert first == second and first[0].value == "your key is ***" and first[1].error and first[2].error
    assert server.requests[0][1] == f"Bearer {key}"
    unreadable = judge.ask(ask_for("echo"), json.loads, parse_retries=0)
    monkeypatch.setenv("OPENAI_API_KEY", f"{key}\nOTHER=1")
    told = exits(client, server)
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")  # a placeholder is not searched for
    assert client(serve(lambda text, n: text)).ask(ask_for("EMPTY"))[0].value == "EMPTY"
    for text in (
        repr(first),
        repr(unreadable),
        repr(vars(judge)),
        told,
        str(capsys.readouterr()),
        (tmp_path / "store.jsonl").read_text(),
    ):
        assert key not in text


def test_the_openai_api_needs_a_key(tmp_path, monkeypatch, exits):
    for key in ("", "  ", "sk-test\u2026"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        assert "set OPENAI_API_KEY" in exits(Endpoint, "m", tmp_path / "s.jsonl")


# --- whose key goes where

KEY = "sk-test-0123456789abcdef"
OTHER_KEY = "other-0123456789abcdef"


def test_a_foreign_url_gets_no_key(serve, client, monkeypatch):
    """OPENAI_API_KEY goes to the endpoint of OPENAI_BASE_URL, and not to another port of the same machine."""
    own = serve(lambda text, n: text)
    foreign = serve(lambda text, n: text)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", own.url)
    for server, sent in ((own, f"Bearer {KEY}"), (foreign, None)):
        assert client(server).ask(ask_for("x"))[0].value == "x"
        try_endpoint(client(server), "--judge", dry_run=True)
        assert [authorization for _, authorization in server.requests + server.checks] == [sent, sent]
    assert api_keys.key_for("https://api.openai.com/v1") == KEY


def test_a_redirect_to_another_server_is_not_followed(serve, client, exits, monkeypatch):
    foreign = serve(lambda text, n: text)
    place = [("Location", f"{foreign.url}/chat/completions")]
    own = serve(lambda text, n: (307, b"", place))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", own.url)
    assert "it redirects to another URL; name that one" in exits(client(own).ask, ask_for("x"))
    assert own.requests[0][1] == f"Bearer {KEY}" and not foreign.requests


def test_a_named_key_is_sent_to_its_host_and_hidden_everywhere(
    serve, client, exits, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("JUDGE_KEY", OTHER_KEY)
    both = f"{KEY} and {OTHER_KEY}"
    server = serve(lambda text, n: (400, {"error": {"message": both}}) if text == "bad" else both)
    judge = client(server, key_env=(f"127.0.0.1:{server.server_port}=JUDGE_KEY",))
    replies = judge.ask(ask_for("echo", "bad"))
    assert replies[0].value == "*** and ***" and "*** and ***" in replies[1].error
    assert {authorization for _, authorization in server.requests} == {f"Bearer {OTHER_KEY}"}
    denied = serve(lambda text, n: (401, {"error": {"message": both}}))
    told = exits(client(denied, key_env=("127.0.0.1=JUDGE_KEY",)).ask, ask_for("x"))
    written = (tmp_path / "store.jsonl").read_text()
    for text in (repr(replies), repr(vars(judge)), told, str(capsys.readouterr()), written):
        assert KEY not in text and OTHER_KEY not in text


@pytest.mark.parametrize("status", [401, 403])
def test_a_denied_key_names_the_flag_and_the_host(serve, client, exits, monkeypatch, status):
    server = serve(lambda text, n: (status, {"error": {"message": "no"}}))
    host = f"127.0.0.1:{server.server_port}"
    monkeypatch.setenv("JUDGE_KEY", OTHER_KEY)
    told = exits(client(server).ask, ask_for("x"))
    assert f"it was sent no key; --key-env {host}=NAME names" in told
    told = exits(client(server, key_env=(f"{host}=JUDGE_KEY",)).ask, ask_for("x"))
    assert f"it was sent the key in JUDGE_KEY; --key-env {host}=NAME" in told
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    assert "it was sent the key in OPENAI_API_KEY" in exits(client(server).ask, ask_for("x"))
    assert sum(server.calls.values()) == 3


def test_a_variable_that_is_not_set_is_refused(tmp_path, exits, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    for words in (("host=JUDGE_KEY",), ("host=hf0123456789abcdefABCDEF",)):  # the second is a key by mistake
        told = exits(Endpoint, "m", tmp_path / "s.jsonl", "http://localhost:1/v1", key_env=words)
        assert "--key-env, word 1: the environment variable that it names is not set" in told
        assert "0123456789abcdef" not in told


# --- the check before a run


def test_a_check_is_one_call_of_one_token_at_every_start(serve, client, tmp_path, capsys):
    """Its reply may be anything, and is kept nowhere: nor in a cost, a stored reply or a limit of later calls."""
    store = tmp_path / "store.jsonl"
    server = serve(lambda text, n: text, usage=(10, 5), check=lambda text, n: None)
    for n_checks, dry_run in enumerate((True, False, False), 1):
        judge = client(server, price=(0, 1e6), budget=40)
        try_endpoint(judge, "--judge", dry_run)
        assert len(server.checks) == n_checks and not store.exists() and (judge.cost, judge.calls) == (0, 0)
    assert capsys.readouterr().out.count(f"--judge m answers at {server.url}") == 3
    assert {request["max_tokens"] for request, _ in server.checks} == {1}
    judge.ask(ask_for("x"))
    try_endpoint(judge, "--judge", dry_run=False)
    assert [row["attempt"] for row in rows(store)] == [0] and judge.cost == 5 and judge.scales == [1.0, 1.0]


def test_the_check_in_an_older_store_makes_no_call_look_dear(serve, client, tmp_path):
    """It used five tokens of at most one, and counts in the cost; the reply beside it is not asked for again."""
    store = tmp_path / "store.jsonl"
    server = serve(lambda text, n: text)
    client(server, price=(0, 1e6)).ask(ask_for("x"))
    [row] = rows(store)
    check = row | {"key": "other", "attempt": -1, "request": ask_for("y", max_tokens=1)[0]}
    store.write_text("".join(json.dumps(line) + "\n" for line in (check, row)))
    judge = client(server, price=(0, 1e6), budget=15)
    assert judge.ask(ask_for("x", "z"))[0].value == "x" and server.calls == {"x": 1, "z": 1}
    assert judge.cost == 15 and judge.scales == [1.0, 1.0]


@pytest.mark.parametrize(
    "check, told",
    [
        (lambda text, n: (404, {"error": {"message": "no such model"}}), "check the name of the model"),
        (lambda text, n: (401, {"error": {"message": "no key"}}), "--key-env 127.0.0.1"),
        (lambda text, n: (400, {"error": {"message": "not max_tokens"}}), "HTTP 400"),
        (lambda text, n: Fault("500"), "no reply in 1 calls"),
    ],
)
def test_a_check_that_fails_ends_the_run(serve, client, exits, tmp_path, check, told):
    server = serve(lambda text, n: text, check=check)
    message = exits(try_endpoint, client(server), "--judge", dry_run=True)
    assert message.startswith("error: --judge m: http://127.0.0.1") and told in message
    assert not (tmp_path / "store.jsonl").exists()
    assert len(server.checks) == 1  # a dry run costs one call at most


def test_a_check_before_a_run_is_repeated(serve, client):
    server = serve(lambda text, n: text, check=lambda text, n: Fault("500") if n < 2 else "y")
    try_endpoint(client(server), "--judge", dry_run=False)
    assert len(server.checks) == 3


def test_a_check_of_nobody_takes_seconds(client, exits):
    began = time.monotonic()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        server = SimpleNamespace(url=f"http://127.0.0.1:{free.getsockname()[1]}/v1")
        told = exits(try_endpoint, client(server, backoff=1), "--simulator", dry_run=True)
    assert "--simulator m: " in told and "check --simulator and its URL, and that the server runs" in told
    assert time.monotonic() - began < 10


def test_a_check_needs_room_in_the_budget(serve, client, exits):
    server = serve(lambda text, n: text)
    told = exits(try_endpoint, client(server, price=(0, 1e6), budget=0.5), "--judge", dry_run=True)
    assert "could pass the budget" in told and not server.checks


# --- budget and estimate


def test_estimate(serve, client, tmp_path):
    request = ask_for("abcé")[0]
    text = '{"messages": [{"role": "user", "content": "abc_"}], "max_tokens": 5}'
    assert (
        len(text) == 68
    )  # é is two bytes: 69 // 4 + 1 = 18 tokens in, 5 out, at 2 and 10 dollars per million
    server = serve(lambda text, n: text)
    judge = client(server, price=(2, 10))
    requests = [request, request, *ask_for("abcd", seed=7)]
    assert judge.estimate([request, request]) == {
        "calls": 1,
        "answered": 0,
        "input_tokens": 18,
        "output_tokens_at_most": 5,
        "dollars_at_most": pytest.approx(86e-6),
    }
    assert not (tmp_path / "store.jsonl").exists()
    judge.ask([request])
    assert judge.cost == pytest.approx(70e-6)  # 10 in, 5 out
    for j in (judge, client(server, price=(2, 10))):
        assert (e := j.estimate(requests))["calls"] == 1 and e["answered"] == 1 and e["dollars_at_most"] > 0
        assert j.estimate([request])["dollars_at_most"] == 0
    assert judge.estimate([{"messages": []}])["dollars_at_most"] is None
    assert client(server).estimate([request])["dollars_at_most"] is None  # no price given
    assert judge.estimate([{"max_completion_tokens": 9, "max_tokens": None}])["output_tokens_at_most"] == 9


def test_budget(serve, client, exits, tmp_path):
    """A token out costs a dollar; calls use 3 of at most 5. They start while 3k + 5 <= 20: six do, for $18."""
    server, requests = serve(lambda text, n: text, usage=(10, 3)), ask_for(*map(str, range(10)))
    paid = dict(price=(0, 1e6), concurrency=1)
    told = exits(client(server, budget=20, **paid).ask, requests)
    assert "budget of $20; spent $18.0000. 6 of 10 requests are done" in told and "; 4 remain" in told
    assert len(server.answered) == 6 == len(rows(tmp_path / "store.jsonl"))
    exits(client(server, budget=20, **paid).ask, requests)  # what is in the store counts
    assert len(server.answered) == 6
    judge = client(server, budget=32, **paid)
    assert [r.value for r in judge.ask(requests)] == [str(i) for i in range(10)]
    assert judge.cost == 30 and judge.calls == 4 and len(server.answered) == 10


@pytest.mark.parametrize("usage", [(10, 3), (10, 5), None])
def test_budget_with_many_calls_at_once(serve, client, exits, usage):
    """Eight calls of at most $5 at once fill a budget of $40. A reply without usage counts as $5."""
    server = serve(lambda text, n: time.sleep(0.1) or text, usage=usage)
    judge = client(server, budget=40, price=(0, 1e6))
    exits(judge.ask, ask_for(*map(str, range(64))))
    assert len(server.answered) == 8 and judge.cost == 8 * (usage[1] if usage else 5)


def test_budget_where_max_tokens_is_ignored(serve, client, exits):
    """A call costs $50 instead of at most $5. Then calls count as $50; 100 + 50 > 120, also after a restart."""
    server = serve(lambda text, n: text, usage=(10, 50))
    for _ in range(2):
        assert "spent $100" in exits(
            client(server, budget=120, price=(0, 1e6), concurrency=1).ask, ask_for(*map(str, range(9)))
        )
    assert len(server.answered) == 2


def test_a_budget_of_the_estimate_is_enough(serve, client):
    """The estimated budget suffices if every call uses its maximum, in spite of rounding."""
    requests, price = ask_for(*map(str, range(100, 300))), (2.5, 10)
    server = serve(lambda text, n: text, usage=endpoint.token_limits(requests[0]))
    budget = client(server, price=price).estimate(requests)["dollars_at_most"]
    judge = client(server, price=price, budget=budget)
    assert all(r.value for r in judge.ask(requests)) and judge.cost == pytest.approx(budget)


def test_calls_that_never_connected_cost_nothing(serve, client):
    """Otherwise a server that is down would spend the budget."""
    server = serve(lambda text, n: text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        judge = client(server, base_url=url, retries=3, budget=6, price=(0, 1e6))  # a call costs 5 at most
        reply = judge.ask(ask_for("x"))[0]
    assert "no reply in 4 calls; the last: ClientConnectorError" in reply.error
    assert (judge.calls, judge.cost) == (4, 0)


def test_broken_off_calls_count_at_their_worst(serve, client, exits):
    server = serve(lambda text, n: Fault("reset") if n < 2 else text, usage=(10, 3))
    judge = client(server, budget=13, price=(0, 1e6), concurrency=1)
    assert "spent $10" in exits(judge.ask, ask_for("a"))  # a third call could make it 15
    judge = client(server, budget=13, price=(0, 1e6), concurrency=1)
    assert judge.ask(ask_for("a"))[0].value == "a" and judge.cost == 3


# --- the store


def test_one_process_at_a_time(serve, client, exits, tmp_path):
    server = serve(lambda text, n: text)
    with open(tmp_path / "store.jsonl", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another process is using it" in exits(client(server).ask, ask_for("a"))
    first, second = (
        client(server),
        client(server),
    )  # two of one process take turns, and see each other's replies
    for judge in (first, second, first, second):
        assert judge.ask(ask_for("a", "b"))[1].value == "b" and judge.cost == first.cost
    assert (
        first.ask(ask_for("c"))[0].value == second.ask(ask_for("c"))[0].value == "c"
        and max(server.calls.values()) == 1
    )


# --- a tested model behind an endpoint


def model_args(server, **flags) -> SimpleNamespace:
    """Returns the flags of an evaluation script that asks a model behind an endpoint."""
    args = {
        "model": "m",
        "model_url": server.url,
        "think_format": "auto",
        "chat_template_args": (),
        "top_p": 1.0,
        "max_tokens": 9,
        "max_thinking_tokens": 0,
        "concurrency": 1,
        "key_env": (),
        "seed": 0,
    }
    return SimpleNamespace(**args | flags)


def answer(server, tmp_path, prompt="Hi", n_samples=1, **flags):
    """Returns the generation rows of one task from the function that the evaluation scripts use."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    # here, as it loads vLLM or transformers, which the client that is killed need not wait for
    from benchmarks import shared

    tmp_path.mkdir(exist_ok=True)
    tasks = []
    for text in prompts:
        for sample in range(n_samples):
            messages = [{"role": "user", "content": text}]
            tasks.append({"id": f"{text} {sample}", "sample": sample, "messages": messages})
    return shared.generate_answers(model_args(server, **flags), tasks, 0.0, tmp_path)


def test_a_zero_model_is_asked_to_stop_at_its_closing_tag_and_to_keep_it(serve, tmp_path):
    server = serve(lambda text, n: "<think> z </think> <response> y </response>")
    row = answer(server, tmp_path, think_format="zero_think")[0]
    assert (row["thinking"], row["response"], row["status"]) == ("z", "y", "ok")
    request = server.requests[0][0]  # vLLM reads both at the top of the body, nowhere else
    assert request["stop"] == ["</response>"] and request["include_stop_str_in_output"] is True


def test_thinking_that_nothing_announces_is_not_judged_as_a_part_of_the_answer(serve, tmp_path, exits):
    server = serve(lambda text, n: "<think> z </think> y")
    assert "--think-format think" in exits(answer, server, tmp_path / "a")
    assert answer(server, tmp_path / "b", think_format="plain")[0]["response"] == "<think> z </think> y"
    assert answer(server, tmp_path / "c", think_format="think")[0]["response"] == "y"
    assert "stop" not in server.requests[-1][0]


def test_thinking_that_a_template_behind_the_endpoint_opened(serve, tmp_path):
    """Nobody knows that template: what is cut off before a tag counts as thinking, what ends without one as an answer."""
    texts = {"done": " z </think> y", "plain": "y", "cut": " z"}

    def reply(text, n):
        finish = "length" if "cut" in text else "stop"
        content = next(words for name, words in texts.items() if name in text)
        return 200, {"choices": [{"message": {"content": content}, "finish_reason": finish}]}

    server = serve(reply)
    found = {}
    for name in texts:
        row = answer(
            server, tmp_path / name, think_format="tags", prompt=name, chat_template_args=("effort=high",)
        )[0]
        found[name] = (row["thinking"], row["response"], row["status"])
    assert found == {"done": ("z", "y", "ok"), "plain": ("", "y", "ok"), "cut": ("z", "", "truncated")}
    assert server.requests[-1][0]["chat_template_kwargs"] == {"effort": "high"}


def test_a_long_reply_gets_the_time_that_it_needs(serve, tmp_path):
    from benchmarks import shared

    args = model_args(serve(lambda text, n: "y"), max_tokens=8192)
    assert shared.model_endpoint(args, tmp_path).timeout == 8192 / 5
    args.max_tokens = 9
    assert shared.model_endpoint(args, tmp_path).timeout == 120


def test_a_task_that_the_endpoint_refuses_has_a_row_and_ends_nothing(serve, tmp_path, capsys):
    from benchmarks import shared

    too_long = (400, {"error": {"message": "context too long"}})
    server = serve(lambda text, n: too_long if "long" in text else "y")
    rows = answer(server, tmp_path, ["long", "short", "long too"])
    assert [(row["status"], row["response"], row["text"]) for row in rows] == [
        ("refused", "", ""),
        ("ok", "y", "y"),
        ("refused", "", ""),
    ]
    assert shared.answer(rows[0]) == ""
    assert shared.describe(rows)["status"] == {"ok": 1, "refused": 2}
    assert "task long 0 is refused: HTTP 400" in capsys.readouterr().err
    assert answer(server, tmp_path, ["long", "short", "long too"]) == rows


def test_an_endpoint_that_refuses_everything_ends_the_run(serve, tmp_path, exits):
    server = serve(lambda text, n: (400, {"error": {"message": "unknown parameter"}}))
    said = exits(answer, server, tmp_path, ["a", "b"])
    assert "refuses every request" in said and "unknown parameter" in said
    assert not (tmp_path / "generations.jsonl").exists()


def test_seeds_of_samples_behind_an_endpoint(serve, tmp_path):
    seeds = {}
    for seed in (0, 1):
        server = serve(lambda text, n: "y")
        answer(server, tmp_path / str(seed), ["a", "b"], n_samples=2, seed=seed)
        seeds[seed] = [request.get("seed") for request, _ in server.requests]
    assert seeds[0] == [None, 1, None, 3]  # a server that knows no seeds can be asked for one answer a task
    assert seeds[1] == [1_000_003, 1_000_004, 1_000_005, 1_000_006]


def test_tokens_of_a_response_are_unknown_behind_an_endpoint(serve, tmp_path):
    from benchmarks import shared

    rows = answer(serve(lambda text, n: "<think> z </think> y"), tmp_path, think_format="think")
    assert shared.describe(rows)["response_tokens"] is None
    rows[0] |= {"n_tokens": 9, "n_thinking_tokens": 5}
    assert shared.describe(rows)["response_tokens"] == 4


if __name__ == "__main__":  # the client that is killed
    values_of_tasks(sys.argv[1], sys.argv[2])
