"""Writes the model card of a run: README.md in its model/ folder, from what the run's folder holds.

Tells what the model was made of and how. Scores are not in it, as the evaluations come later.
"""

import json
import re
import shlex
from pathlib import Path

from huggingface_hub import ModelCardData

from rlmt.chat import read_trained_as
from rlmt.data import FILE_TYPES

# arguments that name what is trained on; DPO reads the first of them that is given
DATA = ("pairs", "traces", "prompts", "profiles")
SETTINGS = ("rewards", "judge", "simulator", "learning_rate", "optim", "lora_r", "load_in_4bit", "seed")
TEMPLATE = """---
{head}
---

# {name}

| | |
|---|---|
{rows}

```bash
{commands}
```

## Licence

No licence is stated here. The terms of the base model, of the data, and of the teacher or reward model apply to this model.
Write yours into `license:` at the top before you publish it.
"""


def write_card(run: Path) -> None:
    """Writes the card of a finished run; one that somebody has written or changed stays as it is."""
    path = run / "model" / "README.md"
    ours = run / "card.md"  # as it was written last, to tell
    if path.exists() and not (ours.exists() and ours.read_text() == path.read_text()):
        return
    card = build(run)
    path.write_text(card)
    ours.write_text(card)


def build(run: Path) -> str:
    """Returns the card's text."""
    config = json.loads((run / "config.json").read_text())
    args = config["args"]
    models = lineage(run)
    data = next(name for name in DATA if args.get(name))
    names = [data, *SETTINGS]
    rewards = args.get("rewards", ["preference"])  # DPO has no other
    if any(word.startswith("preference") for word in rewards) and data == "prompts":
        names += ["reward_model", "reward_on"]
    rows = {"trained from": " from ".join(models), "processes": config["processes"]}
    rows |= read_trained_as(str(run / "model"))  # its think format
    rows |= {name: args[name] for name in names if args.get(name)}
    lines = [f"| {name} | `{json.dumps(value)}` |" for name, value in rows.items()]
    commands = []  # a run that was resumed has several, mostly the same
    for line in (run / "command.txt").read_text().splitlines():
        _, *words = shlex.split(line)  # the first is the path of this machine's Python
        commands.append(shlex.join(["python", *words]))
    return TEMPLATE.format(
        head=front_matter(config["script"], models[-1], args[data]),
        name=run.name,
        rows="\n".join(lines),
        commands="\n".join(dict.fromkeys(commands)),
    )


def lineage(run: Path) -> list[str]:
    """Lists the model that a run started from, then the one from which that was trained, down to the base
    model."""
    models = []
    while (run / "command.txt").exists():
        models.append(json.loads((run / "config.json").read_text())["args"]["model"])
        run = Path(models[-1]).parent
    return models


def front_matter(script: str, base: str, data: str) -> ModelCardData:
    """Returns what the hub reads; models and data sets are named if they are the hub's, not files or
    folders."""
    task = "text-classification" if script == "reward" else "text-generation"
    card = ModelCardData(library_name="transformers", tags=["rlmt", script], pipeline_tag=task)
    if is_on_hub(base):
        card.base_model = base
    data_set = data.partition(":")[0]  # without its configuration and split
    if is_on_hub(data_set):
        card.datasets = [data_set]
    return card


def is_on_hub(name: str) -> bool:
    """Tells whether a name is owner/name of the hub, and not a file or folder of this machine, or of
    another."""
    has_form = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None
    return has_form and not name.endswith(FILE_TYPES) and not Path(name).exists()
