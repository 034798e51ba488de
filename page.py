"""Makes the page of a run: one HTML file with its curves and completions, for any browser, without a network.

    python page.py results/rlmt                  # writes results/rlmt/page.html
    python page.py results/rlmt results/rlhf     # two runs side by side, training runs or evaluations

The training scripts write it when they finish; the command works at any time, also during a run. Only the
files of the run folder are read, not the model. A folder without completions, like a run of SFT, has curves
only; an evaluation has answers only.

Of a training run the page shows the first, a middle and the last step, and says of each how many prompts it
shows: see `choose_prompts`. The page's frame is page.html, a template next to this file. Every text of a run
is escaped before it is filled in, and the page's security policy lets no script run but the template's own.

The `gold` of an evaluation is what `verdict_number` finds in verdicts.jsonl or rows.jsonl, and of a dialogue
the final emotion. A judge's choice between two answers is not a number: an evaluation by --mode reward or on
Arena-Hard has no gold, and no number at all without --reward-model. The fields of a row are not checked,
because our own scripts have written them.
"""

import base64
import hashlib
import html
import io
import json
import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from rlmt.logs import read_completions, read_lines
from utils import or_fail

TEMPLATE = Path(__file__).with_name("page.html")
MAX_CHARACTERS = 250_000  # of completions per section, in whole prompts


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str] | tuple[str, str]]
    """Folder of a training run or of an evaluation, and of a second one to show next to it."""
    out: str = ""
    """File of the page; empty: page.html in the folder of the first run."""


# --- 1. rows

NUMBERS = ["step", "temperature", "sample", "reward", "gold", "advantage", "n_tokens", "n_thinking_tokens"]
TEXTS = ["text", "thinking", "response", "status"]
FIELDS = ["id", "messages", "rewards", *TEXTS, *NUMBERS]  # of a row
KINDS = {  # files of completions, and how the page calls what they hold
    "completions.jsonl": "training",
    "held_out_completions.jsonl": "held out",
    "generations.jsonl": "evaluation",
    "dialogues.jsonl": "dialogue",
    "dialogues_held_out.jsonl": "held-out dialogue",
}


def read_rows(run: str | Path, file: str = "completions.jsonl") -> pd.DataFrame:
    """Reads a file of KINDS into a table with the columns of FIELDS, for an analysis of your own.

    One row a completion, NaN where the file has no number. A folder without `file`, which training runs have,
    is an evaluation: its generations.jsonl is read.
    """
    if not Path(run, file).is_file():
        file = "generations.jsonl"
    stored = list(read_completions(Path(run), file))
    if not stored:
        raise ValueError(f"{run}: no completions; name the folder of an RL run or of an evaluation")
    # dtype object, because strings of pyarrow refuse half of a surrogate pair
    rows = pd.DataFrame(stored, columns=FIELDS, dtype=object)
    return rows.astype(dict.fromkeys(NUMBERS, float))


# --- 2. curves

PANELS = {  # in this order, if they were logged; docs/metrics.md explains every key
    "reward": "what is trained on",
    "reward/gold": "what nothing is trained on",
    "held out: gold": "on prompts that are not trained on",
    "kl": "to the reference, nats per token",
    "think/mean_tokens": "tokens of thinking",
    "think/response_tokens": "tokens of response",
    "think/format_ok": "share with status ok",
    "sampling/logprob_gap": "sampler against trainer, nats per token",
    "dialogue/success": "share with the highest emotion",
    "accuracy": "of the reward model in training",
    "in rounds: rewards/accuracies": "of DPO in training",
    "mean_token_accuracy": "of the next token",
    "loss": "of the update",
}
LINES = [{"color": "#0072B2"}, {"color": "#D55E00", "linestyle": "dashed"}]  # colours of Okabe and Ito
GREY = "#7a7a7a"  # as readable on white as on the page's dark background
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",  # letters stay text, in a font of the reader's
    "svg.hashsalt": "page",  # the same curves give the same bytes
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor"], GREY),
    **dict.fromkeys(["xtick.color", "ytick.color", "grid.color"], GREY),
}
POINTS = 300  # of a line at most: a long run has a small picture, of means over neighbouring steps


def read_curves(run: Path) -> dict[str, dict[float, float]]:
    """Returns {key: {step: value}} of every number in metrics.jsonl, held_out.jsonl and the rounds of DPO.

    Steps are counted through all rounds.
    """
    sources = [("", run / "metrics.jsonl"), ("held out: ", run / "held_out.jsonl")]
    rounds = sorted(run.glob("round-*/metrics.jsonl"), key=lambda path: int(path.parent.name[6:]))
    sources += [("in rounds: ", path) for path in rounds]

    curves = {}
    steps_before = 0
    for prefix, path in sources:
        if not path.is_file():
            continue
        step = 0
        for row in read_lines(path):
            step = row.pop("step")
            for key, value in row.items():
                if type(value) in (int, float) and math.isfinite(value):  # a bool is not a number
                    curves.setdefault(prefix + key, {})[steps_before + step] = value
        if path in rounds:
            steps_before += step
    return curves


def thin(curve: dict[float, float]) -> pd.DataFrame:
    """Returns at most POINTS rows of (step, value), each the mean over as many neighbouring steps."""
    points = pd.DataFrame(sorted(curve.items()), columns=["step", "value"])
    return points.groupby(np.arange(len(points)) // math.ceil(len(points) / POINTS)).mean()


def draw_panel(key: str, curves: list[dict]) -> str:
    """Returns an SVG with the curve of each run that has one."""
    figure = Figure(figsize=(3.4, 2.1), layout="constrained")
    axis = figure.add_subplot()
    for of_run, line in zip(curves, LINES):
        if key in of_run:
            points = thin(of_run[key])
            if len(points) < 30:
                line = line | {"marker": "o", "markersize": 3}
            axis.plot(points["step"], points["value"], **line)
    axis.set_title(f"{key}\n{PANELS[key]}", loc="left", fontsize=9)
    axis.locator_params("x", integer=True, nbins=6)
    axis.ticklabel_format(useOffset=False)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    file = io.StringIO()
    no_metadata = dict.fromkeys(["Date", "Creator", "Format", "Type"])
    figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    svg = file.getvalue()
    return svg[svg.index("<svg") :]  # without the head of an XML file


def draw_curves(curves: list[dict]) -> str:
    """Returns the picture of one or two runs: an SVG per panel, so that they wrap on a narrow screen."""
    logged = set().union(*curves)
    panels = []
    with matplotlib.rc_context(STYLE):
        for key in PANELS:
            if key == "loss" and "reward" in logged:
                continue  # in RL it does not measure progress
            if key in logged:
                panels.append(draw_panel(key, curves))
    return "\n".join(panels)


# --- 3. which completions


def label_of(row: dict, kind: str) -> str:
    """Returns the name of the section of the page that a completion is in."""
    for field in ("step", "temperature"):
        if row.get(field) is not None:
            return f"{kind}, {field} {row[field]:g}"
    return kind


def choose_labels(runs: list[Path], file: str) -> list[str]:
    """Returns the first, a middle and the last label of a file, of those that two runs share.

    It is of all labels if the runs share none, or if only one of them has the file.
    """
    counts = Counter()
    for run in runs:
        labels = [label_of(row, KINDS[file]) for row in read_completions(run, file)]
        counts.update(list(dict.fromkeys(labels)))  # one of each; a set would lose their order
    common = [label for label, n in counts.items() if n == max(counts.values())]
    middle = len(common) // 2
    return list(dict.fromkeys(common[:1] + common[middle : middle + 1] + common[-1:]))


def read_sections(runs: list[Path]) -> dict[str, list[list[dict]]]:
    """Returns {label: rows of each run} of the sections that are shown.

    Each file is read twice: the completions of a long run may not fit into memory.
    """
    sections = {}
    for file, kind in KINDS.items():
        for label in choose_labels(runs, file):
            sections[label] = [[] for _ in runs]
        for number, run in enumerate(runs):
            for row in read_completions(run, file):
                label = label_of(row, kind)
                if label in sections:
                    sections[label][number].append(row)
    return sections


def prompt_key(row: dict) -> str:
    """Returns a hash of the messages: a key, because each sample of a task has an id of its own, and a fair
    order to draw prompts in, the same for every run."""
    return hashlib.sha1(json.dumps(row["messages"]).encode()).hexdigest()


def choose_prompts(sides: list[list[dict]]) -> tuple[list[list], int]:
    """Returns the prompts of a section that are shown, each as its rows of each run, and how many there are.

    Prompts that all runs answered come first, then the order of `prompt_key`. The first prompt comes however
    long its completions are.
    """
    prompts = {}
    lengths = Counter()
    for number, rows in enumerate(sides):
        for row in rows:
            key = prompt_key(row)
            prompts.setdefault(key, [[] for _ in sides])[number].append(row)
            lengths[key] += len(row["text"])
    chosen = []
    characters = 0
    for key in sorted(prompts, key=lambda key: (not all(prompts[key]), key)):
        characters += lengths[key]
        if chosen and characters > MAX_CHARACTERS:
            break
        chosen.append(prompts[key])
    return chosen, len(prompts)


# --- 4. texts as HTML

# control characters, which a browser hides or which turn text around, and halves of surrogate pairs
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MEANS = ["reward", "gold", "n_tokens", "n_thinking_tokens"]


def make_visible(value):
    """Returns a string with hidden characters spelled out; any other value as it is."""
    if isinstance(value, str):
        return HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), value)
    return value


def escape(text) -> str:
    """Returns a text of a run as HTML that shows it and does nothing else."""
    return html.escape(make_visible(str(text)))


def show_numbers(numbers: dict) -> str:
    """Returns names and values of the numbers that exist."""
    shown = ""
    for name, value in numbers.items():
        if value is not None and math.isfinite(value):
            shown += f" · {escape(name)} <b>{round(value, 3):,}</b>"
    return shown


def show_part(label: str, text: str) -> str:
    """Returns a text below its label."""
    label = escape(label)
    return f'<h4>{label}</h4><div class="text" data-of="{label}" dir="auto">{escape(text)}</div>'


def show_completion(row: dict) -> str:
    """Returns status, numbers and texts of a completion.

    With a bad status that is also the raw text, which may hold more than thinking and response. A
    conversation with a simulated user is shown turn by turn.
    """
    numbers = {name: row.get(name) for name in [*MEANS, "advantage"]}
    rewards = {name: value for name, value in row["rewards"].items() if name != "gold"}
    if list(rewards.values()) != [row["reward"]]:  # otherwise it would be there twice
        numbers |= rewards
    shown = f"<p>{escape(row['status'])} {escape(row.get('pair') or '')}{show_numbers(numbers)}</p>"
    turns = [{"role": "response", "thinking": row.get("thinking"), "content": row.get("response")}]
    for turn in row.get("dialogue", [None, *turns])[1:]:  # the first turn is the prompt
        if turn.get("thinking"):
            shown += show_part("thinking", turn["thinking"])
        if "emotion-point" in turn:
            shown += f"<p>emotion {escape(turn['emotion-point'])}</p>"
        shown += show_part(turn["role"], turn["content"])
    if row["status"] != "ok":
        shown += show_part("as written", row["text"])
    return f'<div class="completion">{shown}</div>\n'


def show_prompt(sides: list[list[dict]], names: list[str]) -> str:
    """Returns a prompt, and below it a column of completions per run."""
    row = max(sides, key=len)[0]
    asked = f"<b>{escape(row['id'])}</b>"
    for message in row["messages"]:
        asked += show_part(message["role"], message["content"])
    columns = ""
    for name, rows in zip(names, sides):
        columns += f'<div>{name}<div class="side">{"".join(map(show_completion, rows))}</div></div>\n'
    return f'<details>\n<summary>{asked}</summary>\n<div class="sides">{columns}</div></details>\n'


def show_section(label: str, sides: list[list[dict]], names: list[str]) -> str:
    """Returns a section of the page: what its completions are like, then the prompts that are shown."""
    chosen, n_prompts = choose_prompts(sides)
    shown = f'<h2 id="{label}">{label}: {len(chosen)} of {n_prompts} prompts</h2>\n'
    for name, rows in zip(names, sides):
        table = pd.DataFrame(rows, columns=["status", *MEANS], dtype=object)
        statuses = show_numbers(table["status"].value_counts().to_dict())
        means = show_numbers(table[MEANS].astype(float).mean().to_dict())
        shown += f"<p>{name} {len(rows)} completions{statuses}; means{means}</p>\n"
    for prompt in chosen:
        shown += show_prompt(prompt, names)
    return shown.replace("<details>", "<details open>", 1)  # the first prompt can be read at once


# --- 5. the page


def write_page(runs: Sequence[str | Path], out: str | Path) -> None:
    """Writes the page of one run, or of two side by side. Raises ValueError if a folder has nothing to show.

    The hash in the content security policy lets the template's own script run and nothing else.
    """
    runs = [Path(run).resolve() for run in runs]
    curves = [read_curves(run) for run in runs]
    sections = read_sections(runs)
    names = []
    heads = ""
    for number, run in enumerate(runs):
        if not curves[number] and not any(sides[number] for sides in sections.values()):
            raise ValueError(
                f"{run}: no metrics and no completions; name the folder of a run or of an evaluation"
            )
        names.append(f'<b class="run{number}">{escape(run.name)}</b>')
        command = ""
        if (run / "command.txt").is_file():
            command = (run / "command.txt").read_text()
        heads += f"<h1>{names[number]}</h1>\n<code>{escape(command.strip())}</code>\n"
    links = ""
    texts = ""
    for label, sides in sections.items():
        links += f'<a href="#{label}">{label}</a>\n'
        texts += show_section(label, sides, names)

    template = TEMPLATE.read_text("utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    digest = hashlib.sha256(script.encode()).digest()
    filled = string.Template(template).substitute(  # in one pass, so that no text of a run is filled in
        script_hash=base64.b64encode(digest).decode(),
        title=escape(" | ".join(run.name for run in runs)),
        runs=heads,
        picture=draw_curves(curves),
        links=links,
        texts=texts,
    )
    Path(out).write_text(filled, "utf-8")
    print(f"page: {out}")


def main(args: Args) -> None:
    or_fail(write_page, args.runs, args.out or Path(args.runs[0], "page.html"))


if __name__ == "__main__":
    main(tyro.cli(Args))
