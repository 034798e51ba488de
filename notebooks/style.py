"""Draws a run alike in all notebooks and pictures: a colour and a marker per method, solid with thinking, dashed
without, and a row of several seeds as their mean in a band from the lowest to the highest."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from utils import THINK_FORMATS

plt.rcParams.update({"figure.dpi": 80, "legend.fontsize": 9, "lines.markersize": 4, "savefig.bbox": "tight"})
# colours of Okabe and Ito, which colour-blind readers can tell apart
COLOURS = {
    "prompted": "#CC79A7",
    "sft": "#707070",
    "rlvr": "#D55E00",
    "ppo": "#E69F00",  # of RLVR too: the last one that is in a name counts
    "dpo": "#009E73",
}
GRPO = "#0072B2"  # by which every other run is trained
MARKERS = dict(zip([GRPO, *COLOURS.values()], "oP*Ds^"))
MORE_MARKERS = "vX<>"  # of further runs with the same colour and line


def of_runs(names: Iterable[str], thinks: dict[str, bool] | None = None) -> dict[str, dict]:
    """Returns {run or row: arguments of plot}, by the words in their names.

    `thinks` has whether each thinks, as their config.json says; without it, the names do.
    """
    names = list(names)
    if thinks is None:
        thinks = {name: not re.search("plain|rlhf", name) for name in names}
    styles = {}
    drawn = Counter()
    for name in names:
        style = {"color": GRPO, "linestyle": "solid"}
        for method, colour in COLOURS.items():
            if re.search(rf"\b{method}\b", name):
                style["color"] = colour
        if not thinks[name]:
            style["linestyle"] = "dashed"
        elif re.search("response", name):  # the reward model does not read the thinking
            style["linestyle"] = "dotted"
        alike = tuple(style.values())
        markers = MARKERS[style["color"]] + MORE_MARKERS
        styles[name] = style | {"marker": markers[drawn[alike] % len(markers)], "markevery": 0.1}
        drawn[alike] += 1
    return styles


def of_bars(names: Iterable[str]) -> dict[str, list]:
    """Returns the arguments of bar or barh; a bar without thinking is white, with a coloured edge."""
    edges = []
    fills = []
    for style in of_runs(names).values():
        edges.append(style["color"])
        fills.append(style["color"])
        if style["linestyle"] == "dashed":
            fills[-1] = "white"
    return {"edgecolor": edges, "color": fills}


def split_seed(name: str) -> tuple[str, str]:
    """Splits ROW-sSEED; a name without a seed has seed 0."""
    row, seed = re.fullmatch(r"(.+?)(?:-s(\d+))?", name).groups(default="0")
    return row, seed


def model_name(model: str) -> str:
    """Returns the name of the run that made a model; of others, the folder's or the hub's.

    Of x-s0/best_by_gold it is x-best_by_gold-s0: such models are a row of their own.
    """
    path = Path(model)
    if path.name == "model":
        path = path.parent
    if path.name == "best_by_gold" or path.name.startswith(("checkpoint-", "round-")):
        row, seed = split_seed(path.parent.name)
        return f"{row}-{path.name}-s{seed}"
    return path.name


def thinks(run: Path) -> bool:
    """Returns whether a run's completions have thinking, as its config.json says."""
    args = json.loads((run / "config.json").read_text())["args"]
    return THINK_FORMATS[args.get("think_format", "plain")].thinking_tags is not None


def completions_per_step(run: Path) -> float:
    """Returns how many completions an RL run samples for a step, or for a round of DPO; NaN of another run, and
    where the rounds take all prompts until the run has ended."""
    args = json.loads((run / "config.json").read_text())["args"]
    prompts = args.get("prompts_per_step") or args.get("prompts_per_round", math.nan)
    if prompts == 0:  # all
        summary = run / "summary.json"
        prompts = json.loads(summary.read_text())["prompts"] if summary.exists() else math.nan
    return prompts * (args.get("group_size") or args.get("samples_per_prompt", 1))


def smooth(values, window: int = 5):
    """Returns the mean of each value and those before it, of `window` at most; of a short series the values."""
    if len(values) <= window:
        return values
    return values.rolling(window, min_periods=1).mean()


def draw(axis, curves: pd.DataFrame, x: str, y: str, window: int = 1) -> None:
    """Draws column `y` over `x`, a line per row. `curves` has a line per `run` and value of `x`, with whether
    the run `thinks`."""
    rows = curves["run"].map(lambda run: split_seed(run)[0])
    styles = of_runs(rows.unique(), curves.groupby(rows)["thinks"].first().to_dict())
    for name, part in curves.groupby(rows, sort=False):
        seeds = smooth(part.pivot(index=x, columns="run", values=y).dropna(how="all"), window)
        if seeds.empty:  # as the proxy of a run without reward model
            continue
        axis.plot(seeds.index, seeds.mean(axis=1), label=name, **styles[name])
        colour = styles[name]["color"]
        axis.fill_between(
            seeds.index, seeds.min(axis=1), seeds.max(axis=1), color=colour, alpha=0.15, linewidth=0
        )
    axis.set(xlabel=x, ylabel=y)
