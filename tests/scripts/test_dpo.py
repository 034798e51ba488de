"""train_dpo.py: pairs, its loss by hand and against TRL's, micro-batches, and the script on the toy, killed
and resumed."""

import json
import math
import shutil
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest
from launch import FSDP2, finished, started
from script_runs import in_this_process, without_measurements
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from rlmt import model as policy
from rlmt import chat as templates
import train_dpo
from data.toy import world
from rlmt.run import rows_of_step
from train_dpo import Pair, build_pairs, load_pairs

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "data/toy/base")


# --- pairs


def row(prompt_id: str, reward: float | None, status: str = "ok", step: int = 1, ids: list | None = None):
    ids = ids or [zlib.crc32(repr((prompt_id, reward)).encode())]
    return {"step": step, "id": prompt_id, "reward": reward, "status": status, "ids": ids}


def test_best_against_worst():
    rows = [row("a", 1.0), row("b", 5.0), row("a", 3.0), row("a", -2.0), row("b", 4.0)]
    pairs, skipped = build_pairs(rows, 2, "think+response")
    assert pairs == [
        {"id": "a", "chosen": rows[2], "rejected": rows[3]},
        {"id": "b", "chosen": rows[1], "rejected": rows[4]},
    ]
    assert not skipped


def test_what_is_never_paired():
    rows = [row("tie", 1.0), row("tie", 1.0), row("tie", 1.0)]
    rows += [row("one", 1.0), row("one", None, "truncated")]
    for status in ("no_open", "no_close", "nested", "empty_response", "truncated"):
        rows.append(row("none", None, status))
    rows += [row("good", 1.0), row("good", 9.0, "truncated"), row("good", -9.0, "nested"), row("good", 2.0)]
    pairs, skipped = build_pairs(rows, 2, "think+response")
    found = [(pair["id"], pair["chosen"]["reward"], pair["rejected"]["reward"]) for pair in pairs]
    assert found == [("good", 2.0, 1.0)]
    assert skipped == {"tie": 1, "too_few_valid": 1, "no_valid": 1}
    assert build_pairs(rows, 3, "think+response") == ([], Counter(tie=1, too_few_valid=2, no_valid=1))
    assert build_pairs([], 2, "think+response") == ([], Counter())


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    templates.prepare_tokenizer(tokenizer, "think")
    return tokenizer


def test_a_preference_file_becomes_the_tokens_of_sft(tokenizer, tmp_path):
    user = [{"role": "user", "content": "ham, please"}]
    full = {
        "id": "x",
        "messages": user,
        "chosen": "ham 5",
        "rejected": "cheese",
        "chosen_thinking": "ham",
        "rejected_thinking": "no",
    }
    rows = [
        full,
        {**full, "rejected_thinking": ""},
        {**full, "rejected": "ham 5", "rejected_thinking": "ham"},
        {**full, "chosen": "ham " * 200},
        {**full, "chosen_thinking": None, "chosen": "<think> ham </think> cheese"},
        {**full, "rejected": "cheese <|im_end|>"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    args = train_dpo.Args(pairs=str(path), max_completion_tokens=100)
    pairs, dropped, _ = load_pairs(args, tokenizer)
    skipped = Counter(row["reason"] for row in dropped)
    assert skipped == {"malformed": 2, "tie": 1, "too_long": 1} and len(pairs) == 2
    assert pairs[0].prompt_ids == templates.encode_prompt(tokenizer, user)
    assert pairs[0].chosen_ids == templates.encode_completion(tokenizer, "<think>\nham\n</think>\n\nham 5")
    # thinking in the text is laid out as a model of this format writes it
    assert tokenizer.decode(pairs[1].chosen_ids) == "<think>\nham\n</think>\n\ncheese<|im_end|>"

    args.think_format = "plain"
    pairs, dropped, _ = load_pairs(args, tokenizer)
    assert tokenizer.decode(pairs[0].chosen_ids) == "ham 5<|im_end|>"
    # without its thinking, the answer in tags is the rejected one
    skipped = Counter(row["reason"] for row in dropped)
    assert skipped == {"tie": 2, "too_long": 1, "malformed": 1}


# --- the loss


def test_loss_at_known_margins():
    def loss(*logps: float) -> tuple[float, float, float]:
        found = train_dpo.dpo_loss(*[torch.tensor([logp]) for logp in logps], beta=0.1)
        return tuple(value.item() for value in found)

    assert loss(-5.0, -7.0, -5.0, -7.0) == pytest.approx((math.log(2), 0.0, 0.0))
    # implicit rewards 0.1 * (-1 + 2) and 0.1 * (-3 + 2.5), a margin of 0.15
    assert loss(-1.0, -3.0, -2.0, -2.5) == pytest.approx((math.log(1 + math.exp(-0.15)), 0.1, -0.05))
    assert loss(-400.0, 0.0, 0.0, 0.0)[0] == pytest.approx(40.0)  # and not infinity


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


def perturb(model: torch.nn.Module) -> torch.nn.Module:
    """Makes a policy that differs from its reference."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)
    return model


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.fixture(scope="module")
def ours() -> dict[int, tuple[dict, torch.Tensor]]:
    """Means and gradient of one step, by --micro-batch-tokens: one pair a forward, two or so, all at once."""
    accelerator = policy.start_accelerator()
    found = {}
    for micro_batch_tokens in (1, 100, 10_000):
        args = train_dpo.Args(beta=0.3, micro_batch_tokens=micro_batch_tokens)
        pairs = [Pair(p.id, p.prompt_ids, p.chosen_ids, p.rejected_ids) for p in PAIRS]
        pairs = policy.longest_first(pairs, train_dpo.lengths_of)
        model = policy.Policy(AutoModelForCausalLM.from_pretrained(BASE).train(), temperature=1.0)
        train_dpo.set_reference_logps(pairs, model, args, 0, accelerator)
        perturb(model.model)
        means = train_dpo.accumulate_gradients(pairs, len(pairs), model, args, 0, accelerator)
        found[micro_batch_tokens] = (means, gradient_of(model.model))
    return found


def test_loss_gradient_and_metrics_are_trls(ours, tmp_path):
    rows = []
    for pair in PAIRS:
        columns = ("prompt_ids", "chosen_ids", "rejected_ids")
        rows.append({name: getattr(pair, name) for name in columns})
    config = DPOConfig(
        output_dir=str(tmp_path),
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
    perturb(trainer.model).train()
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    loss.backward()

    means, gradient = ours[10_000]
    assert abs(loss.item() - math.log(2)) > 1e-2
    assert means["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient, gradient_of(trainer.model), rtol=1e-4, atol=1e-5)
    distance = (gradient - gradient_of(trainer.model)).norm() / gradient.norm()
    assert distance < 1e-5
    logged = trainer._metrics["train"]
    for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"):
        assert means[name] == pytest.approx(logged[name][0], rel=1e-4, abs=1e-5), name
    for name in ("logps/chosen", "logps/rejected"):
        assert means[name] == pytest.approx(logged[name][0], rel=1e-5), name


def test_order_of_pairs():
    """Two epochs of five pairs, two a step: 2, 2, 1 and again."""

    def epoch(number: int, first_step: int) -> list[list[str]]:
        steps = [rows_of_step(PAIRS, first_step + i, 2, 3, number, leaves_out_rest=False) for i in (1, 2, 3)]
        return [[pair.id for pair in step] for step in steps]

    epochs = [epoch(1, 0), epoch(1, 3), epoch(2, 0), epoch(2, 3)]
    for steps in epochs:
        assert [len(step) for step in steps] == [2, 2, 1]
        assert sorted(sum(steps, [])) == list("abcde")
    assert len({json.dumps(steps) for steps in epochs}) > 2
    assert epoch(1, 0) == epochs[0]


# --- the script: the base model answers without thinking, and about half of its answers end in time


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with training prompts, held-out prompts, and preference pairs."""
    folder = tmp_path_factory.mktemp("data")
    for name, split, n in (("prompts", "rl", 20), ("held_out", "test", 4)):
        rows = []
        for i, _, text, _ in world.orders_of(split, n, 0):
            rows.append({"id": i, "messages": [{"role": "user", "content": text}]})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pairs = []
    for i in range(10):
        messages = [{"role": "user", "content": f"I have {i} dollars."}]
        pairs.append({"id": i, "messages": messages, "chosen": f"You get {i}.", "rejected": "No"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs))
    return folder


# some 8 pairs a round: steps of 3, 3 and 2 or fewer pairs, twice
TINY = {
    "think_format": "plain",
    "model": BASE,
    "max_completion_tokens": 64,
    "prompts_per_round": 8,
    "samples_per_prompt": 6,
    "rollout_batch_size": 8,
    "batch_size": 3,
    "epochs": 2.0,
    "save_steps": 1,
    "learning_rate": 3e-4,
}


def train(data: Path, out: Path, **changes) -> None:
    """Runs the script with the flags TINY and `changes`."""
    values = {**train_dpo.PRESETS["toy"], **TINY, "prompts": str(data / "prompts.jsonl"), **changes}
    with in_this_process():
        train_dpo.main(train_dpo.Args(**values, preset="toy", out=str(out)))


def start(data: Path, out: Path, *launcher: str, **changes) -> list[str]:
    """Returns the command line that does what `train` does, behind `launcher`."""
    flags = ["--preset", "toy"]
    for name, value in {**TINY, "prompts": data / "prompts.jsonl", "out": out, **changes}.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return [sys.executable, *launcher, "train_dpo.py", *flags]


def kill(command: list[str], output: Path, reached) -> None:
    """Starts a run and kills it (SIGKILL) as soon as `reached()`."""
    process = started(command[1:], output)
    while not reached():
        assert process.is_alive(), f"the run ended before it could be killed: {output.read_text()[-3000:]}"
        time.sleep(0.01)
    process.kill()
    process.join()


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """A run of two rounds that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(data, out, rounds=2, gold_prompts=str(data / "held_out.jsonl"))
    return out


def test_what_a_run_writes(whole):
    completions = rows_of(whole / "completions.jsonl")
    rounds = rows_of(whole / "metrics.jsonl")
    assert len(completions) == 2 * 8 * 6 and [metrics["step"] for metrics in rounds] == [1, 2]
    for metrics in rounds:
        number = metrics["step"]
        for part in ("rollout", "reward", "pairs", "reference", "update", "other"):
            assert metrics[f"time/{part}"] > 0
        members = [row for row in completions if row["step"] == number]
        assert metrics["pairs"] + sum(metrics["skipped"].values()) == 8 and metrics["pairs"] > 2
        for side, pick in (("chosen", max), ("rejected", min)):
            paired = [row for row in members if row["pair"] == side]
            assert len(paired) == metrics["pairs"]
            for one in paired:
                rivals = [row for row in members if row["id"] == one["id"] and row["status"] == "ok"]
                assert one["status"] == "ok" and one["reward"] == pick(row["reward"] for row in rivals)
        malformed = [row for row in members if row["status"] != "ok"]
        assert malformed and all(row["reward"] is None for row in malformed)
        golds = [row["rewards"]["gold"] for row in members]
        rewards = [row["reward"] for row in members if row["status"] == "ok"]
        cut_off = [row for row in members if row["cut_off"]]
        assert metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert metrics["reward/preference"] == pytest.approx(metrics["reward"])
        assert metrics["reward/gold"] == pytest.approx(sum(golds) / 48)
        assert metrics["think/format_ok"] == len(rewards) / 48 and metrics["think/mean_tokens"] == 0
        assert metrics["think/truncated"] == len(cut_off) / 48 > 0
        assert metrics["think/response_tokens"] == pytest.approx(sum(row["n_tokens"] for row in members) / 48)

        folder = whole / f"round-{number}"
        steps = rows_of(folder / "metrics.jsonl")
        assert len(steps) == metrics["steps"] == 2 * math.ceil(metrics["pairs"] / 3)
        assert metrics["loss"] == pytest.approx(sum(step["loss"] for step in steps) / len(steps))
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the reference is what sampled
        names = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"]
        names += ["logps/chosen", "logps/rejected", "grad_norm", "learning_rate", "epoch", "num_tokens"]
        assert all(math.isfinite(step[name]) for step in steps for name in names)
        second_epoch = [step["rewards/margins"] for step in steps[len(steps) // 2 :]]
        assert sum(second_epoch) > 0
        pairs = rows_of(folder / "pairs.jsonl")
        sampled = [row["ids"] for row in members if row["pair"] == "chosen"]
        assert sorted(pair["chosen_ids"] for pair in pairs) == sorted(sampled)
    assert [row["step"] for row in rows_of(whole / "held_out.jsonl")] == [0, 1, 2]
    ids = [{row["id"] for row in completions if row["step"] == number} for number in (1, 2)]
    assert not ids[0] & ids[1]  # other prompts in each round
    assert json.loads((whole / "summary.json").read_text())["prompts"] == 20
    AutoModelForCausalLM.from_pretrained(whole / "model")
    last = load_file(whole / "round-2" / "model" / "model.safetensors")
    result = load_file(whole / "model" / "model.safetensors")
    assert all(torch.equal(result[name], weight) for name, weight in last.items())
    assert json.loads((whole / "model" / "think_format.json").read_text()) == {"think_format": "plain"}


def test_a_killed_run_ends_with_the_same_bits(whole, data, tmp_path, capsys):
    """Killed while round 1 samples, in the second epoch of round 2, which was added to a finished run, and at
    the end."""
    out = tmp_path / "run"
    held_out = str(data / "held_out.jsonl")
    (out / "round-1").mkdir(parents=True)
    for name in ("config.json", "command.txt", "env.txt"):
        shutil.copy(whole / name, out)
    samples = (whole / "round-1" / "samples-0.jsonl").read_text()
    assert samples.count("\n") == 48
    ninth_end = len("".join(samples.splitlines(keepends=True)[:9]))
    (out / "round-1" / "samples-0.jsonl").write_text(samples[: ninth_end + 20])  # the tenth is torn
    for name in ("held_out.jsonl", "held_out_completions.jsonl"):
        at_start = [line for line in lines_of(whole / name) if json.loads(line)["step"] == 0]
        (out / name).write_text("\n".join(at_start) + "\n")
    train(data, out, rounds=1, gold_prompts=held_out, resume=True)
    assert (out / "round-1" / "samples-0.jsonl").read_text().startswith(samples[:ninth_end])

    expected = rows_of(whole / "round-2" / "metrics.jsonl")
    second_epoch = len(expected) // 2 + 1
    log = out / "round-2" / "metrics.jsonl"
    command = start(data, out, rounds=2, gold_prompts=held_out, resume=True)
    (out / "metrics.jsonl").unlink()
    kill(command, tmp_path / "output", lambda: len(lines_of(log)) >= second_epoch)
    assert [row["step"] for row in rows_of(out / "metrics.jsonl")] == [1]  # written before round 2
    train(data, out, rounds=2, gold_prompts=held_out, resume=True)
    assert "round-2/checkpoint-" in capsys.readouterr().out

    shutil.rmtree(out / "model")  # as if killed before the last round's model was copied
    (out / "model.part").mkdir()
    (out / "summary.json").unlink()
    train(data, out, rounds=2, gold_prompts=held_out, resume=True)
    assert "resumes from" not in capsys.readouterr().out and (out / "summary.json").exists()

    for model in ("model", "round-1/model", "round-2/model", "best_by_gold"):
        one = load_file(whole / model / "model.safetensors")
        other = load_file(out / model / "model.safetensors")
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    logs = ("metrics.jsonl", "round-1/metrics.jsonl", "round-2/metrics.jsonl", "completions.jsonl")
    for name in (*logs, "held_out.jsonl", "held_out_completions.jsonl"):
        found = [without_measurements(row) for row in rows_of(out / name)]
        assert found == [without_measurements(row) for row in rows_of(whole / name)], name


def test_lora(data, tmp_path):
    """Without LoRA the first step has the same loss; the adapter is merged."""
    pairs = str(data / "pairs.jsonl")
    losses = []
    for rank in (0, 4):
        out = tmp_path / f"rank-{rank}"
        train(data, out, rounds=1, pairs=pairs, lora_r=rank)
        losses.append(rows_of(out / "round-1" / "metrics.jsonl")[0]["logps/chosen"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    adapters = [
        load_file(out / name / "adapter_model.safetensors") for name in ("adapter", "round-1/adapter")
    ]
    assert adapters[0] and all(torch.equal(adapters[1][name], weight) for name, weight in adapters[0].items())
    assert not (out / "completions.jsonl").exists() and not list(out.glob("round-1/samples*"))
    trained = load_file(out / "model" / "model.safetensors")
    base = load_file(Path(BASE) / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert trained.keys() == base.keys() and not torch.equal(trained[name], base[name])


def test_two_processes_are_one(data, tmp_path):
    """Under FSDP2 each of two processes samples its share; trained on the same pairs, both have the losses of
    one process."""
    sampled = tmp_path / "sampled"
    finished(start(data, sampled, *FSDP2, rounds=1, lora_r=4))
    texts = [row["text"] for row in rows_of(sampled / "completions.jsonl")]
    assert len(texts) == 48 and len(set(texts)) > 24

    pairs = str(data / "pairs.jsonl")
    finished(start(data, tmp_path / "two", *FSDP2, rounds=1, lora_r=4, pairs=pairs))
    train(data, tmp_path / "one", rounds=1, lora_r=4, pairs=pairs)
    found = rows_of(tmp_path / "two" / "round-1" / "metrics.jsonl")
    expected = rows_of(tmp_path / "one" / "round-1" / "metrics.jsonl")
    for one, other in zip(found, expected, strict=True):
        for name in ("loss", "rewards/margins", "logps/chosen", "logps/rejected", "grad_norm", "num_tokens"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
