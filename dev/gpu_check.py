"""Tries this project on one GPU: real commands, the most valuable first, each step under eight minutes.

    python -m dev.gpu_check                              # all steps; `make gpu-check`
    python -m dev.gpu_check --steps sft grpo --resume    # those alone, and only what has not passed yet
    python -m dev.gpu_check --cpu                        # without a GPU: toy sizes, to try this script

| step | what it shows |
|---|---|
| sft, grpo, ppo, dpo, reward | each script trains the toy preset in bfloat16, without vLLM |
| small-sft, small-reward, small-grpo, small-ppo, small-dpo | the same with a real model, --small |
| resume, resume-sft | runs of GRPO and SFT that kill -9 ended go on from their checkpoints, with the same losses |
| fsdp, fsdp-lora | FSDP2 with one process: loss within 2 % and gradient norm within 10 % of SFT without it |
| fsdp-grpo | GRPO's loop runs under FSDP2 |
| vllm, vllm-sleep, vllm-lora | a colocated engine gets the weights, gives its memory back, works with LoRA |
| logprob-gap | vLLM and trainer agree on the toy model, on 0.5B, and on the folders in --models |
| tests | pytest -m gpu tests/project/test_gpu.py: a card's numbers are a CPU's; a second engine in one process |
| second-engine | two rounds of DPO with vLLM: engine, reward model, policy, and again |
| memory, memory-lora | a GRPO step of 0.5B holds rlmt/memory.py's bytes, within 10 %; the peak of each phase |
| step-0.5b, step-1.5b, step-8b-lora | seconds of a GRPO step with random weights; its share of the card's rate |

Prints PASS, FAIL or SKIP with the reason. Writes <card>.json and table.md into --out after each step. The output
of the commands goes into --runs. Exits with 1 if <card>.json has a FAIL, now or from before, with 2 without a GPU.
"""

import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# rlmt is first: it sets environment variables that the libraries below read
from rlmt.data import read_log
from rlmt.memory import GIB
from rlmt.run import parse_args
from rlmt.sampler import MAX_LOGPROB_GAP
import torch
import tyro
from torch.optim.optimizer import register_optimizer_step_pre_hook

import train_grpo
from utils import DEVICE, DTYPE, fail, in_one_line
from dev import bench, bench_work

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = DEVICE == "cuda"
STEP_SECONDS = 480  # of one step of the check, at most
# relative differences that a step passes with
MEMORY_TOLERANCE = 0.1
LOSS_TOLERANCE = 0.02  # FSDP2 rounds weights to bfloat16 once, where autocast rounds them for each operation
NORM_TOLERANCE = 0.1
# Steps of a run that is killed and resumed, and how far a loss of SFT may be from that of a run that nobody killed.
# Measured on a CPU: 0, and 0.04 in the second step after a resume without Adam's moments.
N_RESUMED = 5
RESUME_TOLERANCE = 1e-3
TOY_SFT_STEPS = 250  # of an epoch: 4,000 traces, 16 a step
FSDP = ["-m", "accelerate.commands.launch", "--config_file", "accelerate/8gpu_fsdp2.yaml"]
# after so short an SFT completions may be cut off; the gold reward costs time and shows nothing here
TOY_GRPO = ("train_grpo.py", "--preset", "toy", "--allow-truncation", "--gold", "")
# takes the place of "train_grpo.py" in a command
GRPO_THAT_PRINTS_MEMORY = ("-c", "from dev import gpu_check; gpu_check.train_grpo_and_print_memory()")
VLLM_MEMORY = 0.3  # of the card
WITH_VLLM = ("--rollout", "vllm", "--steps", 3, "--vllm-memory", VLLM_MEMORY)


class Failed(Exception):
    """Says why a step failed, and has the numbers that it measured before."""

    def __init__(self, reason: str, numbers: dict | None = None):
        super().__init__(reason)
        self.numbers = numbers or {}


class Skipped(Exception):
    """Says why a step cannot be tried on this machine."""


class OutOfTime(Exception):
    """Says that --minutes are over, which is no fault of the step."""


@dataclass
class Args:
    steps: tuple[str, ...] = ()
    """Names of steps; none: all."""
    cpu: bool = False
    """Try it without a GPU, at toy size and in float32."""
    resume: bool = False
    """Leave out the steps that passed before, as <card>.json says."""
    minutes: float = 0.0
    """Stop after so many; a step that they interrupt counts as not tried. 0: stop when all is done."""
    models: tuple[str, ...] = ()
    """Folders of further models for logprob-gap."""
    small: Path = Path("data/smollm2")
    """Folder of the real model of 135M parameters; `python -m data.prepare smollm2 --out FOLDER` makes it."""
    out: str = ""
    """Folder for results; empty: results/gpu, and results/gpu-cpu with --cpu."""
    runs: str = ""
    """Folder for runs and random models, up to 45 GB in step-8b-lora; empty: runs/ in --out."""


# --- commands


class Runner:
    """Runs the commands of a step, and ends them when the time of the step is over."""

    def __init__(self, args: Args):
        self.args = args
        self.folder = Path(args.runs or Path(args.out) / "runs").resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ends = math.inf  # when the time of all steps is over, by time.monotonic()
        if args.minutes:
            self.ends = time.monotonic() + 60 * args.minutes
        self.step_ends = math.inf  # when that of the present step is; `try_step` sets it

    def start(self, name: str, words: list) -> subprocess.Popen:
        """Starts `python WORDS`, which prints into NAME.log."""
        command = [sys.executable, *map(str, words)]
        # for a script that a launcher starts: it does not find this project's modules by itself
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        with open(self.folder / f"{name}.log", "w") as log:
            log.write(shlex.join(command) + "\n")
            log.flush()
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": python_path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that `kill` ends what it starts, too
            )

    def check_time(self) -> None:
        """Raises Failed or OutOfTime when the time of the step, or that of all steps, is over."""
        now = time.monotonic()
        if now > self.ends:
            raise OutOfTime
        if now > self.step_ends:
            raise Failed(f"took longer than {STEP_SECONDS} s")

    def run(self, name: str, words: list) -> None:
        """Runs `python WORDS`. Raises Failed if it exits with an error, Skipped if it does not fit by rlmt/memory.py."""
        process = self.start(name, words)
        try:
            while process.poll() is None:
                self.check_time()
                time.sleep(0.2)
        finally:
            kill(process)
        if process.returncode:
            error = error_line((self.folder / f"{name}.log").read_text())
            if "GiB are needed of a GPU's" in error:  # check_memory refused to start
                raise Skipped(error)
            raise Failed(f"{error} (exit code {process.returncode}, {name}.log)")

    def train(self, name: str, *words, launch: tuple = ()) -> list[dict]:
        """Runs a training script and returns its log. Raises Failed if a loss or a norm is not finite."""
        out = self.folder / name
        self.run(name, [*launch, *words, "--dtype", DTYPE, "--out", out, "--overwrite"])
        logs = sorted(out.glob("round-*/metrics.jsonl"))  # train_dpo.py logs its steps by round
        lines = []
        for log in logs or [out / "metrics.jsonl"]:
            lines += read_log(log)
        for line in lines:
            for key in ("loss", "grad_norm"):
                if key in line and (line[key] is None or not math.isfinite(line[key])):
                    raise Failed(f"{key} is {line[key]} ({name}.log)")
        return lines

    def make_world(self) -> None:
        """Makes the rows of the toy world if they are not there."""
        if not (ROOT / "data/toy/sft_traces.jsonl").exists():
            self.run("world", ["-m", "data.toy.world"])

    def warm_start(self) -> Path:
        """Returns the toy model after SFT, which is trained if it is not there."""
        self.make_world()
        run = self.folder / "sft"
        if not (run / "summary.json").exists():  # a run writes it when it is finished
            epochs = 1.0 if ON_GPU else 0.3  # enough for the format
            self.train("sft", "train_sft_warmstart.py", "--preset", "toy", "--epochs", epochs)
        return run / "model"

    def toy_grpo_words(self) -> list:
        """Returns the words of a GRPO run of the warm-started toy model."""
        prompts = 16 if ON_GPU else 2
        return [*TOY_GRPO, "--model", self.warm_start(), "--prompts-per-step", prompts]

    def toy_grpo(self, name: str, *words, launch: tuple = ()) -> list[dict]:
        """Trains the warm-started toy model by GRPO; `words` are further flags."""
        return self.train(name, *self.toy_grpo_words(), *words, launch=launch)

    def toy_dpo(self, name: str, *words) -> list[dict]:
        """Trains the warm-started toy model by DPO; `words` are further flags."""
        prompts = 128 if ON_GPU else 16
        # without a warm-up: on a CPU a round is one step, which would have the rate 0
        flags = ["--model", self.warm_start(), "--prompts-per-round", prompts, "--warmup-ratio", 0, *words]
        return self.train(name, "train_dpo.py", "--preset", "toy", *flags)

    def random_models(self, size: str) -> Path:
        """Returns a folder with a policy, a reward model and prompts of a size of dev.bench; makes it once."""
        folder = self.folder / f"models-{size}"
        if not (folder / "prompts.jsonl").exists():  # make_all writes it when the models are whole
            code = "import sys; from dev import bench_work; bench_work.make_all(*sys.argv[1:])"
            try:
                self.run(f"models-{size}", ["-c", code, folder, size, 0])
            except Failed as reason:
                if "OutOfMemoryError" in str(reason):  # they are made on the card, in float32
                    raise Skipped(str(reason)) from None
                raise
        return folder


def error_line(log: str) -> str:
    """Returns the last line of a log that names an error, as torchrun prints more after it; else the last line."""
    lines = log.strip().splitlines()
    for line in reversed(lines):
        if re.match(r"(\[rank\d+\]: )?(\S*Error|error): \S", line):
            return line[:300]
    return lines[-1][:300]


def kill(process: subprocess.Popen) -> None:
    """Kills a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# --- steps with the toy model; each step gets its name and its flags in STEPS, and returns numbers for the table


def sft(runner: Runner, name: str) -> dict:
    shutil.rmtree(runner.folder / name, ignore_errors=True)  # else `warm_start` keeps an earlier run
    runner.warm_start()
    losses = [line["loss"] for line in read_log(runner.folder / name / "metrics.jsonl")]
    if losses[-1] >= losses[0]:
        raise Failed(f"the loss did not fall: {losses[0]:.3f}, {losses[-1]:.3f}")
    return {"first loss": losses[0], "last loss": losses[-1]}


def grpo(runner: Runner, name: str) -> dict:
    lines = runner.toy_grpo(name, "--rollout", "hf", "--steps", 3)
    return {"reward": lines[-1]["reward"]}


def ppo(runner: Runner, name: str) -> dict:
    prompts = 128 if ON_GPU else 4
    flags = ["--rollout", "hf", "--steps", 3, "--prompts-per-step", prompts, "--allow-truncation"]
    lines = runner.train(name, "train_ppo.py", "--preset", "toy", "--model", runner.warm_start(), *flags)
    return {"reward": lines[-1]["reward"]}


def dpo(runner: Runner, name: str) -> dict:
    lines = runner.toy_dpo(name, "--rollout", "hf", "--rounds", 1)
    return {"last loss": lines[-1]["loss"]}


def reward(runner: Runner, name: str) -> dict:
    runner.make_world()
    epochs = 0.5 if ON_GPU else 0.02
    lines = runner.train(name, "train_reward.py", "--preset", "toy", "--epochs", epochs, "--warmup-ratio", 0)
    return {"first loss": lines[0]["loss"], "last loss": lines[-1]["loss"]}


# --- steps with a real model, its own tokenizer and chat template; LoRA, on the rows of the toy world

# without a warm-up, with which the first step has the rate 0
SHORT = ("--epochs", 0.5 if ON_GPU else 0.02, "--warmup-ratio", 0)
SMALL_SFT = ("--preset", "small", "--traces", "data/toy/sft_traces.jsonl", *SHORT)
SMALL_REWARD = ("--preset", "small", "--pairs", "data/toy/preference_pairs.jsonl", *SHORT)
SMALL_RL = (
    *("--prompts", "data/toy/rl_prompts.jsonl", "--gold", "", "--rollout", "hf"),
    # this model has not learned to think; and DPO needs answers that come to an end
    *("--think-format", "plain", "--max-prompt-tokens", 192),
    *("--max-completion-tokens", 160 if ON_GPU else 64),
)
SMALL_STEPS = (
    *("--steps", 3, "--prompts-per-step", 16 if ON_GPU else 2),
    *("--allow-truncation", "--on-bad-format", "score"),  # else nothing may be learned in so few steps
)
SMALL_ROUND = ("--rounds", 1, "--prompts-per-round", 64 if ON_GPU else 16, "--warmup-ratio", 0)


def small(runner: Runner, name: str, script: str, *words) -> dict:
    """Trains the model of --small."""
    model = runner.args.small.resolve()
    if not model.exists():
        raise Skipped(f"no folder {model}; python -m data.prepare smollm2 --out {model} makes it")
    runner.make_world()
    lines = runner.train(name, script, "--model", model, *words)
    return {"first loss": lines[0]["loss"], "last loss": lines[-1]["loss"]}


def small_rl(runner: Runner, name: str, script: str, *words) -> dict:
    """Trains it by the reward model of step small-reward, which is trained first if it is not there."""
    reward_run = runner.folder / "small-reward"
    if not (reward_run / "summary.json").exists():
        small(runner, "small-reward", "train_reward.py", *SMALL_REWARD)
    return small(runner, name, script, *SMALL_RL, "--reward-model", reward_run / "model", *words)


# --- steps that kill, shard and measure


def resume(runner: Runner, name: str) -> dict:
    """Kills a GRPO run, and compares it with one that nobody killed."""
    flags = ["--rollout", "hf", "--steps", N_RESUMED, "--save-steps", 1]
    whole = runner.toy_grpo(f"{name}-whole", *flags)
    resumed = killed_and_resumed(runner, name, [*runner.toy_grpo_words(), *flags])
    difference = largest_difference(whole, resumed)
    # Measured on a CPU: 0, and 0.015 in the second step after a resume without Adam's moments. On a card two runs
    # with one seed may sample other tokens, as sums are not added up in one order; what that does to a loss is not
    # known. There `resume_sft` decides.
    if difference and not ON_GPU:
        raise Failed(f"a loss differs by {difference:.2g} from that of the run that was not killed")
    return {"largest difference of a loss": difference}


def resume_sft(runner: Runner, name: str) -> dict:
    """Does the same with SFT, whose rows are the same on every machine."""
    runner.make_world()
    words = [
        "train_sft_warmstart.py",
        "--preset",
        "toy",
        "--epochs",
        N_RESUMED / TOY_SFT_STEPS,
        "--save-steps",
        1,
    ]
    whole = runner.train(f"{name}-whole", *words)
    difference = largest_difference(whole, killed_and_resumed(runner, name, words))
    numbers = {"largest difference of a loss": difference}
    if difference > RESUME_TOLERANCE:
        raise Failed("a loss differs from that of the run that was not killed", numbers)
    return numbers


def killed_and_resumed(runner: Runner, name: str, words: list) -> list[dict]:
    """Kills a run of N_RESUMED steps when its third is logged, resumes it, and returns what it logged."""
    # The resumed run begins with step 3 or 4. Its first loss tells that the weights came back; the loss after that
    # one, that Adam's moments did.
    out = runner.folder / name
    shutil.rmtree(out, ignore_errors=True)  # n_logged would count the log of an earlier run
    words = [*words, "--dtype", DTYPE, "--out", out]
    process = runner.start(f"{name}-killed", words)
    try:
        while n_logged(out) < 3:  # when the third step is logged, the second checkpoint is whole
            runner.check_time()
            if process.poll() is not None:
                raise Failed(f"it ended before it was killed ({name}-killed.log)")
            time.sleep(0.05)
    finally:
        kill(process)
    runner.run(name, [*words, "--resume"])
    lines = read_log(out / "metrics.jsonl")
    if len(lines) != N_RESUMED:
        raise Failed(f"{len(lines)} steps are logged in place of {N_RESUMED}")
    return lines


def largest_difference(lines: list[dict], others: list[dict]) -> float:
    """Returns how far the losses of two logs are apart at most."""
    return max(abs(line["loss"] - other["loss"]) for line, other in zip(lines, others, strict=True))


def n_logged(run: Path) -> int:
    """Counts the steps that a run has logged so far; it may be writing its log now."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    return path.read_text().count("\n")


def launched_with_fsdp() -> tuple:
    """Returns the words that launch a script with FSDP2: one process on a GPU, else two."""
    if ON_GPU:
        return (*FSDP, "--num_processes", "1")
    # on a CPU accelerate shards for two processes or more, and only with tests/fsdp_on_cpu.py
    return (*FSDP, "--num_processes", "2", "--mixed_precision", "no", "tests/fsdp_on_cpu.py")


def fsdp_sft(runner: Runner, name: str, *words) -> dict:
    """Compares the first step of SFT under FSDP2 with that of a run without it, which has the same rows."""
    runner.make_world()
    script = ["train_sft_warmstart.py", "--preset", "toy", "--epochs", 0.02, *words]
    alone = runner.train(f"{name}-alone", *script)[0]
    sharded = runner.train(name, *script, launch=launched_with_fsdp())[0]
    numbers = {}
    for key, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
        difference = abs(sharded[key] / alone[key] - 1)
        numbers[f"relative difference of {key}"] = difference
        if difference > tolerance:
            raise Failed(f"{key} is {sharded[key]:.5g} with FSDP2 and {alone[key]:.5g} without", numbers)
    return numbers


def fsdp_grpo(runner: Runner, name: str) -> dict:
    lines = runner.toy_grpo(name, "--rollout", "hf", "--steps", 2, launch=launched_with_fsdp())
    return {"reward": lines[-1]["reward"]}


def compare_with_plan(runner: Runner, name: str, *words) -> dict:
    """Compares the memory that is allocated as the optimizer steps with what rlmt/memory.py says; the run prints both."""
    if not ON_GPU:
        raise Skipped("torch counts the memory of a GPU alone; tests/scripts/test_grpo.py compares a CPU's")
    # without vLLM: an engine's memory would be counted
    lines = grpo_of_random_models(runner, name, "0.5b", *words, use_vllm=False)
    printed = (runner.folder / f"{name}.log").read_text()
    # "policy 7.4, reference 0.9, ...", as check_memory returns it
    listed = re.search(r"GiB a GPU, without activations: (.*?);", printed)[1]
    planned = sum(float(part.split()[-1]) for part in listed.split(", "))
    held = float(re.findall(r"held ([\d.]+) GiB", printed)[-1])
    numbers = {"planned GiB": planned, "held GiB": held}
    numbers |= {key: value for key, value in lines[-1].items() if key.startswith("memory/")}
    if abs(held / planned - 1) > MEMORY_TOLERANCE:
        raise Failed(
            f"a step holds {held:.2f} GiB, and rlmt/memory.py says {planned:.2f} ({listed})", numbers
        )
    return numbers


def train_grpo_and_print_memory() -> None:
    """Runs train_grpo.py with its flags.

    Each time the optimizer steps, prints the GiB that this process has allocated, "held", and those of the card
    that are in use, "used".
    """

    def print_memory(*_) -> None:
        print(f"held {torch.cuda.memory_allocated() / GIB:.3f} GiB", flush=True)
        if ON_GPU:
            # asked of the driver: torch counts the memory of an engine also while it sleeps and has given it back
            free, total = torch.cuda.mem_get_info()
            print(f"used {(total - free) / GIB:.3f} GiB", flush=True)

    register_optimizer_step_pre_hook(print_memory)
    train_grpo.main(parse_args(train_grpo.Args, train_grpo.PRESETS, train_grpo.RELEASED))


def grpo_of_random_models(runner: Runner, name: str, size: str, *words, use_vllm: bool) -> list[dict]:
    """Runs two steps of GRPO with random weights, of which the first warms up. Returns what they logged."""
    bench_args = bench.Args(size=size, dtype=DTYPE, steps=1)  # one, behind that which warms up
    _, *flags = bench.our_command("grpo", runner.random_models(size), runner.folder / name, bench_args)
    if not use_vllm:
        # transformers samples slowly, and goes on for all completions until the longest has ended
        limit = min(bench_work.SIZES[size]["max_tokens"], 512)
        # of a flag that is given twice the last counts
        flags += ["--rollout", "hf", "--max-completion-tokens", limit]
    try:
        return runner.train(name, *GRPO_THAT_PRINTS_MEMORY, *flags, *words)
    finally:
        shutil.rmtree(runner.folder / name, ignore_errors=True)  # checkpoint and model of 1.5B are 25 GB


def share_of_rate(runner: Runner, name: str, size: str) -> dict:
    """Measures a GRPO step, and the update alone, as shares of the rate of a large matrix product."""
    if not ON_GPU:
        size = "tiny"
    use_vllm = has_vllm()
    lines = grpo_of_random_models(runner, name, size, use_vllm=use_vllm)
    n_tokens = lines[-1]["num_tokens"] - lines[-2]["num_tokens"]
    seconds = lines[-1]["step_time"]
    lora = bool(bench_work.SIZES[size]["lora_r"])
    of_update, of_step = bench_work.operations_per_token(runner.random_models(size), lora)
    rate = float(bench.printed_by("print(bench_work.matrix_rate(sys.argv[1]))", DTYPE))
    numbers = {
        "seconds": seconds,
        "tokens": n_tokens,
        "matrix product TFLOP/s": rate / 1e12,
        "share, step": of_step * n_tokens / seconds / rate,
        "share, update": of_update * n_tokens / lines[-1]["time/update"] / rate,
    }
    if use_vllm:
        numbers["logprob gap"] = largest_gap(lines)
        numbers["longest completion"] = lines[-1]["completions/max_length"]
    times = {key: value for key, value in lines[-1].items() if key.startswith("time/")}
    return numbers | times


def logprob_gap(runner: Runner, name: str) -> dict:
    """Measures how far vLLM and the trainer are apart in a step of GRPO, model by model."""
    needs_vllm()
    flags = ["--rollout", "vllm", "--steps", 1]
    numbers = {"toy": largest_gap(runner.toy_grpo(f"{name}-toy", *flags))}
    size = "0.5b" if ON_GPU else "tiny"
    numbers[size] = largest_gap(grpo_of_random_models(runner, f"{name}-{size}", size, use_vllm=True))
    for number, model in enumerate(runner.args.models):
        # LoRA: a trained model of 8B would not fit on one card
        words = [*TOY_GRPO, "--model", model, "--think-format", "plain", "--lora-r", 8, *flags]
        numbers[model] = largest_gap(runner.train(f"{name}-{number}", *words))
    limit = MAX_LOGPROB_GAP[DTYPE]
    for model, gap in numbers.items():
        if gap > limit:  # the run itself ends only when two steps in a row exceed it
            raise Failed(f"{model}: {gap:.4f} nat a token, more than {limit}", numbers)
    return numbers


def largest_gap(lines: list[dict]) -> float:
    """Returns the largest gap of the steps; each is the mean distance of vLLM from the trainer in nats a token."""
    return max(line["sampling/logprob_gap"] for line in lines)


def vllm_engine(runner: Runner, name: str, *words) -> dict:
    """Trains the toy model with a colocated engine; the run fails by itself if weights do not reach the engine."""
    needs_vllm()
    lines = runner.toy_grpo(name, *WITH_VLLM, *words)
    return {"logprob gap": largest_gap(lines)}


def vllm_sleep(runner: Runner, name: str) -> dict:
    """Trains as `vllm_engine` does, and looks at the card's memory in the update, when the engine sleeps."""
    needs_vllm()
    _, *flags = runner.toy_grpo_words()  # without train_grpo.py
    lines = runner.train(name, *GRPO_THAT_PRINTS_MEMORY, *flags, *WITH_VLLM, "--vllm-sleep")
    numbers = {"logprob gap": largest_gap(lines)}
    if ON_GPU:  # vLLM cannot sleep on a CPU
        reserved = VLLM_MEMORY * torch.cuda.get_device_properties(0).total_memory / GIB
        printed = (runner.folder / f"{name}.log").read_text()
        numbers["used GiB in the update"] = used_asleep(printed, reserved)
    return numbers


def used_asleep(printed: str, reserved: float) -> float:
    """Returns the most GiB of the card that were in use by a log.

    Raises Failed if they are as many as an engine reserves that is awake: then it has not slept.
    """
    used = max(map(float, re.findall(r"used ([\d.]+) GiB", printed)))
    if used >= reserved:
        raise Failed(f"the update uses {used:.1f} GiB of the card; awake, vLLM alone has {reserved:.1f}")
    return used


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def needs_vllm() -> None:
    if not has_vllm():
        raise Skipped("vLLM is not installed")


def tests(runner: Runner, name: str) -> dict:
    """Runs the tests that are marked as in need of a GPU."""
    if not ON_GPU:
        raise Skipped("needs a GPU")
    if not importlib.util.find_spec("pytest"):
        raise Skipped("pytest is not installed")
    runner.run(name, ["-m", "pytest", "-q", "-rs", "-m", "gpu", "tests/project/test_gpu.py"])
    return {}


def second_engine(runner: Runner, name: str) -> dict:
    """Runs two rounds of DPO: each starts engines that reserve most of the card, and then a reward model."""
    needs_vllm()
    runner.toy_dpo(name, "--rollout", "vllm", "--rounds", 2, "--vllm-memory", 0.85)
    return {}


STEPS = {  # name: its function, and what follows the runner and the name in a call
    "sft": [sft],
    "grpo": [grpo],
    "ppo": [ppo],
    "dpo": [dpo],
    "reward": [reward],
    "small-sft": [small, "train_sft_warmstart.py", *SMALL_SFT],
    "small-reward": [small, "train_reward.py", *SMALL_REWARD],
    "small-grpo": [small_rl, "train_grpo.py", "--preset", "small", *SMALL_STEPS],
    "small-ppo": [small_rl, "train_ppo.py", "--preset", "toy", "--lora-r", 16, *SMALL_STEPS],
    "small-dpo": [small_rl, "train_dpo.py", "--preset", "small", *SMALL_ROUND],
    "resume": [resume],
    "resume-sft": [resume_sft],
    "fsdp": [fsdp_sft],
    "fsdp-lora": [fsdp_sft, "--lora-r", 8],
    "fsdp-grpo": [fsdp_grpo],
    # The rates are so high that a run fails if its engine keeps its first weights: at the preset's 3e-4 the gap
    # would stay below its limit (docs/gpu.md).
    "vllm": [vllm_engine, "--learning-rate", 5e-3],
    "vllm-sleep": [vllm_sleep],
    "vllm-lora": [vllm_engine, "--lora-r", 8, "--learning-rate", 5e-2],
    "logprob-gap": [logprob_gap],
    "tests": [tests],
    "second-engine": [second_engine],
    "memory": [compare_with_plan],
    "memory-lora": [compare_with_plan, "--lora-r", 64],
    "step-0.5b": [share_of_rate, "0.5b"],
    "step-1.5b": [share_of_rate, "1.5b"],
    "step-8b-lora": [share_of_rate, "8b"],
}


# --- results


def reason_and_numbers(step: dict) -> str:
    """Returns the reason why a step did not pass, if there is one, and the numbers that it measured."""
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in step["numbers"].items())
    return "; ".join(part for part in (step["reason"], numbers) if part)


def table(folder: Path) -> str:
    """Returns the results of all cards in a folder as Markdown."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        card = json.loads(path.read_text())
        versions = ", ".join(f"{name} {number}" for name, number in card["versions"].items())
        lines += [f"## {card['device']}", "", f"Packages at the last call: {versions}.", ""]
        lines += ["| step | result | s | reason and numbers | commit |", "|---|---|---|---|---|"]
        for name in STEPS:
            if name not in card["steps"]:
                continue
            step = card["steps"][name]
            said = reason_and_numbers(step).replace("|", "\\|")
            seconds = f"{step['seconds']:.0f}"
            lines.append(f"| {name} | {step['result']} | {seconds} | {said} | {step['commit'][:7]} |")
        lines.append("")
    return "\n".join(lines)


def try_step(runner: Runner, name: str) -> dict:
    """Runs a step and returns its entry of <card>.json."""
    # each entry has its commit: a later call with --resume may be of another
    entry = {"result": "PASS", "reason": "", "numbers": {}, "commit": bench.commit_of(ROOT)}
    started = time.monotonic()
    runner.step_ends = started + STEP_SECONDS
    function, *words = STEPS[name]
    try:
        entry["numbers"] = function(runner, name, *words)
    except Skipped as reason:
        entry |= {"result": "SKIP", "reason": str(reason)}
    except Failed as failed:
        entry |= {"result": "FAIL", "reason": str(failed), "numbers": failed.numbers}
    except OutOfTime:
        raise
    except Exception as error:  # a fault of this script; the other steps are tried all the same
        entry |= {"result": "FAIL", "reason": in_one_line(error)}
    entry["seconds"] = time.monotonic() - started
    return entry


def main(args: Args) -> int:
    unknown = set(args.steps) - set(STEPS)
    if unknown:
        fail(f"--steps {' '.join(sorted(unknown))}: there are {', '.join(STEPS)}")
    if not ON_GPU and not args.cpu:
        fail("torch sees no GPU here; --cpu tries the steps at toy size without one")
    if ON_GPU and args.cpu:
        fail("--cpu: hide the GPU as well, by CUDA_VISIBLE_DEVICES= (empty) before the command")
    if not args.out:
        args.out = "results/gpu" if ON_GPU else "results/gpu-cpu"

    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    path = Path(args.out) / f"{re.sub('[^a-z0-9]+', '-', device.lower())}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = {}
    if path.exists():
        steps = json.loads(path.read_text())["steps"]  # those that are not asked for now stay in the table
    about = {"device": device, "versions": bench.installed_versions()}
    if ON_GPU:
        about["GiB"] = torch.cuda.get_device_properties(0).total_memory / GIB

    runner = Runner(args)
    # as an exception, SIGTERM lets `Runner.run` end the command of a step
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in args.steps or STEPS:
        if args.resume and steps.get(name, {}).get("result") == "PASS":
            print(f"PASS {name} (before)", flush=True)
            continue
        try:
            steps[name] = try_step(runner, name)
        except OutOfTime:
            print(f"{name} and what follows: not tried, as --minutes {args.minutes:g} are over")
            break
        step = steps[name]
        print(f"{step['result']} {name} ({step['seconds']:.0f} s) {reason_and_numbers(step)}", flush=True)
        path.write_text(json.dumps(about | {"steps": steps}, indent=1) + "\n")
        (path.parent / "table.md").write_text(table(path.parent))
    return int(any(step["result"] == "FAIL" for step in steps.values()))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
