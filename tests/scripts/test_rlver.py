"""train_rlver.py: token ids and masks of conversations, rewards, advantages on turns, the script and its
resume."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launch import FSDP2, finished
from script_runs import killed_after, run_here, run_vllm_here
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import chat as templates
import train_grpo
import train_ppo
import train_rlver
import utils
from data.toy import users as toy_users
from rewards import simulated_user
from rlmt import data as rlmt_data
from rlmt import run as rlmt_run

ROOT = Path(__file__).parents[2]
PROFILE = {"id": "p", "player": "", "scene": "", "task": "", "first_talk": "Hello!", "system": ""}


@pytest.fixture(scope="module")
def toy_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/toy/base")
    templates.prepare_tokenizer(tokenizer, "plain")
    return tokenizer


def new_user(tokenizer, profile: dict, setting: dict) -> dict:
    prompt = simulated_user.chat_messages(simulated_user.start(profile, setting))
    return {**profile, "messages": prompt, "prompt_ids": templates.encode_prompt(tokenizer, prompt)}


def new_talk(tokenizer, setting: dict) -> train_rlver.Conversation:
    user = new_user(tokenizer, PROFILE, setting)
    dialogue = simulated_user.start(user, setting)
    return train_rlver.Conversation("p", user["messages"], user["prompt_ids"], [], dialogue=dialogue)


# --- token ids and masks

# family of the tokenizer: prompt, end of turn, what is between two replies, another end that models write
TEMPLATES = {
    "llama_base": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|end_of_text|>",
    ),
    "qwen25_base": (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
        "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
        "<|endoftext|>",
    ),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_conversation_by_hand(load, family):
    """Two replies with thinking, and the user's turn between them: ids, mask, log-probabilities."""
    prompt, end, between, _ = TEMPLATES[family]
    tokenizer = load(family)
    templates.prepare_tokenizer(tokenizer, "think")
    first, second = "<think>\nA thought.\n</think>\n\nHi.", "<think>\nMore.\n</think>\n\nSo."

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    talk = new_talk(tokenizer, simulated_user.RLVER)
    for text, words, change in ((first, "And?", 5), (second, "Goodbye.", 7)):
        ids = ids_of(text + end)
        sample = rollout.Sample(ids, [-0.5] * len(ids), True)
        talk.add_reply(sample, simulated_user.RLVER, "think", tokenizer)
        simulated_user.user_turns([talk.dialogue], simulated_user.RLVER, lambda *_: (words, change))  # noqa: B023
        if not talk.dialogue["ended"]:
            talk.add_user_turn(tokenizer, 1000)
    conversation = talk
    conversation.finish(tokenizer)

    n_first, n_between, n_second = len(ids_of(first + end)), len(ids_of(between)), len(ids_of(second + end))
    assert conversation.prompt_ids == ids_of(prompt)
    assert conversation.ids == ids_of(first + end) + ids_of(between) + ids_of(second + end)
    assert conversation.loss_mask == [1] * n_first + [0] * n_between + [1] * n_second
    assert conversation.sampler_logprobs == [-0.5] * n_first + [0.0] * n_between + [-0.5] * n_second
    assert conversation.reply_ends == [n_first - 1, len(conversation.ids) - 1]
    assert conversation.n_trained_tokens == conversation.row()["n_tokens"] == n_first + n_second

    assert (conversation.thinking, conversation.response) == ("A thought.\n\nMore.", "So.")
    assert conversation.n_thinking_tokens == len(ids_of("A thought.")) + len(ids_of("More."))
    assert (conversation.status, conversation.dialogue["ended"]) == ("ok", "goodbye")
    assert conversation.reward == pytest.approx(0.42) and conversation.row()["emotion"] == 42


@pytest.mark.parametrize("think_format", utils.THINK_FORMATS)
def test_replies_may_have_any_think_format(think_format):
    """A closing tag ends a Zero format's reply: the template writes the end of turn, which others sample."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/toy/base")
    templates.prepare_tokenizer(tokenizer, think_format, "chatml")
    setting = simulated_user.RLVER
    talk = new_talk(tokenizer, setting)
    reply = utils.join_thinking("Hello", "Hello!", think_format)
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    if not utils.THINK_FORMATS[think_format].stop:
        ids.append(tokenizer.eos_token_id)
    for _ in range(2):
        talk.add_reply(rollout.Sample(ids, None, True), setting, think_format, tokenizer)
        simulated_user.user_turns([talk.dialogue], setting, lambda *_: ("Hello!", 1))
        assert talk.dialogue["history"][-2]["content"] == "Hello!"  # the user hears no thinking
        talk.add_user_turn(tokenizer, 1000)
    whole = simulated_user.chat_messages(talk.dialogue, keep_thinking=True)
    assert talk.context == templates.encode_prompt(tokenizer, whole)
    assert sum(talk.loss_mask) == 2 * len(ids)


# --- the reward, and advantages on turns


def ended_talk(tokenizer, emotions: list[float], ended: str) -> train_rlver.Conversation:
    """A conversation from emotion 30: a reply of two tokens, two tokens of the user, and so on.

    `emotions`: after each reply; a malformed last reply has none.
    """
    talk = new_talk(tokenizer, simulated_user.RLVER)
    n_replies = len(emotions) + (ended == "bad_format")
    for n in range(n_replies):
        talk.dialogue["history"].append(
            {"role": "assistant", "content": "a", "text": "a", "thinking": "", "status": "ok"}
        )
        if n:
            talk.ids += [3, 4]
            talk.loss_mask += [0, 0]
        talk.ids += [5, 6]
        talk.loss_mask += [1, 1]
        talk.reply_ends.append(len(talk.ids) - 1)
        if n < len(emotions):
            talk.dialogue["history"].append({"role": "user", "content": "b", "emotion-point": emotions[n]})
            talk.dialogue["emo_point"] = emotions[n]
    talk.dialogue["ended"] = ended
    talk.finish(tokenizer)
    return talk


@pytest.mark.parametrize(
    "emotions, ended, reward",
    [
        ([40, 100], "turns", 1.0),
        ([47], "goodbye", 0.47),
        ([-8], "failed", 0.0),
        ([60], "bad_format", 0.0),
        ([60], "simulator_failed", None),
        ([60], "too_long", None),
    ],
)
def test_the_reward_is_the_last_emotion(toy_tokenizer, emotions, ended, reward):
    conversation = ended_talk(toy_tokenizer, emotions, ended)
    assert conversation.rewards == {"emotion": reward}
    assert conversation.row()["reward"] == reward and math.isnan(conversation.reward) == (reward is None)


# two groups of three: 30 -> 60 -> 48 -> 68, a bad format at once, ...
GROUPS = [
    [([60, 48, 68], "turns"), ([], "bad_format"), ([20, 50], "goodbye")],
    [([90], "simulator_failed"), ([10, 0], "failed"), ([35, 45, 55], "turns")],
]


def talks(tokenizer) -> list[train_rlver.Conversation]:
    return [ended_talk(tokenizer, emotions, ended) for group in GROUPS for emotions, ended in group]


def naive_turn_rewards(emotions: list[float], ended: str) -> list[float]:
    """A reward of each reply: the change of the emotion / 100, where a malformed reply leads to 0."""
    levels = [30, *emotions, *([0] if ended == "bad_format" else [])]
    levels[-1] = max(0, levels[-1])
    return [(after - before) / 100 for before, after in zip(levels, levels[1:])]


def test_advantages_on_turns_are_those_of_a_loop(toy_tokenizer):
    """GRPO: the k-th reply gets the rewards from there on, compared with the k-th replies of its group."""
    conversations = talks(toy_tokenizer)
    weight = 0.5
    accelerator = SimpleNamespace(num_processes=1, process_index=0)
    rewards_P_G = torch.tensor([conversation.reward for conversation in conversations]).view(-1, 3)
    advantages_P_G = train_grpo.group_advantages(rewards_P_G)
    dense_rewards = [train_rlver.TurnRewards(weight)]
    args = train_rlver.Args(group_size=3)
    train_grpo.set_advantages(conversations, advantages_P_G, dense_rewards, args, accelerator)

    for g, group in enumerate(GROUPS):
        members = conversations[3 * g : 3 * g + 3]
        known = [not math.isnan(member.reward) for member in members]
        rewards = [member.reward for member, is_known in zip(members, known) if is_known]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        to_go = []  # of each known member: the sum of rewards from its k-th reply on
        for (emotions, ended), is_known in zip(group, known):
            changes = naive_turn_rewards(emotions, ended)
            to_go.append([sum(changes[k:]) for k in range(len(changes))] if is_known else [])
        centred = []
        for row in to_go:
            others = [[r[k] for r in to_go if len(r) > k] for k in range(len(row))]
            centred.append([value - sum(of_k) / len(of_k) for value, of_k in zip(row, others)])
        squares = [value**2 for row in centred for value in row]
        scale = math.sqrt(sum(squares) / len(squares)) + 1e-4
        for member, is_known, row in zip(members, known, centred):
            if not is_known:
                assert member.advantages == [0.0] * len(member.ids)
                continue
            outcome = (member.reward - mean) / (deviation + 1e-4)
            for k, value in enumerate(row):
                expected = pytest.approx(outcome + weight * value / scale, abs=1e-5)
                assert member.advantages[4 * k] == member.advantages[4 * k + 1] == expected


def test_ppo_carries_rewards_on_turns_back(toy_tokenizer):
    """With a critic that says 0 and gamma and lambda 1, a token's return is all that is still to come."""
    conversations = talks(toy_tokenizer)
    accelerator = policy.start_accelerator()
    args = train_rlver.Args(gradient_checkpointing=False)
    critic = train_ppo.load_critic(str(ROOT / "data/toy/base"), args)  # its head is new: zero
    train_ppo.set_values(critic, conversations, 1000, toy_tokenizer.pad_token_id, accelerator)
    rewards_B_T = train_ppo.token_rewards(conversations, [train_rlver.TurnRewards(0.5)])
    train_ppo.set_advantages(conversations, rewards_B_T, 1.0, 1.0, accelerator)
    cases = [case for group in GROUPS for case in group]
    for conversation, (emotions, ended) in zip(conversations, cases):
        if math.isnan(conversation.reward):
            assert conversation.advantages == conversation.returns == [0.0] * len(conversation.ids)
            continue
        changes = naive_turn_rewards(emotions, ended)
        for t, is_policy in enumerate(conversation.loss_mask):
            to_come = conversation.reward + 0.5 * sum(changes[t // 4 :])
            assert conversation.returns[t] == pytest.approx(to_come * is_policy, abs=1e-6)
            assert is_policy or conversation.advantages[t] == 0


# --- the script


@pytest.fixture(scope="module")
def users(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("users") / "users.jsonl"
    path.write_text("".join(json.dumps(profile) + "\n" for profile in toy_users.profiles(10, 0, "train")))
    return path


# the base model ends some replies with <|endoftext|>; others are cut off. So conversations differ in length
def start(launcher: list[str], users: Path, out: Path, *more: str) -> list[str]:
    return [
        *[sys.executable, *launcher, "train_rlver.py", "--preset", "toy", "--model", "data/toy/base"],
        *["--think-format", "plain", "--profiles", str(users), "--prompts-per-step", "4", "--steps", "3"],
        *[
            "--max-turn-tokens",
            "40",
            "--save-steps",
            "1",
            "--micro-batch-tokens",
            "600",
        ],
        *["--out", str(out), *more],
    ]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for path in sorted(run.rglob("checkpoint-3/**/*.safetensors")):
        for name, weight in load_file(path).items():
            weights[f"{path.parent.name}/{name}"] = weight
    return weights


def check_files(run: Path, group_size: int, names: tuple[str, ...]) -> None:
    """Checks what a run of 3 steps with 4 users wrote; `names`: further keys of its metrics."""
    rows = rlmt_data.read_log(run / "completions.jsonl")
    assert len(rows) == 3 * 4 * group_size
    assert max(row["turns"] for row in rows) > 1
    for row in rows:
        history = row["dialogue"]
        assert [turn["role"] for turn in history] == (["user", "assistant"] * row["turns"] + ["user"])[
            : len(history)
        ]
        emotion = 0 if row["ended"] == "bad_format" else history[-1]["emotion-point"]
        assert row["ended"] in ("turns", "failed", "bad_format") and row["emotion"] == emotion
        assert row["reward"] == row["rewards"]["emotion"] == max(0, emotion / 100)
    profiles = toy_users.profiles(10, 0, "train")
    expected = []
    for step in (1, 2, 3):
        for profile in rlmt_run.rows_of_step(profiles, step, 4, 0):
            expected += [profile["id"]] * group_size
    assert [row["id"] for row in rows] == expected

    committed = rlmt_data.read_log(ROOT / "results/toy/toy-rlver-think-s0" / "metrics.jsonl")[0].keys()
    not_here = {"rewards/preference/mean", "rewards/preference/std"}  # called rewards/total/* now
    not_here |= {"clip_ratio/low_min", "clip_ratio/high_max", "contribution/emotion"}  # no longer logged
    not_here |= {"kl"}  # this run has no reference
    for step, metrics in enumerate(rlmt_data.read_log(run / "metrics.jsonl")):
        assert metrics.keys() >= (committed - not_here) | set(names)
        assert all(math.isfinite(value) for value in metrics.values())
        of_step = [row for row in rows if row["step"] == step + 1]
        turns = [row["turns"] for row in of_step]
        assert metrics["dialogue/turns"] == pytest.approx(sum(turns) / len(turns))
        lengths = [row["n_tokens"] for row in of_step]
        assert metrics["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert json.loads((run / "summary.json").read_text()) == {"steps": 3, "users": 10}
    assert json.loads((run / "config.json").read_text())["constants"]["EPSILON"] == 0.2
    trained_with = {"think_format": "plain", "keep_thinking": True, "ask_thinking": False}
    for folder in ("checkpoint-3", "model"):
        assert json.loads((run / folder / "think_format.json").read_text()) == trained_with


def test_a_killed_run_ends_with_the_same_bits(users, tmp_path):
    more = ["--algorithm", "ppo", "--turn-weight", "1", "--warmup-steps", "2"]
    whole = tmp_path / "whole"
    run_here(start([], users, whole, *more))
    rates = [metrics["learning_rate"] for metrics in rlmt_data.read_log(whole / "metrics.jsonl")]
    assert rates == pytest.approx([1.5e-4, 3e-4, 3e-4])
    check_files(whole, 1, ("value/loss", "value/explained_variance", "value/grad_norm"))

    broken = tmp_path / "broken"
    killed_after(1, whole, broken)
    run_here(start([], users, broken, *more, "--resume"))
    expected = weights_of(whole)
    found = weights_of(broken)
    assert expected.keys() == found.keys() and len(expected) > 10
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert rlmt_data.read_log(broken / "completions.jsonl") == rlmt_data.read_log(whole / "completions.jsonl")


def test_two_processes_talk_with_the_users_of_one(users, tmp_path):
    """Their conversations end after different numbers of turns; all must make equally many forwards."""
    run = tmp_path / "run"
    finished(start(FSDP2, users, run, "--group-size", "4"))
    check_files(run, 4, ())


def test_vllm_samples_from_the_weights_that_are_trained(users, tmp_path):
    """The check of the sampler counts the policy's tokens alone: the user's have no log-probability."""
    run = tmp_path / "run"
    run_vllm_here(start([], users, run, "--group-size", "4", "--rollout", "vllm"))
    check_files(run, 4, ())
    for metrics in rlmt_data.read_log(run / "metrics.jsonl"):
        assert 0 < metrics["sampling/logprob_gap"] < 1e-4
