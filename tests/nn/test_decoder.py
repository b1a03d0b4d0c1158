"""The decoder is causal, counts its parameters, starts near the uniform loss, learns."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import infinity.nn.decoder
from infinity.nn.decoder import Decoder, DecoderConfig, rotary, rotate

SMALL = DecoderConfig(d_model=32, n_layers=2, n_heads=4, d_ff=48)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small lose by being shared out between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SMALL)


def test_shapes_and_every_parameter_gets_a_gradient(decoder: Decoder) -> None:
    tokens = torch.randint(256, (3, 10))
    assert decoder(tokens).shape == (3, 10, 256)
    loss = decoder(tokens, torch.randint(256, (3, 10)))
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    loss.backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_token_changes_no_earlier_logit_but_every_later_one(decoder: Decoder) -> None:
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = decoder(tokens), decoder(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@pytest.mark.parametrize("shape", [SMALL, DecoderConfig(d_model=24, n_layers=1, n_heads=3, d_ff=7, vocabulary=11)])
def test_counts_agree_with_the_modules(shape: DecoderConfig) -> None:
    with torch.device("meta"):
        decoder = Decoder(shape)
    assert shape.parameters == sum(parameter.numel() for parameter in decoder.parameters())
    assert shape.block_parameters == sum(parameter.numel() for parameter in decoder.blocks[0].parameters())


def test_the_first_loss_is_near_that_of_a_uniform_guess(decoder: Decoder) -> None:
    tokens = torch.randint(256, (8, 33))
    assert decoder(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(256), rel=0.015)


def test_learns_a_repeated_line(decoder: Decoder) -> None:
    line = torch.tensor([list(b"from __future__ import annotations\n" * 2)])
    optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        loss = decoder(line[:, :-1], line[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


def test_rotation_depends_on_the_distance_only() -> None:
    cos, sin = rotary(40, 16, 10_000.0, torch.device("cpu"))
    query, key = torch.randn(2, 16)
    products = [
        (rotate(query, cos[i], sin[i]) * rotate(key, cos[i + 5], sin[i + 5])).sum().item() for i in (0, 3, 20, 34)
    ]
    assert products == pytest.approx([products[0]] * 4, rel=1e-4, abs=1e-4)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 2 \\* n_heads = 14"):
        DecoderConfig(d_model=32, n_layers=1, n_heads=7, d_ff=8)


def test_imports_nothing_of_the_runtime() -> None:
    tree = ast.parse(Path(infinity.nn.decoder.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name and name.startswith("infinity") for name in imported)
