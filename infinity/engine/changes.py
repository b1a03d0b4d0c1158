"""Sees what a forward changed in its own module."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

BOOKKEEPING = frozenset(nn.Module().__dict__) | {"forward", "_flat_weights", "_flat_weight_refs"}
"""Attributes that are no state of the model: torch's own, those in which an RNN keeps its parameters a second time."""

_NOTHING = object()


@dataclass(frozen=True)
class Snapshot:
    """Buffers and plain attributes of a module and of every module in it, as they were."""

    values: list[dict[str, Any]]


class ModuleState:
    """What a forward of ``module`` could change about itself."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._watched = [member for member in self._modules if member._buffers or not _is_torchs_own(member)]

    def mode(self) -> tuple[bool, ...]:
        """What of the modules is in training mode."""
        return tuple(module.training for module in self._modules)

    @contextmanager
    def in_mode(self, mode: tuple[bool, ...]) -> Iterator[None]:
        """Puts the modules into the training mode that ``mode()`` was."""
        now = self.mode()
        self._set_mode(mode)
        try:
            yield
        finally:
            self._set_mode(now)

    def _set_mode(self, mode: tuple[bool, ...]) -> None:
        for module, training in zip(self._modules, mode, strict=True):
            module.training = training

    def is_watched(self) -> bool:
        """Whether a hook sees what is computed inside the module, so that tensors may leave it by other ways."""
        return any(module._forward_hooks for module in self._modules[1:])

    def snapshot(self) -> Snapshot:
        """The state as it is now; values are referred to, not copied."""
        return Snapshot([{key: _mark(value) for key, value in _state(module)} for module in self._watched])

    def changed(self, before: Snapshot) -> list[tuple[nn.Module, str]]:
        """Every ``(module, attribute)`` that was assigned or written to since ``before``."""
        return [
            (module, key)
            for module, old in zip(self._watched, before.values, strict=True)
            for key, value in _state(module)
            if not _same(old.get(key, _NOTHING), _mark(value))
        ]


def version(tensor: torch.Tensor) -> int | None:
    """How often ``tensor`` was written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def draws_elsewhere() -> tuple[Any, ...]:
    """How far the random numbers that are not torch's have been drawn, to be compared."""
    state: Any = numpy.random.get_state()
    return random.getstate(), *(part.tobytes() if isinstance(part, numpy.ndarray) else part for part in state)


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether the class is one of ``torch.nn``, whose forwards change nothing but buffers."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _state(module: nn.Module) -> list[tuple[str, Any]]:
    own: list[tuple[str, Any]] = []
    if not _is_torchs_own(module):
        own = [(key, value) for key, value in module.__dict__.items() if key not in BOOKKEEPING]
    return own + [(key, value) for key, value in module._buffers.items() if value is not None]


def _mark(value: Any) -> Any:
    """What a later value is compared with: a tensor's version, a container's members, else the value itself."""
    if isinstance(value, torch.Tensor):
        return value, version(value)
    if isinstance(value, torch.Generator):
        return value, value.get_state().numpy().tobytes()
    if isinstance(value, (list, tuple, deque)):
        return [_mark(member) for member in value]
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    if isinstance(value, dict):
        return {key: _mark(member) for key, member in value.items()}
    return value


def _same(before: Any, now: Any) -> bool:
    if type(before) is not type(now):
        return False
    if isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(_same(a, b) for a, b in zip(before, now, strict=True))
    if isinstance(now, dict):
        return before.keys() == now.keys() and all(_same(before[key], value) for key, value in now.items())
    return before is now or (isinstance(now, (int, float, complex, str, bytes)) and before == now)
