"""data.prepare from-run and from-run-pairs, on small logs in which everything can be counted by hand."""

import json
from pathlib import Path

import pytest

from data import prepare
from data.prepare import Args
from rlmt.data import append_jsonl
from rlmt.sampler import Completion
from test_prepare import chat, run, write


def make_run(folder: Path, rows: list[dict], flag: str = "prompts") -> Path:
    """The config of a run whose `flag` names a file of rows, as our scripts write it."""
    folder.mkdir()
    path = write(folder / "prompts.jsonl", rows)
    config = {"args": {flag: str(path)}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sample(folder: Path, prompt_id: str, *rewards: float | None, name: str = "math", **fields) -> None:
    """Logs a completion of the prompt for each reward, as a training script does."""
    rows = []
    for number, reward in enumerate(rewards):
        texts = {"response": f"y{number}", "thinking": f"z{number}", "status": "ok"}
        completion = Completion(prompt_id, chat(prompt_id), [], [], **texts | fields)
        completion.rewards = {name: reward}
        completion.reward = float("nan") if reward is None else reward
        rows.append({"step": 1, **completion.row()})
    append_jsonl(folder / "completions.jsonl", rows)


def prompt(prompt_id: str, **fields) -> dict:
    return {"id": prompt_id, "messages": chat(prompt_id), "answer": "4", **fields}


def test_prompts_are_kept_by_their_pass_rate(tmp_path):
    names = ("never", "hard", "edge", "easy", "unseen", "judge failed", "changed", "cut off")
    source = [prompt(name, level=3) for name in names]
    source[6]["messages"] = chat("another prompt of this id")
    folder = make_run(tmp_path / "run", source)
    sample(folder, "never", 0, 0, 0, 0, 0, 0, 0, 0)
    sample(folder, "hard", 0, 0, 0, 1, 0, 0, 0, 0)
    sample(folder, "edge", 1, 1, 1, 0)
    sample(folder, "edge", 0, 0, 1, 1, None)  # of a later step: 5 of 8, as a failed judge counts for nothing
    sample(folder, "easy", 1, 1, 1, 1, 1, 1, 0, 0)
    sample(folder, "judge failed", None, None)
    sample(folder, "changed", 1, 0)
    sample(folder, "gone", 1, 0)
    sample(folder, "cut off", 1)
    # right, or not judged, but they got a floor
    sample(folder, "cut off", 1, None, status="truncated", gets_floor=True)
    sample(folder, "cut off", None, status="no_close")  # as in a round of DPO

    kept, report = run("from-run", folder)
    assert [row["id"] for row in kept] == ["hard", "edge", "cut off"]
    assert [row["pass_rate"] for row in kept] == [0.125, 0.625, 0.25]
    # the fields that the log does not have
    assert kept[0] == prompt("hard", level=3, pass_rate=0.125)
    assert report["n_in"] == 9 and report["examples"] == {
        "too_hard": ["never"],
        "too_easy": ["easy"],
        "not_in_run": ["unseen"],
        "no_value": ["judge failed"],
        "other_prompt": ["changed"],
        "no_prompt_row": ["gone"],
    }


def test_pass_rate_by_a_threshold(tmp_path):
    """The floor of a group may be above the threshold, and still solves nothing."""
    folder = make_run(tmp_path / "run", [prompt("a"), prompt("b")])
    sample(folder, "a", 7.0, 5.0, name="preference")
    sample(folder, "a", 6.5, 6.5, name="preference", status="no_close", gets_floor=True)
    sample(folder, "b", 6.0, 5.0, name="preference")  # 6 is not above 6
    kept, report = run("from-run", folder, by="reward", threshold=6.0)
    assert [(row["id"], row["pass_rate"]) for row in kept] == [("a", 0.25)]
    assert report["dropped"] == {"too_hard": 1}


def test_answers_of_an_evaluation(tmp_path):
    folder = make_run(tmp_path / "run", [prompt("t-1"), prompt("u")], "tasks")
    tasks = [prompt("t-1"), prompt("u")]
    for sample_id, task, score in (("t-1-0", 0, 1), ("t-1-1", 0, 0), ("u", 1, 1)):
        answer = {"id": sample_id, "temperature": 1.0, "messages": tasks[task]["messages"], "status": "ok"}
        append_jsonl(folder / "generations.jsonl", [answer])
        append_jsonl(folder / "verdicts.jsonl", [{"id": sample_id, "temperature": 1.0, "score": score}])
    kept, report = run("from-run", folder, by="gold")
    assert kept == [prompt("t-1", pass_rate=0.5)] and report["dropped"] == {"too_easy": 1}


def test_pairs_of_the_best_and_the_worst(tmp_path):
    names = ("clear", "tie", "close", "alone", "cut off", "same text", "unseen")
    folder = make_run(tmp_path / "run", [prompt(name) for name in names])
    sample(folder, "clear", 1.0, 4.0, None, 4.0, 0.5, 0.5, name="preference")
    sample(folder, "tie", 2.0, 2.0, name="preference")
    sample(folder, "close", 2.0, 2.25, name="preference")
    sample(folder, "alone", 2.0, None, name="preference")
    sample(folder, "cut off", 1.0, 2.0, name="preference")
    sample(folder, "cut off", 9.0, -9.0, name="preference", response="", status="truncated")
    sample(folder, "same text", 1.0, 2.0, name="preference", response="y")
    sample(folder, "gone", 1.0, 2.0, name="preference")  # the log has all that a pair needs

    pairs, report = run("from-run-pairs", folder, by="preference", margin=0.5)
    assert pairs[0] == {  # of equal ones the first
        "id": "clear",
        "messages": chat("clear"),
        "chosen": "y1",
        "rejected": "y4",
        "chosen_thinking": "z1",
        "rejected_thinking": "z4",
    }
    assert [(pair["id"], pair["chosen"]) for pair in pairs[1:]] == [("cut off", "y1"), ("gone", "y1")]
    assert report["examples"] == {
        "tied_scores": ["tie"],
        "small_margin": ["close"],
        "too_few_valid": ["alone"],
        "identical_pair": ["same text"],
        "not_in_run": ["unseen"],
    }
    pairs, _ = run("from-run-pairs", folder, by="reward", overwrite=True)
    assert [pair["id"] for pair in pairs] == ["clear", "close", "cut off", "gone"]


@pytest.mark.parametrize("kind", ["from-run", "from-run-pairs"])
def test_runs_that_cannot_be_used(tmp_path, exits, kind):
    def error_of(folder: Path, **more) -> str:
        return exits(prepare.main, Args(kind, tmp_path / "out.jsonl", str(folder), **more))

    assert "no config.json" in error_of(tmp_path)
    folder = make_run(tmp_path / "run", [prompt("a")])
    assert "--by correct: no completion" in error_of(folder)
    sample(folder, "a", 1.0, 0.0, name="preference")
    assert "there are preference, reward" in error_of(folder, by="gold")
    rlver = make_run(tmp_path / "rlver", [prompt("a")], "profiles")
    assert "it has no prompts" in error_of(rlver)
    (folder / "prompts.jsonl").unlink()
    assert f"{folder}/config.json: {folder}/prompts.jsonl: no such file" in error_of(folder, by="reward")
