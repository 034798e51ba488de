"""data/sentences.py: gold by hand, and the rows of a tiny archive and of the published one."""

import io
import re
import subprocess
import sys
import tarfile
from statistics import fmean

import pytest

from data import sentences
from data.sentences import Args, agreement, gold, write_files
from data.toy.files import user_turn
from rlmt.data import read_pairs, read_prompts, read_traces, to_jsonl

MARKS = {"A": 2.0, "B": -1.0, "C": 2.4, "D": 0.0, "E": -1.5}
RIGHT = "2 liked it, C is warmest and E is coldest. From warm to cold: C, A, D, B, E."


@pytest.mark.parametrize(
    "response, parts",  # count, warmest, coldest, order
    [
        (RIGHT, (1, 1, 1, 1)),
        (RIGHT.replace("2 liked", "4 liked"), (0.6, 1, 1, 1)),
        (RIGHT.replace("2 liked", "9 liked"), (0, 1, 1, 1)),
        (RIGHT.replace("C is w", "A is w").replace("E is c", "B is c"), (1, 1, 1, 1)),  # within half a mark
        (RIGHT.replace("C is w", "D is w").replace("E is c", "D is c"), (1, 0, 0, 1)),
        (RIGHT.replace("C, A, D", "D, A, C"), (1, 1, 1, 0.7)),  # 3 of 10 pairs
        (RIGHT.replace("C, A, D, B, E", "E, B, D, A, C"), (1, 1, 1, 0)),
        (RIGHT.replace("liked it, C is", "liked it; the warmest is C,"), (1, 0, 1, 1)),
        (f"{RIGHT} 3 liked it, A is warmest.", (1, 1, 1, 1)),
        ("From warm to cold: C, A.", (0, 0, 0, 0.1)),  # one pair
        ("F is warmest and G is coldest. From warm to cold: F, G.", (0, 0, 0, 0)),
        ("", (0, 0, 0, 0)),
    ],
)
def test_gold_by_hand(response, parts):
    assert tuple(agreement(MARKS, response).values()) == pytest.approx(parts)


def tiny_archive() -> bytes:
    """The layout of vaderSentiment's source distribution: 300 sentences of each kind with 16 ratings."""

    def pack(files: dict[str, bytes]) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return packed.getvalue()

    files = {}
    for kind, start in sentences.KINDS.items():
        texts, ratings = [], []
        for i in range(300):
            marks = [max(-4, min(4, i % 9 - 4 + j % 3 - 1)) for j in range(16)]
            texts.append(f"{i}\t0.5\tThe café of {kind}: \u201cB: {i}\u201d  is warm.")
            ratings.insert(0, f"{i}\t0.5\t1.0\t{marks}")  # in an order of its own, as in shop
        for name, rows in (("GroundTruth", texts), ("anonDataRatings", ratings)):
            files[f"hutto_ICWSM_2014/{start}Snippets_{name}.txt"] = ("\ufeff" + "\r\n".join(rows)).encode()
    return pack({sentences.INNER: pack(files)})


def published() -> bytes:
    command = [sys.executable, "-m", *sentences.DOWNLOAD.split(), "--retries", "1"]
    if not sentences.ARCHIVE.exists() and subprocess.run(command).returncode:
        pytest.skip(f"there is no {sentences.ARCHIVE}, and it cannot be downloaded")
    return sentences.ARCHIVE.read_bytes()


@pytest.mark.parametrize("read_archive, n", [(tiny_archive, 300), (published, 10603)])
def test_rows(tmp_path, monkeypatch, read_archive, n):
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(read_archive())
    monkeypatch.setattr(sentences, "ARCHIVE", archive)
    sentences.load_ratings.cache_clear()
    files = write_files(Args())
    assert files == write_files(Args())

    quoted = []
    for split in sentences.SPLITS:
        tasks, singles = files[f"films_{split}"], files[f"films_{split}_single"]
        path = tmp_path / f"{split}.jsonl"
        path.write_text(to_jsonl(tasks))
        assert (
            len(read_prompts(path)) == len(read_traces(path)[0]) == len(read_pairs(path)[0]) == len(singles)
        )
        prompts = "\n".join(row["messages"][0]["content"] for row in tasks + singles)
        quoted.append(set(re.findall("^[A-E]: (.+)$", prompts, re.M)))
        for row in tasks[:100]:
            people = sentences.read_prompt(row["messages"][0]["content"])
            means = {letter: sum(ratings) / len(ratings) for letter, ratings in people.items()}
            _, verdict, order = sentences.write_answer(means)
            assert gold(row["messages"], f"{verdict} {order}") == 1
            notes = dict(re.findall(r"([A-E]) ([+-]\d\.\d)", row["thinking"]))
            assert list(notes) == list(means) and row["thinking"].endswith(row["response"].split(": ")[1])
    assert len(set.union(*quoted)) == sum(map(len, quoted)) == n  # no sentence is in two splits

    def mean_gold(side: str) -> float:
        return fmean(gold(row["messages"], row[side]) for row in files["films_reward"])

    # people agree with one person's choice, and more with five of them
    assert mean_gold("rejected") + 0.05 < mean_gold("chosen") < mean_gold("response")
    with pytest.raises(KeyError):
        gold(user_turn("A: Nobody has rated this.\nHow warm is it?"), RIGHT)
    sentences.load_ratings.cache_clear()
