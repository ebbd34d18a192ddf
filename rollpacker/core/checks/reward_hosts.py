"""Processes that judge responses, one or more on each host: which one is next, and when one is
given up.

Samples go to the ready process with the fewest under way. A lost process is started again, or given
up after `max_losses` losses without a finished check between them. Samples under way on it get no
verdict, by no fault of the response; whether the verdict is asked for again is the reward
schedule's business.
"""

from __future__ import annotations

MAX_LOSSES = 3


class RewardHosts:
    """The processes ("hosts" below) that judge responses: which are ready, busy, or given up."""

    def __init__(self, count: int, max_losses: int = MAX_LOSSES) -> None:
        assert count > 0 and max_losses > 0
        self.given_up: dict[int, str] = {}
        """Reason, in words, for each host that was given up, by its number."""
        self.num_lost = 0
        """Number of times that a host was lost, over all hosts."""
        self._count, self._max_losses = count, max_losses
        self._under_way = [0] * count
        self._reasons: list[list[str]] = [[] for _ in range(count)]
        """Reasons, by host number, of the losses of that host since its last finished check."""
        self._ready: set[int] = set()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def all_given_up(self) -> bool:
        return len(self.given_up) == self._count

    def num_under_way(self, number: int) -> int:
        """Number of samples that host `number` was given and has neither judged nor lost yet."""
        return self._under_way[number]

    def is_settled(self) -> bool:
        """Whether every host has become ready or has been given up."""
        return self.num_ready + len(self.given_up) == self._count

    def ready(self, number: int) -> None:
        """Records that this host's process can judge responses."""
        self._ready.add(number)

    def hold(self, number: int) -> None:
        """Give the host no samples while the caller finds out whether the host still works."""
        self._ready.discard(number)

    def deal(self, num_samples: int) -> int | None:
        """Gives samples to the ready host with the fewest. Returns its number; None: none is
        ready."""
        if not self._ready:
            return None
        number = min(self._ready, key=lambda one: (self._under_way[one], one))
        self._under_way[number] += num_samples
        return number

    def ended(self, number: int, num_samples: int, *, judged: bool) -> None:
        """Records that samples have left the host. `judged`: with verdicts, rather than lost."""
        self._under_way[number] -= num_samples
        if judged:
            self._reasons[number].clear()

    def lost(self, number: int, reason: str) -> bool:
        """Records a loss of the host. Returns whether to start it again; if not, it is given up."""
        self._ready.discard(number)
        self.num_lost += 1
        reasons = self._reasons[number]
        reasons.append(reason)
        if len(reasons) < self._max_losses:
            return True
        self.give_up(
            number,
            f"lost {len(reasons)} times without a finished check between them "
            f"({'; '.join(reasons)})",
        )
        return False

    def give_up(self, number: int, reason: str) -> None:
        """Marks the host as given up for this reason: it is dealt no more samples."""
        self._ready.discard(number)
        self.given_up[number] = reason
