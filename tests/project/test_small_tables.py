"""The table, curves and samples of experiments/small.sh, from files that the scripts themselves wrote."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from script_runs import ROOT, in_this_process

import eval_benchmarks
import eval_wildbench
from rlmt import run as run_folders
import train_grpo
import train_reward
from benchmarks import ifeval
from benchmarks.scoring import add_to_index, for_summary
from experiments import small_samples, small_tables
from rewards import gold
from rewards.preference import RewardModel
from rlmt import data as rlmt_data

GOLD = str(ROOT / "data/toy/reward_model")
BASE = str(ROOT / "data/toy/base")
N_TASKS = 16


def evaluate(run: Path, tasks: Path, proxy: str, seed: int) -> None:
    """Lets the toy's base model answer, as experiments/small.sh does with SmolLM2."""
    args = eval_wildbench.Args(
        model=BASE,
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
    rlmt_data.write_jsonl(run / "data.jsonl", tasks)
    rlmt_data.write_jsonl(run / "rows.jsonl", rows)

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
    rlmt_data.write_jsonl(folder / "tasks.jsonl", tasks)
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
    rows = rlmt_data.read_log(folder / "runs" / f"eval-{name}" / "generations.jsonl")
    good = [row for row in rows if row["status"] == "ok"]
    assert len(good) >= 2
    model = RewardModel(GOLD, "response", "plain")
    scores = model.score([row["messages"] for row in good], [row["response"] for row in good])
    return pd.Series(scores, [row["id"] for row in good])


@pytest.fixture(scope="module")
def table(folder) -> pd.DataFrame:
    small_tables.main(small_tables.Args(results=folder))
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
    assert line["ifeval_se"] == pytest.approx(np.std([1, 0, 0, 0], ddof=1) / 2, abs=1e-4)


def test_seeds_are_averaged_task_by_task_before_two_rows_are_compared(folder, table):
    first = gold_by_hand(folder, "grpo-plain-s0")
    second = gold_by_hand(folder, "grpo-plain-s1")
    mean = pd.concat([first, second], axis=1).mean(axis=1)
    line = table.loc["RLHF: GRPO, no thinking"]
    assert (line["seeds"], line["gold_n"], line["ifeval"]) == (2, len(mean), 0.5)
    assert line["gold"] == pytest.approx(mean.mean(), abs=1e-3)
    assert line["gold_by_seed"] == f"{first.mean():.2f}, {second.mean():.2f}"

    difference = (mean - gold_by_hand(folder, "sft-plain")).dropna()
    line = table.loc["RLHF: GRPO, no thinking − SFT, no thinking"]
    assert line["gold_n"] == len(difference) >= 2
    assert line["gold"] == pytest.approx(difference.mean(), abs=1e-3)
    assert line["gold_se"] == pytest.approx(difference.sem(), abs=1e-3)
    assert line["ifeval"] == 0.25
    assert line["ifeval_se"] == pytest.approx(np.std([0, 0.5, 0.5, 0], ddof=1) / 2, abs=1e-4)


def test_what_is_not_measured_is_missing_and_never_zero(folder, table):
    measured = [*small_tables.COLUMNS]
    unmeasured = [
        row for row in small_tables.ROWS if row not in ("SFT, no thinking", "RLHF: GRPO, no thinking")
    ]
    assert len(unmeasured) == 6
    assert table.loc[unmeasured, [*measured, "gold_by_seed"]].isna().all(axis=None)
    assert np.isnan(table.loc["RLHF: GRPO, no thinking", "ifeval_greedy"])
    assert np.isnan(table.loc["RLMT: GRPO, thinking − RLHF: GRPO, no thinking", "gold"])

    text = (folder / "table.md").read_text()
    dashes = " | –" * (len(measured) - len(small_tables.ONLY_IN_DIFFERENCES))
    assert f"| RLMT: DPO, thinking | 0 | 0{dashes} |" in text
    dashes = " | –" * len(measured)
    line = f"| RLMT: DPO, thinking − SFT, thinking | 0 | 0{dashes} |"
    assert line in (folder / "differences.md").read_text()
    _, _, missing = text.partition("Not finished: ")
    for name in (
        "reward-proxy",
        "reward-gold",
        "eval-instruct",
        "ifeval-grpo-think-s1",
        "ifeval-greedy-rlvr-plain",
    ):
        assert name in missing
    assert "eval-sft-plain" not in missing and "ifeval-greedy-sft-plain" not in missing
    assert not (folder / "curves.csv").exists()


def test_a_seed_that_is_not_measured_is_a_dash(folder, table):
    rows, differences = small_tables.collect(folder / "runs", seeds=(0, 1, 2))
    line = rows.set_index("row").loc["RLHF: GRPO, no thinking"]
    by_seed = f"{table.loc['RLHF: GRPO, no thinking', 'gold_by_seed']}, –"
    assert (line["seeds"], line["gold_by_seed"]) == (2, by_seed)
    assert f"({by_seed})" in small_tables.markdown(rows, is_difference=False)
    assert "nan" not in small_tables.markdown(differences, is_difference=True)


def test_gold_at_equal_length_is_where_the_line_crosses_zero_tokens():
    """By hand: the line is 0.8 + 0.23 * tokens, the residuals 0.2, -0.1, -0.4, 0.3, their variance 0.30 / (4 - 2)."""
    difference = pd.DataFrame(
        {"gold": [1.0, 3.0, 5.0, 8.0, np.nan], "tokens_with_gold": [0.0, 10.0, 20.0, 30.0, 99.0]}
    )
    golds = difference["gold"]
    lengths = difference["tokens_with_gold"]
    line = small_tables.compare_at_equal_length(golds, lengths)
    assert line["gold_at_equal_length"] == pytest.approx(0.8)
    assert line["gold_at_equal_length_se"] == pytest.approx(np.sqrt(0.15 * (1 / 4 + 1.5**2 / 5)))
    assert line["gold_at_equal_length_n"] == 4
    assert small_tables.compare_at_equal_length(golds.head(3), lengths.head(3)) == {}
    assert small_tables.compare_at_equal_length(golds, 0 * lengths + 5.0) == {}


def held_out_of(right: list[bool]) -> dict:
    """Returns what train_reward.py says of pairs of one length, each of a prompt of its own."""
    margins = [1.0 if one else -1.0 for one in right]
    pairs = [train_reward.Pair(str(n), str(n), [1], [2], 100, 99) for n in range(len(right))]
    return train_reward.calibration(margins) | train_reward.compare_with_length(margins, pairs)


def test_gold_counts_by_two_standard_errors(folder, tmp_path):
    for n_right, counts in ((59, False), (61, True)):
        held_out = held_out_of([True] * n_right + [False] * (100 - n_right))
        assert small_tables.verdict_on_gold(held_out).startswith("Gold counts") == counts
    pairs = [train_reward.Pair("a", "a", [1], [2], 10, 100)]
    alone = train_reward.calibration([1.0]) | train_reward.compare_with_length([1.0], pairs)
    assert small_tables.verdict_on_gold(alone).startswith("Gold does not count")
    assert "hardly any pair" in small_tables.describe_reward_model("Gold", alone)

    (tmp_path / "reward-gold").mkdir()
    run_folders.write_summary(tmp_path / "reward-gold", {"held_out": held_out})
    text = small_tables.explain_reward_models(tmp_path)
    assert "Gold: 0.610 of 100 held-out pairs" in text and "0.610 ± 0.049 (1.000 by length)" in text
    assert "Gold counts" in text and "Proxy" not in text


def test_curves_are_those_of_the_held_out_prompts(tmp_path):
    run = tmp_path / "runs" / "grpo-think-s0"
    run.mkdir(parents=True)
    args = train_grpo.Args(**train_grpo.PRESETS["small"])
    (run / "config.json").write_text(json.dumps({"args": dataclasses.asdict(args)}, default=str))
    for step, value in ((10, 0.5), (20, None)):  # None: a judge failed
        rows = []
        for number in range(3):
            rewards = {"gold": value, "preference": float(number)}
            rows.append(
                {"id": str(number), "status": "ok", "rewards": rewards, "n_thinking_tokens": 3, "n_tokens": 9}
            )
        gold.log_held_out(run, step, rows)
    small_tables.main(small_tables.Args(results=tmp_path, seeds=(0,)))
    curves = pd.read_csv(tmp_path / "curves.csv")
    assert list(curves["completions"]) == [10 * args.prompts_per_step * args.group_size, 20 * 4 * 8]
    assert list(curves["proxy"]) == [1.0, 1.0]
    assert curves["gold_ok"][0] == 0.5 and np.isnan(curves["gold_ok"][1])
    assert (tmp_path / "overoptimisation.png").stat().st_size > 5000
    assert "eval-grpo-think-s1" not in (tmp_path / "table.md").read_text()


# --- samples, judge


def test_the_page_of_samples_has_every_answer_of_every_model(reward_models, tmp_path, monkeypatch, exits):
    monkeypatch.setenv("GOLD", GOLD)
    prompts = rlmt_data.read_log(ROOT / "experiments/small_prompts.jsonl")
    assert len({row["id"] for row in prompts}) == 20
    names = ("sft-plain", "grpo-plain-s0")
    first = tmp_path / "runs" / "samples-sft-plain"
    evaluate(first, ROOT / "experiments/small_prompts.jsonl", reward_models["chatml"], 0)
    shutil.copytree(first, tmp_path / "runs" / "samples-grpo-plain-s0")  # the page reads folders alone
    args = small_samples.Args(results=tmp_path, names=names, characters=30)
    small_samples.main(args)

    samples = rlmt_data.read_log(tmp_path / "samples.jsonl")
    assert [(row["id"], row["model"]) for row in samples] == [
        (row["id"], name) for row in prompts for name in names
    ]
    page = (tmp_path / "samples.md").read_text()
    for row in prompts:
        assert page.count(f"### {row['id']}\n\n{row['messages'][0]['content']}\n") == 1
    assert page.count("**sft-plain**") == page.count("**grpo-plain-s0**") == 20
    assert (
        "temperatures [0.7], top_p 1.0, seed 0, max_tokens 128" in page and "cut after 30 characters" in page
    )

    missing = dataclasses.replace(args, names=(*names, "instruct"))
    assert "samples-instruct is not finished" in exits(small_samples.main, missing)


def test_a_quoted_text_cannot_become_markdown():
    text = "# A heading\n```\nx = 1\n\n" + "word " * 40
    lines = small_samples.quote(text, 100).splitlines()
    assert all(line.startswith("    ") for line in lines)
    assert lines[:3] == ["    # A heading", "    ```", "    x = 1"] and lines[-1].endswith("[...]")


def test_the_judge_wants_a_gold_model_before_anything_is_generated(monkeypatch, exits):
    monkeypatch.delenv("GOLD", raising=False)
    judge = str(ROOT / "experiments/small_judge.py:judge")
    assert "GOLD=FOLDER" in exits(run_folders.load_function, judge)
    monkeypatch.setenv("GOLD", "")
    assert "GOLD=FOLDER" in exits(run_folders.load_function, judge)
    monkeypatch.setenv("GOLD", "results/nowhere")
    assert "results/nowhere" in exits(run_folders.load_function, judge)


def test_tables_are_not_written_over_without_runs(tmp_path, exits):
    (tmp_path / "table.md").write_text("measured")
    said = exits(small_tables.main, small_tables.Args(results=tmp_path))
    assert "no folder" in said and (tmp_path / "table.md").read_text() == "measured"
