"""Presets, the commands of every row, the tables, the plan runner and the sweep."""

import csv
import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import reproduce
import rewards
import runs

ROOT = Path(__file__).parents[1]
SCRIPTS = ("train_sft_warmstart", "train_grpo", "train_ppo", "train_dpo")
TABLES = ("1", "2", "3", "4", "8", "9", "10")

# --- presets


@pytest.mark.parametrize("script", SCRIPTS)
def test_presets_are_arguments_and_every_one_has_a_row(script):
    module = importlib.import_module(script)
    trained, defaults = trained_rows(), module.Args()
    for name, values in module.PRESETS.items():
        args = dataclasses.replace(defaults, **values)
        if name != "toy":
            assert all(getattr(args, k) != getattr(defaults, k) for k in values), f"{name} repeats a default"
            assert name.partition("/")[2] in trained or not name.startswith("table")
    for name, values in module.RELEASED.items():
        paper = dataclasses.replace(module.Args(), **module.PRESETS[name])
        assert all(getattr(paper, k) != v for k, v in values.items() if k != "save_steps"), (
            f"{name}: released as the paper"
        )


def trained_rows() -> set[str]:
    """Rows of all tables, and the SFT runs that they start from."""
    rows = {row for table in TABLES for row in reproduce.rows_of(table)}
    return {name.removesuffix("-s0") for name in reproduce.plan(reproduce.Args(), dict.fromkeys(rows, []))}


@pytest.mark.parametrize("script", SCRIPTS)
def test_both_sides_of_a_pair_differ_in_thinking_alone(script):
    presets, pairs = importlib.import_module(script).PRESETS, 0
    for name, values in presets.items():
        twin = name.replace("-rlmt", "-rlhf").replace("-think", "-plain")
        if twin in presets and twin != name:
            assert presets[twin] == {**values, "think": False}
            pairs += 1
    assert pairs >= 5


@pytest.mark.parametrize(
    "script, source, setting, values",
    [
        (
            "train_sft_warmstart",
            "paper table 5",
            "SFT (warm start)",
            {
                "batch size": "batch_size",
                "epochs": "epochs",
                "learning rate": "learning_rate",
                "warmup ratio": "warmup_ratio",
                "weight decay": "weight_decay",
            },
        ),
        (
            "train_dpo",
            "paper table 6",
            "DPO",
            {
                "responses per prompt": "samples_per_prompt",
                "batch size": "batch_size",
                "epochs": "epochs",
                "DPO beta": "beta",
                "learning rate": "learning_rate",
                "warmup ratio": "warmup_ratio",
                "weight decay": "weight_decay",
            },
        ),
        (
            "train_grpo",
            "paper table 7",
            "PPO / GRPO",
            {
                "batch size (prompts per step)": "prompts_per_step",
                "responses per prompt (GRPO only)": "group_size",
                "max prompt length": "max_prompt_tokens",
                "max response length": "max_completion_tokens",
                "steps": "steps",
                "actor learning rate": "learning_rate",
                "weight decay": "weight_decay",
                "KL coefficient": "beta",
            },
        ),
        (
            "train_ppo",
            "paper table 7",
            "PPO / GRPO",
            {
                "batch size (prompts per step)": "prompts_per_step",
                "max prompt length": "max_prompt_tokens",
                "steps": "steps",
                "max response length": "max_completion_tokens",
                "actor learning rate": "learning_rate",
                "critic learning rate (PPO only)": "critic_learning_rate",
                "weight decay": "weight_decay",
                "KL coefficient": "kl_coef",
            },
        ),
    ],
)
def test_defaults_are_the_papers(script, source, setting, values):
    with open(ROOT / "data/paper/hyperparameters.csv") as f:
        printed = {
            r["parameter"]: r["value"]
            for r in csv.DictReader(f)
            if (r["source"], r["setting"]) == (source, setting)
        }
    args = importlib.import_module(script).Args()
    for parameter, field in values.items():
        assert getattr(args, field) == float(printed[parameter].split()[0]), parameter


def test_released_values_need_a_preset_that_was_released(monkeypatch, capsys):
    module = importlib.import_module("train_grpo")

    def parse(*words):
        monkeypatch.setattr(sys, "argv", ["train_grpo.py", *words])
        return runs.parse_args(module.Args, module.PRESETS, module.RELEASED)

    args = parse("--preset", "table1/qwen2.5-7b-rlhf", "--as-released", "--temperature", "0.5")
    assert (args.prompts_per_step, args.top_p, args.temperature, args.think) == (128, 0.95, 0.5, False)
    assert parse("--preset", "table1/qwen2.5-7b-rlhf").prompts_per_step == 64
    with pytest.raises(SystemExit):
        parse("--preset", "toy", "--as-released")
    assert "nothing was released for preset 'toy'" in capsys.readouterr().err


# --- rows and commands


def test_every_row_of_ours_has_its_commands():
    """All printed rows but those of other people's models; every stage is asked for once, after what it starts from."""
    printed = reproduce.paper_rows()
    others = set(printed[printed.row == ""].training)
    assert others == {
        "none (released instruct model)",
        "closed model",
        "distilled from R1 on math",
        "RL on math (zero)",
        "BLEU reward",
        "checklist reward",
    }
    for table in TABLES:
        rows = reproduce.rows_of(table)
        stages = reproduce.plan(reproduce.Args(seeds=(0, 1)), rows)
        for name, (after, command) in stages.items():
            assert all(list(stages).index(a) < list(stages).index(name) for a in after)
            script = next(w for w in command if w.endswith(".py"))
            fields = {f.name for f in dataclasses.fields(importlib.import_module(script[:-3]).Args)}
            flags = [w[2:].replace("-", "_") for w in command[command.index(script) :] if w.startswith("--")]
            assert set(flags) <= fields and len(set(flags)) == len(flags), (name, flags)
        for row, columns in rows.items():
            assert len([s for s in stages if s.startswith(f"{row}-s1--")]) == len(columns) > 0
            trained = reproduce.NAME.fullmatch(row)["kind"] in ("rlmt", "rlhf", "sft-think", "sft-plain")
            assert (f"{row}-s1" in stages) == trained


def test_a_row_by_hand():
    stages = reproduce.plan(
        reproduce.Args(seeds=(3,), as_released=True), {"llama3.1-8b-rlhf-gpt4.1mini": ["WB", "PopQA"]}
    )
    sft, rl = "llama3.1-8b-sft-plain-gpt4.1mini-s3", "llama3.1-8b-rlhf-gpt4.1mini-s3"
    assert list(stages) == [sft, rl, f"{rl}--wildbench", f"{rl}--popqa"]
    after, command = stages[rl]
    text = " ".join(command)
    assert (
        after == [sft]
        and f"--model results/{sft}/model" in text
        and "--as-released" in text
        and "--seed 3" in text
    )
    assert "train_grpo.py --preset table4/llama3.1-8b-rlhf-gpt4.1mini" in text
    text = " ".join(stages[f"{rl}--wildbench"][1])
    assert (
        "--protocol paper" in text and "--max-tokens 4096" in text and f"--model results/{rl}/model" in text
    )
    zero = reproduce.plan(reproduce.Args(), {"qwen2.5-7b-prompted-think": ["IFEval"]})[
        "qwen2.5-7b-prompted-think-s0--ifeval"
    ]
    assert (
        zero[0] == []
        and "--model Qwen/Qwen2.5-7B" in " ".join(zero[1])
        and "--think-format zero_think" in " ".join(zero[1])
    )


def test_toy_rows_are_of_the_same_grammar():
    stages = reproduce.plan(reproduce.Args(seeds=(0,)), dict.fromkeys(reproduce.TOY_ROWS, []))
    for after, command in stages.values():
        assert command[0] == "python" and (ROOT / command[1]).exists() and set(after) <= set(stages)
    assert len([s for s in stages if s.endswith("--gold")]) == len(reproduce.TOY_ROWS)
    for row in reproduce.TOY_ROWS:
        m = reproduce.NAME.fullmatch(row)
        assert m and (m["variant"] or "-")[1:] in {"", *reproduce.TOY_DATA, *reproduce.TOY_REWARD}


def test_rows_of_other_rewards():
    stages = reproduce.plan(reproduce.Args(seeds=(0,)), reproduce.rows_of("rewards"))
    for name, (after, command) in stages.items():
        script, words = command[1], command[2:]
        if "--" in words:  # beside the toy judge
            script, words = words[2], words[3:]
        fields = {
            f.name for f in dataclasses.fields(importlib.import_module(script[:-3].replace("/", ".")).Args)
        }
        flags = [w[2:].replace("-", "_").removeprefix("no_") for w in words if w.startswith("--")]
        assert set(flags) <= fields and set(after) <= set(stages) and len(set(flags)) == len(flags), name
    assert len([s for s in stages if s.endswith("--gold")]) == len(reproduce.REWARD_ROWS)
    for words in [*reproduce.SUMS.values(), *reproduce.RUBRICS.values()]:
        assert rewards.parse_spec(words.partition(" --")[0].split())
    text = " ".join(stages["toy-rlver-think-ppo-s0"][1])
    assert "--algorithm ppo" in text and "toy-sft-think-users-s0/model" in text and "challenging" not in text
    after, command = stages["toy-rubric-think-judge-s0"]
    assert command[:5] == ["python", "data/toy/judge.py", "--", "python", "train_grpo.py"] and after == [
        "toy-sft-think-s0"
    ]
    assert (
        stages["toy-sft-plain-code-s0"][0] == ["code-base"]
        and "--no-think" in stages["toy-rlvr-plain-code-s0"][1]
    )


def test_what_it_would_run_and_cost(capsys):
    reproduce.main(reproduce.Args(table="1", row="llama3.1-8b-rlmt", dry_run=True))
    text = capsys.readouterr().out
    assert (
        "about 20 H100-hours" in text
        and f"about {8 * 15 / 234 * 120:.0f} H100-hours" in text
        and "9 stages" in text
    )
    assert "policy 15," in text  # 16 bytes x 8.03e9 / 8 GPUs
    assert (
        text.index("data.prepare wildchat-if")
        < text.index("data.make_traces")
        < text.index("train_sft_warmstart.py")
    )
    stages = reproduce.plan(reproduce.Args(seeds=(0, 12)), {"llama3.1-8b-rlmt-tulu3": ["WB"]})
    assert reproduce.data_of(stages) == [
        f"data/{name}.jsonl" for name in ("wildchat_if", "sft_prompts", "traces", "tulu3_random", "wildbench")
    ]
    stages = reproduce.plan(
        reproduce.Args(), {"qwen2.5-7b-released": ["AE2", "AH2", "CWv3", "PopQA", "MMLU_Redux", "ZebraLogic"]}
    )
    assert reproduce.data_of(stages) == [
        f"data/{name}"
        for name in ("alpacaeval2", "arena_hard_v2", "creative_writing", "mmlu_redux", "zebralogic")
    ]
    stages = reproduce.plan(reproduce.Args(), {"llama3.1-8b-sft-think-gpt4.1mini": []})
    assert "data/traces_gpt4.1mini.jsonl" in reproduce.data_of(
        stages
    ) and "data/traces.jsonl" not in reproduce.data_of(stages)
    assert reproduce.data_of(reproduce.plan(reproduce.Args(), dict.fromkeys(reproduce.TOY_ROWS, []))) == []
    for args, message in [
        ({"table": "7"}, "--table '7'"),
        ({"table": "1", "row": "x"}, "--row 'x'"),
        ({}, "nothing to do"),
        ({"traces": "x"}, "--traces needs --out"),
        (
            {"table": "1", "row": "llama3.1-8b-rlmt", "run": True},
            "data/creative_writing, data/mmlu_redux must be made first",
        ),
        ({"table": "1", "row": "llama3.1-8b-rlmt", "run": True, "budget": 9.0}, "--budget needs --price"),
        (
            {"table": "4", "row": "llama3.1-8b-rlmt-armorm", "run": True},
            "cannot be run: the head of its reward model",
        ),
    ]:
        with pytest.raises(SystemExit) as e:
            reproduce.main(reproduce.Args(**args))
        assert e.value.code == 2 and message in capsys.readouterr().err


def test_a_key_is_asked_for_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "data_of", lambda stages: [])
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    judged, gold = {"qwen2.5-7b-instruct-released": ["WB"]}, {"qwen2.5-7b-rlhf-zero": []}

    def passes(rows: dict, **fields) -> bool:
        args = reproduce.Args(results=tmp_path, gold_prompts="p.jsonl", **fields)
        try:
            reproduce.check(reproduce.plan(args, rows), tmp_path, args.judge_url)
        except SystemExit:
            return "set OPENAI_API_KEY" not in capsys.readouterr().err
        return True

    assert not passes(judged) and passes(judged, judge_url="http://localhost:8000/v1")
    assert (
        not passes(gold, gold="judge:gpt-4o")
        and passes(gold, gold="judge:m@http://localhost:1/v1")
        and passes(gold, gold="x.py:f")
    )
    assert passes(dict.fromkeys(reproduce.REWARD_ROWS, []))  # the toy judge brings its own endpoint
    monkeypatch.setenv("OPENAI_API_KEY", "sk-something")
    assert passes(judged)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    make(tmp_path, "qwen2.5-7b-instruct-released-s0--wildbench/summary.json")
    assert passes(judged)  # is done


def test_a_budget_is_that_of_each_judged_evaluation():
    stages = reproduce.plan(reproduce.Args(budget=20, price=(2.5, 10)), {"llama3.1-8b-rlmt": ["WB", "PopQA"]})
    limited = {
        name for name, (_, command) in stages.items() if "--budget 20 --price 2.5 10" in " ".join(command)
    }
    assert limited == {"llama3.1-8b-rlmt-s0--wildbench"}


def test_a_whole_table_leaves_out_what_cannot_be_run(capsys):
    reproduce.main(reproduce.Args(table="4", dry_run=True))
    out = capsys.readouterr().out
    assert (
        "llama3.1-8b-rlhf-armorm cannot be run and is left out" in out
        and "--preset table4/llama3.1-8b-rlhf-armorm" not in out
    )


# --- tables


def write_index(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(runs.INDEX)).to_csv(folder / "runs.csv", index=False)


def test_tables_by_hand(tmp_path):
    common = {"benchmark": "x", "n": 1024, "n_invalid": 0, "temperature": 0.7}
    write_index(
        tmp_path,
        [
            {
                "run": "llama3.1-8b-rlmt-s0--wildbench",
                "metric": "wb_reward",
                "value": 40.0,
                "low": 30,
                "high": 50,
                **common,
            },
            {
                "run": "llama3.1-8b-rlmt-s0--wildbench",
                "metric": "wb_reward",
                "value": 44.0,
                "low": 41,
                "high": 47,
                **common,
            },  # again
            {
                "run": "llama3.1-8b-rlmt-s0--popqa",
                "metric": "accuracy",
                "value": 0.9,
                **common,
            },  # not the paper's rule
            {
                "run": "llama3.1-8b-rlmt-s0--popqa",
                "metric": "accuracy_paper",
                "value": 0.3,
                "low": 0.28,
                "high": 0.32,
                **common,
            },
            {
                "run": "llama3.1-8b-rlmt-s1--popqa",
                "metric": "accuracy_paper",
                "value": 0.34,
                "low": 0.32,
                "high": 0.36,
                **common,
            },
            {
                "run": "llama3.1-8b-rlmt-zero-s0--wildbench",
                "metric": "wb_reward",
                "value": -5.0,
                "low": -9,
                "high": -1,
                **common,
            },
            {"run": "my-own-run", "metric": "wb_reward", "value": 99.0, **common},
        ],
    )
    texts = reproduce.render(reproduce.Args(results=tmp_path))
    table = pd.read_csv(tmp_path / "tables" / "table1.csv").set_index(["row", "benchmark"])
    wb, popqa = table.loc[("llama3.1-8b-rlmt", "WB")], table.loc[("llama3.1-8b-rlmt", "PopQA")]
    assert (wb.ours, wb.low, wb.high, wb.seeds, wb.status) == (44, 41, 47, 1, "measured")
    assert wb.difference == pytest.approx(44 - wb.paper)
    assert popqa.ours == pytest.approx(32) and popqa.seeds == 2
    assert popqa.high - popqa.ours == pytest.approx(
        12.706 * 2, rel=1e-4
    )  # t of one degree; sd of 30 and 34: sqrt(8), / sqrt(2)
    assert table.loc[("llama3.1-8b-rlhf", "WB")].status == "not yet run" and pd.isna(
        table.loc[("llama3.1-8b-rlhf", "WB")].ours
    )
    line = next(x for x in texts["table1"].splitlines() if x.startswith("| llama3.1-8b-rlmt |"))
    assert "44.0 ± 3.0 (" in line and "32.0 ± 25.4 (" in line and line.endswith("partly measured |")
    assert "99" not in texts["table1"].replace("(", " ").split()
    zero = next(x for x in texts["table1"].splitlines() if x.startswith("| llama3.1-8b-rlmt-zero |"))
    assert "-5.0 ± 4.0" in zero
    # tables 9 and 10 print the same model's number again, and other people's models as such
    assert (
        pd.read_csv(tmp_path / "tables" / "table9.csv")
        .query("row == 'llama3.1-8b-rlmt' and benchmark == 'WB'")
        .ours.item()
        == 44
    )
    assert "model of others" in texts["table10"]
    assert len(pd.read_csv(tmp_path / "tables" / "toy.csv")) == len(reproduce.TOY_ROWS) * len(
        reproduce.TOY_COLUMNS
    )
    assert len(pd.read_csv(tmp_path / "tables" / "rewards.csv")) == len(reproduce.REWARD_ROWS) * len(
        reproduce.REWARD_COLUMNS
    )


def test_seeds_that_were_judged_otherwise_have_no_mean(tmp_path, capsys):
    common = {
        "metric": "wb_reward",
        "benchmark": "x",
        "n": 1024,
        "n_invalid": 0,
        "temperature": 0.7,
        "value": 40.0,
        "low": 30,
        "high": 50,
    }
    write_index(
        tmp_path,
        [{"run": f"llama3.1-8b-rlmt-s{s}--wildbench", "fingerprint": f"f{s}", **common} for s in range(2)],
    )
    with pytest.raises(SystemExit):
        reproduce.render(reproduce.Args(results=tmp_path))
    assert "were not judged alike" in capsys.readouterr().err


def test_rows_that_were_judged_otherwise_are_marked(tmp_path, capsys):
    common = {"n": 1024, "n_invalid": 0, "temperature": 0.7, "value": 0.4, "low": 0.3, "high": 0.5}
    write_index(
        tmp_path,
        [
            {
                "run": f"llama3.1-8b-{row}-s0--{name}",
                "benchmark": name,
                "metric": metric,
                "fingerprint": mark,
                **common,
            }
            for name, metric, marks in (("wildbench", "wb_reward", "aab"), ("popqa", "accuracy_paper", "ccc"))
            for row, mark in zip(("rlmt", "rlhf", "sft-think"), marks)
        ],
    )
    write_index(
        tmp_path / "toy",
        [  # sums and programs stand in one column, but are other tasks
            {
                "run": f"toy-rlvr-{row}-s0--gold",
                "benchmark": task,
                "metric": "score",
                "fingerprint": task,
                **common,
                "temperature": 1.0,
            }
            for row, task in (("think", "sums_tasks"), ("plain", "sums_tasks"), ("think-code", "code_tasks"))
        ],
    )
    texts, err = reproduce.render(reproduce.Args(results=tmp_path)), capsys.readouterr().err
    line = "WB: not to be compared, as judge, instructions or tasks differ: llama3.1-8b-sft-think against llama3.1-8b-rlhf, llama3.1-8b-rlmt"
    assert texts["table1"].endswith(f"\n\n{line}") and f"WARNING: table1, {line}\n" in err
    assert (
        "PopQA" not in err
        and "not to be compared" not in texts["rewards"]
        and texts["rewards"].count("0.400") == 3
    )
    assert "fingerprint" not in pd.read_csv(tmp_path / "tables" / "table1.csv").columns


def test_seeds_without_a_headline_are_no_seeds(tmp_path):
    """Too many verdicts of theirs were invalid, so that their value is empty."""
    common = {
        "metric": "wb_reward",
        "benchmark": "x",
        "n": 1024,
        "n_invalid": 0,
        "temperature": 0.7,
        "low": 30,
        "high": 50,
    }
    values = {"llama3.1-8b-rlmt-s0": 40.0, "llama3.1-8b-rlmt-s1": None, "llama3.1-8b-rlhf-s0": None}
    write_index(
        tmp_path,
        [
            {"run": f"{run}--wildbench", "fingerprint": "f", "value": value, **common}
            for run, value in values.items()
        ],
    )
    reproduce.render(reproduce.Args(results=tmp_path))
    table = pd.read_csv(tmp_path / "tables" / "table1.csv").query("benchmark == 'WB'").set_index("row")
    one, none = table.loc["llama3.1-8b-rlmt"], table.loc["llama3.1-8b-rlhf"]
    assert (one.ours, one.low, one.high, one.seeds, one.status) == (40, 30, 50, 1, "measured")
    assert (
        pd.isna(none.ours) and none.seeds == 0 and none.status == "no headline" and pd.isna(none.difference)
    )


def test_status_of_a_run_and_of_a_row_that_trains_nothing(tmp_path):
    for name, files in (
        ("a-s0", 2),
        ("a-s0--wildbench", 0),
        ("b-s0--wildbench", 2),
        ("c-s0--wildbench", 2),
        ("c-s0--popqa", 0),
        ("e-s0", 1),
    ):
        (tmp_path / name).mkdir()
        make(tmp_path / name, *("summary.json", "command.txt")[:files])
    status = {name: reproduce.status(tmp_path, f"{name}-s0") for name in "abcde"}
    assert status == {"a": "done", "b": "done", "c": "interrupted", "d": "not yet run", "e": "figures only"}


def test_released_values_are_asked_for_where_there_are_any(tmp_path):
    args = reproduce.Args(results=tmp_path, as_released=True)
    stages = reproduce.plan(args, {"llama3.1-8b-rlmt": [], "qwen2.5-7b-rlmt-ppo": []})
    assert {name: "--as-released" in command for name, (_, command) in stages.items()} == {
        "llama3.1-8b-sft-think-s0": False,
        "llama3.1-8b-rlmt-s0": True,
        "qwen2.5-7b-sft-think-s0": True,
        "qwen2.5-7b-rlmt-ppo-s0": False,
    }


def test_every_printed_number_is_in_a_table(tmp_path):
    reproduce.render(reproduce.Args(results=tmp_path))
    tables = pd.concat([pd.read_csv(tmp_path / "tables" / f"table{t}.csv") for t in TABLES])
    printed = reproduce.paper_rows()
    assert len(tables) == len(printed) and sorted(tables.paper) == sorted(printed.value.astype(float))
    assert set(tables.status) == {"not yet run", "model of others", "cannot be run"}
    assert set(tables[tables.status == "cannot be run"].row) == {
        "llama3.1-8b-rlmt-armorm",
        "llama3.1-8b-rlhf-armorm",
    }


# --- the runner


def test_the_plan_runs_in_order_and_only_what_is_missing(tmp_path, capsys):
    script = tmp_path / "job.py"
    script.write_text(
        "import pathlib, sys, json\nout = pathlib.Path(sys.argv[1])\nout.mkdir(exist_ok=True)\n"
        "if 'fail' in out.name: sys.exit('broken on purpose')\n"
        "open(out.parent / 'order', 'a').write(out.name + ' ')\n(out / 'summary.json').write_text('{}')\n"
    )
    job = lambda name, after=(): (list(after), ["python", str(script), str(tmp_path / name), "--resume"])
    plan = {"c": job("c", ["a", "b"]), "a": job("a"), "b": job("b", ["a"])}
    runs.run_plan(plan, tmp_path, lanes=2)
    assert (tmp_path / "order").read_text() == "a b c "
    (tmp_path / "c" / "summary.json").unlink()
    runs.run_plan(plan, tmp_path)
    assert (tmp_path / "order").read_text() == "a b c c "
    with pytest.raises(SystemExit) as e:
        runs.run_plan({"fail": job("fail"), "after": job("after", ["fail"])}, tmp_path)
    assert "fail failed" in str(e.value) and not (tmp_path / "after").exists()
    assert "broken on purpose" in capsys.readouterr().out
    once = {
        "data": ([], ["python", str(script), str(tmp_path / "data")])
    }  # cannot resume: its folder is enough
    runs.run_plan(once, tmp_path)
    (tmp_path / "data" / "summary.json").unlink()
    runs.run_plan(once, tmp_path)
    assert (tmp_path / "order").read_text().count("data") == 1


def make(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{}")


def test_what_is_done_must_fit_what_is_to_be_run(tmp_path, capsys):
    """data -> sft -> rl -> its evaluation, in a folder that the commands name."""
    job = lambda name, after, *words: (
        after,
        ["python", "x.py", *words, "--out", str(tmp_path / name), *["--resume"] * (name != "data")],
    )
    plan = {
        "data": job("data", []),
        "sft": job("sft", ["data"], "--traces", str(tmp_path / "data" / "traces.jsonl")),
        "rl": job("rl", ["sft"], "--model", str(tmp_path / "sft" / "model")),
        "rl--gold": job("rl--gold", ["rl"], "--model", str(tmp_path / "rl" / "model")),
    }

    def refused() -> str:
        with pytest.raises(SystemExit) as e:
            runs.finished(plan, tmp_path)
        assert e.value.code == 2
        return (
            capsys.readouterr()
            .err.partition(f"error: in {tmp_path} are ")[2]
            .partition(". Delete these folders")[0]
        )

    bare, stale = "figures without the weights that are needed now", "made from a run to be made anew"

    assert runs.finished(plan, tmp_path) == set()
    make(tmp_path, "sft/summary.json", "rl/summary.json", "rl--gold/summary.json")  # as they are in git
    assert runs.finished(plan, tmp_path) == {
        "sft",
        "rl",
        "rl--gold",
    }  # nothing that reads weights is to be run; data is data
    plan["rl--more"] = job(
        "rl--more", ["rl"], "--model", str(tmp_path / "rl" / "model")
    )  # a new one needs all the weights
    assert refused() == f"{bare}: rl, sft; {stale}: rl--gold"
    make(tmp_path, "rl/model/model.safetensors")
    assert runs.finished(plan, tmp_path) == {"sft", "rl", "rl--gold"}  # sft's own are not needed
    (
        tmp_path / "rl" / "summary.json"
    ).unlink()  # interrupted, or to be made anew: what was measured is of another model
    assert refused() == f"{bare}: sft; {stale}: rl, rl--gold"
    shutil.rmtree(tmp_path / "rl--gold")
    make(tmp_path, "sft/model/model.safetensors")
    assert runs.finished(plan, tmp_path) == {"sft"}
    shutil.rmtree(tmp_path / "sft")
    assert refused() == f"{stale}: rl"
    shutil.rmtree(tmp_path / "rl")
    assert runs.finished(plan, tmp_path) == set()
    make(tmp_path, "data/traces.jsonl")
    assert runs.finished(plan, tmp_path) == {"data"}


def test_figures_that_came_with_git_are_named_and_nothing_more(tmp_path, monkeypatch, capsys):
    row = "toy-prompted-think"
    make(tmp_path, f"toy/{row}-s0--gold/summary.json")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: None)  # the toy data
    reproduce.main(reproduce.Args(table="toy", row=row, run=True, results=tmp_path))
    out = capsys.readouterr().out
    assert f"not run again, 1 of 1: {row}-s0--gold" in out and "--results DIR" in out
    make(tmp_path, f"toy/{row}-s0--gold/command.txt")  # made here
    reproduce.main(reproduce.Args(table="toy", row=row, run=True, results=tmp_path))
    assert "not run again" not in capsys.readouterr().out


def test_a_sweep_takes_no_figures_without_weights(tmp_path, capsys):
    names = ["toy-sft-think-s0", "toy-rlmt-s0"]
    make(tmp_path / "toy", *(f"{name}/summary.json" for name in names))
    (tmp_path / "toy" / "toy-rlmt-s0" / "held_out.jsonl").write_text('{"step": 7, "gold": 0.8}\n')
    args = reproduce.Args(table="toy", row="toy-rlmt", sweep=True, stop_at=7, results=tmp_path)
    with pytest.raises(SystemExit) as e:
        reproduce.main(args)
    assert e.value.code == 2 and "figures without weights" in capsys.readouterr().err
    make(tmp_path / "toy", "toy-rlmt-s0/model/model.safetensors")
    reproduce.main(args)
    assert "1 seeds started, 1 went on" in capsys.readouterr().out


def test_a_run_is_stopped_when_its_step_is_measured(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import json, pathlib, sys, time\nout = pathlib.Path(sys.argv[1])\n(out / 'checkpoint-1').mkdir(parents=True)\n"
        "for step in range(1, 1000):\n    time.sleep(0.3)\n"
        "    with open(out / 'held_out.jsonl', 'a') as f:\n"
        "        f.write(json.dumps({'step': step, 'gold': 0.5}) + '\\n')\n"
    )
    command = ["python", str(script), str(tmp_path / "run")]
    reproduce.train_until(command, tmp_path / "run", 3)
    reached = reproduce.held_out(tmp_path / "run")[-1]["step"]
    assert 3 <= reached < 100
    reproduce.train_until(command, tmp_path / "run", 3)  # is there already
    assert reproduce.held_out(tmp_path / "run")[-1]["step"] == reached
    script.write_text("raise SystemExit(1)")
    with pytest.raises(SystemExit):
        reproduce.train_until(command, tmp_path / "other", 1)


def test_a_sweep_needs_something_to_decide_by(capsys):
    for args in (
        {"row": "llama3.1-8b-rlmt", "table": "1", "stop_at": 20},
        {"row": "toy-rlmt", "table": "toy"},
    ):
        with pytest.raises(SystemExit) as e:
            reproduce.main(reproduce.Args(sweep=True, **args))
        assert e.value.code == 2 and "--stop-at" in capsys.readouterr().err


def test_the_command_line():
    done = subprocess.run(
        [sys.executable, "reproduce.py", "--list"], capture_output=True, text=True, cwd=ROOT
    )
    lines = done.stdout.splitlines()
    assert (
        done.returncode == 0
        and len(lines) > 130
        and all(
            re.search(r"s0: (done|figures only|interrupted|not yet run|cannot be run)$", x) for x in lines
        )
    )
    assert json.dumps(lines).count("llama3.1-8b-rlmt-zero ") >= 2
