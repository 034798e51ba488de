"""Tests rlmt/endpoint.py against a real HTTP server on loopback that fails on purpose.

Run as a script, this file is the client that test_kill_at_a_third_and_repeat kills.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path

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
    return [json.loads(line) for line in path.read_text().splitlines()]


def completion(content, finish="stop", **message) -> tuple[int, dict]:
    message |= {"role": "assistant", "content": content}
    return 200, {"choices": [{"message": message, "finish_reason": finish}]}


# --- a third of the calls fails

TASKS = [f"task {i}" for i in range(512)]
LASTING = ["I would rather not say.", "", SERVER_ERROR]  # of every 50th task


def truth(text: str) -> int:
    return random.Random(text).randint(1, 10)


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
    return [reply.value for reply in judge.ask(ask_for(*TASKS), int)]


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
    whole = store.read_bytes()[: store.read_bytes().rfind(b"\n") + 1]
    n_before = whole.count(b"\n")
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
    # of these nothing is stored; "" twice is refused for good
    assert {task for task in TASKS if server.calls[task] > calls[task]} == {*TASKS[100::150]}
    assert server.most <= 32


# --- what a server may send


BEHAVIOURS = {  # what it sends, what the reply's text is or its error says, and how many calls that takes
    "unclosed thinking": (completion("<think> 9", "length"), "<think> 9", 1),
    "cut off in its reasoning": (completion(None, "length", reasoning_content="9"), "", 1),
    "no usage, no reason": ((200, {"choices": [{"message": {"content": "7"}}]}), "7", 1),
    "no number in usage": ((200, {**completion("7")[1], "usage": {"prompt_tokens": "n/a"}}), "7", 1),
    "another model": ((200, {**completion("7")[1], "model": ["other"]}), "7", 1),
    "content filter": (completion("7", "content_filter"), "filtered", 1),
    "refusal": (completion(None, refusal="I will not"), "I will not", 1),
    "content null": (completion(None), "refused: two replies without a text", 2),
    "reasoning alone": (completion("", reasoning_content="9 of 10"), "refused", 2),
    "tool call": (completion(None, "tool_calls", tool_calls=[{}]), "refused", 2),
    "SAFETY": (completion(None, "SAFETY"), "refused", 2),
    "max_tokens": (completion("7", "max_tokens"), "7", 1),
    "MAX_TOKENS in its reasoning": (completion(None, "MAX_TOKENS"), "", 1),
    "COMPLETE": (completion("7", "COMPLETE"), "7", 1),
    "no word": (completion("7", ""), "7", 1),
    "finish_reason abort": (completion("7", "abort"), "no completion", 3),
    "finish_reason error": (completion("7", "error"), "no reply in 3 calls; the last: no completion", 3),
    "no choices": ((200, {"choices": []}), "no completion", 3),
    "content in parts": (completion([{"type": "text", "text": "7"}]), "no completion", 3),
    "parts cut off": (completion([{"type": "text", "text": "7"}], "length"), "no completion", 3),
    "a thousand brackets": ((200, b"[" * 99_999), "no completion", 3),
    "event stream": ((200, b'data: {"choices": []}\n\ndata: [DONE]'), "[DONE]", 3),
    "error in 200": ((200, {"error": {"message": "upstream"}}), "upstream", 3),
    "cut JSON": (Fault("truncated JSON"), "no completion", 3),
    "content that is no text": (completion({"score": 7}), "no completion", 3),
    "HTML": ((200, b"<html>Sign in</html>"), "Sign in", 3),
    "dropped connection": (Fault("reset"), "Connection reset by peer", 3),
    "too slow": (Fault("slow"), "TimeoutError", 3),
    "403 for one task": ((403, {"error": {"message": "moderated"}}), "HTTP 403", 1),
    "too long": (SERVER_ERROR, "--omit NAME", 1),
}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_what_a_server_may_send(serve, client, name):
    """While other requests are answered, one that is not has an error."""
    sent, found, n_calls = BEHAVIOURS[name]
    server = serve(lambda text, n: sent if text == name else text)
    judge = client(server, retries=2)
    first, *rest = judge.ask(ask_for(name, *"abcdefgh"))
    assert [reply.text for reply in rest] == list("abcdefgh") and server.calls[name] == n_calls
    if first.error:
        assert found in first.error and first.value is None
    else:
        assert (first.text, first.value) == (found, found)


def test_a_ban_is_waited_for(serve, client):
    """Two calls, which a client that waits for its own time only would send at once."""
    until = time.time() + 1.5
    banned = (429, {"error": "slow down"}, [("Retry-After", formatdate(until + 1, usegmt=True))])
    server = serve(lambda text, n: banned if time.time() < until else text)
    assert client(server, retries=1).ask(ask_for("a"))[0].value == "a" and len(server.requests) == 2


def test_an_outage_ends_the_run_after_the_tries_of_one_request(serve, client, exits):
    down = []
    server = serve(lambda text, n: Fault("503") if down else text)
    judge = client(server, concurrency=4)
    assert judge.ask(ask_for("a"))[0].value == "a"
    down.append(True)
    told = exits(judge.ask, ask_for(*map(str, range(200))))
    assert "no reply in 9 calls" in told
    assert sum(server.calls.values()) <= 1 + 4 * 9 and len(rows(judge.store)) == 1
    down.clear()
    assert judge.ask(ask_for("0"))[0].value == "0"


# --- what is asked


def test_equal_requests_are_asked_once_unless_their_seeds_differ(serve, client):
    server = serve(lambda text, n: f"{text}{n}")
    requests = ask_for("a", "b", "a") + ask_for("a", seed=1) + ask_for("a", seed=2) + ask_for("a", seed=1)
    replies = client(server, concurrency=1).ask(requests)
    assert [reply.value for reply in replies] == ["a0", "b0", "a0", "a1", "a2", "a1"]


# --- the check before a run


def test_the_check_is_the_first_request_read_as_the_run_does_and_counts(serve, exits, tmp_path):
    [request] = ask_for("x")
    store = tmp_path / "run" / "store.jsonl"
    server = serve(lambda text, n: text)

    def connect(budget: float, **settings) -> Endpoint:
        return Endpoint("m", store, server.url, price=(0, 1e6), budget=budget, **settings)  # a call costs $5

    try_endpoint(connect(10), request, "--judge")
    assert not store.parent.exists() and server.requests[0][0] == request | {"model": "m"}
    judge = connect(10)
    assert judge.ask([request])[0].value == "x" and judge.cost == 10
    try_endpoint(connect(10), request, "--judge")  # at a resume
    assert server.calls["x"] == 2
    # --overwrite: neither the old reply nor the old cost counts
    try_endpoint(connect(20, fresh=True), request, "--judge")
    assert server.calls["x"] == 3
    told = exits(try_endpoint, connect(0, fresh=True), request, "--judge", int)
    assert told.startswith("error: --judge m: ") and "unreadable: invalid literal" in told


# --- budget


@pytest.mark.parametrize("usage", [(10, 3), None])
def test_budget_with_many_calls_at_once(serve, client, exits, usage):
    """Calls of at most $0.1 each reserve it before they are sent, and the next wait for what they cost. A reply
    without usage counts as $0.1, which no sum of binary fractions gives back exactly."""
    server = serve(lambda text, n: time.sleep(0.1) or text, usage=usage)
    judge = client(server, budget=0.805, price=(0, 2e4))
    requests = ask_for(*map(str, range(64)))
    told = exits(judge.ask, requests)
    assert (len(server.answered), judge.cost) == (
        (12, pytest.approx(0.72)) if usage else (8, pytest.approx(0.8))
    )
    assert "budget of $0.805" in told
    again = client(server, budget=0.805, price=(0, 2e4))
    exits(again.ask, requests)  # what is in the store counts
    assert again.cost <= 0.805


# --- whose key goes where


def test_keys_go_to_their_own_server_alone(serve, client, exits, monkeypatch):
    """Not to another port of the machine, nor where a server redirects; settings for OpenAI's server stay
    here too."""
    foreign = serve(lambda text, n: text)
    headers = [("Location", f"{foreign.url}/chat/completions")]
    own = serve(lambda text, n: (307, b"", headers) if text == "away" else text)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", own.url)
    monkeypatch.setenv("OPENAI_ORG_ID", "mine")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Key: mine")
    for server, sent in ((own, f"Bearer {KEY}"), (foreign, None)):
        assert client(server).ask(ask_for(server.url))[0].value == server.url
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


# --- a vLLM server that is asked by token ids


@pytest.mark.parametrize("sent", [b"<html>Sign in</html>", {"choices": []}, completion("7", "abort")[1]])
def test_token_ids_that_do_not_come_end_the_run_with_the_server_s_words(serve, exits, sent):
    from rlmt.sampler import Sampling  # slow to import
    from rlmt.vllm import Server

    server = Server("m", serve(lambda text, n: (200, sent)).url)
    told = exits(list, server.complete({0: [1]}, {}, Sampling(1.0, 9), [2]))
    words = sent.decode() if isinstance(sent, bytes) else json.dumps(sent)
    assert f"no completion in HTTP 200: {words}" in told


def test_equal_prompts_get_an_answer_each(serve, tmp_path):
    """As where a data set asks a question twice."""
    from benchmarks.tested_model import TestedModel  # slow to import; the client that is killed does without
    from eval_benchmarks import Args

    server = serve(lambda text, n: f"{text} {n}")
    args = Args(name="gsm8k", model="m", model_url=server.url, concurrency=1)
    tasks = []
    for number, text in enumerate(["who", "where", "who", "who"]):
        tasks.append({"id": str(number), "messages": [{"role": "user", "content": text}]})
    answers = TestedModel(args).answer(tasks, 1.0, tmp_path)
    assert sorted(row["response"] for row in answers) == ["where 0", "who 0", "who 1", "who 2"]
    assert sorted(request.get("seed", 0) for request, _ in server.requests) == [0, 1, 2, 3]


if __name__ == "__main__":  # the client that is killed
    values_of_tasks(Path(sys.argv[1]), sys.argv[2])
