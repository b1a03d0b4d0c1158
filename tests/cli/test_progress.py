"""The panel fits a terminal of 80 columns, shows every number of a step, leaves evaluations standing."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from infinity.cli.measure import LinkUse, StepMeter, StepRecord, TierUse
from infinity.cli.progress import Heading, Lines, Panel, open_progress
from infinity.cli.summary import ProcessMemory

HEADING = Heading(
    parameters=113_664_768,
    dtype="bf16",
    steps=30,
    micro_batch=8,
    accumulation=1,
    ranks=1,
    sequence_length=128,
    seed=0,
    corpus="stdlib",
    train_bytes=30_000_000,
    held_back_bytes=1_500_000,
    unigram_entropy=3.2505,
    io_engine="io_uring",
    isa="avx512",
)
RECORD = StepRecord(
    step=7,
    loss=2.87654,
    learning_rate=3e-4,
    gradient_norm=None,
    tokens=1024,
    seconds=4.0,
    phases={"forward": 0.9, "backward": 2.9, "step": 0.1, "update": 1.25},
    stalls={"parameter_read": 0.25, "gradient_write": 0.0004},
    links={"nvme_read": LinkUse(2_000_000_000, 0.5), "host_to_device": LinkUse(0, 0.0)},
    tiers={"device": TierUse(96_000_000, 85_000_000, 84_000_000), "nvme": TierUse(None, 1 << 30, 1 << 30)},
)


def shown(width: int, *, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    progress = open_progress(console, every=1)
    progress.begin(HEADING)
    progress.evaluated(0, 5.545)
    progress.step(RECORD)
    progress.close()
    progress.close()
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_fits_and_tells_everything(width: int) -> None:
    text = shown(width, terminal=True)
    last = text[text.rindex("step 7/30") :]
    for part in ("2.877", "held back 5.545", "3.251", "lr 3.0e-04", "grad norm none", "256 tokens/s", "4.00 s/step"):
        assert part in last
    assert "forward 0.90, backward 2.90, step 0.10, update 1.25 s" in last
    assert "parameter read 0.25 s" in last
    assert "gradient write" not in last
    assert "nvme read 0.50 GB/s" in last
    assert "host to device" not in last
    assert "device 84.00 MB of 96.00 MB, nvme 1.07 GB" in last
    assert "after    0 steps: loss on held-back text 5.545" in text
    plain = [line for line in text.replace("\r", "\n").split("\n") if "\x1b" not in line]
    assert max(map(len, plain)) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_a_save_has_a_bar_until_it_is_complete(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    panel = Panel(console)
    panel.begin(HEADING)
    panel.step(RECORD)
    for done in (0, 300_000_000, 1_400_000_000):
        panel.saving(done, 1_400_000_001)
    panel.close()
    with console.capture() as capture:
        console.print(panel.bars())
    assert "0.3/1.4 GB" not in capture.get()
    assert re.search(r"saving .*1\.4/1\.4 GB", capture.get())
    assert max(map(len, capture.get().splitlines())) <= width
    panel.saving(1_400_000_001, 1_400_000_001)
    with console.capture() as capture:
        console.print(panel.bars())
    assert "saving" not in capture.get()
    assert "step 7/30" in capture.get()
    panel.saving(1, 2)  # the next save begins anew
    with console.capture() as capture:
        console.print(panel.bars())
    assert "1/2 bytes" in capture.get()


def test_elsewhere_a_step_is_one_line() -> None:
    lines = shown(80, terminal=False).splitlines()
    assert len(lines) == len(HEADING.lines()) + 2
    assert lines[-1].startswith("step  7/30 | loss 2.877 | lr 3.0e-04 | grad norm none | 256 tokens/s | 4.00 s/step")
    assert lines[-1].endswith("| nvme read 0.50 GB/s | device 84.00 MB of 96.00 MB, nvme 1.07 GB")


@pytest.mark.parametrize(("every", "expected"), [(0, 0), (1, 30), (10, 4)])
def test_lines_come_as_often_as_asked(every: int, expected: int) -> None:
    file = io.StringIO()
    lines = Lines(Console(file=file), every=every)
    lines.begin(HEADING)
    for step in range(1, 31):
        lines.step(StepRecord(**{**vars(RECORD), "step": step}))
    assert file.getvalue().count("| loss") == expected


def test_a_step_is_the_difference_of_two_reports() -> None:
    def report(bytes_read: int, forward: float, stalls: dict[str, float]) -> dict[str, object]:
        return {
            "time": {"forward": forward},
            "stalls": stalls,
            "links": {"nvme_read": {"bytes": bytes_read, "seconds": 0.0}},
            "tiers": {"host": {"budget_bytes": 9, "planned_bytes": 8, "peak_bytes": 7}},
        }

    meter = StepMeter()
    meter.start(report(1000, 2.0, {}))
    record = meter.finish(
        report(5000, 2.5, {"optimizer": 0.25}), step=3, loss=1.0, learning_rate=0.1, gradient_norm=2.0, tokens=64
    )
    assert record.phases == {"forward": 0.5}
    assert record.stalls == {"optimizer": 0.25}
    assert record.links["nvme_read"].bytes == 4000
    assert record.links["nvme_read"].rate == pytest.approx(4000 / record.seconds / 1e9)
    assert record.tokens_per_second == pytest.approx(64 / record.seconds)
    assert record.as_json()["tiers"] == {"host": {"budget_bytes": 9, "planned_bytes": 8, "peak_bytes": 7}}


def test_the_bound_is_floor_and_budgets_with_a_tenth() -> None:
    tiers = {"device": TierUse(100, 80, 80), "host": TierUse(None, 60, 60), "nvme": TierUse(None, 10**9, 10**9)}
    assert ProcessMemory(0, 0, 0, 40).bound(tiers) == int((40 + 100 + 60) * 1.1)
    assert ProcessMemory(0, 0, 0, None).bound(tiers) is None
