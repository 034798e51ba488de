"""Loads the model that is trained, computes log-probabilities, makes micro-batches, gathers whole weights.

The loops of all training scripts share it.

Axes: B completions of a micro-batch, T tokens of its longest completion, V tokens of the vocabulary.
"""

import contextlib
import copy
import ctypes
import functools
import itertools
import math
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    PartialState,
    init_empty_weights,
)
from accelerate.utils import DistributedDataParallelKwargs
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.core_model_loading import revert_weight_conversion

from rlmt.chat import (
    context_length,
    load_config,
    load_tokenizer,
    prepare_tokenizer,
    read_trained_as,
    render,
)
from rlmt.data import append_jsonl
from utils import SAFE, compute_dtype, fail, in_one_line, or_fail

# counts the tokens of a row; of a pair, those of both sides when the shorter one is padded
Length = Callable[[object], int]
LOGITS_AT_ONCE = 2**27  # elements of the largest tensor of logits: 0.5 GiB in float32
LORA_ALPHA = 2  # times the rank


class Learner(NamedTuple):
    """Holds a model that learns, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


# --- 1. processes and models


def start_accelerator(dtype: str = "auto") -> Accelerator:
    """Connects this process with the others that `accelerate launch` started: one GPU, DDP, or FSDP2.

    `dtype`: that of forwards, see utils.compute_dtype. By accelerate's default FSDP2 would add up gradients
    in bfloat16, and round what forwards return, which puts the sum of 1,500 log-probabilities off by a nat.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        keep_freed_memory()
    precision_dtype = compute_dtype(dtype)
    handlers = [
        # a checkpoint of 100 GB takes longer than NCCL's ten minutes; what hangs is ended by STALL_MINUTES of rlmt/run.py
        InitProcessGroupKwargs(timeout=timedelta(hours=6)),
        # gradients are views of DDP's buckets: copies would take 4 bytes a parameter more
        DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
    ]
    plugin = None
    if is_sharded_launch():
        from torch.distributed.fsdp import MixedPrecisionPolicy  # half a second, as what follows of FSDP2

        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, precision_dtype), reduce_dtype=torch.float32
        )
        # shards are cut from the weights of rank 0, the only process that reads them, see `load_weights`
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, mixed_precision_policy=precision, cpu_ram_efficient_loading=True
        )
        # transformers reads it too, and would leave a reward model, which is not sharded, empty on other
        # ranks
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return Accelerator(
        cpu=not on_gpu,
        mixed_precision="bf16" if precision_dtype == "bfloat16" else "no",
        kwargs_handlers=handlers,
        fsdp_plugin=plugin,
    )


def keep_freed_memory() -> None:
    """Makes glibc keep freed tensors for the next ones; elsewhere it does nothing.

    By default every large tensor is mapped anew, which costs an update on a CPU about a tenth of its time
    (docs/speed.md). Those above 32 MiB, such as logits, still are: kept, they would fragment the heap to
    several times what is in use.
    """
    with contextlib.suppress(AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        # numbers of malloc.h: M_MMAP_THRESHOLD, then M_TRIM_THRESHOLD, whose -1 is "never"
        mallopt(-3, 32 << 20)
        mallopt(-1, -1)


def is_sharded_launch() -> bool:
    """Tells whether the launch config asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def without_weights(auto_class, config, dtype: str = "float32") -> nn.Module:
    """Makes a model on the meta device, where weights have shapes and no values; its buffers are real."""
    with init_empty_weights():
        model = auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()  # the context gives every name a weight of its own
    return model


def load_weights(
    auto_class,
    path: str,
    dtype: str,
    new_head: bool = False,
    sharded: bool = False,
    config=None,
    load_in_4bit: bool = False,
) -> tuple[nn.Module, list[str]]:
    """Loads a model and returns it with the names of weights that the folder lacks.

    With `new_head`, the head may be missing or have another shape. `sharded`: FSDP is to shard the model, so
    rank 0 alone reads it; on other ranks it is without weights until `to_device` gives them their shards.
    `load_in_4bit`: linear layers except the head become 4 bits a weight (NF4, QLoRA, 2305.14314).
    Exits with 2 if another weight is missing, as it would be random, or if the folder cannot be read.
    """
    config = config or load_config(path)
    # a head of another shape is reported as missing; any other mismatch exits below
    options = {"config": config, "dtype": dtype, "ignore_mismatched_sizes": new_head, **SAFE}
    if load_in_4bit:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
            # transformers finds an LM head by itself, but no classifier's head that has a bias
            llm_int8_skip_modules=["score"] if new_head else None,
        )
    try:
        if sharded and is_sharded_launch() and not PartialState().is_main_process:
            return without_weights(auto_class, config, dtype), []
        model, info = auto_class.from_pretrained(path, output_loading_info=True, **options)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        fail(f"{path}: its weights cannot be read ({in_one_line(error)})")

    # transformers draws missing weights at random, with a warning alone
    missing = list(info["missing_keys"]) + [name for name, *_ in info["mismatched_keys"]]
    body = f"{model.base_model_prefix}." if new_head else ""
    needed = [name for name in missing if name.startswith(body)]
    if needed:
        fail(f"{path}: {len(needed)} weights are missing, e.g. {needed[0]}")
    if model.can_generate():
        # the folder's own may ask for, say, a repetition penalty, of which neither vLLM nor the loss knows
        model.generation_config = transformers.GenerationConfig.from_model_config(config)
    for module in model.modules():
        # on a CPU bitsandbytes repacks 4-bit weights in evaluation mode, after which there is no gradient
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model, missing


def has_adapter(model: nn.Module) -> bool:
    """Tells whether a model is a peft model, without importing peft, which takes seconds."""
    return hasattr(model, "get_base_model")


def check_context(path: str, tokenizer: Tokenizer, n_tokens: int, flags: str) -> None:
    """Exits with 2 if the model at `path` has no room for `n_tokens`, which `flags` allow, or no embedding of
    a token that its template, its ends of turn or padding need."""
    config = load_config(path)
    context = context_length(config)
    if n_tokens > context:
        fail(f"{flags}: {n_tokens} tokens are more than the {context} of {path}'s context")
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Y"}]
    # tokens that were added to the tokenizer alone have the highest ids
    highest = max(*render(tokenizer, turns), *tokenizer.stop_ids, tokenizer.pad_token_id)
    n_embeddings = config.get_text_config().vocab_size
    if highest >= n_embeddings:
        token = tokenizer.convert_ids_to_tokens(highest)
        fail(
            f"{path}: its tokenizer has {token!r} as id {highest}, and the model has {n_embeddings} embeddings; "
            "call model.resize_token_embeddings(len(tokenizer)) and save it"
        )


def load_policy_tokenizer(
    args, n_tokens: int = 0, flags: str = "--max-prompt-tokens and --max-completion-tokens"
) -> Tokenizer:
    """Loads the tokenizer of `args.model` and prepares it for `args.think_format`; exits with 2 if that
    cannot be.

    Checks that the model's context holds `n_tokens` (0: prompt and completion); `flags` are those that an
    error names.
    """
    tokenizer = load_tokenizer(args.model)
    trained_to = read_trained_as(args.model).get("think_format")
    if trained_to not in (None, args.think_format):
        fail(
            f"{args.model} was trained to the format {trained_to!r}, not {args.think_format!r}; "
            "change --think-format or --model"
        )
    PartialState().print(or_fail(prepare_tokenizer, tokenizer, args.think_format, args.chat_template))
    check_context(
        args.model, tokenizer, n_tokens or args.max_prompt_tokens + args.max_completion_tokens, flags
    )
    return tokenizer


def load_trained(
    path: str,
    args,
    folder: Path | None = None,
    auto_class=None,
    task_type: str = "CAUSAL_LM",
    token_ids: list[int] | None = None,
) -> nn.Module:
    """Loads a model to train: a causal language model, or another that `auto_class` makes.

    All weights are trained, or with LoRA an adapter. A resumed run takes them from the checkpoint `folder`.
    Nothing is dropped out, whatever its config says: the model is in evaluation mode.

    Args:
        task_type: peft's name of the model. "TOKEN_CLS" is PPO's critic, "SEQ_CLS" a reward model: they have
            one output. Their head is trained whole, also with LoRA; if `path` lacks it, it is zero in a
            critic, else random.
        token_ids: whose embeddings and rows of the LM head are trained too with LoRA.
    """
    dtype = "float32"  # an update of 1e-6 is lost in bfloat16
    if args.lora_r:  # only the adapter and a head are trained, so the others may be in bfloat16
        dtype = compute_dtype(args.dtype)
    elif folder:  # with LoRA the folder holds the adapter alone
        path = str(folder)
    config = load_config(path)
    has_head = task_type != "CAUSAL_LM"
    if has_head:
        config.num_labels = 1
    if hasattr(config, "quantization_config") and not args.lora_r:
        fail(f"{path}: its weights are quantised and cannot be trained; name --lora-r, or another model")
    model, missing = load_weights(
        auto_class or transformers.AutoModelForCausalLM,
        path,
        dtype,
        new_head=has_head,
        sharded=True,
        config=config,
        load_in_4bit=args.load_in_4bit,
    )
    head = None
    if has_head:
        children = dict(model.named_children())
        # what is left has the head, and perhaps a dropout without weights
        del children[model.base_model_prefix]
        head = [name for name, module in children.items() if list(module.parameters())]
        for name in head:  # "score" or "classifier"
            # before peft copies it: a checkpoint is loaded into the copy
            for layer in children[name].float().modules():
                if type(layer) is nn.Linear:
                    layer.__class__ = Float32Linear
    if task_type == "TOKEN_CLS":  # a critic's first advantages are then the rewards
        for name in missing:
            nn.init.zeros_(model.get_parameter(name))
    if args.lora_r:
        model = add_adapter(model, folder, args.lora_r, task_type, head, token_ids)
    if args.gradient_checkpointing:
        or_fail(model.gradient_checkpointing_enable, gradient_checkpointing_kwargs={"use_reentrant": False})
    model.eval()  # no dropout: ratios and the KL compare forwards of the same weights
    for module in model.modules():
        # which works in training mode only, of the module that has it
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
    return model


def add_adapter(
    model: nn.Module,
    folder: Path | None,
    rank: int,
    task_type: str,
    head: list[str] | None,
    token_ids: list[int] | None,
) -> nn.Module:
    """Freezes a model and gives it a LoRA adapter in float32: a new one, or that of the checkpoint `folder`.

    `head`: names of modules that are trained whole. The rest: see `load_trained`.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    if folder:
        model = PeftModel.from_pretrained(model, folder, is_trainable=True)
    else:
        rows_of = None
        if token_ids and not is_sharded_launch():  # FSDP2 shards no single rows
            embeddings = [model.get_input_embeddings()]
            lm_head = model.get_output_embeddings()
            # peft trains the rows of a tied head with those of the embeddings, and would leave out a bias
            if lm_head.weight is not embeddings[0].weight and lm_head.bias is None:
                embeddings.append(lm_head)
            names = [name for name, module in model.named_modules() if module in embeddings]
            rows_of = dict.fromkeys(names, token_ids)
        lora = LoraConfig(
            task_type=task_type,
            r=rank,
            lora_alpha=LORA_ALPHA * rank,
            target_modules="all-linear",
            exclude_modules=head,
            modules_to_save=head,
            trainable_token_indices=rows_of,
        )
        model = or_fail(get_peft_model, model, lora)
    for module in model.modules():
        # autocast would undo peft's cast of a layer's input to float32 at once
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    # peft gives the adapter the dtype of the frozen weights
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


def load_learner(
    args,
    path: str,
    folder: Path | None,
    accelerator: Accelerator,
    temperature: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    token_ids: list[int] | None = None,
) -> Learner:
    """Loads the policy at `path` to train, and makes its optimizer, both as the fields of `args` say.

    A resumed run takes the weights from the checkpoint `folder`; `checkpoint.load_optimizers` loads the
    optimizer. `token_ids`: see `load_trained`.
    """
    torch.manual_seed(args.seed)  # LoRA's initial weights, and a critic's, which comes next
    model = load_trained(path, args, folder, token_ids=token_ids)
    model = Policy(model, temperature)  # log-probabilities are those at which completions were sampled
    learner = prepare_trained(accelerator, model, args.learning_rate, args.weight_decay, betas, args.optim)
    check_forward(learner.model, path, accelerator)
    return learner


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


def prepare_trained(
    accelerator: Accelerator,
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    optim: str = "adamw",
) -> Learner:
    """Places a model that learns, and makes its optimizer: "adamw", or "adamw_8bit" with moments in 8 bit."""
    model = to_device(accelerator, model, learns=True)
    # after sharding: accelerate matches weights by address, and those of other ranks than 0 had none before
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    options = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
    if optim == "adamw_8bit":
        optimizer = _adamw_8bit(model, trained, options)
    else:
        optimizer = torch.optim.AdamW(trained, fused=True, **options)
    return Learner(model, accelerator.prepare_optimizer(optimizer))


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


class Float32Linear(nn.Linear):
    """Computes in float32 under autocast too: bfloat16 tells values near 20 apart by 0.1 only."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = self.bias
        if bias is not None:
            bias = bias.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), bias)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and each of its modules back into its own."""
    in_training_mode = [module for module in model.modules() if module.training]
    model.eval()
    yield
    for module in in_training_mode:
        module.training = True


# --- 2. log-probabilities


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
    as of models that drop out, or scale their logits in a way that Policy does not know.
    """
    gap, allowed = _forward_gap(model, accelerator)
    if gap > allowed:
        # of all policies, as the reference must compute as the policy does
        Policy.reads_mask = True
        gap, allowed = _forward_gap(model, accelerator)
    if not gap <= allowed:  # NaN too
        fail(
            f"{path}: log-probabilities of training are {gap:.2g} nats per token from transformers' own (rounding: "
            f"{allowed:.2g}); try --no-gradient-checkpointing, or a model without dropout or scaled logits"
        )


def _forward_gap(model: nn.Module, accelerator: Accelerator) -> tuple[float, float]:
    """Returns by how many nats per token Policy and transformers differ, and what rounding explains.

    Two rows go through Policy as a micro-batch of training, and through transformers one by one.
    """
    policy = getattr(model, "module", model)  # DDP has it there
    rows = [[*range(11, 130, 7)], [*range(11, 123, 7)]]  # any ids will do
    prompts = [rows[0][:5], rows[1][:9]]
    completions = [rows[0][5:], rows[1][9:]]
    logprobs, _ = model(**collate_ids(prompts, completions, 0, accelerator.device))

    gaps = []
    noise = []
    for row, completion, found in zip(rows, completions, logprobs):
        n = len(completion)
        ids = torch.tensor([row], device=accelerator.device)
        longer = torch.cat([ids, ids], dim=1)  # what comes after changes nothing but the rounding
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


def reference_dtype(dtype: str = "auto") -> str:
    """Returns the dtype of the reference's weights, where `--dtype` is `dtype`.

    bfloat16 if FSDP2 computes in it, because FSDP2 rounds the policy's weights to it for each forward. Else
    float32: forwards run under autocast, which keeps weights, norms and the residual stream in float32. There
    a bfloat16 reference would be 0.05 nats per token from a policy that has learned nothing (docs/gpu.md).
    """
    return compute_dtype(dtype) if is_sharded_launch() else "float32"


def load_reference(path: str, temperature: float, accelerator: Accelerator, dtype: str = "auto") -> Policy:
    """Loads the model that the KL term keeps the policy close to; `path`: the one that this run started from."""
    model, _ = load_weights(transformers.AutoModelForCausalLM, path, reference_dtype(dtype), sharded=True)
    model = Policy(model, temperature).eval().requires_grad_(False)
    return to_device(accelerator, model, learns=False)


@torch.no_grad()
def compute_reference_logprobs(model: nn.Module, reference: nn.Module | None, inputs: tuple) -> torch.Tensor:
    """Returns the log-probabilities (B, T) of the reference: if None, of the policy without its adapter."""
    if reference is not None:
        (logprobs,) = reference(*inputs, extra="none")
        reshard(reference)
    else:
        adapter = [weight for weight in model.parameters() if weight.requires_grad]
        with unwrap(model).disable_adapter():
            # disable_adapter freezes them, and FSDP2 fixes the dtype of gradients at its first forward
            for weight in adapter:
                weight.requires_grad_(True)
            (logprobs,) = model(*inputs, extra="none")
    return logprobs


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


# --- 3. micro-batches


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
        place = max(range(len(batches)), key=lambda i: len(batches[i]))
        largest = batches[place]
        middle = len(largest) // 2
        batches[place : place + 1] = [largest[:middle], largest[middle:]]  # the rows stay in order
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


def collate(completions: list, pad_token_id: int, device) -> dict[str, torch.Tensor]:
    """Makes tensors of a micro-batch.

    Returns what `collate_ids` does, and (B, T) each: policy_mask, which is 1 on the policy's tokens, 0 on
    padding and on the user's turns; advantages, 0 where a loss_mask is; and, if completions have them, the
    log-probabilities of sampler, policy at the rollout and reference, values and returns.
    """
    prompt_ids = [completion.prompt_ids for completion in completions]
    completion_ids = [completion.ids for completion in completions]
    batch = collate_ids(prompt_ids, completion_ids, pad_token_id, device)
    batch["policy_mask"] = batch["completion_mask"]
    if completions[0].policy_mask is not None:
        batch["policy_mask"] = pad([completion.policy_mask for completion in completions]).long()
    for name in ("advantages", "sampler_logprobs", "old_logprobs", "reference_logprobs", "values", "returns"):
        if getattr(completions[0], name) is not None:
            batch[name] = pad([getattr(completion, name) for completion in completions])
    if completions[0].loss_mask is not None:
        batch["advantages"] *= pad([completion.loss_mask for completion in completions])
    return {name: tensor.to(device) for name, tensor in batch.items()}


def collate_ids(
    prompt_ids: list[list[int]], completion_ids: list[list[int]], pad_token_id: int, device
) -> dict[str, torch.Tensor]:
    """Makes input_ids and attention_mask (B, prompt + T) and completion_mask (B, T), the inputs of Policy.

    Prompt and completion are one text, padded on the right.
    """
    rows = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        rows.append(torch.tensor(prompt + completion))
    masks = {"attention_mask": rows, "completion_mask": completion_ids}
    batch = {"input_ids": pad_sequence(rows, batch_first=True, padding_value=pad_token_id).to(device)}
    for name, texts in masks.items():
        ones = [torch.ones(len(text), dtype=torch.long) for text in texts]
        batch[name] = pad_sequence(ones, batch_first=True).to(device)
    return batch


def pad(rows: list[list[float]]) -> torch.Tensor:
    """Makes a tensor (B, T) of rows of numbers, with 0 to the right of shorter rows."""
    return pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)


def set_old_logprobs(
    model: nn.Module, completions: list, max_tokens: int, pad_token_id: int, accelerator: Accelerator
) -> None:
    """Stores the policy's current log-probabilities as `old_logprobs` of each completion; to be called before
    a rollout's first update."""
    set_reference_logprobs(
        model, model, completions, max_tokens, pad_token_id, accelerator, field="old_logprobs"
    )


def set_reference_logprobs(
    model: nn.Module,
    reference: nn.Module | None,
    completions: list,
    max_tokens: int,
    pad_token_id: int,
    accelerator: Accelerator,
    field: str = "reference_logprobs",
) -> None:
    """Stores the reference's log-probabilities in a field of completions; see `compute_reference_logprobs`."""
    for members in micro_batches(completions, max_tokens, accelerator):
        inputs = inputs_of(members, pad_token_id, accelerator)
        logprobs = compute_reference_logprobs(model, reference, inputs)
        for completion, row in zip(members, logprobs.tolist(), strict=True):
            setattr(completion, field, row[: len(completion.ids)])


def inputs_of(completions: list, pad_token_id: int, accelerator: Accelerator) -> tuple[torch.Tensor, ...]:
    """Returns Policy's inputs: ids, attention mask and completion mask."""
    batch = collate(completions, pad_token_id, accelerator.device)
    return batch["input_ids"], batch["attention_mask"], batch["completion_mask"]


# --- 4. around an optimizer step


def set_cosine_rate(
    optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int, warmup_ratio: float
) -> float:
    """Sets the learning rate of a step (from 1), and returns it.

    It rises from 0, then falls to 0 along a cosine. A single step has no warm-up, or it would train nothing.
    """
    done = step - 1
    warmup_steps = min(math.ceil(warmup_ratio * steps), steps - 1)
    if done < warmup_steps:
        rate = peak * done / warmup_steps
    else:
        progress = (done - warmup_steps) / max(1, steps - warmup_steps)
        rate = peak * (1 + math.cos(math.pi * progress)) / 2
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def truncated_ratio(logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """Returns the trainer's probability of each token over the sampler's, at most `cap` (TIS, truncated
    importance)."""
    return (logprobs - sampler_logprobs).exp().clamp(max=cap)


def count_tokens(completions: list, accelerator: Accelerator) -> int:
    """Returns how many tokens the policy wrote, over all processes."""
    n_own = sum(completion.n_tokens for completion in completions)
    return accelerator.reduce(torch.tensor(n_own, device=accelerator.device), "sum").item()


def gradient_exchange(
    model: nn.Module, accelerator: Accelerator, is_last: bool
) -> contextlib.AbstractContextManager:
    """Returns the context for the forward and backward of a micro-batch of an update.

    DDP exchanges gradients once, after the last micro-batch; FSDP2 adds them up in shards each time.
    """
    if is_last or accelerator.is_fsdp2:
        return contextlib.nullcontext()
    return accelerator.no_sync(model)


def sum_and_divide(sums: dict[str, torch.Tensor], n: int, accelerator: Accelerator) -> dict[str, float]:
    """Returns sums of all processes divided by `n`, the tokens or pairs of all processes."""
    # one exchange for all numbers
    totals = accelerator.reduce(torch.stack(list(sums.values())), "sum") / n
    return dict(zip(sums, totals.tolist(), strict=True))


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scales gradients down to a norm of at most `max_norm`; returns the norm before, over all shards."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return full_tensor(norm).item()


def check_finite(metrics: dict[str, float], rows: list, step: int, run: Path) -> None:
    """Ends the run before an update that is not finite; writes this process's rows (dataclasses) to disk."""
    for name in ("loss", "grad_norm", "value/loss", "value/grad_norm"):
        if not math.isfinite(metrics.get(name, 0.0)):
            path = run / f"not_finite-rank{PartialState().process_index}.jsonl"
            append_jsonl(path, map(asdict, rows))
            raise FloatingPointError(f"step {step}: {name} is {metrics[name]}; its rows are in {path}")


# --- 5. whole weights: for the sampler, for checkpoints


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
