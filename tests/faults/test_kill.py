"""SIGKILL at any instant costs the steps since the last checkpoint, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults.helpers import Zygote
from tests.faults.kill_harness import harness


@pytest.mark.parametrize("kills", [2, pytest.param(15, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_killed_at_random(
    zygote: Zygote, tmp_path: Path, kills: int, record_property: Callable[[str, object], None]
) -> None:
    figures = harness(zygote, tmp_path, kills, seed=kills)
    for name, figure in asdict(figures).items():
        record_property(name, figure)
    assert figures.ok, figures
    assert figures.kills == kills
