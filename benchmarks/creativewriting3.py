"""Creative Writing v3: a judge marks each piece by a list of criteria; the mean of the marks, of 100.

An item that is invalid is left out, as in the official tool; in `overall_paper` it counts as what the paper's
code makes of it, 0 without any mark. The official tool asks again for answers under 500 characters and then
leaves them out; here they are judged.

Marks are read as in the official tool, after bold marks and bullets are removed, which would make another
name of `**Meandering**`. Any `name: number` is a mark there, one of the analysis too, and so is
`Meandering (lower is better): 18`, which is then not turned round. Here only the names of criteria are marks,
which changes two of 192 published items. A reply without a mark of the last criterion, of most, or of most of
those in which less is better, is not whole: it is invalid, and counted as `n_incomplete`.
"""

import re
from collections import defaultdict
from pathlib import Path

from benchmarks.judge import text_of_verdict
from benchmarks.judge_template import Placeholders
from benchmarks.scoring import (
    check_types,
    count_rows,
    get_field,
    load_sibling,
    match_rows,
    mean,
    mean_interval,
    task_means,
)
from rlmt.verdicts import verdict_of

KEYS = ("id",)
PROMPT = "{prompt}"
TEMPLATE = (  # of the judge
    "You mark creative writing, and are hard to please.\n\nThe task:\n{$writing_prompt}\n\nThe piece:\n"
    "{$test_model_response}\n\nAnalyse it under the heading [Analysis]. Then mark it under [Scores], from 0 to 20, a line "
    "for each of these, with the name exactly as it is here and without markdown:\n{$mark_lines}\n\n"
    "Lower is better in: {$lower_is_better_criteria}."
)
JUDGE_OPTIONS = {
    "official": {"temperature": 0.0, "max_tokens": 1000},
    "paper": {"temperature": 0.0, "max_tokens": 2048},
}
PLACEHOLDERS = dict.fromkeys(  # all but `mark_lines` are names in the official template
    JUDGE_OPTIONS,
    Placeholders(
        needed=("writing_prompt", "test_model_response"),
        optional=("creative_writing_criteria", "lower_is_better_criteria", "mark_lines"),
    ),
)
ITERATIONS = (1, 2, 3)
HIGHEST_MARK = 20
WORDS_KEPT = 3200  # of a piece that the judge reads, in the paper
NUMBER = r"(-?\d+(?:\.\d+)?)"


# --- 1. data


def load_tasks(data: Path) -> list[dict]:
    """Loads a task for every prompt and iteration, with its seed in the place of <SEED>.

    Titles are those of the official pages.
    """
    prompts = load_sibling(data, "*prompts*.json*", "category", "title", "writing_prompt", "seed_modifiers")
    tasks = []
    for prompt in prompts:
        title = f"{prompt['category'].capitalize()}: {prompt['title']}"
        for iteration in ITERATIONS:
            seed = prompt["seed_modifiers"][iteration - 1]
            task = {
                "id": f"{title} ({iteration})",
                "title": title,
                "iteration": iteration,
                "unfilled": prompt["writing_prompt"],
                "prompt": prompt["writing_prompt"].replace("<SEED>", seed),
            }
            tasks.append(task)
    return tasks


def load_criteria(data: Path) -> tuple[list[str], list[str]]:
    """Loads all criteria, and those of which less is better."""
    return load_sibling(data, "c*riteria.txt"), load_sibling(data, "negative_criteria.txt")


# --- 2. the judge


def judge_template(task: dict, protocol: str) -> str:
    return TEMPLATE


def judge_fields(task: dict, answer: str, data: Path, protocol: str) -> dict[str, dict]:
    """Returns what the judge is shown, by the field of the scored row that takes its reply."""
    criteria, negative = load_criteria(data)
    prompt = task["prompt"]
    if protocol == "paper":
        prompt = task["unfilled"]
        answer = first_words(answer, WORDS_KEPT)
    fields = {
        "writing_prompt": prompt,
        "test_model_response": answer,
        "creative_writing_criteria": "\n".join(f"- {name}" for name in criteria),
        "mark_lines": "\n".join(f"{name}: mark" for name in criteria),
        "lower_is_better_criteria": ", ".join(negative),
    }
    return {"judge_text": fields}


def first_words(text: str, n: int) -> str:
    """Returns the text up to the end of its n-th word, as the paper's code does: no mark says that it was
    cut."""
    return re.match(rf"(\s*\S+){{0,{n}}}", text)[0]


def without_markdown(text: str) -> str:
    """Removes bold marks, and the bullets that begin lines."""
    text = re.sub(r"\*\*|__", "", text)
    return re.sub(r"^[ \t]*[-*+•][ \t]+", "", text, flags=re.MULTILINE)


def parse_reply(text: str, data: Path | None = None) -> dict[str, float]:
    """Returns a judge's marks by name: every `name: 7` or `name: Score 7`, then every `name: [7]`.

    The last mark of a name counts. Drops marks above 20, and thinking before the marks. With `data` only the
    names of criteria count. Raises ValueError if no mark is left; with `data` also if the last criterion, or
    more than half of them or of the negative ones, has none.
    """
    text = without_markdown(verdict_of(text))
    found = re.findall(rf"(.*?):\s*(?:Score\s+)?{NUMBER}", text)
    found += re.findall(rf"(.*?):\s*\[{NUMBER}\]", text)
    marks = {name.strip(): float(mark) for name, mark in found if float(mark) <= HIGHEST_MARK}
    if not marks:
        raise ValueError(f"no `name: number` in {text[-80:]!r}")
    if data:
        # a judge may leave out a criterion that does not apply, as that of dialogue in a piece without any
        criteria, negative = load_criteria(data)
        marks = {name: mark for name, mark in marks.items() if name in criteria}
        n_negative = len(marks.keys() & set(negative))
        if criteria[-1] not in marks or len(marks) < len(criteria) / 2 or n_negative < len(negative) / 2:
            raise ValueError(f"incomplete: marks of {len(marks)} of {len(criteria)} criteria")
    return marks


def judged_fields(task: dict, answer: str, replies: dict, protocol: str) -> dict:
    """Returns the fields of a scored row, from the judge's replies by field."""
    return {
        "title": task["title"],
        "iteration": task["iteration"],
        "judge_text": text_of_verdict(replies["judge_text"]),
    }


# --- 3. scores


def mark_values(marks: dict[str, float], negative: list[str]) -> list[float]:
    """Returns marks as values from 0 to 20, higher is better. Raises ValueError if none is left.

    A mark below 0 where lower is better would be worth over 20, and is dropped.
    """
    values = []
    for name, mark in marks.items():
        value = HIGHEST_MARK - mark if name in negative else mark
        if value <= HIGHEST_MARK:
            values.append(value)
    if not values:
        raise ValueError("no mark from 0 to 20")
    return values


def shown(values: list[float]) -> float:
    """Returns the mean of marks (of 20) as the official result pages show it (of 100)."""
    return float(f"{5 * round(mean(values), 2):.1f}")


def score(rows: list[dict], data: Path, source: str) -> dict:
    """Returns `overall`, the mean of the items; `iterations`, as on the official pages; and the counts.

    In an iteration's number all of its marks are in one pool. The intervals are over prompts, not items: the
    iterations of a prompt are not independent.
    """
    _, negative = load_criteria(data)
    for line, row in enumerate(rows, 1):
        check_types(row, f"{source}:{line}", "title", "iteration")
        row["id"] = f"{row['title']} ({row['iteration']})"
    tasks = load_tasks(data)
    results = match_rows(rows, tasks, KEYS, source)

    values_of_iteration = defaultdict(list)
    scores = []
    titles = []  # of the prompts; one for each score
    paper_scores = []
    for row, result in zip(rows, results):
        text = get_field(row, f"{source}:{result['line']}", "judge_text") or ""
        paper_scores.append(0.0)
        try:
            paper_scores[-1] = 5 * mean(mark_values(parse_reply(text), negative))
            marks = parse_reply(text, data)
            values = mark_values(marks, negative)
        except ValueError as error:
            result.setdefault("invalid", str(error))
            continue
        result |= {"score": 5 * mean(values), "shown": shown(values), "marks": marks}
        values_of_iteration[row["iteration"]] += values
        scores.append(result["score"])
        titles.append(row["title"])

    all_titles = [row["title"] for row in rows]
    return {
        "overall": mean(scores),
        "overall_interval": mean_interval(scores, tasks=titles) if scores else None,
        "iterations": [shown(values_of_iteration[i]) for i in sorted(values_of_iteration)],
        "overall_paper": mean(paper_scores),
        "overall_paper_interval": mean_interval(paper_scores, tasks=all_titles),
        "task_means": {
            "overall": task_means(scores, titles),
            "overall_paper": task_means(paper_scores, all_titles),
        },
        "n_incomplete": sum("incomplete" in str(result.get("invalid")) for result in results),
        **count_rows(results, tasks),
    }
