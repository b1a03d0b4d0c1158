"""Where state may be kept, by what it may be moved: the choices that must never change a bit."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from infinity._native.cpu_adam import runnable_isas
from infinity.engine.build import Injected
from infinity.storage.io_engine import BACKENDS, Faults, probe

Overrides = dict[str, Any]

OFFLOADS = ("none", "cpu", "nvme")
PAGE_SIZED_SUB_GROUP = 2048


@dataclass(frozen=True)
class Cell:
    """One choice: keys of the ``infinity`` block, of the whole config, what is injected."""

    name: str
    infinity: Overrides = field(default_factory=dict)
    rest: Overrides = field(default_factory=dict)
    read_ahead: int | None = None
    delay_seed: int | None = None

    def injected(self) -> Injected:
        """Slabs full of NaN on release in every cell; delays where the cell asks for them."""
        if self.delay_seed is None:
            return Injected(poison=True, read_ahead=self.read_ahead)
        can_reorder = self.infinity.get("io_engine", "auto") not in ("libaio", "python")
        faults = Faults(seed=self.delay_seed, short=0.3, delay_seconds=0.002, reorder=can_reorder)
        return Injected(poison=True, delay=Jitter(self.delay_seed), faults=faults, read_ahead=self.read_ahead)


class Jitter:
    """Puts a lane to sleep for up to two milliseconds, now and then."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            seconds = max(0.0, self._random.uniform(-0.001, 0.002))
        time.sleep(seconds)


def config_of(training: Overrides, cell: Cell, swap: str) -> Overrides:
    """The config of one run; everything that goes to NVMe goes below ``swap``."""
    config = {**training, **{key: value for key, value in cell.rest.items() if key != "zero_optimization"}}
    config["zero_optimization"] = {**training["zero_optimization"], **cell.rest.get("zero_optimization", {})}
    config["infinity"] = {"nvme_path": swap, **cell.infinity}
    return config


def offload(param: str, optimizer: str) -> Overrides:
    """The two blocks of a DeepSpeed config."""
    blocks = {"offload_param": {"device": param}, "offload_optimizer": {"device": optimizer}}
    return {"zero_optimization": blocks}


def placed(param: str, grad: str, master: str, exp_avg: str, exp_avg_sq: str) -> Overrides:
    """A tier for each kind of state."""
    kinds = {"param": param, "grad": grad, "master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return {"placement": kinds}


ON_NVME = placed("nvme", "nvme", "nvme", "nvme", "nvme")
REFERENCE = Cell("everything on the device", rest=offload("none", "none"))


@cache
def backends() -> tuple[str, ...]:
    """The I/O engines that this machine can run."""
    return tuple(name for name in BACKENDS if probe(name) is None)


def isas() -> list[str]:
    """The bodies of Adam that this machine can run."""
    return [*runnable_isas(), "torch"]


def placements() -> list[Cell]:
    """Parameters and optimizer on each tier, independently."""
    pairs = [pair for pair in product(OFFLOADS, OFFLOADS) if pair != ("none", "none")]
    return [Cell(f"params {param}, optimizer {other}", rest=offload(param, other)) for param, other in pairs]


def axes() -> list[Cell]:
    """One choice at a time changed, with everything on NVMe."""
    cells = [Cell("everything on nvme", ON_NVME)]
    cells += [
        Cell("gradients nvme, rest host", placed("host", "nvme", "host", "host", "host")),
        Cell("gradients host, rest nvme", placed("nvme", "host", "nvme", "nvme", "nvme")),
        Cell("moments apart", placed("host", "host", "nvme", "host", "nvme")),
    ]
    cells += [Cell(f"io {name}", {**ON_NVME, "io_engine": name}) for name in backends()]
    cells += [Cell(f"isa {name}", {**ON_NVME, "isa": name}) for name in isas()]
    cells += [Cell(f"adam threads {count}", {**ON_NVME, "adam_threads": count}) for count in (1, 3)]
    cells += [
        Cell(f"sub-group {size}", ON_NVME, {"zero_optimization": {"sub_group_size": size}})
        for size in (PAGE_SIZED_SUB_GROUP, 5000, 1 << 24)
    ]
    cells += [Cell(f"prefetch {count}", {**ON_NVME, "prefetch_units": count}) for count in (0, 1, 3)]
    cells += [Cell(f"slabs {count}", {**ON_NVME, "slabs": count}) for count in (1, 2, 4)]
    cells += [Cell(f"recompute {choice}", {**ON_NVME, "recompute": choice}) for choice in (False, True)]
    cells += [Cell("recompute one block", {**ON_NVME, "slabs": 1, "recompute": {"blocks.1": True, "*": False}})]
    small = {"zero_optimization": {"sub_group_size": PAGE_SIZED_SUB_GROUP}}
    cells += [Cell(f"read-ahead {count}", ON_NVME, small, read_ahead=count) for count in (0, 1, 5)]
    cells += [
        Cell(f"delays, io {name}", {**ON_NVME, "io_engine": name, "slabs": 2}, small, delay_seed=seed)
        for seed, name in enumerate(backends())
    ]
    cells += [
        Cell("delays, gradients host", {**placed("nvme", "host", *["nvme"] * 3), "slabs": 1}, small, delay_seed=9)
    ]
    cells += [Cell("delays, params host", {**placed("host", "nvme", *["nvme"] * 3)}, small, delay_seed=10)]
    return cells


def split() -> list[Cell]:
    """One kind on two or three tiers: by the ratio of a DeepSpeed config, by budgets that hold a part of it."""
    cells = []
    for param, optimizer, ratio in (("nvme", "nvme", 0.5), ("cpu", "nvme", 0.6), ("nvme", "cpu", 0.4)):
        blocks = offload(param, optimizer)["zero_optimization"]
        rest = {"zero_optimization": {name: {**block, "ratio": ratio} for name, block in blocks.items()}}
        cells.append(Cell(f"{ratio} of params {param}, optimizer {optimizer}", rest=rest))
    for device, host in (("96KiB", "640KiB"), ("160KiB", "448KiB"), ("256KiB", "320KiB"), ("96KiB", "288KiB")):
        own = {"device_memory": device, "host_memory": host, "tile_bytes": "1TiB"}
        rest = {"zero_optimization": {**offload("auto", "auto")["zero_optimization"], "sub_group_size": 2048}}
        cells.append(Cell(f"auto in {device} and {host}", own, rest))
    return cells


def in_backward(cells: list[Cell]) -> list[Cell]:
    """The same choices with each unit updated in backward; the reference updates all at the end of the step."""
    return [replace(cell, infinity={**cell.infinity, "update_in_backward": True}) for cell in cells]


def mixed(count: int, seed: int) -> list[Cell]:
    """Every choice drawn at random, together."""
    draw = random.Random(seed)
    cells = []
    for number in range(count):
        tiers = [draw.choice(("device", "host", "nvme", "nvme")) for _ in range(5)]
        infinity: Overrides = {
            **placed(*tiers),
            "io_engine": draw.choice(backends()),
            "isa": draw.choice(isas()),
            "prefetch_units": draw.choice(("auto", 0, 1, 2)),
            "slabs": draw.choice(("auto", 1, 2, 3)),
            "recompute": draw.choice(("auto", True, False)),
        }
        rest = {
            "zero_optimization": {"sub_group_size": draw.choice((PAGE_SIZED_SUB_GROUP, 6000, 1 << 24))},
            "aio": {"block_size": draw.choice((4096, 8192, 1 << 20)), "queue_depth": draw.choice((1, 4, 32))},
        }
        delayed = draw.random() < 0.5
        told = ", ".join(str(value) for key, value in infinity.items() if key != "placement")
        cells.append(
            Cell(
                f"mixed {seed}.{number} ({' '.join(tiers)}, {told}, {rest['zero_optimization']['sub_group_size']}"
                f"{', delays' if delayed else ''})",
                infinity,
                rest,
                read_ahead=draw.choice((None, 0, 1, 3)),
                delay_seed=number if delayed else None,
            )
        )
    return cells
