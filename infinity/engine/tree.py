"""Takes arguments or results apart into tensors, then puts them together around other tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Tree:
    """A value whose containers were looked through: tuples, lists, dicts, dataclasses, whatever is derived from them.

    ``leaves`` are its members in order. Any other object, or a dataclass without a tensor in it, is one leaf.
    """

    def __init__(self, value: Any) -> None:
        self.leaves: list[Any] = []
        self._shape = self._take(value)

    def forget_values(self) -> None:
        """Lets the members go; what ``filled`` puts together later stands for nothing of the original."""
        self.leaves = []
        self._shape = _without_originals(self._shape)

    def filled(self, leaves: Sequence[Any]) -> Filled:
        """The same value with ``leaves`` in the places of its own."""
        return Filled(self._shape, leaves)

    def _take(self, value: Any) -> _Shape:
        opened = _open(value)
        if opened is None:
            self.leaves.append(value)
            return _LEAF
        members, build = opened
        return _Shape(value, [self._take(member) for member in members], build)


class Filled:
    """A value put together; ``fresh`` pairs each container that can be changed with what stands in for it."""

    def __init__(self, shape: _Shape, leaves: Sequence[Any]) -> None:
        self._next = iter(leaves)
        self.fresh: list[tuple[Any, Any, Any]] = []
        self.value = self._put(shape)

    def changed(self) -> list[tuple[Any, Any]]:
        """``(original, stand-in)`` of every list or dict that was written to since."""
        return [(original, now) for original, now, before in self.fresh if not _same(_members(now), before)]

    def _put(self, shape: _Shape) -> Any:
        if shape.build is None:
            return next(self._next)
        value = shape.build([self._put(member) for member in shape.members])
        if type(value) in (list, dict):
            self.fresh.append((shape.original, value, _members(value)))
        return value


@dataclasses.dataclass(frozen=True)
class _Shape:
    original: Any
    members: list[_Shape]
    build: Callable[[list[Any]], Any] | None


_LEAF = _Shape(None, [], None)


def _without_originals(shape: _Shape) -> _Shape:
    return _Shape(None, [_without_originals(member) for member in shape.members], shape.build)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``."""
    return [leaf for leaf in Tree(value).leaves if isinstance(leaf, torch.Tensor)]


def echo(original: Any, members: Any) -> None:
    """Gives a caller's list or dict the members that its stand-in has got."""
    if isinstance(original, list):
        original[:] = members
    else:
        original.clear()
        original.update(members)


def _members(container: Any) -> list[Any]:
    return list(container) if isinstance(container, list) else [part for item in container.items() for part in item]


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _open(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The members of a container with how to build one like it, None for a leaf."""
    kind = type(value)
    if kind in (tuple, list):
        return list(value), kind
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return list(value), lambda members: kind(*members)
        return (list(value), kind) if hasattr(value, "n_sequence_fields") else None
    if kind is dict:
        keys = tuple(value)  # not the dict itself, which would keep its members alive
        return list(value.values()), lambda members: dict(zip(keys, members, strict=True))
    if isinstance(value, (dict, UserDict)):
        return list(value.values()), lambda members: _dict_like(value, members)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        members = [getattr(value, name) for name in names]
        return (members, lambda fresh: _object_like(value, names, fresh)) if tensors_in(members) else None
    return None


def _dict_like(value: Any, members: list[Any]) -> Any:
    like = copy.copy(value)
    for key, member in zip(tuple(value), members, strict=True):
        like[key] = member
    return like


def _object_like(value: Any, names: list[str], members: list[Any]) -> Any:
    like = copy.copy(value)
    for name, member in zip(names, members, strict=True):
        object.__setattr__(like, name, member)
    return like
