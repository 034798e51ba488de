"""The loops of the training scripts against independent ones: one completion at a time, plain transformers, no
padding.

Each run has flags away from their defaults, so that one that is read and not used, or used where another
belongs, changes the weights. SFT and reward have their losses by hand in test_sft.py and test_reward.py.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import train_grpo
import train_ppo
from rlmt import sampler
from rlmt.data import read_log, write_jsonl
from rlmt.learner import cosine_rate
from rlmt.model import start_accelerator
from rlmt.run import Run, seed_step
from script_runs import BASE, REWARD_MODEL, run_here, weights_of, write_prompts
from updates import load as load_learner, stored_conversations

TEMPERATURE = 0.7
SAMPLER_LOGPROB = -1.5


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(command): runs a training script; returns its folder, and the completions of each step.

    Their sampler says of each token that its log-probability was SAMPLER_LOGPROB.
    """
    prompts = write_prompts(tmp_path / "prompts.jsonl", 12, answer="5")
    completions = {}
    end = Run.end_step
    read_completion = sampler.read_completion

    def keep(self, step, metrics, n_tokens, rows=()):
        completions[step] = rows
        end(self, step, metrics, n_tokens, rows)

    def read(*arguments):
        completion = read_completion(*arguments)
        completion.sampler_logprobs = [SAMPLER_LOGPROB] * len(completion.ids)
        return completion

    monkeypatch.setattr(Run, "end_step", keep)
    monkeypatch.setattr(sampler, "read_completion", read)
    monkeypatch.setitem(sampler.MAX_LOGPROB_GAP, "float32", math.inf)

    def run(command: str) -> tuple[Path, dict[int, list]]:
        out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        flags = f"--preset toy --model {BASE} --weight-decay 0.1 --out {out}"
        if "--prompts-per" in command:
            flags += f" --think-format plain --gold= --prompts {prompts}"
        words = f"{command} {flags}".split()
        run_here([sys.executable, *words])
        return out, completions

    return run


RL = (
    f"--prompts-per-step 4 --updates-per-rollout 2 --temperature {TEMPERATURE} --save-steps 1 "
    "--max-completion-tokens 24 --micro-batch-tokens 400 --on-bad-format score --entropy-coef 0.02 "
    "--importance-correction token_truncate --epsilon 0.001 0.003"
)


def load(path: Path | str = BASE):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logprobs_of(model, one) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probabilities and entropies of a completion's tokens."""
    logits = model(torch.tensor([one.prompt_ids + one.ids])).logits[0, len(one.prompt_ids) - 1 : -1]
    every = (logits / TEMPERATURE).log_softmax(-1)
    entropies = -(every.exp() * every).sum(-1)
    return every.gather(1, torch.tensor(one.ids).unsqueeze(1)).squeeze(1), entropies


def token_losses(policy, reference, one, advantages, beta: float) -> torch.Tensor:
    """Returns the loss of each token (T,) but the critic's; `one.old`: log-probabilities before the updates."""
    logprobs, entropies = logprobs_of(policy, one)
    ratio = (logprobs - one.old).exp()
    gained = torch.min(ratio * advantages, ratio.clamp(0.999, 1.003) * advantages)
    gained = gained * (one.old - SAMPLER_LOGPROB).exp().clamp(max=3.0)
    gap = logprobs_of(reference, one)[0].detach() - logprobs
    return beta * (gap.exp() - gap - 1) - 0.02 * entropies - gained


def halves(completions: list) -> list[list]:
    """Splits those of the first step as the seed (0, 0, 0) does."""
    longest_first = sorted(completions, key=lambda one: -len(one.prompt_ids + one.ids))
    order = np.random.default_rng((0, 0, 0)).permutation(len(completions))
    return [[longest_first[place] for place in half] for half in np.array_split(order, 2)]


def n_tokens_of(completions: list) -> int:
    return sum(len(one.ids) for one in completions)


def take_step(model, optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def check_weights(folder: Path, model, start) -> None:
    """Compares how far weights have moved; Adam's first steps are as large for noise as for signal, so some
    may differ."""
    found = weights_of(folder)
    for name, weight in start.named_parameters():
        expected = model.get_parameter(name)
        assert (found[name] - expected).norm() <= 0.01 * (expected - weight).norm(), name


# --- a step of each loop


def test_a_step_of_grpo(run):
    # the loss as released: a mean over completions of the means over their tokens
    flags = "--group-size 4 --beta 0.3 --learning-rate 1e-3 --steps 1 --loss-type grpo"
    folder, steps = run(f"train_grpo.py {RL} {flags}")
    policy, reference = load(), load()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
    rewards = torch.tensor([one.reward for one in steps[1]]).view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    for one, advantage in zip(steps[1], advantages.flatten(), strict=True):
        one.advantage = advantage
        one.old = logprobs_of(policy, one)[0].detach()
    for half in halves(steps[1]):
        for one in half:
            losses = token_losses(policy, reference, one, one.advantage, 0.3)
            (losses.mean() / len(half)).backward()
        take_step(policy, optimizer)
    check_weights(folder / "model", policy, load())


def load_critic(path: Path | str):
    return AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)


def values_of(critic, one) -> torch.Tensor:
    """Returns the value of the text before each token."""
    return critic(torch.tensor([one.prompt_ids + one.ids])).logits[0, len(one.prompt_ids) - 1 : -1, 0]


@torch.no_grad()
def set_targets(completions: list, policy, reference, critic, kl_coef: float) -> float:
    """Sets `old`, `old_values`, `white` advantages and the critic's `targets`; returns the mean KL, which is
    in the reward."""
    kl = 0.0
    for one in completions:
        one.old, _ = logprobs_of(policy, one)
        one.old_values = values_of(critic, one)
        rewards = logprobs_of(reference, one)[0] - one.old
        kl -= rewards.sum().item()
        rewards *= kl_coef
        rewards[-1] += one.reward
        deltas = rewards - one.old_values
        deltas[:-1] += one.old_values[1:]
        advantages = [sum(0.9**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
        one.white = torch.stack(advantages)
        one.targets = one.white + one.old_values
    every = torch.cat([one.white for one in completions])
    for one in completions:
        one.white = (one.white - every.mean()) / every.std()
        torch.testing.assert_close(torch.tensor(one.advantages), one.white, rtol=1e-3, atol=1e-3)
    return kl / n_tokens_of(completions)


@pytest.mark.parametrize("kl", ["reward", "loss"])
def test_two_steps_of_ppo(run, kl):
    beta = {"loss": 0.3, "reward": 0.0}[kl]
    flags = f"--kl {kl} --kl-coef 0.3 --lam 0.9 --learning-rate 1e-3 --critic-learning-rate 3e-3 --steps 2"
    folder, steps = run(f"train_ppo.py {RL} {flags}")
    policy, reference, critic = load(), load(), load_critic(REWARD_MODEL)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3, weight_decay=0.1)
    set_targets(steps[1], policy, reference, critic, 0.3 - beta)
    for half in halves(steps[1]):
        loss = 0.0
        for one in half:
            values = values_of(critic, one)
            held = one.old_values + (values - one.old_values).clamp(-0.5, 0.5)
            errors = torch.max((values - one.targets).square(), (held - one.targets).square())
            loss += (0.5 * errors + token_losses(policy, reference, one, one.white, beta)).sum()
        (loss / n_tokens_of(half)).backward()
        take_step(policy, optimizer)
        take_step(critic, critic_optimizer)
    check_weights(folder / "checkpoint-1", policy, load())
    check_weights(folder / "checkpoint-1" / "critic", critic, load_critic(REWARD_MODEL))

    _, second = read_log(folder / "metrics.jsonl")
    # the policy has left the reference, so that the KL has a sign
    critic = load_critic(folder / "checkpoint-1" / "critic")
    mean_kl = set_targets(steps[2], load(folder / "checkpoint-1"), reference, critic, 0.3 - beta)
    if kl == "reward":
        assert second["kl"] == pytest.approx(mean_kl, rel=1e-3)


def test_pass_at_k_reaches_the_advantages(run):
    _, steps = run(f"train_grpo.py {RL} --steps 1 --group-size 8 --rewards math:1 --scale-rewards pass_at_k")
    rewards_P_G = torch.tensor([one.reward for one in steps[1]]).view(-1, 8)
    verdicts = [one.correct for one in steps[1]]
    expected = train_grpo.pass_at_k_advantages(verdicts, rewards_P_G, train_grpo.PASS_AT_K).flatten()
    assert [one.advantages[0] for one in steps[1]] == pytest.approx(expected.tolist()) and expected.any()


def test_greedy_completions_of_a_prompt_are_alike(run):
    _, steps = run(f"train_grpo.py {RL} --steps 1 --group-size 4 --top-p 0.001")
    assert len({tuple(one.ids) for one in steps[1]}) == len({one.id for one in steps[1]})


SAMPLED = f"--rounds 1 --prompts-per-round 0 --samples-per-prompt 4 --temperature {TEMPERATURE}"


@pytest.mark.parametrize(
    "script, flags, betas",
    [
        ("sft_warmstart", "--traces {rows}", (0.9, 0.95)),
        ("reward", "--pairs {rows}", (0.9, 0.999)),
        ("dpo", SAMPLED, (0.9, 0.95)),
    ],
)
def test_updates_have_the_rates_of_their_schedule(run, tmp_path, script, flags, betas):
    """And norms of at most 1."""
    rows = []
    for n in range(14):
        row = {"messages": [{"role": "user", "content": f"I have {n} dollars."}], "thinking": "Budget 12."}
        rows.append(
            row | {"response": "You get 1 dish.", "chosen": "You get 1 dish.", "rejected": "Budget 12."}
        )
    write_jsonl(tmp_path / "rows.jsonl", rows)
    used = []

    def note(optimizer, *_) -> None:
        group = optimizer.param_groups[0]
        norms = [weight.grad.norm() for weight in group["params"] if weight.grad is not None]
        assert torch.stack(norms).norm() < 1.001
        used.append((group["lr"], group["weight_decay"], group["betas"]))

    hook = register_optimizer_step_pre_hook(note)
    flags = flags.format(rows=tmp_path / "rows.jsonl")
    folder, _ = run(
        f"train_{script}.py {flags} --batch-size 2 --learning-rate 1e-3 --warmup-ratio 0.4 --epochs 3"
    )
    hook.remove()
    log_folder = folder / "round-1" if script == "dpo" else folder
    log = read_log(log_folder / "metrics.jsonl")
    rates = [cosine_rate(1e-3, step, len(log), 0.4) for step in range(1, len(log) + 1)]
    assert used == [(rate, 0.1, betas) for rate in rates] and max(rates) == 1e-3
    assert [row["learning_rate"] for row in log] == rates
    if script == "reward":
        assert json.loads((folder / "model" / "config.json").read_text())["pad_token_id"] == 1
    if script == "dpo":  # whose log-probabilities are at temperature 1
        pair = read_log(log_folder / "pairs.jsonl")[0]
        logits = load()(torch.tensor([pair["prompt_ids"] + pair["chosen_ids"]])).logits[0].log_softmax(-1)
        logp = sum(
            logits[t - 1 - len(pair["chosen_ids"])][token] for t, token in enumerate(pair["chosen_ids"])
        )
        assert pair["reference_chosen_logp"] == pytest.approx(logp.item(), abs=1e-3)


def test_the_kl_is_of_the_policys_tokens():
    """Whatever the reference says of a user's."""
    [completions, _] = stored_conversations()
    found = []
    for shift in (0.0, 5.0):
        policy = load_learner(start_accelerator())
        for one in completions:
            one.reference_logprobs = [-2.0 - shift * (1 - is_policy) for is_policy in one.policy_mask]
            one.old_logprobs = [-1.0] * len(one.ids)
        means = train_grpo.accumulate_gradients(completions, policy, epsilon=(0.2, 0.2), beta=0.3)
        in_reward = train_ppo.kl_of_tokens(completions).sum()
        found.append([means["kl"], means["loss"], policy.clip_gradients(1.0), in_reward])
    assert found[0] == found[1] and found[0][0] > 0.1


def test_every_rank_draws_differently_and_a_resume_draws_the_same(monkeypatch):
    draws = []
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    for step, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        monkeypatch.setattr(PartialState(), "process_index", rank)
        seed_step(3, step)
        draws.append((torch.rand(1).item(), np.random.rand()))
    assert len(set(draws)) == 3 and draws[0] == draws[3]
