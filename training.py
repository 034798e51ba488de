"""What the training scripts share: checks, gold, memory, models, one way to start, resume, log and end."""

import collections
import dataclasses
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import runs  # isort: skip
import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import broadcast_object_list
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PrinterCallback,
    TrainerCallback,
)

import faults
import rewards
import utils

# --- 1. checks before anything is loaded


def processes() -> PartialState:
    """The first call of a training script: this process among those that accelerate launched, which wait for each other for
    hours, not NCCL's ten minutes: a checkpoint of 128 GB takes its time, and what hangs is ended by `faults`."""
    if not torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        driver = shutil.which("nvidia-smi") and subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True
        )
        if driver and not driver.returncode and "GPU 0" in driver.stdout:
            runs.fail(
                f"nvidia-smi sees a GPU, but torch {torch.__version__} does not: is the driver older than its CUDA "
                f"{torch.version.cuda}? CUDA_VISIBLE_DEVICES= (empty) trains on the CPU"
            )
    return PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=6))


def check_vllm(args, use_vllm: bool) -> None:
    """Exits with 2 where --vllm-server-url or --async-rollouts cannot be had; the second asks for a vLLM in this process, with
    weights of its own beside those being trained."""
    if args.vllm_server_url and not use_vllm:
        runs.fail("--vllm-server-url needs --rollout vllm")
    flags = ("--vllm-memory", "--max-logprob-gap", "--importance-correction")
    runs.refuse_unused(dict.fromkeys(flags, "" if use_vllm else "without --rollout vllm"))
    sleeps = torch.cuda.is_available() and not args.vllm_server_url
    runs.refuse_unused({"--vllm-sleep": "" if sleeps else "but on a GPU, for a vLLM in this process"})
    others = args.vllm_server_url or args.vllm_sleep and sleeps or getattr(args, "dynamic_sampling", 0)
    if args.async_rollouts and (not use_vllm or others):
        runs.fail(
            "--async-rollouts needs --rollout vllm in this process, --no-vllm-sleep, and neither --vllm-server-url nor "
            "--dynamic-sampling"
        )
    if args.async_rollouts and args.importance_correction == "none":
        runs.fail(
            "--async-rollouts trains on what an older policy sampled; correct for it: "
            "--importance-correction token_truncate"
        )


def has_preference(args) -> bool:
    """Whether the reward model is asked at all."""
    return "preference" in rewards.reward_names(args)


def check_rewards(args, think_format: str) -> None:
    """Exits with 2 when `args.reward_model` cannot score this format, or `args.gold` is nothing that `load_gold` takes."""
    if has_preference(args):
        runs.load_tokenizer(args.reward_model)
        runs.or_fail(
            utils.RewardModel.check,
            args.reward_model,
            args.reward_chat_template,
            args.reward_on,
            think_format,
        )
        learned = getattr(
            runs.load_config(args.reward_model), "reward_on", args.reward_on
        )  # train_reward.py says so
        if learned != args.reward_on:
            PartialState().print(
                f"WARNING: {args.reward_model} was trained on {learned}, and --reward-on is {args.reward_on}"
            )
    if ".py:" in args.gold:
        runs.load_function(args.gold)
    elif args.gold and not args.gold.startswith("judge:"):
        runs.load_tokenizer(args.gold)
        runs.or_fail(utils.RewardModel.check, args.gold)


def check_context(path: str, tokens: int, flags: str) -> None:
    """Exits with 2 when prompt and completion together, as long as the flags allow, do not fit the model's context."""
    context = getattr(runs.load_config(path).get_text_config(), "max_position_embeddings", 10**9)
    if tokens > context:
        runs.fail(f"{flags}: {tokens} tokens are more than the {context} of {path}'s context")


def check_think_format(model: str, think_format: str) -> None:
    """Exits with 2 when a checkpoint of ours was trained to another think format than the one asked for."""
    path = Path(model) / "think_format.json"
    if path.exists() and (trained := json.loads(path.read_text())["think_format"]) != think_format:
        runs.fail(
            f"{model} was trained to the format {trained!r}, not {think_format!r}; change --think, --zero or --model"
        )


# --- 2. held-out prompts, gold


# --- 3. memory before anything is loaded: from the configs, in GiB a process (a GPU), without activations


def shards() -> int:
    """Among how many processes the launch config splits trained weights: all under FSDP and DeepSpeed, else 1."""
    split = "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED"))
    return PartialState().num_processes if split else 1


def n_parameters(path: str, auto_class, lora_r: int = 0) -> tuple[int, int]:
    """Parameters of a model and of its LoRA adapter, without loading weights."""
    with torch.device("meta"):
        model = auto_class.from_config(runs.load_config(path), trust_remote_code=False)
    linear = [
        m
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and n not in ("lm_head", "score")
    ]
    return model.num_parameters(), sum(lora_r * (m.in_features + m.out_features) for m in linear)


def trained_gib(path: str, lora_r: int) -> float:
    """Float32 weights, gradients and Adam's two moments; with LoRA those of the adapter, and the frozen weights."""
    weights, adapter = n_parameters(path, AutoModelForCausalLM, lora_r)
    frozen = weights * (2 if torch.cuda.is_available() else 4)
    return (frozen + 16 * adapter if lora_r else 16 * weights) / shards() / 2**30


def frozen_gib(path: str, auto_class, n_bytes: int = 0, parts: int = 1) -> float:
    """Weights of a model that is not trained; by default bfloat16 on a GPU and a copy for each process."""
    return (
        n_parameters(path, auto_class)[0]
        * (n_bytes or (2 if torch.cuda.is_available() else 4))
        / parts
        / 2**30
    )


def vllm_gib(path: str, share: float) -> float:
    """What vLLM reserves: a share of the GPU; on a CPU its weights and VLLM_CPU_KVCACHE_SPACE."""
    if torch.cuda.is_available():
        return share * torch.cuda.get_device_properties(0).total_memory / 2**30
    return frozen_gib(path, AutoModelForCausalLM) + float(os.environ["VLLM_CPU_KVCACHE_SPACE"])


def others_gib(args) -> dict[str, float]:
    """What --gold and the dense rewards load."""
    parts = {}
    if args.gold and ".py:" not in args.gold and not args.gold.startswith("judge:"):
        parts["gold"] = frozen_gib(args.gold, AutoModelForSequenceClassification)
    process = (
        rewards.reward_options(args)["process"]["model"] if "process" in rewards.reward_names(args) else ""
    )
    if process and ".py:" not in process:
        parts["process model"] = frozen_gib(process, AutoModelForTokenClassification)
    if "prime" in rewards.reward_names(args):
        parts["prime"] = trained_gib(args.model, args.lora_r)
    return parts


def memory_line(parts: dict[str, float], at_once: bool = True) -> str:
    """For the screen; exits with 2 when the parts, which are there `at_once` or one after the other, do not fit on a GPU and
    the launch config puts none of them elsewhere."""
    place, needed = (
        "GPU" if torch.cuda.is_available() else "process",
        (sum if at_once else max)(parts.values()),
    )
    offload = [
        os.environ.get(name, "false").lower()
        for name in (
            "FSDP_OFFLOAD_PARAMS",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        )
    ]
    away = not {"true", "cpu", "nvme"}.isdisjoint(offload)
    listed = ", ".join(f"{name} {gib:.3g}" for name, gib in parts.items())
    if (
        place == "GPU"
        and not away
        and needed > (has := torch.cuda.get_device_properties(0).total_memory / 2**30)
    ):
        runs.fail(
            f"{needed:.0f} GiB are needed of a GPU's {has:.0f}, without activations ({listed}): use more GPUs, "
            "--lora-r or a smaller --vllm-memory"
        )
    return f"GiB a {place}, without activations: {listed}"


# --- 4. models: loaded, sharded, saved


def load_weights(auto_class, path: str, new_head: bool = False, **kwargs):
    """auto_class.from_pretrained(path, ...) and the names of the weights that it lacks: none but a `new_head`'s. Exits with 2
    when another is missing, which would be random, or when one is not finite."""
    try:
        model, info = auto_class.from_pretrained(path, output_loading_info=True, **utils.SAFE, **kwargs)
    except (SafetensorError, OSError, ValueError) as e:
        runs.fail(f"{path}: its weights cannot be read ({str(e).splitlines()[0]})")
    missing = [n for n in info["missing_keys"] if not new_head or n.startswith(model.base_model_prefix + ".")]
    if bad := missing or [n for n, p in model.named_parameters() if not p.isfinite().all()]:
        runs.fail(f"{path}: {len(bad)} weights are {'missing' if missing else 'not finite'}, e.g. {bad[0]}")
    return model, info["missing_keys"]


def beside_policy(model, args, **lora):
    """A model that learns beside the policy: gradient checkpointing and, with LoRA, an adapter of the same rank."""
    from peft import LoraConfig, get_peft_model  # seconds to import, which an evaluation need not wait

    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    if args.lora_r:
        config = LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", **lora)
        model = get_peft_model(model, config)
    return model


def save_model(trainer, folder: Path, think_format: str | None) -> None:
    """Saves an ordinary model folder: weights, tokenizer with chat template, generation config that stops at the end of turn,
    and think_format.json (a reward model, None, has neither). LoRA: the adapter goes beside it, into adapter/, and is merged
    into the model it started from, read anew, as in training those weights may be sharded or in 4 bit. Every rank calls it.
    What stood there before goes when the new one is whole."""
    from peft import PeftModel  # seconds to import, which an evaluation need not wait

    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    adapter = folder.parent / "adapter" if isinstance(model, PeftModel) else None
    part = folder.with_name(folder.name + ".part")
    trainer.save_model(str(adapter or part))
    if PartialState().is_main_process:
        if adapter:
            start = AutoModelForCausalLM.from_pretrained(
                model.peft_config["default"].base_model_name_or_path, **utils.SAFE
            )
            PeftModel.from_pretrained(start, adapter).merge_and_unload().save_pretrained(part)
        tokenizer.save_pretrained(part)
        if think_format:  # a policy
            GenerationConfig(
                eos_token_id=tokenizer.stop_ids, pad_token_id=tokenizer.pad_token_id
            ).save_pretrained(part)
            (part / "think_format.json").write_text(json.dumps({"think_format": think_format}))
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    PartialState().wait_for_everyone()


_set_mixed_precision = FullyShardedDataParallelPlugin.set_mixed_precision


def _set_precision(plugin, *args, **kwargs) -> None:
    _set_mixed_precision(plugin, *args, **kwargs)
    if plugin.fsdp_version == 2:
        plugin.mixed_precision_policy = dataclasses.replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
        )


# accelerate has bfloat16 for both: the sum of 1,500 logprobs, as DPO takes it, is then off by a nat
FullyShardedDataParallelPlugin.set_mixed_precision = _set_precision


def shard_reference(trainer_module) -> None:
    """For TRL's module of a trainer: its reference model is loaded in each process, not spread over all GPUs by device_map
    auto, and sharded layer by layer as accelerate does; TRL makes it one unit, which a forward would gather whole."""
    load, prepare = trainer_module.create_model_from_path, trainer_module.prepare_fsdp
    trainer_module.create_model_from_path = functools.partial(load, device_map=None)
    trainer_module.prepare_fsdp = lambda model, accelerator: (
        fsdp2_prepare_model(accelerator, model).eval()
        if accelerator.is_fsdp2
        else prepare(model, accelerator)
    )


def skip_prompt_logits() -> None:
    """Makes TRL's fused LM head skip prompt and padding on a CPU too, as it does on a GPU: half of a toy step or more."""
    import trl.trainer.utils as trl_utils  # seconds to import, which an evaluation need not wait

    trl_utils._use_triton = lambda device: True


# --- 5. training: one way to start, resume, log and end

# under several processes on a CPU the Trainer loads a checkpoint to the device cpu:0, a name that torch.load does not know
torch.serialization.register_package(
    11, lambda _: None, lambda storage, place: storage if place.startswith("cpu:") else None
)


def common_config(args, run: Path, updates: int = 1) -> dict:
    """What every Trainer here is given beside its own hyperparameters; a log line and a checkpoint count `updates` steps."""
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(run),
        "seed": args.seed,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "gradient_checkpointing": args.gradient_checkpointing,
        "ddp_find_unused_parameters": False,
        "save_strategy": "steps",
        "save_steps": args.save_steps * updates,
        "logging_steps": updates,
        "save_total_limit": None,
        "report_to": [],
        "disable_tqdm": True,  # RunLogger deletes, when the new one is whole
        "logging_nan_inf_filter": False,  # else a loss that is NaN is logged as the mean of those before
        # under FSDP gradients of micro-batches are added up in shards; else each GPU would hold all of them
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": shards() > 1}},
    }


def last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run that is whole, None if none was ever finished. Says what is wrong with newer ones; exits
    with 2 when all that were finished are damaged."""
    flaws = {}
    for checkpoint in reversed(faults.numbered(run)):
        if not (flaw := faults.flaw(checkpoint)):
            return checkpoint
        flaws[checkpoint] = flaw
        print(f"WARNING: {checkpoint} {flaw}; it is passed over", file=sys.stderr, flush=True)
    if damaged := [f"{c.name} {flaw}" for c, flaw in flaws.items() if (c / "complete").exists()]:
        runs.fail(f"{run} has no checkpoint to resume from: {'; '.join(damaged)}. --overwrite starts anew")
    return None


def cut_log(path: Path, last: int) -> None:
    """On resume: drops the rows of a jsonl log that were written after the step `last`, so that none stands twice."""
    if PartialState().is_main_process and path.exists():
        lines = path.read_text().split("\n")[:-1]  # without a half-written last one
        faults.write(path, "".join(line + "\n" for line in lines if json.loads(line)["step"] <= last))
    PartialState().wait_for_everyone()


def check_disk(trainer, run: Path) -> None:
    """Warns where the checkpoints that a run keeps do not fit the disk."""
    models = [trainer.model, *(model for model, _ in getattr(trainer, "beside", {}).values())]
    one = sum(p.numel() for model in models for p in model.parameters() if p.requires_grad) * (
        16 if shards() > 1 else 12
    )
    most = (
        max(1, faults.RUN.keep) + 1 - len(faults.numbered(run))
    )  # an old one goes when the new one is whole
    if (free := shutil.disk_usage(run).free) < most * one:
        gib = [f"{n / 2**30:.3g} GiB" for n in (one, free)]
        PartialState().print(
            f"WARNING: {run} will run out of disk: {most} checkpoints of {gib[0]}, {gib[1]} free; "
            "--keep-checkpoints 1, or another --out"
        )


def train(trainer, run: Path, resume: bool) -> None:
    """Trains to the end; with `resume` from the last whole checkpoint, the logs cut back to it. The lines on the screen are
    RunLogger's. After SIGTERM every rank exits with faults.STOPPED; a step with a loss or gradient that is not finite, or no
    progress for --stall-minutes, ends the run before a checkpoint is written."""
    checkpoint = last_checkpoint(run) if resume and PartialState().is_main_process else None
    checkpoint = broadcast_object_list([checkpoint])[0]
    if resume:
        PartialState().print(
            f"resumes from {checkpoint or 'the beginning: there is no checkpoint'}", flush=True
        )
    for log in ("metrics.jsonl", "completions.jsonl", "held_out.jsonl", "held_out_completions.jsonl"):
        cut_log(run / log, int(checkpoint.name.split("-")[1]) if checkpoint else -1)
    check_disk(trainer, run)
    trainer.remove_callback(PrinterCallback)
    trainer.model.get_input_embeddings().register_forward_pre_hook(
        lambda *_: faults.beat()
    )  # also within generate
    batches, prepare = (
        collections.deque(maxlen=trainer.args.gradient_accumulation_steps),
        trainer._prepare_inputs,
    )
    trainer._prepare_inputs = lambda inputs: batches.append(prepare(inputs)) or batches[-1]
    trainer._save_checkpoint = faults.patient()(trainer._save_checkpoint)
    epoch, left = trainer._run_epoch, lambda: trainer.state.global_step < trainer.state.max_steps
    trainer._run_epoch = lambda **kwargs: (
        left() and epoch(**kwargs)
    )  # else a resume from the last step trains one more
    try:
        with faults.stoppable(), faults.watched():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except (Exception, SystemExit) as e:  # the second from a judge whose budget is spent
        explain(e, trainer, run, batches)
        raise
    if faults.RUN.stopped:
        PartialState().print(
            f"stopped by SIGTERM after step {trainer.state.global_step}; --resume continues from "
            f"checkpoint-{trainer.state.global_step}",
            flush=True,
        )
        leave()
        sys.exit(faults.STOPPED)


def explain(error: BaseException, trainer, run: Path, batches) -> None:
    """The last line of a run that failed: after which step, how full the disk is, where --resume continues. The `batches` of a
    step that is not finite are kept in not_finite-rank<k>.safetensors, as <micro-batch>.<name>."""
    if isinstance(error, FloatingPointError):
        tensors = {
            f"{i}.{k}": v.clone() for i, b in enumerate(batches) for k, v in b.items() if torch.is_tensor(v)
        }
        save_file(tensors, run / f"not_finite-rank{PartialState().process_index}.safetensors")
    if torch.distributed.is_initialized():
        GROUPS.append(torch.distributed.group.WORLD)  # as in `leave`
    whole = [c.name for c in faults.numbered(run) if (c / "complete").exists()]
    print(
        f"error: the run ended after step {trainer.state.global_step} by {type(error).__name__}: "
        f"{' '.join(str(error).split())[:300]}; {shutil.disk_usage(run).free / 2**20:.0f} MiB are free in {run}; "
        + (f"--resume continues from {whole[-1]}" if whole else "there is no checkpoint yet"),
        file=sys.stderr,
        flush=True,
    )


class SortedSteps(torch.utils.data.Sampler):
    """Rows in random order, those of one optimizer step (`batch_size` of them) longest first: a micro-batch has rows of about
    equal length, and the gradient stays what it was. The order of an epoch follows from `seed` and its number."""

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self):
        rng = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        for step in torch.randperm(len(self), generator=rng).split(self.batch_size):
            yield from sorted(step.tolist(), key=lambda i: -self.lengths[i])


def mean_loss(run: Path) -> float:
    """Over all steps of metrics.jsonl (the Trainer's own mean leaves out those before a resume). Main process only."""
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sum(losses) / len(losses)


class RunLogger(TrainerCallback):
    """Writes metrics.jsonl, prints one line a step, and makes every checkpoint a complete, servable folder."""

    def __init__(self, run: Path, columns: dict[str, str], think_format: str | None):
        self.run, self.columns, self.think_format = run, columns, think_format

    def on_train_begin(self, args, state, control, **kwargs):
        path = self.run / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        self.began, self.first_step, self.seconds = time.monotonic(), state.global_step, 0.0
        self.tokens, self.offset = json.loads(rows[-1]).get("num_tokens", 0) if rows else 0, None

    def on_step_end(self, args, state, control, **kwargs):
        """SIGTERM on any rank stops all of them after this rollout, with a checkpoint."""
        if state.global_step % args.logging_steps:
            return
        asked = torch.tensor(float(faults.RUN.sigterm is not None), device=PartialState().device)
        if PartialState().num_processes > 1:
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        if asked:
            faults.RUN.stopped = control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "train_runtime" in logs:  # the Trainer's closing line is no step
            return
        finite = lambda value: (
            value is not None and math.isfinite(value)
        )  # TRL makes None of a mean that is NaN
        bad = [
            k for k in ("loss", "grad_norm", "value/loss", "value/grad_norm") if not finite(logs.get(k, 0.0))
        ]
        if bad:  # the same on every rank, and before a checkpoint is written
            raise FloatingPointError(
                f"{bad[0]} is {logs[bad[0]]}; the batch is in {self.run}/not_finite-rank*.safetensors"
            )
        if not state.is_world_process_zero:
            return
        seconds = time.monotonic() - self.began
        shown = [f"{k} {logs[v]:.4g}" for k, v in self.columns.items() if finite(logs.get(v))]
        if "num_tokens" in logs:
            if self.offset is None:  # after a resume SFTTrainer counts tokens from zero again
                self.offset = self.tokens if logs["num_tokens"] < self.tokens else 0
            logs["num_tokens"] += self.offset
            shown.append(f"tokens/s {(logs['num_tokens'] - self.tokens) / (seconds - self.seconds):.0f}")
            self.tokens, self.seconds = logs["num_tokens"], seconds
        runs.append_jsonl(
            self.run / "metrics.jsonl", [{"step": state.global_step, "seconds": round(seconds, 2), **logs}]
        )
        left = seconds / max(1, state.global_step - self.first_step) * (state.max_steps - state.global_step)
        print(
            f"step {state.global_step}/{state.max_steps}",
            *shown,
            f"left {left / 60:.1f} min",
            sep="  ",
            flush=True,
        )

    @faults.patient()
    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and self.think_format:
            (folder / "think_format.json").write_text(json.dumps({"think_format": self.think_format}))
        PartialState().wait_for_everyone()  # every rank has written its part
        if state.is_world_process_zero:
            faults.seal(folder)
        PartialState().wait_for_everyone()  # nobody waits for the first one with less patience than it has


GROUPS = []  # process groups that were left, alive to the end of the process


def finish(run: Path, summary: dict) -> None:
    """The last call of a training script, on every rank: summary.json, then all ranks leave the process group together."""
    runs.write_summary(run, summary)
    leave()


def leave() -> None:
    PartialState().wait_for_everyone()
    if torch.distributed.is_initialized():
        # else the last to hold it is a DDP model, which frees it under the GIL and waits for gloo's thread, which may wait for
        # the GIL: one exit in some dozens hung
        GROUPS.append(torch.distributed.group.WORLD)
    PartialState().destroy_process_group()
