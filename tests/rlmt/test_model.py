"""Tests rlmt/model.py: loading, log-probabilities and entropies against the logits, micro-batches, whole
weights.

tests/scripts/test_two_processes.py tests several processes.
"""

import copy
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from rlmt import model as policy
from updates import stored_completions
from rlmt.run import RunArgs

BASE = "data/toy/base"
SIZES = {
    "vocab_size": 283,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(BASE)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    return policy.collate(stored_completions(6, 1)[0], 0, "cpu")


@pytest.fixture
def bfloat16_accelerator():
    """Starts an accelerator whose forwards run in bfloat16; the next test has one in float32 again."""
    AcceleratorState._reset_state()
    yield policy.start_accelerator("bfloat16")
    AcceleratorState._reset_state()


def test_bfloat16_forwards_of_float32_weights(bfloat16_accelerator, base, batch):
    """Policy and reference are autocast alike, so the KL of a policy that has learned nothing is exactly 0.

    tests/scripts/test_grpo.py has a reference that is sharded.
    """
    model = policy.Policy(policy.load_trained(BASE, RunArgs(gradient_checkpointing=False)), 1.0)
    model, optimizer = policy.prepare_trained(bfloat16_accelerator, model, 1e-3, 0.0)
    reference = policy.load_reference(BASE, 1.0, bfloat16_accelerator, "bfloat16")
    assert not any(weight.requires_grad for weight in reference.parameters())

    inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    logprobs, _ = model(*inputs)
    assert torch.equal(policy.compute_reference_logprobs(model, reference, inputs), logprobs)
    exact, _ = policy.Policy(base, 1.0)(*inputs)
    distance = (logprobs - exact).abs()
    assert 0 < distance.mean() < 0.05  # it did run in bfloat16

    logprobs.sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *reference.parameters()]
    for weight in model.parameters():
        tensors += [weight.grad, optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


def direct(
    logits: torch.Tensor, ids: torch.Tensor, n: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probabilities and entropies (B, n) of the last n tokens from all logits."""
    logprobs = (logits / temperature)[:, -n - 1 : -1].double().log_softmax(-1)
    return logprobs.gather(-1, ids[:, -n:, None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


def logits_of(model, batch) -> torch.Tensor:
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return model(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions).logits


# --- log-probabilities


@pytest.mark.parametrize("at_once", [2**27, 283 * 7])
def test_logprobs_entropies_and_gradients_are_those_of_the_logits(at_once, base, batch, monkeypatch):
    """Also a few tokens at a time, as for large vocabularies."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", at_once)
    model = copy.deepcopy(base).double()  # in float64 rounding hides nothing
    mask = batch["completion_mask"].bool()
    weights = torch.randn(2, *mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    found = policy.Policy(model, 0.7)(
        batch["input_ids"], batch["attention_mask"], batch["completion_mask"], entropy_gradient=True
    )
    expected = direct(logits_of(model, batch), batch["input_ids"], mask.size(1), 0.7)
    gradients = []
    for logprobs, entropies in (found, expected):
        model.zero_grad()
        ((weights[0] * logprobs).sum() + (weights[1] * entropies).sum()).backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-9, atol=1e-9)
        assert not ours[~mask].any()
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)

    _, entropies = policy.Policy(base, 0.7)(
        batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    )
    assert not entropies.requires_grad  # for the log alone


def test_a_model_s_own_treatment_of_its_logits(batch):
    torch.manual_seed(0)
    softcapped = Gemma2ForCausalLM(
        Gemma2Config(**SIZES, final_logit_softcapping=3.0, initializer_range=0.5)
    ).eval()
    logits = logits_of(softcapped, batch)
    assert 2.5 < logits.abs().max() < 3
    found, _ = policy.Policy(softcapped, 0.7)(
        batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    )
    mask = batch["completion_mask"].bool()
    expected, _ = direct(logits, batch["input_ids"], mask.size(1), 0.7)
    torch.testing.assert_close(found[mask], expected[mask].float(), rtol=1e-4, atol=1e-4)

    with pytest.raises(ValueError, match="logits_scaling"):
        policy.Policy(GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)), 0.7)


def test_statistics_of_entropy(base):
    completions = stored_completions(3, 1)[0]
    policy.set_entropy_statistics(policy.Policy(base, 0.7), completions, 100, 0, policy.start_accelerator())
    for completion in completions:
        ids = torch.tensor([completion.prompt_ids + completion.ids])
        n = len(completion.ids)
        probabilities = (base(ids).logits[0, -n - 1 : -1] / 0.7).double().softmax(-1)
        entropy = -(probabilities * probabilities.log()).sum(-1).mean().item()
        uniform = 1 / probabilities.size(-1)
        kl = (uniform * (math.log(uniform) - probabilities.log())).sum(-1).mean().item()
        assert completion.statistics == pytest.approx(
            {"mean_entropy": entropy, "mean_kl_uniform": kl}, rel=1e-4
        )


# --- micro-batches


class Processes(NamedTuple):
    """Stands for a launch in which another process has `n_others` micro-batches."""

    n_others: int
    device: str = "cpu"

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.tensor([*own.tolist(), self.n_others])


def padded(lengths: list[tuple[int, int]]) -> int:
    prompts, completions = zip(*lengths)
    return len(lengths) * (max(prompts) + max(completions))


@pytest.mark.parametrize("max_tokens", [700, 300, 150, 80])
@pytest.mark.parametrize("n_others", [1, 5, 8])
def test_micro_batches_are_the_best_cut(max_tokens, n_others):
    """Against all cuts of eight rows into at most as many; as many as another process has, if it has more."""
    rows = [(60, 30), (5, 35), (35, 5), (10, 20), (6, 6), (1, 4), (4, 1), (0, 1)]
    alone = policy.micro_batches(rows, max_tokens, lengths=lambda row: row)
    assert sum(alone, []) == rows
    smallest = []
    for n in range(1, len(alone) + 1):
        for inner in itertools.combinations(range(1, 8), n - 1):
            cut = [rows[a:b] for a, b in itertools.pairwise([0, *inner, 8])]
            smallest.append(max(map(padded, cut)))
    assert max(map(padded, alone)) == min(smallest)
    assert all(padded(batch) <= max_tokens or len(batch) == 1 for batch in alone)

    batches = policy.micro_batches(rows, max_tokens, Processes(n_others), lambda row: row)
    assert len(batches) == max(n_others, len(alone))
    assert sorted(sum(batches, [])) == sorted(rows)


# --- before an update


# --- whole weights


def test_lora_is_merged_into_a_copy():
    """In bfloat16, where merging and subtracting again would leave other weights."""
    torch.manual_seed(0)
    model = policy.load_trained(BASE, RunArgs(lora_r=4)).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.02)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    whole = dict(policy.whole_weights(policy.Policy(model, 1.0)))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())

    merged = dict(model.merge_and_unload().named_parameters())
    assert whole.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(whole[name], weight, rtol=2e-2, atol=2e-3)
    base = dict(AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16).named_parameters())
    changed = [name for name in whole if not torch.equal(whole[name], base[name])]
    assert len(changed) == 4 * 7  # all linear layers


@torch.no_grad()
def test_weights_in_4_bits_are_saved_as_the_forward_computes_with_them():
    """As the sampler must have them, too; a head that is trained whole is there once."""
    torch.manual_seed(0)
    model = policy.load_trained(BASE, RunArgs(lora_r=4, load_in_4bit=True))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.02)
    again = AutoModelForCausalLM.from_pretrained(BASE)
    start = {name: weight.clone() for name, weight in again.named_parameters()}
    whole = dict(policy.whole_weights(policy.Policy(model, 1.0)))
    assert whole.keys() == start.keys() and {weight.dtype for weight in whole.values()} == {torch.float32}
    again.load_state_dict(whole, strict=False)

    ids = torch.arange(5, 25).repeat(2, 1)
    mask = torch.ones_like(ids)
    found, _ = policy.Policy(again, 1.0)(ids, mask, mask[:, 10:])
    expected, _ = policy.Policy(model.eval(), 1.0)(ids, mask, mask[:, 10:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    expected, _ = policy.Policy(model.train(), 1.0)(ids, mask, mask[:, 10:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    with model.disable_adapter():
        reference, _ = policy.Policy(model, 1.0)(ids, mask, mask[:, 10:])
    assert (reference - expected).abs().max() > 1e-2
