"""train_reward.py: pairs, the loss by hand, calibration, and the script on the toy, killed, resumed, and
under FSDP2."""

import json
import math
import shutil
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launch import FSDP2, finished
from script_runs import in_this_process, killed_after, metrics_of, weights_of
import torch
from transformers import AutoModelForSequenceClassification

from rlmt import model as policy
from rlmt import chat as templates
import train_reward
from data.toy import world
from rewards.preference import RewardModel
from train_reward import Args, Pair, build_pairs
from rlmt import chat

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "data/toy/base")


@pytest.fixture
def tokenizer():
    tokenizer = chat.load_tokenizer(BASE)
    templates.prepare_tokenizer(tokenizer, "think")
    return tokenizer


# --- pairs


ROW = {
    "id": "p",
    "messages": [{"role": "user", "content": "I have 12 dollars."}],
    "chosen": "You get 1 dish.",
    "rejected": "You have great taste!",
    "chosen_thinking": "Budget 12.",
    "rejected_thinking": "Budget 13.",
}


def test_pairs_are_rendered_as_the_scorer_renders_them(tokenizer):
    (pair,), dropped = build_pairs([ROW], tokenizer, "response", 512)
    assert dropped == []
    scorer = SimpleNamespace(tokenizer=tokenizer, max_length=512, cut=[])  # without weights
    assert pair.chosen_ids == RewardModel.encode(scorer, ROW["messages"], ROW["chosen"])
    assert pair.rejected_ids == RewardModel.encode(scorer, ROW["messages"], ROW["rejected"])
    (with_thinking,), _ = build_pairs([ROW], tokenizer, "think+response", 512)
    assert tokenizer.decode(with_thinking.chosen_ids).count("<think>\nBudget 12.\n</think>") == 1


def test_a_pair_without_thinking_is_refused(tokenizer, capsys):
    with pytest.raises(SystemExit) as stop:
        build_pairs([ROW, ROW | {"rejected_thinking": None}], tokenizer, "think+response", 512)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "row p has neither 'rejected_thinking'" in error and "--reward-on response" in error


def test_identical_and_overlong_pairs_are_dropped_with_a_reason(tokenizer):
    (pair,), _ = build_pairs([ROW], tokenizer, "response", 512)
    same = {**ROW, "rejected": ROW["chosen"]}
    kept, dropped = build_pairs([same, ROW], tokenizer, "response", 10)
    assert kept == []
    assert dropped == [
        {"id": "p", "reason": "identical"},
        {"id": "p", "reason": "too_long", "tokens": max(len(pair.chosen_ids), len(pair.rejected_ids))},
    ]


def test_pairs_of_one_prompt_stay_on_one_side():
    pairs = []
    for n in range(40):
        pairs.append({"id": n, "messages": [{"role": "user", "content": str(n // 4)}]})
    train, held_out = train_reward.split_by_prompt(pairs, 0.3, 0)
    assert len(held_out) == 12 and len(train) == 28
    assert not {row["id"] // 4 for row in train} & {row["id"] // 4 for row in held_out}


def test_too_few_pairs_are_refused(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in world.pair_rows(8, 0)))
    with pytest.raises(SystemExit) as ended:
        train_reward.main(Args(model=BASE, pairs=str(path), dry_run=True))
    assert ended.value.code == 2
    assert "6 pairs to train on, 2 held out: too few; a step takes --batch-size 64" in capsys.readouterr().err


def test_pairs_that_the_context_cannot_hold_are_refused(tmp_path, capsys):
    rows = world.pair_rows(8, 0)
    rows[0]["chosen"] *= 100
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as ended:
        train_reward.main(Args(model=BASE, pairs=str(path), batch_size=2, max_length=10**6, dry_run=True))
    assert ended.value.code == 2
    assert "tokens are more than the 512 of" in capsys.readouterr().err


def test_calibration_by_hand():
    margin = math.log(0.9 / 0.1)  # the model is 90 % sure
    found = train_reward.calibration([margin] * 8 + [-margin] * 2 + [0.0])
    assert found["accuracy"] == pytest.approx(8.5 / 11) and found["n"] == 11
    # ten pairs at 0.9 of which 0.8 were right, one at 0.5 that is half right
    assert found["ece"] == pytest.approx(10 / 11 * 0.1)
    assert [one["n"] for one in found["bins"]] == [1, 10]


# --- the loss


def test_bradley_terry_by_hand():
    chosen = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    loss = train_reward.bradley_terry_loss(chosen, rejected)
    loss.sum().backward()
    for i, margin in enumerate((1.0, -3.0, 0.0)):
        assert loss[i].item() == pytest.approx(math.log(1 + math.exp(-margin)), rel=1e-12)
        assert chosen.grad[i].item() == pytest.approx(-1 / (1 + math.exp(margin)), rel=1e-12)
    assert torch.equal(rejected.grad, -chosen.grad)


def random_pairs(n: int) -> list[Pair]:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for i in range(n):
        sides = []
        for length in torch.randint(2, 60, (2,), generator=generator).tolist():
            sides.append(torch.randint(5, 200, (length,), generator=generator).tolist())
        pairs.append(Pair(str(i), str(i), *sides, 0, 0))
    return pairs


def test_a_reward_model_stands_beside_the_length_baseline():
    """By hand: answers of 10 against 20, 100 against 80, 80 against 100 and 50 against 50 characters."""
    lengths = [(10, 20), (100, 80), (80, 100), (50, 50)]
    pairs = [Pair(str(i), f"prompt {i}", [1], [1], *both) for i, both in enumerate(lengths)]
    result = train_reward.compare_with_length([1.0, 2.0, -1.0, 0.5], pairs)
    assert result["length_baseline"] == pytest.approx((0 + 1 + 0 + 0.5) / 4)
    assert result["equal_length"] == {
        "n": 3,
        "accuracy": pytest.approx(2 / 3),
        "standard_error": pytest.approx(np.std([1, 0, 1], ddof=1) / math.sqrt(3)),
        "length_baseline": pytest.approx((1 + 0 + 0.5) / 3),
    }
    assert train_reward.compare_with_length([1.0], pairs[:1])["equal_length"] is None
    assert (
        train_reward.compare_with_length([1.0, 2.0], pairs[:2])["equal_length"] is None
    )  # one prompt has no error


def test_copies_of_a_pair_are_no_further_evidence():
    """A prompt's pairs share answers; a standard error that takes them as independent would be too small."""
    margins = [1.0, -1.0, -1.0, 1.0, 1.0]
    pairs = [Pair(str(i), f"prompt {i}", [1], [1], 50, 50) for i in range(5)]
    once = train_reward.compare_with_length(margins, pairs)["equal_length"]["standard_error"]
    assert once == pytest.approx(np.std([1, 0, 0, 1, 1], ddof=1) / math.sqrt(5))
    copies = train_reward.compare_with_length(margins * 8, pairs * 8)["equal_length"]
    assert copies["standard_error"] == pytest.approx(once) and copies["n"] == 40


def test_a_prompt_in_both_files_ends_the_run(tokenizer, tmp_path, exits):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    args = Args(model=BASE, pairs=str(path), held_out_pairs=str(path))
    said = exits(train_reward.load_pairs, args, tokenizer, policy.start_accelerator())
    assert "the prompt of row p is in --pairs as well" in said


def loaded() -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, dtype=torch.float64)
    model.config.pad_token_id = 0
    return model


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 150])
def test_batched_pairs_teach_what_pairs_one_by_one_teach(micro_batch_tokens):
    expected = loaded()
    pairs = random_pairs(8)
    rewards = []
    losses = []
    for pair in pairs:
        chosen = expected(torch.tensor([pair.chosen_ids])).logits[0, 0]
        rejected = expected(torch.tensor([pair.rejected_ids])).logits[0, 0]
        loss = torch.log(1 + torch.exp(rejected - chosen))
        (loss / 8).backward()
        losses.append(loss.item())
        rewards.append((chosen.item(), rejected.item()))

    model = loaded()
    args = Args(batch_size=8, micro_batch_tokens=micro_batch_tokens)
    means = train_reward.accumulate_gradients(pairs, model, args, 0, policy.start_accelerator())
    assert means == pytest.approx(
        {
            "loss": sum(losses) / 8,
            "min_reward": min(map(min, rewards)),
            "mean_reward": sum(map(sum, rewards)) / 16,
            "max_reward": max(map(max, rewards)),
            "accuracy": sum(chosen > rejected for chosen, rejected in rewards) / 8,
            "margin": sum(chosen - rejected for chosen, rejected in rewards) / 8,
        },
        rel=1e-6,
    )
    for weight, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_a_head_of_several_outputs_is_replaced(reward_models, tokenizer):
    args = Args(model=reward_models["two_labels"], gradient_checkpointing=False)
    model, _ = train_reward.load_learner(args, None, tokenizer, policy.start_accelerator())
    assert model.score.weight.shape[0] == 1 and model.config.num_labels == 1


def test_other_weights_of_a_wrong_shape_are_refused(reward_models, tokenizer, tmp_path, capsys):
    """They would be random."""
    folder = tmp_path / "model"
    shutil.copytree(reward_models["chatml"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    with pytest.raises(SystemExit):
        train_reward.load_learner(Args(model=str(folder)), None, tokenizer, policy.start_accelerator())
    assert "1 weights are missing, e.g. model.embed_tokens.weight" in capsys.readouterr().err


# --- the script


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in world.pair_rows(60, 0)))
    return path


# ten steps, five an epoch
TINY = {"epochs": 2.0, "batch_size": 8, "micro_batch_tokens": 800, "save_steps": 1}


def train(pairs: Path, out: Path, **changes) -> Path:
    """Runs the script with the flags TINY and `changes`; returns its folder."""
    values = {**train_reward.PRESETS["toy"], **TINY, "pairs": str(pairs), **changes}
    with in_this_process():
        train_reward.main(Args(**values, preset="toy", out=str(out)))
    return out


def start(pairs: Path, out: Path, *launcher: str, **changes) -> list[str]:
    """Returns the command line that does what `train` does, behind `launcher`."""
    command = [sys.executable, *launcher, "train_reward.py", "--preset", "toy", "--pairs", str(pairs)]
    for name, value in {**TINY, **changes}.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    return [*command, "--out", str(out)]


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory) -> Path:
    """A run that nothing disturbs, and whose model is gone before another copy of it is loaded."""
    load_trained = train_reward.load_trained
    measure_held_out = train_reward.measure_held_out
    loaded = []

    def load_and_note(*args):
        model = load_trained(*args)
        loaded.append(weakref.ref(model.score.weight))
        return model

    def measure_alone(*args):
        assert [weight() for weight in loaded] == [None]
        return measure_held_out(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_reward, "load_trained", load_and_note)
        patch.setattr(train_reward, "measure_held_out", measure_alone)
        return train(pairs, tmp_path_factory.mktemp("whole") / "run")


def test_held_out_pairs_need_no_template_that_keeps_thinking(whole, pairs, tmp_path, capsys):
    """Their token ids are made already, so a template that drops thinking must not end a run that is
    complete."""
    model = tmp_path / "model"
    shutil.copytree(whole / "model", model)
    template = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="drops or changes thinking"):
        RewardModel(str(model))
    pair = Pair("a", "a", [5, 6, 7], [5, 6, 8], 3, 3)
    assert train_reward.measure_held_out([pair] * 2, model, "cpu", "auto")["n"] == 2


def test_what_a_run_writes(whole):
    run = whole
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.json", "command.txt", "env.txt", "metrics.jsonl", "dropped.jsonl", "model"}
    metrics = metrics_of(run)
    committed = (ROOT / "results/toy/reward-weak-rm/metrics.jsonl").read_text().splitlines()[0]
    assert metrics[0].keys() | {"seconds", "step_time"} == json.loads(committed).keys()
    n_steps = len(metrics)
    assert n_steps >= 8 and [row["step"] for row in metrics] == list(range(1, n_steps + 1))

    summary = json.loads((run / "summary.json").read_text())
    held_out = summary["held_out"]
    assert summary["n_pairs"] + held_out["n"] + summary["dropped"] == 60
    assert 0 <= held_out["accuracy"] <= 1 and 0 <= held_out["ece"] <= 0.5
    assert 0 <= held_out["length_baseline"] <= 1 and held_out["equal_length"]["n"] > 0
    assert sum(one["n"] for one in held_out["bins"]) == held_out["n"]
    assert json.loads((run / "model" / "config.json").read_text())["reward_on"] == "response"
    assert not (run / "model" / "think_format.json").exists()
    score = RewardModel(str(run / "model")).score([ROW["messages"]], [ROW["chosen"]])
    assert math.isfinite(score[0])


def test_a_killed_run_ends_with_the_same_bits(whole, pairs, tmp_path, capsys):
    broken = tmp_path / "broken"
    second_epoch = len(metrics_of(whole)) // 2 + 2
    killed_after(second_epoch, whole, broken)
    train(pairs, broken, resume=True)
    assert "resumes from" in capsys.readouterr().out

    expected = weights_of(whole / "model")
    found = weights_of(broken / "model")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert metrics_of(broken) == metrics_of(whole)


def test_an_adapter_in_4_and_8_bits_is_merged_and_comes_back_from_a_checkpoint(whole, pairs, tmp_path):
    """The head is trained whole, and lies with the adapter."""
    bits = {"lora_r": 64, "load_in_4bit": True, "optim": "adamw_8bit", "epochs": 1.0}
    done = train(pairs, tmp_path / "done", **bits)
    merged = weights_of(done / "model")
    assert merged.keys() == weights_of(whole / "model").keys()
    saved = weights_of(done / "adapter")
    head = [weight for name, weight in saved.items() if name.endswith("score.weight")]
    assert len(head) == 1 and torch.equal(head[0], merged["score.weight"])

    broken = tmp_path / "broken"
    killed_after(3, done, broken)
    train(pairs, broken, resume=True, **bits)
    found = weights_of(broken / "model")
    assert all(torch.equal(found[name], weight) for name, weight in merged.items())
    assert metrics_of(broken) == metrics_of(done)
    assert json.loads((broken / "summary.json").read_text()) == json.loads(
        (done / "summary.json").read_text()
    )


def test_two_processes_learn_what_one_learns(pairs, tmp_path):
    """The two share the weights by FSDP2."""
    out = tmp_path / "FSDP2"
    finished(start(pairs, out, *FSDP2, epochs=1.0))
    one = train(pairs, tmp_path / "one", epochs=1.0)
    for expected, found in zip(metrics_of(one), metrics_of(out), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    expected = weights_of(one / "model")
    found = weights_of(out / "model")
    assert expected.keys() == found.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4)
