"""The embedded engine: continuous batching over the trainer's own module, on a CPU or one GPU.

One worker thread turns: take what was submitted and aborted, admit waiting requests into free
rows, decode one token for every row, report what ended. It waits for the listener before it goes
on, so an abort or a request given inside that call takes effect at the same decode step in every
run.

The CUDA path (static shapes, captured steps) shares all of its code with a path that runs and is
tested on a CPU, except for the capture itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.rollout.decoder import Decoder
from rollpacker.rollout.drafts import STEP_COST, Drafter
from rollpacker.rollout.endings import Endings
from rollpacker.rollout.engine import (
    NOT_NUMBERS,
    EngineConfig,
    EngineError,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    Listener,
    Response,
)
from rollpacker.rollout.extend import Extender, Guess
from rollpacker.rollout.inbox import Inbox
from rollpacker.rollout.rows import Pending
from rollpacker.weight_buffer import StaleWeightsError, WeightReader, WeightSource
from rollpacker.weight_probe import weight_probe

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long `close` waits for the decode step at hand."""


class TorchEngine:
    """An `Engine` that samples from `model` as it stands, weights read in place.

    `update_weights` without weights therefore only notes the version; whoever changes them does so
    while nothing runs. The model keeps RollPacker's attention (see `install_attention`), and its
    training mode whenever the engine has nothing to do. Set torch's thread count before `start`.

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
        static_shapes: bool | None = None,
    ) -> None:
        """`tokenizer` is needed for stop strings only. `static_shapes` None: on CUDA."""
        self._model = model
        self._device = torch.device(device or next(model.parameters()).device)
        static = self._device.type != "cpu" if static_shapes is None else static_shapes
        was_training = model.training
        model.train(False)
        self._decoder = Decoder(model, config, self._device, static=static)
        model.train(was_training)
        self._endings = Endings(model, tokenizer, self._decoder.rows.vocabulary_size)
        self._extender = Extender(self._decoder, self._endings)
        kind = self._device.type
        can_draft = config.draft_tokens > 0 and kind in STEP_COST
        self._drafter = Drafter(config.draft_tokens, kind) if can_draft else None
        self._max_positions = getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )

        self._inbox = Inbox()
        self._thread: threading.Thread | None = None
        self._version = 0
        self._reader = WeightReader()
        # The worker's own.
        self._waiting: deque[Pending] = deque()
        self._num_generated = 0
        self._busy = False
        self._was_training = was_training

    # -- the protocol ------------------------------------------------------------------------------

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        """Begin to work. Called again while nothing runs, it replaces the listener."""
        self._inbox.tell(listener, on_error)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="rollpacker-engine", daemon=True
            )
            self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `Engine`."""
        self._inbox.submit(requests)

    def abort(self, samples: Sequence[SampleId]) -> None:
        """See `Engine`."""
        self._inbox.abort(samples)

    async def update_weights(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor] | WeightSource | None = None,
    ) -> None:
        """See `Engine`. A copy runs in a thread, so that the caller's deadline can end the wait."""
        self._inbox.begin_weights(version)
        if isinstance(weights, WeightSource):
            await asyncio.to_thread(self._read_weights, version, weights)
        elif weights is not None:
            await asyncio.to_thread(self._copy_weights, weights)
        self._inbox.end_weights()
        self._version = version

    def weight_probe(self) -> str:
        """See `Engine`."""
        return weight_probe(self._own_weights().items())

    def _own_weights(self) -> dict[str, torch.nn.Parameter]:
        """What training changes: of a model with adapters, those alone."""
        return {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    def _read_weights(self, version: int, source: WeightSource) -> None:
        if source.version != version:
            raise EngineError(f"weights of version {source.version} were given for {version}")
        try:
            with self._reader.reading(source) as weights:
                self._copy_weights(weights)
        except StaleWeightsError as error:
            raise EngineError(str(error)) from error

    @torch.no_grad()
    def _copy_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        own = self._own_weights()
        if strange := sorted(own.keys() ^ weights.keys()):
            raise EngineError(f"these are the weights of another model: {strange[0]} differs")
        for name, value in weights.items():
            if own[name].shape != value.shape:
                raise EngineError(
                    f"these are the weights of another model: {name} is {list(value.shape)}, "
                    f"not {list(own[name].shape)}"
                )
            own[name].copy_(value)

    def status(self) -> EngineStatus:
        """See `Engine`."""
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
        """Prompt tokens that went through the model since the engine was made."""
        return self._decoder.num_prefilled_tokens

    async def close(self) -> None:
        """See `Engine`."""
        self._inbox.close()
        if self._thread is not None:
            # The worker may be inside the listener, which may need this event loop to go on.
            await asyncio.to_thread(self._thread.join, CLOSE_S)
            if self._thread.is_alive():
                logger.error("the engine's worker hangs; it is left behind")

    # -- the worker --------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.inference_mode():
                while self._inbox.wait_for_work():
                    self._turn()
        except Exception as error:
            logger.exception("the engine's worker died")
            on_error = self._inbox.die(error)
            self._rest()
            on_error(error)

    def _turn(self) -> None:
        """A token for every row at most, so that an abort never comes later than that."""
        outputs = self._take_inbox()
        if not outputs:
            num_new = self._decoder.num_admissible(self._waiting)
            if num_new:
                outputs = self._admit(num_new)
            elif self._decoder.rows.num_rows:
                self._num_generated += self._step()
                outputs = self._collect_ended(0)
        if outputs:
            self._deliver(outputs)

    def _step(self) -> int:
        """One decode step, of drafted tokens if there are some. Returns how many tokens it gave."""
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
        """Take these rows out; what they have stays as a draft for their siblings."""
        if self._drafter is not None:
            self._drafter.keep(self._decoder.rows, gone.tolist())
        self._decoder.remove(gone)

    def _deliver(self, outputs: list[tuple[int, EngineOutput]]) -> None:
        outputs.sort(key=lambda numbered: numbered[0])
        idle, listener = self._inbox.end(output.event.sample for _, output in outputs)
        if idle:
            self._rest()
        listener([output for _, output in outputs])

    def _rest(self) -> None:
        """Leave the model in the mode that it was found in."""
        if self._busy:
            self._busy = False
            self._decoder.forget_prompt()
            if self._drafter is not None:
                self._drafter.forget()
            self._model.train(self._was_training)

    # -- requests come -----------------------------------------------------------------------------

    def _take_inbox(self) -> list[tuple[int, EngineOutput]]:
        """New requests join the queue; aborted ones leave it, or their rows."""
        submitted, aborted = self._inbox.take()
        outputs = []
        for entry in submitted:
            reason = self._why_impossible(entry)
            if reason is None:
                self._waiting.append(entry)
            else:
                outputs.append(_failure(entry, reason))
        if aborted:
            outputs.extend(self._abort(aborted))
        return outputs

    def _abort(self, samples: set[SampleId]) -> list[tuple[int, EngineOutput]]:
        outputs = []
        for entry in [entry for entry in self._waiting if entry.request.sample in samples]:
            self._waiting.remove(entry)
            outputs.append(_abortion(entry, self._untouched(entry)))
        rows = self._decoder.rows
        gone = [row for row, entry in enumerate(rows.pending) if entry.request.sample in samples]
        for row in gone:
            response = rows.response(row, "aborted", self._version)
            outputs.append(_abortion(rows.pending[row], response, **self._carrying(row)))
        if gone:
            self._remove(np.array(gone))
        return outputs

    def _untouched(self, entry: Pending) -> Response:
        """What a sample that never got a row has: the tokens that were carried into the launch."""
        request = entry.request
        return Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=request.carried.tokens if request.carried else (),
            log_probs=request.carried.log_probs if request.carried else (),
            finish_reason="aborted",
            version=self._version,
        )

    def _carrying(self, row: int) -> dict[str, Any]:
        """What the events say about the tokens that a row took up."""
        column = self._decoder.rows.host_column
        num_kept = int(column("num_kept")[row])
        return {
            "num_kept": num_kept if num_kept >= 0 else None,
            "num_redraws": int(column("turn")[row]),
        }

    def _why_impossible(self, entry: Pending) -> str | None:
        prompt, limit = entry.request.prompt_tokens, entry.limit
        if not prompt:
            return "the prompt has no tokens"
        if limit < 1:
            return f"a response of at most {limit} tokens was asked for"
        if self._max_positions is not None and len(prompt) + limit > self._max_positions:
            return (
                f"{len(prompt)} prompt tokens and up to {limit} response tokens do not fit the "
                f"model's context of {self._max_positions}"
            )
        if max(prompt) >= self._decoder.rows.vocabulary_size or min(prompt) < 0:
            return "the prompt has a token that is not in the model's vocabulary"
        if not self._decoder.can_ever_hold(entry):
            return (
                f"{entry.width} tokens of keys and values need more memory than "
                "rollout.engine.kv_cache_gib allows"
            )
        if entry.request.sampling.stop and not self._endings.can_read:
            return "stop strings need a tokenizer"
        return self._why_not_carried(entry)

    def _why_not_carried(self, entry: Pending) -> str | None:
        carried = entry.request.carried
        if carried is None or not carried.tokens:
            return None
        if len(carried.tokens) > entry.limit:
            return (
                f"{len(carried.tokens)} carried tokens are more than the {entry.limit} that the "
                "response may have"
            )
        if len(carried.log_probs) != len(carried.tokens):
            return f"{len(carried.tokens)} carried tokens have {len(carried.log_probs)} log-probs"
        if max(carried.tokens) >= self._decoder.rows.vocabulary_size or min(carried.tokens) < 0:
            return "the carried response has a token that is not in the model's vocabulary"
        return None

    def _admit(self, num_new: int) -> list[tuple[int, EngineOutput]]:
        if not self._busy:
            self._busy, self._was_training = True, self._model.training
            self._model.train(False)
            self._decoder.read_model()
        first = self._decoder.rows.num_rows
        entries = [self._waiting.popleft() for _ in range(num_new)]
        next_prompt = self._waiting[0].request.prompt_tokens if self._waiting else None
        self._decoder.admit(entries, next_prompt)
        self._num_generated += self._extender.take_up(first)
        return self._collect_ended(first)

    # -- responses go ------------------------------------------------------------------------------

    def _collect_ended(self, first: int) -> list[tuple[int, EngineOutput]]:
        """Take out the rows, from `first` on, that their newest token ended."""
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
                outputs.append(_failure(rows.pending[row], reason))
            else:
                outputs.append(self._finish(row, stopped=bool(stopped[row - first])))
        self._remove(gone)
        return outputs

    def _finish(self, row: int, *, stopped: bool) -> tuple[int, EngineOutput]:
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
            **self._carrying(row),
        )
        return entry.sequence, EngineOutput(event, response)


def _failure(entry: Pending, reason: str) -> tuple[int, EngineOutput]:
    event = SampleFailed(time_s=0.0, sample=entry.request.sample, reason=reason)
    return entry.sequence, EngineOutput(event)


def _abortion(entry: Pending, response: Response, **carrying: Any) -> tuple[int, EngineOutput]:
    """The tokens of an aborted sample go up with it, if it has any."""
    event = SampleAborted(
        time_s=0.0, sample=response.sample, num_tokens=len(response.tokens), **carrying
    )
    return entry.sequence, EngineOutput(event, response if response.tokens else None)
