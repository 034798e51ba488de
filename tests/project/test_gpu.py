"""Tests what one card can show, by real commands in bfloat16: python -m pytest -m gpu -s
tests/project/test_gpu.py

`make gpu-check` runs them, those that a CPU can say least about first; each prints the numbers that it
measured. tests/conftest.py hides the card from all other tests, whose numbers are a CPU's. With
GPU_TESTS_ON_CPU=1 in front of the command these tests run on a CPU, at toy size.
"""

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from dev import bench
from launch import ACCELERATE
from script_runs import BASE, REWARD_MODEL, ROOT, wait_for_lines
from rlmt.reward_model import RewardModel
from rlmt.learner import Policy, collate_ids
from rlmt.sampler import MAX_LOGPROB_GAP, Sampler, Sampling, Transformers
from utils import DEVICE, DTYPE

ON_GPU = DEVICE == "cuda"
SMALL = Path(os.environ.get("SMOLLM2", "data/smollm2"))
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
ANSWERS = [[20, 21, 22], [30, 31, 32, 33, 34], [40]]
VLLM_MEMORY = 0.3  # of the card

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and "GPU_TESTS_ON_CPU" not in os.environ, reason="needs a GPU"),
]
needs_card = pytest.mark.skipif(not ON_GPU, reason="torch counts the memory of a GPU alone")
needs_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="needs vllm")
needs_bits = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")

SIZE = "0.5b" if ON_GPU else "tiny"  # of the bench's random models
PER_STEP = f"--prompts-per-step {16 if ON_GPU else 4}"
PER_ROUND = f"--prompts-per-round {128 if ON_GPU else 16}"
# with a warm-up the first step has the rate 0
SHORT = f"--epochs {0.5 if ON_GPU else 0.02} --warmup-ratio 0"
HF = "--rollout hf"
VLLM = f"--rollout vllm --vllm-memory {VLLM_MEMORY}"
SFT = "train_sft_warmstart.py --preset toy"
# the gold reward costs time and shows nothing here
GRPO = f"train_grpo.py --preset toy --gold= {PER_STEP}"
PPO = f"train_ppo.py --preset toy {PER_STEP}"
DPO = f"train_dpo.py --preset toy --warmup-ratio 0 {PER_ROUND}"


@pytest.fixture
def show(request, capsys):
    """show(name=number, ...) prints what a test has measured."""

    def show(**numbers):
        with capsys.disabled():
            said = ", ".join(f"{name} {number:.4g}" for name, number in numbers.items())
            print(f"\n{request.node.name}: {said}")

    return show


def run(*words) -> str:
    """Runs `python WORDS` in at most eight minutes, and returns what it printed."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480)
    if "GiB are needed of a GPU's" in done.stderr:  # by rlmt/memory.py it does not fit
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def read_log(out: Path) -> pd.DataFrame:
    *_, metrics = sorted(out.rglob("metrics.jsonl"))
    return pd.read_json(metrics, lines=True)


def train(out: Path, command: str) -> pd.DataFrame:
    """Runs a training script and returns its log, whose losses are finite."""
    run(*command.split(), "--dtype", DTYPE, "--out", out)
    log = read_log(out)
    assert np.isfinite(log[["loss", "grad_norm"]]).all(axis=None)
    return log


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """The toy model after SFT; its data is there, too."""
    run("-m", "data.toy.world")
    out = tmp_path_factory.mktemp("warm") / "sft"
    log = train(out, f"{SFT} --epochs {1.0 if ON_GPU else 0.3}")  # enough for the format
    assert log["loss"].iloc[-1] < log["loss"].iloc[0]
    return out / "model"


@pytest.fixture(scope="module")
def grpo(tmp_path_factory) -> bench.Case:
    """Two steps of GRPO with random models."""
    case = bench.Case("grpo", str(tmp_path_factory.mktemp("random")), 2, *bench.SIZES[SIZE])
    case.make()
    return case


# --- what would fail first


@needs_vllm
def test_a_server_on_two_gpus_answers(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from rlmt.vllm import Server, serve

    with serve(BASE, tmp_path / "log", memory=VLLM_MEMORY, tensor_parallel=2) as url:
        (reply,) = Server(BASE, url).complete({0: PROMPTS[0]}, {}, Sampling(0.0, 4), [2])
    assert len(reply[1].ids) == 4 or reply[1].finished


# --- a card's numbers are a CPU's


def logprobs_on(device: str, dtype: str) -> torch.Tensor:
    """Returns the log-probabilities of ANSWERS (3, 5), in float32 or under autocast to bfloat16."""
    model = Policy(AutoModelForCausalLM.from_pretrained(BASE).to(device).eval(), 1.0)
    batch = collate_ids(PROMPTS, ANSWERS, device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        return model(**batch)[0].float().cpu()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("bfloat16", 0.2)])
def test_log_probabilities_are_those_of_a_cpu(dtype, tolerance):
    found = logprobs_on(DEVICE, dtype)
    torch.testing.assert_close(found, logprobs_on("cpu", "float32"), rtol=0, atol=tolerance)


def test_rewards_are_those_of_a_cpu():
    messages = [[{"role": "user", "content": "I have 12 dollars."}]] * 2
    texts = ["<think>\nBudget 12.\n</think>\n\nYou get 1 dish: ham.", "No."]
    scores = []
    for device in (DEVICE, "cpu"):
        model = RewardModel(REWARD_MODEL, device=device, dtype="float32")
        scores.append(model.score(messages, texts))
    assert scores[0] == pytest.approx(scores[1], abs=1e-2)


def test_a_seed_draws_the_same_completions_again(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(BASE).to(DEVICE)
    sampler = Sampler(Transformers(tokenizer, model), tokenizer, Sampling(1.0, 16))
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append({place: sample.ids for place, sample in sampler.sample(PROMPTS)})
    assert drawn[0] == drawn[1]


# --- vLLM in the same process


# The rates are so high that a run fails if its engine keeps its first weights: at the preset's 3e-4 the gap
# would stay below its limit (docs/gpu.md).
@needs_vllm
@pytest.mark.parametrize("flags", ["--learning-rate 5e-3", "--lora-r 8 --learning-rate 5e-2"])
def test_an_engine_gets_the_weights(flags, warm, tmp_path, show):
    log = train(tmp_path / "run", f"{GRPO} {VLLM} --model {warm} --steps 3 {flags}")
    gap = log["sampling/logprob_gap"].max()
    show(logprob_gap=gap)
    assert gap < MAX_LOGPROB_GAP[DTYPE]


@needs_card
@needs_vllm
def test_an_engine_that_sleeps_gives_its_memory_back(warm, tmp_path, show):
    command = f"{GRPO} {VLLM} --model {warm} --steps 2 --dtype {DTYPE} --out {tmp_path}/run"
    said = run("tests/print_memory.py", *command.split())
    used = max(map(float, re.findall(r"used ([\d.]+) GiB", said)))
    show(used_gib_in_the_update=used)
    assert used < VLLM_MEMORY * torch.cuda.get_device_properties(0).total_memory / 2**30


# --- memory and time


@needs_card
@pytest.mark.parametrize("flags", ["", "--lora-r 64"])
def test_a_step_holds_the_memory_that_was_computed(flags, grpo, tmp_path, show):
    words = grpo.our_command(f"{tmp_path}/run")
    # without vLLM: an engine's memory would be counted; of a flag that is given twice the last counts
    flags += f" {HF} --max-completion-tokens 512"
    said = run("tests/print_memory.py", *words, *flags.split())
    parts = re.search(r"GiB a GPU, without activations: (.*?);", said)[1]
    planned = sum(float(gib) for gib in re.findall(r" ([\d.]+)(?:,|$)", parts))
    held = float(re.findall(r"held ([\d.]+) GiB", said)[-1])
    show(planned_gib=planned, held_gib=held, **read_log(tmp_path / "run").filter(like="memory/").max())
    assert held == pytest.approx(planned, rel=0.1)


@needs_vllm
def test_seconds_of_a_step(grpo, tmp_path, show):
    """And vLLM agrees with the trainer."""
    log = train(tmp_path / "run", " ".join(grpo.our_command(f"{tmp_path}/run")))
    step = log.iloc[1]  # the first warms up
    show(seconds=step["step_time"], **step.filter(like="time/"))
    assert step["sampling/logprob_gap"] < MAX_LOGPROB_GAP[DTYPE]


# --- every script trains


@pytest.mark.parametrize(
    "command",
    [
        # each round starts an engine that reserves most of the card, and then a reward model
        pytest.param(f"{DPO} --rollout vllm --vllm-memory 0.85 --rounds 2", marks=needs_vllm, id="engines"),
        pytest.param(f"{GRPO} {HF} --steps 3", id="grpo"),
        pytest.param(f"{PPO} {HF} --steps 3", id="ppo"),
        pytest.param(f"{DPO} {HF} --rounds 1", id="dpo"),
        pytest.param(f"{GRPO} {HF} --steps 2 --lora-r 8 --load-in-4bit", marks=needs_bits, id="4bit"),
        pytest.param(f"{SFT} {SHORT} --optim adamw_8bit", marks=needs_bits, id="8bit"),
    ],
)
def test_the_toy_model_trains(command, warm, tmp_path, show):
    log = train(tmp_path / "run", f"{command} --model {warm}")
    show(first_loss=log["loss"].iloc[0], last_loss=log["loss"].iloc[-1])


@pytest.mark.skipif(not SMALL.exists(), reason=f"python -m data.prepare smollm2 --out {SMALL} makes it")
def test_a_real_model_trains_with_its_own_template(warm, tmp_path, show):
    # this model has not learned to think; and DPO needs answers that come to an end
    rl = (
        f"--prompts data/toy/rl_prompts.jsonl --gold= {HF} --think-format plain --max-prompt-tokens 192 "
        f"--max-completion-tokens {160 if ON_GPU else 64} --reward-model {tmp_path}/train_reward.py/model"
    )
    steps = f"--steps 3 {PER_STEP} --on-bad-format score"
    for command in (
        f"train_sft_warmstart.py --preset small --traces data/toy/sft_traces.jsonl {SHORT}",
        f"train_reward.py --preset toy --lora-r 16 --max-length 384 --pairs data/toy/preference_pairs.jsonl {SHORT}",
        f"train_grpo.py --preset small {rl} {steps}",
        f"train_ppo.py --preset toy {rl} {steps} --lora-r 16",
        f"train_dpo.py --preset toy {rl} {PER_ROUND} --rounds 1 --lora-r 16",
    ):
        script = command.split()[0]
        log = train(tmp_path / script, f"{command} --model {SMALL}")
        show(**{f"{script}, last loss": log["loss"].iloc[-1]})


# --- kill -9 and --resume


# SFT has the same rows on every machine; without Adam's moments a loss differs by 0.04, measured on a CPU. On
# a card two runs of GRPO with one seed may sample other tokens, as sums are not added up in one order.
@pytest.mark.parametrize(
    "command, tolerance",
    [(f"{SFT} --epochs 0.02", 1e-3), (f"{GRPO} {HF} --steps 5", np.inf if ON_GPU else 0.0)],
)
def test_a_killed_run_goes_on_with_the_same_losses(command, tolerance, warm, tmp_path, show):
    command += f" --model {warm} --save-steps 1"
    whole = train(tmp_path / "whole", command)
    out = tmp_path / "killed"
    words = f"{command} --dtype {DTYPE} --out {out}".split()
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, start_new_session=True)
    log = out / "metrics.jsonl"
    # then the second checkpoint is whole
    wait_for_lines(log, 3, lambda: process.poll() is None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(*words, "--resume")
    resumed = read_log(out)
    assert len(resumed) == len(whole) == 5
    difference = (whole["loss"] - resumed["loss"]).abs().max()
    show(largest_difference_of_a_loss=difference)
    assert difference <= tolerance


# --- FSDP2: with one process it rounds weights to bfloat16 once, where autocast rounds them for each
# operation


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("command", [f"{SFT} --epochs 0.02", f"{SFT} --epochs 0.02 --lora-r 8"])
def test_sharded_training_has_the_same_first_step(command, processes, warm, tmp_path, show):
    launch = f"{' '.join(ACCELERATE)} --config_file accelerate/8gpu_fsdp2.yaml --num_processes {processes}"
    if not ON_GPU:
        launch += " --mixed_precision no tests/fsdp_on_cpu.py"
    if processes > torch.cuda.device_count() and (ON_GPU or processes == 1):
        pytest.skip("needs two GPUs, or two processes on a CPU")
    alone = train(tmp_path / "alone", command).iloc[0]
    sharded = train(tmp_path / "sharded", f"{launch} {command}").iloc[0]
    difference = {key: abs(sharded[key] / alone[key] - 1) for key in ("loss", "grad_norm")}
    show(**difference)
    assert difference["loss"] < 0.02 and difference["grad_norm"] < 0.1
