"""Rewards for the form of a completion: format, length, repetition, overlong."""

from rewards import Values, in_groups


def good_format(rows: list[dict]) -> Values:
    """Returns 1 where the completion follows its think format (status ok), else 0 (R1, 2501.12948)."""
    return [float(row["status"] == "ok") for row in rows]


def length(rows: list[dict], group_size: int) -> Values:
    """Prefers the short completions of a group (Kimi k1.5, 2501.12599, where wrong answers get at most 0).

    The value is 0.5 - (n - shortest) / (longest - shortest) for n tokens: 0.5 to -0.5, and 0 where all have
    the same length. Rows that get a floor are left out and have no value.
    """
    values = []
    for group in in_groups(rows, group_size):
        lengths = [row["n_tokens"] for row in group if not row.get("gets_floor")]
        shortest = min(lengths, default=0)
        spread = max(lengths, default=0) - shortest
        for row in group:
            if row.get("gets_floor"):
                value = None
            elif spread > 0:
                value = 0.5 - (row["n_tokens"] - shortest) / spread
            else:
                value = 0.0
            values.append(value)
    return values


def repetition(rows: list[dict], n: int = 3) -> Values:
    """Returns minus the share of a response's n-grams of words that are repeats: 0 to -1.

    It is TRL's. That of 2502.03373 is a penalty on the tokens of each repeat. A response of fewer than n + 1
    words gets 0.
    """
    values = []
    for row in rows:
        words = row["response"].lower().split()
        ngrams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
        value = 0.0
        if ngrams:
            value = len(set(ngrams)) / len(ngrams) - 1.0
        values.append(value)
    return values


def overlong(rows: list[dict], max_tokens: int, buffer: int = 0) -> Values:
    """Punishes completions that come close to the token limit (DAPO, 2503.14476, equation 13).

    The value is 0 up to `max_tokens - buffer` tokens, falls linearly from there, and is -1 from `max_tokens`
    on. A `buffer` of 0 stands for a quarter of `max_tokens`.
    """
    buffer = buffer or max_tokens // 4
    over = [row["n_tokens"] - (max_tokens - buffer) for row in rows]
    return [-min(1.0, max(0.0, tokens / buffer)) for tokens in over]
