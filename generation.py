"""Completions of a saved model by vLLM or transformers: evaluations, local judges, DPO. (RL rollouts: rollout.py.)"""

import contextlib
import gc
import os
from bisect import bisect_left
from collections.abc import Iterator, Set

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

import faults
from utils import DEVICE, DTYPE, SAFE

Completion = tuple[
    int, str, bool, list[int]
]  # the prompt's index, text without its end, whether it has one, token ids


@contextlib.contextmanager
def own_gpu():
    """vLLM's engine is a process of its own, on this process's GPU, and no part of the launched group."""
    before = dict(os.environ)
    for name in [
        n
        for n in os.environ
        if n.startswith(("TORCHELASTIC", "MASTER_")) or n.endswith(("RANK", "WORLD_SIZE"))
    ]:
        del os.environ[name]
    if torch.cuda.is_available():
        visible = before.get(
            "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))
        ).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[PartialState().local_process_index]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Sampler:
    """A loaded model, to be asked more than once.

    No sampling parameter is taken from the model's folder; temperature 0 is greedy. Completions end at the tokenizer's end of
    turn or at `stop`, without either at `max_tokens`. `max_length`: tokens of the longest prompt and completion, with vLLM.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        temperature: float,
        max_tokens: int,
        top_p: float = 1.0,
        stop: str = "",
        use_vllm: bool = False,
        max_length: int | None = None,
        vllm_memory: float = 0.85,
    ):
        self.tokenizer, self.stop, self.use_vllm = tokenizer, stop, use_vllm
        self.ends = getattr(
            tokenizer, "stop_ids", [tokenizer.eos_token_id]
        )  # a judge's tokenizer is as its folder has it
        if use_vllm:
            from vllm import LLM  # seconds to import

            gc.collect()
            torch.cuda.empty_cache()  # what this process holds on to is missing in vLLM's, which is another
            self.sampling = dict(
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                ignore_eos=True,
                stop_token_ids=self.ends,
                stop=stop or None,
                include_stop_str_in_output=True,
            )
            with own_gpu():
                self.engine = LLM(
                    model,
                    load_format="safetensors",
                    generation_config="vllm",
                    dtype=DTYPE,
                    enforce_eager=DEVICE == "cpu",
                    max_model_len=max_length,
                    gpu_memory_utilization=vllm_memory,
                ).llm_engine
        else:
            self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPE, **SAFE).to(DEVICE).eval()
            self.policy.get_input_embeddings().register_forward_pre_hook(lambda *_: faults.beat())
            sampling = dict(do_sample=True, temperature=temperature, top_p=top_p, top_k=0)
            sampling = (sampling if temperature else {"do_sample": False}) | {"max_new_tokens": max_tokens}
            sampling |= {"eos_token_id": self.ends, "pad_token_id": self.ends[0]}
            self.policy.generation_config = GenerationConfig(**sampling)

    def ended(self, ids: list[int]) -> bool:
        return bool(ids) and (
            ids[-1] in self.ends or bool(self.stop) and self.stop in self.tokenizer.decode(ids)
        )

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids[:-1] if ids[-1] in self.ends else ids)

    def complete(
        self, prompts: list[list[int]], seeds: list[int], batch_size: int = 64, done: Set[int] = frozenset()
    ) -> Iterator[Completion]:
        """One completion for each of the prompts (token ids), as they are done. Leaving out those in `done` changes no
        other."""
        if self.use_vllm:
            from vllm import SamplingParams

            for i in sorted(
                set(range(len(prompts))) - done
            ):  # a seed each: equal prompts must not get equal completions
                params = SamplingParams(**self.sampling, seed=seeds[i])
                self.engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, params)
            while self.engine.has_unfinished_requests():
                faults.beat()
                for out in (o for o in self.engine.step() if o.finished):
                    ids = list(out.outputs[0].token_ids)
                    yield int(out.request_id), self.text(ids), out.outputs[0].finish_reason == "stop", ids
            return
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        for rows in (b for b in batches if not done >= set(b)):
            torch.manual_seed(seeds[rows[0]])
            batch = self.tokenizer.pad(
                {"input_ids": [prompts[r] for r in rows]}, padding_side="left", return_tensors="pt"
            )
            w = batch["input_ids"].size(1)
            at_stop = lambda ids, *_, w=w, **__: ids.new_tensor(
                [self.ended(r) for r in ids[:, w:][:, -16:].tolist()]
            ).bool()
            outs = self.policy.generate(
                **batch.to(DEVICE), stopping_criteria=[at_stop] if self.stop else None
            )[:, w:]
            for r, row in zip(rows, outs.tolist()):
                ids = row[
                    : bisect_left(range(len(row)), True, key=lambda n, row=row: self.ended(row[:n]))
                ]  # no padding
                yield r, self.text(ids), self.ended(ids), ids


def generate(
    model: str,
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    temperature: float,
    max_tokens: int,
    top_p: float = 1.0,
    use_vllm: bool = False,
    seed: int = 0,
    batch_size: int = 64,
    stop: str = "",
    vllm_memory: float = 0.85,
    done: Set[int] = frozenset(),
) -> Iterator[Completion]:
    """Loads the model, and one completion for each of the prompts (token ids), as they are done. Leaving out those in `done`
    changes no other."""
    longest = max(map(len, prompts)) + max_tokens
    sampler = Sampler(model, tokenizer, temperature, max_tokens, top_p, stop, use_vllm, longest, vllm_memory)
    seeds = [seed * 1_000_003 + i for i in range(len(prompts))]
    with tqdm(total=len(prompts), desc="generate", unit="completion") as bar:
        for completion in sampler.complete(prompts, seeds, batch_size, done):
            bar.update()
            yield completion
