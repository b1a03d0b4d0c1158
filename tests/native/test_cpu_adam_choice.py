"""Opening kernels picks a body that runs, or says why not; a call refuses tensors it cannot serve by name."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys

import pytest
import torch

from infinity._native import library
from infinity._native.cpu_adam import AdamStep, TorchKernels, open_kernels, runnable_isas
from infinity.errors import ConfigError

STEP = AdamStep(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)
each_body = pytest.mark.parametrize("isa", [runnable_isas()[0], "torch"])


@pytest.fixture(autouse=True)
def no_forced_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINITY_ISA", raising=False)


def missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda name: None)
    monkeypatch.setattr(library, "why_missing", lambda name: f"no compiler built {name}")


def test_auto_takes_the_widest() -> None:
    assert open_kernels().isa == runnable_isas()[0]
    assert open_kernels().threads == torch.get_num_threads()
    assert open_kernels(threads=3).threads == 3


@pytest.mark.parametrize("isa", [*runnable_isas(), "torch"])
def test_each_body_can_be_forced_by_argument_and_by_environment(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_kernels(isa).isa == isa
    monkeypatch.setenv("INFINITY_ISA", isa)
    assert open_kernels().isa == isa


def test_the_environment_does_not_win_over_an_explicit_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_ISA", "torch")
    assert open_kernels("scalar").isa == "scalar"


def test_an_instruction_set_of_another_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = next(isa for isa in ("neon", "avx2") if isa not in runnable_isas())
    with pytest.raises(ConfigError, match=f"isa is '{foreign}', which this machine cannot run; it can run .*scalar"):
        open_kernels(foreign)
    monkeypatch.setenv("INFINITY_ISA", foreign)
    with pytest.raises(ConfigError, match="INFINITY_ISA is"):
        open_kernels()


def test_an_unknown_name_and_a_negative_thread_count_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="isa is 'sse9'; expected auto, avx512, avx2, neon, scalar or torch"):
        open_kernels("sse9")
    with pytest.raises(ConfigError, match="threads is -1"):
        open_kernels(threads=-1)
    monkeypatch.setenv("INFINITY_ISA", "fast")
    with pytest.raises(ConfigError, match="INFINITY_ISA is 'fast'"):
        open_kernels()


def test_without_the_library_pytorch_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing_library(monkeypatch)
    with caplog.at_level(logging.WARNING):
        kernels = open_kernels()
    assert isinstance(kernels, TorchKernels)
    assert kernels.isa == "torch"
    assert [r.getMessage().endswith("no compiler built cpu_adam") for r in caplog.records] == [True]
    assert runnable_isas() == ()


def test_without_the_library_a_forced_body_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    missing_library(monkeypatch)
    with pytest.raises(ConfigError, match="needs the native library, but no compiler built cpu_adam"):
        open_kernels("scalar")


@each_body
@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "grad", "out"])
def test_a_tensor_that_cannot_be_served_is_named(isa: str, name: str) -> None:
    kernels = open_kernels(isa)

    def call(tensor: object) -> None:
        tensors: dict[str, object] = {
            other: torch.zeros(8) for other in ("master", "exp_avg", "exp_avg_sq", "grad", "out")
        }
        kernels.adam(**{**tensors, name: tensor}, step=STEP)  # type: ignore[arg-type]

    call(torch.zeros(8))
    with pytest.raises(TypeError, match=f"^{name} is float64; expected float32"):
        call(torch.zeros(8, dtype=torch.float64))
    with pytest.raises(TypeError, match=f"^{name} is a list"):
        call([0.0] * 8)
    with pytest.raises(ValueError, match=r"has \d elements; expected \d as master has"):
        call(torch.zeros(9))
    with pytest.raises(ValueError, match=f"^{name} has shape .* contiguous"):
        call(torch.zeros(16)[::2])
    with pytest.raises(ValueError, match=f"^{name} has shape .* one dimension"):
        call(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=f"^{name} is on meta"):
        call(torch.zeros(8, device="meta"))
    if name in ("grad", "out"):
        call(torch.zeros(8, dtype=torch.bfloat16))
    else:
        with pytest.raises(TypeError, match=f"^{name} is bfloat16; expected float32"):
            call(torch.zeros(8, dtype=torch.bfloat16))


@each_body
def test_buffers_that_share_memory_are_refused(isa: str) -> None:
    kernels, pool = open_kernels(isa), torch.zeros(64)
    with pytest.raises(ValueError, match="master and exp_avg share memory"):
        kernels.adam(pool[:8], pool[7:15], pool[16:24], pool[24:32], None, STEP)
    with pytest.raises(ValueError, match="share memory"):
        kernels.accumulate(pool[:8], pool[4:12], first=False)
    kernels.adam(pool[:8], pool[8:16], pool[16:24], pool[24:32], pool[32:40], STEP)


@each_body
def test_the_other_kernels_check_too(isa: str) -> None:
    kernels = open_kernels(isa)
    with pytest.raises(TypeError, match="into is bfloat16"):
        kernels.accumulate(torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8), first=True)
    with pytest.raises(ValueError, match="grad has 7 elements; expected 8 as into has"):
        kernels.accumulate(torch.zeros(8), torch.zeros(7), first=True)
    with pytest.raises(TypeError, match="x is int32"):
        kernels.sum_of_squares(torch.zeros(8, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1.0), ("eps", float("nan")), ("beta1", 1.0), ("beta2", -0.1), ("step", 0), ("grad_scale", float("inf"))],
)
def test_hyper_parameters_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is"):
        AdamStep(**{**vars(STEP), name: value})


def test_a_call_lets_other_python_threads_run() -> None:
    native = library.load("cpu_adam")
    assert isinstance(native, ctypes.CDLL)
    assert not isinstance(native, ctypes.PyDLL), "a PyDLL keeps the interpreter locked for the whole call"


def test_one_openmp_runtime_serves_pytorch_and_the_kernels() -> None:
    script = (
        "from infinity._native.cpu_adam import open_kernels\n"
        "import torch\n"
        "torch.randn(1 << 20).exp_()\n"
        "open_kernels('scalar', threads=2).sum_of_squares(torch.ones(1 << 18))\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}\n"
        "print(*[file for file in files if any(name in file for name in ('libgomp', 'libomp', 'libiomp'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1, done.stdout
