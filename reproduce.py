"""Runs the rows of the paper's tables, whose commands are in experiments/*.sh, and renders the tables.

    python reproduce.py --list                                         # every row, and what is done
    python reproduce.py --table 1 --row llama3.1-8b-rlmt --dry-run     # its commands and what they need
    python reproduce.py --table 1 --row llama3.1-8b-rlmt --run         # runs what is missing; resumes
    python reproduce.py --table toy --run --lanes 2                    # the same matrix on the toy world
    python reproduce.py --table rewards --run --lanes 2                # other rewards on the toy world
    python reproduce.py --tables                                       # renders all tables: results/tables/
    python reproduce.py --traces results/toy/toy-rlmt-s0 --out page.html # a run's completions, to read

A block of experiments/*.sh begins with `# row: table1/NAME` or, if several rows share it, with
`# stage: NAME`. A line `# needs: NAME ...` names the blocks that come before it. Only these comments are read
of a file: bash expands the commands and runs them. This script sets SEED, RESULTS, JUDGE_FLAGS and
AS_RELEASED, and skips what is finished: its folder has a summary.json. It stops before anything expensive if
data, a key or weights are missing.

A row's name says how its model was made: `released`, `prompted-think` (an instruction only), `sft-think`,
`rlmt` or `rlhf` (without thinking), then `-zero`, `-dpo` or `-ppo`, then what an ablation changes.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

import endpoint
import runs
from experiments import tables

HERE = Path(__file__).parent
EXPERIMENTS = HERE / "experiments"
TABLES = ("1", "2", "3", "4", "8", "9", "10", "toy", "rewards")


@dataclass
class Args:
    table: str = ""
    """1, 2, 3, 4, 8, 9, 10, toy or rewards."""
    row: str = ""
    """One row of the table; empty: all that can be run."""
    # what to do
    list: bool = False
    """Print every row with its status."""
    dry_run: bool = False
    """Print the commands of the row and of what it needs."""
    run: bool = False
    """Run the commands that are not finished; an interrupted one goes on."""
    tables: bool = False
    """Render every table from runs.csv as Markdown and csv."""
    traces: str = ""
    """Run folder whose completions become one page, --out."""
    # how
    seeds: tuple[int, ...] = (0,)
    """Random seeds; each has run folders of its own."""
    as_released: bool = False
    """Train with the values of the paper's released code, where they differ from the paper's."""
    results: Path = Path("results")
    """Folder of the run folders and runs.csv; those of the toy rows are in its folder toy/."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judges; empty: the official one. The key: OPENAI_API_KEY."""
    budget: float = 0.0
    """US dollars that the judge may cost in each evaluation; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by a judge: the dearest one's."""
    lanes: int = 1
    """Commands at a time. A GPU command takes the whole machine."""
    other: str = ""
    """A second run to set beside that of --traces, on the same prompts."""
    out: str = ""
    """Page of --traces."""


# --- 1. blocks of experiments/*.sh


@dataclass
class Block:
    text: str
    """The lines after its header, up to an empty line."""
    settings: str
    """The lines before the first block of its file."""

    @property
    def needs(self) -> list[str]:
        return " ".join(re.findall(r"^# needs: (.*)$", self.text, re.MULTILINE)).split()

    @property
    def notes(self) -> str:
        """The comments that are not needs."""
        return "\n".join(re.findall(r"^# (?!needs: ).*$", self.text, re.MULTILINE))

    @property
    def cannot_run(self) -> bool:
        """True if it has neither a command nor a need; its notes say why."""
        return not self.needs and self.notes == self.text.strip()


def read_blocks() -> dict[str, Block]:
    """Reads the blocks of all files, by name, in the order of the files."""
    blocks = {}
    for path in sorted(EXPERIMENTS.glob("*.sh")):
        text = path.read_text()
        settings = re.split(r"^# (?:row|stage): ", text, maxsplit=1, flags=re.MULTILINE)[0]
        for name, lines in re.findall(r"^# (?:row|stage): (.+)\n((?:.+\n)*)", text, re.MULTILINE):
            blocks[name] = Block(lines, settings)
    return blocks


def table_rows(blocks: dict[str, Block]) -> dict[str, dict[str, Block]]:
    """Sorts the rows by table: {table: {row: its block}}."""
    rows = {table: {} for table in TABLES}
    for name, block in blocks.items():
        table, slash, row = name.partition("/")
        if slash:
            rows[table.removeprefix("table")][row] = block
    return rows


# --- 2. from blocks to stages: commands with a folder each

# bash reads this before a block. If STAGE is empty, nothing runs: the words of every command go to the file
# COMMANDS. Otherwise only the command with exactly the words of STAGE runs, with what its file exports.
HOOK = r"""
set -euo pipefail
stage() {
  if [[ -z $STAGE ]]; then
    printf '%s\0' "$@" $'\n' >> "$COMMANDS"
  elif [[ "$*" == "$STAGE" ]]; then
    command "$@"
  fi
}
python() { stage python "$@"; }
accelerate() { stage accelerate "$@"; }
export -f stage python accelerate
"""


@dataclass
class Stage:
    words: list[str]
    """The command, as bash expanded it."""
    waits_for: set[str]
    """Names of the stages whose files it reads."""
    block: Block
    environment: dict[str, str]

    @property
    def resumes(self) -> bool:
        """False for a preparation: data or a small model, without a run folder, made whenever needed."""
        return "--resume" in self.words

    @property
    def out(self) -> Path:
        return Path(self.words[self.words.index("--out") + 1])


def bash(script: str, environment: dict[str, str], **options) -> subprocess.Popen:
    return subprocess.Popen(["bash", "-c", HOOK + script], cwd=HERE, env=environment, **options)


def expand(script: str, environment: dict[str, str]) -> list[list[str]]:
    """Lists the words of every command of a script, as bash expands them. Nothing runs."""
    with tempfile.TemporaryDirectory() as folder:
        commands = Path(folder) / "commands"
        commands.touch()
        process = bash(script, environment | {"STAGE": "", "COMMANDS": str(commands)})
        if process.wait():
            raise RuntimeError(f"bash cannot read this:\n{script}")
        text = commands.read_text()
    return [command.split("\0")[:-1] for command in text.split("\n\0")[:-1]]


def environment(args: Args, seed: int) -> dict[str, str]:
    """Sets the variables that experiments/*.sh read, and puts this environment's programs first in PATH."""
    programs = str(Path(sys.executable).parent)
    variables = {
        "SEED": str(seed),
        "RESULTS": str(root_of(args, args.table)),
        "PATH": programs + os.pathsep + os.environ["PATH"],
        "PYTHONUNBUFFERED": "1",
    }
    judge_flags = ["--judge-url", args.judge_url] if args.judge_url else []
    if any(args.price):
        judge_flags += ["--budget", str(args.budget), "--price", *map(str, args.price)]
    if judge_flags:
        variables["JUDGE_FLAGS"] = " ".join(judge_flags)
    if args.as_released:
        variables["AS_RELEASED"] = "--as-released"
    return os.environ | variables


def add_block(
    name: str, blocks: dict[str, Block], variables: dict[str, str], stages: dict[str, Stage]
) -> set[str]:
    """Adds the stages of a block to `stages`, after those of the blocks that it needs.

    The name of a stage is that of its run folder; a preparation has none, and goes by its words. Returns all
    preparations that it met: the blocks that need this one wait for them, too.
    """
    block = blocks[name]
    preparations = set()
    for need in block.needs:
        preparations |= add_block(need, blocks, variables, stages)

    root = Path(variables["RESULTS"])
    for words in expand(block.settings + block.text, variables):
        stage = Stage(words, set(preparations), block, variables)
        if stage.resumes:
            read = {folder_name(word, root) for word in words} - {stage.out.name}
            stage.waits_for |= read & stages.keys()
            stages.setdefault(stage.out.name, stage)
        else:
            stages.setdefault(" ".join(words), stage)
            preparations.add(" ".join(words))
    return preparations


def folder_name(word: str, root: Path) -> str:
    """Name of the folder in `root` that a path leads into; "" for other words."""
    path = Path(word)
    if path == root or not path.is_relative_to(root):
        return ""
    return path.relative_to(root).parts[0]


def plan(args: Args, names: list[str], blocks: dict[str, Block]) -> dict[str, Stage]:
    """Lists the stages of the blocks and of what they need, for all seeds, each after those it waits for."""
    stages = {}
    for seed in args.seeds:
        variables = environment(args, seed)
        for name in names:
            add_block(name, blocks, variables, stages)
    return stages


# --- 3. what is done, and what is missing


def root_of(args: Args, table: str) -> Path:
    """Folder of the run folders of a table's rows."""
    if table in ("toy", "rewards"):
        return args.results / "toy"
    return args.results


def status(root: Path, name: str) -> str:
    """Status of a run, or of its evaluations if the row trains nothing.

    "figures only": it came with git, as there is no command.txt; its weights are not here.
    """
    folders = [root / name]
    if not folders[0].exists():
        folders = list(root.glob(f"{name}--*"))
    if not folders:
        return "not yet run"
    if not all((folder / "summary.json").exists() for folder in folders):
        return "interrupted"
    if not all((folder / "command.txt").exists() for folder in folders):
        return "figures only"
    return "done"


def lacks_weights(words: list[str], root: Path, folder: str) -> bool:
    """True if a command reads something in the folder that is neither a file nor a folder with weights."""
    for word in words:
        path = Path(word)
        if folder_name(word, root) == folder and not path.is_file() and not any(path.glob("*.safetensors")):
            return True
    return False


def finished(stages: dict[str, Stage], root: Path) -> set[str]:
    """Names the stages that need not run: those with a summary.json, and preparations that nothing waits for.

    Exits with 2 if results would not fit together: a stage that is to run needs weights that are not here, as
    those of a run in git, or a result was made from a run that is to be made again. Nothing is deleted.
    """
    resumable = {name for name, stage in stages.items() if stage.resumes}
    done = {name for name in resumable if (root / name / "summary.json").exists()}
    again = resumable - done
    while True:
        bare = set()
        for name in again:
            for other in stages[name].waits_for & done:
                if lacks_weights(stages[name].words, root, other):
                    bare.add(other)
        stale = {n for n in resumable if stages[n].waits_for & resumable & again and (root / n).exists()}
        if (bare | stale) <= again:
            break
        again |= bare | stale

    problems = []
    if bare:
        problems.append(f"figures without the weights that are needed now: {', '.join(sorted(bare))}")
    if stale - bare:
        problems.append(f"made from a run to be made anew: {', '.join(sorted(stale - bare))}")
    if problems:
        runs.fail(
            f"in {root} are {'; '.join(problems)}. Delete these folders, or let another one (--results) hold "
            "all that is made anew"
        )
    needed = set().union(*(stages[name].waits_for for name in again))
    return done | (stages.keys() - resumable - needed)


def check(stages: dict[str, Stage], root: Path) -> None:
    """Prints which stages came with git; exits with 2 if a stage to run lacks its data or a judge's key."""
    figures = [name for name in stages if (root / name).exists() and status(root, name) == "figures only"]
    if figures:
        count = f"{len(figures)} of {len(stages)}"
        print(f"made before (figures only, no weights), not run again, {count}: {', '.join(figures)}")
        print("--results DIR makes them anew", flush=True)

    missing, judges = [], []
    for name in stages.keys() - finished(stages, root):
        stage = stages[name]
        words = stage.words
        prepared = not stage.resumes or any(not stages[other].resumes for other in stage.waits_for)
        if not prepared:  # the toy world's data is made on the way
            missing += [word for word in words if word.startswith("data/") and not (HERE / word).exists()]
        if "paper" in words:  # --protocol paper: a judge that the paper names
            judges.append(words[words.index("--judge-url") + 1] if "--judge-url" in words else "")
        judges += [word.partition("@")[2] for word in words if word.startswith("judge:")]
    if missing:
        runs.fail(f"{', '.join(sorted(set(missing)))} must be made first; data/README.md says how")
    if endpoint.OPENAI_URL in map(endpoint.resolve_url, judges) and not endpoint.api_key():
        runs.fail(
            "a judge at the OpenAI API needs a key: set OPENAI_API_KEY, or name an endpoint of your own by "
            "--judge-url"
        )


# --- 4. running


def run_stages(stages: dict[str, Stage], root: Path, lanes: int) -> None:
    """Runs the stages that are not finished, `lanes` at a time, in their order, and says how far each is.

    Each writes a log in root/logs/. A failure stops all, with exit code 1; the same command goes on later.
    """
    (root / "logs").mkdir(parents=True, exist_ok=True)
    done = finished(stages, root)
    running: dict[str, tuple[subprocess.Popen, Path, float]] = {}
    start = last = time.monotonic()
    signal.signal(signal.SIGTERM, stop)
    try:
        while len(done) < len(stages):
            for name, stage in stages.items():
                if name in done or name in running or len(running) == lanes or not stage.waits_for <= done:
                    continue
                log = root / "logs" / (re.sub(r"[^\w.-]+", "-", name) + ".log")
                running[name] = (start_stage(stage, log), log, time.monotonic())

            time.sleep(0.5)
            for name, (process, log, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode:
                    print(log.read_text(errors="replace")[-3000:])
                    sys.exit(f"{name} failed; its log is {log}. The same command goes on from here.")
                done.add(name)
                now = time.monotonic()
                clock = f"[{now - start:4.0f} s] {len(done)}/{len(stages)}"
                print(f"{clock} {name} done in {now - began:.0f} s", flush=True)

            if time.monotonic() - last > 10:
                last = time.monotonic()
                for name, (_, log, _) in running.items():
                    print(f"[{last - start:4.0f} s] {name}: {last_step(log)}", flush=True)
    finally:
        for process, _, _ in running.values():
            os.killpg(process.pid, signal.SIGTERM)
        for process, _, _ in running.values():
            process.wait()


def start_stage(stage: Stage, log: Path) -> subprocess.Popen:
    """Starts one command of a block in a new process group, so that bash and what it runs end together."""
    variables = stage.environment | {"STAGE": " ".join(stage.words)}
    with open(log, "w") as file:
        script = stage.block.settings + stage.block.text
        return bash(script, variables, stdout=file, stderr=file, start_new_session=True)


def stop(*_) -> None:
    """On SIGTERM: leaves run_stages by its `finally`, which ends what is running."""
    sys.exit(143)


def last_step(log: Path) -> str:
    steps = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("step ")]
    return steps[-1] if steps else "starting"


def show(stages: dict[str, Stage], root: Path) -> None:
    """Prints every stage: the notes of its block, its status, its command."""
    block = None
    for name, stage in stages.items():
        print()
        if stage.block is not block and stage.block.notes:
            print(stage.block.notes)
        block = stage.block
        if stage.resumes:
            print(f"# {name}: {status(root, name)}")
        print(shlex.join(stage.words))


# --- 5. what was asked for


def list_rows(args: Args, rows: dict[str, dict[str, Block]]) -> None:
    """Prints one line a row: its table, its name, its status for each seed."""
    for table, blocks in rows.items():
        root = root_of(args, table)
        for row, block in blocks.items():
            states = []
            for seed in args.seeds:
                state = "cannot be run" if block.cannot_run else status(root, f"{row}-s{seed}")
                states.append(f"s{seed}: {state}")
            print(f"table {table:4} {row:45}", *states)


def render(args: Args, rows: dict[str, dict[str, Block]]) -> dict[str, str]:
    """Renders all tables; returns their Markdown."""
    cannot_run = {row for blocks in rows.values() for row, block in blocks.items() if block.cannot_run}
    return tables.render(args.results, rows, cannot_run)


def wanted_blocks(args: Args, rows: dict[str, dict[str, Block]]) -> list[str]:
    """Names of the blocks of --table and --row, without those that cannot be run."""
    if not args.table:
        runs.fail("nothing to do: --list, --tables, --traces RUN, or --table with --dry-run or --run")
    if args.table not in rows:
        runs.fail(f"--table {args.table!r}: use one of {', '.join(TABLES)}")
    in_table = rows[args.table]
    if args.row and args.row not in in_table:
        runs.fail(f"--row {args.row!r}: table {args.table} has {', '.join(in_table)}")
    file = f"table{args.table}" if args.table.isdigit() else args.table
    names = []
    for row in [args.row] if args.row else in_table:
        reason = in_table[row].notes.removeprefix("# ")
        if not in_table[row].cannot_run:
            names.append(f"{file}/{row}")
        elif args.row:
            runs.fail(f"--row {row} cannot be run: {reason}")
        else:
            print(f"{row} cannot be run and is left out: {reason}")
    return names


def main(args: Args) -> None:
    if args.traces:
        import page

        if not args.out:
            runs.fail("--traces needs --out PAGE.html")
        return runs.or_fail(page.page, args.traces, args.out, args.other)

    blocks = read_blocks()
    rows = table_rows(blocks)
    if args.tables:
        for name, text in render(args, rows).items():
            print(f"\n{name}\n\n{text}")
        return
    if args.list:
        list_rows(args, rows)
        return

    if args.budget and not any(args.price):
        runs.fail("--budget needs --price: US dollars for a million tokens read and written")
    names = wanted_blocks(args, rows)
    root = root_of(args, args.table)
    stages = plan(args, names, blocks)
    if not args.run:
        show(stages, root)
        return
    check(stages, root)
    run_stages(stages, root, args.lanes)
    render(args, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
