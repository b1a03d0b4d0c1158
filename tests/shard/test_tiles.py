"""However a matrix is cut, its tiles are all of it, once, under the name its user knows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.nn.tiled import TiledLinear
from infinity.shard.partition import Partition, partition
from infinity.shard.tiles import WHOLE, Piece, splits_for, tiles_of


class Conv1D(nn.Module):
    """What GPT-2 has for a linear: its weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), down=st.integers(1, 9), across=st.integers(1, 9),
    low=st.integers(0, 1600), high=st.integers(0, 1600),
)  # fmt: skip
def test_tiles_cover_a_matrix_once(rows: int, columns: int, down: int, across: int, low: int, high: int) -> None:
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    flat = torch.arange(rows * columns)
    for start, stop in tiles_of((rows, columns), (down, across)):
        piece = Piece("w", (rows, columns), 0, 0, start, stop)
        seen[piece.region] += 1
        tile = flat.view(rows, columns)[piece.region].reshape(-1)
        assert math.prod(piece.tile_shape) == tile.numel() > 0
        found = torch.full_like(tile, -1)
        for position, at, count in piece.runs():
            found[at : at + count] = flat[position : position + count]
        assert torch.equal(found, tile), "the runs say where in the flat parameter each element of the tile is"
        clipped = {
            at + k: position + k for position, at, count in piece.runs(low, high) for k in range(count) if count > 0
        }
        assert clipped == {at: int(position) for at, position in enumerate(tile) if low <= position < high}
    assert (seen == 1).all()


@given(out=st.integers(1, 3000), inputs=st.integers(1, 3000), log=st.integers(9, 18), size=st.sampled_from([2, 4]))
def test_no_tile_is_larger_than_asked_for(out: int, inputs: int, log: int, size: int) -> None:
    for module, attribute in ((nn.Linear(1, 1), "weight"), (nn.Embedding(1, 1), "weight"), (Conv1D(1, 1), "weight")):
        splits = splits_for(module, attribute, (out, inputs), size, 1 << log)
        tiles = tiles_of((out, inputs), splits)
        largest = max(math.prod(b - a for a, b in zip(*tile, strict=True)) for tile in tiles) * size
        if isinstance(module, nn.Embedding):
            assert splits[1] == 1
            assert largest <= max(1 << log, inputs * size)
        else:
            assert largest <= 1 << log


def test_what_is_cut() -> None:
    def cut(module: nn.Module, tile_bytes: int | None = 1 << 10) -> tuple[int, int]:
        return splits_for(module, "weight", tuple(module.weight.shape), 4, tile_bytes)  # type: ignore[arg-type]

    assert cut(nn.Linear(8, 64)) == (2, 1)
    assert cut(Conv1D(64, 8)) == (1, 2)
    assert cut(nn.Embedding(64, 8)) == (2, 1)
    assert cut(nn.Linear(8, 64), None) == WHOLE
    assert cut(nn.Linear(8, 32)) == WHOLE
    assert cut(nn.Embedding(64, 8, max_norm=1.0)) == WHOLE
    assert cut(nn.Embedding(64, 8, sparse=True)) == WHOLE
    assert cut(nn.Bilinear(8, 8, 64)) == WHOLE
    assert cut(nn.LayerNorm((64, 64))) == WHOLE
    assert cut(nn.MultiheadAttention(64, 1).out_proj) == WHOLE
    assert cut(nn.Linear(1024, 64)) == (2, 128), "8 inputs of 32 outputs: not thinner, so cut both ways"
    assert cut(TiledLinear(8, 64, True, 2, 4), None) == (4, 2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_pieces_give_every_parameter_by_its_name(dtype: torch.dtype | None) -> None:
    with torch.device("meta"):
        model: nn.Module = Decoder(DecoderConfig(d_model=64, n_layers=2, n_heads=2, d_ff=128))
    model.head.weight = model.embedding.weight
    model.blocks[1].requires_grad_(False)
    found = partition(model, dtype=dtype, tile_bytes=4096)
    check_pieces(model, found)
    assert len(found.pieces["blocks.0.qkv.weight"]) == 192 * 64 * (4 if dtype is None else 2) // 4096
    (tied,) = [matrix for matrix in found.tiled if matrix.name == "embedding.weight"]
    assert tied.homes == (("embedding", "weight"), ("head", "weight"))
    assert {entry.path for entry in found.entries} == {"", "blocks.0", "blocks.1"}, "of a leaf in tiles nothing is lent"
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    check_pieces(model, partition(model, dtype=dtype))


def check_pieces(model: nn.Module, found: Partition) -> None:
    assert list(found.pieces) or not list(model.parameters())
    assert {name: pieces[0].shape for name, pieces in found.pieces.items()} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    places = []
    for pieces in found.pieces.values():
        assert sum(math.prod(piece.tile_shape) for piece in pieces) == math.prod(pieces[0].shape)
        for piece in pieces:
            assert found.units[piece.unit].layout.slots[piece.slot].shape == piece.tile_shape
            places.append((piece.unit, piece.slot))
    assert sorted(places) == [(unit.index, slot) for unit in found.units for slot in range(len(unit.layout.slots))]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5)])
def test_a_whole_parameter_of_any_shape_is_one_run(shape: tuple[int, ...]) -> None:
    piece = Piece("p", shape, 0, 0, (0,) * len(shape), shape)
    assert piece.is_whole
    assert list(piece.runs()) == [(0, 0, math.prod(shape))]
    if shape:
        assert list(piece.runs(2, 5)) == [(2, 2, 3)]
