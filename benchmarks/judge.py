"""The judge of an evaluation, --judge: who it is, whether it can be asked, what it is asked and what it
replies."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rlmt.chat import load_tokenizer
from rlmt.endpoint import TWO_LINES, Endpoint, Reply, check_answered, try_endpoint
from rlmt.run import inputs_of
from rlmt.scorers import Who, connect, load_function, read_who
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
        self.name = args.judge
        self.who = read_who(args.judge, args.judge_url)
        self.max_tokens = args.judge_max_tokens
        self.max_invalid = args.max_invalid
        self.seed = args.seed
        self.of_server = {
            "tensor_parallel": args.judge_tensor_parallel,
            "data_parallel": args.data_parallel,
            "dtype": dtype,
        }
        self.of_endpoint = {
            "budget": args.budget,
            "price": args.price,
            "key_env": args.key_env,
            "omit": args.omit,
            "concurrency": args.concurrency,
            "fresh": args.overwrite,
        }

    # --- before anything is generated

    def check(self) -> None:
        """Exits with 2 if the judge cannot be asked, as far as that can be told without asking it."""
        if self.who.kind == "folder":
            if not find_spec("vllm"):
                fail(
                    f"--judge {self.name}: vLLM, which serves it, is not installed; `make setup` installs it"
                )
            if not load_tokenizer(self.who.name).chat_template:
                fail(f"--judge {self.name} has no chat template; name an instruct model")
        elif self.who.kind == "endpoint":
            self.connect(Path())
        elif self.who.kind == "function":
            load_function(self.who.name)

    def check_is_model(self, benchmark: str) -> None:
        """Exits with 2 unless the judge is a model, which the benchmark needs."""
        if self.who.kind not in ("folder", "endpoint"):
            fail(f"{benchmark} needs --judge: a model's name, or local:FOLDER")

    def check_start(self, run: Path, tasks: list[dict], max_tokens: int, is_asked: bool) -> None:
        """Prints what judging costs at most, and asks the first request; exits with 2 if no verdict comes.

        For judges with `requests_if_all_answer` and `parse`.

        Args:
            run: the folder that will keep the replies.
            max_tokens: of an answer.
            is_asked: whether this start asks the judge.
        """
        # a word has about a token, so none is longer; a benchmark cuts it as it cuts the answers
        requests = self.requests_if_all_answer(tasks, "word " * max_tokens)
        if requests:
            how = "one temperature, each asked once, about --max-tokens words"
            self.print_estimate(run, requests, f"judge, estimated ({how})")
        if is_asked:
            self.try_first(run, self.requests_if_all_answer(tasks[:1], TWO_LINES), self.parse)

    def print_estimate(self, run: Path, requests: list[dict], name: str) -> None:
        """Prints under `name` the number of calls, and the estimated cost of those to which `run` has no
        reply."""
        estimate = {"calls": len(requests)}
        if self.who.kind == "endpoint":
            estimate = self.connect(run).estimate(requests)
        print(f"{name}: {json.dumps(estimate)}")

    def try_first(self, run: Path, requests: list[dict], parse: Callable) -> None:
        """Asks a judge at an endpoint the first of its requests; exits with 2 if `parse` can read no reply.

        `run`: the folder that will keep the replies; see `try_endpoint`.
        """
        if requests and self.who.kind == "endpoint":
            try_endpoint(self.connect(run), requests[0], "--judge", parse)

    # --- what it is asked and replies

    def request(self, messages: list[dict]) -> dict:
        """Returns the request that shows `messages` to the judge and wants one JSON object back."""
        return {
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "response_format": {"type": "json_object"},
        }

    def connect(self, run: Path) -> Endpoint:
        """Returns the client of a judge at an endpoint; exits with 2 if it cannot be asked, as without a
        key."""
        return connect(self.who, run / "judge.jsonl", **self.of_endpoint)

    @contextmanager
    def open(self, run: Path) -> Iterator[Endpoint]:
        """Gives the client of a model; a server of a local one runs as long."""
        if self.who.kind == "endpoint":
            yield self.connect(run)
            return
        with serve(self.who.name, run / "vllm-judge.log", **self.of_server) as url:
            served = Who("endpoint", self.who.name, url)
            yield connect(served, run / "judge.jsonl", concurrency=LOCAL_CALLS, timeout=LOCAL_TIMEOUT)

    def ask(
        self, requests: list[dict], parse: Callable, run: Path, n_retries: int = RETRIES["official"]
    ) -> list[Reply]:
        """Returns the replies of a model in the order of the requests; judge.jsonl keeps all of them raw.

        `parse` raises ValueError for a reply that it cannot read, see `Endpoint.ask`; the request is then
        sent again, `n_retries` times at most. Exits with 2 if too many requests got no reply, see
        `check_answered`.
        """
        if not requests:  # as where every comparison is decided without a judge
            return []
        if self.who.kind == "folder":
            # a seed for the same replies in every run; and no grammar of JSON, which would keep a judge from
            # thinking
            requests = [request | {"seed": self.seed} for request in requests]
            for request in requests:
                request.pop("response_format", None)
        if "logprobs" in requests[0]:
            n_retries = 0  # it would get the same chances
        with self.open(run) as client:
            print(f"judge: {json.dumps(client.estimate(requests))}", flush=True)
            replies = client.ask(requests, parse, n_retries)
        errors = [reply.error for reply in replies]
        check_answered(errors, f"--judge {self.name}", self.max_invalid)
        return replies


def text_of_verdict(reply: Reply) -> str:
    """Returns a judge's reply; "" if it cannot be read."""
    if reply.error:
        return ""
    return reply.text


def digests_of_judge(word: str) -> list[str]:
    """Hashes what judges or plays the user on this machine: a program's file, or a model; [] for an endpoint."""
    if read_who(word).kind == "endpoint":
        return []
    return [*inputs_of(word).values()]
