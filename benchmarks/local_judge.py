"""A judge that runs on this machine: `--judge local:FOLDER`, or a hub name after `local:`."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rollout
import runs
import utils
from endpoint import Reply

ATTEMPTS = 4  # as many as an endpoint gets
RETRY_TEMPERATURE = 0.7  # the first attempt is greedy; asking greedily again would give the same text


def ask(
    model: str, requests: list[dict], parse: Callable[[str], Any], store: Path, backend: str
) -> list[Reply]:
    """Returns the local judge's reply to each request, in their order.

    Every text is appended to `store` before it is parsed, so a later start does not generate it again.

    Args:
        model: folder or hub name.
        requests: bodies as for an endpoint; of each `messages` is used, of the first one `max_tokens`.
        parse: reads a text; raises ValueError if it cannot, and the request is asked again.
        backend: "auto", "vllm" or "hf", as --rollout.
    """
    tokenizer = load_tokenizer(model)
    prompts = [utils.encode_prompt(tokenizer, request["messages"]) for request in requests]
    keys = [request_key(model, request) for request in requests]
    stored_texts = {(row["key"], row["attempt"]): row["text"] for row in runs.read_kept(store)}
    replies = [Reply(None, "", "not asked", (0, 0), {}) for _ in requests]

    for attempt in range(ATTEMPTS):
        unread = [i for i, reply in enumerate(replies) if reply.error]
        missing = [i for i in unread if (keys[i], attempt) not in stored_texts]
        if missing:
            temperature = RETRY_TEMPERATURE if attempt else 0.0
            samples = rollout.generate(
                model,
                [prompts[i] for i in missing],
                tokenizer,
                rollout.Sampling(temperature, requests[0]["max_tokens"]),
                use_vllm=rollout.use_vllm(backend),
                seed=attempt,
            )
            for position, sample in samples:
                text = rollout.text_of(tokenizer, sample)
                key = keys[missing[position]]
                stored_texts[key, attempt] = text
                runs.append_jsonl(store, [{"key": key, "attempt": attempt, "text": text}])

        for i in unread:
            replies[i] = read_reply(stored_texts[keys[i], attempt], parse)
    return replies


def load_tokenizer(model: str):
    """Loads the judge's tokenizer; exits with 2 if it has no chat template."""
    tokenizer = utils.load_tokenizer(model)
    if not tokenizer.chat_template:
        runs.fail(f"--judge local:{model} has no chat template; name an instruct model")
    if not tokenizer.pad_token:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so any token will do
    return tokenizer


def request_key(model: str, request: dict) -> str:
    return hashlib.sha256(json.dumps([model, request], sort_keys=True).encode()).hexdigest()


def read_reply(text: str, parse: Callable[[str], Any]) -> Reply:
    try:
        return Reply(parse(text), text, "", (0, 0), {})
    except (ValueError, RecursionError) as e:  # json raises the second on a thousand brackets
        return Reply(None, text, str(e), (0, 0), {})
