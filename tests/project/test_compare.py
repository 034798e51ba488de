"""The tables and curves of experiments/compare.py, from files that the scripts themselves wrote."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from script_runs import BASE, ROOT, run_here
from test_page import write

from benchmarks.scoring import INDEX_COLUMNS, add_to_index, mean_interval
from experiments import compare, tables
from notebooks import style
from rlmt.data import read_log
from rlmt.run import inputs_of

TRAINED = ROOT / "results/toy/toy-rlmt-s0"  # its metrics, and held-out gold


# of a good answer its number of letters, which is no row's reward
JUDGE = """
def judge(messages, response):
    if not response:
        raise ValueError("no response in good format")
    return {"score": sum(map(str.isalpha, response)), "checks": {}}
"""


def evaluate(runs: Path, name: str, proxy: str, seed: int) -> None:
    """Lets the toy's base model answer."""
    (runs / name).mkdir(exist_ok=True)
    (runs / name / "model").symlink_to(ROOT / BASE)
    command = (
        f"eval_wildbench.py --model {runs / name}/model --tasks {runs}/tasks.jsonl --samples 2 "
        f"--judge {runs}/judge.py:judge --reward-model {proxy} --reward-on response --think-format plain "
        f"--max-invalid 1 --seed {seed} --max-tokens 128 --out {runs}/eval-{name}"  # half of the answers end before
    )
    run_here([sys.executable, *command.split()])


def write_line(runs: Path, name: str, benchmark: str, metric: str, judge: str | None, values: list) -> None:
    """Writes what an evaluation leaves of one metric for tables, from the values of its tasks."""
    run = runs / f"{benchmark}-{metric}-{judge}-{name}"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"args": {"top_p": 0.95, "max_tokens": 256}}))
    line = {"model": f"{runs / name}/model", "benchmark": benchmark, "metric": metric, "temperature": 0.7}
    line |= {"value": np.mean(values), "n": len(values), "n_invalid": 0, "judge": judge, "fingerprint": judge}
    add_to_index(run, [line | {"task_means": dict(enumerate(map(float, values)))}])


@pytest.fixture(scope="module")
def runs(reward_models, tmp_path_factory) -> Path:
    """Run folders: SFT, two seeds of RLHF, and what one of these logged in training."""
    runs = tmp_path_factory.mktemp("small") / "runs"
    tasks = []
    for number in range(8):
        content = f"I have {number + 10} dollars. What do you suggest?"
        tasks.append({"id": str(number), "messages": [{"role": "user", "content": content}]})
    write(runs, "tasks.jsonl", tasks)
    shutil.copytree(TRAINED, runs / "grpo-plain-s0")
    (runs / "judge.py").write_text(JUDGE)
    for seed, name in enumerate(("sft-plain", "grpo-plain-s0", "grpo-plain-s1")):
        evaluate(runs, name, reward_models["chatml"], seed)
    write_line(runs, "sft-plain", "ifeval", "prompt_strict", None, [1, 0, 0, 0])
    write_line(runs, "grpo-plain-s0", "ifeval", "prompt_strict", None, [1, 1, 0, 0])
    write_line(runs, "grpo-plain-s1", "ifeval", "prompt_strict", None, [1, 0, 1, 0])
    compare.main(compare.Args((runs.parent,)))
    return runs


@pytest.fixture(scope="module")
def table(runs) -> pd.DataFrame:
    return pd.read_csv(runs.parent / "table.csv").set_index(["row", "benchmark"])


def gold_by_hand(runs: Path, name: str) -> pd.Series:
    """Counts the letters of the answers in good format that a run's generations.jsonl has; returns the mean of each task."""
    rows = read_log(runs / f"eval-{name}" / "generations.jsonl")
    good = [row for row in rows if row["status"] == "ok"]
    assert len(good) >= 2
    scores = [sum(map(str.isalpha, row["response"])) for row in good]
    tasks = [row["id"].partition("-")[0] for row in good]  # two answers: 3-0 and 3-1
    return pd.Series(scores).groupby(tasks, sort=False).mean()


def test_a_row_has_means_over_tasks_and_intervals(runs, table):
    expected = gold_by_hand(runs, "sft-plain")
    gold = table.loc[("sft-plain", "gold")]
    assert (gold.seeds, gold.n) == (1, 16)  # two answers to each of 8 tasks
    assert gold.ours == pytest.approx(expected.mean(), abs=1e-3)
    assert (gold.low, gold.high) == pytest.approx(mean_interval(expected), abs=1e-3)

    summary = json.loads((runs / "eval-sft-plain/summary.json").read_text())
    (numbers,) = summary["temperatures"].values()
    columns = {"proxy": "proxy_reward", "format ok": "format_ok", "response tokens": "response_tokens"}
    for column, key in columns.items():
        assert table.loc[("sft-plain", column), "ours"] == pytest.approx(numbers[key], abs=1e-3)
    assert table.loc[("sft-plain", "ifeval prompt_strict"), "ours"] == 0.25


def test_two_rows_are_compared_task_by_task_and_seed_by_seed(runs, table):
    before = gold_by_hand(runs, "sft-plain")
    golds = [gold_by_hand(runs, f"grpo-plain-s{seed}") for seed in (0, 1)]
    after = pd.concat(golds).groupby(level=0, sort=False).mean()
    tasks = (after - before).dropna()
    gold = table.loc[("grpo-plain − sft-plain", "gold")]
    assert gold.ours == pytest.approx(tasks.mean(), abs=1e-3) and gold.n == len(tasks)
    # SFT has one seed, so an interval over seeds would not cover how it varies
    assert gold.seeds == 1 and (gold.low, gold.high) == pytest.approx(mean_interval(tasks), abs=1e-3)
    # Student's t of one degree of freedom; the standard error of two numbers is half their distance
    row = table.loc[("grpo-plain", "gold")]
    half = 12.706 * abs(golds[0].mean() - golds[1].mean()) / 2
    assert row.seeds == 2 and row.high - row.ours == pytest.approx(half, abs=1e-2)
    assert table.loc[("grpo-plain − sft-plain", "ifeval prompt_strict"), "ours"] == 0.25
    assert "nan" not in (runs.parent / "differences.md").read_text()
    # a share of 4 tasks, of which one could be wrong all the same: Wilson's interval has a width
    text = (runs.parent / "table.md").read_text()
    assert "± 0.000" not in text
    share = table.loc[("sft-plain", "ifeval prompt_strict")]
    assert (share.low, share.high) == pytest.approx((0.0456, 0.6994), abs=1e-4)  # of 1 in 4, by a calculator


def test_a_difference_of_shares_has_newcombes_interval():
    """His example: 56 of 70 and 48 of 80."""
    shares = [pd.Series([1.0] * 56 + [0.0] * 14), pd.Series([1.0] * 48 + [0.0] * 32)]
    assert tables.interval_of_shares(*shares) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_other_benchmarks_and_judges_have_columns_of_their_own(runs, tmp_path):
    for name in ("sft-plain", "grpo-plain-s0", "grpo-plain-s1"):
        for folder in (name, f"eval-{name}"):
            shutil.copytree(runs / folder, tmp_path / folder, symlinks=True)
        for metric, judge in (("wb_score", "one"), ("wb_score", "other"), ("response_tokens", None)):
            write_line(tmp_path, name, "wildbench", metric, judge, [1.0, 2.0])
    shutil.copy(runs / "runs.csv", tmp_path / "old.csv")
    with open(tmp_path / "runs.csv", "a") as file:
        file.writelines((tmp_path / "old.csv").read_text().splitlines(keepends=True)[1:])
    compare.main(compare.Args((tmp_path,)))
    cells = pd.read_csv(tmp_path / "table.csv").set_index(["row", "benchmark"]).index
    assert ("sft-plain", "wildbench wb_score, by other") in cells
    assert ("grpo-plain − sft-plain", "tasks gold") in cells


def test_the_picture_ends_with_the_evaluated_model(runs, tmp_path):
    """A step's completions are sampled before its update, so the log has no point of the trained model. Whether a run
    thinks is read from its config.json: this one's name says nothing."""
    shutil.copytree(TRAINED, tmp_path / "mine")
    (tmp_path / "mine/held_out.jsonl").unlink()
    line = {"row": "mine", "seed": "0", "column": "gold, T=1", "value": 0.125}
    curve = compare.read_curves([tmp_path / "mine"], pd.DataFrame([line]))
    n_steps = len(read_log(TRAINED / "metrics.jsonl"))
    assert curve["completions"].tolist() == [128 * step for step in range(n_steps + 1)]
    assert curve["gold"].iloc[-1] == 0.125 and curve["thinks"].all()


def test_curves_are_those_of_held_out_prompts(runs):
    curves = pd.read_csv(runs.parent / "curves.csv")
    logged = read_log(TRAINED / "held_out.jsonl")
    assert curves["gold"].tolist() == pytest.approx([line["gold"] for line in logged], abs=1e-5)
    assert curves["completions"].tolist() == [line["step"] * 128 for line in logged]
    assert (runs.parent / "curves.png").stat().st_size > 10_000


def test_a_seed_is_not_counted_twice(tmp_path, exits):
    for folder in ("a", "b"):
        write(tmp_path / folder / "x-s0", "config.json", [])
    assert compare.run_folders((tmp_path / "a",)) == [tmp_path / "a/x-s0"]
    assert "are the same seed of a row" in exits(compare.run_folders, (tmp_path / "a", tmp_path / "b"))
    assert "no run folder" in exits(compare.run_folders, (tmp_path / "a/x-s0",))


def test_a_row_is_named_by_the_run_and_another_checkpoint_than_the_last():
    assert style.model_name("results/x-s1/model") == "x-s1"
    assert style.model_name("results/x-s1/best_by_gold") == "x-best_by_gold-s1"
    assert style.model_name("results/x-s1/checkpoint-10/model") == "x-checkpoint-10-s1"
    assert style.model_name("org/name") == "name"


def test_evaluations_are_sorted_into_rows_and_columns(tmp_path):
    """A replaced evaluation has its last lines, cut thinking a row of its own; a program's score alone is gold."""
    (tmp_path / "b").mkdir()
    limits = {"top_p": 1, "max_tokens": 128, "max_thinking_tokens": 64}
    (tmp_path / "b/config.json").write_text(json.dumps({"args": limits}))
    lines = [
        {"run": "a", "time": "10:00", "temperature": 0.0, "judge": "judge.py:f"},
        {"run": "a", "time": "10:01", "temperature": 1.0, "judge": "judge.py:f"},
        {"run": "b", "time": "10:00", "temperature": 1.0, "judge": "gpt-4.1"},
    ]
    index = pd.DataFrame(lines, columns=INDEX_COLUMNS).assign(model="m-s0", benchmark="x", metric="score")
    index.to_csv(tmp_path / "runs.csv", index=False)
    found = compare.read_evaluations((tmp_path,))
    assert found[["row", "column"]].values.tolist() == [["m", "gold"], ["m, 64 of thinking", "x score"]]


def test_an_evaluation_of_weights_that_were_replaced_is_left_out(tmp_path, monkeypatch, capsys):
    """A run that is made anew with --overwrite has new weights under the old name."""
    monkeypatch.chdir(tmp_path)
    weights = Path("results/x/model/model.safetensors")
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"old")
    write_line(Path("results"), "x", "sums", "score", None, [1, 0])
    folder = Path("results/sums-score-None-x")
    config = {"args": {"model": "results/x/model"}, "reads": {"model": inputs_of("results/x/model")}}
    config["args"] |= {"top_p": 1, "max_tokens": 8}
    (folder / "config.json").write_text(json.dumps(config))
    assert len(compare.read_evaluations((Path("results"),))) == 1
    weights.write_bytes(b"new")
    assert compare.read_evaluations((Path("results"),)).empty
    assert f"{folder}: left out, as its model was trained anew" in capsys.readouterr().err


def test_a_seed_whose_value_is_withheld_is_in_no_difference(tmp_path):
    lines = pd.DataFrame(
        {"seed": [0, 1, 2], "folder": tmp_path, "run": "a"}, columns=["seed", *INDEX_COLUMNS]
    )
    lines = lines.assign(folder=tmp_path, sampling="all alike")
    cell = tables.difference(lines.assign(value=[0.5, 0.7, np.nan]), lines.assign(value=[0.3, 0.4, 0.1]))
    # Student's t of one degree of freedom; the standard error of 0.2 and 0.3 is half their distance
    assert (cell["ours"], cell["seeds"]) == (pytest.approx(0.25), 2)
    assert cell["high"] - cell["ours"] == pytest.approx(12.706 * 0.05, abs=1e-3)
    cell = tables.difference(lines.assign(value=[0.5, 0.7, 0.6]), lines.assign(value=[np.nan, 0.4, np.nan]))
    assert (cell["ours"], cell["seeds"]) == (pytest.approx(0.3), 1)
