"""Dense rewards by hand and against naive loops; where a step ends; PRIME's formula, its learning and its
checkpoint."""

import copy
import math
import random
from statistics import fmean

import pytest
import torch
from conftest import tiny_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rlmt import checkpoint, learner
from rlmt.model import start_accelerator
from rlmt import sampler as rollout

import rewards
import train_grpo
from rewards import dense

# --- numbers


def test_token_advantages_is_the_naive_loop():
    torch.manual_seed(0)
    values, events = torch.randn(12, 9), torch.rand(12, 9) > 0.6
    events[3] = False
    got = dense.token_advantages(values, events, 4, scale=True)
    for start in range(0, 12, 4):
        to_come = {}  # (row, k): its rewards from event k on
        for i in range(start, start + 4):
            places = events[i].nonzero().flatten().tolist()
            for k, place in enumerate(places):
                to_come[i, k] = sum(values[i, t].item() for t in places if t >= place)
        centred = {}
        for (i, k), reward in to_come.items():
            centred[i, k] = reward - fmean(other for (_, j), other in to_come.items() if j == k)
        scale = math.sqrt(fmean(value * value for value in centred.values())) + 1e-4
        for i in range(start, start + 4):
            for t in range(9):
                k = int(events[i, :t].sum())
                assert got[i, t].item() == pytest.approx(centred.get((i, k), 0.0) / scale, abs=1e-5)


# --- steps


# --- in the loops


class Lengths:
    """A source as those of dense.py: 1 on the second token, the length on the last."""

    weight = 0.5
    scaled = True

    def token_rewards(self, completions):
        values = torch.zeros(len(completions), max(len(c.ids) for c in completions))
        for n, one in enumerate(completions):
            values[n, 1] = 1.0
            values[n, len(one.ids) - 1] += len(one.ids)
        return values, values != 0


def random_completions(n: int) -> list[rollout.Completion]:
    draw = random.Random(0)
    completions = []
    for i in range(n):
        ids = draw.choices(range(5, 200), k=draw.randrange(3, 12))
        one = rollout.Completion(id=str(i), messages=[], prompt_ids=[5 + i, 6, 7, 8], ids=ids, reward=1.0)
        one.advantages = [0.25] * len(ids)
        if i > 0:
            one.correct = float(i % 2)
        completions.append(one)
    return completions


def test_grpo_adds_token_advantages_to_those_of_the_outcome():
    completions = random_completions(8)
    completions[3].reward = math.nan  # nothing is learned from it
    values, events = Lengths().token_rewards(completions)
    known = torch.tensor([[not math.isnan(one.reward)] for one in completions])
    expected = 0.25 + 0.5 * dense.token_advantages(values, events & known, 4, scale=True)
    dense.add_advantages(Lengths(), completions, 4, scale=True)
    for one, row_ in zip(completions, expected, strict=True):
        assert one.advantages == pytest.approx(row_[: len(one.ids)].tolist())
    assert completions[3].advantages == [0.25] * len(completions[3].ids)


def prime(tokenizer, folder, resume_from=None):
    """PRIME's model beside a policy that starts the same; its checkpoint folder, if it goes on from one."""
    args = train_grpo.Args(
        model=str(folder / "start"), gradient_checkpointing=False, temperature=1.0, micro_batch_tokens=40
    )
    if not (folder / "start").exists():
        torch.manual_seed(0)
        start = LlamaForCausalLM(tiny_config(tokenizer, initializer_range=0.02))
        start.save_pretrained(folder / "start")
    policy = learner.load_policy(args, args.model, None, start_accelerator(), has_reference=True)
    options = {"beta": 0.5, "learning_rate": 1e-2}
    part = rewards.Part("prime", 1.0, None, [], options, "")
    source = dense.ImplicitReward(args, part, resume_from, policy)
    if resume_from:
        checkpoint.load_optimizer(resume_from, "prime", source.learner.optimizer)
    return source


def test_prime_is_the_log_ratio_and_learns_what_is_right(tokenizer, tmp_path):
    source = prime(tokenizer, tmp_path)
    completions = random_completions(8)
    values, events = source.token_rewards(completions)
    assert values.abs().max() < 1e-5 and source.metrics["prime/loss"] == pytest.approx(math.log(2), abs=1e-5)
    for one, marks in zip(completions, events, strict=True):
        assert marks.sum() == len(one.ids)

    before = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    now = copy.deepcopy(learner.unwrap(source.learner.model))
    values, _ = source.token_rewards(completions)
    for one, found in zip(completions, values, strict=True):
        ids = torch.tensor([one.prompt_ids + one.ids])
        n = len(one.prompt_ids)
        with torch.no_grad():
            ratios = [m(ids).logits[0, n - 1 : -1].log_softmax(-1) for m in (now, before)]
        picked = [r[torch.arange(len(one.ids)), one.ids] for r in ratios]
        torch.testing.assert_close(found[: len(one.ids)], 0.5 * (picked[0] - picked[1]), atol=1e-5, rtol=1e-3)
        assert one.rewards["prime"] == pytest.approx(found.sum().item(), abs=1e-5)
    for _ in range(60):
        source.token_rewards(completions)
    assert source.metrics["prime/accuracy"] == 1.0 and source.metrics["prime/loss"] < 0.1


def test_prime_goes_on_from_a_checkpoint(tokenizer, tmp_path):
    """Three steps, and two steps and one after a resume: the same bits."""
    completions = random_completions(8)
    whole = prime(tokenizer, tmp_path)
    for _ in range(2):
        whole.token_rewards(completions)
    checkpoint.save_weights(tmp_path / "saved" / "prime", whole.learner.model, merge=False)
    checkpoint.save_optimizer(tmp_path / "saved", "prime", whole.learner.optimizer)
    whole.token_rewards(completions)
    resumed = prime(tokenizer, tmp_path, resume_from=tmp_path / "saved")
    resumed.token_rewards(completions)
    expected = learner.unwrap(whole.learner.model).state_dict()
    for name, weight in learner.unwrap(resumed.learner.model).state_dict().items():
        assert torch.equal(weight, expected[name]), name
