"""Times saving, loading, exporting beside the disk's own sequential write, with the memory each needs.

    python -m bench.checkpoint [--parameters 120] [--directory runs/bench] [--rounds 3] [--json]

Every round writes one file of the checkpoint's size with large direct writes from memory on huge pages, then saves the
same states, in alternation, because disks drift. The figure is the ratio of the two rates; removing old files is not
timed of either. Loading is measured beside reading such a file. States on NVMe are read from the disk that they are
written to, as well as the other way round, so the limit there is what a plain copy of such a file reaches on that disk:
three threads that each read a piece, then write it, so that both go on all the time.

A save beside training is timed as two steps with it against two steps without: what training loses, as a share of what
a save takes that it waits for. Memory is what the process takes on top of what it had before (anonymous, sampled).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from bench.arguments import positive
from infinity.config.size import format_bytes
from infinity.memory.host import HostMemory
from infinity.obs.process_memory import AnonymousPeak, status_bytes
from infinity.storage.traffic import fill

REQUEST_BYTES = 8 << 20
COPIERS = 3
ROWS = 256
"""In the batch of a step that a save goes on beside."""


def model(parameters: int) -> nn.Module:
    """About so many million parameters in blocks of 8.4 million."""
    width = 2048
    return nn.Sequential(
        *(nn.Linear(width, 2 * width, bias=False) for _ in range(max(1, parameters * 10**6 // (2 * width * width))))
    )


class Blocks(nn.Module):
    """The layers one after the other, each back to its input's width."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers.children())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[..., : x.shape[-1]]
        return x.float().square().mean()


def config(swap: Path, device: str) -> dict[str, Any]:
    offload = {"device": device, "nvme_path": str(swap)} if device == "nvme" else {"device": device}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }


def timed(work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, bytes of anonymous memory beyond what there was."""
    before = status_bytes("RssAnon")
    with AnonymousPeak() as memory:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
    return seconds, max(0, memory.peak_bytes - before)


def write_raw(path: Path, nbytes: int, window: torch.Tensor) -> None:
    """The fastest plain way to a durable file: large direct writes, fsync."""
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT, 0o600)
    view = memoryview(window.numpy())
    for start in range(0, nbytes, REQUEST_BYTES):
        os.pwrite(descriptor, view[: min(REQUEST_BYTES, nbytes - start)], start)
    os.fsync(descriptor)
    os.close(descriptor)


def read_raw(path: Path, window: torch.Tensor) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    view = memoryview(window.numpy())
    while os.readv(descriptor, [view]):
        pass
    os.close(descriptor)


def copy_raw(source: Path, target: Path, nbytes: int, window: torch.Tensor) -> None:
    """The same bytes from one file to another, durable."""
    first = os.open(source, os.O_RDONLY | os.O_DIRECT)
    second = os.open(target, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT, 0o600)

    def run(number: int) -> None:
        view = memoryview(window.numpy())[number * REQUEST_BYTES : (number + 1) * REQUEST_BYTES]
        for start in range(number * REQUEST_BYTES, nbytes, COPIERS * REQUEST_BYTES):
            piece = view[: min(REQUEST_BYTES, nbytes - start)]
            os.preadv(first, [piece], start)
            os.pwrite(second, piece, start)

    with ThreadPoolExecutor(COPIERS) as pool:
        list(pool.map(run, range(COPIERS)))
    os.fsync(second)
    os.close(first)
    os.close(second)


def train(engine: Any, batch: torch.Tensor, first: Callable[[], Any] = lambda: None) -> None:
    first()
    for _ in range(2):
        engine.backward(engine(batch))
        engine.step()
    engine.settle()


def measure(parameters: int, directory: Path, rounds: int, device: str) -> dict[str, Any]:
    """One placement: rates in GB/s, ratios as medians over the rounds, memory in bytes."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    path = directory / "ckpt"
    window = HostMemory(COPIERS * REQUEST_BYTES)
    fill(window.bytes)
    engine, *_ = infinity.initialize(Blocks(model(parameters)), config(directory / "swap", device))
    found: dict[str, Any] = {"device": device, "parameters": engine.report()["parameters"], "rounds": []}
    try:
        batch = torch.randn(ROWS, 2048, dtype=torch.bfloat16)
        train(engine, batch)
        for turn in range(rounds):
            saved: list[str] = []
            tag = f"round-{turn}"
            seconds, memory = timed(lambda saved=saved, tag=tag: saved.append(engine.save_checkpoint(path, tag)))
            nbytes = sum(entry.stat().st_size for entry in os.scandir(saved[0])) // 4096 * 4096
            one = window.bytes[:REQUEST_BYTES]
            raw_write, _ = timed(lambda nbytes=nbytes, one=one: write_raw(directory / "raw", nbytes, one))
            raw_read, _ = timed(lambda one=one: read_raw(directory / "raw", one))
            paths = directory / "raw", directory / "copy"
            copy, _ = timed(lambda nbytes=nbytes, paths=paths: copy_raw(*paths, nbytes, window.bytes))
            os.unlink(directory / "copy")
            load, load_memory = timed(lambda: engine.load_checkpoint(path))
            export, export_memory = timed(lambda: engine.save_pretrained(directory / "out"))
            os.unlink(directory / "raw")
            shutil.rmtree(saved[0])
            alone, _ = timed(lambda: train(engine, batch))
            both, _ = timed(lambda tag=tag: train(engine, batch, lambda: engine.save_checkpoint(path, tag, wait=False)))
            shutil.rmtree(saved[0])
            found["rounds"].append(
                {
                    "bytes": nbytes,
                    "save_GB_per_s": nbytes / seconds / 1e9,
                    "raw_write_GB_per_s": nbytes / raw_write / 1e9,
                    "load_GB_per_s": nbytes / load / 1e9,
                    "raw_read_GB_per_s": nbytes / raw_read / 1e9,
                    "raw_copy_GB_per_s": nbytes / copy / 1e9,
                    "two_steps_s": alone,
                    "two_steps_beside_a_save_s": both,
                    "save_s": seconds,
                    "export_GB_per_s": 2 * found["parameters"] / export / 1e9,
                    "save_memory": memory,
                    "load_memory": load_memory,
                    "export_memory": export_memory,
                }
            )
    finally:
        engine.destroy()
        window.free()
        shutil.rmtree(directory, ignore_errors=True)
    rows = found["rounds"]
    found["save_ratio"] = statistics.median(row["save_GB_per_s"] / row["raw_write_GB_per_s"] for row in rows)
    found["save_to_copy"] = statistics.median(row["save_GB_per_s"] / row["raw_copy_GB_per_s"] for row in rows)
    found["load_to_copy"] = statistics.median(row["load_GB_per_s"] / row["raw_copy_GB_per_s"] for row in rows)
    found["lost_beside"] = statistics.median(
        (row["two_steps_beside_a_save_s"] - row["two_steps_s"]) / row["save_s"] for row in rows
    )
    found["load_ratio"] = statistics.median(row["load_GB_per_s"] / row["raw_read_GB_per_s"] for row in rows)
    for what in ("save", "load", "export"):
        found[f"{what}_peak_extra_memory"] = max(row[f"{what}_memory"] for row in rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=positive, default=120, help="millions")
    parser.add_argument("--directory", type=Path, default=Path("runs/bench-checkpoint"))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measure(options.parameters, options.directory, options.rounds, device) for device in ("cpu", "nvme")]
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        rows = result["rounds"]
        print(f"{result['device']}: {result['parameters'] / 1e6:.0f} M parameters, {format_bytes(rows[0]['bytes'])}")
        for name in ("save", "raw_write", "load", "raw_read", "raw_copy", "export"):
            rates = ", ".join(f"{row[f'{name}_GB_per_s']:.2f}" for row in rows)
            print(f"  {name.replace('_', ' '):10} {rates} GB/s")
        print(f"  save / raw write {result['save_ratio']:.2f}, load / raw read {result['load_ratio']:.2f}")
        print(f"  save / plain copy {result['save_to_copy']:.2f}, load / plain copy {result['load_to_copy']:.2f}")
        steps = ", ".join(f"{row['two_steps_s']:.2f} -> {row['two_steps_beside_a_save_s']:.2f}" for row in rows)
        print(f"  two steps {steps} s beside a save: training loses {result['lost_beside']:.2f} of a save's time")
        extra = ", ".join(
            f"{what} {format_bytes(result[f'{what}_peak_extra_memory'])}" for what in ("save", "load", "export")
        )
        print(f"  peak extra memory: {extra}")


if __name__ == "__main__":
    main()
