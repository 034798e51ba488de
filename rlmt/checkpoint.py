"""Writes model folders and checkpoints.

A checkpoint is run/checkpoint-<step>/:

    config.json, model*.safetensors, tokenizer ...   an ordinary Hugging Face folder; with LoRA, of the adapter
    <name>/                                          the same for every other learner, such as a critic
    optimizer-rank<k>.pt, <name>-optimizer-rank<k>.pt
    complete                                         written last

All processes call these functions together; each writes its part. No random state is stored, see rlmt/run.py.
"""

import copy
import json
import re
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file
from torch import nn
import transformers

from rlmt.data import write_file
from rlmt.model import Learner, full_tensor, has_adapter, is_shard, unwrap, whole_weights

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
        generation = transformers.GenerationConfig(
            eos_token_id=tokenizer.stop_ids, pad_token_id=tokenizer.pad_token_id
        )
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
    """Copies a model folder, and its adapter if there is one, as `save_model` writes them; main process only."""
    copies = [(source, folder)]
    if adapter_of(source).exists():
        copies.insert(0, (adapter_of(source), adapter_of(folder)))
    for old, new in copies:
        part = _part_of(new)
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(old, part)
        _replace(new, part)


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
    return any(is_shard(parameter) for parameter in _parameters(optimizer))


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
            state[key] = value.to_local() if is_shard(value) else value
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
            if key != "step" and is_shard(parameter):
                from torch.distributed.tensor import DTensor

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


def save_checkpoint(
    run: Path, step: int, learners: dict[str, Learner], tokenizer, args, accelerator: Accelerator
) -> Path:
    """Writes checkpoint-<step>, then deletes older ones so that `args.keep_checkpoints` are left; 0 keeps all.

    `learners`: {"model": the policy, "critic": ..., ...}.
    """
    folder = run / f"checkpoint-{step}"
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # one that was not written to its end
        folder.mkdir(exist_ok=True)
        save_tokenizer(folder, tokenizer)
    accelerator.wait_for_everyone()

    for name, learner in learners.items():
        weights = folder if name == MAIN else folder / name
        save_weights(weights, learner.model, accelerator, merge=False)
        save_optimizer(folder, name, learner.optimizer)

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:  # every process has written its part
        (folder / "complete").touch()
        _delete_older(run, folder, args.keep_checkpoints)
    accelerator.wait_for_everyone()
    return folder


def latest(run: Path) -> Path | None:
    """Returns the newest checkpoint of a run that was written to its end, on every process; None without one."""
    whole = [folder for folder in numbered(run) if (folder / "complete").exists()]
    newest = whole[-1] if whole else None
    return broadcast_object_list([newest])[0]


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
