"""Runs of all six training scripts on the toy world, on one process and on two: what they write, that a killed run
which is resumed ends with the same bits, and that two processes learn what one learns."""

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from launch import DDP, FSDP2, finished, started, started_ranks
from script_runs import (
    BASE,
    REWARD_MODEL,
    ROOT,
    check_same_bits,
    killed_after,
    metrics_of,
    run_here,
    run_vllm_here,
    wait_for_lines,
    weights_of,
    write_prompts,
)

import eval_sentient
from data.toy import world
from rlmt.reward_model import RewardModel
from rlmt.checkpoint import latest, step_of
from rlmt.data import read_log, write_jsonl
from rlmt.run import rows_of_step
from rlver import toy_users

SFT = "train_sft_warmstart.py --traces {data}/traces.jsonl --batch-size 6 --micro-batch-tokens 500 --save-steps 1"
REWARD = "train_reward.py --pairs {data}/pairs.jsonl --batch-size 8 --micro-batch-tokens 800 --save-steps 1"
BITS = "--load-in-4bit --dtype bfloat16"
# the base model has no format, so its text is scored as it is
GRPO = (
    "train_grpo.py --prompts {data}/prompts.jsonl --prompts-per-step 4 --group-size 4 --max-completion-tokens 12 "
    "--on-bad-format score --gold-prompts {data}/one_prompt.jsonl"
)
PPO = (
    "train_ppo.py --prompts {data}/prompts.jsonl --prompts-per-step 8 --think-format plain --steps 2 "
    "--max-completion-tokens 24 --save-steps 1"
)
# the base model ends some replies with <|endoftext|>; others are cut off. So conversations differ in length
RLVER = (
    "train_rlver.py --profiles {data}/users.jsonl --prompts-per-step 4 --think-format plain --steps 2 "
    "--max-turn-tokens 24 --micro-batch-tokens 600 --save-steps 1"
)
# it answers without thinking, and about half of its answers end in time: some 4 pairs a round, two steps an epoch
DPO = (
    "train_dpo.py --prompts {data}/prompts.jsonl --prompts-per-round 8 --samples-per-prompt 5 --think-format plain "
    "--max-completion-tokens 64 --rollout-batch-size 8 --batch-size 2 --epochs 2 --save-steps 1"
)
RUNS = {  # launcher, script and flags
    "sft": ([], SFT),
    "sft-two": (DDP, SFT),
    "reward": ([], REWARD),
    "reward-two": (FSDP2, REWARD),
    "bits": ([], f"{REWARD} {BITS} --pairs {{data}}/few_pairs.jsonl --lora-r 64 --optim adamw_8bit"),
    "grpo": (
        [],
        f"{GRPO} --lora-r 4 --learning-rate 1e-2 --steps 2 --save-steps 1 "
        "--rewards preference:1 math:0 prime:0.5",
    ),
    "grpo-two": (FSDP2, f"{GRPO} --save-steps 3"),
    "ppo": ([], PPO),
    "ppo-two": (DDP, f"{PPO} {BITS} --lora-r 4 --critic policy --max-completion-tokens 8"),  # 4 bits are slow
    "rlver": ([], f"{RLVER} --rollout vllm --algorithm ppo --turn-weight 1 --warmup-steps 2"),
    "rlver-two": (FSDP2, f"{RLVER} --group-size 2 --turns 2"),
    "dpo": ([], f"{DPO} --gold-prompts {{data}}/held_out.jsonl"),
    "dpo-two": (FSDP2, f"{DPO} --rounds 1 --lora-r 4 --gold-prompts="),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with rows for all scripts. Two traces of each epoch are left out."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "traces.jsonl", world.trace_rows(14, 0, 1.0))
    write_jsonl(folder / "pairs.jsonl", world.pair_rows(40, 0))
    write_jsonl(folder / "few_pairs.jsonl", world.pair_rows(20, 0))
    write_jsonl(folder / "held_out.jsonl", world.pair_rows(4, 0))
    write_jsonl(folder / "users.jsonl", toy_users.profiles(10, 0, "train"))
    prompts = read_log(write_prompts(folder / "prompts.jsonl", 21, answer="5"))
    write_jsonl(folder / "prompts.jsonl", prompts[:20])
    write_jsonl(folder / "one_prompt.jsonl", prompts[20:])
    return folder


def command(name: str, data: Path, out: Path, *more: str) -> list[str]:
    launcher, flags = RUNS[name]
    words = f"{flags} --preset toy --model {BASE} --out {out}".format(data=data).split()
    return [sys.executable, *launcher, *words, *more]


def execute(name: str, data: Path, out: Path, *more: str) -> str:
    """Executes a run to its end; returns what it prints."""
    words = command(name, data, out, *more)
    if RUNS[name][0]:
        return finished(words)
    # vLLM writes to the number of a file
    with tempfile.TemporaryFile("w+") as said, contextlib.redirect_stdout(said):
        if "vllm" in words:
            run_vllm_here(words)
        else:
            run_here(words)
        said.seek(0)
        return said.read()


@pytest.fixture(scope="module")
def whole(data):
    """whole(name): the folder of a run that nothing disturbs. It runs when it is first asked for."""

    @functools.cache
    def whole(name: str) -> Path:
        execute(name, data, data / name)
        return data / name

    return whole


# --- killed and resumed


@pytest.mark.parametrize("name", ["sft", "reward", "bits", "grpo", "ppo", "ppo-two", "rlver", "rlver-two"])
def test_a_killed_run_ends_with_the_same_bits(name, data, whole, tmp_path):
    """Killed after the last step was logged, and before its checkpoint. Of SFT this step is in the second epoch."""
    broken = tmp_path / "broken"
    step = len(metrics_of(whole(name))) - 1
    killed_after(step, whole(name), broken)
    assert f"resumes from {broken}/checkpoint-{step}" in execute(name, data, broken, "--resume")
    check_same_bits(whole(name), broken)


def wait_and_kill(process, log: Path, n_lines: int) -> None:
    """Kills a process (SIGKILL) as soon as a log has so many lines."""
    wait_for_lines(log, n_lines, process.is_alive)
    process.kill()
    process.join()


def test_a_killed_run_of_dpo_ends_with_the_same_bits(data, whole, tmp_path):
    """Killed as round 1 samples, in the second epoch of round 2, which is added to a finished run, and at its
    end."""
    out = tmp_path / "run"
    words = command("dpo", data, out, "--resume")[1:]
    samples = out / "round-1" / "samples-0.jsonl"
    wait_and_kill(started(words, tmp_path / "output"), samples, 9)
    sampled = samples.read_text()
    n_last = len(sampled.splitlines(keepends=True)[-1])
    samples.write_text(sampled[: -n_last // 2])  # the last one is torn
    execute("dpo", data, out, "--resume", "--rounds", "1")
    assert samples.read_text().startswith(sampled[:-n_last])

    steps = out / "round-2" / "metrics.jsonl"
    second_epoch = len(read_log(whole("dpo") / "round-2" / "metrics.jsonl")) // 2 + 1
    wait_and_kill(started(words, tmp_path / "output"), steps, second_epoch)
    execute("dpo", data, out, "--resume")
    shutil.rmtree(out / "model")  # as if killed before the last round's model was copied
    (out / "summary.json").unlink()
    execute("dpo", data, out, "--resume")
    for name in ("", "round-1", "round-2"):
        check_same_bits(whole("dpo") / name, out / name)


def test_two_killed_processes_of_dpo_end_with_the_same_bits(data, whole, tmp_path):
    out = tmp_path / "run"
    ranks = started_ranks(command("dpo-two", data, out), tmp_path / "output")
    wait_and_kill(ranks[1], out / "round-1" / "metrics.jsonl", 2)
    ranks[0].join(120)
    assert ranks[0].exitcode  # it does not wait for the other
    assert f"resumes from {out}/round-1/checkpoint-" in execute("dpo-two", data, out, "--resume")
    for name in ("", "round-1"):
        check_same_bits(whole("dpo-two") / name, out / name)
    texts = [row["text"] for row in read_log(out / "completions.jsonl")]
    assert len(texts) == 40 and len(set(texts)) > 20  # each samples its share


def test_two_processes_of_grpo_lose_nothing_by_signals(data, tmp_path):
    """One is told to stop by Ctrl-C. Later the other is, by SIGTERM, and one is killed before they have stopped."""
    run = tmp_path / "run"
    path = run / "metrics.jsonl"
    output = tmp_path / "output"

    def start_until(step: int) -> list:
        ranks = started_ranks(command("grpo-two", data, run, "--steps", "1000", "--resume"), output)
        wait_for_lines(path, step, lambda: all(rank.is_alive() for rank in ranks))
        return ranks

    def codes_of(ranks: list) -> list[int]:
        for rank in ranks:
            rank.join(120)
        return [rank.exitcode for rank in ranks]

    ranks = start_until(2)
    os.kill(ranks[1].pid, signal.SIGINT)
    assert 143 in codes_of(ranks)  # only the one that leaves first is sure to leave in order
    step = step_of(latest(run))
    assert [row["step"] for row in read_log(path)] == list(range(1, step + 1))  # the last one is saved
    ranks = start_until(step + 2)
    os.kill(ranks[0].pid, signal.SIGTERM)
    while "SIGTERM: the run stops" not in output.read_text():
        assert ranks[0].is_alive()
        time.sleep(0.01)
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert not {None, 0} & {*codes_of(ranks)}  # the other does not wait

    n_steps = str(step_of(latest(run)) + 1)
    for out in (run, tmp_path / "whole"):
        execute("grpo-two", data, out, "--steps", n_steps, "--resume")
    check_same_bits(tmp_path / "whole", run)  # a stop saves, but does not measure
    assert max(row["sampling/logprob_gap"] for row in read_log(path)) < 1e-4


# --- what a run writes


def test_what_is_logged_is_what_committed_runs_have(whole):
    for name, committed in (("reward", "reward-weak-rm"), ("sft", "toy-sft-think-s0")):
        metrics = metrics_of(whole(name))
        before = read_log(ROOT / "results" / "toy" / committed / "metrics.jsonl")[0].keys()
        # ends_turn is newer than that run
        assert metrics[0].keys() - {"ends_turn"} == before - {"seconds", "step_time"}
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]


def test_what_the_reward_model_writes(whole):
    run = whole("reward")
    summary = json.loads((run / "summary.json").read_text())
    held_out = summary["held_out"]
    assert summary["n_pairs"] + held_out["n"] + summary["dropped"] == 40
    assert held_out["equal_length"]["n"] > 0
    assert not (run / "model" / "think_format.json").exists()
    model = RewardModel(str(run / "model"), reward_on="response")
    assert math.isfinite(model.score([[{"role": "user", "content": "Hi"}]], ["You get 1 dish."])[0])
    # of a run with LoRA the head is trained whole, and lies with the adapter
    adapter = weights_of(whole("bits") / "adapter")
    merged = weights_of(whole("bits") / "model")
    [head] = [name for name in adapter if name.endswith("score.weight")]
    assert torch.equal(adapter[head], merged["score.weight"])
    assert merged.keys() == weights_of(run / "model").keys()


def test_what_grpo_measures_and_keeps(whole):
    run = whole("grpo")
    measured = read_log(run / "held_out.jsonl")
    assert [row["step"] for row in measured] == [0, 1, 2] and {row["n"] for row in measured} == {1}
    for file in ("best_by_gold/think_format.json", "adapter/adapter_model.safetensors"):
        assert (run / file).exists()
    for metrics in metrics_of(run):
        assert all(map(math.isfinite, metrics.values()))
    assert max(metrics["sampling/logprob_gap"] for metrics in metrics_of(run)) < 1e-4


def test_what_two_processes_of_ppo_measure(whole):
    first, second = metrics_of(whole("ppo-two"))
    assert first["value/mean"] == 0.0 != second["value/mean"]  # the critic's head begins at zero
    assert all(map(math.isfinite, (first | second).values()))


def test_what_dpo_writes(whole):
    run = whole("dpo")
    completions = read_log(run / "completions.jsonl")
    assert {row["reward"] for row in completions if row["status"] != "ok"} == {None}
    assert len({row["id"] for row in completions}) == 16  # other prompts in each round
    for number, metrics in enumerate(read_log(run / "metrics.jsonl"), start=1):
        steps = read_log(run / f"round-{number}" / "metrics.jsonl")
        assert len(steps) == metrics["steps"] == 2 * math.ceil(metrics["pairs"] / 2) > 2
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the reference is what sampled
        assert steps[-1]["rewards/margins"] > 0
    assert [row["step"] for row in read_log(run / "held_out.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("name, group_size", [("rlver", 1), ("rlver-two", 2)])
def test_what_rlver_writes(name, group_size, whole):
    """The first is PPO and has samples of vLLM, and two processes have conversations of unequal lengths."""
    run = whole(name)
    rows = read_log(run / "completions.jsonl")
    assert max(row["turns"] for row in rows) > 1
    for row in rows:
        assert row["reward"] == row["rewards"]["emotion"] == max(0, row["emotion"] / 100)
    profiles = toy_users.profiles(10, 0, "train")
    chosen = rows_of_step(profiles, 1, 4, 0) + rows_of_step(profiles, 2, 4, 0)
    assert [row["id"] for row in rows[::group_size]] == [profile["id"] for profile in chosen]
    for metrics in metrics_of(run):
        assert all(math.isfinite(value) for value in metrics.values())
        # of the policy's tokens alone: the user's have no log-probability
        assert metrics["sampling/logprob_gap"] < 1e-4
        if name == "rlver":
            assert metrics["sampling/logprob_gap"] > 0 and metrics["value/grad_norm"] > 0
            assert metrics["learning_rate"] == pytest.approx(1.5e-4 * metrics["step"])
    # an evaluation gives the model the context that it was trained in
    args = eval_sentient.Args(model=str(run / "model"))
    eval_sentient.Partner(args)
    assert args.keep_thinking and not args.ask_thinking


# --- two processes learn what one learns; test_two_processes.py has GRPO, PPO and DPO


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_two_processes_learn_what_one_learns(name, whole):
    two = whole(f"{name}-two")
    for expected, found in zip(metrics_of(whole(name)), metrics_of(two), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    expected = weights_of(whole(name) / "model")
    torch.testing.assert_close(weights_of(two / "model"), expected, rtol=0, atol=1e-4)


# --- what ends a run


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(data, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(FloatingPointError, match="step "):
        execute("sft", data, run, "--learning-rate", "4e9")
    for checkpoint in run.glob("checkpoint-*"):
        assert all(weight.isfinite().all() for weight in weights_of(checkpoint).values())
    rows = read_log(run / "not_finite-rank0.jsonl")
    assert len(rows) == 6 and rows[0]["ids"]


def test_what_dpo_cannot_train_on_is_said(data, tmp_path, exits):
    """The base model writes no thinking, so nothing is valid."""
    few = [word.replace("plain", "think") for word in command("dpo-two", data, tmp_path / "run")]
    assert "no prompt gave a pair ({'no_valid': 8})" in exits(
        run_here, [few[0], *few[few.index("train_dpo.py") :]]
    )
    assert "4 are trained on" in exits(execute, "dpo", data, tmp_path, "--pairs", f"{data}/pairs.jsonl")


def test_dpo_begins_no_round_with_a_reward_model_that_changed(data, tmp_path, exits):
    shutil.copytree(ROOT / REWARD_MODEL, tmp_path / "rm")
    change = f"open('{tmp_path}/rm/chat_template.jinja', 'a').write(' ')"
    (tmp_path / "own.py").write_text(f"def gold(messages, response):\n    {change}\n    return 1\n")
    flags = f"--reward-model {tmp_path}/rm --gold {tmp_path}/own.py:gold".split()
    assert "what --reward-model names" in exits(execute, "dpo", data, tmp_path / "run", *flags)
