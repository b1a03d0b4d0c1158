"""Every native body of the optimizer kernels gives the bits of the PyTorch reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._native.cpu_adam import AdamStep, TorchKernels, open_kernels, runnable_isas

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OUTS = (None, *FLOATS)
SENTINEL = 0xA5
MARGIN = 64

each_isa = pytest.mark.parametrize("isa", runnable_isas())


@dataclass
class Guarded:
    """A 1-D tensor at any element offset, between bytes that nobody may touch."""

    storage: torch.Tensor
    begin: int
    end: int
    dtype: torch.dtype

    @classmethod
    def holding(cls, values: torch.Tensor, offset: int) -> Guarded:
        begin = MARGIN + offset * values.element_size()
        end = begin + values.numel() * values.element_size()
        guarded = cls(torch.full((end + MARGIN,), SENTINEL, dtype=torch.uint8), begin, end, values.dtype)
        guarded.tensor.copy_(values)
        return guarded

    @property
    def tensor(self) -> torch.Tensor:
        return self.storage[self.begin : self.end].view(self.dtype)

    def margins_are_untouched(self) -> bool:
        return bool((self.storage[: self.begin] == SENTINEL).all() and (self.storage[self.end :] == SENTINEL).all())


@dataclass
class State:
    """The buffers of one Adam call."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    out: torch.Tensor | None

    @classmethod
    def random(cls, n: int, grad: torch.dtype, out: torch.dtype | None, seed: int = 0) -> State:
        generator = torch.Generator().manual_seed(seed)

        def normal() -> torch.Tensor:
            return torch.randn(n, generator=generator)

        # Gradients over many magnitudes: zero, subnormal in fp16 and in fp32 after squaring, large.
        gradient = normal() * 10.0 ** torch.randint(-25, 4, (n,), generator=generator)
        return cls(
            normal(),
            normal() * 0.1,
            normal().square() * 0.01,
            gradient.to(grad),
            None if out is None else torch.zeros(n, dtype=out),
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        return (t for t in (self.master, self.exp_avg, self.exp_avg_sq, self.grad, self.out) if t is not None)

    def clone(self) -> State:
        return State(*(None if t is None else t.clone() for t in vars(self).values()))  # type: ignore[arg-type]

    def run(self, kernels: object, step: AdamStep) -> State:
        kernels.adam(self.master, self.exp_avg, self.exp_avg_sq, self.grad, self.out, step)  # type: ignore[attr-defined]
        return self

    def equals(self, other: State) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.tensors(), other.tensors(), strict=True))


def make_step(**changes: object) -> AdamStep:
    usual: dict[str, object] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": 1,
        "decoupled": True,
        "grad_scale": 1.0,
    }
    return AdamStep(**{**usual, **changes})  # type: ignore[arg-type]


def test_this_machine_runs_native_bodies() -> None:
    assert runnable_isas()
    assert runnable_isas()[-1] == "scalar"


@each_isa
@pytest.mark.parametrize("decoupled", [False, True])
def test_every_combination_of_types_and_hyper_parameters_equals_the_reference(isa: str, decoupled: bool) -> None:
    kernels = open_kernels(isa, threads=1)
    for grad, out in itertools.product(FLOATS, OUTS):
        start = State.random(213, grad, out)
        for weight_decay, eps, step in itertools.product((0.0, 0.1), (1e-8, 0.1), (1, 2, 1000)):
            varied = make_step(decoupled=decoupled, weight_decay=weight_decay, eps=eps, step=step)
            for grad_scale, beta1 in ((1.0, 0.9), (2.0**-16, 0.9), (0.37, 0.3), (1.0, 0.0)):
                hyper = replace(varied, grad_scale=grad_scale, beta1=beta1)
                want, got = start.clone().run(TorchKernels(), hyper), start.clone().run(kernels, hyper)
                assert got.equals(want), (grad, out, hyper)


@each_isa
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 300),
    offsets=st.tuples(*[st.integers(0, 17)] * 5),
    grad=st.sampled_from(FLOATS),
    out=st.sampled_from(OUTS),
    seed=st.integers(0, 2**31),
    step=st.integers(1, 100_000),
    decoupled=st.booleans(),
)
def test_any_length_at_any_offset_equals_the_reference_and_touches_nothing_else(
    isa: str,
    n: int,
    offsets: tuple[int, ...],
    grad: torch.dtype,
    out: torch.dtype | None,
    seed: int,
    step: int,
    decoupled: bool,
) -> None:
    start = State.random(n, grad, out, seed)
    hyper = make_step(step=step, decoupled=decoupled, grad_scale=0.37)
    want = start.clone().run(TorchKernels(), hyper)
    guarded = [Guarded.holding(t, offset) for t, offset in zip(start.tensors(), offsets, strict=False)]
    got = State(*[g.tensor for g in guarded], *([None] if out is None else [])).run(open_kernels(isa, threads=2), hyper)
    assert got.equals(want)
    assert all(g.margins_are_untouched() for g in guarded)
    assert torch.equal(got.grad, start.grad)


@each_isa
@pytest.mark.parametrize("n", [65_535, 65_536, 3 * 65_536 + 4097])
def test_threads_never_change_a_bit(isa: str, n: int) -> None:
    for grad, out in ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
        start = State.random(n, grad, out)
        want = start.clone().run(TorchKernels(), make_step())
        for threads in (1, 2, 3):
            assert start.clone().run(open_kernels(isa, threads), make_step()).equals(want)


@each_isa
def test_ten_steps_in_a_row_equal_the_reference(isa: str) -> None:
    ours = State.random(1001, torch.bfloat16, torch.bfloat16)
    theirs = ours.clone()
    for step in range(1, 11):
        ours.grad = theirs.grad = State.random(1001, torch.bfloat16, None, seed=step).grad
        ours.run(open_kernels(isa), make_step(step=step))
        theirs.run(TorchKernels(), make_step(step=step))
    assert ours.equals(theirs)


@each_isa
def test_calls_remember_nothing(isa: str) -> None:
    kernels = open_kernels(isa)
    start = State.random(100, torch.float32, None)
    fresh = start.clone().run(kernels, make_step(step=5))
    start.clone().run(kernels, make_step(step=900, lr=1.0, beta1=0.1, decoupled=False))
    assert start.clone().run(kernels, make_step(step=5)).equals(fresh)


@each_isa
def test_subnormals_survive_a_thread_that_flushes_them(isa: str) -> None:
    tiny = torch.full((1 << 17,), 2.0**-140)
    want = torch.full_like(tiny, 2.0**-139)
    for threads in (1, 2):
        kernels = open_kernels(isa, threads)
        into = tiny.clone()
        assert torch.set_flush_denormal(True)
        try:
            kernels.accumulate(into, tiny, first=False)
            still_flushing = float(torch.tensor(2.0**-140).mul(1.0)) == 0.0
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(into, want)
        assert still_flushing, "the caller's floating-point mode must come back"


@each_isa
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_gradient_spoils_its_own_element_only(isa: str, bad: float) -> None:
    for grad in FLOATS:
        start = State.random(67, grad, torch.bfloat16)
        start.grad[13] = bad
        want = start.clone().run(TorchKernels(), make_step())
        got = start.clone().run(open_kernels(isa), make_step())
        others = torch.arange(67) != 13
        assert not got.master[13].isfinite()
        assert got.master[others].isfinite().all()
        for a, b in zip(got.tensors(), want.tensors(), strict=True):
            assert torch.equal(a[others], b[others])
            assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(got.out.view(torch.int16), want.out.view(torch.int16))  # type: ignore[union-attr]


@each_isa
@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 200), offset=st.integers(0, 17), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 2**31))
def test_accumulate_equals_pytorch_and_touches_nothing_else(
    isa: str, n: int, offset: int, dtype: torch.dtype, seed: int
) -> None:
    kernels = open_kernels(isa, threads=2)
    start = State.random(n, dtype, None, seed)
    into, grad = Guarded.holding(start.master, offset), Guarded.holding(start.grad, offset + 1)
    kernels.accumulate(into.tensor, grad.tensor, first=False)
    assert torch.equal(into.tensor, start.master + start.grad.float())
    kernels.accumulate(into.tensor, grad.tensor, first=True)
    assert torch.equal(into.tensor, start.grad.float())
    assert into.margins_are_untouched()
    assert grad.margins_are_untouched()
    assert torch.equal(grad.tensor, start.grad)


@each_isa
def test_accumulate_of_many_elements_equals_pytorch_on_any_threads(isa: str) -> None:
    start = State.random(200_003, torch.bfloat16, None)
    for threads in (1, 2, 3):
        into = start.master.clone()
        open_kernels(isa, threads).accumulate(into, start.grad, first=False)
        assert torch.equal(into, start.master + start.grad.float())


@each_isa
def test_the_mover_keeps_master_and_moments(isa: str) -> None:
    start = State.random(100_003, torch.bfloat16, torch.bfloat16)
    moved = start.clone()
    open_kernels(isa, 2).move(moved.master, moved.exp_avg, moved.exp_avg_sq, moved.grad, moved.out)  # type: ignore[attr-defined]
    for a, b in zip(list(moved.tensors())[:4], list(start.tensors())[:4], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(moved.out, start.out)  # type: ignore[arg-type]
