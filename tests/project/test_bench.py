"""The bench runs both sides of a comparison for real, at the size `tiny`, and both sides train on the same
thing."""

import json

import pytest

from conftest import ROOT
from dev import bench


def test_sft_against_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    bench.main(bench.Args(cases=("sft",), size="tiny", pairs=1, steps=1, out=tmp_path))
    (path,) = tmp_path.glob("sft-tiny-TRL__cpu.json")
    result = json.loads(path.read_text())["result"]
    assert result["same_tokens"]
    assert result["largest_difference"]["loss"] < 1e-5
    assert result["largest_difference"]["grad_norm"] < 1e-4
    ours, other = result["ours"], result["other"]
    ratio = other["seconds_per_step"]["median"] / ours["seconds_per_step"]["median"]
    assert result["other / ours"]["median"] == pytest.approx(ratio)
    assert 0.1 < ours["peak_gib"]["max"] < 10


def test_the_committed_table_is_that_of_the_committed_results():
    folder = ROOT / "results" / "bench"
    assert bench.table(folder) == (folder / "table.md").read_text()
