"""Asks judges, teachers and simulated users at any OpenAI-compatible chat endpoint, hosted or `vllm serve`.

    judge = Endpoint("gpt-4o-2024-05-13", run / "judge.jsonl", budget=20, price=(5, 15))
    print(judge.estimate(requests))
    try_endpoint(judge, requests[0], "--judge", parse)  # before anything else is paid for
    replies = judge.ask(requests, parse)

A request is the body of a `chat/completions` call without `model`: messages, max_tokens, temperature ...

Whatever a server sends with HTTP 200 is appended to the file `store` as it came, before anything parses it.
An answer's key is the hash of model, request and attempt, so the same command repeats no answered call after
Ctrl-C or kill, also if the model has another URL by then, and another `parse` needs no new call. Equal requests
are asked once and share the reply. To sample several replies, vary the requests' `seed`.

After an HTTP error, a lost connection, a time-out or a body without a completion the request is sent again,
not before the time that a Retry-After names. None of these is read as an empty answer. A completion without a
text is asked for once more; a request that gets a second one is refused for good. If all tries of a request
fail while nothing else is answered and others wait, or if no request gets an answer at all, the run ends with
one line and exit code 2; otherwise the one request has an error. A wrong key, an unknown model or a spent
budget ends the run at once. Calls under way then finish and are stored.

An API key goes only to the server that it belongs to. It is never printed or stored, even if a server repeats
it. A server without a key is asked without one, which is enough for `vllm serve`.
"""

import asyncio
import hashlib
import json
import os
import random
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tqdm import tqdm

from utils import fail

OPENAI_URL = "https://api.openai.com/v1"
MAX_WAIT = 60  # seconds between two tries, unless the server names a time
LONGEST_BAN = 3600  # seconds that a Retry-After is waited for, at most
CHECK_RETRIES = 2  # of `try_endpoint`; other calls have `retries`
# tokens per second; a call waits as long as max_tokens take at this rate. A dead connection looks the same, so
# it costs 9 minutes for 8,192 tokens; a reply of half that length may come at half the rate
SLOWEST = 15
REPEAT_TEMPERATURE = 0.3  # at least, of a request whose reply could not be read
NO_REPLY = "no reply"  # begins the error of a request whose calls all failed; see `has_no_reply`
SHORTEST_KEY = 16  # characters; a shorter one is a placeholder for a local server, such as EMPTY or anything
ROUNDING = 1e-9  # US dollars that sums of prices may be wrong by
KEPT_HEADERS = {"host", "content-length", "content-type", "accept", "accept-encoding", "user-agent"}
TWO_LINES = "The first line of an answer.\nThe second line."  # what judges are shown before there are answers
JITTER = random.Random()  # not the global generator, from which training draws
CHECKS = Counter()  # US dollars that `try_endpoint` has paid in this process, by the store of the run


class Reply(NamedTuple):
    value: Any  # the result of `parse`; None if the reply is invalid
    text: str  # text of the last attempt, as it came; "" if there is no reply
    error: str  # why the reply is invalid; "" if it is valid
    usage: tuple[int, int]  # tokens in and out of the last attempt; zeros if the endpoint does not tell
    choice: dict  # finish_reason, logprobs, message ... of the last attempt; {} if there is no reply


# --- 1. requests and replies


def resolve_url(base_url: str) -> str:
    """Returns `base_url`; if it is empty, OPENAI_BASE_URL, or else the URL of the OpenAI API."""
    return (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")


def token_limits(request: dict) -> tuple[int, int]:
    """Returns the tokens of a request, taken as a quarter of its bytes, and how many its reply may have."""
    size = len(json.dumps(request, ensure_ascii=False).encode(errors="replace"))
    return size // 4 + 1, request["max_tokens"]


def dollars(tokens: tuple[float, float], price: tuple[float, float]) -> float:
    """Returns the cost of tokens (in, out) at prices (in, out) per million."""
    return (tokens[0] * price[0] + tokens[1] * price[1]) / 1e6


def completion_in(body: Any) -> dict | None:
    """Returns the choice in the body of a reply with HTTP 200; None if it has none, if its content is not a
    text, or if it ended by an error."""
    with suppress(LookupError, TypeError, AttributeError):
        choice = body["choices"][0]
        if isinstance(text_of(choice), str) and not re.search("error|abort|cancel", reason_of(choice)):
            return choice
    return None


def is_answer(body: Any) -> bool:
    """Returns whether the body of a reply with HTTP 200 holds an answer.

    That is a completion with a text, or one that the limit of its tokens or a filter cut off, perhaps before
    its first word. Text in `reasoning_content` is not an answer.
    """
    choice = completion_in(body)
    if choice is None:
        return False
    return text_of(choice).strip() != "" or is_cut_off(choice) or "filter" in reason_of(choice)


def reason_of(choice: dict) -> str:
    """Returns why a completion ended, in lower case; servers have different words for it."""
    return str(choice.get("finish_reason")).lower()


def is_cut_off(choice: dict) -> bool:
    """Returns whether the limit of its tokens ended a completion: length, max_tokens, MAX_TOKENS ..."""
    return re.search("length|max|limit", reason_of(choice)) is not None


def text_of(choice: dict) -> str:
    """Returns the text of a reply's choice; a refusal has a field of its own."""
    message = choice["message"]
    return message.get("content") or message.get("refusal") or ""


def name_in(answer: dict) -> str:
    """Returns what the model of an answer calls itself; "" if it does not say."""
    return str(answer.get("model") or "")


def read_usage(body: Any) -> tuple[int, int]:
    """Returns the tokens in and out of a reply; zeros if the endpoint does not tell."""
    with suppress(LookupError, TypeError, ValueError, OverflowError):
        return int(body["usage"]["prompt_tokens"]), int(body["usage"]["completion_tokens"])
    return 0, 0


def has_no_reply(error: str) -> bool:
    """Tells from a Reply's `error` whether every call failed, as in an outage: a later start may get one."""
    return error.startswith(NO_REPLY)


# --- 2. the client


@dataclass
class Endpoint:
    """Asks one model at one endpoint, and keeps its replies in one file.

    Reports may read `cost` in US dollars and `calls`.

    A call starts only if its worst case fits the budget: as many tokens as `token_limits` says. Replies cost
    what their usage says, broken-off ones their worst case, HTTP errors and calls that never connected
    nothing.
    """

    model: str
    store: Path | str  # jsonl file of the replies, for one process at a time
    base_url: str = ""  # such as http://localhost:8000/v1; empty: OPENAI_BASE_URL, or else the OpenAI API
    concurrency: int = 32  # calls under way at once
    timeout: float = 120.0  # seconds for a call, to the last byte; more for a long reply, see SLOWEST
    retries: int = 8  # after HTTP 408, 409, 429 or 5xx, a time-out, a lost connection, no completion
    budget: float = 0  # US dollars for everything in the store and in this process; 0: without limit
    price: tuple[float, float] = (0, 0)  # US dollars per million tokens in and out
    key_env: tuple[str, ...] = ()  # words HOST=NAME of --key-env; see `key_for`
    omit: tuple[str, ...] = ()  # parameters that are not sent, as this server refuses them
    fresh: bool = False  # whether --overwrite is about to delete the store
    backoff: float = 1  # seconds; repeat n (from 0) waits 0 .. backoff * 2^n, see MAX_WAIT

    def __post_init__(self):
        self.store = Path(self.store)
        self.base_url = resolve_url(self.base_url)
        self.cost = CHECKS[self.store]
        self.reserved = 0.0  # dollars; the worst case of the calls under way
        self.calls = 0
        self.bodies = {}  # answers by key, as the store has them
        self.empty = defaultdict(list)  # completions without a text, by key
        self.end = 0  # bytes of the store that have been read
        if not re.fullmatch(r"https?://[^@?]+", self.base_url):
            fail(
                "the base URL: write http:// or https:// and a host, without a user, password or key, as it is "
                "logged; --key-env HOST=NAME names the variable that holds the key"
            )
        for number, word in enumerate(self.key_env, 1):
            host, _, variable = word.rpartition("=")
            if not host or "/" in host or not read_variable(variable):
                # does not repeat the word, which may hold a key by mistake
                fail(
                    f"--key-env, word {number}: write HOST=NAME or HOST:PORT=NAME; NAME is an environment "
                    "variable that is set to the key, never the key itself, as commands are logged"
                )
        self.key = key_for(self.base_url, self.key_env)
        if self.base_url == OPENAI_URL and not self.key:
            fail(
                f"{OPENAI_URL}: set OPENAI_API_KEY to its key, name another variable by --key-env HOST=NAME, "
                "or name another endpoint by its URL"
            )
        if self.budget and not any(self.price):
            fail("a budget needs a price: US dollars per million tokens in and out")

    def estimate(self, requests: list[dict]) -> dict:
        """Returns the calls, tokens and dollars that `ask` will need at most if every call succeeds.

        Of equal requests, which `ask` sends once, each counts: before answers are there, one text stands for all.
        """
        if self.store.exists():
            self._read_store()
        to_ask = [request for request in requests if self._key(request) not in self.bodies]
        limits = [token_limits(request) for request in to_ask]
        estimate = {
            "calls": len(to_ask),
            "input_tokens": sum(tokens_in for tokens_in, _ in limits),
            "output_tokens_at_most": sum(tokens_out for _, tokens_out in limits),
        }
        if any(self.price):
            estimate["dollars_at_most"] = sum(map(self._worst_cost, to_ask))
        return estimate

    def ask(
        self,
        requests: list[dict],
        parse: Callable | list[Callable] = str,
        parse_retries: int = 3,
        name: str = "judge",
    ) -> list[Reply]:
        """Returns the replies in the order of the requests.

        `parse(text)`, one for all or one for each request, raises ValueError for a text it cannot read; the
        request is then asked again, up to `parse_retries` times, with another seed and at REPEAT_TEMPERATURE
        at least. So it is if a content filter or the limit of its tokens cut the reply off. Of a request for
        log-probabilities `parse` gets the whole choice, cut off or not. Without `parse` the first reply
        counts, as that of a tested model does, and may be cut off. A request without a readable reply has the
        value None and an `error`. `name` is shown in the progress bar and in messages.
        """

        async def answer(request: dict, parse: Callable) -> Reply:
            """Calls until a reply is readable, too many are not, or none comes."""
            async with slots:
                self.waiting -= 1
                for attempt in range(parse_retries + 1):
                    key = self._key(request, attempt)
                    error = ""
                    if key not in self.bodies:
                        error = await self._call(request, attempt)
                    if error:
                        reply = Reply(None, "", error, (0, 0), {})
                        break
                    reply = self._read(request, self.bodies[key], parse)
                    if not reply.error or parse is str:
                        break
            bar.update()
            return reply

        async def answer_all() -> list[Reply]:
            async with open_client(self.base_url, self.key) as self.client:
                return await asyncio.gather(*[answer(*question) for question in unique.values()])

        self.store.parent.mkdir(parents=True, exist_ok=True)
        self._read_store()
        parses = parse if isinstance(parse, list) else [parse] * len(requests)
        unique = {}
        for request, own_parse in zip(requests, parses, strict=True):
            unique[self._key(request)] = (request, own_parse)
        slots = asyncio.Semaphore(self.concurrency)
        self.waiting = len(unique)  # requests that no call was made for yet
        self.stop_reason = ""  # why no further call can succeed, or may be paid for
        with tqdm(total=len(unique), desc=name) as bar:
            answers = asyncio.run(answer_all())
        if answers and not self.bodies:  # as where a server refuses a parameter of all requests
            self.stop_reason = self.stop_reason or f"{self.base_url}: {answers[0].error}"
        if self.stop_reason:
            fail(
                f"{name}: {self.stop_reason}; spent ${self.cost:.4f}; the same command, with --resume if it "
                "has that, goes on from here"
            )
        replies = dict(zip(unique, answers))
        return [replies[self._key(request)] for request in requests]

    def _read(self, request: dict, body: dict, parse: Callable) -> Reply:
        """Makes a reply of an answer."""
        choice = body["choices"][0]
        text = text_of(choice)
        has_logprobs = "logprobs" in request
        value = None
        error = ""
        if "filter" in reason_of(choice):
            error = f"filtered: {json.dumps(choice)}"
        elif is_cut_off(choice) and parse is not str and not has_logprobs:
            error = "unreadable: the limit of its tokens cut the reply off"
        else:
            try:
                value = parse(choice if has_logprobs else text)
            except (ValueError, RecursionError) as e:  # the second: JSON of a thousand brackets
                error = f"unreadable: {e}"
        return Reply(value, text, self._in_one_line(error), read_usage(body), choice)

    async def _call(self, request: dict, attempt: int) -> str:
        """Calls until an answer is stored; returns "", or why there is none.

        Sets `stop_reason` if no further call can succeed, or may be paid for.
        """
        from aiohttp import ClientConnectorError
        from openai import APIConnectionError, APIStatusError

        body = {**request, "model": self.model}
        if attempt > 0:  # a server that samples as before would give the reply that could not be read again
            if "temperature" in body:
                body["temperature"] = max(body["temperature"], REPEAT_TEMPERATURE)
            if "seed" in body:
                body["seed"] += attempt
        for name in self.omit:
            body.pop(name, None)
        n_answered = len(self.bodies)
        key = self._key(request, attempt)
        for repeat in range(self.retries + 1):
            if len(self.empty[key]) > 1:
                last = json.dumps(self.empty[key][-1])
                return self._in_one_line(f"refused: two replies without a text; the last: {last}")
            told_to_wait = 0.0
            worst = self._worst_cost(request)
            while not self._fits(worst) and not self.stop_reason:
                if self.reserved <= ROUNDING:
                    self.stop_reason = f"the next call could pass the budget of ${self.budget:g}"
                await asyncio.sleep(0.1)  # the calls under way will hardly cost their worst
            if self.stop_reason:
                return self.stop_reason
            self.reserved += worst
            self.calls += 1
            try:
                async with asyncio.timeout(max(self.timeout, request["max_tokens"] / SLOWEST)):
                    content = await self.client.post("/chat/completions", cast_to=str, body=body)
                if self._save(request, attempt, content):
                    return ""
                error = self._in_one_line(f"no completion in HTTP 200: {content}")
            except APIStatusError as e:
                error = self._in_one_line(f"HTTP {e.status_code}: {e.response.text}")
                if e.status_code in (401, 402, 404):
                    self.stop_reason = f"{self.base_url}: {error}"
                if e.status_code == 401:
                    self.stop_reason += "; --key-env names the variable of its key"
                if e.status_code in (400, 422):
                    error += "; --omit NAME, or --model-omit NAME of a tested model, leaves a refused parameter out"
                if e.status_code < 500 and e.status_code not in (408, 409, 429):
                    return error  # a repeat would not help
                told_to_wait = self.client._parse_retry_after_header(e.response.headers) or 0.0
            except (TimeoutError, APIConnectionError) as e:
                cause = e.__cause__  # of the transport, which wraps that of aiohttp; a timeout may have none
                if not isinstance(getattr(cause, "__cause__", None), ClientConnectorError):
                    self.cost += worst  # the reply may have been generated, and billed
                error = self._in_one_line(f"{type(e).__name__}: {cause or 'no reply in time'}")
            finally:
                self.reserved -= worst
            if repeat < self.retries:
                wait = JITTER.uniform(0, min(self.backoff * 2**repeat, MAX_WAIT))
                await asyncio.sleep(wait + min(max(0.0, told_to_wait), LONGEST_BAN))
        error = f"{NO_REPLY} in {self.retries + 1} calls; the last: {error}"
        if self.waiting and len(self.bodies) == n_answered:  # others would fare no better
            self.stop_reason = f"{self.base_url}: {error}"
        return error

    def _fits(self, worst: float) -> bool:
        return not self.budget or self.cost + self.reserved + worst <= self.budget

    def _worst_cost(self, request: dict) -> float:
        return dollars(token_limits(request), self.price)

    def _key(self, request: dict, attempt: int = 0) -> str:
        """Returns the hash under which the store has the reply to an attempt at a request."""
        identity = [self.model, request, attempt]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def _read_store(self) -> None:
        """Reads what is new in the store, and cuts off a last line that a kill has torn."""
        with open(self.store, "a+b") as file:
            file.seek(self.end)
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(self.end)
                    break
                self.end += len(line)
                row = json.loads(line)
                self.cost += row["cost"]
                if is_answer(row["reply"]):
                    self.bodies[row["key"]] = row["reply"]
                elif completion_in(row["reply"]):
                    self.empty[row["key"]].append(row["reply"])

    def _save(self, request: dict, attempt: int, content: str) -> bool:
        """Appends the body of a reply with HTTP 200 to the store; tells whether it is an answer."""
        body = content  # of a page or an event stream
        with suppress(ValueError, RecursionError):
            body = json.loads(content)
        usage = read_usage(body)
        cost = dollars(usage, self.price)
        if not any(usage):
            cost = self._worst_cost(request)
        row = {
            "key": self._key(request, attempt),
            "request": request,
            "reply": body,
            "usage": usage,
            "cost": cost,
        }
        with open(self.store, "a") as file:
            file.write(hide_key(json.dumps(row), self.key) + "\n")
        self._read_store()  # as the next start does
        return is_answer(body)

    def _in_one_line(self, text: str) -> str:
        """Shortens a text for a message: one line of at most 300 characters, without any key."""
        return " ".join(hide_key(text, self.key).split())[:300]


def open_client(base_url: str, key: str):
    """Returns a client of openai that sends one try per call, to this server alone, with its key or none."""
    from openai import AsyncOpenAI, DefaultAioHttpClient  # slow to import, and most runs ask nobody

    async def set_headers(request) -> None:
        # OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS and their like are for another server
        for name in request.headers.keys() - KEPT_HEADERS:
            del request.headers[name]
        if key:
            request.headers["Authorization"] = f"Bearer {key}"

    http_client = DefaultAioHttpClient(
        timeout=None,  # `_call` has one
        follow_redirects=False,  # key and prompts are for this server alone
        event_hooks={"request": [set_headers]},
    )
    # openai wants a key, and does not send this one
    return AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0, http_client=http_client)


def try_endpoint(endpoint: Endpoint, request: dict, flag: str, parse: Callable = str.strip) -> None:
    """Asks the first request that the run will ask, and reads the reply as the run will; exits with code 2,
    naming `flag`, if no answer comes or if it cannot be read.

    So a wrong key, model or URL, a parameter that the server refuses, or a judge that writes something else
    ends a run before its folder is made and before anything is generated. The reply is not kept; what it cost
    counts in this process. A run that is resumed was checked at its start.
    """
    if endpoint.store.exists() and not endpoint.fresh:
        return
    with tempfile.TemporaryDirectory() as folder:
        client = replace(endpoint, store=Path(folder, "check.jsonl"), retries=CHECK_RETRIES)
        [reply] = client.ask([request], parse, name=f"{flag} {endpoint.model}")
    if reply.error:
        fail(f"{flag} {endpoint.model}: {endpoint.base_url}: {reply.error}")
    endpoint.calls += client.calls
    endpoint.cost += client.cost
    CHECKS[endpoint.store] += client.cost
    print(f"{flag} {endpoint.model} answers at {endpoint.base_url}", flush=True)


def check_answered(errors: list[str], who: str, max_invalid: float) -> None:
    """Ends a run before its summary if a larger share of the calls than `max_invalid` got no reply, as in an
    outage: a later start asks them again.

    Fewer are invalid rows. So are replies that cannot be read and requests that are refused for good, which
    would only come again.

    Args:
        errors: of every reply, "" for a good one.
        who: what was asked.
    """
    unanswered = [error for error in errors if has_no_reply(error)]
    if len(unanswered) > max_invalid * len(errors):
        fail(
            f"{who}: {len(unanswered)} of {len(errors)} got no reply; the same command, with --resume if it "
            "has that, asks only them again; --max-invalid, if it has that, takes more as invalid. The first: "
            f"{unanswered[0]}"
        )


# --- 3. whose key goes where


def key_for(url: str, key_env: tuple[str, ...] = ()) -> str:
    """Returns the API key that belongs to the server of `url`; "" if there is none."""
    variables = {}
    for word in key_env:
        host, _, variable = word.rpartition("=")
        variables[host.lower()] = variable
    server = urlsplit(url.lower())
    own = ""
    for known_url in (OPENAI_URL, resolve_url("")):
        # with its scheme: a key for https must not travel over http, where others can read it
        if server[:2] == urlsplit(known_url.lower())[:2]:
            own = "OPENAI_API_KEY"
    return read_variable(variables.get(server.netloc) or variables.get(server.hostname) or own)


def hide_key(text: str, key: str) -> str:
    """Replaces the key that a server was sent by ***, as the server may repeat it."""
    if len(key) < SHORTEST_KEY:
        return text
    return text.replace(key, "***")


def read_variable(name: str) -> str:
    """Returns what an environment variable holds, without the line end that an editor leaves."""
    return os.environ.get(name, "").strip()
