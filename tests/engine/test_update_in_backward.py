"""With updates in backward a gradient is consumed when it is complete: less memory, the same bits, nothing silent."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.engine import Engine
from infinity.errors import CapacityError, ConfigError, NonFiniteError, ScheduleError
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.tier import Tier
from tests.engine.helpers import PLACEMENTS, attached, configure

BATCH = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(3))


def decoder(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(d_model=64, n_layers=layers, n_heads=4, d_ff=128))


def in_backward(swap: Path, device: str, **own: Any) -> dict[str, Any]:
    return configure(swap, device, update_in_backward=True, **own)


@pytest.mark.parametrize("device", PLACEMENTS)
def test_units_have_new_values_before_step(tmp_path: Path, device: str) -> None:
    model = decoder()
    last = model.blocks[3].down.weight
    with attached(model, in_backward(tmp_path, device)) as engine:
        before = infinity.get_full_param(last)
        engine.backward(engine(BATCH, BATCH))
        assert not torch.equal(infinity.get_full_param(last), before)
        engine.step()
        assert engine.was_step_applied()
        assert engine.get_global_grad_norm() > 0  # type: ignore[operator]


def test_gradients_have_no_memory_but_two_slabs_per_size(tmp_path: Path) -> None:
    peaks = {}
    for flag in (False, True):
        with attached(decoder(12), configure(tmp_path, "cpu", update_in_backward=flag)) as engine:
            for _ in range(3):
                engine.backward(engine(BATCH, BATCH))
                engine.step()
            tier = engine.report()["tiers"]["host"]
            assert tier["peak_bytes"] == tier["planned_bytes"]
            peaks[flag] = tier["peak_bytes"]
            parameters = engine.report()["parameters"]
            largest = sum(engine.plan.grad_slabs)
    saved = peaks[False] - peaks[True]
    assert saved >= 4 * parameters - 2 * largest > 2 * parameters


def test_the_budget_decides_whether_every_gradient_may_wait_for_its_update(tmp_path: Path) -> None:
    with attached(decoder(12), in_backward(tmp_path, "nvme")) as engine:
        roomy = engine.plan
    assert max(roomy.grad_slabs.values()) == 12
    tight = roomy.total(Tier.HOST) - 4 * max(roomy.grad_slabs)
    with attached(decoder(12), in_backward(tmp_path, "nvme", host_memory=tight)) as engine:
        assert max(engine.plan.grad_slabs.values()) == 3
        for _ in range(2):
            engine.backward(engine(BATCH, BATCH))
            engine.step()
        engine.settle()
        assert engine.report()["tiers"]["host"]["peak_bytes"] <= tight


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "native Adam"),
    ],
)
def test_what_needs_all_gradients_first_is_refused(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        infinity.initialize(model=decoder(), config=in_backward(tmp_path, "cpu") | change)


def test_a_torch_optimizer_of_the_users_is_refused(tmp_path: Path) -> None:
    model = decoder()
    config = in_backward(tmp_path, "cpu")
    del config["optimizer"]
    with pytest.raises(ConfigError, match="native Adam"):
        infinity.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_accumulation_that_comes_from_the_batch_sizes_is_refused(tmp_path: Path) -> None:
    config = in_backward(tmp_path, "cpu") | {"train_batch_size": 4}
    del config["gradient_accumulation_steps"]
    with pytest.raises(ConfigError, match="update_in_backward"):
        infinity.initialize(model=decoder(), config=config)


@pytest.mark.parametrize("device", PLACEMENTS)
def test_a_consumed_gradient_is_not_to_be_had(tmp_path: Path, device: str) -> None:
    model = decoder()
    weight = model.blocks[3].down.weight
    with attached(model, in_backward(tmp_path, device)) as engine:
        engine.backward(engine(BATCH, BATCH))
        with pytest.raises(ScheduleError, match="update_in_backward"):
            infinity.get_full_grad(weight)
        with pytest.raises(ScheduleError, match="update_in_backward"):
            engine.zero_grad()
        engine.step()
        assert infinity.get_full_grad(weight) is None
        engine.zero_grad()


def test_a_second_backward_before_step_is_refused(tmp_path: Path) -> None:
    with attached(decoder(), in_backward(tmp_path, "cpu")) as engine:
        engine.backward(engine(BATCH, BATCH))
        with pytest.raises(ScheduleError, match="update_in_backward"):
            engine.backward(engine(BATCH, BATCH))


def test_a_learning_rate_that_changes_too_late_is_refused(tmp_path: Path) -> None:
    with attached(decoder(), in_backward(tmp_path, "cpu")) as engine:
        engine.backward(engine(BATCH, BATCH))
        engine.optimizer.param_groups[0]["lr"] = 1e-4  # type: ignore[union-attr]
        with pytest.raises(ScheduleError, match="between backward"):
            engine.step()


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with attached(decoder(), in_backward(tmp_path, "cpu")) as engine:
        loss = engine(BATCH, BATCH) * float("inf")
        with pytest.raises(NonFiniteError, match="checkpoint"):
            engine.backward(loss)


def test_a_graph_that_was_dropped_is_not_waited_for(tmp_path: Path) -> None:
    with attached(decoder(12), in_backward(tmp_path, "cpu")) as engine:
        looked_at = engine(BATCH, BATCH)
        del looked_at
        gc.collect()
        engine.backward(engine(BATCH, BATCH))
        engine.step()


def test_units_that_are_used_twice_need_their_slabs_until_then(tmp_path: Path) -> None:
    with attached(decoder(12), in_backward(tmp_path, "nvme")) as engine:  # where every unit has one
        engine.backward(engine(BATCH, BATCH) + engine(BATCH, BATCH))
        engine.step()
    with attached(decoder(12), in_backward(tmp_path, "cpu")) as engine:
        loss = engine(BATCH, BATCH) + engine(BATCH, BATCH)
        with pytest.raises(CapacityError, match="update_in_backward"):
            engine.backward(loss)


def test_an_engine_with_updates_in_backward_can_be_collected(tmp_path: Path) -> None:
    import weakref

    engine, *_ = infinity.initialize(model=decoder(), config=in_backward(tmp_path, "nvme"))
    engine.backward(engine(BATCH, BATCH))
    engine.step()
    remains = weakref.ref(engine)
    del engine, _
    gc.collect()
    assert remains() is None


@pytest.mark.parametrize("tile_bytes", ["auto", 4096])
def test_units_that_wait_for_the_end_of_backward_have_slabs_beside_the_others(
    tmp_path: Path, tile_bytes: str | int
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 64)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
            self.gain = nn.Parameter(torch.ones(64))  # in the root unit
            self.head = nn.Linear(64, 16, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x) + x
            return self.head(x * self.gain).logsumexp(-1).mean()

    for device in PLACEMENTS:
        found = []
        for flag in (False, True):
            torch.manual_seed(0)
            config = configure(tmp_path, device, update_in_backward=flag, slabs="auto", tile_bytes=tile_bytes)
            with attached(Tied(), config) as engine:
                for _ in range(2):
                    engine.backward(engine(torch.arange(16).view(2, 8)))
                    engine.step()
                found.append(values(engine))
        for name, value in found[0].items():
            assert torch.equal(value, found[1][name]), name


def values(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: infinity.get_full_param(p) for name, p in engine.module.named_parameters()}


def test_nothing_is_kept_of_the_middle_of_a_step(tmp_path: Path) -> None:
    with attached(decoder(), in_backward(tmp_path, "nvme")) as engine:
        engine.backward(engine(BATCH, BATCH))
        for keep in (engine.save_checkpoint, engine.save_pretrained, engine.load_weights):
            with pytest.raises(ScheduleError, match="in the middle of a step"):
                keep(tmp_path / "kept")
        engine.step()
        engine.save_checkpoint(tmp_path / "kept")


def test_a_run_goes_on_from_a_checkpoint_after_a_gradient_that_was_not_finite(tmp_path: Path) -> None:
    found = []
    for fails in (False, True):
        with attached(decoder(), in_backward(tmp_path, "nvme")) as engine:
            engine.backward(engine(BATCH, BATCH))
            engine.step()
            engine.save_checkpoint(tmp_path / "kept", f"{fails}")
            if fails:
                with pytest.raises(NonFiniteError):
                    engine.backward(engine(BATCH, BATCH) * float("inf"))
                engine.load_checkpoint(tmp_path / "kept")
                engine.backward(engine(BATCH, BATCH))
                with pytest.raises(ScheduleError, match="in the middle of a step"):
                    engine.load_checkpoint(tmp_path / "kept", load_optimizer_states=False)
                engine.load_checkpoint(tmp_path / "kept")
            engine.backward(engine(BATCH, BATCH))
            engine.step()
            found.append(values(engine))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


class Sharing(nn.Module):
    """Blocks that are computed again, with a unit of its own in each that is one for all."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(16, 16), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(torch.tanh(self.own(x))))


def test_a_unit_that_several_recomputed_units_call_is_updated_after_the_last(tmp_path: Path) -> None:
    found = []
    for flag in (False, True):
        torch.manual_seed(0)
        shared = nn.Linear(16, 16)
        model = nn.Sequential(*(Sharing(shared) for _ in range(4)))
        config = configure(
            tmp_path, "nvme", update_in_backward=flag, recompute=True, units=["Sharing", "Linear"], slabs="auto"
        )
        with attached(model, config) as engine:
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 16)).square().mean())
                engine.step()
            found.append(values(engine))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
