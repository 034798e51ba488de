"""rlmt/checkpoint.py: what is saved is loaded, and a full disk costs no older checkpoint.

Several processes, DDP and FSDP2: tests/scripts/test_grpo.py.
"""

import dataclasses
import json
import resource
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlmt import checkpoint
from rlmt.chat import load_tokenizer, prepare_tokenizer, read_trained_as
from rlmt.checkpoint import copy_model, latest, load_optimizers, save_checkpoint, save_model
from rlmt.data import read_log
from rlmt.memory import GIB, trained_gib
from rlmt.model import Learner, Policy, load_trained, prepare_trained, start_accelerator, whole_weights
from rlmt.run import LOGS, RunArgs, resume
from script_runs import weights_of
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


def learner(accelerator, lora_r: int = 0, optim: str = "adamw", resume_from: Path | None = None) -> Learner:
    args = RunArgs(gradient_checkpointing=False, lora_r=lora_r)
    model = Policy(load_trained(BASE, args, resume_from), 1.0)
    return prepare_trained(accelerator, model, 1e-3, 0.01, optim=optim)


IDS = torch.arange(5, 25).repeat(2, 1)
INPUTS = (IDS, torch.ones_like(IDS), torch.ones_like(IDS[:, 10:]))


def train(learner: Learner, steps: int) -> dict[str, torch.Tensor]:
    """Trains for some steps; returns the weights."""
    for _ in range(steps):
        logprobs, _ = learner.model(*INPUTS)
        (-logprobs.mean()).backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in learner.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("lora_r", "optim"), [(0, "adamw"), (4, "adamw"), (0, "adamw_8bit")])
def test_training_goes_on_as_if_nothing_had_happened(lora_r, optim, accelerator, tokenizer, tmp_path):
    """Policy and critic; the optimizer's state takes the bytes that are planned."""
    first = {"model": learner(accelerator, lora_r, optim), "critic": learner(accelerator)}
    for one in first.values():
        train(one, 3)
    save_checkpoint(tmp_path, 3, first, tokenizer, accelerator)
    folder = latest(tmp_path)
    second = {
        "model": learner(accelerator, lora_r, optim, folder),
        "critic": learner(accelerator, resume_from=folder / "critic"),
    }
    load_optimizers(folder, second)
    for name in first:
        assert same(train(second[name], 0), train(first[name], 0))
        assert same(train(second[name], 2), train(first[name], 2))

    held = 0
    for weight in first["model"].model.parameters():
        held += 2 * weight.nbytes  # the gradient too
        for name, state in first["model"].optimizer.state[weight].items():
            if name not in ("step", "qmap1", "qmap2"):
                held += state.nbytes
    if not lora_r:
        assert held == pytest.approx(trained_gib(BASE, Args(optim=optim)) * GIB, rel=0.02)


@pytest.mark.parametrize(("keep", "kept"), [(2, ["10", "100", "old"]), (0, ["10", "100", "8", "9", "old"])])
def test_older_checkpoints_go_when_a_newer_one_is_whole(
    keep, kept, accelerator, tokenizer, tmp_path, monkeypatch
):
    for name in ("8", "9", "10", "old"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    for name in ("8", "9"):  # the later one was killed while it was written
        (tmp_path / f"checkpoint-{name}" / "complete").touch()
    assert latest(tmp_path).name == "checkpoint-9"
    monkeypatch.setattr(checkpoint, "KEEP_CHECKPOINTS", keep)
    save_checkpoint(tmp_path, 100, {}, tokenizer, accelerator)
    assert latest(tmp_path).name == "checkpoint-100"
    assert sorted(path.name.removeprefix("checkpoint-") for path in tmp_path.iterdir()) == kept


@pytest.mark.parametrize("megabytes", [1.0, 5.0])
def test_a_full_disk_leaves_the_older_checkpoint_usable(megabytes, accelerator, tokenizer, tmp_path):
    """No file may become larger than that: weights, optimizer."""
    learners = {"model": learner(accelerator)}
    train(learners["model"], 1)
    save_checkpoint(tmp_path, 4, learners, tokenizer, accelerator)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(megabytes * 1e6), before[1]))
    try:
        # each library has its own
        with pytest.raises(Exception, match="[Ff]ile too large|failed writing file|unexpected pos"):
            save_checkpoint(tmp_path, 5, learners, tokenizer, accelerator)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert latest(tmp_path).name == "checkpoint-4"
    save_checkpoint(tmp_path, 5, learners, tokenizer, accelerator)  # over what was left, with room again
    assert latest(tmp_path).name == "checkpoint-5"


def test_a_resume_cuts_the_logs_back_to_its_checkpoint(accelerator, tmp_path, exits):
    for name in LOGS:
        rows = "".join(json.dumps({"step": step}) + "\n" for step in (1, 3, 4, 4, 5))
        (tmp_path / name).write_text(rows + '{"step": 6, "na')  # a kill cuts off the last line
    complete = tmp_path / "checkpoint-4" / "complete"
    complete.parent.mkdir()
    complete.touch()
    args = Args(resume=True)
    assert resume(tmp_path, args, accelerator).first_step == 4
    for name in LOGS:
        assert [row["step"] for row in read_log(tmp_path / name)] == [1, 3, 4, 4]
    # else the model of step 4 would be called that of step 3
    said = exits(resume, tmp_path, dataclasses.replace(args, steps=3), accelerator)
    assert "checkpoint-4 has trained 4 steps" in said
    complete.unlink()  # no checkpoint was ever finished
    assert resume(tmp_path, args, accelerator).first_step == 0 and not read_log(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_saved_model_is_an_ordinary_folder(lora_r, accelerator, tokenizer, tmp_path):
    """transformers loads it, and it says the same; LoRA is merged, its adapter beside it."""
    one = learner(accelerator, lora_r)
    trained = train(one, 2)
    folder = tmp_path / "model"
    unfinished = tmp_path / "model.part"  # of a run that was killed: from_pretrained would find its shards
    for other in (folder, unfinished):
        other.mkdir()
        (other / "old").touch()
    (folder / "README.md").write_text("my card")
    save_model(folder, one.model, tokenizer, accelerator)
    assert not (folder / "old").exists() and not unfinished.exists()
    assert (folder / "README.md").read_text() == "my card"

    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and loaded.config.dtype == torch.float32
    assert same(dict(loaded.named_parameters()), dict(whole_weights(one.model)))
    torch.testing.assert_close(Policy(loaded, 1.0)(*INPUTS)[0], one.model(*INPUTS)[0])
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.stop_ids
    assert read_trained_as(str(folder)) == {"think_format": "think"}

    copy_model(folder, tmp_path / "best_by_gold")
    assert same(weights_of(tmp_path / "best_by_gold"), weights_of(folder))
    if lora_r:
        again = learner(accelerator, lora_r, resume_from=tmp_path / "best_by_gold_adapter")
        assert same(train(again, 0), trained)
