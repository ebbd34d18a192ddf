"""What a run is simulated on, and what is known of the responses of the step at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollpacker.core.ids import SampleId
from rollpacker.sim.latency import LatencyModel
from rollpacker.sim.scenario import Speculation
from rollpacker.sim.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the run is simulated on."""

    latency: LatencyModel
    gpus: int
    prompt_tokens: int
    max_running: int | None = None
    """Sequences that one engine decodes at once."""
    speculation: Speculation | None = None
    check_slowdown: Mapping[str, float] = field(default_factory=dict)
    """By source of the prompt: how much longer a check keeps its worker than the workload says."""


class Responses:
    """The samples launched in a step, each with a key (a small number) and the length in tokens
    that the policy would write. They are known from their launch to the commit of the step: a step
    that is filled up trains on responses of several rounds."""

    def __init__(self, workload: Workload) -> None:
        self.samples: list[SampleId] = []
        """By key, as the two below."""
        self.lengths: list[int] = []
        self.keys: dict[SampleId, int] = {}
        self._workload = workload

    def add(self, samples: Sequence[SampleId]) -> range:
        """The keys of samples that are launched now."""
        keys = range(len(self.samples), len(self.samples) + len(samples))
        self.samples += samples
        self.keys.update(zip(samples, keys, strict=True))
        self._add_lengths(samples)
        return keys

    def clear(self) -> None:
        self.samples.clear()
        self.lengths.clear()
        self.keys.clear()

    def lengths_of(self, groups: Iterable[Iterable[SampleId]]) -> list[int]:
        """Of all samples of these groups."""
        keys, lengths = self.keys, self.lengths
        return [lengths[keys[sample]] for group in groups for sample in group]

    def _add_lengths(self, samples: Sequence[SampleId]) -> None:
        lengths, workload = self.lengths, self._workload
        prompt, attempt, known = None, -1, [0]
        for sample in samples:
            if sample.prompt is not prompt or sample.attempt != attempt:
                prompt, attempt = sample.prompt, sample.attempt
                known = workload.lengths(prompt, attempt)
            index = sample.index
            if index >= len(known):
                known = workload.lengths(prompt, attempt, index + 1)
            lengths.append(known[index])
