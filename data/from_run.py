"""Reads the completions of a run, by prompt, to make prompts or preference pairs of them.

    python -m data.prepare from-run --input results/rlvr --out data/filtered.jsonl
    python -m data.prepare from-run-pairs --input results/rlmt --by gold --margin 0.1 --out data/pairs.jsonl

A run is one of train_grpo.py, train_ppo.py or train_dpo.py, of all its steps, or one of eval_wildbench.py.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from page import read_completions
from rewards.scorer import correctness
from rlmt.data import read_prompts
from utils import fail


def read_groups(run: str, by: str) -> Iterator[tuple[int, dict]]:
    """Yields (number from 1, {id, prompt, completions}) of each prompt, sampled or not.

    `prompt` is its row in the file that the run read, None if the file has it no more. Each completion gets
    `value`, the number named `by`: `correct` is what a verifier of the run says, `gold` also the verdict of
    an evaluation. It is minus infinity if the completion got a floor, or if its status is not ok and it has no
    such number; else None without one.
    """
    config = Path(run) / "config.json"
    if not config.is_file():
        fail(f"--input {run}: no config.json; give the folder of a run")
    args = json.loads(config.read_text())["args"]
    source = args.get("prompts") or args.get("tasks")
    if not source:
        fail(f"--input {run}: it has no prompts; give a run of GRPO, PPO or DPO, or of eval_wildbench.py")
    prompts = {str(row["id"]): row for row in read_prompts(source, f"{config}:")}

    groups = {prompt_id: [] for prompt_id in prompts}
    known = set()
    for file in ("completions.jsonl", "generations.jsonl"):
        for row in read_completions(Path(run), file):
            prompt_id = str(row["id"])
            task_id = prompt_id.rpartition("-")[0]  # --samples numbers the answers to a task
            if prompt_id not in prompts and task_id in prompts:
                prompt_id = task_id
            row.setdefault("gets_floor", False)  # an evaluation has none
            # every number that --by may name: a training run has them in its rewards, an evaluation in its verdicts
            numbers = row["rewards"] | {"reward": row["reward"], "gold": row["gold"]}
            numbers["correct"] = correctness(prompts.get(prompt_id, {}) | row, row["rewards"])
            known |= {name for name, number in numbers.items() if number is not None}
            row["value"] = numbers.get(by)
            is_unscored = row["status"] != "ok" and row["value"] is None
            if row["gets_floor"] or is_unscored:
                row["value"] = -math.inf  # it counts as failed, though a floor may exceed the threshold
            groups.setdefault(prompt_id, []).append(row)
    if by not in known:
        fail(f"--by {by}: no completion of {run} has it; there are {', '.join(sorted(known)) or 'none'}")
    for number, (prompt_id, completions) in enumerate(groups.items(), 1):
        yield number, {"id": prompt_id, "prompt": prompts.get(prompt_id), "completions": completions}
