"""What the reward files share: the type of a reward's values, the fields of verifiers, and the groups.

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
    """Splits the items of a step into groups of `group_size` neighbours."""
    return [items[start : start + group_size] for start in range(0, len(items), group_size)]
