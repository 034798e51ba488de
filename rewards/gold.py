"""Gold: a measure that nothing is trained on.

It shows whether the proxy, the reward that is trained on, still means what it should.
"""

import json
import math
import numbers
from pathlib import Path

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from rlmt.data import append_jsonl, read_log
from rlmt.run import load_function
from rlmt.sampler import sample_completions
from utils import or_fail
from rewards.preference import RewardModel


def check_gold(args, n_completions: int, accelerator: Accelerator) -> None:
    """Exits with 2 if `load_gold` could not load `args.gold`; prints how often its judge is asked. It may be empty.

    `n_completions`: those of a step, or of a round of DPO.
    """
    if args.gold.startswith("judge:"):
        _judge_endpoint(args, Path())
        accelerator.print(
            f"--gold: its judge is asked about every training completion, {n_completions} calls per step"
        )
    elif ".py:" in args.gold:
        load_function(args.gold)
    elif args.gold:
        or_fail(RewardModel.check, args.gold, "", "response", "plain")


def try_judge(args, run: Path) -> None:
    """Asks a judge of --gold for one token; exits with 2 if no reply comes.

    `run`: the folder of its replies, whose cost counts in the budget.
    """
    if args.gold.startswith("judge:") and PartialState().is_main_process:
        from rlmt.endpoint import try_endpoint

        try_endpoint(_judge_endpoint(args, run), "--gold", args.dry_run)


def load_gold(args, device: str, run: Path):
    """Loads what `args.gold` names: a function of (lists of messages, responses) that returns floats.

    `args.gold` is the folder of a reward model, `file.py:function` with function(messages, response) ->
    float, or `judge:MODEL` (`judge:MODEL@URL`), whose mark is 0.1 to 1. Returns None where it is empty. A
    judge that fails gives NaN; an empty response gets 0 without a call. A reward model is returned as it is,
    as it counts the texts that it cuts.
    """
    spec = args.gold
    if not spec:
        return None
    if spec.startswith("judge:"):
        return _judge_as_gold(args, run)
    if ".py:" in spec:
        return _function_as_gold(load_function(spec))
    # it is given responses only
    return RewardModel(spec, "response", "plain", device=device, dtype=args.dtype)


def _function_as_gold(function):
    def measure(prompts: list[list[dict]], responses: list[str]) -> list[float]:
        values = []
        for messages, response in zip(prompts, responses, strict=True):
            value = function(messages, response)
            if isinstance(value, numbers.Real):  # scorer.gold_of refuses anything else
                value = float(value)
            values.append(value)
        return values

    return measure


def _judge_as_gold(args, run: Path):
    """Returns the function of `load_gold` that asks a judge."""
    from rewards.judged import judge_mark

    judge = _judge_endpoint(args, run)

    def measure(prompts: list[list[dict]], responses: list[str]) -> list[float]:
        rows = []
        for messages, response in zip(prompts, responses, strict=True):
            rows.append({"messages": messages, "response": response})
        marks = judge_mark(rows, judge)
        return [math.nan if mark is None else float(mark) for mark in marks]

    return measure


def _judge_endpoint(args, run: Path):
    """Returns the client of a judge of --gold; exits with 2 without a key for it. The processes share the budget."""
    from rlmt.endpoint import Endpoint  # slow to import, and most runs ask nobody

    name, _, url = args.gold.removeprefix("judge:").partition("@")
    state = PartialState()
    return Endpoint(
        name,
        run / f"gold-{state.process_index}.jsonl",
        url,
        budget=args.budget / state.num_processes,
        price=args.price,
        key_env=args.key_env,
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

    truncated = scorer.measure(completions)
    rows = gather_object([completion.row() for completion in completions])
    is_best = False
    if accelerator.is_main_process:
        is_best = log_held_out(run, step, rows[: len(prompts)], truncated)
    return broadcast_object_list([is_best])[0]


def log_held_out(run: Path, step: int, rows: list[dict], truncated: float | None = None) -> bool:
    """Logs the completions of the held-out prompts at a checkpoint. Returns whether it has the best gold so far.

    Adds the rows, one a prompt, to held_out_completions.jsonl and their means to held_out.jsonl. Warns when the
    proxy is higher than at the best gold while gold is clearly lower. Step 0 is logged and warned against, but
    cannot be the best: it is no checkpoint, so a later step need not exceed it.

    Args:
        truncated: share of the texts that a reward model as gold cut; None with another gold.
    """
    path = run / "held_out.jsonl"
    earlier_lines = read_log(path)
    line = {"step": step} | _means(rows)
    if truncated is not None:
        line["gold_truncated"] = truncated
    append_jsonl(path, [line])
    completions = run / "held_out_completions.jsonl"
    append_jsonl(completions, [row | {"step": step} for row in rows])
    print(f"held out, step {step}: {json.dumps(line)}", flush=True)

    if line["gold"] is None:
        return False
    measured = [earlier for earlier in earlier_lines if earlier["gold"] is not None]
    if not measured:
        return True
    best = max(measured, key=lambda earlier: earlier["gold"])
    _warn_of_overfitting(line, best, rows, completions)
    return all(line["gold"] > earlier["gold"] for earlier in measured if earlier["step"] > 0)


def _means(rows: list[dict]) -> dict[str, float | None]:
    """Averages completion rows. None where nothing is known."""
    import pandas as pd

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


def _gold_by_prompt(rows: list[dict]):
    """Returns the gold of the completions in good format, which alone have a proxy, as a series by prompt."""
    import pandas as pd

    gold = {row["id"]: row["rewards"]["gold"] for row in rows if row["status"] == "ok"}
    return pd.Series(gold, dtype=float)  # missing where a judge failed


def _warn_of_overfitting(line: dict, best: dict, rows: list[dict], completions: Path) -> None:
    """Prints a warning if the proxy is higher than at the best gold, and gold lower by two standard errors.

    The difference is taken prompt by prompt, where both steps have a completion in good format: an easy prompt
    is easy in both.
    """
    if line["proxy"] is None or best["proxy"] is None or line["proxy"] <= best["proxy"]:
        return
    best_rows = [row for row in read_log(completions) if row["step"] == best["step"]]
    differences = (_gold_by_prompt(rows) - _gold_by_prompt(best_rows)).dropna()
    if differences.mean() < -2 * differences.sem():
        print(
            f"WARNING: since step {best['step']}, where gold was best, the proxy has risen "
            f"({best['proxy']:.4g} -> {line['proxy']:.4g}) and gold has fallen by {-differences.mean():.4g} "
            f"(step {line['step']}, {len(differences)} prompts)"
        )
