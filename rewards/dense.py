"""Dense rewards: what a completion earns on its way, on steps (a process reward model) or on tokens (PRIME).

They come on top of the outcome's reward: `--rewards math:1 process:0.5 --reward-args
process.model=file.py:function`. A source has `token_rewards(completions)`, which returns two tensors (B, T)
over the completions' tokens: rewards, and where one is given (an event). That of PRIME then trains its model
for a step. GRPO makes token advantages of them (`add_advantages`); PPO adds them to the tokens' rewards
before GAE. train_rlver.py has dense rewards on turns.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.nn import functional as F

from rewards import Part
from rlmt.learner import Learner, Policy, pad
from rlmt.model import load_trained
from rlmt.scorers import load_function

MAX_GRAD_NORM = 1.0  # of the model behind `prime`


def token_advantages(
    values: torch.Tensor, events: torch.Tensor, group_size: int, scale: bool
) -> torch.Tensor:
    """Returns advantages (B, T) of dense rewards; the rows of a group are neighbours.

    Number the events of a row 0, 1, 2 and so on. Every token after event k-1, up to and with event k, gets
    the same advantage: R_k, the row's rewards from event k to its end, minus the mean of R_k over those rows
    of the group that have an event k. Tokens after the last event get 0. A row with the values [0, 2, 0, 1, 0]
    and events at its second and fourth token has R_0 = 3 for the first two tokens and R_1 = 1 for the next
    two. The sum over later steps is DeepSeekMath's process supervision (2402.03300, section 4.1.3). The
    comparison of k-th with k-th is MT-GRPO's (2505.11821).

    Args:
        values: (B, T) dense rewards, which count where `events` (B, T, bool) is true.
        scale: divide these differences by their root mean square over the group's events, plus 1e-4.
    """
    counts = events.sum(1, keepdim=True)
    most_events = int(events.sum(1).max())
    if most_events == 0:
        return torch.zeros_like(values)
    returns = (values * events).flip(1).cumsum(1).flip(1)
    event_columns = (~events).int().argsort(dim=1, stable=True)[:, :most_events]  # in order
    has_kth = torch.arange(most_events, device=values.device) < counts
    return_of_kth = torch.where(has_kth, returns.gather(1, event_columns), math.nan)

    groups = return_of_kth.view(-1, group_size, most_events)
    groups = groups - groups.nanmean(1, keepdim=True)
    if scale:
        groups = groups / ((groups**2).nanmean((1, 2), keepdim=True).sqrt() + 1e-4)

    next_event = events.long().cumsum(1) - events.long()  # of each token, the k of the event that it leads to
    credit = groups.view(-1, most_events).gather(1, next_event.clamp(max=most_events - 1))
    return torch.where(next_event < counts, credit, 0.0)


def add_advantages(source, completions: list, group_size: int, scale: bool) -> None:
    """Adds the weighted token advantages of a dense reward to `advantages` of completions (GRPO).

    PRIME's model learns here. `scale`: divides by the spread in the group, if the reward is of that kind.
    """
    values, events = source.token_rewards(completions)
    has_reward = torch.tensor([[not math.isnan(completion.reward)] for completion in completions])
    advantages = token_advantages(values, events & has_reward, group_size, scale and source.scaled)
    for completion, row in zip(completions, advantages.tolist(), strict=True):
        pairs = zip(completion.advantages, row)  # without the padding of the row
        completion.advantages = [advantage + source.weight * more for advantage, more in pairs]


# --- steps


class ProcessReward:
    """Rewards a step by how much it raises the probability of being on the right way, at first 0.

    A completion's rewards add up to its last step's probability, so more steps are worth nothing by
    themselves (the progress of 2410.08146). `probabilities(messages, text)` returns a list of (end of a step
    in `text`, probability), from a process reward model or a rule.
    """

    name = "process"
    scaled = True  # as advantages in GRPO: divided by their spread in the group
    learner = None  # it does not learn
    metrics = {}

    def __init__(self, probabilities: Callable, weight: float, policy_tokenizer):
        self.probabilities = probabilities
        self.weight = weight
        self.policy_tokenizer = policy_tokenizer

    def token_rewards(self, completions: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards (B, T) and where one is given; notes each completion's sum in `rewards`."""
        values = pad([[0.0] * len(completion.ids) for completion in completions])
        events = values.bool()
        for n, completion in enumerate(completions):
            before = 0.0
            for end, probability in self.probabilities(completion.messages, completion.text):
                token = self._token_at(completion.ids, end)
                values[n, token] += probability - before
                events[n, token] = True
                before = probability
            completion.rewards[self.name] = before
        if not values.isfinite().all():
            raise ValueError("the reward process must give finite probabilities")
        return values, events

    def _token_at(self, ids: list[int], end: int) -> int:
        """Returns the place of the token that writes the character before the offset `end` of the text."""

        def n_characters(n_tokens: int) -> int:
            return len(self.policy_tokenizer.decode(ids[:n_tokens], clean_up_tokenization_spaces=False))

        # index i of this range stands for i + 1 tokens, the last of which is at place i
        return bisect_left(range(1, len(ids)), end, key=n_characters)


# --- tokens


class ImplicitReward:
    """PRIME (2502.01456): a token's reward is beta log(phi / reference), from a model phi that learns online.

    phi starts as the policy does. With every rollout it learns that the sum over a completion is the
    log-odds of being right.
    """

    name = "prime"
    # while phi equals the reference its rewards are noise; their size says what it has learned
    scaled = False

    def __init__(self, args, part: Part, checkpoint: Path | None, policy: Learner):
        """`args`: the training script's. `checkpoint`: of a resumed run. `policy`: phi shares its reference."""
        self.weight = part.weight
        self.beta = part.options["beta"]
        model = load_trained(args.model, args, checkpoint / self.name if checkpoint else None)
        self.learner = Learner(
            Policy(model, args.temperature),
            policy.accelerator,
            args.micro_batch_tokens,
            part.options["learning_rate"],
            weight_decay=0.0,
            optim=args.optim,
        )
        self.learner.reference = policy.reference
        self.metrics = {}

    def token_rewards(self, completions: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards (B, T) of phi as it is, then trains it for one step where a verdict is known."""
        phi = self.learner
        n_known = sum(gather_object([completion.correct is not None for completion in completions]))
        has_labels = n_known > 0
        n_known = max(1, n_known)

        rows = {}  # by the identity of the completion
        sums = {"prime/loss": 0.0, "prime/accuracy": 0.0}
        for micro_batch in phi.micro_batches(completions):
            batch = phi.collate(micro_batch)
            verdicts = [math.nan if one.correct is None else one.correct for one in micro_batch]
            labels = torch.tensor(verdicts, device=phi.accelerator.device)
            known = ~labels.isnan()
            (logprobs,) = phi.logprobs(batch, extra="none")
            value = self.beta * (logprobs - phi.reference_logprobs(batch)) * batch["completion_mask"]
            log_odds = value.sum(1)
            loss = F.binary_cross_entropy_with_logits(log_odds[known], labels[known], reduction="sum")
            phi.backward(loss / n_known)

            sums["prime/loss"] += loss.detach()
            sums["prime/accuracy"] += ((log_odds > 0) == labels.bool())[known].sum()
            for completion, row, total in zip(micro_batch, value.tolist(), log_odds.tolist(), strict=True):
                rows[id(completion)] = row[: len(completion.ids)]
                completion.rewards[self.name] = total
        self.metrics = phi.means(sums, n_known)
        phi.clip_gradients(MAX_GRAD_NORM)
        if has_labels:  # else Adam's momentum alone would move phi
            phi.optimizer.step()
        phi.optimizer.zero_grad()
        values = pad([rows[id(completion)] for completion in completions])
        return values, pad([[1.0] * len(completion.ids) for completion in completions]).bool()


# --- what the command line asks for


def load_dense(parts: dict[str, Part], args, checkpoint: Path | None, policy: Learner, tokenizer) -> list:
    """Loads the dense rewards among the parts. `args`: the training script's. `checkpoint`: of a resumed run."""
    sources = []
    if "process" in parts:
        part = parts["process"]
        sources.append(ProcessReward(load_function(part.options["model"]), part.weight, tokenizer))
    if "prime" in parts:
        sources.append(ImplicitReward(args, parts["prime"], checkpoint, policy))
    return sources
