"""A `vllm.LLM` that a trainer made and keeps, as an engine.

Unlike `VllmEngine` it draws with vLLM's own seeded noise, so tokens depend on a request's seed and
their position alone; a response that is aborted starts again from its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from rollpacker.core.events import SampleGenerated
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import EngineOutput, EngineStatus, Response
from rollpacker.engines.loop import LoopEngine, Numbered, abortion, failure


@dataclass(slots=True)
class _Live:
    entry: Pending
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def response(self, reason: str, version: int) -> Response:
        request = self.entry.request
        return Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            finish_reason=reason,
            version=version,
        )


class LentVllm(LoopEngine):
    """The engine of a `vllm.LLM`, whose weights the trainer itself brings up to date."""

    def __init__(self, llm: Any, model: PreTrainedModel, sampling: Mapping[str, Any]) -> None:
        """`model` is the trained one, on the same device. `sampling` has vLLM's sampling parameters
        but for the seed and the longest response, which a request has."""
        super().__init__(model)
        self._vllm, self._sampling = llm.llm_engine, dict(sampling)
        self._live: dict[int, _Live] = {}
        self._num_steps = 0

    def status(self) -> EngineStatus:
        """Return counts of samples and steps; see `Engine.status`."""
        self._inbox.check_open()
        return EngineStatus(
            num_running=len(self._live),
            num_waiting=0,
            version=self._version,
            generated_tokens=0,
            decode_steps=self._num_steps,
        )

    def _begin(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.set_device(self._model.device)  # a thread's own

    def _rest(self) -> None:
        return

    def _turn(self) -> list[Numbered]:
        submitted, aborted = self._inbox.take()
        outputs = [output for entry in submitted if (output := self._add(entry)) is not None]
        gone = [n for n, one in self._live.items() if one.entry.request.sample in aborted]
        if gone:
            self._vllm.abort_request([str(number) for number in gone])
            taken = [self._live.pop(number) for number in gone]
            outputs += [
                abortion(one.entry, one.response("aborted", self._version)) for one in taken
            ]
        return outputs if outputs or not self._live else self._step()

    def _add(self, entry: Pending) -> Numbered | None:
        """Hand a request to vLLM. Returns its output if vLLM refuses it."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        own = {"n": 1, "logprobs": 0, "output_kind": RequestOutputKind.DELTA}
        seed = entry.key(0) >> 1  # as `scheduler.Request.seed`
        try:
            parameters = SamplingParams(
                **{**self._sampling, **own, "seed": seed, "max_tokens": entry.limit}
            )
            prompt = tokens_input(list(entry.request.prompt_tokens))
            self._vllm.add_request(str(entry.sequence), prompt, parameters)
        except ValueError as error:
            return failure(entry, str(error))
        self._live[entry.sequence] = _Live(entry)
        return None

    def _step(self) -> list[Numbered]:
        outputs: list[Numbered] = []
        for one in self._vllm.step():
            live = self._live.get(number := int(one.request_id))
            if live is None:
                continue
            (part,) = one.outputs
            live.tokens += part.token_ids
            live.log_probs += (
                place[token].logprob
                for token, place in zip(part.token_ids, part.logprobs, strict=True)
            )
            if not one.finished:
                continue
            del self._live[number]
            reason = part.finish_reason
            if reason not in ("stop", "length"):
                outputs.append(failure(live.entry, f"vLLM ended it: {reason}"))
                continue
            event = SampleGenerated(
                time_s=0.0,
                sample=live.entry.request.sample,
                num_tokens=len(live.tokens),
                finish_reason=reason,
                version=self._version,
            )
            outputs.append((number, EngineOutput(event, live.response(reason, self._version))))
        self._num_steps += 1
        return outputs
