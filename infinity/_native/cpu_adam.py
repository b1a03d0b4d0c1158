"""Opens the fastest optimizer kernels this machine can run.

The native ones are one library with a body per instruction set (native/cpu_adam). Which body runs never changes a bit
of the result, so the choice is about speed alone; where the library is missing, PyTorch does the same arithmetic.
"""

from __future__ import annotations

import ctypes
import logging
import os

import torch

from infinity._native import library
from infinity._native.kernels import (
    FLOAT_DTYPES,
    AdamScalars,
    AdamStep,
    Kernels,
    SquareSum,
    check,
    check_accumulate,
    check_adam,
)
from infinity._native.reference import TorchKernels
from infinity.errors import ConfigError

__all__ = ["AdamStep", "Kernels", "NativeKernels", "SquareSum", "TorchKernels", "open_kernels", "runnable_isas"]

ISA_VARIABLE = "INFINITY_ISA"
ISA_CODES = {"scalar": 0, "avx2": 1, "avx512": 2, "neon": 3}
BY_SPEED = ("avx512", "avx2", "neon", "scalar")
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_OUTPUT = 3

log = logging.getLogger(__name__)


class _Scalars(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in AdamScalars._fields)


class NativeKernels:
    """Kernels of one instruction set. A call releases the GIL and uses ``threads`` OpenMP threads."""

    def __init__(self, native: ctypes.CDLL, isa: str, threads: int) -> None:
        self.isa = isa
        self.threads = threads
        self._native = native
        self._head = (ctypes.c_int32(ISA_CODES[isa]), ctypes.c_int32(threads))
        # Called once per parameter and micro-batch: with argument types ctypes takes plain numbers, in half the time.
        number, pointer = ctypes.c_int32, ctypes.c_void_p
        self._accumulate = native["infinity_cpu_adam_accumulate"]
        self._accumulate.argtypes = (number, number, ctypes.c_int64, pointer, pointer, number, number)

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
        scalars = _Scalars(*step.scalars())
        buffers = _buffers(master, exp_avg, exp_avg_sq, grad, out)
        _accepted(self._native.infinity_cpu_adam_step(*self._head, *buffers, ctypes.byref(scalars)))

    def accumulate(self, into: torch.Tensor, grad: torch.Tensor, *, first: bool) -> None:
        check_accumulate(into, grad)
        where, dtype = (into.data_ptr(), grad.data_ptr()), DTYPE_CODES[grad.dtype]
        _accepted(self._accumulate(*self._head, into.numel(), *where, dtype, first))

    def sum_of_squares(self, x: torch.Tensor) -> SquareSum:
        check("x", x, FLOAT_DTYPES)
        hi, lo, finite = ctypes.c_double(), ctypes.c_double(), ctypes.c_int32()
        results = (ctypes.byref(hi), ctypes.byref(lo), ctypes.byref(finite))
        _accepted(
            self._native.infinity_cpu_adam_sum_of_squares(*self._head, _count(x), _pointer(x), _dtype(x), *results)
        )
        return SquareSum(hi.value, lo.value, bool(finite.value))

    def move(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
    ) -> None:
        """Moves the bytes that ``adam`` moves and computes nothing, for a roofline. Leaves rubbish in out."""
        check_adam(master, exp_avg, exp_avg_sq, grad, out)
        _accepted(self._native.infinity_cpu_adam_move(*self._head, *_buffers(master, exp_avg, exp_avg_sq, grad, out)))


def open_kernels(isa: str = "auto", threads: int = 0) -> Kernels:
    """The kernels of ``isa``, or of the widest instruction set for "auto"; ``threads=0`` takes PyTorch's number.

    INFINITY_ISA decides where ``isa`` is "auto". Raises ConfigError for an instruction set that cannot run here.
    """
    if threads < 0:
        raise ConfigError(f"threads is {threads}; expected a number of threads, or 0 for PyTorch's own number")
    asker = "isa"
    if isa == "auto" and os.environ.get(ISA_VARIABLE):
        isa, asker = os.environ[ISA_VARIABLE], ISA_VARIABLE
    if isa not in ("auto", "torch", *ISA_CODES):
        raise ConfigError(f"{asker} is {isa!r}; expected auto, {', '.join(BY_SPEED)} or torch")
    if isa == "torch":
        return TorchKernels()
    native = library.load("cpu_adam")
    if native is None:
        reason = library.why_missing("cpu_adam")
        if isa != "auto":
            raise ConfigError(f"{asker} is {isa!r}, which needs the native library, but {reason}")
        log.warning("PyTorch runs the optimizer, several times slower than the native kernels: %s", reason)
        return TorchKernels()
    runnable = _runnable(native)
    if isa == "auto":
        isa = runnable[0]
    elif isa not in runnable:
        raise ConfigError(f"{asker} is {isa!r}, which this machine cannot run; it can run {', '.join(runnable)}")
    return NativeKernels(native, isa, threads or torch.get_num_threads())


def runnable_isas() -> tuple[str, ...]:
    """The instruction sets whose native kernels this machine can run, fastest first; empty without the library."""
    native = library.load("cpu_adam")
    return () if native is None else _runnable(native)


def _runnable(native: ctypes.CDLL) -> tuple[str, ...]:
    return tuple(isa for isa in BY_SPEED if native.infinity_cpu_adam_supports(ctypes.c_int32(ISA_CODES[isa])))


def _buffers(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None,
) -> tuple[object, ...]:
    output = (None, ctypes.c_int32(NO_OUTPUT)) if out is None else (_pointer(out), _dtype(out))
    states = (_pointer(master), _pointer(exp_avg), _pointer(exp_avg_sq))
    return (_count(master), *states, _pointer(grad), _dtype(grad), *output)


def _count(tensor: torch.Tensor) -> ctypes.c_int64:
    return ctypes.c_int64(tensor.numel())


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _dtype(tensor: torch.Tensor) -> ctypes.c_int32:
    return ctypes.c_int32(DTYPE_CODES[tensor.dtype])


def _accepted(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the native library refused a call that was checked before it (status {status})")
