"""Hints for an unknown name that a user wrote: the known name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, known: Iterable[object], *, cutoff: float = 0.5) -> str:
    """Returns ` Did you mean "..."?` with the closest known name; an empty text if none is close.
    `cutoff`: least similarity, from 0 to 1; upper and lower case do not matter."""
    by_folded = {str(one).casefold(): str(one) for one in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, 1, cutoff)
    return f' Did you mean "{by_folded[close[0]]}"?' if close else ""


def did_you_mean_file(path: Path, there: Iterable[Path]) -> str:
    """Returns ` Did you mean "..."?` for a missing file or folder, from the paths in `there`; an
    empty text if none is close. Names are compared without endings; an equal name in another folder
    is preferred."""
    known = {one.stem: one for one in there}
    if path.stem in known:
        return f' Did you mean "{known[path.stem]}"?'
    close = difflib.get_close_matches(path.stem, known, 1, 0.6)
    return f' Did you mean "{known[close[0]]}"?' if close else ""
