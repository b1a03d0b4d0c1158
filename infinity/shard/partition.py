"""Splits a model's parameters into units by looking at the module tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.shard.layout import FlatLayout, flat_layout
from infinity.shard.tiles import WHOLE, Piece, Splits, TiledMatrix, splits_for, tiles_of, whole_piece

LARGE_LEAF_NUMEL = 1 << 16
"""A childless module outside every block that owns at least this many parameters is a unit of its own."""

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Unit:
    """Parameters of one dtype that are trained, or frozen, together; they move as one flat buffer.

    ``homes[i]`` lists every ``(module path, attribute)`` under which slot ``i`` is known, the first being its own. A
    unit that is a tile has no home: it is a part of what modules know, which ``Partition.tiled`` describes.
    """

    index: int
    name: str
    layout: FlatLayout
    trainable: bool
    homes: tuple[tuple[tuple[str, str], ...], ...]

    @property
    def numel(self) -> int:
        return self.layout.used_numel


@dataclass(frozen=True)
class Entry:
    """A module whose call needs units: its own, and those it shares by tied weights."""

    path: str
    units: tuple[int, ...]
    is_block: bool


@dataclass(frozen=True)
class Partition:
    """All units in memory order, all entries, parents before children, the matrices that are cut into tiles."""

    units: tuple[Unit, ...]
    entries: tuple[Entry, ...]
    tiled: tuple[TiledMatrix, ...] = ()

    @property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Every parameter by the name its user knows, with the places where its elements are; tied ones once."""
        tiles = {(piece.unit, piece.slot) for matrix in self.tiled for piece in matrix.pieces}
        found = {
            slot.name: (whole_piece(slot.shape, slot.name, unit.index, number),)
            for unit in self.units
            for number, slot in enumerate(unit.layout.slots)
            if (unit.index, number) not in tiles
        }
        return found | {matrix.name: matrix.pieces for matrix in self.tiled}

    @property
    def names(self) -> dict[str, list[str]]:
        """Every name of each parameter, by its own, which is the first."""
        cut = {piece.unit for matrix in self.tiled for piece in matrix.pieces}
        whole = [unit for unit in self.units if unit.index not in cut]
        homes = {slot.name: homes for unit in whole for slot, homes in zip(unit.layout.slots, unit.homes, strict=True)}
        homes |= {matrix.name: matrix.homes for matrix in self.tiled}
        return {
            name: [f"{path}.{attribute}" if path else attribute for path, attribute in places]
            for name, places in homes.items()
        }

    @property
    def parameters(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def trained_parameters(self) -> int:
        return sum(unit.numel for unit in self.units if unit.trainable)


def partition(
    model: nn.Module,
    units: str | Sequence[str] = "auto",
    dtype: torch.dtype | None = None,
    world_size: int = 1,
    tile_bytes: int | None = None,
) -> Partition:
    """Finds the units of ``model``, which may be on the meta device; nothing is allocated.

    ``units`` is ``"auto"`` (children of one class in a list or sequence, embeddings, linears, large leaves) or a list
    of class names and name patterns. ``dtype`` is what floating parameters will be computed in, None for their own.
    A linear or embedding weight of more than ``tile_bytes`` in that dtype is cut into units of at most so many bytes;
    with None only those are that ask for it themselves, such as ``TiledLinear``.
    """
    blocks, leaves = _named_units(model, units) if units != "auto" else _found_units(model)
    entry_paths = ["", *[path for path, _ in model.named_modules() if path in blocks or path in leaves]]
    if "" in blocks or "" in leaves:
        entry_paths = entry_paths[1:]
    members: dict[str, list[tuple[str, nn.Parameter]]] = {path: [] for path in entry_paths}
    homes: dict[int, list[tuple[str, str]]] = {}
    visitors: dict[int, list[str]] = {}
    splits: dict[int, Splits] = {}
    for module_path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            entry = _innermost(module_path, members)
            if id(parameter) not in homes:
                homes[id(parameter)] = []
                compute = compute_dtype(parameter, dtype)
                splits[id(parameter)] = splits_for(
                    module, attribute, tuple(parameter.shape), compute.itemsize, tile_bytes
                )
                members[entry].append((f"{module_path}.{attribute}" if module_path else attribute, parameter))
            homes[id(parameter)].append((module_path, attribute))
            visitors.setdefault(id(parameter), []).append(entry)

    found: list[Unit] = []
    tiled: list[TiledMatrix] = []
    lends: dict[str, list[int]] = {path: [] for path in entry_paths}
    for path in entry_paths:
        kept = [(name, p) for name, p in members[path] if splits[id(p)] == WHOLE]
        for (compute, trainable), group in _homogeneous(kept, dtype).items():
            layout = flat_layout([(name, tuple(p.shape)) for name, p in group], compute, world_size)
            name = path or "(root)"
            if len(lends[path]) > 0:
                name += f"#{len(lends[path])}"
            unit = Unit(len(found), name, layout, trainable, tuple(tuple(homes[id(p)]) for _, p in group))
            found.append(unit)
            for _, parameter in group:
                for visitor in visitors[id(parameter)]:
                    if unit.index not in lends[visitor]:
                        lends[visitor].append(unit.index)
        cut = [(name, p) for name, p in members[path] if splits[id(p)] != WHOLE]
        for (compute, trainable), group in _homogeneous(cut, dtype).items():
            for name, parameter in group:
                shape = tuple(parameter.shape)
                units_of, pieces = _tiles(name, shape, splits[id(parameter)], compute, trainable, world_size, found)
                found += units_of
                tiled.append(TiledMatrix(name, shape, trainable, tuple(homes[id(parameter)]), pieces))
    entries = tuple(
        Entry(path, tuple(lends[path]), path in blocks)
        for path in entry_paths
        if lends[path] or path == "" or path in blocks  # of a leaf that is all tiles nothing is left to lend
    )
    return Partition(tuple(found), entries, tuple(tiled))


def _tiles(
    name: str,
    shape: tuple[int, ...],
    splits: Splits,
    dtype: torch.dtype,
    trainable: bool,
    world_size: int,
    before: Sequence[Unit],
) -> tuple[list[Unit], tuple[Piece, ...]]:
    """One unit per tile of a matrix, numbered after the units ``before`` it."""
    units: list[Unit] = []
    pieces: list[Piece] = []
    for start, stop in tiles_of(shape, splits):
        tile_name = f"{name}[{start[0]}:{stop[0]}, {start[1]}:{stop[1]}]"
        piece = Piece(name, shape, len(before) + len(units), 0, start, stop)
        layout = flat_layout([(tile_name, piece.tile_shape)], dtype, world_size)
        units.append(Unit(piece.unit, tile_name, layout, trainable, ((),)))
        pieces.append(piece)
    return units, tuple(pieces)


def compute_dtype(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a parameter is computed in: floating ones follow ``dtype`` where it is given."""
    return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype


def _homogeneous(
    members: list[tuple[str, nn.Parameter]], dtype: torch.dtype | None
) -> dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]]:
    groups: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in members:
        compute = compute_dtype(parameter, dtype)
        if parameter.requires_grad and compute not in TRAINABLE_DTYPES:
            raise ConfigError(
                f"parameter {name} is {compute} and requires a gradient; trained parameters must be float32, bfloat16 "
                "or float16. Convert it, freeze it with requires_grad_(False), or set bf16.enabled"
            )
        groups.setdefault((compute, parameter.requires_grad), []).append((name, parameter))
    return groups


def _innermost(module_path: str, entries: dict[str, list[tuple[str, nn.Parameter]]]) -> str:
    path = module_path
    while path not in entries:
        if path == "":
            raise AssertionError(f"{module_path} has no enclosing entry")
        path = path.rpartition(".")[0]
    return path


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _found_units(model: nn.Module) -> tuple[set[str], set[str]]:
    blocks: set[str] = set()
    leaves: set[str] = set()

    def walk(path: str, module: nn.Module) -> None:
        children = [(name, child) for name, child in module.named_children() if _owns_parameters(child)]
        repeated: set[type] = set()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            counts = Counter(type(child) for _, child in children if _has_forward(child))
            repeated = {kind for kind, count in counts.items() if count > 1}
        for name, child in children:
            below = f"{path}.{name}" if path else name
            if type(child) in repeated:
                blocks.add(below)
            elif next(child.children(), None) is None:
                large = sum(p.numel() for p in child.parameters()) >= LARGE_LEAF_NUMEL
                if isinstance(child, (nn.Embedding, nn.Linear)) or large:
                    leaves.add(below)
            else:
                walk(below, child)

    walk("", model)
    return blocks, leaves


def _named_units(model: nn.Module, patterns: Sequence[str]) -> tuple[set[str], set[str]]:
    blocks: set[str] = set()
    for pattern in patterns:
        matched = {
            path
            for path, module in model.named_modules()
            if (type(module).__name__ == pattern or fnmatchcase(path, pattern))
            and _has_forward(module)
            and _owns_parameters(module)
        }
        if not matched:
            usable = [module for module in model.modules() if _has_forward(module) and _owns_parameters(module)]
            names = sorted({type(module).__name__ for module in usable})
            raise ConfigError(
                f'infinity.units: "{pattern}" matches no module that has a forward and parameters; expected a class '
                f"name ({', '.join(names[:12])}{', ...' if len(names) > 12 else ''}) or a module name pattern such as "
                '"layers.*"'
            )
        blocks |= matched
    return blocks, set()
