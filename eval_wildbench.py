"""WildBench: generate an answer to every task, strip the thinking, judge, report a score with interval.

    python eval_wildbench.py --model results/rlmt/model --tasks data/wildbench.jsonl --mode reward --judge gpt-4o-2024-05-13
    python eval_wildbench.py --model results/rlmt/model --tasks data/wildbench.jsonl --mode score --judge local:Qwen/Qwen3-32B
    python eval_wildbench.py --model results/demo/runs/grpo-think-s0/model --tasks data/toy/benchmark_tasks.jsonl \\
        --judge data/toy/world.py:judge --max-tokens 128 --temperatures 1.0 0.0
    python eval_wildbench.py --from-judgments verdicts.jsonl.gz --mode score --out score.json        # no model, no judge

Modes. `reward` (WB-Reward): the judge compares the answer with a reference's, A++, A+, A=B, B+ or B++, worth 100, 50, 0, -50
and -100 for the model; the mean over tasks, orders and references. `score` (WB-Score): a mark from 1 to 10 for the answer
alone; (mean - 5) x 20. `program`: a judge of your own, `file.py:function(messages, response)` -> {"score", "checks"}.

A completion whose thinking is not closed has no response: it is judged as the empty answer, and counted under its status; a
response that the token limit cut off is judged as it is (`program`: as empty). An empty answer loses against any other
without a call (official rule). A verdict that cannot be read is asked for again, then it is `invalid`: counted, listed, never
a score; above 1 % of them there is no headline.

`--protocol official` (default) and `paper` (its released code) differ: 1000 or 2000 words kept of history and answers in
`reward` (none cut in `score`, or 2000); what cannot be read is invalid, or the worst score (-100; mark 1); empty answers are
decided by rule, or judged. By flag: the paper's judge gpt-4o, one reference (`gpt-4`) and one random order; the official
board's gpt-4-turbo-2024-04-09 and three references. The judge's instructions are our own wording, so a comparison with
published numbers needs the official templates: `--template FILE` with {$history}, {$user_query}, {$candidate_A},
{$candidate_B}, {$model_output}, {$checklist}. Every result carries the fingerprint of all that; `--compare` sets runs side by
side, and refuses when it differs.
Writes results/<run>/: config.json, command.txt, env.txt, generations.jsonl, verdicts.jsonl, judge.jsonl (raw replies),
summary.json; and a line in results/runs.csv.
"""

import hashlib
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import runs  # isort: skip
import numpy as np

from benchmarks import shared as evaluation
from rows import check_ids, read_rows
import utils
from benchmarks.shared import bootstrap, shorten


@dataclass
class Args:
    # model and data
    model: str = "results/grpo/model"
    """Folder or hub name of the model to evaluate; with --model-url the name that the endpoint knows."""
    model_url: str = ""
    """OpenAI-compatible endpoint that generates, e.g. http://localhost:8000/v1; empty: generate here."""
    tasks: str = "data/toy/benchmark_tasks.jsonl"
    """Benchmark task rows {id, messages, checklist, primary_tag, secondary_tags, references}; see data/README.md."""
    limit: int = 0
    """Only the first tasks of the file; 0: all."""
    think_format: Literal["auto", "think", "plain", "zero_think", "zero_plain"] = "auto"
    """auto: as the checkpoint's think_format.json says; without one, or behind an endpoint, `plain`, and an answer with a
    </think> ends the run."""
    chat_template: str = "auto"
    """As in train_grpo.py."""
    # generation
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM where a GPU and vLLM are there, else transformers' generate."""
    temperatures: tuple[float, ...] = (0.7,)
    """One evaluation each; 0 is greedy (paper's evaluation: 0.7)."""
    top_p: float = 1.0
    """The paper's evaluation uses 0.95."""
    max_tokens: int = 8192
    """New tokens (paper's evaluation: 8192 with thinking, 4096 without)."""
    batch_size: int = 64
    """Tasks a batch with transformers' generate."""
    # judge
    mode: Literal["reward", "score", "program"] = "program"
    """What each is: the top of this script."""
    judge: str = "data/toy/world.py:judge"
    """A model's name at --judge-url; local:FOLDER, or a hub name after local:, to run it here; file.py:function (program)."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: OPENAI_BASE_URL, else the official one. The key: OPENAI_API_KEY."""
    protocol: Literal["official", "paper"] = "official"
    """What differs: the top of this script."""
    template: str = ""
    """File with the judge's instructions; empty: our own wording."""
    references: tuple[str, ...] = ("gpt-4",)
    """Keys of the tasks' `references` that the model is compared with (--mode reward)."""
    orders: Literal["both", "random"] = "both"
    """Who stands first: each of the two in turn, or one drawn for each task (the paper's way)."""
    length_margin: int = -1
    """K: a slight win of an answer that is more than K characters longer counts as a tie; -1: off (--mode reward)."""
    judge_max_tokens: int = 1024
    """Tokens of a judge's reply."""
    concurrency: int = 32
    """Judge calls at a time."""
    budget: float = 0.0
    """US dollars that the judge may cost; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the judge."""
    max_invalid: float = 0.01
    """Share of invalid verdicts above which no headline is given."""
    reward_model: str = ""
    """Also report the mean reward of this reward model, over completions in good format (the proxy)."""
    reward_on: Literal["think+response", "response"] = "think+response"
    """What that reward model reads."""
    # instead of a run
    from_judgments: str = ""
    """Stored verdicts, jsonl or jsonl.gz: {session_id, score, model_output} or {session_id, choice, model_is, output_len,
    reference_len}. Scores them into the file --out; no model, no judge."""
    compare: tuple[str, ...] = ()
    """Run folders to set side by side."""
    # run
    seed: int = 0
    """Of sampling, of orders that are drawn, and of intervals."""
    out: str = ""
    """Run folder; empty: results/eval__<model>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Keep what a run folder already has: generations, and every reply of the judge."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, print calls and cost at most, and stop before a model is loaded or asked."""


# --- 1. from verdicts to scores

CHOICES = {"A++": 1.0, "A+": 0.5, "A=B": 0.0, "B+": -0.5, "B++": -1.0}
GROUPS = {  # the benchmark's tags in its five task groups, and the groups' weights in the macro average
    "Creative Tasks": (0.5, ("Creative Writing", "Editing", "Brainstorming", "Role playing", "Others")),
    "Planning & Reasoning": (1.25, ("Planning", "Reasoning")),
    "Math & Data Analysis": (1.0, ("Math", "Data Analysis")),
    "Information/Advice seeking": (0.75, ("Information seeking", "Advice seeking")),
    "Coding & Debugging": (1.25, ("Coding & Debugging",)),
}


def pair_value(
    choice, model_is: str, output_len: int = 0, reference_len: int = 0, margin: int = -1
) -> float | None:
    """Reward of one verdict from the model's side, -1 to 1; None for any other choice than the five, as written.

    With `margin` K >= 0 a slight win or loss is a tie when the winner's answer is more than K characters longer.
    """
    if not isinstance(choice, str) or choice not in CHOICES or model_is not in ("A", "B"):
        return None
    value = CHOICES[choice] * (1 if model_is == "A" else -1)
    longer = (output_len - reference_len) * (1 if value > 0 else -1)
    return 0.0 if margin >= 0 and abs(value) == 0.5 and longer > margin else value


def mark_value(mark) -> float | None:
    """A mark from 1 to 10 (number, or string of one), else None."""
    try:
        value = float(mark) if not isinstance(mark, bool) else -1.0
    except (TypeError, ValueError, OverflowError):  # the last from an integer of 400 digits
        return None
    return value if 1 <= value <= 10 else None


def macro_average(groups: dict[str, float]) -> float:
    """Weighted mean of the five task groups' scores (task-macro score of the official board)."""
    weights = {name: GROUPS[name][0] for name in groups}
    return sum(groups[name] * w for name, w in weights.items()) / sum(weights.values())


def by_group(rows: list[dict], values: dict[str, float], scale) -> dict:
    """Scores of the five groups and their macro average; a task counts once for each of its tags, as officially."""
    tags = {
        r["id"]: [r.get("primary_tag"), *(r.get("secondary_tags") or [])]
        for r in rows
        if r.get("primary_tag")
    }
    groups = {}
    for name, (_, members) in GROUPS.items():
        part = [values[i] for i, own in tags.items() if i in values for tag in set(own) if tag in members]
        if part:
            groups[name] = scale(float(np.mean(part)))
    return {"groups": groups, "macro": macro_average(groups) if len(groups) == len(GROUPS) else None}


def score_verdicts(
    rows: list[dict], mode: str, protocol: str = "official", margin: int = -1, seed: int = 0
) -> dict:
    """The numbers of judged rows: `wb_reward` (-100 to 100) or `wb_score`, with interval over tasks, lengths and counts.

    Args:
        rows: one a verdict, {id} and for reward {choice, model_is, output_len, reference_len[, reference]}, for score
            {score, output_len}; optionally {primary_tag, secondary_tags}.
        protocol: `paper` counts what cannot be read as the worst verdict; `official` leaves it out. Both count it.

    Raises ValueError when nothing can be read.
    """
    if mode == "reward":
        read = [
            pair_value(r["choice"], r["model_is"], r["output_len"], r["reference_len"], margin) for r in rows
        ]
        worst, scale = -1.0, lambda mean: 100 * mean
    else:
        read = [mark_value(r["score"]) for r in rows]
        worst, scale = 1.0, lambda mean: 20 * (mean - 5)
    n_invalid = sum(v is None for v in read)
    counted = [worst if v is None and protocol == "paper" else v for v in read]
    tasks: dict[str, list[float]] = {}
    for row, value in zip(rows, counted):
        if value is not None:
            tasks.setdefault(row["id"], []).append(value)
    if not tasks:
        raise ValueError(f"none of {len(rows)} verdicts can be read")
    values = [v for v in counted if v is not None]
    means = {name: float(np.mean(own)) for name, own in tasks.items()}
    written = [r["output_len"] for r in rows if r["output_len"]]
    low, high = bootstrap(list(means.values()), seed)
    out = {
        f"wb_{mode}": scale(float(np.mean(values))),
        "interval": [scale(low), scale(high)],
        "n": len(rows),
        "n_invalid": n_invalid,
        "n_tasks": len(means),
        "length": float(np.mean(written)) if written else 0.0,
        "n_empty": len(rows) - len(written),
        **by_group(rows, means, scale),
    }
    if n_invalid and protocol == "paper":
        out["note"] = f"{n_invalid} unreadable verdicts count as the worst one (--protocol paper)"
    if mode == "reward":
        sides = {"win_much": 1.0, "win": 0.5, "tie": 0.0, "lose": -0.5, "lose_much": -1.0}
        out |= {name: sum(v == value for v in values) for name, value in sides.items()}
        pairs: dict[tuple, dict[str, float]] = {}
        for row, value in zip(rows, read):
            if value is not None:
                pairs.setdefault((row["id"], row.get("reference")), {})[row["model_is"]] = float(
                    np.sign(value)
                )
        both = [p for p in pairs.values() if len(p) == 2]
        out["flip_rate"] = float(np.mean([p["A"] != p["B"] for p in both])) if both else None
        names = sorted({r["reference"] for r in rows if r.get("reference")})
        if len(names) > 1:  # the mixture is the mean over references
            parts = [
                [v for r, v in zip(rows, counted) if v is not None and r.get("reference") == name]
                for name in names
            ]
            out["references"] = {
                name: scale(float(np.mean(part))) for name, part in zip(names, parts) if part
            }
            out["wb_reward"] = float(np.mean(list(out["references"].values())))
    return out


# --- 2. the judge

TEMPLATES = {
    "reward": """Two assistants answered the last message of the same user. Compare the two answers.

# Conversation before the last message
{$history}

# The user's last message
{$user_query}

# Answer A
{$candidate_A}

# Answer B
{$candidate_B}

# Points to check
{$checklist}

Go through the points for each of the two answers, then weigh how well each serves what this user asked for: is it correct,
complete, relevant, clear, safe? Length alone is no merit, and neither is the order in which the answers stand here.
Reply with one JSON object and nothing else:
{"analysis of A": "...", "analysis of B": "...", "reason": "...", "choice": "..."}
where choice is one of "A++" (A is much better), "A+" (A is slightly better), "A=B" (about equally good), "B+" (B is slightly
better), "B++" (B is much better).""",
    "score": """An assistant answered the last message of a user. Judge the answer.

# Conversation before the last message
{$history}

# The user's last message
{$user_query}

# The answer
{$model_output}

# Points to check
{$checklist}

Go through the points, name what is strong and what is weak, then give a mark from 1 to 10: 1 to 2 useless or wrong throughout,
3 to 4 poor, hardly a help, 5 to 6 fair, with errors or gaps that matter, 7 to 8 good, solves most of it, 9 to 10 excellent.
Reply with one JSON object and nothing else:
{"strengths": "...", "weaknesses": "...", "score": "..."}""",
}
WORDS = {
    ("reward", "official"): 1000,
    ("reward", "paper"): 2000,
    ("score", "official"): 0,
    ("score", "paper"): 2000,
}


def judge_prompt(template: str, task: dict, protocol: str, mode: str, **texts: str) -> str:
    """The judge's one message about a task; `texts` are candidate_A and candidate_B, or model_output."""
    words = WORDS[mode, protocol]
    turns = [f"{m['role'].upper()}: {m['content']}" for m in task["messages"][:-1]]
    query = task["messages"][-1]["content"]  # the paper's code leaves it whole
    fields = {
        "history": shorten("\n\n".join(turns), words),
        "user_query": query if protocol == "paper" else shorten(query, words),
        "checklist": "\n".join(f"- {item}" for item in task.get("checklist") or []),
        **{name: shorten(text, words) for name, text in texts.items()},
    }
    return re.sub(r"\{\$(\w+)\}", lambda m: fields[m[1]], template)


def read_verdict(text: str, mode: str) -> str:
    """The choice or mark in a judge's reply; ValueError when there is not exactly one that is valid."""
    key, found = ("choice" if mode == "reward" else "score"), None
    for candidate in (text, text[text.find("{") : text.rfind("}") + 1]):
        try:
            found = json.loads(candidate, strict=False)
            break
        except ValueError:
            continue
    if isinstance(found, dict):
        values = {str(found.get(key))}
    else:  # broken JSON: the quoted value still counts if there is only one
        values = set(re.findall(rf'"{key}"\s*:\s*"?([^",}}\s]+)"?', text))
    if len(values) != 1:
        raise ValueError(f"{len(values)} values for {key!r}")
    value = values.pop()
    if (pair_value(value, "A") if mode == "reward" else mark_value(value)) is None:
        raise ValueError(f"{key} is {value[:40]!r}")
    return value


def comparisons(args: Args, tasks: list[dict], answers: dict[str, str]) -> list[dict]:
    """One row a verdict to get: {id, reference, model_is, output_len, reference_len, choice or score (None: to be judged),
    candidate texts}. Empty answers are decided by rule under the official protocol."""
    rows, rng = [], random.Random(args.seed)
    for task in tasks:
        answer = answers[task["id"]]
        base = {
            "id": task["id"],
            "primary_tag": task.get("primary_tag"),
            "secondary_tags": task.get("secondary_tags") or [],
            "output_len": len(answer),
        }
        if args.mode == "score":
            rows.append({**base, "score": None, "texts": {"model_output": answer}})
            continue
        for name in args.references:
            other = task["references"][name].strip()
            for side in "AB" if args.orders == "both" else rng.choice("AB"):
                first, second = (answer, other) if side == "A" else (other, answer)
                row = {
                    **base,
                    "reference": name,
                    "model_is": side,
                    "reference_len": len(other),
                    "choice": None,
                    "texts": {"candidate_A": first, "candidate_B": second},
                }
                if args.protocol == "official" and not (first and second):
                    row["choice"] = "A++" if first else "B++" if second else "A=B"
                rows.append(row)
    return rows


def fingerprint(args: Args, template: str, tasks: list[dict]) -> dict:
    """What must be equal for two results to be comparable, and a hash of it."""
    used = [
        "mode",
        "judge",
        "judge_url",
        "protocol",
        "references",
        "orders",
        "length_margin",
        "judge_max_tokens",
    ]
    out = {k: getattr(args, k) for k in (used if args.mode != "program" else ["mode", "judge"])}
    sha = lambda text: hashlib.sha256(text.encode()).hexdigest()[:12]
    if args.mode != "program":
        out["judge_url"] = evaluation.judge_place(args.judge, args.judge_url)
    if args.mode == "reward":
        out["reference_texts"] = sha(
            json.dumps([[t["references"][name] for name in args.references] for t in tasks])
        )
    out["words"] = WORDS.get((args.mode, args.protocol), 0)
    out["template"] = sha(template)
    out["tasks"] = sha(
        json.dumps([[t["id"], t["messages"], t.get("checklist")] for t in tasks], sort_keys=True)
    )
    return {**out, "hash": sha(json.dumps(out, sort_keys=True))}


def judge_all(args: Args, rows: list[dict], tasks: dict[str, dict], template: str, run: Path) -> None:
    """Fills in `choice` or `score` of the rows that have none yet, and `invalid` (why a verdict cannot be read, or "")."""
    key = "choice" if args.mode == "reward" else "score"
    todo = [r for r in rows if r[key] is None]
    requests = judge_requests(args, todo, tasks, template)
    replies = evaluation.ask_judge(args, requests, lambda text: read_verdict(text, args.mode), run)
    for row, reply in zip(todo, replies, strict=True):
        row[key], row["invalid"] = reply.value, reply.error


def judge_requests(args: Args, rows: list[dict], tasks: dict[str, dict], template: str) -> list[dict]:
    prompts = [judge_prompt(template, tasks[r["id"]], args.protocol, args.mode, **r["texts"]) for r in rows]
    return [
        {
            "messages": [{"role": "user", "content": p}],
            "temperature": 0.0,
            "max_tokens": args.judge_max_tokens,
            "response_format": {"type": "json_object"},
        }
        for p in prompts
    ]


def run_program(args: Args, rows: list[dict]) -> None:
    """Fills in `score` (None where it fails), `checks` and `invalid` of generation rows, by the judge program."""
    judge = runs.load_function(args.judge)
    for row in rows:
        try:
            verdict = judge(row["messages"], row["response"] if row["status"] == "ok" else "")
            row |= {"score": float(verdict["score"]), "checks": verdict["checks"], "invalid": ""}
        except (ValueError, KeyError, TypeError) as e:
            row |= {"score": None, "checks": {}, "invalid": f"{type(e).__name__}: {e}"}


def score_program(rows: list[dict], seed: int = 0) -> dict:
    """Numbers of rows that a program judged: mean score (0 to 1) with interval and standard error, share of each check."""
    judged = [r for r in rows if r["score"] is not None]
    if not judged:
        raise ValueError(f"none of {len(rows)} verdicts is valid; the first: {rows[0]['invalid']}")
    scores = [r["score"] for r in judged]
    return {
        "score": float(np.mean(scores)),
        "interval": bootstrap(scores, seed),
        "standard_error": float(np.std(scores, ddof=1) / len(scores) ** 0.5) if len(scores) > 1 else None,
        "all_checks": float(np.mean([all(r["checks"].values()) for r in judged])),
        "n": len(rows),
        "n_tasks": len(judged),
        "n_invalid": len(rows) - len(judged),
        "checks": {name: float(np.mean([r["checks"][name] for r in judged])) for name in judged[0]["checks"]},
    }


# --- 3. runs


def rescore(args: Args) -> None:
    """--from-judgments: stored verdicts to numbers."""
    if args.mode == "program" or not args.out:
        runs.fail("--from-judgments needs --mode score or reward, and --out OUT.json")
    fields = (
        ("choice", "model_is", "output_len", "reference_len") if args.mode == "reward" else ("model_output",)
    )
    rows = read_rows(args.from_judgments, "session_id")
    for number, row in enumerate(rows, 1):
        row["id"] = row["session_id"]
        if missing := [f for f in fields if f not in row]:
            need = ", ".join(fields)
            runs.fail(
                f"{args.from_judgments}:{number}: no field {missing[0]!r}; --mode {args.mode} needs {need}"
            )
        if args.mode == "score":
            row["score"] = row.get("score", (row.get("parsed_result") or {}).get("score"))
            row["output_len"] = len(row["model_output"].strip())
    result = runs.or_fail(
        lambda: score_verdicts(rows, args.mode, args.protocol, args.length_margin, args.seed)
    )
    result |= {"mode": args.mode, "protocol": args.protocol, "length_margin": args.length_margin}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def compare(folders: tuple[str, ...]) -> None:
    """Prints the headlines of several runs; exits with 2 when their fingerprints differ."""
    prints, lines, sampled = {}, [], {}
    for folder in folders:
        path = Path(folder) / "summary.json"
        if not path.exists():
            runs.fail(f"{path} does not exist; --compare takes folders of finished evaluations")
        summary, args = (
            json.loads(path.read_text()),
            json.loads(path.with_name("config.json").read_text())["args"],
        )
        if "fingerprint" not in summary:
            runs.fail(f"{folder} is no evaluation's folder; --compare takes those of eval_wildbench.py")
        prints[folder], sampled[folder] = (
            summary["fingerprint"],
            f"top-p {args['top_p']}  max-tokens {args['max_tokens']}",
        )
        for temperature, numbers in summary["temperatures"].items():
            lines.append(f"{folder}  T={temperature}  {sampled[folder]}  {headline(numbers)}")
    first = next(iter(prints.values()))
    for folder, own in prints.items():
        if differ := [k for k in own.keys() | first.keys() if own.get(k) != first.get(k) and k != "hash"]:
            runs.fail(
                f"{folder} was not judged as {folders[0]} was, the numbers cannot be compared. Different: "
                f"{', '.join(sorted(differ))}"
            )
    print(*lines, sep="\n")
    if len(set(sampled.values())) > 1:
        print("WARNING: they were not sampled alike", file=sys.stderr)


def headline_key(numbers: dict) -> str:
    return next(k for k in ("wb_reward", "wb_score", "score") if k in numbers)


def headline(numbers: dict) -> str:
    key, (low, high) = headline_key(numbers), numbers["interval"]
    value = "no headline" if numbers[key] is None else f"{numbers[key]:.4g} [{low:.4g}, {high:.4g}]"
    return f"{key} {value}  n {numbers['n']}  invalid {numbers['n_invalid']}"


def main(args: Args) -> None:
    if args.compare:
        return compare(args.compare)
    if args.from_judgments:
        return rescore(args)

    # --- data, checked before anything is loaded or asked
    tasks = read_rows(args.tasks, "messages")[: args.limit or None]
    check_ids(args.tasks, tasks, "tasks")
    template = Path(args.template).read_text() if args.template else TEMPLATES.get(args.mode, "")
    fields = {"history", "user_query", "checklist"}
    fields |= {"candidate_A", "candidate_B"} if args.mode == "reward" else {"model_output"}
    if unknown := sorted(set(re.findall(r"\{\$(\w+)\}", template)) - fields):
        runs.fail(f"{args.template}: --mode {args.mode} has nothing to put in place of {{${unknown[0]}}}")
    if args.mode == "program":
        runs.load_function(args.judge)
    elif ".py:" in args.judge:
        runs.fail(f"--judge {args.judge} is a program; use --mode program, or name a model")
    for task in tasks if args.mode == "reward" else ():
        has = task.get("references") or {}
        if missing := [name for name in args.references if name not in has]:
            runs.fail(
                f"{args.tasks}: task {task['id']} has no reference {missing[0]!r}; it has {', '.join(has) or 'none'}"
            )
    if not args.model_url:
        evaluation.load_tokenizer(args)
    if args.reward_model:
        runs.load_tokenizer(args.reward_model)
        runs.or_fail(
            utils.RewardModel.check, args.reward_model, "", args.reward_on, evaluation.think_format(args)
        )
    print(
        f"{len(tasks)} tasks x temperatures {args.temperatures}; {args.mode} by {args.judge}; protocol {args.protocol}"
    )
    own, by_id = fingerprint(args, template, tasks), {t["id"]: t for t in tasks}
    if args.mode != "program":
        longest = comparisons(args, tasks, dict.fromkeys(by_id, "word " * args.max_tokens))
        evaluation.print_estimate(args, judge_requests(args, longest, by_id, template))
    if args.dry_run:
        return
    run = runs.start_run(args, "eval", args.model)
    if (run / "summary.json").exists():
        return print(f"{run} is complete; --overwrite starts it anew")
    results, index = {}, []
    (run / "verdicts.jsonl").unlink(missing_ok=True)
    for temperature in args.temperatures:
        # --- generate, strip, judge, score
        rows = evaluation.generate(args, tasks, temperature, run)
        if args.reward_model:
            good = [r for r in rows if r["status"] == "ok"]
            reward_model = utils.RewardModel(args.reward_model, args.reward_on, evaluation.think_format(args))
            for r, s in zip(
                good, reward_model.score([r["messages"] for r in good], [r["text"] for r in good])
            ):
                r["reward"] = s
            del reward_model  # the next vLLM needs its memory
        if args.mode == "program":
            run_program(args, rows)
            numbers, verdicts = runs.or_fail(score_program, rows, args.seed), rows
        else:
            answers = {r["id"]: evaluation.answer(r) for r in rows}
            verdicts = comparisons(args, tasks, answers)
            judge_all(args, verdicts, by_id, template, run)
            numbers = runs.or_fail(
                score_verdicts, verdicts, args.mode, args.protocol, args.length_margin, args.seed
            )
        key, (low, high) = headline_key(numbers), numbers["interval"]
        if numbers["n_invalid"] > args.max_invalid * numbers["n"]:
            numbers["without_headline"], numbers[key] = numbers[key], None
        verdicts = [{k: v for k, v in r.items() if k not in ("texts", "messages", "text")} for r in verdicts]
        runs.append_jsonl(run / "verdicts.jsonl", [{"temperature": temperature, **r} for r in verdicts])
        results[str(temperature)] = numbers | evaluation.describe(rows)
        print(f"temperature {temperature}: {headline(numbers)}", flush=True)
        common = {
            "model": args.model,
            "benchmark": Path(args.tasks).stem,
            "temperature": temperature,
            "n": numbers["n_tasks"],
        }
        index.append(
            common
            | {
                "metric": key,
                "value": numbers[key],
                "low": low,
                "high": high,
                "judge": args.judge,
                "n_invalid": numbers["n_invalid"],
                "fingerprint": own["hash"],
            }
        )
        for name in (
            "format_ok",
            "thinking_tokens",
            "response_tokens",
            *["proxy_reward"] * bool(args.reward_model),
        ):
            index.append(common | {"metric": name, "value": results[str(temperature)][name]})
    runs.write_summary(run, {"model": args.model, "fingerprint": own, "temperatures": results})
    runs.add_to_index(run, index)


if __name__ == "__main__":
    main(runs.parse_args(Args, {}))
