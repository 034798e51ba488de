"""The rewards and updates of GRPO and of PPO on two processes, with DDP and with FSDP2, are those of one; a process
that hangs; two machines.

    accelerate launch --config_file accelerate/2cpu.yaml tests/scripts/test_two_processes.py

prints rewards and updates, as JSON behind the word `updates:`.
"""

import ctypes
import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest
from launch import DDP, FSDP2, finished, read_launch, started, started_ranks
from script_runs import write_prompts
from updates import stored_completions, updates

from rlmt import model as policy, run as rlmt_run, sampler as rollout
import train_grpo
from accelerate.utils import gather_object
from rewards.scorer import Scorer
from rlmt.data import read_log
from rlmt.scorers import load_function

RESULT = "updates: "
TINY = (
    "train_grpo.py --preset toy --model data/toy/base --prompts-per-step 4 --group-size 4 --steps 2 "
    "--max-completion-tokens 12 --on-bad-format score --prompts"
)


# --- rewards and updates


n_scored = []  # rows of each call of `relative_length`


def relative_length(rows):
    """A reward of one's own: a process scores its own completions."""
    n_scored.append(len(rows))
    return [row["n_tokens"] / row["scale"] for row in rows]


def small(rows):
    return [float(row["scale"] < 9) for row in rows]


def scored(accelerator) -> dict:
    """Rewards of groups as in GRPO, and of a whole step as in PPO, where every fifth completion gets a
    floor."""
    own_reward = f"{__file__}:relative_length"
    found = {}
    for name, group_size in (("GRPO", 3), ("PPO", 1)):
        args = train_grpo.Args(rewards=(f"{own_reward}:1", f"{__file__}:small:gate"))
        [completions] = stored_completions(12, 1)
        for i, completion in enumerate(completions):
            completion.prompt = {"scale": 1 + i}
            completion.status = "no_open" if i % 5 == 4 else "ok"
        own = rollout.share_of(completions, accelerator)
        Scorer(args, args.rewards, None, accelerator, group_size).set_rewards(own, None)
        found[name] = gather_object([completion.reward for completion in own])
    return found | {"n_scored": load_function(own_reward).__wrapped__.__globals__["n_scored"][-1]}


def run() -> dict:
    accelerator = policy.start_accelerator()
    rlmt_run._hold_process_group()
    return {"rewards": scored(accelerator), **updates(accelerator)}


@pytest.fixture(scope="module")
def one_process() -> dict:
    return run()


@pytest.mark.parametrize("launcher", [DDP, FSDP2])
def test_two_processes_make_the_updates_of_one(launcher, one_process):
    said = finished([sys.executable, *launcher, "tests/scripts/test_two_processes.py"])
    [result] = [line for line in said.splitlines() if line.startswith(RESULT)]
    found = json.loads(result.removeprefix(RESULT))

    expected = one_process["rewards"]
    assert found["rewards"] == {**expected, "n_scored": 6} and expected["n_scored"] == 12
    assert len(set(expected["PPO"])) > 5
    for algorithm, tolerance in (("grpo", 1e-4), ("ppo", 1e-3), ("dpo", 1e-3)):
        expected = one_process[algorithm]
        for expected_step, step in zip(expected["steps"], found[algorithm]["steps"], strict=True):
            assert step == pytest.approx(expected_step, rel=tolerance, abs=0.01 * tolerance)
        assert found[algorithm]["weights"] == pytest.approx(expected["weights"], rel=0.1 * tolerance)
    if launcher is FSDP2:
        # in bfloat16 a sum of 1,500 is off by a nat
        # a reference of the dtype of forwards is the policy to the bit
        assert found["bfloat16"] == {"gradients": ["torch.float32"] * 2, "reference": ["torch.bfloat16", 0.0]}


# --- a process that hangs


n_calls = 0


def hang_in_rank_1(rows: list) -> list[float]:
    """A reward. In the second step rank 1 hangs and holds the GIL."""
    global n_calls
    n_calls += 1
    if os.environ["RANK"] == "1":
        rlmt_run.STALL_MINUTES = 0.15
        if n_calls == 2:
            ctypes.PyDLL(None).sleep(600)
    return [row["n_tokens"] for row in rows]


def test_a_process_that_hangs_ends_with_its_stacks_and_the_other_does_not_wait(tmp_path):
    output = tmp_path / "output"
    prompts = write_prompts(tmp_path / "prompts.jsonl", 12)
    own = ["--rewards", f"{__file__}:hang_in_rank_1:1", "--out", tmp_path / "run"]
    for rank in started_ranks([*DDP, *TINY.split(), prompts, *own], output):
        rank.join(120)
        assert rank.exitcode == 1
    assert re.search(r"most recent call first.*\n.* in hang_in_rank_1", output.read_text())


# --- two machines: their launch file, on two CPU processes


def run_both(outs: list[Path], folder: Path) -> tuple[list[int], list[str]]:
    """Runs two steps of GRPO as two machines; returns the exit codes and outputs of their processes. Each is the
    one that accelerate's launcher would start there.

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
            tests/fsdp_on_cpu.py {TINY} {prompts} --out {out}"""
        args, environment = read_launch(command.split())
        environment |= {"MASTER_ADDR": args.main_process_ip, "MASTER_PORT": str(args.main_process_port)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        script = [args.training_script, *args.training_script_args]
        processes.append(started(script, folder / f"output-{rank}", environment))
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
    assert len(list(run.glob("checkpoint-2/model-optimizer-rank?.pt"))) == 2


def test_a_machine_that_does_not_share_the_disk_ends_the_run(tmp_path):
    codes, said = run_both([tmp_path / "a", tmp_path / "b"], tmp_path)
    assert codes == [2, 2] and all("--out on a disk that they share" in text for text in said)
    assert not list(tmp_path.glob("*/metrics.jsonl"))


if __name__ == "__main__":
    found = run()
    policy.PartialState().print(RESULT + json.dumps(found))
    policy.PartialState().destroy_process_group()
