"""The rest of the paper's suite: generate, judge where a judge is needed, score by each benchmark's own rule (benchmarks.py).

    python eval_benchmarks.py ifeval --model results/rlmt/model --data path/to/ifeval
    python eval_benchmarks.py gsm8k --model results/rlmt/model --data openai/gsm8k:main --temperature 0
    python eval_benchmarks.py arenahard2 --model results/rlmt/model --data path/to/arena_hard_v2 --judge gpt-4.1
    python eval_benchmarks.py ifeval --from responses.jsonl --data path/to/ifeval --out ifeval.json       # no model, no judge

--data is the benchmark's own file, the folder that holds its files, or a hub dataset; data/README.md says where they come
from. --from is jsonl, also .gz; benchmarks.py names the fields of its rows. A completion without a response (thinking not
closed) is scored as the empty answer, and counted under its status; one that was cut off as far as it goes. A judge's reply
that cannot be read is asked for again, then it is invalid: counted, listed, never a score; above 1 % of them there is no
headline.

`--protocol official` (default) and `paper` differ in what a judge is asked: AlpacaEval by the log-probabilities of one token,
or by a ranking as JSON; words kept (all; 2000, and 3200 in creative writing); the length of its reply. The judge's
instructions are our own wording, so they are not the published numbers' judge: to compare with those, have the official tool
judge, and score what it stored by --from.
Writes results/<run>/: config.json, command.txt, env.txt, generations.jsonl, judge.jsonl (raw replies), rows.jsonl (what was
scored, and the result of every row), summary.json; and lines in results/runs.csv.
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import runs  # isort: skip
import tyro

import benchmarks
from benchmarks import shared as evaluation

METRICS = {  # what goes into results/runs.csv, the headline first
    "alpacaeval2": ("lc_win_rate", "win_rate", "lc_win_rate_paper", "win_rate_paper"),
    "arenahard2": ("score_style_controlled", "score", "score_paper"),
    "creativewriting3": ("overall", "overall_paper"),
    "ifbench": ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose"),
    "ifeval": ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose"),
    "popqa": ("accuracy", "accuracy_paper"),
    "math500": ("accuracy", "accuracy_math_verify"),
    **dict.fromkeys(("mmlu_redux", "zebralogic", "gsm8k", "humaneval"), ("accuracy",)),
}
PARSERS = {  # of the benchmarks with a judge
    "alpacaeval2": benchmarks.parse_alpacaeval2,
    "arenahard2": benchmarks.parse_arenahard2,
    "creativewriting3": benchmarks.parse_creativewriting3,
}


@dataclass
class Args:
    name: tyro.conf.Positional[
        Literal[
            "alpacaeval2",
            "arenahard2",
            "creativewriting3",
            "ifbench",
            "ifeval",
            "popqa",
            "mmlu_redux",
            "math500",
            "zebralogic",
            "gsm8k",
            "humaneval",
            "wildbench-g",
        ]
    ] = tyro.MISSING
    """The benchmark; wildbench-g is eval_wildbench.py with the references of gemini-flash, and takes its flags from here."""
    data: str = ""
    """The benchmark's own file, the folder that holds it, or a hub dataset (`owner/name` or `owner/name:configuration`)."""
    # model
    model: str = ""
    """Folder or hub name of the model to evaluate; with --model-url the name that the endpoint knows."""
    model_url: str = ""
    """OpenAI-compatible endpoint that generates, e.g. http://localhost:8000/v1; empty: generate here."""
    think_format: Literal["auto", "think", "plain", "zero_think", "zero_plain"] = "auto"
    """auto: as the checkpoint's think_format.json says; without one, or behind an endpoint, `plain`, and an answer with a
    </think> ends the run."""
    chat_template: str = "auto"
    """As in train_grpo.py."""
    # generation
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM where a GPU and vLLM are there, else transformers' generate."""
    temperature: float = 0.7
    """0 is greedy (paper's evaluation: 0.7)."""
    top_p: float = 0.95
    """The paper's evaluation: 0.95."""
    max_tokens: int = 8192
    """New tokens (paper's evaluation: 8192 with thinking, 4096 without)."""
    samples: int = 1
    """Answers a task, for pass@k; one for benchmarks with a judge, IFEval and IFBench."""
    limit: int = 0
    """Only the first tasks; 0: all."""
    batch_size: int = 64
    """Tasks a batch with transformers' generate."""
    # judge
    judge: str = ""
    """A model's name at --judge-url; local:FOLDER, or a hub name after local:, to run it here."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: OPENAI_BASE_URL, else the official one. The key: OPENAI_API_KEY."""
    protocol: Literal["official", "paper"] = "official"
    """What differs: the top of this script."""
    judge_max_tokens: int = 0
    """Tokens of a judge's reply; 0: as the protocol has it."""
    concurrency: int = 32
    """Judge calls at a time."""
    budget: float = 0.0
    """US dollars that the judge may cost; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the judge."""
    max_invalid: float = 0.01
    """Share of invalid rows above which no headline is given."""
    # instead of a model
    from_: Annotated[str, tyro.conf.arg(name="from")] = ""
    """Stored responses, annotations or judge texts; scores them into the file --out."""
    # run
    seed: int = 0
    """Of sampling, of orders that are drawn, and of intervals."""
    out: str = ""
    """With --from the file of the numbers and, under `rows`, the result of every row (empty: only print the numbers). Else the
    run folder; empty: results/eval_<name>__<model>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Keep what a run folder already has: generations, and every reply of the judge."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, print calls and cost at most, and stop before a model is loaded or asked."""


def check(args: Args) -> list[dict]:
    """The tasks to ask; exits with 2 for what cannot be run."""
    judged = args.name in PARSERS
    if judged and not args.judge:
        runs.fail(f"{args.name} needs --judge: a model's name, or local:FOLDER")
    if args.judge and not judged:
        runs.fail(f"{args.name} has no judge; leave --judge out")
    if args.name == "alpacaeval2" and args.protocol == "official" and args.judge.startswith("local:"):
        runs.fail(
            "AlpacaEval's official protocol reads log-probabilities, which a local judge does not give: serve it by "
            "`vllm serve` and name --judge-url, or use --protocol paper"
        )
    if args.samples > 1 and (judged or args.name in ("ifeval", "ifbench")):
        runs.fail(f"--samples {args.samples}: {args.name} takes one answer a task")
    tasks = [
        task | {"position": i} for i, task in enumerate(benchmarks.load_tasks(args.name, Path(args.data)))
    ]
    tasks = [t for t in tasks if "excluded" not in t and t.get("baseline", True)][: args.limit or None]
    if not tasks:
        runs.fail(
            f"--data {args.data}: no task can be scored; arenahard2 needs the baseline's answers, baseline_*.jsonl"
        )
    if args.name == "arenahard2" and not benchmarks.style(""):
        print(
            "WARNING: tiktoken's table o200k_base cannot be had (one download, kept in TIKTOKEN_CACHE_DIR): no "
            "style-controlled score",
            file=sys.stderr,
        )
    return tasks


def respond(args: Args, tasks: list[dict], run: Path) -> list[dict]:
    """Generation rows of the tasks, sample by sample, with `task`; their `response` is empty where the format is not kept."""
    prompts = [[{"role": "user", "content": benchmarks.prompt(args.name, task)}] for task in tasks]
    asked = [
        {"id": f"{task['position']}-{k}", "sample": k, "messages": messages}
        for task, messages in zip(tasks, prompts)
        for k in range(args.samples)
    ]
    rows = evaluation.generate(args, asked, args.temperature, run)
    return [
        row | {"task": tasks[i // args.samples], "response": evaluation.answer(row)}
        for i, row in enumerate(rows)
    ]


def judge_requests(args: Args, task: dict, response: str) -> dict[str, dict]:
    return benchmarks.judge_requests(
        args.name, task, response, Path(args.data), args.protocol == "paper", args.judge_max_tokens
    )


def judge(args: Args, answers: list[dict], run: Path) -> list[dict]:
    """Rows to score: for each answer what benchmarks.py names, with the judge's replies as they came."""
    paper, calls = args.protocol == "paper", []
    for row in answers:
        calls += [
            (row, field, request)
            for field, request in judge_requests(args, row["task"], row["response"]).items()
        ]
    by_token = args.name == "alpacaeval2" and not paper
    replies = evaluation.ask_judge(args, [c[2] for c in calls], str if by_token else PARSERS[args.name], run)
    for (row, field, _), reply in zip(calls, replies, strict=True):
        side = benchmarks.model_side(row["task"].get("instruction", ""))
        row[field] = benchmarks.token_preference(reply.choice, side) if by_token else reply.text
        if args.name == "alpacaeval2":
            row |= {"output_2": row["response"]} | ({} if by_token else {"model_is": side})
        elif args.name == "arenahard2":
            row["model_metadata"] = benchmarks.style(row["response"])
    return answers


def index_rows(args: Args, numbers: dict, fingerprint: str) -> list[dict]:
    common = {
        "model": args.model,
        "benchmark": args.name,
        "n": numbers["n"],
        "n_invalid": numbers["n_invalid"],
        "temperature": args.temperature,
        "judge": args.judge,
        "fingerprint": fingerprint,
    }
    rows = []
    for metric in METRICS[args.name]:
        headline = metric in ("accuracy", "prompt_strict")
        low, high = numbers.get("interval" if headline else f"{metric}_interval") or (None, None)
        rows.append(common | {"metric": metric, "value": numbers[metric], "low": low, "high": high})
    return rows


def score_stored(args: Args) -> None:
    """--from: stored rows to numbers."""
    if not Path(args.from_).exists():
        runs.fail(f"--from {args.from_}: no such file")
    numbers = benchmarks.score(args.name, benchmarks.read(Path(args.from_)), Path(args.data), args.from_)
    result = {"benchmark": args.name, "from": args.from_, "data": args.data, **numbers}
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1))
    list_invalid(numbers)


def list_invalid(numbers: dict) -> None:
    invalid = [
        f"invalid, line {row['line']}: {row['invalid']}" for row in numbers["rows"] if "invalid" in row
    ]
    for line in invalid[:10] + [f"and {len(invalid) - 10} more"] * (len(invalid) > 10):
        print(line, file=sys.stderr)


def wildbench_g(args: Args) -> None:
    """Becomes eval_wildbench.py, with the flags that both have."""
    shared = (
        "model",
        "model_url",
        "think_format",
        "chat_template",
        "rollout",
        "top_p",
        "max_tokens",
        "limit",
        "batch_size",
        "judge",
        "judge_url",
        "protocol",
        "concurrency",
        "budget",
        "price",
        "max_invalid",
        "seed",
        "out",
        "resume",
        "overwrite",
        "dry_run",
    )
    words = ["--mode", "reward", "--references", "gemini-flash", "--temperatures", str(args.temperature)]
    words += ["--from-judgments", args.from_] if args.from_ else ["--tasks", args.data]
    words += ["--judge-max-tokens", str(args.judge_max_tokens)] if args.judge_max_tokens else []
    for name in shared:
        value = getattr(args, name)
        if value is not False and value != "":  # all of them, as the other script has other defaults
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("eval_wildbench.py")), *words])


def main(args: Args) -> None:
    if args.name == "wildbench-g":
        wildbench_g(args)
    if not args.data:
        runs.fail("--data is missing: the benchmark's file, folder or hub dataset; see data/README.md")
    if args.from_:
        return score_stored(args)
    if not args.model:
        runs.fail("--model is missing; or name stored rows by --from")

    # --- data, checked before anything is loaded or asked
    tasks = check(args)
    if not args.model_url:
        evaluation.load_tokenizer(args)
    asked = lambda answer: (
        [r for t in tasks for r in judge_requests(args, t, answer).values()] if args.judge else []
    )
    place = evaluation.judge_place(args.judge, args.judge_url)
    own = [
        args.name,
        [benchmarks.prompt(args.name, t) for t in tasks],
        args.judge,
        place,
        args.protocol,
        asked(""),
    ]  # with the judge's instructions, and the answers that a benchmark compares with
    fingerprint = hashlib.sha256(json.dumps(own).encode()).hexdigest()[:12]
    print(f"{len(tasks)} tasks x {args.samples} answers; judge: {args.judge or 'none'}")
    if args.judge:
        evaluation.print_estimate(args, asked("word " * args.max_tokens))
    if args.dry_run:
        return
    run = runs.start_run(args, f"eval_{args.name}", args.model)
    if (run / "summary.json").exists():
        return print(f"{run} is complete; --overwrite starts it anew")

    # --- generate, strip, judge, score
    answers = respond(args, tasks, run)
    described = evaluation.describe(answers)
    rows = judge(args, answers, run) if args.judge else answers
    rows = [
        benchmarks.identity(args.name, r["task"], r["task"]["position"])
        | {k: v for k, v in r.items() if k not in ("id", "messages", "task")}
        for r in rows
    ]
    numbers = benchmarks.score(args.name, rows, Path(args.data), str(run / "rows.jsonl"))
    (run / "rows.jsonl").write_text(
        "".join(json.dumps(row | result) + "\n" for row, result in zip(rows, numbers["rows"]))
    )
    headline = METRICS[args.name][0]
    if numbers["n_invalid"] > args.max_invalid * numbers["n"]:
        numbers["without_headline"], numbers[headline] = numbers[headline], None
    list_invalid(numbers)
    summary = {"model": args.model, "fingerprint": fingerprint, **numbers, **described}
    runs.write_summary(run, {k: v for k, v in summary.items() if k != "rows"})
    runs.add_to_index(run, index_rows(args, numbers, fingerprint))


if __name__ == "__main__":
    main(runs.parse_args(Args, {}))
