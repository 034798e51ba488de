"""BLEU against reference answers as a reward (BLEUBERI, arXiv 2505.11080).

The formula is that of BLEUBERI's released code, evaluate's `bleu` with smooth=True. For n from 1 to 4, a response
has t_n n-grams, and c_n of them are in a reference too:

    precision   p_n = (c_n + 1) / (t_n + 1)
    brevity     b = exp(min(0, 1 - length of the shortest reference / length of the response))
    BLEU        b * (p_1 * p_2 * p_3 * p_4) ** (1/4), from 0 to 1

sacrebleu splits the texts into words (13a, that of mteval-v13a.pl) and counts. Its own sentence score differs: it
goes to 100, smooths in other ways, and takes the length of the closest reference.
"""

import math

import sacrebleu

from rewards.shared import Values, has_field

METRIC = sacrebleu.BLEU(tokenize="13a", effective_order=True)  # effective_order: no warning about short texts


def bleu(rows: list[dict]) -> Values:
    """Compares the response with the row's `references`: a list of texts, or {name: text}."""
    values = []
    for row in rows:
        if has_field(row, "references"):
            values.append(score(row["response"], read_references(row)))
        else:
            values.append(None)
    return values


def read_references(row: dict) -> list[str]:
    """Returns the row's reference answers. ValueError where they are not texts."""
    references = row["references"]
    if isinstance(references, dict):
        references = list(references.values())
    is_list_of_texts = isinstance(references, list) and all(isinstance(text, str) for text in references)
    if not is_list_of_texts:
        raise ValueError(
            f"row {row['id']}: `references` must be a list of texts, or {{name: text}}, not {str(references)[:80]!r}"
        )
    return references


bleu.read_field = read_references  # rewards.check tries it on every prompt


def score(response: str, references: list[str]) -> float:
    """Returns BLEU, from 0 to 1. An empty response has 0."""
    counted = METRIC.sentence_score(response, references)
    if counted.sys_len == 0:
        return 0.0

    pairs = zip(counted.counts, counted.totals, strict=True)  # of n-grams: common, all
    precisions = [(n_common + 1) / (n_all + 1) for n_common, n_all in pairs]
    shortest = min(len(METRIC.tokenizer(reference).split()) for reference in references)
    brevity = math.exp(min(0.0, 1 - shortest / counted.sys_len))
    return brevity * math.prod(precisions) ** (1 / len(precisions))
