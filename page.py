"""Read what a model wrote: completions of a training run, generations of an evaluation. Run folders only, no model.

    python reproduce.py --traces results/rlmt --out page.html                                      # page(): one static file
    rows = trace_reader.read("results/rlmt"); best, worst = trace_reader.best_and_worst(rows)     # as in notebooks/03

Every function takes a run folder or the table that `read` made of it: a row a completion, NaN where the file has no number.
Of a run with --gold-prompts `same_prompt` reads held_out_completions.jsonl, as these prompts are asked at every checkpoint.
`gold` of an evaluation is the judge's mark (`score` in verdicts.jsonl); the choices of a pairwise judge are no number and are
not shown. What cannot be read raises ValueError with file, line and field.
"""

import html
import json
import re
import sys
from pathlib import Path

import pandas as pd

# --- 1. rows

HELD_OUT = "held_out_completions.jsonl"
NUMBERS = ["step", "temperature", "sample", "reward", "gold", "advantage", "n_tokens", "n_thinking_tokens"]
TEXTS = ["text", "thinking", "response", "status"]
NUMBER = int | float | None
KINDS = {
    "id": str | int,
    "messages": list,
    "rewards": dict,
    **dict.fromkeys(TEXTS, str),
    **dict.fromkeys(NUMBERS, NUMBER),
}


def read_lines(path: Path) -> tuple[list[dict], list[str]]:
    """Objects of a jsonl file, and a note if a killed or running job has left half a last line, which is not among them."""
    *lines, last = path.read_bytes().split(b"\n")
    rows = []
    for n, line in enumerate([*lines, last] if last else lines, 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as e:
            if n > len(lines):
                return rows, [f"{path.name}:{n} is cut off in the middle of the line and left out"]
            raise ValueError(f"{path}:{n}: not a JSON object ({e})") from None
    return rows, []


def read(run: str | Path | pd.DataFrame, file: str = "completions.jsonl") -> pd.DataFrame:
    """Table of a run folder: the columns of KINDS; `attrs["notes"]`: what was left out. `file`: of a training run."""
    if isinstance(run, pd.DataFrame):
        return run
    path, verdicts = Path(run, file), Path(run, "verdicts.jsonl")
    kinds = KINDS | {"step": int}
    if not path.is_file():
        path, kinds = (
            Path(run, "generations.jsonl"),
            KINDS | {"gold": NUMBER | str},
        )  # a judge that is a model writes "8"
    if not path.is_file():
        raise ValueError(
            f"{run}: no completions.jsonl and no generations.jsonl; name an RL run's folder, or an evaluation's"
        )
    stored, notes = read_lines(path)
    judged, more = read_lines(verdicts) if verdicts.is_file() else ([], [])
    key = lambda row: str((row.get("id"), row.get("temperature")))
    marks = {key(v): v for v in judged if "score" in v}
    for n, row in enumerate(stored, 1):
        mark, rewards = marks.get(key(row), row), row.setdefault("rewards", {})
        rewards = rewards if isinstance(rewards, dict) else {}
        row |= {
            "reward": mark.get("reward", row.get("reward")),
            "gold": rewards.get("gold", mark.get("score")),
        }
        for field, value in (
            {k: row.get(k) for k in kinds} | {f"rewards.{k}": v for k, v in rewards.items()}
        ).items():
            if not isinstance(value, kinds.get(field, NUMBER)):
                raise ValueError(
                    f"{path}:{n}: {field!r} cannot be {json.dumps(value)[:50]}; see results/README.md"
                )
        if not all(
            isinstance(m, dict) and isinstance(m.get(k), str)
            for m in row["messages"]
            for k in ("role", "content")
        ):
            raise ValueError(f"{path}:{n}: 'messages' must be a list of {{'role', 'content'}} with strings")
    if not stored:
        raise ValueError(f"{path}: no rows")
    rows = pd.DataFrame(
        stored, columns=list(KINDS), dtype=object
    )  # pyarrow's strings take no half of a surrogate pair
    rows["gold"] = pd.to_numeric(rows["gold"], errors="coerce")
    rows = rows.astype(dict.fromkeys(NUMBERS, float))
    rows.attrs["notes"] = notes + more
    for note in rows.attrs["notes"]:
        print(f"note: {note}", file=sys.stderr)
    return rows


# --- 2. which ones to read


def has_held_out(run) -> bool:
    path = Path() if isinstance(run, pd.DataFrame) else Path(run, HELD_OUT)
    return (
        path.is_file() and path.stat().st_size > 0
    )  # a run that was resumed from its beginning has an empty one


def same_prompt(run, prompt_id: str | int | None = None) -> pd.DataFrame:
    """Completions of one prompt, by step; without `prompt_id` of the prompt that was visited at most steps: a held-out one if
    `run` is a folder with their completions."""
    rows = read(run, HELD_OUT if has_held_out(run) else "completions.jsonl")
    if has_held_out(run) and prompt_id not in (None, *rows["id"]):  # of those that were trained on
        rows = read(run)
    if prompt_id is None:
        prompt_id = rows.groupby("id", sort=False)["step"].nunique().idxmax()
    if not (rows["id"] == prompt_id).any():
        raise ValueError(
            f"no prompt {prompt_id!r} among the {rows['id'].nunique()} of the run, e.g. {rows['id'][0]!r}"
        )
    return rows[rows["id"] == prompt_id].sort_values("step", kind="stable")


def best_and_worst(run, n: int = 5, by: str = "reward") -> tuple[pd.DataFrame, pd.DataFrame]:
    """The n completions with the highest `by` ("reward" or "gold") and the n with the lowest: one a prompt, of equal ones the
    first in the file, none in both."""
    rows = read(run).dropna(subset=by)
    if rows.empty:
        raise ValueError(f"no completion has a {by}")
    best = rows.sort_values(by, ascending=False, kind="stable").drop_duplicates("id").head(n)
    return best, rows.drop(best.index).sort_values(by, kind="stable").drop_duplicates("id").head(n)


def biggest_jumps(run, n: int = 5) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The n prompts whose mean reward rose most from the first visit to the last, and the n whose reward fell most.

    By id: change, first_step, last_step, first, last (mean rewards). A prompt with one visit only is in neither.
    """
    means = read(run).groupby(["step", "id"], sort=False)["reward"].mean().dropna().reset_index()
    ends = {
        f"{end}{name}": (field, end)
        for field, name in (("step", "_step"), ("reward", ""))
        for end in ("first", "last")
    }
    jumps = means.sort_values("step", kind="stable").groupby("id", sort=False).agg(**ends)
    jumps.insert(0, "change", jumps["last"] - jumps["first"])
    up = jumps.sort_values("change", ascending=False, kind="stable")
    down = jumps.sort_values("change", kind="stable")
    return up[up["change"] > 0].head(n), down[down["change"] < 0].head(n)


def side_by_side(run_a, run_b, n: int = 5) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two evaluations' generations of equal id, temperature and sample, row for row: the n pairs whose gold (else reward)
    differs most; in the order of the file where there is neither. `attrs["matched"]`: how many pairs there are."""
    a, b = (read(run).set_index(["id", "temperature", "sample"], drop=False) for run in (run_a, run_b))
    if any(x["step"].notna().any() or not x.index.is_unique for x in (a, b)):
        raise ValueError(
            "side by side can stand two evaluations with one answer for each id, temperature and sample"
        )
    both = a.index.intersection(b.index, sort=False)
    if both.empty:
        raise ValueError(
            f"nothing in both has one id, temperature and sample; the first: {a.index[0]}, {b.index[0]}"
        )
    a, b = a.loc[both], b.loc[both]
    if (differ := a["messages"] != b["messages"]).any():
        raise ValueError(
            f"id {a['id'][differ].iloc[0]!r} stands for other messages in one run than in the other"
        )
    gaps = (a[["gold", "reward"]] - b[["gold", "reward"]]).abs()
    by = "gold" if gaps["gold"].notna().any() else "reward"
    order = gaps.reset_index(drop=True).sort_values(by, ascending=False, kind="stable").index[:n]
    a, b = a.iloc[order], b.iloc[order]
    a.attrs["matched"] = len(both)
    return a, b


# --- 3. one page: what a model wrote is put in by `escape` only

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
# controls that a browser hides or that turn the order of the text around them, and halves of surrogate pairs
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape(text) -> str:
    return html.escape(HIDDEN.sub(lambda m: m[0].encode("unicode_escape").decode(), str(text)))


def part(kind: str, label: str, text: str) -> str:
    return f'<div class="part {kind}"><b>{escape(label)}</b><div class="text" dir="auto">{escape(text)}</div></div>'


def fold(summary: str, body: str) -> str:
    return f'<details class="card"><summary>{summary}</summary>{body}</details>\n'


def prompt(row: pd.Series) -> str:
    return "".join(part("prompt", m["role"], m["content"]) for m in row["messages"])


def facts(row: pd.Series) -> str:
    """Status, step, rewards and lengths in one line."""
    values = {k: row[k] for k in NUMBERS if k != "sample"} | row["rewards"]
    return escape(" · ".join([row["status"], *(f"{k} {v:.4g}" for k, v in values.items() if pd.notna(v))]))


def answer(row: pd.Series) -> str:
    """Thinking and response; with a bad status also all that was written, as the two need not hold all of it."""
    thinking = part("thinking", "thinking", row["thinking"]) if row["thinking"] else ""
    return (
        thinking
        + part("response", "response", row["response"])
        + part("raw", f"as written ({row['status']})", row["text"]) * (row["status"] != "ok")
    )


def cards(rows: pd.DataFrame, with_prompt: bool = True) -> str:
    """Completions, folded; in a notebook: HTML(trace_reader.STYLE + trace_reader.cards(rows))."""
    start = lambda row: f'<br><span class="start" dir="auto">{escape(row["response"][:160])}</span>'
    return "".join(
        fold(f"<b>{escape(row['id'])}</b> {facts(row)}{start(row)}", prompt(row) * with_prompt + answer(row))
        for _, row in rows.iterrows()
    )


def columns(left: str, right: str) -> str:
    return f'<div class="pair"><div>{left}</div><div>{right}</div></div>\n'


def history(rows: pd.DataFrame) -> str:
    """One prompt, and its completions a step at a time."""
    by = "reward" if rows["reward"].notna().any() else "gold"  # held-out ones have no reward
    return prompt(rows.iloc[0]) + "".join(
        fold(f"<b>step {step:.0f}</b> mean {by} {own[by].mean():.4g}", cards(own, False))
        for step, own in rows.groupby("step")
    )


def jump(rows: pd.DataFrame, first_step: float, last_step: float) -> str:
    """The completions of one prompt at two steps."""
    before, after = rows[rows["step"] == first_step], rows[rows["step"] == last_step]
    title = " to ".join(f"{x['reward'].mean():.4g} at step {x['step'].iloc[0]:.0f}" for x in (before, after))
    return fold(
        f"<b>{escape(rows['id'].iloc[0])}</b> {title}",
        prompt(rows.iloc[0]) + columns(cards(before, False), cards(after, False)),
    )


def beside(run_a: str | Path, run_b: str | Path, n: int = 5) -> str:
    """The pairs of `side_by_side`, one below the other."""
    pairs, names = side_by_side(run_a, run_b, n), [escape(Path(run).resolve().name) for run in (run_a, run_b)]
    out = [
        f"<p>{pairs[0].attrs['matched']} pairs have one id, temperature and sample; those that differ most:</p>"
    ]
    for rows in zip(*([row for _, row in side.iterrows()] for side in pairs)):
        values = ((by, [row[by] for row in rows]) for by in ("gold", "reward"))
        title = ", ".join(
            "{} {:.4g} and {:.4g}".format(by, *both) for by, both in values if pd.notna(both).any()
        )
        answers = (f"<p><b>{name}</b> {facts(row)}</p>{answer(row)}" for name, row in zip(names, rows))
        out.append(fold(f"<b>{escape(rows[0]['id'])}</b> {title}", prompt(rows[0]) + columns(*answers)))
    return "".join(out)


def page(run: str | Path, out: str | Path, other: str | Path = "", n: int = 10) -> None:
    """Writes the page of a run to `out`: its n best and worst completions by reward and by gold, one prompt through training
    (`same_prompt`), the n biggest rises and falls; with `other`, both being evaluations, the n pairs that differ most."""
    rows, name = read(run), escape(Path(run).resolve().name)
    sections = {f"Beside {Path(other).resolve().name}": beside(run, other, n)} if other else {}
    for by in ("reward", "gold"):
        if rows[by].notna().any():
            sections |= dict(zip((f"Highest {by}", f"Lowest {by}"), map(cards, best_and_worst(rows, n, by))))
    visited = rows.groupby("id", sort=False)["step"].nunique()
    if (through := same_prompt(run if has_held_out(run) else rows))["step"].nunique() > 1:
        sections["One prompt through training"] = history(through)
    if visited.max() > 1:
        for kind, jumps in zip(("rose", "fell"), biggest_jumps(rows, n)):
            sections[f"Prompts whose reward {kind} most"] = "".join(
                jump(rows[rows["id"] == j.Index], j.first_step, j.last_step) for j in jumps.itertuples()
            )
    sections = sections or {f"The first {n} in the file": cards(rows.head(n))}
    lines = [
        f"{len(rows)} completions of {len(visited)} prompts; {(visited > 1).sum()} prompts were visited at several steps",
        "status: " + ", ".join(f"{k} {v}" for k, v in rows["status"].value_counts().items()),
        *(f"mean {by} {rows[by].mean():.4g}" for by in ("reward", "gold") if rows[by].notna().any()),
        *rows.attrs["notes"],
    ]
    links = "".join(f'<li><a href="#{i}">{escape(title)}</a></li>' for i, title in enumerate(sections))
    bodies = "".join(
        f'<h2 id="{i}">{escape(title)}</h2>{sections[title] or "none"}' for i, title in enumerate(sections)
    )
    text = (
        f"{HEAD}{STYLE}<title>{name}</title></head><body><h1>{name}</h1>"
        f"<p>{'<br>'.join(map(escape, lines))}</p><ul>{links}</ul>{bodies}</body></html>\n"
    )
    Path(out).write_text(text, "utf-8")
