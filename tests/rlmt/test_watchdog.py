"""rlmt/watchdog.py and checkpoint.guard: locks, stalls, signals, in small processes and in runs of train_grpo.py on the toy."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmt import checkpoint
from rlmt import endpoint
from rlmt import model as policy
from rlmt import sampler as rollout
from rlmt import run as runs
import train_grpo
from rlmt import watchdog
from rewards.preference import load_reward_model
from launch import DDP, started, started_ranks
from script_runs import run_here, write_prompts
from chat_server import ChatServer, Fault
from rlmt import chat
from rlmt import run as rlmt_run

ROOT = Path(__file__).parents[2]
TINY = (
    "train_grpo.py --preset toy --model data/toy/base --prompts-per-step 4 --group-size 4 "
    "--max-completion-tokens 16 --allow-truncation --on-bad-format score --stall-minutes 0.1"
).split()


def start(words: list) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(process: subprocess.Popen) -> tuple[int, str]:
    """Waits for the end; returns exit code and output."""
    text = process.communicate(timeout=120)[0]
    return process.returncode, text


def end_of_fork(process: BaseProcess, output: Path) -> tuple[int, str]:
    """As `end_of`, for a process of `launch.started`."""
    process.join(timeout=120)
    code = process.exitcode
    process.kill()  # does nothing if it has ended
    return code, output.read_text()


def wait_for_step(process: subprocess.Popen, run: Path, step: int) -> None:
    while not any(row["step"] >= step for row in rows_of(run)):
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.05)


def rows_of(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def whole_steps(run: Path) -> list[int]:
    return [
        checkpoint.step_of(folder) for folder in checkpoint.numbered(run) if (folder / "complete").exists()
    ]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 12)


# --- the watchdog alone: processes without torch


def small_process(tmp_path: Path, code: str) -> subprocess.Popen:
    return start(
        [
            "-c",
            "import multiprocessing, sys, time\nfrom pathlib import Path\nfrom rlmt import watchdog\n" + code,
            tmp_path,
        ]
    )


STALLING = """
watchdog.set_run(Path(sys.argv[1]), 0.01)
with watchdog.watched():
    time.sleep(0.5)
    watchdog.beat()
    {hangs}
"""


BEATING = """
watchdog.set_run(Path(sys.argv[1]), 0.02)
with watchdog.watched():
    for _ in range(4):
        time.sleep(0.5)
        watchdog.beat()
    with watchdog.allow_seconds():
        time.sleep(2)
"""


WRITING = """
watchdog.SLOWEST_DISK = 10
watchdog.set_run(Path(sys.argv[1]), 0.001)
with watchdog.watched():
    time.sleep(0.2)
    watchdog.beat()
    with watchdog.allow_seconds(50):
        time.sleep({seconds})
"""


ASK = """
import sys, time
from pathlib import Path
from rlmt import watchdog
from rlmt.endpoint import Endpoint
folder = Path(sys.argv[1])
watchdog.set_run(folder, 0.05)  # three seconds
with watchdog.watched():
    time.sleep(0.5)
    watchdog.beat()
    judge = Endpoint("m", folder / "judge.jsonl", sys.argv[2], timeout=float(sys.argv[3]), retries=1, backoff=0)
    print(judge.ask([{"messages": [{"role": "user", "content": "Q"}], "max_tokens": 5}])[0].text)
"""


START_CHILD = (
    "process = multiprocessing.Process(target=time.sleep, args=(60,)); process.start(); print(process.pid)"
)
HANGS = {
    "sleeps": f"{START_CHILD}; time.sleep(60)",
    "holds_the_gil": "__import__('ctypes').PyDLL(None).sleep(60)",
}
JUDGES = {7: 20, 60: 5}  # seconds until it replies: seconds that a call may take


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """Starts all processes that the tests below only wait for, so that they take their time at once.

    Returns the processes by name, and the folder that has a folder of each name.
    """
    folder = tmp_path_factory.mktemp("waiting")
    codes = {name: STALLING.format(hangs=line) for name, line in HANGS.items()}
    codes["beats"] = BEATING
    for seconds in (2, 60):
        codes[f"writes for {seconds}"] = WRITING.format(seconds=seconds)
    processes = {}
    for name, code in codes.items():
        (folder / name).mkdir()
        processes[name] = small_process(folder / name, code)

    servers = []
    (folder / "ask.py").write_text(ASK)
    for seconds, timeout in JUDGES.items():
        name = f"asks for {seconds}"
        (folder / name).mkdir()
        servers.append(ChatServer(lambda text, n, seconds=seconds: time.sleep(seconds) or "the reply"))
        words = [folder / "ask.py", folder / name, servers[-1].url, timeout]
        processes[name] = started(words, folder / name / "output")
    yield processes, folder
    for process in processes.values():
        process.kill()
    for server in servers:
        server.shutdown()
        server.server_close()


STOPPABLE = """
with watchdog.stoppable():
    print("ready", flush=True)
    while True:
        time.sleep(0.1)
"""


def test_sigterm_asks_once_and_ends_the_second_time(tmp_path, waiting):
    """While those of `waiting` wait too."""
    process = small_process(tmp_path, STOPPABLE)
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):  # a scheduler and a launcher both pass the same one on
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert process.poll() is None
    time.sleep(5)
    process.send_signal(signal.SIGTERM)
    code, text = end_of(process)
    assert code == watchdog.STOPPED and text.count("SIGTERM: the run stops with a checkpoint") == 1


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_hangs_is_ended_also_if_it_holds_the_gil(waiting):
    processes, folder = waiting
    code, text = end_of(processes["sleeps"])
    child = int(text.split()[0])  # such as vLLM's engine, which would keep the GPU's memory
    deadline = time.monotonic() + 5  # a killed process takes a moment to go
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert code == 124 and "error: no rank has made progress for 1 seconds (--stall-minutes 0.01)" in text
    assert "--resume continues from the last checkpoint" in text
    stacks = (folder / "sleeps" / "stacks-rank0.txt").read_text()
    assert '"<string>"' in stacks and stacks.count("hread 0x") == 2
    code, _ = end_of(processes["holds_the_gil"])  # ten seconds later, by a thread that needs no GIL
    assert code == 1 and '"<string>"' in (folder / "holds_the_gil" / "stacks-rank0.txt").read_text()


def test_who_beats_or_may_take_its_time_is_left_alone(waiting):
    processes, folder = waiting
    assert end_of(processes["beats"]) == (0, "") and not (folder / "beats" / "stacks-rank0.txt").exists()


def test_a_large_checkpoint_may_take_as_long_as_a_slow_disk(waiting):
    """50 bytes at 10 a second: 5 seconds, where ten times --stall-minutes are 0.6."""
    processes, _ = waiting
    assert end_of(processes["writes for 2"]) == (0, "")
    code, text = end_of(processes["writes for 60"])
    assert code == 124 and "no rank has made progress for 5 seconds" in text


def test_a_model_that_is_loaded_may_take_as_long_as_a_slow_disk(monkeypatch):
    monkeypatch.setattr(watchdog, "RUN", watchdog.Run())
    seen = set()
    loaded = threading.Event()

    def look() -> None:
        while not loaded.wait(0.0005):
            seen.add(watchdog.RUN.patience)

    watcher = threading.Thread(target=look)
    watcher.start()
    model = policy.load_policy("data/toy/base", 0, False)
    loaded.set()
    watcher.join()
    assert max(seen) == pytest.approx(4 * model.num_parameters() / watchdog.SLOWEST_DISK)
    assert watchdog.RUN.patience == 0.0


@dataclass
class Args:
    """What runs.check_run needs of a script's arguments."""

    out: str
    overwrite: bool = False
    resume: bool = False
    preset: str = ""
    seed: int = 0


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    code = "watchdog.lock_folder(Path(sys.argv[1]))\nprint('ready', flush=True)\ntime.sleep(60)"
    process = small_process(tmp_path, code)
    assert process.stdout.readline() == "ready\n"
    (tmp_path / "command.txt").write_text("python train_grpo.py\n")
    for overwrite in (False, True):
        with pytest.raises(SystemExit) as error:
            runs.start_run(runs.check_run(Args(str(tmp_path), overwrite), "grpo", "base"))
        assert error.value.code == 2
    assert f"in use by process {process.pid} on" in capsys.readouterr().err
    assert (tmp_path / "command.txt").read_text() == "python train_grpo.py\n"
    process.kill()  # the kernel releases the lock
    process.communicate()
    watchdog.lock_folder(tmp_path)
    watchdog._LOCK_FILES.clear()


# --- errors in a training loop


@contextlib.contextmanager
def loop(run: Path):
    """Makes this process the one that trains in `run`, and reads what it says at its end."""
    before = dataclasses.replace(watchdog.RUN)
    watchdog.set_run(run, 1)
    try:
        with rlmt_run.guarded(run, policy.start_accelerator()):
            yield
    finally:
        vars(watchdog.RUN).update(vars(before))


def test_an_error_says_where_the_run_goes_on(tmp_path, capsys):
    for step in (5, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-5" / "complete").write_text("")
    with pytest.raises(KeyError), loop(tmp_path):
        raise KeyError("a name")
    said = capsys.readouterr().err
    assert "error: the run ended by KeyError: 'a name'; " in said and "MiB are free" in said
    assert "--resume continues from checkpoint-5" in said
    assert "KeyError" in (tmp_path / "stacks-rank0.txt").read_text()


def test_a_judge_s_spent_budget_says_so_and_where_the_run_goes_on(tmp_path, capsys):
    judge = endpoint.Endpoint(
        "m", tmp_path / "judge.jsonl", "http://127.0.0.1:9/v1", budget=1e-6, price=(5.0, 15.0)
    )
    with pytest.raises(SystemExit) as error, loop(tmp_path):
        judge.ask([{"messages": [{"role": "user", "content": "?"}], "max_tokens": 100}])
    said = capsys.readouterr().err
    assert error.value.code == 2 and "the next call could pass the budget of $1e-06; spent $0.0000" in said
    assert "there is no checkpoint yet" in said


# --- weights and rewards that are not numbers


def test_weights_that_are_missing_or_not_finite_are_refused(tmp_path, capsys):
    name = "model.layers.1.mlp.down_proj.weight"
    good = load_file(ROOT / "data/toy/base/model.safetensors")
    bad = good[name].clone()
    bad[3, 3] = torch.nan
    without = {other: weight for other, weight in good.items() if other != name}
    cases = [
        ({**good, name: bad}, f"1 weights are not finite, e.g. {name}"),
        (without, f"1 weights are missing, e.g. {name}"),
        (None, "its weights cannot be read"),
    ]
    tokenizer = chat.load_tokenizer(str(ROOT / "data/toy/base"))
    for number, (weights, message) in enumerate(cases):
        folder = Path(shutil.copytree(ROOT / "data/toy/base", tmp_path / str(number)))
        if weights:
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
        else:
            os.truncate(folder / "model.safetensors", 1_000_000)
        calls = (
            (policy.load_policy, (str(folder), 0, False)),
            (rollout.Sampler, (str(folder), tokenizer, rollout.Sampling(0.0, 2), False)),
        )
        for load, arguments in calls:
            with pytest.raises(SystemExit) as error:
                load(*arguments)
            assert error.value.code == 2 and f"{folder}: {message}" in capsys.readouterr().err

    folder = Path(shutil.copytree(ROOT / "data/toy/reward_model", tmp_path / "reward"))
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit):
        load_reward_model(train_grpo.Args(reward_model=str(folder)), "cpu")
    assert f"{folder}: 1 weights are not finite, e.g. score.weight" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(prompts, tmp_path, capsys):
    run = tmp_path / "run"
    words = [*TINY, "--prompts", prompts, "--learning-rate", "1e30", "--save-steps", "1", "--out", run]
    words += ["--stall-minutes", "10"]  # a stall would end the process of the tests
    with pytest.raises(FloatingPointError, match="step "):
        run_here([sys.executable, *map(str, words)])
    text = capsys.readouterr().err
    assert "error: the run ended by FloatingPointError: step " in text
    steps = whole_steps(run)
    last = f"--resume continues from checkpoint-{steps[-1]}" if steps else "there is no checkpoint yet"
    assert last in text
    for step in steps:
        weights = load_file(run / f"checkpoint-{step}" / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())
    kept = [json.loads(line) for line in (run / "not_finite-rank0.jsonl").read_text().splitlines()]
    assert len(kept) == 16 and all(row["ids"] and row["text"] for row in kept)


# --- a run that is stopped, hangs, or loses a process


def test_sigterm_stops_with_a_checkpoint(prompts, tmp_path):
    run = tmp_path / "run"
    words = [*TINY, "--prompts", prompts, "--save-steps", "1000", "--out", run]
    output = tmp_path / "output"
    process = started([*words, "--steps", "1000"], output)
    while not rows_of(run):
        assert process.is_alive(), output.read_text()[-3000:]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    code, text = end_of_fork(process, output)
    [step] = whole_steps(run)
    assert code == 143, text[-3000:]
    assert f"stopped by SIGTERM after step {step}; --resume continues from checkpoint-{step}" in text
    assert not (run / "summary.json").exists()
    assert [row["step"] for row in rows_of(run)] == list(range(1, step + 1))


def test_a_judge_that_hangs_ends_the_run(prompts, tmp_path):
    """It breaks off the first call and answers no repeat; the client alone would wait 8 times 2 minutes for each."""
    run = tmp_path / "run"
    server = ChatServer(lambda text, n: Fault("reset") if n == 0 else time.sleep(3600))
    judge = ["--rewards", "judge_mark:1", "--judge", "m", "--judge-url", server.url]
    output = tmp_path / "output"
    code, text = end_of_fork(started([*TINY, "--prompts", prompts, *judge, "--out", run], output), output)
    assert code == 124 and "no rank has made progress for 6 seconds" in text, text[-3000:]
    stacks = (run / "stacks-rank0.txt").read_text()
    assert "rlmt/endpoint.py" in stacks and "scorer.py" in stacks and stacks.count("hread 0x") > 1
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("seconds", "code"), [(7, 0), (60, 124)])
def test_a_slow_judge_is_waited_for_as_long_as_a_call_may_take(seconds, code, waiting):
    """A first call may take longer than --stall-minutes. Where it times out too, a repeat may not."""
    processes, folder = waiting
    name = f"asks for {seconds}"
    found, text = end_of_fork(processes[name], folder / name / "output")
    assert found == code and ("the reply" in text) == (code == 0), text[-2000:]


def rank_1(launcher: subprocess.Popen) -> psutil.Process:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return next(child for child in children if child.environ().get("RANK") == "1")


def test_two_processes_stop_together_and_end_when_one_dies_or_hangs(prompts, tmp_path):
    run = tmp_path / "run"
    words = [*DDP, *TINY, "--prompts", prompts, "--steps", "1000", "--save-steps", "2", "--out", run]

    process = start(words)
    wait_for_step(process, run, 3)
    process.send_signal(signal.SIGTERM)  # to the launcher, by a scheduler
    code, text = end_of(process)
    step = whole_steps(run)[-1]
    assert code != 0 and f"stopped by SIGTERM after step {step};" in text, text[-3000:]
    assert [row["step"] for row in rows_of(run)] == list(range(1, step + 1))

    process = start([*words, "--resume"])
    wait_for_step(process, run, step + 2)
    rank_1(process).kill()
    code, text = end_of(process)
    assert code == 1 and f"resumes from {run}/checkpoint-{step}" in text, text[-3000:]
    assert (run / "stacks-rank0.txt").stat().st_size
    assert [row["step"] for row in rows_of(run)] == list(range(1, len(rows_of(run)) + 1))

    step = whole_steps(run)[-1]
    # forked, as the launcher has no part in it; without checkpoints: while one is written, ten times as long may pass
    output = tmp_path / "output"
    ranks = started_ranks([*words, "--resume", "--save-steps", "1000"], output)
    while not any(
        row["step"] >= step + 4 for row in rows_of(run)
    ):  # the log of the run before reaches to step + 2 at most
        assert all(rank.is_alive() for rank in ranks), output.read_text()[-3000:]
        time.sleep(0.05)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    code, text = end_of_fork(ranks[0], output)
    ranks[1].kill()
    assert code == 124 and "no rank has made progress for 6 seconds" in text, text[-3000:]
    for rank in (0, 1):
        assert "most recent call first" in (run / f"stacks-rank{rank}.txt").read_text()
