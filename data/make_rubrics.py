"""Has a judge write a rubric for each prompt that has a reference answer (RaR, arXiv 2507.17746, section 3).

    python -m data.make_rubrics --prompts FILE.jsonl --out data/rubrics.jsonl \\
        --judge gpt-4o --budget 20 --price 2.5 10

The rows that it writes are for `--rewards rubric:1`. Every raw reply goes to <out, without
.jsonl>.replies.jsonl, so the same command continues after a stop or an outage, which leaves no --out. A
prompt whose rubric cannot be read is left out, and so is one without a reply, as at most 1 % may be; how
many is printed. The judge is asked about the first prompt alone, first.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import tyro

from rewards.judged import try_judge, write_rubrics
from rlmt.data import read_rows, write_jsonl
from rlmt.scorers import Who, connect
from utils import fail, or_fail, refuse_repeated


@dataclass
class Args:
    prompts: str
    """Rows {id, messages, reference}; the reference is an answer that is known to be good."""
    judge: str
    """Name of the model at --judge-url."""
    out: Path = Path("data/rubrics.jsonl")
    """The same rows with `rubric`, [{criterion, weight}]."""
    judge_url: str = ""
    """OpenAI-compatible endpoint; empty: OPENAI_BASE_URL, else the official one."""
    key_env: tuple[str, ...] = ()
    """HOST=NAME words: the environment variable NAME holds the key for the endpoint at that host, or
    HOST:PORT. Without a word for its host, only the OpenAI API and OPENAI_BASE_URL get OPENAI_API_KEY, others
    no key."""
    omit: tuple[str, ...] = ()
    """Parameters that are left out of all requests, as a server refuses them: seed temperature."""
    judge_max_tokens: int = 4096
    """Limit of a reply; a judge that thinks first needs more."""
    concurrency: int = 32
    """Calls at a time."""
    budget: float = 0.0
    """US dollars that the judge may cost; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written."""
    dry_run: bool = False
    """Check the prompts and the judge (by its first request), and stop."""


def main(args: Args) -> None:
    if args.out.exists():
        fail(f"{args.out} exists; name another file with --out")
    rows = read_rows(args.prompts, "messages", "reference")
    store = args.out.with_suffix(".replies.jsonl")
    who = Who("endpoint", args.judge, args.judge_url)
    judge = connect(who, store, args, concurrency=args.concurrency)
    ask = functools.partial(write_rubrics, max_tokens=args.judge_max_tokens)
    try_judge(judge, ask, rows[0], "--judge")
    if args.dry_run:
        print(f"{len(rows)} prompts, one call each")
        return

    rubrics = or_fail(ask, rows, judge)
    rows_with_rubric = []
    for row, rubric in zip(rows, rubrics, strict=True):
        if rubric:
            rows_with_rubric.append({**row, "rubric": rubric})
    write_jsonl(args.out, rows_with_rubric)
    print(
        f"{len(rows_with_rubric)} of {len(rows)} prompts have a rubric now, in {args.out}; ${judge.cost:.2f}"
    )


if __name__ == "__main__":
    refuse_repeated(Args)
    main(tyro.cli(Args))
