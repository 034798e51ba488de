"""Toy programs for RLVR: "Take x, add 3, then double it." -> def f(x): return (x + 3) * 2

    python -m data.toy.programs                                # writes data/toy/code_{traces,prompts,tasks}.jsonl
    python -m data.toy.programs --base-out results/toy/code-base    # data/toy/base with the words of code, to train from

The teacher of the traces builds the expression one step at a time and, in a share of the places where parentheses matter,
forgets them, in the thinking and so in the response. Prompts and tasks have the fields `tests` and `entry_point`, which the
reward `code` runs in the sandbox. `judge` is the gold measure of eval_wildbench.py: it reads the response with `ast` and
works out + - * itself, so it shares nothing with that reward.
"""

import ast
import json
import operator
import random
import re
from dataclasses import dataclass
from pathlib import Path

import tyro

from data.toy.world import GREETINGS, SplitArgs, save, split_rows

WORDING = {
    "+": ["add {}", "put {} on top"],
    "-": ["take {} away", "take {} from it"],
    "*2": ["double it"],
    "*3": ["triple it"],
}
STARTS = ["Take x", "Please take x", "I have x"]
SPLITS = {"traces": range(0, 40), "prompts": range(40, 80), "tasks": range(80, 100)}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

Steps = list[tuple[str, int]]  # of + - *, and a number


@dataclass
class Args(SplitArgs):
    slips: float = 0.6
    """Share of the parentheses that matter which the teacher forgets."""
    model: Path = Path("data/toy/base")
    """Base model whose vocabulary --base-out extends."""
    base_out: Path | None = None
    """Folder for that model; then no rows are written."""


def write_prompt(rng: random.Random) -> tuple[str, Steps]:
    """The user's text and its two or three steps, of different kinds."""
    kinds = rng.sample(list(WORDING), rng.randint(2, 3))
    steps = [(kind[0], int(kind[1:] or rng.randint(1, 20))) for kind in kinds]
    words = [rng.choice(WORDING[kind]).format(n) for kind, (_, n) in zip(kinds, steps)]
    return f"{rng.choice(GREETINGS)} {', then '.join([rng.choice(STARTS), *words])}.".strip(), steps


def read_prompt(text: str) -> Steps:
    """The steps that a prompt states; inverse of `write_prompt`. ValueError when it is not a prompt of this world."""
    spoken = {form.format("N"): kind for kind, forms in WORDING.items() for form in forms}
    clauses = re.split(", then ", text.removesuffix("."))[1:]
    kinds = [spoken.get(re.sub(r"\d+", "N", clause)) for clause in clauses]
    if not clauses or None in kinds:
        raise ValueError(f"not a toy program: {text[:120]!r}")
    return [(kind[0], int(kind[1:] or re.search(r"\d+", clause)[0])) for kind, clause in zip(kinds, clauses)]


def apply(steps: Steps, x: int) -> int:
    for sign, n in steps:
        x = x * n if sign == "*" else x + n if sign == "+" else x - n
    return x


def solve(steps: Steps, slips: float, rng: random.Random) -> tuple[str, str]:
    """(thinking, response) of a teacher that forgets a share of the parentheses that matter."""
    code, notes, is_sum = "x", [], False
    for sign, n in steps:
        if sign == "*" and is_sum and rng.random() >= slips:
            code = f"({code})"
        code, is_sum = f"{code} {sign} {n}", sign != "*"
        notes.append(code)
    return " then ".join(notes), f"def f(x): return {code}"


def evaluate(node: ast.expr, x: int) -> int:
    """The value of an expression of x, whole numbers, + - * and parentheses; ValueError for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left, x), evaluate(node.right, x))
    if isinstance(node, ast.Name) and node.id == "x":
        return x
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(f"{ast.unparse(node)[:80]} is beyond + - *")


def function(response: str) -> ast.expr:
    """What f returns in a response that is `def f(x): return ...` and nothing else, else ValueError."""
    try:
        tree = ast.parse(response.strip())
    except (SyntaxError, RecursionError, MemoryError) as e:
        raise ValueError(f"not Python: {e}") from None
    shape = ast.dump(ast.parse("def f(x): return 0"))
    if (
        len(tree.body) == 1
        and isinstance(tree.body[0], ast.FunctionDef)
        and isinstance(tree.body[0].body[0], ast.Return)
    ):
        found, tree.body[0].body[0].value = tree.body[0].body[0].value, ast.Constant(0)
        if found and ast.dump(tree) == shape:
            return found
    raise ValueError("not def f(x): return ...")


def judge(messages: list[dict], response: str) -> dict:
    """Right or wrong: the response's function against the steps of the prompt."""
    steps = read_prompt(messages[-1]["content"])
    try:
        code = function(response)
        right = all(evaluate(code, x) == apply(steps, x) for x in range(-9, 10))
    except (ValueError, RecursionError):
        right = False
    return {"score": float(right), "checks": {"right": right}}


def gold(messages: list[dict], response: str) -> float:
    """The same as a number, for --gold."""
    return judge(messages, response)["score"]


def write_files(args: Args) -> dict[str, list[dict]]:
    """Rows of the three files by name; a program belongs to one split, whatever the seed and the wording."""

    def draw(rng: random.Random):
        text, steps = write_prompt(rng)

        def rest(split: str) -> dict:
            if split == "traces":
                thinking, response = solve(steps, args.slips, rng)
                return {"thinking": thinking, "response": response, "teacher": "toy code"}
            tests = [f"assert f({x}) == {apply(steps, x)}" for x in (0, 1, 7, -4)]
            return {"source": "toy code", "tests": tests, "entry_point": "f"}

        return text, repr(steps), rest

    return split_rows("code", args, SPLITS, draw)


def extend_base(model: Path, out: Path) -> None:
    """Writes a base model whose vocabulary has the words of these rows too. Their embeddings are random, with the standard
    deviation of the others, as the tied ones of data/toy/models.py need it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import utils

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    policy = AutoModelForCausalLM.from_pretrained(model, **utils.SAFE)
    texts = [
        row["messages"][0]["content"]
        for row in write_files(Args(n_traces=1, n_prompts=500, n_tasks=1))["code_prompts"]
    ]
    rng = random.Random("vocabulary")
    texts += [text for _ in range(500) for text in solve(write_prompt(rng)[1], 0.0, rng)]
    backend = tokenizer.backend_tokenizer
    words = sorted(
        {piece for text in texts for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text + "\n" + text)}
    )
    tokenizer.save_pretrained(out)
    saved = json.loads((out / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    old = len(vocabulary)
    for word in words:
        vocabulary.setdefault(word, len(vocabulary))
    (out / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False))
    torch.manual_seed(0)
    rows = policy.resize_token_embeddings(len(vocabulary), mean_resizing=False).weight.data
    torch.nn.init.normal_(rows[old:], std=rows[:old].std().item())
    policy.save_pretrained(out)
    print(f"{out}: {len(vocabulary) - old} new words, {policy.num_parameters():,} parameters")


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.base_out:
        extend_base(args.model, args.base_out)
    else:
        save(write_files(args), args.out, args.seed)
