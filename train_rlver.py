"""RLVER: reinforcement learning in conversation, the emotion of a simulated user as the reward (arXiv 2507.03112).

A step: conversations with P simulated users, G each (GRPO) or one (PPO). The policy replies, the user answers and its emotion
moves (simulator.py), until the user ends the talk or the turns are over. Reward = final emotion / 100, and 0 where a reply
broke the think format. All turns of a conversation share it; the user's tokens are in the context and not in the loss.

    python -m data.toy.users && python train_sft_warmstart.py --preset toy --traces data/toy/users_traces.jsonl --epochs 2 \\
        --out results/users-sft                                                          # CPU, a minute
    python train_rlver.py --preset toy --model results/users-sft/model                   # CPU, minutes
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_rlver.py --preset rlver-think --profiles FILE.jsonl \\
        --simulator MODEL --simulator-url http://HOST:8000/v1                            # 8 GPUs

The policy's own thinking stays in its context; the user never sees it. `--ask-thinking` puts the instruction to think into the
system line, for a model that was not trained to it. Praise alone can raise an emotion: evaluate with a second simulator
(eval_sentient.py --held-out-simulator).
Deviations from the paper and its released code: a malformed reply ends the conversation at once; a conversation whose
simulator failed, or that outgrew the context, has no reward and teaches nothing; the released runs have 32 GPUs.
Trainers: rollout.py's and ppo.py's. Writes results/<run>/ as train_grpo.py does; a completion is a whole conversation, and
has `dialogue`, `emotion` and `ended`.
"""

from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Literal

import runs  # first: it turns telemetry off before trl is imported  # isort: skip
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

import ppo
import rollout
from rewards import Scores
from rewards import simulated_user as simulator
import training
import utils
from endpoint import Endpoint


@dataclass
class Args:
    # model and users
    model: str = "Qwen/Qwen2.5-7B-Instruct"
    """Hub name or folder of a chat model (RLVER: this one)."""
    profiles: str = "data/profiles.jsonl"
    """Users: rows {id, player, scene, task, first_talk}; see data/README.md."""
    simulator: str = ""
    """A model's name at --simulator-url, or file.py:function (dialogue, setting) -> (utterance, change)."""
    simulator_url: str = ""
    """OpenAI-compatible endpoint; empty: OPENAI_BASE_URL, else the official one. The key comes from OPENAI_API_KEY."""
    budget: float = 0.0
    """US dollars that the simulator may cost in this run; 0: no limit."""
    price: tuple[float, float] = (0.0, 0.0)
    """US dollars for a million tokens read and written by the simulator."""
    user: Literal["vanilla", "challenging"] = "vanilla"
    """challenging: hides what it wants, and only that raises its emotion."""
    think: bool = True
    """Think, then say. --no-think: without thinking."""
    ask_thinking: bool = False
    """The system line asks for a <think> block."""
    chat_template: str = "auto"
    """As in train_grpo.py."""
    # conversation
    start: int = 30
    """Emotion at the start (RLVER; SAGE's evaluation: 40)."""
    max_change: int = 0
    """A change is clipped to this and its negative; 0: not clipped (RLVER; SAGE: 10)."""
    low: int = 1
    """A conversation ends below this emotion."""
    turns: int = 8
    """Replies of the policy at most (RLVER, appendix; 10 in its section 3)."""
    max_turn_tokens: int = 5000
    """New tokens of a reply (RLVER)."""
    max_tokens: int = 15000
    """A whole conversation (RLVER: prompt 5000, responses 10000)."""
    allow_truncation: bool = False
    """Go on although in each of the first three steps more than half of the completions are cut off, or none is in good
    format."""
    # rollout
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """As in train_grpo.py."""
    temperature: float = 1.0
    """RLVER."""
    vllm_memory: float = 0.3
    """Share of each GPU that vLLM reserves."""
    max_logprob_gap: float = 0.0
    """As in train_grpo.py."""
    # algorithm
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """PPO has one conversation a user, and a critic."""
    steps: int = 200
    """RLVER shows about 210 of GRPO, 350 of PPO."""
    prompts_per_step: int = 32
    """P, users a step, over all GPUs (RLVER: 32)."""
    group_size: int = 4
    """G, conversations with a user (RLVER: 4); PPO has one."""
    beta: float = 0.0
    """KL weight in the loss (RLVER: none)."""
    turn_weight: float = 0.0
    """Weight of a dense reward beside the final emotion: each reply earns the change that it made (RLVER: none)."""
    lam: float = 1.0
    """PPO: lambda of generalised advantage estimation."""
    value_clip: float = 0.5
    """PPO: as in train_ppo.py."""
    critic_learning_rate: float = 5e-6
    """PPO: RLVER."""
    # optimisation
    learning_rate: float = 1e-6
    """RLVER."""
    weight_decay: float = 0.01
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    micro_batch_size: int = 1
    """Conversations a forward, per GPU."""
    gradient_checkpointing: bool = True
    """Activations are computed again in the backward pass: less memory, about a third more time."""
    lora_r: int = 0
    """LoRA rank; 0 trains all weights."""
    # run
    preset: str = ""
    """A name from PRESETS at the top of this script; flags override it."""
    save_steps: int = 20
    """Steps between checkpoints."""
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


PRESETS: dict[str, dict] = {  # the defaults are RLVER's GRPO; section 4 and its table of hyperparameters
    "rlver-think": {"ask_thinking": True},
    "rlver-plain": {"think": False},
    "rlver-think-ppo": {"ask_thinking": True, "algorithm": "ppo", "steps": 350},
    "rlver-plain-ppo": {"think": False, "algorithm": "ppo", "steps": 350},
    "toy": {
        "profiles": "data/toy/users_train.jsonl",
        "simulator": "data/toy/users.py:user",
        "rollout": "hf",
        "start": 40,
        "low": 10,
        "turns": 3,
        "max_turn_tokens": 48,
        "max_tokens": 400,
        "steps": 20,
        "prompts_per_step": 16,
        "group_size": 8,
        "micro_batch_size": 32,
        "learning_rate": 3e-4,
        "critic_learning_rate": 1e-3,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
    },  # our choice
}


class Conversations:
    """What makes RolloutTrainer or PPOTrainer train on whole conversations.

    `profiles`: by id. `setting`, `user`: as simulator.py has them. `max_tokens`: of a conversation with its first turn.
    `turn_weight`: see Args.
    """

    def __init__(self, *args, profiles, setting, user, max_tokens, turn_weight, **kwargs):
        self.profiles, self.setting, self.user, self.max_tokens = profiles, setting, user, max_tokens
        self.turn_weight = turn_weight
        super().__init__(
            *args, rollout_func=lambda prompts, trainer: trainer.converse(prompts), compose=emotions, **kwargs
        )

    def _generate_and_score_completions(self, inputs):
        self._inputs = inputs
        output = super()._generate_and_score_completions(inputs)
        metrics, rows = self._metrics["train"], gather_object(self._rows)
        metrics["dialogue/turns"].append(sum(row["turns"] for row in rows) / len(rows))
        metrics["dialogue/success"].append(sum((row["emotion"] or 0) >= 100 for row in rows) / len(rows))
        return output

    def token_rewards(self, output: dict) -> list[tuple[float, bool, torch.Tensor, torch.Tensor]]:
        """On the last token of each reply the change of the emotion / 100. The changes of a talk add up to its reward less its
        start, also where a reply in bad format ends it with nothing."""
        if not self.turn_weight:
            return []
        values = torch.zeros(output["completion_ids"].shape, device=output["completion_ids"].device)
        events, own = (
            torch.zeros_like(values, dtype=torch.bool),
            output["tool_mask"].bool() & output["completion_mask"].bool(),
        )
        last = own & ~torch.cat([own[:, 1:], torch.zeros_like(own[:, :1])], dim=1)  # of a reply
        for n, row in enumerate(self._rows):
            emotions = [self.setting["start"]] + [
                m["emotion-point"] for m in row["dialogue"][1:] if m["role"] == "user"
            ]
            places = last[n].nonzero().flatten().tolist()
            levels = [e / 100 for e in emotions[1 : len(places)]]
            changes = [b - a for a, b in pairwise([emotions[0] / 100, *levels, row["reward"]])]
            values[n, places], events[n, places] = torch.tensor(changes, device=values.device), True
        return [(self.turn_weight, True, values, events)]

    def converse(self, prompts: list[list[dict]]) -> dict:
        """Token ids of prompts and conversations, 1 for the policy's tokens and 0 for the user's, the sampler's logprobs."""
        tokenizer, ends = self.processing_class, set(self.eos_token_ids)
        self._talks = [simulator.start(self.profiles[x["id"]], self.setting) for x in self._inputs]
        heads = [utils.encode_prompt(tokenizer, prompt) for prompt in prompts]
        bodies, masks, logprobs = ([[] for _ in prompts] for _ in range(3))
        live = list(range(len(prompts)))
        while most := max(gather_object([len(live)])):  # every process samples as many as the others
            asked = list(islice(cycle(live or [0]), most))
            new, sampled = self._generate_single_turn([heads[i] + bodies[i] for i in asked], None, {}, 1)
            for n, i in enumerate(live):
                finished = new[n][-1] in ends
                text = tokenizer.decode(new[n][:-1] if finished else new[n])
                simulator.add_model_turn(self._talks[i], self.setting, text, self.think_format, finished)
                bodies[i] += new[n]
                masks[i] += [1] * len(new[n])
                logprobs[i] += sampled[n] if sampled else []
            simulator.user_turns([self._talks[i] for i in live], self.setting, self.user)
            for i in live:
                if not self._talks[i]["ended"]:
                    after_end = bodies[i][-1] == tokenizer.eos_token_id
                    turn = turn_ids(tokenizer, self._talks[i]["history"][-1]["content"], after_end)
                    if len(heads[i] + bodies[i] + turn) + self.max_completion_length > self.max_tokens:
                        self._talks[i]["ended"] = "too_long"
                        continue
                    bodies[i] += turn
                    masks[i] += [0] * len(turn)
                    logprobs[i] += [0.0] * len(turn) if sampled else []
            live = [i for i in live if not self._talks[i]["ended"]]
        return {
            "prompt_ids": heads,
            "completion_ids": bodies,
            "env_mask": masks,
            "logprobs": logprobs if self.use_vllm else None,
        }

    def _score(self, inputs: list[dict], completion_ids: list[list[int]]) -> list[dict]:
        count = lambda text: len(self.processing_class(text, add_special_tokens=False)["input_ids"])
        rows, step = [], self.state.global_step + self.args.logging_steps  # the line of metrics.jsonl
        for x, talk, ids in zip(inputs, self._talks, completion_ids):
            own = [m for m in talk["history"] if m["role"] == "assistant"]
            emotion = simulator.final_emotion(talk)
            rows.append(
                {
                    "step": step,
                    "id": x["id"],
                    "messages": x["prompt"],
                    "text": self.processing_class.decode(ids),
                    "thinking": "\n\n".join(m["thinking"] for m in own),
                    "response": own[-1]["content"],
                    "status": next((m["status"] for m in own if m["status"] != "ok"), "ok"),
                    "cut_off": own[-1]["status"] == "truncated",
                    "rewards": {"gold": None, "preference": None},
                    "n_tokens": sum(count(m["text"]) for m in own),
                    "n_thinking_tokens": sum(count(m["thinking"]) for m in own),
                    "dialogue": talk["history"],
                    "emotion": emotion,
                    "ended": talk["ended"],
                    "turns": len(own),
                }
            )
        return rows


class GRPOConversations(Conversations, rollout.RolloutTrainer):
    pass


class PPOConversations(Conversations, ppo.PPOTrainer):
    pass


def emotions(rows: list[dict], group_size: int):
    """The reward as rollout.py takes it: final emotion / 100, at least 0; None where there is none."""
    values = [None if row["emotion"] is None else max(0.0, row["emotion"] / 100) for row in rows]
    return Scores(values, {"emotion": values}, {"emotion": values}, [None] * len(rows), {})


def turn_ids(tokenizer, content: str, after_end: bool) -> list[int]:
    """Tokens between two replies: the end of turn if it is not there yet, the user's turn, and the opening of the next."""
    mark = "(reply)"
    messages = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": mark},
        {"role": "user", "content": content},
    ]
    messages = utils.without_control(tokenizer, messages)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text.partition(mark)[2], add_special_tokens=False)["input_ids"]
    return ids[1:] if after_end and ids[0] == tokenizer.eos_token_id else ids


def check_turns(tokenizer, prompt: list[dict]) -> None:
    """Exits with 2 where a conversation's tokens, put together turn by turn, are not those of the template at once."""
    said, then = "<think>\na\n</think>\n\nb", {"role": "user", "content": "c"}
    ids = (
        utils.encode_prompt(tokenizer, prompt)
        + utils.encode_completion(tokenizer, said)
        + turn_ids(tokenizer, "c", True)
    )
    if ids != utils.encode_prompt(tokenizer, [*prompt, {"role": "assistant", "content": said}, then]):
        runs.fail(
            "the chat template renders a conversation otherwise than its turns; give --chat-template chatml or llama3"
        )


def main(args: Args) -> None:
    think_format, state = "think" if args.think else "plain", training.processes()
    group, world, on_gpu = (
        args.group_size if args.algorithm == "grpo" else 1,
        state.num_processes,
        torch.cuda.is_available(),
    )
    accumulation, rest = divmod(args.prompts_per_step * group, args.micro_batch_size * world)
    if rest:
        runs.fail(
            f"{args.prompts_per_step * group} conversations a step cannot be split into --micro-batch-size "
            f"{args.micro_batch_size} x {world} processes"
        )
    if args.algorithm == "grpo" and group < 2:
        runs.fail("--group-size 1 gives every conversation the advantage zero; use 2 or more")
    if args.algorithm == "ppo":
        ppo.check_launch()
    runs.refuse_unused(
        dict.fromkeys(
            ("--lam", "--value-clip", "--critic-learning-rate"),
            "" if args.algorithm == "ppo" else "without --algorithm ppo",
        )
        | {"--group-size": "with --algorithm ppo" if args.algorithm == "ppo" else ""}
    )
    if args.ask_thinking and not args.think:
        runs.fail("--ask-thinking asks for what --no-think calls malformed; leave one out")
    if not args.simulator:
        runs.fail("--simulator is missing: a model's name at --simulator-url, or file.py:function")

    # --- 1. users
    tokenizer = runs.load_tokenizer(args.model)
    training.check_think_format(args.model, think_format)
    state.print(runs.or_fail(utils.prepare_tokenizer, tokenizer, think_format, args.chat_template))
    setting = {
        **simulator.RLVER,
        "start": args.start,
        "max_change": args.max_change or None,
        "low": args.low,
        "turns": args.turns,
        "kind": args.user,
        "seed": args.seed,
    }
    profiles = {p["id"]: p for p in simulator.read_profiles(args.profiles)}
    prompts = [
        {"id": i, "prompt": simulator.chat_messages(simulator.start(p, setting), args.ask_thinking)}
        for i, p in profiles.items()
    ]
    longest = max(len(utils.encode_prompt(tokenizer, p["prompt"])) for p in prompts)
    training.check_context(args.model, args.max_tokens, "--max-tokens")
    if longest + args.max_turn_tokens > args.max_tokens:
        runs.fail(
            f"--max-tokens {args.max_tokens} has no room for a first turn of {longest} tokens and a reply"
        )
    if len(prompts) < args.prompts_per_step:
        runs.fail(
            f"{args.profiles}: {len(prompts)} users are fewer than --prompts-per-step {args.prompts_per_step}"
        )
    check_turns(tokenizer, prompts[0]["prompt"])
    function = runs.load_function(args.simulator) if ".py:" in args.simulator else None
    use_vllm = runs.use_vllm(args.rollout)
    state.print(
        f"{len(prompts)} users; {args.prompts_per_step} x {group} conversations a step, {args.steps} steps of "
        f"{args.algorithm}; {args.user} users, at most {args.turns} turns; rollouts by "
        f"{'vLLM' if use_vllm else 'transformers'}; format {utils.THINK_FORMATS[think_format]!r}"
    )
    parts = {"policy": training.trained_gib(args.model, args.lora_r)}
    if args.beta and not args.lora_r:
        parts["reference"] = training.frozen_gib(args.model, AutoModelForCausalLM, 4, training.shards())
    if args.algorithm == "ppo":
        parts["critic"] = parts["policy"]
    if use_vllm:
        parts["vLLM"] = training.vllm_gib(args.model, args.vllm_memory)
    state.print(training.memory_line(parts))
    if args.dry_run:
        return
    run = runs.start_run(args, "rlver", args.model)
    user = function or Endpoint(
        args.simulator,
        run / f"simulator-{state.process_index}.jsonl",
        args.simulator_url,
        budget=args.budget / world,
        price=args.price,
    )

    # --- 2. models
    torch.manual_seed(args.seed)
    policy, _ = training.load_weights(
        AutoModelForCausalLM, args.model, dtype=utils.DTYPE if args.lora_r else "float32"
    )  # full training keeps float32 master weights: an update of 1e-6 is lost in bfloat16
    policy.generation_config.eos_token_id = tokenizer.stop_ids
    lora = LoraConfig(
        r=args.lora_r, lora_alpha=2 * args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer_class, config_class, own, critic = GRPOConversations, GRPOConfig, {"num_generations": group}, {}
    if args.algorithm == "ppo":
        trainer_class, config_class, own = PPOConversations, ppo.PPOConfig, {}
        critic = {
            "critic": ppo.load_critic(args.model, args),
            "critic_learning_rate": args.critic_learning_rate,
            "gamma": 1.0,
            "lam": args.lam,
            "value_clip": args.value_clip,
        }

    # --- 3. conversations, emotions, updates
    config = config_class(
        **training.common_config(args, run),
        **own,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        max_completion_length=args.max_turn_tokens,
        temperature=args.temperature,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        generation_kwargs={"stop_token_ids": tokenizer.stop_ids} if use_vllm else None,
        use_vllm=use_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=args.vllm_memory,
        vllm_max_model_length=args.max_tokens,
        vllm_importance_sampling_correction=False,
        beta=args.beta,
        use_bias_correction_kl=False,
        loss_type="dapo",
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
    )
    columns = {
        "emotion": "reward/emotion",
        "success": "dialogue/success",
        "turns": "dialogue/turns",
        "think": "think/mean_tokens",
        "response": "think/response_tokens",
        "format ok": "think/format_ok",
        "kl": "kl",
        "gap": "sampling/logprob_gap",
    }
    trainer = trainer_class(
        model=policy,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        peft_config=lora if args.lora_r else None,
        callbacks=[training.RunLogger(run, columns, think_format)],
        reward_model=None,
        think_format=think_format,
        on_bad_format="score",
        format_margin=0.0,
        run=run,
        allow_truncation=args.allow_truncation,
        max_logprob_gap=args.max_logprob_gap or (0.05 if on_gpu else 1e-3),
        profiles=profiles,
        setting=setting,
        user=user,
        max_tokens=args.max_tokens,
        turn_weight=args.turn_weight,
        **critic,
    )
    training.train(trainer, run, args.resume)

    # --- 4. save
    training.save_model(trainer, run / "model", think_format)
    training.finish(run, {"steps": trainer.state.global_step, "users": len(prompts)})


if __name__ == "__main__":
    main(runs.parse_args(Args, PRESETS))
