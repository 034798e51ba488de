"""plan.py: memory of runs that no machine of the tests could hold. tests/test_grpo.py measures that of a small one."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import plan
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
    """What eight GPUs of 80 GB would say to the plan; an H100 has 79.2 GiB."""
    state = PartialState(cpu=True)  # made before a GPU seems to be there: later tests have the same
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(utils, "DTYPE", "bfloat16")
    card = SimpleNamespace(total_memory=int(79.2 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(state, "num_processes", 8)


def test_memory_of_the_paper_s_model_before_anything_is_loaded(llama_8b, gpus, monkeypatch):
    """8.03 billion parameters; LoRA of rank 64 on all linear layers has 167.8 million, a model with one output 7.50."""
    assert plan.n_parameters(llama_8b, AutoModelForCausalLM, 64) == (8_030_261_248, 167_772_160)
    assert plan.trained_gib(llama_8b, 0) == pytest.approx(14.96, abs=0.01)
    assert plan.critic_gib(llama_8b, 0) == pytest.approx(13.98, abs=0.01)
    assert plan.reference_gib(llama_8b) == pytest.approx(1.87, abs=0.01)  # bfloat16, sharded
    assert plan.frozen_gib(llama_8b, AutoModelForSequenceClassification) == pytest.approx(13.98, abs=0.01)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    assert plan.trained_gib(llama_8b, 0) == pytest.approx(119.66, abs=0.01)
    assert plan.trained_gib(llama_8b, 64) == pytest.approx(14.96 + 2.5, abs=0.01)


def test_what_does_not_fit_is_refused_with_the_largest_part_s_remedy_first(gpus, monkeypatch, exits):
    fits = {"policy": 14.957, "vLLM": 24}
    assert plan.check_memory(fits) == (
        "GiB a GPU, without activations: policy 15, vLLM 24; 40.2 of 79.2 are left for those"
    )
    lora = "--lora-r, more GPUs with accelerate/8gpu_fsdp2.yaml, or a smaller --model"
    reward_model = "a smaller --reward-model"
    said = exits(plan.check_memory, {"policy": 14.0, "critic": 13.0, "reward model": 52.0, "reference": 2.0})
    assert "81 GiB are needed of a GPU's 79" in said
    assert f"most comes first: {reward_model}; {lora}; --lora-r, which needs no reference" in said

    too_much = {"training: policy": 60.0, "sampling: vLLM": 24.0}
    assert f"most comes first: {lora}; a smaller --vllm-memory" in exits(plan.check_memory, too_much)
    assert plan.check_memory(too_much, at_once=False)  # one after the other
    too_much["training: policy"] = 120.0
    assert exits(plan.check_memory, too_much, False).rstrip().endswith(f"most comes first: {lora}")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert plan.check_memory(too_much)


def test_presets_of_8b_models_leave_room_on_eight_gpus_of_80_gb(llama_8b, gpus):
    """15 % of each GPU for the update's activations, and where vLLM sleeps then, 10 % beside vLLM for sampling."""
    models = {"model": llama_8b, "reward_model": llama_8b}
    there = torch.cuda.get_device_properties(0).total_memory / plan.GIB

    args = train_grpo.Args(**train_grpo.PRESETS["table1/llama3.1-8b-rlmt"] | models)
    parts = plan.rl_gib(args, use_vllm=True, has_reference=True)
    assert set(parts) == {"policy", "reference", "reward model", "vLLM"}
    assert sum(parts.values()) < 0.85 * there

    args = train_ppo.Args(**train_ppo.PRESETS["table3/llama3.1-8b-rlmt-ppo"] | models)
    parts = plan.rl_gib(args, use_vllm=True, has_reference=True)
    parts["critic"] = plan.critic_gib(llama_8b, 0)
    assert args.vllm_sleep and sum(parts.values()) < 0.9 * there
    assert sum(parts.values()) - parts["vLLM"] < 0.85 * there

    args = train_dpo.Args(**train_dpo.PRESETS["table3/llama3.1-8b-rlmt-dpo"] | models)
    for name, gib in plan.dpo_gib(args, use_vllm=True).items():
        assert gib < 0.9 * there, name

    args = train_rlver.Args(**train_rlver.PRESETS["rlver-think-ppo"] | {"model": llama_8b})
    parts = plan.policies_gib(args, use_vllm=True, has_reference=bool(args.beta))
    parts["critic"] = plan.critic_gib(llama_8b, 0)
    assert sum(parts.values()) < 0.85 * there
