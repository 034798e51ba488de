"""Scores what the policy wrote by a reward model: the reward `preference`."""

from pathlib import Path

import torch
from accelerate import PartialState
from torch import nn
from torch.nn.utils.rnn import pad_sequence
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlmt.chat import (
    closing_ids,
    context_length,
    load_config,
    load_tokenizer,
    render,
    render_answers,
    without_control,
)
from rlmt.learner import unwrap
from rlmt.model import check_embeddings, float32_head, load_weights
from utils import DEVICE, compute_dtype, join_thinking, or_fail, response_to_score

# tokens in one forward, padding included; larger batches were no faster on a CPU
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384}


def check_template(tokenizer: Tokenizer, path: str, reward_on: str, think_format: str) -> None:
    """Raises ValueError if the chat template of a reward model cannot show it such completions."""
    remedy = (
        "give it one: for --rewards preference by --reward-args preference.chat_template=FILE, in train_reward.py by "
        "--chat-template FILE, else as chat_template.jinja in its folder"
    )
    if not tokenizer.chat_template:
        raise ValueError(f"reward model {path} has no chat template; {remedy}")
    if "strftime_now" in tokenizer.chat_template:
        raise ValueError(
            f"the chat template of reward model {path} prints today's date, on which rewards would depend; {remedy}"
        )
    text = join_thinking("Z", "Y", think_format)
    if reward_on == "think+response" and text not in render_answers(tokenizer, text):
        raise ValueError(
            f"the chat template of reward model {path} drops or changes thinking, so it cannot be scored; {remedy}, "
            "or take --reward-on response"
        )


class RewardModel:
    """A sequence classifier with one output, with its own tokenizer and chat template.

    Args:
        path: folder or hub name.
        reward_on: "think+response" scores everything that the policy wrote, tags included. "response" scores
            the response alone (paper, equation 3), which utils.response_to_score finds.
        think_format: the policy's, a key of utils.THINK_FORMATS.
        chat_template: a Jinja file, for a reward model that has none.
        dtype: that of weights and computation, see utils.compute_dtype.

    `cut` says of each encoded text whether it was too long; Scorer resets it.
    """

    def __init__(
        self,
        path: str,
        reward_on: str = "think+response",
        think_format: str = "think",
        chat_template: str = "",
        device: str = DEVICE,
        dtype: str = "auto",
    ):
        self.reward_on = reward_on
        self.think_format = think_format
        self.tokenizer = self.check(path, chat_template, reward_on, think_format)
        model, _ = load_weights(transformers.AutoModelForSequenceClassification, path, compute_dtype(dtype))
        self.model = model.to(device).eval()
        float32_head(self.model)
        self.max_length = context_length(self.model.config)
        for module in self.model.modules():
            positions = getattr(module, "position_embeddings", None)
            if getattr(positions, "padding_idx", None) is not None:  # RoBERTa counts from behind it
                self.max_length -= positions.padding_idx + 1
        self.tokens_per_batch = TOKENS_PER_BATCH[self.model.device.type]
        self.cut = []

    @staticmethod
    def check(path: str, chat_template: str, reward_on: str, think_format: str) -> Tokenizer:
        """Returns the tokenizer with its chat template; checks the model without loading weights.

        The arguments are those of the class. Raises ValueError if it cannot score such completions. Exits
        with 2 if the folder cannot be used.
        """
        tokenizer = load_tokenizer(path)
        config = load_config(path)
        if chat_template:
            tokenizer.chat_template = Path(chat_template).read_text()
        check_template(tokenizer, path, reward_on, think_format)
        check_embeddings(path, tokenizer)
        if config.num_labels != 1:
            raise ValueError(f"reward model {path} has {config.num_labels} outputs; it needs exactly 1")
        return tokenizer

    def encode(self, messages: list[dict], completion: str) -> list[int]:
        """Returns the token ids of a conversation in the reward model's own template.

        Tokens beyond `max_length` are cut from the end, but the tokens that close the last turn stay.
        """
        turns = [*messages, {"role": "assistant", "content": completion}]
        turns = without_control(self.tokenizer, turns)
        ids = render(self.tokenizer, turns)
        self.cut.append(len(ids) > self.max_length)
        if self.cut[-1]:
            closing = closing_ids(self.tokenizer)
            ids = ids[: self.max_length - len(closing)] + closing
        return ids

    def score(self, prompts: list[list[dict]], completions: list[str]) -> list[float]:
        """Returns the rewards (B,) of completions (all that the policy wrote) to prompts (lists of
        messages)."""
        ids = []
        for messages, text in zip(prompts, completions, strict=True):
            if self.reward_on == "response":
                text = response_to_score(text, self.think_format)
            ids.append(self.encode(messages, text))
        return self.score_ids(ids)

    @torch.inference_mode()
    def score_ids(self, ids: list[list[int]]) -> list[float]:
        """Returns the rewards (B,) of conversations given as token ids; of equal ones equal rewards."""
        rows = [tuple(row) for row in ids]
        # each once: in another batch it would be rounded otherwise, which a group's advantages would blow up;
        # those of about equal length are padded together
        left = sorted(dict.fromkeys(rows), key=len, reverse=True)
        scores = {}
        while left:
            n_rows = max(1, self.tokens_per_batch // len(left[0]))
            batch = left[:n_rows]
            left = left[n_rows:]
            scores.update(zip(batch, self._forward(list(map(list, batch))), strict=True))
        return [scores[row] for row in rows]

    def _forward(self, rows: list[list[int]]) -> list[float]:
        """Scores one batch."""
        return scores_of(self.model, rows, self.model.device).tolist()


def set_pad_token(model: nn.Module, pad: int) -> None:
    """Sets the pad token, by which a classifier finds the end of a text, and which its layers may read from an
    inner config; turns the cache of generation off."""
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = pad
        config.use_cache = False


def scores_of(model: nn.Module, rows: list[list[int]], device) -> torch.Tensor:
    """Returns the scores (B,) of texts given as token ids, padded on the right: in training and afterwards."""
    # The head reads the last token that is not the pad token, so the pad id must end no row: of one id
    # more than there are rows, one does not.
    pad = min(set(range(len(rows) + 1)) - {row[-1] for row in rows})
    set_pad_token(unwrap(model), pad)
    ids, mask = pad_right(rows, pad, device)
    logits = model(ids, attention_mask=mask).logits
    return logits[:, 0].to(torch.promote_types(logits.dtype, torch.float32))


def pad_right(rows: list[list[int]], pad: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and attention mask, both (B, width)."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), mask.to(device)


def check_preference(path: str, chat_template: str, reward_on: str, think_format: str) -> Tokenizer:
    """Returns the tokenizer of the reward model at `path`; exits with 2 if it cannot score the format of the
    run."""
    tokenizer = or_fail(RewardModel.check, path, chat_template, reward_on, think_format)
    learned_on = getattr(load_config(path), "reward_on", reward_on)  # set by train_reward.py
    if learned_on != reward_on:
        PartialState().print(f"WARNING: {path} was trained on {learned_on}, and --reward-on is {reward_on}")
    return tokenizer
