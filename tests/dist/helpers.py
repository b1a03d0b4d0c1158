"""Runs one piece of source on several ranks of this machine."""

from __future__ import annotations

import socket
import textwrap
from collections.abc import Sequence

from tests.faults.helpers import Child, Finished, Zygote

FRAME = """
import os, sys
os.environ.update({environment!r})
import torch
torch.set_num_threads(1)
RANK, RANKS = {rank}, {ranks}
try:
    exec(compile({code!r}, "<rank {rank}>", "exec"), globals())
except SystemExit:
    raise
except BaseException:
    sys.excepthook(*sys.exc_info())
    sys.exit(1)
"""


class Launcher:
    """Starts ranks as a launcher does, by environment variables."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote

    def start(self, ranks: int, code: str) -> list[Child]:
        """One child per rank; ``RANK`` and ``RANKS`` are names in ``code``."""
        port = free_port()
        children = []
        for rank in range(ranks):
            environment = {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            source = FRAME.format(environment=environment, rank=rank, ranks=ranks, code=textwrap.dedent(code))
            children.append(self._zygote.start(source))
        return children

    def run(self, ranks: int, code: str) -> list[Finished]:
        """Starts them, then waits for the end of all."""
        return [child.finish() for child in self.start(ranks, code)]

    def succeed(self, ranks: int, code: str) -> list[str]:
        """What each rank printed; every one must succeed."""
        finished = self.run(ranks, code)
        said = [f"--- rank {rank}\n{one.out}{one.err}" for rank, one in enumerate(finished)]
        assert [one.code for one in finished] == [0] * ranks, "\n".join(said)
        return [one.out for one in finished]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def blamed(finished: Sequence[Finished], rank: int) -> None:
    """All ranks failed, the others with a message that names ``rank``."""
    assert all(one.code != 0 for one in finished), [(one.code, one.err) for one in finished]
    for number, one in enumerate(finished):
        if number != rank:
            lines = [line for line in one.err.splitlines() if "RankError: " in line]
            assert lines, one.err
            assert all(f"rank {rank}" in line for line in lines), one.err
