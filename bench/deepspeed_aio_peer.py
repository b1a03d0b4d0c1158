"""Serves DeepSpeed's aio handle over JSON lines, in DeepSpeed's own environment.

Each line on standard input is ``{"op": ...}``, each answer one line on standard output, {"error": ...} where it failed:

    {"op": "open", "block_size", "queue_depth", "threads", "nbytes"} -> {"ok": true}
    {"op": "move", "read": path | null, "write": path | null}        -> {"seconds", "cpu_seconds"}

Both ways at once go through two handles, as in its pipelined optimizer swapper.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def load_compiled(name: str) -> Any:
    """An op that bench/setup_deepspeed.sh has compiled. DeepSpeed's own loader may compile it again, for minutes."""
    from torch.utils.cpp_extension import _get_build_directory

    library = os.path.join(_get_build_directory(name, False), f"{name}.so")
    if not os.path.exists(library):
        raise FileNotFoundError(f"{name} is not compiled; run bench/setup_deepspeed.sh")
    loader = ExtensionFileLoader(name, library)
    spec = spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


class Peer:
    def __init__(self) -> None:
        import torch

        self._torch = torch
        sys.setdlopenflags(sys.getdlopenflags() | os.RTLD_GLOBAL)  # the second takes symbols from the first
        load_compiled("pin_memory")
        self._op = load_compiled("async_io")
        self._handles: dict[str, Any] = {}
        self._buffers: dict[str, Any] = {}

    def open(self, block_size: int, queue_depth: int, threads: int, nbytes: int) -> dict[str, Any]:
        self._handles = {
            way: self._op.aio_handle(block_size, queue_depth, False, True, threads) for way in ("read", "write")
        }
        for way, handle in self._handles.items():
            if way not in self._buffers:
                example = self._torch.empty(0, dtype=self._torch.uint8)
                self._buffers[way] = handle.new_cpu_locked_tensor(nbytes, example)
                self._buffers[way].random_(256)
        return {"ok": True}

    def move(self, read: str | None, write: str | None) -> dict[str, Any]:
        cpu, start = cpu_seconds(), time.perf_counter()
        if read is not None:
            self._handles["read"].async_pread(self._buffers["read"], read, 0)
        if write is not None:
            self._handles["write"].async_pwrite(self._buffers["write"], write, 0)
        for way, path in (("read", read), ("write", write)):
            if path is not None:
                self._handles[way].wait()
        return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu}


def serve(make: Callable[[], Any]) -> None:
    """Answers requests on standard input by the methods of what ``make`` gives, which is made at the first one."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print must not mix with the answers
    peer: Any = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            peer = peer or make()
            answer = getattr(peer, request.pop("op"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    serve(Peer)
