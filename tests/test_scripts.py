"""The real scripts by subprocess on the toy world: what they write, bad input, kill and resume, two processes, real prompts."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith("VLLM_")},
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),
}
GRPO = [
    "train_grpo.py",
    "--preset",
    "toy",
    "--no-think",
    "--model",
    "data/toy/base",
    "--prompts-per-step",
    "4",
    "--group-size",
    "4",
    "--micro-batch-size",
    "8",
    "--max-completion-tokens",
    "16",
    "--steps",
    "4",
    "--save-steps",
    "1",
    "--on-bad-format",
    "score",
    "--allow-truncation",
]
PPO = [
    "train_ppo.py",
    "--preset",
    "toy",
    "--no-think",
    "--model",
    "data/toy/base",
    "--prompts-per-step",
    "8",
    "--micro-batch-size",
    "4",
    "--max-completion-tokens",
    "16",
    "--steps",
    "4",
    "--save-steps",
    "1",
    "--on-bad-format",
    "score",
    "--allow-truncation",
]
PPO_KL = [*PPO, "--kl", "reward"]
DPO = [
    "train_dpo.py",
    "--preset",
    "toy",
    "--prompts-per-round",
    "8",
    "--samples-per-prompt",
    "4",
    "--rollout-batch-size",
    "8",
    "--batch-size",
    "4",
    "--epochs",
    "2",
    "--save-steps",
    "1",
]


def command(*args) -> list[str]:
    return [sys.executable, *map(str, args)]


def run(*args, ok: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(command(*args), cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600)
    assert not ok or done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(folder: Path) -> list[dict]:
    """The metrics of a run without its clocks."""
    return [
        {k: v for k, v in r.items() if "time" not in k and "second" not in k and "per_second" not in k}
        for r in jsonl(folder / "metrics.jsonl")
        if "train_runtime" not in r
    ]


def same_weights(a: Path, b: Path) -> bool:
    x, y = load_file(a / "model" / "model.safetensors"), load_file(b / "model" / "model.safetensors")
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of this test run see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(out: Path, *args) -> Path:
    """Runs a script with --out, unless another worker has."""
    with FileLock(f"{out}.lock"):
        if not out.exists():
            run(*args, "--out", out)
    return out


def whole(shared: Path, *args) -> Path:
    """The unbroken run of this command; tests that ask for the same one share it and leave it as it is."""
    return once(shared / f"whole-{hashlib.sha1(' '.join(map(str, args)).encode()).hexdigest()[:8]}", *args)


@pytest.fixture(scope="session")
def toy_data(shared) -> Path:
    return once(
        shared / "toy",
        "data/toy/world.py",
        "--n-traces",
        96,
        "--n-prompts",
        64,
        "--n-pairs",
        128,
        "--n-tasks",
        24,
        "--n-held-out",
        6,
    )


@pytest.fixture(scope="session")
def sft(toy_data, shared) -> Path:
    """A short thinking warm start from the shipped base model."""
    traces = toy_data / "sft_traces.jsonl"
    return once(
        shared / "sft", "train_sft_warmstart.py", "--preset", "toy", "--traces", traces, "--epochs", 14
    )


# --- each stage writes what it says


def test_sft_writes_a_servable_folder(sft):
    assert {
        "config.json",
        "command.txt",
        "env.txt",
        "metrics.jsonl",
        "dropped.jsonl",
        "summary.json",
        "model",
    } <= set(os.listdir(sft))
    config, summary = (
        json.loads((sft / "config.json").read_text()),
        json.loads((sft / "summary.json").read_text()),
    )
    assert (
        config["args"]["epochs"] == 14
        and config["processes"] == 1
        and summary["n_rows"] == 96
        and summary["steps"] == 84
    )
    losses = [r["loss"] for r in jsonl(sft / "metrics.jsonl") if "loss" in r]
    assert len(losses) == 84 and losses[-1] < 0.5 * losses[0]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(sft / "model")
    AutoModelForCausalLM.from_pretrained(sft / "model")
    assert (
        tokenizer.chat_template
        and tokenizer.eos_token == "<|im_end|>"
        and tokenizer.pad_token != tokenizer.eos_token
    )
    own = AutoTokenizer.from_pretrained("data/toy/base").eos_token_id  # what the base model had for an end
    assert GenerationConfig.from_pretrained(sft / "model").eos_token_id == [own, tokenizer.eos_token_id]
    assert json.loads((sft / "model" / "think_format.json").read_text()) == {"think_format": "think"}


def test_grpo_and_evaluation_follow(sft, toy_data, here, tmp_path):
    out = tmp_path / "grpo"
    run(
        "train_grpo.py",
        "--preset",
        "toy",
        "--model",
        sft / "model",
        "--prompts",
        toy_data / "rl_prompts.jsonl",
        "--steps",
        2,
        "--prompts-per-step",
        4,
        "--out",
        out,
    )
    rows = jsonl(out / "completions.jsonl")
    assert len(rows) == 2 * 4 * 8 and {r["step"] for r in rows} == {1, 2}
    assert {
        "id",
        "messages",
        "text",
        "thinking",
        "response",
        "status",
        "rewards",
        "reward",
        "advantage",
        "n_tokens",
        "n_thinking_tokens",
    } <= set(rows[0])
    assert any(r["status"] == "ok" and r["rewards"]["gold"] > 0 for r in rows)
    logged = [r for r in jsonl(out / "metrics.jsonl") if "reward" in r]
    for key in (
        "reward",
        "reward/gold",
        "kl",
        "think/format_ok",
        "think/truncated",
        "think/mean_tokens",
        "entropy",
        "grad_norm",
    ):
        assert all(r[key] == r[key] for r in logged), key
    done = here(
        "eval_wildbench.py",
        "--model",
        out / "model",
        "--tasks",
        toy_data / "benchmark_tasks.jsonl",
        "--max-tokens",
        128,
        "--temperatures",
        1.0,
        0.0,
        "--reward-model",
        "data/toy/reward_model",
        "--out",
        tmp_path / "eval",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())["temperatures"]
    for temperature in ("1.0", "0.0"):
        part = summary[temperature]
        assert (
            part["n"] == 24
            and part["n_invalid"] == 0
            and part["interval"][0] <= part["score"] <= part["interval"][1]
        )
    rows = jsonl(tmp_path / "eval" / "generations.jsonl")
    assert len(rows) == 48 and all("<think>" not in r["response"] for r in rows if r["status"] == "ok"), (
        done.stdout
    )


def test_reward_model_learns_and_is_read_back(toy_data, tmp_path):
    run(
        "train_reward.py",
        "--preset",
        "toy",
        "--pairs",
        toy_data / "preference_pairs.jsonl",
        "--held-out",
        0.2,
        "--out",
        tmp_path / "rm",
    )
    summary = json.loads((tmp_path / "rm" / "summary.json").read_text())
    held = summary["held_out"]
    assert (
        held["n"] == int(0.2 * (128 - summary["dropped"]))
        and summary["n_pairs"] + held["n"] + summary["dropped"] == 128
    )
    assert (
        0 <= held["accuracy"] <= 1
        and 0 <= held["ece"] <= 0.5
        and sum(b["n"] for b in held["bins"]) == held["n"]
    )


def test_sft_packing(toy_data, tmp_path):
    run(
        "train_sft_warmstart.py",
        "--preset",
        "toy",
        "--traces",
        toy_data / "sft_traces.jsonl",
        "--epochs",
        1,
        "--packing",
        "--max-length",
        256,
        "--batch-size",
        4,
        "--micro-batch-size",
        4,
        "--out",
        tmp_path / "x",
    )
    assert (tmp_path / "x" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("quantised", [False, True])
def test_sft_lora_is_merged_into_the_weights_it_started_from(toy_data, tmp_path, quantised):
    run(
        "train_sft_warmstart.py",
        "--preset",
        "toy",
        "--traces",
        toy_data / "sft_traces.jsonl",
        "--epochs",
        3,
        "--lora-r",
        4,
        "--learning-rate",
        1e-2,
        *["--load-in-4bit"] * quantised,
        "--out",
        tmp_path / "x",
    )
    losses = [r["loss"] for r in jsonl(tmp_path / "x" / "metrics.jsonl") if "loss" in r]
    assert losses[-1] < 0.7 * losses[0]
    merged, start = (
        load_file(f / "model.safetensors") for f in (tmp_path / "x" / "model", ROOT / "data/toy/base")
    )
    name = "model.layers.0.mlp.up_proj"
    adapter = load_file(tmp_path / "x" / "adapter" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"].float() for x in "AB")
    assert torch.allclose(merged[f"{name}.weight"], start[f"{name}.weight"] + 2 * b @ a, atol=1e-5)
    assert merged.keys() == start.keys()


def test_grpo_lora_with_vllm(sft, toy_data, tmp_path):
    """The adapter is merged into the sampler at every step: the canary would stop the run otherwise."""
    run(
        "train_grpo.py",
        "--preset",
        "toy",
        "--model",
        sft / "model",
        "--prompts",
        toy_data / "rl_prompts.jsonl",
        "--steps",
        3,
        "--prompts-per-step",
        4,
        "--lora-r",
        4,
        "--learning-rate",
        1e-2,
        "--rollout",
        "vllm",
        "--out",
        tmp_path / "x",
    )
    gaps = [r["sampling/logprob_gap"] for r in jsonl(tmp_path / "x" / "metrics.jsonl") if "reward" in r]
    assert len(gaps) == 3 and max(gaps) < 1e-4


def test_ppo_writes_what_it_says(toy_data, shared):
    out = whole(shared, *PPO_KL, "--prompts", toy_data / "rl_prompts.jsonl")
    rows, logged = jsonl(out / "completions.jsonl"), numbers(out)
    assert len(rows) == 32 and len({r["id"] for r in rows if r["step"] == 1}) == 8  # one completion a prompt
    for key in (
        "value/explained_variance",
        "value/loss",
        "value/clip_fraction",
        "value/mean",
        "value/grad_norm",
        "approximate_kl",
        "entropy",
        "kl",
        "reward/gold",
        "grad_norm",
    ):
        assert all(r[key] == r[key] for r in logged) and len(logged) == 4, key
    assert logged[0]["kl"] == 0 and logged[-1]["kl"] != 0
    assert {"model.safetensors", "think_format.json", "chat_template.jinja"} <= set(os.listdir(out / "model"))


def test_ppo_lora_with_vllm(toy_data, tmp_path):
    done = run(
        *PPO,
        "--prompts",
        toy_data / "rl_prompts.jsonl",
        "--lora-r",
        4,
        "--learning-rate",
        1e-2,
        "--rollout",
        "vllm",
        "--gradient-checkpointing",
        "--out",
        tmp_path / "x",
    )
    assert max(r["sampling/logprob_gap"] for r in numbers(tmp_path / "x")) < 1e-4
    assert "reference" not in re.search("GiB a process.*", done.stdout)[0]
    assert (tmp_path / "x" / "adapter").exists() and (tmp_path / "x" / "model" / "model.safetensors").exists()


def test_vllm_stops_at_the_end_of_turn_that_was_trained(sft, toy_data, tmp_path):
    """The tokenizer in the folder names another end, as base models' do; both samplers must stop at the template's."""
    shutil.copytree(sft / "model", tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": "<|endoftext|>"}))
    for backend in ("hf", "vllm"):
        run(
            "train_grpo.py",
            "--preset",
            "toy",
            "--model",
            tmp_path / "model",
            "--prompts",
            toy_data / "rl_prompts.jsonl",
            "--steps",
            1,
            "--prompts-per-step",
            4,
            "--rollout",
            backend,
            "--out",
            tmp_path / backend,
        )
        rows = jsonl(tmp_path / backend / "completions.jsonl")
        assert sum(r["cut_off"] for r in rows) < 8 and not any("<|im_end|>" in r["text"] for r in rows)


# --- bad input


BAD = [
    (["train_grpo.py", "--preset", "nonsense"], "unknown preset 'nonsense'"),
    (["train_grpo.py", "--no-such-flag"], "no-such-flag"),
    ([*GRPO, "--group-size", "1"], "--group-size 1"),
    ([*GRPO, "--micro-batch-size", "7"], "cannot be split"),
    ([*GRPO, "--model", "data"], "no model folder with a tokenizer"),
    ([*GRPO, "--prompts", "nowhere.jsonl"], "no such file"),
    ([*GRPO, "--reward-model", "data"], "data is no model folder"),
    ([*GRPO, "--reward-model", "data/toy/base"], "has no chat template; pass --reward-chat-template"),
    (
        ["train_sft_warmstart.py", "--preset", "toy", "--model", "data/toy/base", "--batch-size", "10"],
        "not a multiple",
    ),
    ([*PPO, "--critic", "nowhere"], "nowhere is no model folder"),
    ([*PPO, "--steps", "0"], "--steps 0: use 1 or more"),
    ([*GRPO, "--micro-batch-size", "0"], "--micro-batch-size 0: use 1 or more"),
    ([*GRPO, "--max-completion-tokens", "500"], "628 tokens are more than the 512"),
    ([*GRPO, "--gold", "nowhere.py:f"], "not file.py:function"),
    ([*GRPO, "--gold", "nowhere"], "nowhere is no model folder"),
    ([*GRPO, "--vllm-server-url", "http://localhost:1"], "needs --rollout vllm"),
    ([*GRPO, "--pass-at-k", 16], "--pass-at-k 16 must be from 1 to --group-size"),
    ([*GRPO, "--async-rollouts"], "--async-rollouts needs --rollout vllm"),
    ([*GRPO, "--async-rollouts", "--rollout", "vllm"], "correct for it: --importance-correction"),
    ([*GRPO, "--stall-minutes", "0"], "use more than 0"),
    ([*PPO, "--prompts-per-step", "9"], "cannot be split"),
]


def with_prompts(args: list, toy_data: Path) -> list:
    prompts = "--prompts" not in args and args[0] != "train_sft_warmstart.py" and len(args) > 4
    return [*args, "--prompts", toy_data / "rl_prompts.jsonl"] if prompts else args


@pytest.mark.parametrize("args, message", BAD)
def test_bad_input_is_one_clear_error(args, message, toy_data, here):
    done = here(*with_prompts(args, toy_data))
    assert done.returncode == 2, done.stderr[-2000:]
    assert message in done.stderr + done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args, message",
    [
        next(case for case in BAD if case[0][0] == name)
        for name in ("train_grpo.py", "train_sft_warmstart.py", "train_ppo.py")
    ],
)
def test_bad_input_to_a_process_is_one_clear_error(args, message, toy_data):
    done = run(*with_prompts(args, toy_data), ok=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert message in done.stderr + done.stdout and "Traceback" not in done.stderr


def test_bad_rows_name_their_line(toy_data, here, tmp_path):
    lines = (toy_data / "rl_prompts.jsonl").read_text().splitlines()
    (tmp_path / "p.jsonl").write_text("\n".join([lines[0], '{"id": "x", "question": "?"}']))
    done = here(*GRPO, "--prompts", tmp_path / "p.jsonl")
    assert done.returncode == 2 and "p.jsonl:2: no field 'messages'" in done.stderr
    (tmp_path / "t.jsonl").write_text(
        '{"id": "x", "messages": [{"role": "user", "content": "a"}], "thinking": "b"}\n'
    )
    done = here("train_sft_warmstart.py", "--preset", "toy", "--traces", tmp_path / "t.jsonl")
    assert done.returncode == 2 and "t.jsonl:1: no field 'response'" in done.stderr


def test_a_prompt_must_end_with_the_user(toy_data, here, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "x", "messages": turns}) + "\n")
    done = here(*GRPO, "--prompts", tmp_path / "p.jsonl")
    assert done.returncode == 2 and "p.jsonl:1: 'messages' must end with the user's turn" in done.stderr


def test_traces_that_would_lose_their_end_are_refused(toy_data, here):
    done = here(
        "train_sft_warmstart.py",
        "--preset",
        "toy",
        "--traces",
        toy_data / "sft_traces.jsonl",
        "--max-length",
        100,
    )
    assert done.returncode == 2 and "would lose their end" in done.stderr


def test_a_folder_that_exists_is_not_touched(sft, toy_data, here):
    before = (sft / "metrics.jsonl").read_text()
    done = here(
        "train_sft_warmstart.py", "--preset", "toy", "--traces", toy_data / "sft_traces.jsonl", "--out", sft
    )
    assert (
        done.returncode == 2
        and "--resume continues it" in done.stderr
        and (sft / "metrics.jsonl").read_text() == before
    )


def test_think_format_of_the_checkpoint_is_respected(sft, toy_data, here):
    done = here(
        "train_grpo.py",
        "--preset",
        "toy",
        "--no-think",
        "--model",
        sft / "model",
        "--prompts",
        toy_data / "rl_prompts.jsonl",
    )
    assert done.returncode == 2 and "trained to the format 'think'" in done.stderr


# --- kill and resume


def list_of_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def start_and_kill(args: list, out: Path, reached) -> None:
    """Starts a run and kills it (SIGKILL) as soon as `reached()`."""
    process = subprocess.Popen(
        command(*args, "--out", out), cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not reached():
        time.sleep(0.02)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()


def kill_and_resume(args: list, out: Path, after_step: int) -> None:
    """Kills a run when it has logged `after_step`, and lets the same command with --resume finish it."""
    start_and_kill(
        args,
        out,
        lambda: any(f'"step": {after_step},' in line for line in list_of_lines(out / "metrics.jsonl")),
    )
    run(*args, "--out", out, "--resume")


ASYNC = ["--async-rollouts", "--importance-correction", "token_truncate"]


@pytest.mark.parametrize(
    "script, backend, after_step",
    [(GRPO, "hf", 1), (GRPO, "hf", 3), (GRPO, "vllm", 2), (PPO_KL, "hf", 2), ([*GRPO, *ASYNC], "vllm", 2)],
)
def test_rl_killed_and_resumed_ends_with_the_same_bits(
    toy_data, shared, tmp_path, script, backend, after_step
):
    """PPO's metrics from step 3 on depend on the critic and its optimizer, which come from the checkpoint. Held-out prompts
    are measured at every checkpoint, which changes nothing else: with transformers the whole run has none."""
    args = [*script, "--prompts", toy_data / "rl_prompts.jsonl", *["--rollout", "vllm"] * (backend == "vllm")]
    held_out = ["--gold-prompts", toy_data / "held_out_prompts.jsonl"]
    unbroken, killed = whole(shared, *args, *held_out * (backend == "vllm")), tmp_path / "killed"
    kill_and_resume([*args, *held_out], killed, after_step)
    measured = jsonl(killed / "held_out.jsonl")
    assert [r["step"] for r in measured] == [1, 2, 3, 4] and all(
        r["n"] == 6 and 0 <= r["gold"] <= 1 for r in measured
    )
    assert backend == "hf" or measured == jsonl(unbroken / "held_out.jsonl")
    assert (killed / "best_by_gold" / "think_format.json").exists()
    assert same_weights(unbroken, killed) and numbers(unbroken) == numbers(killed)
    assert jsonl(unbroken / "completions.jsonl") == jsonl(killed / "completions.jsonl")


def test_sft_killed_and_resumed_ends_with_the_same_bits(toy_data, tmp_path):
    args = [
        "train_sft_warmstart.py",
        "--preset",
        "toy",
        "--traces",
        toy_data / "sft_traces.jsonl",
        "--epochs",
        2,
        "--save-steps",
        3,
    ]
    run(*args, "--out", tmp_path / "whole")
    kill_and_resume(args, tmp_path / "killed", 7)
    assert same_weights(tmp_path / "whole", tmp_path / "killed") and numbers(tmp_path / "whole") == numbers(
        tmp_path / "killed"
    )


# --- two processes


def launch(n: int, *args) -> None:
    """A script under n processes; two of them by the README's launch config."""
    start = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate/2cpu.yaml",
        "--main_process_port",
        0,
    ]
    run(*(start if n == 2 else []), *args)


def test_sft_under_two_processes_is_one(toy_data, tmp_path):
    for n in (1, 2):
        launch(
            n,
            "train_sft_warmstart.py",
            "--preset",
            "toy",
            "--traces",
            toy_data / "sft_traces.jsonl",
            "--epochs",
            1,
            "--micro-batch-size",
            8,
            "--out",
            tmp_path / str(n),
        )
    one, two = numbers(tmp_path / "1"), numbers(tmp_path / "2")
    assert (
        json.loads((tmp_path / "2" / "config.json").read_text())["processes"] == 2
        and len(one) == len(two) == 6
    )
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], rel=1e-5)
    x, y = (load_file(tmp_path / n / "model" / "model.safetensors") for n in "12")
    assert all(torch.allclose(x[k], y[k], atol=1e-5) for k in x)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dense"])
def test_rl_under_two_processes_is_one(toy_data, here, tmp_path, algorithm):
    """Same sampling noise for the same completion (see rl_worker.py), so rewards, KL, loss and weights must agree."""
    here("tests/rl_worker.py", algorithm, toy_data / "rl_prompts.jsonl", tmp_path / "1")
    launch(2, "tests/rl_worker.py", algorithm, toy_data / "rl_prompts.jsonl", tmp_path / "2")
    one, two = numbers(tmp_path / "1"), numbers(tmp_path / "2")
    keys = [
        "reward",
        "reward_std",
        "kl",
        "loss",
        "completions/mean_length",
        "think/format_ok",
        "entropy",
        "grad_norm",
    ]
    if algorithm == "ppo":
        keys += ["value/loss", "value/grad_norm", "value/mean", "value/explained_variance"]
    if algorithm == "dense":
        keys += ["reward/process", "reward/prime", "prime/loss", "prime/accuracy"]
    assert len(one) == len(two) == 3
    for a, b in zip(one, two):
        for key in keys:  # TRL logs these two as means of micro-batch means, and the micro-batches differ
            rel = 2e-2 if key in ("kl", "entropy") else 2e-3
            assert a[key] == pytest.approx(b[key], rel=rel, abs=1e-5), key
    texts = [
        sorted((r["step"], r["id"], r["text"]) for r in jsonl(tmp_path / n / "completions.jsonl"))
        for n in "12"
    ]
    assert texts[0] == texts[1]


def fsdp(*args, precision="no", **kwargs) -> subprocess.CompletedProcess:
    """A script under two CPU processes that shard the models by FSDP2, by the launch config of the eight GPUs."""
    return run(
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate/8gpu_fsdp2.yaml",
        "--num_processes",
        2,
        "--mixed_precision",
        precision,
        "--main_process_port",
        0,
        "tests/fsdp_on_cpu.py",
        *args,
        **kwargs,
    )


def test_fsdp2_is_ddp(toy_data, tmp_path):
    """PPO has every kind of model: policy and critic sharded and trained, reference sharded, reward model whole. A reference
    or reward model without its weights on the second rank would show in kl and reward at step 1. Then a resumed run."""
    args = [*PPO, "--prompts", toy_data / "rl_prompts.jsonl", "--critic", "policy", "--steps", 3]
    launch(2, *args, "--out", tmp_path / "ddp")
    fsdp(*args, "--out", tmp_path / "fsdp")
    whole = numbers(tmp_path / "fsdp")
    keys = [
        "reward",
        "kl",
        "entropy",
        "grad_norm",
        "value/loss",
        "value/explained_variance",
        "value/grad_norm",
    ]
    for a, b in zip(numbers(tmp_path / "ddp"), whole, strict=True):
        assert [a[k] for k in keys] == pytest.approx([b[k] for k in keys], rel=1e-3, abs=1e-5)
    assert whole[0]["kl"] == pytest.approx(0, abs=1e-6)
    shutil.rmtree(tmp_path / "fsdp" / "checkpoint-3")
    fsdp(*args, "--out", tmp_path / "fsdp", "--resume")
    assert numbers(tmp_path / "fsdp") == whole
    x, y = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("ddp", "fsdp"))
    assert all(torch.allclose(x[k], y[k], atol=1e-4) for k in x)  # the tied head stands in y twice


def test_fsdp2_computes_in_bfloat16_and_sums_in_float32():
    """As the launch config has it, log-probabilities and sums of gradients would be of 8 bits. And vLLM gets all weights, also
    after a forward that leaves some of them gathered."""
    out = fsdp("tests/precision_worker.py", precision="bf16").stdout
    assert json.loads(out[out.index("{") :].splitlines()[0]) == {
        "forward": "torch.bfloat16",
        "log_probs": "torch.float32",
        "sums": "torch.float32",
        "gradient": "DTensor",
        "gathered": True,
        "read": True,
        "read with LoRA": True,
    }


def test_one_process_sees_one_gpu(monkeypatch):
    """TRL refuses a process that sees several; under accelerate each one has its own by its rank."""
    monkeypatch.setattr(sys, "argv", ["train_grpo.py"])
    env = {k: v for k, v in ENV.items() if k not in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")}
    seen = []
    for more in ({}, {"LOCAL_RANK": "1"}, {"CUDA_VISIBLE_DEVICES": "3"}):
        monkeypatch.setattr(os, "environ", env | more)
        anew = importlib.util.spec_from_file_location(
            "anew", ROOT / "runs.py"
        )  # beside the module that is there
        anew.loader.exec_module(importlib.util.module_from_spec(anew))
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert seen == ["0", None, "3"]


def test_loading_that_leaves_ranks_without_weights_is_refused(toy_data, here, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    done = here(*PPO, "--prompts", toy_data / "rl_prompts.jsonl")
    assert done.returncode == 2 and "set it to false in the launch config" in done.stderr


def test_grpo_script_runs_under_two_processes_with_vllm(toy_data, tmp_path):
    """With completions whose lengths differ between the processes, which then must split them into equal numbers."""
    launch(
        2,
        *GRPO,
        "--micro-batch-size",
        2,
        "--max-completion-tokens",
        100,
        "--temperature",
        1.3,
        "--rollout",
        "vllm",
        "--prompts",
        toy_data / "rl_prompts.jsonl",
        "--out",
        tmp_path / "x",
    )
    rows = jsonl(tmp_path / "x" / "completions.jsonl")
    assert len(rows) == 4 * 16 and len({r["n_tokens"] for r in rows}) > 10
    assert max(r["sampling/logprob_gap"] for r in numbers(tmp_path / "x")) < 1e-4


# --- the real prompts


def test_grpo_on_real_prompts_with_vllm(tmp_path):
    source = ROOT.parent / "shared" / "data" / "wildchat_if" / "wildchat-if_train.parquet"
    if not source.exists():
        pytest.skip(f"the real WildChat-IF prompts are not at {source}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    import pandas as pd

    import utils

    texts = [m["content"] for p in pd.read_parquet(source)["prompt"][:1500] for m in p]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=2000,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        num_labels=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    for name, cls in [("policy", LlamaForCausalLM), ("rm", LlamaForSequenceClassification)]:
        cls(config).save_pretrained(tmp_path / name)
        if name == "rm":
            tokenizer.chat_template = utils.CHAT_TEMPLATES["chatml"]
        tokenizer.save_pretrained(tmp_path / name)
    run(
        "train_grpo.py",
        "--model",
        tmp_path / "policy",
        "--reward-model",
        tmp_path / "rm",
        "--prompts",
        source,
        "--rollout",
        "vllm",
        "--steps",
        3,
        "--prompts-per-step",
        4,
        "--group-size",
        4,
        "--micro-batch-size",
        8,
        "--max-prompt-tokens",
        512,
        "--max-completion-tokens",
        24,
        "--on-bad-format",
        "score",
        "--allow-truncation",
        "--learning-rate",
        1e-2,
        "--out",
        tmp_path / "run",
    )
    rows, dropped = jsonl(tmp_path / "run" / "completions.jsonl"), jsonl(tmp_path / "run" / "dropped.jsonl")
    assert len(rows) == 48 and all(isinstance(r["reward"], float) for r in rows)
    assert dropped and all(d["tokens"] > 512 for d in dropped)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["prompts"] + summary["dropped"] == 7544
    assert max(r["sampling/logprob_gap"] for r in numbers(tmp_path / "run")) < 1e-4
