"""Makes the figures in this folder from files that were published; README.md lists both.

    python -m tests.published.make ../shared/data

The files keep their names and fields, so scripts read them as they read the published ones. No text is in
them: in its place is what a score reads of it, as our parsers find it, or a stand-in as long as the text.
"""

import gzip
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path

from benchmarks.creativewriting3 import parse_reply
from benchmarks.scoring import read_file
from benchmarks.verified import final_number
from rlver.simulated_user import GOODBYE
from rlmt.data import to_jsonl

HERE = Path(__file__).parent
UNCHANGED = (  # figures as they are
    "wildbench/*.csv",
    "alpacaeval2/expected.csv",
    "alpacaeval2/gamed_baselines_reconstructed.csv",
    "arena_hard_v2/synthetic_expected__*",
    "creativewritingv3/expected.csv",
    "sage/expected.csv",
)


def stand_in(text: str) -> str:
    """Returns x's in the place of a text: as many characters and words, and as much space around it."""
    return ("x " * (len(text.split()) - 1)).ljust(len(text.strip()), "x").ljust(len(text))


def of_turn(turn: dict) -> dict:
    """Returns a turn's emotion and its change; of what the user says, the word that ends the dialogue."""
    if turn["role"] == "assistant":
        return {"role": "assistant", "content": ""}
    goodbye = GOODBYE.search(turn["content"])
    kept = {"role": "user", "content": goodbye[0] if goodbye else "", "emotion-point": turn["emotion-point"]}
    change = turn.get("change", turn.get("planning", {}).get("change"))
    return kept if change is None else kept | {"change": change}  # the first turn has none


def main(data: Path, out: Path = HERE) -> None:
    number = defaultdict(count().__next__)  # in the place of a text that only tells rows apart

    def convert(pattern: str, figures: Callable[[dict], dict | str], *kept: str) -> None:
        """Writes the figures of each row, and its `kept` fields, into files of the same names."""
        for source in sorted(data.glob(pattern)):
            path = out / source.relative_to(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [figures(row) | {name: row[name] for name in kept} for row in read_file(source)]
            text = json.dumps(rows) if ".json." in path.name else to_jsonl(rows)
            with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
                packed.write(text.encode())

    def of_judge_text(row: dict) -> dict:
        marks = parse_reply(row["judge_text"])
        lines = [f"{number[name]}: {mark:g}" for name, mark in marks.items()]
        return {"title": f"Prompt: {number[row['title']]}", "judge_text": "\n".join(lines)}

    def of_prompt(row: dict) -> dict:
        title = str(number[f"{row['category'].capitalize()}: {row['title']}"])
        return {"category": "prompt", "title": title, "writing_prompt": "", "seed_modifiers": [""] * 3}

    def of_solutions(row: dict) -> dict:
        figures = {"question": str(number[row["question"]])}
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            solution = f"A: {final_number(row[model]['solution']) or ''}"
            figures[model] = row[model] | {"solution": solution}
        return figures

    def of_question(row: dict) -> dict:
        return {"question": str(number[row["question"]]), "answer": f"#### {final_number(row['answer'])}"}

    def of_baseline(row: dict) -> dict:
        return {"instruction": str(number[row["instruction"]]), "output": stand_in(row["output"])}

    answer = lambda row: {"model_output": stand_in(row["model_output"])}
    convert("wildbench/*.score_v2.jsonl.gz", answer, "session_id", "score")
    answer = lambda row: {"output_2": stand_in(row["output_2"])}
    convert("alpacaeval2/annotations__*", answer, "index", "preference")
    convert("alpacaeval2/gpt4_1106_preview_baseline.json.gz", of_baseline)
    convert("arena_hard_v2/question.jsonl.gz", lambda row: {"prompt": ""}, "uid", "category")
    convert("arena_hard_v2/baseline_*", lambda row: {"answer": ""}, "uid", "metadata")
    verdicts = ("verdict_game1_A_is_baseline", "verdict_game2_A_is_model")
    convert("arena_hard_v2/synthetic_verdicts__*", lambda row: {}, "uid", *verdicts, "model_metadata")
    convert("creativewritingv3/prompts_v3.json.gz", of_prompt)
    convert("creativewritingv3/judge_texts__*", of_judge_text, "iteration", "published_item_score")
    convert("gsm8k/test.jsonl.gz", of_question)
    convert("gsm8k/example_model_solutions.jsonl.gz", of_solutions)
    convert(
        "sage/*_simulator__*", lambda row: {"history": list(map(of_turn, row["history"]))}, "id", "emo_point"
    )

    for name in ("creativewritingv3/criteria.txt", "creativewritingv3/negative_criteria.txt"):
        (out / name).write_text("".join(f"{number[criterion]}\n" for criterion in read_file(data / name)))
    for pattern in UNCHANGED:
        for source in data.glob(pattern):
            shutil.copyfile(source, out / source.relative_to(data))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
