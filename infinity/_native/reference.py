"""The optimizer kernels in plain PyTorch: the definition of the native ones, the fallback where those are missing.

Every operation below is one rounding to nearest, in the order of native/cpu_adam/body.inl. ``addcmul``, ``addcdiv``,
``lerp`` and ``alpha=`` are left out on purpose: some of PyTorch's vectorised bodies fuse them, and then the bits depend
on the machine. So is the fp32 square root, which PyTorch takes from a vector math library that misses one in five.
"""

from __future__ import annotations

import torch

from infinity._native.kernels import (
    FLOAT_DTYPES,
    AdamScalars,
    AdamStep,
    SquareSum,
    check,
    check_accumulate,
    check_adam,
    renormalised,
    two_fold_add,
)

CHUNK = 1 << 18
"""Elements updated at a time: what a chunk needs stays in the cache from one line to the next."""

LANES = 32
BLOCK = 1024
BLOCKS_PER_GROUP = 64
GROUPS_AT_A_TIME = 16

CANONICAL_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


class TorchKernels:
    """Kernels whose every operation is an eager PyTorch operation, on PyTorch's own threads."""

    isa = "torch"

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @torch.no_grad()
    def adam(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        step: AdamStep,
    ) -> None:
        check_adam(master, exp_avg, exp_avg_sq, grad, out)
        scalars = step.scalars()
        for start in range(0, master.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            _adam(master[part], exp_avg[part], exp_avg_sq[part], grad[part], scalars)
            if out is not None:
                _narrow(out[part], master[part])

    @torch.no_grad()
    def accumulate(self, into: torch.Tensor, grad: torch.Tensor, *, first: bool) -> None:
        check_accumulate(into, grad)
        if first:
            into.copy_(grad)
        else:
            into.add_(grad)

    @torch.no_grad()
    def sum_of_squares(self, x: torch.Tensor) -> SquareSum:
        check("x", x, FLOAT_DTYPES)
        total = (0.0, 0.0)
        window = GROUPS_AT_A_TIME * BLOCKS_PER_GROUP * BLOCK
        for start in range(0, x.numel(), window):
            for group in _group_squares(x[start : start + window]):
                total = two_fold_add(total, group)
        return renormalised(*total)


def _adam(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, s: AdamScalars) -> None:
    g = grad.float() * s.grad_scale
    if s.l2 != 0.0:
        g = g + p * s.l2
    p.mul_(s.keep)
    # lerp as PyTorch has it: start from whichever end is nearer, so that beta1 = 0 gives the gradient itself.
    if s.one_minus_beta1 < 0.5:
        m.copy_(m + (g - m) * s.one_minus_beta1)
    else:
        m.copy_(g + (g - m) * -s.beta1)
    v.copy_(v * s.beta2 + (g * s.one_minus_beta2) * g)
    root = v.double().sqrt().float()  # no root of an fp32 number lies close enough to a tie for two roundings to differ
    p.sub_((m * s.step_size) / (root + s.eps))


def _narrow(out: torch.Tensor, p: torch.Tensor) -> None:
    out.copy_(p)
    if out.dtype in CANONICAL_NAN:
        out.view(torch.int16).masked_fill_(p.isnan(), CANONICAL_NAN[out.dtype])


def _group_squares(x: torch.Tensor) -> list[tuple[float, float]]:
    """The (hi, lo) sums of groups of 64 blocks of 1024; zeros add nothing, so the last group is filled up with them."""
    group = BLOCKS_PER_GROUP * BLOCK
    groups = -(-x.numel() // group)
    wide = torch.zeros(groups * group, dtype=torch.float64)
    wide[: x.numel()] = x
    rows = wide.mul_(wide).view(groups * BLOCKS_PER_GROUP, BLOCK // LANES, LANES)
    lanes = rows[:, 0]
    for row in range(1, BLOCK // LANES):
        lanes = lanes + rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    blocks = lanes.view(groups, BLOCKS_PER_GROUP)
    hi = torch.zeros(groups, dtype=torch.float64)
    lo = torch.zeros(groups, dtype=torch.float64)
    for block in blocks.unbind(1):
        total = hi + block
        part = total - hi
        lo = lo + ((hi - (total - part)) + (block - part))
        hi = total
    return list(zip(hi.tolist(), lo.tolist(), strict=True))
