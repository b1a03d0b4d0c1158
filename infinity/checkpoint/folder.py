"""A directory of checkpoints: which are complete, which is the latest, which may go."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from infinity.checkpoint.disk import Disk, read_file, replace_file, told
from infinity.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, PLAIN_NAME, Manifest, parse
from infinity.errors import CheckpointError, InfinityError, StorageError

LATEST = "latest"
INCOMPLETE = ".incomplete"
REPLACED = ".replaced"
OUR_FILE = re.compile(r"manifest\.json|(.+\.)?rank-\d+\.(json|safetensors)|buffers\.safetensors")


class Folder:
    """``<path>/<tag>/`` holds a complete checkpoint, ``<tag>.incomplete/`` one being written or removed.

    ``<tag>.replaced/`` is the complete former one of that name while a new one takes its place. ``latest`` names the
    checkpoint that was completed last.
    """

    def __init__(self, path: str | os.PathLike[str], disk: Disk | None = None) -> None:
        self.path = os.path.abspath(path)
        self.disk = disk or Disk()

    def of(self, tag: str) -> str:
        return os.path.join(self.path, check_tag(tag))

    def find(self, tag: str | None = None) -> str:
        """The directory of a complete checkpoint, of the latest one by default."""
        tag = self.latest() if tag is None else check_tag(tag)
        path = self.of(tag)
        for candidate in (path, path + REPLACED):
            if os.path.isfile(os.path.join(candidate, MANIFEST)) and not os.path.islink(candidate):
                return candidate
        if not os.path.isdir(self.path):
            raise CheckpointError(f"{self.path} does not exist; expected a directory of checkpoints")
        incomplete = " It was being written when its run ended." if os.path.isdir(path + INCOMPLETE) else ""
        there = ", ".join(self.tags()) or "none"
        raise CheckpointError(f'{self.path} has no complete checkpoint "{tag}".{incomplete} Complete are: {there}')

    def latest(self) -> str:
        """The tag of the checkpoint that was completed last."""
        path = os.path.join(self.path, LATEST)
        if not os.path.lexists(path):
            if not os.path.isdir(self.path):
                raise CheckpointError(f"{self.path} does not exist; expected a directory of checkpoints")
            if os.path.isfile(os.path.join(self.path, MANIFEST)):
                above, tag = os.path.split(self.path)
                raise CheckpointError(
                    f'{self.path} is a checkpoint; expected the directory that it is in, {above}, with the tag "{tag}"'
                )
            there = ", ".join(self.tags())
            hint = f"; give the tag of one of these: {there}" if there else "; no checkpoint was completed here"
            raise CheckpointError(f"{path} does not exist{hint}")
        return check_tag(read_file(path, 4096).decode("utf-8", "replace").strip())

    def tags(self) -> list[str]:
        """Every complete checkpoint, by name."""
        found = set()
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(self.path):
                tag = name.removesuffix(REPLACED)
                whole = os.path.isfile(os.path.join(self.path, name, MANIFEST))
                if whole and PLAIN_NAME.fullmatch(tag) and not tag.endswith(INCOMPLETE):
                    found.add(tag)
        return sorted(found)

    def manifest(self, tag: str) -> Manifest:
        """What a checkpoint says about itself; none of its other files is read."""
        path = os.path.join(self.find(tag), MANIFEST)
        return parse(Manifest, read_file(path, MAX_MANIFEST_BYTES), path)

    def prepare(self, tag: str) -> str:
        """An empty directory for the files of ``tag``; what killed runs left goes first."""
        new = self.of(tag) + INCOMPLETE
        for name in sorted(os.listdir(self.path)):
            path = os.path.join(self.path, name)
            if name.endswith(INCOMPLETE) and PLAIN_NAME.fullmatch(name.removesuffix(INCOMPLETE)):
                self._remove(path)
            elif name.endswith(REPLACED) and PLAIN_NAME.fullmatch(name):
                if os.path.lexists(path.removesuffix(REPLACED)):
                    self._remove(path)
                else:
                    with told("cannot rename", path):
                        self.disk.rename(path, path.removesuffix(REPLACED))
        with told("cannot create", new):
            self.disk.make_directory(new)
        return new

    def publish(self, tag: str) -> str:
        """Gives the finished directory its name, makes that durable, then names it the latest."""
        final = self.of(tag)
        new, old = final + INCOMPLETE, final + REPLACED
        with told("cannot make durable", new):
            self.disk.sync_directory(new)
        with told("cannot rename", new):
            replaces = os.path.lexists(final)
            if replaces:
                self.disk.rename(final, old)
            try:
                self.disk.rename(new, final)
            except OSError:
                if replaces:
                    with suppress(OSError):
                        self.disk.rename(old, final)
                raise
        with told("cannot make durable", self.path):
            self.disk.sync_directory(self.path)
        replace_file(self.disk, os.path.join(self.path, LATEST), f"{tag}\n".encode())
        if replaces:
            self._remove(old)
        return final

    def prune(self, keep_last: int) -> list[str]:
        """Removes all but the newest ``keep_last`` checkpoints by step, never the latest; returns their tags."""
        steps = {}
        for tag in self.tags():
            with suppress(InfinityError):  # what does not read as one of ours is not ours to remove
                steps[tag] = self.manifest(tag).step
        latest = self.latest()
        old = sorted(steps, key=lambda tag: (tag == latest, steps[tag], tag))[:-keep_last]
        for tag in old:
            path = self.of(tag)
            with told("cannot rename", path):
                self.disk.rename(path, path + INCOMPLETE)
            self._remove(path + INCOMPLETE)
        return old

    def _remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            foreign = [name for name in os.listdir(path) if not OUR_FILE.fullmatch(name)]
            if foreign:
                raise StorageError(
                    "will not remove", path=path, action=f"It holds {foreign[0]}, which is no file of ours; move it"
                )
        with told("cannot remove", path):
            self.disk.remove(path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the directory if need be, then keeps other processes from saving into it."""
        with told("cannot create", self.path):
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(
                    "another process is saving a checkpoint in",
                    path=self.path,
                    action="Give each run its own directory",
                ) from None
            yield
        finally:
            os.close(descriptor)


def check_tag(tag: str) -> str:
    """``tag`` if it is a plain name, so that it cannot lead out of its directory."""
    if not PLAIN_NAME.fullmatch(tag) or tag == LATEST or tag.endswith((INCOMPLETE, REPLACED)):
        raise CheckpointError(
            f"{tag!r:.80} cannot be the tag of a checkpoint; expected letters, digits, '.', '_', '-', such as step10"
        )
    return tag
