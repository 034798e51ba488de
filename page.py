"""Makes one HTML page of a run, to read what the model wrote in training or in an evaluation.

    python page.py results/rlmt                               # writes results/rlmt/page.html
    python page.py results/eval-rlmt --other results/eval-sft  # also compares two evaluations

In a notebook, as in notebooks/03_trace_reader.ipynb:

    rows = page.read_rows("results/rlmt")
    best, worst = page.best_and_worst(rows)
    HTML(page.STYLE + page.cards(best))

Only the run folder is needed, not the model. Every function takes a run folder or the table that `read_rows`
made of it: one row per completion, NaN where the file has no number. The `gold` of an evaluation is the field
`score` in verdicts.jsonl; the choices of a pairwise judge are not numbers and are left out.

A file that cannot be read raises ValueError with file, line and field.
"""

import html
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

HELD_OUT = "held_out_completions.jsonl"  # of a run with --gold-prompts: the same prompts at every checkpoint


@dataclass
class Args:
    run: tyro.conf.Positional[str]
    """Folder of an RL run or of an evaluation."""
    out: str = ""
    """File of the page; empty: page.html in the folder of the run."""
    other: str = ""
    """Folder of a second evaluation, to compare the answers to the same prompts."""
    n: int = 10
    """Completions in each section."""


# --- 1. rows

NUMBER = int | float | None
NUMBERS = ["step", "temperature", "sample", "reward", "gold", "advantage", "n_tokens", "n_thinking_tokens"]
TEXTS = ["text", "thinking", "response", "status"]
FIELDS = {  # of a row: the type of its value
    "id": str | int,
    "messages": list,
    "rewards": dict,
    **dict.fromkeys(TEXTS, str),
    **dict.fromkeys(NUMBERS, NUMBER),
}


def read_lines(path: Path) -> tuple[list[dict], list[str]]:
    """Returns the objects of a jsonl file, and a note if its last line is half written and left out."""
    lines = path.read_bytes().split(b"\n")
    unfinished = lines.pop()  # what follows the last newline; a killed or running job may leave something
    if unfinished:
        lines.append(unfinished)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as e:
            if unfinished and number == len(lines):
                return rows, [f"{path.name}:{number} is cut off in the middle of the line and left out"]
            raise ValueError(f"{path}:{number}: not a JSON object ({e})") from None
    return rows, []


def answer_key(row: dict) -> tuple[str, str]:
    return repr(row.get("id")), repr(row.get("temperature"))  # repr: an unchecked id may be a list


def read_verdicts(run: Path) -> tuple[dict, list[str]]:
    """Returns the scored verdicts of an evaluation by `answer_key`, and notes; none for a training run."""
    path = Path(run, "verdicts.jsonl")
    if not path.is_file():
        return {}, []
    verdicts, notes = read_lines(path)
    return {answer_key(verdict): verdict for verdict in verdicts if "score" in verdict}, notes


def check_row(row: dict, types: dict, where: str) -> None:
    """Raises ValueError with place and field if a value is of the wrong type."""
    values = {field: row.get(field) for field in types}
    if isinstance(row["rewards"], dict):
        values |= {f"rewards.{name}": value for name, value in row["rewards"].items()}
    for field, value in values.items():
        if not isinstance(value, types.get(field, NUMBER)):
            raise ValueError(f"{where}: {field!r} cannot be {json.dumps(value)[:50]}; see results/README.md")
    for message in row["messages"]:
        for field in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(field), str):
                raise ValueError(f"{where}: 'messages' must be a list of {{'role', 'content'}} with strings")


def read_rows(run: str | Path | pd.DataFrame, file: str = "completions.jsonl") -> pd.DataFrame:
    """Reads a run folder into a table with the columns of FIELDS; a table is returned as it is.

    A folder without `file`, which training runs have, is an evaluation: its generations.jsonl is read.
    `attrs["notes"]` of the table lists what was left out.
    """
    if isinstance(run, pd.DataFrame):
        return run
    path = Path(run, file)
    types = FIELDS | {"step": int}
    if not path.is_file():
        path = Path(run, "generations.jsonl")
        types = FIELDS | {"gold": NUMBER | str}  # a judge that is a model writes "8"
    if not path.is_file():
        remedy = "name the folder of an RL run or of an evaluation"
        raise ValueError(f"{run}: no completions.jsonl and no generations.jsonl; {remedy}")

    stored, notes = read_lines(path)
    if not stored:
        raise ValueError(f"{path}: no rows")
    verdicts, more_notes = read_verdicts(Path(run))
    for number, row in enumerate(stored, 1):
        verdict = verdicts.get(answer_key(row), row)  # without a verdict, the row's own score counts
        rewards = row.setdefault("rewards", {})
        row["reward"] = verdict.get("reward", row.get("reward"))
        row["gold"] = verdict.get("score")
        if isinstance(rewards, dict) and "gold" in rewards:
            row["gold"] = rewards["gold"]
        check_row(row, types, f"{path}:{number}")

    # dtype object, because strings of pyarrow refuse half of a surrogate pair
    rows = pd.DataFrame(stored, columns=list(FIELDS), dtype=object)
    rows["gold"] = pd.to_numeric(rows["gold"], errors="coerce")
    rows = rows.astype(dict.fromkeys(NUMBERS, float))
    rows.attrs["notes"] = notes + more_notes
    for note in rows.attrs["notes"]:
        print(f"note: {note}", file=sys.stderr)
    return rows


# --- 2. which ones to read


def has_held_out(run) -> bool:
    """Tells whether `run` is a folder with completions of held-out prompts."""
    if isinstance(run, pd.DataFrame):
        return False
    path = Path(run, HELD_OUT)
    return path.is_file() and path.stat().st_size > 0  # empty: the run was resumed from its beginning


def one_prompt(run, prompt_id: str | int | None = None) -> pd.DataFrame:
    """Returns the completions of one prompt, by step.

    Without `prompt_id`, it is the prompt visited at most steps: a held-out one, if the run has those.
    """
    rows = read_rows(run, HELD_OUT if has_held_out(run) else "completions.jsonl")
    if has_held_out(run) and prompt_id is not None and prompt_id not in set(rows["id"]):
        rows = read_rows(run)  # a prompt that was trained on
    if prompt_id is None:
        prompt_id = rows.groupby("id", sort=False)["step"].nunique().idxmax()
    found = rows[rows["id"] == prompt_id]
    if found.empty:
        n_prompts = rows["id"].nunique()
        raise ValueError(
            f"no prompt {prompt_id!r} among the {n_prompts} of the run, e.g. {rows['id'].iloc[0]!r}"
        )
    return found.sort_values("step", kind="stable")


def best_and_worst(run, n: int = 5, by: str = "reward") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the n completions with the highest `by` ("reward" or "gold") and the n with the lowest.

    One per prompt; of equal ones, the first in the file. No completion is in both tables.
    """
    rows = read_rows(run).dropna(subset=by)
    if rows.empty:
        raise ValueError(f"no completion has a {by}")
    best = rows.sort_values(by, ascending=False, kind="stable").drop_duplicates("id").head(n)
    others = rows.drop(best.index)
    worst = others.sort_values(by, kind="stable").drop_duplicates("id").head(n)
    return best, worst


def biggest_jumps(run, n: int = 5) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the n prompts whose mean reward rose most from first to last visit, and the n that fell most.

    By id: change, first_step, last_step, first, last (mean rewards). A prompt with one visit is in neither.
    """
    means = read_rows(run).groupby(["step", "id"], sort=False)["reward"].mean().dropna().reset_index()
    visits = means.sort_values("step", kind="stable").groupby("id", sort=False)
    jumps = visits.agg(
        first_step=("step", "first"),
        last_step=("step", "last"),
        first=("reward", "first"),
        last=("reward", "last"),
    )
    jumps.insert(0, "change", jumps["last"] - jumps["first"])
    rose = jumps[jumps["change"] > 0].sort_values("change", ascending=False, kind="stable")
    fell = jumps[jumps["change"] < 0].sort_values("change", kind="stable")
    return rose.head(n), fell.head(n)


def matched_answers(run_a, run_b, n: int = 5) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the n answers whose scores in two evaluations differ most: two tables, row for row.

    A score is the gold, or the reward if there is no gold. Answers match if id, temperature and sample are
    equal. `attrs["matched"]` of the first table: how many do.
    """
    keys = ["id", "temperature", "sample"]
    a = read_rows(run_a).set_index(keys, drop=False)
    b = read_rows(run_b).set_index(keys, drop=False)
    for rows in (a, b):
        if rows["step"].notna().any() or not rows.index.is_unique:
            raise ValueError(
                "only evaluations with one answer for each id, temperature and sample can be compared"
            )
    both = a.index.intersection(b.index, sort=False)
    if both.empty:
        raise ValueError(
            f"no id, temperature and sample is in both runs; the first: {a.index[0]}, {b.index[0]}"
        )
    a = a.loc[both]
    b = b.loc[both]
    differ = a["messages"] != b["messages"]
    if differ.any():
        raise ValueError(f"id {a['id'][differ].iloc[0]!r} has other messages in one run than in the other")

    gaps = (a[["gold", "reward"]] - b[["gold", "reward"]]).abs().reset_index(drop=True)
    by = "gold" if gaps["gold"].notna().any() else "reward"
    order = gaps.sort_values(by, ascending=False, kind="stable").index[:n]
    a = a.iloc[order]
    b = b.iloc[order]
    a.attrs["matched"] = len(both)
    return a, b


# --- 3. HTML: the model's text enters it through `escape` only

STYLE = """<style>
.card { border: 1px solid #8886; border-radius: .4rem; margin: .5rem 0; padding: .3rem .6rem }
.card summary { cursor: pointer; overflow-wrap: anywhere } .card .start { opacity: .7 }
.card[open] > summary .start { display: none }
.part { margin: .5rem 0; padding: .3rem .6rem; border-left: .25rem solid #8888 }
.part > b { display: block; font-size: .75rem; text-transform: uppercase; letter-spacing: .06em; opacity: .75 }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate }
.thinking { border-color: #a6e; background: #a6e2 } .response { border-color: #3a7; background: #3a72 }
.pair { display: grid; gap: 0 1rem; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)) }
</style>"""
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>:root { color-scheme: light dark } h1, h2 { overflow-wrap: anywhere; line-height: 1.2 }
body { font: 1rem/1.45 system-ui, sans-serif; max-width: 72rem; margin: auto; padding: .6rem }</style>"""
# control characters, which a browser hides or which turn text around, and halves of surrogate pairs
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def spell_out(match: re.Match) -> str:
    return match[0].encode("unicode_escape").decode()


def escape(text) -> str:
    return html.escape(HIDDEN.sub(spell_out, str(text)))


def text_part(kind: str, label: str, text: str) -> str:
    body = f'<div class="text" dir="auto">{escape(text)}</div>'
    return f'<div class="part {kind}"><b>{escape(label)}</b>{body}</div>'


def folded(summary: str, body: str) -> str:
    return f'<details class="card"><summary>{summary}</summary>{body}</details>\n'


def two_columns(left: str, right: str) -> str:
    return f'<div class="pair"><div>{left}</div><div>{right}</div></div>\n'


def prompt_parts(row: pd.Series) -> str:
    return "".join(text_part("prompt", message["role"], message["content"]) for message in row["messages"])


def answer_parts(row: pd.Series) -> str:
    """Shows thinking and response; with a bad status also the raw text, which may hold more than the two."""
    parts = []
    if row["thinking"]:
        parts.append(text_part("thinking", "thinking", row["thinking"]))
    parts.append(text_part("response", "response", row["response"]))
    if row["status"] != "ok":
        parts.append(text_part("raw", f"as written ({row['status']})", row["text"]))
    return "".join(parts)


def facts(row: pd.Series) -> str:
    """Shows status, step, rewards and lengths in one line."""
    values = {name: row[name] for name in NUMBERS if name != "sample"} | row["rewards"]
    numbers = [f"{name} {value:.4g}" for name, value in values.items() if pd.notna(value)]
    return escape(" · ".join([row["status"], *numbers]))


def cards(rows: pd.DataFrame, with_prompt: bool = True) -> str:
    """Shows each completion as a line that opens."""
    parts = []
    for _, row in rows.iterrows():
        start = f'<br><span class="start" dir="auto">{escape(row["response"][:160])}</span>'
        summary = f"<b>{escape(row['id'])}</b> {facts(row)}{start}"
        prompt = prompt_parts(row) if with_prompt else ""
        parts.append(folded(summary, prompt + answer_parts(row)))
    return "".join(parts)


def prompt_history(rows: pd.DataFrame) -> str:
    """Shows one prompt, then its completions step by step."""
    by = "reward" if rows["reward"].notna().any() else "gold"  # held-out completions have no reward
    parts = [prompt_parts(rows.iloc[0])]
    for step, visit in rows.groupby("step"):
        summary = f"<b>step {step:.0f}</b> mean {by} {visit[by].mean():.4g}"
        parts.append(folded(summary, cards(visit, with_prompt=False)))
    return "".join(parts)


def jump_card(rows: pd.DataFrame, first_step: float, last_step: float) -> str:
    """Shows the completions of one prompt at two steps, side by side."""
    ends = []
    columns = []
    for step in (first_step, last_step):
        visit = rows[rows["step"] == step]
        ends.append(f"{visit['reward'].mean():.4g} at step {step:.0f}")
        columns.append(cards(visit, with_prompt=False))
    summary = f"<b>{escape(rows['id'].iloc[0])}</b> {' to '.join(ends)}"
    return folded(summary, prompt_parts(rows.iloc[0]) + two_columns(*columns))


def run_name(run: str | Path) -> str:
    return Path(run).resolve().name


def comparison(run_a: str | Path, run_b: str | Path, n: int = 5) -> str:
    """Shows the pairs of `matched_answers`, one below the other."""
    a, b = matched_answers(run_a, run_b, n)
    name_a = escape(run_name(run_a))
    name_b = escape(run_name(run_b))
    matched = a.attrs["matched"]
    parts = [f"<p>{matched} answers match in id, temperature and sample; those that differ most:</p>"]
    for (_, row_a), (_, row_b) in zip(a.iterrows(), b.iterrows()):
        scores = []
        for by in ("gold", "reward"):
            if pd.notna(row_a[by]) or pd.notna(row_b[by]):
                scores.append(f"{by} {row_a[by]:.4g} and {row_b[by]:.4g}")
        summary = f"<b>{escape(row_a['id'])}</b> {', '.join(scores)}"
        left = f"<p><b>{name_a}</b> {facts(row_a)}</p>{answer_parts(row_a)}"
        right = f"<p><b>{name_b}</b> {facts(row_b)}</p>{answer_parts(row_b)}"
        parts.append(folded(summary, prompt_parts(row_a) + two_columns(left, right)))
    return "".join(parts)


# --- 4. the page


def make_sections(run: str | Path, rows: pd.DataFrame, other: str | Path, n: int) -> dict[str, str]:
    """Returns the sections of the page: title to HTML."""
    sections = {}
    if other:
        sections[f"Compared with {run_name(other)}"] = comparison(run, other, n)
    for by in ("reward", "gold"):
        if rows[by].notna().any():
            best, worst = best_and_worst(rows, n, by)
            sections[f"Highest {by}"] = cards(best)
            sections[f"Lowest {by}"] = cards(worst)
    followed = one_prompt(run if has_held_out(run) else rows)
    if followed["step"].nunique() > 1:
        sections["One prompt through training"] = prompt_history(followed)
    if rows.groupby("id")["step"].nunique().max() > 1:
        for kind, jumps in zip(("rose", "fell"), biggest_jumps(rows, n)):
            parts = []
            for jump in jumps.itertuples():
                parts.append(jump_card(rows[rows["id"] == jump.Index], jump.first_step, jump.last_step))
            sections[f"Prompts whose reward {kind} most"] = "".join(parts)
    if not sections:
        sections[f"The first {n} in the file"] = cards(rows.head(n))
    return sections


def describe(rows: pd.DataFrame) -> list[str]:
    """Returns the lines at the top of the page."""
    visited = rows.groupby("id")["step"].nunique()
    statuses = [f"{status} {count}" for status, count in rows["status"].value_counts().items()]
    lines = [
        f"{len(rows)} completions of {len(visited)} prompts; "
        f"{(visited > 1).sum()} prompts were visited at several steps",
        f"status: {', '.join(statuses)}",
    ]
    for by in ("reward", "gold"):
        if rows[by].notna().any():
            lines.append(f"mean {by} {rows[by].mean():.4g}")
    return lines + rows.attrs["notes"]


def write(run: str | Path, out: str | Path, other: str | Path = "", n: int = 10) -> None:
    """Writes the page of a run to `out`.

    It shows the n best and worst completions by reward and by gold, one prompt through training, and the
    n biggest rises and falls. With `other`, it also shows the n answers of two evaluations that differ most.
    """
    rows = read_rows(run)
    name = escape(run_name(run))
    links = []
    bodies = []
    for number, (title, body) in enumerate(make_sections(run, rows, other, n).items()):
        links.append(f'<li><a href="#{number}">{escape(title)}</a></li>')
        bodies.append(f'<h2 id="{number}">{escape(title)}</h2>{body or "none"}')
    top = "<br>".join(escape(line) for line in describe(rows))
    text = (
        f"{HEAD}{STYLE}<title>{name}</title></head><body><h1>{name}</h1>"
        f"<p>{top}</p><ul>{''.join(links)}</ul>{''.join(bodies)}</body></html>\n"
    )
    Path(out).write_text(text, "utf-8")


def main(args: Args) -> None:
    out = args.out or Path(args.run, "page.html")
    try:
        write(args.run, out, args.other, args.n)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    print(out)


if __name__ == "__main__":
    main(tyro.cli(Args))
