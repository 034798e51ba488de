"""Evaluates on the rest of the paper's suite: generates answers, asks a judge where one is needed, scores
them.

    python eval_benchmarks.py ifeval --model results/rlmt/model --data google/IFEval
    python eval_benchmarks.py gsm8k --model results/rlmt/model --data openai/gsm8k:main --temperature 0
    python eval_benchmarks.py math500 --model results/rlmt/model --data HuggingFaceH4/MATH-500 --samples 16    # maj@16
    python eval_benchmarks.py arenahard2 --model results/rlmt/model --data data/arena_hard_v2 --judge gpt-4.1
    python eval_benchmarks.py ifeval --from responses.jsonl --data google/IFEval --out ifeval.json    # stored answers
    python eval_benchmarks.py traits ...         # which traits of planning a checkpoint shows: benchmarks/traits.py

--data is the benchmark's file, the folder that holds its files, or a hub dataset; data/README.md says where
they come from. --from is .jsonl or .jsonl.gz; benchmarks/table.py names the fields of its rows. Answers that
hold thinking need --think-format.

A completion that does not have its think format (its thinking is not closed, say) is scored as an empty
answer, and counted under its status. One that the token limit cut off is scored as far as it goes. An
unreadable judge reply makes the row invalid. Invalid rows are counted and listed; they get no score, except in
`_paper` metrics. Above 1 % of them (--max-invalid) a run has no metrics. If an endpoint gave no reply to more
requests than that, the run ends without a score, and --resume asks these again.

`--protocol` decides what a judge is asked:

| | official | paper |
|---|---|---|
| a reply that cannot be read | is asked for again (alpacaeval2: is not) | is not |
| alpacaeval2: reply | log-probabilities of one token | a ranking as JSON |
| alpacaeval2: words kept of each text | all | 2000 |
| creativewriting3: words kept of the piece | all | 3200 |
| arenahard2, creativewriting3: tokens of a reply | 16000, 1000 | 3072, 2048 |

Data, model, judge and what a check of answers needs are checked before anything is generated; a judge behind
an endpoint is asked its first request, about an answer of two lines. `--dry-run` makes the same checks.

The judge's instructions are our own wording, so numbers cannot be compared with published ones. So are the
prompts of popqa, mmlu_redux, math500 and zebralogic; those of the paper's authors are in programs of their
repository, which `--template FILE.py` runs (benchmarks/authors.py). For a judge
pass the official instructions, `--template FILE`, or let the official tool judge and score what it stored
with --from. A template is used verbatim; summary.json names it as `wording`. PLACEHOLDERS in
benchmarks/NAME.py has the names to be filled in, as `{$name}` or `{name}`; our own template above it shows
what a reply must look like.

The judge templates of the paper's authors (data_files/*/ in their repository) are such files, for --protocol
paper. benchmarks/judge_template.py says how a template gets a system message.

Writes into its run folder: config.json, command.txt, env.txt, generations.jsonl, judge.jsonl (raw replies),
rows.jsonl (what was scored, and the result of each row), verdicts.jsonl (the rewards of all answers),
task_means.csv, summary.json. Adds lines to runs.csv beside the run's folder.
"""

import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import read_rows, write_jsonl
from rlmt.endpoint import Reply
from rlmt.run import Run, parse_args
import tyro

from benchmarks import authors, shared
from benchmarks.flags import AnswerFlags, JudgeFlags
from benchmarks.judge import RETRIES, Judge, digests_of_judge
from benchmarks.judge_template import describe_wording, fill_messages, read_template
from benchmarks.reward_model import Proxy, best_answers
from benchmarks.scoring import for_summary, index_row, match_rows, row_key, withhold
from benchmarks.table import BENCHMARKS, Benchmark
from benchmarks.tested_model import TestedModel, leave_out_thinking
from rlmt import sandbox
from utils import fail, or_fail

# of the judge about an answer that is missing
NOT_ASKED = Reply(None, "", "the model gave no answer", (0, 0), {})


@dataclass
class Args(JudgeFlags, AnswerFlags):
    # benchmark
    name: tyro.conf.Positional[Literal[*BENCHMARKS]] = tyro.MISSING
    """The benchmark."""
    data: str = ""
    """The benchmark's file, the folder that holds it, or a hub dataset (`owner/name[:configuration]`)."""
    temperature: float = 0.7
    """0 is greedy. The paper's evaluation uses 0.7."""
    top_p: float = 0.95
    """The paper's evaluation uses 0.95."""
    samples: int = 1
    """Answers per task, for pass@k and maj@k. Benchmarks with a judge, IFEval and IFBench score one answer:
    the best of them by --reward-model."""
    protocol: Literal["official", "paper"] = "official"
    """What a judge is asked; see the top of this script."""
    judge_max_tokens: int = 0
    """Tokens of a judge's reply; 0: as the protocol has it."""
    unsafe_code: bool = False
    """Run programs without bubblewrap, which is not on every machine: they can read your files and use the
    network."""
    from_: Annotated[str, tyro.conf.arg(name="from")] = ""
    """Stored responses, annotations or judge texts, in place of a model. Their numbers, and under `rows` the
    result of every row, go into the file --out; empty: the numbers are only printed."""


# --- 1. the judge


class BenchmarkJudge(Judge):
    """The judge of a benchmark, with the rules of --protocol; its flags are those of this script."""

    def __init__(self, args: Args):
        super().__init__(args, args.dtype)
        self.family = BENCHMARKS[args.name].judge
        """The module of the benchmark; None if it has no judge."""
        self.protocol = args.protocol
        self.data = Path(args.data)
        self.template = args.template

    @property
    def parse(self) -> Callable:
        """Returns the reader of the judge's replies; the paper's code takes what marks there are."""
        if self.protocol == "paper":
            return self.family.parse_reply
        return functools.partial(self.family.parse_reply, data=self.data)

    def template_for(self, task: dict) -> str:
        """Returns the judge's instructions for a task; exits with 2 if those of --template cannot be filled
        in."""
        if not self.template:
            return self.family.judge_template(task, self.protocol)
        path = Path(self.template)
        if path.is_dir():  # a file for each category of arenahard2
            path = path / f"{task.get('category')}.txt"
        placeholders = self.family.PLACEHOLDERS[self.protocol]
        return read_template(str(path), placeholders, f" with --protocol {self.protocol}")

    def requests_about(self, task: dict, answer: str) -> dict[str, dict]:
        """Returns the requests about one answer, by the field of the scored row that takes the reply."""
        template = self.template_for(task)
        options = dict(self.family.JUDGE_OPTIONS[self.protocol])
        if self.max_tokens and "logprobs" not in options:
            options["max_tokens"] = self.max_tokens
        shown = self.family.judge_fields(task, answer, self.data, self.protocol)
        requests = {}
        for name, fields in shown.items():
            requests[name] = {"messages": fill_messages(template, fields)} | options
        return requests

    def requests_if_all_answer(self, tasks: list[dict], answer: str) -> list[dict]:
        """Returns all requests if every task got this answer; none without a judge."""
        requests = []
        if self.family:
            for task in tasks:
                requests += self.requests_about(task, answer).values()
        return requests

    def fill_in(self, answers: list[dict], run: Path) -> list[dict]:
        """Returns the answers with the fields that the benchmark's score reads, from the judge's replies."""
        requests = [self.requests_about(row["task"], row["response"] or "") for row in answers]
        # all in one list, since the judge is asked many at a time; its replies come in the same order
        flat_requests = []
        for row, by_field in zip(answers, requests):
            if row["response"] is not None:
                flat_requests += by_field.values()
        replies = iter(self.ask(flat_requests, self.parse, run, RETRIES[self.protocol]))

        rows = []
        for row, by_field in zip(answers, requests):
            replies_by_field = dict.fromkeys(by_field, NOT_ASKED)
            if row["response"] is not None:
                replies_by_field = {field: next(replies) for field in by_field}
            answer = row["response"] or ""
            fields = self.family.judged_fields(row["task"], answer, replies_by_field, self.protocol)
            for reply in replies_by_field.values():
                if reply.error:
                    fields["judge_error"] = reply.error
            rows.append(row | fields)
        return rows


# --- 2. an evaluation


class Evaluation:
    """The benchmark, the model, the judge and the reward model of the flags.

    `tasks` and `fingerprint` are there after `check`.
    """

    def __init__(self, args: Args):
        self.args = args
        self.benchmark = BENCHMARKS[args.name]
        self.judge = BenchmarkJudge(args)
        self.model = TestedModel(args, args.max_thinking_tokens)
        self.proxy = Proxy(args, self.model)

    @property
    def scores_best(self) -> bool:
        """Returns whether the best of several answers to a task is scored, by the reward model."""
        return self.args.samples > 1 and not self.benchmark.several_samples

    # --- before anything is generated

    def check(self) -> None:
        """Loads the tasks and checks everything that the run needs; exits with 2 if something is wrong."""
        self.check_flags()
        self.tasks = self.load_tasks()
        self.model.check()
        self.model.encode_prompts(list(map(self.messages_of, self.tasks)))
        self.model.thinking_budget()  # ends here if the model's thinking cannot be closed
        self.proxy.check()
        self.judge.check()
        self.fingerprint = self.make_fingerprint(self.tasks)

    def check_flags(self) -> None:
        """Exits with 2 for arguments that do not fit the benchmark."""
        args = self.args
        if self.benchmark.judge:
            self.judge.check_is_model(args.name)
        elif args.judge or args.protocol != "official":
            fail(f"{args.name} has no judge; leave --judge and --protocol out")
        if not self.benchmark.has_words and args.template:
            fail(f"{args.name}: its tasks are asked as they are; leave --template out")
        if self.scores_best and not args.reward_model:
            fail(
                f"--samples {args.samples}: {args.name} takes one answer a task; --reward-model chooses "
                "the best of several"
            )

    def load_tasks(self) -> list[dict]:
        """Returns the tasks that count, each with its `position` in the data.

        Exits with 2 if there are none, or if their answers could not be scored.
        """
        args = self.args
        tasks = []
        all_tasks = self.benchmark.load_tasks(Path(args.data))
        for position, task in enumerate(all_tasks):
            # arenahard2 has tasks whose baseline is None
            has_baseline = task.get("baseline", True) is not None
            if "excluded" not in task and has_baseline:
                tasks.append(task | {"position": position})
        if not tasks:
            fail(
                f"--data {args.data}: no task can be scored; arenahard2 needs baseline_*.jsonl, see "
                "data/README.md"
            )
        if args.limit:
            tasks = tasks[: args.limit]
        keys = self.benchmark.keys
        match_rows(
            [row_key(task, task["position"], keys) for task in tasks], all_tasks, keys, f"--data {args.data}"
        )
        if self.benchmark.check_tasks:
            self.benchmark.check_tasks(tasks)
        if args.template and not self.benchmark.judge:
            or_fail(authors.add_prompts, Path(args.template), tasks)
        return tasks

    def messages_of(self, task: dict) -> list[dict]:
        """Returns the conversation that the model answers."""
        if "asked" in task:
            return task["asked"]
        return [{"role": "user", "content": self.benchmark.prompt.format(**task)}]

    def make_fingerprint(self, tasks: list[dict]) -> str:
        """Hashes what two runs must share to be compared: tasks with their right answers, prompts, and the
        judge.

        That is the judge's name, weights if it is a local folder, its instructions, and the baseline's
        answers. The thinking budget and the choice of the best answer count too; model, sampling and seed do
        not.
        """
        args = self.args
        content = [
            args.name,
            list(map(self.messages_of, tasks)),
            args.judge,
            args.protocol,
            self.judge.requests_if_all_answer(tasks, ""),
            tasks,
            digests_of_judge(args.judge),
            args.max_thinking_tokens,
            *args.omit,
        ]
        if self.scores_best:
            content += [args.samples, self.proxy.fingerprint()]
        return shared.short_hash(json.dumps(content, default=str))  # a hub's rows may hold dates

    # --- generate, judge, score

    def answer(self, run: Path) -> list[dict]:
        """Returns generation rows with their `task`, one for each sample of each task.

        Their `response` is what is judged: "" for a completion without one.
        """
        questions = []
        for task in self.tasks:
            for sample in range(self.args.samples):
                question_id = f"{task['position']}-{sample}"
                messages = self.messages_of(task)
                questions.append({"id": question_id, "messages": messages, "task": task, "sample": sample})
        rows = self.model.answer(questions, self.args.temperature, run)
        answers = []
        for question, row in zip(questions, rows):
            answers.append(question | row | {"response": shared.judged_part(row)})
        if self.args.reward_model:
            self.proxy.add_rewards(answers)
            names = ("id", "temperature", "reward")
            rewards = [{name: row.get(name) for name in names} for row in answers]
            # of all answers; rows.jsonl has those that are scored
            write_jsonl(run / "verdicts.jsonl", rewards)
        return answers

    def judge_and_score(self, answers: list[dict], run: Path) -> dict:
        """Returns the numbers of the answers, of which rows.jsonl gets those that are scored."""
        if self.scores_best:
            answers = best_answers(answers)
        if self.judge.family:
            answers = self.judge.fill_in(answers, run)
        path = run / "rows.jsonl"
        rows = [stored_row(row, self.benchmark.keys) for row in answers]
        numbers = self.benchmark.score(rows, Path(self.args.data), str(path))
        with open(path, "w") as file:
            for row, result in zip(rows, numbers["rows"]):
                file.write(json.dumps(row | result) + "\n")
        self.withhold_metrics(numbers)
        print_invalid(numbers)
        return numbers

    def withhold_metrics(self, numbers: dict) -> None:
        """Withholds the metrics if too many rows are invalid; a further category of Arena-Hard has counts of
        its own."""
        for part in [numbers, *numbers.values()]:
            if isinstance(part, dict) and "n_invalid" in part:
                withhold(part, metrics_of(self.benchmark, part), self.args.max_invalid)

    def index_rows(self, numbers: dict) -> list[dict]:
        """Returns the lines of this run in runs.csv beside it, one a metric."""
        args = self.args
        about = {"model": args.model, "temperature": args.temperature, "judge": args.judge}
        rows = []
        for metric in metrics_of(self.benchmark, numbers):
            row = index_row(args.name, numbers, metric, self.fingerprint) | about
            if metric.startswith("instruction_"):
                row["n"] = numbers["n_instructions"]
            rows.append(row)
        return rows


def stored_row(row: dict, keys: tuple[str, ...]) -> dict:
    """Returns an answer as rows.jsonl keeps it: without the task and its prompt, but with the task's key."""
    task = row["task"]
    kept = {name: value for name, value in row.items() if name not in ("id", "messages", "task")}
    return row_key(task, task["position"], keys) | kept


def metrics_of(benchmark: Benchmark, numbers: dict) -> list[str]:
    """Lists the metrics of a benchmark's numbers."""
    at_k = [key for key in numbers if re.fullmatch(r"(pass|maj|best)@\d+", key)]
    return [*benchmark.metrics, *at_k]


def print_invalid(numbers: dict) -> None:
    """Prints why the first ten invalid rows are invalid."""
    invalid = [row for row in numbers["rows"] if "invalid" in row]
    for row in invalid[:10]:
        print(f"invalid, line {row['line']}: {row['invalid']}", file=sys.stderr)


# --- 3. the commands


def score_stored(evaluation: Evaluation) -> None:
    """Scores the stored rows of --from, and writes the numbers to --out."""
    args = evaluation.args
    shared.check_stored(args, "name", "data", "from_", "unsafe_code", "think_format")
    rows = read_rows(args.from_, make_ids=False)
    leave_out_thinking(rows, args.from_, args.think_format)
    numbers = evaluation.benchmark.score(rows, Path(args.data), args.from_)
    evaluation.withhold_metrics(numbers)
    result = {"benchmark": args.name, "from": args.from_, "data": args.data, **numbers}
    if args.out and not args.dry_run:
        shared.write_scores(args.out, result)
    print(json.dumps(for_summary(result), indent=1))
    print_invalid(numbers)


def main(args: Args) -> None:
    shared.require(data=(args.data, "the benchmark's file, folder or hub dataset; see data/README.md"))
    if args.name == "humaneval":
        sandbox.check_can_run(args.unsafe_code)
    evaluation = Evaluation(args)
    if args.from_:
        score_stored(evaluation)
        return
    shared.require(model=(args.model, "the model to evaluate; or name stored rows by --from"))

    # --- check everything before anything is generated, and estimate what the judge costs
    evaluation.check()
    tasks = evaluation.tasks
    print(f"{len(tasks)} tasks x {args.samples} answers; judge: {args.judge or 'none'}")
    run = Run(args, f"eval_{args.name}", args.model)
    if evaluation.judge.family:
        evaluation.judge.check_start(run.folder, tasks, args.max_tokens, not args.generate_only)
    if args.dry_run:
        return
    run.start(has_steps=False)

    # --- generate, judge, score
    answers = evaluation.answer(run.folder)
    if args.generate_only:
        return
    numbers = evaluation.judge_and_score(answers, run.folder)

    # --- write
    summary = {
        "model": args.model,
        "top_p": args.top_p,
        "fingerprint": evaluation.fingerprint,
        **for_summary(numbers),
        **for_summary(shared.describe(answers, [row["task"]["position"] for row in answers])),
        "tokens_per_task": sum(row["n_tokens"] for row in answers) / len(tasks),
    }
    if evaluation.benchmark.has_words:
        summary["wording"] = describe_wording(args.template)
    shared.save_results(run, summary, evaluation.index_rows(numbers))


if __name__ == "__main__":
    if sys.argv[1:2] == ["traits"]:  # compares two files of plans, with arguments of its own
        from benchmarks import traits

        del sys.argv[1]
        traits.main(parse_args(traits.Args, {}))
    else:
        main(parse_args(Args, {}))
