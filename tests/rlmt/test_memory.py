"""rlmt/memory.py: memory of runs that no machine of the tests could hold. test_checkpoint.py measures that
of a small one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from rlmt import memory
from rlmt.run import check_values
import train_dpo
import train_grpo
import train_ppo
import train_reward
import train_rlver
import train_sft_warmstart
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


def test_what_does_not_fit_is_refused(gpus, monkeypatch, exits):
    args = train_ppo.Args()
    assert memory.check_memory({"policy": 14.957, "vLLM": 24}, args) == (
        "GiB a GPU, without activations: policy 15, vLLM 24; 40.2 of 79.2 are left for those"
    )
    too_much = {"training: policy": 60.0, "sampling: vLLM": 24.0}
    said = exits(memory.check_memory, too_much, args)
    assert "84 GiB are needed of a GPU's 79" in said and "--lora-r 64" in said
    assert memory.check_memory(too_much, args, at_once=False)  # one after the other
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert memory.check_memory(too_much, args)


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

# Sizes as the models' config.json on the hub has them.
QWEN25 = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}
SMALL_MODELS = {
    "Qwen/Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, **QWEN25
    ),
    "Qwen/Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, **QWEN25
    ),
    "meta-llama/Llama-3.2-1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
}
N_PARAMETERS = {  # as the models' cards on the hub say; of the reward model without an LM head of its own
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": 596_049_920,
}
# Least memory of a card that is sold with so many GB, GiB: an A10G or L4 has 22.0, an RTX 3090 or 4090 23.6,
# an A100 79.1.
CARDS = {"24gb": 22.0, "80gb": 79.1}


@pytest.fixture(scope="module")
def small_models(tmp_path_factory, llama_8b) -> dict[str, str]:
    """Folders with the configs of the models that presets for one card train or score with."""
    folders = {"meta-llama/Llama-3.1-8B": llama_8b}
    for name, config in SMALL_MODELS.items():
        folders[name] = str(tmp_path_factory.mktemp("model"))
        config.save_pretrained(folders[name])
        gib = memory.frozen_gib(folders[name], AutoModelForCausalLM, "float32")
        assert gib * 2**30 == 4 * N_PARAMETERS[name]
    folders["Qwen/Qwen2.5-1.5B-Instruct"] = folders["Qwen/Qwen2.5-1.5B"]
    return folders


@pytest.mark.parametrize("card", CARDS)
def test_presets_for_one_card_fit_it(card, small_models, gpus, monkeypatch):
    """With a quarter of the card free for activations of at least 8192 tokens, as of CUDA itself."""
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    there = CARDS[card]
    properties = SimpleNamespace(total_memory=int(there * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    reward = train_reward.Args(**train_reward.PRESETS[card])
    held = {
        "reward": memory.trained_gib(small_models[reward.model], reward, AutoModelForSequenceClassification)
    }
    for model in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.2-1B"):
        values = {  # as experiments/1gpu.sh has them
            "24gb Qwen/Qwen2.5-0.5B": {},
            "24gb meta-llama/Llama-3.2-1B": {"optim": "adamw_8bit"},
        }.get(f"{card} {model}", train_sft_warmstart.PRESETS[card])
        args = train_sft_warmstart.Args(**values)
        check_values(args)
        held[f"sft {model}"] = memory.trained_gib(small_models[model], args)

        args = train_grpo.Args(**train_grpo.PRESETS[card] | {"model": small_models[model]})
        args.reward_model = small_models[args.reward_model]
        parts = memory.rl_gib(args, ["preference"], use_vllm=True, has_reference=True)
        assert set(parts) == {"policy", "reward model", "vLLM"}  # with LoRA no reference
        held[f"grpo {model}"] = sum(parts.values())
    assert max(held.values()) < 0.75 * there, held
