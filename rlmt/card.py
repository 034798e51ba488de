"""Writes the model card of a run: README.md in its model/ folder, from what the run's folder holds."""

import json
import shlex
from pathlib import Path

from huggingface_hub import ModelCardData

from rlmt.chat import read_trained_as

# arguments that name what is trained on; DPO reads the first of them that is given
DATA = ("pairs", "traces", "prompts", "profiles")
TEMPLATE = """---
{head}
---

# {name}

Trained from {models}, on {data}. Its files say: `{trained_as}`.

```bash
{commands}
```

No licence is stated here. The terms of the base model, of the data, and of the teacher or reward model apply to this model.
Write yours into `license:` at the top before you publish it.
"""


def write_card(run: Path) -> None:
    """Writes the card of a finished run; one that somebody has written or changed stays as it is."""
    path = run / "model" / "README.md"
    ours = run / "card.md"  # as it was written last
    if path.exists() and not (ours.exists() and ours.read_text() == path.read_text()):
        return
    config = json.loads((run / "config.json").read_text())
    head = ModelCardData(library_name="transformers", tags=["rlmt", config["script"]])
    lines = (run / "command.txt").read_text().splitlines()  # of a run that was resumed mostly the same
    # without the first word, the path of this machine's Python
    commands = [shlex.join(["python", *shlex.split(line)[1:]]) for line in dict.fromkeys(lines)]
    models = [config["args"]["model"]]
    while (Path(models[-1]).parent / "command.txt").exists():  # a run of ours has made it
        before = json.loads((Path(models[-1]).parent / "config.json").read_text())
        models.append(before["args"]["model"])
    if models[-1].count("/") == 1 and not Path(models[-1]).exists():  # the hub's
        head.base_model = models[-1]
    card = TEMPLATE.format(
        head=head,
        name=run.name,
        models=" from ".join(models),
        data=next(config["args"][name] for name in DATA if config["args"].get(name)),
        trained_as=json.dumps(read_trained_as(str(run / "model"))),
        commands="\n".join(commands),
    )
    path.write_text(card)
    ours.write_text(card)
