"""SIGKILL at any instant costs the steps since the last checkpoint, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.helpers import Zygote
from tests.faults.kill_harness import Harness

SOME = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("ranks", "kills"), [(1, 1), (2, 2), pytest.param(1, 15, marks=SOME), pytest.param(2, 15, marks=SOME)]
)
def test_killed_at_random(
    zygote: Zygote, tmp_path: Path, ranks: int, kills: int, record_property: Callable[[str, object], None]
) -> None:
    # In the quick form not while ranks meet, where a survivor waits for seconds.
    figures = Harness(zygote, tmp_path, ranks, seed=kills).kill(kills, earliest=0.5 if kills <= 2 else 0.0)
    for name, figure in figures.told().items():
        record_property(name, figure)
    assert figures.ok, figures
    assert figures.kills == kills
