"""Closes thinking that has used its budget of tokens, so that the model goes on with its answer.

Evaluations do so with --max-thinking-tokens; benchmarks/shared.py knows what closes each style of thinking. Budget
forcing (s1, arXiv 2501.19393) and the thinking budget of Qwen3 (arXiv 2505.09388) work alike, but also write words
such as "Final Answer:". Here only the closing tags are written.

In transformers' generate, `force_closing` sets the scores of the next token. vLLM's model runners for CPU and GPU
take different logits processors, so vllm_engine.py ends the request and starts another behind the closed thinking.
"""

import math
import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ThinkingBudget:
    """Says where in a completion thinking must be closed, how to tell whether it is open, and what closes it."""

    close_at: int
    """Tokens of the completion after which thinking is closed: the budget, and the tag that opens the thinking."""
    opening_tag: str
    """A turn with thinking begins with this text."""
    closed_pattern: str
    """A regular expression that matches somewhere in a turn if its thinking is closed."""
    closing: list[int]
    """Token ids that close the thinking and open the answer."""
    from_template: str = ""
    """The beginning of the turn, if the chat template has already written it."""

    def closing_after(self, ids: list[int], tokenizer) -> list[int]:
        """Returns the token ids that must follow the first `close_at` ids of a completion.

        They are [] if its thinking is closed by then, or if it has none. If the model has begun to close it, they
        are the rest of the closing tokens.
        """
        written = ids[: self.close_at]
        turn = self.from_template + tokenizer.decode(written, skip_special_tokens=False)
        has_thought = turn.lstrip().startswith(self.opening_tag)
        if not has_thought or re.search(self.closed_pattern, turn):
            return []
        for n_begun in range(len(self.closing) - 1, 0, -1):
            if written[-n_begun:] == self.closing[:n_begun]:
                return self.closing[n_begun:]
        return self.closing

    def force_closing(self, written: torch.Tensor, scores: torch.Tensor, tokenizer) -> torch.Tensor:
        """Leaves one choice to every row that must close its thinking now; a logits processor of transformers.

        Args:
            written: token ids (B, T) of the completions so far.
            scores: (B, V), of the next token; changed in place and returned.
        """
        n_since_closing = written.size(1) - self.close_at
        if not 0 <= n_since_closing < len(self.closing):
            return scores
        for row, ids in enumerate(written.tolist()):
            closing = self.closing_after(ids, tokenizer)
            if n_since_closing < len(closing):
                scores[row] = -math.inf
                scores[row, closing[n_since_closing]] = 0.0
        return scores

    def was_used_up(self, ids: list[int], tokenizer) -> bool:
        """Tells whether a completion's thinking was closed because its budget was used up."""
        if len(ids) <= self.close_at:
            return False
        closing = self.closing_after(ids, tokenizer)
        return closing != [] and ids[self.close_at : self.close_at + len(closing)] == closing
