"""NVMe traffic is what the plan says, counted by the ledger as well as by the kernel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.shard.partition import Unit

BLOCKS = 4


@pytest.fixture
def swap() -> Iterator[str]:
    """A directory on the disk of the checkout: the kernel counts no traffic of file systems that live in memory."""
    with tempfile.TemporaryDirectory(suffix=".swap", dir=Path(__file__).parents[2]) as directory:
        yield directory


@dataclass(frozen=True)
class Traffic:
    """Bytes that moved between two moments."""

    read: int
    written: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.read - earlier.read, self.written - earlier.written)


def of_kernel() -> Traffic:
    """What this process had block devices do; direct I/O is counted when it is submitted."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    fields = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return Traffic(fields["read_bytes"], fields["write_bytes"])


def of_ledger(engine: Engine) -> Traffic:
    links = engine.report()["links"]
    return Traffic(links["nvme_read"]["bytes"], links["nvme_write"]["bytes"])


class Meter:
    """Both counters, from one reading to the next."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.settle()
        self._kernel, self._ledger = of_kernel(), of_ledger(engine)

    def read(self) -> Traffic:
        """Traffic since the last reading; the two counters agree."""
        self._engine.settle()
        kernel, ledger = of_kernel(), of_ledger(self._engine)
        moved = ledger - self._ledger
        assert kernel - self._kernel == moved, "the ledger is not what the kernel saw"
        self._kernel, self._ledger = kernel, ledger
        return moved


def start(swap: str, *, dtype: str = "bf16", grad: str = "host", zero: Any = None, **own: Any) -> Engine:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(d_model=64, n_layers=BLOCKS, n_heads=4, d_ff=192))
    placement = {"param": "nvme", "grad": grad, "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **(zero or {})},
        "infinity": {"placement": placement, "nvme_path": swap, "prefetch_units": 0, **own},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return initialize(model, config)[0]


def forward(engine: Engine) -> torch.Tensor:
    tokens = torch.arange(64).view(2, 32)
    loss: torch.Tensor = engine(tokens, tokens)
    return loss


def train_once(engine: Engine) -> None:
    engine.backward(forward(engine))
    engine.step()


def units_of(engine: Engine) -> tuple[Unit, ...]:
    return engine._parts.partition.units


def padding(engine: Engine) -> int:
    """Elements that are in the shards but are no parameters; at most a page of 16-bit values for each unit."""
    units = units_of(engine)
    spare = sum(unit.layout.numel - unit.numel for unit in units)
    slots = sum(len(unit.layout.slots) for unit in units)
    assert 0 < spare <= 2048 * len(units) + 32 * slots
    return spare


@pytest.mark.parametrize(("dtype", "read", "written"), [("bf16", 12, 14), ("fp32", 12, 12)])
@pytest.mark.parametrize("zero", [{"sub_group_size": 2048}, {"sub_group_size": 40_000}, {}])
def test_one_update(dtype: str, read: int, written: int, zero: Any, swap: str) -> None:
    with start(swap, dtype=dtype, zero=zero) as engine:
        train_once(engine)
        engine.backward(forward(engine))
        meter = Meter(engine)
        engine.step()
        moved = meter.read()
        elements = engine.report()["trained_parameters"] + padding(engine)
        assert moved == Traffic(engine.plan.update_read, engine.plan.update_written)
        assert moved == Traffic(read * elements, written * elements)


def test_gradients_on_nvme_cost_four_bytes_each_way(swap: str) -> None:
    with start(swap, grad="nvme") as engine:
        train_once(engine)
        loss = forward(engine)
        meter = Meter(engine)
        engine.backward(loss)
        backward = meter.read()
        elements = engine.report()["trained_parameters"] + padding(engine)
        assert backward.written == 4 * elements
        engine.backward(forward(engine))
        assert meter.read().written == 4 * elements, "a second backward reads the sum, adds, writes it again"
        engine.step()
        assert meter.read() == Traffic(engine.plan.update_read, engine.plan.update_written)
        assert engine.plan.update_read == 16 * elements


@pytest.mark.parametrize("slabs", [1, 2, 4])
def test_each_pass_reads_what_the_slabs_have_not_kept(slabs: int, swap: str) -> None:
    with start(swap, slabs=slabs) as engine:
        for _ in range(2):
            train_once(engine)
        engine.settle()
        one = sum(unit.layout.nbytes() for unit in units_of(engine))
        kept = sum(
            sum(sorted((unit.layout.nbytes() for unit in units), reverse=True)[:slabs])
            for units in _classes(engine).values()
        )
        meter = Meter(engine)
        loss = forward(engine)
        assert meter.read() == Traffic(one, 0)
        engine.backward(loss)
        assert meter.read() == Traffic(one - kept, 0)
        engine.step()
        assert meter.read() == Traffic(engine.plan.update_read, engine.plan.update_written)


def test_inference_reads_each_parameter_once(swap: str) -> None:
    with start(swap, slabs=1) as engine, torch.no_grad():
        meter = Meter(engine)
        for _ in range(2):
            forward(engine)
        one = sum(unit.layout.nbytes() for unit in units_of(engine))
        alone = sum(units[0].layout.nbytes() for units in _classes(engine).values() if len(units) == 1)
        last = max(unit.layout.nbytes() for unit in units_of(engine))
        moved = meter.read()
        assert 2 * one - alone - last <= moved.read <= 2 * one - alone


def test_reading_ahead_moves_no_more(swap: str) -> None:
    """Three whole steps, with and without read-ahead: what is read early is not read again."""
    totals = []
    for prefetch in (0, "auto"):
        with start(swap, slabs=2, prefetch_units=prefetch) as engine:
            for _ in range(2):
                train_once(engine)
            meter = Meter(engine)
            for _ in range(3):
                train_once(engine)
            totals.append(meter.read())  # at either end the first units of the step to come have been read ahead
    assert totals[0] == totals[1]


def _classes(engine: Engine) -> dict[int, list[Unit]]:
    classes: dict[int, list[Unit]] = {}
    for unit in units_of(engine):
        classes.setdefault(engine._parts.params._slab_bytes[unit.index], []).append(unit)
    return classes
