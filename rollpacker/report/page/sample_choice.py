"""Chooses the samples that a run's page shows: the numbers of all samples, and the texts of some.
Texts are shown of samples of the first and last steps and evaluations, of the best, the worst, the
longest and the slowest to check, and of as many others as fit, chosen by a hash of their id."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from rollpacker.report.page.packing import Texts

logger = logging.getLogger(__name__)

MAX_ROWS = 200_000
"""Maximum number of samples that a page lists. If there are more, a hash of their ids chooses."""
MAX_TEXT_BYTES = 18_000_000
"""Maximum number of bytes of all texts on a page together, before compression."""
MAX_CHARS = 40_000
"""Maximum number of characters of one text on a page. A longer text is cut off, with a note."""
NUM_SPECIAL = 48
"""Number of samples of each kind (best, longest, ...) whose texts are kept before others."""

_NUMBERS = ("step", "num_tokens", "reward", "advantage", "loss_weight", "check_s")
_TEXTS = ("row_where", "row", "prompt", "rendered_prompt", "completion", "dialogue", "failure")
MAX_DIALOGUE = 400_000
"""Maximum number of characters of a dialogue. A longer dialogue is left out, since part of it would
be no valid JSON."""
_OF_PROMPT = ("row_where", "row", "prompt", "rendered_prompt")


@dataclass(slots=True)
class _Table:
    """A list of texts without repetition, and the index of each."""

    texts: Texts = field(default_factory=Texts)
    _places: dict[str, int] = field(default_factory=dict)

    def place(self, text: str | None) -> int:
        """The index of a text in the table, to which it is added if need be. -1 for None."""
        if text is None:
            return -1
        found = self._places.get(text)
        if found is None:
            found = self._places[text] = len(self.texts)
            self.texts.append(text)
        return found


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    evaluation: bool
    table: Any
    """The rows of the Parquet file, without the columns of texts."""


def read_samples(
    folder: Path, *, max_rows: int = MAX_ROWS, max_bytes: int = MAX_TEXT_BYTES
) -> dict[str, Any]:
    """The samples in a run's folder for its page, as data for `pack`: at most `max_rows` samples,
    with `max_bytes` of texts. A file that cannot be read is left out, with a warning."""
    files = [one for one in map(_numbers, _paths(folder)) if one is not None]
    num = sum(one.table.num_rows for one in files)
    if not num:
        return {"num": 0, "num_listed": 0, "num_texts": 0, "files": []}
    columns = _columns(files)
    hashes = np.array([crc32(one.encode()) for one in columns["sample_id"]], np.uint32)
    listed = np.sort(np.argsort(hashes, kind="stable")[:max_rows]) if num > max_rows else None
    order = _priority(columns, hashes)
    if listed is not None:
        order = order[np.isin(order, listed)]
    texts, chosen = _texts(files, order, max_bytes)
    rows = np.arange(num) if listed is None else listed
    rows = rows[np.lexsort((rows, columns["step"][rows]))]
    return {
        "num": num,
        "num_texts": len(chosen),
        "num_listed": len(rows),
        **_listed(columns, rows),
        **_packed_texts(texts, rows, chosen),
    }


def _paths(folder: Path) -> list[tuple[Path, bool]]:
    trained = sorted((folder / "samples").glob("steps_*.parquet"))
    evaluated = sorted((folder / "evaluations").glob("step_*.parquet"))
    return [(path, False) for path in trained] + [(path, True) for path in evaluated]


def _numbers(place: tuple[Path, bool]) -> _File | None:
    import pyarrow.parquet

    path, evaluation = place
    try:
        names = pyarrow.parquet.read_schema(path).names
        wanted = [name for name in names if name not in _TEXTS]
        table = pyarrow.parquet.read_table(path, columns=wanted)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        logger.warning("%s cannot be read and is left out: %s", path, str(error).split("\n")[0])
        return None
    needed = {"step", "sample_id", "prompt_id", "num_tokens", "reward"}
    if needed - set(names):
        logger.warning("%s is no file of samples and is left out", path)
        return None
    return _File(path, evaluation, table)


def _columns(files: Sequence[_File]) -> dict[str, Any]:
    """All files' rows as columns by name: numbers as arrays, texts as lists. Where a file lacks a
    column, the column has NaN or None."""
    names = dict.fromkeys(name for one in files for name in one.table.column_names)
    found: dict[str, Any] = {}
    for name in names:
        as_number = name in _NUMBERS or name.startswith("reward/")
        parts: list[Any] = []
        for one in files:
            if name not in one.table.column_names:
                parts += [None] * one.table.num_rows
            else:
                parts += one.table[name].to_pylist()
        if as_number:
            values = [float("nan") if v is None else float(v) for v in parts]
            found[name] = np.array(values, np.float64)
        else:
            found[name] = parts
    found["step"] = found["step"].astype(np.int32)
    found["evaluation"] = np.repeat(
        [one.evaluation for one in files], [one.table.num_rows for one in files]
    )
    return found


def _priority(columns: dict[str, Any], hashes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers of all rows (samples), in the order in which their texts are kept while they fit."""
    num = len(hashes)
    everywhere = np.arange(num)
    is_evaluation, steps = columns["evaluation"], columns["step"]
    special: list[Any] = []
    for of_evaluation in (False, True):
        of = everywhere[is_evaluation == of_evaluation]
        if not len(of):
            continue
        by_hash = of[np.argsort(hashes[of], kind="stable")]
        for end in (steps[of].min(), steps[of].max()):
            special.append(by_hash[steps[by_hash] == end][: 2 * NUM_SPECIAL])
        for name in ("reward", "num_tokens", "check_s"):
            values = columns.get(name)
            if values is None:
                continue
            known = by_hash[np.isfinite(values[by_hash])]
            ranked = known[np.argsort(values[known], kind="stable")]
            special.append(ranked[::-1][:NUM_SPECIAL])
            if name == "reward":
                special.append(ranked[:NUM_SPECIAL])
    by_hash = np.argsort(hashes, kind="stable")
    order = np.concatenate([*special, by_hash])
    _, firsts = np.unique(order, return_index=True)
    return order[np.sort(firsts)]


def _texts(
    files: Sequence[_File], order: np.ndarray[Any, Any], max_bytes: int
) -> tuple[dict[int, dict[str, str | None]], list[int]]:
    """Reads texts of samples. Returns the texts by row number, and those rows, in the given
    `order`, whose texts together fit into `max_bytes`. The former may have further rows."""
    import pyarrow

    starts = np.cumsum([0, *(one.table.num_rows for one in files)])
    wanted = np.sort(order[: max_bytes // _mean_bytes(files) + 16 * NUM_SPECIAL])
    found: dict[int, dict[str, str | None]] = {}
    for number, one in enumerate(files):
        inside = wanted[(wanted >= starts[number]) & (wanted < starts[number + 1])]
        if len(inside):
            places = (inside - starts[number]).tolist()
            rows = _read_texts(one.path, pyarrow.array(places))
            found.update(zip(inside.tolist(), rows, strict=True))
    seen: set[str] = set()
    chosen, size = [], 0
    for row in order.tolist():
        texts = found.get(row)
        if texts is None:
            continue
        new = [t for k, t in texts.items() if t and not (k in _OF_PROMPT and t in seen)]
        size += sum(map(len, new)) + 16
        if size > max_bytes:
            break
        seen.update(t for k, t in texts.items() if t and k in _OF_PROMPT)
        chosen.append(row)
    return found, chosen


def _mean_bytes(files: Sequence[_File]) -> int:
    """About how many bytes the texts of a response have, so as to read few more than can fit."""
    import pyarrow.parquet

    size = num = 0
    for one in files:
        with pyarrow.parquet.ParquetFile(one.path) as file:
            places = [
                n
                for n, name in enumerate(file.schema_arrow.names)
                if name in ("completion", "dialogue")
            ]
            for group in range(file.metadata.num_row_groups):
                found = file.metadata.row_group(group)
                num += found.num_rows
                size += sum(found.column(place).total_uncompressed_size for place in places)
    return max(32, size // max(1, num))


def _read_texts(path: Path, places: Any) -> list[dict[str, str | None]]:
    import pyarrow.parquet

    names = pyarrow.parquet.read_schema(path).names
    table = pyarrow.parquet.read_table(path, columns=[n for n in _TEXTS if n in names])
    return [{k: _kept(k, v) for k, v in row.items()} for row in table.take(places).to_pylist()]


def _kept(name: str, text: str | None) -> str | None:
    if name != "dialogue":
        return _cut(text)
    return None if text is None or len(text) > MAX_DIALOGUE else text


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]}\n… (cut off here: {len(text):,} characters)"


def _listed(columns: dict[str, Any], rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The numbers and short words of these rows (samples), as arrays in the order of `rows`."""
    found: dict[str, Any] = {
        "step": columns["step"][rows],
        "evaluation": columns["evaluation"][rows].astype(np.uint8),
        "tokens": columns["num_tokens"][rows].astype(np.int32),
        "rewards": {
            name.removeprefix("reward/"): columns[name][rows].astype(np.float32)
            for name in columns
            if name.startswith("reward/")
        },
    }
    for name in ("reward", "advantage", "check_s", "loss_weight"):
        if name in columns:
            found[name] = columns[name][rows].astype(np.float32)
    for name in ("round_kind", "finish_reason"):
        found[name] = _words(columns.get(name), rows)
    for name in ("trained", "passed"):  # 0 no, 1 yes, 2 not told
        values = columns.get(name, [None] * len(columns["step"]))
        found[name] = np.array([2 if values[n] is None else values[n] for n in rows], np.uint8)
    prompts, rest = _Table(), _Table()
    ids = [columns["sample_id"][n].rpartition("#") for n in rows]
    found["prompt_id"] = np.array([prompts.place(head) for head, _, _ in ids], np.int32)
    found["attempt"] = np.array([rest.place(tail) for _, _, tail in ids], np.int32)
    return found | {"prompt_ids": prompts.texts, "attempts": rest.texts}


def _words(values: list[str | None] | None, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """A column of words, such as the sample's outcome, for `rows`: `words` has each different word
    once, and `of` for each row the index of its word."""
    table = _Table()
    places = [0 if values is None else table.place(values[n] or "") for n in rows]
    return {"words": list(table.texts), "of": np.array(np.minimum(places, 255), np.uint8)}


def _packed_texts(
    texts: dict[int, dict[str, str | None]], rows: np.ndarray[Any, Any], chosen: Sequence[int]
) -> dict[str, Any]:
    """The texts of the chosen rows for the page: a table of all texts, the index in it of each
    text, and for each of `rows` its place among the chosen rows, -1 if it is not chosen."""
    table = _Table()
    number = {row: place for place, row in enumerate(sorted(chosen))}
    of_rows = [texts[row] for row in sorted(chosen)]
    return {
        "text": np.array([number.get(row, -1) for row in rows.tolist()], np.int32),
        "texts": {
            name: np.array([table.place(of.get(name)) for of in of_rows], np.int32)
            for name in _TEXTS
        },
        "table": table.texts,
    }
