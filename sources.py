"""Reads rows from where users have them: files, folders of data sets, the hub. rows.py knows what they hold.

What cannot be read ends the program with exit code 2 and one line that names the place and the remedy.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import runs  # first: it sets environment variables that the libraries below read  # isort: skip
import pyarrow.parquet

FILE_TYPES = (".parquet", ".jsonl", ".jsonl.gz", ".json")
DAMAGED_FILE = (OSError, EOFError, zlib.error, pyarrow.ArrowException, UnicodeError)
# owner/name, owner/name:split or owner/name:configuration:split
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")

# --- 1. any source


def read_source(name: str, flag: str, revision: str | None = None) -> Iterator[tuple[int, object]]:
    """Yields (number from 1, row) of a file, a folder or a data set on the hub; exits with 2 without one.

    Args:
        name: a path, or the name of a data set. `name:split` is a split of a folder or a data set; without it,
            `train` is read. A data set in several configurations is `owner/name:configuration:split`.
        flag: the one that an error names.
        revision: commit, tag or branch of a data set on the hub; None is the newest.
    """
    if is_local(name):
        yield from read_local(name)
    elif is_hub_name(name):
        hub_name, *parts = name.split(":")
        split = parts.pop() if parts else "train"
        configuration = parts[0] if parts else None
        yield from read_hub(hub_name, configuration, split, revision, flag)
    else:
        runs.fail(f"{flag} {name}: {no_such_file(name)}")


def no_such_file(name: str) -> str:
    """Returns the error for a path where nothing is, with the remedy."""
    if Path(name).parts[:2] == ("data", "toy"):
        return "no such file; python -m data.toy.world writes it"
    return "no such file; data/README.md says how to make it"


def is_local(name: str) -> bool:
    """Tells whether a name is a file or a folder here, or `folder:split`."""
    folder, colon, _ = name.rpartition(":")
    return Path(name).exists() or bool(colon) and Path(folder).is_dir()


def is_hub_name(name: str) -> bool:
    """Tells whether a name that is not local can be a data set on the hub."""
    return HUB_NAME.fullmatch(name) is not None and not name.endswith(FILE_TYPES)


def read_local(name: str) -> Iterator[tuple[int, object]]:
    """Yields (number from 1, row) of a file, of a folder's split `train`, or of `folder:split`."""
    path = Path(name)
    split = ""
    if not path.exists():
        folder, _, split = name.rpartition(":")
        path = Path(folder)
    try:
        if path.is_dir():
            yield from enumerate(_read_folder(path, split), 1)
        else:
            yield from _read_file(path)
    except DAMAGED_FILE as error:
        runs.fail(f"{path}: cannot be read ({str(error) or type(error).__name__})")


# --- 2. files


def _read_file(path: Path) -> Iterator[tuple[int, object]]:
    """Yields the rows with their numbers: the line in a file of JSON lines, else the place in the list."""
    if path.suffix == ".parquet":
        yield from enumerate(_read_parquet(path), 1)
        return
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        is_list = path.suffix == ".json" and file.read(100).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        if is_list:
            yield from enumerate(_parse(file.read(), str(path)), 1)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parse(line, f"{path}:{number}")


def _parse(text: bytes, place: str) -> object:
    """Parses JSON; broken JSON, bytes that are not UTF-8 or too deep a nesting exit with 2."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        runs.fail(f"{place}: not JSON ({error})")


def _read_parquet(path: Path) -> Iterator[dict]:
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            yield _plain(row)


def _plain(row: dict) -> dict:
    """Turns dates and the like into texts, because rows are written to logs as JSON."""
    return json.loads(json.dumps(row, default=str))


# --- 3. folders


def _read_folder(folder: Path, split: str) -> Iterator[object]:
    """Yields the rows of a folder that `datasets` saved, or of one that was downloaded from the hub."""
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        yield from _read_saved(folder, split)
        return
    for file in _files_of_split(folder, split or "train"):
        for _, row in _read_file(file):
            yield row


def _read_saved(folder: Path, split: str) -> Iterator[dict]:
    """Yields the rows that `save_to_disk` wrote, of a data set with splits or without."""
    import datasets  # slow to import, and a file does not need it

    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        runs.fail(f"{folder}: not a whole data set ({error}); save or copy it again")
    if isinstance(dataset, datasets.Dataset) and split:
        runs.fail(f"{folder} has no splits; leave out ':{split}'")
    if isinstance(dataset, datasets.DatasetDict):
        split = split or "train"
        if split not in dataset:
            runs.fail(
                f"{folder} has no split {split!r}; write {folder}:SPLIT, with one of {', '.join(dataset)}"
            )
        dataset = dataset[split]
    for row in dataset:
        yield _plain(row)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Returns the files of a split, as the hub names them; exits with 2 unless all are there."""
    # train.jsonl, or train-00000-of-00002.parquet and the like
    named = re.compile(rf"{re.escape(split)}(-\d+-of-(\d+).*)?({'|'.join(map(re.escape, FILE_TYPES))})")
    files = []
    n_parts = 1
    for path in sorted(folder.rglob("*")):
        match = named.fullmatch(path.name)
        if match:
            files.append(path)
            n_parts = int(match[2] or 1)
    if not files:
        found = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        runs.fail(
            f"{folder}: no file of the split {split!r}, such as {split}.jsonl or "
            f"{split}-00000-of-00001.parquet (found {', '.join(found[:5]) or 'nothing'}); "
            f"name a file, or another split by {folder}:SPLIT"
        )
    if len({file.parent for file in files}) > 1:
        folders = sorted({str(file.parent) for file in files})
        runs.fail(f"{folder}: the split {split!r} is in several folders; name one of {', '.join(folders)}")
    if len(files) != n_parts:
        runs.fail(f"{folder}: {len(files)} files of the split {split!r}, not {n_parts}; download them all")
    return files


# --- 4. the hub


def read_hub(
    name: str, configuration: str | None, split: str | None, revision: str | None, flag: str
) -> Iterator[tuple[int, dict]]:
    """Yields (number from 1, row) of a split of a data set, which is downloaded to the usual cache.

    Without a split it reads `test`, or the first one if there is no `test`, as an evaluation does.
    """
    import datasets  # slow to import, and a local file does not need it

    try:
        dataset = datasets.load_dataset(name, configuration, split=split, revision=revision)
    except Exception as error:  # the hub, its client and the network have many kinds
        reason = " ".join(str(error).split())
        missing = f"the split {split!r}" if split else "any split"
        is_path = Path(name).parent.is_dir() and Path(name).parent != Path()  # such as data/mmlu_redux
        if is_path and not Path(name).exists():
            runs.fail(
                f"{flag} {name}: no such file or folder; data/README.md says where each data set is from"
            )
        runs.fail(
            f"{flag} {name}: neither a file or folder here, nor can {missing} be loaded from the hub ({reason}); "
            f"check the name, or where there is a network run hf download {name} --repo-type dataset "
            "--local-dir DIR, and give DIR or a file in it"
        )
    if split is None:  # then the library returns all of them
        first = next(iter(dataset))
        dataset = dataset.get("test", dataset[first])
    for number, row in enumerate(dataset, 1):
        yield number, _plain(row)
