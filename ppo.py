"""PPO's algorithm, for train_ppo.py and train_rlver.py: advantages, value loss, and the trainer with its critic.

The policy's side (clipped loss, KL, rollouts, logs) is TRL's GRPOTrainer by way of rollout.py; the critic is a model of its
own with its own optimizer, and both are in every checkpoint. Hooks in TRL: tests/test_ppo.py names them.
"""

import contextlib
import os

import runs  # isort: skip
import torch
from transformers import AutoConfig, AutoModelForTokenClassification
from trl import GRPOConfig

import faults
import rollout
import training
import utils


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns (B, T) of rewards and values (B, T); `mask` is 1 on the policy's tokens. The others, padding or a
    user's turn in between, get 0 and are passed over.

    The value after a row's last token is 0. Source: Schulman et al. 2016, equation 16.
    """
    advantages, following, value = (
        torch.zeros_like(values),
        torch.zeros_like(values[:, 0]),
        torch.zeros_like(values[:, 0]),
    )
    for t in reversed(range(values.size(1))):
        real, delta = mask[:, t].bool(), rewards[:, t] + gamma * value - values[:, t]
        following = torch.where(real, delta + gamma * lam * following, following)
        value = torch.where(real, values[:, t], value)
        advantages[:, t] = following * mask[:, t]
    return advantages, (advantages + values) * mask


def loss_mask(batch: dict) -> torch.Tensor:
    """1 on the policy's tokens (B, T): TRL's tool_mask is 0 on what others wrote into a completion."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def moments(x: torch.Tensor, mask: torch.Tensor, total) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of x (B, T) over the real tokens of all processes; `total` adds a tensor up over processes."""
    n, s = total(torch.stack([mask.sum().to(x.dtype), (x * mask).sum()]))
    return s / n, total(((x - s / n) ** 2 * mask).sum()) / (n - 1).clamp(min=1)


def whiten(x: torch.Tensor, mask: torch.Tensor, total=lambda sums: sums) -> torch.Tensor:
    """x (B, T) with mean 0 and variance 1 over the real tokens of all processes, 0 on padding."""
    mean, variance = moments(x, mask, total)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def value_loss(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float):
    """Half the squared error (B, T) to the returns, the larger of that of the values and of the values held within `clip` of
    the rollout's; and where the clipping was the larger one."""
    clipped = old + (values - old).clamp(-clip, clip)
    plain, bounded = (values - returns) ** 2, (clipped - returns) ** 2
    return 0.5 * torch.max(plain, bounded), bounded > plain


class PPOConfig(GRPOConfig):
    """GRPOConfig that allows one sample a prompt, as there is no group to compare with."""

    def __post_init__(self):
        per_process = self.per_device_train_batch_size * (
            self.steps_per_generation or self.gradient_accumulation_steps
        )
        self.num_generations = max(2, per_process)  # what TRL's checks accept
        super().__post_init__()
        self.num_generations = 1


class PPOTrainer(rollout.RolloutTrainer):
    """RolloutTrainer with a critic: an AutoModelForTokenClassification of one output on the policy's tokens."""

    def __init__(
        self, *args, critic, critic_learning_rate, gamma, lam, value_clip, kl_in_reward=0.0, **kwargs
    ):
        super().__init__(*args, **kwargs)
        self.gamma, self.lam, self.value_clip, self.kl_in_reward, self._sums = (
            gamma,
            lam,
            value_clip,
            kl_in_reward,
            0.0,
        )
        trained = [p for p in critic.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=critic_learning_rate, weight_decay=self.args.weight_decay)
        self.critic, self.critic_optimizer = self.accelerator.prepare(critic, optimizer)
        self.beside["critic"] = self.critic, self.critic_optimizer.optimizer

    def values(self, batch: dict) -> torch.Tensor:
        """Values (B, T) of the text before each completion token; longest rows first, in micro-batches, without padding."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask, n = (
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
        )
        order, chunks = rollout.trimmed(mask, self.args.per_device_train_batch_size)
        out = []
        for rows, start, end in chunks:
            faults.beat()
            logits = self.critic(
                input_ids=ids[rows, start:end], attention_mask=mask[rows, start:end], use_cache=False
            ).logits
            cut = ids.size(1) - end
            out.append(torch.nn.functional.pad(logits[:, cut - n - 1 : -1, 0].float(), (0, cut)))
        return torch.cat(out)[order.argsort()]

    @torch.no_grad()
    def estimate_advantages(self, output: dict) -> torch.Tensor:
        """Puts values, returns and whitened advantages (B, T) into `output`; returns a completion's mean advantage (B,). The
        reward stands on the policy's last token, dense ones and the KL penalty where they arise."""
        mask, total = loss_mask(output), lambda sums: self.accelerator.reduce(sums, "sum")
        known = mask * self.rewarded()
        values = self.values(output) * mask
        rewards = torch.zeros_like(values)
        scores = torch.tensor([row["reward"] for row in self._rows], device=values.device)
        rewards[
            torch.arange(len(rewards)), (mask * torch.arange(mask.size(1), device=mask.device)).argmax(1)
        ] = scores
        for weight, _, dense, _ in self._dense:
            rewards += weight * dense * mask
        if self.kl_in_reward:
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            whole = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            logps = self._get_per_token_logps_and_entropies(
                self.model, ids, whole, mask.size(1), self.args.per_device_train_batch_size
            )[0]
            log_ratio = (logps - output["ref_per_token_logps"]) * mask
            rewards -= self.kl_in_reward * log_ratio
            self._metrics["train"]["kl"].append((total(log_ratio.sum()) / total(mask.sum())).item())
        advantages, returns = gae(rewards, values, known, self.gamma, self.lam)
        returns = torch.where(
            known.bool(), returns, values
        )  # no error to learn from where there is no reward
        output |= {"values": values, "returns": returns, "advantages": whiten(advantages, known, total)}
        (mean, _), (_, unexplained), (_, spread) = (
            moments(x, known, total) for x in (values, returns - values, returns)
        )
        self._metrics["train"]["value/mean"].append(mean.item())
        self._metrics["train"]["value/explained_variance"].append(
            (1 - unexplained / spread.clamp(min=1e-8)).item()
        )
        return (output["advantages"] * mask).sum(1) / mask.sum(1)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logps = out[0].detach()  # for the approximate KL below
        return out

    def _compute_loss(self, model, inputs):
        """The policy's loss by TRL, after a backward of the critic's: a mean over the tokens that the rollout has in this
        optimizer step, whatever its micro-batches are."""
        mask = loss_mask(inputs)
        tokens = (
            inputs["num_items_in_batch"] / self.accelerator.num_processes
        )  # of the rollout, a process's share
        share = (
            self.current_gradient_accumulation_steps / self.args.steps_per_generation
        )  # of it, in this optimizer step
        last = self.accelerator.sync_gradients
        with (
            contextlib.nullcontext()
            if last or training.shards() > 1
            else self.accelerator.no_sync(self.critic)
        ):
            loss, clipped = value_loss(
                self.values(inputs), inputs["values"], inputs["returns"], self.value_clip
            )
            self.accelerator.backward((loss * mask).sum() / (tokens * share))
        if last:
            norm = self.accelerator.clip_grad_norm_(self.critic.parameters(), self.args.max_grad_norm)
            self._metrics["train"]["value/grad_norm"].append(float(norm))
            self.critic_optimizer.step()
            self.critic_optimizer.zero_grad()
        beta, self.beta = self.beta, 0.0 if self.kl_in_reward else self.beta
        policy_loss = super()._compute_loss(model, inputs)
        self.beta = beta
        log_ratio = self._logps - inputs.get("old_per_token_logps", self._logps)
        names = [
            "value/loss",
            "value/clip_fraction",
            "approximate_kl",
        ]  # means over the tokens of an optimizer step
        parts = [loss.detach(), clipped, log_ratio.exp() - 1 - log_ratio]
        self._sums = self._sums + torch.stack([mask.sum(), *[(x * mask).sum() for x in parts]])
        if last:
            sums, self._sums = self.accelerator.reduce(self._sums, "sum"), 0.0
            for name, x in zip(names, sums[1:] / sums[0]):
                self._metrics["train"][name].append(x.item())
        return policy_loss


def check_launch() -> None:
    """Exits with 2 under a launch config that cannot train a policy and a critic."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        runs.fail(
            "PPO trains two models, DeepSpeed's engine holds one; launch with accelerate/8gpu_fsdp2.yaml"
        )


def critic_start(args, tokenizer) -> str:
    """The folder that the critic starts from; exits with 2 when its tokens are not the policy's, which it must read."""
    start = {"policy": args.model, "reward_model": args.reward_model}.get(args.critic, args.critic)
    if args.critic != "policy" and runs.load_tokenizer(start).get_vocab() != tokenizer.get_vocab():
        runs.fail(
            f"--critic {args.critic}: {start} has another tokenizer than the policy; use --critic policy"
        )
    return start


def load_critic(start: str, args):
    """A token classifier of one output; a head that the checkpoint does not have starts at zero. With LoRA, an adapter."""
    dtype = utils.DTYPE if args.lora_r else "float32"
    config = AutoConfig.from_pretrained(start, num_labels=1, trust_remote_code=False)
    config.classifier_dropout = 0.0  # else 0.1
    critic, new = training.load_weights(
        AutoModelForTokenClassification, start, new_head=True, config=config, dtype=dtype
    )
    for name, parameter in critic.named_parameters():
        if name in new:
            torch.nn.init.zeros_(parameter)
    critic = training.beside_policy(
        critic, args, exclude_modules=["score"], modules_to_save=["score"], task_type="TOKEN_CLS"
    )
    for parameter in critic.parameters():
        if parameter.requires_grad:  # the head too: an update of 1e-5 is lost in bfloat16
            parameter.data = parameter.data.float()
    return critic.train()  # gradient checkpointing works in this mode only
