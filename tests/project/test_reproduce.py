"""The lines of experiments/*.sh, the runner, the tables, the demo, the sweep and small.sh."""

import csv
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import pandas as pd
import pytest
import tyro

import reproduce
import rewards
from rlmt import run as runs
from benchmarks import scoring
from dev import sweep
from experiments import demo_tables, small_samples, small_tables, tables

ROOT = Path(__file__).parents[2]
EVALUATE = (ROOT / "experiments" / "evaluate.sh").read_text()
SCRIPTS = ("train_sft_warmstart", "train_grpo", "train_ppo", "train_dpo")
PAPER_TABLES = ("1", "2", "3", "4", "8", "9", "10")
BLOCKS = reproduce.read_blocks()
ROWS = reproduce.table_rows(BLOCKS)

# bash reads this before a script: then no command runs, and its words go to the file COMMANDS
HOOK = r"""
record() { printf '%s\0' "$@" $'\n' >> "$COMMANDS"; }
python() { record python "$@"; }
accelerate() { record accelerate "$@"; }
export -f record python accelerate
"""


def expand(script: str, **variables: str) -> list[list[str]]:
    """Lists the words of every command of a script, as bash expands them."""
    with tempfile.TemporaryDirectory() as folder:
        commands = Path(folder) / "commands"
        commands.touch()
        variables = {"COMMANDS": str(commands), **variables}
        subprocess.run(["bash", "-c", HOOK + script], cwd=ROOT, env=os.environ | variables, check=True)
        text = commands.read_text()
    return [command.split("\0")[:-1] for command in text.split("\n\0")[:-1]]


def commands_of(file: str, **variables: str) -> list[list[str]]:
    return expand((ROOT / "experiments" / file).read_text(), **variables)


def parse(words: list[str], monkeypatch):
    """Parses a command as its script does; of a server and its command ("... -m data.toy.judge -- ...") the latter."""
    words = words[words.index("--") + 1 :] if "--" in words else words
    if words[1] == "-m":
        name, flags = words[2], words[3:]
    else:
        script = next(word for word in words if word.endswith(".py"))
        name, flags = script.removesuffix(".py"), words[words.index(script) + 1 :]
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    with redirect_stdout(io.StringIO()):
        if name.startswith(("train_", "eval_")):
            presets = getattr(module, "PRESETS", {})
            return runs.parse_args(module.Args, presets, getattr(module, "RELEASED", None))
        return tyro.cli(module.Args) if hasattr(module, "Args") else flags


# --- the lines of experiments/*.sh


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


def row_of(config: str) -> str:
    """Names our row of a released config: grpo__qwenbase__zero__think is qwen2.5-7b-rlmt-zero."""
    algorithm, model, start, thinking = config.split("__")
    row = MODELS[model] + {"think": "-rlmt", "nothink": "-rlhf"}[thinking]
    if start == "zero":
        row += "-zero"
    return row + {"grpo": "", "ppo": "-ppo"}[algorithm]


def args_of(row: str, monkeypatch, **variables: str):
    """The arguments with which a row of the paper's is trained."""
    return parse(reproduce.commands_of(BLOCKS[row], {"RESULTS": "r", **variables})[0], monkeypatch)


def test_rows_as_released_have_the_values_of_the_released_configs(monkeypatch):
    configs = released_configs()
    assert len(configs) == 14
    for name, config in configs.items():
        args = args_of(row_of(name), monkeypatch, AS_RELEASED="--as-released")
        batch = int(config["train batch size (prompts)"])
        assert args.prompts_per_step == batch, name
        assert args.updates_per_rollout == batch / int(config["mini-batch size (prompts)"]), name
        assert int(config["update epochs per batch"]) == 1
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
        # of the steps that were saved it is the nearest to the README's 135
        last = int(config["epochs"]) * (7544 // batch)
        saved = [*range(args.save_steps, last, args.save_steps), last]
        assert args.steps == min(saved, key=lambda step: abs(step - 135)), name
        if name.startswith("grpo"):
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


def test_released_values_need_a_preset_that_was_released(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(["python", "train_grpo.py", "--preset", "toy", "--as-released"], monkeypatch)
    assert "nothing was released for preset 'toy'" in capsys.readouterr().err


def test_every_command_is_parsed_by_its_script_and_twins_differ_in_thinking_alone(monkeypatch):
    parsed = {}
    for block in BLOCKS.values():
        for released in ("", "--as-released"):
            variables = {"RESULTS": "r", "AS_RELEASED": released}
            for words in reproduce.commands_of(block, variables):
                if "experiments/evaluate.sh" not in words:
                    parsed[block.name, released] = parse(words, monkeypatch)
    assert len(parsed) > 250
    for args in parsed.values():
        if hasattr(args, "rewards"):
            assert rewards.read_parts(args)

    own = {"think_format": "", "model": "", "out": "", "as_released": ""}
    n_twins = 0
    for (name, released), args in parsed.items():
        twin = parsed.get((name.replace("-rlmt", "-rlhf").replace("-think", "-plain"), released))
        if released or twin in (None, args) or not hasattr(args, "learning_rate"):
            continue  # a few released configs have another batch or other steps than their twin's
        assert vars(args) | own == vars(twin) | own, name
        n_twins += 1
    assert n_twins > 30


def test_the_list_has_every_row_one_a_line(tmp_path, capsys):
    reproduce.main(reproduce.Args(list=True, results=tmp_path))
    listed = {table: [] for table in reproduce.TABLES}
    for line in capsys.readouterr().out.splitlines():
        _, table, row, state = line.split(maxsplit=3)
        listed[table].append(row)
        assert re.fullmatch(r"s0: (done|figures only|interrupted|not yet run)", state)
    assert (len(listed.pop("toy")), len(listed.pop("rewards"))) == (22, 29)

    printed = tables.printed_numbers()
    ours = printed[printed["row"] != ""]
    trained = {name for name in BLOCKS if "/" not in name}
    trained |= {row for row in ours["row"] if "-sft-" in row}
    for table, rows in listed.items():
        n_as_released = sum(row.endswith(tables.AS_RELEASED) for row in rows)
        of_table = list(ours[ours["table"] == table]["row"].unique())
        assert rows[n_as_released:] == of_table
        if table in ("1", "3"):
            as_released = {row.removesuffix(tables.AS_RELEASED) for row in rows[:n_as_released]}
            needs = {row for row in of_table if row in trained and f"table{table}/{row}" in BLOCKS}
            assert as_released <= needs
    others = printed[printed["row"] == ""]  # they cannot be had
    assert set(others["model_name"]) == {"Claude3.7-Sonnet", "Llama3.1-8B-BLEUBERI"}


def test_a_row_is_evaluated_on_every_benchmark_that_its_table_prints():
    for table in PAPER_TABLES:
        for row, block in ROWS[table].items():
            columns = tables.printed_cells(table, row)["benchmark"]
            wanted = {tables.BENCHMARKS[column][0] for column in columns if column in tables.BENCHMARKS}
            assert set(block.evaluations) == wanted, block.name


def test_one_card_looks_for_its_inputs_before_it_trains(tmp_path):
    hub = {"TRACES": "OWNER/TRACES", "PROMPTS": "OWNER/PROMPTS:train", "RESULTS": str(tmp_path)}
    script = (ROOT / "experiments" / "1gpu.sh").read_text()
    given = os.environ | hub | {"TRACES": "data/none.jsonl", "BENCHMARKS": ""}
    done = subprocess.run(["bash", "-c", HOOK + script], cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: missing: data/none.jsonl; README.md")

    commands = [" ".join(command) for command in commands_of("1gpu.sh", **hub, BENCHMARKS="popqa")]
    kinds = ["eval", "sft", "sft", "eval", "eval", "grpo", "grpo", "eval", "eval"]
    assert [re.search("eval|sft|grpo", command)[0] for command in commands] == kinds
    assert "--model Qwen/Qwen2.5-1.5B --dry-run" in commands[0]
    assert not any("--dry-run" in command for command in commands[1:])


def shown(name: str, capsys, **fields) -> list[str]:
    reproduce.main(reproduce.Args(show=name, **fields))
    return capsys.readouterr().out.splitlines()


def test_a_row_by_hand(capsys, monkeypatch):
    released = {"seeds": (3,), "as_released": True, "price": (2.5, 10), "budget": 20}
    lines = shown("table4/llama3.1-8b-rlhf-gpt4.1mini", capsys, **released)
    assert lines[0].startswith("export SEED=3 RESULTS=results JUDGE_FLAGS='--budget 20 --price 2.5 10' AS_RE")
    launch = "accelerate launch --config_file accelerate/8gpu_fsdp2.yaml"
    rl = "results/llama3.1-8b-rlhf-gpt4.1mini-s3"
    assert [line for line in lines[1:] if line and line[0] != "#"] == [
        f"{launch} train_sft_warmstart.py --model meta-llama/Llama-3.1-8B --think-format plain "
        "--traces data/traces_gpt4.1mini.jsonl --seed 3 --out results/llama3.1-8b-sft-plain-gpt4.1mini-s3 --resume",
        f"{launch} train_grpo.py --preset paper --as-released --think-format plain "
        f"--model results/llama3.1-8b-sft-plain-gpt4.1mini-s3/model --seed 3 --out {rl} --resume",
        f"env MAX_TOKENS=4096 THINK_FORMAT=auto MODEL_FLAGS= bash experiments/evaluate.sh {rl}/model {Path(rl).name}",
    ]
    variables = {"MAX_TOKENS": "4096", "RESULTS": "nowhere", "JUDGE_FLAGS": "--budget 20 --price 2.5 10"}
    judged, others = expand(f"set -- m n wildbench popqa\n{EVALUATE}", **variables)
    assert " ".join(judged) == (
        "python eval_wildbench.py --mode reward --orders random --temperatures 0.7 --tasks data/wildbench.jsonl "
        "--judge gpt-4o --protocol paper --budget 20 --price 2.5 10 --model m --top-p 0.95 --max-tokens 4096 "
        "--think-format auto --seed 0 --out nowhere/n--wildbench --resume"
    )
    assert "--budget" not in others  # it has no judge

    large = " ".join(shown("table2/qwen2.5-72b-instruct-released", capsys))
    assert "'MODEL_FLAGS=--tensor-parallel 4' bash experiments/evaluate.sh Qwen/Qwen2.5-72B-Instruct" in large
    theirs = " ".join(shown("table3/qwen2.5-7b-rlhf-zero-ppo-as-released", capsys))
    assert (
        "THINK_FORMAT=zero_plain" in theirs and "evaluate.sh checkpoints/qwen2.5-7b-rlhf-zero-ppo " in theirs
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"table": "7"}, "--table '7'"),
        ({"table": "1", "row": "x"}, "--row 'x'"),
        ({}, "nothing to do"),
        ({"show": "table1/x"}, "no line of experiments/*.sh has this name"),
        (
            {"table": "1", "row": "llama3.1-8b-rlmt", "run": True},
            "data/creative_writing, data/mmlu_redux, data/traces.jsonl, data/wildbench.jsonl, data/wildchat_if.jsonl must",
        ),
        ({"table": "4", "row": "llama3.1-8b-rlmt-tulu3", "run": True}, "data/tulu3_random.jsonl"),
        ({"table": "1", "row": "llama3.1-8b-rlmt", "run": True, "budget": 9.0}, "--budget needs --price"),
        ({"table": "toy", "run": True, "lanes": 0}, "--lanes 0: use 1 or more"),
        (
            {"table": "1", "row": "llama3.1-8b-rlmt-as-released", "run": True},
            "checkpoint of the paper's authors",
        ),
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
    for path in [*re.findall(r"data/[\w.]+\w", EVALUATE), "data/traces.jsonl", "data/wildchat_if.jsonl"]:
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


def test_what_is_finished_is_not_judged_again_with_templates(tmp_path):
    """Unless the model has newer weights, of which the script says that they have changed."""
    file = "alpacaeval2/eval_template.score"
    make(tmp_path, f"templates/{file}", "model/model.safetensors", "results/m--wildbench/summary.json")
    make(tmp_path, "results/m--alpacaeval2/config.json")  # was interrupted
    variables = {"RESULTS": str(tmp_path / "results"), "TEMPLATES": str(tmp_path / "templates")}

    def evaluated() -> list[str]:
        command = f"set -- {tmp_path}/model m wildbench alpacaeval2\n"
        return [" ".join(words) for words in expand(command + EVALUATE, **variables)]

    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    commands = evaluated()
    assert len(commands) == 1 and f"--template {tmp_path}/templates/{file}" in commands[0]
    os.utime(tmp_path / "results" / "m--wildbench" / "summary.json", (0, 0))
    assert len(evaluated()) == 2


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


def test_a_row_of_ones_own_stands_in_the_papers_table(tmp_path):
    write_index(tmp_path, measure(tmp_path, "mine", {}, WB=12.0))
    rows = {"1": ROWS["1"] | {"mine": reproduce.Block("table1/mine", "", "")}}
    text = tables.render(tmp_path, rows)["table1"]
    line = next(line for line in text.splitlines() if line.startswith("| mine |"))
    assert line.startswith("| mine | 12.0 |") and line.endswith("| partly measured |") and "(" not in line


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


def experiments(folder: Path, monkeypatch, lines: str) -> dict[str, reproduce.Block]:
    """Blocks of a file of one's own, whose commands leave a folder, and a line in `order`."""
    (folder / "experiments").mkdir()
    (folder / "job.py").write_text(JOB)
    job = f"python {folder}/job.py"
    settings = f'set -e\nLAUNCH="{job}"\nEVALUATE="{job}"\n. experiments/rows.sh\n\n'
    (folder / "experiments" / "mine.sh").write_text(settings + lines.replace("JOB", job))
    monkeypatch.setattr(reproduce, "EXPERIMENTS", folder / "experiments")
    return reproduce.read_blocks()


def make(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{}")


CHAIN = """prepare data JOB --out "$RESULTS/data"
stage sft needs data sft

# It takes an hour.
row mine/rl from sft grpo --steps 3
"""


def planned(root: Path, blocks: dict, *names: str, seeds=(0,)) -> list[tuple[str, int]]:
    args = reproduce.Args(table="mine", seeds=seeds)
    return [tuple(job) for job in reproduce.plan(args, [blocks[name] for name in names], blocks, root)]


def run(root: Path, blocks: dict, *names: str, seeds=(0,), lanes=1) -> None:
    args = reproduce.Args(table="mine", seeds=seeds, lanes=lanes)
    jobs = reproduce.plan(args, [blocks[name] for name in names], blocks, root)
    reproduce.run_jobs(jobs, blocks, args, root)


def test_only_what_is_missing_runs_and_in_order(tmp_path, monkeypatch, capsys):
    blocks = experiments(tmp_path, monkeypatch, CHAIN)
    both = [("data", 0), ("sft", 0), ("rl", 0), ("mine/rl", 0), ("sft", 1), ("rl", 1), ("mine/rl", 1)]
    assert planned(tmp_path, blocks, "mine/rl", seeds=(0, 1)) == both
    run(tmp_path, blocks, "mine/rl", seeds=(0, 1), lanes=2)
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "data" and len(order) == 7
    for seed in (0, 1):
        one = [name for name in order if f"-s{seed}" in name]
        assert one == [f"sft-s{seed}", f"rl-s{seed}", f"rl-s{seed}--gold"]
    assert "7 of 7" in capsys.readouterr().out
    assert planned(tmp_path, blocks, "mine/rl", seeds=(0, 1)) == []

    make(
        tmp_path,
        "rl-s0/command.txt",
        "rl-s0--gold/command.txt",
        "sft-s0/command.txt",
        "sft-s1/command.txt",
        "rl-s1/command.txt",
    )
    (tmp_path / "rl-s1--gold" / "summary.json").unlink()  # interrupted; its data is made again
    assert planned(tmp_path, blocks, "mine/rl", seeds=(0, 1)) == [("data", 0), ("mine/rl", 1)]


def test_a_run_that_needs_weights_where_only_figures_are_is_refused(tmp_path, monkeypatch, capsys):
    blocks = experiments(tmp_path, monkeypatch, CHAIN)
    make(tmp_path, "sft-s0/summary.json", "rl-s0--gold/summary.json")  # as they are in git
    assert planned(tmp_path, blocks, "mine/rl") == []
    assert "not run again: rl-s0" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "rl-s0--gold")
    with pytest.raises(SystemExit) as e:
        planned(tmp_path, blocks, "mine/rl")
    assert e.value.code == 2 and "figures of sft-s0, but not its weights" in capsys.readouterr().err


def test_a_failure_ends_what_runs_beside_it(tmp_path, monkeypatch, capsys):
    blocks = experiments(
        tmp_path,
        monkeypatch,
        "row mine/a sft --fail\nrow mine/b sft --sleep\n",
    )
    began = time.monotonic()
    with pytest.raises(SystemExit) as e:
        run(tmp_path, blocks, "mine/a", "mine/b", lanes=2)
    assert "a failed; its log is" in str(e.value) and "broken on purpose" in capsys.readouterr().out
    assert time.monotonic() - began < 30 and not (tmp_path / "a-s0--gold").exists()
    time.sleep(0.5)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path / "job.py") not in running  # neither bash nor what it had started


def test_a_row_of_ones_own_for_real(tmp_path, monkeypatch, capsys):
    """The base model on two tasks: run, found again, in the table; what came with git is named and left as it is."""
    row = "prompted"
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.sh").write_text(
        'set -e\n: "${RESULTS:=results/mine}"\nexport HF_HUB_OFFLINE=1\n'
        f'EVALUATE="python eval_wildbench.py --tasks {tmp_path}/data/benchmark_tasks.jsonl '
        '--judge data/toy/world.py:judge --temperatures 1.0 --rollout hf"\n. experiments/rows.sh\n\n'
        f'prepare data python -m data.toy.world --out "{tmp_path}/data" --n-traces 8 --n-prompts 8 --n-pairs 8 '
        "--n-tasks 2 --n-held-out 2\n"
        f"MAX_TOKENS=96 THINK_FORMAT=plain MODEL=data/toy/base row mine/{row} needs data\n"
    )
    monkeypatch.setattr(reproduce, "EXPERIMENTS", tmp_path / "experiments")
    args = reproduce.Args(table="mine", row=row, run=True, results=tmp_path)
    reproduce.main(args)
    assert f"mine/{row} s0 is done, 2 of 2" in capsys.readouterr().out
    block = reproduce.read_blocks()[f"mine/{row}"]
    assert reproduce.status(tmp_path / "mine", block, 0) == "done"
    table = pd.read_csv(tmp_path / "tables" / "mine.csv").set_index(["row", "benchmark"])
    gold = table.loc[(row, "gold, T=1")]
    task_means = pd.read_csv(tmp_path / "mine" / f"{row}-s0--gold" / "task_means.csv")
    assert len(task_means) == 2 and task_means["mean"].mean() == pytest.approx(gold.ours, abs=1e-4)
    assert gold.seeds == 1 and gold.low < gold.ours < gold.high and pd.isna(gold.seed_low)

    reproduce.main(args)
    assert capsys.readouterr().out == ""
    (tmp_path / "mine" / f"{row}-s0--gold" / "command.txt").unlink()
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
    block = {name: reproduce.Block(f"toy/{name}", "EVALUATE", "") for name in "abcdefg"}
    status = {name: reproduce.status(tmp_path, block[name], 0) for name in "abcdefg"}
    assert status.pop("f") == status.pop("g") == "interrupted"  # no evaluation yet; a training that goes on
    assert status == {"a": "done", "b": "done", "c": "interrupted", "d": "not yet run", "e": "figures only"}
    assert reproduce.status(tmp_path, reproduce.Block("f", "", ""), 0) == "done"  # a stage is its run alone


# --- the sweep


def test_a_sweep_takes_no_figures_without_weights(tmp_path, capsys):
    names = ["toy-sft-think-s0", "toy-rlmt-s0"]
    for name in names:
        make(tmp_path / "toy" / name, "summary.json", "command.txt")
        make(tmp_path / "toy" / f"{name}--gold", "summary.json", "command.txt")
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


def test_a_run_is_stopped_when_its_step_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "CHECKPOINT_SECONDS", 0.5)
    script = tmp_path / "job.py"
    script.write_text(
        "import json, pathlib, sys, time\nout = pathlib.Path(sys.argv[1])\n(out / 'checkpoint-1').mkdir(parents=True)\n"
        "for step in range(1, 1000):\n    time.sleep(0.3)\n"
        "    with open(out / 'held_out.jsonl', 'a') as f:\n"
        "        f.write(json.dumps({'step': step, 'gold': 0.5}) + '\\n')\n"
    )
    block = reproduce.Block("job", "", f'python "{script}" "$RESULTS/job-s$SEED"\n')
    args = reproduce.Args()
    sweep.train_until(block, 0, 3, args, tmp_path)
    reached = sweep.held_out(tmp_path / "job-s0")[-1]["step"]
    assert 3 <= reached < 100
    sweep.train_until(block, 0, 3, args, tmp_path)  # is there already
    assert sweep.held_out(tmp_path / "job-s0")[-1]["step"] == reached
    script.write_text("raise SystemExit(1)")
    with pytest.raises(SystemExit):
        sweep.train_until(block, 1, 1, args, tmp_path)


# --- the demo


def test_the_demo_runs_and_evaluates_every_row_of_its_table():
    outs = [
        Path(words[words.index("--out") + 1]).name
        for words in commands_of("demo.sh", LANES="1")
        if "--out" in words
    ]
    trained = list(demo_tables.ROWS.values())
    assert sorted(outs) == sorted([*trained, *(f"eval-{name}" for name in trained), "reward"])
    assert commands_of("demo.sh", LANES="1")[0] == ["python", "-m", "data.toy.world"]
    assert commands_of("demo.sh", LANES="1")[-1][:3] == ["python", "-m", "experiments.demo_tables"]


# --- small.sh


def small_commands(results: Path, **variables: str) -> list[list[str]]:
    script = (ROOT / "experiments" / "small.sh").read_text()
    return expand(script, **variables, RESULTS=str(results), DATA=str(results))


def test_small_sh_makes_every_run_that_its_table_and_its_samples_read(tmp_path):
    for words in commands_of("small.sh", RESULTS=str(tmp_path)):
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
