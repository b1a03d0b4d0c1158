"""Moves a model's parameters onto their tiers, leaving placeholders in its modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from infinity.engine.bound_unit import BoundUnit
from infinity.engine.materialize import initial_value, release_initial_value
from infinity.engine.placeholder import OWN_ATTRIBUTES, LentParameter, OffloadedParameter
from infinity.engine.streamed import FlatWriter, read_slot
from infinity.errors import ConfigError, OffloadedError
from infinity.plan.placement import Placement
from infinity.shard.partition import Partition
from infinity.storage.store import Store
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
    for unit in partition.units:
        placeholders: list[LentParameter] = []
        homes = []
        for number, (slot, slot_homes) in enumerate(zip(unit.layout.slots, unit.homes, strict=True)):
            path, attribute = slot_homes[0]
            parameter = modules[path]._parameters[attribute]
            assert parameter is not None
            placeholder = LentParameter(
                slot.shape, unit.layout.dtype, device, parameter.requires_grad, slot.name, _NOBODY, (unit.index, number)
            )
            placeholder._hooks = parameter._backward_hooks or OrderedDict()
            placeholders.append(placeholder)
            homes.append([(modules[home]._parameters, name) for home, name in slot_homes])
        bound.append(BoundUnit(unit, placeholders, homes))
    return bound


class _Nobody:
    """Owner of placeholders while a model is being attached."""

    def _refuse(self, *arguments: object) -> None:
        raise OffloadedError(
            "a parameter's values were being moved to their tier when infinity.initialize failed, so they are lost; "
            "build the model again"
        )

    touched = operate = gradient = set_gradient = may_require_grad = _refuse


_NOBODY = _Nobody()


def store_values(
    bound: list[BoundUnit],
    placement: Placement,
    stores: dict[StateKind, Store],
) -> None:
    """Writes every parameter to its tier, in compute dtype and as fp32 master, freeing the original as it goes.

    Afterwards each original Python object is the placeholder, so that references kept elsewhere (an optimizer's
    groups, a list of the user's) go on meaning the same parameter.
    """
    for unit in bound:
        originals = [parameters[name] for homes in unit.homes for parameters, name in homes[:1]]
        writers = [FlatWriter(stores[StateKind.PARAM], unit.unit, unit.unit.layout.dtype)]
        if placement.has(StateKind.MASTER, unit.unit):
            writers.append(FlatWriter(stores[StateKind.MASTER], unit.unit, torch.float32))
        for number, original in enumerate(originals):
            with torch.no_grad():
                value = initial_value(original).reshape(-1)
                for writer in writers:
                    writer.write(unit.unit.layout.slots[number], value)
            del value
            release_initial_value(original)
            unit.placeholders[number] = _replace(original, unit.placeholders[number])
            for parameters, name in unit.homes[number]:
                parameters[name] = unit.placeholders[number]
        for writer in writers:
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


def restore_values(bound: Sequence[BoundUnit], stores: dict[StateKind, Store]) -> None:
    """Gives every module real parameters back, in RAM in the compute dtype."""
    for unit in bound:
        for number, (slot, placeholder) in enumerate(zip(unit.unit.layout.slots, unit.placeholders, strict=True)):
            value = read_slot(stores[StateKind.PARAM], unit.unit, slot, unit.unit.layout.dtype)
            real = nn.Parameter(value, requires_grad=placeholder.requires_grad)
            hooks = placeholder._hooks
            real.__dict__.update({k: v for k, v in placeholder.__dict__.items() if k not in OWN_ATTRIBUTES})
            try:
                torch.utils.swap_tensors(placeholder, real)  # type: ignore[no-untyped-call]
                real = placeholder
            except RuntimeError:  # something refers to the placeholder weakly
                for parameters, name in unit.homes[number]:
                    parameters[name] = real
            if hooks:
                real._backward_hooks = hooks
