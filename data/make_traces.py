"""Asks a teacher for warm-start traces (paper section 2.3): a thinking trace and a response for each prompt.

    python -m data.make_traces --prompts data/sft_prompts.jsonl --out data/traces.jsonl \\
        --teacher gpt-4.1-mini --budget 60 --price 0.4 1.6
    python -m data.make_traces ... --resume      # continues after Ctrl-C, kill -9 or the end of the budget

The teacher is any model behind an OpenAI-compatible endpoint. It gets INSTRUCTION as its system message and
writes a simulated thinking trace and the response in tags. The paper's teacher was asked for the same in
other words, behind the prompt; --instruction FILE uses those of a file. With --reasoning-field the teacher
gets the prompt alone, and the thinking is what its endpoint sends as reasoning.

Prompts are asked in the order of the file until there are --n good traces, never more at a time than are
still missing. A reply that is not exactly one thinking block and one response is asked for again, up to three
times, and so is one that was cut off. One that a filter drops (refusal, no or short thinking, ...) is not.
The rows go to --out and all counts to <out>.report.json, where n_in == n_out + sum(dropped) + not_asked.
Before that, every raw reply goes to <out>.replies.jsonl. The teacher is asked about the first prompt alone,
first. A key comes from OPENAI_API_KEY for the OpenAI API, and for another host from the variable that
--key-env names; `vllm serve` needs none.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from data.prepare import SURROGATE, count_ids, write_rows
from rlmt.chat import flaw_of_text
from rlmt.data import Dropped, check_ids, drop_if, read_prompts
from rlmt.endpoint import Endpoint, Reply, try_endpoint
from rlmt.scorers import Who, connect
from utils import THINK_FORMATS, fail, or_fail, refuse_repeated, split_thinking

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
REFUSALS = (  # beginnings of refusals, in lower case, with "can't" for "cannot" and "i'm" for "i am"
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
MIN_THINKING = 100  # characters; shorter thinking plans nothing
STRAY_TAG = re.compile(r"</?\s*(think|thinking|thought|response)\s*>", re.I)
MAX_REPEATS = 3  # of a prompt whose reply cannot be read
TRIAL = 32  # prompts; if none of the first ones gives a good trace, nothing more is spent
TIMEOUT = 600  # seconds for one reply


@dataclass
class Args:
    prompts: Path
    """Prompts: a file, a folder or a hub name with its split (NAME:SPLIT), in any form of data/README.md.
    Have 10 % more than --n, as some are dropped."""
    out: Path
    """The .jsonl file to write. The report goes to <out>.report.json, raw replies to <out>.replies.jsonl."""
    teacher: str
    """Name of the model at the endpoint (paper: gemini-2.5-flash-preview-04-17)."""
    teacher_url: str = ""
    """OpenAI-compatible endpoint, e.g. http://localhost:8000/v1; empty: OPENAI_BASE_URL, else the official one."""
    key_env: tuple[str, ...] = ()
    """HOST=NAME words: the environment variable NAME holds the key for the endpoint at that host, or
    HOST:PORT. Without a word for its host, only the OpenAI API and OPENAI_BASE_URL get OPENAI_API_KEY, others
    no key."""
    omit: tuple[str, ...] = ()
    """Parameters that are left out of all requests, as a server refuses them: seed temperature."""
    instruction: Path | None = None
    """File with the instruction, used verbatim as the system message; none: ours. With {prompt} in it, it is
    the last user turn instead, with the prompt's last turn in that place. It must ask for <think> and
    <response> as ours does."""
    reasoning_field: bool = False
    """Thinking is in `reasoning_content` or `reasoning` (vllm serve --reasoning-parser), not in tags."""
    n: int = 6003
    """Good traces wanted (paper table 5)."""
    temperature: float = 1.0
    """Not in the paper; 1.0 is what the APIs of OpenAI and Gemini use if none is given."""
    max_tokens: int = 8192
    """Tokens of a reply; not in the paper. A prompt whose four replies reach it is dropped as
    truncated."""
    concurrency: int = 32
    """Calls at a time."""
    budget: float = 0.0
    """US dollars that the teacher may cost, earlier starts included; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the teacher."""
    resume: bool = False
    """Continue from the stored replies; replaces an existing output."""
    dry_run: bool = False
    """Check arguments, prompts and teacher (by the first request), print calls, tokens and cost for the first
    --n prompts if every reply can be used at once, and stop. What is spent at most is --budget."""


class BadReply(Dropped):
    """A reply cannot be read, so the prompt is asked again; the message is the reason that the report
    counts."""


# --- 1. reading a reply


def refuses(response: str) -> bool:
    beginning = response.strip()[:100].lower()
    beginning = beginning.replace("’", "'").replace("cannot", "can't").replace("i am", "i'm")
    return re.match(rf"({'|'.join(REFUSALS)})\b", beginning) is not None


def split_reply(text: str, reasoning: str | None = None) -> tuple[str, str]:
    """Returns thinking and response of a reply; raises BadReply unless it has one of each and nothing else.

    `reasoning`: thinking that the endpoint sent apart from the text, which is then the response. None: both
    are in the text, in tags.
    """
    if reasoning is None:
        flaw = flaw_of_text(text, "zero_think")
        if flaw:
            raise BadReply(flaw)
        thinking, response, _ = split_thinking(text, "zero_think")
    else:
        thinking = reasoning.strip()
        response = text.strip()
    for name, part in (("thinking", thinking), ("response", response)):
        if not part:
            raise BadReply(f"empty_{name}")
    return thinking, response


def read_trace(reply: Reply, reasoning_field: bool) -> dict:
    """Returns thinking and response of the teacher's reply; raises Dropped if it gives no trace."""
    drop_if(reply.error.startswith("no reply"), "no_reply")
    drop_if(not reply.choice, "rejected")
    message = reply.choice["message"]
    finish = reply.choice.get("finish_reason")
    marked = finish == "content_filter" or bool(message.get("refusal"))
    drop_if(marked or refuses(reply.text), "refusal")
    drop_if(finish == "length", "truncated")
    reasoning = None
    if reasoning_field:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    thinking, response = split_reply(reply.text, reasoning)
    drop_if(STRAY_TAG.search(thinking + response) is not None, "tag_inside_text")
    drop_if(refuses(response), "refusal")
    drop_if(len(thinking) < MIN_THINKING, "short_thinking")
    drop_if(SURROGATE.search(thinking + response) is not None, "broken_unicode")
    return {"thinking": thinking, "response": response}


# --- 2. asking


def load_prompts(path: Path) -> tuple[list[dict], list[str]]:
    """Returns prompt rows {id, messages} without repeats, and the ids of the repeats.

    The endpoint answers equal requests once, so a repeated prompt would give the same trace again.
    """
    prompts = read_prompts(path)
    check_ids(path, prompts, "prompts")
    rows = {}
    repeated_ids = []
    for row in prompts:
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
        text = json.dumps(messages)
        if text in rows:
            repeated_ids.append(str(row["id"]))
        else:
            rows[text] = {"id": str(row["id"]), "messages": messages}
    return list(rows.values()), repeated_ids


def read_instruction(path: Path | None) -> str:
    """Returns what the teacher is told; exits with 2 if a file cannot be read or does not name the four
    tags."""
    if path is None:
        return INSTRUCTION
    text = or_fail(path.read_text)
    tags_of_reply = sorted(THINK_FORMATS["zero_think"].tags)  # split_reply reads that format
    missing = [tag for tag in tags_of_reply if tag not in text]
    if missing:
        fail(f"--instruction {path}: does not ask for {', '.join(missing)}, so no reply could be read")
    return text


def with_instruction(messages: list[dict], instruction: str) -> list[dict]:
    """Returns the messages with the instruction: in place of the last turn if it holds {prompt}, else before
    them.

    A system turn of the prompt stays, or becomes a part of an instruction that is the system message.
    """
    if "{prompt}" in instruction:
        *earlier, last = messages
        return [*earlier, {"role": "user", "content": instruction.replace("{prompt}", last["content"])}]
    system = instruction
    turns = messages
    if messages[0]["role"] == "system":
        system += f"\n\nWhat the response must keep to:\n\n{messages[0]['content']}"
        turns = messages[1:]
    return [{"role": "system", "content": system}, *turns]


def make_traces(
    teacher: Endpoint, rows: list[dict], requests: list[dict], n: int, reasoning_field: bool
) -> tuple[list[dict], dict[str, list[str]], int]:
    """Asks until there are n good traces or every prompt was asked; `requests` has one for each of `rows`.

    Returns the traces in the order of the prompts, the ids of the dropped prompts by reason, and how many
    were asked.
    """

    def is_readable(text: str) -> bool:
        """Raises BadReply, so that the prompt is asked again; a refusal is final."""
        if not refuses(text):
            split_reply(text, "(not in the text)" if reasoning_field else None)
        return True

    traces: list[dict] = []
    dropped: dict[str, list[str]] = {}
    n_asked = 0
    while len(traces) < n and n_asked < len(rows):
        at_most = 16 * teacher.concurrency if traces else TRIAL
        batch = slice(n_asked, n_asked + min(at_most, n - len(traces)))
        replies = teacher.ask(requests[batch], is_readable, MAX_REPEATS, name="teacher")
        n_asked += len(replies)
        for row, reply in zip(rows[batch], replies, strict=True):
            try:
                traces.append(row | read_trace(reply, reasoning_field) | {"teacher": teacher.model})
            except Dropped as reason:
                dropped.setdefault(str(reason), []).append(row["id"])

        if not traces and (n_asked >= TRIAL or n_asked == len(rows)):
            seen = replies[0].error or replies[0].text[:200]
            fail(
                f"none of the first {n_asked} prompts got a usable reply: {count_ids(dropped)}; "
                f"the first reply: {seen!r}"
            )
        n_unanswered = len(dropped.get("no_reply", []))
        if n_unanswered > max(1, n // 100):
            last_error = [reply.error for reply in replies if reply.error.startswith("no reply")][-1]
            fail(
                f"{n_unanswered} prompts got no reply, more than 1 % of --n ({last_error}); "
                "the same command with --resume asks only them again"
            )
    return traces, dropped, n_asked


# --- 3. files


def main(args: Args) -> None:
    # --- everything that can be wrong is checked before anything is spent
    if args.reasoning_field and args.instruction:
        fail("--reasoning-field sends the prompt alone; leave --instruction out")
    instruction = read_instruction(args.instruction)
    store = Path(f"{args.out}.replies.jsonl")
    for path in (args.out, Path(f"{args.out}.report.json"), store):
        if path.exists() and not args.resume:
            fail(f"{path} exists; --resume continues from there, or choose another --out")
    rows, repeated_ids = load_prompts(args.prompts)
    if len(rows) < args.n:
        fail(
            f"{args.prompts}: {len(rows)} different prompts cannot give --n {args.n} traces; "
            "add prompts or lower --n"
        )
    requests = []
    for row in rows:
        messages = row["messages"]
        if not args.reasoning_field:
            messages = with_instruction(messages, instruction)
        sampling = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        requests.append({"messages": messages} | sampling)
    who = Who("endpoint", args.teacher, args.teacher_url)
    teacher = connect(who, store, args, concurrency=args.concurrency, timeout=TIMEOUT)
    estimate = teacher.estimate(requests[: args.n])
    print(
        f"{len(rows)} prompts; for the first {args.n}, if every reply can be used at once: {json.dumps(estimate)}",
        flush=True,
    )
    try_endpoint(teacher, requests[0], "--teacher")
    if args.dry_run:
        return

    # --- ask, then write
    traces, dropped, n_asked = make_traces(teacher, rows, requests, args.n, args.reasoning_field)
    if repeated_ids:
        dropped["duplicate_prompt"] = repeated_ids
    report = {
        "n_in": len(rows) + len(repeated_ids),
        "n_asked": n_asked,
        "not_asked": len(rows) - n_asked,
        "cost": teacher.cost,
        "calls_of_this_start": teacher.calls,
        "instruction": instruction,
        "args": vars(args),
    }
    cost = f"${teacher.cost:.2f} over all starts" if any(args.price) else "no price given"
    print(
        f"{n_asked} prompts asked, {len(traces)} traces -> {args.out}; {teacher.calls} calls in this start, {cost}"
    )
    write_rows(args.out, traces, dropped, report)
    if len(traces) < args.n:
        print(
            f"WARNING: the prompts are used up, {args.n - len(traces)} traces short of --n {args.n}; "
            f"append more prompts to {args.prompts} and continue with --resume",
            file=sys.stderr,
        )


if __name__ == "__main__":
    refuse_repeated(Args)
    main(tyro.cli(Args))
