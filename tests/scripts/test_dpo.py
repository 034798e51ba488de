"""train_dpo.py: pairs, its loss by hand and against TRL's, micro-batches. test_resume.py runs it."""

import dataclasses
import math

import pytest
import torch
from datasets import Dataset
from script_runs import BASE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from rlmt.chat import encode_completion, encode_prompt
from rlmt.data import write_jsonl
from rlmt.learner import Learner, Policy
from rlmt.model import start_accelerator
import train_dpo
from train_dpo import Pair, build_pairs, load_pairs


# --- pairs


def test_best_against_worst_of_each_prompt_and_round():
    """Never a malformed one, nor equal texts, whose rewards may still differ a little."""
    rows = []
    for step, prompt, reward, response in (
        (1, "a", 1.0, "ham"),
        (1, "a", 3.0, "egg"),
        (1, "a", -2.0, "tea"),
        (1, "a", 9.0, ""),
        (2, "a", 7.0, "ham"),
        (2, "a", 6.0, "egg"),
        (1, "tie", 1.0, "ham"),
        (1, "tie", 1.0, "egg"),
        (1, "one", 1.0, "ham"),
        (1, "none", None, ""),
        (1, "twins", 1.0, "ham"),
        (1, "twins", 1.0000002, "ham"),
    ):
        status = "ok" if response else "truncated"
        row = {"step": step, "id": prompt, "reward": reward, "status": status, "response": response}
        rows.append(row | {"ids": [len(rows)]})
    pairs, skipped = build_pairs(rows, 2, "response")
    assert pairs == [
        {"id": "a", "chosen": rows[1], "rejected": rows[2]},
        {"id": "a", "chosen": rows[4], "rejected": rows[5]},
    ]
    assert skipped == {"tie": 2, "too_few_valid": 1, "no_valid": 1}
    # the thinking of twins differs
    assert [len(build_pairs(rows, n, "think+response")[0]) for n in (2, 3)] == [3, 1]


def test_a_preference_file_becomes_the_tokens_of_sft(tokenizer, tmp_path):
    messages = [{"role": "user", "content": "ham, please"}]
    row = {"messages": messages, "chosen": "<think> ham </think> ham 5", "rejected": "cheese"}
    full = {"id": "x", "rejected_thinking": "Budget", **row}
    rows = [
        full,
        {**full, "rejected_thinking": ""},
        {**full, "rejected": "ham 5", "rejected_thinking": "ham"},
        {**full, "rejected": "ham " * 200},
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    args = train_dpo.Args(pairs=str(tmp_path / "pairs.jsonl"), max_completion_tokens=100)
    [pair], dropped, _ = load_pairs(args, tokenizer)
    assert [row["reason"] for row in dropped] == ["malformed", "tie", "too_long"]
    assert pair.prompt_ids == encode_prompt(tokenizer, messages)
    # thinking in the text is laid out as a model of this format writes it
    assert pair.chosen_ids == encode_completion(tokenizer, "<think>\nham\n</think>\n\nham 5")
    assert pair.rejected_ids == encode_completion(tokenizer, "<think>\nBudget\n</think>\n\ncheese")
    [pair, *_], _, _ = load_pairs(dataclasses.replace(args, think_format="zero_plain"), tokenizer)
    assert pair.rejected_ids == encode_completion(tokenizer, "<response> cheese </response>")


# --- the loss


LINE = 198  # decoding and encoding do not keep two line ends apart
PAIRS = [
    Pair("a", [7, 8, 9], [LINE, LINE, 2], [11, 12, 13, 14, 2]),
    Pair("b", [7, 8, 9, 10, 11, 12], [20, 2], [21, 2]),
    Pair("c", [5] * 20, [30, 31, 32] * 9, [40, 2]),
    Pair("d", [6, 7], [30, 31, 32, 2], [40, 41] * 12),
    Pair("e", [6], [50], [51, 52]),
]


class RealDPOTrainer(DPOTrainer):
    """TRL's trainer on token ids as they are."""

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset


def perturb(model: torch.nn.Module) -> None:
    """Makes a policy that differs from its reference."""
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data += 0.1 * weight.std().nan_to_num() * torch.randn_like(weight)


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.fixture(scope="module")
def trl(tmp_path_factory) -> tuple[dict, torch.Tensor]:
    """TRL's metrics and gradient of one step."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [{name: getattr(pair, name) for name in names} for pair in PAIRS]
    plain = dict.fromkeys(("bf16", "gradient_checkpointing"), False)
    folder = str(tmp_path_factory.mktemp("trl"))
    config = DPOConfig(folder, beta=0.3, max_length=None, use_cpu=True, report_to=[], **plain)
    trainer = RealDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(BASE),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(BASE),
    )
    perturb(trainer.model)
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return metrics | {"loss": loss.item()}, gradient_of(trainer.model)


@pytest.mark.parametrize("micro_batch_tokens", [1, 100, 10_000])
def test_loss_gradient_and_metrics_are_trls(trl, micro_batch_tokens):
    """Of one pair a forward, two or so, all at once."""
    pairs = sorted(map(dataclasses.replace, PAIRS), key=train_dpo.length_of, reverse=True)
    model = Policy(AutoModelForCausalLM.from_pretrained(BASE).train(), temperature=1.0)
    policy = Learner(model, start_accelerator(), micro_batch_tokens, 0.0, 0.0)
    train_dpo.set_reference_logps(pairs, policy)
    perturb(model)
    means = train_dpo.accumulate_gradients(pairs, len(pairs), policy, beta=0.3)
    for name, mean in means.items():
        assert mean == pytest.approx(trl[0][name], rel=1e-4, abs=1e-5), name
    assert abs(means["loss"] - math.log(2)) > 1e-2
    assert (gradient_of(model) - trl[1]).norm() / trl[1].norm() < 1e-5
