"""Writes model folders and checkpoints.

A checkpoint is run/checkpoint-<step>/:

    config.json, model*.safetensors, tokenizer ...   an ordinary Hugging Face folder; with LoRA, of the adapter
    <name>/                                          the same for every other learner, such as a critic
    model-optimizer-rank<k>.pt, <name>-optimizer-rank<k>.pt
    complete                                         the digests of all these files; written last

All processes call these functions together. No random state is stored, see rlmt/run.py.
"""

import copy
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from huggingface_hub import save_torch_state_dict
from torch import nn
import transformers

from rlmt.data import write_file
from rlmt.learner import Learner, full_tensor, unwrap, whole_weights
from rlmt.model import has_adapter, is_sharded_launch
from utils import SAFE


# --- 1. model folders


def save_weights(folder: Path, model: nn.Module, merge: bool = True) -> None:
    """Saves a transformers model as an ordinary folder, LoRA merged; without `merge` its adapter alone.

    Under FSDP2 all processes gather the weights, one after the other; the main process keeps and writes them.
    """
    state = PartialState()
    inner = unwrap(model)
    saves_adapter = has_adapter(inner) and not merge
    weights = whole_weights(model)
    if saves_adapter:
        weights = inner.named_parameters()
    on_cpu = {}
    for name, weight in weights:
        if saves_adapter and not weight.requires_grad:
            continue
        whole = full_tensor(weight.detach())
        if state.is_main_process:
            on_cpu[name] = whole.to("cpu", copy=True)  # a gathered one may be a view of a larger buffer
    if not state.is_main_process:
        return

    folder.mkdir(parents=True, exist_ok=True)
    if saves_adapter:
        inner.save_pretrained(folder, state_dict=on_cpu)
        return
    save_torch_state_dict(on_cpu, folder)
    config = copy.deepcopy(inner.config)
    config.dtype = next(iter(on_cpu.values())).dtype
    # 4-bit weights are saved as the values that they stand for
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    kind = type(inner.get_base_model() if has_adapter(inner) else inner)
    if kind not in _read_back:  # once: what is written later has the same names
        _read_back.add(kind)
        check_saved(folder, kind, on_cpu)


_read_back = set()  # classes of models that this run has saved and compared


def check_saved(folder: Path, kind: type, weights: dict[str, torch.Tensor]) -> None:
    """Loads a model folder as transformers does; RuntimeError unless it has the names and values of `weights`.

    A head that was trained in float32 on frozen weights in bfloat16 is read in bfloat16.
    """
    model = kind.from_pretrained(folder, dtype="auto", **SAFE)
    found = dict(whole_weights(model))  # by the same names
    wrong = [*found.keys() ^ weights.keys()]
    for name in found.keys() & weights.keys():
        if not torch.equal(found[name], weights[name].to(found[name].dtype)):
            wrong.append(name)
    if wrong:
        raise RuntimeError(
            f"{folder}: transformers reads another model than the one that was saved; {len(wrong)} weights "
            f"differ, e.g. {wrong[0]}"
        )


def save_tokenizer(folder: Path, tokenizer) -> None:
    """Makes a model folder complete: tokenizer, chat template, the ids at which generation ends, the think
    format.

    The last two come from prepare_tokenizer. A reward model has no `trained_as`, as it writes nothing.
    """
    tokenizer.save_pretrained(folder)
    if hasattr(tokenizer, "trained_as"):
        generation = transformers.GenerationConfig(
            # all of them: a server would else go on behind one
            eos_token_id=tokenizer.stop_ids,
            pad_token_id=tokenizer.pad_token_id,
        )
        generation.save_pretrained(folder)
        (folder / "think_format.json").write_text(json.dumps(tokenizer.trained_as))


def adapter_of(folder: Path) -> Path:
    """Returns where the LoRA adapter of a model folder lies: adapter/ next to model/, else
    <name>_adapter/."""
    if folder.name == "model":
        return folder.with_name("adapter")
    return folder.with_name(f"{folder.name}_adapter")


def save_model(folder: Path, model: nn.Module, tokenizer) -> None:
    """Saves a finished model with LoRA merged; the adapter alone goes next to it, see `adapter_of`.

    Older folders of these names are replaced when the new ones are whole.
    """
    state = PartialState()
    trains_adapter = has_adapter(unwrap(model))
    part = _part_of(folder)
    adapter_part = _part_of(adapter_of(folder))
    if state.is_main_process:
        shutil.rmtree(part, ignore_errors=True)  # one that was not written to its end
        shutil.rmtree(adapter_part, ignore_errors=True)
    state.wait_for_everyone()
    save_weights(part, model)  # all processes take part: each has a shard
    if trains_adapter:
        save_weights(adapter_part, model, merge=False)
    state.wait_for_everyone()
    if state.is_main_process:
        save_tokenizer(part, tokenizer)
        if trains_adapter:
            _replace(adapter_of(folder), adapter_part)
        _replace(folder, part)
    state.wait_for_everyone()


def copy_model(source: Path, folder: Path) -> None:
    """Copies a model folder, and its adapter if there is one, as `save_model` writes them; main process
    only."""
    for old, new in ((adapter_of(source), adapter_of(folder)), (source, folder)):
        if old.exists():
            part = _part_of(new)
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(old, part)
            _replace(new, part)


def _part_of(folder: Path) -> Path:
    """Returns where a folder is written before it takes its name."""
    return folder.with_name(folder.name + ".part")


def _replace(folder: Path, part: Path) -> None:
    """Gives a folder that is whole the name of an older one, whose README.md it keeps."""
    os.sync()  # a power cut would else leave the name, and neither the old weights nor the new ones
    if (folder / "README.md").exists():  # somebody may have written it
        shutil.copy(folder / "README.md", part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


# --- 2. optimizers


def _optimizer_path(folder: Path, name: str) -> Path:
    rank = PartialState().process_index if is_sharded_launch() else 0
    return folder / f"{name}-optimizer-rank{rank}.pt"


def load_optimizers(folder: Path | None, learners: dict[str, Learner]) -> None:
    """Loads the optimizers of all learners from a checkpoint; does nothing if there is none.

    Under FSDP2 the number of processes must be the same.
    """
    if folder:
        for name, learner in learners.items():
            # plain tensors alone: a pickle in somebody else's run folder is not run
            state = torch.load(_optimizer_path(folder, name), map_location="cpu", weights_only=True)
            learner.optimizer.load_state_dict(state)


# --- 3. checkpoints

KEEP_CHECKPOINTS = 2  # the newest of a run; 0 keeps all


def save_checkpoint(run: Path, step: int, learners: dict[str, Learner], tokenizer) -> None:
    """Writes checkpoint-<step>, then deletes older ones so that KEEP_CHECKPOINTS are left.

    `learners`: {"model": the policy, "critic": ..., ...}.
    """
    state = PartialState()
    folder = run / f"checkpoint-{step}"
    if state.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # one that was not written to its end
        folder.mkdir(exist_ok=True)
        save_tokenizer(folder, tokenizer)
    state.wait_for_everyone()

    for name, learner in learners.items():
        weights = folder
        if name != "model":  # the learner that becomes run/model; its files lie in the folder itself
            weights = folder / name
        save_weights(weights, learner.model, merge=False)
        if is_sharded_launch() or state.is_main_process:  # under FSDP2 each process saves its shard
            torch.save(learner.optimizer.state_dict(), _optimizer_path(folder, name))

    os.sync()  # on every machine: a power cut would else leave the mark, and not what it is a mark of
    state.wait_for_everyone()
    if state.is_main_process:  # every process has written its part
        files = filter(Path.is_file, folder.rglob("*"))
        digests = {str(path.relative_to(folder)): digest_of(path) for path in files}
        # last: a checkpoint without it does not count
        write_file(folder / "complete", json.dumps(digests))
        os.sync()
        for older in numbered(run)[:-KEEP_CHECKPOINTS]:
            shutil.rmtree(older)
    state.wait_for_everyone()


def digest_of(path: Path | str) -> str:
    """Hashes a file: whole, but of weights and optimizers of more than 64 MiB a thousand places of 64 KiB."""
    size = os.path.getsize(path)
    stride = 2**16
    if str(path).endswith((".safetensors", ".pt")):
        stride = max(stride, size // 1000)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for start in range(0, size, stride):
            file.seek(start)
            digest.update(file.read(2**16))
    return digest.hexdigest()


def is_whole(folder: Path) -> bool:
    """Returns whether a checkpoint's files are what was written to its end; warns if they are not."""
    try:
        digests = json.loads((folder / "complete").read_text() or "{}")  # older runs wrote nothing
        changed = [name for name, digest in digests.items() if digest_of(folder / name) != digest]
    except Exception as error:  # missing, or what a power cut left
        changed = [error]
    if changed:
        print(f"WARNING: {folder} is left out because it is not whole: {changed[0]}", file=sys.stderr)
    return not changed


def latest(run: Path) -> Path | None:
    """Returns the newest whole checkpoint of a run, on every process; None without one."""
    newest = None
    if PartialState().is_main_process:
        newest = next(filter(is_whole, reversed(numbered(run))), None)
    return broadcast_object_list([newest])[0]


def numbered(run: Path) -> list[Path]:
    """Returns the checkpoint folders of a run, oldest first."""
    folders = [path for path in run.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))
