"""The rewards and updates of GRPO and of PPO on two processes, with DDP and with FSDP2, are those of one.

    accelerate launch --config_file accelerate/2cpu.yaml tests/scripts/test_two_processes.py

prints what they are, as JSON behind the word `updates:`.
"""

import json
import sys
from pathlib import Path

import ppo_updates
import pytest
import grpo_updates
from launch import DDP, FSDP2, finished

from rlmt import model as policy
from rlmt import run as rlmt_run
from rlmt import sampler as rollout
import train_grpo
from accelerate.utils import gather_object
from rewards.scorer import Scorer
from rlmt.run import load_function

RESULT = "updates: "


n_scored = []  # rows of each call of `relative_length`


def relative_length(rows):
    """A reward of one's own: a process scores its own completions."""
    n_scored.append(len(rows))
    return [row["n_tokens"] / row["scale"] for row in rows]


def small(rows):
    return [float(row["scale"] < 9) for row in rows]


def scored() -> dict:
    """Rewards of groups as in GRPO, and of a whole step as in PPO, where every fifth completion gets a
    floor."""
    accelerator = policy.start_accelerator()
    own_reward = f"{__file__}:relative_length"
    found = {}
    for name, group_size in (("GRPO", 3), ("PPO", 12)):
        args = train_grpo.Args(rewards=(f"{own_reward}:1", f"{__file__}:small:gate"))
        [completions] = grpo_updates.stored_completions(12, 1)
        for i, completion in enumerate(completions):
            completion.prompt = {"scale": 1 + i}
            completion.status = "no_open" if i % 5 == 4 else "ok"
        own = rollout.share_of(completions, accelerator)
        Scorer(args, None, Path(), accelerator).set_rewards(own, group_size, None)
        found[name] = gather_object([completion.reward for completion in own])
    return found | {"n_scored": load_function(own_reward).__globals__["n_scored"][-1]}


def updates() -> dict:
    rewards = scored()
    ppo = ppo_updates.main()  # first: under FSDP2 the other ends in bfloat16
    return {"rewards": rewards, "ppo": ppo, "grpo": grpo_updates.main()}


@pytest.fixture(scope="module")
def one_process() -> dict:
    return updates()


@pytest.mark.parametrize("launcher", [DDP, FSDP2], ids=["DDP", "FSDP2"])
def test_two_processes_make_the_updates_of_one(launcher, one_process):
    said = finished([sys.executable, *launcher, "tests/scripts/test_two_processes.py"])
    [result] = [line for line in said.splitlines() if line.startswith(RESULT)]
    found = json.loads(result.removeprefix(RESULT))

    expected = one_process["rewards"]
    assert found["rewards"] == {**expected, "n_scored": 6} and expected["n_scored"] == 12
    assert len(set(expected["PPO"])) > 5
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
