"""The bench runs both sides of a comparison for real, at the size `tiny`, and both sides train on the same
thing."""

import json

import pytest

from conftest import ROOT
from dev import bench
from rlmt.data import read_log


def test_sft_against_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    bench.main(bench.Args(cases=("sft",), size="tiny", pairs=1, steps=1, out=tmp_path))
    (path,) = tmp_path.glob("sft-tiny-float32*__cpu.json")
    result = json.loads(path.read_text())["result"]
    assert result["same_tokens"]
    assert result["largest_difference"]["loss"] < 1e-5
    assert result["largest_difference"]["grad_norm"] < 1e-4
    ours = result["ours"]["tokens_per_second"]["median"]
    ratio = ours / result["peer"]["tokens_per_second"]["median"]
    assert result["peer / ours"]["median"] == pytest.approx(ratio)


def test_the_judge_s_client_is_timed(tmp_path, monkeypatch):
    from dev import peers  # here, as each process of pytest would import TRL

    monkeypatch.setattr(peers, "CALLS", 8)
    monkeypatch.setattr(peers, "IN_FLIGHT", (8,))
    peers.our_judge(peers.Args(out=tmp_path))
    (line,) = read_log(tmp_path / "metrics.jsonl")
    assert 0 < line["8 in flight"] < 1 and line["num_tokens"] == 8


def test_the_committed_table_is_that_of_the_committed_results():
    folder = ROOT / "results" / "bench"
    assert bench.table(folder) == (folder / "table.md").read_text()
