"""Loss weights that undo the length bias of short rounds.

These train on the first samples to finish. `Debias` gives each trained sample a weight, a function
of its length alone, such that the weighted samples of the last steps are as long as the policy's
own, which a `LengthWindow` knows.

Every fresh prompt is trained on once, so prompts need no correction; only the responses inside them
are selected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollpacker.codec import to_plain
from rollpacker.core.ids import PromptId
from rollpacker.core.lengths.bins import FloatArray
from rollpacker.core.lengths.weights import effective_sample_size, moment_weights
from rollpacker.core.lengths.window import LengthWindow
from rollpacker.core.portable import total_of

METHOD = "moments"
"""Name of the only method of loss weights (`tail_batching.debias`), as checkpoints hold it."""


class Debias:
    """Computes the loss weights of one run's trained samples, anew in every step, because one long
    round changes how many of the longest responses were trained on."""

    def __init__(
        self,
        *,
        cap: int | None,
        window_steps: int = 50,
        max_weight: float = 10.0,
    ) -> None:
        """`cap`: the longest response there can be, in tokens; None if there is no bound."""
        if not max_weight >= 1:
            raise ValueError(f"max_weight must be at least 1, not {max_weight}")
        self.max_weight = max_weight
        self.window = LengthWindow(cap=cap, window_steps=window_steps)
        self._table: FloatArray | None = None
        """(B,) weight of a sample, by bin of length. None: there are no weights yet."""

    def observe(self, prompt: PromptId, finished: Sequence[int], stopped: Sequence[int]) -> None:
        """Records lengths, in tokens, of one launch of a prompt: complete and stopped responses."""
        self.window.observe(prompt, finished, stopped)

    def step(self, trained_lengths: Sequence[int]) -> list[float] | None:
        """Ends a step, after `observe` was given all of its launches. Returns the loss weight of
        each trained sample. None before the first weights were computed. Over the trained samples
        of the window the weights have the mean 1; over one step they need not. The weights are
        those that the steps before led to: a step that happens to hold many long responses would
        otherwise weigh them less for that very reason, and the weighted lengths would come out
        short."""
        self.window.make_room(trained_lengths)
        early = self.weigh(trained_lengths)
        self.window.close_step(trained_lengths)
        model, (counts, _) = self.window.model, self.window.trained()
        self._table = None
        if model is not None and counts.sum():
            self._table = moment_weights(model, counts, max_weight=self.max_weight)
        return self.weigh(trained_lengths) if early is None else early

    def weigh(self, lengths: Sequence[int]) -> list[float] | None:
        """Loss weights of samples of these lengths in tokens. None before the first weights."""
        table = self._table_in_force()
        if table is None:
            return None
        weights: list[float] = table[self.window.bins(lengths)].tolist()
        return weights

    def metrics(self) -> dict[str, float]:
        """Metrics, by name, of the window's lengths, their weighted mean, and the loss weights."""
        metrics, table = self.window.metrics(), self._table_in_force()
        if table is None or not metrics:
            return metrics
        counts, tokens = self.window.trained()
        weighted = counts * table
        on_bound = table >= self.max_weight * (1 - 1e-9)
        return metrics | {
            "length/weighted_mean": total_of(tokens * table) / total_of(weighted),
            "debias/effective_sample_size": effective_sample_size(table, counts),
            "debias/max_weight": float(table[counts > 0].max()),
            "debias/clip_share": float(counts[on_bound].sum() / counts.sum()),
        }

    def _table_in_force(self) -> FloatArray | None:
        """(B,) loss weights by bin of length. None: there are none, or bins were added since."""
        table = self._table
        return None if table is None or table.size != self.window.num_bins else table

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Window and weights as plain JSON values, for another instance to go on as this one."""
        saved = replace(self.window.saved(), method=METHOD, table=self._table_in_force())
        return to_plain(saved)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the `state` of another instance, or of a `LengthWindow` alone. From the latter
        come no weights: there are none until the next step ends."""
        saved = self.window.restore(state)
        self._table = saved.table if saved.method == METHOD else None
