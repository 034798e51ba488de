"""ArmoRM as a reward (RLHFlow/ArmoRM-Llama3-8B-v0.1, arXiv 2406.12845), from its published weights.

    python -m examples.armorm               # scores the example of the model card, as a check; 15 GB of weights
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_grpo.py \\
        --preset paper --rewards examples/armorm.py:armorm:1 --model results/sft-think/model \\
        --out results/rlmt-armorm

The model comes with code for its head, which is not run here. A Llama trunk gives hidden states h:

    rewards  r = W h(last token)                           19 objectives, such as helpsteer-helpfulness
    gate     g = s * softmax(MLP(h(end of prompt)) / 10)   three hidden layers with ReLU
    score    g . (r T)                                     T takes the objectives' share of verbosity out

W is regression_layer, the MLP gating.layers, s gating.logit_scale, T reward_transform_matrix. `end of prompt`
is the token <|eot_id|> before the response's header, so the weights of the objectives depend on the prompt
alone. The heads are computed in float32; the model card computes them in bfloat16.

Every process holds the model, 15 GiB in bfloat16, in addition to what --dry-run prints.
"""

import functools
from pathlib import Path

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import load_tokenizer
from rlmt.model import load_weights
import huggingface_hub
import torch
from accelerate import PartialState
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

from utils import DTYPE
from rlmt.reward_model import TOKENS_PER_BATCH, RewardModel, pad_right

ARMORM = "RLHFlow/ArmoRM-Llama3-8B-v0.1"
# Ends the prompt and opens the response. The published code, too, finds the end of the prompt by these
# tokens.
HEADER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


def armorm(rows, model=ARMORM, think_format="think", max_length=4096):
    """Scores the response of each row, well-formed or not (see utils.response_to_score).

    Args:
        model: folder or hub name.
        think_format: that of the run.
        max_length: tokens that the model reads (model card: 4096). The end of a longer response is cut off.
    """
    loaded = load(model, think_format, max_length)
    return loaded.score([row["messages"] for row in rows], [row["text"] for row in rows])


class ArmoRM(RewardModel):
    """The trunk and the two heads, on this process's device; conversations are read and batched as any reward
    model's."""

    def __init__(self, path: str, think_format: str, max_length: int):
        device = PartialState().device
        self.reward_on = "response"
        self.think_format = think_format
        self.max_length = max_length
        self.tokens_per_batch = TOKENS_PER_BATCH[device.type]
        self.cut = []
        self.tokenizer = load_tokenizer(path)
        self.header = self.tokenizer(HEADER, add_special_tokens=False)["input_ids"]
        self.heads = read_heads(path, device)
        model, _ = load_weights(AutoModelForSequenceClassification, path, dtype=DTYPE, new_head=True)
        trunk = model.base_model  # the heads are read apart
        self.trunk = trunk.to(device).eval()
        self.temperature = getattr(trunk.config, "gating_temperature", 10)  # the default of its code

    def _forward(self, rows: list[list[int]]) -> list[float]:
        rewards, gates = self.objectives(rows)
        return (gates * (rewards @ self.heads["reward_transform_matrix"])).sum(1).tolist()

    @torch.inference_mode()
    def objectives(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rewards and their gates, both (B, objectives), of conversations given as token ids."""
        ids, mask = pad_right(rows, 0, self.trunk.device)
        hidden = self.trunk(ids, attention_mask=mask).last_hidden_state
        each_row = torch.arange(len(rows))
        last_token = hidden[each_row, [len(row) - 1 for row in rows]].float()
        end_of_prompt = hidden[each_row, [self.end_of_prompt(row) for row in rows]].float()
        return last_token @ self.heads["regression_layer.weight"].T, self.gate(end_of_prompt)

    def end_of_prompt(self, ids: list[int]) -> int:
        """Returns where the header of the response begins; ValueError if it is nowhere."""
        for start in range(len(ids) - len(self.header), -1, -1):
            if ids[start : start + len(self.header)] == self.header:
                return start
        raise ValueError(
            f"no {HEADER!r}: the chat template has another, or the prompt has more than max_length"
        )

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the weights of the objectives (B, objectives) from the hidden states of prompts (B,
        width)."""
        n = 0
        while f"gating.layers.{n}.weight" in self.heads:
            if n > 0:
                hidden = hidden.relu()
            hidden = (
                hidden @ self.heads[f"gating.layers.{n}.weight"].T + self.heads[f"gating.layers.{n}.bias"]
            )
            n += 1
        return self.heads["gating.logit_scale"] * torch.softmax(hidden / self.temperature, dim=1)


load = functools.cache(ArmoRM)  # once a run


def read_heads(path: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Reads all tensors outside of the trunk, in float32."""
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(huggingface_hub.snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    heads = {}
    for part in folder.glob("*.safetensors"):
        with safe_open(part, "pt") as file:
            for name in file.keys():
                if not name.startswith("model."):
                    heads[name] = file.get_tensor(name).float().to(device)
    return heads


def main() -> None:
    """Prints the marks of the model card's example, on HelpSteer's scale, next to the card's."""
    loaded = load(ARMORM, "plain", 4096)
    messages = [{"role": "user", "content": 'What are some synonyms for the word "beautiful"?'}]
    answer = "Nicely, Beautifully, Handsome, Stunning, Wonderful, Gorgeous, Pretty, Stunning, Elegant"
    rewards, _ = loaded.objectives([loaded.encode(messages, answer)])
    print("helpfulness, correctness, coherence, complexity, verbosity:", (rewards[0, :5] * 5 - 0.5).tolist())
    print("model card:", [2.78125, 2.859375, 3.484375, 1.3847656, 1.296875])


if __name__ == "__main__":
    main()
