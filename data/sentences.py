"""Sentences that people have rated: tasks of real text, whose truth is what many readers felt.

A user quotes five people, and asks how many of them liked it, who is warmest, who is coldest, and for their
order. The answer begins with the verdict. A model that thinks first writes a mark for each sentence, from -4
(cold) to +4 (warm), and then the order. A mark above 0 means that the writer liked it.

    python -m data.sentences        # writes data/sentences/films_*.jsonl, see data/README.md

The sentences of film reviews, shop reviews and editorials, with 15 to 29 ratings each, are in the source
distribution of vaderSentiment (MIT; Hutto and Gilbert, ICWSM 2014), which pip downloads. The teacher's mark
is the mean of five ratings, that of the gold measure the mean of all. It is not known which ratings of two
sentences one person gave.
"""

import functools
import itertools
import json
import random
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import tyro

from data.toy.files import ToyArgs, hash_below, user_turn
from utils import fail

DOWNLOAD = "pip download -q --no-deps --no-binary :all: --dest data/sentences vaderSentiment==3.3.2"
ARCHIVE = Path("data/sentences/vaderSentiment-3.3.2.tar.gz")
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
KINDS = {"films": "movieReview", "shop": "amazonReview", "editorials": "nytEditorial"}  # and how files begin
# Percentiles of all sentences. A sentence belongs to one split whatever the seed.
SPLITS = {"sft": range(54), "rl": range(54, 64), "reward": range(64, 88), "test": range(88, 100)}

LETTERS = "ABCDE"  # with more of them the task is harder
SINGLE = "A: {}\nHow warm is it, from -4 to +4?"
TASK = "{}\nHow many of them liked it? Who is warmest, and who is coldest? Then order them from warm to cold."
# What an answer states: number, warmest, coldest, order. The first statement counts, wherever it stands.
FACTS = [r"(\d) liked", "([A-Z]) is warmest", "([A-Z]) is coldest", "cold: ([A-Z, ]+)"]
NEAR = 0.5 + 1e-9  # so far from the warmest mark, a sentence may be called the warmest, too


# --- 1. the ratings


@functools.cache
def load_ratings() -> dict[str, tuple]:
    """Returns {sentence: (kind, ratings)}."""
    found = {}
    with tarfile.open(ARCHIVE) as outer, tarfile.open(fileobj=outer.extractfile(INNER)) as inner:
        for kind, start in KINDS.items():
            rows = {}  # sentence and ratings, by id
            for name in ("GroundTruth", "anonDataRatings"):
                for line in inner.extractfile(f"hutto_ICWSM_2014/{start}Snippets_{name}.txt"):
                    row_id, *_, last = line.decode("utf-8-sig").split("\t")
                    rows.setdefault(row_id, []).append(" ".join(last.split()))
            for text, ratings in rows.values():
                found[text] = kind, json.loads(ratings)
    return found


def read_prompt(text: str) -> dict[str, list[int]]:
    """Returns the ratings of each letter's sentence; raises KeyError if nobody has rated it."""
    return {letter: load_ratings()[sentence][1] for letter, sentence in re.findall("([A-Z]): (.+)\n", text)}


# --- 2. gold


def agreement(marks: dict, response: str) -> dict[str, float]:
    """Returns how far each part of a response agrees with the marks, 0 to 1; 0 for a part that is not there.

    `order` is (1 + Kendall's tau) / 2: the share of pairs in the right order, of those with different marks.
    """
    count, warmest, coldest, order = [(re.findall(fact, response) or [""])[0] for fact in FACTS]
    right = []
    for a, b in itertools.combinations(marks, 2):
        if marks[a] != marks[b]:
            right.append((order.find(b) - order.find(a)) * (marks[a] - marks[b]) > 0)
    return {
        "count": max(0, 1 - abs(int(count or 99) - count_liked(marks)) / len(marks)),
        "warmest": marks.get(warmest, -9) >= max(marks.values()) - NEAR,
        "coldest": marks.get(coldest, 9) <= min(marks.values()) + NEAR,
        "order": sum(right) / max(1, len(right)),
    }


def count_liked(marks: dict) -> int:
    return sum(mark > 0 for mark in marks.values())


def judge(messages: list[dict], response: str) -> dict:
    """Returns the gold score, and which parts are all right, for `--judge data/sentences.py:judge`."""
    people = read_prompt(messages[-1]["content"])
    parts = agreement({letter: fmean(people[letter]) for letter in people}, response)
    return {"score": fmean(parts.values()), "checks": {name: parts[name] == 1 for name in parts}}


def gold(messages: list[dict], response: str) -> float:
    """Returns the score of `judge`, for `--gold data/sentences.py:gold`."""
    return judge(messages, response)["score"]


# --- 3. answers


def write_answer(marks: dict) -> tuple[str, str, str]:
    """Writes the thinking, and the verdict and the order of the response."""
    notes = " ".join(f"{letter} {mark:+.1f}." for letter, mark in marks.items())
    letters = sorted(marks, key=marks.get, reverse=True)
    order = ", ".join(letters)
    verdict = f"{count_liked(marks)} liked it, {letters[0]} is warmest and {letters[-1]} is coldest."
    return f"{notes} So {order}.", verdict, f"From warm to cold: {order}."


def write_pair(people: dict, rng: random.Random) -> dict[str, str]:
    """Writes two drafts; the chosen one agrees more with one rating of each sentence."""
    drafts = {}
    while len(drafts) < 2:  # ratings may decide nothing: then others are drawn
        one = {letter: rng.choice(people[letter]) for letter in people}
        answers = []
        for care in rng.choices(range(20), k=2):
            marks = {}
            for letter in people:  # with less care, more sentences are taken for any other
                marks[letter] = fmean(rng.sample(people[rng.choice(letter * care + LETTERS)], 5))
            answers.append(write_answer(marks))
        drafts = {}
        for thinking, _, order in answers:
            response = f"{rng.choice(answers)[1]} {order}"  # half of the verdicts are the other writer's
            drafts[fmean(agreement(one, response).values())] = thinking, response
    (_, rejected), (_, chosen) = sorted(drafts.items())
    return {
        "chosen_thinking": chosen[0],
        "chosen": chosen[1],
        "rejected_thinking": rejected[0],
        "rejected": rejected[1],
    }


# --- 4. files


@dataclass
class Args(ToyArgs):
    out: Path = ARCHIVE.parent
    """Folder for the files; an existing file is replaced only by an equal one."""
    kind: Literal[*KINDS] = "films"
    """Films are to train on and to hold out, the others only for transfer."""


def write_files(args: Args) -> dict[str, list[dict]]:
    """Returns the rows of every file by its name without `.jsonl`: of each split as many single sentences as
    tasks. A task has the fields of a prompt, a trace and a pair; what it is for, its split says.
    """
    rng = random.Random(args.seed)
    files = {}
    for split, percentiles in SPLITS.items():
        texts = []
        for text, (kind, _) in load_ratings().items():
            if kind == args.kind and hash_below(100, text) in percentiles:
                texts.append(text)
        singles, tasks = [], []
        for text in texts:
            prompt = TASK.format("\n".join(map(": ".join, zip(LETTERS, rng.sample(texts, len(LETTERS))))))
            people = read_prompt(prompt)
            marks = {letter: fmean(rng.sample(people[letter], 5)) for letter in people}
            thinking, verdict, order = write_answer(marks)
            row = {"messages": user_turn(prompt), "thinking": thinking, "response": f"{verdict} {order}"}
            tasks.append(row | write_pair(people, rng))
            response = f"A {fmean(rng.sample(load_ratings()[text][1], 5)):+.1f}."
            singles.append({"messages": user_turn(SINGLE.format(text)), "response": response})
        files |= {f"{args.kind}_{split}_single": singles, f"{args.kind}_{split}": tasks}
    return files


if __name__ == "__main__":
    args = tyro.cli(Args)
    if not ARCHIVE.exists() and subprocess.run([sys.executable, "-m", *DOWNLOAD.split()]).returncode:
        fail(f"where there is a network run {DOWNLOAD}")
    args.save(write_files(args))
