"""Rewards from a judge, a model behind an endpoint: judge_mark, rubric, factual. `write_rubrics` makes the
data of `rubric`.

A judge that fails or cannot be read gives None, never a low score. An empty response gets the lowest value
without a call, so that it is no way out of a low mark. A row that gets a floor instead of its reward is
judged by nobody.

A judge that thinks first needs room for it: `judge_max_tokens`, the limit of its reply.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable
from string import Template
from typing import NamedTuple

from rewards import Values, has_field
from rewards.judge_prompts import PROMPTS
from rlmt.endpoint import TWO_LINES, Endpoint, Reply, check_answered, try_endpoint
from rlmt.verdicts import read_object

REPLY_TOKENS = 1024  # enough for a judge that does not think first


# --- 1. what a judge reads


def _between_tags(name: str, text: str) -> str:
    """Puts a text between tags that it cannot close itself."""
    text = re.sub(r"<(?=\s*/?\s*(?:conversation|reference|answer))", "‹", text, flags=re.IGNORECASE)
    return f"<{name}>\n{text}\n</{name}>"


def case(row: dict, *fields: str) -> str:
    """Returns the conversation, and those of the fields reference and response that the row has, as a judge
    reads them."""
    turns = [f"{message['role'].upper()}: {message['content']}" for message in row["messages"]]
    blocks = [_between_tags("conversation", "\n\n".join(turns))]
    for field in fields:
        if has_field(row, field):
            blocks.append(_between_tags(field.replace("response", "answer"), str(row[field])))
    return "\n\n".join(blocks)


def request(prompt: str, max_tokens: int, row: dict, *fields: str, rubric: str = "") -> dict:
    """Fills the case of a row, and a rubric, into a prompt of PROMPTS."""
    # what a text itself says about $names stays as it is
    text = Template(PROMPTS[prompt]).substitute(case=case(row, *fields), rubric=rubric)
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0.0, "max_tokens": max_tokens}


def _ask(
    judge: Endpoint,
    rows: list[dict],
    requests: list[dict],
    parses: list[Callable[[str], object]],
) -> list:
    """Returns what its own of `parses` makes of the reply to each row's request; 0 for an empty response.

    None where the judge failed, or another row gets a floor.
    """
    values = [None] * len(rows)
    asked = []
    for index, row in enumerate(rows):
        if not row["response"].strip():
            values[index] = 0.0
        elif not row.get("gets_floor"):
            asked.append(index)
    replies = judge.ask([requests[index] for index in asked], [parses[index] for index in asked])
    for index, reply in zip(asked, replies, strict=True):
        values[index] = reply.value
    return values


class Trial(NamedTuple):
    """Stands for a judge in a reward: asks the first request only; exits with 2 if its reply cannot be
    read."""

    judge: Endpoint
    flag: str

    def ask(self, requests: list[dict], parse: Callable | list[Callable], **_settings) -> list[Reply]:
        if isinstance(parse, list):
            [parse] = parse
        try_endpoint(self.judge, requests[0], self.flag, parse)
        return [Reply(None, "", "", (0, 0), {})]


def try_judge(judge: Endpoint, ask: Callable, prompt: dict, flag: str) -> None:
    """Has a judged reward ask about an answer of two lines; exits with 2 if no verdict comes.

    `ask` takes rows and the judge, as `judge_mark` does.
    """
    row = {**prompt, "text": TWO_LINES, "response": TWO_LINES, "thinking": "", "status": "ok"}
    row |= {"n_tokens": 16, "n_thinking_tokens": 0, "gets_floor": False}
    ask([row], Trial(judge, flag))


# --- 2. what a judge says


def read_choice(found: dict, key: str, options: tuple[str, ...]) -> str:
    """Reads one of the options, whatever its case. ValueError for anything else."""
    choice = str(found.get(key)).strip().lower()
    if choice not in options:
        raise ValueError(f"{key} is {choice[:40]!r}")
    return choice


def read_mark(found: dict) -> float:
    """Reads `mark`, a number from 1 to 10, or a text that is one. ValueError for anything else."""
    mark = float(str(found.get("mark")))  # of true or a list the text is no number
    if not 1 <= mark <= 10:
        raise ValueError(f"mark is {mark}")
    return mark


# --- 3. the rewards


def judge_mark(rows: list[dict], judge: Endpoint, judge_max_tokens: int = REPLY_TOKENS) -> Values:
    """Returns the judge's mark (1 to 10) divided by 10 (Olmo 3, 2512.13961); 0 for an empty response.

    The judge sees `reference` where the row has one.
    """

    def read_share(text: str) -> float:
        return read_mark(read_object(text)) / 10

    requests = [request("mark", judge_max_tokens, row, "reference", "response") for row in rows]
    return _ask(judge, rows, requests, [read_share] * len(rows))


def factual(rows: list[dict], judge: Endpoint, judge_max_tokens: int = REPLY_TOKENS) -> Values:
    """Asks whether the response says what `reference` says, with SimpleQA's three verdicts.

    Returns 1 for correct, 0 for incorrect, not attempted or an empty response. Rows need `reference`.
    """

    def read_verdict(text: str) -> float:
        verdict = read_choice(read_object(text), "verdict", ("correct", "incorrect", "not_attempted"))
        return float(verdict == "correct")

    requests = [request("factual", judge_max_tokens, row, "reference", "response") for row in rows]
    return _ask(judge, rows, requests, [read_verdict] * len(rows))


def rubric(rows: list[dict], judge: Endpoint, judge_max_tokens: int = REPLY_TOKENS) -> Values:
    """Returns the weighted share of the criteria that are met, sum_j w_j c_j / sum_j w_j (RaR, 2507.17746).

    The judge says yes or no to all criteria in one call. Rows need `rubric`, a list of {criterion, weight}.
    0 for an empty response.
    """

    def read_share(weights: list[float], text: str) -> float:
        found = read_object(text)
        numbers = [str(number) for number in range(1, len(weights) + 1)]
        met = [read_choice(found, number, ("yes", "no")) == "yes" for number in numbers]
        if str(len(weights) + 1) in found:
            raise ValueError(f"more than {len(weights)} criteria")
        return sum(itertools.compress(weights, met)) / sum(weights)

    requests = []
    parses = []
    for row in rows:
        lines = []
        criteria = read_rubric(row)
        for number, (criterion, weight) in enumerate(criteria, 1):
            lines.append(f"{number}. {criterion} (weight {weight:g})")
        requests.append(request("rubric", judge_max_tokens, row, "response", rubric="\n".join(lines)))
        weights = [weight for _, weight in criteria]
        parses.append(functools.partial(read_share, weights))
    return _ask(judge, rows, requests, parses)


def read_rubric(row: dict) -> list[tuple[str, float]]:
    """Returns (criterion, weight) of the row's rubric. ValueError where it is not a rubric."""
    try:
        criteria = [(str(item["criterion"]), float(item["weight"])) for item in row["rubric"]]
        weights = [weight for _, weight in criteria]
        if min(weights) >= 0 and 0 < sum(weights) < float("inf"):
            return criteria
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(
        f"row {row['id']}: the rubric must be a list of {{criterion, weight}} with weights of 0 or more, not all 0 "
        f"(turn a negative one into its opposite): {json.dumps(row['rubric'])[:80]}"
    )


rubric.read_field = read_rubric  # `Scorer.check` tries it on every prompt

# weights of RaR, 2507.17746
IMPORTANCE = {"essential": 1.0, "important": 0.7, "optional": 0.3, "pitfall": 0.8}


def write_rubrics(rows: list[dict], judge: Endpoint, max_tokens: int = 4096) -> list[list[dict] | None]:
    """Has the judge write a rubric, [{criterion, weight}], for each {messages, reference} (RaR, section 3).

    7 to 20 criteria, with the weights of IMPORTANCE. None where the rubric cannot be read. Exits with 2 if
    more than 1 % of the calls got no reply, as in an outage.
    """

    def read_criteria(text: str) -> list[dict]:
        items = read_object(text).get("criteria")
        if not isinstance(items, list) or not 7 <= len(items) <= 20:
            raise ValueError("no list of 7 to 20 criteria")
        criteria = []
        for item in items:
            if not isinstance(item, dict) or not item.get("criterion"):
                raise ValueError("a criterion has no text")
            importance = read_choice(item, "importance", tuple(IMPORTANCE))
            criteria.append({"criterion": str(item["criterion"]), "weight": IMPORTANCE[importance]})
        return criteria

    requests = [request("write", max_tokens, row, "reference") for row in rows]
    replies = judge.ask(requests, read_criteria, name="write")
    check_answered([reply.error for reply in replies], "rubrics", 0.01)
    return [reply.value for reply in replies]
