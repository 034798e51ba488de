"""Tests the notebooks as they are committed, and runs their cells on the committed results."""

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import nbformat
import pytest
from script_runs import ROOT
from test_page import completion, generation, write


pytestmark = pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.<:/~])/[A-Za-z][\w.-]*/[\w.-]+|[A-Z]:\\\\")  # an absolute path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_a_notebook_is_valid_executed_in_order_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "run it again from the top"
    )
    assert path.stat().st_size < 400_000
    for output in [output for cell in code for output in cell.outputs]:
        assert output.output_type != "error", output.evalue
        assert output.get("name") != "stderr", output.text
        output.get("data", {}).pop("image/png", "")  # its letters could spell a path
    assert not ABSOLUTE.findall(json.dumps(notebook.cells, ensure_ascii=False))


@pytest.fixture
def run_cells(tmp_path, monkeypatch):
    """A function that runs a notebook in a folder that stands for notebooks/, as plots are written there."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.syspath_prepend(ROOT / "notebooks")

    def run(path: Path, runs: str = "../results/toy") -> dict:
        cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        source = "\n".join(cells).replace('"../results/toy"', repr(runs))
        variables = {}
        exec(compile(source, path.name, "exec"), variables)
        plt.close("all")
        return variables

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_cells_run_on_the_committed_results(path, run_cells):
    run_cells(path)


def test_the_trace_reader_shows_a_run(run_cells, tmp_path):
    """Completions of training are not committed, and then it shows answers without rewards."""
    run = write(tmp_path / "rl", "completions.jsonl", [completion("a", 1, 1.0), completion("b", 2, 2.0)])
    args = {"model": "sft/model", "think_format": "think"}
    (run / "config.json").write_text(json.dumps({"args": args}))
    for name, model, gold in (("before", "sft/model", 0.25), ("after", "rl/model", 0.75)):
        evaluation = write(tmp_path / name, "generations.jsonl", [generation("a", sample=0, score=gold)])
        (evaluation / "config.json").write_text(json.dumps({"args": {"model": model}}))
    shown = run_cells(ROOT / "notebooks/03_trace_reader.ipynb", str(tmp_path))
    assert list(shown["best"]["id"]) == ["b", "a"]
    pair = shown["pairs"].iloc[0]
    assert (pair["gold before"], pair["gold after"]) == (0.25, 0.75)


def test_a_run_looks_alike_in_all_plots(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    import style

    styles = style.of_runs(["toy-rlmt-s0", "toy-rlhf-s0", "toy-rlmt-careful-s0"]).values()
    assert [(line["linestyle"], line["marker"]) for line in styles] == [
        ("solid", "o"),
        ("dashed", "o"),
        ("solid", "v"),
    ]
    # config.json knows whether a run thinks, its name need not
    styles = style.of_runs(["mine", "ppo-think"], {"mine": False, "ppo-think": True})
    assert [(line["linestyle"], line["marker"]) for line in styles.values()] == [
        ("dashed", "o"),
        ("solid", "s"),
    ]
