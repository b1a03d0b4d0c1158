"""What an update does to the values of one sub-group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity._native.cpu_adam import Kernels
from infinity.errors import ScheduleError
from infinity.optim.updater import SubGroup
from infinity.tier import StateKind

Values = dict[StateKind, torch.Tensor]


class AdamRule:
    """Adam by the native kernels, one pass over memory."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, group: SubGroup, values: Values) -> None:
        master, copy = _master_and_copy(values)
        for piece in group.pieces:
            here = slice(piece.start, piece.stop)
            self._kernels.adam(
                master[here],
                values[StateKind.EXP_AVG][here],
                values[StateKind.EXP_AVG_SQ][here],
                values[StateKind.GRAD][here],
                None if copy is None else copy[here],
                piece.step,
            )


@dataclass(frozen=True)
class TorchStep:
    """One parameter's part in a step of a torch optimizer: its slot, its group with the numbers of that moment."""

    slot: int
    group: int
    grad_scale: float
    numbers: dict[str, Any] = field(hash=False)


class TorchRule:
    """Any torch optimizer, run on whole units.

    It holds stand-ins that have a parameter's shape, and its values only while its unit is updated. What it remembers
    about a parameter stays in RAM, outside the budgets.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stand_ins: dict[tuple[int, int], nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._stand_ins = stand_ins

    @property
    def name(self) -> str:
        """The optimizer's class name."""
        return type(self._optimizer).__name__

    def state_of(self, unit: int, slot: int) -> dict[str, Any]:
        """What the optimizer remembers about one parameter; empty if nothing."""
        stand_in = self._stand_ins.get((unit, slot))
        return {} if stand_in is None else dict(self._optimizer.state.get(stand_in, {}))

    def set_state(self, unit: int, slot: int, state: dict[str, Any]) -> None:
        """Replaces what the optimizer remembers about one parameter."""
        stand_in = self._stand_ins.get((unit, slot))
        if stand_in is not None:
            self._optimizer.state[stand_in] = dict(state)

    def __call__(self, group: SubGroup, values: Values) -> None:
        master, copy = _master_and_copy(values)
        slots = group.unit.layout.slots
        for piece in group.pieces:
            step: TorchStep = piece.step
            slot, stand_in = slots[step.slot], self._stand_ins[group.unit.index, step.slot]
            stand_in.data = master[slot.offset : slot.stop].view(slot.shape)
            stand_in.grad = values[StateKind.GRAD][slot.offset : slot.stop].mul_(step.grad_scale).view(slot.shape)
        given = {piece.step.group: piece.step.numbers for piece in group.pieces}
        for number, numbers in given.items():
            self._optimizer.param_groups[number].update(numbers)
        self._optimizer.step()
        self._check_groups(given)
        for piece in group.pieces:
            stand_in = self._stand_ins[group.unit.index, piece.step.slot]
            stand_in.grad = None
            stand_in.data = shape_alone(tuple(stand_in.shape))
            if copy is not None:
                copy[piece.start : piece.stop].copy_(master[piece.start : piece.stop])

    def _check_groups(self, given: dict[int, dict[str, Any]]) -> None:
        """Raises if the optimizer remembers something in a group, which its next unit would not be told."""
        for number, numbers in given.items():
            for name, value in numbers.items():
                if self._optimizer.param_groups[number][name] is not value:
                    raise ScheduleError(
                        f'{type(self._optimizer).__name__} changed "{name}" of a parameter group in its step. It is '
                        "run unit by unit, so it can only remember what belongs to one parameter; use another"
                    )


def shape_alone(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of ``shape`` that takes the memory of one element."""
    return torch.zeros(1).expand(shape) if shape else torch.zeros(())


def _master_and_copy(values: Values) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fp32 values to update with the 16-bit copy to refresh; an fp32 unit has no copy."""
    if StateKind.MASTER in values:
        return values[StateKind.MASTER], values[StateKind.PARAM]
    return values[StateKind.PARAM], None


def torch_optimizer(
    kind: type[torch.optim.Optimizer], arguments: dict[str, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """An optimizer of class ``kind`` over stand-ins for the parameters of ``groups``."""
    stand_ins = [
        {**group, "params": [nn.Parameter(shape_alone(tuple(p.shape)), p.requires_grad) for p in group["params"]]}
        for group in groups
    ]
    return kind(stand_ins, **arguments)
