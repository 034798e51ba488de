"""Arguments, input rows, and one folder a run, in which nothing is ever overwritten unasked."""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from importlib.metadata import distributions
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # every TRL trainer sends a ping otherwise
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault(
    "TRL_EXPERIMENTAL_SILENCE", "1"
)  # train_rlver.py's rollout_func; tests/test_rlver.py holds TRL to it
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, read on a CPU only
if "LOCAL_RANK" not in os.environ and Path(sys.argv[0]).name.startswith(("train_", "bench")):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one process uses one GPU; TRL refuses to see more
logging.getLogger("bitsandbytes").setLevel(
    logging.ERROR
)  # on a CPU it asks for an optional kernel at every start

import jinja2
import pandas as pd
import pyarrow
import torch
import tyro
from accelerate import PartialState
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

import faults

# --- 1. arguments and rows


def fail(message: str) -> None:
    """Bad input: one line on stderr, whatever a file's fields are called, and exit code 2."""
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(2)


def or_fail(function, *args):
    """function(*args); what it says is wrong becomes one line and exit code 2. For checks before anything expensive."""
    try:
        return function(*args)
    except (ValueError, OSError, SafetensorError, jinja2.TemplateError) as e:
        fail(f"{str(e) or type(e).__name__}".splitlines()[0])


def parse_args(args_class: type, presets: dict[str, dict], released: dict[str, dict] | None = None):
    """Arguments of the command line: default < preset < `released` (with --as-released) < flag. Unknown names and values exit
    with 2."""
    words = [w for arg in sys.argv[1:] for w in arg.split("=", 1)]
    name = words[words.index("--preset") + 1] if "--preset" in words[:-1] else ""
    if name and presets and name not in presets:
        fail(f"unknown preset {name!r}; known: {', '.join(presets)}")
    values = presets.get(name, {})
    if "--as-released" in words:
        if name not in (released or {}):
            fail(
                f"--as-released: nothing was released for preset {name!r}; known: {', '.join(released or {}) or 'none'}"
            )
        values = {**values, **released[name]}
    default, first = dataclasses.replace(args_class(), **values), os.environ.get("LOCAL_RANK", "0") == "0"
    args = tyro.cli(args_class, default=default)
    if first and values:
        print(f"--preset {name} sets", ", ".join(f"{field} {value}" for field, value in values.items()))
    for field in (
        "steps",
        "rounds",
        "batch_size",
        "micro_batch_size",
        "prompts_per_step",
        "updates_per_rollout",
        "num_iterations",
        "rollout_batch_size",
        "max_prompt_tokens",
        "max_completion_tokens",
        "save_steps",
    ):
        if getattr(args, field, 1) < 1:
            fail(f"--{field.replace('_', '-')} {getattr(args, field)}: use 1 or more")
    for field, value in vars(args).items():
        spec = str(value)
        url = (
            spec.partition("@")[2]
            if spec.startswith("judge:")
            else spec
            if "url" in field or "://" in spec
            else ""
        )
        if re.search(r"^[^/]*@|://[^/]*@|://.*\?", url):
            fail(
                f"--{field.replace('_', '-')}: no user, password or key belongs into a URL: it is logged; set OPENAI_API_KEY"
            )
    if getattr(args, "stall_minutes", 1) <= 0:
        fail(f"--stall-minutes {args.stall_minutes}: use more than 0")
    if getattr(args, "budget", 0) and not any(args.price):
        fail("--budget needs --price: US dollars for a million tokens read and written")
    lora = getattr(args, "lora_r", 0) and not default.lora_r
    if first and lora and args.learning_rate == default.learning_rate:
        print(
            f"WARNING: --learning-rate {args.learning_rate:g} is that of full training; LoRA wants about ten times as much"
        )
    return args


def refuse_unused(reasons: dict[str, str]) -> None:
    """Exits with 2 for a flag on the command line that does nothing: {flag: why, or "" where it does something}."""
    typed = {word.partition("=")[0].replace("_", "-") for word in sys.argv[1:]}
    for flag in typed & {flag for flag, why in reasons.items() if why}:
        fail(f"{flag} does nothing {reasons[flag]}; leave it out")


TEXTS = {"thinking", "response", "chosen", "rejected", "chosen_thinking", "rejected_thinking"}  # of any row
ROLES = ("system", "user", "assistant", "tool")


def _read(path: Path, prompts: bool) -> dict[int, object]:
    """What stands in a file, by line (jsonl; empty ones left out) or row (parquet), from 1."""
    if path.suffix == ".parquet":
        return dict(enumerate(json.loads(pd.read_parquet(path).to_json(orient="records")), 1))
    rows = {}
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                if line.strip():
                    rows[number] = json.loads(line)
                if prompts and rb"\ud" in line.lower():  # half a surrogate pair: no tokenizer takes it
                    json.dumps(rows[number], ensure_ascii=False).encode()
            except (
                ValueError,
                RecursionError,
            ) as e:  # bad JSON, bytes that are not UTF-8, a thousand brackets
                fail(f"{path}:{number}: not JSON ({getattr(e, 'msg', e)})")
    return rows


def read_rows(path: Path | str, *fields: str) -> list[dict]:
    """Rows of a .jsonl, .jsonl.gz or .parquet file, each with `fields`; exits with 2 naming file, line and field.

    A `prompt` column that holds messages is read as `messages`; a row without `id` gets `<file name>-<row>`.
    """
    path = Path(path)
    if not path.is_file():
        fail(f"{path}: no such file; data/README.md says how to make it")
    try:
        rows = _read(path, "messages" in fields)
    except (
        OSError,
        EOFError,
        zlib.error,
        pyarrow.ArrowException,
        UnicodeError,
    ) as e:  # cut off, not what its name says
        fail(f"{path}: cannot be read ({e or type(e).__name__})")
    for number, row in rows.items():
        if not isinstance(row, dict):
            fail(f"{path}:{number}: not a JSON object but {json.dumps(row)[:50]}")
        if "messages" not in row and isinstance(row.get("prompt"), list):
            row["messages"] = row.pop("prompt")
        if row.get("id") is None:
            row["id"] = f"{path.stem}-{number - 1}"
        if not isinstance(row["id"], str | int | float):
            fail(f"{path}:{number}: 'id' cannot be {json.dumps(row['id'])[:50]}, only a text or a number")
        for field in fields:
            if row.get(field) is None:
                found = ", ".join(k for k in row if row[k] is not None)
                fail(f"{path}:{number}: no field {field!r} (found {found}); data/README.md has the schemas")
        for field in TEXTS & {*fields, "chosen_thinking", "rejected_thinking"}:
            if not isinstance(row.get(field), str | None):
                fail(f"{path}:{number}: {field!r} is not a text but {json.dumps(row[field])[:50]}")
        messages = row.get("messages")
        if "messages" in fields and not (
            isinstance(messages, list)
            and messages
            and all(isinstance(m, dict) for m in messages)
            and all(isinstance(m.get(key), str) for m in messages for key in ("role", "content"))
        ):
            fail(f"{path}:{number}: 'messages' must be a list of {{'role', 'content'}} with strings")
        for role in [m["role"] for m in messages] if "messages" in fields else ():
            if role not in ROLES:  # a template would put it into the text, or drop the turn
                fail(f"{path}:{number}: the role {role!r} in 'messages' is none of {', '.join(ROLES)}")
        if "messages" in fields and messages[-1]["role"] != "user":
            fail(
                f"{path}:{number}: 'messages' must end with the user's turn, not with one of {messages[-1]['role']!r}"
            )
        if "messages" in fields and not messages[-1]["content"].strip():
            fail(f"{path}:{number}: the last turn of 'messages' is empty")
    if not rows:
        fail(f"{path}: no rows")
    return list(rows.values())


def check_ids(path: Path | str, rows: list[dict], what: str = "rows") -> None:
    """Exits with 2 where two rows have one id: answers, verdicts and rewards are found by it."""
    if len({row["id"] for row in rows}) < len(rows):
        fail(f"{path}: two {what} have the same id, by which what is made of them is found")


# --- 2. what an argument names


def load_function(spec: str):
    """The function of `path/to/file.py:name`; exits with 2 when there is none."""
    path, _, name = spec.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        fail(f"{spec!r} is not file.py:function of an existing file")
    module_spec = importlib.util.spec_from_file_location(
        path, path
    )  # its stem could be the name of another module
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path] = module
    module_spec.loader.exec_module(module)
    return getattr(module, name, None) or fail(f"{path} has no function {name!r}")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name; exits with 2 when there is none, or the folder's weights are pickled."""
    pickled = sorted(Path(path).glob("*model*.bin"))
    if pickled and not any(Path(path).glob("*.safetensors")):
        fail(
            f"{pickled[0]} is a pickle, which could run any program; only safetensors are loaded. Convert it if you trust it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        with contextlib.suppress(OSError):  # a model may have several ends
            ends = GenerationConfig.from_pretrained(path).eos_token_id
            tokenizer.own_ends = [ends] if isinstance(ends, int) else ends or []
        return tokenizer
    except (OSError, ValueError, KeyError) as e:
        fail(
            f"{path} is no model folder with a tokenizer, nor a hub name that can be reached ({str(e).splitlines()[0]})"
        )


def load_config(path: str):
    """The config of a model folder or hub name; exits with 2 when there is none, or it needs code of its own."""
    return or_fail(lambda: AutoConfig.from_pretrained(path, trust_remote_code=False))


def use_vllm(rollout: str) -> bool:
    """What `--rollout auto` means on this machine: vLLM where a GPU and vLLM are there. `vllm` without it exits with 2."""
    installed = importlib.util.find_spec("vllm") is not None
    if rollout == "vllm" and not installed:
        fail("--rollout vllm: vLLM is not installed; `make` installs it, or use --rollout hf")
    return rollout == "vllm" or (rollout == "auto" and installed and torch.cuda.is_available())


# --- 3. the run's folder


def append_jsonl(path: Path, rows: list[dict]) -> None:
    with open(path, "a") as f:
        f.write("".join(json.dumps(row) + "\n" for row in rows))


def read_kept(path: Path) -> list[dict]:
    """Rows of a log that one process appends to; a last line that a kill cut off is removed from the file."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    if lines[-1]:
        faults.write(path, "".join(line + "\n" for line in lines[:-1]))
    return [json.loads(line) for line in lines[:-1]]


INDEX = (
    "run",
    "time",
    "model",
    "benchmark",
    "metric",
    "value",
    "low",
    "high",
    "n",
    "n_invalid",
    "temperature",
    "judge",
    "fingerprint",
)


def add_to_index(run: Path, rows: list[dict]) -> None:
    """Lines about a run in runs.csv beside its folder (results/runs.csv), which tables are made from: one a measured value,
    with the columns of INDEX, empty where a row has none."""
    path, own = run.parent / "runs.csv", {"run": run.name, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    lines = pd.DataFrame([own | row for row in rows], columns=INDEX)
    lines.to_csv(path, mode="a", header=not path.exists(), index=False)


START = ("out", "resume", "overwrite", "dry_run")  # how a run is started
FREE = (
    "stall_minutes",
    "keep_checkpoints",
    "save_steps",
    "budget",
    "price",
    "concurrency",
    "micro_batch_size",
    "reward_tokens_per_batch",
    "vllm_memory",
    "vllm_sleep",
    "max_logprob_gap",
    "allow_truncation",
)  # what a resume may change: nothing is learned otherwise


def digests(config: dict) -> dict[str, str]:
    """{path: SHA-256} of the files that the arguments name, also by file.py:function; of a model folder its weights' sizes,
    beginnings and ends, as gigabytes take too long."""
    words = [word for value in config.values() for word in (value if isinstance(value, list) else [value])]
    found = {}
    for path in {
        Path(re.sub(r"^local:|(?<=\.py):.*", "", word)) for word in words if isinstance(word, str) and word
    }:
        if path.is_file():
            with open(path, "rb") as f:
                found[str(path)] = hashlib.file_digest(f, "sha256").hexdigest()
        elif path.is_dir() and (parts := sorted(path.glob("*.safetensors"))):
            digest = hashlib.sha256()
            for part in parts:
                with open(part, "rb") as f:
                    size = part.stat().st_size
                    digest.update(f"{part.name} {size} ".encode() + f.read(1 << 20))
                    f.seek(max(0, size - (1 << 20)))
                    digest.update(f.read())
            found[str(path)] = digest.hexdigest()
    return dict(sorted(found.items()))


def start_run(args, script: str, model: str) -> Path:
    """Makes the run's folder with config.json, command.txt and env.txt, and returns it; called on every rank.

    It is `args.out`, else results/{script}__{preset or model}__s{seed}__{hash of the configuration}, so the same command
    finds the same folder. An existing one exits with 2 unless `args.overwrite`, or `args.resume` and equal arguments (but
    those of FREE) and files; one that another process is using exits with 2 in any case.
    """
    state = PartialState(cpu=not torch.cuda.is_available())
    if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true":
        fail(
            "fsdp_cpu_ram_efficient_loading: true leaves reference and reward model without weights on every rank but the "
            "first; set it to false in the launch config"
        )
    config = json.loads(json.dumps(dataclasses.asdict(args), default=str))
    same = {k: v for k, v in config.items() if k not in (*START, *FREE)}
    if config.get("loss_type") == "bnpo":  # a mean within each micro-batch
        same["micro_batch_size"] = config["micro_batch_size"]
    key = hashlib.sha1(json.dumps(same, sort_keys=True).encode()).hexdigest()[:6]
    folder = (
        Path(model).parent if Path(model).name == "model" else Path(model)
    )  # of results/<run>/model: <run>
    preset = getattr(args, "preset", "")  # an evaluation has none
    name = f"{script}__{(preset or folder.name).replace('/', '-')}__s{args.seed}__{key}"
    run = Path(args.out or Path("results") / name)
    if state.is_main_process:
        goes_on, files = (run / "config.json").exists() and args.resume, digests(same)
        contents = lambda: set(run.iterdir()) - {run / "lock"} if run.exists() else set()
        differ = lambda before, now: [
            f"{k} ({before.get(k)} -> {v})" for k, v in now.items() if before.get(k) != v
        ]
        if goes_on:
            before = json.loads((run / "config.json").read_text())
            if other := differ(before["args"], same):
                fail(f"--resume: {run} was started with other arguments: {', '.join(other)}")
            if changed := [
                path for path, digest in before.get("files", {}).items() if files.get(path) != digest
            ]:
                fail(
                    f"--resume: {', '.join(changed)} is not what it was when {run} was started; --overwrite starts anew"
                )
            if free := differ(before["args"], {k: config[k] for k in FREE if k in config}):
                print("goes on with", ", ".join(free))
        elif contents() and not args.overwrite:
            fail(f"{run} exists; --resume continues it, --overwrite replaces it, --out names another folder")
        elif contents() and (not (run / "command.txt").exists() or any(run.glob("*/command.txt"))):
            fail(
                f"--overwrite: {run} is no run's folder, or other runs are in it; delete it yourself if that is meant"
            )
        elif (
            args.resume
            and not args.out
            and (others := sorted(run.parent.glob(f"{run.name[:-6]}*/config.json")))
        ):
            found = [(differ(json.loads(path.read_text())["args"], same), path.parent) for path in others]
            nearest, folder = min(found, key=lambda pair: len(pair[0]))
            print(
                f"WARNING: --resume starts anew, as there is no {run}; {folder} has other arguments: {', '.join(nearest)}"
            )
        run.mkdir(parents=True, exist_ok=True)
        or_fail(faults.lock, run)
        for path in () if goes_on else contents():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(f"run folder: {run}", flush=True)
        git = [
            subprocess.run(["git", *a], capture_output=True, text=True, cwd=Path(__file__).parent).stdout
            for a in (["rev-parse", "HEAD"], ["diff", "HEAD", "--", ".", ":!results", ":!notebooks"])
        ]
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["no GPU"]
        packages = sorted(f"{d.metadata['Name']}=={d.version}" for d in distributions())
        everything = {"args": config, "processes": state.num_processes, "files": files}
        faults.write(run / "config.json", json.dumps(everything, indent=1))
        with open(run / "command.txt", "a") as f:  # a line a start: a resumed run has several
            f.write(shlex.join([sys.executable, *sys.argv]) + "\n")
        env, path = "\n".join([git[0].strip(), *gpus, *packages, git[1]]), run / "env.txt"
        earlier = path.read_text() if goes_on and path.exists() else ""
        if earlier and not earlier.endswith(env):
            print(
                f"WARNING: commit, changed files, packages or GPUs are not those of the last start; {path} has both"
            )
        if not earlier.endswith(env):
            faults.write(path, f"{earlier}\n\n# resumed\n{env}" if earlier else env)
    state.wait_for_everyone()
    run.mkdir(parents=True, exist_ok=True)  # on a machine of its own, without the others' disk
    (run / "lock").touch()
    faults.RUN.folder, faults.RUN.key = run, key
    faults.RUN.minutes, faults.RUN.keep = (
        getattr(args, "stall_minutes", 0),
        getattr(args, "keep_checkpoints", 0),
    )
    return run


def write_dropped(run: Path, dropped: list[dict]) -> None:
    if PartialState().is_main_process:
        faults.write(run / "dropped.jsonl", "".join(json.dumps(row) + "\n" for row in dropped))


def write_summary(run: Path, summary: dict) -> None:
    if PartialState().is_main_process:
        faults.write(run / "summary.json", json.dumps(summary, indent=1) + "\n")
        print(json.dumps(summary), flush=True)


# --- 4. other commands (dev/bench.py)


def executable(command: list[str]) -> list[str]:
    """A command as a user types it, with the programs of this environment."""
    bin_folder = Path(sys.executable).parent
    return [sys.executable if command[0] == "python" else str(bin_folder / command[0]), *command[1:]]
