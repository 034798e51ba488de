"""Dense rewards: what a completion earns on its way, on steps (a process reward model) or on tokens (PRIME). train_rlver.py
has them on turns.

They stand beside the outcome's reward, in its list: `--rewards math:1 process:0.5`. A source is called with the trainer, its
rows and TRL's batch and gives two tensors (B, T) over the completions' tokens: rewards, and where one stands. rollout.py makes
token advantages of them (GRPO), ppo.py adds them to the tokens' rewards before GAE.
"""

import math
import re
from bisect import bisect_left

import runs  # isort: skip
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import faults
import rewards
import training
import utils


def token_advantages(
    values: torch.Tensor, events: torch.Tensor, group_size: int, scale: bool
) -> torch.Tensor:
    """Advantages (B, T) of dense rewards `values` (B, T), which stand where `events` (B, T, bool) is true; a group's rows are
    neighbours.

    A token leads to the next event k of its row, and is credited with R_k, the sum of the row's rewards from there on: less
    the mean of R_k over the group's rows that have a k-th event, and with `scale` divided by the root of the mean square of
    that over the group's events, plus 1e-4. Tokens behind the last event get 0. Sources: the sum over later steps is
    DeepSeekMath's process supervision (2402.03300, section 4.1.3), the comparison of k-th with k-th MT-GRPO's (2505.11821).
    """
    counts, n = events.sum(1, keepdim=True), int(events.sum(1).max())
    if n == 0:
        return torch.zeros_like(values)
    returns = (values * events).flip(1).cumsum(1).flip(1)
    columns = (~events).int().argsort(dim=1, stable=True)[:, :n]  # of a row's events, in order
    kth = torch.where(torch.arange(n, device=values.device) < counts, returns.gather(1, columns), math.nan)
    groups = kth.view(-1, group_size, n)
    groups = groups - groups.nanmean(1, keepdim=True)
    if scale:
        groups = groups / ((groups**2).nanmean((1, 2), keepdim=True).sqrt() + 1e-4)
    leads_to = events.long().cumsum(1) - events.long()
    return torch.where(leads_to < counts, groups.view(-1, n).gather(1, leads_to.clamp(max=n - 1)), 0.0)


def steps(row: dict) -> list[tuple[str, int]]:
    """(step, offset of its end in `text`) of a completion: the paragraphs of its thinking, then its response."""
    found, cursor = [], 0
    for step in [*re.split(r"\n\s*\n", row["thinking"]), row["response"]]:
        if step.strip():
            cursor = row["text"].index(step, cursor) + len(step)
            found.append((step, cursor))
    return found


class ProcessReward:
    """A step's reward is by how much it raises the probability of being on the right way, 0 at the start; a row's rewards add
    up to its last step's probability, so that more steps are worth nothing by themselves (the progress of 2410.08146).

    `source`: a token classifier with two labels, the second one "right", which reads prompt and steps, a blank line after
    each, and judges at that blank line (the data format of TRL's PRMTrainer); or file.py:function, (messages, text) -> list of
    (end of a step in `text`, probability).
    """

    scaled = True  # as advantages in GRPO: divided by their spread in the group

    def __init__(self, source: str, device: str, tokens_per_batch: int):
        self.function, self.device = None, device
        self.tokens_per_batch = tokens_per_batch or (
            2048 if device == "cpu" else 16384
        )  # as utils.RewardModel
        if ".py:" in source:
            self.function = runs.load_function(source)
            return
        self.tokenizer = runs.load_tokenizer(source)
        self.model = (
            training.load_weights(AutoModelForTokenClassification, source, dtype=utils.DTYPE)[0]
            .to(device)
            .eval()
        )
        self.model.config.use_cache = False

    @staticmethod
    def check(source: str) -> None:
        """Exits with 2 when `source` is not what it must be."""
        if ".py:" in source:
            runs.load_function(source)
            return
        runs.load_tokenizer(source)
        config = runs.load_config(source)
        if (
            not "".join(config.architectures or []).endswith("ForTokenClassification")
            or config.num_labels != 2
        ):
            runs.fail(
                f"process.model {source} is {config.architectures} with {config.num_labels} labels; it must be a "
                "token classifier with two, wrong and right, or file.py:function"
            )

    def encode(self, row: dict) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of prompt and steps, and for each step (offset of its end in `text`, place of its last token)."""
        text = "\n\n".join(message["content"] for message in row["messages"]) + "\n\n"
        ids, ends = list(self.tokenizer(text)["input_ids"]), []
        for step, end in steps(row):
            ids += self.tokenizer(step + "\n\n", add_special_tokens=False)["input_ids"]
            ends.append((end, len(ids) - 1))
        return ids, ends

    @torch.no_grad()
    def probabilities(self, rows: list[dict]) -> list[list[tuple[int, float]]]:
        """For each row (end in `text`, probability of being right) of its steps; in batches of about equal length."""
        if self.function:
            return [self.function(row["messages"], row["text"]) for row in rows]
        encoded, out = [self.encode(row) for row in rows], [[] for _ in rows]
        limit = getattr(self.model.config, "max_position_embeddings", 10**9)
        if (longest := max(len(ids) for ids, _ in encoded)) > limit:
            raise RuntimeError(
                f"a completion has {longest} tokens for the process model, which reads {limit}; "
                "lower --max-completion-tokens"
            )
        todo = sorted(range(len(rows)), key=lambda i: -len(encoded[i][0]))
        while todo:
            width = len(encoded[todo[0]][0])
            batch, todo = todo[: (n := max(1, self.tokens_per_batch // width))], todo[n:]
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for n, i in enumerate(batch):
                ids[n, : len(encoded[i][0])], mask[n, : len(encoded[i][0])] = torch.tensor(encoded[i][0]), 1
            logits = self.model(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device)
            ).logits.float()
            right = logits.softmax(-1)[..., 1].cpu()
            faults.beat()
            for n, i in enumerate(batch):
                out[i] = [(end, right[n, place].item()) for end, place in encoded[i][1]]
        return out

    def __call__(self, trainer, rows: list[dict], output: dict) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros(output["completion_ids"].shape, device=output["completion_ids"].device)
        events = torch.zeros_like(values, dtype=torch.bool)
        for n, (row, found) in enumerate(zip(rows, self.probabilities(rows), strict=True)):
            ids, before = output["completion_ids"][n][output["completion_mask"][n].bool()].tolist(), 0.0
            length = lambda k, ids=ids: len(
                trainer.processing_class.decode(ids[:k], clean_up_tokenization_spaces=False)
            )
            for end, probability in found:
                if not 0 <= probability <= 1:
                    raise RuntimeError(f"the process model gave {probability} for a step of {row['text']!r}")
                place = bisect_left(range(1, len(ids)), end, key=length)  # the token in which the step ends
                values[n, place] += probability - before
                events[n, place], before = True, probability
        return values, events


class ImplicitReward:
    """PRIME (2502.01456): a token's reward is beta log(phi / reference), and phi, which starts as the policy does, learns with
    every rollout that the sum over a completion is the log-odds of its being right."""

    scaled = False  # as long as phi is the reference its rewards are noise: their size says how much it has learned

    def __init__(self, model, beta: float, learning_rate: float):
        trained = [p for p in model.parameters() if p.requires_grad]
        self.model, self.beta = model, beta
        self.optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)

    def __call__(self, trainer, rows: list[dict], output: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards of phi as it is, then one step of its training on these rows, except where nobody knows what is right."""
        mask = output["completion_mask"]
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        whole = torch.cat([output["prompt_mask"], mask], dim=1)
        verdicts = [
            next((v for n in rewards.FIELDS if (v := row["rewards"].get(n)) is not None), None)
            for row in rows
        ]
        fine = [
            row["status"] == "ok" or trainer.on_bad_format == "score" for row in rows
        ]  # else its outcome is a floor
        labels = [math.nan if v is None else float(v >= 1 and form) for v, form in zip(verdicts, fine)]
        labels = torch.tensor(labels, device=ids.device)
        total = lambda sums: trainer.accelerator.reduce(sums, "sum")
        known, values, sums = total((~labels.isnan()).sum()), [], torch.zeros(2, device=ids.device)
        for chunk in torch.arange(len(rows)).split(trainer.args.per_device_train_batch_size):
            with torch.enable_grad():
                logps = trainer._get_per_token_logps_and_entropies(
                    self.model, ids[chunk], whole[chunk], mask.size(1)
                )[0]
                value = self.beta * (logps - output["ref_per_token_logps"][chunk]) * mask[chunk]
                has = ~labels[chunk].isnan()
                loss = F.binary_cross_entropy_with_logits(
                    value.sum(1)[has], labels[chunk][has], reduction="sum"
                )
                (
                    loss * trainer.accelerator.num_processes / known.clamp(min=1)
                ).backward()  # DDP and FSDP take the mean
            values.append(value.detach())
            sums += torch.stack([loss.detach(), ((value.sum(1) > 0) == labels[chunk].bool())[has].sum()])
        trainer.accelerator.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, x in zip(("loss", "accuracy"), total(sums) / known.clamp(min=1)):
            trainer._metrics["train"][f"prime/{name}"].append(x.item())
        return torch.cat(values), mask.bool()


def load(args, device: str = "", build: bool = False) -> list[tuple]:
    """[(name, weight, source)] of the dense rewards in `args.rewards`; exits with 2 for what cannot be, and does no more than
    that without `build`."""
    spec, sources = (
        [part for part in runs.or_fail(rewards.parse_spec, args.rewards) if part[0] in rewards.DENSE],
        [],
    )
    names = [name for name, _ in spec]
    options = runs.or_fail(rewards.reward_options, args)
    if "process" in names:
        if not options["process"]["model"]:
            runs.fail(
                "--rewards process needs --reward-args process.model=MODEL: a token classifier, or file.py:function"
            )
        ProcessReward.check(options["process"]["model"])
    if "prime" in names:
        if not rewards.FIELDS.keys() & rewards.reward_names(args):
            runs.fail(f"--rewards prime learns from what is right; add one of {', '.join(rewards.FIELDS)}")
        if not getattr(args, "beta", getattr(args, "kl_coef", 0)) or getattr(args, "kl", "") == "none":
            runs.fail(
                "--rewards prime compares with the reference model, which a KL weight of 0 leaves out; give a small one"
            )
    for name, weight in spec if build else ():
        if name == "process":
            sources.append(
                (name, weight, ProcessReward(options[name]["model"], device, args.reward_tokens_per_batch))
            )
            continue
        dtype = utils.DTYPE if args.lora_r else "float32"
        model, _ = training.load_weights(AutoModelForCausalLM, args.model, dtype=dtype)
        model = training.beside_policy(model, args, task_type="CAUSAL_LM")
        sources.append((name, weight, ImplicitReward(model.train(), **options[name])))
    return sources
