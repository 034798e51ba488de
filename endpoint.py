"""One client for every OpenAI-compatible chat endpoint: judge, teacher, user simulator; a hosted API or `vllm serve`.

    judge = Endpoint("gpt-4o-2024-05-13", run / "judge.jsonl", budget=20, price=(5, 15))
    print(judge.estimate(requests))
    replies = judge.ask(requests, parse)

A request is the body of a call of `chat/completions` without `model`: messages, temperature, max_tokens ...
Every reply is written to `store` as it came, one jsonl line a call, before anything reads it. A line's key is the sha256 of
model, base URL, request and attempt, so the same command after Ctrl-C or kill -9 repeats no call that was answered, and
another `parse` reads the stored replies without a call. For the same reason equal requests are asked once and share the reply:
give each its own `seed` to sample more than one. Calls that failed are not stored; the next start makes them again.
The key comes from OPENAI_API_KEY and is never printed or stored, even if a server echoes it. Without one "none" is sent, which
will do for `vllm serve`.
What ends a run (wrong key, unknown model, no credit, budget) lets calls under way finish and exits with 2 and one line.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from tqdm import tqdm

import watchdog

OPENAI_URL = "https://api.openai.com/v1"
MAX_BACKOFF = 60  # seconds
MAX_RETRY_AFTER = 600  # seconds; an endpoint that asks for a longer wait ends the run


class Reply(NamedTuple):
    value: Any  # what `parse` made of the text; the text itself without `parse`; None if invalid
    text: str  # raw, of the last attempt; "" for a refusal and where there is no reply
    error: str  # "", or why the reply is invalid
    usage: tuple[int, int]  # tokens in and out of the last attempt; zeros where the endpoint does not tell
    choice: (
        dict  # of the last attempt, as it came: finish_reason, logprobs, message; {} where there is no reply
    )


class Stop(Exception):
    """No further call is to be started."""


def fail(message: str) -> None:
    import runs  # takes seconds, and scripts have done it

    runs.fail(message)


def api_key() -> str:
    return os.environ.get("OPENAI_API_KEY", "").strip()


def resolve_url(base_url: str) -> str:
    """Where an endpoint given as `base_url` is; empty: OPENAI_BASE_URL if it is set, else the OpenAI API."""
    return (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")


def hide_key(text: str) -> str:
    """Without the key, if it is one: `vllm serve` is given placeholders, as EMPTY, that may stand in any text."""
    return text.replace(api_key(), "***") if len(api_key()) >= 8 else text


def one_line(text: str) -> str:
    """For messages: one line of at most 300 characters, without the key."""
    return " ".join(hide_key(text).split())[:300]


def token_limits(request: dict) -> tuple[int, int | None]:
    """Tokens of a request: in, estimated as the bytes of its UTF-8 JSON / 4; out, at most (None: without limit)."""
    size = len(json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return size // 4 + 1, request.get("max_completion_tokens") or request.get("max_tokens")


def retry_after(headers) -> float:
    """Seconds that the header Retry-After asks to wait, given as a number or as a date; 0 without one."""
    value = headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(
        ValueError, TypeError, OverflowError
    ):  # a date that is none; a year or a zone that no date has
        now = (
            parsedate_to_datetime(headers["date"]).timestamp() if "date" in headers else time.time()
        )  # ours may be wrong
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    return 0.0


def read_body(content: bytes) -> dict:
    """The chat completion that an endpoint sent; ValueError for anything else."""
    with suppress(ValueError, RecursionError):
        if is_completion(body := json.loads(content)):
            return body
    raise ValueError(f"the body is no chat completion: {content.decode(errors='replace')!r}")


def error_code(content: bytes) -> str | None:
    """The code that OpenAI's API gives beside an HTTP status."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        return json.loads(content)["error"]["code"]
    return None


def is_completion(body) -> bool:
    with suppress(LookupError, TypeError, AttributeError):
        return isinstance(body["choices"][0]["message"].get("content"), str | None)
    return False


def read_usage(body: dict) -> tuple[int, int] | None:
    """Tokens in and out; None where the endpoint does not tell."""
    usage = body.get("usage")
    tokens = (
        [usage.get(k) for k in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else [None]
    )
    return tuple(tokens) if all(type(n) is int and n >= 0 for n in tokens) else None


class Endpoint:
    """One model of one endpoint, its replies in one file. To be reported: `cost` in US dollars, `calls`, `repeats`.

    Args:
        store: jsonl file of the replies; one process at a time.
        base_url: empty: OPENAI_BASE_URL if it is set, else the OpenAI API; `vllm serve`: http://localhost:8000/v1.
        concurrency: calls under way at once.
        timeout: seconds for a call, to the last byte.
        retries: repeats of a call after 408, 409, 429, 5xx, time-out, dropped connection or a body that is no completion.
        budget: US dollars for everything in the store and in this process; 0: no limit. A call starts only if its worst
            case fits: `token_limits`, scaled up once a reply has used more than that. It counts by its usage when it was
            answered, by its worst case when it broke off, and not when it was refused with an error status.
        price: US dollars per million tokens in and per million tokens out.
        backoff: the wait before repeat n is uniform in 0 .. min(60, backoff * 2^n) seconds, n from 0, after any Retry-After.
    """

    def __init__(
        self,
        model: str,
        store: Path | str,
        base_url: str = "",
        concurrency: int = 32,
        timeout: float = 120.0,
        retries: int = 8,
        budget: float = 0,
        price: tuple[float, float] = (0, 0),
        backoff: float = 1,
    ):
        self.model, self.store = model, Path(store)
        self.base_url = resolve_url(base_url)
        self.concurrency, self.timeout, self.retries, self.backoff = concurrency, timeout, retries, backoff
        self.budget, self.price = budget, price
        self.cost, self.calls, self.repeats, self.last_error = 0.0, 0, 0, ""
        self.bodies, self.end = {}, 0  # replies by key; bytes of the store that they came from
        self.reserved, self.scales = (
            0.0,
            (1.0, 1.0),
        )  # worst case of calls under way; most tokens used over `token_limits`
        self.random = random.Random()  # not the global generator, which training draws from
        if "@" in self.base_url or "?" in self.base_url:
            fail("no user, password or key belongs into a base URL: it is logged; set OPENAI_API_KEY")
        if not self.base_url.startswith(("http://", "https://")):
            fail(f"the base URL {self.base_url!r} must begin with http:// or https://")
        if concurrency < 1 or timeout <= 0 or retries < 0:
            fail(
                f"concurrency {concurrency} and timeout {timeout} must be positive, retries {retries} not negative"
            )
        if budget and not any(price):
            fail("a budget needs a price: US dollars per million tokens in and out")

    def estimate(self, requests: list[dict]) -> dict:
        """What `ask` would do, unreadable replies and repeats aside; None without an upper limit (no max_tokens), or a
        price."""
        if self.store.exists():
            with self._open_store():
                pass
        unique = {self._key(r): r for r in requests}
        todo = [r for key, r in unique.items() if key not in self.bodies]
        tokens_in, tokens_out = zip(*map(token_limits, todo)) if todo else ((), ())
        limited = None not in tokens_out
        priced = limited and any(self.price)
        return {
            "calls": len(todo),
            "answered": len(unique) - len(todo),
            "input_tokens": sum(tokens_in),
            "output_tokens_at_most": sum(tokens_out) if limited else None,
            "dollars_at_most": sum(map(self._worst_cost, todo)) if priced else None,
        }

    def ask(
        self,
        requests: list[dict],
        parse: Callable[[str], Any] = str,
        parse_retries: int = 3,
        name: str = "judge",
    ) -> list[Reply]:
        """Replies in the order of the requests.

        `parse(text)` raises ValueError for a text it cannot read, and the request is asked again, up to `parse_retries`
        times. A refusal, an empty reply or one cut off by max_tokens comes to it as it is. A request without a readable
        reply is invalid: no value, and `error` says why. `name` stands before the progress bar and messages.
        """
        for number, request in enumerate(requests, 1):
            if request.get("stream") or request.get("n", 1) != 1:
                raise ValueError(
                    f"request {number}: stream and n > 1 are not supported; for samples, vary the seed"
                )
            if self.budget and token_limits(request)[1] is None:
                fail(f"{name}: a budget needs max_tokens in every request; request {number} has none")
        if (
            not api_key()
            and self.base_url == OPENAI_URL
            or not (api_key().isascii() and api_key().isprintable())
        ):
            fail(f"{name}: {self.base_url} needs a key; set OPENAI_API_KEY to it and nothing else")
        unique, read = (
            {self._key(r): r for r in requests},
            lambda request: self._read(request, parse, parse_retries),
        )
        with self._open_store():
            done = {key: reply for key, r in unique.items() if isinstance(reply := read(r), Reply)}
            with tqdm(total=len(unique), initial=len(done), desc=name, unit="request") as bar:
                stopped = asyncio.run(self._ask_all(unique, done, read, bar))
        if stopped:
            fail(
                f"{name}: {stopped}; spent ${self.cost:.4f}. {len(done)} of {len(unique)} requests are done, the replies in "
                f"{self.store}; {len(unique) - len(done)} remain: the same command goes on from there"
            )
        return [done[self._key(r)] for r in requests]

    def _key(self, request: dict, attempt: int = 0) -> str:
        return hashlib.sha256(
            json.dumps([self.model, self.base_url, request, attempt], sort_keys=True).encode()
        ).hexdigest()

    def _dollars(self, tokens: tuple[float, float]) -> float:
        return (tokens[0] * self.price[0] + tokens[1] * self.price[1]) / 1e6

    def _worst_cost(self, request: dict) -> float:
        return self._dollars(tuple((n or 0) * scale for n, scale in zip(token_limits(request), self.scales)))

    @contextmanager
    def _open_store(self) -> Iterator[None]:
        """Opens and locks the store, and reads what is new in it; the last line is cut off if a kill has torn it."""
        self.store.parent.mkdir(parents=True, exist_ok=True)
        with open(self.store, "a+b") as self.file:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"{self.store}: another process is using it; wait for that, or name another file")
            self.file.seek(self.end)
            for line in self.file:
                if not line.endswith(b"\n"):
                    print(f"{self.store}: cut off the last line, which a kill had torn", file=sys.stderr)
                    self.file.truncate(self.end)
                    break
                try:
                    self._remember(line)
                except (ValueError, LookupError, TypeError):
                    fail(
                        f"{self.store}:{len(self.bodies) + 1}: not a line of such a store; delete it or name another file"
                    )
            yield

    def _remember(self, line: bytes) -> None:
        row = json.loads(line)
        counts = all(type(n) is int for n in row["usage"]) and 0 <= row["cost"] < float("inf")
        if not (counts and is_completion(row["reply"])):
            raise ValueError("no stored reply")
        used = zip(self.scales, row["usage"], token_limits(row["request"]))
        self.scales = tuple(max(scale, n / limit) if limit else scale for scale, n, limit in used)
        self.cost += row["cost"]
        self.bodies[row["key"]] = row["reply"]
        self.end += len(line)

    def _save(self, request: dict, attempt: int, body: dict) -> None:
        usage = read_usage(body)
        row = {
            "key": self._key(request, attempt),
            "attempt": attempt,
            "model": self.model,
            "request": request,
            "reply": body,
            "usage": usage or (0, 0),
            "cost": self._dollars(usage) if usage else self._worst_cost(request),
            "time": time.time(),
        }
        line = hide_key(json.dumps(row)).encode() + b"\n"
        self.file.write(line)
        self.file.flush()
        watchdog.beat()
        self._remember(line)  # from the line, so that a second start sees the same

    def _read(self, request: dict, parse: Callable[[str], Any], parse_retries: int) -> Reply | int:
        """The Reply that the stored ones amount to, or else the attempt that is to be made."""
        for attempt in range(parse_retries + 1):
            if (body := self.bodies.get(self._key(request, attempt))) is None:
                return attempt
            usage, choice = read_usage(body) or (0, 0), body["choices"][0]
            text = choice["message"].get("content") or ""
            try:
                return Reply(parse(text), text, "", usage, choice)
            except (ValueError, RecursionError) as e:  # the second from JSON of a thousand brackets
                error = one_line(f"unreadable in {attempt + 1} attempts: {e or type(e).__name__}")
        return Reply(None, text, error, usage, choice)

    async def _ask_all(
        self, requests: dict[str, dict], done: dict[str, Reply], read: Callable, bar: tqdm
    ) -> str:
        """Adds the Replies that are missing to `done`; returns "", or why it stopped before all were there."""
        headers = {"Authorization": f"Bearer {api_key() or 'none'}", "Content-Type": "application/json"}
        place = urlsplit(self.base_url)
        proxy = (
            None
            if urllib.request.proxy_bypass(place.netloc)
            else urllib.request.getproxies().get(place.scheme)
        )
        client = aiohttp.ClientSession(
            headers=headers,
            proxy=proxy,
            timeout=aiohttp.ClientTimeout(),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self.stopping, reasons, queue = (
            asyncio.Event(),
            [],
            (item for item in requests.items() if item[0] not in done),
        )
        invalid = sum(bool(r.error) for r in done.values())

        async def worker():
            nonlocal invalid
            for key, request in queue:  # one queue for all workers
                try:
                    while isinstance(reply := read(request), int):
                        if error := await self._call(client, request, reply):
                            reply = Reply(None, "", error, (0, 0), {})
                            break
                except Stop as e:
                    reasons.append(str(e))
                    self.stopping.set()
                    return
                done[key] = reply
                invalid += bool(reply.error)
                cost = f"${self.cost:.2f}" if any(self.price) else "no price given"
                bar.set_postfix_str(
                    f"calls {self.calls}, {cost}, invalid {invalid}, repeats {self.repeats} "
                    f"{self.last_error}",
                    refresh=False,
                )
                bar.update()

        async with client:
            await asyncio.gather(*(worker() for _ in range(min(self.concurrency, len(requests)))))
        return reasons[0] if reasons else ""

    async def _call(self, client: aiohttp.ClientSession, request: dict, attempt: int) -> str:
        """Calls until a reply is stored and returns "", else why there is none. Raises Stop."""
        for n in range(self.retries + 1):
            worst = self._worst_cost(request)
            if self.stopping.is_set():
                raise Stop
            if self.budget and self.cost + self.reserved + worst > self.budget * (
                1 + 1e-9
            ):  # a sum of many roundings
                raise Stop(f"the next call could pass the budget of ${self.budget:g}")
            self.calls, self.repeats, self.reserved, wait = (
                self.calls + 1,
                self.repeats + (n > 0),
                self.reserved + worst,
                0.0,
            )
            url, sent = (
                f"{self.base_url}/chat/completions",
                json.dumps({**request, "model": self.model}, ensure_ascii=False),
            )
            try:
                async with asyncio.timeout(self.timeout), client.post(url, data=sent.encode()) as answer:
                    content, code, wait = await answer.read(), answer.status, retry_after(answer.headers)
                if code < 300:
                    self._save(request, attempt, read_body(content))
                    return ""
                error, self.last_error = (
                    one_line(f"HTTP {code}: {content.decode(errors='replace')}"),
                    f"(HTTP {code})",
                )
                if (
                    code in (401, 402, 404)
                    or (code == 403 and not self.bodies)
                    or error_code(content) == "insufficient_quota"
                ):
                    raise Stop(
                        f"{self.base_url}: {error}; check OPENAI_API_KEY, model, base URL and credit"
                    ) from None
                if wait > MAX_RETRY_AFTER:
                    raise Stop(f"{self.base_url}: {error}; it asks to wait {wait:.0f} seconds") from None
                if code < 500 and code not in (408, 409, 429):
                    return error
            except UnicodeEncodeError as e:  # half a surrogate pair in a message
                return f"the request cannot be sent: {e}"
            except (TimeoutError, aiohttp.ClientError, ValueError) as e:
                self.cost += worst  # it may have been generated, and billed
                self.last_error = f"({type(e).__name__})"
                error = one_line(f"{type(e).__name__}: {e} {e.__cause__ or ''}")
            finally:
                self.reserved -= worst
            if n < self.retries:
                wait += self.random.uniform(0, min(MAX_BACKOFF, self.backoff * 2**n))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), wait)
        return f"no reply in {self.retries + 1} calls; the last: {error}"
