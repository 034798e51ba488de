"""Asks judges, teachers and simulated users at any OpenAI-compatible chat endpoint, hosted or `vllm serve`.

    judge = Endpoint("gpt-4o-2024-05-13", run / "judge.jsonl", budget=20, price=(5, 15))
    print(judge.estimate(requests))
    try_endpoint(judge, "--judge", dry_run=False)  # one token, before anything else is paid for
    replies = judge.ask(requests, parse)

A request is the body of a `chat/completions` call without `model`: messages, temperature, max_tokens ...

Every reply is appended to the file `store` as it came, before anything parses it. Its key is the hash of
model, base URL, request and attempt. So the same command repeats no answered call after Ctrl-C or kill,
and another `parse` needs no new call. Failed calls are not stored; the next start makes them again.
Equal requests are asked once and share the reply. To sample several replies, vary the requests' `seed`.

An API key goes only to the server that it belongs to (rlmt/endpoint.py). It is never printed or stored, even if a
server repeats it. A server without a key is asked without one, which is enough for `vllm serve`.

A wrong key, an unknown model, missing credit or a spent budget ends the run with one line and exit code 2.
Calls under way at that moment still finish and are stored.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from tqdm import tqdm

from utils import fail, or_fail

MAX_BACKOFF = 60  # seconds
MAX_RETRY_AFTER = 600  # seconds; an endpoint that asks for a longer wait ends the run
CHECK_TEXT = "Reply with one word."  # what `try_endpoint` asks for
CHECK_ATTEMPT = -1  # of its replies in older stores; attempts of `ask` begin at 0
CHECK_TIMEOUT = 20  # seconds for the one token of `try_endpoint`
CHECK_RETRIES = 2  # repeats of that call, but none in a dry run; other calls have `retries`
SLOWEST = 5  # tokens a second; `call_timeout` waits for a reply that comes as slowly, or for its turn at a busy server
NO_REPLY = "no reply"  # begins the error of a request whose calls all failed; see `has_no_reply`
CANNOT_SEND = "the request cannot be sent"  # begins another; see `was_refused`
REPEAT_TEMPERATURE = 0.3  # at least, of a request whose reply could not be read
JITTER = random.Random()  # not the global generator, from which training draws


class Reply(NamedTuple):
    value: Any  # the result of `parse`; None if the reply is invalid
    text: str  # text of the last attempt, as it came; "" for a refusal or if there is no reply
    error: str  # why the reply is invalid; "" if it is valid
    usage: tuple[int, int]  # tokens in and out of the last attempt; zeros if the endpoint does not tell
    choice: dict  # finish_reason, logprobs, message ... of the last attempt; {} if there is no reply


class Stop(Exception):
    """Ends the run: no further call can succeed, or may be paid for."""


# --- 1. settings and costs


def resolve_url(base_url: str) -> str:
    """Returns `base_url`; if it is empty, OPENAI_BASE_URL, or else the URL of the OpenAI API."""
    return (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")


def proxy_for(url: str) -> str | None:
    """Returns the proxy that the environment names for `url`, unless no_proxy excepts its host."""
    # aiohttp's `trust_env=True` would also read ~/.netrc, at every call
    place = urlsplit(url)
    if urllib.request.proxy_bypass(place.netloc):
        return None
    return urllib.request.getproxies().get(place.scheme)


def token_limits(request: dict) -> tuple[int, int | None]:
    """Returns the tokens of a request, and how many its reply may have (None: without limit).

    The first is an estimate: a quarter of the bytes of the request as JSON.
    """
    size = len(json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return size // 4 + 1, request.get("max_completion_tokens") or request.get("max_tokens")


def dollars(tokens: tuple[float, float], price: tuple[float, float]) -> float:
    """Returns the cost of tokens (in, out) at prices (in, out) per million."""
    return (tokens[0] * price[0] + tokens[1] * price[1]) / 1e6


def call_timeout(max_tokens: int) -> float:
    """Returns the seconds to wait for a reply of so many tokens: `Endpoint.timeout`, or more for a long one."""
    return max(Endpoint.timeout, max_tokens / SLOWEST)


# --- 2. replies: what an endpoint sends and what the store holds


def one_line(text: str, key_env: tuple[str, ...] = ()) -> str:
    """Shortens a text for a message: one line of at most 300 characters, without any key."""
    return " ".join(hide_keys(text, key_env).split())[:300]


def is_completion(body: Any) -> bool:
    """Tells whether a JSON value is a chat completion: its message holds a text, or null for a refusal."""
    with suppress(LookupError, TypeError, AttributeError):
        return isinstance(body["choices"][0]["message"].get("content"), str | None)
    return False


def read_body(content: bytes) -> dict:
    """Returns the chat completion in the body of an answer; raises ValueError for anything else."""
    with suppress(ValueError, RecursionError):
        body = json.loads(content)
        if is_completion(body):
            return body
    raise ValueError(f"the body is not a chat completion: {content.decode(errors='replace')!r}")


def read_usage(body: dict) -> tuple[int, int] | None:
    """Returns the tokens in and out of a completion; None if the endpoint does not tell."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    tokens = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    for count in tokens:
        if type(count) is not int or count < 0:  # isinstance would take true and false
            return None
    return tokens


def retry_after(headers) -> float:
    """Returns the seconds that Retry-After asks to wait; 0 without a number there."""
    with suppress(ValueError):
        return max(0.0, float(headers.get("retry-after", "")))
    return 0.0


def why_stop(status: int, content: bytes, wait: float, answered: bool, advice: str) -> str:
    """Returns why no further call can succeed after this HTTP error, or "" if one may.

    Args:
        wait: seconds asked for by Retry-After.
        answered: the endpoint has answered a request before.
        advice: what to do if the endpoint does not accept the key.
    """
    code = None
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        code = json.loads(content)["error"]["code"]
    forbidden = status == 403 and not answered  # after a first answer, 403 is about one request
    if 300 <= status < 400:
        return "it redirects to another URL; name that one"
    if status == 401 or forbidden:
        return advice
    if status == 402 or code == "insufficient_quota":
        return "check the credit of this key"
    if status == 404:
        return "check the name of the model and the base URL"
    if wait > MAX_RETRY_AFTER:
        return f"it asks to wait {wait:.0f} seconds"
    return ""


def read_row(line: bytes) -> dict:
    """Returns a row of the store; raises ValueError, LookupError or TypeError for any other line."""
    row = json.loads(line)
    has_usage = all(type(count) is int for count in row["usage"])
    has_cost = 0 <= row["cost"] < float("inf")
    if not (has_usage and has_cost) or not is_completion(row["reply"]):
        raise ValueError("not a stored reply")
    return row


def read_reply(body: dict, parse: Callable[[str], Any], attempts: int, whole: bool = False) -> Reply:
    """Parses the text of a completion; if `parse` rejects it, or `whole` and it was cut off, the Reply is invalid."""
    choice = body["choices"][0]
    text = choice["message"].get("content") or ""
    usage = read_usage(body) or (0, 0)
    try:
        if whole and choice.get("finish_reason") == "length":
            raise ValueError("incomplete: the limit of its tokens cut the reply off")
        return Reply(parse(text), text, "", usage, choice)
    except (ValueError, RecursionError) as e:  # RecursionError: JSON of a thousand brackets
        # the text came without keys from the store
        error = one_line(f"unreadable in {attempts} attempts: {str(e) or type(e).__name__}")
        return Reply(None, text, error, usage, choice)


def has_no_reply(error: str) -> bool:
    """Tells from a Reply's `error` whether every call failed, as in an outage: a later start may get a reply."""
    return error.startswith(NO_REPLY)


def was_refused(error: str) -> bool:
    """Tells from a Reply's `error` whether the endpoint refuses this request for good, as one that is too long."""
    return error.startswith(("HTTP 4", CANNOT_SEND))


# --- 3. the client


@dataclass(eq=False)
class Endpoint:
    """Asks one model at one endpoint, and keeps its replies in one file.

    Reports may read `cost` in US dollars and `calls`.

    A call starts only if its worst case fits the budget: as many tokens as `token_limits` says, or more in
    proportion once a reply has used more. Answered calls cost what their usage says, broken-off ones their
    worst case, HTTP errors and calls that never connected nothing.
    """

    model: str
    store: Path | str  # jsonl file of the replies, for one process at a time
    base_url: str = ""  # such as http://localhost:8000/v1; empty: OPENAI_BASE_URL, or else the OpenAI API
    concurrency: int = 32  # calls under way at once
    timeout: float = 120.0  # seconds for a call, to the last byte
    retries: int = 8  # after HTTP 408, 409, 429 or 5xx, a time-out, a lost connection, a broken body
    budget: float = 0  # US dollars for everything in the store and in this process; 0: without limit
    price: tuple[float, float] = (0, 0)  # US dollars per million tokens in and out
    key_env: tuple[str, ...] = ()  # words HOST=NAME of --key-env; see rlmt/endpoint.py
    backoff: float = 1  # seconds; repeat n (from 0) waits Retry-After, and 0 .. min(60, backoff * 2^n) more

    def __post_init__(self):
        self.store = Path(self.store)
        self.base_url = resolve_url(self.base_url)
        self.cost = 0.0
        self.calls = 0
        self.bodies = {}  # chat completions by key, as the store has them
        self.end = 0  # bytes of the store that have been read
        self.scales = [1.0, 1.0]  # highest ratio of used tokens to `token_limits`, in and out
        check_settings(self)

    def estimate(self, requests: list[dict]) -> dict:
        """Returns the calls, tokens and dollars that `ask` will need if every call succeeds.

        `output_tokens_at_most` and `dollars_at_most` are None if a request has no max_tokens; without a price,
        the dollars are None too.
        """
        self._read_store()
        unique = {self._key(request): request for request in requests}
        to_ask = [request for key, request in unique.items() if key not in self.bodies]
        limits = [token_limits(request) for request in to_ask]
        most_out = [tokens_out for _, tokens_out in limits]
        is_limited = None not in most_out
        is_priced = is_limited and any(self.price)
        return {
            "calls": len(to_ask),
            "answered": len(unique) - len(to_ask),
            "input_tokens": sum(tokens_in for tokens_in, _ in limits),
            "output_tokens_at_most": sum(most_out) if is_limited else None,
            "dollars_at_most": sum(map(self._worst_cost, to_ask)) if is_priced else None,
        }

    def ask(
        self,
        requests: list[dict],
        parse: Callable[[str], Any] = str,
        parse_retries: int = 3,
        name: str = "judge",
        repeat_cut_off: bool = True,
        whole: bool = False,
    ) -> list[Reply]:
        """Returns the replies in the order of the requests.

        `parse(text)` raises ValueError for a text it cannot read; the request is then asked again, up to
        `parse_retries` times, with another seed and at REPEAT_TEMPERATURE at least; one that was cut off only if
        `repeat_cut_off`, since it is the dearest to pay for again. Refused, empty and, unless
        replies must be `whole`, cut-off replies reach `parse` as they are. A request without a readable reply has the value None and an `error`. `name` is shown in the
        progress bar and in messages.
        """
        check_requests(requests, name, self)
        keys = [self._key(request) for request in requests]
        unique = dict(zip(keys, requests))
        read = partial(
            self._stored_reply,
            parse=parse,
            parse_retries=parse_retries,
            repeat_cut_off=repeat_cut_off,
            whole=whole,
        )
        done = {}
        with self._open_store():
            for key, request in unique.items():
                reply, _ = read(request)
                if reply:
                    done[key] = reply
            with tqdm(total=len(unique), initial=len(done), desc=name, unit="request") as bar:
                stop_reason = asyncio.run(Batch(self, unique, done, read, bar).run())
        if stop_reason:
            progress = f"{len(done)} of {len(unique)} requests are done, the replies in {self.store}"
            remain = f"{len(unique) - len(done)} remain: the same command goes on from there"
            fail(f"{name}: {stop_reason}; spent ${self.cost:.4f}. {progress}; {remain}")
        return [done[key] for key in keys]

    def _key(self, request: dict, attempt: int = 0) -> str:
        """Returns the hash under which the store has the reply to an attempt at a request."""
        identity = [self.model, self.base_url, request, attempt]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def _worst_cost(self, request: dict) -> float:
        tokens_in, tokens_out = token_limits(request)
        return dollars((tokens_in * self.scales[0], (tokens_out or 0) * self.scales[1]), self.price)

    def _read_store(self) -> None:
        """Reads what is new in the store, if there is one."""
        if self.store.exists():
            with self._open_store():
                pass

    @contextmanager
    def _open_store(self) -> Iterator[None]:
        """Opens and locks the store, reads what is new in it, and cuts off a last line that a kill has torn."""
        self.store.parent.mkdir(parents=True, exist_ok=True)
        with open(self.store, "a+b") as self.file:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"{self.store}: another process is using it; wait for its end, or name another file")
            self.file.seek(self.end)
            for line in self.file:
                if not line.endswith(b"\n"):
                    print(f"{self.store}: cut off the last line, which a kill had torn", file=sys.stderr)
                    self.file.truncate(self.end)
                    break
                try:
                    self._remember(line)
                except (ValueError, LookupError, TypeError):
                    number = len(self.bodies) + 1
                    fail(f"{self.store}:{number}: not a line of such a store; delete it or name another file")
            yield

    def _remember(self, line: bytes) -> None:
        """Adds a line of the store to the replies, the cost and the scales."""
        row = read_row(line)
        is_check = row.get("attempt") == CHECK_ATTEMPT  # too short to tell how much longer requests may use
        for side, limit in enumerate(token_limits(row["request"])):  # in, out
            if limit and not is_check:
                self.scales[side] = max(self.scales[side], row["usage"][side] / limit)
        self.cost += row["cost"]
        self.bodies[row["key"]] = row["reply"]
        self.end += len(line)

    def _save(self, request: dict, attempt: int, body: dict) -> None:
        """Appends a reply to the store, without keys."""
        usage = read_usage(body)
        row = {
            "key": self._key(request, attempt),
            "attempt": attempt,
            "model": self.model,
            "request": request,
            "reply": body,
            "usage": usage or (0, 0),
            "cost": dollars(usage, self.price) if usage else self._worst_cost(request),
            "time": time.time(),
        }
        line = hide_keys(json.dumps(row), self.key_env).encode() + b"\n"
        self.file.write(line)
        self.file.flush()
        self._remember(line)  # the line, not the row: the next start reads the same

    def _stored_reply(
        self,
        request: dict,
        parse: Callable[[str], Any],
        parse_retries: int,
        repeat_cut_off: bool = True,
        whole: bool = False,
    ) -> tuple[Reply | None, int]:
        """Returns the last Reply to a request and its attempt; without one, None and the attempt to make."""
        for attempt in range(parse_retries + 1):
            body = self.bodies.get(self._key(request, attempt))
            if body is None:
                return None, attempt
            reply = read_reply(body, parse, attempt + 1, whole)
            was_cut_off = reply.choice.get("finish_reason") == "length"
            if not reply.error or (was_cut_off and not repeat_cut_off):
                break
        return reply, attempt


def check_settings(endpoint: Endpoint) -> None:
    """Exits with code 2 and one line if an argument cannot be right."""
    or_fail(check_url, endpoint.base_url, "the base URL")
    if not endpoint.base_url.startswith(("http://", "https://")):
        fail(f"the base URL {endpoint.base_url!r} must begin with http:// or https://")
    if endpoint.concurrency < 1:
        fail(f"concurrency {endpoint.concurrency}: must be 1 or more")
    if endpoint.budget and not any(endpoint.price):
        fail("a budget needs a price: US dollars per million tokens in and out")
    or_fail(check_key_env, endpoint.key_env)
    or_fail(check_key, endpoint.base_url, endpoint.key_env, endpoint.model)


def check_requests(requests: list[dict], name: str, endpoint: Endpoint) -> None:
    """Rejects, before the first call, requests that cannot be asked or whose cost has no limit."""
    for number, request in enumerate(requests, 1):
        if request.get("stream") or request.get("n", 1) != 1:
            raise ValueError(f"request {number}: stream and n > 1 are not supported; vary the seed instead")
        if endpoint.budget and token_limits(request)[1] is None:
            fail(f"{name}: a budget needs max_tokens in every request; request {number} has none")


def try_endpoint(endpoint: Endpoint, flag: str, dry_run: bool) -> None:
    """Makes one call of one token; exits with code 2, naming `flag`, if no reply comes.

    So a wrong key, model or URL ends a run before its folder is made, and before anything is generated.
    What the reply says does not matter. Nothing is kept of it, and its token is in no sum of costs; but a spent
    budget ends the run here too. A dry run does not repeat a failed call.
    """
    request = {"messages": [{"role": "user", "content": CHECK_TEXT}], "max_tokens": 1}
    endpoint._read_store()  # for its cost
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "check.jsonl")  # empty: what was answered before says nothing about today
        retries = 0 if dry_run else CHECK_RETRIES
        client = replace(endpoint, store=store, timeout=CHECK_TIMEOUT, retries=retries)
        client.cost = endpoint.cost
        read = partial(client._stored_reply, parse=str, parse_retries=0)
        done = {}
        with client._open_store():
            stop_reason = asyncio.run(Batch(client, {"check": request}, done, read, tqdm(disable=True)).run())
    name = f"{flag} {endpoint.model}"
    if stop_reason:
        fail(f"{name}: {stop_reason}")
    if done["check"].error:
        fail(
            f"{name}: {endpoint.base_url} gives no reply of one token ({done['check'].error}); check {flag} and its "
            "URL, and that the server runs"
        )
    print(f"{name} answers at {endpoint.base_url}", flush=True)


@dataclass(eq=False)
class Batch:
    """Makes the calls of one `ask`. Its workers share the queue, the session and the reason to stop."""

    endpoint: Endpoint
    requests: dict[str, dict]  # by key
    done: dict[str, Reply]  # by key; `run` adds the missing ones
    read: Callable[[dict], tuple[Reply | None, int]]  # Endpoint._stored_reply with its `parse`
    bar: tqdm

    async def run(self) -> str:
        """Adds the missing replies to `done`; returns "", or why it stopped early."""
        missing = [(key, request) for key, request in self.requests.items() if key not in self.done]
        self.queue = iter(missing)
        self.invalid = sum(bool(reply.error) for reply in self.done.values())
        self.reserved = 0.0  # dollars; the worst case of the calls under way
        self.last_error = ""
        self.stop_reason = ""
        self.stopping = asyncio.Event()
        headers = {"Content-Type": "application/json"}
        key = key_for(self.endpoint.base_url, self.endpoint.key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self.session = aiohttp.ClientSession(
            headers=headers,
            proxy=proxy_for(self.endpoint.base_url),
            timeout=aiohttp.ClientTimeout(),  # none; `call` has one
            connector=aiohttp.TCPConnector(limit=0),  # none; there are `concurrency` workers
        )
        async with self.session:
            n_workers = min(self.endpoint.concurrency, len(missing))
            await asyncio.gather(*(self.work() for _ in range(n_workers)))
        return self.stop_reason

    async def work(self) -> None:
        """Takes requests from the queue until it is empty or the run stops."""
        endpoint = self.endpoint
        for key, request in self.queue:
            try:
                self.done[key] = await self.ask_one(request)
            except Stop as stop:
                self.stop_reason = self.stop_reason or str(stop)
                self.stopping.set()
                return
            self.invalid += bool(self.done[key].error)
            cost = f"${endpoint.cost:.2f}" if any(endpoint.price) else "no price given"
            counts = f"calls {endpoint.calls}, {cost}, invalid {self.invalid}"
            self.bar.set_postfix_str(f"{counts} {self.last_error}", refresh=False)
            self.bar.update()

    async def ask_one(self, request: dict) -> Reply:
        """Calls until a reply is readable, too many are not, or none comes."""
        reply, attempt = self.read(request)
        while reply is None:
            error = await self.call(request, attempt)
            if error:
                return Reply(None, "", error, (0, 0), {})
            reply, attempt = self.read(request)
        return reply

    async def call(self, request: dict, attempt: int) -> str:
        """Calls until a reply is stored; returns "", or why there is none. Raises Stop."""
        endpoint = self.endpoint
        body = {**request, "model": endpoint.model}
        if attempt > 0:  # a server that samples as before would give the reply that could not be read again
            if "temperature" in body:
                body["temperature"] = max(body["temperature"], REPEAT_TEMPERATURE)
            if "seed" in body:
                body["seed"] += attempt
        try:
            sent = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:  # half of a surrogate pair in a message
            return f"{CANNOT_SEND}: {e}"

        for repeat in range(endpoint.retries + 1):
            worst = self.reserve(request)
            endpoint.calls += 1
            wait = 0.0
            try:
                status, wait, content = await self.post(sent)
                if status < 300:
                    endpoint._save(request, attempt, read_body(content))
                    return ""
                error = self.read_error(status, wait, content)
                if status < 500 and status not in (408, 409, 429):
                    return error  # a repeat would not help
            except (TimeoutError, aiohttp.ClientError, ValueError) as e:
                if not isinstance(e, aiohttp.ClientConnectorError):  # that was never sent
                    endpoint.cost += worst  # the reply may have been generated, and billed
                error = one_line(f"{type(e).__name__}: {e} {e.__cause__ or ''}", endpoint.key_env)
                self.last_error = f"({type(e).__name__})"
            finally:
                self.reserved -= worst

            if repeat < endpoint.retries:
                wait += JITTER.uniform(0, min(MAX_BACKOFF, endpoint.backoff * 2**repeat))
                await self.pause(wait)
        return f"{NO_REPLY} in {endpoint.retries + 1} calls; the last: {error}"

    async def pause(self, seconds: float) -> None:
        """Waits as long as a server asked for, or until the calls are stopped."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)

    async def post(self, sent: bytes) -> tuple[int, float, bytes]:
        """Makes one call; returns its HTTP status, the seconds it asks to wait, and its body."""
        # a redirect is not followed: key and prompts are for this server alone
        url = f"{self.endpoint.base_url}/chat/completions"
        posting = self.session.post(url, data=sent, allow_redirects=False)
        async with asyncio.timeout(self.endpoint.timeout), posting as answer:
            content = await answer.read()
        return answer.status, retry_after(answer.headers), content

    def read_error(self, status: int, wait: float, content: bytes) -> str:
        """Returns an HTTP error as one line. Raises Stop if no further call can succeed."""
        endpoint = self.endpoint
        error = one_line(f"HTTP {status}: {content.decode(errors='replace')}", endpoint.key_env)
        self.last_error = f"(HTTP {status})"
        advice = key_advice(endpoint.base_url, endpoint.key_env)
        reason = why_stop(status, content, wait, bool(endpoint.bodies), advice)
        if reason:
            raise Stop(f"{endpoint.base_url}: {error}; {reason}")
        return error

    def reserve(self, request: dict) -> float:
        """Returns the worst cost of a call, added to `reserved`. Raises Stop if the call must not start."""
        if self.stopping.is_set():
            raise Stop
        worst = self.endpoint._worst_cost(request)
        budget = self.endpoint.budget
        needed = self.endpoint.cost + self.reserved + worst
        if budget and needed > budget * (1 + 1e-9):  # `needed` is a sum of many roundings
            raise Stop(f"the next call could pass the budget of ${budget:g}")
        self.reserved += worst
        return worst


# === keys

OPENAI_URL = "https://api.openai.com/v1"
WORD = re.compile(r"[^\s=/@]+=[A-Za-z_][A-Za-z0-9_]*")  # HOST=NAME or HOST:PORT=NAME
URL_WITH_KEY = re.compile(r"^[^/]*@|://[^/]*@|\?")  # a user and password, or a query
SHORTEST_KEY = 8  # characters; a shorter one is a placeholder for `vllm serve`, such as EMPTY


# --- 1. whose key


def key_for(url: str, key_env: tuple[str, ...] = ()) -> str:
    """Returns the API key that belongs to the server of `url`; "" if there is none."""
    return read_variable(variable_for(url, key_env))


def variable_for(url: str, key_env: tuple[str, ...] = ()) -> str:
    """Returns the environment variable that holds the key for the server of `url`; "" if none does."""
    variables = {}
    for word in key_env:
        place, _, variable = word.rpartition("=")
        variables[place.lower()] = variable
    server = server_of(url)
    host = re.sub(r":\d+$", "", server)
    for place in (server, host):
        if place in variables:
            return variables[place]

    for known_url in (OPENAI_URL, os.environ.get("OPENAI_BASE_URL", "")):
        # a key for https must not travel over http, where others can read it
        same_scheme = urlsplit(url).scheme == urlsplit(known_url).scheme
        if same_scheme and server == server_of(known_url):
            return "OPENAI_API_KEY"
    return ""


def server_of(url: str) -> str:
    """Returns host:port of a URL, or the host alone if it names no port."""
    return urlsplit(url).netloc.lower()


def read_variable(name: str) -> str:
    """Returns what an environment variable holds, without the line end that an editor leaves."""
    return os.environ.get(name, "").strip()


# --- 2. checks before a run


def check_url(url: str, flag: str) -> None:
    """Raises ValueError if a URL holds a user, a password or a key. The message does not repeat it."""
    if URL_WITH_KEY.search(url):
        raise ValueError(
            f"{flag}: do not write a user, password or key into a URL: it is logged; set OPENAI_API_KEY, or name the "
            "variable that holds the key by --key-env HOST=NAME"
        )


def check_key_env(key_env: tuple[str, ...]) -> None:
    """Raises ValueError if a word of --key-env does not name a variable that holds a key.

    The messages do not repeat the word: it may hold a key by mistake.
    """
    for number, word in enumerate(key_env, 1):
        if not WORD.fullmatch(word):
            raise ValueError(
                f"--key-env, word {number}: write HOST=NAME or HOST:PORT=NAME, without http:// and path; NAME is the "
                "environment variable that holds the key, never the key itself, as commands are logged"
            )
        if not read_variable(word.rpartition("=")[2]):
            raise ValueError(
                f"--key-env, word {number}: the environment variable that it names is not set; set it to the key, "
                "and do not write the key itself here, as commands are logged"
            )


def check_key(url: str, key_env: tuple[str, ...], model: str) -> None:
    """Raises ValueError if the OpenAI API, asked for `model`, has no key, or if a key cannot be one."""
    key = key_for(url, key_env)
    if not key and url == OPENAI_URL:
        raise ValueError(
            f"{url} needs a key, to ask {model}: set OPENAI_API_KEY, name the variable that holds the key by "
            f"--key-env {server_of(url)}=NAME, or name another endpoint by its URL"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{url}: set {variable_for(url, key_env)} to the key and nothing else")


# --- 3. messages


def key_advice(url: str, key_env: tuple[str, ...]) -> str:
    """Says what to do if the server of `url` does not accept the key, or wants one and got none."""
    variable = variable_for(url, key_env)
    sent = f"it was sent the key in {variable}" if variable else "it was sent no key"
    return f"{sent}; --key-env {server_of(url)}=NAME names the environment variable that holds its key"


def hide_keys(text: str, key_env: tuple[str, ...] = ()) -> str:
    """Replaces by *** the key in OPENAI_API_KEY, and those in the variables that `key_env` names."""
    variables = ["OPENAI_API_KEY"]
    variables += [word.rpartition("=")[2] for word in key_env]
    for variable in variables:
        key = read_variable(variable)
        if len(key) >= SHORTEST_KEY:  # a placeholder may occur in any text
            text = text.replace(key, "***")
    return text
