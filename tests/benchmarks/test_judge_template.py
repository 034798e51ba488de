"""Judge templates by file: how they are read and filled in, those of the paper's authors, and runs that are
judged by them.

RLMT_REPOSITORY names a clone (or bare repository) of github.com/princeton-pli/RLMT; without it tests of its
files are skipped.
"""

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

import eval_benchmarks
import eval_wildbench
from rlmt import chat as templates
from benchmarks import alpacaeval2, arenahard2, creativewriting3, judge_template, shared, wildbench
from benchmarks.judge_template import Placeholders, fill, fill_messages, read_template

ROOT = Path(__file__).parents[2]
DATA_FILES = "eval/reason_benchmarks/data_files"


def of_the_authors(path: str) -> str:
    """Returns the text of a file of the authors' repository."""
    repository = os.environ.get("RLMT_REPOSITORY", "")
    if not repository:
        pytest.skip("RLMT_REPOSITORY does not name a clone of github.com/princeton-pli/RLMT")
    command = ["git", "-C", repository, "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# --- reading and filling in

BOTH = Placeholders(("question", "answer"), ("history",))


def test_placeholders_are_filled_in_one_pass_and_all_other_braces_stay():
    template = 'Q: {$question} A: {answer} {"mark": {x}} \\boxed{y} {$question}'
    fields = {"question": "{answer} {$question}", "answer": "{$question} {z} {"}
    expected = 'Q: {answer} {$question} A: {$question} {z} { {"mark": {x}} \\boxed{y} {answer} {$question}'
    assert fill(template, fields) == expected


def test_a_template_is_one_message_or_a_message_for_each_chatml_turn():
    fields = {"question": "<|im_start|>user\nq<|im_end|>", "answer": " a\n"}
    assert fill_messages("{$question}|{answer}\n", fields) == [
        {"role": "user", "content": "<|im_start|>user\nq<|im_end|>| a\n\n"}
    ]
    chatml = "<|im_start|>system\nJudge.\n<|im_end|>\n<|im_start|>user\n{$question}|{answer}\n<|im_end|>\n"
    assert fill_messages(chatml, fields) == [
        {"role": "system", "content": "Judge."},
        {"role": "user", "content": "<|im_start|>user\nq<|im_end|>| a\n"},
    ]


def test_a_template_that_does_not_fit_is_refused(tmp_path, exits):
    file = tmp_path / "t.txt"
    known = "it knows {$question}, {$answer}, {$history}"
    for text, message in (
        ("{$question} {$anwser} {$answer}", f"cannot fill {{$anwser}} here; {known}"),
        ("{question} {anwser}", f"no {{$answer}} here; {known}"),
        ("Who wins?", f"no {{$question}}, {{$answer}} here; {known}"),
    ):
        file.write_text(text)
        read_template.cache_clear()
        line = exits(read_template, str(file), BOTH, " here")
        assert line == f"error: --template {file}: {message}"
    assert "nowhere.txt" in exits(read_template, str(tmp_path / "nowhere.txt"), BOTH)


def test_the_wording_names_the_file_and_its_text(tmp_path):
    assert judge_template.describe_wording("") == "our own"
    (tmp_path / "a.txt").write_text("x")
    first = judge_template.describe_wording(str(tmp_path / "a.txt"))
    assert first == "a.txt 2d711642b726"  # SHA-256 of x
    of_folder = judge_template.describe_wording(str(tmp_path))
    (tmp_path / "a.txt").write_text("y")
    assert judge_template.describe_wording(str(tmp_path / "a.txt")) != first
    assert judge_template.describe_wording(str(tmp_path)) != of_folder
    assert of_folder.startswith(f"{tmp_path.name} ")


# --- the files of the paper's authors, unchanged

TASK = {"instruction": "Say {it}.", "output": "A {$model_output}.", "position": 0}


def as_the_authors_fill(template: str, fields: dict[str, str]) -> str:
    """Fills in as their code does: one replacement after the other, where no answer holds a placeholder."""
    for name, value in fields.items():
        template = template.replace(f"{{${name}}}", value)
    return template


def test_the_authors_template_of_alpacaeval(tmp_path):
    text = of_the_authors(f"{DATA_FILES}/alpacaeval2/eval_template.score")
    (tmp_path / "t").write_text(text)
    args = eval_benchmarks.Args(name="alpacaeval2", protocol="paper", template=str(tmp_path / "t"))
    task = TASK | {"output": "base"}
    sides = set()
    for word in range(20):
        task["instruction"] = f"Say {word} in {{braces}}."
        side = alpacaeval2.model_side(task["instruction"])
        first, second = ("ours", "base") if side == "A" else ("base", "ours")
        request = eval_benchmarks.requests_about(args, task, "ours")["judge_text"]
        fields = {"instruction": task["instruction"], "model_output": first, "reference": second}
        assert request["messages"] == [{"role": "user", "content": as_the_authors_fill(text, fields)}]
        assert (request["max_tokens"], request["temperature"]) == (128, 0.0)
        sides.add(side)
    assert sides == {"A", "B"}


def test_the_authors_template_of_creative_writing(tmp_path):
    folder = f"{DATA_FILES}/creativewritingv3"
    text = of_the_authors(f"{folder}/creative_writing_judging_prompt.txt")
    (tmp_path / "t").write_text(text)
    for name in (
        "creative_writing_criteria.txt",
        "negative_criteria.txt",
        "creative_writing_prompts_v3.json",
    ):
        (tmp_path / name).write_text(of_the_authors(f"{folder}/{name}"))
    flags = {"data": str(tmp_path), "protocol": "paper", "template": str(tmp_path / "t")}
    args = eval_benchmarks.Args(name="creativewriting3", **flags)
    task = creativewriting3.load_tasks(tmp_path)[0]
    request = eval_benchmarks.requests_about(args, task, "A {piece}.")["judge_text"]

    criteria, negative = creativewriting3.load_criteria(tmp_path)
    expected = text.format(
        writing_prompt=task["unfilled"],
        test_model_response="A {piece}.",
        creative_writing_criteria="\n".join("- " + name for name in criteria),
        lower_is_better_criteria=", ".join(negative),
    )
    assert request["messages"] == [{"role": "user", "content": expected}]
    assert request["max_tokens"] == 2048


@pytest.mark.parametrize("mode, name", [("reward", "pairwise"), ("score", "score")])
def test_the_authors_templates_of_wildbench(mode, name, tmp_path):
    text = of_the_authors(f"{DATA_FILES}/wildbench/eval_template.{name}")
    (tmp_path / "t").write_text(text)
    template = read_template(str(tmp_path / "t"), wildbench.PLACEHOLDERS[mode])
    task = {"messages": [{"role": "user", "content": "q"}], "checklist": ["c?"]}
    candidates = {"candidate_A": "a {x}", "candidate_B": "b"} if mode == "reward" else {"model_output": "m"}
    fields = wildbench.judge_fields(task, "paper", mode, **candidates)
    content = fill_messages(template, fields)[0]["content"]
    assert content == as_the_authors_fill(text, fields) and "{$" not in content


def chat_template_of(source: str, name: str) -> str:
    """Returns a constant of a Python source, as that program would write it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"no {name}")


@pytest.mark.parametrize("family", ["llama_base", "qwen25_base"])
@pytest.mark.parametrize(
    "file, name, think_format",
    [
        ("convert_base_to_prompted_model.py", "THINKING_CHAT_TEMPLATE", "zero_think"),
        ("convert_base_to_nothink_prompted_model.py", "NOTHINK_CHAT_TEMPLATE", "zero_plain"),
    ],
)
def test_the_authors_chat_templates(load, tmp_path, family, file, name, think_format):
    """Training and evaluation render what their tokenizer renders, to the letter."""
    text = chat_template_of(of_the_authors(f"training/sft_dpo/utils/src/{file}"), name)
    path = tmp_path / "theirs.jinja"
    path.write_text(text)
    conversation = [{"role": "user", "content": "How do I bake a cake? {{ x }}"}]
    theirs = load(family)
    theirs.chat_template = text
    expected = theirs.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)

    trained = load(family)
    templates.prepare_tokenizer(trained, think_format, str(path))
    assert trained.decode(templates.encode_prompt(trained, conversation)) == expected
    load(family).save_pretrained(tmp_path / "model")
    args = eval_wildbench.Args(
        model=str(tmp_path / "model"), think_format=think_format, chat_template=str(path)
    )
    tokenizer = shared.load_model_tokenizer(args)
    assert tokenizer.decode(templates.encode_prompt(tokenizer, conversation)) == expected
    assert shared.think_format(args) == think_format


# --- the Zero instruction, and a chat template behind an endpoint

ODD = 'Think in <think> </think>, answer in <response> </response>: "so" {% of \\ é \U0001f600}\n'


def test_the_zero_instruction_by_file(load, tmp_path):
    file = tmp_path / "zero.txt"
    file.write_text(ODD)
    tokenizer = load("llama_base")
    line = templates.prepare_tokenizer(tokenizer, "zero_think", str(file))
    assert line.startswith(f"chat template: {file};")
    question = [{"role": "user", "content": "Q"}]
    rendered = templates.render(tokenizer, question, tokenize=False, add_generation_prompt=True)
    assert rendered == f"{tokenizer.bos_token}{ODD.strip()}\n\nUser: Q\n\nAssistant:"


def test_a_chat_template_behind_an_endpoint_is_the_servers(exits):
    args = eval_wildbench.Args(model="m", model_url="http://localhost:1/v1", chat_template="mine.jinja")
    line = exits(shared.check_model, args)
    assert "the server at --model-url applies its own" in line and "vllm serve m --chat-template" in line


# --- the words reach the judge


def test_arenahard_by_a_folder_of_templates(serve, monkeypatch, tmp_path, exits):
    """One for each category; another wording is another fingerprint."""
    monkeypatch.chdir(ROOT)
    questions = []
    for uid, category in (("h", "hard_prompt"), ("c", "creative_writing")):
        questions.append(json.dumps({"uid": uid, "category": category, "prompt": f"Do {uid}."}))
        baseline = json.dumps({"uid": uid, "answer": "base", "metadata": {}})
        (tmp_path / f"baseline_{arenahard2.BASELINES[category]}.jsonl").write_text(baseline)
    (tmp_path / "question.jsonl").write_text("\n".join(questions))
    folder = tmp_path / "judge"
    folder.mkdir()
    for category in arenahard2.TEMPLATES:
        text = f"<|im_start|>system\nMINE {category}<|im_end|>\n<|im_start|>user\n"
        (folder / f"{category}.txt").write_text(text + "{QUESTION}|{ANSWER_A}|{ANSWER_B}<|im_end|>")
    server = serve(lambda text, n: "[[A=B]]")
    summaries = []
    for template in (str(folder), ""):
        flags = {"model": "data/toy/base", "max_tokens": 8, "judge": "j", "judge_url": server.url}
        flags |= {"data": str(tmp_path), "template": template, "out": str(tmp_path / f"run{len(summaries)}")}
        eval_benchmarks.main(eval_benchmarks.Args(name="arenahard2", **flags))
        summaries.append(json.loads(Path(flags["out"], "summary.json").read_text()))
    theirs, own = summaries
    asked = [request["messages"] for request, _ in server.requests if "MINE" in str(request["messages"])]
    systems = sorted(messages[0]["content"] for messages in asked)
    # one more tries the judge
    assert systems == ["MINE creative_writing"] * 2 + ["MINE hard_prompt"] * 3
    assert sum(messages[1]["content"].startswith(("Do h.|base|", "Do c.|base|")) for messages in asked) == 3
    assert theirs["wording"] == judge_template.describe_wording(str(folder)) and own["wording"] == "our own"
    assert own["fingerprint"] != theirs["fingerprint"]


def test_alpacaeval_needs_the_template_of_its_protocol(tmp_path, exits):
    file = tmp_path / "mine.txt"
    file.write_text("Rank {$instruction}|{$model_output}|{$reference}")
    args = eval_benchmarks.Args(name="alpacaeval2", template=str(file), protocol="paper")
    request = eval_benchmarks.requests_about(args, TASK, "mine")["judge_text"]
    answers = ["mine", TASK["output"]]
    if alpacaeval2.model_side(TASK["instruction"]) == "B":
        answers.reverse()
    assert request["messages"][0]["content"] == "|".join(["Rank " + TASK["instruction"], *answers])
    args.protocol = "official"
    said = exits(eval_benchmarks.requests_about, args, TASK, "mine")
    assert "cannot fill {$model_output} with --protocol official" in said
