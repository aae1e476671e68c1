"""Checkpoints on disk: a Hugging Face config and its named tensors, read one tensor at a time.

Opening reads headers only. `Checkpoint.read` returns one tensor, bit for bit, and keeps nothing:
a load that converts tensor by tensor peaks at the weights plus about one tensor.
"""

import json
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

# The codes of the safetensors header: what weights may be stored as, and what a checkpoint may
# hold beside its weights (position ids, causal masks), which is listed and never read.
WEIGHT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BUFFER_DTYPES = {"I64", "I32", "U8", "BOOL"}

BIN_PATTERNS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
SAFETENSORS_PATTERNS = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
TOKENIZER_PATTERNS = ["tokenizer.json"]


class Place(NamedTuple):
    """Where a tensor's bytes begin, in row-major order.

    Attributes:
        file, offset: which file, and how many bytes into it.
        dtype: of the tensor.
    """

    file: Path
    offset: int
    dtype: np.dtype


class Checkpoint(NamedTuple):
    """One model's files, opened.

    Attributes:
        config: the content of config.json, in the Hugging Face layout.
        shapes: the shape of every tensor, by its Hugging Face name.
        read: name -> that tensor in the file's own dtype (float64, float32, float16 or
            `ml_dtypes.bfloat16`), a fresh array that the caller owns. Raises ValueError naming the
            tensor when it is not stored as floating point, or when the file is damaged.
        source: what the checkpoint was opened from, for error messages.
        place: name -> where a tensor lies in its file, for `svflow.models.slices`; None for files
            that hold their tensors in other forms, which are read whole.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    source: str
    place: Callable[[str], Place] | None = None


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: its config and tensor shapes now, its tensors when asked for.

    Args:
        source: a folder with config.json and model.safetensors, its shards and their index, or
            pytorch_model.bin (read through PyTorch); a .gguf file; or a Hugging Face repository
            id, downloaded or found in the cache of huggingface_hub.

    Raises:
        FileNotFoundError: something that has to be there is not; the message names it.
        ValueError: a file is damaged, ambiguous or of a kind that is not read; it is named.
    """
    path = find(source, SAFETENSORS_PATTERNS + TOKENIZER_PATTERNS)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: a checkpoint is a folder or a .gguf file")
        from svflow.models.gguf import open_gguf

        return open_gguf(path)
    config = read_json(path / "config.json")
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return _open_safetensors(config, [single], None, path)
    if index.is_file():
        return _open_safetensors(config, *_read_index(index), path)
    if not os.path.exists(source):
        path = find(source, BIN_PATTERNS)
    single, index = path / "pytorch_model.bin", path / "pytorch_model.bin.index.json"
    if single.is_file():
        return _open_bin(config, [single], None, path)
    if index.is_file():
        return _open_bin(config, *_read_index(index), path)
    raise FileNotFoundError(
        f"no weights in {path}: no model.safetensors, no pytorch_model.bin and no index of either"
    )


def write_checkpoint(
    folder: str | os.PathLike[str],
    config: dict[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write config.json and model.safetensors into a folder, made if need be.

    Both are written in full beside their final places and then renamed, so that a run that is
    killed leaves of each file the old one or the new one, never a half.

    Raises:
        ValueError: two tensors have one name, a tensor is not floating point, or the config is not
            JSON; nothing is written then.
    """
    weights: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        if name in weights:
            raise ValueError(f"two tensors are named {name}")
        if tensor.dtype.name not in WEIGHT_DTYPES.values():
            raise ValueError(f"{name} is {tensor.dtype}, which is not one of the weight dtypes")
        weights[name] = np.asarray(tensor, order="C")
    try:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    except TypeError as error:
        raise ValueError(f"the config cannot be written as JSON: {error}") from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as scratch:
        new_config, new_weights = Path(scratch, "config.json"), Path(scratch, "model.safetensors")
        new_config.write_text(text, encoding="utf-8")
        save_file(weights, new_weights, metadata={"format": "pt"})
        shutil.copymode(new_config, new_weights)  # the library leaves it readable by its owner only
        for new in (new_weights, new_config):
            with open(new, "rb") as file:
                os.fsync(file.fileno())
        os.replace(new_weights, folder / "model.safetensors")
        os.replace(new_config, folder / "config.json")


def find(source: str | os.PathLike[str], patterns: list[str]) -> Path:
    """The file or folder that a path or a Hugging Face repository id stands for.

    Args:
        source: an existing path, or a repository id ("gpt2", "org/name").
        patterns: the files to have from the repository, as huggingface_hub's `allow_patterns`.

    Raises:
        FileNotFoundError: there is no such path, or the repository cannot be had.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    text = os.fspath(source)
    local = isinstance(source, os.PathLike) or path.is_absolute() or text.startswith((".", "~"))
    if local or path.suffix in (".gguf", ".json", ".safetensors", ".bin"):
        raise FileNotFoundError(f"there is no file or folder {text}")
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=patterns))
    except HFValidationError as error:
        raise FileNotFoundError(f"there is no file or folder {text!r}") from error
    except OSError as error:  # every way a download fails, a repository that is not there included
        raise FileNotFoundError(
            f"{text!r} is neither an existing path nor a Hugging Face repository that can be had "
            f"from the hub or its cache: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object. Raises FileNotFoundError or ValueError naming the file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ValueError(f"{', '.join(twice)} is listed twice")
        return dict(pairs)

    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid: {error}") from error
    if type(content) is not dict:
        raise ValueError(f"{path} is not a JSON object")
    return content


def _read_index(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The shards that an index names, and the shard of every tensor."""
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{path} has no weight_map")
    shard_of = {}
    for tensor, shard in names.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(
                f"{path}: the shard of {tensor} is {shard!r}, which is not a file name"
            )
        shard_of[tensor] = path.parent / shard
    shards = sorted(set(shard_of.values()))
    for file in shards:
        if not file.is_file():
            raise FileNotFoundError(f"the shard {file.name} of {path} is missing")
    return shards, shard_of


def _locate(names: dict[Path, list[str]], shard_of: dict[str, Path] | None) -> dict[str, Path]:
    """The file of every tensor, each tensor in exactly one file and, with an index, in that one."""
    found: dict[str, Path] = {}
    for file, tensors in names.items():
        for name in tensors:
            if name in found:
                raise ValueError(f"{name} is both in {found[name]} and in {file}")
            if shard_of is not None and name not in shard_of:
                raise ValueError(f"{file} holds {name}, which the index does not list")
            found[name] = file
    for name, file in (shard_of or {}).items():
        if found.get(name) != file:
            raise ValueError(f"{name} is not in {file}, where the index places it")
    return found


def _damaged(path: Path, error: BaseException) -> NoReturn:
    raise ValueError(f"{path} is damaged or not what its name says: {error}") from error


def _open_safetensors(
    config: dict[str, Any], files: list[Path], shard_of: dict[str, Path] | None, source: Path
) -> Checkpoint:
    handles, shapes, codes = {}, {}, {}
    for file in files:
        try:
            # pread, not mmap: a mapped file's pages would count as resident beside the weights
            handles[file] = safe_open(file, framework="numpy", backend="pread")
        except SafetensorError as error:
            _damaged(file, error)
    file_of = _locate({file: list(handle.keys()) for file, handle in handles.items()}, shard_of)
    for name, file in file_of.items():
        header = handles[file].get_slice(name)
        shapes[name], codes[name] = tuple(header.get_shape()), header.get_dtype()
        if codes[name] not in WEIGHT_DTYPES and codes[name] not in BUFFER_DTYPES:
            raise ValueError(f"{name} in {file} is stored as {codes[name]}, which is not handled")

    def read(name: str) -> np.ndarray:
        if codes[name] not in WEIGHT_DTYPES:
            raise ValueError(f"{name} in {file_of[name]} is {codes[name]}, not floating point")
        try:
            return handles[file_of[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            _damaged(file_of[name], error)

    headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def place(name: str) -> Place:
        file = file_of[name]
        if codes[name] not in WEIGHT_DTYPES:
            raise ValueError(f"{name} in {file} is {codes[name]}, not floating point")
        if file not in headers:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                headers[file] = 8 + size, json.loads(stream.read(size))
        start, header = headers[file]
        dtype = np.dtype(WEIGHT_DTYPES[codes[name]])  # ml_dtypes has told NumPy of bfloat16
        return Place(file, start + header[name]["data_offsets"][0], dtype)

    return Checkpoint(config, shapes, read, str(source), place)


def _open_bin(
    config: dict[str, Any], files: list[Path], shard_of: dict[str, Path] | None, source: Path
) -> Checkpoint:
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"{source} has its weights in pytorch_model.bin only: install PyTorch to read it, or "
            "convert it once with transformers' from_pretrained and save_pretrained, which writes "
            "model.safetensors"
        ) from error

    def load(file: Path) -> dict[str, Any]:
        try:
            # Old files are one pickle, which cannot be mapped.
            tensors = torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            _damaged(file, error)
        if not hasattr(tensors, "items"):
            raise ValueError(f"{file} holds a {type(tensors).__name__}, not named tensors")
        for name, tensor in tensors.items():
            if not torch.is_tensor(tensor) or tensor.layout != torch.strided:
                kind = type(tensor).__name__
                raise ValueError(f"{name} in {file} is a {kind}, not a dense tensor")
        return tensors

    contents = {file: load(file) for file in files}
    file_of = _locate({file: list(tensors) for file, tensors in contents.items()}, shard_of)
    shapes = {name: tuple(contents[file][name].shape) for name, file in file_of.items()}
    for file in files:
        if zipfile.is_zipfile(file):
            del contents[file]  # mapped anew for each tensor, so that pages read do not stay

    def read(name: str) -> np.ndarray:
        file = file_of[name]
        tensor = (contents[file] if file in contents else load(file))[name].detach()
        if str(tensor.dtype).removeprefix("torch.") not in WEIGHT_DTYPES.values():
            raise ValueError(f"{name} in {file} is {tensor.dtype}, not floating point")
        if tensor.dtype == torch.bfloat16:  # NumPy has no such dtype: pass its bits
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return tensor.numpy().copy()

    return Checkpoint(config, shapes, read, str(source))
