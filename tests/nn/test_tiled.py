"""A linear that works through its weight tile by tile is the linear it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infinity import TiledLinear

GRIDS = [(1, 1), (1, 4), (1, 7), (3, 1), (3, 4), (2, 16)]
"""Input splits, output splits."""


def pair(in_splits: int, out_splits: int, bias: bool, dtype: torch.dtype) -> tuple[nn.Linear, TiledLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(96, 256, bias)
    torch.manual_seed(0)
    tiled = TiledLinear(96, 256, bias, in_splits, out_splits)
    return plain.to(dtype), tiled.to(dtype)


def gradients(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(upstream)
    found = {"y": y.detach(), "x": x.grad}
    return {**found, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grid", GRIDS)
def test_is_a_linear(grid: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    plain, tiled = pair(*grid, bias, dtype)
    assert list(tiled.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(tiled.state_dict()[name], value), "the same initial values, drawn in the same order"
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 96, generator=generator).to(dtype)
    upstream = torch.randn(3, 5, 256, generator=generator).to(dtype)
    expected, found = gradients(plain, x, upstream), gradients(tiled, x, upstream)
    exact = {"weight", "bias", *(["y"] if grid[0] == 1 else []), *(["x"] if grid[1] == 1 else [])}
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if name in exact:
            assert torch.equal(found[name], value), name
        else:
            tolerance = 2e-6 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: n + t)


def test_sixteen_bit_sums_are_rounded_once() -> None:
    _, tiled = pair(1, 16, False, torch.bfloat16)
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    upstream = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    found = gradients(tiled, x, upstream)["x"].double()
    truth = upstream.double() @ tiled.weight.detach().double()
    step = torch.zeros_like(upstream[:, :96])
    for start in range(0, 256, 16):
        step += upstream[:, start : start + 16] @ tiled.weight.detach()[start : start + 16]
    assert (found - truth).square().mean() < 0.5 * (step.double() - truth).square().mean()


@pytest.mark.parametrize("grid", GRIDS)
def test_it_saves_nothing_but_its_input_with_its_weight(grid: tuple[int, int]) -> None:
    _, tiled = pair(*grid, True, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        tiled(torch.randn(8, 96, requires_grad=True))
    assert sum(t.numel() for t in saved) == 8 * 96 + 256 * 96


def test_under_autocast_it_computes_in_16_bit() -> None:
    plain, tiled = pair(1, 4, True, torch.float32)
    x, upstream = torch.randn(6, 96), torch.randn(6, 256).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = gradients(plain, x, upstream), gradients(tiled, x, upstream)
    assert found["y"].dtype is torch.bfloat16
    for name in ("y", "weight", "bias"):
        assert torch.equal(found[name], expected[name]), name
    assert found["weight"].dtype is torch.float32


def test_gradients_asked_for_by_name() -> None:
    plain, tiled = pair(1, 4, True, torch.float32)
    x = torch.randn(6, 96, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).sum(), [plain.weight])
    (found,) = torch.autograd.grad(tiled(x).sum(), [tiled.weight])
    assert torch.equal(found, expected)
    tiled.weight.requires_grad_(False)
    tiled(x).sum().backward()
    assert x.grad is not None
    assert tiled.weight.grad is None


@pytest.mark.parametrize(("splits", "named"), [((0, 1), "in_splits is 0"), ((1, 257), "out_splits is 257")])
def test_impossible_grids_are_refused(splits: tuple[int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TiledLinear(96, 256, True, *splits)


def test_other_dtypes_are_refused_as_by_a_linear() -> None:
    _, tiled = pair(1, 4, True, torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        tiled(torch.randn(6, 96))
