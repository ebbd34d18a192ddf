"""vLLM as an engine of this process: `LLMEngine.step()`, turn by turn, in the engine's own thread.

    requests, aborts    engines/inbox.py, engines/loop.py: as the embedded engine's
    scheduling, cache   vLLM's: continuous batching, preemption, prefix cache
    tokens              engines/vllm/draws.py: keyed noise, vLLM's or by a logits processor
    carried tokens      engines/vllm/live.py, drawn again in engines/vllm/verify.py
    endings             end tokens and limits by vLLM, stop strings by engines/embedded/endings.py
    weights             engines/vllm/weights.py: vLLM's alone, where the module has no memory

The engine was tried on a CPU; that vLLM on a GPU obeys the same calls follows from vLLM's source.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.embedded.attention import UnsupportedModelError, other_layers
from rollpacker.engines.embedded.endings import Endings
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import (
    NOT_NUMBERS,
    EngineConfig,
    EngineError,
    EngineOutput,
    EngineStatus,
)
from rollpacker.engines.loop import LoopEngine, Numbered, abortion, failure, why_impossible
from rollpacker.engines.vllm.adapters import lora_request
from rollpacker.engines.vllm.draws import Draw, Draws, parameters
from rollpacker.engines.vllm.live import Live
from rollpacker.engines.vllm.parallel import Workers, watch_processes
from rollpacker.engines.vllm.setup import close_vllm, open_vllm
from rollpacker.engines.vllm.weights import Copy
from rollpacker.weights.buffer import StaleWeightsError, WeightSource
from rollpacker.weights.delivery import Delivery, UndeliveredError
from rollpacker.weights.folder import SavedFolder

if TYPE_CHECKING:
    from vllm.v1.request import Request


class VllmEngine(LoopEngine):
    """An `Engine` (engines/engine.py) that lets vLLM sample.

    `model` has the weights, and `update_weights` copies them into vLLM; or it has names and shapes
    alone (meta device), and weights go into vLLM from where they come from. In both cases vLLM's
    log-probabilities of a text are then compared with the module's or the trainer's: all parameters
    can be equal while vLLM computes with something derived from older ones.

    Carried tokens, which the sample had when it was aborted, become the end of the prompt, and are
    drawn again there if they are to be verified (engines/vllm/live.py). There can be one such
    engine in a process. Set torch's thread count before it is made.

    Raises:
        MissingPackageError: vLLM is not installed.
        UnsupportedModelError: vLLM cannot run the model here; the message says why.
    """

    _has_a_copy = True

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: EngineConfig,
        tensor_parallel: int = 1,
        sleeps: bool = False,
        folder: str | None = None,
    ) -> None:
        """`tokenizer` is needed for stop strings only. `tensor_parallel`: number of devices that
        share the engine, each with a process of vLLM's. `sleeps`: whether `offload` must be able to
        empty the devices; without effect on a CPU. `folder`: that of the weights if the model is
        without memory, else None."""
        super().__init__(model)
        self._has_no_memory = folder is not None
        text = model.config.get_text_config()
        self._max_positions = getattr(text, "max_position_embeddings", None)
        self._vocabulary_size: int = text.vocab_size
        self._endings = Endings(model, tokenizer, self._vocabulary_size)
        self._threads = torch.get_num_threads()
        self._draws = Draws()
        self._vllm = open_vllm(model, config, self._draws, tensor_parallel, sleeps=sleeps)
        self._lora_request = lora_request(model)
        self._workers: Workers | None = None
        self._workers_may_end: threading.Event | None = None
        if tensor_parallel > 1:
            self._workers = Workers(self._vllm)
            self._workers_may_end = watch_processes(self._vllm, self._died)
        dtype = str(model.dtype).removeprefix("torch.")
        self._copy = Copy(
            model,
            self._vllm,
            None if folder is None else SavedFolder(path=folder, dtype=dtype),
            hand_over=self._hand_over,
            forget=self._forget,
        )
        # The worker's own.
        self._live: dict[int, Live] = {}
        self._num_ended = 0
        """Number of tokens generated for responses that vLLM no longer has."""
        self._num_steps = 0
        self._is_closed = False
        try:
            self._copy.load()
        except EngineError as error:
            close_vllm(self._vllm)
            raise UnsupportedModelError(f"{type(model).__name__}: {error}") from error

    # -- the protocol ------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """Return counts of samples, tokens and steps; see `Engine.status`."""
        self._inbox.check_open()
        num_in_flight = self._inbox.num_in_flight
        num_running = min(len(self._scheduler.running), num_in_flight)
        live = sum(len(one.request.output_token_ids) for one in list(self._live.values()))
        return EngineStatus(
            num_running=num_running,
            num_waiting=num_in_flight - num_running,
            version=self._version,
            generated_tokens=self._num_ended + live,
            decode_steps=self._num_steps,
        )

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Do nothing; see `Engine.let_go`. vLLM frees its prefix cache when it needs the room."""

    async def close(self) -> None:
        """End the worker thread and free vLLM's memory; see `Engine.close`."""
        await super().close()
        if not self._is_closed:
            self._is_closed = True
            if self._workers_may_end is not None:
                self._workers_may_end.set()
            close_vllm(self._vllm)

    def _died(self, error: EngineError) -> None:
        self._inbox.die(error)(error)

    @property
    def _scheduler(self) -> Any:
        """vLLM's scheduler, which holds vLLM's records of all requests that have not ended."""
        return self._vllm.engine_core.engine_core.scheduler

    # -- the worker --------------------------------------------------------------------------------

    def _begin(self) -> None:
        torch.set_num_threads(self._threads)  # a thread's own, where OpenMP counts them

    def _rest(self) -> None:
        self._draws.broken.clear()

    def _turn(self) -> list[Numbered]:
        submitted, aborted = self._inbox.take()
        outputs = [output for entry in submitted if (output := self._add(entry)) is not None]
        if aborted:
            outputs.extend(self._abort(aborted))
        if not outputs and self._live:
            outputs = self._step()
        return outputs

    def _add(self, entry: Pending) -> Numbered | None:
        """Hand a request to vLLM. Returns None; or its output if there is nothing to generate, as
        it can never run, or its carried tokens (from before an abort) are a whole response."""
        reason = self._why_impossible(entry)
        if reason is not None:
            return failure(entry, reason)
        live = Live(entry)
        is_over = None if live.is_unseen else self._is_over(entry, live.given)
        if is_over is not None:
            return self._generated(live, is_over)
        self._begin_live(live)
        return None

    def _begin_live(self, live: Live) -> None:
        """Hand a live response to vLLM, with the tokens that it has as the end of the prompt."""
        entry, given = live.entry, live.begin()
        # What comes from the prefix cache is not read, and so not drawn anew.
        draws_anew = live.draw.anew is not None
        live.request = self._hand_over(
            entry.sequence,
            live.draw,
            [*entry.request.prompt_tokens, *given],
            max_tokens=entry.limit - len(given),
            stop_token_ids=self._endings.end_tokens if _may_stop(entry) else [],
            skip_reading_prefix_cache=draws_anew,
        )
        self._live[entry.sequence] = live

    def _hand_over(self, number: int, draw: Draw, prompt: list[int], **sampling: Any) -> Request:
        """Hand vLLM a request under this number. `draw` tells how its tokens are drawn, and takes
        their log-probabilities; `sampling` are further parameters. Returns vLLM's record of it."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._draws.by_number[number] = draw
        name = self._vllm.add_request(
            str(number),
            tokens_input(prompt),
            VllmSamplingParams(
                **parameters(number, draw, self._draws.noise),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
                **sampling,
            ),
            lora_request=self._lora_request,
        )
        request: Request = self._scheduler.requests[name]
        return request

    def _why_impossible(self, entry: Pending) -> str | None:
        reason = why_impossible(
            entry,
            vocabulary_size=self._vocabulary_size,
            max_positions=self._max_positions,
            can_read=self._endings.can_read,
        )
        config = self._vllm.vllm_config
        carried = entry.request.carried
        num_given = len(entry.request.prompt_tokens)
        if carried is not None and not carried.verify:
            num_given += len(carried.tokens)
        if (
            num_given == 1
            and other_layers(self._model)
            and config.device_config.device_type == "cpu"
        ):
            return "vLLM's linear attention on a CPU takes no prompt of a single token"
        longest = config.model_config.max_model_len
        if reason is None and entry.width >= longest:
            return (
                f"{entry.width} tokens of keys and values need more memory than "
                f"rollout.engine.kv_cache_gib allows (vLLM: at most {longest - 1})"
            )
        return reason

    def _is_over(self, entry: Pending, tokens: Sequence[int]) -> Literal["stop", "length"] | None:
        """How a response of these carried tokens (from before an abort) ended. None: it has not."""
        if self._stops(entry, tokens, len(tokens)):
            return "stop"
        if len(tokens) < entry.limit:
            return None
        return "length" if _may_stop(entry) else "stop"

    def _stops(self, entry: Pending, tokens: Sequence[int], count: int) -> bool:
        """Whether the first `count` of these tokens end in an end token or a stop string."""
        if count == 0 or not _may_stop(entry):
            return False
        stops = entry.request.sampling.stop
        return tokens[count - 1] in self._endings.end_tokens or (
            bool(stops) and self._endings.completes(stops, tokens[:count])
        )

    # -- a step, and what ends ---------------------------------------------------------------------

    def _step(self) -> list[Numbered]:
        ended = {}
        for output in self._vllm.step():
            live = self._live.get(number := int(output.request_id))
            if live is not None:
                ended[number] = output.outputs[0].finish_reason
                live.draw.note(output.outputs[0].logprobs)
                live.note_reused(output.num_cached_tokens)
        self._num_steps += 1
        cuts = self._look()
        leaving = {**ended, **dict.fromkeys(cuts), **dict.fromkeys(self._broken())}
        for number, live in self._live.items():
            stops = live.entry.request.sampling.stop
            if number in leaving or live.is_unseen:
                continue
            if stops and self._stops(live.entry, tokens := live.tokens, len(tokens)):
                leaving[number] = "stop"
            elif live.carried.ceiling is not None and live.is_too_long:
                leaving[number] = None
        outputs = []
        for live in self._take_out(list(leaving), [one for one in leaving if one not in ended]):
            number = live.entry.sequence
            reason = leaving[number]
            if number in cuts:
                live.cut(cuts[number])
                reason = "stop" if self._stops(live.entry, live.given, cuts[number]) else None
            output = self._end(live, reason)
            if output is not None:
                outputs.append(output)
        return outputs

    def _look(self) -> dict[int, int]:
        """Compare carried tokens (from before an abort) with those drawn in their places, in the
        requests whose prompt vLLM has now read. Returns the requests' numbers where a token
        differs, each with the number of tokens to keep: vLLM cannot go on with these requests."""
        seen = [
            live
            for live in self._live.values()
            if live.is_unseen and live.request.num_output_tokens > 0
        ]
        if seen and self._workers is not None:
            drawn = self._workers.drawn_anew([live.entry.sequence for live in seen])
            for live, (tokens, log_probs) in zip(seen, drawn, strict=True):
                assert live.draw.anew is not None
                live.draw.anew.tokens, live.draw.anew.log_probs = tokens, log_probs
        cuts = {
            live.entry.sequence: live.look(functools.partial(self._stops, live.entry))
            for live in seen
        }
        return {number: count for number, count in cuts.items() if count is not None}

    def _broken(self) -> list[int]:
        """Return and forget the numbers of the requests whose logits held a NaN."""
        broken, self._draws.broken = self._draws.broken, []
        return [one for one in broken if one in self._live and self._live[one].is_broken]

    def _end(self, live: Live, reason: str | None) -> Numbered | None:
        """Return the output of a response that has left vLLM, or hand it to vLLM again and return
        None if it is not over. `reason`: why vLLM ended it; None if it was taken out of vLLM."""
        if reason not in (None, "stop", "length"):
            return failure(live.entry, f"vLLM ended it: {reason}")
        if live.first_broken is not None:
            return _failed(live)
        if live.draw_again(stopped=reason == "stop") or reason is None:
            self._begin_live(live)
            return None
        has_stopped = reason == "stop" or not _may_stop(live.entry)
        return self._generated(live, "stop" if has_stopped else "length")

    def _generated(self, live: Live, reason: Literal["stop", "length"]) -> Numbered:
        response = live.response(reason, self._version)
        event = SampleGenerated(
            time_s=0.0,
            sample=response.sample,
            num_tokens=len(response.tokens),
            finish_reason=reason,
            version=response.version,
            num_reused=live.num_reused,
            **live.facts,
        )
        return live.entry.sequence, EngineOutput(event, response)

    def _abort(self, samples: set[SampleId]) -> list[Numbered]:
        gone = [n for n, live in self._live.items() if live.entry.request.sample in samples]
        return [
            abortion(live.entry, live.response("aborted", self._version), **live.facts)
            if live.first_broken is None
            else _failed(live)
            for live in self._take_out(gone, gone)
        ]

    def _take_out(self, numbers: Sequence[int], unended: Sequence[int]) -> list[Live]:
        """Take the responses of these requests out of vLLM and return them. `unended`: those of the
        numbers that vLLM is still generating for, and must be told to drop."""
        states = self._vllm.output_processor.request_states
        for number in unended:
            live = self._live[number]
            if (state := states.get(live.request.request_id)) is not None:
                live.note_reused(state.num_cached_tokens)
                live.draw.note(state.logprobs_processor.logprobs)
        if unended:
            self._vllm.abort_request([str(number) for number in unended])
        found = [self._live.pop(number) for number in numbers]
        self._forget(numbers)
        for live in found:
            live.leave()
            self._num_ended += live.request.num_output_tokens
        return found

    def _forget(self, numbers: Sequence[int]) -> None:
        """Drop what is noted of these requests, which have left vLLM. Log-probabilities that vLLM's
        worker processes have, if any, are fetched into the requests' `Draw`s."""
        draws = {number: self._draws.by_number.pop(number) for number in numbers}
        are_there = self._draws.noise == "rollpacker"
        known = [number for number, draw in draws.items() if are_there or draw.anew is not None]
        if self._workers is not None and known:
            for number, log_probs in zip(known, self._workers.take_log_probs(known), strict=True):
                if are_there:
                    draws[number].log_probs = log_probs

    # -- weights -----------------------------------------------------------------------------------

    def _renew(
        self, version: int, weights: Mapping[str, Tensor] | WeightSource | Delivery | None
    ) -> None:
        if not self._has_no_memory:
            super()._renew(version, weights)
            self._copy.load()
        elif weights is not None:
            self._receive(version, weights)
        elif self._copy.is_empty:
            raise EngineError("vLLM has no weights since it slept, and none were given")

    def _receive(
        self, version: int, weights: Mapping[str, Tensor] | WeightSource | Delivery
    ) -> None:
        """Bring weights into vLLM from where they are. Raises `EngineError` as `_renew` does."""
        if isinstance(weights, WeightSource):
            if weights.version != version:
                raise EngineError(f"weights of version {weights.version} were given for {version}")
            self._check_shapes({n: place.shape for n, place in weights.layout.places.items()})
        elif not isinstance(weights, Delivery):
            self._check_shapes({name: value.shape for name, value in weights.items()})
        try:
            self._copy.load(weights)
        except (StaleWeightsError, UndeliveredError) as error:
            raise EngineError(str(error)) from error

    def weight_probe(self) -> str:
        """Return a hash of the weights; see `Engine.weight_probe`. Where the module has no memory,
        it is of what vLLM was given."""
        self._inbox.check_here()
        return self._copy.probe if self._has_no_memory else super().weight_probe()

    def compare(self, text: Sequence[int], log_probs: Sequence[float]) -> None:
        """Compare vLLM's log-probs of a text with the trainer's; see `Engine.compare`."""
        self._inbox.check_here()
        self._copy.compare(text, log_probs)

    async def reload(self) -> None:
        """Take the device's memory again; see `Engine.reload`. If the trainer has newer weights by
        then, nothing may be submitted until they come."""
        await super().reload()
        if self._copy.is_empty:
            self._inbox.begin_weights(self._version)

    def _let_go(self) -> None:
        if self._copy.can_sleep:
            self._copy.sleep()
        super()._let_go()

    def _take_back(self) -> None:
        super()._take_back()
        if self._copy.can_sleep:
            self._copy.wake_up()


def _may_stop(entry: Pending) -> bool:
    return entry.request.forced_length is None


def _failed(live: Live) -> Numbered:
    """The output for a response with NaN logits, which names the first token without a
    log-probability."""
    return failure(live.entry, f"{NOT_NUMBERS} at response token {live.first_broken}")
