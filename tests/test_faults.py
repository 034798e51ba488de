"""Runs that are broken for real while they train: signals, a full disk, damaged files, a clock that jumps, a judge that hangs.

`FAULTS=results/faults.md pytest tests/test_faults.py` writes the table of what was injected and how each run came through.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from test_scripts import (  # noqa: F401  (fixtures)
    DPO,
    ENV,
    GRPO,
    ROOT,
    command,
    jsonl,
    list_of_lines,
    numbers,
    run,
    same_weights,
    shared,
    toy_data,
    whole,
)
from transformers import AutoModelForCausalLM

import endpoint
import faults
import runs
import training
import utils

ROWS = []


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    if "FAULTS" in os.environ:
        survived = sum(r["survived"] for r in ROWS)
        head = [
            "# Faults",
            "",
            "`FAULTS=results/faults.md python -m pytest tests/test_faults.py` broke real runs of the toy world on a "
            f"CPU: {len(ROWS)} faults injected, {survived} survived (ended or went on as the last column says, nothing lost).",
            "",
            "| fault | how | what happened | survived |",
            "|---|---|---|---|",
        ]
        lines = [
            f"| {r['fault']} | {r['how']} | {r['outcome']} | {'yes' if r['survived'] else 'NO'} |"
            for r in ROWS
        ]
        Path(os.environ["FAULTS"]).write_text("\n".join(head + lines) + "\n")


@contextlib.contextmanager
def fault(name: str, how: str, outcome: str):
    """A row of the table; survived if nothing within raises. Yields a dict whose values the outcome may name."""
    row, seen = {"fault": name, "how": how, "survived": False, "outcome": outcome}, {}
    ROWS.append(row)
    yield seen
    row.update(survived=True, outcome=outcome.format(**seen))


def start(*args, **kwargs) -> subprocess.Popen:
    return subprocess.Popen(
        command(*args),
        cwd=ROOT,
        env={**ENV, **kwargs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen, out: Path, step: int) -> None:
    while not any(json.loads(line)["step"] >= step for line in list_of_lines(out / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.05)


def end(process: subprocess.Popen, within: float = 60) -> tuple[int, str, float]:
    """Exit code, output, and the seconds that it took."""
    began = time.monotonic()
    text = process.communicate(timeout=within)[0]
    return process.returncode, text, time.monotonic() - began


def whole_steps(out: Path) -> list[int]:
    return [int(c.name[11:]) for c in faults.numbered(out) if not faults.flaw(c)]


@pytest.fixture
def of_run(monkeypatch):
    """of_run(folder): this process judges checkpoints as the run of that folder does."""

    def take(folder: Path) -> None:
        sealed = next(c for c in faults.numbered(folder) if (c / "complete").exists()) / "complete"
        monkeypatch.setattr(faults.RUN, "key", json.loads(sealed.read_text())["run"])

    return take


@pytest.fixture(scope="module")
def args(toy_data):  # noqa: F811
    return [*GRPO, "--prompts", toy_data / "rl_prompts.jsonl"]


@pytest.fixture(scope="module")
def unbroken(args, shared) -> Path:  # noqa: F811
    """The run that all others must end like, to the bit."""
    return whole(shared, *args)


def ends_like(unbroken: Path, out: Path) -> bool:  # noqa: F811
    rows = [jsonl(x / "completions.jsonl") for x in (unbroken, out)]
    return same_weights(unbroken, out) and numbers(unbroken) == numbers(out) and rows[0] == rows[1]


# --- one process

JUMPS = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *); static unsigned calls;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += calls++ / 3 % 2 ? 86400 : -86400;
    return done;
}
"""


@dataclass
class Args:
    """What runs.start_run needs of a script's arguments."""

    out: str
    overwrite: bool = False
    resume: bool = False
    preset: str = ""
    seed: int = 0


def test_sigterm_a_second_run_and_a_clock_that_jumps(args, unbroken, of_run, tmp_path, capsys):
    out, preload = tmp_path / "run", tmp_path / "jumps.so"
    (tmp_path / "jumps.c").write_text(JUMPS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", preload, tmp_path / "jumps.c", "-ldl"], check=True)
    clock = subprocess.run(
        command("-c", "import time; print(*(int(time.time()) for _ in range(9)))"),
        capture_output=True,
        env={**ENV, "LD_PRELOAD": str(preload)},
        text=True,
    ).stdout.split()
    assert max(map(int, clock)) - min(map(int, clock)) > 100_000
    rare = ["--save-steps", 100, "--out", out]
    process = start(*args, *rare, LD_PRELOAD=str(preload))
    wait_for_step(process, out, 1)
    before = (out / "config.json").read_bytes()
    with fault(
        "two runs in one folder",
        "a second start with --overwrite while the first trains",
        "refused (exit code 2) with the pid; nothing touched",
    ):
        with pytest.raises(SystemExit) as e:
            runs.start_run(Args(str(out), overwrite=True), "grpo", "base")
        assert e.value.code == 2 and f"in use by process {process.pid} on" in capsys.readouterr().err
        assert (out / "config.json").read_bytes() == before and (out / "metrics.jsonl").exists()
    with fault(
        "SIGTERM",
        "to a single process in step 2 or later",
        "checkpoint-{step} written, exit code 143 after {s:.0f} s; resumed run equals an unbroken one to the bit",
    ) as seen:
        process.send_signal(signal.SIGTERM)
        code, text, seen["s"] = end(process)
        assert code == 143, text[-2000:]
        of_run(out)
        [step] = whole_steps(out)
        seen["step"] = step
        assert (
            1 <= step <= 3
            and f"stopped by SIGTERM after step {step}; --resume continues from checkpoint-{step}" in text
        )
        assert not (out / "summary.json").exists()
        with fault(
            "clock jumps",
            "LD_PRELOAD: the wall clock leaps by two days at every third call, in both runs",
            "no effect; no time in the log below zero",
        ):
            done = subprocess.run(
                command(*args, *rare, "--resume"),
                cwd=ROOT,
                env={**ENV, "LD_PRELOAD": str(preload)},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            assert ends_like(unbroken, out) and all(
                0 <= r["seconds"] < 600 for r in jsonl(out / "metrics.jsonl")
            )


def has_namespaces() -> bool:
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="a small disk of its own needs unshare -rm")
def test_a_full_disk_then_a_damaged_checkpoint(args, unbroken, tmp_path):
    """The disk holds two checkpoints, not three; grown, the run goes on, past a checkpoint in which a byte was changed."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    line = " ".join(command(*args, "--out", disk / "run"))
    model = f"{disk}/run/checkpoint-2/model.safetensors"
    script = f"""mount -t tmpfs -o size=30m tmpfs {disk}
{line} > {kept}/1 2>&1; echo $? > {kept}/code1
cp -r {disk}/run {kept}/run1
mount -o remount,size=300m {disk}
printf '\\x55' | dd of={model} bs=1 seek=2000000 conv=notrunc 2> /dev/null
{line} --resume > {kept}/2 2>&1; echo $? > {kept}/code2
cp -r {disk}/run {kept}/run2"""
    subprocess.run(["unshare", "-rm", "bash", "-c", script], cwd=ROOT, env=ENV)
    first, second = (kept / "1").read_text(), (kept / "2").read_text()
    with fault(
        "disk full",
        "a tmpfs of 30 MB, which the third checkpoint does not fit on",
        "exit code 1, the last line says how much is free; checkpoint-2 is whole",
    ):
        assert (kept / "code1").read_text() == "1\n", first[-3000:]
        assert "error: the run ended after step 3" in first and "MiB are free" in first, first[-3000:]
        assert "--resume continues from checkpoint-2" in first
        assert (kept / "run1" / "checkpoint-2" / "complete").exists() and not (
            kept / "run1" / "checkpoint-3" / "complete"
        ).exists()
    with fault(
        "checkpoint corrupt",
        "one byte of checkpoint-2's weights changed, then --resume",
        "named and passed over; resumed from checkpoint-1, equal to an unbroken run to the bit",
    ):
        assert (kept / "code2").read_text() == "0\n", second[-3000:]
        assert (
            "checkpoint-2 has a model.safetensors that is not what was written" in second
            and "checkpoint-3 was not written" in second
        )
        assert "checkpoint-1" in second.partition("resumes from ")[2].splitlines()[0]
        assert ends_like(unbroken, kept / "run2")


def test_killed_after_the_last_checkpoint(args, unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    shutil.rmtree(out / "model")
    (out / "summary.json").unlink()
    with fault(
        "killed after the last step",
        "the final model not there yet, then --resume",
        "no step too many; equal to an unbroken run to the bit",
    ):
        run(*args, "--out", out, "--resume")
        assert ends_like(unbroken, out) and (out / "summary.json").exists()


def test_damaged_and_foreign_checkpoints(unbroken, of_run, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    of_run(out)
    old, new = faults.numbered(out)
    assert training.last_checkpoint(out) == new == out / "checkpoint-4"

    def rewrite(path: Path, change) -> None:
        path.write_bytes(change(path.read_bytes()))

    foreign = lambda text: json.dumps({**json.loads(text), "run": "abcdef"}).encode()
    half = lambda data: data[: len(data) // 2]
    cases = [
        ("checkpoint cut in half", "optimizer.pt", half, "bytes of optimizer.pt instead of"),
        ("a file of a checkpoint gone", "rng_state.pth", None, "lacks rng_state.pth"),
        ("list of files cut in half", "complete", half, "lists no files"),
        ("checkpoint of another run", "complete", foreign, "belongs to another run"),
        ("killed while saving", "complete", None, "was not written to its end"),
    ]
    for name, file, change, message in cases:
        with fault(
            name,
            f"newest checkpoint: {file} {'changed' if change else 'deleted'}; what --resume then takes",
            "named and passed over; the one before is taken",
        ):
            kept = (new / file).read_bytes()
            rewrite(new / file, change) if change else (new / file).unlink()
            assert training.last_checkpoint(out) == old
            assert f"{new} " in (said := capsys.readouterr().err) and message in said
            (new / file).write_bytes(kept)
    (out / "checkpoint-best").mkdir()
    (out / "checkpoint-99").mkdir()
    assert training.last_checkpoint(out) == new
    with fault(
        "every checkpoint damaged",
        "weights cut in half in both",
        "exit code 2, both named; training does not start anew unasked",
    ):
        for checkpoint in (old, new):
            rewrite(checkpoint / "model.safetensors", half)
        with pytest.raises(SystemExit) as e:
            training.last_checkpoint(out)
        said = capsys.readouterr().err
        assert (
            e.value.code == 2
            and "no checkpoint to resume from: checkpoint-4 has" in said
            and "checkpoint-3 has" in said
        )


def test_a_checkpoint_is_deleted_only_when_a_newer_one_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(faults.RUN, "keep", 1)
    for step in (9, 10, 11, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights").write_text("x")
    faults.seal(tmp_path / "checkpoint-9")
    (tmp_path / "checkpoint-11" / "complete").mkdir()  # a disk that does not take the last file
    with pytest.raises(OSError):
        faults.seal(tmp_path / "checkpoint-11")
    assert whole_steps(tmp_path) == [9]
    faults.seal(tmp_path / "checkpoint-100")
    assert [c.name for c in faults.numbered(tmp_path)] == ["checkpoint-100"]


def test_a_judge_that_hangs(args, tmp_path):
    """It accepts every call and never answers; the client alone would wait 9 times 2 minutes for each."""
    out, server = tmp_path / "run", socket.create_server(("127.0.0.1", 0), backlog=64)
    with fault(
        "stuck judge",
        "an endpoint that accepts calls and never answers, --stall-minutes 0.1",
        "exit code 124 after {s:.0f} s with the stacks of all threads",
    ) as seen:
        process = start(
            *args,
            "--rewards",
            "judge_mark:1",
            "--judge",
            "m",
            "--judge-url",
            f"http://127.0.0.1:{server.getsockname()[1]}/v1",
            "--stall-minutes",
            0.1,
            "--out",
            out,
            OPENAI_API_KEY="EMPTY",
        )
        server.accept()
        code, text, seen["s"] = end(process)
        stacks = (out / "stacks-rank0.txt").read_text()
        assert code == 124 and "no rank has made progress for 6 seconds" in text, text[-2000:]
        assert "endpoint.py" in stacks and "rollout.py" in stacks and stacks.count("hread 0x") > 1


@pytest.mark.parametrize(
    "name, number, code, seconds", [("dead", signal.SIGKILL, 1, 45), ("stuck", signal.SIGSTOP, 124, 90)]
)
def test_the_sampler_s_engine(toy_data, tmp_path, name, number, code, seconds):  # noqa: F811
    """train_dpo.py's vLLM is a process of its own, which is hit while it starts: ten times --stall-minutes is its limit."""
    out = tmp_path / "run"
    with fault(
        f"{name} rollout engine",
        f"{number.name} to vLLM's process",
        "exit code {code} after {s:.0f} s with the stacks",
    ) as seen:
        process = start(
            *DPO,
            "--model",
            "data/toy/base",
            "--prompts",
            toy_data / "rl_prompts.jsonl",
            "--rollout",
            "vllm",
            "--rounds",
            1,
            "--stall-minutes",
            0.06,
            "--out",
            out,
        )
        engine = None
        while not engine:
            assert process.poll() is None, process.communicate()[0][-3000:]
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            engine = next(
                (int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()), None
            )
            time.sleep(0.1)
        os.kill(engine, number)
        seen["code"], text, seen["s"] = end(process, seconds)
        assert seen["code"] == code, text[-2000:]
        assert "utils.py" in (out / "stacks-rank0.txt").read_text()
        status = Path(f"/proc/{engine}/status")
        assert (
            not status.exists() or "zombie" in status.read_text()
        )  # dead, though perhaps nobody has asked for its exit code


def test_a_step_that_is_not_finite(toy_data, of_run, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    with fault(
        "loss not finite",
        "SFT with --learning-rate 1e30",
        "exit code 1 before the next checkpoint; the batch is kept; the weights of all checkpoints are finite",
    ):
        done = run(
            "train_sft_warmstart.py",
            "--preset",
            "toy",
            "--traces",
            toy_data / "sft_traces.jsonl",
            "--learning-rate",
            1e30,
            "--save-steps",
            1,
            "--out",
            out,
            ok=False,
        )
        assert done.returncode == 1 and "FloatingPointError: " in done.stderr, done.stderr[-2000:]
        of_run(out)
        steps = whole_steps(out)
        assert f"--resume continues from checkpoint-{steps[-1]}" in done.stderr
        assert all(
            t.isfinite().all()
            for n in steps
            for t in load_file(out / f"checkpoint-{n}" / "model.safetensors").values()
        )
        batch = load_file(out / "not_finite-rank0.safetensors")
        assert batch["0.input_ids"].shape == batch["0.labels"].shape and (batch["0.labels"] >= 0).any()


def test_weights_that_are_no_weights(tmp_path, capsys):
    name = "model.layers.1.mlp.down_proj.weight"
    good = load_file(ROOT / "data/toy/base/model.safetensors")
    bad = good[name].clone()
    bad[3, 3] = torch.nan
    cases = {
        "NaN in a policy's weights": ({**good, name: bad}, f"1 weights are not finite, e.g. {name}"),
        "a weight that is missing": (
            {k: v for k, v in good.items() if k != name},
            f"1 weights are missing, e.g. {name}",
        ),
        "weights cut in half": (None, "its weights cannot be read"),
    }
    for n, (case, (tensors, message)) in enumerate(cases.items()):
        folder = tmp_path / str(n)
        shutil.copytree(ROOT / "data/toy/base", folder)
        path = folder / "model.safetensors"
        save_file(tensors, path, {"format": "pt"}) if tensors else os.truncate(path, path.stat().st_size // 2)
        with fault(
            case, "--model is such a folder", "exit code 2 before training; folder and weight are named"
        ):
            with pytest.raises(SystemExit) as e:
                training.load_weights(AutoModelForCausalLM, str(folder))
            assert e.value.code == 2 and f"{folder}: {message}" in capsys.readouterr().err
    folder = tmp_path / "reward"
    shutil.copytree(ROOT / "data/toy/reward_model", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with fault(
        "a reward model that is not finite",
        "an infinite weight in its head",
        "exit code 2 before training; the weight is named",
    ):
        with pytest.raises(SystemExit):
            runs.or_fail(utils.RewardModel, str(folder))
        assert "has no weights for score.weight (not finite)" in capsys.readouterr().err


def test_a_clock_that_is_wrong_does_not_change_how_long_to_wait():
    headers = {"date": "Mon, 01 Jan 2001 00:00:00 GMT", "retry-after": "Mon, 01 Jan 2001 00:00:07 GMT"}
    assert endpoint.retry_after(headers) == 7


# --- two processes


def rank_1(launcher: subprocess.Popen) -> int:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return next(
        int(pid) for pid in children if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    )


def test_a_rank_that_dies_or_hangs_and_sigterm_to_the_launcher(args, of_run, tmp_path):
    out = tmp_path / "run"
    two = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate/2cpu.yaml",
        "--main_process_port",
        0,
        *args,
        "--steps",
        40,
        "--save-steps",
        2,
        "--stall-minutes",
        0.1,
        "--out",
        out,
    ]
    with fault(
        "a rank dies",
        "SIGKILL to one of two processes",
        "all ended {s:.0f} s later, exit code 1; rank 0's stacks; whole checkpoints: {steps}",
    ) as seen:
        process = start(*two)
        wait_for_step(process, out, 4)
        os.kill(rank_1(process), signal.SIGKILL)
        code, text, seen["s"] = end(process)
        of_run(out)
        seen["steps"] = steps = whole_steps(out)
        assert code == 1 and steps and steps[-1] >= 2, text[-2000:]
        assert (out / "stacks-rank0.txt").stat().st_size
    with fault(
        "a rank hangs",
        "the same command with --resume; SIGSTOP to one of two processes; --stall-minutes 0.1",
        "all ended {s:.0f} s later, exit code 1; stacks of both ranks",
    ) as seen:
        process = start(*two, "--resume")
        wait_for_step(process, out, steps[-1] + 3)
        os.kill(rank_1(process), signal.SIGSTOP)
        code, text, seen["s"] = end(process)
        assert code == 1 and "no rank has made progress for 6 seconds" in text, text[-2000:]
        assert f"checkpoint-{steps[-1]}" in text.partition("resumes from ")[2].splitlines()[0]
        for rank in (0, 1):
            assert (
                "most recent call " in (out / f"stacks-rank{rank}.txt").read_text()
            )  # first: a dump; last: of an exception
    with fault(
        "SIGTERM from a scheduler",
        "the same command with --resume; SIGTERM to the launcher of two processes",
        "both stopped after step {step} with a checkpoint, {s:.0f} s later",
    ) as seen:
        steps = whole_steps(out)
        process = start(*two, "--resume")
        wait_for_step(process, out, steps[-1] + 2)
        process.send_signal(signal.SIGTERM)
        code, text, seen["s"] = end(process)
        seen["step"] = step = whole_steps(out)[-1]
        assert code != 0 and f"stopped by SIGTERM after step {step};" in text, text[-2000:]
        assert {f"rng_state_{rank}.pth" for rank in (0, 1)} <= {
            p.name for p in (out / f"checkpoint-{step}").iterdir()
        }
        logged = [r["step"] for r in jsonl(out / "metrics.jsonl")]
        assert logged == list(range(1, step + 1)) and not (out / "summary.json").exists()
