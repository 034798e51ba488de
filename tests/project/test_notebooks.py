"""Tests the notebooks as they are committed, and runs their cells on the committed results."""

import json
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import nbformat
import pytest
from script_runs import ROOT
from test_page import completion, write

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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_cells_run(path, tmp_path, monkeypatch):
    """On the committed results, but 03, which shows completions: they are not committed."""
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend("..")
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    source = "\n".join(cells)
    if path.name.startswith("03"):
        args = {"model": "m", "reward_model": "r", "think_format": "think"}
        write(tmp_path / "rl", "completions.jsonl", [completion("a", 1, 1.0), completion("b", 1, 2.0)])
        (tmp_path / "rl" / "config.json").write_text(json.dumps({"args": args}))
        source = source.replace('"../results/toy"', repr(str(tmp_path)))
    exec(compile(source, path.name, "exec"), {})
    plt.close("all")
