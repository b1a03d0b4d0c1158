"""Measures what a step's time depends on: disk, matrix products, Adam."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from infinity._native.cpu_adam import AdamStep, open_kernels
from infinity.plan.links import Machine
from infinity.storage.traffic import Pattern, Setting, TrialFiles, Window, measure

TRIAL_BYTES = 256 << 20
MATRIX = 1024
ADAM_NUMEL = 4 << 20
RUNS = 3


def measure_machine(directories: Sequence[str], dtype: str) -> Machine:
    """A few seconds of measurements; the fastest of three runs counts. Without directories the disk is not asked."""
    read = write = float("inf")
    if directories:
        setting = Setting()
        engine, window = setting.open(), Window(setting.window_bytes)
        try:
            with TrialFiles(list(directories), TRIAL_BYTES) as files:
                rates = {
                    pattern: max(measure(engine, files, pattern, window.bytes).rate for _ in range(RUNS))
                    for pattern in (Pattern.READ, Pattern.WRITE)
                }
        finally:
            engine.close()
            window.free()
        read, write = rates[Pattern.READ] * 1e9, rates[Pattern.WRITE] * 1e9
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    left, right = torch.ones(MATRIX, MATRIX, dtype=kind), torch.ones(MATRIX, MATRIX, dtype=kind)
    product = _fastest(lambda: torch.mm(left, right))
    state = [torch.zeros(ADAM_NUMEL) for _ in range(4)]
    kernels = open_kernels("auto", 0)
    step = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.0, 1, True, 1.0)
    update = _fastest(lambda: kernels.adam(state[0], state[1], state[2], state[3], None, step))
    return Machine(read, write, 2 * MATRIX**3 / product, ADAM_NUMEL / update)


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
