"""Times our I/O engine beside fio, beside DeepSpeed's aio handle.

    python -m bench.io [DIR...] [--size 1GiB] [--blocks 1MiB,8MiB] [--depths 8,32] [--rounds 7] [--json]

All move the same files, in the same blocks, with the same queue depth, by direct I/O: sequential reads, sequential
writes, both at once on different files (one of each per directory), which is what an optimizer step does. Within each
round the contestants take turns, in another order each time, because disks drift. The referee is fio with huge pages
behind its buffers; each side sends the one of its engines whose median is the best in that cell, and a ratio is the
median over the rounds of our rate over the other's in the same round, so more than 1 means that ours is faster. The
exception is CPU: there a ratio is the other's CPU time per GB over ours. The last line of ``--json`` holds the worst
ratio over all cells of each kind, with the load of the machine. A peer that is missing is named, then left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench.arguments import end_on_sigterm, positive, several
from bench.io_contestants import Cell, DeepSpeed, Run, Unavailable, fio, ours
from infinity.config.size import parse_bytes
from infinity.storage.traffic import Pattern, Sample, Setting, TrialFiles, Window, fill

PEERS = ("fio", "deepspeed")


@dataclass
class Result:
    """One cell; ``samples`` holds one run per contestant and round."""

    cell: Cell
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def median_rate(self, name: str) -> float:
        return statistics.median(sample.rate for sample in self.samples[name])

    def best(self, side: str) -> str | None:
        """The contestant of a side with the highest median rate; None where the side is missing."""
        names = [name for name in self.samples if name.split("/")[0] == side]
        return max(names, key=self.median_rate, default=None)

    def rates(self, mine: str, other: str) -> list[float]:
        """Our rate over the other's, round by round."""
        return [a.rate / b.rate for a, b in zip(self.samples[mine], self.samples[other], strict=True)]

    def cpu(self, mine: str, other: str) -> float:
        """The other's CPU time per GB over ours."""
        return statistics.median(b.cpu_per_gb for b in self.samples[other]) / statistics.median(
            a.cpu_per_gb for a in self.samples[mine]
        )

    def ratios(self) -> dict[str, float]:
        """Per peer the median ratio of rates, then that of CPU times."""
        mine = self.best("ours")
        found = {}
        for peer in PEERS:
            other = self.best(peer)
            if mine is not None and other is not None:
                found[peer] = statistics.median(self.rates(mine, other))
                found[f"{peer}_cpu"] = self.cpu(mine, other)
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "pattern": self.cell.pattern.value,
            "block_size": self.cell.block_size,
            "queue_depth": self.cell.queue_depth,
            "best": {side: self.best(side) for side in ("ours", *PEERS)},
            "ratios": self.ratios(),
            "rates_GB_per_second": {name: [s.rate for s in runs] for name, runs in self.samples.items()},
            "cpu_seconds_per_GB": {name: [s.cpu_per_gb for s in runs] for name, runs in self.samples.items()},
        }

    def __str__(self) -> str:
        lines = [str(self.cell)]
        for name, runs in self.samples.items():
            rates = sorted(sample.rate for sample in runs)
            cpu = statistics.median(sample.cpu_per_gb for sample in runs)
            mark = "*" if name == self.best(name.split("/")[0]) else " "
            lines.append(
                f" {mark} {name:<20} {statistics.median(rates):6.2f} GB/s ({rates[0]:.2f} to {rates[-1]:.2f}), "
                f"CPU {cpu * 1e3:5.1f} ms/GB"
            )
        mine = self.best("ours")
        for peer in PEERS:
            other = self.best(peer)
            if mine is not None and other is not None:
                found = sorted(self.rates(mine, other))
                lines.append(
                    f"   {mine} / {other}: x{statistics.median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f}), "
                    f"CPU x{self.cpu(mine, other):.2f}"
                )
        return "\n".join(lines)


def alternate(runs: dict[str, Run], rounds: int) -> dict[str, list[Sample]]:
    """Times everyone once per round, after a run of each that does not count; none always follows the same other."""
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    order = list(runs.items())
    for _, run in order:
        run()
    for turn in range(rounds):
        first = turn % len(order)
        rotated = order[first:] + order[:first]
        for name, run in rotated if turn % 2 == 0 else reversed(rotated):
            samples[name].append(run())
    return samples


def worst_ratios(results: Sequence[Result]) -> dict[str, float]:
    """``read``, ``write``, ``mix`` against fio; the same with a prefix against DeepSpeed; ``cpu`` over all cells."""
    worst: dict[str, float] = {}

    def note(key: str, ratio: float) -> None:
        worst[key] = min(ratio, worst.get(key, ratio))

    for result in results:
        found, pattern = result.ratios(), result.cell.pattern.value
        for peer, prefix in (("fio", ""), ("deepspeed", "deepspeed_")):
            if peer in found:
                note(f"{prefix}{pattern}", found[peer])
                note(f"{prefix}cpu", found[f"{peer}_cpu"])
    return worst


def pages_matter(files: TrialFiles, window: torch.Tensor, rounds: int) -> dict[str, Any]:
    """The same engine on memory of 4 KiB pages beside that of 2 MiB pages, reads then writes."""
    small = fill(torch.empty(window.numel() + 4096, dtype=torch.uint8))
    aligned = small[-small.data_ptr() % 4096 :][: window.numel()]
    found: dict[str, Any] = {}
    for pattern in (Pattern.READ, Pattern.WRITE):
        cell = Cell(pattern, 1 << 20, 32)
        with ours(cell, files, window) as huge, ours(cell, files, aligned) as ordinary:
            name = next(iter(huge))
            samples = alternate({"2 MiB pages": huge[name], "4 KiB pages": ordinary[name]}, rounds)
        found[pattern.value] = {
            pages: {
                "GB_per_second": statistics.median(s.rate for s in runs),
                "cpu_seconds_per_GB": statistics.median(s.cpu_per_gb for s in runs),
            }
            for pages, runs in samples.items()
        }
    return found


@contextmanager
def start_deepspeed(directories: Sequence[str], nbytes: int, say: Callable[[str], None]) -> Iterator[DeepSpeed | None]:
    """Its process, or None, said, where it cannot take part."""
    if len(directories) > 1:
        say("skipped: DeepSpeed's aio handle, which moves one file at a time")
        yield None
        return
    try:
        peer = DeepSpeed(nbytes)
    except Unavailable as why:
        say(f"skipped: {why}")
        yield None
        return
    try:
        yield peer
    finally:
        peer.close()


def peer_runs(cell: Cell, files: TrialFiles, deepspeed: DeepSpeed | None, say: Callable[[str], None]) -> dict[str, Run]:
    """Those of the peers that work here: each is tried once."""
    found: dict[str, Run] = {}
    offers: list[Callable[[], dict[str, Run]]] = [partial(fio, cell, files)]
    if deepspeed is not None:
        offers.append(partial(deepspeed.runs, cell, files))
    for offer in offers:
        try:
            runs = offer()
        except Unavailable as why:
            say(f"{cell}: skipped: {why}")
            continue
        for name, run in runs.items():
            try:
                run()
            except Unavailable as why:
                say(f"{cell}: skipped {name}: {why}")
            else:
                found[name] = run
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.io", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="*", default=["runs/bench-io"], help="one or two, on the disks to measure")
    parser.add_argument("--size", type=parse_bytes, default="1GiB", help="of each of the two files per directory")
    parser.add_argument("--blocks", type=several(parse_bytes), default="1MiB,8MiB", help="block sizes, comma-separated")
    parser.add_argument("--depths", type=several(positive), default="8,32", help="queue depths, comma-separated")
    parser.add_argument("--patterns", type=several(Pattern), default="read,write,mix", help="comma-separated")
    parser.add_argument("--rounds", type=positive, default=7, help="timings of each contestant; take 7 or more")
    parser.add_argument("--json", action="store_true", help="print one JSON object per cell, the ratios last")
    chosen = parser.parse_args()
    end_on_sigterm()
    cells = [
        Cell(pattern, block, depth) for pattern in chosen.patterns for block in chosen.blocks for depth in chosen.depths
    ]

    def say(text: str) -> None:
        print(text, file=sys.stderr if chosen.json else sys.stdout, flush=True)

    for directory in chosen.directories:
        os.makedirs(directory, exist_ok=True)
    results = []
    with ExitStack() as stack:
        files = stack.enter_context(TrialFiles(chosen.directories, chosen.size))
        window = Window(Setting(block_size=max(chosen.blocks), queue_depth=max(chosen.depths)).window_bytes)
        deepspeed = stack.enter_context(start_deepspeed(chosen.directories, chosen.size, say))
        for cell in cells:
            space = window.bytes[: Setting(block_size=cell.block_size, queue_depth=cell.queue_depth).window_bytes]
            with ours(cell, files, space) as runs:
                peers = peer_runs(cell, files, deepspeed, say)
                results.append(Result(cell, alternate(runs | peers, chosen.rounds)))
            print(json.dumps(results[-1].as_json()) if chosen.json else results[-1], flush=True)
        pages = pages_matter(files, window.bytes[: Setting().window_bytes], chosen.rounds)
    ratios = worst_ratios(results)
    if chosen.json:
        print(json.dumps({"ratios": ratios, "pages": pages, "load_average": os.getloadavg()}))
    else:
        print(f"pages behind the buffer: {json.dumps(pages)}")
        print(f"worst ratios {ratios}; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
