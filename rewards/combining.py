"""How several rewards become one: the rules of `combine`, in the order in which they act."""

import statistics
from math import isfinite

from rewards.shared import FIELDS, Values, in_groups


def combine(
    parts: dict[str, Values],
    spec: list[tuple[str, float | str]],
    rows: list[dict],
    group_size: int,
    normalise: str = "none",
    margin: float = 1.0,
) -> tuple[Values, dict[str, Values]]:
    """Returns one total a row, and what each part contributes to it. A row's contributions add up to its
    total.

    The rules act in this order:
    - weight: adds weight * value. With `normalise` every part is standardised first, within its `group` or
      the whole `batch` (GDPO, 2601.05242).
    - veto: a positive sum becomes 0 where the part is 0 or below.
    - soft: adds the value as it is. It is for length penalties, which keep their scale.
    - gate: where the part is below 1, the total becomes `margin` less than the lowest total of the group's
      rows that pass all gates (0 if none does), whatever else the row has or lacks.

    A part does not apply to a row whose prompt lacks its field; it adds 0 there and stops nothing. The total
    is None where a part that applies has no value, or where no part with a weight applies.
    """
    applies = {name: _applies(name, parts, rows) for name, _ in spec}
    contributions = {}
    sums = [0.0] * len(rows)
    order = {"veto": 1, "soft": 2, "gate": 3}  # weights are first
    for name, rule in sorted(spec, key=lambda part: order.get(part[1], 0)):
        _check_finite(name, parts[name], rows)
        column = [value if a else None for value, a in zip(parts[name], applies[name], strict=True)]
        if rule == "veto":
            column = [_vetoed(value, total) for value, total in zip(column, sums)]
        elif rule == "gate":
            column = [None if value is None else 0.0 for value in column]  # acts below, on whole groups
        elif rule != "soft":
            column = [None if v is None else rule * v for v in _normalised(column, normalise, group_size)]
        contributions[name] = [value if a else 0.0 for value, a in zip(column, applies[name])]
        sums = [total + (value or 0.0) for total, value in zip(sums, contributions[name])]

    weighted = [name for name, rule in spec if rule not in order]
    totals = []
    for i in range(len(rows)):
        no_weight = not any(applies[name][i] for name in weighted)
        lacks_value = any(column[i] is None for column in contributions.values())
        totals.append(None if no_weight or lacks_value else _total(contributions, i))

    gates = [name for name, rule in spec if rule == "gate"]
    failed_gates = [_failed_gate(i, gates, parts, applies) for i in range(len(rows))]
    for group in in_groups(list(range(len(rows))), group_size):
        passing = [totals[i] for i in group if totals[i] is not None and not failed_gates[i]]
        floor = min(passing, default=0.0) - margin
        for i in group:
            if failed_gates[i]:
                totals[i] = _set_total(contributions, i, failed_gates[i], floor)
    return totals, contributions


def _applies(name: str, parts: dict[str, Values], rows: list[dict]) -> list[bool]:
    """Whether a reward applies to each row: its prompt has the field that it reads.

    For cosine that is a field that one of the verifiers reads.
    """
    fields = [FIELDS[name]] if name in FIELDS else []
    if name == "cosine":
        fields = [FIELDS[verifier] for verifier in parts if verifier in FIELDS]
    if not fields:
        return [True] * len(rows)
    return [any(row.get(field) is not None for field in fields) for row in rows]


def _check_finite(name: str, values: Values, rows: list[dict]) -> None:
    for row, value in zip(rows, values):
        if value is not None and not isfinite(value):
            raise ValueError(
                f"reward {name} is {value} for row {row['id']}; it must be finite, or None for no value"
            )


def _normalised(column: Values, normalise: str, group_size: int) -> Values:
    if normalise == "none":
        return column
    size = group_size if normalise == "group" else len(column)
    return [value for group in in_groups(column, size) for value in _standardised(group)]


def _standardised(values: Values) -> Values:
    """Returns (value - mean) / std, with n - 1 in the std as in TRL; 0 where all are equal."""
    present = [value for value in values if value is not None]
    mean = statistics.fmean(present) if present else 0.0
    std = statistics.stdev(present) if len(present) > 1 else 0.0
    out = []
    for value in values:
        if value is None:
            out.append(None)
        else:
            out.append((value - mean) / std if std > 1e-8 else 0.0)
    return out


def _vetoed(value: float | None, total: float) -> float | None:
    """Returns what a veto adds to a total."""
    if value is None:
        return None
    return -total if value <= 0 < total else 0.0


def _failed_gate(i: int, gates: list[str], parts: dict[str, Values], applies: dict[str, list[bool]]) -> str:
    """Returns the first gate that row i fails, or ""."""
    for name in gates:
        value = parts[name][i]
        if applies[name][i] and value is not None and value < 1:
            return name
    return ""


def _total(contributions: dict[str, Values], i: int) -> float:
    return sum(column[i] for column in contributions.values())


def _set_total(contributions: dict[str, Values], i: int, name: str, total: float) -> float:
    """Changes the contribution of `name` so that row i has this total, and returns the sum.

    Missing values become 0.
    """
    for column in contributions.values():
        column[i] = column[i] or 0.0
    contributions[name][i] = total - _total(contributions, i)
    return _total(contributions, i)
