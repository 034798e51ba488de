"""Presets, the commands of experiments/*.sh, the runner, the tables, the demo and small.sh."""

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
from rlmt import run as runs
from benchmarks import scoring
from experiments import demo_tables, small_samples, small_tables, tables

ROOT = Path(__file__).parents[2]
EVALUATE = (ROOT / "experiments" / "evaluate.sh").read_text()
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


# bash reads this before a script: then no command runs, and its words go to the file COMMANDS
HOOK = r"""
record() { printf '%s\0' "$@" $'\n' >> "$COMMANDS"; }
python() { record python "$@"; }
accelerate() { record accelerate "$@"; }
export -f record python accelerate
"""


def expand(script: str, variables: dict[str, str]) -> list[list[str]]:
    """Lists the words of every command of a script, as bash expands them."""
    with tempfile.TemporaryDirectory() as folder:
        commands = Path(folder) / "commands"
        commands.touch()
        variables = {"RESULTS": f"{folder}/results", **variables, "COMMANDS": str(commands)}
        subprocess.run(["bash", "-c", HOOK + script], cwd=ROOT, env=os.environ | variables, check=True)
        text = commands.read_text()
    return [command.split("\0")[:-1] for command in text.split("\n\0")[:-1]]


@functools.cache
def commands_of(file: str) -> list[list[str]]:
    """Every command of a file of experiments/, as bash expands the whole file, with every variable set."""
    variables = dict(FLAGS)
    if file == "demo.sh":  # it makes a folder for its logs
        del variables["RESULTS"]
    if file == "1gpu.sh":  # it first looks for what it reads in data/
        variables |= {"TRACES": "OWNER/TRACES", "PROMPTS": "OWNER/PROMPTS", "BENCHMARKS": "popqa ifbench"}
    return expand((ROOT / "experiments" / file).read_text(), variables)


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
            assert name in used or not name.startswith("table")
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


MODELS = {
    "llamabase": "llama3.1-8b",
    "llamainstruct": "llama3.1-8b-instruct",
    "qwenbase": "qwen2.5-7b",
    "qweninstruct": "qwen2.5-7b-instruct",
}


def released_configs() -> dict[str, dict[str, str]]:
    """Reads the 14 released configs of GRPO and PPO, by name."""
    configs = {}
    with open(ROOT / "data/paper/hyperparameters.csv") as file:
        for row in csv.DictReader(file):
            if row["source"] == "released verl config":
                configs.setdefault(row["setting"], {})[row["parameter"]] = row["value"]
    return configs


def preset_of(config: str) -> str:
    """Names our preset of a released config: grpo__qwenbase__zero__think is table1/qwen2.5-7b-rlmt-zero."""
    algorithm, model, start, thinking = config.split("__")
    row = MODELS[model] + {"think": "-rlmt", "nothink": "-rlhf"}[thinking]
    if start == "zero":
        row += "-zero"
    if algorithm == "ppo":
        return f"table3/{row}-ppo"
    return f"table1/{row}"


def args_as_released(module, name: str):
    return dataclasses.replace(module.Args(), **(module.PRESETS[name] | module.RELEASED[name]))


def test_as_released_has_the_values_of_the_released_configs():
    configs = released_configs()
    assert len(configs) == 14
    for name, config in configs.items():
        algorithm = name.split("__")[0]
        args = args_as_released(importlib.import_module(f"train_{algorithm}"), preset_of(name))
        batch = int(config["train batch size (prompts)"])
        assert args.prompts_per_step == batch, name
        assert args.updates_per_rollout == batch / int(config["mini-batch size (prompts)"]), name
        assert args.num_iterations == int(config["update epochs per batch"])
        assert args.max_prompt_tokens == int(config["max prompt length"]), name
        assert args.max_completion_tokens == int(config["max response length"])
        assert args.temperature == float(config["rollout temperature"]), name
        assert args.learning_rate == float(config["actor learning rate"]), name
        assert args.weight_decay == float(config["actor weight decay"])
        assert args.epsilon == float(config["clip ratio"])
        assert args.entropy_coef == float(config["entropy coefficient"]), name
        assert args.save_steps == int(config["checkpoint every (steps)"]), name
        assert args.on_bad_format == {"True": "null", "False": "score"}[config["strict option"]], name
        assert args.reward_on == "response" and args.reward_model.endswith(config["reward model"])
        if algorithm == "grpo":
            assert args.top_p == float(config["rollout top_p"]), name
            assert args.group_size == int(config["responses per prompt (n)"])
            assert args.beta == float(config["KL loss coefficient"]) and config["KL as loss term"] == "True"
            assert args.scale_rewards == "group" and config["divide group advantage by std"] == "True"
            # a mean over the tokens of one completion, averaged over completions
            assert (config["loss aggregation"], config["micro-batch per GPU"]) == ("token-mean", "1")
            assert args.loss_type == "grpo"
        else:
            assert args.kl == "none" and config["KL as loss term"] == config["KL in reward"] == "False"
            assert args.critic_learning_rate == float(config["critic learning rate"])
            assert args.lam == float(config["lambda"])


@pytest.mark.parametrize("script, n_rows", [("train_grpo", 21), ("train_ppo", 2)])
def test_a_run_as_released_ends_with_a_checkpoint_that_was_saved(script, n_rows):
    """Of the steps that were saved in some epochs of 7,544 prompts it is the nearest to the README's 135."""
    module = importlib.import_module(script)
    assert len(module.RELEASED) == n_rows
    configs = released_configs()
    epochs = {preset_of(config): int(values["epochs"]) for config, values in configs.items()}
    for name in module.RELEASED:
        args = args_as_released(module, name)
        last = epochs.get(name, 2) * (7544 // args.prompts_per_step)
        saved = [*range(args.save_steps, last, args.save_steps), last]
        assert args.steps <= last, name
        assert args.steps == min(saved, key=lambda step: abs(step - 135)), name


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
    assert parse("--preset", "table1/qwen2.5-7b-rlhf", "--as_released", "--temperature", "0.5") == args
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


def test_the_list_has_every_row_one_a_line(tmp_path, capsys):
    reproduce.main(reproduce.Args(list=True, results=tmp_path))
    listed = {table: [] for table in reproduce.TABLES}
    for line in capsys.readouterr().out.splitlines():
        _, table, row, state = line.split(maxsplit=3)
        listed[table].append(row)
        assert re.fullmatch(r"s0: (done|figures only|interrupted|not yet run)", state)
    assert listed.pop("toy") == TOY.split() and listed.pop("rewards") == REWARDS.split()

    printed = tables.printed_numbers()
    ours = printed[printed["row"] != ""]
    as_released = []
    for table, rows in listed.items():
        first = [
            row for row in rows if row.endswith(tables.AS_RELEASED)
        ]  # evaluated before anything is trained
        as_released += first
        assert rows == first + list(ours[ours["table"] == table]["row"].unique())
    assert [len(rows) for rows in listed.values()] == [20 + 26, 4, 24 + 38, 11, 34, 9, 6]
    others = printed[printed["row"] == ""]  # they cannot be had
    assert set(others["model_name"]) == {"Claude3.7-Sonnet", "Llama3.1-8B-BLEUBERI"}
    trained = {block.row for block in BLOCKS.values() if "$LAUNCH" in block.text and block.table != "8"}
    trained |= {row for row in ours["row"] if "-sft-" in row or row in BLOCKS}
    of_tables = set(ours[ours["table"].isin(["1", "3"])]["row"])
    assert {row.removesuffix(tables.AS_RELEASED) for row in as_released} == trained & of_tables


def test_hours_are_of_the_device_that_was_measured():
    """The paper's README: on 8 H100 15 hours for 234 steps of GRPO or PPO, 2.5 for SFT, 1 for DPO. The rows run 120 steps."""
    expected = {"train_grpo.py": 8 * 15 * 120 / 234, "train_ppo.py": 8 * 15 * 120 / 234}
    expected |= {"train_sft_warmstart.py": 8 * 2.5, "train_dpo.py": 8 * 1}
    n_rows = 0
    for block in BLOCKS.values():
        script = re.search(r"^\$LAUNCH (\w+\.py)", block.text, re.MULTILINE)
        hours = re.findall(r"^# about (\d+) H100-hours", block.text, re.MULTILINE)
        assert hours == ([f"{expected[script[1]]:.0f}"] if script else [])
        assert len(re.findall("hour", block.text)) == len(hours)  # none of another device
        n_rows += len(hours)
    assert n_rows > 50


def test_needs_are_blocks_and_no_block_is_lost():
    for block in BLOCKS.values():
        assert set(block.needs) <= BLOCKS.keys()
    headers = "\n".join(path.read_text() for path in (ROOT / "experiments").glob("*.sh"))
    assert len(BLOCKS) == len(re.findall(r"^# (?:row|stage): ", headers, re.M))  # all names differ


def file_of(table: str) -> str:
    return f"table{table}.sh" if table in PAPER_TABLES else f"{table}.sh"


@pytest.mark.parametrize("table", reproduce.TABLES)
def test_a_row_has_a_command_for_every_printed_number(table, tmp_path):
    """And a file as a whole has exactly the commands of its blocks, each after what it reads."""
    args = reproduce.Args(table=table, seeds=(1,), results=tmp_path)
    root = reproduce.root_of(args, table)
    jobs = reproduce.plan(args, reproduce.wanted_blocks(args, ROWS), BLOCKS, root)
    commands = []
    for name, seed in jobs:
        script = BLOCKS[name].settings + BLOCKS[name].text
        commands += expand(script, reproduce.variables_of(args, root, seed))
    outs = []
    for words in commands:
        flags = [word for word in words if word.startswith("--") and word != "--"]
        assert len(set(flags)) == len(flags), words
        for word in words:  # what it reads is made before it
            path = Path(word)
            if "-s1" in word and path.is_relative_to(root) and words[words.index(word) - 1] != "--out":
                assert path.relative_to(root).parts[0] in outs, words
        if "--out" in words:
            outs.append(Path(words[words.index("--out") + 1]).name)
    assert len(set(outs)) == len(outs)

    wanted = [
        f"{row}-s1--{name}" for row in ROWS[table] for name in reproduce.evaluations_of(ROWS[table][row])
    ]
    assert set(wanted) <= set(outs)
    if table in PAPER_TABLES:
        assert {name for name in outs if "-s1--" in name} == set(wanted)

    file = file_of(table)
    variables = FLAGS | {"RESULTS": str(root)}
    parts = []
    for text in (ROOT / "experiments" / file).read_text().split("\n\n"):
        if match := re.match(r"# (?:row|stage): (.+)\n", text):
            block = BLOCKS[match[1]]
            parts += expand(block.settings + block.text, variables)
    assert expand((ROOT / "experiments" / file).read_text(), variables) == parts and parts


def test_one_card_looks_for_its_inputs_before_it_trains():
    script = (ROOT / "experiments" / "1gpu.sh").read_text()
    hub = {"TRACES": "OWNER/TRACES", "PROMPTS": "OWNER/PROMPTS:train"}
    words = ["bash", "-c", HOOK + script]
    for given, missing in (
        ({}, "missing: data/traces.jsonl data/wildchat_if.jsonl data/mmlu_redux; README.md"),
        ({**hub, "TRACES": "data/none.jsonl", "BENCHMARKS": ""}, "missing: data/none.jsonl; README.md"),
    ):
        done = subprocess.run(words, cwd=ROOT, env=os.environ | given, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {missing}"), done.stderr

    commands = [" ".join(command) for command in expand(script, {**hub, "BENCHMARKS": "popqa"})]
    kinds = ["eval", "sft", "sft", "eval", "eval", "grpo", "grpo", "eval", "eval"]
    assert [re.search("eval|sft|grpo", command)[0] for command in commands] == kinds
    assert "--model Qwen/Qwen2.5-1.5B --dry-run" in commands[0]
    assert not any("--dry-run" in command for command in commands[1:])
    without_thinking = ["--max-tokens 4096" in command for command in commands if "eval_" in command]
    assert without_thinking == [False, False, True, False, True]
    assert not any("eval_" in " ".join(command) for command in expand(script, {**hub, "BENCHMARKS": ""}))


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


def commands_by_out(args: reproduce.Args) -> dict[str, str]:
    """The commands of --table and --row and of what they need, by the name of their run folder."""
    root = reproduce.root_of(args, args.table)
    commands = {}
    for name, seed in reproduce.plan(args, reproduce.wanted_blocks(args, ROWS), BLOCKS, root):
        variables = reproduce.variables_of(args, root, seed)
        for words in expand(BLOCKS[name].settings + BLOCKS[name].text, variables):
            commands[Path(words[words.index("--out") + 1]).name] = " ".join(words)
    return commands


def test_a_row_by_hand(tmp_path):
    args = reproduce.Args(
        table="4", row="llama3.1-8b-rlhf-gpt4.1mini", seeds=(3,), as_released=True, results=tmp_path
    )
    commands = commands_by_out(args)
    sft, rl = "llama3.1-8b-sft-plain-gpt4.1mini-s3", "llama3.1-8b-rlhf-gpt4.1mini-s3"
    evaluations = "wildbench alpacaeval2 arenahard2 creativewriting3 popqa ifbench mmlu_redux".split()
    assert list(commands) == [sft, rl, *(f"{rl}--{name}" for name in evaluations)]
    assert commands[rl] == (
        "accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_grpo.py --preset table4/llama3.1-8b-rlhf-gpt4.1mini "
        f"--as-released --prompts data/wildchat_if.jsonl --model {tmp_path}/{sft}/model --seed 3 --out {tmp_path}/{rl} --resume"
    )
    assert commands[f"{rl}--wildbench"] == (
        "python eval_wildbench.py --mode reward --orders random --temperatures 0.7 --tasks data/wildbench.jsonl --judge gpt-4o "
        f"--protocol paper --model {tmp_path}/{rl}/model --top-p 0.95 --max-tokens 4096 --think-format auto --seed 3 "
        f"--out {tmp_path}/{rl}--wildbench --resume"
    )

    paid = dict(results=tmp_path, budget=20, price=(2.5, 10))
    prompted = commands_by_out(reproduce.Args(table="1", row="qwen2.5-7b-prompted-think", **paid))
    popqa = prompted["qwen2.5-7b-prompted-think-s0--popqa"]
    assert "--model Qwen/Qwen2.5-7B " in popqa and "--think-format zero_think" in popqa and "8192" in popqa
    assert "--budget" not in popqa  # it has no judge
    judged = commands_by_out(reproduce.Args(table="8", row="qwen2.5-7b-rlmt", **paid))
    flags = "--judge gpt-4.1 --protocol paper --budget 20.0 --price 2.5 10"
    assert flags in judged["qwen2.5-7b-rlmt-s0--wildbench-g"].replace("--budget 20 ", "--budget 20.0 ")


def test_what_it_would_run(capsys, tmp_path):
    reproduce.main(reproduce.Args(table="1", row="llama3.1-8b-rlmt", dry_run=True, results=tmp_path))
    out = capsys.readouterr().out
    assert f"# llama3.1-8b-rlmt, not yet run; SEED=0 RESULTS={tmp_path}\n" in out
    assert "\n# about 62 H100-hours\n" in out and out.count("set -euo pipefail") == 1
    assert out.index("train_sft_warmstart.py") < out.index("train_grpo.py") < out.index('evaluate.sh "')
    reproduce.main(reproduce.Args(table="4", dry_run=True, run=True, results=tmp_path))  # nothing runs
    out = capsys.readouterr().out
    assert "# table4/llama3.1-8b-rlhf-armorm, not yet run" in out


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"table": "7"}, "--table '7'"),
        ({"table": "1", "row": "x"}, "--row 'x'"),
        ({}, "nothing to do"),
        (
            {"table": "1", "row": "llama3.1-8b-rlmt", "run": True},
            "data/creative_writing, data/mmlu_redux, data/traces.jsonl, data/wildbench.jsonl, data/wildchat_if.jsonl must",
        ),
        ({"table": "4", "row": "llama3.1-8b-rlmt-tulu3", "run": True}, "data/tulu3_random.jsonl"),
        ({"table": "1", "row": "llama3.1-8b-rlmt", "run": True, "budget": 9.0}, "--budget needs --price"),
        ({"table": "toy", "run": True, "lanes": 0}, "--lanes 0: use 1 or more"),
    ],
)
def test_what_is_refused_before_anything_runs(fields, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        reproduce.main(reproduce.Args(results=tmp_path, **fields))
    assert e.value.code == 2 and message in capsys.readouterr().err


def write_tasks(path: Path, reference: str) -> None:
    """Writes two tasks of WildBench with one reference answer."""
    task = {"messages": [{"role": "user", "content": "q"}], "references": {reference: "an answer"}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(task | {"id": i}) + "\n" for i in range(2)))


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder with experiments/ and every file of data/ that a row needs, in place of the repository."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "experiments", folder / "experiments")
    for path in re.findall(r"data/[\w.]+\w", EVALUATE + "".join(block.text for block in BLOCKS.values())):
        make(folder, path)
    write_tasks(folder / "data" / "wildbench.jsonl", "gpt-4")
    write_tasks(folder / "data" / "wildbench_g.jsonl", "gemini-flash")
    monkeypatch.setattr(reproduce, "HERE", folder)
    return folder


def test_references_of_wildbench_are_checked_before_anything_is_trained(checkout, capsys):
    lines = re.findall(r"^ *wildbench(?:-g)?\) python.*", EVALUATE, re.MULTILINE)
    assert len(lines) == 2
    reproduce.check_references(lines)
    write_tasks(checkout / "data" / "wildbench_g.jsonl", "gpt-4")
    with pytest.raises(SystemExit) as e:
        reproduce.check_references(lines)
    assert e.value.code == 2
    assert "data/wildbench_g.jsonl: 2 tasks have no reference 'gemini-flash'" in capsys.readouterr().err


def test_templates_are_handed_on_and_what_is_missing_is_said(tmp_path, capsys):
    files = re.findall(r"instructions (\w+/[\w.]+)", EVALUATE)
    assert len(files) == 4
    for file in files:
        if "arena" not in file:  # as in the authors' repository
            make(tmp_path / "data_files", file)
    args = reproduce.Args(
        table="1", row="llama3.1-8b-rlmt", templates=f"{tmp_path}/data_files", results=tmp_path
    )
    commands = commands_by_out(args)
    run = "llama3.1-8b-rlmt-s0--"
    for name, file in (
        ("wildbench", "wildbench/eval_template.pairwise"),
        ("alpacaeval2", "alpacaeval2/eval_template.score"),
        ("creativewriting3", "creativewritingv3/creative_writing_judging_prompt.txt"),
    ):
        assert f" --template {tmp_path}/data_files/{file}" in commands[run + name]
    for name in ("arenahard2", "popqa", "ifbench"):
        assert "--template" not in commands[run + name]
    reproduce.main(dataclasses.replace(args, dry_run=True))
    missing = (
        f"--templates {args.templates} has no arena_hard_v2/hard_prompt.txt: arenahard2 is judged in our own"
    )
    assert missing in capsys.readouterr().out
    make(tmp_path / "data_files", "arena_hard_v2/hard_prompt.txt")
    arena = commands_by_out(args)[run + "arenahard2"]
    assert f" --template {tmp_path}/data_files/arena_hard_v2/" in arena
    with pytest.raises(SystemExit):
        reproduce.main(dataclasses.replace(args, templates=str(tmp_path), dry_run=True))
    assert "none of wildbench/eval_template.pairwise" in capsys.readouterr().err


def test_what_is_finished_is_not_judged_again_with_templates(tmp_path):
    """Unless the model has newer weights, of which the script says that they have changed."""
    file = "alpacaeval2/eval_template.score"
    make(tmp_path, f"templates/{file}", "model/model.safetensors", "results/m--wildbench/summary.json")
    make(tmp_path, "results/m--alpacaeval2/config.json")  # was interrupted
    variables = {"RESULTS": str(tmp_path / "results"), "TEMPLATES": str(tmp_path / "templates")}

    def evaluated() -> list[str]:
        command = f"set -- {tmp_path}/model m wildbench alpacaeval2\n"
        return [" ".join(words) for words in expand(command + EVALUATE, variables)]

    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    commands = evaluated()
    assert len(commands) == 1 and f"--template {tmp_path}/templates/{file}" in commands[0]
    os.utime(tmp_path / "results" / "m--wildbench" / "summary.json", (0, 0))
    assert len(evaluated()) == 2


def test_rows_as_released_need_their_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path / "theirs"))
    row = "llama3.1-8b-rlmt-as-released"
    block = BLOCKS[f"table1/{row}"]
    assert block.checkpoint == tmp_path / "theirs" / "llama3.1-8b-rlmt"
    assert BLOCKS["table1/llama3.1-8b-rlmt"].checkpoint is None
    with pytest.raises(SystemExit):
        reproduce.main(reproduce.Args(table="1", row=row, run=True, results=tmp_path))
    assert (
        "theirs/llama3.1-8b-rlmt is missing: the checkpoint of the paper's authors" in capsys.readouterr().err
    )
    wanted = list(ROWS["1"].values())
    kept = reproduce.with_checkpoints(wanted)
    assert [block for block in wanted if block.checkpoint is None] == kept
    assert "20 rows as released are left out" in capsys.readouterr().out
    make(tmp_path / "theirs", "llama3.1-8b-rlmt/config.json")
    assert block in reproduce.with_checkpoints(wanted)

    commands = commands_by_out(
        reproduce.Args(table="3", row="qwen2.5-7b-rlhf-zero-ppo-as-released", results=tmp_path)
    )
    assert len(commands) == 7
    popqa = commands["qwen2.5-7b-rlhf-zero-ppo-as-released-s0--popqa"]
    assert f"--model {tmp_path}/theirs/qwen2.5-7b-rlhf-zero-ppo " in popqa
    assert "--max-tokens 8192 --think-format zero_plain" in popqa


def test_large_models_of_others_by_several_gpus_or_by_an_endpoint(tmp_path, monkeypatch):
    args = reproduce.Args(table="2", row="qwen2.5-72b-instruct-released", results=tmp_path)
    run = "qwen2.5-72b-instruct-released-s0--wildbench"
    assert " --model Qwen/Qwen2.5-72B-Instruct --tensor-parallel 4 " in commands_by_out(args)[run]
    monkeypatch.setenv("LARGE_MODEL_FLAGS", "--model-url http://localhost:8000/v1")
    assert " --model-url http://localhost:8000/v1 " in commands_by_out(args)[run]


def test_a_key_is_asked_for_before_anything_is_trained(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "")

    def passes(table: str, row: str, judge_url: str = "") -> bool:
        jobs = [reproduce.Job(f"{table}/{row}", 0)]
        try:
            reproduce.check_inputs(jobs, BLOCKS, tmp_path, judge_url)
        except SystemExit:
            assert "set OPENAI_API_KEY" in capsys.readouterr().err
            return False
        return True

    row = "llama3.1-8b-rlmt-zero"
    assert not passes("table10", row) and passes("table10", row, judge_url="http://localhost:1/v1")
    assert passes("toy", "toy-rlmt")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    assert passes("table10", row)
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-something")
    assert passes("table10", row)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    for evaluation in ("wildbench", "alpacaeval2", "arenahard2", "creativewriting3"):
        make(tmp_path, f"{row}-s0--{evaluation}/summary.json")
    assert passes("table10", row)  # all that a judge reads is done


def test_each_judge_is_asked_before_anything_is_trained(checkout, tmp_path, capsys, serve):
    """The judges of the rows that are about to run, gpt-4o and gpt-4.1; the second one is not there."""
    names = []

    def check(text, n):
        names.append(server.checks[-1][0]["model"])
        return "y" if n == 0 else (404, {"error": {"message": "no such model"}})

    server = serve(lambda text, n: "", check=check)
    args = reproduce.Args(table="10", row="llama3.1-8b-rlmt-zero", run=True, judge_url=server.url)
    args.results = tmp_path / "results"
    with pytest.raises(SystemExit) as error:
        reproduce.main(args)
    assert error.value.code == 2 and "the judge gpt-4.1" in capsys.readouterr().err
    assert names == ["gpt-4o", "gpt-4.1"] and not args.results.exists()


# --- tables


def write_index(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=list(scoring.INDEX_COLUMNS)).to_csv(folder / "runs.csv", index=False)


def write_task_means(run: Path, benchmark: str, metric: str, means: dict[str, float]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    shared = {"benchmark": benchmark, "metric": metric, "temperature": 0.7}
    rows = [shared | {"task": task, "mean": mean} for task, mean in means.items()]
    pd.DataFrame(rows, columns=list(scoring.TASK_COLUMNS)).to_csv(run / "task_means.csv", index=False)


def test_tables_by_hand(tmp_path):
    for seed, means in enumerate([{"a": 0.6, "b": 0.0}, {"a": 0.04, "b": 0.64}]):
        write_task_means(tmp_path / f"llama3.1-8b-rlmt-s{seed}--popqa", "x", "accuracy_paper", means)

    def line(
        run: str, metric: str, value: float, low: float | None = None, high: float | None = None
    ) -> dict:
        common = {"benchmark": "x", "n": 1024, "n_invalid": 0, "temperature": 0.7}
        return common | {"run": run, "metric": metric, "value": value, "low": low, "high": high}

    rlmt = "llama3.1-8b-rlmt-s0"
    lines = [
        line(f"{rlmt}--wildbench", "wb_reward", 40.0, 30, 50),
        line(f"{rlmt}--wildbench", "wb_reward", 44.0, 41, 47),  # again
        line(f"{rlmt}--popqa", "accuracy", 0.9),  # not the paper's rule
        line(f"{rlmt}--popqa", "accuracy_paper", 0.3, 0.28, 0.32),
        line("llama3.1-8b-rlmt-s1--popqa", "accuracy_paper", 0.34, 0.32, 0.36),
        line(f"{rlmt}--alpacaeval2", "lc_win_rate_paper", 52.0),
        line("llama3.1-8b-rlmt-s1--alpacaeval2", "lc_win_rate_paper", 54.0),
        line("llama3.1-8b-rlmt-zero-s0--wildbench", "wb_reward", -5.0, -9, -1),
        line("my-own-run", "wb_reward", 99.0),
    ]
    write_index(tmp_path, lines)
    texts = tables.render(tmp_path, ROWS)
    table = pd.read_csv(tmp_path / "tables" / "table1.csv").set_index(["row", "benchmark"])
    wb, popqa = table.loc[("llama3.1-8b-rlmt", "WB")], table.loc[("llama3.1-8b-rlmt", "PopQA")]
    assert (wb.ours, wb.low, wb.high, wb.seeds, wb.status) == (44, 41, 47, 1, "measured")
    assert wb.difference == pytest.approx(44 - wb.paper)
    assert popqa.ours == pytest.approx(32) and popqa.seeds == 2
    # over tasks: both are 0.32 over the seeds, though they differ by 0.6 in each
    assert (popqa.low, popqa.high) == pytest.approx((32, 32))
    # over seeds: t of one degree; sd of 30 and 34: sqrt(8), / sqrt(2)
    assert popqa.seed_high - popqa.ours == pytest.approx(12.706 * 2, rel=1e-4)
    assert pd.isna(wb.seed_high)
    assert table.loc[("llama3.1-8b-rlhf", "WB")].status == "not yet run" and pd.isna(
        table.loc[("llama3.1-8b-rlhf", "WB")].ours
    )
    shown = next(x for x in texts["table1"].splitlines() if x.startswith("| llama3.1-8b-rlmt |"))
    assert "44.0 ± 3.0 (" in shown and "32.0 ± 0.0, ± 25.4 over 2 seeds (" in shown
    # AE2's number is no mean over tasks
    assert "| 53.0, ± 12.7 over 2 seeds (" in shown and shown.endswith("partly measured |")
    assert all(tables.VARIANCE in text for text in texts.values())
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
        tables.render(tmp_path, ROWS)
    assert "were not judged alike" in capsys.readouterr().err


def test_numbers_of_fewer_tasks_are_named(tmp_path):
    common = {"metric": "accuracy_paper", "benchmark": "popqa", "temperature": 0.7, "value": 0.4}
    lines = []
    for row, n, n_invalid in (("rlmt", 50, 0), ("rlhf", 14267, 3), ("sft-think", 14267, 0)):
        run = f"llama3.1-8b-{row}-s0--popqa"
        lines.append({**common, "run": run, "n": n, "n_invalid": n_invalid, "fingerprint": str(n)})
    write_index(tmp_path, lines)
    text = tables.render(tmp_path, {"1": ROWS["1"]})["table1"]
    assert "n of each seed: PopQA 14267, but 50 in llama3.1-8b-rlmt, 3 invalid in llama3.1-8b-rlhf." in text
    written = pd.read_csv(tmp_path / "tables" / "table1.csv").dropna(subset="n")
    assert sorted(zip(written["n"], written["n_invalid"])) == [(50, 0), (14267, 0), (14267, 3)]


def test_two_temperatures_of_a_seed_are_not_two_seeds(tmp_path, capsys):
    common = {"run": "llama3.1-8b-rlmt-s0--wildbench", "metric": "wb_reward", "benchmark": "x", "value": 40.0}
    write_index(tmp_path, [common | {"temperature": temperature} for temperature in (0.7, 0.0)])
    with pytest.raises(SystemExit):
        tables.render(tmp_path, ROWS)
    assert "several values of wb_reward (temperatures 0.7, 0.0)" in capsys.readouterr().err


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
    texts, err = tables.render(tmp_path, ROWS), capsys.readouterr().err
    line = "WB: not to be compared, as judge, instructions or tasks differ: llama3.1-8b-sft-think against llama3.1-8b-rlhf, llama3.1-8b-rlmt"
    assert texts["table1"].endswith(f"\n\n{line}") and f"WARNING: table1, {line}\n" in err
    assert (
        "PopQA" not in err
        and "not to be compared" not in texts["rewards"]
        and texts["rewards"].count("0.400") == 3
    )
    assert "fingerprint" not in pd.read_csv(tmp_path / "tables" / "table1.csv").columns


def measure(folder: Path, row: str, wordings: dict[str, str], seeds: int = 1, **values: float) -> list[dict]:
    """Lines of the index for a row's columns; summaries of its judged runs name `wordings`, by column."""
    lines = []
    for column, value in values.items():
        evaluation, metric, factor = tables.BENCHMARKS[column]
        for seed in range(seeds):
            run = f"{row}-s{seed}--{evaluation}"
            common = {"benchmark": evaluation, "fingerprint": f"f-{wordings.get(column)}"}
            lines.append(common | {"run": run, "metric": metric, "value": value / factor, "temperature": 0.7})
            if column in wordings:
                make(folder, f"{run}/summary.json")
                (folder / run / "summary.json").write_text(json.dumps({"wording": wordings[column]}))
    return lines


def test_averages_are_those_of_the_paper_and_wordings_are_named(tmp_path):
    own = {"WB": "our own", "AE2": "our own", "AH2": "our own", "CWv3": "our own"}
    theirs = own | {"WB": "eval_template.pairwise 0123", "AE2": "eval_template.score 4567"}
    chat = {"WB": 10.0, "AE2": 20.0, "AH2": 33.0}
    seven = chat | {"CWv3": 40.0, "PopQA": 50.0, "IFBench": 60.0, "MMLU_Redux": 70.0}
    index = measure(tmp_path, "llama3.1-8b-rlmt", own, **seven)
    index += measure(tmp_path, "llama3.1-8b-rlmt-as-released", theirs, **chat)
    index += measure(tmp_path, "llama3.1-8b-rlhf", {}, WB=1.0, AE2=2.0)  # without a summary, and without AH2
    index += measure(tmp_path, "qwen2.5-7b-rlmt", own, seeds=2, WB=1.0, AE2=2.0)
    index += measure(tmp_path, "qwen2.5-7b-rlmt", own, AH2=3.0)
    write_index(tmp_path, index)
    text = tables.render(tmp_path, {"1": ROWS["1"]})["table1"]

    table = pd.read_csv(tmp_path / "tables" / "table1.csv").set_index(["row", "benchmark"])
    ours = table.loc["llama3.1-8b-rlmt"]
    assert ours.ours["Avg_Chat"] == pytest.approx(21) and ours.ours["Avg"] == pytest.approx(283 / 7)
    assert (
        ours.difference["Avg"] == pytest.approx(283 / 7 - ours.paper["Avg"])
        and ours.status["Avg"] == "measured"
    )
    assert ours.wording["WB"] == "our own" and pd.isna(ours.wording["PopQA"]) and pd.isna(ours.wording["Avg"])
    released = table.loc["llama3.1-8b-rlmt-as-released"]
    assert released.ours["Avg_Chat"] == pytest.approx(21) and pd.isna(released.ours["Avg"])
    assert (released.paper == table.loc["llama3.1-8b-rlmt"].paper).all()
    assert table.loc[("llama3.1-8b-rlhf", "WB")].wording == "unknown"
    assert pd.isna(table.loc[("llama3.1-8b-rlhf", "Avg_Chat")].ours)  # a column is missing
    assert pd.isna(table.loc[("qwen2.5-7b-rlmt", "Avg_Chat")].ours)  # of two seeds and of one
    assert "| 21.0 (" in next(line for line in text.splitlines() if line.startswith("| llama3.1-8b-rlmt |"))

    assert tables.AVERAGED in text
    of_wb = "Judge's instructions of WB: eval_template.pairwise 0123 (llama3.1-8b-rlmt-as-released); unknown (llama3.1-8b-rlhf);"
    assert of_wb in text and "our own (llama3.1-8b-rlmt, qwen2.5-7b-rlmt)." in text
    assert "WB: not to be compared, as judge, instructions or tasks differ" in text
    mixed = "Avg_Chat of llama3.1-8b-rlmt-as-released is over unlike instructions: WB eval_template.pairwise 0123, "
    assert mixed + "AE2 eval_template.score 4567, AH2 our own." in text and text.count("is over unlike") == 1


def test_the_averages_of_the_paper_are_the_means_of_its_columns():
    """But for the two that data/paper/rlmt_tables_avg_check.csv names."""
    printed = tables.printed_numbers()
    keys = ["table", "section", "model_name", "backbone", "training", "thinking"]
    n_averages = 0
    wrong = []
    for key, cells in printed.groupby(keys, sort=False):
        values = dict(zip(cells["benchmark"], cells["value"].astype(float)))
        for average, columns in tables.AVERAGES.items():
            if average in values:
                n_averages += 1
                mean = sum(values[column] for column in columns) / len(columns)
                if abs(mean - values[average]) > 0.0501:
                    wrong.append((key[0], average, values[average]))
    assert n_averages == 171
    assert wrong == [("4", "Avg", 41.0), ("10", "Avg4", 30.2)]
    assert set(printed["benchmark"]) == tables.BENCHMARKS.keys() | tables.AVERAGES.keys()


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
    tables.render(tmp_path, {"1": ROWS["1"]})
    table = pd.read_csv(tmp_path / "tables" / "table1.csv").query("benchmark == 'WB'").set_index("row")
    one, none = table.loc["llama3.1-8b-rlmt"], table.loc["llama3.1-8b-rlhf"]
    assert (one.ours, one.low, one.high, one.seeds, one.status) == (40, 30, 50, 1, "measured")
    assert (
        pd.isna(none.ours) and none.seeds == 0 and none.status == "no headline" and pd.isna(none.difference)
    )


def test_every_printed_number_is_in_a_table(tmp_path):
    tables.render(tmp_path, ROWS)
    written = pd.concat([pd.read_csv(tmp_path / "tables" / f"table{t}.csv") for t in PAPER_TABLES])
    printed = tables.printed_numbers()
    written = written[~written["row"].str.endswith(tables.AS_RELEASED)]
    assert len(written) == len(printed) and sorted(written.paper) == sorted(printed.value.astype(float))
    assert set(written.status) == {"not yet run", "model of others"}


def test_the_committed_tables_are_those_of_the_committed_figures(tmp_path):
    """Letter by letter: results/tables/ is what results/**/runs.csv gives today."""
    (tmp_path / "toy").mkdir()
    shutil.copy(ROOT / "results" / "toy" / "runs.csv", tmp_path / "toy")
    texts = tables.render(tmp_path, ROWS)
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
    settings = f'set -e\n: "${{SEED:=0}}"\njob() {{ python {folder}/job.py --out "$RESULTS/$@"; }}\n\n'
    (folder / "experiments" / "toy.sh").write_text(settings + blocks)
    monkeypatch.setattr(reproduce, "EXPERIMENTS", folder / "experiments")
    return reproduce.read_blocks()


def make(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{}")


CHAIN = """# stage: data
job data

# stage: sft
# needs: data
job sft-s$SEED --resume

# row: toy/rl
# needs: sft
# It takes an hour.
job rl-s$SEED --resume
job rl-s$SEED--gold --resume
"""


def planned(root: Path, blocks: dict, *names: str, seeds=(0,)) -> list[tuple[str, int]]:
    args = reproduce.Args(table="toy", seeds=seeds)
    return [tuple(job) for job in reproduce.plan(args, [blocks[name] for name in names], blocks, root)]


def run(root: Path, blocks: dict, *names: str, seeds=(0,), lanes=1) -> None:
    args = reproduce.Args(table="toy", seeds=seeds, lanes=lanes)
    jobs = reproduce.plan(args, [blocks[name] for name in names], blocks, root)
    reproduce.run_jobs(jobs, blocks, args, root)


def test_only_what_is_missing_runs_and_in_order(tmp_path, monkeypatch, capsys):
    blocks = experiments(tmp_path, monkeypatch, CHAIN)
    both = [("data", 0), ("sft", 0), ("toy/rl", 0), ("sft", 1), ("toy/rl", 1)]
    assert planned(tmp_path, blocks, "toy/rl", seeds=(0, 1)) == both
    run(tmp_path, blocks, "toy/rl", seeds=(0, 1), lanes=2)
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "data" and len(order) == 7
    for seed in (0, 1):
        one = [name for name in order if f"-s{seed}" in name]
        assert one == [f"sft-s{seed}", f"rl-s{seed}", f"rl-s{seed}--gold"]
    assert "5 of 5" in capsys.readouterr().out
    assert planned(tmp_path, blocks, "toy/rl", seeds=(0, 1)) == []

    make(tmp_path, "rl-s0/command.txt", "rl-s0--gold/command.txt", "sft-s0/command.txt", "sft-s1/command.txt")
    (tmp_path / "rl-s1--gold" / "summary.json").unlink()  # interrupted; its data is made again
    assert planned(tmp_path, blocks, "toy/rl", seeds=(0, 1)) == [("data", 0), ("toy/rl", 1)]


def test_a_run_that_needs_weights_where_only_figures_are_is_refused(tmp_path, monkeypatch, capsys):
    blocks = experiments(tmp_path, monkeypatch, CHAIN)
    make(tmp_path, "sft-s0/summary.json", "rl-s0--gold/summary.json")  # as they are in git
    assert planned(tmp_path, blocks, "toy/rl") == []
    assert "not run again: rl-s0" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "rl-s0--gold")
    with pytest.raises(SystemExit) as e:
        planned(tmp_path, blocks, "toy/rl")
    assert e.value.code == 2 and "figures of sft-s0, but not its weights" in capsys.readouterr().err


def test_a_failure_ends_what_runs_beside_it(tmp_path, monkeypatch, capsys):
    blocks = experiments(
        tmp_path,
        monkeypatch,
        "# row: toy/a\njob a --fail --resume\njob after --resume\n\n# row: toy/b\njob b --sleep --resume\n",
    )
    began = time.monotonic()
    with pytest.raises(SystemExit) as e:
        run(tmp_path, blocks, "toy/a", "toy/b", lanes=2)
    assert "toy/a failed; its log is" in str(e.value) and "broken on purpose" in capsys.readouterr().out
    assert time.monotonic() - began < 30 and not (tmp_path / "after").exists()
    time.sleep(0.5)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path / "job.py") not in running  # neither bash nor what it had started


def test_a_toy_row_for_real(tmp_path, monkeypatch, capsys):
    """The base model on two tasks: run, found again, in the table; what came with git is named and left as it is."""
    row = "toy-prompted-think"
    (tmp_path / "experiments").mkdir()
    shutil.copy(ROOT / "experiments" / "rewards.sh", tmp_path / "experiments")
    (tmp_path / "experiments" / "toy.sh").write_text(
        'set -e\n: "${SEED:=0}"\nexport HF_HUB_OFFLINE=1\n\n# stage: data\n'
        f'python -m data.toy.world --out "{tmp_path}/data" --n-traces 8 --n-prompts 8 --n-pairs 8 --n-tasks 2 --n-held-out 2\n\n'
        f"# row: toy/{row}\n# needs: data\npython eval_wildbench.py --model data/toy/base --think-format plain "
        f'--tasks "{tmp_path}/data/benchmark_tasks.jsonl" --judge data/toy/world.py:judge --temperatures 1.0 --max-tokens 96 --rollout hf --seed "$SEED" '
        f'--out "$RESULTS/{row}-s$SEED--gold" --resume\n'
    )
    monkeypatch.setattr(reproduce, "EXPERIMENTS", tmp_path / "experiments")
    args = reproduce.Args(table="toy", row=row, run=True, results=tmp_path)
    reproduce.main(args)
    assert f"toy/{row} s0 is done, 2 of 2" in capsys.readouterr().out
    block = reproduce.read_blocks()[f"toy/{row}"]
    assert reproduce.status(tmp_path / "toy", block, 0) == "done"
    table = pd.read_csv(tmp_path / "tables" / "toy.csv").set_index(["row", "benchmark"])
    gold = table.loc[(row, "gold, T=1")]
    task_means = pd.read_csv(tmp_path / "toy" / f"{row}-s0--gold" / "task_means.csv")
    assert len(task_means) == 2 and task_means["mean"].mean() == pytest.approx(gold.ours, abs=1e-4)
    assert gold.seeds == 1 and gold.low < gold.ours < gold.high and pd.isna(gold.seed_low)

    reproduce.main(args)
    assert capsys.readouterr().out == ""
    (tmp_path / "toy" / f"{row}-s0--gold" / "command.txt").unlink()
    reproduce.main(args)
    out = capsys.readouterr().out
    assert f"not run again: {row}-s0" in out and "--results DIR" in out


def test_status_of_a_run_and_of_a_row_that_trains_nothing(tmp_path):
    for name, files in (
        *(("a-s0", 2), ("a-s0--gold", 2)),
        ("b-s0--gold", 2),
        ("c-s0--gold", 0),
        *(("e-s0", 1), ("e-s0--gold", 1)),
        ("f-s0", 2),
        *(("g-s0", 0), ("g-s0--gold", 2)),
    ):
        (tmp_path / name).mkdir()
        make(tmp_path / name, *("summary.json", "command.txt")[:files])
    block = {name: reproduce.Block(f"toy/{name}", "", "") for name in "abcdefg"}
    status = {name: reproduce.status(tmp_path, block[name], 0) for name in "abcdefg"}
    assert status.pop("f") == status.pop("g") == "interrupted"  # no evaluation yet; a training that goes on
    assert status == {"a": "done", "b": "done", "c": "interrupted", "d": "not yet run", "e": "figures only"}
    assert reproduce.status(tmp_path, reproduce.Block("f", "", ""), 0) == "done"  # a stage is its run alone


# --- the demo


def test_the_demo_runs_and_evaluates_every_row_of_its_table():
    outs = [
        Path(words[words.index("--out") + 1]).name for words in commands_of("demo.sh") if "--out" in words
    ]
    trained = list(demo_tables.ROWS.values())
    assert sorted(outs) == sorted([*trained, *(f"eval-{name}" for name in trained), "reward"])
    assert commands_of("demo.sh")[0] == ["python", "-m", "data.toy.world"]
    assert commands_of("demo.sh")[-1][:3] == ["python", "-m", "experiments.demo_tables"]


# --- small.sh


def small_commands(results: Path, **variables: str) -> list[list[str]]:
    script = (ROOT / "experiments" / "small.sh").read_text()
    return expand(script, {**variables, "RESULTS": str(results), "DATA": str(results)})


def test_small_sh_makes_every_run_that_its_table_and_its_samples_read(tmp_path):
    for words in commands_of("small.sh"):
        if words[1].startswith("train_"):
            (tmp_path / "runs" / Path(words[words.index("--out") + 1]).name / "model").mkdir(parents=True)
    commands = small_commands(tmp_path)
    outs = {Path(words[words.index("--out") + 1]).name for words in commands if "--out" in words}
    names = small_samples.Args().names
    needed = small_tables.list_missing(Path("nowhere"), small_tables.Args().seeds)
    assert {*needed, *(f"samples-{name}" for name in names)} <= outs
    samples, table = commands[-2:]
    assert samples[2] == "experiments.small_samples" and samples[-len(names) - 1 :] == ["--names", *names]
    assert table[2] == "experiments.small_tables" and table[-3:] == ["--seeds", "0", "1"]


def test_small_sh_evaluates_what_is_trained_and_makes_data_once(tmp_path):
    (tmp_path / "runs" / "grpo-plain-s1" / "model").mkdir(parents=True)
    models = {words[words.index("--model") + 1] for words in small_commands(tmp_path, STAGES="evaluate")}
    assert models == {"data/smollm2", f"{tmp_path}/runs/grpo-plain-s1/model"}

    small_commands(tmp_path, STAGES="data", PROMPTS="a.jsonl")
    small_commands(tmp_path, STAGES="data", PROMPTS="a.jsonl")
    with pytest.raises(subprocess.CalledProcessError):
        small_commands(tmp_path, STAGES="data", PROMPTS="b.jsonl")
    made = small_commands(tmp_path, STAGES="data", PROMPTS="a.jsonl", MODEL="data/other")
    assert not any("smollm2" in words for words in made)
