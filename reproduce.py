"""Runs the rows of the paper's tables, whose commands are in experiments/*.sh, and renders the tables.

    python reproduce.py --list                                         # every row, and what is done
    python reproduce.py --show table1/llama3.1-8b-rlmt                 # its commands and those before it, to paste
    python reproduce.py --table 1 --row llama3.1-8b-rlmt --run         # runs what is missing; resumes
    python reproduce.py --table toy --run                              # the same matrix on the toy world
    python reproduce.py --table rewards --run                          # other rewards on the toy world
    python reproduce.py --tables                                       # renders all tables: results/tables/

A line of experiments/*.sh is a row, a stage that rows share, or a preparation; experiments/rows.sh says how
they are written. Bash lists what a file holds, and runs one block of it at a time; this script sets SEED,
RESULTS, JUDGE, JUDGE_URL, JUDGE_FLAGS, TEMPLATES and AS_RELEASED for it. A file of your own is read like ours: `row mine/NAME
...` is a row of the table `mine`.

A row's name says how its model was made: `released`, `prompted-think` (an instruction only), `sft-think`,
`rlmt` or `rlhf` (without thinking), then `-zero`, `-dpo` or `-ppo`, then what an ablation changes. With
`-as-released` at its end the row trains nothing: it evaluates the checkpoint of the paper's authors.
"""

import contextlib
import difflib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import tyro

from experiments import tables
from utils import fail, refuse_repeated

HERE = Path(__file__).parent
EXPERIMENTS = HERE / "experiments"
# H100-hours of an 8B model, by the authors' README; DPO's without its sampling
HOURS = {"train_sft_warmstart.py": 20, "train_grpo.py": 62, "train_ppo.py": 62, "train_dpo.py": 8}
# of a judge by one model, as docs/evaluation.md has them
CALLS = {
    "wildbench": 1024,
    "wildbench-g": 1024,
    "alpacaeval2": 805,
    "arenahard2": 1000,
    "creativewriting3": 96,
}
QUESTION = {"role": "user", "content": 'Reply with the JSON object {"score": 7} and nothing else.'}


@dataclass
class Args:
    table: tuple[str, ...] = ()
    """1, 2, 3, 4, 8, 9, 10, toy, rewards, rlver, those of experiments/study.sh or of a file of your own there;
    several share what they need."""
    row: tuple[str, ...] = ()
    """Rows of these tables; none: all of them."""
    # what to do
    list: bool = False
    """Print every row, of all tables or of --table, with its status."""
    show: str = ""
    """TABLE/ROW, such as table1/llama3.1-8b-rlmt: print its commands and those that come before it, to
    paste."""
    run: bool = False
    """Run the commands that are not finished; an interrupted one goes on."""
    dry_run: bool = False
    """With --run, print what is left and what it takes instead: runs, GPU-hours, passes over the data, calls."""
    tables: bool = False
    """Render every table, or those of --table, from runs.csv as Markdown and csv."""
    # how
    seeds: tuple[int, ...] = (0,)
    """Random seeds; each has run folders of its own."""
    as_released: bool = False
    """Train with the values of the paper's released code, where they differ from the paper's."""
    results: Path = Path("results")
    """Folder of the run folders and of runs.csv; some tables have theirs in a subfolder, such as toy/."""
    judge: str = ""
    """A judge in place of the paper's, gpt-4o and gpt-4.1: a model's name at --judge-url, or local:FOLDER."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: OPENAI_BASE_URL, else the official one."""
    judge_flags: str = ""
    """Other flags of the judges, as one text: --judge-flags="--budget 20 --price 2.5 10". The budget is that of
    each evaluation; the price is the dearest judge's."""
    templates: str = ""
    """Folder with the judges' instructions, used verbatim: data_files of the authors' repository, which also
    has the tasks' prompts, or a folder laid out like it (experiments/evaluate.sh). Empty: our own wording.
    What is finished is not asked or judged again."""


# --- 1. lines of experiments/*.sh


@dataclass(frozen=True)
class Block:
    """A training, a preparation, or a row's evaluation: what is run at a time."""

    kind: str
    """row, stage or prepare. A preparation makes data or a small model for all seeds. It leaves no run folder,
    so it is never "done": it runs whenever a block that runs needs it."""
    name: str
    """table1/ROW, ..., toy/ROW or rewards/ROW of an evaluation; without a slash for the others."""
    folder: str
    """Folder in --results that its file names for its runs; "" for --results itself."""
    evaluations: tuple[str, ...]
    """The evaluations whose folders a row leaves: those of evaluate.sh, or `gold` by a command of its own."""
    needs: tuple[str, ...]
    """Names of the blocks that run before it."""
    file: Path

    @property
    def table(self) -> str:
        """Returns 1, 2, ..., toy, rewards or a name of the user's; "" of what is no evaluation."""
        return self.name.rpartition("/")[0].removeprefix("table")

    @property
    def row(self) -> str:
        """Returns the name without the table, with which its run folders begin."""
        return self.name.rpartition("/")[2]

    @property
    def command(self) -> list[str]:
        """Returns the words that run it, or print its commands with SHOW=1."""
        return ["env", f"BLOCK={self.name}", "bash", str(self.file)]


def read_blocks() -> dict[str, Block]:
    """Reads the blocks of all files, by name, in the order of the files. A row that trains has two of them.

    Exits with 2 if a name is written twice, or if a line needs what no file has.
    """
    blocks = {}
    for path in sorted(EXPERIMENTS.glob("*.sh")):
        text = path.read_text()
        if ". experiments/rows.sh" not in text:
            if re.search(r"^row ", text, re.MULTILINE):
                fail(f"{path}: it has rows, but no line `. experiments/rows.sh` before them")
            continue
        listing = ["env", "-u", "RESULTS", "LIST=1", "bash", str(path)]
        listed = subprocess.run(listing, cwd=HERE, text=True, stdout=subprocess.PIPE)
        if listed.returncode:
            fail(f"{path}: bash cannot read it; its message is above")
        for line in listed.stdout.splitlines():
            kind, name, folder, evaluations, needs = line.split("|")
            if name in blocks:
                fail(f"experiments/*.sh: {name} is there twice; give one of them another name")
            blocks[name] = Block(kind, name, folder, tuple(evaluations.split()), tuple(needs.split()), path)
    for name, block in blocks.items():
        if block.table and block.row in blocks and block.row not in block.needs:
            # another line trains the model that it evaluates
            blocks[name] = replace(block, needs=(*block.needs, block.row))
        for need in block.needs:
            if need not in blocks:
                fail(f"experiments/*.sh: {name} needs {need}, which no line makes")
    return blocks


def table_rows(blocks: dict[str, Block]) -> dict[str, dict[str, Block]]:
    """Sorts the rows by table: {table: {row: its block}}; 1 to 10 come first, then the names."""
    rows = {}
    for block in blocks.values():
        if block.table:
            rows.setdefault(block.table, {})[block.row] = block
    return dict(sorted(rows.items(), key=lambda item: (len(item[0]), item[0])))


# --- 2. what is done


def status(root: Path, block: Block, seed: int) -> str:
    """Returns the status of a row, or of the run of a stage, for one seed."""
    run = root / f"{block.row}-s{seed}"
    folders = [run]
    if block.table:
        folders = [root / f"{run.name}--{evaluation}" for evaluation in block.evaluations]
        if run.exists():  # a row that trains nothing has evaluations only
            folders.append(run)
    if all((folder / "summary.json").exists() for folder in folders):
        return "done"
    if any(folder.exists() for folder in folders):
        return "unfinished"
    return "not yet run"


# --- 3. what is to be run


Job = tuple[Block, int]  # a block, and the seed with which it runs


def jobs_of(block: Block, seed: int, blocks: dict[str, Block], root: Path | None) -> list[Job]:
    """Lists the jobs of what a block needs, each after its needs, then its own; none that is done in `root`.

    Without a root all are listed. Some may be there twice.
    """
    jobs = []
    for name in block.needs:
        jobs += jobs_of(blocks[name], seed, blocks, root)
    if root and status(root, block, seed) == "done":
        # the data that it read are read again
        return [job for job in jobs if job[0].kind == "prepare"]
    if block.kind == "prepare":
        seed = 0  # one for all seeds
    return [*jobs, (block, seed)]


def plan(args: Args, wanted: list[Block], blocks: dict[str, Block], root: Path) -> list[Job]:
    """Lists the jobs of the wanted blocks for all seeds, each once; says so if there are none."""
    jobs = {}
    needed = {}
    for seed in args.seeds:
        for block in wanted:
            needed |= dict.fromkeys(jobs_of(block, seed, blocks, root=None))
            if status(root, block, seed) != "done":
                jobs |= dict.fromkeys(jobs_of(block, seed, blocks, root))
    for block, seed in needed:
        if block.kind == "stage" and status(root, block, seed) == "done":
            check_unchanged(block, seed, args, root)
    if not jobs:
        print(f"all is done in {root}; --results DIR makes it anew")
    return list(jobs)


def check_unchanged(block: Block, seed: int, args: Args, root: Path) -> None:
    """Exits with 2 if the line of a finished run was edited since."""
    run = root / f"{block.row}-s{seed}"
    if not (run / "command.txt").exists():  # it came with the repository, where a line may have older words
        return
    from rlmt.run import CHANGEABLE, LENGTH, changed_since, constants

    before = json.loads((run / "config.json").read_text())
    # a run of other steps has other numbers
    may_differ = tuple(name for name in CHANGEABLE if name not in LENGTH)
    for words in commands_of(block.command, variables_of(args, root, seed)):
        module, arguments = parse(words)
        if not module:
            continue
        changed = changed_since(before, arguments, constants(vars(module)), may_differ)
        if changed:
            fail(
                f"{run} is done, with other values than {block.file} or {module.__name__}.py has now: "
                f"{', '.join(changed)}; give the line another name, or take --results DIR"
            )


def variables_of(args: Args, root: Path, seed: int) -> dict[str, str]:
    """Returns the variables that experiments/*.sh read."""
    variables = {"SEED": str(seed), "RESULTS": str(root)}
    for name in ("judge", "judge_url", "judge_flags"):
        if getattr(args, name):
            variables[name.upper()] = getattr(args, name)
    if args.templates:
        variables["TEMPLATES"] = str(Path(args.templates).resolve())
    if args.as_released:
        variables["AS_RELEASED"] = tables.AS_RELEASED
    return variables


def commands_of(command: list[str], variables: dict[str, str]) -> list[list[str]]:
    """Lists the commands that a block, or a call of evaluate.sh, would run."""
    environment = os.environ | variables | {"SHOW": "1"}
    shown = subprocess.check_output(command, cwd=HERE, env=environment, text=True)
    return [shlex.split(line) for line in shown.splitlines()]


def script_of(words: list[str]) -> str:
    """Returns the training script of a command, or ""."""
    return next((word for word in words if word.startswith("train_")), "")


def parse(words: list[str]) -> tuple[ModuleType | None, object]:
    """Returns the script of a training command and its arguments, as the script parses them; None and no arguments
    of another command.

    Exits with 2 for what the script would refuse, before hours of other jobs.
    """
    script = script_of(words)
    if not script:
        return None, SimpleNamespace()
    name = script.removesuffix(".py")
    if not importlib.util.find_spec(name):
        fail(f"{shlex.join(words)}: there is no {script}")
    from rlmt.run import parse_args  # here, as --list and --show need no torch

    module = importlib.import_module(name)
    typed = sys.argv
    sys.argv = words[words.index(script) :]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return module, parse_args(module.Args, module.PRESETS)
    except SystemExit:
        print(f"this is wrong in {shlex.join(words)}")
        raise
    finally:
        sys.argv = typed


def inputs_of(words: list[str]) -> set[str]:
    """Returns the data, the checkpoint and the reward files that a command reads."""
    inputs = set(words)
    _, arguments = parse(words)
    for value in vars(arguments).values():
        if isinstance(value, tuple):
            inputs.update(map(str, value))
        else:
            inputs.add(str(value))
    # a function, perhaps as NAME.OPTION=FILE.py:FUNCTION. The jobs themselves make what is in data/toy, and
    # data/smollm2
    of_user = r"(?:[\w.]+=)?(.*[.]py(?=:)|checkpoints/.*|data/(?!toy/|smollm2).*)"
    found = [re.match(of_user, path) for path in inputs]
    return {match[1] for match in found if match}


def missing_inputs(commands: list[list[str]]) -> list[str]:
    """Lists what the commands read and is not there."""
    inputs = set()
    for words in commands:
        inputs |= inputs_of(words)
    return sorted(path for path in inputs if not (HERE / path).exists())


def all_commands(jobs: list[Job], args: Args, root: Path) -> list[list[str]]:
    """Lists the commands of the jobs, and after evaluate.sh those that it runs."""
    commands = []
    for block, seed in jobs:
        variables = variables_of(args, root, seed)
        for words in commands_of(block.command, variables):
            commands.append(words)
            if "experiments/evaluate.sh" in words:
                commands += commands_of(words, variables)
    return commands


def print_costs(commands: list[list[str]]) -> None:
    """Prints what the jobs take: runs and GPU-hours of training, passes over the data, calls of judges, data."""
    runs = Counter()  # on several GPUs
    calls = Counter()
    for words in commands:
        script = script_of(words)
        runs[script] += words[0] == "accelerate"
        if script in HOURS:
            print(f"{words[words.index('--out') + 1]}: {passes_over_data(script, words)}")
        if "--judge" in words:
            benchmark = words[words.index("--out") + 1].rpartition("--")[2]
            calls[words[words.index("--judge") + 1]] += CALLS.get(benchmark, 0)
    for script, hours in HOURS.items():
        if runs[script]:
            print(
                f"{script}: {runs[script]} runs; at 8B, by the paper's README, {runs[script] * hours} H100-hours"
            )
    for judge, n_calls in calls.items():
        if n_calls:
            print(f"judge {judge}: {n_calls} calls; each evaluation's own --dry-run estimates what they cost")
    missing = missing_inputs(commands)
    if missing:
        print(f"missing: {', '.join(missing)}")


def passes_over_data(script: str, words: list[str]) -> str:
    """Says how often a training command reads its data."""
    _, arguments = parse(words)
    values = vars(arguments)
    if script == "train_sft_warmstart.py":
        return f"{values['epochs']} passes over {values['traces']}"
    if script == "train_dpo.py":
        n_prompts = values["rounds"] * values["prompts_per_round"]  # 0: all
        return f"{n_prompts or 'all'} prompts of {values['prompts']}"
    n_prompts = values["steps"] * values["prompts_per_step"]
    text = f"{n_prompts} prompts of {values['prompts']}"
    path = HERE / values["prompts"]
    if path.suffix == ".jsonl" and path.exists():
        with open(path) as file:
            text += f", {n_prompts / sum(1 for _ in file):.1f} passes"
    return text


def judge_flags(args: Args):
    """Parses --judge-flags as the evaluations do, and returns them with --judge-url; exits with 2 if they are
    wrong."""
    from benchmarks.flags import JudgeFlags  # here, as --list and --show need no torch
    from rlmt.run import check_values

    flags = tyro.cli(JudgeFlags, args=(args.judge_flags or os.environ.get("JUDGE_FLAGS", "")).split())
    check_values(flags)
    return replace(flags, judge_url=args.judge_url or os.environ.get("JUDGE_URL", ""))


def check_inputs(commands: list[list[str]], args: Args, root: Path) -> None:
    """Exits with 2 if data are missing, or if a judge does not answer its first request: before days of
    training."""
    # imported here, as --list and --show need no torch
    from benchmarks.judge import Judge

    missing = missing_inputs(commands)
    if missing:
        names = ", ".join(missing)
        fail(f"{names}: missing; data/README.md says how data are made, docs/paper.md where checkpoints are")
    judges = set()
    for words in commands:
        if "data.toy.judge" not in words:  # which serves its judge itself
            judges.update(re.findall(r"--judge (\S+)", " ".join(words)))
    judging = judge_flags(args)
    for judge in sorted(judges):
        asked = Judge(replace(judging, judge=judge))
        asked.check()
        asked.try_first(root, [asked.request([QUESTION])])


# --- 4. running


def run_jobs(jobs: list[Job], args: Args, root: Path) -> None:
    """Runs the jobs, each after those that it needs, with logs in root/logs/.

    A failure exits with 1; the same command goes on later.
    """
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    # `python` is the one that runs this
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (root / "logs").mkdir(parents=True, exist_ok=True)
    for n, (block, seed) in enumerate(jobs, 1):
        name = f"{block.name} s{seed}"
        log = root / "logs" / f"{block.name.replace('/', '-')}-s{seed}.log"
        print(f"{time.strftime('%H:%M:%S')} {name} starts, {n} of {len(jobs)}; its log is {log}", flush=True)
        environment = os.environ | variables_of(args, root, seed) | {"PATH": path, "PYTHONUNBUFFERED": "1"}
        with open(log, "a") as file:
            # in a process group of its own, so that bash and what it runs are stopped together
            process = subprocess.Popen(
                block.command, cwd=HERE, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        try:
            code = process.wait()
        finally:  # also on SIGTERM and Ctrl-C
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        if code:
            print(log.read_text(errors="replace")[-3000:])
            sys.exit(f"{name} failed; its log is {log}. The same command goes on from here.")


def stop(number: int, _) -> None:
    """Leaves run_jobs on SIGTERM or Ctrl-C by its `finally`, which ends what is running."""
    print("stopped; the same command goes on from here", file=sys.stderr)
    sys.exit(128 + number)


# --- 5. what was asked for


def list_rows(args: Args, rows: dict[str, dict[str, Block]]) -> None:
    """Prints a line for each row: table, name, and status for each seed."""
    for table, blocks in rows.items():
        if args.table and table not in args.table:
            continue
        for row, block in blocks.items():
            root = args.results / block.folder
            states = [f"s{seed}: {status(root, block, seed)}" for seed in args.seeds]
            print(f"table {table:4} {row:45}", *states)


def wanted_blocks(args: Args, rows: dict[str, dict[str, Block]]) -> list[Block]:
    """Returns the blocks of --table and --row; of whole tables without the rows whose checkpoint is not
    here."""
    in_tables = [block for table in args.table for block in rows[table].values()]
    names = [block.row for block in in_tables]
    for row in args.row:
        if row not in names:
            nearest = difflib.get_close_matches(row, names) or ["those that --list prints"]
            fail(f"--row {row!r}: table {', '.join(args.table)} has {', '.join(nearest)}")
    if args.row:
        in_tables = [block for block in in_tables if block.row in args.row]
    wanted = []
    without_checkpoint = []
    for block in in_tables:
        checkpoint = HERE / "checkpoints" / block.row.removesuffix(tables.AS_RELEASED)
        if block.row.endswith(tables.AS_RELEASED) and not args.row and not checkpoint.exists():
            without_checkpoint.append(block.row)
        else:
            wanted.append(block)
    if without_checkpoint:
        rows = ", ".join(without_checkpoint)
        print(f"left out, as checkpoints/ has no folder for them (docs/paper.md): {rows}")
    if len({block.folder for block in wanted}) != 1:
        fail(
            f"--table {' '.join(args.table)}: no row is left, or their runs have different folders; one at a time"
        )
    return wanted


def show(name: str, blocks: dict[str, Block], args: Args) -> None:
    """Prints the commands of a row, or of a run, for the first seed, after the commands of all that it
    needs."""
    if name not in blocks:
        fail(
            f"--show {name}: no line of experiments/*.sh has this name; --list prints all"
            " (a file counts that has the line . experiments/rows.sh)"
        )
    seed = args.seeds[0]
    variables = variables_of(args, args.results / blocks[name].folder, seed)
    print("export", *[f"{variable}={shlex.quote(value)}" for variable, value in variables.items()])
    for block, _ in dict.fromkeys(jobs_of(blocks[name], seed, blocks, root=None)):
        commands = commands_of(block.command, variables)
        if commands:
            print(f"\n# {block.name}")
        for words in commands:
            print(shlex.join(words))


def main(args: Args) -> None:
    if args.as_released:  # a row has the same names with other values
        args.results = args.results / "as-released"
    blocks = read_blocks()
    rows = table_rows(blocks)
    if not set(args.table) <= set(rows) or (args.run and not args.table):
        fail(f"--table {' '.join(args.table)}: use one or more of {', '.join(rows)}")
    if args.tables:
        if args.table:
            rows = {table: rows[table] for table in args.table}
        for name, text in tables.render(args.results, rows).items():
            print(f"\n{name}\n\n{text}")
    elif args.list:
        list_rows(args, rows)
    elif args.show:
        show(args.show, blocks, args)
    elif args.run:
        if args.templates and not Path(args.templates).is_dir():
            fail(f"--templates {args.templates}: no such folder")
        wanted = wanted_blocks(args, rows)
        root = args.results / wanted[0].folder
        jobs = plan(args, wanted, blocks, root)
        commands = all_commands(jobs, args, root)
        judge_flags(args)
        if args.dry_run:
            print_costs(commands)
            return
        check_inputs(commands, args, root)
        run_jobs(jobs, args, root)
        tables.render(args.results, rows)
    else:
        fail("nothing to do: --list, --show TABLE/ROW, --tables, or --run with --table")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --list | head ends quietly
    refuse_repeated(Args)
    main(tyro.cli(Args))
