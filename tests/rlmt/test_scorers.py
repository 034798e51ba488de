"""rlmt/scorers.py: each spelling of who scores; functions in files of a user."""

import json
import sys

import pytest

from rlmt.scorers import Who, load_function, read_who


@pytest.mark.parametrize(
    "word, url, who",
    [
        ("", "", Who("nobody", "")),
        ("a/b.py:f", "http://h/v1", Who("function", "a/b.py:f")),
        ("local:a/b", "", Who("folder", "a/b")),
        ("m", "http://h/v1", Who("endpoint", "m", "http://h/v1")),
        ("judge:org/m", "", Who("endpoint", "org/m")),
        ("judge:m@1@http://h/v1", "", Who("endpoint", "m@1", "http://h/v1")),
    ],
)
def test_each_spelling_is_read(word, url, who):
    assert read_who(word, url) == who
    if word == "m":
        assert read_who(word, otherwise="folder").kind == "folder"


OWN = """
import multiprocessing
from helper_of_mine import FACTOR
print("loads a model")

def one(row):
    return FACTOR * row["n"]

def fork(rows):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(one, rows)

def spawn(rows):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(one, rows)

def spoil(rows):
    rows[0]["turns"].append(rows.pop())
"""


def test_functions_of_a_file(tmp_path, exits, capsys, monkeypatch):
    """A file is run once, takes no module's place, and may have helpers and processes; what it gets are copies."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["train_grpo.py"])
    (tmp_path / "helper_of_mine.py").write_text("FACTOR = 2")
    for stem in ("reward_of_mine", "json"):
        path = tmp_path / f"{stem}.py"
        path.write_text(OWN)
        assert load_function(f"{path}:fork")([{"n": 4}]) == [8]
        rows = [{"turns": []}, {}]
        load_function(f"{path}:spoil")(rows)
        assert rows == [{"turns": []}, {}] and capsys.readouterr().out.count("loads a model") == 1
        assert "has no function 'triple'" in exits(load_function, f"{path}:triple")
    assert sys.modules["json"] is json
    assert load_function(f"{tmp_path}/reward_of_mine.py:spawn")([{"n": 4}]) == [8]
