"""Judge templates by file: how they are read and filled in, those of the paper's authors, and runs that are
judged by them.

RLMT_REPOSITORY names a clone (or bare repository) of github.com/princeton-pli/RLMT; without it tests of its
files are skipped.
"""

import ast
import os
import subprocess

import pytest

import eval_wildbench
from rlmt import chat as templates
from benchmarks.judge_template import fill, fill_messages
from benchmarks.tested_model import TestedModel


def of_the_authors(path: str) -> str:
    """Returns the text of a file of the authors' repository."""
    repository = os.environ.get("RLMT_REPOSITORY", "")
    if not repository:
        pytest.skip("RLMT_REPOSITORY does not name a clone of github.com/princeton-pli/RLMT")
    command = ["git", "-C", repository, "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# --- reading and filling in


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


# --- the files of the paper's authors, unchanged


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
    model = TestedModel(args)
    assert model.tokenizer.decode(templates.encode_prompt(model.tokenizer, conversation)) == expected
    assert model.think_format == think_format
