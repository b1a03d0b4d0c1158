"""A feed-forward part that works through a long sequence by stretches is what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.nn.sequence import tile_sequence
from tests.engine.helpers import attached, configure, train_attached, train_plain


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 128)
        self.down = nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training))


class Block(nn.Module):
    def __init__(self, tokens: int | None) -> None:
        super().__init__()
        self.mlp = FeedForward()
        if tokens is not None:
            tile_sequence(self.mlp, tokens)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, tokens: int | None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(tokens), Block(tokens))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def built(tokens: int | None) -> Model:
    torch.manual_seed(0)
    return Model(tokens)


BATCHES = [torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def test_output_and_gradients() -> None:
    plain, tiled = built(None).eval(), built(16).eval()
    assert list(tiled.state_dict()) == list(plain.state_dict())
    x, y = BATCHES[0].clone().requires_grad_(), BATCHES[0].clone().requires_grad_()
    first, second = plain(x), tiled(y)
    assert torch.equal(first, second)
    first.backward()
    second.backward()
    torch.testing.assert_close(y.grad, x.grad)
    for (name, a), (_, b) in zip(plain.named_parameters(), tiled.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)
    with torch.no_grad():
        assert torch.equal(plain(x), tiled(x))


def test_only_one_stretch_is_kept() -> None:
    saved: list[Tensor] = []
    model = tile_sequence(FeedForward(), 5)
    x = torch.randn(50, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x)
    assert sum(t.numel() for t in saved if t.dim() == 2 and t.shape[-1] == 128) == 0, "nothing of the inside"


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("tile_bytes", ["auto", 4096])
def test_in_an_engine_with_dropout(tmp_path: Path, recompute: bool, tile_bytes: int | str) -> None:
    expected = train_plain(built(16), BATCHES, loss_of)
    with attached(built(16), configure(tmp_path, recompute=recompute, tile_bytes=tile_bytes)) as engine:
        found = train_attached(engine, BATCHES, loss_of)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_less_than_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens is 0"):
        tile_sequence(FeedForward(), 0)
