"""Every parameter is in exactly one unit, and every module that needs a unit is lent it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.errors import ConfigError
from infinity.nn.decoder import Decoder, DecoderConfig
from infinity.shard.partition import LARGE_LEAF_NUMEL, Partition, partition


def decoder(device: str = "cpu") -> Decoder:
    with torch.device(device):
        return Decoder(DecoderConfig(d_model=32, n_layers=3, n_heads=2, d_ff=64))


def names(found: Partition) -> dict[str, list[str]]:
    return {unit.name: [slot.name for slot in unit.layout.slots] for unit in found.units}


def test_blocks_embedding_head_and_the_rest() -> None:
    found = partition(decoder())
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert list(names(found)) == ["(root)", "embedding", *blocks, "head"]
    assert names(found)["(root)"] == ["norm.weight"]
    assert names(found)["blocks.1"][0] == "blocks.1.attention_norm.weight"
    assert [entry.path for entry in found.entries] == ["", "embedding", *blocks, "head"]
    assert [entry.path for entry in found.entries if entry.is_block] == blocks
    assert [unit.index for unit in found.units] == list(range(6))


def check_complete(model: nn.Module, found: Partition) -> None:
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    slots = [(slot.name, slot.shape) for unit in found.units for slot in unit.layout.slots]
    assert len(slots) == len(dict(slots))
    assert dict(slots) == expected
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    paths = {entry.path for entry in found.entries}
    modules = dict(model.named_modules())
    for unit in found.units:
        for slot, homes in zip(unit.layout.slots, unit.homes, strict=True):
            parameters = {id(modules[path]._parameters[name]) for path, name in homes}
            assert len(parameters) == 1
            assert ".".join(filter(None, homes[0])) == slot.name
            for path, _ in homes:
                while path not in paths:
                    path = path.rpartition(".")[0]
                (entry,) = [entry for entry in found.entries if entry.path == path]
                assert unit.index in entry.units, "whoever sees the parameter is lent its unit"


@given(data=st.data())
def test_any_tree_is_partitioned_completely(data: st.DataObject) -> None:
    kinds = st.sampled_from([lambda: nn.Linear(3, 4), lambda: nn.LayerNorm(5), lambda: nn.Embedding(4, 2), nn.ReLU])
    tree = st.recursive(
        kinds.map(lambda make: make()),
        lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda parts: nn.Sequential(*parts)),
        max_leaves=8,
    )
    model = data.draw(tree)
    for parameter in model.parameters():
        parameter.requires_grad_(data.draw(st.booleans()))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(linears) > 1 and data.draw(st.booleans()):
        linears[-1].weight = linears[0].weight
    check_complete(model, partition(model))
    check_complete(model, partition(model, dtype=torch.bfloat16))


def test_tied_weights_have_one_slot_and_two_homes() -> None:
    model = decoder()
    model.head.weight = model.embedding.weight
    found = partition(model)
    check_complete(model, found)
    (embedding,) = [unit for unit in found.units if unit.name == "embedding"]
    assert embedding.homes == ((("embedding", "weight"), ("head", "weight")),)
    (head,) = [entry for entry in found.entries if entry.path == "head"]
    assert head.units == (embedding.index,)


def test_frozen_parameters_and_other_dtypes_are_units_of_their_own() -> None:
    model = decoder()
    model.blocks[1].qkv.requires_grad_(False)
    model.blocks[1].register_parameter("count", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    found = partition(model, dtype=torch.bfloat16)
    check_complete(model, found)
    own = {unit.name: (unit.layout.dtype, unit.trainable) for unit in found.units if "blocks.1" in unit.name}
    assert set(own.values()) == {(torch.int64, False), (torch.bfloat16, True), (torch.bfloat16, False)}
    (entry,) = [entry for entry in found.entries if entry.path == "blocks.1"]
    assert len(entry.units) == 3


def test_the_meta_device_gives_the_same_units() -> None:
    assert partition(decoder("meta")) == partition(decoder())


def test_a_large_leaf_outside_blocks_is_a_unit() -> None:
    model = nn.Module()
    model.small = nn.LayerNorm(8)
    model.large = nn.LayerNorm(LARGE_LEAF_NUMEL // 2)
    assert "large" in names(partition(model))
    assert "small" not in names(partition(model))


def test_named_units() -> None:
    model = decoder()
    assert list(names(partition(model, ["Block"]))) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert list(names(partition(model, ["blocks.1", "RMSNorm"])))[:2] == ["(root)", "blocks.0.attention_norm"]
    with pytest.raises(
        ConfigError, match=r'units: "Blokc" matches no .*\(Block, Decoder, Embedding, Linear, RMSNorm\)'
    ):
        partition(model, ["Block", "Blokc"])


def test_what_cannot_be_trained_is_named() -> None:
    model = nn.Linear(2, 2).double()
    with pytest.raises(ConfigError, match=r"parameter weight is torch\.float64 and requires a gradient"):
        partition(model)
    assert partition(model, dtype=torch.bfloat16).units[0].layout.dtype is torch.bfloat16
