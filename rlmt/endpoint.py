"""Asks judges, teachers and simulated users at any OpenAI-compatible chat endpoint, hosted or `vllm serve`.

    judge = Endpoint("gpt-4o-2024-05-13", run / "judge.jsonl", budget=20, price=(5, 15))
    print(judge.estimate(requests))
    try_endpoint(judge, requests[0], "--judge")  # before anything else is paid for
    replies = judge.ask(requests, parse)

A request is the body of a `chat/completions` call without `model`: messages, temperature, max_tokens ...

Whatever a server sends with HTTP 200 is appended to the file `store` as it came, before anything parses it. An
answer's key is the hash of model, base URL, request and attempt, so the same command repeats no answered call after
Ctrl-C or kill, and another `parse` needs no new call. Equal requests are asked once and share the reply. To sample
several replies, vary the requests' `seed`.

What is no answer (`why_no_answer`, an HTTP error, a lost connection, a time-out) is asked again, and never read as an
empty answer. If all tries of a request fail, nothing else has been answered meanwhile and others still wait, or if none
of the first requests of a kind is accepted, the run ends with one line and exit code 2; otherwise the one request has
an error. A wrong key, an unknown model, missing credit or a spent budget ends the run at once. Calls under way then
finish and are stored.

An API key goes only to the server that it belongs to. It is never printed or stored, even if a server repeats it. A
server without a key is asked without one, which is enough for `vllm serve`.
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tqdm import tqdm

from utils import fail, or_fail

OPENAI_URL = "https://api.openai.com/v1"
MAX_BACKOFF = 60  # seconds
MAX_RETRY_AFTER = 600  # seconds; an endpoint that asks for a longer wait ends the run
CHECK_RETRIES = 2  # of `try_endpoint`; other calls have `retries`
FIRST_REQUESTS = 5  # of each kind, asked before the others: one of them must be accepted
SLOWEST = 5  # tokens per second; `call_timeout` waits for a reply that comes as slowly, or for its turn at a busy server
REPEAT_TEMPERATURE = 0.3  # at least, of a request whose reply could not be read
NO_REPLY = "no reply"  # begins the error of a request whose calls all failed; see `has_no_reply`
NO_TEXT = "no text"  # these begin the errors that `was_refused` tells apart, as does HTTP 4xx
CANNOT_SEND = "the request cannot be sent"
KEPT_HEADERS = {"host", "content-length", "content-type", "accept", "accept-encoding", "user-agent"}
TWO_LINES = "The first line of an answer.\nThe second line."  # what judges are shown before there are answers
JITTER = random.Random()  # not the global generator, from which training draws
EARLY_LINES: dict[Path, bytes] = {}  # what `try_endpoint` adds to stores whose folder does not exist yet


class Reply(NamedTuple):
    value: Any  # the result of `parse`; None if the reply is invalid
    text: str  # text of the last attempt, as it came; "" if there is no reply
    error: str  # why the reply is invalid; "" if it is valid
    usage: tuple[int, int]  # tokens in and out of the last attempt; zeros if the endpoint does not tell
    choice: dict  # finish_reason, logprobs, message ... of the last attempt; {} if there is no reply


class Stop(Exception):
    """Ends the run: no further call can succeed, or may be paid for."""


# --- 1. requests


def resolve_url(base_url: str) -> str:
    """Returns `base_url`; if it is empty, OPENAI_BASE_URL, or else the URL of the OpenAI API."""
    return (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")


def token_limits(request: dict) -> tuple[int, int]:
    """Returns the tokens of a request, and how many its reply may have.

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


def kind_of(request: dict) -> tuple[str, ...]:
    """Returns the names of a request's parameters, which a server accepts or refuses."""
    return tuple(sorted(request.keys() - {"messages"}))


# --- 2. replies


def text_of(choice: dict) -> str:
    """Returns the text of a choice, whose content may be null or a list of parts."""
    content = choice["message"].get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return content


def why_no_answer(body: Any) -> str:
    """Returns why the body of a reply with HTTP 200 is no answer; "" for an answer, and for one that was cut off."""
    try:
        finish = body["choices"][0].get("finish_reason")
        has_text = text_of(body["choices"][0]).strip() != ""
    except (LookupError, TypeError, AttributeError):
        return "no completion in HTTP 200"
    if finish == "error":
        return "an error in HTTP 200"
    if finish == "content_filter" or (finish != "length" and not has_text):
        return f"{NO_TEXT} in HTTP 200"  # all of it may stand in reasoning_content
    return ""


def read_usage(body: Any) -> tuple[int, int] | None:
    """Returns the tokens in and out of a reply; None if the endpoint does not tell."""
    with suppress(LookupError, TypeError):
        tokens = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        if min(tokens) >= 0:
            return tokens
    return None


def retry_after(headers) -> float:
    """Returns the seconds that Retry-After asks to wait, as a number or until a date; 0 without one."""
    text = headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(text))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


def has_no_reply(error: str) -> bool:
    """Tells from a Reply's `error` whether every call failed, as in an outage: a later start may get a reply."""
    return error.startswith(NO_REPLY)


def was_refused(error: str) -> bool:
    """Tells from a Reply's `error` whether a later start would be refused as well, as a request that is too long."""
    return error.startswith(("HTTP 4", NO_TEXT, CANNOT_SEND))


# --- 3. the client


@dataclass(eq=False)
class Endpoint:
    """Asks one model at one endpoint, and keeps its replies in one file.

    Reports may read `cost` in US dollars and `calls`.

    A call starts only if its worst case fits the budget: as many tokens as `token_limits` says, or more in
    proportion once a reply has used more. Replies cost what their usage says, broken-off ones their worst case, HTTP
    errors and calls that never connected nothing.
    """

    model: str
    store: Path | str  # jsonl file of the replies, for one process at a time
    base_url: str = ""  # such as http://localhost:8000/v1; empty: OPENAI_BASE_URL, or else the OpenAI API
    concurrency: int = 32  # calls under way at once
    timeout: float = 120.0  # seconds for a call, to the last byte
    retries: int = 8  # after HTTP 408, 409, 429 or 5xx, a time-out, a lost connection, no answer
    budget: float = 0  # US dollars for everything in the store and in this process; 0: without limit
    price: tuple[float, float] = (0, 0)  # US dollars per million tokens in and out
    key_env: tuple[str, ...] = ()  # words HOST=NAME of --key-env; see `variable_for`
    known_as: str = ""  # what the store's keys have in place of a URL that changes from start to start
    backoff: float = 1  # seconds; repeat n (from 0) waits Retry-After, and 0 .. min(60, backoff * 2^n) more

    def __post_init__(self):
        self.store = Path(self.store)
        self.base_url = resolve_url(self.base_url)
        self.cost = 0.0
        self.reserved = 0.0  # dollars; the worst case of the calls under way
        self.calls = 0
        self.bodies = {}  # answers by key, as the store has them
        self.kinds = set()  # of the requests that were answered
        self.n_without_text = (
            Counter()
        )  # replies by key; they were paid for, and count as tries of a later start
        self.served_model = self.model  # as the last reply says
        self.waiting = 0  # requests of `ask` that no call was made for yet
        self.last_error = ""
        self.end = 0  # bytes of the store that have been read
        self.scales = [1.0, 1.0]  # highest ratio of used tokens to `token_limits`, in and out
        or_fail(check_url, self.base_url, "the base URL")
        or_fail(check_key_env, self.key_env)
        or_fail(check_key, self.base_url, self.key_env)
        if self.concurrency < 1:
            fail(f"concurrency {self.concurrency}: must be 1 or more")
        if self.budget and not any(self.price):
            fail("a budget needs a price: US dollars per million tokens in and out")

    def estimate(self, requests: list[dict]) -> dict:
        """Returns the calls, tokens and dollars that `ask` will need if every call succeeds."""
        if self.store.exists():
            with self._open_store():
                pass  # reads what is new
        unique = {self._key(request): request for request in requests}
        to_ask = [request for key, request in unique.items() if key not in self.bodies]
        limits = [token_limits(request) for request in to_ask]
        estimate = {
            "calls": len(to_ask),
            "answered": len(unique) - len(to_ask),
            "input_tokens": sum(tokens_in for tokens_in, _ in limits),
            "output_tokens_at_most": sum(tokens_out for _, tokens_out in limits),
        }
        if any(self.price):
            estimate["dollars_at_most"] = sum(map(self._worst_cost, to_ask))
        return estimate

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
        `repeat_cut_off`, since it is the dearest to pay for again. A reply that was cut off reaches `parse` as it is,
        unless replies must be `whole`. A request without a readable reply has the value None and an `error`. `name`
        is shown in the progress bar and in messages.
        """

        for request in requests:
            if not token_limits(request)[1] or request.get("stream") or request.get("n", 1) != 1:
                raise ValueError("a request needs max_tokens, and no stream or n > 1; vary the seed instead")

        def read(request: dict) -> tuple[Reply | None, int]:
            """Returns the last reply to a request and its attempt; without one, None and the attempt to make."""
            for attempt in range(parse_retries + 1):
                body = self.bodies.get(self._key(request, attempt))
                if body is None:
                    return None, attempt
                choice = body["choices"][0]
                text = text_of(choice)
                usage = read_usage(body) or (0, 0)
                was_cut_off = choice.get("finish_reason") == "length"
                try:
                    if whole and was_cut_off:
                        raise ValueError("incomplete: the limit of its tokens cut the reply off")
                    return Reply(parse(text), text, "", usage, choice), attempt
                except (ValueError, RecursionError) as e:  # RecursionError: JSON of a thousand brackets
                    error = one_line(f"unreadable in {attempt + 1} attempts: {str(e) or type(e).__name__}")
                    reply = Reply(None, text, error, usage, choice)
                if was_cut_off and not repeat_cut_off:
                    break
            return reply, attempt

        async def answer(request: dict) -> Reply:
            """Calls until a reply is readable, too many are not, or none comes."""
            reply, attempt = read(request)
            while reply is None:
                error = await self._call(request, attempt)
                if error:
                    return Reply(None, "", error, (0, 0), {})
                reply, attempt = read(request)
            return reply

        unique = {self._key(request): request for request in requests}
        done = {}
        with self._open_store():
            for key, request in unique.items():
                reply, _ = read(request)
                if reply:
                    done[key] = reply
            with tqdm(total=len(unique), initial=len(done), desc=name, unit="request") as bar:
                stop_reason = asyncio.run(self._ask_missing(unique, done, answer, bar))
        if stop_reason:
            progress = f"{len(done)} of {len(unique)} requests are done, the replies in {self.store}"
            remain = f"{len(unique) - len(done)} remain: the same command goes on from there"
            fail(f"{name}: {stop_reason}; spent ${self.cost:.4f}. {progress}; {remain}")
        return [done[self._key(request)] for request in requests]

    async def _ask_missing(self, requests: dict[str, dict], done: dict[str, Reply], answer, bar: tqdm) -> str:
        """Adds the missing replies to `done`; returns "", or why it stopped early."""
        slots = asyncio.Semaphore(self.concurrency)
        self.stopping = asyncio.get_running_loop().create_future()  # its result is the reason

        async def add(key: str) -> None:
            async with slots:
                self.waiting -= 1
                try:
                    done[key] = await answer(requests[key])
                except Stop as stop:
                    if not self.stopping.done():
                        self.stopping.set_result(str(stop))
                    return
            bar.set_postfix_str(f"calls {self.calls}, ${self.cost:.2f} {self.last_error}", refresh=False)
            bar.update()

        missing = [key for key in requests if key not in done]
        self.waiting = len(missing)
        if not missing:
            return ""
        async with open_client(self) as self.client:
            for kind in sorted({kind_of(requests[key]) for key in missing} - self.kinds):
                first = [key for key in missing if kind_of(requests[key]) == kind][:FIRST_REQUESTS]
                await asyncio.gather(*map(add, first))
                if kind not in self.kinds and not self.stopping.done():
                    sent = ", ".join(f"{name} {requests[first[0]][name]}" for name in kind)
                    error = done.pop(first[0]).error
                    return f"{self.base_url} accepts no request with {sent}: {error}"
            await asyncio.gather(*(add(key) for key in missing if key not in done))
        return self.stopping.done() and self.stopping.result()

    async def _call(self, request: dict, attempt: int) -> str:
        """Calls until an answer is stored; returns "", or why there is none. Raises Stop."""
        from aiohttp import ClientConnectorError, ClientError
        from openai import APIConnectionError, APIStatusError

        body = {**request, "model": self.model}
        if attempt > 0:  # a server that samples as before would give the reply that could not be read again
            if "temperature" in body:
                body["temperature"] = max(body["temperature"], REPEAT_TEMPERATURE)
            if "seed" in body:
                body["seed"] += attempt
        n_answered = len(self.bodies)
        n_tried = self.n_without_text[self._key(request, attempt)]
        error = f"{NO_TEXT} in {n_tried} replies of an earlier start"
        for repeat in range(n_tried, self.retries + 1):
            worst = self._reserve(request)
            wait = 0.0
            try:
                async with asyncio.timeout(self.timeout):
                    content = await self.client.post("/chat/completions", cast_to=str, body=body)
                error = self._save(request, attempt, content)
                if not error:
                    return ""
            except UnicodeEncodeError as e:  # half of a surrogate pair in a message
                return f"{CANNOT_SEND}: {e}"
            except APIStatusError as e:
                wait = retry_after(e.response.headers)
                error = self._read_error(e.status_code, wait, e.response.text)
                if e.status_code < 500 and e.status_code not in (408, 409, 429):
                    return error  # a repeat would not help
            except (TimeoutError, APIConnectionError, ClientError) as e:
                cause = e
                was_sent = True
                while isinstance(
                    cause.__cause__, Exception
                ):  # openai and its transport wrap the system's error
                    cause = cause.__cause__
                    was_sent = was_sent and not isinstance(cause, ClientConnectorError)
                if was_sent:  # the reply may have been generated, and billed
                    self.cost += worst
                error = one_line(repr(cause), self.key_env)
            finally:
                self.reserved -= worst
            self.last_error = f"({error[:30]})"

            if repeat < self.retries:
                wait += JITTER.uniform(0, min(MAX_BACKOFF, self.backoff * 2**repeat))
                await asyncio.wait([self.stopping], timeout=wait)
        if error.startswith(NO_TEXT):
            return error
        error = f"{NO_REPLY} in {self.retries + 1} calls; the last: {error}"
        if len(self.bodies) == n_answered and (self.waiting or not n_answered):  # others would fare no better
            raise Stop(f"{self.base_url}: {error}")
        return error

    def _reserve(self, request: dict) -> float:
        """Counts a call, and adds its worst cost to `reserved`. Raises Stop if the call must not start."""
        worst = self._worst_cost(request)
        needed = self.cost + self.reserved + worst
        if self.budget and needed > self.budget * (1 + 1e-9):  # `needed` is a sum of many roundings
            raise Stop(f"the next call could pass the budget of ${self.budget:g}")
        if self.stopping.done():
            raise Stop
        self.reserved += worst
        self.calls += 1
        return worst

    def _read_error(self, status: int, wait: float, content: str) -> str:
        """Returns an HTTP error as one line. Raises Stop if no further call can succeed."""
        error = one_line(f"HTTP {status}: {content}", self.key_env)
        if status in (401, 403):
            variable = variable_for(self.base_url, self.key_env) or "no variable"
            error += f"; it was sent the key in {variable}, --key-env {server_of(self.base_url)}=NAME names another"
        is_lasting = status in (401, 402, 404) or "insufficient_quota" in content
        if status < 400 or is_lasting or wait > MAX_RETRY_AFTER:  # below 400 it redirects elsewhere
            raise Stop(f"{self.base_url}: {error} (it asks to wait {wait:.0f} seconds)")
        return error

    def _key(self, request: dict, attempt: int = 0) -> str:
        """Returns the hash under which the store has the reply to an attempt at a request."""
        identity = [self.model, self.known_as or self.base_url, request, attempt]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def _worst_cost(self, request: dict) -> float:
        tokens_in, tokens_out = token_limits(request)
        return dollars((tokens_in * self.scales[0], tokens_out * self.scales[1]), self.price)

    @contextmanager
    def _open_store(self) -> Iterator[None]:
        """Opens and locks the store, reads what is new in it, and cuts off a last line that a kill has torn."""
        self.store.parent.mkdir(parents=True, exist_ok=True)
        with open(self.store, "a+b") as self.file:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"{self.store}: another process is using it; wait for its end, or name another file")
            self.file.write(EARLY_LINES.pop(self.store, b""))
            self.file.seek(self.end)
            for line in self.file:
                if not line.endswith(b"\n"):
                    print(f"{self.store}: cut off the last line, which a kill had torn", file=sys.stderr)
                    self.file.truncate(self.end)
                    break
                self._remember(line)
            yield

    def _remember(self, line: bytes) -> None:
        """Adds a line of the store to the replies, the cost and the scales."""
        try:
            row = json.loads(line)
            self.cost += row["cost"]
            for side, limit in enumerate(token_limits(row["request"])):  # in, out
                self.scales[side] = max(self.scales[side], row["usage"][side] / limit)
            reason = why_no_answer(row["reply"])
            if not reason:
                self.bodies[row["key"]] = row["reply"]
                self.kinds.add(kind_of(row["request"]))
            elif reason.startswith(NO_TEXT):
                self.n_without_text[row["key"]] += 1
        except (ValueError, LookupError, TypeError):
            fail(f"{self.store}: after {self.end} bytes: no reply; delete the file or name another")
        self.end += len(line)

    def _save(self, request: dict, attempt: int, content: str) -> str:
        """Appends the body of a reply with HTTP 200 to the store, without keys; returns why it is no answer, or ""."""
        body = content  # of a page or an event stream
        with suppress(ValueError, RecursionError):
            body = json.loads(content)
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
        reason = why_no_answer(body)
        if reason:
            return one_line(f"{reason}: {content}", self.key_env)
        served_model = body.get("model", self.model)
        if served_model != self.served_model:
            self.served_model = served_model
            print(f"{self.base_url}: {served_model!r} answers, {self.model!r} was asked for", file=sys.stderr)
        return ""


def open_client(endpoint: Endpoint):
    """Returns a client of openai that sends one try per call, to this server alone, with its key or none."""
    from openai import AsyncOpenAI, DefaultAioHttpClient  # slow to import, and most runs ask nobody

    key = key_for(endpoint.base_url, endpoint.key_env)

    async def set_headers(request) -> None:
        # OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS and their like are for another server
        for name in set(request.headers) - KEPT_HEADERS:
            del request.headers[name]
        if key:
            request.headers["Authorization"] = f"Bearer {key}"

    http_client = DefaultAioHttpClient(
        timeout=None,  # `_call` has one
        follow_redirects=False,  # key and prompts are for this server alone
        event_hooks={"request": [set_headers]},
    )
    # openai wants a key, and does not send this one
    return AsyncOpenAI(api_key="none", base_url=endpoint.base_url, max_retries=0, http_client=http_client)


def try_endpoint(endpoint: Endpoint, request: dict, flag: str) -> None:
    """Asks the first request that the run will ask; exits with code 2, naming `flag`, if no answer comes.

    So a wrong key, model or URL, or a parameter that the server refuses, ends a run before its folder is made and
    before anything is generated. The reply is kept in the store; if the run has no folder yet, once it has one.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = endpoint.store
        if not store.exists():
            store = Path(folder, "check.jsonl")
        client = replace(endpoint, store=store, retries=CHECK_RETRIES)
        [reply] = client.ask([request], name=f"{flag} {endpoint.model}")
        endpoint.calls += client.calls
        if has_no_reply(reply.error):
            fail(f"{flag} {endpoint.model}: {endpoint.base_url}: {reply.error}")
        if store != endpoint.store:
            EARLY_LINES[endpoint.store] = EARLY_LINES.get(endpoint.store, b"") + store.read_bytes()
    print(f"{flag} {endpoint.model} answers at {endpoint.base_url}", flush=True)


# --- 4. whose key goes where

WORD = re.compile(r"[^\s=/@]+=[A-Za-z_][A-Za-z0-9_]*")  # HOST=NAME or HOST:PORT=NAME
URL_WITH_KEY = re.compile(r"^[^/]*@|://[^/]*@|\?")  # a user and password, or a query
SHORTEST_KEY = 8  # characters; a shorter one is a placeholder for `vllm serve`, such as EMPTY


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
    own = ""
    for known_url in (OPENAI_URL, os.environ.get("OPENAI_BASE_URL", "")):
        # with its scheme: a key for https must not travel over http, where others can read it
        if urlsplit(url.lower())[:2] == urlsplit(known_url.lower())[:2]:
            own = "OPENAI_API_KEY"
    return variables.get(server) or variables.get(host) or own


def server_of(url: str) -> str:
    """Returns host:port of a URL, or the host alone if it names no port."""
    return urlsplit(url).netloc.lower()


def read_variable(name: str) -> str:
    """Returns what an environment variable holds, without the line end that an editor leaves."""
    return os.environ.get(name, "").strip()


def check_url(url: str, flag: str) -> None:
    """Raises ValueError if a URL holds a user, a password or a key. The message does not repeat it."""
    if url and not URL_WITH_KEY.search(url) and not url.startswith(("http://", "https://")):
        raise ValueError(f"{flag} {url}: begin with http:// or https://")
    if URL_WITH_KEY.search(url):
        raise ValueError(
            f"{flag}: do not write a user, password or key into a URL: it is logged; set OPENAI_API_KEY, or name the "
            "variable that holds the key by --key-env HOST=NAME"
        )


def check_key_env(key_env: tuple[str, ...]) -> None:
    """Raises ValueError if a word of --key-env does not name a variable that holds a key.

    The message does not repeat the word: it may hold a key by mistake.
    """
    for number, word in enumerate(key_env, 1):
        if not (WORD.fullmatch(word) and read_variable(word.rpartition("=")[2])):
            raise ValueError(
                f"--key-env, word {number}: write HOST=NAME or HOST:PORT=NAME, without http:// and path; NAME is an "
                "environment variable that is set to the key, never the key itself, as commands are logged"
            )


def check_key(url: str, key_env: tuple[str, ...]) -> None:
    """Raises ValueError if the OpenAI API has no key, or if a key cannot be one."""
    key = key_for(url, key_env)
    if (url == OPENAI_URL and not key) or not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"{url}: set {variable_for(url, key_env)} to its key and nothing else, name another variable by --key-env "
            "HOST=NAME, or another endpoint by its URL"
        )


def one_line(text: str, key_env: tuple[str, ...] = ()) -> str:
    """Shortens a text for a message: one line of at most 300 characters, without any key."""
    return " ".join(hide_keys(text, key_env).split())[:300]


def hide_keys(text: str, key_env: tuple[str, ...] = ()) -> str:
    """Replaces by *** the key in OPENAI_API_KEY, and those in the variables that `key_env` names."""
    variables = ["OPENAI_API_KEY"]
    variables += [word.rpartition("=")[2] for word in key_env]
    for variable in variables:
        key = read_variable(variable)
        if len(key) >= SHORTEST_KEY:  # a placeholder may occur in any text
            text = text.replace(key, "***")
    return text
