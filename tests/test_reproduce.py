"""Presets, the commands of experiments/*.sh, the runner, the tables, the demo's table and the sweep."""

import csv
import dataclasses
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import pytest
import tyro

import reproduce
import rewards
import runs
from dev import sweep
from experiments import demo_tables, tables

ROOT = Path(__file__).parents[1]
SCRIPTS = ("train_sft_warmstart", "train_grpo", "train_ppo", "train_dpo")
PAPER_TABLES = ("1", "2", "3", "4", "8", "9", "10")
BLOCKS = reproduce.read_blocks()
ROWS = reproduce.table_rows(BLOCKS)
FLAGS = {
    "SEED": "0",
    "RESULTS": "results",
    "LANES": "1",
    "JUDGE_FLAGS": "--judge-url http://localhost:1/v1 --budget 20 --price 2.5 10",
    "AS_RELEASED": "--as-released",
    "GOLD_FLAGS": "--gold judge:m@http://localhost:1/v1 --gold-prompts p.jsonl",
}


@functools.cache
def commands_of(file: str) -> list[list[str]]:
    """Every command of a file of experiments/, as bash expands the whole file, with every variable set."""
    text = (ROOT / "experiments" / file).read_text()
    if file != "demo.sh":
        return reproduce.expand(text, os.environ | FLAGS)
    with tempfile.TemporaryDirectory() as folder:  # it makes a folder for its logs
        return reproduce.expand(text, os.environ | FLAGS | {"RESULTS": f"{folder}/results"})


def every_command() -> list[list[str]]:
    files = [path.name for path in sorted((ROOT / "experiments").glob("*.sh")) if path.name != "evaluate.sh"]
    return [words for file in files for words in commands_of(file)]


# --- presets


@pytest.mark.parametrize("script", SCRIPTS)
def test_presets_are_arguments_and_every_one_has_a_command(script):
    module = importlib.import_module(script)
    used = {words[words.index("--preset") + 1] for words in every_command() if "--preset" in words}
    defaults = module.Args()
    for name, values in module.PRESETS.items():
        args = dataclasses.replace(defaults, **values)
        if name != "toy":
            assert all(getattr(args, k) != getattr(defaults, k) for k in values), f"{name} repeats a default"
            assert name in used or not name.startswith("table") or "armorm" in name
    for name, values in module.RELEASED.items():
        paper = dataclasses.replace(module.Args(), **module.PRESETS[name])
        assert all(getattr(paper, k) != v for k, v in values.items() if k != "save_steps"), (
            f"{name}: released as the paper"
        )


@pytest.mark.parametrize("script", SCRIPTS)
def test_both_sides_of_a_pair_differ_in_thinking_alone(script):
    presets, pairs = importlib.import_module(script).PRESETS, 0
    for name, values in presets.items():
        twin = name.replace("-rlmt", "-rlhf").replace("-think", "-plain")
        if twin in presets and twin != name:
            plain = values.get("think_format", "think").replace("think", "plain")  # or of a Zero format
            assert presets[twin] == {**values, "think_format": plain}
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
    assert (args.prompts_per_step, args.top_p, args.temperature, args.think_format) == (
        *(128, 0.95, 0.5),
        "plain",
    )
    assert parse("--preset", "table1/qwen2.5-7b-rlhf").prompts_per_step == 64
    with pytest.raises(SystemExit):
        parse("--preset", "toy", "--as-released")
    assert "nothing was released for preset 'toy'" in capsys.readouterr().err


# --- experiments/*.sh

TOY = """toy-prompted-think toy-prompted-plain toy-sft-think toy-sft-plain toy-rlmt toy-rlhf toy-rlmt-dpo toy-rlhf-dpo
toy-rlmt-ppo toy-rlhf-ppo toy-rlmt-zero toy-rlhf-zero toy-rlmt-small-budgets toy-rlmt-large-budgets toy-sft-think-careful
toy-sft-plain-careful toy-rlmt-careful toy-rlhf-careful toy-rlmt-medium-rm toy-rlhf-medium-rm toy-rlmt-weak-rm
toy-rlhf-weak-rm"""
REWARDS = """toy-sft-think-sums toy-sft-plain-sums toy-rlvr-think toy-rlvr-plain toy-rlvr-think-format toy-rlvr-think-shaped
toy-rlvr-think-majority toy-rlvr-think-certainty toy-rlvr-think-process toy-rlvr-think-prime toy-rlvr-think-ppo
toy-rlvr-think-ppo-process toy-sft-think-code toy-sft-plain-code toy-rlvr-think-code toy-rlvr-plain-code toy-sft-think
toy-rlmt toy-rubric-think toy-rubric-think-judge toy-sft-think-users toy-sft-plain-users toy-rlver-think toy-rlver-plain
toy-rlver-think-ppo toy-rlver-think-turns toy-rlver-think-ppo-turns toy-rlver-think-challenging
toy-rlver-plain-challenging"""
ARMORM = {"llama3.1-8b-rlhf-armorm", "llama3.1-8b-rlmt-armorm"}


def test_the_list_has_every_row_one_a_line(tmp_path, capsys):
    reproduce.main(reproduce.Args(list=True, results=tmp_path))
    listed = {table: [] for table in reproduce.TABLES}
    for line in capsys.readouterr().out.splitlines():
        _, table, row, state = line.split(maxsplit=3)
        listed[table].append(row)
        assert re.fullmatch(r"s0: (done|figures only|interrupted|not yet run|cannot be run)", state)
        assert (state == "s0: cannot be run") == (row in ARMORM)
    assert listed.pop("toy") == TOY.split() and listed.pop("rewards") == REWARDS.split()

    printed = tables.printed_numbers()
    ours = printed[printed["row"] != ""]
    for table, rows in listed.items():
        assert rows == list(ours[ours["table"] == table]["row"].unique())
    assert [len(rows) for rows in listed.values()] == [26, 1, 38, 11, 34, 6, 4]
    assert set(printed[printed["row"] == ""]["training"]) == {
        "none (released instruct model)",
        "closed model",
        "distilled from R1 on math",
        "RL on math (zero)",
        "BLEU reward",
        "checklist reward",
    }


def test_needs_are_blocks_and_no_block_is_lost():
    for block in BLOCKS.values():
        assert set(block.needs) <= BLOCKS.keys()
    headers = "\n".join(path.read_text() for path in (ROOT / "experiments").glob("*.sh"))
    assert len(BLOCKS) == len(re.findall(r"^# (?:row|stage): ", headers, re.M))  # all names differ


@pytest.mark.parametrize("table", reproduce.TABLES)
def test_a_row_has_a_command_for_every_printed_number(table):
    """And a file as a whole has exactly the commands of its blocks, each after what it reads."""
    names = reproduce.wanted_blocks(reproduce.Args(table=table), ROWS)
    stages = reproduce.plan(reproduce.Args(table=table, seeds=(0, 1)), names, BLOCKS)
    order = list(stages)
    for name, stage in stages.items():
        assert all(order.index(other) < order.index(name) for other in stage.waits_for)
        flags = [word for word in stage.words if word.startswith("--") and word != "--"]
        assert len(set(flags)) == len(flags), name
    if table in PAPER_TABLES:
        printed = tables.printed_numbers()
        for cell in printed[(printed["table"] == table) & (printed["row"] != "")].itertuples():
            evaluation = f"{cell.row}-s1--{tables.BENCHMARKS[cell.benchmark][0]}"
            assert evaluation in stages or cell.row in ARMORM
        evaluations = [name for name in stages if "-s1--" in name]
        assert len(evaluations) == len(printed[(printed["table"] == table) & (printed["row"] != "")]) - (
            14 if table == "4" else 0
        )
    else:
        assert {name for name in stages if "-s1--" in name} >= {f"{row}-s1--gold" for row in ROWS[table]}

    file = f"table{table}.sh" if table in PAPER_TABLES else f"{table}.sh"
    variables = reproduce.environment(reproduce.Args(table=table), 0)
    whole = reproduce.expand((ROOT / "experiments" / file).read_text(), variables)
    parts = []
    for text in (ROOT / "experiments" / file).read_text().split("\n\n"):
        if match := re.match(r"# (?:row|stage): (.+)\n", text):
            block = BLOCKS[match[1]]
            parts += reproduce.expand(block.settings + block.text, variables)
    assert whole == parts and parts


def module_and_words(words: list[str]) -> tuple[str, list[str]]:
    """("train_grpo", its arguments) of a command; of a server and its command ("... -m data.toy.judge -- ...") the latter."""
    if "--" in words:
        words = words[words.index("--") + 1 :]
    if words[1] == "-m":
        return words[2], words[3:]
    script = next(word for word in words if word.endswith(".py"))
    return script[:-3], words[words.index(script) + 1 :]


def test_every_command_is_parsed_by_its_script(monkeypatch):
    """Names, values and presets, by the script's own parser; --as-released is on every line that takes it."""
    parsed = set()
    for command in every_command():
        name, words = module_and_words(command)
        module = importlib.import_module(name)
        if not hasattr(module, "Args"):
            assert words == [], command
            continue
        if "--reward-args" in words and not hasattr(module.Args, "reward_args"):
            continue  # until the training scripts have it
        same = tuple(re.sub(r"^\S*results\S*/\S*$", "x", word) for word in words)
        if (name, same) in parsed:
            continue
        parsed.add((name, same))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *same])
        if name.startswith(("train_", "eval_")):
            args = runs.parse_args(
                module.Args, getattr(module, "PRESETS", {}), getattr(module, "RELEASED", None)
            )
        else:
            args = tyro.cli(module.Args)
        preset = getattr(args, "preset", "")
        if preset.startswith("table"):
            assert ("--as-released" in words) == (preset in module.RELEASED), preset
            for field in {"prompts", "traces"} & vars(args).keys():
                assert getattr(args, field) == module.PRESETS[preset].get(
                    field, getattr(module.Args(), field)
                )
        if hasattr(args, "rewards"):
            assert rewards.parse_spec(list(args.rewards))
    assert len(parsed) > 120


def words_of(name: str, row: str, **fields) -> list[str]:
    args = reproduce.Args(**fields)
    return reproduce.plan(args, [row], BLOCKS)[name].words


def test_a_row_by_hand():
    row = "table4/llama3.1-8b-rlhf-gpt4.1mini"
    args = reproduce.Args(table="4", seeds=(3,), as_released=True)
    stages = reproduce.plan(args, [row], BLOCKS)
    sft, rl = "llama3.1-8b-sft-plain-gpt4.1mini-s3", "llama3.1-8b-rlhf-gpt4.1mini-s3"
    evaluations = (
        "wildbench",
        "alpacaeval2",
        "arenahard2",
        "creativewriting3",
        "popqa",
        "ifbench",
        "mmlu_redux",
    )
    assert list(stages) == [sft, rl, *(f"{rl}--{name}" for name in evaluations)]
    assert stages[rl].waits_for == {sft} and stages[f"{rl}--popqa"].waits_for == {rl}
    assert " ".join(stages[rl].words) == (
        "accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_grpo.py --preset table4/llama3.1-8b-rlhf-gpt4.1mini "
        f"--as-released --prompts data/wildchat_if.jsonl --model results/{sft}/model --seed 3 --out results/{rl} --resume"
    )
    assert " ".join(stages[f"{rl}--wildbench"].words) == (
        "python eval_wildbench.py --tasks data/wildbench.jsonl --mode reward --orders random --temperatures 0.7 --judge gpt-4o "
        f"--protocol paper --model results/{rl}/model --top-p 0.95 --max-tokens 4096 --think-format auto --seed 3 "
        f"--out results/{rl}--wildbench --resume"
    )
    prompted = words_of(
        "qwen2.5-7b-prompted-think-s0--popqa",
        "table1/qwen2.5-7b-prompted-think",
        table="1",
        budget=20,
        price=(2.5, 10),
    )
    text = " ".join(prompted)
    assert "--model Qwen/Qwen2.5-7B " in text and "--think-format zero_think" in text and "8192" in text
    assert "--budget" not in text  # it has no judge
    judged = words_of(
        "qwen2.5-7b-rlmt-s0--wildbench-g", "table8/qwen2.5-7b-rlmt", table="8", budget=20, price=(2.5, 10)
    )
    assert "--judge gpt-4.1 --protocol paper --budget 20 --price 2.5 10" in " ".join(judged)


def test_what_it_would_run(capsys):
    reproduce.main(reproduce.Args(table="1", row="llama3.1-8b-rlmt", dry_run=True))
    out = capsys.readouterr().out
    assert (
        out.count("\n# llama3.1-8b") == 9
        and "# about 62 H100-hours\n# llama3.1-8b-rlmt-s0: not yet run\n" in out
    )
    assert out.index("train_sft_warmstart.py") < out.index("train_grpo.py") < out.index("eval_wildbench.py")
    reproduce.main(reproduce.Args(table="4", dry_run=True))
    out = capsys.readouterr().out
    assert (
        "llama3.1-8b-rlhf-armorm cannot be run and is left out: The head" in out and "-armorm-s0" not in out
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"table": "7"}, "--table '7'"),
        ({"table": "1", "row": "x"}, "--row 'x'"),
        ({}, "nothing to do"),
        ({"traces": "x"}, "--traces needs --out"),
        (
            {"table": "1", "row": "llama3.1-8b-rlmt", "run": True},
            "data/creative_writing, data/mmlu_redux, data/traces.jsonl",
        ),
        ({"table": "4", "row": "llama3.1-8b-rlmt-tulu3", "run": True}, "data/tulu3_random.jsonl"),
        ({"table": "1", "row": "llama3.1-8b-rlmt", "run": True, "budget": 9.0}, "--budget needs --price"),
        (
            {"table": "4", "row": "llama3.1-8b-rlmt-armorm", "run": True},
            "cannot be run: The head of its reward model",
        ),
    ],
)
def test_what_is_refused_before_anything_runs(fields, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        reproduce.main(reproduce.Args(results=tmp_path, **fields))
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_a_key_is_asked_for_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        reproduce, "HERE", Path("/")
    )  # bash starts there; files of data/ are looked for below
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "")

    def passes(*words: str) -> bool:
        """Whether check() asks for no key for a command with these words."""
        block = reproduce.Block("", "")
        stage = reproduce.Stage(
            ["python", "x.py", *words, "--out", str(tmp_path / "x"), "--resume"], set(), block, {}
        )
        try:
            reproduce.check({"x": stage}, tmp_path)
        except SystemExit:
            assert "set OPENAI_API_KEY" in capsys.readouterr().err
            return False
        return True

    judged = ("--judge", "gpt-4o", "--protocol", "paper")
    assert not passes(*judged) and passes(*judged, "--judge-url", "http://localhost:8000/v1")
    assert not passes("--gold", "judge:gpt-4o") and passes("--gold", "judge:m@http://localhost:1/v1")
    assert passes("--gold", "x.py:f") and passes(
        "--judge", "toy-judge"
    )  # the toy judge brings its own endpoint
    monkeypatch.setenv("OPENAI_API_KEY", "sk-something")
    assert passes(*judged)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    make(tmp_path, "x/summary.json")
    assert passes(*judged)  # is done


# --- tables


def write_index(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(runs.INDEX_COLUMNS)).to_csv(folder / "runs.csv", index=False)


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
    texts = reproduce.render(reproduce.Args(results=tmp_path), ROWS)
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
    assert len(pd.read_csv(tmp_path / "tables" / "toy.csv")) == 22 * len(tables.TOY_COLUMNS)
    assert len(pd.read_csv(tmp_path / "tables" / "rewards.csv")) == 29 * len(tables.REWARDS_COLUMNS)


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
        reproduce.render(reproduce.Args(results=tmp_path), ROWS)
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
    texts, err = reproduce.render(reproduce.Args(results=tmp_path), ROWS), capsys.readouterr().err
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
    reproduce.render(reproduce.Args(results=tmp_path), ROWS)
    table = pd.read_csv(tmp_path / "tables" / "table1.csv").query("benchmark == 'WB'").set_index("row")
    one, none = table.loc["llama3.1-8b-rlmt"], table.loc["llama3.1-8b-rlhf"]
    assert (one.ours, one.low, one.high, one.seeds, one.status) == (40, 30, 50, 1, "measured")
    assert (
        pd.isna(none.ours) and none.seeds == 0 and none.status == "no headline" and pd.isna(none.difference)
    )


def test_every_printed_number_is_in_a_table(tmp_path):
    reproduce.render(reproduce.Args(results=tmp_path), ROWS)
    written = pd.concat([pd.read_csv(tmp_path / "tables" / f"table{t}.csv") for t in PAPER_TABLES])
    printed = tables.printed_numbers()
    assert len(written) == len(printed) and sorted(written.paper) == sorted(printed.value.astype(float))
    assert set(written.status) == {"not yet run", "model of others", "cannot be run"}
    assert set(written[written.status == "cannot be run"].row) == {
        "llama3.1-8b-rlmt-armorm",
        "llama3.1-8b-rlhf-armorm",
    }


def test_the_committed_tables_are_those_of_the_committed_figures(tmp_path):
    """Letter by letter: results/tables/ is what results/**/runs.csv gives today."""
    (tmp_path / "toy").mkdir()
    shutil.copy(ROOT / "results" / "toy" / "runs.csv", tmp_path / "toy")
    texts = reproduce.render(reproduce.Args(results=tmp_path), ROWS)
    committed = {path.name: path.read_text() for path in (ROOT / "results" / "tables").iterdir()}
    assert committed == {path.name: path.read_text() for path in (tmp_path / "tables").iterdir()}
    assert all(tables.VARIANCE in text for text in texts.values())


# --- the runner

JOB = """
import json, pathlib, sys, time
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
out.mkdir(exist_ok=True)
with open(out.parent / "order", "a") as f:
    f.write(out.name + " ")
if "--fail" in words:
    time.sleep(1)
    sys.exit("broken on purpose")
if "--sleep" in words:
    time.sleep(40)
if "--resume" in words:
    (out / "model").mkdir(exist_ok=True)
    (out / "model" / "model.safetensors").write_text(" ".join(words))
    (out / "summary.json").write_text("{}")
"""


def experiments(folder: Path, monkeypatch, blocks: str) -> dict[str, reproduce.Block]:
    """Blocks of a file of one's own, whose commands `job` leave a folder, and a line in `order`."""
    (folder / "experiments").mkdir()
    (folder / "job.py").write_text(JOB)
    settings = f': "${{SEED:=0}}"\nexport ONE=1\njob() {{ python {folder}/job.py --out "$RESULTS/$@"; }}\n\n'
    (folder / "experiments" / "table1.sh").write_text(settings + blocks)
    monkeypatch.setattr(reproduce, "EXPERIMENTS", folder / "experiments")
    return reproduce.read_blocks()


def make(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{}")


def planned(root: Path, blocks: dict, *names: str, seeds=(0,)) -> dict[str, reproduce.Stage]:
    return reproduce.plan(reproduce.Args(table="1", results=root, seeds=seeds), list(names), blocks)


CHAIN = """# stage: data
job data

# stage: sft
# needs: data
job sft-s$SEED --traces "$RESULTS/data/traces.jsonl" --resume

# row: table1/rl
# needs: sft
# It takes an hour.
job rl-s$SEED --model "$RESULTS/sft-s$SEED/model" --resume
job rl-s$SEED--gold --model "$RESULTS/rl-s$SEED/model" --resume
"""


def test_only_what_is_missing_runs_and_in_order(tmp_path, monkeypatch, capsys):
    blocks = experiments(tmp_path, monkeypatch, CHAIN)
    stages = planned(tmp_path, blocks, "table1/rl", seeds=(0, 1))
    data = next(iter(stages))
    assert [list(stages)[1:4], stages["rl-s1"].waits_for] == [
        ["sft-s0", "rl-s0", "rl-s0--gold"],
        {data, "sft-s1"},
    ]
    reproduce.run_stages(stages, tmp_path, lanes=2)
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "data" and len(order) == 7
    for seed in (0, 1):
        one = [name for name in order if f"-s{seed}" in name]
        assert one == [f"sft-s{seed}", f"rl-s{seed}", f"rl-s{seed}--gold"]
    assert "7/7" in capsys.readouterr().out

    (tmp_path / "rl-s1--gold" / "summary.json").unlink()  # interrupted
    reproduce.run_stages(stages, tmp_path, lanes=1)
    assert (tmp_path / "order").read_text().split()[7:] == ["data", "rl-s1--gold"]
    reproduce.run_stages(stages, tmp_path, lanes=1)
    assert len((tmp_path / "order").read_text().split()) == 9  # nothing waits for the data


def test_a_failure_ends_what_runs_beside_it(tmp_path, monkeypatch, capsys):
    blocks = experiments(
        tmp_path,
        monkeypatch,
        '# row: table1/a\njob a --fail --resume\njob after --model "$RESULTS/a/model" --resume\n\n'
        "# row: table1/b\njob b --sleep --resume\n",
    )
    began = time.monotonic()
    with pytest.raises(SystemExit) as e:
        reproduce.run_stages(planned(tmp_path, blocks, "table1/a", "table1/b"), tmp_path, lanes=2)
    assert "a failed; its log is" in str(e.value) and "broken on purpose" in capsys.readouterr().out
    assert time.monotonic() - began < 30 and not (tmp_path / "after").exists()
    time.sleep(0.5)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path / "job.py") not in running  # neither bash nor what it had started


def test_what_is_done_must_fit_what_is_to_be_run(tmp_path, monkeypatch, capsys):
    blocks = experiments(tmp_path, monkeypatch, CHAIN)
    stages = planned(tmp_path, blocks, "table1/rl")
    data = next(iter(stages))
    named = ("sft-s0", "rl-s0", "rl-s0--gold")

    def refused() -> str:
        with pytest.raises(SystemExit) as e:
            reproduce.finished(stages, tmp_path)
        assert e.value.code == 2
        err = capsys.readouterr().err
        return err.partition(f"error: in {tmp_path} are ")[2].partition(". Delete these folders")[0]

    bare, stale = "figures without the weights that are needed now", "made from a run to be made anew"
    assert reproduce.finished(stages, tmp_path) == set()
    make(tmp_path, *(f"{name}/summary.json" for name in named))  # as they are in git
    assert reproduce.finished(stages, tmp_path) == {data, *named}  # nothing that reads weights is to run
    (tmp_path / "experiments" / "table1.sh").open("a").write(
        'job rl-s$SEED--more --model "$RESULTS/rl-s$SEED/model" --resume\n'
    )
    stages = planned(tmp_path, reproduce.read_blocks(), "table1/rl")
    assert refused() == f"{bare}: rl-s0, sft-s0; {stale}: rl-s0--gold"  # the new one needs all the weights
    make(tmp_path, "rl-s0/model/model.safetensors")
    assert reproduce.finished(stages, tmp_path) == set(
        named
    )  # sft's weights are not needed; data is made anew
    (tmp_path / "rl-s0" / "summary.json").unlink()  # what was measured is of another model
    assert refused() == f"{bare}: sft-s0; {stale}: rl-s0, rl-s0--gold"
    shutil.rmtree(tmp_path / "rl-s0--gold")
    make(tmp_path, "sft-s0/model/model.safetensors")
    assert reproduce.finished(stages, tmp_path) == {"sft-s0"}
    shutil.rmtree(tmp_path / "sft-s0")
    assert refused() == f"{stale}: rl-s0"
    shutil.rmtree(tmp_path / "rl-s0")
    assert reproduce.finished(stages, tmp_path) == set()


def test_a_toy_row_for_real(tmp_path, monkeypatch, capsys):
    """The base model on two tasks: run, found again, in the table; what came with git is named and left as it is."""
    row = "toy-prompted-think"
    (tmp_path / "experiments").mkdir()
    shutil.copy(ROOT / "experiments" / "rewards.sh", tmp_path / "experiments")
    (tmp_path / "experiments" / "toy.sh").write_text(
        ': "${SEED:=0}"\nexport HF_HUB_OFFLINE=1\n\n# stage: data\n'
        f'python -m data.toy.world --out "{tmp_path}/data" --n-traces 8 --n-prompts 8 --n-pairs 8 --n-tasks 2 --n-held-out 2\n\n'
        f"# row: toy/{row}\n# needs: data\npython eval_wildbench.py --model data/toy/base --think-format zero_think "
        f'--tasks "{tmp_path}/data/benchmark_tasks.jsonl" --temperatures 1.0 --max-tokens 16 --rollout hf --seed "$SEED" '
        f'--out "$RESULTS/{row}-s$SEED--gold" --resume\n'
    )
    monkeypatch.setattr(reproduce, "EXPERIMENTS", tmp_path / "experiments")
    args = reproduce.Args(table="toy", row=row, run=True, results=tmp_path)
    reproduce.main(args)
    assert f"2/2 {row}-s0--gold done" in capsys.readouterr().out
    assert reproduce.status(tmp_path / "toy", f"{row}-s0") == "done"
    table = pd.read_csv(tmp_path / "tables" / "toy.csv").set_index(["row", "benchmark"])
    assert table.loc[(row, "gold, T=1")].seeds == 1 and table.loc[(row, "gold, T=1")].variance == "tasks"

    reproduce.main(args)
    assert capsys.readouterr().out == ""
    (tmp_path / "toy" / f"{row}-s0--gold" / "command.txt").unlink()
    reproduce.main(args)
    out = capsys.readouterr().out
    assert f"not run again, 1 of 2: {row}-s0--gold" in out and "--results DIR" in out


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


# --- the sweep


def test_a_sweep_takes_no_figures_without_weights(tmp_path, capsys):
    names = ["toy-sft-think-s0", "toy-rlmt-s0"]
    make(tmp_path / "toy", *(f"{name}/summary.json" for name in names))
    (tmp_path / "toy" / "toy-rlmt-s0" / "held_out.jsonl").write_text('{"step": 7, "gold": 0.8}\n')
    args = sweep.Args(table="toy", row="toy-rlmt", seeds=(0,), stop_at=7, results=tmp_path)
    with pytest.raises(SystemExit) as e:
        sweep.main(args)
    assert e.value.code == 2 and "figures without weights" in capsys.readouterr().err
    make(tmp_path / "toy", "toy-rlmt-s0/model/model.safetensors")
    sweep.main(args)
    assert "1 seeds started, 1 went on" in capsys.readouterr().out
    for refused in ({"table": "1", "row": "llama3.1-8b-rlmt", "stop_at": 20}, {"row": "toy-rlmt"}):
        with pytest.raises(SystemExit) as e:
            sweep.main(sweep.Args(results=tmp_path, **refused))
        assert e.value.code == 2 and "--stop-at" in capsys.readouterr().err


def test_a_run_is_stopped_when_its_step_is_measured(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import json, pathlib, sys, time\nout = pathlib.Path(sys.argv[2])\n(out / 'checkpoint-1').mkdir(parents=True)\n"
        "for step in range(1, 1000):\n    time.sleep(0.3)\n"
        "    with open(out / 'held_out.jsonl', 'a') as f:\n"
        "        f.write(json.dumps({'step': step, 'gold': 0.5}) + '\\n')\n"
    )

    def stage(name: str) -> reproduce.Stage:
        words = ["python", str(script), "--out", str(tmp_path / name)]
        block = reproduce.Block(" ".join(words) + "\n", "")
        return reproduce.Stage(words, set(), block, reproduce.environment(reproduce.Args(), 0))

    sweep.train_until(stage("run"), tmp_path / "run", 3)
    reached = sweep.held_out(tmp_path / "run")[-1]["step"]
    assert 3 <= reached < 100
    sweep.train_until(stage("run"), tmp_path / "run", 3)  # is there already
    assert sweep.held_out(tmp_path / "run")[-1]["step"] == reached
    script.write_text("raise SystemExit(1)")
    with pytest.raises(SystemExit):
        sweep.train_until(stage("other"), tmp_path / "other", 1)


# --- the demo


def test_the_demo_runs_and_evaluates_every_row_of_its_table():
    outs = [
        Path(words[words.index("--out") + 1]).name for words in commands_of("demo.sh") if "--out" in words
    ]
    trained = [name for names in demo_tables.ROWS.values() for name in names]
    assert sorted(outs) == sorted([*trained, *(f"eval-{name}" for name in trained), "reward"])
    assert commands_of("demo.sh")[0] == ["python", "-m", "data.toy.world"]
    assert commands_of("demo.sh")[-1][:3] == ["python", "-m", "experiments.demo_tables"]


def test_errors_of_several_seeds_are_those_of_each_tasks_mean(tmp_path):
    """Two seeds on three tasks, sampled: a task's scores move together, so that the mean is no surer than one seed."""
    scores = {0: [0.2, 0.5, 0.8], 1: [0.3, 0.5, 1.0]}
    for seed, values in scores.items():
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        rows = [{"id": f"t{i}", "temperature": 1.0, "score": value} for i, value in enumerate(values)]
        rows += [{"id": f"t{i}", "temperature": 0.0, "score": 1.0} for i in range(3)]
        rows = rows[::-1] if seed else rows  # the order of a file is no matter
        (folder / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [tmp_path / "seed0", tmp_path / "seed1"]
    means = pd.Series([0.25, 0.5, 0.9])
    assert demo_tables.row_standard_error(folders, 1.0) == pytest.approx(means.std() / 3**0.5)
    assert demo_tables.row_standard_error(folders, 0.0) == 0
    assert demo_tables.row_standard_error(folders[:1], 1.0) == pytest.approx(0.3 / 3**0.5)
    seeds = pd.DataFrame({"gold": [0.5, 0.6], "row_standard_error": [0.19, 0.19]})
    assert demo_tables.gold_cell(seeds) == "0.550 ± 0.190 (0.500 to 0.600)"
