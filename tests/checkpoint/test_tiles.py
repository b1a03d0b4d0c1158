"""A checkpoint knows matrices by the user's names, whatever tiles they were trained in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import infinity
from infinity.checkpoint.load import Reader, reader_of
from infinity.checkpoint.manifest import Manifest, SavedTile
from infinity.checkpoint.pieces import piece_reader
from infinity.checkpoint.read import Checkpoint
from infinity.engine.engine import Engine
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.shard.tiles import Piece, tiles_of
from tests.engine.helpers import attached, configure

VOCABULARY = 96
CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tiles": {"tile_bytes": 8192},
    "small tiles": {"tile_bytes": 4096},
    "a grid": {"tile_bytes": 8192, "grid": True},
}


def model_of(cut: str = "whole") -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(d_model=64, n_layers=1, n_heads=2, d_ff=64, vocabulary=VOCABULARY))
    model.head.weight = model.embedding.weight
    if CUTS[cut].get("grid"):
        for layer in model.blocks:
            grid = infinity.TiledLinear(64, 128, False, 3, 4)
            grid.load_state_dict(layer.gate_up.state_dict())
            layer.gate_up = grid
    return model


@contextmanager
def engine_of(swap: Path, cut: str, device: str = "nvme") -> Iterator[Engine]:
    block = {key: value for key, value in CUTS[cut].items() if key != "grid"}
    with attached(model_of(cut), configure(swap, device, **block)) as engine:
        yield engine


def train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(0, VOCABULARY, (2, 2, 16), generator=generator)
        engine.backward(engine(x, y))
        engine.step()


def everything(engine: Engine) -> dict[str, Tensor]:
    found = dict(engine.state_dict())
    for name, parameter in engine.module.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {kind}"] = infinity.get_full_optimizer_state(parameter, kind)
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_from_one_cut_to_the_next(tmp_path: Path) -> None:
    """Everything stays as it is, by checkpoints or as weights; names in files are those of the module."""
    with engine_of(tmp_path / "first", "small tiles") as engine:
        train(engine, 0, 2)
        path = engine.save_checkpoint(tmp_path / "ckpt")
        saved, state = everything(engine), engine.state_dict()
        engine.save_pretrained(tmp_path / "out")
        train(engine, 2, 3)
        assert not same(saved, everything(engine))
        engine.load_checkpoint(tmp_path / "ckpt")
        assert same(saved, everything(engine))
    found = load_file(tmp_path / "out" / "model.safetensors")
    model = model_of()
    model.load_state_dict(found | {"head.weight": found["embedding.weight"]}, strict=True)
    assert same(state, model.state_dict())
    with Checkpoint(path) as checkpoint:
        parameters = checkpoint.manifest.parameters
        assert parameters.keys() == dict(model.named_parameters()).keys()
        assert {name: tuple(value.shape) for name, value in model.named_parameters()} == {
            name: tuple(parameter.shape) for name, parameter in parameters.items()
        }
        assert len(parameters["embedding.weight"].tiles) == 6
        assert parameters["embedding.weight"].also == ["head.weight"]
        assert len({tile.low[1] for tile in parameters["blocks.0.qkv.weight"].tiles}) == 2
    for target in ("a grid", "whole"):
        with engine_of(tmp_path / target, target, "cpu") as engine:
            engine.load_weights(path)
            assert same(state, engine.state_dict())
            engine.load_checkpoint(tmp_path / "ckpt")
            assert engine.global_steps == 2
            assert same(saved, everything(engine))
            path = engine.save_checkpoint(tmp_path / "ckpt", target.replace(" ", "-"))


@pytest.mark.slow
@pytest.mark.parametrize("source", CUTS)
@pytest.mark.parametrize("target", CUTS)
def test_any_cut_is_taken_up_by_any_other(tmp_path: Path, source: str, target: str) -> None:
    with engine_of(tmp_path / "a", source) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        saved = everything(engine)
        train(engine, 2, 3)
        final = everything(engine)
    with engine_of(tmp_path / "b", target, "cpu") as engine:
        engine.load_checkpoint(tmp_path / "ckpt")
        assert same(saved, everything(engine))
        if source == target:
            train(engine, 2, 3)
            assert same(final, everything(engine))


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_weights_leave_and_come_back_under_their_names(tmp_path: Path, cut: str) -> None:
    with engine_of(tmp_path / "a", cut) as engine:
        train(engine, 0, 1)
        state = engine.state_dict()
        engine.save_pretrained(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(value, state[name]) for name, value in found.items())
    with engine_of(tmp_path / "b", cut, "cpu") as engine:
        engine.load_weights(tmp_path / "out")
        assert same(state, engine.state_dict())


sizes = st.integers(1, 9)


@settings(max_examples=200, deadline=None)
@given(sizes, sizes, st.tuples(sizes, sizes), st.tuples(sizes, sizes), st.integers(1, 90))
def test_a_piece_is_read_from_pieces_of_any_cut(
    rows: int, columns: int, cut: tuple[int, int], other: tuple[int, int], window: int
) -> None:
    matrix = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)

    def pieces(splits: tuple[int, int]) -> list[Piece]:
        return [Piece("", (rows, columns), 0, 0, start, stop) for start, stop in tiles_of((rows, columns), splits)]

    asked: list[int] = []

    def counted(number: int, read: Reader) -> Reader:
        def reader(start: int, into: Tensor) -> None:
            asked.append(number)
            read(start, into)

        return reader

    sources = [(p, counted(number, reader_of(matrix[p.region]))) for number, p in enumerate(pieces(cut))]
    for piece in pieces(other):
        found = torch.full((matrix[piece.region].numel(),), -1.0)
        read = piece_reader(piece, sources)
        for start in range(0, found.numel(), window):
            asked.clear()
            read(start, found[start : start + window])
            assert asked == sorted(asked)
            assert other != (1, 1) or len(asked) == len(set(asked))  # a whole row of a source comes in one read
        read(found.numel(), found[found.numel() :])
        assert torch.equal(found.view(piece.tile_shape), matrix[piece.region])


def test_columns_are_read_with_what_is_between_them() -> None:
    whole, reads = torch.arange(64.0 * 32).view(64, 32), []

    def read(start: int, into: torch.Tensor) -> None:
        reads.append(into.numel())
        into.copy_(whole.view(-1)[start : start + into.numel()])

    for columns, expected in ((8, [63 * 32 + 8]), (4, [4] * 64)):
        piece = Piece("w", (64, 32), 0, 0, (0, 8), (64, 8 + columns))
        found = torch.empty(64 * columns)
        reads.clear()
        piece_reader(piece, [(Piece("w", (64, 32), 0, 0, (0, 0), (64, 32)), read)])(0, found)
        assert torch.equal(found.view(64, columns), whole[:, 8 : 8 + columns])
        assert reads == expected, "once, unless most of it would be thrown away"


def test_tiles_that_do_not_fit_together_are_damage(tmp_path: Path) -> None:
    with engine_of(tmp_path / "a", "tiles") as engine:
        path = engine.save_checkpoint(tmp_path / "ckpt")
    with Checkpoint(str(path)) as checkpoint:
        manifest = checkpoint.manifest
    wide = manifest.parameters["blocks.0.qkv.weight"]
    assert manifest.problems() == []

    def told(tiles: list[SavedTile]) -> list[str]:
        changed = wide.model_copy(update={"tiles": tiles})
        known: Manifest = manifest.model_copy(
            update={"parameters": {**manifest.parameters, "blocks.0.qkv.weight": changed}}
        )
        return known.problems()

    first, *others = wide.tiles
    assert len(others) == 5
    partial = ["the tiles of blocks.0.qkv.weight are not all of it, each element once"]
    assert told(others) == told([*others, first]) == told([first, first, *others]) == partial
    for low, high in (
        ([0, 0], [32, 65]),
        ([0, 1], [32, 64]),
        ([0, 0], [33, 64]),
        ([0, 0], [0, 64]),
        ([32, 0], [0, 64]),
    ):
        assert told([first.model_copy(update={"low": low, "high": high}), *others]) == partial
    nowhere = first.model_copy(update={"unit": 10_000})
    assert told([nowhere, *others]) == [f"blocks.0.qkv.weight is in unit 10000 of {len(manifest.units)}"]
    behind = first.model_copy(update={"start": 1 << 40})
    assert told([behind, *others]) == ["blocks.0.qkv.weight ends behind the end of its unit"]
