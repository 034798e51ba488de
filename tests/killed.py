"""A run as a kill leaves it: what it had written up to a checkpoint, and log lines that were written since."""

import shutil
from pathlib import Path


def killed_after(step: int, whole: Path, killed: Path) -> None:
    """Copies a finished run that kept all its checkpoints, as if it had been killed after that of `step`."""
    shutil.copytree(whole, killed)
    for folder in killed.glob("checkpoint-*"):
        if int(folder.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(folder)
    shutil.rmtree(killed / "model")
    (killed / "summary.json").unlink()
