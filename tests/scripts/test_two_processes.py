"""The rewards and updates of GRPO and of PPO on two processes, with DDP and with FSDP2, are those of one.

    accelerate launch --config_file accelerate/2cpu.yaml tests/scripts/test_two_processes.py

prints what they are, as JSON behind the word `updates:`.
"""

import json
import sys
from pathlib import Path

import pytest
from launch import DDP, FSDP2, finished
from updates import stored_completions, updates

from rlmt import model as policy, run as rlmt_run, sampler as rollout
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


def scored(accelerator) -> dict:
    """Rewards of groups as in GRPO, and of a whole step as in PPO, where every fifth completion gets a
    floor."""
    own_reward = f"{__file__}:relative_length"
    found = {}
    for name, group_size in (("GRPO", 3), ("PPO", 12)):
        args = train_grpo.Args(rewards=(f"{own_reward}:1", f"{__file__}:small:gate"))
        [completions] = stored_completions(12, 1)
        for i, completion in enumerate(completions):
            completion.prompt = {"scale": 1 + i}
            completion.status = "no_open" if i % 5 == 4 else "ok"
        own = rollout.share_of(completions, accelerator)
        Scorer(args, None, Path(), accelerator).set_rewards(own, group_size, None)
        found[name] = gather_object([completion.reward for completion in own])
    return found | {"n_scored": load_function(own_reward).__globals__["n_scored"][-1]}


def run() -> dict:
    accelerator = policy.start_accelerator()
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
    for algorithm, tolerance in (("grpo", 1e-4), ("ppo", 1e-3)):
        expected = one_process[algorithm]
        for expected_step, step in zip(expected["steps"], found[algorithm]["steps"], strict=True):
            assert step == pytest.approx(expected_step, rel=tolerance, abs=0.01 * tolerance)
        assert found[algorithm]["weights"] == pytest.approx(expected["weights"], rel=0.1 * tolerance)
    adapted = one_process["grpo"]["adapted weights"]
    assert found["grpo"]["adapted weights"] == pytest.approx(adapted, rel=1e-5)
    if launcher is FSDP2:
        in_bfloat16 = found["bfloat16"]
        assert in_bfloat16["gradients"] == ["torch.float32"] * 2  # in bfloat16 a sum of 1,500 is off by a nat
        assert 0 < in_bfloat16["norm"] < 100
        # a reference of the dtype of forwards is the policy to the bit
        assert in_bfloat16["reference"] == ["torch.bfloat16", 0.0]


if __name__ == "__main__":
    found = run()
    policy.PartialState().print(RESULT + json.dumps(found))
    rlmt_run.leave()
