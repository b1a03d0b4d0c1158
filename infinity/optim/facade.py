"""The optimizer that users hold: parameter groups in front, the updater behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from infinity._native.cpu_adam import AdamStep
from infinity.errors import OffloadedError
from infinity.optim.rules import TorchStep

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled": True,
    "bias_correction": True,
}

UNCORRECTED_STEP = 1 << 40
"""A step so late that 1 - beta**step is 1 in double precision for every usable beta: no bias correction."""


class StreamedOptimizer(torch.optim.Optimizer):
    """An optimizer whose parameters live on their tiers; ``step`` and ``zero_grad`` act on the engine.

    ``param_groups`` are torch's: change ``lr`` or any other number of a group at any time, from a scheduler or by hand.
    """

    def __init__(
        self,
        groups: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        on_step: Callable[[], None],
        on_zero_grad: Callable[[], None],
    ) -> None:
        self._on_step = on_step
        self._on_zero_grad = on_zero_grad
        super().__init__(groups, defaults)
        self._is_complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are given to ``infinity.initialize``: which parameters are trained decides what is allocated."""
        if self.__dict__.get("_is_complete"):
            raise OffloadedError(
                "add_param_group: the states of an offloaded model are allocated by infinity.initialize. Give it every "
                "group, those to be trained later with lr=0"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The numbers of the groups, as long as no step was taken; the states are on their tiers."""
        if self.__dict__.get("_opt_called"):
            raise OffloadedError(
                "state_dict: the states of this optimizer are on their tiers and would be missing. Read each with "
                "infinity.get_full_optimizer_state(p, name), the numbers of the groups from optimizer.param_groups"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the numbers of the groups; states of another run cannot be put onto the tiers by this way."""
        if state_dict["state"]:
            raise OffloadedError(
                "load_state_dict: the states of this optimizer are on their tiers, so those given would be dropped"
            )
        super().load_state_dict(state_dict)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The engine's step; a closure is called first, as torch does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._on_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients gathered so far."""
        self._on_zero_grad()

    def arguments(self, slot: int, group: int, step: int, grad_scale: float) -> Any:
        """The numbers that one update of a member of ``group`` needs, as they are now."""
        numbers = {
            name: value.clone() if isinstance(value, torch.Tensor) else value  # a scheduler writes to a tensor in place
            for name, value in self.param_groups[group].items()
            if name != "params"
        }
        return TorchStep(slot, group, grad_scale, numbers)


class StreamedAdam(StreamedOptimizer):
    """Adam or AdamW whose states live on their tiers too."""

    def arguments(self, slot: int, group: int, step: int, grad_scale: float) -> AdamStep:
        values = self.param_groups[group]
        if not values["bias_correction"]:
            step = UNCORRECTED_STEP
        return AdamStep(
            lr=float(values["lr"]),
            beta1=float(values["betas"][0]),
            beta2=float(values["betas"][1]),
            eps=float(values["eps"]),
            weight_decay=float(values["weight_decay"]),
            step=step,
            decoupled=bool(values["decoupled"]),
            grad_scale=grad_scale,
        )


def group_problems(number: int, given: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Every number of a parameter group that the streamed Adam cannot work with."""
    group = {**DEFAULTS, **defaults, **given}
    wrong = []
    for flag in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(flag):
            wrong.append(f"parameter group {number}: {flag}=True is not supported by the streamed Adam; leave it False")
    beta1, beta2 = group["betas"]
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        wrong.append(f"parameter group {number}: betas={group['betas']}; expected two numbers in [0, 1)")
    for name in ("lr", "eps", "weight_decay"):
        if float(group[name]) < 0:
            wrong.append(f"parameter group {number}: {name}={group[name]}; expected a number that is not negative")
    return wrong
