"""The optimizer kernels as the runtime sees them, whichever body runs underneath."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ONLY_FP32 = (torch.float32,)


class AdamScalars(NamedTuple):
    """What one step multiplies, adds and divides by, each rounded to fp32 exactly once.

    The order of the fields is that of ``InfinityAdamScalars`` in native/cpu_adam/cpu_adam.h.
    """

    grad_scale: float
    l2: float
    keep: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float


@dataclass(frozen=True)
class AdamStep:
    """The hyper-parameters of one Adam (or, ``decoupled``, AdamW) step; the kernels remember nothing between steps.

    ``step`` counts from 1. The gradient is multiplied by ``grad_scale`` first, which unscales and clips in one.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "grad_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} is {value}; expected a finite number of at least 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is {value}; expected at least 0 and less than 1")
        if self.step < 1:
            raise ValueError(f"step is {self.step}; the first step is 1")

    def scalars(self) -> AdamScalars:
        """Computed in double, with powers and not running products, whose error would grow with the steps.

        The correction of the second moment multiplies eps and the step size instead of dividing every root: the same
        formula with one division and one rounding less per element.
        """
        decay = self.weight_decay
        root_correction2 = math.sqrt(1.0 - self.beta2**self.step)
        exact = AdamScalars(
            grad_scale=self.grad_scale,
            l2=0.0 if self.decoupled else decay,
            keep=1.0 - self.lr * decay if self.decoupled else 1.0,
            beta1=self.beta1,
            one_minus_beta1=1.0 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1.0 - self.beta2,
            eps=self.eps * root_correction2,
            step_size=self.lr * root_correction2 / (1.0 - self.beta1**self.step),
        )
        return AdamScalars(*(ctypes.c_float(value).value for value in exact))


@dataclass(frozen=True)
class SquareSum:
    """A sum of squares ``hi + lo`` with twice the digits of fp64, and whether every element was finite.

    If not, ``hi`` is infinity or NaN and ``lo`` is 0. ``SquareSum()`` is the empty sum.
    """

    hi: float = 0.0
    lo: float = 0.0
    finite: bool = True

    def __add__(self, other: SquareSum) -> SquareSum:
        return renormalised(*two_fold_add((self.hi, self.lo), (other.hi, other.lo)))

    @property
    def value(self) -> float:
        return self.hi + self.lo


def two_fold_add(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """``a + b`` of two (hi, lo) pairs; the rounding error of the hi parts goes to lo."""
    total = a[0] + b[0]
    part = total - a[0]
    error = (a[0] - (total - part)) + (b[0] - part)
    return total, a[1] + (error + b[1])


def renormalised(hi: float, lo: float) -> SquareSum:
    """The sum with |lo| at most half a digit of hi."""
    if not math.isfinite(hi):
        return SquareSum(math.nan if math.isnan(hi) else hi, 0.0, False)
    total = hi + lo
    return SquareSum(total, lo - (total - hi), True)


class Kernels(Protocol):
    """One body of the optimizer kernels. Every body gives the same bits for the same call."""

    @property
    def isa(self) -> str:
        """One of scalar, avx2, avx512, neon, torch."""

    @property
    def threads(self) -> int:
        """How many threads a call of 64 Ki elements or more runs on."""

    def adam(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        step: AdamStep,
    ) -> None:
        """Updates master and moments (fp32) in place by grad; ``out`` receives the new master.

        All are 1-D, contiguous, on the CPU, of equal length, and share no memory; grad and out are fp32, bf16 or fp16.
        The copy-out rounds to nearest even; a NaN becomes 0x7fc0 (bf16) or 0x7e00 (fp16).
        """

    def accumulate(self, into: torch.Tensor, grad: torch.Tensor, *, first: bool) -> None:
        """``into = grad`` if first, else ``into += grad``; into is fp32, grad fp32, bf16 or fp16."""

    def sum_of_squares(self, x: torch.Tensor) -> SquareSum:
        """The sum of squares of an fp32, bf16 or fp16 tensor: the same bits for any number of threads."""


def check_adam(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Raises a TypeError or ValueError that names the argument ``Kernels.adam`` cannot take."""
    check("master", master, ONLY_FP32)
    named = {"master": master}
    for name, tensor, dtypes in (
        ("exp_avg", exp_avg, ONLY_FP32),
        ("exp_avg_sq", exp_avg_sq, ONLY_FP32),
        ("grad", grad, FLOAT_DTYPES),
        ("out", out, FLOAT_DTYPES),
    ):
        if tensor is not None:
            check(name, tensor, dtypes, like=("master", master))
            named[name] = tensor
    check_disjoint(named)


def check_accumulate(into: torch.Tensor, grad: torch.Tensor) -> None:
    """Raises a TypeError or ValueError that names the argument ``Kernels.accumulate`` cannot take."""
    check("into", into, ONLY_FP32)
    check("grad", grad, FLOAT_DTYPES, like=("into", into))
    start, begin = into.data_ptr(), grad.data_ptr()  # as check_disjoint, for two, once per parameter and micro-batch
    if start < begin + grad.nbytes and begin < start + into.nbytes:
        raise ValueError("into and grad share memory; expected separate buffers")


def check(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    *,
    like: tuple[str, torch.Tensor] | None = None,
) -> None:
    """Raises a TypeError or ValueError unless ``tensor`` is 1-D, contiguous, on the CPU, of one of ``dtypes``."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; expected {expected}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; expected a CPU tensor")
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected a contiguous tensor of one dimension")
    if like is not None and tensor.numel() != like[1].numel():
        raise ValueError(f"{name} has {tensor.numel()} elements; expected {like[1].numel()} as {like[0]} has")


def check_disjoint(named: dict[str, torch.Tensor]) -> None:
    """Raises a ValueError if two of the tensors share memory: vector width would then change the result."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name) for name, t in named.items())
    for (_, end, first), (begin, _, second) in pairwise(ranges):
        if begin < end:
            raise ValueError(f"{first} and {second} share memory; expected separate buffers")
