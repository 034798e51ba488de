"""The tables and curves of experiments/small.sh, from files that the scripts themselves wrote."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from script_runs import ROOT, in_this_process

import eval_benchmarks
import eval_wildbench
from rlmt import run as run_folders
from benchmarks import ifeval
from benchmarks.scoring import add_to_index, for_summary
from experiments import compare
from rewards.preference import RewardModel
from rlmt.data import read_log, write_jsonl

GOLD = str(ROOT / "data/toy/reward_model")
N_TASKS = 16


def evaluate(run: Path, tasks: Path, proxy: str, seed: int) -> None:
    """Lets the toy's base model answer, as experiments/small.sh does with SmolLM2."""
    args = eval_wildbench.Args(
        model=str(ROOT / "data/toy/base"),
        tasks=str(tasks),
        judge="experiments/small_judge.py:judge",
        reward_model=proxy,
        reward_on="response",
        think_format="plain",
        max_tokens=128,  # about half of the answers end before
        max_invalid=1.0,
        seed=seed,
        out=str(run),
    )
    with in_this_process():
        eval_wildbench.main(args)


def write_ifeval(run: Path, met: list[bool]) -> None:
    """Writes what eval_benchmarks.py writes of IFEval, with a checker that needs none of nltk's data."""
    run.mkdir()
    tasks = []
    rows = []
    for key, is_met in enumerate(met):
        tasks.append({"key": key, "prompt": "?", "instruction_id_list": ["yes"], "kwargs": [{}]})
        status = "ok" if is_met else "truncated"
        rows.append({"key": key, "response": "yes" if is_met else "no", "status": status})
    write_jsonl(run / "data.jsonl", tasks)
    write_jsonl(run / "rows.jsonl", rows)

    def check(task: dict, response: str) -> dict:
        return {rule: [response == "yes"] for rule in ifeval.RULES}

    numbers = ifeval.score(rows, run / "data.jsonl", "rows", check)
    run_folders.write_summary(run, for_summary(numbers))
    add_to_index(run, eval_benchmarks.index_rows(eval_benchmarks.Args(name="ifeval"), numbers, "hash"))


@pytest.fixture(scope="module")
def folder(reward_models, tmp_path_factory) -> Path:
    """Results of which SFT and RLHF without thinking are evaluated, and nothing else."""
    folder = tmp_path_factory.mktemp("small")
    runs = folder / "runs"
    runs.mkdir()
    tasks = []
    for number in range(N_TASKS):
        content = f"I have {number + 10} dollars. What do you suggest?"
        tasks.append({"id": str(number), "messages": [{"role": "user", "content": content}]})
    write_jsonl(folder / "tasks.jsonl", tasks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOLD", GOLD)
        for seed, name in enumerate(("sft-plain", "grpo-plain-s0", "grpo-plain-s1")):
            evaluate(runs / f"eval-{name}", folder / "tasks.jsonl", reward_models["chatml"], seed)
    write_ifeval(runs / "ifeval-sft-plain", [True, False, False, False])
    write_ifeval(runs / "ifeval-grpo-plain-s0", [True, True, False, False])
    write_ifeval(runs / "ifeval-grpo-plain-s1", [True, False, True, False])
    write_ifeval(runs / "ifeval-greedy-sft-plain", [False, False, False, True])
    return folder


def gold_by_hand(folder: Path, name: str) -> pd.Series:
    """Scores the answers in good format that a run's generations.jsonl has."""
    rows = read_log(folder / "runs" / f"eval-{name}" / "generations.jsonl")
    good = [row for row in rows if row["status"] == "ok"]
    assert len(good) >= 2
    model = RewardModel(GOLD, "response", "plain")
    scores = model.score([row["messages"] for row in good], [row["response"] for row in good])
    return pd.Series(scores, [row["id"] for row in good])


@pytest.fixture(scope="module")
def table(folder) -> pd.DataFrame:
    compare.main(compare.Args("small", folder, seeds=(0, 1, 2)))
    return pd.read_csv(folder / "table.csv").set_index("row")


def test_a_row_has_means_over_tasks_and_their_errors(folder, table):
    line = table.loc["SFT, no thinking"]
    expected = gold_by_hand(folder, "sft-plain")
    assert (line["seeds"], line["gold_n"]) == (1, len(expected))
    assert line["gold"] == pytest.approx(expected.mean(), abs=1e-3)
    assert line["gold_se"] == pytest.approx(expected.sem(), abs=1e-3)
    assert line["format_ok"] == pytest.approx(len(expected) / N_TASKS, abs=1e-3)

    summary = json.loads((folder / "runs/eval-sft-plain/summary.json").read_text())
    (numbers,) = summary["temperatures"].values()
    for column, key in (("proxy", "proxy_reward"), ("gold", "score"), ("response_tokens", "response_tokens")):
        assert line[column] == pytest.approx(numbers[key], abs=1e-3)

    assert (line["ifeval"], line["ifeval_n"], line["ifeval_greedy"]) == (0.25, 4, 0.25)
    assert (line["ifeval_cut_off"], line["ifeval_greedy_cut_off"]) == (0.75, 0.75)


def test_seeds_are_averaged_task_by_task_before_two_rows_are_compared(folder, table):
    first = gold_by_hand(folder, "grpo-plain-s0")
    second = gold_by_hand(folder, "grpo-plain-s1")
    mean = pd.concat([first, second], axis=1).mean(axis=1)
    line = table.loc["RLHF: GRPO, no thinking"]
    assert (line["seeds"], line["gold_n"], line["ifeval"]) == (2, len(mean), 0.5)
    assert line["gold"] == pytest.approx(mean.mean(), abs=1e-3)
    assert line["gold_by_seed"] == f"{first.mean():.2f}, {second.mean():.2f}, –"  # the third has not run

    difference = (mean - gold_by_hand(folder, "sft-plain")).dropna()
    line = table.loc["RLHF: GRPO, no thinking − SFT, no thinking"]
    assert line["gold_n"] == len(difference) >= 2
    assert line["gold"] == pytest.approx(difference.mean(), abs=1e-3)
    assert line["gold_se"] == pytest.approx(difference.sem(), abs=1e-3)
    assert line["ifeval"] == 0.25
    assert line["ifeval_se"] == pytest.approx(np.std([0, 0.5, 0.5, 0], ddof=1) / 2, abs=1e-4)


def test_what_is_not_measured_is_missing_and_never_zero(folder, table):
    measured = [*compare.COLUMNS]
    unmeasured = [row for row in compare.SMALL if row not in ("SFT, no thinking", "RLHF: GRPO, no thinking")]
    assert len(unmeasured) == 6
    assert table.loc[unmeasured, [*measured, "gold_by_seed"]].isna().all(axis=None)
    assert np.isnan(table.loc["RLHF: GRPO, no thinking", "ifeval_greedy"])
    assert np.isnan(table.loc["RLMT: GRPO, thinking − RLHF: GRPO, no thinking", "gold"])

    dashes = " | –" * len(measured)
    text = (folder / "differences.md").read_text()
    assert f"| RLMT: DPO, thinking − SFT, thinking | 0 | 0{dashes} |" in text and "nan" not in text
    assert not (folder / "curves.csv").exists()


def test_gold_at_equal_length_is_where_the_line_crosses_zero_tokens():
    """By hand: the line is 0.8 + 0.23 * tokens, the residuals 0.2, -0.1, -0.4, 0.3, their variance 0.30 / (4
    - 2)."""
    golds = pd.Series([1.0, 3.0, 5.0, 8.0, np.nan])
    lengths = pd.Series([0.0, 10.0, 20.0, 30.0, 99.0])
    line = compare.compare_at_equal_length(golds, lengths)
    assert line["gold_at_equal_length"] == pytest.approx(0.8)
    assert line["gold_at_equal_length_se"] == pytest.approx(np.sqrt(0.15 * (1 / 4 + 1.5**2 / 5)))
    assert line["gold_at_equal_length_n"] == 4
    assert compare.compare_at_equal_length(golds.head(3), lengths.head(3)) == {}
    assert compare.compare_at_equal_length(golds, 0 * lengths + 5.0) == {}
