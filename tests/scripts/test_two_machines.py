"""The launch file of two machines, on two CPU processes. Each is the one that accelerate's launcher would
start there."""

import socket
import sys
from pathlib import Path

import launch
from rlmt.data import read_log
from script_runs import write_prompts


def run_both(outs: list[Path], folder: Path) -> tuple[list[int], list[str]]:
    """Runs two steps of GRPO as two machines; returns the exit codes and outputs of their processes.

    outs: the run's folder as each machine sees it.
    """
    prompts = write_prompts(folder / "prompts.jsonl", 8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank, out in enumerate(outs):
        command = f"""{sys.executable} -m accelerate.commands.launch
            --config_file accelerate/2nodes_fsdp2.yaml --num_processes 2
            --mixed_precision no --machine_rank {rank} --main_process_ip 127.0.0.1 --main_process_port {port}
            tests/fsdp_on_cpu.py train_grpo.py --preset toy --model data/toy/base --prompts {prompts} --steps 2
            --prompts-per-step 4 --group-size 4 --max-completion-tokens 24 --on-bad-format score --out {out}"""
        args, environment = launch.read_launch(command.split())
        environment |= {"MASTER_ADDR": args.main_process_ip, "MASTER_PORT": str(args.main_process_port)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        script = [args.training_script, *args.training_script_args]
        processes.append(launch.started(script, folder / f"output-{rank}", environment))
    for process in processes:
        process.join()
    said = [(folder / f"output-{rank}").read_text() for rank in (0, 1)]
    return [process.exitcode for process in processes], said


def test_two_machines_write_one_run(tmp_path):
    run = tmp_path / "run"
    codes, said = run_both([run, run], tmp_path)
    assert codes == [0, 0], said[0][-3000:] + said[1][-3000:]
    assert [line["step"] for line in read_log(run / "metrics.jsonl")] == [1, 2]
    assert len(read_log(run / "completions.jsonl")) == 2 * 4 * 4  # of both machines
    # rank 0 alone writes and prints, except its part of the weights and of the optimizer, which each has
    assert len((run / "command.txt").read_text().splitlines()) == 1
    assert "step 2/2" in said[0] and "step " not in said[1]
    written = {path.name for path in (run / "checkpoint-2").iterdir()}
    assert {"model-optimizer-rank0.pt", "model-optimizer-rank1.pt", "complete"} < written
    assert (run / "model" / "model.safetensors").exists()


def test_a_machine_that_does_not_share_the_disk_ends_the_run(tmp_path):
    codes, said = run_both([tmp_path / "a", tmp_path / "b"], tmp_path)
    assert codes == [2, 2] and all("--out on a disk that they share" in text for text in said)
    assert not list(tmp_path.glob("*/metrics.jsonl"))
