"""Trains several seeds of one row and stops the poor ones: only the best by held-out gold go to the end.

    python -m dev.sweep --table toy --row toy-rlmt --seeds 0 1 2 3 --stop-at 7 --keep 2 --results DIR

Nothing but the held-out gold at step --stop-at decides. A row of the paper needs it in the environment:
GOLD_FLAGS="--gold judge:MODEL --gold-prompts FILE". Writes <row>--sweep.json next to the run folders: how many
were started, the rule, who went on, and every curve. The best of n seeds does not estimate a seed's mean, and
nothing here prints it as one.
"""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import tyro

import reproduce
from utils import fail

CHECKPOINT_SECONDS = 5  # from the step that is measured to the end of its checkpoint


@dataclass
class Args:
    table: str = "toy"
    """Table of the row, as in reproduce.py."""
    row: str = ""
    """The row whose seeds compete."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    stop_at: int = 0
    """Step of the decision: one at which checkpoints are written."""
    keep: int = 1
    """Seeds that go on."""
    lanes: int = 1
    """Commands at a time, before and after the decision."""
    results: Path = Path("results")
    """Folder of the run folders, as in reproduce.py."""


def held_out(run: Path) -> list[dict]:
    """Reads a run's held_out.jsonl: gold on the held-out prompts, one line a checkpoint."""
    path = run / "held_out.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def gold_at(run: Path, step: int) -> float | None:
    """Returns the held-out gold at the first checkpoint from this step on; None before it."""
    for line in held_out(run):
        if line["step"] >= step:
            return line["gold"]
    return None


def train_until(block: reproduce.Block, seed: int, step: int, args: reproduce.Args, root: Path) -> None:
    """Starts the training of a block, or goes on with it, and stops it once gold is measured at `step`."""
    run = root / f"{block.row}-s{seed}"
    if gold_at(run, step) is not None:
        if not any(run.glob("checkpoint-*")) and not (run / "model").exists():
            fail(
                f"{run} holds figures without weights, as they are in git; --results DIR makes them anew, or "
                "delete it"
            )
        return

    log = reproduce.log_of(reproduce.Job(block.name, seed), root)
    process = reproduce.start(block, reproduce.variables_of(args, root, seed), log)
    try:
        while process.poll() is None and gold_at(run, step) is None:
            time.sleep(1)
        if process.poll() is None:
            time.sleep(CHECKPOINT_SECONDS)  # the checkpoint of this step is being completed
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    gold = gold_at(run, step)
    if gold is None:
        fail(f"{run.name} ended before step {step}; its log is {log}")
    print(f"{run.name}: held-out gold at step {step}: {gold:.4f}", flush=True)


def find_training(row: reproduce.Block, blocks: dict[str, reproduce.Block], stop_at: int) -> reproduce.Block:
    """Returns the block that trains a row.

    Exits with 2 if its training does not measure gold on held-out prompts.
    """
    training = blocks.get(row.row, row)
    measures_gold = "--gold-prompts" in training.settings
    if "$GOLD_FLAGS" in training.text:
        measures_gold = "--gold-prompts" in os.environ.get("GOLD_FLAGS", "")
    if not stop_at or not measures_gold:
        fail("a sweep decides by held-out gold: give --stop-at, and --gold-prompts in GOLD_FLAGS")
    return training


def write_report(args: Args, root: Path, early: dict[str, float], survivors: list[str]) -> None:
    """Writes <row>--sweep.json and prints its figures."""
    best = f"the {args.keep} with the highest gold on the held-out prompts there go on"
    rule = f"all seeds to step {args.stop_at}; {best}"
    summary = {
        "row": args.row,
        "started": len(early),
        "survivors": survivors,
        "rule": rule,
        "gold_at_decision": early,
        "curves": {name: held_out(root / name) for name in early},
    }
    path = root / f"{args.row}--sweep.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")

    golds = early.values()
    final = [held_out(root / name)[-1]["gold"] for name in survivors]
    print(f"{len(early)} seeds started, {len(survivors)} went on: {rule}")
    print(f"gold at step {args.stop_at}: mean of all {fmean(golds):.4f}, best {max(golds):.4f}")
    print(
        f"gold at the end, of those chosen, so not an estimate of a seed's mean: {fmean(final):.4f}; {path}"
    )


def main(args: Args) -> None:
    if not args.row:
        fail("a sweep is over the seeds of one row; name it by --row")
    by_row = reproduce.Args(
        table=args.table, row=args.row, seeds=args.seeds, results=args.results, lanes=args.lanes
    )
    blocks = reproduce.read_blocks()
    wanted = reproduce.wanted_blocks(by_row, reproduce.table_rows(blocks))
    root = args.results / wanted[0].folder
    training = find_training(wanted[0], blocks, args.stop_at)

    # --- 1. what the row's training starts from
    jobs = reproduce.plan(by_row, [training], blocks, root)
    reproduce.check_inputs(jobs, blocks, by_row, root)
    before = [job for job in jobs if job.block != training.name]
    reproduce.run_jobs(before, blocks, by_row, root)

    # --- 2. all seeds to the decision, the best to the end
    early = {}
    for seed in args.seeds:
        train_until(training, seed, args.stop_at, by_row, root)
        name = f"{args.row}-s{seed}"
        early[name] = gold_at(root / name, args.stop_at)
    survivors = sorted(early, key=early.get, reverse=True)[: args.keep]
    to_the_end = [job for job in jobs if f"{args.row}-s{job.seed}" in survivors and job not in before]
    reproduce.run_jobs(to_the_end, blocks, by_row, root)

    # --- 3. report
    write_report(args, root, early, survivors)


if __name__ == "__main__":
    main(tyro.cli(Args))
