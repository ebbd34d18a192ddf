"""Checkpoints survive what files suffer; run folders belong to one run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollpacker.config.load import changes_since, to_plain
from rollpacker.core.events import Committed
from rollpacker.core.records import Note, Record
from rollpacker.run.errors import RunError
from rollpacker.run.folder import checkpoint
from rollpacker.run.folder.checkpoint import (
    CheckpointError,
    has_checkpoint,
    newest_checkpoint,
    write_checkpoint,
)
from rollpacker.run.folder.event_log import LogWriter, cut_back
from rollpacker.run.folder.run_folder import RunFolder, check_resume
from rollpacker.run.folder.samples import SampleWriter
from rollpacker.run.folder.samples import cut_back as cut_back_samples
from rollpacker.run.parts.resuming import as_before, config_before, with_noise
from rollpacker.run.ports.evaluation import pass_at_k
from tests.run.fakes import run_config


def save(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"0123456789" * 100)


def write(root: Path, step: int, keep_last: int = 10) -> Path:
    return write_checkpoint(root, step, {"answer": step}, save, keep_last)


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path)
    for step in (1, 2, 3):
        write(tmp_path, step, keep_last=2)
    newest = newest_checkpoint(tmp_path)
    assert (newest.step, newest.state) == (3, {"answer": 3})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step_000002", "step_000003"]
    assert (tmp_path / "latest").read_text() == "step_000003\n"


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def in_circles(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: (f / "model" / "weights").write_bytes(b"1123456789" * 100), "SHA-256"),
        (lambda f: (f / "model" / "weights").write_bytes(b"short"), "5 bytes"),
        (lambda f: (f / "model" / "weights").unlink(), "is missing"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text('{"step": 1, "files": {}}'), "another step"),
        (lambda f: (f / "manifest.json").write_text('{"step": 2, "files": {}}'), "state.json"),
        (lambda f: (f / "state.json").write_text("{}"), "state.json has"),
        (lambda f: as_folder(f / "manifest.json"), "manifest.json cannot be read (Is a directory)"),
        (lambda f: in_circles(f / "manifest.json"), "manifest.json cannot be read (Too many level"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "(RecursionError)"),
    ],
)
def test_a_damaged_one_is_passed_over_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, problem: str
) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2))
    assert newest_checkpoint(tmp_path).step == 1
    assert "step_000002" in caplog.text and problem in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_one_that_the_disk_does_not_give_back_is_passed_over_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    write(tmp_path, 1)
    bad = write(tmp_path, 2) / "model" / "weights"
    whole = checkpoint._sha256

    def read(path: Path) -> str:
        if path == bad:
            raise OSError(number, os.strerror(number), str(path))
        return whole(path)

    monkeypatch.setattr(checkpoint, "_sha256", read)
    assert newest_checkpoint(tmp_path).step == 1
    said = f"step_000002: model/weights cannot be read ({os.strerror(number)})"
    assert said in caplog.text


def test_one_that_cannot_be_removed_is_a_warning_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = shutil.rmtree
    is_held = True

    def remove(path: Path, **settings: Any) -> None:
        if is_held and "step_000001" in path.name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        whole(path, **settings)

    monkeypatch.setattr(shutil, "rmtree", remove)
    write(tmp_path, 1, keep_last=1)
    for step in (2, 3):
        caplog.clear()
        write(tmp_path, step, keep_last=1)
        assert "step_000001" in caplog.text and "cannot be removed" in caplog.text
        assert newest_checkpoint(tmp_path).step == step
    is_held = False
    write(tmp_path, 4, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000004"]


def test_one_that_cannot_be_set_aside_is_a_warning_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "step_000001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return whole(path, target)

    write(tmp_path, 1, keep_last=1)
    monkeypatch.setattr(Path, "rename", rename)
    write(tmp_path, 2, keep_last=1)
    assert "step_000001" in caplog.text and "cannot be removed" in caplog.text
    assert newest_checkpoint(tmp_path).step == 2
    monkeypatch.undo()
    write(tmp_path, 3, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000003"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_identity_is_durable_before_it_replaces_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "identity.json"
    synced: list[tuple[str, str | None]] = []
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, path.read_text() if path.exists() else None))
        whole(descriptor)

    folder = RunFolder(tmp_path, resume=False, overwrite=False)
    folder.write_identity({"threads": 1})
    before = path.read_text()
    monkeypatch.setattr(os, "fsync", fsync)
    folder.write_identity({"threads": 2})
    folder.close()
    # The new text before it has the name, the name afterwards.
    assert synced == [("identity.json.tmp", before), (tmp_path.name, path.read_text())]
    assert before != path.read_text()


def test_no_good_one_at_all_is_said(tmp_path: Path) -> None:
    (write(tmp_path, 1) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_000001: state\.json is missing"):
        newest_checkpoint(tmp_path)


def test_a_failed_write_leaves_the_one_before(tmp_path: Path) -> None:
    def full_disk(folder: Path) -> None:
        save(folder)
        raise OSError(28, "No space left on device")

    write(tmp_path, 1)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path, 2, {}, full_disk, 10)
    assert newest_checkpoint(tmp_path).step == 1
    write(tmp_path, 2)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_pruning_keeps_what_was_just_written(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 20) / "state.json").unlink()
    assert newest_checkpoint(tmp_path).step == 10
    write(tmp_path, 15, keep_last=1)
    assert newest_checkpoint(tmp_path).step == 15
    assert (tmp_path / (tmp_path / "latest").read_text().strip()).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000015"]


def test_samples_are_cut_back_and_other_files_left_alone(tmp_path: Path) -> None:
    for first in (1, 3):
        writer = SampleWriter(tmp_path)
        writer.add([{"step": first}])
        writer.add([{"step": first + 1}])
        writer.write()
        writer.write_evaluation(first + 1, [{"step": first + 1, "passed": True}])
    for name, kept in (
        ("samples", "steps_000001-000002.parquet"),
        ("evaluations", "step_000002.parquet"),
    ):
        folder = tmp_path / name
        (folder / "notes.txt").write_text("mine")
        (folder / ".ipynb_checkpoints").mkdir()
        cut_back_samples(folder, 2)
        names = sorted(path.name for path in folder.iterdir())
        assert names == [".ipynb_checkpoints", "notes.txt", kept]


def test_a_log_shorter_than_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("{}\n")
    with pytest.raises(RunError, match="vouches for 100"):
        cut_back(path, 100, "")
    assert path.read_text() == "{}\n"


def test_a_log_that_cannot_be_written_says_so_at_once(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "events.jsonl", write_every_s=0.01)
    log._file.close()
    log.append(Note(time_s=1.0, name="evaluation", seconds=0.5, step=1))
    deadline = time.monotonic() + 60
    with pytest.raises(ValueError, match="closed file"):
        while time.monotonic() < deadline:
            time.sleep(0.02)
            log.raise_error()
    with pytest.raises(ValueError, match="closed file"):
        log.flush()


def test_one_run_at_a_time_and_no_overwriting_by_accident(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", resume=False, overwrite=False)
    with pytest.raises(RunError, match="another run is at work"):
        RunFolder(tmp_path / "run", resume=False, overwrite=False)
    folder.events.write_text("")
    folder.close()
    with pytest.raises(RunError, match="--resume"):
        RunFolder(tmp_path / "run", resume=False, overwrite=False)
    (tmp_path / "run" / "mine.txt").write_text("keep")
    again = RunFolder(tmp_path / "run", resume=False, overwrite=True)
    assert folder.events.exists()  # until everything else is known to be sound
    again.clear()
    again.close()
    assert not folder.events.exists() and (tmp_path / "run" / "mine.txt").exists()
    with pytest.raises(RunError, match="no run to resume"):
        RunFolder(tmp_path / "other", resume=True, overwrite=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="in the way"):
        RunFolder(tmp_path / "file", resume=False, overwrite=False)


def test_a_resume_refuses_what_would_make_another_run() -> None:
    same = {"model": "a", "train_data": "c", "dtype": "torch.float32"}
    harmless = check_resume(
        [("train.steps", 10, 20), ("rollout.engine.max_slots", None, 4)], same, same
    )
    assert harmless == ["train.steps: 10 -> 20", "rollout.engine.max_slots: None -> 4"]
    for change in (
        ("seed", 0, 1),
        ("data.train.path", "a", "b"),
        ("rewards[0].weight", 1, 2),
        ("train.threads", 1, 2),
        ("rollout.engine.noise", "rollpacker", "vllm"),
    ):
        with pytest.raises(RunError, match="refused"):
            check_resume([change], same, same)
    with pytest.raises(RunError, match="the training data changed"):
        check_resume([], same, {**same, "train_data": "d"})
    with pytest.raises(RunError, match=r"'<python>:g': a function that was mended .* same name"):
        check_resume([("rewards[0].function", "<python>:f", "<python>:g")], same, same)


def test_how_prompts_were_made_is_kept_over_a_resume() -> None:
    same = {"model": "a", "train_data": "c", "dtype": "torch.float32"}
    chat = {**same, "chat": {"train": True, "eval": False}}
    # A run of an earlier version, which rendered nothing; its lacking key is its default.
    assert check_resume([], same, {**same, "chat": {"train": False}}) == []
    with pytest.raises(RunError, match=r"set data\.train\.chat=false to go on") as caught:
        check_resume([], same, {**chat, "train_data": "d"})
    assert "training data changed" not in str(caught.value)
    with pytest.raises(RunError, match=r"set data\.eval\.chat=false to go on"):
        check_resume([], chat, {**same, "chat": {"train": True, "eval": True}})
    # The key may change where that changes nothing.
    changes = [("data.train.chat", "auto", True)]
    assert check_resume(changes, chat, chat) == ["data.train.chat: 'auto' -> True"]


def test_a_changed_reward_file_is_named() -> None:
    same = {"model": "a", "train_data": "c", "dtype": "torch.float32"}
    before = {**same, "files": {"the reward f": "1"}}
    now = {**same, "files": {"the reward f": "2"}}
    assert check_resume([], before, before) == check_resume([], same, now) == []
    (line,) = check_resume([], before, now)
    assert line.startswith("the code of the reward f changed since the run began: ")
    assert "not comparable" in line


def test_a_log_is_cut_back_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = LogWriter(path)
    note = Note(time_s=1.0, name="evaluation", seconds=0.5, step=1)
    log.append(note)
    mark = log.mark()
    log.append(note)
    log.close()
    assert len(path.read_text().splitlines()) == 2
    cut_back(path, mark["log_bytes"], mark["log_sha256"])
    assert len(path.read_text().splitlines()) == 1
    assert len(path.with_suffix(".lost.jsonl").read_text().splitlines()) == 1


def test_pass_at_k_is_the_chance_that_k_draws_hold_a_pass() -> None:
    metrics = pass_at_k({0: (1, 4), 1: (4, 4), 2: (0, 4)}, most=4)
    assert metrics["eval/pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert metrics["eval/pass@2"] == pytest.approx((0.5 + 1 + 0) / 3)  # 1 - (3/4)(2/3)
    assert metrics["eval/pass@4"] == pytest.approx(2 / 3)
    assert pass_at_k({0: (1, 1)}, most=2) == {"eval/pass@1": 1.0}


def test_checkpoints_are_counted_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 1_000_001):
        write(tmp_path, step, keep_last=2)
    assert newest_checkpoint(tmp_path).step == 1_000_001
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step_1000000", "step_1000001"]


def test_a_file_that_loading_would_take_up_but_nobody_vouches_for(tmp_path, caplog) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    (folder / "model" / "notes.txt").write_text("harmless")
    assert newest_checkpoint(tmp_path).step == 2
    (folder / "model" / "model-00002.safetensors").write_bytes(b"stray")
    assert newest_checkpoint(tmp_path).step == 1
    assert "model/model-00002.safetensors is not in its manifest" in caplog.text


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """A folder in which a run was, opened to resume it."""
    folder = RunFolder(tmp_path / "run", resume=False, overwrite=False)
    folder.config.write_text("name: run\n")
    folder.write_identity({"model": "a", "dtype": "b", "train_data": "c", "threads": 1})
    folder.close()
    again = RunFolder(tmp_path / "run", resume=True, overwrite=False)
    yield again
    again.close()


def test_a_run_whose_checkpoints_cannot_be_seen_is_not_begun_anew(run: RunFolder) -> None:
    log = LogWriter(run.events)
    assert run.find_checkpoint() is None
    committed = Committed(time_s=1.0, step=1, checkpointed=False)
    log.append(Record(time_s=1.0, event=committed, commands=(), cost_s=0.0))
    log.flush()
    assert run.find_checkpoint() is None
    committed = Committed(time_s=2.0, step=2, checkpointed=True)
    log.append(Record(time_s=2.0, event=committed, commands=(), cost_s=0.0))
    mark = log.mark()
    log.close()
    for make in (
        lambda: None,
        run.checkpoints.mkdir,
        lambda: (run.checkpoints.rmdir(), run.checkpoints.symlink_to("nowhere")),
        lambda: cut_back(run.events, 0, hashlib.sha256().hexdigest()),
    ):
        make()
        with pytest.raises(RunError, match=r"tells of a checkpoint, but there is none in"):
            run.find_checkpoint()
    assert mark["log_bytes"] > 0


def test_what_a_kill_left_half_done_is_tidied(run: RunFolder) -> None:
    for step in (4, 5):
        write(run.checkpoints, step)
    (run.checkpoints / "latest").write_text("step_000004\n")
    (run.checkpoints / "latest.tmp-77").write_text("step_000005\n")
    found = run.find_checkpoint()
    assert found is not None and found.step == 5
    assert (run.checkpoints / "latest").read_text() == "step_000005\n"
    assert not list(run.checkpoints.glob("*.tmp-*"))


def test_the_last_model_is_where_a_link_says(run: RunFolder) -> None:
    link = run.path / "model"
    for step in (4, 5):
        write_checkpoint(run.checkpoints, step, {}, save, 1, run=run.path)
        assert link.resolve() == (run.checkpoints / f"step_{step:06d}" / "model").resolve()
    link.unlink()
    link.symlink_to("checkpoints/step_000004/model")  # a kill came between checkpoint and link
    run.find_checkpoint()
    assert link.readlink() == Path("checkpoints/step_000005/model")
    run.clear()
    assert not link.is_symlink()


def test_what_the_user_calls_model_stays(run: RunFolder) -> None:
    (run.path / "model").mkdir()
    write_checkpoint(run.checkpoints, 4, {}, save, 1, run=run.path)
    run.clear()
    assert (run.path / "model").is_dir()


def test_a_run_of_another_version_is_refused_by_one_message(run: RunFolder) -> None:
    folder = write(run.checkpoints, 4)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(RunError, match=r"another version of RollPacker .* --overwrite"):
        run.find_checkpoint()
    assert newest_checkpoint(run.checkpoints).step == 4  # its model can still be used


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "null", '"a"', '{"threads": 1}'),
        '{"model": "a", "dtype": "b", "train_data": "c", "threads": "abc"}',
        '{"model": "a", "dtype": "b", "train_data": 3, "threads": 1}',
        '{"model": "a", "dtype": "b", "train_data": "c", "threads": 0}',
    ],
)
def test_an_identity_that_is_none_is_one_message(run: RunFolder, text: str) -> None:
    assert run.read_identity()["threads"] == 1
    (run.path / "identity.json").write_text(text)
    with pytest.raises(RunError, match=r"identity\.json cannot be read .* --overwrite"):
        run.read_identity()


def test_clearing_follows_links_and_takes_only_what_is_ours(run: RunFolder, tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    run.checkpoints.symlink_to(disk)
    write(run.checkpoints, 1)
    (disk / "mine").mkdir()
    (run.path / "identity.tmp-77").write_text("{}")
    (run.path / "notes.txt").write_text("mine")
    run.clear()
    assert sorted(path.name for path in run.path.iterdir()) == [
        *("checkpoints", "notes.txt", "run.lock"),
    ]
    assert run.checkpoints.is_symlink() and [path.name for path in disk.iterdir()] == ["mine"]
    write(run.checkpoints, 1)
    (disk / "mine").rmdir()
    shutil.move(disk, tmp_path / "away")
    run.config.write_text("name: run\n")
    with pytest.raises(RunError, match="which is not there: mount it"):
        run.clear()
    assert run.config.exists()


def test_a_log_with_other_contents_than_its_checkpoint_saw_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"reward": 0}\n')
    log = LogWriter(path)  # goes on with what is there
    log.append(Note(time_s=1.0, name="evaluation", seconds=0.5, step=1))
    mark = log.mark()
    log.close()
    good = path.read_text()
    path.write_text(good.replace('"reward": 0', '"reward": 1') + "more\n")
    with pytest.raises(RunError, match="was changed since it was written"):
        cut_back(path, mark["log_bytes"], mark["log_sha256"])
    path.write_text(good + "more\n")
    cut_back(path, mark["log_bytes"], mark["log_sha256"])
    assert path.read_text() == good


def test_noise_is_decided_once_and_kept_by_later_sessions(tmp_path: Path) -> None:
    """A run that began where vLLM has a GPU goes on with its noise, and a run from before there was
    a choice with RollPacker's."""
    config = run_config()
    assert config.rollout.engine.noise == "auto"
    folder = RunFolder(tmp_path / "run", resume=False, overwrite=False)
    for saved, expected in (("vllm", "vllm"), (None, "rollpacker")):
        plain = to_plain(with_noise(config, saved or "vllm"))
        if saved is None:
            del plain["rollout"]["engine"]["noise"]
        folder.config.write_text(json.dumps(plain))
        before = config_before(folder)
        kept = as_before(config, folder)
        assert kept.rollout.engine.noise == expected
        assert changes_since(before, kept) == []
        (change,) = changes_since(before, with_noise(config, "other"))
        assert change == ("rollout.engine.noise", expected, "other")
    folder.close()
    assert with_noise(kept, "vllm") == kept
