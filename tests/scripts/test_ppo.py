"""train_ppo.py: its functions by hand, against naive loops and TRL's loss; the critic; the script."""

import json
import math
import sys
from pathlib import Path

import ppo_updates
import pytest
import torch
from launch import DDP, finished
from script_runs import killed_after, metrics_of, run_here, without_measurements, write_prompts
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmt import checkpoint
from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt.run import RunArgs, load_function
import train_ppo
from rewards import dense
from rlmt import data as rlmt_data

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def accelerator():
    return policy.start_accelerator()


# --- pure functions


def test_gae_by_hand():
    """gamma 0.9, lambda 0.5, a reward of 1 on the last of two tokens; the second row is one token long."""
    rewards = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    values = torch.tensor([[0.5, 0.2], [0.5, 7.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages, returns = train_ppo.gae(rewards, values, mask, 0.9, 0.5)
    # row 1: delta_2 = 1 - 0.2 = 0.8; delta_1 = 0.9 * 0.2 - 0.5 = -0.32; A_1 = -0.32 + 0.45 * 0.8 = 0.04
    torch.testing.assert_close(advantages, torch.tensor([[0.04, 0.8], [1.5, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.54, 1.0], [2.0, 0.0]]))


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.0, 1.0)])
def test_gae_is_the_double_sum_over_the_policys_tokens(gamma, lam):
    """Padding and a user's turns, at the start, in the middle and at the end, are passed over."""
    torch.manual_seed(0)
    rewards = torch.randn(5, 9, dtype=torch.float64)
    values = torch.randn(5, 9, dtype=torch.float64)
    mask = torch.tensor(
        [
            [1, 1, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 0, 0, 1, 1, 1, 0, 0],
            [0, 1, 0, 1, 0, 1, 0, 1, 0],
            [1, 0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 0],  # a completion without a reward
        ]
    )
    expected_advantages = torch.zeros_like(values)
    expected_returns = torch.zeros_like(values)
    for row in range(5):
        places = mask[row].nonzero().flatten().tolist()
        v = [values[row, place].item() for place in places] + [0.0]
        for t, place in enumerate(places):
            advantage = 0.0
            for k in range(t, len(places)):
                delta = rewards[row, places[k]].item() + gamma * v[k + 1] - v[k]
                advantage += (gamma * lam) ** (k - t) * delta
            expected_advantages[row, place] = advantage
            expected_returns[row, place] = advantage + v[t]
    advantages, returns = train_ppo.gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected_advantages)
    torch.testing.assert_close(returns, expected_returns)


def test_whitening_by_hand(accelerator):
    x = torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    mean, variance = train_ppo.moments(x, mask, accelerator)
    assert (mean.item(), variance.item()) == (3.0, 7.0)  # (4 + 1 + 9) / 2
    white = train_ppo.whiten(x, mask, accelerator)
    root = math.sqrt(7.0)
    torch.testing.assert_close(white, torch.tensor([[-2 / root, -1 / root, 0.0], [3 / root, 0.0, 0.0]]))


def test_value_loss_by_hand():
    """The rollout said 1, the return is 2, the clip is 0.5: values are held within 0.5 to 1.5."""
    values = torch.tensor([1.2, 3.0, 1.8], requires_grad=True)
    loss, is_clipped = train_ppo.value_loss(values, torch.ones(3), torch.full((3,), 2.0), 0.5)
    # 1.2 is not held; 3.0 is worse than held at 1.5; 1.8 is better than held at 1.5, which counts and has no
    # gradient
    torch.testing.assert_close(loss, torch.tensor([0.32, 0.5, 0.125]))
    assert is_clipped.tolist() == [False, False, True]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.8, 1.0, 0.0]))


# --- the critic


def test_values_under_padding_are_those_one_by_one(accelerator):
    """Also the meaning of a place: the value of token t is what the critic says of the text before it."""
    critic = train_ppo.load_critic("data/toy/reward_model", train_ppo.Args(gradient_checkpointing=False))
    completions = ppo_updates.stored_completions(6, 1)[0]
    train_ppo.set_values(critic, completions, 10_000, 1, accelerator)
    for completion in completions:
        ids = torch.tensor([completion.prompt_ids + completion.ids])
        with torch.no_grad():
            whole = critic(input_ids=ids).logits[0, :, 0]
        expected = whole[len(completion.prompt_ids) - 1 : -1]
        torch.testing.assert_close(torch.tensor(completion.values), expected, rtol=1e-4, atol=1e-5)


def test_the_critic_starts_as_asked(tmp_path):
    """From the policy with a new head at zero, or from the reward model with its head."""
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base")
    args = train_ppo.Args(model="data/toy/base", reward_model="data/toy/reward_model")
    critic = train_ppo.load_critic(train_ppo.find_critic(args, tokenizer), args)
    assert not critic.score.weight.any() and not critic.score.bias.any()
    assert critic.dropout.p == 0 and critic.training and critic.is_gradient_checkpointing

    args.critic = "reward_model"
    critic = train_ppo.load_critic(train_ppo.find_critic(args, tokenizer), args)
    head = load_file("data/toy/reward_model/model.safetensors")["score.weight"]
    assert torch.equal(critic.score.weight, head) and not critic.score.bias.any()

    tokenizer.add_tokens(["one more"])
    with pytest.raises(SystemExit):
        train_ppo.find_critic(args, tokenizer)


@pytest.mark.parametrize("lora_r, load_in_4bit", [(0, False), (4, False), (4, True)])
def test_the_critic_comes_back_from_a_checkpoint(accelerator, tmp_path, lora_r, load_in_4bit):
    """With LoRA the adapter and the whole head learn, and both are saved."""
    args = train_ppo.Args(lora_r=lora_r, load_in_4bit=load_in_4bit, gradient_checkpointing=False)
    critic = train_ppo.load_critic("data/toy/base", args)
    trained = {name: weight for name, weight in critic.named_parameters() if weight.requires_grad}
    if lora_r:
        assert all("lora" in name or "score.modules_to_save" in name for name in trained)
        assert any("score" in name for name in trained)
    for weight in trained.values():
        weight.data += torch.randn_like(weight)
    checkpoint.save_weights(tmp_path / "critic", critic, accelerator, merge=False)
    again = train_ppo.load_critic("data/toy/base", args, tmp_path / "critic")
    found = dict(again.named_parameters())
    for name, weight in trained.items():
        assert torch.equal(found[name], weight) and found[name].requires_grad, name


# --- one update


def test_a_completion_without_a_reward_teaches_neither_policy_nor_critic(accelerator):
    completions = ppo_updates.stored_conversations()[0]
    args = train_ppo.Args(gradient_checkpointing=False, micro_batch_tokens=300)
    critic = train_ppo.load_critic("data/toy/reward_model", args)
    train_ppo.set_values(critic, completions, 300, 0, accelerator)
    earned = train_ppo.token_rewards(completions, [])
    train_ppo.set_advantages(completions, earned, 1.0, 1.0, accelerator)

    lost = [completion for completion in completions if math.isnan(completion.reward)]
    assert len(lost) == 2 and not any(any(completion.advantages) for completion in lost)
    of_tokens = []
    for completion, row in zip(completions, earned, strict=True):
        if completion in lost:
            continue
        last = max(t for t, is_own in enumerate(completion.loss_mask) if is_own)
        assert row.nonzero().tolist() in ([[last]], []) and row[last].item() == pytest.approx(
            completion.reward
        )
        for t, is_own in enumerate(completion.loss_mask):
            if is_own:
                assert completion.returns[t] == pytest.approx(completion.reward, abs=1e-5)
                of_tokens.append(completion.advantages[t])
            else:
                assert completion.advantages[t] == 0.0
    of_tokens = torch.tensor(of_tokens)
    assert of_tokens.mean().item() == pytest.approx(0, abs=1e-5)
    assert of_tokens.var().item() == pytest.approx(1, abs=1e-4)

    for completion in lost:  # whatever the critic says of it
        completion.returns = [1e6] * len(completion.ids)
    means = train_ppo.accumulate_critic_gradients(completions, critic, args, 0, accelerator)
    assert 0 < means["value/loss"] < 10


def test_explained_variance_by_hand_and_none_where_all_returns_are_equal(accelerator):
    """Returns 0 0 1 1 and values 1/4 1/4 3/4 3/4: variances 1/3 and, of the rest, 1/12."""

    def explained(second_reward: float) -> float | None:
        completions = []
        for reward, value in ((0.0, 0.25), (second_reward, 0.75)):
            completion = rollout.Completion("a", [], [5], [6, 7], "", "", "", "ok", False, 0, reward=reward)
            completion.values = [value, value]
            completions.append(completion)
        earned = train_ppo.token_rewards(completions, [])
        metrics = train_ppo.set_advantages(completions, earned, 1.0, 1.0, accelerator)
        assert metrics["value/mean"] == 0.5
        return metrics.get("value/explained_variance")

    assert explained(1.0) == pytest.approx(0.75)
    assert explained(0.0) is None


def test_dense_rewards_come_on_top_token_by_token(tmp_path):
    """A process reward gives each step the rise of its probability; here it is 0.25 and then 0.75."""
    (tmp_path / "judge.py").write_text(
        "def steps(messages, text):\n    return [(text.index(' Good'), 0.25), (len(text), 0.75)]\n"
    )
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base")
    tokenizer.stop_ids = [tokenizer.eos_token_id]
    source = dense.ProcessReward(load_function(f"{tmp_path}/judge.py:steps"), 2.0, tokenizer)
    ids = tokenizer(" Friday Good Hello")["input_ids"] + [tokenizer.eos_token_id]
    prompt = {"id": "a", "messages": [], "prompt_ids": [5]}
    completion = rollout.read_completion(tokenizer, "plain", prompt, rollout.Sample(ids, None, True))
    completion.reward = 10.0
    # the steps end with the first and the third token; the outcome is on the end of turn
    assert train_ppo.token_rewards([completion], [source]).tolist() == [[0.5, 0.0, 1.0, 10.0]]


def test_kl_in_the_reward_is_the_log_ratio_of_every_token(accelerator):
    torch.manual_seed(0)
    completions = ppo_updates.stored_conversations()[0]
    reference = policy.load_reference("data/toy/base", 0.9, accelerator)
    model = policy.Policy(policy.load_trained("data/toy/base", RunArgs(gradient_checkpointing=False)), 0.9)
    for weight in model.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    policy.set_old_logprobs(model, completions, 300, 0, accelerator)
    policy.set_reference_logprobs(model, reference, completions, 300, 0, accelerator)
    kl = train_ppo.kl_of_tokens(completions)
    for completion, row in zip(completions, kl, strict=True):
        ids = torch.tensor([completion.prompt_ids + completion.ids])
        targets = torch.tensor(completion.ids).unsqueeze(1)
        logprobs = []
        for network in (model.model, reference.model):
            with torch.no_grad():
                logits = network(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1] / 0.9
            logprobs.append(logits.log_softmax(-1).gather(1, targets).squeeze(1))
        expected = (logprobs[0] - logprobs[1]) * torch.tensor(completion.loss_mask)
        torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-3, atol=1e-4)
        assert not row[len(expected) :].any()


# --- the script


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 20)


def command(launcher: list[str], prompts: Path, out: Path, *more: str) -> list[str]:
    """Returns a tiny run, two steps an epoch. The base model has no think format."""
    tiny = [
        *["--preset", "toy", "--model", "data/toy/base", "--think-format", "plain"],
        *["--prompts-per-step", "8", "--max-completion-tokens", "24", "--save-steps", "1"],
    ]
    files = ["--prompts", str(prompts), "--out", str(out)]
    return [sys.executable, *launcher, "train_ppo.py", *tiny, *files, *more]


def test_a_killed_run_ends_with_the_same_bits(prompts, tmp_path):
    whole = tmp_path / "whole"
    run_here(command([], prompts, whole, "--steps", "3"))
    broken = tmp_path / "broken"
    killed_after(1, whole, broken)
    run_here(command([], prompts, broken, "--steps", "3", "--resume"))

    # what the second and third step log depends on the critic and its optimizer
    assert metrics_of(whole) == metrics_of(broken)
    for row in rlmt_data.read_log(whole / "metrics.jsonl"):
        parts = [row[f"time/{part}"] for part in ("rollout", "reward", "advantage", "update", "other")]
        assert sum(parts) == pytest.approx(row["step_time"])
    assert rlmt_data.read_log(whole / "completions.jsonl") == rlmt_data.read_log(broken / "completions.jsonl")
    for name in ("model", "checkpoint-3/critic"):
        expected = load_file(whole / name / "model.safetensors")
        found = load_file(broken / name / "model.safetensors")
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())

    metrics = metrics_of(whole)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert all(math.isfinite(value) for value in row.values())
    assert metrics[0]["kl"] == 0.0 < metrics[1]["kl"]
    stored = json.loads((ROOT / "results/toy/toy-rlmt-ppo-s0/metrics.jsonl").read_text().splitlines()[0])
    trls = {"rewards/preference/mean", "rewards/preference/std", "clip_ratio/low_min", "clip_ratio/high_max"}
    assert without_measurements(stored).keys() - trls <= metrics[0].keys()
    assert json.loads((whole / "config.json").read_text())["args"]["critic"] == "reward_model"
    assert json.loads((whole / "summary.json").read_text())["steps"] == 3
    AutoModelForCausalLM.from_pretrained(whole / "model")


def test_two_processes_and_several_updates(prompts, tmp_path):
    """A malformed completion gets a floor below the lowest reward of the whole step, over both processes."""
    several = ["--updates-per-rollout", "2", "--kl", "reward"]
    finished(command(DDP, prompts, tmp_path / "run", "--steps", "2", *several))
    first, second = rlmt_data.read_log(tmp_path / "run" / "metrics.jsonl")
    assert first["kl"] == pytest.approx(0.0, abs=1e-6) and second["kl"] != 0.0
    assert first["approximate_kl"] > 0.0
    for step in (1, 2):
        rows = [
            row for row in rlmt_data.read_log(tmp_path / "run" / "completions.jsonl") if row["step"] == step
        ]
        good = [row["reward"] for row in rows if row["status"] == "ok"]
        bad = [row["reward"] for row in rows if row["status"] != "ok"]
        assert len(rows) == 8 and good and bad
        assert bad == pytest.approx([min(good) - 2.0] * len(bad))
