"""Runs a module of this package as several ranks on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def run_ranks(module: str, ranks: int, arguments: Sequence[str]) -> None:
    """``python -m module arguments`` once per rank; raises if one of them fails."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", module, *arguments]
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{module}: the exit codes of its {ranks} ranks are {codes}")
