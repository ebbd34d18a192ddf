"""Tensors that a learner writes: weights for an engine, and the files of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollpacker.trainer import checkpoint
from rollpacker.trainer.critic import Critic, load_critic_weights, save_critic
from rollpacker.trainer.lora import (
    has_adapter,
    load_adapter,
    merge_squares,
    merged_weights,
    save_adapter,
)
from rollpacker.trainer.sharding import Shards, first_element, full_tensors
from rollpacker.trainer.trained import Trained
from rollpacker.weights.buckets import Part
from rollpacker.weights.delivery import Delivery, Member
from rollpacker.weights.host_store import local
from rollpacker.weights.probe import Probe, Samples, weight_probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollpacker.pipeline.stages.cut import Tied
    from rollpacker.pipeline.stages.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerFiles:
    """Writer and reader of a learner's weights and checkpoints. Several ranks must make every call
    together; rank 0 gathers whole tensors and writes them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    critic: Critic | None
    trained: Mapping[str, Trained]
    """The trained modules with their optimizers, by the prefix of their tensors' names in a
    checkpoint (`actor`, `critic`)."""
    shards: Shards | None
    run_dtype: torch.dtype
    stage: Stage | None = None

    @property
    def _adapted(self) -> bool:
        return has_adapter(self.model)

    @property
    def _writes(self) -> bool:
        return self.shards is None or self.shards.rank == 0

    @property
    def _mirror(self) -> Tied | None:
        """The tied weight of which this pipeline stage holds a copy, while another stage updates
        it. None: this stage holds no such copy."""
        return None if self.stage is None else self.stage.mirror_of(self.trained["actor"])

    def _stage_tensors(self) -> dict[str, Tensor] | None:
        """Return this pipeline stage's tensors by the whole model's names. None: no stages."""
        if self.stage is None:
            return None
        tensors = checkpoint.state_tensors(self.model)
        if self._mirror is not None:
            tensors[self._mirror.owner] = tensors.pop(self._mirror.mirror)
        return tensors

    def _whole(
        self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the given tensors unsharded, together with those of all other pipeline stages, on
        rank 0. The other ranks take part and get no tensors."""
        return self._union(full_tensors(named, self.shards, dtype))

    def _union(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors, and on the first pipeline stage also those of the other stages. A
        stage's copy of a weight that another stage owns is left out."""
        if self.stage is None:
            return iter(named)
        mirror = None if self._mirror is None else self._mirror.mirror
        return self.stage.union(item for item in named if item[0] != mirror)

    # -- weights for an engine -------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield on rank 0 the unsharded weights that training changes, by the model's names, in the
        run's dtype. Of a model with adapters these are the adapters alone, as they are: merging
        them into weights of half precision would round small updates away, and the engine has the
        same adapters. All ranks must iterate to the end."""
        named = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        if self.shards is None:
            return named
        return self._whole(named, None if self._adapted else self.run_dtype)

    @torch.no_grad()
    def write_weights(self, buffer: Mapping[str, Tensor] | None) -> tuple[str | None, int]:
        """Copy the weights into the tensors of the same names in `buffer`; None: this rank only
        takes part in gathering them. Returns a hash of a fixed sample of the copied weights
        (`weight_probe`; None without a buffer), and the bytes written to host memory: those of the
        buffer, and of tensors that had to be gathered or brought from a device first."""
        num_bytes = 0
        gathers = self.shards is not None or self.model.device.type != "cpu"
        for name, value in self.weights():
            num_bytes += value.nbytes * gathers
            if buffer is not None:
                buffer[name].copy_(value)
                num_bytes += value.nbytes
        return (None if buffer is None else weight_probe(buffer.items())), num_bytes

    def held_weights(self) -> dict[Part, Tensor]:
        """Return the parts of the weights that this rank sends to engines, each in one dimension:
        its shards, as they are in the first replica. They become the run's dtype on the way, except
        for adapters (see `weights`)."""
        mirror = None if self._mirror is None else self._mirror.mirror
        held = {}
        for name, value in self.model.named_parameters():
            if value.requires_grad and name != mirror:
                start = first_element(value)
                values = local(value).reshape(-1)
                as_it_is = self.shards is None or self._adapted
                dtype = value.dtype if as_it_is else self.run_dtype
                said = str(dtype).removeprefix("torch.")
                if len(values) or (not value.numel() and self._writes):
                    part = Part(name, tuple(value.shape), said, start, len(values))
                    held[part] = values
        return held

    @torch.no_grad()
    def send_weights(self, delivery: Delivery, member: Member, version: int) -> Samples:
        """Send this rank's part of the weights, which are of this version, to engines. Returns what
        was sampled of them. Raises `UndeliveredError`."""
        held = self.held_weights()
        device = self.model.device if self.shards is None else self.shards.device
        number = 0 if self.shards is None else self.shards.rank
        member.send(delivery, number, device, held, version)
        probe = Probe()
        for part, values in held.items():
            probe.take_part(part, values)
        return probe.samples()

    def state_hashes(self) -> dict[str, str]:
        """Return the SHA-256 of the weights and of the optimizer's state (`weights`, `optimizer`).
        With several ranks, those of the unsharded tensors, on rank 0 only."""
        named = (item for item in self.model.named_parameters() if item[1].requires_grad)
        optimizer = self.trained["actor"].optimizer.state()
        tensors = {
            "weights": dict(self._whole(named)),
            "optimizer": dict(self._whole(optimizer.items())),
        }
        return {name: checkpoint.tensors_sha256(values) for name, values in tensors.items()}

    def lora_merge_loss(self) -> float | None:
        """Return the share of the adapters' change that is lost by rounding when a checkpoint
        merges them into the weights. None: no adapters, or no weights in half precision."""
        rounds = self._adapted and self.run_dtype in (torch.bfloat16, torch.float16)
        if not rounds:
            return None
        squares = merge_squares(self.model)
        lost, changed = squares if self.stage is None else self.stage.sums(squares)
        return math.sqrt(lost / changed) if changed else 0.0

    # -- checkpoints -----------------------------------------------------------------------

    def save(self, folder: Path, *, version: int, total_steps: int | None) -> None:
        """Write a checkpoint: the folders `model/`, `trainer/` and, where the run has them,
        `adapter/` and `critic/`."""
        checkpoint.save_model(
            self.model,
            self.tokenizer,
            folder / "model",
            shards=self.shards,
            dtype=self.run_dtype,
            weights=merged_weights(self.model) if self._adapted else None,
            union=self._union,
        )
        if self._adapted:
            save_adapter(self.model, folder / "adapter", write=self._writes, union=self._union)
        if self.critic is not None:
            state = dict(self._whole(self.critic.state_dict().items()))
            if self._writes:
                save_critic(self.critic, folder / "critic", state)
        tensors = {
            f"{prefix}/{name}": value
            for prefix, trained in self.trained.items()
            for name, value in trained.state().items()
        }
        numbers = {"version": version, "total_steps": total_steps}
        checkpoint.save_trainer(tensors, numbers, folder / "trainer", self.shards)

    def load(self, folder: Path) -> int:
        """Read a checkpoint that `save` wrote, and return its version (number of steps). Raises
        `TrainerError` if the checkpoint is another model's."""
        state = checkpoint.load_trainer_state(folder / "trainer")
        if self._adapted:
            load_adapter(self.model, folder / "adapter", part=self.stage is not None)
        else:
            checkpoint.load_model_weights(
                self.model, folder / "model", self.shards, part=self._stage_tensors()
            )
        if self.critic is not None:
            load_critic_weights(self.critic, folder / "critic")
        saved = checkpoint.saved_names(folder / "trainer")
        likes = {
            f"{prefix}/{name}": value
            for prefix, trained in self.trained.items()
            for name, value in trained.state_like().items()
            if f"{prefix}/{name}" in saved  # there is no state before the first update
        }
        tensors = checkpoint.load_trainer_tensors(
            folder / "trainer", likes, self.shards, part=self.stage is not None
        )
        for name, trained in self.trained.items():
            prefix = f"{name}/"
            trained.load_state(
                {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
            )
        return int(state["version"])
