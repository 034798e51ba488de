"""train_grpo.py: advantages against naive loops, the loss against TRL's, dynamic sampling, bad arguments. test_resume.py runs
the script."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from script_runs import BASE, ROOT, run_here, weights_of, write_prompts
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
import trl  # GRPOTrainer is loaded when it is named first, with vLLM

from rlmt.data import read_log
from rlmt.run import rows_of_step
import train_grpo

NAN = math.nan


# --- advantages


def naive_advantages(rewards: np.ndarray, scale: str) -> np.ndarray:
    every = rewards[~np.isnan(rewards)]
    advantages = np.zeros_like(rewards)
    for place, reward in np.ndenumerate(rewards):
        group = rewards[place[0]]
        known = group[~np.isnan(group)]
        if np.isnan(reward) or len(known) == 1:
            continue
        divisor = {"none": 1.0, "group": known.std(ddof=1) + 1e-4, "batch": every.std(ddof=1) + 1e-4}[scale]
        advantages[place] = (reward - known.mean()) / divisor
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_a_loop(scale):
    """A missing reward counts in neither mean nor standard deviation."""
    flat = [0.5, 0.5, 0.5, 0.5]
    missing = [[NAN, 1.0, 3.0, NAN], [NAN, NAN, NAN, NAN], [NAN, 7.0, NAN, NAN]]
    for rewards in ([[1.0, 2.0, 4.0, 4.0], flat, *missing], missing[1:]):
        found = train_grpo.group_advantages(torch.tensor(rewards, dtype=torch.float64), scale)
        np.testing.assert_allclose(found, naive_advantages(np.array(rewards), scale))


def test_pass_at_k_leaves_out_completions_without_a_reward():
    rewards_P_G = torch.tensor([[1.0, 0.0, 0.0, 0.0], [NAN, 0.0, 0.0, 0.0], [1.0, 0.0, NAN, 0.0]])
    verdicts = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, None]
    found = train_grpo.pass_at_k_advantages(verdicts, rewards_P_G, 2)
    # 4 completions, 1 right: rho = 1 - 3/6, sigma = 1/2; right: 1, wrong: (1 - 1/2 - 2/3) * 2
    torch.testing.assert_close(found[0], torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))
    # the right one has no reward; and two count, 1 right: every pair has it
    assert not found[1:].any()


def test_flat_groups():
    rewards = torch.tensor([[1.0, 1.04], [1.0, 1.06], [NAN, 5.0], [NAN, NAN]])
    assert train_grpo.is_flat(rewards).tolist() == [True, False, True, True]


# --- the loss


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A real GRPOTrainer, whose _compute_loss is asked about our tensors."""
    config = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=9,
        use_cpu=True,
        bf16=False,
        report_to=[],
        use_bias_correction_kl=False,
        steps_per_generation=1,
        gradient_checkpointing=False,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(BASE, dtype="float32"),
        args=config,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(BASE),
    )
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.parametrize(
    "loss_type, epsilon_high, beta",
    [
        ("dapo", 0.2, 0.0),
        ("dapo", 0.28, 0.04),
        ("grpo", 0.2, 0.04),
        ("gspo", 0.2, 0.04),
        ("dr_grpo", 0.28, 0.04),
        ("cispo", train_grpo.CISPO_CAP, 0.04),
    ],
)
def test_loss_gradient_and_metrics_are_trls(trainer, loss_type, epsilon_high, beta):
    """With importance weights, somebody else's turn in the middle, and ratios on both sides of every clip."""
    generator = torch.Generator().manual_seed(20)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(4, 9, generator=generator, dtype=torch.float64)

    completion_mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [1] * 7 + [0] * 2, [1] + [0] * 8])
    own_mask = torch.ones(4, 9, dtype=torch.long)
    own_mask[0, 3:5] = 0
    mask = completion_mask * own_mask
    logprobs = -noise(1.0).abs()
    old_logprobs = logprobs + noise(1.2)
    reference_logprobs = logprobs + noise(0.5)
    importance_weights = noise(0.2).exp()
    advantages = noise(1.0)

    ours = logprobs.clone().requires_grad_()
    loss, sums = train_grpo.grpo_loss(
        ours,
        old_logprobs,
        reference_logprobs if beta else None,
        advantages,
        mask,
        train_grpo.mean_weights(mask, loss_type, mask.sum().item(), 4, 9),
        importance_weights,
        epsilon=(0.2, epsilon_high),
        beta=beta,
        loss_type=loss_type,
    )
    loss.backward()

    theirs = logprobs.clone().requires_grad_()
    trainer.loss_type = "grpo" if loss_type == "gspo" else loss_type
    trainer.importance_sampling_level = "sequence" if loss_type == "gspo" else "token"
    trainer.epsilon_high = epsilon_high
    trainer.beta = beta
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (theirs, theirs, None)
    trainer._metrics["train"].clear()
    inputs = {
        "prompt_ids": mask,  # neither ids nor the prompt are looked at
        "prompt_mask": mask,
        "completion_ids": mask,
        "completion_mask": completion_mask,
        "tool_mask": own_mask,
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": reference_logprobs,
        "importance_sampling_ratio": importance_weights,
        "num_items_in_batch": mask.sum(),
    }
    expected = trainer._compute_loss(trainer.model.train(), inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)

    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    if loss_type == "cispo":
        metrics["clip_ratio/high_mean"] = metrics["cispo_clip_ratio"]
    assert sums["clip_ratio/high_mean"] > 0 and ("kl" in sums) == bool(beta)
    for name in sums.keys() & metrics.keys():
        if loss_type != "gspo" or name == "kl":  # TRL's mean of sequences is over sequences, ours over tokens
            assert sums[name].item() / mask.sum().item() == pytest.approx(metrics[name]), name


# --- the script


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 60)


def command(prompts: Path, out: Path, more: str) -> list[str]:
    """Returns a tiny run. The base model has no format, so its text is scored as it is."""
    tiny = (
        f"train_grpo.py --preset toy --model {BASE} --prompts-per-step 4 --group-size 4 --save-steps 1 "
        f"--max-completion-tokens 24 --on-bad-format score --prompts {prompts} --out {out} {more}"
    )
    return [sys.executable, *tiny.split()]


OWN_REWARD = """
def odd_words(rows):  # of a prompt with an even number nothing can be learned
    return [float(int(row["id"].split("-")[-1]) % 2) * (i % 4) for i, row in enumerate(rows)]
"""


def test_dynamic_sampling_replaces_flat_groups(prompts, tmp_path):
    """In bfloat16, where the reference computes as the policy does."""
    own = tmp_path / "own.py"
    own.write_text(OWN_REWARD)
    run = tmp_path / "run"
    more = (
        f"--rewards {own}:odd_words:1 --dynamic-sampling 30 --dtype bfloat16 --steps 1 --prompts-per-step 6"
    )
    run_here(command(prompts, run, more))
    [metrics] = read_log(run / "metrics.jsonl")
    assert metrics["dynamic_sampling/attempts"] >= 1 and metrics["kl"] == 0
    assert {weight.dtype for weight in weights_of(run / "model").values()} == {torch.float32}
    trained = read_log(run / "completions.jsonl")
    assert len(trained) == 24 and len({row["id"] for row in trained}) == 6  # no prompt is there twice
    chosen = [row["id"] for row in rows_of_step(read_log(prompts), 1, 6, 0)]
    for n, before in enumerate(chosen):
        group = trained[4 * n : 4 * n + 4]
        after = group[0]["id"]
        assert [(row["id"], row["reward"]) for row in group] == [(after, float(i)) for i in range(4)]
        assert int(after.split("-")[-1]) % 2
        if int(before.split("-")[-1]) % 2:  # one with a signal stays
            assert after == before


# --- arguments


@pytest.mark.parametrize(
    "words, message",
    [
        ("--group-size 1", "--group-size 1 gives every completion the advantage zero"),
        ("--updates-per-rollout 3", "--prompts-per-step 4 cannot be split"),
        ("--scale-rewards pass_at_k --group-size 3", "--scale-rewards pass_at_k needs at least"),
    ],
)
def test_bad_arguments_are_one_clear_error(words, message, prompts, here, tmp_path):
    done = here(*command(prompts, tmp_path / "run", words)[1:])
    assert done.returncode == 2 and message in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "run").exists()


def test_one_process_sees_one_gpu():
    """Under accelerate each process has its GPU by its rank; rlmt leaves the variable alone there."""
    code = "import sys; sys.argv = ['train_grpo.py']; import rlmt, os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    seen = []
    for env in ({}, {"LOCAL_RANK": "1"}, {"CUDA_VISIBLE_DEVICES": "3"}):
        seen.append(subprocess.check_output([sys.executable, "-c", code], env=env, cwd=ROOT))
    assert seen == [b"0\n", b"None\n", b"3\n"]
