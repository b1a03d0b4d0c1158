"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.helpers import TinyRun, Zygote, tiny_run


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    parent = Zygote(tmp_path_factory.mktemp("children"))
    yield parent
    parent.close()


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRun:
    return tiny_run(tmp_path)
