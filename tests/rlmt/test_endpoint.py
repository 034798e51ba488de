"""Tests rlmt/endpoint.py against a real HTTP server on loopback that fails on purpose.

Run as a script, this file is the client that test_kill_at_a_third_and_repeat kills.
"""

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from chat_server import FAULTS, TIMEOUT, Fault, ask_for
from rlmt import endpoint
from rlmt.endpoint import Endpoint, try_endpoint

KEY = "sk-test-0123456789abcdef"
OTHER_KEY = "other-0123456789abcdef"
SERVER_ERROR = (400, {"error": {"message": "that\nis it"}})


@pytest.fixture
def client(tmp_path):
    """client(server, ...) makes an Endpoint with a store in tmp_path and short waits."""

    def make(server, **kwargs):
        settings = {"base_url": server.url, "timeout": TIMEOUT, "backoff": 0.005, **kwargs}
        return Endpoint("m", tmp_path / "store.jsonl", **settings)

    return make


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def completion(content, finish="stop", **message) -> tuple[int, dict]:
    message |= {"role": "assistant", "content": content}
    return 200, {"model": "m", "choices": [{"message": message, "finish_reason": finish}]}


def verdict(text: str) -> int:
    """Reads a whole number from 1 to 10."""
    if text not in map(str, range(1, 11)):
        raise ValueError(f"no verdict: {text[:40]!r}")
    return int(text)


# --- a third of the calls fails

TASKS = [f"task {i}" for i in range(512)]
LASTING = ["I would rather not say.", "", SERVER_ERROR]  # of every 50th task


def truth(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10 + 1


def misbehave(text: str, n: int):
    """Spoils 30 % of the calls, the same ones every time. Every 50th task never succeeds."""
    task = int(text.split()[-1])
    dice = random.Random(f"{text} {n}")
    if task % 50 == 0:
        return LASTING[task // 50 % 3]
    if dice.random() < 0.3:
        return dice.choice([*map(Fault, FAULTS), "Score: 7 of 10", "7.5"])
    return str(truth(text))


def values_of_tasks(store: Path, url: str) -> list[int | None]:
    """Asks for all tasks; what the test below kills and repeats."""
    judge = Endpoint("m", store, url, timeout=TIMEOUT, backoff=0.005)
    return [reply.value for reply in judge.ask(ask_for(*TASKS), verdict)]


def test_kill_at_a_third_and_repeat(serve, tmp_path, monkeypatch):
    """After kill -9 and a torn line, a second client makes the missing calls alone."""
    server = serve(misbehave)
    store = tmp_path / "store.jsonl"
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, Path(__file__).parents[1:3]))}
    first = subprocess.Popen([sys.executable, __file__, str(store), server.url], env=env)
    while len(server.answered) < len(TASKS) / 3:
        assert first.poll() is None
        time.sleep(0.005)
    first.kill()
    first.wait()
    while server.now:  # calls under way at the kill
        time.sleep(0.01)
    n_before = len(rows(store))
    whole = store.read_bytes()[: store.read_bytes().rfind(b"\n") + 1]
    if store.read_bytes() == whole:  # the kill tore no line, so tear one here
        store.write_bytes(whole + whole[:100])

    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "second")  # the server may still answer calls of the first
    values = values_of_tasks(store, server.url)
    assert store.read_bytes().startswith(whole)
    assert values == [None if i % 50 == 0 else truth(task) for i, task in enumerate(TASKS)]
    answers = [row for row in rows(store) if endpoint.is_answer(row["reply"])]
    assert len({row["key"] for row in answers}) == len(answers)  # none is paid twice
    assert n_before > len(TASKS) / 4 and server.answers_to["Bearer second"] <= len(rows(store)) - n_before

    calls = Counter(server.calls)
    assert values_of_tasks(store, server.url) == values
    refused = set(TASKS[100::150])  # HTTP 400 is free
    assert {task for task in TASKS if server.calls[task] > calls[task]} == refused
    assert server.most <= 32


# --- what a server may send


BEHAVIOURS = {  # what it sends, what the reply's text is or its error says, and how many calls that takes
    "text": (completion("7"), "7", 1),
    "unclosed thinking": (completion("<think> 9", "length"), "<think> 9", 1),
    "cut off in its reasoning": (completion(None, "length", reasoning_content="9"), "", 1),
    "no usage, no reason": ((200, {"choices": [{"message": {"content": "7"}}]}), "7", 1),
    "content filter": (completion("7", "content_filter"), "no text", 1),
    "content null": (completion(None, refusal="I will not"), "I will not", 1),
    "reasoning alone": (completion("", reasoning_content="9 of 10"), "9 of 10", 1),
    "finish_reason error": (completion("7", "error"), "no reply in 3 calls; the last: no completion", 3),
    "no choices": ((200, {"choices": []}), "no completion", 3),
    "content that is no text": (completion({"score": 7}), "no completion", 3),
    "error in 200": ((200, {"error": {"message": "upstream"}}), "upstream", 3),
    "cut JSON": (Fault("truncated JSON"), "no completion", 3),
    "HTML": ((200, b"<html>Sign in</html>"), "Sign in", 3),
    "short body": (Fault("short body"), "no reply in 3 calls", 3),
    "dropped connection": (Fault("reset"), "Connection reset by peer", 3),
    "too slow": (Fault("slow"), "TimeoutError", 3),
    "429": (Fault("429"), "slow down", 3),
    "500": (Fault("500"), "HTTP 500: <html>oops</html>", 3),
    "403 for one task": ((403, {"error": {"message": "moderated"}}), "HTTP 403", 1),
    "too long": (SERVER_ERROR, "HTTP 400", 1),
}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_what_a_server_may_send(serve, client, name):
    """While other requests are answered, one that is not has an error."""
    sent, found, n_calls = BEHAVIOURS[name]
    server = serve(lambda text, n: sent if text == name else text)
    judge = client(server, retries=2, timeout=0.4)
    first, *rest = judge.ask(ask_for(name, *"abcdefgh"))
    assert [reply.text for reply in rest] == list("abcdefgh") and server.calls[name] == n_calls
    if first.error:
        assert found in first.error and first.value is None
    else:
        assert (first.text, first.value) == (found, found)


def test_a_judge_is_asked_as_often_for_an_empty_or_cut_off_reply_as_for_an_unreadable_one(serve, client):
    for sent in ("", completion("7", "content_filter"), completion("7", "length"), "prose", "[" * 5000):
        server = serve(lambda text, n, sent=sent: sent)
        reply = client(server).ask(ask_for("a"), verdict, parse_retries=2)[0]
        assert reply.error and reply.value is None and server.calls["a"] == 3


def test_an_outage_ends_the_run_after_the_tries_of_one_request(serve, client, exits):
    down = []
    server = serve(lambda text, n: Fault("503") if down else text)
    judge = client(server, concurrency=4)
    assert judge.ask(ask_for("a"))[0].value == "a"
    down.append(True)
    told = exits(judge.ask, ask_for(*map(str, range(200))))
    assert "no reply in 9 calls" in told and "overloaded" in told
    assert sum(server.calls.values()) <= 1 + 4 * 9 and len(rows(judge.store)) == 1
    down.clear()
    assert judge.ask(ask_for("0"))[0].value == "0"


def test_a_parameter_that_is_refused_ends_the_run(serve, client, exits):
    refused = (400, {"error": {"message": "Unsupported value: seed"}})
    server = serve(lambda text, n: refused if "seed" in server.requests[-1][0] else text)
    requests = ask_for("a", "b", seed=1)
    assert "Unsupported value" in exits(try_endpoint, client(server), requests[0], "--judge")
    assert "Unsupported value" in exits(client(server).ask, requests)
    client(server).ask(ask_for("c"))
    # what is refused after others were answered is the fault of the one request
    assert "HTTP 400" in client(server).ask(requests)[0].error


@pytest.mark.parametrize("status", [401, 402, 404])
def test_what_every_call_would_meet_ends_the_run(serve, client, exits, status):
    """Calls under way at that moment are stored."""
    error = (status, {"error": {"message": "no"}})
    server = serve(lambda text, n: time.sleep(0.3) or text if text in "abc" else error)
    judge = client(server, concurrency=4)
    judge.ask(ask_for("a"))
    told = exits(judge.ask, ask_for("b", "c", "last", *map(str, range(99))))
    assert f"HTTP {status}" in told and "--key-env" in told
    assert len(rows(judge.store)) == 3 and sum(server.calls.values()) <= 5


def test_a_long_reply_has_more_time(serve, client):
    """2.5 seconds here; 20 tokens at the slowest, 5 per second, may take 4."""
    server = serve(lambda text, n: Fault("slow"))
    long, short = ask_for("x", max_tokens=20) + ask_for("y", max_tokens=2)
    client(server, timeout=0.4, retries=0).ask([long])
    assert "TimeoutError" in client(server, timeout=0.4, retries=0).ask([short])[0].error


def test_a_proxy_of_the_environment_is_used_but_not_for_exceptions(serve, client, monkeypatch):
    server, proxy = serve(lambda text, n: "direct"), serve(lambda text, n: "by proxy")
    monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert client(server, base_url="http://judge.invalid/v1").ask(ask_for("x"))[0].value == "by proxy"
    assert client(server).ask(ask_for("x"))[0].value == "direct"


# --- what is asked


def test_an_unreadable_reply_is_not_asked_for_in_the_same_words(serve, client):
    """A server that samples by temperature and seed alone would give the same reply."""
    server = serve(lambda text, n: "8" if n == 2 else "prose")
    [request] = ask_for("x", temperature=0, seed=7)
    reply = client(server).ask([request], verdict, parse_retries=1)[0]
    assert (reply.value, reply.text, server.calls["x"]) == (None, "prose", 2) and reply.error
    assert client(server).ask([request], verdict)[0].value == 8  # a new start goes on where the other ended
    sampled = [(body["temperature"], body["seed"]) for body, _ in server.requests]
    assert sampled == [(0, 7), (0.3, 8), (0.3, 9)]
    assert client(server).ask([request])[0].value == "prose"  # another reader
    assert server.calls["x"] == 3


def test_equal_requests_are_asked_once_unless_their_seeds_differ(serve, client):
    server = serve(lambda text, n: f"{text}{n}")
    requests = ask_for("a", "b", "a") + ask_for("a", seed=1) + ask_for("a", seed=2) + ask_for("a", seed=1)
    replies = client(server, concurrency=1).ask(requests)
    assert [reply.value for reply in replies] == ["a0", "b0", "a0", "a1", "a2", "a1"]
    elsewhere = client(server, base_url="http://localhost:1/v1")
    assert client(server)._key(requests[0]) != elsewhere._key(requests[0])  # another question


def test_estimate(serve, client):
    request = ask_for("abcé")[0]
    text = '{"messages": [{"role": "user", "content": "abc_"}], "max_tokens": 5}'
    assert len(text) == 68
    # é is two bytes: 69 // 4 + 1 = 18 tokens in, 5 out, at 2 and 10 dollars per million
    judge = client(serve(lambda text, n: text), price=(2, 10))
    most = {"input_tokens": 18, "output_tokens_at_most": 5, "dollars_at_most": pytest.approx(86e-6)}
    assert judge.estimate([request, request]) == {"calls": 1, **most} and not judge.store.exists()
    judge.ask([request])
    assert judge.cost == pytest.approx(70e-6)  # 10 in, 5 out
    assert judge.estimate([request])["dollars_at_most"] == 0


# --- the check before a run


def test_the_check_is_the_first_request_and_is_paid_once(serve, client, exits, tmp_path):
    request, other = ask_for("x", "y")
    store = tmp_path / "run" / "store.jsonl"
    server = serve(lambda text, n: text)
    paid = dict(base_url=server.url, price=(0, 1e6), budget=10)  # a call costs $5
    try_endpoint(Endpoint("m", store, **paid), request, "--judge")
    assert not store.parent.exists() and server.requests[0][0] == request | {"model": "m"}
    judge = Endpoint("m", store, **paid)
    assert judge.ask([request, other])[0].value == "x" and judge.cost == 10
    assert server.calls == {"x": 1, "y": 1}
    try_endpoint(Endpoint("m", store, **paid), request, "--judge")  # at a resume
    assert server.calls["x"] == 1
    told = exits(try_endpoint, Endpoint("m", store, **paid), ask_for("z")[0], "--judge")
    assert told.startswith("error: --judge m: ") and "could pass the budget" in told
    # --overwrite: neither the old reply nor the old cost counts, and the new reply is kept
    try_endpoint(Endpoint("m", store, **paid), request, "--judge", fresh=True)
    assert server.calls["x"] == 2
    store.unlink()
    assert Endpoint("m", store, **paid).ask([request])[0].value == "x" and server.calls["x"] == 2


def test_a_check_of_nobody_takes_seconds(client, exits):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        # a call costs 5 at most
        judge = client(SimpleNamespace(url=url), backoff=1, budget=6, price=(0, 1e6))
        began = time.monotonic()
        told = exits(try_endpoint, judge, ask_for("x")[0], "--simulator")
        assert "--simulator m: " in told and "Connect call failed" in told
        assert "spent $0.00" in told and time.monotonic() - began < 10  # what never connected costs nothing
    assert not judge.store.exists()


# --- budget


@pytest.mark.parametrize("usage", [(10, 3), None])
def test_budget_with_many_calls_at_once(serve, client, exits, usage):
    """Calls of at most $5 each reserve it before they are sent. A reply without usage counts as $5."""
    server = serve(lambda text, n: time.sleep(0.1) or text, usage=usage)
    judge = client(server, budget=40, price=(0, 1e6))
    requests = ask_for(*map(str, range(64)))
    told = exits(judge.ask, requests)
    assert judge.cost == len(server.answered) * (3 if usage else 5) <= 40 and len(server.answered) >= 8
    assert "budget of $40" in told and f"spent ${judge.cost:.4f}" in told
    again = client(server, budget=40, price=(0, 1e6))
    exits(again.ask, requests)  # what is in the store counts
    assert again.cost <= 40


def test_budget_where_max_tokens_is_ignored(serve, client, exits):
    """A call costs $50 instead of at most $5. Then calls count as $50; 100 + 50 > 120, also after a
    restart."""
    server = serve(lambda text, n: text, usage=(10, 50))
    for _ in range(2):
        judge = client(server, budget=120, price=(0, 1e6), concurrency=1)
        assert "spent $100" in exits(judge.ask, ask_for(*map(str, range(9))))
    assert len(server.answered) == 2


def test_tries_without_an_answer_count(serve, client, exits):
    """A broken-off call at its worst, $5; a page in place of a reply too; an empty reply by its usage, $3."""
    sent = [Fault("reset"), Fault("prose body"), "", "7"]
    server = serve(lambda text, n: sent[n], usage=(10, 3))
    paid = dict(budget=15, price=(0, 1e6))
    assert "spent $13" in exits(client(server, **paid).ask, ask_for("a"), verdict)
    judge = client(server, **paid)  # does not know of the broken-off call
    assert judge.ask(ask_for("a"), verdict)[0].value == 7 and judge.cost == 11


def test_two_clients_of_a_store_see_each_others_replies(serve, client):
    server = serve(lambda text, n: text)
    first, second = client(server), client(server)
    for judge in (first, second, first):
        assert judge.ask(ask_for("a", "b"))[1].value == "b" and judge.cost == first.cost
    assert max(server.calls.values()) == 1


# --- whose key goes where


def test_a_store_of_a_judge_whose_url_changes(serve, client):
    servers = [serve(lambda text, n: "7") for _ in range(2)]
    for server in servers:
        judge = client(server, known_as="local:judge")
        assert [reply.text for reply in judge.ask(ask_for("a", "b"))] == ["7", "7"]
    assert [len(server.requests) for server in servers] == [2, 0]


def test_keys_go_to_their_own_server_alone(serve, client, exits, monkeypatch):
    """Not to another port of the machine, nor where a server redirects; settings for OpenAI's server stay
    here too."""
    foreign = serve(lambda text, n: text)
    place = [("Location", f"{foreign.url}/chat/completions")]
    own = serve(lambda text, n: (307, b"", place) if text == "away" else text)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", own.url)
    monkeypatch.setenv("OPENAI_ORG_ID", "mine")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Key: mine")
    for server, sent in ((own, f"Bearer {KEY}"), (foreign, None)):
        assert client(server).ask(ask_for("x"))[0].value == "x"
        assert server.requests[0][1] == sent and "mine" not in str(server.headers)
    assert "HTTP 307" in client(own).ask(ask_for("away"))[0].error and len(foreign.requests) == 1


def test_a_named_key_is_sent_to_its_host_and_hidden_everywhere(serve, client, exits, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("JUDGE_KEY", OTHER_KEY)
    sent = {
        "echo": OTHER_KEY,
        "bad": (400, {"error": OTHER_KEY}),
        "denied": (401, {"error": OTHER_KEY}),
        "page": (200, OTHER_KEY.encode()),
    }
    server = serve(lambda text, n: sent[text])
    judge = client(server, key_env=("127.0.0.1=JUDGE_KEY",), retries=0)
    replies = judge.ask(ask_for("echo", "bad", "page"))
    assert replies[0].value == "***" and '{"error": "***"}' in replies[1].error
    assert {authorization for _, authorization in server.requests} == {f"Bearer {OTHER_KEY}"}
    told = exits(judge.ask, ask_for("denied"))
    for text in (repr(replies), repr(judge), told, str(capsys.readouterr()), judge.store.read_text()):
        assert OTHER_KEY not in text


@pytest.mark.parametrize(
    "url, key_env, variable",
    [
        ("https://API.OpenAI.com/v1", (), "OPENAI_API_KEY"),
        ("http://api.openai.com/v1", (), ""),  # it would be readable on its way
        ("https://api.openai.com.example.org/v1", (), ""),
        ("https://example.org/api.openai.com", (), ""),
        ("https://api.openai.com:8443/v1", (), ""),
        ("https://example.org:81/v1", ("example.org=A", "Example.org:81=B"), "B"),
        ("https://example.org:82/v1", ("example.org=A", "example.org:81=B"), "A"),
        ("https://sub.example.org/v1", ("example.org=A",), ""),
        ("https://api.openai.com/v1", ("api.openai.com=B",), "B"),
        ("http://[::1]:8000/v1", ("[::1]:8000=A",), "A"),
    ],
)
def test_which_variable_holds_the_key_of_a_url(url, key_env, variable, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for name in ("OPENAI_API_KEY", "A", "B"):
        monkeypatch.setenv(name, f" {name}\n")  # as an editor leaves it
    assert endpoint.key_for(url, key_env) == variable


@pytest.mark.parametrize(
    "word", [OTHER_KEY, f"host={OTHER_KEY}", f"{OTHER_KEY}=host.org", "https://host/v1=HOME", "=HOME"]
)
def test_a_key_in_the_place_of_its_name_is_refused_and_not_repeated(word, tmp_path, exits):
    told = exits(Endpoint, "m", tmp_path / "s.jsonl", "http://localhost:1/v1", key_env=("a.org=HOME", word))
    assert "--key-env, word 2: write HOST=NAME" in told and OTHER_KEY not in told


def test_the_openai_api_needs_a_key(tmp_path, monkeypatch, exits):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "  ")
    assert "set OPENAI_API_KEY" in exits(Endpoint, "m", tmp_path / "s.jsonl")


# --- a tested model behind an endpoint


def answer(server, run, *prompts, n_samples=1, **flags):
    """Returns the generation rows of the function that the evaluation scripts use."""
    from benchmarks import shared  # slow to import; the client that is killed does without

    args = {
        "model": "m",
        "model_url": server.url,
        "think_format": "auto",
        "chat_template_args": (),
        "top_p": 1.0,
    }
    args |= {"max_tokens": 9, "max_thinking_tokens": 0, "concurrency": 1, "key_env": (), "seed": 0, **flags}
    tasks = []
    for text in prompts:
        for sample in range(n_samples):
            messages = [{"role": "user", "content": text}]
            tasks.append({"id": f"{text} {sample}", "sample": sample, "messages": messages})
    run.mkdir(exist_ok=True)
    return shared.generate_answers(SimpleNamespace(**args), tasks, 0.0, run)


def test_a_zero_model_is_asked_to_stop_at_its_closing_tag_and_to_keep_it(serve, tmp_path):
    server = serve(lambda text, n: "<think> z </think> <response> y </response>")
    row = answer(server, tmp_path, "Hi", think_format="zero_think")[0]
    assert (row["thinking"], row["response"], row["status"]) == ("z", "y", "ok")
    request = server.requests[0][0]  # vLLM reads both at the top of the body, nowhere else
    assert request["stop"] == ["</response>"] and request["include_stop_str_in_output"] is True


def test_thinking_that_nothing_announces_is_not_judged_as_a_part_of_the_answer(serve, tmp_path, exits):
    server = serve(lambda text, n: "<think> z </think> y")
    assert "--think-format tags" in exits(answer, server, tmp_path / "a", "Hi")
    assert answer(server, tmp_path / "b", "Hi", think_format="plain")[0]["response"] == "<think> z </think> y"
    assert answer(server, tmp_path / "c", "Hi", think_format="think")[0]["response"] == "y"


def test_thinking_that_a_template_behind_the_endpoint_opened(serve, tmp_path):
    """Nobody knows that template: what is cut off before a tag counts as thinking, what ends without one as
    an answer."""
    texts = {"done": completion(" z </think> y"), "plain": completion("y"), "cut": completion(" z", "length")}
    server = serve(lambda text, n: texts[text])
    found = answer(server, tmp_path, *texts, think_format="tags", chat_template_args=("effort=high",))
    parts = [(row["thinking"], row["response"], row["status"]) for row in found]
    assert parts == [("z", "y", "ok"), ("", "y", "ok"), ("z", "", "truncated")]
    assert server.requests[-1][0]["chat_template_kwargs"] == {"effort": "high"}


def test_a_task_that_the_endpoint_refuses_has_a_row_and_ends_nothing(serve, tmp_path, capsys, exits):
    server = serve(lambda text, n: SERVER_ERROR if "long" in text else "y")
    prompts = ["long", "short", "long too"]
    found = answer(server, tmp_path, *prompts)
    assert [(row["status"], row["response"]) for row in found] == [
        ("refused", ""),
        ("ok", "y"),
        ("refused", ""),
    ]
    assert "task long 0 is refused: HTTP 400" in capsys.readouterr().err
    assert answer(server, tmp_path, *prompts) == found
    assert "HTTP 400" in exits(answer, server, tmp_path / "b", "long", "long too")


def test_seeds_of_samples_behind_an_endpoint(serve, tmp_path):
    for seed, sent in ((0, [None, 1, None, 3]), (1, [1_000_003, 1_000_004, 1_000_005, 1_000_006])):
        server = serve(lambda text, n: "y")
        answer(server, tmp_path / str(seed), "a", "b", n_samples=2, seed=seed)
        # with 0 a server that knows no seeds can be asked for one answer per task
        assert sorted(str(request.get("seed")) for request, _ in server.requests) == sorted(map(str, sent))


if __name__ == "__main__":  # the client that is killed
    values_of_tasks(Path(sys.argv[1]), sys.argv[2])
