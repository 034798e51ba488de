"""RLVER: conversations with a simulated user, whose emotion is the reward (arXiv 2507.03112).

A step, for P users with G conversations each (PPO: one):

    1. rollout     the policy replies, the user answers and changes its emotion, turn after turn
    2. reward      r = final emotion / 100, at least 0; 0 after a malformed reply; NaN where there is none
    3. advantage   GRPO: A = (r - mean(r)) / (std(r) + 1e-4), within the group; PPO: by a critic's values
    4. update      the loss of train_grpo.py or train_ppo.py, over all tokens that the policy wrote
    5. log         a line of metrics, and the conversations; checks that end a run which can teach nothing; at times a
                   checkpoint

A conversation is one completion, in which others wrote some of the tokens:

    prompt_ids     system line, user's first turn, opening of a reply
    ids            reply <end> | user's turn, opening | reply <end> | user's turn, opening | reply <end>
    policy_mask    1 1 1 1 1 1   0 0 0 0 0 0 0 0 0 0    1 1 1 1 1 1   0 0 0 0 0 0 0 0 0 0    1 1 1 1 1 1

    python -m rlver.toy_users && python train_sft_warmstart.py --preset toy --epochs 2 \\
        --traces data/toy/users_traces.jsonl --out results/users-sft                           # CPU, a minute
    python train_rlver.py --preset toy --model results/users-sft/model                         # CPU, minutes
    accelerate launch --config_file accelerate/8gpu_fsdp2.yaml train_rlver.py --preset rlver-think \\
        --profiles FILE.jsonl --simulator MODEL --simulator-url http://HOST:8000/v1            # 8 GPUs

The policy's thinking of earlier turns stays in its context; the user never reads it. A policy may learn what
this user alone likes: evaluate with a second one (eval_sentient.py --held-out-simulator).

Deviations from the paper and its released code in a default run; docs/deviations.md has all:
1. A malformed reply ends the conversation at once.
2. A conversation whose simulator failed, or that outgrew the context, has no reward: its advantage is 0.
3. With thinking, each reply of the released code is a row of its own, without the thinking of earlier turns.
4. The prompts of the policy and of the simulator are our own wording. To use one of the two templates that
   the paper prints for the policy, write it into the field `system` of each profile, and pass
   --no-ask-thinking.

Writes results/<run>/: config.json, command.txt, env.txt, metrics.jsonl, completions.jsonl,
simulator-<rank>.jsonl (the simulator's replies), summary.json, checkpoint-*/ and model/. Rows of
completions.jsonl also have `dialogue`, `emotion` (100 at most), `ended`, `error` (why the simulator failed)
and `turns`. Hours: not measured.

Axes: P users, G conversations with each, B conversations of this process, T tokens of the longest of them.
"""

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.chat import encode_prompt, without_control
from rlmt.checkpoint import load_optimizers, save_model
from rlmt.learner import load_policy, n_tokens_of
from rlmt.memory import Memory, check_memory
from rlmt.model import is_sharded_launch, load_policy_tokenizer, start_accelerator
from rlmt.run import RolloutArgs, Run, constants, parse_args, rows_of_step
from rlmt.sampler import (
    Completion,
    Sample,
    Sampler,
    check_split,
    completion_metrics,
    deal_completions,
    gather_in_order,
    gather_rewards,
    policy_sampler,
    reward_metrics,
    share_of,
    text_of,
    warn_of_no_lesson,
)
from rlmt.scorers import read_who
import torch
from accelerate.utils import gather_object

import train_grpo
import train_ppo
from rlver import simulated_user
from utils import THINK_FORMATS, fail, or_fail


# constants: edit inline; config.json holds them and --resume compares them
MAX_GRAD_NORM = 1.0  # gradients of the policy and of the critic are each clipped to this norm
EPSILON = 0.2  # clip range of the ratio
GAMMA = 1.0  # PPO's discount
LAMBDA = 1.0  # PPO: lambda of generalised advantage estimation


# PRESETS, at the end of this file, have other values for the runs of the paper
@dataclass
class Args(RolloutArgs):
    # model and users
    model: str = "Qwen/Qwen2.5-7B-Instruct"
    """Hub name or folder of a chat model (RLVER: this one)."""
    profiles: str = "data/profiles.jsonl"
    """Users: rows {id, player, scene, task, first_talk}; see data/README.md."""
    simulator: str = ""
    """What plays the users: a model at --simulator-url, or file.py:function (see
    rlver/simulated_user.py)."""
    simulator_url: str = ""
    """OpenAI-compatible endpoint; empty: that of OPENAI_BASE_URL, else the official one."""
    concurrency: int = 32
    """Calls to the simulator at a time, of each process."""
    budget: float = 0.0
    """US dollars that the simulator may cost in this run, an equal part for each process; 0: no limit. The
    first part that is spent ends the run at once. The steps since its last checkpoint have to be paid for
    again."""
    user: Literal["vanilla", "challenging"] = "vanilla"
    """challenging: the user hides the wish, and only its fulfilment raises the emotion."""
    think_format: Literal[*THINK_FORMATS] = "think"
    """A key of utils.THINK_FORMATS, for every reply; the user hears the response alone. The templates of Zero
    formats are for one turn: give them --chat-template chatml or llama3."""
    ask_thinking: bool = False
    """With --think-format think: the system line asks for a <think> block, for a model that was not trained
    to write one."""
    # conversation
    start: int = 30
    """Emotion at the start (RLVER; SAGE's evaluation: 40)."""
    low: int = 1
    """A conversation ends below this emotion."""
    turns: int = 8
    """Replies of the policy at most (RLVER, appendix; 10 in its section 3)."""
    max_turn_tokens: int = 5000
    """New tokens of a reply (RLVER)."""
    max_tokens: int = 15000
    """Tokens of a whole conversation (RLVER: prompt 5000, responses 10000)."""
    # rollout
    temperature: float = 1.0
    """Sampling temperature (RLVER); log-probabilities are taken at the same one."""
    # algorithm
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """grpo compares the conversations with one user; ppo has one conversation a user, and a critic."""
    steps: int = 200
    """Rollouts (RLVER shows about 210 of GRPO, 350 of PPO)."""
    prompts_per_step: int = 32
    """P, users a step, over all GPUs (RLVER)."""
    group_size: int = 4
    """G, conversations with a user (RLVER); PPO has one."""
    turn_weight: float = 0.0
    """Weight of a dense reward on top of the final emotion: each reply earns the change of the emotion after
    it (RLVER: none)."""
    entropy_coef: float = 0.0
    """Entropy bonus (released config: 0.001; the paper names one without a value)."""
    critic_learning_rate: float = 5e-6
    """PPO (RLVER)."""
    # optimisation
    learning_rate: float = 1e-6
    """Constant after the warm-up (RLVER). LoRA wants about ten times as much."""
    warmup_steps: int = 50
    """Steps in which the learning rates of policy and critic rise to their full value (RLVER); 0: none."""
    weight_decay: float = 0.01
    """Weight decay of policy and critic."""
    micro_batch_tokens: int = 16384
    """Tokens of a forward, per GPU: whole conversations and padding. Bounds the memory of activations."""


COLUMNS = {  # title on the screen: key in metrics.jsonl
    "reward": "reward/emotion",
    "missing": "reward/missing",
    "success": "dialogue/success",
    "turns": "dialogue/turns",
    "explained": "value/explained_variance",
    "think": "think/mean_tokens",
    "response": "think/response_tokens",
    "format ok": "think/format_ok",
    "gap": "sampling/logprob_gap",
}


# --- a conversation as token ids


@dataclass
class Conversation(Completion):
    """A conversation in words, and as the token ids that the policy reads and writes.

    Once it has ended, `text` is everything after the prompt, `thinking` that of all replies, `response` what
    the last one says.
    """

    policy_mask: list[int] = field(default_factory=list)
    dialogue: dict = field(default_factory=dict)
    """See rlver/simulated_user.py."""
    reply_ends: list[int] = field(default_factory=list)
    """The place in `ids` of each reply's last token."""
    emotion: float | None = None
    """The final emotion; None if the conversation has no reward."""

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.ids

    def add_reply(self, sample: Sample, setting: dict, tokenizer) -> None:
        """Adds what the policy wrote; a malformed reply ends the conversation."""
        text = text_of(tokenizer, sample)
        think_format = tokenizer.trained_as["think_format"]
        simulated_user.add_model_turn(self.dialogue, setting, text, think_format, sample.finished)
        self.cut_off = not sample.finished
        self.ids += sample.ids
        self.policy_mask += [1] * len(sample.ids)
        self.reply_ends.append(len(self.ids) - 1)
        if sample.logprobs:
            self.sampler_logprobs = (self.sampler_logprobs or []) + sample.logprobs

    def add_user_turn(self, tokenizer, max_context: int) -> None:
        """Adds the user's last turn, but for the first, which the prompt has; ends the conversation if its
        context would exceed `max_context` tokens."""
        if not self.ids:
            return
        content = self.dialogue["history"][-1]["content"]
        ids = turn_ids(tokenizer, content)
        if self.ids[-1] == ids[0] == tokenizer.eos_token_id:  # the policy has sampled it
            ids = ids[1:]
        if len(self.context) + len(ids) > max_context:
            self.dialogue["ended"] = "too_long"
            return
        self.ids += ids
        self.policy_mask += [0] * len(ids)
        if self.sampler_logprobs:
            self.sampler_logprobs += [0.0] * len(ids)

    def finish(self, tokenizer) -> None:
        """Sets what is known once the conversation has ended, its reward too."""
        replies = [turn for turn in self.dialogue["history"] if turn["role"] == "assistant"]
        thoughts = [turn["thinking"] for turn in replies if turn["thinking"]]
        for thought in thoughts:
            self.n_thinking_tokens += len(tokenizer(thought, add_special_tokens=False)["input_ids"])
        self.text = tokenizer.decode(self.ids)
        self.thinking = "\n\n".join(thoughts)
        self.response = replies[-1]["content"]
        self.status = replies[-1]["status"]  # a malformed reply is always the last
        self.rewards = {"emotion": None}
        self.emotion = simulated_user.final_emotion(self.dialogue)
        if self.emotion is not None:
            self.reward = max(0.0, self.emotion / 100)
            self.rewards = {"emotion": self.reward}

    def row(self) -> dict:
        return super().row() | {
            "dialogue": self.dialogue["history"],
            "emotion": self.emotion,
            "ended": self.dialogue["ended"],
            "error": self.dialogue.get("error", ""),
            "turns": len(self.reply_ends),
        }


def turn_ids(tokenizer, content: str) -> list[int]:
    """Returns the tokens from a reply's words on: end of turn, what the user says, opening of the next
    reply."""
    mark = "(reply)"
    messages = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": mark},
        {"role": "user", "content": content},
    ]
    messages = without_control(tokenizer, messages)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    after_reply = text.partition(mark)[2]
    return tokenizer(after_reply, add_special_tokens=False)["input_ids"]


# --- the reward of a turn


@dataclass
class TurnRewards:
    """Dense rewards on turns (--turn-weight): a reply earns the change of the emotion after it / 100.

    Their sum is final reward - start / 100. After a malformed reply the final reward is 0, so that reply
    earns minus the emotion before it. The trainers use this class like a source of rewards/dense.py.
    """

    weight: float
    scaled = True  # GRPO divides these rewards by their spread in the group
    metrics = {}  # of a source that learns; this one does not

    def token_rewards(self, conversations: list[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards (B, T), on the last token of each reply, and where one is given (B, T, bool)."""
        width = max(len(conversation.ids) for conversation in conversations)
        values = torch.zeros(len(conversations), width)
        events = torch.zeros(len(conversations), width, dtype=torch.bool)
        for n, conversation in enumerate(conversations):
            if math.isnan(conversation.reward):
                continue
            ends = conversation.reply_ends
            history = conversation.dialogue["history"]
            emotions = [turn["emotion-point"] / 100 for turn in history if turn["role"] == "user"]
            levels = emotions[: len(ends)] + [conversation.reward]  # before each reply, and at the end
            values[n, ends] = torch.tensor(levels, dtype=torch.double).diff().float()
            events[n, ends] = True
        return values, events


# --- steps of the loop


def talk(
    users: list[dict], setting: dict, simulator: simulated_user.User, sampler: Sampler, max_context: int
) -> list[Conversation]:
    """Holds a conversation with each user. A round samples one reply in all that still go on."""
    # under FSDP2 a forward gathers weights from all processes, so where transformers samples, each process must
    # sample as much as the others
    in_step = bool(sampler.backend.batch_size) and is_sharded_launch()
    conversations = []
    for user in users:
        dialogue = simulated_user.start(user, setting)
        conversation = Conversation(user["id"], user["messages"], user["prompt_ids"], [], dialogue=dialogue)
        conversations.append(conversation)
    dialogues = [conversation.dialogue for conversation in conversations]
    for indices in simulated_user.converse(dialogues, setting, simulator, in_step):
        for index in indices:
            conversations[index].add_user_turn(sampler.tokenizer, max_context)
        live = [conversation for conversation in conversations if not conversation.dialogue["ended"]]
        prompts = [conversation.context for conversation in live]
        if in_step:
            n_replies = max(gather_object([len(live)]))
            prompts += [users[0]["prompt_ids"]] * (n_replies - len(live))
        for n, sample in sampler.sample(prompts):
            if n < len(live):
                live[n].add_reply(sample, setting, sampler.tokenizer)
    for conversation in conversations:
        conversation.finish(sampler.tokenizer)
    return conversations


def dialogue_metrics(conversations: list[Conversation]) -> dict[str, float]:
    """Returns the metrics that conversations have on top of completion_metrics.

    `gather_rewards` has raised an error already if none of them has a reward.
    """
    metrics = {
        "dialogue/turns": fmean(len(c.reply_ends) for c in conversations),
        "dialogue/success": fmean(c.emotion >= 100 for c in conversations if c.emotion is not None),
    }
    ends = [conversation.dialogue["ended"] for conversation in conversations]
    for reason in simulated_user.ENDS:
        metrics[f"dialogue/ended_{reason}"] = ends.count(reason) / len(ends)
    return metrics


# --- before the loop


def load_users(path: str, setting: dict, tokenizer, ask_thinking: bool) -> list[dict]:
    """Reads the profiles, with the fields messages and prompt_ids; exits with 2 if one cannot be a prompt."""
    users = []
    for profile in simulated_user.read_profiles(path):
        prompt = simulated_user.chat_messages(simulated_user.start(profile, setting), ask_thinking)
        prompt_ids = or_fail(encode_prompt, tokenizer, prompt)
        users.append({**profile, "messages": prompt, "prompt_ids": prompt_ids})
    return users


def main(args: Args) -> None:
    has_critic = args.algorithm == "ppo"
    if has_critic:
        args.group_size = 1  # it takes the group's place
    elif args.group_size < 2:
        fail("--group-size 1 gives every completion the advantage zero; use 2 or more")
    accelerator = start_accelerator(args.dtype)
    check_split(args.prompts_per_step, accelerator.num_processes)
    if args.ask_thinking and args.think_format != "think":
        fail("--ask-thinking needs --think-format think: its line asks for that format")

    # --- users, checked before anything is loaded
    tokenizer = load_policy_tokenizer(args, args.max_tokens, "--max-tokens")
    # every checkpoint says it, so that eval_sentient.py gives the model the context that it was trained in
    tokenizer.trained_as |= {"keep_thinking": True, "ask_thinking": args.ask_thinking}
    setting = simulated_user.RLVER | {"start": args.start, "low": args.low, "turns": args.turns}
    setting |= {"kind": args.user, "seed": args.seed}
    users = load_users(args.profiles, setting, tokenizer, args.ask_thinking)
    longest = max(len(user["prompt_ids"]) for user in users)
    max_context = args.max_tokens - args.max_turn_tokens  # leaves room for a reply
    if longest > max_context:
        fail(
            f"--max-tokens {args.max_tokens} has no room for a first turn of {longest} tokens and a reply of "
            f"--max-turn-tokens {args.max_turn_tokens}"
        )
    if len(users) < args.prompts_per_step:
        fail(f"{args.profiles}: {len(users)} users are fewer than --prompts-per-step {args.prompts_per_step}")
    memory = Memory(args)
    parts = memory.policies(has_reference=False)
    if has_critic:
        parts["critic"] = memory.critic(args.model)
    accelerator.print(check_memory(parts))
    # the losses read constants of their own scripts
    run = Run(args, "rlver", args.model, constants(vars(train_grpo) | vars(train_ppo) | globals()))
    store = run.folder / f"simulator-{accelerator.process_index}.jsonl"
    who = read_who(args.simulator, args.simulator_url)
    simulator = simulated_user.load_user("--simulator", who, store, args, accelerator.num_processes)
    if accelerator.is_main_process:
        dialogue = simulated_user.start_with_answer(users[0], setting)
        request = simulated_user.planner_request(dialogue, setting)
        n_replies = args.steps * args.prompts_per_step * args.group_size * args.turns
        simulated_user.try_user("--simulator", simulator, request, n_replies)
    if args.dry_run:
        return
    run.start()

    # --- models; a resumed run takes their weights from its last checkpoint
    policy = load_policy(args, args.model, run.checkpoint, accelerator, args.temperature)
    learners = {"model": policy}
    if has_critic:
        learners["critic"] = train_ppo.load_critic(args.model, args, run.checkpoint, accelerator)
    load_optimizers(run.checkpoint, learners)
    sampler = policy_sampler(
        args,
        tokenizer,
        n_completions=args.prompts_per_step * args.group_size,
        max_prompt_tokens=max_context,
        max_tokens=args.max_turn_tokens,
    )
    dense_rewards = [TurnRewards(args.turn_weight)] if args.turn_weight else []
    checks = [sampler.check, warn_of_no_lesson]

    # --- the loop
    with run.training(learners, tokenizer, args.steps, COLUMNS, sampler, checks):
        for step in run.steps():
            warm_up = min(1.0, step / max(1, args.warmup_steps))
            policy.set_rate(args.learning_rate * warm_up)
            if has_critic:
                learners["critic"].set_rate(args.critic_learning_rate * warm_up)
            metrics = {
                "epoch": step / (len(users) // args.prompts_per_step),
                "learning_rate": args.learning_rate * warm_up,
            }

            # 1. rollout, 2. reward: every process talks with its share of the users
            sampler.sync(policy.model)
            chosen = rows_of_step(users, step, args.prompts_per_step, args.seed)
            own_users = [user for user in share_of(chosen, accelerator) for _ in range(args.group_size)]
            conversations = talk(own_users, setting, simulator, sampler, max_context)
            sampler.sleep()  # its GPU memory is for the update
            rewards_P_G = gather_rewards(conversations, accelerator).view(-1, args.group_size)
            run.timer.end("rollout")

            # 3. advantage; then all processes have conversations of about equal lengths
            if has_critic:
                metrics |= reward_metrics(rewards_P_G.T, "total")  # of the whole step
                conversations = deal_completions(conversations, accelerator)
                train_ppo.set_values(conversations, learners["critic"])
                rewards_B_T = train_ppo.token_rewards(conversations, dense_rewards)
                metrics |= train_ppo.set_advantages(conversations, rewards_B_T, GAMMA, LAMBDA, accelerator)
            else:
                metrics |= reward_metrics(rewards_P_G, "total")
                advantages_P_G = train_grpo.group_advantages(rewards_P_G)
                train_grpo.set_advantages(
                    conversations, advantages_P_G, dense_rewards, is_divided=True, accelerator=accelerator
                )
                conversations = deal_completions(conversations, accelerator)
            run.timer.end("advantage")

            # 4. update: by both algorithms a mean over all tokens of the step, without a reference
            means = train_grpo.accumulate_gradients(
                conversations, policy, epsilon=(EPSILON, EPSILON), entropy_coef=args.entropy_coef
            )
            if has_critic:
                means |= train_ppo.accumulate_critic_gradients(conversations, learners["critic"])
                means["value/grad_norm"] = learners["critic"].clip_gradients(MAX_GRAD_NORM)
            means["grad_norm"] = policy.clip_gradients(MAX_GRAD_NORM)
            run.check_finite(step, means, conversations)  # before it reaches the weights
            for learner in learners.values():
                learner.step()
            metrics |= means
            run.timer.end("update")

            # 5. log, checks, checkpoint
            everyone = gather_in_order(conversations)
            metrics |= completion_metrics(everyone) | dialogue_metrics(everyone)
            run.end_step(step, metrics, sum(map(n_tokens_of, everyone)), everyone)

    save_model(run.folder / "model", policy.model, tokenizer)
    evaluation = "eval_sentient.py --profiles FILE --simulator MODEL --simulator-url URL --model"
    run.finish({"steps": run.last_step, "users": len(users)}, evaluation)


# --- presets: the runs of the paper, and the toy

PRESETS: dict[str, dict] = {  # the other defaults are RLVER's GRPO; its appendix B.3
    # GRPO of table 1, with the entropy bonus of the released config; docs/rewards.md has the other rows'
    # flags
    "rlver-think": {"entropy_coef": 1e-3, "ask_thinking": True},
    "rlver-plain": {"entropy_coef": 1e-3, "think_format": "plain"},
    "toy": {  # our choice
        "profiles": "data/toy/users_train.jsonl",
        "simulator": "rlver/toy_users.py:user",
        "rollout": "hf",
        "start": 40,
        "low": 10,
        "turns": 3,
        "max_turn_tokens": 48,
        "max_tokens": 400,
        "steps": 20,
        "prompts_per_step": 16,
        "group_size": 8,
        "micro_batch_tokens": 4096,
        "learning_rate": 3e-4,
        "critic_learning_rate": 1e-3,
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
    },
}


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
