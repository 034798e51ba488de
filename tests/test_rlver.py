"""train_rlver.py: conversations as token ids and masks, the reward, what enters the loss, learning, kill and resume."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from transformers import AutoTokenizer
from trl import GRPOTrainer

import runs
import train_rlver
import utils
from data.toy import users as toy_users

ROOT = Path(__file__).parents[1]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PartialState(cpu=True)


@pytest.fixture(scope="module")
def tokenizer():
    tok = AutoTokenizer.from_pretrained(ROOT / "data/toy/base")
    utils.prepare_tokenizer(tok, "think")
    return tok


def test_trl_still_has_the_hook():
    """rollout_func with env_mask is called experimental by TRL."""
    source = inspect.getsource(GRPOTrainer._generate)
    assert "self.rollout_func(prompts, self)" in source and 'pop("env_mask"' in source
    assert '"tool_mask" not in inputs else completion_mask * inputs["tool_mask"]' in inspect.getsource(
        GRPOTrainer
    )


def test_turns_put_together_are_the_conversation(tokenizer):
    prompt = [{"role": "user", "content": "Hello! We want fish."}]
    said, then = (
        "<think>\nBudget.\n</think>\n\ncod costs 5 dollars.",
        {"role": "user", "content": "Good! We want meat."},
    )
    head, reply = utils.encode_prompt(tokenizer, prompt), utils.encode_completion(tokenizer, said)
    whole = utils.encode_prompt(tokenizer, [*prompt, {"role": "assistant", "content": said}, then])
    assert head + reply + train_rlver.turn_ids(tokenizer, then["content"], True) == whole
    # a reply that was cut off has no end of turn yet
    assert head + reply[:-1] + train_rlver.turn_ids(tokenizer, then["content"], False) == whole
    train_rlver.check_turns(tokenizer, prompt)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, capsys):
    other = AutoTokenizer.from_pretrained(ROOT / "data/toy/base")
    other.chat_template = tokenizer.chat_template.replace(
        "{%- for", "{{- messages | length }}{%- for", 1
    ).replace("{% for", "{{ messages | length }}{% for", 1)
    with pytest.raises(SystemExit) as e:
        train_rlver.check_turns(other, [{"role": "user", "content": "Hello!"}])
    assert e.value.code == 2 and "--chat-template" in capsys.readouterr().err


def test_the_reward_is_the_emotion():
    rows = [{"emotion": 100}, {"emotion": 0}, {"emotion": None}, {"emotion": -8}, {"emotion": 47}]
    assert train_rlver.emotions(rows, 1).totals == [1.0, 0.0, None, 0.0, 0.47]


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    path = tmp_path_factory.mktemp("users") / "users.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in toy_users.profiles(32, 0, "train")))
    return path


def command(users, out, *words) -> list[str]:
    args = [
        "train_rlver.py",
        "--preset",
        "toy",
        "--no-think",
        "--model",
        "data/toy/base",
        "--profiles",
        users,
        "--prompts-per-step",
        4,
        *(() if "ppo" in words else ("--group-size", 4)),
        "--micro-batch-size",
        8,
        "--max-turn-tokens",
        16,
        "--steps",
        3,
        "--save-steps",
        1,
        "--allow-truncation",
        "--out",
        out,
        *words,
    ]
    return [sys.executable, *map(str, args)]


def run(*args) -> subprocess.CompletedProcess:
    done = subprocess.run(command(*args), cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    "words",
    [[], ["--algorithm", "ppo", "--prompts-per-step", 16], ["--rollout", "vllm"]],
    ids=["grpo", "ppo", "vllm"],
)
def test_the_script_and_its_log(users, tmp_path, words):
    """With transformers also: killed after its second step, it ends with the same bits."""
    run(users, tmp_path / "whole", *words)
    rows = jsonl(tmp_path / "whole" / "completions.jsonl")
    assert len(rows) == 48 and len(jsonl(tmp_path / "whole" / "metrics.jsonl")) == 3
    for row in rows:
        last = row["dialogue"][-1]
        assert row["ended"] in ("turns", "failed", "bad_format", "satisfied") and 1 <= row["turns"] <= 3
        emotion = 0 if row["ended"] == "bad_format" else last["emotion-point"]
        assert row["emotion"] == emotion and row["reward"] == pytest.approx(max(0, emotion / 100))
        assert (
            row["contributions"] == {"emotion": row["reward"]}
            or abs(row["contributions"]["emotion"] - row["reward"]) < 1e-6
        )
        assert [m["role"] for m in row["dialogue"]][:2] == ["user", "assistant"]
    if not words:
        groups = [rows[i : i + 4] for i in range(0, 48, 4)]
        assert all(len({row["id"] for row in group}) == 1 for group in groups)
    if "vllm" in words:
        return
    process = subprocess.Popen(
        command(users, tmp_path / "killed", *words),
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and len(jsonl(tmp_path / "killed" / "metrics.jsonl")) < 2:
        time.sleep(0.02)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(users, tmp_path / "killed", *words, "--resume")
    a, b = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed"))
    assert (
        all(torch.equal(a[k], b[k]) for k in a) and jsonl(tmp_path / "killed" / "completions.jsonl") == rows
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (["--simulator", ""], "--simulator is missing"),
        (["--ask-thinking", "--no-think"], "leave one out"),
        (["--profiles", "nowhere.jsonl"], "no such file"),
        (["--prompts-per-step", "3"], "cannot be split"),
        (["--max-tokens", "20"], "has no room"),
    ],
)
def test_what_cannot_run_is_said_first(words, message, users, monkeypatch, capsys):
    base = ["--preset", "toy", "--model", "data/toy/base", "--profiles", str(users), "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["train_rlver.py", *base, *words])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as e:
        train_rlver.main(runs.parse_args(train_rlver.Args, train_rlver.PRESETS))
    assert e.value.code == 2 and message in capsys.readouterr().err
