"""What the evaluation scripts share: answers with the thinking stripped, judges behind one door, intervals.

`args` is a script's own Args, with the fields that are named here.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

import generation
import runs
import utils
from endpoint import Endpoint, Reply, resolve_url


def think_format(args) -> str:
    """That of the model: as --think-format says; auto: as its folder's think_format.json does, `plain` where there is none."""
    stored = Path(args.model) / "think_format.json"
    if args.think_format != "auto":
        return args.think_format
    return (
        json.loads(stored.read_text())["think_format"] if not args.model_url and stored.exists() else "plain"
    )


def load_tokenizer(args):
    """The model's tokenizer with its template."""
    tokenizer = runs.load_tokenizer(args.model)
    runs.or_fail(utils.prepare_tokenizer, tokenizer, think_format(args), args.chat_template)
    return tokenizer


def check_plain(args, text: str) -> None:
    """Exits with 2 where an answer of the model holds thinking and nothing says so: it would be judged as a part of it."""
    said = lambda: (
        args.think_format != "auto"
        or not args.model_url
        and (Path(args.model) / "think_format.json").exists()
    )
    if "</think>" in text and not said():
        runs.fail(
            f"an answer of {args.model} holds </think>, but nothing says that this model thinks, so its thinking would "
            "be judged; pass --think-format think, or plain if the whole text is meant"
        )


def endpoint_sampling(args, temperature: float) -> dict:
    """Sampling parameters of a request to --model-url."""
    sampling = {"temperature": temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    if think_format(args).startswith("zero"):  # only vLLM serves such a model
        sampling |= {"stop": ["</response>"], "include_stop_str_in_output": True}
    return sampling


def generate(args, tasks: list[dict], temperature: float, run: Path) -> list[dict]:
    """Generation rows of all tasks {id, messages[, sample]} at one temperature, thinking stripped; each is kept in
    generations.jsonl as it is done. `sample` is a number from 0 that tells several tasks of one prompt apart."""
    path, tokenizer, how = (
        run / "generations.jsonl",
        None if args.model_url else load_tokenizer(args),
        think_format(args),
    )
    stored = {r["id"]: r for r in runs.read_kept(path) if r["temperature"] == temperature}
    stop = "</response>" if how.startswith("zero") else ""
    count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]) if tokenizer else None

    def keep(task: dict, text: str, finished: bool, n_tokens: int) -> None:
        check_plain(args, text)
        p = utils.split_thinking(text, how, finished)
        row = {
            "id": task["id"],
            "temperature": temperature,
            "messages": task["messages"],
            "text": text,
            "thinking": p.thinking,
            "response": p.response,
            "status": p.status,
            "n_tokens": n_tokens,
            "n_thinking_tokens": count(p.thinking),
        }
        stored[task["id"]] = row
        runs.append_jsonl(path, [row])

    if args.model_url:
        model = Endpoint(args.model, run / "model.jsonl", args.model_url, args.concurrency)
        sampling = endpoint_sampling(args, temperature)
        requests = [
            {"messages": t["messages"], **sampling, **({"seed": t["sample"]} if t.get("sample") else {})}
            for t in tasks
        ]
        check_plain(args, model.ask(requests[:1], name="generate")[0].text)  # before all are paid for
        for task, reply in zip(tasks, model.ask(requests, name="generate")):
            if reply.error:
                runs.fail(f"task {task['id']}: {reply.error}; the same command with --resume goes on")
            if task["id"] not in stored:
                keep(task, reply.text, reply.choice.get("finish_reason") != "length", reply.usage[1])
    else:
        prompts = [utils.encode_prompt(tokenizer, t["messages"]) for t in tasks]
        done = {i for i, t in enumerate(tasks) if t["id"] in stored}
        if len(done) < len(tasks):
            for i, text, finished, ids in generation.generate(
                args.model,
                prompts,
                tokenizer,
                temperature,
                args.max_tokens,
                args.top_p,
                runs.use_vllm(args.rollout),
                args.seed,
                args.batch_size,
                stop,
                done=done,
            ):
                keep(tasks[i], text, finished, len(ids))
    return [stored[t["id"]] for t in tasks]


def answer(row: dict) -> str:
    """What of a generation row is judged: the response, if the token limit cut it off as far as it goes, as the official tools
    do; nothing of a completion in any other bad format, as where the thinking was never closed."""
    return row["response"] if row["status"] in ("ok", "truncated") else ""


def describe(rows: list[dict]) -> dict:
    """Status counts and mean lengths of generation rows."""
    mean = lambda values: float(np.mean(values)) if (values := [v for v in values if v is not None]) else None
    thinking = [r["n_thinking_tokens"] for r in rows]
    return {
        "status": {s: sum(r["status"] == s for r in rows) for s in sorted({r["status"] for r in rows})},
        "format_ok": mean([r["status"] == "ok" for r in rows]),
        "thinking_tokens": mean(thinking),
        "response_tokens": mean([r["n_tokens"] - (t or 0) for r, t in zip(rows, thinking)]),
        "proxy_reward": mean([r.get("reward") for r in rows]),
    }


def shorten(text: str, words: int) -> str:
    """The first `words` space-separated words (0: all), with a mark where something was cut."""
    parts = text.split(" ")
    return text if not words or len(parts) <= words else " ".join(parts[:words]) + "... (truncated)"


def judge_place(judge: str, url: str) -> str:
    """Where a judge or simulated user is asked, for a fingerprint; "" for none, one that runs here, or a program."""
    return "" if not judge or judge.startswith("local:") or ".py:" in judge else resolve_url(url)


def ask_judge(args, requests: list[dict], parse: Callable, run: Path) -> list[Reply]:
    """The replies of --judge, read by `parse` (ValueError: cannot be read, then asked again); all are kept in judge.jsonl."""
    if args.judge.startswith("local:"):
        path, rollout = args.judge.removeprefix("local:"), getattr(args, "rollout", "auto")
        return ask_local(path, requests, parse, run / "judge.jsonl", rollout)
    judge = Endpoint(
        args.judge,
        run / "judge.jsonl",
        args.judge_url,
        args.concurrency,
        budget=args.budget,
        price=args.price,
    )
    print(f"judge: {json.dumps(judge.estimate(requests))}", flush=True)
    return judge.ask(requests, parse)


def print_estimate(args, requests: list[dict]) -> None:
    """What --judge would be asked, and what that costs at most."""
    calls = {"calls": len(requests)}
    if not args.judge.startswith("local:"):
        store = Path(args.out or "results", "judge.jsonl")
        calls = Endpoint(args.judge, store, args.judge_url, args.concurrency, price=args.price).estimate(
            requests
        )
    print(f"judge (one temperature, answers as long as --max-tokens lets them be): {json.dumps(calls)}")


def ask_local(
    path: str, requests: list[dict], parse: Callable, store: Path, rollout: str, attempts: int = 4
) -> list[Reply]:
    """Replies of a judge that runs here. The first is greedy, those after an unreadable one are sampled."""
    tokenizer = runs.load_tokenizer(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # padding is masked
    if not tokenizer.chat_template:
        runs.fail(f"--judge local:{path} has no chat template; name an instruct model")
    prompts = [utils.encode_prompt(tokenizer, r["messages"]) for r in requests]
    stored = {(r["key"], r["attempt"]): r["text"] for r in runs.read_kept(store)}
    keys = [hashlib.sha256(json.dumps([path, r], sort_keys=True).encode()).hexdigest() for r in requests]
    replies = [Reply(None, "", "not asked", (0, 0), {})] * len(requests)
    for attempt in range(attempts):
        todo = [i for i, reply in enumerate(replies) if reply.error]
        if missing := [i for i in todo if (keys[i], attempt) not in stored]:
            texts = generation.generate(
                path,
                [prompts[i] for i in missing],
                tokenizer,
                0.7 if attempt else 0.0,
                requests[0]["max_tokens"],
                1.0,
                runs.use_vllm(rollout),
                attempt,
            )
            for n, text, _, _ in texts:
                stored[keys[missing[n]], attempt] = text
                runs.append_jsonl(store, [{"key": keys[missing[n]], "attempt": attempt, "text": text}])
        for i in todo:
            text = stored[keys[i], attempt]
            try:
                replies[i] = Reply(parse(text), text, "", (0, 0), {})
            except (ValueError, RecursionError) as e:
                replies[i] = Reply(None, text, str(e), (0, 0), {})
    return replies


def bootstrap(values, seed: int = 0, n: int = 2000) -> tuple[float, float]:
    """95 % percentile interval of the mean of `values` (n,), resampling tasks."""
    picks = np.random.default_rng(seed).integers(0, len(values), (n, len(values)))
    low, high = np.percentile(np.asarray(values, dtype=float)[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
