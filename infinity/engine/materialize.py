"""Builds a model piece by piece, so that the whole of it never exists at once."""

from __future__ import annotations

import io
import logging
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.comm import rank_expected
from infinity.config import Config
from infinity.engine.placeholder import OffloadedParameter
from infinity.errors import ConfigError, StorageError
from infinity.memory.host import HostMemory
from infinity.storage.swap_directory import SwapDirectory
from infinity.tier import StateKind

log = logging.getLogger("infinity")

WINDOW_BYTES = 64 << 20
"""Real parameters that may exist at once while a model is built; one larger than this may exist alone."""

SPILL_FILE_BYTES = 256 << 20


@dataclass
class SpillFile:
    """A file without a name, gone with its last descriptor, that holds the values of ``live`` parameters."""

    handle: IO[bytes] | io.BytesIO
    used: int = 0
    live: int = 0


@dataclass(frozen=True)
class Spilled:
    """Where a parameter's values are."""

    file: SpillFile
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class InitialValues:
    """Parameters of a model under construction: the latest in RAM, the others in unnamed files of the swap directory.

    An operation on a spilled parameter brings its values back first, so user code always acts on real values: an
    initialiser, ``model.apply``, ``load_state_dict``, even a forward.
    """

    def __init__(self, root: str, window_bytes: int = WINDOW_BYTES) -> None:
        self._directory = SwapDirectory(root, rank=0, nbytes=0)
        self._window_bytes = window_bytes
        self._window: OrderedDict[int, nn.Parameter] = OrderedDict()
        self._window_used = 0
        self._places: dict[int, Spilled] = {}
        self._current: SpillFile | None = None
        self._finalizer = weakref.finalize(self, self._directory.remove)

    def admit(self, parameter: nn.Parameter) -> None:
        """Takes a parameter with real values into the window, spilling the oldest ones if it overflows."""
        if isinstance(parameter, OffloadedParameter) or parameter.is_meta or id(parameter) in self._window:
            return
        self._window[id(parameter)] = parameter
        self._window_used += parameter.nbytes
        while self._window_used > self._window_bytes and len(self._window) > 1:
            _, oldest = self._window.popitem(last=False)
            self._window_used -= oldest.nbytes
            if not isinstance(oldest, OffloadedParameter):
                self._spill(oldest)

    def touched(self, placeholder: OffloadedParameter, function: str) -> torch.Tensor:
        """Brings a spilled parameter's values back into the same Python object."""
        real = nn.Parameter(self.read(placeholder), requires_grad=placeholder.requires_grad)
        self.forget(placeholder)
        real.__dict__.update({k: v for k, v in placeholder.__dict__.items() if k not in _OWN_ATTRIBUTES})
        torch.utils.swap_tensors(placeholder, real)  # type: ignore[no-untyped-call]
        self.admit(placeholder)
        return placeholder

    def gradient(self, placeholder: OffloadedParameter) -> None:
        """A parameter that was spilled has no gradient yet."""

    def set_gradient(self, placeholder: OffloadedParameter, value: torch.Tensor | None) -> None:
        """Assigning a gradient needs the real parameter."""
        if value is not None:
            self.touched(placeholder, "grad").grad = value

    def read(self, placeholder: OffloadedParameter) -> torch.Tensor:
        """The values, leaving the parameter spilled."""
        place = self._places[id(placeholder)]
        memory = HostMemory(place.nbytes)
        view = memoryview(memory.bytes.numpy())  # type: ignore[arg-type]
        done = 0
        while done < place.nbytes:
            count = os.preadv(place.file.handle.fileno(), [view[done:]], place.offset + done)
            if count == 0:
                raise StorageError(
                    "initial values ended early in", path=self._directory.path, offset=place.offset + done
                )
            done += count
        return memory.bytes.view(place.dtype).view(place.shape)

    def forget(self, placeholder: OffloadedParameter) -> None:
        """Gives a spilled parameter's disk space back once its whole file is free."""
        place = self._places.pop(id(placeholder))
        place.file.live -= 1
        if not place.file.live and place.file is not self._current:
            place.file.handle.close()

    def close(self) -> None:
        """Removes whatever is left."""
        if self._current is not None:
            self._current.handle.close()
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether everything was taken away already."""
        return not self._finalizer.alive

    def _spill(self, parameter: nn.Parameter) -> None:
        values = parameter.detach().contiguous().view(-1).view(torch.uint8)
        shape, dtype = tuple(parameter.shape), parameter.dtype
        placeholder = OffloadedParameter(shape, dtype, parameter.device, parameter.requires_grad, "(unnamed)", self)
        placeholder.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in placeholder.__dict__})
        try:
            torch.utils.swap_tensors(parameter, placeholder)  # type: ignore[no-untyped-call]
        except RuntimeError:
            return  # something else refers to its storage: it stays real
        self._places[id(parameter)] = self._write(values, dtype, shape)

    def _write(self, values: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Spilled:
        """Puts the bytes of a parameter behind those that are in the current file."""
        file = self._file(values.numel())
        try:
            view = memoryview(values.numpy())  # type: ignore[arg-type]
            done = 0
            while done < values.numel():
                done += os.pwrite(file.handle.fileno(), view[done:], file.used + done)
        except OSError as error:
            raise StorageError(
                "cannot write initial values in",
                path=self._directory.path,
                length=values.numel(),
                errno=error.errno,
                action="Free disk space or choose another nvme_path",
            ) from None
        place = Spilled(file, file.used, values.numel(), dtype, shape)
        file.used += values.numel()
        file.live += 1
        return place

    def _file(self, nbytes: int) -> SpillFile:
        if self._current is None or self._current.used + nbytes > SPILL_FILE_BYTES:
            full = self._current
            self._current = SpillFile(_unnamed_file(self._directory.path))
            if full is not None and not full.live:
                full.handle.close()
        return self._current


class ForgottenValues(InitialValues):
    """Parameters under construction on a rank whose values nobody will use: those of rank 0 are everybody's.

    Beyond the window they are not kept at all. An operation on one that is gone acts on zeros.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._window: OrderedDict[int, nn.Parameter] = OrderedDict()
        self._window_used = 0
        self._places: dict[int, Spilled] = {}
        self._nowhere = SpillFile(io.BytesIO())

    def read(self, placeholder: OffloadedParameter) -> torch.Tensor:
        place = self._places[id(placeholder)]
        return torch.zeros(place.shape, dtype=place.dtype)

    def forget(self, placeholder: OffloadedParameter) -> None:
        del self._places[id(placeholder)]

    def close(self) -> None:
        pass

    @property
    def closed(self) -> bool:
        return False

    def _write(self, values: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Spilled:
        return Spilled(self._nowhere, 0, values.numel(), dtype, shape)


def _unnamed_file(directory: str) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=directory, buffering=0)


_OWN_ATTRIBUTES = ("_name", "_owner", "_place")


class Init:
    """Context in which modules are built without the whole model ever being in RAM.

    With states on NVMe, parameters beyond a window of 64 MiB wait in unnamed files of the swap directory until
    ``infinity.initialize`` moves them to their tiers; without a swap directory this context does nothing. Values are
    drawn in the usual order, so the model is bit for bit the one that is built without it. Of several ranks only
    rank 0, whose values all take, keeps those beyond the window.
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any] | Config) -> None:
        self._config = Config.load(config)
        self._values: InitialValues | None = None
        self._hook: Any = None

    def __enter__(self) -> Init:
        if rank_expected() and self._values is None:
            self._values = ForgottenValues()
        directories = [
            directory
            for kind in (StateKind.PARAM, StateKind.MASTER)
            for directory in self._config.swap_directories(kind)
        ]
        if directories and (self._values is None or self._values.closed):
            self._values = InitialValues(directories[0])
        if self._values is not None:
            values = self._values
            self._hook = register_module_parameter_registration_hook(
                lambda module, name, parameter: None if parameter is None else values.admit(parameter)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        if error is not None and self._values is not None:
            self._values.close()


def initial_value(parameter: nn.Parameter) -> torch.Tensor:
    """The value a parameter starts from, read from where ``Init`` put it if need be."""
    if isinstance(parameter, OffloadedParameter):
        owner = parameter._owner
        if not isinstance(owner, InitialValues):
            raise ConfigError(
                f"parameter {parameter._name} already belongs to an engine; destroy that engine (restore_parameters="
                "True) before the model is given to another"
            )
        return owner.read(parameter)
    if parameter.is_meta:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is on the meta device, so it has no values; build the "
            "model inside `with infinity.Init(config):` instead"
        )
    return parameter.detach()


def release_initial_value(parameter: nn.Parameter) -> None:
    """Says that ``initial_value`` of this parameter is on its tier now."""
    if isinstance(parameter, OffloadedParameter) and isinstance(parameter._owner, InitialValues):
        owner = parameter._owner
        owner.forget(parameter)
        if not owner._places:
            owner.close()
