"""Runs faulty children, then says what they left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 90
"""A child that runs longer than this hangs: it is killed, so its exit code fails the test."""

PROLOGUE = """
import json, os, signal, sys, threading
import torch
from torch import nn
from infinity.engine.build import Injected
from infinity.engine.initialize import initialize
from infinity.storage.faults import Faults

class Net(nn.Module):
    def __init__(self, width=32, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()

def configure(swap, **own):
    nvme = {"device": "nvme", "nvme_path": str(swap)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"adam_threads": 1, **own},
    }

def batch(seed):
    return torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))

def train(engine, steps, start=0):
    for step in range(start, start + steps):
        engine.backward(engine(batch(step)))
        engine.step()

def left(swap):
    return sorted(os.path.join(*found) for top, _, names in os.walk(swap) for found in ((top, n) for n in names))
"""
"""What every child that uses the library begins with: a small model, a config that keeps all its states on NVMe."""


@dataclass(frozen=True)
class Finished:
    """A child that ended."""

    code: int
    out: str
    err: str

    @property
    def paragraph(self) -> str:
        """Standard error of a command that failed as it should: one paragraph for a person, exit code 1."""
        assert self.code == 1, (self.code, self.out, self.err)
        text = self.err.strip()
        assert text.startswith("error: "), text
        assert "Traceback" not in text
        assert text.count("\n") == 0, text
        return text


class Child:
    """A running child."""

    def __init__(self, zygote: Zygote, pid: int, directory: Path) -> None:
        self._zygote, self.pid, self._directory = zygote, pid, directory

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def out(self) -> str:
        """What it has said so far."""
        return self._read("stdout")

    def await_line(self, part: str) -> None:
        """Returns as soon as the child has said ``part``."""
        ended = threading.Event()
        while part not in self.out():
            assert Path(f"/proc/{self.pid}/stat").read_text().split()[2] != "Z", (self.out(), self.finish())
            ended.wait(0.01)

    def finish(self) -> Finished:
        """Waits for its end; one that hangs is killed."""
        timer = threading.Timer(HANG_SECONDS, os.kill, (self.pid, signal.SIGKILL))
        timer.start()
        try:
            code = self._zygote.ask({"wait": self.pid})
        finally:
            timer.cancel()
        return Finished(code, self._read("stdout"), self._read("stderr"))

    def _read(self, name: str) -> str:
        try:
            return (self._directory / name).read_text()
        except FileNotFoundError:  # it was killed before it began
            return ""


class Zygote:
    """The process that all children of a session are forked from."""

    def __init__(self, directory: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment.pop("INFINITY_IO", None)
        self._directory = directory
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, code: str) -> Child:
        """A child that runs ``code``."""
        self._count += 1
        directory = self._directory / str(self._count)
        directory.mkdir()
        return Child(self, self.ask({"code": code, "directory": str(directory)}), directory)

    def run(self, code: str) -> Finished:
        """The same, to its end."""
        return self.start(code).finish()

    def library(self, code: str) -> Finished:
        """Runs ``code`` after the prologue; it must succeed."""
        done = self.run(PROLOGUE + code)
        assert done.code == 0, done.err
        return done

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True)
class TinyRun:
    """A config of ``infinity train`` for half a second of training, all states on NVMe."""

    directory: Path
    settings: dict[str, Any]

    @property
    def swap(self) -> Path:
        return self.directory / "swap"

    @property
    def output(self) -> Path:
        return self.directory / "out"

    def code(self, *overrides: str, before: str = "", resume: bool = False) -> str:
        """Source that trains with ``overrides``, after ``before``; ``resume`` from the latest checkpoint if any."""
        path = self.directory / "config.json"
        path.write_text(json.dumps(self.settings))
        options = [part for override in overrides for part in ("--set", override)]
        options += ["--resume", "auto"] if resume else []
        return f"{before}\ncommand('train', {str(path)!r}, *{options!r})"

    def check_nothing_left(self) -> None:
        """No swap file, no swap directory."""
        assert leftovers(self.swap) == []


def tiny_run(directory: Path, swap: Path | str | None = None) -> TinyRun:
    """The quickest config that uses every tier."""
    (directory / "text.py").write_text("".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(900)))
    settings = json.loads((ROOT / "configs" / "tiny.json").read_text())
    settings["infinity"]["nvme_path"] = str(swap or directory / "swap")
    settings["run"] |= {"data": str(directory / "text.py"), "output_dir": str(directory / "out"), "steps": 2}
    settings["run"] |= {"eval_every": 0, "sequence_length": 16}
    settings |= {"gradient_accumulation_steps": 1, "steps_per_print": 1}
    return TinyRun(directory, settings)


def leftovers(swap: Path) -> list[str]:
    """Every path below a swap directory."""
    return sorted(str(path) for path in swap.rglob("*")) if swap.exists() else []


@contextmanager
def public_directory(path: Path) -> Iterator[Path]:
    """A directory below /tmp that any user may enter, unlike pytest's."""
    path.mkdir(mode=0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)
