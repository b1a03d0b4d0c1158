"""Fixtures of the tests with several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.helpers import Launcher
from tests.faults.helpers import Zygote


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    parent = Zygote(tmp_path_factory.mktemp("ranks"))
    yield Launcher(parent)
    parent.close()
