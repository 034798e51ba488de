"""What the reward files share: the type of a reward's values, the groups, and the scale of a verifier.

A row is one completion: {"id", "messages", "response", "status", "n_tokens", ...} and the fields of its
prompt's row. The completions of one prompt are neighbours. A reward function returns one value a row. None
means that there is no value, because a field is missing or a judge failed; it is never a low score.
"""

Values = list[float | None]
# VERIFIERS say right or wrong; `verdict` of rewards/__init__.py asks them in this order.
VERIFIERS = {
    "math": "answer",
    "code": "tests",
    "instructions": "instruction_id_list",
    "factual": "reference",
    "rubric": "rubric",
}
# FIELDS: every reward that needs a field of the prompt's row, and so does not apply where it is missing.
FIELDS = VERIFIERS | {"bleu": "references"}


def fields_of(options: dict[str, dict]) -> dict[str, str]:
    """Returns FIELDS, with those rewards that need a field by their options: {reward: {option: value}}."""
    if options.get("pairwise", {}).get("against") == "reference":
        return FIELDS | {"pairwise": "reference"}
    return FIELDS


def has_field(row: dict, field: str) -> bool:
    """Tells whether a row has a field. None and what is empty are no value: a parquet table has all columns in each row."""
    value = row.get(field)
    if isinstance(value, str | list | dict):
        return bool(value)
    return value is not None


def in_groups(items: list, group_size: int) -> list[list]:
    """Splits the items of a step into groups of `group_size` neighbours. ValueError if some are left over."""
    if len(items) % group_size:
        raise ValueError(f"{len(items)} rows cannot be split into groups of {group_size}")
    return [items[start : start + group_size] for start in range(0, len(items), group_size)]


def verified_values(rows: list[dict], shares: Values, value: float, no_eos: float | None) -> Values:
    """Scales the share (0 to 1) of a row that is right, as Tülu 3 does (2411.15124, section 6).

    Args:
        value: reward of a share of 1 (Tülu 3: 10).
        no_eos: reward of a completion that did not end by itself (Tülu 3: -10). None: it is treated like any
            other.
    """
    values = []
    for row, share in zip(rows, shares, strict=True):
        cut_off = row["status"] == "truncated" or row.get("cut_off")
        if cut_off and no_eos is not None:
            values.append(no_eos)
        elif share is None:
            values.append(None)
        else:
            values.append(value * share)
    return values
