"""ArmoRM as a reward (RLHFlow/ArmoRM-Llama3-8B-v0.1, arXiv 2406.12845), from its published weights.

    python -m examples.armorm               # scores the example of the model card, as a check; 15 GB of weights
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_grpo.py \\
        --preset paper --rewards examples/armorm.py:armorm:1 --model results/sft-think/model \\
        --out results/rlmt-armorm

The model comes with code for its head, which is not run here. A Llama trunk gives hidden states h:

    rewards  r = W h(last token)                           19 objectives, such as helpsteer-helpfulness
    gate     g = s * softmax(MLP(h(end of prompt)) / 10)   three hidden layers with ReLU
    score    g . (r T)                                     T takes the objectives' share of verbosity out

W is regression_layer, the MLP gating.layers, s gating.logit_scale, T reward_transform_matrix. `end of prompt` is
the token <|eot_id|> before the response's header, so the weights of the objectives depend on the prompt alone.
The heads are computed in float32; the model card computes them in bfloat16.

Every process holds the model, 15 GiB in bfloat16, in addition to what --dry-run prints.
"""

import functools
import json
from pathlib import Path

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import closing_ids, load_tokenizer, without_control
from rlmt.model import load_weights
import huggingface_hub
import torch
from accelerate import PartialState
from safetensors import safe_open
from transformers import AutoModel

from utils import DTYPE, fail, response_to_score
from rewards.preference import TOKENS_PER_BATCH, longest_first

ARMORM = "RLHFlow/ArmoRM-Llama3-8B-v0.1"
# Ends the prompt and opens the response. The published code, too, finds the end of the prompt by these tokens.
HEADER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


def armorm(rows, model=ARMORM, think_format="think", max_length=4096):
    """Scores the response of each row, well-formed or not (see utils.response_to_score).

    Args:
        model: folder or hub name.
        think_format: that of the run.
        max_length: tokens that the model reads (model card: 4096). The end of a longer response is cut off;
            there is no reward if nothing of it is left.
    """
    loaded = load(model)
    completions = [response_to_score(row["text"], think_format) for row in rows]
    return loaded.score([row["messages"] for row in rows], completions, max_length)


@functools.cache  # once a run
def load(path: str) -> "ArmoRM":
    return ArmoRM(path)


class ArmoRM:
    """The trunk and the two heads, on this process's device."""

    def __init__(self, path: str):
        device = PartialState().device
        self.tokenizer = load_tokenizer(path)
        heads = read_heads(path, device)
        self.regression = heads["regression_layer.weight"]
        self.transform = heads["reward_transform_matrix"]
        self.logit_scale = heads["gating.logit_scale"]
        self.gating = []  # weight and bias of each layer
        while f"gating.layers.{len(self.gating)}.weight" in heads:
            name = f"gating.layers.{len(self.gating)}"
            self.gating.append((heads[f"{name}.weight"], heads[f"{name}.bias"]))

        trunk, _ = load_weights(AutoModel, path, dtype=DTYPE)
        self.trunk = trunk.to(device).eval()
        self.temperature = getattr(trunk.config, "gating_temperature", 10)  # the default of its code
        self.header = self.tokenizer(HEADER, add_special_tokens=False)["input_ids"]

    def score(self, prompts: list[list[dict]], completions: list[str], max_length: int) -> list[float | None]:
        """Returns the scores (B,) of completions to prompts (lists of messages).

        A score is None where nothing of the completion fits into `max_length` tokens.
        """
        rows = {}  # by place: token ids, and where the prompt ends
        for place, (messages, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = self.encode(messages, completion, max_length)
            if row:
                rows[place] = row

        scores: list[float | None] = [None] * len(prompts)
        places = list(rows)
        lengths = [len(ids) for ids, _ in rows.values()]
        for batch in longest_first(lengths, TOKENS_PER_BATCH[self.trunk.device.type]):
            batch_places = [places[i] for i in batch]
            rewards, gates = self.forward([rows[place] for place in batch_places])
            batch_scores = (gates * (rewards @ self.transform)).sum(1)
            for place, score in zip(batch_places, batch_scores.tolist(), strict=True):
                scores[place] = score
        return scores

    def encode(self, messages: list[dict], completion: str, max_length: int) -> tuple[list[int], int] | None:
        """Returns the token ids of a conversation, and the place of the token that ends the prompt.

        A conversation that is too long loses the end of its completion; None if that leaves nothing of it.
        """
        turns = [*messages, {"role": "assistant", "content": completion}]
        turns = without_control(self.tokenizer, turns)
        ids = self.tokenizer.apply_chat_template(turns, return_dict=False)
        end_of_prompt = last_place(self.header, ids)
        if len(ids) <= max_length:
            return ids, end_of_prompt

        closing = closing_ids(self.tokenizer)
        n_kept = max_length - len(closing)
        if n_kept <= end_of_prompt + len(self.header):
            return None
        return ids[:n_kept] + closing, end_of_prompt

    @torch.inference_mode()
    def forward(self, rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rewards and their gates, both (B, objectives), of rows (token ids, end of prompt)."""
        device = self.trunk.device
        width = max(len(ids) for ids, _ in rows)
        padded = torch.zeros(len(rows), width, dtype=torch.long, device=device)
        mask = torch.zeros_like(padded)
        for i, (ids, _) in enumerate(rows):
            padded[i, : len(ids)] = torch.tensor(ids)
            mask[i, : len(ids)] = 1
        hidden = self.trunk(padded, attention_mask=mask).last_hidden_state

        each_row = torch.arange(len(rows), device=device)
        last_token = mask.sum(1) - 1
        end_of_prompt = torch.tensor([end for _, end in rows], device=device)
        rewards = hidden[each_row, last_token].float() @ self.regression.T
        return rewards, self.gate(hidden[each_row, end_of_prompt].float())

    def gate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the weights of the objectives (B, objectives) from the hidden states of prompts (B, width)."""
        for n, (weight, bias) in enumerate(self.gating):
            hidden = hidden @ weight.T + bias
            if n < len(self.gating) - 1:
                hidden = hidden.relu()
        return self.logit_scale * torch.softmax(hidden / self.temperature, dim=1)


def last_place(part: list[int], ids: list[int]) -> int:
    """Returns where `part` last begins in `ids`; ValueError if it is nowhere."""
    for place in range(len(ids) - len(part), -1, -1):
        if ids[place : place + len(part)] == part:
            return place
    raise ValueError(f"the chat template of this ArmoRM does not write {HEADER!r}")


def read_heads(path: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Reads all tensors outside of the trunk, in float32; exits with 2 if the folder is no ArmoRM's."""
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(huggingface_hub.snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    heads = {}
    for part in sorted(folder.glob("*.safetensors")):
        with safe_open(part, "pt") as file:
            for name in file.keys():
                if not name.startswith("model."):
                    heads[name] = file.get_tensor(name).float().to(device)
    if "regression_layer.weight" not in heads:
        fail(f"{path} is not an ArmoRM: its weights have no regression_layer.weight")
    return heads


# --- the example of the model card

OBJECTIVES = [  # the first five of 19, in the order of the weights
    "helpsteer-helpfulness",
    "helpsteer-correctness",
    "helpsteer-coherence",
    "helpsteer-complexity",
    "helpsteer-verbosity",
]
CARD = {
    "prompt": 'What are some synonyms for the word "beautiful"?',
    "response": "Nicely, Beautifully, Handsome, Stunning, Wonderful, Gorgeous, Pretty, Stunning, Elegant",
    "marks": [2.78125, 2.859375, 3.484375, 1.3847656, 1.296875],  # on HelpSteer's scale
}


def main() -> None:
    loaded = load(ARMORM)
    messages = [{"role": "user", "content": CARD["prompt"]}]
    rewards, gates = loaded.forward([loaded.encode(messages, CARD["response"], 4096)])
    marks = (rewards[0, :5] * 5 - 0.5).tolist()
    for objective, mark, published in zip(OBJECTIVES, marks, CARD["marks"], strict=True):
        print(f"{objective}: {mark:.3f}, model card {published:.3f}")
    coefficients = gates @ loaded.transform.T
    largest = coefficients.abs().max().item()
    print(f"largest coefficient: {largest:.5f}, model card 0.19922")
    print(json.dumps({"score": loaded.score([messages], [CARD["response"]], 4096)[0]}))


if __name__ == "__main__":
    main()
