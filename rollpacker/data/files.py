"""Reads rows of JSONL and parquet files and of Hugging Face datasets, and notes their places."""

from __future__ import annotations

import difflib
import glob
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rollpacker.data.dataset import DataError, DatasetConfig
from rollpacker.imports import GIVEN, ImportSpecError, given, require

MAX_TOLD = 200
"""Largest number of characters of a row's columns, as JSON, in the name of a row whose prompt an
environment gives later. Longer columns are left out, and the name is the row's number alone."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row of a data set, before its prompt is made."""

    where: str
    """Where the row comes from, for error messages: file and line, or dataset and row."""
    columns: dict[str, Any]
    is_named: bool = False
    """Whether the row's prompt is a mere name of the row, as the environment
    gives the real prompt later."""


def read_rows(config: DatasetConfig) -> list[RawRow]:
    """Read the rows of a jsonl, parquet, huggingface or python data set: all, or the first
    `config.size`. Raises `DataError`, which names file and line, for a row that cannot be read."""
    assert config.path is not None
    rows: Iterable[RawRow]
    if config.kind == "python":
        rows = _given_rows(config.path)
    elif config.kind == "huggingface":
        where = f"{config.path} ({config.split}), row "
        rows = (RawRow(f"{where}{n}", columns) for n, columns in enumerate(_huggingface(config)))
    else:
        read = _jsonl_rows if config.kind == "jsonl" else _parquet_rows
        suffix = ".jsonl" if config.kind == "jsonl" else ".parquet"
        rows = (row for path in find_files(config.path, suffix) for row in read(path))
    found = list(islice(rows, config.size))
    if not found:
        name = config.path.removeprefix(GIVEN)
        raise DataError(f"{name}: the dataset is empty, there is no row in it.")
    return found


def brought_rows(
    config: DatasetConfig, brought: Sequence[Mapping[str, Any]] | None
) -> list[RawRow]:
    """Return the rows in `brought`, which an environment provided. A row without a prompt, which
    the environment gives later, gets a name for the row as its prompt. Raises `DataError` if
    `brought` is None: the environment has not run yet."""
    if brought is None:
        raise DataError("rows of kind environment are known once the environment runs.")
    column = config.prompt_column
    makes_prompt = config.prompt_function is not None or config.prompt_template is not None
    found = []
    for number, columns in enumerate(islice(brought, config.size)):
        columns = dict(columns)
        is_named = not makes_prompt and column not in columns
        if is_named:
            columns[column] = _told(number, columns)
        found.append(RawRow(f"row {number} of the environment", columns, is_named))
    return found


def _told(number: int, columns: Mapping[str, Any]) -> str:
    text = json.dumps(columns, sort_keys=True)
    return f"row {number}" + (f": {text}" if len(text) <= MAX_TOLD else "")


def _given_rows(spec: str) -> Iterator[RawRow]:
    """Yield the rows that the program which calls `rollpacker.train` gave as an iterable of
    mappings; `spec` names this iterable. Raises `DataError` for a row that is no mapping."""
    try:
        rows = given(spec)
    except ImportSpecError as error:
        raise DataError(f"data {error}") from None
    name = spec.removeprefix(GIVEN)
    for number, row in enumerate(rows):
        where = f"{name}, row {number}"
        if not isinstance(row, Mapping):
            raise DataError(
                f'{where}: a row is a dict such as {{"prompt": "...", "answer": "..."}}, not a'
                f" {type(row).__name__}."
            )
        yield RawRow(where, dict(row))


def find_files(path: str, suffix: str) -> list[Path]:
    """Return the sorted files for `path`, which is a file, a folder or a glob; of a folder, the
    files whose names end with `suffix`. Raises `DataError` if there is none."""
    place = Path(path).expanduser()
    if place.is_dir():
        found = sorted(p for p in place.rglob(f"*{suffix}") if p.is_file())
        if not found:
            raise DataError(f"{path}: there is no *{suffix} file in this folder.")
        return found
    if place.is_file():
        return [place]
    found = sorted(Path(p) for p in glob.glob(str(place), recursive=True) if Path(p).is_file())
    if not found:
        names = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
        close = difflib.get_close_matches(place.name, names, n=1, cutoff=0.5)
        hint = f' Did you mean "{place.parent / close[0]}"?' if close else ""
        raise DataError(f"{path}: no such file (looked in {Path.cwd()}).{hint}")
    return found


def _jsonl_rows(path: Path) -> Iterator[RawRow]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                text = _decoded(line, where, first=number == 1).strip()
                if text:
                    yield RawRow(where, _parsed(text, where))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None


def _decoded(line: bytes, where: str, first: bool) -> str:
    try:
        return line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{where}: not UTF-8; save the file as UTF-8.") from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno}).") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise DataError(
            f'{where}: each line must be an object such as {{"prompt": "...", "answer": "..."}},'
            f" not a {type(value).__name__}."
        )
    return value


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for columns in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{path}, row {number}", columns)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        after = f" after row {number}" if number else ""
        raise DataError(
            f"{path}: not a readable parquet file{after}; is it complete? ({reason})"
        ) from None


def require_datasets() -> None:
    """Raise `MissingPackageError` if the package for data of kind huggingface is not installed."""
    require("datasets", extra="datasets", what="data of kind huggingface")


def _huggingface(config: DatasetConfig) -> Any:
    require_datasets()
    import datasets

    assert config.path is not None
    folder = Path(config.path).expanduser()
    local = folder.is_dir()
    try:
        if local and (folder / "dataset_dict.json").is_file():
            whole = datasets.load_from_disk(str(folder))
            if config.split not in whole:
                raise DataError(
                    f"{config.path}: there is no split {config.split}; it has {', '.join(whole)}."
                )
            return whole[config.split]
        if local and (folder / "state.json").is_file():
            return datasets.load_from_disk(str(folder))
        name = str(folder) if local else config.path
        return datasets.load_dataset(name, name=config.subset, split=config.split)
    except DataError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"{config.path}: the Hugging Face hub cannot be reached ({error}). Without a network,"
            " download the dataset elsewhere and set path to its folder, or use kind jsonl or"
            " parquet."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, datasets.exceptions.DatasetsError) as error:
        subset = f", subset {config.subset}" if config.subset else ""
        reason = " ".join(str(error.__cause__ or error).split())[:400]
        raise DataError(
            f"{config.path} (split {config.split}{subset}) cannot be loaded:"
            f" {type(error).__name__}: {reason}"
        ) from None
