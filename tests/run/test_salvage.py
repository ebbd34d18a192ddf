"""What had finished when a run was killed is taken up by its resume, and by nothing else."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.exactly_once import check
from rollpacker.config.schema import RunConfig
from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.records import Record
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.data.cursor import PromptCursor
from rollpacker.engines.engine import (
    Carried,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.report.log import EventLog
from rollpacker.report.summary import summarize_entries
from rollpacker.run.folder.checkpoint import newest_checkpoint
from rollpacker.run.folder.event_log import cut_back
from rollpacker.run.ports.carried import CarriedTokens, read_carried
from rollpacker.run.ports.engines import Engines
from rollpacker.run.ports.held import Handle
from rollpacker.run.ports.salvage import FILE, Salvage
from rollpacker.run.replay import replay
from rollpacker.trainer.trainer import TrainSample
from tests.run.fakes import (
    PROMPTS,
    FakeEngine,
    FakeTrainer,
    Recorder,
    drive,
    make,
    run_config,
)

TAILS = {
    "pool": TailBatchingConfig(stragglers="pool"),
    "queue": TailBatchingConfig(),
    "plain": TailBatchingConfig(enabled=False),
    "published": TailBatchingConfig(selection="published"),
}
ROOT = Path(__file__).parents[2]
CHECKPOINTED, FAILS_AT = 4, 5


def length(noise: SampleId) -> int:
    return 1 + (7 * noise.prompt.row + 3 * noise.index) % 9


class TellingEngine(FakeEngine):
    """Its tokens say whose they are; it remembers whom it was given."""

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__(step_s=step_s)
        self.given: list[SampleId] = []

    def draw(self, noise: SampleId) -> tuple[int, ...]:
        return (100 * noise.prompt.row + noise.index,) * length(noise)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.given += [request.sample for request in requests]
        super().submit(requests)


@dataclass
class TellingTrainer(FakeTrainer):
    """Remembers what it was trained on, with the tokens."""

    steps: list[Any] = field(default_factory=list)

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        await super().accumulate(samples, replicas)
        for one in samples:
            row = one.sample.prompt.row
            assert all(token // 100 == row for token in one.response_tokens), one
            assert len(one.rollout_log_probs) == len(one.response_tokens)
        self.steps += [(self.version, one.sample, one.response_tokens) for one in samples]


def config_of(tail: str, engines: int = 1) -> RunConfig:
    config = replace(run_config(steps=8), tail_batching=TAILS[tail])
    return replace(config, rollout=replace(config.rollout, engines=engines))


def several(count: int) -> tuple[Engines, list[TellingEngine]]:
    made = [TellingEngine(step_s=0.001) for _ in range(count)]
    if count == 1:
        return Engines(made), made
    return Engines(made, lambda number, incarnation, devices: TellingEngine()), made


def interrupted(folder: Path, config: RunConfig) -> tuple[TellingTrainer, JobConfig]:
    """A run that dies while it trains, the checkpoint one step behind."""
    folder.mkdir(exist_ok=True)
    trainer = TellingTrainer(fail_at=FAILS_AT, error=RuntimeError("killed"))
    engines, _ = several(config.rollout.engines)
    controller, _ = make(folder, config, engines=engines, trainer=trainer)
    with pytest.raises(RuntimeError, match="killed"):
        drive(controller)
    assert newest_checkpoint(folder / "checkpoints").step == CHECKPOINTED
    controller.parts.log.close()
    return trainer, controller.parts.job.config


@dataclass
class Resumed:
    trainer: TellingTrainer
    engines: list[TellingEngine]
    recorder: Recorder
    salvage: Salvage
    kept: tuple[int, int]

    @property
    def given(self) -> set[SampleId]:
        return {sample for engine in self.engines for sample in engine.given}


def resume(folder: Path, config: RunConfig, job_config: JobConfig) -> Resumed:
    checkpoint = newest_checkpoint(folder / "checkpoints")
    state = checkpoint.state
    cut_back(folder / "events.jsonl", state["log_bytes"], state["log_sha256"])
    job = Job.restore(job_config, state["job"])
    trainer = TellingTrainer()
    trainer.load(checkpoint.folder)
    waiting = [*job.queues.long, *(one for tier in job.queues.tiers for one in tier)]
    expected = {one.prompt: [carried.tokens for carried in one.carried] for one in waiting}
    carried = read_carried(checkpoint.folder, "", expected)
    cursor = PromptCursor("train", len(PROMPTS.rows), 0, True, None)
    cursor.restore(state["cursor"])
    in_order = config.rollout.is_repeatable
    salvage = Salvage(folder, checkpoint.folder, job.version, in_order=in_order)
    engines, made = several(config.rollout.engines)
    for engine in made:
        engine.version = trainer.version
    controller, recorder = make(
        *(folder, config),
        engines=engines,
        trainer=trainer,
        job=job,
        cursor=cursor,
        salvage=salvage,
        carried=CarriedTokens(config.tail_batching, carried),
    )
    kept = salvage.num_found
    assert drive(controller) == "every step is done"
    controller.parts.log.close()
    return Resumed(trainer, made, recorder, salvage, kept)


def undisturbed(folder: Path, config: RunConfig) -> TellingTrainer:
    folder.mkdir()
    trainer = TellingTrainer()
    engines, _ = several(config.rollout.engines)
    controller, _ = make(folder, config, engines=engines, trainer=trainer)
    assert drive(controller) == "every step is done"
    return trainer


def told(folder: Path) -> dict[str, int]:
    """What the summary says of it."""
    found: dict[str, int] = summarize_entries(EventLog(folder / "events.jsonl")).get("salvaged", {})
    return found


@pytest.mark.parametrize("tail", TAILS)
def test_a_resume_after_any_loss_of_the_file_trains_on_the_very_same(
    tmp_path: Path, tail: str
) -> None:
    """The file is as a kill at a random moment leaves it: cut off anywhere."""
    config = config_of(tail)
    expected = undisturbed(tmp_path / "undisturbed", config).steps
    died, job_config = interrupted(tmp_path / "died", config)
    size = (tmp_path / "died" / FILE).stat().st_size
    rng = random.Random(tail)
    found = []
    for number, bytes_left in enumerate([size, 0, *(rng.randrange(size) for _ in range(3))]):
        folder = tmp_path / f"resumed-{number}"
        shutil.copytree(tmp_path / "died", folder, symlinks=True)
        with (folder / FILE).open("r+b") as file:
            file.truncate(bytes_left)
        resumed = resume(folder, config, job_config)
        before = [one for one in died.steps if one[0] < CHECKPOINTED]
        assert before + resumed.trainer.steps == expected
        assert check(folder / "events.jsonl")["problems"] == []
        assert replay(EventLog(folder / "events.jsonl")).difference is None
        found.append(resumed)
    # The round was over: nothing of it is drawn again.
    first = {sample for version, sample, _ in found[0].trainer.steps if version == CHECKPOINTED}
    assert found[0].kept[0] >= len(first) and not first & found[0].given
    assert found[0].kept[1] > found[0].kept[0]
    assert told(tmp_path / "resumed-0")["samples"] == found[0].kept[0]
    assert first <= found[1].given and found[1].kept == (0, 0)
    assert not told(tmp_path / "resumed-1")


@pytest.mark.parametrize("tail", ["pool", "plain"])
def test_with_several_engines_whatever_had_finished_is_used(tmp_path: Path, tail: str) -> None:
    config = config_of(tail, engines=2)
    died, job_config = interrupted(tmp_path / "died", config)
    size = (tmp_path / "died" / FILE).stat().st_size
    rng = random.Random(tail)
    for number, bytes_left in enumerate([size, *(rng.randrange(size) for _ in range(3))]):
        folder = tmp_path / f"resumed-{number}"
        shutil.copytree(tmp_path / "died", folder, symlinks=True)
        with (folder / FILE).open("r+b") as file:
            file.truncate(bytes_left)
        resumed = resume(folder, config, job_config)
        steps = [one for one in died.steps if one[0] < CHECKPOINTED] + resumed.trainer.steps
        trained = [sample for _, sample, _ in steps]
        assert len({*trained}) == len(trained)
        assert check(folder / "events.jsonl")["problems"] == []
        assert replay(EventLog(folder / "events.jsonl")).difference is None
        assert told(folder).get("samples", 0) == resumed.kept[0]
        ended = [e.event for e in resumed.recorder.entries if isinstance(e, Record)]
        ended = [e for e in ended if isinstance(e, SampleGenerated) and e.version == CHECKPOINTED]
        drawn = {e.sample for e in ended} & resumed.given
        assert len(ended) - len(drawn) == resumed.kept[0]


def test_a_second_kill_finds_what_both_sessions_had(tmp_path: Path) -> None:
    config = config_of("pool")
    interrupted(tmp_path, config)
    at = newest_checkpoint(tmp_path / "checkpoints").folder
    whole = (tmp_path / FILE).read_bytes()
    assert Salvage(tmp_path, at, CHECKPOINTED, in_order=False).num_found[0] > 1
    (tmp_path / FILE).write_bytes(whole[: len(whole) // 2])
    half = Salvage(tmp_path, at, CHECKPOINTED, in_order=False)
    sound = (tmp_path / FILE).stat().st_size
    assert 0 < sound <= len(whole) // 2 and whole.startswith((tmp_path / FILE).read_bytes())
    request = request_of(29, index=7)
    half.launched(CHECKPOINTED, [request])
    half.ended(*generated(request))
    half.close()
    again = Salvage(tmp_path, at, CHECKPOINTED, in_order=False)
    assert again.num_found[0] == half.num_found[0] + 1


# -- without a run -------------------------------------------------------------------------


def request_of(row: int, index: int = 0, **changed: Any) -> GenerationRequest:
    sample = SampleId(PromptId("train", 0, row), index, 0)
    settings = SamplingParams(max_response_tokens=9)
    given = {"sample": sample, "prompt_tokens": (1, row), "sampling": settings, **changed}
    return GenerationRequest(**given)


def response_to(request: GenerationRequest, reason: Any = "stop") -> Response:
    return Response(
        sample=request.sample,
        prompt_tokens=request.prompt_tokens,
        tokens=(5, 2**31 - 1, 0),
        log_probs=(-0.1, -1e-17, -123.456),
        finish_reason=reason,
        version=3,
        redraws=((1, 2),),
    )


def generated(request: GenerationRequest) -> tuple[SampleGenerated, Response]:
    event = SampleGenerated(
        time_s=1.5,
        sample=request.sample,
        num_tokens=3,
        finish_reason="stop",
        version=3,
        num_kept=2,
        engine=4,
        incarnation=1,
    )
    return event, response_to(request)


def aborted(request: GenerationRequest) -> tuple[SampleAborted, Response | None]:
    return SampleAborted(time_s=2.0, sample=request.sample, num_tokens=0), None


@pytest.fixture
def at(tmp_path: Path) -> Path:
    """A checkpoint."""
    folder = tmp_path / "step_000003"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


def written(folder: Path, at: Path, ends: Sequence[Any]) -> None:
    """All launched at once, and ended in this order."""
    salvage = Salvage(folder, in_order=False)
    salvage.begin(at, 3)
    salvage.launched(3, [request for request, _ in ends])
    for request, end in ends:
        salvage.ended(*end(request))
    salvage.close()


def launched(salvage: Salvage, requests: Sequence[GenerationRequest]) -> list[SampleId]:
    """What the engine is given."""
    salvage.launched(3, requests)
    handle = Handle(0, 0, FakeEngine())
    return [request.sample for request in salvage.keep_back(handle, requests)]


def test_an_end_comes_back_as_it_was(tmp_path: Path, at: Path) -> None:
    carried = Carried(tokens=(5, 6), log_probs=(-0.5, -0.25), floor=1)
    one, other = request_of(1, carried=carried), request_of(2)
    written(tmp_path, at, [(other, generated), (one, generated)])
    salvage = Salvage(tmp_path, at, 3, in_order=True)
    assert salvage.num_found == (2, 6)
    woken = []
    salvage.wake = lambda: woken.append(1)
    assert launched(salvage, [one, other]) == [] and woken
    outputs = [output for _, output in salvage.outputs()]
    assert [output.response for output in outputs] == [response_to(other), response_to(one)]
    event, _ = generated(other)
    assert outputs[0].event == msgspec.structs.replace(event, time_s=0.0, engine=0, incarnation=0)
    assert not salvage.not_stopped()
    assert launched(salvage, [one]) == [one.sample]  # once


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_tokens": (1, 2)},
        {"sampling": SamplingParams(max_response_tokens=10)},
        {"sampling": SamplingParams(max_response_tokens=9, seed=1)},
        {"noise": SampleId(PromptId("train", 0, 1), 0, 1)},
        {"carried": Carried(tokens=(5,), log_probs=(-0.1,))},
        {"forced_length": 4},
    ],
    ids=str,
)
def test_another_request_of_the_same_name_is_generated(
    tmp_path: Path, at: Path, changed: dict[str, Any]
) -> None:
    request = request_of(1)
    written(tmp_path, at, [(request, generated)])
    salvage = Salvage(tmp_path, at, 3, in_order=False)
    assert launched(salvage, [replace(request, **changed)]) == [request.sample]
    assert launched(salvage, [request]) == []


def test_other_weights_and_other_files_are_not_used(tmp_path: Path, at: Path) -> None:
    request = request_of(1)

    def fresh() -> None:
        written(tmp_path, at, [(request, generated)])
        assert (tmp_path / FILE).exists()

    fresh()
    assert Salvage(tmp_path, at, 4, in_order=False).num_found == (0, 0)
    assert not (tmp_path / FILE).exists()
    fresh()
    (at / "manifest.json").write_text('{"another": "model"}')
    assert Salvage(tmp_path, at, 3, in_order=False).num_found == (0, 0)
    fresh()
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert Salvage(tmp_path, at, 3, in_order=False).num_found == (0, 0)
    (tmp_path / FILE).write_bytes(b"not one of ours, but for its name")
    assert Salvage(tmp_path, at, 3, in_order=False).num_found == (0, 0)
    fresh()
    salvage = Salvage(tmp_path, at, 3, in_order=False)
    salvage.launched(4, [request])  # the run has gone on to other weights
    handle = Handle(0, 0, FakeEngine())
    assert [*salvage.keep_back(handle, [request])] == [request]


def test_what_older_weights_generate_is_not_written(tmp_path: Path, at: Path) -> None:
    salvage = Salvage(tmp_path, in_order=False)
    first, second = request_of(1), request_of(2)
    salvage.launched(0, [first])
    salvage.ended(*generated(first))  # before any checkpoint
    salvage.begin(at, 3)
    salvage.launched(4, [second])
    salvage.ended(*generated(second))
    salvage.close()
    assert not (tmp_path / FILE).exists()


def test_one_engine_goes_on_only_where_nothing_was_under_way(tmp_path: Path, at: Path) -> None:
    """Those of a round that was under way would be decoded beside fewer others than before."""
    requests = [request_of(row) for row in range(4)]
    salvage = Salvage(tmp_path, in_order=True)
    salvage.begin(at, 3)
    for pair in (requests[:2], requests[2:]):
        salvage.launched(3, pair)
        for request in pair:
            salvage.ended(*generated(request))
    salvage.close()
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-1])
    assert Salvage(tmp_path, at, 3, in_order=True).num_found[0] == 2
    (tmp_path / FILE).write_bytes(whole[:-1])
    assert Salvage(tmp_path, at, 3, in_order=False).num_found[0] == 3
    (tmp_path / FILE).write_bytes(whole)
    assert Salvage(tmp_path, at, 3, in_order=True).num_found[0] == 4


def test_behind_a_failed_sample_one_engine_begins_anew(tmp_path: Path, at: Path) -> None:
    def failed(request: GenerationRequest) -> tuple[SampleFailed, None]:
        return SampleFailed(time_s=0.0, sample=request.sample, reason="bad luck"), None

    requests = [request_of(row) for row in range(3)]
    ends = [failed, generated, generated]
    written(tmp_path, at, list(zip(requests, ends, strict=True)))
    whole = (tmp_path / FILE).read_bytes()
    assert Salvage(tmp_path, at, 3, in_order=True).num_found[0] == 0
    (tmp_path / FILE).write_bytes(whole)
    assert Salvage(tmp_path, at, 3, in_order=False).num_found[0] == 2


def test_what_was_stopped_is_stopped_again_or_generated(tmp_path: Path, at: Path) -> None:
    stopped, finished, not_now = (request_of(row) for row in range(3))
    ends = [(finished, generated), (stopped, aborted), (not_now, aborted)]
    written(tmp_path, at, ends)
    salvage = Salvage(tmp_path, at, 3, in_order=True)
    assert salvage.num_found[0] == 1
    assert launched(salvage, [stopped, finished, not_now]) == []
    elsewhere = SampleId(PromptId("train", 0, 9), 0, 0)
    found = []
    for _, output in salvage.outputs():
        found.append(output.event)
        if output.event.sample == finished.sample:  # the core's answer
            assert salvage.stop([stopped.sample, elsewhere]) == [elsewhere]
    assert [type(event) for event in found] == [SampleGenerated, SampleAborted]
    assert found[1].sample == stopped.sample
    assert [request for _, request in salvage.not_stopped()] == [not_now]
    assert launched(salvage, [not_now]) == [not_now.sample]


def test_of_a_lost_engine_it_waits_for_another(tmp_path: Path, at: Path) -> None:
    request = request_of(1)
    written(tmp_path, at, [(request, generated)])
    salvage = Salvage(tmp_path, at, 3, in_order=False)
    first, second = Handle(0, 0, FakeEngine()), Handle(1, 0, FakeEngine())
    salvage.launched(3, [request])
    assert not salvage.keep_back(first, [request])
    first.lives = False
    assert not [*salvage.outputs()]
    assert not salvage.keep_back(second, [request])
    assert [handle for handle, _ in salvage.outputs()] == [second]


def test_a_full_disk_costs_only_what_is_salvaged(
    tmp_path: Path, at: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = request_of(1)
    salvage = Salvage(tmp_path / "not there", in_order=False)
    salvage.begin(at, 3)
    salvage.launched(3, [request])
    salvage.ended(*generated(request))
    salvage.close()
    assert "a resume will draw its samples again" in caplog.text


# -- a real run ----------------------------------------------------------------------------

_KILLED = """
import json, os, signal, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import resume
import torch, transformers  # once, before the forks
from rollpacker.run.ports.commits import Commits

torch.set_num_threads(1)
write = Commits._write


def kill_at_the_fourth() -> None:
    def killed(self, step, *others):
        if step == 4:  # trained, and nothing of it on the disk
            self.salvage.close()
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, step, *others)

    Commits._write = killed


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    resume.write_model(folder / "model")
    config = resume.write_config(folder, 6)
    arm = resume.ARMS["pool"]
    assert resume.run(config, "reference", overrides=arm) == 0
    killed = resume.run(config, "killed", prepare=kill_at_the_fourth, overrides=arm)
    assert killed == -signal.SIGKILL, killed
    assert resume.run(config, "killed", resume=True, overrides=arm) == 0
    one, other = (folder / "runs" / name for name in ("reference", "killed"))
    expected, found = resume.fingerprints(one), resume.fingerprints(other)
    rows = [json.loads(line) for line in (other / "metrics.jsonl").open()]
    [row] = [row for row in rows if row.get("perf/salvaged_samples")]
    print(json.dumps({
        "different": [part for part in expected if expected[part] != found[part]],
        "problems": resume.check(other / "events.jsonl")["problems"],
        "step": row["step"],
        "samples": row["perf/salvaged_samples"] >= row["round/samples_trained"],
        "tokens": row["perf/salvaged_tokens"] > row["perf/salvaged_samples"],
        "left": (other / "salvage.bin").exists(),
    }))
"""


def test_a_real_round_is_taken_up_and_the_run_is_equal_bit_for_bit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, ROOT / "benchmarks"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "different": [],
        "problems": [],
        "step": 4,
        "samples": True,
        "tokens": True,
        "left": False,
    }
