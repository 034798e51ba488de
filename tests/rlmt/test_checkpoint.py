"""rlmt/checkpoint.py: what is saved is loaded, and a full disk costs no older checkpoint.

Several processes, DDP and FSDP2: tests/scripts/test_grpo.py.
"""

import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlmt import checkpoint
from rlmt.chat import load_tokenizer, prepare_tokenizer, read_trained_as
from rlmt.checkpoint import (
    copy_model,
    latest,
    load_optimizers,
    numbered,
    save_checkpoint,
    save_model,
    step_of,
)
from rlmt.data import write_file
from rlmt.memory import GIB, trained_gib
from rlmt.model import Learner, Policy, load_trained, prepare_trained, start_accelerator, whole_weights
from rlmt.run import RunArgs
from train_grpo import Args

BASE = "data/toy/base"


@pytest.fixture(scope="module")
def accelerator():
    return start_accelerator()


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer(BASE)
    prepare_tokenizer(tokenizer, "think")
    return tokenizer


def learner(accelerator, lora_r: int = 0, resume_from: Path | None = None, optim: str = "adamw") -> Learner:
    args = RunArgs(gradient_checkpointing=False, lora_r=lora_r)
    model = Policy(load_trained(BASE, args, resume_from), 1.0)
    return prepare_trained(accelerator, model, 1e-3, 0.01, optim=optim)


def train(learner: Learner, steps: int) -> None:
    ids = torch.arange(5, 25).repeat(2, 1)
    mask = torch.ones_like(ids)
    for _ in range(steps):
        logprobs, _ = learner.model(ids, mask, mask[:, 10:])
        (-logprobs.mean()).backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in learner.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("lora_r", "optim"), [(0, "adamw"), (4, "adamw"), (0, "adamw_8bit")])
def test_training_goes_on_as_if_nothing_had_happened(lora_r, optim, accelerator, tokenizer, tmp_path):
    """Policy and critic; the optimizer's state takes the bytes that are planned."""
    torch.manual_seed(0)
    first = {"model": learner(accelerator, lora_r, optim=optim), "critic": learner(accelerator)}
    for one in first.values():
        train(one, 3)
    save_checkpoint(tmp_path, 3, first, tokenizer, accelerator)
    folder = tmp_path / "checkpoint-3"
    assert latest(tmp_path) == folder

    torch.manual_seed(1)
    second = {
        "model": learner(accelerator, lora_r, folder, optim),
        "critic": learner(accelerator, resume_from=folder / "critic"),
    }
    load_optimizers(folder, second)
    for name in first:
        assert same(weights_of(second[name]), weights_of(first[name]))
        train(second[name], 2)
        train(first[name], 2)
        assert same(weights_of(second[name]), weights_of(first[name]))

    held = 0
    model, optimizer = first["model"]
    for weight in model.parameters():
        if weight.requires_grad or not lora_r:
            held += weight.nbytes + weight.numel() * 4  # the gradient
        state = optimizer.state.get(weight, {})
        moments = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
        held += sum(state[key].nbytes for key in moments if key in state)
    if not lora_r:
        planned = trained_gib(BASE, Args(optim=optim)) * GIB
        assert held == pytest.approx(planned, rel=0.02)
    if optim == "adamw_8bit":  # embeddings keep whole moments
        embeddings = model.model.get_input_embeddings().weight
        up = model.model.model.layers[0].mlp.up_proj.weight
        assert optimizer.state[up]["state1"].dtype == torch.uint8
        assert optimizer.state[embeddings]["state1"].dtype == torch.float32


@pytest.mark.parametrize(("keep", "kept"), [(2, [10, 100]), (0, [8, 9, 10, 100])])
def test_older_checkpoints_go_when_a_newer_one_is_whole(
    keep, kept, accelerator, tokenizer, tmp_path, monkeypatch
):
    for step in (8, 9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step != 9:  # killed while it was written
            (tmp_path / f"checkpoint-{step}" / "complete").touch()
    (tmp_path / "checkpoint-old").mkdir()  # somebody's own
    assert latest(tmp_path) == tmp_path / "checkpoint-10"
    monkeypatch.setattr(checkpoint, "KEEP_CHECKPOINTS", keep)
    save_checkpoint(tmp_path, 100, {}, tokenizer, accelerator)
    assert [step_of(folder) for folder in numbered(tmp_path)] == kept
    assert latest(tmp_path) == tmp_path / "checkpoint-100" and (tmp_path / "checkpoint-old").exists()


@pytest.mark.parametrize("megabytes", [0.001, 1.0, 5.0])
def test_a_full_disk_leaves_the_older_checkpoints_usable(megabytes, accelerator, tokenizer, tmp_path):
    """No file may become larger than that, which is what a full disk does to a write: tokenizer, weights,
    optimizer."""
    learners = {"model": learner(accelerator)}
    train(learners["model"], 1)
    save_checkpoint(tmp_path, 4, learners, tokenizer, accelerator)
    write_file(tmp_path / "summary.json", "before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(megabytes * 1e6), before[1]))
    try:
        # each library has its own
        with pytest.raises(Exception, match="[Ff]ile too large|failed writing file|unexpected pos"):
            save_checkpoint(tmp_path, 5, learners, tokenizer, accelerator)
        with pytest.raises(OSError):
            write_file(tmp_path / "summary.json", "x" * int(megabytes * 2e6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        latest(tmp_path) == tmp_path / "checkpoint-4" and (tmp_path / "summary.json").read_text() == "before"
    )
    save_checkpoint(tmp_path, 5, learners, tokenizer, accelerator)  # over what was left, with room again
    assert latest(tmp_path) == tmp_path / "checkpoint-5"


@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_saved_model_is_an_ordinary_folder(lora_r, accelerator, tokenizer, tmp_path):
    """transformers loads it, and it says the same; LoRA is merged, its adapter beside it."""
    torch.manual_seed(0)
    one = learner(accelerator, lora_r)
    train(one, 2)
    folder = tmp_path / "model"
    unfinished = tmp_path / "model.part"  # of a run that was killed: from_pretrained would find its shards
    for other in (folder, unfinished):
        other.mkdir()
        (other / f"old-{other.name}").write_text("")
    (folder / "README.md").write_text("my card")
    save_model(folder, one.model, tokenizer, accelerator)
    assert not list(folder.glob("old*")) and not unfinished.exists()
    assert (folder / "README.md").read_text() == "my card"

    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and loaded.config.dtype == torch.float32
    expected = dict(whole_weights(one.model))
    base = dict(AutoModelForCausalLM.from_pretrained(BASE).named_parameters())
    assert same(dict(loaded.named_parameters()), expected) and not same(expected, base)
    ids = torch.arange(5, 25).unsqueeze(0)
    mask = torch.ones_like(ids)
    found, _ = Policy(loaded, 1.0)(ids, mask, mask[:, 10:])
    torch.testing.assert_close(found, one.model(ids, mask, mask[:, 10:])[0])
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.stop_ids
    assert read_trained_as(str(folder)) == {"think_format": "think"}

    copy_model(folder, tmp_path / "best_by_gold")
    adapters = [tmp_path / "adapter", tmp_path / "best_by_gold_adapter"]
    assert [path.exists() for path in adapters] == [bool(lora_r)] * 2
    if lora_r:
        again = learner(accelerator, lora_r, resume_from=adapters[1])
        assert same(weights_of(again), weights_of(one))
    assert same(
        load_file(tmp_path / "best_by_gold" / "model.safetensors"), load_file(folder / "model.safetensors")
    )
    shutil.rmtree(folder)  # a copy of its own
    assert (tmp_path / "best_by_gold" / "model.safetensors").exists()
