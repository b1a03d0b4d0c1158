"""Whatever bytes a checkpoint's files hold, its readers give values or our own errors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from infinity.checkpoint.folder import Folder
from infinity.checkpoint.header import parse_header
from infinity.checkpoint.input_file import ChunkCache, InputFile
from infinity.checkpoint.manifest import Manifest, RankPart, parse, to_json
from infinity.checkpoint.read import Checkpoint
from infinity.checkpoint.values import decode, encode
from infinity.checkpoint.weights import Weights
from infinity.errors import CheckpointError, InfinityError
from tests.checkpoint.helpers import configure, engine_of, train

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "nonsense"]) | json_values,
        "shape": st.lists(st.integers(-2, 1 << 62) | json_values, max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-2, 1 << 62) | json_values, max_size=3) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), entries | json_values, max_size=4)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(raw=st.binary(max_size=64) | headers.map(lambda value: json.dumps(value).encode()), size=st.integers(0, 1 << 40))
@example(raw=b'{"a":' * 5000, size=10)
@example(raw=b'{"a": 1' + b"0" * 5000 + b"}", size=10)
@example(raw=b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}', size=10)
def test_the_header(raw: bytes, size: int) -> None:
    try:
        tensors, _ = parse_header(raw, size, "file")
    except CheckpointError:
        return
    assert sum(place.nbytes for place in tensors.values()) == size - 8 - len(raw)


@quick
@given(raw=st.binary(max_size=200), length=st.none() | st.integers(0, (1 << 64) - 1))
def test_a_file_of_any_bytes(tmp_path: Path, raw: bytes, length: int | None) -> None:
    path = tmp_path / "any.safetensors"
    path.write_bytes(raw if length is None else struct.pack("<Q", length) + raw)
    cache = ChunkCache(1)
    try:
        InputFile(str(path), cache).close()
    except CheckpointError:
        pass
    finally:
        cache.free()
    with contextlib.suppress(CheckpointError):
        Weights(path).close()


tags = st.sampled_from(
    ["$float", "$bytes", "$tuple", "$set", "$frozenset", "$dict", "$counter", "$tensor", "$array", "$x"]
)
trees = st.recursive(json_values, lambda inner: st.dictionaries(tags, inner | st.lists(inner, max_size=3), max_size=2))


@quick
@given(trees)
def test_saved_values(tree: Any) -> None:
    def get(name: str) -> torch.Tensor:
        raise CheckpointError(name)

    with contextlib.suppress(CheckpointError):
        decode(tree, get)


python_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.booleans()), inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=1)
    ),
    max_leaves=20,
)


@quick
@given(python_values)
@example({"$tuple": [1]})
@example({"$x": {"$float": "nan"}})
def test_what_is_saved_is_what_was_given(value: Any) -> None:
    kept = json.loads(json.dumps(encode(value, "value", lambda tensor: ""), allow_nan=False))
    assert repr(decode(kept, lambda name: torch.empty(0))) == repr(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(value, "client_state", lambda tensor: "")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    config = configure(directory / "swap", "cpu")
    config["infinity"]["tile_bytes"] = 4096  # matrices are cut both ways
    with engine_of(config) as engine:
        train(engine, 0, 1)
        return Path(engine.save_checkpoint(directory / "ckpt", "a"))


paths = st.lists(st.integers(0, 30), min_size=1, max_size=6)


def changed(document: Any, path: list[int], value: Any) -> Any:
    """``document`` with the member that ``path`` leads to replaced."""
    if not path or not isinstance(document, dict | list) or not document:
        return value
    if isinstance(document, dict):
        key = sorted(document)[path[0] % len(document)]
        return {**document, key: changed(document[key], path[1:], value)}
    place = path[0] % len(document)
    return [*document[:place], changed(document[place], path[1:], value), *document[place + 1 :]]


@settings(quick, max_examples=200)
@given(path=paths, value=json_values | st.just("../../etc/passwd") | st.just(1 << 70))
def test_a_manifest_that_was_tampered_with(saved: Path, path: list[int], value: Any) -> None:
    """Also one whose checksums were made to fit: nothing but our errors, nothing read from outside."""
    document = json.loads((saved / "manifest.json").read_text())
    other = changed(document, path, value)
    for raw in (json.dumps(other).encode(), _sealed(other)):
        try:
            parsed = parse(Manifest, raw, "manifest.json")
        except CheckpointError:
            continue
        if raw == json.dumps(other).encode():
            assert parsed == parse(Manifest, (saved / "manifest.json").read_bytes(), "")
        whole = (saved / "manifest.json").read_bytes()
        (saved / "manifest.json").write_bytes(raw)
        try:
            with Checkpoint(str(saved)) as checkpoint:
                for parameter in checkpoint.manifest.parameters.values():
                    if parameter.numel < 1 << 20:
                        checkpoint.read(parameter, checkpoint.value_kind(parameter), 0, torch.empty(parameter.numel))
                checkpoint.state()
                checkpoint.rank_state(0)
        except InfinityError:
            pass
        finally:
            (saved / "manifest.json").write_bytes(whole)


def _sealed(document: Any) -> bytes:
    """The document with a checksum that fits, as somebody who knows the format would make it."""
    try:
        return to_json(Manifest.model_validate_json(json.dumps(document)))
    except Exception:
        return json.dumps(document).encode()


@settings(quick, max_examples=100)
@given(place=st.integers(0, 1 << 20), bit=st.integers(0, 7), name=st.integers(0, 20))
def test_any_bit_of_any_file(saved: Path, place: int, bit: int, name: int) -> None:
    files = sorted(saved.iterdir())
    path = files[name % len(files)]
    whole = path.read_bytes()
    place %= len(whole)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
    try:
        with pytest.raises(InfinityError), Checkpoint(str(saved)) as checkpoint:
            checkpoint.verify()
    finally:
        path.write_bytes(whole)


@quick
@given(raw=st.binary(max_size=100))
@pytest.mark.parametrize("kind", [Manifest, RankPart])
def test_json_of_any_bytes(kind: type[Any], raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse(kind, raw, "x")


@quick
@given(raw=st.binary(max_size=40))
def test_latest_of_any_bytes(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "latest").write_bytes(raw)
    with pytest.raises(InfinityError):
        Folder(tmp_path).find()


def test_a_fifo_or_a_directory_does_not_hang(saved: Path, tmp_path: Path) -> None:

    makers: list[Callable[[Path], None]] = [lambda path: os.mkfifo(path), lambda path: path.mkdir()]
    for number, make in enumerate(makers):
        for name in ("manifest.json", "rank-0.json", "buffers.safetensors"):
            copy = tmp_path / f"{number}-{name}"
            shutil.copytree(saved, copy)
            (copy / name).unlink()
            make(copy / name)
            with pytest.raises(InfinityError), Checkpoint(str(copy)) as checkpoint:
                checkpoint.verify()
