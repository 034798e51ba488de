"""Tests that the commands in the README, docs/ and docstrings run, and that tables and links there are right.

`python tests/project/test_readme.py` copies the tables in results/ into the pages that show them.
"""

import ast
import importlib
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the command above

import rewards
import train_grpo
import utils

README = ROOT / "README.md"
CHANGE = ROOT / "docs" / "change.md"
PAGES = [README, *sorted(ROOT.glob("[a-z]*/README.md")), *sorted(ROOT.glob("docs/*.md"))]

FOLDERS = (".", "benchmarks", "data", "data/toy", "dev", "experiments", "rewards", "rlver")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
TRAINING = sorted(path.stem for path in ROOT.glob("train_*.py"))

listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True)
TABLES = re.compile(r"(?<!README)\.(md|csv|txt|json)$")
RESULTS = [ROOT / name for name in listed.stdout.split() if TABLES.search(name)]

# a table of results/ on a page, between two comments
BLOCK = re.compile(r"(<!-- file: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def fill_blocks(text: str) -> str:
    """Returns a page with every table as results/ has it."""
    return BLOCK.sub(lambda match: f"{match[1]}{(ROOT / match[2]).read_text().strip()}\n\n{match[4]}", text)


# --- tables and files


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_tables_are_those_in_results(page):
    assert page.read_text() == fill_blocks(page.read_text()), (
        "python tests/project/test_readme.py copies them"
    )


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_to_a_file(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_measured_number_is_in_results():
    """Whatever has three decimals or more; a page may round it. Code blocks show commands and logs."""
    texts = [path.read_text() for path in RESULTS]
    measured = {float(number) for text in texts for number in re.findall(r"\d+\.\d+", text)}
    lost = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for number, decimals in re.findall(r"(?<![\w.])(\d{1,3}\.(\d{3,}))", text):
            if number not in {f"{value:.{len(decimals)}f}" for value in measured}:
                lost.append(f"{page.name}: {number}")
    assert lost == []


# --- commands


def command_lines(shell: str) -> list[str]:
    """Returns the commands of a shell text that start a script or a module of this repository."""
    shell = shell.replace("\\\\\n", " ").replace("\\\n", " ")
    commands = []
    for line in shell.splitlines():
        words = re.sub(r"\s#.*", "", line)
        for command in words.split("&&"):
            command = re.sub(r"^(\w+=\S+ +)+", "", " ".join(command.split()))
            is_whole = "..." not in command
            if is_whole and command.startswith(("python ", "accelerate launch ")):
                commands.append(command)
    return commands


def commands_of_pages() -> list[str]:
    found = []
    for page in PAGES:
        for shell in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            found += command_lines(shell)
    return list(dict.fromkeys(found))


def commands_of_docstrings() -> list[str]:
    found = []
    for path in SOURCES:
        found += command_lines(ast.get_docstring(ast.parse(path.read_text())) or "")
    return found


def split_command(command: str) -> tuple[str, list[str]]:
    """Returns the module that a command starts, and its arguments."""
    command = re.sub(r"<[^>]*>|\$\{?\w+[^ \"}]*\}?|\$\w+", "X", command)  # what the reader fills in
    words = [word for word in shlex.split(command) if word not in ("--", "python")]
    if words[0] == "-m":
        return words[1], words[2:]
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).exists()
    index = next(n for n, word in enumerate(words) if word.endswith(".py"))
    return words[index].removesuffix(".py"), words[index + 1 :]


@pytest.mark.parametrize("command", dict.fromkeys(commands_of_pages() + commands_of_docstrings()))
def test_every_command_is_parsed_by_its_script(command, parse, monkeypatch):
    """Names, types and presets."""
    name, words = split_command(command)
    if name in ("pytest", "venv", "nltk.downloader", "pip"):
        return
    if name == "eval_benchmarks" and words[:1] == ["traits"]:
        name, words = "benchmarks.traits", words[1:]
    if name == "data.toy.judge" and "python" in command.split()[1:]:  # another command follows
        words = []
    for variable in re.findall(r"[\w.:-]+=([A-Z_]+_KEY)\b", command):  # of --key-env
        monkeypatch.setenv(variable, "key")
    parse(name, words)


def toy_commands() -> list[str]:
    """Returns the commands on the toy world."""
    return [
        command for command in commands_of_pages() if re.search("--preset toy|--tasks data/toy/", command)
    ]


@pytest.fixture(scope="module")
def toy_world(tmp_path_factory) -> Path:
    """Returns a folder that looks like the repository after `python -m data.toy.world`, `data.toy.tasks` and
    `rlver.toy_users`, with the reward of the README in a file of its own."""
    folder = tmp_path_factory.mktemp("repository")
    toy = folder / "data" / "toy"
    toy.mkdir(parents=True)
    for path in (ROOT / "data" / "toy").iterdir():
        if path.suffix in ("", ".py"):
            (toy / path.name).symlink_to(path)
    for file, sizes in (
        ("data/toy/world.py", "--n-traces 64 --n-prompts 256 --n-pairs 64 --n-tasks 8 --n-held-out 8"),
        ("data/toy/tasks.py", "--n-traces 8 --n-prompts 64 --n-tasks 8"),
        ("rlver/toy_users.py", "--n-traces 64 --n-train 32 --n-test 8"),
    ):
        with mock.patch.object(sys, "argv", [file, "--out", str(toy), *sizes.split()]):
            runpy.run_path(str(ROOT / file), run_name="__main__")
    (folder / "rlver").symlink_to(ROOT / "rlver")
    [reward] = re.findall(r"```python\n(# brief.py.*?)```", README.read_text(), re.DOTALL)
    (folder / "brief.py").write_text(reward)
    return folder


@pytest.mark.parametrize("command", toy_commands())
def test_commands_on_the_toy_world_pass_their_dry_run(command, toy_world, here, monkeypatch):
    """Shipped models take the place of those that an earlier command trains."""
    name, words = split_command(command)
    words = [re.sub(r"^results/(toy/)?[\w-]+/model$", "data/toy/base", word) for word in words]
    monkeypatch.chdir(toy_world)
    done = here(ROOT / f"{name}.py", *words, "--dry-run")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert not (toy_world / "results").exists()


# --- presets, and an example


@pytest.mark.parametrize("script", TRAINING)
def test_every_preset_builds(script, parse):
    module = importlib.import_module(script)
    assert module.PRESETS
    for preset in module.PRESETS:
        args = parse(script, ["--preset", preset])
        if hasattr(args, "think_format"):
            utils.check_think_format(args.think_format)
        if hasattr(args, "rewards"):
            rewards.read_parts(args.rewards, args.reward_args)


def with_example(function: Callable, before: str, start: str) -> dict:
    """Returns the names of train_grpo.py, with an example of docs/change.md before a line of a function."""
    source = inspect.getsource(function)
    assert source.count(before) == 1
    [example] = re.findall(rf"```python\n(    {start} .*?)```", CHANGE.read_text(), re.DOTALL)
    names = vars(train_grpo).copy()
    exec(source.replace(before, example + before), names)
    return names


def test_the_advantage_of_the_page_is_leave_one_out():
    names = with_example(train_grpo.group_advantages, '    if scale == "none":\n', "if scale ==")
    nan = float("nan")
    found = names["group_advantages"](
        torch.tensor([[1.0, 2.0, 6.0], [3.0, nan, 5.0], [nan, 4.0, nan]]), "rloo"
    )
    torch.testing.assert_close(found, torch.tensor([[-3.0, -1.5, 4.5], [-2.0, 0.0, 2.0], [0.0, 0.0, 0.0]]))


def test_the_loss_of_the_page_is_reinforce():
    names = with_example(train_grpo.grpo_loss, "    else:\n        lowest", "elif loss_type ==")
    logprobs, old, advantages = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]]), torch.zeros(2, 2), torch.eye(2)
    mask = torch.ones(2, 2)
    loss, sums = names["grpo_loss"](
        logprobs, old, None, advantages, mask, mask / 4, epsilon=(0.2, 0.2), beta=0.0, loss_type="reinforce"
    )
    assert loss == (1.0 + 0.5) / 4
    assert sums["clip_ratio/region_mean"] == 0


def test_the_mask_of_the_page_is_on_sampled_tokens():
    """Also where the policy wrote the tag in other tokens than a tokenizer would, or not at all."""
    [example] = re.findall(r"```python\n( +for completion in .*?)```", CHANGE.read_text(), re.DOTALL)
    pieces = ["ham", " </th", "ink", ">", "y", "</think>"]
    completions = [SimpleNamespace(ids=ids) for ids in ([0, 0, 1, 2, 3, 4, 4], [0, 5, 4, 5, 4], [0, 4])]
    names = {
        "completions": completions,
        "tokenizer": SimpleNamespace(decode=lambda ids: "".join(pieces[i] for i in ids)),
    }
    exec(textwrap.dedent(example), names)
    assert [one.loss_mask for one in completions] == [[0] * 5 + [1] * 2, [0, 0, 1, 1, 1], [0, 0]]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill_blocks(page.read_text()))
