"""How the losses of tokens add up to the loss of a step, as weights of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.algo.config import AlgorithmConfig


def token_weights(
    lengths: Sequence[int],
    *,
    config: AlgorithmConfig,
    denominator: int | None = None,
    counted: Sequence[bool] | None = None,
    max_response_tokens: int | None = None,
) -> list[float]:
    """The weight of each token of each response, such that the step's loss is a plain weighted sum.

    `lengths` are the response tokens of *all* samples of the step (each at least 1). If they are
    only some, give a `denominator`, to replace the step's own: weights are in inverse proportion to
    it. `counted` says of each sample whether it counts (None: all do); one that does not has weight
    0 and is in no denominator. `max_response_tokens` stands in for `config.fixed_length`.

    Raises `ValueError` if fixed-length knows no length.
    """
    assert all(length > 0 for length in lengths), "a response has at least one token"
    counts = [True] * len(lengths) if counted is None else list(counted)
    kept = [length for length, count in zip(lengths, counts, strict=True) if count]
    total = sum(kept) if config.loss_aggregation == "token-mean" else len(kept)
    share = 1.0 / (denominator or total or 1)
    match config.loss_aggregation:
        case "token-mean" | "sequence-mean-token-sum":
            weights = [share] * len(lengths)
        case "sequence-mean-token-mean":
            weights = [share / length for length in lengths]
        case "fixed-length":
            fixed = config.fixed_length or max_response_tokens
            if fixed is None:
                raise ValueError("loss_aggregation=fixed-length needs fixed_length")
            weights = [share / fixed] * len(lengths)
    return [weight if count else 0.0 for weight, count in zip(weights, counts, strict=True)]
