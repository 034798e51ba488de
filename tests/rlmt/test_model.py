"""Tests rlmt/model.py and rlmt/learner.py: loading, log-probabilities and entropies against the logits, micro-batches.

Whole weights: test_checkpoint.py. Several processes: tests/scripts/test_two_processes.py.
"""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from accelerate.state import AcceleratorState
from script_runs import BASE, REWARD_MODEL
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from updates import stored_completions

from conftest import random_model

from rlmt import chat
from rlmt import learner, model
import train_grpo
from rewards import unsupervised
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
    tensors = learner.collate(completions, "cpu")
    return tuple(tensors[name] for name in names)


# --- loading


@pytest.fixture
def bfloat16_accelerator():
    """Starts an accelerator whose forwards run in bfloat16; the next test has one in float32 again."""
    AcceleratorState._reset_state()
    yield model.start_accelerator("bfloat16")
    AcceleratorState._reset_state()


def test_bfloat16_forwards_of_float32_weights(bfloat16_accelerator, base, completions, batch):
    """test_grpo.py has a run, whose KL from its reference is exactly 0 at first."""
    args = train_grpo.Args(gradient_checkpointing=False, dtype="bfloat16")
    policy = learner.load_policy(args, BASE, None, bfloat16_accelerator)
    logprobs, _ = policy.logprobs(policy.collate(completions))
    exact, _ = learner.Policy(base, 1.0)(*batch)
    assert 0 < (logprobs - exact).abs().mean() < 0.05  # it did run in bfloat16
    policy.backward(logprobs.sum())
    for weight in policy.model.parameters():
        assert weight.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_dropped_out(checkpointing, tmp_path):
    """GPT-2 drops out a tenth of everything in training mode; what is saved of its config stays."""
    random_model("gpt2").save_pretrained(tmp_path)
    trained = model.load_trained(str(tmp_path), RunArgs(gradient_checkpointing=checkpointing))
    ids = torch.arange(3, 23)[None]
    before = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda nothing: nothing):
        found = trained(ids).logits
    torch.testing.assert_close(found, before, rtol=0, atol=1e-5)
    assert trained.config.attn_pdrop == 0.1
    assert (len(kept) < 40) == checkpointing  # activations that the backward pass needs
    modes = [module.training for module in trained.modules()]
    with model.evaluating(trained):  # as for a rollout
        assert not any(module.training for module in trained.modules())
    assert modes == [module.training for module in trained.modules()]


@pytest.mark.parametrize("family, fits", [("gpt2", True), ("gemma4_text", True), ("cohere", False)])
def test_the_forward_of_training_is_the_models(family, fits, exits):
    """Cohere scales its logits, which Policy does not know."""
    accelerator = model.start_accelerator("float32")
    policy = learner.Policy(random_model(family).eval(), 0.7)
    if fits:
        learner.check_forward(policy, "MODEL", accelerator)
        policy.train()  # with dropout
    if family != "gemma4_text":
        assert "nats per token from transformers' own" in exits(
            learner.check_forward, policy, "MODEL", accelerator
        )


@pytest.mark.parametrize("flaw", ["positions", "adapter", ""])
def test_the_check_sees_long_rows_and_the_adapter(base, flaw, exits, monkeypatch):
    """Policy alone calls the trunk with `use_cache=False`: what is wrong there is not in transformers' forward."""
    monkeypatch.setattr(learner.Policy, "reads_mask", False)
    args = train_grpo.Args(gradient_checkpointing=False, lora_r=4)
    policy = learner.Policy(model.load_trained(BASE, args), 0.7)
    before = {name: weight.clone() for name, weight in policy.named_parameters()}

    def spoil(trunk, values, options):
        is_policy = options.get("use_cache") is False
        if is_policy and flaw == "positions":
            options["position_ids"] = torch.arange(options["input_ids"].size(1))[None] % 300
        for layer in trunk.modules():
            if hasattr(layer, "lora_A"):
                layer._disable_adapters = is_policy and flaw == "adapter"
        return values, options

    policy.model.get_base_model().base_model.register_forward_pre_hook(spoil, with_kwargs=True)
    check = (learner.check_forward, policy, "MODEL", model.start_accelerator("float32"))
    if flaw:
        assert "from transformers' own" in exits(*check)
    else:
        learner.check_forward(*check[1:])
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


def test_a_token_without_an_embedding_ends_the_run(exits):
    """A word was added to the tokenizer, and the model not resized; special ones never come."""
    tokenizer = chat.load_tokenizer(BASE)
    chat.prepare_tokenizer(tokenizer, "think")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    model.check_context(BASE, tokenizer, 100, "--max-length")
    tokenizer.add_tokens(["zwieback"])
    error = exits(model.check_context, BASE, tokenizer, 100, "--max-length")
    assert "'zwieback' as id 284" in error and "resize_token_embeddings" in error


def test_a_model_of_another_kind_is_refused(exits):
    error = exits(model.load_trained, REWARD_MODEL, RunArgs(gradient_checkpointing=False))
    assert "as LlamaForCausalLM, 1 weights are left over, e.g. score.weight" in error
    config = random_model("olmo2").config
    assert "no AutoModelForTokenClassification of type olmo2" in exits(
        model.without_weights, AutoModelForTokenClassification, config
    )


def test_heads_compute_in_float32(bfloat16_accelerator):
    """Values near 20 that are 0.01 apart are told apart under autocast."""
    args = RunArgs(gradient_checkpointing=False)
    critic = model.load_trained(BASE, args, None, AutoModelForTokenClassification, "TOKEN_CLS")
    critic.score.bias.data.fill_(20.0)
    critic.score.weight.data.normal_(std=0.01)
    critic = learner.Learner(critic, bfloat16_accelerator, 100, 1e-3, 0.0)
    assert len(critic.model(torch.arange(5, 105)[None]).logits.unique()) > 90


def test_a_loss_mask_takes_advantages_alone(completions):
    """The KL, the lengths and what is logged keep all tokens that the policy wrote: here all but the first."""
    n = len(completions[0].ids)
    one = dataclasses.replace(completions[0], loss_mask=[0] * n, policy_mask=[0] + [1] * (n - 1))
    batch = learner.collate([one], "cpu")
    assert batch["policy_mask"].tolist() == [one.policy_mask] and one.row()["n_tokens"] == n - 1
    assert not batch["advantages"].any() and any(one.advantages)
    masked = dataclasses.replace(completions[1], loss_mask=[0] * len(completions[1].ids))
    batch = learner.collate([completions[0], masked], "cpu")  # one has a mask, one has none
    assert batch["advantages"][0].any() and not batch["advantages"][1].any()
    one.advantages = []  # before they are known
    assert "advantages" not in learner.collate([one], "cpu")
    one.loss_mask = [0]
    with pytest.raises(ValueError, match=f"loss_mask has 1 values for {n} tokens"):
        learner.collate([one], "cpu")


# --- log-probabilities


SOFTCAP = 3.0  # of a Gemma 2


def all_logprobs(model, ids: list[int], n: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """Returns log-probabilities (n, V) at the last `n` tokens of one row, and the entropies (n,)."""
    logits = model(torch.tensor([ids])).logits[0, -n - 1 : -1]
    every = (SOFTCAP * torch.tanh(logits / SOFTCAP) / temperature).log_softmax(-1)
    return every, -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("at_once", [2**27, 283 * 7])
def test_logprobs_entropies_and_gradients_are_those_of_the_logits(
    at_once, base, completions, batch, monkeypatch
):
    """Also a few tokens at a time, as for large vocabularies."""
    monkeypatch.setattr(learner, "LOGITS_AT_ONCE", at_once)
    model = base.double()  # in float64 rounding hides nothing
    model.config.final_logit_softcapping = SOFTCAP
    mask = batch[2].bool()
    weights = torch.randn(2, *mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda kept: kept
    ):
        found = learner.Policy(model, 0.7)(*batch, entropy_gradient=True)
    of_logits = [tensor for tensor in kept if tensor.size()[-1:] == (283,)]
    assert bool(of_logits) == (at_once == 2**27)  # else the backward pass computes them again
    gradients = []
    rows = []
    for one in completions:
        every, entropies = all_logprobs(model, one.prompt_ids + one.ids, len(one.ids), 0.7)
        rows.append((every.gather(-1, torch.tensor(one.ids)[:, None])[:, 0], entropies))
    expected = [pad_sequence(values, batch_first=True) for values in zip(*rows)]
    for logprobs, entropies in (found, expected):
        model.zero_grad()
        ((weights[0] * logprobs).sum() + (weights[1] * entropies).sum()).backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-9, atol=1e-9)
        assert not ours[~mask].any()
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-8)
    _, entropies = learner.Policy(model, 0.7)(*batch)
    assert not entropies.requires_grad  # for the log alone


def test_statistics_of_entropy(base, completions):
    base.config.final_logit_softcapping = SOFTCAP
    policy = learner.Learner(learner.Policy(base, 0.7), model.start_accelerator(), 100, 0.0, 0.0)
    unsupervised.set_entropy_statistics(policy, completions)
    last = completions[-1]
    logprobs, entropies = all_logprobs(base, last.prompt_ids + last.ids, len(last.ids), 0.7)
    kl = (-math.log(logprobs.size(-1)) - logprobs).mean()
    expected = {"mean_entropy": entropies.mean().item(), "mean_kl_uniform": kl.item()}
    assert last.statistics == pytest.approx(expected, rel=1e-4)


# --- micro-batches


@pytest.mark.parametrize("max_tokens", [700, 300, 80])
@pytest.mark.parametrize("n_others", [1, 8])
def test_micro_batches_are_the_best_cut(max_tokens, n_others):
    """A smaller limit would make more of them; there are as many as another process has, if it has more."""
    rows = [90, 40, 40, 30, 12, 5, 5, 1]
    alone = learner.micro_batches(rows, max_tokens, length=int)
    assert sum(alone, []) == rows
    padded = [len(batch) * max(batch) for batch in alone]
    assert all(n <= max_tokens or len(batch) == 1 for n, batch in zip(padded, alone))
    assert len(learner.micro_batches(rows, max(padded) - 1, length=int)) > len(alone) or max(padded) == 90

    # stands for a launch in which another process has `n_others`
    two = SimpleNamespace(device="cpu", gather=lambda own: torch.tensor([own.item(), n_others]))
    batches = learner.micro_batches(rows, max_tokens, two, int)
    assert len(batches) == max(n_others, len(alone))
    assert sum(batches, []) == rows


def test_cosine_rate_of_runs_of_few_steps():
    """transformers' rates, whose warm-up rounds up; but a single step trains."""
    rates = {n: [learner.cosine_rate(1.0, step, n, 0.05) for step in range(1, n + 1)] for n in (1, 3)}
    assert rates == {1: [1.0], 3: pytest.approx([0.0, 1.0, 0.5])}


def test_dealt_by_length_the_ranks_compute_alike():
    lengths = np.random.default_rng(0).lognormal(7, 0.75, 512)
    shares = []
    for rank in range(8):
        shares.append(sum(learner.deal(lengths, SimpleNamespace(process_index=rank, num_processes=8), float)))
    assert sum(shares) == pytest.approx(sum(lengths)) and max(shares) - min(shares) <= max(lengths)
