"""The stream trainer's plan: which devices leave a round early, and which groups are trained then.

Towards the end of a round few responses are left, and half of the devices would idle. The plan
hands those to the trainer, which accumulates the gradients of finished groups (the samples of one
prompt) while the rest of the round still runs: they are *streamed*. No update happens before the
round is over, so the run stays on-policy. Devices are released at most once a round, when 20, 25,
... 50 % of the launched samples have finished, and only if the other engines can hold what is still
to come: the *peak* of the key-value demand of the remaining samples, projected from the lengths of
earlier rounds. Demand may grow after the release, because long samples remain.

Call `begin` for a round, then `on_finished` (which may return devices to release) or `on_stopped`
once for each sample, and `groups_to_stream` whenever groups are ready.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from rollpacker.bounds import check_at_least, check_within
from rollpacker.codec import from_plain, to_plain
from rollpacker.core.commands import RoundKind
from rollpacker.core.ids import SampleId
from rollpacker.core.lengths.bins import IntArray

Group = TypeVar("Group", bound=Sized)

MAX_HISTORY = 4096
"""Maximum number of earlier response lengths that are remembered for one kind of round."""
NUM_SDS = 2.0
"""Standard deviations above the expected key-value demand for which an engine must have room."""
WHOLE = "whole"
"""Name under which `StreamPlan` remembers the lengths of responses from all kinds of round that
wait for every sample of their prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings of the early hand-over of devices to the trainer (`stream_trainer.*`)."""

    enabled: bool = False
    """Whether the trainer may be given devices, and compute gradients of finished groups, before a
    round is over. False: never."""
    kinds: tuple[str, ...] = ("long", "flush")
    """Kinds of round in which devices may be released to the trainer before the round is over."""
    window: tuple[float, float] = (0.2, 0.5)
    """Devices are released only while the finished samples' share in a round is between these."""
    every: float = 0.05
    """A release is tried anew whenever the share of finished samples has grown by this much."""
    released_share: float = 0.5
    """Largest share of the devices that is released to the trainer before a round is over."""
    min_new_share: float = 0.05
    """Share of the launched samples that must have finished between two tries of a release."""
    max_share: float = 1.0
    """Largest share of a step's samples that is trained on before the round is over."""
    reward_wait: bool = False
    """Whether gradients of finished groups are computed, in rounds of any kind, once all samples
    are generated and only rewards' verdicts are missing."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds) - {kind.value for kind in RoundKind})
        if unknown:
            known = ", ".join(kind.value for kind in RoundKind)
            raise ValueError(f"kinds has {unknown[0]!r}, which is none of {known}")
        low, high = self.window
        if not 0 < low <= high <= 1:
            raise ValueError(f"window must be two ascending shares above 0, not {self.window}")
        check_within(self, "(0, 1]", "every")
        check_within(self, "(0, 1)", "released_share")
        check_within(self, "[0, 1]", "min_new_share", "max_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """How devices, numbered from 0, form engines and training replicas (copies of the model in
    training), each of consecutive devices."""

    gpus: int = 1
    gpus_per_node: int = 8
    tensor_parallel: int = 1
    """Number of devices of one engine."""
    train_group: int = 1
    """Number of devices of one training replica (copy of the model in training)."""
    kv_tokens: int | None = None
    """Tokens that the key-value cache of one engine holds. None: it never runs out."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "gpus", "gpus_per_node", "tensor_parallel", "train_group")
        for name in ("tensor_parallel", "train_group"):
            if self.gpus % getattr(self, name):
                raise ValueError(f"{name} ({getattr(self, name)}) must divide gpus ({self.gpus})")
        if min(self.gpus, self.gpus_per_node) % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel ({self.tensor_parallel}) must divide the devices of a node "
                f"({min(self.gpus, self.gpus_per_node)})"
            )
        check_at_least(self, 1, "kv_tokens")

    def releasable(self, share: float) -> tuple[int, ...]:
        """Numbers of devices for engines to give to the trainer: the last ones, at most `share` of
        all, so that no engine or training replica is split and one engine stays. Empty:
        impossible."""
        unit = math.lcm(self.tensor_parallel, self.train_group)
        if self.gpus % unit:
            return ()
        num_released = min(math.floor(self.gpus * share + 1e-9), self.gpus - 1) // unit * unit
        return tuple(range(self.gpus - num_released, self.gpus))


@dataclass(slots=True)
class _RoundUnderWay:
    kind: RoundKind
    layout: DeviceLayout
    num_samples: int
    num_to_train: int
    prompt_tokens: float
    tries: deque[int]
    """Numbers of finished samples at which a release of devices is to be tried, ascending."""
    num_finished: int = 0
    num_stopped: int = 0
    num_finished_at_try: int = 0
    longest: int = 0
    """Number of tokens of the longest finished response."""
    released: tuple[int, ...] = ()
    refusal: str = ""
    """Why the last try of a release was refused, in words. Empty: none was refused."""
    num_streamed: int = 0
    """Number of samples whose groups the trainer was given before the round was over."""


class StreamPlan:
    """Decides over a run which devices engines give to the trainer before a round is over, and for
    which groups (a prompt's samples) the trainer then computes gradients. Call `begin` for each
    round, then report the round's samples."""

    def __init__(
        self,
        config: StreamConfig,
        layout: DeviceLayout,
        *,
        max_response_tokens: int | None = None,
        trainer_apart: bool = False,
        why_kept: Callable[[], str] = str,
    ) -> None:
        """`max_response_tokens`: greatest length of a response. None: nothing is released before
        earlier rounds have shown lengths, unless the cache has no limit. `trainer_apart`: the
        trainer has devices of its own, so nothing is released, and gradients of groups are computed
        as soon as they are complete, in every kind of round. `why_kept` returns why no engine can
        let go of its samples now, in words, or an empty text."""
        self.config = config
        self.layout = layout
        self.trainer_apart = trainer_apart
        self.why_kept = why_kept
        self.max_response_tokens = max_response_tokens
        self.num_tries = 0
        self.num_releases = 0
        self.num_refused_kv = 0
        """Number of tries to release devices that the key-value cache of other engines forbade."""
        self.num_refused_layout = 0
        """Number of tries to release devices that would have split an engine or replica."""
        self._histories: dict[str, deque[int]] = {}
        """Tokens of samples that left an engine in earlier rounds, by kind of round
        (`_history_of`)."""
        self._left: list[int] = []
        """Tokens of this round's samples that left the engine, for `_histories` after the round."""
        self._round: _RoundUnderWay | None = None
        self.active = False
        """True if gradients of the round's groups may be computed before the round is over."""
        self.may_release = False
        """True if engines' devices may be given to the trainer in this round; each sample's end
        must then be reported by `on_finished` or `on_stopped`."""
        self.may_stream_early = False
        """True if the trainer has devices to compute with while the round's engines generate."""
        self._waiting: list[tuple[SampleId, ...]] = []
        """Complete groups of the round that the trainer was not given yet."""

    @property
    def num_waiting(self) -> int:
        """Number of complete groups of the round that the trainer was not given yet."""
        return len(self._waiting)

    @property
    def released(self) -> tuple[int, ...]:
        """Numbers of the devices that were released in this round; empty if none were."""
        return () if self._round is None else self._round.released

    # -- events ------------------------------------------------------------------------

    def begin_if_due(
        self,
        kind: RoundKind,
        *,
        num_samples: int,
        num_to_train: int,
        prompt_tokens: float,
        layout: DeviceLayout,
    ) -> None:
        """Calls `begin` if groups of a round of this kind may be trained on before its end."""
        by_kind = self.config.reward_wait or kind in self.config.kinds
        self.active = self.config.enabled and (by_kind or self.trainer_apart)
        self.may_release = self.may_stream_early = False
        if self.active:
            self.begin(
                kind,
                num_samples=num_samples,
                num_to_train=num_to_train,
                prompt_tokens=prompt_tokens,
                layout=layout,
            )

    def begin(
        self,
        kind: RoundKind,
        *,
        num_samples: int,
        num_to_train: int,
        prompt_tokens: float = 0.0,
        layout: DeviceLayout | None = None,
    ) -> None:
        """Begins a round. `num_samples`: number of samples launched. `num_to_train`: number of
        samples that the step trains on. `prompt_tokens`: mean tokens of a prompt. `layout`: engines
        and replicas of this round; None: those of the run."""
        assert num_samples >= 1 and num_to_train >= 0 and prompt_tokens >= 0
        self._close_history()
        self._waiting = []
        self.may_release = (
            self.config.enabled and kind.value in self.config.kinds and not self.trainer_apart
        )
        self.may_stream_early = self.config.enabled and self.trainer_apart
        self._round = _RoundUnderWay(
            kind=kind,
            layout=self.layout if layout is None else layout,
            num_samples=num_samples,
            num_to_train=num_to_train,
            prompt_tokens=prompt_tokens,
            tries=deque(_tries(self.config, num_samples) if self.may_release else ()),
        )

    def on_finished(self, num_tokens: int) -> tuple[int, ...] | None:
        """Records a complete response of `num_tokens` tokens. Returns the numbers of the devices to
        release to the trainer now. None: none."""
        now = self._round or self._current()
        now.num_finished += 1
        if num_tokens > now.longest:
            now.longest = num_tokens
        if self.may_release:
            self._left.append(num_tokens)
        if not now.tries or now.num_finished < now.tries[0]:
            return None
        now.tries.popleft()
        return self._try_release(now)

    def on_stopped(self, num_tokens: int) -> None:
        """Records a sample that was aborted or failed with `num_tokens` tokens generated."""
        now = self._current()
        now.num_stopped += 1
        if self.may_release:
            self._left.append(num_tokens)

    def on_added(self, count: int = 1) -> None:
        """Records that `count` more samples were launched in this round, to replace failed ones."""
        self._current().num_samples += count

    def take_up(
        self, complete: Sequence[tuple[SampleId, ...]], *, engine_empty: bool
    ) -> tuple[tuple[SampleId, ...], ...]:
        """Takes groups (of a prompt's samples) that have become complete. Returns those, of these
        and earlier ones, whose gradients may be computed now; none is returned twice."""
        self._waiting += complete
        chosen = self.groups_to_stream(self._waiting, engine_empty=engine_empty)
        self._waiting = self._waiting[len(chosen) :]
        return chosen

    def groups_to_stream(self, groups: Sequence[Group], *, engine_empty: bool) -> tuple[Group, ...]:
        """The first of these complete groups, up to `max_share` of the step's samples, that the
        trainer may start on now; they count as streamed from then on. `engine_empty`: no sample of
        the round is being generated."""
        now = self._current()
        if not self.may_stream(engine_empty=engine_empty):
            return ()
        budget = math.floor(self.config.max_share * now.num_to_train + 1e-9)
        chosen: list[Group] = []
        for group in groups:
            if now.num_streamed + len(group) > budget:
                break
            now.num_streamed += len(group)
            chosen.append(group)
        return tuple(chosen)

    def may_stream(self, *, engine_empty: bool) -> bool:
        """Whether the trainer has devices to compute gradients with now, before the round is over.
        `engine_empty`: no sample of the round is being generated."""
        if not self.config.enabled:
            return False
        return self.may_stream_early or (self.config.reward_wait and engine_empty)

    def streamed(self) -> tuple[int, str]:
        """Number of this round's samples with gradients begun early, and if 0, why, in words."""
        now = self._current()
        if now.num_streamed:
            return now.num_streamed, ""
        if self.trainer_apart or self.config.reward_wait:
            reason = "no group was complete before the whole step was due"
        elif not self.may_release:
            reason = f"nothing is released in a {now.kind} round"
        elif now.released:
            reason = "no group was complete after the release"
        elif now.refusal:
            reason = now.refusal
        else:
            reason = "the round was over before a release could be tried"
        return 0, reason

    # -- the release -------------------------------------------------------------------

    def _try_release(self, now: _RoundUnderWay) -> tuple[int, ...] | None:
        new = now.num_finished - now.num_finished_at_try
        if new < math.floor(self.config.min_new_share * now.num_samples + 1e-9):
            return None
        now.num_finished_at_try = now.num_finished
        self.num_tries += 1
        devices = now.layout.releasable(self.config.released_share)
        if not devices:
            self.num_refused_layout += 1
            now.refusal = "an engine or a training replica would be split"
            return None
        now.refusal = self.why_kept()
        if now.refusal:
            return None
        if not self._fits(now, now.layout.gpus - len(devices)):
            self.num_refused_kv += 1
            now.refusal = "the other engines would run out of key-value cache"
            return None
        self.num_releases += 1
        now.tries.clear()
        now.released = devices
        self.may_stream_early = True
        return devices

    def _fits(self, now: _RoundUnderWay, num_devices: int) -> bool:
        """Whether engines on this number of devices can hold the remaining samples to their end."""
        capacity = now.layout.kv_tokens
        if capacity is None:
            return True
        num_live = now.num_samples - now.num_finished - now.num_stopped
        num_live = math.ceil(num_live / (num_devices // now.layout.tensor_parallel))
        if num_live == 0:
            return True
        lengths = self._projected(now)
        if lengths is None:
            return False
        return _peak_demand(lengths, num_live, now.prompt_tokens) <= capacity

    def _projected(self, now: _RoundUnderWay) -> IntArray | None:
        """Ascending lengths in tokens that a remaining sample may reach. None: none is known."""
        history = np.array(self._histories.get(_history_of(now.kind), ()), dtype=np.int64)
        ahead = np.sort(history[history > now.longest])
        if self.max_response_tokens is not None:
            limit = max(self.max_response_tokens, now.longest)
            ahead = np.append(np.minimum(ahead, limit), limit)
        return ahead if ahead.size else None

    # -- bookkeeping -------------------------------------------------------------------

    def _current(self) -> _RoundUnderWay:
        assert self._round is not None, "no round has begun"
        return self._round

    def _close_history(self) -> None:
        if self._round is not None and self._left:
            name = _history_of(self._round.kind)
            self._histories.setdefault(name, deque(maxlen=MAX_HISTORY)).extend(self._left)
        self._left = []
        self._round = None

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The plan as plain values for a checkpoint; a round that is not over counts as over."""
        histories = {name: list(lengths) for name, lengths in sorted(self._histories.items())}
        if self._round is not None and self._left:
            name = _history_of(self._round.kind)
            histories[name] = [*histories.get(name, []), *self._left][-MAX_HISTORY:]
        return to_plain(
            SavedPlan(
                num_tries=self.num_tries,
                num_releases=self.num_releases,
                num_refused_kv=self.num_refused_kv,
                num_refused_layout=self.num_refused_layout,
                histories=histories,
            )
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the `state` of an earlier plan, between two rounds."""
        saved = from_plain(SavedPlan, state)
        self.num_tries, self.num_releases = saved.num_tries, saved.num_releases
        self.num_refused_kv = saved.num_refused_kv
        self.num_refused_layout = saved.num_refused_layout
        self._histories = {
            kind: deque(lengths, maxlen=MAX_HISTORY) for kind, lengths in saved.histories.items()
        }
        self._left = []
        self._round = None


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of a `StreamPlan` in a checkpoint."""

    num_tries: int
    num_releases: int
    num_refused_kv: int
    num_refused_layout: int
    histories: dict[str, list[int]]


def _history_of(kind: RoundKind) -> str:
    """Key of the remembered lengths for this kind of round. A kind that stops all but the first to
    finish has its own key: its lengths say nothing about the other rounds."""
    is_race = kind in (RoundKind.SHORT, RoundKind.CASCADE)
    return kind.value if is_race else WHOLE


def _tries(config: StreamConfig, num_samples: int) -> list[int]:
    low, high = config.window
    num_tries = math.floor((high - low) / config.every + 1e-9) + 1
    shares = (low + index * config.every for index in range(num_tries))
    return sorted({max(math.ceil(share * num_samples - 1e-9), 1) for share in shares})


def _peak_demand(lengths: IntArray, num_live: int, prompt_tokens: float) -> float:
    """Largest number of tokens that `num_live` samples of one engine hold at once, with a margin.
    All samples are at the same position, and end at lengths drawn from `lengths` (ascending).
    Between two of these no sample ends and the demand grows: it is greatest just before one."""
    alive = 1.0 - np.arange(lengths.size) / lengths.size
    expected = num_live * alive
    bound = np.minimum(expected + NUM_SDS * np.sqrt(expected * (1.0 - alive)), num_live)
    return float(np.max(bound * (prompt_tokens + lengths)))
