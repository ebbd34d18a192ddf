"""Who is next of those that wait for a worker: what a search of all of them says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.checks import schedule
from rollpacker.core.checks.acting import ActingConfig
from rollpacker.core.checks.prompt_queue import PromptQueue
from rollpacker.core.checks.reward_schedule import RewardKindConfig, RewardScheduleConfig
from rollpacker.core.checks.schedule import KindConfig, Order
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.unkind import UnkindConfig
from tests.core.environments import Dialogues
from tests.core.test_turns import check_run, job_config
from tests.core.world import World, published

num_popped = 0


class Searched(PromptQueue):
    """Searches all that wait, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = dict[PromptId, dict[SampleId, int]]()
        """Prompts in the order of arrival, and the tokens of their samples."""

    def add(self, sample: SampleId, num_tokens: int) -> None:
        super().add(sample, num_tokens)
        self.samples.setdefault(sample.prompt, {})[sample] = num_tokens

    def remove(self, sample: SampleId) -> None:
        super().remove(sample)
        self.forget(sample)

    def forget(self, sample: SampleId) -> None:
        del self.samples[sample.prompt][sample]
        if not self.samples[sample.prompt]:
            del self.samples[sample.prompt]

    def pop(self, rank: Callable[[PromptId], float | None], mean: float) -> SampleId:
        global num_popped

        def place(prompt: PromptId) -> tuple[float, int]:
            found = rank(prompt)
            return mean if found is None else found, -max(self.samples[prompt].values())

        prompt = min(self.samples, key=place)  # the first of several: the order of arrival
        waiting = self.samples[prompt]
        expected = max(waiting, key=waiting.__getitem__)
        assert super().pop(rank, mean) == expected
        num_popped += 1
        self.forget(expected)
        return expected


@given(st.data())
def test_the_heap_finds_whom_a_search_finds(data: st.DataObject) -> None:
    """Ranks that are told of change, the mean does without being told."""
    queue, ranks = Searched(), dict[PromptId, float | None]()
    waiting = list[SampleId]()
    few = st.integers(0, 3)
    for index in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "add", "change", "remove", "pop"])):
            case "add":
                sample = SampleId(PromptId("train", 0, data.draw(few)), index, 0)
                queue.add(sample, data.draw(few))
                waiting.append(sample)
            case "change":
                prompt = PromptId("train", 0, data.draw(few))
                ranks[prompt] = data.draw(st.none() | few.map(float))
                queue.look_again(prompt)
            case "remove" if waiting:
                queue.remove(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
            case "pop" if waiting:
                waiting.remove(queue.pop(ranks.get, float(data.draw(few))))
        assert len(queue) == len({sample.prompt for sample in waiting})


TAILS = [
    TailBatchingConfig(enabled=False),
    TailBatchingConfig(),
    TailBatchingConfig(stragglers="pool", prompt_factor=2.0),
    published(),
    published(race="scored"),
]


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(["closest", "longest"]),
    tail=st.sampled_from(TAILS),
    workers=st.integers(1, 3),
    overlap=st.booleans(),
    turns=st.booleans(),
    begins=st.booleans(),
    unkind=st.builds(
        UnkindConfig,
        failure_rate=st.sampled_from([0.0, 0.1]),
        infrastructure_rate=st.sampled_from([0.0, 0.3]),
        verdict_delay_s=st.sampled_from([0.0, 3.0, 100.0]),
        late_finish_rate=st.sampled_from([0.0, 0.5]),
    ),
    seed=st.integers(0, 10**6),
)
def test_whole_runs_start_what_a_search_would(
    order: Order,
    tail: TailBatchingConfig,
    workers: int,
    overlap: bool,
    turns: bool,
    begins: bool,
    unkind: UnkindConfig,
    seed: int,
) -> None:
    """Whatever changes in a run is told to those who wait, in checks and in environments."""
    kinds = {"train": KindConfig(workers=workers)}
    acting = ActingConfig(order=order, kinds=kinds, begins=begins)
    overlap = overlap or tail.race == "scored"
    config = job_config(
        *(acting, 6, 3),
        rewards=RewardScheduleConfig(overlap=overlap, order=order, kinds=kinds),
        tail_batching=tail,
        max_retries=3,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "PromptQueue", Searched)
        if turns:
            check_run(World(config, num_rows=25, seed=seed, unkind=unkind).run())
        else:
            World(replace(config, acting=None), num_rows=25, seed=seed, unkind=unkind).run()


def test_whole_runs_have_someone_who_waits() -> None:
    """Else the comparison above would be of nothing."""
    before = num_popped
    rewards = RewardScheduleConfig(order="closest", kinds={"train": RewardKindConfig(workers=1)})
    acting = ActingConfig(kinds={"train": KindConfig(workers=1)})
    config = job_config(acting, 6, 3, rewards=rewards)
    unkind = UnkindConfig(verdict_delay_s=100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "PromptQueue", Searched)
        World(config, num_rows=25, unkind=unkind, dialogues=Dialogues(seconds=30.0)).run()
    assert num_popped - before > 100
