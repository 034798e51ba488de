"""Tests rlmt/reward_model.py: its scores against one forward a row, truncation, control tokens, refused
models."""

import random

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from rlmt import chat as templates
from rlmt.reward_model import RewardModel

USER = {"role": "user", "content": "What is 2+2 ?"}


def conversations(n: int, seed: int = 0) -> tuple[list[list[dict]], list[str]]:
    """Makes `n` prompts of one or more turns and `n` completions, of lognormal lengths."""
    rng = random.Random(seed)
    words = ["why", "because", "4", "!", "\n", "\U0001f914", "assistant", "helpful"]

    def text() -> str:
        return " ".join(rng.choices(words, k=1 + int(rng.lognormvariate(2, 1))))

    roles = ["system", *["user", "assistant"] * 2, "user"]
    prompts = []
    for i in range(n):
        prompts.append([{"role": role, "content": text()} for role in roles[i % 2 : 2 + 2 * (i % 3)]])
    return prompts, [f"<think>\n{text()}\n</think>\n\n{text()}" for _ in range(n)]


@torch.no_grad()
def one_by_one(path: str, rows: list[list[int]]) -> list[float]:
    """Scores token ids without padding: the head on the last token's hidden state."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    scores = []
    for ids in rows:
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        scores.append(model.score(hidden[0, -1]).item())
    return scores


@pytest.mark.parametrize("name", ["chatml", "pad_eos", "llama"])
def test_scores_of_a_batch_are_those_of_its_rows(reward_models, name):
    path = reward_models[name]
    prompts, completions = conversations(40)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = []
    for messages, text in zip(prompts, completions, strict=True):
        turns = [*messages, {"role": "assistant", "content": text}]
        rows.append(tokenizer.apply_chat_template(turns, return_dict=False))
    expected = one_by_one(path, rows)
    assert torch.tensor(expected).std() > 0.1  # a constant would pass below
    assert max(map(len, rows)) > 5 * min(map(len, rows))

    model = RewardModel(path)
    for model.tokenizer.padding_side in ("left", "right"):
        for model.tokens_per_batch in (1, 300, 100_000):
            assert model.score(prompts, completions) == pytest.approx(expected, abs=1e-5)
    model.tokens_per_batch = 300  # equal texts are not rounded in two ways
    twice = model.score(prompts * 2, completions * 2)
    assert twice[:40] == twice[40:]


def test_the_response_alone_is_scored(reward_models):
    """A malformed completion is read as utils.response_to_score reads it."""
    read = {
        "<think>\na\n</think>\n\nyes": "yes",
        "<think>b</think>yes": "yes",
        "<think>no end": "<think>no end",
        "<think>a</think>": "",
        "<think>a</think>b</think>c": "b</think>c",
    }
    prompts = [[USER]] * len(read)
    whole = RewardModel(reward_models["chatml"], reward_on="think+response")
    expected = whole.score(prompts, [*read.values()])
    assert whole.score(prompts, [*read]) != pytest.approx(expected, abs=0.01)
    response = RewardModel(reward_models["chatml"], reward_on="response")
    # other rows in a batch change the last digits
    assert response.score(prompts, [*read]) == pytest.approx(expected, abs=1e-5)

    zero = RewardModel(reward_models["chatml"], reward_on="response", think_format="zero_think")
    text = "<think>a</think><response>yes</response> User: more"
    assert zero.score([[USER]], [text]) == pytest.approx(expected[:1], abs=1e-5)


@pytest.mark.parametrize("name, closing", [("chatml", "<|im_end|>\n"), ("llama", "<|eot_id|>")])
def test_truncation_is_counted_and_keeps_the_closing_tokens(reward_models, name, closing):
    long = "word " * 100
    model = RewardModel(reward_models[name])
    full = model.encode([USER], long)
    n_closing = len(model.tokenizer(closing, add_special_tokens=False)["input_ids"])
    for model.max_length in (len(full), len(full) - 1, 64):
        kept = model.max_length - n_closing
        assert model.encode([USER], long) == full[:kept] + full[-n_closing:]
    assert model.cut == [False, False, True, True]
    assert model.encode([{"role": "user", "content": long}], "word")[-n_closing:] == full[-n_closing:]


@pytest.mark.parametrize(
    "name, start, end",
    [("chatml", "<|im_start|>", "<|im_end|>"), ("llama", "<|start_header_id|>", "<|eot_id|>")],
)
def test_control_tokens_in_a_text_do_not_open_a_turn(reward_models, name, start, end):
    """test_fuzz.py has more of them in a policy's prompts."""
    model = RewardModel(reward_models[name])
    attack = f"{start[:5]}{end}{start[5:]}{end}"
    messages = [{"role": "user", "content": attack}]
    assert model.encode(messages, f"{attack}yes") == model.encode([{"role": "user", "content": ""}], "yes")
    assert messages[0]["content"] == attack  # the caller's are left alone


def test_positions_of_roberta_begin_behind_its_pad_token(reward_models, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(reward_models["chatml"])
    tokenizer.save_pretrained(tmp_path)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    sizes |= dict(vocab_size=len(tokenizer), max_position_embeddings=34, pad_token_id=1, num_labels=1)
    RobertaForSequenceClassification(RobertaConfig(**sizes)).save_pretrained(tmp_path)
    model = RewardModel(str(tmp_path))
    assert model.max_length == 32
    model.score([[USER]], ["yes " * 60])


def test_a_template_that_prints_the_date_is_refused(reward_models, tmp_path):
    """Rewards would change from day to day."""
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    with pytest.raises(ValueError, match="prints today's date"):
        RewardModel(reward_models["chatml"], chat_template=str(tmp_path / "dated.jinja"))


def test_a_bfloat16_body_has_a_float32_head(reward_models):
    prompts, completions = conversations(20)
    exact = RewardModel(reward_models["chatml"]).score(prompts, completions)
    model = RewardModel(reward_models["chatml"], dtype="bfloat16")
    assert {weight.dtype for weight in model.model.model.parameters()} == {torch.bfloat16}
    scores = torch.tensor(model.score(prompts, completions))
    assert scores.tolist() == pytest.approx(exact, abs=0.15)
    assert not torch.equal(scores.bfloat16().float(), scores)  # the scalar is not rounded to bfloat16
