"""AlpacaEval 2: a judge prefers the model's answer or the baseline's; win rates, plain and at equal length.

Win rates are in percent. Those of the official tool have the plain key. Those of the paper end with `_paper`:
binary preferences, length in words, neither instruction difficulty nor gamed baselines.
"""

import hashlib
import math
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import expit

from benchmarks.judge import text_of_verdict
from benchmarks.judge_template import Placeholders
from benchmarks.scoring import (
    count_rows,
    get_field,
    hard_labels,
    load_sibling,
    match_rows,
    mean,
    mean_interval,
    shorten,
)
from rlmt.verdicts import read_object
from utils import fail

KEYS = ("index", "instruction")
PROMPT = "{instruction}"
TEMPLATES = {  # of the judge, by protocol; model m or A gave the first answer
    # asks for one token, whose log-probabilities are read
    "official": "Two models, m and M, were given the same instruction. Which answer would the person who gave it prefer?\n\n"
    "Instruction:\n{$instruction}\n\nAnswer of m:\n{$output_1}\n\nAnswer of M:\n{$output_2}\n\nReply with nothing "
    "but the better model's name, m or M.",
    # asks for a ranking as JSON
    "paper": "Two models, A and B, were given the same instruction. Rank their answers as the person who gave it would.\n\n"
    "Instruction:\n{$instruction}\n\nAnswer of A:\n{$model_output}\n\nAnswer of B:\n{$reference}\n\nReply with nothing but "
    'JSON: {"output": [{"model": "A or B", "rank": 1}, {"model": "the other", "rank": 2}]}',
}
PLACEHOLDERS = {  # the names in the templates of alpaca_eval, and in those of the paper's authors
    "official": Placeholders(("instruction", "output_1", "output_2")),
    "paper": Placeholders(("instruction", "model_output", "reference")),
}
WORDS_KEPT = 2000  # of each text that the judge reads, in the paper
JUDGE_OPTIONS = {
    "official": {"temperature": 1.0, "max_tokens": 1, "logprobs": True, "top_logprobs": 5},
    "paper": {"temperature": 0.0, "max_tokens": 128, "response_format": {"type": "json_object"}},
}
REFITS = 200  # of an interval
LEAST_MASS = 0.5  # of the two labels; a judge that thinks first, or says something else, has less


# --- 1. data


def load_tasks(data: Path) -> list[dict]:
    """Loads the instructions with the baseline's answers; exits with 2 if the gamed baselines lack one."""
    gamed = load_gamed_baselines(data)
    tasks = load_sibling(data, "*baseline.json*", "instruction", "output")
    missing = set(range(len(tasks))) - set(gamed["index"])
    if missing:
        fail(f"--data {data}: the gamed baselines have no answer to instruction {min(missing)}, from 0")
    return tasks


def load_gamed_baselines(data: Path) -> pd.DataFrame:
    """Loads the annotations of the two gamed baselines, which regularise the official fit."""
    rows = load_sibling(data, "*gamed*.csv*", "std_delta_len", "instruction_difficulty", "preference")
    return pd.DataFrame(rows).rename(columns={"instruction_index": "index"})


# --- 2. the judge


def model_side(instruction: str) -> str:
    """Returns which of the judge's answers is the model's, A or B: random, but fixed for an instruction."""
    first_byte = hashlib.sha256(instruction.encode()).digest()[0]
    return "AB"[first_byte % 2]


def judge_template(task: dict, protocol: str) -> str:
    return TEMPLATES[protocol]


def judge_fields(task: dict, answer: str, data: Path, protocol: str) -> dict[str, dict]:
    """Returns what the judge is shown, by the field of the scored row that takes its reply."""
    texts = [task["instruction"], answer, task["output"]]
    if model_side(task["instruction"]) == "B":
        texts = [task["instruction"], task["output"], answer]
    field = "preference"
    if protocol == "paper":
        field = "judge_text"
        texts = [shorten(text, WORDS_KEPT) for text in texts]
    return {field: dict(zip(PLACEHOLDERS[protocol].needed, texts))}


def parse_reply(reply: str | dict, data: Path | None = None) -> str | float:
    """Returns A or B, the first one with rank 1 in the judge's JSON; of a choice with log-probabilities the
    share of A, see `read_chance`. Raises ValueError if there is none.

    As in the paper's code, a rank is whatever int() takes for 1.
    """
    if isinstance(reply, dict):
        return read_chance(reply)
    try:
        for entry in read_object(reply)["output"]:
            if int(entry["rank"]) == 1 and entry["model"] in ("A", "B"):
                return entry["model"]
    except (KeyError, TypeError, OverflowError):
        pass
    raise ValueError(f"no ranking of A and B in {reply[:80]!r}")


def read_chance(choice: dict) -> float:
    """Returns the share of m, that of answer A, of the chances of m and M as the first token.

    Raises ValueError if the judge's reply has no log-probabilities, or gives the two less than LEAST_MASS.
    """
    try:
        top_tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        chances = {top["token"]: math.exp(top["logprob"]) for top in top_tokens}
    except (LookupError, TypeError, OverflowError) as error:
        raise ValueError("no log-probabilities; --protocol paper needs none") from error
    total = chances.get("m", 0.0) + chances.get("M", 0.0)
    if not LEAST_MASS <= total < math.inf:
        raise ValueError(
            f"m and M have a chance of {total:.2g} as the first token; --protocol paper lets a judge write"
        )
    return chances.get("m", 0.0) / total


def judged_fields(task: dict, answer: str, replies: dict, protocol: str) -> dict:
    """Returns the fields of a scored row, from the judge's replies by field."""
    side = model_side(task["instruction"])
    if protocol == "paper":
        return {"output_2": answer, "judge_text": text_of_verdict(replies["judge_text"]), "model_is": side}
    chance = replies["preference"].value
    if chance is not None:
        chance = 1 + (chance if side == "A" else 1 - chance)
    return {"output_2": answer, "preference": chance}


# --- 3. win rates at equal length


def fit_length_control(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns coefficients (F,) of an L1 logistic regression without intercept; soft labels y (N,), x (N, F).

    C is the best of 10 by the weighted log loss in 5-fold cross-validation, as in alpaca_eval's
    length_controlled_v1.
    """
    from sklearn.linear_model import LogisticRegression  # takes a second to import
    from sklearn.metrics import log_loss
    from sklearn.model_selection import GroupKFold

    def fit(c: float, rows):
        model = LogisticRegression(C=c, l1_ratio=1, solver="liblinear", fit_intercept=False, random_state=123)
        return model.fit(*hard_labels(x[rows], y[rows], weight[rows]))

    folds = list(GroupKFold(5).split(x, groups=np.arange(len(y))))
    losses = {}  # by C, the sum over folds
    for c in np.logspace(-4, 4, 10):
        losses[c] = 0.0
        for train, test in folds:
            twice_x, labels, weights = hard_labels(x[test], y[test], weight[test])
            p = fit(c, train).predict_proba(twice_x)
            losses[c] += log_loss(labels, p, normalize=False, sample_weight=weights) / len(test)
    best = min(losses, key=losses.get)
    return fit(best, slice(None)).coef_[0]


def win_rate_at_equal_length(weights: np.ndarray, difficulty: np.ndarray) -> float:
    """Returns the official win rate in percent.

    From the fit's weights (length, difficulty, model) and the difficulties of the instructions (N,).
    """
    return 100 * float(expit(weights[1] * difficulty + weights[2]).mean())


def paper_length_control(wins: np.ndarray, delta_words: np.ndarray) -> float:
    """Returns the paper's win rate in percent at equal length.

    From binary wins (N,) and the differences in words (N,), the model's minus the baseline's.
    """
    from sklearn.linear_model import LogisticRegression

    is_model = np.repeat([1, 0], len(wins))  # every row is used twice, once from either side
    x = np.c_[is_model, 1 - is_model, np.r_[delta_words, -delta_words]]
    fit = LogisticRegression(max_iter=1000).fit(x, np.r_[wins, 1 - wins])
    return 100 * float(expit(fit.intercept_[0] + fit.coef_[0, 0]))


def paper_interval(wins: np.ndarray, delta_words: np.ndarray) -> list[float]:
    """Returns the 95 % percentile interval of `paper_length_control`, by REFITS fits to resampled
    instructions."""
    picks = np.random.default_rng(0).integers(0, len(wins), (REFITS, len(wins)))
    refits = [paper_length_control(wins[pick], delta_words[pick]) for pick in picks]
    return np.percentile(refits, [2.5, 97.5]).tolist()


# --- 4. scores


def row_preference(row: dict, where: str) -> float:
    """Returns a row's preference, 1 (baseline) to 2 (model). Raises ValueError if it has none."""
    if get_field(row, where, "output_2") is None:
        raise ValueError("no output_2")
    if "judge_text" in row:
        model_is = get_field(row, where, "model_is")
        if model_is not in ("A", "B"):
            raise ValueError(f"model_is {model_is}")
        return 1.0 + (parse_reply(row["judge_text"] or "") == model_is)
    preference = get_field(row, where, "preference")
    if preference == 0:  # the official tool's mark of a draw
        return 1.5
    if preference is None or not 1 <= preference <= 2:
        raise ValueError(f"preference {preference}")
    return float(preference)


def score(rows: list[dict], data: Path, source: str) -> dict:
    """Returns win rates in percent by the official tool's rules and the paper's, and the counts."""
    tasks = load_tasks(data)
    gamed = load_gamed_baselines(data)
    results = match_rows(rows, tasks, KEYS, source)

    delta_chars = []  # baseline minus model
    delta_words = []  # model minus baseline
    for row, result in zip(rows, results):
        try:
            result["preference"] = row_preference(row, f"{source}:{result['line']}")
        except ValueError as error:
            result.setdefault("invalid", str(error))
        reference = tasks[result["task"]]["output"]
        answer = row["output_2"] or ""
        delta_chars.append(len(reference) - len(answer))
        delta_words.append(len(answer.split()) - len(reference.split()))

    y = np.array([result.get("preference", np.nan) for result in results]) - 1  # 1: the model wins
    valid = ~np.isnan(y)
    if not valid.any():
        nothing = dict.fromkeys(("win_rate", "lc_win_rate", "win_rate_paper", "lc_win_rate_paper"))
        return nothing | count_rows(results, tasks)
    # unreadable: a loss, as in the paper; the official rates leave it out
    wins = (valid & (y > 0.5)).astype(int)

    difficulty_of_task = gamed.drop_duplicates("index").set_index("index")["instruction_difficulty"]
    difficulty = difficulty_of_task.loc[[result["task"] for result in results]].to_numpy()
    weights = official_weights(gamed, np.array(delta_chars, dtype=float), difficulty, y, valid)
    return {
        "win_rate": 100 * float(y[valid].mean()),
        "win_rate_interval": mean_interval(100 * y[valid]),
        "lc_win_rate": win_rate_at_equal_length(weights, difficulty),
        "discrete_win_rate": 100 * float(np.where(y == 0.5, 0.5, wins)[valid].mean()),
        "win_rate_paper": 100 * float(wins.mean()),
        "lc_win_rate_paper": paper_length_control(wins, np.array(delta_words)),
        "lc_win_rate_paper_interval": paper_interval(wins, np.array(delta_words)),
        "avg_length": mean(len(row["output_2"] or "") for row in rows),
        **count_rows(results, tasks),
    }


def official_weights(
    gamed: pd.DataFrame, delta_chars: np.ndarray, difficulty: np.ndarray, y: np.ndarray, valid: np.ndarray
) -> np.ndarray:
    """Fits the official weights (length, difficulty, model) to the valid rows and the gamed baselines.

    `delta_chars`, `difficulty`, `y` (win, 0 to 1) and `valid` have one entry a row, (N,).
    """
    spread = 1.0
    if np.ptp(delta_chars) > 0:  # several answers, of different lengths
        spread = delta_chars.std(ddof=1)
    x = np.c_[np.tanh(delta_chars / spread), difficulty, np.ones(len(y))][valid]
    n_gamed = len(gamed)
    x_gamed = np.c_[np.tanh(gamed["std_delta_len"]), gamed["instruction_difficulty"], np.zeros(n_gamed)]
    weight_gamed = np.full(n_gamed, 0.2 / 2)  # regularisation of 0.2, shared by two gamed baselines
    return fit_length_control(
        np.r_[x_gamed, x],
        np.r_[gamed["preference"], y[valid]],
        np.r_[weight_gamed, np.ones(len(x))],
    )
