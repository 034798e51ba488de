"""Makes single tasks of lm_eval importable: its own package of tasks loads what all of them need."""

import sys
import types
from pathlib import Path

import lm_eval


def prepare() -> None:
    """Puts a package of the same folder in the place of lm_eval.tasks, which imports nothing by itself."""
    package = types.ModuleType("lm_eval.tasks")
    package.__path__ = [str(Path(lm_eval.__file__).parent / "tasks")]
    sys.modules.setdefault("lm_eval.tasks", package)
