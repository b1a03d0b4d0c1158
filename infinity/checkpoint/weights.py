"""Weights that others saved: safetensors, torch state dicts, checkpoints, mappings, each read piece by piece."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.disk import read_file
from infinity.checkpoint.folder import LATEST, Folder
from infinity.checkpoint.header import TensorPlace
from infinity.checkpoint.input_file import ChunkCache, InputFile
from infinity.checkpoint.load import Reader, reader_of
from infinity.checkpoint.manifest import MANIFEST, PLAIN_NAME
from infinity.checkpoint.pieces import Sources, piece_reader
from infinity.checkpoint.read import Checkpoint
from infinity.errors import CheckpointError
from infinity.shard.tiles import Piece, whole_piece

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
MAX_INDEX_BYTES = 1 << 28
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
WRAPPERS = ("state_dict", "module", "model")
"""Keys under which trainers keep the weights in a larger dict."""

EXPECTED = (
    "expected a safetensors file, a directory of them (with model.safetensors.index.json if there are several), a "
    "torch state dict (.bin, .pt, .pth), DeepSpeed's zero_to_fp32 output, or a checkpoint of this package"
)


class Weights:
    """Shapes by name with a reader for each; ``owner`` leads from every further name of a value to its first.

    A context manager: it holds open files. What is read is never executed: torch files are read with
    ``weights_only=True``.
    """

    def __init__(self, source: str | os.PathLike[str] | Mapping[str, torch.Tensor]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.owner: dict[str, str] = {}
        self._sources: dict[str, Sources] = {}
        self._open = ExitStack()
        self.name = "the mapping given" if isinstance(source, Mapping) else os.fspath(source)
        try:
            if isinstance(source, Mapping):
                self._add_mapping(source)
            else:
                self._add_path(Path(source))
        except BaseException:
            self.close()
            raise

    def reader(self, name: str, piece: Piece | None = None) -> Reader:
        """Copies elements of one value, or of a piece of it, converting their dtype."""
        return piece_reader(piece or whole_piece(self.shapes[name]), self._sources[name])

    def without_prefix(self, known: Iterator[str]) -> None:
        """Drops the ``module.`` that a wrapper put before every name, if the model's names have none."""
        prefix = "module."
        if not self.shapes or not all(name.startswith(prefix) for name in self.shapes):
            return
        if any(name.startswith(prefix) for name in known):
            return
        cut = len(prefix)
        self.shapes = {name[cut:]: shape for name, shape in self.shapes.items()}
        self._sources = {name[cut:]: sources for name, sources in self._sources.items()}
        self.owner = {name[cut:]: own[cut:] for name, own in self.owner.items()}

    def close(self) -> None:
        self._sources.clear()
        self._open.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add_mapping(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{self.name} holds {name!r:.80}, a {type(value).__name__}; expected tensors by parameter name"
                )
            self._add(name, tuple(value.shape), reader_of(value))

    def _add(self, name: str, shape: tuple[int, ...], reader: Reader) -> None:
        self._add_cut(name, shape, [(whole_piece(shape), reader)])

    def _add_cut(self, name: str, shape: tuple[int, ...], sources: Sources) -> None:
        if name in self.shapes:
            raise CheckpointError(f"{self.name} holds {name} more than once")
        self.shapes[name], self._sources[name] = shape, sources

    def _add_path(self, path: Path) -> None:
        if not path.is_dir():
            return self._add_file(path)
        if (path / MANIFEST).is_file():
            return self._add_checkpoint(str(path))
        if (path / LATEST).is_file():
            return self._add_checkpoint(Folder(path).find())
        for index in INDEXES:
            if (path / index).is_file():
                return self._add_index(path, index)
        files = [path / name for name in SINGLE if (path / name).is_file()][:1] or sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} holds no weights; {EXPECTED}")
        for file in files:
            self._add_file(file)
        return None

    def _add_index(self, directory: Path, index: str) -> None:
        path = directory / index
        try:
            document = json.loads(read_file(str(path), MAX_INDEX_BYTES))
            files = dict.fromkeys(document["weight_map"].values())
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path} is no index: it has no weight_map from names to files") from None
        for name in files:
            if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
                raise CheckpointError(
                    f"{path} names the file {name!r:.80}; expected a plain name in the same directory"
                )
            self._add_file(directory / name)
        if missing := [name for name in document["weight_map"] if name not in self.shapes]:
            raise CheckpointError(f"{path} promises {missing[0]}, which none of its files holds")

    def _add_file(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist or is no file; {EXPECTED}")
        if path.suffix == ".safetensors":
            return self._add_safetensors(str(path.resolve()))
        if path.suffix not in TORCH_SUFFIXES:
            raise CheckpointError(f"{path} has an unknown suffix; {EXPECTED}")
        return self._add_torch(path)

    def _add_safetensors(self, path: str) -> None:
        cache = ChunkCache(1)
        self._open.callback(cache.free)
        file = self._open.enter_context(InputFile(path, cache))
        for name, place in file.tensors.items():
            self._add(name, place.shape, file_reader(file, place))

    def _add_torch(self, path: Path) -> None:
        try:
            whole = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read as weights without running code from it: {str(error).splitlines()[0]:.200}. "
                "Convert it to safetensors where it was made"
            ) from None
        for key in WRAPPERS:
            if isinstance(whole, Mapping) and isinstance(whole.get(key), Mapping):
                whole = whole[key]
        if not isinstance(whole, Mapping):
            raise CheckpointError(f"{path} holds a {type(whole).__name__}; expected tensors by parameter name")
        self._add_mapping(whole)

    def _add_checkpoint(self, path: str) -> None:
        checkpoint = self._open.enter_context(Checkpoint(path))
        for name, parameter in checkpoint.manifest.parameters.items():
            sources = checkpoint.sources(parameter, checkpoint.value_kind(parameter))
            for alias in (name, *parameter.also):
                self._add_cut(alias, tuple(parameter.shape), sources)
                self.owner[alias] = name
        for name, shape in checkpoint.manifest.buffers.items():
            self._add(name, tuple(shape), reader_of(checkpoint.buffer(name)))


def file_reader(file: InputFile, place: TensorPlace) -> Reader:
    """Reads a tensor of an open file piece by piece."""
    size = place.dtype.itemsize

    def read(start: int, into: torch.Tensor) -> None:
        alike = into.dtype == place.dtype and into.is_contiguous()
        raw = into.view(torch.uint8) if alike else torch.empty(into.numel() * size, dtype=torch.uint8)
        file.read(place, start * size, start * size + raw.numel(), raw)
        if not alike:
            into.copy_(raw.view(place.dtype))

    return read
