"""Runs the rows of the paper's tables, whose commands are in experiments/*.sh, and renders the tables.

    python reproduce.py --list                                         # every row, and what is done
    python reproduce.py --show table1/llama3.1-8b-rlmt                 # its commands and those before it, to paste
    python reproduce.py --table 1 --row llama3.1-8b-rlmt --run         # runs what is missing; resumes
    python reproduce.py --table toy --run --lanes 2                    # the same matrix on the toy world
    python reproduce.py --table rewards --run --lanes 2                # other rewards on the toy world
    python reproduce.py --tables                                       # renders all tables: results/tables/

A line of experiments/*.sh is a row, a stage that rows share, or a preparation; experiments/rows.sh says how they are
written. Bash runs a line after the settings at the top of its file; this script sets SEED, RESULTS, JUDGE_FLAGS,
TEMPLATES and AS_RELEASED for it. A file of your own is read like ours: `row mine/NAME ...` is a row of the table `mine`.

A row's name says how its model was made: `released`, `prompted-think` (an instruction only), `sft-think`,
`rlmt` or `rlhf` (without thinking), then `-zero`, `-dpo` or `-ppo`, then what an ablation changes. With
`-as-released` at its end the row trains nothing: it evaluates the checkpoint of the paper's authors.
"""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import tyro

from experiments import tables
from rlmt.data import read_rows
from rlmt.endpoint import Endpoint, try_endpoint
from utils import fail

HERE = Path(__file__).parent
EXPERIMENTS = HERE / "experiments"
TABLES = (
    "1",
    "2",
    "3",
    "4",
    "8",
    "9",
    "10",
    "toy",
    "rewards",
)  # in the order of the list; others come after them
SEVEN = (
    "wildbench alpacaeval2 arenahard2 creativewriting3 popqa ifbench mmlu_redux".split()
)  # evaluate.sh's without names


@dataclass
class Args:
    table: str = ""
    """1, 2, 3, 4, 8, 9, 10, toy, rewards, or one of a file of your own in experiments/."""
    row: str = ""
    """One row of the table; empty: all of them."""
    # what to do
    list: bool = False
    """Print every row with its status."""
    show: str = ""
    """TABLE/ROW, such as table1/llama3.1-8b-rlmt: print its commands and those that come before it, to paste."""
    run: bool = False
    """Run the commands that are not finished; an interrupted one goes on."""
    tables: bool = False
    """Render every table from runs.csv as Markdown and csv."""
    # how
    seeds: tuple[int, ...] = (0,)
    """Random seeds; each has run folders of its own."""
    as_released: bool = False
    """Train with the values of the paper's released code, where they differ from the paper's."""
    results: Path = Path("results")
    """Folder of the run folders and of runs.csv; the toy rows have theirs in its subfolder toy/."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judges; empty: OPENAI_BASE_URL, else the official one."""
    key_env: tuple[str, ...] = ()
    """HOST=NAME words: the environment variable NAME holds the key for the endpoint at that host, or HOST:PORT.
    Without a word for its host, only the OpenAI API and OPENAI_BASE_URL get OPENAI_API_KEY, others no key."""
    budget: float = 0.0
    """US dollars that the judge may cost in each evaluation; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars per million tokens that a judge reads and writes; name the dearest judge's."""
    templates: str = ""
    """Folder with the judges' instructions, used verbatim: data_files of the authors' repository, or a folder laid
    out like it (experiments/evaluate.sh). Empty: our own wording. What is finished is not judged again."""
    lanes: int = 1
    """Blocks that run at a time; 1 on GPUs, as a command there takes the whole machine."""


# --- 1. lines of experiments/*.sh

LINE = re.compile(
    r"""^(?:[A-Z_]+=(?:"[^"]*"|\S+)\ )*   # variables that hold for this line
    (?P<kind>row|stage|prepare)\ (?P<name>\S+)
    (?P<before>(?:\ (?:from|needs)\ \S+)*)
    (?P<command>.*)$""",
    re.MULTILINE | re.VERBOSE,
)


@dataclass(frozen=True)
class Block:
    """A training, a preparation, or a row's evaluation: what is run at a time."""

    name: str
    """table1/ROW, ..., toy/ROW or rewards/ROW of an evaluation; without a slash for the others."""
    settings: str
    """The lines before the first row, stage or preparation of its file."""
    text: str
    """Its line, which trains or evaluates as ONLY says."""
    needs: tuple[str, ...] = ()
    is_preparation: bool = False
    """It makes data or a small model for all seeds. It leaves no run folder, so it is never "done": it runs whenever a
    block that runs needs it."""

    @property
    def table(self) -> str:
        """Returns 1, 2, ..., toy, rewards or a name of the user's; "" of what is no evaluation."""
        return self.name.rpartition("/")[0].removeprefix("table")

    @property
    def row(self) -> str:
        """Returns the name without the table, with which its run folders begin."""
        return self.name.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """Returns the folder in results/ that its file names for its runs; "" for results/ itself."""
        named = re.search(r"RESULTS:=results/([\w.-]+)", self.settings)
        return named[1] if named else ""

    @property
    def evaluations(self) -> list[str]:
        """Lists the evaluations whose folders its line leaves: those of evaluate.sh, or `gold` by a command of its own."""
        if "EVALUATE" in self.settings:
            return ["gold"]
        named = re.search(r'^BENCHMARKS="(.*)"', self.settings, re.MULTILINE)
        return named[1].split() if named else SEVEN

    @property
    def checkpoint(self) -> Path | None:
        """Returns the folder of the published checkpoint that a row as released evaluates; None for others."""
        if not self.row.endswith(tables.AS_RELEASED):
            return None
        folder = os.environ.get("CHECKPOINTS", "checkpoints")
        return HERE / folder / self.row.removesuffix(tables.AS_RELEASED)


def read_blocks() -> dict[str, Block]:
    """Reads the blocks of all files, by name, in the order of the files. A row that trains has two of them.

    Exits with 2 if a name is written twice, or if a line needs what no file has.
    """
    blocks: dict[str, Block] = {}

    def add(block: Block) -> None:
        if block.name in blocks:
            fail(f"experiments/*.sh: {block.name} is there twice; give one of them another name")
        blocks[block.name] = block

    trains_nothing = []
    for path in sorted(EXPERIMENTS.glob("*.sh")):
        text = path.read_text()
        lines = list(LINE.finditer(text))
        for line in lines:
            settings = text[: lines[0].start()]
            name = line["name"]
            run = name.rpartition("/")[2]
            needs = tuple(line["before"].split()[1::2])
            if line["kind"] == "prepare":
                add(Block(name, settings, line[0], needs, is_preparation=True))
                continue
            if line["command"]:
                add(Block(run, settings, f"ONLY=train {line[0]}", needs))
                needs = (run,)
            elif line["kind"] == "row":
                trains_nothing.append(name)
            if line["kind"] == "row":
                add(Block(name, settings, f"ONLY=evaluate {line[0]}", needs))

    for name in trains_nothing:  # another line may train the model that it evaluates
        block = blocks[name]
        if block.row in blocks:
            blocks[name] = replace(block, needs=(*block.needs, block.row))
    for block in blocks.values():
        for need in block.needs:
            if need not in blocks:
                fail(f"experiments/*.sh: {block.name} needs {need}, which no line makes")
    return blocks


def table_rows(blocks: dict[str, Block]) -> dict[str, dict[str, Block]]:
    """Sorts the rows by table: {table: {row: its block}}."""
    rows = {table: {} for table in TABLES}
    for block in blocks.values():
        if block.table:
            rows.setdefault(block.table, {})[block.row] = block
    return {table: of_table for table, of_table in rows.items() if of_table}


# --- 2. what is done


def status(root: Path, block: Block, seed: int) -> str:
    """Returns the status of a row, or of the run of a stage, for one seed.

    "figures only": git has its numbers, but neither command.txt nor weights.
    """
    run = root / f"{block.row}-s{seed}"
    folders = [run]
    if block.table:
        folders = [root / f"{run.name}--{evaluation}" for evaluation in block.evaluations]
        if run.exists():  # a row that trains nothing has evaluations only
            folders.append(run)
    there = [folder for folder in folders if folder.exists()]
    if not there:
        return "not yet run"
    if not all((folder / "summary.json").exists() for folder in folders):
        return "interrupted"
    if not all((folder / "command.txt").exists() for folder in folders):
        return "figures only"
    return "done"


# --- 3. what is to be run


class Job(NamedTuple):
    block: str
    seed: int


def job_of(block: Block, seed: int) -> Job:
    """Names a block's job for a seed; a preparation has one for all seeds."""
    return Job(block.name, 0 if block.is_preparation else seed)


def all_needs(block: Block, blocks: dict[str, Block]) -> list[Block]:
    """Lists the blocks that a block needs, and what those need, each after its needs."""
    found = []
    for name in block.needs:
        found += all_needs(blocks[name], blocks)
        found.append(blocks[name])
    return found


def add_jobs(block: Block, seed: int, blocks: dict[str, Block], root: Path, jobs: list[Job]) -> None:
    """Adds the job of an unfinished block after the jobs of its unfinished needs.

    Exits with 2 if it needs the weights of a run of which only figures are here.
    """
    for name in block.needs:
        need = blocks[name]
        state = status(root, need, seed)
        if state == "figures only":
            fail(
                f"in {root} are figures of {need.row}-s{seed}, but not its weights, which {block.name} needs; "
                "--results DIR makes everything anew"
            )
        if state != "done":
            add_jobs(need, seed, blocks, root, jobs)
            continue
        for earlier in all_needs(need, blocks):
            if earlier.is_preparation and job_of(earlier, seed) not in jobs:
                jobs.append(job_of(earlier, seed))  # the data that a finished run read is read again
    if job_of(block, seed) not in jobs:
        jobs.append(job_of(block, seed))


def plan(args: Args, wanted: list[Block], blocks: dict[str, Block], root: Path) -> list[Job]:
    """Lists the jobs of the wanted blocks for all seeds; prints those of which git has the figures."""
    jobs = []
    figures = []
    for seed in args.seeds:
        for block in wanted:
            state = status(root, block, seed)
            if state == "figures only":
                figures.append(f"{block.row}-s{seed}")
            elif state != "done":
                add_jobs(block, seed, blocks, root, jobs)
    if figures:
        print(f"made before (figures only, no weights), not run again: {', '.join(figures)}")
        print("--results DIR makes them anew", flush=True)
    return jobs


def commands_of(block: Block, variables: dict[str, str]) -> list[list[str]]:
    """Lists the commands of a block, as bash expands them."""
    shown = subprocess.run(
        ["bash", "-c", block.settings + block.text],
        cwd=HERE,
        env=os.environ | variables | {"SHOW": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [shlex.split(line) for line in shown.stdout.splitlines()]


def data_of(words: list[str]) -> list[str]:
    """Lists the paths in data/ that a command reads: those that it names and, of a training, the defaults of the others."""
    paths = [word for word in words if word.startswith("data/")]
    for script in words:
        if script.startswith("train_") and "--preset toy" not in " ".join(words):
            defaults = importlib.import_module(script.removesuffix(".py")).Args()
            for field in ("traces", "prompts"):
                if hasattr(defaults, field) and f"--{field}" not in words:
                    paths.append(getattr(defaults, field))
    return [path for path in paths if not path.startswith("data/toy/")]  # which the jobs themselves make


def check_inputs(jobs: list[Job], blocks: dict[str, Block], args: Args, root: Path) -> list[Endpoint]:
    """Returns the judges that the jobs ask; exits with 2 if a key for them, data for a row, or its references are missing."""
    evaluate = (HERE / "experiments" / "evaluate.sh").read_text()
    paths = set()
    lines = []
    for job in jobs:
        block = blocks[job.block]
        if block.checkpoint and not block.checkpoint.exists():
            fail(
                f"{block.checkpoint} is missing: the checkpoint of the paper's authors; docs/paper.md says how to get it"
            )
        for words in commands_of(block, variables_of(args, root, job.seed)):
            paths.update(data_of(words))
            if "experiments/evaluate.sh" in words:
                for evaluation in block.evaluations:
                    if not (root / f"{block.row}-s{job.seed}--{evaluation}" / "summary.json").exists():
                        lines += re.findall(rf"^ *{evaluation}\) .*", evaluate, re.MULTILINE)
    text = "\n".join(lines)
    paths.update(re.findall(r" (data/[\w.]+)", text))

    missing = sorted(path for path in paths if not (HERE / path).exists())
    if missing:
        fail(f"{', '.join(missing)} must be made first; data/README.md says how")
    check_references(lines)
    judges = []
    for variable, name in re.findall(r'^ *(\w+)="--judge (\S+)', evaluate, re.MULTILINE):
        if f"${variable}" in text:
            judges.append(Endpoint(name, root / "judge.jsonl", args.judge_url, key_env=args.key_env))
    return judges


def check_references(lines: list[str]) -> None:
    """Exits with 2 if WildBench's tasks lack the reference answers that a line of evaluate.sh compares with."""
    for line in lines:
        tasks = re.search(r" --tasks (data/(?!toy/)\S+)", line)
        if not tasks:
            continue
        named = re.search(r" --references (\S+)", line)
        reference = "gpt-4"  # the default of eval_wildbench.py
        if named:
            reference = named[1]
        n_without = 0
        for task in read_rows(HERE / tasks[1], "messages"):
            if reference not in (task.get("references") or {}):
                n_without += 1
        if n_without:
            fail(
                f"{tasks[1]}: {n_without} tasks have no reference {reference!r}; data/README.md says where it comes from"
            )


def check_templates(folder: str) -> None:
    """Prints which judges read our own words, as --templates lacks their file; exits with 2 if it has none."""
    evaluate = (HERE / "experiments" / "evaluate.sh").read_text()
    files = re.findall(r"^ *([\w |-]+)\) instructions (\S+)", evaluate, re.MULTILINE)
    missing = [(names, file) for names, file in files if not (Path(folder) / file).exists()]
    if len(missing) == len(files):
        wanted = ", ".join(file for _, file in files)
        fail(f"--templates {folder}: none of {wanted} is in it")
    for names, file in missing:
        print(f"--templates {folder} has no {file}: {names} is judged in our own wording", flush=True)


# --- 4. running


def variables_of(args: Args, root: Path, seed: int) -> dict[str, str]:
    """Returns the variables that experiments/*.sh read."""
    variables = {"SEED": str(seed), "RESULTS": str(root)}
    judge_flags = []
    if args.judge_url:
        judge_flags += ["--judge-url", args.judge_url]
    if args.key_env:
        judge_flags += ["--key-env", *args.key_env]
    if any(args.price):
        judge_flags += ["--budget", str(args.budget), "--price", *map(str, args.price)]
    if judge_flags:
        variables["JUDGE_FLAGS"] = " ".join(judge_flags)
    if args.templates:
        variables["TEMPLATES"] = str(Path(args.templates).resolve())
    if args.as_released:
        variables["AS_RELEASED"] = "--as-released"
    return variables


def start(block: Block, variables: dict[str, str], log: Path) -> subprocess.Popen:
    """Starts a block in a process group of its own, so that bash and what it runs are stopped together.

    The trap makes bash wait for its command on SIGTERM, as a training run first writes a checkpoint.
    """
    path = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `python` is the one that runs this
    )
    environment = os.environ | variables | {"PATH": path, "PYTHONUNBUFFERED": "1"}
    command = ["bash", "-c", "trap 'exit 143' TERM\n" + block.settings + block.text]
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as file:
        return subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=file, stderr=file, start_new_session=True
        )


def run_jobs(jobs: list[Job], blocks: dict[str, Block], args: Args, root: Path) -> None:
    """Runs the jobs, `args.lanes` at a time and each after those that it needs, with logs in root/logs/.

    A failure stops all jobs and exits with 1; the same command goes on later.
    """
    waiting = list(jobs)
    running: dict[Job, subprocess.Popen] = {}
    started = time.monotonic()
    signal.signal(signal.SIGTERM, stop)
    try:
        while waiting or running:
            for job in list(waiting):
                block = blocks[job.block]
                needed = {job_of(need, job.seed) for need in all_needs(block, blocks)}
                if len(running) < args.lanes and needed.isdisjoint([*waiting, *running]):
                    waiting.remove(job)
                    running[job] = start(block, variables_of(args, root, job.seed), log_of(job, root))
                    report(started, f"{block.name} s{job.seed} starts; its log is {log_of(job, root)}")

            time.sleep(0.5)
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                if process.returncode:
                    log = log_of(job, root)
                    print(log.read_text(errors="replace")[-3000:])
                    sys.exit(f"{job.block} failed; its log is {log}. The same command goes on from here.")
                del running[job]
                n_done = len(jobs) - len(waiting) - len(running)
                report(started, f"{job.block} s{job.seed} is done, {n_done} of {len(jobs)}")
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in running.values():
            process.wait()


def log_of(job: Job, root: Path) -> Path:
    return root / "logs" / f"{job.block.replace('/', '-')}-s{job.seed}.log"


def report(started: float, message: str) -> None:
    print(f"[{time.monotonic() - started:4.0f} s] {message}", flush=True)


def stop(*_) -> None:
    """Leaves run_jobs on SIGTERM by its `finally`, which ends what is running."""
    sys.exit(143)


# --- 5. what was asked for


def list_rows(args: Args, rows: dict[str, dict[str, Block]]) -> None:
    """Prints a line for each row: table, name, and status for each seed."""
    for table, blocks in rows.items():
        for row, block in blocks.items():
            states = []
            for seed in args.seeds:
                states.append(f"s{seed}: {status(args.results / block.folder, block, seed)}")
            print(f"table {table:4} {row:45}", *states)


def wanted_blocks(args: Args, rows: dict[str, dict[str, Block]]) -> list[Block]:
    """Returns the blocks of --table and --row."""
    if not args.table:
        fail("nothing to do: --list, --show, --tables, or --table with --run")
    if args.table not in rows:
        fail(f"--table {args.table!r}: use one of {', '.join(rows)}")
    in_table = rows[args.table]
    if args.row and args.row not in in_table:
        fail(f"--row {args.row!r}: table {args.table} has {', '.join(in_table)}")
    if args.row:
        return [in_table[args.row]]
    return list(in_table.values())


def with_checkpoints(wanted: list[Block]) -> list[Block]:
    """Leaves out the rows as released whose checkpoint is not here, and says how many."""
    kept = [block for block in wanted if block.checkpoint is None or block.checkpoint.exists()]
    n_left_out = len(wanted) - len(kept)
    if n_left_out:
        print(
            f"{n_left_out} rows as released are left out: their checkpoints are not here; see docs/paper.md",
            flush=True,
        )
    return kept


def show(name: str, blocks: dict[str, Block], args: Args) -> None:
    """Prints the commands of a row, or of a run, for the first seed, after the commands of all that it needs."""
    if name not in blocks:
        fail(f"--show {name}: no line of experiments/*.sh has this name; use one of {', '.join(blocks)}")
    block = blocks[name]
    root = args.results / block.folder
    variables = variables_of(args, root, args.seeds[0])
    print("export", *[f"{variable}={shlex.quote(value)}" for variable, value in variables.items()])
    for need in dict.fromkeys([*all_needs(block, blocks), block]):
        commands = commands_of(need, variables)
        if commands and need.is_preparation:
            print(f"\n# {need.name}")
        elif commands:
            print(f"\n# {need.name}, {status(root, need, args.seeds[0])}")
        for words in commands:
            print(shlex.join(words))


def main(args: Args) -> None:
    blocks = read_blocks()
    rows = table_rows(blocks)
    if args.tables:
        for name, text in tables.render(args.results, rows).items():
            print(f"\n{name}\n\n{text}")
        return
    if args.list:
        list_rows(args, rows)
        return
    if args.show:
        show(args.show, blocks, args)
        return

    if args.budget and not any(args.price):
        fail("--budget needs --price: US dollars for a million tokens read and written")
    if args.lanes < 1:
        fail(f"--lanes {args.lanes}: use 1 or more")
    if args.templates:
        check_templates(args.templates)
    wanted = wanted_blocks(args, rows)
    if not args.run:
        fail("--table without --run does nothing; --show TABLE/ROW prints the commands of a row")
    if not args.row:
        wanted = with_checkpoints(wanted)
    root = args.results / wanted[0].folder
    jobs = plan(args, wanted, blocks, root)
    for judge in check_inputs(jobs, blocks, args, root):
        try_endpoint(judge, "the judge", dry_run=False)  # before days of training
    run_jobs(jobs, blocks, args, root)
    tables.render(args.results, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
