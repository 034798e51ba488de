"""Tests what differs on a GPU: python -m pytest -m gpu tests/project/test_gpu.py

tests/conftest.py hides the card from all other tests, whose numbers are a CPU's. With GPU_TESTS_ON_CPU=1 in front of
the command these tests run on a CPU.
"""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import chat as templates
import utils
from rewards.preference import RewardModel
from rlmt import chat

BASE = "data/toy/base"
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
ANSWERS = [[20, 21, 22], [30, 31, 32, 33, 34], [40]]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        utils.DEVICE == "cpu" and "GPU_TESTS_ON_CPU" not in os.environ,
        reason="needs a GPU that pytest -m gpu sees",
    ),
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = chat.load_tokenizer(BASE)
    templates.prepare_tokenizer(tokenizer, "think")
    return tokenizer


def logprobs_on(device: str, dtype: str) -> torch.Tensor:
    """Returns the log-probabilities of ANSWERS (3, 5), in float32 or under autocast to bfloat16."""
    model = policy.Policy(AutoModelForCausalLM.from_pretrained(BASE).to(device).eval(), 1.0)
    batch = policy.collate_ids(PROMPTS, ANSWERS, 0, device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        return model(**batch)[0].float().cpu()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("bfloat16", 0.2)])
def test_log_probabilities_are_those_of_a_cpu(dtype, tolerance):
    found = logprobs_on(utils.DEVICE, dtype)
    torch.testing.assert_close(found, logprobs_on("cpu", "float32"), rtol=0, atol=tolerance)


def test_rewards_are_those_of_a_cpu():
    messages = [[{"role": "user", "content": "I have 12 dollars."}]] * 2
    texts = ["<think>\nBudget 12.\n</think>\n\nYou get 1 dish: ham.", "No."]
    scores = []
    for device in (utils.DEVICE, "cpu"):
        model = RewardModel("data/toy/reward_model", device=device, dtype="float32")
        scores.append(model.score(messages, texts))
    assert scores[0] == pytest.approx(scores[1], abs=1e-2)


def test_a_seed_draws_the_same_completions_again(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(BASE).to(utils.DEVICE)
    sampler = rollout.Sampler(rollout.Transformers(tokenizer, model), tokenizer, rollout.Sampling(1.0, 16))
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append({place: sample.ids for place, sample in sampler.sample(PROMPTS)})
    assert drawn[0] == drawn[1]


def test_a_second_engine_starts_where_the_first_was_closed(tokenizer):
    """The first frees its memory when it is closed; then the second samples in the same process."""
    pytest.importorskip("vllm")
    from rlmt.vllm import Engine

    for _ in range(2):
        engine = Engine(BASE, max_length=256, memory=0.6)
        sampler = rollout.Sampler(engine, tokenizer, rollout.Sampling(1.0, 16))
        model = policy.Policy(AutoModelForCausalLM.from_pretrained(BASE).to(utils.DEVICE), 1.0)
        sampler.sync(model)
        samples = dict(sampler.sample(PROMPTS))
        assert len(samples) == len(PROMPTS) and all(sample.ids for sample in samples.values())
        sampler.close()
        if utils.DEVICE == "cuda":
            free, total = torch.cuda.mem_get_info()
            assert free > 0.9 * total
