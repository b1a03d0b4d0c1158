"""Call structures in which sums of gradients, or who owns a tensor, could depend on where units live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from tests.engine.helpers import PLACEMENTS, Trace, attached, check_model, configure

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)) + self.first(x))


class Net(nn.Module):
    """Blocks between two linears, a weight of its own beside them."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        for member in self.blocks:
            member.__dict__["around"] = [self]  # seen, but no part of it

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.through(self.enter(x) * self.gain)).float().square().mean()


class Twice(Net):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class Hooked(Twice):
    """Inner hooks see tensors, whole blocks have hooks of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.first.register_forward_hook(lambda module, given, y: y * 0.75)
            block.first.register_full_backward_hook(lambda module, received, given: (received[0] * 1.25,))
            block.register_forward_hook(lambda module, given, y: y * 1.25)


class Borrowing(Block):
    """Uses weights of the model around it, of a unit that is not its own, twice each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (around,) = self.__dict__["around"]
        x = functional.linear(functional.linear(super().forward(x), around.head.weight), around.head.weight)
        return x * around.gain + around.gain


class Calling(Block):
    """Calls modules that belong to other units."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (around,) = self.__dict__["around"]
        return super().forward(x) + around.blocks[0].first(x) + around.enter(around.enter(x))


class Again(Block):
    """Calls itself."""

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return super().forward(self(x, times - 1) if times else x)


class Checkpointed(Net):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inner = checkpoint(block, block(x), use_reentrant=False)
            x = checkpoint(block, inner, use_reentrant=False)
        return x


class Fan(Net):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        together = sum(block(x) for block in self.blocks)
        return self.blocks[0](torch.tanh(x)) * together + x


class Pair(Block):
    """Goes another way if it is given one tensor twice, as torch's attention does."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = super().forward(x) * self.first(y)
        return z * 2.0 if x is y else z + y


class Given(Net):
    def __init__(self) -> None:
        super().__init__(Pair)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "hooked": Hooked,
    "borrowing": lambda: Net(Borrowing),
    "calling": lambda: Net(Calling),
    "again": lambda: Net(Again),
    "checkpointed": Checkpointed,
    "fan": Fan,
    "given": Given,
}


CELLS = [(device, recompute) for device in PLACEMENTS for recompute in (False, True)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", MODELS)
def test_no_sum_of_gradients_depends_on_the_placement(tmp_path: Path, what: str, precision: str) -> None:
    """Where everything is added in the compute dtype the grouping of a sum shows in its bits."""
    seen: dict[tuple[str, bool], Trace] = {}
    for device, recompute in CELLS:
        config = configure(tmp_path, device, recompute=recompute, slabs=4)
        config["bf16"] = {"enabled": precision == "bf16"}
        trace = seen[device, recompute] = Trace()
        with attached(MODELS[what](), config) as engine:
            for step in range(3):  # calls join from the second on
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
                loss = engine(x.to(torch.bfloat16) if precision == "bf16" else x)
                engine.backward(loss)
                trace.losses.append(loss.detach())
                for name, parameter in engine.module.named_parameters():
                    gradient = infinity.get_full_grad(parameter)
                    assert gradient is not None
                    assert torch.isfinite(gradient).all()
                    trace.grads[f"{name} in step {step}"] = gradient
                engine.step()
    expected = seen["nvme", False]
    for cell, trace in seen.items():
        assert torch.equal(torch.stack(trace.losses), torch.stack(expected.losses))
        for name, gradient in expected.grads.items():
            other = trace.grads[name]
            assert gradient is not None
            assert other is not None
            assert torch.equal(other, gradient), f"{name} differs on {cell}"


class Passing(Block):
    """Returns what it was given, twice the same result beside it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return x, y, y


class WritesResult(Net):
    """What a block returned is written to, then used under its other names."""

    def __init__(self) -> None:
        super().__init__(Passing)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x * 1.0
            same, y, again = block(x.clone())
            y.add_(self.gain).mul_(2.0)
            x = same + again * 0.5 + y + x
        return x


class Identity(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class WritesArgument(Net):
    """What was given to a block is written to after it was returned."""

    def __init__(self) -> None:
        super().__init__(Identity)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x * 1.0
            y = block(x)
            (x if block is self.blocks[0] else y).mul_(self.gain + 1.0)
            x = x * 2.0 + y
        return self.blocks[0].first(x)


class Showing(Block):
    """Returns parts of what it was given, beside its result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return super().forward(x.clone()), {"left": x[:, : WIDTH // 2], "turned": x.t()}


class WritesPart(Net):
    """A part of an argument that a block returned is written to, or the argument is, then both are used."""

    def __init__(self) -> None:
        super().__init__(Showing)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x * 1.0
            y, parts = block(x.clone() if block is self.blocks[2] else x * 1.0)
            parts["left"].mul_(self.gain[: WIDTH // 2] + 1.0)
            x = y + parts["turned"].t() * 0.5 + parts["left"].repeat(1, 2)
        return x


class WritesWhole(WritesPart):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x * 1.0
            y, parts = block(x)
            parts["left"].mul_(self.gain[: WIDTH // 2] + 1.0)
            y = y + x * 0.25
            x.add_(self.gain)
            x = y + parts["turned"].t() * 0.5 + x
        return x


class Writing(Block):
    """Writes to its argument, returns something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x.clone())
        x.mul_(y)
        return self.first(x.clone())


class WritesView(Net):
    def __init__(self) -> None:
        super().__init__(Writing)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            view = x[1:]
            y = block(view)
            x = torch.cat([x[:1], y]) + x
        return x


@pytest.mark.parametrize("model", [WritesResult, WritesArgument, WritesPart, WritesWhole, WritesView])
def test_a_write_is_seen_under_every_name_of_a_tensor(tmp_path: Path, model: Callable[[], nn.Module]) -> None:
    batches = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)) * 0.3 for step in range(2)]
    modes = (
        [False] if model in (WritesView, WritesPart, WritesWhole) else [True, False]
    )  # what is written to cannot be computed again
    check_model(model, batches, lambda module, batch: module(batch), tmp_path, recompute=modes, exact=False)
