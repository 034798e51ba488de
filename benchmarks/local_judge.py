"""A judge that runs on this machine: `--judge local:FOLDER`, or a hub name after `local:`."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

import policy
import rollout
import runs
import templates
import utils
from endpoint import Reply

ATTEMPTS = 4  # as many as an endpoint gets
RETRY_TEMPERATURE = 0.7  # the first attempt is greedy; asking greedily again would give the same text


def ask(
    model: str,
    requests: list[dict],
    parse: Callable[[str], Any],
    store: Path,
    backend: str,
    gpus: list[list[str]] | None = None,
    dtype: str = "auto",
) -> list[Reply]:
    """Returns the local judge's reply to each request, in their order.

    Every text is appended to `store` before it is parsed, so a later start does not generate it again.

    Args:
        model: folder or hub name.
        requests: bodies as for an endpoint. Only `messages` are read, and `max_tokens` of the first request.
        parse: reads a text; raises ValueError if it cannot, and the request is asked again.
        backend: "auto", "vllm" or "hf", as --rollout.
        gpus, dtype: see rollout.generate.
    """
    tokenizer = load_tokenizer(model)
    keys = [request_key(model, request) for request in requests]
    prompts = {}  # by key: equal requests get one reply
    for key, request in zip(keys, requests):
        prompts[key] = templates.encode_prompt(tokenizer, request["messages"])
    texts = {}  # by key and attempt
    for row in runs.read_log(store):
        texts[row["key"], row["attempt"]] = row["text"]

    replies: dict[str, Reply] = {}
    unread = list(prompts)
    for attempt in range(ATTEMPTS):
        # seeds and batches follow from the places in `unread`, so a resumed run repeats an unbroken one
        done = {place for place, key in enumerate(unread) if (key, attempt) in texts}
        if len(done) < len(unread):
            temperature = RETRY_TEMPERATURE if attempt else 0.0
            samples = rollout.generate(
                model,
                [prompts[key] for key in unread],
                tokenizer,
                rollout.Sampling(temperature, requests[0]["max_tokens"]),
                use_vllm=rollout.use_vllm(backend),
                seed=attempt,
                gpus=gpus,
                done=done,
                dtype=dtype,
            )
            for place, sample in samples:
                key = unread[place]
                text = rollout.text_of(tokenizer, sample)
                texts[key, attempt] = text
                runs.append_jsonl(store, [{"key": key, "attempt": attempt, "text": text}])

        for key in unread:
            replies[key] = read_reply(texts[key, attempt], parse)
        unread = [key for key in unread if replies[key].error]
    return [replies[key] for key in keys]


def check(model: str) -> None:
    """Exits with 2 if the judge's tokenizer, chat template, config or weights are missing; loads no weights."""
    load_tokenizer(model)
    utils.load_config(model)
    policy.check_weights(AutoModelForCausalLM, model)


def load_tokenizer(model: str):
    """Loads the judge's tokenizer; exits with 2 if it has no chat template."""
    if not model:
        runs.fail("--judge local: names no model; write local:FOLDER or local:HUB-NAME")
    tokenizer = utils.load_tokenizer(model)
    if not tokenizer.chat_template:
        runs.fail(f"--judge local:{model} has no chat template; name an instruct model")
    if not tokenizer.pad_token:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so any token will do
    return tokenizer


def request_key(model: str, request: dict) -> str:
    """Returns the hash under which a request's texts are stored."""
    content = json.dumps([model, request], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def read_reply(text: str, parse: Callable[[str], Any]) -> Reply:
    try:
        return Reply(parse(text), text, "", (0, 0), {})
    except (ValueError, RecursionError) as error:  # json raises the second on a thousand brackets
        return Reply(None, text, str(error), (0, 0), {})
