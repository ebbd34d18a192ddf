"""Constants that a log was made with come out of it again; what is missing is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollpacker.core.events import SampleFailed, SampleGenerated
from rollpacker.core.records import Entry, LogError, Record, Session, decode, encode
from rollpacker.report.accounting import Accounting
from rollpacker.report.fit import fit_run, predict_rounds
from rollpacker.report.least_squares import nonnegative_least_squares, robust_fit
from rollpacker.report.log import EventLog
from rollpacker.report.token_clock import iterate_rounds, stretches
from tests.report import costed_run
from tests.report.costed_run import CostedRun
from tests.report.fake_run import write

LAUNCH_S, BYTES_S, CACHED_S, SEQUENCE_S = 1e-3, 6e-4, 5e-7, 2e-5


def bent(n: int, cached: int) -> float:
    return max(LAUNCH_S, BYTES_S + CACHED_S * cached) + SEQUENCE_S * n


@pytest.mark.parametrize(
    "options",
    [{}, {"race": True}, {"slots": 24}, {"slots": 24, "race": True}, {"noise": 0.02, "stall_s": 2}],
    ids=str,
)
def test_constants_of_a_step_come_back(options):
    fitted = fit_run(CostedRun(bent, admission_s=0, **options).run(40))
    step = fitted.step
    assert fitted.num_rounds == 40
    assert step.launch_s == pytest.approx(LAUNCH_S, rel=0.02)
    assert step.bytes_s == pytest.approx(BYTES_S, rel=0.02)
    assert step.per_cached_token_s == pytest.approx(CACHED_S, rel=0.02)
    assert step.per_sequence_s == pytest.approx(SEQUENCE_S, rel=0.02)
    assert step.per_admitted_s == pytest.approx(2e-4, rel=0.05)
    assert (step.num_left_out > 0) == ("stall_s" in options)


def test_what_all_samples_wait_for_at_once_is_the_admissions():
    step = fit_run(CostedRun(bent).run(40)).step
    assert 64 * step.per_admitted_s == pytest.approx(0.0168, rel=0.05)


def test_disturbances_are_spread_over_the_constants():
    counts = np.arange(1.0, 101.0)
    seconds = 2.0 + 0.5 * counts
    seconds[::10] += 30.0
    found = robust_fit(np.column_stack([np.ones(100), counts]), seconds)
    assert found.x == pytest.approx([2.0, 0.5], rel=0.05)
    fixed_s, per_s = found.constants
    assert 100 * fixed_s + per_s * counts.sum() == pytest.approx(seconds.sum())


def test_a_straight_line_stays_one():
    fitted = fit_run(CostedRun(lambda n, cached: 8e-4 + 3e-7 * cached + 1e-5 * n).run(20))
    assert fitted.step.launch_s == 0
    assert fitted.step.bytes_s == pytest.approx(8e-4, rel=0.02)
    assert fitted.step.per_cached_token_s == pytest.approx(3e-7, rel=0.02)
    assert fitted.step.per_sequence_s == pytest.approx(1e-5, rel=0.02)


def test_a_floor_alone_is_a_launch():
    step = fit_run(CostedRun(lambda n, cached: 8e-4 + 1e-5 * n).run(20)).step
    assert (step.bytes_s, step.per_cached_token_s) == (0, pytest.approx(0, abs=1e-12))
    assert step.launch_s == pytest.approx(8e-4, rel=0.02)


def test_a_step_and_a_stretch_cost_the_same():
    drafting = fit_run(drafted_log(30), may_draft=True)
    assert drafting.drafted
    for fit in (fit_run(CostedRun(bent).run(10)).step, drafting.step):
        for n, cached, steps in ((3, 7, 40), (200, 900, 90)):
            run = np.arange(steps)
            one_by_one = fit.step_s(np.full(steps, n), cached + n * run).sum()
            # Stretch: steps, running, cached, admitted, seconds
            parts = stretches(next(iterate_rounds(CostedRun(bent).run(1))), slots=None)
            part = parts[0]._replace(steps=steps, running=n, cached=cached, admitted=0)
            assert fit.seconds([part])[0] == pytest.approx(one_by_one, rel=1e-9)


def test_a_run_without_a_race_foretells_one_with_it():
    # Plain rounds admit as many samples each time: the fit lays all of the admission on them.
    plain = fit_run(CostedRun(bent, seed=1, admission_s=0).run(30))
    race = CostedRun(bent, seed=2, race=True, admission_s=0).run(30)
    errors = predict_rounds(plain.step, race)
    assert set(errors) == {"short", "long", "all"}
    for kind, error in errors.items():
        assert error.ratio == pytest.approx(1, abs=0.01), kind
    assert errors["long"].mean_s > errors["short"].mean_s


def test_everything_around_the_rounds():
    fitted = fit_run(CostedRun(bent).run(20))
    assert fitted.train.fixed_s == pytest.approx(costed_run.TRAIN_FIXED_S, rel=0.02)
    assert fitted.train.per_token_s == pytest.approx(costed_run.TRAIN_TOKEN_S, rel=0.02)
    assert fitted.sync_s == pytest.approx(costed_run.SYNC_S)
    assert fitted.commit_s == pytest.approx(
        0.8 * costed_run.COMMIT_S + 0.2 * costed_run.CHECKPOINT_S
    )
    assert fitted.between_s == pytest.approx(costed_run.FETCH_S)
    assert fitted.exposed_s == pytest.approx(costed_run.REWARD_S)
    checks = [check for found in fitted.checks.values() for check in found]
    assert len(checks) == 20 * 64
    own_s = {check.seconds for check in checks if check.seconds != check.held_s}
    assert own_s == {costed_run.CHECK_S}
    assert min(check.held_s for check in checks) == pytest.approx(costed_run.REWARD_S)
    assert fitted.num_steps == 20
    assert dict(fitted.job) == {"a": 1}


def test_training_that_began_before_the_step_was_due_counts():
    fitted = fit_run(CostedRun(bent, streamed=True).run(20))
    assert fitted.train.fixed_s == pytest.approx(costed_run.TRAIN_FIXED_S, rel=0.02)
    assert fitted.train.per_token_s == pytest.approx(costed_run.TRAIN_TOKEN_S, rel=0.02)


def test_the_workload_is_what_was_asked_and_answered():
    run = CostedRun(bent, race=True, cap=60)
    fitted = fit_run(run.run(12))
    workload = fitted.workload
    finished = [n for pool in workload.pools.values() for n in pool]
    assert sorted(finished) == sorted(run.lengths.values())
    assert workload.rows == tuple(range(run.row))
    assert workload.max_response_tokens == max(finished) == 60
    assert sum(map(len, workload.stopped.values())) > 0
    by_hand = [n for s, n in run.lengths.items() if s.prompt.row == 3]
    assert list(workload.pools[3]) == by_hand
    assert fit_run(CostedRun(bent, cap=9000).run(5)).workload.max_response_tokens is None


def test_the_table_for_people_has_every_constant():
    text = fit_run(CostedRun(bent, race=True).run(10)).describe()
    for word in ("1,00", "0.50 us", "20.0", "40.00 ms", "short", "long", "prefill", "checkpoint"):
        assert word in text, (word, text)


# What is missing.


def test_too_few_rounds():
    with pytest.raises(ValueError, match=r"2 finished rounds.*at least 3.*128 response lengths"):
        fit_run(CostedRun(bent).run(2))
    with pytest.raises(ValueError, match="no generated response"):
        fit_run(CostedRun(bent).entries)


def test_no_training():
    entries = [
        e
        for e in CostedRun(bent).run(4)
        if not (isinstance(e, Record) and type(e.event).__name__ == "Trained")
    ]
    with pytest.raises(ValueError, match="0 training steps"):
        fit_run(entries)


def test_the_wrong_number_of_slots():
    entries = CostedRun(bent, slots=16).run(5)
    assert fit_run(entries).slots == 16
    old = [Session(started_at="", time_s=0.0, step=0, job={}), *entries[1:]]
    with pytest.raises(ValueError, match="5 of 5 rounds do not fit an engine with one slot for"):
        fit_run(old)
    assert fit_run(old, slots=16).step == fit_run(entries).step


def test_rounds_with_failures_are_left_out():
    entries = CostedRun(bent).run(8)
    first = next(
        i
        for i, e in enumerate(entries)
        if type(getattr(e, "event", 0)).__name__ == "SampleGenerated"
    )
    event = entries[first].event
    failed = SampleFailed(time_s=event.time_s, sample=event.sample, reason="lost")
    entries[first] = Record(time_s=event.time_s, event=failed, commands=(), cost_s=0.0)
    fitted = fit_run(entries)
    assert (fitted.num_rounds, fitted.num_skipped) == (7, 1)


def test_truncated_and_foreign_logs(tmp_path):
    path = write(CostedRun(bent).run(6), tmp_path / "events.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    log = EventLog(path)
    assert fit_run(log).num_rounds == 6
    assert log.truncated
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:7], b'{"loss": 0.3}\n', *lines[7:]]))
    with pytest.raises(LogError, match="line 8"):
        fit_run(EventLog(path))


def test_a_session_in_the_midst_of_a_round():
    entries = CostedRun(bent).run(8)
    cut = next(
        i
        for i, e in enumerate(entries)
        if i > len(entries) // 2 and type(getattr(e, "event", 0)).__name__ == "SampleGenerated"
    )
    session = Session(started_at="", time_s=entries[cut].time_s, step=4, job={"a": 2})
    fitted = fit_run([*entries[:cut], session, *entries[cut:]])
    assert fitted.num_rounds == 7
    assert dict(fitted.job) == {"a": 2}


# Parts.


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_nonnegative_least_squares_is_the_best_of_all_subsets(num, seed):
    random = np.random.default_rng(seed)
    a = random.normal(size=(8, num)) * 10.0 ** random.integers(-6, 3, size=num)
    b = random.normal(size=8)
    x = nonnegative_least_squares(a, b)
    assert (x >= 0).all()
    best = np.linalg.norm(b)
    for size in range(1, num + 1):
        for subset in itertools.combinations(range(num), size):
            part = np.linalg.lstsq(a[:, subset], b, rcond=None)[0]
            if (part >= 0).all():
                best = min(best, np.linalg.norm(a[:, subset] @ part - b))
    assert np.linalg.norm(a @ x - b) <= best * (1 + 1e-9) + 1e-12


def test_a_log_tells_its_slots_and_an_old_one_does_not():
    session = Session(started_at="2026-01-01", time_s=0.0, step=0, job={}, slots=12)
    assert decode(encode(session)) == session
    old = '{"session":"2026-01-01","t":0.0,"step":0,"job":{}}'
    assert decode(old).slots is None


def test_accounting_takes_the_slots_from_the_log():
    entries = CostedRun(bent, slots=16).run(4)
    told, given_ = Accounting(), Accounting(slots=16)
    old = [Session(started_at="", time_s=0.0, step=0, job={}), *entries[1:]]
    for one, other in zip(entries, old, strict=True):
        told.feed(one)
        given_.feed(other)
    assert told.seconds() == given_.seconds()
    without = Accounting()
    for entry in old:
        without.feed(entry)
    assert without.seconds()["tail_idle"] > told.seconds()["tail_idle"]


def drafted_log(num_rounds: int, seed: int = 0) -> list[Entry]:
    """A race's log, in which samples come forward by one to four tokens a step when few are left,
    so that those of one length do not end together."""
    rng = np.random.default_rng(seed)
    entries = []
    for entry in CostedRun(bent, race=True).run(num_rounds):
        if isinstance(entry, Record) and isinstance(entry.event, SampleGenerated):
            tokens = max(1, int(entry.event.num_tokens * rng.uniform(0.7, 1.0)))
            entry = structs.replace(entry, event=structs.replace(entry.event, num_tokens=tokens))
        entries.append(entry)
    return entries


def test_an_engine_that_drafts_is_fitted_by_whole_rounds():
    entries = drafted_log(30)
    with pytest.raises(ValueError, match="do not fit an engine"):
        fit_run(entries)
    fitted = fit_run(entries, may_draft=True)
    assert fitted.drafted
    assert (fitted.num_rounds, fitted.num_skipped) == (30, 0)
    for errors in fitted.errors.values():
        assert errors.ratio == pytest.approx(1.0, abs=0.05)
    others = predict_rounds(fitted.step, drafted_log(30, seed=1), may_draft=True)
    assert others["all"].num == 30
    assert others["all"].ratio == pytest.approx(1.0, abs=0.1)


def test_an_engine_that_may_draft_and_does_not_is_fitted_as_ever():
    entries = list(CostedRun(bent, race=True).run(20))
    assert fit_run(entries, may_draft=True) == fit_run(entries)
