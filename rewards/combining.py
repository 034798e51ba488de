"""How several rewards become one: `combine`, and the rules that a reward can have in --rewards."""

import statistics
from math import isfinite

from rewards.shared import FIELDS, VERIFIERS, Values, has_field, in_groups

RULES = ("weight", "veto", "soft", "gate")  # in the order in which they act


def combine(
    parts: dict[str, Values],
    spec: list[tuple[str, float | str]],
    rows: list[dict],
    group_size: int,
    normalise: str = "none",
    margin: float = 1.0,
    fields: dict[str, str] = FIELDS,
) -> tuple[Values, dict[str, Values]]:
    """Returns one total a row, and what each part contributes to it. Contributions add up to the total.

    The rules act in this order:
    - weight: adds weight * value. With `normalise` every part is standardised first, within its `group` or
      the whole `batch` (GDPO, 2601.05242).
    - veto: a positive sum becomes 0 where the part is 0 or below.
    - soft: adds the value as it is. It is for length penalties, which keep their scale.
    - gate: where the part is below 1, the total becomes the lowest total of the group's rows that pass all
      gates (0 if none does) minus `margin`, whatever else the row has or lacks.

    A part does not apply to a row whose prompt lacks its field; it adds 0 there and stops nothing. The total
    is None where a part that applies has no value, or where no part with a weight applies. A row that gets a floor
    (`gets_floor`) has no values, so that it counts in no mean, standard deviation or lowest total of the others.

    Args:
        parts: value of each reward, by name.
        spec: (name, weight or rule) of each reward, from parse_spec.
        fields: the field that a reward needs, by its name, from shared.fields_of.
    """
    standardised_over = {"group": group_size, "batch": len(rows)}  # rows
    applies = {}
    values = {}
    for name, rule in spec:
        applies[name] = _applies(name, parts, rows, fields)
        values[name] = _values_where_it_applies(name, parts[name], applies[name], rows)
        if _kind(rule) == "weight" and normalise != "none":
            values[name] = _standardised(values[name], standardised_over[normalise])

    in_order = sorted(spec, key=_place_in_rules)
    contributions = {name: [] for name, _ in in_order}
    totals = []
    for i in range(len(rows)):
        total = 0.0
        has_weight = False
        lacks_value = False
        for name, rule in in_order:
            contribution = _contribution(rule, values[name][i], applies[name][i], total)
            contributions[name].append(contribution)
            if contribution is None:
                lacks_value = True
            else:
                total += contribution
            if _kind(rule) == "weight" and applies[name][i]:
                has_weight = True
        if not has_weight or lacks_value:
            total = None
        totals.append(total)

    gates = [name for name, rule in spec if rule == "gate"]
    _close_gates(gates, values, totals, contributions, group_size, margin)
    return totals, contributions


def _kind(rule: float | str) -> str:
    if isinstance(rule, str):
        return rule
    return "weight"


def _place_in_rules(part: tuple[str, float | str]) -> int:
    """Returns the place of a part of `spec` in the order in which the rules act."""
    _, rule = part
    return RULES.index(_kind(rule))


def _applies(name: str, parts: dict[str, Values], rows: list[dict], fields: dict[str, str]) -> list[bool]:
    """Tells for each row whether a reward applies: the prompt has the field that the reward reads.

    Cosine reads the verifiers' verdict, so it applies where one of them does.
    """
    if name == "cosine":
        read = [VERIFIERS[part] for part in parts if part in VERIFIERS]
    elif name in fields:
        read = [fields[name]]
    else:
        return [True] * len(rows)
    return [any(has_field(row, field) for field in read) for row in rows]


def _values_where_it_applies(name: str, part: Values, applies: list[bool], rows: list[dict]) -> Values:
    """Returns the values of a reward, None where it does not apply or a floor counts; ValueError if one is not finite."""
    values = []
    for row, value, applied in zip(rows, part, applies, strict=True):
        if value is not None and not isfinite(value):
            raise ValueError(
                f"reward {name} is {value} for row {row['id']}; it must be finite, or None for no value"
            )
        if not applied or row.get("gets_floor"):
            value = None
        values.append(value)
    return values


def _standardised(values: Values, size: int) -> Values:
    """Returns (value - mean) / std of each `size` neighbours; 0 where all are equal, or where there is one value.

    The std has n - 1, as in TRL.
    """
    out = []
    for group in in_groups(values, size):
        known = [value for value in group if value is not None]
        mean = 0.0
        std = 0.0
        if len(known) > 1:
            mean = statistics.fmean(known)
            std = statistics.stdev(known)
        for value in group:
            if value is None:
                out.append(None)
            elif std > 1e-8:
                out.append((value - mean) / std)
            else:
                out.append(0.0)
    return out


def _contribution(rule: float | str, value: float | None, applies: bool, total: float) -> float | None:
    """Returns what a reward adds to the `total` of the rewards before it; None where it has no value."""
    if not applies:
        return 0.0
    if value is None:
        return None
    if rule == "veto" and value <= 0 < total:
        return -total
    if rule in ("veto", "gate"):  # a gate acts on whole groups, see _close_gates
        return 0.0
    if rule == "soft":
        return value
    return rule * value


def _close_gates(
    gates: list[str],
    values: dict[str, Values],
    totals: Values,
    contributions: dict[str, Values],
    group_size: int,
    margin: float,
) -> None:
    """Puts the rows that fail a gate below the others of their group, in place.

    The first gate that a row fails contributes the difference.
    """
    for group in in_groups(list(range(len(totals))), group_size):
        failed = {i: _failed_gate(i, gates, values) for i in group}
        passing = [totals[i] for i in group if totals[i] is not None and not failed[i]]
        floor = min(passing, default=0.0) - margin
        for i in group:
            if not failed[i]:
                continue
            others = 0.0
            for column in contributions.values():
                column[i] = column[i] or 0.0
                others += column[i]
            contributions[failed[i]][i] = floor - others
            totals[i] = sum(column[i] for column in contributions.values())


def _failed_gate(i: int, gates: list[str], values: dict[str, Values]) -> str:
    """Returns the first gate that row i fails, or ""."""
    for name in gates:
        value = values[name][i]
        if value is not None and value < 1:
            return name
    return ""
