"""Makes preference pairs, and a file of the best answers, from the answers that AlpacaEval publishes.

    python -m data.prepare alpaca-pairs --out data/alpaca

GitHub tatsu-lab/alpaca_eval has the answers of each model of its leaderboard to 805 instructions. A judge has
compared each answer with that of gpt4_1106_preview. Its preference is 0 if it was sure of the latter, 1 if it
was sure of the model's answer.

Only answers of 40 to 1,400 characters are used. Two answers to one instruction can be a pair if their
preferences differ by more than 0.4; up to 8 pairs of an instruction are drawn, and no answer is rejected
twice. An instruction's best answers are the up to three that the judge prefers most, however bad they are.

The SHA-1 of an instruction puts its pairs into half a or half b. So two reward models can learn from disjoint
instructions, and each is measured on the other's.
"""

import hashlib
import itertools
import random
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from rlmt.data import BadInput, read_source, to_jsonl

REPOSITORY = "https://github.com/tatsu-lab/alpaca_eval"
COMMIT = "cd543a149df89434d8a54582c0151c0b945c3d20"
ANNOTATIONS = "results/{model}/weighted_alpaca_eval_gpt4_turbo/annotations.json"
# All models whose annotations take less than 4 MiB at this commit, as others seldom answer in 1,400
# characters; without NullModel and gpt4_gamed, which write for the judge.
MODELS = """
FuseChat-Gemma-2-9B-Instruct FuseChat-Llama-3.1-8B-Instruct FuseChat-Llama-3.2-1B-Instruct
FuseChat-Llama-3.2-3B-Instruct FuseChat-Qwen-2.5-7B-Instruct Mixtral-8x7B-Instruct-v0.1_concise
OpenHermes-2.5-Mistral-7B Qwen-14B-Chat alpaca-7b alpaca-7b_concise alpaca-7b_verbose alpaca-farm-ppo-human
alpaca-farm-ppo-sim-gpt4-20k baize-v2-13b chatglm2-6b claude claude-2 claude-2.1 claude-2.1_concise
claude-instant-1.2 falcon-40b-instruct falcon-7b-instruct gemma-2b-it gemma-7b-it gpt-3.5-turbo-0301
gpt-3.5-turbo-1106 gpt-3.5-turbo-1106_concise gpt-3.5-turbo-1106_verbose gpt35_turbo_instruct gpt4_0613_concise
gpt4_1106_preview humpback-llama2-70b jina-chat minichat-3b minotaur-13b nous-hermes-13b oasst-rlhf-llama-33b
oasst-sft-llama-33b oasst-sft-pythia-12b openbuddy-falcon-40b-v9 openbuddy-llama-30b-v7.1
openbuddy-llama2-13b-v11.1 openbuddy-llama2-70b-v10.1 phi-2 phi-2-sft pythia-12b-mix-sft text_davinci_001
text_davinci_003 ultralm-13b vicuna-13b vicuna-13b-v1.5 vicuna-13b-v1.5-togetherai vicuna-7b vicuna-7b-v1.3
vicuna-7b-v1.5 wizardlm-13b
""".split()

MIN_CHARACTERS = 40  # of an answer
MAX_CHARACTERS = 1400
MARGIN = 0.4  # between the preferences of a pair
MAX_PAIRS = 8  # of one instruction
BEST_ANSWERS = 3  # of one instruction
HALVES = ("a", "b")  # of the instructions


class Answer(NamedTuple):
    text: str
    model: str
    preference: float  # 0 to 1


# --- 1. reading


def read_answers(folder: Path) -> dict[str, list[Answer]]:
    """Returns the answers of the right length to each instruction, without white space around them.

    If several models give the same answer, the first model's is kept. Exits with 2 if a model's file is
    missing.
    """
    answers: dict[str, dict[str, Answer]] = {}
    for model in MODELS:
        path = folder / ANNOTATIONS.format(model=model)
        for _, row in read_source(str(path), "--input"):
            text = row["output_2"].strip()
            if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
                by_text = answers.setdefault(row["instruction"], {})
                # published as 1 for the baseline's answer, 2 for this one
                by_text.setdefault(text, Answer(text, model, row["preference"] - 1))
    return {instruction: list(by_text.values()) for instruction, by_text in answers.items()}


def download(url: str, commit: str, folder: Path) -> None:
    """Downloads nothing but the models' annotations, by git, into an empty folder; raises BadInput if that
    fails."""
    patterns = ["/" + ANNOTATIONS.format(model=model) for model in MODELS]
    commands = [
        ["init", "-q"],
        ["remote", "add", "origin", url],
        ["sparse-checkout", "set", "--no-cone", *patterns],
        ["fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", commit],
        ["checkout", "-q", "FETCH_HEAD"],
    ]
    for command in commands:
        done = subprocess.run(["git", "-C", str(folder), *command])  # git says what is wrong
        if done.returncode:
            raise BadInput(f"{url} cannot be fetched; give the folder of a copy that you have, as --input")


# --- 2. pairs and best answers


def draw_pairs(instruction: str, answers: list[Answer]) -> list[tuple[Answer, Answer]]:
    """Draws up to MAX_PAIRS pairs (chosen, rejected) whose preferences differ by more than MARGIN."""
    pairs = []
    for chosen, rejected in itertools.permutations(answers, 2):
        if chosen.preference - rejected.preference > MARGIN:
            pairs.append((chosen, rejected))
    random.Random(instruction).shuffle(pairs)  # the same order whatever other instructions there are

    by_rejected: dict[Answer, tuple[Answer, Answer]] = {}
    for chosen, rejected in pairs:
        by_rejected.setdefault(rejected, (chosen, rejected))
    return list(by_rejected.values())[:MAX_PAIRS]


def make_rows(answers: dict[str, list[Answer]]) -> dict[str, list[dict]]:
    """Returns the rows of the three files, by the file's name."""
    files: dict[str, list[dict]] = {"pairs_a": [], "pairs_b": [], "responses": []}
    for instruction in answers:
        messages = [{"role": "user", "content": instruction}]
        sha1 = hashlib.sha1(instruction.encode()).hexdigest()
        row_id = f"alpaca-{sha1[:8]}"
        half = HALVES[int(sha1, 16) % 2]
        for number, (chosen, rejected) in enumerate(draw_pairs(instruction, answers[instruction])):
            pair = {
                "id": f"{row_id}-{number}",
                "messages": messages,
                "chosen": chosen.text,
                "rejected": rejected.text,
                "chosen_model": chosen.model,
                "rejected_model": rejected.model,
                "margin": round(chosen.preference - rejected.preference, 4),
            }
            files[f"pairs_{half}"].append(pair)

        best_first = sorted(answers[instruction], key=lambda answer: answer.preference, reverse=True)
        for number, answer in enumerate(best_first[:BEST_ANSWERS]):
            row = {
                "id": f"{row_id}-r{number}",
                "messages": messages,
                "response": answer.text,
                "model": answer.model,
                "preference": round(answer.preference, 4),
            }
            files["responses"].append(row)
    return files


def make_folder(source: str | None, revision: str | None, out: Path) -> None:
    """Makes the folder `out` with the three files, and prints how many rows they have.

    Args:
        source: folder of a copy of the repository, or a URL for git. None: GitHub.
        revision: commit, if git downloads it. None: COMMIT.
    """
    source = source or REPOSITORY
    if Path(source).is_dir():
        answers = read_answers(Path(source))
    else:
        revision = revision or COMMIT
        with tempfile.TemporaryDirectory() as folder:
            download(source, revision, Path(folder))
            answers = read_answers(Path(folder))

    out.mkdir(parents=True)
    for name, rows in make_rows(answers).items():
        (out / f"{name}.jsonl").write_text(to_jsonl(rows, ensure_ascii=False))
        print(f"  {name}.jsonl: {len(rows)} rows of {len(answers)} instructions")
