"""From a row of the paper to its commands, and from results/runs.csv to its tables, our numbers beside the paper's.

    python reproduce.py --list                                              # every row of every table, and what is done
    python reproduce.py --table 1 --row llama3.1-8b-rlmt --dry-run          # its commands, GPU-hours and memory
    python reproduce.py --table 1 --row llama3.1-8b-rlmt --run              # what is missing; skips what is done, resumes
    python reproduce.py --table toy --run --lanes 2                         # the same matrix on the toy world, on two cores
    python reproduce.py --table rewards --run --lanes 2                     # verifiers, unsupervised, shaped, users: also toy
    python reproduce.py --tables                                            # renders all tables into results/tables/
    python reproduce.py --table toy --row toy-rlmt --sweep --seeds 0 1 2 3 --stop-at 7 --keep 2
    python reproduce.py --traces results/toy/toy-rlmt-s0 --out page.html    # a run's completions, to read

A row's name says how its model was made: base, `released` (as it came), `prompted-think|plain` (a base model and an
instruction), `sft-think|plain`, `rlmt` or `rlhf`, then `-zero`, `-dpo` or `-ppo`, and the variant of an ablation (prompts,
teacher, reward model). It is also the preset of its training run and, with the seed, its folder.
Iterated RL needs nothing of this: `train_grpo.py --model results/<run>/model` goes on from any run.
"""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro
from scipy import stats

import endpoint
import runs

HERE = Path(__file__).parent


@dataclass
class Args:
    table: str = ""
    """1, 2, 3, 4, 8, 9, 10, toy or rewards."""
    row: str = ""
    """One row of the table; empty: all that can be run."""
    # what to do
    list: bool = False
    """Print every row with its status."""
    dry_run: bool = False
    """Print the commands of the row's stages, with predicted GPU-hours and memory."""
    run: bool = False
    """Run the stages that are not done; an interrupted one is resumed."""
    tables: bool = False
    """Render every table from runs.csv as Markdown and csv."""
    sweep: bool = False
    """Several seeds of one row: all up to --stop-at, the best --keep by held-out gold to the end."""
    traces: str = ""
    """Run folder whose completions become one page, --out."""
    # how
    seeds: tuple[int, ...] = (0,)
    as_released: bool = False
    """Presets with the values of the paper's released code where there is such a value."""
    results: Path = Path("results")
    """Folder of the run folders and runs.csv; the toy rows are in toy/ of it."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judges; empty: the official one. The key: OPENAI_API_KEY."""
    budget: float = 0.0
    """US dollars that the judge may cost in each evaluation; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by a judge: the dearest one's."""
    gold: str = ""
    """--gold of the RL commands (the toy rows have their own)."""
    gold_prompts: str = ""
    """--gold-prompts of the RL commands (the toy rows have their own)."""
    stop_at: int = 0
    """Step of the first decision of a sweep: one at which checkpoints are written."""
    keep: int = 1
    """Seeds of a sweep that go on."""
    lanes: int = 1
    """Commands at a time. A GPU command takes the whole machine."""
    other: str = ""
    """A second run beside that of --traces, on the same prompts."""
    out: str = ""
    """Page of --traces."""


# --- 1. rows: what the paper printed, and the names here

BASES = {  # name: (hub name, the paper's, parameters)
    "llama3.1-8b": ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B", 8.03e9),
    "llama3.1-8b-instruct": ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct", 8.03e9),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "Qwen2.5-7B", 7.62e9),
    "qwen2.5-7b-instruct": ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct", 7.62e9),
    "openthinker2-7b": ("open-thoughts/OpenThinker2-7B", "OpenThinker2-7B", 7.62e9),
    "toy": ("data/toy/base", "", 9e5),
}
TRAINING = {  # the paper's: (without thinking, with thinking)
    "none (released instruct model)": ("released", ""),
    "prompted base (template only)": ("prompted-plain", "prompted-think"),
    "SFT": ("sft-plain", "sft-think"),
    "math/reasoning SFT": ("", "released"),
    "math/reasoning SFT, then RLMT": ("", "rlmt"),
    **{
        f"SFT+{a.upper()}": (f"rlhf{s}", f"rlmt{s}")
        for a, s in (("grpo", ""), ("dpo", "-dpo"), ("ppo", "-ppo"))
    },
    **{
        f"{a.upper()} (zero)": (f"rlhf-zero{s}", f"rlmt-zero{s}")
        for a, s in (("grpo", ""), ("dpo", "-dpo"), ("ppo", "-ppo"))
    },
}
VARIANTS = {  # sections of table 4
    "prompts: UltraFeedback": "-ultrafeedback",
    "prompts: Tulu3 random": "-tulu3",
    "warm-start: GPT-4.1-mini": "-gpt4.1mini",
    "reward model: Skywork-V2": "-skywork-v2",
    "reward model: ArmoRM": "-armorm",
}
CANNOT = {
    "-armorm": "the head of its reward model is code of its own, and none but the libraries' is run"
}  # variant: why
WILDBENCH, SUITE = (
    "eval_wildbench.py --tasks data/wildbench.jsonl --mode reward --orders random",
    "eval_benchmarks.py",
)
BENCHMARKS = {  # the paper's column: (our benchmark, metric, times, command as the paper evaluates)
    "WB": ("wildbench", "wb_reward", 1, f"{WILDBENCH} --judge gpt-4o"),
    "AE2": (
        "alpacaeval2",
        "lc_win_rate_paper",
        1,
        f"{SUITE} alpacaeval2 --data data/alpacaeval2 --judge gpt-4o",
    ),
    "AH2": ("arenahard2", "score_paper", 1, f"{SUITE} arenahard2 --data data/arena_hard_v2 --judge gpt-4.1"),
    "CWv3": (
        "creativewriting3",
        "overall_paper",
        1,
        f"{SUITE} creativewriting3 --data data/creative_writing --judge gpt-4.1",
    ),
    "PopQA": ("popqa", "accuracy_paper", 100, f"{SUITE} popqa --data akariasai/PopQA"),
    "IFBench": ("ifbench", "prompt_strict", 100, f"{SUITE} ifbench --data allenai/IFBench_test"),
    "MMLU_Redux": ("mmlu_redux", "accuracy", 100, f"{SUITE} mmlu_redux --data data/mmlu_redux"),
    "IFEval": ("ifeval", "prompt_strict", 100, f"{SUITE} ifeval --data google/IFEval"),
    "WB_G": ("wildbench-g", "wb_reward", 1, f"{WILDBENCH} --references gemini-flash --judge gpt-4.1"),
    "MATH500": ("math500", "accuracy", 100, f"{SUITE} math500 --data HuggingFaceH4/MATH-500"),
    "ZebraLogic": ("zebralogic", "accuracy", 100, f"{SUITE} zebralogic --data data/zebralogic"),
}


def paper_rows() -> pd.DataFrame:
    """Every printed number, with the `row` that makes its model ("" for models of others), averages left out."""
    rows = pd.read_csv(
        HERE / "data" / "paper" / "rlmt_tables.csv", dtype={"table": str}, keep_default_na=False
    )
    rows = rows[rows.benchmark.isin(BENCHMARKS)].copy()
    names = {paper: name for name, (_, paper, _) in BASES.items()}

    def name(r) -> str:
        kind = TRAINING.get(r.training, ("", ""))[r.thinking == "yes"]
        return (
            f"{names[r.backbone]}-{kind}{VARIANTS.get(r.section, '')}" if kind and r.backbone in names else ""
        )

    rows["row"] = rows.apply(name, axis=1)
    return rows


TOY_ROWS = [
    "toy-prompted-think",
    "toy-prompted-plain",
    "toy-sft-think",
    "toy-sft-plain",
    "toy-rlmt",
    "toy-rlhf",
    "toy-rlmt-dpo",
    "toy-rlhf-dpo",
    "toy-rlmt-ppo",
    "toy-rlhf-ppo",
    "toy-rlmt-zero",
    "toy-rlhf-zero",
    "toy-rlmt-small-budgets",
    "toy-rlmt-large-budgets",
    "toy-sft-think-careful",
    "toy-sft-plain-careful",
    "toy-rlmt-careful",
    "toy-rlhf-careful",
    "toy-rlmt-medium-rm",
    "toy-rlhf-medium-rm",
    "toy-rlmt-weak-rm",
    "toy-rlhf-weak-rm",
]
TOY_COLUMNS = {  # of its table: (metric, temperature)
    "gold, T=1": ("score", 1.0),
    "gold, greedy": ("score", 0.0),
    "proxy, T=1": ("proxy_reward", 1.0),
    "format ok": ("format_ok", 1.0),
    "think tokens": ("thinking_tokens", 1.0),
    "response tokens": ("response_tokens", 1.0),
}


REWARD_ROWS = [  # toy rows of the other rewards: sums and programs have a verifier, users an emotion, a rubric has a judge
    "toy-sft-think-sums",
    "toy-sft-plain-sums",
    "toy-rlvr-think",
    "toy-rlvr-plain",
    "toy-rlvr-think-format",
    "toy-rlvr-think-shaped",
    "toy-rlvr-think-majority",
    "toy-rlvr-think-certainty",
    "toy-rlvr-think-process",
    "toy-rlvr-think-prime",
    "toy-rlvr-think-ppo",
    "toy-rlvr-think-ppo-process",
    "toy-sft-think-code",
    "toy-sft-plain-code",
    "toy-rlvr-think-code",
    "toy-rlvr-plain-code",
    "toy-sft-think",
    "toy-rlmt",
    "toy-rubric-think",
    "toy-rubric-think-judge",  # the first two are of the table `toy`
    "toy-sft-think-users",
    "toy-sft-plain-users",
    "toy-rlver-think",
    "toy-rlver-plain",
    "toy-rlver-think-ppo",
    "toy-rlver-think-turns",
    "toy-rlver-think-ppo-turns",
    "toy-rlver-think-challenging",
    "toy-rlver-plain-challenging",
]
REWARD_COLUMNS = {  # (metric, temperature, benchmark: one of these; all if empty)
    "right, T=1": ("score", 1.0, "sums_tasks code_tasks"),
    "right, greedy": ("score", 0.0, "sums_tasks code_tasks"),
    "gold, T=1": ("score", 1.0, "benchmark_tasks"),
    "gold, greedy": ("score", 0.0, "benchmark_tasks"),
    "emotion": ("mean_emotion", 1.0, "sentient"),
    "emotion, held-out user": ("mean_emotion", 1.0, "sentient_held_out"),
    "success": ("success", 1.0, "sentient"),
    "failure": ("failure", 1.0, "sentient"),
    "format ok": ("format_ok", 1.0, ""),
}


def rows_of(table: str) -> dict[str, list[str]]:
    """The rows of a table that can be run, with the paper's columns that they are evaluated by."""
    if table in ("toy", "rewards"):
        return dict.fromkeys(TOY_ROWS if table == "toy" else REWARD_ROWS, [])
    rows = paper_rows()
    if table not in set(rows.table):
        runs.fail(
            f"--table {table!r}: use one of {', '.join(sorted(set(rows.table), key=int))}, toy or rewards"
        )
    rows = rows[(rows.table == table) & (rows.row != "")]
    return {row: list(part.benchmark) for row, part in rows.groupby("row", sort=False)}


# --- 2. a row's commands

NAME = re.compile(
    r"(?P<base>toy|[a-z]+[\d.]+-\d+b(-instruct)?)-(?P<kind>released|prompted-(?:think|plain)|sft-(?:think|plain)|rlmt|rlhf|"
    r"rlvr-(?:think|plain)|rlver-(?:think|plain)|rubric-think)"
    r"(?P<zero>-zero)?(?P<algorithm>-dpo|-ppo)?(?P<variant>-.+)?"
)
ACCELERATE = "accelerate launch --config_file accelerate/8gpu_fsdp2.yaml"


def variant_of(folder: str) -> str:
    """Of a row or of one of its stages: what comes last in the row's name, "" for most."""
    row = NAME.fullmatch(re.sub(r"-s\d+(--.*)?$", "", folder))
    return row["variant"] or "" if row else ""


def plan(args: Args, names: dict[str, list[str]]) -> dict[str, tuple[list[str], list[str]]]:
    """Stages in order, folder: (folders it waits for, command), for the rows, all seeds, and what they start from."""
    stages: dict[str, tuple[list[str], list[str]]] = {}
    for seed in args.seeds:
        for name, columns in names.items():
            add = add_toy if name in TOY_ROWS else add_reward if name in REWARD_ROWS else add_row
            add(args, stages, name, columns, seed)
    return stages


def add_row(args: Args, stages: dict, name: str, columns: list[str], seed: int) -> None:
    """A row of the paper: SFT if it has one, RL if it has one, the evaluations of its columns."""
    m = NAME.fullmatch(name)
    folder, hub, think = f"{name}-s{seed}", BASES[m["base"]][0], "think" in name or "rlmt" in name
    model, after = str(args.results / folder / "model"), [folder]
    common = ["--seed", str(seed), "--out", str(args.results / folder), "--resume"]
    if m["kind"] in ("released", "prompted-think", "prompted-plain"):
        model, after = hub, []
    elif m["kind"].startswith("sft"):
        preset = preset_of("train_sft_warmstart.py", name)
        released = released_of(args, "train_sft_warmstart.py", preset)
        stages[folder] = (
            [],
            f"{ACCELERATE} train_sft_warmstart.py --preset {preset}".split() + released + common,
        )
    else:
        script = f"train_{(m['algorithm'] or '-grpo')[1:]}.py"
        preset = preset_of(script, name)
        command, waits = (
            f"{ACCELERATE} {script} --preset {preset}".split() + released_of(args, script, preset),
            [],
        )
        if not m["zero"] and m["base"] != "openthinker2-7b":
            teacher = m["variant"] if m["variant"] == "-gpt4.1mini" else ""
            start = f"{m['base']}-sft-{'think' if think else 'plain'}{teacher}"
            add_row(args, stages, start, [], seed)
            command, waits = (
                [*command, "--model", str(args.results / f"{start}-s{seed}" / "model")],
                [f"{start}-s{seed}"],
            )
        gold = [f"--gold={args.gold}", f"--gold-prompts={args.gold_prompts}"] if args.gold_prompts else []
        stages[folder] = (waits, [*command, *gold, *common])
    for column in columns:
        benchmark, _, _, command = BENCHMARKS[column]
        wildbench, judged = command.startswith("eval_wildbench"), "--judge" in command
        words = [
            "python",
            *command.split(),
            "--model",
            model,
            "--top-p",
            "0.95",
            "--max-tokens",
            "8192" if think else "4096",
            "--temperatures" if wildbench else "--temperature",
            "0.7",
        ]
        words += ["--protocol", "paper"] if judged else []
        words += ["--judge-url", args.judge_url] if judged and args.judge_url else []
        words += (
            ["--budget", str(args.budget), "--price", *map(str, args.price)]
            if judged and any(args.price)
            else []
        )
        words += (
            ["--think-format", f"zero_{m['kind'].removeprefix('prompted-')}"]
            if m["kind"].startswith("prompted")
            else []
        )
        words += ["--think-format", "think"] if name == "openthinker2-7b-released" else []
        evaluation = f"{folder}--{benchmark}"
        stages[evaluation] = (
            after,
            [*words, "--seed", str(seed), "--out", str(args.results / evaluation), "--resume"],
        )


def preset_of(script: str, name: str) -> str:
    """The preset whose last part is the row's name, read from the script's text: importing it would take seconds."""
    found = re.search(rf'"(table\d+/{re.escape(name)})":', (HERE / script).read_text())
    return found[1] if found else runs.fail(f"{script} has no preset for {name}")


def released_of(args: Args, script: str, preset: str) -> list[str]:
    """--as-released, if it was asked for and something was released for this preset: else the preset is as it is."""
    known = args.as_released and preset in importlib.import_module(script.removesuffix(".py")).RELEASED
    return ["--as-released"] * known


TOY_DATA = {"small-budgets": "--budgets 11 14", "large-budgets": "--budgets 17 20", "careful": "--slips 0.5"}
TOY_REWARD = {  # besides the shipped one, which is the strong one
    "medium-rm": "data/toy/models.py reward --base data/toy/base --batch 12 --steps 150",
    "weak-rm": "train_reward.py --preset toy",
}


def add_toy(args: Args, stages: dict, name: str, columns: list[str], seed: int) -> None:
    """A toy row: the same stages with the preset toy, on one CPU core each."""
    m, root = NAME.fullmatch(name), args.results / "toy"
    folder, variant, think = f"{name}-s{seed}", (m["variant"] or "-")[1:], "think" in name or "rlmt" in name
    model, after = str(root / folder / "model"), [folder]
    common = [*["--no-think"] * (not think), "--seed", str(seed), "--out", str(root / folder), "--resume"]
    waits, extra = [], []
    if variant in TOY_DATA:
        data = root / f"data-{variant}"
        waits = [data.name]
        stages[data.name] = ([], f"python -m data.toy.world --out {data} {TOY_DATA[variant]}".split())
        flag, file = ("--traces", "sft_traces") if "-sft-" in name else ("--prompts", "rl_prompts")
        extra = [flag, str(data / f"{file}.jsonl")]
    if variant in TOY_REWARD:
        reward = root / f"reward-{variant}"
        waits, own = [reward.name], TOY_REWARD[variant].startswith("train_reward")
        stages[reward.name] = ([], f"python {TOY_REWARD[variant]} --out {reward} {'--resume' * own}".split())
        extra = ["--reward-model", str(reward / "model" if own else reward)]
    if m["kind"].startswith("prompted"):
        model, after = BASES["toy"][0], []
    elif m["kind"].startswith("sft"):
        stages[folder] = (waits, ["python", "train_sft_warmstart.py", "--preset", "toy", *extra, *common])
    else:
        script, start = f"train_{(m['algorithm'] or '-grpo')[1:]}.py", BASES["toy"][0]
        if not m["zero"]:
            sft = f"toy-sft-{'think' if think else 'plain'}{'-careful' if variant == 'careful' else ''}"
            add_toy(args, stages, sft, [], seed)
            start, waits = str(root / f"{sft}-s{seed}" / "model"), [*waits, f"{sft}-s{seed}"]
            extra = [] if variant == "careful" else extra
        command = f"python {script} --preset toy --model {start} --reward-on response"
        command += " --gold-prompts data/toy/held_out_prompts.jsonl"
        command += "" if m["algorithm"] == "-dpo" else " --steps 14 --save-steps 7"
        # --allow-truncation: without thinking the toy base model never has the format, which is what that row shows
        command += (
            " --zero --allow-truncation --max-prompt-tokens 256 --max-completion-tokens 160"
            if m["zero"]
            else ""
        )
        stages[folder] = (waits, [*command.split(), *extra, *common])
    zero = m["zero"] or m["kind"].startswith("prompted")
    words = f"python eval_wildbench.py --model {model} --tasks data/toy/benchmark_tasks.jsonl --limit 256 --seed {seed}"
    words += f" --temperatures 1.0 0.0 --max-tokens {160 if zero else 128}"
    words += " --reward-model data/toy/reward_model --reward-on response"
    words += f" --think-format {'zero_' * bool(zero)}{'think' if think else 'plain'}"
    stages[f"{folder}--gold"] = (after, [*words.split(), "--out", str(root / f"{folder}--gold"), "--resume"])


SUMS = {  # --rewards of the rows on sums, and what belongs to them
    "": "math:1",
    "format": "math:1 format:0.2 --on-bad-format score",
    "shaped": "math:1 length:0.2 repetition:0.1 overlong:soft format:gate --on-bad-format score",
    "majority": "majority:1",
    "certainty": "self_certainty:1",
    "process": "math:1 process:0.5 --reward-args process.model=data/toy/sums.py:steps",
    "prime": "math:1 prime:1 --reward-args prime.learning_rate=1e-4 --scale-rewards none",  # the last as PRIME
}
RUBRICS = {"": "rubric:1", "judge": "judge_mark:1"}  # --rewards of the rows that ask the toy judge


def add_reward(args: Args, stages: dict, name: str, columns: list[str], seed: int) -> None:
    """A toy row of another reward: sums or programs, where a verifier knows what is right; users with moods; or a judge."""
    m, root = NAME.fullmatch(name), args.results / "toy"
    folder, variant, kind = f"{name}-s{seed}", (m["variant"] or "-")[1:], m["kind"].rpartition("-")[2]
    common = [
        *["--no-think"] * (kind == "plain"),
        "--seed",
        str(seed),
        "--out",
        str(root / folder),
        "--resume",
    ]
    method = m["kind"].partition("-")[0]
    task = (
        variant
        if variant in ("code", "users")
        else {"rlver": "users", "rubric": "rubric"}.get(method, "sums")
    )
    if method == "sft":
        command = (
            f"python train_sft_warmstart.py --preset toy --traces data/toy/{task}_traces.jsonl --epochs 2"
        )
        waits = []
        if task == "code":  # its base model knows the words of code
            command, waits = f"{command} --model {root / 'code-base'}", ["code-base"]
            stages["code-base"] = ([], f"python -m data.toy.programs --base-out {root / 'code-base'}".split())
        stages[folder] = (waits, [*command.split(), *common])
    else:
        sft = "toy-sft-think" if task == "rubric" else f"toy-sft-{kind}-{task}"
        if f"{sft}-s{seed}" not in stages:
            (add_toy if task == "rubric" else add_reward)(args, stages, sft, [], seed)
        if task == "users":
            command = f"python train_rlver.py --preset toy --steps 25 {'--user challenging' * (variant == 'challenging')}"
            command += " --algorithm ppo --prompts-per-step 128" if m["algorithm"] == "-ppo" else ""
            command += " --turn-weight 1" if variant == "turns" else ""
        elif task == "rubric":
            command = (
                "python -m data.toy.judge -- python train_grpo.py --preset toy --prompts data/toy/rubric_prompts.jsonl "
                f"--rewards {RUBRICS[variant]} --judge toy-judge --steps 14"
            )
        elif task == "code":
            command = (
                "python train_grpo.py --preset toy --prompts data/toy/code_prompts.jsonl --rewards code:1 --steps 15 "
                "--gold data/toy/programs.py:gold"
            )
        else:
            command = (
                f"python train_{(m['algorithm'] or '-grpo')[1:]}.py --preset toy --rewards {SUMS[variant]}"
            )
            command += " --prompts data/toy/sums_prompts.jsonl"
            command += " --steps 20 --gold data/toy/sums.py:gold"
        model = ["--model", str(root / f"{sft}-s{seed}" / "model")]
        stages[folder] = ([f"{sft}-s{seed}"], [*command.split(), *model, *common])
    evaluate = (
        "python eval_sentient.py --profiles data/toy/users_test.jsonl --simulator data/toy/users.py:user "
        "--held-out-simulator data/toy/users.py:held_out_user --protocol rlver --start 40 --turns 3 --low 10 "
        "--max-tokens 48 --temperature 1"
    )
    if task != "users":
        tasks, judge = (
            ("benchmark_tasks", "world")
            if task == "rubric"
            else (f"{task}_tasks", {"sums": "sums", "code": "programs"}[task])
        )
        evaluate = (
            f"python eval_wildbench.py --tasks data/toy/{tasks}.jsonl --limit 256 --judge data/toy/{judge}.py:judge "
            "--temperatures 1.0 0.0 --max-tokens 128"
        )
    words = [*evaluate.split(), "--model", str(root / folder / "model"), "--seed", str(seed)]
    stages[f"{folder}--gold"] = ([folder], [*words, "--out", str(root / f"{folder}--gold"), "--resume"])


# --- 3. what a row needs and costs, before anything is run

PREPARE = "python -m data.prepare"
DATA = {  # file: how it is made; those of the benchmarks on the hub come by themselves
    "data/wildchat_if.jsonl": f"{PREPARE} wildchat-if --input wildchat-if_train.parquet --out data/wildchat_if.jsonl",
    "data/sft_prompts.jsonl": f"{PREPARE} tulu3-random --n 7500 --exclude data/wildchat_if.jsonl --out data/sft_prompts.jsonl",
    "data/traces.jsonl": "python -m data.make_traces --prompts data/sft_prompts.jsonl --out data/traces.jsonl "
    "--teacher gemini-2.5-flash-preview-04-17 --teacher-url URL",
    "data/traces_gpt4.1mini.jsonl": "python -m data.make_traces --prompts data/sft_prompts.jsonl "
    "--out data/traces_gpt4.1mini.jsonl --teacher gpt-4.1-mini",
    "data/ultrafeedback.jsonl": f"{PREPARE} ultrafeedback --n 7560 --exclude data/sft_prompts.jsonl "
    "--out data/ultrafeedback.jsonl",
    "data/tulu3_random.jsonl": f"{PREPARE} tulu3-random --n 7560 --seed 1 --exclude data/sft_prompts.jsonl "
    "--out data/tulu3_random.jsonl",
    "data/wildbench.jsonl": f"{PREPARE} wildbench --out data/wildbench.jsonl",
    **{
        f"data/{name}": "# a download: data/README.md, 'Benchmarks', says which files and where from"
        for name in ("alpacaeval2", "arena_hard_v2", "creative_writing", "mmlu_redux", "zebralogic")
    },
}


def data_of(stages: dict) -> list[str]:
    """Files that the stages read and that are made by a command of DATA, in the order of DATA."""
    needed = set()
    for name, (_, command) in stages.items():
        variant = variant_of(name)
        if "train_sft_warmstart.py" in command and "toy" not in command:
            needed |= {
                "data/traces_gpt4.1mini.jsonl" if variant == "-gpt4.1mini" else "data/traces.jsonl",
                "data/sft_prompts.jsonl",
                "data/wildchat_if.jsonl",
            }
        elif "accelerate" in command:
            prompts = {"-ultrafeedback": "ultrafeedback", "-tulu3": "tulu3_random"}.get(
                variant, "wildchat_if"
            )
            needed.add(f"data/{prompts}.jsonl")
        needed |= set(command) & DATA.keys()
    return [path for path in DATA if path in needed]


PAPER_HOURS = {  # GPU-hours on H100, as the released README reports them for an 8B model
    "train_sft_warmstart.py": lambda steps: 8 * 2.5,
    "train_dpo.py": lambda steps: 8 * 1.0,  # training; sampling and scoring are not stated
    "train_grpo.py": lambda steps: 8 * 15 / 234 * steps,  # 14 to 16 hours for 234 steps
    "train_ppo.py": lambda steps: 8 * 15 / 234 * steps,  # the README has one figure for GRPO and PPO
}


def cost(name: str, command: list[str]) -> str:
    """Predicted GPU-hours and GiB a GPU (8 x 80 GB, FSDP2, without activations) of a training stage; "" for others."""
    script = next(word for word in command if word.endswith(".py"))
    if script not in PAPER_HOURS or name.startswith("toy-"):
        return ""
    n = BASES[NAME.match(name)["base"]][2]
    gib = {"policy": 16 * n / 8}  # float32 weights, gradients and two moments, sharded
    if script == "train_dpo.py":  # one after the other
        gib = {"sampling": 0.85 * 80 * 2**30, "scoring": 2 * 8.03e9, "training": 16 * n / 8}
    elif script != "train_sft_warmstart.py":
        gib |= {"reward model": 2 * 8.03e9, "vLLM": 0.3 * 80 * 2**30}
    if script in ("train_grpo.py", "train_ppo.py"):
        gib |= {"reference": 4 * n / 8}
    if script == "train_ppo.py":
        gib |= {"critic": 16 * n / 8}
    hours = PAPER_HOURS[script](135 if "--as-released" in command else 120)
    parts = ", ".join(f"{part} {size / 2**30:.3g}" for part, size in gib.items())
    return f"about {hours:.0f} H100-hours (paper's README, scaled); GiB a GPU without activations: {parts}"


def check(stages: dict, root: Path, judge_url: str) -> None:
    """Says which stages are figures of others; exits with 2 where data or a key is missing that a stage to be run needs."""
    todo = {name: stages[name] for name in stages.keys() - runs.finished(stages, root)}
    if figures := [
        name for name in stages if (root / name).exists() and status(root, name) == "figures only"
    ]:
        print(
            f"made before (figures only, no weights), not run again, {len(figures)} of {len(stages)}: {', '.join(figures)}\n"
            "--results DIR makes them anew",
            flush=True,
        )
    if missing := [path for path in data_of(todo) if not (HERE / path).exists()]:
        runs.fail(f"{', '.join(missing)} must be made first; --dry-run shows how")
    words = {word for _, command in todo.values() for word in command}
    urls = [judge_url] * ("paper" in words) + [
        word.partition("@")[2] for word in words if word.startswith("--gold=judge:")
    ]
    if endpoint.OPENAI_URL in map(endpoint.resolve_url, urls) and not endpoint.api_key():
        runs.fail(
            "a judge at the OpenAI API needs a key: set OPENAI_API_KEY, or name an endpoint of your own by --judge-url"
        )


def show(args: Args, stages: dict) -> None:
    total = 0.0
    for path in data_of(stages):
        print(f"\n# {path}: {'there' if (HERE / path).exists() else 'missing'}\n{DATA[path]}")
    root = root_of(args, args.table)
    for folder, (_, command) in stages.items():
        print(f"\n# {folder}: {status(root, folder)}")
        if line := cost(folder, command):
            print(f"# {line}")
            total += float(line.split()[1])
        print(shlex.join(command))
    print(
        f"\n# {len(stages)} stages; training about {total:.0f} H100-hours; sampling for DPO and evaluation are not counted"
    )


def root_of(args: Args, table: str) -> Path:
    """Of the run folders of a table's rows."""
    return args.results / ("toy" if table in ("toy", "rewards") else "")


def status(root: Path, folder: str) -> str:
    """Of a run; of a row that trains nothing that of its evaluations. Figures only: it came with git, without a command."""
    if variant_of(folder) in CANNOT:
        return "cannot be run"
    paths = [root / folder] if (root / folder).exists() else list(root.glob(f"{folder}--*"))
    done, here = (all((path / name).exists() for path in paths) for name in ("summary.json", "command.txt"))
    return "not yet run" if not paths else "interrupted" if not done else "done" if here else "figures only"


# --- 4. tables


def measured(folder: Path) -> pd.DataFrame:
    """Rows of runs.csv whose model is a run of ours or a released one, with `row` and `seed`; the last of equal ones."""
    path = folder / "runs.csv"
    index = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=list(runs.INDEX))
    found = index["run"].astype(str).str.extract(r"^(?P<row>.+)-s(?P<seed>\d+)--(?P<evaluation>.+)$")
    index = pd.concat([index, found], axis=1).dropna(subset="row")
    return index.drop_duplicates(["run", "benchmark", "metric", "temperature"], keep="last")


def ours(part: pd.DataFrame, times: float) -> dict:
    """Mean over seeds; 95 % interval of one seed's tasks, or over seeds by Student's t. Exits with 2 for seeds that were not
    judged alike."""
    part = part.dropna(subset="value")  # a seed without a headline: too many of its rows were invalid
    if part.empty:
        return {"ours": None, "low": None, "high": None, "seeds": 0, "task": None, "fingerprint": None}
    if part["fingerprint"].nunique() > 1:
        runs.fail(
            f"{', '.join(part['run'])} were not judged alike (fingerprint in runs.csv), so they have no mean"
        )
    mean, n = part["value"].mean(), len(part)
    half = stats.t.ppf(0.975, n - 1) * part["value"].sem() if n > 1 else 0.0
    low, high = part[["low", "high"]].iloc[0] if n == 1 else (mean - half, mean + half)
    return {
        "ours": times * mean,
        "low": times * low,
        "high": times * high,
        "seeds": n,
        "task": part["benchmark"].iloc[0],
        "fingerprint": part["fingerprint"].iloc[0],
    }


def unlike(table: pd.DataFrame) -> list[str]:
    """A sentence for each column of a table whose rows were not judged alike."""
    out = []
    for (column, _), part in table.dropna(subset="fingerprint").groupby(["benchmark", "task"], sort=False):
        groups = part.groupby("fingerprint", sort=False)["row"].unique().map(", ".join)
        if len(groups) > 1:
            out.append(
                f"{column}: not to be compared, as judge, instructions or tasks differ: {' against '.join(groups)}"
            )
    return out


def paper_table(table: str, index: pd.DataFrame) -> pd.DataFrame:
    """One line a printed number: row, benchmark, ours with interval and seeds, the paper's, difference, status."""
    printed, lines = paper_rows(), []
    for r in printed[printed.table == table].itertuples():
        benchmark, metric, times, _ = BENCHMARKS[r.benchmark]
        part = index[(index.row == r.row) & (index.evaluation == benchmark) & (index.metric == metric)]
        numbers = ours(part, times)
        nothing = "not yet run" if r.row else "model of others"
        nothing = "no headline" if len(part) else "cannot be run" if variant_of(r.row) in CANNOT else nothing
        state = "measured" if numbers["seeds"] else nothing
        difference = numbers["ours"] - float(r.value) if numbers["seeds"] else None
        row = r.row or f"{r.model_name or r.backbone} ({r.training})"
        lines.append(
            {
                "table": table,
                "row": row,
                "section": r.section,
                "benchmark": r.benchmark,
                **numbers,
                "paper": float(r.value),
                "difference": difference,
                "status": state,
            }
        )
    return pd.DataFrame(lines)


def paper_markdown(table: pd.DataFrame) -> str:
    """A line a row: ours ± half the interval (paper's), or the paper's alone in brackets."""
    columns = list(dict.fromkeys(table.benchmark))
    out = ["| row | " + " | ".join(columns) + " | status |", "|" + "---|" * (len(columns) + 2)]
    for (_, row), part in table.groupby(["section", "row"], sort=False):
        number = lambda r: "" if pd.isna(r.ours) else f"{r.ours:.1f} ± {(r.high - r.low) / 2:.1f} "
        cells = {r.benchmark: f"{number(r)}({r.paper:g})" for r in part.itertuples()}
        states = set(part.status)
        state = states.pop() if len(states) == 1 else "partly measured"
        out.append(f"| {row} | " + " | ".join(cells.get(c, "") for c in columns) + f" | {state} |")
    return "\n".join(out)


def rows_markdown(args: Args) -> str:
    """Every row of ours: the tables it stands in, its training command, that command's GPU-hours, and its status."""
    tables: dict[str, list[str]] = {}
    for table in sorted(set(paper_rows().table), key=int):
        for row in rows_of(table):
            tables.setdefault(row, []).append(table)
    stages = plan(args, dict.fromkeys(tables, []))
    tables |= {
        name.removesuffix("-s0"): [] for name in stages if name.removesuffix("-s0") not in tables
    }  # start of others
    out = ["| row | tables | training | H100-hours | status |", "|---|---|---|---|---|"]
    for row in sorted(tables):
        _, command = stages.get(f"{row}-s0", ([], []))
        hours = cost(row, command).split()[1:2] if command else ["0"]
        words = [w for w in command if w.endswith(".py") or w.startswith("table")]
        made = f"`{words[0]} --preset {words[1]}`" if words else "none"
        numbers = ", ".join(tables[row]) or "its RL runs start from it"
        out.append(f"| {row} | {numbers} | {made} | {hours[0]} | {status(args.results, f'{row}-s0')} |")
    return "\n".join(out)


def toy_table(index: pd.DataFrame, table: str = "toy") -> pd.DataFrame:
    """One line a row and column of the tables `toy` and `rewards`."""
    lines = []
    for row in rows_of(table):
        for column, (metric, temperature, *benchmark) in (
            TOY_COLUMNS if table == "toy" else REWARD_COLUMNS
        ).items():
            part = index[(index.row == row) & (index.metric == metric) & (index.temperature == temperature)]
            part = part[part.benchmark.isin(benchmark[0].split())] if benchmark and benchmark[0] else part
            part = part.drop_duplicates("seed")  # format_ok stands there for each of two users
            numbers = ours(part, 1)
            state = "toy" if numbers["seeds"] else "no headline" if len(part) else "not yet run"
            lines.append({"table": table, "row": row, "benchmark": column, **numbers, "status": state})
    return pd.DataFrame(lines)


def toy_markdown(table: pd.DataFrame) -> str:
    columns = list(dict.fromkeys(table.benchmark))
    out = ["| row | seeds | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for row, part in table.groupby("row", sort=False):
        cells = {
            r.benchmark: ""
            if pd.isna(r.ours)
            else f"{r.ours:.3g}"
            if pd.isna(r.low)
            else f"{r.ours:.3f} ± {(r.high - r.low) / 2:.3f}"
            for r in part.itertuples()
        }
        state = part.seeds.max() or "not yet run"
        out.append(f"| {row} | {state} | " + " | ".join(cells[c] for c in columns) + " |")
    return "\n".join(out)


def render(args: Args) -> dict[str, str]:
    """Writes every table into results/tables/, as Markdown and csv; returns the Markdown by name. Warns of columns whose rows
    were not judged alike, and says so below the table."""
    results, folder = args.results, args.results / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    index, toy, texts = measured(results), measured(results / "toy"), {"rows": rows_markdown(args)}
    tables = {
        f"table{table}": paper_table(table, index) for table in sorted(set(paper_rows().table), key=int)
    }
    for name, numbers in (tables | {table: toy_table(toy, table) for table in ("toy", "rewards")}).items():
        rounded = numbers if name in tables else numbers.round(4)
        rounded.drop(columns=["task", "fingerprint"]).to_csv(folder / f"{name}.csv", index=False)
        texts[name] = paper_markdown(numbers) if name in tables else toy_markdown(numbers)
        for line in unlike(numbers):
            print(f"WARNING: {name}, {line}", file=sys.stderr)
            texts[name] += f"\n\n{line}"
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(text + "\n")
    return texts


# --- 5. many seeds


def sweep(args: Args) -> None:
    """All seeds of a row up to --stop-at; then the --keep best by held-out gold go on, and nothing else decides.

    Writes <row>--sweep.json beside the run folders: how many were started, the rule, who went on, every curve.
    """
    root = root_of(args, args.table)
    names = [f"{args.row}-s{seed}" for seed in args.seeds]
    stages = plan(args, {args.row: []})
    stages = {name: stage for name, stage in stages.items() if not name.endswith("--gold")}
    if not any("--gold-prompts" in " ".join(stages[n][1]) for n in names) or not args.stop_at:
        runs.fail("--sweep decides by held-out gold: give --stop-at, and --gold and --gold-prompts")
    check(stages, root, args.judge_url)
    runs.run_plan({n: s for n, s in stages.items() if n not in names}, root, args.lanes)
    for name in names:
        train_until(stages[name][1], root / name, args.stop_at)
    early = {
        name: next(r["gold"] for r in held_out(root / name) if r["step"] >= args.stop_at) for name in names
    }
    survivors = sorted(names, key=early.get, reverse=True)[: args.keep]
    runs.run_plan({name: ([], stages[name][1]) for name in survivors}, root, args.lanes)
    summary = {
        "row": args.row,
        "started": len(names),
        "survivors": survivors,
        "rule": f"all seeds to step {args.stop_at}; the {args.keep} with the highest gold on the held-out prompts there go on",
        "gold_at_decision": early,
        "curves": {name: held_out(root / name) for name in names},
    }
    path = root / f"{args.row}--sweep.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    first, last = list(early.values()), [summary["curves"][name][-1]["gold"] for name in survivors]
    print(f"{len(names)} seeds started, {len(survivors)} went on: {summary['rule']}")
    print(f"gold at step {args.stop_at}: mean of all {sum(first) / len(first):.4f}, best {max(first):.4f}")
    print(
        f"gold at the end, of those chosen, so no estimate of a seed's mean: {sum(last) / len(last):.4f}; {path}"
    )


def held_out(run: Path) -> list[dict]:
    path = run / "held_out.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_until(command: list[str], run: Path, step: int) -> None:
    """Starts a training command, or goes on with it, and stops it once the held-out prompts of `step` are measured."""
    if any(r["step"] >= step for r in held_out(run)):
        if not any(run.glob("checkpoint-*")) and not (run / "model").exists():
            runs.fail(
                f"{run} holds figures without weights, as they are in git; --results DIR makes them anew, or delete it"
            )
        return
    log = run.parent / "logs" / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as f:
        process = subprocess.Popen(
            runs.executable(command), cwd=HERE, stdout=f, stderr=f, start_new_session=True
        )
    while process.poll() is None and not any(r["step"] >= step for r in held_out(run)):
        time.sleep(1)
    if process.poll() is None:
        time.sleep(5)  # the checkpoint of this step is being completed
        os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    if not any(r["step"] >= step for r in held_out(run)):
        runs.fail(f"{run.name} ended before step {step}; its log is {log}")
    print(f"{run.name}: held-out gold at step {step}: {held_out(run)[-1]['gold']:.4f}", flush=True)


def main(args: Args) -> None:
    if args.traces:
        import page

        if not args.out:
            runs.fail("--traces needs --out PAGE.html")
        return runs.or_fail(page.write, args.traces, args.out, args.other)
    if args.tables:
        for name, text in render(args).items():
            print(f"\n{name}\n\n{text}")
        return
    if args.list:
        for table in [*sorted(set(paper_rows().table), key=int), "toy", "rewards"]:
            root = root_of(args, table)
            for row in rows_of(table):
                print(
                    f"table {table:4} {row:45}", *(f"s{s}: {status(root, f'{row}-s{s}')}" for s in args.seeds)
                )
        return
    if bool(args.gold) != bool(args.gold_prompts):
        runs.fail(
            "--gold and --gold-prompts belong together: what measures, and the prompts that it measures on"
        )
    if not args.table:
        runs.fail(
            "nothing to do: --list, --tables, --traces RUN, or --table with --dry-run, --run or --sweep"
        )
    rows = rows_of(args.table)
    if args.row and args.row not in rows:
        runs.fail(f"--row {args.row!r}: table {args.table} has {', '.join(rows)}")
    if reason := CANNOT.get(variant_of(args.row)):
        runs.fail(f"--row {args.row} cannot be run: {reason}")
    if args.budget and not any(args.price):
        runs.fail("--budget needs --price: US dollars for a million tokens read and written")
    if args.sweep and not args.row:
        runs.fail("--sweep is over the seeds of one row; name it by --row")
    if args.sweep:
        return sweep(args)
    for row in [row for row in rows if variant_of(row) in CANNOT]:
        print(f"{row} cannot be run and is left out: {CANNOT[variant_of(row)]}")
        del rows[row]
    stages = plan(args, {args.row: rows[args.row]} if args.row else rows)
    if not args.run:
        return show(args, stages)
    root = root_of(args, args.table)
    check(stages, root, args.judge_url)
    if args.table in ("toy", "rewards"):
        os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        for script in ("world", "sums", "programs", "users", "judge"):
            subprocess.run(
                [sys.executable, "-m", f"data.toy.{script}"], cwd=HERE, check=True, stdout=subprocess.DEVNULL
            )
    runs.run_plan(stages, root, args.lanes)
    render(args)


if __name__ == "__main__":
    main(tyro.cli(Args))
