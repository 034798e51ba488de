"""Scripts in processes that are forked from one which has the libraries already, and `accelerate launch` of
two such.

A process of its own takes eight seconds of CPU time until a script's first line. Those here run the script
itself. Two of a launch are joined by torch.distributed as torchrun joins them; the launcher itself is tried
in tests/rlmt/test_usage.py.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from argparse import Namespace
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

ROOT = Path(__file__).resolve().parent.parent
ACCELERATE = ["-m", "accelerate.commands.launch"]
DDP = [*ACCELERATE, *"--config_file accelerate/2cpu.yaml --main_process_port 0".split()]
FSDP2 = [
    *ACCELERATE,
    *(
        "--config_file accelerate/8gpu_fsdp2.yaml --main_process_port 0 --num_processes 2 --mixed_precision no "
        "tests/fsdp_on_cpu.py"
    ).split(),
]
# rlmt is first: it sets environment variables that the others read
LIBRARIES = "rlmt torch transformers.modeling_utils accelerate peft datasets pandas tyro page".split()
ENVIRONMENT = dict(os.environ)


def start_fork_server() -> None:
    """Starts the process that others are forked from, unless it runs. Its environment is the one that pytest
    began with."""
    forkserver.set_forkserver_preload(LIBRARIES)
    with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
        forkserver.ensure_running()


def run_script(words: list[str], environment: dict[str, str], output: str) -> None:
    """Runs a script and its arguments in this process, as the command line would."""
    os.environ.update(environment)
    os.chdir(ROOT)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def started(words: list, output: Path, environment: dict[str, str] | None = None) -> BaseProcess:
    """Starts `python script.py arguments ...` in a forked process, which writes to the end of the file
    `output`."""
    output.touch()
    start_fork_server()
    arguments = ([str(word) for word in words], environment or {}, str(output))
    process = multiprocessing.get_context("forkserver").Process(target=run_script, args=arguments)
    process.start()
    return process


def output_of(words: list, output: Path) -> str:
    """Runs a script to its end in a forked process; returns what it prints, which goes to the file `output`."""
    process = started(words, output)
    process.join()
    assert process.exitcode == 0, output.read_text()[-4000:]
    return output.read_text()


def read_launch(command: list[str]) -> tuple[Namespace, dict[str, str]]:
    """Reads `python -m accelerate.commands.launch ...` of two processes; returns its arguments, and what it
    tells both."""
    words = command[command.index(ACCELERATE[1]) + 1 :]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = prepare_multi_gpu_env(args)
    assert args.num_processes == 2
    return args, environment | {"WORLD_SIZE": "2"}


def started_ranks(command: list, output: Path) -> list[BaseProcess]:
    """Starts the processes of `python -m accelerate.commands.launch ...`; all write to the end of the file
    `output`."""
    args, environment = read_launch([str(word) for word in command])
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": args.master_port, "LOCAL_WORLD_SIZE": "2"}
    script = [args.training_script, *args.training_script_args]
    processes = []
    for rank in ("0", "1"):
        of_rank = environment | {"RANK": rank, "LOCAL_RANK": rank}
        processes.append(started(script, output, of_rank))
    return processes


def finished(command: list[str]) -> str:
    """Runs `python -m accelerate.commands.launch ...` of two processes; returns their output. A failure of
    one ends both."""
    with tempfile.NamedTemporaryFile("r") as output:
        processes = started_ranks(command, Path(output.name))
        running = {process.sentinel: process for process in processes}
        while running:
            for sentinel in connection.wait(running):
                ended = running.pop(sentinel)
                ended.join()
                if ended.exitcode:
                    for other in running.values():
                        other.kill()
        text = output.read()
    assert [process.exitcode for process in processes] == [0, 0], text[-4000:]
    return text
