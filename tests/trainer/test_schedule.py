"""Learning-rate schedules against transformers' own, stepped."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    SchedulerType,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from rollpacker.trainer.schedule import KNOWN, check_schedule, learning_rate
from rollpacker.trainer.trainer import TrainConfig

WARMUP, TOTAL = 4, 20


def config_of(schedule: str, **settings) -> TrainConfig:
    defaults = {"steps": TOTAL, "learning_rate": 3e-4, "warmup_steps": WARMUP}
    return TrainConfig(schedule=schedule, **(defaults | settings))


def transformers_rates(make, **settings) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    schedule = make(optimizer, num_warmup_steps=WARMUP, **settings)
    rates = []
    for _ in range(TOTAL):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    "name, options, make, known_length",
    [
        ("constant", {}, get_constant_schedule_with_warmup, False),
        ("constant_with_warmup", {}, get_constant_schedule_with_warmup, False),
        ("linear", {}, get_linear_schedule_with_warmup, True),
        ("cosine", {}, get_cosine_schedule_with_warmup, True),
        ("cosine", {"num_cycles": 1.5}, get_cosine_schedule_with_warmup, True),
        (
            "cosine_with_restarts",
            {"num_cycles": 3},
            get_cosine_with_hard_restarts_schedule_with_warmup,
            True,
        ),
        (
            "polynomial",
            {"power": 2.0, "lr_end": 1e-5},
            get_polynomial_decay_schedule_with_warmup,
            True,
        ),
        ("inverse_sqrt", {"timescale": 9}, get_inverse_sqrt_schedule, False),
        ("cosine_with_min_lr", {"min_lr": 1e-5}, get_cosine_with_min_lr_schedule_with_warmup, True),
        ("warmup_stable_decay", {"num_decay_steps": 6}, get_wsd_schedule, True),
    ],
)
def test_schedules_after_the_warmup_are_those_of_transformers(name, options, make, known_length):
    config = config_of(name, schedule_options=options)
    check_schedule(config)
    length = {"num_training_steps": TOTAL} if known_length else {}
    theirs = transformers_rates(make, **options, **length)
    ours = [learning_rate(step, config, TOTAL) for step in range(TOTAL)]
    assert ours[WARMUP:] == pytest.approx(theirs[WARMUP:], rel=1e-12)
    assert ours[:WARMUP] == pytest.approx([3e-4 * (i + 1) / 5 for i in range(WARMUP)])


def test_cosine_ends_at_its_floor():
    config = config_of("cosine", min_learning_rate_ratio=0.1)
    ours = [learning_rate(step, config, TOTAL) for step in range(TOTAL)]
    make = get_cosine_with_min_lr_schedule_with_warmup
    theirs = transformers_rates(make, num_training_steps=TOTAL, min_lr_rate=0.1)
    assert ours[WARMUP:] == pytest.approx(theirs[WARMUP:])


def test_linear_ends_at_its_floor():
    config = config_of(
        "linear", steps=10, learning_rate=2.0, warmup_steps=0, min_learning_rate_ratio=0.5
    )
    rates = [learning_rate(step, config, 10) for step in range(10)]
    assert rates[0] == 2.0 and rates[-1] == pytest.approx(1.1)


@pytest.mark.parametrize("name", ["linear", "cosine", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, WARMUP, 2 * TOTAL])
def test_steps_beyond_the_end_go_on_at_the_last_rate(name, warmup):
    config = config_of(name, warmup_steps=warmup)
    last = learning_rate(TOTAL - 1, config, TOTAL)
    assert last > 0
    assert [learning_rate(step, config, TOTAL) for step in (TOTAL, TOTAL + 7)] == [last, last]


def test_without_an_end_the_rate_stays():
    config = TrainConfig(epochs=1, learning_rate=3e-4, warmup_steps=2)
    check_schedule(config)
    rates = [learning_rate(step, config, None) for step in (0, 1, 2, 1000)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4])


def test_every_schedule_of_transformers_is_known_or_refused():
    assert {t.value for t in SchedulerType} == {*KNOWN, "reduce_lr_on_plateau", "greedy"}
    needed = {
        "cosine_with_min_lr": {"min_lr_rate": 0.1},
        "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
        "warmup_stable_decay": {"num_decay_steps": 5},
    }
    for name in KNOWN:
        config = config_of(name, schedule_options=needed.get(name, {}))
        check_schedule(config)
        assert 0 < learning_rate(WARMUP, config, TOTAL) <= 3e-4


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"schedule": "cosin"}, "schedule=cosin is not known: use one of linear, cosine, "),
        ({"schedule": "greedy"}, "follows the loss, not the step"),
        ({"schedule": "reduce_lr_on_plateau"}, "follows the loss, not the step"),
        (
            {"schedule": "cosine", "schedule_options": {"cycles": 2}},
            "schedule_options.cycles is not an option of cosine, which has num_cycles",
        ),
        (
            {"schedule": "linear", "schedule_options": {"num_training_steps": 2}},
            "not an option of linear, which has none",
        ),
        (
            {"schedule": "warmup_stable_decay", "schedule_options": {"warmup_type": 1}},
            "warmup_type is not an option",
        ),
        ({"schedule": "warmup_stable_decay"}, "num_decay_steps"),
        ({"schedule": "cosine_with_min_lr"}, "min_lr"),
        ({"schedule": "polynomial", "schedule_options": {"lr_end": 1.0}}, "lr_end"),
        (
            {"schedule": "cosine_with_min_lr", "schedule_options": {"min_lr_rate": float("nan")}},
            "min_lr_rate must be a finite number, not nan",
        ),
        (
            {"schedule": "polynomial", "schedule_options": {"lr_end": -1e-3}},
            "schedule=polynomial gives the learning rate -",
        ),
        (
            {"schedule": "inverse_sqrt", "min_learning_rate_ratio": 0.1},
            "is for linear and cosine, not for inverse_sqrt",
        ),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError) as caught:
        check_schedule(config_of(**settings))
    assert message in str(caught.value)
