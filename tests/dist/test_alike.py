"""What all ranks must say alike is compared, or taken from one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.helpers import Launcher
from tests.dist.test_engine import code

NUMBERS = """
from infinity.errors import ScheduleError
for stage in (0, 1, 3):
    engine = start(stage)
    engine.backward(engine(batch(RANK)))
    engine.step()
    engine.optimizer.param_groups[0]["lr"] = 0.3 if RANK else 0.1
    engine.backward(engine(batch(RANK)))
    try:
        engine.step()
    except ScheduleError as error:
        assert "rank 1" in str(error) and "param_groups[0].lr is 0.3 (rank 0: 0.1)" in str(error), error
    else:
        raise AssertionError("other learning rates were taken")
    engine.optimizer.param_groups[0]["lr"] = 0.1
    engine.step()
    for value in engine.state_dict().values():
        same_everywhere(engine, value)
    engine.destroy()
"""


def test_a_step_with_other_numbers_than_rank_0_is_refused_until_they_are_the_same(
    launcher: Launcher, tmp_path: Path
) -> None:
    launcher.succeed(2, code(NUMBERS, tmp_path / "swap"))


VALUES = """
from infinity.errors import OffloadedError
for stage in (0, 3):
    engine = start(stage)
    weight = engine.module.head.weight
    infinity.set_full_param(weight, torch.full((1, 48), float(RANK + 5)))
    assert torch.equal(infinity.get_full_param(weight), torch.full((1, 48), 5.0))
    try:
        with infinity.gathered(weight), torch.no_grad():
            engine.module.head.weight.zero_()
    except OffloadedError as error:
        assert "modifier_rank=0" in str(error)
    else:
        raise AssertionError("a change was dropped in silence")
    try:
        with infinity.gathered(weight, modifier_rank=RANKS):
            pass
    except ValueError as error:
        assert "modifier_rank" in str(error)
    else:
        raise AssertionError("a rank that does not exist was taken")
    assert torch.equal(infinity.get_full_param(weight), torch.full((1, 48), 5.0))
    engine.destroy()
"""


def test_values_are_those_of_one_rank(launcher: Launcher, tmp_path: Path) -> None:
    launcher.succeed(2, code(VALUES, tmp_path / "swap"))


CHECKPOINTS = """
from infinity.errors import CheckpointError, StorageError
engine = start(3, "cpu")
for tag in ("one", "two"):
    engine.backward(engine(batch(RANK)))
    engine.step()
    engine.save_checkpoint(SWAP, tag)
try:
    engine.load_checkpoint(SWAP, "two" if RANK else "one")
except CheckpointError as error:
    assert "rank 1 would load" in str(error) and "two (step 2)" in str(error), error
else:
    raise AssertionError("slices of two checkpoints were mixed")
try:
    engine.save_checkpoint(SWAP, f"of-{RANK}")
except StorageError as error:
    assert "one directory that all see, one tag" in str(error)
else:
    raise AssertionError("a checkpoint in two directories was saved")
engine.load_checkpoint(SWAP)
engine.backward(engine(batch(RANK)))
engine.step()
assert engine.global_steps == 3
engine.destroy()
"""


def test_ranks_save_and_load_one_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    launcher.succeed(2, code(CHECKPOINTS, tmp_path / "swap"))


MODELS = """
from infinity.errors import ConfigError
class Expanded(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.arange(3.0).expand(4, 3))
        self.register_buffer("unknown", torch.tensor([float("nan")]))
        self.register_buffer("empty", torch.zeros(0))
engine = initialize(Expanded(), configure(1))[0]
assert torch.equal(engine.module.mask[2], torch.arange(3.0))
engine.destroy()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, index): return torch.tensor([index])
for arguments, grown, what in (({"training_data": Data()}, 0, "3 samples"), ({}, RANK, "other buffers")):
    model = Net()
    model.register_buffer("grown", torch.zeros(3 + grown))
    try:
        initialize(model, configure(1), **arguments)
    except ConfigError as error:
        assert what in str(error), error
    else:
        raise AssertionError(what)
"""


def test_buffers_are_alike_and_every_rank_has_data(launcher: Launcher, tmp_path: Path) -> None:
    launcher.succeed(2, code(MODELS, tmp_path / "swap"))


@pytest.mark.parametrize(
    ("name", "value", "ranks"),
    [("WORLD_SIZE", "many", 1), ("WORLD_SIZE", "0", 1), ("RANK", "2", 2), ("LOCAL_WORLD_SIZE", "0", 2), ("LOCAL_RANK", "9", 2)],
)
def test_what_a_launcher_left_in_the_environment_is_told(
    name: str, value: str, ranks: int, launcher: Launcher, tmp_path: Path
) -> None:
    finished = launcher.run(ranks, code(f"os.environ[{name!r}] = {value!r}\nstart(1)", tmp_path / "swap"))
    for one in finished:
        assert one.code == 1
        assert f"the environment variable {name} is '{value}'" in one.err
