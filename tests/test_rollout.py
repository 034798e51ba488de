"""The hooks of rollout.py in TRL 1.16, its numbers against hand-worked and NumPy values, and vLLM's weights on the CPU."""

import dataclasses
import gc
import inspect
import itertools
import json
import math
import os
import statistics
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl.generation.vllm_generation as vllm_generation
import trl.trainer.utils as trl_utils
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import GRPOConfig, GRPOTrainer
from vllm.model_executor.model_loader.reload import layerwise

import rewards
import rollout
import train_grpo
import train_ppo
import training
import utils
from data.toy import world as toy_world

BASE = "data/toy/base"


@pytest.fixture(scope="module", autouse=True)
def leave_no_trace():
    """A vLLM engine in this process sets the variables of a distributed launch; the tests after these start without them."""
    yield
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.unfreeze()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def free_the_engine():
    """Each vLLM has a gigabyte of key-value cache, which two things keep: it freezes what the garbage collector would free, and
    its table of reloaded layers, weak in its keys, names them in its values. (One goes when the next trainer takes its hooks.)"""
    yield
    if layerwise.LAYERWISE_INFO:
        layerwise.LAYERWISE_INFO.clear()
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as the next one would, which takes a second


@pytest.fixture(scope="module")
def tokenizer():
    tok = AutoTokenizer.from_pretrained(BASE)
    utils.prepare_tokenizer(tok, "think")
    return tok


def tiny_config(tokenizer, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """Tiny random policies, tied and untied, and a reward model, as ordinary folders."""
    torch.manual_seed(0)
    made = {}
    for name, cls, tied in [
        ("tied", LlamaForCausalLM, True),
        ("untied", LlamaForCausalLM, False),
        ("reward", LlamaForSequenceClassification, True),
    ]:
        made[name] = str(tmp_path_factory.mktemp(name))
        cls(tiny_config(tokenizer, tied)).save_pretrained(made[name])
        tokenizer.save_pretrained(made[name])
    return made


def make_trainer(
    folders,
    tokenizer,
    run,
    policy="tied",
    on_bad_format="score",
    group_size=4,
    micro=4,
    accumulation=2,
    steps=2,
    lr=1e-2,
    allow_truncation=True,
    ahead=False,
    lora=None,
    **config,
):
    model = LlamaForCausalLM.from_pretrained(folders[policy])
    prompts = [
        {"id": i, "prompt": [{"role": "user", "content": text}]}
        for i, _, text, _ in toy_world.orders_of("rl", 16, 0)
    ]
    defaults = dict(
        output_dir=str(run),
        max_steps=steps,
        num_generations=group_size,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        max_completion_length=12,
        temperature=0.7,
        top_k=0,
        beta=0.04,
        use_bias_correction_kl=False,
        loss_type="dapo",
        learning_rate=lr,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        vllm_max_model_length=160,
        vllm_importance_sampling_correction=False,
        seed=3,
    )
    return rollout.RolloutTrainer(
        model=model,
        args=GRPOConfig(**{**defaults, **config}),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        reward_model=utils.RewardModel(folders["reward"], "response"),
        think_format="think",
        on_bad_format=on_bad_format,
        format_margin=1.0,
        run=run,
        max_logprob_gap=1e-3,
        ahead=ahead,
        allow_truncation=allow_truncation,
        peft_config=lora,
    )


# --- what we lean on


@pytest.mark.parametrize(
    "function, parameters",
    [
        (GRPOTrainer._generate_single_turn, ["prompt_ids", "images", "multimodal_fields", "num_generations"]),
        (GRPOTrainer._calculate_rewards, ["inputs", "prompts", "completions", "completion_ids_list"]),
        (GRPOTrainer._generate_and_score_completions, ["inputs"]),
        (
            GRPOTrainer._get_per_token_logps_and_entropies,
            ["model", "input_ids", "attention_mask", "logits_to_keep"],
        ),
        (GRPOTrainer._compute_loss, ["model", "inputs"]),
        (GRPOTrainer._get_train_sampler, ["dataset"]),
        (GRPOTrainer._tokenize_prompts, ["prompts"]),
        (GRPOTrainer.get_batch_samples, ["epoch_iterator", "num_batches", "device"]),
        (vllm_generation.VLLMGeneration.generate, ["prompts", "images", "num_generations"]),
        (vllm_generation.VLLMGeneration.sync_weights, []),
        (vllm_generation.VLLMGeneration._iter_named_params, []),
    ],
)
def test_trl_still_has_the_hooks(function, parameters):
    found = list(inspect.signature(function).parameters)[1 : 1 + len(parameters)]
    assert found == parameters, (
        f"TRL moved {function.__qualname__}: rollout.py overrides it; adapt it, or pin trl==1.16.0"
    )


def test_trl_still_calls_its_module_level_functions():
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "= shuffle_sequence_dict(" in source and "= split_tensor_dict(" in source
    assert "_use_triton(hidden_states.device)" in inspect.getsource(trl_utils.add_fused_lm_head)


def test_rollouts_start_from_the_prompt_ids_of_sft(folders, tokenizer, tmp_path):
    trainer = make_trainer(folders, tokenizer, tmp_path)
    prompts = [row["prompt"] for row in list(trainer.train_dataset)[:4]]
    assert trainer._tokenize_prompts(prompts)[0] == [utils.encode_prompt(tokenizer, p) for p in prompts]


# --- rewards and advantages


def test_floor_bad_by_hand():
    nan = math.nan
    rewards = torch.tensor([1.0, nan, 3.0, -2.0, nan, nan, nan, nan])
    assert rollout.floor_bad(rewards, 4, 0.5).tolist() == [1.0, -2.5, 3.0, -2.0, -0.5, -0.5, -0.5, -0.5]
    assert rollout.floor_bad(torch.tensor([2.0, nan]), 2, 1.0).tolist() == [2.0, 1.0]


def test_advantages_of_a_real_rollout_are_the_formula(folders, tokenizer, tmp_path):
    make_trainer(folders, tokenizer, tmp_path).train()
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {r["step"] for r in rows} == {1, 2}
    for start in range(0, 16, 4):
        group = rows[start : start + 4]
        assert len({r["id"] for r in group}) == 1
        r = np.array([x["reward"] for x in group])
        expected = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
        np.testing.assert_allclose([x["advantage"] for x in group], expected, rtol=1e-4, atol=1e-5)
        assert all(
            x["rewards"]["preference"] == pytest.approx(x["reward"]) for x in group
        )  # on_bad_format=score
    assert all(r["text"].startswith(r["thinking"]) or r["status"] != "plain" for r in rows)


def test_bad_format_gets_the_floor_and_no_reward_model_call(folders, tokenizer, tmp_path):
    trainer = make_trainer(folders, tokenizer, tmp_path, on_bad_format="floor", steps=1)
    trainer.train()  # a random policy never writes <think>
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {r["status"] for r in rows} <= {"no_open", "truncated"} and trainer.reward_model.n_scored == 0
    assert {r["reward"] for r in rows} == {-1.0} and {r["advantage"] for r in rows} == {0.0}


def test_a_reward_that_is_not_finite_stops_the_run(folders, tokenizer, tmp_path):
    trainer = make_trainer(folders, tokenizer, tmp_path)
    with torch.no_grad():
        trainer.reward_model.model.score.weight.fill_(math.nan)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(RuntimeError, match="the reward model gave nan for prompt"):
        trainer.train()
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


def test_answers_that_are_cut_off_stop_the_run(folders, tokenizer, tmp_path):
    with pytest.raises(RuntimeError, match="raise --max-completion-tokens"):
        make_trainer(
            folders, tokenizer, tmp_path, max_completion_length=2, steps=5, allow_truncation=False
        ).train()


def test_gold_must_be_a_number(folders, tokenizer, tmp_path):
    trainer = make_trainer(folders, tokenizer, tmp_path)
    trainer.gold = lambda messages, responses: [None] * len(responses)
    with pytest.raises(RuntimeError, match="--gold gave None"):
        trainer.train()


# --- forwards and loss


def padded_batch(tokenizer, lengths=((5, 3), (9, 12), (2, 7), (7, 1))):
    """Rows of (prompt, completion) tokens: left-padded prompts, right-padded completions, as TRL makes them."""
    rng = torch.Generator().manual_seed(1)
    p_max, c_max = max(p for p, _ in lengths), max(c for _, c in lengths)
    ids, mask = (
        torch.full((len(lengths), p_max + c_max), tokenizer.pad_token_id),
        torch.zeros(len(lengths), p_max + c_max),
    )
    for i, (p, c) in enumerate(lengths):
        ids[i, p_max - p : p_max + c] = torch.randint(10, 200, (p + c,), generator=rng)
        mask[i, p_max - p : p_max + c] = 1
    return ids, mask.long(), p_max, c_max


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3])
def test_trimmed_forwards_give_the_logprobs_of_the_stock_ones(folders, tokenizer, tmp_path, batch_size):
    trainer = make_trainer(folders, tokenizer, tmp_path)
    ids, mask, _, keep = padded_batch(tokenizer)
    ours = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, keep, batch_size, compute_entropy=True
    )
    stock = GRPOTrainer._get_per_token_logps_and_entropies(
        trainer.model and trainer, trainer.model, ids, mask, keep, compute_entropy=True
    )
    real = mask[:, -keep:].bool()
    for a, b in zip(ours[:2], stock[:2]):
        torch.testing.assert_close(a[real], b[real], rtol=1e-5, atol=1e-5)
    logits = trainer.model(ids, attention_mask=mask).logits / 0.7  # temperature of the rollout
    direct = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[:, -keep:, 0]
    torch.testing.assert_close(ours[0][real], direct[real], rtol=1e-4, atol=1e-4)


def numpy_loss(logp, old, ref, advantages, mask, beta, epsilon, epsilon_high, aggregate):
    """fp64 reference: clipped policy loss + beta * k3, aggregated over tokens (dapo), sequences (grpo) or a constant."""
    ratio = np.exp(logp - old)
    a = advantages[:, None]
    loss = -np.minimum(ratio * a, np.clip(ratio, 1 - epsilon, 1 + epsilon_high) * a)
    loss = loss + beta * (np.exp(ref - logp) - (ref - logp) - 1)
    if aggregate == "dapo":
        return (loss * mask).sum() / mask.sum()
    if aggregate == "grpo":
        return ((loss * mask).sum(1) / mask.sum(1)).mean()
    return (loss * mask).sum() / (len(logp) * 12)  # dr_grpo: max_completion_length of make_trainer


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("beta, high", [(0.04, 0.2), (0.3, 0.28)])
def test_loss_equals_numpy(folders, tokenizer, tmp_path, loss_type, beta, high):
    trainer = make_trainer(
        folders,
        tokenizer,
        tmp_path,
        micro=4,
        accumulation=1,
        loss_type=loss_type,
        beta=beta,
        epsilon_high=high,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    ids, mask, p_max, keep = padded_batch(tokenizer)
    logp = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, keep)[0].detach()
    rng = torch.Generator().manual_seed(2)
    old, ref = (logp + 0.5 * torch.randn(logp.shape, generator=rng) for _ in range(2))
    advantages = torch.tensor([1.5, -0.7, 0.2, -1.0])
    inputs = {
        "prompt_ids": ids[:, :p_max],
        "prompt_mask": mask[:, :p_max],
        "completion_ids": ids[:, p_max:],
        "completion_mask": mask[:, p_max:],
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask[:, p_max:].sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs).item()
    to64 = lambda x: x.double().numpy()
    expected = numpy_loss(
        to64(logp), to64(old), to64(ref), to64(advantages), to64(mask[:, p_max:]), beta, 0.2, high, loss_type
    )
    assert loss == pytest.approx(expected, rel=1e-5)


def test_padding_cannot_poison_the_loss(folders, tokenizer, tmp_path):
    """Old logprobs of -1e4 on padding columns: the loss stays finite and what it was."""
    trainer = make_trainer(folders, tokenizer, tmp_path, micro=4, accumulation=1)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    ids, mask, p_max, keep = padded_batch(tokenizer)
    logp = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, keep)[0].detach()
    losses = []
    for junk in (0.0, -50.0):
        old = torch.where(mask[:, p_max:].bool(), logp, torch.tensor(junk))
        inputs = {
            "prompt_ids": ids[:, :p_max],
            "prompt_mask": mask[:, :p_max],
            "completion_ids": ids[:, p_max:],
            "completion_mask": mask[:, p_max:],
            "advantages": torch.ones(4),
            "old_per_token_logps": old,
            "ref_per_token_logps": old,
            "num_items_in_batch": mask[:, p_max:].sum(),
        }
        losses.append(trainer._compute_loss(trainer.model, inputs).item())
    assert all(math.isfinite(x) for x in losses) and losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("n", [1, 3, 7, 8])
def test_even_chunks_are_the_best_cut(n):
    """Against all cuts of 8 rows into n chunks."""
    lengths = [90, 40, 40, 30, 12, 5, 5, 1]
    most = lambda sizes: max(size * lengths[sum(sizes[:i])] for i, size in enumerate(sizes))
    cuts = [
        [b - a for a, b in zip((0, *inner), (*inner, 8))]
        for inner in itertools.combinations(range(1, 8), n - 1)
    ]
    sizes = rollout.even_chunks(lengths, n)
    assert len(sizes) == n and sum(sizes) == 8 and min(sizes) > 0 and most(sizes) == min(map(most, cuts))


def test_even_chunks_of_equal_rows_are_equal():
    assert rollout.even_chunks([7] * 12, 4) == [3] * 4


@pytest.mark.parametrize(
    "by_tokens, updates, expected",
    [
        (True, 1, [[1, 4], [2, 3, 0, 5]]),
        (False, 1, [[1, 4, 2], [3, 0, 5]]),
        (True, 2, [[1, 2, 0], [4, 3, 5]]),
    ],
)
def test_a_rollout_is_split_by_length_within_each_update(by_tokens, updates, expected):
    lengths = torch.tensor([1, 9, 3, 2, 4, 1])
    mask = (torch.arange(9) < lengths[:, None]).long()
    batch = {
        "prompt_mask": torch.ones(6, 1, dtype=torch.long),
        "completion_mask": mask,
        "x": torch.arange(6),
        "num_items_in_batch": torch.tensor(20),
        "none": None,
    }
    out = rollout.split_rollout(batch, 2, updates, by_tokens)
    assert [part["x"].tolist() for part in out] == expected
    assert all(part["num_items_in_batch"] == 20 and part["none"] is None for part in out)
    assert [part["completion_mask"].sum(1).tolist() for part in out] == [
        lengths[part["x"]].tolist() for part in out
    ]


def test_micro_batches_have_as_many_rows_in_every_process():
    """TRL gathers a number for each row of a micro-batch; of unequal shapes that ends the run, or hangs."""
    lengths = torch.tensor([[9, 9, 9, 9, 9, 1], [7, 2, 2, 2, 1, 1], [8, 8, 1, 1, 1, 1]])
    shuffled, widest = lengths[:, [3, 5, 0, 1, 4, 2]], lambda _: lengths
    sizes = []
    for rank in shuffled:
        batch = {
            "prompt_mask": torch.zeros(6, 1).long(),
            "completion_mask": (torch.arange(9) < rank[:, None]).long(),
        }
        sizes.append(
            [len(part["completion_mask"]) for part in rollout.split_rollout(batch, 3, 1, True, widest)]
        )
    assert sizes == [[2, 2, 2]] * 3
    assert [
        len(part["x"]) for part in rollout.split_rollout({**batch, "x": torch.arange(6)}, 3, 1, True)
    ] == [1, 1, 4]


def test_no_reference_model_at_beta_zero(folders, tokenizer, tmp_path):
    assert make_trainer(folders, tokenizer, tmp_path, beta=0.0).ref_model is None
    assert make_trainer(folders, tokenizer, tmp_path, beta=0.04).ref_model is not None


# --- vLLM, for real, on the CPU


@pytest.mark.parametrize("policy", ["tied", "untied"])
def test_vllm_follows_the_trainer_and_a_skipped_sync_is_caught(folders, tokenizer, tmp_path, policy):
    """Four steps at a large learning rate stay within 1e-4 nat; after that one skipped sync stops the run at once."""
    trainer = make_trainer(folders, tokenizer, tmp_path, policy, steps=4, use_vllm=True, vllm_mode="colocate")
    trainer.train()
    metrics = [h for h in trainer.state.log_history if "sampling/logprob_gap" in h]
    assert len(metrics) == 4 and max(h["sampling/logprob_gap"] for h in metrics) < 1e-4
    prompts = [utils.encode_prompt(tokenizer, row["prompt"]) for row in list(trainer.train_dataset)[:4]]
    trainer._generate_single_turn(prompts, None, {}, 1)  # synced after the last update: passes
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1.05)
    with pytest.raises(
        RuntimeError, match="sampler and trainer disagree"
    ):  # same step: TRL does not sync again
        trainer._generate_single_turn(prompts, None, {}, 1)
    trainer._last_loaded_step = -1
    trainer._generate_single_turn(prompts, None, {}, 1)


def test_lora_reaches_vllm_and_leaves_the_base_weights_as_they_are(folders, tokenizer, tmp_path):
    """In bfloat16, where merging and subtracting again would change them."""
    trainer = make_trainer(
        folders,
        tokenizer,
        tmp_path,
        use_vllm=True,
        vllm_mode="colocate",
        lora=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    model = trainer.model.to(torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.02 * torch.randn_like(p) if "lora_B" in name else 0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    sent = dict(trainer.vllm_generation._iter_named_params())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    merged = model.merge_and_unload()
    assert sent.keys() == dict(merged.named_parameters()).keys()
    assert all(torch.allclose(sent[n], p, atol=2e-3, rtol=2e-2) for n, p in merged.named_parameters())
    assert (
        sum(
            not torch.equal(p, before[f"base_model.model.{n.removesuffix('.weight')}.base_layer.weight"])
            for n, p in sent.items()
            if "proj" in n
        )
        == 14
    )


def test_the_reward_model_scores_what_vllm_has_finished_while_it_samples_the_rest(
    folders, tokenizer, tmp_path
):
    trainer = make_trainer(
        folders, tokenizer, tmp_path, use_vllm=True, vllm_mode="colocate", micro=8, max_completion_length=40
    )
    score, calls, trainer.reward_model.tokens_per_batch = trainer.reward_model.score, [], 100

    def recorded(prompts, texts):
        calls.append((threading.current_thread() is threading.main_thread(), len(texts)))
        return score(prompts, texts)

    trainer.reward_model.score = recorded
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert sum(n for _, n in calls) == len(rows) == 32
    assert sum(n for in_main, n in calls if not in_main) >= 16
    alone = [score([r["messages"]], [r["text"]])[0] for r in rows]
    assert [r["rewards"]["preference"] for r in rows] == pytest.approx(alone, abs=1e-6)


def test_asynchronous_rollouts_are_one_update_behind(folders, tokenizer, tmp_path):
    """The first two rollouts are of the policy at the start, whatever was learned from the first; the third is not."""
    texts = {}
    for lr in (0.0, 1e-2):
        trainer = make_trainer(
            folders,
            tokenizer,
            tmp_path / str(lr),
            use_vllm=True,
            vllm_mode="colocate",
            steps=4,
            lr=lr,
            ahead=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode="token_truncate",
        )
        trainer.train()
        rows = [
            json.loads(line) for line in (tmp_path / str(lr) / "completions.jsonl").read_text().splitlines()
        ]
        texts[lr] = [[r["text"] for r in rows if r["step"] == step] for step in (1, 2, 3, 4)]
        logged = [h for h in trainer.state.log_history if "loss" in h]
        assert len(logged) == 4 and all(
            h["sampling/logprob_gap"] < 1e-4 for h in logged[:3]
        )  # the fourth begins no other
        moved = [h["sampling/sampling_logp_difference/mean"] for h in logged]
        assert moved[0] < 1e-4 and all(m < 1e-4 if lr == 0 else m > 1e-3 for m in moved[1:]), moved
        assert trainer._pending is None  # nothing was sampled for a step that is not made
    assert texts[0.0][:2] == texts[1e-2][:2] and texts[0.0][2] != texts[1e-2][2]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_importance_ratio_is_one_for_equal_weights(folders, tokenizer, tmp_path, temperature):
    trainer = make_trainer(
        folders,
        tokenizer,
        tmp_path,
        steps=1,
        use_vllm=True,
        vllm_mode="colocate",
        temperature=temperature,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
    )
    trainer.train()
    log = next(h for h in trainer.state.log_history if "sampling/importance_sampling_ratio/mean" in h)
    assert log["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-4)
    assert log["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)


def test_end_at_cuts_after_the_closing_tag(tokenizer):
    ids = tokenizer("<response> Remember the ice! </response> Remember the cards!")["input_ids"]
    cut = rollout.end_at(ids, "</response>", tokenizer)
    assert tokenizer.decode(cut) == "<response> Remember the ice! </response>" and cut == ids[: len(cut)]
    assert rollout.end_at(ids[:4], "</response>", tokenizer) == ids[:4]


# --- rewards beside the preference


def test_fill_missing_by_hand():
    rewards, missing = (
        torch.tensor([1.0, 0.0, 3.0, math.nan, 0.0, 0.0]),
        torch.tensor([False, True, False, False, True, True]),
    )
    filled = rollout.fill_missing(rewards, missing, 3)
    assert filled[:3].tolist() == [1.0, 2.0, 3.0] and filled[3].isnan() and filled[4:].tolist() == [0.0, 0.0]
    assert rollout.fill_missing(torch.tensor([0.0, 5.0]), torch.tensor([True, False]), 2).tolist() == [
        5.0,
        5.0,
    ]


def totals(values, statuses, group_size, compose=None, on_bad_format="floor"):
    """rewards and `missing` of rows as RolloutTrainer gives them."""
    trainer = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        num_generations=group_size,
        compose=compose,
        pass_at_k=0,
        on_bad_format=on_bad_format,
        format_margin=1.0,
    )
    rows = [{"id": 0, "status": s, "rewards": {"preference": v}} for v, s in zip(values, statuses)]
    rows, rewards = rollout.RolloutTrainer._total(trainer, rows)
    return rewards.tolist(), [row["missing"] for row in rows]


def test_a_missing_reward_has_no_advantage_beside_a_floor():
    """Five marks of 0.9, two floors at -0.1, and one that nobody knows: it gets the mean of the seven."""
    rewards, missing = totals([0.9] * 5 + [None, None, None], ["ok"] * 5 + ["no_close", "no_close", "ok"], 8)
    assert rewards[:7] == pytest.approx([0.9] * 5 + [-0.1] * 2) and missing == [False] * 7 + [True]
    assert rewards[7] == pytest.approx(sum(rewards) / 8)
    assert totals([None, None], ["no_close", "ok"], 2) == ([-1.0, -1.0], [False, True])
    assert totals([None, None], ["ok", "ok"], 2) == ([0.0, 0.0], [True, True])


def test_gates_and_norms_of_ppo_compare_within_the_step(folders, tmp_path):
    """One completion a prompt: a gate's floor is below all others of the step."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": 0, "messages": [{"role": "user", "content": "Q"}]}) + "\n")
    scores, statuses = [-12.0, -15.0, -9.0, -10.0], ["ok", "no_close", "ok", "ok"]
    args = train_ppo.Args(prompts=str(path), rewards=("preference:1", "format:gate"), format_margin=2.0)
    assert totals(scores, statuses, 1, rewards.load(args, tmp_path), "score")[0] == [
        -12.0,
        -14.0,
        -9.0,
        -10.0,
    ]
    args = train_ppo.Args(prompts=str(path), rewards=("preference:1",), normalise="batch")
    normal = totals(scores, ["ok"] * 4, 1, rewards.load(args, tmp_path), "score")[0]
    assert normal == pytest.approx([(s + 11.5) / statistics.stdev(scores) for s in scores], abs=1e-6)


def options(path, *words, **others):
    """The arguments of train_grpo.py that rewards.load reads."""
    return train_grpo.Args(prompts=str(path), rewards=words, max_completion_tokens=12, group_size=4, **others)


def test_cosine_knows_what_is_right_wherever_it_stands(tmp_path):
    """A prompt with an answer, and one that no verifier is for, to which cosine adds nothing."""
    path = tmp_path / "prompts.jsonl"
    asked = {"messages": [{"role": "user", "content": "1 + 2?"}]}
    path.write_text(
        json.dumps({"id": "m", "answer": "3"} | asked) + "\n" + json.dumps({"id": "p"} | asked) + "\n"
    )
    row = lambda name, text: {
        "id": name,
        "response": text,
        "text": text,
        "status": "ok",
        "n_tokens": 12,
        "rewards": {"preference": 2.0},
    }
    rows = [row("m", "3"), row("m", "4"), row("m", "3"), row("m", "4")] + [row("p", "3")] * 4
    for words in (("cosine:1", "math:1", "preference:1"), ("preference:1", "math:1", "cosine:1")):
        assert rewards.load(options(path, *words), tmp_path)(rows, 4).totals == pytest.approx(
            [3.5, 1.5, 3.5, 1.5] + [2.0] * 4
        )


def test_composed_rewards_are_logged_by_name_and_add_up(folders, tokenizer, tmp_path):
    """length is made of numbers of tokens; math has an answer on every second prompt and no value elsewhere."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": i, "messages": [{"role": "user", "content": t}]} | ({"answer": "3"} if n % 2 else {})
        for n, (i, _, t, _) in enumerate(toy_world.orders_of("rl", 16, 0))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = make_trainer(folders, tokenizer, tmp_path)
    trainer.compose = rewards.load(
        options(
            path, "preference:0.5", "length:2", "math:1", "overlong:soft", reward_args=("overlong.buffer=6",)
        ),
        tmp_path,
    )
    trainer.entropies = True
    trainer.train()
    logged = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(logged) == 16
    for start in range(0, 16, 4):
        group = logged[start : start + 4]
        n = [row["n_tokens"] for row in group]
        for row in group:
            assert (
                row["reward"] == pytest.approx(sum(row["contributions"].values()), abs=1e-5)
                and not row["missing"]
            )
            assert row["contributions"]["preference"] == pytest.approx(0.5 * row["rewards"]["preference"])
            spread = max(n) - min(n)
            assert row["rewards"]["length"] == pytest.approx(
                0.5 - (row["n_tokens"] - min(n)) / spread if spread else 0.0
            )
            assert row["contributions"]["length"] == pytest.approx(2 * row["rewards"]["length"])
            assert row["rewards"]["overlong"] == pytest.approx(max(-1, min(0, (6 - row["n_tokens"]) / 6)))
            assert 0 < row["mean_entropy"] <= math.log(len(tokenizer)) and row["mean_kl_uniform"] > 0
        r = np.array([row["reward"] for row in group])
        np.testing.assert_allclose(
            [row["advantage"] for row in group], (r - r.mean()) / (r.std(ddof=1) + 1e-4), rtol=1e-3, atol=1e-4
        )
    metrics = trainer.state.log_history[0]
    assert {"reward/length", "reward/overlong", "contribution/length", "reward/missing"} <= metrics.keys()


def test_entropy_is_that_of_the_policy(folders, tokenizer, tmp_path):
    trainer = make_trainer(folders, tokenizer, tmp_path)
    messages, ids = [{"role": "user", "content": "Hello!"}], [20, 30, 40]
    got = trainer._entropies([messages], [ids])[0]
    whole = utils.encode_prompt(tokenizer, messages) + ids
    p = (trainer.model(torch.tensor([whole])).logits[0, -4:-1] / 0.7).softmax(-1)
    assert got["mean_entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-4)
    uniform = torch.full_like(p, 1 / p.size(-1))
    assert got["mean_kl_uniform"] == pytest.approx(
        (uniform * (uniform.log() - p.log())).sum(-1).mean().item(), rel=1e-4
    )


def test_a_failed_judge_teaches_nothing(folders, tokenizer, tmp_path):
    """Every second completion has no value: its reward is its group's mean, its advantage 0."""
    trainer = make_trainer(folders, tokenizer, tmp_path, steps=1)

    def compose(rows, group_size):
        values = [None if i % 2 else float(i) for i in range(len(rows))]
        return rewards.Scores(values, {"judge": values}, {"judge": values}, values, {})

    trainer.compose = compose
    trainer.train()
    logged = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [row["missing"] for row in logged] == [False, True] * 4
    assert [row["reward"] for row in logged] == [0, 1, 2, 1, 4, 5, 6, 5]
    assert all(abs(row["advantage"]) < 1e-6 for row in logged[1::2]) and all(
        abs(row["advantage"]) > 0.5 for row in logged[::2]
    )
    assert trainer.state.log_history[0]["reward/missing"] == 0.5


def test_dynamic_sampling_replaces_groups_without_a_signal(folders, tokenizer, tmp_path):
    """The reward of every second prompt is the same for all completions; one of the four prompts a step asks must be another."""
    dull = {f"toy-rl-{i:05d}" for i in range(0, 16, 2)}

    def compose(rows, group_size):
        values = [
            0.0 if row["id"] in dull else float(row["n_tokens"] + i % group_size)
            for i, row in enumerate(rows)
        ]
        return rewards.Scores(values, {"own": values}, {"own": values}, values, {})

    asked = {}
    for attempts in (0, 20):
        (tmp_path / str(attempts)).mkdir()
        trainer = make_trainer(folders, tokenizer, tmp_path / str(attempts), steps=3)
        trainer.compose, trainer.attempts = compose, attempts
        trainer.train()
        logged = [
            json.loads(line)
            for line in (tmp_path / str(attempts) / "completions.jsonl").read_text().splitlines()
        ]
        assert len(logged) == 24 and all(
            len({r["id"] for r in logged[i : i + 4]}) == 1 for i in range(0, 24, 4)
        )
        asked[attempts] = [row["id"] for row in logged[::4]]
        std = [np.std([r["reward"] for r in logged[i : i + 4]]) for i in range(0, 24, 4)]
        assert [s > 0 for s in std] == [i not in dull for i in asked[attempts]]
    assert set(asked[0]) & dull and not set(asked[20]) & dull
    kept = [a for a, b in zip(asked[0], asked[20]) if a == b]
    assert kept == [i for i in asked[0] if i not in dull]  # groups with a signal stay as they were


def test_forwards_and_steps_are_those_of_every_process(folders, tokenizer, tmp_path):
    """Sharded weights are gathered in every forward: of the check of vLLM's logprobs there are four, however few rows there
    are. A step of completions.jsonl is one of metrics.jsonl, also with several updates a rollout."""
    trainer = make_trainer(folders, tokenizer, tmp_path, steps=4, steps_per_generation=4, logging_steps=2)
    prompts, forwards = (
        [utils.encode_prompt(tokenizer, row["prompt"]) for row in list(trainer.train_dataset)[:5]],
        [],
    )
    for n in (1, 2, 5):
        forwards.clear()
        hook = trainer.model.register_forward_pre_hook(lambda *_: forwards.append(1))
        trainer.max_logprob_gap = math.inf
        trainer._check_sampler(prompts[:n], [[5, 6, 7]] * n, [[0.0] * 3] * n)
        hook.remove()
        assert len(forwards) == 4
    trainer.train()
    metrics = [h for h in trainer.state.log_history if "loss" in h]
    logged = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [h["step"] for h in metrics] == [2, 4] == sorted({row["step"] for row in logged})


def test_a_run_without_one_completion_in_its_format_ends_after_three_steps(folders, tokenizer, tmp_path):
    """Random weights never think in tags; --allow-truncation goes on."""
    trainer = make_trainer(folders, tokenizer, tmp_path, steps=4, allow_truncation=False)
    trainer._steps_cut_off = -1  # these are cut off as well, which has an error of its own
    with pytest.raises(
        RuntimeError, match="no completion of the first three steps had the format '<think> z </think> y'"
    ):
        trainer.train()
    assert trainer.state.global_step == 2
    make_trainer(folders, tokenizer, tmp_path, steps=4).train()


def test_the_order_of_an_epoch_follows_from_its_number(folders, tokenizer, tmp_path):
    """A sampler that starts in the second epoch, as after a resume, gives what one gives that had the first before."""
    whole, resumed = (make_trainer(folders, tokenizer, tmp_path)._get_train_sampler() for _ in "ab")
    whole.set_epoch(0)
    first = list(whole)
    whole.set_epoch(1)
    resumed.set_epoch(1)
    second = list(whole)
    assert second == list(resumed) != first and sorted(second) == sorted(first)


def test_a_collapsed_reward_ends_the_run(folders, tokenizer, tmp_path):
    """Ten steps in a row, of which a log that was there before, as after a resume, counts four."""
    trainer = make_trainer(folders, tokenizer, tmp_path, steps=12)
    trainer.add_callback(training.RunLogger(tmp_path, {}, "think"))
    lines = [{"step": n, "collapse/agreement": 0.5 if n == 1 else 1.0} for n in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def compose(rows, group_size):
        values = [float(row["n_tokens"]) for row in rows]
        return rewards.Scores(values, {"majority": values}, {"majority": values}, values, {"agreement": 1.0})

    trainer.compose = compose
    trainer.train()
    assert (
        trainer.stopped == "collapsed: agreement of 0.99 or more in 10 steps"
        and trainer.state.global_step == 6
    )


@pytest.mark.parametrize(
    "words, others, message",
    [
        (["math:1"], {}, "has the field 'answer'"),
        (["judge_mark:1"], {}, "give --judge"),
        (["cosine:1"], {}, "needs to know what is right"),
        (["nonsense:1"], {}, "no reward 'nonsense'"),
        (["majority:1", "preference:1"], {"group_size": 1}, "PPO has one of each"),
    ],
)
def test_rewards_that_cannot_be_had_are_said_first(words, others, message, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"id": "1", "messages": [{"role": "user", "content": "Hi"}]}) + "\n"
    )
    with pytest.raises(SystemExit) as e:
        rewards.check(dataclasses.replace(options(tmp_path / "p.jsonl", *words), **others))
    assert e.value.code == 2 and message in capsys.readouterr().err
    assert rewards.load(train_grpo.Args(), tmp_path) is None  # the preference alone needs nothing of this


@pytest.mark.parametrize(
    "words",
    [
        ["--judge", "m"],
        ["--budget", "1"],
    ],
)
def test_flags_that_would_do_nothing_are_refused(words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_grpo.py", *words])
    with pytest.raises(SystemExit) as e:
        rewards.check(train_grpo.Args())
    assert (
        e.value.code == 2 and f"{words[0].partition('=')[0]} does nothing without" in capsys.readouterr().err
    )
