"""Serves DeepSpeed's CPU Adam over JSON lines, in DeepSpeed's own environment.

Each line on standard input is one request, each answer one line on standard output, {"error": ...} where it failed:

    {"op": "open", "elements", "grad": "float32" | "bfloat16", "threads"} -> {"ok": true}
    {"op": "bare", "calls"}     -> {"seconds"}   the kernel alone, on an fp32 gradient
    {"op": "sequence", "calls"} -> {"seconds"}   with the passes it needs: widen, unscale, the 16-bit copy
"""

from __future__ import annotations

import time
from typing import Any

from bench.deepspeed_aio_peer import load_compiled, serve

RATE, BETA1, BETA2, EPS, DECAY, SCALE = 1e-3, 0.9, 0.999, 1e-8, 0.1, 0.5


class Peer:
    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._op = load_compiled("cpu_adam")
        self._op.create_adam(0, RATE, BETA1, BETA2, EPS, DECAY, True, False)
        self._step = 10

    def open(self, elements: int, grad: str, threads: int) -> dict[str, Any]:
        torch = self._torch
        torch.set_num_threads(threads)
        wide = {"dtype": torch.float32}
        self.master = torch.full((elements,), 0.5, **wide)
        self.exp_avg = torch.full((elements,), 0.1, **wide)
        self.exp_avg_sq = torch.full((elements,), 0.01, **wide)
        self.grad = torch.full((elements,), 0.25, dtype=getattr(torch, grad))
        self.wide_grad = torch.full((elements,), 0.25, **wide) if grad != "float32" else self.grad
        self.out = torch.zeros(elements, dtype=self.grad.dtype) if grad != "float32" else None
        return {"ok": True}

    def bare(self, calls: int) -> dict[str, Any]:
        start = time.perf_counter()
        for _ in range(calls):
            self._update()
        return {"seconds": (time.perf_counter() - start) / calls}

    def sequence(self, calls: int) -> dict[str, Any]:
        start = time.perf_counter()
        for _ in range(calls):
            if self.wide_grad is not self.grad:
                self.wide_grad.copy_(self.grad)
            self.wide_grad.mul_(SCALE)
            self._update()
            if self.out is not None:
                self.out.copy_(self.master)
        return {"seconds": (time.perf_counter() - start) / calls}

    def _update(self) -> None:
        self._op.adam_update(
            0, self._step, RATE, BETA1, BETA2, EPS, DECAY, True, self.master, self.wide_grad, self.exp_avg,
            self.exp_avg_sq,
        )  # fmt: skip


if __name__ == "__main__":
    serve(Peer)
