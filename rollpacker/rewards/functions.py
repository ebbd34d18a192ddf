"""Rewards from plain functions in TRL's shape: `f(prompts, completions, **columns)`, a list back.

A function gets only what its signature takes. None means "not applicable"; whatever goes wrong
means "no verdict" for the samples it hits, with a reason that names function and cause. Neither is
ever a zero.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.imports import ImportSpecError, load_function
from rollpacker.rewards.base import Failed, RewardConfig, RewardError, RewardInput, Scored
from rollpacker.rewards.calls import DeadlineCaller
from rollpacker.rewards.reasoning_gym import ReasoningGymScorer

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]

BUILT_IN: dict[str, Callable[..., Any]] = {"reasoning_gym": ReasoningGymScorer}
"""Each makes a function of its `arguments`."""

MAX_REWARD = 1e30
"""Up to this, sums and squares stay finite in float64, and advantages in float32."""

_STANDARD = ("prompts", "completions", "completion_ids", "finish_reasons")


class NoVerdict(str):
    """Why a function has no value for a sample."""

    __slots__ = ()


class RewardFunction:
    """One function, called with a deadline, its mistakes turned into reasons."""

    def __init__(self, config: RewardConfig, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.weight = config.weight
        self._config = config
        self._function = function
        self._takes, self._needs, self._takes_all = _signature(function, config)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self._caller = DeadlineCaller(f"reward-{name}", config.timeout_s, is_async)
        self._reported: set[str] = set()
        self._told_shape = False

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise `RewardError` if a row lacks a column that the function cannot do without."""
        own_check = getattr(self._function, "check", None)
        rows = list(rows)
        for number, row in enumerate(rows):
            for name in self._needs:
                if name not in row:
                    close = difflib.get_close_matches(name, [str(k) for k in row], n=1, cutoff=0.5)
                    hint = f' Did you mean "{close[0]}"?' if close else ""
                    raise RewardError(
                        f"reward {self.name} needs the column {name}; row {number} has:"
                        f" {', '.join(map(str, row)) or 'none'}.{hint} Set answer_column, or give"
                        " the parameter a default."
                    )
        if own_check is not None:
            own_check(rows)

    async def values(self, samples: Sequence[RewardInput]) -> list[float | NoVerdict | None]:
        """One value each. If the call as a whole fails, every sample gets a call of its own."""
        arguments = self._arguments(samples)
        try:
            returned = await self._caller.call(lambda: self._function(**arguments))
        except Exception as error:
            if len(samples) == 1:
                return [self._failure(error)]
            if not isinstance(error, TimeoutError):
                self._failure(error)
            singles = await asyncio.gather(*(self.values([sample]) for sample in samples))
            return [value for single in singles for value in single]
        return self._checked(returned, len(samples))

    def _arguments(self, samples: Sequence[RewardInput]) -> dict[str, Any]:
        names = dict.fromkeys(name for sample in samples for name in sample.columns)
        arguments: dict[str, Any] = {}
        for name in names:
            if self._wants(name):
                arguments[name] = [sample.columns.get(name) for sample in samples]
        for name in _STANDARD:
            if self._wants(name):
                arguments[name] = [_standard(name, sample) for sample in samples]
        arguments.update(self._config.arguments if self._config.function not in BUILT_IN else {})
        return arguments

    def _wants(self, name: str) -> bool:
        return self._takes_all or name in self._takes

    def _failure(self, error: Exception) -> NoVerdict:
        if isinstance(error, TimeoutError):
            kind = f"took longer than timeout_s={self._config.timeout_s:g}"
            self._report(kind, None)
            return NoVerdict(f"{self.name} {kind}")
        kind = type(error).__name__
        self._report(kind, error)
        return NoVerdict(f"{self.name} raised {kind}: {_shortened(str(error))}")

    def _report(self, kind: str, error: Exception | None) -> None:
        """The whole story in the log, once a kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            where = "" if error is None else _users_lines(error)
            logger.warning("reward %s: no verdict: %s%s", self.name, kind, where)

    def _checked(self, returned: Any, count: int) -> list[float | NoVerdict | None]:
        if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
            why = f"returned {type(returned).__name__}, not a list with one number per completion"
        elif len(returned) != count:
            why = f"returned {len(returned)} values for {count} completions"
        else:
            return [self._number(value) for value in returned]
        if not self._told_shape:
            self._told_shape = True
            self._report(why, None)
        return [NoVerdict(f"{self.name} {why}")] * count

    def _number(self, value: Any) -> float | NoVerdict | None:
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = math.nan
        if abs(number) <= MAX_REWARD:
            return number
        what = f"larger than {MAX_REWARD:g}" if math.isfinite(number) else "not a number"
        why = f"returned {_shortened(repr(value))}, {what}"
        self._report(f"returned a {type(value).__name__} that is {what}", None)
        return NoVerdict(f"{self.name} {why}")


class WeightedReward:
    """The weighted sum of several functions. Meets the `Reward` protocol."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self.names = tuple(function.name for function in functions)
        self._functions = tuple(functions)

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise `RewardError` before a run starts if these rows' columns cannot be judged."""
        rows = list(rows)
        for function in self._functions:
            function.check(rows)

    async def score(self, samples: Sequence[RewardInput]) -> list[Scored | Failed]:
        """Judge a batch; one verdict each, same order."""
        if not samples:
            return []
        if len(self._functions) == 1:  # saves a task for each call
            by_function = [await self._functions[0].values(samples)]
        else:
            calls = (function.values(samples) for function in self._functions)
            by_function = await asyncio.gather(*calls)
        return [self._verdict(values) for values in zip(*by_function, strict=True)]

    def _verdict(self, values: Sequence[float | NoVerdict | None]) -> Scored | Failed:
        parts = {
            name: None if isinstance(value, NoVerdict) else value
            for name, value in zip(self.names, values, strict=True)
        }
        failures = [value for value in values if isinstance(value, NoVerdict)]
        if failures:
            return Failed(reason="; ".join(failures), parts=parts)
        terms = [
            function.weight * value
            for function, value in zip(self._functions, values, strict=True)
            if isinstance(value, float)
        ]
        if not terms:
            return Failed(reason=f"no verdict: {', '.join(self.names)} returned None", parts=parts)
        value = math.fsum(terms)
        if abs(value) > MAX_REWARD:
            return Failed(reason=f"the weighted sum is larger than {MAX_REWARD:g}", parts=parts)
        return Scored(value=value, parts=parts)


def build_reward(configs: Sequence[RewardConfig]) -> WeightedReward:
    """The reward that a config names. Raises `RewardError` for a function that cannot be used."""
    functions: list[RewardFunction] = []
    for config in configs:
        function = _function_of(config)
        name = config.name or getattr(function, "__name__", type(function).__name__)
        taken = [f.name for f in functions]
        if name in taken:
            raise RewardError(f'two rewards are called "{name}"; give one of them another name.')
        functions.append(RewardFunction(config, name, function))
    return WeightedReward(functions)


def _function_of(config: RewardConfig) -> Callable[..., Any]:
    if config.function in BUILT_IN:
        maker = BUILT_IN[config.function]
        known = list(inspect.signature(maker).parameters)
        _refuse_unknown(config.arguments, known, config.function)
        return maker(**config.arguments)  # type: ignore[no-any-return]
    if ":" not in config.function:
        close = difflib.get_close_matches(config.function, BUILT_IN, n=1, cutoff=0.5)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        raise RewardError(
            f'there is no built-in reward "{config.function}".{hint} Built in:'
            f' {", ".join(BUILT_IN)}; a function of your own is "module:function" or'
            ' "path/to/file.py:function".'
        )
    try:
        return load_function(config.function)
    except ImportSpecError as error:
        raise RewardError(f"reward {error}") from None


def _signature(
    function: Callable[..., Any], config: RewardConfig
) -> tuple[set[str], list[str], bool]:
    """Names it takes, columns it cannot do without, and whether it takes any name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set(), [], True
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if positional:
        raise RewardError(
            f"reward {config.function}: its parameter {positional[0]} cannot be passed by name."
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = {p.name for p in named}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if taken := set(_STANDARD) & set(config.arguments):
        raise RewardError(
            f"reward {config.function}: the run itself passes {min(taken)}; take it out of"
            " arguments."
        )
    if not (takes or takes_all):
        raise RewardError(
            f"reward {config.function} takes no parameter; it must look like"
            " f(prompts, completions, **columns)."
        )
    given = set(_STANDARD) | set(config.arguments)
    needs = [p.name for p in named if p.default is p.empty and p.name not in given]
    if config.function not in BUILT_IN and not takes_all:
        _refuse_unknown(config.arguments, takes, config.function)
    return takes, needs, takes_all


def _refuse_unknown(arguments: Iterable[str], known: Iterable[str], function: str) -> None:
    known = list(known)
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f' Did you mean "{close[0]}"?' if close else ""
            raise RewardError(
                f"reward {function} takes no argument {name}.{hint} It takes: {', '.join(known)}."
            )


def _standard(name: str, sample: RewardInput) -> Any:
    match name:
        case "prompts":
            return sample.prompt
        case "completions":
            if isinstance(sample.prompt, str):
                return sample.completion
            return [{"role": "assistant", "content": sample.completion}]
        case "completion_ids":
            return list(sample.completion_tokens)
        case _:
            return sample.finish_reason


def _users_lines(error: BaseException) -> str:
    """What was raised and by which lines of the user's own code, the innermost last."""
    while isinstance(error.__cause__, BaseException):
        error = error.__cause__
    said = "".join(traceback.format_exception_only(error)).strip()
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    return f" ({said})\n" + "".join(traceback.format_list(frames[-8:])).rstrip()


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."
