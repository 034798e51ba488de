"""rlmt/memory.py: memory of runs that no machine of the tests could hold. tests/scripts/test_grpo.py measures that of a small one."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from rlmt import memory as plan
from rlmt import run as runs
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


@pytest.fixture(scope="module", autouse=True)
def parameters_counted_once():
    """Counts the parameters of the same few configs once; no test changes a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "count_parameters", functools.cache(plan.count_parameters))
        yield


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
    sizes = plan.count_parameters(llama_8b, AutoModelForCausalLM, 64)
    assert sizes.whole == 8_030_261_248 and sizes.adapter == 167_772_160
    full = train_ppo.Args()
    lora = train_ppo.Args(lora_r=64)
    assert plan.trained_gib(llama_8b, full) == pytest.approx(14.96, abs=0.01)
    assert plan.critic_gib(llama_8b, full) == pytest.approx(13.98, abs=0.01)
    assert plan.reference_gib(llama_8b) == pytest.approx(1.87, abs=0.01)  # bfloat16, sharded
    assert plan.frozen_gib(llama_8b, AutoModelForSequenceClassification) == pytest.approx(13.98, abs=0.01)
    assert plan.reference_gib(llama_8b, "float32") == pytest.approx(3.74, abs=0.01)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    assert plan.trained_gib(llama_8b, full) == pytest.approx(119.66, abs=0.01)
    assert plan.trained_gib(llama_8b, lora) == pytest.approx(14.96 + 2.5, abs=0.01)

    # moments: 2.03 bytes in place of 8, but 8 of the 0.525 billion of the embeddings; linear layers: 0.516 in place of 2
    assert sizes.embeddings == 128256 * 4096 and sizes.linear == 6_979_321_856
    eight_bit = train_ppo.Args(optim="adamw_8bit")
    assert plan.trained_gib(llama_8b, eight_bit) == pytest.approx(119.66 - 44.63 + 2.92, abs=0.01)
    qlora = train_ppo.Args(lora_r=64, load_in_4bit=True, optim="adamw_8bit")
    assert plan.trained_gib(llama_8b, qlora) == pytest.approx(14.96 - 9.65 + 1.57, abs=0.01)


def test_what_does_not_fit_is_refused_with_the_largest_part_s_remedy_first(gpus, monkeypatch, exits):
    fits = {"policy": 14.957, "vLLM": 24}
    full = train_ppo.Args()
    assert plan.check_memory(fits, full) == (
        "GiB a GPU, without activations: policy 15, vLLM 24; 40.2 of 79.2 are left for those"
    )
    lora = "--lora-r 64; more GPUs with accelerate/8gpu_fsdp2.yaml; a smaller --model"
    said = exits(
        plan.check_memory, {"policy": 14.0, "critic": 13.0, "reward model": 52.0, "reference": 2.0}, full
    )
    assert "81 GiB are needed of a GPU's 79" in said
    reference = "--lora-r, which needs no reference"
    small = "a smaller --reward-model, such as Skywork/Skywork-Reward-V2-Qwen3-0.6B with 1.1 GiB"
    assert said.rstrip().endswith(f"most comes first: {small}; {lora}; {reference}")

    too_much = {"training: policy": 60.0, "sampling: vLLM": 24.0}
    assert f"most comes first: {lora}; a smaller --vllm-memory" in exits(plan.check_memory, too_much, full)
    assert plan.check_memory(too_much, full, at_once=False)  # one after the other
    too_much["training: policy"] = 120.0
    assert exits(plan.check_memory, too_much, full, False).rstrip().endswith(f"most comes first: {lora}")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert plan.check_memory(too_much, full)


def test_one_card_is_told_of_bits_before_more_cards(gpus, monkeypatch, exits):
    """What the run has already is not advised."""
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    rest = "more GPUs with accelerate/8gpu_fsdp2.yaml; a smaller --model"
    for args, advised in (
        (train_ppo.Args(), "--lora-r 64; --optim adamw_8bit; "),
        (train_ppo.Args(optim="adamw_8bit"), "--lora-r 64; "),
        (train_ppo.Args(lora_r=8), "--load-in-4bit; --optim adamw_8bit; "),
        (train_ppo.Args(lora_r=8, load_in_4bit=True, optim="adamw_8bit"), ""),
    ):
        said = exits(plan.check_memory, {"model": 90.0}, args)
        assert said.rstrip().endswith(f"What helps most comes first: {advised}{rest}")


def test_presets_of_8b_models_leave_room_on_eight_gpus_of_80_gb(llama_8b, gpus):
    """15 % of each GPU for the update's activations, and where vLLM sleeps then, 10 % beside vLLM for sampling."""
    models = {"model": llama_8b, "reward_model": llama_8b}
    there = torch.cuda.get_device_properties(0).total_memory / plan.GIB

    args = train_grpo.Args(**train_grpo.PRESETS["paper"] | models)
    parts = plan.rl_gib(args, {"preference": {}}, use_vllm=True, has_reference=True)
    assert set(parts) == {"policy", "reference", "reward model", "vLLM"}
    assert sum(parts.values()) < 0.85 * there

    # the table of docs/gpu.md: GiB held and left by phase, and held in the phase when vLLM sleeps
    gradient = parts["policy"] * 4 / 16
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    for held, asleep in (
        (sum(parts.values()) - gradient, sum(parts.values()) - gradient),
        (sum(parts.values()), sum(parts.values()) - parts["vLLM"]),
        (sum(parts.values()) - gradient, sum(parts.values()) - gradient - parts["vLLM"]),
    ):
        assert f"| {held:.1f} | {there - held:.1f} | {asleep:.1f} |" in page

    args = train_ppo.Args(**train_ppo.PRESETS["paper"] | models)
    parts = plan.rl_gib(args, {"preference": {}}, use_vllm=True, has_reference=True)
    parts["critic"] = plan.critic_gib(llama_8b, args)
    assert args.vllm_sleep and sum(parts.values()) < 0.9 * there
    assert sum(parts.values()) - parts["vLLM"] < 0.85 * there

    args = train_dpo.Args(**train_dpo.PRESETS["paper"] | models)
    for name, gib in plan.dpo_gib(args, use_vllm=True).items():
        assert gib < 0.9 * there, name

    args = train_rlver.Args(**train_rlver.PRESETS["rlver-think-ppo"] | {"model": llama_8b})
    parts = plan.policies_gib(args, use_vllm=True, has_reference=bool(args.beta))
    parts["critic"] = plan.critic_gib(llama_8b, args)
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
# Least memory of a card that is sold with so many GB, GiB: an A10G or L4 has 22.0, an RTX 3090 or 4090 23.6, an A100 79.1.
CARDS = {"24gb": 22.0, "80gb": 79.1}


@pytest.fixture(scope="module")
def small_models(tmp_path_factory, llama_8b) -> dict[str, str]:
    """Folders with the configs of the models that presets for one card train or score with."""
    folders = {"meta-llama/Llama-3.1-8B": llama_8b}
    for name, config in SMALL_MODELS.items():
        folders[name] = str(tmp_path_factory.mktemp("model"))
        config.save_pretrained(folders[name])
        assert plan.count_parameters(folders[name], AutoModelForCausalLM).whole == N_PARAMETERS[name]
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
        "reward": plan.trained_gib(small_models[reward.model], reward, AutoModelForSequenceClassification)
    }
    for model in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.2-1B"):
        values = {  # as experiments/1gpu.sh has them
            "24gb Qwen/Qwen2.5-0.5B": {},
            "24gb meta-llama/Llama-3.2-1B": {"optim": "adamw_8bit"},
        }.get(f"{card} {model}", train_sft_warmstart.PRESETS[card])
        args = train_sft_warmstart.Args(**values)
        runs.check_values(args)
        held[f"sft {model}"] = plan.trained_gib(small_models[model], args)

        args = train_grpo.Args(**train_grpo.PRESETS[card] | {"model": small_models[model]})
        args.reward_model = small_models[args.reward_model]
        parts = plan.rl_gib(args, {"preference": {}}, use_vllm=True, has_reference=True)
        assert set(parts) == {"policy", "reward model", "vLLM"}  # with LoRA no reference
        held[f"grpo {model}"] = sum(parts.values())
    assert max(held.values()) < 0.75 * there, held
