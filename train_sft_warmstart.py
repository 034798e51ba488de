"""Warm start: supervised fine-tuning on (prompt, thinking, response) traces (paper section 2.3, tables 5 and A).

The loss is on the assistant's tokens only, by position: prompt tokens are never trained on, the end-of-turn token always
is. `--no-think` trains on the same rows with the thinking left out, which gives the start of the RLHF twin.

    python train_sft_warmstart.py --model data/toy/base --traces data/toy/sft_traces.jsonl --preset toy
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_sft_warmstart.py --preset table1/llama3.1-8b-sft-think \\
        --traces data/traces.jsonl

Deviation from the released code: the thinking target is the same in SFT, DPO and RL (there, one newline after </think> in
DPO data and two in SFT data). Hardware and hours as the paper's README reports them: 8 H100, about 2.5 hours; not measured
here. Writes results/<run>/: config.json, command.txt, env.txt, metrics.jsonl, dropped.jsonl, summary.json, checkpoint-*/ and
model/, an ordinary Hugging Face folder (with LoRA: merged, the adapter beside it in adapter/).
"""

from dataclasses import dataclass

import runs  # first: it turns telemetry off before trl is imported  # isort: skip
import torch
from datasets import Dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils import is_flash_attn_2_available
from trl import SFTConfig, SFTTrainer

from rows import read_rows
import training
import utils


@dataclass
class Args:
    # model and data
    model: str = "meta-llama/Llama-3.1-8B"
    """Hub name or folder of the model to start from."""
    traces: str = "data/traces.jsonl"
    """Trace rows {id, messages, thinking, response, teacher}; see data/README.md."""
    think: bool = True
    """Train on thinking and response; --no-think: on the response alone, same rows."""
    chat_template: str = "auto"
    """auto: the tokenizer's own if it keeps thinking verbatim, else ours for its family; or llama3, chatml, plain, a path."""
    max_length: int = 20000
    """Tokens of prompt and completion together; longer rows are dropped, counted and listed (released script: 20000)."""
    # optimisation
    epochs: float = 2
    """Paper table 5."""
    batch_size: int = 16
    """Rows an optimizer step, over all GPUs (paper table 5). With --packing: packed rows."""
    micro_batch_size: int = 1
    """Rows a forward, per GPU (released script)."""
    learning_rate: float = 4e-6
    """Paper table 5. LoRA wants about ten times as much."""
    warmup_ratio: float = 0.1
    """Share of the steps (paper table 5); then cosine decay to zero."""
    weight_decay: float = 1e-4
    """Paper table 5; Adam betas are 0.9 and 0.95."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (released script)."""
    packing: bool = False
    """Fill rows of `max_length` tokens with several traces, none attending to another; faster with the package flash-attn."""
    lora_r: int = 0
    """LoRA rank; 0 trains all weights."""
    load_in_4bit: bool = False
    """QLoRA: the frozen weights in 4 bit (needs --lora-r)."""
    # run
    preset: str = ""
    """A name from PRESETS at the top of this script; flags override it."""
    as_released: bool = False
    """With a preset of the paper: the values of RELEASED where its released code has others."""
    save_steps: int = 100
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints kept; 0 keeps all."""
    stall_minutes: float = 1.0
    """Without progress on any rank (a forward, a sampled token, a judge's reply) the run ends; tenfold to load or save."""
    seed: int = 0
    """Of the order of the data, of sampling and of new weights."""
    out: str = ""
    """Run folder; empty: results/<script>__<preset or model>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Continue from the run's last complete checkpoint."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, print what would run, and stop before a model is loaded."""


PLAIN = {"think": False}  # the twin of the same rows, their thinking left out
LLAMA_INSTRUCT, QWEN = {"model": "meta-llama/Llama-3.1-8B-Instruct"}, {"model": "Qwen/Qwen2.5-7B"}
QWEN_INSTRUCT, MINI = {"model": "Qwen/Qwen2.5-7B-Instruct"}, {"traces": "data/traces_gpt4.1mini.jsonl"}
PRESETS: dict[str, dict] = {  # the defaults are table 5's, for Llama-3.1-8B
    "table1/llama3.1-8b-sft-think": {},
    "table1/llama3.1-8b-sft-plain": PLAIN,
    "table1/llama3.1-8b-instruct-sft-think": LLAMA_INSTRUCT,
    "table1/llama3.1-8b-instruct-sft-plain": LLAMA_INSTRUCT | PLAIN,
    "table1/qwen2.5-7b-sft-think": QWEN,
    "table1/qwen2.5-7b-sft-plain": QWEN | PLAIN,
    "table1/qwen2.5-7b-instruct-sft-think": QWEN_INSTRUCT,
    "table1/qwen2.5-7b-instruct-sft-plain": QWEN_INSTRUCT | PLAIN,
    "table4/llama3.1-8b-sft-think-gpt4.1mini": MINI,
    "table4/llama3.1-8b-sft-plain-gpt4.1mini": MINI | PLAIN,
    "toy": {
        "model": "data/toy/base",
        "traces": "data/toy/sft_traces.jsonl",
        "max_length": 512,
        "micro_batch_size": 16,
        "learning_rate": 2e-3,
        "gradient_checkpointing": False,
    },  # our choice: what a 0.9M model needs
}
RELEASED = {
    name: {"batch_size": 8} for name in PRESETS if "qwen" in name
}  # 8 GPUs x 1; table 5 prints 16 for all


def build_rows(
    rows: list[dict], tokenizer, think_format: str, max_length: int
) -> tuple[list[dict], list[dict]]:
    """Tokenised rows {input_ids, labels} and the dropped ones {id, reason, tokens}.

    A row is dropped when its own text breaks the think format (tags or control tokens inside, nothing to answer) or when it is
    longer than `max_length` tokens. Labels are -100 on the prompt and the token ids on the completion and its end of turn.
    """
    kept, dropped = [], []
    for row in rows:
        text = utils.join_thinking(row["thinking"], row["response"], think_format)
        status = utils.split_thinking(text, think_format).status
        if status == "ok" and any(tag in row["thinking"] + row["response"] for tag in utils.TAGS):
            status = "tag_inside_text"
        if status == "ok" and utils.without_control(tokenizer, [{"content": text}]) != [{"content": text}]:
            status = "control_token"
        if status == "ok" and not row["thinking"].strip():
            status = "empty_thinking"  # dropped without thinking too, so that both twins see the same rows
        if status != "ok":
            dropped.append({"id": row["id"], "reason": status})
            continue
        prompt, completion = (
            utils.encode_prompt(tokenizer, row["messages"]),
            utils.encode_completion(tokenizer, text),
        )
        if len(prompt) + len(completion) > max_length:
            dropped.append({"id": row["id"], "reason": "too_long", "tokens": len(prompt) + len(completion)})
            continue
        kept.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    return kept, dropped


def main(args: Args) -> None:
    think_format = "think" if args.think else "plain"
    state = training.processes()
    world = state.num_processes
    accumulation, rest = divmod(args.batch_size, args.micro_batch_size * world)
    if rest:
        runs.fail(
            f"--batch-size {args.batch_size} is not a multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{world} processes"
        )
    if args.load_in_4bit and not args.lora_r:
        runs.fail("--load-in-4bit trains adapters only; add --lora-r 64, say")

    # --- 1. data
    rows = read_rows(args.traces, "messages", "thinking", "response")
    tokenizer = runs.load_tokenizer(args.model)
    state.print(runs.or_fail(utils.prepare_tokenizer, tokenizer, think_format, args.chat_template))
    kept, dropped = build_rows(rows, tokenizer, think_format, args.max_length)
    reasons = {r: sum(d["reason"] == r for d in dropped) for r in sorted({d["reason"] for d in dropped})}
    tokens = sum(len(r["input_ids"]) for r in kept)
    state.print(
        f"{len(rows)} traces, {len(kept)} kept, dropped: {reasons or 'none'}; "
        f"{tokens / max(1, len(kept)):.0f} tokens a row"
    )
    if reasons.get("too_long", 0) > 0.01 * len(rows):
        longest = max(d.get("tokens", 0) for d in dropped)
        runs.fail(
            f"{reasons['too_long']} of {len(rows)} traces are longer than --max-length {args.max_length} and would lose "
            f"their end; {longest} fits all"
        )
    if len(kept) < len(rows) / 2:
        runs.fail(
            f"{args.traces}: only {len(kept)} of {len(rows)} traces can be trained on ({reasons}); no tags belong into "
            "thinking and response: data/prepare.py traces takes texts apart"
        )
    state.print(
        f"{args.batch_size} rows a step = {args.micro_batch_size} x {accumulation} accumulated x {world} processes"
    )
    if args.dry_run:
        ids, n = kept[0]["input_ids"], kept[0]["labels"].count(-100)
        prompt, completion = tokenizer.decode(ids[:n]), tokenizer.decode(ids[n:])
        state.print(f"the first row, trained on from [[[ to ]]]:\n{prompt}[[[{completion}]]]")
        return
    run = runs.start_run(args, "sft", args.model)
    runs.write_dropped(run, dropped)

    # --- 2. model
    quantization = (
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        if args.load_in_4bit
        else None
    )
    torch.manual_seed(args.seed)
    model, _ = training.load_weights(
        AutoModelForCausalLM,
        args.model,
        dtype=utils.DTYPE if args.lora_r else "float32",  # full training keeps float32 master weights
        quantization_config=quantization,
        attn_implementation="flash_attention_2" if args.packing and is_flash_attn_2_available() else "sdpa",
    )
    if args.load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=args.gradient_checkpointing)
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
    )

    # --- 3. train
    training.skip_prompt_logits()
    columns = {"loss": "loss", "lr": "learning_rate", "acc": "mean_token_accuracy"}
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            **training.common_config(args, run),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.micro_batch_size,
            gradient_accumulation_steps=accumulation,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=args.warmup_ratio,
            weight_decay=args.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            max_length=args.max_length if args.packing else None,
            packing=args.packing,
        ),
        train_dataset=Dataset.from_list(kept),
        processing_class=tokenizer,
        peft_config=lora if args.lora_r else None,
        callbacks=[training.RunLogger(run, columns, think_format)],
    )
    training.train(trainer, run, args.resume)

    # --- 4. save
    training.save_model(trainer, run / "model", think_format)
    summary = {"steps": trainer.state.global_step, "n_rows": len(kept), "dropped": reasons, "tokens": tokens}
    if state.is_main_process:
        summary["loss"] = training.mean_loss(run)
    training.finish(run, summary)


if __name__ == "__main__":
    main(runs.parse_args(Args, PRESETS, RELEASED))
