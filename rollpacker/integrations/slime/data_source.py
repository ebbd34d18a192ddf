"""slime's data source, with the prompts that were fetched and not trained on yet.

    fetch   takes prompts from slime's dataset, for the scheduler
    keep    at the end of a rollout: what goes on from it, into a folder beside slime's own file
    save    slime has a checkpoint of this rollout, so its folder stays
    load    goes on from that folder

A folder is written before slime saves its model, so that there is one for every checkpoint,
wherever slime was killed; and before the next rollout takes prompts, which in train_async.py
happens before slime saves. It holds JSON alone.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from slime.rollout.data_source import RolloutDataSource
from slime.utils.types import Sample

from rollpacker.config.load import config_of
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.scheduler import FOLDER, Scheduler, has_state

logger = logging.getLogger(__name__)

SETTINGS = "rollpacker"
"""Name of the argument of slime that has the settings. The YAML of --custom-config-path sets it."""
PROMPTS = "prompts.json"
"""Name of the file with the prompts that wait, beside what the scheduler saves."""
POSITION = ("epoch_id", "sample_offset", "sample_group_index", "sample_index", "metadata")
"""slime's own names of where its dataset stands."""
NUM_KEPT = 2
"""Rollouts whose folders stay until it is known whether slime saves a checkpoint of them."""


class DataSource(RolloutDataSource):  # type: ignore[misc]  # slime is not typed
    """slime's dataset, read in its order, whose prompts wait here until they are trained on."""

    def __init__(self, args: Any) -> None:
        """Raises `ValueError` for settings of slime that do not go with tail batching."""
        self.job = job_of(args)
        check(args, self.job)
        super().__init__(args)
        self.rows: dict[int, Any] = {}
        """A sample without response of each prompt that was fetched and not trained on, by the
        prompt's number, which is slime's `group_index`."""
        self.rollouts: Any = None
        """The responses of the rollouts (`rollouts.Rollouts`). None: none was asked for."""
        self.rollout_id = -1
        """Number of slime's newest rollout."""
        self.resume: Path | None = None
        """Folder that the scheduler goes on from."""
        self._written: list[int] = []

    def fetch(self, count: int) -> int:
        """Take up to `count` prompts, and return how many there are: as many as slime's rollouts
        still train on, so that none waits when its run ends."""
        if (num_rollout := self.args.num_rollout) is None:
            num_rollout = len(self) // self.args.rollout_batch_size * self.args.num_epoch
        left = (num_rollout - self.rollout_id) * self.args.rollout_batch_size - len(self.rows)
        count = max(min(count, left), 0)
        for _ in range(count):
            ((row, *_),) = self.get_samples(1)
            if self.args.save is not None:
                check_row(row)
            self.rows[row.group_index] = row
        return count

    def keep(self, rollout_id: int, scheduler: Scheduler) -> None:
        """Write what a run goes on with after this rollout, and remove what no checkpoint needs."""
        if self.args.save is None:
            return
        folder = folder_of(self.args.save, rollout_id)
        beside = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(beside, ignore_errors=True)
        scheduler.save(beside)
        state = {
            "position": {name: getattr(self, name) for name in POSITION},
            "prompts": [row.to_dict() for row in self.rows.values()],
        }
        (beside / FOLDER / PROMPTS).write_text(json.dumps(state) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        self._written.append(rollout_id)
        while len(self._written) > NUM_KEPT:
            shutil.rmtree(folder_of(self.args.save, self._written.pop(0)), ignore_errors=True)

    def save(self, rollout_id: int) -> None:
        """Save slime's own state, and have what `keep` wrote after this rollout stay."""
        super().save(rollout_id)
        self._written = [one for one in self._written if one != rollout_id]

    def load(self, rollout_id: int | None = None) -> None:
        """Go on after this rollout. A checkpoint without state of the scheduler goes on with the
        next prompts of the data. Raises `ValueError` if the state cannot be read."""
        super().load(rollout_id)
        if self.args.load is None or rollout_id is None or rollout_id < 0:
            return
        self.rollout_id = rollout_id
        folder = folder_of(self.args.load, rollout_id)
        if not has_state(folder):
            logger.warning(
                "%s is not there: the run goes on with prompt %s of the data, and prompts that "
                "waited for a later step at this checkpoint are not trained on",
                folder,
                self.sample_group_index,
            )
            return
        path = folder / FOLDER / PROMPTS
        try:
            state = json.loads(path.read_text())
            for name in POSITION:
                setattr(self, name, state["position"][name])
            rows = [Sample.from_dict(row) for row in state["prompts"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
        self.rows, self.resume = {row.group_index: row for row in rows}, folder
        if self.args.rollout_shuffle and self.dataset is not None:
            self.dataset.shuffle(self.epoch_id)


def folder_of(checkpoints: str, rollout_id: int) -> Path:
    """Return the folder of what a run goes on with after this rollout, beside slime's own file."""
    return Path(checkpoints, "rollout", f"rollpacker_{rollout_id}")


def check_row(row: Any) -> None:
    """Raise `ValueError` if a prompt's sample holds what a file of JSON cannot have."""
    for key, value in row.to_dict().items():
        try:
            is_plain = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            is_plain = False
        if not is_plain:
            raise ValueError(
                f"the field {key} of a prompt's sample is not plain JSON, so the prompt can wait in "
                "no checkpoint: leave it out of the data, or train without --save"
            )


def job_of(args: Any) -> JobConfig:
    """Return what the scheduler is to know of slime's arguments. Raises `ValueError`."""
    tree = {"carry": "none", **(getattr(args, SETTINGS, None) or {})}
    if tree["carry"] != "none":
        raise ValueError(
            f"{SETTINGS}.carry={tree['carry']}: slime's servers take no tokens up, leave it out"
        )
    return JobConfig(
        prompts_per_step=args.rollout_batch_size,
        samples_per_prompt=args.n_samples_per_prompt,
        max_steps=None,  # `DataSource.fetch` decides where the prompts end
        max_response_tokens=args.rollout_max_response_len,
        tail_batching=config_of(tree, (), TailBatchingConfig, where=SETTINGS),
    )


def check(args: Any, job: JobConfig) -> None:
    """Raise `ValueError` for settings of slime that do not go with tail batching."""
    races = job.tail_batching.enabled
    refused = {
        "--partial-rollout: a response that is stopped begins anew": args.partial_rollout,
        "--dynamic-sampling-filter-path: it replaces prompts that the scheduler has chosen": (
            args.dynamic_sampling_filter_path is not None
        ),
        f"--over-sampling-batch-size: {SETTINGS}.prompt_factor says how many prompts are begun": (
            args.over_sampling_batch_size not in (None, args.rollout_batch_size)
        ),
        "--buffer-filter-path: the scheduler decides which prompts wait": (
            args.buffer_filter_path is not None
        ),
        "--disable-rollout-global-dataset: prompts come from slime's dataset": (
            not args.rollout_global_dataset
        ),
        "--multimodal-keys, but with --custom-generate-function-path: servers are sent tokens": (
            bool(args.multimodal_keys) and not args.custom_generate_function_path
        ),
        "a server without --sglang-enable-deterministic-inference: it takes no seeds, so deferred "
        "responses would be others": (
            races and not getattr(args, "sglang_enable_deterministic_inference", False)
        ),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"tail batching in slime does not go with {what}")
