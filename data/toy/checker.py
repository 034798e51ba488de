"""A reward that thinks: the toy base model writes a check of an answer, and the marks in it are the reward.

    python train_grpo.py --preset toy --model MODEL --rewards preference:1 data/toy/checker.py:check:0.5

The base model was pretrained on answers by all kinds of writers with a check line by line behind them
(data/toy/models.py:audit): "Check it. ham is meat ok, 5 ok, leaves 10 ok. ...". A scalar reward model reads its
score off the last token, and misses wrong sums; this one works them out before it marks them.
"""

import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils import SAFE

BASE = Path(__file__).parent / "base"
MAX_TOKENS = 160  # the longest check of five dishes has about 110
WORST = 5
"""Points marked bad from which on it does not get worse; also of an answer that cannot be checked."""


@functools.cache
def load() -> tuple:
    tokenizer = AutoTokenizer.from_pretrained(BASE, padding_side="left", trust_remote_code=False)
    return tokenizer, AutoModelForCausalLM.from_pretrained(BASE, **SAFE).eval()


def check(rows: list[dict]) -> list[float]:
    """Returns minus the number of points that the check of each response marks as bad, at least -WORST."""
    return [-WORST if " ok" not in text else -min(WORST, text.count(" bad")) for text in write_checks(rows)]


@torch.inference_mode()
def write_checks(rows: list[dict]) -> list[str]:
    """Returns the check that the base model writes of each row's response, greedily."""
    tokenizer, model = load()
    texts = []
    for row in rows:
        prompt = row["messages"][-1]["content"]
        texts.append(f"User: {prompt}\n\nSomebody wrote: {row['response']}\n\nCheck it.")
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ids = model.generate(**batch, max_new_tokens=MAX_TOKENS, do_sample=False)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
