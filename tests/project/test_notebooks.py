"""Tests the notebooks as they are committed, and runs their cells on small hand-made runs."""

import base64
import json
import re
import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import nbformat
import pytest
from test_page import completion, generation, write

pytestmark = pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.<:/~])/[A-Za-z][\w.-]*/[\w.-]+|[A-Z]:\\\\")  # an absolute path

# --- as they are committed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
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
        image = output.get("data", {}).pop("image/png", "")
        assert len(base64.b64decode(image)) < 60_000
    assert not ABSOLUTE.findall(json.dumps(notebook.cells, ensure_ascii=False))


# --- on other runs


def rl_run(folder: Path, reward_model: str, gold: bool, steps: int, model="sft", think=True) -> None:
    write(
        folder,
        "metrics.jsonl",
        [
            {
                "step": s,
                "reward": float(s),
                "reward/preference": float(s),
                "kl": 0.01 * s,
                "think/format_ok": 1.0,
                "think/mean_tokens": 5.0 + s,
                "think/response_tokens": 7.0,
                **({"reward/gold": 0.1 * s} if gold else {}),
            }
            for s in range(1, steps + 1)
        ],
    )
    args = {
        "model": f"results/{model}/model",
        "reward_model": reward_model,
        "reward_on": "response",
        "think_format": "think" if think else "plain",
        "prompts_per_step": 2,
        "group_size": 1,
    }
    (folder / "config.json").write_text(json.dumps({"args": args}))
    write(
        folder,
        "completions.jsonl",
        [
            completion(p, s, s * (1.0 if p == "a" else -0.5), 0.1 * s if gold else None)
            for s in range(1, steps + 1)
            for p in "ab"
        ],
    )


def make_runs(folder: Path) -> None:
    """Writes all that they can show: RL runs on two reward models, held-out gold, evaluations, traits."""
    write(folder / "sft", "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    (folder / "sft" / "config.json").write_text(
        json.dumps({"args": {"model": "base", "think_format": "think"}})
    )
    for name, accuracy in (("rm-weak", 0.6), ("rm-strong", 0.8)):
        held_out = {
            "accuracy": accuracy,
            "ece": 0.1,
            "n": 50,
            "bins": [{"predicted": 0.7, "right": accuracy, "n": 50}],
        }
        write(folder / name, "metrics.jsonl", [{"step": 1, "loss": 0.6}])
        (folder / name / "config.json").write_text(json.dumps({"args": {"model": "base"}}))
        (folder / name / "summary.json").write_text(json.dumps({"held_out": held_out}))
        rl_run(folder / f"rl-{name}", f"results/{name}/model", gold=True, steps=6)
    write(
        folder / "rl-rm-weak",
        "held_out.jsonl",
        [{"step": s, "gold": 0.5, "gold_se": 0.1, "proxy": 1.0 * s} for s in (2, 4)],
    )
    for model in ("sft", "rl-rm-strong"):
        write(
            folder / f"eval-{model}",
            "generations.jsonl",
            [generation("t", response=f"written by {model}", score=0.5)],
        )
        (folder / f"eval-{model}" / "config.json").write_text(
            json.dumps({"args": {"model": f"results/{model}/model"}})
        )
    trait = {
        "description": "d",
        "win_rate": 0.75,
        "interval": [0.6, 0.9],
        "wins": 3,
        "ties": 0,
        "losses": 1,
        "flip_rate": 0.0,
    }
    traits = {"costs $5 & $6": trait, "lists steps": {**trait, "win_rate": 0.4, "interval": [0.4, 0.6]}}
    summary = {
        "model": "results/rl/g.jsonl",
        "baseline": "results/sft/g.jsonl",
        "n": 2,
        "n_invalid": 0,
        "n_replies": 4,
    }
    (folder / "traits").mkdir()
    (folder / "traits" / "summary.json").write_text(json.dumps(summary | {"traits": traits}))


def rlver_run(folder: Path) -> None:
    """Writes a run of train_rlver.py, and an evaluation with strategies and capabilities."""
    steps = [
        {
            "step": s,
            "reward": 0.1 * s,
            "completions/mean_length": 60.0,
            "dialogue/turns": 3.0,
            "think/mean_tokens": 5.0,
        }
        for s in (1, 2)
    ]
    write(folder / "rlver", "metrics.jsonl", steps)
    args = {"model": "base", "think_format": "think", "prompts_per_step": 2, "group_size": 1}
    (folder / "rlver" / "config.json").write_text(json.dumps({"args": args}))
    scores = {
        "emotion_curve": [40.0, 50.0, 45.0],
        "strategies": {
            "n": 2,
            "n_invalid": 0,
            "Praise": {"n": 3, "frequency": 0.75, "contribution": 5.0},
            "Advice Provision": {"n": 0, "frequency": 0.0, "contribution": None},
        },
        "capabilities": {"n": 2, "n_invalid": 0, "Core Insight": {"mean": 3.5, "interval": [3, 4]}},
    }
    (folder / "rlver--gold").mkdir()
    (folder / "rlver--gold" / "summary.json").write_text(
        json.dumps({"simulator": scores, "simulator_held_out": scores})
    )


def make_bare_run(folder: Path) -> None:
    """Writes the least that they accept: one RL run of one step without gold."""
    rl_run(folder / "rl", "some/reward-model", gold=False, steps=1)


@pytest.fixture(scope="module")
def full_runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    make_runs(folder)
    return folder


@pytest.fixture(scope="module")
def bare_runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    make_bare_run(folder)
    return folder


@pytest.fixture
def execute(monkeypatch, capsys):
    """execute(number, folder) runs a notebook's code on the runs in `folder`; returns its variables and what
    it printed.

    The cells run in this process, from the folder of the notebooks, as Jupyter runs them; that takes a tenth
    of a kernel's time.
    """
    monkeypatch.chdir(NOTEBOOKS[0].parent)
    monkeypatch.syspath_prepend("..")
    plt.close("all")
    plt.rcdefaults()
    plt.switch_backend("Agg")

    def run(number: str, folder: Path) -> tuple[dict, str]:
        (path,) = [path for path in NOTEBOOKS if path.name.startswith(number)]
        cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        source, n_runs = re.subn(
            r'\nRUNS = Path\("[^"]*"\)', f"\nRUNS = Path({str(folder)!r})", "\n".join(cells)
        )
        assert n_runs == 1
        source = re.sub(r'\n(NAMES|EVALUATIONS) = "[^"]*"', r'\n\1 = "*"', source)
        variables = {}
        exec(compile(source, path.name, "exec"), variables)
        plt.gcf().canvas.draw()
        return variables, capsys.readouterr().out

    yield run
    plt.close("all")


def test_training_curves(execute, full_runs, bare_runs):
    names, printed = execute("02", full_runs)
    assert names["curves"]["run"].unique().tolist() == ["rl-rm-strong", "rl-rm-weak"]
    assert names["curves"]["completions"].max() == 2 * 5
    assert "held_out.jsonl" not in printed
    names, printed = execute("02", bare_runs)
    assert names["curves"]["run"].unique().tolist() == ["rl"]
    assert names["curves"]["completions"].max() == 0
    assert "held_out.jsonl" in printed


def test_trace_reader(execute, full_runs, bare_runs):
    names, _ = execute("03", full_runs)
    assert len(names["fell"]) == len(names["rose"]) == 1
    assert "written by rl-rm-strong" in names["html"].data
    names, _ = execute("03", bare_runs)
    assert len(names["fell"]) == len(names["rose"]) == 0
    assert "no evaluations of" in names["html"].data


def test_biggest_jumps_are_those_of_held_out_prompts(execute, tmp_path):
    """Of held-out prompts there is a gold alone; their jumps count, not those of the prompts that are trained
    on."""
    rl_run(tmp_path / "rl", "some/reward-model", gold=True, steps=3)  # the reward of a rises, that of b falls
    golds = {"risen": (0.25, 0.75), "same": (0.5, 0.5), "fallen": (1.0, 0.625)}
    held_out = [
        completion(name, step, None, gold) for name, pair in golds.items() for step, gold in zip((0, 7), pair)
    ]
    write(tmp_path / "rl", "held_out_completions.jsonl", held_out)
    names, printed = execute("03", tmp_path)
    columns = ["change", "first_step", "last_step", "first", "last"]
    assert names["rose"][columns].T.to_dict("list") == {"risen": [0.5, 0, 7, 0.25, 0.75]}
    assert names["fell"][columns].T.to_dict("list") == {"fallen": [-0.375, 0, 7, 1.0, 0.625]}
    assert "3 prompts were visited at several steps; the change is that of their gold" in printed


def test_trait_win_rates(execute, full_runs, bare_runs):
    _, printed = execute("04", full_runs)
    assert "nothing to show" not in printed
    assert plt.gcf().axes[0].get_xlim() == (0, 1)
    _, printed = execute("04", bare_runs)
    assert "nothing to show" in printed


def test_reward_models(execute, full_runs, bare_runs):
    names, printed = execute("05", full_runs)
    assert names["last"]["accuracy"].dropna().tolist() == [0.8, 0.6]
    assert plt.gcf().axes[0].get_xlabel() == "accuracy" and "nothing to compare" not in printed
    names, _ = execute("05", bare_runs)
    assert names["last"]["accuracy"].dropna().tolist() == []


def test_one_reward_model_is_not_compared(execute, tmp_path):
    make_runs(tmp_path)
    shutil.rmtree(tmp_path / "rm-weak")  # as a reward model that was downloaded
    names, printed = execute("05", tmp_path)
    assert names["known"].index.tolist() == ["rl-rm-strong"]
    assert "one reward model only: nothing to compare" in printed
    assert plt.gcf().axes[0].get_xlabel() == "proxy"  # the plot before


def test_conversations(execute, tmp_path):
    rlver_run(tmp_path)
    names, printed = execute("06", tmp_path)
    assert names["curves"]["emotion"].tolist() == [10, 20] and names["curves"]["tokens"].tolist() == [20, 20]
    assert list(names["evaluated"]) == ["rlver"]
    praise = names["used"].query("strategy == 'Praise' and role == 'simulator'").iloc[0]
    assert (praise["frequency"], praise["contribution"]) == (0.75, 5)
    assert names["marks"].loc["rlver", "Core Insight"] == 3.5
    assert "not yet run" not in printed and "no evaluation" not in printed

    (tmp_path / "rlver--gold" / "summary.json").unlink()
    _, printed = execute("06", tmp_path)
    assert printed.count("no evaluation") == 3 and "not yet run" in printed


def held_out(step: int, name: str, prompt: str, thinking: str, response: str, gold: float) -> dict:
    row = {"step": step, "id": name, "messages": [{"role": "user", "content": prompt}], "status": "ok"}
    rewards = {"preference": -gold, "gold": gold}
    return row | {"thinking": thinking, "response": response, "rewards": rewards}


def test_what_a_small_model_wrote_counted_by_hand(execute, tmp_path):
    rows = []
    # gold rises by 0.8 + 0.23 * words, residuals 0.2, -0.1, -0.4, 0.3; the proxy falls by as much
    for name, words, gold in (("a", 0, 1.0), ("b", 10, 3.0), ("c", 20, 5.0), ("d", 30, 8.0)):
        rows.append(held_out(30, name, "?", "", "word, " * (7 + words), 2.0 + gold))
        rows.append(held_out(0, name, "?", "", "word, " * 7, 2.0))
    rows.append(held_out(30, "e", "?", "", "word", 99.0) | {"status": "truncated"})
    write(tmp_path / "grpo-plain-s1", "held_out_completions.jsonl", rows)
    plan = "Asked: Name three DOGS and fish?\nForm: about 10 words.\nPoints: Dogs bark."
    rows = [
        # 2 of name, three, dogs, fish; 2 of name, three, purple, cats, today; all of purple, three
        held_out(0, "a", "Name three purple cats, Cats today.", plan, "Purple, purple sky and three", 0.0),
        held_out(0, "b", "Boil two eggs", "Asked: Tell a joke.", "Never!", 0.0),
    ]
    write(tmp_path / "grpo-think-s0", "held_out_completions.jsonl", rows)
    names, printed = execute("07", tmp_path)
    change = names["changes"].loc[("grpo-plain-s1", "0 to 30")]
    assert (change["prompts"], change["words"], change["gold"], change["proxy"]) == (4, 15, 4.25, -4.25)
    assert change["gold, at equal words"] == pytest.approx(0.8)
    counted = names["readings"].loc[("grpo-think-s0", 0)]
    assert (counted["id"], counted["plan has points"], counted["announced words"]) == (2, 0.5, 1)
    assert counted["plan's words from the prompt"] == 0.25 and counted["plan shares no word"] == 1
    assert counted["response takes all words"] == 1 and counted["prompt's words in response"] == 0.2
    assert len(names["samples"]) == 100 and printed == ""  # those in git


@pytest.mark.parametrize("number", ["02", "03", "05", "06"])
def test_a_notebook_says_when_there_is_no_run(number, tmp_path, execute):
    with pytest.raises(AssertionError, match=f"no (RL )?run (with thinking )?in {tmp_path}"):
        execute(number, tmp_path)
