"""Keeps a cluster's messages (letters) in the memory of one process, a ray actor (`mail.py`)."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from rollpacker.cluster.seats.mailbox import Letter

NUM_KEYS = 100_000
"""Number of keys of letters (messages) that are remembered, so that a letter that its sender posts
again within seconds is not added twice."""


class Boxes:
    """The boxes of letters (messages) of a `Mailbox`. All methods run in one event loop. Each
    returns a name that changes once all letters are lost (epoch); `read` returns letters, too."""

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._letters: dict[str, list[Letter]] = {}
        self._keys: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._waiting: dict[str, set[asyncio.Event]] = {}

    async def epoch(self) -> str:
        return self._epoch

    async def post(
        self, box: str, sender: str, key: str, kind: str, facts: Mapping[str, Any]
    ) -> str:
        known = (box, sender, key)
        if known not in self._keys:
            number = next(self._numbers)
            letter = Letter(number=number, sender=sender, kind=kind, facts=facts, key=key)
            self._letters.setdefault(box, []).append(letter)
            for waiter in self._waiting.get(box, ()):
                waiter.set()
            if len(self._keys) >= NUM_KEYS:
                self._keys.popitem(last=False)
        self._keys[known] = None
        self._keys.move_to_end(known)
        return self._epoch

    async def read(self, box: str, after: int, within_s: float) -> tuple[str, list[Letter]]:
        news = asyncio.Event()
        waiting = self._waiting.setdefault(box, set())
        waiting.add(news)
        try:
            if not (found := self._after(box, after)):
                try:
                    await asyncio.wait_for(news.wait(), within_s)
                    found = self._after(box, after)
                except TimeoutError:
                    pass
        finally:
            waiting.discard(news)
            if not waiting and self._waiting.get(box) is waiting:
                del self._waiting[box]
        return self._epoch, found

    def _after(self, box: str, after: int) -> list[Letter]:
        return [letter for letter in self._letters.get(box, ()) if letter.number > after]

    async def forget(self, box: str, upto: int) -> str:
        left = self._after(box, upto)
        if left:
            self._letters[box] = left
        else:
            self._letters.pop(box, None)
        return self._epoch
