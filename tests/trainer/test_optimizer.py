"""The optimizer against plain torch: masters, scaling, Muon, saved state, offloading, sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.trainer.optimizer import MasterOptimizer, build_optimizer
from rollpacker.trainer.trainer import NonFiniteError, TrainConfig, TrainerError
from rollpacker.weights import host_store
from rollpacker.weights.host_store import HostStore, local

RATE, MAX_NORM = 1e-2, 0.7
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}


def tiny_model(dtype: torch.dtype = torch.float64) -> Qwen2ForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()


def optimizer_of(model: torch.nn.Module, kind: str = "adamw", **settings) -> MasterOptimizer:
    settings = {"weight_decay": 0.1, "optimizer": kind, **ADAMW} | settings
    return MasterOptimizer(model.named_parameters(), **settings)


def loss_of(model: torch.nn.Module, index: int) -> Tensor:
    draw = torch.Generator().manual_seed(index)
    ids = torch.randint(23, (2, 7), generator=draw)
    return model(input_ids=ids, labels=ids).loss


def backward(model: torch.nn.Module, *indices: int) -> None:
    for index in indices:
        loss_of(model, index).backward()


def plain_adamw(parameters) -> torch.optim.AdamW:
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, **ADAMW)


def assert_same(model: torch.nn.Module, other: torch.nn.Module, atol: float = 0.0) -> None:
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=atol), name


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_adamw_of_a_full_precision_model_is_torchs(scale):
    ours, theirs = tiny_model(), tiny_model()
    optimizer, plain = optimizer_of(ours), plain_adamw(theirs.parameters())
    for step in range(3):
        backward(ours, 2 * step, 2 * step + 1)
        norm = optimizer.step(RATE, MAX_NORM, gradient_scale=scale)
        (scale * loss_of(theirs, 2 * step)).backward()
        (scale * loss_of(theirs, 2 * step + 1)).backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        assert norm == pytest.approx(expected.item(), rel=1e-12)
        plain.step()
        plain.zero_grad()
        assert optimizer.gradients() == {}
    assert_same(ours, theirs, atol=1e-13)


def test_bfloat16_weights_are_rounded_float32_masters():
    model = tiny_model(torch.bfloat16)
    optimizer = optimizer_of(model)
    masters = {n: p.detach().float().requires_grad_() for n, p in model.named_parameters()}
    plain = plain_adamw(masters.values())
    for step in range(20):
        for part in range(2):
            copy = tiny_model(torch.bfloat16)
            copy.load_state_dict(model.state_dict())
            backward(copy, 2 * step + part)
            for name, weight in copy.named_parameters():
                fresh = weight.grad.float()
                old = masters[name].grad
                masters[name].grad = fresh if old is None else old + fresh
        backward(model, 2 * step, 2 * step + 1)
        assert all(p.grad is None for p in model.parameters())
        assert all(g.dtype == torch.float32 for g in optimizer.gradients().values())
        optimizer.step(2e-5, None)
        for group in plain.param_groups:
            group["lr"] = 2e-5
        plain.step()
        plain.zero_grad()
    start = dict(tiny_model(torch.bfloat16).named_parameters())
    for name, weight in model.named_parameters():
        master = optimizer.state()[f"master.{name}"]
        assert torch.equal(weight, master.bfloat16())
        assert torch.allclose(master, masters[name], rtol=0, atol=1e-7), name
        # One step of 2e-5 is lost in a bfloat16 number like 0.2; twenty of them are not.
        assert (master - start[name]).abs().max() > 1e-4


def test_only_parameters_that_train_are_known():
    model = tiny_model()
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    optimizer = optimizer_of(model)
    backward(model, 0)
    assert optimizer.gradients().keys() == {"model.norm.weight"}
    optimizer.step(RATE, None)
    assert {name.split(".", 1)[1] for name in optimizer.state()} == {"model.norm.weight"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_changes_nothing_and_is_named(bad):
    model = tiny_model()
    optimizer = optimizer_of(model)
    backward(model, 0)
    optimizer.step(RATE, MAX_NORM)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = {n: t.clone() for n, t in optimizer.state().items()}
    backward(model, 1)
    model.model.layers[1].mlp.up_proj.weight.grad[3, 2] = bad
    with pytest.raises(NonFiniteError, match=r"first in model\.layers\.1\.mlp\.up_proj\.weight"):
        optimizer.step(RATE, MAX_NORM)
    assert optimizer.gradients() == {}
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert all(torch.equal(t, state[n]) for n, t in optimizer.state().items())


def test_a_norm_beyond_the_largest_number_is_told_from_a_bad_gradient():
    model = tiny_model(torch.float32)
    optimizer = optimizer_of(model)
    backward(model, 0)
    optimizer.gradients()["model.norm.weight"].fill_(3e38)
    with pytest.raises(NonFiniteError, match="each gradient is finite"):
        optimizer.step(RATE, MAX_NORM)


MUON_ENDINGS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def plain_muon(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = {
        n: p for n, p in named.items() if n.endswith(tuple(e + ".weight" for e in MUON_ENDINGS))
    }
    assert len(matrices) == 14
    return [
        torch.optim.Muon(
            matrices.values(), lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        plain_adamw(p for n, p in named.items() if n not in matrices),
    ]


def test_muon_has_the_matrices_of_the_layers_and_adamw_all_else():
    ours, theirs = tiny_model(), tiny_model()
    optimizer, plain = optimizer_of(ours, "muon"), plain_muon(theirs)
    for step in range(3):
        backward(ours, step)
        optimizer.step(RATE, MAX_NORM)
        backward(theirs, step)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        for part in plain:
            part.step()
            part.zero_grad()
    # Muon's arithmetic is in bfloat16, so a difference in the last bit may not be amplified here.
    assert_same(ours, theirs, atol=1e-12)
    keys = {name.partition(".")[0] for name in optimizer.state()}
    assert keys == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


def test_muons_updates_are_of_adamws_size():
    model = tiny_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = optimizer_of(model, "muon", weight_decay=0.0)
    backward(model, 0)
    optimizer.step(RATE, None)
    weight = "model.layers.0.mlp.up_proj.weight"
    change = dict(model.named_parameters())[weight] - before[weight]
    assert 0.1 * RATE < change.pow(2).mean().sqrt() < 0.3 * RATE


def test_muon_is_refused_where_it_cannot_work():
    with pytest.raises(ValueError, match=r"set train\.optimizer=adamw"):
        optimizer_of(torch.nn.Linear(3, 3), "muon")


def test_the_config_reaches_the_optimizer():
    config = TrainConfig(steps=1, optimizer="muon", betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    ours, same = tiny_model(), tiny_model()
    built = build_optimizer(ours.named_parameters(), config)
    by_hand = optimizer_of(same, "muon", betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    for step in range(2):
        for model, optimizer in ((ours, built), (same, by_hand)):
            backward(model, step)
            optimizer.step(RATE, None)
    assert_same(ours, same)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loaded_state_goes_on_exactly(kind, dtype):
    model, other = tiny_model(dtype), tiny_model(dtype)
    optimizer = optimizer_of(model, kind)
    for step in range(2):
        backward(model, step)
        optimizer.step(RATE, MAX_NORM)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    other.load_state_dict(model.state_dict())
    resumed = optimizer_of(other, kind)
    backward(other, 7)
    resumed.load_state(saved)
    assert resumed.gradients() == {}
    for tensor in saved.values():
        tensor.zero_()
    backward(model, 3)
    backward(other, 3)
    assert optimizer.step(RATE, MAX_NORM) == resumed.step(RATE, MAX_NORM)
    assert_same(model, other)
    ours, theirs = optimizer.state(), resumed.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_state_of_something_else_is_refused():
    model = tiny_model(torch.bfloat16)
    optimizer = optimizer_of(model)
    backward(model, 0)
    optimizer.step(RATE, None)
    state = optimizer.state()
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(TrainerError, match=r"has model\.other, which the model has not"):
        optimizer.load_state(state | {"exp_avg.model.other": torch.zeros(1)})
    with pytest.raises(TrainerError, match=r"has shape \(3,\), the model's has \(24, 16\)"):
        optimizer.load_state(state | {f"exp_avg.{name}": torch.zeros(3)})
    with pytest.raises(TrainerError, match="lacks the master weights of"):
        optimizer.load_state({n: t for n, t in state.items() if not n.startswith("master")})
    with pytest.raises(TrainerError, match="has exp_avg, which this optimizer does not keep"):
        optimizer_of(tiny_model(torch.bfloat16), "muon").load_state(
            {f"exp_avg.{name}": state[f"exp_avg.{name}"]}
        )


def is_empty(tensor: Tensor) -> bool:
    return local(tensor).untyped_storage().nbytes() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_offloading_changes_no_bit(kind, dtype):
    model, other = tiny_model(dtype), tiny_model(dtype)
    moved, plain = optimizer_of(model, kind, offload_from="cpu"), optimizer_of(other, kind)
    for step in range(3):
        backward(model, 2 * step)
        gradients = list(moved.gradients().values())
        state = {n: t for n, t in moved.state().items() if not n.startswith("step")}
        moved.offload()
        assert all(map(is_empty, gradients)) and all(map(is_empty, state.values()))
        assert len(state) == 0 or step > 0 or dtype == torch.bfloat16
        moved.reload(state=False)
        assert not any(map(is_empty, gradients)) and all(map(is_empty, state.values()))
        backward(model, 2 * step + 1)
        backward(other, 2 * step, 2 * step + 1)
        assert moved.step(RATE, MAX_NORM) == plain.step(RATE, MAX_NORM)
        moved.offload()
    assert_same(model, other)
    ours, theirs = moved.state(), plain.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_offloaded_gradients_can_be_forgotten():
    model = tiny_model()
    optimizer = optimizer_of(model, offload_from="cpu")
    backward(model, 0)
    optimizer.offload()
    optimizer.forget_gradients()
    assert optimizer.gradients() == {}
    backward(model, 1)
    other = tiny_model()
    backward(other, 1)
    expected = {n: p.grad for n, p in other.named_parameters()}
    assert all(torch.equal(g, expected[n]) for n, g in optimizer.gradients().items())


def test_a_backward_pass_while_offloaded_is_noticed():
    model = tiny_model()
    optimizer = optimizer_of(model, offload_from="cpu")
    backward(model, 0)
    optimizer.offload()
    backward(model, 1)
    with pytest.raises(AssertionError, match="backward pass while"):
        optimizer.reload()


def test_only_the_named_device_is_emptied():
    tensor = torch.arange(6.0)
    assert HostStore("cuda").offload([tensor]) == 0
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_views_of_one_storage_move_together():
    whole = torch.arange(6.0)
    parts = [whole[:2], whole[2:].view(2, 2)]
    store = HostStore("cpu")
    assert store.offload(parts) == 24
    assert is_empty(whole)
    store.reload()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and parts[1].tolist() == [[2, 3], [4, 5]]


class Cudart:
    """Notes which host memory is page-locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        self.calls += 1
        return 0 if size < 1 << 40 else 2

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_host_memory_is_locked_once_and_no_larger_than_needed(monkeypatch):
    """A store on a CPU that locks memory as for CUDA: the device's memory is a CPU's, too."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    locking = host_store._host_memory
    monkeypatch.setattr(host_store, "_host_memory", lambda size, source: locking(size, "cuda"))
    parts = [torch.rand(700), torch.rand(3, 100, dtype=torch.float64), torch.rand(1)[0]]
    before = [one.clone() for one in parts]
    store = HostStore("cpu")
    for _ in range(4):
        store.offload(parts)
        with store.readable():
            assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
        store.reload()
        assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
    assert cudart.calls == 1 and [*cudart.locked.values()] == [3072 + 2560 + 512]
    store.offload(parts[:1])  # where there is room already
    late = torch.rand(9, dtype=torch.float64)
    store.offload([late])
    assert [*cudart.locked.values()] == [6144, 512]
    store.reload()
    assert [*cudart.locked.values()] == [6144] and torch.equal(parts[0], before[0])
    store.offload([torch.rand(5000)])  # more than ever
    assert cudart.calls == 3 and [*cudart.locked.values()] == [20480]
    del store
    assert cudart.locked == {}


def test_memory_is_dropped_once_the_device_has_read_it(monkeypatch):
    store, tensors, pieces = HostStore("cpu"), [torch.rand(5), torch.rand(7)], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pieces.append(len(store._memory)))
    for tensor in tensors:
        store.offload([tensor])
    store.source = "cuda"  # to which the copies are asynchronous
    store.reload()
    assert pieces == [2] and len(store._memory) == 1


def test_memory_that_cannot_be_locked_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch, "empty", lambda size, dtype: torch.zeros(1, dtype=dtype))
    with pytest.raises(RuntimeError, match=r"cannot lock 1024\.0 GiB of host memory \(error 2\)"):
        host_store._host_memory(1 << 40, "cuda")


def test_two_processes_with_sharded_parameters(tmp_path):
    """The worker's assertions fail here."""
    mp.spawn(_sharded_worker, args=(tmp_path / "store",), nprocs=2)


def _sharded_worker(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for dtype in (torch.float64, torch.bfloat16):
            for kind in ("adamw", "muon"):
                _check_sharded(kind, dtype, rank)
    finally:
        dist.destroy_process_group()


def _sharded_model(dtype: torch.dtype) -> Qwen2ForCausalLM:
    model, mesh = tiny_model(dtype), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Sums over processes instead of means.
    for module in (*model.model.layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def _check_sharded(kind: str, dtype: torch.dtype, rank: int) -> None:
    """Against the unsharded optimizer. In bfloat16 the last bit of a gradient may differ."""
    atol = 1e-12 if dtype == torch.float64 else 2e-2
    whole, sharded = tiny_model(dtype), _sharded_model(dtype)
    expected = optimizer_of(whole, kind)
    actual = optimizer_of(sharded, kind, offload_from="cpu")
    for step in range(3):
        backward(whole, 2 * step, 2 * step + 1)
        backward(sharded, 2 * step + rank)
        actual.offload()
        scales = {"gradient_scale": 0.5}
        norm = actual.step(RATE, MAX_NORM, **scales)
        assert norm == pytest.approx(expected.step(RATE, MAX_NORM, **scales), rel=atol)
    for (name, a), b in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a.full_tensor(), b, rtol=0, atol=atol), name
    _check_sharded_state(actual, optimizer_of(_sharded_model(dtype), kind))
    _check_sharded_failure(actual, sharded, rank)


def _check_sharded_state(optimizer: MasterOptimizer, other: MasterOptimizer) -> None:
    state = optimizer.state()
    shards = {n: t for n, t in state.items() if not n.startswith("step.")}
    assert shards and all(isinstance(t, DTensor) for t in shards.values())
    copies = {name: tensor.clone() for name, tensor in state.items()}
    other.load_state(copies)
    assert other.state().keys() == state.keys()
    for name, tensor in other.state().items():
        assert torch.equal(local(tensor), local(state[name])), name
        assert local(tensor).data_ptr() != local(copies[name]).data_ptr()


def _check_sharded_failure(optimizer: MasterOptimizer, model: torch.nn.Module, rank: int) -> None:
    """One process has a bad number: both stop, both name its parameter."""
    backward(model, 0)
    before = {n: local(p).clone() for n, p in model.named_parameters()}
    if rank == 1:
        name = "model.layers.1.mlp.down_proj.weight"
        local(optimizer.gradients()[name])[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"first in model\.layers\.1\.mlp\.down_proj"):
        optimizer.step(RATE, MAX_NORM)
    assert all(torch.equal(local(p), before[n]) for n, p in model.named_parameters())
