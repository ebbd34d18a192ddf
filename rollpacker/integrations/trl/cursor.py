"""The order in which rows become prompts, which is that of TRL's own sampler. It
ends with TRL's last step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl.trainer.utils import RepeatSampler

from rollpacker.core.ids import PromptId

SOURCE = "train"


class SamplerCursor:
    """The rows that TRL's sampler would draw, in its order. As there, the end of an epoch that does
    not fill a step is not trained on.

    It ends with the prompts of the last step, since a prompt begun early for a later step would
    never be trained on.
    """

    def __init__(
        self, num_rows: int, *, prompts_per_step: int, num_steps: int, shuffle: bool, seed: int
    ) -> None:
        """`num_steps` is the number of times that TRL asks for responses, each time for
        `prompts_per_step` prompts."""
        self._sampler = RepeatSampler(
            range(num_rows),
            mini_repeat_count=1,
            batch_size=prompts_per_step,
            shuffle=shuffle,
            seed=seed,
        )
        self._left = num_steps * prompts_per_step
        self._epoch = -1
        self._position = 0
        self._order: list[int] = []
        self._begin_epoch()

    def take(self, count: int) -> tuple[tuple[PromptId, ...], bool, bool]:
        """Return the ids of up to `count` prompts, whether an epoch ended with them, and whether
        the prompts of all steps have been taken."""
        if self.ended:
            return (), True, True
        count = min(count, self._left)
        rows = self._order[self._position : self._position + count]
        prompts = tuple(PromptId(SOURCE, self._epoch, row) for row in rows)
        self._position += len(rows)
        self._left -= len(rows)
        epoch_ended = self._position == len(self._order)
        if epoch_ended:
            self._begin_epoch()
        return prompts, epoch_ended or self.ended, self.ended

    def skip(self, count: int) -> None:
        """Leave out this number of prompts, which were trained on before."""
        while count > 0 and not self.ended:
            prompts, _, _ = self.take(count)
            count -= len(prompts)

    @property
    def ended(self) -> bool:
        """Whether the prompts of all steps have been taken."""
        return self._left == 0

    def state(self) -> dict[str, Any]:
        """The cursor's present place in the data, to be given to `restore`."""
        return {"epoch": self._epoch, "position": self._position, "order": len(self._order)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a place that `state` returned. Only for a cursor that has not been used.
        Raises `ValueError` if an epoch then had another number of prompts."""
        if state["order"] != len(self._order):
            raise ValueError(
                f"cannot resume: an epoch had {state['order']} prompts, and now has "
                f"{len(self._order)}. Restore the data and the batch size, or start a new training"
            )
        while self._epoch < state["epoch"]:
            self._left -= len(self._order)
            self._begin_epoch()
        self._position = state["position"]
        self._left = max(0, self._left - self._position)

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._position = 0
        self._order = list(self._sampler)
