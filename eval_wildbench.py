"""Evaluates on WildBench: answers every task, strips the thinking, asks a judge, reports a score with an
interval.

    python eval_wildbench.py --model results/rlmt/model --tasks data/wildbench.jsonl \\
        --mode reward --judge gpt-4o-2024-05-13 --top-p 0.95
    python eval_wildbench.py --model results/rlmt/model --tasks data/wildbench.jsonl \\
        --mode score --judge local:Qwen/Qwen2.5-32B-Instruct --judge-tensor-parallel 2 --top-p 0.95
    python eval_wildbench.py --model results/my-demo/runs/grpo-think-s0/model \\
        --tasks data/toy/benchmark_tasks.jsonl --judge data/toy/world.py:judge --max-tokens 128 --temperatures 1.0 0.0
    python eval_wildbench.py --model results/rlmt/model --tasks data/wildbench.jsonl --reward-model FOLDER
    python eval_wildbench.py --from-judgments verdicts.jsonl.gz --mode score --out score.json

- `reward` (WB-Reward): the judge compares the answer with a reference answer and replies A++, A+, A=B, B+ or
  B++, worth 100, 50, 0, -50 and -100 to the writer of A. The score is the mean over tasks and references.
- `score` (WB-Score): the judge gives the answer alone a mark from 1 to 10. The score is (mean - 5) x 20.
- `program`: a judge of your own, `file.py:function(messages, response)`, returns {"score", "checks"}: a
  number, and {name: whether it passes} with the same names for every response. A row on which it fails is
  invalid.
- Without --judge, the mean reward of the answers in good format by --reward-model.

A completion whose thinking is not closed has no response: it is the empty answer, and counted under its
status. A response that the token limit cut off is judged as it is (`program`: as empty). Above 1 % of invalid
verdicts (--max-invalid), which are listed in verdicts.jsonl, there is no headline. If the judge's endpoint
gave no reply to more than that, the run ends without a score, and --resume asks these again.

`--protocol paper` does as the paper's released code, `official` (the default) as the benchmark's own tools:

| | official | paper |
|---|---|---|
| words kept of history and answers | `reward`: 1000; `score`: all | 2000 |
| words kept of the user's last message | `reward`: 1000; `score`: all | all |
| a reply that cannot be read | is asked for again, then left out | counts as the worst: -100, or mark 1 |
| a pair with an empty answer, or one of over 1000 words (`reward`) | is worth 0, without a call | is judged |
| an empty answer in the task groups | is left out | counts |

Worth 0 is like a tie: the board skips such pairs, but divides by the number of all. `n_skipped` counts them,
beside the score too: look at it before you compare, as a model whose thinking often does not end loses little
by it. If their share is larger than --max-invalid, a warning says so.

In two rare cases `paper` differs from that code: "8.5" is a mark of 8.5 (there 1), and a reply with two
different choices cannot be read (there the first one counts).

The paper's judge is gpt-4o, with one reference (`gpt-4`), `--orders random` and `--top-p 0.95`. The official
board has the judge gpt-4-turbo-2024-04-09 and three references. Our judge's instructions are our own wording.
A comparison with published numbers needs the official ones: `--template FILE`, with {$history},
{$user_query}, {$checklist} and {$candidate_A}, {$candidate_B} or {$model_output}. Every result has a
fingerprint of its judging: only values with the same one can be compared.

Data, model and judge are checked before anything is generated; a judge behind an endpoint is asked its first
request, about an answer of two lines. `--dry-run` makes the same checks.

Writes into its run folder: config.json, command.txt, env.txt, generations.jsonl, verdicts.jsonl, judge.jsonl (raw
replies), task_means.csv, summary.json; and lines in runs.csv beside it.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal


# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import append_jsonl, check_ids, read_rows
from rlmt.run import parse_args
from rlmt.scorers import load_function
from utils import fail, or_fail
from benchmarks import reward_model, shared, thinking_use, wildbench
from benchmarks.flags import AnswerFlags, JudgeFlags
from benchmarks.judge_template import describe_wording, read_template
from benchmarks.scoring import CUT_MARK, for_summary, index_row, mean, mean_interval, withhold


@dataclass
class Args(JudgeFlags, AnswerFlags):
    # benchmark
    tasks: str = ""
    """Rows {id, messages, checklist, primary_tag, secondary_tags, references}; see data/README.md."""
    temperatures: tuple[float, ...] = (0.7,)
    """One evaluation each; 0 is greedy. The paper's evaluation uses 0.7."""
    samples: int = 1
    """Answers per task (--mode program), each judged; greedy decoding gives one."""
    thinking_use: bool = False
    """Also measure how many nats per token the response loses when its thinking is swapped for another."""
    mode: Literal["reward", "score", "program"] = "program"
    """What the judge does; see the top of this script. `reward` is WB-Reward, which needs no --reward-model."""
    protocol: Literal["official", "paper"] = "official"
    """How texts are cut and bad verdicts counted; see the top of this script."""
    references: tuple[str, ...] = ("gpt-4",)
    """Keys of the tasks' `references` that the model is compared with (--mode reward)."""
    orders: Literal["both", "random"] = "both"
    """Which answer is A: each in turn, or one drawn for each task and reference, as in the paper (--mode
    reward)."""
    from_judgments: str = ""
    """Stored verdicts (json, jsonl or jsonl.gz), scored into the file --out without a model or a judge. Rows
    are {session_id, score, model_output} or {session_id, choice, model_is, output_len, reference_len}."""


# --- 1. input, checked before a model is loaded or asked


def load_tasks(args: Args) -> list[dict]:
    """Reads the tasks; exits with 2 if two have the same id, or a field of one cannot be used."""
    tasks = read_rows(args.tasks, "messages")[: args.limit or None]
    check_ids(args.tasks, tasks, "tasks")
    for task in tasks:
        for field in ("checklist", "secondary_tags"):
            if not isinstance(task.get(field) or [], list):
                fail(f"{args.tasks}: {field!r} of task {task['id']} must be a list of texts")
        references = task.get("references")
        for name in args.references:
            is_there = isinstance(references, dict) and isinstance(references.get(name), str)
            if args.mode == "reward" and not is_there:
                fail(f"{args.tasks}: task {task['id']} has no reference {name!r}; see --references")
    return tasks


def load_template(args: Args) -> str:
    """Returns the judge's instructions; exits with 2 if those of --template do not fit the mode."""
    if not args.template:
        return wildbench.TEMPLATES[args.mode]
    return read_template(args.template, wildbench.PLACEHOLDERS[args.mode], f" with --mode {args.mode}")


def requests_if_all_answer(args: Args, tasks: list[dict], answer: str) -> list[dict]:
    """Returns all requests to the judge if every task got this answer; none for a program."""
    if args.mode == "program":
        return []
    verdicts = wildbench.list_verdicts(args, tasks, [answer] * len(tasks))
    return wildbench.judge_requests(args, verdicts, load_template(args))


def fingerprint(args: Args, tasks: list[dict]) -> str:
    """Hashes everything that must be equal for two results to be comparable: how every task is judged, and by
    whom."""
    judging = [args.mode, args.judge, [task["id"] for task in tasks]]
    # a name may stand for another program, or other weights, later
    judging.append(shared.digests_of_judge(args.judge))
    if not args.judge:
        judging.append(reward_model.fingerprint(args))
    if args.mode == "program":
        judging.append([[task["messages"], task.get("checklist")] for task in tasks])
    else:
        judging += [args.protocol, *args.omit]
        # all that a judge reads but the answer; in both orders, as the drawn ones follow from --seed
        judging.append(requests_if_all_answer(replace(args, orders="both"), tasks, ""))
    if args.mode == "reward":
        judging += [args.orders, args.references]
    return shared.short_hash(json.dumps(judging, sort_keys=True))


# --- 2. verdicts


def judge_by_model(args: Args, verdicts: list[dict], run: Path) -> None:
    """Fills in `choice` or `score`, and `invalid`: "", or why the reply cannot be read.

    The judge is not asked where `invalid` says already that there is no answer, nor about a pair that the
    board skips.
    """
    to_ask = []
    for verdict in verdicts:
        if "invalid" not in verdict and (args.mode == "score" or not verdict["skipped"]):
            to_ask.append(verdict)
    requests = wildbench.judge_requests(args, to_ask, load_template(args))

    def parse(text: str) -> str:
        return wildbench.read_verdict(text, args.mode)

    replies = shared.ask_judge(args, requests, parse, run)
    for verdict, reply in zip(to_ask, replies, strict=True):
        verdict |= {wildbench.VERDICT_KEYS[args.mode]: reply.value, "invalid": reply.error}


def with_samples(args: Args, tasks: list[dict], temperature: float) -> list[dict]:
    """Returns each task as often as it is answered: `task_id` keeps its id, and `id` is the answer's own."""
    if args.samples == 1 or temperature == 0:
        return [task | {"task_id": task["id"]} for task in tasks]
    questions = []
    for task in tasks:
        for sample in range(args.samples):
            questions.append(task | {"id": f"{task['id']}-{sample}", "task_id": task["id"]})
    return questions


def evaluate(args: Args, tasks: list[dict], temperature: float, run: Path) -> dict:
    """Generates, judges and scores at one temperature; appends to verdicts.jsonl and returns the numbers."""
    tasks = with_samples(args, tasks, temperature)
    task_ids = [task["task_id"] for task in tasks]
    generations = shared.generate_answers(args, tasks, temperature, run)
    if args.reward_model:
        reward_model.add_rewards(args, generations)

    described = shared.describe(generations, task_ids)
    if not args.judge:
        task_rewards = described["task_means"]["proxy_reward"]
        interval = None
        if task_rewards:
            interval = mean_interval(list(task_rewards.values()), args.seed)
        verdicts = [{"id": row["id"]} for row in generations]
        numbers = {
            "mean_reward": mean(task_rewards.values()),
            "interval": interval,
            "n": len(task_rewards),
            "n_invalid": 0,
            "task_means": {"mean_reward": task_rewards},
        }
    elif args.mode == "program":
        verdicts = wildbench.judge_by_program(load_function(args.judge), generations)
        numbers = or_fail(wildbench.score_program, verdicts, task_ids, args.seed)
        if args.thinking_use:
            used = thinking_use.measure(args, generations, task_ids)
            used["task_means"] |= numbers["task_means"]
            numbers |= used
    else:
        verdicts = wildbench.list_verdicts(args, tasks, list(map(shared.answer, generations)))
        judge_by_model(args, verdicts, run)
        numbers = score(args, verdicts)

    rewards = {row["id"]: row.get("reward") for row in generations}
    for verdict in verdicts:
        verdict["reward"] = rewards[verdict["id"]]  # null without --reward-model or in bad format
        for long_field in ("shown", "messages", "text"):  # generations.jsonl and the tasks have them
            verdict.pop(long_field, None)
    append_jsonl(run / "verdicts.jsonl", [{"temperature": temperature, **v} for v in verdicts])
    withhold(numbers, [headline(args)], args.max_invalid)
    described["task_means"] |= numbers["task_means"]
    return numbers | described


def score(args: Args, verdicts: list[dict]) -> dict:
    """Returns the numbers of verdicts; warns if many pairs were not judged, which pulls the score towards
    0."""
    numbers = or_fail(wildbench.score_verdicts, verdicts, args.mode, args.protocol, args.seed)
    n_skipped = numbers["n_skipped"]
    if args.mode == "reward" and n_skipped > args.max_invalid * numbers["n"]:
        print(
            f"WARNING: {n_skipped} of {numbers['n']} pairs were not judged, as an answer is empty or has over "
            "1000 words; as on the board, each is worth 0, like a tie",
            file=sys.stderr,
        )
    return numbers


# --- 3. numbers


HEADLINES = {"reward": "wb_reward", "score": "wb_score", "program": "score"}  # by --mode


def headline(args: Args) -> str:
    """Returns the metric that is shown first."""
    if not args.judge:
        return "mean_reward"
    return HEADLINES[args.mode]


def index_rows(args: Args, temperature: float, numbers: dict, fingerprint_hash: str) -> list[dict]:
    """Returns the lines for runs.csv: the headline, then what describes the generations."""
    benchmark = Path(args.tasks).stem
    lines = [index_row(args, benchmark, numbers, headline(args), fingerprint_hash, "interval")]
    metrics = ["format_ok", "thinking_tokens", "response_tokens"]
    if args.thinking_use:
        metrics += thinking_use.METRICS
    n_completions = sum(numbers["status"].values())  # each may get several verdicts
    about_answers = {"n": n_completions, "n_invalid": None, "judge": None}
    for metric in metrics:
        lines.append(index_row(args, benchmark, numbers, metric, fingerprint_hash) | about_answers)
    if args.reward_model and args.judge:
        scored = f"{fingerprint_hash}-{reward_model.fingerprint(args)}"
        line = index_row(args, benchmark, numbers, "proxy_reward", scored)
        n_scored = numbers["status"].get("ok", 0)
        lines.append(line | about_answers | {"n": n_scored, "judge": args.reward_model})
    return [line | {"temperature": temperature} for line in lines]


def score_stored(args: Args) -> None:
    """Scores the verdicts of --from-judgments into the file --out."""
    if args.mode == "program" or not args.out:
        fail("--from-judgments needs --mode score or reward, and --out OUT.json")
    shared.check_stored(args, "from_judgments", "mode", "protocol", "seed")
    fields = ["model_output"]
    if args.mode == "reward":
        fields = ["model_is", "output_len", "reference_len"]
    verdicts = read_rows(args.from_judgments, "session_id", *fields)
    for verdict in verdicts:
        verdict["id"] = verdict["session_id"]
        if args.mode == "score":
            verdict["output_len"] = len(verdict["model_output"].strip())
            verdict["skipped"] = verdict["model_output"].endswith(CUT_MARK)

    numbers = score(args, verdicts)
    withhold(numbers, [HEADLINES[args.mode]], args.max_invalid)
    numbers = for_summary(numbers) | {"mode": args.mode, "protocol": args.protocol}
    shared.write_scores(args, numbers)
    print(json.dumps(numbers))


def main(args: Args) -> None:
    if args.from_judgments:
        score_stored(args)
        return

    # --- everything is checked before anything is generated
    shared.require(
        args,
        model="the model to evaluate",
        tasks="rows of tasks, such as data/wildbench.jsonl (python -m data.prepare wildbench)",
    )
    if not args.judge and not args.reward_model:
        fail(
            "--judge is missing: a model's name, local:FOLDER, or file.py:function (a model also needs --mode reward or "
            "score); or --reward-model alone"
        )
    if (".py:" in args.judge or not args.judge) != (args.mode == "program"):
        fail(f"--judge {args.judge}: --mode program takes a file.py:function, the other modes a model")
    shared.check_judge(args)
    shared.check_model(args)
    tasks = load_tasks(args)
    shared.check_prompts(args, [task["messages"] for task in tasks])
    shared.thinking_budget(args)  # ends here if the model's thinking cannot be closed
    reward_model.check(args)
    if args.mode != "program" and (args.samples > 1 or args.thinking_use):
        fail(f"--mode {args.mode}: --samples and --thinking-use are for --mode program")
    if args.thinking_use:
        shared.require(args, judge="--thinking-use is measured beside its score")
        thinking_use.check(args)
    how_judged = f"{args.mode} by {args.judge}, protocol {args.protocol}"
    if not args.judge:
        how_judged = f"mean reward by {args.reward_model}"
    print(f"{len(tasks)} tasks x temperatures {args.temperatures}; {how_judged}")
    run = shared.check_start(args, "eval", tasks, requests_if_all_answer)
    if args.dry_run:
        return
    run.start(has_steps=False)

    # --- generate, judge, score
    if args.generate_only:
        for temperature in args.temperatures:
            shared.generate_answers(args, with_samples(args, tasks, temperature), temperature, run.folder)
        return
    # a resumed run judges every answer again, from stored replies where there are some
    (run.folder / "verdicts.jsonl").unlink(missing_ok=True)
    judging = fingerprint(args, tasks)
    results = {}
    lines = []
    for temperature in args.temperatures:
        numbers = evaluate(args, tasks, temperature, run.folder)
        value = numbers[headline(args)]
        interval = ", ".join(f"{end:.4g}" for end in numbers["interval"] or ())
        print(f"temperature {temperature}: {value}, 95 % over tasks {interval}", flush=True)
        lines += index_rows(args, temperature, numbers, judging)
        results[str(temperature)] = for_summary(numbers)
    summary = {"model": args.model, "top_p": args.top_p, "fingerprint": judging, "temperatures": results}
    if args.mode != "program":
        summary["wording"] = describe_wording(args.template)
    shared.save_results(run, summary, lines)


if __name__ == "__main__":
    main(parse_args(Args, {}))
