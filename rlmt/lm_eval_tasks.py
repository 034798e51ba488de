"""Makes single modules of a package importable whose own import loads what all of them need."""

import sys
import types
from pathlib import Path

import lm_eval


def add_package(name: str, folder: Path) -> None:
    """Puts a package of the modules in `folder` in the place of `name`, which imports nothing by itself."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules.setdefault(name, package)


def prepare() -> None:
    """Does so for lm_eval.tasks."""
    add_package("lm_eval.tasks", Path(lm_eval.__file__).parent / "tasks")
