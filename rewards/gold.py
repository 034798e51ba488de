"""Gold: a measure that nothing is trained on.

It shows whether the proxy, the reward that is trained on, still means what it should.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from rlmt.data import append_jsonl, read_log
from rlmt.run import load_function
from rlmt.sampler import sample_completions

JUDGE_TOKENS = 4096  # of a reply, as the judge may think first


def check_gold(args, n_completions: int, accelerator: Accelerator) -> None:
    """Exits with 2 if `load_gold` could not load `args.gold`; prints how often its judge is asked. It may be
    empty.

    `n_completions`: those of a step, or of a round of DPO.
    """
    if args.gold.startswith("judge:"):
        _judge_endpoint(args, Path())
        accelerator.print(
            f"--gold: its judge is asked about every completion; of a step or round of training {n_completions} calls"
        )
    elif ".py:" in args.gold:
        load_function(args.gold)


def try_judge(args, prompt: dict, run: Path) -> None:
    """Asks a judge of --gold its first request; exits with 2 if no reply comes.

    `run`: the folder of its replies, whose cost counts in the budget.
    """
    if args.gold.startswith("judge:") and PartialState().is_main_process:
        from rewards import judged

        prompt = {"messages": prompt["messages"]}
        judge = _judge_endpoint(args, run)
        ask = functools.partial(judged.judge_mark, judge_max_tokens=JUDGE_TOKENS)
        judged.try_judge(judge, ask, prompt, "--gold", args.overwrite)


def load_gold(args, device: str, run: Path) -> Callable | None:
    """Loads what `args.gold` names: a function of (lists of messages, responses) that returns floats; None if
    empty.

    `args.gold` is the folder of a reward model, `file.py:function` with function(messages, response) ->
    float, or `judge:MODEL` (`judge:MODEL@URL`), whose mark is 0.1 to 1. A judge that fails gives None; an
    empty response gets 0 without a call. A reward model is returned as it is, as it counts the texts that it
    cuts.
    """
    if not args.gold:
        return None
    if args.gold.startswith("judge:"):
        return functools.partial(_marks, _judge_endpoint(args, run))
    if ".py:" in args.gold:
        return functools.partial(map, load_function(args.gold))
    from rewards.preference import RewardModel

    # it is given responses only
    return RewardModel(args.gold, "response", "plain", device=device, dtype=args.dtype)


def _marks(judge, prompts: list[list[dict]], responses: list[str]) -> list[float | None]:
    from rewards.judged import judge_mark

    rows = []
    for messages, response in zip(prompts, responses, strict=True):
        rows.append({"messages": messages, "response": response})
    return judge_mark(rows, judge, JUDGE_TOKENS)


def _judge_endpoint(args, run: Path):
    """Returns the client of a judge of --gold; exits with 2 without a key for it. The processes share the
    budget."""
    from rlmt.endpoint import Endpoint  # slow to import, and most runs ask nobody

    name, at, rest = args.gold.removeprefix("judge:").partition("@http")  # a name may have an @ too
    url = at.removeprefix("@") + rest
    state = PartialState()
    return Endpoint(
        name,
        run / f"gold-{state.process_index}.jsonl",
        url,
        budget=args.budget / state.num_processes,
        price=args.price,
        key_env=args.key_env,
        omit=args.omit,
    )


def measure_held_out(prompts: list[dict], sampler, scorer, model, run: Path, step: int) -> bool:
    """Samples, scores and logs a completion of each held-out prompt; tells whether gold is the best so far.

    All processes call it, each for its share of the prompts. If these cannot be split evenly, the last
    processes sample some a second time, which does not count.
    """
    if not prompts:
        return False
    accelerator = scorer.accelerator
    n_own = math.ceil(len(prompts) / accelerator.num_processes)
    first = accelerator.process_index * n_own
    own_prompts = [prompts[place % len(prompts)] for place in range(first, first + n_own)]

    sampler.sync(model)
    completions = sample_completions(own_prompts, sampler, scorer.args.think_format)
    sampler.sleep()

    scorer.measure(completions)
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
