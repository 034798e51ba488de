"""Says where the time of a GRPO step goes: sampling, reward, log-probabilities, update, and giving weights to vLLM.

    python -m dev.phases --model data/smollm2 ...

runs train_grpo.py with its own flags and adds `time/<phase>` to each line of metrics.jsonl, in seconds. `dev.peers` does
the same for TRL. On a GPU it waits for the card where a phase ends, a few times a step.
"""

import functools
import time
from collections import Counter

import runs  # first: it sets environment variables that the libraries below read  # isort: skip
import torch

import policy
import rollout
import train_grpo
from rewards.scorer import Scorer


PHASES = ("sync", "sampling", "reward", "logprobs", "update", "other")


class Clock:
    """Adds up seconds by phase. Within a phase another one may begin, whose time does not count for the outer one."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self.open = ["other"]
        self.since = time.monotonic()

    def count(self) -> None:
        """Adds the time since the last call to the phase that is open."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    def watch(self, owner, name: str, phase: str) -> None:
        """Makes the function `owner.name` count its time as `phase`."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            self.count()
            self.open.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.count()
                self.open.pop()

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Returns {"time/<phase>": seconds} since the last call."""
        self.count()
        taken = {f"time/{phase}": round(seconds, 4) for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken


def main() -> None:
    """Runs train_grpo.py with a clock."""
    clock = Clock()
    clock.watch(rollout.Sampler, "sync", "sync")
    clock.watch(train_grpo, "sample_groups", "sampling")
    clock.watch(Scorer, "start", "reward")  # called while others are sampled
    clock.watch(Scorer, "score", "reward")
    clock.watch(policy, "reference_logprobs", "logprobs")
    clock.watch(policy, "set_old_logprobs", "logprobs")
    clock.watch(train_grpo, "accumulate_gradients", "update")
    clock.watch(policy, "clip_gradients", "update")
    clock.watch(torch.optim.AdamW, "step", "update")

    log = runs.StepLogger.log

    def log_with_times(self, step: int, metrics: dict, *args) -> None:
        log(self, step, metrics | clock.take(), *args)

    runs.StepLogger.log = log_with_times
    train_grpo.main(runs.parse_args(train_grpo.Args, train_grpo.PRESETS, train_grpo.RELEASED))


if __name__ == "__main__":
    main()
