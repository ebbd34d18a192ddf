"""Load models and tokenizers from a Hugging Face folder or hub name, fingerprint them, and build
tiny ones.

Weights are safetensors only, and no code from a model's folder is ever run."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from rollpacker.trainer.packing import layers_with_state
from rollpacker.trainer.quantization import quantize_layers
from rollpacker.trainer.saved_weights import (
    SavedWeights,
    device_of,
    empty_model,
    make_buffers,
)
from rollpacker.trainer.trainer import ModelConfig

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
MIN_TOKENS = 256
"""Tokens below which a tokenizer is suspected to be incomplete: transformers makes an almost empty
tokenizer where the vocabulary's file is missing."""
_TRIED_TOKENS, _TRIED_WIDTH = 8, 24
_PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
_LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


logger = logging.getLogger(__name__)


class ModelError(ValueError):
    """The model or tokenizer cannot be used; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: PreTrainedModel
    """The model, on `device`, in `dtype`, in eval mode, with every parameter trainable. Its tensors
    are on the meta device, without memory, if only names and shapes were asked for."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer. It has a padding token (the end token where the folder names none)."""
    device: torch.device
    dtype: torch.dtype


def load_model(
    config: ModelConfig,
    *,
    setting: str = "model.path",
    without_weights: bool = False,
    weights_later: bool = False,
) -> LoadedModel:
    """Load the model and tokenizer of `config.path`. Raises `ModelError`, with one message, for
    whatever is wrong with them; `setting` names the path's setting in that message.

    `without_weights`: the model's tensors have names, shapes and dtype, and no memory (meta
    device), for a process that computes nothing with them. `weights_later`: likewise, for a process
    that shards the model first and then reads its shards (`saved_weights.read_weights`); that model
    is not checked for `check_padding`. A model that cannot be read so is loaded whole.
    """
    device = model_device(config.device)
    dtype = model_dtype(config.dtype, device)
    path = _checked_path(config.path, setting)
    tokenizer = load_tokenizer(path)
    if without_weights or weights_later:
        empty = _without_weights(path, dtype, device if weights_later else None)
        if empty is not None:
            check_vocabulary(empty, tokenizer, config.path)
            return LoadedModel(model=empty, tokenizer=tokenizer, device=device, dtype=dtype)
    with no_progress_bars(), no_load_report():
        try:
            read: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that the message below can name one
            )
        except _LOAD_ERRORS as error:
            raise ModelError(f"cannot load the model {config.path}: {_short(error)}") from error
    model, info = read
    _check_loaded(info, config.path)
    check_vocabulary(model, tokenizer, config.path)
    if without_weights:
        model = model.to("meta").eval()
        return LoadedModel(model=model, tokenizer=tokenizer, device=device, dtype=dtype)
    if config.quantization is not None and not quantize_layers(model, device, dtype):
        raise ModelError(
            f"model.quantization={config.quantization}: {config.path} has no plain matrices in its"
            " layers"
        )
    model = model.to(device).eval()
    check_padding(model, config.path)
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, dtype=dtype)


def _without_weights(
    path: str, dtype: torch.dtype, device: torch.device | None
) -> PreTrainedModel | None:
    """Return the model of a folder or hub name without weights. With a `device` it has its buffers
    there, and can read its weights later. None: it must be loaded whole."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        model = empty_model(AutoModelForCausalLM.from_config, config, dtype)
        saved = SavedWeights(path, model, device or torch.device("meta"))
        lacks = saved.lacks()
        if lacks is None:
            with contextlib.suppress(OSError):  # there is none
                model.generation_config = GenerationConfig.from_pretrained(path)
            if device is not None:
                make_buffers(model, saved)
                saved.remember_in(model)
            return model
    except _LOAD_ERRORS as error:
        lacks = _short(error)
    logger.info("%s is first loaded as a whole in every process: %s", path, lacks)
    return None


def load_tokenizer(path: str, *, setting: str = "model.path") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name. Raises `ModelError` if it cannot be used;
    `setting` names the path's setting in the message."""
    path = _checked_path(path, setting)
    try:
        tokenizer: PreTrainedTokenizerBase = _tokenizer_class(path).from_pretrained(
            path, trust_remote_code=False
        )
    except _LOAD_ERRORS as error:
        hint = (
            "" if Path(path).is_dir() else f" (there is no folder {Path(path).absolute()} either)"
        )
        raise ModelError(f"cannot load the tokenizer of {path}: {_short(error)}{hint}") from error
    num_tokens = len(tokenizer.get_vocab())
    if num_tokens < MIN_TOKENS and _lacks_vocabulary(Path(path)):
        raise ModelError(
            f"the tokenizer of {path} knows {num_tokens} tokens: a file of it is missing, such as"
            " tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path} names no end token (eos_token)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokenizer_class(path: str) -> Any:
    """Return the class that loads a folder's tokenizer: the plain class if the folder says that its
    tokenizer.json is all there is, else the automatic one. The automatic class goes by the model's
    type, and would split a qwen2 model's characters in another way."""
    try:
        named = json.loads((Path(path) / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return AutoTokenizer
    whole = (Path(path) / "tokenizer.json").is_file() and isinstance(named, dict)
    plain = whole and named.get("tokenizer_class") in _PLAIN_TOKENIZERS
    return PreTrainedTokenizerFast if plain else AutoTokenizer


def _lacks_vocabulary(folder: Path) -> bool:
    names = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
    return folder.is_dir() and not any(next(folder.glob(name), None) for name in names)


def context_tokens(path: str) -> int | None:
    """Return the most tokens that prompt and response may have together. None: the model's config
    does not say. Raises `ModelError` if the config cannot be loaded."""
    try:
        config = AutoConfig.from_pretrained(_checked_path(path), trust_remote_code=False)
    except _LOAD_ERRORS as error:
        raise ModelError(f"cannot load the config of {path}: {_short(error)}") from error
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def end_tokens(path: str) -> frozenset[int]:
    """Return the ids of tokens that end the model's responses, besides the tokenizer's own end
    token, from its generation config, or if there is none from its config. Raises `ModelError` if
    the config cannot be loaded."""
    folder = _checked_path(path)
    try:
        configured: Any = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:  # there is none
        try:
            text = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
        except _LOAD_ERRORS as error:
            raise ModelError(f"cannot load the config of {path}: {_short(error)}") from error
        configured = getattr(text, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(one for one in ids if isinstance(one, int))


def _check_loaded(info: Mapping[str, Any], path: str) -> None:
    """Raise `ModelError` if weights are missing or of another shape, by transformers' report."""
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"the weights of {path} are incomplete: {missing[0]} is missing"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, saved, wanted = mismatched[0]
        more = f" ({len(mismatched) - 1} more do not fit)" if len(mismatched) > 1 else ""
        raise ModelError(
            f"the weights of {path} do not fit its config.json: {name} is {list(saved)}, the config"
            f" asks for {list(wanted)}{more}"
        )


@contextmanager
def no_load_report() -> Iterator[None]:
    """A context in which transformers logs no table of missing weights (`_check_loaded` does)."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def check_weights(path: str) -> None:
    """Raise `ModelError` if a file of a folder's weights is missing or cut off. Only headers are
    read, and a model on the hub is not checked."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    index = folder / "model.safetensors.index.json"
    names = [file.name for file in sorted(folder.glob("*.safetensors"))]
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        for name in names:
            with safe_open(folder / name, framework="numpy"):
                pass
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"the weights of {path} cannot be read: {_short(error)}") from error


def num_embeddings(model: PreTrainedModel) -> int:
    """Return the number of rows of the model's input embeddings: tokens, and padding rows."""
    rows = model.get_input_embeddings().num_embeddings
    assert isinstance(rows, int)
    return rows


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise `ModelError` if the tokenizer can produce a token that the model has no row for."""
    rows = num_embeddings(model)
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= rows:
        raise ModelError(
            f"the tokenizer of {path} does not fit its model: token {token!r} is number {largest}, "
            f"the model has {rows} rows of embeddings"
        )


@torch.no_grad()
def check_padding(model: PreTrainedModel, path: str) -> None:
    """Raise `ModelError` if a row's logits depend on later tokens or on another row. Micro-batches
    are padded on the right and have no mask, which does no harm with causal attention; a model with
    any other kind of layer is tried out here."""
    state = layers_with_state(model)
    if state is None:
        return
    shape, known = (2, _TRIED_WIDTH), num_embeddings(model)
    tokens = (torch.arange(2 * _TRIED_WIDTH, device=device_of(model)) % known).view(shape)
    others = tokens.clone()
    others[0, _TRIED_TOKENS:] = others[1] = known - 1
    said, again = (
        model(input_ids=ids, use_cache=False).logits[0, :_TRIED_TOKENS].double()
        for ids in (tokens, others)
    )
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.05
    if not (said - again).abs().max() <= tolerance * said.abs().max():
        raise ModelError(
            f"{path} cannot be trained: {type(model).__name__} has {state}, and what it says of a "
            "token depends on what comes after it, such as the padding of a micro-batch"
        )


def local_folder(path: str | Path) -> Path:
    """Return a model's folder, or of a hub name that of its local copy. Raises `ModelError` if
    there is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        config_file = cached_file(str(path), "config.json", local_files_only=True)
    except OSError as error:
        raise ModelError(f"there is no model at {path}") from error
    assert config_file is not None, "it raises for a missing one"
    return Path(config_file).parent


def fingerprint(path: str | Path) -> str:
    """Return the SHA-256 over the weights, the config and the tokenizer of a folder (or of a hub
    name's local copy). Two folders with the same files have the same fingerprint, wherever they
    lie. Raises `ModelError` if there is no such folder or copy."""
    folder = local_folder(path)
    names = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.suffix == ".safetensors" or entry.name in ("config.json", *TOKENIZER_FILES)
    )
    digest = hashlib.sha256()
    for name in names:
        with (folder / name).open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def character_tokenizer(
    alphabet: str, markers: Sequence[str] = (), chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character: the special tokens, then `alphabet` in its
    order, then `markers`, longer texts that are one token each. Decoding with `skip_special_tokens`
    gives back exactly the text; a character that is not in the alphabet becomes the unknown token.
    Raises `ModelError` if the alphabet is empty or repeats a character."""
    if not alphabet:
        raise ModelError("alphabet must have at least one character")
    if repeated := sorted({c for c in alphabet if alphabet.count(c) > 1}):
        raise ModelError(f"alphabet has {repeated[0]!r} more than once")
    vocabulary = {token: number for number, token in enumerate((PAD, EOS, UNKNOWN, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers'
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    made.add_tokens([AddedToken(text, normalized=False) for text in markers])
    made.chat_template = chat_template
    return made


def write_character_tokenizer(alphabet: str, folder: str | Path) -> PreTrainedTokenizerFast:
    """Save a `character_tokenizer` in a folder, for `AutoTokenizer` to load, and return it."""
    tokenizer = character_tokenizer(alphabet)
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def new_model(
    architecture: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Return a float32 model with random weights. `architecture` holds `model_type` and fields of
    that type's config; vocabulary and special tokens follow the tokenizer. Raises `ModelError` if
    such a model cannot be built."""
    settings: dict[str, Any] = dict(architecture)
    model_type = settings.pop("model_type", None)
    try:
        config_class = type(AutoConfig.for_model(model_type))
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"architecture.model_type {model_type!r} is not one that transformers knows"
        ) from error
    _check_fields(config_class, settings)
    settings.setdefault("vocab_size", len(tokenizer))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        settings.setdefault(name, getattr(tokenizer, name))
    torch.manual_seed(seed)
    try:
        built: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # theirs
            config_class(**settings), dtype=torch.float32, trust_remote_code=False
        )
        model: PreTrainedModel = built.eval()
        with torch.inference_mode():  # sizes that do not go together show here
            model(torch.zeros((1, 2), dtype=torch.int64))
    except (*_LOAD_ERRORS, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"cannot build the architecture: {_short(error)}") from error
    check_vocabulary(model, tokenizer, "the architecture")
    return model


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A context in which transformers draws no progress bars; the run has a display of its own."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # theirs


def _check_fields(config_class: type[PreTrainedConfig], settings: Mapping[str, object]) -> None:
    """Raise `ModelError` for a misspelt setting, which transformers' config class would ignore."""
    if not is_dataclass(config_class):
        return
    known = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    known |= {"rope_theta", "rope_scaling"}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ModelError(
                f"architecture.{name}: {config_class.__name__} has no such field{hint}"
            )


def _checked_path(path: str, setting: str = "model.path") -> str:
    """Return a path that transformers can load from: a folder with config and weights, or a name
    that may be one of the hub. Raises `ModelError` for anything else."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
        if folder.exists():
            raise ModelError(f"{setting} {path} is a file; it must be a Hugging Face model folder")
        if looks_local:
            raise ModelError(f"{setting} {path}: there is no such folder")
        return path
    if not (folder / "config.json").is_file():
        raise ModelError(f"{setting} {path}: no config.json in it, so it is not a model folder")
    if not any(folder.glob("*.safetensors")):
        pickled = next(iter(sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))), None)
        hint = (
            f" ({pickled.name} is a pickle, which is never loaded: convert it)" if pickled else ""
        )
        raise ModelError(f"{setting} {path}: no weights (*.safetensors) in it{hint}")
    return str(folder)


def model_device(name: str) -> torch.device:
    """Return the device that a value of `model.device` means in this process: on CUDA the current
    one. Raises `ModelError` for cuda if torch sees no CUDA device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device=cuda, but torch sees no CUDA device; use auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def model_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a value of `model.dtype` means on this device."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _short(error: Any) -> str:
    """Return the first line of an error's message, as transformers' messages are long."""
    if isinstance(error, KeyError):  # its text is the key alone
        return f"{type(error).__name__} {error}"
    text = str(error).strip() or type(error).__name__
    first, *rest = text.splitlines()
    return f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first
