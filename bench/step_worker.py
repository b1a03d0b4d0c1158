"""Serves one contestant's training steps over JSON lines, in that contestant's own environment.

Each line on standard input is ``{"op": ...}``, each answer one line on standard output, {"error": ...} where it failed:

    {"op": "build", "trainer", "shape", "dtype", "tokens", "threads", "micro_batches", "options"} -> {"seconds"}
    {"op": "steps", "count"}          -> {"seconds", "interval", "cpu_seconds", "losses", "split"}
    {"op": "facts"}                   -> {"import_rss", "peak_rss", "read_bytes", "write_bytes", "steps", ...}
    {"op": "adam", "numel", "dtype"}  -> {"seconds"}
    {"op": "close"}                   -> {}

Steps are consecutive, all settled at the end; the interval is that between the returns of two steps; adam is our
kernel alone on so many parameters.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from typing import Any

from bench.step_model import Shape, batch

ADAM_NUMEL = 16 << 20


def status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next((int(line.split()[1]) << 10 for line in status if line.startswith(field + ":")), 0)


def disk_bytes() -> tuple[int, int]:
    """What this process has read from disks, written to disks."""
    with open("/proc/self/io", encoding="ascii") as counters:
        found = dict(line.split(": ") for line in counters.read().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Worker:
    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._import_rss = status_bytes("VmRSS")
        self._done = 0

    def build(
        self,
        trainer: str,
        shape: dict[str, int],
        dtype: str,
        tokens: int,
        threads: int,
        micro_batches: int,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        from bench.step_trainers import TRAINERS

        start = time.perf_counter()
        self._torch.set_num_threads(threads)
        self._shape, self._tokens, self._micro_batches = Shape(**shape), tokens, micro_batches
        if micro_batches > 1 and trainer in ("ours", "deepspeed"):
            options = options | {"micro_batches": micro_batches}
        self._trainer = TRAINERS[trainer](self._shape, dtype, **options)
        self._trainer.settle()
        self._disk = disk_bytes()
        return {"seconds": time.perf_counter() - start}

    def steps(self, count: int) -> dict[str, Any]:
        each = self._micro_batches
        data = [batch(self._shape, self._tokens, self._done * each + n) for n in range(count * each)]
        losses = []
        before = self._split()
        cpu, start = cpu_seconds(), time.perf_counter()
        returned = []
        for n in range(count):
            losses += self._trainer.step(data[n * each : (n + 1) * each])
            returned.append(time.perf_counter())
        self._trainer.settle()
        seconds = time.perf_counter() - start
        self._done += count
        return {
            "seconds": seconds,
            "interval": (returned[-1] - returned[0]) / (count - 1) if count > 1 else seconds,
            "cpu_seconds": cpu_seconds() - cpu,
            "losses": [float(loss) for loss in losses],
            "split": {name: (value - before.get(name, 0.0)) / count for name, value in self._split().items()}
            | {"wall": seconds / count},
        }

    def _split(self) -> dict[str, float]:
        facts = self._trainer.facts()
        seconds: dict[str, float] = facts["seconds"]
        return seconds | {f"wait {cause}": value for cause, value in facts.get("stalls", {}).items()}

    def facts(self) -> dict[str, Any]:
        read, written = disk_bytes()
        own: dict[str, Any] = self._trainer.facts()
        return own | {
            "import_rss": self._import_rss,
            "peak_rss": status_bytes("VmHWM"),
            "read_bytes": read - self._disk[0],
            "write_bytes": written - self._disk[1],
            "steps": self._done,
        }

    def adam(self, numel: int, dtype: str) -> dict[str, Any]:
        from infinity._native.cpu_adam import AdamStep, open_kernels

        torch = self._torch
        kernels = open_kernels("auto", 0)
        piece = min(numel, ADAM_NUMEL)
        master, first, second, gradient = (torch.zeros(piece) for _ in range(4))
        copy = torch.zeros(piece, dtype=torch.bfloat16) if dtype == "bf16" else None
        numbers = AdamStep(1e-4, 0.9, 0.999, 1e-8, 0.0, 1, True)
        kernels.adam(master, first, second, gradient, copy, numbers)
        repeats = max(1, round(numel / piece))
        start = time.perf_counter()
        for _ in range(repeats):
            kernels.adam(master, first, second, gradient, copy, numbers)
        seconds: float = (time.perf_counter() - start) * numel / (repeats * piece)
        return {"seconds": seconds}

    def close(self) -> dict[str, Any]:
        self._trainer.close()
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print must not mix with the answers
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            worker = worker or Worker()
            answer = getattr(worker, operation)(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        if operation == "close":
            break


if __name__ == "__main__":
    main()
