"""Says where the time of a GRPO step goes: sampling, reward, log-probabilities, update, and giving weights to vLLM.

    python -m dev.phases --model data/smollm2 ...

runs train_grpo.py with its own flags and adds `time/<phase>` to each line of metrics.jsonl, in seconds. `dev.peers` does
the same for TRL. On a GPU it waits for the card where a phase ends, a few times a step. There it also adds
`memory/<phase>`, the most GiB that torch had allocated, and `memory/held`, those at the optimizer's step: what plan.py counts.
vLLM's reserve is counted where vLLM takes it from torch.
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
        self.gib: dict[str, float] = {}
        self.open = ["other"]
        self.since = time.monotonic()

    def count(self) -> None:
        """Adds the time since the last call to the phase that is open, and notes its memory."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.note_memory(self.open[-1], torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        now = time.monotonic()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    def note_memory(self, phase: str, n_bytes: int) -> None:
        """Keeps the most GiB of a phase."""
        self.gib[phase] = max(self.gib.get(phase, 0.0), n_bytes / 2**30)

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
        """Returns {"time/<phase>": seconds} since the last call, on a GPU also {"memory/<phase>": GiB}."""
        self.count()
        taken = {f"time/{phase}": round(seconds, 4) for phase, seconds in self.seconds.items()}
        taken |= {f"memory/{phase}": round(gib, 3) for phase, gib in self.gib.items()}
        self.seconds.clear()
        self.gib.clear()
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

    step = torch.optim.AdamW.step  # watched, and before that measured

    def measured_step(self, *args, **kwargs):
        if torch.cuda.is_available():
            clock.note_memory("held", torch.cuda.memory_allocated())
        return step(self, *args, **kwargs)

    torch.optim.AdamW.step = measured_step

    log = runs.StepLogger.log

    def log_with_times(self, step: int, metrics: dict, *args) -> None:
        log(self, step, metrics | clock.take(), *args)

    runs.StepLogger.log = log_with_times
    train_grpo.main(runs.parse_args(train_grpo.Args, train_grpo.PRESETS, train_grpo.RELEASED))


if __name__ == "__main__":
    main()
