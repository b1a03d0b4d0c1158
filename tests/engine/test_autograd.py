"""Backward in all the ways that users start it, equal to plain PyTorch."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.engine.engine import Engine
from tests.engine.helpers import PLACEMENTS, attached, check_model, configure

D = 8


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)
        self.tanh = nn.Tanh()
        self.down = nn.Linear(D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(self.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def vectors(count: int = 3, *, grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, D, generator=generator).requires_grad_(grad) for _ in range(count)]


def energy(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).pow(2).mean()


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: infinity.get_full_grad(p) if isinstance(p, infinity.engine.placeholder.OffloadedParameter) else p.grad
        for name, p in model.named_parameters()
    }


Act = Callable[[nn.Module], list[torch.Tensor]]


def check_act(
    act: Act, swap: Path, *, build: Callable[[], nn.Module] = Net, exact: bool = True, gas: int = 1, **block: Any
) -> None:
    """Runs ``act`` on a plain and on attached models: what it returns, what gradients it leaves must be the same."""
    torch.manual_seed(0)
    model = build()
    reference = copy.deepcopy(model)
    torch.manual_seed(5)
    expected = act(reference)
    for device in PLACEMENTS:
        for recompute in (True, False):
            with attached(
                copy.deepcopy(model), configure(swap, device, gas=gas, recompute=recompute, **block)
            ) as engine:
                torch.manual_seed(5)
                found = act(engine.module)
                left = grads(engine.module)
                assert not engine._runtime.frames
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
            for name, parameter in reference.named_parameters():
                wanted, gradient = parameter.grad, left[name]
                assert (wanted is None) == (gradient is None), name
                if wanted is not None and gradient is not None:
                    wanted = wanted / gas
                    same = torch.equal(wanted, gradient) if exact else torch.allclose(wanted, gradient, 1e-5, 1e-6)
                    assert same, (
                        f"{name} differs by {(wanted - gradient).abs().max()} ({device}, recompute {recompute})"
                    )


def test_backward_from_an_output_with_a_gradient(tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        x = vectors(1, grad=True)[0]
        y = model(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        assert x.grad is not None
        return [y, x.grad]

    check_act(act, tmp_path)


@pytest.mark.parametrize("gas", [2, 3, 4])
def test_bare_backward_leaves_input_gradients_alone_when_accumulating(tmp_path: Path, gas: int) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        x = vectors(1, grad=True)[0]
        loss = energy(model, x)
        loss.backward()
        assert x.grad is not None
        return [loss, x.grad]

    check_act(act, tmp_path, gas=gas, exact=gas != 3)


def test_retained_graph(tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        x = vectors(1, grad=True)[0]
        loss = energy(model, x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert x.grad is not None
        return [x.grad]

    check_act(act, tmp_path, build=lambda: Net(0.5), exact=False)


def test_two_forwards_before_one_backward(tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        a, b = vectors(2, grad=True)
        loss = (model(a) * model(b)).mean() + energy(model, a)
        loss.backward()
        assert a.grad is not None
        assert b.grad is not None
        return [loss, a.grad, b.grad]

    check_act(act, tmp_path, exact=False, build=lambda: Net(0.5))


def test_forwards_and_backwards_crossed(tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        a, b = vectors(2, grad=True)
        first, second = energy(model, a), energy(model, b)
        first.backward()
        third = energy(model, a)
        second.backward()
        third.backward()
        assert a.grad is not None
        return [a.grad]

    check_act(act, tmp_path, exact=False)


def test_model_fed_with_its_own_output(tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        x = vectors(1, grad=True)[0]
        loss = model(model(x).tanh()).pow(2).mean()
        loss.backward()
        assert x.grad is not None
        return [loss, x.grad]

    check_act(act, tmp_path, exact=False)


def test_input_gradients_alone_deposit_nothing(tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        x = vectors(1, grad=True)[0]
        loss = energy(model, x)
        (by_grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(inputs=[x])
        assert x.grad is not None
        assert all(gradient is None for gradient in grads(model).values())
        return [by_grad, x.grad]

    check_act(act, tmp_path)


def test_gradient_penalty_is_refused(tmp_path: Path) -> None:
    warnings.filterwarnings("ignore", message="Using backward.* with create_graph=True")
    for recompute in (True, False):
        with attached(Net(), configure(tmp_path, recompute=recompute)) as engine:
            x = vectors(1, grad=True)[0]
            with pytest.raises(infinity.ScheduleError, match="create_graph"):
                torch.autograd.grad(energy(engine.module, x), x, create_graph=True)
            with pytest.raises(infinity.ScheduleError, match="create_graph"):
                energy(engine.module, x).backward(create_graph=True)
            energy(engine.module, x).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_units(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x * self.scale

    class Spanning(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def both(x: torch.Tensor) -> torch.Tensor:
                return self.blocks[1](self.blocks[0](x) * self.scale)

            return self.blocks[2](checkpoint(both, x, use_reentrant=reentrant)) + self.scale

    check_model(lambda: Checkpointed(0.5), vectors(grad=True), energy, tmp_path, exact=False)
    check_model(lambda: Spanning(0.5), vectors(grad=True), energy, tmp_path, exact=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_units(tmp_path: Path, reentrant: bool) -> None:
    class Inner(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(super().forward, x, use_reentrant=reentrant)

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Inner(0.5) for _ in range(3))

    check_model(Outer, vectors(grad=True), energy, tmp_path, exact=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_the_model(tmp_path: Path, reentrant: bool) -> None:
    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, batch, use_reentrant=reentrant).pow(2).mean()  # type: ignore[union-attr]

    check_model(lambda: Net(0.5), vectors(grad=True), loss_of, tmp_path, exact=False)


def test_autocast(tmp_path: Path) -> None:
    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(batch)
        assert y.dtype == torch.float32
        return y.pow(2).mean()

    check_model(Net, vectors(grad=True), loss_of, tmp_path)

    def act(model: nn.Module) -> list[torch.Tensor]:
        loss = energy(model, vectors(1)[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        return [loss]

    check_act(act, tmp_path)


def test_evaluation_in_between(tmp_path: Path) -> None:
    def act(model: nn.Module) -> list[torch.Tensor]:
        a, b = vectors(2)
        loss = energy(model, a)
        model.eval()
        with torch.no_grad():
            first = model(b)
        with torch.inference_mode():
            second = model(b).clone()
            model(b)
        model.train()
        loss.backward()
        assert not first.requires_grad
        energy(model, b).backward()
        return [loss, first, second]

    def half_frozen() -> nn.Module:
        model = Net(0.5)
        model.blocks[0].requires_grad_(False)
        return model

    check_act(act, tmp_path, build=lambda: Net(0.5), exact=False)
    check_act(act, tmp_path, build=half_frozen, exact=False)


def test_evaluation_mode_with_gradients(tmp_path: Path) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.train(bool(batch[0, 0] > 0))
        return energy(model, batch)

    batches = vectors(6)
    assert {bool(batch[0, 0] > 0) for batch in batches} == {True, False}
    check_model(Normed, batches, loss_of, tmp_path)


class Forces(nn.Module):
    """Differentiates inside its forward, as models of energies do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Force() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.layers[1](x)


class Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return force


def test_gradients_taken_inside_a_unit(tmp_path: Path) -> None:
    check_model(Forces, vectors(), energy, tmp_path, units=["Force"], exact=False)


def test_unused_results_are_freed_without_backward(tmp_path: Path) -> None:
    for recompute in (True, False):
        with attached(Net(), configure(tmp_path, recompute=recompute)) as engine:
            alive: list[weakref.ref[Any]] = []

            def spy(module: nn.Module, args: Any, result: torch.Tensor, alive: list[Any] = alive) -> None:
                alive.append(weakref.ref(result))

            engine.module.blocks[1].tanh.register_forward_hook(spy)
            for _ in range(2):
                loss = energy(engine.module, vectors(1)[0])
            gc.collect()
            del loss
            assert alive
            assert all(result() is None for result in alive), "a graph that nobody holds is still in memory"


def train_one_step(engine: Engine) -> torch.Tensor:
    loss = energy(engine.module, vectors(1)[0])
    engine.backward(loss)
    engine.step()
    return loss.detach()


class Breaking(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fault: str | None = None
        self.blocks[1].register_forward_pre_hook(lambda module, args: None)
        inner = self.blocks[1].up.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if self.fault == "forward":
                raise ValueError("a fault of the user's")
            return Faulty.apply(inner(x), self)  # type: ignore[no-any-return, no-untyped-call]

        self.blocks[1].up.forward = forward


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: Breaking) -> torch.Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.model.fault == "backward":
            raise ValueError("a fault of the user's")
        return gradient, None


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("device", PLACEMENTS)
@pytest.mark.parametrize("recompute", [True, False])
def test_an_error_of_the_users_leaves_the_engine_usable(
    tmp_path: Path, fault: str, device: str, recompute: bool
) -> None:
    torch.manual_seed(0)
    model = Breaking()
    torch.manual_seed(0)
    with (
        attached(model, configure(tmp_path, device, recompute=recompute)) as engine,
        attached(Breaking(), configure(tmp_path, device, recompute=recompute)) as sound,
    ):
        assert torch.equal(train_one_step(engine), train_one_step(sound))
        model.fault = fault
        with pytest.raises(ValueError, match="a fault of the user's"):
            train_one_step(engine)
        model.fault = None
        assert not engine._runtime.frames
        for parameter in model.parameters():
            assert isinstance(parameter, infinity.engine.placeholder.OffloadedParameter)
        engine.zero_grad()
        for _ in range(2):
            assert torch.equal(train_one_step(engine), train_one_step(sound))


@pytest.mark.parametrize("device", PLACEMENTS)
def test_a_step_between_forward_and_backward_is_refused(tmp_path: Path, device: str) -> None:
    for recompute in (True, False):
        with attached(Net(), configure(tmp_path, device, recompute=recompute)) as engine:
            loss, other = (energy(engine.module, batch) for batch in vectors(2))
            engine.backward(other)
            engine.step()
            with pytest.raises(infinity.ScheduleError, match="between a forward and its backward"):
                loss.backward()
            train_one_step(engine)


@pytest.mark.parametrize("device", PLACEMENTS)
def test_a_graph_of_weights_that_a_step_changed_is_refused_wherever_it_is_entered(device: str, tmp_path: Path) -> None:
    escaped: list[torch.Tensor] = []
    with attached(Net(), configure(tmp_path, device, recompute=False)) as engine:
        engine.module.blocks[1].tanh.register_forward_hook(lambda module, args, result: escaped.append(result))
        loss = energy(engine.module, vectors(1)[0])
        engine.backward(loss, retain_graph=True)
        engine.step()
        with pytest.raises((RuntimeError, infinity.ScheduleError), match=r"modified by an inplace|inside of unit"):
            escaped[0].sum().backward()
        with pytest.raises(infinity.ScheduleError, match=r"step\(\) updated unit"):
            loss.backward()


class Attending(nn.Module):
    """Blocks that use one tensor, one weight of the model, several times each; one block is called twice, another
    writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Listener() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(D))
        self.source = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.source(x)
        for number in (0, 1, 2, 1):
            x = self.blocks[number](x, memory, gain=self.gain, writes=number == 2)
        return x + memory


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(D, D)
        self.values = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, *, gain: torch.Tensor, writes: bool) -> torch.Tensor:
        mixed = torch.tanh(self.keys(memory) * gain) * self.values(memory) * gain + self.keys(x * 1).sin()
        return x.add_(mixed) if writes else x + mixed


def test_sums_of_gradients_are_grouped_alike_on_every_placement(tmp_path: Path) -> None:
    """In bf16, where an order of additions shows: uses in one call first, then the calls, those of a weight in fp32."""
    found = []
    for device in ("nvme", "none", "cpu"):
        torch.manual_seed(0)
        config = configure(tmp_path, device, recompute=False) | {"bf16": {"enabled": True}}
        with attached(Attending(), config) as engine:
            x = vectors(1)[0].bfloat16().requires_grad_()
            engine.backward(engine.module(x).float().pow(2).mean())
            found.append(grads(engine.module) | {"x": x.grad})
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert gradient is not None
            assert torch.equal(gradient, other[name]), name


@pytest.mark.parametrize(("device", "nodes"), [("none", 1), ("cpu", 1), ("nvme", 4)])
def test_units_that_never_move_are_one_node_of_the_graph(device: str, nodes: int, tmp_path: Path) -> None:
    calls: list[str] = []
    with attached(Net(), configure(tmp_path, device, recompute=False)) as engine:
        energy(engine.module, vectors(1)[0])  # the first call of a unit shows whether it may join
        engine._runtime.grads.begin = lambda call, indices: calls.append(call.entry.name)  # type: ignore[method-assign]
        energy(engine.module, vectors(1)[0])
        assert len(calls) == nodes
