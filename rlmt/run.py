"""A run: its arguments, its folder, its log, and what surrounds its steps. Nothing is overwritten unless the
user asks for it.

    run = Run(args, "grpo", args.model, constants(globals()))    # may it have its folder? writes nothing
    run.start()                                                  # makes the folder, finds the last checkpoint
    learners = {"model": load_policy(args, args.model, run.checkpoint, accelerator)}
    with run.training(learners, tokenizer, args.steps, COLUMNS):    # SIGTERM, hangs, errors
        for step in run.steps():                                    # from 1, or from the checkpoint on
            chosen = rows_of_step(rows, step, args.batch_size, args.seed)
            ...
            run.end_step(step, metrics, n_tokens)                   # logs, saves at times, stops
    save_model(run.folder / "model", learners["model"].model, tokenizer)
    run.finish({"steps": args.steps}, "eval_benchmarks.py ifeval --data google/IFEval --model")

No random state is stored: rows, sampling and micro-batches of a step follow from (seed, step), so a resumed
run repeats an unbroken one to the bit. All processes call these functions together.
"""

import contextlib
import copy
import dataclasses
import faulthandler
import functools
import glob
import hashlib
import json
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import filelock
import numpy as np
import torch
import tyro
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from huggingface_hub.constants import HF_HUB_CACHE
from transformers.utils import cached_file

from rlmt.checkpoint import digest_of, latest, numbered, save_checkpoint, save_model, step_of
from rlmt.data import append_jsonl, read_log, write_file, write_jsonl
from rlmt.learner import Learner
from rlmt.model import is_sharded_launch
from rlmt.scorers import read_who
from utils import IS_FIRST, fail, or_warn, refuse_repeated

NAMES = Path(__file__).parents[1] / "docs" / "flags.md"  # what TRL and verl call our flags

# --- 1. arguments


@dataclass
class RunArgs:
    """What every training script asks for besides its algorithm."""

    # run
    preset: str = ""
    """A name from PRESETS; flags override it."""
    config: str = ""
    """config.json of an earlier run of this script: its arguments, without --out, --resume and --overwrite. A
    preset named beside it and flags override them."""
    # model and data
    chat_template: str = "auto"
    """auto: the tokenizer's own if it leaves thinking unchanged, else the built-in one of its family. Or
    llama3, chatml, plain, or a Jinja file. With --think-format zero_*, a text file replaces the built-in
    instruction."""
    # optimisation
    micro_batch_tokens: int = 8192
    """Tokens of a forward, per GPU, padding included. Bounds the memory of activations."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of computation, of the sampler and of frozen models; auto: bfloat16 on a GPU, float32 on a CPU.
    Trained weights and Adam are float32 in any case."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora_r: int = 0
    """LoRA rank of what is trained; 0 trains all weights. With LoRA the reference is the model without its
    adapter."""
    load_in_4bit: bool = False
    """QLoRA: the frozen weights in 4 bit; needs --lora-r, and is for one GPU or DDP."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: bitsandbytes' AdamW, 10 bytes per trained parameter in place of 16; for one GPU or DDP."""
    # run
    save_steps: int = 20
    """Steps between checkpoints."""
    report_to: Literal["none", "wandb", "trackio", "tensorboard"] = "none"
    """Where the metrics of each step go besides metrics.jsonl; a resumed run goes on in the same run
    there."""
    seed: int = 0
    """Random seed for the order of the data, sampling and new weights."""
    out: str = ""
    """Run folder; empty: <script>__<preset or model>__s<seed>__<hash of the arguments>, beside the run that
    made the model, else in results/."""
    resume: bool = False
    """Continue from the run's last whole checkpoint; with more steps or rounds, train on."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, ask a judge its first request, print what would run, and stop before a model is
    loaded."""


@dataclass
class RolloutArgs(RunArgs):
    """What RL asks for besides: what samples, and how endpoints are paid."""

    # rollout
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM where a GPU and vLLM are there, else transformers' generate. vLLM runs on a CPU too."""
    vllm_memory: float = 0.3
    """Share of each GPU that vLLM reserves for a rollout; between rollouts it gives its memory back."""
    # judge, simulated user
    key_env: tuple[str, ...] = ()
    """HOST=NAME words: the environment variable NAME holds the key for the endpoint at that host, or
    HOST:PORT. OPENAI_API_KEY is sent to the OpenAI API and to OPENAI_BASE_URL alone; any other host gets a key
    only if it is named here."""
    omit: tuple[str, ...] = ()
    """Parameters that are left out of all requests, as a server refuses them: seed temperature."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars per million tokens read and written by a judge or a simulator."""


@dataclass
class ScoreArgs(RolloutArgs):
    """What GRPO, PPO and DPO ask for besides: what scores completions, and what measures them."""

    # reward
    reward_model: str = "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"
    """Any sequence classifier with one output and a chat template (paper section 2.2)."""
    reward_on: Literal["think+response", "response"] = "think+response"
    """What the reward model reads: all that the policy wrote, or the response alone (paper, equation 3)."""
    reward_args: tuple[str, ...] = ()
    """Options of rewards as NAME.OPTION=VALUE: overlong.buffer=512. A function of your own has its own name:
    brief.limit=50. DPO takes preference.chat_template=FILE (Jinja) alone."""
    gold: str = ""
    """A reward model, judge:MODEL[@URL] or file.py:function(messages, response), which returns a number.
    Measures every training completion and those of --gold-prompts; nothing is trained on it. A judge is called
    for each of them."""
    gold_prompts: str = ""
    """Held-out prompt rows, measured by --gold at the start and at every checkpoint, or after every round of
    DPO (held_out.jsonl, best_by_gold/)."""
    # judge, simulated user
    budget: float = 0.0
    """US dollars that the judge of --rewards may cost in this run; a judge of --gold has as much again. 0: no
    limit."""


@dataclass
class RLArgs(ScoreArgs):
    """What GRPO and PPO ask for besides: what rewards completions."""

    # reward
    rewards: tuple[str, ...] = ("preference:1",)
    """Rewards by name, or path/to/file.py:function, each with a weight, or gate: math:1 preference:0.1
    format:gate. See rewards/__init__.py."""
    on_bad_format: Literal["floor", "null", "score"] = "floor"
    """Reward of a malformed, empty or truncated completion. floor: `format_margin` below the lowest of its
    group (PPO: of the step). score: its text is scored as it is. null, the released code's strict mode: the
    text [NULL] is scored if the response's opening tag is missing (Zero formats: or its closing tag), else as
    it is. score and null change only what the reward model reads."""
    format_margin: float = 1.0
    """Distance, in units of the reward, of a malformed completion (floor) or a failed gate below the lowest
    reward of its group."""
    # judge, simulated user
    judge: str = ""
    """A model's name at --judge-url, for the rewards that ask one."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: that of OPENAI_BASE_URL, else the official one."""


def parse_args(args_class: type, presets: dict[str, dict]):
    """Parses the command line. Order: default < --config < preset < flag.

    Unknown names and impossible values exit with 2.
    """
    # --flag=value becomes --flag value
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    given = dict(zip(words, words[1:]))
    preset = given.get("--preset", "")
    if preset and preset not in presets:
        fail(f"unknown preset {preset!r}; known: {', '.join(presets) or 'none'}")
    # these values become the defaults, so tyro lets flags override them
    values = presets.get(preset, {})
    if "--config" in given:
        values = read_config(given["--config"], args_class) | values
    default = dataclasses.replace(args_class(), **values)
    refuse_repeated(args_class)
    what, _, _ = (sys.modules[args_class.__module__].__doc__ or "").partition("\n\n")
    about = f"{what}\n\npresets: {', '.join(presets) or 'none'}"
    options = {"default": default, "description": about, "console_outputs": IS_FIRST}
    try:
        args, unknown = tyro.cli(args_class, return_unknown_args=True, **options)
        if unknown:
            explain_names(unknown, args_class)
            tyro.cli(args_class, **options)  # exits, and says what it does not know
    except SystemExit:
        if not IS_FIRST:
            time.sleep(5)  # as in `fail`
        raise
    if preset and IS_FIRST:
        print(f"--preset {preset} sets {presets[preset]}, unless a flag does")
    check_values(args)
    return args


def explain_names(unknown: list[str], args_class: type) -> None:
    """Exits with 2 if one of the words is TRL's or verl's name of a flag, and says what docs/flags.md calls it."""
    flags = {"--" + name.replace("_", "-") for name in args_class.__dataclass_fields__}
    answers = []
    for word in unknown:
        word = word.partition("=")[0]
        name = word.lstrip("-+").replace("-", "_")
        for line in NAMES.read_text().splitlines():
            if f"`{name}`" in line:
                _, ours, _, _, note, _ = line.split("|")
                known = [flag for flag in re.findall(r"--[\w-]+", ours) if flag in flags]
                if known or "--" not in ours:  # else it is another script's
                    answer = f"{word} is {', '.join(known) or ours.strip()} here ({note.strip()})"
                    answers.append(answer.removesuffix(" ()"))
    if answers:
        fail("; ".join(answers))


def read_config(path: str, args_class: type) -> dict:
    """Returns the arguments in a run's config.json, without those of HOW_STARTED; exits with 2 if they are
    not this script's."""
    try:
        stored = json.loads(Path(path).read_text())["args"]
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"--config {path} is not the config.json of a run")
    hints = get_type_hints(args_class)
    values = {}
    for name, value in stored.items():
        if name not in hints:
            fail(f"--config {path}: {name} is not a flag of this script; take a run of the same script")
        if isinstance(value, list):  # of JSON, which has no tuples
            value = tuple(value)
        choices = get_args(hints[name])
        if get_origin(hints[name]) is Literal and value not in choices:
            fail(f"--config {path}: {name} is {value!r}; use one of {', '.join(choices)}")
        if name not in HOW_STARTED:
            values[name] = value
    return values


# arguments that are above 0; no number is below it, or infinite
POSITIVE = (
    "top_p",
    *("steps", "epochs", "rounds", "save_steps", "updates_per_rollout"),
    *("batch_size", "rollout_batch_size", "prompts_per_step", "group_size", "samples_per_prompt"),
    *("max_length", "max_prompt_tokens", "max_completion_tokens", "max_turn_tokens", "micro_batch_tokens"),
    *("turns", "concurrency", "samples", "max_tokens", "batch_pairs", "extract_pairs"),
)
SHARES = ("top_p", "max_invalid", "lam", "warmup_ratio", "held_out", "vllm_memory")  # at most 1


def check_values(args) -> None:
    """Exits with 2 for a number out of its range, a budget without prices, 4-bit weights without LoRA, 4-bit
    weights or an 8-bit optimizer under FSDP, a tracker that is not installed, and a launcher that compiles or
    shards models in another way than ours."""
    positive = {*POSITIVE, *getattr(args, "POSITIVE", ())}  # and what the script adds
    for name, value in vars(args).items():
        highest = 1 if name in SHARES else 2**32 - 1  # a seed of more bits fits into no generator
        for number in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(number, int | float)
            if is_number and not (0 <= number <= highest and (number or name not in positive)):
                at_least = "above 0" if name in positive else "at least 0"
                fail(f"--{name.replace('_', '-')} {number}: give a number {at_least} and at most {highest}")
    if isinstance(args, RunArgs) and getattr(args, "temperature", 1.0) == 0:
        fail(
            "--temperature 0: greedy completions of a prompt are all alike, so nothing is learned; 1 samples"
        )
    if getattr(args, "resume", False) and args.overwrite:
        fail("--resume goes on with a run, --overwrite starts it anew; leave one out")
    if getattr(args, "budget", 0) and not any(args.price):
        fail("--budget needs --price: US dollars per million tokens read and written")
    if isinstance(args, RunArgs):
        if args.report_to not in ("none", *map(str, get_available_trackers())):
            fail(f"--report-to {args.report_to}: it is not installed; pip install {args.report_to}")
        for setting in map("=".join, os.environ.items()):
            # accelerate would wrap the model, whose weights then have other names: no checkpoint can be written
            if re.fullmatch(
                "(?i)ACCELERATE_(DYNAMO_BACKEND|USE_(?!FSDP|CPU).*)=(?!(no|false|0|)$).*", setting
            ):
                fail(f"{setting}, of the launcher, is not supported; use a file of accelerate/, or unset it")
    load_in_4bit = getattr(args, "load_in_4bit", False)
    uses_bits = load_in_4bit or getattr(args, "optim", "adamw") == "adamw_8bit"
    if load_in_4bit and not args.lora_r:
        fail("--load-in-4bit trains an adapter only; add --lora-r 64, say")
    if uses_bits and is_sharded_launch():
        fail(
            "--load-in-4bit and --optim adamw_8bit need whole weights on each GPU, and FSDP shards them; use "
            "one GPU and no launcher, or leave them out"
        )


# --- 2. the run's folder

# arguments that say how a run is started, not what it is
HOW_STARTED = ("out", "resume", "overwrite", "dry_run", "config")
# a larger value continues a finished run; of an evaluation, it scores the stored verdicts once more
LENGTH = ("steps", "rounds", "max_invalid")
# arguments that a resume may change: with another value, what was learned so far would be the same
CHANGEABLE = (
    *LENGTH,
    "save_steps",
    "budget",
    "price",
    "key_env",
    "omit",
    "model_omit",
    "concurrency",
    "micro_batch_tokens",
    "simulator_url",  # which model plays the user or judges is said by --simulator and --judge
    "held_out_simulator_url",
    "judge_url",
    "model_url",
    "generate_only",
    "vllm_memory",
    "data_parallel",
    "tensor_parallel",
    "judge_tensor_parallel",
    "report_to",
)


def check_shared_disk(run: Path) -> None:
    """Exits with 2 if a process does not see what rank 0 writes into the run's folder.

    A machine with a disk of its own would keep its part of each checkpoint and of the model to itself.
    """
    state = PartialState()
    mark = run / "seen-by-all"
    if state.is_main_process:
        mark.touch()
    state.wait_for_everyone()
    # asks the disk: a machine may remember that there is no such folder
    run.mkdir(parents=True, exist_ok=True)
    is_seen = gather_object([mark.exists()])
    if state.is_main_process:
        mark.unlink()
    if not all(is_seen):
        fail(f"not all machines see {run}; they need --out on a disk that they share")


_LOCKS = []  # kept; the kernel releases a lock when the process ends, however it ends


def lock_folder(folder: Path) -> None:
    """Locks the folder for this process; exits with 2 if another process has it."""
    _LOCKS.clear()  # a second lock would be refused to this process as well
    lock = filelock.FileLock(folder / "lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        fail(f"{folder} is in use by another process; wait for its end, or name another folder with --out")
    _LOCKS.append(lock)


def constants(namespace: dict) -> dict:
    """Returns the upper-case numbers and texts of a script, from its globals()."""
    found = {}
    for name, value in namespace.items():
        if name.isupper() and isinstance(value, int | float | str):
            found[name] = value
    return found


def inputs_of(*values) -> dict[str, str]:
    """Returns what arguments name and a run reads, {file or hub name: digest}.

    Of a model's folder these are the files in it, of another folder all files below it, without hidden ones and
    a model's *.md, which nobody reads. The digest of a hub name that was loaded is its commit, for which the
    hub is asked again. Other words name nothing.
    """
    found = {}
    for value in values:
        if isinstance(value, list):
            found |= inputs_of(*value)
        if not isinstance(value, str):
            continue
        words = [value]
        # such as local:FOLDER, FILE.py:function:weight, DATA:split, NAME.OPTION=FILE
        for separator in re.finditer("[:=]", value):
            words += [value[: separator.start()], value[separator.end() :]]
        for word in filter(None, words):
            is_model = os.path.exists(f"{word}/config.json")
            below = glob.glob(glob.escape(word) + ("/*" if is_model else "/**"), recursive=True)
            for name in (word, *sorted(below)):
                if os.path.isfile(name) and not (is_model and name.endswith(".md")):
                    found[name] = digest_of(name)
            for kind in ("models", "datasets"):
                commit = f"{HF_HUB_CACHE}/{kind}--{word.replace('/', '--')}/refs/main"
                if os.path.isfile(commit) and not os.path.exists(word):
                    if kind == "models":  # data were read, and their commit asked for, before
                        with contextlib.suppress(OSError):
                            cached_file(word, "config.json", cache_dir=HF_HUB_CACHE)
                    found[f"hf://{kind}/{word}"] = Path(commit).read_text()
    return found


def loaded_code() -> list[str]:
    """Returns the loaded Python files that no installer brought: the script, rlmt/, rewards of your own."""
    files = {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}
    return [os.path.relpath(file) for file in files if file.endswith(".py") and "/python3" not in file]


def _default_folder(arguments: dict, script: str, model: str) -> Path:
    parent = Path("results")
    folder = Path(model)
    for run in (folder, *folder.parents):
        if (run / "command.txt").exists():
            parent = run.parent
    if folder.name == "model":  # results/<run>/model: the run's name says more
        folder = folder.parent
    label = arguments.get("preset") or folder.name
    key = hashlib.sha1(json.dumps(_identity(arguments), sort_keys=True).encode()).hexdigest()[:6]
    return parent / f"{script}__{label.replace('/', '-')}__s{arguments['seed']}__{key}"


def _through_json(args) -> dict:
    # so that tuples equal the lists of an earlier config.json
    return json.loads(json.dumps(dataclasses.asdict(args), default=str))


def _identity(arguments: dict) -> dict:
    """Returns the arguments that identify a run: a resume must have the same."""
    return {name: value for name, value in arguments.items() if name not in (*HOW_STARTED, *CHANGEABLE)}


def _contents(run: Path) -> list[Path]:
    if not run.exists():
        return []
    return [path for path in run.iterdir() if path.name != "lock"]


def changed_since(before: dict, args, script_constants: dict) -> list[str]:
    """Lists the arguments and constants that have other values than in `before`, a run's config.json."""
    # a run that is older than an argument had its default
    old_arguments = _through_json(type(args)()) | before["args"]
    new_arguments = _identity(_through_json(args))
    changed = []
    # constants at the top of a script are hyperparameters that a user edits inline
    for old, new in ((old_arguments, new_arguments), (before["constants"], script_constants)):
        for name, value in new.items():
            if old.get(name) != value:
                changed.append(f"{name} ({old.get(name)} -> {value})")
    return changed


@functools.cache  # reading the metadata of all packages takes tenths of a second
def installed_packages() -> list[str]:
    """Returns name==version of each installed package."""
    return sorted(f"{package.name}=={package.version}" for package in distributions())


def environment() -> str:
    """Returns commit, GPUs, packages and uncommitted changes."""
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        if not shutil.which("git"):
            return ""
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=root).stdout

    commit = git("rev-parse", "HEAD").strip()
    # with them the code of any run can be had again
    changes = git("diff", "HEAD", "--", ".", ":!results", ":!notebooks")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return "\n".join([commit, *gpus, *installed_packages(), changes])


def cut_log(path: Path, last_step: int) -> None:
    """Removes the rows of a log after `last_step`, so that no step is there twice."""
    if path.exists():
        write_jsonl(path, [row for row in read_log(path) if row["step"] <= last_step])


# --- 3. steps


def seed_step(seed: int, step: int) -> None:
    """Seeds Python, NumPy (vLLM takes request seeds from it on a GPU) and torch; every process draws
    differently."""
    state = PartialState()
    number = (seed * 1_000_003 + step) * state.num_processes + state.process_index
    set_seed(number % 2**32)  # NumPy takes no more than 32 bits


def rows_of_step(rows: list, step: int, per_step: int, *seed: int, leaves_out_rest: bool = True) -> list:
    """Returns the rows of a step (from 1): `per_step` prompts, traces or pairs.

    They follow from (seed, step) alone, so a resumed run sees what an unbroken one sees. An epoch goes
    through the rows once, in its own order; a remainder smaller than a step is left out, or is a step. There
    must be rows for a step.
    """
    steps_per_epoch = len(rows) // per_step
    if not leaves_out_rest:
        steps_per_epoch = math.ceil(len(rows) / per_step)
    epoch, position = divmod(step - 1, steps_per_epoch)
    # a generator of its own: what else was drawn before does not change the order
    order = np.random.default_rng((*seed, epoch)).permutation(len(rows))
    chosen = order[position * per_step : (position + 1) * per_step]
    return [rows[index] for index in chosen]


def plan_steps(n_rows: int, batch_size: int, epochs: float) -> int:
    """Returns the steps of so many epochs over the rows; exits with 2 if the processes cannot share a step."""
    state = PartialState()
    if batch_size % state.num_processes:  # it counts rows over all processes
        fail(f"--batch-size {batch_size} cannot be shared by {state.num_processes} processes; use a multiple")
    steps = max(1, round(epochs * (n_rows // batch_size)))
    state.print(f"{steps} steps of {batch_size} rows, on {state.num_processes} processes")
    return steps


def count_reasons(dropped: list[dict]) -> dict[str, int]:
    """Counts dropped rows by their reason."""
    return dict(Counter(row["reason"] for row in dropped))


class Timer:
    """Measures the phases of a step: each starts where the last one ended, the first one now.

    Every process measures itself.
    """

    def __init__(self, at_each_phase: Callable[[], None] = lambda: None):
        self.metrics: dict[str, float] = {}
        """time/<phase>: seconds. On a GPU also memory/<phase>: the most GiB that torch had allocated."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.at_each_phase = at_each_phase
        self.started = time.monotonic()
        self.last = self.started

    def end(self, phase: str) -> None:
        """Adds the time since the last call to time/<phase>. Waits for the GPU first."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels run on after the call that started them has returned
            gib = torch.cuda.max_memory_allocated() / 2**30
            self.metrics[f"memory/{phase}"] = max(gib, self.metrics.get(f"memory/{phase}", 0.0))
            torch.cuda.reset_peak_memory_stats()
        now = time.monotonic()
        self.metrics[f"time/{phase}"] = self.metrics.get(f"time/{phase}", 0.0) + now - self.last
        self.last = now
        self.at_each_phase()


def waits_for_endpoint(args) -> bool:
    """Tells whether a run waits for replies of a judge or a simulated user."""
    asked = [read_who(getattr(args, name, "")) for name in ("simulator", "judge")]
    asked.append(read_who(getattr(args, "gold", ""), otherwise="folder"))
    return any(who.kind == "endpoint" for who in asked)


STALL_MINUTES = 60  # a phase that takes longer ends the run
# Ctrl-C, and what launchers, schedulers and closed terminals send before they kill
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
STOPPED = 143  # exit code after a signal; a shell has the same after SIGTERM
STDERR = 2  # its number, which signal handlers and timers need


class Stopped(Exception):
    """Ends a run after a signal, when its checkpoint is written; the argument is the step."""


_HELD_GROUPS = []


def _hold_process_group() -> None:
    """Keeps the process group until the process ends.

    Otherwise a DDP model is the last to hold it. Freeing it holds the GIL and joins gloo's thread, which may
    need the GIL: one exit in some dozens hung.
    """
    if torch.distributed.is_initialized():
        _HELD_GROUPS.append(torch.distributed.group.WORLD)


# --- 4. the run

# each row has its step; a resume cuts them back to its checkpoint
LOGS = ("metrics.jsonl", "completions.jsonl", "held_out.jsonl", "held_out_completions.jsonl")


class Run:
    """A run, from the check of its folder to its summary.

    The folder is `args.out`, else {script}__{preset or model}__s{seed}__{hash of the arguments}, so the same
    command finds the same folder: beside that of the run that made the model, else in results/.
    """

    def __init__(self, args, script: str, model: str, script_constants: dict | None = None):
        """Checks that the run may have its folder, and writes nothing; also in a dry run.

        A folder that cannot be written to exits with 2, and an existing one, unless `args.overwrite` is set, or
        `args.resume` with equal arguments (except CHANGEABLE) that name the same contents, and equal constants.
        A complete run exits with 0 before any model is loaded, unless an argument of LENGTH has grown.
        """
        self.state = PartialState(cpu=not torch.cuda.is_available())
        arguments = _through_json(args)
        words = {}
        if self.state.is_main_process:  # which alone compares them and writes them down
            words = _identity(arguments) | {"code": loaded_code()}
        inputs = {name: inputs_of(value) for name, value in words.items()}
        self.args = args
        self.folder = Path(args.out or _default_folder(arguments, script, model))
        """It may not exist yet."""
        self.config = {
            "script": script,
            "args": arguments,
            "constants": script_constants or {},
            "reads": {name: digests for name, digests in inputs.items() if digests},
            "processes": self.state.num_processes,
        }
        """The content of config.json."""
        self.goes_on = args.resume and os.path.exists(self.folder / "config.json")
        """Whether it goes on from what the folder holds, as --resume asks."""
        self.checkpoint: Path | None = None
        """Folder of the checkpoint from which it goes on; None at a start."""
        self.first_step = 0
        """The step of that checkpoint; 0 at a start."""
        self.sampler = None
        """Of a loop that generates."""
        is_finished = False
        if self.state.is_main_process:
            try:
                if self.goes_on:
                    is_finished = self._check_arguments()
                else:
                    self._check_new()
                if not is_finished:
                    there = filter(os.path.exists, (self.folder, *self.folder.parents))
                    tempfile.TemporaryFile(dir=next(there)).close()
            except (OSError, ValueError) as error:  # ValueError: of a torn config.json
                fail(f"{self.folder} cannot be read or written to ({error}); name another folder with --out")
        # rank 0 decides for all, as another machine's view of the folder may lag behind
        if broadcast_object_list([is_finished])[0]:
            self.state.print(f"{self.folder} is complete; --overwrite starts it anew")
            self.state.destroy_process_group()
            sys.exit(0)
        if self.goes_on:
            self.check_inputs()

    def _check_new(self) -> None:
        """Exits with 2 if the folder holds something that may not be replaced."""
        run = self.folder
        if not _contents(run):
            return
        if self.args.resume:
            fail(
                f"{run} has no config.json, so it cannot be resumed; take --overwrite in its place, or another --out"
            )
        if not self.args.overwrite:
            fail(f"{run} exists; --resume continues it, --overwrite replaces it, --out names another folder")
        if not (run / "command.txt").exists() or any(run.glob("*/command.txt")):
            fail(
                f"--overwrite: {run} is not a run's folder, or other runs are in it; delete it yourself if you mean to"
            )
        for argument, names in self.config["reads"].items():
            for name in names:
                path = Path(name)
                # by its own name, or by that of what it links to
                if run.resolve() in map(Path.resolve, (*path.absolute().parents, *path.resolve().parents)):
                    fail(
                        f"--overwrite would delete {name}, which this run reads (--{argument.replace('_', '-')}); "
                        "take another --out"
                    )

    def _check_arguments(self) -> bool:
        """Exits with 2 if the run was started with something else; tells whether it is finished, and not to be
        longer now."""
        before = json.loads((self.folder / "config.json").read_text())
        changed = changed_since(before, self.args, self.config["constants"])
        if changed:
            fail(f"--resume: {self.folder} was started with other arguments: {', '.join(changed)}")
        if before["processes"] != self.config["processes"]:
            fail(
                f"--resume: {self.folder} was started on {before['processes']} processes, not "
                f"{self.config['processes']}"
            )
        if not (self.folder / "summary.json").exists():
            return False
        now = self.config["args"]
        return all(now[name] <= before["args"][name] for name in LENGTH if name in before["args"])

    def check_inputs(self, *arguments: str) -> None:
        """Exits with 2 if what these arguments (none: all) name is not what it was at the run's start; warns of
        edited code."""
        if not self.state.is_main_process:
            return
        reads = json.loads((self.folder / "config.json").read_text()).get("reads", {})
        for argument in arguments or reads:  # older runs have none
            before = reads.get(argument, {})
            # of code what was loaded then: tests, say, have loaded more
            now = inputs_of(self.config["args"].get(argument, [*before]))
            changed = dict(before.items() ^ now.items())
            if changed and argument == "code":
                print(f"WARNING: edited since the start of {self.folder}: {', '.join(sorted(changed))}")
            elif changed:
                name = min(changed)
                fail(
                    f"what --{argument.replace('_', '-')} names is not what it was at the start of {self.folder}: "
                    f"{name} was {before.get(name, 'missing')}, and is {now.get(name, 'missing')}; put it back (of a "
                    "hub name that commit into refs/main of its cache, with HF_HUB_OFFLINE=1), or use --overwrite"
                )

    def start(self, dropped: list[dict] | None = None, has_steps: bool = True) -> None:
        """Makes the folder with config.json, command.txt and env.txt, and finds the last checkpoint.

        A folder in use exits with 2.

        Args:
            dropped: the rows of dropped.jsonl, which is written if they are given.
            has_steps: whether steps are logged and saved there; those of DPO are in the folders of its rounds,
                and an evaluation has none.
        """
        if self.state.is_main_process:
            command = shlex.join([sys.executable, *sys.argv])
            starts = {"command.txt": command, "env.txt": environment()}
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_folder(self.folder)
            if not self.goes_on:  # --overwrite; what may be deleted was checked before
                for path in _contents(self.folder):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
            print(f"run folder: {self.folder}", flush=True)
            # a run that is to be longer is not finished any more
            (self.folder / "summary.json").unlink(missing_ok=True)
            write_file(self.folder / "config.json", json.dumps(self.config, indent=1))
            if dropped is not None:
                write_jsonl(self.folder / "dropped.jsonl", dropped)
            for name, text in starts.items():
                with open(self.folder / name, "a") as file:  # once per start: a resumed run has several
                    file.write(text + "\n")
        check_shared_disk(self.folder)
        if has_steps:
            self.find_checkpoint()

    def find_checkpoint(self) -> None:
        """Finds the last whole checkpoint, if the run is resumed, and cuts the logs back to it."""
        last_logged = -1  # without a checkpoint all rows go, also those of step 0 in held_out.jsonl
        if self.args.resume:
            self.checkpoint = latest(self.folder)
            if not self.checkpoint and any(self.folder.glob("checkpoint-*/complete")):
                fail(f"no checkpoint of {self.folder} can be read; --overwrite starts anew")
            self.state.print(f"resumes from {self.checkpoint or 'the beginning'}", flush=True)
        if self.checkpoint:
            self.first_step = last_logged = step_of(self.checkpoint)
        steps = getattr(self.args, "steps", self.first_step)  # scripts that count epochs have no --steps
        if self.first_step > steps:
            fail(
                f"--steps {steps}: {self.checkpoint} has trained {self.first_step} steps; name at least as many"
            )
        if self.state.is_main_process:
            # those that are not whole must not count among those that are kept
            for folder in numbered(self.folder):
                if step_of(folder) > self.first_step or not (folder / "complete").exists():
                    shutil.rmtree(folder)
            for name in LOGS:  # steps behind the checkpoint are trained, and logged, once more
                cut_log(self.folder / name, last_logged)
        self.state.wait_for_everyone()

    def round(self, number: int) -> "Run":
        """Returns the run of one round, which has a folder, a log and checkpoints of its own in this one's."""
        part = copy.copy(self)
        part.folder = self.folder / f"round-{number}"
        part.folder.mkdir(exist_ok=True)
        part.find_checkpoint()
        return part

    # --- training

    @contextlib.contextmanager
    def training(
        self,
        learners: dict[str, Learner],
        tokenizer,
        n_steps: int,
        columns: dict[str, str],
        sampler=None,
        checks: Sequence[Callable] = (),
        measure: Callable[[int], bool] | None = None,
    ) -> Iterator[None]:
        """Surrounds a loop over `steps`: ends it in order on STOP_SIGNALS, and with its stacks if it hangs.

        Args:
            learners: {"model": the policy, "critic": ..., ...}, which are in each checkpoint.
            n_steps: the run's length, steps of an earlier start included.
            columns: {title on the screen: key of the metrics}.
            sampler: of a loop that generates; it is closed at the run's end.
            checks: functions of (step, metrics, completions) that raise an error, or return a reason to end
                the run after this step.
            measure: measures held-out prompts before each checkpoint, and at step 0; tells whether the model
                is the best so far.
        """
        _hold_process_group()
        self.learners = learners
        self.tokenizer = tokenizer
        self.n_steps = n_steps
        self.columns = columns
        self.sampler = sampler
        self.checks = checks
        self.measure = measure
        self.last_step = self.first_step
        """The last step that was trained."""
        self.end_reason = ""
        """Why the run ends before `n_steps`."""
        self.timer = Timer()
        """That of the step; `timer.end(phase)` ends a phase."""
        self.is_stopping = False
        """Whether this process received one of STOP_SIGNALS."""
        self.started = time.monotonic()
        self.n_tokens = 0
        if self.state.is_main_process:  # a resumed run counts on
            for line in read_log(self.folder / "metrics.jsonl")[-1:]:
                self.n_tokens = line.get("num_tokens", 0)
        self.tracker = None
        or_warn(f"--report-to {self.args.report_to}", self._start_tracker)
        before = {}
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup ignores SIGHUP
                before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        except Stopped as stopped:
            self.state.print(
                f"stopped by a signal after step {stopped}; --resume continues from checkpoint-{stopped}"
            )
            self._leave()
            sys.exit(STOPPED)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            faulthandler.cancel_dump_traceback_later()
            if self.tracker:
                or_warn("--report-to", self.tracker.finish)
            self.learners = {}  # the caller may need their memory

    def steps(self) -> Iterator[int]:
        """Yields the steps that are left, from 1 on. Each is seeded, so that a resumed run draws the same."""
        if self.measure and self.first_step == 0:  # where the curves of held_out.jsonl begin
            seed_step(self.args.seed, 0)
            self.measure(0)
        # an earlier start may have been killed before it ended for what its last step showed
        for line in read_log(self.folder / "metrics.jsonl")[-1:]:
            self._ask_checks(line["step"], line, ())
        for step in range(self.first_step + 1, self.n_steps + 1):
            if self.end_reason:
                return
            self.timer = Timer(at_each_phase=self._expect_progress)
            self._expect_progress()
            seed_step(self.args.seed, step - 1)
            yield step

    def check_finite(self, step: int, metrics: dict[str, float], rows: list) -> None:
        """Ends the run before an update that is not finite; writes this process's rows (dataclasses) to disk."""
        for name in ("loss", "grad_norm", "value/loss", "value/grad_norm"):
            if not math.isfinite(metrics.get(name, 0.0)):
                path = self.folder / f"not_finite-rank{self.state.process_index}.jsonl"
                append_jsonl(path, map(dataclasses.asdict, rows))
                raise FloatingPointError(f"step {step}: {name} is {metrics[name]}; its rows are in {path}")

    def end_step(self, step: int, metrics: dict, n_tokens: int, completions: Sequence = ()) -> None:
        """Ends a step: logs it, checks it, saves; raises Stopped after a signal.

        Args:
            n_tokens: tokens that the step read, over all processes.
            completions: those of all processes; each is a row of completions.jsonl.
        """
        self.timer.end("other")
        self.last_step = step
        if self.state.is_main_process:
            self._log(step, metrics | self.timer.metrics, n_tokens)
            rows = [{"step": step, **completion.row()} for completion in completions]
            if rows:
                append_jsonl(self.folder / "completions.jsonl", rows)
        # after the log, so that the step which ends a run can be looked at
        self._ask_checks(step, metrics, completions)
        is_stopping = any(gather_object([self.is_stopping]))  # on any process, as all of them must save
        is_last = step == self.n_steps or bool(self.end_reason)
        is_due = is_last or step % self.args.save_steps == 0
        if is_due or is_stopping:
            # a stop has no time to measure, and an unbroken run does not measure here
            self._save(step, is_due)
        if is_stopping:
            raise Stopped(step)
        if self.end_reason:
            self.state.print(f"{self.end_reason}; the run ends here")

    def _ask_checks(self, step: int, metrics: dict, completions: Sequence) -> None:
        for check in self.checks:
            self.end_reason = check(step, metrics, completions) or self.end_reason

    def _save(self, step: int, measures: bool) -> None:
        # measured before it is saved: a run that is killed between the two repeats this step, and measures
        # again
        faulthandler.cancel_dump_traceback_later()  # a judge of --gold, or 100 GB on a slow disk, may take long
        if measures and self.measure and self.measure(step):
            save_model(self.folder / "best_by_gold", self.learners["model"].model, self.tokenizer)
        save_checkpoint(self.folder, step, self.learners, self.tokenizer)

    def _log(self, step: int, metrics: dict, n_tokens: int) -> None:
        """Writes a line of metrics.jsonl, prints and reports it."""
        elapsed = time.monotonic() - self.started
        seconds = self.timer.last - self.timer.started
        self.n_tokens += n_tokens
        metrics = metrics | {"num_tokens": self.n_tokens, "step_time": seconds}
        line = {"step": step, "seconds": round(elapsed, 2), **metrics}
        append_jsonl(self.folder / "metrics.jsonl", [line])
        if self.tracker:
            numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
            or_warn(f"--report-to lacks step {step}", self.tracker.log, numbers, step)

        shown = []
        for title, key in self.columns.items():
            value = metrics.get(key)
            if value is not None and math.isfinite(value):
                shown.append(f"{title} {value:.4g}")
        # of this start alone: steps before a resume took other time
        minutes_left = elapsed / (step - self.first_step) * (self.n_steps - step) / 60
        shown += [f"tokens/s {n_tokens / seconds:.0f}", f"left {minutes_left:.1f} min"]
        print(f"step {step}/{self.n_steps}", *shown, sep="  ", flush=True)

    def _expect_progress(self) -> None:
        """Ends the process with the stacks of its threads, unless this is called again within
        STALL_MINUTES.

        The timer's thread does not need the GIL, so it works while another thread holds it. It is off under
        a debugger, and in runs that wait for a judge or a simulator, whose client has limits of its own.
        """
        if sys.gettrace() is None and not waits_for_endpoint(self.args):
            faulthandler.dump_traceback_later(60 * STALL_MINUTES, exit=True, file=STDERR)

    def _on_signal(self, number, frame) -> None:
        """Notes one of STOP_SIGNALS, at which the run stops at the end of its step; the next Ctrl-C ends it at
        once."""
        self.is_stopping = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for output in (1, STDERR):
            # a terminal that was closed, which SIGHUP says, would answer the next print with an error
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        name = signal.Signals(number).name
        os.write(STDERR, f"{name}: the run stops with a checkpoint at the end of this step\n".encode())

    def _start_tracker(self) -> None:
        """Starts a run of Weights & Biases, Trackio or TensorBoard, or goes on with that of a resumed run.

        Does nothing for "none", and on all but the main process. A resume may log steps a second time:
        TensorBoard then drops the first ones, W&B the second ones, and Trackio has both. They are equal where
        resuming is exact.
        """
        report_to = self.args.report_to
        if report_to == "none" or not self.state.is_main_process:
            return
        tracker_class = LOGGER_TYPE_TO_CLASS[report_to]
        if report_to == "tensorboard":
            tracker = tracker_class(report_to, self.folder, purge_step=self.first_step + 1)
        else:
            id_file = self.folder / "tracker_id"  # as a run that is overwritten has the same name
            if not id_file.exists():
                id_file.write_text(f"{self.folder.parent.name}-{self.folder.name}-{secrets.token_hex(4)}")
            name = id_file.read_text()
            settings = {"name": name, "config": dataclasses.asdict(self.args), "resume": "allow"}
            if report_to == "wandb":  # its id makes a resumed run go on in the same curves
                settings |= {"id": name, "dir": str(self.folder)}
            tracker = tracker_class("rlmt", **settings)
        tracker.start()
        self.tracker = tracker

    # --- the end

    def write_summary(self, summary: dict) -> None:
        """Writes summary.json, which marks a finished run."""
        if self.state.is_main_process:
            os.sync()  # a power cut would else leave the mark, and not the model
            write_file(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")

    def finish(self, summary: dict, next_command: str) -> None:
        """Ends a training script: writes summary.json, the model card and page.html, closes sampler and process
        group, and says where the model lies and the next command.

        `next_command`: a script and its flags, before the model's folder.
        """
        self.write_summary(summary)  # after model/: its existence says that the run is complete
        self.state.wait_for_everyone()
        self._leave()
        if self.state.is_main_process:  # last, as nobody waits for them and nothing is lost with them
            from page import write_page  # only the end of a run needs these
            from rlmt.card import write_card

            or_warn(f"no model card of {self.folder}", write_card, self.folder)
            or_warn(f"no page of {self.folder}", write_page, [self.folder], self.folder / "page.html")
            print(f"model: {self.folder}/model\nnext: python {next_command} {self.folder}/model")

    def _leave(self) -> None:
        """Closes the sampler, and leaves the process group together with all other processes."""
        if self.sampler:
            self.sampler.close()  # first: vLLM in this process has groups of its own within the process group
        if torch.distributed.is_initialized():
            _hold_process_group()
            self.state.wait_for_everyone()
            self.state.destroy_process_group()
