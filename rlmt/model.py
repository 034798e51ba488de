"""Loads the model that is trained, computes log-probabilities, makes micro-batches, gathers whole weights.

The loops of all training scripts share it.

Axes: B completions of a micro-batch, T tokens of its longest completion, V tokens of the vocabulary.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    PartialState,
    init_empty_weights,
)
from accelerate.utils import DistributedDataParallelKwargs
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlmt.chat import (
    context_length,
    control_tokens,
    load_config,
    load_tokenizer,
    prepare_tokenizer,
    read_trained_as,
    render,
)
from utils import SAFE, compute_dtype, fail, in_one_line, or_fail

LORA_ALPHA = 2  # times the rank


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

    By default every large tensor is mapped anew, which costs an update on a CPU about a tenth of its time.
    Those above 32 MiB, such as logits, still are: kept, they would fragment the heap to several times what is
    in use.
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
    try:
        with init_empty_weights():
            model = auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError:
        fail(
            f"{config.name_or_path}: transformers has no {auto_class.__name__} of type {config.model_type}; take a model "
            "of another type, or GRPO in place of PPO, as it needs no critic"
        )
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
    Exits with 2 if another weight is missing, as it would be random, or left over, as the model is then of another
    kind; or if the folder cannot be read.
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

    # transformers draws missing weights at random and drops those that are left over, with a warning alone
    missing = list(info["missing_keys"]) + [name for name, *_ in info["mismatched_keys"]]
    body = f"{model.base_model_prefix}." if new_head else ""
    for reason, names in (("missing", missing), ("left over", info["unexpected_keys"])):
        wrong = [name for name in names if name.startswith(body)]
        if wrong:
            fail(
                f"{path}: as {type(model).__name__}, {len(wrong)} weights are {reason}, e.g. {wrong[0]}; name another model"
            )
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
    a token that may come."""
    context = context_length(load_config(path))
    if n_tokens > context:
        fail(f"{flags}: {n_tokens} tokens are more than the {context} of {path}'s context")
    check_embeddings(path, tokenizer, *tokenizer.stop_ids, tokenizer.pad_token_id)


def check_embeddings(path: str, tokenizer: Tokenizer, *others: int) -> None:
    """Exits with 2 if the model at `path` has no embedding of a token that a text may have, its template writes,
    or `others` name."""
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Y"}]
    # tokens that were added to the tokenizer alone have the highest ids; control tokens are taken out of texts
    of_texts = set(tokenizer.get_vocab().values()) - control_tokens(tokenizer).keys()
    highest = max(*of_texts, *render(tokenizer, turns), *others)
    n_embeddings = load_config(path).get_text_config().vocab_size
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
        head = float32_head(model)  # before peft copies it: a checkpoint is loaded into the copy
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


def float32_head(model: nn.Module) -> list[str]:
    """Lets the head of a classifier compute in float32; returns the names of its modules, "score" or
    "classifier"."""
    children = dict(model.named_children())
    # what is left has the head, and perhaps a dropout without weights
    del children[model.base_model_prefix]
    head = [name for name, module in children.items() if list(module.parameters())]
    for name in head:
        for layer in children[name].float().modules():
            if type(layer) is nn.Linear:
                layer.__class__ = Float32Linear
    return head


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


def reference_dtype(dtype: str = "auto") -> str:
    """Returns the dtype of the reference's weights, where `--dtype` is `dtype`.

    bfloat16 if FSDP2 computes in it, because FSDP2 rounds the policy's weights to it for each forward. Else
    float32: forwards run under autocast, which keeps weights, norms and the residual stream in float32. There
    a bfloat16 reference would be 0.05 nats per token from a policy that has learned nothing.
    """
    return compute_dtype(dtype) if is_sharded_launch() else "float32"
