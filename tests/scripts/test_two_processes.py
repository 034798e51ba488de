"""The updates of GRPO and of PPO on two processes, with DDP and with FSDP2, are those of one.

    accelerate launch --config_file accelerate/2cpu.yaml tests/scripts/test_two_processes.py

prints what they are, as JSON behind the word `updates:`.
"""

import json
import sys

import ppo_updates
import pytest
import grpo_updates
from launch import DDP, FSDP2, finished

from rlmt import model as policy
from rlmt import run as rlmt_run

RESULT = "updates: "


def updates() -> dict:
    ppo = ppo_updates.main()  # first: under FSDP2 the other ends in bfloat16
    return {"ppo": ppo, "grpo": grpo_updates.main()}


@pytest.fixture(scope="module")
def one_process() -> dict:
    return updates()


@pytest.mark.parametrize("launcher", [DDP, FSDP2], ids=["DDP", "FSDP2"])
def test_two_processes_make_the_updates_of_one(launcher, one_process):
    said = finished([sys.executable, *launcher, "tests/scripts/test_two_processes.py"])
    [result] = [line for line in said.splitlines() if line.startswith(RESULT)]
    found = json.loads(result.removeprefix(RESULT))

    for algorithm, tolerance in (("grpo", 1e-4), ("ppo", 1e-3)):
        expected = one_process[algorithm]
        for expected_step, step in zip(expected["steps"], found[algorithm]["steps"], strict=True):
            assert step == pytest.approx(expected_step, rel=tolerance, abs=0.01 * tolerance)
        assert found[algorithm]["weights"] == pytest.approx(expected["weights"], rel=0.1 * tolerance)
    check_what_each_process_holds(launcher, one_process["grpo"], found["grpo"])


def check_what_each_process_holds(launcher: list[str], one_process: dict, found: dict) -> None:
    assert any(name.startswith("LoRA") for name in found["weights"])
    for expected, statistics in zip(one_process["statistics"], found["statistics"], strict=True):
        assert statistics == pytest.approx(expected, rel=1e-4)
    assert found["gradients are summed in"] == "torch.float32"  # in bfloat16 a sum of 1,500 is off by a nat

    # sharded, a model is read by one process; the others wait for their shards without weights
    assert found["loaded to"] == (["cpu", "meta"] if launcher is FSDP2 else ["cpu", "cpu"])
    assert found["reward model"] == pytest.approx(2 * one_process["reward model"])  # whole on each of them
    # where forwards run in bfloat16, a reference of that dtype is the policy to the bit
    if launcher is FSDP2:
        assert found["bfloat16 reference"] == ["torch.bfloat16", 0.0]
        dtype, norm = found["bfloat16 adapter"]
        assert dtype == "torch.float32" and 0 < norm < 100
    for result in (one_process, found):
        for held in result["bytes held"]:
            assert held == pytest.approx(result["bytes planned"], rel=0.05)


if __name__ == "__main__":
    found = updates()
    policy.PartialState().print(RESULT + json.dumps(found))
    rlmt_run.leave()
