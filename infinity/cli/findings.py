"""What a health check found: one verdict per thing tried, with the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from rich.console import Console
from rich.table import Table


class Verdict(str, Enum):
    """``WARN`` costs speed or may bite later; ``FAIL`` stops training."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """The outcome of one attempt; ``remedy`` is what to do, None when there is nothing to do."""

    check: str
    verdict: Verdict
    found: str
    remedy: str | None = None


Probe = Callable[[], Iterable[Finding]]


def ok(check: str, found: str) -> Finding:
    """A finding that needs nothing."""
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """A finding to know about."""
    return Finding(check, Verdict.WARN, found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """A finding that stops training."""
    return Finding(check, Verdict.FAIL, found, remedy)


def collect(probes: Sequence[tuple[str, Probe]]) -> Iterator[Finding]:
    """Run every probe; one that raises is a failed finding and not the end of the examination."""
    for name, probe in probes:
        try:
            yield from probe()
        except Exception as error:
            what = " ".join(str(error).split())
            yield fail(
                name, f"the check itself failed: {type(error).__name__}: {what}", "report this with the output above"
            )


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if anything failed, else 0."""
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """``{"ok": bool, "findings": [{"check", "verdict", "found", "remedy"}]}``."""
    listed: list[dict[str, Any]] = [asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
    return json.dumps({"ok": exit_code(findings) == 0, "findings": listed}, indent=2)


_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def show(findings: Sequence[Finding], console: Console) -> None:
    """One row per finding, its remedy below it; a count at the end."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict.value}[/]", finding.check, _escaped(finding.found))
        if finding.remedy is not None:
            table.add_row("", "", f"[{colour}]→[/] {_escaped(finding.remedy)}")
    console.print(table)
    counts = [f"{sum(f.verdict is verdict for f in findings)} {verdict.value}" for verdict in Verdict]
    console.print(f"\n{' · '.join(counts)}", highlight=False)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
