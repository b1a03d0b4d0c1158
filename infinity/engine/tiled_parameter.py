"""What stands in a module for a parameter that is fetched tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.engine.placeholder import Lender, LentParameter
from infinity.errors import OffloadedError, ScheduleError
from infinity.nn.cross_entropy import linear_cross_entropy, tiled_cross_entropy
from infinity.nn.tiled import Assembled, Region, TiledEmbedding, tiled_linear
from infinity.shard.tiles import Piece
from infinity.stream.grads import GradStream
from infinity.stream.params import ParamStream, Phase


class _Frame(Protocol):
    phase: Phase
    own: set[int]
    used: set[int]


class TileLender(Lender, Protocol):
    """The owner of tiles: who fetches them, who takes their gradients, the calls in progress."""

    params: ParamStream
    grads: GradStream
    anchor: Tensor

    @property
    def frames(self) -> Sequence[_Frame]:
        """The calls in progress on this thread, innermost last."""
        ...

    def say_once(self, message: str) -> None:
        """Logs a message the first time it is given."""
        ...


class TiledParameter(LentParameter):
    """A placeholder for a matrix that no one unit holds: each of its tiles is a unit.

    ``F.linear``, ``torch.addmm``, ``F.embedding`` with it work through the tiles, holding one at a time. Any other
    operation is given the assembled matrix, outside of the budgets. It is shown in the module tree at all times, so
    the user's names, shapes, parameter groups are those of the matrix; the optimizer updates each tile as a unit of
    its own, with the numbers of the matrix's group.
    """

    _owner: TileLender
    _pieces: tuple[Piece, ...]
    _homes: list[tuple[dict[str, Any], str]]
    _gathered: nn.Parameter | None

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        return tuple((piece.unit, piece.slot) for piece in self._pieces)

    def adopt(self, pieces: tuple[Piece, ...], homes: list[tuple[dict[str, Any], str]]) -> None:
        """Says which tiles this is made of, in which ``_parameters`` dicts it is seen."""
        self._pieces = pieces
        self._homes = homes
        self._gathered = None

    def show(self, value: nn.Parameter) -> None:
        """Puts ``value``, itself or what the user looks at, into the module tree."""
        for parameters, name in self._homes:
            parameters[name] = value

    def check_homes(self) -> None:
        """Raises if somebody else put a parameter into one of its places."""
        for parameters, name in self._homes:
            if parameters.get(name) is not self and parameters.get(name) is not self._gathered:
                raise OffloadedError(
                    f"parameter {self._name} was replaced by another object after infinity.initialize. Put values "
                    "into it with infinity.set_full_param(p, value), or change the model before"
                )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_tiles = _BY_TILES.get(func)
        if by_tiles is not None:
            result = by_tiles(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)

    def tiles(self, function: str) -> LentTiles | None:
        """The tiles to work through; None outside of any call, where only gathered values can be used."""
        return LentTiles(self, function) if self._owner.frames else None

    def whole(self, function: str) -> Tensor | None:
        """The whole matrix, differentiable, for an operation that knows nothing of tiles; what the user looks at
        outside of any call; None if there is neither."""
        if not self._owner.frames:
            return self._gathered
        self._owner.say_once(
            f"{self._name} is cut into tiles but {function} needs all of it at once: it is assembled outside of the "
            "budgets. Use it by F.linear, torch.addmm or F.embedding, or keep it whole (infinity.tile_bytes)"
        )
        found: Tensor = Assembled.apply(LentTiles(self, function), _anchor(self), self.dtype)  # type: ignore[no-untyped-call]
        return found


class TiledParameters(list[TiledParameter]):
    """Those of one model."""

    def hide_gathered(self) -> None:
        """Puts placeholders, through which tiles are used, in the place of values that the user looks at."""
        for tiled in self:
            tiled.check_homes()
            tiled.show(tiled)

    def show_gathered(self) -> None:
        """Puts the values that the user looks at, if any, back into the module tree."""
        for tiled in self:
            if tiled._gathered is not None:
                tiled.show(tiled._gathered)


@contextmanager
def gathered_tiles(values: Mapping[TiledParameter, nn.Parameter]) -> Iterator[None]:
    """Puts real parameters into the places of placeholders for a while."""
    for tiled, value in values.items():
        tiled._gathered = value
        tiled.show(value)
    try:
        yield
    finally:
        for tiled in values:
            tiled._gathered = None
            tiled.show(tiled)


class LentTiles:
    """The tiles of one parameter for one operation, each lent by the engine for as long as it is used."""

    def __init__(self, placeholder: TiledParameter, function: str) -> None:
        self.shape = tuple(placeholder.shape)
        self.regions: Sequence[Region] = [(piece.region[0], piece.region[1]) for piece in placeholder._pieces]
        self._function = function
        self._placeholder = placeholder
        self._owner = placeholder._owner
        self._hooked: Tensor | None = None
        self._waiting = 0

    @property
    def wants_gradient(self) -> bool:
        """False in ``autograd.grad()``, as for parameters that are whole."""
        valid: bool = torch.autograd._is_checkpoint_valid()  # type: ignore[no-untyped-call]
        return valid and self._placeholder.requires_grad

    @contextmanager
    def lend(self, number: int) -> Iterator[Tensor]:
        piece, frame = self._placeholder._pieces[number], self._frame()
        frame.own.add(piece.unit)
        frame.used.add(piece.unit)
        with torch.inference_mode(False):
            self._owner.params.lend((piece.unit,), frame.phase)
            try:
                shape = piece.tile_shape
                yield self._owner.params.flat(piece.unit)[: shape[0] * shape[1]].view(shape)
            finally:
                self._owner.params.release((piece.unit,))

    def deposit(self, number: int, gradient: Tensor) -> None:
        """Adds to the tile's gradient, which is complete when the call that used the tile ends."""
        self._frame()
        if self._placeholder._hooks:
            self._deposit_hooked(number, gradient)
            return
        piece, grads = self._placeholder._pieces[number], self._owner.grads
        grads.expect(piece.unit)
        grads.deposit(piece.unit, piece.slot, gradient)

    def attach(self, weight: Tensor | None) -> None:
        pass

    def gradient(self) -> None:
        """Deposited already."""

    def _frame(self) -> _Frame:
        if not self._owner.frames:
            raise ScheduleError(
                f"backward reached {self._function} of {self._placeholder._name}, but not by the output of a module "
                "that the engine runs. Compute with a parameter in the forward of the model"
            )
        return self._owner.frames[-1]

    def _deposit_hooked(self, number: int, gradient: Tensor) -> None:
        """Waits until the whole gradient is there, which is what the user's hooks are to see."""
        if self._hooked is None:
            self._hooked = torch.empty(self.shape, dtype=gradient.dtype, device=gradient.device)
            self._waiting = len(self.regions)
        self._hooked[self.regions[number]] = gradient
        self._waiting -= 1
        if self._waiting:
            return
        whole, self._hooked = self._hooked, None
        for hook in self._placeholder._hooks.values():
            changed = hook(whole)
            whole = whole if changed is None else changed
        for piece in self._placeholder._pieces:
            self._owner.grads.deposit(piece.unit, piece.slot, whole[piece.region])


def _anchor(weight: TiledParameter) -> Tensor:
    """Makes a result require a gradient if the parameter does."""
    anchor = weight._owner.anchor
    return anchor if weight.requires_grad else anchor.detach()


def _real(value: Any, function: str) -> Any:
    """A parameter of another unit becomes its values, lent to the running call."""
    if isinstance(value, LentParameter):
        return value._owner.touched(value, function)
    return value


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    tiles = weight.tiles("linear") if isinstance(weight, TiledParameter) else None
    if tiles is None:
        return NotImplemented
    return tiled_linear(tiles, _real(x, "linear"), _anchor(weight), _real(bias, "linear"), transposed=False)


def _addmm(bias: Any, x: Any, weight: Any, **options: Any) -> Any:
    tiles = weight.tiles("addmm") if isinstance(weight, TiledParameter) and not options else None
    if tiles is None or bias.dim() != 1 or x.dim() != 2:
        return NotImplemented
    return tiled_linear(tiles, _real(x, "addmm"), _anchor(weight), _real(bias, "addmm"), transposed=True)


def _embedding(
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    tiles = weight.tiles("embedding") if isinstance(weight, TiledParameter) else None
    if tiles is None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return TiledEmbedding.apply(tiles, indices, _anchor(weight), padding, weight.dtype)  # type: ignore[no-untyped-call]


def _cross_entropy(
    hidden: Any, weight: Any, targets: Any, *, ignore_index: int, reduction: str, chunk_tokens: int
) -> Any:
    tiles = weight.tiles("linear_cross_entropy")
    if tiles is None or len({columns.start for _, columns in tiles.regions}) > 1:
        return NotImplemented
    return tiled_cross_entropy(tiles, hidden, _anchor(weight), targets, ignore_index, reduction, chunk_tokens)


_BY_TILES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        F.linear: _linear,
        torch.addmm: _addmm,
        F.embedding: _embedding,
        linear_cross_entropy: _cross_entropy,
    }
)
