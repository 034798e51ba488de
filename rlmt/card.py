"""Writes the model card of a run: README.md in its model/ folder, from what the run's folder holds."""

import json
import shlex
from pathlib import Path

from rlmt.chat import read_trained_as

# arguments that name what is trained on; DPO reads the first of them that is given
DATA = ("pairs", "traces", "prompts", "profiles")
TEMPLATE = """---
library_name: transformers
tags: [rlmt]
base_model: {1!r}
---

`{0}` trained this model from {1} on {2}. Its files say: `{3}`. Load it from this folder by transformers or vLLM.

No licence is stated here. The terms of the base model, of the data, and of the teacher or reward model apply to this model.
Write yours into `license:` at the top before you publish it.
"""


def write_card(run: Path) -> None:
    """Writes the card of a finished run; one that exists stays as it is."""
    args = json.loads((run / "config.json").read_text())["args"]
    base = args["model"]
    for _ in range(9):  # at most, as two runs may have been trained from each other's models
        if Path(base).with_name("command.txt").exists():  # a run of ours has made it
            base = json.loads(Path(base).with_name("config.json").read_text())["args"]["model"]
    names = [shlex.split((run / "command.txt").read_text())[1], base, *filter(None, map(args.get, DATA))]
    for index, name in enumerate(names):
        if Path(name).is_absolute():  # the folders of this machine are nobody's business
            names[index] = Path(name).name
    card = run / "model" / "README.md"
    if not card.exists():
        card.write_text(TEMPLATE.format(*names[:3], json.dumps(read_trained_as(str(run / "model")))))
