"""The virtual driver: time and devices are accounted for once, and small runs look as they did.

`python -m tests.sim.test_simulation` writes the golden timelines anew, to be read before they are
committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rollpacker.core.commands import Launch, Release, RoundKind, Score, TrainOn
from rollpacker.core.events import (
    Committed,
    PromptsFetched,
    SampleAborted,
    SampleGenerated,
    SampleScored,
    Trained,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Record
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.report.history import iterate_steps
from rollpacker.report.step_history import StepHistory
from rollpacker.sim.latency import Calibration, MeasuredModel, StepCost
from rollpacker.sim.machine import Machine
from rollpacker.sim.presets import SYSTEMS
from rollpacker.sim.result import BUBBLE_CAUSES, StepResult, SystemResult
from rollpacker.sim.scenario import Scenario, load_scenario
from rollpacker.sim.simulate import job_config, machine_of, simulate
from rollpacker.sim.simulation import Simulation
from rollpacker.sim.workload import Workload

GOLDEN = Path(__file__).parent / "golden"
SMALL = """\
name: small
model: qwen2.5-7b
cluster: {gpu: h800, gpus: 8}
rollout: {prompts_per_step: 16, samples_per_prompt: 4, max_response_tokens: 4096}
lengths: {quantiles: {0.01: 20, 0.5: 300, 0.9: 1200, 0.98: 4096}}
rewards:
  - {kind: math, share: 0.5}
  - {kind: code, share: 0.3, workers: 8}
  - {kind: judge, share: 0.2, calls_per_s: 4}
system: rollpacker-published
steps: 12
"""
"""Short rounds, long ones and every kind of reward, in a fraction of a second."""


def scenario(folder: Path, *overrides: str, system: str | None = None) -> Scenario:
    path = folder / "small.yaml"
    path.write_text(SMALL)
    return load_scenario(path, overrides, system)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Scenario]:
    return lambda *overrides, **settings: scenario(tmp_path, *overrides, **settings)


def recorded(made: Scenario) -> tuple[SystemResult, list[Record]]:
    records: list[Record] = []
    return simulate(made, observe=records.append), records


def simulation_of(made: Scenario, **settings: object) -> Simulation:
    machine = machine_of(made, Calibration())
    return Simulation(job_config(made, machine), machine, Workload(made), **settings)


# -- time --------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_stages_add_up_to_the_step_and_steps_to_the_run(make, system):
    result, records = recorded(make(system=system))
    for step in result.steps:
        stages = step.rollout_s, step.reward_s, step.train_s, step.sync_s
        assert min(stages) >= 0
        assert sum(stages) == pytest.approx(step.total_s, rel=1e-9)
    last = max(record.time_s for record in records)
    assert sum(step.total_s for step in result.steps) == pytest.approx(last, rel=1e-9)
    assert result.device_seconds == pytest.approx(8 * last, rel=1e-9)


@pytest.mark.parametrize("system", SYSTEMS)
def test_time_never_runs_back(make, system):
    _, records = recorded(make(system=system))
    times = [record.time_s for record in records]
    assert times == sorted(times)


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_more_is_idle_than_there_is(make, system):
    result = simulate(make(system=system))
    assert set(result.bubble) == set(BUBBLE_CAUSES)
    assert min(result.bubble.values()) >= 0
    assert 0 < sum(result.bubble.values()) < result.device_seconds


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("settings", [("sync_s=0",), ("sync_s=0", "train.fixed_s=0", "rewards=[]")])
def test_what_takes_no_time_ends_with_the_last_commit_too(make, system, settings):
    result, records = recorded(make(*settings, "steps=6", system=system))
    assert len(result.steps) == 6 and all(step.sync_s == 0 for step in result.steps)
    last = records[-1]
    assert isinstance(last.event, Committed) and last.event.step == 6
    assert sum(step.total_s for step in result.steps) == pytest.approx(last.time_s, rel=1e-9)


def step_result(step: StepHistory) -> StepResult | None:
    """A committed step in the terms of a simulation; None if it trained on nothing.

    `rollout_s` begins with the commit of the step before, so that the stages fill the run's time;
    `sync_s` is everything after the optimizer step. A step of several rounds has the sum of their
    rollouts and of the waits after them."""
    turns, rounds = step.turns, step.rounds
    trained = step.trained_samples()
    if not trained:
        return None
    assert turns.train_on_s is not None and turns.trained_s is not None
    rollout_s = reward_s = 0.0
    begins_s = [step.start_s, *(round_.start_s for round_ in rounds[1:])]
    leaves_s = [*(round_.start_s for round_ in rounds[1:]), turns.train_on_s]
    for round_, begin_s, leave_s in zip(rounds, begins_s, leaves_s, strict=True):
        assert round_.end_s is not None
        rollout_s += round_.end_s - begin_s
        reward_s += leave_s - round_.end_s
    lengths = [sample.num_tokens for sample in trained]
    return StepResult(
        kind=str(rounds[-1].kind),
        rollout_s=rollout_s,
        reward_s=reward_s,
        train_s=turns.trained_s - turns.train_on_s,
        sync_s=step.end_s - turns.trained_s,
        total_s=step.end_s - step.start_s,
        tensor_parallel=rounds[-1].tensor_parallel,
        preemptions=sum(sample.preemptions for sample in step.samples.values()),
        max_response_tokens=max(lengths),
        tokens_generated=sum(sample.num_tokens for sample in step.samples.values()),
        tokens_trained=sum(lengths),
        num_trained=len(lengths),
        num_streamed=step.num_streamed,
    )


def folded(records: Sequence[Record]) -> list[StepResult]:
    """The steps as the history of the log has them, without tokens that were carried into them."""
    kept = [0]
    for record in records:
        if isinstance(record.event, SampleGenerated | SampleAborted):
            kept[-1] += record.event.num_kept or 0
        elif isinstance(record.event, Committed):
            kept.append(0)
    steps = [found for step in iterate_steps(records) if (found := step_result(step)) is not None]
    return [
        replace(step, tokens_generated=step.tokens_generated - tokens)
        for step, tokens in zip(steps, kept, strict=False)
    ]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("settings", [(), ("rewards=[]",), ("sync_s=0", "rewards=[]")])
def test_what_is_counted_is_what_the_history_of_the_log_says(make, system, settings):
    result, records = recorded(make(*settings, system=system))
    assert folded(records) == list(result.steps)
    waits = [step.turns.train_on_s - step.rollout_end_s for step in iterate_steps(records)]
    assert result.bubble["reward_wait"] == pytest.approx(8 * sum(waits), rel=1e-9)


def test_progress_tells_every_step(make):
    told: list[int] = []
    simulate(make("steps=5"), progress=told.append)
    assert told == [1, 2, 3, 4, 5]


def test_watching_changes_nothing(make):
    made = make()
    assert simulate(made, observe=lambda record: None) == simulate(made)


# -- who is trained on -------------------------------------------------------------


def trained_groups(records: Sequence[Record]) -> list[tuple[SampleId, ...]]:
    return [
        group
        for record in records
        for command in record.commands
        if isinstance(command, TrainOn)
        for group in command.groups
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_prompt_is_trained_on_once(make, system):
    made = make(system=system)
    records: list[Record] = []
    simulation = simulation_of(made, observe=records.append)
    simulation.run(made.steps)
    groups = trained_groups(records)
    fetched = Counter[PromptId]()
    for record in records:
        if isinstance(record.event, PromptsFetched):
            fetched.update(record.event.prompts)
    trained = Counter(group[0].prompt for group in groups)
    assert set(fetched.values()) == {1} and set(trained.values()) == {1}
    ledger = simulation.job.ledger
    ledger.check()
    assert not ledger.dropped
    assert set(fetched) == set(trained) | set(ledger.open) and not set(trained) & set(ledger.open)
    assert {len(group) for group in groups} == {made.rollout.samples_per_prompt}
    assert len(groups) == made.steps * made.rollout.prompts_per_step


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_trained_on_was_written_by_the_current_weights(make, system):
    _, records = recorded(make(system=system))
    version, launched, generated, judged = 0, set(), {}, set()
    for record in records:
        match record.event:
            case SampleGenerated(sample=sample):
                assert sample in launched and sample not in generated
                generated[sample] = record.event.version
            case SampleScored(sample=sample):
                judged.add(sample)
            case Trained():
                version = record.event.version
        for command in record.commands:
            if isinstance(command, Launch):
                assert command.version == version
                launched, generated, judged = set(command.samples), {}, set()
            elif isinstance(command, Score):
                assert command.sample in generated
            elif isinstance(command, TrainOn):
                samples = [sample for group in command.groups for sample in group]
                assert all(generated[sample] == version for sample in samples)
                assert judged.issuperset(samples)
    assert version == 12


def test_an_aborted_response_is_shorter_than_it_would_have_been(make):
    made = make()
    workload = Workload(made)
    _, records = recorded(made)
    aborted = [r.event for r in records if isinstance(r.event, SampleAborted)]
    assert aborted
    for event in aborted:
        sample = event.sample
        lengths = workload.lengths(sample.prompt, sample.attempt, sample.index + 1)
        assert 0 <= event.num_tokens <= lengths[sample.index]


def test_tokens_are_those_of_the_events(make):
    result, records = recorded(make())
    generated = sum(
        r.event.num_tokens for r in records if isinstance(r.event, SampleGenerated | SampleAborted)
    )
    lengths = {
        (r.event.sample, r.event.version): r.event.num_tokens
        for r in records
        if isinstance(r.event, SampleGenerated)
    }
    trained, version = 0, 0
    for record in records:
        if isinstance(record.event, Trained):
            version = record.event.version
        for command in record.commands:
            if isinstance(command, TrainOn):
                trained += sum(lengths[s, version] for group in command.groups for s in group)
    assert (result.tokens_generated, result.tokens_trained) == (generated, trained)


# -- steps of several rounds -------------------------------------------------------


def filled_up(made: Scenario, records: list[Record]) -> SystemResult:
    """Simulated with dynamic sampling: groups without signal are replaced by further rounds."""
    machine = machine_of(made, Calibration())
    sampling = DynamicSamplingConfig(enabled=True, max_refills=3)
    config = replace(job_config(made, machine), dynamic_sampling=sampling)
    return Simulation(config, machine, Workload(made), observe=records.append).run(made.steps)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_may_need_several_rounds(make, system):
    records: list[Record] = []
    result = filled_up(make("steps=6", "rollout.samples_per_prompt=2", system=system), records)
    launches = [c for r in records for c in r.commands if isinstance(c, Launch)]
    assert len(launches) > 2 * len(result.steps)
    lengths: dict[SampleId, int] = {}
    trained: list[list[int]] = []
    for record in records:
        if isinstance(record.event, SampleGenerated):
            lengths[record.event.sample] = record.event.num_tokens
        for command in record.commands:
            if isinstance(command, TrainOn):
                trained.append([lengths[s] for group in command.groups for s in group])
    assert [step.tokens_trained for step in result.steps] == [sum(one) for one in trained]
    assert [step.max_response_tokens for step in result.steps] == [max(one) for one in trained]
    assert folded(records) == list(result.steps)
    for step in result.steps:
        stages = step.rollout_s, step.reward_s, step.train_s, step.sync_s
        assert min(stages) >= 0
        assert sum(stages) == pytest.approx(step.total_s, rel=1e-9)
    assert sum(step.total_s for step in result.steps) == pytest.approx(records[-1].time_s, rel=1e-9)
    assert min(result.bubble.values()) >= 0
    assert sum(result.bubble.values()) < result.device_seconds


# -- devices -----------------------------------------------------------------------


def test_released_devices_generate_nothing_until_the_next_round(make):
    made = make("rewards=[]", "steps=6", system="rlhfuse")
    num_releases = num_looks = 0

    def watch(record: Record) -> None:
        nonlocal num_releases, num_looks
        released = simulation.rollout.released
        for lane in released:
            num_looks += 1
            assert lane.engine.next_finish == float("inf")
        for command in record.commands:
            if isinstance(command, Launch):
                assert not released
            elif isinstance(command, Release):
                num_releases += 1
                assert 0 < len(released) < made.cluster.gpus // made.rollout.tensor_parallel

    simulation = simulation_of(made, observe=watch)
    result = simulation.run(made.steps)
    assert num_releases == result.num_releases > 0 and num_looks > 0


def test_released_devices_train_before_the_round_is_over(make):
    """Streaming takes work out of the training stage and adds none."""
    streaming = simulate(make("rewards=[]", system="rlhfuse"))
    plain = simulate(make("rewards=[]", system="verl"))
    assert streaming.tokens_trained == plain.tokens_trained
    assert streaming.mean["num_streamed"] > 0
    for with_it, without in zip(streaming.steps, plain.steps, strict=True):
        assert with_it.train_s < without.train_s


def test_more_gpus_do_not_slow_a_plain_round_down(make):
    small = ("model=qwen2.5-3b", "steps=4")  # one that a single GPU can train
    for seed in range(3):
        mean = [
            simulate(make(f"cluster.gpus={gpus}", f"seed={seed}", *small, system="verl")).mean
            for gpus in (1, 2, 4, 8)
        ]
        assert len({step["tokens_generated"] for step in mean}) == 1
        speeds = [step["tokens_generated"] / step["rollout_s"] for step in mean]
        assert speeds == sorted(speeds)


def test_speculation_shortens_long_rounds_and_no_other(make):
    without = simulate(make())
    with_it = simulate(make("rollout.speculation={speedup: 1.6, max_live: 8}"))
    assert [s.kind for s in without.steps] == [s.kind for s in with_it.steps]
    longs = [n for n, s in enumerate(without.steps) if s.kind == "long"]
    assert longs
    for place, (slow, fast) in enumerate(zip(without.steps, with_it.steps, strict=True)):
        if place in longs:
            assert fast.rollout_s < slow.rollout_s
        else:
            assert fast.rollout_s == pytest.approx(slow.rollout_s, rel=1e-9)


# -- what goes wrong ---------------------------------------------------------------

UNKIND = (
    "unkind={failure_rate: 0.02, late_finish_rate: 0.2, no_verdict_rate: 0.02, "
    "infrastructure_rate: 0.02, verdict_delay_s: 0.5}"
)


@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_that_goes_wrong_is_nothing(make, system):
    calm, unkind = recorded(make(system=system)), recorded(make("unkind={}", system=system))
    assert calm == unkind


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_unkind_machine_is_met_with_what_a_run_does_about_it(make, system):
    made = make(UNKIND, system=system)
    result, records = recorded(made)
    events = Counter(type(record.event).__name__ for record in records)
    causes = Counter(r.event.cause for r in records if isinstance(r.event, SampleScored))
    assert events["SampleFailed"] and causes["sample"] and causes["infrastructure"]
    assert any(c.retry for r in records for c in r.commands if isinstance(c, Score))
    assert len(result.steps) == made.steps
    for step in result.steps:
        stages = step.rollout_s, step.reward_s, step.train_s, step.sync_s
        assert min(stages) >= 0
        assert sum(stages) == pytest.approx(step.total_s, rel=1e-9)
    assert min(result.bubble.values()) >= 0
    assert sum(result.bubble.values()) < result.device_seconds
    assert recorded(made) == (result, records)


def test_a_machine_on_which_everything_fails_is_refused_in_one_message(make):
    with pytest.raises(ValueError, match=r"after 0 steps: .*no group.*lower the rates of unkind"):
        simulate(make("unkind={failure_rate: 1.0}"))


def test_a_late_finish_is_a_response_that_nobody_waits_for(make):
    calm, records = recorded(make("unkind={late_finish_rate: 0.5}"))
    launched = Counter(
        s for r in records for c in r.commands if isinstance(c, Launch) for s in c.samples
    )
    ended = Counter(
        r.event.sample for r in records if isinstance(r.event, SampleGenerated | SampleAborted)
    )
    assert ended <= launched
    assert calm.steps == simulate(make()).steps


# -- settings that must not matter, or must ----------------------------------------


def test_factors_of_one_are_no_tail_batching(make):
    ones = "tail_batching.prompt_factor=1", "tail_batching.sample_factor=1"
    raced = simulate(make(*ones))
    plain = simulate(make("tail_batching.enabled=false"))
    assert {step.kind for step in raced.steps} == {"short"}
    assert [replace(step, kind="plain") for step in raced.steps] == list(plain.steps)


@pytest.mark.parametrize("system", SYSTEMS)
def test_without_rewards_nothing_waits_for_them(make, system):
    result, records = recorded(make("rewards=[]", system=system))
    assert {step.reward_s for step in result.steps} == {0.0}
    assert result.bubble["reward_wait"] == 0
    asked = {c.sample: r.time_s for r in records for c in r.commands if isinstance(c, Score)}
    verdicts = [r for r in records if isinstance(r.event, SampleScored)]
    assert verdicts and all(r.time_s == asked[r.event.sample] for r in verdicts)


def test_overlapped_rewards_expose_less(make):
    exposed = [
        simulate(make("system=verl", f"reward_scheduler.overlap={overlap}")).mean["reward_s"]
        for overlap in ("false", "true")
    ]
    assert exposed[1] < exposed[0]


def test_deadlines_follow_the_slowest_correct_check(make):
    settings = (
        "tail_batching.enabled=false",
        "stream_trainer.enabled=false",
        "rewards=[{kind: code, share: 1.0, workers: 8}]",
    )
    fixed, fixed_records = recorded(make(*settings, "reward_scheduler.adaptive_timeout=false"))
    adaptive, records = recorded(make(*settings))

    def limits(records: Sequence[Record]) -> list[float | None]:
        commands = [c for r in records for c in r.commands if isinstance(c, Score)]
        return [command.timeout_s for command in commands]

    assert set(limits(fixed_records)) == {30.0}
    assert limits(records)[0] == 30.0 and limits(records)[-1] < 10.0
    longest = max(r.event.seconds for r in records[-200:] if isinstance(r.event, SampleScored))
    assert longest <= limits(records)[-1]
    assert adaptive.mean["reward_s"] < fixed.mean["reward_s"] / 2
    for one, other in zip(adaptive.steps, fixed.steps, strict=True):
        assert one.rollout_s == pytest.approx(other.rollout_s, rel=1e-9)


def test_a_round_is_as_long_as_its_longest_response_needs(make):
    """Token by token, after the first, which comes out of the prefill."""
    made = make("rewards=[]", "steps=3", system="verl")
    step = 0.01
    result = golden_simulation(made, step_s=step).run(3)
    for found in result.steps:
        assert found.rollout_s == pytest.approx(step * (found.max_response_tokens - 1))


# -- golden timelines --------------------------------------------------------------

TINY = {
    "plain": (
        *("system=verl", "steps=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
        *("cluster.gpus=2", "rewards=[{kind: code, share: 1.0, workers: 2}]"),
    ),
    "race": (
        *("steps=4", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
        *("tail_batching.prompt_factor=1.5", "tail_batching.sample_factor=1.5"),
        *("cluster.gpus=2", "rewards=[{kind: math, share: 1.0}]"),
    ),
    "release": (
        *("system=rlhfuse", "steps=2", "rollout.prompts_per_step=4"),
        *("rollout.samples_per_prompt=2", "cluster.gpus=4", "rewards=[]"),
    ),
}
"""Two engines that await everything; a race with its long round; devices that leave a round."""


def golden_simulation(made: Scenario, step_s: float = 0.01, **settings: object) -> Simulation:
    """On a machine of round numbers: 100 tokens of every sequence in a second."""
    cost = StepCost(launch_s=step_s, bytes_s=0.0, per_cached_token_s=0.0, per_sequence_s=0.0)
    latency = MeasuredModel(step=cost, train_fixed_s=1.0, train_token_s=0.001, sync_s=0.5)
    machine = Machine(latency=latency, gpus=made.cluster.gpus, prompt_tokens=1)
    config = replace(job_config(made, machine), prompt_tokens=0)
    return Simulation(config, machine, Workload(made), **settings)


def timeline(name: str, folder: Path) -> str:
    """Every event with the core's answer, and the steps that came of it."""
    lines = [f"{name}: {' '.join(TINY[name])}", ""]
    made = scenario(folder, *TINY[name])
    simulation = golden_simulation(
        made, observe=lambda record: lines.extend(_told(record, made.rollout.samples_per_prompt))
    )
    result = simulation.run(made.steps)
    lines += ["", "step  kind     rollout   reward    train     sync    total"]
    for number, step in enumerate(result.steps, 1):
        seconds = step.rollout_s, step.reward_s, step.train_s, step.sync_s, step.total_s
        lines.append(f"{number:<6}{step.kind:<7}" + "".join(f"{s:9.3f}" for s in seconds))
    lines += ["", "idle device seconds"]
    lines += [f"{cause:<13}{seconds:9.3f}" for cause, seconds in result.bubble.items()]
    return "\n".join(lines) + "\n"


def _told(record: Record, samples_per_prompt: int) -> list[str]:
    event, name = record.event, type(record.event).__name__
    match event:
        case SampleGenerated() | SampleAborted():
            name += f" {event.sample} {event.num_tokens} tokens"
        case SampleScored():
            name += f" {event.sample}" + (f" in {event.seconds:.3f} s" if event.seconds else "")
        case PromptsFetched():
            name += f" {' '.join(map(str, event.prompts))}"
        case Trained() | Committed():
            name += f" step {event.step}"
    told = [f"{record.time_s:9.3f}  {name}"]
    for command in record.commands:
        match command:
            case Launch():
                numbers = Counter(sample.prompt for sample in command.samples)
                shown = " ".join(f"{prompt}x{n}" for prompt, n in numbers.items())
                told.append(f"           -> Launch {command.kind} {shown}")
            case TrainOn():
                shown = " ".join(str(sample) for group in command.groups for sample in group)
                told.append(f"           -> TrainOn step {command.step}: {shown}")
            case Release():
                told.append(f"           -> Release devices {list(command.devices)}")
            case _:
                told.append(f"           -> {type(command).__name__}{_arguments(command)}")
    return told


def _arguments(command: object) -> str:
    for name in ("samples", "prompts"):
        if hasattr(command, name):
            return " " + " ".join(map(str, getattr(command, name)))
    if hasattr(command, "groups"):
        return " " + " ".join(str(sample) for group in command.groups for sample in group)
    for name in ("sample", "count", "version", "step"):
        if hasattr(command, name):
            return f" {getattr(command, name)}"
    return ""


@pytest.mark.parametrize("name", TINY)
def test_golden_timeline(name, tmp_path):
    assert timeline(name, tmp_path) == (GOLDEN / f"{name}.txt").read_text()


def test_golden_timelines_show_what_they_are_for():
    text = {name: (GOLDEN / f"{name}.txt").read_text() for name in TINY}
    assert f"Launch {RoundKind.PLAIN}" in text["plain"]
    assert all(word in text["race"] for word in ("Launch short", "Launch long", "Abort", "Defer"))
    assert all(word in text["release"] for word in ("Release", "StartGradients"))


def main() -> None:
    import tempfile

    for name in TINY:
        with tempfile.TemporaryDirectory() as folder:
            (GOLDEN / f"{name}.txt").write_text(timeline(name, Path(folder)))


if __name__ == "__main__":
    main()
