"""The scheduler on its own, in a host that is made up."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.run.errors import DeadlineExceeded
from rollpacker.scheduler import Counted, Request, Scheduler
from tests.scheduler.made_up import PROMPTS, SAMPLES, MadeUp

NUM_PROMPTS = 504
"""63 steps of 8 prompts with 4 samples: 2,016 responses."""


@pytest.mark.parametrize("stragglers", ["queue", "pool"])
def test_it_trains_on_what_the_host_alone_would(stragglers: str) -> None:
    own = MadeUp(num_prompts=NUM_PROMPTS, enabled=False)
    ours = MadeUp(num_prompts=NUM_PROMPTS, prompt_factor=1.5, stragglers=stragglers)
    own.run()
    ours.run()
    assert own.trained.total() == NUM_PROMPTS * SAMPLES
    assert ours.trained == own.trained


def test_it_takes_fewer_decode_steps() -> None:
    own = MadeUp(num_prompts=1280, per_step=(64, 8), enabled=False)
    ours = MadeUp(num_prompts=1280, per_step=(64, 8), prompt_factor=1.25)
    own.run()
    ours.run()
    assert ours.trained == own.trained
    assert own.decode_steps > 1.6 * ours.decode_steps


@pytest.mark.parametrize("killed_after", range(1, 6))
def test_it_goes_on_after_a_kill(killed_after: int, tmp_path: Path) -> None:
    whole = MadeUp(num_prompts=80, prompt_factor=1.5)
    whole.run()
    first = MadeUp(num_prompts=80, prompt_factor=1.5)
    for number in range(killed_after):
        first.step()
        first.scheduler.save(tmp_path / str(number))
    done = first.trained.copy()
    first.scheduler.begin_step()  # and dies in it
    second = MadeUp(num_prompts=80, prompt_factor=1.5, resume=tmp_path / str(killed_after - 1))
    second.run()
    assert done + second.trained == whole.trained
    assert set(whole.trained.values()) == {1}


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_or_doubled_by_faults(seed: int) -> None:
    host = MadeUp(num_prompts=160, prompt_factor=1.5, faults=random.Random(seed))
    host.run()
    assert set(host.trained.values()) == {1}
    prompts = {prompt for prompt, _, _ in host.trained}
    assert len(prompts) > 0.95 * 160  # a prompt is dropped where its replacements fail, too
    assert host.trained.total() > 0.95 * 160 * SAMPLES


def test_metrics_with_races_and_without() -> None:
    for enabled in (False, True):
        host = MadeUp(num_prompts=80, enabled=enabled, prompt_factor=1.5)
        step = host.scheduler.begin_step()
        while not step.done():
            host.decode()
        metrics = host.scheduler.trained()
        assert metrics["tail_idle_s"] > 0
        assert metrics["prompts_launched"] == (12 if enabled else PROMPTS)
        assert metrics["prompts_deferred"] == (4 if enabled else 0)
        assert "tail idle" in host.scheduler.report()
        wall = host.scheduler._accounting.time.wall_s
        assert sum(host.scheduler.seconds().values()) == pytest.approx(wall), "a cause is left out"


def test_a_seed_belongs_to_the_prompt_and_the_place() -> None:
    seeds: dict[tuple[int, int], set[int]] = {}

    class Seen(MadeUp):
        def start(self, requests: object) -> None:
            for request in requests:  # type: ignore[attr-defined]
                seeds.setdefault((request.prompt, request.place), set()).add(request.seed)
            super().start(requests)  # type: ignore[arg-type]

    host = Seen(num_prompts=80, prompt_factor=2.0)
    host.run()
    assert {len(of) for of in seeds.values()} == {1}
    assert len({seed for of in seeds.values() for seed in of}) == len(seeds) == 80 * SAMPLES
    assert all(0 <= seed < 1 << 63 for of in seeds.values() for seed in of)


def test_what_a_host_does_wrong_is_one_sentence() -> None:
    host = MadeUp(num_prompts=80)
    with pytest.raises(RuntimeError, match="no step waits to be trained on"):
        host.scheduler.trained()
    step = host.scheduler.begin_step()
    with pytest.raises(RuntimeError, match="step 1 was begun and is not trained on yet"):
        host.scheduler.begin_step()
    with pytest.raises(RuntimeError, match="a step is under way"):
        host.scheduler.save(Path("nowhere"))
    with pytest.raises(ValueError, match=r"train/0/99#0\.0 is not running"):
        host.scheduler.ended("train/0/99#0.0", 3)
    with pytest.raises(ValueError, match="'seven' is not the id of a request"):
        host.scheduler.ended("seven", 3)
    request, _ = next(iter(host.running.values()))
    while not step.done():
        host.decode()
    with pytest.raises(ValueError, match="has ended before"):
        host.scheduler.ended(request, 3)


def test_a_deadline_says_what_is_waited_for() -> None:
    host = MadeUp(num_prompts=80)
    with pytest.raises(DeadlineExceeded, match="limit_s"):
        host.scheduler.next_step(limit_s=0.01)


def test_tokens_are_asked_for_where_they_are_carried() -> None:
    host = MadeUp(num_prompts=80, carry="exact")
    host.scheduler.begin_step()
    request, _ = next(iter(host.running.values()))
    with pytest.raises(ValueError, match=r"takes the tokens and not their number; or set carry"):
        host.scheduler.ended(request, 3)


def test_settings_that_need_the_hosts_loss_are_refused() -> None:
    for setting in (
        {"debias": "moments"},
        {"race": "scored"},
        {"look_ahead": 0.5, "carry": "exact"},
    ):
        with pytest.raises(ValueError, match="remove the setting"):
            MadeUp(num_prompts=80, **setting)


def test_without_saved_state_it_goes_on_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = MadeUp(num_prompts=16, resume=tmp_path)
    assert "goes on with the next prompts of the data" in caplog.text
    host.run()
    assert host.trained.total() == 16 * SAMPLES


@pytest.mark.parametrize("text", ["{", "{}", "null"])
def test_state_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "rollpacker").mkdir()
    (tmp_path / "rollpacker" / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        MadeUp(num_prompts=16, resume=tmp_path)


def test_in_an_event_loop() -> None:
    class Host:
        def start(self, requests: object) -> None:
            for request in requests:  # type: ignore[attr-defined]
                asyncio.get_running_loop().call_soon(scheduler.ended, request, 5)

        def stop(self, requests: list[Request]) -> None:
            for request in requests:
                asyncio.get_running_loop().call_soon(scheduler.ended, request, 1, "stopped")

    config = JobConfig(
        prompts_per_step=4,
        samples_per_prompt=2,
        max_steps=2,
        tail_batching=TailBatchingConfig(enabled=False),
    )
    scheduler = Scheduler(config, Host(), Counted(lambda count: count))

    async def train() -> int:
        count = 0
        while (step := await scheduler.next_step_async()) is not None:
            count += sum(map(len, step.groups))
            scheduler.trained()
        return count

    assert asyncio.run(train()) == 2 * 4 * 2


def test_it_loads_no_heavy_library() -> None:
    code = (
        "import sys, rollpacker.scheduler; print(*{'torch', 'transformers', 'pyarrow', 'pydantic', "
        "'omegaconf', 'yaml', 'rich', 'jinja2'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_the_example_runs() -> None:
    path = Path(__file__).parents[2] / "examples" / "scheduler" / "own_trainer.py"
    found = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True, env=os.environ
    )
    lines = found.stdout.splitlines()
    assert lines[0].startswith("step 1: 32 responses")
    assert lines[-1].startswith("rollpacker: 6 steps in ")
