"""Writes checkpoints and model folders, resumes from the last whole checkpoint, and ends a run.

A checkpoint is run/checkpoint-<step>/:

    config.json, model*.safetensors, tokenizer ...   an ordinary Hugging Face folder; with LoRA, of the adapter
    <name>/                                          the same for every other learner, such as a critic
    optimizer-rank<k>.pt, <name>-optimizer-rank<k>.pt
    complete                                         the key of the run and the CRC-32 of each file; written last

No random state is stored: `rows_of_step` and `seed_step` let rows, sampling and micro-batches follow from (seed, step).
All processes call these functions together, and all see the same disk (`check_shared_disk`). Each writes its part and
checks it.

    folder, first_step = checkpoint.start_or_resume(run, args, accelerator)
    learners = {"model": load_learner(args, args.model, folder, accelerator)}
    load_optimizers(folder, learners)
    with checkpoint.guard(run, accelerator, sampler):    # SIGTERM, stalls, errors
        for step in range(first_step, args.steps):
            checkpoint.seed_step(args.seed, step, accelerator)
            members = checkpoint.rows_of_step(prompts, step, args.prompts_per_step, args.seed)
            ...
            stopping = checkpoint.stop_requested(accelerator)
            if stopping or (step + 1) % args.save_steps == 0 or step + 1 == args.steps:
                checkpoint.save(run, step + 1, learners, tokenizer, args, accelerator)
            if stopping:
                raise checkpoint.Stopped(step + 1)
    save_model(run / "model", policy, tokenizer, accelerator)
    checkpoint.finish(run, {"steps": args.steps})
"""

import copy
import json
import math
import os
import re
import shutil
import sys
import zlib
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from rlmt.data import write_file
from rlmt.model import Learner, full_tensor, has_adapter, unwrap, whole_weights
from rlmt.watchdog import allow_seconds, beat
from utils import fail

MAIN = "model"  # name of the learner that becomes run/model; its files lie in a checkpoint's folder itself


# --- 1. model folders


def save_weights(folder: Path, model: nn.Module, accelerator: Accelerator, merge: bool = True) -> None:
    """Saves a transformers model as an ordinary folder.

    Each process writes a file with about an equal share of the weights. `merge`: LoRA is merged into the weights;
    False saves the adapter alone.
    """
    inner = unwrap(model)
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapter(inner) and not merge:
        _save_adapter(folder, inner, accelerator)
        return

    n_files = accelerator.num_processes
    files = [f"model-{i + 1:05d}-of-{n_files:05d}.safetensors" for i in range(n_files)]
    if n_files == 1:
        files = ["model.safetensors"]
    own_file = files[accelerator.process_index]
    own_weights = {}
    file_of_weight = {}
    n_bytes = dict.fromkeys(files, 0)
    for name, weight in whole_weights(model):
        smallest = min(files, key=n_bytes.get)
        n_bytes[smallest] += weight.nbytes
        file_of_weight[name] = smallest
        if smallest == own_file:
            own_weights[name] = weight.to("cpu", copy=True).contiguous()
        beat()
    save_file(own_weights, folder / own_file, metadata={"format": "pt"})

    if accelerator.is_main_process:
        config = copy.deepcopy(inner.config)
        config.dtype = next(iter(own_weights.values())).dtype
        # 4-bit weights are saved as the values that they stand for
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.save_pretrained(folder)
        if n_files > 1:
            index = {"metadata": {"total_size": sum(n_bytes.values())}, "weight_map": file_of_weight}
            write_file(folder / "model.safetensors.index.json", json.dumps(index))


def _save_adapter(folder: Path, model: nn.Module, accelerator: Accelerator) -> None:
    """Saves the LoRA adapter; under FSDP2 all processes gather its shards."""
    weights = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weights[name] = full_tensor(weight.detach()).to("cpu", copy=True).contiguous()
    if accelerator.is_main_process:
        model.save_pretrained(folder, state_dict=weights)


def save_tokenizer(folder: Path, tokenizer) -> None:
    """Makes a model folder complete: tokenizer, chat template, the ids at which generation ends, the think format.

    The last two come from prepare_tokenizer. A reward model has no `trained_as`, as it writes nothing.
    """
    tokenizer.save_pretrained(folder)
    if hasattr(tokenizer, "trained_as"):
        generation = GenerationConfig(eos_token_id=tokenizer.stop_ids, pad_token_id=tokenizer.pad_token_id)
        generation.save_pretrained(folder)
        (folder / "think_format.json").write_text(json.dumps(tokenizer.trained_as))


def adapter_of(folder: Path) -> Path:
    """Returns where the LoRA adapter of a model folder lies: adapter/ next to model/, else <name>_adapter/."""
    if folder.name == "model":
        return folder.with_name("adapter")
    return folder.with_name(f"{folder.name}_adapter")


def save_model(folder: Path, model: nn.Module, tokenizer, accelerator: Accelerator) -> None:
    """Saves a finished model with LoRA merged; the adapter alone goes next to it, see `adapter_of`.

    Older folders of these names are replaced when the new ones are whole.
    """
    trains_adapter = has_adapter(unwrap(model))
    part = _part_of(folder)
    adapter_part = _part_of(adapter_of(folder))
    n_bytes = sum(weight.nbytes for weight in model.parameters())  # a sharded weight says that of the whole
    with allow_seconds(n_bytes):
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)  # one that was not written to its end
            shutil.rmtree(adapter_part, ignore_errors=True)
        accelerator.wait_for_everyone()
        save_weights(part, model, accelerator)
        if trains_adapter:
            save_weights(adapter_part, model, accelerator, merge=False)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            save_tokenizer(part, tokenizer)
            if trains_adapter:
                _replace(adapter_of(folder), adapter_part)
            _replace(folder, part)
        accelerator.wait_for_everyone()


def copy_model(source: Path, folder: Path) -> None:
    """Copies a model folder, and its adapter if there is one, as `save_model` writes them; main process only.

    Where the disk has hard links, the weights take no room twice.
    """
    copies = [(source, folder)]
    if adapter_of(source).exists():
        copies.insert(0, (adapter_of(source), adapter_of(folder)))
    for old, new in copies:
        part = _part_of(new)
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(old, part, copy_function=_link_weights)
        _replace(new, part)


def _link_weights(source: str, target: str) -> None:
    """Gives a file of weights a second name if the disk can; copies other files, which somebody may edit."""
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return
        except OSError:  # a disk without hard links
            pass
    shutil.copy2(source, target)


def _part_of(folder: Path) -> Path:
    """Returns where a folder is written before it takes its name."""
    return folder.with_name(folder.name + ".part")


def _replace(folder: Path, part: Path) -> None:
    """Gives a folder that is whole the name of an older one, whose README.md it keeps."""
    if (folder / "README.md").exists():  # somebody may have written it
        shutil.copy(folder / "README.md", part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


# --- 2. optimizers


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in _parameters(optimizer))


def _optimizer_path(folder: Path, name: str, optimizer: torch.optim.Optimizer) -> Path:
    rank = PartialState().process_index if _is_sharded(optimizer) else 0
    prefix = "" if name == MAIN else f"{name}-"
    return folder / f"{prefix}optimizer-rank{rank}.pt"


def save_optimizer(folder: Path, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Saves the states of an optimizer in the order of its parameters; under FSDP2 each process saves its shard."""
    if not _is_sharded(optimizer) and not PartialState().is_main_process:
        return
    states = []
    for parameter in _parameters(optimizer):
        state = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            state[key] = value.to_local() if isinstance(value, DTensor) else value
        states.append(state)
    torch.save(states, _optimizer_path(folder, name, optimizer))


def load_optimizer(folder: Path, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Loads what `save_optimizer` wrote; the number of processes must be the same."""
    path = _optimizer_path(folder, name, optimizer)
    states = torch.load(path, map_location="cpu", weights_only=True)
    for parameter, state in zip(_parameters(optimizer), states, strict=True):
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):  # AdamW in 8 bits counts its steps so
                continue
            value = value.to(parameter.device)  # fused AdamW has its count of steps there too
            if key != "step" and isinstance(parameter, DTensor):
                value = DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            state[key] = value
        if state:  # a parameter that never had a gradient has none
            optimizer.state[parameter] = state


def load_optimizers(folder: Path | None, learners: dict[str, Learner]) -> None:
    """Loads the optimizers of all learners from a checkpoint; does nothing if there is none."""
    if folder is None:
        return
    for name, learner in learners.items():
        load_optimizer(folder, name, learner.optimizer)


# --- 3. checkpoints


def checkpoint_bytes(learners: dict[str, Learner]) -> int:
    """Returns the bytes of a checkpoint: a float32 weight and Adam's two moments for each trained parameter.

    That is too many for moments in 8 bit.
    """
    n_parameters = 0
    for learner in learners.values():
        n_parameters += sum(weight.numel() for weight in learner.model.parameters() if weight.requires_grad)
    return 12 * n_parameters


def save_checkpoint(
    run: Path, step: int, learners: dict[str, Learner], tokenizer, args, accelerator: Accelerator
) -> Path:
    """Writes checkpoint-<step>, then deletes older ones so that `args.keep_checkpoints` are left; 0 keeps all.

    `learners`: {"model": the policy, "critic": ..., ...}.
    """
    folder = run / f"checkpoint-{step}"
    with allow_seconds(checkpoint_bytes(learners)):
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)  # one that was not written to its end
            folder.mkdir(exist_ok=True)
            save_tokenizer(folder, tokenizer)
        accelerator.wait_for_everyone()

        for name, learner in learners.items():
            weights = folder if name == MAIN else folder / name
            save_weights(weights, learner.model, accelerator, merge=False)
            save_optimizer(folder, name, learner.optimizer)

        sums = {}
        for part in gather_object([own_checksums(folder)]):
            sums |= part
        if accelerator.is_main_process:  # every process has written its part
            mark = {"crc32": sums}
            write_file(folder / "complete", json.dumps(mark, indent=1))
            _delete_older(run, folder, args.keep_checkpoints)
        accelerator.wait_for_everyone()
    return folder


def writer_of(path: Path) -> int:
    """Returns the rank of the process that wrote a file of a checkpoint."""
    weights = re.fullmatch(r"model-(\d+)-of-\d+\.safetensors", path.name)
    if weights:
        return int(weights[1]) - 1  # transformers counts files from 1
    optimizer = re.fullmatch(r".*optimizer-rank(\d+)\.pt", path.name)
    if optimizer:
        return int(optimizer[1])
    return 0


def own_checksums(folder: Path) -> dict[str, int]:
    """Returns the CRC-32 of each file that this process wrote; one flipped byte changes it.

    Each process reads its own files, as rank 0 alone would be slow to read 100 GB of an 8B model.
    """
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "complete" and writer_of(path) == PartialState().process_index:
            sums[str(path.relative_to(folder))] = _crc32(path)
    return sums


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while part := file.read(2**26):
            beat()
            value = zlib.crc32(part, value)
    return value


def _delete_older(run: Path, newest: Path, keep: int) -> None:
    """Deletes checkpoints older than `newest`, except whole ones as far as `keep` allows, `newest` included."""
    if not keep:
        return
    older = [folder for folder in numbered(run) if step_of(folder) < step_of(newest)]
    whole = [folder for folder in older if (folder / "complete").exists()]
    n_deleted = max(0, len(whole) - (keep - 1))
    kept = whole[n_deleted:]
    for folder in older:
        if folder not in kept:
            shutil.rmtree(folder)


def numbered(run: Path) -> list[Path]:
    """Returns the checkpoint folders of a run, oldest first."""
    folders = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def why_unusable(folder: Path) -> str:
    """Returns why a checkpoint cannot be used; "" if it can.

    Each process checks the files that it wrote.
    """
    if not (folder / "complete").exists():
        return "was not written to its end"
    try:
        mark = json.loads((folder / "complete").read_text())
    except ValueError:
        return "has a damaged list of its files"

    found = own_checksums(folder)
    for name, value in mark["crc32"].items():
        if writer_of(Path(name)) != PartialState().process_index:
            continue
        if name not in found:
            return f"lacks {name}"
        if found[name] != value:
            return f"has a {name} that is not what was written (CRC-32)"
    return ""


def latest(run: Path) -> Path | None:
    """Returns the newest whole checkpoint of a run; None if none was ever finished.

    Says what is wrong with newer ones. Exits with 2 when all that were finished are damaged.
    """
    damaged = []
    for folder in reversed(broadcast_object_list([numbered(run)])[0]):
        reasons = [reason for reason in gather_object([why_unusable(folder)]) if reason]
        if not reasons:
            return folder
        if (folder / "complete").exists():
            damaged.append(f"{folder.name} {reasons[0]}")
        if PartialState().is_main_process:
            print(f"WARNING: {folder} {reasons[0]}; skipped", file=sys.stderr, flush=True)
    if damaged:
        fail(f"{run} has no checkpoint to resume from: {'; '.join(damaged)}. --overwrite starts anew")
    return None


def warn_of_full_disk(run: Path, learners: dict[str, Learner], args, first_step: int, steps: int) -> None:
    """Warns if the checkpoints that a run keeps do not fit on the disk.

    `args` has `save_steps`, and `keep_checkpoints`, of which 0 keeps all.
    """
    size = checkpoint_bytes(learners)
    # the last step is saved whatever its number
    still_to_come = math.ceil(steps / args.save_steps) - first_step // args.save_steps
    if args.keep_checkpoints:
        # an old one goes when the new one is whole
        still_to_come = min(still_to_come, args.keep_checkpoints + 1 - len(numbered(run)))
    free = shutil.disk_usage(run).free
    if free < still_to_come * size:
        PartialState().print(
            f"WARNING: {run} will run out of disk: {still_to_come} checkpoints of {size / 2**30:.3g} GiB, "
            f"{free / 2**30:.3g} GiB free; --keep-checkpoints 1, or another --out"
        )
