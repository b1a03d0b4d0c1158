"""What takes the place of an attached model's ``zero_grad``."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn


class Engine(Protocol):
    """What holds the gradients of ``module``."""

    module: nn.Module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops them."""
        ...


class ZeroGrad:
    """``zero_grad`` of an attached model; it does not keep the engine alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._module = engine.module
        self._module.__dict__["zero_grad"] = self

    def __call__(self, set_to_none: bool = True) -> None:
        engine = self._engine()
        if engine is not None:
            engine.zero_grad(set_to_none)

    def remove(self) -> None:
        """Gives the module its own ``zero_grad`` back."""
        del self._module.__dict__["zero_grad"]
