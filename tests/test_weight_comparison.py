"""Stale weights are found by how log-probabilities change, and sound ones are never refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollpacker.trainer.model import character_tokenizer, new_model
from rollpacker.weights.comparison import TEXT_TOKENS, Comparison, text_of

NUM_TOKENS = TEXT_TOKENS - 1
Noise = Callable[[float], NDArray[np.float64]]


def gaussian(chance: np.random.Generator) -> Noise:
    return lambda scale: scale * chance.standard_normal(NUM_TOKENS)


def heavy_tailed(chance: np.random.Generator) -> Noise:
    """Most tokens hardly differ, and a few by a lot."""
    return lambda scale: scale * chance.standard_t(3, NUM_TOKENS)


def of_few_tokens(chance: np.random.Generator) -> Noise:
    """Of nine tokens in ten both sides say the same, bit for bit."""
    return lambda scale: (
        scale * chance.standard_t(3, NUM_TOKENS) * (chance.random(NUM_TOKENS) < 0.1)
    )


@pytest.mark.parametrize("kind", [gaussian, heavy_tailed, of_few_tokens])
@pytest.mark.parametrize("own_share", [0.5, 1.0, 2.0])
def test_no_sound_update_is_refused(kind: Callable[..., Noise], own_share: float) -> None:
    """A thousand made-up updates in runs of 50. They change log-probs by 1e-6 to 0.1 each, and by
    more and more together; each draws the noise of both sides anew, or keeps most of it. The
    engine's noise has `own_share` of the size of the trainer's."""
    chance = np.random.default_rng(0)
    noise = kind(chance)
    for run in range(20):
        size, scale = 10 ** chance.uniform(-6, -1), 10 ** chance.uniform(-3, -1.5)
        kept = (0.0, 0.9)[run % 2]
        direction = chance.standard_normal(NUM_TOKENS)
        comparison = Comparison("bfloat16")
        sound = -3 * chance.random(NUM_TOKENS)
        theirs, own = noise(scale), noise(scale * own_share)
        for _ in range(50):
            sound = sound + size * (direction + chance.standard_normal(NUM_TOKENS))
            theirs = kept * theirs + (1 - kept) * noise(scale)
            own = kept * own + (1 - kept) * noise(scale * own_share)
            assert comparison.add((sound + theirs).tolist(), (sound + own).tolist()) is None


def test_an_engine_that_repeats_itself_is_found_at_the_first_update_that_it_lacks() -> None:
    chance = np.random.default_rng(1)
    comparison, noise = Comparison("bfloat16"), gaussian(chance)
    for update in range(5):
        own = noise(0.02)
        assert comparison.add(noise(0.02).tolist(), own.tolist()) is None, update
    assert comparison.add(noise(0.02).tolist(), own.tolist(), changed=False) is None
    found = comparison.add(noise(0.02).tolist(), own.tolist())
    assert found is not None and "100% of the trainer's" in found and "0% of the engine's" in found


def test_one_that_does_not_repeat_itself_is_found_once_enough_has_changed() -> None:
    """By the regression, when the trainer's change is four times the noise; also one that follows
    a third of the changes."""
    chance = np.random.default_rng(2)
    for share in (0.0, 0.3):
        comparison, noise = Comparison("bfloat16"), gaussian(chance)
        direction = chance.standard_normal(NUM_TOKENS)
        for update in range(40):
            change = 0.005 * update
            theirs, own = change * direction, share * change * direction
            found = comparison.add((theirs + noise(0.01)).tolist(), (own + noise(0.01)).tolist())
            if found is not None:
                break
        assert found is not None and "of the trainer's changes" in found
        assert 0.04 < change < 0.12


def test_gross_faults_are_found_at_once_and_no_numbers_are_compared_with_none() -> None:
    assert "differ by 0.5 on average" in str(Comparison("bfloat16").add([-1.0] * 9, [-1.5] * 9))
    assert Comparison("bfloat16").add([-1.0] * 9, [-1.1] * 9) is None
    assert "(allowed: 0.001)" in str(Comparison("float32").add([-1.0] * 9, [-1.1] * 9))
    assert Comparison("float32").add([-1.0] * 9, [float("nan")] * 9) is not None
    assert Comparison("float32").add([float("nan")] * 9, [-1.0] * 9) is None


def test_a_text_is_cut_and_repeated_to_its_length() -> None:
    assert text_of([(1, 2), (3,)], context=None) == ((1, 2, 3) * TEXT_TOKENS)[:TEXT_TOKENS]
    assert text_of([range(1000)], context=100) == tuple(range(99))


class Split(nn.Module):
    """A linear layer whose sum is made in two rounded halves, as by two devices."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        half = inputs.shape[-1] // 2
        weight, bias = self.layer.weight, self.layer.bias
        found = inputs[..., :half] @ weight[:, :half].T + inputs[..., half:] @ weight[:, half:].T
        return found if bias is None else found + bias


def split(model: nn.Module) -> nn.Module:
    for name, child in list(model.named_children()):
        setattr(model, name, Split(child) if isinstance(child, nn.Linear) else split(child))
    return model


def policy(seed: int) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    architecture = {"model_type": "qwen2", **sizes, **heads, "initializer_range": 0.05}
    return new_model(architecture, character_tokenizer("abcdefgh"), seed).bfloat16()


@torch.no_grad()
def says(model: nn.Module, text: Tensor) -> list[float]:
    logits = model(input_ids=text, use_cache=False).logits[0, :-1].float()
    found: list[float] = logits.log_softmax(-1).gather(1, text[0, 1:, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize("stale_since", [None, 1, 4])
def test_a_model_in_bfloat16_one_update_of_one_millionth_behind(stale_since: int | None) -> None:
    """AdamW with float32 masters at a rate of 1e-6. The engine's part computes in another order.
    Sound, none of eight updates is refused; stale, the first is that it lacks."""
    model, engine = policy(0), split(policy(0))
    own = list(engine.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, weight_decay=0.0)
    chance = torch.Generator().manual_seed(0)
    size = model.config.vocab_size
    text = torch.randint(0, size, (1, TEXT_TOKENS), generator=chance)
    comparison = Comparison("bfloat16")
    for update in range(9):
        assert len(own) == len(masters)
        if stale_since is None or update < stale_since:
            with torch.no_grad():
                for mine, theirs in zip(own, model.parameters(), strict=True):
                    mine.copy_(theirs)
        found = comparison.add(says(model, text), says(engine, text))
        if found is not None:
            break
        tokens = torch.randint(0, size, (4, 32), generator=chance)
        advantages = torch.randn(4, 1, generator=chance)
        log_probs = model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
        log_probs = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
        model.zero_grad()
        (-(advantages * log_probs).mean()).backward()
        for master, theirs in zip(masters, model.parameters(), strict=True):
            assert theirs.grad is not None
            master.grad = theirs.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, theirs in zip(masters, model.parameters(), strict=True):
                theirs.copy_(master)
    assert (update if found else None) == stale_since
