"""train_rlver.py: token ids and masks of conversations, rewards, advantages on turns. test_resume.py runs it."""

import math

import pytest
import torch
from script_runs import BASE
from transformers import AutoTokenizer

from rlmt import chat as templates
import train_grpo
import train_ppo
import train_rlver
import utils
from rlmt.model import start_accelerator
from rlmt.sampler import Sample
from rlver import simulated_user

PROFILE = {"id": "p", "player": "", "scene": "", "task": "", "first_talk": "Hello!", "system": ""}
RLVER = simulated_user.RLVER


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    templates.prepare_tokenizer(tokenizer, "plain")
    return tokenizer


def new_talk(tokenizer) -> train_rlver.Conversation:
    dialogue = simulated_user.start(PROFILE, RLVER)
    messages = simulated_user.chat_messages(dialogue)
    prompt_ids = templates.encode_prompt(tokenizer, messages)
    return train_rlver.Conversation("p", messages, prompt_ids, [], dialogue=dialogue)


# --- token ids and masks


@pytest.mark.parametrize("think_format", utils.THINK_FORMATS)
@pytest.mark.parametrize(("family", "template"), [("llama_base", "llama3"), ("qwen25_base", "chatml")])
def test_two_replies_and_the_turn_between_them(load, family, template, think_format):
    """The ids are those of the whole conversation by the template. A closing tag ends a Zero format's reply:
    the template writes the end of turn, which others sample."""
    tokenizer = load(family)
    templates.prepare_tokenizer(tokenizer, think_format, template)
    thought = ""
    if utils.THINK_FORMATS[think_format].thinking_tags:
        thought = "A thought."
    reply = utils.join_thinking(thought, "Hi.", think_format)
    thought_ids, ids = tokenizer([thought, reply], add_special_tokens=False)["input_ids"]
    if not utils.THINK_FORMATS[think_format].stop:
        ids.append(tokenizer.eos_token_id)

    talk = new_talk(tokenizer)
    for words, change in (("And?<|eot_id|>", 5), ("Goodbye.", 7)):
        talk.add_reply(Sample(ids, [-0.5] * len(ids), True), RLVER, tokenizer)
        assert talk.dialogue["history"][-1]["content"] == "Hi."  # the user hears no thinking
        simulated_user.add_user_turn(talk.dialogue, RLVER, words, change)
        talk.add_user_turn(tokenizer, 1000)
    whole = simulated_user.chat_messages(talk.dialogue, keep_thinking=True)
    assert talk.context == templates.encode_prompt(tokenizer, whole)
    first, last = talk.reply_ends
    for end in (first, last):
        assert talk.ids[end + 1 - len(ids) : end + 1] == ids
    user_ids = last + 1 - 2 * len(ids)
    assert talk.policy_mask[: last + 1] == [1] * len(ids) + [0] * user_ids + [1] * len(ids)
    assert talk.sampler_logprobs == [-0.5 * is_policy for is_policy in talk.policy_mask]
    assert sum(talk.policy_mask) == 2 * len(ids)

    talk.finish(tokenizer)
    row = talk.row()
    assert (row["thinking"], row["response"]) == ("\n\n".join([thought] * 2).strip(), "Hi.")
    assert (row["n_tokens"], row["n_thinking_tokens"]) == (2 * len(ids), 2 * len(thought_ids))
    assert (row["turns"], row["ended"], row["emotion"], row["reward"]) == (2, "goodbye", 42, 0.42)
    talk.add_user_turn(tokenizer, len(talk.context))
    assert talk.dialogue["ended"] == "too_long" and len(talk.policy_mask) == len(talk.ids)


# --- the reward, and advantages on turns


def ended_talk(tokenizer, emotions: list[float], ended: str) -> train_rlver.Conversation:
    """A conversation from emotion 30: two tokens of the user, a reply of two tokens, and so on.

    `emotions`: after each reply; a malformed last reply has none.
    """
    talk = new_talk(tokenizer)
    n_replies = len(emotions) + (ended == "bad_format")
    for n in range(n_replies):
        simulated_user.add_model_turn(talk.dialogue, RLVER, "a", "plain")
        talk.ids += [3, 4, 5, 6]
        talk.policy_mask += [0, 0, 1, 1]
        talk.reply_ends.append(len(talk.ids) - 1)
        if n < len(emotions):
            change = emotions[n] - talk.dialogue["emo_point"]
            simulated_user.add_user_turn(talk.dialogue, RLVER, "b", change)
    talk.dialogue["ended"] = ended
    talk.finish(tokenizer)
    return talk


# emotions after each reply, why it ended, the reward; two groups of three
TALKS = [
    ([60, 48, 100], "turns", 1.0),
    ([60], "bad_format", 0.0),
    ([20, 47], "goodbye", 0.47),
    ([90], "simulator_failed", math.nan),
    ([10, -8], "failed", 0.0),
    ([35, 45, 55], "turns", 0.55),
]


def talks(tokenizer) -> list[train_rlver.Conversation]:
    found = [ended_talk(tokenizer, emotions, ended) for emotions, ended, _ in TALKS]
    assert [talk.reward for talk in found] == pytest.approx([reward for _, _, reward in TALKS], nan_ok=True)
    return found


def turn_rewards(emotions: list[float], ended: str, reward: float) -> list[float]:
    """A reward of each reply: the change of the emotion / 100, where the last leads to the final reward."""
    levels = [0.3, *[emotion / 100 for emotion in emotions]]
    if ended != "bad_format":
        levels.pop()
    levels.append(reward)
    return [after - before for before, after in zip(levels, levels[1:])]


def test_advantages_on_turns_are_those_of_a_loop(tokenizer):
    """GRPO: the k-th reply gets the rewards from there on, compared with the k-th replies of its group."""
    conversations = talks(tokenizer)
    rewards_P_G = torch.tensor([conversation.reward for conversation in conversations]).view(-1, 3)
    advantages_P_G = train_grpo.group_advantages(rewards_P_G)
    dense_rewards = [train_rlver.TurnRewards(0.5)]
    train_grpo.set_advantages(conversations, advantages_P_G, dense_rewards, True, start_accelerator())

    for g in (0, 3):
        members = [n for n in range(g, g + 3) if not math.isnan(TALKS[n][2])]
        to_go = {}  # of each member: the sum of rewards from its k-th reply on
        for n in members:
            changes = turn_rewards(*TALKS[n])
            to_go[n] = [sum(changes[k:]) for k in range(len(changes))]
        centred = {}
        for n in members:
            for k, value in enumerate(to_go[n]):
                others = [row[k] for row in to_go.values() if len(row) > k]
                centred[n, k] = value - sum(others) / len(others)
        scale = math.sqrt(sum(value**2 for value in centred.values()) / len(centred)) + 1e-4
        for (n, k), value in centred.items():
            expected = advantages_P_G.flatten()[n].item() + 0.5 * value / scale
            assert conversations[n].advantages[4 * k + 2 : 4 * k + 4] == pytest.approx(
                [expected] * 2, abs=1e-5
            )
    assert set(conversations[3].advantages) == {0.0}  # it has no reward


def test_ppo_carries_rewards_on_turns_back(tokenizer):
    """With a critic that says 0 and gamma and lambda 1, a token's return is all that is still to come."""
    conversations = talks(tokenizer)
    accelerator = start_accelerator()
    args = train_rlver.Args(gradient_checkpointing=False, micro_batch_tokens=1000)
    critic = train_ppo.load_critic(BASE, args, None, accelerator)  # its head is new: zero
    train_ppo.set_values(conversations, critic)
    rewards_B_T = train_ppo.token_rewards(conversations, [train_rlver.TurnRewards(0.5)])
    train_ppo.set_advantages(conversations, rewards_B_T, 1.0, 1.0, accelerator)
    for conversation, case in zip(conversations, TALKS):
        for t, is_policy in enumerate(conversation.policy_mask):
            to_come = 0.0
            if is_policy and not math.isnan(conversation.reward):
                to_come = conversation.reward + 0.5 * sum(turn_rewards(*case)[t // 4 :])
            assert conversation.returns[t] == pytest.approx(to_come, abs=1e-6)
            assert is_policy or conversation.advantages[t] == 0
