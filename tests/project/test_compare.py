"""The tables of experiments/demo.sh and small.sh: by hand, and from runs that the scripts themselves wrote."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from script_runs import ROOT, in_this_process

import eval_wildbench
from data.toy import world
from experiments import compare
from rlmt.data import read_log, write_jsonl

N_TASKS = 12


def evaluate(run: Path, tasks: Path, seed: int) -> None:
    """Lets the toy's base model answer, and the toy's reward model score what it wrote."""
    args = eval_wildbench.Args(
        model=str(ROOT / "data/toy/base"),
        tasks=str(tasks),
        judge="data/toy/world.py:judge",
        reward_model=str(ROOT / "data/toy/reward_model"),
        reward_on="response",
        think_format="plain",
        max_tokens=96,
        max_invalid=1.0,
        seed=seed,
        out=str(run),
    )
    with in_this_process():
        eval_wildbench.main(args)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A folder whose runs/ has evaluations of SFT, and of two seeds of GRPO, without thinking."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        write_jsonl(folder / "tasks.jsonl", world.task_rows(N_TASKS, seed=0))
        for seed, name in enumerate(("sft-plain", "grpo-plain-s0", "grpo-plain-s1")):
            evaluate(folder / "runs" / f"eval-{name}", folder / "tasks.jsonl", seed)
    compare.main(compare.Args(folder))
    return folder


def test_the_table_is_what_the_evaluations_measured(results):
    table = pd.read_csv(results / "table.csv").set_index(["row", "benchmark"])
    golds = []
    for seed in (0, 1):
        verdicts = read_log(results / "runs" / f"eval-grpo-plain-s{seed}" / "verdicts.jsonl")
        golds.append(np.mean([verdict["score"] for verdict in verdicts]))
    grpo = table.loc[("grpo-plain", "gold")]
    assert grpo["ours"] == pytest.approx(np.mean(golds), abs=1e-4) and grpo["n"] == N_TASKS
    assert table.loc[("sft-plain", "gold"), "low"] <= table.loc[("sft-plain", "gold"), "ours"]
    difference = table.loc[("grpo-plain − sft-plain", "gold"), "ours"]
    assert difference == pytest.approx(grpo["ours"] - table.loc[("sft-plain", "gold"), "ours"], abs=1e-3)
    assert "grpo-plain" in (results / "table.md").read_text()


def test_a_difference_is_taken_task_by_task_and_what_is_missing_is_never_zero():
    before = pd.DataFrame({"gold": [1.0, np.nan, 3.0], "response tokens": [5.0, 5.0, 5.0]})
    after = pd.DataFrame({"gold": [2.0, 9.0, np.nan], "response tokens": [6.0, 6.0, 6.0]})
    cells = compare.differences({"sft-plain": [before], "grpo-plain": [after]})
    [gold] = [cell for cell in cells if cell["benchmark"] == "gold"]
    assert (gold["ours"], gold["n"]) == (1.0, 1)  # the first task alone has both
    nothing = pd.DataFrame({"gold": [np.nan], "format ok": [0.0]})
    assert [cell["benchmark"] for cell in compare.summarize("row", [nothing])] == ["format ok"]


def test_gold_at_equal_length_is_where_the_line_crosses_zero_tokens():
    """By hand: the line is 0.8 + 0.23 * tokens, the residuals 0.2, -0.1, -0.4, 0.3, their variance 0.30 / (4
    - 2)."""
    golds = pd.Series([1.0, 3.0, 5.0, 8.0])
    lengths = pd.Series([0.0, 10.0, 20.0, 30.0])
    value, error = compare.compare_at_equal_length(golds, lengths)
    assert value == pytest.approx(0.8) and error == pytest.approx(np.sqrt(0.15 * (1 / 4 + 1.5**2 / 5)))
    assert np.isnan(compare.compare_at_equal_length(golds.head(3), lengths.head(3))).all()
    assert np.isnan(compare.compare_at_equal_length(golds, 0 * lengths + 5.0)).all()
