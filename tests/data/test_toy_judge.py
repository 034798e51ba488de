"""data/toy/judge.py, asked over real HTTP by the rewards: verdicts by hand, the share that is wrong, its
command."""

import json
import random
import subprocess
import sys

import pytest
from conftest import ROOT

from rewards import judged
from data.toy import judge as toy_judge
from data.toy import world as toy_world
from data.toy.world import CHECKS, TEACHER, write_answer
from rlmt.endpoint import Endpoint

TEXT = "Hi! My wish list, best first: ribs, tuna, cheese, ham, custard. The budget is 15 dollars. No fish, please. Remind me of the hats."
GOOD = (
    "You get 3 dishes, 1 dollar is left, and custard comes last. The bill: ribs 7 leaves 8, cheese 4 leaves 4, custard 3 "
    "leaves 1. Remember the hats!"
)
TOTAL = sum(weight for weight, _ in CHECKS.values())


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask(rows, wrong): rewards by rubrics of a judge with that share of wrong verdicts."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def ask(rows: list[dict], wrong: float) -> list[float]:
        server = toy_judge.Server(wrong)
        judge = Endpoint("toy-judge", tmp_path / f"{wrong}.jsonl", server.url, backoff=0.01)
        rewards = judged.rubric(rows, judge=judge)
        server.shutdown()
        server.server_close()
        return rewards

    return ask


def row(response: str, text: str = TEXT) -> dict:
    criteria = toy_judge.criteria(toy_world.read_prompt(text))
    rubric = [{"criterion": words, "weight": CHECKS[name][0]} for name, words in criteria.items()]
    messages = [{"role": "user", "content": text}]
    return {"id": "0", "messages": messages, "response": response, "status": "ok", "rubric": rubric}


def drafts(n: int) -> list[dict]:
    rng = random.Random(1)
    rows = []
    for _, order, text, _ in toy_world.orders_of("rl", n, 3):
        _, response = write_answer(order, TEACHER, rng)
        rows.append(row(response, text))
    return rows


def test_a_judge_without_errors_gives_gold(ask):
    rows = [row(GOOD), row(GOOD.replace("hats", "cards")), row(f"What a lovely idea! {GOOD}"), row("Hello!")]
    lost = [0, CHECKS["word"][0], CHECKS["brief"][0], TOTAL]
    assert ask(rows, 0.0) == pytest.approx([1 - x / TOTAL for x in lost])
    rows = drafts(40)
    assert ask(rows, 0.0) == pytest.approx([toy_world.gold(r["messages"], r["response"]) for r in rows])


def test_the_stated_share_of_verdicts_is_wrong_and_stays_so(ask):
    rows = drafts(300)
    n_wrong = 0
    for r in rows:
        order = toy_world.read_prompt(r["messages"][0]["content"])
        truth = toy_world.check(order, r["response"])
        met = toy_judge.verdicts(order, r["response"], 0.1)
        assert met == toy_judge.verdicts(order, r["response"], 0.1)
        for name, words in toy_judge.criteria(order).items():
            n_wrong += met[words] != truth[name]
    assert n_wrong / (11 * len(rows)) == pytest.approx(0.1, abs=4 * (0.09 / 3300) ** 0.5)
    noisy = ask(rows[:40], 0.1)
    assert noisy == ask(rows[:40], 0.1) != ask(rows[:40], 0.0)


ASK = """
import json, os, sys, urllib.request
reply = urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", sys.argv[1].encode())
print(json.load(reply)["choices"][0]["message"]["content"])
sys.exit(7)
"""


def test_a_command_beside_the_judge():
    """The environment leads to it, and the exit code is the command's."""
    request = json.dumps(judged.request("mark", 99, row(GOOD), "response"))
    judge = [sys.executable, "-m", "data.toy.judge", "--wrong", "0", "--"]
    command = [*judge, sys.executable, "-c", ASK, request]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (7, '{"reason": "", "mark": 10}\n'), done.stderr
