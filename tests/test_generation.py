"""generation.py: transformers against an argmax of our own, vLLM against transformers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import generation
import utils

PROMPTS = [
    "Hello",
    "What is 2+2 ? User",
    "a",
    "You are helpful. " * 8,
    "only then answers",
    "because why",
    "b c d e",
]


def greedy(model, ids: list[int], eos: int, n: int) -> tuple[list[int], bool]:
    """Up to `n` tokens by argmax, one forward of the whole row each."""
    out = []
    while len(out) < n and eos not in out:
        with torch.no_grad():
            out.append(model(torch.tensor([ids + out])).logits[0, -1].argmax().item())
    return out, eos in out


@pytest.fixture
def prompts_and_policy(policy):
    """Prompts, tokenizer and model; the end of turn is a token that the model says early after some of the prompts."""
    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
    prompts = [utils.encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    said = [greedy(model, p, -1, 12)[0] for p in prompts]
    ends = [sum(token in row for row in said) for token in range(len(tokenizer))]
    common = max((t for t in range(len(tokenizer)) if 0 < ends[t] < len(prompts)), key=lambda t: ends[t])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(common)
    return prompts, tokenizer, model


def generate(*args, **kwargs) -> list[tuple[str, bool, int]]:
    """What generation.generate yields, in the order of the prompts: (text, finished, number of tokens)."""
    return [
        (text, finished, len(ids)) for _, text, finished, ids in sorted(generation.generate(*args, **kwargs))
    ]


def test_generate_is_argmax_whatever_the_batch(policy, prompts_and_policy):
    prompts, tokenizer, model = prompts_and_policy
    expected = []
    for prompt in prompts:
        out, ended = greedy(model, prompt, tokenizer.eos_token_id, 12)
        expected.append((tokenizer.decode(out[:-1] if ended else out), ended, len(out)))
    assert {ended for _, ended, _ in expected} == {True, False} and len({text for text, *_ in expected}) > 3
    for batch_size in (1, 3, 64):
        assert generate(policy, prompts, tokenizer, 0.0, 12, batch_size=batch_size) == expected
    assert generate(policy, prompts[::-1], tokenizer, 0.0, 12) == expected[::-1]


def test_generate_samples_as_asked(policy, prompts_and_policy):
    prompts, tokenizer, _ = prompts_and_policy
    sample = lambda seed, **kwargs: generate(policy, prompts, tokenizer, 1.0, 12, seed=seed, **kwargs)
    assert sample(0) == sample(0) != sample(1)
    assert sample(0, top_p=1e-6) == generate(policy, prompts, tokenizer, 0.0, 12)


def test_generate_samples_from_the_whole_distribution(policy):
    """Not from the 50 likeliest tokens, as transformers does unasked, nor as the model's own generation config says."""
    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
    prompt = utils.encode_prompt(tokenizer, [{"role": "user", "content": "What is 2+2 ?"}])
    with torch.no_grad():
        p = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    tail = p.sort(descending=True).values[50:].sum().item()
    outs = generate(policy, [prompt] * 400, tokenizer, 1.0, 1, batch_size=400)
    top = {tokenizer.decode([t]) for t in p.topk(50).indices.tolist()}
    share = sum(text not in top for text, *_ in outs) / 400
    assert tail > 0.05 and abs(share - tail) < 4 * (tail * (1 - tail) / 400) ** 0.5 + 0.02


def test_generate_stops_at_either_end(policy, prompts_and_policy):
    """At the end of turn, and at what the tokenizer had for an end, as a base model writes it."""
    prompts, tokenizer, model = prompts_and_policy
    own, turn = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")
    utils.prepare_tokenizer(tokenizer, "think")
    assert tokenizer.eos_token_id == turn and tokenizer.stop_ids == sorted([own, turn])
    expected = [greedy(model, prompt, own, 12) for prompt in prompts]
    assert any(ended for _, ended in expected) and not any(turn in out for out, _ in expected)
    got = generate(policy, prompts, tokenizer, 0.0, 12)
    assert [(ended, n) for _, ended, n in got] == [(ended, len(out)) for out, ended in expected]
    assert [text for text, *_ in got] == [
        tokenizer.decode(out[:-1] if ended else out) for out, ended in expected
    ]


def test_generate_stops_at_a_string(policy, prompts_and_policy):
    """Neither text nor count of a row that stopped early hold the padding of its batch."""
    prompts, tokenizer, model = prompts_and_policy
    tokenizer.eos_token = "<|eot_id|>"
    rows = [greedy(model, p, tokenizer.eos_token_id, 12)[0] for p in prompts]
    stop = tokenizer.decode(rows[0][4:6])
    assert "\ufffd" not in stop and stop
    expected = []
    for row in rows:
        n = next((n for n in range(1, len(row) + 1) if stop in tokenizer.decode(row[:n])), len(row))
        expected.append((tokenizer.decode(row[:n]), stop in tokenizer.decode(row[:n]), n))
    assert {ended for _, ended, _ in expected} == {True, False}
    for batch_size in (1, 64):
        assert generate(policy, prompts, tokenizer, 0.0, 12, batch_size=batch_size, stop=stop) == expected


def test_vllm_and_transformers_say_the_same():
    """Greedy, ended by the tokenizer or by a string, and asked twice of one engine, the second time without what is done. The
    toy base model, as vLLM's CPU build has no attention for heads as small as the tiny model's."""
    tokenizer, folder = AutoTokenizer.from_pretrained("data/toy/base"), "data/toy/base"
    utils.prepare_tokenizer(tokenizer, "plain")
    prompts = [utils.encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    stop = tokenizer.decode(next(generation.generate(folder, prompts[:1], tokenizer, 0.0, 16))[3][3:6])
    expected = sorted(generation.generate(folder, prompts, tokenizer, 0.0, 16, stop=stop))
    assert {finished for _, _, finished, _ in expected} == {True, False}, expected
    sampler = generation.Sampler(
        folder, tokenizer, 0.0, 16, 1.0, stop, use_vllm=True, max_length=max(map(len, prompts)) + 16
    )
    assert sorted(sampler.complete(prompts, list(range(7)))) == expected
    assert sorted(sampler.complete(prompts, list(range(7)), done={0, 3})) == [
        row for row in expected if row[0] not in (0, 3)
    ]


def test_policy_folder_asks_for_other_sampling(policy):
    """Else the tests above show nothing."""
    with open(f"{policy}/generation_config.json") as f:
        assert json.load(f)["repetition_penalty"] == 3.0
