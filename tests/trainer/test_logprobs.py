"""Chunked log-probabilities against plain log_softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollpacker.trainer.logprobs import LogitTransform, chunked_log_probs


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    transform: LogitTransform,
) -> tuple[Tensor, Tensor]:
    """With full logits, by autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    table = torch.log_softmax(logits / temperature, -1)
    return table[range(len(targets)), targets], -(table.exp() * table).sum(-1)


def inputs(
    num_rows: int, vocabulary: int, *, size: int = 5, seed: int = 0, dtype=torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=dtype).requires_grad_()
        for shape in ((num_rows, size), (vocabulary, size), (vocabulary,))
    )
    return hidden, weight, bias, torch.randint(vocabulary, (num_rows,), generator=draw)


def gradients(results: tuple[Tensor, Tensor], of: list[Tensor], shares: tuple[float, float]):
    """Of a different multiple of every log-prob and every entropy."""
    log_probs, entropy = results
    steps = torch.arange(1, len(log_probs) + 1, dtype=log_probs.dtype)
    loss = log_probs.new_zeros(())
    if shares[0]:
        loss = loss + shares[0] * (log_probs * steps).sum()
    if shares[1]:
        loss = loss + shares[1] * (entropy * steps.cos()).sum()
    return torch.autograd.grad(loss, of)


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 12),
    vocabulary=st.integers(2, 40),
    block_elements=st.sampled_from([1, 3, 16, 50, 200, 10_000]),
    temperature=st.floats(0.2, 2.0),
    scale=st.sampled_from([1.0, 0.3]),
    softcap=st.sampled_from([None, 1.5]),
    has_bias=st.booleans(),
    shares=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, -0.5)]),
    seed=st.integers(0, 1000),
)
def test_equals_log_softmax(
    num_rows, vocabulary, block_elements, temperature, scale, softcap, has_bias, shares, seed
):
    hidden, weight, bias, targets = inputs(num_rows, vocabulary, seed=seed)
    transform = LogitTransform(scale=scale, softcap=softcap)
    chosen_bias = bias if has_bias else None
    actual = chunked_log_probs(
        hidden,
        weight,
        chosen_bias,
        targets,
        temperature=temperature,
        transform=transform,
        block_elements=block_elements,
    )
    expected = plain(hidden, weight, chosen_bias, targets, temperature, transform)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-11)
    leaves = [hidden, weight, bias] if has_bias else [hidden, weight]
    ours, theirs = gradients(actual, leaves, shares), gradients(expected, leaves, shares)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("block_elements", [7, 10_000])
def test_only_what_is_asked_for_gets_a_gradient(block_elements):
    """A frozen output layer (adapters below it), and a trained one over frozen layers."""
    hidden, weight, bias, targets = inputs(6, 11)
    transform = LogitTransform()
    for trained in (hidden, weight, bias):
        leaves = [t if t is trained else t.detach() for t in (hidden, weight, bias)]
        actual = chunked_log_probs(*leaves, targets, temperature=1.0, block_elements=block_elements)
        (ours,) = gradients(actual, [trained], (1.0, 1.0))
        (theirs,) = gradients(plain(*leaves, targets, 1.0, transform), [trained], (1.0, 1.0))
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("block_elements", [64, 1 << 20])
def test_backward_twice_gives_the_same(block_elements):
    hidden, weight, bias, targets = inputs(9, 30)
    log_probs, entropy = chunked_log_probs(
        hidden, weight, bias, targets, temperature=0.8, block_elements=block_elements
    )
    loss = log_probs.sum() + entropy.sum()
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_large_logits_neither_overflow_nor_vanish():
    hidden, weight, bias, targets = inputs(4, 50, dtype=torch.float32)
    large = (hidden.detach() * 1000).requires_grad_()
    actual = chunked_log_probs(large, weight, bias, targets, temperature=1.0, block_elements=32)
    exact = plain(large.double(), weight.double(), bias.double(), targets, 1.0, LogitTransform())
    assert torch.allclose(actual[0].double(), exact[0], rtol=1e-5)
    assert torch.allclose(actual[1].double(), exact[1], atol=1e-4)
    assert all(bool(g.isfinite().all()) for g in gradients(actual, [large, weight], (1.0, 1.0)))


@pytest.mark.parametrize("block_elements", [1000, 1 << 20])
def test_low_precision_is_summed_in_float32(block_elements):
    hidden, weight, _, targets = inputs(64, 3000, size=16, dtype=torch.bfloat16)
    actual = chunked_log_probs(
        hidden, weight, None, targets, temperature=1.0, block_elements=block_elements
    )
    assert actual[0].dtype == actual[1].dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, weight).detach().double()
    table = logits.log_softmax(-1)
    assert torch.allclose(actual[0].double(), table[range(64), targets], atol=1e-4)
    exact_leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = plain(*exact_leaves, None, targets, 1.0, LogitTransform())
    ours = gradients(actual, [hidden, weight], (1.0, 1.0))
    theirs = gradients(exact, exact_leaves, (1.0, 1.0))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() / b.norm() < 0.01


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("num_rows, vocabulary", [(64, 500), (500, 64), (3, 2000)])
def test_no_more_logits_than_a_block_at_a_time(num_rows, vocabulary):
    block_elements = 1500
    hidden, weight, bias, targets = inputs(num_rows, vocabulary, size=2)
    with LargestTensor() as largest:
        results = chunked_log_probs(
            hidden, weight, bias, targets, temperature=1.0, block_elements=block_elements
        )
        gradients(results, [hidden, weight, bias], (1.0, 1.0))
    # Hidden states, weight and their gradients are as large as they are.
    assert largest.elements <= max(block_elements, weight.numel(), hidden.numel())
    with LargestTensor() as largest:
        gradients(
            plain(hidden, weight, bias, targets, 1.0, LogitTransform()),
            [hidden, weight, bias],
            (1.0, 1.0),
        )
    assert largest.elements >= num_rows * vocabulary, "the measure sees full logits"
