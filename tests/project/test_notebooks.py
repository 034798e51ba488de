"""Tests the notebooks as they are committed, and runs their cells on the committed results and on other folders."""

import builtins
import json
import re
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from script_runs import ROOT
from test_page import completion, write

from notebooks import style

pytestmark = pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.<:/~])/[A-Za-z][\w.-]*/[\w.-]+|[A-Z]:\\\\")  # an absolute path
VARIABLE = re.compile(r"^(?:RUNS|TEXTS|STUDY|RESULTS) = .*", re.MULTILINE)  # the one at a notebook's top


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
    """A function that runs a notebook in a folder that stands for notebooks/, as pictures are written there."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(builtins, "display", lambda *shown: None, raising=False)

    def run(path: Path, folder: Path | None = None) -> dict:
        cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        source = "\n".join(cells)
        if folder:
            source = VARIABLE.sub(lambda line: re.sub(r"\.\./results(/\w+)?", str(folder), line[0]), source)
            assert str(folder) in source
        plt.close("all")
        variables = {}
        exec(compile(source, path.name, "exec"), variables)
        return variables

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_cells_run_on_the_committed_results_and_write_nothing_there(path, run_cells):
    now = time.time()
    run_cells(path)
    assert max(file.stat().st_mtime for file in (ROOT / "results").rglob("*")) < now


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_an_empty_folder_is_named_and_nothing_is_drawn(path, run_cells, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    run_cells(path, tmp_path / "mine")
    assert str(tmp_path / "mine") in capsys.readouterr().out.splitlines()[0]
    assert not plt.get_fignums()


def test_texts_of_a_run_are_ordered_by_its_rewards(run_cells, tmp_path):
    rows = [completion("a", 1, 1.0), completion("b", 1, 2.0, 0.5), completion("a", 2, 4.0, 0.25)]
    write(tmp_path / "mine", "samples.jsonl", rows)
    shown = run_cells(ROOT / "notebooks/2_texts.ipynb", tmp_path / "mine")
    assert list(shown["best"]["id"]) == ["a", "b"]
    assert list(shown["overrated"]["gold"]) == [0.25]
    assert shown["change"].to_dict() == {"a": 3.0}


def test_a_run_looks_alike_in_all_plots():
    styles = style.of_runs(["toy-rlmt-s0", "toy-rlhf-s0", "toy-rlmt-careful-s0", "toy-rlmt-ppo-s0"]).values()
    looks = [(line["linestyle"], line["marker"]) for line in styles]
    assert looks == [("solid", "o"), ("dashed", "o"), ("solid", "v"), ("solid", "s")]


def test_a_row_is_drawn_as_its_seeds_and_their_mean():
    """The mean ends where a seed ends: of the seeds that are left it would jump. config.json knows whether a run
    thinks, its name need not."""
    runs = ["plain-s0", "plain-s0", "plain-s1"]
    curves = pd.DataFrame({"run": runs, "thinks": True, "step": [1, 2, 1], "gold": [0.0, 1.0, 0.5]})
    [axis] = style.panels(curves, "step", ["gold", "kl"]).axes
    assert [list(line.get_ydata()) for line in axis.lines] == [[0.0, 1.0], [0.5], [0.25]]
    assert axis.lines[-1].get_linestyle() == "-"
    assert style.panels(curves.assign(kl=None), "step", ["kl"]) is None
