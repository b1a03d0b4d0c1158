"""What every engine does alike with a request: check it, describe its failure."""

from __future__ import annotations

import errno
import os

import torch

from infinity.errors import StorageError
from infinity.storage.swap_file import SwapFile

ACTIONS = {
    errno.ENOSPC: "Free space on that file system, choose another nvme_path, or keep a state kind in host memory",
    errno.EDQUOT: "Raise this user's quota on that file system or choose another nvme_path",
    errno.EFBIG: "Raise the file size limit of this process (ulimit -f)",
    errno.EIO: "The disk or its driver reported an error: look at dmesg",
    errno.EBADF: "The file was closed while it was still in use",
}


def transfer_error(*, write: bool, path: str, offset: int, length: int, number: int) -> StorageError:
    """The error of one block of a request."""
    what = "cannot write" if write else "cannot read"
    if number == errno.ENODATA and not write:
        what = "cannot read past the end of"
    return StorageError(what, path=path, offset=offset, length=length, errno=number, action=ACTIONS.get(number))


def check_request(file: SwapFile, offset: int, tensor: torch.Tensor, *, write: bool) -> None:
    """Raises for what no engine can carry out."""
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or tensor.device.type != "cpu":
        raise TypeError(
            f"I/O takes 1-D uint8 CPU tensors, not {tensor.dim()}-D {tensor.dtype} on {tensor.device}; "
            "use .view(torch.uint8)"
        )
    if not tensor.is_contiguous():
        raise ValueError("I/O takes contiguous tensors: the bytes of this one are not next to each other")
    if offset < 0:
        raise ValueError(f"file offset must not be negative, is {offset}")
    if file.closed:
        raise transfer_error(write=write, path=file.path, offset=offset, length=tensor.numel(), number=errno.EBADF)


def check_process(owner: int, file: SwapFile) -> None:
    """Raises in a child made by fork, which has the engine's memory but none of its threads."""
    if os.getpid() != owner:
        raise StorageError(
            "an I/O engine that was opened before fork cannot use",
            path=file.path,
            action="Start worker processes before the engine, or with the spawn method",
        )
