"""Tests that pyproject.toml has every module, and that every package that is imported has a pin."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from conftest import ROOT

listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
FILES = [Path(line) for line in listed.stdout.splitlines()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def top_imports(text: str) -> set[str]:
    """Returns the packages that a module imports, also inside of functions."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


def test_an_installed_project_has_all_modules():
    setuptools = PROJECT["tool"]["setuptools"]
    assert setuptools["py-modules"] == sorted(path.stem for path in FILES if path.parent == Path())
    folders = {".".join(path.parts[:-1]) for path in FILES if path.parts[0] not in ("tests", "examples")}
    assert setuptools["packages"] == sorted(folders - {""})


def test_every_imported_package_has_a_pin():
    pins = (ROOT / "Makefile").read_text() + " ".join(PROJECT["project"]["optional-dependencies"]["vllm"])
    for file in ("requirements.txt", "requirements-test.txt"):
        pins += (ROOT / file).read_text()
    pinned = {name.lower().replace("_", "-") for name in re.findall(r"([\w-]+)(?:\[\w+\])?==", pins)}

    ours = {part for path in FILES for part in (*path.parts, path.stem)}
    distributions = packages_distributions()
    for path in FILES:
        for name in top_imports((ROOT / path).read_text()) - ours - sys.stdlib_module_names:
            found = {
                distribution.lower().replace("_", "-") for distribution in distributions.get(name, [name])
            }
            assert found & pinned, f"{path} imports {name}, which no requirements file pins"
