"""Tests dev/gpu_check.py on a machine without a GPU."""

import inspect
import json
import sys
from pathlib import Path

import pytest
from script_runs import run_here

from dev import bench, gpu_check

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check(monkeypatch):
    """Calls dev.gpu_check with the fields of its Args; it would take SIGTERM over."""
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    return lambda **fields: gpu_check.main(gpu_check.Args(**fields))


def test_without_a_gpu_it_says_so(check, exits):
    said = exits(check)
    assert "no GPU" in said and "--cpu" in said


def test_a_step_passes_once_and_is_not_repeated(check, tmp_path, monkeypatch, capsys):
    run_in_a_process = gpu_check.Runner.run

    def run(runner, name, words):
        if words[0] == "-m":  # a fresh clone makes the rows of the toy world
            run_in_a_process(runner, name, words)
        else:
            run_here([sys.executable, *map(str, words)])

    monkeypatch.setattr(gpu_check.Runner, "run", run)
    assert check(cpu=True, steps=("reward", "memory"), out=str(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "PASS reward" in said and "SKIP memory" in said
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert written["steps"]["reward"]["numbers"]["last loss"] > 0
    assert written["steps"]["reward"]["commit"] == bench.commit_of(ROOT)
    assert "| reward | PASS |" in (tmp_path / "table.md").read_text()

    check(cpu=True, steps=("reward",), out=str(tmp_path), resume=True)
    assert capsys.readouterr().out == "PASS reward (before)\n"


@pytest.fixture
def runner(tmp_path) -> gpu_check.Runner:
    return gpu_check.Runner(gpu_check.Args(out=str(tmp_path)))


def test_a_command_that_fails_gives_its_last_line(runner):
    with pytest.raises(gpu_check.Failed, match=r"the remedy \(exit code 3, wrong.log\)"):
        runner.run("wrong", ["-c", "print('the remedy'); raise SystemExit(3)"])


def test_the_error_of_a_rank_is_found_in_front_of_what_the_launcher_prints():
    log = """Traceback (most recent call last):
[rank0]: RuntimeError: the remedy
E1124 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)
============================================================"""
    assert gpu_check.error_line(log) == "[rank0]: RuntimeError: the remedy"


def test_a_step_that_fails_keeps_its_numbers_and_does_not_end_the_check(check, tmp_path, monkeypatch):
    def too_far(runner, name):
        raise gpu_check.Failed("too far", {"gap": 0.5})

    def broken(runner, name):
        return {}["no such key"]

    monkeypatch.setattr(gpu_check, "STEPS", {"far": [too_far], "broken": [broken]})
    assert check(cpu=True, out=str(tmp_path)) == 1
    steps = json.loads((tmp_path / "cpu.json").read_text())["steps"]
    assert steps["far"]["numbers"] == {"gap": 0.5} and steps["far"]["result"] == "FAIL"
    assert steps["broken"]["reason"] == "KeyError: 'no such key'"
    assert "| too far; gap 0.5 |" in (tmp_path / "table.md").read_text()


def test_a_command_ends_with_the_time_of_its_step(runner):
    runner.step_ends = 0
    with pytest.raises(gpu_check.Failed, match="took longer than 480 s"):
        runner.run("slow", ["-c", "import time; time.sleep(60)"])


def test_a_command_imports_from_the_folders_of_the_caller(runner, tmp_path, monkeypatch):
    (tmp_path / "carried.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    runner.run("import", ["-c", "import carried, utils"])


def test_sft_is_trained_again_when_it_is_asked_for(runner):
    """It starts a training, which has no time here, in place of passing with the log of an earlier run."""
    earlier = runner.folder / "sft"
    earlier.mkdir()
    (earlier / "summary.json").write_text("{}")
    (earlier / "metrics.jsonl").write_text('{"loss": 2.0}\n{"loss": 1.0}\n')
    runner.step_ends = 0
    with pytest.raises(gpu_check.Failed, match="took longer"):
        gpu_check.sft(runner, "sft")


def test_a_card_too_small_for_random_weights_skips(runner, monkeypatch):
    def run_out_of_memory(name, words):
        raise gpu_check.Failed("torch.OutOfMemoryError: CUDA out of memory.")

    monkeypatch.setattr(runner, "run", run_out_of_memory)
    with pytest.raises(gpu_check.Skipped, match="out of memory"):
        runner.random_models("8b")


def test_without_the_real_model_its_steps_are_skipped(tmp_path):
    runner = gpu_check.Runner(gpu_check.Args(out=str(tmp_path), small=tmp_path / "no-model"))
    for name in ("small-sft", "small-grpo"):
        function, *words = gpu_check.STEPS[name]
        with pytest.raises(gpu_check.Skipped, match="data.prepare smollm2"):
            function(runner, name, *words)


def test_every_round_of_dpo_is_read(runner, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda name, words: None)
    for number in (1, 2):
        folder = runner.folder / "dpo" / f"round-{number}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(f'{{"loss": {number}}}\n')
    assert runner.train("dpo", "train_dpo.py") == [{"loss": 1}, {"loss": 2}]


def test_an_engine_that_keeps_its_memory_in_the_update_fails():
    asleep = "held 0.020 GiB\nused 1.250 GiB\nstep 1/3\nheld 0.020 GiB\nused 2.500 GiB\n"
    assert gpu_check.used_asleep(asleep, reserved=23.8) == 2.5
    with pytest.raises(gpu_check.Failed, match="uses 23.9 GiB of the card; awake, vLLM alone has 23.8"):
        gpu_check.used_asleep(asleep + "used 23.900 GiB\n", reserved=23.8)


def test_every_step_is_in_the_table_and_can_be_called():
    for name, (function, *words) in gpu_check.STEPS.items():
        assert name in gpu_check.__doc__, name
        inspect.signature(function).bind("runner", name, *words)
