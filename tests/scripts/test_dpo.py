"""train_dpo.py: pairs, its loss by hand and against TRL's, micro-batches, and the script on the toy, killed
and resumed."""

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from launch import FSDP2, finished, started
from script_runs import BASE, check_same_bits, metrics_of, run_here, wait_for_lines, weights_of, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from data.toy import world
from rlmt.chat import encode_completion, encode_prompt
from rlmt.data import read_log, write_jsonl
from rlmt.model import Policy, start_accelerator
import train_dpo
from train_dpo import Pair, build_pairs, load_pairs


# --- pairs


def test_best_against_worst_of_each_prompt_and_round():
    """Never a malformed one, nor equal texts, whose rewards may still differ a little."""
    rows = []
    for step, prompt, reward, status, text in (
        (1, "a", 1.0, "ok", "ham"),
        (1, "a", 3.0, "ok", "egg"),
        (1, "a", -2.0, "ok", "tea"),
        (1, "a", 9.0, "truncated", "pie"),
        (2, "a", 7.0, "ok", "ham"),
        (2, "a", 6.0, "ok", "egg"),
        (1, "tie", 1.0, "ok", "ham"),
        (1, "tie", 1.0, "ok", "egg"),
        (1, "one", 1.0, "ok", "ham"),
        (1, "none", None, "no_open", "ham"),
        (1, "twins", 1.0, "ok", "ham"),
        (1, "twins", 1.0000002, "ok", "ham"),
    ):
        row = {"step": step, "id": prompt, "reward": reward, "status": status, "response": text}
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
    full = {"id": "x", "rejected_thinking": "no", **row}
    rows = [
        full,
        {**full, "rejected_thinking": ""},
        {**full, "rejected": "ham 5", "rejected_thinking": "ham"},
        {**full, "rejected": "ham " * 200},
        {**full, "rejected": "cheese <|im_end|>"},
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    args = train_dpo.Args(pairs=str(tmp_path / "pairs.jsonl"), max_completion_tokens=100)
    [pair], dropped, _ = load_pairs(args, tokenizer)
    assert [row["reason"] for row in dropped] == ["malformed", "tie", "too_long", "malformed"]
    assert pair.prompt_ids == encode_prompt(tokenizer, messages)
    # thinking in the text is laid out as a model of this format writes it
    assert pair.chosen_ids == encode_completion(tokenizer, "<think>\nham\n</think>\n\nham 5")
    assert pair.rejected_ids == encode_completion(tokenizer, "<think>\nno\n</think>\n\ncheese")
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
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data += 0.1 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.fixture(scope="module")
def trl(tmp_path_factory) -> tuple[dict, torch.Tensor]:
    """TRL's metrics and gradient of one step."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [{name: getattr(pair, name) for name in names} for pair in PAIRS]
    config = DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        beta=0.3,
        max_length=None,
        bf16=False,
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
    )
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
    metrics = {"loss": loss.item()}
    for name, values in trainer._metrics["train"].items():
        if name.startswith(("rewards/", "logps/")):
            metrics[name] = values[0]
    return metrics, gradient_of(trainer.model)


@pytest.mark.parametrize("micro_batch_tokens", [1, 100, 10_000])
def test_loss_gradient_and_metrics_are_trls(trl, micro_batch_tokens):
    """Of one pair a forward, two or so, all at once."""
    accelerator = start_accelerator()
    args = train_dpo.Args(beta=0.3, micro_batch_tokens=micro_batch_tokens)
    pairs = sorted(map(dataclasses.replace, PAIRS), key=train_dpo.length_of, reverse=True)
    model = Policy(AutoModelForCausalLM.from_pretrained(BASE).train(), temperature=1.0)
    train_dpo.set_reference_logps(pairs, model, args, 0, accelerator)
    perturb(model)
    means = train_dpo.accumulate_gradients(pairs, len(pairs), model, args, 0, accelerator)
    assert means == pytest.approx(trl[0], rel=1e-4, abs=1e-5) and abs(means["loss"] - math.log(2)) > 1e-2
    assert (gradient_of(model) - trl[1]).norm() / trl[1].norm() < 1e-5


# --- the script: the base model answers without thinking, and about half of its answers end in time


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with training prompts, held-out prompts, and preference pairs."""
    folder = tmp_path_factory.mktemp("data")
    write_prompts(folder / "prompts.jsonl", 20)
    pairs = world.pair_rows(10, 0)
    write_jsonl(folder / "pairs.jsonl", pairs)
    write_jsonl(folder / "held_out.jsonl", pairs[:4])
    return folder


def start(data: Path, out: Path, flags: str = "") -> list[str]:
    """Returns the words of a command: some 8 pairs a round, steps of 3, 3 and 2 or fewer pairs, twice."""
    command = (
        f"train_dpo.py --preset toy --model {BASE} --think-format plain --max-completion-tokens 64 "
        "--prompts-per-round 8 --samples-per-prompt 6 --rollout-batch-size 8 --batch-size 3 --epochs 2 "
        f"--save-steps 1 --prompts {data}/prompts.jsonl --gold-prompts {data}/held_out.jsonl --out {out} {flags}"
    )
    return command.split()


def train(data: Path, out: Path, flags: str = "") -> Path:
    run_here([sys.executable, *start(data, out, flags)])
    return out


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """A run of two rounds that nothing disturbs."""
    return train(data, tmp_path_factory.mktemp("whole") / "run")


def test_what_a_run_writes(whole):
    completions = read_log(whole / "completions.jsonl")
    assert {row["reward"] for row in completions if row["status"] != "ok"} == {None}
    for number, metrics in enumerate(read_log(whole / "metrics.jsonl"), start=1):
        assert metrics["pairs"] + sum(metrics["skipped"].values()) == 8
        steps = read_log(whole / f"round-{number}" / "metrics.jsonl")
        assert len(steps) == metrics["steps"] == 2 * math.ceil(metrics["pairs"] / 3) > 2
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the reference is what sampled
        assert sum(step["rewards/margins"] for step in steps[len(steps) // 2 :]) > 0
    assert len({row["id"] for row in completions}) == 16  # other prompts in each round
    assert [row["step"] for row in read_log(whole / "held_out.jsonl")] == [0, 1, 2]


def kill(words: list[str], log: Path, n_lines: int) -> None:
    """Starts a run and kills it (SIGKILL) as soon as a log has so many lines."""
    process = started(words, log.parent.parent.parent / "output")
    wait_for_lines(log, n_lines, process.is_alive)
    process.kill()
    process.join()


def test_a_killed_run_ends_with_the_same_bits(whole, data, tmp_path):
    """Killed as round 1 samples, in the second epoch of round 2, which is added to a finished run, and at its
    end."""
    out = tmp_path / "run"
    words = start(data, out, "--resume")
    kill(words, out / "round-1" / "samples-0.jsonl", 9)
    sampled = (out / "round-1" / "samples-0.jsonl").read_text()
    n_last = len(sampled.splitlines(keepends=True)[-1])
    (out / "round-1" / "samples-0.jsonl").write_text(sampled[: -n_last // 2])  # the last one is torn
    scored = (whole / "round-1" / "scores-0.jsonl").read_text()
    (out / "round-1" / "scores-0.jsonl").write_text(scored[:200])  # as if it were killed again as it scores
    train(data, out, "--resume --rounds 1")
    assert (out / "round-1" / "samples-0.jsonl").read_text().startswith(sampled[:-n_last])

    second_epoch = len(read_log(whole / "round-2" / "metrics.jsonl")) // 2 + 1
    kill(words, out / "round-2" / "metrics.jsonl", second_epoch)
    run_here([sys.executable, *words])
    shutil.rmtree(out / "model")  # as if killed before the last round's model was copied
    (out / "summary.json").unlink()
    run_here([sys.executable, *words])

    for name in ("", "round-1", "round-2"):
        check_same_bits(whole / name, out / name)
    for name in ("held_out.jsonl", "held_out_completions.jsonl", "best_by_gold/model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_two_processes_are_one(data, tmp_path):
    """Each of two processes samples its share; FSDP2 trains on the pairs as one process does."""
    flags = "--rounds 1 --lora-r 4 --gold-prompts="
    two = tmp_path / "two"
    finished([sys.executable, *FSDP2, *start(data, two, flags)])
    one = tmp_path / "one"
    (one / "round-1").mkdir(parents=True)
    for path in (two / "round-1").glob("samples-*"):
        shutil.copy(path, one / "round-1")
    config = json.loads((two / "config.json").read_text())
    (one / "config.json").write_text(json.dumps(config | {"processes": 1}))
    train(data, one, f"{flags} --resume")

    texts = [row["text"] for row in read_log(two / "completions.jsonl")]
    assert len(texts) == 48 and len(set(texts)) > 24
    for ours, theirs in zip(metrics_of(two / "round-1"), metrics_of(one / "round-1"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert weights_of(two / "adapter").keys() == weights_of(one / "adapter").keys() != set()


def test_what_cannot_be_trained_on_is_said(data, tmp_path, exits):
    """The base model writes no thinking, so nothing is valid."""
    few = "--think-format think --samples-per-prompt 2 --gold-prompts="
    assert "no prompt gave a pair ({'no_valid': 8})" in exits(train, data, tmp_path / "run", few)
    assert "4 are trained on" in exits(train, data, tmp_path, f"--pairs {data}/pairs.jsonl")
