"""Metrics of a run as one JSON object a line, appended as they come."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from infinity.errors import StorageError


class MetricsWriter:
    """Appends records to a JSONL file; a line has reached the kernel when ``write`` returns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = str(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; a number that is not finite becomes null, which every JSON reader accepts."""
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise StorageError(
                "cannot write metrics to",
                path=self._path,
                errno=error.errno,
                action="Free space on that disk or choose another run.output_dir",
            ) from None

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every record of a metrics file; a last line that was cut off by a crash is left out."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is empty or cut off


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
