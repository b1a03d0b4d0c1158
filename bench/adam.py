"""Times the Adam kernel beside a mover of the same bytes, beside what PyTorch needs for the same update.

    python -m bench.adam [--sizes 256Ki,16Mi,64Mi] [--threads 1,2] [--rounds 9] [--isa auto] [--json]

One update is everything between a scaled gradient and the weights of the next forward: unscale and clip, decay, Adam,
and, with a bf16 gradient, the bf16 copy of the weights. Contestants take turns on the same buffers within each round,
because memory bandwidth drifts, in another order each time. A ratio is the median over the rounds of the other's time
over ours, so more than 1 means that ours is faster. The last line of ``--json`` holds the worst ratio over all cases
that do not fit a cache, with the load of the machine: other processes' work reads as the kernel's, most of all where
every core is used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from infinity._native.cpu_adam import AdamStep, NativeKernels, open_kernels
from infinity.memory.host import HostMemory

UNITS = {"Ki": 1 << 10, "Mi": 1 << 20}
ELEMENTS_PER_TIMING = 1 << 24
"""Small updates are repeated until a timing covers this many elements."""

CACHE_ELEMENTS = 1 << 22
"""Smaller updates may live in a cache, where a ratio says nothing about memory."""

STEP = AdamStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=10, decoupled=True, grad_scale=0.5)


@dataclass(frozen=True)
class Buffers:
    """What one update reads and writes, on huge pages as in training; ``wide_grad`` is PyTorch's alone."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    out: Tensor | None
    wide_grad: Tensor

    @classmethod
    def allocate(cls, n: int, grad: torch.dtype) -> Buffers:
        def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return HostMemory(n * dtype.itemsize).bytes.view(dtype).fill_(value)

        gradient = filled(0.25, grad)
        narrow = grad is not torch.float32
        return cls(
            master=filled(0.5),
            exp_avg=filled(0.1),
            exp_avg_sq=filled(0.01),
            grad=gradient,
            out=filled(0.0, grad) if narrow else None,
            wide_grad=filled(0.25) if narrow else gradient,
        )

    @property
    def bytes_moved(self) -> int:
        """Read: master, both moments, gradient. Written: master, both moments, copy-out."""
        once = self.grad.nbytes + (0 if self.out is None else self.out.nbytes)
        return 2 * 3 * self.master.nbytes + once


Update = Callable[[], object]
Contestant = Callable[[Buffers, NativeKernels], Update]


def ours(b: Buffers, kernels: NativeKernels) -> Update:
    return lambda: kernels.adam(b.master, b.exp_avg, b.exp_avg_sq, b.grad, b.out, STEP)


def mover(b: Buffers, kernels: NativeKernels) -> Update:
    return lambda: kernels.move(b.master, b.exp_avg, b.exp_avg_sq, b.grad, b.out)


def torch_fused_sequence(b: Buffers, kernels: NativeKernels) -> Update:
    """Fused AdamW with the passes around it that it does not fuse."""
    parameter = torch.nn.Parameter(b.master)
    parameter.grad = b.wide_grad
    optimizer = torch.optim.AdamW(
        [parameter], STEP.lr, (STEP.beta1, STEP.beta2), STEP.eps, STEP.weight_decay, fused=True
    )
    optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": b.exp_avg, "exp_avg_sq": b.exp_avg_sq}

    def update() -> None:
        if b.wide_grad is not b.grad:
            b.wide_grad.copy_(b.grad)
        b.wide_grad.mul_(STEP.grad_scale)
        optimizer.step()
        if b.out is not None:
            b.out.copy_(b.master)

    return update


CONTESTANTS: dict[str, Contestant] = {"ours": ours, "mover": mover, "torch_fused_sequence": torch_fused_sequence}
"""A peer joins by adding itself here."""


@dataclass
class Case:
    """One size, gradient type and number of threads; ``seconds`` holds one update's time per contestant and round."""

    elements: int
    grad: str
    threads: int
    isa: str
    bytes_moved: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CONTESTANTS})

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        return statistics.median(b / a for a, b in zip(self.seconds["ours"], self.seconds[name], strict=True))

    def __str__(self) -> str:
        columns = [f"{self.elements / 2**20:8.2f} Mi {self.grad:>8} {self.threads} threads {self.isa:>6}"]
        for name in CONTESTANTS:
            speed = self.elements / self.median(name) / 1e9
            ratio = "" if name == "ours" else f" (x{self.ratio(name):.3f})"
            columns.append(f"{name} {speed:.2f} Gparam/s{ratio}")
        columns.append(f"ours {self.bytes_moved / self.median('ours') / 1e9:.0f} GB/s")
        return " | ".join(columns)


def measure(n: int, grad: torch.dtype, threads: int, isa: str, rounds: int) -> Case:
    kernels = open_kernels(isa, threads)
    if not isinstance(kernels, NativeKernels):
        raise SystemExit("bench.adam measures the native kernels, which are not built here; run `make build`")
    torch.set_num_threads(threads)
    buffers = Buffers.allocate(n, grad)
    case = Case(n, str(grad).removeprefix("torch."), threads, kernels.isa, buffers.bytes_moved)
    updates = {name: contestant(buffers, kernels) for name, contestant in CONTESTANTS.items()}
    calls = max(1, ELEMENTS_PER_TIMING // n)
    for update in updates.values():
        update()
    for turn in range(rounds):
        order = list(updates.items())
        first = turn % len(order)  # none always comes after the same other, whose threads may still be awake
        for name, update in order[first:] + order[:first]:
            start = time.perf_counter()
            for _ in range(calls):
                update()
            case.seconds[name].append((time.perf_counter() - start) / calls)
    return case


def worst_ratios(cases: list[Case]) -> dict[str, float]:
    """Per rival the lowest ratio over the cases that memory bounds, or over all where there is none."""
    judged = [case for case in cases if case.elements >= CACHE_ELEMENTS] or cases
    return {name: min(case.ratio(name) for case in judged) for name in CONTESTANTS if name != "ours"}


def parse_size(text: str) -> int:
    unit = UNITS.get(text[-2:], 1)
    return int(text.removesuffix("Ki").removesuffix("Mi")) * unit


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adam", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="256Ki,16Mi,64Mi", help="parameters per update, comma-separated")
    parser.add_argument("--threads", default="1,2", help="thread counts, comma-separated")
    parser.add_argument("--rounds", type=int, default=9, help="timings of each contestant; take 7 or more")
    parser.add_argument("--isa", default="auto", help="auto, avx512, avx2, neon or scalar")
    parser.add_argument("--json", action="store_true", help="print one JSON object per case, the ratios last")
    chosen = parser.parse_args()
    cases = []
    for n in map(parse_size, chosen.sizes.split(",")):
        for grad in (torch.float32, torch.bfloat16):
            for threads in map(int, chosen.threads.split(",")):
                case = measure(n, grad, threads, chosen.isa, chosen.rounds)
                cases.append(case)
                print(json.dumps(asdict(case)) if chosen.json else case, flush=True)
    ratios = worst_ratios(cases)
    if chosen.json:
        print(json.dumps({"ratios": ratios, "load_average": os.getloadavg()}))
    else:
        print(f"worst ratios {ratios}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
