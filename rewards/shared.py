"""What the reward files share: the type of a reward's values, the groups, and the scale of a verifier.

A row is one completion: {"id", "messages", "response", "status", "n_tokens", ...} and the fields of its
prompt's row. The completions of one prompt are neighbours. A reward function returns one value a row. None
means that there is no value, because a field is missing or a judge failed; it is never a low score.
"""

Values = list[float | None]
# The fields of the prompt's row that a reward reads, without which it does not apply; the first one that has
# a value says whether a row is right.
VERIFIERS = {
    "math": "answer",
    "code": "tests",
    "instructions": "instruction_id_list",
    "factual": "reference",
    "rubric": "rubric",
}


def has_field(row: dict, field: str) -> bool:
    """Tells whether a row has a field. None and what is empty are no value: a parquet table has all columns
    in each row."""
    return row.get(field) not in (None, "", [], {})


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
            share = no_eos
        elif share is not None:
            share *= value
        values.append(share)
    return values
