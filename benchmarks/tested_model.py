"""The model under evaluation: how it is prompted and sampled, what it answers, where its thinking ends."""

import functools
import itertools
import json
import sys
from collections.abc import Iterator, Set
from pathlib import Path

from benchmarks.shipped import use_as_shipped
from rlmt.chat import context_length, encode_prompt, load_config, load_tokenizer, read_trained_as
from rlmt.data import append_jsonl, read_log, write_jsonl
from rlmt.endpoint import Endpoint, check_answered, has_no_reply, is_cut_off
from rlmt.foreign import FOREIGN_STYLES, split_answer, style_in, style_of
from rlmt.saved import generate
from rlmt.sampler import Sampling, ThinkingBudget, text_of
from rlmt.scorers import Who, connect
from benchmarks.shared import judged_part
from utils import ASK_THINKING, THINK_FORMATS, ThinkParts, fail, or_fail

# text, whether it ended before the token limit, its number of tokens; or why an endpoint gives none
Answer = tuple[str, bool, int] | str
# a task, its answer, and whether its thinking was closed because the budget was used up
Answered = tuple[dict, Answer, bool]


# --- 1. how it marks its thinking


def check_no_thinking(text: str, what: str) -> None:
    """Exits with 2 if a text that would be judged as it is shows thinking; `what` says which text it is."""
    style = style_in(text)
    if style:
        fail(
            f"{what} shows thinking, which would be judged; pass --think-format {style} or one of ours, or "
            "plain if the whole text is meant"
        )


def leave_out_thinking(rows: list[dict], source: str, format_name: str) -> None:
    """Leaves only the responses in stored answers, which are without a `thinking` of their own.

    Exits with 2 if one shows thinking and the format is `auto`.
    """
    for line, row in enumerate(rows, 1):
        for name in ("response", "completion", "output_2"):
            text = row.get(name)
            if "thinking" in row or not isinstance(text, str):
                continue
            if format_name == "auto":
                check_no_thinking(text, f"{source}:{line}: {name}")
            else:
                row[name] = judged_part(split_answer(text, format_name)._asdict())


def read_template_args(pairs: tuple[str, ...]) -> dict:
    """Reads KEY=VALUE pairs; a value that is not JSON is a text. Exits with 2 for a pair without a key."""
    template_args = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if not key or not value:
            fail(f"--chat-template-args {pair}: write KEY=VALUE, such as enable_thinking=false")
        try:
            template_args[key] = json.loads(value)
        except ValueError:
            template_args[key] = value
    return template_args


def count_tokens(tokenizer, text: str) -> int:
    """Returns the number of tokens of a text."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(tokenizer, messages: list[dict]) -> list[int]:
    """Returns a prompt's token ids; a model that was trained to be asked for its thinking is asked."""
    if tokenizer.asks_thinking and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ASK_THINKING["en"]}, *messages]
    return encode_prompt(tokenizer, messages)


# --- 2. the model


class TestedModel:
    """A model that gets token ids, or one that gets messages (`is_chat`).

    A model that runs here gets token ids, and so does a folder that somebody's vLLM server at --model-url
    serves. A name at --model-url gets messages, and its tokenizer is not known here.

    Args:
        args: any ModelFlags with JudgeFlags.
        max_thinking_tokens: after which the thinking is closed; 0: no limit.
    """

    __test__ = False  # pytest would take it for a test

    def __init__(self, args, max_thinking_tokens: int = 0):
        self.name = args.model
        self.is_chat = bool(args.model_url) and not Path(args.model).is_dir()
        self.asked_format = args.think_format
        self.chat_template = args.chat_template
        self.template_args = read_template_args(args.chat_template_args)
        self.top_p = args.top_p
        self.max_tokens = args.max_tokens
        self.max_thinking_tokens = max_thinking_tokens
        self.seed = args.seed
        self.max_invalid = args.max_invalid
        self.url = args.model_url
        self.of_endpoint = {
            "concurrency": args.concurrency,
            "key_env": args.key_env,
            "omit": args.model_omit,
        }
        self.of_sampler = {  # for `saved_sampler`, of a model that gets token ids
            "rollout": args.rollout,
            "dtype": args.dtype,
            "batch_size": args.batch_size,
            "url": args.model_url,
            "key_env": args.key_env,
            "tensor_parallel": args.tensor_parallel,
            "data_parallel": args.data_parallel,
        }

    @functools.cached_property
    def given_format(self) -> str:
        """Returns --think-format; for `auto` what the model's think_format.json says, or `auto` without that
        file.

        Exits with 2 if flag and file differ: the wrong part of an answer would be judged.
        """
        stored = None
        if not self.is_chat:
            stored = read_trained_as(self.name).get("think_format")
        if self.asked_format == "auto":
            return stored or "auto"
        if stored not in (None, self.asked_format):
            fail(
                f"{self.name} was trained to the format {stored!r}, not {self.asked_format!r}; leave out "
                "--think-format"
            )
        return self.asked_format

    @functools.cached_property
    def think_format(self) -> str:
        """Returns how the model writes thinking and answer: a key of utils.THINK_FORMATS or of
        FOREIGN_STYLES.

        If neither flag nor model says it, it is what the chat template shows; `plain` behind an endpoint.
        """
        if self.given_format != "auto":
            return self.given_format
        if self.is_chat:
            return "plain"
        return self.tokenizer.think_format

    @functools.cached_property
    def tokenizer(self):
        """Loads the model's tokenizer, to be used as it ships; exits with 2 if that cannot be.

        Prints how the model is prompted, and how its thinking is recognised.
        """
        tokenizer = load_tokenizer(self.name)
        line = or_fail(use_as_shipped, tokenizer, self.given_format, self.chat_template, self.template_args)
        # as train_rlver.py does
        tokenizer.asks_thinking = read_trained_as(self.name).get("ask_thinking", False)
        print(f"{self.name}: {line}", flush=True)
        return tokenizer

    @property
    def stop(self) -> str:
        """Returns the string at which sampling stops, apart from the end of turn; "" for foreign styles."""
        if self.think_format in FOREIGN_STYLES:
            return ""
        return THINK_FORMATS[self.think_format].stop

    # --- checks before anything is generated

    def check(self) -> None:
        """Exits with 2 if the model cannot generate: no key for its endpoint, no tokenizer, chat template or
        weights."""
        if self.is_chat:
            if self.chat_template != "auto":
                fail(
                    f"--chat-template {self.chat_template}: the server at --model-url applies its own; start "
                    "it with "
                    f"`vllm serve {self.name} --chat-template FILE`, and leave the flag out here"
                )
            self.connect(Path())
            return
        _ = self.tokenizer
        load_config(self.name)

    def encode_prompts(self, conversations: list[list[dict]]) -> list[list[int]]:
        """Returns the prompts' token ids; [] for a model that gets messages.

        Exits with 2 if one and --max-tokens are more than the model's context: vLLM would refuse it, and
        transformers would sample beyond what the model was trained for.
        """
        if self.is_chat:
            return []
        prompts = [or_fail(encode, self.tokenizer, messages) for messages in conversations]
        longest = max(map(len, prompts))
        context = context_length(load_config(self.name))
        if longest + self.max_tokens > context:
            fail(
                f"a prompt (tokens: {longest}) and --max-tokens {self.max_tokens} are more than the "
                f"{context} tokens of {self.name}'s context; use less, or leave this prompt out"
            )
        return prompts

    def check_plain(self, text: str) -> None:
        """Exits with 2 if an answer holds thinking, and its format is `plain` only because nothing names
        another.

        The judge would read the thinking as a part of the answer.
        """
        if self.given_format != "auto" or self.think_format != "plain":
            return
        check_no_thinking(text, f"an answer of {self.name}")

    # --- how it is sampled

    def thinking_budget(self) -> ThinkingBudget | None:
        """Returns what closes the model's thinking at --max-thinking-tokens; None if that is 0.

        Exits with 2 if it cannot be closed, or if --max-tokens leaves no room for an answer.
        """
        close_at = self.max_thinking_tokens
        if not close_at:
            return None
        limit = f"--max-thinking-tokens {close_at}"
        if self.is_chat:
            fail(
                f"{limit}: {self.url} gets messages, which cannot close the thinking; --model "
                "takes a folder too"
            )
        style = style_of(self.think_format)
        if not style:
            fail(
                f"{limit}: the think format {self.think_format!r} has no thinking; leave it out, or name "
                "--think-format"
            )

        opening = self.tokenizer.opening
        if not opening:  # the model writes the tag itself
            close_at += count_tokens(self.tokenizer, style.opens_thinking)
        closing = self.tokenizer(style.closes_thinking, add_special_tokens=False)["input_ids"]
        if close_at + len(closing) >= self.max_tokens:
            fail(f"{limit} leaves no tokens for an answer; --max-tokens {self.max_tokens} is for both")
        return ThinkingBudget(close_at, style.opens_thinking, style.opens_answer, closing, opening)

    def connect(self, run: Path) -> Endpoint:
        """Returns the client of --model-url; exits with 2 if it cannot be asked, as without a key."""
        return connect(Who("endpoint", self.name, self.url), run / "model.jsonl", **self.of_endpoint)

    def request_options(self, temperature: float) -> dict:
        """Returns the sampling parameters of a request to --model-url."""
        options = {"temperature": temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        if self.stop:
            options["stop"] = [self.stop]
            options["include_stop_str_in_output"] = True  # vLLM's; nobody else serves a Zero model
        if self.template_args:  # the key is vLLM's name for them
            options["chat_template_kwargs"] = self.template_args
        return options

    # --- what it answers

    def answer(self, tasks: list[dict], temperature: float, run: Path) -> list[dict]:
        """Samples a completion for each task at one temperature, and splits off its thinking.

        Appends each row to generations.jsonl when it is done; keeps rows that are already there, and exits
        with 2 if one of them answers another prompt. A task to which an endpoint gives no answer, because it
        is too long or filtered, has the status `refused` and an `error`.

        Args:
            tasks: rows {id, messages}; some may have the same prompt.

        Returns:
            Rows {id, temperature, messages, text, thinking, response, status, n_tokens, n_thinking_tokens},
            in the order of the tasks. `n_thinking_tokens` is None behind an endpoint: its tokenizer is not
            known. With --max-thinking-tokens `budget_used_up` is whether that closed the thinking.
        """
        path = run / "generations.jsonl"
        rows = {row["id"]: row for row in read_generations(path) if row["temperature"] == temperature}
        for task in tasks:
            stored = rows.get(task["id"])
            if stored and stored["messages"] != task["messages"]:
                fail(
                    f"--resume: {path} has an answer to task {task['id']} that was given to another "
                    "prompt, so the "
                    "data have changed since then; take the data of the first start, or --overwrite starts "
                    "anew"
                )
        if self.is_chat:
            seeds = [self.seed * 1_000_003 + index for index in range(len(tasks))]  # as generate
            answers = self.ask([task["messages"] for task in tasks], seeds, temperature, run)
            completions = zip(tasks, answers, itertools.repeat(False))
        else:
            completions = self._complete_by_tokens(tasks, temperature, rows.keys(), run)
        for task, answer, used_up in completions:
            if task["id"] not in rows:  # an endpoint's stored replies come again
                row = self._row(task, answer, temperature)
                if self.max_thinking_tokens:
                    row["budget_used_up"] = used_up
                rows[task["id"]] = row
                append_jsonl(path, [row])
        return [rows[task["id"]] for task in tasks]

    def _row(self, task: dict, answer: Answer, temperature: float) -> dict:
        """Makes the row of an answer, or of the reason why there is none."""
        if isinstance(answer, str):
            print(f"task {task['id']} is refused: {answer}", file=sys.stderr)
            text = ""
            n_tokens = 0
            parts = ThinkParts("", "", "refused")
        else:
            text, finished, n_tokens = answer
            self.check_plain(text)
            text = self.whole_turn(text, finished)
            parts = split_answer(text, self.think_format, finished)
        n_thinking_tokens = None
        if not self.is_chat:
            n_thinking_tokens = count_tokens(self.tokenizer, parts.thinking)
        row = {
            "id": task["id"],
            "temperature": temperature,
            "messages": task["messages"],
            "text": text,
            "thinking": parts.thinking,
            "response": parts.response,
            "status": parts.status,
            "n_tokens": n_tokens,
            "n_thinking_tokens": n_thinking_tokens,
        }
        if parts.status == "refused":
            row["error"] = answer
        return row

    def whole_turn(self, text: str, finished: bool) -> str:
        """Returns the assistant's turn: the tag with which its chat template begins it, and a completion.

        The template of a model behind an endpoint is unknown. If its format is `tags` and it was cut off
        before </think>, the text counts as thinking, so that no judge reads thinking.
        """
        opening = ""
        if not self.is_chat:
            opening = self.tokenizer.opening
        elif self.think_format == "tags" and not finished and "</think>" not in text:
            opening = "<think>\n"
        if text.lstrip().startswith(opening.strip()):
            return text
        return opening + text

    def _complete_by_tokens(
        self, tasks: list[dict], temperature: float, done: Set[str], run: Path
    ) -> Iterator[Answered]:
        """Yields completions of the tasks whose ids are not in `done`."""
        done_indices = {index for index, task in enumerate(tasks) if task["id"] in done}
        if len(done_indices) == len(tasks):
            return  # before the model is loaded

        prompts = self.encode_prompts([task["messages"] for task in tasks])
        sampling = Sampling(temperature, self.max_tokens, self.top_p, self.stop, self.thinking_budget())
        samples = generate(
            self.name,
            prompts,
            self.tokenizer,
            sampling,
            self.seed,
            done_indices,
            log=run / "vllm.log",
            **self.of_sampler,
        )
        for index, sample in samples:
            answer = text_of(self.tokenizer, sample), sample.finished, len(sample.ids)
            yield tasks[index], answer, sample.budget_used_up

    def ask(
        self, conversations: list[list[dict]], seeds: list[int], temperature: float, run: Path
    ) -> list[Answer]:
        """Returns the answers of --model-url. model.jsonl keeps its replies, so none is paid for twice.

        With --seed 0 no seed is sent unless conversations are equal, because some servers know no such
        field. Exits with 2 if too many requests got no reply, see `check_answered`.
        """
        different = set(map(json.dumps, conversations))
        # equal requests would share one reply
        sends_seeds = self.seed or len(different) < len(conversations)
        client = self.connect(run)
        options = self.request_options(temperature)
        requests = []
        for messages, seed in zip(conversations, seeds, strict=True):
            request = {"messages": messages, **options}
            if sends_seeds:
                request["seed"] = seed
            requests.append(request)
        for first_reply in client.ask(requests[:5], name="generate"):
            self.check_plain(first_reply.text)  # before all are paid for
        replies = client.ask(requests, name="generate")
        errors = [reply.error for reply in replies]
        check_answered(errors, f"--model {self.name}", self.max_invalid)
        answers = []
        for reply in replies:
            finished = not is_cut_off(reply.choice)
            answers.append(reply.error or (reply.text, finished, reply.usage[1]))
        return answers


def read_generations(path: Path) -> list[dict]:
    """Reads the rows of an earlier start; removes those without a reply, as in an outage: they are asked
    again."""
    logged = read_log(path)
    answered = [row for row in logged if not has_no_reply(row.get("error", ""))]
    if len(answered) < len(logged):
        write_jsonl(path, answered)
    return answered
