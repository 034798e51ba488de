"""Dense rewards by hand and against naive loops; where a step ends; PRIME's formula and its learning."""

import copy
import math
from statistics import fmean

import pytest
import torch
from conftest import tiny_config
from updates import stored_completions
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rlmt import learner
from rlmt.model import start_accelerator
from rlmt import sampler as rollout

import rewards
import train_grpo
from rewards import dense

# --- advantages and steps


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


def test_a_step_is_rewarded_on_the_token_that_ends_it(tokenizer):
    """A step ends within the second token; the rewards are how much the probability rises."""
    ids = tokenizer("I have 12 dollars.", add_special_tokens=False)["input_ids"]
    first, second = [len(tokenizer.decode(ids[:n])) for n in (1, 2)]
    one = rollout.Completion("i", [], [1], ids, text=tokenizer.decode(ids))
    steps = [(first, 0.5), (first + 1, 0.25), (second + 1, 0.75)]
    values, events = dense.ProcessReward(lambda messages, text: steps, 1.0, tokenizer).token_rewards([one])
    assert values[0, :4].tolist() == [0.5, -0.25, 0.5, 0.0] and events.sum() == 3
    assert one.rewards == {"process": 0.75}


# --- PRIME; test_resume.py resumes a run with it, test_rlver.py adds token advantages to those of the outcome


def random_completions(n: int) -> list[rollout.Completion]:
    """Makes completions, every second of which is right."""
    [completions] = stored_completions(n, 1)
    for i, one in enumerate(completions):
        one.advantages = [0.25] * len(one.ids)
        one.reward = 1.0
        one.correct = float(i % 2)
    completions[0].correct = None
    return completions


def test_prime_is_the_log_ratio_and_learns_what_is_right(tokenizer, tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(tokenizer, initializer_range=0.02)).save_pretrained(tmp_path)
    args = train_grpo.Args(model=str(tmp_path), gradient_checkpointing=False, micro_batch_tokens=200)
    policy = learner.load_policy(args, args.model, None, start_accelerator(), 0.7, has_reference=True)
    part = rewards.Part("prime", 1.0, None, [], {"beta": 0.5, "learning_rate": 1e-2}, "")
    source = dense.ImplicitReward(args, part, None, policy)
    completions = random_completions(8)
    values, events = source.token_rewards(completions)
    assert values.abs().max() < 1e-5 and source.metrics["prime/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert events.sum(1).tolist() == [len(one.ids) for one in completions]

    before = AutoModelForCausalLM.from_pretrained(tmp_path)
    now = copy.deepcopy(learner.unwrap(source.learner.model))
    values, _ = source.token_rewards(completions)
    for one, found in zip(completions, values, strict=True):
        ids = torch.tensor([one.prompt_ids + one.ids])
        logprobs = []
        for model in (now, before):
            every = (model(ids).logits[0, len(one.prompt_ids) - 1 : -1] / 0.7).log_softmax(-1)
            logprobs.append(every.gather(-1, torch.tensor(one.ids)[:, None])[:, 0])
        expected = 0.5 * (logprobs[0] - logprobs[1])
        torch.testing.assert_close(found[: len(one.ids)], expected, atol=1e-5, rtol=1e-3)
        assert one.rewards["prime"] == pytest.approx(found.sum().item(), abs=1e-5)
    for _ in range(60):
        source.token_rewards(completions)
    assert source.metrics["prime/accuracy"] == 1.0 and source.metrics["prime/loss"] < 0.1
