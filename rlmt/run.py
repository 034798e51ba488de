"""A run: its arguments, its folder, its log. Nothing is ever overwritten unless the user asks for it."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import tyro
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object, set_seed

from rlmt import watchdog
from rlmt.checkpoint import latest, numbered, step_of
from rlmt.data import FILE_TYPES, append_jsonl, read_log, write_file, write_jsonl
from rlmt.endpoint import check_key_env, check_url
from rlmt.watchdog import STOPPED, lock_folder, set_run, stoppable, watched
from utils import fail, in_one_line, or_fail, or_warn

# --- 1. arguments

AT_LEAST_ONE = (
    "steps",
    "rounds",
    "batch_size",
    "micro_batch_tokens",
    "tensor_parallel",
    "judge_tensor_parallel",
    "prompts_per_step",
    "updates_per_rollout",
    "num_iterations",
    "rollout_batch_size",
    "max_prompt_tokens",
    "max_completion_tokens",
    "max_turn_tokens",
    "save_steps",
)


def parse_args(args_class: type, presets: dict[str, dict], released: dict[str, dict] | None = None):
    """Parses the command line. Order: default < preset < `released` (with --as-released) < flag.

    Unknown names and impossible values exit with 2.
    """
    # --flag=value becomes --flag value
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    preset, values = _read_preset(words, presets, released or {})
    default = dataclasses.replace(args_class(), **values)
    for field in dataclasses.fields(default):
        flag = "--" + field.name.replace("_", "-")
        n_given = sum(word.replace("_", "-") == flag for word in words)
        if isinstance(getattr(default, field.name), tuple) and n_given > 1:
            fail(f"{flag} is given {n_given} times; the last would count, so write all values after one")
    args = tyro.cli(args_class, default=default)
    for field in dataclasses.fields(args):  # so that 2 and 2.0 are the same run
        if field.type is float:
            setattr(args, field.name, float(getattr(args, field.name)))
    is_first_process = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first_process and values:
        kept = [f"{field} {value}" for field, value in values.items() if getattr(args, field) == value]
        print(f"--preset {preset} sets", ", ".join(kept))
    check_values(args)

    turned_on_lora = getattr(args, "lora_r", 0) and not default.lora_r
    for field in ("learning_rate", "critic_learning_rate"):
        rate = getattr(args, field, None)
        if is_first_process and turned_on_lora and rate is not None and rate == getattr(default, field):
            flag = "--" + field.replace("_", "-")
            print(f"WARNING: {flag} {rate:g} is that of full training; LoRA wants about ten times as much")
    return args


def _read_preset(words: list[str], presets: dict[str, dict], released: dict[str, dict]) -> tuple[str, dict]:
    """Returns the name after --preset, and the values that it sets instead of the defaults."""
    preset = ""
    for flag, value in zip(words, words[1:]):
        if flag == "--preset":
            preset = value
    if preset and preset not in presets:
        fail(f"unknown preset {preset!r}; known: {', '.join(presets) or 'none'}")
    values = presets.get(preset, {})
    if any(word.replace("_", "-") == "--as-released" for word in words):  # tyro reads --as_released too
        if preset not in released:
            known = ", ".join(released) or "none"
            fail(f"--as-released: nothing was released for preset {preset!r}; known: {known}")
        values = values | released[preset]
    return preset, values


def check_values(args) -> None:
    """Exits with 2 for numbers that cannot be, and for a key or password in a URL, which would be logged."""
    for field in AT_LEAST_ONE:
        value = getattr(args, field, 1)
        if value < 1:
            fail(f"--{field.replace('_', '-')} {value}: use 1 or more")
    if getattr(args, "stall_minutes", 1) <= 0:
        fail(f"--stall-minutes {args.stall_minutes}: use more than 0")
    if hasattr(args, "learning_rate"):  # evaluations may be greedy
        _check_training_samples(args)
    if getattr(args, "budget", 0) and not any(args.price):
        fail("--budget needs --price: US dollars for a million tokens read and written")
    _check_bitsandbytes(args)
    report_to = getattr(args, "report_to", "none")
    if report_to != "none" and not importlib.util.find_spec(report_to):
        fail(f"--report-to {report_to}: it is not installed; pip install {report_to}")

    for field, value in vars(args).items():
        text = str(value)
        url = ""
        if text.startswith("judge:"):  # judge:MODEL@URL
            url = text.partition("@")[2]
        elif "url" in field or "://" in text:
            url = text
        or_fail(check_url, url, f"--{field.replace('_', '-')}")
    # before it is logged: the key itself may have been typed
    or_fail(check_key_env, getattr(args, "key_env", ()))


def _check_training_samples(args) -> None:
    """Exits with 2 for a temperature or a top-p that no training script can sample at."""
    temperature = getattr(args, "temperature", 1.0)
    top_p = getattr(args, "top_p", 1.0)
    if not temperature > 0:
        fail(
            f"--temperature {temperature}: use more than 0; at 0 all completions of a prompt would be the same"
        )
    if not 0 < top_p <= 1:
        fail(f"--top-p {top_p}: use more than 0 and at most 1, which samples from all tokens")


def _check_bitsandbytes(args) -> None:
    """Exits with 2 for 4-bit weights without LoRA, and for 4-bit weights or an 8-bit optimizer under FSDP."""
    load_in_4bit = getattr(args, "load_in_4bit", False)
    if load_in_4bit and not args.lora_r:
        fail("--load-in-4bit trains an adapter only; add --lora-r 64, say")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        reason = (
            "needs whole weights on each GPU, and FSDP shards them; use accelerate/1gpu.yaml, or leave it out"
        )
        if load_in_4bit:
            fail(f"--load-in-4bit {reason}")
        if getattr(args, "optim", "adamw") != "adamw":
            fail(f"--optim {args.optim} {reason}")


def refuse_unused(reasons: dict[str, str]) -> None:
    """Exits with 2 for a flag on the command line that has no effect.

    `reasons`: {flag: why it has no effect}.
    """
    typed = {word.partition("=")[0].replace("_", "-") for word in sys.argv[1:]}
    for flag, reason in reasons.items():
        if flag in typed:
            fail(f"{flag} does nothing {reason}; leave it out")


@functools.cache
def load_function(spec: str):
    """Loads the function of `path/to/file.py:name`; exits with 2 if there is none.

    Its file may load a model, so it is run once, however often the function is asked for.
    """
    path, _, name = spec.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        fail(f"{spec!r} is not file.py:function of an existing file")
    # named by its path, as its stem could be the name of another module
    module_spec = importlib.util.spec_from_file_location(path, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path] = module
    module_spec.loader.exec_module(module)
    if not hasattr(module, name):
        fail(f"{path} has no function {name!r}")
    return getattr(module, name)


# --- 2. log files


def write_summary(run: Path, summary: dict) -> None:
    """Writes and prints summary.json, which marks a finished run; main process only."""
    if PartialState().is_main_process:
        write_file(run / "summary.json", json.dumps(summary, indent=1) + "\n")
        print(json.dumps(summary), flush=True)


def start_tracker(report_to: str, run: Path, first_step: int):
    """Starts a run of Weights & Biases, Trackio or TensorBoard, or goes on with that of a resumed run.

    Returns None for "none", and on all but the main process. A resume may log steps a second time: TensorBoard
    then drops the first ones, W&B the second ones, and Trackio has both. They are equal where resuming is exact.
    """
    if report_to == "none" or not PartialState().is_main_process:
        return None
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if report_to == "tensorboard":
        tracker = LOGGER_TYPE_TO_CLASS[report_to](report_to, run, purge_step=first_step + 1)
    else:
        name = run.name
        if not (run / "config.json").exists():  # a round of DPO
            name = f"{run.parent.name}-{run.name}"
        id_file = run / "tracker_id"  # as a run that is overwritten has the same name
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        key = id_file.read_text()
        settings = {"config": read_arguments(run), "resume": "allow"}
        if report_to == "wandb":
            settings |= {"name": name, "id": key, "dir": str(run)}
        else:
            settings["name"] = f"{name}-{key}"  # Trackio knows a run by its name
        project = os.environ.get("WANDB_PROJECT", "rlmt")
        tracker = LOGGER_TYPE_TO_CLASS[report_to](project, **settings)
    tracker.start()
    return tracker


class Timer:
    """Measures the phases of a step: each lap starts where the last one ended, the first one now.

    Scoring that runs while others are sampled counts as rollout. Every process measures itself.
    """

    def __init__(self):
        self.metrics: dict[str, float] = {}
        """time/<phase>: seconds. On a GPU also memory/<phase>: the most GiB that torch had allocated."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.started = time.monotonic()
        self.last = self.started

    @property
    def seconds(self) -> float:
        """Returns the seconds of all laps."""
        return self.last - self.started

    def end(self, phase: str) -> None:
        """Adds the time since the last call to time/<phase>. Waits for the GPU first."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            gib = torch.cuda.max_memory_allocated() / 2**30
            self.metrics[f"memory/{phase}"] = max(gib, self.metrics.get(f"memory/{phase}", 0.0))
            torch.cuda.reset_peak_memory_stats()
        now = time.monotonic()
        self.metrics[f"time/{phase}"] = self.metrics.get(f"time/{phase}", 0.0) + now - self.last
        self.last = now


class StepLogger:
    """Writes metrics.jsonl, prints and reports each step. Main process only; other ranks' calls do nothing."""

    def __init__(
        self, run: Path, first_step: int, steps: int, columns: dict[str, str], report_to: str = "none"
    ):
        """`columns`: {name on the screen: key of the metrics}."""
        self.run = run
        self.first_step = first_step
        self.steps = steps
        self.columns = columns
        self.started = time.monotonic()
        path = run / "metrics.jsonl"
        rows = read_log(path) if PartialState().is_main_process else []
        self.n_tokens = rows[-1].get("num_tokens", 0) if rows else 0
        self.tracker = start_tracker(report_to, run, first_step)

    def log(self, step: int, metrics: dict, n_tokens: int, seconds: float) -> None:
        """Logs step number `step` (from 1), which read `n_tokens` over all processes and took `seconds`."""
        if not PartialState().is_main_process:
            return
        elapsed = time.monotonic() - self.started
        self.n_tokens += n_tokens
        metrics = metrics | {"num_tokens": self.n_tokens, "step_time": seconds}
        append_jsonl(self.run / "metrics.jsonl", [{"step": step, "seconds": round(elapsed, 2), **metrics}])
        if self.tracker:
            numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
            self.tracker.log(numbers, step=step)

        shown = []
        for name, key in self.columns.items():
            value = metrics.get(key)
            if value is not None and math.isfinite(value):
                shown.append(f"{name} {value:.4g}")
        minutes_left = elapsed / (step - self.first_step) * (self.steps - step) / 60
        shown += [f"tokens/s {n_tokens / seconds:.0f}", f"left {minutes_left:.1f} min"]
        print(f"step {step}/{self.steps}", *shown, sep="  ", flush=True)

    def log_completions(self, step: int, completions: list) -> None:
        """Adds the completions of a step to completions.jsonl."""
        if PartialState().is_main_process:
            append_jsonl(self.run / "completions.jsonl", [{"step": step, **c.row()} for c in completions])

    def close(self) -> None:
        """Ends the run of the tracker, if there is one."""
        if self.tracker:
            self.tracker.finish()


# --- 3. the run's folder

# arguments that say how a run is started, not what it is
HOW_STARTED = ("out", "resume", "overwrite", "dry_run")
# a larger value continues a finished run
LENGTH = ("steps", "rounds")
# arguments that a resume may change: with another value, what was learned so far would be the same
FREE = (
    *LENGTH,
    "stall_minutes",
    "keep_checkpoints",
    "save_steps",
    "budget",
    "price",
    "key_env",
    "concurrency",
    "micro_batch_tokens",
    "reward_tokens_per_batch",
    "vllm_server_url",
    "simulator_url",  # which model plays the user or judges is said by --simulator and --judge
    "judge_url",
    "vllm_memory",
    "vllm_sleep",
    "data_parallel",
    "tensor_parallel",
    "judge_tensor_parallel",
    "allow_truncation",
    "report_to",
)


def digest_files(arguments: dict) -> dict[str, str]:
    """Returns {path: SHA-256} of the files, model folders and folders of data sets that arguments name."""
    words = []
    for value in arguments.values():
        words += value if isinstance(value, list) else [value]
    paths = set()
    for word in words:
        if isinstance(word, str) and word:
            # local:PATH, NAME.OPTION=PATH and PATH.py:FUNCTION
            path = Path(re.sub(r"^local:|^\w+\.\w+=|(?<=\.py):.*", "", word))
            without_split = Path(re.sub(r":[^:/]*$", "", word))  # FOLDER:SPLIT
            paths.add(path if path.exists() else without_split)

    digests = {}
    for path in sorted(paths):
        if path.is_file():
            digests[str(path)] = _digest_file(path)
        elif path.is_dir() and any(path.glob("*.safetensors")):
            digests[str(path)] = _digest_weights(path)
        elif path.is_dir():
            for file in sorted(_rows_in(path)):
                digests[str(file)] = _digest_file(file)
    return digests


def _rows_in(folder: Path) -> list[Path]:
    """Returns the files of a data set: those that `datasets` saves, and those that rlmt/data.py reads."""

    return [file for file in folder.rglob("*") if file.name.endswith((".arrow", *FILE_TYPES))]


def _digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_weights(folder: Path) -> str:
    """Digests sizes, and the first and last MiB of each file, as whole gigabytes would take too long."""
    digest = hashlib.sha256()
    for part in sorted(folder.glob("*.safetensors")):
        size = part.stat().st_size
        with open(part, "rb") as file:
            digest.update(f"{part.name} {size} ".encode() + file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()


def constants(namespace: dict) -> dict:
    """Returns the upper-case numbers and texts of a script, from its globals()."""
    found = {}
    for name, value in namespace.items():
        if name.isupper() and isinstance(value, int | float | str):
            found[name] = value
    return found


def _differences(before: dict, now: dict) -> list[str]:
    return [f"{key} ({before.get(key)} -> {value})" for key, value in now.items() if before.get(key) != value]


def _lasting(arguments: dict) -> dict:
    """Returns the arguments that cannot change without making it another run."""
    return {name: value for name, value in arguments.items() if name not in (*HOW_STARTED, *FREE)}


def run_key(arguments: dict) -> str:
    """Returns the hash of the lasting arguments; it ends the folder's name and marks the checkpoints."""
    return hashlib.sha1(json.dumps(_lasting(arguments), sort_keys=True).encode()).hexdigest()[:6]


def read_arguments(folder: Path) -> dict:
    """Returns the arguments that a run was started with. A round of DPO, a folder in its run, has those of the run."""
    path = folder / "config.json"
    if not path.exists():
        path = folder.parent / "config.json"
    return json.loads(path.read_text())["args"]


def _run_name(arguments: dict, script: str, model: str) -> str:
    folder = Path(model)
    if folder.name == "model":  # results/<run>/model: the run's name says more
        folder = folder.parent
    label = arguments.get("preset") or folder.name
    return f"{script}__{label.replace('/', '-')}__s{arguments['seed']}__{run_key(arguments)}"


class Start(NamedTuple):
    """A run that `check_run` allows, and that `start_run` starts."""

    run: Path
    """Its folder, which may not exist yet."""
    config: dict
    """The content of config.json. The digests of files are there on the main process only."""
    is_resume: bool
    """Whether it goes on from what the folder holds, as --resume asks."""


def check_run(args, script: str, model: str, script_constants: dict | None = None) -> Start:
    """Checks that the run may have its folder, and writes nothing; every rank calls it, also in a dry run.

    The folder is `args.out`, else results/{script}__{preset or model}__s{seed}__{hash of the arguments}, so the
    same command finds the same folder. An existing folder exits with 2, unless `args.overwrite` is set, or
    `args.resume` with equal arguments (except FREE), constants and files.
    A complete run exits with 0 before any model is loaded, unless `args.steps` or `args.rounds` has grown.
    """
    state = PartialState(cpu=not torch.cuda.is_available())
    # as config.json gives them back, for the comparison with an earlier start
    arguments = json.loads(json.dumps(dataclasses.asdict(args), default=str))
    run = Path(args.out or f"results/{_run_name(arguments, script, model)}")
    is_resume = args.resume and (run / "config.json").exists()
    config = {
        "script": script,
        "args": arguments,
        "constants": script_constants or {},
        "processes": state.num_processes,
    }
    if state.is_main_process:
        inputs = {name: value for name, value in arguments.items() if name not in HOW_STARTED}
        config["files"] = digest_files(inputs)
        if is_resume:
            _check_resume(run, config)
        else:
            _check_new_run(run, args, arguments)
    if broadcast_object_list([is_resume and _is_finished(run, arguments)])[0]:
        longer = ""
        if any(name in arguments for name in LENGTH):
            longer = ", a larger --steps or --rounds trains it on"
        state.print(f"{run} is complete; --overwrite starts it anew{longer}")
        state.destroy_process_group()
        sys.exit(0)
    return Start(run, config, is_resume)


def start_run(start: Start) -> Path:
    """Makes the run's folder with config.json, command.txt and env.txt, and returns it; every rank calls it.

    A folder in use exits with 2.
    """
    state = PartialState()
    run = start.run
    if state.is_main_process:
        run.mkdir(parents=True, exist_ok=True)
        or_fail(lock_folder, run)
        if not start.is_resume:
            _empty_folder(run)
        print(f"run folder: {run}", flush=True)
        if (run / "model").exists():  # a training run that is to be longer is not finished any more
            (run / "summary.json").unlink(missing_ok=True)
        write_file(run / "config.json", json.dumps(start.config, indent=1))
        with open(run / "command.txt", "a") as file:  # a line a start: a resumed run has several
            file.write(shlex.join([sys.executable, *sys.argv]) + "\n")
        _write_environment(run / "env.txt")

    state.wait_for_everyone()
    run.mkdir(parents=True, exist_ok=True)  # a second machine may not see the folder on their shared disk yet
    set_run(run, start.config["args"].get("stall_minutes", 0))
    return run


def _is_finished(run: Path, arguments: dict) -> bool:
    """Tells whether a run has its summary, and its model if it trains one, and is not to be longer now."""
    if not (run / "summary.json").exists():
        return False
    is_training = "learning_rate" in arguments
    if is_training and not (run / "model").exists():
        return False
    before = read_arguments(run)
    return all(arguments[name] <= before[name] for name in LENGTH if name in arguments)


def _contents(run: Path) -> list[Path]:
    if not run.exists():
        return []
    return [path for path in run.iterdir() if path.name != "lock"]


def _empty_folder(run: Path) -> None:
    for path in _contents(run):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_new_run(run: Path, args, arguments: dict) -> None:
    """Exits with 2 if the folder holds something that may not be replaced."""
    if _contents(run) and not args.overwrite:
        fail(f"{run} exists; --resume continues it, --overwrite replaces it, --out names another folder")
    if _contents(run) and (not (run / "command.txt").exists() or any(run.glob("*/command.txt"))):
        fail(
            f"--overwrite: {run} is not a run's folder, or other runs are in it; delete it yourself if you mean to"
        )
    if args.resume and not args.out:
        _warn_of_nearest_run(run, arguments)


def _check_resume(run: Path, now: dict) -> None:
    """Exits with 2 if the run was started with something else. `now`: as config.json, but of this start."""
    before = json.loads((run / "config.json").read_text())
    changed = _differences(before["args"], _lasting(now["args"]))
    changed += _differences(before.get("constants", {}), now["constants"])
    if changed:
        fail(f"--resume: {run} was started with other arguments: {', '.join(changed)}")
    if before["processes"] != now["processes"]:
        fail(f"--resume: {run} was started on {before['processes']} processes, not {now['processes']}")
    rounds_begun = len(
        list(run.glob("round-[1-9]*"))
    )  # of DPO; the model of a later round cannot be taken back
    n_rounds = now["args"].get("rounds", rounds_begun)
    if n_rounds < rounds_begun:
        fail(
            f"--resume: {run} has begun round {rounds_begun}, so --rounds {n_rounds} is too few; "
            f"{run}/round-{n_rounds}/model is the model after round {n_rounds}"
        )
    for path, digest in before.get("files", {}).items():
        if now["files"].get(path) != digest:
            fail(f"--resume: {path} has changed since {run} was started; --overwrite starts anew")
    free = {name: value for name, value in now["args"].items() if name in FREE}
    freely_changed = _differences(before["args"], free)
    if freely_changed:
        print("goes on with", ", ".join(freely_changed))


def _warn_of_nearest_run(run: Path, arguments: dict) -> None:
    """Warns that --resume finds nothing, and names the run whose arguments differ least."""
    differences = {}
    without_hash = run.name[:-6]
    for path in sorted(run.parent.glob(f"{without_hash}*/config.json")):
        differences[path.parent] = _differences(read_arguments(path.parent), _lasting(arguments))
    if differences:
        nearest = min(differences, key=lambda folder: len(differences[folder]))
        print(
            f"WARNING: --resume starts anew, as there is no {run}; {nearest} has other arguments: "
            f"{', '.join(differences[nearest])}"
        )


@functools.cache  # reading the metadata of all packages takes a tenth of a second
def installed_packages() -> list[str]:
    """Returns name==version of each installed package."""
    packages = []
    for package in distributions():
        metadata = package.metadata
        packages.append(f"{metadata['Name']}=={metadata['Version']}")
    return sorted(packages)


def _write_environment(path: Path) -> None:
    """Writes commit, GPUs, packages and uncommitted changes; a resumed run keeps what it was started with."""
    root = Path(__file__).parent

    def git(*arguments: str) -> str:
        if not shutil.which("git"):
            return ""
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=root).stdout

    commit = git("rev-parse", "HEAD").strip()
    changes = git("diff", "HEAD", "--", ".", ":!results", ":!notebooks")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["no GPU"]
    environment = "\n".join([commit, *gpus, *installed_packages(), changes])

    earlier = ""
    if path.exists():
        earlier = path.read_text()
    if earlier.endswith(environment):
        return
    if earlier:
        print(f"WARNING: commit, changed files, packages or GPUs differ from the last start; {path} has both")
        environment = f"{earlier}\n\n# resumed\n{environment}"
    write_file(path, environment)


# --- steps, and the end of a run


# each row has its step; a resume cuts them back to its checkpoint
LOGS = ("metrics.jsonl", "completions.jsonl", "held_out.jsonl", "held_out_completions.jsonl")


def check_shared_disk(run: Path, accelerator: Accelerator) -> None:
    """Exits with 2 if a process does not see what rank 0 writes into the run's folder.

    A machine with a disk of its own would keep its part of each checkpoint and of the model to itself.
    """
    host = socket.gethostname()
    mark = run / broadcast_object_list([f"seen-from-{host}-{os.getpid()}"])[0]  # a name that no file ever had
    if accelerator.is_main_process:
        mark.touch()
    accelerator.wait_for_everyone()
    blind = [name for name in gather_object(["" if mark.exists() else host]) if name]
    if accelerator.is_main_process:
        mark.unlink()
    if blind:
        fail(
            f"{run} on {blind[0]} is not the folder that process 0 writes; all machines need --out on a disk "
            "that they share"
        )


def start_or_resume(run: Path, args, accelerator: Accelerator) -> tuple[Path | None, int]:
    """Returns the checkpoint to continue from and its step, or (None, 0) at a start; cuts the logs back to it."""
    check_shared_disk(run, accelerator)
    folder = None
    first_step = 0
    last_logged = -1  # a fresh start also drops rows of step 0, which held_out.jsonl has
    if args.resume:
        folder = latest(run)
        accelerator.print(
            f"resumes from {folder or f'the beginning of {run}: it has no checkpoint'}", flush=True
        )
    if folder:
        first_step = step_of(folder)
        last_logged = first_step
    if first_step > getattr(args, "steps", first_step):  # scripts that count epochs have no --steps
        fail(f"--steps {args.steps}: {folder} has trained {first_step} steps; name at least as many")
    if accelerator.is_main_process:
        for name in LOGS:
            cut_log(run / name, last_logged)
    accelerator.wait_for_everyone()
    return folder, first_step


def cut_log(path: Path, last_step: int) -> None:
    """Removes the rows of a log after `last_step`, so that no step is there twice."""
    if not path.exists():
        return
    write_jsonl(path, [row for row in read_log(path) if row["step"] <= last_step])


def seed_step(seed: int, step: int, accelerator: Accelerator) -> None:
    """Seeds Python, NumPy (vLLM takes request seeds from it on a GPU) and torch; every process draws differently."""
    number = (seed * 1_000_003 + step) * accelerator.num_processes + accelerator.process_index
    set_seed(number % 2**32)  # NumPy takes no more than 32 bits


def rows_of_step(rows: list, step: int, per_step: int, seed: int) -> list:
    """Returns the rows of a step: `per_step` prompts, traces or pairs.

    They follow from (seed, step) alone, so a resumed run sees what an unbroken one sees. An epoch goes
    through the rows once, in its own order; a remainder smaller than a step is left out.
    """
    steps_per_epoch = len(rows) // per_step
    epoch, position = divmod(step, steps_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(rows))
    chosen = order[position * per_step : (position + 1) * per_step]
    return [rows[place] for place in chosen]


def stop_requested(accelerator: Accelerator) -> bool:
    """Tells whether any process received SIGTERM."""
    asked = torch.tensor(float(watchdog.RUN.sigterm_at is not None), device=accelerator.device)
    return accelerator.reduce(asked, "sum").item() > 0


class Stopped(Exception):
    """Ends a run after SIGTERM, when its checkpoint is written; the argument is the step."""


@contextlib.contextmanager
def guarded(run: Path, accelerator: Accelerator, sampler=None):
    """Ends a training loop when it stalls, fails or raises Stopped; says from where --resume continues.

    Args:
        sampler: of a loop that generates, or None; a run that was stopped closes its vLLM.
    """
    _hold_process_group()
    try:
        with stoppable(), watched():
            yield
    except Stopped as stopped:
        accelerator.print(
            f"stopped by SIGTERM after step {stopped}; --resume continues from checkpoint-{stopped}"
        )
        leave(sampler)
        sys.exit(STOPPED)
    except (Exception, SystemExit) as error:  # SystemExit: such as a judge's budget that is spent
        whole = [folder.name for folder in numbered(run) if (folder / "complete").exists()]
        outlook = f"--resume continues from {whole[-1]}" if whole else "there is no checkpoint yet"
        free = shutil.disk_usage(run).free / 2**20
        print(
            f"error: the run ended by {in_one_line(error)}; {free:.0f} MiB are free in {run}; {outlook}",
            file=sys.stderr,
            flush=True,
        )
        raise


_HELD_GROUPS = []


def _hold_process_group() -> None:
    """Keeps the process group until the process ends.

    Otherwise a DDP model is the last to hold it. It frees it under the GIL and waits for gloo's thread, which may
    itself wait for the GIL: one exit in some dozens hung.
    """
    if torch.distributed.is_initialized():
        _HELD_GROUPS.append(torch.distributed.group.WORLD)


def leave(sampler=None) -> None:
    """Closes the sampler, and leaves the process group together with all other processes."""
    if sampler:
        sampler.close()  # first: vLLM in this process has groups of its own within the process group
    if torch.distributed.is_initialized():
        _hold_process_group()
        PartialState().wait_for_everyone()
        PartialState().destroy_process_group()


def finish_run(run: Path, summary: dict, sampler=None) -> None:
    """Ends a training script: writes summary.json, the model card and page.html, closes sampler and process group."""
    from page import write_page  # here: only the end of a run needs them
    from rlmt.card import write_card

    write_summary(run, summary)
    PartialState().wait_for_everyone()
    leave(sampler)
    if PartialState().is_main_process:  # last, as nobody waits for them and nothing is lost with them
        or_warn(f"no model card of {run}", write_card, run)
        or_warn(f"no page of {run}", write_page, [run], run / "page.html")
