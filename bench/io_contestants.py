"""Moves the same files in the same blocks by our engine, by fio, by DeepSpeed's aio handle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.deepspeed_venv import find_python
from infinity.storage.io_engine import BACKENDS, IoEngine, probe
from infinity.storage.traffic import Pattern, Sample, Setting, TrialFiles, measure

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Makes fio's buffers huge pages; without it fio measures its own 4 KiB pages instead of the disk."""

FIO_ENGINES = {
    "io_uring": ("--ioengine=io_uring",),
    "io_uring_fixed": ("--ioengine=io_uring", "--fixedbufs", "--registerfiles"),
    "libaio": ("--ioengine=libaio",),
}
DEEPSPEED_THREADS = (1, 2)


@dataclass(frozen=True)
class Cell:
    """What every contestant is asked for alike."""

    pattern: Pattern
    block_size: int
    queue_depth: int

    def __str__(self) -> str:
        return f"{self.pattern.value} {self.block_size >> 10} KiB x {self.queue_depth}"


class Unavailable(Exception):
    """A peer that is not installed or does not run here."""


Run = Callable[[], Sample]


@contextmanager
def ours(cell: Cell, files: TrialFiles, window: torch.Tensor) -> Iterator[dict[str, Run]]:
    """Every backend that works here, opened once."""
    with ExitStack() as open_engines:
        runs: dict[str, Run] = {}
        for backend in BACKENDS:
            if probe(backend) is None:
                engine = Setting(backend, cell.block_size, cell.queue_depth).open([window])
                open_engines.callback(engine.close)
                runs[f"ours/{backend}"] = _bound(engine, cell.pattern, files, window)
        yield runs


def _bound(engine: IoEngine, pattern: Pattern, files: TrialFiles, window: torch.Tensor) -> Run:
    return lambda: measure(engine, files, pattern, window)


def find_fio() -> str:
    """The path of the program."""
    found = shutil.which("fio")
    if found is None:
        raise Unavailable("fio is not installed (Debian, Ubuntu: apt install fio)")
    return found


def fio(cell: Cell, files: TrialFiles) -> dict[str, Run]:
    """Each of fio's asynchronous engines, one job for all files."""
    find_fio()

    def run(command: list[str]) -> Sample:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GLIBC_TUNABLES": HUGE_PAGES})
        if done.returncode:
            raise Unavailable(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        return parse_fio(done.stdout)

    return {
        f"fio/{name}": lambda options=options: run(fio_command(cell, files, options))  # type: ignore[misc]
        for name, options in FIO_ENGINES.items()
    }


def fio_command(cell: Cell, files: TrialFiles, options: tuple[str, ...]) -> list[str]:
    """One job over all files, so one queue, as ours has; its buffers are filled once, not before each write.

    Two jobs would not start together, nor is there a warm-up: fio counts what is in flight when that ends as moved
    after it. Of its engines the one that registers its buffers has them touched before the clock starts.
    """
    paths = [file.path.replace(":", "\\:") for file, _ in files.chosen(cell.pattern)]
    return [
        "fio",
        "--output-format=json",
        "--name=bench",
        *options,
        f"--rw={'rw' if cell.pattern is Pattern.MIX else cell.pattern.value}",
        f"--filename={':'.join(paths)}",
        f"--size={len(paths) * files.nbytes}",
        f"--bs={cell.block_size}",
        f"--iodepth={cell.queue_depth}",
        "--direct=1",
        "--allow_file_create=0",
        "--fallocate=none",
        "--scramble_buffers=0",
    ]


def parse_fio(output: str) -> Sample:
    """What the one job moved both ways, in which time."""
    job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
    if job["error"]:
        raise Unavailable(f"fio failed: {os.strerror(job['error'])}")
    return Sample(
        nbytes=job["read"]["io_bytes"] + job["write"]["io_bytes"],
        seconds=max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3,
        cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3,
    )


class DeepSpeed:
    """Its aio handle in a process of its own, which stays for the whole bench so that runs can alternate."""

    def __init__(self, nbytes: int) -> None:
        python = find_python()
        if python is None:
            raise Unavailable("DeepSpeed is not installed (run bench/setup_deepspeed.sh)")
        self._nbytes = nbytes
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("deepspeed_aio_peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def runs(self, cell: Cell, files: TrialFiles) -> dict[str, Run]:
        """One directory only: a handle moves one file."""
        paths = {"read": None, "write": None} | {
            "write" if write else "read": file.path for file, write in files.chosen(cell.pattern)
        }
        nbytes = files.nbytes * sum(path is not None for path in paths.values())

        def run(threads: int) -> Sample:
            shape = {"block_size": cell.block_size, "queue_depth": cell.queue_depth, "threads": threads}
            self._ask(op="open", nbytes=self._nbytes, **shape)
            took = self._ask(op="move", **paths)
            return Sample(nbytes, took["seconds"], took["cpu_seconds"])

        return {
            f"deepspeed/{threads}_threads": lambda threads=threads: run(threads)  # type: ignore[misc]
            for threads in DEEPSPEED_THREADS
        }

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise Unavailable(f"DeepSpeed's aio handle failed: {' '.join(answer['error'].split())}")
        return answer
