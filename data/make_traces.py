"""Ask a teacher for warm-start traces (paper section 2.3): each prompt answered with thinking and response.

    python -m data.make_traces --prompts data/sft_prompts.jsonl --out data/traces.jsonl --teacher gpt-4.1-mini \\
        --budget 60 --price 0.4 1.6
    python -m data.make_traces ... --resume      # the same command goes on after Ctrl-C, kill -9 or the end of the budget

The teacher is any model behind an OpenAI-compatible endpoint. It gets INSTRUCTION as system message and writes a simulated
thinking trace and the response in tags (the paper's teacher did so with wording and examples of its own). With
--reasoning-field it gets the prompt alone, and the thinking is what its endpoint sends as reasoning.
Prompts are asked in the order of the file, as many at a time as good traces are missing at most, until there are --n: no
prompt is asked beyond the shortest part of the file that gives so many. A reply that is not exactly one thinking block and
one response is asked for again, up to three times; one that a filter drops (refusal, language ...) is not. Writes the rows
to --out, counts of everything to <out>.report.json (n_in == n_out + sum(dropped) + not_asked), and before that every raw
reply to <out>.replies.jsonl. The key comes from OPENAI_API_KEY; `vllm serve` needs none.
"""

import functools
import hashlib
import json
import os
import re
import sys
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro

import runs  # noqa: E402
import utils  # noqa: E402
from endpoint import Endpoint, Reply  # noqa: E402

INSTRUCTION = """\
Reply to the last message of the conversation in exactly this form, with nothing before, between or after the two parts:

<think>
What goes through your mind before you write, in the first person and as it comes: what is asked and what is left unsaid,
which parts a good answer needs and in which order, choices you weigh, facts and constraints you check, a first idea and what
you improve about it. As long as the request deserves: a few sentences for small talk, pages for a hard problem.
</think>
<response>
The answer as the reader is to see it, complete without the thinking, and with no word about it or about this form.
</response>

Write each of the four tags once and nowhere else. Keep to the language of the conversation."""
REFUSALS = (  # how a refusing response begins, in lower case, with "can't" for "cannot" and "i'm" for "i am"
    "i'm sorry, but i",
    "i'm sorry, i can't",
    "i'm really sorry, but i",
    "sorry, but i",
    "sorry, i can't",
    "i apologize, but i",
    "i can't help with",
    "i can't help you",
    "i can't assist",
    "i can't comply",
    "i can't fulfill",
    "i can't provide",
    "i can't create",
    "i can't write",
    "i can't generate",
    "i can't answer",
    "i can't discuss",
    "i can't do that",
    "i'm unable to",
    "i'm not able to",
    "i won't be able to",
    "i won't help",
    "i won't provide",
    "i must decline",
    "i have to decline",
    "as an ai, i can't",
    "as an ai language model, i can't",
)
NAMED = re.compile(  # a prompt with one of these words may want an answer in another script
    r"language|translat|transliterat|english|russian|ukrain|bulgarian|serbian|greek|hebrew|arabic|persian|farsi|urdu|hindi|marathi"
    r"|nepali|bengali|punjabi|gujarati|tamil|telugu|kannada|malayalam|sinhala|thai|burmese|khmer|armenian|georgian|amharic"
    r"|chinese|mandarin|cantonese|japanese|korean|翻[译譯訳]|英[文语語]|перев[оеё]|английск",
    re.I,
)
MIN_THINKING = 100  # characters; shorter thinking plans nothing
OTHER_TAGS = re.compile(
    r"</?\s*(think|thinking|thought|response)\s*>", re.I
)  # of the format or like it, inside a text
FIRST = 32  # prompts; if none of the first gives a good trace, nothing more is spent


@dataclass
class Args:
    prompts: Path
    """Prompt rows {id, messages, source}; see data/README.md. Have some 10 % more than --n, as some replies are dropped."""
    out: Path
    """The .jsonl file of trace rows to write; report and raw replies go beside it."""
    teacher: str
    """Name of the model at the endpoint (paper: gemini-2.5-flash-preview-04-17)."""
    teacher_url: str = ""
    """OpenAI-compatible endpoint, e.g. http://localhost:8000/v1; empty: the official one."""
    reasoning_field: bool = False
    """Thinking is the message's `reasoning_content` or `reasoning` (`vllm serve --reasoning-parser ...`), not tagged text."""
    n: int = 6003
    """Good traces wanted (paper table 5)."""
    temperature: float = 1.0
    """Not in the paper; 1.0 is what the APIs of OpenAI and Gemini take where none is given."""
    max_tokens: int = 8192
    """Tokens of a reply; not in the paper. A reply that reaches it is dropped as truncated."""
    concurrency: int = 32
    """Calls at a time."""
    budget: float = 0.0
    """US dollars that the teacher may cost, earlier starts included; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the teacher."""
    resume: bool = False
    """Go on from the replies that are there; replaces an existing output."""
    overwrite: bool = False
    """Delete an existing output, its report and its replies first."""
    dry_run: bool = False
    """Check arguments and prompts, print calls, tokens and cost for the first --n prompts, and stop."""


# --- 1. reading a reply


def refuses(response: str) -> bool:
    start = response.strip()[:100].lower().replace("’", "'").replace("cannot", "can't").replace("i am", "i'm")
    return re.match(rf"({'|'.join(REFUSALS)})\b", start) is not None


@functools.cache
def script(letter: str) -> str:
    """The first word of a letter's Unicode name: LATIN, CYRILLIC, ARABIC ...; CJK for Chinese characters and kana."""
    name = re.split("[ -]", unicodedata.name(letter, "UNKNOWN"))[0]
    return "CJK" if name in ("HIRAGANA", "KATAKANA") else name


def wrong_language(messages: list[dict], response: str) -> bool:
    """Whether more than 3/4 of the response's letters are of a script that fewer than 1/10 of the last turn's letters are of.

    Fenced code does not count, a text of under 5 letters tells nothing, and neither does a prompt that matches NAMED.
    Languages of one script are not told apart.
    """
    texts = [re.sub(r"(?s)```.*?```", "", text) for text in (messages[-1]["content"], response)]
    asked, answered = (Counter(script(c) for c in text if c.isalpha()) for text in texts)
    if min(asked.total(), answered.total()) < 5 or any(NAMED.search(m["content"]) for m in messages):
        return False
    name, count = answered.most_common(1)[0]
    return count > 0.75 * answered.total() and asked[name] < 0.1 * asked.total()


def split_reply(text: str, reasoning: str | None = None) -> tuple[str, str]:
    """Thinking and response of a reply that has one of each and nothing else; else ValueError with the reason.

    `reasoning`: thinking that came apart from the text, which is the response then; None: both are in the text, in tags.
    """
    if reasoning is None:
        thinking, response, status = utils.split_thinking(text, "zero_think")
        if status == "ok" and text.count("</response>") > 1:  # that parser ends at the first one
            status = "nested"
        elif status == "ok" and not text.rstrip().endswith("</response>"):
            status = "text_after_response"
    else:
        thinking, response, status = reasoning.strip(), text.strip(), "ok"
    if status == "ok" and not (thinking and response):
        status = "empty_response" if thinking else "empty_thinking"
    if status != "ok":
        raise ValueError(status)
    return thinking, response


def trace_of(row: dict, reply: Reply, args: Args) -> dict | str:
    """The trace row of a prompt row and the teacher's reply, or the reason for dropping it."""
    if not reply.choice:
        return "no_reply" if reply.error.startswith("no reply") else "rejected"
    message, finish_reason, reasoning = reply.choice["message"], reply.choice.get("finish_reason"), None
    if message.get("refusal") or finish_reason == "content_filter" or refuses(reply.text):
        return "refusal"
    if finish_reason == "length":
        return "truncated"
    if args.reasoning_field:
        fields = (message.get(name) for name in ("reasoning_content", "reasoning"))
        reasoning = next((text for text in fields if isinstance(text, str)), "")
    try:
        thinking, response = split_reply(reply.text, reasoning)
    except ValueError as reason:
        return str(reason)
    faults = {
        "tag_inside_text": OTHER_TAGS.search(thinking) or OTHER_TAGS.search(response),
        "refusal": refuses(response),
        "short_thinking": len(thinking) < MIN_THINKING,
        "wrong_language": wrong_language(row["messages"], response),
        "broken_unicode": re.search(
            "[\ud800-\udfff]", thinking + response
        ),  # half a surrogate pair: not writable as UTF-8
    }
    trace = {**row, "thinking": thinking, "response": response, "teacher": args.teacher}
    return next((reason for reason, true in faults.items() if true), trace)


# --- 2. asking


def load_prompts(args: Args) -> tuple[list[dict], list[str]]:
    """Prompt rows {id, messages} without repeats, and the ids of those: the endpoint answers equal requests once."""
    rows, repeats, ids, seen = [], [], set(), set()
    for number, row in enumerate(runs.read_rows(args.prompts, "messages"), 1):
        row = {
            "id": str(row["id"]),
            "messages": [{k: m[k] for k in ("role", "content")} for m in row["messages"]],
        }
        if row["id"] in ids:
            runs.fail(
                f"{args.prompts}:{number}: id {row['id']!r} occurs twice; data/prepare.py gives each row its own"
            )
        ids.add(row["id"])
        text = json.dumps(row["messages"])
        rows.append(row) if text not in seen else repeats.append(row["id"])
        seen.add(text)
    return rows, repeats


def request_for(row: dict, args: Args) -> dict:
    messages = row["messages"]
    if not args.reasoning_field:
        own, turns = ([messages[0]], messages[1:]) if messages[0]["role"] == "system" else ([], messages)
        texts = [INSTRUCTION, *(f"What the response must keep to:\n\n{m['content']}" for m in own)]
        messages = [{"role": "system", "content": "\n\n".join(texts)}, *turns]
    return {"messages": messages, "temperature": args.temperature, "max_tokens": args.max_tokens}


def make_traces(
    args: Args, teacher: Endpoint, rows: list[dict]
) -> tuple[list[dict], dict[str, list[str]], int]:
    """Good traces in the order of the prompts, ids of the dropped prompts by reason, and how many prompts were asked."""
    traces, dropped, n_asked = [], {}, 0
    # a refusal is a reply; reasoning is out of sight here, so only the text decides whether to ask again
    parse = lambda text: refuses(text) or split_reply(text, "unseen" if args.reasoning_field else None)
    while len(traces) < args.n and n_asked < len(rows):
        size = min(args.n - len(traces), 16 * args.concurrency if traces else FIRST)
        part = rows[n_asked : n_asked + size]
        n_asked += len(part)
        replies = teacher.ask([request_for(row, args) for row in part], parse, name="teacher")
        for row, reply in zip(part, replies, strict=True):
            trace = trace_of(row, reply, args)
            dropped.setdefault(trace, []).append(row["id"]) if isinstance(trace, str) else traces.append(
                trace
            )
        counts = {reason: len(ids) for reason, ids in dropped.items()}
        if not traces and (n_asked >= FIRST or n_asked == len(rows)):
            seen = replies[0].error or replies[0].text[:200]
            runs.fail(
                f"none of the first {n_asked} prompts got a usable reply: {counts}; one of them: {seen!r}"
            )
        if counts.get("no_reply", 0) > max(1, args.n // 100):
            last = next(reply.error for reply in reversed(replies) if reply.error.startswith("no reply"))
            runs.fail(
                f"{counts['no_reply']} prompts got no reply, more than 1 % of --n ({last}); the same command with "
                "--resume asks them again, and no other"
            )
    return traces, dropped, n_asked


def main(args: Args) -> None:
    # --- arguments and prompts, checked before anything is spent
    report_path, store = Path(f"{args.out}.report.json"), Path(f"{args.out}.replies.jsonl")
    existing = [path for path in (args.out, report_path, store) if path.exists()]
    for wrong, message in (
        (args.out.suffix != ".jsonl", f"--out {args.out}: the name has to end in .jsonl"),
        (args.out.resolve() == args.prompts.resolve(), f"--out {args.out} holds the prompts; choose another"),
        (
            args.n < 1 or args.max_tokens < 1,
            f"--n {args.n} and --max-tokens {args.max_tokens} have to be 1 or more",
        ),
        (
            args.resume and args.overwrite,
            "--resume keeps the replies that --overwrite deletes; use one of the two",
        ),
        (
            existing and not (args.resume or args.overwrite or args.dry_run),
            f"{next(iter(existing), '')} exists; --resume goes on from there, --overwrite deletes it, or choose another --out",
        ),
    ):
        if wrong:
            runs.fail(message)
    rows, repeats = load_prompts(args)
    if len(rows) < args.n:
        runs.fail(
            f"{args.prompts}: {len(rows)} different prompts cannot give --n {args.n} traces; add prompts or lower --n"
        )
    teacher = Endpoint(
        args.teacher,
        store,
        args.teacher_url,
        args.concurrency,
        timeout=600,
        budget=args.budget,
        price=args.price,
    )
    if args.overwrite and not args.dry_run:
        for path in existing:
            path.unlink()
    estimate = teacher.estimate([request_for(row, args) for row in rows[: args.n]])
    print(f"{len(rows)} prompts; for the first {args.n}, repeats aside: {json.dumps(estimate)}", flush=True)
    if args.dry_run:
        return

    # --- ask, then write
    traces, dropped, n_asked = make_traces(args, teacher, rows)
    if repeats:
        dropped["duplicate_prompt"] = repeats
    text = "".join(json.dumps(trace, ensure_ascii=False) + "\n" for trace in traces)
    report = {
        "prompts": str(args.prompts),
        "teacher": args.teacher,
        "n_in": len(rows) + len(repeats),
        "n_asked": n_asked,
        "n_out": len(traces),
        "not_asked": len(rows) - n_asked,
        "dropped": {r: len(ids) for r, ids in dropped.items()},
        "examples": {reason: ids[:5] for reason, ids in dropped.items()},
        "cost": teacher.cost,
        "calls": teacher.calls,
        "repeats": teacher.repeats,
        "replies": len(teacher.bodies),
        "instruction": INSTRUCTION,
        "args": vars(args),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    for path, content in ((args.out, text), (report_path, json.dumps(report, indent=1, default=str) + "\n")):
        Path(f"{path}.part").write_text(content, encoding="utf-8", newline="\n")
        os.replace(f"{path}.part", path)
    print(
        f"{n_asked} prompts asked, {len(traces)} traces -> {args.out}; {teacher.calls} calls, ${teacher.cost:.2f}"
    )
    for reason, ids in dropped.items():
        print(f"  dropped {len(ids):7d}  {reason}  (first: {', '.join(ids[:2])})")
    if len(traces) < args.n:
        print(
            f"WARNING: the prompts are used up, {args.n - len(traces)} traces short of --n {args.n}; append more prompts to "
            f"{args.prompts} and go on with --resume",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main(tyro.cli(Args))
