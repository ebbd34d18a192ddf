"""A trainer in stages, simulated: the authors' numbers, what a phase costs, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from rollpacker.config.document import ConfigError
from rollpacker.pipeline.plan.order import orders_to_csv
from rollpacker.pipeline.plan.plan import plan_1f1b
from rollpacker.pipeline.sim.phase import NUM_FORWARD_SWEEPS, DelayAt, Pipeline, PipelineResult
from rollpacker.pipeline.sim.spec import DrawnDelays
from rollpacker.sim.latency import Calibration
from rollpacker.sim.result import PIPELINE, SystemResult
from rollpacker.sim.scenario import Scenario, load_scenario, with_pipeline
from rollpacker.sim.simulate import machine_of, simulate

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "configs/scenarios/pipeline-14b.yaml"
DERIVED = (
    *("train.pipeline.op_times=null", "train.pipeline.stages=4", "train.pipeline.slow_links_s={}"),
    *("train.pipeline.micro_batches=null", "steps=2"),
)
"""Seconds of ops from the scenario's training cost, four stages, nothing slow."""


def scenario(*overrides: str) -> Scenario:
    return load_scenario(PATH, ["steps=2", *overrides])


def pipeline(*overrides: str) -> Pipeline:
    made = machine_of(scenario(*overrides), Calibration()).pipeline
    assert made is not None
    return made


def result_of(made: Scenario) -> tuple[SystemResult, PipelineResult]:
    result = simulate(made)
    assert result.pipeline is not None
    return result, result.pipeline


def test_the_scenario_is_the_authors_iteration():
    """At 60 ms, with the fixed costs; measured were 2334, 3257, 1691 and 891 ms."""
    seconds = {
        name: result_of(with_pipeline(scenario("steps=1"), name))[1].sweep_s
        for name in ("1f1b", "zero-bubble", "host", "adapted", "ready")
    }
    expected = {
        "1f1b": 2.372,
        "zero-bubble": 3.213,
        "host": 1.616,
        "adapted": 0.835,
        "ready": 0.835,
    }
    assert seconds == pytest.approx(expected, abs=1e-6)


def test_the_time_of_a_phase_is_work_or_idle():
    """GPU-seconds of the phases: those of the same work without stages, and the bubble."""
    result, found = result_of(scenario(*DERIVED))
    made = scenario(*DERIVED)
    bare = simulate(replace(made, train=replace(made.train, pipeline=None)))
    assert PIPELINE not in bare.bubble and bare.pipeline is None
    gpus, fixed_s = made.cluster.gpus, 0.137
    staged_s = sum(step.train_s - fixed_s for step in result.steps)
    work_s = sum(step.train_s for step in bare.steps)
    assert result.bubble[PIPELINE] == pytest.approx(gpus * (staged_s - work_s), rel=1e-6)
    assert found.bubble_share == pytest.approx(1 - work_s / staged_s, rel=1e-6)
    assert found.bubble_share > 0.1
    others = {cause: s for cause, s in result.bubble.items() if cause != PIPELINE}
    assert others == pytest.approx(bare.bubble)


def test_without_the_key_nothing_tells_of_stages():
    made = scenario()
    plain = simulate(replace(made, train=replace(made.train, pipeline=None))).to_plain()
    assert "pipeline" not in plain and "pipeline" not in plain["bubble"]


def test_a_phase_is_two_forward_sweeps_and_one_with_gradients():
    made = pipeline("train.pipeline.slow_links_s={}", "train.pipeline.host_fixed_s=0")
    step = made.train([1000] * 192, 5.0)
    # 24 micro-batches through stages of 8 and 9 ms.
    forward_s = 0.008 + 0.009 * (7 + 23)
    assert step.seconds - step.sweep_s == pytest.approx(NUM_FORWARD_SWEEPS * forward_s)
    assert step.slowest.spans[0][0].start_s == pytest.approx(5.0 + NUM_FORWARD_SWEEPS * forward_s)
    assert step.sweep_s == pytest.approx(0.653)


def test_micro_batches_are_packed_by_tokens_and_dealt_to_replicas():
    made = pipeline(*DERIVED, "train.pipeline.micro_batch_tokens=4096")
    step = made.train([1000] * 192, 0.0)
    # 64 GPUs in stages of one: 16 replicas of 12 responses, 4 a micro-batch.
    assert step.num_micro_batches == 3
    assert max(step.slowest.peak_live_tokens) <= 12_000


def test_links_are_direct_until_one_is_slow():
    automatic = ("train.pipeline.links=auto",)
    kinds = [
        result_of(scenario(*automatic, f"train.pipeline.slow_links_s={delays}"))[1].links
        for delays in ("{}", "{2: 0.005}", "{2: 0.015}")
    ]
    assert kinds == ["direct", "direct", "host"]
    slow_stage = ("train.pipeline.slow_links_s={}", "train.pipeline.slow_stages={3: 3}")
    assert result_of(scenario(*automatic, *slow_stage))[1].links == "direct"


def test_another_split_is_proposed_and_taken_where_a_stage_is_slow():
    slow = (
        *(*DERIVED, "cluster.gpus=8", "train.pipeline.micro_batch_tokens=4096"),
        "train.pipeline.slow_stages={1: 2}",
    )
    before = result_of(scenario(*slow))[1]
    after = result_of(scenario(*slow, "train.pipeline.relayout=do"))[1]
    assert before.relayout == after.layers != before.layers
    assert sum(after.layers) == sum(before.layers) == 48
    assert after.layers[1] < before.layers[1] and not after.relayout
    assert before.sweep_s > 1.3 * after.sweep_s
    assert not result_of(scenario(*slow, "train.pipeline.relayout=never"))[1].relayout


def test_delays_are_drawn_by_seed_and_held():
    drawn = DrawnDelays(mean_s=0.03, sd_s=0.01, hold_s=(0.05, 0.4), links=(1,))
    times = [0.013 * n for n in range(400)]
    one, other = DelayAt(drawn, 3, seed=1), DelayAt(drawn, 3, seed=1)
    delays = [one(1, now_s) for now_s in times]
    assert delays == [other(1, now_s) for now_s in reversed(times)][::-1]
    assert delays != [DelayAt(drawn, 3, seed=2)(1, now_s) for now_s in times]
    assert one(0, 1.0) == one(2, 1.0) == 0.0
    changes = sum(a != b for a, b in itertools.pairwise(delays))
    assert 13 <= changes <= 104  # 5.2 s in pieces of 0.05 to 0.4
    assert 0.02 < sum(delays) / len(delays) < 0.04 and min(delays) >= 0


def test_an_adapted_plan_learns_what_links_do_now():
    """Of delays that are not what they were said to be, the next plan knows."""
    made = pipeline(
        *("train.pipeline.order=adapted", "train.pipeline.slow_links_s={}"),
        "train.pipeline.drawn_delays={mean_s: 0.06, sd_s: 0, hold_s: [1, 1], links: [6]}",
    )
    assert [link.latency_s for link in made._expected] == [0.0] * 6 + [0.06]
    steps = [made.train([1000] * 192, 3.0 * n) for n in range(2)]
    assert steps[1].sweep_s == pytest.approx(steps[0].sweep_s) == pytest.approx(0.835, abs=0.001)
    assert made._expected[6].latency_s == pytest.approx(0.06)


def test_a_schedule_from_a_file_is_what_was_written(tmp_path):
    _, found = result_of(scenario())
    path = tmp_path / "plan.csv"
    path.write_text(orders_to_csv(found.last.orders))
    again = result_of(scenario(f"train.pipeline.order={path}"))[1]
    assert again.last.orders == found.last.orders
    assert again.sweep_s == pytest.approx(found.sweep_s)


REFUSED = {
    "train.pipeline.pipeline_parallel=2": "no known key",
    "train.pipeline_parallel=4": "leave pipeline_parallel out",
    "train.pipeline.slow_links_s={7: 1}": "there is no link 7",
    "train.pipeline.slow_stages={8: 2}": "has stage 8: there are 0 to 7",
    "train.pipeline.op_times.f_s=[1, 2]": "has 2 numbers for 8 stages",
    "train.pipeline.live_tokens=4000": "room for 4,000 tokens, less than one response",
    "train.pipeline.order=gpipe": 'is "gpipe". Known: 1f1b, zero-bubble, adapted, ready',
    "train.pipeline.order=none.csv": "No such file",
    "train.pipeline.link_gb_s=0": "gb_s must be more than 0",
}
DERIVED_REFUSED = {
    "train.pipeline.stages=49": "49, more than the model's 48 layers",
    "train.pipeline.layers=[12, 12, 12, 11]": "adds up to 47, but the model has 48 layers",
    "train.pipeline.layers=[24, 24]": "must have a number for each of 4 stages",
}


@pytest.mark.parametrize("override", [*REFUSED, *DERIVED_REFUSED])
def test_stages_that_cannot_be_are_refused_in_one_line(override):
    before = DERIVED if override in DERIVED_REFUSED else ()
    with pytest.raises(ConfigError) as refused:
        scenario(*before, override)
    message = str(refused.value)
    assert (REFUSED | DERIVED_REFUSED)[override] in message and "\n" not in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows[:-1], "7 stages, but there are 8"),
        (lambda rows: [",".join(row.split(",")[:-1]) for row in rows], "0W23 is missing"),
        (lambda rows: [rows[0].replace("0I0,", "", 1), *rows[1:]], "0W0): comes before 0I0"),
        (lambda rows: [rows[0], f"{rows[1]},1F24", *rows[2:]], "another size"),
        (lambda rows: [f"{rows[0]},0W23", *rows[1:]], "has run it before"),
    ],
    ids=["a stage less", "an op less at the ends", "an op less", "an op more", "twice"],
)
def test_a_file_that_lacks_something_is_refused_in_one_line(change, reason, tmp_path):
    rows = orders_to_csv(plan_1f1b(8, 24)).splitlines()
    path = tmp_path / "plan.csv"
    path.write_text("\n".join(change(rows)))
    with pytest.raises(ConfigError) as refused:
        scenario(f"train.pipeline.order={path}")
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_deadlock_is_refused(tmp_path):
    """Stage 0 wants a gradient before it has sent what the others need for it."""
    rows = ["0F0,0I0,0W0,0F1,0I1,0W1", "1F0,1F1,1I0,1W0,1I1,1W1"]
    path = tmp_path / "plan.csv"
    path.write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="deadlocks"):
        scenario(
            *("train.pipeline.op_times=null", "train.pipeline.stages=2"),
            *("train.pipeline.slow_links_s={}", "train.pipeline.micro_batches=2"),
            f"train.pipeline.order={path}",
        )


def test_an_order_that_keeps_too_much_is_refused():
    with pytest.raises(ValueError, match=r"order 1f1b keeps activations of .* take an order"):
        simulate(scenario("train.pipeline.order=1f1b", "train.pipeline.live_tokens=9000"))
    found = result_of(scenario("train.pipeline.live_tokens=9000"))[1]
    assert max(found.peak_live_tokens) <= 9000


def test_messages_of_a_forward_sweep_queue_on_a_link_of_low_rate():
    made = pipeline(
        *("train.pipeline.stages=2", "train.pipeline.slow_links_s={}", "cluster.gpus=8"),
        "train.pipeline.op_times={f_s: [0.01, 0.01], i_s: [0, 0], w_s: [0, 0], tokens: 1000}",
        *("train.pipeline.micro_batches=10", "train.pipeline.host_fixed_s=0"),
        "train.pipeline.slow_links_gb_s={0: 0.1024}",  # 0.1 s for 1,000 x 5,120 numbers of 2 bytes
    )
    step = made.train([1000] * 40, 0.0)  # four replicas
    forward_s = 0.01 + 10 * 0.1 + 0.01
    assert step.seconds == pytest.approx(NUM_FORWARD_SWEEPS * forward_s + step.sweep_s)
    assert step.sweep_s == pytest.approx(forward_s + 0.1)  # and the last gradient's way back


def test_a_replica_without_a_response_waits():
    made = pipeline("train.pipeline.slow_links_s={}")
    assert made.result() is None
    step = made.train([1000], 0.0)  # eight replicas
    assert step.num_micro_batches == 1
    assert step.idle_device_s > 7 / 8 * step.device_s
