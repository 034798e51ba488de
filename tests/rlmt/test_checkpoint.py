"""rlmt/checkpoint.py: what is saved is loaded, and an unfinished checkpoint costs no older one.

Optimizers: tests/scripts/, where every script resumes to the bit.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from rlmt.chat import read_trained_as
from rlmt.checkpoint import check_saved, copy_model, latest, save_checkpoint, save_model, save_weights
from conftest import random_model
from rlmt.learner import Learner, Policy, whole_weights
from rlmt.model import load_trained, start_accelerator
from rlmt.run import Run, RunArgs
from script_runs import BASE, weights_of

IDS = torch.arange(5, 25).repeat(2, 1)
INPUTS = (IDS, torch.ones_like(IDS), torch.ones_like(IDS[:, 10:]))


@pytest.fixture(scope="module")
def accelerator():
    return start_accelerator()


def load(accelerator, folder: Path | None = None, **changes) -> Learner:
    args = RunArgs(gradient_checkpointing=False, **changes)
    model = Policy(load_trained(BASE, args, folder), 1.0)
    return Learner(model, accelerator, 8192, 1e-3, 0.01, optim=args.optim)


def train(learner: Learner) -> None:
    for _ in range(3):
        logprobs, _ = learner.model(*INPUTS)
        (-logprobs.mean()).backward()
        learner.step()


def same_logits(folder: Path, model, atol: float = 1e-4):
    """Loads what was saved with transformers: all weights are there, and it says the same. Returns it."""
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and loaded.config.dtype == torch.float32
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=atol)
    return loaded


def test_an_optimizer_of_8_bits_keeps_whole_moments_of_embeddings(accelerator):
    learner = load(accelerator, optim="adamw_8bit")
    train(learner)
    layers = learner.model.model.model
    of_layer, of_embeddings = layers.layers[0].mlp.up_proj.weight, layers.embed_tokens.weight
    states = learner.optimizer.state
    assert states[of_layer]["state1"].dtype == torch.uint8 != states[of_embeddings]["state1"].dtype


def test_older_checkpoints_go_when_a_newer_one_is_whole(accelerator, tokenizer, tmp_path, exits):
    for name in ("8", "9", "10", "mine"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    for name in ("8", "9"):  # the later one was killed while it was written
        (tmp_path / f"checkpoint-{name}" / "complete").touch()
    assert latest(tmp_path).name == "checkpoint-9"
    save_checkpoint(tmp_path, 100, {}, tokenizer)
    with pytest.raises(AttributeError):  # as a full disk would end it, in the middle
        save_checkpoint(tmp_path, 101, {"model": None}, tokenizer)
    assert latest(tmp_path).name == "checkpoint-100"
    assert not (tmp_path / "checkpoint-8").exists() and not (tmp_path / "checkpoint-9").exists()
    (tmp_path / "config.json").write_text('{"args": {}, "constants": {}, "processes": 1}')
    run = Run(RunArgs(out=str(tmp_path), resume=True), "sft", "model")
    run.find_checkpoint()
    save_checkpoint(tmp_path, 102, {}, tokenizer)
    assert latest(tmp_path).name == "checkpoint-102"
    [*_, file] = (tmp_path / "checkpoint-102").glob("*.json")
    content = file.read_bytes()
    for torn in (b"", content[:-1], bytes(len(content))):  # as a power cut may leave it
        file.write_bytes(torn)
        assert latest(tmp_path).name == "checkpoint-100"
    file.unlink()
    run.find_checkpoint()
    left = {path.name for path in tmp_path.glob("checkpoint-*")}  # the torn ones are of no use
    assert run.first_step == 100 and left == {"checkpoint-100", "checkpoint-mine"}
    (tmp_path / "checkpoint-100" / file.name).unlink()
    assert "no checkpoint of" in exits(run.find_checkpoint)


@pytest.mark.parametrize("bits", [{}, {"lora_r": 4}, {"lora_r": 4, "load_in_4bit": True}])
def test_a_saved_model_is_an_ordinary_folder(bits, accelerator, tokenizer, tmp_path):
    """transformers loads it, and it says the same; LoRA is merged, its adapter beside it."""
    learner = load(accelerator, **bits)
    train(learner)
    folder = tmp_path / "model"
    unfinished = tmp_path / "model.part"  # of a run that was killed: from_pretrained would find its shards
    for path in (folder / "README.md", folder / "old", unfinished / "old"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    save_model(folder, learner.model, tokenizer)
    assert not (folder / "old").exists() and not unfinished.exists() and (folder / "README.md").exists()

    loaded = same_logits(folder, learner.model.model, atol=1e-3)
    before = AutoModelForCausalLM.from_pretrained(BASE)(IDS).logits
    assert (loaded(IDS).logits - before).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.stop_ids
    assert read_trained_as(str(folder)) == {"think_format": "think"}

    copy_model(folder, tmp_path / "best_by_gold")
    copied = weights_of(tmp_path / "best_by_gold")
    torch.testing.assert_close(copied, weights_of(folder), rtol=0, atol=0)
    if bits:
        again = load(accelerator, tmp_path / "best_by_gold_adapter", **bits)
        expected = learner.model.state_dict()
        torch.testing.assert_close(dict(again.model.state_dict()), dict(expected), rtol=0, atol=0)


@pytest.mark.parametrize("lora_r", [0, 4])
@pytest.mark.parametrize("family", ["gemma4_text", "mixtral", "qwen3_moe", "gpt2"])
def test_what_is_saved_is_the_model(family, lora_r, accelerator, tmp_path):
    """Buffers that are weights, fused experts with LoRA, Conv1D; under the names of the folder it came from."""
    random_model(family).save_pretrained(tmp_path / "base")
    args = RunArgs(gradient_checkpointing=False, lora_r=lora_r)
    model = load_trained(str(tmp_path / "base"), args, token_ids=[2, 7])
    before = model(IDS).logits
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    assert (model(IDS).logits - before).abs().max() > 0.1
    save_weights(tmp_path / "saved", model)

    assert weights_of(tmp_path / "saved").keys() == weights_of(tmp_path / "base").keys()
    same_logits(tmp_path / "saved", model)


def test_a_folder_that_reads_back_otherwise_ends_the_run(tmp_path):
    model = random_model("gpt2")
    model.save_pretrained(tmp_path)
    weights = dict(whole_weights(model))
    check_saved(tmp_path, type(model), weights)
    weights["transformer.ln_f.bias"] = weights["transformer.ln_f.bias"] + 1e-3
    with pytest.raises(RuntimeError, match="1 weights differ, e.g. transformer.ln_f.bias"):
        check_saved(tmp_path, type(model), weights)


def test_weights_in_4_bits_are_not_trained(accelerator, tmp_path, exits):
    bits = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(BASE, quantization_config=bits).save_pretrained(tmp_path)
    assert "quantised and cannot be trained" in exits(load_trained, str(tmp_path), RunArgs())
    model = load_trained(str(tmp_path), RunArgs(gradient_checkpointing=False, lora_r=4))
    save_weights(tmp_path / "saved", model)
    same_logits(tmp_path / "saved", model, atol=1e-3)
