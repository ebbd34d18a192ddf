"""Stale weights are found by log-probabilities that stay as they were, and sound ones never are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollpacker.trainer.model import character_tokenizer, new_model
from rollpacker.weights.comparison import TEXT_TOKENS, Comparison, text_of

Said = tuple[NDArray[np.float64], NDArray[np.float64], bool]


def updates(chance: np.random.Generator, *, is_stale: bool = False) -> Iterator[Said]:
    """What a trainer and an engine say of a text after each of six made-up updates, and whether the
    update changed the weights. A log-prob is a sum of numbers, some of them in the sums of all
    tokens, which both sides round, the engine after an error of its own. An update moves each
    number by a hundred thousandth of a rounding step, or by a whole one, or something between. Some
    trainers round nothing; some engines round coarsely, or do not repeat themselves; of some texts
    most tokens are certain; some updates change few tokens or nothing. A stale engine has the first
    weights, and repeats itself."""
    num_tokens = int(chance.choice([15, 31, 63, 127, 255]))
    own = chance.random((num_tokens, int(10 ** chance.uniform(0, 1.5))))
    shared = chance.random(int(chance.choice([0, 1, 4, 16])))
    errors = [0.5 * chance.standard_normal(one.shape) for one in (own, shared)]
    loads = chance.standard_normal((num_tokens, len(shared))) / max(1, len(shared)) ** 0.5
    is_open = chance.random(num_tokens) >= chance.choice([0, 0, 0.5, 0.9])
    is_moved = chance.random(num_tokens) < chance.choice([1, 1, 0.05])
    rounds = chance.random() < 0.75
    coarseness = chance.choice([1, 1, 0.5, 2])
    noise = chance.choice([0, 0, 0, 0.3])
    idles = chance.choice([1, 1, 2])
    size, step = 10 ** chance.uniform(-4, -1), 10 ** chance.uniform(-5, 0)
    sound = -3 * chance.random(num_tokens)

    def said(parts: list[NDArray[np.float64]], unit: float) -> NDArray[np.float64]:
        own, shared = (np.round(x / unit) * unit for x in parts) if unit else parts
        return sound + size * is_open * (own.sum(1) / own.shape[1] ** 0.5 + loads @ shared)

    first = None
    for number in range(6):
        changed = number > 0 and number % idles == 0
        if changed:
            own = own + step * chance.standard_normal(own.shape) * is_moved[:, None]
            shared = shared + step * chance.standard_normal(shared.shape) * is_moved.all()
        engine = said([own + errors[0], shared + errors[1]], coarseness)
        engine += noise * size * is_open * chance.standard_normal(num_tokens)
        first = engine if first is None else first
        yield said([own, shared], float(rounds)), first if is_stale else engine, changed


def found_in(said: Iterable[Said]) -> int | None:
    """The number of the update at which the engine is refused."""
    comparison = Comparison("bfloat16")
    for number, (trainer, engine, changed) in enumerate(said):
        if comparison.add(trainer.tolist(), engine.tolist(), changed=changed) is not None:
            return number
    return None


def test_no_sound_update_is_refused_among_thousands() -> None:
    for seed in range(1000):
        assert found_in(updates(np.random.default_rng(seed))) is None, seed


def test_the_same_updates_show_many_stale_engines() -> None:
    """Most of them change too little, or too few tokens, to show one."""
    found = [found_in(updates(np.random.default_rng(n), is_stale=True)) for n in range(300)]
    assert sum(number is not None for number in found) > 10


def test_an_engine_that_repeats_itself_is_found_at_the_first_update_that_it_lacks() -> None:
    chance = np.random.default_rng(1)

    def rounding() -> list[float]:
        return [0.02 * one for one in chance.standard_normal(TEXT_TOKENS - 1).tolist()]

    comparison = Comparison("bfloat16")
    for update in range(5):
        own = rounding()
        assert comparison.add(rounding(), own) is None, update
    assert comparison.add(rounding(), own, changed=False) is None
    assert "stayed as they were" in str(comparison.add(rounding(), own))


def test_of_a_short_text_it_takes_more_updates_to_tell() -> None:
    chance = np.random.default_rng(2)
    found = found_in((0.02 * chance.standard_normal(31), np.zeros(31), True) for _ in range(20))
    assert found in (7, 8, 9)


def test_gross_faults_are_found_at_once_and_no_numbers_are_compared_with_none() -> None:
    assert "differ by 0.5 on average" in str(Comparison("bfloat16").add([-1.0] * 9, [-1.5] * 9))
    assert Comparison("bfloat16").add([-1.0] * 9, [-1.1] * 9) is None
    assert "(allowed: 0.001)" in str(Comparison("float32").add([-1.0] * 9, [-1.1] * 9))
    assert Comparison("float32").add([-1.0] * 9, [float("nan")] * 9) is not None
    assert Comparison("float32").add([float("nan")] * 9, [-1.0] * 9) is None


def test_large_logits_may_differ_by_what_bfloat16_rounds_off() -> None:
    logits = torch.linspace(0, 250, 64) + torch.tensor([0.0, 0.7]).repeat(32)
    trainer = logits.log_softmax(-1).tolist()
    said = logits.bfloat16().float().log_softmax(-1).tolist()
    assert np.abs(np.subtract(trainer, said)).mean() > 0.15
    assert Comparison("bfloat16").add(trainer, (np.array(said) - 0.3).tolist()) is None
    assert Comparison("bfloat16").add(trainer, trainer[::-1]) is not None


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


def training(model: PreTrainedModel, rate: float = 1e-6) -> Callable[[], None]:
    """Returns a function that updates a model in bfloat16 by AdamW with float32 masters."""
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.0)
    chance = torch.Generator().manual_seed(0)

    def update() -> None:
        tokens = torch.randint(0, model.config.vocab_size, (4, 32), generator=chance)
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

    return update


@pytest.mark.parametrize("stale_since", [None, 1, 4])
def test_a_model_in_bfloat16_one_update_of_one_millionth_behind(stale_since: int | None) -> None:
    """The engine's part computes in another order. Sound, none of eight updates is refused; stale,
    one of the first three is that it lacks."""
    model, engine = policy(0), split(policy(0))
    update, own = training(model), list(engine.parameters())
    text = torch.randint(0, model.config.vocab_size, (1, TEXT_TOKENS))
    comparison = Comparison("bfloat16")
    for number in range(9):
        if stale_since is None or number < stale_since:
            with torch.no_grad():
                for mine, theirs in zip(own, model.parameters(), strict=True):
                    mine.copy_(theirs)
        found = comparison.add(says(model, text), says(engine, text))
        if found is not None:
            break
        update()
    if stale_since is None:
        assert found is None
    else:
        assert found is not None and stale_since <= number < stale_since + 3
