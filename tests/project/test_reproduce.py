"""The lines of experiments/*.sh, the runner, the tables and the demo."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from test_readme import split_command

from conftest import ROOT
import reproduce
import rewards
from benchmarks import scoring
from experiments import tables
from rlmt.run import RLArgs

PAPER_TABLES = ("1", "2", "3", "4", "8", "9", "10")
BLOCKS = reproduce.read_blocks()
ROWS = reproduce.table_rows(BLOCKS)


def parse_line(line: str, parse):
    """Parses a command as its script does; of a server and its command ("... -m data.toy.judge -- ...") the
    latter."""
    words = shlex.split(line, comments=True)
    words = words[words.index("--") + 1 :] if "--" in words else words
    return parse(*split_command(shlex.join(words)))


# --- the lines of experiments/*.sh


SFT = {
    "batch size": "batch_size",
    "epochs": "epochs",
    "learning rate": "learning_rate",
    "warmup ratio": "warmup_ratio",
    "weight decay": "weight_decay",
}
RL = {
    "batch size (prompts per step)": "prompts_per_step",
    "max prompt length": "max_prompt_tokens",
    "max response length": "max_completion_tokens",
    "steps": "steps",
    "actor learning rate": "learning_rate",
    "weight decay": "weight_decay",
}
DEFAULTS = {  # script: table of the paper, and the field of each of its parameters
    "train_sft_warmstart": ("5", SFT),
    "train_dpo": ("6", SFT | {"responses per prompt": "samples_per_prompt", "DPO beta": "beta"}),
    "train_grpo": ("7", RL | {"responses per prompt (GRPO only)": "group_size", "KL coefficient": "beta"}),
    "train_ppo": (
        "7",
        RL | {"critic learning rate (PPO only)": "critic_learning_rate", "KL coefficient": "kl_coef"},
    ),
}


def hyperparameters() -> list[dict[str, str]]:
    """Reads what the paper prints, and the released configs: one row a value."""
    return pd.read_csv(ROOT / "data/paper/hyperparameters.csv", dtype=str).to_dict("records")


def test_defaults_are_the_papers():
    for script, (table, fields) in DEFAULTS.items():
        of_table = [row for row in hyperparameters() if row["source"] == f"paper table {table}"]
        printed = {row["parameter"]: row["value"] for row in of_table}
        args = importlib.import_module(script).Args()
        for parameter, field in fields.items():
            assert getattr(args, field) == float(printed[parameter].split()[0]), (script, parameter)


MODELS = {
    "llamabase": "llama3.1-8b",
    "llamainstruct": "llama3.1-8b-instruct",
    "qwenbase": "qwen2.5-7b",
    "qweninstruct": "qwen2.5-7b-instruct",
}


def released_configs() -> dict[str, dict[str, str]]:
    """Returns the 14 released configs of GRPO and PPO, by name."""
    configs = {}
    for row in hyperparameters():
        if row["source"] == "released verl config":
            configs.setdefault(row["setting"], {})[row["parameter"]] = row["value"]
    assert len(configs) == 14
    return configs


def row_of(config: str) -> str:
    """Names our row of a released config: grpo__qwenbase__zero__think is qwen2.5-7b-rlmt-zero."""
    algorithm, model, start, thinking = config.split("__")
    row = MODELS[model] + {"think": "-rlmt", "nothink": "-rlhf"}[thinking]
    if start == "zero":
        row += "-zero"
    return row + {"grpo": "", "ppo": "-ppo"}[algorithm]


def args_of(row: str, parse):
    """Returns the arguments with which --as-released trains a row of the paper's."""
    [line] = reproduce.commands_of(BLOCKS[row].command, {"RESULTS": "r", "AS_RELEASED": "-as-released"})
    return parse_line(line, parse)


@pytest.mark.parametrize("name, config", released_configs().items())
def test_rows_as_released_have_the_values_of_the_released_configs(name, config, parse):
    args = args_of(row_of(name), parse)
    batch = int(config["train batch size (prompts)"])
    assert args.prompts_per_step == batch
    assert args.updates_per_rollout == batch / int(config["mini-batch size (prompts)"])
    assert int(config["update epochs per batch"]) == 1
    assert args.max_prompt_tokens == int(config["max prompt length"])
    assert args.max_completion_tokens == int(config["max response length"])
    assert args.temperature == float(config["rollout temperature"])
    assert args.learning_rate == float(config["actor learning rate"])
    assert args.weight_decay == float(config["actor weight decay"])
    assert args.epsilon == (float(config["clip ratio"]),) * 2
    assert args.entropy_coef == float(config["entropy coefficient"])
    assert args.save_steps == int(config["checkpoint every (steps)"])
    assert args.on_bad_format == {"True": "null", "False": "score"}[config["strict option"]]
    assert args.reward_on == "response" and args.reward_model.endswith(config["reward model"])
    # of the steps that were saved it is the nearest to the README's 135
    last = int(config["epochs"]) * (7544 // batch)
    saved = [*range(args.save_steps, last, args.save_steps), last]
    assert args.steps == min(saved, key=lambda step: abs(step - 135))
    if name.startswith("grpo"):
        assert args.top_p == float(config["rollout top_p"])
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


def test_every_command_is_parsed_by_its_script_and_twins_differ_in_thinking_alone(parse):
    commands = {}
    for path in {block.file for block in BLOCKS.values()}:
        for released in ("", "-as-released"):
            variables = {"RESULTS": "r", "AS_RELEASED": released}
            for line in reproduce.commands_of(["bash", str(path)], variables):
                if "experiments/evaluate.sh" not in line and not line.startswith("'sed'"):
                    name = line.partition("'--out'")[2] or line
                    commands[name, released] = re.sub("'r/[^']*'", "r", line)  # the folder does not matter
    assert len(commands) > 250
    args_of_line = {line: parse_line(line, parse) for line in set(commands.values())}
    for args in args_of_line.values():
        if isinstance(args, RLArgs):
            assert rewards.read_parts(args.rewards, args.reward_args)

    parsed = {name: args_of_line[line] for name, line in commands.items()}
    own = dict.fromkeys(["think_format", "ask_thinking", "preset", "model", "out"])
    n_twins = 0
    for (name, released), args in parsed.items():
        twin = parsed.get((name.replace("-rlmt", "-rlhf").replace("-think", "-plain"), released))
        if released or twin in (None, args) or not hasattr(args, "learning_rate"):
            continue  # a few released configs have another batch or other steps than their twin's
        assert vars(args) | own == vars(twin) | own, name
        n_twins += 1
    assert n_twins > 30


def test_a_row_is_evaluated_on_every_benchmark_that_its_table_prints():
    printed = tables.printed_numbers()
    for table in PAPER_TABLES:
        for row, block in ROWS[table].items():
            of_row = row.removesuffix(tables.AS_RELEASED)
            columns = printed.loc[(printed["table"] == table) & (printed["row"] == of_row), "benchmark"]
            wanted = {tables.BENCHMARKS[column][0] for column in columns if column in tables.BENCHMARKS}
            assert set(block.evaluations) == wanted, block.name


def test_commands_are_shown_after_those_of_what_they_need(capsys):
    reproduce.main(reproduce.Args(show="table4/llama3.1-8b-rlhf-gpt4.1mini", as_released=True, seeds=(1,)))
    export, *lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert export == "export SEED=1 RESULTS=results/as-released AS_RELEASED=-as-released"
    plain = "llama3.1-8b-sft-plain-gpt4.1mini"
    row = "llama3.1-8b-rlhf-gpt4.1mini"
    assert lines[::2] == [f"# {plain}", f"# {row}", f"# table4/{row}"]
    model = f"results/as-released/{plain}-s1/model"
    assert f"--preset paper-as-released --think-format plain --model {model}" in lines[3]


def test_every_row_is_listed_with_what_is_done(tmp_path, capsys):
    make(tmp_path / "toy", *[f"toy-rlmt-s0{ending}/summary.json" for ending in ("", "--gold")])
    make(tmp_path, "llama3.1-8b-rlmt-s0/config.json")
    reproduce.main(reproduce.Args(list=True, results=tmp_path))
    lines = capsys.readouterr().out.splitlines()
    states = {tuple(line.split()[1:3]): line.partition("s0: ")[2] for line in lines}
    assert len(states) == len(lines) == sum(map(len, ROWS.values())) > 200
    assert states["toy", "toy-rlmt"] == "done" and states["toy", "toy-rlhf"] == "not yet run"
    assert states["1", "llama3.1-8b-rlmt"] == "unfinished"


# --- tables


def write_index(folder: Path, lines: list[dict]) -> None:
    """Writes runs.csv; what a line does not say is that of WildBench, measured on the paper's tasks."""
    common = {
        "time": "2025",
        "model": "m",
        "benchmark": "x",
        "metric": "wb_reward",
        "n": 1024,
        "n_invalid": 0,
        "temperature": 0.7,
    }
    folder.mkdir(parents=True, exist_ok=True)
    rows = [common | line for line in lines]
    pd.DataFrame(rows, columns=list(scoring.INDEX_COLUMNS)).to_csv(folder / "runs.csv", index=False)


def rendered(folder: Path, table: str) -> tuple[str, pd.DataFrame]:
    """Renders a table; returns it as Markdown and, by row and column, as numbers."""
    text = reproduce.render(folder, {table: ROWS[table]})[f"table{table}"]
    return text, pd.read_csv(folder / "tables" / f"table{table}.csv").set_index(["row", "benchmark"])


def test_tables_by_hand(tmp_path):
    for seed, means in enumerate([(0.6, 0.0), (0.04, 0.64)]):
        shared = {"benchmark": "x", "metric": "accuracy_paper", "temperature": 0.7}
        rows = [shared | {"task": task, "mean": mean} for task, mean in zip("ab", means)]
        run = tmp_path / f"llama3.1-8b-rlmt-s{seed}--popqa"
        run.mkdir()
        pd.DataFrame(rows, columns=list(scoring.TASK_COLUMNS)).to_csv(run / "task_means.csv", index=False)

    rlmt = "llama3.1-8b-rlmt-s0"
    popqa = {"metric": "accuracy_paper", "value": 0.3, "low": 0.28, "high": 0.32}
    lines = [
        {"run": f"{rlmt}--wildbench", "value": 40.0},
        {"run": f"{rlmt}--wildbench", "time": "2026", "value": 44.0, "low": 41, "high": 47},  # again
        {"run": f"{rlmt}--popqa", "metric": "accuracy", "value": 0.9},  # not the paper's rule
        popqa | {"run": f"{rlmt}--popqa", "n": 50, "n_invalid": 3},
        popqa | {"run": "llama3.1-8b-rlmt-s1--popqa", "value": 0.34, "n": 50},
        {"run": f"{rlmt}--alpacaeval2", "metric": "lc_win_rate_paper", "value": 52.0},
        {"run": "llama3.1-8b-rlmt-s1--alpacaeval2", "metric": "lc_win_rate_paper", "value": 54.0},
        {"run": "llama3.1-8b-rlhf-s0--wildbench", "value": None},  # too many verdicts were invalid
    ]
    write_index(tmp_path, lines)
    text, table = rendered(tmp_path, "1")
    wb, popqa = table.loc[("llama3.1-8b-rlmt", "WB")], table.loc[("llama3.1-8b-rlmt", "PopQA")]
    assert (wb.ours, wb.low, wb.high, wb.seeds, wb.status) == (44, 41, 47, 1, "measured")
    assert wb.difference == pytest.approx(44 - wb.paper)
    assert popqa.ours == pytest.approx(32) and popqa.seeds == 2
    # accuracy is a share: 0.32 of the two tasks, by Wilson over tasks, however much a seed differs
    assert (popqa.low, popqa.high) == pytest.approx((4.2, 83.5), abs=0.1)
    none = table.loc[("llama3.1-8b-rlhf", "WB")]
    assert pd.isna(none.ours) and (none.seeds, none.status) == (0, "no headline")
    shown = next(line for line in text.splitlines() if line.startswith("| llama3.1-8b-rlmt |"))
    assert "44.0 ± 3.0 (" in shown and "32.0 [4.2, 83.5] (" in shown
    # AE2's number is no mean over tasks, so over seeds: t of one degree, sd of 52 and 54, sqrt(2), / sqrt(2)
    assert "| 53.0 ± 12.7 (" in shown and shown.endswith("partly measured |")


def test_a_table_says_how_its_columns_were_measured(tmp_path):
    lines = []
    for row, tokens, words in (("rlmt", 8192, "popqa.py 1a2b3c"), ("rlhf", 4096, "our own")):
        run = tmp_path / f"llama3.1-8b-{row}-s0--popqa"
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"args": {"top_p": 0.95, "max_tokens": tokens}}))
        (run / "summary.json").write_text(json.dumps({"wording": words}))
        lines.append({"run": run.name, "metric": "accuracy_paper", "value": 0.3})
    lines.append({"run": "llama3.1-8b-rlmt-s0--wildbench", "value": 40.0, "judge": "gpt-4o"})
    write_index(tmp_path, lines)
    text = rendered(tmp_path, "1")[0]
    sampling = "temperature 0.7, top-p 0.95, {} tokens at most (llama3.1-8b-{})"
    sides = "; ".join([sampling.format(4096, "rlhf"), sampling.format(8192, "rlmt")])
    assert f"Sampling of PopQA: {sides}." in text
    assert "of PopQA: our own (llama3.1-8b-rlhf); popqa.py 1a2b3c (llama3.1-8b-rlmt)." in text
    assert "Judge or simulated user of WB: gpt-4o." in text


def test_a_table_of_ones_own_shows_all_kinds_of_rows(tmp_path):
    kinds = {"small": ("wildbench-rm",), "toy": ("gold",)}
    blocks = {row: reproduce.Block("row", row, "", kinds[row], (), ROOT) for row in kinds}
    proxy = {"run": "small-s0--wildbench-rm", "metric": "mean_reward", "value": 1.5}
    gold = {"run": "toy-s0--gold", "metric": "score", "value": 0.25, "judge": "world.py:judge"}
    write_index(tmp_path, [proxy | {"benchmark": "wildbench"}, gold])
    text = reproduce.render(tmp_path, {"mine": blocks})["mine"]
    head = "| row | {} |\n|---|---|\n"
    assert head.format("wildbench mean_reward") + "| small | 1.500 |" in text
    assert head.format("gold") + "| toy | 0.250 |" in text


def test_the_committed_tables_are_those_of_the_committed_figures(tmp_path):
    """Letter by letter: results/tables/ is what results/**/runs.csv gives today."""
    shutil.copytree(ROOT / "results" / "toy", tmp_path / "toy")
    reproduce.render(tmp_path, ROWS)
    committed = {path.name: path.read_text() for path in (ROOT / "results" / "tables").iterdir()}
    assert committed == {path.name: path.read_text() for path in (tmp_path / "tables").iterdir()}


# --- the runner

JOB = """
import pathlib, sys
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
out.mkdir(exist_ok=True)
with open(out.parent / "order", "a") as f:
    f.write(out.name + " ")
if "--fail" in words:
    sys.exit("broken on purpose")
if "--resume" in words:
    (out / "summary.json").write_text("{}")
"""


def experiments(folder: Path, monkeypatch, lines: str, settings: str) -> dict[str, reproduce.Block]:
    """Returns the blocks of a file of one's own."""
    (folder / "experiments").mkdir()
    text = f"set -e\n{settings}\n. experiments/rows.sh\n\n{lines}"
    (folder / "experiments" / "mine.sh").write_text(text)
    monkeypatch.setattr(reproduce, "EXPERIMENTS", folder / "experiments")
    return reproduce.read_blocks()


def make(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{}")


CHAIN = """prepare data $LAUNCH --out "$RESULTS/data"
stage sft needs data sft

# It takes an hour.
row mine/rl from sft grpo --steps 3
row mine/broken from sft grpo --fail
"""


def test_only_what_is_missing_runs_and_in_order(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(JOB)  # leaves a folder, and a word in `order`
    job = f'"python {tmp_path}/job.py"'
    blocks = experiments(tmp_path, monkeypatch, CHAIN, f"LAUNCH={job} EVALUATE={job}")
    variables = {"RESULTS": str(tmp_path)}

    def planned(name: str) -> list[reproduce.Job]:
        return reproduce.plan([blocks[name]], (0, 1), blocks, tmp_path)

    reproduce.run_jobs(planned("mine/rl"), variables, tmp_path)
    done = "data sft-s0 rl-s0 rl-s0--gold sft-s1 rl-s1 rl-s1--gold"
    assert (tmp_path / "order").read_text().split() == done.split()
    assert planned("mine/rl") == []

    (tmp_path / "rl-s1--gold" / "summary.json").unlink()  # interrupted; its data is made again
    assert planned("mine/rl") == [(blocks["data"], 0), (blocks["mine/rl"], 1)]
    with pytest.raises(SystemExit, match="broken s0 failed; its log is .* continues from here"):
        reproduce.run_jobs(planned("mine/broken"), variables, tmp_path)


# of the model from which the chain of a run starts, of data that are not there yet, and without the hub
TRIED = """prepare data python -m data.toy.world --out "$RESULTS/data"
stage sft needs data sft --preset toy --traces "$RESULTS/data/sft_traces.jsonl"
row mine/good from sft grpo $GRPO
stage typo from sft grpo $GRPO --betta 0
stage choice from sft grpo $GRPO --think-format tagged
stage reward from sft grpo $GRPO --rewards brief.py:brief:1
stage script from sft gpro
stage hub sft --model meta-llama/Llama-3.1-8B
"""


def test_the_dry_run_tries_every_command(tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(n), "messages": [{"role": "user", "content": f"{n}?"}]} for n in range(64)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    grpo = f'GRPO="--preset toy --prompts {prompts}"'
    evaluate = f'EVALUATE="python eval_wildbench.py --judge data/toy/world.py:judge --tasks {prompts}"'
    blocks = experiments(tmp_path, monkeypatch, TRIED, f"LAUNCH=python {grpo} {evaluate}")
    jobs = reproduce.plan(list(blocks.values()), (0,), blocks, tmp_path)
    with pytest.raises(SystemExit) as stop:
        reproduce.check(reproduce.all_commands(jobs, {"RESULTS": str(tmp_path)}))
    printed = capsys.readouterr()
    problems = dict(re.findall(rf"^{tmp_path}/(\S+)-s0: (.*)$", printed.out, re.MULTILINE))
    assert problems.pop("sft") == f"not checked before {tmp_path}/data/sft_traces.jsonl is made"
    assert problems.pop("hub") == "not checked without the hub, which has meta-llama/Llama-3.1-8B"
    assert "Unrecognized options" in problems.pop("typo") and "--betta" in printed.out
    assert problems.pop("reward").startswith("wrong: 'brief.py:brief' is not file.py:function")
    assert "Invalid choice" in problems.pop("choice") and "invalid choice 'tagged'" in printed.out
    assert problems.pop("script").startswith("wrong: ") and "train_gpro.py'" in printed.out
    assert not problems
    assert stop.value.code == 2 and "4 of 8 commands are wrong" in printed.err


# an evaluation's summary and its line for tables
EVALUATION = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
(out / "summary.json").write_text("{}")
line = f"{out.name},12:00,{sys.argv[2]},toy,score,0.5,0.4,0.6,9,0,1.0,j.py:j,f"
(out.parent / "runs.csv").write_text(f"{COLUMNS}\\n{line}\\n")
"""


def test_a_row_of_ones_own_from_end_to_end(tmp_path, monkeypatch, capsys):
    """Checked, run, in the table, and found again."""
    columns = ",".join(scoring.INDEX_COLUMNS)
    (tmp_path / "judge.py").write_text(EVALUATION.replace("{COLUMNS}", columns))
    settings = f': "${{RESULTS:=results/mine}}"\nEVALUATE="python {tmp_path}/judge.py"'
    experiments(tmp_path, monkeypatch, "MODEL=data/toy/base row mine/prompted\n", settings)
    args = reproduce.Args(table=("mine",), row=("prompted",), run=True, results=tmp_path)
    reproduce.main(args)
    capsys.readouterr()
    table = pd.read_csv(tmp_path / "tables" / "mine.csv").set_index(["row", "benchmark"])
    gold = table.loc["prompted", "gold"]
    assert (gold.ours, gold.low, gold.high, gold.seeds) == (0.5, 0.4, 0.6, 1)
    assert (tmp_path / "mine" / "prompted-s0--gold" / "summary.json").exists()

    reproduce.main(args)
    assert capsys.readouterr().out.startswith("all is done in ")


def test_costs_of_a_row_and_a_judge_of_ones_own(tmp_path, capsys):
    jobs = reproduce.plan([ROWS["1"]["llama3.1-8b-rlmt"]], (0,), BLOCKS, tmp_path)
    reproduce.print_costs(reproduce.all_commands(jobs, {"RESULTS": str(tmp_path)}))
    costs = capsys.readouterr().out.splitlines()
    assert costs[0].startswith("82 H100-hours")
    assert costs[1:] == ["1829 calls of the judge gpt-4o", "1096 calls of the judge gpt-4.1"]

    args = reproduce.Args(judge="mine", judge_url="http://u/v1")
    commands = reproduce.all_commands(jobs, args.variables(tmp_path))
    reproduce.print_costs(commands)
    assert "\n2925 calls of the judge mine\n" in capsys.readouterr().out
    assert sum("'--judge' 'mine'" in line and "'--judge-url' 'http://u/v1'" in line for line in commands) == 4


# --- demo.sh

# bash reads this before a script: then no command runs, and its words go to the file COMMANDS
HOOK = r"""
python() {
    echo "$@" >> "$COMMANDS"
    if [ "${*: -1}" = --resume ]; then mkdir -p "${@: -2:1}" && touch "${@: -2:1}/summary.json"; fi
}
export -f python
"""


@pytest.mark.parametrize("algorithms, n", [("grpo", 4), ("grpo ppo dpo response reward", 9)])
def test_the_demo_evaluates_every_run(algorithms, n, tmp_path):
    script = HOOK + (ROOT / "experiments" / "demo.sh").read_text()
    variables = {"COMMANDS": str(tmp_path / "commands"), "RESULTS": str(tmp_path), "ALGORITHMS": algorithms}
    subprocess.run(["bash", "-c", script], cwd=ROOT, env=os.environ | variables, check=True)
    commands = (tmp_path / "commands").read_text()
    assert commands.startswith("-m data.toy.world\n")
    assert commands.endswith(f"\n-m experiments.compare {tmp_path}\n")
    names = re.findall(rf"--out {tmp_path}/runs/(?!reward)(\S+)", commands)
    trained = [name for name in names if not name.startswith("eval-")]
    assert sorted(names) == sorted([*trained, *(f"eval-{name}" for name in trained)]) and len(trained) == n
