"""rlmt/run.py: arguments, the run folder and logs; utils.read_trained_as."""

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Literal

import huggingface_hub.constants
import pytest

from rlmt import sampler as rollout
from rlmt import run as runs
from rlmt import watchdog
from rlmt import chat
from rlmt import data as rlmt_data

# --- arguments


@dataclasses.dataclass
class Args:
    model: str = "org/base"
    steps: int = 10
    rate: float = 1e-6
    kind: Literal["a", "b"] = "a"
    think: bool = True
    preset: str = ""
    seed: int = 0
    out: str = ""
    resume: bool = False
    overwrite: bool = False


PRESETS = {"small": {"steps": 3, "rate": 0.5, "think": False}, "empty": {}}


@pytest.fixture
def parse(monkeypatch):
    def parse(*words):
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        return runs.parse_args(Args, PRESETS)

    return parse


def test_default_then_preset_then_flag(parse):
    assert parse() == Args()
    assert parse("--preset", "small") == Args(preset="small", steps=3, rate=0.5, think=False)
    for words in (["--preset", "small", "--steps", "7"], ["--steps=7", "--preset=small"]):
        assert parse(*words) == Args(preset="small", steps=7, rate=0.5, think=False)
    assert parse("--preset", "small", "--think").think
    # a flag with the default's value is still a flag
    assert parse("--preset", "small", "--steps", "10").steps == 10
    assert parse("--no-think", "--kind", "b") == Args(think=False, kind="b")
    assert parse("--preset", "empty") == Args(preset="empty")


@pytest.mark.parametrize(
    "words, named",
    [
        (["--preset", "smal"], "error: unknown preset 'smal'; known: small, empty"),
        (["--preset=smal"], "smal"),
        (["--kind", "c"], "--kind"),
    ],
)
def test_bad_arguments_exit_with_2(parse, exits, words, named):
    assert named in exits(parse, *words)


# --- functions and models that a user names


def test_load_function(tmp_path, exits, monkeypatch, capsys):
    (tmp_path / "json.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 2\ndef double(n):\n    return A().x * n\n"
    )
    assert runs.load_function(f"{tmp_path}/json.py:double")(4) == 8
    assert sys.modules["json"] is json  # a user's file of the same name takes no module's place
    monkeypatch.chdir(tmp_path)
    assert runs.load_function("json.py:double")(1) == 2
    assert "json.py has no function 'triple'" in exits(runs.load_function, "json.py:triple")
    Path("slow.py").write_text("print('loads a model')\ndef f():\n    pass\n")
    capsys.readouterr()
    assert runs.load_function("slow.py:f") is runs.load_function("slow.py:f")
    assert capsys.readouterr().out.count("loads a model") == 1
    for spec in ("nowhere.py:double", "json.py", "json:double", "", ":", f"{tmp_path}:double"):
        assert f"{spec!r} is not file.py:function" in exits(runs.load_function, spec)


def test_read_trained_as(tmp_path):
    assert chat.read_trained_as(str(tmp_path)) == {}  # not a checkpoint of ours
    assert chat.read_trained_as("org/base") == {}
    (tmp_path / "think_format.json").write_text('{"think_format": "plain"}')
    assert chat.read_trained_as(str(tmp_path)) == {"think_format": "plain"}


# (marks of the thinking and of the response, whether the chat template asks for a response, think format)
LONGCOT = [
    ("<think>", "</think>", False, "think"),  # what eval/README.md of the authors says of warm starts
    (None, "<response>", False, "think"),  # what their sft.py writes
    ("<think>", "<response>", True, "zero_think"),  # what their scripts for Zero write
    (None, "<response>", True, "zero_plain"),
]


def test_longcot_config_of_the_authors(tmp_path, exits):
    for opens_thinking, opens_response, asks, expected in LONGCOT:
        config = {"longcot": True, "longcot_delimiter": opens_response, "end_delimiter": None}
        config["start_think_marker"] = opens_thinking
        (tmp_path / "longcot_config.json").write_text(json.dumps(config))
        template = "Answer between <response> and </response>." if asks else "{{ messages }}"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert chat.read_trained_as(str(tmp_path)) == {"think_format": expected}

    (tmp_path / "chat_template.jinja").write_text("Answer between <response> and </response>.")
    (tmp_path / "tokenizer_config.json").unlink()
    assert chat.read_trained_as(str(tmp_path)) == {"think_format": "zero_plain"}
    (tmp_path / "longcot_config.json").write_text('{"longcot": false}')
    assert chat.read_trained_as(str(tmp_path)) == {"think_format": "plain"}
    (tmp_path / "longcot_config.json").write_text('{"longcot_delimiter": "</thought>"}')
    error = exits(chat.read_trained_as, str(tmp_path))
    assert "marks '' and '</thought>' of no think format" in error
    (tmp_path / "think_format.json").write_text('{"think_format": "plain"}')  # our own file comes first
    assert chat.read_trained_as(str(tmp_path)) == {"think_format": "plain"}


def test_think_format_of_a_hub_name(tmp_path, monkeypatch):
    """The hub's cache stands in for the hub: the same call of the same library reads it."""
    repository = tmp_path / "models--lab--released"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    config = {"longcot_delimiter": "</think>", "start_think_marker": "<think>"}
    (snapshot / "longcot_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert chat.read_trained_as("lab/released") == {"think_format": "think"}


def test_use_vllm(exits, monkeypatch):
    assert not rollout.wants_vllm("hf")
    monkeypatch.setitem(sys.modules, "vllm", None)  # vLLM is not installed
    assert not rollout.wants_vllm("hf") and not rollout.wants_vllm("auto")
    assert "vLLM is not installed" in exits(rollout.wants_vllm, "vllm")


# --- the run folder


def start(args, script: str, model: str, constants: dict | None = None):
    return runs.start_run(runs.check_run(args, script, model, constants))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watchdog, "RUN", dataclasses.replace(watchdog.RUN))
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "a b"])
    return tmp_path


def test_start_run_writes_what_was_run(here):
    run = start(Args(), "grpo", "org/base")
    assert run.parent.name == "results" and (here / run).is_dir()
    assert run.name.startswith("grpo__base__s0__")
    config = json.loads((run / "config.json").read_text())
    assert config["processes"] == 1 and Args(**config["args"]) == Args()
    assert (run / "command.txt").read_text() == f"{sys.executable} train.py --model 'a b'\n"
    env = (run / "env.txt").read_text()
    assert "\ntorch==" in env and "\ntrl==" in env
    assert len(env.split("\n")[0]) in (40, 0)  # the commit, if there is git


def test_the_same_arguments_find_the_same_folder(here):
    name = lambda args, script="grpo", model="org/base": start(args, script, model).name
    names = [
        name(Args()),
        name(Args(seed=1)),
        name(Args(rate=2e-6)),
        name(Args(preset="table1/llama")),
        name(Args(), "sft"),
        name(Args(), "grpo", "org/other/"),
    ]
    assert len(set(names)) == len(names)
    assert names[1].startswith("grpo__base__s1__") and names[3].startswith("grpo__table1-llama__s0__")
    assert (
        name(Args(overwrite=True))
        == name(Args(steps=11, overwrite=True))  # more steps train the same run on
        == names[0]
        == name(Args(resume=True))
        == name(Args(overwrite=True, resume=True))
    )


def test_an_existing_folder_is_refused(here, exits):
    run = start(Args(), "grpo", "org/base")
    (run / "metrics.jsonl").write_text("precious\n")
    before = {p: p.read_bytes() for p in run.iterdir()}
    error = exits(start, Args(), "grpo", "org/base")
    assert str(run) in error and all(flag in error for flag in ("--resume", "--overwrite", "--out"))
    mine = here / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious\n")  # never a run of ours
    for resume in (False, True):
        assert str(mine) in exits(start, Args(out=str(mine), resume=resume), "grpo", "org/base")
    assert (mine / "thesis.txt").read_text() == "precious\n" and len(list(mine.iterdir())) == 1
    assert {p: p.read_bytes() for p in run.iterdir()} == before
    (here / "empty").mkdir()
    (here / "empty" / "lock").touch()  # of a start that was killed at once
    assert (start(Args(out="empty"), "grpo", "org/base") / "config.json").exists()


def test_overwrite_starts_anew(here):
    run = start(Args(), "grpo", "org/base")
    (run / "checkpoint-1").mkdir()
    (run / "metrics.jsonl").write_text("old\n")
    assert start(Args(overwrite=True), "grpo", "org/base") == run
    assert sorted(p.name for p in run.iterdir()) == ["command.txt", "config.json", "env.txt", "lock"]


def test_overwrite_empties_nothing_but_a_run(here, exits):
    run = start(Args(out="results/a"), "grpo", "org/base")
    (here / "results" / "thesis.tex").write_text("precious\n")
    (here / "notes").mkdir()
    (here / "notes" / "thesis.tex").write_text("precious\n")
    for folder in ("results", "notes"):
        assert "is not a run's folder, or other runs are in it" in exits(
            start, Args(out=folder, overwrite=True), "grpo", "m"
        )
    assert (
        (here / "notes" / "thesis.tex").exists()
        and (run / "config.json").exists()
        and (here / "results" / "thesis.tex").exists()
    )


@dataclasses.dataclass
class Named(Args):
    model: str = ""
    prompts: str = ""
    gold: str = ""


def test_a_resume_over_other_files_is_refused(here, exits, capsys):
    """Prompts, a function's file, and a model's weights, of which beginning and end count; a file that came later does not."""
    (here / "p.jsonl").write_text("1\n")
    (here / "mine.py").write_text("def f(*a):\n    return 1.0\n")
    (here / "m").mkdir()
    (here / "m" / "model.safetensors").write_bytes(bytes(3 << 20))
    args = Named(out="run", model="m", prompts="p.jsonl", gold="mine.py:f")
    run = start(args, "grpo", "m")
    assert list(json.loads((run / "config.json").read_text())["files"]) == ["m", "mine.py", "p.jsonl"]
    again = dataclasses.replace(args, resume=True)
    assert start(again, "grpo", "m") == run
    for path, at, n in (
        ("p.jsonl", 0, 1),
        ("mine.py", 20, 1),
        ("m/model.safetensors", (3 << 20) - 5, 5),
        ("m/model.safetensors", 9, 1),
    ):
        before = (here / path).read_bytes()
        (here / path).write_bytes(before[:at] + b"7" * n + before[at + n :])
        assert f"{path.partition('/')[0]} has changed since" in exits(start, again, "grpo", "m")
        (here / path).write_bytes(before)
    (here / "m" / "model.safetensors").unlink()
    assert "m has changed since" in exits(start, again, "grpo", "m")


def test_a_resume_over_another_data_set_is_refused(here, exits):
    """A folder as `datasets` saves it, and one of its splits."""
    part = here / "prompts" / "train" / "data-00000-of-00001.arrow"
    part.parent.mkdir(parents=True)
    for number, name in enumerate(("prompts", "prompts:train")):
        part.write_bytes(b"1")
        args = Named(out=f"run{number}", prompts=name)
        run = start(args, "grpo", "m")
        assert list(json.loads((run / "config.json").read_text())["files"]) == [str(part.relative_to(here))]
        part.write_bytes(b"2")
        again = dataclasses.replace(args, resume=True)
        assert ".arrow has changed since" in exits(start, again, "grpo", "m")


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train.json", "data/train-0-of-1.parquet"])
def test_a_resume_over_another_folder_of_files_is_refused(here, exits, name):
    """A folder with any kind of file that rlmt/data.py reads; a file of another kind says nothing about the rows."""
    part = here / "prompts" / name
    part.parent.mkdir(parents=True)
    part.write_bytes(b"1")
    (here / "prompts" / "README.md").write_text("before")
    args = Named(out="run", prompts="prompts:train")
    run = start(args, "grpo", "m")
    assert list(json.loads((run / "config.json").read_text())["files"]) == [f"prompts/{name}"]
    (here / "prompts" / "README.md").write_text("after")
    again = dataclasses.replace(args, resume=True)
    assert start(again, "grpo", "m") == run
    part.write_bytes(b"2")
    assert f"prompts/{name} has changed since" in exits(start, again, "grpo", "m")


def test_a_resume_that_meets_no_run_names_the_nearest(here, capsys):
    """And starts anew, as a job script that always says --resume means."""
    first = start(Args(), "grpo", "org/base")
    start(Args(kind="b", rate=2e-6), "grpo", "org/base")
    capsys.readouterr()
    start(Args(rate=3e-6, resume=True), "grpo", "org/base")
    assert f"{first} has other arguments: rate (1e-06 -> 3e-06)" in capsys.readouterr().out


@dataclasses.dataclass
class Batched(Args):
    micro_batch_tokens: int = 8
    allow_truncation: bool = False


def test_a_resume_may_change_what_does_not_change_the_learning(here, capsys):
    """As after a GPU that was too small, or an abort that advises it."""
    run = start(Batched(), "grpo", "org/base")
    assert start(Batched(micro_batch_tokens=4, allow_truncation=True, resume=True), "grpo", "org/base") == run
    assert (
        "goes on with micro_batch_tokens (8 -> 4), allow_truncation (False -> True)"
        in capsys.readouterr().out
    )


def test_the_environments_of_all_starts_are_kept(here, capsys):
    run = start(Args(), "grpo", "org/base")
    env = (run / "env.txt").read_text()
    (run / "env.txt").write_text(env.replace("torch==", "torch==0"))
    start(Args(resume=True), "grpo", "org/base")
    assert "differ from the last start" in capsys.readouterr().out
    assert (run / "env.txt").read_text() == env.replace("torch==", "torch==0") + f"\n\n# resumed\n{env}"
    start(Args(resume=True), "grpo", "org/base")
    assert (run / "env.txt").read_text().endswith(
        f"\n\n# resumed\n{env}"
    ) and "WARNING" not in capsys.readouterr().out


def test_a_run_starts_where_there_is_no_git(here, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert (start(Args(), "grpo", "org/base") / "env.txt").read_text().startswith("\n")


@dataclasses.dataclass
class OneCard(Args):
    lora_r: int = 0
    load_in_4bit: bool = False
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    report_to: Literal["none", "tensorboard"] = "none"


def test_what_bitsandbytes_and_trackers_cannot_do_is_refused(exits, monkeypatch):
    assert "add --lora-r 64" in exits(runs.check_values, OneCard(load_in_4bit=True))
    runs.check_values(OneCard(load_in_4bit=True, lora_r=4, optim="adamw_8bit"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = exits(runs.check_values, OneCard(report_to="tensorboard"))
    assert "--report-to tensorboard: it is not installed; pip install tensorboard" in said

    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    runs.check_values(OneCard(lora_r=4))
    for args, flag in (
        (OneCard(optim="adamw_8bit"), "--optim adamw_8bit"),
        (OneCard(lora_r=4, load_in_4bit=True), "--load-in-4bit"),
    ):
        assert f"{flag} needs whole weights on each GPU" in exits(runs.check_values, args)


@dataclasses.dataclass
class Evaluation(Args):
    temperature: float = 0.7
    top_p: float = 1.0


@dataclasses.dataclass
class Training(Evaluation):
    learning_rate: float = 1e-6


def test_training_samples_at_a_temperature_above_0_and_from_some_tokens(exits):
    for temperature in (0.0, -1.0, math.nan):
        said = exits(runs.check_values, Training(temperature=temperature))
        assert f"--temperature {temperature}: use more than 0" in said
    for top_p in (0.0, 1.5, math.nan):
        assert f"--top-p {top_p}: use more than 0 and at most 1" in exits(
            runs.check_values, Training(top_p=top_p)
        )
    runs.check_values(Training(temperature=1e-3, top_p=1e-3))
    runs.check_values(Evaluation(temperature=0.0))  # it may be greedy


@dataclasses.dataclass
class Paid(Args):
    budget: float = 0.0


@dataclasses.dataclass
class Simulated(Args):
    simulator: str = "m"
    simulator_url: str = ""
    judge_url: str = ""


def test_a_resume_may_ask_a_model_at_another_host(here, exits):
    """As where a scheduler has started its server elsewhere; another model makes another run."""
    first = Simulated(simulator_url="http://node1:8000/v1", judge_url="http://node1:8001/v1")
    run = start(first, "rlver", "org/base")
    moved = Simulated(simulator_url="http://node2:8000/v1", judge_url="http://node2:8001/v1", resume=True)
    assert start(moved, "rlver", "org/base") == run
    other = dataclasses.replace(moved, simulator="other", out=str(run))
    assert "simulator (m -> other)" in exits(start, other, "rlver", "org/base")


def test_a_resume_may_raise_the_budget(here):
    """Else a run that had spent it could not go on."""
    run = start(Paid(budget=1.0), "grpo", "org/base")
    assert start(Paid(budget=2.0, resume=True), "grpo", "org/base") == run


def test_resume_continues_with_equal_arguments_only(here, exits):
    run = start(Args(out="run"), "grpo", "org/base")
    (run / "metrics.jsonl").write_text("old\n")
    assert start(Args(out="run", resume=True), "grpo", "org/base") == run
    assert (run / "metrics.jsonl").read_text() == "old\n"
    assert start(Args(out="run", resume=True), "grpo", "org/base") == run  # a second time
    error = exits(start, Args(out="run", resume=True, kind="b", rate=2e-6), "grpo", "org/base")
    assert "kind (a -> b)" in error and "rate (1e-06 -> 2e-06)" in error and "seed" not in error
    exits(start, Args(out="run", resume=True, overwrite=True, kind="b"), "grpo", "org/base")
    assert (run / "metrics.jsonl").read_text() == "old\n"
    assert json.loads((run / "config.json").read_text())["args"]["steps"] == 10
    start(Args(out="constants"), "grpo", "org/base", {"LIMIT": 1})
    error = exits(start, Args(out="constants", resume=True), "grpo", "org/base", {"LIMIT": 2})
    assert "LIMIT (1 -> 2)" in error
    new = start(Args(resume=True, seed=5), "grpo", "org/base")  # nothing to resume: a fresh run
    assert (new / "config.json").exists()


def test_a_finished_run_ends_at_once_unless_it_is_to_be_longer(here, capsys):
    run = start(Args(), "grpo", "org/base")
    (run / "model").mkdir()
    runs.write_summary(run, {"steps": 10})
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    for steps in (10, 9):
        with pytest.raises(SystemExit) as e:
            start(Args(resume=True, steps=steps), "grpo", "org/base")
        assert e.value.code == 0 and f"{run} is complete" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before

    assert start(Args(resume=True, steps=11), "grpo", "org/base") == run
    assert not (run / "summary.json").exists()
    assert start(Args(resume=True, steps=11), "grpo", "org/base") == run  # it was interrupted


# --- logs


def test_step_logger(tmp_path, capsys):
    logger = runs.StepLogger(tmp_path, 0, 4, {"reward": "reward", "gold": "reward/gold"})
    logger.log(1, {"reward": 0.5, "reward/gold": float("nan")}, 100, 2.0)
    resumed = runs.StepLogger(tmp_path, 1, 4, {"reward": "reward"})
    resumed.log(2, {"reward": 0.75}, 60, 1.0)
    lines = rlmt_data.read_log(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["reward"], line["num_tokens"]) for line in lines] == [
        (1, 0.5, 100),
        (2, 0.75, 160),
    ]
    shown = capsys.readouterr().out
    assert "step 1/4  reward 0.5  tokens/s 50  left" in shown and "step 2/4  reward 0.75" in shown


def test_tensorboard_gets_every_step_once(tmp_path, capsys):
    """A run that was killed after step 3 and goes on from its checkpoint at step 2 has one step 3, the later one."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = runs.StepLogger(tmp_path, 0, 4, {}, "tensorboard")
    for step in (1, 2, 3):
        first.log(step, {"reward/gold": step / 10, "why": "text", "skipped": {"tie": 1}}, 100, 2.0)
    resumed = runs.StepLogger(tmp_path, 2, 4, {}, "tensorboard")  # the first one was never closed
    for step in (3, 4):
        resumed.log(step, {"reward/gold": step * 10.0}, 100, 2.0)
    resumed.close()
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = [(event.step, event.value) for event in found.Scalars("reward/gold")]
    assert values == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2)), (3, 30.0), (4, 40.0)]
    assert {"num_tokens", "step_time"} < set(found.Tags()["scalars"]) and "why" not in found.Tags()["scalars"]


def test_a_whole_number_in_a_preset_names_the_same_run(monkeypatch):
    keys = set()
    for flags in ([], ["--rate", "1"], ["--rate", "1.0"]):
        monkeypatch.setattr(sys, "argv", ["script.py", "--preset", "one", *flags])
        args = runs.parse_args(Args, {"one": {"rate": 1}})
        keys.add(json.dumps(vars(args)))
    assert len(keys) == 1


def test_a_list_flag_that_is_given_twice_is_refused(monkeypatch, capsys):
    words = ["script.py", "--names", "a", "--steps", "3", "--names=b", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", words)

    @dataclasses.dataclass
    class Listed(Args):
        names: tuple[str, ...] = ()

    with pytest.raises(SystemExit):
        runs.parse_args(Listed, {})
    assert "--names is given 2 times" in capsys.readouterr().err
