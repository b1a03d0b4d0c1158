"""Time per link, the bottleneck, the tokens that would hide each link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infinity.plan.traffic import StepTraffic

FLOPS_PER_TOKEN = 6
"""Per parameter: 2 in forward, 4 in backward; recomputing costs another 2."""


@dataclass(frozen=True)
class Machine:
    """What this machine was measured to do, in bytes, floating point operations, parameters per second."""

    nvme_read: float
    nvme_write: float
    flops: float
    adam: float


@dataclass(frozen=True)
class Link:
    """One thing a step spends time on. ``tokens`` per step are needed for compute to hide it; None for compute."""

    name: str
    seconds: float
    tokens: float | None


@dataclass(frozen=True)
class Forecast:
    """A step of ``tokens`` tokens on this rank, predicted. Links of one phase overlap, the two phases do not."""

    tokens: int
    pass_links: tuple[Link, ...]
    update_links: tuple[Link, ...]

    @property
    def seconds(self) -> float:
        """Predicted time of one step."""
        return sum(max((link.seconds for link in links), default=0.0) for links in (self.pass_links, self.update_links))

    @property
    def bottleneck(self) -> Link:
        """What takes longest."""
        return max((*self.pass_links, *self.update_links), key=lambda link: link.seconds)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "bottleneck": self.bottleneck.name,
            "forward_and_backward": [asdict(link) for link in self.pass_links],
            "update": [asdict(link) for link in self.update_links],
        }

    def render(self) -> str:
        """One line per link, then the sum."""
        rows = []
        for phase, links in (("forward, backward", self.pass_links), ("update", self.update_links)):
            for link in links:
                hidden = "" if link.tokens is None else f"  hidden from {link.tokens:,.0f} tokens per step on"
                rows.append(f"{phase:<18} {link.name:<16} {link.seconds:9.3f} s{hidden}")
        last = f"a step of {self.tokens:,} tokens takes about {self.seconds:.3g} s; the bottleneck is "
        return "\n".join([*rows, last + self.bottleneck.name])


def forecast(
    machine: Machine, traffic: StepTraffic, *, tokens: int, parameters: int, trained: int, recompute: bool
) -> Forecast:
    """Predicts a step of ``tokens`` tokens.

    Compute takes 6 FLOP per parameter and token, 8 with recompute; a link hides behind it from
    ``T = peak / 8 * bytes / bandwidth`` tokens on, where bytes are those of one parameter.
    """
    per_token = (FLOPS_PER_TOKEN + 2 * recompute) * parameters

    def hidden(name: str, seconds: float) -> Link:
        return Link(name, seconds, seconds * machine.flops / per_token)

    def disk(read: int, written: int) -> list[Link]:
        # One disk serves both: what it reads delays what it writes.
        found = {"NVMe": read / machine.nvme_read + written / machine.nvme_write}
        return [hidden(name, seconds) for name, seconds in found.items() if seconds]

    compute = Link("compute", tokens * per_token / machine.flops, None)
    adam = hidden("CPU Adam", trained / machine.adam)
    return Forecast(
        tokens,
        (compute, *disk(traffic.pass_read, traffic.pass_written)),
        (adam, *disk(traffic.update_read, traffic.update_written)),
    )


def machine_from(numbers: Mapping[str, float]) -> Machine:
    """A machine from numbers that were saved, such as those ``infinity plan --measure --json`` prints."""
    return Machine(**{name: float(numbers[name]) for name in ("nvme_read", "nvme_write", "flops", "adam")})
