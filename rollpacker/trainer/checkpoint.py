"""A trainer's state on disk, in two folders. Nothing is pickled.

`model/` is a Hugging Face folder with config, tokenizer and whole weights, written by rank 0.
`trainer/` has safetensors files with every rank's shards of further tensors, such as the
optimizer's, and `trainer.json`, which has numbers and the list of these files.

A checkpoint that n processes wrote can be read by any other number of processes. The caller decides
when a folder is complete, and checks that its bytes are what was written. Functions that get
`shards` (the processes that share the model) return, or raise, in all of these together."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rollpacker.trainer.model import no_progress_bars
from rollpacker.trainer.saved_weights import SavedWeights, empty_twin
from rollpacker.trainer.sharding import Shards, any_rank, full_tensors
from rollpacker.trainer.trainer import TrainerError, TrainerStateError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STATE_FILE = "trainer.json"
FORMAT = 2
_TENSOR_FILES = "*.safetensors"
_READ_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)

Result = TypeVar("Result")
Union = Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]

# torch warns whenever one process saves or loads alone, though that is asked for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    shards: Shards | None = None,
    dtype: torch.dtype | None = None,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    union: Union = iter,
) -> None:
    """Write a model's weights, config and generation config, and its tokenizer (None: no
    tokenizer). `weights` are written in place of the model's own if given, such as weights with
    adapters merged in. `dtype` is what weights are cast to; None: they are not cast. Rank 0 holds
    all weights in host memory once; `union` is a function that adds the weights of other pipeline
    stages there. Raises `OSError` if a file cannot be written."""
    named = state_tensors(model).items() if weights is None else weights
    whole = dict(union(full_tensors(named, shards, dtype)))
    _on_all_ranks(lambda: _write_model(model, tokenizer, folder, whole), shards, only=0)


def load_model_weights(
    model: PreTrainedModel,
    folder: Path,
    shards: Shards | None = None,
    *,
    part: Mapping[str, Tensor] | None = None,
) -> None:
    """Copy a saved model's parameters and buffers into `model`, plain or sharded, in place. `part`
    are the tensors of a pipeline stage, by the whole model's names, to load only these; None: load
    all. A process reads no more than its shards, and of a tensor that is converted the whole of it.
    Raises `TrainerStateError` if the folder cannot be read or holds another model."""
    target = state_tensors(model) if part is None else dict(part)
    _on_all_ranks(lambda: _read_model(model, target, folder), shards)


def save_trainer(
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    folder: Path,
    shards: Shards | None = None,
) -> None:
    """Write `tensors` as safetensors files and `state` as JSON. The tensors are sharded, or plain
    and the same in all processes. Raises `OSError` if a file cannot be written."""
    _on_all_ranks(lambda: _make_empty(folder), shards, only=0)
    if tensors:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        detached = {name: value.detach() for name, value in tensors.items()}
        try:
            dcp_save(detached, storage_writer=writer, no_dist=shards is None)
        except CheckpointException as failure:
            raise OSError(f"{folder}: cannot write: {_cause(failure)}") from None
    header = {"format": FORMAT, "processes": 1 if shards is None else shards.size}
    _on_all_ranks(lambda: _write_state({**header, **state}, folder), shards, only=0)


def load_trainer_state(folder: Path) -> dict[str, Any]:
    """Return the JSON that `save_trainer` wrote, with the number of `processes` that wrote it.
    Raises `TrainerStateError` if the JSON cannot be read or has another format, or if one of its
    tensor files is missing or has another size."""
    path = folder / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        saved_format, files = state["format"], state.get("files", {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerStateError(f"{folder}: cannot read the trainer's state: {error!r}") from error
    if saved_format != FORMAT:
        raise TrainerStateError(
            f"{path}: format {saved_format} is not the one that this version reads ({FORMAT}): "
            "continue with the version that wrote it, or start from its model folder"
        )
    for name, size in files.items():
        _check_file(folder / name, size)
    return state


def saved_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors that `save_trainer` wrote, or raise `TrainerStateError`."""
    load_trainer_state(folder)
    return frozenset(_saved_layout(folder))


def load_trainer_tensors(
    folder: Path,
    like: Mapping[str, Tensor],
    shards: Shards | None = None,
    *,
    part: bool = False,
) -> dict[str, Tensor]:
    """Read the tensors that `save_trainer` wrote into new tensors, placed and sharded like those of
    `like`. With `part`, tensors of other pipeline stages, which `like` lacks, are skipped. Raises
    `TrainerStateError` if files cannot be read, or if names, shapes or dtypes differ."""
    saved = _on_all_ranks(lambda: _checked_layout(folder, like, part=part), shards)
    loaded = {name: torch.empty_like(like[name]).detach() for name in saved}
    _load(loaded, folder, shards)
    return loaded


def state_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters (a tied one once) and persistent buffers by name, not copied."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: value for name, value in model.named_buffers() if name in persistent}
    return {name: value.detach() for name, value in model.named_parameters()} | buffers


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return one SHA-256 over the names, dtypes, shapes and bytes of all tensors, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    whole: dict[str, Tensor],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(value.dtype for value in whole.values() if value.is_floating_point())
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=whole)
    if dtype != model.dtype:  # which is what transformers has named in config.json
        model.config.dtype = str(dtype).removeprefix("torch.")
        model.config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _make_empty(folder: Path) -> None:
    """Make the folder if it is missing, and remove tensor files from it. A shard left there by an
    earlier save with more processes would be read as part of the new checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(_TENSOR_FILES):
        leftover.unlink()


def _write_state(state: Mapping[str, Any], folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.glob(_TENSOR_FILES))}
    text = json.dumps({**state, "files": files}, indent=2) + "\n"
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def _check_file(path: Path, size: int) -> None:
    if not path.is_file():
        raise TrainerStateError(f"{path} is missing: restore it, or use another checkpoint")
    if path.stat().st_size != size:
        raise TrainerStateError(
            f"{path} has {path.stat().st_size} bytes instead of {size}: use another checkpoint"
        )


def _saved_layout(folder: Path) -> dict[str, Tensor]:
    """Return the tensors saved in a folder, by name, on the meta device: without their data."""
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except _READ_ERRORS as error:
        raise TrainerStateError(f"{folder}: cannot read its tensors: {error}") from error
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _checked_layout(folder: Path, like: Mapping[str, Tensor], *, part: bool) -> dict[str, Tensor]:
    load_trainer_state(folder)
    saved = _saved_layout(folder)
    if part:
        saved = {name: value for name, value in saved.items() if name in like}
    _check_shapes({name: value.shape for name, value in saved.items()}, like, folder)
    for name, value in saved.items():
        if value.dtype != like[name].dtype:
            raise TrainerStateError(
                f"{folder} holds another model's state: {name} is {value.dtype} there and "
                f"{like[name].dtype} here"
            )
    return saved


def _check_shapes(
    saved: Mapping[str, torch.Size], wanted: Mapping[str, Tensor], folder: Path
) -> None:
    """Raise `TrainerStateError`, naming a tensor, if the saved tensors and the wanted ones do not
    have the same names and shapes."""
    if missing := wanted.keys() - saved.keys():
        raise TrainerStateError(f"{folder} holds another model: {min(missing)} is missing")
    if extra := saved.keys() - wanted.keys():
        raise TrainerStateError(f"{folder} holds another model: it also has {min(extra)}")
    for name, value in wanted.items():
        if saved[name] != value.shape:
            raise TrainerStateError(
                f"{folder} holds another model: {name} has shape {tuple(saved[name])} there "
                f"and {tuple(value.shape)} here"
            )


def _load(tensors: dict[str, Tensor], folder: Path, shards: Shards | None) -> None:
    if not tensors:
        return
    reader = HuggingFaceStorageReader(str(folder))
    try:
        dcp_load(dict(tensors), storage_reader=reader, no_dist=shards is None)
    except CheckpointException as failure:
        raise TrainerStateError(f"{folder}: cannot read its tensors: {_cause(failure)}") from None


@torch.no_grad()
def _read_model(model: PreTrainedModel, target: Mapping[str, Tensor], folder: Path) -> None:
    try:
        saved = SavedWeights(folder, empty_twin(model))
        for name in saved.unknown:
            raise TrainerStateError(f"{folder} holds another model: it also has {name}")
        _check_shapes(
            {n: shape for n, shape in saved.shapes.items() if n in target}, target, folder
        )
        for name, value in target.items():
            saved.fill(value, name)
    except _READ_ERRORS as error:
        raise TrainerStateError(f"{folder}: cannot read the model: {error}") from error


def _cause(failure: CheckpointException) -> str:
    """Return the error of the first process that failed, as text without the traceback."""
    rank, (error, _) = min(failure.failures.items())
    return f"rank {rank}: {type(error).__name__}: {error}"


def _on_all_ranks(
    work: Callable[[], Result], shards: Shards | None, only: int | None = None
) -> Result:
    """Run `work` in all processes, or in the process of rank `only` alone, and raise in all of them
    if it fails in one, so that no process waits for another. Returns the result of `work`, or None
    in a process that did not run it."""
    error: Exception | None = None
    result: Result | None = None  # stays so in a process that has nothing to do
    if shards is None or only in (None, shards.rank):
        try:
            result = work()
        except (OSError, TrainerError) as caught:
            error = caught
    if any_rank(error is not None, shards):
        raise error or TrainerError("another process could not read or write: see its message")
    return cast("Result", result)
