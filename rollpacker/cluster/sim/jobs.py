"""The jobs of a simulated cluster: drawn from a profile, or read from a trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
from rollpacker.cluster.decide.waiting import check_quota
from rollpacker.cluster.sim.profiles import Profile, profile_of_run, profile_of_scenario
from rollpacker.cluster.sim.spec import ClusterSpec, JobsSpec, PoolSpec
from rollpacker.core.portable import exp, log1p, normal_quantile
from rollpacker.did_you_mean import did_you_mean
from rollpacker.sim.draws import normal_ratio
from rollpacker.sim.hardware import read_tables

_TABLES = read_tables("cluster_jobs.yaml")
PROFILES: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] = _TABLES["profiles"]
MODELS: Mapping[str, Mapping[str, float]] = _TABLES["models"]
SIZES: Mapping[str, str] = _TABLES["sizes"]
GIB_PER_GB = 1e9 / 2**30
LIFE_SIGMA = 1.2
"""Standard deviation of the logarithm of jobs' durations, before the longest are shortened."""
LONGEST_OVER_MEAN = 142.9 / 14.4
"""Longest duration (life) of a job over the mean. The published trace has 142.9 and 14.4 hours."""
NUM_QUANTILES = 20
"""Number of different lengths, all equally likely, that a drawn job's iterations have."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job with the time in seconds at which it is submitted."""

    at_s: float
    job: ClusterJob


def arrivals(spec: ClusterSpec) -> list[Arrival]:
    """Return the jobs of a simulation in the order in which they come. Raises `ValueError` if a job
    in the trace is impossible."""
    if spec.jobs.trace is not None:
        found = read_trace(Path(spec.jobs.trace), spec.pools)
    else:
        found = drawn(spec.jobs, spec.seed)
    quotas = spec.core_quotas()
    for one in found:
        check_quota(one.job, quotas)
    return found


def drawn(spec: JobsSpec, seed: int) -> list[Arrival]:
    """Draw the jobs of a simulation; the same seed gives the same jobs. SLO, profile (phases'
    times) and life (duration) of a job are independent: other SLOs leave all else as it is."""
    moments = random.Random(f"arrivals/{seed}")
    times = sorted(moments.uniform(0, spec.hours * 3600) for _ in range(spec.count))
    lives = [
        exp(LIFE_SIGMA * normal_ratio(random.Random(f"life/{seed}/{n}"))) for n in range(spec.count)
    ]
    lives_h = _scaled(lives, spec.mean_hours)
    return [
        Arrival(at_s, _job(spec, f"job-{n:03d}", random.Random(f"job/{seed}/{n}"), life_h))
        for n, (at_s, life_h) in enumerate(zip(times, lives_h, strict=True))
    ]


def _scaled(lives: Sequence[float], mean: float) -> list[float]:
    """Scale jobs' lives (durations) to this mean, none longer than `LONGEST_OVER_MEAN` times it."""
    longest, factor = mean * LONGEST_OVER_MEAN, 1.0
    for _ in range(60):
        cut = [min(life * factor, longest) for life in lives]
        factor *= mean * len(lives) / math.fsum(cut)
    return [min(life * factor, longest) for life in lives]


def _job(spec: JobsSpec, name: str, rng: random.Random, life_h: float) -> ClusterJob:
    kinds = [*PROFILES]
    profile = kinds[int(rng.random() * len(kinds))]
    if spec.profile != "mixed":
        profile = spec.profile
    size = [*SIZES][int(rng.random() * len(SIZES))]
    bounds = PROFILES[profile][size]
    rollout_s, train_s = rng.uniform(*bounds["rollout"]), rng.uniform(*bounds["train"])
    low, high = spec.slo
    slo = low + (high - low) * rng.random()
    factors = iteration_factors(spec.variation)
    needs: dict[str, Any] = {**model_needs(SIZES[size])}
    return ClusterJob(
        name=name,
        rounds=(
            RoundTimes(
                rollout_s=tuple(rollout_s * one for one in factors),
                train_s=tuple(train_s * one for one in factors),
            ),
        ),
        steps=max(round(life_h * 3600 / (rollout_s + train_s)), 1),
        slo=slo,
        tail_share=spec.tail_share,
        **needs,
    )


def iteration_factors(variation: float) -> list[float]:
    """Return equally likely factors for the length of iterations: log-normal, with mean 1.
    `variation`: their standard deviation."""
    if variation == 0:
        return [1.0]
    sigma = math.sqrt(log1p(variation * variation))
    raw = [exp(sigma * normal_quantile((n + 0.5) / NUM_QUANTILES)) for n in range(NUM_QUANTILES)]
    mean = math.fsum(raw) / len(raw)
    return [one / mean for one in raw]


def model_needs(model: str) -> dict[str, float]:
    """Return memory and seconds of starts and of moves onto and off devices for a job of this model
    (a key of `MODELS`), as fields of `ClusterJob`."""
    one = MODELS[model]
    return {
        "rollout_memory_gib": one["rollout_gb"] * GIB_PER_GB,
        "train_memory_gib": one["train_gb"] * GIB_PER_GB,
        "model_gb": one["model_gb"],
        "rollout_switch_s": one["warm_rollout_s"],
        "train_switch_s": one["warm_train_s"],
        "cold_start_s": one["cold_s"],
    }


# -- traces ------------------------------------------------------------------------

_OWN = {*ClusterJob.__struct_fields__} - {"rounds"}
_ROUND = {*RoundTimes.__struct_fields__}
_ELSEWHERE = {"profile": profile_of_run, "scenario": profile_of_scenario}
_TRACE_KEYS = (_OWN | _ROUND | {"arrival_h", "rounds", "hours", "model", *_ELSEWHERE}) - {
    *("kind", "share")
}
_TEXTS = ("name", "owner")
_COUNTS = ("steps", "priority", "rollout_devices", "train_devices")


def read_trace(path: Path, pools: Sequence[PoolSpec] = ()) -> list[Arrival]:
    """Return the jobs of a JSONL trace. `pools`: pools that they may run on; empty: unknown. Raises
    `ValueError`, which says in which line the error is."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"jobs.trace {path}: cannot be read ({reason})") from None
    reader = _Reader(pools)
    found: list[Arrival] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrival = reader.arrival(line, number)
            if found and arrival.at_s < found[-1].at_s:
                raise ValueError(
                    f"arrival_h is {arrival.at_s / 3600:g}, before the job of the line above it "
                    f"({found[-1].at_s / 3600:g}): sort the lines by arrival_h"
                )
            name = arrival.job.name
            if name in lines_of:
                raise ValueError(
                    f'a second job with the name "{name}", as in line {lines_of[name]}: give each '
                    "its own"
                )
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        lines_of[name] = number
        found.append(arrival)
    if not found:
        raise ValueError(f"jobs.trace {path} has no jobs: write one JSON object a line")
    return found


class _Reader:
    """Reads jobs from a trace's lines. A run or scenario named by several lines is loaded once."""

    def __init__(self, pools: Sequence[PoolSpec]) -> None:
        self._pools = pools
        self._known: dict[tuple[str, str], Profile] = {}

    def arrival(self, line: str, number: int) -> Arrival:
        told = _object(line)
        at_h = _number("arrival_h", told.pop("arrival_h", None))
        if at_h < 0:
            raise ValueError(f"arrival_h must be 0 or more hours, not {at_h}")
        profile = self._profile(told)
        needs = {**profile.needs}
        if (model := told.pop("model", None)) is not None:
            if model not in MODELS:
                raise ValueError(f'model is "{model}". Known: {", ".join(MODELS)}')
            needs |= model_needs(model)
        hours = told.pop("hours", None)
        for key, value in told.items():
            _check(key, value)
        needs |= {"name": f"job-{number}", **told}
        if "slo" not in needs:
            raise ValueError("slo is not set: the slowdown that is promised, 1 or more")
        if "steps" not in needs:
            needs["steps"] = _steps(hours, profile)
        return Arrival(at_h * 3600, ClusterJob(rounds=profile.rounds, **needs))

    def _profile(self, told: dict[str, Any]) -> Profile:
        """Take the keys about the phases' times out of a trace's line, and return the times."""
        named = [key for key in _ELSEWHERE if key in told]
        if not named:
            return Profile(_rounds(told), {}, None)
        key, *others = [*named, *sorted((_ROUND | {"rounds"}) & told.keys())]
        if others:
            raise ValueError(f"{key} and {', '.join(others)} exclude each other")
        value = told.pop(key)
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a path, not {json.dumps(value)}")
        if (key, value) not in self._known:
            self._known[key, value] = _ELSEWHERE[key](value, self._pools)
        return self._known[key, value]


def _object(line: str) -> dict[str, Any]:
    try:
        told: Any = json.loads(line, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg})") from None
    if not isinstance(told, dict):
        raise ValueError('must be an object such as {"arrival_h": 0, "rollout_s": 134, ...}')
    for key in told:
        if key not in _TRACE_KEYS:
            raise ValueError(f'there is no key "{key}".{did_you_mean(key, _TRACE_KEYS)}')
    return told


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    told = dict(pairs)
    for key in told:
        if sum(one == key for one, _ in pairs) > 1:
            raise ValueError(f"{key} is said twice")
    return told


def _check(key: str, value: Any) -> None:
    """Raises `ValueError` if the value of a key of a trace's line has the wrong type."""
    if key in _TEXTS:
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a text, not {json.dumps(value)}")
        if key == "name" and not value.strip():
            raise ValueError("name is empty")
        return
    _number(key, value)
    if key in _COUNTS and not isinstance(value, int):
        raise ValueError(f"{key} must be a whole number, not {value}")


def _steps(hours: Any, profile: Profile) -> int:
    """Return a job's steps by its hours or its profile. Raises `ValueError` if neither has them."""
    if hours is not None:
        life_h = _number("hours", hours)
        if not life_h > 0:
            raise ValueError(f"hours must be more than 0, not {hours}")
        mean_s = math.fsum(one.share * math.fsum(one.mean) for one in profile.rounds)
        return max(round(life_h * 3600 / mean_s), 1)
    if profile.steps is None:
        raise ValueError("steps is not set (nor hours, from which it follows)")
    return profile.steps


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, not {json.dumps(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, not {value}")
    return value


def _rounds(told: dict[str, Any]) -> tuple[RoundTimes, ...]:
    """Take the kinds of round out of `told`, the keys of a trace's line: from the list `rounds`, or
    a single kind from `rollout_s` and such keys."""
    kinds = told.pop("rounds", None)
    single = {key: told.pop(key) for key in _ROUND & told.keys()}
    if kinds is None:
        return (_round(single),)
    if single:
        raise ValueError(f"{', '.join(sorted(single))} and rounds exclude each other")
    if not isinstance(kinds, list) or not all(isinstance(one, dict) for one in kinds):
        raise ValueError("rounds must be a list of objects")
    return tuple(_round(one) for one in kinds)


def _round(told: Mapping[str, Any]) -> RoundTimes:
    for key in told:
        if key not in _ROUND:
            raise ValueError(f'rounds have no key "{key}".{did_you_mean(key, _ROUND)}')
    values: dict[str, Any] = dict(told)
    for key in ("rollout_s", "train_s"):
        if key not in told:
            raise ValueError(f"{key} is not set: give seconds, or a list of measured ones")
        listed = told[key] if isinstance(told[key], list) else [told[key]]
        values[key] = tuple(_number(key, one) for one in listed)
    for key in ("share", "between_s", "after_s"):
        if key in told:
            _number(key, told[key])
    return RoundTimes(**values)
