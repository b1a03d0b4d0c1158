"""Benches refuse what they cannot do before they measure, leave no files behind a signal or a missing peer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.io_contestants import Unavailable as NoFio
from bench.step_contestants import Field, Spec, Task, Unavailable
from bench.step_floor import MixedDisk
from bench.step_model import SHAPES


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("step --groups memory,nope", "'nope' is none of memory"),
        ("step --groups json", "'json' is none of memory"),
        ("step --dtypes fp17", "'fp17' is none of bf16"),
        ("step --rounds 0", "'0' is not a whole number from 1 on"),
        ("growth --shapes nope", "'nope' is none of tiny"),
        ("overhead --rounds -5", "'-5' is not a whole number"),
        ("adam --sizes x", "'x': invalid literal"),
        ("io --patterns x", "'x' is not a valid Pattern"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(arguments: str, told: str) -> None:
    name, *rest = arguments.split()
    done = subprocess.run([sys.executable, "-m", f"bench.{name}", *rest], capture_output=True, text=True)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_without_fio_no_trial_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(NoFio, match="fio is not installed"):
        MixedDisk(str(tmp_path), 1 << 20)
    assert not list(tmp_path.iterdir())


def test_a_failing_fio_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fio").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    swap = tmp_path / "swap"
    swap.mkdir()
    options = {"swap": str(swap), "nbytes": 1 << 20, "file_bytes": 1 << 20}
    with Field() as field:
        field.enter(Spec("beside", "plain", options), Task(SHAPES["tiny"], "fp32", tokens=2048, threads=1))
        with pytest.raises(Unavailable, match="beside: fio failed with exit code 1"):
            field.running["beside"].ask("steps", count=20)
    assert not list(swap.iterdir())


def test_sigterm_leaves_no_trial_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "infinity", "nvme", "bench", str(tmp_path), "--size", "16MiB", "--rounds", "500"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.rglob("target.swap")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped: ended by SIGTERM" in told
    assert not list(tmp_path.iterdir())
