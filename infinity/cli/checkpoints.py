"""When a run saves, what it goes on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from infinity.checkpoint.folder import LATEST, Folder
from infinity.checkpoint.manifest import MANIFEST
from infinity.checkpoint.save import Progress
from infinity.config.run import RunConfig
from infinity.data import ByteLoader
from infinity.errors import CheckpointError
from infinity.obs.metrics import read_metrics

DIRECTORY = "checkpoints"


class RunCheckpoints:
    """The checkpoints in ``<output_dir>/checkpoints``, where a run also looks for one to go on from."""

    def __init__(self, output: Path, run: RunConfig, resume: str | None, progress: Progress | None = None) -> None:
        self.directory = output / DIRECTORY
        self._progress = progress
        self._run = run
        self._source = self._found(resume)
        self._saved: tuple[int, str] | None = None

    def resume(self, engine: Any, loader: ByteLoader) -> int:
        """Puts the checkpoint that was asked for into the engine; returns how many steps are done."""
        if self._source is None:
            return 0
        folder, tag = self._source
        path, client = engine.load_checkpoint(folder, tag)
        if "loader" not in client:
            raise CheckpointError(f"{path} has no position in the data; it was not saved by `infinity train`")
        loader.load_state_dict(client["loader"])
        self._saved = engine.global_steps, path
        return int(engine.global_steps)

    def is_due(self, step: int) -> bool:
        """Whether to save after so many steps, of which there are more to come."""
        run = self._run
        return bool(run.keep_last and run.checkpoint_every) and step % run.checkpoint_every == 0 and step < run.steps

    def begin(self, engine: Any, loader: ByteLoader) -> None:
        """Lets what there is now be saved while training goes on, unless nothing is to be kept or it is saved."""
        if self._run.keep_last and (self._saved is None or self._saved[0] != engine.global_steps):
            path = engine.save_checkpoint(
                self.directory,
                client_state={"loader": dict(loader.state_dict())},
                keep_last=self._run.keep_last,
                wait=False,
                progress=self._progress,
            )
            self._saved = engine.global_steps, path

    def save(self, engine: Any, loader: ByteLoader) -> str | None:
        """Saves what there is now to the end; returns the path, None if nothing is to be kept."""
        self.begin(engine, loader)
        engine.settle()
        return self._saved[1] if self._saved is not None and self._run.keep_last else None

    def _found(self, resume: str | None) -> tuple[str, str | None] | None:
        """Folder with tag of what to go on from; known before anything that takes long."""
        if resume is None:
            return None
        if resume == "auto":
            folder = Folder(self.directory)
            if not os.path.lexists(self.directory / LATEST) and not folder.tags():
                return None
            return folder.path, os.path.basename(folder.find()).removesuffix(".replaced")
        path = Path(resume)
        if (path / MANIFEST).is_file():
            return str(path.resolve().parent), path.resolve().name
        for folder_path in (path, path / DIRECTORY):
            if (folder_path / LATEST).is_file():
                return str(folder_path), None
        raise CheckpointError(
            f'--resume {resume}: no checkpoint is there; expected "auto", a checkpoint, a directory of them, or the '
            "run.output_dir of a run that saved one"
        )


def keep_metrics(path: Path, steps: int) -> None:
    """Leaves the records of the first ``steps`` steps, of which a run goes on; none for a new run."""
    if not steps:
        path.unlink(missing_ok=True)
        return
    try:
        records = read_metrics(path)
    except FileNotFoundError:
        return
    except ValueError:
        raise CheckpointError(f"{path} is no file of metrics; move it away to go on without its past") from None
    kept = [record for record in records if record["event"] != "end" and record.get("step", 0) <= steps]
    new = path.with_name(f"{path.name}.incomplete")
    new.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(new, path)
