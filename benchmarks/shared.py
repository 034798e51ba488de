"""Serves all evaluation scripts: the tested model's answers, one way to ask any judge, results, fingerprints.

`args` is the `Args` of the calling script; its flags have the same names in every evaluation script.
"""

import functools
import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.foreign import FOREIGN_STYLES, split_foreign, style_of, verdict_of
from benchmarks.scoring import add_to_index, mean, task_means
from benchmarks.shipped import use_as_shipped
from rlmt.chat import context_length, encode_prompt, load_config, load_tokenizer, read_trained_as
from rlmt.data import append_jsonl, read_log, write_jsonl
from rlmt.endpoint import (
    TWO_LINES,
    Endpoint,
    Reply,
    has_no_reply,
    is_answer,
    name_in,
    try_endpoint,
)
from rlmt.run import Run, digests_of
from rlmt.scorers import load_function
from rlmt.sampler import Sampling, ThinkingBudget, text_of
from rlmt.saved import generate
from rlmt.vllm import serve
from rlver.prompts import ASK_THINKING
from utils import THINK_FORMATS, ThinkParts, fail, or_fail, shows_response, split_thinking

LOCAL_CALLS = 512  # requests to a local judge at a time
LOCAL_TIMEOUT = 3600.0  # seconds that one may wait for its turn and its reply

# --- 1. the tested model


def is_chat(args) -> bool:
    """Tells whether the tested model is a name at --model-url: it gets messages, and its tokenizer is not
    known here.

    A model that runs here gets token ids, and so does a folder that somebody's vLLM server at --model-url
    serves.
    """
    return bool(args.model_url) and not Path(args.model).is_dir()


def given_think_format(args) -> str:
    """Returns --think-format; for `auto` what the model's think_format.json says, or `auto` without that
    file.

    Exits with 2 if flag and file differ: the wrong part of an answer would be judged.
    """
    stored = None
    if not is_chat(args):
        stored = read_trained_as(args.model).get("think_format")
    if args.think_format == "auto":
        return stored or "auto"
    if stored not in (None, args.think_format):
        fail(
            f"{args.model} was trained to the format {stored!r}, not {args.think_format!r}; leave out --think-format"
        )
    return args.think_format


def think_format(args) -> str:
    """Returns how the model writes thinking and answer: a key of utils.THINK_FORMATS or of FOREIGN_STYLES.

    If neither flag nor model says it, it is what the chat template shows; `plain` behind an endpoint.
    """
    given = given_think_format(args)
    if given != "auto":
        return given
    if is_chat(args):
        return "plain"
    return load_model_tokenizer(args).think_format


def load_model_tokenizer(args):
    """Loads the model's tokenizer, to be used as it ships; exits with 2 if that cannot be.

    The first call prints how the model is prompted, and how its thinking is recognised.
    """
    return _load_tokenizer(args.model, given_think_format(args), args.chat_template, args.chat_template_args)


@functools.cache  # every reply of a conversation asks for it
def _load_tokenizer(model: str, given_format: str, chat_template: str, chat_template_args: tuple[str, ...]):
    tokenizer = load_tokenizer(model)
    template_args = read_template_args(chat_template_args)
    line = or_fail(use_as_shipped, tokenizer, given_format, chat_template, template_args)
    tokenizer.asks_thinking = read_trained_as(model).get("ask_thinking", False)  # as train_rlver.py does
    print(f"{model}: {line}", flush=True)
    return tokenizer


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


def split_answer(text: str, format_name: str, finished: bool = True) -> ThinkParts:
    """Splits a completion into thinking and response, both stripped; `format_name` as `think_format` returns
    it."""
    if format_name in FOREIGN_STYLES:
        return split_foreign(text, FOREIGN_STYLES[format_name], finished)
    return split_thinking(text, format_name, finished)


def answer_shows_response(text: str, format_name: str) -> bool:
    """Tells whether a completion has the tag after which its response begins."""
    if format_name in FOREIGN_STYLES:
        return re.search(FOREIGN_STYLES[format_name].opens_answer, text) is not None
    return shows_response(text, format_name)


def stop_string(format_name: str) -> str:
    """Returns the string at which sampling stops, apart from the end of turn; "" for foreign styles."""
    if format_name in FOREIGN_STYLES:
        return ""
    return THINK_FORMATS[format_name].stop


def thinking_budget(args) -> ThinkingBudget | None:
    """Returns what closes the model's thinking at --max-thinking-tokens; None if that is 0.

    Exits with 2 if it cannot be closed, or if --max-tokens leaves no room for an answer.
    """
    if not args.max_thinking_tokens:
        return None
    limit = f"--max-thinking-tokens {args.max_thinking_tokens}"
    if is_chat(args):
        fail(
            f"{limit}: {args.model_url} gets messages, which cannot close the thinking; --model takes a folder too"
        )
    tokenizer = load_model_tokenizer(args)
    name = think_format(args)
    style = style_of(name)
    if not style:
        fail(f"{limit}: the think format {name!r} has no thinking; leave it out, or name --think-format")

    close_at = args.max_thinking_tokens
    if not tokenizer.opening:  # the model writes the tag itself
        close_at += count_tokens(tokenizer, style.opens_thinking)
    closing = tokenizer(style.closes_thinking, add_special_tokens=False)["input_ids"]
    if close_at + len(closing) >= args.max_tokens:
        fail(f"{limit} leaves no tokens for an answer; --max-tokens {args.max_tokens} is for both")
    return ThinkingBudget(close_at, style.opens_thinking, style.opens_answer, closing, tokenizer.opening)


def whole_turn(args, text: str, finished: bool) -> str:
    """Returns the assistant's turn: the tag with which its chat template begins it, and a completion.

    The template of a model behind an endpoint is unknown. If its format is `tags` and it was cut off before
    </think>, the text counts as thinking, so that no judge reads thinking.
    """
    opening = ""
    if not is_chat(args):
        opening = load_model_tokenizer(args).opening
    elif think_format(args) == "tags" and not finished and "</think>" not in text:
        opening = "<think>\n"
    if text.lstrip().startswith(opening.strip()):
        return text
    return opening + text


def check_plain(args, text: str) -> None:
    """Exits with 2 if an answer holds thinking, and its format is `plain` only because nothing names another.

    The judge would read the thinking as a part of the answer.
    """
    if given_think_format(args) != "auto" or think_format(args) != "plain":
        return
    for name, style in FOREIGN_STYLES.items():
        mark = re.search(style.opens_answer, text)
        if mark:
            fail(
                f"an answer of {args.model} contains {mark[0]}, but nothing says that this model thinks, so its thinking "
                f"would be judged; pass --think-format {name} or one of ours, or plain if the whole text is meant"
            )


def model_endpoint(args, run: Path) -> Endpoint:
    """Returns the client of --model-url; exits with 2 if it cannot be asked, as without a key."""
    return Endpoint(
        args.model,
        run / "model.jsonl",
        args.model_url,
        args.concurrency,
        key_env=args.key_env,
        omit=args.model_omit,
    )


def endpoint_sampling(args, temperature: float) -> dict:
    """Returns the sampling parameters of a request to --model-url."""
    sampling = {"temperature": temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    stop = stop_string(think_format(args))
    if stop:
        sampling["stop"] = [stop]
        sampling["include_stop_str_in_output"] = True  # vLLM's; nobody else serves a Zero model
    if args.chat_template_args:  # the key is vLLM's name for them
        sampling["chat_template_kwargs"] = read_template_args(args.chat_template_args)
    return sampling


# --- 2. its answers

# text, whether it ended before the token limit, its number of tokens; or why an endpoint gives none
Answer = tuple[str, bool, int] | str
# a task, its answer, and whether its thinking was closed because the budget was used up
Answered = tuple[dict, Answer, bool]


def generate_answers(args, tasks: list[dict], temperature: float, run: Path) -> list[dict]:
    """Samples a completion for each task at one temperature, and splits off its thinking.

    Appends each row to generations.jsonl when it is done; keeps rows that are already there, and exits with 2
    if one of them answers another prompt. A task to which an endpoint gives no answer, as it is too long or
    filtered, has the status `refused` and an `error`.

    Args:
        tasks: rows {id, messages}; some may have the same prompt.

    Returns:
        Rows {id, temperature, messages, text, thinking, response, status, n_tokens, n_thinking_tokens}, in
        the order of the tasks. `n_thinking_tokens` is None behind an endpoint: its tokenizer is not known.
        With --max-thinking-tokens `budget_used_up` tells whether that closed the thinking.
    """
    model_format = think_format(args)
    path = run / "generations.jsonl"
    rows = {row["id"]: row for row in read_generations(path) if row["temperature"] == temperature}
    for task in tasks:
        stored = rows.get(task["id"])
        if stored and stored["messages"] != task["messages"]:
            fail(
                f"--resume: {path} has an answer to task {task['id']} that was given to another prompt, so the "
                "data have changed since then; take the data of the first start, or --overwrite starts anew"
            )
    if is_chat(args):
        tokenizer = None
        completions = complete_by_endpoint(args, tasks, temperature, run)
    else:
        tokenizer = load_model_tokenizer(args)
        completions = complete_by_tokens(args, tasks, temperature, tokenizer, rows.keys(), run)

    for task, answer, used_up in completions:
        if task["id"] in rows:  # an endpoint's stored replies come again
            continue
        if isinstance(answer, str):
            print(f"task {task['id']} is refused: {answer}", file=sys.stderr)
            text = ""
            n_tokens = 0
            parts = ThinkParts("", "", "refused")
        else:
            text, finished, n_tokens = answer
            check_plain(args, text)
            text = whole_turn(args, text, finished)
            parts = split_answer(text, model_format, finished)
        row = {
            "id": task["id"],
            "temperature": temperature,
            "messages": task["messages"],
            "text": text,
            "thinking": parts.thinking,
            "response": parts.response,
            "status": parts.status,
            "n_tokens": n_tokens,
            "n_thinking_tokens": count_tokens(tokenizer, parts.thinking),
        }
        if args.max_thinking_tokens:
            row["budget_used_up"] = used_up
        if parts.status == "refused":
            row["error"] = answer
        rows[task["id"]] = row
        append_jsonl(path, [row])
    return [rows[task["id"]] for task in tasks]


def read_generations(path: Path) -> list[dict]:
    """Reads the rows of an earlier start; removes those without a reply, as in an outage: they are asked again."""
    logged = read_log(path)
    answered = [row for row in logged if not has_no_reply(row.get("error", ""))]
    if len(answered) < len(logged):
        write_jsonl(path, answered)
    return answered


def complete_by_tokens(
    args, tasks: list[dict], temperature: float, tokenizer, done: Set[str], run: Path
) -> Iterator[Answered]:
    """Yields completions of the tasks whose ids are not in `done`, by a model that gets token ids."""
    done_positions = {position for position, task in enumerate(tasks) if task["id"] in done}
    if len(done_positions) == len(tasks):
        return  # before the model is loaded

    prompts = check_prompts(args, [task["messages"] for task in tasks])
    stop = stop_string(think_format(args))
    sampling = Sampling(temperature, args.max_tokens, args.top_p, stop, thinking_budget(args))
    samples = generate(
        args.model, prompts, tokenizer, sampling, args.seed, done_positions, **how_sampled(args, run)
    )
    for position, sample in samples:
        answer = text_of(tokenizer, sample), sample.finished, len(sample.ids)
        yield tasks[position], answer, sample.budget_used_up


def how_sampled(args, run: Path) -> dict:
    """Returns what `saved_sampler` is told about a model that gets token ids."""
    return {
        "log": run / "vllm.log",
        "rollout": args.rollout,
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "url": args.model_url,
        "key_env": args.key_env,
        "tensor_parallel": args.tensor_parallel,
        "data_parallel": args.data_parallel,
    }


def complete_by_endpoint(args, tasks: list[dict], temperature: float, run: Path) -> Iterator[Answered]:
    """Yields completions of all tasks by --model-url."""
    seeds = [args.seed * 1_000_003 + place for place in range(len(tasks))]  # as generate
    answers = ask_by_messages(args, [task["messages"] for task in tasks], seeds, temperature, run)
    for task, answer in zip(tasks, answers):
        yield task, answer, False


def ask_by_messages(
    args, conversations: list[list[dict]], seeds: list[int], temperature: float, run: Path
) -> list[Answer]:
    """Returns the answers of --model-url. model.jsonl keeps its replies, so none is paid for twice.

    With --seed 0 no seed is sent unless conversations are equal, as some servers know no such field. Exits with 2
    if too many requests got no reply, see `check_answered`.
    """
    different = set(map(json.dumps, conversations))
    sends_seeds = args.seed or len(different) < len(conversations)  # equal requests would share one reply
    model = model_endpoint(args, run)
    sampling = endpoint_sampling(args, temperature)
    requests = []
    for place, messages in enumerate(conversations):
        request = {"messages": messages, **sampling}
        if sends_seeds:
            request["seed"] = seeds[place]
        requests.append(request)
    for first_reply in model.ask(requests[:5], name="generate"):
        check_plain(args, first_reply.text)  # before all are paid for
    replies = model.ask(requests, name="generate")
    check_answered(args, [reply.error for reply in replies], f"--model {args.model}")
    answers = []
    for reply in replies:
        finished = reply.choice.get("finish_reason") != "length"
        answers.append(reply.error or (reply.text, finished, reply.usage[1]))
    return answers


def count_tokens(tokenizer, text: str) -> int | None:
    """Returns the number of tokens of a text; None without a tokenizer."""
    if tokenizer is None:
        return None
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def answer(row: dict) -> str | None:
    """Returns the part of a generation row that is judged; None if an endpoint gave no answer.

    ok and truncated: the response, which is empty if the thinking was not closed. It counts even if the token
    limit cut it off, as in the official tools. no_open, no_close, nested, empty_response: the empty answer.
    """
    if row["status"] == "refused":
        return None
    if row["status"] in ("ok", "truncated"):
        return row["response"]
    return ""


def measures_of(row: dict) -> dict[str, float | None]:
    """Returns what is measured of a generation row apart from its score; None where there is no value."""
    response_tokens = None
    if row["n_thinking_tokens"] is not None:  # None behind an endpoint
        response_tokens = row["n_tokens"] - row["n_thinking_tokens"]
    return {
        "format_ok": row["status"] == "ok",
        "thinking_tokens": row["n_thinking_tokens"],
        "response_tokens": response_tokens,
        "budget_used_up": row.get("budget_used_up"),
        "proxy_reward": row.get("reward"),
    }


def describe(rows: list[dict], task_ids: Iterable[str]) -> dict:
    """Returns status counts and means of generation rows, None if no row has the value, and under `task_means`
    those of each task."""
    values = defaultdict(list)
    tasks = defaultdict(list)
    for row, task_id in zip(rows, task_ids):
        for name, value in measures_of(row).items():
            if value is not None:
                values[name].append(value)
                tasks[name].append(task_id)
    numbers = {"status": dict(sorted(Counter(row["status"] for row in rows).items())), "task_means": {}}
    for name in ("format_ok", "thinking_tokens", "response_tokens", "budget_used_up", "proxy_reward"):
        numbers[name] = mean(values[name])
        numbers["task_means"][name] = task_means(values[name], tasks[name])
    return numbers


# --- 3. the judge


def judge_request(args, messages: list[dict]) -> dict:
    """Returns the request that shows `messages` to --judge and wants one JSON object back."""
    return {
        "messages": messages,
        "temperature": 0.0,
        "max_tokens": args.judge_max_tokens,
        "response_format": {"type": "json_object"},
    }


def judge_endpoint(args, run: Path) -> Endpoint:
    """Returns the client of --judge, which runs elsewhere; exits with 2 if it cannot be asked, as without a
    key."""
    return Endpoint(
        args.judge,
        run / "judge.jsonl",
        args.judge_url,
        args.concurrency,
        budget=args.budget,
        price=args.price,
        key_env=args.key_env,
        omit=args.omit,
    )


@contextmanager
def open_judge(args, run: Path) -> Iterator[Endpoint]:
    """Gives the client of --judge; a server of a `local:` judge runs as long."""
    if not is_local(args.judge):
        yield judge_endpoint(args, run)
        return
    model = args.judge.removeprefix("local:")
    server = serve(
        model,
        run / "vllm-judge.log",
        tensor_parallel=args.judge_tensor_parallel,
        data_parallel=args.data_parallel,
        dtype=getattr(args, "dtype", "auto"),  # a script that generates nothing has no such flag
    )
    with server as url:
        yield Endpoint(model, run / "judge.jsonl", url, LOCAL_CALLS, timeout=LOCAL_TIMEOUT)


def is_local(judge: str) -> bool:
    """Tells whether --judge is a model that runs on this machine."""
    return judge.startswith("local:")


def is_behind_endpoint(judge: str) -> bool:
    """Tells whether a judge or simulated user is a model behind an endpoint: not local, a program or
    nothing."""
    return judge != "" and not is_local(judge) and ".py:" not in judge


def ask_judge(args, requests: list[dict], parse: Callable[[str], Any], run: Path) -> list[Reply]:
    """Returns the replies of --judge in the order of the requests; judge.jsonl keeps all of them raw.

    `parse` raises ValueError for a reply that it cannot read; the request is then asked again, three times at
    most, under --protocol paper never. Exits with 2 if too many requests got no reply, see `check_answered`.
    """
    if not requests:  # as where every comparison is decided without a judge
        return []
    if is_local(args.judge):
        # a seed for the same replies in every run; and no grammar of JSON, which would keep a judge from
        # thinking
        requests = [request | {"seed": args.seed} for request in requests]
        for request in requests:
            request.pop("response_format", None)

    def read(text: str) -> Any:
        return parse(verdict_of(text))

    if "logprobs" in requests[0]:  # one token, whose log-probabilities are read, is no text
        read = str
    n_retries = 3
    if getattr(args, "protocol", "") == "paper":  # in the authors' code the first reply counts
        n_retries = 0
    with open_judge(args, run) as judge:
        print(f"judge: {json.dumps(judge.estimate(requests))}", flush=True)
        replies = judge.ask(requests, read, n_retries)
    check_answered(args, [reply.error for reply in replies], f"--judge {args.judge}")
    return replies


def said(reply: Reply) -> str:
    """Returns what a judge said after its thinking; "" if its reply cannot be read."""
    if reply.error:
        return ""
    return verdict_of(reply.text)


def check_answered(args, errors: list[str], who: str) -> None:
    """Ends a run before its summary if a larger share of the calls than --max-invalid got no reply, as in an
    outage: --resume asks them again.

    Fewer are invalid rows. So are replies that cannot be read and requests that are refused for good, which
    would only come again.

    Args:
        errors: of every reply, "" for a good one.
        who: what was asked.
    """
    unanswered = [error for error in errors if has_no_reply(error)]
    if len(unanswered) > args.max_invalid * len(errors):
        fail(
            f"{who}: {len(unanswered)} of {len(errors)} got no reply; the same command with --resume asks again for these "
            f"alone, and a larger --max-invalid takes them as invalid. The first: {unanswered[0]}"
        )


def print_estimate(args, run: Path, requests: list[dict], name: str) -> None:
    """Prints under `name` the number of calls of --judge, and the estimated cost of those that `run` has no reply
    to."""
    estimate = {"calls": len(requests)}
    if not is_local(args.judge):
        estimate = judge_endpoint(args, run).estimate(requests)
    print(f"{name}: {json.dumps(estimate)}")


# --- 4. checks before anything is generated


def require(args, **what: str) -> None:
    """Exits with 2 if a flag is missing. `what` says, by the names of the flags, what each one takes."""
    missing = [f"--{name} is missing: {text}" for name, text in what.items() if not getattr(args, name)]
    if missing:
        fail("; ".join(missing))


def check_model(args) -> None:
    """Exits with 2 if --model cannot generate: no key for its endpoint, no tokenizer, chat template or
    weights."""
    if is_chat(args):
        if args.chat_template != "auto":
            fail(
                f"--chat-template {args.chat_template}: the server at --model-url applies its own; start it with "
                f"`vllm serve {args.model} --chat-template FILE`, and leave the flag out here"
            )
        model_endpoint(args, Path())
        return
    load_model_tokenizer(args)
    load_config(args.model)


def encode(tokenizer, messages: list[dict]) -> list[int]:
    """Returns a prompt's token ids; a model that was trained to be asked for its thinking is asked."""
    if tokenizer.asks_thinking and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ASK_THINKING["en"]}, *messages]
    return encode_prompt(tokenizer, messages)


def check_prompts(args, conversations: list[list[dict]]) -> list[list[int]]:
    """Returns the prompts' token ids; [] for a model that gets messages.

    Exits with 2 if one and --max-tokens are more than the model's context: vLLM would refuse it, and
    transformers would sample beyond what the model was trained for.
    """
    if is_chat(args):
        return []
    tokenizer = load_model_tokenizer(args)
    prompts = [or_fail(encode, tokenizer, messages) for messages in conversations]
    longest = max(map(len, prompts))
    context = context_length(load_config(args.model))
    if longest + args.max_tokens > context:
        fail(
            f"a prompt (tokens: {longest}) and --max-tokens {args.max_tokens} are more than the {context} tokens of "
            f"{args.model}'s context; use less, or leave this prompt out"
        )
    return prompts


def check_judge(args) -> None:
    """Exits with 2 if --judge cannot be asked, as far as that can be told without asking it."""
    if is_local(args.judge):
        if not find_spec("vllm"):
            fail(f"--judge {args.judge}: vLLM, which serves it, is not installed; `make setup` installs it")
        if not load_tokenizer(args.judge.removeprefix("local:")).chat_template:
            fail(f"--judge {args.judge} has no chat template; name an instruct model")
    elif is_behind_endpoint(args.judge):
        judge_endpoint(args, Path())
    elif args.judge:
        load_function(args.judge)


def check_model_judge(args, name: str) -> None:
    """Exits with 2 unless --judge is a model, which the benchmark `name` needs."""
    if not is_local(args.judge) and not is_behind_endpoint(args.judge):
        fail(f"{name} needs --judge: a model's name, or local:FOLDER")


def check_start(
    args, script: str, tasks: list[dict], requests_if_all_answer: Callable[[Any, list[dict], str], list[dict]]
) -> Run:
    """Estimates what the judge costs, checks that the run may start, and asks the judge its first request.

    `requests_if_all_answer(args, tasks, answer)`: all requests to the judge; none without a judge, or if it
    is a program.
    """
    # a word has about a token, so none is longer; a benchmark cuts it as it cuts the answers
    longest_answer = "word " * args.max_tokens
    requests = requests_if_all_answer(args, tasks, longest_answer)
    run = Run(args, script, args.model)
    if requests:
        how = "one temperature, each asked once, about --max-tokens words"
        print_estimate(args, run.folder, requests, f"judge, estimated ({how})")
    if not args.generate_only:
        try_judge(args, run.folder, requests_if_all_answer(args, tasks[:1], TWO_LINES))
    return run


def try_judge(args, run: Path, requests: list[dict]) -> None:
    """Asks a --judge behind an endpoint the first of its requests; exits with 2 if no reply comes.

    `run`: the folder that will keep the reply; see `try_endpoint`.
    """
    if requests and is_behind_endpoint(args.judge):
        try_endpoint(judge_endpoint(args, run), requests[0], "--judge", args.overwrite)


# --- 5. results


def check_stored(args, *read: str) -> None:
    """Exits with 2 if an argument was given that stored rows do not need (they need those named in `read`), or if
    --out, the file for their scores, may not be written; call it before they are scored."""
    for field in fields(args):
        is_read = field.name in ("out", "overwrite", "dry_run", "max_invalid", "config", *read)
        if not is_read and getattr(args, field.name) != field.default:
            fail(f"--{field.name.replace('_', '-')} does nothing to stored rows; leave it out")
    if args.out and Path(args.out).exists() and not args.overwrite:
        fail(f"--out {args.out} exists; --overwrite replaces it")


def write_scores(args, scores: dict) -> None:
    """Writes the scores of stored rows to --out, a JSON file in a folder that need not exist; not in a dry
    run."""
    if args.dry_run:
        return
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(scores, indent=1) + "\n")


def save_results(run: Run, summary: dict, index: list[dict]) -> None:
    """Adds the lines to runs.csv, then writes summary.json, which marks the run as complete, and says what to
    look at.

    The summary's `replied` has what the models behind endpoints call themselves, by the file of their replies.
    """
    add_to_index(run.folder, index)
    summary["replied"] = {}
    for store in ("model", "judge", "simulator", "simulator_held_out"):
        bodies = [row["reply"] for row in read_log(run.folder / f"{store}.jsonl")]
        names = {name_in(body) for body in bodies if is_answer(body)} - {""}
        if names:
            summary["replied"][store] = sorted(names)
    run.write_summary(summary)
    print(f"all numbers: {run.folder}/summary.json")
    if index:  # traits have no completions of their own
        print(f"next: python page.py {run.folder}")


# --- 6. fingerprints


def digests_of_judge(judge: str) -> list[str]:
    """Hashes what judges or plays the user on this machine: a program's file, or a model's weights; [] behind
    an endpoint, and for a hub name."""
    if is_behind_endpoint(judge):
        return []
    return digests_of(judge)


def short_hash(text: str) -> str:
    """Returns 12 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
