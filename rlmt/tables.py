"""Reads the rows of tables, folders of `datasets` and data sets on the hub.

rlmt/data.py imports it for these alone, as `datasets` is slow to import.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pandas

from utils import fail


def read_set(place: str, configuration: list[str], split: str, revision: str | None) -> Iterator[dict]:
    """Yields the rows of a table, a folder, or a data set on the hub; `datasets` has a cache for them.

    `configuration` is empty where there is only one.
    """
    if place.endswith(".csv"):
        table = pandas.read_csv(place, dtype=str, keep_default_na=False)  # "NA" is a text too
        splits = {"train": table.to_dict("records")}
    elif place.endswith(".parquet"):
        splits = datasets.load_dataset("parquet", data_files=place)
    elif (Path(place) / "state.json").exists():  # saved without splits
        splits = {"train": datasets.load_from_disk(place)}
    elif (Path(place) / "dataset_dict.json").exists():
        splits = datasets.load_from_disk(place)
    else:
        splits = datasets.load_dataset(place, *configuration, revision=revision)
    if not split:
        split = "test" if "test" in splits else next(iter(splits))
    if split not in splits:
        fail(f"{place}: no split {split!r}; write {place}:SPLIT, with one of {', '.join(splits)}")
    yield from map(_plain, splits[split])


def _plain(row: dict) -> dict:
    """Turns dates and the like into texts, because rows are written to logs as JSON."""
    return json.loads(json.dumps(row, default=str))
