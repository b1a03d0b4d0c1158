"""Moves a model's parameters onto their tiers, leaving placeholders in its modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from infinity.engine.bound_unit import BoundUnit
from infinity.engine.homes import Homes
from infinity.engine.materialize import initial_value, release_initial_value
from infinity.engine.placeholder import OWN_ATTRIBUTES, LentParameter, OffloadedParameter
from infinity.engine.tiled_parameter import TiledParameter, TiledParameters
from infinity.errors import ConfigError, OffloadedError
from infinity.shard.partition import Partition
from infinity.tier import StateKind


def check_parameters(model: nn.Module) -> None:
    """Raises ``ConfigError`` with every parameter that cannot be moved away from its Python object."""
    problems = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, LentParameter):
            raise ConfigError(
                f"parameter {name} belongs to an engine already: end that one with engine.destroy(restore_parameters="
                "True), or build the model anew"
            )
        if isinstance(parameter, UninitializedParameter):
            problems.append(f"parameter {name} has no shape yet: run one forward before infinity.initialize")
        elif getattr(parameter, "_post_accumulate_grad_hooks", None):
            problems.append(
                f"parameter {name} has a hook of register_post_accumulate_grad_hook; its gradient will be on another "
                "tier, where the hook cannot see it. Remove it, or use register_hook"
            )
    if problems:
        raise ConfigError(problems)


def bind_units(model: nn.Module, partition: Partition, device: torch.device) -> list[BoundUnit]:
    """Units with placeholders and the places in ``model`` where each parameter is seen; nothing is moved yet."""
    modules = dict(model.named_modules())
    bound = []
    tiles: dict[int, TiledParameter] = {}
    for matrix in partition.tiled:
        homes = [(modules[home]._parameters, name) for home, name in matrix.homes]
        parameter = homes[0][0][homes[0][1]]
        first = matrix.pieces[0]
        dtype = partition.units[first.unit].layout.dtype
        tiled = TiledParameter(
            matrix.shape, dtype, device, parameter.requires_grad, matrix.name, _NOBODY, (first.unit, first.slot)
        )
        tiled._hooks = parameter._backward_hooks or OrderedDict()
        tiled.adopt(matrix.pieces, homes)
        tiles |= {piece.unit: tiled for piece in matrix.pieces}
    for unit in partition.units:
        if unit.index in tiles:
            bound.append(BoundUnit(unit, [tiles[unit.index]], [[]]))
            continue
        placeholders: list[LentParameter] = []
        all_homes = []
        for number, (slot, slot_homes) in enumerate(zip(unit.layout.slots, unit.homes, strict=True)):
            path, attribute = slot_homes[0]
            parameter = modules[path]._parameters[attribute]
            assert parameter is not None
            placeholder = LentParameter(
                slot.shape, unit.layout.dtype, device, parameter.requires_grad, slot.name, _NOBODY, (unit.index, number)
            )
            placeholder._hooks = parameter._backward_hooks or OrderedDict()
            placeholders.append(placeholder)
            all_homes.append([(modules[home]._parameters, name) for home, name in slot_homes])
        bound.append(BoundUnit(unit, placeholders, all_homes))
    return bound


def tiled_parameters(bound: Sequence[BoundUnit]) -> TiledParameters:
    """Every parameter that is cut into tiles, once."""
    found = {id(p): p for unit in bound for p in unit.placeholders if isinstance(p, TiledParameter)}
    return TiledParameters(found.values())


class _Nobody:
    """Owner of placeholders while a model is being attached."""

    def _refuse(self, *arguments: object) -> None:
        raise OffloadedError(
            "a parameter's values were being moved to their tier when infinity.initialize failed, so they are lost; "
            "build the model again"
        )

    frames = ()
    touched = operate = gradient = set_gradient = may_require_grad = _refuse


_NOBODY = _Nobody()


def store_values(
    bound: list[BoundUnit],
    homes: Homes,
) -> None:
    """Writes every parameter to its tier, in compute dtype and as fp32 master, freeing the original as it goes.

    With several ranks they are the values of rank 0, whatever random numbers the others began with.

    Afterwards each original Python object is the placeholder, so that references kept elsewhere (an optimizer's
    groups, a list of the user's) go on meaning the same parameter.
    """
    for tiled in tiled_parameters(bound):
        parameters, name = tiled._homes[0]
        original = parameters[name]
        with torch.no_grad():
            _store_tiles(initial_value(original), tiled, bound, homes)
        release_initial_value(original)
        replaced = _replace(original, tiled)
        assert isinstance(replaced, TiledParameter)
        for piece in replaced._pieces:
            bound[piece.unit].placeholders[piece.slot] = replaced
        replaced.show(replaced)
    for unit in bound:
        if isinstance(unit.placeholders[0], TiledParameter):
            continue
        originals = [parameters[name] for homes in unit.homes for parameters, name in homes[:1]]
        index = unit.unit.index
        kinds = [kind for kind in (StateKind.PARAM, StateKind.MASTER) if homes.placement.has(kind, unit.unit)]
        writers = [(homes.writer(kind, index), homes.unit(kind, index).layout.slots) for kind in kinds]
        for number, original in enumerate(originals):
            with torch.no_grad():
                value = initial_value(original).reshape(-1)
                homes.group.broadcast(f"the initial value of {unit.placeholders[number]._name}", value, 0)
                for writer, slots in writers:
                    writer.write(slots[number], value)
            del value
            release_initial_value(original)
            unit.placeholders[number] = _replace(original, unit.placeholders[number])
            for parameters, name in unit.homes[number]:
                parameters[name] = unit.placeholders[number]
        for writer, _ in writers:
            writer.close()


def _store_tiles(
    value: torch.Tensor,
    tiled: TiledParameter,
    bound: list[BoundUnit],
    homes: Homes,
) -> None:
    homes.group.broadcast(f"the initial value of {tiled._name}", value, 0)
    for piece in tiled._pieces:
        unit = bound[piece.unit].unit
        tile = value[piece.region].reshape(-1)
        for kind in (StateKind.PARAM, StateKind.MASTER):
            if homes.placement.has(kind, unit):
                writer = homes.writer(kind, piece.unit)
                writer.write(homes.unit(kind, piece.unit).layout.slots[piece.slot], tile)
                writer.close()


def _replace(original: nn.Parameter, placeholder: LentParameter) -> LentParameter:
    """Makes ``original`` itself the placeholder where torch allows it; frees its values in any case."""
    spilled = isinstance(original, OffloadedParameter)
    placeholder.__dict__.update({k: v for k, v in original.__dict__.items() if k not in placeholder.__dict__})
    try:
        torch.utils.swap_tensors(original, placeholder)  # type: ignore[no-untyped-call]
    except RuntimeError:
        original.data = torch.empty(0, dtype=original.dtype, device=original.device)
        return placeholder
    if not spilled:
        placeholder.data = torch.empty(0, dtype=placeholder.dtype)
    return original  # type: ignore[return-value]


def restore_values(bound: Sequence[BoundUnit], homes: Homes) -> None:
    """Gives every module real parameters back, in RAM in the compute dtype."""
    uncut = [unit for unit in bound if not isinstance(unit.placeholders[0], TiledParameter)]
    for tiled in tiled_parameters(bound):
        whole = torch.empty(tiled.shape, dtype=tiled.dtype)
        for piece in tiled._pieces:
            whole[piece.region] = homes.read(StateKind.PARAM, piece.unit, piece.slot)
        _restore(tiled, whole, tiled._homes)
    for unit in uncut:
        for number, placeholder in enumerate(unit.placeholders):
            _restore(placeholder, homes.read(StateKind.PARAM, unit.unit.index, number), unit.homes[number])


def _restore(placeholder: LentParameter, value: torch.Tensor, homes: list[tuple[dict[str, Any], str]]) -> None:
    """Makes ``placeholder`` itself a real parameter where torch allows it, else puts one in its places."""
    real = nn.Parameter(value, requires_grad=placeholder.requires_grad)
    hooks = placeholder._hooks
    real.__dict__.update({k: v for k, v in placeholder.__dict__.items() if k not in OWN_ATTRIBUTES})
    try:
        torch.utils.swap_tensors(placeholder, real)  # type: ignore[no-untyped-call]
        real = placeholder
    except RuntimeError:  # something refers to the placeholder weakly
        for parameters, name in homes:
            parameters[name] = real
    if hooks:
        real._backward_hooks = hooks
