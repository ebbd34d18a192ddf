"""The environments of the tests' world: they answer late, never, at the end, or are lost.

They obey to the letter and hold the core to it: an episode is asked for one answer at a time, in
the order of its turns, is continued once for each, and ends once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollpacker.bus import Routes
from rollpacker.core.commands import Act, CancelAct, Conclude
from rollpacker.core.events import Acted, Event, SampleGenerated
from rollpacker.core.ids import SampleId

if TYPE_CHECKING:
    from tests.core.world import World


@dataclass(frozen=True, kw_only=True)
class Dialogues:
    """What is drawn for each trajectory, by chance."""

    over_rate: float = 0.25
    """Of the answers: those that end the episode."""
    cut_off_rate: float = 0.1
    """Of the messages: those that run into the limit of a turn."""
    most_given: int = 5
    slow_rate: float = 0.1
    """Of the answers: those that take up to ten times as long."""
    seconds: float = 4.0
    """The others take up to so long."""
    repeats: bool = False
    """Every launch of a prompt's sample gets the same answers."""
    mismatch: float = 0.0
    """Of the messages: those that an update of the weights changes."""


@dataclass
class Played:
    """What has become of one sample, as told by the events and commands."""

    messages: int = 0
    tokens: int = 0
    given: int = 0
    environment_s: float = 0.0
    answered: int = -1
    """The turn that was answered last."""
    is_open: bool = False
    lost: str = ""
    """Why its episode was lost, if it is."""
    retries: int = 0
    over: str | None = None
    """What the environment said, if it said that it is over."""
    to_continue: bool = False
    """Answered, and neither continued nor concluded."""
    concluded: str = ""
    waits: bool = False
    """A message of it has ended, and nobody was asked yet."""


class Environments:
    def __init__(self, world: World, dialogues: Dialogues) -> None:
        self.world, self.dialogues = world, dialogues
        self.played: dict[SampleId, Played] = {}
        self.asked: dict[SampleId, Acted | None] = {}
        """What will be said; None: nothing, unless it is cancelled."""
        self.acts: list[Act] = []

    def routes(self) -> Routes:
        return {Act: self.act, CancelAct: self.cancel, Conclude: self.conclude}

    # -- what the core says ------------------------------------------------------------

    def act(self, command: Act) -> None:
        world, sample, turn = self.world, command.sample, command.turn
        config = world.config.acting
        assert config is not None
        self.acts.append(command)
        played = self.played.setdefault(sample, Played())
        assert sample not in self.asked, "asked twice at the same time"
        assert sample not in world.engines.where, "the engine has it"
        assert turn == played.messages and not played.concluded
        if command.retry:
            assert config.is_deterministic and played.lost == "infrastructure"
            assert command.retry == played.retries + 1 <= config.max_retries
            played.lost = ""
        else:
            assert turn == played.answered + 1 + (played.answered < 0 and not config.begins)
            assert not played.lost and (played.is_open or turn == (not config.begins))
            assert turn == 0 or played.waits, "nobody said anything new"
        played.retries = command.retry
        played.is_open, played.waits = True, False
        kind = config.kinds.get(sample.prompt.source)
        if kind is not None:
            under_way = Counter(one.prompt.source for one in self.asked)[sample.prompt.source]
            assert kind.workers is None or under_way < kind.workers, "more than may act"
            assert (command.timeout_s is None) == (kind.deadline is None)
        event = self.answer(command)
        self.asked[sample] = event
        if event is not None:
            assert event.seconds is not None
            world.push(event.seconds, event)

    def answer(self, command: Act) -> Acted | None:
        world, sample, turn, dialogues = self.world, command.sample, command.turn, self.dialogues
        rng = world.rng("answer", self.who(sample), turn)
        slow = 10.0 if rng.random() < dialogues.slow_rate else 1.0
        seconds = slow * dialogues.seconds * rng.random()
        given, is_over = rng.randint(0, dialogues.most_given), rng.random() < dialogues.over_rate
        is_over = is_over and turn > 0
        if world.misfortune.hangs(sample, turn):
            seconds = math.inf
        if command.timeout_s is not None and seconds > command.timeout_s:
            return Acted(
                time_s=0.0, sample=sample, turn=turn, seconds=command.timeout_s, cause="deadline"
            )
        if seconds == math.inf:
            return None
        return Acted(
            time_s=0.0,
            sample=sample,
            turn=turn,
            num_tokens=given,
            is_over=is_over,
            seconds=seconds,
            reason=rng.choice(("", "no_tool_call")) if is_over else "",
        )

    def who(self, sample: SampleId) -> SampleId:
        """By whom answers are drawn."""
        return SampleId(sample.prompt, sample.index, 0) if self.dialogues.repeats else sample

    def cancel(self, command: CancelAct) -> None:
        assert command.samples
        for sample in command.samples:
            played = self.played[sample]
            # Whoever waits for a worker has a message behind it that nobody needs any more.
            assert played.is_open or played.waits, f"{sample} has no episode to end"
            played.is_open = played.waits = False
            if sample not in self.asked:
                continue
            there = self.asked[sample]
            if there is None or there.cause or self.world.rng("crossed", sample).random() < 0.5:
                there = Acted(time_s=0.0, sample=sample, turn=played.messages, cause="cancelled")
            else:  # it was there already
                there = Acted(time_s=0.0, sample=sample, turn=played.messages, seconds=1.0)
            self.asked[sample] = there
            self.world.push(0.0, there)

    def conclude(self, command: Conclude) -> None:
        sample, reason = command.sample, command.reason
        played = self.played[sample]
        assert not played.concluded, "concluded twice"
        assert sample not in self.asked and sample not in self.world.engines.where
        config = self.world.config.acting
        assert config is not None
        tokens, limits = played.tokens + played.given, config.limits
        match reason:
            case "turns":
                assert limits.max_turns == played.messages
            case "tokens":
                most = limits.max_trajectory_tokens
                assert most is not None and tokens >= most
            case "environment_s":
                most_s = limits.max_environment_s
                assert most_s is not None and played.environment_s >= most_s
            case "length":
                assert played.waits, "it was not cut off"
            case _:
                assert played.over is not None and reason == (played.over or "done")
        played.concluded = reason
        self.world.walking.conclude(sample)
        played.is_open = played.to_continue = played.waits = False

    def goes_on(self, sample: SampleId) -> None:
        """It was launched after its episode began, or continued."""
        played, config = self.played.setdefault(sample, Played()), self.world.config.acting
        if config is None or (not config.begins and not played.messages):
            return
        assert played.to_continue, f"{sample} goes on without an answer, or twice"
        assert played.over is None and not played.lost and played.is_open
        limits, tokens = config.limits, played.tokens + played.given
        if played.messages:
            assert not limits.reached(played.messages, tokens, played.environment_s)
        played.to_continue = False

    # -- what happens ------------------------------------------------------------------

    def meets(self, event: Acted) -> bool:
        """Whether what was expected still comes."""
        if self.asked.get(event.sample) is not event:
            return False
        del self.asked[event.sample]
        return True

    def heard(self, event: Event) -> None:
        """The core is told this."""
        if self.world.config.acting is None:
            return
        match event:
            case SampleGenerated(sample=sample, num_tokens=num_tokens):
                if not self.is_needed(event):
                    return
                played = self.played.setdefault(sample, Played())
                played.messages += 1
                played.tokens += played.given + num_tokens
                played.given, played.waits = 0, True
            case Acted(sample=sample) if self.played[sample].is_open:
                played = self.played[sample]
                if event.cause:
                    played.lost = event.cause  # what is left of it has to be ended
                    return
                played.answered = event.turn
                played.environment_s += event.seconds or 0.0
                played.given = event.num_tokens if event.turn else 0
                played.over = event.reason if event.is_over else None
                played.to_continue = True

    def is_needed(self, event: SampleGenerated) -> bool:
        """No zombie says so, and nobody told it to stop."""
        life = self.world.engines.lives[event.engine, event.incarnation]
        return not life.lost and event.sample not in self.world.engines.stopping

    def check_end(self) -> None:
        """Of a run that is over."""
        assert not self.asked, f"owed: {self.asked}"
        for sample, played in self.played.items():
            assert not played.is_open, f"{sample} has an episode that nobody ended"
            assert not played.waits, f"{sample} has a message that nobody answered or let go of"
