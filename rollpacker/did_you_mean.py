"""The known name that somebody may have meant who wrote an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[object], *, cutoff: float = 0.5) -> str:
    """` Did you mean "..."?`, or nothing where no known name is close. `cutoff`: how much of the
    two must be alike, from 0 to 1."""
    close = difflib.get_close_matches(name, [str(one) for one in known], 1, cutoff)
    return f' Did you mean "{close[0]}"?' if close else ""
