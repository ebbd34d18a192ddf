"""The tokens of trajectories in the tests' world, and what launches leave of them.

A token is named by who drew or gave it, so that two that have the same name are the same. What is
left is found by comparing names, not by counting as the core does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import SampleId

if TYPE_CHECKING:
    from tests.core.world import World

Token = tuple[object, ...]
Trail = tuple[Token, ...]


@dataclass
class Walk:
    """A sample that goes along its trajectory."""

    noise: SampleId
    before: Trail
    """What was left to its launch."""
    has: Trail = ()
    given: Trail = ()
    """Behind it."""
    turn: int = 1
    drawn: Trail = ()
    """The whole message at hand."""
    drafts: int = 0
    """Tokens of it that were left."""


@dataclass
class Trails:
    world: World
    walks: dict[SampleId, Walk] = field(default_factory=dict)

    def begin(self, sample: SampleId, noise: SampleId, carries: bool) -> tuple[int, int | None]:
        """It is launched: tokens of its first message, and how many of those that were left come
        out the same."""
        before = self.world.trails.get(noise, ()) if carries else ()
        self.walks[sample] = Walk(noise, before)
        return self._message(sample)

    def go_on(self, sample: SampleId, given: int) -> tuple[int, int | None]:
        """The same of its next message, behind so many given tokens."""
        walk = self.walks[sample]
        walk.turn += 1
        who = walk.noise if self.world.dialogues.repeats else sample
        walk.given = tuple(("given", who, walk.turn, place) for place in range(given))
        return self._message(sample)

    def _message(self, sample: SampleId) -> tuple[int, int | None]:
        walk = self.walks[sample]
        walk.drawn = self._drawn(walk.noise, walk.turn)
        so_far = walk.has + walk.given
        left: list[Token] = []
        if walk.before[: len(so_far)] == so_far:
            for token in walk.before[len(so_far) :]:
                if token[0] == "given" or token[2] != walk.turn:
                    break
                left.append(token)
        walk.drafts = len(left)
        if not left:
            return len(walk.drawn), None
        pairs = zip(left, walk.drawn, strict=False)
        differs = (place for place, (one, other) in enumerate(pairs) if one != other)
        return len(walk.drawn), next(differs, min(len(left), len(walk.drawn)))

    def _drawn(self, noise: SampleId, turn: int) -> Trail:
        """The message under the weights at hand: each update changes some from a token on."""
        world = self.world
        key = (noise,) if turn == 1 else (noise, turn)
        length = world.length(noise, world.rng("length", *key))
        drawn: Trail = tuple(("drawn", noise, turn, place, 0) for place in range(length))
        for version in range(1, world.version + 1):
            rng = world.rng("changes", noise, turn, version)
            if rng.random() < world.dialogues.mismatch:
                start, length = rng.randrange(len(drawn)), world.length(noise, rng)
                fresh = range(start, max(length, start + 1))
                drawn = (*drawn[:start], *(("drawn", noise, turn, p, version) for p in fresh))
        return drawn

    def heard(self, event: SampleGenerated | SampleAborted) -> None:
        """So many tokens of its message are there. What is left of the place by now."""
        walk = self.walks[event.sample]
        leaves = event.num_kept is not None or isinstance(event, SampleGenerated)
        if not leaves and self._is_before(walk, walk.has):
            return  # nobody has looked whether the environment's answer is another one
        if event.num_tokens:
            drawn = (
                *walk.drawn,
                ("late", event.sample, walk.turn),
            )  # `UnkindConfig.late_finish_rate`
            assert len(drawn) >= event.num_tokens
            walk.has += walk.given + drawn[: event.num_tokens]
        if walk.has and not self._is_before(walk, walk.has):
            self.world.trails[walk.noise] = walk.has

    def conclude(self, sample: SampleId) -> None:
        """It is complete, however far an earlier launch had come."""
        walk = self.walks[sample]
        self.world.trails[walk.noise] = walk.has

    def _is_before(self, walk: Walk, has: Trail) -> bool:
        """These come before something that was left."""
        return len(has) < len(walk.before) and walk.before[: len(has)] == has
