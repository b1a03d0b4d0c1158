"""Slab sizes, slab counts, traffic: the arithmetic of a plan."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import Config
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.plan.memory import plan_memory
from infinity.plan.slabs import PERSISTENT_BYTES, slab_classes
from infinity.shard.layout import flat_layout
from infinity.shard.partition import Entry, Partition, Unit, partition
from infinity.tier import PAGE_BYTES, StateKind, Tier

ON_NVME = dict.fromkeys(("param", "grad", "master", "exp_avg", "exp_avg_sq"), "nvme")


def unit(index: int, numel: int = 2048, dtype: torch.dtype = torch.bfloat16, trainable: bool = True) -> Unit:
    return Unit(index, f"u{index}", flat_layout([(f"u{index}", (numel,))], dtype), trainable, ((("", f"u{index}"),),))


def chain(*sizes: int, is_block: bool = True) -> Partition:
    """A root unit, then one entry for each further size."""
    units = tuple(unit(index, numel) for index, numel in enumerate(sizes))
    paths = ["", *(f"block{index}" for index in range(1, len(sizes)))]
    return Partition(units, tuple(Entry(path, (index,), is_block) for index, path in enumerate(paths)))


def config(placement: Any = None, zero: Any = None, **own: Any) -> Config:
    return Config.load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, **(zero or {})},
            "infinity": {"placement": placement or ON_NVME, "nvme_path": "/nonexistent", **own},
        }
    )


@given(sizes=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=20))
def test_a_slab_fits_its_units_and_wastes_at_most_a_quarter(sizes: list[int]) -> None:
    units = [unit(index) for index in range(len(sizes))]
    classes = slab_classes(units, sizes)
    assert sorted(member.index for members in classes.values() for member in members) == list(range(len(sizes)))
    for ceiling, members in classes.items():
        inside = [sizes[member.index] for member in members]
        assert max(inside) == ceiling
        assert min(inside) >= ceiling - ceiling // 4


def test_slabs_for_what_is_lent_at_once_then_as_asked() -> None:
    large = PERSISTENT_BYTES
    found = chain(large, large, large, large, 2 * large)
    counts = plan_memory(found, config(slabs=1)).param_slabs
    assert counts == {2 * large: 2, 4 * large: 1}, "the root's slab stays in use while each of its blocks runs"
    assert plan_memory(found, config(slabs=3)).param_slabs == {2 * large: 3, 4 * large: 1}
    assert plan_memory(found, config()).param_slabs == {2 * large: 4, 4 * large: 1}
    assert plan_memory(chain(*[large] * 9), config()).param_slabs == {2 * large: 4}


def test_small_units_keep_slabs_of_their_own_unless_told_otherwise() -> None:
    found = chain(*[2048] * 9)
    assert plan_memory(found, config()).param_slabs == {PAGE_BYTES: 9}
    assert plan_memory(found, config(slabs=2)).param_slabs == {PAGE_BYTES: 2}
    assert plan_memory(found, config(device_memory=5 * PAGE_BYTES)).param_slabs == {PAGE_BYTES: 5}


@given(spare=st.integers(0, 40), large=st.integers(1, 4))
def test_a_device_budget_is_filled_and_never_passed(spare: int, large: int) -> None:
    numel = large * PERSISTENT_BYTES
    found = chain(2048, *[numel] * 6, 2048)
    least = plan_memory(found, config(slabs=1)).total(Tier.DEVICE)
    budget = least + spare * PERSISTENT_BYTES // 2
    plan = plan_memory(found, config(device_memory=budget))
    assert plan.total(Tier.DEVICE) <= budget
    left = budget - plan.total(Tier.DEVICE)
    for nbytes, count in plan.param_slabs.items():
        units = 6 if nbytes == 2 * numel else 2
        assert count == units or nbytes > left, "another slab would have fitted"


def test_nested_entries_are_lent_together() -> None:
    units = tuple(unit(index, PERSISTENT_BYTES) for index in range(4))
    entries = (Entry("", (0,), False), Entry("a", (1,), True), Entry("a.b", (2, 3), True), Entry("ab", (1,), True))
    assert plan_memory(Partition(units, entries), config(slabs=1)).param_slabs == {2 * PERSISTENT_BYTES: 4}
    apart = (Entry("", (0,), False), Entry("a", (1,), True), Entry("ab", (2,), True), Entry("c", (3,), True))
    assert plan_memory(Partition(units, apart), config(slabs=1)).param_slabs == {2 * PERSISTENT_BYTES: 2}


def test_traffic_of_an_update_is_twelve_and_fourteen_bytes() -> None:
    found = chain(2048, 4096, 6144)
    elements = sum(member.layout.numel for member in found.units)
    host_gradients = plan_memory(found, config({**ON_NVME, "grad": "host"}))
    assert (host_gradients.update_read, host_gradients.update_written) == (12 * elements, 14 * elements)
    all_on_nvme = plan_memory(found, config())
    assert (all_on_nvme.update_read, all_on_nvme.update_written) == (16 * elements, 14 * elements)
    on_host = plan_memory(found, config(dict.fromkeys(ON_NVME, "host")))
    assert (on_host.update_read, on_host.update_written) == (0, 0)


def test_frozen_units_have_parameters_only() -> None:
    units = (unit(0), unit(1, trainable=False))
    plan = plan_memory(Partition(units, (Entry("", (0, 1), False),)), config())
    swapped = {line.purpose: line.nbytes for line in plan.lines if line.tier is Tier.NVME}
    assert swapped == {
        "parameters, swap": 2 * PAGE_BYTES,
        "gradients, swap": 2 * PAGE_BYTES,
        "fp32 masters, swap": 2 * PAGE_BYTES,
        "exp_avg, swap": 2 * PAGE_BYTES,
        "exp_avg_sq, swap": 2 * PAGE_BYTES,
    }
    assert (plan.update_read, plan.update_written) == (16 * 2048, 14 * 2048)


def test_staging_is_as_deep_as_it_is_used() -> None:
    found = chain(*[20_480] * 3)
    plan = plan_memory(found, config(zero={"sub_group_size": 2048}), read_ahead=2)
    counts = {kind: line.count for kind, line in plan.staging.items()}
    moving = (StateKind.PARAM, StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
    assert counts == {StateKind.GRAD: 3, **dict.fromkeys(moving, 5)}
    one = plan_memory(chain(2048), config())
    assert {line.count for line in one.staging.values()} == {1}, "one sub-group needs no second slab"


def test_a_small_host_budget_makes_sub_groups_smaller() -> None:
    found = chain(*[1 << 20] * 3)
    ample = plan_memory(found, config())
    tight = plan_memory(found, config(host_memory=ample.total(Tier.HOST) - 1))
    assert tight.subgroup_numel == ample.subgroup_numel // 2
    assert tight.total(Tier.HOST) < ample.total(Tier.HOST)


def test_the_table_adds_up() -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig(d_model=64, n_layers=2, n_heads=2, d_ff=128))
    plan = plan_memory(partition(model, dtype=torch.bfloat16), config())
    text = plan.render()
    assert f"{plan.parameters:,} parameters" in text
    for tier in Tier:
        assert sum(line.total for line in plan.lines if line.tier is tier) == plan.total(tier)
        assert f"{tier.value} " in text
    assert f"{plan.subgroup_numel:,} elements, {plan.ring} in flight" in text
