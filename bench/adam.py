"""Times the Adam kernel beside a mover of the same bytes, beside what PyTorch or DeepSpeed need for the same update.

    python -m bench.adam [--sizes 256Ki,16Mi,64Mi] [--threads 1,2] [--rounds 9] [--isa auto] [--json]

One update is everything between a scaled gradient and the weights of the next forward: unscale and clip, decay, Adam,
and, with a bf16 gradient, the bf16 copy of the weights. Contestants take turns on the same buffers within each round,
because memory bandwidth drifts, in another order each time. A ratio is the median over the rounds of the other's time
over ours, so more than 1 means that ours is faster. The last line of ``--json`` holds the worst ratio over all cases
that do not fit a cache, with the load of the machine: other processes' work reads as the kernel's, most of all where
every core is used. "Sequence" is a peer's kernel with the passes over memory that it needs around it, "bare" the kernel
alone, which is fair where the gradient is fp32. DeepSpeed runs in a process and an environment of its own, on memory of
its own; without it (bench/setup_deepspeed.sh) the bench says so and goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.arguments import positive, several
from bench.deepspeed_venv import find_python
from infinity._native.cpu_adam import AdamStep, NativeKernels, open_kernels
from infinity.memory.host import HostMemory

UNITS = {"Ki": 1 << 10, "Mi": 1 << 20}
ELEMENTS_PER_TIMING = 1 << 24
"""Small updates are repeated until a timing covers this many elements."""

PAUSE_SECONDS = 0.02
"""Before each timing, for the threads of the one before to go to sleep, those of another process most of all."""

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


Timing = Callable[[int], float]
"""Seconds of one update, of so many in a row."""


def timed(update: Callable[[], object]) -> Timing:
    def timing(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            update()
        return (time.perf_counter() - start) / calls

    return timing


def own(b: Buffers, kernels: NativeKernels) -> dict[str, Timing]:
    """The kernel with everything in it; a kernel that only moves what it moves."""
    return {
        "ours": timed(lambda: kernels.adam(b.master, b.exp_avg, b.exp_avg_sq, b.grad, b.out, STEP)),
        "mover": timed(lambda: kernels.move(b.master, b.exp_avg, b.exp_avg_sq, b.grad, b.out)),
    }


def torch_fused(b: Buffers) -> dict[str, Timing]:
    """Fused AdamW with the passes around it that it does not fuse, then alone."""
    parameter = torch.nn.Parameter(b.master)
    parameter.grad = b.wide_grad
    optimizer = torch.optim.AdamW(
        [parameter], STEP.lr, (STEP.beta1, STEP.beta2), STEP.eps, STEP.weight_decay, fused=True
    )
    optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": b.exp_avg, "exp_avg_sq": b.exp_avg_sq}

    def sequence() -> None:
        if b.wide_grad is not b.grad:
            b.wide_grad.copy_(b.grad)
        b.wide_grad.mul_(STEP.grad_scale)
        optimizer.step()
        if b.out is not None:
            b.out.copy_(b.master)

    found = {"torch_fused_sequence": timed(sequence)}
    return found if b.wide_grad is not b.grad else found | {"torch_fused_bare": timed(optimizer.step)}


class DeepSpeed:
    """Its CPU Adam in a process of its own, which stays for the whole bench so that timings can alternate."""

    def __init__(self) -> None:
        python = find_python()
        if python is None:
            raise LookupError("DeepSpeed is not installed (run bench/setup_deepspeed.sh)")
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.deepspeed_adam_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        )

    def timings(self, n: int, grad: torch.dtype, threads: int) -> dict[str, Timing]:
        kind = str(grad).removeprefix("torch.")
        self._ask(op="open", elements=n, grad=kind, threads=threads)
        found: dict[str, Timing] = {"deepspeed_sequence": lambda calls: self._ask(op="sequence", calls=calls)}
        return found | (
            {"deepspeed_bare": lambda calls: self._ask(op="bare", calls=calls)} if kind == "float32" else {}
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, **request: Any) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise LookupError(f"DeepSpeed's CPU Adam failed: {' '.join(answer['error'].split())}")
        return float(answer.get("seconds", 0.0))


def start_deepspeed() -> DeepSpeed | None:
    """The peer, after a first small question; None, said once, where it does not run."""
    try:
        peer = DeepSpeed()
        peer.timings(1024, torch.float32, 1)
    except LookupError as why:
        print(f"left out: {why}", file=sys.stderr)
        return None
    return peer


@dataclass
class Case:
    """One size, gradient type and number of threads; ``seconds`` holds one update's time per contestant and round."""

    elements: int
    grad: str
    threads: int
    isa: str
    bytes_moved: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        return statistics.median(b / a for a, b in zip(self.seconds["ours"], self.seconds[name], strict=True))

    def __str__(self) -> str:
        columns = [f"{self.elements / 2**20:8.2f} Mi {self.grad:>8} {self.threads} threads {self.isa:>6}"]
        for name in self.seconds:
            speed = self.elements / self.median(name) / 1e9
            ratio = "" if name == "ours" else f" (x{self.ratio(name):.3f})"
            columns.append(f"{name} {speed:.2f} Gparam/s{ratio}")
        columns.append(f"ours {self.bytes_moved / self.median('ours') / 1e9:.0f} GB/s")
        return " | ".join(columns)


def measure(n: int, grad: torch.dtype, threads: int, isa: str, rounds: int, deepspeed: DeepSpeed | None = None) -> Case:
    kernels = open_kernels(isa, threads)
    if not isinstance(kernels, NativeKernels):
        raise SystemExit("bench.adam measures the native kernels, which are not built here; run `make build`")
    torch.set_num_threads(threads)
    buffers = Buffers.allocate(n, grad)
    case = Case(n, str(grad).removeprefix("torch."), threads, kernels.isa, buffers.bytes_moved)
    timings = own(buffers, kernels) | torch_fused(buffers)
    if deepspeed is not None:
        timings |= deepspeed.timings(n, grad, threads)
    calls = max(1, ELEMENTS_PER_TIMING // n)
    for name, timing in timings.items():
        case.seconds[name] = []
        timing(1)
    for turn in range(rounds):
        order = list(timings.items())
        random.Random(turn).shuffle(order)  # none always comes after the same other, whose threads may still be awake
        for name, timing in order:
            time.sleep(PAUSE_SECONDS)
            case.seconds[name].append(timing(calls))
    return case


def worst_ratios(cases: list[Case]) -> dict[str, float]:
    """Per rival the lowest ratio over the cases that memory bounds, or over all where there is none."""
    judged = [case for case in cases if case.elements >= CACHE_ELEMENTS] or cases
    names = dict.fromkeys(name for case in judged for name in case.seconds if name != "ours")
    return {name: min(case.ratio(name) for case in judged if name in case.seconds) for name in names}


def parse_size(text: str) -> int:
    unit = UNITS.get(text[-2:], 1)
    return int(text.removesuffix("Ki").removesuffix("Mi")) * unit


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.adam", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=several(parse_size), default="256Ki,16Mi,64Mi", help="parameters per update, comma-separated"
    )
    parser.add_argument("--threads", type=several(positive), default="1,2", help="thread counts, comma-separated")
    parser.add_argument("--rounds", type=positive, default=9, help="timings of each contestant; take 7 or more")
    parser.add_argument(
        "--isa",
        choices=("auto", "avx512", "avx2", "neon", "scalar"),
        default="auto",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per case, the ratios last")
    chosen = parser.parse_args()
    cases = []
    deepspeed = start_deepspeed()
    for n in chosen.sizes:
        for grad in (torch.float32, torch.bfloat16):
            for threads in chosen.threads:
                case = measure(n, grad, threads, chosen.isa, chosen.rounds, deepspeed)
                cases.append(case)
                print(json.dumps(asdict(case)) if chosen.json else case, flush=True)
    if deepspeed is not None:
        deepspeed.close()
    ratios = worst_ratios(cases)
    if chosen.json:
        print(json.dumps({"ratios": ratios, "load_average": os.getloadavg()}))
    else:
        print(f"worst ratios {ratios}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
