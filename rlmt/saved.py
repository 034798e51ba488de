"""Samples completions of a saved model: in evaluations, and in the rounds of DPO."""

import contextlib
from collections.abc import Iterator, Set
from pathlib import Path

from tqdm import tqdm
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlmt.chat import Sample
from rlmt.model import load_weights
from rlmt.sampler import Sampler, Sampling, Transformers
from utils import DEVICE, compute_dtype, wants_vllm


@contextlib.contextmanager
def saved_sampler(
    model: str,
    tokenizer: Tokenizer,
    sampling: Sampling,
    max_length: int,
    log: Path,
    rollout: str = "auto",
    dtype: str = "auto",
    batch_size: int = 64,
    url: str = "",
    key_env: tuple[str, ...] = (),
    **gpus,
) -> Iterator[Sampler]:
    """Gives the sampler of a saved model: a server of vLLM, or transformers in this process; frees the model
    at the end.

    Args:
        max_length: tokens of the longest prompt and completion together, for vLLM's KV cache.
        log: file for what the server prints.
        rollout: whether vLLM samples, see `wants_vllm`.
        batch_size: completions that transformers' generate samples at once.
        url: of a vLLM server that is there already; empty: one is started.
        key_env: HOST=NAME words, the variable with the key for that server.
        gpus: options of rlmt.vllm.serve, such as `memory`; unused with `url`.
    """
    with contextlib.ExitStack() as stack:
        if url or wants_vllm(rollout):
            from rlmt.vllm import Server, serve

            if not url:
                url = stack.enter_context(serve(model, log, max_length, dtype=dtype, **gpus))
            backend = Server(model, url, key_env)
        else:
            weights, _ = load_weights(transformers.AutoModelForCausalLM, model, dtype=compute_dtype(dtype))
            backend = Transformers(tokenizer, weights.to(DEVICE), batch_size)
            del weights  # so that `close` frees them
        sampler = Sampler(backend, tokenizer, sampling, dtype)
        stack.callback(sampler.close)
        yield sampler


def generate(
    model: str,
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    sampling: Sampling,
    seed: int = 0,
    done: Set[int] = frozenset(),
    **options,
) -> Iterator[tuple[int, Sample]]:
    """Yields (index, sample) as completions of `prompts` (token ids) by a saved model end; see
    `saved_sampler`.

    Each index has its seed: neither leaving out the indices in `done` nor another number of engines changes a
    completion.
    """
    longest = max(map(len, prompts)) + sampling.max_tokens  # what vLLM's cache must hold
    if sampling.budget:  # what closes the thinking is in the second request, which asks for no fewer tokens
        longest += len(sampling.budget.closing)
    # torch and vLLM take 64 bits at most; those of DPO's rounds are longer if --seed is a date, say
    first_seed = seed % 2**32 * 1_000_003
    seeds = [first_seed + index for index in range(len(prompts))]
    with (
        saved_sampler(model, tokenizer, sampling, longest, **options) as sampler,
        tqdm(total=len(prompts) - len(done), desc="generate") as bar,
    ):
        for index, sample in sampler.sample(prompts, seeds, done):
            bar.update()
            yield index, sample
