"""Gold: a measure that nothing is trained on.

It shows whether the proxy, the reward that is trained on, still means what it should.
"""

import functools
import json
import math
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from rlmt.data import append_jsonl, read_log
from rlmt.sampler import sample_completions
from rlmt.scorers import connect, load_function, read_who
from utils import or_fail

JUDGE_TOKENS = 4096  # of a reply, as the judge may think first


class Gold:
    """What measures completions: the reward model, the judge or the function of --gold, or nothing.

    `args`: any ScoreArgs, or the flags of eval_reward.py. A judge that fails gives no value; an empty response
    gets 0 without a call.
    """

    def __init__(self, args, accelerator: Accelerator):
        """Exits with 2 if `args.gold` cannot measure."""
        self.args = args
        self.accelerator = accelerator
        self.who = read_who(args.gold, otherwise="folder")
        self.tokenizer = None
        """That of a reward model, which reads each prompt."""
        self.model = None
        """The reward model; it counts the texts that it cuts."""
        self.judge = None
        self.function = None
        """That of a file; it is called for empty responses too."""
        if self.who.kind == "function":
            self.function = load_function(self.who.name)
        elif self.who.kind == "folder":
            from rlmt.reward_model import RewardModel

            self.tokenizer = or_fail(RewardModel.check, self.who.name, "", "response", "plain")

    def try_judge(self, prompt: dict, run: Path, n_completions: int) -> None:
        """Asks a judge its first request, and prints how often it is asked; exits with 2 if no reply comes.

        Args:
            run: the folder of its replies, whose cost counts in the budget.
            n_completions: of a step or round of training, or of an audit.
        """
        if self.who.kind == "endpoint" and self.accelerator.is_main_process:
            print(
                f"--gold: its judge is asked about every completion; of a step, round or audit {n_completions} calls"
            )
            from rewards import judged

            ask = functools.partial(judged.judge_mark, judge_max_tokens=JUDGE_TOKENS)
            judge = self._connect(run)
            judged.try_judge(judge, ask, {"messages": prompt["messages"]}, "--gold")

    def _connect(self, run: Path):
        """Returns the client of a judge; the processes share the budget."""
        n_processes = self.accelerator.num_processes
        store = run / f"gold-{self.accelerator.process_index}.jsonl"
        return connect(self.who, store, self.args, n_processes, fresh=self.args.overwrite)

    def load(self, device: str, run: Path) -> None:
        """Loads the reward model, or connects with the judge."""
        if self.who.kind == "endpoint":
            self.judge = self._connect(run)
        elif self.who.kind == "folder":
            from rlmt.reward_model import RewardModel

            # it is given responses only
            self.model = RewardModel(self.who.name, "response", "plain", device=device, dtype=self.args.dtype)

    def of(self, completions: list) -> list[dict[str, float | None]]:
        """Returns {"gold": value} of each completion; {} without --gold.

        As in an evaluation, a completion that is not `ok` has the empty answer.
        """
        if self.who.kind == "nobody":
            return [{}] * len(completions)
        messages = [completion.messages for completion in completions]
        responses = [completion.response if completion.status == "ok" else "" for completion in completions]
        return [{"gold": value} for value in self.values(messages, responses)]

    def values(self, prompts: list[list[dict]], responses: list[str]) -> list[float | None]:
        """Returns the gold of each response to its prompt, a list of messages."""
        if self.function:
            found = map(self.function, prompts, responses)
        elif self.model:
            found = self.model.score(prompts, responses)
        else:
            from rewards.judged import judge_mark

            rows = []
            for messages, response in zip(prompts, responses, strict=True):
                rows.append({"messages": messages, "response": response})
            found = judge_mark(rows, self.judge, JUDGE_TOKENS)
        return [None if value is None else float(value) for value in found]


def measure_held_out(prompts: list[dict], sampler, scorer, policy, run: Path, step: int) -> bool:
    """Samples, scores and logs a completion of each held-out prompt; tells whether gold is the best so far.

    All processes call it, each for its share of the prompts. If these cannot be split evenly, the last
    processes sample some a second time, which does not count.
    """
    if not prompts:
        return False
    accelerator = scorer.accelerator
    n_own = math.ceil(len(prompts) / accelerator.num_processes)
    first = accelerator.process_index * n_own
    own_prompts = [prompts[index % len(prompts)] for index in range(first, first + n_own)]

    sampler.sync(policy.model)
    completions = sample_completions(own_prompts, sampler, scorer.args.think_format)
    sampler.sleep()

    scorer.measure(completions)
    scorer.pop_truncated()  # the next count is of training steps only
    rows = gather_object([completion.row() for completion in completions])
    is_best = False
    if accelerator.is_main_process:
        is_best = log_held_out(run, step, rows[: len(prompts)])
    return broadcast_object_list([is_best])[0]


def log_held_out(run: Path, step: int, rows: list[dict]) -> bool:
    """Logs the completions of the held-out prompts at a checkpoint. Returns whether it has the best gold so
    far.

    Adds the rows, one a prompt, to held_out_completions.jsonl and their means to held_out.jsonl. Step 0 is
    logged, but cannot be the best: it is no checkpoint, so a later step need not exceed it.
    """
    path = run / "held_out.jsonl"
    earlier_golds = [line["gold"] for line in read_log(path) if line["step"] > 0 and is_known(line)]
    line = {"step": step} | _means(rows)
    append_jsonl(path, [line])
    append_jsonl(run / "held_out_completions.jsonl", [row | {"step": step} for row in rows])
    print(f"held out, step {step}: {json.dumps(line)}", flush=True)
    return is_known(line) and all(line["gold"] > gold for gold in earlier_golds)


def is_known(line: dict) -> bool:
    """Tells whether the gold of a line of held_out.jsonl is that of nearly all prompts: a judge may fail."""
    return line["n_gold"] > 0 and line["n_gold"] >= 0.99 * line["n"]


def _means(rows: list[dict]) -> dict[str, float | None]:
    """Averages completion rows. None where nothing is known."""
    import pandas as pd  # slow to import

    table = pd.json_normalize(rows)
    good_format = table["status"] == "ok"
    gold = table["rewards.gold"].astype(float)  # missing where a judge failed
    means = {
        "gold": gold.mean(),
        "gold_se": gold.sem(),
        "gold_ok": gold[good_format].mean(),
        "gold_ok_se": gold[good_format].sem(),
        "proxy": table.loc[good_format, "rewards.preference"].mean(),
        "format_ok": good_format.mean(),
        "think_tokens": table["n_thinking_tokens"].mean(),
        "response_tokens": (table["n_tokens"] - table["n_thinking_tokens"]).mean(),
    }
    line = {"n": len(table), "n_gold": int(gold.count())}
    for name, mean in means.items():
        line[name] = None if pd.isna(mean) else float(mean)
    return line
