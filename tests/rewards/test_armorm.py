"""examples/armorm.py: its scores on a tiny Llama with heads of the published names and shapes, against a
loop."""

import pytest
import torch
from conftest import tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, LlamaModel

from rlmt.scorers import load_function
from test_reward_model import conversations
from test_rewards import row

N = 19


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_folders):
    """A folder as the published one: weights of LlamaForRewardModelWithGating, a config that names foreign
    code."""
    path = tmp_path_factory.mktemp("armorm")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folders["llama_instruct"])
    config = tiny_config(tokenizer)
    trunk = LlamaModel(config)
    weights = {f"model.{name}": weight for name, weight in trunk.state_dict().items()}
    weights["regression_layer.weight"] = torch.randn(N, 32)
    weights["reward_transform_matrix"] = torch.eye(N) - 0.3 * torch.rand(N, N)
    weights["gating.logit_scale"] = torch.tensor([1.7])
    widths = [32, 24, 24, 24, N]
    for n, (width_in, width_out) in enumerate(zip(widths, widths[1:])):
        weights[f"gating.layers.{n}.weight"] = torch.randn(width_out, width_in)
        weights[f"gating.layers.{n}.bias"] = torch.randn(width_out)
    tokenizer.save_pretrained(path)
    foreign = "modeling_custom.LlamaForRewardModelWithGating"
    config.update(
        {
            "architectures": ["LlamaForRewardModelWithGating"],
            "auto_map": {"AutoModelForSequenceClassification": foreign},
            "gating_temperature": 10,
        }
    )
    config.save_pretrained(path)
    (path / "modeling_custom.py").write_text("raise RuntimeError('foreign code ran')")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@torch.no_grad()
def naive(folder, ids: list[int], header: list[int]) -> float:
    """Scores one conversation as the published code does: the gate reads the last place where `header`
    begins."""
    weights = load_file(folder / "model.safetensors")
    hidden = AutoModel.from_pretrained(folder)(torch.tensor([ids])).last_hidden_state[0]
    rewards = weights["regression_layer.weight"] @ hidden[-1]
    places = [i for i in range(len(ids)) if ids[i : i + len(header)] == header]
    x = hidden[places[-1]]
    for n in range(4):
        x = weights[f"gating.layers.{n}.weight"] @ x + weights[f"gating.layers.{n}.bias"]
        if n < 3:
            x = torch.clamp(x, min=0)
    gate = weights["gating.logit_scale"] * torch.softmax(x / 10, 0)
    return (gate @ (rewards @ weights["reward_transform_matrix"])).item()


def test_scores_are_those_of_the_published_formula(folder):
    armorm = load_function("examples/armorm.py:armorm")
    prompts, completions = conversations(12)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    header = tokenizer.encode(
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", add_special_tokens=False
    )
    expected = []
    rows = []
    for messages, text in zip(prompts, completions, strict=True):
        response = text.partition("</think>")[2].strip()
        turns = [*messages, {"role": "assistant", "content": response}]
        expected.append(naive(folder, tokenizer.apply_chat_template(turns, return_dict=False), header))
        rows.append(row(text, messages=messages))
    assert torch.tensor(expected).std() > 0.1

    loaded = armorm.__wrapped__.__globals__["load"](str(folder), "think", 4096)
    for loaded.tokens_per_batch in (1, 300, 10**6):
        assert armorm(rows, model=str(folder)) == pytest.approx(expected, abs=1e-4)
