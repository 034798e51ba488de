"""The loops of PPO, GRPO and DPO against independent ones: one completion at a time, plain transformers, no
padding.

Each run is at a temperature, with weight decay, several updates and a rate of its own for the critic, so that
a flag that is read and not used, or used where another belongs, changes the weights.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import train_grpo
from data.toy import sums as toy_sums
from rlmt import run as rlmt_run
from script_runs import run_here, weights_of, write_prompts

TEMPERATURE = 0.7
BASE = "data/toy/base"
COMMON = [
    *[
        "--preset",
        "toy",
        "--model",
        BASE,
        "--think-format",
        "plain",
        "--prompts-per-step",
        "4",
        "--save-steps",
        "1",
    ],
    *["--max-completion-tokens", "24", "--on-bad-format", "score", "--gold", ""],
    *["--temperature", str(TEMPERATURE), "--weight-decay", "0.1", "--updates-per-rollout", "2"],
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 12)


@pytest.fixture
def run(prompts, tmp_path, monkeypatch):
    """run(script, *flags): runs a training script; returns its folder, and the completions of each step."""
    completions = {}
    end = rlmt_run.Training.end

    def keep(self, step, metrics, n_tokens, rows=()):
        completions[step] = rows
        end(self, step, metrics, n_tokens, rows)

    monkeypatch.setattr(rlmt_run.Training, "end", keep)

    def run(script: str, *flags: str) -> tuple[Path, dict[int, list]]:
        out = tmp_path / "run"
        words = [script, *COMMON, "--prompts", prompts, "--out", out, *flags]
        run_here([sys.executable, *map(str, words)])
        return out, completions

    return run


def logprobs_of(
    model, prompt_ids: list[int], ids: list[int], temperature: float = TEMPERATURE
) -> torch.Tensor:
    logits = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


def load(path: str = BASE):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def halves(completions: list, seed: tuple) -> list[list]:
    order = np.random.default_rng(seed).permutation(len(completions))
    return [[completions[place] for place in half] for half in np.array_split(order, 2)]


def step(model, optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def check_weights(found: dict[str, torch.Tensor], model) -> None:
    """Compares how far weights have moved; Adam's first steps are as large for noise as for signal, so some
    may differ."""
    start = load()
    for name, weight in model.named_parameters():
        moved = (weight - start.get_parameter(name)).norm()
        assert (found[name] - weight).norm() <= 0.01 * moved, name


def ppo_targets(completions: list, policy, reference, value_of) -> dict[str, tuple]:
    """Returns old log-probabilities, values, whitened advantages and returns by id; checks the advantages of
    the run."""
    targets = {}
    for one in completions:
        with torch.no_grad():
            old = logprobs_of(policy, one.prompt_ids, one.ids)
            kl = old - logprobs_of(reference, one.prompt_ids, one.ids)
            values = value_of(one)
        earned = -0.3 * kl
        earned[-1] += one.reward
        advantage = 0.0
        next_value = 0.0
        advantages = []
        for t in reversed(range(len(one.ids))):
            advantage = earned[t] + next_value - values[t] + 0.9 * advantage
            next_value = values[t]
            advantages.insert(0, advantage)
        targets[one.id] = [old, values, torch.stack(advantages)]
    every = torch.cat([advantages for _, _, advantages in targets.values()])
    for one in completions:
        old, values, advantages = targets[one.id]
        white = (advantages - every.mean()) / every.std()
        torch.testing.assert_close(torch.tensor(one.advantages), white, rtol=1e-3, atol=1e-3)
        targets[one.id] = (old, values, white, advantages + values)
    return targets


def critic_of(path: Path | str):
    """Returns a critic, and its function of a completion: the value of the text before each token."""
    critic = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)

    def value_of(one) -> torch.Tensor:
        ids = torch.tensor([one.prompt_ids + one.ids])
        return critic(ids).logits[0, len(one.prompt_ids) - 1 : -1, 0]

    return critic, value_of


def test_a_step_of_ppo(run):
    flags = ["--kl", "reward", "--kl-coef", "0.3", "--lam", "0.9", "--learning-rate", "1e-3", "--steps", "2"]
    folder, completions = run("train_ppo.py", *flags, "--critic-learning-rate", "3e-3")
    policy = load()
    reference = load().requires_grad_(False)
    critic, value_of = critic_of("data/toy/reward_model")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3, weight_decay=0.1)
    targets = ppo_targets(completions[1], policy, reference, value_of)
    for half in halves(completions[1], (0, 0, 0)):
        n_tokens = sum(len(one.ids) for one in half)
        loss = 0.0
        for one in half:
            old, values, advantages, returns = targets[one.id]
            ratio = (logprobs_of(policy, one.prompt_ids, one.ids) - old).exp()
            gained = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            found = value_of(one)
            held = values + (found - values).clamp(-0.5, 0.5)
            errors = torch.max((found - returns).square(), (held - returns).square())
            loss = loss + (0.5 * errors - gained).sum() / n_tokens
        loss.backward()
        step(policy, optimizer)
        step(critic, critic_optimizer)
    check_weights(weights_of(folder / "checkpoint-1"), policy)
    saved_critic, _ = critic_of(folder / "checkpoint-1" / "critic")
    started_from, _ = critic_of("data/toy/reward_model")
    moved = (critic.score.weight - started_from.score.weight).norm()
    assert (saved_critic.score.weight - critic.score.weight).norm() < 0.01 * moved

    # in the second step the policy has left the reference, so that the KL has a sign
    _, value_of = critic_of(folder / "checkpoint-1" / "critic")
    ppo_targets(completions[2], load(str(folder / "checkpoint-1")), reference, value_of)


def test_a_step_of_grpo(run):
    flags = [
        "--group-size",
        "4",
        "--beta",
        "0.3",
        "--learning-rate",
        "1e-2",
        "--entropy-coef",
        "0.01",
        "--steps",
        "1",
    ]
    folder, steps = run("train_grpo.py", *flags)
    completions = steps[1]
    policy = load()
    reference = load().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.1)
    rewards = torch.tensor([one.reward for one in completions]).view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    for one, advantage in zip(completions, advantages.flatten().tolist(), strict=True):
        assert one.advantages[0] == pytest.approx(advantage, rel=1e-4)
        with torch.no_grad():
            one.expected_old = logprobs_of(policy, one.prompt_ids, one.ids)
        assert one.old_logprobs == pytest.approx(one.expected_old.tolist(), abs=1e-4)

    for half in halves(completions, (0, 0, 0)):
        n_tokens = sum(len(one.ids) for one in half)
        loss = 0.0
        for one in half:
            logits = policy(torch.tensor([one.prompt_ids + one.ids])).logits[0, len(one.prompt_ids) - 1 : -1]
            every = (logits / TEMPERATURE).log_softmax(-1)
            logprobs = every.gather(1, torch.tensor(one.ids).unsqueeze(1)).squeeze(1)
            ratio = (logprobs - one.expected_old).exp()
            gained = torch.min(ratio * one.advantages[0], ratio.clamp(0.8, 1.2) * one.advantages[0])
            gap = logprobs_of(reference, one.prompt_ids, one.ids) - logprobs
            entropy = -(every.exp() * every).sum(-1)
            loss = loss + (-gained + 0.3 * (gap.exp() - gap - 1) - 0.01 * entropy).sum() / n_tokens
        loss.backward()
        step(policy, optimizer)
    check_weights(weights_of(folder / "model"), policy)


def test_flat_groups_and_pass_at_k_reach_the_advantages(run, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def small(rows):\n    return [0.01 * (place % 4) for place in range(len(rows))]\n")
    flags = ["--group-size", "4", "--steps", "1", "--rewards", f"{own}:small:1"]
    _, steps = run("train_grpo.py", *flags, "--dynamic-sampling", "1")
    assert all(advantage == 0.0 for one in steps[1] for advantage in one.advantages)  # all groups stay flat

    toy_sums.save(toy_sums.write_files(toy_sums.Args(out=tmp_path)), tmp_path, 0)
    sums = tmp_path / "sums_prompts.jsonl"
    flags[1] = "8"
    flags[-1] = "math:1"
    _, steps = run("train_grpo.py", *flags, "--prompts", sums, "--scale-rewards", "pass_at_k", "--overwrite")
    rewards_P_G = torch.tensor([one.reward for one in steps[1]]).view(-1, 8)
    verdicts = [one.correct for one in steps[1]]
    expected = train_grpo.pass_at_k_advantages(verdicts, rewards_P_G, train_grpo.PASS_AT_K)
    assert [one.advantages[0] for one in steps[1]] == pytest.approx(expected.flatten().tolist())


def test_dpo_steps_have_the_rate_of_the_schedule(prompts, tmp_path):
    out = tmp_path / "run"
    words = ["train_dpo.py", "--preset", "toy", "--model", BASE, "--think-format", "plain", "--gold", ""]
    words += [
        "--prompts",
        prompts,
        "--out",
        out,
        "--rounds",
        "1",
        "--prompts-per-round",
        "0",
        "--samples-per-prompt",
        "4",
    ]
    words += ["--batch-size", "2", "--epochs", "2", "--learning-rate", "1e-3", "--warmup-ratio", "0.4"]
    words += ["--weight-decay", "0.1", "--max-completion-tokens", "40", "--beta", "0.3"]
    run_here([sys.executable, *map(str, words)])
    pairs = [json.loads(line) for line in (out / "round-1" / "pairs.jsonl").read_text().splitlines()]
    log = [json.loads(line) for line in (out / "round-1" / "metrics.jsonl").read_text().splitlines()]
    policy = load()
    reference = load().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    per_epoch = math.ceil(len(pairs) / 2)
    n_steps = 2 * per_epoch
    n_warmup = math.ceil(0.4 * n_steps)
    assert len(log) == n_steps > 2
    for number in range(n_steps):
        rate = 1e-3 * number / n_warmup
        if number >= n_warmup:
            rate = 1e-3 * (1 + math.cos(math.pi * (number - n_warmup) / (n_steps - n_warmup))) / 2
        assert log[number]["learning_rate"] == pytest.approx(rate)
        optimizer.param_groups[0]["lr"] = rate
        epoch, position = divmod(number, per_epoch)
        order = np.random.default_rng((0, 1, epoch)).permutation(len(pairs))
        members = [pairs[place] for place in order[position * 2 : position * 2 + 2]]
        for pair in members:
            margins = {}
            for side in ("chosen_ids", "rejected_ids"):
                tokens = (pair["prompt_ids"], pair[side], 1.0)
                margins[side] = (logprobs_of(policy, *tokens) - logprobs_of(reference, *tokens)).sum()
            loss = -torch.nn.functional.logsigmoid(0.3 * (margins["chosen_ids"] - margins["rejected_ids"]))
            (loss / len(members)).backward()
        step(policy, optimizer)
    check_weights(weights_of(out / "model"), policy)


def test_every_rank_draws_differently_and_a_resume_draws_the_same():
    draws = []
    for step_number, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        rlmt_run.seed_step(3, step_number, SimpleNamespace(num_processes=2, process_index=rank))
        draws.append((torch.rand(1).item(), np.random.rand()))
    assert len(set(draws)) == 3 and draws[0] == draws[3]
