"""Finds the virtual environment in which DeepSpeed lives."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = "INFINITY_DEEPSPEED_VENV"
DEFAULT = Path(__file__).resolve().parent / ".deepspeed-venv"


def find_python() -> Path | None:
    """Its interpreter; None where bench/setup_deepspeed.sh has not been run, nor another place was named."""
    python = Path(os.environ.get(ENVIRONMENT) or DEFAULT) / "bin" / "python"
    return python if python.exists() else None
