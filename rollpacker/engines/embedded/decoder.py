"""The model's side of the embedded engine: prefill, decode steps, and the cache of each row (sample
being decoded).

There are no threads and no queue here. A step computes exactly the live rows, and each bucket
(range of rows that attend over one width) is exactly as wide as its longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollpacker.engines.embedded.attention import STEP_KEYWORD, install_attention
from rollpacker.engines.embedded.buckets import (
    CALL_COST_ELEMENTS,
    MOVE_COST,
    SORT_HORIZON_STEPS,
    Bucket,
    bucket_cost,
    least_moves,
    plan_buckets,
)
from rollpacker.engines.embedded.extend_step import ExtendStep
from rollpacker.engines.embedded.kv_slots import DecodeStep, KVSlots, PrefillStep, PromptCache
from rollpacker.engines.embedded.plain_forward import LogitsAfter, PlainForward, plain_forward
from rollpacker.engines.embedded.probe import plain_agrees, probe
from rollpacker.engines.embedded.rows import Pending, RowTable
from rollpacker.engines.embedded.sampling import draw
from rollpacker.engines.engine import EngineConfig

MAX_SLOTS = 1024
PREFILL_TOKENS = {"cpu": 4096}
PREFILL_TOKENS_ACCELERATOR = 16384
PREFILL_LOGITS = 1 << 26
"""Most logits that one prefill batch may compute at once."""

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A prompt that was prefilled, and whose further samples wait for a free place in the batch."""

    prompt: Prompt
    logits: Tensor
    """Logits [vocabulary] after the prompt's last token."""
    cache: PromptCache


@dataclass(slots=True)
class WidthPlan:
    """Buckets (ranges of live rows) for some decode steps, while all rows grow by a token each."""

    buckets: list[Bucket]
    age: int = 0
    """Number of decode steps since the plan was made."""

    def next_step(self) -> list[Bucket]:
        """Return the buckets for the next decode step, each wider by the tokens that its rows have
        got since the plan was made."""
        wide = [bucket._replace(width=bucket.width + self.age) for bucket in self.buckets]
        self.age += 1
        return wide


class Decoder:
    """Prefills and decodes samples of one model together, each in a row of its own. Used from one
    thread, under `torch.inference_mode`."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, device: torch.device) -> None:
        install_attention(model)
        self.model = model
        self.num_prefilled_tokens = 0
        self.num_steps = 0
        # What a bucket costs was measured on a CPU.
        self.width_buckets = config.width_buckets and device.type == "cpu"
        self._max_slots = config.max_slots or MAX_SLOTS
        self._device = device
        shapes, dtype, vocabulary_size = probe(model, device)
        self.slots = KVSlots(shapes, dtype, device, budget_bytes=_kv_budget_bytes(config, device))
        self.rows = RowTable(device, vocabulary_size, noise_of_vllm=config.noise == "vllm")
        largest = max(shape.num_kv_heads * shape.key_dim for shape in shapes)
        self._call_cost = CALL_COST_ELEMENTS / largest
        self._plan: WidthPlan | None = None
        self._kept: KeptPrompt | None = None
        self._may_be_plain = config.plain_forward and plain_agrees(model, device)
        self._plain: PlainForward | None = None
        self.read_model()

    def read_model(self) -> None:
        """Build the faster forward pass (plain_forward.py) anew if the model's tensors moved."""
        if not self._may_be_plain:
            return
        plain, old = plain_forward(self.model), self._plain
        if (plain and plain.addresses) == (old and old.addresses):
            return
        self._plain = plain
        if plain is not None:
            plain.reserve(self.slots.width)

    # -- admission ---------------------------------------------------------------------------------

    def can_ever_hold(self, entry: Pending) -> bool:
        return self.slots.fits(1, entry.width)

    def num_admissible(self, waiting: Iterable[Pending]) -> int:
        """Number of these requests, counted from the first, that can join the live rows now and for
        which there will be memory until they end."""
        return self.would_have(waiting)[0] - self.rows.num_rows

    def would_have(self, waiting: Iterable[Pending]) -> tuple[int, int]:
        """Return the number of live rows after as many of these requests as fit have joined, and
        the largest number of cache positions that any of the rows may need."""
        num_rows = self.rows.num_rows
        width = max((entry.width for entry in self.rows.pending), default=1)
        for entry in waiting:
            wider = max(width, entry.width)
            if num_rows >= self._max_slots or not self.slots.fits(num_rows + 1, wider):
                break
            num_rows, width = num_rows + 1, wider
        return num_rows, width

    def admit(self, entries: Sequence[Pending], next_prompt: Prompt | None) -> None:
        """Prefill these requests, whose places in the cache are reserved, and draw their first
        tokens. Neighbours with equal prompts are prefilled once.

        `next_prompt`: prompt of the first request that still waits (None: none does). If it was
        prefilled here, its logits and cache are kept for it.
        """
        groups = [list(run) for _, run in groupby(entries, key=lambda e: e.request.prompt_tokens)]
        if self._kept is not None and groups[0][0].request.prompt_tokens == self._kept.prompt:
            self._join(groups.pop(0), self._kept)
        if self._kept is not None and self._kept.prompt != next_prompt:
            self._kept = None
        groups.sort(key=lambda group: len(group[0].request.prompt_tokens))
        for batch in self._prefill_batches(groups):
            self._prefill(batch, next_prompt)
        self._plan = None

    def forget_plan(self) -> None:
        """Drop the plan of buckets, as rows grew or shrank other than by a decode step."""
        self._plan = None

    def forget_prompt(self) -> None:
        """Drop the prompt that was kept for waiting samples. Called when no sample waits any more,
        since the weights may change then."""
        self._kept = None

    def let_go(self) -> None:
        """Free keys and values, and everything derived from the model's tensors, which are about to
        move. May not be called while there are live rows."""
        assert not self.rows.num_rows
        self._kept = self._plan = self._plain = None
        self.slots.free()

    def reserve(self, entries: Sequence[Pending], beside: int = 0) -> None:
        """Reserve cache slots for these requests, as wide as the longest row may become. `beside`:
        number of cache positions used by dialogues kept between turns (kept_rows.py), which count
        against the same memory budget."""
        num_rows = self.rows.num_rows + len(entries)
        width = max(entry.width for entry in (*self.rows.pending, *entries))
        keeps = any(entry.request.keep for entry in entries)
        wider = width + width // 2
        if keeps and width > self.slots.width and self.slots.fits(2 * num_rows, wider):
            width = wider  # they come again, and are longer then: slots need not move each time
        width |= 1  # Rows a power of two apart would compete for the same cache lines.
        self.slots.reserve(num_rows, width, beside)
        self.rows.reserve(self.slots.num_slots)
        if self._plain is not None:
            self._plain.reserve(self.slots.width)

    def _join(self, entries: list[Pending], kept: KeptPrompt) -> None:
        """Add samples whose prompt was prefilled before, with a copy of its keys and values."""
        first = self.rows.num_rows
        noise = self.rows.add(entries)
        self.slots.restore(kept.cache, slice(first, self.rows.num_rows))
        self.draw_first(first, kept.logits.expand(len(entries), -1), noise)

    def _prefill_batches(self, groups: list[list[Pending]]) -> Iterable[list[list[Pending]]]:
        """Yield batches of these groups (requests of one prompt each), sorted by prompt length. No
        batch exceeds the limits on padded tokens and on logits, unless it is a single group."""
        budget = PREFILL_TOKENS.get(self._device.type, PREFILL_TOKENS_ACCELERATOR)
        max_kept = max(1, PREFILL_LOGITS // self.rows.vocabulary_size)
        batch: list[list[Pending]] = []
        lengths: set[int] = set()
        for group in groups:
            length = len(group[0].request.prompt_tokens)
            size = len(batch) + 1
            if batch and (size * length > budget or size * len(lengths | {length}) > max_kept):
                yield batch
                batch, lengths = [], set()
            batch.append(group)
            lengths.add(length)
        if batch:
            yield batch

    def _prefill(self, groups: list[list[Pending]], next_prompt: Prompt | None) -> None:
        prompts = [group[0].request.prompt_tokens for group in groups]
        lengths = [len(prompt) for prompt in prompts]
        first = self.rows.num_rows
        noise = self.rows.add([entry for group in groups for entry in group])
        padded = np.zeros((len(prompts), max(lengths)), np.int64)
        for place, prompt in enumerate(prompts):
            padded[place, : len(prompt)] = prompt
        prompt_of_row = torch.from_numpy(
            np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        ).to(self._device)
        step = PrefillStep(self.slots, first, prompt_of_row)
        logits = self._prompt_logits(padded, np.array(lengths) - 1, step)
        self.num_prefilled_tokens += sum(lengths)
        if next_prompt in prompts:
            place = prompts.index(next_prompt)
            row = first + sum(len(group) for group in groups[:place])
            cache = self.slots.snapshot(row, lengths[place])
            self._kept = KeptPrompt(next_prompt, logits[place].clone(), cache)
        self.draw_first(first, logits.index_select(0, prompt_of_row), noise)

    def _prompt_logits(self, padded: np.ndarray, ends: np.ndarray, step: PrefillStep) -> Tensor:
        """Prefill the prompts `padded` [prompts, tokens], right-padded, and return the logits
        [prompts, vocabulary] after each one's last token. `ends` [prompts]: positions of these
        tokens. `step` stores keys and values."""
        tokens = torch.from_numpy(padded).to(self._device)
        if self._plain is not None:
            return self._plain.prefill(tokens, torch.from_numpy(ends).to(self._device), step)
        kept, kept_of_prompt = np.unique(ends, return_inverse=True)
        logits: Tensor = self.model(
            input_ids=tokens,
            use_cache=False,
            logits_to_keep=torch.from_numpy(kept).to(self._device),
            **{STEP_KEYWORD: step},
        ).logits
        prompt_index = torch.arange(len(ends), device=self._device)
        return logits[prompt_index, torch.from_numpy(kept_of_prompt).to(self._device)]

    def draw_first(self, first: int, logits: Tensor, noise: Tensor) -> None:
        """Draw the first token of each row from index `first` on. `logits` [rows, vocabulary] are
        those after the prompts; `noise` are the rows' random numbers for this token."""
        rows = slice(first, self.rows.num_rows)
        column = self.rows.device_column
        tokens, log_probs = draw(
            logits,
            noise,
            column("temperature")[rows],
            column("top_k")[rows],
            column("top_p")[rows],
            self.rows.mode,
        )
        self.rows.begin(first, tokens.cpu().numpy(), log_probs.cpu().numpy())

    # -- decoding ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Draw one token for every live row."""
        if self._plan is None:
            self._plan = WidthPlan(self._mark_even(self._make_plan()))
        tokens, log_probs = self._forward(self._plan.next_step(), self.rows.next_noise())
        self.num_steps += 1
        self.rows.record(tokens.cpu().numpy(), log_probs.cpu().numpy())

    def _forward(self, buckets: list[Bucket], noise: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, column = self.rows.num_rows, self.rows.device_column
        positions = column("position")[:num_rows]
        tokens = column("token")[:num_rows]
        step = DecodeStep(self.slots, positions, buckets)
        if self._plain is not None:
            logits = self._plain.decode(tokens, positions, step)
        else:
            logits = self.model(
                input_ids=tokens[:, None],
                position_ids=positions[:, None],
                use_cache=False,
                **{STEP_KEYWORD: step},
            ).logits[:, -1]
        return draw(
            logits,
            noise[:num_rows],
            column("temperature")[:num_rows],
            column("top_k")[:num_rows],
            column("top_p")[:num_rows],
            self.rows.mode,
        )

    @property
    def can_part_logits(self) -> bool:
        """Whether `extend` computes logits after some tokens of a pass alone, so that a pass may
        have more tokens than there is memory for logits after all of them."""
        return self._plain is not None

    def extend(self, tokens: np.ndarray, step: ExtendStep) -> LogitsAfter:
        """Feed `tokens`, row after row without padding. Returns a function that gives the logits
        [some tokens, vocabulary] after those of these tokens whose indices it is given."""
        self._plan = None
        fed = torch.from_numpy(tokens).to(self._device)
        if self._plain is not None:
            return self._plain.extend(fed, step.positions, step)
        logits: Tensor = self.model(
            input_ids=fed[None],
            position_ids=step.positions[None],
            use_cache=False,
            **{STEP_KEYWORD: step},
        ).logits[0]
        return logits.__getitem__

    def _make_plan(self) -> list[Bucket]:
        """Return the buckets for the live rows. First sorts the rows by length, if what that saves
        within `SORT_HORIZON_STEPS` steps exceeds the cost of moving them."""
        lengths = self.rows.host_column("position") + 1
        num_rows, width = len(lengths), int(lengths.max())
        one_bucket = [Bucket(0, num_rows, width)]
        most_to_save = num_rows * width - int(lengths.sum())
        if not self.width_buckets or most_to_save <= self._call_cost:
            return one_bucket
        plan = plan_buckets(lengths, self._call_cost)
        order = np.argsort(lengths, kind="stable")
        sorted_plan = plan_buckets(lengths[order], self._call_cost)
        saving = bucket_cost(plan, self._call_cost) - bucket_cost(sorted_plan, self._call_cost)
        if saving <= 0:
            return plan
        source, target = least_moves(order, sorted_plan)
        width = int(lengths[source].max(initial=0))
        if saving * SORT_HORIZON_STEPS <= MOVE_COST * len(source) * width:
            return plan
        self.slots.gather(source.tolist(), target.tolist(), width)
        self.rows.rearrange(source, target)
        return sorted_plan

    def _mark_even(self, plan: list[Bucket]) -> list[Bucket]:
        lengths = self.rows.host_column("position") + 1
        shortest = (int(lengths[start:stop].min()) for start, stop, _, _ in plan)
        return [
            bucket._replace(is_even=length == bucket.width)
            for bucket, length in zip(plan, shortest, strict=True)
        ]

    # -- departure ---------------------------------------------------------------------------------

    def remove(self, gone: np.ndarray) -> None:
        """Remove the rows with indices in `gone`. The last rows move into their places."""
        for row in gone[np.isnan(self.rows.host_column("log_prob")[gone])]:
            self.slots.clear(int(row))
        source, target = self.rows.remove(gone)
        if source:
            lengths = self.rows.host_column("position")[target].tolist()
            self.slots.move(source, target, lengths)
        self._plan = None


def _kv_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * 2**30)
    if device.type == "cuda":
        return int(0.6 * torch.cuda.mem_get_info(device)[0])
    return 2**30
