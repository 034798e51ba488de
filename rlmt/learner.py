"""Computes log-probabilities and gradients, in micro-batches, and gathers whole weights.

    policy = load_policy(args, args.model, run.checkpoint, accelerator, args.temperature, has_reference=True)
    policy.set_reference_logprobs(completions)           # before the update
    for micro_batch in policy.micro_batches(completions):    # of this process, equally many on each
        batch = policy.collate(micro_batch)
        logprobs, entropies = policy.logprobs(batch)
        policy.backward(loss)                            # its share of a mean over all processes
    policy.clip_gradients(1.0)
    policy.step()

Axes: B completions of a micro-batch, T tokens of its longest completion, V tokens of the vocabulary.
"""

import contextlib
import copy
import functools
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute
from transformers.core_model_loading import revert_weight_conversion

from rlmt.chat import context_length
from rlmt.model import evaluating, has_adapter, load_trained, load_weights, reference_dtype
from utils import fail

# counts the tokens of a row; of a pair, those of both sides when the shorter one is padded
Length = Callable[[object], int]
LOGITS_AT_ONCE = 2**27  # elements of the largest tensor of logits: 0.5 GiB in float32
# tokens of a row of `check_forward`: twice the model's sliding window, as windows show in longer rows only
SHORTEST_CHECKED, LONGEST_CHECKED = 512, 2048


# --- 1. log-probabilities


class Policy(nn.Module):
    """Wraps a causal language model: its forward returns log-probabilities, without holding all logits.

    accelerate prepares this wrapper, so that FSDP2 gathers the LM head's weights when the forward needs them.
    """

    # Texts are padded on the right, where causal models read nothing; without a mask they can use the kernels
    # of flash attention. `check_forward` sets it for all policies if a model needs the mask.
    reads_mask = False

    def __init__(self, model: nn.Module, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self._no_split_modules = model._no_split_modules  # the layers that FSDP2 shards one by one
        # what Gemma does with its logits after the head; `check_forward` finds models that do something else
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def tie_weights(self) -> None:
        """Makes embedding and LM head one weight, if they are; accelerate calls it before and after
        sharding."""
        self.model.tie_weights()

    def generate(self, **options) -> torch.Tensor:
        """Returns what transformers' generate returns."""
        # frozen weights in bfloat16 meet an adapter in float32, as in a forward
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.dtype == torch.bfloat16):
            return self.model.generate(**options)

    def plain_logprobs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities (B, T - 1) of all tokens but the first, by transformers' forward."""
        logits = self.model(input_ids=input_ids).logits[:, :-1].float()
        all_logprobs = (logits / self.temperature).log_softmax(-1)
        return all_logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_mask: torch.Tensor,
        entropy_gradient: bool = False,
        extra: str = "",
    ) -> tuple[torch.Tensor, ...]:
        """Returns log-probabilities and entropies (B, T) of completion tokens in nats; 0 on padding.

        Args:
            input_ids, attention_mask: (B, prompt + T), padded on the right.
            completion_mask: (B, T).
            entropy_gradient: whether entropies are differentiable.
            extra: name of a third result (B, T). "likeliest": 1 where the token is the likeliest one.
                "kl_uniform": KL(uniform || policy), nats. "none": log-probabilities alone, without entropies.
        """
        causal_lm = self.model
        if has_adapter(causal_lm):
            causal_lm = causal_lm.get_base_model()
        mask = attention_mask if self.reads_mask else None
        output = causal_lm.base_model(input_ids=input_ids, attention_mask=mask, use_cache=False)

        # The hidden state at position t predicts token t + 1, so we start at the prompt's last token. Prompts
        # and padding are left out before the head, as logits take most of a small model's memory.
        is_completion = completion_columns(attention_mask, completion_mask)
        hidden = output.last_hidden_state[:, :-1][is_completion[:, 1:]]
        targets = input_ids[is_completion]
        head = causal_lm.get_output_embeddings()
        weight = head.weight  # once: peft's wrapper of a head makes a new one at each access
        bias = getattr(head, "bias", None)  # peft's wrapper has none

        tokens_at_once = max(1, LOGITS_AT_ONCE // weight.size(0))
        compute = self._logprobs_of_chunk
        if len(targets) > tokens_at_once:
            # the backward pass computes logits again, so that those of one chunk are there at a time
            compute = functools.partial(recompute, compute, use_reentrant=False)
        chunks = []
        for start in range(0, len(targets), tokens_at_once):
            chunk = slice(start, start + tokens_at_once)
            chunks.append(compute(hidden[chunk], weight, bias, targets[chunk], entropy_gradient, extra))

        # back from (N,) to (B, T)
        is_token = completion_mask.bool()
        zeros = torch.zeros(is_token.shape, dtype=chunks[0][0].dtype, device=input_ids.device)
        return tuple(
            zeros.masked_scatter(is_token, torch.cat(values)) for values in zip(*chunks, strict=True)
        )

    def _logprobs_of_chunk(
        self, hidden, weight, bias, targets, entropy_gradient: bool, extra: str
    ) -> tuple[torch.Tensor, ...]:
        """Computes the results of `forward` for N tokens, (N,) each, from their hidden states (N, width)."""
        logits = F.linear(hidden, weight, bias)
        # near 2 nats bfloat16 has steps of 0.01
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.temperature != 1:  # spares a tensor of all logits
            logits = logits / self.temperature
        all_logprobs = logits.log_softmax(-1)
        logprobs = all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        if extra == "none":
            return (logprobs,)

        # no gradient without an entropy bonus: its graph would keep a second tensor of all logits
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
        if extra == "likeliest":
            return logprobs, entropies, (all_logprobs.argmax(-1) == targets).to(logits.dtype)
        if extra == "kl_uniform":
            return logprobs, entropies, -all_logprobs.mean(-1) - math.log(all_logprobs.size(-1))
        return logprobs, entropies


@torch.no_grad()
def check_forward(model: nn.Module, path: str, accelerator: Accelerator) -> None:
    """Compares Policy's log-probabilities with those of transformers' own forward.

    If they differ without an attention mask, all policies get one; exits with 2 if they differ with it too,
    as of models that drop out, or scale their logits in a way that Policy does not know. An adapter, which does
    nothing at first, is moved for the time of the check.
    """
    adapter = []
    if has_adapter(unwrap(model)):
        adapter = [weight for weight in model.parameters() if weight.requires_grad]
    before = [weight.clone() for weight in adapter]
    for weight in adapter:
        weight.add_(0.01)
    gap, allowed = _forward_gap(model, accelerator)
    if gap > allowed:
        # of all policies, as the reference must compute as the policy does
        Policy.reads_mask = True
        gap, allowed = _forward_gap(model, accelerator)
    for weight, value in zip(adapter, before, strict=True):
        weight.copy_(value)
    if not gap <= allowed:  # NaN too
        fail(
            f"{path}: log-probabilities of training are {gap:.2g} nats per token from transformers' own (rounding: "
            f"{allowed:.2g}); try --no-gradient-checkpointing, or a model without dropout or scaled logits"
        )


def _forward_gap(model: nn.Module, accelerator: Accelerator) -> tuple[float, float]:
    """Returns by how many nats per token Policy and transformers differ, and what rounding explains.

    Two rows, as long as can be and short, go through Policy as a micro-batch of training, and through transformers
    one by one. Ends of turn are among their tokens.
    """
    policy = getattr(model, "module", model)  # DDP has it there
    config = policy.model.config
    text_config = config.get_text_config()
    end = text_config.eos_token_id
    if isinstance(end, list):
        end = end[0]
    turn = [*range(11, 130, 7), end or 0]  # any ids will do
    window = getattr(text_config, "sliding_window", None) or 0
    longest = min(max(2 * window, SHORTEST_CHECKED), LONGEST_CHECKED)
    n = min(context_length(config), longest) - 8  # so that it can be longer
    rows = [(turn * n)[: n - 1] + turn[-1:], turn]
    prompts = [rows[0][:-24], rows[1][:5]]
    completions = [rows[0][-24:], rows[1][5:]]
    logprobs, _ = model(**collate_ids(prompts, completions, accelerator.device))

    gaps = []
    noise = []
    for row, completion, found in zip(rows, completions, logprobs):
        n = len(completion)
        ids = torch.tensor([row], device=accelerator.device)
        longer = torch.cat([ids, ids[:, :8]], dim=1)  # what comes after changes nothing but the rounding
        with evaluating(policy), accelerator.autocast():
            expected = policy.plain_logprobs(ids)[0, -n:]
            rounded = policy.plain_logprobs(longer)[0, : len(row) - 1][-n:]
        # a mean, as the largest difference of a token in bfloat16 says little
        gaps.append((found[:n] - expected).abs().mean().item())
        noise.append((rounded - expected).abs().mean().item())
    rounding = 0.05 if accelerator.mixed_precision == "bf16" else 1e-4
    return max(gaps), max(rounding, 3 * max(noise))


def completion_columns(attention_mask: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """Returns where a completion's tokens are in `input_ids` (B, prompt + T); `completion_mask` is (B, T)."""
    ends = attention_mask.sum(1, keepdim=True)  # padding is on the right
    starts = ends - completion_mask.sum(1, keepdim=True)
    columns = torch.arange(attention_mask.size(1), device=attention_mask.device)
    return (columns >= starts) & (columns < ends)


def reshard(model: nn.Module) -> None:
    """Frees the whole weights that FSDP2 keeps of the last layers after a forward without a backward."""
    for module in model.modules():
        if hasattr(module, "reshard"):  # an FSDPModule
            module.reshard()


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the transformers (or peft) model inside of DDP and Policy."""
    model = getattr(model, "module", model)  # DDP has it there
    if isinstance(model, Policy):
        model = model.model
    return model


def to_device(accelerator: Accelerator, model: nn.Module, learns: bool) -> nn.Module:
    """Places a model on this process's device: a shard of rank 0's weights under FSDP2, else a whole copy."""
    if not accelerator.is_fsdp2:
        return accelerator.prepare_model(model, evaluation_mode=not learns)
    from torch.distributed.fsdp import register_fsdp_forward_method

    model = fsdp2_prepare_model(accelerator, model)
    if isinstance(model, Policy):
        # they gather the weights, as a forward does
        register_fsdp_forward_method(model, "generate")
        register_fsdp_forward_method(model, "plain_logprobs")
    return model


# --- 2. micro-batches


def n_tokens_of(completion) -> int:
    """Returns the tokens of prompt and completion."""
    return len(completion.prompt_ids) + len(completion.ids)


def deal(rows: list, accelerator: Accelerator, length: Length = n_tokens_of) -> list:
    """Returns this process's share of a step's rows; the shares have about equally many tokens."""
    rows = sorted(rows, key=length, reverse=True)
    # the next longest goes to the next process
    return rows[accelerator.process_index :: accelerator.num_processes]


def micro_batches(
    rows: list,
    max_tokens: int,
    accelerator: Accelerator | None = None,
    length: Length = n_tokens_of,
) -> list[list]:
    """Groups rows of about equal length, longest first, into micro-batches of at most `max_tokens`.

    Prompts, completions and padding count. A longer row is a micro-batch by itself. All processes must have
    equally many rows, and get equally many micro-batches: under FSDP2 each forward gathers weights from all of
    them.
    """
    rows = sorted(rows, key=length, reverse=True)
    n_batches = len(_chunks(rows, max_tokens, length))
    if accelerator is not None:  # as many as the process that needs most
        n_batches = accelerator.gather(torch.tensor([n_batches], device=accelerator.device)).max().item()

    def suffices(limit: int) -> bool:
        return len(_chunks(rows, limit, length)) <= n_batches

    # the largest micro-batch, which sets the peak of memory, is as small as can be
    smallest_limit = bisect_left(range(len(rows) * length(rows[0])), True, key=suffices)
    batches = _chunks(rows, smallest_limit, length)
    while len(batches) < n_batches:  # this process needs fewer: it cuts its largest ones
        index = max(range(len(batches)), key=lambda i: len(batches[i]))
        largest = batches[index]
        middle = len(largest) // 2
        batches[index : index + 1] = [largest[:middle], largest[middle:]]  # the rows stay in order
    return batches


def _chunks(rows: list, max_tokens: int, length: Length) -> list[list]:
    """Cuts rows, longest first, into chunks; padded, each chunk of several has at most `max_tokens`."""
    chunks = []
    for row in rows:
        if chunks and (len(chunks[-1]) + 1) * length(chunks[-1][0]) <= max_tokens:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def collate(completions: list, device) -> dict[str, torch.Tensor]:
    """Makes tensors of a micro-batch.

    Returns what `collate_ids` does, and (B, T) each: policy_mask, which is 1 on the policy's tokens, 0 on
    padding and on the user's turns; advantages, 0 where loss_mask is 0; and, if completions have them, the
    log-probabilities of the sampler, of the policy before the first update and of the reference, values and
    returns.
    """
    prompt_ids = [completion.prompt_ids for completion in completions]
    completion_ids = [completion.ids for completion in completions]
    batch = collate_ids(prompt_ids, completion_ids, device)
    for name in ("advantages", "sampler_logprobs", "old_logprobs", "reference_logprobs", "values", "returns"):
        if getattr(completions[0], name):
            batch[name] = pad([getattr(completion, name) for completion in completions])
    batch["policy_mask"] = mask_of(completions, "policy_mask").long()
    loss_mask = mask_of(completions, "loss_mask")
    if "advantages" in batch:
        batch["advantages"] *= loss_mask
    return {name: tensor.to(device) for name, tensor in batch.items()}


def mask_of(completions: list, name: str) -> torch.Tensor:
    """Returns a mask (B, T) of completions, 0 on padding; a completion without one has 1 on all of its tokens.

    Raises ValueError for a mask of another length than the completion.
    """
    masks = []
    for completion in completions:
        mask = getattr(completion, name)
        if mask is None:
            mask = [1] * len(completion.ids)
        if len(mask) != len(completion.ids):
            raise ValueError(
                f"{name} has {len(mask)} values for {len(completion.ids)} tokens: one for each is needed"
            )
        masks.append(mask)
    return pad(masks)


def collate_ids(
    prompt_ids: list[list[int]], completion_ids: list[list[int]], device
) -> dict[str, torch.Tensor]:
    """Makes input_ids and attention_mask (B, prompt + T) and completion_mask (B, T), the inputs of Policy.

    Prompt and completion are one text, padded on the right, where a causal model reads nothing.
    """
    rows = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        rows.append(torch.tensor(prompt + completion))
    masks = {"attention_mask": rows, "completion_mask": completion_ids}
    batch = {"input_ids": pad_sequence(rows, batch_first=True).to(device)}
    for name, texts in masks.items():
        ones = [torch.ones(len(text), dtype=torch.long) for text in texts]
        batch[name] = pad_sequence(ones, batch_first=True).to(device)
    return batch


def pad(rows: list[list[float]]) -> torch.Tensor:
    """Makes a tensor (B, T) of rows of numbers, with 0 to the right of shorter rows."""
    return pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


# --- 3. what learns


class Learner:
    """Holds a model that learns, its optimizer and what its gradients are summed over.

    The model is a Policy, a critic or a classifier. A gradient is the sum over all micro-batches and processes,
    so a loss has to be divided by what it is a mean of. All processes call these methods together.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        micro_batch_tokens: int,
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        optim: str = "adamw",
    ):
        """`model`: not yet placed on a device. `optim`: "adamw", or "adamw_8bit" with moments in 8 bit."""
        self.accelerator = accelerator
        self.micro_batch_tokens = micro_batch_tokens
        self.model = to_device(accelerator, model, learns=True)
        # after sharding: accelerate matches weights by address, and those of other ranks than 0 had none before
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        options = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
        if optim == "adamw_8bit":
            optimizer = _adamw_8bit(self.model, trained, options)
        else:
            optimizer = torch.optim.AdamW(trained, fused=True, **options)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        self.reference: nn.Module | None = None
        """The Policy of the KL term; None: the policy without its adapter, or there is no KL term."""

    def micro_batches(self, rows: list, length: Length = n_tokens_of) -> Iterator[list]:
        """Yields this process's rows in micro-batches, see `micro_batches`; forward and backward belong into the loop.

        DDP exchanges gradients once, after the last of them; FSDP2 adds them up in shards each time.
        """
        batches = micro_batches(rows, self.micro_batch_tokens, self.accelerator, length)
        for batch in batches[:-1]:
            exchange = contextlib.nullcontext()
            if not self.accelerator.is_fsdp2:
                exchange = self.accelerator.no_sync(self.model)
            with exchange:
                yield batch
        yield batches[-1]

    def collate(self, completions: list) -> dict[str, torch.Tensor]:
        """Makes tensors of a micro-batch, see `collate`."""
        return collate(completions, self.accelerator.device)

    def logprobs(self, batch: dict[str, torch.Tensor], **options) -> tuple[torch.Tensor, ...]:
        """Returns what Policy returns for a micro-batch: log-probabilities and entropies (B, T)."""
        return self.model(batch["input_ids"], batch["attention_mask"], batch["completion_mask"], **options)

    @torch.no_grad()
    def reference_logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the log-probabilities (B, T) of the reference."""
        inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
        if self.reference is not None:
            (logprobs,) = self.reference(*inputs, extra="none")
            reshard(self.reference)
            return logprobs
        adapter = [weight for weight in self.model.parameters() if weight.requires_grad]
        with unwrap(self.model).disable_adapter():
            # disable_adapter freezes them, and FSDP2 fixes the dtype of gradients at its first forward
            for weight in adapter:
                weight.requires_grad_(True)
            (logprobs,) = self.model(*inputs, extra="none")
        return logprobs

    def set_reference_logprobs(self, completions: list) -> None:
        """Stores the reference's log-probabilities of each completion."""
        for micro_batch in self.micro_batches(completions):
            logprobs = self.reference_logprobs(self.collate(micro_batch))
            for completion, row in zip(micro_batch, logprobs.tolist(), strict=True):
                completion.reference_logprobs = row[: len(completion.ids)]

    @torch.no_grad()
    def set_old_logprobs(self, completions: list) -> None:
        """Stores the policy's log-probabilities of each completion, before a rollout's first update."""
        for micro_batch in self.micro_batches(completions):
            (logprobs,) = self.logprobs(self.collate(micro_batch), extra="none")
            for completion, row in zip(micro_batch, logprobs.tolist(), strict=True):
                completion.old_logprobs = row[: len(completion.ids)]
        reshard(self.model)

    def count_tokens(self, completions: list) -> int:
        """Returns how many tokens the policy wrote, over all processes."""
        n_own = sum(completion.n_tokens for completion in completions)
        return self.accelerator.reduce(torch.tensor(n_own, device=self.accelerator.device), "sum").item()

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of a micro-batch's share of the loss."""
        # DDP and FSDP2 average gradients over processes; we want their sum
        (loss * self.accelerator.num_processes).backward()

    def means(self, sums: dict[str, torch.Tensor], n: int) -> dict[str, float]:
        """Returns sums of all processes divided by `n`, the tokens or pairs of all processes."""
        # one exchange for all numbers
        totals = self.accelerator.reduce(torch.stack(list(sums.values())), "sum") / n
        return dict(zip(sums, totals.tolist(), strict=True))

    def clip_gradients(self, max_norm: float) -> float:
        """Scales gradients down to a norm of at most `max_norm`; returns the norm before, over all shards."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return full_tensor(norm).item()

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self) -> None:
        """Updates the weights, and forgets the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def _adamw_8bit(model: nn.Module, trained: list, options: dict) -> torch.optim.Optimizer:
    """Makes bitsandbytes' AdamW (2110.02861). Embeddings keep float32 moments, as in transformers'
    Trainer."""
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(trained, **options)
    # A manager for this optimizer alone. The shared one knows weights by address, and a later model, such as
    # that of another round, may have the address of an earlier one.
    optimizer.mng = copy.copy(optimizer.mng)
    optimizer.mng.initialize()
    # an embedding's gradient is 0 for most tokens, which 8 bits represent badly
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            optimizer.mng.override_config(module.weight, "optim_bits", 32)
    return optimizer


def load_policy(
    args,
    path: str,
    checkpoint: Path | None,
    accelerator: Accelerator,
    temperature: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    token_ids: list[int] | None = None,
    has_reference: bool = False,
) -> Learner:
    """Loads the policy at `path` to train, its reference and its optimizer, as the fields of `args` say.

    A resumed run takes the weights from its `checkpoint`; `checkpoint.load_optimizers` loads the optimizer.
    The reference is the policy that the run started from. `token_ids`: see `load_trained`.
    """
    torch.manual_seed(args.seed)  # LoRA's initial weights, and a critic's, which comes next
    model = load_trained(path, args, checkpoint, token_ids=token_ids)
    policy = Learner(
        Policy(model, temperature),  # log-probabilities are those at which completions were sampled
        accelerator,
        args.micro_batch_tokens,
        args.learning_rate,
        args.weight_decay,
        betas,
        args.optim,
    )
    check_forward(policy.model, path, accelerator)
    if has_reference and not args.lora_r:
        policy.reference = load_reference(path, temperature, accelerator, args.dtype)
    return policy


def load_reference(path: str, temperature: float, accelerator: Accelerator, dtype: str = "auto") -> Policy:
    """Loads the model that the KL term keeps the policy close to; `path`: the one that this run started from."""
    model, _ = load_weights(transformers.AutoModelForCausalLM, path, reference_dtype(dtype), sharded=True)
    model = Policy(model, temperature).eval().requires_grad_(False)
    return to_device(accelerator, model, learns=False)


def cosine_rate(peak: float, step: int, steps: int, warmup_ratio: float) -> float:
    """Returns the learning rate of a step (from 1).

    It rises from 0, then falls to 0 along a cosine. A single step has no warm-up, or it would train nothing.
    """
    done = step - 1
    warmup_steps = min(math.ceil(warmup_ratio * steps), steps - 1)
    if done < warmup_steps:
        return peak * done / warmup_steps
    progress = (done - warmup_steps) / max(1, steps - warmup_steps)
    return peak * (1 + math.cos(math.pi * progress)) / 2


def truncated_importance(logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """Returns the trainer's probability of each token over the sampler's, at most `cap` (TIS, truncated
    importance)."""
    return (logprobs - sampler_logprobs).exp().clamp(max=cap)


# --- 4. whole weights: for the sampler, for checkpoints


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor of a shard; under FSDP2 all processes must call it."""
    if hasattr(tensor, "full_tensor"):  # a DTensor
        return tensor.full_tensor()
    return tensor


# weights of adapters, and a head or embeddings as they were before training
OF_PEFT = re.compile(r"\.lora_|\.original_module\.|\.trainable_tokens_")


@torch.no_grad()
def whole_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole weight) of the transformers model as `save_pretrained` names them, LoRA merged.

    All processes must iterate. Buffers that are saved count as weights.
    """
    reshard(model)
    inner = unwrap(model)
    original = inner
    if has_adapter(inner):
        original = inner.get_base_model()
    if hasattr(original.config, "quantization_config"):  # what has unpacked the weights cannot be reverted
        yield from _merged_weights(inner)
        return
    # a layer at a time, so that no more than one is there whole
    for _, layer in itertools.groupby(_merged_weights(inner), key=_layer_of):
        # transformers fuses the experts of a layer, among others, when it loads them; no other program does
        yield from revert_weight_conversion(original, dict(layer)).items()


def _layer_of(named: tuple[str, torch.Tensor]) -> str:
    """Returns what names of one layer begin with, such as "model.layers.3."; "" if there is no number."""
    name, _ = named
    return re.match(r"(.*?\.\d+\.)?", name).group()


def _merged_weights(inner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole weight) of a transformers or peft model by transformers' names, LoRA merged.

    peft can merge in place and subtract again, but in bfloat16 that leaves other weights than before.
    """
    adapters = {}
    if has_adapter(inner):
        from peft.tuners.tuners_utils import BaseTunerLayer

        for layer in inner.modules():
            if isinstance(layer, BaseTunerLayer):
                # fused experts are parameters with names of their own
                weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
                adapters[id(weight)] = layer

    # tied weights have several names there, and 4-bit ones further parts: the loop goes through the others
    saved = inner.state_dict(keep_vars=True)
    for name, weight in itertools.chain(inner.named_parameters(), inner.named_buffers()):
        if name not in saved or OF_PEFT.search(name):  # a buffer that is computed anew
            continue
        tensor = weight.detach()
        if hasattr(weight, "quant_state"):  # in 4 bits: the values that they stand for, as in a forward
            from bitsandbytes.functional import dequantize_4bit

            tensor = dequantize_4bit(weight.data, weight.quant_state)
        tensor = full_tensor(tensor)
        layer = adapters.get(id(weight))
        if hasattr(layer, "trainable_tokens_delta"):  # some rows of embeddings or head
            tensor = layer.get_merged_weights(layer.active_adapters).detach()
        elif layer is not None:
            delta = full_tensor(layer.get_delta_weight("default"))
            # added in float32, and rounded once
            tensor = (tensor.float() + delta).to(tensor.dtype)
        # the names that the model has without peft
        for part in ("base_model.model.", ".base_layer", ".token_adapter", ".modules_to_save.default"):
            name = name.replace(part, "")
        yield name, tensor
