"""Dense rewards: what a completion earns on its way, on steps (a process reward model) or on tokens (PRIME).

They come on top of the outcome's reward: `--rewards math:1 process:0.5 --reward-args process.model=MODEL`.
A source has `token_rewards(completions)`, which returns two tensors (B, T) over the completions' tokens:
rewards, and where one is given (an event). That of PRIME then trains its model for a step. GRPO makes token
advantages of them (`add_advantages`); PPO adds them to the tokens' rewards before GAE. train_rlver.py has dense
rewards on turns.
"""

import math
import re
from bisect import bisect_left
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification

from rlmt.chat import context_length, load_config, load_tokenizer
from rlmt.model import (
    Policy,
    clip_gradients,
    collate,
    compute_reference_logprobs,
    gradient_exchange,
    load_trained,
    load_weights,
    micro_batches,
    pad,
    prepare_trained,
    sum_and_divide,
)
from rlmt.run import load_function
from utils import compute_dtype, fail
from rewards import read_parts
from rewards.preference import TOKENS_PER_BATCH, longest_first

MAX_GRAD_NORM = 1.0  # of the model behind `prime`


def token_advantages(
    values: torch.Tensor, events: torch.Tensor, group_size: int, scale: bool
) -> torch.Tensor:
    """Returns advantages (B, T) of dense rewards; the rows of a group are neighbours.

    Number the events of a row 0, 1, 2 and so on. Every token after event k-1, up to and with event k, gets the
    same advantage: R_k, the row's rewards from event k to its end, minus the mean of R_k over those rows of
    the group that have an event k. Tokens after the last event get 0. The sum over later steps is DeepSeekMath's
    process supervision (2402.03300, section 4.1.3). The comparison of k-th with k-th is MT-GRPO's (2505.11821).

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


def steps(completion) -> list[tuple[str, int]]:
    """Returns (step, offset of its end in `text`): the paragraphs of the thinking, then the response."""
    found = []
    cursor = 0
    for step in [*re.split(r"\n\s*\n", completion.thinking), completion.response]:
        start = completion.text.find(step, cursor)
        if step.strip() and start >= 0:  # a thinking that was not closed contains the response
            cursor = start + len(step)
            found.append((step, cursor))
    return found


class ProcessReward:
    """Rewards a step by how much it raises the probability of being on the right way, at first 0.

    A completion's rewards add up to its last step's probability, so more steps are worth nothing by
    themselves (the progress of 2410.08146).

    Args:
        options: `model`, a token classifier with two labels, the second one "right", which reads a row as
            trl's PRMTrainer does (see `encode`). `separator`: PRMTrainer's `step_separator` when the model was
            trained. Or `model` is file.py:function, which takes (messages, text) and returns a list of (end of
            a step in `text`, probability).
    """

    name = "process"
    scaled = True  # as advantages in GRPO: divided by their spread in the group
    learner = None  # it does not learn
    metrics = {}

    def __init__(
        self, options: dict, weight: float, policy_tokenizer, device: torch.device, dtype: str = "auto"
    ):
        self.weight = weight
        self.policy_tokenizer = policy_tokenizer
        self.device = device
        self.function = None
        source = options["model"]
        if ".py:" in source:
            self.function = load_function(source)
            return
        self.tokenizer = load_tokenizer(source)
        self.separator_ids = self._ids(options["separator"])
        model, _ = load_weights(AutoModelForTokenClassification, source, compute_dtype(dtype))
        self.model = model.to(device).eval()
        self.model.config.use_cache = False

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode(self, completion) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of prompt and steps, and (end in `text`, last token's place) of each step.

        They are those of trl's PRMTrainer.tokenize_row: BOS if the tokenizer has one, the prompt, then each step
        and its separator. All are tokenised apart, as a tokenizer may join a full stop and a line break. The
        last token of a separator is where PRMTrainer puts the step's label, so a step is judged there.
        """
        ids = self._ids("\n\n".join(message["content"] for message in completion.messages))
        if self.tokenizer.bos_token_id is not None:
            ids.insert(0, self.tokenizer.bos_token_id)
        ends = []
        for step, end in steps(completion):
            ids += self._ids(step) + self.separator_ids
            ends.append((end, len(ids) - 1))
        return ids, ends

    @torch.no_grad()
    def probabilities(self, completions: list) -> list[list[tuple[int, float]]]:
        """Returns (end in `text`, probability of being right) of each completion's steps."""
        if self.function:
            return [self.function(completion.messages, completion.text) for completion in completions]
        encoded = [self.encode(completion) for completion in completions]
        lengths = [len(ids) for ids, _ in encoded]
        limit = context_length(self.model.config)
        if max(lengths) > limit:
            raise RuntimeError(f"the process model reads {limit} tokens; lower --max-completion-tokens")

        found = [[] for _ in completions]
        for places in longest_first(lengths, TOKENS_PER_BATCH[self.device.type]):
            rows = [torch.tensor(encoded[place][0], device=self.device) for place in places]
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            logits = self.model(pad_sequence(rows, batch_first=True), attention_mask=mask).logits.float()
            right = logits.softmax(-1)[..., 1].cpu()
            for n, place in enumerate(places):
                found[place] = [(end, right[n, token].item()) for end, token in encoded[place][1]]
        return found

    def token_rewards(self, completions: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards (B, T) and where one is given; notes each completion's sum in `rewards`."""
        values = pad([[0.0] * len(completion.ids) for completion in completions])
        events = values.bool()
        for n, (completion, found) in enumerate(
            zip(completions, self.probabilities(completions), strict=True)
        ):
            before = 0.0
            for end, probability in found:
                token = self._token_at(completion.ids, end)
                values[n, token] += probability - before
                events[n, token] = True
                before = probability
            completion.rewards[self.name] = before
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

    def __init__(
        self, args, weight: float, options: dict, folder: Path | None, reference, tokenizer, accelerator
    ):
        """`options`: beta, learning_rate. `folder`: the checkpoint that a resumed run goes on from."""
        self.weight = weight
        self.beta = options["beta"]
        self.args = args
        self.reference = reference
        self.pad_token_id = tokenizer.pad_token_id
        self.accelerator = accelerator
        resume_from = folder / self.name if folder else None
        model = Policy(load_trained(args.model, args, resume_from), args.temperature)
        self.learner = prepare_trained(
            accelerator, model, options["learning_rate"], weight_decay=0.0, optim=args.optim
        )
        self.metrics = {}

    def token_rewards(self, completions: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards (B, T) of phi as it is, then trains it for one step where a verdict is known."""
        accelerator = self.accelerator
        model, optimizer = self.learner
        n_known = sum(completion.correct is not None for completion in completions)
        n_known = accelerator.reduce(torch.tensor(n_known, device=accelerator.device), "sum").clamp(min=1)

        rows = {}  # by the identity of the completion
        sums = {"prime/loss": 0.0, "prime/accuracy": 0.0}
        batches = micro_batches(completions, self.args.micro_batch_tokens, accelerator)
        for i, members in enumerate(batches):
            batch = collate(members, self.pad_token_id, accelerator.device)
            inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
            verdicts = [completion.correct for completion in members]
            labels = [math.nan if verdict is None else verdict for verdict in verdicts]
            labels = torch.tensor(labels, device=accelerator.device)
            known = ~labels.isnan()

            reference_logprobs = compute_reference_logprobs(model, self.reference, inputs)
            with gradient_exchange(model, accelerator, is_last=i == len(batches) - 1):
                logprobs, _ = model(*inputs)
                value = self.beta * (logprobs - reference_logprobs) * batch["completion_mask"]
                log_odds = value.sum(1)
                loss = F.binary_cross_entropy_with_logits(log_odds[known], labels[known], reduction="sum")
                # DDP and FSDP2 average gradients over processes; we want their sum
                accelerator.backward(loss * accelerator.num_processes / n_known)

            sums["prime/loss"] += loss.detach()
            sums["prime/accuracy"] += ((log_odds > 0) == labels.bool())[known].sum()
            for completion, row in zip(members, value.detach().cpu(), strict=True):
                rows[id(completion)] = row[: len(completion.ids)]
                completion.rewards[self.name] = row.sum().item()
        self.metrics = sum_and_divide(sums, n_known, accelerator)
        grad_norm = clip_gradients(model, MAX_GRAD_NORM)
        loss = self.metrics["prime/loss"]
        if not math.isfinite(loss + grad_norm):  # before it reaches the weights
            raise FloatingPointError(
                f"--rewards prime: its model's loss is {loss}, its gradient's norm {grad_norm}"
            )
        optimizer.step()
        optimizer.zero_grad()
        values = pad_sequence([rows[id(completion)] for completion in completions], batch_first=True)
        return values, pad([[1.0] * len(completion.ids) for completion in completions]).bool()


# --- what the command line asks for


def check_process_model(source: str) -> None:
    """Exits with 2 unless `process` can judge steps by a model or function; loads no weights."""
    if ".py:" in source:
        load_function(source)
        return
    if not source:
        fail(
            "--rewards process needs --reward-args process.model=MODEL: a token classifier, or file.py:function"
        )
    load_tokenizer(source)
    n_labels = load_config(source).num_labels
    if n_labels != 2:
        fail(f"--reward-args process.model={source} has {n_labels} labels; it needs two, wrong and right")


def load_dense(args, folder: Path | None, reference, tokenizer, accelerator: Accelerator) -> list:
    """Loads the dense rewards in `args.rewards`. `folder`: the checkpoint of a resumed run."""
    sources = []
    for part in read_parts(args):
        if part.name == "process":
            source = ProcessReward(part.options, part.weight, tokenizer, accelerator.device, args.dtype)
            sources.append(source)
        elif part.name == "prime":
            source = ImplicitReward(
                args, part.weight, part.options, folder, reference, tokenizer, accelerator
            )
            sources.append(source)
    return sources
