"""Tests rewards/scorer.py with the toy's reward model and functions of our own."""

import pytest

from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import chat as templates
from rlmt.data import write_jsonl
import train_grpo
from rewards.scorer import Scorer

GOOD = "<think>\nBudget 12.\n</think>\n\nYou get 1 dish: {}."
OWN_REWARDS = """
def length(messages, response):
    return len(response)
"""
PROMPT = {"id": "p", "messages": [{"role": "user", "content": "I have 12 dollars."}]}


@pytest.fixture(scope="module")
def accelerator():
    return policy.start_accelerator()


@pytest.fixture
def scorer(accelerator, tokenizer, tmp_path):
    """scorer(**args): a Scorer with these arguments of train_grpo.py; functions of OWN_REWARDS are in
    own.py."""
    (tmp_path / "own.py").write_text(OWN_REWARDS)
    write_jsonl(tmp_path / "prompts.jsonl", [PROMPT])

    def make(**args) -> Scorer:
        args |= {"preset": "toy", "reward_model": "data/toy/reward_model", "think_format": "think"}
        args = train_grpo.Args(prompts=str(tmp_path / "prompts.jsonl"), **args)
        made = Scorer(args, args.rewards, tokenizer, accelerator, 4, args.on_bad_format, args.format_margin)
        made.load(tmp_path)
        return made

    return make


@pytest.fixture
def completions(tokenizer) -> list[rollout.Completion]:
    """Two groups of four; the second and the sixth are malformed, in two ways."""
    dishes = ("steak", "ham", "cod", "tuna", "custard", "lasagna", "bacon", "ribs")
    texts = [GOOD.format(dish) for dish in dishes]
    texts[1] = "You get 1 dish."
    texts[5] = texts[5] + "</think>"
    found = []
    for text in texts:
        sample = rollout.Sample(templates.encode_completion(tokenizer, text), None, True)
        found.append(rollout.read_completion(tokenizer, "think", PROMPT | {"prompt_ids": [5]}, sample))
    return found


@pytest.mark.parametrize("on_bad_format", ["score", "null", "floor"])
def test_what_a_malformed_completion_gets(scorer, completions, tmp_path, on_bad_format):
    made = scorer(on_bad_format=on_bad_format, format_margin=2.0, gold=f"{tmp_path}/own.py:length")
    texts = [completion.text for completion in completions]
    if on_bad_format == "null":  # the strict mode asks for what opens the response, no more
        texts[1] = "[NULL]"
    expected = made.reward_model.score([PROMPT["messages"]] * 8, texts)
    if on_bad_format == "floor":
        for bad, good in ((1, (0, 2, 3)), (5, (4, 6, 7))):
            expected[bad] = min(expected[place] for place in good) - 2.0
    made.set_rewards(completions, None)
    assert [completion.reward for completion in completions] == pytest.approx(expected, abs=1e-5)
    for place, completion in enumerate(completions):
        is_bad = place in (1, 5)
        assert completion.rewards["gold"] == (not is_bad) * len(completion.response)  # as in an evaluation
        scored = None if is_bad and on_bad_format == "floor" else completion.reward
        assert completion.rewards["preference"] == scored
