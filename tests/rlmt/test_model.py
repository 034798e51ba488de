"""Tests rlmt/model.py: loading, log-probabilities and entropies against the logits, micro-batches.

Whole weights: test_checkpoint.py. Several processes: tests/scripts/test_two_processes.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from script_runs import BASE
from transformers import AutoModelForCausalLM
from updates import stored_completions

from rlmt import model as policy
from rlmt.run import RunArgs
from rlmt.sampler import Completion


@pytest.fixture
def base():
    return AutoModelForCausalLM.from_pretrained(BASE)


@pytest.fixture(scope="module")
def completions() -> list[Completion]:
    """Six completions of random tokens and unequal lengths."""
    return stored_completions(6, 1)[0]


@pytest.fixture(scope="module")
def batch(completions) -> tuple[torch.Tensor, ...]:
    """Policy's inputs: token ids, attention mask, completion mask."""
    names = ("input_ids", "attention_mask", "completion_mask")
    tensors = policy.collate(completions, 0, "cpu")
    return tuple(tensors[name] for name in names)


# --- loading


@pytest.fixture
def bfloat16_accelerator():
    """Starts an accelerator whose forwards run in bfloat16; the next test has one in float32 again."""
    AcceleratorState._reset_state()
    yield policy.start_accelerator("bfloat16")
    AcceleratorState._reset_state()


def test_bfloat16_forwards_of_float32_weights(bfloat16_accelerator, base, batch):
    """Policy and reference are autocast alike, so the KL of a policy that has learned nothing is exactly 0."""
    model = policy.Policy(policy.load_trained(BASE, RunArgs(gradient_checkpointing=False)), 1.0)
    model, optimizer = policy.prepare_trained(bfloat16_accelerator, model, 1e-3, 0.0)
    reference = policy.load_reference(BASE, 1.0, bfloat16_accelerator, "bfloat16")
    assert not any(weight.requires_grad for weight in reference.parameters())

    logprobs, _ = model(*batch)
    assert torch.equal(policy.compute_reference_logprobs(model, reference, batch), logprobs)
    exact, _ = policy.Policy(base, 1.0)(*batch)
    assert 0 < (logprobs - exact).abs().mean() < 0.05  # it did run in bfloat16

    logprobs.sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *reference.parameters()]
    for weight in model.parameters():
        tensors += [weight.grad, optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


# --- log-probabilities


SOFTCAP = 3.0  # of a Gemma 2


def direct(model, batch: tuple, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probabilities and entropies (B, T) of the completions from all logits."""
    ids, attention_mask, completion_mask = batch
    n = completion_mask.size(1)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=attention_mask, position_ids=positions).logits[:, -n - 1 : -1]
    logprobs = (SOFTCAP * torch.tanh(logits / SOFTCAP) / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[:, -n:, None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("at_once", [2**27, 283 * 7])
def test_logprobs_entropies_and_gradients_are_those_of_the_logits(at_once, base, batch, monkeypatch):
    """Also a few tokens at a time, as for large vocabularies."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", at_once)
    model = base.double()  # in float64 rounding hides nothing
    model.config.final_logit_softcapping = SOFTCAP
    mask = batch[2].bool()
    weights = torch.randn(2, *mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    found = policy.Policy(model, 0.7)(*batch, entropy_gradient=True)
    gradients = []
    expected = direct(model, batch, 0.7)
    for logprobs, entropies in (found, expected):
        model.zero_grad()
        ((weights[0] * logprobs).sum() + (weights[1] * entropies).sum()).backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-9, atol=1e-9)
        assert not ours[~mask].any()
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)
    _, entropies = policy.Policy(model, 0.7)(*batch)
    assert not entropies.requires_grad  # for the log alone


def test_statistics_of_entropy(base, completions):
    policy.set_entropy_statistics(policy.Policy(base, 0.7), completions, 100, 0, policy.start_accelerator())
    last = completions[-1]
    ids = torch.tensor([last.prompt_ids + last.ids])
    logprobs = (base(ids).logits[0, -len(last.ids) - 1 : -1] / 0.7).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean().item()
    kl = (-math.log(logprobs.size(-1)) - logprobs).mean().item()
    assert last.statistics == pytest.approx({"mean_entropy": entropy, "mean_kl_uniform": kl}, rel=1e-4)


# --- micro-batches


@pytest.mark.parametrize("max_tokens", [700, 300, 80])
@pytest.mark.parametrize("n_others", [1, 8])
def test_micro_batches_are_the_best_cut(max_tokens, n_others):
    """A smaller limit would make more of them; there are as many as another process has, if it has more."""
    rows = [(60, 30), (5, 35), (35, 5), (10, 20), (6, 6), (1, 4), (4, 1), (0, 1)]
    alone = policy.micro_batches(rows, max_tokens, lengths=tuple)
    assert sum(alone, []) == rows
    padded = [len(batch) * sum(map(max, zip(*batch))) for batch in alone]
    assert all(n <= max_tokens or len(batch) == 1 for n, batch in zip(padded, alone))
    assert len(policy.micro_batches(rows, max(padded) - 1, lengths=tuple)) > len(alone) or max(padded) == 90

    # stands for a launch in which another process has `n_others`
    two = SimpleNamespace(device="cpu", gather=lambda own: torch.tensor([own.item(), n_others]))
    batches = policy.micro_batches(rows, max_tokens, two, tuple)
    assert len(batches) == max(n_others, len(alone))
    assert sorted(sum(batches, [])) == sorted(rows)
