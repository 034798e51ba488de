"""benchmarks/ and eval_benchmarks.py: agreement with published scores, and what becomes of malformed replies,
rows and files. IFEval and IFBench are in test_ifbench.py.

Run from the repository root: `pytest tests/benchmarks/test_benchmarks.py`.
"""

import gzip
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PUBLISHED, shared

import eval_benchmarks
import page
from benchmarks import accuracy, verified
from benchmarks.scoring import read_file
from benchmarks.table import BENCHMARKS
from rlmt import endpoint
from rlmt.data import read_log, read_rows, to_jsonl
from rlmt.verdicts import last_boxed
from published import make


def score(benchmark: str, rows: list[dict] | Path, data: Path, tmp_path: Path) -> dict:
    """What the command writes for rows (or a file) and a data path, also if many of them are invalid."""
    if not isinstance(rows, Path):
        rows = write(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out" / "scores.json"
    args = eval_benchmarks.Args(
        name=benchmark, data=str(data), from_=str(rows), out=str(out), overwrite=True, max_invalid=1.0
    )
    eval_benchmarks.main(args)
    return json.loads(out.read_text())


def write(path: Path, content) -> Path:
    """Content as .json, or as .jsonl rows."""
    path.write_text(json.dumps(content) if path.suffix == ".json" else to_jsonl(content))
    return path


def test_the_figures_are_those_of_the_published_texts(tmp_path):
    """As our parsers read judges' marks, solutions and a user's goodbyes."""
    make.main(shared(""), tmp_path)
    for path in tmp_path.glob("*/*"):
        assert path.read_bytes() == (PUBLISHED / path.relative_to(tmp_path)).read_bytes()


def test_stored_rows_of_other_types_or_with_thinking(tmp_path, exits):
    data = write(tmp_path / "data.jsonl", [{"question": "Q", "answer": "#### 7"}])
    out = tmp_path / "out.json"

    def main(**row):
        rows = write(tmp_path / "rows.jsonl", [{"question": "Q", **row}])
        eval_benchmarks.main(
            evaluation(name="gsm8k", data=str(data), from_=str(rows), out=str(out), **flags).args
        )

    flags = {}
    for wrong in ({"response": ["#### 7"]}, {"response": "#### 7", "reward": "0.5"}):
        assert f"rows.jsonl:1: field {list(wrong)[-1]} is" in exits(main, **wrong)
    thinking = "<think>maybe #### 7</think>\n#### 8"
    assert "rows.jsonl:1: response shows thinking" in exits(main, response=thinking)
    flags = {"think_format": "tags"}
    main(response=thinking)
    assert json.loads(out.read_text())["accuracy"] == 0


# --- words


def evaluation(**flags) -> eval_benchmarks.Evaluation:
    return eval_benchmarks.Evaluation(eval_benchmarks.Args(**flags))


BASE = "class ReasonBenchmark:\n    _registry = {}\n"
PROGRAM = """import json
from .benchmark_utils import ReasonBenchmark
class Theirs:
    @classmethod
    def _inner_load(cls):
        rows = map(json.loads, open(cls._cfg["test_file"])) if LINES else json.load(open(cls._cfg["data_file"]))
        return [{"input_prompt": PROMPT} for row in rows if row["id"] != "x"]
ReasonBenchmark._registry[__name__.rpartition(".")[2]] = Theirs
"""


@pytest.mark.parametrize(
    "name, program, prompt",
    [
        ("popqa", "popqa", '[{"role": "user", "content": "In short: " + row["question"]}]'),
        ("zebralogic", "zebra_logic", '"Solve: " + row["puzzle"]'),
    ],
)
def test_tasks_are_asked_in_the_words_of_the_authors_program(
    name, program, prompt, tmp_path, capsys, monkeypatch
):
    """Programs in the form of theirs, whose package loads what is not installed here."""
    text = PROGRAM.replace("PROMPT", prompt).replace("LINES", str(name == "zebralogic"))
    files = {"__init__.py": "import nowhere", "benchmark_utils.py": BASE, f"{program}.py": text}
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    for module in ("", ".benchmark_utils", f".{program}"):
        monkeypatch.delitem(sys.modules, f"reason_benchmarks{module}", raising=False)
    solution = {"header": ["House", "Name"], "rows": [["1", "Eric"]]}
    task = {
        "id": 1,
        "question": "Who {is} it?",
        "answers": ["Eric"],
        "puzzle": "One {house}.",
        "solution": solution,
    }
    data = write(tmp_path / "data.json", [task])
    ours = evaluation(name=name, data=str(data))
    theirs = evaluation(name=name, data=str(data), template=str(tmp_path / f"{program}.py"))
    theirs.check_flags()
    [asked] = theirs.load_tasks()
    [message] = theirs.messages_of(asked)
    assert message["content"] in ("In short: Who {is} it?", "Solve: One {house}.")
    assert theirs.make_fingerprint([asked]) != ours.make_fingerprint(ours.load_tasks())
    write(tmp_path / "data.json", [task, task | {"id": "x"}])  # a task that the program leaves out
    with pytest.raises(SystemExit):
        theirs.load_tasks()
    assert "makes no prompts of these tasks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluation(name="ifeval", template="popqa.py").check_flags()


# --- short answers


def test_popqa(tmp_path, exits):
    tasks = [
        {"id": "t0", "question": "Q0", "answers": ["Ralph Rainger", "Ralph Reichenthal"]},
        {"id": "t1", "question": "Q1", "answers": ["politician"]},
        {"id": "t2", "question": "Q2", "answers": ["USA"]},
        {"id": "t3", "question": "Q3", "answers": ["jazz"]},
        {"id": "t4", "question": "Q3", "answers": ["rock"]},
        {"id": "t5", "question": "Q5", "answers": ["", "x-ray"]},
    ]
    data = write(tmp_path / "popqa.jsonl", tasks)
    cases = [  # id, question, response, official, paper
        ("t0", "", "It was Ralph Reichenthal.", True, True),
        ("t0", "", "ralph rainger", True, True),
        ("t0", "", "RALPH RAINGER", False, True),
        ("t0", "", "Ralph rainger", True, True),
        ("t0", "", "Rainger", False, False),
        ("my-id", "Q1", "a Politician", True, True),  # no task has this id
        ("my-id", "Q1", "POLITICIANS", False, True),
        ("t2", "", "usa", True, True),
        ("t2", "", "usage", True, True),  # a substring is enough, as in the official tool
        ("t3", "Q3", "", False, False),
        ("t5", "", "anything", False, False),
    ]
    rows = [{"id": case[0], "question": case[1], "response": case[2]} for case in cases]
    out = score("popqa", rows, data, tmp_path)
    assert [(r["correct"], r["correct_paper"]) for r in out["rows"]] == [case[3:] for case in cases]
    # tasks: t0 3/5, t1 1/2, t2 1, t3 0, t5 0
    assert (out["accuracy"], out["accuracy_paper"]) == pytest.approx((2.1 / 5, 2.8 / 5))
    assert out["n"] == 11 and out["n_missing"] == 1 and "pass@2" not in out
    # Wilson's interval of a share of 0.56 of five tasks, by its formula
    assert out["accuracy_paper_interval"] == pytest.approx([0.2057, 0.8622], abs=1e-4)
    assert "fits 2 tasks" in exits(score, "popqa", [{"question": "Q3", "response": ""}], data, tmp_path)
    other = rows[0] | {"question": "Q5"}  # as of a file that counts otherwise
    assert "fits 0 tasks" in exits(score, "popqa", [other], data, tmp_path)
    [failed, _] = score("popqa", [rows[0] | {"error": "HTTP 500"}, rows[1]], data, tmp_path)["rows"]
    assert failed["invalid"] == "HTTP 500" and "correct" not in failed
    tsv = tmp_path / "popqa.tsv"  # the official file
    tsv.write_text('id\tquestion\tpossible_answers\n42\tWho?\t"[""Ann"", ""Bob""]"\n')
    assert score("popqa", [{"id": 42, "response": "bob"}], tsv, tmp_path)["accuracy"] == 1
    write(data, [{"question": "Who?", "possible_answers": '"Ann"'}])
    assert "no list" in exits(score, "popqa", rows, data, tmp_path)


LETTERS = [  # response, letter
    ("Answer: B", "B"),
    ("Answer:B.", "B"),
    ("answer: C", "C"),
    ("Answer: (D)", "D"),
    ("Answer: **A**", "A"),
    ("Answer: b", None),
    ("Answer: b or C", "C"),
    ("Answer: The answer is B", None),  # T
    ("Answer: A\nAnswer: B", "A"),  # the first
    ("answer: A\nAnswer: B", "B"),
    ("B", None),
    ("", None),
    ("Answer:", None),
    ("Answer: E", None),
    ("ANSWER: A", None),
    ("The Answer: is Because B", "B"),
    ("Answer: 1", None),
    ("Answer : A", None),
]


@pytest.mark.parametrize("response, letter", LETTERS, ids=range(len(LETTERS)))
def test_mmlu_redux_letter(response, letter):
    verdicts = [verified.mmlu_redux_check({"truth": i}, response) for i in range(4)]
    assert [v["correct"] for v in verdicts] == [option == letter for option in "ABCD"]
    assert verdicts[0]["answer"] == letter


def test_mmlu_redux_items(tmp_path):
    folder = shared("mmlu_redux")
    tasks = json.load(gzip.open(folder / "data.json.gz"))
    rows = []
    corrected = []
    for i, task in enumerate(tasks):
        right = task["answer"]
        if task["error_type"] == "wrong_groundtruth" and str(task["correct_answer"]).isdigit():
            right = int(task["correct_answer"])
            corrected.append({"index": i, "response": f"Answer: {'ABCD'[task['answer']]}"})
        rows.append({"id": i, "response": f"Answer: {'ABCD'[right]}"})
    out = score("mmlu_redux", rows, folder, tmp_path)
    assert (out["n"], out["n_excluded"], out["n_missing"], out["accuracy"]) == (5376, 324, 0, 1)
    # excluded: a wrong answer key, and the correct answer given as a letter or not at all
    assert sum("wrong_groundtruth" in r.get("excluded", "") for r in out["rows"]) == 60
    assert score("mmlu_redux", corrected, folder / "data.json.gz", tmp_path)["accuracy"] < 0.1
    row = {"question": tasks[2]["question"], "response": rows[2]["response"]}
    out = score("mmlu_redux", [row, rows[1] | {"response": None}], folder, tmp_path)
    assert (out["rows"][0]["correct"], out["accuracy"]) == (True, 1)
    assert (out["n"], out["n_invalid"], out["n_unparsed"]) == (2, 1, 0)


# --- mathematics


def test_reference_solutions_are_right(tmp_path):
    names = read_rows(shared("popqa/popqa_subset_1000.jsonl.gz"))
    rows = [{"id": t["id"], "response": f"That is {t['answers'][-1].lower()}."} for t in names]
    out = score("popqa", rows, shared("popqa"), tmp_path)
    assert (out["accuracy"], out["n"], out["n_missing"]) == (1, 1000, 0)
    folder = shared("math_500")
    tasks = json.load(gzip.open(folder / "test.json.gz"))
    rows = [{"unique_id": t["unique_id"], "response": t["solution"]} for t in tasks]
    out = score("math500", rows, folder, tmp_path)
    assert (out["accuracy"], out["accuracy_math_verify"], out["n"], out["n_unparsed"]) == (1, 1, 500, 0)
    rotated = [
        {"problem": t["problem"], "response": u["solution"]} for t, u in zip(tasks, tasks[1:] + tasks[:1])
    ]
    assert score("math500", rotated[:100], folder, tmp_path)["accuracy"] < 0.1


BOXES = [  # text, content of the last box
    (r"\boxed{5}", "5"),
    (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\fbox{3}", None),
    (r"\boxed{4} \fbox{3}", "4"),
    (r"\boxed{3} and \boxed", "3"),
    (r"\boxed 7$ or so", "7"),
    (r"$\boxed \frac12$", r"\frac12"),
    (r"\boxed{{a}{b}}", "{a}{b}"),
    (r"\boxed{}", None),
    ("5", None),
    (r"\boxed5", None),
    (r"\boxed{5", None),
    ("", None),
    (r"\boxed{1}} \boxed{2", "1"),
]


@pytest.mark.parametrize("text, content", BOXES, ids=range(len(BOXES)))
def test_last_boxed(text, content):
    assert last_boxed(text) == content


SPELLINGS = [  # answer, reference, equal as normalised, equal by math-verify
    (r"\frac12", r"\frac{1}{2}", True, True),
    (r"\dfrac{1}{2}", r"\tfrac{1}{2}", True, True),
    ("1/2", r"\frac{1}{2}", True, True),
    ("0.5", r"\frac{1}{2}", True, True),
    (".5", r"\frac12", True, True),
    ("x=5", "5", True, True),
    ("x = 5", "5", True, True),
    (r"\sqrt2", r"\sqrt{2}", True, True),
    (r"90^\circ", "90", True, True),
    (r"50\%", "50", True, True),
    ("50%", "50", False, None),
    ("x / 2", "x/2", True, True),  # the paper's code says no
    (r"\$18", "18", True, True),
    (r"10\text{ cm}", "10", True, True),
    (r"\left(1,2\right)", "(1, 2)", True, True),
    (r"1\!000", "1000", True, True),
    (r"\frac1{10}", r"\frac{1}{10}", True, True),
    (r"\frac{3}4", r"\frac{3}4", True, True),
    ("-1/2", r"\frac{-1}{2}", True, True),
    ("", "5", False, False),
    ("6", "5", False, False),
    ("5", "50", False, False),
    (r"\frac{2}{4}", r"\frac{1}{2}", False, True),
    ("0.50", r"\frac{1}{2}", False, True),
    ("abc=5", "5", False, None),
    ("1/2/3", r"\frac{1}{2}", False, None),
    ("5.0", "5", False, True),
    (r"1\text{ cm}\text{ and}", "1", False, None),
    (r"\text{A}", "A", False, None),
]


@pytest.mark.parametrize("answer, reference, equal, as_expression", SPELLINGS, ids=range(len(SPELLINGS)))
def test_math500_equality(answer, reference, equal, as_expression):
    out = verified.math500_check({"answer": reference}, f"So it is \\boxed{{{answer}}}.")
    assert out["correct"] is equal and (as_expression is None or out["correct_math_verify"] is as_expression)


@pytest.mark.parametrize(
    "model", ["6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"]
)
def test_gsm8k_published_flags(model, tmp_path):
    folder = PUBLISHED / "gsm8k"
    stored = read_rows(folder / "example_model_solutions.jsonl.gz")
    rows = [{"question": row["question"], "response": row[model]["solution"]} for row in stored]
    out = score("gsm8k", rows, folder, tmp_path)
    assert (out["n"], out["n_missing"]) == (660, 1319 - 660)
    assert [r["correct"] for r in out["rows"]] == [row[model]["is_correct"] for row in stored]
    assert out["accuracy"] == pytest.approx(np.mean([row[model]["is_correct"] for row in stored]))


@pytest.mark.parametrize(
    "text, number",
    [
        ("#### 18", "18"),
        ("####18", "18"),
        ("#### 1,234", "1234"),
        ("#### -3.5 dollars", "-3.5"),
        ("#### 1\n#### 2", "2"),
        ("A: 7", "7"),
        ("#### 5\nA: 6", "5"),
        ("18", None),
        ("#### $18", None),
        ("#### eighteen", None),
        ("", None),
        ("### 5", None),
        ("#### 18.", "18."),
    ],
)
def test_final_number(text, number):
    assert verified.final_number(text) == number


@pytest.mark.parametrize(
    "benchmark, truth, read",
    [
        ("math500", 2, "2"),
        ("math500", 2.5, "2.5"),
        ("math500", None, "not None"),
        ("math500", [2], "a text or a number"),
        ("gsm8k", "so it is #### 1,200", "so it is #### 1,200"),
        ("gsm8k", "2", "no ####"),
        ("gsm8k", 2, "no ####"),
        ("gsm8k", None, "no ####"),
        ("popqa", [1990, "in 1990"], ["1990", "in 1990"]),
        ("popqa", "[7]", ["7"]),
        ("popqa", "Paris", "are no list"),
        ("popqa", 1990, "are no list"),
        ("popqa", [None], "not None"),
    ],
)
def test_truths_are_texts_or_refused_at_loading(benchmark, truth, read, tmp_path, capsys):
    field = "answers" if benchmark == "popqa" else "answer"
    fine = {"question": "Q", "problem": "P", field: "[]" if benchmark == "popqa" else "#### 1"}
    data = write(tmp_path / "data.jsonl", [fine, fine | {field: truth}])
    load_tasks = BENCHMARKS[benchmark].load_tasks
    if isinstance(read, list) or read == str(truth):
        assert load_tasks(data)[1][field] == read
        return
    with pytest.raises(SystemExit) as e:
        load_tasks(data)
    assert e.value.code == 2
    message = capsys.readouterr().err
    assert f"{data}, row 2: " in message and read in message


@pytest.mark.parametrize("name", ["data.json", "data.csv", "data.txt"])
def test_files_in_utf_8_with_a_mark_or_not_at_all(name, tmp_path, capsys):
    content = {"data.json": '[{"a": "é"}]', "data.csv": "a\né\n", "data.txt": "é\n"}[name]
    path = tmp_path / name
    path.write_text(content, "utf-8-sig")
    assert read_file(path) in ([{"a": "é"}], ["é"])
    path.write_text(content, "latin-1")
    with pytest.raises(SystemExit) as e:
        read_file(path)
    assert e.value.code == 2 and f"{path}: not {name[5:]} in UTF-8" in capsys.readouterr().err


# --- ZebraLogic


GRID = {
    "id": "lgp-2x2",
    "size": "2*2",
    "puzzle": "P",
    "solution": {"header": ["House", "Name", "Pet"], "rows": [["1", "Eric", "Dog"], ["2", "Arnold", "cat"]]},
}
RIGHT = {"House 1": {"Name": "Eric", "Pet": "dog"}, "House 2": {"Name": " arnold ", "Pet": ["cat", "dog"]}}


def solved(solution) -> str:
    return json.dumps({"solution": solution})


REPLIES = [  # response, right cells of 4; None: unreadable
    (json.dumps({"reasoning": "r", "solution": RIGHT}), 4),
    ("So:\n```json\n" + json.dumps({"solution": RIGHT}, indent=2) + "\n```", 4),
    (solved({}) + solved(RIGHT), 4),
    (solved(RIGHT) + solved({}), 0),
    (solved(RIGHT | {"House 1": {"Name": "Eric"}}), 3),
    (solved(RIGHT | {"House 2": "Arnold, cat"}), 2),
    (solved(RIGHT | {"House 1": {"Name": None, "Pet": 7}}), 2),
    (solved(RIGHT | {"House 1": {"Name": [], "Pet": [["dog"]]}}), 2),
    (solved({"house 1": RIGHT["House 1"], "House 2": RIGHT["House 2"]}), 2),
    (solved({}), 0),
    (json.dumps({"answer": RIGHT}), None),
    (solved([RIGHT]), None),
    (solved(None), None),
    (solved(RIGHT)[:-2], None),
    ("", None),
    ("}{", None),
    ("{}", None),
    ("{not json}", None),
    ("[1]", None),
    (solved(RIGHT) + " {", 4),
    (json.dumps({"reasoning": "a { brace", "solution": RIGHT}), None),
    ("{" * 10000, None),
]


@pytest.mark.parametrize("response, right", REPLIES, ids=range(len(REPLIES)))
def test_zebralogic_check(response, right):
    out = verified.zebralogic_check(GRID, response)
    truth = verified.zebralogic_truth(GRID["solution"])
    n_right = sum(cell == true_cell for cell, true_cell in zip(out["answer"] or (), truth))
    assert n_right == (right or 0) and out["correct"] is (right == 4)
    assert (out["answer"] is None) == (right is None)


# --- HumanEval


def test_humaneval(tmp_path, needs_sandbox):
    folder = shared("humaneval")
    tasks = read_rows(folder / "HumanEval.jsonl.gz")[:6]
    prose = "Sure!\n```python\n{}{}```\nIt runs in O(n)."
    rows = []
    for t in tasks:
        rows += [
            {"task_id": t["task_id"], "completion": t["canonical_solution"]},
            {"task_id": t["task_id"], "completion": "    return None\n"},
            {"task_id": t["task_id"], "response": prose.format(t["prompt"], t["canonical_solution"])},
            {"task_id": t["task_id"], "completion": "    import os; os._exit(0)\n"},
        ]
    out = score("humaneval", rows, folder, tmp_path)
    assert [r["correct"] for r in out["rows"]] == [True, False, True, False] * 6
    assert (out["accuracy"], out["n"], out["n_missing"]) == (0.5, 24, 158)
    assert out["pass@4"] == 1
    assert [r["program_status"] for r in out["rows"][:4]] == ["ok", "error", "ok", "error"]
    assert "status" not in out["rows"][0]  # rows.jsonl has the generation's under this name
    rows = rows[::4] + [rows[1] | {"completion": None}]
    one = score("humaneval", rows, folder / "HumanEval.jsonl.gz", tmp_path)
    assert (one["accuracy"], one["n"], one["n_invalid"]) == (1, 7, 1)


@pytest.mark.parametrize(
    "n, n_right, k, value",
    [(1, 1, 1, 1), (4, 0, 3, 0), (4, 2, 1, 0.5), (4, 2, 2, 5 / 6), (4, 2, 3, 1), (200, 1, 100, 0.5)],
)
def test_pass_at_k(n, n_right, k, value):
    assert accuracy.pass_at_k(n, n_right, k) == pytest.approx(value)


def test_accuracy_is_over_tasks():
    row = lambda task, correct: {"task": task, "correct": correct}
    rows = [row(0, True)] * 3 + [row(0, False)] * 9 + [row(1, False)] * 10
    out = accuracy.accuracy(rows, [{}, {}, {}])
    assert (out["accuracy"], out["n_missing"]) == (pytest.approx(0.125), 1)
    assert out["pass@10"] == pytest.approx(0.5 * accuracy.pass_at_k(12, 3, 10)) and "pass@100" not in out
    assert accuracy.accuracy([{"task": 0, "invalid": "no response"}], [{}])["accuracy"] is None


def test_majority_at_k():
    majority = accuracy.majority_at_k
    assert majority(["a", "b", "b"], [True, False, False], 3) == 0
    assert majority(["a", "b", "b", "a"], [True, False, False, True], 4) == 1  # a tie: the first
    assert majority([None, None, "b"], [False, False, True], 3) == 1  # what cannot be read does not vote
    assert majority([None, None], [False, False], 2) == 0
    # two groups of two, and a remainder
    assert majority(["a", "b", "b", "b", "b"], [True, False, False, False, False], 2) == 0.5
    assert majority(["a", "b", "b"], [True, False, False], 1) == pytest.approx(1 / 3)  # the accuracy


def test_best_at_k():
    rewards = [0.3, -1.0, 0.9, 0.3, -math.inf]
    correct = [True, False, False, False, True]
    for k in range(1, 6):
        chosen = []
        for indices in itertools.combinations(range(5), k):
            chosen.append(correct[max(indices, key=rewards.__getitem__)])  # the first of equals
        assert accuracy.best_at_k(rewards, correct, k) == pytest.approx(sum(chosen) / len(chosen))


# --- generation, by the command


COMMAND = ("eval_benchmarks.py", "--model", "data/toy/base", "--max-tokens", 16, "--data")


def test_generate_and_score(here, tmp_path):
    """The toy base model: what it writes is generated, kept, and scored as --from scores it."""
    tasks = [{"question": f"How much is {i}?", "answer": f"so\n#### {i}"} for i in range(5)]
    data = write(tmp_path / "test.jsonl", tasks)
    run = tmp_path / "run"
    command = (*COMMAND, data, "--out", run, "gsm8k")
    assert here(*command, "--samples", 2, "--limit", 3).returncode == 0
    rows = read_log(run / "rows.jsonl")
    assert [r["question"] for r in rows] == [f"How much is {i}?" for i in (0, 0, 1, 1, 2, 2)]
    assert rows[0]["text"] != rows[1]["text"]  # two samples, not one twice
    assert page.read_rows(run)["gold"].tolist() == [r["correct"] for r in rows]
    summary = json.loads((run / "summary.json").read_text())
    again = score("gsm8k", run / "rows.jsonl", data, tmp_path)
    assert (summary["n"], summary["n_missing"], summary["accuracy"]) == (6, 2, again["accuracy"])

    assert "exists; --resume" in here(*command).stderr


# --- a tested model behind an endpoint


@pytest.fixture
def behind(here, tmp_path, monkeypatch):
    """behind(server, ...) asks it four tasks, all with the answer 2; returns summary and stderr."""
    monkeypatch.setattr(endpoint, "MAX_WAIT", 0.01)
    tasks = [{"question": f"Question {i}", "answer": "#### 2"} for i in range(4)]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "test.jsonl", tasks)

    def behind(server, *words, code: int = 0) -> tuple[dict, str]:
        command = ["eval_benchmarks.py", "gsm8k", "--model", "m", "--model-url", server.url]
        command += ["--data", tmp_path / "data", "--out", tmp_path / "run", "--max-invalid", 0.5]
        done = here(*command, *words)
        assert done.returncode == code, done.stderr
        summary = tmp_path / "run" / "summary.json"
        return json.loads(summary.read_text()) if summary.exists() else {}, done.stderr

    return behind


@pytest.mark.parametrize(
    "sent, words",
    [
        ((403, {"error": "moderated"}), "moderated"),
        ((500, b"oops"), "oops"),
        ((200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}), "null"),
        ((200, {"choices": [{"message": {"content": "3"}, "finish_reason": "abort"}]}), "abort"),
        ((200, {"choices": [{"message": {"content": "3"}, "finish_reason": "content_filter"}]}), "filter"),
    ],
)
def test_a_task_without_an_answer_is_invalid_and_an_outage_ends_the_run(behind, serve, tmp_path, sent, words):
    server = serve(lambda text, n: sent if "Question 2" in text else "#### 2")
    summary, told = behind(server)
    assert (summary["accuracy"], summary["n"], summary["n_invalid"]) == (1.0, 4, 1)
    assert words in told and summary["replied"]["model"] == ["m"] and told.count("WARNING") == 0
    rows = read_log(tmp_path / "run" / "rows.jsonl")
    assert rows[2]["response"] is None and words in rows[2]["invalid"]
    if words == "oops":  # after the outage it alone is asked again
        (tmp_path / "run" / "summary.json").unlink()
        server.behave = lambda text, n: "#### 2"
        n_asked = len(server.requests)
        summary, _ = behind(server, "--resume")
        assert (summary["accuracy"], summary["n_invalid"], len(server.requests)) == (1.0, 0, n_asked + 1)
    if "filter" not in words:  # what is filtered is an answer of the server
        server.behave = lambda text, n: sent
        summary, told = behind(server, "--overwrite", code=2)
        assert words in told and not summary


def test_a_refused_parameter_is_named_and_left_out_by_a_flag(behind, serve):
    server = serve(lambda text, n: "#### 2")
    server.refuses = "seed"
    summary, told = behind(server, "--samples", 4, code=2)
    assert "seed is not supported" in told and "--model-omit" in told and len(server.requests) <= 5
    summary, _ = behind(
        server, "--samples", 4, "--model-omit", "seed", "--omit", "temperature", "--overwrite"
    )
    assert (summary["accuracy"], summary["n"], len(server.requests)) == (1.0, 16, 5 + 16)
    assert "temperature" in server.requests[-1][0]  # --omit is for judges


def test_a_machine_without_a_sandbox_is_said_before_anything_is_generated(here, tmp_path, no_sandbox):
    texts = dict.fromkeys(("prompt", "entry_point", "test", "canonical_solution"), "f")
    data = write(tmp_path / "data.jsonl", [{"task_id": "HumanEval/0"} | texts])
    for mode in ((), ("--dry-run",)):
        done = here(*COMMAND, data, "--out", tmp_path / "run", "humaneval", *mode)
        assert done.returncode == 2 and "apt install bubblewrap" in done.stderr
        assert not (tmp_path / "run").exists()
