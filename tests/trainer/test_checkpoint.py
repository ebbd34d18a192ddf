"""What is saved and loaded equals what was there, bit for bit, whatever the number of processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

from rollpacker.trainer.checkpoint import (
    load_model_weights,
    load_trainer_state,
    load_trainer_tensors,
    save_model,
    save_trainer,
    saved_names,
    state_tensors,
    tensors_sha256,
)
from rollpacker.trainer.sharding import Shards, full_tensors, shard
from rollpacker.trainer.trainer import TrainerError
from tests.trainer.ranks import Ranks
from tests.trainer.tiny import samples, step, tiny_model, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # pytest's own again

SIZES = pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 1), (4, 3)])
KINDS = pytest.mark.parametrize("tied", [True, False])


class Root(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits.logsumexp(-1)


def qwen(seed: int = 0, *, tied: bool = True, vocabulary: int = 23) -> Qwen2ForCausalLM:
    """Four processes get shards of unequal size: 23 and 18 rows, and heads of 6."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=12,
        intermediate_size=18,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config)


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    """transformers fuses its experts when it loads them, and takes them apart when it saves."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=23,
        hidden_size=12,
        intermediate_size=18,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    return MixtralForCausalLM(config)


def optimizer_after_a_step(root: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(root.parameters(), lr=0.1)
    for index, parameter in enumerate(root.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5 + index)
        parameter.grad.mul_(parameter.detach())
    optimizer.step()
    return optimizer


def optimizer_tensors(root: Root, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": value
        for name, parameter in root.model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def sharded(model: PreTrainedModel, shards: Shards, param_dtype: torch.dtype | None = None) -> Root:
    root = Root(model)
    shard(root, shards, param_dtype=param_dtype, gradient_sync="step")
    return root


def whole(tensors: Mapping[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    return {n: v.clone() for n, v in full_tensors(tensors.items(), shards)}


def save_after_a_step(shards: Shards, folder: Path, tied: bool) -> dict[str, Tensor]:
    root = sharded(qwen(tied=tied), shards)
    tensors = optimizer_tensors(root, optimizer_after_a_step(root))
    save_model(root.model, None, folder / "model", shards=shards)
    save_trainer(tensors, {"version": 3}, folder / "trainer", shards)
    return whole({**state_tensors(root.model), **tensors}, shards)


def load_all(shards: Shards, folder: Path, tied: bool) -> dict[str, Tensor]:
    root = sharded(qwen(seed=5, tied=tied), shards)
    like = optimizer_tensors(root, optimizer_after_a_step(root))
    load_model_weights(root.model, folder / "model", shards)
    tensors = load_trainer_tensors(folder / "trainer", like, shards)
    assert all(tensors[n].device == like[n].device for n in like)
    return whole({**state_tensors(root.model), **tensors}, shards)


def assert_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys() and got
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as group:
        yield group


@SIZES
@KINDS
def test_any_number_of_processes_reads_what_another_wrote(ranks, tmp_path, before, after, tied):
    saved = ranks.run(before, save_after_a_step, tmp_path, tied)[0]
    state = load_trainer_state(tmp_path / "trainer")
    assert (state["version"], state["processes"], state["format"]) == (3, before, 2)
    assert_equal(ranks.run(after, load_all, tmp_path, tied)[0], saved)


def train(
    shards: Shards, gradient_sync: str, steps: range, before: Path | None, after: Path | None
) -> dict[str, Tensor]:
    """Steps of AdamW from a checkpoint, or from the start; each rank has a share of the work."""
    root = Root(qwen(seed=5 if before else 0).double())
    gradients = shard(root, shards, param_dtype=None, gradient_sync=gradient_sync)
    optimizer = torch.optim.AdamW(root.parameters(), lr=0.01)
    if before is not None:
        optimizer = optimizer_after_a_step(root)
        tensors = load_trainer_tensors(
            before / "trainer", optimizer_tensors(root, optimizer), shards
        )
        load_model_weights(root.model, before / "model", shards)
        for name, parameter in root.model.named_parameters():
            for key in optimizer.state[parameter]:
                optimizer.state[parameter][key] = tensors[f"{key}.{name}"]
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.zero_grad()
    for number in steps:
        mine = [shards.rank + 4 * number] if shards.size > 1 else [4 * number, 4 * number + 1]
        for index in mine:
            (root(torch.arange(index, index + 5)[None] % 23) * (1 + index)).sum().backward()
        gradients.finish(lambda: (root(torch.ones(1, 2, dtype=torch.long)) * 0).sum().backward())
        optimizer.step()
        optimizer.zero_grad()
    tensors = optimizer_tensors(root, optimizer)
    if after is not None:
        save_model(root.model, None, after / "model", shards=shards)
        save_trainer(tensors, {}, after / "trainer", shards)
    return whole({**state_tensors(root.model), **tensors}, shards)


@pytest.mark.parametrize("gradient_sync", ["step", "micro-batch"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_going_on_equals_an_uninterrupted_run(ranks, tmp_path, before, after, gradient_sync):
    uninterrupted = ranks.run(before, train, gradient_sync, range(4), None, None)[0]
    ranks.run(before, train, gradient_sync, range(2), None, tmp_path)
    resumed = ranks.run(after, train, gradient_sync, range(2, 4), tmp_path, None)[0]
    if before == after:
        assert_equal(resumed, uninterrupted)
    for name, value in uninterrupted.items():
        assert torch.allclose(resumed[name], value, rtol=1e-6, atol=1e-9), name


@KINDS
def test_one_plain_process_reads_what_several_wrote_and_the_other_way_round(ranks, tmp_path, tied):
    saved = ranks.run(2, save_after_a_step, tmp_path / "two", tied)[0]
    root = Root(qwen(seed=5, tied=tied))
    like = optimizer_tensors(root, optimizer_after_a_step(root))
    addresses = [value.data_ptr() for value in root.parameters()]
    load_model_weights(root.model, tmp_path / "two" / "model")
    tensors = load_trainer_tensors(tmp_path / "two" / "trainer", like)
    assert_equal({**state_tensors(root.model), **tensors}, saved)
    assert [value.data_ptr() for value in root.parameters()] == addresses

    save_model(root.model, None, tmp_path / "one" / "model")
    save_trainer(tensors, {}, tmp_path / "one" / "trainer")
    assert_equal(ranks.run(2, load_all, tmp_path / "one", tied)[0], saved)


@KINDS
def test_the_model_folder_is_what_transformers_would_have_written(ranks, tmp_path, tied):
    """Compared with `save_pretrained` of a plain model with the same weights."""
    saved = ranks.run(2, save_after_a_step, tmp_path, tied)[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal(state_tensors(again), {n: saved[n] for n, _ in again.named_parameters()})
    again.save_pretrained(tmp_path / "plain")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    for name in ("config.json", "generation_config.json"):
        texts = {(tmp_path / folder / name).read_text() for folder in ("model", "plain")}
        assert len(texts) == 1
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "plain")]
    assert_equal(*files)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def save_rounded(shards: Shards, folder: Path) -> dict[str, Tensor]:
    root = sharded(qwen().bfloat16(), shards, torch.bfloat16)
    optimizer_after_a_step(root)
    save_model(root.model, None, folder, shards=shards, dtype=torch.bfloat16)
    return whole(state_tensors(root.model), shards)


def test_float32_shards_are_saved_in_the_dtype_that_is_asked_for(ranks, tmp_path):
    masters = ranks.run(2, save_rounded, tmp_path)[0]
    assert all(value.dtype == torch.float32 for value in masters.values())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16
    assert_equal(state_tensors(again), {n: value.bfloat16() for n, value in masters.items()})


def test_each_rank_writes_its_own_shard(ranks, tmp_path):
    ranks.run(2, save_after_a_step, tmp_path, True)
    files = sorted((tmp_path / "trainer").glob("*.safetensors"))
    assert len(files) == 2
    rows = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            name = "exp_avg.model.embed_tokens.weight"
            rows.append(file.get_slice(name).get_shape()[0])
    assert rows == [12, 11]


def test_fewer_processes_write_where_more_did(ranks, tmp_path):
    ranks.run(4, save_after_a_step, tmp_path, True)
    saved = ranks.run(1, save_after_a_step, tmp_path, True)[0]
    assert len(list((tmp_path / "trainer").glob("*.safetensors"))) == 1
    assert_equal(ranks.run(2, load_all, tmp_path, True)[0], saved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scalars_empty_tensors_and_other_dtypes(tmp_path, dtype):
    tensors = {
        "step.a": torch.tensor(7.0),
        "a.b.c": torch.randn(3, 2, dtype=dtype),
        "count": torch.tensor([2**40], dtype=torch.int64),
    }
    save_trainer(tensors, {"note": "x"}, tmp_path)
    assert saved_names(tmp_path) == tensors.keys()
    like = {name: torch.zeros_like(value) for name, value in tensors.items()}
    assert_equal(load_trainer_tensors(tmp_path, like), tensors)
    assert load_trainer_state(tmp_path)["note"] == "x"


def test_a_trainer_without_state_yet(tmp_path):
    save_trainer({}, {"version": 0}, tmp_path)
    assert load_trainer_state(tmp_path)["version"] == 0
    assert saved_names(tmp_path) == frozenset() and load_trainer_tensors(tmp_path, {}) == {}


def load_mixtral(shards: Shards, folder: Path) -> dict[str, Tensor]:
    root = sharded(mixtral(seed=5), shards)
    load_model_weights(root.model, folder, shards)
    return whole(state_tensors(root.model), shards)


def test_a_model_that_is_saved_under_other_names(ranks, tmp_path):
    model = mixtral()
    save_model(model, None, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() != state_tensors(model).keys()
    assert_equal(ranks.run(2, load_mixtral, tmp_path)[0], state_tensors(model))


def test_weights_of_the_callers(tmp_path):
    model = qwen()
    doubled = {name: value * 2 for name, value in state_tensors(model).items()}
    save_model(model, None, tmp_path, weights=doubled.items())
    assert_equal(state_tensors(AutoModelForCausalLM.from_pretrained(tmp_path)), doubled)


def message_of(load: object, *arguments: object) -> str:
    with pytest.raises(TrainerError) as caught:
        load(*arguments)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500, text
    return text


def trainer_folder(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    tensors = {
        "exp_avg.a": torch.randn(4, 3),
        "exp_avg.b": torch.randn(5),
        "step.a": torch.ones(()),
    }
    save_trainer(tensors, {"version": 1}, folder)
    return folder, tensors


def test_another_models_state_is_refused_and_the_difference_named(tmp_path):
    folder, like = trainer_folder(tmp_path)
    more = {**like, "exp_avg.c": torch.ones(2)}
    assert "exp_avg.c is missing" in message_of(load_trainer_tensors, folder, more)
    fewer = {name: value for name, value in like.items() if name != "exp_avg.b"}
    assert "also has exp_avg.b" in message_of(load_trainer_tensors, folder, fewer)
    wider = {**like, "exp_avg.a": torch.ones(4, 4)}
    text = message_of(load_trainer_tensors, folder, wider)
    assert "exp_avg.a has shape (4, 3) there and (4, 4) here" in text
    coarser = {**like, "exp_avg.a": torch.ones(4, 3, dtype=torch.bfloat16)}
    text = message_of(load_trainer_tensors, folder, coarser)
    assert "exp_avg.a is torch.float32 there and torch.bfloat16 here" in text


def test_another_model_is_refused_and_nothing_is_changed(tmp_path):
    save_model(qwen(), None, tmp_path)
    wider = qwen(seed=1, vocabulary=24)
    before = {name: value.clone() for name, value in state_tensors(wider).items()}
    text = message_of(load_model_weights, wider, tmp_path)
    assert "another model" in text and "(23, 12) there and (24, 12) here" in text
    assert_equal(state_tensors(wider), before)
    assert "another model" in message_of(load_model_weights, mixtral(), tmp_path)
    assert "nowhere" in message_of(load_model_weights, qwen(), tmp_path / "nowhere")


def test_missing_and_broken_files_are_named(tmp_path):
    folder, like = trainer_folder(tmp_path)
    (path,) = folder.glob("*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    text = message_of(load_trainer_tensors, folder, like)
    assert path.name in text and f"{len(content) - 1} bytes instead of {len(content)}" in text
    path.write_bytes(b"\xff" * len(content))
    assert str(folder) in message_of(load_trainer_tensors, folder, like)
    path.unlink()
    text = message_of(load_trainer_tensors, folder, like)
    assert f"{path} is missing" in text
    assert text == message_of(load_trainer_state, folder) == message_of(saved_names, folder)


def test_a_broken_model_file_is_named(tmp_path):
    save_model(qwen(), None, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert str(tmp_path) in message_of(load_model_weights, qwen(), tmp_path)
    path.unlink()
    assert str(tmp_path) in message_of(load_model_weights, qwen(), tmp_path)


def test_another_format_is_refused(tmp_path):
    folder, like = trainer_folder(tmp_path)
    path = folder / "trainer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 7}))
    assert "format 7" in message_of(load_trainer_state, folder)
    for text in ("", "[]", "{}", "{"):
        path.write_text(text)
        assert str(folder) in message_of(load_trainer_state, folder)
    path.unlink()
    assert str(folder) in message_of(load_trainer_tensors, folder, like)


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    save_file({"exp_avg.a": torch.ones(2)}, tmp_path / "optimizer.safetensors")
    (tmp_path / "trainer.json").write_text('{"format": 1, "version": 3, "total_steps": null}')
    text = message_of(load_trainer_tensors, tmp_path, {"exp_avg.a": torch.ones(2)})
    assert "format 1" in text and "version that wrote it" in text


def load_with_a_bad_file_for_one(shards: Shards, folder: Path, own: Path) -> str:
    """Rank 1 sees another folder, as if the disk of its machine had lost a file."""
    root = sharded(qwen(), shards)
    like = optimizer_tensors(root, optimizer_after_a_step(root))
    try:
        load_trainer_tensors(folder if shards.rank == 0 else own, like, shards)
    except TrainerError as error:
        return str(error)
    return ""


def test_what_one_process_cannot_read_fails_in_all(ranks, tmp_path):
    ranks.run(2, save_after_a_step, tmp_path, True)
    texts = ranks.run(2, load_with_a_bad_file_for_one, tmp_path / "trainer", tmp_path / "gone")
    assert "another process" in texts[0] and "gone" in texts[1]


def save_into_a_file(shards: Shards, path: Path) -> list[str]:
    root = sharded(qwen(), shards)
    problems = []
    for save in (
        lambda: save_model(root.model, None, path, shards=shards),
        lambda: save_trainer({}, {}, path, shards),
    ):
        try:
            save()
        except (OSError, TrainerError) as error:
            problems.append(type(error).__name__)
    return problems


def test_what_cannot_be_written_fails_in_all_processes(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    answers = ranks.run(2, save_into_a_file, tmp_path / "file")
    assert answers[0] == ["FileExistsError"] * 2 and answers[1] == ["TrainerError"] * 2


def test_the_hash_depends_on_names_types_shapes_and_bytes():
    a = {"x": torch.arange(6.0), "y": torch.ones(2)}
    assert tensors_sha256(a) == tensors_sha256({"y": torch.ones(2), "x": torch.arange(6.0)})
    others = (
        {"z": torch.arange(6.0), "y": torch.ones(2)},
        {"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2)},
        {"x": torch.arange(6.0).double(), "y": torch.ones(2)},
        {"x": torch.arange(6.0).neg(), "y": torch.ones(2)},
    )
    assert len({tensors_sha256(one) for one in (a, *others)}) == 5


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SETTINGS = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


@DTYPES
def test_a_trainer_goes_on_as_if_it_had_not_been_interrupted(tmp_path, dtype):
    uninterrupted = trainer(tiny_model(dtype=dtype), **SETTINGS)
    metrics = [actor(step(uninterrupted, samples(seed))) for seed in range(5)]

    first = trainer(tiny_model(dtype=dtype), **SETTINGS)
    for seed in range(2):
        step(first, samples(seed))
    first.save(tmp_path)
    resumed = trainer(tiny_model(seed=99, dtype=dtype), **SETTINGS)
    resumed.load(tmp_path)
    assert resumed.learner.state_hashes() == first.learner.state_hashes() and resumed.version == 2
    assert [actor(step(resumed, samples(seed))) for seed in range(2, 5)] == metrics[2:]
    assert resumed.learner.state_hashes() == uninterrupted.learner.state_hashes()


def actor(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without those that time decides."""
    return {name: value for name, value in metrics.items() if name.startswith("actor/")}


def test_a_trainer_is_saved_before_its_first_step_and_loaded_after_one(tmp_path):
    fresh = trainer(tiny_model(dtype=torch.float32))
    fresh.save(tmp_path)
    used = trainer(tiny_model(seed=3, dtype=torch.float32))
    step(used, samples(0))
    used.load(tmp_path)
    assert used.version == 0 and used.learner.state_hashes() == fresh.learner.state_hashes()
    assert actor(step(used, samples(1))) == actor(step(fresh, samples(1)))
    assert used.learner.state_hashes() == fresh.learner.state_hashes()


def test_a_trainer_refuses_another_models_checkpoint(tmp_path):
    t = trainer(tiny_model(dtype=torch.float32))
    step(t, samples(0))
    t.save(tmp_path)
    wider = tiny_model(dtype=torch.float32)
    wider.resize_token_embeddings(40)
    with pytest.raises(TrainerError, match="another model"):
        trainer(wider).load(tmp_path)
    with pytest.raises(TrainerError):
        trainer(tiny_model(dtype=torch.bfloat16)).load(tmp_path)
