"""The Adam kernels follow PyTorch's optimizers to a millionth, float64 to their own rounding."""

from __future__ import annotations

import pytest
import torch

from infinity._native.cpu_adam import AdamStep, Kernels, open_kernels, runnable_isas

STEPS = 10
LR, BETAS, DECAY = 1e-2, (0.9, 0.999), 0.1

each_body = pytest.mark.parametrize("isa", [*runnable_isas(), "torch"])
each_formula = pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])


def start_and_gradients(n: int = 10_007) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(n, generator=generator)
    # A gradient has a direction as well as noise, so that no first moment is a mere difference of large numbers.
    drift = torch.randn(n, generator=generator)
    return start, [drift + 0.3 * torch.randn(n, generator=generator) for _ in range(STEPS)]


def ours(kernels: Kernels, eps: float, decoupled: bool, beta1: float = BETAS[0]) -> tuple[torch.Tensor, ...]:
    start, gradients = start_and_gradients()
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step, gradient in enumerate(gradients, 1):
        kernels.adam(p, m, v, gradient, None, AdamStep(LR, beta1, BETAS[1], eps, DECAY, step, decoupled))
    return p, m, v


def theirs(
    optimizer: type[torch.optim.Optimizer], eps: float, dtype: torch.dtype, beta1: float = BETAS[0], **options: bool
) -> tuple[torch.Tensor, ...]:
    start, gradients = start_and_gradients()
    p = torch.nn.Parameter(start.to(dtype))
    running = optimizer([p], lr=LR, betas=(beta1, BETAS[1]), eps=eps, weight_decay=DECAY, **options)  # type: ignore[call-arg]
    for gradient in gradients:
        p.grad = gradient.to(dtype)
        running.step()
    return p.detach(), running.state[p]["exp_avg"], running.state[p]["exp_avg_sq"]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, in units of the value, or of the typical value where that is nearly zero."""
    a, b = a.double(), b.double()
    return float(((a - b).abs() / b.abs().clamp_min(b.abs().mean() * 0.1)).max())


@each_body
@each_formula
@pytest.mark.parametrize("beta1", [0.9, 0.3, 0.0])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_ten_steps_stay_within_a_millionth_of_pytorch(
    isa: str, optimizer: type[torch.optim.Optimizer], beta1: float, options: dict[str, bool]
) -> None:
    got = ours(open_kernels(isa), 0.1, optimizer is torch.optim.AdamW, beta1)
    want = theirs(optimizer, 0.1, torch.float32, beta1, **options)
    for name, a, b in zip(("master", "exp_avg", "exp_avg_sq"), got, want, strict=True):
        assert distance(a, b) <= 1e-6, name


@each_body
@each_formula
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_float64_is_as_near_as_to_pytorch_in_fp32(isa: str, optimizer: type[torch.optim.Optimizer], eps: float) -> None:
    got = ours(open_kernels(isa), eps, optimizer is torch.optim.AdamW)
    exact = theirs(optimizer, eps, torch.float64)
    single = theirs(optimizer, eps, torch.float32)
    for name, a, b, c in zip(("master", "exp_avg", "exp_avg_sq"), got, exact, single, strict=True):
        assert distance(a, b) <= 1e-6, name
        rms = float((a.double() - b).square().mean().sqrt())
        assert rms <= 1.25 * float((c.double() - b).square().mean().sqrt()), name


@each_body
def test_late_steps_use_the_power_not_a_running_product(isa: str) -> None:
    step = 20_000
    p, m, v = torch.ones(1), torch.full((1,), 0.5), torch.full((1,), 0.25)
    beta2 = 0.99999
    open_kernels(isa).adam(p, m, v, torch.full((1,), 0.5), None, AdamStep(0.1, 0.9, beta2, 0.0, 0.0, step, True))
    want = 1.0 - 0.1 * 0.5 / (0.25 / (1.0 - beta2**step)) ** 0.5
    assert abs(float(p) - want) <= 1e-7


def test_zero_beta1_keeps_the_gradient_itself() -> None:
    p, m, v = torch.ones(1), torch.full((1,), 1e30), torch.ones(1)
    g = torch.full((1,), 1.2345678)
    open_kernels("scalar").adam(p, m, v, g, None, AdamStep(0.1, 0.0, 0.999, 1e-8, 0.0, 1, True))
    assert torch.equal(m, g)
