"""The parts of `rollpacker.integrations.trl` without a model: deadlines, failures, order,
versions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import (
    EngineError,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.integrations.trl import SUPPORTED, check_version
from rollpacker.integrations.trl.cursor import SamplerCursor
from rollpacker.integrations.trl.late_rows import LateDataset, LateRow
from rollpacker.integrations.trl.rollout_function import num_generations
from rollpacker.integrations.trl.rollouts import EngineHost, Rollouts, collect
from rollpacker.run.errors import DeadlineExceeded


class FakeEngine:
    """Ends every response at once, the shortest place first; those that `hangs` never, and those
    that `fails` without a response."""

    def __init__(
        self,
        hangs: Callable[[SampleId], bool] = lambda sample: False,
        fails: Callable[[SampleId], bool] = lambda sample: False,
    ) -> None:
        self.hangs, self.fails = hangs, fails
        self.live: dict[SampleId, GenerationRequest] = {}
        self.num_steps = 0
        self.version = 0

    def start(self, listener: Any, on_error: Any) -> None:
        self.listener = listener

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.live |= {request.sample: request for request in requests}
        threading.Thread(target=self._work, args=(list(requests),), daemon=True).start()

    def _work(self, requests: list[GenerationRequest]) -> None:
        for request in sorted(requests, key=lambda r: (r.sample.prompt.row, r.sample.index)):
            self.num_steps += 1
            sample = request.sample
            if sample in self.live and not self.hangs(sample):
                del self.live[sample]
                self.listener([self._output(request)])

    def _output(self, request: GenerationRequest) -> EngineOutput:
        sample = request.sample
        if self.fails(sample):
            return EngineOutput(SampleFailed(time_s=0.0, sample=sample, reason="too long"))
        event = SampleGenerated(
            time_s=0.0, sample=sample, num_tokens=2, finish_reason="stop", version=self.version
        )
        return EngineOutput(event, self._response(request, "stop"))

    def _response(self, request: GenerationRequest, reason: Any) -> Response:
        return Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=(7, 1),
            log_probs=(-1.0, -1.0),
            finish_reason=reason,
            version=self.version,
        )

    def abort(self, samples: Sequence[SampleId]) -> None:
        for sample in samples:
            request = self.live.pop(sample, None)
            if request is not None:
                event = SampleAborted(time_s=0.0, sample=sample, num_tokens=2)
                self.listener([EngineOutput(event, self._response(request, "aborted"))])

    async def update_weights(self, version: int) -> None:
        self.version = version

    def status(self) -> EngineStatus:
        return EngineStatus(
            num_running=len(self.live),
            num_waiting=0,
            version=self.version,
            generated_tokens=0,
            decode_steps=self.num_steps,
        )


def rollouts(engine: FakeEngine, *, num_steps: int = 4, generation_s: float = 5.0) -> Rollouts:
    config = JobConfig(
        prompts_per_step=2, samples_per_prompt=2, max_steps=None, max_response_tokens=8
    )
    cursor = SamplerCursor(8, prompts_per_step=2, num_steps=num_steps, shuffle=False, seed=0)
    row = PromptRow(prompt="1+2=", tokens=(3, 4), columns={})
    return Rollouts(
        config,
        host=EngineHost(engine, [row] * 8, SamplingParams(max_response_tokens=8)),
        cursor=cursor,
        seed=0,
        generation_s=generation_s,
    )


def test_every_prompt_once_and_every_step_full() -> None:
    own, rows = rollouts(FakeEngine()), []
    for _ in range(4):
        step = [response.sample.prompt.row for response in own.next_step()]
        assert len(step) == 4 and step[::2] == step[1::2]
        rows += step[::2]
        own.scheduler.trained()
    assert sorted(rows) == list(range(8))
    with pytest.raises(RuntimeError, match="TRL asks for another step, but the data ended"):
        own.next_step()


def test_a_generation_that_hangs_is_named() -> None:
    own = rollouts(FakeEngine(hangs=lambda sample: sample.prompt.row < 2), generation_s=0.2)
    with pytest.raises(DeadlineExceeded) as error:
        own.next_step()
    message = str(error.value)
    assert "responses (train/0/0#0.0" in message and "raise generation_s" in message


def test_an_evaluation_that_hangs_is_named() -> None:
    engine = FakeEngine(hangs=lambda sample: sample.index == 1)
    with pytest.raises(DeadlineExceeded, match="2 responses of an evaluation"):
        collect(engine, requests_of(2), 0.2)  # type: ignore[arg-type]


def requests_of(count: int) -> list[GenerationRequest]:
    from rollpacker.core.ids import PromptId

    return [
        GenerationRequest(
            sample=SampleId(PromptId("eval", 1, place), place, 0),
            prompt_tokens=(3,),
            sampling=SamplingParams(max_response_tokens=8),
        )
        for place in range(count)
    ]


def test_a_sample_that_fails_is_named() -> None:
    own = rollouts(FakeEngine(fails=lambda sample: sample.prompt.row == 1))
    with pytest.raises(EngineError, match=r"no response train/0/1#0\.0: too long"):
        own.next_step()


def test_seconds_add_up() -> None:
    own = rollouts(FakeEngine())
    own.next_step()
    metrics = own.scheduler.trained()
    wall = sum(own.scheduler.seconds().values())
    spent = sum(value for name, value in metrics.items() if name.endswith("_s"))
    assert spent == pytest.approx(wall) and metrics["prompts_launched"] == 3
    own.next_step()
    own.scheduler.trained()
    assert own.scheduler.report().startswith("rollpacker: 2 steps in ")


def test_the_order_is_that_of_trls_sampler() -> None:
    cursor = SamplerCursor(11, prompts_per_step=3, num_steps=6, shuffle=True, seed=4)
    rows = []
    while not cursor.ended:
        prompts, _, _ = cursor.take(4)
        rows += [(prompt.epoch, prompt.row) for prompt in prompts]
    sampler = RepeatSampler(range(11), mini_repeat_count=1, batch_size=3, seed=4)
    assert rows == [(epoch, row) for epoch in (0, 1) for row in sampler]
    assert cursor.take(1) == ((), True, True)


def test_a_cursor_goes_on_where_it_was() -> None:
    def cursor(num_steps: int = 8) -> SamplerCursor:
        return SamplerCursor(10, prompts_per_step=2, num_steps=num_steps, shuffle=True, seed=4)

    whole, cut, resumed = cursor(), cursor(), cursor()
    for count in (4, 3, 3, 2):
        whole.take(count)
        cut.take(count)
    resumed.restore(cut.state())
    while not whole.ended:
        assert resumed.take(3) == whole.take(3)
    assert resumed.ended
    other = SamplerCursor(12, prompts_per_step=2, num_steps=8, shuffle=True, seed=4)
    with pytest.raises(ValueError, match="an epoch had 10 prompts, and now has 12"):
        other.restore(cut.state())


def test_a_cursor_leaves_out_what_was_trained_on() -> None:
    def cursor() -> SamplerCursor:
        return SamplerCursor(11, prompts_per_step=3, num_steps=6, shuffle=True, seed=4)

    whole, cut = cursor(), cursor()
    cut.skip(12)
    for _ in range(2):  # an epoch of 9, which take does not go beyond, and 3 of the next
        whole.take(9 if whole.state()["epoch"] == 0 else 3)
    assert cut.state() == whole.state()
    assert cut.take(3) == whole.take(3)


class Arguments:
    def __init__(self, accumulation: int, per_generation: int, iterations: int) -> None:
        self.gradient_accumulation_steps = accumulation
        self.steps_per_generation = per_generation
        self.num_iterations = iterations


@pytest.mark.parametrize(
    ("arguments", "max_steps", "batches_per_epoch", "expected"),
    [
        (Arguments(1, 1, 1), 7, 5, 7),
        (Arguments(2, 2, 1), 7, 5, 7),
        (Arguments(1, 2, 2), 8, 5, 2),
        (Arguments(1, 2, 2), 9, 5, 3),
        (Arguments(4, 1, 1), 3, 5, 9),  # two optimizer steps an epoch: of four batches and of one
    ],
)
def test_how_often_trl_asks(
    arguments: Arguments, max_steps: int, batches_per_epoch: int, expected: int
) -> None:
    assert num_generations(arguments, max_steps, batches_per_epoch) == expected


def test_rows_are_decided_when_they_are_looked_at() -> None:
    asked: list[str] = []

    def decide() -> list[dict[str, Any]]:
        asked.append("once")
        return [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]

    data = LateDataset.of(Dataset.from_list([{"prompt": "x", "n": n} for n in range(3)]), decide)
    assert len(data) == 3 and data[2] == {"prompt": "x", "n": 2} and data.column_names
    first, second = data.__getitems__([2, 2])
    assert isinstance(first, LateRow) and asked == []
    assert [first["prompt"], second["n"], second.get("images")] == ["a", 2, None]
    second["n"] = 5
    assert (sorted(second), "n" in first, second["n"], first["n"]) == (["n", "prompt"], True, 5, 1)
    assert asked == ["once"]


@pytest.mark.parametrize("version", ["1.15.0", "2.0.0", "0.25.1"])
def test_another_version_of_trl_is_one_message(version: str) -> None:
    with pytest.raises(ValueError) as error:
        check_version(version)
    assert SUPPORTED in str(error.value) and version in str(error.value)


def test_the_extra_asks_for_the_versions_that_are_taken() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"trl{SUPPORTED}" in project["optional-dependencies"]["trl"]
