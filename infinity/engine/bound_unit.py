"""Shows a unit's parameters in the module tree: lent ones, gathered ones, placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.engine.placeholder import LentParameter
from infinity.errors import OffloadedError
from infinity.shard.partition import Unit


@dataclass
class BoundUnit:
    """A unit with the places in the module tree where its parameters are seen.

    ``homes[i]`` are the ``_parameters`` dicts that hold slot ``i``; ``generation`` counts the updates it has had;
    ``gathered`` are real values, by slot, that the user looks at; ``home`` is the memory where graphs refer to the
    parameters directly, because they never leave it.
    """

    unit: Unit
    placeholders: list[LentParameter]
    homes: list[list[tuple[dict[str, Any], str]]]
    generation: int = 0
    gathered: dict[int, nn.Parameter] = field(default_factory=dict)
    home: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._bound: list[list[nn.Parameter]] = []

    def changed(self) -> None:
        """Says that the parameters' values are others now, so that graphs of the old ones are refused."""
        self.generation += 1
        if self.home is not None:
            torch.autograd.graph.increment_version(self.home)

    def check_homes(self) -> None:
        """Raises if somebody else put a parameter into one of the places."""
        for value, placeholder, homes in zip(self._now(), self.placeholders, self.homes, strict=True):
            for parameters, attribute in homes:
                if parameters.get(attribute) is not value:
                    raise OffloadedError(
                        f"parameter {placeholder._name} was replaced by another object after infinity.initialize. Put "
                        "values into it with infinity.set_full_param(p, value), or change the model before"
                    )

    def bind(self, leaves: list[nn.Parameter]) -> None:
        """Shows ``leaves`` in the module tree."""
        self._bound.append(leaves)
        self.show(leaves)

    def unbind(self, leaves: list[nn.Parameter]) -> None:
        """Shows again what was bound before, placeholders in the end."""
        self._bound = [other for other in self._bound if other is not leaves]
        self.show(self._now())

    def refresh(self) -> None:
        """Shows what is to be seen after ``gathered`` changed."""
        self.show(self._now())

    def _now(self) -> Sequence[nn.Parameter]:
        if self._bound:
            return self._bound[-1]
        return [self.gathered.get(slot, placeholder) for slot, placeholder in enumerate(self.placeholders)]

    def show(self, values: Sequence[nn.Parameter]) -> None:
        for value, homes in zip(values, self.homes, strict=True):
            for parameters, attribute in homes:
                parameters[attribute] = value
