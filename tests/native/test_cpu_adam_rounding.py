"""The copy-out rounds and the gradient widens exactly as PyTorch's own conversions do."""

from __future__ import annotations

import pytest
import torch

from infinity._native.cpu_adam import AdamStep, open_kernels, runnable_isas

HALVES = (torch.bfloat16, torch.float16)
CANONICAL_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
NO_CHANGE = AdamStep(lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, step=1, decoupled=True, grad_scale=0.0)

each_body = pytest.mark.parametrize("isa", [*runnable_isas(), "torch"])
each_half = pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])


def every_half(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def many_floats() -> torch.Tensor:
    """Every upper half of an fp32 number, each with lower halves at, just under and just over every tie."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    ties = {0x0000, 0x8000} | {i << 12 for i in range(16)}
    lower = sorted({(tie + nudge) & 0xFFFF for tie in ties for nudge in (-1, 0, 1)})
    bits = (upper[:, None] | torch.tensor(lower)[None, :]).flatten()
    return bits.to(torch.int32).view(torch.float32)


def narrowed(isa: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a step that changes nothing copies out."""
    zeros = [torch.zeros_like(x) for _ in range(3)]
    out = torch.empty(x.numel(), dtype=dtype)
    open_kernels(isa, threads=2).adam(x.clone(), *zeros, out, NO_CHANGE)
    return out


@each_body
@each_half
def test_every_16_bit_gradient_widens_as_in_pytorch(isa: str, dtype: torch.dtype) -> None:
    halves = every_half(dtype)
    into = torch.empty(halves.numel())
    open_kernels(isa).accumulate(into, halves, first=True)
    want = halves.float()
    numbers = ~want.isnan()
    assert int(numbers.sum()) > 60_000
    assert torch.equal(into[numbers].view(torch.int32), want[numbers].view(torch.int32))
    assert torch.equal(into.isnan(), want.isnan())


@each_body
@each_half
def test_every_16_bit_number_comes_back(isa: str, dtype: torch.dtype) -> None:
    halves = every_half(dtype)
    numbers = halves[~halves.isnan()]
    assert torch.equal(narrowed(isa, numbers.float(), dtype).view(torch.int16), numbers.view(torch.int16))


@each_body
@each_half
def test_rounding_is_to_nearest_even_as_in_pytorch(isa: str, dtype: torch.dtype) -> None:
    x = many_floats()
    got, want = narrowed(isa, x, dtype), x.to(dtype)
    want.view(torch.int16).masked_fill_(x.isnan(), CANONICAL_NAN[dtype])
    # The step subtracts zero, which leaves every number but the sign of nothing: -0 - 0 is -0 too.
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@each_body
def test_known_roundings(isa: str) -> None:
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, 2.0**-133, 2.0**-134, float("inf")])
    want = torch.tensor([1.0, 1 + 2**-6, float("inf"), -float("inf"), 2.0**-133, 0.0, float("inf")])
    assert torch.equal(narrowed(isa, x, torch.bfloat16).float(), want)
    x = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25])
    want = torch.tensor([1.0, 1 + 2**-9, 65504.0, float("inf"), -float("inf"), 2.0**-24, 0.0, 2.0**-24])
    assert torch.equal(narrowed(isa, x, torch.float16).float(), want)
