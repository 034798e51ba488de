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
import importlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import forkserver, get_context
from pathlib import Path

import huggingface_hub.constants
import tyro

from experiments import compare, tables
from utils import fail, refuse_repeated

HERE = Path(__file__).parent
EXPERIMENTS = HERE / "experiments"


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
    """With --run, stop after its checks: every command's own --dry-run, and the sum of GPU-hours and calls of
    judges."""
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

    def variables(self, root: Path) -> dict[str, str]:
        """Returns the variables that experiments/*.sh read, apart from SEED; `root`: the folder of the runs."""
        variables = {"RESULTS": str(root), "JUDGE": self.judge, "JUDGE_URL": self.judge_url}
        variables["JUDGE_FLAGS"] = self.judge_flags
        if self.templates:
            variables["TEMPLATES"] = str(Path(self.templates).resolve())
        if self.as_released:
            variables["AS_RELEASED"] = tables.AS_RELEASED
        return {name: value for name, value in variables.items() if value}


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
        if run.exists() or not folders:  # a row that trains nothing has evaluations only
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


def plan(wanted: list[Block], seeds: tuple[int, ...], blocks: dict[str, Block], root: Path) -> list[Job]:
    """Lists the jobs of the wanted blocks for all seeds, each once; says so if there are none."""
    jobs = {}
    for seed in seeds:
        for block in wanted:
            if status(root, block, seed) != "done":
                jobs |= dict.fromkeys(jobs_of(block, seed, blocks, root))
    if not jobs:
        print(f"all is done in {root}; --results DIR makes it anew")
    return list(jobs)


def commands_of(command: list[str], variables: dict[str, str]) -> list[str]:
    """Lists the commands that a block, or a call of evaluate.sh, would run: one line each, with its costs as a
    comment."""
    environment = os.environ | variables | {"SHOW": "1"}
    return subprocess.check_output(command, cwd=HERE, env=environment, text=True).splitlines()


def all_commands(jobs: list[Job], variables: dict[str, str]) -> list[str]:
    """Lists the commands of the jobs in their order; those of evaluate.sh in its place."""
    commands = []
    for block, seed in jobs:
        variables_of_seed = variables | {"SEED": str(seed)}
        for command in commands_of(block.command, variables_of_seed):
            if "experiments/evaluate.sh" in command:
                commands += commands_of(shlex.split(command), variables_of_seed)
            else:
                commands.append(command)
    return commands


# --- 4. checking


def print_costs(commands: list[str]) -> None:
    """Prints the sums of what the commands cost: GPU-hours, and calls of each judge."""
    costs = Counter()
    for command in commands:
        for amount, unit in re.findall(r" # (\d+) (.*)$", command):
            costs[unit] += int(amount)
    for unit, amount in costs.items():
        print(f"{amount} {unit}")


def check(commands: list[str]) -> None:
    """Runs the --dry-run of every script that trains or evaluates, and prints a line for each that does not pass.
    Exits with 2 if something is wrong.

    The model at the head of a chain stands for those that do not exist yet. What an earlier command makes, and
    what only the hub has where it cannot be reached, is not wrong. Each runs as one process without a GPU, so
    neither the memory nor the number of processes is checked.
    """
    heads = {}  # folder of a run's model: the model from which its chain starts
    made = []  # files and folders of earlier commands
    tried = []  # words of a command, and what is made before it
    for command in commands:
        words = shlex.split(command, comments=True)
        flags = dict(zip(words, words[1:]))
        script = script_of(words)
        if script:
            model = flags.get("--model") or default_model(script, flags.get("--preset", ""))
            head = heads.get(model, model)
            heads[f"{flags.get('--out')}/model"] = head
            if head != model and not (HERE / model).exists():
                words += ["--model", head]
                if script.startswith("eval_"):  # a base model may have no chat template
                    words += ["--think-format", "zero_think"]
            tried.append((words, tuple(made)))
        if words[:2] == ["python", "-m"]:  # it writes next to itself, unless --out says where
            made.append(words[2].rpartition(".")[0].replace(".", "/"))
        made += [value for flag, value in flags.items() if flag.endswith("-out")]

    start_server()
    n_wrong = 0
    with ThreadPoolExecutor(4) as pool:
        for (words, _), problem in zip(tried, pool.map(lambda trial: dry_run(*trial), tried)):
            n_wrong += problem.startswith("wrong")
            if problem:
                print(f"{words[words.index('--out') + 1]}: {problem}", flush=True)
    if n_wrong:
        fail(f"{n_wrong} of {len(tried)} commands are wrong; --show prints them")
    print(f"no mistake was found in {len(tried)} commands")


def script_of(words: list[str]) -> str:
    """Returns the script of a command that trains or evaluates, or ""."""
    return next((word for word in words if re.fullmatch(r"(train|eval)_\w+[.]py", word)), "")


def default_model(script: str, preset: str) -> str:
    """Returns the model of a script without --model, or ""."""
    with contextlib.suppress(ImportError, AttributeError):  # an evaluation has none
        module = importlib.import_module(script.removesuffix(".py"))
        return module.PRESETS.get(preset, {}).get("model", module.Args.model)
    return ""


def start_server() -> None:
    """Starts the process from which dry runs are forked. It has the libraries, which take ten seconds to import,
    and no GPU; without the hub, nothing waits for it."""
    before = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=5)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
    forkserver.set_forkserver_preload(["reproduce", *(path.stem for path in HERE.glob("*_*.py"))])
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)


def dry_run(words: list[str], made: tuple[str, ...]) -> str:
    """Returns what the dry run of a command says is wrong, or what it could not check; "" if it passes."""
    with tempfile.NamedTemporaryFile("r") as log:
        process = get_context("forkserver").Process(target=run_script, args=(words, log.name))
        process.start()
        process.join()
        text = log.read().strip()
    if not process.exitcode:
        return ""
    error = text.rpartition("error: ")[2]  # or all of it
    for name in re.findall(r"[\w.-]*(?:/[\w.-]+)+", error):
        if (HERE / name).exists():
            continue
        if name.startswith(made):
            return f"not checked before {name} is made"
        if re.search("[Cc]ouldn't (connect to|reach) ", text) and not (HERE / name).parent.exists():
            return f"not checked without the hub, which has {name}"
    return f"wrong: {error or process.exitcode}"


def run_script(words: list[str], log: str) -> None:
    """Runs the script of a command with --dry-run in this process; its errors go to the file `log`."""
    os.chdir(HERE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.dup2(os.open(log, os.O_WRONLY), sys.stderr.fileno())
    script = script_of(words)
    start = words.index(script)
    if "--" in words[:start]:  # a server, such as data.toy.judge, and its command
        sys.exit(subprocess.call([*words, "--dry-run"]))
    sys.argv = [*words[start:], "--dry-run"]
    runpy.run_path(script, run_name="__main__")


# --- 4. running


def run_jobs(jobs: list[Job], variables: dict[str, str], root: Path) -> None:
    """Runs the jobs, each after those that it needs, with logs in root/logs/.

    A failure exits with 1; the same command continues later.
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
        environment = os.environ | variables | {"SEED": str(seed), "PATH": path, "PYTHONUNBUFFERED": "1"}
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
            sys.exit(f"{name} failed; its log is {log}. The same command continues from here.")


def stop(number: int, _) -> None:
    """Leaves run_jobs on SIGTERM or Ctrl-C by its `finally`, which ends what is running."""
    print("stopped; the same command continues from here", file=sys.stderr)
    sys.exit(128 + number)


# --- 5. what was asked for


def render(results: Path, rows: dict[str, dict[str, Block]]) -> dict[str, str]:
    """Writes every table that has numbers into results/tables/; returns the Markdown by table.

    A table that the paper prints has the paper's rows and columns, any other one those that are measured.
    """
    folder = results / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    printed = set(tables.printed_numbers()["table"])
    for table, blocks in rows.items():
        root = results / next(iter(blocks.values())).folder
        if table in printed:
            name = f"table{table}"
            numbers = tables.build_table(table, list(blocks), tables.read_index(root))
            markdown = tables.paper_markdown(numbers)
        else:
            name = table
            numbers = compare.cells_of(compare.read_evaluations((root,), list(blocks)))
            markdown = compare.write_rows(numbers)
        if len(numbers):
            numbers[tables.NUMBERS].round(4).to_csv(folder / f"{name}.csv", index=False)
            texts[name] = tables.write_page(folder / f"{name}.md", markdown, *tables.notes_of(numbers))
    return texts


def list_rows(rows: dict[str, dict[str, Block]], seeds: tuple[int, ...], results: Path) -> None:
    """Prints a line for each row: table, name, and status for each seed."""
    for table, blocks in rows.items():
        for row, block in blocks.items():
            states = [f"s{seed}: {status(results / block.folder, block, seed)}" for seed in seeds]
            print(f"table {table:4} {row:45}", *states)


def wanted_blocks(blocks: list[Block], names: tuple[str, ...]) -> list[Block]:
    """Returns the blocks of these names, or all; without those whose checkpoint is not here."""
    known = [block.row for block in blocks]
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known) or ["those that --list prints"]
            fail(f"--row {name!r}: the tables have {', '.join(nearest)}")
    if names:
        blocks = [block for block in blocks if block.row in names]
    wanted = []
    left_out = []
    for block in blocks:
        checkpoint = HERE / "checkpoints" / block.row.removesuffix(tables.AS_RELEASED)
        if block.row.endswith(tables.AS_RELEASED) and not checkpoint.exists():
            left_out.append(block.row)
        else:
            wanted.append(block)
    if left_out:
        print(f"left out, because checkpoints/ has no folder for them (docs/paper.md): {', '.join(left_out)}")
    if len({block.folder for block in wanted}) != 1:
        fail("no row is left, or their runs have different folders; name one --table at a time")
    return wanted


def show(block: Block, blocks: dict[str, Block], seed: int, variables: dict[str, str]) -> None:
    """Prints the commands of a row, or of a run, after those of all that it needs."""
    variables = {"SEED": str(seed)} | variables
    print("export", *[f"{variable}={shlex.quote(value)}" for variable, value in variables.items()])
    for needed, _ in dict.fromkeys(jobs_of(block, seed, blocks, root=None)):
        commands = commands_of(needed.command, variables)
        if commands:
            print(f"\n# {needed.name}")
        for command in commands:
            print(shlex.join(shlex.split(command, comments=True)))


def main(args: Args) -> None:
    if args.as_released:  # a row has the same names with other values
        args.results = args.results / "as-released"
    blocks = read_blocks()
    rows = table_rows(blocks)
    if not set(args.table) <= set(rows) or (args.run and not args.table):
        fail(f"--table {' '.join(args.table)}: use one or more of {', '.join(rows)}")
    asked = {table: rows[table] for table in args.table or rows}
    if args.tables:
        for name, text in render(args.results, asked).items():
            print(f"\n{name}\n\n{text}")
    elif args.list:
        list_rows(asked, args.seeds, args.results)
    elif args.show:
        if args.show not in blocks:
            fail(
                f"--show {args.show}: no line of experiments/*.sh has this name; --list prints all"
                " (a file counts that has the line . experiments/rows.sh)"
            )
        block = blocks[args.show]
        show(block, blocks, args.seeds[0], args.variables(args.results / block.folder))
    elif args.run:
        if args.templates and not Path(args.templates).is_dir():
            fail(f"--templates {args.templates}: no such folder")
        wanted = wanted_blocks([block for table in asked.values() for block in table.values()], args.row)
        root = args.results / wanted[0].folder
        variables = args.variables(root)
        jobs = plan(wanted, args.seeds, blocks, root)
        commands = all_commands(jobs, variables)
        print_costs(commands)
        if commands:
            check(commands)
        if not args.dry_run:
            run_jobs(jobs, variables, root)
            render(args.results, rows)
    else:
        fail("nothing to do: --list, --show TABLE/ROW, --tables, or --run with --table")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --list | head ends quietly
    refuse_repeated(Args)
    main(tyro.cli(Args))
