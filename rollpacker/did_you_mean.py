"""Hints that name the known name which a user who wrote an unknown one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(name: str, known: Iterable[object], *, cutoff: float = 0.5) -> str:
    """The hint ` Did you mean "..."?`, or an empty text if no known name is close. `cutoff`: how
    alike the two must be, from 0 to 1; upper and lower case do not matter."""
    by_folded = {str(one).casefold(): str(one) for one in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, 1, cutoff)
    return f' Did you mean "{by_folded[close[0]]}"?' if close else ""


def did_you_mean_file(path: Path, there: Iterable[Path]) -> str:
    """A hint for a file or folder that does not exist, from those in `there`; empty if none is
    close. Only names without endings are compared; a file of the same name in another folder is
    preferred."""
    known = {one.stem: one for one in there}
    if path.stem in known:
        return f' Did you mean "{known[path.stem]}"?'
    close = difflib.get_close_matches(path.stem, known, 1, 0.6)
    return f' Did you mean "{known[close[0]]}"?' if close else ""
