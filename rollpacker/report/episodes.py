"""Counts of a step's episodes (conversations of samples with environments): turns, seconds of the
policy and of environments, why episodes ended, the slowest answers, tool calls, lost answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollpacker.core.events import Acted, ToolCall
from rollpacker.core.ids import SampleId
from rollpacker.report.tool_seconds import ToolSeconds

NUM_SLOWEST = 10
MAX_REASON = 300
"""Maximum number of characters that are kept of an environment's text on why it gave no answer."""


@dataclass(slots=True)
class Answers:
    """Counts of the answers that environments gave to prompts of one data source."""

    num: int = 0
    total_s: float = 0.0
    """Sum of the seconds that environments report for their answers."""
    longest_s: float = 0.0
    waited_s: float = 0.0
    """Sum of the seconds that environments' answers took beyond those that the answers report."""
    lost: Counter[str] = field(default_factory=Counter)
    """Number of answers that environments failed to give, by cause, in all attempts at episodes."""

    def add(self, other: Answers) -> None:
        self.num += other.num
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)
        self.waited_s += other.waited_s
        self.lost.update(other.lost)

    def plain(self) -> dict[str, Any]:
        return {
            "answers": self.num,
            "mean_s": self.total_s / self.num if self.num else None,
            "longest_s": self.longest_s,
            "mean_waited_s": self.waited_s / self.num if self.num else None,
            "lost": dict(sorted(self.lost.items())),
        }


class Slow(NamedTuple):
    """One of the slowest answers of environments in a step, or in several steps."""

    seconds: float
    sample: str
    turn: int
    """Number of the model's turn that was answered. 0: the answer began the episode."""
    tool: str
    """Name of the tool whose call took longest. Empty if no tool was called, or it is not known."""
    came: bool = True
    """Whether the environment gave this answer in time. False: it did not; the episode was lost."""

    def plain(self) -> dict[str, Any]:
        slow = {"sample": self.sample, "turn": self.turn, "seconds": self.seconds}
        return {**slow, "tool": self.tool, "came": self.came}


@dataclass(slots=True)
class StepEpisodes:
    """Counts of the episodes of one step, or of several steps together."""

    ended: Counter[str] = field(default_factory=Counter)
    """Number of complete episodes, by the reason why they ended."""
    num_turns: int = 0
    """Number of the model's turns in complete episodes."""
    most_turns: int = 0
    policy_s: float = 0.0
    """Sum of the seconds in which engines generated turns of complete episodes, waits included."""
    environment_s: float = 0.0
    answers: dict[str, Answers] = field(default_factory=dict)
    """Counts of answers by the prompts' data source, those in lost episodes included."""
    first_reason: dict[str, str] = field(default_factory=dict)
    """By cause: an environment's words on the first answer that it failed to give."""
    slowest: list[Slow] = field(default_factory=list)
    """The slowest answers of environments, slowest first."""
    tools: dict[str, ToolSeconds] = field(default_factory=dict)
    """Counts and seconds of tool calls by the tool's name, those in lost episodes included."""

    def __bool__(self) -> bool:
        return bool(self.ended or self.answers)

    def answered(
        self,
        sample: SampleId,
        turn: int,
        seconds: float,
        waited_s: float,
        calls: Sequence[ToolCall] = (),
    ) -> None:
        """Note that the environment answered a turn of the model, with these `calls` of tools.
        `seconds`: what the environment reports; `waited_s`: what the answer took beyond this."""
        of_source = self.answers.setdefault(sample.prompt.source, Answers())
        of_source.num += 1
        of_source.total_s += seconds
        of_source.longest_s = max(of_source.longest_s, seconds)
        of_source.waited_s += waited_s
        for call in calls:
            self.tools.setdefault(call.tool, ToolSeconds()).take(call)
        if len(self.slowest) < NUM_SLOWEST or seconds > self.slowest[-1].seconds:
            slowest = max(calls, key=lambda call: call.seconds or 0.0, default=None)
            tool = "" if slowest is None else slowest.tool
            self._keep_slowest([*self.slowest, Slow(seconds, str(sample), turn, tool)])

    def lose(self, event: Acted) -> None:
        """Note, as `event` tells, that an environment gave no answer and the episode was lost."""
        sample, calls, seconds = event.sample, event.calls, event.seconds or 0.0
        self.answers.setdefault(sample.prompt.source, Answers()).lost[event.cause] += 1
        self.first_reason.setdefault(event.cause, event.reason[:MAX_REASON])
        if event.cause != "deadline":
            return
        last = len(calls) - 1
        for number, call in enumerate(calls):
            self.tools.setdefault(call.tool, ToolSeconds()).take(call, hung=number == last)
        tool = calls[last].tool if calls else ""
        slow = Slow(seconds, str(sample), event.turn, tool, came=False)
        self._keep_slowest([*self.slowest, slow])

    def conclude(self, reason: str, turns: int, policy_s: float, environment_s: float) -> None:
        """Count a complete episode: for which `reason` it ended, its number of turns, and the
        seconds that the policy and the environment took."""
        self.ended[reason] += 1
        self.num_turns += turns
        self.most_turns = max(self.most_turns, turns)
        self.policy_s += policy_s
        self.environment_s += environment_s

    def add(self, other: StepEpisodes) -> None:
        """Add the episodes of another step to these counts."""
        self.ended.update(other.ended)
        self.num_turns += other.num_turns
        self.most_turns = max(self.most_turns, other.most_turns)
        self.policy_s += other.policy_s
        self.environment_s += other.environment_s
        for source, answers in other.answers.items():
            self.answers.setdefault(source, Answers()).add(answers)
        for tool, seconds in other.tools.items():
            self.tools.setdefault(tool, ToolSeconds()).add(seconds)
        self.first_reason = {**other.first_reason, **self.first_reason}
        self._keep_slowest([*self.slowest, *other.slowest])

    def plain(self) -> dict[str, Any]:
        """The counts and means, as a mapping that `summary.json` can hold."""
        count = self.ended.total()
        lost = Counter[str]()
        for answers in self.answers.values():
            lost.update(answers.lost)
        return {
            "trajectories": count,
            "ended": dict(self.ended.most_common()),
            "mean_turns": self.num_turns / count if count else None,
            "most_turns": self.most_turns,
            "mean_policy_s": self.policy_s / count if count else None,
            "mean_environment_s": self.environment_s / count if count else None,
            "sources": {name: one.plain() for name, one in sorted(self.answers.items())},
            "lost": [
                {"cause": cause, "count": num, "first": self.first_reason[cause]}
                for cause, num in lost.most_common()
            ],
            "slowest": [one.plain() for one in self.slowest],
            "tools": {name: one.plain() for name, one in sorted(self.tools.items())},
        }

    def _keep_slowest(self, found: list[Slow]) -> None:
        self.slowest = sorted(found, key=lambda one: (-one.seconds, *one[1:]))[:NUM_SLOWEST]


def add_up(steps: Iterable[StepEpisodes]) -> StepEpisodes:
    """The sum of the episodes of several steps."""
    total = StepEpisodes()
    for step in steps:
        total.add(step)
    return total
