"""Trains several seeds of one row and stops the poor ones: only the best by held-out gold go to the end.

    python -m dev.sweep --table toy --row toy-rlmt --seeds 0 1 2 3 --stop-at 7 --keep 2 --results DIR

Nothing but the held-out gold at step --stop-at decides. A row of the paper needs it in the environment:
GOLD_FLAGS="--gold judge:MODEL --gold-prompts FILE". Writes <row>--sweep.json beside the run folders: how many
were started, the rule, who went on, and every curve. The best of n seeds does not estimate a seed's mean, and
nothing here prints it as one.
"""

import dataclasses
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

import reproduce
import runs


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


def has_reached(run: Path, step: int) -> bool:
    return any(line["step"] >= step for line in held_out(run))


def gold_at(run: Path, step: int) -> float:
    """Finds the held-out gold at the first checkpoint from this step on."""
    return next(line["gold"] for line in held_out(run) if line["step"] >= step)


def train_until(stage: reproduce.Stage, run: Path, step: int) -> None:
    """Starts a training command, or goes on with it, and stops it once gold is measured at `step`."""
    if has_reached(run, step):
        if not any(run.glob("checkpoint-*")) and not (run / "model").exists():
            runs.fail(
                f"{run} holds figures without weights, as they are in git; --results DIR makes them anew, or "
                "delete it"
            )
        return
    log = run.parent / "logs" / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    process = reproduce.start_stage(stage, log)
    try:
        while process.poll() is None and not has_reached(run, step):
            time.sleep(1)
        if process.poll() is None:
            time.sleep(5)  # the checkpoint of this step is being completed
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    if not has_reached(run, step):
        runs.fail(f"{run.name} ended before step {step}; its log is {log}")
    print(f"{run.name}: held-out gold at step {step}: {gold_at(run, step):.4f}", flush=True)


def main(args: Args) -> None:
    # --- 1. what the row's training starts from
    wanted = reproduce.Args(table=args.table, row=args.row, seeds=args.seeds, results=args.results)
    if not args.row:
        runs.fail("a sweep is over the seeds of one row; name it by --row")
    blocks = reproduce.read_blocks()
    names = reproduce.wanted_blocks(wanted, reproduce.table_rows(blocks))
    stages = reproduce.plan(wanted, names, blocks)
    root = reproduce.root_of(wanted, args.table)
    trained = [f"{args.row}-s{seed}" for seed in args.seeds]
    if not args.stop_at or any("--gold-prompts" not in stages[name].words for name in trained):
        runs.fail("a sweep decides by held-out gold: give --stop-at, and --gold-prompts in GOLD_FLAGS")
    needed = set().union(*(stages[name].waits_for for name in trained))
    before = {name: stage for name, stage in stages.items() if name in needed}
    reproduce.check(before | {name: stages[name] for name in trained}, root)
    reproduce.run_stages(before, root, args.lanes)

    # --- 2. all seeds to the decision, the best to the end
    for name in trained:
        train_until(stages[name], root / name, args.stop_at)
    early = {name: gold_at(root / name, args.stop_at) for name in trained}
    survivors = sorted(trained, key=early.get, reverse=True)[: args.keep]
    to_the_end = {name: dataclasses.replace(stages[name], waits_for=set()) for name in survivors}
    reproduce.run_stages(to_the_end, root, args.lanes)

    # --- 3. report
    best = f"the {args.keep} with the highest gold on the held-out prompts there go on"
    rule = f"all seeds to step {args.stop_at}; {best}"
    summary = {
        "row": args.row,
        "started": len(trained),
        "survivors": survivors,
        "rule": rule,
        "gold_at_decision": early,
        "curves": {name: held_out(root / name) for name in trained},
    }
    path = root / f"{args.row}--sweep.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    golds = list(early.values())
    final = [held_out(root / name)[-1]["gold"] for name in survivors]
    print(f"{len(trained)} seeds started, {len(survivors)} went on: {rule}")
    print(f"gold at step {args.stop_at}: mean of all {sum(golds) / len(golds):.4f}, best {max(golds):.4f}")
    mean = sum(final) / len(final)
    print(f"gold at the end, of those chosen, so not an estimate of a seed's mean: {mean:.4f}; {path}")


if __name__ == "__main__":
    main(tyro.cli(Args))
