"""PPO's numbers against hand-worked ones and naive loops, the hooks that it leans on, and that the critic is what makes it
learn."""

import copy
import dataclasses
import inspect
import json
import zlib

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from transformers import LlamaForTokenClassification
from trl import GRPOTrainer

import ppo
import train_ppo
import utils
from ppo import gae, value_loss, whiten

# --- numbers


def test_gae_by_hand():
    """gamma 0.9, lambda 0.5, a reward of 1 on the last of two tokens; the second row is one token long."""
    rewards, mask = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    values = torch.tensor([[0.5, 0.2], [0.5, 7.0]])
    advantages, returns = gae(rewards, values, mask, 0.9, 0.5)
    # row 1: delta_2 = 1 - 0.2 = 0.8; delta_1 = 0.9 * 0.2 - 0.5 = -0.32; A_1 = -0.32 + 0.45 * 0.8 = 0.04
    torch.testing.assert_close(advantages, torch.tensor([[0.04, 0.8], [1.5, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.54, 1.0], [2.0, 0.0]]))


def test_gae_with_gamma_and_lambda_one_is_reward_minus_value():
    values, mask = torch.randn(3, 5), torch.tensor([[1] * 5, [1] * 3 + [0] * 2, [1] + [0] * 4])
    rewards = torch.zeros(3, 5)
    rewards[torch.arange(3), mask.sum(1) - 1] = torch.tensor([1.0, -2.0, 3.0])
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.0], [-2.0], [3.0]]) * mask)
    torch.testing.assert_close(advantages, (torch.tensor([[1.0], [-2.0], [3.0]]) - values) * mask)


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_is_the_double_sum(gamma, lam):
    torch.manual_seed(0)
    rewards, values, lengths = torch.randn(4, 7), torch.randn(4, 7), [7, 4, 1, 6]
    mask = torch.tensor([[1] * n + [0] * (7 - n) for n in lengths])
    advantages, _ = gae(rewards, values, mask, gamma, lam)
    for row, n in enumerate(lengths):
        v = [*values[row, :n].tolist(), 0.0]
        for t in range(n):
            expected = sum(
                (gamma * lam) ** (k - t) * (rewards[row, k].item() + gamma * v[k + 1] - v[k])
                for k in range(t, n)
            )
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-5)
    assert (advantages * (1 - mask) == 0).all()


def test_gae_passes_over_what_the_policy_did_not_write():
    """A user's turn between two replies, and padding: the same numbers as without them, and 0 on them."""
    rewards, values = torch.tensor([[0.0, 0.5, 1.0]]), torch.tensor([[0.5, 0.2, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), 0.9, 0.5)
    places = torch.tensor([0, 3, 4])
    spread = lambda x: torch.full((1, 6), 9.0).index_copy(1, places, x)
    mask = torch.zeros(1, 6).index_fill(1, places, 1.0)
    wide_advantages, wide_returns = gae(spread(rewards) * mask, spread(values), mask, 0.9, 0.5)
    torch.testing.assert_close(wide_advantages[:, places], advantages)
    torch.testing.assert_close(wide_returns[:, places], returns)
    assert not (wide_advantages * (1 - mask)).any() and not (wide_returns * (1 - mask)).any()


def test_whitening_is_over_real_tokens_of_all_processes():
    torch.manual_seed(0)
    x, mask = torch.randn(6, 5) * 3 + 2, (torch.rand(6, 5) > 0.4).long()
    real = x[mask == 1]
    white = whiten(x, mask)
    torch.testing.assert_close(white[mask == 1], (real - real.mean()) / real.std())
    assert (white[mask == 0] == 0).all()
    # two processes with three rows each: what one asks to add up is added to what the other has
    halves = [(x[:3], mask[:3]), (x[3:], mask[3:])]
    n, s = sum(m.sum() for _, m in halves), sum((h * m).sum() for h, m in halves)
    squares = sum(((h - s / n) ** 2 * m).sum() for h, m in halves)
    for (h, m), expected in zip(halves, (white[:3], white[3:])):
        torch.testing.assert_close(
            whiten(h, m, lambda sums: torch.stack([n, s]) if sums.ndim else squares), expected
        )


def test_value_loss_by_hand():
    """The rollout said 1, the return is 2. A value of 1.2 is within the clip of 0.5; 3.0 counts as 1.5 and as itself, the
    larger error; 1.8 would leave the clip on the good side and is held at 1.5."""
    loss, clipped = value_loss(torch.tensor([1.2, 3.0, 1.8]), torch.ones(3), torch.full((3,), 2.0), 0.5)
    torch.testing.assert_close(loss, torch.tensor([0.32, 0.5, 0.125]))
    assert clipped.tolist() == [False, False, True]
    values = torch.tensor([1.8], requires_grad=True)
    value_loss(values, torch.ones(1), torch.full((1,), 2.0), 0.5)[0].sum().backward()
    assert values.grad.item() == 0.0


# --- what it leans on


@pytest.mark.parametrize(
    "function, parameters",
    [
        (GRPOTrainer._save_checkpoint, ["model", "trial"]),
        (GRPOTrainer._load_optimizer_and_scheduler, ["checkpoint"]),
    ],
)
def test_trl_still_has_the_hooks(function, parameters):
    """The others are in test_rollout.py."""
    found = list(inspect.signature(function).parameters)[1:]
    assert found == parameters, (
        f"TRL moved {function.__qualname__}: train_ppo.py overrides it; adapt it, or pin trl==1.16.0"
    )


def test_trl_still_takes_advantages_a_token_and_one_sample_a_prompt():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "if advantages.dim() == 1" in source, (
        "TRL's policy loss no longer accepts (B, T) advantages; pin trl==1.16.0"
    )
    assert 'inputs["num_items_in_batch"]' in source and "ref_per_token_logps" in source
    config = ppo.PPOConfig(
        output_dir="x", per_device_train_batch_size=3, use_cpu=True, bf16=False, report_to=[]
    )
    assert config.num_generations == 1 and config.generation_batch_size == 3


# --- learning


class ShareOfGoodTokens:
    """The share of a completion's words whose id is a multiple of 4, and an offset that depends on the prompt
    alone: about ten times as large as what the policy can change, so that only a critic can tell the two apart."""

    n_scored = n_truncated = 0

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def score(self, prompts, texts):
        ids = [self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
        good = [sum(i % 4 == 0 for i in row) / max(1, len(row)) for row in ids]
        return [g + 6 * (zlib.crc32(p[0]["content"].encode()) % 4) - 9 for g, p in zip(good, prompts)]


class NoCritic(ppo.PPOTrainer):
    def values(self, batch):
        return super().values(batch) * 0


def ppo_trainer(run, cls=ppo.PPOTrainer, micro=16, accumulation=4, steps=2, lr=1e-3, **changes):
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base")
    utils.prepare_tokenizer(tokenizer, "plain")
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    policy, critic = LlamaForCausalLM(config), LlamaForTokenClassification(config)
    policy.save_pretrained(run / "start")
    policy.config._name_or_path = str(run / "start")
    torch.nn.init.zeros_(critic.score.weight)
    critic.dropout.p = 0.0
    words = [w for w in sorted(tokenizer.get_vocab()) if w.strip().isalpha()][:64]
    rows = [{"id": w, "prompt": [{"role": "user", "content": w}]} for w in words]
    args = dict(
        output_dir=str(run),
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        max_completion_length=8,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=lr,
        loss_type="dapo",
        use_bias_correction_kl=False,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        vllm_importance_sampling_correction=False,
        seed=0,
    )
    own = dict(critic_learning_rate=lr, gamma=1.0, lam=1.0, value_clip=0.5)
    own |= {k: changes.pop(k) for k in list(changes) if k in own or k == "kl_in_reward"}
    return cls(
        model=policy,
        args=ppo.PPOConfig(**{**args, **changes}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_model=ShareOfGoodTokens(tokenizer),
        think_format="plain",
        on_bad_format="score",
        format_margin=1.0,
        run=run,
        allow_truncation=True,
        critic=critic,
        **own,
    )


def own_rewards(run) -> list[list[float]]:
    """What the policy can change, the share of good words, by step."""
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    share = lambda r: r["reward"] - 6 * (zlib.crc32(r["messages"][0]["content"].encode()) % 4) + 9
    return [[share(r) for r in rows if r["step"] == step] for step in range(1, rows[-1]["step"] + 1)]


def test_ppo_learns_because_of_its_critic(tmp_path):
    """150 steps of 64 completions; measured: 0.22 -> 0.93 with the critic, 0.22 -> 0.32 with its values set to zero."""
    ends = {}
    for cls in (ppo.PPOTrainer, NoCritic):
        (tmp_path / cls.__name__).mkdir()
        trainer = ppo_trainer(tmp_path / cls.__name__, cls, micro=64, accumulation=1, steps=150, lr=2e-3)
        trainer.train()
        steps = own_rewards(tmp_path / cls.__name__)
        ends[cls] = sum(map(sum, steps[-10:])) / 640
        assert sum(map(sum, steps[:3])) / 192 < 0.3
        if cls is ppo.PPOTrainer:
            assert trainer.state.log_history[-2]["value/explained_variance"] > 0.9
    assert ends[ppo.PPOTrainer] > 0.6 > 0.45 > ends[NoCritic]


def test_micro_batches_do_not_change_the_update(tmp_path):
    """The same 64 completions in one forward or in four: critic and policy end with the same weights."""
    ends = []
    for micro in (64, 16):
        run = tmp_path / str(micro)
        run.mkdir()
        trainer = ppo_trainer(run, micro=micro, accumulation=64 // micro, steps=2)
        trainer.train()
        logged = [r for r in trainer.state.log_history if "value/loss" in r]
        ends.append((trainer.critic.state_dict(), trainer.model.state_dict(), logged))
    for a, b in zip(ends[0][:2], ends[1][:2]):
        assert all(torch.allclose(a[k], b[k], atol=2e-5) for k in a)
    for key in ("value/grad_norm", "grad_norm", "value/mean", "value/explained_variance", "reward"):
        assert [r[key] for r in ends[0][2]] == pytest.approx(
            [r[key] for r in ends[1][2]], rel=1e-3, abs=1e-5
        ), key


class Watched(ppo.PPOTrainer):
    def estimate_advantages(self, output):
        self.policy_then = copy.deepcopy(self.model.state_dict())
        result = super().estimate_advantages(output)
        self.output, self.scores = output, [row["reward"] for row in self._rows]
        return result


def test_kl_in_the_reward_is_the_log_ratio_of_every_token(tmp_path):
    trainer = ppo_trainer(
        tmp_path, Watched, micro=64, accumulation=1, steps=3, lr=1e-2, beta=0.5, kl_in_reward=0.5
    )
    trainer.train()
    out, start = trainer.output, AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    policy.load_state_dict(trainer.policy_then)
    for row in range(4):
        prompt = out["prompt_ids"][row][out["prompt_mask"][row] == 1]
        completion = out["completion_ids"][row][out["completion_mask"][row] == 1]
        ids = torch.cat([prompt, completion])[None]
        with torch.no_grad():
            now, then = (m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (policy, start))
        log_ratio = (now - then)[torch.arange(len(completion)), completion]
        rewards = -0.5 * log_ratio
        rewards[-1] += trainer.scores[row]
        expected = rewards.flip(0).cumsum(0).flip(0)  # gamma = lambda = 1: what is still to come
        torch.testing.assert_close(out["returns"][row, : len(completion)], expected, atol=1e-3, rtol=1e-3)
        assert log_ratio.abs().max() > 1e-3
    assert trainer.state.log_history[-2]["kl"] != 0 and trainer.beta == 0.5


def test_a_completion_without_a_reward_teaches_neither_policy_nor_critic(tmp_path):
    """Every second one's judge fails: no advantage there, a return that is the value, and the others' statistics alone."""

    class Fails(Watched):
        def _total(self, rows):
            rows = [
                row
                | {"status": "ok", "rewards": row["rewards"] | {"preference": None if i % 2 else float(i)}}
                for i, row in enumerate(rows)
            ]
            return super()._total(rows)

    trainer = ppo_trainer(tmp_path, Fails, micro=64, accumulation=1, steps=1)
    trainer.train()
    out, mask = trainer.output, ppo.loss_mask(trainer.output).bool()
    lost = mask & (torch.arange(len(mask)) % 2 == 1)[:, None]
    assert not out["advantages"][lost].any() and torch.equal(out["returns"][lost], out["values"][lost])
    kept = out["advantages"][mask & ~lost]
    assert kept.mean().item() == pytest.approx(0, abs=1e-4) and kept.var().item() == pytest.approx(
        1, abs=1e-3
    )


def test_the_critic_starts_as_asked(tmp_path):
    """From the policy with a head of zeros, or from the reward model with its head; another vocabulary is refused."""
    tokenizer = AutoTokenizer.from_pretrained("data/toy/base")
    args = train_ppo.Args(
        model="data/toy/base", reward_model="data/toy/reward_model", gradient_checkpointing=False
    )
    load = lambda args: ppo.load_critic(ppo.critic_start(args, tokenizer), args)
    critic = load(args)
    assert not critic.score.weight.any() and not critic.score.bias.any() and critic.dropout.p == 0
    assert critic.training  # else gradient checkpointing does nothing
    critic = load(dataclasses.replace(args, critic="reward_model"))
    head = load_file("data/toy/reward_model/model.safetensors")["score.weight"]
    assert torch.equal(critic.score.weight, head) and not critic.score.bias.any()
    adapter = load(dataclasses.replace(args, lora_r=4))
    trained = {n.split(".")[-2] for n, p in adapter.named_parameters() if p.requires_grad and "lora" not in n}
    assert trained == {"default"} and "score.modules_to_save.default.weight" in "".join(
        n for n, _ in adapter.named_parameters()
    )
    tokenizer.add_tokens(["one more"])
    with pytest.raises(SystemExit):
        load(dataclasses.replace(args, critic="reward_model"))
