"""Asks tasks in the words of the paper's authors, which are in programs of their repository.

`--template ../RLMT/eval/reason_benchmarks/popqa.py` of eval_benchmarks.py runs the user's copy of such a
program, as far as it makes the prompts; mmlu_redux_cot.py, math_500.py and zebra_logic.py are the others.
"""

import importlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from rlmt.lm_eval_tasks import add_package
from utils import in_one_line

# fields that a program reads and does not show the model
UNSEEN = {"id": 0, "possible_answers": [], "size": "1*1"}


def add_prompts(program: Path, tasks: list[dict]) -> None:
    """Gives each task the field `asked`, the messages that the authors' program makes of it.

    Raises ValueError if it is no such program, or cannot read the tasks.
    """
    try:
        add_package("reason_benchmarks", program.parent)
        importlib.import_module(f"reason_benchmarks.{program.stem}")
        base = importlib.import_module("reason_benchmarks.benchmark_utils").ReasonBenchmark
        benchmark = base._registry[program.stem]
        rows = [json.dumps(UNSEEN | task, default=str) for task in tasks]
        with TemporaryDirectory() as folder:
            data = Path(folder) / "tasks"
            if program.stem == "zebra_logic":
                data.write_text("\n".join(rows))
            else:
                data.write_text(f"[{','.join(rows)}]")
            benchmark._cfg = {"data_file": data, "test_file": data}
            found = benchmark._inner_load()
        for task, row in zip(tasks, found, strict=True):
            asked = row["input_prompt"]
            if isinstance(asked, str):
                asked = [{"role": "user", "content": asked}]
            task["asked"] = asked
    except Exception as error:  # of a program that is not ours
        raise ValueError(
            f"--template {program} makes no prompts of these tasks ({in_one_line(error)}); benchmarks/authors.py names "
            "the files of the authors' repository that do"
        ) from error
