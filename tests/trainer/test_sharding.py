"""Several processes with a share of the work each compute what one process computes with all of it.

What is compared with is plain torch: one model, one backward after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.trainer.batches import Row, collate
from rollpacker.trainer.critic import from_policy_model
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.sharding import (
    ShardedGradients,
    Shards,
    any_rank,
    full_tensors,
    join,
    max_over_ranks,
    same_number,
    shard,
)
from rollpacker.trainer.trainer import TrainerError
from tests.trainer.ranks import RankError, Ranks

VOCABULARY = 23
MODES = pytest.mark.parametrize("gradient_sync", ["step", "micro-batch"])
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


class Scorer(nn.Module):
    """Like the policy: a root that holds a model and calls its parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [B, W - 1] of the tokens, and the entropy there."""
        model = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        every = (hidden[:, :-1] @ model.lm_head.weight.T).log_softmax(-1)
        chosen = every.gather(-1, input_ids[:, 1:, None]).sum(-1)
        return chosen, -(every.exp() * every).sum(-1)


def build(
    *, tied: bool = True, checkpointing: bool = False, lora: bool = False, seed: int = 0
) -> Scorer:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model: nn.Module = Qwen2ForCausalLM(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, and so would be the gradient of lora_A
                nn.init.normal_(parameter, std=0.2)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    return Scorer(model.double())


def micro_batch(index: int) -> Tensor:
    draw = torch.Generator().manual_seed(index)
    return torch.randint(0, VOCABULARY, (1 + index % 3, 4 + index % 5), generator=draw)


def loss_of(scorer: nn.Module, index: int) -> Tensor:
    log_probs, entropy = scorer(micro_batch(index))
    return (log_probs.double() + 0.1 * entropy.double()).sum() * (1 + index)


def dealt(work: Sequence[int], size: int) -> list[range]:
    """Indices of the micro-batches of each rank."""
    ends = [sum(work[: rank + 1]) for rank in range(len(work))]
    shares = [range(end - count, end) for end, count in zip(ends, work, strict=True)]
    shares += [range(0)] * size
    return [*shares[: size - 1], range(sum(map(len, shares[: size - 1])), sum(work))]


def plain_gradients(work: Sequence[int], **kind: bool) -> dict[str, Tensor]:
    scorer = build(**kind)
    for index in range(sum(work)):
        loss_of(scorer, index).backward()
    return {n: p.grad for n, p in scorer.model.named_parameters() if p.grad is not None}


def accumulate(
    scorer: nn.Module, gradients: ShardedGradients, mine: Sequence[int], shards: Shards
) -> None:
    """Like the trainer: as many micro-batches as the busiest rank, and the end of the step."""

    def filler() -> None:
        (loss_of(scorer, 0) * 0).backward()

    fillers = same_number(len(mine), shards) - len(mine)
    for index in mine:
        loss_of(scorer, index).backward()
    for _ in range(fillers):
        filler()
    gradients.finish(filler)


def sharded_gradients(
    shards: Shards,
    work: Sequence[int],
    gradient_sync: str,
    param_dtype: torch.dtype | None,
    kind: Mapping[str, bool],
) -> dict[str, Tensor]:
    scorer = build(**kind)
    if param_dtype is not None:
        scorer.float()
    gradients = shard(scorer, shards, param_dtype=param_dtype, gradient_sync=gradient_sync)
    assert all(isinstance(p, DTensor) for p in scorer.parameters())
    accumulate(scorer, gradients, dealt(work, shards.size)[shards.rank], shards)
    named = [(n, p.grad) for n, p in scorer.model.named_parameters() if p.grad is not None]
    return dict(full_tensors(named, shards))


def relative_difference(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert got.keys() == expected.keys() and got
    return max(
        ((got[n].double() - expected[n]).abs().max() / expected[n].abs().max()).item() for n in got
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as group:
        yield group


@SIZES
@MODES
@pytest.mark.parametrize(("tied", "checkpointing"), [(True, False), (False, False), (True, True)])
def test_gradients_are_the_sum_over_uneven_work(ranks, size, gradient_sync, tied, checkpointing):
    """The other side never checkpoints."""
    work = (5, 1, 0)
    kind = {"tied": tied, "checkpointing": checkpointing}
    got = ranks.run(size, sharded_gradients, work, gradient_sync, None, kind)
    assert relative_difference(got[0], plain_gradients(work, tied=tied)) < 1e-12
    assert got[1:] == [{}] * (size - 1)


@MODES
def test_frozen_parameters_get_no_gradient(ranks, gradient_sync):
    got = ranks.run(2, sharded_gradients, (2, 1), gradient_sync, None, {"lora": True})[0]
    assert all("lora_" in name for name in got) and len(got) == 2 * 2 * 7
    assert relative_difference(got, plain_gradients((2, 1), lora=True)) < 1e-12


@settings(deadline=None, max_examples=10)
@given(
    work=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    size=st.sampled_from([1, 2, 3, 4]),
    gradient_sync=st.sampled_from(["step", "micro-batch"]),
)
def test_any_split_of_the_work_gives_the_same_gradient(ranks, work, size, gradient_sync):
    got = ranks.run(size, sharded_gradients, work, gradient_sync, None, {})[0]
    assert relative_difference(got, plain_gradients(work)) < 1e-12


@SIZES
@MODES
def test_bfloat16_computation_is_near_and_summed_in_float32(ranks, size, gradient_sync):
    """One part in 2^8 per operation; the gradients are of float32 and not rounded to bfloat16."""
    work = (3, 2)
    got = ranks.run(size, sharded_gradients, work, gradient_sync, torch.bfloat16, {})[0]
    assert relative_difference(got, plain_gradients(work)) < 0.1
    assert all(g.dtype == torch.float32 for g in got.values())
    assert any(not torch.equal(g, g.bfloat16().float()) for g in got.values())


def gradients_after_a_step_was_dropped(shards: Shards, gradient_sync: str) -> dict[str, Tensor]:
    scorer = build()
    gradients = shard(scorer, shards, param_dtype=None, gradient_sync=gradient_sync)
    gradients.forget()  # before the first forward, too
    (loss_of(scorer, 5) * float("nan")).backward()
    gradients.forget()
    accumulate(scorer, gradients, [shards.rank], shards)
    return dict(full_tensors([(n, p.grad) for n, p in scorer.model.named_parameters()], shards))


@MODES
def test_a_step_can_be_dropped(ranks, gradient_sync):
    got = ranks.run(2, gradients_after_a_step_was_dropped, gradient_sync)[0]
    assert relative_difference(got, plain_gradients((2,))) < 1e-12


ROWS = [Row((3, 4), (5, 6, 7)), Row((8,), (9, 10)), Row((2, 3, 4, 5), (6,))]


def policy_and_critic(shards: Shards | None) -> dict[str, Tensor]:
    """Gradients of the real modules; row i is rank i's, or all are the only process's."""
    model = build().model
    critic = from_policy_model(model)
    nn.init.ones_(critic.value_head.weight)
    roots: list[nn.Module] = [Policy(model), critic]
    sharded = []
    if shards is not None:
        sharded = [shard(r, shards, param_dtype=None, gradient_sync="step") for r in roots]

    def backward(row: int, weight: float) -> None:
        batch = collate([ROWS[row]], 0, torch.device("cpu"))
        log_probs, entropy = roots[0](batch, 0.7)
        ((log_probs + entropy).sum() * weight).backward()
        (roots[1](batch).square().sum() * weight).backward()

    for row in range(len(ROWS)) if shards is None else [shards.rank]:
        backward(row, 1.0)
    finish = lambda: backward(0, 0.0)  # noqa: E731
    for one in sharded:
        finish = partial(one.finish, finish)
    if shards is not None:
        finish()
    named = [(f"{i}.{n}", p.grad) for i, r in enumerate(roots) for n, p in r.named_parameters()]
    return dict(full_tensors(named, shards))


def test_the_policy_and_the_critic_can_be_sharded(ranks):
    assert relative_difference(ranks.run(3, policy_and_critic)[0], policy_and_critic(None)) < 1e-12


def train(shards: Shards, steps: int, gradient_sync: str) -> dict[str, object]:
    """Steps of AdamW with scoring in between, and what a frozen reference says."""
    scorer, reference = build(), build(seed=1).requires_grad_(False)
    gradients = shard(scorer, shards, param_dtype=None, gradient_sync=gradient_sync)
    shard(reference, shards, param_dtype=None, gradient_sync=gradient_sync)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=0.1)
    scores = []
    for step in range(steps):
        with torch.no_grad():
            scores.append((scorer(micro_batch(7))[0], reference(micro_batch(step))[0]))
        accumulate(scorer, gradients, [step] if shards.rank == step % shards.size else [], shards)
        optimizer.step()
        optimizer.zero_grad()
    state = scorer._get_fsdp_state()
    return {
        "scores": scores,
        "weights": dict(full_tensors(scorer.model.named_parameters(), shards)),
        "rounded": dict(full_tensors(scorer.model.named_parameters(), shards, torch.bfloat16)),
        "noted_forwards": len(state._comm_ctx.post_forward_order)
        + len(reference._get_fsdp_state()._comm_ctx.post_forward_order),
    }


@SIZES
@MODES
def test_steps_and_scores_in_between_equal_a_plain_models(ranks, size, gradient_sync):
    plain, reference = build(), build(seed=1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    answers = ranks.run(size, train, 3, gradient_sync)
    for step in range(3):
        with torch.no_grad():
            expected = plain(micro_batch(7))[0], reference(micro_batch(step))[0]
        for answer in answers:
            for got, wanted in zip(answer["scores"][step], expected, strict=True):
                assert torch.allclose(got, wanted, rtol=1e-9, atol=0)
        loss_of(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.detach() for n, p in plain.model.named_parameters()}
    assert relative_difference(answers[0]["weights"], weights) < 1e-9
    for name, value in answers[0]["rounded"].items():
        assert torch.equal(value, answers[0]["weights"][name].bfloat16())
    assert all(answer["noted_forwards"] == 0 for answer in answers)


def scores_around_an_update(shards: Shards) -> list[Tensor]:
    scorer = build()
    shard(scorer, shards, param_dtype=None, gradient_sync="step")
    parameters = list(scorer.parameters())
    scores = []
    with torch.no_grad():
        for _ in range(2):
            scores.append(scorer(micro_batch(7))[0])
            for parameter in parameters:
                parameter.mul_(0.5)
    return scores


@SIZES
def test_an_update_right_after_scoring_is_seen_by_the_next_scores(ranks, size):
    """Without a backward pass in between."""
    plain = build()
    with torch.no_grad():
        expected = [plain(micro_batch(7))[0]]
        for parameter in plain.parameters():
            parameter.mul_(0.5)
        expected.append(plain(micro_batch(7))[0])
    for scores in ranks.run(size, scores_around_an_update):
        for got, wanted in zip(scores, expected, strict=True):
            assert torch.allclose(got, wanted, rtol=1e-9, atol=0)


def summed_before_the_end(shards: Shards, gradient_sync: str) -> list[bool]:
    scorer = build()
    gradients = shard(scorer, shards, param_dtype=None, gradient_sync=gradient_sync)
    summed = []
    for step in range(2):
        loss_of(scorer, step).backward()
        summed.append(any(p.grad is not None for p in scorer.parameters()))
        accumulate(scorer, gradients, [], shards)
        gradients.forget()
    return summed


def test_gradients_are_sent_once_a_step_or_at_every_backward(ranks):
    assert ranks.run(2, summed_before_the_end, "step") == [[False, False]] * 2
    assert ranks.run(2, summed_before_the_end, "micro-batch") == [[True, True]] * 2


def exchange(shards: Shards, counts: Sequence[int]) -> tuple[object, ...]:
    mine = counts[shards.rank]
    return (
        same_number(mine, shards),
        any_rank(mine == 3, shards),
        any_rank(mine == 9, shards),
        max_over_ranks([-mine, mine], shards),
    )


def test_small_numbers_are_exchanged(ranks):
    expected = (5, True, False, [-3.0, 5.0])
    assert ranks.run(2, exchange, (3, 5)) == [expected] * 2
    assert exchange_alone() == (3, True, [4.0])


def exchange_alone() -> tuple[object, ...]:
    return (
        same_number(3, None),
        any_rank(True, None),
        max_over_ranks([4], None),
    )


def test_one_process_needs_no_process_group():
    plain = build()
    whole = dict(full_tensors(plain.model.named_parameters(), None))
    assert all(torch.equal(whole[n], p) for n, p in plain.model.named_parameters())


def test_a_process_outside_torchrun_is_told_so(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(TrainerError, match=r"MASTER_ADDR.* not set.*torchrun"):
        join(torch.device("cpu"), 1.0)


def shard_a_model_without_layers(shards: Shards) -> str:
    try:
        shard(nn.Linear(2, 2), shards, param_dtype=None, gradient_sync="step")
    except TrainerError as error:
        return str(error)
    return ""


def test_a_model_that_does_not_name_its_layers_is_refused(ranks):
    assert "train.processes" in ranks.run(1, shard_a_model_without_layers)[0]


def fail_or_wait(shards: Shards) -> None:
    if shards.rank == 1:
        raise ValueError("what went wrong")
    any_rank(True, shards)


def test_a_rank_that_fails_is_named_and_nobody_waits_for_it(ranks):
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2(?s:.*)what went wrong"):
        ranks.run(2, fail_or_wait)
    assert time.monotonic() - began < 30
    assert ranks.run(2, exchange, (1, 1))[0][0] == 1
