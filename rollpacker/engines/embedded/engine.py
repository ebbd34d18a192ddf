"""The embedded engine: continuous batching over the trainer's own module, on a CPU or one GPU.

In each turn of its thread (engines/loop.py) it takes what was submitted and aborted, admits waiting
requests into free rows, decodes one token for every row, and reports what ended.

It is made for a CPU. On CUDA it runs the same code, kernel by kernel, and logs that vLLM is the
engine for GPUs.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from msgspec import structs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.embedded.decoder import Decoder
from rollpacker.engines.embedded.drafts import Drafter
from rollpacker.engines.embedded.endings import Endings
from rollpacker.engines.embedded.extend import Extender, Guess
from rollpacker.engines.embedded.kept_rows import KeptRow, KeptRows
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import (
    NOT_NUMBERS,
    EngineConfig,
    EngineOutput,
    EngineStatus,
)
from rollpacker.engines.loop import (
    LoopEngine,
    Numbered,
    abortion,
    failure,
    untouched,
    why_impossible,
)

logger = logging.getLogger(__name__)


SLOW_ON_CUDA = (
    "the embedded engine decodes on CUDA without captured graphs, which is slow:"
    " rollout.engine.name=vllm is the engine for GPUs"
)


class TorchEngine(LoopEngine):
    """An `Engine` that samples from `model` as it is, reading the weights in place.

    So `update_weights` without weights only notes the version, and the weights may be changed in
    place only while nothing runs. The model keeps RollPacker's attention (see `install_attention`),
    and its training mode whenever the engine is idle. Set torch's thread count before `start`.

    Raises:
        UnsupportedModelError: the model's architecture cannot run here; the message says why.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: EngineConfig,
        device: torch.device | str | None = None,
    ) -> None:
        """`tokenizer` is needed for stop strings only. `device`: None means the model's device."""
        super().__init__(model)
        self._device = torch.device(device or next(model.parameters()).device)
        if self._device.type == "cuda":
            logger.warning(SLOW_ON_CUDA)
        was_training = model.training
        model.train(False)
        self._decoder = Decoder(model, config, self._device)
        model.train(was_training)
        self._endings = Endings(model, tokenizer, self._decoder.rows.vocabulary_size)
        self._extender = Extender(self._decoder, self._endings)
        can_draft = config.draft_tokens > 0 and self._device.type == "cpu"
        self._drafter = Drafter(config.draft_tokens) if can_draft else None
        self._kept = KeptRows(self._decoder.slots)
        self._max_positions = getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )

        # The worker's own.
        self._waiting: deque[Pending] = deque()
        self._num_generated = 0
        self._busy = False
        self._was_training = was_training

    # -- the protocol ------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """Return counts of samples, tokens and steps; see `Engine.status`."""
        self._inbox.check_open()
        num_in_flight = self._inbox.num_in_flight
        num_running = min(self._decoder.rows.num_rows, num_in_flight)
        return EngineStatus(
            num_running=num_running,
            num_waiting=num_in_flight - num_running,
            version=self._version,
            generated_tokens=self._num_generated,
            decode_steps=self._decoder.num_steps,
            drafted_tokens=self._drafter.num_drafted if self._drafter is not None else 0,
            accepted_tokens=self._drafter.num_accepted if self._drafter is not None else 0,
        )

    @property
    def num_prefilled_tokens(self) -> int:
        """Number of prompt tokens that went through the model since the engine was made."""
        return self._decoder.num_prefilled_tokens

    # -- the worker --------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _turn(self) -> list[Numbered]:
        """Take what was submitted and aborted. If no sample ended by that, admit requests, or if
        none can be admitted decode one step. Returns the outputs of samples that ended."""
        outputs = self._take_inbox()
        if not outputs:
            num_new = self._decoder.num_admissible(self._waiting)
            if num_new:
                outputs = self._admit(num_new)
            elif self._decoder.rows.num_rows:
                self._num_generated += self._step()
                outputs = self._collect_ended(0)
        return outputs

    def _step(self) -> int:
        """Make one decode step, with drafts (guessed next tokens) if they pay, and return the
        number of tokens generated."""
        rows = self._decoder.rows
        drafts = self._drafter.propose(rows) if self._drafter is not None else None
        if self._drafter is None or drafts is None:
            self._decoder.step()
            return rows.num_rows
        num_new = self._extender.extend(np.arange(rows.num_rows), [Guess(one) for one in drafts])
        self._decoder.num_steps += 1
        self._drafter.judge(num_new)
        return int(num_new.sum())

    def _remove(self, gone: np.ndarray) -> None:
        """Remove the rows whose indices are in `gone`, and keep their responses as a source of
        drafts for samples of the same prompts."""
        if self._drafter is not None:
            self._drafter.keep(self._decoder.rows, gone.tolist())
        self._decoder.remove(gone)

    def _rest(self) -> None:
        """Put the model back into its former mode (training or not), and forget all drafts."""
        if self._busy:
            self._busy = False
            self._decoder.forget_prompt()
            if self._drafter is not None:
                self._drafter.forget()
            self._model.train(self._was_training)

    def _forget_kept(self) -> None:
        self._kept.clear()

    def _let_go(self) -> None:
        if self._is_on_device:
            self._decoder.let_go()
        super()._let_go()

    # -- requests come -----------------------------------------------------------------------------

    def _take_inbox(self) -> list[Numbered]:
        """Queue new requests, and remove aborted ones from the queue or from their rows. Returns
        the outputs of aborted requests and of those that can never run."""
        self._kept.let_go(self._inbox.take_let_go())
        submitted, aborted = self._inbox.take()
        outputs = []
        for entry in submitted:
            reason = self._why_impossible(entry)
            if reason is None:
                self._waiting.append(entry)
            else:
                outputs.append(failure(entry, reason))
        if aborted:
            outputs.extend(self._abort(aborted))
        return outputs

    def _abort(self, samples: set[SampleId]) -> list[Numbered]:
        outputs = []
        for entry in [entry for entry in self._waiting if entry.request.sample in samples]:
            self._waiting.remove(entry)
            self._kept.let_go([entry.request.sample])
            outputs.append(abortion(entry, untouched(entry, self._version)))
        rows = self._decoder.rows
        gone = [row for row, entry in enumerate(rows.pending) if entry.request.sample in samples]
        for row in gone:
            response = rows.response(row, "aborted", self._version)
            outputs.append(abortion(rows.pending[row], response, **self._carrying(row)))
        if gone:
            self._remove(np.array(gone))
        return outputs

    def _carrying(self, row: int) -> dict[str, Any]:
        """Return an event's fields about the row's carried tokens (generated before an abort): how
        many were drawn again just as they were, and how often later ones were with new noise."""
        num_kept = self._extender.num_kept(row)
        return {
            "num_kept": num_kept if num_kept >= 0 else None,
            "num_redraws": int(self._decoder.rows.host_column("redraw")[row]),
        }

    def _why_impossible(self, entry: Pending) -> str | None:
        reason = why_impossible(
            entry,
            vocabulary_size=self._decoder.rows.vocabulary_size,
            max_positions=self._max_positions,
            can_read=self._endings.can_read,
        )
        if reason is None and not self._decoder.can_ever_hold(entry):
            return (
                f"{entry.width} tokens of keys and values need more memory than "
                "rollout.engine.kv_cache_gib allows"
            )
        return reason

    def _admit(self, num_new: int) -> list[Numbered]:
        if not self._busy:
            self._busy, self._was_training = True, self._model.training
            self._model.train(False)
            self._decoder.read_model()
        first = self._decoder.rows.num_rows
        entries = [self._waiting.popleft() for _ in range(num_new)]
        next_prompt = self._waiting[0].request.prompt_tokens if self._waiting else None
        fresh, going_on, kept = self._parted(entries)
        self._decoder.reserve(entries, beside=self._kept.num_tokens)
        self._kept.trim()
        if fresh:
            self._decoder.admit(fresh, next_prompt)
        if going_on:
            self._extender.go_on(going_on, kept)
        self._num_generated += self._extender.take_up(first)
        return self._collect_ended(first)

    def _parted(self, entries: list[Pending]) -> tuple[list[Pending], list[Pending], list[KeptRow]]:
        """Split the requests into those without and those with keys and values kept from an earlier
        turn of their dialogue. Returns both lists, and the kept keys and values of the second."""
        fresh, going_on, kept = [], [], []
        for entry in entries:
            request = entry.request
            found = self._kept.take(request.sample, request.prompt_tokens)
            if found is None:
                fresh.append(entry)
            else:
                going_on.append(entry)
                kept.append(found)
        return fresh, going_on, kept

    # -- responses go ------------------------------------------------------------------------------

    def _collect_ended(self, first: int) -> list[Numbered]:
        """Remove the rows, from row `first` on, that have ended. Returns their outputs."""
        rows = self._decoder.rows
        count, limit, log_prob, ceiling = (
            rows.host_column(name)[first:] for name in ("count", "limit", "log_prob", "ceiling")
        )
        broken = np.isnan(log_prob)
        stopped = self._endings.stopped(rows, first)
        ended = stopped | broken | (count >= limit)
        over = count > ceiling
        if not (ended | over).any():
            return []
        doubtful = np.flatnonzero((stopped | over) & ~broken)
        ended[doubtful] &= ~self._extender.draw_again(first + doubtful)
        if not ended.any():
            return []
        gone = first + np.flatnonzero(ended)
        outputs = []
        for row in gone.tolist():
            if broken[row - first]:
                reason = f"{NOT_NUMBERS} at response token {count[row - first] - 1}"
                outputs.append(failure(rows.pending[row], reason))
            else:
                outputs.append(self._finish(row, stopped=bool(stopped[row - first])))
        kept = self._keep(gone.tolist(), outputs)
        self._remove(gone)
        return self._settle(kept, outputs) if kept else outputs

    def _keep(self, gone: list[int], outputs: list[Numbered]) -> list[SampleId]:
        """For later turns of dialogues, copy the keys and values of those rows in `gone` that ended
        with "stop" and whose requests ask for it (`GenerationRequest.keep`). Returns the rows'
        samples."""
        kept = []
        for row, (_, output) in zip(gone, outputs, strict=True):
            request, response = self._decoder.rows.pending[row].request, output.response
            if request.keep and response is not None and response.finish_reason == "stop":
                # All but the newest token, which was never fed.
                self._kept.keep(request.sample, request.prompt_tokens + response.tokens[:-1], row)
                kept.append(request.sample)
        return kept

    def _settle(self, kept: list[SampleId], outputs: list[Numbered]) -> list[Numbered]:
        """Drop copies of keys and values for which there is no memory, now that the ended rows have
        left. Returns `outputs`, whose events now tell how many tokens are kept (`num_held`) and how
        many more could be (`room`)."""
        self._kept.settle(kept, *self._decoder.would_have(()))
        num_rows, width = self._decoder.would_have(self._waiting)
        room, keeping = self._kept.room(num_rows * width), set(kept)
        told = []
        for sequence, output in outputs:
            event = output.event
            if isinstance(event, SampleGenerated) and event.sample in keeping:
                held = self._kept.size(event.sample)
                output = replace(output, event=structs.replace(event, num_held=held, room=room))
            told.append((sequence, output))
        return told

    def _finish(self, row: int, *, stopped: bool) -> Numbered:
        entry = self._decoder.rows.pending[row]
        stopped = stopped or entry.request.forced_length is not None
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        response = self._decoder.rows.response(row, reason, self._version)
        event = SampleGenerated(
            time_s=0.0,
            sample=response.sample,
            num_tokens=len(response.tokens),
            finish_reason=reason,
            version=response.version,
            num_reused=int(self._decoder.rows.host_column("num_reused")[row]),
            **self._carrying(row),
        )
        return entry.sequence, EngineOutput(event, response)
