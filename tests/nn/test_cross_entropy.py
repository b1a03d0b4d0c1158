"""The loss without logits is the loss of the logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infinity.nn.cross_entropy import LinearCrossEntropy, linear_cross_entropy
from infinity.nn.tiled import SplitWeight
from tests.engine.helpers import attached, configure, fresh, train_attached, train_plain

WIDTH, CLASSES = 32, 200


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 20, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(CLASSES, WIDTH, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, CLASSES, (3, 20), generator=generator)
    targets[0, :5] = -100
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    logits = F.linear(hidden, weight).float()
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    return losses.view(targets.shape) if reduction == "none" else losses


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.nn.cross_entropy.VOCABULARY_TILE", 64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_tokens", [7, 64])
def test_loss_and_gradients(reduction: str, chunk_tokens: int) -> None:
    found = []
    for compute in (plain, linear_cross_entropy):
        hidden, weight, targets = data()
        options = {} if compute is plain else {"chunk_tokens": chunk_tokens}
        loss = compute(hidden, weight, targets, reduction=reduction, **options)  # type: ignore[operator]
        (loss * torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape)).sum().backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=2e-6)


def test_extreme_logits_do_not_overflow() -> None:
    hidden, weight, targets = data()
    with torch.no_grad():
        hidden *= 100.0
    loss = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, plain(hidden, weight, targets))
    loss.backward()
    assert torch.isfinite(weight.grad).all()


def test_sixteen_bit_is_as_near_to_the_truth_as_logits_are() -> None:
    hidden, weight, targets = data(torch.bfloat16)
    linear_cross_entropy(hidden, weight, targets, chunk_tokens=7).backward()
    mine = hidden.grad.float(), weight.grad.float()
    hidden.grad = weight.grad = None
    plain(hidden, weight, targets).backward()
    theirs = hidden.grad.float(), weight.grad.float()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    F.cross_entropy(F.linear(*exact).flatten(0, 1), targets.flatten()).backward()
    for a, b, truth in zip(mine, theirs, exact, strict=True):
        assert (a - truth.grad).norm() < 1.5 * (b - truth.grad).norm()


def test_under_autocast_backward_computes_what_forward_did() -> None:
    found = []
    for compute in (plain, linear_cross_entropy):
        hidden, weight, targets = data()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute(hidden, weight, targets)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-2, atol=1e-3)
    assert abs(found[0][0] - found[1][0]) < 1e-5
    assert found[1][2].dtype is torch.float32


class Largest(TorchDispatchMode):
    """Remembers the largest result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_neither_logits_nor_their_gradient_ever_exist() -> None:
    hidden, weight, _ = data()
    many = torch.randn(1000, WIDTH, requires_grad=True)
    targets = torch.randint(0, CLASSES, (1000,))
    with Largest() as seen:
        linear_cross_entropy(many, weight, targets, chunk_tokens=50).backward()
    assert seen.numel == many.numel(), "logits would have 200,000 elements, the states have 32,000"
    assert many.grad is not None
    assert hidden.grad is None


def test_mistakes_are_told() -> None:
    hidden, weight, targets = data()
    with pytest.raises(IndexError, match="classes are 0 to 199"):
        linear_cross_entropy(hidden, weight, targets + CLASSES)
    with pytest.raises(ValueError, match="reduction"):
        linear_cross_entropy(hidden, weight, targets, reduction="median")
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=0)
    assert SplitWeight((CLASSES, WIDTH), (1, 1)).gradient() is None


class Language(nn.Module):
    """An embedding tied to a head that gives the loss."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = LinearCrossEntropy(WIDTH, CLASSES, chunk_tokens=7)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)), targets)


@pytest.mark.parametrize("tile_bytes", ["auto", 8192])
@pytest.mark.parametrize("tied", [True, False])
def test_in_an_engine(tmp_path: Path, tied: bool, tile_bytes: int | str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Language(tied)

    generator = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randint(0, CLASSES, (2, 2, 10), generator=generator)) for _ in range(3)]

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch)

    expected = train_plain(build(), batches, loss_of)
    with attached(build(), configure(tmp_path, tile_bytes=tile_bytes)) as engine:
        found = train_attached(engine, fresh(batches), loss_of)
        assert bool(engine._parts.partition.tiled) == (tile_bytes == 8192)
        with torch.no_grad():
            hidden = engine.module.embedding(batches[0][0])
            assert engine.module.head(hidden).shape == (2, 10, CLASSES)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=1e-6)
