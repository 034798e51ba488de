"""What the README says is what the repository has: the measured table, files, flags and presets."""

import dataclasses
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import tyro

import runs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCSTRINGS = "\n".join((path.read_text().split('"""')[1]) for path in ROOT.glob("*.py")).replace(
    "\\\\\n", "\\\n"
)


def test_the_demo_table_is_the_measured_one():
    assert (ROOT / "results/demo/table.md").read_text().strip() in README


def test_the_toy_tables_are_what_reproduce_renders():
    for table in ("toy", "rewards"):
        rendered = (ROOT / "results" / "tables" / f"{table}.md").read_text()
        assert rendered.partition("\n\n")[0] in README


def test_every_file_of_the_table_exists():
    section = README.partition("## What is where")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    assert len(files) > 10 and all((ROOT / f).exists() for f in files)


def test_every_file_that_is_named_exists():
    """Scripts, pages and launch configs of this repository, wherever the README names them."""
    named = set(
        re.findall(
            r"(?<![\w/.-])((?:accelerate/|data/|results/|tests/|notebooks/)?[\w-]+\.(?:py|md|yaml|txt))\b",
            README,
        )
    )
    named -= {"file.py"}  # of the reader's own
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists() and not list(ROOT.glob(f"*/{name}"))]


SHELL = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.S)).replace("\\\n", " ")
LINES = [
    line
    for line in SHELL.splitlines()
    if re.search(r"\b(?:train|eval)_\w+\.py|reproduce\.py|make_traces\.py|prepare\.py", line)
]


@pytest.mark.parametrize("line", LINES)
def test_every_command_of_the_readme_is_parsed_by_its_script(line, monkeypatch):
    """Names, values and presets, by the script's own parser."""
    words = shlex.split(line.strip(), comments=True)
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    path, words = ROOT / words[at], [w.replace("$rm", "some/model") for w in words[at + 1 :]]
    monkeypatch.setattr(sys, "argv", [path.name, *words])
    monkeypatch.syspath_prepend(str(path.parent))
    module = importlib.import_module(path.stem)
    if hasattr(module, "PRESETS"):
        args = runs.parse_args(module.Args, module.PRESETS, getattr(module, "RELEASED", None))
    elif path.stem.startswith("eval_"):
        args = runs.parse_args(module.Args, {})
    else:
        args = tyro.cli(module.Args)
    assert isinstance(args, module.Args)


COMMANDS = re.findall(r"(\w+)\.py((?: +[^\s#]+| +\\\n)+)", README + DOCSTRINGS)


@pytest.mark.parametrize(
    "script", sorted({name for name, _ in COMMANDS if name.startswith(("train_", "eval_"))})
)
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


def test_every_metric_that_a_run_logged_is_explained():
    """Keys of the stored runs; `name/*` and `name/<part>` stand for several."""
    section = README.partition("## What is logged")[2].partition("\n## ")[0]
    named = re.findall(r"`([^` ]+)`", section)
    several = tuple(re.match(r"[^*<]+", name)[0] for name in named if re.search(r"/(\*|<)", name))
    logged = {
        key
        for path in (ROOT / "results").glob("*/*/metrics.jsonl")
        for line in path.read_text().splitlines()
        for key in json.loads(line)
    }
    assert len(logged) > 60 and len(several) > 3
    old = {"rewards/preference/mean", "rewards/preference/std"}  # rewards/total/* by now
    assert sorted(key for key in logged - old if key not in named and not key.startswith(several)) == []
