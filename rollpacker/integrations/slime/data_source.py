"""slime's data source, with the prompts that were fetched and not trained on yet.

    keep   at a rollout's end: writes what a run goes on with into a folder beside slime's own file
    save   slime has a checkpoint of that rollout, so the folder stays, and `load` goes on from it

`keep` comes before slime saves its model, so that each checkpoint has a folder wherever slime was
killed; and before train_async.py, which saves later, takes the next rollout's prompts.
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

SETTINGS = "rollpacker"
"""Key of the settings in the YAML of --custom-config-path, which makes it one of slime's args."""
PROMPTS = "prompts.json"
"""Name of the file with the prompts that wait, beside what the scheduler saves."""
POSITION = ("epoch_id", "sample_offset", "sample_group_index", "sample_index", "metadata")
"""slime's own names of where its dataset stands."""


class DataSource(RolloutDataSource):  # type: ignore[misc]  # slime is not typed
    """slime's dataset in its order, whose prompts wait here until they are trained on."""

    def __init__(self, args: Any) -> None:
        """Raises `ValueError` for settings of slime that do not go with tail batching."""
        self.job = _job(args)
        super().__init__(args)
        self.rows: dict[int, Any] = {}
        """A sample without response of each prompt that was fetched and not trained on, by the
        prompt's number, which is slime's `group_index`."""
        self.rollouts: Any = None
        """The responses of all rollouts (`rollouts.Rollouts`). None: none was asked for."""
        self.rollout_id = -1
        """Number of the newest rollout."""
        self.resume: Path | None = None
        """Folder that the scheduler goes on from."""
        self._written: list[int] = []

    def fetch(self, count: int) -> int:
        """Take up to `count` prompts, and return how many there are: as many as slime's rollouts
        still train on, so that none waits when its run ends."""
        args, size = self.args, self.args.rollout_batch_size
        num_rollout = args.num_rollout or len(self) // size * args.num_epoch
        count = max(min(count, (num_rollout - self.rollout_id) * size - len(self.rows)), 0)
        for _ in range(count):
            row = self.get_samples(1)[0][0]
            if args.save and json.loads(json.dumps(row.to_dict(), default=repr)) != row.to_dict():
                raise ValueError(
                    "a prompt of the data is not plain JSON, so it cannot wait in a checkpoint"
                )
            self.rows[row.group_index] = row
        return count

    def keep(self, rollout_id: int, scheduler: Scheduler) -> None:
        """Write what a run goes on with after this rollout, and remove what no checkpoint needs."""
        self.rows = {one: self.rows[one] for one in scheduler.waiting}
        if not self.args.save:
            return
        folder = _folder(self.args.save, rollout_id)
        beside = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(beside, ignore_errors=True)
        scheduler.save(beside)
        position = {name: getattr(self, name) for name in POSITION}
        state = {"position": position, "prompts": [row.to_dict() for row in self.rows.values()]}
        (beside / FOLDER / PROMPTS).write_text(json.dumps(state) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        self._written.append(rollout_id)
        while len(self._written) > 2:  # slime saves a rollout before the next but one has ended
            shutil.rmtree(_folder(self.args.save, self._written.pop(0)), ignore_errors=True)

    def save(self, rollout_id: int) -> None:
        """Save slime's own state, and have what `keep` wrote after this rollout stay."""
        super().save(rollout_id)
        self._written = [one for one in self._written if one != rollout_id]

    def load(self, rollout_id: int | None = None) -> None:
        """Go on after this rollout, without state of the scheduler with the data's next prompts.
        Raises `ValueError` if the state cannot be read."""
        super().load(rollout_id)
        if self.args.load is None or rollout_id is None or rollout_id < 0:
            return
        self.rollout_id, folder = rollout_id, _folder(self.args.load, rollout_id)
        if not has_state(folder):
            logging.getLogger(__name__).warning(
                "%s is not there: prompts that waited at this checkpoint are not trained on, and "
                "those from number %s of the data on are drawn anew",
                folder,
                self.sample_group_index,
            )
            return
        path = folder / FOLDER / PROMPTS
        try:
            state = json.loads(path.read_text())
            self.__dict__ |= {name: state["position"][name] for name in POSITION}
            self.rows = {row["group_index"]: Sample.from_dict(row) for row in state["prompts"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
        self.resume = folder
        if self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)


def _folder(checkpoints: str, rollout_id: int) -> Path:
    return Path(checkpoints, "rollout", f"rollpacker_{rollout_id}")


def _job(args: Any) -> JobConfig:
    """Return what the scheduler is to know, unless arguments do not go with tail batching."""
    tree = {"carry": "none", **(getattr(args, SETTINGS, None) or {})}
    tail = config_of(tree, (), TailBatchingConfig, where=SETTINGS)
    no_seeds = not getattr(args, "sglang_enable_deterministic_inference", False)
    more = args.over_sampling_batch_size not in (None, args.rollout_batch_size)
    images = args.multimodal_keys and not args.custom_generate_function_path
    refused = {
        "--partial-rollout: what is stopped begins anew": args.partial_rollout,
        "--dynamic-sampling-filter-path, which drops prompts": args.dynamic_sampling_filter_path,
        "--buffer-filter-path: the scheduler says which prompts wait": args.buffer_filter_path,
        f"--over-sampling-batch-size: {SETTINGS}.prompt_factor says how many prompts begin": more,
        "--disable-rollout-global-dataset, without prompts": not args.rollout_global_dataset,
        "--multimodal-keys, unless with --custom-generate-function-path": images,
        f"{SETTINGS}.carry={tail.carry}: slime's servers take no tokens up": tail.carry != "none",
        "servers that take no seeds: add --sglang-enable-deterministic-inference": (
            tail.enabled and no_seeds
        ),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"tail batching in slime does not go with {what}")
    return JobConfig(
        prompts_per_step=args.rollout_batch_size,
        samples_per_prompt=args.n_samples_per_prompt,
        max_steps=None,  # `DataSource.fetch` decides where the prompts end
        max_response_tokens=args.rollout_max_response_len,
        tail_batching=tail,
    )
