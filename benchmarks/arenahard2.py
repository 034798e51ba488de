"""Arena-Hard v2: a judge compares the model with a baseline in two games; scores, plain and at equal style.

Rows may also have the official tool's `games` in place of the two verdicts. Scores are in percent.

Scores are exact, where the official tool prints the mean or median of 100 unseeded bootstrap fits. Its
intervals, `..._interval`, go from 5 to 95 % and resample battles as if those of a prompt were independent, so
they are narrow.

One deviation: `score_style_controlled` is the win rate of answers in the style of the baseline's, where all
differences of style are 0. The official tool first subtracts the mean difference over the battles of all
models that it finds. With one model that is the model's own mean, so its own style would not be taken away.

The paper's score is `score_paper`: strength and style are ignored, and a missing verdict is a tie. Its
interval has 95 % and is over prompts. Unlike the paper's code it also reads `B<A` and the like, and a label
without brackets; there both are ties. The paper's judge is GPT-4.1; the settings file of its code names
gpt-4.1-mini.
"""

import math
import re
import sys
from pathlib import Path

import numpy as np

from rlmt.data import read_rows
from rlmt.verdicts import verdict_of
from utils import fail
from benchmarks.judge import text_of_verdict
from benchmarks.judge_template import Placeholders
from benchmarks.scoring import (
    check_types,
    count_rows,
    for_summary,
    get_field,
    hard_labels,
    load_sibling,
    match_rows,
    mean,
    mean_interval,
    task_means,
)

KEYS = ("uid",)
PROMPT = "{prompt}"
GAMES = ("verdict_game1_A_is_baseline", "verdict_game2_A_is_model")
_VERDICT_AND_GAME = """ Say why, then end with one verdict: [[A>>B]] A is much better, [[A>B]] A is better, [[A=B]] \
about the same, [[B>A]] B is better, [[B>>A]] B is much better.
<|im_end|>
<|im_start|>user
The prompt:
{$QUESTION}

Answer of A:
{$ANSWER_A}

Answer of B:
{$ANSWER_B}
<|im_end|>"""
TEMPLATES = {  # of the judge, by category
    "hard_prompt": "<|im_start|>system\nYou compare two assistants' answers. First solve the task yourself, then find what is "
    "wrong or missing in each. Judge correctness first, then how useful, complete and to the point each is."
    + _VERDICT_AND_GAME,
    "creative_writing": "<|im_start|>system\nYou compare two assistants' pieces of creative writing. Judge imagination, voice "
    "and how well each does what was asked." + _VERDICT_AND_GAME,
}
JUDGE_OPTIONS = {
    "official": {"temperature": 0.0, "max_tokens": 16000},
    "paper": {"temperature": 0.0, "max_tokens": 3072},
}
# the names in the official template
PLACEHOLDERS = dict.fromkeys(JUDGE_OPTIONS, Placeholders(("QUESTION", "ANSWER_A", "ANSWER_B")))
MARKDOWN = ("header_count", "list_count", "bold_count")  # besides the length, what style control reads
BASELINES = {  # the model whose answers the tested one's are compared with, by category
    "hard_prompt": "o3-mini-2025-01-31",
    "creative_writing": "gemini-2.0-flash-001",
}

VERDICTS = {  # label: (value for A, weight in the official score)
    "A>>B": (1, 3),
    "A>B": (1, 1),
    "A=B": (0.5, 1),
    "B>A": (0, 1),
    "B>>A": (0, 3),
    "B<<A": (1, 3),
    "B<A": (1, 1),
    "B=A": (0.5, 1),
    "A<B": (0, 1),
    "A<<B": (0, 3),
}


# --- 1. data


def load_tasks(data: Path) -> list[dict]:
    """Loads the questions with `baseline`: a row {uid, answer, metadata}, or None for a category without file.

    The official files have answers to all questions, so each file counts for its own category alone. Exits
    with 2 if a file answers some prompts of its category, but not all of them.
    """
    tasks = load_sibling(data, "question.jsonl*", "uid", "category", "prompt")
    folder = data if data.is_dir() else data.parent
    baselines = {category: load_baseline(folder, model) for category, model in BASELINES.items()}
    for task in tasks:
        of_category = baselines.get(task["category"], {})
        task["baseline"] = of_category.get(task["uid"])
        if of_category and not task["baseline"]:
            fail(f"--data {data}: the baseline of {task['category']} has no answer to prompt {task['uid']}")
    return tasks


def load_baseline(folder: Path, model: str) -> dict[str, dict]:
    """Loads the rows of the files baseline_<model>* by their uid."""
    rows = {}
    for file in sorted(folder.glob(f"baseline_{model}*")):
        for row in read_rows(file, "uid", "metadata"):
            if "answer" not in row:  # the official file has it in its messages
                row["answer"] = row["messages"][-1]["content"]["answer"]
            rows[row["uid"]] = row
    return rows


# --- 2. the judge


def judge_template(task: dict, protocol: str) -> str:
    return TEMPLATES.get(task["category"], TEMPLATES["hard_prompt"])


def judge_fields(task: dict, answer: str, data: Path, protocol: str) -> dict[str, dict]:
    """Returns what the judge is shown in both games, by the field of the scored row that takes its reply."""
    fields = {}
    answers = [task["baseline"]["answer"], answer]
    for game in GAMES:
        fields[game] = {"QUESTION": task["prompt"], "ANSWER_A": answers[0], "ANSWER_B": answers[1]}
        answers.reverse()
    return fields


def parse_reply(text: str, data: Path | None = None) -> str:
    """Returns a label of VERDICTS: the text itself, else that in the last [[...]], else in the last [...].

    Case does not matter, and thinking before it is left out. Raises ValueError if there is none.
    """
    text = verdict_of(text).upper().strip()
    if text in VERDICTS:
        return text
    found = re.findall(r"\[\[([AB<>=]+)\]\]", text) or re.findall(r"\[([AB<>=]+)\]", text)
    if not found or found[-1] not in VERDICTS:
        raise ValueError(f"no verdict in {text[-80:]!r}")
    return found[-1]


def judged_fields(task: dict, answer: str, replies: dict, protocol: str) -> dict:
    """Returns the fields of a scored row, from the judge's replies by field."""
    verdicts = {game: text_of_verdict(reply) for game, reply in replies.items()}
    return verdicts | {"model_metadata": style(answer)}


# --- 3. style


def markdown_counts(answer: str) -> dict:
    """Counts the markdown that style control reads, outside of code blocks."""
    text = re.sub(r"```[^`]*```", "``````", answer)

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text, re.M))

    return {
        "header_count": {f"h{level}": count(rf"^#{{{level}}}\s") for level in range(1, 7)},
        "list_count": {"ordered": count(r"^\s*\d+\.\s"), "unordered": count(r"^\s*[-*+]\s")},
        "bold_count": {"**": count(r"\*\*[^*\n]+\*\*"), "__": count(r"__[^_\n]+__")},
    }


def style(answer: str) -> dict:
    """Counts what style control reads, tokens by o200k_base; {} if tiktoken cannot download that table,
    once."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("o200k_base")
    except OSError:  # requests' errors are of this kind
        return {}
    return {"token_len": len(encoding.encode(answer, disallowed_special=()))} | markdown_counts(answer)


def style_features(model: dict, baseline: dict) -> list[float]:
    """Returns four relative differences: of lengths, and of densities of headers, list items and bold spans.

    `model` and `baseline` are counts as `style` returns them.
    """
    model_length = model["token_len"]
    baseline_length = baseline["token_len"]
    features = [(model_length - baseline_length) / max(model_length + baseline_length, 1)]
    for name in MARKDOWN:
        model_density = sum(model[name].values()) / (model_length + 1)
        baseline_density = sum(baseline[name].values()) / (baseline_length + 1)
        features.append((model_density - baseline_density) / (model_density + baseline_density + 1))
    return features


# --- 4. scores


def bradley_terry(features: np.ndarray, outcomes: np.ndarray) -> float:
    """Returns the win rate in percent where all features are 0, as they are at equal style.

    It is the maximum likelihood fit of soft outcomes (N,) on the features (N, 4).
    """
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    model = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000)
    model.fit(*hard_labels(features, outcomes))
    return 100 / (1 + math.exp(-model.intercept_[0]))


def scale_features(features: np.ndarray) -> np.ndarray:
    """Returns features (N, 4) with deviation 1, and with 0 where the two styles are equal, as before.

    A feature that does not vary becomes 0, as its effect cannot be told from that of the model.
    """
    spread = np.std(features, axis=0, ddof=1)
    varies = spread > 1e-9
    return np.where(varies, features / np.where(varies, spread, 1), 0)


def category_scores(results: list[dict]) -> dict:
    """Returns the scores of one category's prompts.

    From their results' `game1` and `game2` (labels; None: not read) and `style` (None: unknown).
    """
    values = []  # for the model, two a prompt; a verdict that was not read is a tie
    outcomes = []  # of battles: a much better answer wins three; only prompts with both verdicts
    styles = []
    for result in results:
        value_of_baseline, weight1 = VERDICTS.get(result["game1"], (0.5, 0))  # A is the baseline
        value_of_model, weight2 = VERDICTS.get(result["game2"], (0.5, 0))  # A is the model
        values += [1 - value_of_baseline, value_of_model]
        if "invalid" not in result:
            outcomes += [value_of_model] * weight2 + [1 - value_of_baseline] * weight1
            styles += [result["style"]] * (weight1 + weight2)

    percentages = 100 * np.array(values)
    tasks = [result["task"] for result in results for _ in range(2)]
    numbers = {
        "score": None,
        "score_style_controlled": None,
        "score_paper": 100 * mean(values),
        "score_paper_interval": mean_interval(percentages, tasks=tasks),
        "task_means": {"score_paper": task_means(percentages, tasks)},
    }
    if not outcomes:
        return numbers
    outcomes = np.array(outcomes)
    picks = np.random.default_rng(0).integers(0, len(outcomes), (100, len(outcomes)))
    means = 100 * outcomes[picks].mean(axis=1)
    numbers |= {
        "score": 100 * mean(outcomes),
        "score_interval_90": np.percentile(means, [5, 95]).tolist(),
    }
    if None not in styles:
        features = scale_features(np.array(styles))
        refits = [bradley_terry(features[pick], outcomes[pick]) for pick in picks]
        numbers |= {
            "score_style_controlled": bradley_terry(features, outcomes),
            "score_style_controlled_interval_90": np.percentile(refits, [5, 95]).tolist(),
        }
    return numbers


def row_verdicts(row: dict, where: str) -> list[str | None]:
    """Returns the texts of a row's two verdicts; the official tool has them under `games`."""
    if "games" not in row:
        return [get_field(row, where, game) for game in GAMES]
    texts = [game.get("score") if isinstance(game, dict) else None for game in row["games"]]
    return [*texts, None, None][:2]


def score(rows: list[dict], data: Path, source: str) -> dict:
    """Returns the scores of hard prompts, those of creative writing under its name, and each one's counts.

    Creative writing has another baseline, so scores and counts of its own. If rows have no hard prompts, it
    has the plain keys.
    """
    tasks = load_tasks(data)
    results = match_rows(rows, tasks, KEYS, source)
    for row, result in zip(rows, results):
        task = tasks[result["task"]]
        result["category"] = task["category"]
        result["style"] = None
        if row.get("model_metadata") and task["baseline"]:
            where = f"{source}:{result['line']}"
            check_types(row["model_metadata"], where, "token_len", *MARKDOWN)
            for name in MARKDOWN:
                check_types(row["model_metadata"][name], where)
            result["style"] = style_features(row["model_metadata"], task["baseline"]["metadata"])
        for game, text in zip(("game1", "game2"), row_verdicts(row, f"{source}:{result['line']}")):
            try:
                result[game] = parse_reply(str(text))
            except ValueError as error:
                result[game] = None
                result.setdefault("invalid", f"{game}: {error}")

    scores = {}
    for category in {result["category"] for result in results}:
        of_category = [result for result in results if result["category"] == category]
        n_without_style = sum(result["style"] is None for result in of_category)
        if n_without_style:
            print(
                f"WARNING: {source}: no style-controlled score of {category}: {n_without_style} of {len(of_category)} "
                "rows, or their baselines, have no model_metadata; the official tool has it in model_answer/*.jsonl",
                file=sys.stderr,
            )
        # prompts of another category are not missing
        counted_tasks = [task if task["category"] == category else {"excluded": "category"} for task in tasks]
        scores[category] = category_scores(of_category) | for_summary(count_rows(of_category, counted_tasks))

    first, *others = sorted(scores, key=lambda category: (category != "hard_prompt", category))
    numbers = {"category": first} | scores[first]
    for category in others:
        numbers[category] = scores[category]
    return numbers | {"rows": results}
