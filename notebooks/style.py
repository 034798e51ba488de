"""Draws a run alike in all notebooks: a colour per method, solid with thinking and dashed without, as
experiments/compare.py does."""

import re
from collections import Counter
from collections.abc import Iterable

import matplotlib.pyplot as plt

plt.rcParams.update({"figure.dpi": 80, "legend.fontsize": 9, "lines.markersize": 4, "savefig.bbox": "tight"})
COLOURS = {
    "prompted": "tab:purple",
    "sft": "tab:gray",
    "ppo": "tab:orange",
    "dpo": "tab:green",
    "rlvr": "tab:red",
}
GRPO = "tab:blue"  # by which every other run is trained
MARKERS = "os^vD*XP"  # of runs with the same colour and line


def of_runs(names: Iterable[str]) -> dict[str, dict]:
    """Returns {run: arguments of plot}, by the words in the names of the runs."""
    styles = {}
    drawn = Counter()
    for name in names:
        style = {"color": GRPO, "linestyle": "solid"}
        for method, colour in COLOURS.items():
            if method in name:
                style["color"] = colour
        if re.search("plain|rlhf", name):
            style["linestyle"] = "dashed"
        alike = tuple(style.values())
        styles[name] = style | {"marker": MARKERS[drawn[alike] % len(MARKERS)], "markevery": 0.1}
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
