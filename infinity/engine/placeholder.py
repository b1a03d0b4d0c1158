"""What stands in a module for a parameter whose values are on another tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from infinity.errors import OffloadedError

OWN_ATTRIBUTES = frozenset(("_name", "_owner", "_place", "_hooks", "_pieces", "_homes", "_gathered"))
"""What a placeholder has beside the attributes that the user gave the parameter."""


class Owner(Protocol):
    """Who can say what to do when a placeholder is touched."""

    def touched(self, placeholder: OffloadedParameter, function: str) -> torch.Tensor:
        """The real values if they may be used right now; otherwise raises ``OffloadedError``."""
        ...

    def gradient(self, placeholder: OffloadedParameter) -> torch.Tensor | None:
        """What ``.grad`` shows."""
        ...

    def set_gradient(self, placeholder: OffloadedParameter, value: torch.Tensor | None) -> None:
        """What assigning ``.grad`` does."""
        ...


class OffloadedParameter(nn.Parameter):
    """A parameter with its real shape, dtype, device and no storage.

    Looking at it (shape, dtype, device, numel, requires_grad, ...) is always possible. Arithmetic on it either finds
    the values, because a module that needs them is running, or raises an error that says where they are.
    """

    _name: str
    _owner: Owner
    _place: tuple[int, int]
    """Unit index, slot number."""

    def __new__(
        cls,
        shape: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        name: str,
        owner: Owner,
        place: tuple[int, int] = (-1, -1),
    ) -> OffloadedParameter:
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        self._name = name
        self._owner = owner
        self._place = place
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Unit index, slot number of everything it is made of."""
        return (self._place,)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"OffloadedParameter({self._name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"requires_grad={self.requires_grad})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadedError(_cannot(self, "pickled"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OffloadedError(_cannot(self, "copied"))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _GRAD_GET:
            return args[0]._owner.gradient(args[0])
        if func == _GRAD_SET:
            return args[0]._owner.set_gradient(args[0], args[1])
        name = getattr(func, "__name__", str(func))
        if name in _LOOKS or (name == "__get__" and func in _LOOK_GETTERS) or func == _REQUIRES_GRAD_SET:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__get__":
            name = "data" if func == _DATA_GET else str(getattr(getattr(func, "__self__", None), "__name__", name))

        first = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, OffloadedParameter))
        return first._compute(name, lambda real: func(*tree_map(real, args), **tree_map(real, kwargs)))

    def _compute(self, function: str, run: Callable[[Callable[[Any], Any]], Any]) -> Any:
        """Calls ``run`` with a function that puts real values in the place of placeholders."""

        def real(value: Any) -> Any:
            return value._owner.touched(value, function) if isinstance(value, OffloadedParameter) else value

        return run(real)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in [*args, *(kwargs or {}).values()]:
            if isinstance(value, OffloadedParameter):
                value._owner.touched(value, str(func))
                raise OffloadedError(_cannot(value, f"used by {func}"))
        raise OffloadedError(f"an offloaded parameter was used by {func}")


class Lender(Owner, Protocol):
    """An owner that lends values for one operation."""

    def operate(self, function: str, run: Callable[[Callable[[Any], Any]], Any]) -> Any:
        """Calls ``run``; what placeholders lend to it goes back afterwards, unless the result is a view of it."""
        ...

    def may_require_grad(self, placeholder: OffloadedParameter) -> None:
        """Raises if the placeholder has no place for a gradient."""
        ...


class LentParameter(OffloadedParameter):
    """A placeholder whose values go back to their tier after each operation.

    Each gradient passes through what ``register_hook`` was given on its way to its own tier.
    """

    _owner: Lender
    _hooks: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "register_hook":
            handle = RemovableHandle(args[0]._hooks)
            args[0]._hooks[handle.id] = args[1]
            return handle
        if name == "register_post_accumulate_grad_hook":
            raise OffloadedError(
                f"the gradient of {args[0]._name} is accumulated on its own tier, so a hook that runs then finds no "
                "p.grad. Use p.register_hook(hook), or read it with infinity.get_full_grad(p) before engine.step()"
            )
        if (func == _REQUIRES_GRAD_SET or name == "requires_grad_") and [*args[1:], *kwargs.values(), True][0]:
            args[0]._owner.may_require_grad(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def _compute(self, function: str, run: Callable[[Callable[[Any], Any]], Any]) -> Any:
        return self._owner.operate(function, run)


def _cannot(placeholder: OffloadedParameter, verb: str) -> str:
    return (
        f"parameter {placeholder._name} is offloaded: it cannot be {verb} here. Use infinity.get_full_param(p), "
        "with infinity.gathered(p): ..., or engine.state_dict()"
    )


def away(placeholder: OffloadedParameter, tier: str, function: str) -> str:
    """What to tell somebody who used a parameter whose values are on ``tier``: by what was tried, what to do."""
    where = f"parameter {placeholder._name} {tuple(placeholder.shape)} is on the {tier} tier; "
    if function in _CASTS:
        return (
            f"{where}the engine decides on which device it is used, in which dtype. Leave .{function}() out: bf16 and "
            "fp16 of the config say the dtype. infinity.get_full_param(p) is its value, engine.state_dict() all; "
            "engine.destroy(restore_parameters=True) takes all parameters back into RAM"
        )
    if function in ("backward", "grad"):
        return (
            f"{where}{function} cannot be asked for the gradient of some parameters alone. Call backward() without "
            "inputs, then infinity.get_full_grad(p); parameters that are not to be trained get requires_grad False "
            "before infinity.initialize"
        )
    return (
        f"{where}{function} needs its values. Read them with infinity.get_full_param(p), read or change them inside "
        "`with infinity.gathered(p):`, or take all of them from engine.state_dict(). engine.save_pretrained(directory) "
        "or engine.save_checkpoint(directory) saves them"
    )


def _accessor(name: str, verb: str) -> Any:
    return getattr(getattr(torch.Tensor, name, None), verb, None)


_GRAD_GET = _accessor("grad", "__get__")
_GRAD_SET = _accessor("grad", "__set__")
_DATA_GET = _accessor("data", "__get__")
_REQUIRES_GRAD_SET = _accessor("requires_grad", "__set__")
_LOOK_GETTERS = frozenset(
    _accessor(name, "__get__")
    for name in (
        "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "names", "ndim", "is_sparse",
        "is_quantized", "is_meta", "is_cuda", "is_cpu", "is_mkldnn", "is_nested", "is_xpu", "is_mps", "is_ipu",
        "is_sparse_csr", "is_vulkan", "is_maia", "is_mtia", "is_xla", "is_ort", "itemsize", "nbytes", "output_nr",
        "_version", "_backward_hooks", "retains_grad", "name",
    )
)  # fmt: skip
_CASTS = frozenset(("to", "type", "half", "bfloat16", "float", "double", "cpu", "cuda"))
_LOOKS = frozenset(
    (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset",
        "is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "requires_grad_", "is_shared",
        "is_pinned", "__hash__", "__len__", "__repr__", "is_inference", "register_post_accumulate_grad_hook",
        "is_conj", "is_neg", "is_same_size", "has_names",
    )
)  # fmt: skip
