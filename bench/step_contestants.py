"""Runs each contestant of the step bench in a process that stays, so that their steps can alternate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.deepspeed_venv import find_python
from bench.io_contestants import HUGE_PAGES, Cell, find_fio, fio_command
from bench.io_contestants import Unavailable as NoFio
from bench.step_floor import BLOCK_BYTES, QUEUE_DEPTH
from bench.step_model import Shape
from infinity.storage.traffic import Pattern, TrialFiles

ROOT = Path(__file__).resolve().parent.parent


class Unavailable(Exception):
    """A contestant that is not installed or does not run here."""


@dataclass(frozen=True)
class Task:
    """What every contestant of a group trains alike."""

    shape: Shape
    dtype: str
    tokens: int
    threads: int
    micro_batches: int = 1


@dataclass(frozen=True)
class Spec:
    """A contestant: its name in tables, the trainer that plays it, options of that."""

    name: str
    trainer: str
    options: dict[str, Any] = field(default_factory=dict)


class Contestant:
    """A live process that trains on request."""

    def __init__(self, spec: Spec, task: Task) -> None:
        self.spec = spec
        python = Path(sys.executable)
        if spec.trainer == "deepspeed":
            found = find_python()
            if found is None:
                raise Unavailable("DeepSpeed is not installed (run bench/setup_deepspeed.sh)")
            python = found
        environment = os.environ | {
            "OMP_NUM_THREADS": str(task.threads),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",  # DeepSpeed asks ninja for what it compiled
        }
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.step_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        try:
            self.ask("build", trainer=spec.trainer, options=spec.options, **asdict(task))
        except Unavailable:
            self.close()
            raise

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """One request; raises Unavailable with what the other side said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise Unavailable(f"{self.spec.name}: {' '.join(str(answer['error']).split())[:300]}")
        return answer

    def close(self) -> None:
        """Ends the process; what it holds on disk goes with it."""
        try:
            self.ask("close")
        except Unavailable:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class BesideDisk(Contestant):
    """A contestant beside which fio moves ``nbytes`` per step, half of them each way, as fast as the disk takes them.

    What it loses by that is what computing and I/O cost each other on this machine, whoever does them.
    """

    def __init__(self, spec: Spec, task: Task) -> None:
        options = dict(spec.options)
        self._nbytes: int = options.pop("nbytes")
        self._files = TrialFiles([options.pop("swap")], options.pop("file_bytes"))
        cell = Cell(Pattern.MIX, BLOCK_BYTES, QUEUE_DEPTH)
        self._command = fio_command(cell, self._files, ("--ioengine=libaio",))
        try:
            find_fio()
            super().__init__(Spec(spec.name, "plain", options), task)
        except NoFio as why:
            self._files.__exit__(None, None, None)
            raise Unavailable(str(why)) from None
        except BaseException:
            self._files.__exit__(None, None, None)
            raise

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        if op != "steps":
            return super().ask(op, **request)
        loops = max(1, round(request["count"] * self._nbytes / (2 * self._files.nbytes)))
        mover = subprocess.Popen(
            [*self._command, f"--loops={loops}"],
            stdout=subprocess.DEVNULL,
            env=os.environ | {"GLIBC_TUNABLES": HUGE_PAGES},
        )
        try:
            answer = super().ask(op, **request)
            if mover.poll():
                raise Unavailable(f"{self.spec.name}: fio failed with exit code {mover.returncode}")
            return answer
        finally:
            mover.terminate()  # where the disk is slower than the steps it has not ended
            mover.wait()

    def close(self) -> None:
        super().close()
        self._files.__exit__(None, None, None)


class Field(ExitStack):
    """The contestants of one group that could be started; the others are in ``missing``, with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, Contestant] = {}
        self.missing: dict[str, str] = {}

    def enter(self, spec: Spec, task: Task) -> None:
        """Starts one; it ends with this context."""
        try:
            contestant = (BesideDisk if "nbytes" in spec.options else Contestant)(spec, task)
        except Unavailable as why:
            self.missing[spec.name] = str(why)
            return
        self.callback(contestant.close)
        self.running[spec.name] = contestant
