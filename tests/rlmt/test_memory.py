"""rlmt/memory.py: memory of runs that no machine of the tests could hold. test_checkpoint.py measures that
of a small one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from transformers import LlamaConfig

from rlmt import memory
import train_dpo
import train_grpo
import train_ppo
import train_rlver
import utils


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory) -> str:
    """A folder with the config of Llama-3.1-8B's shape: 8.03 billion parameters."""
    folder = tmp_path_factory.mktemp("llama-8b")
    LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def gpus(monkeypatch):
    """What eight GPUs of 80 GB would say; an H100 has 79.2 GiB."""
    state = PartialState(cpu=True)  # made before a GPU seems to be there: later tests have the same
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(utils, "DTYPE", "bfloat16")
    card = SimpleNamespace(total_memory=int(79.2 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(state, "num_processes", 8)


def test_memory_of_the_paper_s_model_before_anything_is_loaded(llama_8b, gpus, monkeypatch):
    """The table of docs/gpu.md. LoRA of rank 64 on all linear layers has 167.8 million parameters."""
    models = {"model": llama_8b, "reward_model": llama_8b}
    grpo = memory.rl_gib(train_grpo.Args(vllm_memory=0.4, **models), ["preference"], True, True)
    assert grpo == pytest.approx(
        {"policy": 14.96, "reference": 1.87, "vLLM": 31.68, "reward model": 13.98}, abs=0.01
    )
    full = train_ppo.Args(**models)
    assert memory.critic_gib(llama_8b, full) == pytest.approx(13.98, abs=0.01)
    there = 79.2
    held = sum(grpo.values())
    without_gradient = held - grpo["policy"] * 4 / 16
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    for in_phase, asleep in (
        (without_gradient, without_gradient),
        (held, held - grpo["vLLM"]),
        (without_gradient, without_gradient - grpo["vLLM"]),
    ):
        assert f"| {in_phase:.1f} | {there - in_phase:.1f} | {asleep:.1f} |" in page

    # one GPU; moments: 2.03 bytes in place of 8, but 8 of the 0.525 billion of the embeddings; linear layers:
    # 0.516 in place of 2
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    for changes, gib in (
        ({}, 119.66),
        ({"lora_r": 64}, 14.96 + 2.5),
        ({"optim": "adamw_8bit"}, 119.66 - 44.63 + 2.92),
        ({"lora_r": 64, "load_in_4bit": True, "optim": "adamw_8bit"}, 14.96 - 9.65 + 1.57),
    ):
        assert memory.trained_gib(llama_8b, train_ppo.Args(**changes)) == pytest.approx(gib, abs=0.01)


def test_presets_of_8b_models_leave_room_on_eight_gpus_of_80_gb(llama_8b, gpus):
    """15 % of each GPU for the update's activations, when vLLM sleeps, and 10 % with vLLM for sampling."""
    models = {"model": llama_8b, "reward_model": llama_8b}
    there = memory.card_gib()
    args = train_grpo.Args(**train_grpo.PRESETS["paper"] | models)
    parts = memory.rl_gib(args, ["preference"], use_vllm=True, has_reference=True)
    assert sum(parts.values()) < 0.85 * there

    args = train_ppo.Args(**train_ppo.PRESETS["paper"] | models)
    parts = memory.rl_gib(args, ["preference"], use_vllm=True, has_reference=True)
    parts["critic"] = memory.critic_gib(llama_8b, args)
    assert sum(parts.values()) < 0.9 * there
    assert sum(parts.values()) - parts["vLLM"] < 0.85 * there

    args = train_dpo.Args(**train_dpo.PRESETS["paper"] | models)
    for name, gib in memory.dpo_gib(args, use_vllm=True).items():
        assert gib < 0.9 * there, name

    args = train_rlver.Args(model=llama_8b, algorithm="ppo")
    parts = memory.policies_gib(args, use_vllm=True, has_reference=bool(args.beta))
    parts["critic"] = memory.critic_gib(llama_8b, args)
    assert sum(parts.values()) < 0.85 * there


# --- one card
