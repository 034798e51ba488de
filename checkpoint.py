"""Writes checkpoints and model folders, resumes from the last whole checkpoint, and ends a run.

A checkpoint is run/checkpoint-<step>/:

    config.json, model*.safetensors, tokenizer ...   an ordinary Hugging Face folder (with LoRA: of the adapter)
    <name>/                                          the same of every other model that learns, such as a critic
    optimizer-rank<k>.pt, <name>-optimizer-rank<k>.pt
    crc-rank<k>.json                                 CRC-32 of each file that rank k wrote
    complete                                         written last, by rank 0

No random state is stored: the prompts, the sampling and the micro-batches of a step follow from (seed, step), see
`seed_step`.

    folder, first_step = checkpoint.resume(run, args, accelerator)
    model = policy.load_policy(args.model, ..., resume_from=folder)
    if folder:
        checkpoint.load_optimizer(folder, "", optimizer)
    with checkpoint.guard(run, accelerator):             # SIGTERM, stalls, errors
        for step in range(first_step, args.steps):
            checkpoint.seed_step(args.seed, step, accelerator)
            ...
            stopping = checkpoint.stop_requested(accelerator)
            if stopping or (step + 1) % args.save_steps == 0 or step + 1 == args.steps:
                checkpoint.save(run, step + 1, learners, tokenizer, args, accelerator)
            if stopping:
                raise checkpoint.Stopped(step + 1)
    checkpoint.save_model(run / "model", policy, tokenizer, args.think_format, accelerator)
    checkpoint.finish(run, {"steps": args.steps})
"""

import contextlib
import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import runs  # first: it sets environment variables that the libraries below read  # isort: skip
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

import policy
import watchdog

LOGS = ("metrics.jsonl", "completions.jsonl", "held_out.jsonl", "held_out_completions.jsonl")


class Learner(NamedTuple):
    """Holds a model that learns, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


# --- 1. model folders


def save_weights(folder: Path, model: nn.Module, accelerator: Accelerator, merge: bool = True) -> list[Path]:
    """Saves a transformers model as an ordinary folder; returns the files that this process wrote.

    Each process writes its share of the weights, whole tensors, in a file of its own; all must call it. `merge`:
    LoRA is merged into the weights; False saves the adapter alone.
    """
    inner = policy.unwrap(model)
    folder.mkdir(parents=True, exist_ok=True)
    if policy.has_adapter(inner) and not merge:
        return _save_adapter(folder, inner, accelerator)

    rank = accelerator.process_index
    n_files = accelerator.num_processes
    names = [f"model-{i + 1:05d}-of-{n_files:05d}.safetensors" for i in range(n_files)]
    if n_files == 1:
        names = ["model.safetensors"]
    mine = {}
    file_of_weight = {}
    n_bytes = [0] * n_files
    for name, weight in policy.whole_weights(model):
        smallest = n_bytes.index(min(n_bytes))
        n_bytes[smallest] += weight.numel() * weight.element_size()
        file_of_weight[name] = names[smallest]
        if rank == smallest:
            mine[name] = weight.to("cpu", copy=True).contiguous()
        watchdog.beat()
    save_file(mine, folder / names[rank], metadata={"format": "pt"})
    written = [folder / names[rank]]

    if accelerator.is_main_process:
        config = inner.config
        config.dtype = next(iter(mine.values())).dtype
        config.save_pretrained(folder)
        if n_files > 1:
            index = {"metadata": {"total_size": sum(n_bytes)}, "weight_map": file_of_weight}
            watchdog.write(folder / "model.safetensors.index.json", json.dumps(index))
            written.append(folder / "model.safetensors.index.json")
        written.append(folder / "config.json")
    return written


def _save_adapter(folder: Path, model: nn.Module, accelerator: Accelerator) -> list[Path]:
    """Saves the LoRA adapter; under FSDP2 its shards are gathered, which all processes must do."""
    weights = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weights[name] = policy.whole(weight.detach()).to("cpu", copy=True).contiguous()
    if not accelerator.is_main_process:
        return []
    model.save_pretrained(folder, state_dict=weights)
    return [folder / "adapter_model.safetensors", folder / "adapter_config.json"]


def save_tokenizer(folder: Path, tokenizer, think_format: str | None) -> None:
    """Makes a model folder complete: tokenizer, chat template, the ids at which generation ends, the think format.

    A reward model has no `think_format` and generates nothing.
    """
    tokenizer.save_pretrained(folder)
    if think_format:
        generation = GenerationConfig(eos_token_id=tokenizer.stop_ids, pad_token_id=tokenizer.pad_token_id)
        generation.save_pretrained(folder)
        (folder / "think_format.json").write_text(json.dumps({"think_format": think_format}))


def save_model(
    folder: Path, model: nn.Module, tokenizer, think_format: str | None, accelerator: Accelerator
) -> None:
    """Saves a finished model, LoRA merged; the adapter alone goes into adapter/ next to it. All processes call it.

    An older folder of that name is replaced when the new one is whole.
    """
    part = folder.with_name(folder.name + ".part")
    with watchdog.patient():
        save_weights(part, model, accelerator)
        if policy.has_adapter(policy.unwrap(model)):
            save_weights(folder.parent / "adapter", model, accelerator, merge=False)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            save_tokenizer(part, tokenizer, think_format)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        accelerator.wait_for_everyone()


# --- 2. optimizers


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in _parameters(optimizer))


def save_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Saves an optimizer's state by the place of its parameters; under FSDP2 this process's shard of it."""
    states = []
    for parameter in _parameters(optimizer):
        state = {}
        for name, value in optimizer.state.get(parameter, {}).items():
            state[name] = value.to_local() if isinstance(value, DTensor) else value
        states.append(state)
    torch.save(states, path)


def load_optimizer(folder: Path, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Loads the state that `save` wrote for the learner `name`; the number of processes must be the same."""
    path = _optimizer_path(folder, name, optimizer)
    states = torch.load(path, map_location="cpu", weights_only=True)
    for parameter, saved in zip(_parameters(optimizer), states, strict=True):
        state = {}
        for key, value in saved.items():
            if key != "step":  # Adam counts steps on the CPU
                value = value.to(parameter.device)
            if isinstance(parameter, DTensor) and key != "step":
                value = DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            state[key] = value
        if state:
            optimizer.state[parameter] = state


def load_optimizers(folder: Path | None, learners: dict[str, Learner]) -> None:
    """Loads the optimizers of all learners from a checkpoint; does nothing if there is none."""
    if folder is None:
        return
    for name, learner in learners.items():
        load_optimizer(folder, name, learner.optimizer)


def _optimizer_path(folder: Path, name: str, optimizer: torch.optim.Optimizer) -> Path:
    rank = PartialState().process_index if _is_sharded(optimizer) else 0
    prefix = f"{name}-" if name else ""
    return folder / f"{prefix}optimizer-rank{rank}.pt"


# --- 3. checkpoints


def save(
    run: Path, step: int, learners: dict[str, Learner], tokenizer, args, accelerator: Accelerator
) -> Path:
    """Writes checkpoint-<step>, then deletes older ones but `args.keep_checkpoints`. All processes call it.

    `learners`: {"": the policy, "critic": ..., ...}.
    """
    folder = run / f"checkpoint-{step}"
    with watchdog.patient():
        written = []
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)  # one that was not written to its end
            folder.mkdir(exist_ok=True)
            save_tokenizer(folder, tokenizer, getattr(args, "think_format", None))  # None: a reward model
            written = list(folder.iterdir())  # now, as nobody else has written anything yet
        accelerator.wait_for_everyone()

        for name, learner in learners.items():
            written += save_weights(folder / name, learner.model, accelerator, merge=False)
            if _is_sharded(learner.optimizer) or accelerator.is_main_process:
                path = _optimizer_path(folder, name, learner.optimizer)
                save_optimizer(path, learner.optimizer)
                written.append(path)
        sums = {str(path.relative_to(folder)): crc32(path) for path in sorted(written)}
        watchdog.write(folder / f"crc-rank{accelerator.process_index}.json", json.dumps(sums, indent=1))

        accelerator.wait_for_everyone()  # every process has written its part
        if accelerator.is_main_process:
            mark = {"run": _run_key(run), "step": step, "processes": accelerator.num_processes}
            watchdog.write(folder / "complete", json.dumps(mark))
            _delete_older(run, folder, args.keep_checkpoints)
        accelerator.wait_for_everyone()
    return folder


def crc32(path: Path) -> int:
    """Returns the CRC-32 of a file; one flipped byte changes it."""
    value = 0
    with open(path, "rb") as file:
        while part := file.read(2**26):
            watchdog.beat()
            value = zlib.crc32(part, value)
    return value


def _run_key(folder: Path) -> str:
    """Returns the key of the run whose checkpoints are in `folder`; a round of DPO is a folder within its run."""
    config = folder / "config.json"
    if not config.exists():
        config = folder.parent / "config.json"
    return runs.run_key(json.loads(config.read_text())["args"])


def _delete_older(run: Path, newest: Path, keep: int) -> None:
    """Deletes checkpoints older than `newest`, all but `keep` whole ones in all; 0 keeps all."""
    if not keep:
        return
    older = [folder for folder in numbered(run) if step_of(folder) < step_of(newest)]
    whole = [folder for folder in older if (folder / "complete").exists()]
    kept = whole[len(whole) - (keep - 1) :]
    for folder in older:
        if folder not in kept:
            shutil.rmtree(folder)


def numbered(run: Path) -> list[Path]:
    """Returns the checkpoint folders of a run, oldest first."""
    folders = [path for path in run.glob("checkpoint-*") if path.is_dir() and path.name[11:].isdecimal()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def flaw(folder: Path, key: str) -> str:
    """Returns why a checkpoint cannot be used, "" if it can. Each process checks the files that it wrote.

    `key`: the run that it must belong to, see runs.run_key.
    """
    if not (folder / "complete").exists():
        return "was not written to its end"
    try:
        mark = json.loads((folder / "complete").read_text())
        rank = PartialState().process_index
        sums = json.loads((folder / f"crc-rank{rank}.json").read_text())
        if mark["run"] != key:
            return "belongs to another run"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"has a damaged list of its files ({type(error).__name__})"
    for name, expected in sums.items():
        try:
            found = crc32(folder / name)
        except FileNotFoundError:
            return f"lacks {name}"
        except OSError as error:
            return f"cannot be read ({error})"
        if found != expected:
            return f"has a {name} that is not what was written (CRC-32)"
    return ""


def latest(run: Path) -> Path | None:
    """Returns the newest whole checkpoint of a run, the same on all processes; None if none was ever finished.

    Says what is wrong with newer ones. Exits with 2 when all that were finished are damaged.
    """
    is_main = PartialState().is_main_process
    key = _run_key(run)
    damaged = []
    for folder in reversed(broadcast_object_list([numbered(run)])[0]):
        with watchdog.patient():
            flaws = [text for text in gather_object([flaw(folder, key)]) if text]
        if not flaws:
            return folder
        if (folder / "complete").exists():
            damaged.append(f"{folder.name} {flaws[0]}")
        if is_main:
            print(f"WARNING: {folder} {flaws[0]}; it is passed over", file=sys.stderr, flush=True)
    if damaged:
        runs.fail(f"{run} has no checkpoint to resume from: {'; '.join(damaged)}. --overwrite starts anew")
    return None


def resume(run: Path, args, accelerator: Accelerator) -> tuple[Path | None, int]:
    """Returns the checkpoint to go on from and its step, (None, 0) for a start; cuts the logs back to it."""
    folder = None
    first_step = 0
    if args.resume:
        folder = latest(run)
        accelerator.print(f"resumes from {folder or 'the beginning: there is no checkpoint'}", flush=True)
    if folder:
        first_step = step_of(folder)
    if accelerator.is_main_process:
        for name in LOGS:
            cut_log(run / name, first_step)
    accelerator.wait_for_everyone()
    return folder, first_step


def cut_log(path: Path, last_step: int) -> None:
    """Removes the rows of a log after `last_step`, so that no step is there twice."""
    if not path.exists():
        return
    rows = [row for row in runs.read_kept(path) if row["step"] <= last_step]
    watchdog.write(path, "".join(json.dumps(row) + "\n" for row in rows))


def warn_of_full_disk(run: Path, learners: dict[str, Learner], keep: int) -> None:
    """Warns if the checkpoints that a run keeps (weights and two moments in float32) do not fit the disk."""
    n_parameters = 0
    for learner in learners.values():
        n_parameters += sum(weight.numel() for weight in learner.model.parameters() if weight.requires_grad)
    size = 12 * n_parameters
    still_to_come = max(1, keep) + 1 - len(numbered(run))  # an old one goes when the new one is whole
    free = shutil.disk_usage(run).free
    if free < still_to_come * size:
        PartialState().print(
            f"WARNING: {run} will run out of disk: {still_to_come} checkpoints of {size / 2**30:.3g} GiB, "
            f"{free / 2**30:.3g} GiB free; --keep-checkpoints 1, or another --out"
        )


# --- 4. a step, and the end of a run


def seed_step(seed: int, step: int, accelerator: Accelerator) -> None:
    """Seeds Python, NumPy (vLLM takes request seeds from it on a GPU) and torch; every process draws differently."""
    set_seed((seed * 1_000_003 + step) * accelerator.num_processes + accelerator.process_index)


def stop_requested(accelerator: Accelerator) -> bool:
    """Tells whether any process received SIGTERM; all processes must ask."""
    asked = torch.tensor(float(watchdog.RUN.sigterm_at is not None), device=accelerator.device)
    return accelerator.reduce(asked, "sum").item() > 0


class Stopped(Exception):
    """Stops a run after SIGTERM, when its checkpoint is written; the argument is the step."""


@contextlib.contextmanager
def guard(run: Path, accelerator: Accelerator):
    """Ends a training loop on stalls, and on SIGTERM after the step; says from where --resume continues."""
    try:
        with watchdog.stoppable(), watchdog.watched():
            yield
    except Stopped as stopped:
        accelerator.print(
            f"stopped by SIGTERM after step {stopped}; --resume continues from checkpoint-{stopped}"
        )
        leave()
        sys.exit(watchdog.STOPPED)
    except (Exception, SystemExit) as error:  # SystemExit: such as a judge's budget that is spent
        whole = [folder.name for folder in numbered(run) if (folder / "complete").exists()]
        outlook = f"--resume continues from {whole[-1]}" if whole else "there is no checkpoint yet"
        free = shutil.disk_usage(run).free / 2**20
        reason = " ".join(str(error).split())[:300]
        print(
            f"error: the run ended by {type(error).__name__}: {reason}; {free:.0f} MiB are free in {run}; {outlook}",
            file=sys.stderr,
            flush=True,
        )
        if torch.distributed.is_initialized():
            _GROUPS.append(torch.distributed.group.WORLD)
        raise


_GROUPS = []  # process groups, held to the end of the process; see `leave`


def leave() -> None:
    """Leaves the process group together with all other processes."""
    if not torch.distributed.is_initialized():
        return
    PartialState().wait_for_everyone()
    # Otherwise a DDP model is the last to hold it and frees it under the GIL, waiting for gloo's thread, which may
    # itself wait for the GIL: one exit in some dozens hung.
    _GROUPS.append(torch.distributed.group.WORLD)
    PartialState().destroy_process_group()


def finish(run: Path, summary: dict, sampler=None) -> None:
    """Ends a training script on all processes: writes summary.json, closes the sampler, leaves the process group."""
    runs.write_summary(run, summary)
    PartialState().wait_for_everyone()
    if sampler:
        sampler.close()  # vLLM in this process takes the process group with it
    leave()
