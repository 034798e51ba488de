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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import append_jsonl, check_ids, read_rows
from rlmt.run import Run, parse_args
from rlmt.scorers import load_function, read_who
from utils import fail, or_fail
from benchmarks import shared, wildbench
from benchmarks.flags import AnswerFlags, JudgeFlags
from benchmarks.judge_template import describe_wording
from benchmarks.reward_model import Proxy
from benchmarks.scoring import CUT_MARK, check_types, for_summary, index_row, mean, mean_interval, withhold
from benchmarks.tested_model import TestedModel
from benchmarks.wildbench import WildBenchJudge


@dataclass
class Args(JudgeFlags, AnswerFlags):
    # benchmark
    tasks: str = ""
    """Rows {id, messages, checklist, primary_tag, secondary_tags, references}; see data/README.md."""
    temperatures: tuple[float, ...] = (0.7,)
    """One evaluation each; 0 is greedy. The paper's evaluation uses 0.7."""
    samples: int = 1
    """Answers per task (--mode program), each judged; greedy decoding gives one."""
    mode: Literal["reward", "score", "program"] = "program"
    """What the judge does; see the top of this script. `reward` is WB-Reward, which needs no
    --reward-model."""
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


def load_tasks(path: str, limit: int, references: tuple[str, ...]) -> list[dict]:
    """Reads the tasks; exits with 2 if two have the same id, or a field of one cannot be used.

    Args:
        limit: tasks at most; 0: all.
        references: keys of the texts that each task must have.
    """
    tasks = read_rows(path, "messages")[: limit or None]
    check_ids(path, tasks, "tasks")
    for task in tasks:
        for field in ("checklist", "secondary_tags"):
            if not isinstance(task.get(field) or [], list):
                fail(f"{path}: {field!r} of task {task['id']} must be a list of texts")
        known = task.get("references")
        for name in references:
            is_there = isinstance(known, dict) and isinstance(known.get(name), str)
            if not is_there:
                fail(f"{path}: task {task['id']} has no reference {name!r}; see --references")
    return tasks


def check_flags(args: Args) -> None:
    """Exits with 2 for flags that are missing, or do not fit the mode."""
    shared.require(
        model=(args.model, "the model to evaluate"),
        tasks=(args.tasks, "rows of tasks, such as data/wildbench.jsonl (python -m data.prepare wildbench)"),
    )
    if not args.judge and not args.reward_model:
        fail(
            "--judge is missing: a model's name, local:FOLDER, or file.py:function (a model also needs "
            "--mode reward or score); or --reward-model alone"
        )
    is_program = read_who(args.judge).kind in ("function", "nobody")
    if is_program != (args.mode == "program"):
        fail(f"--judge {args.judge}: --mode program takes a file.py:function, the other modes a model")
    if args.mode != "program" and args.samples > 1:
        fail(f"--mode {args.mode}: --samples is for --mode program")


# --- 2. generate, judge, score


def with_samples(tasks: list[dict], n_samples: int) -> list[dict]:
    """Returns each task as often as it is answered: `task_id` keeps its id, and `id` is the answer's own."""
    if n_samples == 1:
        return [task | {"task_id": task["id"]} for task in tasks]
    questions = []
    for task in tasks:
        for sample in range(n_samples):
            questions.append(task | {"id": f"{task['id']}-{sample}", "task_id": task["id"]})
    return questions


class Evaluation:
    """The model, the judge, the reward model and the tasks of the flags."""

    def __init__(self, args: Args):
        """Checks all of them; exits with 2 if one cannot be used."""
        self.args = args
        self.judge = WildBenchJudge(args)
        self.model = TestedModel(args, args.max_thinking_tokens)
        self.proxy = Proxy(args, self.model)
        self.judge.check()
        self.model.check()
        references = ()
        if args.mode == "reward":
            references = args.references
        self.tasks = load_tasks(args.tasks, args.limit, references)
        self.model.encode_prompts([task["messages"] for task in self.tasks])
        self.model.thinking_budget()  # ends here if the model's thinking cannot be closed
        self.proxy.check()

    def answer(self, temperature: float, run: Path) -> tuple[list[dict], list[dict]]:
        """Returns the tasks as often as they are answered, and their generations at one temperature."""
        n_samples = self.args.samples
        if temperature == 0:  # greedy answers are all alike
            n_samples = 1
        tasks = with_samples(self.tasks, n_samples)
        return tasks, self.model.answer(tasks, temperature, run)

    def evaluate(self, temperature: float, run: Path) -> dict:
        """Generates, judges and scores at one temperature; appends to verdicts.jsonl and returns the
        numbers."""
        args = self.args
        judge = self.judge
        tasks, generations = self.answer(temperature, run)
        task_ids = [task["task_id"] for task in tasks]
        if args.reward_model:
            self.proxy.add_rewards(generations)

        described = shared.describe(generations, task_ids)
        if judge.who.kind == "nobody":
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
            verdicts = wildbench.judge_by_program(load_function(judge.who.name), generations)
            numbers = or_fail(wildbench.score_program, verdicts, task_ids, args.seed)
        else:
            verdicts = judge.list_verdicts(tasks, list(map(shared.judged_part, generations)))
            judge.fill_in(verdicts, run)
            numbers = judge.score(verdicts)

        rewards = {row["id"]: row.get("reward") for row in generations}
        for verdict in verdicts:
            verdict["reward"] = rewards[verdict["id"]]  # null without --reward-model or in bad format
            for long_field in ("shown", "messages", "text"):  # generations.jsonl and the tasks have them
                verdict.pop(long_field, None)
        append_jsonl(run / "verdicts.jsonl", [{"temperature": temperature, **v} for v in verdicts])
        withhold(numbers, [judge.headline], args.max_invalid)
        described["task_means"] |= numbers["task_means"]
        return numbers | described

    def index_rows(self, temperature: float, numbers: dict, judging: str) -> list[dict]:
        """Returns the lines for runs.csv: the headline, then what describes the generations.

        `judging`: the fingerprint.
        """
        args = self.args
        benchmark = Path(args.tasks).stem
        common = {"model": args.model, "temperature": temperature}
        headline = index_row(benchmark, numbers, self.judge.headline, judging, "interval")
        lines = [headline | common | {"judge": args.judge}]
        metrics = ["format_ok", "thinking_tokens", "response_tokens"]
        n_completions = sum(numbers["status"].values())  # each may get several verdicts
        about_answers = common | {"n": n_completions, "n_invalid": None, "judge": None}
        for metric in metrics:
            lines.append(index_row(benchmark, numbers, metric, judging) | about_answers)
        if args.reward_model and args.judge:
            scored = f"{judging}-{self.proxy.fingerprint()}"
            line = index_row(benchmark, numbers, "proxy_reward", scored)
            n_scored = numbers["status"].get("ok", 0)
            lines.append(line | about_answers | {"n": n_scored, "judge": args.reward_model})
        return lines


# --- 3. the commands


def score_stored(args: Args) -> None:
    """Scores the verdicts of --from-judgments into the file --out."""
    if args.mode == "program" or not args.out:
        fail("--from-judgments needs --mode score or reward, and --out OUT.json")
    shared.check_stored(args, "from_judgments", "mode", "protocol", "seed")
    fields = ["model_output"]
    if args.mode == "reward":
        fields = ["model_is", "output_len", "reference_len"]
    verdicts = read_rows(args.from_judgments)
    for line, verdict in enumerate(verdicts, 1):
        check_types(verdict, f"{args.from_judgments}:{line}", "session_id", *fields)
        verdict["id"] = verdict["session_id"]
        if args.mode == "score":
            verdict["output_len"] = len(verdict["model_output"].strip())
            verdict["skipped"] = verdict["model_output"].endswith(CUT_MARK)

    numbers = WildBenchJudge(args).score(verdicts)
    withhold(numbers, [wildbench.HEADLINES[args.mode]], args.max_invalid)
    numbers = for_summary(numbers) | {"mode": args.mode, "protocol": args.protocol}
    if not args.dry_run:
        shared.write_scores(args.out, numbers)
    print(json.dumps(numbers))


def main(args: Args) -> None:
    if args.from_judgments:
        score_stored(args)
        return

    # --- everything is checked before anything is generated
    check_flags(args)
    evaluation = Evaluation(args)
    judge = evaluation.judge
    how_judged = f"{args.mode} by {args.judge}, protocol {args.protocol}"
    if not args.judge:
        how_judged = f"mean reward by {args.reward_model}"
    print(f"{len(evaluation.tasks)} tasks x temperatures {args.temperatures}; {how_judged}")
    run = Run(args, "eval", args.model)
    judge.check_start(run.folder, evaluation.tasks, args.max_tokens, not args.generate_only)
    if args.dry_run:
        return
    run.start(has_steps=False)

    # --- generate, judge, score
    if args.generate_only:
        for temperature in args.temperatures:
            evaluation.answer(temperature, run.folder)
        return
    # a resumed run judges every answer again, from stored replies where there are some
    (run.folder / "verdicts.jsonl").unlink(missing_ok=True)
    judging = judge.fingerprint(evaluation.tasks, evaluation.proxy)
    results = {}
    lines = []
    for temperature in args.temperatures:
        numbers = evaluation.evaluate(temperature, run.folder)
        value = numbers[judge.headline]
        interval = ", ".join(f"{end:.4g}" for end in numbers["interval"] or ())
        print(f"temperature {temperature}: {value}, 95 % over tasks {interval}", flush=True)
        lines += evaluation.index_rows(temperature, numbers, judging)
        results[str(temperature)] = for_summary(numbers)
    summary = {"model": args.model, "top_p": args.top_p, "fingerprint": judging, "temperatures": results}
    if args.mode != "program":
        summary["wording"] = describe_wording(args.template)
    shared.save_results(run, summary, lines)


if __name__ == "__main__":
    main(parse_args(Args, {}))
