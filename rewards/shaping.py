"""Rewards and advantages that shape others by length or by group: overlong, pass@k."""

from math import comb

from rewards.shared import Values, in_groups


def overlong(rows: list[dict], max_tokens: int, buffer: int = 0) -> Values:
    """Punishes completions that come close to the token limit (DAPO, 2503.14476, equation 13).

    The value is 0 up to `max_tokens - buffer` tokens, falls linearly from there, and is -1 from `max_tokens`
    on. A `buffer` of 0 stands for a quarter of `max_tokens`.
    """
    buffer = buffer or max_tokens // 4
    values = []
    for row in rows:
        tokens_left = max_tokens - buffer - row["n_tokens"]
        values.append(max(-1.0, min(0.0, tokens_left / buffer)))
    return values


def pass_at_k(correct: Values, group_size: int, k: int) -> Values:
    """Computes advantages that maximise pass@k, the chance that one of k samples is right (2508.10751).

    Of the n samples of a group c are right. The chance is rho = 1 - C(n-c, k) / C(n, k), its standard
    deviation sigma = sqrt(rho (1 - rho)). The advantage of a right sample is (1 - rho) / sigma. That of a
    wrong one is (1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / sigma. All are 0 where sigma is 0.

    Args:
        correct: verdicts (P*G,): 1 right, 0 wrong, None unknown. A sample without a verdict is not counted
            and gets None.
        k: from 1 to `group_size`, else ValueError.
    """
    if not 1 <= k <= group_size:
        raise ValueError(f"pass@k needs a k from 1 to the group size {group_size}, not {k}")
    advantages = []
    for group in in_groups(correct, group_size):
        known = [verdict for verdict in group if verdict is not None]
        n = len(known)
        n_wrong = sum(verdict < 1 for verdict in known)
        rho = 1 - comb(n_wrong, k) / comb(n, k) if n >= k else 0.0
        sigma = (rho * (1 - rho)) ** 0.5
        for verdict in group:
            if verdict is None:
                advantages.append(None)
            elif sigma == 0:
                advantages.append(0.0)
            elif verdict >= 1:
                advantages.append((1 - rho) / sigma)
            else:
                others_all_wrong = comb(n_wrong - 1, k - 1) / comb(n - 1, k - 1)
                advantages.append((1 - rho - others_all_wrong) / sigma)
    return advantages
