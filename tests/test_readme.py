"""What the README says is what the repository has: the measured table, files, flags and presets."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

import reproduce

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCSTRINGS = "\n".join((path.read_text().split('"""')[1]) for path in ROOT.glob("*.py")).replace("\\\\\n", "\\\n")


def test_the_demo_table_is_the_measured_one():
    assert (ROOT / "results/demo/table.md").read_text().strip() in README


def test_the_rows_and_the_toy_table_are_what_reproduce_renders(tmp_path):
    """Of an empty results folder, for the paper's rows; of the results that are in the repository, for the toy rows."""
    assert reproduce.rows_markdown(reproduce.Args(results=tmp_path)) in README
    for table in ("toy", "rewards"):
        measured = reproduce.toy_markdown(reproduce.toy_table(reproduce.measured(ROOT / "results" / "toy"), table))
        assert measured in README and (ROOT / "results" / "tables" / f"{table}.md").read_text().strip() == measured


def test_every_file_of_the_table_exists():
    section = README.partition("## What is where")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    assert len(files) > 10 and all((ROOT / f).exists() for f in files)


COMMANDS = re.findall(r"(\w+)\.py((?: +[^\s#]+| +\\\n)+)", README + DOCSTRINGS)


@pytest.mark.parametrize("script", sorted({name for name, _ in COMMANDS if name.startswith(("train_", "eval_"))}))
def test_every_flag_and_preset_of_a_command_exists(script):
    module = importlib.import_module(script)
    fields = {f.name for f in dataclasses.fields(module.Args)}
    seen = 0
    for name, rest in COMMANDS:
        if name != script:
            continue
        for flag, value in re.findall(r"--([a-z0-9-]+)(?:[ =]+(?!--)([^\s\\`]+))?", rest):
            field = flag.replace("-", "_")
            known = {field, field + "_", field.removeprefix("no_")} & fields  # from_: a word of the language
            assert known, f"{script}.py has no --{flag}"
            if flag == "preset":
                assert value in module.PRESETS, f"{script}.py has no preset {value}"
            seen += 1
    assert seen
