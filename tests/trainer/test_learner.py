"""One rank's trainer: scores, passing faults, the critic's warm-up, adapters, checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollpacker import algo
from rollpacker.algo import AlgorithmConfig
from rollpacker.engines.engine import Response
from rollpacker.trainer import losses, micro_batch, model_set, passes, varlen
from rollpacker.trainer.compiling import compile_layers
from rollpacker.trainer.critic import from_policy_model
from rollpacker.trainer.frozen import FrozenPolicy
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.lora import adapter_parameters, add_adapter, merged_weights
from rollpacker.trainer.optimizer import MasterOptimizer
from rollpacker.trainer.outcome import step_metrics
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.sharding import Shards
from rollpacker.trainer.trainer import (
    CriticConfig,
    LoraConfig,
    NonFiniteError,
    ScoreRequest,
    TokenScores,
    TrainConfig,
    TrainerError,
    TrainSample,
)
from rollpacker.weights.host_store import HostStore
from tests.trainer.ranks import Ranks
from tests.trainer.tiny import TEMPERATURE, responses, tiny_model

GRPO = AlgorithmConfig()
PPO = AlgorithmConfig(name="ppo")


def learner_of(
    algorithm: AlgorithmConfig = GRPO,
    *,
    model: nn.Module | None = None,
    lora: bool = False,
    shards: Shards | None = None,
    **settings: Any,
) -> Learner:
    model = tiny_model() if model is None else model
    critic = from_policy_model(tiny_model(3)) if algorithm.needs_critic else None
    if critic is not None:
        nn.init.constant_(critic.value_head.weight, 0.3)
    if lora:
        add_adapter(model, LoraConfig(rank=2))
    settings = {"steps": 10, "learning_rate": 1e-2, "micro_batch_tokens": 64} | settings
    return Learner(
        model=model,
        tokenizer=None,
        pad_token_id=0,
        config=TrainConfig(**settings),
        algorithm=algorithm,
        temperature=TEMPERATURE,
        total_steps=10,
        critic=critic,
        teacher=FrozenPolicy(tiny_model(5)) if algorithm.needs_teacher else None,
        shards=shards,
    )


def asked(seed: int) -> list[ScoreRequest]:
    return [
        ScoreRequest(sample=r.sample, prompt_tokens=r.prompt_tokens, response_tokens=r.tokens)
        for group in responses(seed)
        for r, _ in group
    ]


def samples_for(learner: Learner, algorithm: AlgorithmConfig, seed: int) -> list[TrainSample]:
    scores: dict[Any, TokenScores] = {}
    if algorithm.needs_scores:
        requests = asked(seed)
        scores = {r.sample: s for r, s in zip(requests, learner.score(requests), strict=True)}
    return build_train_samples(responses(seed), algorithm, scores=scores)[0]


def step(learner: Learner, seed: int, algorithm: AlgorithmConfig = GRPO) -> dict[str, float]:
    """One step without what depends on the clock."""
    learner.accumulate(samples_for(learner, algorithm, seed))
    metrics = step_metrics([learner.apply()], None)
    return {n: v for n, v in metrics.items() if not n.startswith("perf/")}


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in learner.weights()}


def merged(learner: Learner) -> dict[str, Tensor]:
    return dict(merged_weights(learner.model))


def assert_same_state(one: Learner, other: Learner) -> None:
    assert one.version == other.version
    assert one.state_hashes() == other.state_hashes()


def optimizer_state(learner: Learner) -> dict[str, Tensor]:
    """Copies. (A hash looks at tensors through numpy, which may not be resized from then on.)"""
    return {
        f"{kind}/{name}": value.clone()
        for kind, trained in learner.trained.items()
        for name, value in trained.optimizer.state().items()
    }


# --- scores ---------------------------------------------------------------------------------------


@torch.no_grad()
def alone(model: nn.Module, r: Response) -> Tensor:
    """Log-probs of a response's tokens, by transformers' own logits of this row."""
    ids = torch.tensor([[*r.prompt_tokens, *r.tokens]])
    table = (model(input_ids=ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    return table.gather(-1, ids[0, 1:, None])[len(r.prompt_tokens) - 1 :, 0]


@torch.no_grad()
def values_alone(learner: Learner, r: Response) -> Tensor:
    critic = learner.critic
    ids = torch.tensor([[*r.prompt_tokens, *r.tokens]])
    hidden = critic.model(input_ids=ids).last_hidden_state[0]
    return critic.value_head(hidden)[len(r.prompt_tokens) - 1 : -1, 0]


@pytest.mark.parametrize("layout", ["sorted", "packed"])
@pytest.mark.parametrize(
    "algorithm, known",
    [
        (AlgorithmConfig(name="ppo", kl_coef=0.1), {"values", "log_probs", "ref_log_probs"}),
        (PPO, {"values"}),
        (AlgorithmConfig(name="distillation"), {"log_probs", "teacher_log_probs"}),
    ],
)
def test_scores_are_those_of_each_response_alone(algorithm, known, layout):
    learner = learner_of(algorithm, micro_batches=layout, micro_batch_tokens=100)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.1)  # away from the reference
    flat = [r for group in responses(1) for r, _ in group]
    found = learner.score(asked(1))
    assert [len(s.log_probs or s.values) for s in found] == [len(r.tokens) for r in flat]
    direct: dict[str, Callable[[Response], Tensor]] = {
        "log_probs": partial(alone, learner.model),
        "ref_log_probs": partial(alone, tiny_model().eval()),
        "teacher_log_probs": partial(alone, tiny_model(5).eval()),
        "values": partial(values_alone, learner),
    }
    for response, scores in zip(flat, found, strict=True):
        for name, compute in direct.items():
            actual = getattr(scores, name)
            assert (actual is not None) == (name in known)
            if actual is not None:
                expected = compute(response)
                assert torch.tensor(actual).double().sub(expected).abs().max() < 1e-6


# --- faults ---------------------------------------------------------------------------------------


class Faulty:
    """A loss that is NaN in some calls, or for some samples."""

    def __init__(self, *, calls: Sequence[int] = (), advantages: Sequence[float] = ()) -> None:
        self._original = algo.token_loss
        self._calls = calls
        self._advantages = advantages
        self._count = itertools.count()

    def __call__(self, log_probs: Tensor, old: Tensor, advantages: Tensor, *rest: Any, **kwargs):
        result = self._original(log_probs, old, advantages, *rest, **kwargs)
        bad = torch.zeros_like(advantages, dtype=torch.bool)
        if next(self._count) in self._calls:
            bad[0] = True
        for value in self._advantages:
            bad |= advantages == value
        broken = torch.where(bad, torch.nan, result.per_token)
        return dataclasses.replace(result, per_token=broken)


def test_a_loss_that_is_not_finite_once_is_computed_again(monkeypatch):
    undisturbed, disturbed = learner_of(), learner_of()
    expected = step(undisturbed, 1)
    monkeypatch.setattr(algo, "token_loss", Faulty(calls=[0, 2]), raising=False)
    found = step(disturbed, 1)
    assert found.pop("train/recomputed_micro_batches") == expected["train/micro_batches"] > 2
    assert expected.pop("train/recomputed_micro_batches") == 0
    assert found == expected
    assert_same_state(disturbed, undisturbed)


def test_a_loss_that_stays_not_finite_names_its_sample(monkeypatch):
    learner, undisturbed = learner_of(), learner_of()
    for each in (learner, undisturbed):
        step(each, 0)
    batch = samples_for(learner, GRPO, 1)
    bad = next(s for s in batch if s.advantage != 0)
    others = {str(s.sample) for s in batch if s.advantage != bad.advantage}
    before = learner.state_hashes()
    with monkeypatch.context() as patch:
        faulty = Faulty(advantages=[bad.advantage])
        patch.setattr(algo, "token_loss", faulty, raising=False)
        with pytest.raises(NonFiniteError, match=str(bad.sample)) as caught:
            learner.accumulate(batch)
    assert not any(name in str(caught.value) for name in others)
    assert learner.state_hashes() == before and learner.version == 1
    assert step(learner, 2) == step(undisturbed, 2)
    assert_same_state(learner, undisturbed)


class BadGradient:
    """A hook that spoils the gradient in some calls; None: in all."""

    def __init__(self, calls: Sequence[int] | None) -> None:
        self._calls = calls
        self._count = itertools.count()

    def __call__(self, gradient: Tensor) -> Tensor:
        if self._calls is None or next(self._count) in self._calls:
            return gradient * math.nan
        return gradient


def test_a_gradient_that_is_not_finite_once_is_computed_again():
    undisturbed, disturbed = learner_of(), learner_of()
    expected = step(undisturbed, 1)
    disturbed.model.model.norm.weight.register_hook(BadGradient([1]))
    found = step(disturbed, 1)
    assert expected["train/micro_batches"] > 2
    assert found.pop("train/recomputed_micro_batches") == expected["train/micro_batches"]
    del expected["train/recomputed_micro_batches"]
    assert found == expected
    assert_same_state(disturbed, undisturbed)


def test_a_streamed_step_is_computed_again_with_its_final_weights():
    """What was accumulated with provisional weights has been rescaled since."""
    learners = learner_of(), learner_of()
    learners[1].model.model.norm.weight.register_hook(BadGradient([0]))
    for learner in learners:
        batch = samples_for(learner, GRPO, 1)
        early = [dataclasses.replace(s, token_weight=s.token_weight * 8) for s in batch[:5]]
        learner.accumulate(early)
        learner.rescale(1 / 8)
        learner.accumulate(batch[5:])
        assert math.isfinite(learner.apply().grad_norm)
    for one, other in zip(*(weights(learner).values() for learner in learners), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_gradient_that_stays_not_finite_names_the_first_samples():
    learner, undisturbed = (learner_of(micro_batches="sorted") for _ in range(2))
    for each in (learner, undisturbed):
        step(each, 0)
    before = learner.state_hashes()
    hook = learner.model.model.norm.weight.register_hook(BadGradient(None))
    with pytest.raises(NonFiniteError) as caught:
        step(learner, 1)
    hook.remove()
    named = re.findall(r"train/\S+?#\S+?(?=[,;])", str(caught.value))
    batch = {str(s.sample): s for s in samples_for(learner, GRPO, 1)}
    in_order = sorted(len(s.prompt_tokens) + len(s.response_tokens) for s in batch.values())
    lengths = [len(batch[n].prompt_tokens) + len(batch[n].response_tokens) for n in named]
    assert lengths == in_order[: len(named)] and 0 < len(named) < len(batch)
    assert "norm.weight" in str(caught.value)
    assert learner.state_hashes() == before and learner.version == 1
    assert step(learner, 2) == step(undisturbed, 2)
    assert_same_state(learner, undisturbed)


# --- faults of one rank ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def of_rank(samples: Sequence[TrainSample], shards: Shards) -> list[TrainSample]:
    return list(samples[shards.rank :: shards.size])


def faults_on_rank_1(shards: Shards, gradient_sync: str) -> list[Any]:
    """Step after step with a fault in the other rank; what rank 0 has in the end, without and
    with faults."""
    hashes = []
    for faulty in (False, True):
        learner = learner_of(shards=shards, gradient_sync=gradient_sync, micro_batch_tokens=1)
        original = algo.token_loss
        batch = of_rank(samples_for(learner, GRPO, 0), shards)
        learner.accumulate(batch)
        learner.apply()
        batch = of_rank(samples_for(learner, GRPO, 1), shards)
        if faulty and shards.rank == 1:
            algo.token_loss = Faulty(calls=[1])  # passes
        learner.accumulate(batch)
        outcome = learner.apply()
        again = outcome.sums.micro_batches if faulty else 0
        assert outcome.sums.recomputed_micro_batches == again
        if faulty:
            broken = [dataclasses.replace(batch[0], advantage=math.nan), *batch[1:]]
            assert refusal(learner, broken if shards.rank == 1 else batch)
            if shards.rank == 1:
                # Stays, after some micro-batches: in the first sweep and in the second one.
                algo.token_loss = Faulty(calls=[2, len(batch) + 2])
            message = refusal(learner, batch)
            assert ("another process" in message) == (shards.rank == 0), message
        algo.token_loss = original
        learner.accumulate(batch)
        learner.apply()
        hashes.append(learner.state_hashes())
    return hashes


def bad_gradient_on_rank_1(shards: Shards, gradient_sync: str) -> tuple[bool, str, bool]:
    """Which samples are named where the gradient of rank 1 alone stays not finite, whether
    nothing of it was applied, and whether the next step is well."""
    learner = learner_of(shards=shards, gradient_sync=gradient_sync, micro_batch_tokens=1)
    batch = of_rank(samples_for(learner, GRPO, 0), shards)
    learner.accumulate(batch)
    learner.apply()
    before = learner.state_hashes()
    hooked = learner.model.model.layers[1].mlp.register_full_backward_hook(
        lambda _module, gradients, _output: tuple(g * math.nan for g in gradients)
    )
    if shards.rank == 0:
        hooked.remove()
    learner.accumulate(batch)
    try:
        learner.apply()
        message = "it was not refused"
    except NonFiniteError as error:
        message = str(error)
    if shards.rank == 1:
        hooked.remove()
    unchanged = learner.state_hashes() == before and learner.version == 1
    learner.accumulate(batch)
    return unchanged, message, math.isfinite(learner.apply().grad_norm)


@pytest.mark.parametrize("gradient_sync", ["step", "micro-batch"])
def test_a_gradient_of_one_rank_that_is_not_finite_is_refused_by_all(ranks, gradient_sync):
    answers = ranks.run(2, bad_gradient_on_rank_1, gradient_sync)
    assert all(unchanged and well for unchanged, _, well in answers)
    own, other = answers[1][1], answers[0][1]
    assert "the gradient is not finite, first in" in own and "train/0/" in own
    if gradient_sync == "step":  # summed at once, a NaN is in every rank's shards
        assert "a micro-batch of another process" in other


def refusal(learner: Learner, samples: Sequence[TrainSample]) -> str:
    try:
        learner.accumulate(samples)
    except NonFiniteError as error:
        return str(error)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("gradient_sync", ["step", "micro-batch"])
def test_a_fault_of_one_rank_is_everybodys_and_leaves_no_trace(ranks, gradient_sync):
    without, with_faults = ranks.run(2, faults_on_rank_1, gradient_sync)[0]
    assert without == with_faults


# --- a critic -------------------------------------------------------------------------------------


def test_the_critics_warmup_leaves_the_policy_alone():
    critic = CriticConfig(learning_rate=1e-2, warmup_steps=2)
    learner = learner_of(PPO, critic=critic)
    first = weights(learner)
    heads = []
    for number in range(3):
        metrics = step(learner, number, PPO)
        assert metrics["critic/grad_norm"] > 0
        heads.append(learner.critic.value_head.weight.detach().clone())
        same = all(torch.equal(first[n], w) for n, w in weights(learner).items())
        assert same == (number < 2)
    assert learner.version == 3
    assert not torch.equal(heads[0], heads[1]) and not torch.equal(heads[1], heads[2])


# --- adapters -------------------------------------------------------------------------------------


def test_an_adapters_step_moves_the_merged_weights_alone():
    learner, plain = learner_of(lora=True), tiny_model()
    before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    assert weights(learner).keys() == adapter_parameters(learner.model).keys()
    start = merged(learner)
    assert start.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(start[n], p) for n, p in plain.named_parameters())
    for number in range(2):
        step(learner, number)
    adapters = adapter_parameters(learner.model).keys()
    for name, parameter in learner.model.named_parameters():
        assert torch.equal(before[name], parameter) == (name not in adapters), name
    plain.load_state_dict(merged(learner), strict=False)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        one, other = plain.eval()(input_ids=ids).logits, learner.model(input_ids=ids).logits
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_what_a_merge_into_half_precision_loses_is_a_metric():
    learner = learner_of(lora=True, model=tiny_model(dtype=torch.bfloat16), learning_rate=1e-5)
    lost = step(learner, 0)["train/lora_merge_loss"]
    assert 0.5 < lost < 2.0  # nearly nothing of so small an update is left
    assert "train/lora_merge_loss" not in step(learner_of(lora=True), 0)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize(
    "algorithm, kind",
    [
        (GRPO, {}),
        (GRPO, {"lora": True}),
        (PPO, {}),
        (GRPO, {"optimizer": "muon"}),
        (AlgorithmConfig(kl_coef=0.2), {"schedule": "polynomial"}),
    ],
)
def test_what_was_saved_goes_on_bit_for_bit(tmp_path, algorithm, kind, num_steps):
    learner = learner_of(algorithm, **kind)
    for number in range(num_steps):
        step(learner, number, algorithm)
    learner.save(tmp_path)
    loaded = learner_of(algorithm, **kind)
    if num_steps:
        step(loaded, 9, algorithm)  # is forgotten
        loaded.accumulate(samples_for(loaded, algorithm, 8))
    loaded.load(tmp_path)
    assert_same_state(loaded, learner)
    if algorithm.needs_critic:
        for one, other in zip(*(x.critic.parameters() for x in (learner, loaded)), strict=True):
            assert torch.equal(one, other)
    for number in (20, 21):
        assert step(loaded, number, algorithm) == step(learner, number, algorithm)
    assert_same_state(loaded, learner)


def test_a_saved_model_is_one_of_transformers(tmp_path):
    for kind in ({}, {"lora": True}):
        folder = tmp_path / str(len(kind))
        learner = learner_of(**kind)
        step(learner, 0)
        learner.save(folder)
        read = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        expected = merged(learner) if kind else weights(learner)
        assert all(torch.equal(p, expected[n]) for n, p in read.named_parameters())


def test_another_architectures_checkpoint_is_refused(tmp_path):
    config = copy.deepcopy(tiny_model().config)
    config.intermediate_size = 32
    other = learner_of(model=transformers.Qwen2ForCausalLM(config).double())
    step(other, 0)
    other.save(tmp_path)
    learner = learner_of()
    step(learner, 0)
    before = learner.state_hashes()
    with pytest.raises(TrainerError, match="holds another model") as caught:
        learner.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert learner.state_hashes() == before


def test_a_missing_part_of_a_checkpoint_is_named(tmp_path):
    learner = learner_of()
    step(learner, 0)
    learner.save(tmp_path)
    (part,) = (tmp_path / "trainer").glob("*.safetensors")
    part.unlink()
    with pytest.raises(TrainerError, match=part.name):
        learner_of().load(tmp_path)


# --- what else the config can ask for -------------------------------------------------------------


def test_schedules_of_transformers_give_the_rate_of_each_step():
    learner = learner_of(
        schedule="polynomial", schedule_options={"power": 2.0, "lr_end": 1e-4}, warmup_steps=1
    )
    rates = [step(learner, number)["actor/lr"] for number in range(3)]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    schedule = transformers.get_polynomial_decay_schedule_with_warmup(
        optimizer, num_warmup_steps=1, num_training_steps=10, power=2.0, lr_end=1e-4
    )
    expected = []
    for _ in range(3):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[1:] == pytest.approx(expected[1:]) and 0 < rates[0] < rates[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_offloading_changes_no_bit(monkeypatch, tmp_path, algorithm, dtype):
    """With host memory in the role of the device, so that something does move."""
    plain = learner_of(algorithm, model=tiny_model(dtype=dtype))
    defaults = MasterOptimizer.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "offload_from", "cpu")
    offloaded = learner_of(algorithm, model=tiny_model(dtype=dtype), offload=True)
    for number in range(2):
        batches = [samples_for(each, algorithm, number) for each in (plain, offloaded)]
        assert batches[0] == batches[1]
        for each, batch in zip((plain, offloaded), batches, strict=True):
            each.accumulate(batch[:4])
            each.rescale(0.5)
            each.save(tmp_path)  # takes the gradients away, too
            each.accumulate(batch[4:])
            each.apply()
        optimizer = offloaded.trained["actor"].optimizer
        moments = [optimizer._state_of(master)["exp_avg"] for master in optimizer._masters.values()]
        assert all(m.untyped_storage().nbytes() == 0 for m in moments)  # they are elsewhere
        offloaded.save(tmp_path)
        assert all(m.untyped_storage().nbytes() == 0 for m in moments)
    offloaded.load(tmp_path)
    assert step(offloaded, 5, algorithm) == step(plain, 5, algorithm)
    for what in (weights, optimizer_state):
        one, other = what(plain), what(offloaded)
        assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_letting_go_of_the_device_changes_no_bit(monkeypatch, tmp_path, dtype, offload):
    """As above: between any two calls nothing of it is on the device, weights included."""
    plain = learner_of(PPO, model=tiny_model(dtype=dtype))
    if offload:
        monkeypatch.setitem(MasterOptimizer.__init__.__kwdefaults__, "offload_from", "cpu")
    guest = learner_of(PPO, model=tiny_model(dtype=dtype), offload=offload)
    guest._host = HostStore("cpu")

    def go() -> None:
        guest.offload()
        guest.offload()  # again, which is nothing
        kept = [t for m in guest._modules for t in (*m.parameters(), *m.buffers())]
        kept += [t for trained in guest.trained.values() for t in trained.tensors()]
        assert kept and not any(tensor.untyped_storage().nbytes() for tensor in kept)
        guest.reload()

    for number in range(2):
        batches = [samples_for(each, PPO, number) for each in (plain, guest)]
        go()
        assert batches[0] == batches[1]
        for each, batch in zip((plain, guest), batches, strict=True):
            between = go if each is guest else lambda: None
            each.accumulate(batch[:4])
            between()
            each.rescale(0.5)
            each.accumulate(batch[4:])
            between()
            each.apply()
            between()
    guest.offload()
    guest.save(tmp_path / "parked")
    parked = [t for m in guest._modules for t in (*m.parameters(), *m.buffers())]
    parked += [t for trained in guest.trained.values() for t in trained.tensors()]
    assert not any(t.untyped_storage().nbytes() for t in parked), "nothing came back for that"
    guest.reload()
    guest.save(tmp_path / "guest")
    plain.save(tmp_path / "plain")
    saved = {
        path.relative_to(tmp_path / "plain") for path in tmp_path.glob("plain/**/*.safetensors")
    }
    assert {path.parent.name for path in saved} == {"model", "trainer", "critic"}
    for path in saved:
        one, *others = (
            load_file(tmp_path / where / path) for where in ("plain", "guest", "parked")
        )
        for other in others:
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one), path
    go()
    assert step(guest, 5, PPO) == step(plain, 5, PPO)
    for what in (weights, optimizer_state):
        one, other = what(plain), what(guest)
        assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("works", [True, False])
def test_compiled_layers_take_the_same_step_or_fall_back(monkeypatch, caplog, works):
    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    backend = "eager" if works else broken
    monkeypatch.setattr(model_set, "compile_layers", partial(compile_layers, backend=backend))
    plain, compiled = learner_of(), learner_of(compile=True)
    assert step(compiled, 0)["actor/grad_norm"] == pytest.approx(step(plain, 0)["actor/grad_norm"])
    assert ("train.compile failed" in caplog.text) == (not works)
    for one, other in zip(weights(plain).values(), weights(compiled).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


class Reads(TorchFunctionMode):
    """Notes, in order, each time that numbers are read out of a tensor, which on a GPU waits for
    all that was begun, and each backward pass."""

    READS = (
        Tensor.tolist,
        Tensor.item,
        Tensor.cpu,
        Tensor.numpy,
        *map(Tensor.__dict__.get, ("__bool__", "__float__", "__int__")),
    )

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self.READS:
            self.noted.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("algorithm", [GRPO, PPO], ids=["grpo", "ppo"])
def test_numbers_are_read_when_all_micro_batches_are_done(
    monkeypatch: pytest.MonkeyPatch, algorithm: AlgorithmConfig
) -> None:
    learner = learner_of(algorithm)
    samples = samples_for(learner, algorithm, 0)
    reads, waits = Reads(), []
    backward, lost = passes._backward, []

    def seen(loss: Tensor) -> None:
        reads.noted.append("backward")
        lost.append(loss)
        backward(loss)

    monkeypatch.setattr(passes, "_backward", seen)
    monkeypatch.setattr(learner._passes, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(len(reads.noted)))
    with reads:
        learner.accumulate(samples)
    micro_batches = len(lost) // (2 if algorithm.needs_critic else 1)
    assert micro_batches > 2 and len(waits) == 1  # one call, and one wait for the GPU
    last = len(reads.noted) - 1 - reads.noted[::-1].index("backward")
    assert set(reads.noted[:last]) == {"backward"} and reads.noted[last + 1 :] == ["tolist"]
    assert waits[0] > last


class Copies(TorchFunctionMode):
    """Notes what is brought to a device in a way that on CUDA waits for all that was begun."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_told = any(isinstance(one, torch.device) for one in (*args, kwargs.get("device")))
        is_copy = is_told and func in (Tensor.to, torch.tensor, torch.as_tensor)
        is_ours = "/rollpacker/" in sys._getframe(1).f_code.co_filename  # models move what is there
        if is_copy and is_ours and not kwargs.get("non_blocking"):
            self.noted.append(func.__name__)
        return func(*args, **kwargs)


@pytest.mark.parametrize("algorithm", [GRPO, PPO], ids=["grpo", "ppo"])
def test_nothing_is_brought_to_the_gpu_in_a_way_that_waits(
    monkeypatch: pytest.MonkeyPatch, algorithm: AlgorithmConfig
) -> None:
    """Every copy of a call goes through `on_device`, which has it page-locked."""
    learner, pinned = learner_of(algorithm), list[Tensor]()
    samples = samples_for(learner, algorithm, 0)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (pinned.append(self), self)[1])
    for module in (micro_batch, losses, varlen):
        monkeypatch.setattr(module, "on_device", on_the_cpu)
    packed = varlen.PackedRows([3, 150, 4], torch.device("cpu"))
    with Copies() as copies:
        learner.accumulate(samples)
        _ = packed.position_ids(), packed.cumulative_lengths, packed.groups
        packed.block_mask(None)
    assert len(pinned) > 20 and copies.noted == []


def test_what_goes_to_cuda_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (calls.append("pinned"), self)[1])
    monkeypatch.setattr(Tensor, "to", lambda self, *where, **how: calls.append((where, how)))
    device = torch.device("cuda")
    micro_batch.on_device(torch.ones(2), device)
    assert calls == ["pinned", ((device,), {"non_blocking": True})]


def on_the_cpu(values: Tensor, device: torch.device) -> Tensor:
    """What `on_device` does for CUDA, with a device that is here."""
    return values.pin_memory().to(device, non_blocking=True)


def test_scores_are_read_when_all_micro_batches_are_done() -> None:
    learner, requests = learner_of(PPO), asked(0)
    with Reads() as reads:
        scores = learner.score(requests)
    assert len(scores) == len(requests)
    assert reads.noted == ["cpu", *["tolist"] * len(requests)]  # lists are made in host memory
