"""train_grpo.py: its pure functions by hand and against naive loops, its loss against TRL's, the script on
the toy."""

import importlib.util
import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import grpo_updates
from launch import FSDP2, finished
from script_runs import killed_after, metrics_of, run_here, run_vllm_here, weights_of, write_prompts
from transformers import AutoModelForCausalLM

from trl import GRPOConfig, GRPOTrainer

from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import data as rows
from rlmt import chat as templates
import train_grpo
from data.toy import world
from rewards.scorer import Scorer
from rewards.unsupervised import Collapse
from rlmt import data as rlmt_data
from rlmt import chat
from rlmt import run as rlmt_run

ROOT = Path(__file__).parents[2]
NAN = math.nan


# --- advantages


def naive_advantages(rewards: list[list[float]], scale: str) -> list[list[float]]:
    every = [r for group in rewards for r in group if not math.isnan(r)]
    result = []
    for group in rewards:
        known = [r for r in group if not math.isnan(r)]
        mean = sum(known) / max(1, len(known))
        of_group = math.sqrt(sum((r - mean) ** 2 for r in known) / max(1, len(known) - 1))
        all_mean = sum(every) / len(every)
        of_batch = math.sqrt(sum((r - all_mean) ** 2 for r in every) / (len(every) - 1))
        divisor = {"group": of_group + 1e-4, "batch": of_batch + 1e-4, "none": 1.0}[scale]
        result.append([0.0 if math.isnan(r) else (r - mean) / divisor for r in group])
    return result


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_a_loop(scale):
    rewards = [
        [1.0, 2.0, 4.0, 4.0],
        [0.5, 0.5, 0.5, 0.5],
        [NAN, 1.0, 3.0, NAN],
        [NAN, NAN, NAN, NAN],
        [NAN, 7.0, NAN, NAN],
    ]
    found = train_grpo.group_advantages(torch.tensor(rewards, dtype=torch.float64), scale)
    torch.testing.assert_close(found, torch.tensor(naive_advantages(rewards, scale), dtype=torch.float64))


def test_advantages_by_hand():
    found = train_grpo.group_advantages(torch.tensor([[0.0, 1.0]]))
    assert found.tolist() == [[pytest.approx(-0.7070, abs=1e-4), pytest.approx(0.7070, abs=1e-4)]]
    # a missing reward counts in neither mean nor standard deviation: the others' are those of a group of two
    with_missing = train_grpo.group_advantages(torch.tensor([[0.0, 1.0, NAN, NAN]]))
    assert with_missing[0, :2].tolist() == found[0].tolist() and with_missing[0, 2:].tolist() == [0.0, 0.0]
    # the only reward of a step has no spread
    assert train_grpo.group_advantages(torch.tensor([[NAN, 7.0]]), "batch").tolist() == [[0.0, 0.0]]


def test_pass_at_k_leaves_out_completions_without_a_reward():
    rewards_P_G = torch.tensor([[1.0, 0.0, 0.0, 0.0], [NAN, 0.0, 0.0, 0.0], [1.0, 0.0, NAN, 0.0]])
    verdicts = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, None]
    found = train_grpo.pass_at_k_advantages(verdicts, rewards_P_G, 2)
    # 4 completions, 1 right: rho = 1 - 3/6, sigma = 1/2; right: 1, wrong: (1 - 1/2 - 2/3) * 2
    torch.testing.assert_close(found[0], torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))
    # the right one has no reward, so that the others are 3 wrong ones
    assert found[1].tolist() == [0.0] * 4
    # two count, 1 right: every pair has it
    assert found[2].tolist() == [0.0] * 4

    of_two = train_grpo.pass_at_k_advantages([1.0, 0.0, 1.0], torch.tensor([[1.0, 0.0, NAN]]), 1)
    torch.testing.assert_close(of_two, torch.tensor([[1.0, -1.0, 0.0]]))  # rho = sigma = 1/2


def test_flat_groups():
    rewards = torch.tensor([[1.0, 1.04], [1.0, 1.06], [NAN, 5.0], [NAN, NAN]])
    assert train_grpo.is_flat(rewards).tolist() == [True, False, True, True]


# --- the loss


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    """A real GRPOTrainer, whose _compute_loss is asked about our tensors."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    config = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=9,
        use_cpu=True,
        bf16=False,
        report_to=[],
        use_bias_correction_kl=False,
        temperature=0.9,
        gradient_checkpointing=False,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained("data/toy/base", dtype="float32"),
        args=config,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        processing_class=AutoTokenizer.from_pretrained("data/toy/base"),
    )


def random_batch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [1] * 7 + [0] * 2, [1] + [0] * 8])

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(4, 9, generator=generator, dtype=dtype)

    logprobs = -noise(1.0).abs() * mask
    return {
        "logprobs": logprobs,
        "old": (logprobs + noise(0.3)) * mask,
        "reference": (logprobs + noise(0.5)) * mask,
        "importance": noise(0.2).exp(),
        "advantages": noise(1.0),
        "mask": mask,
    }


CASES = [
    ("dapo", 0.2, 0.0, 0.0),
    ("dapo", 0.28, 0.04, 0.0),
    ("dapo", 0.2, 0.04, 0.1),
    ("grpo", 0.2, 0.04, 0.0),
    ("gspo", 0.2, 0.04, 0.0),
    ("dr_grpo", 0.28, 0.04, 0.0),
    ("cispo", train_grpo.CISPO_CAP, 0.04, 0.0),
]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("loss_type, epsilon_high, beta, entropy_coef", CASES)
@pytest.mark.parametrize("corrected", [False, True])
def test_loss_and_gradient_are_trls(
    trl_trainer, loss_type, epsilon_high, beta, entropy_coef, corrected, dtype, tolerance
):
    batch = random_batch(dtype)
    mask = batch["mask"]
    entropy_weight = torch.randn(4, 9, generator=torch.Generator().manual_seed(1), dtype=dtype)

    ours = batch["logprobs"].clone().requires_grad_()
    n_tokens = mask.sum().item()
    weights = train_grpo.mean_weights(mask, loss_type, n_tokens, 4, 9)
    loss, _ = train_grpo.grpo_loss(
        ours,
        batch["old"],
        batch["reference"] if beta else None,
        batch["advantages"],
        mask,
        weights,
        batch["importance"] if corrected else 1.0,
        epsilon=(0.2, epsilon_high),
        beta=beta,
        loss_type=loss_type,
    )
    # the entropy of this test is a function of the log-probabilities, so that it has a gradient
    loss = loss - entropy_coef * (entropy_weight * ours * mask).sum() / n_tokens
    loss.backward()

    theirs = batch["logprobs"].clone().requires_grad_()
    trainer = trl_trainer
    trainer.loss_type = "grpo" if loss_type == "gspo" else loss_type
    trainer.importance_sampling_level = "sequence" if loss_type == "gspo" else "token"
    trainer.epsilon_low = 0.2
    trainer.epsilon_high = epsilon_high
    trainer.beta = beta
    trainer.entropy_coef = entropy_coef
    trainer._entropy_bonus_enabled = bool(entropy_coef)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = corrected
    trainer.max_completion_length = 9
    trainer.current_gradient_accumulation_steps = 1
    trainer.args.steps_per_generation = 1
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (theirs, entropy_weight * theirs, None)
    inputs = {
        "prompt_ids": torch.ones(4, 2, dtype=torch.long),
        "prompt_mask": torch.ones(4, 2, dtype=torch.long),
        "completion_ids": torch.ones(4, 9, dtype=torch.long),
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "importance_sampling_ratio": batch["importance"],
        "num_items_in_batch": mask.sum(),
    }
    expected = trainer._compute_loss(trainer.model.train(), inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


def test_a_name_without_a_branch_is_no_other_name():
    """As that of a new advantage or loss, which is in the Literal already."""
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="rloo has no branch in group_advantages"):
        train_grpo.group_advantages(ones, "rloo")
    with pytest.raises(ValueError, match="soft has no branch in mean_weights"):
        train_grpo.mean_weights(ones, "soft", 2, 1, 2)


def test_cispo_cuts_weights_above_its_cap_alone():
    logprobs = torch.tensor([[6.0, 2.0, 0.1, 6.0]]).log()  # ratios; the cap is 5
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    mask = torch.ones(1, 4)
    loss, sums = train_grpo.grpo_loss(
        logprobs,
        torch.zeros(1, 4),
        None,
        advantages,
        mask,
        mask,
        epsilon=(0.2, 0.2),
        beta=0.0,
        loss_type="cispo",
    )
    weighted = [5 * math.log(6), 2 * math.log(2), -0.1 * math.log(0.1), -5 * math.log(6)]
    assert loss.item() == pytest.approx(-sum(weighted), rel=1e-5)
    assert sums["clip_ratio/low_mean"] == 0
    assert sums["clip_ratio/high_mean"] == 1


def test_the_ratio_is_clipped_by_hand():
    logprobs = torch.tensor([[2.0, 0.5, 2.0, 0.5, 0.4]]).log()  # ratios, as the old log-probabilities are 0
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0]])
    mask = torch.ones(1, 5)
    loss, sums = train_grpo.grpo_loss(
        logprobs, torch.zeros(1, 5), None, advantages, mask, mask, epsilon=(0.2, 0.5), beta=0.0
    )
    # min(2, 1.5) + min(0.5, 0.8) + min(-2, -1.5) + min(-0.5, -0.8) + min(-0.4, -0.8)
    assert loss.item() == pytest.approx(-(1.5 + 0.5 - 2.0 - 0.8 - 0.8))
    assert {name: value.item() for name, value in sums.items()} == {
        "clip_ratio/low_mean": 2.0,
        "clip_ratio/high_mean": 1.0,
        "clip_ratio/region_mean": 3.0,
    }


def test_k3_by_hand():
    zeros = torch.zeros(1, 1)
    one = torch.ones(1, 1)
    reference_logprobs = torch.full((1, 1), math.log(3.0))
    loss, sums = train_grpo.grpo_loss(
        zeros, zeros, reference_logprobs, zeros, one, one, epsilon=(0.2, 0.2), beta=2.0
    )
    assert sums["kl"].item() == pytest.approx(3.0 - math.log(3.0) - 1.0)
    assert loss.item() == pytest.approx(2.0 * sums["kl"].item())


def test_the_released_loss_is_a_mean_over_completions_by_hand():
    token_losses = torch.tensor([[8.0, 0.0, 0.0], [3.0, 6.0, 9.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    # released: the mean over tokens of each micro-batch, which is one completion; of these the mean
    released = (8.0 + (3.0 + 6.0 + 9.0) / 3) / 2
    over_tokens = (8.0 + 3.0 + 6.0 + 9.0) / 4
    assert (released, over_tokens) == (7.0, 6.5)
    for loss_type, expected in (("grpo", released), ("dapo", over_tokens)):
        weights = train_grpo.mean_weights(mask, loss_type, 4, 2, 9)
        assert (token_losses * weights).sum().item() == pytest.approx(expected, rel=1e-6)


def test_the_gradient_as_released_is_that_of_single_completions_averaged():
    """Policy loss, KL and entropy bonus, in micro-batches of several completions, against a loop over
    completions."""
    released = train_grpo.RELEASED
    args = train_grpo.Args(
        loss_type=released["loss_type"],
        entropy_coef=0.1,
        beta=0.1,
        micro_batch_tokens=300,
        importance_correction="token_truncate",
    )
    accelerator = policy.start_accelerator()
    torch.manual_seed(0)
    model = policy.Policy(
        policy.load_trained("data/toy/base", rlmt_run.RunArgs(gradient_checkpointing=False)), 0.9
    )
    reference = policy.load_reference("data/toy/base", 0.9, accelerator)
    for weight in model.parameters():  # away from the reference, so that the KL has a gradient
        weight.data += 0.02 * torch.randn_like(weight)
    completions = grpo_updates.stored_completions(6, 1)[0]
    assert 1 < len(policy.micro_batches(completions, args.micro_batch_tokens)) < len(completions)
    policy.set_old_logprobs(model, completions, 300, 0, accelerator)
    for completion in completions:  # a sampler that differs by up to a nat
        completion.sampler_logprobs = [one - torch.randn(1).item() for one in completion.old_logprobs]

    train_grpo.accumulate_gradients(completions, model, reference, args, 0, accelerator)
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    for completion in completions:
        batch = policy.collate([completion], 0, accelerator.device)
        inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        logprobs, entropies = model(*inputs, entropy_gradient=True)
        gap = policy.compute_reference_logprobs(model, reference, inputs) - logprobs
        ratio = (logprobs - logprobs.detach()).exp()
        weights = (logprobs.detach() - torch.tensor(completion.sampler_logprobs)).exp().clamp(max=3.0)
        token_losses = -ratio * weights * batch["advantages"] + 0.1 * (gap.exp() - gap - 1) - 0.1 * entropies
        (token_losses.mean() / len(completions)).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-6, msg=name)


# --- micro-batches and processes


def completion(n_prompt: int, n_completion: int) -> SimpleNamespace:
    return SimpleNamespace(prompt_ids=[0] * n_prompt, ids=[0] * n_completion)


def test_micro_batches_hold_about_equally_many_tokens():
    completions = [completion(10, n) for n in (5, 90, 20, 20, 20, 40, 1)]
    batches = policy.micro_batches(completions, 100)
    assert [[len(c.ids) for c in batch] for batch in batches] == [[90], [40, 20], [20, 20, 5, 1]] or all(
        len(batch) * (10 + len(batch[0].ids)) <= 100 for batch in batches
    )
    assert sorted(len(c.ids) for batch in batches for c in batch) == [1, 5, 20, 20, 20, 40, 90]
    assert policy.micro_batches([completion(10, 500)], 100)[0][0].ids == [0] * 500  # too long: alone


# --- the script


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 10)


# two steps an epoch of 10 prompts; the base model has no format, so its text is scored as it is
TINY = [
    *[
        "--preset",
        "toy",
        "--model",
        "data/toy/base",
        "--steps",
        "4",
        "--prompts-per-step",
        "4",
        "--group-size",
        "4",
    ],
    *["--max-completion-tokens", "24", "--on-bad-format", "score", "--save-steps", "1"],
]


def start(launcher: list[str], prompts: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        *launcher,
        "train_grpo.py",
        *TINY,
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        *more,
    ]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("held_out") / "held_out.jsonl"
    _, _, text, _ = next(world.orders_of("test", 1, 0))
    path.write_text(json.dumps({"id": "h", "messages": [{"role": "user", "content": text}]}) + "\n")
    return path


LORA = ["--rollout", "vllm", "--lora-r", "4", "--learning-rate", "1e-2"]


def check_same_bits(whole: Path, broken: Path) -> None:
    expected = weights_of(whole / "model")
    found = weights_of(broken / "model")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert rlmt_data.read_log(broken / "completions.jsonl") == rlmt_data.read_log(whole / "completions.jsonl")
    assert metrics_of(broken) == metrics_of(whole)


def test_a_killed_run_ends_with_the_same_bits(prompts, held_out, tmp_path, capfd):
    """With LoRA, vLLM and held-out prompts; killed in the second epoch."""
    more = [*LORA, "--gold-prompts", str(held_out)]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_vllm_here(start([], prompts, whole, *more))
    killed_after(3, whole, broken)
    shutil.rmtree(broken / "adapter")
    capfd.readouterr()
    run_vllm_here(start([], prompts, broken, *more, "--resume"))
    assert "resumes from" in capfd.readouterr().out

    check_same_bits(whole, broken)
    gaps = [row["sampling/logprob_gap"] for row in rlmt_data.read_log(broken / "metrics.jsonl")]
    assert max(gaps) < 1e-4
    measured = rlmt_data.read_log(broken / "held_out.jsonl")
    assert measured == rlmt_data.read_log(whole / "held_out.jsonl")
    assert [row["step"] for row in measured] == [0, 1, 2, 3, 4] and {row["n"] for row in measured} == {1}
    assert (broken / "best_by_gold" / "think_format.json").exists()
    assert (broken / "adapter" / "adapter_model.safetensors").exists()


def test_two_processes_resume_with_the_same_bits(prompts, tmp_path):
    """Weights and optimizer are sharded."""
    more = ["--steps", "2"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finished(start(FSDP2, prompts, whole, *more))
    killed_after(1, whole, broken)
    assert "resumes from" in finished(start(FSDP2, prompts, broken, *more, "--resume"))
    check_same_bits(whole, broken)
    assert max(row["sampling/logprob_gap"] for row in rlmt_data.read_log(broken / "metrics.jsonl")) < 1e-4


def test_a_run_in_bfloat16(prompts, tmp_path):
    """Its sampler is vLLM; weights and Adam's moments in its files are float32."""
    run = tmp_path / "run"
    run_vllm_here(start([], prompts, run, "--steps", "2", "--dtype", "bfloat16", "--rollout", "vllm"))
    for metrics in rlmt_data.read_log(run / "metrics.jsonl"):
        assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
        assert 0 < metrics["sampling/logprob_gap"] < rollout.MAX_LOGPROB_GAP["bfloat16"]
    assert (
        rlmt_data.read_log(run / "metrics.jsonl")[0]["kl"] == 0
    )  # the reference computes as the policy does
    assert {weight.dtype for weight in weights_of(run / "model").values()} == {torch.float32}
    states = torch.load(run / "checkpoint-2" / "model-optimizer-rank0.pt", weights_only=True)
    assert {state["exp_avg"].dtype for state in states["state"].values()} == {torch.float32}
    assert json.loads((run / "config.json").read_text())["args"]["dtype"] == "bfloat16"


def test_what_a_run_writes_and_training_on(prompts, tmp_path, capsys):
    run = tmp_path / "run"
    run_here(start([], prompts, run, "--steps", "2"))
    config = json.loads((run / "config.json").read_text())
    assert config["args"]["steps"] == 2 and config["constants"]["MAX_GRAD_NORM"] == 1.0
    rows = rlmt_data.read_log(run / "completions.jsonl")
    assert len(rows) == 2 * 4 * 4
    assert rows[0].keys() >= {
        *[
            "step",
            "id",
            "messages",
            "text",
            "thinking",
            "response",
            "status",
            "rewards",
            "reward",
            "advantage",
        ],
        *["n_tokens", "n_thinking_tokens"],
    }
    for metrics in rlmt_data.read_log(run / "metrics.jsonl"):
        for name in (
            "loss",
            "grad_norm",
            "reward",
            "reward_std",
            "kl",
            "entropy",
            "think/format_ok",
            "num_tokens",
        ):
            assert math.isfinite(metrics[name])
        parts = [metrics[f"time/{part}"] for part in ("rollout", "reward", "advantage", "update", "other")]
        assert sum(parts) == pytest.approx(metrics["step_time"])
    assert (run / "model" / "think_format.json").exists() and (run / "summary.json").exists()
    reloaded = AutoModelForCausalLM.from_pretrained(run / "model")
    assert torch.equal(
        reloaded.model.embed_tokens.weight, weights_of(run / "model")["model.embed_tokens.weight"]
    )

    capsys.readouterr()
    run_here(start([], prompts, run, "--steps", "3", "--resume"))
    assert [row["step"] for row in rlmt_data.read_log(run / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_old_logprobs_are_those_of_the_sampling_policy(prompts):
    """Several updates a rollout: the ratio is 1 in the first one only."""
    accelerator = policy.start_accelerator()
    model = policy.Policy(AutoModelForCausalLM.from_pretrained("data/toy/base"), 1.0)
    completions = grpo_updates.stored_completions(6, 1)[0]
    policy.set_old_logprobs(model, completions, 200, 0, accelerator)
    for one in completions:
        batch = policy.collate([one], 0, "cpu")
        alone, _ = model(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        torch.testing.assert_close(alone[0], torch.tensor(one.old_logprobs), rtol=1e-4, atol=1e-5)
    assert rollout.share_of([1, 2, 3, 4], SimpleNamespace(num_processes=2, process_index=1)) == [3, 4]


OWN_REWARD = """
def odd_words(rows):  # of a prompt with an even number nothing can be learned
    return [float(int(row["id"][-1]) % 2) * (i % 4) for i, row in enumerate(rows)]
"""


@pytest.fixture
def numbered_prompts(prompts, tmp_path) -> Path:
    """Sixty prompts, beside own.py."""
    (tmp_path / "own.py").write_text(OWN_REWARD)
    path = tmp_path / "prompts.jsonl"
    with open(path, "w") as file:
        for number in range(60):
            row = json.loads(prompts.read_text().splitlines()[number % 10])
            file.write(json.dumps(row | {"id": f"prompt-{number}"}) + "\n")
    return path


def test_dynamic_sampling_replaces_flat_groups(numbered_prompts, tmp_path):
    args = train_grpo.Args(
        prompts=str(numbered_prompts),
        think_format="plain",
        on_bad_format="score",
        rewards=(f"{tmp_path}/own.py:odd_words:1",),
        group_size=4,
        prompts_per_step=6,
        dynamic_sampling=30,
    )
    accelerator = policy.start_accelerator()
    tokenizer = chat.load_tokenizer("data/toy/base")
    templates.prepare_tokenizer(tokenizer, "plain")
    kept, _ = rows.load_prompts(str(numbered_prompts), tokenizer, 256)
    base = AutoModelForCausalLM.from_pretrained("data/toy/base")
    sampler = rollout.Sampler(rollout.Transformers(tokenizer, base), tokenizer, rollout.Sampling(1.0, 4))
    scorer = Scorer(args, tokenizer, tmp_path, accelerator)

    chosen = rlmt_run.rows_of_step(kept, 1, 6, args.seed)
    completions = train_grpo.sample_groups(chosen, sampler, args)
    scorer.set_rewards(completions, 4, None)
    before = list(completions)
    found = train_grpo.replace_flat_groups(
        completions, chosen, kept, 1, sampler, scorer, None, args, accelerator
    )
    assert 1 <= found["dynamic_sampling/attempts"] <= 30
    assert len({one.id for one in completions}) == 6  # no prompt is there twice
    for start in range(0, 24, 4):
        group = completions[start : start + 4]
        assert len({one.id for one in group}) == 1 and int(group[0].id[-1]) % 2
        assert [one.reward for one in group] == [0.0, 1.0, 2.0, 3.0]
        if int(before[start].id[-1]) % 2:  # one with a signal stays as it is
            assert all(one is other for one, other in zip(group, before[start : start + 4], strict=True))


def test_the_collapse_of_the_groups_that_are_trained_on_is_logged(numbered_prompts, tmp_path):
    """With dynamic sampling they are not those of the first rollout."""
    words = ["--rewards", f"{tmp_path}/own.py:odd_words:1", "self_certainty:0", "--dynamic-sampling", "30"]
    run_here(start([], numbered_prompts, tmp_path / "run", "--steps", "1", *words))
    [metrics] = rlmt_data.read_log(tmp_path / "run" / "metrics.jsonl")
    trained = rlmt_data.read_log(tmp_path / "run" / "completions.jsonl")
    assert metrics["dynamic_sampling/attempts"] >= 1 and all(int(row["id"][-1]) % 2 for row in trained)
    group_size = json.loads((tmp_path / "run" / "config.json").read_text())["args"]["group_size"]
    completions = [SimpleNamespace(id=row["id"], response=row["response"]) for row in trained]
    assert (
        metrics["collapse/agreement"]
        == Collapse(tmp_path, group_size).indicators(completions)["collapse/agreement"]
    )


# --- arguments


@pytest.mark.parametrize(
    "words, message",
    [
        (["--preset", "nonsense"], "unknown preset 'nonsense'"),
        (["--no-such-flag"], "no-such-flag"),
        (["--group-size", "1"], "--group-size 1 gives every completion the advantage zero"),
        (["--updates-per-rollout", "3"], "--prompts-per-step 4 cannot be split"),
        (["--model", "data"], "data is neither a model folder"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--prompts-per-step", "40"], "40 are needed (--prompts-per-step)"),
        (["--reward-model", "data"], "data is neither a model folder"),
        (["--max-completion-tokens", "500"], "628 tokens are more than the 512"),
        (["--gold", "nowhere.py:f"], "is not file.py:function"),
        (
            ["--scale-rewards", "pass_at_k", "--group-size", "3"],
            "--scale-rewards pass_at_k needs at least PASS_AT_K",
        ),
    ],
)
def test_bad_arguments_are_one_clear_error(words, message, prompts, here, tmp_path):
    done = here("train_grpo.py", *TINY, "--prompts", prompts, *words, "--out", tmp_path / "run")
    assert done.returncode == 2 and message in done.stderr + done.stdout, done.stderr[-2000:]
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_one_process_sees_one_gpu(monkeypatch):
    """Under accelerate each process has its GPU by its rank; rlmt leaves the variable alone there."""
    monkeypatch.setattr(sys, "argv", ["train_grpo.py"])
    without = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")}
    seen = []
    for more in ({}, {"LOCAL_RANK": "1"}, {"CUDA_VISIBLE_DEVICES": "3"}):
        monkeypatch.setattr(os, "environ", without | more)
        again = importlib.util.spec_from_file_location("again", ROOT / "rlmt" / "__init__.py")
        again.loader.exec_module(importlib.util.module_from_spec(again))
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert seen == ["0", None, "3"]
