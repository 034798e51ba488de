"""Tests that the README and docs/ say what is so: commands, files, tables, presets, metrics and examples.

`python tests/project/test_readme.py` copies the tables in results/ into the pages that show them.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("docs/*.md"))]

FOLDERS = (".", "benchmarks", "data", "data/toy", "dev", "experiments", "rewards")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
TRAINING = sorted(path.stem for path in ROOT.glob("train_*.py"))

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
def test_every_file_that_a_page_names_exists(page):
    """Links, and paths of scripts, pages and configs; not what a run writes or a user has."""
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []

    path = r"(?<![\w/.*<>-])((?:[\w-]+/)*[\w-]+\.(?:py|sh|md|yaml|txt|cff|ipynb))\b"
    of_the_reader = {"file.py", "path/to/file.py", "brief.py", "first_talk.py", "experiments/mine.sh"}
    of_data_sets = {
        "c*riteria.txt",
        "negative_criteria.txt",
        "creativewritingv3/creative_writing_judging_prompt.txt",
    }
    of_data_sets |= {"arena_hard_v2.py", "convert_base_to_*prompted_model.py"}
    of_judges = {"hard_prompt.txt", "creative_writing.txt", "extract.txt", "merge.txt", "compare.txt"}
    of_runs = {"command.txt", "env.txt"}
    named = set(re.findall(path, text)) - of_the_reader - of_data_sets - of_judges - of_runs
    folders = (ROOT, page.parent, *(ROOT / name for name in ("data", "rewards", "benchmarks", "experiments")))
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)] == []


def test_the_readme_lists_every_file_and_folder():
    section = README.read_text().partition("## The tree")[2].partition("\n## ")[0]
    listed = set()
    for cell in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE):
        listed |= set(re.findall(r"`([^`]+)`", cell))
    files = {path.name for path in ROOT.glob("*.py")}
    folders = {f"{path.name}/" for path in ROOT.iterdir() if any(path.glob("*.*")) and path.name[0] != "."}
    assert listed == files | folders - {"__pycache__/"}


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


def commands_of_pages() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for shell in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            found += [(page.name, command) for command in command_lines(shell)]
    return found


def commands_of_docstrings() -> list[tuple[str, str]]:
    found = []
    for path in SOURCES:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        found += [(path.name, command) for command in command_lines(docstring)]
    return found


def split_command(command: str) -> tuple[str, list[str]]:
    """Returns the module that a command starts, and its arguments."""
    command = re.sub(r"<[^>]*>|\$\{?\w+[^ \"}]*\}?|\$\w+", "X", command)  # what the reader fills in
    words = [word for word in shlex.split(command) if word not in ("--", "python")]
    if words[0] == "-m":
        return words[1], words[2:]
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).exists()
    place = next(n for n, word in enumerate(words) if word.endswith(".py"))
    return words[place].removesuffix(".py"), words[place + 1 :]


@pytest.mark.parametrize(
    "where, command",
    dict.fromkeys(commands_of_pages() + commands_of_docstrings()),
    ids=lambda text: text[-90:],
)
def test_every_command_is_parsed_by_its_script(where, command, monkeypatch):
    """Names, types and presets, by the script's own parser."""
    import tyro

    from rlmt import run as runs

    name, words = split_command(command)
    if name in ("pytest", "venv", "nltk.downloader", "pip", "tests/test_readme"):
        return
    if name == "eval_benchmarks" and words[:1] == ["traits"]:
        name, words = "benchmarks.traits", words[1:]
    if name == "data.toy.judge" and "python" in command.split()[1:]:  # another command follows
        words = []
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    for variable in re.findall(r"[\w.:-]+=([A-Z_]+_KEY)\b", command):  # of --key-env
        monkeypatch.setenv(variable, "key")
    if name.startswith(("train_", "eval_", "benchmarks.")):
        presets = getattr(module, "PRESETS", {})
        args = runs.parse_args(module.Args, presets)
    else:
        args = tyro.cli(module.Args)
    assert isinstance(args, module.Args)


def toy_commands() -> list[str]:
    """Returns the commands on the toy world that need nothing which the reader has to write first."""
    by_the_reader = ("brief.py", "tagged")
    found = []
    for _, command in dict.fromkeys(commands_of_pages()):
        is_toy = "--preset toy" in command or "--tasks data/toy/" in command
        if is_toy and not any(word in command for word in by_the_reader):
            found.append(command)
    return found


@pytest.fixture(scope="module")
def toy_world(tmp_path_factory) -> Path:
    """Returns a folder that looks like the repository after `python -m data.toy.world` and
    `data.toy.users`."""
    folder = tmp_path_factory.mktemp("repository")
    toy = folder / "data" / "toy"
    toy.mkdir(parents=True)
    for path in (ROOT / "data" / "toy").iterdir():
        if path.suffix in ("", ".py"):
            (toy / path.name).symlink_to(path)
    sizes = [
        "--n-traces",
        "64",
        "--n-prompts",
        "256",
        "--n-pairs",
        "8",
        "--n-tasks",
        "8",
        "--n-held-out",
        "8",
    ]
    command = [sys.executable, "-m", "data.toy.world", "--out", str(toy), *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    users = ["--n-traces", "64", "--n-train", "32", "--n-test", "8"]
    command = [sys.executable, "-m", "data.toy.users", "--out", str(toy), *users]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("command", toy_commands())
def test_commands_on_the_toy_world_pass_their_dry_run(command, toy_world, here, monkeypatch):
    """The base model takes the place of a checkpoint that an earlier command trains."""
    name, words = split_command(command)
    words = [re.sub(r"^results/(toy/)?[\w-]+/model$", "data/toy/base", word) for word in words]
    monkeypatch.chdir(toy_world)
    done = here(ROOT / f"{name}.py", *words, "--dry-run")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert not (toy_world / "results").exists()


# --- arguments and presets


@pytest.mark.parametrize("script", TRAINING)
def test_every_preset_builds(script):
    import rewards
    from rlmt import run as runs
    import utils

    module = importlib.import_module(script)
    presets = [*module.PRESETS.items()]
    assert presets
    for _, values in presets:
        args = dataclasses.replace(module.Args(), **values)
        runs.check_values(args)
        if hasattr(args, "think_format"):
            utils.check_think_format(args.think_format)
        if hasattr(args, "rewards"):
            rewards.read_parts(args)


# --- metrics


def test_every_metric_that_a_run_logged_is_explained():
    page = (ROOT / "docs" / "metrics.md").read_text()
    keys = set()
    for cell in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE):
        keys |= set(re.findall(r"`([^`]+)`", cell))
    several = tuple(key.partition("<")[0] for key in keys if "<" in key)
    logged = set()
    for path in (ROOT / "results").glob("*/*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            logged |= json.loads(line).keys()
    assert len(logged) > 60
    assert sorted(key for key in logged - keys if not key.startswith(several)) == []


# --- the README's examples of how to change something


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_advantage_of_the_readme_is_leave_one_out():
    import train_grpo

    source = inspect.getsource(train_grpo.group_advantages)
    before = '    if scale == "none":\n'
    assert source.count(before) == 1
    names = {"torch": torch}
    exec(source.replace(before, examples()[0] + before), names)
    nan = float("nan")
    rewards = [[1.0, 2.0, 6.0], [3.0, nan, 5.0], [nan, 4.0, nan]]
    expected = torch.zeros(3, 3)
    for p, group in enumerate(rewards):
        for g, reward in enumerate(group):
            others = [other for n, other in enumerate(group) if n != g and other == other]
            if reward == reward and others:
                expected[p, g] = reward - sum(others) / len(others)
    found = names["group_advantages"](torch.tensor(rewards), "rloo")
    torch.testing.assert_close(found, expected)


def test_the_reward_of_the_readme_has_an_option(tmp_path, monkeypatch):
    import rewards
    import train_grpo

    monkeypatch.chdir(tmp_path)
    Path("brief.py").write_text(examples()[1])
    prompts = Path("prompts.jsonl")
    prompts.write_text('{"id": "a", "messages": [{"role": "user", "content": "Q"}]}\n')
    args = train_grpo.Args(
        rewards=("preference:1", "brief.py:brief:1"), reward_args=("brief.limit=5",), prompts=str(prompts)
    )
    brief = rewards.read_parts(args)[1]
    rows = [{"id": "a", "status": "ok", "n_tokens": n} for n in (5, 15)]
    assert rewards.call(brief, rows, None, 2, 100) == pytest.approx([0.0, -0.01])


# --- the script of docs/rewards.md


def test_the_script_of_the_page_asks_for_the_first_messages(tmp_path, monkeypatch, serve):
    from rewards import simulated_user

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)
    script = next(block for block in blocks if block.startswith("# first_talk.py"))
    server = serve(lambda text, n: f" Hello from {text.split()[0]}. ")
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    users = []
    for name in ("Anna", "Ben"):
        user = {"id": name, "player": f"{name} is {{shy}}", "scene": "S", "task": "T", "cha_group": ["x"]}
        users.append(user)
    Path("train_profile.jsonl").write_text("".join(json.dumps(user) + "\n" for user in users))
    exec(script.replace("http://HOST:8000/v1", server.url), {})
    profiles = simulated_user.read_profiles("data/profiles.jsonl")
    assert [user["first_talk"] for user in profiles] == ["Hello from Anna.", "Hello from Ben."]
    asked = [request["messages"][0]["content"] for request, _ in server.requests]
    assert sorted(text.split("\n\n")[0] for text in asked) == ["Anna is {shy}", "Ben is {shy}"]

    silent = serve(lambda text, n: " " if text.startswith("Ben") else "Hello.")
    Path("data/first_talk.jsonl").unlink()
    with pytest.raises(SystemExit, match="Ben: no text"):
        exec(script.replace("http://HOST:8000/v1", silent.url), {})


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill_blocks(page.read_text()))
