"""The bench runs both sides of a comparison for real, at the size `tiny`, and both sides train on the same
thing."""

import json
from pathlib import Path

import pytest

from dev import bench
from rlmt.data import read_log

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("old", ["", str(ROOT)])
def test_sft_against_trl_and_another_checkout(old, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bench.main(bench.Args(cases=("sft",), size="tiny", pairs=1, steps=1, old=old, out=tmp_path))
    (path,) = tmp_path.glob("sft-tiny-float32*__cpu.json")
    result = json.loads(path.read_text())["result"]
    side = "old" if old else "peer"
    assert result["same_tokens"]
    assert result["largest_difference"]["loss"] < 1e-5
    assert result["largest_difference"]["grad_norm"] < 1e-4
    ratio = result[f"{side} / ours"]["median"]
    ours = result["ours"]["tokens_per_second"]["median"]
    assert ratio == pytest.approx(ours / result[side]["tokens_per_second"]["median"])
    assert f"**{ratio:.2f}** (once)" in (tmp_path / "table.md").read_text()


def test_the_judge_s_client_is_timed(peers, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "CALLS", 8)
    monkeypatch.setattr(peers, "IN_FLIGHT", (8,))
    peers.our_judge(peers.Args(out=tmp_path))
    (line,) = read_log(tmp_path / "metrics.jsonl")
    assert 0 < line["8 in flight"] < 1 and line["num_tokens"] == 8


@pytest.fixture(scope="module")
def peers():
    from dev import peers

    return peers


@pytest.fixture(scope="module")
def work(peers, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    peers.make(peers.Args(folder=folder, size="tiny"))
    return folder


def test_the_committed_table_is_that_of_the_committed_results():
    folder = ROOT / "results" / "bench"
    assert bench.table(folder) == (folder / "table.md").read_text()
