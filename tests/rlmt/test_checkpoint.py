"""rlmt/checkpoint.py: what is saved is loaded, what is damaged is refused, and a full disk costs no older checkpoint.

Several processes, DDP and FSDP2: tests/scripts/test_grpo.py.
"""

import argparse
import dataclasses
import json
import os
import resource
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlmt import checkpoint
from rlmt import memory as plan
from rlmt import model as policy
from rlmt import chat as templates
import train_grpo
from rlmt.model import Learner
from rlmt import run as rlmt_run
from rlmt import chat
from rlmt import data as rlmt_data

BASE = "data/toy/base"


@pytest.fixture(scope="module")
def accelerator():
    return policy.start_accelerator()


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = chat.load_tokenizer(BASE)
    templates.prepare_tokenizer(tokenizer, "think")
    return tokenizer


def learner(path: str = BASE, lora_r: int = 0, resume_from: str | None = None) -> Learner:
    model = policy.load_policy(path, lora_r, False, resume_from)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return Learner(policy.Policy(model, 1.0), torch.optim.AdamW(trained, lr=1e-2))


def train(learner: Learner, steps: int) -> None:
    ids = torch.arange(5, 25).repeat(2, 1)
    mask = torch.ones_like(ids)
    for _ in range(steps):
        logprobs, _ = learner.model(ids, mask, mask[:, 10:])
        (-logprobs.mean()).backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in learner.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


ARGS = train_grpo.Args(model=BASE, think_format="think", keep_checkpoints=2)


def run_folder(path: Path, args=ARGS) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"args": dataclasses.asdict(args)}))
    return path


@pytest.fixture(scope="module")
def saved(accelerator, tokenizer, tmp_path_factory) -> Path:
    """A run with two checkpoints of a policy and a critic; tests that change it copy it."""
    run = run_folder(tmp_path_factory.mktemp("saved") / "run")
    learners = {"model": learner(), "critic": learner()}
    for step in (3, 4):
        train(learners["model"], 1)
        train(learners["critic"], 2)
        checkpoint.save_checkpoint(run, step, learners, tokenizer, ARGS, accelerator)
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.mark.parametrize("lora_r", [0, 4])
def test_training_goes_on_as_if_nothing_had_happened(lora_r, accelerator, tokenizer, tmp_path):
    run = run_folder(tmp_path / "run")
    torch.manual_seed(0)
    first = {"model": learner(lora_r=lora_r), "critic": learner()}
    for one in first.values():
        train(one, 3)
    folder = checkpoint.save_checkpoint(run, 3, first, tokenizer, ARGS, accelerator)
    assert checkpoint.latest(run) == folder == run / "checkpoint-3"

    torch.manual_seed(1)
    second = {"model": learner(BASE, lora_r, folder), "critic": learner(str(folder / "critic"))}
    for name, one in second.items():
        checkpoint.load_optimizer(folder, name, one.optimizer)
        assert same(weights_of(one), weights_of(first[name]))
        train(one, 2)
        train(first[name], 2)
        assert same(weights_of(one), weights_of(first[name]))
    on_disk = 0
    for path in folder.rglob("*.safetensors"):
        on_disk += path.stat().st_size
    for path in folder.rglob("*.pt"):
        torch.load(path, weights_only=True)
        on_disk += path.stat().st_size
    assert checkpoint.checkpoint_bytes(first) == pytest.approx(on_disk, rel=0.05)
    assert (folder / "adapter_model.safetensors").exists() == bool(lora_r)
    assert (folder / "model.safetensors").exists() != bool(lora_r)


def test_a_flipped_byte_in_any_file_is_found(run, capsys):
    folder = run / "checkpoint-4"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {
        *(
            "model.safetensors",
            "config.json",
            "optimizer-rank0.pt",
            "critic-optimizer-rank0.pt",
            "tokenizer.json",
        ),
        *("tokenizer_config.json", "think_format.json", "generation_config.json", "chat_template.jinja"),
        "complete",
    }
    assert folder / "critic" / "model.safetensors" in files
    generator = torch.Generator().manual_seed(0)
    for path in files:
        content = path.read_bytes()
        place = torch.randint(len(content), (1,), generator=generator).item()
        if path.name == "complete":
            place = content.index(b":") + 3  # in a value: a space more in a list says nothing else
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert checkpoint.latest(run) == run / "checkpoint-3", path
        assert f"{folder} " in capsys.readouterr().err
        path.write_bytes(content)
    assert checkpoint.latest(run) == folder


def test_damaged_and_unfinished_checkpoints_are_skipped(run, capsys):
    newest = run / "checkpoint-4"

    def cut_in_half(content: bytes) -> bytes:
        return content[: len(content) // 2]

    cases = [
        ("optimizer-rank0.pt", cut_in_half, "has a optimizer-rank0.pt that is not what was written"),
        ("critic/model.safetensors", None, "lacks critic/model.safetensors"),
        ("complete", cut_in_half, "has a damaged list of its files"),
        ("complete", None, "was not written to its end"),
    ]
    for name, change, message in cases:
        content = (newest / name).read_bytes()
        if change:
            (newest / name).write_bytes(change(content))
        else:
            (newest / name).unlink()
        assert checkpoint.latest(run) == run / "checkpoint-3"
        assert f"{newest} {message}" in capsys.readouterr().err
        (newest / name).write_bytes(content)

    (run / "checkpoint-best").mkdir()
    (run / "checkpoint-99").mkdir()  # killed when it had just begun
    assert checkpoint.latest(run) == newest

    for folder in (newest, run / "checkpoint-3"):
        path = folder / "model.safetensors"
        path.write_bytes(cut_in_half(path.read_bytes()))
    with pytest.raises(SystemExit) as error:
        checkpoint.latest(run)
    said = capsys.readouterr().err
    assert error.value.code == 2 and "has no checkpoint to resume from: checkpoint-4 has" in said
    assert "checkpoint-3 has" in said and "--overwrite starts anew" in said


def test_a_run_that_never_finished_a_checkpoint_starts_at_the_beginning(tmp_path, accelerator):
    run = run_folder(tmp_path / "run")
    (run / "checkpoint-1").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    args = dataclasses.replace(ARGS, resume=True)
    assert rlmt_run.start_or_resume(run, args, accelerator) == (None, 0)
    assert (run / "metrics.jsonl").read_text() == ""


def test_older_checkpoints_go_when_a_newer_one_is_whole(tmp_path):
    def names() -> list[str]:
        return [folder.name for folder in checkpoint.numbered(tmp_path)]

    for step in (8, 9, 10, 11, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step != 10:
            (tmp_path / f"checkpoint-{step}" / "complete").write_text("")
    newest = tmp_path / "checkpoint-100"
    checkpoint._delete_older(tmp_path, newest, keep=0)
    assert len(names()) == 5
    checkpoint._delete_older(tmp_path, tmp_path / "checkpoint-10", keep=4)  # more than there are
    assert len(names()) == 5
    checkpoint._delete_older(tmp_path, newest, keep=3)
    assert names() == ["checkpoint-9", "checkpoint-11", "checkpoint-100"]
    checkpoint._delete_older(
        tmp_path, tmp_path / "checkpoint-11", keep=1
    )  # a resumed run leaves later ones alone
    assert names() == ["checkpoint-11", "checkpoint-100"]


@pytest.mark.parametrize("megabytes", [0.001, 1.0, 5.0])
def test_a_full_disk_leaves_the_older_checkpoints_usable(megabytes, saved, run, accelerator, tokenizer):
    """No file may become larger than that, which is what a full disk does to a write: tokenizer, weights, optimizer."""
    learners = {"model": learner(str(run / "checkpoint-4")), "critic": learner()}
    train(learners["model"], 1)
    args = dataclasses.replace(ARGS, keep_checkpoints=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(megabytes * 1e6), before[1]))
    try:
        # each library has its own
        with pytest.raises(Exception, match="[Ff]ile too large|failed writing file|unexpected pos"):
            checkpoint.save_checkpoint(run, 5, learners, tokenizer, args, accelerator)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.latest(run) == run / "checkpoint-4" and (run / "checkpoint-3" / "complete").exists()
    checkpoint.save_checkpoint(
        run, 5, learners, tokenizer, args, accelerator
    )  # over what was left, with room again
    assert checkpoint.latest(run) == run / "checkpoint-5" and len(checkpoint.numbered(run)) == 1


def test_the_text_of_a_log_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "summary.json"
    rlmt_data.write_file(path, "before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError):
            rlmt_data.write_file(path, "x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "before"


def test_every_row_once_an_epoch_as_a_function_of_seed_and_step():
    rows = list(range(11))
    steps = [rlmt_run.rows_of_step(rows, step, 3, seed=7) for step in range(6)]
    for epoch in (steps[:3], steps[3:]):
        shown = [row for step in epoch for row in step]
        assert len(shown) == len(set(shown)) == 9  # two do not fill a step
    assert steps[:3] != steps[3:] and steps[0] != rlmt_run.rows_of_step(rows, 0, 3, seed=8)
    assert rlmt_run.rows_of_step(rows, 4, 3, seed=7) == steps[4]


def test_fewer_steps_than_the_checkpoint_has_are_refused(run, accelerator, capsys):
    """Else the model of step 4 would be called that of step 3."""
    with pytest.raises(SystemExit):
        rlmt_run.start_or_resume(run, argparse.Namespace(resume=True, steps=3), accelerator)
    assert "checkpoint-4 has trained 4 steps" in capsys.readouterr().err
    assert rlmt_run.start_or_resume(run, argparse.Namespace(resume=True, steps=4), accelerator)[1] == 4


def test_rows_after_the_checkpoint_leave_the_logs(run, accelerator, capsys):
    for name in rlmt_run.LOGS:
        rows = "".join(json.dumps({"step": step, "name": name}) + "\n" for step in (1, 3, 4, 4, 5))
        (run / name).write_text(rows + '{"step": 6, "na')  # a kill cuts off the last line
    assert rlmt_run.start_or_resume(run, dataclasses.replace(ARGS, resume=True), accelerator) == (
        run / "checkpoint-4",
        4,
    )
    for name in rlmt_run.LOGS:
        assert [row["step"] for row in rlmt_data.read_log(run / name)] == [1, 3, 4, 4]
    assert "resumes from" in capsys.readouterr().out


@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_saved_model_is_an_ordinary_folder(lora_r, accelerator, tokenizer, tmp_path):
    """transformers loads it, and it says the same; LoRA is merged. (vLLM loads one in test_rollout.py.)"""
    torch.manual_seed(0)
    one = learner(lora_r=lora_r)
    train(one, 2)
    folder = tmp_path / "model"
    unfinished = tmp_path / "model.part"  # of a run that was killed: from_pretrained would find its shards
    for other in (folder, unfinished):
        other.mkdir()
        (other / f"old-{other.name}").write_text("")
    (folder / "README.md").write_text("my card")
    checkpoint.save_model(folder, one.model, tokenizer, accelerator)
    assert not list(folder.glob("old*")) and not unfinished.exists()
    assert (tmp_path / "adapter").exists() == bool(lora_r)
    assert (folder / "README.md").read_text() == "my card"

    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    expected = dict(policy.whole_weights(one.model))
    assert same(dict(loaded.named_parameters()), expected)
    base = dict(AutoModelForCausalLM.from_pretrained(BASE).named_parameters())
    assert loaded.config.dtype == torch.float32 and not same(expected, base)
    ids = torch.arange(5, 25).unsqueeze(0)
    mask = torch.ones_like(ids)
    torch.testing.assert_close(
        policy.Policy(loaded, 1.0)(ids, mask, mask[:, 10:])[0], one.model(ids, mask, mask[:, 10:])[0]
    )
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.stop_ids
    assert chat.read_trained_as(str(folder)) == {"think_format": "think"}


def test_every_model_of_a_run_has_its_own_adapter(accelerator, tokenizer, tmp_path):
    """Not the last one only; an older adapter goes as a whole, and a copied model takes its adapter along."""
    for name in ("best_by_gold_adapter", "best_by_gold_adapter.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old.safetensors").write_text("")
    torch.manual_seed(0)
    one = learner(lora_r=4)
    adapters = {}
    for name in ("best_by_gold", "model"):
        train(one, 1)
        checkpoint.save_model(tmp_path / name, one.model, tokenizer, accelerator)
        adapters[name] = {key: weight for key, weight in weights_of(one).items() if "lora_" in key}
    assert not list(tmp_path.glob("*/old*")) and not list(tmp_path.glob("*.part"))

    (tmp_path / "round-1").mkdir()
    checkpoint.copy_model(tmp_path / "best_by_gold", tmp_path / "round-1" / "model")
    folders = {"best_by_gold_adapter": "best_by_gold", "adapter": "model", "round-1/adapter": "best_by_gold"}
    for folder, name in folders.items():
        saved = learner(lora_r=4, resume_from=tmp_path / folder)
        found = {key: weight for key, weight in weights_of(saved).items() if "lora_" in key}
        assert same(found, adapters[name])
    assert not same(adapters["model"], adapters["best_by_gold"])

    checkpoint.copy_model(tmp_path / "model", tmp_path / "best_by_gold")  # over the older one
    copied = load_file(tmp_path / "best_by_gold_adapter" / "adapter_model.safetensors")
    assert same(copied, load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_a_copied_model_shares_its_weights_where_the_disk_can(tmp_path):
    """What somebody may edit is copied; so are the weights onto another disk."""
    source = tmp_path / "round-1" / "model"
    source.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    checkpoint.copy_model(source, tmp_path / "model")
    assert os.path.samefile(source / "model.safetensors", tmp_path / "model" / "model.safetensors")
    assert not os.path.samefile(source / "config.json", tmp_path / "model" / "config.json")

    with tempfile.TemporaryDirectory(dir="/dev/shm") as other_disk:
        copied = Path(other_disk) / "model"
        checkpoint.copy_model(source, copied)
        assert not os.path.samefile(source / "model.safetensors", copied / "model.safetensors")
        assert load_file(copied / "model.safetensors")["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("keep", "first_step", "steps", "to_come"),
    [
        (2, 0, 10**12, 3),
        (10**9, 0, 10**12, 10**9 + 1),
        (10**9, 0, 45, 3),  # after 20, 40 and 45 steps
        (0, 0, 2 * 10**10, 10**9),  # 0 keeps all
        (0, 10**10, 2 * 10**10, 5 * 10**8),
    ],
)
def test_a_disk_too_small_for_the_checkpoints_is_warned_of(
    tmp_path, capsys, keep, first_step, steps, to_come
):
    args = SimpleNamespace(keep_checkpoints=keep, save_steps=20)
    checkpoint.warn_of_full_disk(tmp_path, {"model": learner(lora_r=4)}, args, first_step, steps)
    warned = f"will run out of disk: {to_come} checkpoints" in capsys.readouterr().out
    assert warned == (to_come > 3)


# --- moments in 8 bit


def eight_bit_learner(path: str, accelerator, optim: str = "adamw_8bit") -> Learner:
    model = policy.Policy(policy.load_policy(path, 0, False), 1.0)
    return policy.prepare_trained(accelerator, model, 1e-3, 0.01, optim=optim)


def test_moments_in_8_bit_come_back(accelerator, tokenizer, tmp_path):
    """They learn about what AdamW learns; embeddings have whole moments; all take the bytes that are planned."""
    run = run_folder(tmp_path / "run")
    first = eight_bit_learner(BASE, accelerator)
    adamw = eight_bit_learner(BASE, accelerator, "adamw")
    start = weights_of(first)
    for one in (first, adamw):
        train(one, 3)
    folder = checkpoint.save_checkpoint(run, 3, {"model": first}, tokenizer, ARGS, accelerator)
    up = "model.model.layers.0.mlp.up_proj.weight"
    moved = weights_of(adamw)[up] - start[up]
    assert (weights_of(first)[up] - weights_of(adamw)[up]).norm() < 0.1 * moved.norm()

    second = eight_bit_learner(str(folder), accelerator)
    checkpoint.load_optimizers(folder, {"model": second})
    for one in (first, second):
        train(one, 3)
    assert same(weights_of(second), weights_of(first))

    dtypes = {}
    held = 0
    for name, weight in first.model.named_parameters():
        state = first.optimizer.state[weight]
        dtypes[name] = state["state1"].dtype
        held += weight.nbytes + weight.numel() * 4  # the gradient
        held += sum(state[key].nbytes for key in ("state1", "state2", "absmax1", "absmax2") if key in state)
    assert dtypes[up] == torch.uint8 and dtypes["model.model.embed_tokens.weight"] == torch.float32
    planned = plan.trained_gib(BASE, train_grpo.Args(optim="adamw_8bit")) * plan.GIB
    assert held == pytest.approx(planned, rel=0.02)
