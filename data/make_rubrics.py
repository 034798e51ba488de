"""Writes a rubric for each prompt that has a reference answer, by a judge (RaR, arXiv 2507.17746, section 3): rows for
`--rewards rubric:1`.

    python -m data.make_rubrics --prompts FILE.jsonl --judge gpt-4o --out data/rubrics.jsonl --budget 20 --price 2.5 10

Every reply is kept beside `--out` as it comes, so the same command goes on after a stop. Prompts without a rubric that can be
read are counted and left out.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

import rewards
import runs
from endpoint import Endpoint
from rows import read_rows


@dataclass
class Args:
    prompts: str
    """Rows {id, messages, reference}, the reference an answer that is known to be good."""
    judge: str
    """A model's name at --judge-url."""
    out: Path = Path("data/rubrics.jsonl")
    """The same rows with `rubric`, [{criterion, weight}]."""
    judge_url: str = ""
    """OpenAI-compatible endpoint; empty: OPENAI_BASE_URL, else the official one. The key comes from OPENAI_API_KEY."""
    concurrency: int = 32
    """Calls at a time."""
    budget: float = 0.0
    """US dollars that the judge may cost; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written."""


def main(args: Args) -> None:
    if args.out.exists():
        runs.fail(f"{args.out} exists; name another file by --out")
    rows = read_rows(args.prompts, "messages", "reference")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    judge = Endpoint(
        args.judge,
        args.out.with_suffix(".replies.jsonl"),
        args.judge_url,
        args.concurrency,
        budget=args.budget,
        price=args.price,
    )
    rubrics = rewards.write_rubrics(rows, judge)
    made = [row | {"rubric": rubric} for row, rubric in zip(rows, rubrics, strict=True) if rubric]
    runs.append_jsonl(args.out, made)
    print(f"{len(made)} of {len(rows)} prompts have a rubric now, in {args.out}; ${judge.cost:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
