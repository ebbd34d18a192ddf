"""vLLM as an engine of this process: `LLMEngine.step()`, turn by turn, in the engine's own thread.

    requests, aborts    rollout/inbox.py, rollout/loop.py: as the embedded engine's
    scheduling, cache   vLLM's: continuous batching, preemption, prefix cache
    tokens              rollout/vllm_draws.py: keyed noise, in a logits processor
    endings             end tokens and limits by vLLM, stop strings here (rollout/endings.py)
    weights             rollout/vllm_weights.py: of the transformers module that it was given

It was tried on a CPU; that a GPU's vLLM obeys the same calls follows from its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.rollout.attention import UnsupportedModelError, other_layers
from rollpacker.rollout.endings import Endings
from rollpacker.rollout.engine import (
    NOT_NUMBERS,
    EngineConfig,
    EngineError,
    EngineOutput,
    EngineStatus,
    Response,
)
from rollpacker.rollout.loop import (
    LoopEngine,
    Numbered,
    abortion,
    failure,
    untouched,
    why_impossible,
)
from rollpacker.rollout.rows import Pending
from rollpacker.rollout.sampling import sample_key
from rollpacker.rollout.vllm_adapters import lora_request
from rollpacker.rollout.vllm_draws import DRAW, NUMBER, Draw, Draws
from rollpacker.rollout.vllm_parallel import Workers
from rollpacker.rollout.vllm_setup import close_vllm, open_vllm
from rollpacker.rollout.vllm_weights import Copy
from rollpacker.weight_buffer import WeightSource

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class Live:
    """A request that vLLM has."""

    entry: Pending
    draw: Draw
    request: Request
    """vLLM's own record of it, which says what it has taken and how often it was put back."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the response has, with what it was carried into the launch with."""
        return (*_carried(self.entry)[0], *self.request.output_token_ids)

    @property
    def is_broken(self) -> bool:
        """A token of it was drawn from logits that are not numbers. Workers in processes of their
        own say so when it is over."""
        return any(map(math.isnan, self.draw.log_probs))

    def response(self, reason: Literal["stop", "length", "aborted"], version: int) -> Response:
        tokens = self.tokens
        own = len(tokens) - self.draw.offset
        request = self.entry.request
        return Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tokens,
            log_probs=(*_carried(self.entry)[1], *self.draw.log_probs[:own]),
            finish_reason=reason,
            version=version,
        )


class VllmEngine(LoopEngine):
    """An `Engine` (rollout/engine.py) that has vLLM sample from a copy of `model`'s weights.

    `update_weights` brings that copy up to date, and compares what both say of a fixed prompt
    before anything is sampled: parameters can all be equal while vLLM computes with what it made of
    older ones. The model is the trainer's own, or is compared with it by `weight_probe`.

    Carried tokens become the end of the prompt and stay as they are: it cannot draw them anew in
    one pass. One such engine a process. Set torch's thread count before it is made.

    Raises:
        MissingPackageError: there is no vLLM.
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
    ) -> None:
        """`tokenizer` is needed for stop strings only. `tensor_parallel`: so many devices share it,
        each with a process of vLLM's. `sleeps`: it is made such that `offload` can empty them,
        which a CPU needs not."""
        super().__init__(model)
        text = model.config.get_text_config()
        self._max_positions = getattr(text, "max_position_embeddings", None)
        self._vocabulary_size: int = text.vocab_size
        self._endings = Endings(model, tokenizer, self._vocabulary_size)
        self._threads = torch.get_num_threads()
        self._draws = Draws()
        self._vllm = open_vllm(model, config, self._draws, tensor_parallel, sleeps=sleeps)
        self._lora_request = lora_request(model)
        self._workers: Workers | None = None
        if tensor_parallel > 1:
            self._workers = Workers(self._vllm, model, self._died)
        self._copy = Copy(
            model, self._vllm, self._workers, hand_over=self._hand_over, forget=self._forget
        )
        # The worker's own.
        self._live: dict[int, Live] = {}
        self._num_ended = 0
        """Generated tokens of those that are gone."""
        self._num_steps = 0
        self._is_closed = False
        try:
            self._copy.load()
        except EngineError as error:
            close_vllm(self._vllm)
            raise UnsupportedModelError(f"{type(model).__name__}: {error}") from error

    # -- the protocol ------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """See `Engine`."""
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

    async def close(self) -> None:
        """See `Engine`. vLLM lets go of its memory."""
        await super().close()
        if not self._is_closed:
            self._is_closed = True
            if self._workers is not None:
                self._workers.closing()
            close_vllm(self._vllm)

    def _died(self, error: EngineError) -> None:
        self._inbox.die(error)(error)

    @property
    def _scheduler(self) -> Any:
        """vLLM's. It holds the record of every request that is not done with."""
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
        """Hand a request to vLLM. What there is to report instead, if there is nothing to do."""
        reason = self._why_impossible(entry)
        if reason is not None:
            return failure(entry, reason)
        tokens, log_probs = _carried(entry)
        request = entry.request
        is_over = self._is_over(entry, tokens)
        if is_over is not None:
            ended = untouched(entry, self._version)
            response = Response(
                sample=ended.sample,
                prompt_tokens=ended.prompt_tokens,
                tokens=tokens,
                log_probs=log_probs,
                finish_reason=is_over,
                version=self._version,
            )
            return self._generated(entry, response, preemptions=0)
        draw = Draw(
            request.sampling,
            sample_key(request.sampling.seed, request.noise or request.sample),
            offset=len(tokens),
        )
        may_stop = request.forced_length is None
        self._live[entry.sequence] = Live(
            entry,
            draw,
            self._hand_over(
                entry.sequence,
                draw,
                [*request.prompt_tokens, *tokens],
                max_tokens=entry.limit - len(tokens),
                stop_token_ids=self._endings.end_tokens if may_stop else [],
            ),
        )
        return None

    def _hand_over(self, number: int, draw: Draw, prompt: list[int], **sampling: Any) -> Request:
        """Let vLLM have a request. Returns its record of it."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._draws.by_number[number] = draw
        name = self._vllm.add_request(
            str(number),
            tokens_input(prompt),
            VllmSamplingParams(
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={NUMBER: number, DRAW: draw},
                skip_clone=True,
                **sampling,
            ),
            lora_request=self._lora_request,
        )
        request: Request = self._scheduler.requests[name]
        return request

    def _why_impossible(self, entry: Pending) -> str | None:
        carried = entry.request.carried
        if carried is not None and carried.tokens and carried.verify:
            return "vLLM cannot draw carried tokens anew (tail_batching.carry=weighted keeps them)"
        reason = why_impossible(
            entry,
            vocabulary_size=self._vocabulary_size,
            max_positions=self._max_positions,
            can_read=self._endings.can_read,
        )
        config = self._vllm.vllm_config
        num_given = len(entry.request.prompt_tokens) + len(_carried(entry)[0])
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

    def _is_over(self, entry: Pending, tokens: tuple[int, ...]) -> Literal["stop", "length"] | None:
        """How a response has ended that was carried in; None if it goes on."""
        if not tokens:
            return None
        if entry.request.forced_length is not None:
            return "stop" if len(tokens) >= entry.limit else None
        if tokens[-1] in self._endings.end_tokens or self._completes(entry, tokens):
            return "stop"
        return "length" if len(tokens) >= entry.limit else None

    def _completes(self, entry: Pending, tokens: tuple[int, ...]) -> bool:
        stops = entry.request.sampling.stop
        may_stop = bool(stops) and entry.request.forced_length is None
        return may_stop and self._endings.completes(stops, tokens)

    # -- a step, and what ends ---------------------------------------------------------------------

    def _step(self) -> list[Numbered]:
        ended: list[RequestOutput] = self._vllm.step()
        self._num_steps += 1
        outputs = self._fail_broken()
        ended = [output for output in ended if int(output.request_id) in self._live]
        lives = self._take_out([int(output.request_id) for output in ended])
        for output, live in zip(ended, lives, strict=True):
            outputs.append(self._finish(live, output.outputs[0].finish_reason))
        completed = [
            number
            for number, live in self._live.items()
            if live.entry.request.sampling.stop and self._completes(live.entry, live.tokens)
        ]
        outputs.extend(self._finish(live, "stop") for live in self._abandon(completed))
        return outputs

    def _finish(self, live: Live, reason: str | None) -> Numbered:
        if reason not in ("stop", "length"):
            return failure(live.entry, f"vLLM ended it: {reason}")
        if live.is_broken:
            return _broken(live)
        if live.entry.request.forced_length is not None:
            reason = "stop"
        response = live.response("stop" if reason == "stop" else "length", self._version)
        return self._generated(live.entry, response, preemptions=live.request.num_preemptions)

    def _generated(self, entry: Pending, response: Response, *, preemptions: int) -> Numbered:
        assert response.finish_reason != "aborted"
        event = SampleGenerated(
            time_s=0.0,
            sample=response.sample,
            num_tokens=len(response.tokens),
            finish_reason=response.finish_reason,
            version=response.version,
            preemptions=preemptions,
        )
        return entry.sequence, EngineOutput(event, response)

    def _fail_broken(self) -> list[Numbered]:
        """Those whose newest token was drawn from logits that are not numbers."""
        broken, self._draws.broken = self._draws.broken, []
        numbers = [
            number for number in broken if number in self._live and self._live[number].is_broken
        ]
        return [_broken(live) for live in self._abandon(numbers)]

    def _abort(self, samples: set[SampleId]) -> list[Numbered]:
        gone = [n for n, live in self._live.items() if live.entry.request.sample in samples]
        return [
            _broken(live)
            if live.is_broken
            else abortion(
                live.entry,
                live.response("aborted", self._version),
                preemptions=live.request.num_preemptions,
            )
            for live in self._abandon(gone)
        ]

    def _abandon(self, numbers: Iterable[int]) -> list[Live]:
        """Have vLLM drop these, whose tokens stay here."""
        gone = list(numbers)
        if gone:
            self._vllm.abort_request([str(number) for number in gone])
        return self._take_out(gone)

    def _take_out(self, numbers: Sequence[int]) -> list[Live]:
        found = [self._live.pop(number) for number in numbers]
        self._forget(numbers)
        self._num_ended += sum(len(live.request.output_token_ids) for live in found)
        return found

    def _forget(self, numbers: Sequence[int]) -> None:
        """These are done with; what was noted of them is in their `Draw`s."""
        draws = [self._draws.by_number.pop(number) for number in numbers]
        if self._workers is not None and numbers:
            for draw, log_probs in zip(draws, self._workers.take_log_probs(numbers), strict=True):
                draw.log_probs = log_probs

    # -- weights -----------------------------------------------------------------------------------

    def _renew(
        self, version: int, weights: Mapping[str, torch.Tensor] | WeightSource | None
    ) -> None:
        super()._renew(version, weights)
        self._copy.load()

    def _let_go(self) -> None:
        if self._copy.can_sleep:
            self._copy.sleep()
        super()._let_go()

    def _take_back(self) -> None:
        super()._take_back()
        if self._copy.can_sleep:
            self._copy.wake_up()


def _broken(live: Live) -> Numbered:
    """Its logits are no numbers, from its first token without a log-probability on."""
    broken = next(n for n, one in enumerate(live.draw.log_probs) if math.isnan(one))
    return failure(live.entry, f"{NOT_NUMBERS} at response token {live.draw.offset + broken}")


def _carried(entry: Pending) -> tuple[tuple[int, ...], tuple[float, ...]]:
    carried = entry.request.carried
    return ((), ()) if carried is None else (carried.tokens, carried.log_probs)
