"""`accelerate launch` with two processes that are forked from one which has the libraries already.

A process of its own takes eight seconds of CPU time until a script's first line. The two here run the script itself, joined by
torch.distributed as torchrun joins them; what the launcher does when one of them dies is tried with the real one, in
tests/test_watchdog.py.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing import connection
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

ROOT = Path(__file__).resolve().parent.parent
ACCELERATE = ["-m", "accelerate.commands.launch"]
DDP = [*ACCELERATE, "--config_file", "accelerate/2cpu.yaml", "--main_process_port", "0"]
FSDP2 = [
    *[*ACCELERATE, "--config_file", "accelerate/8gpu_fsdp2.yaml", "--main_process_port", "0"],
    *["--num_processes", "2", "--mixed_precision", "no", "tests/fsdp_on_cpu.py"],
]
LIBRARIES = ["torch", "transformers.modeling_utils", "accelerate", "peft", "datasets", "pandas", "tyro"]


def run_script(words: list[str], environment: dict[str, str], output: str) -> None:
    """Runs a script and its arguments in this process, as the command line would."""
    os.environ.update(environment)
    os.chdir(ROOT)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def finished(command: list[str]) -> str:
    """Runs `python -m accelerate.commands.launch ...` of two processes; returns their output. A failure of one ends both."""
    words = command[command.index(ACCELERATE[1]) + 1 :]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = prepare_multi_gpu_env(args)
    assert args.num_processes == 2
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": args.master_port}
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    script = [args.training_script, *args.training_script_args]

    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(LIBRARIES)
    with tempfile.NamedTemporaryFile("r") as output:
        processes = []
        for rank in ("0", "1"):
            of_rank = environment | {"RANK": rank, "LOCAL_RANK": rank}
            processes.append(forks.Process(target=run_script, args=(script, of_rank, output.name)))
            processes[-1].start()
        running = {process.sentinel: process for process in processes}
        while running:
            for sentinel in connection.wait(running):
                ended = running.pop(sentinel)
                ended.join()
                if ended.exitcode:
                    for other in running.values():
                        other.kill()
        said = output.read()
    assert [process.exitcode for process in processes] == [0, 0], said[-4000:]
    return said
