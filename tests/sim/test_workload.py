"""The workload: the law that was asked for, and values that depend on their names alone."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from rollpacker.config.load import ConfigError
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.length_laws import CHUNK
from rollpacker.sim.presets import LENGTH_LAWS, PROMPTS, REWARD_KINDS
from rollpacker.sim.scenario import Cluster, OracleSpec, RolloutSpec, Scenario
from rollpacker.sim.workload import BLOCK_ROWS, MAX_BLOCKS, Workload
from rollpacker.sim.workload_spec import LengthLaw, RewardStage

NORMAL = NormalDist()
SHARES = {"math": 0.34, "code": 0.33, "judge": 0.33}


def scenario(
    *rewards: RewardStage,
    cap: int = 16384,
    prompts: int = 128,
    samples: int = 8,
    seed: int = 0,
    window: int = 0,
    **law: Any,
) -> Scenario:
    return Scenario(
        name="test",
        model="qwen2.5-7b",
        cluster=Cluster(gpu="h800", gpus=8),
        rollout=RolloutSpec(
            prompts_per_step=prompts, samples_per_prompt=samples, max_response_tokens=cap
        ),
        lengths=LengthLaw(**(law or {"preset": "rollpacker-code"})),
        rewards=rewards,
        oracle=OracleSpec(reorder_window=window),
        seed=seed,
    )


def mixed(*, hard: float = 0.0, **others: Any) -> Scenario:
    prompts = {"hard_prompts": hard, "hard_prompt_cap_probability": 0.15}
    laws = {name: LengthLaw(preset=f"rollpacker-{name}", **prompts) for name in SHARES}
    stages = [RewardStage(kind=k, share=s, lengths=laws[k]) for k, s in SHARES.items()]  # type: ignore[arg-type]
    return scenario(*stages, **others)


def drawn(workload: Workload, rows: int, attempt: int = 0, samples: int = CHUNK) -> np.ndarray:
    """(rows, samples)"""
    prompts = [PromptId("any", 0, row) for row in range(rows)]
    return np.array([workload.lengths(prompt, attempt)[:samples] for prompt in prompts])


# -- the cursor --------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares", [(0.34, 0.33, 0.33), (0.333, 0.333, 0.333), (0.7, 0.2, 0.1), (0.6180339, 0.3819661)]
)
def test_every_prefix_keeps_the_mix(shares: tuple[float, ...]) -> None:
    stages = [RewardStage(kind=k, share=s) for k, s in zip(SHARES, shares, strict=False)]  # type: ignore[arg-type]
    prompts, epoch_ended, data_ended = Workload(scenario(*stages)).take(3000)
    assert (epoch_ended, data_ended) == (False, False)
    assert [prompt.row for prompt in prompts] == list(range(3000))
    counts: Counter[str] = Counter()
    for taken, prompt in enumerate(prompts, 1):
        counts[prompt.source] += 1
        for stage in stages:
            due = stage.share / sum(shares) * taken
            assert abs(counts[stage.kind] - due) <= 1.5, (taken, counts)


def test_how_many_are_taken_at_once_does_not_matter() -> None:
    one, many = Workload(mixed()), Workload(mixed())
    singles = [prompt for _ in range(100) for prompt in one.take(1)[0]]
    assert tuple(singles) == many.take(40)[0] + many.take(60)[0]
    with pytest.raises(ValueError, match="at least 1"):
        one.take(0)


def test_without_rewards_there_is_one_source() -> None:
    assert {prompt.source for prompt in Workload(scenario()).take(10)[0]} == {"none"}


def test_the_oracle_sorts_window_by_window() -> None:
    workload = Workload(mixed(prompts=16, window=5, samples=8))
    prompts = [prompt for _ in range(20) for prompt in workload.take(8)[0]]
    longest = [max(workload.lengths(prompt, 0)[:8]) for prompt in prompts]
    for start in (0, 80):
        window = slice(start, start + 80)
        assert sorted(prompt.row for prompt in prompts[window]) == list(range(start, start + 80))
        for source in SHARES:
            own = [
                tokens
                for prompt, tokens in zip(prompts[window], longest[window], strict=True)
                if prompt.source == source
            ]
            assert own == sorted(own)
    assert longest != sorted(longest)
    unsorted = Workload(mixed(prompts=16, samples=8)).take(160)[0]
    assert [prompt.source for prompt in prompts] == [prompt.source for prompt in unsorted]


# -- the law -----------------------------------------------------------------------


@pytest.mark.parametrize("preset", LENGTH_LAWS)
@pytest.mark.parametrize("correlation", [0.0, 0.05, 0.4])
def test_quantiles_come_out(preset: str, correlation: float) -> None:
    law = {"within_prompt_correlation": correlation, "hard_prompts": 0.0}
    workload = Workload(scenario(preset=preset, **law))
    lengths = drawn(workload, 8000)
    tolerance = 0.005 if correlation < 0.1 else 0.01
    for quantile, tokens in LENGTH_LAWS[preset].items():
        if tokens < 16384:
            assert np.mean(lengths <= tokens) == pytest.approx(quantile, abs=tolerance)
    capped = 1 - next(q for q, tokens in LENGTH_LAWS[preset].items() if tokens == 16384)
    assert np.mean(lengths == 16384) == pytest.approx(capped, abs=0.0025)
    assert lengths.min() >= 1 and lengths.max() == 16384


def test_between_quantiles_the_logarithm_is_linear() -> None:
    workload = Workload(scenario(quantiles={0.2: 10, 0.6: 1000}, cap=4000))
    lengths = drawn(workload, 8000)
    assert np.mean(lengths <= 100) == pytest.approx(0.4, abs=0.01)
    assert np.mean(lengths <= 3) == pytest.approx(0.2 * np.log(3.5) / np.log(10), abs=0.01)
    assert np.mean(lengths == 1000) == pytest.approx(0.4, abs=0.01)
    assert lengths.max() == 1000


@pytest.mark.parametrize("correlation", [0.0, 0.05, 0.2, 0.4, 0.9])
def test_correlation_comes_out(correlation: float) -> None:
    """Of the normal scores, inside an attempt and between a prompt's attempts."""
    law = {q / 1000: 10 * q for q in range(1, 1000)}
    workload = Workload(scenario(quantiles=law, within_prompt_correlation=correlation))
    scores = []
    for attempt in (0, 1):
        uniform = np.clip(drawn(workload, 6000, attempt) / 10_000, 5e-4, 1 - 5e-4)
        scores.append(np.vectorize(NORMAL.inv_cdf)(uniform))
    first, second = scores
    within = np.mean([np.mean(first[:, i] * first[:, i + 1]) for i in range(0, CHUNK, 2)])
    between = np.mean([np.mean(first[:, i] * second[:, i]) for i in range(CHUNK)])
    assert within == pytest.approx(correlation, abs=0.03)
    assert between == pytest.approx(correlation, abs=0.03)


def test_all_correlation_is_one_length_per_prompt() -> None:
    lengths = drawn(Workload(scenario(quantiles={0.5: 600}, within_prompt_correlation=1.0)), 50)
    assert (lengths == lengths[:, :1]).all()
    assert len(set(lengths[:, 0])) > 10


def test_hard_prompts() -> None:
    """8 % of the prompts run to the cap in 15 % of their responses; the others are untouched."""
    law = {"quantiles": {0.01: 50, 1.0: 500}, "cap": 8192}
    hard = drawn(Workload(scenario(**law, hard_prompts=0.08)), 10_000)
    easy = drawn(Workload(scenario(**law)), 10_000)
    capped = hard == 8192
    assert capped.mean() == pytest.approx(0.08 * 0.15, abs=0.0012)
    assert capped.any(axis=1).mean() == pytest.approx(0.08 * (1 - 0.85**CHUNK), abs=0.008)
    assert (hard[~capped] == easy[~capped]).all()
    always = Workload(scenario(**law, hard_prompts=1.0, hard_prompt_cap_probability=1.0))
    assert (drawn(always, 20) == 8192).all()


def test_a_preset_brings_its_own_hard_prompts() -> None:
    for name, fitted in PROMPTS.items():
        assert LengthLaw(preset="rollpacker-math").of_prompts(name) == fitted
        assert LengthLaw(preset="rollpacker-math", **{name: 0.5}).of_prompts(name) == 0.5
    assert LengthLaw(quantiles={0.5: 600}).of_prompts("hard_prompts") == 0.0
    lengths = drawn(Workload(scenario(preset="rollpacker-judge", cap=16384)), 8000)
    hard = PROMPTS["hard_prompts"] * PROMPTS["hard_prompt_cap_probability"]
    lucky = 1 - next(q for q, n in LENGTH_LAWS["rollpacker-judge"].items() if n == 16384)
    assert np.mean(lengths == 16384) == pytest.approx(hard + lucky, abs=0.002)


def test_the_policys_own_mean_and_p95() -> None:
    """Against an integral over the quantiles, one per law, mixed by share; and against draws."""
    grid = (np.arange(400_000) + 0.5) / 400_000
    values = [
        np.minimum(np.exp(np.interp(grid, [0, *law], np.log([1, *law.values()]))), 8192)
        for law in LENGTH_LAWS.values()
    ]
    workload = Workload(mixed(cap=8192))
    mean = sum(share * v.mean() for share, v in zip(SHARES.values(), values, strict=True))
    assert workload.policy_length_mean == pytest.approx(mean, rel=0.003)
    assert workload.policy_length_p95 == pytest.approx(
        np.quantile(np.concatenate(values), 0.95), rel=0.02
    )
    hard = Workload(mixed(cap=8192, hard=0.2)).policy_length_mean
    capped = 0.2 * 0.15
    assert hard == pytest.approx(capped * 8192 + (1 - capped) * mean, rel=0.003)
    single = Workload(scenario(preset="rollpacker-math", hard_prompts=0.08))
    lengths = drawn(single, 20_000)
    assert single.policy_length_mean == pytest.approx(lengths.mean(), rel=0.02)
    assert single.policy_length_p95 == pytest.approx(np.quantile(lengths, 0.95), rel=0.05)


# -- keyed by name -----------------------------------------------------------------


def digest(workload: Workload) -> str:
    prompts = workload.take(700)[0]
    launches = [(prompt, attempt) for prompt in prompts for attempt in (0, 1)]
    samples = [SampleId(p, index, a) for p, a in launches for index in (0, 9)]
    seen = [
        [(str(prompt), workload.lengths(prompt, attempt)) for prompt, attempt in launches],
        [workload.verdict(sample) for sample in samples],
    ]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def test_two_processes_agree() -> None:
    code = "from tests.sim.test_workload import *; print(digest(Workload(mixed(hard=0.1))))"
    digests = set()
    for hash_seed in ("0", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1
    assert digests == {digest(Workload(mixed(hard=0.1))) + "\n"}


def test_the_seed_decides() -> None:
    digests = {digest(Workload(mixed(seed=seed))) for seed in (0, 1, -1, 2**70)}
    assert len(digests) == 4


def test_values_do_not_depend_on_what_else_is_asked_for() -> None:
    prompts = Workload(mixed()).take(40)[0]
    expected = [Workload(mixed()).lengths(prompt, 1) for prompt in prompts]
    busy = Workload(mixed())
    for row in range(0, 100 * BLOCK_ROWS, BLOCK_ROWS):
        busy.lengths(PromptId("math", 0, row), 0)
        busy.verdict(SampleId(PromptId("math", 0, row), 0, 3))
    assert [busy.lengths(prompt, 1) for prompt in reversed(prompts)] == expected[::-1]


def test_values_do_not_depend_on_how_many_are_asked_for() -> None:
    few, many = Workload(mixed(samples=4)), Workload(mixed(samples=40))
    for prompt in few.take(30)[0]:
        assert len(many.lengths(prompt, 0)) >= 80
        assert many.lengths(prompt, 0)[:CHUNK] == few.lengths(prompt, 0)
        assert few.lengths(prompt, 0, 70)[:70] == many.lengths(prompt, 0)[:70]
        far = SampleId(prompt, 5 * CHUNK, 2)
        assert few.verdict(far) == many.verdict(far)


def test_systems_and_caps_share_their_luck() -> None:
    base = mixed()
    off = dataclasses.replace(base, tail_batching=TailBatchingConfig(enabled=False))
    assert digest(Workload(base)) == digest(Workload(off))
    long, short = drawn(Workload(mixed()), 400), drawn(Workload(mixed(cap=2048)), 400)
    assert (np.minimum(long, 2048) == short).all()


def test_a_relaunch_draws_anew() -> None:
    workload = Workload(mixed())
    first, second = drawn(workload, 300), drawn(workload, 300, attempt=1)
    assert np.mean(first == second) < 0.1


# -- verdicts ----------------------------------------------------------------------


def verdicts(stage: RewardStage, rows: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    workload = Workload(scenario(stage))
    samples = [SampleId(p, i, 0) for p in workload.take(rows)[0] for i in range(0, 20, 2)]
    seconds, correct = zip(*map(workload.verdict, samples), strict=True)
    return np.array(seconds), np.array(correct)


def test_code_takes_as_long_as_published() -> None:
    seconds, correct = verdicts(RewardStage(kind="code", share=1.0))
    for quantile, value in (REWARD_KINDS["code"].seconds_quantiles or {}).items():
        assert np.mean(seconds <= value) == pytest.approx(quantile, abs=0.006)
    assert np.mean(seconds > 30) == pytest.approx(0.051, abs=0.003)
    assert seconds.min() >= 0.13 and seconds.max() <= 31.3
    assert correct[seconds <= 2.7].mean() == pytest.approx(0.5, abs=0.01)
    assert not correct[seconds > 2.8].any()


def test_timeouts_are_wrong_answers() -> None:
    stage = RewardStage(kind="code", share=1.0, seconds_quantiles={0.5: 20.0, 1.0: 60.0})
    seconds, correct = verdicts(stage, 500)
    assert not correct[seconds > 30].any()
    assert correct[seconds <= 30].mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        (RewardStage(kind="judge", share=1.0, calls_per_s=4.0), 0.25),
        (RewardStage(kind="math", share=1.0), 0.01),
        (RewardStage(kind="none", share=1.0), 0.0),
    ],
)
def test_kinds_that_take_the_same_time_always(stage: RewardStage, seconds: float) -> None:
    found, correct = verdicts(stage, 500)
    assert (found == seconds).all()
    assert correct.mean() == pytest.approx(0.5, abs=0.03)


# -- traces and recorded prompts ---------------------------------------------------


def trace(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_trace_of_lengths(tmp_path: Path) -> None:
    recorded = [5, 80, 80, 200, 9000]
    path = trace(tmp_path, *[json.dumps({"length": n}) for n in recorded], "")
    workload = Workload(scenario(trace=path, cap=4096, within_prompt_correlation=0.2))
    lengths = drawn(workload, 5000)
    assert set(lengths.ravel()) == {5, 80, 200, 4096}
    for value, share in ((5, 0.2), (80, 0.4), (200, 0.2), (4096, 0.2)):
        assert np.mean(lengths == value) == pytest.approx(share, abs=0.015)
    assert workload.policy_length_mean == pytest.approx((5 + 80 + 80 + 200 + 4096) / 5, rel=1e-3)


def test_a_trace_of_prompts(tmp_path: Path) -> None:
    lines = ['{"prompt": "a", "lengths": [3, 4]}', '{"prompt": 7, "lengths": [50, 60, 9999]}']
    workload = Workload(scenario(trace=trace(tmp_path, *lines), cap=100, samples=2))
    first, second, third = workload.take(3)[0]
    assert workload.lengths(first, 0)[:2] == [3, 4]
    assert workload.lengths(second, 0)[:3] == [50, 60, 100]
    assert set(workload.lengths(first, 0)) == set(workload.lengths(third, 0)) == {3, 4}
    assert workload.policy_length_mean == pytest.approx((3.5 + 70) / 2)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"length": 5}', '{"length": 6}', '{"len'], ["line 3", "cut off", "head -n 2"]),
        (['{"length": 5}', "", '{"length": "x"}'], ["line 3", '"x"', "2 lines before"]),
        (['{"length": 0}'], ["line 1", "length 0", "Nothing before it"]),
        (['{"length": true}'], ["line 1", "true"]),
        (['{"length": 1.5}'], ["line 1", "1.5"]),
        (['{"event": "sample"}'], ["line 1", '{"length": n}', "is it a trace"]),
        (["[1, 2]"], ["line 1", '{"length": n}']),
        (['{"length": 5}', '{"prompt": 1, "lengths": [2]}'], ["line 2", "names a prompt"]),
        (['{"prompt": 1, "lengths": [2]}', '{"length": 5}'], ["line 2", "names no prompt"]),
        (['{"prompt": 1, "lengths": []}'], ["line 1", "[]", "whole numbers"]),
        (['{"lengths": [4]}'], ["line 1", "no prompt"]),
        (['{"prompt": 1, "lengths": [2]}'] * 2, ["line 2", "line 1 again"]),
        (["", ""], ["holds no lengths", '{"length": 120}']),
        (["[" * 100_000], ["line 1"]),
    ],
)
def test_bad_traces(tmp_path: Path, lines: list[str], expected: list[str]) -> None:
    path = trace(tmp_path, *lines)
    with pytest.raises(ConfigError) as caught:
        Workload(scenario(trace=path))
    for part in (path, *expected):
        assert part in str(caught.value)


def test_only_a_line_feed_ends_a_line_of_a_trace(tmp_path: Path) -> None:
    """JSON allows a carriage return between two values, and U+2028 inside a text."""
    path = tmp_path / "separators.jsonl"
    path.write_bytes(
        b'{"prompt": "a",\r"lengths": [11]}\r\n'
        + '{"prompt": "b\u2028c", "lengths": [22]}\n'.encode()
    )
    workload = Workload(scenario(trace=str(path), cap=100, samples=2))
    prompts, _, _ = workload.take(2)
    assert [workload.lengths(prompt, 0)[0] for prompt in prompts] == [11, 22]


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            Workload(scenario(trace=str(path)))


def test_recorded_prompts_come_in_order_and_again() -> None:
    pools = {40: [7, 8, 9], 3: [100, 200], 12: [5]}
    workload = Workload.from_pools(pools, max_response_tokens=150, samples_per_prompt=2)
    prompts = workload.take(2)[0] + workload.take(5)[0]
    assert [(p.epoch, p.row) for p in prompts] == [
        *[(0, 40), (0, 3), (0, 12)],
        *[(1, 40), (1, 3), (1, 12)],
        (2, 40),
    ]
    assert workload.lengths(prompts[0], 0)[:3] == [7, 8, 9]
    assert workload.lengths(prompts[1], 0)[:2] == [100, 150]
    assert set(workload.lengths(prompts[0], 1)) <= {7, 8, 9}
    again = [workload.lengths(prompts[i], a) for i, a in ((0, 0), (0, 1), (3, 0), (6, 0))]
    assert len({tuple(lengths) for lengths in again}) == 4, "each launch has its own luck"
    assert workload.policy_length_mean == pytest.approx((8 + 125 + 5) / 3)
    assert workload.verdict(SampleId(prompts[0], 0, 0))[0] == 0.0


def test_only_the_first_launch_meets_the_recorded_order() -> None:
    pools = {5: list(range(1, 21))}
    workload = Workload.from_pools(pools, max_response_tokens=99, samples_per_prompt=8)
    first, second = workload.take(2)[0]
    assert workload.lengths(first, 0, 20)[:20] == pools[5]
    for other in (workload.lengths(first, 1), workload.lengths(second, 0)):
        assert sum(drawn == kept for drawn, kept in zip(other, pools[5], strict=False)) < 6


def test_recorded_prompts_are_drawn_evenly() -> None:
    pools = {row: [10, 20, 30, 40] for row in range(2000)}
    workload = Workload.from_pools(pools, max_response_tokens=99, samples_per_prompt=4, seed=3)
    counts = Counter(np.array([workload.lengths(p, 1) for p in workload.take(2000)[0]]).ravel())
    for length in (10, 20, 30, 40):
        assert counts[length] / counts.total() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("pools", [{}, {3: []}])
def test_nothing_recorded(pools: dict[int, list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one recorded length"):
        Workload.from_pools(pools, max_response_tokens=10, samples_per_prompt=2)


# -- cost --------------------------------------------------------------------------


def test_a_large_step_is_cheap() -> None:
    """Fresh prompts of a 128-GPU step, 640 x 10: about 1.3 ms on a server core."""
    workload = Workload(mixed())
    best = float("inf")
    for _ in range(6):
        started = time.process_time()
        for _ in range(10):
            for prompt in workload.take(640)[0]:
                workload.lengths(prompt, 0)
        best = min(best, (time.process_time() - started) / 10)
    assert best < 3e-3, f"{best * 1e3:.2f} ms a step"


def test_memory_stays_flat() -> None:
    workload = Workload(mixed())

    def walk(first: int, last: int) -> int:
        for block in range(first, last):
            workload.lengths(PromptId("math", 0, block * BLOCK_ROWS), 0)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    full = walk(0, MAX_BLOCKS + 5)
    later = walk(MAX_BLOCKS + 5, 2 * MAX_BLOCKS)
    tracemalloc.stop()
    assert later < 1.02 * full


# -- draws that are kept -------------------------------------------------------------


def test_what_the_latest_has_drawn_is_the_same_and_kept() -> None:
    fresh = digest(Workload(mixed()))
    assert [digest(Workload.of(mixed())) for _ in range(3)] == [fresh] * 3
    assert Workload.of(mixed())._lengths is Workload.of(mixed())._lengths


def test_the_kept_draws_are_only_of_the_same_prompts() -> None:
    others = [mixed(seed=1), mixed(cap=2048), mixed(hard=0.1), scenario()]
    for one in others:
        Workload.of(mixed()).lengths(PromptId("none", 0, 0), 0)
        assert digest(Workload.of(one)) == digest(Workload(one))


def test_a_cursor_begins_anew_where_draws_are_kept() -> None:
    first, second = Workload.of(mixed()), Workload.of(mixed(prompts=16, window=5, samples=8))
    assert first.take(9) == Workload.of(mixed()).take(9)
    assert second.take(160) == Workload(mixed(prompts=16, window=5, samples=8)).take(160)


def test_a_trace_is_read_each_time(tmp_path: Path) -> None:
    for length in (10, 20):
        path = trace(tmp_path, json.dumps({"length": length}))
        assert set(drawn(Workload.of(scenario(trace=path)), 10).ravel()) == {length}
