"""The launch file of two machines, on two CPU processes. Each is the one that accelerate's launcher would
start there."""

import json
import math
import socket
import sys
from pathlib import Path

import launch
import pytest
from script_runs import weights_of

from data.toy import world
from rlmt import data as rlmt_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    for number, _, text, _ in world.orders_of("rl", 8, 0):
        rlmt_data.append_jsonl(path, [{"id": number, "messages": [{"role": "user", "content": text}]}])
    return path


def commands_of_two(prompts: Path, outs: list[Path]) -> list[list[str]]:
    """Returns each machine's command for two steps of GRPO; `outs`: the run's folder as each machine sees
    it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = []
    for rank, out in enumerate(outs):
        launcher = f"""-m accelerate.commands.launch --config_file accelerate/2nodes_fsdp2.yaml --num_processes 2
            --mixed_precision no --machine_rank {rank} --main_process_ip 127.0.0.1 --main_process_port {port}"""
        script = f"""tests/fsdp_on_cpu.py train_grpo.py --preset toy --model data/toy/base --prompts {prompts} --steps 2
            --prompts-per-step 4 --group-size 4 --max-completion-tokens 24
            --on-bad-format score --out {out}"""
        commands.append([sys.executable, *launcher.split(), *script.split()])
    return commands


def shapes_of(model: Path) -> dict[str, tuple]:
    return {name: tuple(weight.shape) for name, weight in weights_of(model).items()}


def run_both(prompts: Path, outs: list[Path], folder: Path) -> tuple[list[int], list[str]]:
    """Runs the process that each machine's launcher would start; returns their exit codes and outputs."""
    processes = []
    for rank, command in enumerate(commands_of_two(prompts, outs)):
        args, environment = launch.read_launch(command)
        environment |= {"MASTER_ADDR": args.main_process_ip, "MASTER_PORT": str(args.main_process_port)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        script = [args.training_script, *args.training_script_args]
        processes.append(launch.started(script, folder / f"output-{rank}", environment))
    for process in processes:
        process.join()
    printed = [(folder / f"output-{rank}").read_text() for rank in (0, 1)]
    return [process.exitcode for process in processes], printed


def test_two_machines_write_one_run(prompts, tmp_path):
    run = tmp_path / "run"
    codes, printed = run_both(prompts, [run, run], tmp_path)
    assert codes == [0, 0], printed[0][-3000:] + printed[1][-3000:]

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in metrics)
    assert len((run / "completions.jsonl").read_text().splitlines()) == 2 * 4 * 4  # of both machines
    # rank 0 alone writes and prints, except its part of the weights and of the optimizer, which each has
    assert len((run / "command.txt").read_text().splitlines()) == 1
    assert "step 2/2" in printed[0] and "step " not in printed[1]
    written = {path.name for path in (run / "checkpoint-2").iterdir()}
    assert {"model-optimizer-rank0.pt", "model-optimizer-rank1.pt", "complete"} < written
    assert shapes_of(run / "model") == shapes_of(ROOT / "data/toy/base")
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "run", "output-0", "output-1"}


def test_a_machine_that_does_not_share_the_disk_is_named(prompts, tmp_path):
    codes, printed = run_both(prompts, [tmp_path / "a", tmp_path / "b"], tmp_path)
    reason = "they need --out on a disk that they share"
    assert 0 not in codes and all(reason in text for text in printed), printed[0][-3000:]
    assert not list(tmp_path.glob("*/checkpoint-*")) and not (tmp_path / "a" / "metrics.jsonl").exists()
