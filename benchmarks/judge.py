"""The judge of an evaluation, --judge: who it is, whether it can be asked, what it is asked and what it
replies."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlmt.chat import load_tokenizer
from rlmt.endpoint import TWO_LINES, Endpoint, Reply, has_no_reply, try_endpoint
from rlmt.run import digests_of
from rlmt.scorers import Who, connect, load_function, read_who
from rlmt.verdicts import verdict_of
from rlmt.vllm import serve
from utils import fail

LOCAL_CALLS = 512  # requests to a local judge at a time
LOCAL_TIMEOUT = 3600.0  # seconds that one may wait for its turn and its reply
# how often a request is sent again if its reply cannot be read, by --protocol: in the authors' code the first
# reply counts
RETRIES = {"official": 3, "paper": 0}


class Judge:
    """A program, a model that this machine serves (`local:`), a model at an endpoint, or nobody.

    Args:
        args: any JudgeFlags.
        dtype: that of a local judge, see utils.compute_dtype.
    """

    def __init__(self, args, dtype: str = "auto"):
        self.args = args
        self.who = read_who(args.judge, args.judge_url)
        self.dtype = dtype

    # --- before anything is generated

    @property
    def is_model(self) -> bool:
        """Returns whether it replies in text, to requests."""
        return self.who.kind in ("folder", "endpoint")

    def check(self) -> None:
        """Exits with 2 if the judge cannot be asked, as far as that can be told without asking it."""
        if self.who.kind == "folder":
            if not find_spec("vllm"):
                fail(
                    f"--judge {self.args.judge}: vLLM, which serves it, is not installed; `make setup` "
                    "installs it"
                )
            if not load_tokenizer(self.who.name).chat_template:
                fail(f"--judge {self.args.judge} has no chat template; name an instruct model")
        elif self.who.kind == "endpoint":
            self.connect(Path())
        elif self.who.kind == "function":
            load_function(self.who.name)

    def check_is_model(self, benchmark: str) -> None:
        """Exits with 2 unless the judge is a model, which the benchmark needs."""
        if not self.is_model:
            fail(f"{benchmark} needs --judge: a model's name, or local:FOLDER")

    def check_start(
        self, run: Path, tasks: list[dict], requests_if_all_answer: Callable[[list[dict], str], list[dict]]
    ) -> None:
        """Prints what judging costs at most, and asks the first request; exits with 2 if no reply comes.

        Args:
            run: the folder that will keep the replies.
            requests_if_all_answer: returns all requests if every one of the tasks got this answer; none to a
                program.
        """
        # a word has about a token, so none is longer; a benchmark cuts it as it cuts the answers
        requests = requests_if_all_answer(tasks, "word " * self.args.max_tokens)
        if requests:
            how = "one temperature, each asked once, about --max-tokens words"
            self.print_estimate(run, requests, f"judge, estimated ({how})")
        if not self.args.generate_only:
            self.try_first(run, requests_if_all_answer(tasks[:1], TWO_LINES))

    def print_estimate(self, run: Path, requests: list[dict], name: str) -> None:
        """Prints under `name` the number of calls, and the estimated cost of those to which `run` has no
        reply."""
        estimate = {"calls": len(requests)}
        if self.who.kind == "endpoint":
            estimate = self.connect(run).estimate(requests)
        print(f"{name}: {json.dumps(estimate)}")

    def try_first(self, run: Path, requests: list[dict]) -> None:
        """Asks a judge at an endpoint the first of its requests; exits with 2 if no reply comes.

        `run`: the folder that will keep the reply; see `try_endpoint`.
        """
        if requests and self.who.kind == "endpoint":
            try_endpoint(self.connect(run), requests[0], "--judge", self.args.overwrite)

    # --- what it is asked and replies

    def request(self, messages: list[dict]) -> dict:
        """Returns the request that shows `messages` to the judge and wants one JSON object back."""
        return {
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self.args.judge_max_tokens,
            "response_format": {"type": "json_object"},
        }

    def connect(self, run: Path) -> Endpoint:
        """Returns the client of a judge at an endpoint; exits with 2 if it cannot be asked, as without a
        key."""
        return connect(self.who, run / "judge.jsonl", self.args, concurrency=self.args.concurrency)

    @contextmanager
    def open(self, run: Path) -> Iterator[Endpoint]:
        """Gives the client of a model; a server of a local one runs as long."""
        if self.who.kind == "endpoint":
            yield self.connect(run)
            return
        server = serve(
            self.who.name,
            run / "vllm-judge.log",
            tensor_parallel=self.args.judge_tensor_parallel,
            data_parallel=self.args.data_parallel,
            dtype=self.dtype,
        )
        with server as url:
            served = Who("endpoint", self.who.name, url)
            yield connect(served, run / "judge.jsonl", concurrency=LOCAL_CALLS, timeout=LOCAL_TIMEOUT)

    def ask(
        self,
        requests: list[dict],
        parse: Callable[[str], Any],
        run: Path,
        n_retries: int = RETRIES["official"],
    ) -> list[Reply]:
        """Returns the replies of a model in the order of the requests; judge.jsonl keeps all of them raw.

        `parse` raises ValueError for a reply that it cannot read; the request is then sent again, `n_retries`
        times at most. Exits with 2 if too many requests got no reply, see `check_answered`.
        """
        if not requests:  # as where every comparison is decided without a judge
            return []
        if self.who.kind == "folder":
            # a seed for the same replies in every run; and no grammar of JSON, which would keep a judge from
            # thinking
            requests = [request | {"seed": self.args.seed} for request in requests]
            for request in requests:
                request.pop("response_format", None)

        def read(text: str) -> Any:
            return parse(verdict_of(text))

        if "logprobs" in requests[0]:  # one token, whose log-probabilities are read, is no text
            read = str
        with self.open(run) as client:
            print(f"judge: {json.dumps(client.estimate(requests))}", flush=True)
            replies = client.ask(requests, read, n_retries)
        errors = [reply.error for reply in replies]
        check_answered(errors, f"--judge {self.args.judge}", self.args.max_invalid)
        return replies


def text_of_verdict(reply: Reply) -> str:
    """Returns what a judge wrote after its thinking; "" if its reply cannot be read."""
    if reply.error:
        return ""
    return verdict_of(reply.text)


def check_answered(errors: list[str], who: str, max_invalid: float) -> None:
    """Ends a run before its summary if a larger share of the calls than --max-invalid got no reply, as in an
    outage: --resume asks them again.

    Fewer are invalid rows. So are replies that cannot be read and requests that are refused for good, which
    would only come again.

    Args:
        errors: of every reply, "" for a good one.
        who: what was asked.
    """
    unanswered = [error for error in errors if has_no_reply(error)]
    if len(unanswered) > max_invalid * len(errors):
        fail(
            f"{who}: {len(unanswered)} of {len(errors)} got no reply; the same command with --resume asks "
            "again for these "
            f"alone, and a larger --max-invalid takes them as invalid. The first: {unanswered[0]}"
        )


def digests_of_judge(word: str) -> list[str]:
    """Hashes what judges or plays the user on this machine: a program's file, or a model's weights; [] for an
    endpoint, and for a hub name."""
    if read_who(word).kind == "endpoint":
        return []
    return digests_of(word)
