"""What goes into a module and comes out of it is what plain PyTorch would give."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import infinity
from tests.engine.helpers import attached, check_model, configure

D = 8


def vectors(count: int = 3, *, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, D, generator=generator).requires_grad_(grad) for _ in range(count)]


def energy(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).pow(2).mean()


class Chain(nn.Module):
    """Calls ``step`` with each of its two layers."""

    layer: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(type(self).layer() for _ in range(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.gate = nn.Linear(D, D)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


@dataclass
class State:
    hidden: torch.Tensor
    name: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    scale: float


class ManyShapes(Chain):
    class layer(Layer):
        def forward(self, state: State, pair: Pair, *, options: dict[str, Any] | None, flag: bool, empty: None) -> Any:
            assert empty is None
            assert flag
            assert options is not None
            gate = torch.sigmoid(self.gate(pair.left))
            hidden = torch.tanh(self.linear(state.hidden)) * gate * options["settings"].scale
            extra = {"gates": [*state.extra.get("gates", []), gate], "none": None}
            return State(hidden, "next", extra), Pair(gate, None), OrderedDict(aux=(hidden.mean(), 3, "text"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, pair, total = State(x, "first"), Pair(x, None), x.sum() * 0
        for layer in self.layers:
            options = {"settings": Settings(0.5), "list": [1, (2.0, None)]}
            state, pair, more = layer(state, pair, options=options, flag=True, empty=None)
            assert isinstance(state, State)
            assert isinstance(pair, Pair)
            assert pair.right is None
            assert type(more) is OrderedDict
            assert more["aux"][1:] == (3, "text")
            total = total + more["aux"][0]
        return state.hidden + pair.left + total + sum(g.sum() for g in state.extra["gates"])


def test_containers_of_every_kind(tmp_path: Path) -> None:
    check_model(ManyShapes, vectors(grad=True), energy, tmp_path)


class Collecting(Chain):
    """Its layers write into a list and a dict of the caller's, pop from another."""

    class layer(Layer):
        def forward(self, x: torch.Tensor, seen: list[Any], notes: dict[str, Any]) -> torch.Tensor:
            seen.append(self.gate(x))
            notes["count"] = notes.get("count", 0) + 1
            notes.pop("unused", None)
            return torch.tanh(self.linear(x))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scale = batch.pop("scale")
        x, seen, notes = batch["x"], [], {"unused": 1}
        for layer in self.layers:
            x = layer(x, seen, notes)
        assert len(seen) == 2
        assert notes == {"count": 2}
        return (x + seen[0] + seen[1]) * scale


def test_lists_and_dicts_that_a_unit_writes_to(tmp_path: Path) -> None:
    popped = []

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        given = {"x": batch, "scale": torch.tensor(2.0)}
        loss = model(given).pow(2).mean()
        popped.append("scale" not in given)
        return loss

    check_model(Collecting, vectors(), loss_of, tmp_path)
    assert all(popped)


class Storing(Chain):
    """Its layers leave a loss of their own in an attribute, as mixtures of experts do."""

    class layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.gate(x)
            self.loss = gate.pow(2).mean()
            return torch.tanh(self.linear(x)) * gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + sum(layer.loss for layer in self.layers)


def test_losses_left_in_attributes(tmp_path: Path) -> None:
    check_model(Storing, vectors(), energy, tmp_path)

    def outside(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).pow(2).mean() + model.layers[0].loss

    check_model(Storing, vectors(), outside, tmp_path)


class InPlace(Chain):
    class layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return torch.tanh(self.linear(x)) + self.gate(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        return self.layers[1](self.layers[0](x).add_(1)) + x


def test_arguments_written_in_place_are_kept(tmp_path: Path) -> None:
    check_model(InPlace, vectors(grad=True), energy, tmp_path, recompute=[False])


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_arguments_written_in_place_are_refused_by_name_under_recompute(tmp_path: Path, device: str) -> None:
    with (
        attached(InPlace(), configure(tmp_path, device, recompute=True)) as engine,
        pytest.raises(infinity.ScheduleError, match=r'"layers\.0" changes one of its arguments.*recompute'),
    ):
        engine(vectors(1)[0])


class InPlaceResults(Chain):
    class layer(Layer):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            return y[:, : D // 2], torch.cat([self.gate(x), y], 1).view(2, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            left, right = layer(x)
            left.mul_(2)
            right.add_(1).clamp_(-1, 1)
            x = torch.cat([left, right.reshape(4, -1)[:, : D // 2]], 1)
        return x


def test_results_written_in_place(tmp_path: Path) -> None:
    check_model(InPlaceResults, vectors(grad=True), energy, tmp_path)


class Constants(Chain):
    """Some results need no gradient, some are integers, some are the argument itself, one is None."""

    class layer(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            mask = (x > 0).float()
            return self.linear(x) * mask, mask, x.argmax(-1), x, None, self.gate.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y, mask, index, same, nothing, weight = layer(x)
            assert not mask.requires_grad
            assert not index.requires_grad
            assert nothing is None
            mask.numpy()
            x = y + same + torch.nn.functional.one_hot(index, D) + weight.mean(0)
        return x


def test_results_without_gradient(tmp_path: Path) -> None:
    check_model(Constants, vectors(grad=True), energy, tmp_path, exact=False)


class NoResult(Chain):
    class layer(Layer):
        def forward(self, x: torch.Tensor, out: list[torch.Tensor] | None) -> None:
            if out is not None:
                out.append(self.linear(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: list[torch.Tensor] = []
        self.layers[0](x, None)
        self.layers[1](x, out)
        return out[0]


def test_units_that_return_nothing(tmp_path: Path) -> None:
    check_model(NoResult, vectors(), energy, tmp_path)


class SameTwice(Chain):
    class layer(Layer):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.tanh(self.linear(a) + self.gate(b))
            return y, y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.layers[0](x, x)
        a, b = self.layers[1](a, b)
        return a * b


def test_one_tensor_in_two_places(tmp_path: Path) -> None:
    check_model(SameTwice, vectors(grad=True), energy, tmp_path, exact=False)


class Batch(UserDict):  # type: ignore[type-arg]
    pass


class Wrapped(Chain):
    class layer(Layer):
        def forward(self, batch: Batch) -> Batch:
            return Batch(x=torch.tanh(self.linear(batch["x"])), gate=self.gate(batch["x"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = Batch(x=x)
        for layer in self.layers:
            batch = layer(batch)
        return batch["x"] * batch["gate"]


def test_dict_like_objects(tmp_path: Path) -> None:
    check_model(Wrapped, vectors(grad=True), energy, tmp_path)


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Hiding(Chain):
    class layer(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            return Opaque(self.linear(torch.tanh(self.gate(x))))

    def forward(self, x: torch.Tensor) -> Opaque:
        return Opaque(self.layers[1](self.layers[0](x).x).x)


def test_results_hidden_in_an_object_are_refused(tmp_path: Path) -> None:
    with (
        attached(Hiding(), configure(tmp_path)) as engine,
        pytest.raises(infinity.ScheduleError, match="no tuple, list, dict or dataclass"),
    ):
        engine(vectors(1)[0]).x.sum().backward()


class WeightAsArgument(nn.Module):
    """Hands a weight of one unit to another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(D, D)
        self.layers = nn.ModuleList(Projecting() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.table.weight)
        return x


class Projecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) @ weight)


def test_weights_given_as_arguments(tmp_path: Path) -> None:
    check_model(WeightAsArgument, vectors(grad=True), energy, tmp_path, exact=False, slabs=3)


class Hooked(Chain):
    class layer(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x)) + self.gate(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.layers[0].register_forward_hook(lambda module, args, result: result * 0.5)
        self.layers[1].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 3,))
        self.layers[1].linear.register_forward_hook(lambda module, args, result: result + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build_hooked() -> nn.Module:
    return Hooked()


def test_hooks_of_modules(tmp_path: Path) -> None:
    check_model(build_hooked, vectors(grad=True), energy, tmp_path)
