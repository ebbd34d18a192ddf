"""Carried tokens equal generation from scratch: aborts at random moments, weights that move.

Every sample is launched, aborted at a random moment, and launched again with the tokens that it
had, under other weights, until it may finish. Each response that took up carried tokens is compared
with a fresh launch's under its last weights. A difference is a tie where the two best scores of the
draw (log-probability - log of the exponential) are within 1e-5, so that a rounding decides.

Arms: the quickstart's policies while it learns; a random model with a vocabulary wide enough for
two rounds of draws, moved at random; and the quickstart's with the complement rule, whose responses
equal those from scratch unless an end was drawn once more.

    python benchmarks/carry_exact.py
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import batch_invariance
import policies
import torch
from lab import bench
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.embedded.extend import MAX_REDRAWS
from rollpacker.engines.embedded.sampling import exponentials, noise_size, num_groups
from rollpacker.engines.engine import (
    Carried,
    EngineConfig,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
    sample_key,
)
from rollpacker.run.parts import policy as build

TIE = 1e-5
SLOTS = 64
ABORT_SHARE = 0.25
"""Of the live samples, at every tick: one in twelve steps or so."""
Weights = dict[str, torch.Tensor]


@dataclass
class Counts:
    """Counts of one campaign of launches."""

    responses: int = 0
    tokens: int = 0
    """In finished responses that had taken up carried tokens."""
    carried_tokens: int = 0
    launches: int = 0
    aborts: int = 0
    most_aborts_of_a_sample: int = 0
    verified: int = 0
    """Carried responses looked at, ..."""
    cut: int = 0
    """... those of them that differed somewhere, ..."""
    looked_at_tokens: int = 0
    """... and their tokens, up to the first that differed."""
    kept: int = 0
    """Tokens of carried responses that came out the same, ..."""
    offered: int = 0
    """... of so many that were carried."""
    different: int = 0
    ties: int = 0
    wrong_num_kept: int = 0
    redrawn: int = 0
    redraws: int = 0
    turns_used_up: int = 0
    below_floor: int = 0
    """Accepted although not longer than where it had been cut off, with redraws left."""
    gaps: list[float] = field(default_factory=list)


class Launcher:
    """Runs samples on an engine and aborts some of them at random moments."""

    def __init__(self, engine: TorchEngine, dice: random.Random) -> None:
        self._engine = engine
        self._dice = dice
        self._tickers = 0

    def launch(
        self, requests: Sequence[GenerationRequest], abort_share: float
    ) -> dict[SampleId, EngineOutput]:
        """One output each. A ticker, a request of a few tokens, ends every few steps; at that
        moment some live samples are aborted."""
        if not requests:  # all ended before the last launch
            return {}
        outputs: dict[SampleId, EngineOutput] = {}
        live = {one.sample for one in requests}
        done = threading.Event()
        died: list[BaseException] = []

        def listen(new: Sequence[EngineOutput]) -> None:
            ticked = False
            for output in new:
                ticked |= output.event.sample.prompt.source == "tick"
                if output.event.sample in live:
                    live.discard(output.event.sample)
                    outputs[output.event.sample] = output
            if not live:
                done.set()
            elif ticked:
                victims = [one for one in sorted(live) if self._dice.random() < abort_share]
                self._engine.abort(victims)
                self._engine.submit([self._ticker()])

        def fail(error: BaseException) -> None:
            died.append(error)
            done.set()

        self._engine.start(listen, fail)
        ticks = [self._ticker()] if abort_share else []
        self._engine.submit([*ticks, *requests])
        done.wait()
        while (status := self._engine.status()).num_running + status.num_waiting:
            time.sleep(0.001)
        assert not died, died
        return outputs

    def _ticker(self) -> GenerationRequest:
        self._tickers += 1
        return GenerationRequest(
            sample=SampleId(PromptId("tick", 0, self._tickers), 0, 0),
            prompt_tokens=(1,),
            sampling=SamplingParams(max_response_tokens=64),
            forced_length=self._dice.randint(1, 24),
        )


@dataclass
class Sample:
    request: GenerationRequest
    carried: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    floor: int = 0
    num_aborts: int = 0


def campaign(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    weights: Sequence[Weights],
    counts: Counts,
    dice: random.Random,
    *,
    complement: bool,
) -> None:
    """Launch these under each of the weights in turn; in the last launch nobody is aborted."""
    engine = TorchEngine(model=model, tokenizer=None, config=EngineConfig(max_slots=SLOTS))
    launcher = Launcher(engine, dice)
    waiting = {one.sample: Sample(one) for one in requests}
    for version, state in enumerate(weights):
        _load(model, state)
        asyncio.run(engine.update_weights(version))
        is_last = version + 1 == len(weights)
        asked = [_request(one, complement, version) for one in waiting.values()]
        dice.shuffle(asked)
        outputs = launcher.launch(asked, 0.0 if is_last else ABORT_SHARE)
        counts.launches += 1
        finished: list[tuple[GenerationRequest, EngineOutput]] = []
        for one in asked:
            output, sample = outputs[one.sample], waiting[one.noise]
            _count_verified(counts, one, output)
            if isinstance(output.event, SampleAborted):
                counts.aborts += 1
                sample.num_aborts += 1
                counts.most_aborts_of_a_sample = max(
                    counts.most_aborts_of_a_sample, sample.num_aborts
                )
                if output.response is not None:
                    sample.carried = (output.response.tokens, output.response.log_probs)
                sample.floor = max(sample.floor, len(sample.carried[0]))
                continue
            assert isinstance(output.event, SampleGenerated), output.event
            if one.carried is not None:
                finished.append((one, output))
            del waiting[one.noise]
        scratch = _scratch(launcher, [one for one, _ in finished])
        for one, output in finished:
            _compare(counts, model, one, output, scratch[one.sample])
    assert not waiting
    asyncio.run(engine.close())
    print(described(counts), flush=True)


def _request(sample: Sample, complement: bool, version: int) -> GenerationRequest:
    tokens, log_probs = sample.carried
    floor, asked = sample.floor if complement else 0, sample.request.sample
    return replace(
        sample.request,
        sample=SampleId(asked.prompt, asked.index, version),
        noise=asked,
        carried=Carried(tokens=tokens, log_probs=log_probs, floor=floor) if tokens else None,
    )


def _scratch(
    launcher: Launcher, asked: Sequence[GenerationRequest]
) -> dict[SampleId, Response | None]:
    if not asked:
        return {}
    outputs = launcher.launch([replace(one, carried=None) for one in asked], 0.0)
    return {sample: output.response for sample, output in outputs.items()}


def _count_verified(counts: Counts, asked: GenerationRequest, output: EngineOutput) -> None:
    num_kept = output.event.num_kept
    if asked.carried is None or num_kept is None:
        return
    num_carried = len(asked.carried.tokens)
    counts.verified += 1
    counts.kept += num_kept
    counts.offered += num_carried
    counts.cut += num_kept < num_carried
    counts.looked_at_tokens += min(num_kept + 1, num_carried)


def _compare(
    counts: Counts,
    model: PreTrainedModel,
    asked: GenerationRequest,
    output: EngineOutput,
    wanted: Response | None,
) -> None:
    found, event = output.response, output.event
    assert found is not None and wanted is not None and asked.carried is not None
    counts.responses += 1
    counts.tokens += len(found.tokens)
    counts.carried_tokens += len(asked.carried.tokens)
    if event.num_redraws:
        counts.redrawn += 1
        counts.redraws += event.num_redraws
        counts.turns_used_up += event.num_redraws == MAX_REDRAWS
    stopped_short = found.finish_reason == "stop" and len(found.tokens) <= asked.carried.floor
    counts.below_floor += stopped_short and event.num_redraws < MAX_REDRAWS
    if event.num_redraws:
        return
    counts.wrong_num_kept += event.num_kept != _common(asked.carried.tokens, found.tokens)
    if found.tokens == wanted.tokens and found.finish_reason == wanted.finish_reason:
        return
    place = _common(found.tokens, wanted.tokens)
    gap = _score_gap(model, asked, wanted.tokens, place)
    counts.gaps.append(gap)
    if gap < TIE:
        counts.ties += 1
    else:
        counts.different += 1


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)


@torch.inference_mode()
def _score_gap(
    model: PreTrainedModel, asked: GenerationRequest, tokens: Sequence[int], place: int
) -> float:
    """Between the two best scores of the draw of token number `place`: the smaller of the two
    rounds' gaps where there are two."""
    ids = torch.tensor([asked.prompt_tokens + tuple(tokens[:place])])
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].double()
    probs = (logits / asked.sampling.temperature).softmax(-1)
    size = len(probs)
    assert asked.noise is not None
    key = torch.tensor([sample_key(asked.sampling.seed, asked.noise)], dtype=torch.uint64)
    noise = exponentials(
        key.view(torch.int64), torch.tensor([place]), 1, noise_size(size)
    ).flatten()
    groups = num_groups(size)
    sums = torch.stack([probs[group::groups].sum() for group in range(groups)])
    gap, best = _gap(sums, noise[:groups])
    if groups < size:
        inside = probs[best::groups]
        gap = min(gap, _gap(inside, noise[groups : groups + len(inside)])[0])
    return gap


def _gap(probs: torch.Tensor, noise: torch.Tensor) -> tuple[float, int]:
    (first, second), order = (probs.log() - noise.log()).topk(2)
    return float(first - second), int(order[0])


def _load(model: PreTrainedModel, state: Weights) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(state[name])


# -- arms ------------------------------------------------------------------------------------------


def quickstart_batches(dice: random.Random) -> Iterator[tuple[list[GenerationRequest], list[int]]]:
    """Prompts, and the steps of the policies that they are launched under."""
    config = policies.quickstart()
    policy = build.load_policy(config, threads=1)
    asyncio.run(policy.engine.close())
    rows = sorted(policy.train_prompts.rows, key=lambda row: -len(row.tokens))
    # Long sums have long answers, of which much can be carried.
    prompts = [row.tokens for row in rows[: len(rows) // 5]]
    for batch in itertools.count(dice.randrange(1000)):
        requests = [
            GenerationRequest(
                sample=SampleId(PromptId("train", batch, row), index, 0),
                prompt_tokens=prompts[(batch * 96 + row) % len(prompts)],
                sampling=SamplingParams(
                    max_response_tokens=384, temperature=0.8 if row % 4 == 3 else 1.0, seed=batch
                ),
            )
            for row in range(96)
            for index in range(4)
        ]
        step = dice.randint(15, 45)
        steps = [step]
        for _ in range(4):
            steps.append(steps[-1] + dice.randint(1, 3))
        yield requests, steps


def quickstart_arm(
    num_tokens: int, seed: int, *, complement: bool, dtype: str = "float32", moves: bool = True
) -> Counts:
    """`moves`: whether each launch has newer weights than the one before."""
    torch.set_num_threads(1)
    dice, counts = random.Random(seed), Counts()
    config = policies.quickstart(dtype)
    policy = build.load_policy(config, model_path=str(policies.policy_folder(20)), threads=1)
    asyncio.run(policy.engine.close())
    for requests, steps in quickstart_batches(dice):
        steps = steps if moves else steps[:1] * len(steps)
        weights = [load_file(policies.policy_folder(s) / "model.safetensors") for s in steps]
        model = policy.loaded.model
        campaign(model, requests, weights, counts, dice, complement=complement)
        if counts.tokens >= num_tokens:
            break
    return counts


def wide_arm(num_tokens: int, seed: int) -> Counts:
    torch.set_num_threads(1)
    dice, counts = random.Random(seed), Counts()
    model = batch_invariance.make_model(vocab_size=3001, eos_token_id=list(range(1, 12)))
    base = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for batch in itertools.count():
        requests = [
            GenerationRequest(
                sample=SampleId(PromptId("train", batch, row), index, 0),
                prompt_tokens=tuple(dice.randrange(50, 3000) for _ in range(4 + row)),
                sampling=SamplingParams(max_response_tokens=200, seed=batch),
            )
            for row in range(24)
            for index in range(4)
        ]
        weights = [base]
        for _ in range(3):
            weights.append(
                {
                    name: weight + 3e-4 * weight.std(unbiased=False) * torch.randn_like(weight)
                    for name, weight in weights[-1].items()
                }
            )
        campaign(model, requests, weights, counts, dice, complement=False)
        if counts.tokens >= num_tokens:
            break
    return counts


def together(counts: Sequence[Counts]) -> Counts:
    total = Counts()
    for one in counts:
        for name, value in vars(one).items():
            setattr(total, name, getattr(total, name) + value)
    total.most_aborts_of_a_sample = max(one.most_aborts_of_a_sample for one in counts)
    return total


def described(counts: Counts) -> dict[str, object]:
    row = {key: value for key, value in vars(counts).items() if key != "gaps"}
    return {
        **row,
        "mismatches_per_token": counts.cut / max(1, counts.looked_at_tokens),
        "share_kept": counts.kept / max(1, counts.offered),
        "largest_gap_of_a_tie": max((gap for gap in counts.gaps if gap < TIE), default=None),
    }


PROCESSES = 4


def main(
    tokens: int = 500_000, wide_tokens: int = 30_000, complement_tokens: int = 80_000
) -> dict[str, Any]:
    policies.policy_folder(1)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        running = {
            "quickstart": [
                pool.submit(quickstart_arm, tokens // PROCESSES, seed, complement=False)
                for seed in range(PROCESSES)
            ],
            "complement": [
                pool.submit(quickstart_arm, complement_tokens // 2, seed, complement=True)
                for seed in (100, 101)
            ],
            "wide vocabulary": [pool.submit(wide_arm, wide_tokens, 0)],
        }
        return {
            name: described(together([one.result() for one in started]))
            for name, started in running.items()
        }


if __name__ == "__main__":
    bench(main, holds=lambda found: not any(arm["different"] for arm in found.values()))
