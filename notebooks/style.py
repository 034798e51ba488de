"""Draws runs the same way in all notebooks and pictures: a colour and a marker per method, solid lines with thinking,
dashed lines without, thin lines for seeds and a thick one for their mean. No value is smoothed."""

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from utils import THINK_FORMATS

warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, without ipywidgets
# a page of text is 830 pixels wide; the background stays white, so that letters can be read on a dark page too
WIDTH = 8
plt.rcParams.update({"figure.dpi": 80, "savefig.dpi": 100, "font.size": 9, "lines.markersize": 4})
plt.rcParams.update({"figure.constrained_layout.use": True, "legend.handlelength": 3})
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
        styles[name] = style | {"marker": markers[drawn[alike] % len(markers)]}
        drawn[alike] += 1
    return styles


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


def draw(axis, curves: pd.DataFrame, x: str, y: str, at: str) -> None:
    """Draws column `y` over `x`: thin lines for the runs, a thick one for the mean over a row's seeds.

    `curves` has a line per `run` and value of `at`, a step or a number of completions, with whether the run
    `thinks`. The mean is taken where every seed has a value.
    """
    curves = curves.assign(row=[split_seed(run)[0] for run in curves["run"]])
    styles = of_runs(curves["row"].unique(), curves.groupby("row")["thinks"].first().to_dict())
    for row, part in curves.dropna(subset=[x, y]).groupby("row", sort=False):
        for _, seed in part.groupby("run"):
            axis.plot(seed[x], seed[y], **styles[row] | {"marker": "", "linewidth": 0.6, "alpha": 0.6})
        points = part.groupby(part[at])
        means = points[[x, y]].mean()[points.size() == part["run"].nunique()]
        axis.plot(means[x], means[y], label=row, linewidth=2, markevery=0.1, **styles[row])
    axis.set(xlabel=x, ylabel=y)


def panels(curves: pd.DataFrame, x: str, keys: Iterable[str], at: str = "") -> plt.Figure | None:
    """Returns a figure with a panel per key over `x`, under one legend; without a key that has values it prints
    so and returns None. `at`: what seeds are averaged at, see `draw`; empty: `x`."""
    logged = [key for key in keys if {x, key} <= set(curves) and len(curves.dropna(subset=[x, key]))]
    if not logged:
        print(f"Nothing to draw: no run here has {', '.join(keys)} over {x}.")
        return None
    columns = min(len(logged), 3)
    rows = math.ceil(len(logged) / columns)
    figure = plt.figure(figsize=(min(WIDTH, 4.5 * columns), 2.3 * rows + 1))
    handles = {}
    for number, key in enumerate(logged, 1):
        axis = figure.add_subplot(rows, columns, number)
        draw(axis, curves, x, key, at or x)
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(columns + 1, 3))
    return figure
