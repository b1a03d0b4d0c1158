"""Full values of single parameters, whatever tier they are on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from infinity.engine.placeholder import LentParameter, OffloadedParameter
from infinity.engine.runtime import Runtime
from infinity.engine.tiled_parameter import TiledParameter, gathered_tiles
from infinity.errors import OffloadedError
from infinity.tier import StateKind


def _owner(parameter: torch.Tensor) -> Runtime:
    owner = getattr(parameter, "_owner", None)
    if not isinstance(parameter, OffloadedParameter) or not isinstance(owner, Runtime):
        raise OffloadedError(
            f"expected a parameter of a model that infinity.initialize attached, given a {type(parameter).__name__} of "
            f"shape {tuple(parameter.shape)}"
        )
    owner.check()
    return owner


def _read(parameter: LentParameter, kind: StateKind) -> torch.Tensor:
    owner = _owner(parameter)
    with owner.alone(), owner.watched():
        return _joined(parameter, [owner.homes.read(kind, index, slot) for index, slot in parameter.places])


def _joined(parameter: LentParameter, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole of what is kept in tiles."""
    if not isinstance(parameter, TiledParameter):
        return parts[0]
    whole = torch.empty(tuple(parameter.shape), dtype=parts[0].dtype)
    for piece, part in zip(parameter._pieces, parts, strict=True):
        whole[piece.region] = part
    return whole


def get_full_param(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of the parameter's most precise value, fp32 if it is floating, on the CPU. Waits for updates under way.

    With several ranks all of these functions are collectives: every rank calls them, every rank gets the whole value.
    """
    owner = _owner(parameter)
    assert isinstance(parameter, LentParameter)
    owner.settle()
    unit = owner.units[parameter._place[0]].unit
    kind = StateKind.MASTER if owner.homes.placement.has(StateKind.MASTER, unit) else StateKind.PARAM
    value = _read(parameter, kind)
    return value.float() if value.is_floating_point() else value


def set_full_param(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the parameter's value, its fp32 master included. ``value`` has its shape, any floating dtype.

    With several ranks all call it; the value that rank 0 gives is taken.
    """
    owner = _owner(parameter)
    assert isinstance(parameter, LentParameter)
    if tuple(value.shape) != tuple(parameter.shape):
        raise ValueError(
            f"{parameter._name} has shape {tuple(parameter.shape)}; the value given has {tuple(value.shape)}"
        )
    if owner.homes.group.world_size > 1:
        common = torch.float64 if value.is_floating_point() else parameter.dtype
        value = value.detach().to("cpu", common, copy=True)
        owner.homes.group.broadcast(f"the value of {parameter._name}", value, 0)
    _set(owner, parameter, value)


def _set(owner: Runtime, parameter: LentParameter, value: torch.Tensor) -> None:
    tiles = parameter._pieces if isinstance(parameter, TiledParameter) else ()
    regions = [piece.region for piece in tiles] or [()]
    with owner.alone(), torch.no_grad(), owner.watched():
        owner.settle()
        for (index, slot), region in zip(parameter.places, regions, strict=True):
            unit, part = owner.units[index].unit, value.detach()[region]
            owner.units[index].changed()
            for kind in (StateKind.PARAM, StateKind.MASTER):
                if owner.homes.placement.has(kind, unit):
                    owner.homes.write(kind, index, slot, part)
        owner.params.drop_all()


def get_full_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of this step so far, averaged over micro-batches and ranks, unscaled: fp32 on the CPU, or None."""
    owner = _owner(parameter)
    assert isinstance(parameter, LentParameter)
    if not owner.units[parameter._place[0]].unit.trainable:
        return None
    with owner.alone(), owner.watched():
        parts = [owner.grads.read(index, slot) for index, slot in parameter.places]
    found = [part for part in parts if part is not None]
    return _joined(parameter, found) / owner.loss_scale() if len(found) == len(parts) else None


def get_full_optimizer_state(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """A copy of ``exp_avg`` or ``exp_avg_sq``: fp32 on the CPU, in the parameter's shape."""
    owner = _owner(parameter)
    assert isinstance(parameter, LentParameter)
    kinds = {kind.value: kind for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)}
    if name not in kinds:
        raise ValueError(f'optimizer state "{name}" does not exist; expected one of {", ".join(kinds)}')
    if not owner.units[parameter._place[0]].unit.trainable:
        raise OffloadedError(f"{parameter._name} is frozen; it has no optimizer state")
    owner.settle()
    return _read(parameter, kinds[name])


@contextmanager
def gathered(
    parameters: torch.Tensor | nn.Module | Iterable[torch.Tensor], modifier_rank: int | None = None
) -> Iterator[None]:
    """Inside, the given parameters (or a module's) have real values, in RAM outside the budgets.

    In-place changes are kept, fp32 masters included: those of ``modifier_rank``, or of the only rank.
    """
    members: Iterable[torch.Tensor]
    if isinstance(parameters, nn.Module):
        members = parameters.parameters()
    else:
        members = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    offloaded = [p for p in dict.fromkeys(members) if isinstance(p, LentParameter)]
    if not offloaded:
        yield
        return
    owner = _owner(offloaded[0])
    group = owner.homes.group
    if modifier_rank is not None and group.world_size > 1 and not 0 <= modifier_rank < group.world_size:
        raise ValueError(f"modifier_rank is {modifier_rank}; expected a rank from 0 to {group.world_size - 1}")
    owner.settle()
    values = [nn.Parameter(_read(p, StateKind.PARAM), requires_grad=p.requires_grad) for p in offloaded]
    pairs = list(zip(offloaded, values, strict=True))
    versions = {placeholder: value._version for placeholder, value in pairs}
    tiled = {p: value for p, value in pairs if isinstance(p, TiledParameter)}
    whole = {p: value for p, value in pairs if not isinstance(p, TiledParameter)}
    with owner.shown(list(whole), list(whole.values())), gathered_tiles(tiled):
        yield
    for placeholder, value in zip(offloaded, values, strict=True):
        if group.world_size > 1:
            if modifier_rank is None:
                if value._version != versions[placeholder]:
                    raise OffloadedError(
                        f"{placeholder._name} was changed inside infinity.gathered, but with {group.world_size} ranks "
                        "changes are kept only of the rank that modifier_rank names; pass modifier_rank=0"
                    )
                continue
            group.broadcast(f"the value of {placeholder._name}", value, modifier_rank)
        if not torch.equal(_read(placeholder, StateKind.PARAM), value):
            _set(owner, placeholder, value.detach())


def full_state(module: nn.Module, owner: Runtime) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter in fp32 and every persistent buffer, one at a time, tied names included."""
    with owner.alone():  # no call of another thread shows lent values in the module tree now
        members = [
            (f"{path}.{name}" if path else name, value)
            for path, child in module.named_modules(remove_duplicate=False)
            for name, value in [*child._parameters.items(), *child._buffers.items()]
            if value is not None and name not in child._non_persistent_buffers_set
        ]
    for name, value in members:
        yield name, get_full_param(value) if isinstance(value, nn.Parameter) else value.detach().cpu().clone()
