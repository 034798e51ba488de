"""rlmt/memory.py: memory of runs that no machine of the tests could hold. test_checkpoint.py measures that
of a small one."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from script_runs import ROOT
from transformers import LlamaConfig, Qwen2Config

from rlmt import memory
import train_dpo
import train_ppo
import utils

PAGE = (ROOT / "docs/one-gpu.md").read_text()
QWEN = dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12)
QWEN |= dict(num_key_value_heads=2, tie_word_embeddings=True)
CONFIGS = {  # LlamaConfig has an 8B model's other sizes as defaults
    "Llama-3.1-8B": LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8),
    "Qwen2.5-1.5B": Qwen2Config(vocab_size=151936, **QWEN),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Folders of models that have configs alone."""
    folders = {}
    for name, config in CONFIGS.items():
        folders[name] = str(tmp_path_factory.mktemp(name))
        config.save_pretrained(folders[name])
    return folders


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """What GPUs of 80 GB would say; an H100 has 79.2 GiB."""
    PartialState(cpu=True)  # made before a GPU seems to be there: later tests have the same
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(utils, "DTYPE", "bfloat16")
    card = SimpleNamespace(total_memory=int(79.2 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_trained_takes_what_the_page_says(name, models):
    found = []
    eight, lora = {"optim": "adamw_8bit"}, {"lora_r": 64}
    four = lora | {"load_in_4bit": True}
    for changes in ({}, eight, lora, four, four | eight):
        gib = memory.Memory(train_ppo.Args(**changes)).trained(models[name])
        found.append(f"{gib:.1f}")
    assert f"| {name} | {' | '.join(found)} |" in PAGE


def test_presets_of_8b_models_leave_room_on_eight_gpus_of_80_gb(models, monkeypatch):
    """15 % of each GPU for the update's activations, when vLLM sleeps, and 10 % with vLLM for sampling."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(PartialState(), "num_processes", 8)
    llama = dict.fromkeys(("model", "reward_model"), models["Llama-3.1-8B"])

    args = train_ppo.Args(rollout="vllm", **train_ppo.PRESETS["paper"] | llama)
    parts = memory.Memory(args).rl(["preference"], has_reference=True)
    parts["critic"] = memory.Memory(args).critic(args.model)
    held = {"policy": 14.96, "reference": 1.87, "reward model": 13.98, "critic": 13.98}
    assert parts == pytest.approx(held | {"vLLM": args.vllm_memory * 79.2}, abs=0.01)
    assert sum(parts.values()) < 0.9 * 79.2
    assert sum(held.values()) < 0.85 * 79.2
    args = train_dpo.Args(rollout="vllm", **train_dpo.PRESETS["paper"] | llama)
    assert max(memory.Memory(args).dpo().values()) < 0.9 * 79.2


def test_what_does_not_fit_is_refused(exits):
    assert "40.2 of 79.2 are left" in memory.check_memory({"policy": 15, "vLLM": 24})
    too_much = {"training: policy": 60.0, "sampling: vLLM": 24.0}
    assert "84 GiB are needed of a GPU's 79" in exits(memory.check_memory, too_much)
    assert memory.check_memory(too_much, at_once=False)  # one after the other
