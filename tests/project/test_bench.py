"""The bench runs both sides of a comparison for real, at the size `tiny`, and both sides train on the same
thing."""

import json
import sys

import pytest
from script_runs import new_accelerator, run_here

from conftest import ROOT
from dev import bench


def run_side_here(words: list[str], checkout: str) -> float:
    """Runs one side in this process, which has the libraries already."""
    assert checkout == bench.ROOT
    if words[0] == "-c":
        with new_accelerator():
            exec(words[1])
    else:
        run_here([sys.executable, *words])
    return 1.0


def test_sft_against_trl(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "run_side", run_side_here)
    bench.main(bench.Args(cases=("sft",), size="tiny", pairs=1, steps=1, out=tmp_path))
    (path,) = tmp_path.glob("sft-tiny-TRL__cpu.json")
    result = json.loads(path.read_text())["result"]
    assert result["same_tokens"]
    assert result["largest_difference"]["loss"] < 1e-5
    assert result["largest_difference"]["grad_norm"] < 1e-4
    ours, other = result["ours"], result["other"]
    ratio = other["seconds_per_step"]["median"] / ours["seconds_per_step"]["median"]
    assert result["other / ours"]["median"] == pytest.approx(ratio)


def test_a_side_is_a_process_whose_peak_is_measured():
    assert 0.25 < bench.run_side(["-c", "b'x' * 2**28"], bench.ROOT) < 10
    with pytest.raises(SystemExit, match="failed"):
        bench.run_side(["-c", "raise SystemExit(1)"], bench.ROOT)


def test_the_committed_table_is_that_of_the_committed_results():
    folder = ROOT / "results" / "bench"
    assert bench.table(folder) == (folder / "table.md").read_text()
