"""Rewards from a judge, a model behind an endpoint: judge_mark, pairwise, rubric, factual.

`write_rubrics` makes the data of `rubric`. A judge that fails or cannot be read gives None, never a low
score. An empty response gets the lowest value without a call, so that it is no way out of a low mark. A row that
gets a floor instead of its reward (`gets_floor`) is judged by nobody and has no value.

A judge that thinks first needs room for it: `judge_max_tokens`, the limit of its reply, is an option of every
reward.
"""

import json
import re
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rlmt.endpoint import Endpoint, Reply, call_timeout, has_no_reply
from rewards.judge_prompts import PROMPTS
from rewards.shared import Values, has_field, in_groups, verified_values

REPLY_TOKENS = 1024  # enough for a judge that does not think first


def judge_endpoint(args, parts: list, run: Path) -> Endpoint:
    """Returns the client of --judge; exits with 2 if it cannot be asked, as without a key.

    A judge that may write a long reply, as one that thinks, gets more time for it.
    """
    longest_reply = max(part.options.get("judge_max_tokens", 0) for part in parts if "judge" in part.asks)
    return Endpoint(
        args.judge,
        run / "judge.jsonl",
        args.judge_url,
        timeout=call_timeout(longest_reply),
        budget=args.budget,
        price=args.price,
        key_env=args.key_env,
    )


# --- 1. what a judge reads


def _between_tags(name: str, text: str) -> str:
    """Puts a text between tags that it cannot close itself."""
    text = re.sub(r"<(?=\s*/?\s*(?:conversation|reference|answer))", "‹", text, flags=re.IGNORECASE)
    return f"<{name}>\n{text}\n</{name}>"


def case(row: dict, with_reference: bool = False, **answers: str) -> str:
    """Returns the conversation, the reference if asked for and there is one, and the answers, as a judge reads them."""
    turns = [f"{message['role'].upper()}: {message['content']}" for message in row["messages"]]
    blocks = [_between_tags("conversation", "\n\n".join(turns))]
    if with_reference and has_field(row, "reference"):
        blocks.append(_between_tags("reference", str(row["reference"])))
    blocks += [_between_tags(name, text) for name, text in answers.items()]
    return "\n\n".join(blocks)


def _is_empty(row: dict) -> bool:
    return not row["response"].strip()


def cases(rows: list[dict], needs: str = "", with_reference: bool = False) -> list[str | None]:
    """Returns the case of each row.

    None where the response is empty, the row gets a floor, or the prompt lacks the field `needs`.
    """
    out = []
    for row in rows:
        lacks_field = needs and not has_field(row, needs)
        if _is_empty(row) or lacks_field or row.get("gets_floor"):
            out.append(None)
        else:
            out.append(case(row, with_reference, answer=row["response"]))
    return out


def _empty_gets(worth: float, rows: list[dict], values: Values, needs: str = "") -> Values:
    """Gives `worth` to every empty response whose prompt has the field `needs`; no judge was asked."""
    out = []
    for row, value in zip(rows, values, strict=True):
        lacks_field = needs and not has_field(row, needs)
        if _is_empty(row) and not lacks_field:
            value = worth
        out.append(value)
    return out


def _fill(prompt: str, texts: dict[str, str]) -> str:
    """Puts texts into a prompt. What a text itself says about {$names} stays as it is."""

    def text_of(match: re.Match) -> str:
        return texts[match[1]]

    return re.sub(r"\{\$(\w+)\}", text_of, PROMPTS[prompt])


def _ask(
    judge: Endpoint,
    prompt: str,
    asked: list[str | None],
    parse=str,
    texts: list[dict[str, str]] | None = None,
    **request,
) -> list[Reply | None]:
    """Asks the judge about the cases. None where there is no case; an `error` where there is no readable reply.

    Args:
        prompt: a key of PROMPTS.
        parse: reads the text of a reply; ValueError where it cannot.
        texts: for each case what else the prompt names, by name.
        request: fields of the request, in place of the usual ones.
    """
    requests = []
    places = []  # of each request, the place of its case
    for place, text in enumerate(asked):
        if text is None:
            continue
        named = {"case": text}
        if texts:
            named |= texts[place]
        message = {"role": "user", "content": _fill(prompt, named)}
        requests.append({"messages": [message], "temperature": 0.0, "max_tokens": REPLY_TOKENS, **request})
        places.append(place)

    found = [None] * len(asked)
    replies = judge.ask(requests, parse, name=prompt)
    for place, reply in zip(places, replies, strict=True):
        found[place] = reply
    return found


def _ask_values(
    judge: Endpoint, prompt: str, asked: list[str | None], parse, texts: list[dict] | None = None, **request
) -> list:
    """Asks as `_ask` does, and returns what `parse` makes of each reply; None where there is none."""
    replies = _ask(judge, prompt, asked, parse, texts, **request)
    return [None if reply is None else reply.value for reply in replies]


# --- 2. what a judge says


def read_json(text: str) -> dict:
    """Reads the one JSON object in a reply, after the thinking of a model that thinks. ValueError without one."""
    _, tag, answer = text.rpartition("</think>")
    found = None
    whole = _from_brace_to_brace(text)
    if tag in whole:  # without thinking the tag is "", or the reply quotes it
        with suppress(ValueError):
            found = json.loads(whole, strict=False)
    if found is None:
        found = json.loads(_from_brace_to_brace(answer), strict=False)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _from_brace_to_brace(text: str) -> str:
    return text[text.find("{") : text.rfind("}") + 1]


def read_choice(found: dict, key: str, options: tuple[str, ...]) -> str:
    """Reads one of the options, whatever its case. ValueError for anything else."""
    choice = str(found.get(key)).strip().lower()
    if choice not in options:
        raise ValueError(f"{key} is {choice[:40]!r}")
    return choice


def read_mark(found: dict) -> float:
    """Reads `mark`, a number from 1 to 10, or a text that is one. ValueError for anything else."""
    mark = found.get("mark")
    number = float(mark) if isinstance(mark, str) else mark
    is_number = isinstance(number, int | float) and not isinstance(mark, bool)
    if not is_number or not 1 <= number <= 10:
        raise ValueError(f"mark is {str(mark)[:40]!r}")
    return float(number)


# --- 3. the rewards


def factual(
    rows: list[dict],
    judge: Endpoint,
    incorrect: float = 0.0,
    not_attempted: float = 0.0,
    value: float = 1.0,
    no_eos: float | None = None,
    judge_max_tokens: int = REPLY_TOKENS,
) -> Values:
    """Asks whether the response says what `reference` says, with SimpleQA's three verdicts.

    Returns `value` times 1 (correct), `incorrect` or `not_attempted`; an empty response counts as not
    attempted. Rows need `reference`. `value` and `no_eos`: see shared.verified_values.
    """
    worth = {"correct": 1.0, "incorrect": incorrect, "not_attempted": not_attempted}

    def read_verdict(text: str) -> float:
        return worth[read_choice(read_json(text), "verdict", tuple(worth))]

    asked = cases(rows, "reference", with_reference=True)
    shares = _ask_values(judge, "factual", asked, read_verdict, max_tokens=judge_max_tokens)
    shares = _empty_gets(not_attempted, rows, shares, "reference")
    return verified_values(rows, shares, value, no_eos)


def judge_mark(rows: list[dict], judge: Endpoint, judge_max_tokens: int = REPLY_TOKENS) -> Values:
    """Returns the judge's mark (1 to 10) divided by 10 (Olmo 3, 2512.13961); 0 for an empty response.

    The judge sees `reference` where the row has one.
    """

    def read_share(text: str) -> float:
        return read_mark(read_json(text)) / 10

    asked = cases(rows, with_reference=True)
    values = _ask_values(judge, "mark", asked, read_share, max_tokens=judge_max_tokens)
    return _empty_gets(0.0, rows, values)


def pairwise(
    rows: list[dict],
    judge: Endpoint,
    group_size: int,
    opponents: int = 0,
    against: Literal["group", "reference"] = "group",
    judge_max_tokens: int = REPLY_TOKENS,
) -> Values:
    """Returns the share of games that an answer wins, 0 to 1; a tie is half a win.

    Each pair plays in both orders: 1/k sum_j (win_AB(i, j) + win_BA(i, j)) / 2. An empty answer loses to any
    other without a call. None: there is no opponent, or a verdict is missing. An answer that gets a floor plays no
    game; the only one of its group that gets none has won.

    Args:
        opponents: k, the next answers of the row's group in a circle; 0: all others (2603.12246).
        against: play the answers of the group, or the row's `reference` (2602.01511).
    """
    results = [[] for _ in rows]  # of each row's games: 1 won, 0 lost, 0.5 a tie, None without a verdict
    asked = []
    players = []  # of each case that is asked: the row, and which of the two answers is its
    for n, others in enumerate(_opponents(rows, group_size, opponents, against)):
        own = rows[n]["response"]
        for other in others:
            if not own.strip() or not other.strip():
                result = _result_without_a_call(own, other)
                results[n] += [result, result]  # in both orders
                continue
            asked.append(case(rows[n], answer_a=own, answer_b=other))
            players.append((n, "a"))
            asked.append(case(rows[n], answer_a=other, answer_b=own))
            players.append((n, "b"))

    def read_winner(text: str) -> str:
        return read_choice(read_json(text), "better", ("a", "b", "tie"))

    winners = _ask_values(judge, "pair", asked, read_winner, max_tokens=judge_max_tokens)
    for (n, side), winner in zip(players, winners, strict=True):
        if winner is None:
            results[n].append(None)
        elif winner == "tie":
            results[n].append(0.5)
        else:
            results[n].append(float(winner == side))

    values = []
    for games in results:
        if not games or None in games:
            values.append(None)
        else:
            values.append(sum(games) / len(games))
    return values


def _result_without_a_call(own: str, other: str) -> float:
    """Returns 1, 0 or a tie's 0.5 of two answers, at least one of which is empty."""
    if own.strip():
        return 1.0
    if other.strip():
        return 0.0
    return 0.5


def _opponents(rows: list[dict], group_size: int, opponents: int, against: str) -> list[list[str]]:
    """Returns the answers that each row plays; see `pairwise`."""
    out = []
    for group in in_groups(rows, group_size):
        for place, row in enumerate(group):
            if row.get("gets_floor"):
                out.append([])
                continue
            if against == "reference":
                references = []
                if has_field(row, "reference"):
                    references.append(str(row["reference"]))
                out.append(references)
                continue
            circle = group[place + 1 :] + group[:place]
            answers = [other["response"] for other in circle if not other.get("gets_floor")]
            if circle and not answers:
                answers = [""]  # it wins without a call, so that it does better than those that get the floor
            if opponents:
                answers = answers[:opponents]
            out.append(answers)
    return out


# --- 4. rubrics


def read_rubric(row: dict) -> list[tuple[str, float, bool]]:
    """Returns (criterion, weight, veto) of the row's rubric. ValueError where it is not a rubric."""
    criteria = []
    try:
        for criterion in row["rubric"]:
            text = str(criterion["criterion"])
            weight = float(criterion["weight"])
            veto = bool(criterion.get("veto"))
            criteria.append((text, weight, veto))
        weights = [weight for _, weight, _ in criteria]
        if min(weights) >= 0 and 0 < sum(weights) < float("inf"):
            return criteria
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        pass
    raise ValueError(
        f"row {row['id']}: the rubric must be a list of {{criterion, weight[, veto]}} with weights of 0 or "
        f"more, not all 0 (turn a negative one into its opposite): {json.dumps(row['rubric'])[:80]}"
    )


def rubric(rows: list[dict], judge: Endpoint, judge_max_tokens: int = REPLY_TOKENS) -> Values:
    """Returns the weighted share of the criteria that are met, sum_j w_j c_j / sum_j w_j (RaR, 2507.17746).

    The judge says yes or no to all criteria in one call. The reward is 0 if a criterion with "veto" is not
    met, and for an empty response. Rows need `rubric`, a list of {criterion, weight[, veto]}.
    """
    rubrics = [read_rubric(row) if has_field(row, "rubric") else [] for row in rows]
    texts = [{"rubric": _numbered(criteria)} for criteria in rubrics]
    asked = cases(rows, "rubric")
    answers = _ask_about_criteria(judge, asked, rubrics, texts, judge_max_tokens)
    return _empty_gets(0.0, rows, list(map(_share_met, answers, rubrics)), "rubric")


rubric.read_field = read_rubric  # rewards.check tries it on every prompt


def _numbered(criteria: list[tuple[str, float, bool]]) -> str:
    lines = []
    for number, (criterion, weight, veto) in enumerate(criteria, 1):
        mandatory = ", mandatory" if veto else ""
        lines.append(f"{number}. {criterion} (weight {weight:g}{mandatory})")
    return "\n".join(lines)


def _ask_about_criteria(
    judge: Endpoint,
    asked: list[str | None],
    rubrics: list[list],
    texts: list[dict[str, str]],
    judge_max_tokens: int,
) -> list[list[bool] | None]:
    """Returns for each case which criteria are met; None where there is no case or no whole answer.

    An endpoint reads all replies to a call in one way, so all cases go out at once and are read as JSON. Those
    whose reply leaves a criterion out are asked again, together with others of as many criteria.
    """
    replies = _ask_values(judge, "rubric", asked, read_json, texts, max_tokens=judge_max_tokens)
    answers = []
    incomplete = defaultdict(list)  # by the number of criteria: the places of cases
    for place, (found, criteria) in enumerate(zip(replies, rubrics, strict=True)):
        answer = None
        if found is not None:
            try:
                answer = _read_criteria(found, len(criteria))
            except ValueError:
                incomplete[len(criteria)].append(place)
        answers.append(answer)

    for n_criteria, places in incomplete.items():

        def read_whole(text: str, n_criteria: int = n_criteria) -> list[bool]:
            return _read_criteria(read_json(text), n_criteria)

        some = [text if place in places else None for place, text in enumerate(asked)]
        # the first reply is stored, is read again, and counts as unreadable this time
        whole = _ask_values(judge, "rubric", some, read_whole, texts, max_tokens=judge_max_tokens)
        for place in places:
            answers[place] = whole[place]
    return answers


def _is_met(found: dict, key: str) -> bool:
    return read_choice(found, key, ("yes", "no")) == "yes"


def _read_criteria(found: dict, n_criteria: int) -> list[bool]:
    """Reads yes or no for every criterion, by its number. ValueError if one is missing."""
    return [_is_met(found, str(number)) for number in range(1, n_criteria + 1)]


def _share_met(answer: list[bool] | None, criteria: list[tuple[str, float, bool]]) -> float | None:
    """Returns the weighted share of the criteria that are met; 0 if one with a veto is not."""
    if answer is None:
        return None
    earned = 0.0
    total = 0.0
    vetoed = False
    for met, (_, weight, veto) in zip(answer, criteria, strict=True):
        total += weight
        if met:
            earned += weight
        elif veto:
            vetoed = True
    return 0.0 if vetoed else earned / total


# weights of RaR, 2507.17746
IMPORTANCE = {"essential": 1.0, "important": 0.7, "optional": 0.3, "pitfall": 0.8}


def write_rubrics(rows: list[dict], judge: Endpoint, max_tokens: int = 4096) -> list[list[dict] | None]:
    """Has the judge write a rubric, [{criterion, weight}], for each {messages, reference} (RaR, section 3).

    7 to 20 criteria, with the weights of IMPORTANCE. None where the prompt has no reference or the rubric
    cannot be read. Raises ConnectionError if calls got no reply, as in an outage.

    Args:
        max_tokens: limit of a reply.
    """

    def read_reply(text: str) -> list[dict]:
        found = read_json(text).get("criteria")
        if not isinstance(found, list) or not 7 <= len(found) <= 20:
            raise ValueError("no list of 7 to 20 criteria")
        criteria = []
        for item in found:
            if not isinstance(item, dict) or not isinstance(item.get("criterion"), str):
                raise ValueError("a criterion is not an object with a text")
            if not item["criterion"].strip():
                raise ValueError("a criterion is empty")
            importance = read_choice(item, "importance", tuple(IMPORTANCE))
            criteria.append({"criterion": item["criterion"], "weight": IMPORTANCE[importance]})
        return criteria

    asked = [case(row, with_reference=True) if has_field(row, "reference") else None for row in rows]
    replies = _ask(judge, "write", asked, read_reply, max_tokens=max_tokens)
    errors = [reply.error for reply in replies if reply is not None]
    unanswered = [error for error in errors if has_no_reply(error)]
    if unanswered:
        raise ConnectionError(
            f"{len(unanswered)} of {len(errors)} rubrics got no reply, so no file is written; the same command asks "
            f"again for these alone. The first: {unanswered[0]}"
        )
    return [None if reply is None else reply.value for reply in replies]
