"""A judge that runs on this machine: `--judge local:FOLDER`, or a hub name after `local:`.

It is prompted and stopped as an evaluated model of its family would be (benchmarks/shipped.py). If it thinks, its
verdict is what follows the thinking.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.foreign import verdict_of
from benchmarks.shipped import use_as_shipped
from rlmt.chat import context_length, encode_prompt, load_config, load_tokenizer, read_trained_as
from rlmt.data import append_jsonl, read_log
from rlmt.endpoint import Reply
from rlmt.sampler import Sampling, generate, text_of, wants_vllm
from utils import fail, or_fail

RETRY_TEMPERATURE = 0.7  # the first attempt is greedy; asking greedily again would give the same text


def ask(
    model: str,
    requests: list[dict],
    parse: Callable[[str], Any],
    store: Path,
    backend: str,
    gpus: list[list[str]] | None = None,
    dtype: str = "auto",
    attempts: int = 4,
) -> list[Reply]:
    """Returns the local judge's reply to each request, in their order.

    Every text is appended to `store` before it is parsed, so a later start does not generate it again. A request
    that is too long for the judge's context is not asked; exits with 2 if all are.

    Args:
        model: folder or hub name.
        requests: bodies as for an endpoint. Only `messages` are read, and `max_tokens` of the first request.
        parse: reads a text; raises ValueError if it cannot, and the request is asked again, `attempts` times in all.
        backend: "auto", "vllm" or "hf", as --rollout.
        gpus, dtype: see generate.
    """
    if not requests:  # as where every comparison is decided without a judge
        return []
    tokenizer = load_judge_tokenizer(model)
    max_tokens = requests[0]["max_tokens"]
    keys = [request_key(model, request) for request in requests]
    prompts = {}  # by key: equal requests get one reply
    for key, request in zip(keys, requests):
        prompts[key] = encode_prompt(tokenizer, request["messages"])
    texts = {}  # by key and attempt; and whether the judge ended it
    for row in read_log(store):
        texts[row["key"], row["attempt"]] = row["text"], row.get("finished", True)

    replies = refuse_long(model, prompts, max_tokens)
    unread = [key for key in prompts if key not in replies]
    for attempt in range(attempts):
        # seeds and batches follow from the places in `unread`, so a resumed run repeats an unbroken one
        done = {place for place, key in enumerate(unread) if (key, attempt) in texts}
        if len(done) < len(unread):
            temperature = RETRY_TEMPERATURE if attempt else 0.0
            samples = generate(
                model,
                [prompts[key] for key in unread],
                tokenizer,
                Sampling(temperature, max_tokens),
                use_vllm=wants_vllm(backend),
                seed=attempt,
                gpus=gpus,
                done=done,
                dtype=dtype,
            )
            for place, sample in samples:
                key = unread[place]
                text = text_of(tokenizer, sample)
                texts[key, attempt] = text, sample.finished
                row = {"key": key, "attempt": attempt, "text": text, "finished": sample.finished}
                append_jsonl(store, [row])

        for key in unread:
            replies[key] = read_reply(tokenizer, *texts[key, attempt], parse)
        unread = [key for key in unread if replies[key].error]
    return [replies[key] for key in keys]


def refuse_long(model: str, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, Reply]:
    """Returns an invalid reply to each prompt that leaves no room for a verdict; exits with 2 if none does."""
    context = context_length(load_config(model))
    refused = {}
    for key, prompt in prompts.items():
        if len(prompt) + max_tokens > context:
            error = (
                f"too long: a prompt (tokens: {len(prompt)}) and --judge-max-tokens {max_tokens} are more than the "
                f"{context} tokens of {model}'s context"
            )
            refused[key] = Reply(None, "", error, (0, 0), {})
    if refused and len(refused) == len(prompts):
        fail(f"--judge local:{model}: every request is {error}; use another judge, or fewer tokens")
    return refused


def check(model: str, max_tokens: int) -> None:
    """Exits with 2 if the judge's tokenizer, chat template, config or weights are missing; loads no weights.

    Also if its context has no room for `max_tokens` and a prompt.
    """
    load_judge_tokenizer(model)
    context = context_length(load_config(model))
    if max_tokens >= context:
        fail(
            f"--judge-max-tokens {max_tokens} leaves no room for a prompt in the {context} tokens of {model}'s context; "
            "use less"
        )


@functools.cache  # `check` loads it first, then `ask`
def load_judge_tokenizer(model: str) -> Tokenizer:
    """Loads the judge's tokenizer, to be used as it ships; exits with 2 if it has no chat template.

    The first call prints how the judge is prompted, where it ends and how its thinking is recognised.
    """
    if not model:
        fail("--judge local: names no model; write local:FOLDER or local:HUB-NAME")
    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:
        fail(f"--judge local:{model} has no chat template; name an instruct model")
    think_format = "auto"  # as its template shows
    stored_format = read_trained_as(model).get("think_format")
    if stored_format == "think":  # trained here, with a template that does not show it
        think_format = "tags"
    line = or_fail(use_as_shipped, tokenizer, think_format, "auto", {})
    print(f"judge {model}: {line}", flush=True)
    return tokenizer


def request_key(model: str, request: dict) -> str:
    """Returns the hash under which a request's texts are stored."""
    content = json.dumps([model, request], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def read_reply(tokenizer: Tokenizer, text: str, finished: bool, parse: Callable[[str], Any]) -> Reply:
    """Parses a judge's text. The Reply's `text` is without thinking, as others read it too; the store has all of it."""
    opening = tokenizer.opening
    if not text.lstrip().startswith(opening.strip()):
        text = opening + text  # the chat template has opened the thinking
    verdict = ""
    try:
        verdict = verdict_of(text, finished)
        return Reply(parse(verdict), verdict, "", (0, 0), {})
    except (ValueError, RecursionError) as error:  # json raises the second on a thousand brackets
        return Reply(None, verdict, str(error), (0, 0), {})
