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
    load_policy,
    load_weights,
    micro_batches,
    prepare_trained,
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
        for t in range(len(completion.ids)):
            completion.advantages[t] += source.weight * row[t]


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
        self,
        options: dict,
        weight: float,
        policy_tokenizer,
        device: torch.device,
        dtype: str = "auto",
    ):
        self.weight = weight
        self.policy_tokenizer = policy_tokenizer
        self.device = device
        self.function = None
        source = options["model"]
        if ".py:" in source:
            self.function = load_function(source)
            return
        self.tokens_per_batch = TOKENS_PER_BATCH[device.type]
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
        prompt = "\n\n".join(message["content"] for message in completion.messages)
        ids = self._ids(prompt)
        if self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id, *ids]
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
            raise RuntimeError(
                f"a completion has {max(lengths)} tokens for the process model, which reads {limit}; "
                "lower --max-completion-tokens"
            )

        found = [[] for _ in completions]
        for places in longest_first(lengths, self.tokens_per_batch):
            right = self._probability_right([encoded[place][0] for place in places])
            for n, place in enumerate(places):
                for end, token in encoded[place][1]:
                    found[place].append((end, right[n, token].item()))
        return found

    def _probability_right(self, rows: list[list[int]]) -> torch.Tensor:
        """Returns the probability (B, T) of the label "right" at every token."""
        rows = [torch.tensor(ids) for ids in rows]
        ids = pad_sequence(rows, batch_first=True).to(self.device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(self.device)
        logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
        return logits.softmax(-1)[..., 1].cpu()

    def token_rewards(self, completions: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards (B, T) and where one is given; notes each completion's sum in `rewards`."""
        values, events = _no_rewards(completions)
        probabilities = self.probabilities(completions)
        for n, completion in enumerate(completions):
            before = 0.0
            for end, probability in probabilities[n]:
                if not 0 <= probability <= 1:
                    raise RuntimeError(
                        f"the process model gave {probability} for a step of {completion.text!r}; "
                        "it must be from 0 to 1"
                    )
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


def _no_rewards(completions: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rewards (B, T) of 0 and an events mask (B, T) that is false, to be filled in."""
    width = max(len(completion.ids) for completion in completions)
    values = torch.zeros(len(completions), width)
    return values, torch.zeros_like(values, dtype=torch.bool)


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
        resume_from = str(folder / self.name) if folder else None
        model = load_policy(
            args.model, args.lora_r, args.gradient_checkpointing, resume_from, args.load_in_4bit, args.dtype
        )
        model = Policy(model, args.temperature)
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

        values, events = _no_rewards(completions)
        place_of = {id(completion): place for place, completion in enumerate(completions)}
        sums = torch.zeros(2, device=accelerator.device)  # loss, right predictions
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

            predicted_well = (log_odds > 0) == labels.bool()
            sums += torch.stack([loss.detach(), predicted_well[known].sum()])
            for completion, row in zip(members, value.detach().cpu(), strict=True):
                place = place_of[id(completion)]
                n_tokens = len(completion.ids)
                values[place, :n_tokens] = row[:n_tokens]
                events[place, :n_tokens] = True
                completion.rewards[self.name] = row.sum().item()
        loss, accuracy = (accelerator.reduce(sums, "sum") / n_known).tolist()
        grad_norm = clip_gradients(model, MAX_GRAD_NORM)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):  # before it reaches the weights
            raise FloatingPointError(
                f"--rewards prime: the loss of its model is {loss}, the norm of its gradient {grad_norm}"
            )
        optimizer.step()
        optimizer.zero_grad()
        self.metrics = {"prime/loss": loss, "prime/accuracy": accuracy}
        return values, events


# --- what the command line asks for


def check_process_model(source: str) -> None:
    """Exits with 2 unless `process` can judge steps by a model or function; loads no weights."""
    if not source:
        fail(
            "--rewards process needs --reward-args process.model=MODEL: "
            "a token classifier, or file.py:function"
        )
    if ".py:" in source:
        load_function(source)
        return
    load_tokenizer(source)
    config = load_config(source)
    architecture = "".join(config.architectures or [])
    if not architecture.endswith("ForTokenClassification") or config.num_labels != 2:
        fail(
            f"--reward-args process.model={source}: {architecture} with {config.num_labels} labels; "
            "it must be a token classifier with two, wrong and right, or file.py:function"
        )


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
